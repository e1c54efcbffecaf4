"""Cores, memory and disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from unifmoe_dist.studies.doctor.findings import Finding, expect, note, ok

SHARED = Path("/dev/shm")  # noqa: S108  looked at, not written to


def capacity() -> Iterator[Finding]:
    yield ok("machine", f"{os.cpu_count() or 1} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB memory")
    free = shutil.disk_usage(".").free / 2**30
    yield expect(free > 10, "disk", f"{free:.0f} GiB free here", "checkpoints of large models need more: free space")


def shared_memory() -> Iterator[Finding]:
    if SHARED.is_dir():
        size = shutil.disk_usage(SHARED).total / 2**30
        advice = "image workers and NCCL need more: `docker run --ipc host`"
        yield expect(size >= 1, str(SHARED), f"{size:.1f} GiB", advice)


def threads() -> Iterator[Finding]:
    if "OMP_NUM_THREADS" not in os.environ:
        advice = "`export OMP_NUM_THREADS=1` for CPU runs where other jobs run too: threads that wait spin"
        yield note("OMP_NUM_THREADS", "not set", advice)
