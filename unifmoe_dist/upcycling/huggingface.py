"""Encoders of Hugging Face Transformers."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from unifmoe_dist.upcycling.dense_ffn import DenseFFN
from unifmoe_dist.upcycling.token_mask import TokenMaskBridge


def _nothing(block: Any) -> nn.Module:
    """Takes the place of a module that the layer made needless."""
    return nn.Identity().train(block.training)


class _HuggingFace:
    """Finds the encoder below any head and connects its attention mask."""

    def __init__(self, family: str, model_type: str) -> None:
        self.name = f"{family} (Transformers)"
        self.model_type = model_type

    def matches(self, model: Any) -> bool:
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is None or not isinstance(model, modeling.PreTrainedModel):
            return False
        if getattr(model.config, "model_type", None) != self.model_type:
            return False
        try:
            self.blocks(model)
        except AttributeError:  # a class of somebody's own with that configuration, around such a model
            return False
        return True

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """As `Adapter.blocks`; an AttributeError where the model is built in another way."""
        raise NotImplementedError

    def connect(self, block: Any, layer: nn.Module) -> None:
        """Hand the block's attention mask to the layer, and end FFN chunking.

        Chunks would split the layer's statistics, and ranks with different sequence lengths would exchange
        different numbers of chunks.
        """
        TokenMaskBridge().attach(block.attention, layer)
        for module in block.modules():
            if hasattr(module, "chunk_size_feed_forward"):
                module.chunk_size_feed_forward = 0


class BertLike(_HuggingFace):
    """`layer.intermediate` becomes the UniF-MoE layer, `layer.output` keeps dropout, residual and norm."""

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.base_model.encoder.layer

    def read(self, block: Any) -> DenseFFN:
        up = block.intermediate
        return DenseFFN.of(up.dense, up.intermediate_act_fn, block.output.dense)

    def install(self, block: Any, layer: nn.Module) -> None:
        block.intermediate, block.output.dense = layer, _nothing(block)
        self.connect(block, layer)


class DistilBertLike(_HuggingFace):
    """`ffn.lin1` becomes the UniF-MoE layer; `ffn` keeps its dropout."""

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.base_model.transformer.layer

    def read(self, block: Any) -> DenseFFN:
        return DenseFFN.of(block.ffn.lin1, block.ffn.activation, block.ffn.lin2)

    def install(self, block: Any, layer: nn.Module) -> None:
        block.ffn.lin1, block.ffn.activation, block.ffn.lin2 = layer, _nothing(block), _nothing(block)
        self.connect(block, layer)
