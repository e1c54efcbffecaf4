"""What the Triton kernels of experts must equal: the reference in float64, whatever the tiles and rounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.drawn import given, settings, st
from tests.support.triton import (
    DEVICE,
    bank,
    error,
    random,
    random_gates,
    without_tuning,  # noqa: F401
)
from unifmoe_dist.config import ACTIVATIONS
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels import HiddenDropout, reference_block_ffn
from unifmoe_dist.kernels.triton.ffn import TritonOptions, triton_block_ffn


def wide(experts: BlockExperts) -> BlockExperts:
    copy = BlockExperts(
        *experts.keys.shape[:1],
        experts.keys.shape[2],
        experts.keys.shape[1],
        experts.num_blocks,
        experts.activation,
        experts.key_bias is not None,
        experts.gate_keys is not None,
    ).to(DEVICE, torch.float64)
    copy.load_state_dict(experts.state_dict())
    return copy


def check_ffn(x, gates, blocks, experts, shared=None, options=None, tolerance=2e-5, dropout=None) -> None:
    """Outputs and all gradients against the reference in float64."""
    grad = random(*x.shape, dtype=x.dtype)
    banks = [experts] if shared is None else [shared, experts]
    leaves = [x.requires_grad_(), gates.requires_grad_(), *(p for b in banks for p in b.parameters())]
    beside = None if shared is None else shared.weights()
    y = triton_block_ffn(x, gates, blocks, experts.weights(), beside, options, dropout=dropout)
    assert y.shape == x.shape and y.dtype == x.dtype
    got = torch.autograd.grad(y, leaves, grad)

    x64, gates64 = x.detach().double().requires_grad_(), gates.detach().double().requires_grad_()
    banks64 = [wide(b) for b in banks]
    if shared is None:
        want_y = reference_block_ffn(x64, gates64, blocks, banks64[0].weights(), dropout)
    else:
        rest = None if dropout is None else dropout.of_experts(1)
        want_y = reference_block_ffn(x64, gates64[:, :1], blocks, banks64[0].weights(), dropout)
        want_y = want_y + reference_block_ffn(x64, gates64[:, 1:], ~blocks, banks64[1].weights(), rest)
    leaves64 = [x64, gates64, *(p for b in banks64 for p in b.parameters())]
    want = list(torch.autograd.grad(want_y, leaves64, grad.double()))
    want[1] = torch.where(gates64 != 0, want[1], 0)  # a gate of 0 has no gradient here, in the layer it never matters
    assert error(y, want_y) < tolerance
    for leaf, g, w in zip(leaves, got, want, strict=True):
        assert g.shape == leaf.shape and g.dtype == leaf.dtype
        assert error(g, w) < tolerance


def test_backward_passes_under_autocast():
    """Whose float32 layer, without it in its forward pass, has float32 gradients."""
    experts, gates = bank(2, 32, 64, 2), random_gates(20, 2)
    x, blocks, grads = random(20, 32), random(20, 2) > 0, []
    for enabled in (False, True):
        y = triton_block_ffn(x, gates, blocks, experts.weights())
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(y.square().sum(), [*experts.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@settings(max_examples=10, deadline=None)
@given(
    n=st.integers(0, 20),
    e=st.integers(1, 3),
    dim=st.sampled_from([16, 80, 7, 100]),
    block=st.sampled_from([16, 48, 80, 5, 43]),
    num_blocks=st.integers(2, 3),
    bias=st.booleans(),
    with_shared=st.booleans(),
    gated=st.booleans(),
    seed=st.integers(0, 10_000),
    options=st.builds(
        TritonOptions,
        workspace_bytes=st.sampled_from([None, 8_000]),
        tile_rows=st.sampled_from([None, 32]),
        tail_rows=st.sampled_from([16, 64]),
        kept_bytes=st.sampled_from([None, 0]),
        part_channels=st.sampled_from([None, 32]),
    ),
)
def test_ffn_equals_the_reference(n, e, dim, block, num_blocks, bias, with_shared, gated, seed, options):
    """Any gates and masks, also those that routing would never make, and widths that no tile divides; a small workspace
    means many fillings of it. Of some tiles only their first rows are computed, and of some no channels are kept;
    blocks may be cut into more parts than they need."""
    torch.manual_seed(seed)
    shared = bank(1, dim, block * num_blocks, num_blocks, bias=bias, gated=gated) if with_shared else None
    experts = bank(e, dim, block * num_blocks, num_blocks, bias=bias, gated=gated)
    blocks = torch.rand(n, num_blocks, device=DEVICE) > 0.5
    check_ffn(random(n, dim), random_gates(n, e + with_shared), blocks, experts, shared, options)


TILES = [  # block, dtype, options
    (16, torch.float32, TritonOptions()),
    (192, torch.float32, TritonOptions(tile_rows=16, workspace_bytes=40_000)),
    (288, torch.bfloat16, TritonOptions(tile_rows=32, tail_rows=16)),
    (48, torch.float16, TritonOptions(workspace_bytes=9_000)),
    (96, torch.bfloat16, TritonOptions(tile_rows=32, kept_bytes=0), True),
]
PARTS = [(True, 0), (False, 0), (False, 1)]  # whether there is a shared expert, and which expert is the first


@pytest.mark.parametrize(
    "rate,tiles,with_shared,first",  # every two of rate, tiles and parts meet
    [((0.1, 0.9)[(i + j) % 2], tiles, *part) for i, tiles in enumerate(TILES) for j, part in enumerate(PARTS)],
)
def test_ffn_dropout(rate, tiles, with_shared, first):
    """The mask of the definition, whatever the tiles, the parts of a block and the rounds are, in both passes."""
    block, dtype, options, *gated = tiles
    torch.manual_seed(block)
    shared, experts = (bank(e, 32, 2 * block, 2, dtype=dtype, gated=bool(gated)) for e in (1, 2))
    dropout = HiddenDropout.draw(rate, torch.device(DEVICE)).of_experts(first)
    blocks = torch.rand(19, 2, device=DEVICE) > 0.4
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    x, gates = random(19, 32, dtype=dtype), random_gates(19, 2 + with_shared)
    check_ffn(x, gates, blocks, experts, shared if with_shared else None, options, tolerance, dropout)


@pytest.mark.parametrize(
    "dtype,tolerance",
    [(torch.bfloat16, 3e-2), pytest.param(torch.float16, 4e-3, marks=pytest.mark.slow), (torch.float32, 2e-5)],
)
@pytest.mark.parametrize(  # one tile, three tiles, and wider than registers hold
    "block,gated",
    [
        *((32, False), (192, False), (288, False), (300, False), (256, False)),
        *((32, True), (96, True), (192, True), (176, True), (300, True), (128, True)),
    ],
)
def test_ffn_types_and_widths(dtype, tolerance, block, gated):
    torch.manual_seed(block)
    shared, experts = (bank(e, 32, 2 * block, 2, dtype=dtype, gated=gated) for e in (1, 2))
    blocks = torch.rand(11, 2, device=DEVICE) > 0.5
    check_ffn(random(11, 32, dtype=dtype), random_gates(11, 3), blocks, experts, shared, tolerance=tolerance)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_ffn_activations(activation, gated):
    torch.manual_seed(1)
    experts = bank(1, 16, 32, 2, activation, gated=gated)
    check_ffn(2 * random(9, 16), random_gates(9, 1), torch.ones(9, 2, dtype=torch.bool, device=DEVICE), experts)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("options", [TritonOptions(tail_rows=16), TritonOptions(tile_rows=16, workspace_bytes=12_000)])
def test_ffn_groups_of_many_tiles(options, gated):
    """Groups longer than a tile, continued over rounds; one expert has all tokens, one none."""
    torch.manual_seed(2)
    gates = torch.rand(90, 3, device=DEVICE) + 0.1
    gates[:, 1] = 0
    check_ffn(
        random(90, 16), gates, torch.rand(90, 2, device=DEVICE) > 0.3, bank(3, 16, 32, 2, gated=gated), options=options
    )


@pytest.mark.parametrize("gated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_more_fillings_of_the_workspace_round_no_more(gated):
    """What a group adds to its weights in half precision is rounded once, however often the workspace is filled."""
    torch.manual_seed(4)
    experts, x = bank(1, 32, 64, 2, dtype=torch.bfloat16, gated=gated), random(60, 32, dtype=torch.bfloat16)
    gates, blocks = torch.rand(60, 1, device=DEVICE) + 0.1, torch.ones(60, 2, dtype=torch.bool, device=DEVICE)
    grads = []
    for workspace in (None, 3_000):
        options = TritonOptions(tile_rows=16, workspace_bytes=workspace)
        y = triton_block_ffn(x, gates, blocks, experts.weights(), options=options)
        grads.append(torch.autograd.grad(y.float().square().sum(), list(experts.parameters())))
    for one, many in zip(*grads, strict=True):
        assert error(many, one) < 1e-3


@pytest.mark.parametrize("options", [TritonOptions(), TritonOptions(tile_rows=16, workspace_bytes=2_500)])
def test_ffn_is_deterministic(options):
    torch.manual_seed(3)
    experts = bank(2, 32, 64, 2, dtype=torch.bfloat16)
    x = random(20, 32, dtype=torch.bfloat16).requires_grad_()
    gates = torch.rand(20, 2, device=DEVICE).requires_grad_()
    blocks = torch.ones(20, 2, dtype=torch.bool, device=DEVICE)
    runs = []
    for _ in range(2):
        y = triton_block_ffn(x, gates, blocks, experts.weights(), options=options)
        runs.append((y, *torch.autograd.grad(y, [x, gates, *experts.parameters()], torch.ones_like(y))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("gated", [False, True])
def test_ffn_computes_only_selected_blocks(gated):
    """Poisoned weights of a block that no token needs reach nothing."""
    experts = bank(2, 16, 64, 4, gated=gated)
    with torch.no_grad():
        experts.keys[0, 16:32] = experts.values[1, 48:] = float("nan")
        if gated:
            experts.gate_keys[0, 16:32] = float("nan")
    gates = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=DEVICE)
    blocks = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]], device=DEVICE).bool()
    x = random(2, 16).requires_grad_()
    y = triton_block_ffn(x, gates, blocks, experts.weights())
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert experts.keys.grad.isfinite().all() and (experts.keys.grad[0, 16:32] == 0).all()


@pytest.mark.parametrize("gated", [False, True])
def test_ffn_with_frozen_experts(gated):
    """Gradients that nobody wants are not made; the others are as before."""
    shared, experts = bank(1, 16, 32, 2, gated=gated), bank(2, 16, 32, 2, gated=gated)
    x, gates, blocks = random(9, 16).requires_grad_(), random_gates(9, 3), torch.rand(9, 2, device=DEVICE) > 0.5

    def gradient():
        triton_block_ffn(x, gates, blocks, experts.weights(), shared.weights()).sum().backward()
        (result, x.grad) = (x.grad, None)
        return result

    before = gradient()
    experts.requires_grad_(False)
    wanted, shared.keys.grad = shared.keys.grad, None
    assert torch.equal(before, gradient()) and torch.equal(shared.keys.grad, wanted)
    shared.requires_grad_(False)
    assert torch.equal(before, gradient())


def test_ffn_autocast():
    experts, x = bank(2, 32, 64, 2), random(40, 32).requires_grad_()
    gates, blocks = random_gates(40, 2), torch.rand(40, 2, device=DEVICE) > 0.5
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = triton_block_ffn(x, gates, blocks, experts.weights())
    y.backward(random(40, 32))
    assert y.dtype == x.grad.dtype == experts.keys.grad.dtype == torch.float32
    assert 1e-5 < error(y, reference_block_ffn(x, gates, blocks, experts.weights())) < 3e-2
    # Gradients of matrices are sums in float32, which nothing has rounded to the type of the products.
    for weight in (experts.keys, experts.values):
        assert (weight.grad != weight.grad.bfloat16().float()).float().mean() > 0.5


def test_ffn_autocast_of_banks_in_two_types():
    shared, experts, x = bank(1, 32, 64, 2), bank(2, 32, 64, 2, dtype=torch.bfloat16), random(8, 32)
    gates, blocks = random_gates(8, 3), torch.rand(8, 2, device=DEVICE) > 0.5
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        triton_block_ffn(x, gates, blocks, experts.weights(), shared.weights()).sum().backward()
    assert shared.keys.grad.dtype == torch.float32 and experts.keys.grad.dtype == torch.bfloat16


def test_ffn_saves_little_for_the_backward_pass():
    """No gathered tokens: x, gates, masks and group offsets, whatever C_B is; and of channels before the activation no
    more than a dense FFN keeps before and after it, or than was allowed. What was not kept changes no gradient."""
    experts, x = bank(2, 32, 64, 2), random(20, 32).requires_grad_()
    gates = torch.rand(20, 2, device=DEVICE)
    own, grads = {p.data_ptr() for p in experts.parameters()}, []
    for allowed, most in ((None, 2 * 20 * 64 * 4), (3 * 16 * 32 * 4, 3 * 16 * 32 * 4), (0, 0)):
        options, saved = TritonOptions(kept_bytes=allowed, tile_rows=16), []
        blocks = torch.ones(20, 2, dtype=torch.bool, device=DEVICE)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = triton_block_ffn(x, gates, blocks, experts.weights(), options=options)
        total = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in own)
        rest = 4 * (x.numel() + gates.numel()) + 20 * 2 + 2 * (2 * 2 * 4)
        assert 0.9 * most < total <= rest + most and (most or total <= rest)
        grads.append(torch.autograd.grad(y.sum(), [x, *experts.parameters()]))
    most = 0.0 if DEVICE == "cpu" else 1e-5  # a compiler may order the sums of these kernels differently
    assert all(error(one, other) <= most for pair in (grads[:2], grads[1:]) for one, other in zip(*pair, strict=True))


def test_float32_products_keep_float32():
    """Neither pass may fall to plain TF32, 2^-11, unless torch's switch asks for it."""
    torch.manual_seed(5)
    x, experts = random(64, 64), bank(1, 64, 64, 2, "identity", bias=False)
    y = triton_block_ffn(x, x.new_ones(64, 1), x.new_ones(64, 2, dtype=torch.bool), experts.weights())
    want = F.linear(x.double(), experts.keys[0].double()) @ experts.values[0].double()
    assert error(y, want) < 1e-5
