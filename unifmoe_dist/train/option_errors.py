"""Mistakes in options as one sentence that names the option and the fix; in YAML files, the file and the line too.

A file is looked at before the parser reads it: what the parser says about a file names neither.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from unifmoe_dist.config import NO_ZERO_3, TrainConfig
from unifmoe_dist.config.checked import words_of
from unifmoe_dist.config.named import kinds_of
from unifmoe_dist.errors import UserError, listed

_LAUNCHERS = ("num_gpus", "num_accelerators", "num_nodes", "master_port", "hostfile", "nproc-per-node", "nnodes")
_ALONE = ("help", "print-config")


def mistake_in_words(words: Sequence[str], fits: Callable[[str, str], bool]) -> str | None:
    """The first mistake on a command line; None if there is none that is known.

    `fits` says whether the parser takes a word for an option.
    """
    options = ["config", *kinds_of(TrainConfig)]
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
            return _refused(f"--{name}", name, _read(value))
    return None


def _refused(place: str, name: str, value: Any) -> str:
    """What an option must be, where its value, as YAML has it, is not that."""
    if (name, str(value)) == ("parallel.zero_stage", "3"):
        return NO_ZERO_3
    kind = kinds_of(TrainConfig)[name]
    wanted = "a list such as [2,4]" if get_origin(kind) is list else listed(words_of(kind), "or")
    return f"{place} must be {wanted}, not {value}."


def _nearest(name: str, options: Iterable[str], dashes: str = "--") -> str:
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
    return f"there is no option --{name}; {_nearest(name, options)}"


# -- files ----------------------------------------------------------------------------------------------------------


def check_file(path: Path) -> dict[str, tuple[int, Any]]:
    """Look at the form and the names of a file that exists; whether its values fit is for the parser.

    Returns:
        The line, from 1, on which each option stands, and its value, by its dotted name.

    Raises:
        UserError: it is empty, no YAML or no list of options; an option does not exist, is given twice or holds an
            object of Python.
    """
    root = _yaml(path)
    if root is None:
        raise UserError(f"{path} is empty; write options such as `steps: 200` into it, or leave --config out.")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no options; write them as lines such as `steps: 200`.")
    options = kinds_of(TrainConfig)
    groups = {option[:end] for option in options for end, letter in enumerate(option) if letter == "."}
    lines: dict[str, int] = {}
    found: dict[str, tuple[int, Any]] = {}
    for name, value, line in _names(root, "", groups):
        place = f"{path}, line {line}:"
        if name not in options and name not in groups:
            raise UserError(f"{place} there is no option {name}; {_nearest(name, options, '')}")
        if name in lines:
            raise UserError(f"{place} {name} is given twice, first in line {lines[name]}; keep one of them.")
        if name in groups and not isinstance(value, yaml.MappingNode):
            example = next(option for option in options if option.startswith(name + "."))
            raise UserError(f"{place} {name} is {_shown(value)}, but must hold options, such as {example}.")
        is_null = value.tag == "tag:yaml.org,2002:null"
        if is_null and name in options and type(None) not in get_args(options[name]):
            raise UserError(f"{place} {name} must have a value, not {_shown(value)}; leave it out for the default.")
        lines[name] = line
        if name not in groups:
            try:
                found[name] = line, yaml.safe_load(yaml.serialize(value))
            except yaml.constructor.ConstructorError as error:
                raise UserError(f"{place} {name} cannot be read ({error.problem}); write a plain value.") from error
    return found


def mistake_in_file(path: Path, found: Mapping[str, tuple[int, Any]], fits: Callable[[str, Any], bool]) -> str | None:
    """The first value of a checked file that the parser does not take (`fits`) for its option."""
    wrong = (
        (f"{path}, line {line}: {name}", name, value) for name, (line, value) in found.items() if not fits(name, value)
    )
    return next((_refused(*mistake) for mistake in wrong), None)


def _yaml(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its rights.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text file ({error}); give a YAML file of options.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f", line {mark.line + 1}"
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{path}{place}: this is no YAML: {what}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: this is no YAML: {' '.join(str(error).split())}.") from error


def _shown(node: yaml.Node) -> str:
    """A value as a person would name it."""
    if isinstance(node, yaml.ScalarNode):
        return node.value or "empty"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a group"


def _names(node: yaml.MappingNode, prefix: str, groups: set[str]) -> Iterator[tuple[str, yaml.Node, int]]:
    """Dotted names with their values and lines, groups included, in the order of the file."""
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":  # the parser resolves it
            continue
        name = prefix + (str(key.value) if isinstance(key, yaml.ScalarNode) else _shown(key))
        yield name, value, key.start_mark.line + 1
        if name in groups and isinstance(value, yaml.MappingNode):
            yield from _names(value, name + ".", groups)
