"""BERT and its kind in Hugging Face Transformers, whose layers keep the places that earlier versions gave them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from unifmoe_dist.upcycling.dense_ffn import DenseFFN
from unifmoe_dist.upcycling.reader import attribute
from unifmoe_dist.upcycling.token_mask import TokenMaskBridge


@dataclass
class BertLike:
    """An encoder below any head; its layers keep dropout, residual and norm, and hand their attention mask over.

    Args:
        name: For readers.
        model_type: What the configuration calls it.
        layers: Place of the transformer layers in the body.
        parts: Places in a layer of the up projection, the activation and the down projection.
        place: Where the UniF-MoE layer goes; parts outside of it do nothing any more.
    """

    name: str
    model_type: str
    layers: str = "encoder.layer"
    parts: tuple[str, ...] = ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")
    place: str = "intermediate"

    def matches(self, model: Any) -> bool:
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is None or not isinstance(model, modeling.PreTrainedModel):
            return False
        # A class of somebody's own may have the configuration around such a model.
        return getattr(model.config, "model_type", None) == self.model_type and self.blocks(model) is not None

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return attribute(model.base_model, self.layers)

    def read(self, block: Any) -> DenseFFN:
        return DenseFFN.of(*(attribute(block, part) for part in self.parts))

    def install(self, block: Any, layer: nn.Module) -> None:
        """FFNs are not computed in chunks any more: chunks would split the layer's statistics, and ranks with different
        sequence lengths would exchange different numbers of them."""
        for place in (self.place, *(part for part in self.parts if not part.startswith(self.place))):
            holder, _, name = place.rpartition(".")
            new = layer if place == self.place else nn.Identity().train(block.training)
            setattr(block.get_submodule(holder), name, new)
        TokenMaskBridge().attach(block.attention, layer)
        for module in block.modules():
            if hasattr(module, "chunk_size_feed_forward"):
                module.chunk_size_feed_forward = 0
