"""What a command's process is told before it works: where it prints, warns and draws, whatever it has inherited."""

import codecs
import os
import sys
import warnings
from pathlib import Path

_SPELLED = 'α=alpha|ε=epsilon|λ=lambda|μ=mu|σ=sigma|×=x|±=+-|°= degrees|–=-|—=-|−=-|→=->|≥=>=|≤=<=|…=...|’=\'|“="|”="'
_ASCII = dict(pair.split("=", 1) for pair in _SPELLED.split("|"))
_ERRORS = "unifmoe_spelled_out"
_OURS = (Path(__file__).parents[1], Path(__file__).parents[2] / "launch")


def prepare() -> None:
    """Make standard streams take every character, warnings of this project plain sentences, and plots files."""
    os.environ["MPLBACKEND"] = "Agg"  # a notebook's own, inherited, is one that matplotlib cannot load here
    codecs.register_error(_ERRORS, _spelled_out)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):  # closed from the start, or replaced
            stream.reconfigure(errors=_ERRORS)
    warnings.formatwarning = _plain_warning


def _spelled_out(error: UnicodeError) -> tuple[str, int]:
    """What a stream cannot print, as a word or a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


_usual_format = warnings.formatwarning


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of this project without its place in the code; those of libraries as ever."""
    if category is UserWarning and any(Path(filename).is_relative_to(folder) for folder in _OURS):
        return f"warning: {message}\n"
    return _usual_format(message, category, filename, lineno, line)
