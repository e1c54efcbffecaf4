#!/usr/bin/env python
"""Train UniF-MoE: `deepspeed launch/train.py [--config FILE] [--option value ...]`."""

from __future__ import annotations

from collections.abc import Sequence

from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.studies.estimate_options import plan_options
from unifmoe_dist.train.cli import parse_train_config, run_main
from unifmoe_dist.train.options import program


def main(arguments: Sequence[str]) -> None:
    planning, words = plan_options(arguments)
    config = parse_train_config(words, prog=program("train.py"))
    if planning.estimate:
        from unifmoe_dist.studies.memory.budget import plan

        plan(config, planning)
        return
    from unifmoe_dist.studies.training_plots import draw_finished
    from unifmoe_dist.train.closing import closing_words
    from unifmoe_dist.train.main import train

    if not config.progress:
        heartbeat.hush()
    if finished := train(config, patience=config.parallel.host_timeout_s + 10 if config.resume else 0):
        folder, summary = finished
        draw_finished(folder)
        print(closing_words(summary, folder))


if __name__ == "__main__":
    run_main(main)
