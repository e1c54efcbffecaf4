"""Diagnostics of a trained top-k MoE layer: the paper's section "Motivation", equations to the letter.

captured = capture(model, {"blocks.3.mlp": layer}, batches, keep_tokens=True)["blocks.3.mlp"]
diagnosis = diagnose(FrozenExperts.of(layer), captured.tokens, expert_scores(captured.routing))
write_diagnosis(diagnosis, folder)
"""

from unifmoe_dist.studies.diagnostics.channels import FrozenExperts
from unifmoe_dist.studies.diagnostics.files import write_diagnosis
from unifmoe_dist.studies.diagnostics.routers import RouterTraining, train_router_on_task
from unifmoe_dist.studies.diagnostics.study import Diagnosis, Settings, diagnose

__all__ = [
    "Diagnosis",
    "FrozenExperts",
    "RouterTraining",
    "Settings",
    "diagnose",
    "train_router_on_task",
    "write_diagnosis",
]
