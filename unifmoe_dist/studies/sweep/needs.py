"""What a sweep will need, before it starts: GPU hours and disk, with every assumption said (templates/sweep_needs.txt).

Times of the paper's tables rest on its cost table: seconds per training and inference step on one RTX 3090, with the
paper's code. They are an order of magnitude for this project's code, until its own finished runs replace them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from unifmoe_dist.algorithms.registry import REGISTRY as ALGORITHMS
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.data.glue import FACTS
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.studies import templating
from unifmoe_dist.studies.paper_numbers import COST
from unifmoe_dist.studies.records import read_summary
from unifmoe_dist.studies.sweep.planned_runs import Run
from unifmoe_dist.studies.sweep.run_folder import State

_COST_IMAGES, _COST_EVALUATION_IMAGES = 96, 64  # 3 training environments of 32; evaluation batches
_VISION_WORK = 96 * 197 * 384 * 1536  # tokens x d x H of one FFN in a training step of the cost table
_BERT_ENCODER = 302.3e6  # parameters that a token meets
_SUSTAINED_FLOPS = 20e12  # of an RTX 3090 in fp16 with float32 sums, out of 71e12
_CPU_OVERHEAD = 2.0  # seconds
_BYTES_PER_PARAMETER = 16  # weights, float32 master weights and Adam's two moments


@dataclass
class Needs:
    """Needs of a sweep."""

    hours: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by task: of a GPU or a CPU core
    unknown: int = 0  # runs for which there is no basis
    data_gb: float = 0.0  # data sets on disk
    checkpoint_gb: float = 0.0  # checkpoints that stay if all are kept
    assumed: set[str] = field(default_factory=set)  # sections of sweep_needs.txt; tasks timed on a CPU core


def estimate(runs: Sequence[Run], states: Sequence[State]) -> Needs:
    """Needs of the runs that are not finished; finished ones of the same task and method give the time where known."""
    needs = Needs()
    measured = _measured(runs, states)
    for run, state in zip(runs, states, strict=True):
        needs.checkpoint_gb += (run.config.keep_checkpoints + 1) * _BYTES_PER_PARAMETER * _parameters(run) / 1e9
        if state is State.FINISHED:
            continue
        if seconds := measured.get((run.task, run.method)):
            needs.assumed.add("finished runs")
        else:
            seconds = _seconds(run, needs.assumed)
        if seconds is None:
            needs.unknown += 1
        else:
            needs.hours[run.task] += seconds / 3600
    needs.data_gb = sum(find_task(task).disk_gb for task in {run.task for run in runs})
    return needs


def describe(runs: Sequence[Run], states: Sequence[State], discard_checkpoints: bool) -> str:
    """The run list, and the hours and disk it needs."""
    needs = estimate(runs, states)
    planned = list(zip(runs, states, strict=True))
    counts = Counter(states)
    return (
        templating.environment()
        .get_template("sweep_needs.txt")
        .render(
            planned=planned,
            counts={state.value: counts[state] for state in State},
            needs=needs,
            left=Counter(run.task for run, state in planned if state is not State.FINISHED),
            on_gpus=any(find_task(task).family for task in needs.hours),
            kept_gb=0.0 if discard_checkpoints else needs.checkpoint_gb,
            task_of=find_task,
            glue=FACTS,
            overhead=_CPU_OVERHEAD,
            sustained=_SUSTAINED_FLOPS,
            bytes_per_parameter=_BYTES_PER_PARAMETER,
        )
    )


def _measured(runs: Sequence[Run], states: Sequence[State]) -> dict[tuple[str, str], float]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run, state in zip(runs, states, strict=True):
        if state is State.FINISHED and (summary := read_summary(run.folder)) is not None:
            times[run.task, run.method].append(float(summary["wall_seconds"]))
    return {key: fmean(values) for key, values in times.items()}


def _seconds(run: Run, assumed: set[str]) -> float | None:
    task = find_task(run.task)
    if task.family:
        return {"domainbed": _image_seconds, "glue": _sentence_seconds}[task.family](run, assumed)
    if task.step_seconds is None:
        return None
    assumed.add(run.task)
    dense, unif = task.step_seconds
    seconds = unif if method_of(run.config.model.moe).layer else dense
    return run.config.steps * seconds * _networks(run, assumed) + _CPU_OVERHEAD


def _row(run: Run, assumed: set[str]) -> str:
    """The row of the cost table that stands for a run's method."""
    if run.method in COST["T-TPS"]:
        return run.method
    assumed.add("methods")
    method = method_of(run.config.model.moe)
    if not method.layer:
        return "dense"
    return "unif" if method.shared else "emoe" if method.slices else "dynmoe" if method.grows else "gmoe"


def _networks(run: Run, assumed: set[str]) -> int:
    """Networks that are trained side by side."""
    if not ALGORITHMS[run.config.algorithm.name].networks:
        return 1
    assumed.add("networks")
    return len(find_task(run.task).environments)


def _image_seconds(run: Run, assumed: set[str]) -> float:
    assumed.add("domainbed")
    row, config = _row(run, assumed), run.config
    count = len(find_task(run.task).environments)
    images = (count - 1) * config.data.batch_size
    training = config.steps * COST["T-TPS"][row] * images / _COST_IMAGES * _networks(run, assumed)
    evaluations = math.ceil(config.steps / config.eval_every)
    scored = BENCHMARKS[run.task].images * (evaluations * 0.2 * (count - 1) + 0.8) / count
    return training + scored / _COST_EVALUATION_IMAGES * COST["I-TPS"][row]


def _sentence_seconds(run: Run, assumed: set[str]) -> float:
    assumed.add("glue")
    row, config = _row(run, assumed), run.config
    facts, (_, width, hidden) = FACTS[run.task], find_task(run.task).backbone_sizes
    batch, epochs = config.data.batch_size, config.epochs or 1
    steps = config.steps if config.epochs is None else epochs * math.ceil(facts.train * config.data.train_share / batch)
    checks = math.ceil(steps / config.eval_every) if config.epochs is None else epochs
    scored = (checks + 1) * math.ceil(facts.validation / batch)
    tokens = batch * facts.padded_length
    per_parameter = tokens * _BERT_ENCODER / _SUSTAINED_FLOPS
    work = tokens * width * hidden / _VISION_WORK
    extra, extra_scored = ((COST[name][row] - COST[name]["dense"]) * work for name in ("T-TPS", "I-TPS"))
    return steps * (6 * per_parameter + extra) + scored * (2 * per_parameter + extra_scored)


def _parameters(run: Run) -> float:
    model = run.config.model
    method = method_of(model.moe)
    copies = model.num_experts - 1 + method.shared if method.layer and not method.slices else 0
    dense, width, hidden = find_task(run.task).backbone_sizes
    return dense + len(model.layers) * copies * 2 * width * hidden
