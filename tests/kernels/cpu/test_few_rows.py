"""The compiled path of few tokens against the reference kernel and the routing equations."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from tests.support.layers import make_layer
from unifmoe_dist.kernels import reference_block_ffn, use_kernels
from unifmoe_dist.kernels.activations import FUNCTIONS
from unifmoe_dist.kernels.cpu import few_rows, library
from unifmoe_dist.routing import Router, route
from unifmoe_dist.usage import Usage


def evaluated(*sizes, **choices):
    return make_layer(*sizes, **choices).eval()


pytestmark = pytest.mark.skipif(library.library() is None, reason="no C compiler is installed")


@pytest.fixture(autouse=True, scope="module")
def as_many_tokens_as_anywhere():
    """What this processor would leave to the grouped kernel is computed too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_rows, "MOST_TOKENS", 64)
        yield


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 20),
    d=st.integers(9, 150),
    block=st.integers(1, 9),
    blocks=st.integers(2, 9),
    experts=st.integers(1, 8),
    bias=st.booleans(),
    gated=st.booleans(),
    activation=st.sampled_from(sorted(FUNCTIONS)),
    threads=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)
def test_layer_equals_the_reference(n, d, block, blocks, experts, bias, gated, activation, threads, seed):
    layer = evaluated(
        d, block * blocks, experts, blocks, bias=bias, seed=seed, gated=gated, activation=activation, spread=2.0
    )
    x, before = torch.randn(n, d), torch.get_num_threads()
    with torch.no_grad():
        with use_kernels("reference"):
            want, usage = layer(x), layer.usage.snapshot()
        layer.usage.reset()
        assert few_rows.takes_banks(x, layer.shared.weights(), layer.experts.weights())
        torch.set_num_threads(threads)
        try:
            got = layer(x)
        finally:
            torch.set_num_threads(before)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * (1 + float(want.abs().max())))
    torch.testing.assert_close(layer.usage.totals, usage, rtol=1e-6, atol=1e-6)


def test_threads_change_nothing():
    layer, x, before = evaluated(100, 48, 5, 8), torch.randn(20, 100), torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            with torch.no_grad():
                outputs.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, outputs[0]) for y in outputs)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    d=st.integers(1, 40),
    k=st.integers(1, 9),
    blocks=st.integers(2, 12),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    ties=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_decisions_equal_the_equations(n, d, k, blocks, scale, ties, seed):
    """Also saturated, and with prototypes and columns that tie. Whole numbers, so that products are exact."""
    torch.manual_seed(seed)
    layer = evaluated(d=max(d, k + 1), hidden=blocks, experts=k, blocks=blocks)
    width = max(d, k + 1)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randint(-2, 3, (k + 1, width)) * (scale / 8))
        layer.shared.keys.copy_(torch.randint(-2, 3, (1, blocks, width)))
        if ties:
            layer.router.weight[1:] = layer.router.weight[1]
            layer.shared.keys[:] = layer.shared.keys[:, :1]
        x = torch.randint(-2, 3, (n, width)).float()
        want = route(x, layer.router.weight, layer.shared.prototypes()[0])
        got = few_rows.route_few(x, layer.router, layer.shared)
    for name in ("shared_demand", "affinity", "gates"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
    for name in ("shared_blocks", "shared_block_count", "expert_count"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    torch.testing.assert_close(got.by_products.statistics, Usage._sums(want), rtol=1e-6, atol=1e-6)
    assert torch.equal(got.coefficients()[:, 1:], got.gates)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_token_that_is_no_number_stays_alone(bad):
    layer = evaluated(16, 24, 3, 4)
    x = torch.randn(5, 16)
    with torch.no_grad():
        clean = layer(x)
        x[2, 3] = bad
        got, decided = layer(x), layer.route(x)
        with use_kernels("reference"):
            want, expected = layer(x), layer.route(x)
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])
    assert torch.equal(got[2].isnan(), want[2].isnan()) and got[2].isnan().any()
    assert torch.equal(decided.shared_blocks, expected.shared_blocks)
    assert torch.equal(decided.expert_count, expected.expert_count)


def test_experts_that_nobody_chose_and_a_capacity_limit():
    layer, x = evaluated(16, 24, 3, 4), torch.randn(6, 16)
    bank = layer.experts.weights()
    blocks = torch.rand(6, 4) < 0.5
    gates = torch.rand(6, 3)
    gates[:, 1], gates[2] = 0, 0
    with torch.no_grad():
        want = reference_block_ffn(x, gates, blocks, bank)
        torch.testing.assert_close(few_rows.few_rows_ffn(x, gates, blocks, bank), want)
        assert not few_rows.few_rows_ffn(x, gates * 0, blocks, bank).any()
        limited = evaluated(16, 24, 3, 4, capacity_factor=0.5)
        with use_kernels("reference"):
            want = limited(x)
        torch.testing.assert_close(limited(x), want)


