#!/usr/bin/env python
"""Scaling study on this machine's ranks, and predictions for larger clusters.

python launch/scale.py --experts 2 4 8 16 32 64 --ranks 1 2 4 --output runs/scale    sweep, plot and fit
python launch/scale.py --predict runs/scale --nodes 4 --gpus-per-node 8              predict from a sweep
python launch/scale.py --volume                                  bytes: ours, the minimum and Tutel's
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

from unifmoe_dist.config import ModelConfig, ParallelConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser

PREDICTION = ("predict", "nodes", "gpus_per_node", "node_gbps", "link_gbps", "node_latency_us", "link_latency_us")
"""What --predict takes."""


def parser() -> OptionParser:
    result = OptionParser("scale.py", description=__doc__)
    sweep = result.add_argument_group("sweep: all combinations are measured; a re-run measures what is missing")
    several = partial(sweep.add_argument, nargs="+", action="extend")  # given twice, both count
    several("--experts", type=int, metavar="N", help="residual experts K (2 to 64)")
    several("--ranks", type=int, metavar="N", help="world sizes (1 2 4; with GPUs, powers of 2 up to their number)")
    sizes = "ranks that share the experts; 0: the largest dividing K and the ranks (0)"
    several("--expert-parallel-size", type=int, metavar="N", help=sizes)
    several("--batch", type=int, metavar="N", help="images of 5 tokens per rank and step (32)")
    several("--dispatcher", choices=get_args(get_type_hints(ModelConfig)["dispatcher"]), help="dispatchers (auto)")
    several("--zero", type=int, choices=get_args(get_type_hints(ParallelConfig)["zero_stage"]), help="ZeRO stages (1)")
    sweep.add_argument("--output", type=Path, default=Path("runs/scale"), help="folder of the study (runs/scale)")
    study = result.add_argument_group("what all points of a sweep have in common")
    study.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="number format (fp32)")
    predict = result.add_argument_group("prediction from a sweep")
    predict.add_argument("--predict", type=Path, metavar="RUN", help="folder of the sweep to predict from")
    for group, flag, value, text in (
        (study, "--width", 128, "model width; experts are 4 times as wide (128)"),
        (study, "--depth", 4, "transformer layers; every second is upcycled (4)"),
        (study, "--blocks", 8, "blocks per expert (8)"),
        (study, "--warmup", 3, "steps before timing (3)"),
        (study, "--steps", 9, "timed steps, of which the median counts (9)"),
        (study, "--threads", 1, "CPU threads per rank (1)"),
        (predict, "--nodes", 4, "nodes (4)"),
        (predict, "--gpus-per-node", 8, "ranks per node (8)"),
        (predict, "--node-gbps", 3600.0, "Gbit/s per GPU inside a node (3600, NVLink 4)"),
        (predict, "--link-gbps", 400.0, "Gbit/s per GPU between nodes (400)"),
        (predict, "--node-latency-us", 3.0, "microseconds per message in a node (3)"),
        (predict, "--link-latency-us", 10.0, "microseconds between nodes (10)"),
    ):
        group.add_argument(flag, type=type(value), default=value, help=text)
    result.add_argument("--volume", action="store_true", help="print the table of exchanged bytes and stop")
    return result


def main(arguments: Sequence[str]) -> None:
    known = parser()
    options = known.parse_args(arguments)
    if options.volume:
        if others := [word for word in arguments if word != "--volume"]:
            raise UserError(f"--volume takes no other option: {' '.join(others)} would change nothing; leave it out.")
        from unifmoe_dist.studies.scaling.volume import node_volume_table, volume_table

        print(f"{volume_table()}\n\nbetween nodes:\n\n{node_volume_table()}")
        return
    if options.predict is not None:
        known.refuse_others(arguments, PREDICTION, "--predict reads a sweep that was measured before")
    elif flags := " ".join(flag for name, flag in known.given(arguments).items() if name in PREDICTION):
        raise UserError(f"{flags} belongs to --predict RUN, which is not given; add it, or leave {flags} out.")
    from unifmoe_dist.studies.scaling import cost_model, scaling_plots, scaling_study

    folder = options.predict or options.output
    if options.predict is None:
        sweep(options)
    study, points = scaling_study.read_study(folder), scaling_study.read_points(folder)
    try:
        found = cost_model.check(points, study, unchecked=options.predict is not None)
    except UserError as error:
        if options.predict is not None:
            raise
        print(f"no cost model: {error}")
        return
    cost_model.save_model(found, folder / "cost_model.json")
    plot = scaling_plots.plot_check(found, study, folder / "cost_model.png")
    print(f"\n{cost_model.format_check(found)}\nplot: {plot}")
    if options.predict is not None:
        latencies = 1e-6 * options.node_latency_us, 1e-6 * options.link_latency_us
        speeds = options.node_gbps, options.link_gbps
        cluster = cost_model.Cluster(options.nodes, options.gpus_per_node, *speeds, *latencies)
        predictions = cost_model.predict_cluster(found.model, points, study, cluster)
        device = points[0].result.device
        plot = scaling_plots.plot_predictions(predictions, cluster, device, folder / "prediction.png")
        print(f"\n{cost_model.format_predictions(predictions, cluster, device)}\n\nplot: {plot}")


def sweep(options: argparse.Namespace) -> None:
    from unifmoe_dist.studies.scaling import scaling_study
    from unifmoe_dist.studies.scaling.measured_step import Study
    from unifmoe_dist.studies.scaling.scaling_plots import plot_study

    study = Study(**{field.name: getattr(options, field.name) for field in fields(Study)})
    layouts, left_out = scaling_study.grid(
        options.experts or [2, 4, 8, 16, 32, 64],
        options.ranks or scaling_study.default_ranks(),
        options.expert_parallel_size or [0],
        options.batch or [32],
        options.dispatcher or ["auto"],
        options.zero or [1],
    )
    if left_out:
        print(f"{left_out} combinations left out: the expert-parallel size must divide both K and the ranks.")
    points = scaling_study.run_study(layouts, study, options.output)
    print(scaling_study.format_points(points))
    print(f"\nplot: {', '.join(map(str, plot_study(points, study, options.output)))}")


if __name__ == "__main__":
    run_main(main)
