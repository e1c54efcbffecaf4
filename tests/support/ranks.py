"""Run a function on several real gloo processes and bring back what each returned."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.local_ranks import LocalRanks

PLOTS = "UNIFMOE_TESTS_PLOTS"  # set where a run is to draw its plots: they take as long as most runs here
_context = multiprocessing.get_context("forkserver")
_KEPT = (2, 4)  # worlds whose processes stay, with their group, for the next function
_kept: dict[int, LocalRanks] = {}


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
    keep = world in _KEPT and not fresh
    ranks = (_kept.pop(world, None) if keep else None) or LocalRanks(world)
    try:
        results = ranks.run(_in_group, function, args, kwargs, timeout=timeout)
    except (UserError, RuntimeError) as error:
        ranks.close()
        raise AssertionError(str(error)) from error
    if keep and all(as_before for _, as_before in results):
        _kept[world] = ranks
    else:
        ranks.close()
    return [value for value, _ in results]


@atexit.register
def end_ranks() -> None:
    """End the processes that wait for another function."""
    while _kept:
        _kept.popitem()[1].close()


def _in_group(function: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[Any, bool]:
    """What the function gives on this rank, and whether the process may serve another one."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    before, group = dict(os.environ), dist.group.WORLD
    value = function(rank, world, *args, **kwargs)
    return value, _as_before(before, group)


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
