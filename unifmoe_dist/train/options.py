"""Options of the scripts in launch/: one parser whose refusals are one sentence each, as everywhere."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from unifmoe_dist.errors import UserError, listed

_program: str | None = None  # a process runs one command


def name_program(words: str) -> None:
    """Have help and usage of this process's command name what was typed, such as `unifmoe report`."""
    global _program
    _program = words


def program(script: str) -> str:
    """How the command was called: as the script launch/SCRIPT, unless it went by another name."""
    return _program or script


class OptionParser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are `UserError`s.

    Args:
        script: Name of the script, such as report.py; subcommands have none and take `prog`.
        options: As of argparse.ArgumentParser.
    """

    def __init__(self, script: str | None = None, **options: Any) -> None:
        if script is not None:
            options["prog"] = program(script)
        options.setdefault("allow_abbrev", False)
        if "\n" in (options.get("description") or ""):  # laid out by hand
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            UserError: always.
        """
        raise UserError(_one_sentence(message, _names(self)))

    def given(self, words: Sequence[str]) -> dict[str, str]:
        """The options that stand on the command line itself, whatever they say: flag by attribute."""
        flags = {a.dest: a.option_strings[-1] for a in self._actions if a.option_strings and a.dest != "help"}
        found = self.parse_args(words, argparse.Namespace(**dict.fromkeys(flags)))  # None: no default takes its place
        return {name: flag for name, flag in flags.items() if getattr(found, name) is not None}

    def refuse_others(self, words: Sequence[str], taken: Collection[str], what: str) -> None:
        """Refuse options that would change nothing.

        Args:
            words: The command line.
            taken: Attributes of options that do something.
            what: Who ignores the others, as the beginning of a sentence.

        Raises:
            UserError: there are others.
        """
        if others := [flag for name, flag in self.given(words).items() if name not in taken]:
            raise UserError(f"{what}, so {listed(others, 'and')} would change nothing; leave it out.")


def _names(parser: argparse.ArgumentParser) -> list[str]:
    names = [name for name in parser._option_string_actions if name.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names += [name for sub in action.choices.values() for name in _names(sub)]
    return names


_KINDS = {"int": "a whole number", "float": "a number"}


def _one_sentence(message: str, names: Iterable[str]) -> str:
    """argparse's message in words of this project, or as it is where it is of no known form."""
    if found := re.fullmatch(r"unrecognized arguments: (.*)", message):
        word = next((w for w in found[1].split() if w.startswith("--")), found[1].split()[0]).partition("=")[0]
        if not word.startswith("-"):
            return f"{word!r} is one word too many; see --help for what the command takes."
        near = get_close_matches(word, list(names), n=2)
        return f"there is no option {word}; " + (f"did you mean {listed(near, 'or')}?" if near else "see --help.")
    if found := re.fullmatch(r"argument (\S+).*: invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
        choices = [choice.strip().strip("'") for choice in found[3].split(",")]
        near = get_close_matches(found[2], choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        return f"{_flag(found[1])} must be {listed(choices, 'or')}, not {found[2]}{hint}"
    if found := re.fullmatch(r"argument (\S+).*: invalid (\w+) value: '(.*)'", message):
        return f"{_flag(found[1])} must be {_KINDS.get(found[2], 'a ' + found[2])}, not {found[3]}."
    if found := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"{listed(found[1].split(', '), 'and')} must be given; see --help."
    if found := re.fullmatch(r"argument (\S+): expected (one|at least one) argument", message):
        return f"{_flag(found[1])} needs {'a value' if found[2] == 'one' else 'one value or more'}; see --help."
    return message[:1] + message[1:].rstrip(".") + "; see --help."


def _flag(name: str) -> str:
    return name.rpartition("/")[2]  # of --a/--b, the last
