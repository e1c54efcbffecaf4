"""What several test files of training share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps on one rank; whoever changes it puts it back."""
    # Here: the GPU tests of this folder may run where what training needs is not installed.
    from tests.support.ranks import run_ranks
    from tests.support.training import train

    folder = tmp_path_factory.mktemp("small")
    run_ranks(1, train, str(folder), 10)
    return folder
