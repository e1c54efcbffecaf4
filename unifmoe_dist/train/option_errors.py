"""Mistakes in options as one sentence each, from what the parser of command lines says about them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from unifmoe_dist.config import NO_ZERO_3
from unifmoe_dist.train.option_list import options as every_option
from unifmoe_dist.train.options import listed

_KINDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "a text",
    "<class 'list'>": "a list such as [2,4]",
    "<class 'NoneType'>": "null",
}
_LAUNCHERS = ("num_gpus", "num_accelerators", "num_nodes", "master_port", "hostfile", "nproc-per-node", "nnodes")


def one_sentence(message: str, options: Sequence[str], file: Path | None = None, lines: Mapping[str, int] = {}) -> str:
    """The message in words of this project, or as it is where it is of no known form.

    Args:
        message: Of jsonargparse.
        options: Names of all options, without dashes.
        file: Where the options stand, if not on a command line.
        lines: The line of each option in the file.
    """
    message = message.partition(", denied by")[0]  # what follows tells programmers how to allow it
    words = " ".join(line.strip() for line in message.splitlines() if line.strip())
    if found := re.search(r"unrecognized arguments: --([\w.-]+)", words):
        return _unknown(found[1], options)
    if found := re.fullmatch(r"unrecognized arguments: (-\S*).*", words):
        return f"there is no option {found[1]}; see --help for all."
    if found := re.fullmatch(r"unrecognized arguments: (\S+).*", words):
        return f"{found[1]!r} is one word too many; an option's value stands behind its name, as in --steps 200."
    if found := re.fullmatch(r"argument (--[\w.-]+): expected one argument", words):
        return f"{found[1]} needs a value; see --help."
    if found := re.search(r'Parser key "config": File does not exist: (.*)$', words):
        return f"--config: there is no file {found[1]}."
    if found := re.search(r'Parser key "config": Path is not a file: (.*)$|Unexpected config:', words):
        return f"--config {found[1] or 'empty'} is no file; give a YAML file of options."
    if found := re.search(r'Parser key "([\w.]+)": Unable to load config', words):
        example = next((option for option in options if option.startswith(found[1] + ".")), "NAME")
        return f"--{found[1]} holds options, which are given one by one, such as --{example}."
    for form in (r"(Expected a .*)\. Got value: (.*)$", r"Subtypes: (\[.*\]) Errors: .* Given value: (.*)$"):
        found = re.search(r'Parser key "([\w.]+)": .*?' + form, words)
        if found and (found[1], found[3]) == ("parallel.zero_stage", "3"):
            return NO_ZERO_3
        if found and (wanted := _wanted(found[2])):
            return f"{_named(found[1], file, lines)} must be {wanted}, not {found[3]}."
    if found := re.search(r'Parser key "([\w.]+)": .*?Got value:(.*)$', words):
        values = {option.name: option.values for option in every_option()}
        if found[1] in values:
            return f"{_named(found[1], file, lines)} must be {values[found[1]]}, not {found[2].strip() or 'empty'}."
    if file is not None:
        words = f"{file}: {words}"
    return words if words.endswith(".") else words + "; see --help for every option."


def _named(option: str, file: Path | None, lines: Mapping[str, int]) -> str:
    """An option as its place calls it."""
    if file is None:
        return f"--{option}"
    return f"{file}, line {lines[option]}: {option}" if option in lines else f"{file}: {option}"


def _unknown(name: str, options: Sequence[str]) -> str:
    if name in _LAUNCHERS or name.replace("_", "-") in _LAUNCHERS:
        return f"--{name} is an option of the launcher, so it stands before launch/train.py, not after it."
    return f"there is no option --{name}; {nearest(name, options)}"


def nearest(name: str, options: Sequence[str], dashes: str = "--") -> str:
    """Advice for the name of an option that does not exist: those that it may stand for."""
    last = name.rpartition(".")[2]
    near = [option for option in options if option.rpartition(".")[2] == last] or get_close_matches(name, options)
    return f"did you mean {' or '.join(dashes + option for option in near[:2])}?" if near else "see --help for all."


def _wanted(types: str) -> str:
    """What a value may be, from the names of Python's types."""
    kinds = []
    for found in re.finditer(r"typing\.Literal\[([^\]]*)\]|<class '[\w.]+'>", types):
        if found[1] is None:
            kinds.append(_KINDS.get(found[0]))
        else:
            kinds += [name.strip(" '") for name in found[1].split(",")]
    known = [kind for kind in kinds if kind]
    return listed(known, "or") if known and len(known) == len(kinds) else ""
