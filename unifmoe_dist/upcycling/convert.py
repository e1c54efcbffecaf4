"""Layers of experts by method and options, put into a model in the place of its dense FFNs, and found there."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from unifmoe_dist.config import ModelConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.lazy import load
from unifmoe_dist.lending import is_dtensor
from unifmoe_dist.methods.registry import EVERY_LAYER, UNIF, method_of
from unifmoe_dist.upcycling.dense_ffn import DenseFFN, check_projections, refuse_adapted
from unifmoe_dist.upcycling.families import find_adapter, library_wrapped, refuse_wrapped
from unifmoe_dist.upcycling.found import FoundFFNs
from unifmoe_dist.upcycling.partitioned import gathered


def layer_class(name: str) -> type[ExpertLayer]:
    """The class of a method's layer. Raises UserError where there is no such method, or it has no layer."""
    method = method_of(name)
    if method.layer is None:
        raise UserError(f"method {name} is {method.title.lower()} and has no layer; choose another.")
    return load(f"unifmoe_dist.{method.layer}")


def build_layer(
    method: str,
    shape: Mapping[str, Any],
    options: Mapping[str, Any],
    group: ProcessGroup | None,
    dispatcher: str,
    **exchange: Any,
) -> ExpertLayer:
    """A new layer in the place of an FFN of that `DenseFFN.shape()`; of the options it takes those of the method, and
    of `exchange` the layers' ranks_per_node and dispatch_chunks."""
    layer = layer_class(method)
    config = layer.config_type.from_options({**method_of(method).taken(options), **shape})
    return layer(config, group, dispatcher, **exchange)


def check_taken(method: str, options: Iterable[str]) -> None:
    """Refuse options that the method does not have."""
    own = (*EVERY_LAYER, *method_of(method).options)
    for name in options:
        if name not in own:
            raise UserError(f"{name} is no option of method {method}; it has {', '.join(own)}.")


def noted(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved model tells of its layers: the method but UniF-MoE, and options that are not the default.

    Options that are another default in earlier versions are told in any case. `saved_arguments` reads it.
    """
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    former = layer_class(method).config_type.former_options(500)
    told = {**{name: defaults[name] for name in former}, **options}
    always = {"num_experts", "num_blocks", *former}
    entry = {n: v for n, v in told.items() if n in always or n not in defaults or v != defaults[n]}
    return entry if method == UNIF.name else {"method": method, **entry}


def saved_arguments(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `upcycle`, without its layers, for layers like those of which a saved model tells."""
    method = entry.get("method", UNIF.name)
    return {"method": method, **saved_options(method, entry)}


def saved_options(method: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a model was saved with; those that its version did not know are what it did without them."""
    former = layer_class(method).config_type.former_options(saved.get("expansion_steps", 500))
    return {**former, **method_of(method).taken(saved)}


def layer_maker(
    method: str,
    expert_group: ProcessGroup | None = None,
    dispatcher: str = "auto",
    exchange: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[DenseFFN], ExpertLayer]:
    """A function from a dense FFN to a method's layer of that shape."""
    check_taken(method, options)
    return lambda ffn: build_layer(method, ffn.shape(), options, expert_group, dispatcher, **exchange or {})


def convert(
    model: nn.Module,
    layers: Iterable[int] | None,
    make: Callable[[DenseFFN], ExpertLayer],
    router_seed: int | None = None,
    ffns: Mapping[str, Sequence[str]] | None = None,
) -> list[int]:
    """Replace FFNs by the layers that `make` makes for them, which start from the FFNs' weights.

    The model's config is not touched. Returns the indices counted from 0; the rest is as for `upcycle`.
    """
    refuse_wrapped(model, library_wrapped(model))
    refuse_adapted(model)
    adapter = find_adapter(model) if ffns is None else FoundFFNs.named(model, ffns)
    blocks = adapter.blocks(model)
    if layers is None and ffns is None:
        raise UserError(f"layers is not given; name those to upcycle, of 0 to {len(blocks) - 1}, as in [1, 3].")
    indices = _resolve(range(len(blocks)) if layers is None else layers, len(blocks))
    made: dict[int, ExpertLayer] = {}
    for index in indices:
        if present := list(moe_layers(blocks[index]).values()):
            name = type(present[0]).__name__.removesuffix("Layer").replace("UniFMoE", "UniF-MoE")
            raise UserError(f"Layer {index} already is a {name} layer; leave it out of layers.")
        with gathered(blocks[index]) as spread:
            ffn = adapter.read(blocks[index])
            check_projections(ffn, model)
            _require_weights(ffn, index, model)
            made[index] = _start(ffn, make, None if router_seed is None else router_seed + index)
            spread(made[index])
    for index, layer in made.items():
        with gathered(blocks[index]):
            adapter.install(blocks[index], layer)
    return indices


def moe_layers(model: nn.Module) -> dict[str, ExpertLayer]:
    """The layers of experts of a model, UniF-MoE's and others, by module name, in the order of the model.

    Of a layer that PEFT has copied (`modules_to_save`), only the copy or the original that now runs.
    """
    idle = {id(layer) for module in model.modules() for layer in _idle_copies(module)}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ExpertLayer) and id(module) not in idle
    }


