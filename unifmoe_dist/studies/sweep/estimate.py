"""What a sweep will need, before it starts: GPU hours and disk, with every assumption said.

Times of the paper's tables rest on its cost table: seconds per training and inference step on one RTX 3090, with the
paper's code. They are an order of magnitude for this project's code, until its own finished runs replace them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from unifmoe_dist.algorithms.registry import REGISTRY as ALGORITHMS
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.data.glue import FACTS
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.studies.paper_numbers import COST
from unifmoe_dist.studies.records import read_summary
from unifmoe_dist.studies.sweep.plan import Run
from unifmoe_dist.studies.sweep.run_folder import State

_COST_IMAGES, _COST_EVALUATION_IMAGES = 96, 64  # 3 training environments of 32; evaluation batches
_VISION_WORK = 96 * 197 * 384 * 1536  # tokens x d x H of one FFN in a training step of the cost table
_BERT_ENCODER = 302.3e6  # parameters that a token meets
_SUSTAINED_FLOPS = 20e12  # of an RTX 3090 in fp16 with float32 sums, out of 71e12
_CPU_OVERHEAD = 2.0
_BYTES_PER_PARAMETER = 16  # weights, float32 master weights and Adam's two moments


@dataclass
class Estimate:
    """Needs of a sweep.

    Args:
        hours: Device hours by task: of a GPU, or of a CPU core for the small tasks.
        unknown: Runs for which there is no basis.
        data_gb: Data sets on disk.
        checkpoint_gb: Checkpoints that stay if all are kept.
        assumptions: What all this rests on, sentence by sentence.
    """

    hours: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unknown: int = 0
    data_gb: float = 0.0
    checkpoint_gb: float = 0.0
    assumptions: list[str] = field(default_factory=list)


def estimate(runs: Sequence[Run], states: Sequence[State]) -> Estimate:
    """Needs of the runs that are not finished; finished ones of the same task and method give the time where there are.

    Args:
        runs: All runs of the sweep.
        states: How far each got.
    """
    result = Estimate()
    measured = _measured(runs, states)
    notes: dict[str, None] = {}
    for run, state in zip(runs, states, strict=True):
        result.checkpoint_gb += _checkpoint_bytes(run) / 1e9
        if state is State.FINISHED:
            continue
        seconds = measured.get((run.task, run.method))
        if seconds is not None:
            notes["Finished runs of the same task and method give the time of further ones."] = None
        else:
            seconds = _seconds(run, notes)
        if seconds is None:
            result.unknown += 1
        else:
            result.hours[run.task] += seconds / 3600
    tasks = {run.task for run in runs}
    result.data_gb = sum(find_task(task).disk_gb for task in tasks)
    if result.data_gb:
        notes["Disk of data sets: archives and unpacked files together, approximate."] = None
    notes[
        f"Disk of checkpoints: the newest keep_checkpoints and the best, {_BYTES_PER_PARAMETER} bytes per parameter "
        "(weights, float32 master weights, Adam's two moments); LFME, DMDA and PC-MoE counted as the dense model."
    ] = None
    result.assumptions = list(notes)
    return result


def describe(runs: Sequence[Run], states: Sequence[State], discard_checkpoints: bool) -> str:
    """The run list, and the hours and disk it needs."""
    lines = [f"{state.value:10s} {run.name}  ->  {run.folder}" for run, state in zip(runs, states, strict=True)]
    counts = Counter(states)
    lines.append(f"\n{len(runs)} runs: " + ", ".join(f"{counts[state]} {state.value}" for state in State))
    needs = estimate(runs, states)
    left = Counter(run.task for run, state in zip(runs, states, strict=True) if state is not State.FINISHED)
    lines += [f"  {find_task(task).title}: {left[task]} runs, {hours:,.1f} h" for task, hours in needs.hours.items()]
    unit = "GPU hours (RTX 3090)" if any(find_task(task).family for task in needs.hours) else "CPU-core hours"
    lines.append(f"time: {sum(needs.hours.values()):,.1f} {unit}")
    if needs.unknown:
        lines.append(f"      and {needs.unknown} runs for which there is no basis yet")
    kept = 0.0 if discard_checkpoints else needs.checkpoint_gb
    lines.append(f"disk: {needs.data_gb:,.1f} GB of data sets, {kept:,.1f} GB of checkpoints")
    if kept > 100:
        lines[-1] += f" ({len(runs)} runs; --discard-checkpoints keeps none)"
    return "\n".join([*lines, "assumptions:", *(f"  - {sentence}" for sentence in needs.assumptions)])


def _measured(runs: Sequence[Run], states: Sequence[State]) -> dict[tuple[str, str], float]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run, state in zip(runs, states, strict=True):
        if state is State.FINISHED and (summary := read_summary(run.folder)) is not None:
            times[run.task, run.method].append(float(summary["wall_seconds"]))
    return {key: sum(values) / len(values) for key, values in times.items()}


def _seconds(run: Run, notes: dict[str, None]) -> float | None:
    task = find_task(run.task)
    if task.family:
        return {"domainbed": _image_seconds, "glue": _sentence_seconds}[task.family](run, notes)
    if task.step_seconds is None:
        return None
    dense, unif = task.step_seconds
    notes[
        f"{task.title}: one core of an x86 CPU takes {1e3 * dense:.0f} ms per step of the dense model and "
        f"{1e3 * unif:.0f} ms of UniF-MoE (measured), which other MoE layers are taken to need too; "
        f"start, checkpoints and plots {_CPU_OVERHEAD:g} s."
    ] = None
    seconds = unif if method_of(run.config.model.moe).layer else dense
    return run.config.steps * seconds * _networks(run, notes) + _CPU_OVERHEAD


def _row(run: Run, notes: dict[str, None]) -> str:
    """The row of the cost table that stands for a run's method."""
    if run.method in COST["T-TPS"]:
        return run.method
    method = method_of(run.config.model.moe)
    notes[
        "Methods that the cost table leaves out: EMoE-L as EMoE; top-k as GMoE; MASS as DynMoE; UniF-MoE's ablations "
        "and studies as UniF-MoE; LFME, DMDA and PC-MoE as the dense model."
    ] = None
    if not method.layer:
        return "dense"
    return "unif" if method.shared else "emoe" if method.slices else "dynmoe" if method.grows else "gmoe"


