"""The experts of a trained layer as the diagnostics see them: sums of channels, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels.activations import FUNCTIONS


class ExpertHolder(Protocol):
    """An MoE layer whose experts can be read, one dense FFN each."""

    @property
    def config(self) -> Any:
        """With `num_experts` and `activation`."""

    def ffn_weights(self, expert: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """nn.Linear layouts (H, d), (H,), (d, H), (d,)."""


@dataclass(frozen=True)
class FrozenExperts:
    """K FFNs of H hidden channels, `E_e(x) = sum_h act(x . keys[e, h] + key_bias[e, h]) values[e, h]` (eq. ffn-kv).

    The paper omits biases. The up bias belongs to its channel. The down bias is one more channel, of constant
    activation 1: it is the last row of `values`, and like any other is shared by a pair of experts where the two rows
    are aligned. It counts in no shared ratio, whose H channels are those of the paper.

    Everything is float64 where it is not cast.

    Args:
        keys: (K, H, d).
        key_bias: (K, H).
        values: (K, C, d); C is H, or H + 1 with a down bias.
        activation: Its name.
    """

    keys: Tensor
    key_bias: Tensor
    values: Tensor
    activation: str

    @property
    def num_experts(self) -> int:
        return self.keys.shape[0]

    @property
    def hidden_dim(self) -> int:
        return self.keys.shape[1]

    @staticmethod
    def of(layer: ExpertHolder) -> FrozenExperts:
        """Copy the K routed experts of a layer; a UniF-MoE layer's shared expert is left out."""
        ffns = [layer.ffn_weights(expert) for expert in range(layer.config.num_experts)]
        return FrozenExperts.from_ffns(ffns, layer.config.activation)

    @staticmethod
    def from_ffns(ffns: list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]], activation: str) -> FrozenExperts:
        """From weights in nn.Linear layouts: up (H, d), up bias (H,), down (d, H), down bias (d,).

        Raises:
            UserError: Fewer than two experts, or an unknown activation.
        """
        if len(ffns) < 2:
            raise UserError(f"The diagnostics compare pairs of experts; this layer has {len(ffns)}.")
        if activation not in FUNCTIONS:
            raise UserError(f"activation {activation!r} is not known; choose one of {', '.join(FUNCTIONS)}.")
        keys = torch.stack([up for up, _, _, _ in ffns]).double()
        values = torch.stack([down.T for _, _, down, _ in ffns]).double()
        up_biases = [bias for _, bias, _, _ in ffns if bias is not None]
        down_biases = [bias for _, _, _, bias in ffns if bias is not None]
        key_bias = torch.stack(up_biases).double() if up_biases else keys.new_zeros(keys.shape[:2])
        if down_biases:
            values = torch.cat([values, torch.stack(down_biases).double()[:, None]], dim=1)
        return FrozenExperts(keys, key_bias, values, activation)

    def to(self, dtype: torch.dtype) -> FrozenExperts:
        return FrozenExperts(self.keys.to(dtype), self.key_bias.to(dtype), self.values.to(dtype), self.activation)

    def activations(self, x: Tensor) -> Tensor:
        """(K, N, C): what every channel of every expert multiplies its value by, for (N, d) tokens."""
        pre = torch.baddbmm(self.key_bias[:, None], x.to(self.keys).expand(self.num_experts, -1, -1), self.keys.mT)
        hidden = FUNCTIONS[self.activation](pre)
        if self.values.shape[1] == self.hidden_dim:
            return hidden
        return torch.cat([hidden, hidden.new_ones(*hidden.shape[:2], 1)], dim=2)
