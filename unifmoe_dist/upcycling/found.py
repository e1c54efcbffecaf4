"""The FFNs of any transformer, found by their shapes or named by the user, and layers put in their place."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from unifmoe_dist.errors import UserError, listed
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.upcycling.dense_ffn import DenseFFN
from unifmoe_dist.upcycling.reader import Parts, attribute, outputs, read_ffn, size_of
from unifmoe_dist.upcycling.token_mask import TokenMaskBridge

_log = logging.getLogger(__name__)
_ATTENTION = re.compile(r"^(?!.*Block).*(Attention|Attn|XCA)\d*$")
_MIXTURE = re.compile(r"(Experts|MoE|Moe|MoeBlock|MoEBlock|SparseMLP)$")
_CONVOLVED = re.compile(r"(?i)(mlp|ffn|feedforward)$")
_BESIDE_ATTENTION = (
    Parts(("fc1",), "fc2", "activation_fn", ordered=True),
    Parts(("intermediate.dense",), "output.dense", "intermediate.intermediate_act_fn", ordered=True),
)
"""FFNs of Transformers whose parts lie in the layer itself or in two modules of it: OPT's and BART's, and BERT's."""
_REFUSED = {
    "AlbertTransformer": "all its layers share one FFN, so it has no layers of which some could become experts",
    "ParallelScalingBlock": "its FFN and attention are one fused projection",
    "DiffParallelScalingBlock": "its FFN and attention are one fused projection",
    "ParallelThingsBlock": "its layers have several FFNs side by side",
}


class FoundFFNs:
    """The adapter of one model whose FFNs are known by name: `layers` counts them in order of depth.

    An FFN in a module of its own is replaced with that module; dropout on its output stays behind the layer. One whose
    parts lie in the transformer layer becomes the layer in the place of its up projection, the others do nothing.
    """

    name = "found by itself"

    def __init__(self, model: nn.Module, ffns: Mapping[str, Parts]) -> None:
        self.model, self.ffns = model, ffns

    @classmethod
    def named(cls, model: nn.Module, ffns: Mapping[str, Sequence[str]]) -> FoundFFNs:
        """Those that a user names. Raises UserError where the model has no such module."""
        if not isinstance(ffns, Mapping) or not ffns:
            raise UserError(f'ffns is {ffns!r}; give modules by name, as in {{"blocks.3.mlp": ("fc1", "act", "fc2")}}.')
        known = dict(model.named_modules())
        for place in ffns:
            if place not in known:
                raise UserError(f"ffns names {place!r}, which {type(model).__name__} does not have.")
        return cls(model, {place: Parts.named(names, place) for place, names in ffns.items()})

    def matches(self, model: Any) -> bool:
        return model is self.model

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """The modules that hold the FFNs or what took their place."""
        return [model.get_submodule(place) for place in self.ffns]

    def read(self, block: Any) -> DenseFFN:
        place = self._place(block)
        if sum(module is block for _, module in self.model.named_modules(remove_duplicate=False)) > 1:
            raise UserError(f"{place} is in several places of the model; give each layer an FFN of its own first.")
        ffn = read_ffn(block, place, self.ffns[place], alone=not _holds_attention(block))
        if _holds_attention(block):
            _check_replaceable(block, place, self.ffns[place], ffn)
        gated = "gated, " if ffn.gate is not None else ""
        _log.info("%s: an FFN of %s (%s%s)", place, ", ".join(self.ffns[place].projections), gated, ffn.activation)
        return ffn

    def install(self, block: Any, layer: Any) -> None:
        place = self._place(block)
        attention, holder = _attention_before(self.model, place)
        if _holds_attention(block):
            parts = self.ffns[place]
            for name in (parts.activation, parts.down):
                _put(self.model, f"{place}.{name}", nn.Identity().train(block.training))
            _put(self.model, f"{place}.{parts.inputs[0]}", layer)
            if rate := getattr(block, "activation_dropout", 0.0):
                _warn_of_dropout(place, rate, layer)
                block.activation_dropout = 0.0
        else:
            kept = _dropouts(block, place, self.ffns[place], layer)
            _put(self.model, place, nn.Sequential(layer, *kept).train(block.training) if kept else layer)
        if attention is not None:
            TokenMaskBridge().attach(attention, layer)
        if hasattr(holder, "chunk_size_feed_forward"):  # chunks would split the layer's statistics
            holder.chunk_size_feed_forward = 0

    def _place(self, block: nn.Module) -> str:
        return next(place for place in self.ffns if self.model.get_submodule(place) is block)


