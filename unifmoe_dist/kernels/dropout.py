"""Dropout on the hidden channels of executed blocks: a mask that every kernel computes alike and none stores.

Whether a channel is dropped is a hash of (seed, token, expert, channel) in 32-bit arithmetic that wraps around, the
same in torch and in Triton (`triton_dropout.py`). So a backward pass makes the mask again, and kernels can be compared
with the same mask.

A token is the number of its row among those that the kernel is given. Under expert parallelism that is the rank that
computes: its mask comes from its own generator, and rows arrive in the same order whenever they are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# An avalanching mix of 32 bits: two rounds of the kind found by github.com/skeeto/hash-prospector.
FACTORS = (0x21F0AAAD, 0x735A2D97)
SHIFTS = (16, 15)
STEPS = (0x61C88647, 0x7A143595)
"""Odd numbers that set the experts of a token apart in the two words of a row's key."""

_SLICE = 2**18  # elements hashed together on the CPU, so that the passes over them stay in its cache


@dataclass(frozen=True)
class HiddenDropout:
    """What one forward pass, its backward pass and its recomputation drop.

    Args:
        rate: Probability p that a channel becomes 0, above 0 and below 1; the others are multiplied by 1 / (1 - p).
        seed: (2,) int32, drawn once per forward pass.
        first_expert: Number of the first expert that the kernel is given, so that banks differ.
    """

    rate: float
    seed: Tensor
    first_expert: int = 0

    @classmethod
    def draw(cls, rate: float, device: torch.device) -> HiddenDropout:
        """A new mask from torch's generator of the device, which activation checkpointing puts back and CUDA graphs
        advance; the host does not wait."""
        return cls(rate, torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device))

    def of_experts(self, first_expert: int) -> HiddenDropout:
        """The same mask for a kernel that is given the experts from `first_expert` on."""
        return replace(self, first_expert=first_expert)

    @property
    def scale(self) -> float:
        """1 / (1 - p)."""
        return 1 / (1 - self.rate)

    @property
    def threshold(self) -> int:
        """A channel is dropped if its hash, a signed number of 32 bits, is below this."""
        return min(round(self.rate * 2**32), 2**32 - 1) - 2**31

    def kept(
        self, token_R: Tensor, expert_R: Tensor, first_channel_R: Tensor, width: int, dtype: torch.dtype
    ) -> Tensor:
        """(R, width) of `dtype`: 0 for channels that are dropped and 1 for the others, in R rows.

        Args:
            token_R: (R,) row of the token.
            expert_R: (R,) expert, counted from the first that the kernel is given.
            first_channel_R: (R,) first of `width` channels of the expert, from 0 to H - 1.
            width: Channels.
            dtype: Type of the result, in which it can be multiplied.
        """
        token, expert, first = (t.to(torch.int32) for t in (token_R, expert_R + self.first_expert, first_channel_R))
        start = _mix(_mix(token + self.seed[0]) + expert * STEPS[0])
        step = _mix(_mix(token ^ self.seed[1]) + expert * STEPS[1]) | 1
        start, step = (start + first * step)[:, None], step[:, None]
        channel = torch.arange(width, dtype=torch.int32, device=token.device)
        result = torch.empty((len(token), width), dtype=dtype, device=token.device)
        rows = max(1, _SLICE // max(1, width)) if token.device.type == "cpu" else max(1, len(token))
        for part in range(0, len(token), rows):
            here = slice(part, part + rows)
            torch.ge(_spread((step[here] * channel).add_(start[here])), self.threshold, out=result[here])
        return result


def _spread(x: Tensor) -> Tensor:
    """Hash int32 numbers in place so that their high bits are random."""
    for shift, factor in zip(SHIFTS, FACTORS, strict=True):
        x.bitwise_xor_(x >> shift).mul_(factor)
    return x


def _mix(x: Tensor) -> Tensor:
    """Hash int32 numbers so that all bits are random."""
    x = _spread(x.clone())
    return x.bitwise_xor_(x >> SHIFTS[1])
