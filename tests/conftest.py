"""Settings of every test, made before torch is imported."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing.forkserver
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # distributed tests start several processes on few cores
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a download

from tests.support.compiled import compile_for_ranks, own_folder  # noqa: E402

own_folder()

import pytest  # noqa: E402
import torch  # noqa: E402

RANK_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
NAMES_AT_START = set(os.environ)

# One server forks the processes of the tests and of what they test. With a GPU it may not touch CUDA.
multiprocessing.set_forkserver_preload(
    ["torch", "unifmoe_dist.layer"] if torch.cuda.is_available() else ["tests.support.preloaded"]
)
multiprocessing.forkserver.set_forkserver_preload = lambda modules: None  # the first server serves all


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("numprocesses", None):
        compile_for_ranks()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; have tests that share a fixture of their file run in one process."""
    absent = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "tutel": None if importlib.util.find_spec("tutel") else "needs the tutel extra",
    }
    for item in items:
        for marker, reason in absent.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(definitions[-1].scope == "module" for definitions in fixtures):  # else each worker would make its own
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish(session: pytest.Session) -> None:
    if "tests.support.ranks" in sys.modules and not session.config.option.collectonly:
        compile_for_ranks()
    gc.collect()
    gc.freeze()  # no collection goes over the libraries and the tests again


@pytest.fixture(autouse=True)
def no_rank_of_another_test() -> Iterator[None]:
    """A command called here makes this process a job of one rank, which the libraries of a later test would join."""
    for name in RANK_NAMES - NAMES_AT_START:
        os.environ.pop(name, None)
    yield
    for name in RANK_NAMES - NAMES_AT_START:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def pacs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny PACS; each environment has 7 classes of 6 images."""
    from tests.support.tiny_images import make_benchmark

    return make_benchmark(tmp_path_factory.mktemp("pacs"), "pacs", per_class=6, size=40)
