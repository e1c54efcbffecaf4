#!/usr/bin/env python
"""Score a saved run: `python launch/evaluate.py RUN [--checkpoint best|latest|step-N] [--split test|validation]`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import load_train_config, run_main
from unifmoe_dist.train.options import OptionParser


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser("evaluate.py", description="Score a saved run on its test or validation data.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--checkpoint", default="best", help="best, latest or step-N (default: best)")
    parser.add_argument("--split", choices=("test", "validation"), default="test", help="which data")
    parser.add_argument("--data-root", type=Path, help="folder of the data set's files (default: that of the run)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.run.is_dir():
        raise UserError(f"{options.run} is not a folder; give the folder that a training run wrote.")
    config = load_train_config(str(options.run / "config.yaml"))
    from unifmoe_dist.runtime import heartbeat
    from unifmoe_dist.runtime.ranks import running_ranks, seed_everything
    from unifmoe_dist.train import checkpoint
    from unifmoe_dist.train.evaluate import evaluate
    from unifmoe_dist.train.own_model import own_model, own_task
    from unifmoe_dist.train.trainer import summarise
    from unifmoe_dist.train.words import result_sentence

    saved = checkpoint.latest(options.run, options.checkpoint)
    with running_ranks(1) as ranks:
        seed_everything(config.seed)
        heartbeat.doing(f"reading the data of {config.data.task}")
        task = own_task(options.run, config, options.data_root)
        model = own_model(options.run, config).to(ranks.device)
        heartbeat.doing(f"scoring the {options.split} data")
        checkpoint.load_weights(saved, model)
        datasets = task.test if options.split == "test" else task.validation
        score = evaluate(model, task, datasets, config.data.eval_batch_size, ranks, config.data.workers)
        if ranks.rank == 0:
            result = summarise(config, score)
            sentence = result_sentence(result, options.split)
            result["accuracy"] = result.pop("test_accuracy")
            print(json.dumps({"checkpoint": str(saved), "split": options.split, **result}, indent=1), flush=True)
            print(sentence, file=sys.stderr)  # after the numbers, which programs read from standard output


if __name__ == "__main__":
    run_main(main)
