"""Turning the FFNs of existing transformers into UniF-MoE layers.

`upcycle` does it, `moe_layers` finds the result, and `enable_from_pretrained` makes Transformers' `from_pretrained`
rebuild the layers of a saved model. FFNs are found in any transformer; `register_adapter` adds a family whose are not.
"""

from unifmoe_dist.upcycling.convert import moe_layers
from unifmoe_dist.upcycling.dense_ffn import Adapter, DenseFFN
from unifmoe_dist.upcycling.families import ADAPTERS, register_adapter
from unifmoe_dist.upcycling.saving import enable_from_pretrained
from unifmoe_dist.upcycling.upcycle import diversity_loss, leave_experts_alone, upcycle

__all__ = [
    "ADAPTERS",
    "Adapter",
    "DenseFFN",
    "diversity_loss",
    "enable_from_pretrained",
    "leave_experts_alone",
    "moe_layers",
    "register_adapter",
    "upcycle",
]
