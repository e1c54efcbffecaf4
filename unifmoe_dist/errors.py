"""Errors meant for the person at the keyboard."""

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in a configuration, shape, path or world size.

    The message is one clear sentence that names the offending value and the fix. Command-line programs print
    it without a traceback, once per node, and exit with status 2.
    """


def listed(names: Sequence[str], word: str) -> str:
    """Names as people list them: "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last
