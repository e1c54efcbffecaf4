"""Jobs whose ranks this process starts itself, on one machine: sweeps, measurements and tests."""

import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
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
        self._ranks: list[ProcessPoolExecutor] = []  # of one process each

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
        if not self._ranks:
            beginnings = [(self._output(rank), self.threads) for rank in range(self.world_size)]
            self._ranks = [ProcessPoolExecutor(1, self._context, _begin, given) for given in beginnings]
        try:
            job, port = _packed((function, args)), free_port()
            ranks = enumerate(self._ranks)
            futures = [pool.submit(_work, job, rank_environment(rank, self.world_size, port)) for rank, pool in ranks]
            wait(futures, timeout, FIRST_EXCEPTION)
            for rank, future in enumerate(futures):
                if future.done() and (error := future.exception()):
                    raise self._death(rank) if isinstance(error, BrokenProcessPool) else error
            if missing := [rank for rank, future in enumerate(futures) if not future.done()]:
                raise UserError(f"ranks {missing} gave no result within {timeout:g} s.")
            return [_unpacked(future.result()) for future in futures]
        except BaseException:
            self._end()
            raise

    def _output(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank-{rank}")

    def _death(self, rank: int) -> RuntimeError:
        output = self._output(rank)
        last = output.read_text(errors="replace")[-2000:] if output.is_file() else ""
        return RuntimeError(f"rank {rank} died without a result. Its last output:\n{last}")

    def _end(self) -> None:
        """Ranks that wait for work leave; with a live process group, others may wait for ranks that never come."""
        processes = [process for pool in self._ranks for process in (pool._processes or {}).values()]
        for pool in self._ranks:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join(1)
            process.kill()
        for pool in self._ranks:
            pool.shutdown()
        self._ranks = []


def _begin(output: Path, threads: int) -> None:
    write_output_to(output)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def _work(job: bytes, environment: dict[str, str]) -> bytes:
    os.environ.update(environment)
    try:
        function, args = _unpacked(job)
        return _packed(function(*args))
    except UserError:
        raise
    except BaseException as error:
        raise RuntimeError(f"rank {environment['RANK']} failed:\n{traceback.format_exc()}") from error


def _packed(value: object) -> bytes:
    """As bytes: tensors themselves would travel as handles that die with their process."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    """Any Python object, from this process's parent or child, through a private pipe."""
    return torch.load(io.BytesIO(packed), weights_only=False)
