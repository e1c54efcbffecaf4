"""Whole models: dense, with UniF-MoE layers, and with top-2 mixtures in the same places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.studies.benchmark.contenders import Contender, Result, measure, prepare, ready
from unifmoe_dist.studies.benchmark.peers import PEERS, Peer
from unifmoe_dist.studies.benchmark.shapes import Shape, at_operating_point
from unifmoe_dist.upcycling import moe_layers, upcycle
from unifmoe_dist.upcycling.families import find_adapter


@dataclass(frozen=True)
class Model:
    """A model to time, with random weights."""

    name: str
    build: Callable[[], nn.Module]  # the dense model, a classifier
    inputs: Callable[[int], tuple[Tensor, ...]]  # from a batch size to the arguments of the model
    layers: tuple[int, ...]  # transformer layers whose FFN becomes a mixture
    experts: int  # residual experts K
    blocks: int  # blocks B
    block_compute: float  # mean C_B per token to bring every router to: what the paper measured
    batch: int  # on a GPU
    cpu_batch: int


def _deit_small() -> nn.Module:
    import timm

    return timm.create_model("deit_small_patch16_224", pretrained=False, num_classes=1000)


def _bert_large() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return BertForSequenceClassification(BertConfig(**sizes))


def _images(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 224, 224),)


def _sentences(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 28_000, (batch, 128)),)


# Layers, K, B and C_B of the paper's experiments; its sequences have 128 tokens.
MODELS = {
    model.name: model
    for model in (
        Model("deit-s", _deit_small, _images, (8, 10), 6, 8, 11.41, batch=64, cpu_batch=4),
        Model("bert-large", _bert_large, _sentences, (20, 22), 16, 16, 47.61, batch=32, cpu_batch=1),
    )
}


def run_model(
    model: Model,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    seconds: float,
    on_round: Callable[[], object],
    rate: float,
) -> Result:
    """Time inference and training steps (forward, backward, AdamW) of a model's versions, interleaved.

    Args:
        model: The model.
        device: Where.
        dtype: Of weights and activations.
        batch: Batch size.
        seconds: Rounds go on for about this long; there are at least three.
        on_round: Called after every round.
        rate: See `matmul_rate`.
    """
    torch.manual_seed(0)
    inputs = tuple(t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in model.inputs(batch))
    dense = model.build().to(device, dtype).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        dense(*inputs)
    flops = float(counter.get_total_flops())
    ffn = find_adapter(dense).read(find_adapter(dense).blocks(dense)[model.layers[0]])
    shape = Shape(model.name, 0, ffn.up.in_features, ffn.up.out_features, model.experts, model.blocks)
    ffn_flops = 4.0 * len(_inputs_of(dense, ffn.up, inputs)) * shape.dim * shape.hidden

    def work(ffns: float) -> float:
        return 1 + len(model.layers) * (ffns - 1) * ffn_flops / flops

    def ours() -> nn.Module:
        mixture = upcycle(model.build(), model.layers, model.experts, model.blocks).to(device, dtype)
        mixture.eval()
        for layer in moe_layers(mixture).values():  # one router after the other, each on the tokens that reach it then
            assert isinstance(layer, UniFMoELayer)
            at_operating_point(layer, _inputs_of(mixture, layer, inputs), model.block_compute)
        return mixture

    def top_2() -> nn.Module:
        mixture = model.build()
        adapter = find_adapter(mixture)
        for index in model.layers:
            layer = PEERS["Transformers Mixtral"](shape, 2, device, dtype)
            adapter.install(adapter.blocks(mixture)[index], Peer(_per_token, layer=layer))
        return mixture.to(device, dtype)

    versions = [
        Contender("dense", lambda: dense, 1.0),
        Contender("UniF-MoE", ours, work(model.block_compute / model.blocks)),
        Contender("Transformers Mixtral top-2", top_2, work(2), peer=True),
    ]
    subjects, skipped = prepare(versions, lambda version: ready(version, lambda: inputs, optimised=True))
    skipped |= measure(subjects, device, seconds, on_round)
    sizes = f"batch {batch}, layers {list(model.layers)}, K={model.experts}, B={model.blocks}"
    return Result(model.name, sizes, flops, rate, [s.timing for s in subjects], skipped)


def _per_token(self: Any, x: Tensor) -> Tensor:
    """A layer over (N, d) tokens in the place of an FFN over (batch, sequence, d)."""
    return self.layer(x.flatten(0, -2)).view_as(x)


@torch.no_grad()
def _inputs_of(network: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The (N, d) tokens that reach a module of the network."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        network(*inputs)
    finally:
        hook.remove()
    return seen[0].flatten(0, -2)
