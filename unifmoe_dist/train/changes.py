"""Options with which a run goes on that are not those it had: said, and the old ones kept."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.option_values import as_word, by_dotted_name
from unifmoe_dist.train.run import unused

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
