"""The supported model families. Adding one is one line here, plus an adapter where none of these fits."""

from __future__ import annotations

import sys

from torch import nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling.adapter import Adapter, DenseFFN
from unifmoe_dist.upcycling.huggingface import BertLike, DistilBertLike, ViTLike
from unifmoe_dist.upcycling.timm_vit import TimmViT

__all__ = ["ADAPTERS", "Adapter", "DenseFFN", "find_adapter"]

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
    """The adapter for a model.

    Raises:
        UserError: No family matches. The message names a supported model inside of this one, or lists the families
            and says how to add another.
    """
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
