"""Run a function on several real gloo processes and bring back what each returned."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

PLOTS = "UNIFMOE_TESTS_PLOTS"  # set where a run is to draw its plots: they take as long as most runs here
_context = multiprocessing.get_context("forkserver")
_KEPT = (2, 4)  # worlds whose processes stay, with their group, for the next function
_kept: dict[int, _Ranks] = {}


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 120, fresh: bool = False, **kwargs: Any
) -> list[Any]:
    """Results of function(rank, world, *args, **kwargs), in rank order; an error or a hang fails the caller.

    The default group is there when the function starts. Processes serve one function after another, until one fails.

    Args:
        world: Number of ranks.
        function: What each rank runs; importable by name.
        timeout: Seconds until ranks without a result are taken for hung.
        fresh: In processes of their own, for functions that start DeepSpeed, patch modules or end ranks.
    """
    if fresh or world not in _KEPT:
        ranks = _Ranks(world)
        try:
            return ranks.run(timeout, function, args, kwargs)
        finally:
            ranks.end()
    ranks = _kept.pop(world, None) or _Ranks(world)
    try:
        results = ranks.run(timeout, function, args, kwargs)
    except BaseException:
        ranks.end()
        raise
    if ranks.usable:
        _kept[world] = ranks
    else:
        ranks.end()
    return results


@atexit.register
def end_ranks() -> None:
    """End the processes that wait for another function."""
    while _kept:
        _kept.popitem()[1].end()


class _Ranks:
    """The processes of one group."""

    def __init__(self, world: int) -> None:
        self.usable = True
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, world, f"{self._folder.name}/store", there))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, timeout: float, function: Callable[..., Any], args: tuple, kwargs: dict) -> list[Any]:
        words = pickle.dumps((function, args, kwargs))  # not the pipe's own way: tensors would travel as handles
        for pipe in self._pipes:
            pipe.send_bytes(words)
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        end = time.monotonic() + timeout
        while missing := [rank for rank in range(len(self._pipes)) if rank not in results | failed]:
            ready = wait([self._pipes[rank] for rank in missing], max(0.0, end - time.monotonic()))
            if not ready and failed:
                break  # the others wait for the ranks that failed
            assert ready, f"ranks {missing} gave no result within {timeout} s"
            for rank in missing:
                if self._pipes[rank] not in ready:
                    continue
                kind, value = self._receive(rank)
                (failed if kind == "error" else results)[rank] = value
                self.usable &= kind == "ok"
                if kind == "error":
                    end = min(end, time.monotonic() + 2)
        assert not failed, "\n".join(f"rank {rank}:\n{value}" for rank, value in sorted(failed.items()))
        return [torch.load(io.BytesIO(results[rank]), weights_only=False) for rank in range(len(results))]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return "error", f"died without a result, with status {self._processes[rank].exitcode}"

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # the sign to leave
        for process in self._processes:
            process.join(5 if self.usable else 0.5)
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    before, group = dict(os.environ), dist.group.WORLD
    kind = "ok"
    while kind == "ok":
        try:
            words = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            break
        try:
            function, args, kwargs = pickle.loads(words)
            value = io.BytesIO()
            torch.save(function(rank, world, *args, **kwargs), value)
            kind = "ok" if _as_before(before, group) else "last"
            connection.send((kind, value.getvalue()))
        except BaseException:
            kind = "error"
            connection.send((kind, traceback.format_exc()))
    connection.close()
    if kind == "error":
        os._exit(1)  # with a live group, leaving in order can wait for ranks that never come
    if dist.is_initialized():
        dist.destroy_process_group()


def _as_before(environment: dict[str, str], group: dist.ProcessGroup) -> bool:
    """Take back what a function may leave behind; whether that was all."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    engines = sys.modules.get("deepspeed.comm.comm")
    if not dist.is_initialized() or dist.group.WORLD is not group or (engines and engines.cdb is not None):
        return False
    for other in [*dist.distributed_c10d._world.pg_map]:
        if other is not group:
            dist.destroy_process_group(other)
    return True
