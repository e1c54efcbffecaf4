"""MASS: Park and Park, "How Many Experts Are Enough? Towards Optimal Semantic Specialization for Mixture-of-Experts",
AAAI 2026 (arXiv 2512.19765).

Facts from the abstract and the code (github.com/psmiz/MASS: the gate `mass`, `moe_layer_mass`, `algorithms_mass`,
`train_mass` for DomainBed and `search_glue_no_trainer_mass` for GLUE). docs/fidelity.md compares the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.config import checked
from unifmoe_dist.config.checked import Fraction
from unifmoe_dist.config.layers import Window
from unifmoe_dist.expert_layer import AppliedStep, ChangedRows
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.methods.dynamic import DynamicConfig, DynamicExpertLayer
from unifmoe_dist.methods.gated import Gating
from unifmoe_dist.routing_policies import descending


class MASSRecipe(NamedTuple):
    """What differs between the authors' two scripts: the fewest steps of the window and of the warm-up, and the copies
    that there may be before the last one is tried."""

    least_window: int
    least_warmup: int
    untried: int


VISION = MASSRecipe(200, 100, 0)
"""`train_mass.py`."""
LANGUAGE = MASSRecipe(60, 30, 1)
"""`search_glue_no_trainer_mass.py`."""
SHORT = MASSRecipe(2, 0, 0)
"""The rule without its floors, for runs of some hundred steps, in which the floors would end expansion unused."""


class MASSSchedule(NamedTuple):
    """Steps of expansion, of the window and of the warm-up."""

    expansion_steps: int
    window: int
    warmup: int


def mass_schedule(steps: int, recipe: MASSRecipe) -> MASSSchedule:
    """Expansion in the first tenth; a window of 9 % and a warm-up of 5 % of the steps, or the recipe's fewest."""
    return MASSSchedule(
        int(steps * 0.1), max(recipe.least_window, int(steps * 0.09)), max(recipe.least_warmup, int(steps * 0.05))
    )


