"""A layer so small that it takes no time to measure, and where."""

from __future__ import annotations

import torch

from unifmoe_dist.studies.benchmark.peers import Shape

CPU = torch.device("cpu")
SMALL = Shape("small", 40, 48, 96, 4, 4, 5.0)