def test_what_it_leaves_to_others():
    layer, x = evaluated(16, 24, 3, 4), torch.randn(6, 16)
    weights = layer.experts.weights()
    assert not few_rows.takes_banks(x, weights)  # gradients are asked for
    with torch.no_grad():
        assert few_rows.takes_banks(x, weights)
        assert not few_rows.takes_banks(x[:0], weights)
        assert not few_rows.takes_banks(torch.randn(few_rows.MOST_TOKENS + 1, 16), weights)
        assert not few_rows.takes_banks(x.double(), weights) and not few_rows.takes_banks(x.bfloat16(), weights)
        assert not few_rows.takes_banks(x.to("meta"), weights)
        for router in (layer.router.weight.bfloat16(), layer.router.weight.T.contiguous().T):
            assert not few_rows.takes(x, False, router)
        assert not few_rows.takes_banks(x, layer.train().experts.weights())  # may be a checkpointed pass
        layer.eval()
        with torch.autocast("cpu", torch.bfloat16):
            assert not few_rows.takes_banks(x, weights)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() > 2 * 2 * 6 * 16 * 24  # experts are seen by what counts operations
        assert not torch.func.vmap(lambda t: x.new_full((), float(few_rows.takes_banks(t, weights))))(x[:, None]).any()


def test_without_a_compiler_the_layer_works_as_before(monkeypatch):
    layer, x = evaluated(16, 24, 3, 4), torch.randn(6, 16)
    with torch.no_grad():
        fast = layer(x)
        monkeypatch.setattr(few_rows, "library", lambda: None)
        with use_kernels("grouped"):
            want = layer(x)
        assert torch.equal(layer(x), want)
    torch.testing.assert_close(fast, want)


CHANGES = {
    "in place": lambda bank: bank.keys.add_(1.0),
    "behind autograd's back": lambda bank: bank.keys.data.mul_(-1.0),
    "one row of them": lambda bank: bank.keys.data[0, 20].mul_(-9.0),
    "another tensor": lambda bank: setattr(bank.keys, "data", torch.randn_like(bank.keys)),
    "another parameter": lambda bank: setattr(bank, "keys", torch.nn.Parameter(torch.randn_like(bank.keys))),
    "a state dict": lambda bank: bank.load_state_dict({n: t + 1 for n, t in bank.state_dict().items()}),
    "an optimiser": lambda bank: _step(bank),
}


def _step(bank):
    bank.keys.grad = torch.ones_like(bank.keys)
    torch.optim.SGD([bank.keys], lr=1.0).step()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_prototypes_are_those_of_the_weights_now(change, mode):
    bank = evaluated(64, 64, 3, 8).shared
    with mode():
        first = bank.kept_prototypes()
        assert bank.kept_prototypes() is first
    with torch.no_grad():
        CHANGES[change](bank)
    with mode():
        got = bank.kept_prototypes()
        assert not torch.allclose(got, first)
        assert torch.equal(got, bank.prototypes())


def test_compiled_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh = library.library.__wrapped__
    assert fresh() is not None
    (made,) = (tmp_path / "unifmoe_dist" / "kernels").iterdir()
    stamp = made.stat().st_mtime_ns
    assert fresh() is not None and made.stat().st_mtime_ns == stamp
    monkeypatch.setenv("XDG_CACHE_HOME", str(made))  # a file, where no folder can be made
    assert fresh() is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fresh() is None


def test_a_damaged_file_is_compiled_anew(monkeypatch, tmp_path):
    """Loaded, it would end the process with a bus error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.library.__wrapped__() is not None
    (made,) = (tmp_path / "unifmoe_dist" / "kernels").iterdir()
    whole = made.read_bytes()
    made.unlink()  # this process has it mapped
    for damaged in (whole[: len(whole) // 2], b""):
        made.write_bytes(damaged)
        script = "from unifmoe_dist.kernels.cpu import library; raise SystemExit(library.library() is None)"
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
        assert made.read_bytes() == whole
        made.unlink()


def test_other_default_devices_and_tangents():
    layer, x = evaluated(16, 24, 3, 4), torch.randn(6, 16)
    with torch.no_grad():
        want = layer(x)
        with torch.device("meta"):
            assert torch.equal(layer(x), want)
        _, expected = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(tangent, expected)


def test_policies_of_ablations_are_not_overruled():
    layer, x = evaluated(16, 24, 3, 4, fixed_experts=2), torch.randn(6, 16)
    with torch.no_grad():
        assert (layer.route(x).expert_count == 2).all()
    assert isinstance(layer.router, Router)
