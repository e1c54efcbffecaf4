"""Mistakes in YAML files of options, said with the file, the line and the nearest option.

A file is looked at before the parser reads it: what the parser says about a file names neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import kinds_of
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.option_errors import nearest, refused


def check_file(path: Path, options: Collection[str]) -> tuple[dict[str, int], dict[str, Any]]:
    """Look at a file's form and names; whether its values fit is for the parser.

    Args:
        path: A file that exists.
        options: Dotted names of all options.

    Returns:
        The line, from 1, on which each option stands, and its value, by its dotted name.

    Raises:
        UserError: it is empty, no YAML or no list of options; an option does not exist, is given twice or holds an
            object of Python.
    """
    root = _read(path)
    if root is None:
        raise UserError(f"{path} is empty; write options such as `steps: 200` into it, or leave --config out.")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no options; write them as lines such as `steps: 200`.")
    groups = {option[:end] for option in options for end, letter in enumerate(option) if letter == "."}
    with_value = {name for name, kind in kinds_of(TrainConfig).items() if type(None) not in get_args(kind)}
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for name, value, line in _names(root, "", groups):
        place = f"{path}, line {line}:"
        if name not in options and name not in groups:
            raise UserError(f"{place} there is no option {name}; {nearest(name, options, '')}")
        if name in lines:
            raise UserError(f"{place} {name} is given twice, first in line {lines[name]}; keep one of them.")
        if name in groups and not isinstance(value, yaml.MappingNode):
            example = next(option for option in options if option.startswith(name + "."))
            raise UserError(f"{place} {name} is {_shown(value)}, but must hold options, such as {example}.")
        if name in with_value and value.tag == "tag:yaml.org,2002:null":
            raise UserError(f"{place} {name} must have a value, not {_shown(value)}; leave it out for the default.")
        lines[name] = line
        if name not in groups:
            try:
                values[name] = yaml.safe_load(yaml.serialize(value))
            except yaml.constructor.ConstructorError as error:
                raise UserError(f"{place} {name} cannot be read ({error.problem}); write a plain value.") from error
    return lines, values


def mistake_in_file(
    path: Path, lines: Mapping[str, int], values: Mapping[str, Any], fits: Callable[[str, Any], bool]
) -> str | None:
    """The first value of a checked file that the parser does not take (`fits`) for its option."""
    wrong = next((name for name, value in values.items() if not fits(name, value)), None)
    return wrong and refused(f"{path}, line {lines[wrong]}: {wrong}", wrong, values[wrong])


def _read(path: Path) -> yaml.Node | None:
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
