"""Device functions that every Triton kernel here shares, and what the host must know about Triton.

Kernels use only what Ampere through Hopper and the interpreter have: power-of-two tiles, masks on every edge, no
vendor feature. `TRITON_INTERPRET=1`, set before Triton is imported, runs them on CPU tensors.
"""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Float32 products: three TF32 products (big * big + big * small + small * big) keep 21 bits on tensor cores, which
# plain IEEE products would leave; AMD devices have no TF32.
EXACT = "tf32x3" if torch.version.hip is None else "ieee"


def precision(dtype: torch.dtype) -> str:
    """How products of `dtype` run: half precision natively, float32 as EXACT says.

    `torch.backends.cuda.matmul.fp32_precision = "tf32"` (formerly `allow_tf32`) buys single TF32 products, as it does
    for torch's own.
    """
    if dtype == torch.bfloat16 and INTERPRETED:
        return "widen"  # the interpreter keeps bfloat16 as integers and multiplies those
    if dtype == torch.float32:
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else EXACT
    return "tf32" if torch.version.hip is None else "ieee"  # the default; it means nothing for half precision


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(n))


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """accumulator + a @ b in float32."""
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator)
    else:
        return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def expert_pointer(shared, residual, expert, stride, HAS_SHARED: tl.constexpr):
    """Where the weights of `expert` start; with a shared expert, that one is number 0 and has its own tensor."""
    if HAS_SHARED:
        return tl.where(expert == 0, shared, residual + (expert - 1).to(tl.int64) * stride)
    else:
        return residual + expert.to(tl.int64) * stride


@triton.jit
def part_channels(block, PARTS: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr):
    """First channel, of its expert's, and number of channels of a part: of PARTS of a block of WIDTH channels each has
    M, the last perhaps fewer."""
    before = (block % PARTS) * M
    return (block // PARTS) * WIDTH + before, tl.minimum(WIDTH - before, M)


@triton.jit
def _tanh(x):
    # No hyperbolic function exists on every version; exp of a negative number cannot overflow.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _normal_tail(x):
    """(1 - erf(|x| / sqrt(2))) / 2 by Abramowitz and Stegun 7.1.26, to 1e-7; with erf large tiles spill."""
    a = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * a)
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return 0.5 * series * tl.exp(-a * a)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """Activation NAME of float32 x, as in `kernels/activations.py`. NaN stays NaN."""
    if NAME == "gelu":
        tail = _normal_tail(x)
        return x * tl.where(x < 0, tail, 1.0 - tail)
    elif NAME == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif NAME == "quick_gelu":
        return x * _sigmoid(1.702 * x)
    elif NAME == "relu":
        return tl.where(x < 0, 0.0, x)
    elif NAME == "relu_squared":
        return tl.where(x < 0, 0.0, x * x)
    elif NAME == "silu":
        return x * _sigmoid(x)
    elif NAME == "tanh":
        return _tanh(x)
    else:
        tl.static_assert(NAME == "identity")
        return x


@triton.jit
def activation_slope(x, NAME: tl.constexpr):
    """Derivative of activation NAME at float32 x."""
    if NAME == "gelu":
        tail = _normal_tail(x)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return tl.where(x < 0, tail, 1.0 - tail) + x * density
    elif NAME == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    elif NAME == "quick_gelu":
        s = _sigmoid(1.702 * x)
        return s + 1.702 * x * s * (1.0 - s)
    elif NAME == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    elif NAME == "relu_squared":
        return tl.where(x <= 0, 0.0, 2.0 * x)
    elif NAME == "silu":
        s = _sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif NAME == "tanh":
        t = _tanh(x)
        return 1.0 - t * t
    else:
        tl.static_assert(NAME == "identity")
        return tl.full(x.shape, 1.0, tl.float32)
