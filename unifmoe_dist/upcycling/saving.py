"""Upcycled Transformers models in folders: they come back with their layers, or a sentence says why not.

Every Transformers model ends its construction with `post_init`; there, a model whose config notes an upcycling gets its
layers back, before `from_pretrained` loads the weights. Then `from_pretrained` looks whether it found weights for them;
`save_pretrained` looks whether the config tells of all of them. `enable_from_pretrained` patches Transformers so;
importing this package changes nothing there.

A process that has not called it would build a dense model from an upcycled model's folder and fill its FFNs with random
numbers, with no more than a warning. So the configuration of an upcycled model names its activation in a way that
Transformers knows only after the call: without it, building the model fails at once and says what to call. Where FFNs
take no activation from the configuration, it also names a file of weights, which Transformers refuses with those words.
"""

import copy
import importlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import is_dtensor, is_quantised
from unifmoe_dist.upcycling.convert import convert, layer_maker, moe_layers, saved_arguments
from unifmoe_dist.upcycling.families import find_adapter, wrapped_model

_PLACES = ("mlp", "intermediate.dense", "intermediate")
"""Where ViT, DeiT, BEiT and Swin have the FFN of a transformer layer in Transformers 5, and where they had it in 4."""
_EXPERTS = re.compile(r"\.experts\.keys$")
KEY = "unif_moe"
"""What a saved model's configuration tells of its upcycling, one entry per call."""
_MARK = ", in UniF-MoE layers: call unifmoe_dist.enable_from_pretrained() first"
_FORMER_MARK = ", in UniF-MoE layers: import unifmoe_dist first"
_WEIGHTS = "transformers_weights"
_FIXED_ACTIVATION = ("use_swiglu_ffn",)
"""What the configuration of a model has whose FFNs take no activation from it: DINOv2-giant's."""


def enable_from_pretrained() -> None:
    """Let Transformers' `from_pretrained` rebuild the layers of upcycled models that `save_pretrained` wrote.

    A process that loads such a folder calls this first; one in which `upcycle` had a Transformers model need not.
    It extends `post_init`, `save_pretrained` and `from_pretrained` of `transformers.PreTrainedModel`, `to_diff_dict`
    and `from_dict` of its configuration, for models with layers of experts and leaves others as they are. Calling it
    again changes nothing.
    """
    known = importlib.import_module("transformers.activations").ACT2FN
    for name in list(known):
        known[_marked(name)] = known[unmarked(name) + _FORMER_MARK] = OrderedDict.__getitem__(known, name)
    pretrained = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    original, save, load = pretrained.post_init, pretrained.save_pretrained, pretrained.__dict__["from_pretrained"]
    if hasattr(original, "rebuilds_unif_moe"):
        return

    @wraps(original)
    def post_init(self: nn.Module) -> None:
        original(self)
        if _notes(self.config):
            _rebuild(self)

    @wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **options: Any) -> Any:
        _prepare_saving(self, options.get("state_dict"))
        return save(self, *args, **options)

    @wraps(load.__func__)
    def from_pretrained(cls: type, *args: Any, **options: Any) -> Any:
        wanted = options.pop("output_loading_info", False)
        model, report = load.__func__(cls, *args, output_loading_info=True, **options)
        if "key_mapping" not in options and (names := _places_of_another_version(model, report)):
            kept = vars(model).get("_weight_conversions")
            model, report = load.__func__(cls, *args, output_loading_info=True, key_mapping=names, **options)
            if kept is not None:  # Transformers 5 would undo the mapping in what it saves
                model._weight_conversions = kept
        _check_loaded(model, report, args[0] if args else options.get("pretrained_model_name_or_path"))
        return (model, report) if wanted else model

    post_init.rebuilds_unif_moe = True  # type: ignore[attr-defined]
    pretrained.post_init, pretrained.save_pretrained = post_init, save_pretrained
    pretrained.from_pretrained = classmethod(from_pretrained)
    _extend_configurations(importlib.import_module("transformers.configuration_utils").PretrainedConfig)


