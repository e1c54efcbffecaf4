"""The supported model families. Adding one is one line here, plus an adapter where none of these fits."""

from __future__ import annotations

from torch import nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling.base import Adapter, DenseFFN
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
        UserError: No family matches; the message lists those that are supported.
    """
    for adapter in ADAPTERS:
        if adapter.matches(model):
            return adapter
    families = ", ".join(adapter.name for adapter in ADAPTERS)
    raise UserError(f"{type(model).__name__} cannot be upcycled; supported model families: {families}.")
