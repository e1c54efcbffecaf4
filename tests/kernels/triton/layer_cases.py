"""Whole layers by the Triton kernels, how they are chosen, and their self-test."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.triton import (
    DEVICE,
    bank,
    error,
    make_layer,
    random,
    without_tuning,  # noqa: F401
)
from unifmoe_dist import UniFMoELayer
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels import block_ffn, reference_block_ffn, select, self_test, tile_sizes, use_kernels
from unifmoe_dist.kernels.triton import ffn as triton_ffn
from unifmoe_dist.kernels.triton import overflow, plan, weight_gradients, workspace
from unifmoe_dist.kernels.triton import routing as triton_routing
from unifmoe_dist.kernels.triton.ffn import triton_block_ffn
from unifmoe_dist.kernels.triton.plan import scan_groups
from unifmoe_dist.kernels.triton.workspace import LaunchShape, TritonOptions


def check_layer(layer: UniFMoELayer, x: Tensor, token_mask: Tensor | None = None) -> None:
    """Outputs, gradients and statistics, Triton against plain torch."""
    grad = random(*x.shape)
    results = []
    for name in ("triton", "grouped"):
        torch.manual_seed(6)  # of what is dropped
        leaf = x.detach().requires_grad_()
        layer.zero_grad()
        layer.usage.reset()
        with use_kernels(name):
            y = layer(leaf, token_mask)
        y.backward(grad)
        results.append([y, leaf.grad, *(p.grad.clone() for p in layer.parameters()), layer.usage.totals.clone()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=1e-4, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(),
        dict(experts=1),
        dict(hidden=32, blocks=2),
        dict(dim=48, hidden=144, blocks=3),
        dict(dim=27, hidden=105, blocks=3),
        dict(capacity_factor=0.7),
        dict(shared_demand=0.4, fixed_experts=2, block_choice="prefix"),
        dict(hidden_dropout=0.3),
        dict(gated=True, activation="silu"),
        dict(gated=True, hidden=144, blocks=3, bias=False, hidden_dropout=0.3),
        dict(gated=True, dim=20, hidden=50, blocks=5),
    ],
)
def test_layer(sizes):
    layer = make_layer(**sizes)
    check_layer(layer, random(3, 5, layer.config.model_dim))


SLOW = pytest.mark.slow  # in the interpreter; they run with -m slow


@pytest.mark.parametrize(
    "tokens,gated",
    [
        (1, False),
        (1, True),
        (129, True),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [(127, False), (127, True), (128, False), (128, True), (129, False)]
        ),
    ],
)
def test_layer_of_tokens_beside_a_tile(tokens, gated):
    check_layer(make_layer(dim=16, experts=2, blocks=2, gated=gated), random(tokens, 16))


@SLOW
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "sizes", [dict(hidden=256, experts=2, blocks=256), dict(dim=256, hidden=32, experts=255, blocks=2)]
)
def test_layer_of_the_most_experts_and_blocks(sizes, gated):
    """Their weights are frozen: thousands of gradients of unused blocks take the interpreter long."""
    layer = make_layer(gated=gated, **sizes)
    layer.experts.requires_grad_(False), layer.shared.requires_grad_(False)
    results = []
    for name in ("triton", "grouped"):
        torch.manual_seed(1)
        x = random(2, layer.config.model_dim).requires_grad_()
        layer.zero_grad()
        with use_kernels(name):
            y = layer(x)
        y.square().sum().backward()
        results.append((y, x.grad, layer.router.weight.grad))
    for got, want in zip(*results, strict=True):
        assert error(got, want) < 1e-4


@pytest.mark.parametrize("gated", [False, True])
def test_layer_of_masked_expanded_and_nan_tokens(gated):
    layer = make_layer(gated=gated)
    check_layer(layer, random(4, 32), torch.zeros(4, dtype=torch.bool, device=DEVICE))
    check_layer(layer, random(1, 32).expand(5, 32))
    x = random(6, 32)
    x[3] = float("nan")
    check_layer(layer, x[:, :].detach())


def test_layer_with_one_expert_for_all_and_others_unused():
    layer = make_layer()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 5.0
    check_layer(layer, torch.rand(9, 32, device=DEVICE) + 0.5)


def test_layer_on_no_token_and_on_strides():
    layer = make_layer()
    check_layer(layer, random(0, 32))
    check_layer(layer, random(2, 0, 32))
    check_layer(layer, random(5, 64)[:, ::2])
    check_layer(layer, random(32, 5).T)


def test_layer_nan_token_stays_alone():
    layer = make_layer()
    x = random(6, 32)
    with use_kernels("triton"):
        clean = layer(x)
        x[2, 3] = float("nan")
        dirty = x.clone().requires_grad_()
        y = layer(dirty)
        y.sum().backward()
    keep = [0, 1, 3, 4, 5]
    assert y[2].isnan().all() and (y[keep] - clean[keep]).abs().max() < 1e-5
    assert dirty.grad[keep].isfinite().all()


def test_layer_token_mask():
    layer = make_layer()
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]], device=DEVICE)
    x = random(3, 4, 32)
    check_layer(layer, x, mask)
    x[mask == 0] = float("nan")
    with use_kernels("triton"):
        y = layer(x, mask)
        y.sum().backward()
    assert (y[mask == 0] == 0).all() and y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_selector_refuses_what_triton_cannot_run():
    experts = bank(1, 24, 48, 2, dtype=torch.float64)
    x = random(3, 24, dtype=torch.float64)
    arguments = (x, x.new_ones(3, 1), x.new_ones(3, 2, dtype=torch.bool), experts.weights())
    with use_kernels("triton"), pytest.raises(UserError, match="float64"):
        block_ffn(*arguments)
    torch.testing.assert_close(block_ffn(*arguments), reference_block_ffn(*arguments))


def test_what_triton_does_not_take_is_said_once(monkeypatch, recwarn):
    monkeypatch.setattr(select, "_wants_triton", lambda x: True)
    select._say_once.cache_clear()  # other tests hear it too
    layer, x = make_layer(dim=24, hidden=64).double(), random(7, 24, dtype=torch.float64)
    expected = layer.eval()(x)
    with use_kernels("reference"):
        torch.testing.assert_close(layer(x), expected)
    layer(x)
    said = sorted(str(w.message) for w in recwarn if "plain torch" in str(w.message))
    assert len(said) == 2 and "they compute" in said[0] and "they route" in said[1] and "float64" in said[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=SLOW)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("gated,dropout", [(False, False), (False, True), (True, False), (True, True)])
def test_trial_passes(dtype, gated, dropout, shared, recwarn):
    x = random(4, 48, dtype=dtype)
    weights = bank(2, 48, 64, 2, dtype=dtype, gated=gated).weights()
    assert self_test.ffn_works(x, weights, dropout, shared) and self_test.routing_works(x, 5, 4)
    assert not [w for w in recwarn if "Triton is not used" in str(w.message)]


@pytest.mark.parametrize("fault", ["wrong gradient", "NaN", "crash"])
def test_trial_finds_a_faulty_kernel(fault, monkeypatch):
    """Then plain torch is used, with a warning, instead of a wrong or broken kernel."""

    def faulty(x, gates, blocks, weights, **rest):
        if fault == "crash":
            raise RuntimeError("out of resource: shared memory")
        y = triton_block_ffn(x, gates, blocks, weights)
        return y * float("nan") if fault == "NaN" else y.detach() + 1.1 * (y - y.detach())

    monkeypatch.setattr(triton_ffn, "triton_block_ffn", faulty)
    monkeypatch.setattr(self_test, "_verdicts", {})
    with pytest.warns(UserWarning, match="Triton is not used for block-sparse experts"):
        assert not self_test.ffn_works(random(4, 48), bank(2, 48, 64, 2).weights())


def test_trial_finds_a_faulty_overflow(monkeypatch):
    """It decides where more tiles may be needed than the workspace holds, and nowhere else."""
    few, many = ((random(n, 48), bank(e, 48, 64, 2).weights()) for n, e in ((4, 2), (200, 8)))
    monkeypatch.setattr(self_test, "_verdicts", {})
    assert self_test.ffn_works(*many)

    def faulty(space, plan, given, choices):  # one tile is lost
        overflow.launch_overflow(space, replace(plan, num_tiles=plan.num_tiles - 1), given, choices)

    monkeypatch.setattr(triton_ffn, "launch_overflow", faulty)
    monkeypatch.setattr(self_test, "_verdicts", {})
    with pytest.warns(UserWarning, match="32 rows a tile, more than a workspace: ArithmeticError"):
        assert not self_test.ffn_works(*many)
    assert self_test.ffn_works(*few)


@pytest.mark.parametrize("tokens,experts", [(4, 2), (200, 3), (200, 8), (3000, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trial_knows_what_overflows(tokens, experts, dtype):
    """From sizes alone, as the launches of either pass decide."""
    x, weights = random(tokens, 48, dtype=dtype), bank(experts, 48, 64, 2, dtype=dtype).weights()
    shape = LaunchShape(x, torch.ones(tokens, experts), weights.keys, 2, TritonOptions())
    sizes = tokens, 48, 32, 2, experts, shape.tile_rows, dtype.itemsize
    item = dtype.itemsize
    fillings = [
        workspace.Workspace(x, shape, row_bytes, None).fillings for row_bytes in (48 * item, (48 + 2 * 32) * item)
    ]
    assert tile_sizes.overflows(*sizes, False, False) == any(fillings)


def test_trial_finds_wrong_counts(monkeypatch):
    """Experts would compute the wrong rows."""

    def faulty(*arguments):
        offsets = scan_groups(*arguments)
        return replace(offsets, totals=offsets.totals.roll(1, 0))

    monkeypatch.setattr(triton_routing, "scan_groups", faulty)
    monkeypatch.setattr(self_test, "_verdicts", {})
    with pytest.warns(UserWarning, match="Triton is not used for routing"):
        assert not self_test.routing_works(random(4, 16), 4, 3)


def test_trial_knows_nothing_of_its_caller(monkeypatch, recwarn):
    """Autocast, defaults and modes of whoever makes the first forward pass decide nothing."""
    monkeypatch.setattr(self_test, "_verdicts", {})
    x, weights = random(200, 48), bank(2, 48, 64, 2).weights()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.autocast(DEVICE, torch.bfloat16), torch.inference_mode():
            assert self_test.routing_works(x, 5, 4) and self_test.ffn_works(x, weights)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    assert {case.dtype for case in self_test._verdicts} == {
        torch.float32,
        torch.bfloat16,
    }  # of what came, not of what is
    assert not [w for w in recwarn if "Triton is not used" in str(w.message)]


def test_trial_runs_the_tiles_that_will_run(monkeypatch):
    seen = []

    def watched(*arguments, options, **more):
        seen.append(options.tile_rows)
        return triton_block_ffn(*arguments, options=options, **more)

    monkeypatch.setattr(triton_ffn, "triton_block_ffn", watched)
    monkeypatch.setattr(self_test, "_verdicts", {})
    weights = bank(2, 48, 64, 2).weights()
    for tokens, rows in ((4, 16), (200, 64), (64, 32)):
        assert self_test.ffn_works(random(tokens, 48), weights) and seen[-1] == rows
        given = random(tokens, 48), torch.ones(tokens, 2), weights.keys, 2
        assert LaunchShape(*given, TritonOptions(), gated=False).tile_rows == rows


@pytest.mark.parametrize("experts,shared", [(2, False), (2, True), (8, False), (8, True)])
def test_trial_has_full_and_short_tiles_with_and_without_kept_channels(experts, shared, monkeypatch):
    """Where tiles are longest, each is another piece of a kernel; eight experts may need more than the workspace."""
    seen, short = [], []

    def watched(x, gates, blocks, weights, shared=None, options=None, dropout=None):
        seen.append(options)
        for expert, gate in enumerate(gates.T):
            for group in (blocks if shared is None or expert == 0 else ~blocks)[gate != 0].T:
                tiles = range(0, int(group.sum()), options.tile_rows)
                short.extend(int(group.sum()) - first <= options.tail_rows for first in tiles)
        return x * gates.sum(1, keepdim=True)

    monkeypatch.setattr(triton_ffn, "triton_block_ffn", watched)
    monkeypatch.setattr(self_test, "_verdicts", {})
    x, weights = random(4000, 48, dtype=torch.bfloat16), bank(experts, 48, 64, 2, dtype=torch.bfloat16).weights()
    with pytest.warns(UserWarning, match="128 rows a tile"):
        self_test.ffn_works(x, weights, shared=shared)
    first = seen[0].kept_bytes // (128 * 32 * 2)
    assert {*short[:first]} == {*short[first:]} == {True, False}
    assert (seen[0].workspace_bytes == 0) == (experts == 8) and len(short) > (3 + 2 if experts == 8 else 3)


def test_a_trial_without_memory_is_no_verdict(monkeypatch, recwarn):
    def short(*arguments, **more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(self_test, "_verdicts", {})
    x, weights = random(4, 48), bank(2, 48, 64, 2).weights()
    with monkeypatch.context() as patch:
        patch.setattr(triton_ffn, "triton_block_ffn", short)
        assert not self_test.ffn_works(x, weights)
    assert self_test.ffn_works(x, weights)
    assert not [w for w in recwarn if "Triton is not used" in str(w.message)]


def test_kernels_are_launched_on_the_device_of_their_tokens(monkeypatch):
    """Triton launches on the current device, whatever the tensors are on."""
    current: list[Tensor | None] = [None]

    @contextlib.contextmanager
    def device_of(tensor):
        before, current[0] = current[0], tensor
        yield
        current[0] = before

    class Watched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append(current[0] is not None)
            return self.kernel[grid]

    launched: list[bool] = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for module in (triton_ffn, triton_routing, plan, weight_gradients, workspace, overflow):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Watched(getattr(module, name)))
    layer, x = make_layer(), random(40, 32)
    with use_kernels("triton"), torch.no_grad():
        layer(x)
        block_ffn(
            x,
            torch.ones(40, 3, device=DEVICE),
            torch.ones(40, 4, dtype=torch.bool, device=DEVICE),
            layer.experts.weights(),
        )
    assert len(launched) > 8 and all(launched)


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=SLOW), True])
def test_columns_and_copies_serve_all_passes_of_a_step(autocast, monkeypatch):
    """Router and prototypes are packed once a step, and results are those of packing and casting in every pass."""
    packed = []
    pack = triton_routing.packed_columns

    def packing(*given):
        packed.append(0)
        return pack(*given)

    def train() -> list[Tensor]:
        layer = make_layer(dim=16, hidden=32, experts=2, blocks=2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        for _ in range(2):
            packed.clear()
            for _ in range(2):
                with use_kernels("triton"):
                    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                        y = checkpoint(layer, random(5, 16), use_reentrant=False)
                    y.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(layer.parameters())

    monkeypatch.setattr(triton_routing, "packed_columns", packing)
    torch.manual_seed(3)
    got = train()
    assert len(packed) == 1
    for module in ("kernels.select", "experts"):
        monkeypatch.setattr(f"unifmoe_dist.{module}.kept", lambda *_: None)
    torch.manual_seed(3)
    want = train()
    assert len(packed) == 4  # each micro-batch's pass, and its recomputation
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
