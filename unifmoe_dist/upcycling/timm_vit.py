"""timm's VisionTransformer, DeiT included."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling.adapter import DenseFFN


class TimmViT:
    """`blocks[i].mlp` becomes the layer, followed by the block's output dropout where that is above 0.

    Dropout on the hidden channels (`Mlp.drop1`) is the layer's `hidden_dropout`, which `upcycle` is told; a model that
    drops while the layer does not gets a warning. timm's `proj_drop_rate` sets both.
    """

    name = "ViT/DeiT (timm)"

    def matches(self, model: Any) -> bool:
        timm_vit = sys.modules.get("timm.models.vision_transformer")  # loaded if the model is one of these
        return timm_vit is not None and isinstance(model, timm_vit.VisionTransformer)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def read(self, block: Any) -> DenseFFN:
        mlp: Any = getattr(block, "mlp", None)
        if type(mlp).__name__ != "Mlp":
            raise UserError(f"The FFN of {type(block).__name__} is {type(mlp).__name__}; upcycling needs timm's Mlp.")
        if not isinstance(mlp.norm, nn.Identity):
            raise UserError(
                f"The FFN normalises its hidden channels with {type(mlp.norm).__name__}, blocks cannot; "
                "use a model without that norm."
            )
        return DenseFFN.of(mlp.fc1, mlp.act, mlp.fc2)

    def install(self, block: Any, layer: Any) -> None:
        mlp = block.mlp
        if mlp.drop1.p > 0 and layer.config.hidden_dropout == 0:
            warnings.warn(
                f"Dropout {mlp.drop1.p} on the FFN's hidden channels is left out of the UniF-MoE layer; give "
                f"hidden_dropout={mlp.drop1.p} to have it there. Dropout {mlp.drop2.p} on its output is kept.",
                stacklevel=4,
            )
        block.mlp = nn.Sequential(layer, mlp.drop2).train(mlp.training) if mlp.drop2.p > 0 else layer