def find_ffns(model: nn.Module) -> FoundFFNs | None:
    """The FFNs of a model's only stack of transformer layers; None where there are none.

    Raises:
        UserError: the model's FFNs cannot become experts, are experts already, or lie in several stacks.
    """
    ffns: dict[str, Parts] = {}
    closed: tuple[str, ...] = ()
    for place, module in model.named_modules():
        if place.startswith(closed):
            continue
        kind = type(module).__name__
        if isinstance(module, ExpertLayer) and not re.search(r"\d", place):
            closed += (f"{place}.",)  # named by the user, outside of a stack
            continue
        if reason := _REFUSED.get(kind):
            raise UserError(f"{type(model).__name__} cannot be upcycled: {reason} ({place or 'it'}, of class {kind}).")
        if _ATTENTION.search(kind):
            closed += (f"{place}.",)
        elif parts := _ffn_of(module) if re.search(r"\d", place) else None:
            ffns[place] = parts
            closed += (f"{place}.",)
        elif _MIXTURE.search(kind) and place:
            raise UserError(
                f"{type(model).__name__} already is a mixture of experts ({place}, of class {kind}); take a dense one."
            )
        elif _CONVOLVED.search(kind) and any(isinstance(part, nn.Conv2d) for part in module.children()):
            raise UserError(
                f"{type(model).__name__} cannot be upcycled: its FFNs are convolutions, as {place}, a {kind}, and "
                "experts are linear maps; where the model offers linear ones instead, take those."
            )
    stacks = list(dict.fromkeys(re.split(r"(?:^|\.)\d+(?:\.|$)", place)[0].rpartition(".")[0] for place in ffns))
    if len(stacks) > 1:
        raise UserError(
            f"{type(model).__name__} has several stacks of layers, in {listed(stacks, 'and')}; upcycle one by itself, "
            f"as in upcycle(model.{stacks[0]}, ...), or name FFNs with ffns=."
        )
    return FoundFFNs(model, ffns) if ffns else None


def _ffn_of(module: nn.Module) -> Parts | None:
    """The parts of a module that is an FFN, holds one, or holds a layer in its place."""
    first = next(module.children(), None)
    if isinstance(module, ExpertLayer) or (isinstance(module, nn.Sequential) and isinstance(first, ExpertLayer)):
        return Parts((), "")
    if not _holds_attention(module):
        return Parts.of(module)
    for parts in _BESIDE_ATTENTION:
        if all(attribute(module, name) is not None for name in (*parts.projections, str(parts.activation))):
            return parts
    return None


def _check_replaceable(block: nn.Module, place: str, parts: Parts, ffn: DenseFFN) -> None:
    """Refuse an FFN beside attention whose parts cannot become a layer and modules that do nothing."""
    hidden, dim = ffn.down.in_features, ffn.down.out_features
    norms = [part for part in block.children() if "norm" in type(part).__name__.lower()]
    if ffn.gate is not None:
        what = "its FFN is gated"
    elif attribute(block, str(parts.activation)) is None:
        what = "the activation is part of its forward"
    elif hidden != dim and any(p.numel() == hidden for part in norms for p in part.parameters()):
        what = "a norm of hidden channels, which blocks cannot have"
    else:
        return
    raise UserError(
        f"{place}, a {type(block).__name__}, holds attention beside its FFN, and {what}; put the FFN into a module of "
        "its own, or write an adapter and give it to `unifmoe_dist.register_adapter`."
    )


def _put(model: nn.Module, place: str, module: nn.Module) -> None:
    """Set a submodule where there is a module or a function."""
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _holds_attention(module: nn.Module) -> bool:
    return any(_ATTENTION.search(type(child).__name__) for child in module.children())


def _attention_before(model: nn.Module, place: str) -> tuple[nn.Module | None, Any]:
    """The self-attention of an FFN's transformer layer, where it comes before the FFN, and the module that holds it."""
    steps = place.split(".")
    for depth in range(len(steps), -1, -1):
        holder = model.get_submodule(".".join(steps[:depth]))
        for name, child in holder.named_children():
            if depth < len(steps) and name == steps[depth]:
                break
            if _ATTENTION.search(type(child).__name__):
                return child, holder
    return None, None


def _dropouts(module: nn.Module, place: str, parts: Parts, layer: Any) -> list[nn.Module]:
    """What drops an FFN's output; a warning where its hidden channels were dropped and the layer's are not."""
    first: Any = attribute(module, parts.inputs[0])
    after = outputs(module, first.weight.new_zeros(1, 1, size_of(first)[0]))[1]  # type: ignore[index]
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p and part not in after:
            _warn_of_dropout(place, part.p, layer)
    for name, rate in vars(module).items():  # a function drops
        if name.endswith("dropout") and name != "residual_dropout" and isinstance(rate, float) and rate:
            _warn_of_dropout(place, rate, layer)
    rate = getattr(module, "residual_dropout", None)  # Starcoder 2's, a number
    return after if rate is None else [*after, nn.Dropout(rate)]


def _warn_of_dropout(place: str, rate: float, layer: Any) -> None:
    if layer.config.hidden_dropout == 0:
        warnings.warn(
            f"Dropout {rate} on the hidden channels of {place} is left out of the UniF-MoE layer; give "
            f"hidden_dropout={rate} to have it there.",
            stacklevel=6,
        )
