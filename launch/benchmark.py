#!/usr/bin/env python
"""Time a UniF-MoE layer beside the dense FFN and its peers: `python launch/benchmark.py [--output FOLDER]`.

`--sweep` times small to large layers, `--models` whole models, `--decoding` few tokens; each of them alone leaves the
paper's layers out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser, writing_to

SHAPES = ("vision", "language", "vision-uniform", "language-uniform")
MODELS = ("deit-s", "bert-large")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command.

    Raises:
        UserError: a number that must be above 0 is not.
    """
    parser = OptionParser("benchmark.py", description="Time one layer beside the dense FFN and its peers, interleaved.")
    names = partial(parser.add_argument, action="extend", metavar="NAME")
    shapes = "all on a GPU, the vision ones on the CPU"
    models = "both on a GPU, deit-s on the CPU, where bert-large needs 25 GB"
    text = "the paper's layers, at its C_B or with routers as they start"
    names("--shapes", nargs="+", choices=SHAPES, help=f"{text}: {', '.join(SHAPES)} (default: {shapes})")
    parser.add_argument("--sweep", action="store_true", help="time over the floor for a range of N, d and K")
    text = "1 to 64 tokens without gradients, plain and gated, with warm and with swept caches"
    parser.add_argument("--decoding", action="store_true", help=text)
    text = "gated FFNs (SwiGLU) of the same widths in --shapes and --sweep, dense and in experts"
    parser.add_argument("--gated", action="store_true", help=text)
    text = f"whole models, inference and training step: {', '.join(MODELS)} (default: {models})"
    names("--models", nargs="*", choices=MODELS, help=text)
    text = "in --shapes and --models the dense contender and UniF-MoE alone, eager and compiled in one graph"
    parser.add_argument("--compile", action="store_true", help=text)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: bf16 on a GPU, fp32 on the CPU")
    positive = {
        "tokens": (int, "N of --shapes (default: the paper's on a GPU, fewer on the CPU)"),
        "batch": (int, "of --models (default: 64 and 32 on a GPU, 4 and 1 on the CPU)"),
        "seconds": (float, "time per layer or model (default: 30, in a sweep and of a number of tokens 5)"),
        "threads": (int, "CPU threads (default: torch's)"),
    }
    for name, (kind, text) in positive.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder of results")
    options = parser.parse_args(arguments)
    for name in positive:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be above 0 and finite, not {value}.")
    if options.batch is not None and options.models is None:
        raise UserError("--batch belongs to --models, which is not given; --tokens sets the size of --shapes.")
    others = options.models is not None or options.sweep or options.decoding
    if options.tokens is not None and options.shapes is None and others:
        raise UserError("--tokens belongs to --shapes, which is not given; --batch sets the size of --models.")
    if options.gated and options.shapes is None and not options.sweep and others:
        raise UserError("--gated belongs to --shapes and --sweep, and neither is given; models have the FFN they have.")
    if options.compile and others and options.shapes is None and options.models is None:
        raise UserError("--compile belongs to --shapes and --models, and neither is given; sweeps compile nothing.")
    return options


def chosen(options: argparse.Namespace, on_gpu: bool) -> tuple[list[str], list[str]]:
    """Names of layers and of models: those given, or else what the device can take."""
    shapes, models = options.shapes or [], options.models or []
    if options.shapes is None and options.models is None and not options.sweep and not options.decoding:
        shapes = [name for name in SHAPES if on_gpu or name.startswith("vision")]
    if options.models == []:
        models = list(MODELS) if on_gpu else ["deit-s"]
    return shapes, models


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)

    import torch
    from tqdm import tqdm

    from unifmoe_dist.studies.benchmark import benchmark_results, decoding, side_by_side
    from unifmoe_dist.studies.benchmark import layers_and_models as timed

    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    kind = options.dtype or ("bf16" if on_gpu else "fp32")
    dtype, where = timed.number_format(kind, on_gpu)
    shapes, models = chosen(options, on_gpu)
    with writing_to(options.output):
        pass  # before the work, not after
    rate = side_by_side.matmul_rate(device, dtype)
    # So that another number format or another FFN replaces no results.
    suffix = "" if options.dtype is None else f"-{kind}"
    suffix += "".join(f"-{way}" for way in ("gated", "compile") if getattr(options, way))
    printed = [where]

    def run(name: str) -> side_by_side.Result:
        with tqdm(desc=name, unit="round") as bar:
            how = options.seconds or 30.0, bar.update, rate
            if name in MODELS:
                model = timed.MODELS[name]
                batch = options.batch or (model.batch if on_gpu else model.cpu_batch)
                return timed.run_model(model, device, dtype, batch, *how, compiled=options.compile)
            shape = timed.PAPER[name]
            tokens = options.tokens or (shape.tokens if on_gpu else timed.CPU_TOKENS[name])
            shape = replace(shape, tokens=tokens, gated=options.gated)
            return timed.run_layer(shape, device, dtype, *how, compiled=options.compile)

    for stem, key, names in (("benchmark", "layers", shapes), ("models", "models", models)):
        found: list[side_by_side.Result] = []
        for name in names:
            found.append(run(name))
            path = options.output / f"{stem}{suffix}"
            printed.append(benchmark_results.write(path, where, rate, key, found))
    swept: dict[str, list[side_by_side.Result]] = {}
    for key, several in timed.sweeps(on_gpu).items() if options.sweep else ():
        how = options.seconds or 5.0, lambda: None, rate
        bar = tqdm(several, desc=f"sweep of {key}")
        sized = (replace(shape, gated=options.gated) for shape in bar)
        swept[key] = [timed.run_layer(shape, device, dtype, *how, brief=True) for shape in sized]
        path = options.output / f"sweep{suffix}"
        printed.append(benchmark_results.write(path, where, rate, "sweeps", swept))
    if options.decoding:
        with tqdm(desc="decoding", unit="round") as bar:
            rows = decoding.time_decoding(device, dtype, options.seconds or 5.0, bar.update)
        printed.append(decoding.write(options.output / f"decoding{suffix}", where, rows))
    print("\n" + "\n\n".join(printed) + "\n")
    print(f"table, JSON and plots: {options.output}")


if __name__ == "__main__":
    run_main(main)
