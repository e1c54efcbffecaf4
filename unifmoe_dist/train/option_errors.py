"""Mistakes in options, once the parser has refused them, as one sentence that names the option and the fix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin

import yaml

from unifmoe_dist.config import NO_ZERO_3, TrainConfig
from unifmoe_dist.config.checked import words_of
from unifmoe_dist.config.named import kinds_of
from unifmoe_dist.errors import listed

_LAUNCHERS = ("num_gpus", "num_accelerators", "num_nodes", "master_port", "hostfile", "nproc-per-node", "nnodes")
_ALONE = ("help", "print-config")


def mistake_in_words(words: Sequence[str], options: Collection[str], fits: Callable[[str, str], bool]) -> str | None:
    """The first mistake on a command line; None if there is none that is known.

    Args:
        words: The command line.
        options: Names of all options, without dashes.
        fits: Whether the parser takes a word for an option.
    """
    for name, value in _pairs(words):
        if not name.startswith("--"):
            if name.startswith("-"):
                return f"there is no option {name}; see --help for all."
            return f"{name!r} is one word too many; an option's value stands behind its name, as in --steps 200."
        name = name.removeprefix("--")
        if name in _ALONE:
            continue
        if name == "config" and value is not None and not Path(value).is_file():
            if value and not Path(value).exists():
                return f"--config: there is no file {value}."
            shown = repr(str(Path(value).absolute())) if value else "empty"
            return f"--config {shown} is no file; give a YAML file of options."
        if example := next((option for option in options if option.startswith(f"{name}.")), None):
            return f"--{name} holds options, which are given one by one, such as --{example}."
        if name not in options:
            return _unknown(name, options)
        if value is None:
            return f"--{name} needs a value; see --help."
        if name != "config" and not fits(name, value):
            return refused(f"--{name}", name, _read(value))
    return None


def refused(place: str, name: str, value: Any) -> str:
    """What an option must be, where its value, as YAML has it, is not that."""
    if (name, str(value)) == ("parallel.zero_stage", "3"):
        return NO_ZERO_3
    kind = kinds_of(TrainConfig)[name]
    wanted = "a list such as [2,4]" if get_origin(kind) is list else listed(words_of(kind), "or")
    return f"{place} must be {wanted}, not {value}."


def nearest(name: str, options: Iterable[str], dashes: str = "--") -> str:
    """Advice for the name of an option that does not exist: those that it may stand for."""
    last = name.rpartition(".")[2]
    near = [option for option in options if option.rpartition(".")[2] == last] or get_close_matches(name, options)
    return f"did you mean {' or '.join(dashes + option for option in near[:2])}?" if near else "see --help for all."


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options with their values, as argparse pairs them; a word that belongs to no option stands for a name."""
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if equals or not name.startswith("--") or name.removeprefix("--") in _ALONE:
            yield name, value
        elif left and not (left[0].startswith("-") and not _is_number(left[0])):
            yield name, left.pop(0)
        else:
            yield name, None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _read(word: str) -> Any:
    """A value of a command line as messages show it."""
    with suppress(yaml.YAMLError):
        if isinstance(found := yaml.safe_load(word), (list, dict)):
            return found
    return word or "empty"


def _unknown(name: str, options: Iterable[str]) -> str:
    if name in _LAUNCHERS or name.replace("_", "-") in _LAUNCHERS:
        return f"--{name} is an option of the launcher, so it stands before launch/train.py, not after it."
    return f"there is no option --{name}; {nearest(name, options)}"
