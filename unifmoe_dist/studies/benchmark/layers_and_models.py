"""What is timed: one layer on every path beside the dense FFN and the peers, and whole models.

Layers are the paper's two at their operating points and as they start, and sweeps of one size at a time. Models are
dense, with UniF-MoE layers, and with top-2 mixtures in the same places.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels import select, use_kernels
from unifmoe_dist.kernels.activations import FUNCTIONS
from unifmoe_dist.studies.benchmark.peers import PEERS, Peer, Shape, Unavailable
from unifmoe_dist.studies.benchmark.side_by_side import Contender, Result, measure, prepare, ready
from unifmoe_dist.upcycling import moe_layers, upcycle
from unifmoe_dist.upcycling.families import find_adapter

# The paper's layers at the operating points of its cost table.
VISION = Shape("vision", 12608, 384, 1536, 6, 8, 11.41)
LANGUAGE = Shape("language", 16384, 1024, 4096, 16, 16, 47.61)
UNIFORM = [replace(shape, name=f"{shape.name}-uniform", block_compute=None) for shape in (VISION, LANGUAGE)]
PAPER = {shape.name: shape for shape in (VISION, LANGUAGE, *UNIFORM)}
CPU_TOKENS = {"vision": 1576, "language": 256, "vision-uniform": 1576, "language-uniform": 256}


def sweeps(on_gpu: bool) -> dict[str, list[Shape]]:
    """Shapes that differ in one size, by the letter of that size; routers as they start.

    On a GPU N goes from 1k to 64k at both of the paper's layers, d to 4096 and K to 64; on the CPU all are small.
    """
    if on_gpu:
        bases = [replace(VISION, block_compute=None), replace(LANGUAGE, block_compute=None)]
        wide = replace(LANGUAGE, name="wide", tokens=8192, block_compute=None)
        counts, widths = [1024, 4096, 16384, 65536], [512, 1024, 2048, 4096]
    else:
        bases = [Shape("small", 1024, 128, 512, 6, 8)]
        wide = replace(bases[0], name="wide")
        counts, widths = [256, 1024, 4096], [64, 128, 256]
    return {
        "N": [replace(base, tokens=n) for base in bases for n in counts],
        "d": [replace(wide, dim=d, hidden=4 * d) for d in widths],
        "K": [replace(wide, name="experts", experts=k) for k in (4, 16, 64)],
    }


@torch.no_grad()
def at_operating_point(layer: UniFMoELayer, x: Tensor, block_compute: float) -> float:
    """Scale the residual columns of the router until the mean C_B on x is `block_compute`; returns what was reached.

    Sharper affinities need fewer experts, so the mean falls with the scale; tokens decide one by one, so it is met
    within a fraction of a percent where they differ.
    """
    start = layer.router.weight[1:].clone()
    low, high, reached = 0.0, 64.0, 0.0
    for _ in range(30):
        scale = (low + high) / 2
        layer.router.weight[1:] = start * scale
        reached = layer.route(x).block_compute.float().mean().item()
        low, high = (scale, high) if reached > block_compute else (low, scale)
    return reached


class InBf16(nn.Module):
    """A copy of a layer with bf16 weights; tokens are cast on their way in and out. Unavailable if emulated."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if not has_fast_bf16():
            raise Unavailable("this CPU has no bf16 instructions (avx512_bf16 or amx_bf16)")
        self.layer = copy.deepcopy(layer).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.bfloat16()).to(x.dtype)


def dense_ffn(dim: int, hidden: int, gated: bool = False) -> nn.Module:
    up, down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
    return SwiGLU(nn.Linear(dim, hidden), up, down) if gated else nn.Sequential(up, nn.GELU(), down)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 by instructions of its own (AVX-512 or AMX)."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def number_format(kind: str, on_gpu: bool) -> tuple[torch.dtype, str]:
    """A dtype by its name on command lines, and what results say of where they come from."""
    card = torch.cuda.get_device_name() if on_gpu else f"CPU, threads: {torch.get_num_threads()}"
    where = f"{card}, {kind}, torch {torch.__version__}"
    if kind == "bf16" and not on_gpu and not has_fast_bf16():
        where += " (this CPU has no bf16 instructions: bf16 is emulated here)"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind], where