def _extend_configurations(config: Any) -> None:
    """Write the mark of models whose activation carries none into their folders, and read over it."""
    write, read = config.to_diff_dict, config.__dict__["from_dict"]

    @wraps(write)
    def to_diff_dict(self: Any) -> dict[str, Any]:
        fixed = _notes(self) and any(getattr(self, name, False) for name in _FIXED_ACTIVATION)
        return {**write(self), **({_WEIGHTS: "weights" + _MARK} if fixed else {})}

    @wraps(read.__func__)
    def from_dict(cls: type, config_dict: dict[str, Any], **options: Any) -> Any:
        marked = str(config_dict.get(_WEIGHTS)).endswith(_MARK)
        return read.__func__(cls, {k: v for k, v in config_dict.items() if not (marked and k == _WEIGHTS)}, **options)

    config.to_diff_dict, config.from_dict = to_diff_dict, classmethod(from_dict)


def _rebuild(model: nn.Module) -> None:
    """Give a newly constructed Transformers model the layers that its config notes; those it has stay.

    Raises:
        UserError: The model was saved with experts spread over ranks, so its weight file has only a part.
    """
    mark(model.config)  # folders of earlier versions lack the mark
    for note in _notes(model.config):
        if note.get("expert_parallel_size", 1) > 1:
            raise UserError(
                f"This model was saved with its experts spread over {note['expert_parallel_size']} ranks; "
                "save it from a run with expert_parallel_size 1, or load the run's own checkpoint."
            )
        if moe_layers(model) and wrapped_model(model):
            return  # a class of somebody's own, around a model that has its layers already
        part = _resolve(model, note.get("part", ""))
        if part is None:
            continue  # this is a part itself, made with the configuration of the whole, which follows
        if "ffns" in note:
            _rebuild_named(part[1], note)
            continue
        blocks = find_adapter(part[1]).blocks(part[1])
        # A model may be loaded with fewer layers than were saved: what is above is left out, as Transformers does.
        kept = [index for index in note["layers"] if index < len(blocks)]
        missing = [index for index in kept if not moe_layers(blocks[index])]
        if missing:
            _restore(part[1], missing, note)
            if not note.get("flat_biases"):  # from_pretrained compares shapes, and the files have the older ones
                for index in missing:
                    for layer in moe_layers(blocks[index]).values():
                        for bank in layer.banks():
                            bank.stack_biases()


def _rebuild_named(model: nn.Module, note: dict[str, Any]) -> None:
    """Layers in the place of FFNs that were named; names may be those in the body or in a model with a head."""
    ffns = {}
    for index, (place, names) in enumerate(note["ffns"].items()):
        found = _resolve(model, place) if index in note["layers"] else None
        if found and not moe_layers(found[1]):
            ffns[found[0]] = names
    if ffns:
        _restore(model, None, note, ffns)


