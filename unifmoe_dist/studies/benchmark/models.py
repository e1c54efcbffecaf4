"""Whole models: dense, with UniF-MoE layers, and with top-2 mixtures in the same places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.studies.benchmark import memory
from unifmoe_dist.studies.benchmark.peers import PEERS
from unifmoe_dist.studies.benchmark.shapes import Shape, at_operating_point
from unifmoe_dist.studies.benchmark.timing import Contender, Result, Subject, Timing, measure, prepare
from unifmoe_dist.upcycling import moe_layers, upcycle
from unifmoe_dist.upcycling.families import find_adapter


@dataclass(frozen=True)
class Model:
    """A model to time, with random weights.

    Args:
        name: What it is called in tables.
        build: Makes the dense model, a classifier.
        inputs: From a batch size to the arguments of the model.
        layers: Transformer layers whose FFN becomes a mixture.
        experts: Residual experts K.
        blocks: Blocks B.
        block_compute: Mean C_B per token to bring every router to: what the paper measured.
        batch: Batch size on a GPU.
        cpu_batch: Batch size on the CPU.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    layers: tuple[int, ...]
    experts: int
    blocks: int
    block_compute: float
    batch: int
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


class _PerToken(nn.Module):
    """A layer over (N, d) tokens in the place of an FFN over (batch, sequence, d)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        return self.layer(x.flatten(0, -2)).view_as(x)


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
    ffn_flops = 4.0 * _tokens(dense, ffn.up, inputs) * shape.dim * shape.hidden

    def work(ffns: float) -> float:
        return 1 + len(model.layers) * (ffns - 1) * ffn_flops / flops

    def ours() -> nn.Module:
        mixture = upcycle(model.build(), model.layers, model.experts, model.blocks).to(device, dtype)
        _to_operating_point(mixture, inputs, model.block_compute)
        return mixture

    def top_2() -> nn.Module:
        mixture = model.build()
        adapter = find_adapter(mixture)
        for index in model.layers:
            layer = PEERS["Transformers Mixtral"](shape, 2, device, dtype)
            adapter.install(adapter.blocks(mixture)[index], _PerToken(layer))
        return mixture.to(device, dtype)

    versions = [
        Contender("dense", lambda: dense, 1.0),
        Contender("UniF-MoE", ours, work(model.block_compute / model.blocks)),
        Contender("Transformers Mixtral top-2", top_2, work(2), peer=True),
    ]
    subjects, skipped = prepare(versions, lambda version: _ready(version, inputs))
    skipped |= measure(subjects, device, seconds, on_round)
    sizes = f"batch {batch}, layers {list(model.layers)}, K={model.experts}, B={model.blocks}"
    return Result(model.name, sizes, flops, rate, [s.timing for s in subjects], skipped)


def _ready(version: Contender, inputs: tuple[Tensor, ...]) -> Subject:
    network = version.build()
    device = inputs[0].device
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, foreach=device.type == "cuda")

    def forward() -> Tensor:
        return _logits(network(*inputs))

    def infer() -> None:
        network.eval()
        with torch.no_grad():
            forward()

    def train() -> None:
        network.train()
        forward().float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    infer()
    train()
    timing = Timing(version.name, version.work)
    timing.kept = memory.kept_for_backward(forward, network.parameters())
    weights = [*network.parameters(), *network.buffers()]
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    lasting = sum(t.nbytes for t in [*weights, *states])
    timing.held = lasting + sum(p.nbytes for p in network.parameters() if p.requires_grad)
    beyond = memory.peak(train, device)
    timing.peak = None if beyond is None else lasting + beyond
    return Subject(timing, infer, train, version.peer)


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


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


def _tokens(network: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    return _inputs_of(network, module, inputs).shape[0]


def _to_operating_point(network: nn.Module, inputs: tuple[Tensor, ...], block_compute: float) -> None:
    """Bring one router after the other to a mean C_B, each on the tokens that reach it then."""
    network.eval()
    for layer in moe_layers(network).values():
        assert isinstance(layer, UniFMoELayer)
        at_operating_point(layer, _inputs_of(network, layer, inputs), block_compute)
