"""Named parts of a training step, as ranges in the profiles of torch.profiler and, through it, NVTX.

Without a profiler a range costs one global look-up, so they stay in the code. The backward pass has no ranges of its
own: a profile links every backward event to the forward operation it belongs to, and so to the range around that one.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from torch.autograd import profiler

PREFIX = "unifmoe::"

RangeName = Literal[
    "step", "route", "dispatch", "shared_experts", "residual_experts", "combine", "all_reduce", "optimizer"
]


def profile_range(name: RangeName) -> AbstractContextManager:
    """A range called "unifmoe::<name>" while a profiler records, else nothing."""
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else nullcontext()
