"""The benchmark: the layer on every path beside the dense FFN, in rounds that take all contenders in a random order.

Times are over the floor: C_B / B times the dense FFN's, the faster of the eager one and the one in a CUDA graph. Peers
are timed in a process of their own, with the dense FFN and the layer beside them, so that an error of a foreign kernel
ends nothing else.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.kernels import self_test, use_kernels
from unifmoe_dist.studies.benchmark.layers_and_models import LANGUAGE, MODELS, UNIFORM, VISION, contenders, run_model
from unifmoe_dist.studies.benchmark.peers import PEERS, Shape, reason
from unifmoe_dist.studies.benchmark.side_by_side import Contender, Result, Subject, Timing, matmul_rate, measure, ready
from unifmoe_dist.studies.gpu_check import device
from unifmoe_dist.studies.gpu_check.layers import differences, passes
from unifmoe_dist.studies.gpu_check.record import FAILED, NOTE, OK, SKIPPED, LeftOut, Record

OURS, GRAPH, OPTION = "UniF-MoE", ", in a CUDA graph", ", cuda_graphs=True"
GOALS = {"vision": (1.5, 1.8), "language": (1.4, 1.8)}  # over the floor in graphs: forward, forward and backward
VARIANTS: dict[str, dict[str, Any]] = {  # fields of TritonOptions, each timed beside the defaults
    "whole tiles": {"tail_rows": 128},
    "nothing kept": {"kept_bytes": 0},
    "64 rows a tile": {"tile_rows": 64},
}
GATED_VARIANTS: dict[str, dict[str, Any]] = {"parts of at most 128 channels": {"part_channels": 128}}
PEERS_GOAL = 5.0  # times as fast as the best top-2 peer, vision
MODEL_GOALS = (1.10, 1.15)  # of a dense DeiT-S: inference, training step
ALIKE = 4e-2  # of the largest value: what two ways to compute in bf16 may differ by
KINDS = {"forward": "forward", "training": "forward + backward"}
_TINY = Shape("vision", 24, 16, 64, 2, 4)
_LEAST, _ROUNDS = 12.0, 8.0  # seconds: without so many left no shape is begun; rounds take no more


def check(record: Record, which: str) -> None:
    """`which`: "own" or "peers"."""
    where = device.here()
    dtype = torch.bfloat16 if record.on_card else torch.float32
    rate = matmul_rate(where, dtype)
    record.numbers["matmul FLOP/s"] = rate
    for shape in _shapes(record.on_card, which):
        with record.attempt(_title(shape)):
            if record.on_card and record.left < _LEAST:
                raise LeftOut("no time was left")
            _run(record, shape, which, where, dtype, rate)
    _tell_kernels(record)
    if which == "peers" and record.on_card:
        with record.attempt("DeiT-S"):
            if record.left < _LEAST:
                raise LeftOut("no time was left")
            _run_model(record, where, dtype, rate)


def _shapes(on_card: bool, which: str) -> list[Shape]:
    """With routers as they start, whose C_B the goals are for; a gated layer; then at what the paper measured."""
    vision, language = UNIFORM
    gated = [replace(language, name="gated", tokens=4096, hidden=2816, gated=True)] if which == "own" else []
    return [vision, replace(language, tokens=4096), *gated, language, VISION, LANGUAGE] if on_card else [_TINY]


def _title(shape: Shape) -> str:
    where = "router as it starts" if shape.block_compute is None else f"C_B = {shape.block_compute:g}"
    return f"{shape.name.removesuffix('-uniform')}, N = {shape.tokens}, {where}"


def _run(record: Record, shape: Shape, which: str, where: torch.device, dtype: torch.dtype, rate: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, shape.dim).to(where, dtype)
    skipped: dict[str, str] = {}
    subjects: list[Subject] = []
    waited: dict[str, float] = {}
    for contender in _contenders(shape, x, which):
        began = time.perf_counter()
        try:
            subjects.append(_subject(contender, x))
            waited[contender.name] = time.perf_counter() - began
        except Exception as error:  # whatever a foreign library raises
            if "CUDA error" in str(error):
                raise RuntimeError(f"{contender.name}: {error}") from error
            if not (contender.peer or contender.name.endswith((GRAPH, OPTION))):
                raise
            skipped[contender.name] = str(error) if isinstance(error, LeftOut) else reason(error)
    seconds = max(0.0, min(_ROUNDS, record.left / 5)) if record.on_card else 0.0
    skipped |= measure(subjects, where, seconds, lambda: None, device.clock)
    sizes = f"N={shape.tokens}, d={shape.dim}, H={shape.hidden}, K={shape.experts}, B={shape.blocks}"
    flops = 4.0 * shape.tokens * shape.dim * shape.hidden
    result = Result(_title(shape), sizes, flops, rate, [subject.timing for subject in subjects], skipped, shape)
    _write(record, result, which, waited)
    for name, why in skipped.items():
        ours_failed = record.on_card and name.startswith(OURS) and name.endswith((GRAPH, OPTION))
        record.find(f"{result.name}: {name}", FAILED if ours_failed else SKIPPED, why)
    if clocks := device.driver("clocks.sm,clocks.mem,power.draw,temperature.gpu"):
        record.row("clocks", "The card right after each shape was timed", {"shape": result.name, **clocks})
    rounds = len(result.timings[0].forward)
    record.find(result.name, OK, f"{len(result.timings)} contenders timed in {rounds} rounds")
    _judge(record, result, which)
    if which == "own":
        _agree(record, result.name, shape, x)


def _contenders(shape: Shape, x: Tensor, which: str) -> Iterator[Contender]:
    own_paths = (OURS, "UniF-MoE, plain torch", "UniF-MoE, torch grouped_mm")
    for contender in contenders(shape, x, top_ks=(2,), reference=False):
        if contender.name == OURS and not x.is_cuda:
            contender = replace(contender, context=device.kernels)  # interpreted
        if contender.name in ("dense FFN", OURS):
            yield contender
            yield replace(contender, name=contender.name + GRAPH)
            if contender.name == OURS and which == "own":
                yield replace(contender, name=OURS + OPTION, build=partial(_with_graphs, contender))
                # Predictions are for what the paper measured; each is compiled for a shape, and the others come first.
                plain = VARIANTS if shape.block_compute is not None else {}
                for variant, options in (GATED_VARIANTS if shape.gated else plain).items():
                    context = partial(device.kernels, **options)
                    yield replace(contender, name=f"{OURS}, {variant}{GRAPH}", context=context)
        elif which == "own" and contender.name in own_paths:
            yield contender
        elif which == "peers" and contender.name.removesuffix(" top-2") in PEERS:
            yield contender


def _with_graphs(contender: Contender) -> nn.Module:
    """Its layer, which captures its passes by itself."""
    layer: Any = copy.deepcopy(contender.build())
    device.need_card(layer.router.weight.device)
    layer.cuda_graphs = True
    return layer


def _in_own_graphs(layer: Any, subject: Subject) -> Subject:
    """With both passes captured; a pass without gradients is, in evaluation.

    Raises:
        RuntimeError: they are not, and what was timed would be eager.
    """
    without_gradients = subject.infer

    def infer() -> None:
        layer.training = False  # alone of its modules: a graph asks no other, and the clock runs
        without_gradients()
        layer.training = True

    subject = replace(subject, infer=infer)
    for _ in range(3):
        subject.infer()
        subject.train()
    if layer.graphs.failure or len(layer.graphs._made) < 2:
        raise RuntimeError(f"the layer captured no graph: {layer.graphs.failure or 'nothing says why'}")
    return subject


def _subject(contender: Contender, x: Tensor) -> Subject:
    """A contender made ready; in a CUDA graph, with both passes captured."""
    if contender.name.endswith(GRAPH):
        device.need_card(x.device)
    module = contender.build()
    subject = ready(replace(contender, build=lambda: module), lambda: (x.detach().requires_grad_(),))
    if contender.name.endswith(OPTION):
        subject = _in_own_graphs(module, subject)
    if contender.name.endswith(GRAPH):
        infer, train = device.captured(subject.infer, x.device), device.captured(subject.train, x.device)
        subject = replace(subject, infer=infer, train=train)
    return subject


def _floor(result: Result, kind: str) -> float:
    """Seconds of the faster dense FFN: what a floor is counted in."""
    return min(timing.median(kind) for timing in result.timings if timing.contender.startswith("dense FFN"))


def over_floor(result: Result, timing: Timing, kind: str) -> float:
    """A contender's time over its arithmetic at the dense rate."""
    assert timing.work is not None
    return timing.median(kind) / (timing.work * _floor(result, kind))


