"""What a check finds, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Literal

SETUP = "`make setup`, or install the package again"


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Args:
        subject: What.
        status: ok; note, where something optional is missing or slow; problem, where training cannot work.
        text: What was found.
        advice: What to do about it, commands in backticks; empty if all is well.
    """

    subject: str
    status: Literal["ok", "note", "problem"]
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, "ok", text)


def note(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, "note", text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, "problem", text, advice)


def version_of(package: str) -> str | None:
    """An installed package's version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """What can be compared of a version: "2.11.0+cu128" -> (2, 11, 0)."""
    return tuple(map(int, re.findall(r"^[\d.]*\d", version)[0].split(".")))
