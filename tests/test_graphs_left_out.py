"""Passes that are not in CUDA graphs: they run eagerly, as without graphs, and what is left out for good is said once.

The stand-in for a device is that of test_graphs.py.
"""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.support.graphs import (
    assert_same,
    in_place_of_a_device,  # noqa: F401  the fixture again
    make,
    tokens,
    trained,
    warmed,
)
from unifmoe_dist import graphs


def test_few_shapes_are_captured_and_the_rest_is_said_once(again):
    layer = make().eval()
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            for count in range(1, graphs.MOST + 4):
                layer(tokens(count))
    assert again.captured == graphs.MOST == len(layer.graphs._made)
    (sentence,) = {str(w.message) for w in said}
    assert "4 kinds of input" in sentence and "pad inputs" in sentence


def test_shapes_that_come_once_take_no_place(again):
    layer = make().eval()
    with torch.no_grad():
        for count in range(1, 600):
            layer(tokens(count)) if count < 40 else layer.graphs._capture(count, layer.usage, None, tokens(1), None, [])
    assert not again.captured and len(layer.graphs._seen) <= 257


@pytest.mark.parametrize("how,reason", [("fails", "operation not permitted"), ("waiting", "wait for the device")])
def test_what_cannot_be_captured_runs_eagerly_and_is_said_once(how, reason, again):
    setattr(again, how, True)
    with pytest.warns(UserWarning, match=f"changes nothing in a layer of width 32: .*{reason}") as said:
        got = trained(True, hidden_dropout=0.2)
    assert not again.replayed and len([w for w in said if "cuda_graphs" in str(w.message)]) == 1
    assert_same(got, trained(False, hidden_dropout=0.2))


def test_replicas_of_data_parallel_run_eagerly(again):
    """Their weights are no parameters, and others in every pass: a graph gave those no gradients."""
    layer, plain = make(), make(False)

    def replica(module):
        made = module._replicate_for_data_parallel()
        for name, part in module._modules.items():
            made._modules[name] = replica(part)
        for name, parameter in module._parameters.items():
            setattr(made, name, parameter * 1)
        return made

    with pytest.warns(UserWarning, match="use DistributedDataParallel"):
        for number in range(4):
            for one in (layer, plain):
                replica(one)(tokens(seed=number)).square().sum().backward()
    assert not again.captured
    assert_same([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])


def test_threads_that_evaluate_a_layer_do_not_meet_in_its_graph(again):
    """Before, one replayed with the tokens of another."""
    layer, plain, wrong = make().eval(), make(False).eval(), []
    turn, capture = threading.Barrier(2, timeout=0.2), again.capture

    def slow(pool, run):
        replay, made = capture(pool, run)

        def both():
            with contextlib.suppress(threading.BrokenBarrierError):
                turn.wait()  # both have copied their tokens, if both may
            replay()

        return both, made

    again.capture = slow

    def evaluate(seed):
        with torch.no_grad():
            if not torch.equal(layer(tokens(seed=seed)), plain(tokens(seed=seed))):
                wrong.append(seed)

    for seed in range(3):
        evaluate(seed)
    turn.reset()
    threads = [threading.Thread(target=evaluate, args=(seed,)) for seed in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and again.replayed == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_passes_run_eagerly(reentrant, again):
    results = []
    for one in (warmed(again, make(hidden_dropout=0.2)), make(False, hidden_dropout=0.2)):
        before = again.replayed
        torch.manual_seed(2)
        for number in range(5):
            x = tokens(seed=number).requires_grad_()
            checkpoint(one, x, use_reentrant=reentrant).square().sum().backward()
        assert again.replayed == before
        results.append([p.grad for p in one.parameters()])
    assert_same(*results)


def observers(layer):
    yield lambda: layer.experts.register_forward_hook(lambda module, args, output: output * 2)
    yield lambda: nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


def test_hooks_of_gradients_run_once(again):
    layer, plain, seen = warmed(again, make()), make(False), []
    for one in (layer, plain):
        one.experts.keys.register_hook(lambda grad: (seen.append(0), grad * 2)[1])
        one.experts.values.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
    before = again.replayed
    for one in (layer, plain):
        one(tokens()).square().sum().backward()
    assert again.replayed == before + 2 and sorted(seen) == [0, 0, 1, 1]
    assert_same([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("which", range(2))
def test_hooks_inside_the_layer_run(which, again):
    layer, plain = warmed(again, make()), make(False)
    handles = [list(observers(one))[which]() for one in (layer, plain)]
    before = again.replayed
    try:
        for one in (layer, plain):
            one(tokens()).square().sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    assert again.replayed == before
    assert_same([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])
    layer(tokens())
    assert again.replayed == before + 1


def test_whoever_looks_on_sees_operations(again):
    layer = warmed(again, make()).eval()
    with torch.no_grad():
        for _ in range(4):
            layer(tokens())
        before = again.replayed
        with FlopCounterMode(display=False) as counter:
            layer(tokens())
        assert counter.get_total_flops() > 0
        jacobian = torch.func.jvp(layer, (tokens(),), (tokens(seed=1),))[1]
    assert jacobian.isfinite().all() and again.replayed == before


def test_no_tokens_and_strides(again):
    layer, plain = make(), make(False)
    for number in range(4):
        x = torch.randn(2, 64, 5, generator=torch.Generator().manual_seed(number))[:, ::2].transpose(1, 2)
        assert torch.equal(layer(x), plain(x))
        assert layer(x[:, :0]).shape == (2, 0, 32)
    assert again.replayed == 2


def test_masked_tokens(again):
    layer, plain = make(), make(False)
    for number in range(5):
        mask = torch.rand(20, generator=torch.Generator().manual_seed(number)) > 0.3
        assert torch.equal(layer(tokens(), mask), plain(tokens(), mask))


@pytest.mark.timeout(300)
def test_compiled_layers_do_without(again):
    layer = warmed(again, make()).eval()
    before = again.replayed
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(layer, backend="eager", fullgraph=True)(tokens()), make().eval()(tokens())
        )
    assert again.replayed == before
