"""Mixture-of-experts layers of other libraries, one small adapter each, written against their public interfaces.

An adapter is a function (shape, top_k, device, dtype) -> module from (N, d) tokens to (N, d), with K experts that each
cost a dense FFN, of which every token uses top_k and none is dropped. It imports its library itself and raises
`Unavailable`, or whatever the library raises, where that cannot run.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """One layer to time."""

    name: str
    tokens: int  # N
    dim: int  # model width d
    hidden: int  # FFN width H
    experts: int  # residual experts K
    blocks: int  # B
    block_compute: float | None = None  # mean C_B to bring the router to; None leaves it as it starts, nearly uniform
    gated: bool = False  # SwiGLU in place of GELU; peers' experts are then as wide as costs them as much


BuildPeer = Callable[[Shape, int, torch.device, torch.dtype], nn.Module]


class Unavailable(Exception):
    """The library is there, but cannot run this; the message says why in a few words."""


class Peer(nn.Module):
    """A library's modules, by name, and how tokens go through them: `call(self, x)`."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def need_gpu(device: torch.device, capability: tuple[int, int] = (8, 0)) -> None:
    """Raises Unavailable unless the device is a GPU of at least this compute capability."""
    least = f"needs a GPU of compute capability {capability[0]}.{capability[1]} or more"
    if device.type != "cuda":
        raise Unavailable(least)
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        raise Unavailable(f"{least}; this one has {found[0]}.{found[1]}")


def reason(error: Exception) -> str:
    """One line that says why a peer does not run."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    if isinstance(error, Unavailable):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first[:160]}"


def tutel_moe(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """https://github.com/microsoft/tutel"""
    from tutel import moe

    if device.type == "cpu" and dtype not in (torch.float32, torch.float64):
        raise Unavailable("its CPU kernels take float32 and float64 only")
    experts = {"type": "ffn", "num_experts_per_device": shape.experts, "hidden_size_per_expert": shape.hidden}
    experts["activation_fn"] = nn.functional.gelu
    gate = {"type": "top", "k": top_k, "capacity_factor": 0.0}  # 0: as much room as the busiest expert needs
    return moe.moe_layer(gate_type=gate, model_dim=shape.dim, experts=experts).to(device, dtype)


def mixtral_block(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """https://github.com/huggingface/transformers"""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    # Its experts have three matrices: at two thirds of the width they cost as much as the dense FFN. Grouped products
    # want rows of whole 16 bytes.
    sizes: dict[str, Any] = dict(hidden_size=shape.dim, intermediate_size=8 * round(shape.hidden / 12))
    config = MixtralConfig(**sizes, hidden_act="silu", num_local_experts=shape.experts, num_experts_per_tok=top_k)
    config._experts_implementation = "grouped_mm" if device.type == "cuda" else "eager"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return Peer(lambda self, x: self.block(x[None])[0], block=block).to(device, dtype)


def deepspeed_moe(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """https://github.com/deepspeedai/DeepSpeed, all experts on one rank: no process group."""
    from deepspeed.moe.layer import MoE

    expert = nn.Sequential(nn.Linear(shape.dim, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.dim))
    options: dict[str, Any] = dict(drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False)
    moe = MoE(shape.dim, expert, num_experts=shape.experts, k=top_k, **options)
    return Peer(lambda self, x: self.moe(x)[0], moe=moe).to(device, dtype)


def megablocks_dmoe(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """https://github.com/databricks/megablocks; without biases, which its experts do not have."""
    import megablocks  # noqa: F401

    need_gpu(device)
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    sizes = dict(hidden_size=shape.dim, ffn_hidden_size=shape.hidden, moe_num_experts=shape.experts, moe_top_k=top_k)
    kind: dict[str, Any] = dict(activation_fn=nn.functional.gelu, bias=False, return_bias=False, mlp_type="mlp")
    kind |= dict(mlp_impl="grouped", moe_normalize_expert_weights=1)
    kind |= dict(moe_loss_weight=0.0)  # above 0 it would keep every pass's scores in a global list
    kind |= dict(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, device=device)
    return Peer(lambda self, x: self.moe(x[None])[0], moe=dMoE(Arguments(**sizes, **kind))).to(device, dtype)


def scattermoe_mlp(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """https://github.com/shawntan/scattermoe, behind a plain softmax top-k router: it brings none."""
    from scattermoe.mlp import MLP

    def call(self: Any, x: Tensor) -> Tensor:
        gates, experts = torch.softmax(self.router(x).float(), dim=-1).topk(top_k, dim=-1)
        return self.mlp(x, (gates / gates.sum(-1, keepdim=True)).to(x.dtype), experts)

    sizes = dict(input_size=shape.dim, hidden_size=shape.hidden, num_experts=shape.experts, top_k=top_k)
    layer = Peer(call, router=nn.Linear(shape.dim, shape.experts, bias=False), mlp=MLP(**sizes, activation=nn.GELU()))
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton's interpreter runs it on the CPU, for tests
        need_gpu(device)
    return layer.to(device, dtype)


def sonicmoe_moe(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """https://github.com/Dao-AILab/sonic-moe: kernels for Hopper GPUs and later."""
    import sonicmoe

    need_gpu(device, (9, 0))
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable("its kernels take bf16 and fp16 only")
    sizes = dict(hidden_size=shape.dim, intermediate_size=shape.hidden, num_experts=shape.experts)
    gelu = sonicmoe.enums.ActivationType.GELU
    moe = sonicmoe.MoE(**sizes, num_experts_per_tok=top_k, activation_function=gelu, add_bias=False, std=0.02)
    layer = Peer(lambda self, x: self.moe(x, is_inference_mode=not torch.is_grad_enabled())[0], moe=moe)
    return layer.to(device, dtype)


PEERS: dict[str, BuildPeer] = {
    "Tutel": tutel_moe,
    "Transformers Mixtral": mixtral_block,
    "DeepSpeed MoE": deepspeed_moe,
    "MegaBlocks dMoE": megablocks_dmoe,
    "ScatterMoE": scattermoe_mlp,
    "SonicMoE": sonicmoe_moe,
}
