"""The paper's three observations on one trained top-k MoE layer, from its experts, tokens and gates."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.diagnostics.channels import FrozenExperts, SharedSets, shared_sets
from unifmoe_dist.studies.diagnostics.demand_statistics import DemandStatistics, demand_statistics
from unifmoe_dist.studies.diagnostics.pairs import (
    Correlation,
    coactivation_frequency,
    expert_order,
    expert_pairs,
    pearson,
    top_pair,
)
from unifmoe_dist.studies.diagnostics.reconstruction import (
    Reconstruction,
    functional_demand,
    prefix_errors,
    reconstruction_problems,
)
from unifmoe_dist.studies.diagnostics.routers import RouterTraining, train_router
from unifmoe_dist.studies.diagnostics.transitions import RankTransition, rank_transition


@dataclass(frozen=True)
class Settings:
    """Of the diagnostics; defaults are the paper's where it gives them.

    Args:
        delta: Least alignment of a shared channel.
        epsilons: Fidelity tolerances.
        group_size: Pairs in the groups of lowest and highest shared ratio.
        router: Training of the residual router.
        resamples: Bootstrap resamples.
        confidence: Level of the bootstrap interval.
        chunk: Tokens whose expert outputs are in memory at a time.
    """

    delta: float = 0.98
    epsilons: tuple[float, ...] = (0.05, 0.10, 0.20)
    group_size: int = 5
    router: RouterTraining = field(default_factory=RouterTraining)
    resamples: int = 9999
    confidence: float = 0.95
    chunk: int = 1024


@dataclass(frozen=True)
class Diagnosis:
    """What the diagnostics found; pairs are in the order of `expert_pairs`.

    Args:
        settings: How it was found.
        num_experts: K.
        tokens: Number N of tokens.
        sets: Alignment, shared sets and shared ratios.
        frequency: (P,) co-activation frequency.
        coactivation: Correlation of the shared ratio with it (observation 1).
        transition: From the original ranking to the residual router's (observation 2).
        control: From the original ranking to that of a router trained alike, from the same seed, on complete
            responses; None where only the residual logits were given.
        router_error: Mean relative squared error of the residual router; None where the residual logits were given.
        demand: k_eps for every tolerance, shared responses merged by the gates (observation 3).
        demand_uniform: The same, shared responses merged by one half each.
    """

    settings: Settings
    num_experts: int
    tokens: int
    sets: SharedSets
    frequency: Tensor
    coactivation: Correlation
    transition: RankTransition
    control: RankTransition | None
    router_error: float | None
    demand: list[DemandStatistics]
    demand_uniform: list[DemandStatistics]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(int(i), int(j)) for i, j in expert_pairs(self.num_experts)]


def diagnose(
    experts: FrozenExperts,
    x: Tensor,
    scores: Tensor,
    settings: Settings | None = None,
    residual_logits: Tensor | None = None,
    control_logits: Tensor | None = None,
) -> Diagnosis:
    """Run the three observations.

    Args:
        experts: The layer's K experts, for example `FrozenExperts.of(layer)`.
        x: (N, d) tokens that reach the layer, for example from `capture`.
        scores: (N, K) original softmax scores s(x) of all experts, not of the chosen ones alone (`expert_scores`).
        settings: Defaults are the paper's.
        residual_logits: (N, K) of a residual router trained elsewhere (`train_router_on_task`); None trains one, and
            its control, to reconstruct the residual target (`train_router`).
        control_logits: (N, K) of the control trained elsewhere, alike.

    Raises:
        UserError: Shapes disagree, or there are no tokens.
    """
    settings = settings or Settings()
    _check(experts, x, scores=scores, residual_logits=residual_logits, control_logits=control_logits)
    device = experts.keys.device
    x, scores = x.to(device), scores.to(device).double()
    pair = top_pair(scores)
    sets = shared_sets(experts, settings.delta)
    frequency = coactivation_frequency(pair, len(sets.ratio))
    problems = reconstruction_problems(experts, sets, pair, scores, x, settings.chunk)
    error = None
    if residual_logits is None:
        residual_logits, error = train_router(x, problems.residual, settings.router)
        control_logits, _ = train_router(x, problems.complete, settings.router)
    order = expert_order(residual_logits.to(device))

    def demands(of: Reconstruction) -> list[DemandStatistics]:
        errors = prefix_errors(of, order)
        return [
            demand_statistics(
                functional_demand(errors, epsilon),
                pair,
                sets.ratio,
                experts.num_experts,
                epsilon,
                settings.group_size,
                settings.resamples,
                settings.confidence,
                settings.router.seed,
            )
            for epsilon in settings.epsilons
        ]

    return Diagnosis(
        settings=settings,
        num_experts=experts.num_experts,
        tokens=len(x),
        sets=sets,
        frequency=frequency,
        coactivation=pearson(sets.ratio, frequency),
        transition=rank_transition(scores, residual_logits.to(device)),
        control=None if control_logits is None else rank_transition(scores, control_logits.to(device)),
        router_error=error,
        demand=demands(problems.residual),
        demand_uniform=demands(problems.uniform),
    )


def _check(experts: FrozenExperts, x: Tensor, **rows: Tensor | None) -> None:
    if x.ndim != 2 or x.shape[1] != experts.keys.shape[2] or len(x) == 0:
        raise UserError(
            f"tokens have shape {tuple(x.shape)}; the diagnostics need (N, {experts.keys.shape[2]}) with N at least 1."
        )
    expected = (len(x), experts.num_experts)
    for name, tensor in rows.items():
        if tensor is not None and tuple(tensor.shape) != expected:
            raise UserError(f"{name} have shape {tuple(tensor.shape)}, but tokens and experts ask for {expected}.")
