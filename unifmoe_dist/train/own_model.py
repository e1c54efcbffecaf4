"""What a run itself knows about its model, so that it opens without the pretrained backbone and without its data.

    own_model(Path("runs/mine"), config)      the model, with whatever weights it starts from
    own_task(Path("runs/mine"), config)       the data, read with the tokenizer that the run keeps

For a language task the folder `backbone` in a run holds the dense model's config and the tokenizer. Runs that are older
than it open where the backbone's config can be had.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.encoders import TINY
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import appearing
from unifmoe_dist.train import build
from unifmoe_dist.upcycling.saving import without_notes

BACKBONE = "backbone"


def keep_backbone(run: Path, config: TrainConfig, model: Any) -> None:
    """Write the dense model's config and the tokenizer of a language task into a run, if they are not there.

    A run goes on without them: they only let it be opened elsewhere.
    """
    folder = run / BACKBONE
    from_transformers = hasattr(getattr(model, "config", None), "to_json_string")
    task = find_task(config.data.task)
    if not (from_transformers and task.language) or config.model.backbone == TINY or folder.exists():
        return
    try:
        with appearing(folder) as temporary:
            temporary.mkdir()
            without_notes(model.config).save_pretrained(temporary)
            task.tokenizer(config).save_pretrained(str(temporary))
    except (OSError, ValueError, NotImplementedError) as error:  # a full disk; a tokenizer that cannot be saved
        print(
            f"warning: {folder} could not be written ({error}); to open this run elsewhere, its backbone is needed.",
            file=sys.stderr,
            flush=True,
        )


def own_config(run: Path, config: TrainConfig) -> TrainConfig:
    """The run's options with its own folder in the place of the backbone, and no weights but its own."""
    folder = run / BACKBONE
    return find_task(config.data.task).offline(config, folder if (folder / "config.json").is_file() else None)


def own_model(run: Path, config: TrainConfig) -> nn.Module:
    """The run's model with random weights, all experts here; reads neither data nor pretrained weights.

    Raises:
        UserError: the run is older than its folder `backbone`, and its backbone's config cannot be had.
    """
    return build.convert(config, find_task(config.data.task).untrained(own_config(run, config)))


def own_task(run: Path, config: TrainConfig, root: Path | None = None) -> TaskData:
    """The run's data, from another folder if one is given; its `build_model` draws random weights.

    Raises:
        UserError: the data are not there, or the task reads no folder.
    """
    if root is not None:
        if "data.root" in find_task(config.data.task).ignored:
            raise UserError(f"--data-root would change nothing in data.task {config.data.task}; leave it out.")
        config = replace(config, data=replace(config.data, root=str(root)))
    own = own_config(run, config)
    return replace(build.build_task(own), build_model=partial(find_task(own.data.task).untrained, own))
