"""The Triton path: the cases of *_cases.py, that every kernel compiles for real devices, and how it is chosen.

On a machine with a CUDA device, `pytest -m gpu -n 8 tests/kernels/triton/test_triton.py` checks all of it there; most
of the time goes into compiling, hence the processes.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unifmoe_dist
from tests.kernels.triton.triton_compile import SHARED_MEMORY, compiled_launches, launches, unassembled
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, kept
from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels import HiddenDropout, tile_sizes, use_kernels
from unifmoe_dist.studies.kernel_estimates.compiled import on_device

triton = pytest.importorskip("triton")

if torch.cuda.is_available():
    from tests.kernels.triton.ffn_cases import *  # noqa: F403
    from tests.kernels.triton.layer_cases import *  # noqa: F403
    from tests.kernels.triton.routing_cases import *  # noqa: F403
    from tests.kernels.triton.scratch_cases import *  # noqa: F403

    pytestmark = pytest.mark.gpu
else:
    HERE = Path(__file__).parent
    CASES = [
        f"{path.name}::{name}"
        for path in sorted(HERE.glob("*_cases.py"))
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    ]
    FEW = ["-m", "not slow", "-p", "tests.support.few_cases"]
    COMMAND = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FEW]
    ROOT = Path(__file__).parents[3]
    PARTS = 6  # they run beside each other, and none of them for minutes

    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("part", range(PARTS))
    def test_cases_in_the_interpreter(part):
        """In its own process: Triton decides at import whether it interprets, and others here use the compiler."""
        run = subprocess.run(
            [*COMMAND, *CASES[part::PARTS]],
            cwd=HERE,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "architecture,dtype,rate,gated",
    [
        (86, torch.bfloat16, 0.1, False),
        (90, torch.bfloat16, None, False),
        (86, torch.float32, None, False),
        (86, torch.bfloat16, None, True),
        (90, torch.bfloat16, 0.1, True),
    ],
)
def test_kernels_compile_and_fit(architecture, dtype, rate, gated):
    """Without a device: Triton's compiler and NVIDIA's assembler accept every launch of a forward and backward pass.

    Of the tiles to choose from, only the first is tried, which must run everywhere.
    """
    from unifmoe_dist.kernels.triton.ffn import triton_block_ffn
    from unifmoe_dist.kernels.triton.routing import triton_route

    n, dim, experts, blocks = 4096, 128, 3, 4

    def both_passes():
        x = torch.randn(n, dim).to(dtype).requires_grad_()
        weight = torch.randn(experts + 1, dim).requires_grad_()
        shared, residual = (BlockExperts(e, dim, 192, blocks, "gelu", True, gated) for e in (1, experts))
        r = triton_route(x, weight, shared.keys[0].to(dtype), blocks, torch.ones(n, dtype=torch.bool))
        gates = torch.rand(n, experts + 1, requires_grad=True)
        dropout = None if rate is None else HiddenDropout.draw(rate, torch.device("cpu"))
        y = triton_block_ffn(
            x,
            gates,
            torch.ones(n, blocks, dtype=torch.bool),
            residual.to(dtype).weights(),
            shared.to(dtype).weights(),
            dropout=dropout,
        )
        outputs = [y, r.gates, r.shared_demand]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])

    kernels = compiled_launches(both_passes, architecture)
    names = {k.name for k in kernels}
    assert {
        "ffn_kernel",
        "overflow_kernel",
        "weight_grad_kernel",
        "columns_kernel",
        "route_kernel",
        "_scan_kernel",
        "_fill_kernel",
    } <= names
    passes = {backward for k in kernels for backward in (True, False) if f"'BACKWARD': {backward}" in k.choices}
    assert passes == {True, False}
    for kernel in kernels:
        assert kernel.shared_memory <= SHARED_MEMORY[architecture], kernel


def test_no_kernel_unpacks_a_tuple_inside_another():
    """Triton 3.5, which comes with torch 2.9, cannot read `a, (b, c) = ...`."""
    kernels, nested = 0, []
    for path in (Path(unifmoe_dist.__file__).parent / "kernels" / "triton").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
                kernels += 1
                targets = [t for node in ast.walk(function) if isinstance(node, ast.Assign) for t in node.targets]
                inner = [part for t in targets if isinstance(t, ast.Tuple) for part in t.elts]
                nested += [f"{path.name}:{part.lineno}" for part in inner if isinstance(part, ast.Tuple)]
    assert kernels > 30 and not nested


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("experts,overflow", [(2, False), (6, True), (16, True), (64, True), (255, True)])
def test_launches(experts, overflow, gated, masked, dtype, monkeypatch):
    """What one layer launches on one rank: as much for 255 experts as for 6, and not more by accident.

    A seventh kernel serves where more blocks may be selected than the workspace holds at once.
    """
    layer = UniFMoELayer(UniFMoEConfig(256, 512, experts, 4 if experts < 6 else 16, gated=gated)).to(dtype)
    x = torch.randn(512, 256).to(dtype).requires_grad_()
    mask = torch.rand(512) > 0.5 if masked else None
    layer.usage.totals = torch.zeros(6 + experts + layer.config.num_blocks, dtype=torch.float64)
    outputs = []
    more = ["overflow_kernel"] if overflow else []
    monkeypatch.setattr(kept, "_sample", lambda weight: None)  # as on a GPU, where nobody looks at the weights
    with use_kernels("triton"):
        monkeypatch.setattr(kept, "_can_tell", lambda weight, training: False)
        forward = launches(lambda: outputs.append(layer(x, mask)))
        monkeypatch.setattr(kept, "_can_tell", lambda weight, training: True)
        assert launches(lambda: layer(x, mask)) == forward
        assert launches(lambda: layer(x, mask)) == forward[1:]  # a step's router and prototypes are packed
    assert forward == [
        "columns_kernel",
        "route_kernel",
        "_scan_kernel",
        "add_.Tensor",
        "_fill_kernel",
        "ffn_kernel",
        "combine_kernel",
        *more,
    ]
    backward = launches(lambda: outputs[0].backward(outputs[0].detach()))
    half = [] if dtype == torch.float32 else ["_to_copy.default"]
    assert backward == [
        "_fill_kernel",
        "ffn_kernel",
        "weight_grad_kernel",
        "bias_grad_kernel",
        "combine_kernel",
        *more,
        "gate_grad_kernel",
        *half,
        "mm.default",
        "route_backward_kernel",
        "route_weight_kernel",
        "sum.dim_IntList",
        *half,
        "add.Tensor",
    ]
    assert len(forward) <= 8 and len(backward) <= 14


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("architecture", [86, 90])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widest_tiles_fit(architecture, dtype, gated, monkeypatch, tmp_path):
    """The widest blocks that registers are to hold, and many experts, with the tiles that must run everywhere."""
    from unifmoe_dist.kernels.triton.ffn import triton_block_ffn
    from unifmoe_dist.kernels.triton.plan import make_plan
    from unifmoe_dist.kernels.triton.routing import triton_route

    def both_passes():
        x = torch.randn(4096, 256).to(dtype).requires_grad_()
        r = triton_route(x, torch.randn(65, 256).requires_grad_(), torch.randn(16, 256), 16)
        width = tile_sizes.WIDEST[dtype.itemsize, gated]
        experts = BlockExperts(2, 256, 2 * width, 2, "gelu", True, gated).to(dtype)
        y = triton_block_ffn(x, torch.rand(4096, 2), torch.ones(4096, 2, dtype=torch.bool), experts.weights())
        torch.autograd.backward([y, r.gates], [torch.ones_like(y), torch.ones_like(r.gates)])
        most = triton_route(x, torch.randn(256, 256).requires_grad_(), torch.randn(256, 256), 256)
        make_plan(torch.rand(300, 9), torch.ones(300, 256, dtype=torch.bool), most.by_products.group_offsets, 64, True)
        most.gates.sum().backward()

    with unassembled(monkeypatch, tmp_path):
        kernels = compiled_launches(both_passes, architecture)
    assert max(kernel.shared_memory for kernel in kernels) > 16 * 1024
    for kernel in kernels:
        assert kernel.shared_memory <= SHARED_MEMORY[architecture], kernel


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "tokens,dim,hidden,experts,blocks,activation,gated",
    [
        (12608, 384, 1536, 6, 8, "gelu", False),
        (4096, 1024, 4096, 16, 16, "gelu", False),
        (4096, 1024, 2816, 16, 16, "gelu", True),
        (4096, 1024, 2816, 16, 16, "silu", True),
    ],
)
def test_forward_kernels_do_not_spill(tokens, dim, hidden, experts, blocks, activation, gated):
    """On sm_90, of the paper's two shapes and of GEGLU and SwiGLU, with the tiles that come first.

    Triton 3.6, of torch 2.11, keeps 40 bytes of a thread of GEGLU on the stack and 8 of SwiGLU, outside of loops.
    """
    layer = UniFMoELayer(UniFMoEConfig(dim, hidden, experts, blocks, activation, gated=gated)).bfloat16().eval()
    x = torch.randn(tokens, dim).bfloat16()

    def forward():
        with use_kernels("triton"), torch.no_grad():
            layer(x)

    kernels = compiled_launches(forward, 90)
    assert {"route_kernel", "ffn_kernel", "overflow_kernel", "combine_kernel"} <= {k.name for k in kernels}
    most = 40 if gated and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 0
    assert {k.name: k.stack for k in kernels if k.stack > most} == {}


def test_fillings_are_few():
    """A workspace that somebody bounds does not make more tickets than 32 bits count."""
    most = tile_sizes.max_tiles(2**20, 16, 64, 16, True)
    held = tile_sizes.held_tiles(2**20, 16, 64, 16, most, affordable=1)
    assert most / (held // 3) < 520 and tile_sizes.held_tiles(100, 2, 2, 16, 30, affordable=1) == 3
    assert tile_sizes.held_tiles(100, 2, 2, 16, 2, affordable=1) == 2


@pytest.mark.parametrize("architecture,parts", [(80, 2), (86, 1), (90, 1)])
def test_parts_of_gated_blocks(architecture, parts):
    """Of 176 channels, which an A100 computes in two parts; plain blocks are whole on all."""
    from unifmoe_dist.kernels.triton.workspace import LaunchShape, TritonOptions

    x, gates, keys = (torch.zeros(*size, dtype=torch.bfloat16) for size in ((8, 16), (8, 2), (2, 352, 16)))
    with on_device(SHARED_MEMORY[architecture]):
        assert LaunchShape(x, gates, keys, 2, TritonOptions(), gated=True).parts == parts
        assert LaunchShape(x, gates, keys, 2, TritonOptions(part_channels=128), gated=True).parts == 2
        assert LaunchShape(x, gates, keys, 2, TritonOptions()).parts == 1


def test_selector_names():
    with pytest.raises(UserError, match="fastest"), use_kernels("fastest"):
        pass


@pytest.mark.gpu
def test_no_host_stall_and_cuda_graph():
    """Forward and backward with a token mask never wait for the device, and a captured graph follows its input."""
    from tests.support.triton import make_layer

    layer = make_layer(dim=128, hidden=512, experts=4, blocks=4).bfloat16()
    x = torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.rand(4, 64, device="cuda") > 0.3
    for _ in range(3):  # compiles and tunes
        layer(x, mask).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, mask).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, mask)
        x.copy_(torch.randn_like(x))
        layer.usage.reset()
        graph.replay()
        assert torch.equal(y, layer(x, mask))
        torch.testing.assert_close(layer.usage.totals[0].item(), 2.0 * mask.sum().item())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(), dict(workspace_bytes=2**20)])
def test_tuned_tiles(options, monkeypatch):
    """Trials leave no trace in the results, whatever tiles win."""
    from tests.support.triton import make_layer
    from unifmoe_dist.kernels.triton import tuning as triton_tuning

    monkeypatch.setattr(triton_tuning, "_held_back", 0)
    layer = make_layer(dim=64, hidden=384, experts=4, blocks=2, seed=len(options)).bfloat16()
    x = torch.randn(3000, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for name, given in (("triton", options), ("triton", options), ("grouped", {})):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with use_kernels(name, **given):
            y = layer(leaf)
        y.float().square().mean().backward()
        results.append([y, leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for tuned, cached, plain in zip(*results, strict=True):
        assert torch.equal(tuned, cached)
        scale = plain.float().abs().max()
        assert (tuned.float() - plain.float()).abs().max() < 3e-2 * scale
        assert (cached.float() - plain.float()).abs().max() < 3e-2 * scale


@pytest.mark.gpu
def test_training_step_in_a_cuda_graph():
    from tests.support.triton import make_layer

    layer, twin = (make_layer(dim=128, hidden=512, experts=4, blocks=4) for _ in range(2))
    graphed = torch.cuda.make_graphed_callables(twin, (torch.randn(256, 128, device="cuda", requires_grad=True),))
    x = torch.randn(256, 128, device="cuda")
    grads = []
    for module in (layer, graphed):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)
