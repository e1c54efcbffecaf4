"""The experts of a trained layer as the diagnostics see them, sums of channels in float64, and the channels that pairs
of them share (eq. shared-set of the paper)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import FFN
from unifmoe_dist.kernels.activations import FUNCTIONS
from unifmoe_dist.studies.diagnostics.rankings import expert_pairs


@dataclass(frozen=True)
class FrozenExperts:
    """K FFNs of H hidden channels, `E_e(x) = sum_h act(x . keys[e, h] + key_bias[e, h]) values[e, h]` (eq. ffn-kv).

    In gated ones act reads `x . gate_keys[e, h] + gate_key_bias[e, h]`, and what the keys read is multiplied with it.
    The paper omits biases. The up bias belongs to its channel. The down bias is one more channel, of constant
    activation 1: it is the last row of `values`, and like any other is shared by a pair of experts where the two rows
    are aligned. It counts in no shared ratio, whose H channels are those of the paper.
    """

    keys: Tensor  # (K, H, d), float64 where it is not cast, as all of them
    key_bias: Tensor  # (K, H)
    values: Tensor  # (K, C, d); C is H, or H + 1 with a down bias
    activation: str
    gate_keys: Tensor | None = None  # (K, H, d)
    gate_key_bias: Tensor | None = None  # (K, H), given with gate_keys

    @property
    def num_experts(self) -> int:
        return self.keys.shape[0]

    @property
    def hidden_dim(self) -> int:
        return self.keys.shape[1]

    @staticmethod
    def of(layer: Any) -> FrozenExperts:
        """Copy the K routed experts of a layer; a UniF-MoE layer's shared expert is left out."""
        ffns = [layer.ffn_weights(expert) for expert in range(layer.config.num_experts)]
        return FrozenExperts.from_ffns(ffns, layer.config.activation)

    @staticmethod
    def from_ffns(ffns: list[FFN], activation: str) -> FrozenExperts:
        """From weights in nn.Linear layouts, as `ExpertLayer.ffn_weights` gives them.

        Raises:
            UserError: Fewer than two experts, or an unknown activation.
        """
        if len(ffns) < 2:
            raise UserError(f"The diagnostics compare pairs of experts; this layer has {len(ffns)}.")
        if activation not in FUNCTIONS:
            raise UserError(f"activation {activation!r} is not known; choose one of {', '.join(FUNCTIONS)}.")
        up, up_bias, down, down_bias, *gate = (
            None if column[0] is None else torch.stack(column).double() for column in map(list, zip(*ffns, strict=True))
        )
        assert up is not None and down is not None
        values = down.mT if down_bias is None else torch.cat([down.mT, down_bias[:, None]], dim=1)
        none = up.new_zeros(up.shape[:2])
        if gate and gate[1] is None:
            gate[1] = none
        return FrozenExperts(up, none if up_bias is None else up_bias, values, activation, *gate)

    def to(self, dtype: torch.dtype) -> FrozenExperts:
        tensors: dict[str, Any] = {n: value.to(dtype) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def activations(self, x: Tensor) -> Tensor:
        """(K, N, C): what every channel of every expert multiplies its value by, for (N, d) tokens."""
        tokens = x.to(self.keys).expand(self.num_experts, -1, -1)
        hidden = torch.baddbmm(self.key_bias[:, None], tokens, self.keys.mT)
        if self.gate_keys is None or self.gate_key_bias is None:
            hidden = FUNCTIONS[self.activation](hidden)
        else:
            gate = torch.baddbmm(self.gate_key_bias[:, None], tokens, self.gate_keys.mT)
            hidden = FUNCTIONS[self.activation](gate) * hidden
        if self.values.shape[1] == self.hidden_dim:
            return hidden
        return torch.cat([hidden, hidden.new_ones(*hidden.shape[:2], 1)], dim=2)


@dataclass(frozen=True)
class SharedSets:
    """Where the experts of each of P pairs write in nearly the same direction."""

    delta: float  # least alignment of a shared channel
    alignment: Tensor  # (P, C) float64, cosine c_ijh of the value rows; a down bias is a last channel
    shared: Tensor  # (P, C) bool, S_ij(delta); its complement is R_ij
    ratio: Tensor  # (P,) float64 on the CPU, rho_ij(delta): shared fraction of the H hidden channels

    def none_shared(self) -> SharedSets:
        """The same pairs with empty shared sets: every response is residual, which is what controls compare with."""
        return SharedSets(self.delta, self.alignment, torch.zeros_like(self.shared), torch.zeros_like(self.ratio))


def value_alignment(values: Tensor) -> Tensor:
    """c_ijh (P, C) of value rows (K, C, d), pairs in the order of `expert_pairs`.

    A row of norm 0 writes nothing and has no direction: its alignment is taken as 0, so that a dead channel is never
    evidence of a shared response.
    """
    values = values.double()
    norm = torch.linalg.vector_norm(values, dim=2, keepdim=True)
    unit = torch.where(norm > 0, values / norm, 0.0)
    return torch.stack([(unit[i] * unit[j]).sum(1) for i, j in expert_pairs(len(values)).tolist()])


def shared_sets(experts: FrozenExperts, delta: float = 0.98) -> SharedSets:
    """Alignment, shared sets and shared ratios of all pairs."""
    alignment = value_alignment(experts.values)
    shared = alignment >= delta
    return SharedSets(delta, alignment, shared, shared[:, : experts.hidden_dim].double().mean(1).cpu())