def _networks(run: Run, notes: dict[str, None]) -> int:
    """Networks that are trained side by side."""
    if not ALGORITHMS[run.config.algorithm.name].networks:
        return 1
    notes["LFME trains one network more for each training environment, at the dense model's time each."] = None
    return len(find_task(run.task).environments)


def _image_seconds(run: Run, notes: dict[str, None]) -> float:
    notes[
        "DomainBed: seconds per training (T-TPS) and inference step (I-TPS) of the paper's cost table, one RTX 3090 "
        "and the paper's code, for 96 images (3 environments of 32) and 64 images; proportional to the images."
    ] = None
    notes[
        "DomainBed: every eval_every steps the out-splits (20 %) of the training environments are scored, at the end "
        "the in-split (80 %) of the held-out one; environments of a data set are taken as equally large."
    ] = None
    row, config = _row(run, notes), run.config
    count = len(find_task(run.task).environments)
    images = (count - 1) * config.data.batch_size
    training = config.steps * COST["T-TPS"][row] * images / _COST_IMAGES * _networks(run, notes)
    evaluations = math.ceil(config.steps / config.eval_every)
    scored = BENCHMARKS[run.task].images * (evaluations * 0.2 * (count - 1) + 0.8) / count
    return training + scored / _COST_EVALUATION_IMAGES * COST["I-TPS"][row]


def _sentence_seconds(run: Run, notes: dict[str, None]) -> float:
    notes[
        "GLUE: the paper measured no time. BERT-large: 6 x 302 million operations per token and training step, 2 x to "
        f"score, at {_SUSTAINED_FLOPS / 1e12:.0f} TFLOP/s of an RTX 3090; batches padded to "
        + ", ".join(f"{facts.padded_length} tokens ({find_task(task).title})" for task, facts in FACTS.items())
        + "."
    ] = None
    notes[
        "GLUE: a MoE layer adds what it adds in the paper's cost table (T-TPS and I-TPS less those of the dense model, "
        "two layers), in proportion to tokens x width x hidden width; the paper's code in fp32."
    ] = None
    notes["GLUE: all epochs are run, though early stopping may end a run sooner."] = None
    row, config = _row(run, notes), run.config
    facts, (_, width, hidden) = FACTS[run.task], find_task(run.task).backbone_sizes
    batch, epochs = config.data.batch_size, config.epochs or 1
    steps = config.steps if config.epochs is None else epochs * math.ceil(facts.train / batch)
    checks = math.ceil(steps / config.eval_every) if config.epochs is None else epochs
    scored = (checks + 1) * math.ceil(facts.validation / batch)
    tokens = batch * facts.padded_length
    per_parameter = tokens * _BERT_ENCODER / _SUSTAINED_FLOPS
    work = tokens * width * hidden / _VISION_WORK
    extra, extra_scored = ((COST[name][row] - COST[name]["dense"]) * work for name in ("T-TPS", "I-TPS"))
    return steps * (6 * per_parameter + extra) + scored * (2 * per_parameter + extra_scored)


def _checkpoint_bytes(run: Run) -> float:
    return (run.config.keep_checkpoints + 1) * _BYTES_PER_PARAMETER * _parameters(run)


def _parameters(run: Run) -> float:
    model = run.config.model
    method = method_of(model.moe)
    copies = model.num_experts - 1 + method.shared if method.layer and not method.slices else 0
    dense, width, hidden = find_task(run.task).backbone_sizes
    return dense + len(model.layers) * copies * 2 * width * hidden
