"""Value alignment of expert pairs and their shared sets (eq. shared-set of the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unifmoe_dist.studies.diagnostics.channels import FrozenExperts
from unifmoe_dist.studies.diagnostics.pairs import expert_pairs


@dataclass(frozen=True)
class SharedSets:
    """Where the experts of each of P pairs write in nearly the same direction.

    Args:
        delta: Least alignment of a shared channel.
        alignment: (P, C) float64, cosine c_ijh of the value rows; C counts the down bias as a last channel, if any.
        shared: (P, C) bool, S_ij(delta); its complement is R_ij.
        ratio: (P,) float64 on the CPU, rho_ij(delta): shared fraction of the H hidden channels.
    """

    delta: float
    alignment: Tensor
    shared: Tensor
    ratio: Tensor

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
    first, second = expert_pairs(values.shape[0]).T.to(values.device)
    return torch.stack([(unit[i] * unit[j]).sum(1) for i, j in zip(first, second, strict=True)])


def shared_sets(experts: FrozenExperts, delta: float = 0.98) -> SharedSets:
    """Alignment, shared sets and shared ratios of all pairs."""
    alignment = value_alignment(experts.values)
    shared = alignment >= delta
    return SharedSets(delta, alignment, shared, shared[:, : experts.hidden_dim].double().mean(1).cpu())
