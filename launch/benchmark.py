#!/usr/bin/env python
"""Time a UniF-MoE layer beside the dense FFN and its peers: `python launch/benchmark.py [--output FOLDER]`."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unifmoe_dist.engine.cli import run_main
from unifmoe_dist.errors import UserError


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Time one layer beside the dense FFN and its peers, interleaved.")
    parser.add_argument("--shapes", nargs="+", choices=("vision", "language"),
                        help="the paper's layers at its C_B (default: both on a GPU, vision on the CPU)")  # fmt: skip
    parser.add_argument("--tokens", type=int, help="tokens N (default: the paper's on a GPU, fewer on the CPU)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: bf16 on a GPU, fp32 on the CPU")
    parser.add_argument("--seconds", type=float, default=30.0, help="time per shape (default: 30)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder of results")
    options = parser.parse_args(arguments)
    for name in ("tokens", "seconds", "threads"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name} must be above 0, not {value}.")

    import torch
    from tqdm import tqdm

    from unifmoe_dist.analysis import benchmark
    from unifmoe_dist.analysis.benchmark_plots import plot
    from unifmoe_dist.engine.checkpoint import write_text

    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    kind = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    card = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU threads: {torch.get_num_threads()}"
    where = f"{card}, {kind}, torch {torch.__version__}"

    rate = benchmark.matmul_rate(device, kinds[kind])
    results = []
    for name in options.shapes or (["vision", "language"] if device.type == "cuda" else ["vision"]):
        shape = benchmark.VISION if name == "vision" else benchmark.LANGUAGE
        tokens = options.tokens or (shape.tokens if device.type == "cuda" else benchmark.CPU_TOKENS[name])
        shape = replace(shape, tokens=tokens)
        with tqdm(desc=name, unit="round") as bar:
            results.append((shape, benchmark.run(shape, device, kinds[kind], options.seconds, bar.update)))
    report = "\n\n".join([where, *(benchmark.table(shape, timings, rate) for shape, timings in results)])
    print(f"\n{report}\n")
    options.output.mkdir(parents=True, exist_ok=True)
    write_text(options.output / "benchmark.md", report + "\n")
    records = [benchmark.as_record(shape, timings, rate) for shape, timings in results]
    write_text(options.output / "benchmark.json",
               json.dumps({"where": where, "machine": platform.machine(), "results": records}, indent=1))  # fmt: skip
    print(f"table, JSON and plot: {plot(results, where, options.output / 'benchmark.png').parent}")


if __name__ == "__main__":
    run_main(main)
