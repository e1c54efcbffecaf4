"""What is said where something is missing: a library that the extra train brings, or room on the disk.

The layer and `upcycle` do without those libraries.
"""

import errno
import sys
from types import TracebackType

from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.signals import is_command

TRAIN = {
    *("PIL", "datasets", "deepspeed", "jinja2", "jsonargparse", "matplotlib", "ninja", "numpy", "pandas", "psutil"),
    *("scipy", "sklearn", "tensorboard", "timm", "torchvision", "tqdm", "transformers", "yaml"),
}
"""The libraries, by the names by which they are imported."""


def explained(error: BaseException) -> BaseException:
    """A UserError in the place of an error that one of them, or room, is missing; another error as it is."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        again = "free space and run the command again, a training run with --resume: what it has saved is whole"
        return UserError(f"the disk is full ({error}); {again}.")
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in TRAIN:
        return error
    return UserError(f"{name} is not installed, which this needs: pip install 'unifmoe-dist[train]'.")


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A command whose own imports fail ends with the sentence and status 2, as for any mistake of its user."""
    told = explained(error)
    if told is error:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {told}", file=sys.stderr)
    sys.exit(2)


if is_command():
    sys.excepthook = _say
