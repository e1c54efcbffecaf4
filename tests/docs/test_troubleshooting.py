"""docs/troubleshooting.md quotes messages that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
OURS = PAGE.split("## ")[1]
MESSAGES = [text for line in re.findall(r"^\| (`.*?) \|", OURS, re.M) for text in re.findall(r"`([^`]+)`", line)]
GAP = "\0"


def texts() -> list[str]:
    """Every string of the code, with a gap for each value that is put in; neighbours in brackets count as one."""
    found = []
    for folder in ("unifmoe_dist", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(v.value if isinstance(v, ast.Constant) else GAP for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


TEXTS = texts()


def in_the_code(message: str) -> bool:
    parts = [re.escape(part) for part in message.split("…")]
    return any(re.search(".+".join(parts), text, re.S) for text in TEXTS)


def test_there_are_many():
    assert len(MESSAGES) > 25
    assert not in_the_code("num_experts … is not divisible by the moon")


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_code(message):
    assert in_the_code(message)
