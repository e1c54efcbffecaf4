"""The paper's three observations on one trained top-k MoE layer, from its experts, tokens and gates; as files too."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from unifmoe_dist.errors import UserError
from unifmoe_dist.files import write_text
from unifmoe_dist.studies.diagnostics import rankings, reconstruction
from unifmoe_dist.studies.diagnostics.demand_statistics import DemandStatistics, demand_statistics
from unifmoe_dist.studies.diagnostics.residual_router import RouterTraining, train_router
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts, SharedSets, shared_sets
from unifmoe_dist.studies.records import csv_text, plain


@dataclass(frozen=True)
class Settings:
    """Of the diagnostics; defaults are the paper's where it gives them."""

    delta: float = 0.98  # least alignment of a shared channel
    epsilons: tuple[float, ...] = (0.05, 0.10, 0.20)  # fidelity tolerances
    group_size: int = 5  # pairs in the groups of lowest and highest shared ratio
    router: RouterTraining = field(default_factory=RouterTraining)
    resamples: int = 9999  # of the bootstrap
    confidence: float = 0.95  # level of the bootstrap interval
    chunk: int = 1024  # tokens whose expert outputs are in memory at a time


@dataclass(frozen=True)
class Diagnosis:
    """What the diagnostics found; pairs are in the order of `rankings.expert_pairs`."""

    settings: Settings
    num_experts: int
    tokens: int
    sets: SharedSets
    frequency: Tensor  # (P,) co-activation frequency
    coactivation: rankings.Correlation  # of the shared ratio with it (observation 1)
    transition: rankings.RankTransition  # from the original ranking to the residual router's (observation 2)
    control: rankings.RankTransition | None  # to that of a router trained alike on complete responses
    router_error: float | None  # mean relative squared error of the residual router, where it was trained here
    demand: list[DemandStatistics]  # k_eps for every tolerance, shared responses merged by the gates (observation 3)
    demand_uniform: list[DemandStatistics]  # the same, shared responses merged by one half each

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(int(i), int(j)) for i, j in rankings.expert_pairs(self.num_experts)]


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
        residual_logits, control_logits: (N, K) of a residual router and its control that were trained elsewhere
            (`train_router_on_task`); None trains both to reconstruct their targets (`train_router`).

    Raises:
        UserError: Shapes disagree, or there are no tokens.
    """
    settings = settings or Settings()
    _check(experts, x, scores=scores, residual_logits=residual_logits, control_logits=control_logits)
    device = experts.keys.device
    x, scores = x.to(device), scores.to(device).double()
    pair = rankings.top_pair(scores)
    sets = shared_sets(experts, settings.delta)
    frequency = rankings.coactivation_frequency(pair, len(sets.ratio))
    problems = reconstruction.reconstruction_problems(experts, sets, pair, scores, x, settings.chunk)
    error = None
    if residual_logits is None:
        residual_logits, error = train_router(x, problems.residual, settings.router)
        control_logits, _ = train_router(x, problems.complete, settings.router)
    order = rankings.expert_order(residual_logits.to(device))

    def demands(of: reconstruction.Reconstruction) -> list[DemandStatistics]:
        errors = reconstruction.prefix_errors(of, order)
        needed = {epsilon: reconstruction.functional_demand(errors, epsilon) for epsilon in settings.epsilons}
        how = (settings.group_size, settings.resamples, settings.confidence, settings.router.seed)
        return [demand_statistics(k, pair, sets.ratio, experts.num_experts, e, *how) for e, k in needed.items()]

    return Diagnosis(
        settings=settings,
        num_experts=experts.num_experts,
        tokens=len(x),
        sets=sets,
        frequency=frequency,
        coactivation=rankings.pearson(sets.ratio, frequency),
        transition=rankings.rank_transition(scores, residual_logits.to(device)),
        control=None if control_logits is None else rankings.rank_transition(scores, control_logits.to(device)),
        router_error=error,
        demand=demands(problems.residual),
        demand_uniform=demands(problems.uniform),
    )


def _check(experts: FrozenExperts, x: Tensor, **rows: Tensor | None) -> None:
    dim = experts.keys.shape[2]
    if x.ndim != 2 or x.shape[1] != dim or len(x) == 0:
        raise UserError(f"tokens have shape {tuple(x.shape)}; the diagnostics need (N, {dim}) with N at least 1.")
    expected = (len(x), experts.num_experts)
    for name, tensor in rows.items():
        if tensor is not None and tuple(tensor.shape) != expected:
            raise UserError(f"{name} have shape {tuple(tensor.shape)}, but tokens and experts ask for {expected}.")


def as_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything but the per-channel alignments, which have a file of their own, as JSON can hold it."""

    def demand(found: DemandStatistics) -> dict[str, Any]:
        groups = {name: vars(group) | {"success_at_2": group.success(2)} for name, group in found.groups.items()}
        return vars(found) | {"groups": groups}

    d = diagnosis
    return plain(
        {
            "settings": d.settings,
            "num_experts": d.num_experts,
            "tokens": d.tokens,
            "pairs": d.pairs,
            "shared_ratio": d.sets.ratio,
            "coactivation_frequency": d.frequency,
            "correlation_ratio_coactivation": d.coactivation,
            "rank_transition": d.transition,
            "rank_transition_control": d.control,
            "residual_router_error": d.router_error,
            "demand": list(map(demand, d.demand)),
            "demand_uniform_averaging": list(map(demand, d.demand_uniform)),
        }
    )


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write diagnosis.json and, as CSV, alignment, pairs, rank_transition and demand_cdf; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"diagnosis.json": json.dumps(as_record(diagnosis), indent=1)}
    texts |= {f"{name}.csv": csv_text(frame) for name, frame in _frames(diagnosis).items()}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _frames(d: Diagnosis) -> dict[str, pd.DataFrame]:
    """alignment: one row per channel, c_ijh of every pair; a last channel beyond H - 1 is the down bias.
    demand_cdf: one row per averaging, tolerance, group and prefix."""
    alignment = pd.DataFrame(d.sets.alignment.T.tolist(), columns=[f"c_{i}_{j}" for i, j in d.pairs])
    pairs = pd.DataFrame(d.pairs, columns=["expert_i", "expert_j"]).assign(
        shared_ratio=d.sets.ratio.tolist(),
        coactivation_frequency=d.frequency.tolist(),
        tokens=d.demand[0].tokens.tolist(),
        **{f"mean_demand_eps_{s.epsilon:g}": s.mean_demand.tolist() for s in d.demand},
        **{f"mean_demand_uniform_eps_{s.epsilon:g}": s.mean_demand.tolist() for s in d.demand_uniform},
    )
    ranks = range(1, d.num_experts + 1)
    transition = pd.DataFrame(d.transition.matrix.numpy(), columns=[f"residual_rank_{rank}" for rank in ranks])
    transition.insert(0, "original_rank", ranks)
    cdf = [
        (averaging, found.epsilon, name, *row)
        for averaging, several in (("gates", d.demand), ("uniform", d.demand_uniform))
        for found in several
        for name, group in found.groups.items()
        for row in zip(ranks, group.cdf.tolist(), group.standard_error.tolist(), strict=True)
    ]
    columns = ["averaging", "epsilon", "group", "prefix", "cdf", "standard_error"]
    return {
        "alignment": alignment.rename_axis("channel").reset_index(),
        "pairs": pairs,
        "rank_transition": transition,
        "demand_cdf": pd.DataFrame(cdf, columns=columns),
    }
