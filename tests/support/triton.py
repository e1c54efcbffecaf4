"""Inputs and layers for the Triton kernels, on a CUDA device or, without one, for Triton's interpreter."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
import torch
from torch import Tensor

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels.triton.tuning import first_tiles


def _quicken() -> None:
    """Have the interpreter prepare its language once for each module, and not for every call of every function in it.

    What it puts in place stays anyway, but for a kernel's own module: nobody takes the rest back.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_get_np_dtype", "_patch_lang", "_LangPatchScope")):
        return  # another Triton: only slower
    prepare, prepared = interpreter._patch_lang, set()

    def prepare_once(function):
        if function.__module__ not in prepared:
            prepared.add(function.__module__)
            prepare(function)
        return interpreter._LangPatchScope()  # with nothing to take back

    interpreter._patch_lang = prepare_once
    numbers = functools.cache(interpreter._get_np_dtype)  # it made its table for every operation

    def numpy_type(kind):
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else numbers(kind.scalar)

    interpreter._get_np_dtype = numpy_type


if os.environ.get("TRITON_INTERPRET") == "1":
    _quicken()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def without_tuning():
    """Trial runs of every tile for every shape here would take long."""
    with first_tiles():
        yield


def bank(experts, dim, hidden, blocks, activation="gelu", bias=True, dtype=torch.float32, gated=False) -> BlockExperts:
    made = BlockExperts(experts, dim, hidden, blocks, activation, bias, gated).to(DEVICE, dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def random(*shape, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(got: Tensor, want: Tensor, least: float = 1e-6) -> float:
    """Largest difference over the largest wanted value, or over `least` if that is larger."""
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=least))


def random_gates(n: int, e: int) -> Tensor:
    return torch.rand(n, e, device=DEVICE) * (torch.rand(n, e, device=DEVICE) > 0.5)


def make_layer(dim=32, hidden=64, experts=3, blocks=4, seed=0, **more) -> UniFMoELayer:
    torch.manual_seed(seed)
    layer = UniFMoELayer(UniFMoEConfig(dim, hidden, experts, blocks, **more)).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer
