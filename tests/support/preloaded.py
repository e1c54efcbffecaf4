"""What processes of the tests need, imported once by the server that forks them all: each then starts in a moment."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns of what it finds otherwise

import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401
import sklearn.datasets  # noqa: E402, F401
import timm  # noqa: E402, F401
import torch.utils.tensorboard  # noqa: E402, F401
import transformers.modeling_utils  # noqa: E402, F401

import unifmoe_dist.train.trainer  # noqa: E402, F401
from tests.support.ranks import PLOTS  # noqa: E402
from unifmoe_dist.config import TrainConfig  # noqa: E402
from unifmoe_dist.studies import training_plots  # noqa: E402
from unifmoe_dist.train.build import check_layers  # noqa: E402
from unifmoe_dist.train.cli import dump_train_config  # noqa: E402

with suppress(ImportError):  # an older DeepSpeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  each engine imports it, and with it inductor

_plot_run = training_plots.plot_run


def plot_run(folder: Path) -> list[Path]:
    """The plots of a run, where a test asks for them."""
    return _plot_run(folder) if PLOTS in os.environ else []


training_plots.plot_run = plot_run
# In loops on DeepSpeed too: train/deepspeed.py says why. `deepspeed.comm.torch` itself is torch, by a star import.
import_module("deepspeed.comm.torch").build_shm_op = lambda: None
check_layers(TrainConfig()), dump_train_config(TrainConfig())  # a run's first steps, which import more
gc.collect()
gc.freeze()  # no collection in a forked process goes over all this again, or copies its pages
