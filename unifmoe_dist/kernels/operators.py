"""The block-sparse FFN and the running statistics as operators of torch.

Which rows a kernel computes depends on values, in Python that no tracer follows. So to torch.compile and torch.export
each is one node, whose shapes and gradients are known; what runs in it is the kernel of `select`, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels import select
from unifmoe_dist.kernels.dropout import HiddenDropout

_NAMES = ("keys", "values", "key_bias", "value_bias", "gate_keys", "gate_key_bias")


def block_ffn(
    x_ND: Tensor,
    gates_NE: Tensor,
    blocks_NB: Tensor,
    weights: ExpertWeights,
    shared: ExpertWeights | None = None,
    dropout: HiddenDropout | None = None,
) -> Tensor:
    """As `select.block_ffn`, or with `shared` as `select.shared_and_residual_ffn` of these coefficients, in a graph."""
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    given = {f"{n}.{name}": getattr(w, name) for n, w in enumerate((weights, shared)) if w for name in _NAMES}
    present = {name: tensor.to(dtype) for name, tensor in given.items() if tensor is not None}
    seed, rate, first = (None, 0.0, 0) if dropout is None else (dropout.seed, dropout.rate, dropout.first_expert)
    layout = (" ".join(present), weights.num_blocks, weights.activation, seed, rate, first)
    return _block_ffn(x_ND.to(dtype), gates_NE, blocks_NB, list(present.values()), *layout).to(x_ND.dtype)


class _Layout(NamedTuple):
    """What both operators take besides tensors of tokens and weights, in the order of `_ARGUMENTS`."""

    names: str
    num_blocks: int
    activation: str
    seed: Tensor | None
    rate: float
    first_expert: int

    def banks(self, weights: Sequence[Tensor]) -> list[ExpertWeights]:
        """One bank of experts, or the residual ones and the shared one."""
        tensors = dict(zip(self.names.split(), weights, strict=True))
        found: list[dict[str, Any]] = [{name: tensors.get(f"{bank}.{name}") for name in _NAMES} for bank in (0, 1)]
        sizes: dict[str, Any] = {"num_blocks": self.num_blocks, "activation": self.activation}
        return [ExpertWeights(**bank, **sizes) for bank in found if bank["keys"] is not None]

    @property
    def dropout(self) -> HiddenDropout | None:
        return None if self.seed is None else HiddenDropout(self.rate, self.seed, self.first_expert)


_ARGUMENTS = (
    "Tensor x, Tensor gates, Tensor blocks, Tensor[] weights, str names, int num_blocks, str activation, "
    "Tensor? seed, float rate, int first_expert"
)


@torch.library.custom_op("unifmoe::block_ffn", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _block_ffn(x: Tensor, gates: Tensor, blocks: Tensor, weights: Sequence[Tensor], *layout: Any) -> Tensor:
    own = _Layout(*layout)
    banks, dropout = own.banks(weights), own.dropout
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        if len(banks) == 1:
            return select.block_ffn(x, gates, blocks, banks[0], dropout)
        return select.both_ffns(x, gates, blocks, banks[1], banks[0], dropout)


@torch.library.custom_op(
    "unifmoe::block_ffn_backward", mutates_args=(), schema=f"(Tensor grad, {_ARGUMENTS}) -> Tensor[]"
)
def _block_ffn_backward(
    grad: Tensor, x: Tensor, gates: Tensor, blocks: Tensor, weights: Sequence[Tensor], *layout: Any
) -> list[Tensor]:
    """Gradients of x, the gates and the weights, from these alone: no graph could keep the plan of a forward pass."""
    own = _Layout(*layout)
    banks, dropout = own.banks(weights), own.dropout
    parts = [(gates, blocks, dropout)]
    if len(banks) == 2:
        rest = None if dropout is None else dropout.of_experts(1)
        parts = [(gates[:, 1:], ~blocks, rest), (gates[:, :1], blocks, dropout)]
    grad_x, grad_gates, grads = torch.zeros_like(x), list[Tensor](), list[Tensor]()
    for bank, (own_gates, own_blocks, own_dropout) in zip(banks, parts, strict=True):
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            of_x, of_gates, of_weights = select.block_ffn_gradients(
                grad, x, own_gates.contiguous(), own_blocks, bank, own_dropout
            )
        grad_x += of_x
        grad_gates.insert(0, of_gates)
        grads += [of_weights[name] for name in _NAMES if getattr(bank, name) is not None]
    return [grad_x, torch.cat(grad_gates, 1), *(t.contiguous() for t in grads)]


@_block_ffn.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_block_ffn_backward.register_fake
def _(grad: Tensor, x: Tensor, gates: Tensor, blocks: Tensor, weights: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gates, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gates, blocks, weights, *ctx.layout, seed, ctx.rate, ctx.first_expert = inputs
    ctx.save_for_backward(x, gates, blocks, seed, *weights)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, gates, blocks, seed, *weights = ctx.saved_tensors
    last = (*ctx.layout, seed, ctx.rate, ctx.first_expert)
    grad_x, grad_gates, *grads = _block_ffn_backward(grad, x, gates, blocks, weights, *last)
    return (grad_x, grad_gates, None, grads, *[None] * 6)


_block_ffn.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.unifmoe.block_ffn, get_raw=True)
def _flops(
    x: Tensor, gates: Tensor, blocks: Tensor, weights: Sequence[Tensor], names: str, *rest: Any, **_: Any
) -> int:
    """Of the selected blocks; of values that are not known, as if every token used every block of every expert."""
    present = names.split()
    matrices = sum(name in ("0.keys", "0.values", "0.gate_keys") for name in present)
    width = weights[present.index("0.keys")].shape[1] // blocks.shape[1]
    if isinstance(x, FakeTensor):
        rows = gates.numel() * blocks.shape[1]
    elif "1.keys" in present:
        used = (gates[:, 1:] != 0).sum(1)
        rows = int((blocks.sum(1) * (gates[:, 0] != 0) + (~blocks).sum(1) * used).sum())
    else:
        rows = int((blocks.sum(1) * (gates != 0).sum(1)).sum())
    return 2 * matrices * rows * width * x.shape[1]


@register_flop_formula(torch.ops.unifmoe.block_ffn_backward, get_raw=True)
def _backward_flops(grad: Tensor, *rest: Any, **named: Any) -> int:
    """Two products for each of the forward pass's own, and that pass once more, which the grouped kernel cuts short."""
    return 3 * _flops(*rest, **named)