@checked(frozen=True)
class MASSConfig(DynamicConfig):
    """Shape of a MASS layer.

    Args:
        mass_threshold: Routing mass tau that a token's experts must reach together; the authors use 0.3 on DomainBed
            and 0.5 on GLUE.
        expansion_steps: Steps at the start in which experts may be added and the redundancy loss acts; the authors use
            a tenth of the run.
        window: Steps over which an expert's gradient is watched; see `mass_schedule`.
        warmup: Steps before an expert's gradient is judged; see `mass_schedule`.
        p_limit: Probability below which a gradient counts as drifting.
        similarity_limit: Largest |cosine| between an expert's weights and its gradient at which it is duplicated.
        patience: Experts that may be taken back because they did not lower the loss, before expansion ends.
        untried: Copies that there may be before the last one is tried; the authors use 0 on DomainBed and 1 on GLUE.
    """

    mass_threshold: Fraction = 0.3
    expansion_steps: int = 500
    window: Window = 200
    warmup: int = 100
    p_limit: float = 0.01
    similarity_limit: float = 0.001
    patience: int = 3
    untried: int = 0

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Windows that are not given are those of `train_mass.py` for a run of which expansion_steps is a tenth."""
        expansion = options.get("expansion_steps", cls.expansion_steps)
        given = {name: value for name, value in options.items() if value is not None}
        given = {**cls.run_options(10 * expansion, "domainbed"), **given}
        names = {"mass_window": "window", "mass_warmup": "warmup", "mass_untried": "untried"}
        return super().from_options({names.get(name, name): value for name, value in given.items()})

    @classmethod
    def run_options(cls, steps: int, family: str) -> Mapping[str, Any]:
        """As the family's script has it; small tasks of their own are too short for either's floors."""
        recipe = {"domainbed": VISION, "glue": LANGUAGE}.get(family, SHORT)
        rule = mass_schedule(steps, recipe)
        windows = {"mass_window": rule.window, "mass_warmup": rule.warmup}
        return {"expansion_steps": rule.expansion_steps, **windows, "mass_untried": recipe.untried}

    @classmethod
    def former_options(cls, expansion_steps: int | None) -> Mapping[str, Any]:
        if expansion_steps is None:
            return {}
        return {
            "mass_window": max(2, min(200, expansion_steps * 2 // 5)),
            "mass_warmup": min(100, expansion_steps // 5),
        }


EXPANDING, FULL, OVER = 0, 1, 2
"""Phases of a MASS layer: experts may be added; no more are, but the redundancy loss acts; neither."""
LEAST_NORM = torch.finfo(torch.float32).tiny
"""What a window holds for a gradient of 0, which is an entry like others; 0 stands where there is none yet."""


class MASSLayer(DynamicExpertLayer[MASSConfig]):
    """Each token uses the fewest experts whose scores reach the mass tau; experts are duplicated where they drift.

        s = softmax(x W_g) over the experts in use,    k(x) = smallest prefix of s, sorted, with sum >= tau,
        y = sum over that prefix of s_j / (sum of the prefix) E_j(x)

    Drift: of every expert the norm of the gradient of its keys is standardised over a window; the sum of these z over
    the window, divided by the root of its length, is taken as standard normal. If its upper tail is below `p_limit`
    and the gradient is nearly orthogonal to the keys (|cosine| < `similarity_limit`), the expert and its router row
    are copied into a free slot, and the step is split: the copy keeps all of it, the source only its part along its
    own keys, row by row. Both then warm up anew: norms are noted, but no z, so that the source keeps its old ones.
    Before the next copy the last one is tried: if the task loss is no higher without it, it is taken back, at most
    `patience` times. While experts may be added the auxiliary loss, weight 0.01, is the sum of squared cosines between
    the router rows of copy and source; afterwards it is 0. There is no balance loss. Keys of gated experts are
    those under the activation.

    Differences from the code, all because experts are sharded and the optimiser is DeepSpeed's: the update of the step
    is split, not its gradient (for SGD that is the same); the two task losses are compared after the step; with several
    replicas the gradient norm is the mean of the replicas' own norms. A copy that is taken back frees its slot.

    Attributes:
        router: `router.weight` is (K, model_dim).
    """

    config_type = MASSConfig
    seen: Tensor
    norms: Tensor
    drift: Tensor
    source: Tensor
    progress: Tensor
    resized: ClassVar[tuple[str, ...]] = ("norms", "drift")

    def build(self) -> None:
        super().build()
        config, slots = self.config, self.config.num_experts
        self.router = nn.Linear(config.model_dim, slots, bias=False)
        self.register_buffer("seen", torch.zeros(slots, dtype=torch.int64))  # gradients since the last copy
        self._register_statistic("norms", torch.zeros(slots, config.window))  # newest last
        self._register_statistic("drift", torch.zeros(slots, config.window))  # their z
        self.register_buffer("source", torch.full((slots,), -1))  # whose copy an expert is
        self.register_buffer("progress", torch.tensor([-1, config.patience, EXPANDING]))  # last copy, patience, phase
        self._watch: _Watch | None = None
        self.auxiliary_weight = 0.01

    # -- gate ---------------------------------------------------------------------------------------------------------

    def _gate(self, x: Tensor) -> Gating:
        logits = (x @ self.router.weight.float().T).masked_fill(~self.active, -math.inf)
        scores = torch.softmax(logits, dim=-1)
        gates = torch.where(reaching_mass(scores, self.config.mass_threshold), scores, 0)
        return Gating(scores, gates / gates.sum(-1, keepdim=True))

    def auxiliary_loss(self) -> Tensor:
        with torch.autocast(self.router.weight.device.type, enabled=False):
            copies = (self.active & (self.source >= 0)).nonzero().flatten()
            unit = F.normalize(self.router.weight.float(), dim=-1)
            redundancy = (unit[copies] * unit[self.source[copies]]).sum(-1).square().sum()
            return redundancy * (self.progress[2] != OVER)

    # -- expansion ----------------------------------------------------------------------------------------------------

    def _weights(self) -> ExpertWeights:
        """The experts' weights, whose gradient is watched while experts may be added."""
        weights = super()._weights()
        keys = weights.keys if weights.gate_keys is None else weights.gate_keys
        if not self.training or self.progress[2] or not keys.requires_grad or not torch.is_grad_enabled():
            return weights
        if self._watch is None:
            self._watch = _Watch(keys, self.router.weight)
        watched = keys.view_as(keys)
        watched.register_hook(self._watch.add)
        return replace(weights, keys=watched) if weights.gate_keys is None else replace(weights, gate_keys=watched)

    @torch.no_grad()
    def after_step(self, applied: AppliedStep) -> list[ChangedRows]:
        """Judge the experts' gradients and duplicate one expert at most."""
        watch, self._watch = self._watch, None
        last_step = applied.step >= self.config.expansion_steps
        changes = []
        if self.progress[2] == EXPANDING and applied.step <= self.config.expansion_steps:
            changes = self._expand(applied, watch)
        if last_step and self.progress[2] != OVER:
            self.progress[2] = OVER
        return changes

    def _expand(self, applied: AppliedStep, watch: _Watch | None) -> list[ChangedRows]:
        totals = torch.zeros(self.config.num_experts, 4, dtype=torch.float64)
        if watch is not None:
            totals[list(self.held)] = watch.totals().cpu()
        totals = applied.all_sum(totals)
        norm, along, length, replicas = totals.unbind(1)
        self._note(norm / replicas.clamp(min=1))
        # As cosine_similarity: 0 for a gradient of 0.
        cosine = along / ((length / replicas.clamp(min=1)).sqrt() * norm).clamp(min=1e-8)
        expert = self._drifting(cosine)
        if expert is None or watch is None:
            return []
        if not self._last_copy_helps(applied):
            self.progress[1] -= 1
        slot = self._free_slot()
        if slot is None or self.progress[1] < 0:
            self.progress[2] = FULL
            return []
        if not self.active[expert]:  # it is the copy that has been taken back (there the original fails)
            return []
        changes = self._duplicate(expert, slot, watch)
        if self._free_slot() is None:
            self.progress[2] = FULL
        return changes

    def _note(self, norm: Tensor) -> None:
        """Add the newest gradient norms (K,) to the windows, and to those past their warm-up their z."""
        norm = norm.to(self.norms).clamp(min=LEAST_NORM)
        self.seen += self.active
        self.norms.copy_(torch.where(self.active[:, None], torch.cat([self.norms[:, 1:], norm[:, None]], 1), 0))
        known, filled = self.norms != 0, self.seen_in_window()
        mean = self.norms.sum(1) / filled.clamp(min=1)
        spread = ((self.norms - mean[:, None]).square() * known).sum(1) / (filled - 1).clamp(min=1)
        z = ((norm - mean) / spread.sqrt()).nan_to_num(0, 0, 0)
        warm = self.active & (self.seen >= self.config.warmup)
        self.drift.copy_(torch.where(warm[:, None], torch.cat([self.drift[:, 1:], z[:, None]], 1), self.drift))
        self.drift.mul_(self.active[:, None])

    def seen_in_window(self) -> Tensor:
        """(K,) int64, entries of an expert's window that hold a norm."""
        return (self.norms != 0).sum(1)

    def _drifting(self, cosine: Tensor) -> int | None:
        """The first expert to duplicate."""
        total = self.drift.sum(1) / math.sqrt(self.config.window)
        ready = self.active & (self.seen >= self.config.warmup) & (self.seen_in_window() == self.config.window)
        drifts = ready & (torch.special.ndtr(-total) < self.config.p_limit)
        found = (drifts.cpu() & (cosine.abs() < self.config.similarity_limit)).nonzero().flatten().tolist()
        return found[0] if found else None

    def _last_copy_helps(self, applied: AppliedStep) -> bool:
        """Whether the task loss rises without the last copy, which goes if it does not; true if none is to be tried."""
        last = int(self.progress[0])
        if last < 0 or int((self.active & (self.source >= 0)).sum()) <= self.config.untried:
            return True
        with_it = applied.task_loss()
        self.active[last] = False
        if applied.task_loss() > with_it:
            self.active[last] = True
            return True
        self.source[last] = -1
        self.progress[0] = -1
        return False

    def _duplicate(self, expert: int, slot: int, watch: _Watch) -> list[ChangedRows]:
        """Copy an expert as the step has left it, then take from the source what the copy is to learn."""
        changes = []
        self.load_ffn(slot, *self.ffn_weights(expert))
        router = cast(nn.Parameter, self.router.weight)
        router[slot] = router[expert]
        router[expert] = _along(watch.router[expert], router[expert])
        changes += [ChangedRows(router, [slot], True), ChangedRows(router, [expert], False)]
        mine, copy = self._held_here(expert), self._held_here(slot)
        if copy is not None:
            changes += [ChangedRows(p, self.experts.rows(p, copy), True) for p in self.experts.parameters()]
        if mine is not None:
            keys = self.experts.activated_keys
            keys[mine] = _along(watch.keys[mine], keys[mine])
            changes.append(ChangedRows(keys, [mine], False))
        self.active[slot] = True
        self.source[slot] = expert
        self.seen[expert] = self.seen[slot] = 0
        self.norms[slot] = self.drift[slot] = 0  # the source keeps its window
        self.progress[0] = slot
        return changes

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Windows of another length are cut to their newest entries, or begin with empty ones."""
        for name in self.resized:
            if (saved := state_dict.get(prefix + name)) is not None:
                newest = saved[:, -self.config.window :]
                state_dict[prefix + name] = F.pad(newest, (self.config.window - newest.shape[1], 0))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_watch": None}


class _Watch:
    """The gradients of one step's micro-batches, and the weights before that step."""

    def __init__(self, keys: Tensor, router: Tensor) -> None:
        self.keys, self.router = keys.detach().clone(), router.detach().clone()
        self.norms = keys.new_zeros(keys.shape[0], dtype=torch.float32)
        self.along = torch.zeros_like(self.norms)

    def add(self, grad: Tensor) -> None:
        """Hook on the gradient of the keys (K_local, H, d)."""
        flat, keys = grad.detach().float().flatten(1).nan_to_num(), self.keys.float().flatten(1)
        self.norms += torch.linalg.vector_norm(flat, dim=1)
        self.along += (flat * keys).sum(1)

    def totals(self) -> Tensor:
        """(K_local, 4): gradient norm, inner product with the keys, squared norm of the keys, and 1."""
        squares = self.keys.float().flatten(1).square().sum(1)
        return torch.stack([self.norms, self.along, squares, torch.ones_like(squares)], dim=1).double()


def reaching_mass(scores_NK: Tensor, threshold: float) -> Tensor:
    """(N, K) bool, the fewest experts whose scores sum to `threshold` or more; ties go to the lower index."""
    sorted_NK, order = descending(scores_NK.detach())
    before = sorted_NK.cumsum(-1) - sorted_NK
    needed = before < threshold
    needed[:, 0] = True  # a NaN row too
    return torch.zeros_like(needed).scatter_(1, order, needed)


def _along(before: Tensor, after: Tensor) -> Tensor:
    """The step from `before` to `after` (..., d), reduced to its part along `before` in every row."""
    step, base = (after - before).float(), before.float()
    part = (step * base).sum(-1, keepdim=True) / (base.square().sum(-1, keepdim=True) + 1e-12)
    return (base + part * base).to(after.dtype)
