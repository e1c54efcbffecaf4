"""Which tiles a kernel takes: Triton's autotuner, with its choices on disk, made safe for where these kernels run.

There are two or three candidates, by the shared memory that a program may have: 163 KiB or more on data-centre cards
(sm_80, sm_90), 99 on others (sm_86, sm_89). The first is what registers and shared memory of the compiled kernels let
expect to be fastest (`launch/kernel_estimates.py`); no card has been asked yet. Each is timed at the first use of a
shape and type, without more memory than the kernel itself takes, and Triton keeps the timings in its cache folder
(`TRITON_CACHE_DIR`, else ~/.triton/cache) under the device, the versions of Triton and driver, the kernel's source and
the candidates, so a later process takes the winner at once.
"""

# The autotuner's methods and arguments have no types.
# mypy: allow-untyped-defs

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from unifmoe_dist.kernels.triton.math import INTERPRETED

Tiles = list[tuple[int, int, int, int]]  # (first block, second block, warps, stages)
LARGE = 128 * 1024
_held_back = 0  # of how many at once, perhaps in several threads, no candidate may be tried
_one_at_a_time = threading.RLock()  # threads of nn.DataParallel, say; an autotuner keeps a launch's arguments in itself


@dataclass(frozen=True)
class Candidates:
    """Tiles to choose from, the likeliest first, which must fit every device of its kind.

    Args:
        large: Half precision where a program may have at least `LARGE` bytes of shared memory.
        small: Half precision elsewhere.
        single: Float32.
        wide: Half precision of gated blocks of more than 128 channels; the last must fit where there is little memory.
    """

    large: Tiles
    small: Tiles
    single: Tiles
    wide: Tiles = field(default_factory=list)

    def of(self, dtype: torch.dtype, device: torch.device, dim: int, gated: bool = False, channels: int = 0) -> Tiles:
        """Those for a model width of `dim`, which first blocks cut: fewest columns beyond it first."""
        large = dtype != torch.float32 and shared_memory(device) >= LARGE
        tiles = self.single if dtype == torch.float32 else self.large if large else self.small
        if gated and channels > 128:
            tiles = self.wide if large else self.wide[-1:]
        return sorted(tiles, key=lambda sizes: -dim % sizes[0])


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; of what is no GPU, as much as the largest has."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 2**20))


@contextlib.contextmanager
def first_tiles() -> Iterator[None]:
    """Launches inside take the first candidate without a trial, and leave no choice behind."""
    global _held_back
    with _one_at_a_time:
        _held_back += 1
    try:
        yield
    finally:
        with _one_at_a_time:
            _held_back -= 1


def may_try() -> bool:
    """Whether candidates may be timed now: not while a CUDA graph is captured, which would record the trials."""
    return not _held_back and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class Tuner(Autotuner):
    """Triton's autotuner, except that threads take turns, that cards choose for themselves, that a launch which may not
    try candidates decides nothing for later ones, and that a damaged file of choices is ignored."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.by_card = {}

    def run(self, *args, **kwargs):
        with _one_at_a_time:
            card = torch.cuda.current_device() if torch.cuda.is_available() else None
            self.cache = self.by_card.setdefault(card, {})
            if may_try():
                return super().run(*args, **kwargs)
            known = set(self.cache)
            try:
                return super().run(*args, **kwargs)
            finally:
                for key in self.cache.keys() - known:
                    del self.cache[key]

    def _bench(self, *args, config, **meta):
        try:
            return super()._bench(*args, config=config, **meta)
        except RuntimeError as error:
            if "PassManager" not in str(error):  # of Triton's compiler, which it takes for the caller's failure
                raise
            return [float("inf")] * 3  # another candidate runs

    def check_disk_cache(self, tuning_key, configs, bench_fn):
        if len(configs) == 1:  # which Triton 3.5 would time, and keep
            self.cache[tuning_key] = configs[0]
            return True
        try:
            return super().check_disk_cache(tuning_key, configs, bench_fn)
        except (ValueError, KeyError, TypeError, OSError):  # no JSON, other fields, or an unreadable or full disk
            if tuning_key not in self.cache:
                bench_fn()
            return False


def _milliseconds(launch: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
    """Quantiles of the times of a few launches, as of `triton.testing.do_bench`, which takes 256 MB for that."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * _TIMES)]
    launch()
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor([a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)])
    return [float(times.quantile(q)) for q in quantiles]


_TIMES = 9


def tuned(names: tuple[str, str], tiles: Candidates) -> Callable[[Any], Autotuner]:
    """Decorate a kernel whose arguments `names` are the blocks of a tile.

    The interpreter cannot time and takes the first; where nothing may be tried, so does a device.
    """

    def config(a: int, b: int, warps: int, stages: int) -> triton.Config:
        return triton.Config({names[0]: a, names[1]: b}, num_warps=warps, num_stages=stages)

    everything = dict.fromkeys([*tiles.large, *tiles.small, *tiles.single, *tiles.wide])
    configs = {sizes: config(*sizes) for sizes in everything}

    def worth_trying(_: list[triton.Config], arguments: dict, **more: Any) -> list[triton.Config]:
        given = {**arguments, **more}
        like = given["keys" if "keys" in given else "channels_0"]
        pool = [
            configs[sizes]
            for sizes in tiles.of(like.dtype, like.device, given["D"], bool(given.get("GATED")), given["M"])
        ]
        return pool if may_try() else pool[:1]

    if INTERPRETED:
        return triton.autotune(configs=[config(*tiles.small[0])], key=[])
    return lambda kernel: Tuner(
        kernel,
        kernel.arg_names,
        list(configs.values()),
        ["D", "M", "TILE_ROWS", "BACKWARD", "GATED", "MATRICES"],
        reset_to_zero=None,
        restore_value=None,
        prune_configs_by={"early_config_prune": worth_trying},
        do_bench=_milliseconds,
        cache_results=True,
    )
