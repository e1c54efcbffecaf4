"""What processes of the tests need, imported once by the server that forks them all: each then starts in a moment."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import redirect_stdout

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns of what it finds otherwise

import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401
import sklearn.datasets  # noqa: E402, F401
import timm  # noqa: E402, F401
import torch._dynamo  # noqa: E402
import torch.utils.tensorboard  # noqa: E402, F401
import transformers.optimization  # noqa: E402, F401
from deepspeed.comm.torch import build_shm_op  # noqa: E402

import unifmoe_dist.studies.training_plots  # noqa: E402, F401
import unifmoe_dist.train.trainer  # noqa: E402, F401

with redirect_stdout(sys.stderr):
    build_shm_op()  # compiled when the tests started; else every process looks at the sources anew
gc.collect()
gc.freeze()  # no collection in a forked process goes over all this again, or copies its pages