def _restore(model: nn.Module, layers: list[int] | None, note: dict[str, Any], ffns: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dropout .* is left out")  # was said when the model was upcycled
        convert(model, layers, layer_maker(**saved_arguments(note)), ffns=ffns)


def _resolve(model: nn.Module, place: str) -> tuple[str, nn.Module] | None:
    """Name and module of what a note calls `place`, with or without the name of the body before it."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name in (place, place.removeprefix(prefix), prefix + place):
        try:
            return name, model.get_submodule(name)
        except AttributeError:
            continue
    return None


def _prepare_saving(model: Any, state: Mapping[str, Any] | None) -> None:
    """See to it that `model.save_pretrained` writes all that `from_pretrained` needs.

    Raises:
        UserError: the experts are spread over ranks, or the model's configuration cannot tell of its layers.
    """
    layers = moe_layers(model)
    for name, layer in layers.items():
        if state is None and not hasattr(model, "hf_quantizer") and any(map(is_quantised, layer.parameters())):
            raise UserError(
                f"save_pretrained cannot write the quantised experts of {name}; save the model before quantize_ and "
                "quantise what from_pretrained gives, or keep its state_dict() with torch.save."
            )
        if layer.share is not None:
            given = (state or {}).get(f"{name}.experts.keys", ())
            if is_dtensor(given) or len(given) != layer.config.num_experts:  # as Trainer gives the model's own
                raise UserError(
                    f"save_pretrained would write this rank's experts alone, but they are spread over "
                    f"{dist.get_world_size(layer.share.group)} ranks; give it state_dict="
                    "unifmoe_dist.full_state_dict(model), which all ranks must call and rank 0 gets."
                )
    if any(layer.share is not None for layer in layers.values()):  # what is written is whole
        for module in model.modules():
            for entry in _notes(module.__dict__.get("config")):
                entry["expert_parallel_size"] = 1
    if not layers or not type(model).__module__.startswith("transformers."):
        return  # a class of somebody's own may well make its layers itself
    parts = {name: part for name, part in model.named_modules() if name and _notes(part.__dict__.get("config"))}
    outermost = {id(part.config): name for name, part in reversed(parts.items())}
    for name, part in parts.items():
        if outermost[id(part.config)] != name:
            continue
        if part is model.base_model:
            adopt(model, _notes(part.config))
        elif part.config is not model.config and not _within(model.base_model, part):
            _adopt_part(model, name, part)
    noted = [model] if _notes(model.config) else list(parts.values())
    inside = {id(module) for part in noted for module in part.modules()}
    for name, layer in layers.items():
        if id(layer) not in inside:
            raise _lost(model, name)


def _within(base: nn.Module, part: nn.Module) -> bool:
    """Whether a part is below a base model that tells of the layers itself."""
    entries = _notes(getattr(base, "config", None))
    return any("part" not in entry for entry in entries) and any(m is part for m in base.modules())


def _adopt_part(model: Any, name: str, part: Any) -> None:
    """Give the part of a composite model's configuration that belongs to `part` the notes of `part`."""
    kind, last = part.config.model_type, name.rpartition(".")[2]
    fitting = {
        attribute: inner
        for attribute, inner in vars(model.config).items()
        if hasattr(inner, "to_json_string") and getattr(inner, "model_type", None) == kind
    }
    if any(inner is part.config for inner in fitting.values()):
        return
    if not fitting and kind == model.config.model_type:  # the parts of BART or T5 share its configuration
        adopt(model, _notes(part.config), name.removeprefix(f"{model.base_model_prefix}."))
        return
    named = [a for a in fitting if a in (last, f"{last}_config", f"{last.removesuffix('_model')}_config")]
    chosen = named or list(fitting)
    if len(chosen) != 1:
        raise _lost(model, name)
    setattr(model.config, chosen[0], copy.deepcopy(part.config))


def _lost(model: nn.Module, name: str) -> UserError:
    return UserError(
        f"{type(model).__name__}'s configuration does not tell of the layers of experts in {name}, so from_pretrained "
        "would lose them; call upcycle with the whole model, head included, or save its state_dict()."
    )


def _check_loaded(model: nn.Module, report: dict[str, Any], source: Any) -> None:
    """Refuse a model whose layers got no weights from the folder that it was loaded from.

    Raises:
        UserError: weights of layers of experts were missing or of another shape, so what they hold is no number at all;
            or the folder has such layers where the model has dense FFNs, which nothing has filled.
    """
    for name in _without_weights(model, report):
        raise UserError(
            f"{source} has no weights for the layer of experts {name} that the configuration notes; to start from "
            "dense weights, load them with their own configuration and call upcycle."
        )
    unexpected = set(report.get("unexpected_keys", ()))
    places = {name for name, _ in model.named_modules()}
    for key in sorted(unexpected):
        name = key.removesuffix(".experts.keys")
        here = name in places or name.partition(".")[2] in places  # a body may be loaded from a head's folder
        if name != key and f"{name}.experts.values" in unexpected and here:
            raise UserError(
                f"{source} has the layer of experts {name}, of which neither its configuration nor "
                f"{type(model).__name__} tells, so its weights would be lost; load it with the class and configuration "
                "that it was saved with, and let a class of your own call upcycle on its body in its __init__."
            )


def _without_weights(model: nn.Module, report: dict[str, Any]) -> list[str]:
    """Names of the layers of experts of which some weights were not found."""
    absent = [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]
    absent = [key if isinstance(key, str) else key[0] for key in absent]
    return [name for name in moe_layers(model) if any(key.startswith(f"{name}.") for key in absent)]


def _places_of_another_version(model: nn.Module, report: dict[str, Any]) -> dict[str, str] | None:
    """A `key_mapping` for layers of experts that another version of Transformers has elsewhere in the model."""
    lacking = _without_weights(model, report)
    places = {re.split(r"\.\d+\.", name)[-1] for name in lacking}
    if len(places) != 1 or not places <= {*_PLACES} or not any(map(_EXPERTS.search, report.get("unexpected_keys", ()))):
        return None
    parts = {name.partition(".")[0] for name in model.get_submodule(lacking[0]).state_dict()}
    others = "|".join(map(re.escape, _PLACES))
    return {rf"\.({others})\.(?=({'|'.join(sorted(parts))})\b)": f".{places.pop()}."}


# -- what the configuration tells -------------------------------------------------------------------------------------


def note(model: nn.Module, entry: dict[str, Any], group: ProcessGroup | None) -> bool:
    """Add an entry to a Transformers model's config; whether the model has one (of others, nothing happens).

    The model gets a config of its own, so that a dense twin built from the same object stays dense.
    """
    old = getattr(model, "config", None)
    size = 1 if group is None else dist.get_world_size(group)
    if not hasattr(old, "to_json_string"):
        return False
    _extend(model, [{**entry, "expert_parallel_size": size, "flat_biases": True}])
    return True


def _notes(config: Any) -> list[dict[str, Any]]:
    """What a configuration itself tells; some show attributes of their parts' as their own."""
    return getattr(config, "__dict__", {}).get(KEY) or []


def adopt(model: nn.Module, entries: list[dict[str, Any]], part: str | None = None) -> None:
    """Add those entries of a part of the model that tell of layers of which the model's config does not.

    Args:
        model: The whole.
        entries: What the part's own config tells.
        part: Its name, below the body, where the layers of the whole are not counted as those of the part.
    """
    if part is not None:
        entries = [{**entry, "part": part} for entry in entries if "part" not in entry]
    told = {layer for entry in _notes(model.config) for layer in _told(entry)}
    if new := [entry for entry in entries if not told.intersection(_told(entry))]:
        _extend(model, new)


def _told(entry: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {(entry.get("part"), *entry.get("ffns", ()), index) for index in entry["layers"]}


def _extend(model: nn.Module, entries: list[dict[str, Any]]) -> None:
    old: Any = model.config
    new = copy.deepcopy(old)
    setattr(new, KEY, [*_notes(old), *entries])
    mark(new)
    module: Any
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new


def without_notes(config: Any) -> Any:
    """A copy of a config as the dense model's: no notes, and the activation by its own name."""
    dense = copy.deepcopy(config)
    if KEY in vars(dense):
        delattr(dense, KEY)
        _rename(dense, unmarked)
    return dense


def mark(config: Any) -> None:
    """Name the activation of an upcycled model's config so that Transformers alone cannot build it."""
    _rename(config, _marked)


def _rename(config: Any, change: Any) -> None:
    for attribute in ("hidden_act", "activation", "activation_function", "hidden_activation", "dense_act_fn"):
        name = getattr(config, attribute, None)
        if isinstance(name, str):
            setattr(config, attribute, change(name))


def unmarked(name: str) -> str:
    """An activation's own name, of the name that an upcycled model's config has."""
    return name.removesuffix(_MARK).removesuffix(_FORMER_MARK)


def _marked(name: str) -> str:
    """An activation's name as an upcycled model's config has it."""
    return unmarked(name) + _MARK
