"""Which folder a run may write into, an empty one or with --resume its own, and the options with which it goes on."""

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unifmoe_dist.algorithms.registry import REGISTRY as ALGORITHMS
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import as_word, by_dotted_name
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.run import check_free, resumes, unused


def choose_folder(config: TrainConfig) -> Path:
    """The run's folder, made if it was named; refuses to write over another run.

    Raises:
        UserError: the folder holds a run and --resume was not given, or --resume was given and it holds none, or one
            that has gone beyond config.steps; the folder cannot be made.
    """
    if config.output is not None:
        folder = Path(config.output)
        try:
            if resumes(config.resume, folder):
                reached = checkpoint.load_progress(checkpoint.latest(folder))["step"]
                if config.epochs is None and config.steps < reached:  # with epochs, the data must be read first
                    raise UserError(
                        f"{folder} is at step {reached} already, beyond --steps {config.steps}; give a larger --steps, "
                        "or none to test the run again."
                    )
                _check_same_run(folder, config)
            else:
                _check_no_run(folder, config)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {folder} cannot be used ({error}); choose another folder.") from error
        return folder
    stem = f"runs/{config.data.task}-{method_of(config.model.moe).word}"
    if not ALGORITHMS[config.algorithm.name].plain:
        stem += f"-{config.algorithm.name}"
    number = 1
    while (folder := Path(stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return folder


def _check_no_run(folder: Path, config: TrainConfig) -> None:
    """Refuse a folder where a new run would write over something."""
    path = folder / "config.yaml"
    if path.exists() and config.resume != "auto":
        saved = checkpoint.complete(folder / "checkpoints")
        advice = "add --resume to continue it" if saved else "it has no checkpoint to resume, so delete it"
        raise UserError(f"{folder} already holds a run; {advice} or choose another --output.")
    check_free(folder)


def _check_same_run(folder: Path, config: TrainConfig) -> None:
    """Refuse options under which a run's weights would load but mean something else, or its scores would."""
    path = folder / "config.yaml"
    old = load_train_config(str(path)) if path.is_file() else config
    same_task = old.data.task == config.data.task  # otherwise environments are not to be compared

    def fixed(options: TrainConfig) -> dict[str, Any]:
        data, method = options.data, method_of(options.model.moe)
        return {
            "model.moe": options.model.moe,
            "model.num_experts": options.model.num_experts if method.layer and not method.grows else None,
            "model.num_blocks": options.model.num_blocks,
            "model.top_k": options.model.top_k,
            "model.gate_temperature": method.taken(vars(options.model)).get("gate_temperature"),
            "model.shared_demand": options.model.shared_demand,
            "model.fixed_experts": options.model.fixed_experts,
            "model.block_choice": options.model.block_choice,
            "model.backbone": options.model.backbone,
            "data.task": data.task,
            "data.held_out": find_task(data.task).held_out(options) if same_task else None,
            "data.split_seed": options.seed if data.split_seed is None else data.split_seed,
            "algorithm.name": options.algorithm.name,
            "optim.name": options.optim.name.removesuffix("w"),  # adam and adamw keep the same state
        }

    saved, given = fixed(old), fixed(config)
    for name, value in saved.items():
        if given[name] != value:
            if name == "data.split_seed" and config.data.split_seed is None and old.data.split_seed is None:
                name, given["seed"] = "seed", config.seed  # what was given; it also splits the data
            raise UserError(
                f"{folder} was trained with {name} {value}, so it cannot be resumed with {given[name]}; "
                "start another run in another --output."
            )


_OF_THE_START = ("output", "resume", "progress")
"""Options that say how a run is started, not what it does."""


def changed_options(old: TrainConfig, new: TrainConfig) -> list[str]:
    """`name: old value -> new value` of every option that differs."""
    before, after = (
        {name: list(value) if isinstance(value, tuple) else value for name, value in by_dotted_name(asdict(c)).items()}
        for c in (old, new)
    )
    return [
        f"{name}: {as_word(before[name])} -> {as_word(value)}"
        for name, value in after.items()
        if name not in _OF_THE_START and value != before[name]
    ]


def keep_options(run: Path, new: TrainConfig) -> None:
    """If a resumed run's options change, say which, and keep its config.yaml as config-1.yaml, config-2.yaml, ..."""
    path = run / "config.yaml"
    if not path.is_file():
        return
    if changed := changed_options(load_train_config(str(path)), new):
        kept = unused(path)
        shutil.copy2(path, kept)
        lines = [f"{run} goes on with other options; {kept.name} keeps those it had:", *(f"  {c}" for c in changed)]
        print("\n".join(lines), file=sys.stderr, flush=True)
