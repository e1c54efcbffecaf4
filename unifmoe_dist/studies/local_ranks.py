"""Jobs whose ranks this process starts itself, on one machine: sweeps and measurements."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.launchers import free_port

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "deepspeed",
    "timm",
    "transformers.optimization",
    "sklearn.datasets",
    "unifmoe_dist.train.trainer",
    "unifmoe_dist.studies.training_plots",
]


def run_local_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, threads: int = 1, timeout: float = 600.0
) -> list[Any]:
    """Results of `function(*args)` in `world_size` new processes, in rank order.

    The function must be importable by name and joins the job itself (`engine.ranks.running_ranks`); the environment
    says what a launcher would. What ranks print is dropped, save the end of it when one dies without a word. The first
    rank to fail takes the others down.

    Args:
        world_size: Ranks; with GPUs, at most their number.
        function: What each rank runs.
        args: Its arguments, which must pickle.
        threads: CPU threads of each rank.
        timeout: Seconds until the ranks are taken for hung.

    Raises:
        UserError: more ranks than GPUs; what a rank raised as UserError; no result within `timeout`.
        RuntimeError: any other failure, with the rank's traceback.
    """
    check_world_size(world_size)
    context = process_context()
    port = free_port()
    pipes: list[Connection] = []
    processes = []
    folder = tempfile.TemporaryDirectory()
    outputs = [Path(folder.name, f"rank-{rank}") for rank in range(world_size)]
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": threads,
            }
            job = (there, outputs[rank], environment, threads, function, args)
            process = context.Process(target=_rank_main, args=job)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        return _collect(pipes, outputs, timeout)
    finally:
        for process in processes:
            process.join(0 if process.exitcode is not None else 1)
            if process.is_alive():
                process.kill()
                process.join()
        folder.cleanup()


def check_world_size(world_size: int) -> None:
    """Refuse more ranks than GPUs; on the CPU any number may share the cores.

    Raises:
        UserError: there are GPUs, but fewer than ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < world_size:
        raise UserError(f"{world_size} ranks need {world_size} GPUs, but this machine has {gpus}; use at most {gpus}.")


def process_context() -> Any:
    """How to start processes that train: multiprocessing's context, with the slow imports done once on the CPU."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")  # CUDA forbids forking
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns of what it finds otherwise
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # forked with the libraries in memory, a rank starts in a moment
    return context


def _collect(pipes: list[Connection], outputs: list[Path], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise UserError(f"ranks {missing} gave no result within {timeout:g} s.")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, value = pipes[rank].recv()
            except EOFError:
                last = outputs[rank].read_text(errors="replace")[-2000:] if outputs[rank].is_file() else ""
                raise RuntimeError(f"rank {rank} died without a result. Its last output:\n{last}") from None
            if kind == "user error":
                raise UserError(value)
            if kind == "error":
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            # Results are any Python objects, and come from this process's own children through a private pipe.
            results[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection, output: Path, environment: dict[str, Any], threads: int, function: Callable[..., Any], args: tuple
) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # libraries report their loading and profiling on both
        os.dup2(written, stream)
    torch.set_num_threads(threads)
    try:
        buffer = io.BytesIO()  # bytes, not tensors: those would travel as handles that die with this process
        torch.save(function(*args), buffer)
        pipe.send(("ok", buffer.getvalue()))
    except UserError as error:
        pipe.send(("user error", str(error)))
        os._exit(2)  # with a live process group, leaving in order can wait for ranks that never come
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        os._exit(1)
