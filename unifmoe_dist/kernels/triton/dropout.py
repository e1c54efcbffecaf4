"""`dropout.HiddenDropout` inside Triton kernels: the same hash, so the same mask."""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from unifmoe_dist.kernels.dropout import FACTORS, SHIFTS, STEPS, HiddenDropout

_FACTOR_0, _FACTOR_1 = tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])
_SHIFT_0, _SHIFT_1 = tl.constexpr(SHIFTS[0]), tl.constexpr(SHIFTS[1])
_STEP_0, _STEP_1 = tl.constexpr(STEPS[0]), tl.constexpr(STEPS[1])


def dropout_arguments(dropout: HiddenDropout | None) -> dict[str, Any]:
    """What a kernel is told."""
    if dropout is None:
        return dict(seed=None, DROPOUT=False, THRESHOLD=0, SCALE=1.0, FIRST_EXPERT=0)
    return dict(
        seed=dropout.seed,
        DROPOUT=True,
        THRESHOLD=dropout.threshold,
        SCALE=dropout.scale,
        FIRST_EXPERT=dropout.first_expert,
    )


@triton.jit
def _spread(x):
    x = (x ^ (x >> _SHIFT_0)) * _FACTOR_0
    return (x ^ (x >> _SHIFT_1)) * _FACTOR_1


@triton.jit
def _mix(x):
    x = _spread(x)
    return x ^ (x >> _SHIFT_1)


@triton.jit
def row_keys(seed, token, expert, DROPOUT: tl.constexpr, FIRST_EXPERT: tl.constexpr):
    """Two int32 words for every row of a tile, from which `keep` hashes channels."""
    token = token.to(tl.int32)
    if DROPOUT:
        owner = token * 0 + expert + FIRST_EXPERT
        start = _mix(_mix(token + tl.load(seed)) + owner * _STEP_0)
        step = _mix(_mix(token ^ tl.load(seed + 1)) + owner * _STEP_1) | 1
        return start, step
    else:
        return token, token


@triton.jit
def keep(values, start, step, first_channel, SUB: tl.constexpr, DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr):
    """(rows, SUB) values of the channels from `first_channel` on, 0 where they are dropped."""
    if DROPOUT:
        channel = first_channel + tl.arange(0, SUB)
        word = _spread(step[:, None] * channel[None, :] + start[:, None])
        return tl.where(word >= THRESHOLD, values, 0.0)
    else:
        return values
