#!/usr/bin/env python
"""Scaling study on this machine's ranks, loads by recorded routing, and predictions for larger clusters.

python launch/scale.py --experts 2 4 8 16 32 64 --ranks 1 2 4 --output runs/scale    sweep, plot and fit
python launch/scale.py --volume                                  bytes: ours, the minimum and Tutel's
python launch/scale.py --record RUN ...                          keep which experts and blocks a run's tokens use
python launch/scale.py --placement RUN ...                       how evenly experts load 4, 8 and 16 ranks by that
python launch/scale.py --predict RUN ... --drawn 512             predict clusters by that, flat and two-level
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from unifmoe_dist.config import ModelConfig, ParallelConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser, writing_to

PREDICTION = (
    *("predict", "output", "drawn", "card", "model_width", "model_depth", "gated", "rank_tokens", "nodes"),
    *("gpus_per_node", "node_gbps", "link_gbps", "node_latency_us", "link_latency_us", "message_us"),
)
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
    several("--megabits", type=int, metavar="N", help="Mbit/s between two hosts made of namespaces; 0: one host (0)")
    sweep.add_argument("--output", type=Path, default=Path("runs/scale"), help="folder of the study (runs/scale)")
    study = result.add_argument_group("what all points of a sweep have in common")
    study.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="number format (fp32)")
    predict = result.add_argument_group("prediction of clusters from recorded routing, flat and two-level")
    predict.add_argument("--predict", type=Path, nargs="*", metavar="RUN", help="runs whose routing was recorded")
    predict.add_argument("--drawn", type=int, nargs="+", metavar="K", help="also routing drawn at random, K experts")
    predict.add_argument("--card", choices=("h200", "rtx3090"), default="h200", help="whose rates (h200)")
    predict.add_argument("--gated", action="store_true", help="experts with a gate projection")
    predict.add_argument("--nodes", type=int, nargs="+", metavar="N", help="nodes (1 2 4 ... 128)")
    for group, flag, value, text in (
        (study, "--width", 128, "model width; experts are 4 times as wide (128)"),
        (study, "--depth", 4, "transformer layers; every second is upcycled (4)"),
        (study, "--blocks", 8, "blocks per expert (8)"),
        (study, "--warmup", 3, "steps before timing (3)"),
        (study, "--steps", 9, "timed steps, of which the median counts (9)"),
        (study, "--threads", 1, "CPU threads per rank (1)"),
        (study, "--ranks-per-node", 0, "ranks that two_level takes for a node; 0: those of a host (0)"),
        (predict, "--model-width", 1024, "model width; FFNs are 4 times as wide (1024)"),
        (predict, "--model-depth", 24, "layers; every second is upcycled (24)"),
        (predict, "--rank-tokens", 4096, "tokens per rank and step (4096)"),
        (predict, "--gpus-per-node", 8, "ranks per node (8)"),
        (predict, "--node-gbps", 3600.0, "Gbit/s per GPU inside a node (3600, NVLink 4)"),
        (predict, "--link-gbps", 400.0, "Gbit/s per GPU between nodes (400)"),
        (predict, "--node-latency-us", 3.0, "microseconds per message in a node (3)"),
        (predict, "--link-latency-us", 10.0, "microseconds between nodes (10)"),
        (predict, "--message-us", 1.0, "microseconds for which a message occupies its sender (1)"),
    ):
        group.add_argument(flag, type=type(value), default=value, help=text)
    result.add_argument("--volume", action="store_true", help="print the table of exchanged bytes and stop")
    recorded = result.add_argument_group("recorded routing")
    runs: dict[str, Any] = dict(type=Path, nargs="+", metavar="RUN")
    recorded.add_argument("--record", **runs, help="write RUN/routing.npz from each run's validation data, and stop")
    recorded.add_argument("--tokens", type=int, default=20_000, metavar="N", help="tokens recorded at most (20000)")
    recorded.add_argument("--placement", **runs, help="print loads per rank as experts lie, and at best, and stop")
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
    if options.record is not None:
        known.refuse_others(arguments, ("record", "tokens"), "--record writes what runs decide")
        from unifmoe_dist.studies.scaling.recorded_routing import record_run

        if options.tokens < 1:
            raise UserError(f"--tokens must be at least 1, not {options.tokens}.")
        for run in options.record:
            print(record_run(run, options.tokens))
        return
    if options.placement is not None:
        known.refuse_others(arguments, ("placement",), "--placement reads what --record wrote")
        from unifmoe_dist.studies.scaling.placement import placement_table

        print(placement_table(options.placement))
        return
    if options.predict is not None:
        known.refuse_others(arguments, PREDICTION, "--predict computes steps of other ranks than those here")
        predict(options)
        return
    if flags := " ".join(flag for name, flag in known.given(arguments).items() if name in PREDICTION[2:]):
        raise UserError(f"{flags} belongs to --predict RUN, which is not given; add it, or leave {flags} out.")
    from unifmoe_dist.studies.scaling import cost_model, scaling_plots, scaling_study
    from unifmoe_dist.studies.scaling.recorded_routing import read_routing
    from unifmoe_dist.studies.scaling.simulator import simulated

    sweep(options)
    folder = options.output
    study, points = scaling_study.read_study(folder), scaling_study.read_points(folder)

    def predict_point(model: Any, point: Any) -> float:
        _, layers = read_routing(scaling_study.routing_file(folder, point.layout))
        return simulated(model, point, study, layers).total

    try:
        found = cost_model.check(points, study, predict_point)
    except UserError as error:
        print(f"no cost model: {error}")
        return
    cost_model.save_model(found, folder / "cost_model.json")
    plot = scaling_plots.plot_check(found, folder / "cost_model.png")
    print(f"\n{cost_model.format_check(found)}\nplot: {plot}")


def predict(options: argparse.Namespace) -> None:
    from unifmoe_dist.studies.scaling import prediction
    from unifmoe_dist.studies.scaling.scaling_plots import plot_clusters
    from unifmoe_dist.studies.scaling.simulator import Links

    counts = {"--drawn": options.drawn or [], "--nodes": options.nodes or []}
    if wrong := [f"{flag} must be at least 1, not {n}." for flag, values in counts.items() for n in values if n < 1]:
        raise UserError(wrong[0])
    if not options.predict and not options.drawn:
        raise UserError("--predict needs the folder of a run whose routing was recorded, or --drawn K.")
    model = prediction.Model(options.model_width, options.model_depth, options.gated, options.rank_tokens)
    latencies = 1e-6 * options.node_latency_us, 1e-6 * options.link_latency_us
    speeds = options.gpus_per_node, options.node_gbps, options.link_gbps
    links = Links(*speeds, *latencies, 1e-6 * options.message_us)
    routing = prediction.routing_of(options.predict, options.drawn or [])
    ranks = [nodes * options.gpus_per_node for nodes in sorted(set(options.nodes or [1, 2, 4, 8, 16, 32, 64, 128]))]
    found = prediction.predict(routing, model, options.card, links, ranks)
    print(f"{prediction.describe(model, options.card, links)}\n\n{prediction.table(found)}")
    middle = [n for n in ranks if n <= 64][-1:] or ranks[:1]
    slower = {
        gbps: prediction.predict(routing, model, options.card, replace(links, link_gbps=gbps), middle)
        for gbps in prediction.SPEEDS
    }
    title = prediction.describe(model, options.card, links).partition("\n")[0]
    with writing_to(options.output):
        print(f"\nplot: {plot_clusters(found, slower, title, options.output / 'prediction.png')}")


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
        options.megabits or [0],
    )
    if left_out:
        print(
            f"{left_out} combinations left out: the expert-parallel size must divide both K and the ranks, and two "
            "hosts share ranks evenly."
        )
    points = scaling_study.run_study(layouts, study, options.output)
    print(scaling_study.format_points(points))
    print(f"\nplot: {', '.join(map(str, plot_study(points, study, options.output)))}")


if __name__ == "__main__":
    run_main(main)
