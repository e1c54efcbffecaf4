"""Settings of every test, made before torch is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # distributed tests start several processes on few cores
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a download

import pytest  # noqa: E402
import torch  # noqa: E402

from unifmoe_dist.engine import compiling  # noqa: E402

COMPILE = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile what DeepSpeed's CPU ranks need before any test: inside one, its time limit could end the compiler."""
    here = hasattr(session.config, "workerinput")  # a worker of pytest-xdist: the session has begun before it
    if not (here or torch.cuda.is_available() or session.config.option.collectonly or compiling.is_built()):
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        subprocess.run([sys.executable, "-c", COMPILE], env=environment, timeout=900, check=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    absent = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "tutel": None if importlib.util.find_spec("tutel") else "needs the tutel extra",
    }
    for item in items:
        for marker, reason in absent.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
