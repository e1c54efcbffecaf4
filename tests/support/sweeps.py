"""Plans of sweeps."""

from __future__ import annotations

from pathlib import Path

from tests.support.jobs import ROOT
from unifmoe_dist.studies.sweep.planned_runs import Selection, expand

CPU = {"CUDA_VISIBLE_DEVICES": ""}


CONFIGS = ROOT / "configs"


def plan(output, *, methods=("dense",), held_out=("rot0",), seeds=(0,), settings=("steps=2", "eval_every=2"), **more):
    selection = Selection(("digits",), methods, held_out, seeds, settings=settings, **more)
    return expand(selection, Path(output), CONFIGS)
