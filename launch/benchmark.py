#!/usr/bin/env python
"""Time a UniF-MoE layer beside the dense FFN and its peers: `python launch/benchmark.py [--output FOLDER]`.

`--sweep` times small to large layers, `--models` whole models; either alone leaves the paper's layers out.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser

SHAPES = ("vision", "language", "vision-uniform", "language-uniform")
MODELS = ("deit-s", "bert-large")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command.

    Raises:
        UserError: a number that must be above 0 is not.
    """
    parser = OptionParser("benchmark.py", description="Time one layer beside the dense FFN and its peers, interleaved.")
    parser.add_argument(
        "--shapes",
        nargs="+",
        action="extend",
        choices=SHAPES,
        metavar="NAME",
        help=f"the paper's layers, at its C_B or with routers as they start: {', '.join(SHAPES)} "
        "(default: all on a GPU, the vision ones on the CPU)",
    )
    parser.add_argument("--sweep", action="store_true", help="time over the floor for a range of N, d and K")
    parser.add_argument(
        "--models",
        nargs="*",
        action="extend",
        choices=MODELS,
        metavar="NAME",
        help=f"whole models, inference and training step: {', '.join(MODELS)} (default: both on a GPU, "
        "deit-s on the CPU, where bert-large needs 25 GB)",
    )
    parser.add_argument("--tokens", type=int, help="N of --shapes (default: the paper's on a GPU, fewer on the CPU)")
    parser.add_argument("--batch", type=int, help="of --models (default: 64 and 32 on a GPU, 4 and 1 on the CPU)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: bf16 on a GPU, fp32 on the CPU")
    parser.add_argument("--seconds", type=float, help="time per layer or model (default: 30, in a sweep 5)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder of results")
    options = parser.parse_args(arguments)
    for name in ("tokens", "batch", "seconds", "threads"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be above 0 and finite, not {value}.")
    if options.batch is not None and options.models is None:
        raise UserError("--batch belongs to --models, which is not given; --tokens sets the size of --shapes.")
    if options.tokens is not None and options.shapes is None and (options.models is not None or options.sweep):
        raise UserError("--tokens belongs to --shapes, which is not given; --batch sets the size of --models.")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)

    import torch
    from tqdm import tqdm

    from unifmoe_dist.files import write_text
    from unifmoe_dist.studies import benchmark
    from unifmoe_dist.studies.benchmark.benchmark_plots import plot, plot_sweeps

    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    kind = options.dtype or ("bf16" if on_gpu else "fp32")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    card = torch.cuda.get_device_name() if on_gpu else f"CPU, threads: {torch.get_num_threads()}"
    where = f"{card}, {kind}, torch {torch.__version__}"
    if kind == "bf16" and not on_gpu and not benchmark.has_fast_bf16():
        where += " (this CPU has no bf16 instructions: bf16 is emulated here)"

    shapes, models = options.shapes or [], options.models or []
    if options.shapes is None and options.models is None and not options.sweep:
        shapes = [name for name in SHAPES if on_gpu or name.startswith("vision")]
    if options.models == []:
        models = list(MODELS) if on_gpu else ["deit-s"]
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {options.output} cannot be used ({error}); choose another folder.") from error
    rate = benchmark.matmul_rate(device, dtype)
    suffix = "" if options.dtype is None else f"-{kind}"  # so that another number format replaces no results
    printed = [where]

    def save(stem: str, key: str, found: Any, tables: list[str]) -> None:
        """Layers, models and sweeps have files of their own: timing one of them leaves the others as they are."""
        record = {"where": where, "machine": platform.machine(), "matmul_flop_per_s": rate, key: found}
        write_text(options.output / f"{stem}{suffix}.md", "\n\n".join([where, *tables]) + "\n")
        write_text(options.output / f"{stem}{suffix}.json", json.dumps(record, indent=1))
        printed.append(tables[-1])

    def timed(name: str) -> benchmark.Result:
        with tqdm(desc=name, unit="round") as bar:
            how = options.seconds or 30.0, bar.update, rate
            if name in MODELS:
                model = benchmark.MODELS[name]
                batch = options.batch or (model.batch if on_gpu else model.cpu_batch)
                return benchmark.run_model(model, device, dtype, batch, *how)
            shape = benchmark.PAPER[name]
            tokens = options.tokens or (shape.tokens if on_gpu else benchmark.CPU_TOKENS[name])
            return benchmark.run_layer(replace(shape, tokens=tokens), device, dtype, *how)

    for stem, key, names in (("benchmark", "layers", shapes), ("models", "models", models)):
        found: list[benchmark.Result] = []
        for name in names:
            found.append(timed(name))
            plot(found, where, options.output / f"{stem}{suffix}.png")
            save(stem, key, [asdict(result) for result in found], [benchmark.table(result) for result in found])

    swept: dict[str, list[benchmark.Result]] = {}
    for key, several in benchmark.sweeps(on_gpu).items() if options.sweep else ():
        how = options.seconds or 5.0, lambda: None, rate
        bar = tqdm(several, desc=f"sweep of {key}")
        swept[key] = [benchmark.run_layer(shape, device, dtype, *how, brief=True) for shape in bar]
        plot_sweeps(swept, where, options.output / f"sweep{suffix}.png")
        record = {key: [asdict(r) for r in results] for key, results in swept.items()}
        save("sweep", "sweeps", record, [benchmark.sweep_table(key, results) for key, results in swept.items()])

    print("\n" + "\n\n".join(printed) + "\n")
    print(f"table, JSON and plots: {options.output}")


if __name__ == "__main__":
    run_main(main)
