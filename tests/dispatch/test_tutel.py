"""What only the Tutel dispatcher does; that it equals the others is in test_expert_parallel.py and its neighbours."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch

from tests.support.drawn import given, settings, st
from tests.support.sharded import CLOSE, whole_layer
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.dispatch import make_dispatcher, tutel
from unifmoe_dist.errors import UserError


def local_and_tutel(config: UniFMoEConfig, seed: int) -> tuple[UniFMoELayer, UniFMoELayer]:
    local = whole_layer(config, seed)
    encoded = UniFMoELayer(config, dispatcher="tutel")
    encoded.load_state_dict(local.state_dict())
    return local, encoded


@pytest.mark.tutel
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 12),
    experts=st.integers(1, 6),
    blocks=st.integers(2, 17),
    bias=st.booleans(),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    nan=st.booleans(),
)
def test_without_a_group_it_equals_local(n, experts, blocks, bias, seed, spread, nan):
    results = []
    for layer in local_and_tutel(UniFMoEConfig(9, 2 * blocks, experts, blocks, bias=bias), seed):
        with torch.no_grad():
            layer.router.weight.mul_(spread)
        x = torch.randn(n, 9, generator=torch.Generator().manual_seed(seed))
        if nan and n:
            x[n // 2, 3] = float("nan")
        x.requires_grad_()
        y = layer(x)
        (y * torch.linspace(-1, 1, 9)).sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.gpu
@pytest.mark.tutel
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_its_cuda_kernels_equal_local(dtype, tolerance):
    results = []
    for layer in local_and_tutel(UniFMoEConfig(64, 96, 6, 8), 1):
        layer.to("cuda", dtype)
        x = torch.randn(300, 64, generator=torch.Generator().manual_seed(2)).to("cuda", dtype).requires_grad_()
        y = layer(x)
        y.square().mean().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.detach().abs().max()))


@pytest.mark.tutel
def test_only_real_rows_reach_the_experts():
    layer = UniFMoELayer(UniFMoEConfig(9, 24, 4, 6), dispatcher="tutel")
    x = torch.randn(20, 9)
    routing = layer.route(x)
    arrived = layer.dispatcher.dispatch(x, routing.gates, ~routing.shared_blocks).arrivals()
    assert arrived.x.shape[0] == int(routing.expert_count.sum())
    assert (arrived.gates != 0).sum(0).tolist() == (routing.gates != 0).sum(0).tolist()
    blocks_computed = int((arrived.blocks.sum(1) * (arrived.gates != 0).sum(1)).sum())
    assert blocks_computed == int((routing.block_compute - routing.shared_block_count).sum())


@pytest.mark.tutel
def test_copies_and_files():
    layer = UniFMoELayer(UniFMoEConfig(9, 24, 4, 6), dispatcher="tutel")
    x = torch.randn(5, 9)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x), layer(x))


@pytest.mark.tutel
def test_what_its_kernels_cannot_hold_is_refused():
    dispatcher = make_dispatcher("tutel", None)
    with pytest.raises(UserError, match="float64.*alltoall"):
        dispatcher.dispatch(torch.zeros(1, 4).double(), torch.ones(1, 2), torch.ones(1, 2).bool())
    with pytest.raises(UserError, match="2048 experts.*2\\*\\*31.*alltoall"):  # refused before it is allocated
        dispatcher.dispatch(torch.zeros(1, 2**20), torch.ones(1, 2048), torch.ones(1, 2).bool())


@pytest.mark.tutel
def test_a_switched_off_exchange_is_refused(monkeypatch):
    communicate = pytest.importorskip("tutel.impls.communicate")
    monkeypatch.setattr(communicate, "TUTEL_SKIP_A2A", True)
    tutel._tutel.cache_clear()
    with pytest.raises(UserError, match="SKIP_A2A"):
        make_dispatcher("tutel", None)


def test_without_tutel_the_extra_is_named(monkeypatch):
    for name in ("tutel", "tutel.moe", "tutel.impls", "tutel.impls.communicate"):
        monkeypatch.setitem(sys.modules, name, None)
    tutel._tutel.cache_clear()
    with pytest.raises(UserError, match=r"unifmoe-dist\[tutel\]"):
        UniFMoELayer(UniFMoEConfig(9, 24, 4, 6), dispatcher="tutel")


def test_tutel_is_loaded_only_where_it_is_used():
    program = (
        "import sys, torch; from unifmoe_dist import *; UniFMoELayer(UniFMoEConfig(9, 24, 4, 6))(torch.ones(2, 9)); "
        "sys.exit('tutel' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
