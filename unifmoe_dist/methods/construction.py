"""Which method builds which layer, and putting one into an existing model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.methods.dynmoe import DynMoEConfig, DynMoELayer
from unifmoe_dist.methods.emoe import EMoEConfig, EMoELayer, EMoELearnLayer
from unifmoe_dist.methods.former import former_options
from unifmoe_dist.methods.gmoe import GMoELayer
from unifmoe_dist.methods.mass import MASSConfig, MASSLayer
from unifmoe_dist.methods.mass_schedule import VISION, mass_schedule
from unifmoe_dist.methods.noisy_top_k import LoadLoss, NoisyTopKConfig
from unifmoe_dist.methods.topk import TopKConfig, TopKLayer
from unifmoe_dist.upcycling.adapter import DenseFFN
from unifmoe_dist.upcycling.config_entry import note
from unifmoe_dist.upcycling.upcycle import convert

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class LayerOptions:
    """What the methods may be told; each takes what it has.

    Args:
        num_experts: Experts K; of dynmoe and mass, those to start with.
        num_blocks: Parts B of the dense FFN in which cost is counted.
        top_k: Experts per token (topk, gmoe, emoe, emoe_learn).
        max_experts: Most experts there can be (dynmoe, mass).
        load_loss: What the load loss compares, tutel or shazeer (gmoe, emoe, emoe_learn).
        adapt_every: Steps between adding and removing experts, or "epoch" (dynmoe).
        gate_temperature: Whether the gate has a temperature (dynmoe).
        mass_threshold: Routing mass that a token's experts reach together (mass).
        expansion_steps: Steps at the start in which experts may be added (mass).
        mass_window: Steps over which an expert's gradient is watched; None takes the authors' share (mass).
        mass_warmup: Steps before an expert's gradient is judged; None too (mass).
        mass_untried: Copies that there may be before the last one is tried (mass).
        hidden_dropout: Dropout of the experts' hidden channels in training.
    """

    num_experts: int = 6
    num_blocks: int = 8
    top_k: int = 2
    max_experts: int = 8
    load_loss: LoadLoss = "tutel"
    adapt_every: int | Literal["epoch"] = 1
    gate_temperature: bool = False
    mass_threshold: float = 0.3
    expansion_steps: int = 500
    mass_window: int | None = None
    mass_warmup: int | None = None
    mass_untried: int = 0
    hidden_dropout: float = 0.0

    @classmethod
    def from_saved(cls, method: str, saved: Mapping[str, Any]) -> LayerOptions:
        """The options that a model was saved with; those that its version did not know are what it did without them."""
        options = {field.name: saved[field.name] for field in fields(cls) if field.name in saved}
        former = former_options(method, options.get("expansion_steps", cls.expansion_steps))
        return cls(**{**former, **options})


Builder = Callable[[dict[str, Any], LayerOptions, ProcessGroup | None, str], ExpertLayer]


def _fixed(config: type[TopKConfig], layer: Callable[..., ExpertLayer]) -> Builder:
    def build(shape: dict[str, Any], options: LayerOptions, group: ProcessGroup | None, name: str) -> ExpertLayer:
        return layer(config(**shape, num_experts=options.num_experts, top_k=options.top_k), group, name)

    return build


def _noisy(config: type[NoisyTopKConfig], layer: Callable[..., ExpertLayer]) -> Builder:
    def build(shape: dict[str, Any], options: LayerOptions, group: ProcessGroup | None, name: str) -> ExpertLayer:
        own = config(**shape, num_experts=options.num_experts, top_k=options.top_k, load_loss=options.load_loss)
        return layer(own, group, name)

    return build


def _slots(options: LayerOptions) -> dict[str, Any]:
    """Experts that can be and that are at the start, as a `DynamicConfig` names them."""
    return {"num_experts": options.max_experts, "initial_experts": options.num_experts}


def _dynmoe(shape: dict[str, Any], options: LayerOptions, group: ProcessGroup | None, name: str) -> ExpertLayer:
    config = DynMoEConfig(
        **shape, **_slots(options), adapt_every=options.adapt_every, gate_temperature=options.gate_temperature
    )
    return DynMoELayer(config, group, name)


def _mass(shape: dict[str, Any], options: LayerOptions, group: ProcessGroup | None, name: str) -> ExpertLayer:
    rule = mass_schedule(10 * options.expansion_steps, VISION)
    config = MASSConfig(
        **shape,
        **_slots(options),
        mass_threshold=options.mass_threshold,
        expansion_steps=options.expansion_steps,
        window=rule.window if options.mass_window is None else options.mass_window,
        warmup=rule.warmup if options.mass_warmup is None else options.mass_warmup,
        untried=options.mass_untried,
    )
    return MASSLayer(config, group, name)


MOE_LAYERS: dict[str, Builder] = {
    "topk": _fixed(TopKConfig, TopKLayer),
    "gmoe": _noisy(NoisyTopKConfig, GMoELayer),
    "emoe": _noisy(EMoEConfig, EMoELayer),
    "emoe_learn": _noisy(EMoEConfig, EMoELearnLayer),
    "dynmoe": _dynmoe,
    "mass": _mass,
}
"""Builders of the paper's other MoE layers, by the name in `model.moe`."""


def upcycle_baseline(
    model: Model,
    method: str,
    layers: Iterable[int],
    options: LayerOptions | None = None,
    *,
    expert_group: ProcessGroup | None = None,
    dispatcher: str = "auto",
    router_seed: int | None = None,
) -> Model:
    """`unifmoe_dist.upcycle` with another method's layers: in place, from the dense FFNs.

    Args:
        model: A timm or Transformers model, as for `upcycle`.
        method: A name in `MOE_LAYERS`.
        layers: Zero-based indices of transformer layers; negative ones count from the end.
        options: Numbers of experts and the like; None takes the defaults.
        expert_group: Ranks that share the experts; None keeps all of them here.
        dispatcher: How tokens reach experts on other ranks: auto, local, alltoall or tutel.
        router_seed: Seed of the new gates; None draws from torch's global generator.

    Returns:
        The same model.

    Raises:
        UserError: An unknown method, options that do not fit the model, or what `upcycle` refuses.
    """
    options = options or LayerOptions()
    converted = convert(model, layers, layer_maker(method, options, expert_group, dispatcher), router_seed)
    note(model, {"layers": converted, "method": method, **asdict(options)}, expert_group)
    return model


def layer_maker(
    method: str, options: LayerOptions, expert_group: ProcessGroup | None = None, dispatcher: str = "auto"
) -> Callable[[DenseFFN], ExpertLayer]:
    """A function from a dense FFN to a layer of that shape."""
    if method not in MOE_LAYERS:
        raise UserError(f"MoE method {method!r} is not known; choose one of {', '.join(MOE_LAYERS)}.")
    return partial(_make, MOE_LAYERS[method], options, expert_group, dispatcher)


def _make(
    build: Builder, options: LayerOptions, group: ProcessGroup | None, dispatcher: str, ffn: DenseFFN
) -> ExpertLayer:
    shape = {**ffn.shape(), "num_blocks": options.num_blocks, "hidden_dropout": options.hidden_dropout}
    return build(shape, options, group, dispatcher)
