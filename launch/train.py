#!/usr/bin/env python
"""Train UniF-MoE: `deepspeed launch/train.py [--config FILE] [--option value ...]`."""

import argparse
from collections.abc import Sequence

from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.train.cli import parse_train_config, run_main
from unifmoe_dist.train.options import OptionParser, program


def main(arguments: Sequence[str]) -> None:
    planning, words = plan_options(arguments)
    config = parse_train_config(words, prog=program("train.py"))
    if planning.estimate:
        from unifmoe_dist.studies.memory.budget import plan

        plan(config, planning)
        return
    from unifmoe_dist.studies.training_plots import draw_finished
    from unifmoe_dist.train.main import train
    from unifmoe_dist.train.words import closing_words

    if not config.progress:
        heartbeat.hush()
    if finished := train(config, patience=config.parallel.host_timeout_s + 10 if config.resume else 0):
        folder, summary = finished
        draw_finished(folder)
        print(closing_words(summary, folder))


def plan_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """--estimate and what belongs to it, and the words that are left, those of training.

    Raises:
        UserError: a value is out of range, or belongs to --estimate, which is not given.
    """
    parser = OptionParser(add_help=False)
    parser.add_argument("--estimate", action="store_true")
    for name, kind in (("num-gpus-per-node", int), ("num-nodes", int), ("gpu-memory-gb", float)):
        parser.add_argument(f"--{name.replace('-', '_')}", f"--{name}", type=kind)
    parser.add_argument("--estimate_device", "--estimate-device", choices=("gpu", "cpu"))
    options, words = parser.parse_known_args(arguments)
    for name, value in vars(options).items():
        if name == "estimate" or value is None:
            continue
        flag = "--" + name.replace("_", "-")
        if not options.estimate:
            raise UserError(f"{flag} belongs to --estimate, which trains nothing; add --estimate or leave it out.")
        if not isinstance(value, str) and not value > 0:
            raise UserError(f"{flag} must be above 0, not {value:g}.")
    return options, words


if __name__ == "__main__":
    run_main(main)