def contenders(shape: Shape, x: Tensor, top_ks: Sequence[int] = (1, 2), reference: bool = True) -> Iterator[Contender]:
    """Everything to time at a shape, on the device and in the dtype of the (N, d) tokens x, the dense FFN first.

    Args:
        shape: The layer.
        x: Tokens.
        top_ks: Experts per token of the peers.
        reference: Whether to time the masked reference, which computes every expert in full.
    """
    device, dtype = x.device, x.dtype
    dense = dense_ffn(shape.dim, shape.hidden, shape.gated).to(device, dtype)
    sizes = shape.dim, shape.hidden, shape.experts, shape.blocks, "silu" if shape.gated else "gelu"
    layer = UniFMoELayer(UniFMoEConfig(*sizes, gated=shape.gated)).to(device, dtype)
    if shape.block_compute is not None:
        at_operating_point(layer, x, shape.block_compute)
    ffns = layer.route(x).block_compute.float().mean().item() / shape.blocks
    yield Contender("dense FFN", lambda: dense, 1.0)
    yield Contender("UniF-MoE", lambda: layer, ffns)
    if x.is_cuda:
        yield Contender("UniF-MoE, plain torch", lambda: layer, ffns, lambda: use_kernels("grouped"))
    elif dtype == torch.float32:
        yield Contender("dense FFN in bf16", lambda: InBf16(dense), None, peer=True)
        yield Contender("UniF-MoE in bf16", lambda: InBf16(layer), None, peer=True)
    yield Contender("UniF-MoE, torch grouped_mm", lambda: layer, ffns, through_grouped_mm, peer=True)
    if reference:
        yield Contender("UniF-MoE, masked reference", lambda: layer, ffns, lambda: use_kernels("reference"))
    alike = replace(shape, hidden=3 * shape.hidden // 2) if shape.gated else shape  # two matrices cost as much
    for top_k in top_ks:
        for name, build in PEERS.items():
            yield Contender(f"{name} top-{top_k}", partial(build, alike, top_k, device, dtype), float(top_k), peer=True)


def beside_compiled(candidates: Iterable[Contender]) -> Iterator[Contender]:
    """The dense contender and UniF-MoE, each as it is and by torch.compile in one graph."""
    for own in candidates:
        if own.name in ("dense FFN", "dense", "UniF-MoE"):
            yield own
            build: Any = partial(torch.compile, own.build(), fullgraph=True)
            yield replace(own, name=f"{own.name}, compiled", build=build)


def run_layer(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    on_round: Callable[[], object],
    rate: float,
    brief: bool = False,
    compiled: bool = False,
) -> Result:
    """Time every contender at one shape (`side_by_side.measure`, `matmul_rate`).

    `brief` leaves out the masked reference and the top-1 peers; `compiled` all but `beside_compiled`.
    """
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, shape.dim).to(device, dtype)
    candidates = contenders(shape, x, top_ks=(2,) if brief else (1, 2), reference=not brief)
    if compiled:
        candidates = beside_compiled(candidates)
    subjects, skipped = prepare(candidates, lambda contender: ready(contender, lambda: (x.detach().requires_grad_(),)))
    skipped |= measure(subjects, device, seconds, on_round)
    sizes = f"N={shape.tokens}, d={shape.dim}, H={shape.hidden}, K={shape.experts}, B={shape.blocks}"
    if shape.block_compute is None:
        sizes += ", router as it starts"
    if shape.gated:
        sizes += ", gated"
    flops = (6.0 if shape.gated else 4.0) * shape.tokens * shape.dim * shape.hidden
    return Result(shape.name, sizes, flops, rate, [s.timing for s in subjects], skipped, shape)


