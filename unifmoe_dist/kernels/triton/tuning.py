"""Which tiles a kernel takes: Triton's autotuner, with its choices on disk, made safe for where these kernels run.

Triton times every candidate at the first use of a shape and type, and keeps the timings in its cache folder
(`TRITON_CACHE_DIR`, else ~/.triton/cache) under the device, the versions of Triton and driver, the kernel's source and
the candidates, so a later process takes the winner at once.
"""

# The autotuner's methods and arguments have no types.
# mypy: allow-untyped-defs

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from unifmoe_dist.kernels.triton.math import INTERPRETED

Tiles = list[tuple[int, int, int, int]]  # (first block, second block, warps, stages)
_enabled = True


@contextlib.contextmanager
def first_tiles() -> Iterator[None]:
    """Launches inside take the first candidate without a trial, and leave no choice behind."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def may_try() -> bool:
    """Whether candidates may be timed now: not while a CUDA graph is captured, which would record the trials."""
    return _enabled and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class Tuner(Autotuner):
    """Triton's autotuner, except that a launch which may not try candidates decides nothing for later ones, and that a
    damaged file of choices is ignored."""

    def run(self, *args, **kwargs):
        if may_try():
            return super().run(*args, **kwargs)
        known = set(self.cache)
        try:
            return super().run(*args, **kwargs)
        finally:
            for key in self.cache.keys() - known:
                del self.cache[key]

    def check_disk_cache(self, tuning_key, configs, bench_fn):
        try:
            return super().check_disk_cache(tuning_key, configs, bench_fn)
        except (ValueError, KeyError, TypeError, OSError):  # no JSON, other fields, or an unreadable or full disk
            if tuning_key not in self.cache:
                bench_fn()
            return False


def tuned(names: tuple[str, str], half: Tiles, single: Tiles) -> Callable[[Any], Autotuner]:
    """Decorate a kernel whose arguments `names` are the blocks of a tile, to be chosen among those for half or single
    precision.

    The first of each list fits every device from Ampere on, 99 KiB of shared memory and no spilling to speak of; a
    device skips those that do not fit. The interpreter cannot time and takes the first.
    """

    def configs(tiles: Tiles) -> list[triton.Config]:
        return [triton.Config({names[0]: a, names[1]: b}, num_warps=w, num_stages=s) for a, b, w, s in tiles]

    halves, singles = configs(half), configs(single)

    def worth_trying(_: list[triton.Config], arguments: dict, **more: Any) -> list[triton.Config]:
        given = {**arguments, **more}
        pool = singles if given["keys" if "keys" in given else "channels_0"].dtype == torch.float32 else halves
        # More than 128 accumulators a thread only spill. The backward pass holds one more tile of them than the forward
        # pass, and gated experts one more in both.
        accumulators = 0
        if "NUM_SUB" in given:
            tiles = 1 + given["BACKWARD"] + given["GATED"]
            accumulators = tiles * given["TILE_ROWS"] * given["SUB"] * given["NUM_SUB"]
        return [c for c in pool if may_try() and accumulators <= 128 * 32 * c.num_warps] or pool[:1]

    if INTERPRETED:
        return triton.autotune(configs=halves[:1], key=[])
    return lambda kernel: Tuner(
        kernel,
        kernel.arg_names,
        halves,
        ["D", "M", "TILE_ROWS", "BACKWARD", "GATED"],
        reset_to_zero=None,
        restore_value=None,
        prune_configs_by={"early_config_prune": worth_trying},
        cache_results=True,
    )
