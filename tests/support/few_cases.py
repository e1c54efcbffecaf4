"""A pytest plugin for slow surroundings: of a test's many parameter sets one runs, the first and the last in turns.

`tests/kernels/triton` interprets kernels, a thousand times as slow as a GPU; tests/README.md says how to run all.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {cases[-(number % 2)].nodeid for number, cases in enumerate(by_function.values())}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
