#!/usr/bin/env python
"""Train UniF-MoE: `deepspeed launch/train.py [--config FILE] [--option value ...]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.studies.memory.options import plan_options
from unifmoe_dist.train.cli import parse_train_config, run_main
from unifmoe_dist.train.options import program


def main(arguments: Sequence[str]) -> None:
    planning, words = plan_options(arguments)
    config = parse_train_config(words, prog=program("train.py"))
    if planning.estimate:
        from unifmoe_dist.studies.memory.command import plan

        plan(config, planning)
        return
    from unifmoe_dist.runtime.ranks import running_ranks, world_size_from_environment

    world_size = world_size_from_environment()
    config.validate(world_size)
    from unifmoe_dist.train.closing import closing_words
    from unifmoe_dist.train.run import check_shared, only_writer
    from unifmoe_dist.train.trainer import Trainer, choose_folder

    folder = choose_folder(config)
    parallel, size = config.parallel, config.expert_parallel_size(world_size)
    if not config.progress:
        heartbeat.hush()
    with running_ranks(
        size, parallel.expert_placement, timeout_s=parallel.timeout_s, host_timeout_s=parallel.host_timeout_s
    ) as ranks:
        folder = Path(ranks.share(str(folder)))
        check_shared(folder, ranks)
        with only_writer(folder, ranks, parallel.host_timeout_s + 10 if config.resume else 0) as waited:
            if waited:
                choose_folder(config)  # again: the other job may have gone further
            summary = Trainer(config, ranks, folder).fit()
        if summary is not None and ranks.rank == 0:
            print(closing_words(summary, folder))


if __name__ == "__main__":
    run_main(main)
