"""Turning the FFNs of existing transformers into UniF-MoE layers.

`upcycle` does it, `moe_layers` finds the result, and importing this package makes Transformers'
`from_pretrained` rebuild the layers of a saved model. A model family is one entry in `ADAPTERS`.
"""

from unifmoe_dist.upcycling.families import ADAPTERS, Adapter, DenseFFN
from unifmoe_dist.upcycling.rebuild import install_rebuild
from unifmoe_dist.upcycling.upcycle import diversity_loss, moe_layers, upcycle

install_rebuild()

__all__ = ["ADAPTERS", "Adapter", "DenseFFN", "diversity_loss", "moe_layers", "upcycle"]
