"""DynMoE: Guo et al., "Dynamic Mixture of Experts: An Auto-Tuning Approach for Efficient Transformer Models",
ICLR 2025 (arXiv 2405.14297).

Facts from the paper and its code (github.com/LINs-lab/DynMoE, folder EMoE: the gates `gated_multi_gate` and
`gated_multi_gate_t`, their Tutel layer, and the scripts for DomainBed and GLUE). docs/fidelity.md compares the numbers.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.config import checked
from unifmoe_dist.config.layers import AdaptEvery
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import AppliedStep, ChangedRows
from unifmoe_dist.methods.dynamic import DynamicConfig, DynamicExpertLayer
from unifmoe_dist.methods.gated import Gating, largest
from unifmoe_dist.usage import uncounted

LARGEST_SCALE = 100.0


@checked(frozen=True)
class DynMoEConfig(DynamicConfig):
    """Shape of a DynMoE layer.

    Args:
        adapt_every: Steps between decisions to add and remove experts; 0 keeps the experts it starts with, "epoch"
            decides once in every epoch, after three quarters, from the tokens since its half.
        gate_temperature: Whether the gate has a temperature that is learned (`gated_multi_gate_t`). The authors'
            scripts for DomainBed and GLUE use the gate without.
    """

    adapt_every: AdaptEvery = 1
    gate_temperature: bool = False

    @classmethod
    def former_options(cls, expansion_steps: int | None) -> Mapping[str, Any]:
        return {"gate_temperature": True}


class TopAnyRouter(nn.Module):
    """Scores and thresholds of every expert.

    Args:
        model_dim: Token width.
        num_experts: Slots K.
        temperature: Whether there is a temperature.

    Attributes:
        weight: (K, model_dim), the experts' representations; rows start orthonormal.
        thresholds: (K,), G; starts at 0.
        temperature: (1,), log of the factor t before both sigmoids, which starts at 10 and is at most 100; None without
            one, where t is 1.
    """

    def __init__(self, model_dim: int, num_experts: int, temperature: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim))
        self.thresholds = nn.Parameter(torch.zeros(num_experts))
        self.temperature = nn.Parameter(torch.full((1,), math.log(10.0))) if temperature else None
        if not self.weight.is_meta:
            nn.init.orthogonal_(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, model_dim) float32 -> scores (N, K) and thresholds (K,), both in (0, 1)."""
        cosine = F.normalize(x, dim=-1) @ F.normalize(self.weight.float(), dim=-1).T
        thresholds = self.thresholds.float()
        if self.temperature is None:
            return torch.sigmoid(cosine), torch.sigmoid(thresholds)
        scale = self.temperature.float().clamp(max=math.log(LARGEST_SCALE)).exp()
        return torch.sigmoid(cosine * scale), torch.sigmoid(thresholds * scale)


class DynMoELayer(DynamicExpertLayer[DynMoEConfig]):
    """Top-any gating: a token uses every expert whose score exceeds that expert's threshold, all with equal weight.

        k(x) = number of experts with sigmoid(t cos(x, w_e)) > sigmoid(t G_e),    y = 1 / k(x) sum of E_e(x)

    The choice is a sign whose gradient is that of its argument, relu(score - threshold); 1 / k carries gradient too, so
    a token with one expert gives the gate none. In training a token that passes no threshold gets 0; in evaluation it
    uses the expert with the largest score. The factor t is 1, or learned with `gate_temperature`.

    Experts come and go: at every decision those that no token used are removed, and if some tokens passed no threshold,
    one expert is added whose representation is the normalised sum of those tokens, with threshold 0. Its FFN is what
    its slot holds: the dense FFN, or what a removed expert left there. At least one expert stays. The decisions rest on
    sums over all ranks. The code decides after every step on DomainBed, and on GLUE once in every epoch.

    The auxiliary loss is diversity + simplicity, with weight 0.01: || W^ W^T - I ||_F of the normalised representations
    of the experts in use, plus the mean length of the representations of all slots.
    """

    config_type = DynMoEConfig
    count: Tensor
    lost: Tensor
    rank_sums = ("count", "lost")

    def build(self) -> None:
        super().build()
        config = self.config
        self.router = TopAnyRouter(config.model_dim, config.num_experts, config.gate_temperature)
        self._register_statistic("count", torch.zeros(config.num_experts))  # tokens of every expert
        self._register_statistic("lost", torch.zeros(config.model_dim + 1))  # tokens of none: their sum, their number
        self.auxiliary_weight = 0.01

    def _gate(self, x: Tensor) -> Gating:
        scores, thresholds = self.router(x)
        scores = scores * self.active
        chosen = _Sign.apply(F.relu(scores - thresholds))
        # Clamped below every count of experts but 0: a clamp passes no gradient where it holds.
        gates = chosen / chosen.sum(-1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).eps)
        none = (chosen == 0).all(-1, keepdim=True)
        if not self.training:
            gates = torch.where(none, largest(scores, 1).float(), gates)
        elif not uncounted():
            self._record(x, gates, none)
        return Gating(scores, gates)

    @torch.no_grad()
    def _record(self, x: Tensor, gates: Tensor, none: Tensor) -> None:
        self.count += (gates != 0).sum(0)
        self.lost[:-1] += (x.nan_to_num() * none).sum(0)
        self.lost[-1] += none.sum()

    def auxiliary_loss(self) -> Tensor:
        with torch.autocast(self.router.weight.device.type, enabled=False):
            weight = self.router.weight.float()
            unit = F.normalize(weight[self.active], dim=-1)
            # vector_norm takes the zero subgradient at 0, where the plain square root would give NaN.
            diversity = torch.linalg.vector_norm(unit @ unit.T - torch.eye(len(unit), device=unit.device))
            return diversity + torch.linalg.vector_norm(weight, dim=-1).mean()

    @torch.no_grad()
    def after_step(self, applied: AppliedStep) -> list[ChangedRows]:
        """Remove experts that no token used, add one for the tokens that used none, where a decision is due.

        Raises:
            UserError: adapt_every is "epoch", and the step does not say how long an epoch is.
        """
        if self.config.adapt_every == 0:
            return []
        period, start, end = self._period(applied)
        changes = self._adapt(applied) if (applied.step - 1) % period == end else []
        if not start < applied.step % period <= end:  # the next step is the first to count, or does not
            self.count.zero_()
            self.lost.zero_()
        return changes

    def _period(self, applied: AppliedStep) -> tuple[int, int, int]:
        """Steps from one decision to the next; the first and the last step in between, from 0, that count for it."""
        if isinstance(self.config.adapt_every, int):
            return self.config.adapt_every, 0, self.config.adapt_every - 1
        if applied.epoch_steps is None:
            raise UserError('adapt_every "epoch" needs an AppliedStep with epoch_steps; give it, or a number of steps.')
        return applied.epoch_steps, applied.epoch_steps // 2, applied.epoch_steps * 3 // 4

    def _adapt(self, applied: AppliedStep) -> list[ChangedRows]:
        count, lost, number = applied.all_sum(torch.cat([self.count, self.lost])).split(
            [self.config.num_experts, self.config.model_dim, 1]
        )
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
