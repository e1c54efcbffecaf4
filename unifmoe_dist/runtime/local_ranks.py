"""Jobs whose ranks this process starts itself, on one machine: sweeps, measurements and tests."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.launchers import free_port

_SLOW_IMPORTS = (
    "torch torch._dynamo torch.utils.tensorboard deepspeed timm transformers.optimization sklearn.datasets".split()
)


def process_context(*modules: str) -> Any:
    """How to start processes that train: multiprocessing's context, with the slow imports done once on the CPU.

    `modules` are imported beside the libraries; who asks first in a process decides which.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")  # CUDA forbids forking
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns of what it finds otherwise
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_SLOW_IMPORTS, *modules])  # forked with all in memory, a rank starts in a moment
    return context


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher would say to a rank of a job on this machine alone."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {name: str(value) for name, value in {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()}


def write_output_to(path: str | os.PathLike) -> None:
    """Have all that this process prints from now on appended to a file, libraries' own output included."""
    written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.close(written)


def check_world_size(world_size: int) -> None:
    """Refuse more ranks than GPUs; on the CPU any number may share the cores.

    Raises:
        UserError: there are GPUs, but fewer than ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < world_size:
        raise UserError(f"{world_size} ranks need {world_size} GPUs, but this machine has {gpus}; use at most {gpus}.")


def run_local_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, threads: int = 1, timeout: float = 600.0
) -> list[Any]:
    """`LocalRanks.run` in processes of its own."""
    module = () if function.__module__ == "__main__" else (function.__module__,)
    with closing(LocalRanks(world_size, threads, *module)) as ranks:
        return ranks.run(function, *args, timeout=timeout)


class LocalRanks:
    """Processes that are the ranks of one job after the other, until they are closed.

    What ranks print is dropped, save the end of it when one dies without a word. `threads` are those of each rank,
    `modules` as of `process_context`. Raises UserError for more ranks than GPUs.
    """

    def __init__(self, world_size: int, threads: int = 1, *modules: str) -> None:
        check_world_size(world_size)
        self.world_size, self.threads = world_size, threads
        self._context = process_context(*modules)
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
        """Results of `function(*args)` on every rank, in rank order.

        The function must be importable by name and joins the job itself (`runtime.ranks.running_ranks`): the
        environment says what a launcher would, with a port of its own for every call. The first rank to fail takes the
        others down, and the next call starts new ones.

        Raises:
            UserError: what a rank raised as UserError; no result within `timeout` seconds.
            RuntimeError: any other failure, with the rank's traceback.
        """
        if not self._processes:
            self._start()
        try:
            job = pickle.dumps((free_port(), function, args))  # not the pipe's own way: tensors would go as handles
            for pipe in self._pipes:
                pipe.send_bytes(job)
            return self._collect(timeout)
        except BaseException:
            self._end()
            raise

    def _output(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank-{rank}")

    def _start(self) -> None:
        for rank in range(self.world_size):
            here, there = self._context.Pipe()
            job = (there, self._output(rank), rank, self.world_size, self.threads)
            process = self._context.Process(target=_work, args=job)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # for a rank that waits for work, the sign to leave
        for process in self._processes:
            process.join(0 if process.exitcode is not None else 1)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def _collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(self.world_size) if rank not in results]
                raise UserError(f"ranks {missing} gave no result within {timeout:g} s.")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                results[rank] = self._result(rank)
        return [results[rank] for rank in range(self.world_size)]

    def _result(self, rank: int) -> Any:
        try:
            kind, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            output = self._output(rank)
            last = output.read_text(errors="replace")[-2000:] if output.is_file() else ""
            raise RuntimeError(f"rank {rank} died without a result. Its last output:\n{last}") from None
        if kind == "user error":
            raise UserError(value)
        if kind == "error":
            raise RuntimeError(f"rank {rank} failed:\n{value}")
        # Results are any Python objects, and come from this process's own children through a private pipe.
        return torch.load(io.BytesIO(value), weights_only=False)


def _work(pipe: Connection, output: Path, rank: int, world_size: int, threads: int) -> None:
    write_output_to(output)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    while True:
        try:
            port, function, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(rank_environment(rank, world_size, port))
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
