"""Imports point one way: down the picture of docs/architecture.md, lazy ones and names of modules in strings too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.jobs import ROOT

PACKAGE = "unifmoe_dist"


def rows() -> list[list[str]]:
    """The picture's rows, from the top: the names at the start of its lines, three spaces apart."""
    picture = re.search(r"```text\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.S)
    assert picture is not None
    starts = [re.split(r" {4,}", line)[0] for line in picture[1].splitlines() if not line.startswith(" ")]
    return [[name.strip("/") for name in start.split()] for start in starts]


HEIGHT = {name: -index for index, row in enumerate(rows()) for name in row}
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every module of the package that a file names, other than for its annotations alone."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {inner for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == PACKAGE else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE]
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"{PACKAGE}(\.\w+)+", str(node.value)):
            names = [str(node.value)]
        else:
            continue
        yield from ((node.lineno, name) for name in names)


def part(module: str) -> str | None:
    """The part of the picture that a module belongs to: itself, or its package; None for the package's public names."""
    first, *rest = module.split(".")[1:]
    return next((name for name in ("/".join([first, *rest[:1]]), first) if name in HEIGHT), None)


def test_the_picture_shows_every_part():
    there = {
        path.stem for path in (ROOT / PACKAGE).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {name for name in HEIGHT if "/" not in name} == there - {"__init__"} | {"launch"}
    for name in HEIGHT:
        assert "/" not in name or (ROOT / PACKAGE / f"{name}.py").is_file()


def test_imports_point_down():
    wrong = []
    for path in FILES:
        own = part(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own is None:
            continue  # __init__.py gives the public names, wherever they are
        for line, module in imported(ast.parse(path.read_text())):
            other = part(module)
            if other not in (own, None) and HEIGHT[other] >= HEIGHT[own]:
                wrong.append(f"{path}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_launch_scripts_are_imported_by_nothing():
    for path in FILES:
        assert not re.search(r"^\s*(from|import) launch\b", path.read_text(), re.M), path
