"""`upcycle`: dense FFNs become MoE layers, UniF-MoE's or another method's, that start from their weights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.expert_share import ExpertGroup, as_group
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.methods.registry import UNIF
from unifmoe_dist.replicas import leave_alone
from unifmoe_dist.upcycling.convert import convert, layer_maker, moe_layers, noted
from unifmoe_dist.upcycling.saving import enable_from_pretrained, note

Model = TypeVar("Model", bound=nn.Module)


def upcycle(
    model: Model,
    layers: Iterable[int] | None = None,
    num_experts: int = 6,
    num_blocks: int = 8,
    *,
    ffns: Mapping[str, Sequence[str]] | None = None,
    method: str = UNIF.name,
    expert_group: ExpertGroup = None,
    dispatcher: str = "auto",
    ranks_per_node: int | None = None,
    dispatch_chunks: int = 1,
    router_seed: int | None = None,
    cuda_graphs: bool = False,
    **options: Any,
) -> Model:
    """Replace the FFNs of some transformer layers by MoE layers, in place.

    The shared and all residual experts start as copies of the dense FFN (EMoE's as its parts); device, dtype, training
    mode and whether the FFN is trained are kept. Routers are new and always trained. Attention masks reach the layers
    by themselves. Nothing is changed when an error is raised. Give the whole model, head included: its config
    notes the layers for `from_pretrained`, which a Transformers model enables in this process; see
    `enable_from_pretrained`.

    Args:
        model: A timm or Transformers model, with any head, or a model of one's own; what is found in it is logged. Of
            one with several stacks of layers (encoder and decoder, vision and text) give the part.
        layers: Zero-based indices of transformer layers; negative ones count from the end. Through all stages in order
            where there are several; None takes all that ffns names.
        num_experts: Residual experts K; of dynmoe and mass, those to start with.
        num_blocks: Blocks B per expert, which must divide the FFN's hidden width; of other methods the parts of a dense
            FFN in which cost is counted.
        method: A value of `model.moe` with a layer: UniF-MoE, or another method of the paper.
        ffns: FFNs by the names of their modules, in order of depth, each with the names of its parts inside:
            {"blocks.3.mlp": ("fc1", "act", "fc2")}, gated ("gate", "act", "up", "down"); a projection that holds gate
            and up is the first of three. An activation that is no attribute is given by its name. Needed where FFNs are
            not found.
        expert_group: Ranks that share the residual experts, as a process group or one dimension of a DeviceMesh; None
            keeps all of them here. DistributedDataParallel and `fully_shard` leave such experts alone, and their
            gradients become means over the data-parallel ranks all the same.
        dispatcher: How tokens reach experts on other ranks: auto, local, alltoall, two_level or tutel.
        ranks_per_node: Ranks of expert_group on each node, for two_level; None finds out from the names of hosts.
        dispatch_chunks: Parts in which a rank's tokens travel, so that one travels while another is computed.
        router_seed: Seed of the new routers; None draws from torch's global generator.
        cuda_graphs: On a GPU, repeat passes of UniF-MoE layers over shapes that come again as CUDA graphs; it is no
            part of what is saved, and `layer.cuda_graphs` changes it.
        options: The method's own, by their names in `ModelConfig`, and `hidden_dropout`. UniF-MoE has
            `capacity_factor`, `shared_demand`, `fixed_experts` and `block_choice`, as in `UniFMoEConfig`.

    Returns:
        The same model.

    Raises:
        UserError: Unsupported model, FFN or activation; an FFN that computes something else than its parts do; a layer
            index that is out of range, given twice or already upcycled; an unknown method; a hidden width that
            num_blocks does not divide; an option that the method does not have, or out of range.
    """
    if cuda_graphs and method != UNIF.name:
        raise UserError(f"cuda_graphs is of method {UNIF.name}, not {method}, whose layers run eagerly; leave it out.")
    exchange = {"ranks_per_node": ranks_per_node, "dispatch_chunks": dispatch_chunks}
    options.update(num_experts=num_experts, num_blocks=num_blocks)
    group, before = as_group(expert_group), set(moe_layers(model).values())
    converted = convert(model, layers, layer_maker(method, group, dispatcher, exchange, **options), router_seed, ffns)
    for layer in set(moe_layers(model).values()) - before:
        if isinstance(layer, UniFMoELayer):
            layer.cuda_graphs = cuda_graphs
    leave_experts_alone(model)
    named = {} if ffns is None else {"ffns": {place: list(names) for place, names in ffns.items()}}
    if note(model, {"layers": converted, **named, **noted(method, options)}, group):
        enable_from_pretrained()
    return model


def leave_experts_alone(module: nn.Module) -> None:
    """Have DistributedDataParallel leave experts that are spread over ranks alone, in this module's parameters.

    `upcycle` does so for the model that it is given; DistributedDataParallel looks at the module that it is given
    itself. So a module of one's own around an upcycled model, or an adapter's, is told by this call.
    """
    if _spread_parameters(module):
        leave_alone(module, _spread_parameters)


def _spread_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters of banks that are spread over ranks, and of what adapts them."""
    layers = [layer for layer in module.modules() if isinstance(layer, ExpertLayer) and layer.share is not None]
    spread = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    return [name for name, parameter in module.named_parameters() if id(parameter) in spread]


def diversity_loss(model: nn.Module) -> Tensor:
    """Sum of the Gram losses of a model's UniF-MoE layers, a float32 scalar: add lambda_div (0.01) times it.

    Raises:
        UserError: the model has no UniF-MoE layer.
    """
    losses = [layer.diversity_loss() for layer in moe_layers(model).values() if isinstance(layer, UniFMoELayer)]
    if not losses:
        raise UserError(f"{type(model).__name__} has no UniF-MoE layer; call upcycle first.")
    return torch.stack(losses).sum()
