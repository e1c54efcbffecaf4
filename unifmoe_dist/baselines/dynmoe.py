"""DynMoE: Guo et al., "Dynamic Mixture of Experts: An Auto-Tuning Approach for Efficient Transformer Models",
ICLR 2025 (arXiv 2405.14297).

Facts from the paper and its code (github.com/LINs-lab/DynMoE, the gate `gated_multi_gate_t` and its Tutel layer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.baselines.dynamic import DynamicConfig, DynamicExpertLayer
from unifmoe_dist.baselines.gated import Gating, largest
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import AppliedStep, ChangedRows
from unifmoe_dist.usage import recomputing

LARGEST_SCALE = 100.0


@dataclass(frozen=True)
class DynMoEConfig(DynamicConfig):
    """Shape of a DynMoE layer.

    Args:
        adapt_every: Steps between decisions to add and remove experts; 0 keeps the experts it starts with.
    """

    adapt_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.adapt_every, int) or self.adapt_every < 0:
            raise UserError(f"adapt_every must be a whole number of at least 0, not {self.adapt_every!r}.")


class TopAnyRouter(nn.Module):
    """Scores and thresholds of every expert.

    Args:
        model_dim: Token width.
        num_experts: Slots K.

    Attributes:
        weight: (K, model_dim), the experts' representations; rows start orthonormal.
        thresholds: (K,), G; starts at 0.
        temperature: (1,), log of the factor before both sigmoids, which starts at 10 and is at most 100.
    """

    def __init__(self, model_dim: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim))
        self.thresholds = nn.Parameter(torch.zeros(num_experts))
        self.temperature = nn.Parameter(torch.full((1,), math.log(10.0)))
        if not self.weight.is_meta:
            nn.init.orthogonal_(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, model_dim) float32 -> scores (N, K) and thresholds (K,), both in (0, 1)."""
        scale = self.temperature.float().clamp(max=math.log(LARGEST_SCALE)).exp()
        cosine = F.normalize(x, dim=-1) @ F.normalize(self.weight.float(), dim=-1).T
        return torch.sigmoid(cosine * scale), torch.sigmoid(self.thresholds.float() * scale)


class DynMoELayer(DynamicExpertLayer[DynMoEConfig]):
    """Top-any gating: a token uses every expert whose score exceeds that expert's threshold, all with equal weight.

        k(x) = number of experts with sigmoid(t cos(x, w_e)) > sigmoid(t G_e),    y = 1 / k(x) sum of E_e(x)

    The choice is a sign whose gradient is that of its argument, relu(score - threshold). In training a token that
    passes no threshold gets 0; in evaluation it uses the expert with the largest score.

    Experts come and go: every `adapt_every` steps those that no token used are removed, and if some tokens passed no
    threshold, one expert is added whose representation is the normalised sum of those tokens, with threshold 0. Its
    FFN is what its slot holds: the dense FFN, or what a removed expert left there. At least one expert stays. The
    decisions rest on sums over all ranks. (The code adapts after every step on DomainBed and once an epoch on GLUE.)

    The auxiliary loss is diversity + simplicity, over the experts in use, with weight 0.01:
    || W^ W^T - I ||_F of the normalised representations, plus their mean length.
    """

    count: Tensor
    lost: Tensor

    def __init__(
        self, config: DynMoEConfig, expert_group: dist.ProcessGroup | None = None, dispatcher: str = "auto"
    ) -> None:
        super().__init__(config, expert_group, dispatcher)
        self.router = TopAnyRouter(config.model_dim, config.num_experts)
        self._register_statistic("count", torch.zeros(config.num_experts))  # tokens of every expert
        self._register_statistic("lost", torch.zeros(config.model_dim + 1))  # tokens of none: their sum, their number
        self.auxiliary_weight = 0.01
        self.reset_parameters()

    def _gate(self, x: Tensor) -> Gating:
        scores, thresholds = self.router(x)
        scores = scores * self.active
        chosen = _Sign.apply(F.relu(scores - thresholds))
        gates = chosen / chosen.sum(-1, keepdim=True).clamp(min=1)
        none = (chosen == 0).all(-1, keepdim=True)
        if self.training and not recomputing():
            self._record(x, gates, none)
        else:
            gates = torch.where(none, largest(scores, 1).float(), gates)
        return Gating(scores, gates)

    @torch.no_grad()
    def _record(self, x: Tensor, gates: Tensor, none: Tensor) -> None:
        self.count += (gates != 0).sum(0)
        self.lost[:-1] += (x.nan_to_num() * none).sum(0)
        self.lost[-1] += none.sum()

    def auxiliary_loss(self) -> Tensor:
        with torch.autocast(self.router.weight.device.type, enabled=False):
            weight = self.router.weight.float()[self.active]
            unit = F.normalize(weight, dim=-1)
            # vector_norm takes the zero subgradient at 0, where the plain square root would give NaN.
            diversity = torch.linalg.vector_norm(unit @ unit.T - torch.eye(len(unit), device=unit.device))
            return diversity + torch.linalg.vector_norm(weight, dim=-1).mean()

    @torch.no_grad()
    def after_step(self, applied: AppliedStep) -> list[ChangedRows]:
        """Remove experts that no token used, add one for the tokens that used none."""
        every = self.config.adapt_every
        if every == 0 or applied.step % every:
            return []
        count, lost, number = applied.all_sum(torch.cat([self.count, self.lost])).split(
            [self.config.num_experts, self.config.model_dim, 1]
        )
        self.count.zero_()
        self.lost.zero_()
        if count.any():
            self.active &= (count > 0).to(self.active.device)
        slot, length = self._free_slot(), lost.norm()
        if slot is None or not number or not length:
            return []
        self.active[slot] = True
        self.router.weight[slot] = (lost / length).to(self.router.weight)
        self.router.thresholds[slot] = 0
        return [ChangedRows(parameter, [slot], True) for parameter in (self.router.weight, self.router.thresholds)]


class _Sign(torch.autograd.Function):
    """1 where positive, else 0 (NaN stays NaN); the gradient passes as if it were the identity."""

    @staticmethod
    def forward(ctx: Any, margin: Tensor) -> Tensor:
        return torch.where(margin.isnan(), margin, (margin > 0).to(margin.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
