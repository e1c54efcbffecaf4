"""Families with an adapter of their own, and the choice of an adapter for a model; other models' FFNs are found."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling.dense_ffn import Adapter, DenseFFN
from unifmoe_dist.upcycling.found import find_ffns
from unifmoe_dist.upcycling.huggingface import BertLike
from unifmoe_dist.upcycling.reader import WAY_OUT, Parts, read_ffn


class TimmViT:
    """timm's VisionTransformer, DeiT included: `blocks[i].mlp` becomes the layer, and the block's output dropout stays.

    Dropout on the hidden channels (`Mlp.drop1`) is the layer's `hidden_dropout`, which `upcycle` is told; a model that
    drops while the layer does not gets a warning. timm's `proj_drop_rate` sets both.
    """

    name = "ViT/DeiT (timm)"

    def matches(self, model: Any) -> bool:
        timm_vit = sys.modules.get("timm.models.vision_transformer")  # loaded if the model is one of these
        vit = timm_vit is not None and isinstance(model, timm_vit.VisionTransformer)
        return vit and all(hasattr(block, "mlp") for block in model.blocks)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def read(self, block: Any) -> DenseFFN:
        plain = Parts(("fc1",), "fc2", "act", ordered=True)  # of any width
        parts = plain if type(block.mlp).__name__ == "Mlp" else Parts.of(block.mlp)
        if parts is None:
            raise UserError(f"mlp of a {type(block).__name__} has not the projections of an FFN; {WAY_OUT}")
        return read_ffn(block.mlp, "mlp", parts)

    def install(self, block: Any, layer: Any) -> None:
        mlp = block.mlp
        if mlp.drop1.p > 0 and layer.config.hidden_dropout == 0:
            warnings.warn(
                f"Dropout {mlp.drop1.p} on the FFN's hidden channels is left out of the UniF-MoE layer; give "
                f"hidden_dropout={mlp.drop1.p} to have it there. Dropout {mlp.drop2.p} on its output is kept.",
                stacklevel=4,
            )
        block.mlp = nn.Sequential(layer, mlp.drop2).train(mlp.training) if mlp.drop2.p > 0 else layer


_WRAPPERS = ("torch.nn.parallel.", "torch._dynamo.", "torch.distributed.", "deepspeed.", "peft.")
_DISTILBERT = ("ffn.lin1", "ffn.activation", "ffn.lin2")
ADAPTERS: list[Adapter] = [
    TimmViT(),
    BertLike("BERT (Transformers)", "bert"),
    BertLike("RoBERTa (Transformers)", "roberta"),
    BertLike("XLM-RoBERTa (Transformers)", "xlm-roberta"),
    BertLike("CamemBERT (Transformers)", "camembert"),
    BertLike("ELECTRA (Transformers)", "electra"),
    *(BertLike(f"{name} (Transformers 4)", name.lower()) for name in ("ViT", "DeiT")),  # found in later ones
    BertLike("DistilBERT (Transformers)", "distilbert", "transformer.layer", _DISTILBERT, place="ffn.lin1"),
]


def register_adapter(adapter: Adapter) -> None:
    """Let `upcycle` and `from_pretrained` know a model family, in this process; before those that are known already.

    Raises:
        UserError: the adapter lacks a name or one of the four functions of `Adapter`.
    """
    for name in ("name", "matches", "blocks", "read", "install"):
        if not hasattr(adapter, name):
            raise UserError(f"{type(adapter).__name__} has no {name}; an adapter has what `Adapter` lists.")
    ADAPTERS.insert(0, adapter)


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter for a model: of its family, or one made for what is found in it.

    Raises:
        UserError: no family matches, and no FFNs are found that could become experts; or the model is wrapped.
    """
    if adapter := match_adapter(model):
        return adapter
    refuse_wrapped(model, wrapped_model(model))
    if found := find_ffns(model):
        return found
    families = ", ".join(adapter.name for adapter in ADAPTERS)
    raise UserError(
        f"{type(model).__name__} cannot be upcycled: no stack of layers with FFNs of linear maps was found in it, and "
        f"it is of none of the families {families}; if it has FFNs, {WAY_OUT}"
    )


def refuse_wrapped(model: nn.Module, inner: tuple[str, str] | None) -> None:
    """Refuse a model that wraps `inner`, name and class, if that is not None: a wrapper would not know new weights."""
    if inner is None:
        return
    name, kind = inner
    way = f"model.{name}"
    if type(model).__module__.startswith("peft."):
        way = "model.merge_and_unload(), or model.get_base_model() of learned prompts"
    raise UserError(
        f"{type(model).__name__} wraps a {kind}, its .{name}; upcycle that one, before it is wrapped: pass the inner "
        f"model, {way}."
    )


def library_wrapped(model: nn.Module) -> tuple[str, str] | None:
    """Name and class of the model inside a wrapper of PyTorch, DeepSpeed or PEFT; FSDP 2 wraps nothing."""
    library = type(model).__module__
    if not library.startswith(_WRAPPERS) or "fully_shard" in library:
        return None
    name, inner = next(model.named_children(), ("", None))
    if inner is None:
        return None
    deeper = library_wrapped(inner)
    return (f"{name}.{deeper[0]}", deeper[1]) if deeper else (name, type(inner).__name__)


def wrapped_model(model: nn.Module) -> tuple[str, str] | None:
    """Name and class of the model inside one that only wraps it: a library's wrapper, or a class around a model."""
    if inner := library_wrapped(model):
        return inner
    transformers = sys.modules.get("transformers.modeling_utils")
    pretrained = () if transformers is None else transformers.PreTrainedModel
    if isinstance(model, pretrained):
        body: Any = model.base_model
        if type(model).__module__.startswith("transformers.") or body is not model:
            return None  # theirs, or somebody's own head on a body
    for name, inner in model.named_modules():
        if name and (match_adapter(inner) or isinstance(inner, pretrained)):
            return name, type(inner).__name__
    return None


def match_adapter(model: nn.Module) -> Adapter | None:
    """The adapter for a model, or None."""
    return next((adapter for adapter in ADAPTERS if adapter.matches(model)), None)
