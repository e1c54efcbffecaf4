"""Speed and memory of one layer and of whole models beside the dense versions and the peers."""

from unifmoe_dist.studies.benchmark.contenders import Contender, Result, Timing, matmul_rate, measure, prepare
from unifmoe_dist.studies.benchmark.one_layer import contenders, has_fast_bf16, run_layer
from unifmoe_dist.studies.benchmark.result_tables import sweep_table, table
from unifmoe_dist.studies.benchmark.shapes import CPU_TOKENS, LANGUAGE, PAPER, VISION, Shape, at_operating_point, sweeps
from unifmoe_dist.studies.benchmark.whole_models import MODELS, Model, run_model

__all__ = [
    "CPU_TOKENS",
    "LANGUAGE",
    "MODELS",
    "PAPER",
    "VISION",
    "Contender",
    "Model",
    "Result",
    "Shape",
    "Timing",
    "at_operating_point",
    "contenders",
    "has_fast_bf16",
    "matmul_rate",
    "measure",
    "prepare",
    "run_layer",
    "run_model",
    "sweep_table",
    "sweeps",
    "table",
]
