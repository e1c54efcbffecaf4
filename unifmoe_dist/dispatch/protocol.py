"""The dispatcher protocol: tokens go to the ranks that hold their experts, one summed row comes back.

A dispatcher is a small object without parameters. `dispatch` starts the journey and returns an `Exchange`; work that
needs no exchange (the shared expert) goes between `dispatch` and `Exchange.arrivals`.

All ranks of a group run the same forward passes, and the same backward passes: a rank without tokens takes part with
empty tensors. Which tensors require gradients may differ between ranks; the ranks agree on it in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arrivals:
    """Rows for the experts held on this rank.

    Args:
        x: (R, D) tokens.
        gates: (R, K_local) float32 coefficients of the local experts; 0 where an expert is not active.
        blocks: (R, B) bool, residual blocks to compute.
    """

    x: Tensor
    gates: Tensor
    blocks: Tensor


class Exchange(Protocol):
    """One journey there and back."""

    def arrivals(self) -> Arrivals:
        """Wait for the rows sent to this rank's experts."""

    def combine(self, rows: Tensor) -> Tensor:
        """Send (R, D) expert outputs home and sum them per token: (N, D)."""


class Dispatcher(Protocol):
    """Starts exchanges; every implementation has the same outputs and gradients, and none drops a token.

    Attributes:
        local: Whether nothing travels: all experts are beside the tokens, and may run in one call with the shared one.
    """

    local: bool

    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> Exchange:
        """Start sending (N, D) tokens with (N, K) gates and (N, B) residual block masks.

        `trained` says whether the experts on this rank want gradients.
        """


def gradient_needs(x: Tensor, gates: Tensor, trained: bool) -> list[int]:
    """Whether this rank wants gradients back at its tokens, and whether at its experts, as two numbers, 0 or 1."""
    recording = torch.is_grad_enabled()
    return [int(recording and (x.requires_grad or gates.requires_grad)), int(recording and trained)]
