"""Options of the scripts in launch/: one parser whose refusals are one sentence each, as everywhere."""

import argparse
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
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


@contextmanager
def writing_to(output: Path) -> Iterator[None]:
    """Make the folder of --output.

    Raises:
        UserError: it cannot be made, or what the context writes cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"--output {output} cannot be used ({error}); choose another folder.") from error


class OptionParser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are `UserError`s; subcommands have no `script` and take `prog`."""

    def __init__(self, script: str | None = None, **options: Any) -> None:
        if script is not None:
            options["prog"] = program(script)
        options.setdefault("allow_abbrev", False)
        if "\n" in (options.get("description") or ""):  # laid out by hand
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line with a UserError."""
        names = message.removeprefix("the following arguments are required: ")
        what = message[:1] + message[1:].rstrip(".")
        raise UserError(
            f"{what if names == message else listed(names.split(', '), 'and') + ' must be given'}; see --help."
        )

    def parse_args(self, words: Any = None, namespace: Any = None) -> Any:
        found, left = self.parse_known_args(words, namespace)
        if left:
            word = next((word for word in left if word.startswith("--")), left[0]).partition("=")[0]
            if not word.startswith("-"):
                raise UserError(f"{word!r} is one word too many; see --help for what the command takes.")
            near = get_close_matches(word, _names(self), n=2)
            advice = f"did you mean {listed(near, 'or')}?" if near else "see --help."
            raise UserError(f"there is no option {word}; {advice}")
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UserError(f"{_flag(action)} must be {listed(choices, 'or')}, not {value}{hint}")

    def _get_value(self, action: argparse.Action, word: str) -> Any:
        try:
            return super()._get_value(action, word)
        except argparse.ArgumentError as error:
            if action.type not in _KINDS:
                raise
            raise UserError(f"{_flag(action)} must be {_KINDS[action.type]}, not {word}.") from error

    def _match_argument(self, action: argparse.Action, pattern: str) -> int:
        try:
            return super()._match_argument(action, pattern)
        except argparse.ArgumentError as error:
            several = "one value or more" if action.nargs == argparse.ONE_OR_MORE else "a value"
            raise UserError(f"{_flag(action)} needs {several}; see --help.") from error

    def given(self, words: Sequence[str]) -> dict[str, str]:
        """The options that stand on the command line itself, whatever they say: flag by attribute."""
        flags = {a.dest: a.option_strings[-1] for a in self._actions if a.option_strings and a.dest != "help"}
        found = self.parse_args(words, argparse.Namespace(**dict.fromkeys(flags)))  # None: no default takes its place
        return {name: flag for name, flag in flags.items() if getattr(found, name) is not None}

    def refuse_others(self, words: Sequence[str], taken: Collection[str], what: str) -> None:
        """Refuse options besides those that are `taken`, which would change nothing.

        `what` says who ignores the others, as the beginning of a sentence.

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


_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}


def _flag(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
