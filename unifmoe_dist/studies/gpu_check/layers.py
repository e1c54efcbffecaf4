"""The paper's layers and a gated one: Triton's kernels against the definition, forward and backward."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.studies.gpu_check import device
from unifmoe_dist.studies.gpu_check.record import Record

SIZES = {  # d, H, K, B and N; the number of tokens fills no tile
    "vision": (384, 1536, 6, 8, 2539),
    "language": (1024, 4096, 16, 16, 2031),
    "gated": (384, 1536, 6, 8, 2539),
}
TINY = (16, 64, 2, 4, 19)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-3}
"""Of the largest value of an output or gradient. As much as plain torch errs in the same type is right too."""
_DECIDE_OTHERWISE = 2e-3  # share of tokens: a decision within rounding may fall either way

Values = dict[str, Tensor]


def check(record: Record, name: str) -> None:
    d, h, k, b, n = SIZES[name] if record.on_card else TINY
    gated = name == "gated"
    config = UniFMoEConfig(d, h, k, b, "silu" if gated else "gelu", gated=gated)
    for kind in DTYPES:
        with record.attempt(f"{name}, {kind}"), device.quiet_tiles():
            _compare(record, name, kind, config, n)


def _compare(record: Record, name: str, kind: str, config: UniFMoEConfig, tokens: int) -> None:
    dtype, where = DTYPES[kind], device.here()
    layer = some_layer(config).to(where, dtype)
    exact = copy.deepcopy(layer).float()
    x = torch.randn(tokens, config.model_dim).to(where, dtype)
    with torch.no_grad():
        with device.kernels():
            routing = layer.route(x)
        with use_kernels("reference"):
            wanted = exact.route(x.float())
    same = (routing.shared_blocks == wanted.shared_blocks).all(1)
    same &= ((routing.gates != 0) == (wanted.gates != 0)).all(1)
    others = tokens - int(same.sum())
    x = x[same]
    gradient = torch.randn(x.shape).to(where)
    with use_kernels("reference"):
        truth = passes(exact, x.float(), gradient)
    errors = {}
    for kernels in ("triton", "grouped"):
        with use_kernels(kernels):
            errors[kernels] = differences(passes(layer, x, gradient.to(dtype)), truth)
    triton, plain = errors["triton"], errors["grouped"]
    worst = max(triton, key=lambda value: triton[value])
    bad = [value for value in triton if not triton[value] <= max(TOLERANCE[kind], 1.5 * plain[value])]  # NaN is bad
    cells = {"layer": name, "type": kind, "decide otherwise": f"{others} of {tokens}"}
    cells |= {value: f"{triton[value]:.1e} ({plain[value]:.1e})" for value in ("output", "x")}
    cells |= {"worst": f"{triton[worst]:.1e} ({plain[worst]:.1e})", "of": worst, "allowed": f"{TOLERANCE[kind]:.0e}"}
    record.row("errors", "Largest errors over the largest value, of Triton (of plain torch)", cells)
    record.numbers[f"{name}, {kind}"] = {"errors": errors, "decide_otherwise": others, "tokens": tokens}
    record.judge(
        f"{name}, {kind}: values",
        not bad,
        f"{', '.join(bad)} off by more than {TOLERANCE[kind]:.0e}; worst is {worst} with {triton[worst]:.1e}"
        if bad
        else f"output within {triton['output']:.1e}, gradients within {triton[worst]:.1e} ({worst})",
    )
    allowed = max(1, round(_DECIDE_OTHERWISE * tokens))
    record.judge(f"{name}, {kind}: decisions", others <= allowed, f"{others} of {tokens} tokens decide otherwise")


def some_layer(config: UniFMoEConfig, **more: Any) -> UniFMoELayer:
    """A layer whose experts differ, always the same."""
    torch.manual_seed(0)
    layer = UniFMoELayer(config, **more)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * parameter.abs().mean().clamp(min=0.02) * torch.randn_like(parameter))
    return layer


def passes(layer: UniFMoELayer, x: Tensor, gradient: Tensor | None = None, context: Any = None) -> Values:
    """Output and gradients of a forward and a backward pass, by name, in float32."""
    leaf = x.detach().clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    with context or nullcontext():
        y = layer(leaf)
        y.backward(torch.ones_like(y) if gradient is None else gradient)
    values = {"output": y, "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    return {name: value.detach().float() for name, value in values.items() if value is not None}


def differences(got: Values, wanted: Values) -> dict[str, float]:
    """Of every value the largest difference over the largest wanted number."""
    if got.keys() != wanted.keys():
        raise AssertionError(f"gradients of {sorted(got.keys() ^ wanted.keys())} are on one side only")
    return {
        name: float((got[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-6)) for name in got
    }
