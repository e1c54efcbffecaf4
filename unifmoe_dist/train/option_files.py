"""YAML files and values of options: of the right type, or one sentence that says where and what is wrong."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from unifmoe_dist.config import NO_ZERO_3, TrainConfig
from unifmoe_dist.config.checked import words_of
from unifmoe_dist.config.named import kinds_of
from unifmoe_dist.errors import UserError, listed


class _Loader(yaml.SafeLoader):
    """Takes 1e-3 for a number, as YAML 1.2 does, and a date for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)  # type: ignore[type-var]


def read_options(path: Path) -> dict[str, Any]:
    """The options that a file gives, by dotted name.

    Raises:
        UserError: it cannot be read, is empty, no YAML or no list of options; an option does not exist, is given twice,
            or is of another type.
    """
    root = _yaml(path)
    if root is None:
        raise UserError(f"{path} is empty; write options such as `steps: 200` into it, or leave --config out.")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no options; write them as lines such as `steps: 200`.")
    options = kinds_of(TrainConfig)
    groups = {option[:end] for option in options for end, letter in enumerate(option) if letter == "."}
    lines: dict[str, int] = {}
    found: dict[str, Any] = {}
    for name, value, line in _names(root, "", groups):
        place = f"{path}, line {line}:"
        if name not in options and name not in groups:
            raise UserError(f"{place} there is no option {name}; {nearest(name, options, '')}")
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
                found[name] = taken(f"{place} {name}", options[name], _Loader(yaml.serialize(value)).get_single_data())
            except yaml.constructor.ConstructorError as error:
                raise UserError(f"{place} {name} cannot be read ({error.problem}); write a plain value.") from error
    return found


def read_word(name: str, kind: Any, word: str) -> Any:
    """The value of an option on a command line.

    Raises:
        UserError: it is of another type.
    """
    if str in (kind, *get_args(kind)):  # as it stands, whatever YAML would make of it
        return None if word in ("null", "~") and type(None) in get_args(kind) else word
    value: Any = word
    with suppress(yaml.YAMLError):
        value = _Loader(word).get_single_data()
    return taken(f"--{name}", kind, value, value if isinstance(value, (list, dict)) else word or "empty")


def taken(place: str, kind: Any, value: Any, shown: Any = None) -> Any:
    """A value that is of an option's type; `place` and `shown` say where and what it is.

    Raises:
        UserError: it is of another.
    """
    try:
        given = tuple(value) if get_origin(kind) is tuple and isinstance(value, list) else value
        return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(given)
    except ValidationError:
        if place.endswith("parallel.zero_stage") and value == 3:
            raise UserError(NO_ZERO_3) from None
        wanted = "a list such as [2,4]" if get_origin(kind) is list else listed(words_of(kind), "or")
        raise UserError(f"{place} must be {wanted}, not {value if shown is None else shown}.") from None


def nearest(name: str, options: Iterable[str], dashes: str = "--") -> str:
    """Advice for the name of an option that does not exist: those that it may stand for."""
    last = name.rpartition(".")[2]
    near = [option for option in options if option.rpartition(".")[2] == last] or get_close_matches(name, options)
    return f"did you mean {' or '.join(dashes + option for option in near[:2])}?" if near else "see --help for all."


def _yaml(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
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
        name = prefix + (str(key.value) if isinstance(key, yaml.ScalarNode) else _shown(key))
        yield name, value, key.start_mark.line + 1
        if name in groups and isinstance(value, yaml.MappingNode):
            yield from _names(value, name + ".", groups)
