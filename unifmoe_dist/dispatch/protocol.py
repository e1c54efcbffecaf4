"""The dispatcher protocol: tokens go to the ranks that hold their experts, one summed row comes back.

A dispatcher is a small object without parameters. `dispatch` starts the journey and returns an `Exchange`; work that
needs no exchange (the shared expert) goes between `dispatch` and `Exchange.compute`.

All ranks of a group run the same forward passes, and the same backward passes: a rank without tokens takes part with
empty tensors. Which tensors require gradients may differ between ranks; the ranks agree on it in the forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unifmoe_dist.profiling import profile_range


@dataclass(frozen=True)
class Arrivals:
    """Rows for the experts held on this rank.

    Args:
        x: (R, D) tokens.
        gates: (R, K_local) float32 coefficients of the local experts; 0 where an expert is not active.
        blocks: (R, B) bool, residual blocks to compute.
        part: Number of these rows among the parts in which an exchange brings its rows.
    """

    x: Tensor
    gates: Tensor
    blocks: Tensor
    part: int = 0


Experts = Callable[[Arrivals], Tensor]
"""Computes (R, D) outputs of the local experts for the rows that arrived."""


class Exchange(Protocol):
    """One journey there and back."""

    def compute(self, experts: Experts) -> None:
        """Call `experts` on the rows sent here, once for each part of them, and start their outputs on the way home."""

    def total(self) -> Tensor:
        """Wait for this rank's tokens: (N, D), the sums of what the experts computed for each."""


class SinglePart:
    """An exchange whose rows arrive all at once; what carries them is a subclass's."""

    def arrivals(self) -> Arrivals:
        """Wait for the rows sent to this rank's experts."""
        raise NotImplementedError

    def send_home(self, rows: Tensor) -> None:
        """Start (R, D) expert outputs on their way home."""
        raise NotImplementedError

    def compute(self, experts: Experts) -> None:
        with profile_range("dispatch"):
            arrived = self.arrivals()
        rows = experts(arrived)
        with profile_range("combine"):
            self.send_home(rows)


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