def _write(record: Record, result: Result, which: str, waited: dict[str, float]) -> None:
    title = f"{result.name}: {result.sizes}, {'bf16' if record.on_card else 'fp32'}"
    numbers: dict[str, Any] = {}
    for timing in result.timings:
        row: dict[str, Any] = {
            "": timing.contender,
            "work / dense": "" if timing.work is None else f"{timing.work:.2f}",
        }
        for kind, words in KINDS.items():
            row[f"{words} (µs)"] = f"{1e6 * timing.median(kind):.0f} ± {1e6 * timing.spread(kind):.0f}"
            row[f"{words} / dense"] = f"{timing.median(kind) / _floor(result, kind):.2f}"
            row[f"{words} / floor"] = "" if timing.work is None else f"{over_floor(result, timing, kind):.2f}"
        eager = not timing.contender.endswith(OPTION)  # what is measured are passes that no graph repeats
        row["kept (MB)"] = f"{timing.kept / 2**20:.1f}" if eager else ""
        row["peak (MB)"] = f"{timing.peak / 2**20:.1f}" if eager and timing.peak is not None else ""
        row["made ready (s)"] = f"{waited[timing.contender]:.1f}"  # compiled, proven and tuned, where it is the first
        record.row(f"{which}, {result.name}", title, row)
        numbers[timing.contender] = vars(timing)
    record.numbers[result.name] = numbers


