"""How tiles are chosen: by times, once for a shape and card, whatever threads do meanwhile. The clock is made up."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from tests.support.threads import in_threads
from unifmoe_dist.kernels.triton import tuning
from unifmoe_dist.kernels.triton.tuning import Candidates, first_tiles, tuned


class _Device:
    """What Triton's file of choices asks of a device driver."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 86, 32)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes the first tiles")
def test_choice_of_tiles(tmp_path, monkeypatch):
    """The fastest by a made-up clock, chosen once and kept on disk; a trial run, a capture or damage spoils nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from unifmoe_dist.kernels.triton.weight_gradients import weight_grad_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", _Device())
    launched, timed = [], []
    monkeypatch.setattr(JITFunction, "run", lambda self, BLOCK_D, **kwargs: launched.append(BLOCK_D))

    def clock(launch, quantiles):
        launch()
        timed.append(launched[-1])
        return [1.0 / launched[-1]] * 3

    def kernel():
        half, single = [(16, 16, 4, 2), (64, 16, 4, 2), (32, 16, 4, 2)], [(16, 16, 4, 2)]
        made = tuned(("BLOCK_D", "BLOCK_R"), Candidates(large=half, small=single, single=single))(weight_grad_kernel.fn)
        made._do_bench = clock
        return made

    def taken(made, dtype=torch.bfloat16, width=64):
        made[(1,)](channels_0=torch.zeros(1, dtype=dtype), D=width, M=16, TILE_ROWS=16)
        return launched[-1]

    first = kernel()
    # Triton 3.5 comes here with a single candidate as well, perhaps while a graph is captured.
    assert first.check_disk_cache("a shape", first.configs[:1], lambda: timed.append(0)) and not timed
    assert first.cache.pop("a shape") == first.configs[0] and not list(tmp_path.iterdir())
    with first_tiles():
        assert taken(first) == 16 and not timed
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert taken(first) == 16 and not timed
    assert taken(first) == 64 and sorted(timed) == [16, 32, 64]
    with first_tiles():
        assert taken(first) == 64
    timed.clear()
    assert taken(first) == taken(kernel()) == 64 and not timed  # a new process would find it on disk
    assert taken(first, torch.float32) == 16 and not timed  # nothing to choose from
    assert taken(kernel(), width=128) == 64 and timed  # another shape

    timed.clear()
    files = list(tmp_path.rglob("*.autotune.json"))
    assert len(files) == 2
    for file, damage in zip(files, ("{", '{"configs_timings": []}'), strict=True):
        file.write_text(damage)
    assert taken(kernel()) == taken(kernel(), width=128) == 64 and len(timed) == 6


class _Kernel:
    """What Triton's autotuner asks of a kernel."""

    arg_names = ("x", "D", "M", "BLOCK")

    def __init__(self):
        self.took = []

    @staticmethod
    def fn(x, D, M, BLOCK):  # noqa: N803
        pass

    def run(self, *_, BLOCK, **__):  # noqa: N803
        time.sleep(0.002)  # as a launch may, it lets other threads go on
        self.took.append(BLOCK)


def tuner(kernel, clock=lambda took: 1.0):
    import triton

    def bench(launch, quantiles):
        launch()
        time.sleep(0.02)
        return [clock(kernel.took[-1])] * 3

    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
    return tuning.Tuner(kernel, list(kernel.arg_names), configs, ["D", "M"], None, None, do_bench=bench)


def launch(of, dim=64):
    of.run(x=torch.zeros(1), D=dim, M=64, grid=(1,), warmup=False)


def test_threads_that_tune_one_kernel():
    """As of nn.DataParallel: an autotuner keeps the arguments of a launch in itself, and one thread took another's."""
    kernel = _Kernel()
    of = tuner(kernel, clock=lambda block: 1.0 / block)
    assert in_threads(*[lambda: launch(of)] * 3, lambda: launch(of, 128)) == []
    assert sum(len(choices) for choices in of.by_card.values()) == 2
    launch(of)
    assert kernel.took[-1] == 64


def test_a_candidate_that_does_not_compile_is_not_taken():
    kernel = _Kernel()
    of = tuner(kernel, clock=lambda block: 1.0 / block)
    run = kernel.run

    def broken(*arguments, BLOCK, **more):  # noqa: N803
        if BLOCK == 64:
            raise RuntimeError("PassManager::run failed")
        run(*arguments, BLOCK=BLOCK, **more)

    kernel.run = broken
    launch(of)
    assert kernel.took[-1] == 32
    kernel.run = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory"):
        launch(of, 128)


def test_trials_that_overlap_hold_nothing_back_for_good():
    before = tuning._held_back

    def trial(start, length):
        time.sleep(start)
        with first_tiles():
            time.sleep(length)

    assert in_threads(lambda: trial(0.0, 0.1), lambda: trial(0.05, 0.1)) == []
    assert tuning._held_back == before and (tuning.may_try() or before)


def test_cards_choose_for_themselves(monkeypatch):
    """One's winner may need more shared memory than another has."""
    kernel, card = _Kernel(), [0]
    of = tuner(kernel, clock=lambda block: 1.0 / block if card == [0] else block)
    cuda = dict(is_available=lambda: True, is_current_stream_capturing=lambda: False, current_device=lambda: card[0])
    monkeypatch.setattr(tuning, "torch", SimpleNamespace(cuda=SimpleNamespace(**cuda)))
    taken = []
    for card[0] in (0, 1, 0, 1):
        launch(of)
        taken.append(kernel.took[-1])
    assert taken == [64, 16, 64, 16]