def _idle_copies(module: nn.Module) -> list[nn.Module]:
    """What PEFT's wrapper of a module to save holds beside the one that it calls."""
    peft = sys.modules.get("peft.utils.other")
    if peft is None or not isinstance(module, peft.ModulesToSaveWrapper):
        return []
    copies = dict(module.modules_to_save)
    active = [name for name in module.active_adapters if name in copies]
    runs = module.original_module if module.disable_adapters or not active else copies[active[0]]
    idle = [copy for copy in (module.original_module, *copies.values()) if copy is not runs]
    return [inner for copy in idle for inner in copy.modules()]


def _resolve(layers: Iterable[int], depth: int) -> list[int]:
    """Indices counted from 0, as given; refuses what is no index, out of range or repeated."""
    if isinstance(layers, (int, str)):
        raise UserError(f"layers must be a list of whole numbers such as [1, 3], not {layers!r}.")
    resolved: list[int] = []
    for index in layers:
        if not isinstance(index, int) or isinstance(index, bool):
            raise UserError(f"layers holds {index!r}; give whole numbers from 0 to {depth - 1}.")
        if not -depth <= index < depth:
            raise UserError(
                f"Layer index {index} is out of range; this model has {depth} layers: use 0 to {depth - 1}."
            )
        if index % depth in resolved:
            raise UserError(f"Layer {index % depth} is named twice in layers; name each layer once.")
        resolved.append(index % depth)
    if not resolved:
        raise UserError(f"layers is empty; name at least one layer from 0 to {depth - 1}.")
    return resolved


def _require_weights(ffn: DenseFFN, index: int, model: nn.Module) -> None:
    """Refuse to copy weights that are not here, unless none of the model's are: then layers have none either."""
    for part in ffn.sources:
        weight = part.weight
        if is_dtensor(weight) or weight.dim() != 2 or getattr(part, "_is_fsdp_managed_module", False):
            where = "spread over ranks; upcycle the model before FSDP, ZeRO 3 or tensor parallelism takes it"
        elif weight.is_meta and (hasattr(part, "_hf_hook") or not all(p.is_meta for p in model.parameters())):
            where = "not in memory (offloaded, or on the meta device); load the model whole, upcycle it, then offload"
        else:
            continue
        raise UserError(f"The weights of the FFN in layer {index} are {where}.")


def _start(ffn: DenseFFN, make: Callable[[DenseFFN], ExpertLayer], seed: int | None) -> ExpertLayer:
    """A layer whose experts come from a dense FFN."""
    up = ffn.up
    with _fresh(up.weight.is_meta, seed):
        layer = make(ffn)
    layer.to(device=up.weight.device, dtype=up.weight.dtype)
    if not up.weight.is_meta:
        layer.load_dense(*(tensor for part in ffn.projections for tensor in (part.weight, part.bias)))
    trained = any(parameter.requires_grad for part in ffn.projections for parameter in part.parameters())
    for bank in layer.banks():
        bank.requires_grad_(trained)
    return layer.train(up.training)


@contextmanager
def _fresh(meta: bool, seed: int | None) -> Iterator[None]:
    """Create modules in float32 on the CPU (or without storage), optionally from a seed of their own."""
    default = torch.get_default_dtype()
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
