"""The words of `launch/train.py --estimate`, told apart from those of training without importing what estimates."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unifmoe_dist.errors import UserError


def plan_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """--estimate and what belongs to it, and the words that are left.

    Raises:
        UserError: a value is out of range, or belongs to --estimate, which is not given.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--num-gpus-per-node", "--num_gpus_per_node", type=int)
    parser.add_argument("--num-nodes", "--num_nodes", type=int)
    parser.add_argument("--gpu-memory-gb", "--gpu_memory_gb", type=float)
    parser.add_argument("--estimate-device", "--estimate_device", choices=("gpu", "cpu"))
    try:
        options, words = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help.") from error
    for name, value in vars(options).items():
        if name == "estimate" or value is None:
            continue
        flag = "--" + name.replace("_", "-")
        if not options.estimate:
            raise UserError(f"{flag} belongs to --estimate, which trains nothing; add --estimate or leave it out.")
        if not isinstance(value, str) and not value > 0:
            raise UserError(f"{flag} must be above 0, not {value:g}.")
    return options, words
