"""What a check finds, and what to do about it."""

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Literal

SETUP = "`make setup`, or `pip install 'unifmoe-dist[train]'`"
Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    subject: str
    status: Status  # note: something optional is missing or slow; problem: training cannot work
    text: str
    advice: str = ""  # what to do about it, commands in backticks; empty if all is well


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, "ok", text)


def note(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, "note", text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, "problem", text, advice)


def expect(good: object, subject: str, text: str, advice: str, otherwise: Status = "note") -> Finding:
    """Ok if what was expected is there, else a finding with advice."""
    return ok(subject, text) if good else Finding(subject, otherwise, text, advice)


def version_of(package: str) -> str | None:
    """An installed package's version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """What can be compared of a version: "2.11.0+cu128" -> (2, 11, 0)."""
    return tuple(map(int, re.findall(r"^[\d.]*\d", version)[0].split(".")))