def _judge(record: Record, result: Result, which: str) -> None:
    """Hold times against the goals; they are told, and fail nothing."""
    if not record.on_card:
        return
    by_name = {timing.contender: timing for timing in result.timings}
    ours = by_name.get(OURS + GRAPH) or by_name[OURS]
    if which == "own":
        goals = GOALS.get(result.name.partition(",")[0], (None, None))
        for goal, kind in zip(goals, KINDS, strict=True):
            got = over_floor(result, ours, kind)
            text = f"{got:.2f} over the floor"
            if goal is not None:
                text += f", goal {goal} {'met' if got <= goal else 'not met'}"
            record.find(f"{result.name}: {ours.contender}, {KINDS[kind]}", NOTE, text)
        return
    others = [timing for name, timing in by_name.items() if name.endswith("top-2")]
    if others:
        best = min(others, key=lambda timing: timing.median("forward"))
        times = best.median("forward") / ours.median("forward")
        goal_text = f", goal {PEERS_GOAL:g} {'met' if times >= PEERS_GOAL else 'not met'}" * result.name.startswith(
            "vision"
        )
        record.find(
            f"{result.name}: {ours.contender}",
            NOTE,
            f"forward {times:.2f} times as fast as {best.contender}{goal_text}",
        )


def _agree(record: Record, name: str, shape: Shape, x: Tensor) -> None:
    """Whether what was timed, in its tuned tiles and at its full size, computes what plain torch does."""
    layer: Any = next(c for c in contenders(shape, x, top_ks=(), reference=False) if c.name == OURS).build()
    way = partial(use_kernels, "auto" if record.on_card else "triton")
    decisions = []
    for kernels in (way, partial(use_kernels, "reference")):
        with kernels(), torch.no_grad():
            routing = layer.route(x)
            decisions.append(torch.cat([routing.shared_blocks, routing.gates != 0], dim=1))
    x = x[(decisions[0] == decisions[1]).all(1)]
    errors = differences(passes(layer, x, context=way()), passes(layer, x, context=use_kernels("grouped")))
    worst = max(errors, key=lambda value: errors[value])
    good = all(error <= ALIKE for error in errors.values())  # NaN is bad
    record.judge(
        f"{name}: what was timed", good, f"as plain torch within {errors[worst]:.1e} of the largest value ({worst})"
    )


def _tell_kernels(record: Record) -> None:
    """The self-test's verdicts in this process, and the tiles that tuning chose."""
    for case, verdict in self_test._verdicts.items():
        record.row(
            "self-test",
            "Verdicts of the kernels' self-test",
            {"case": case, "Triton": "used" if verdict else "not used"},
        )
        record.judge(f"self-test: {case}", verdict, "Triton is used" if verdict else "Triton is not used")
    for name, choices in tuned_tiles().items():
        for shape, tiles in choices.items():
            record.row("tiles", "Tiles that tuning chose", {"kernel": name, "for": shape, "tiles": tiles})


def tuned_tiles() -> dict[str, dict[str, str]]:
    """What every tuned kernel of this process runs in, by kernel and what it was tuned for."""
    from triton.runtime.autotuner import Autotuner

    from unifmoe_dist.kernels import triton as kernels

    found: dict[str, dict[str, str]] = {}
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Autotuner) and value.cache:  # of the card that it last ran on; a check has one
                found[name] = {" ".join(map(str, key)): str(config) for key, config in value.cache.items()}
    return found


def _run_model(record: Record, where: torch.device, dtype: torch.dtype, rate: float) -> None:
    model = MODELS["deit-s"]
    result = run_model(model, where, dtype, model.batch, min(_ROUNDS, record.left / 4), lambda: None, rate)
    numbers: dict[str, Any] = {}
    for timing in result.timings:
        row: dict[str, Any] = {"": timing.contender}
        for kind, words in (("forward", "inference"), ("training", "training step")):
            row[f"{words} (ms)"] = f"{1e3 * timing.median(kind):.2f} ± {1e3 * timing.spread(kind):.2f}"
            row[f"{words} / dense"] = f"{result.ratio(timing, kind):.2f}"
        record.row("DeiT-S", f"DeiT-S, {result.sizes}, bf16, eager", row)
        numbers[timing.contender] = vars(timing)
    record.numbers["DeiT-S"] = numbers
    ours = next(timing for timing in result.timings if timing.contender == OURS)
    ratios = [result.ratio(ours, kind) for kind in ("forward", "training")]
    record.find(
        "DeiT-S", NOTE, f"{ratios[0]:.2f} and {ratios[1]:.2f} of dense, eager; goals {MODEL_GOALS[0]}, {MODEL_GOALS[1]}"
    )