def grouped_mm_block_ffn(
    x_ND: Tensor, gates_NE: Tensor, blocks_NB: Tensor, weights: ExpertWeights, _dropout: None = None
) -> Tensor:
    """`reference_block_ffn` through torch's grouped product, as one would write it without kernels.

    `torch.nn.functional.grouped_mm` takes all (expert, block) groups in one call; gather, activation, gate and sum are
    separate, and autograd keeps what they make.
    """
    experts, _, dim = weights.keys.shape
    groups = experts * weights.num_blocks
    selected_EBN = (gates_NE != 0).T[:, None, :] & blocks_NB.T[None, :, :]
    expert_R, block_R, row_R = selected_EBN.nonzero(as_tuple=True)
    ends_G = selected_EBN.sum(-1).flatten().cumsum(0).to(torch.int32)
    x_RD, group_R = x_ND.index_select(0, row_R), expert_R * weights.num_blocks + block_R

    def read(keys: Tensor, bias: Tensor | None) -> Tensor:
        pre_RM = F.grouped_mm(x_RD, keys.view(groups, -1, dim).transpose(1, 2), offs=ends_G)
        return pre_RM if bias is None else pre_RM + bias.view(groups, -1).index_select(0, group_R)

    hidden_RM = read(weights.keys, weights.key_bias)
    if weights.gate_keys is None:
        hidden_RM = FUNCTIONS[weights.activation](hidden_RM)
    else:
        hidden_RM = FUNCTIONS[weights.activation](read(weights.gate_keys, weights.gate_key_bias)) * hidden_RM
    gate_R1 = gates_NE[row_R, expert_R, None].to(x_ND.dtype)
    out_RD = F.grouped_mm(hidden_RM * gate_R1, weights.values.view(groups, -1, dim), offs=ends_G)
    y_ND = torch.zeros_like(x_ND, dtype=torch.float32).index_add(0, row_R, out_RD.float())
    if weights.value_bias is not None:
        y_ND = y_ND + gates_NE.float() @ weights.value_bias.float()
    return y_ND.to(x_ND.dtype)


@contextmanager
def through_grouped_mm() -> Iterator[None]:
    """Layers compute their experts by `grouped_mm_block_ffn`."""
    with use_kernels("grouped"), patch.object(select, "grouped_block_ffn", grouped_mm_block_ffn):
        yield


# -- whole models -----------------------------------------------------------------------------------------------------


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
    "deit-s": Model("deit-s", _deit_small, _images, (8, 10), 6, 8, 11.41, batch=64, cpu_batch=4),
    "bert-large": Model("bert-large", _bert_large, _sentences, (20, 22), 16, 16, 47.61, batch=32, cpu_batch=1),
}


def run_model(
    model: Model,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    seconds: float,
    on_round: Callable[[], object],
    rate: float,
    compiled: bool = False,
) -> Result:
    """Time inference and training steps (forward, backward, AdamW) of a model's versions, interleaved."""
    torch.manual_seed(0)
    inputs = tuple(t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in model.inputs(batch))
    dense = model.build().to(device, dtype).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        dense(*inputs)
    flops = float(counter.get_total_flops())
    ffn = find_adapter(dense).read(find_adapter(dense).blocks(dense)[model.layers[0]])
    shape = Shape(model.name, 0, ffn.up.in_features, ffn.up.out_features, model.experts, model.blocks)
    ffn_flops = 2.0 * len(ffn.projections) * len(_inputs_of(dense, ffn.sources[0], inputs)) * shape.dim * shape.hidden

    def work(ffns: float) -> float:
        return 1 + len(model.layers) * (ffns - 1) * ffn_flops / flops

    @cache
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
    candidates = beside_compiled(versions) if compiled else versions
    subjects, skipped = prepare(candidates, lambda version: ready(version, lambda: inputs, optimised=True))
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
