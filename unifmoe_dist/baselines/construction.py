"""Which method builds which layer, and putting one into an existing model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from unifmoe_dist.baselines.dynmoe import DynMoEConfig, DynMoELayer
from unifmoe_dist.baselines.emoe import EMoEConfig, EMoELayer, EMoELearnLayer
from unifmoe_dist.baselines.gmoe import GMoELayer
from unifmoe_dist.baselines.mass import MASSConfig, MASSLayer
from unifmoe_dist.baselines.topk import TopKConfig, TopKLayer
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.upcycling.base import DenseFFN
from unifmoe_dist.upcycling.note import note
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
        adapt_every: Steps between adding and removing experts (dynmoe).
        mass_threshold: Routing mass that a token's experts reach together (mass).
        expansion_steps: Steps at the start in which experts may be added (mass).
    """

    num_experts: int = 6
    num_blocks: int = 8
    top_k: int = 2
    max_experts: int = 8
    adapt_every: int = 1
    mass_threshold: float = 0.3
    expansion_steps: int = 500


Builder = Callable[[dict[str, Any], LayerOptions, ProcessGroup | None, str], ExpertLayer]


def _fixed(config: type[TopKConfig], layer: Callable[..., ExpertLayer]) -> Builder:
    def build(shape: dict[str, Any], options: LayerOptions, group: ProcessGroup | None, name: str) -> ExpertLayer:
        return layer(config(**shape, num_experts=options.num_experts, top_k=options.top_k), group, name)

    return build


def _slots(options: LayerOptions) -> dict[str, Any]:
    """Experts that can be and that are at the start, as a `DynamicConfig` names them."""
    return {"num_experts": options.max_experts, "initial_experts": options.num_experts}


def _dynmoe(shape: dict[str, Any], options: LayerOptions, group: ProcessGroup | None, name: str) -> ExpertLayer:
    return DynMoELayer(DynMoEConfig(**shape, **_slots(options), adapt_every=options.adapt_every), group, name)


def _mass(shape: dict[str, Any], options: LayerOptions, group: ProcessGroup | None, name: str) -> ExpertLayer:
    # The authors' windows belong to 500 steps of expansion; shorter runs watch in the same proportions.
    config = MASSConfig(
        **shape, **_slots(options), mass_threshold=options.mass_threshold, expansion_steps=options.expansion_steps,
        window=max(2, min(200, options.expansion_steps * 2 // 5)), warmup=min(100, options.expansion_steps // 5),
    )  # fmt: skip
    return MASSLayer(config, group, name)


MOE_LAYERS: dict[str, Builder] = {
    "topk": _fixed(TopKConfig, TopKLayer),
    "gmoe": _fixed(TopKConfig, GMoELayer),
    "emoe": _fixed(EMoEConfig, EMoELayer),
    "emoe_learn": _fixed(EMoEConfig, EMoELearnLayer),
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
    return build({**ffn.shape(), "num_blocks": options.num_blocks}, options, group, dispatcher)
