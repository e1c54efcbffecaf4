"""Running statistics of routing decisions, kept on the device so that collecting them never stalls a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unifmoe_dist.eager import exporting, in_transform, not_compiled
from unifmoe_dist.routing import Routing


@dataclass(frozen=True)
class UsageSummary:
    """Means over the tokens counted. Fractions are of tokens.

    Args:
        tokens: Tokens counted.
        block_compute: Mean C_B, blocks per token.
        expert_count: Mean k, residual experts per token.
        shared_block_count: Mean b, shared blocks per token.
        shared_demand: Mean alpha.
        dropped: Fraction of (token, expert) assignments that a capacity limit dropped; C_B, k and the loads count what
            was left.
        expert_load: Fraction of tokens that use each of the K residual experts.
        block_load: Fraction of tokens for which each of the B blocks is shared.
    """

    tokens: int
    block_compute: float
    expert_count: float
    shared_block_count: float
    shared_demand: float
    dropped: float
    expert_load: list[float]
    block_load: list[float]

    @staticmethod
    def from_totals(totals: Tensor, num_experts: int) -> UsageSummary:
        """Summarise totals (6 + K + B,), which may have been summed over ranks."""
        tokens = int(totals[0].item())
        means = (totals[1:] / max(tokens, 1)).tolist()
        block_compute, expert_count, shared_block_count, shared_demand, dropped = means[:5]
        return UsageSummary(
            tokens,
            block_compute,
            expert_count,
            shared_block_count,
            shared_demand,
            dropped / (dropped + expert_count) if dropped else 0.0,
            means[5 : 5 + num_experts],
            means[5 + num_experts :],
        )


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass: activation checkpointing repeats what was counted."""
    return torch._C._current_graph_task_id() != -1


def uncounted() -> bool:
    """Whether this forward pass leaves no trace: one that is repeated, or inside a transform of torch.func."""
    return recomputing() or in_transform()


@torch.library.custom_op("unifmoe::count", mutates_args=("totals",))
def _add_unless_repeated(totals: Tensor, sums: Tensor) -> None:
    """totals += sums where this forward pass is not repeated for a backward pass."""
    if not recomputing():
        totals.add_(sums)


def _tracing(tensor: Tensor) -> bool:
    """Whether only shapes are known: torch.export, a FakeTensorMode, the meta device."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # no fake tensor without it
    return tensor.is_meta or torch.compiler.is_compiling() or (fake is not None and isinstance(tensor, fake.FakeTensor))


class Usage:
    """Adds up what a layer's routing decided since the last reset.

    A forward pass that only traces the model, repeats another for the backward pass, or runs inside a transform of
    torch.func counts nothing. `totals` is updated in place, so that a captured CUDA graph keeps counting.
    """

    def __init__(self) -> None:
        self.totals: Tensor | None = None
        self.num_experts = 0

    def update(self, routing: Routing) -> None:
        """Count the tokens of one routing decision; masked ones, which share no block, are left out."""
        made = routing.by_products
        self._count(lambda: self._sums(routing) if made is None else made.statistics, routing.gates)

    def update_gates(self, gates: Tensor, blocks_per_expert: float, num_blocks: int) -> None:
        """Count N tokens that use complete experts: those of their K whose gates (N, K) are not 0.

        `blocks_per_expert` is what one of them costs, in blocks of a dense FFN cut into `num_blocks`. Nothing is
        shared and nothing dropped.
        """
        self._count(lambda: self._sums_of_gates(gates, blocks_per_expert, num_blocks), gates)

    def update_blocks(self, gates: Tensor, blocks: Tensor) -> None:
        """Count nothing but the blocks that each of K experts computes for N tokens: of `blocks` (N, B), where its gate
        (N, K) is not 0."""
        self._count(lambda: blocks.sum(1).double() @ (gates != 0).double(), gates)

    def _count(self, sums: Callable[[], Tensor], gates: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._count_eagerly(sums, gates)
        elif not exporting():
            self._count_in_graph(sums, gates.shape[1])

    @torch.no_grad()
    def _count_in_graph(self, make: Callable[[], Tensor], num_experts: int) -> None:
        """As `_count_eagerly`, in what torch.compile traces; that a pass is a repeated one is seen when it runs."""
        sums = make()
        if self.totals is None or self.totals.device != sums.device:
            self.totals = torch.zeros_like(sums) if self.totals is None else self.totals.to(sums.device)
        if self.num_experts != num_experts:  # torch 2.9 assigns nothing inside checkpointed regions
            self.num_experts = num_experts
        _add_unless_repeated(self.totals, sums)

    @not_compiled
    @torch.no_grad()
    def _count_eagerly(self, sums: Callable[[], Tensor], gates: Tensor) -> None:
        if not (uncounted() or _tracing(gates)):
            self._add(sums(), gates.shape[1])

    def _add(self, totals: Tensor, num_experts: int) -> None:
        self.num_experts = num_experts
        with torch.inference_mode(False):  # what an evaluation starts, training may continue
            if self.totals is None:
                self.totals = torch.zeros_like(totals)
            elif self.totals.device != totals.device:
                self.totals = self.totals.to(totals.device)
            elif self.totals.is_inference():  # made by a compiled evaluation
                self.totals = self.totals.clone()
            self.totals.add_(totals)

    @staticmethod
    def _sums(routing: Routing) -> Tensor:
        dropped = torch.zeros_like(routing.expert_count) if routing.dropped is None else routing.dropped
        sums = [
            (routing.shared_block_count > 0).double().sum(),
            routing.block_compute.double().sum(),
            routing.expert_count.double().sum(),
            routing.shared_block_count.double().sum(),
            routing.shared_demand.detach().double().sum(),
            dropped.double().sum(),
        ]
        return torch.cat(
            [torch.stack(sums), (routing.gates != 0).double().sum(0), routing.shared_blocks.double().sum(0)]
        )

    @staticmethod
    def _sums_of_gates(gates: Tensor, blocks_per_expert: float, num_blocks: int) -> Tensor:
        load = (gates != 0).double().sum(0)
        tokens, nothing = load.new_full((1,), gates.shape[0]), load.new_zeros(3 + num_blocks)
        count = load.sum()[None]
        return torch.cat([tokens, count * blocks_per_expert, count, nothing[:3], load, nothing[3:]])

    def snapshot(self) -> Tensor | None:
        """A copy of the totals, for `restore`."""
        return None if self.totals is None else self.totals.clone()

    def restore(self, snapshot: Tensor | None) -> None:
        """Forget what was counted since the snapshot."""
        if snapshot is None:
            self.reset()
        else:
            assert self.totals is not None
            self.totals.copy_(snapshot)

    def reset(self) -> None:
        if self.totals is not None:
            self.totals.zero_()
