"""The supported model families. Adding one is one line here, plus an adapter where none of these fits."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling.dense_ffn import Adapter, DenseFFN
from unifmoe_dist.upcycling.huggingface import BertLike, DistilBertLike, ViTLike


class TimmViT:
    """timm's VisionTransformer, DeiT included: `blocks[i].mlp` becomes the layer, and the block's output dropout stays.

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


ADAPTERS: list[Adapter] = [
    TimmViT(),
    BertLike("BERT", model_type="bert"),
    BertLike("RoBERTa", model_type="roberta"),
    BertLike("XLM-RoBERTa", model_type="xlm-roberta"),
    BertLike("CamemBERT", model_type="camembert"),
    BertLike("ELECTRA", model_type="electra"),
    DistilBertLike("DistilBERT", model_type="distilbert"),
    ViTLike("ViT", model_type="vit"),
    ViTLike("DeiT", model_type="deit"),
]


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter for a model. Raises UserError where no family matches."""
    if adapter := match_adapter(model):
        return adapter
    transformers = sys.modules.get("transformers.modeling_utils")
    theirs = transformers is not None and isinstance(model, transformers.PreTrainedModel)
    if not theirs or not type(model).__module__.startswith("transformers."):  # else a family of its own
        for name, inner in model.named_modules():
            if name and match_adapter(inner):
                raise UserError(
                    f"{type(model).__name__} wraps a {type(inner).__name__}, its .{name}; upcycle that one, before it "
                    "is wrapped."
                )
    families = ", ".join(adapter.name for adapter in ADAPTERS)
    raise UserError(
        f"{type(model).__name__} cannot be upcycled; supported model families: {families}. For another, write an "
        "unifmoe_dist.upcycling.Adapter, which says where its FFNs are, and add it with ADAPTERS.append(...): see "
        '"Another family" in docs/upcycling.md.'
    )


def match_adapter(model: nn.Module) -> Adapter | None:
    """The adapter for a model, or None."""
    return next((adapter for adapter in ADAPTERS if adapter.matches(model)), None)
