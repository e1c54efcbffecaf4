"""Diagnostics of a trained top-k MoE layer: the paper's section "Motivation", equations to the letter.

    captured = capture(model, {"blocks.3.mlp": layer}, batches, keep_tokens=True)["blocks.3.mlp"]
    diagnosis = diagnose(FrozenExperts.of(layer), captured.tokens, expert_scores(captured.routing))
    write_diagnosis(diagnosis, folder)
"""

from unifmoe_dist.analysis.diagnostics.experts import FrozenExperts
from unifmoe_dist.analysis.diagnostics.router_training import RouterTraining
from unifmoe_dist.analysis.diagnostics.study import Diagnosis, Settings, diagnose
from unifmoe_dist.analysis.diagnostics.tables import write_diagnosis
from unifmoe_dist.analysis.diagnostics.task_router import train_router_on_task

__all__ = [
    "Diagnosis", "FrozenExperts", "RouterTraining", "Settings", "diagnose", "train_router_on_task", "write_diagnosis",
]  # fmt: skip
