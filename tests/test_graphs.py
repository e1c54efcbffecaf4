"""CUDA graphs of layers: results, gradients, statistics and draws are those of eager passes, whatever happens between.

No device is here: a stand-in runs on "capture" and runs again on "replay", into the same tensors, as a graph does.
"""

from __future__ import annotations

import copy
import io
import warnings
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.graphs import (
    Again,
    assert_same,
    in_place_of_a_device,  # noqa: F401  the fixture again
    make,
    tokens,
    trained,
    warmed,
)
from tests.support.ranks import run_ranks
from tests.support.small_models import build
from tests.support.training import train
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, graphs, upcycle
from unifmoe_dist.config import ModelConfig, ParallelConfig, TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.upcycling import moe_layers

# -- as eager ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(hidden_dropout=0.3),
        dict(gated=True, activation="silu", bias=False),
        dict(autocast=True),
        dict(shapes=(20, 12)),
        dict(fixed_experts=2, capacity_factor=0.8),
    ],
    ids=str,
)
def test_training_is_that_of_eager_passes(options, again):
    got = trained(True, **options)
    assert again.captured == 2 * len(options.get("shapes", (20,)))
    assert again.replayed == 2 * (16 - 2 * len(options.get("shapes", (20,))))
    assert_same(got, trained(False, **options))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode, again):
    layer, plain = make().eval(), make(False).eval()
    held = []
    with mode():
        for number in range(5):
            held.append((layer(tokens(seed=number)), plain(tokens(seed=number))))
    assert (again.captured, again.replayed) == (1, 3)
    assert all(torch.equal(got, want) for got, want in held)  # no later pass has written over them
    layer.train(), plain.train()
    for number in range(5):  # after an evaluation, one of inference mode too
        for one in (layer, plain):
            one(tokens(seed=number)).sum().backward()
    assert_same([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("count", [2, 3])
def test_passes_before_their_backward_passes(count, again):
    """As of a layer that stands twice in a model: a graph's second pass would write over what the first has left."""
    layer, plain = make(), make(False)
    for one in (layer, plain):
        for number in range(5):
            outputs = [one(tokens(seed=number + part)) for part in range(count)]
            sum(y.square().sum() for y in outputs).backward()
    assert again.captured == 2 and again.replayed >= 6
    assert_same([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()])


def test_a_pass_without_a_backward_pass_blocks_no_other(again):
    layer = make()
    for number in range(4):
        y = layer(tokens(seed=number))
    before = again.replayed
    y = layer(tokens())  # the one before is gone
    assert again.replayed == before + 1
    y.sum().backward()
    y = layer(tokens())
    del y
    layer(tokens())
    assert again.replayed == before + 4


def test_a_second_backward_pass(again):
    layer = make()
    for _ in range(3):
        layer(tokens()).sum().backward()
    layer.zero_grad()
    y = layer(tokens())
    y.sum().backward(retain_graph=True)
    first = layer.experts.keys.grad.clone()
    y.sum().backward(retain_graph=True)
    torch.testing.assert_close(layer.experts.keys.grad, 2 * first)
    layer(tokens())
    with pytest.raises(UserError, match="second backward pass"):
        y.sum().backward()


def test_gradients_that_are_held_stay(again):
    layer = make()
    held = []
    for number in range(6):
        layer.zero_grad()
        x = tokens(seed=number).requires_grad_()
        layer(x).square().sum().backward()
        held.append([(t, t.clone()) for t in (x.grad, *(p.grad for p in layer.parameters()))])
    assert again.replayed == 8
    assert all(torch.equal(now, then) for grads in held for now, then in grads)


def test_what_is_given_for_gradients_stays(again):
    """Before, `torch.autograd.grad` and hooks had memory that the next backward pass wrote."""
    results = []
    for layer in (make(), make(False)):
        hooked, given = [], []
        layer.experts.keys.register_hook(hooked.append)
        for number in range(6):
            loss = layer(tokens(seed=number)).square().sum()
            given.append(torch.autograd.grad(loss, [*layer.parameters()]) if number % 2 else loss.backward() or [])
        results.append([*hooked, *(grad for grads in given for grad in grads)])
    assert again.replayed == 8
    assert_same(*results)


def test_no_pass_of_another_thread_comes_before_gradients_are_copied(again):
    """Its forward pass writes into the memory from which they come."""
    layer, awaited = warmed(again, make()), []
    (made,) = layer.graphs._made.values()

    class Watched:
        def __init__(self, grad):
            self.grad = grad

        def clone(self):
            awaited.append(made.awaited())
            return self.grad.clone()

    made.grads = [Watched(grad) for grad in made.grads]
    layer(tokens()).sum().backward()
    assert awaited == [True] * len(made.grads) and not made.awaited()


def test_the_graphs_of_a_shape_have_a_pool_of_their_own(again):
    """In a common one, tensors that a backward pass reads may lie where a graph captured earlier works: a layer that is
    captured again, or two shapes in one step, gave wrong gradients."""
    layers = make(), make()
    for number in range(4):
        for layer, count in ((layers[0], 20), (layers[1], 20), (layers[0], 12)):
            layer(tokens(count, seed=number)).sum().backward()
    assert again.captured == len(again.pools) == 6
    assert again.pools[::2] == again.pools[1::2]  # the forward and the backward pass of each
    assert len({*map(id, again.pools)}) == 3


# -- what changes between passes --------------------------------------------------------------------------------------


def load(layer):
    layer.load_state_dict({name: t * 1.5 for name, t in layer.state_dict().items()})


def load_assigned(layer):
    layer.load_state_dict({name: t * 1.5 for name, t in layer.state_dict().items()}, assign=True)


CHANGES = {
    "in place": (load, True),
    "assigned": (load_assigned, False),
    "through data": (lambda layer: setattr(layer.experts.keys, "data", layer.experts.keys * 2), False),
    "frozen": (lambda layer: layer.experts.requires_grad_(False), False),
    "to another type": (lambda layer: layer.double().float(), False),
    "statistics from the start": (lambda layer: layer.usage.reset(), True),
    "other statistics": (lambda layer: setattr(layer.usage, "totals", torch.zeros(13, dtype=torch.float64)), False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers(change, again):
    alter, stays = CHANGES[change]
    layer = warmed(again, make())
    plain = make(False)
    plain.load_state_dict(layer.state_dict())
    alter(layer)
    alter(plain)
    before, layer.usage.totals[:] = again.replayed, 0.0
    for one in (layer, plain):
        one(tokens()).square().sum().backward()
    assert (again.replayed > before) == stays
    grads = [[p.grad for p in one.parameters() if p.grad is not None] for one in (layer, plain)]
    assert_same(*grads)
    assert torch.equal(layer.usage.totals, plain.usage.totals)


def test_copies_and_files_capture_for_themselves(again):
    layer = warmed(again, make())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert other.cuda_graphs and not other.graphs._made
        assert torch.equal(other(tokens()), layer(tokens()))
    assert list(layer.state_dict()) == list(make(False).state_dict())
    layer.cuda_graphs = False
    assert layer.graphs is None


def test_torchs_switch_for_tf32(again):
    """Torch's own getter of the older setting raises once this one is used."""
    layer = warmed(again, make())
    before, torchs = again.replayed, torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        layer(tokens()).sum().backward()
    finally:
        torch.backends.cuda.matmul.fp32_precision = torchs
    assert again.replayed == before
    layer(tokens()).sum().backward()
    assert again.replayed == before + 2


def test_settings_that_decide_what_runs(again):
    layer = warmed(again, make())
    before = again.replayed
    with use_kernels("reference"):
        layer(tokens()).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        layer(tokens()).sum().backward()
    layer(tokens().double().float()[:, :]).sum().backward()
    assert again.replayed == before + 2  # the last one's alone


# -- over ranks -------------------------------------------------------------------------------------------------------


def data_parallel(rank, world, spread):
    """Weights after steps in DDP with a stand-in for graphs and without, and what was said."""
    results, said = [], []
    for cuda_graphs in (True, False):
        with patch.object(graphs, "device", Again()) as stand_in, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            config = UniFMoEConfig(32, 64, num_experts=4, num_blocks=4)
            layer = UniFMoELayer(config, dist.group.WORLD if spread else None, cuda_graphs=cuda_graphs)
            if spread:
                from unifmoe_dist import leave_experts_alone

                leave_experts_alone(model := nn.Sequential(layer))
            else:
                model = nn.Sequential(layer)
            model = DDP(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                for last in (False, True):
                    with nullcontext() if last else model.no_sync():
                        model(tokens(seed=10 * step + rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        said += [str(w.message) for w in caught if "cuda_graphs" in str(w.message)]
        assert bool(stand_in.replayed) == (cuda_graphs and not spread)
    return results, said


@pytest.mark.parametrize("spread", [False, True])
def test_under_ddp(spread):
    for (got, want), said in run_ranks(2, data_parallel, spread, fresh=True):
        assert_same(got, want)
        assert len(said) == spread and all("spread over ranks" in sentence for sentence in said)


# -- options ----------------------------------------------------------------------------------------------------------


def test_upcycle_takes_it():
    model = upcycle(build("vit"), [1], num_experts=2, num_blocks=4, cuda_graphs=True)
    (layer,) = moe_layers(model).values()
    assert layer.cuda_graphs and not layer.graphs._made
    with pytest.raises(UserError, match="cuda_graphs is of method unif, not gmoe"):
        upcycle(build("vit"), [1], num_experts=2, num_blocks=4, method="gmoe", cuda_graphs=True)


def test_options_that_do_not_go_together():
    with pytest.raises(UserError, match="gradient_checkpointing computes again"):
        ParallelConfig(cuda_graphs=True, gradient_checkpointing=True)
    with pytest.raises(UserError, match="of model.moe unif, not gmoe"):
        TrainConfig(parallel=ParallelConfig(cuda_graphs=True), model=ModelConfig(moe="gmoe"))


def train_in_graphs(rank, world, folder, steps, **options):
    with patch.object(graphs, "device", Again()) as stand_in:
        result = train(rank, world, folder, steps, cuda_graphs=True, **options)
    return result, stand_in.captured, stand_in.replayed


@pytest.mark.timeout(300)
def test_a_run_in_graphs_is_that_without(tmp_path):
    options = dict(eval_every=4, gradient_accumulation=2, optimizer="adamw")
    losses, weights, norms = run_ranks(1, train, str(tmp_path / "eager"), 6, **options)[0]
    got, captured, replayed = run_ranks(1, train_in_graphs, str(tmp_path / "graphs"), 6, **options)[0]
    assert captured >= 4 and replayed > 30
    assert got[0] == losses and got[2] == norms
    assert all(torch.equal(got[1][name], weight) for name, weight in weights.items())
