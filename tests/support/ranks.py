"""Run a function on several real gloo processes and bring back what each returned."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# What all ranks import is imported once, before they are forked. Not with a GPU: CUDA does not survive a fork.
_HEAVY = [
    "sklearn.datasets",
    "timm",
    "transformers",
    "deepspeed",
    "torch.utils.tensorboard",
    "unifmoe_dist.train.trainer",
    "unifmoe_dist.studies.training_plots",
]
_context.set_forkserver_preload(["torch", "unifmoe_dist.layer", *([] if torch.cuda.is_available() else _HEAVY)])


def _main(
    rank: int, world: int, store: str, connection: Any, function: Callable[..., Any], args: tuple, kwargs: dict
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        buffer = io.BytesIO()  # bytes, not tensors: those travel as handles that die with this process
        torch.save(function(rank, world, *args, **kwargs), buffer)
        connection.send(("ok", buffer.getvalue()))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    finally:
        connection.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
    """Results of function(rank, world, *args, **kwargs), in rank order; an error fails the caller."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_main, args=(rank, world, os.path.join(folder, "store"), there, function, args, kwargs)
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            outcomes = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout), f"rank {rank} gave no result within {timeout} s"
                outcomes.append(pipe.recv())
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    failed = [f"rank {rank}:\n{value}" for rank, (kind, value) in enumerate(outcomes) if kind == "error"]
    assert not failed, "\n".join(failed)
    return [torch.load(io.BytesIO(value), weights_only=False) for _, value in outcomes]
