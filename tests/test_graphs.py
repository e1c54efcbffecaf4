"""CUDA graphs of layers: results, gradients, statistics and draws are those of eager passes, whatever happens between.

No device is here: a stand-in runs on "capture" and runs again on "replay", into the same tensors, as a graph does.
"""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.support.ranks import run_ranks
from tests.support.small_models import build
from tests.support.training import train
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, graphs, upcycle
from unifmoe_dist.config import ModelConfig, ParallelConfig, TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.upcycling import moe_layers


class Again:
    """Graphs on the CPU: what was captured runs again, into the tensors that the capture gave."""

    def __init__(self):
        self.captured = self.replayed = 0
        self.fails = self.waiting = False

    def takes(self, x):
        return not x.is_meta

    def place(self, x):
        return x.device

    @contextmanager
    def aside(self, x):
        with torch.random.fork_rng(devices=[]):
            yield

    def waits(self, run):
        run()
        return self.waiting

    def capture(self, place, run):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing.\nmore")
        self.captured += 1
        kept = [None if made is None else torch.full_like(made, float("nan")) for made in run()]

        def replay():
            self.replayed += 1
            for into, made in zip(kept, run(), strict=True):
                if into is not None:
                    into.copy_(made)

        return replay, kept


@pytest.fixture
def again(monkeypatch):
    stand_in = Again()
    monkeypatch.setattr(graphs, "device", stand_in)
    graphs._say_once.cache_clear()
    return stand_in


def make(cuda_graphs=True, **options):
    torch.manual_seed(0)
    return UniFMoELayer(UniFMoEConfig(32, 64, num_experts=3, num_blocks=4, **options), cuda_graphs=cuda_graphs)


def tokens(count=20, seed=0):
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def trained(cuda_graphs, steps=8, micro_batches=2, autocast=False, shapes=(20,), **options):
    """A layer after steps, its statistics, and what was seen on the way."""
    layer, seen = make(cuda_graphs, **options), []
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for step in range(steps):
        for micro in range(micro_batches):
            x = tokens(shapes[step % len(shapes)], seed=10 * step + micro).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = layer(x)
            (y.float().square().mean() + 0.1 * layer.diversity_loss()).backward()
            seen += [y.detach(), x.grad]
        seen += [p.grad.clone() for p in layer.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *layer.parameters(), layer.usage.totals, torch.get_rng_state()]


def assert_same(got, want):
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), number


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


# -- what changes between passes --------------------------------------------------------------------------------------


def warmed(again, layer):
    for number in range(4):
        layer(tokens(seed=number)).sum().backward()
    layer.zero_grad()
    assert again.captured and layer.graphs._made
    return layer


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


def test_settings_that_decide_what_runs(again):
    layer = warmed(again, make())
    before = again.replayed
    with use_kernels("reference"):
        layer(tokens()).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        layer(tokens()).sum().backward()
    layer(tokens().double().float()[:, :]).sum().backward()
    assert again.replayed == before + 2  # the last one's alone


# -- not in graphs ----------------------------------------------------------------------------------------------------


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

    def slow(place, run):
        replay, made = capture(place, run)

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


# -- torch's calls ----------------------------------------------------------------------------------------------------


class Stream:
    cuda_stream = 7

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def calls(monkeypatch):
    """What `Cuda` asks of torch.cuda, in order."""
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)
    now = [main]

    @contextmanager
    def within(stream):
        before, now[0] = now[0], stream
        yield
        now[0] = before  # not where something failed, as in torch

    @contextmanager
    def graph(captured, pool, stream, capture_error_mode):
        assert stream is side is now[0] and capture_error_mode == "thread_local"
        log.append(f"capture into {pool}")
        yield
        log.append("captured")

    replay = SimpleNamespace(replay=lambda: log.append("replay"))
    fakes = dict(
        Stream=lambda: side,
        current_stream=lambda device=None: now[0],
        set_stream=lambda stream: now.__setitem__(0, stream),
        stream=within,
        device=nullcontext,
        graph=graph,
        CUDAGraph=lambda: replay,
        graph_pool_handle=iter(range(9)).__next__,
        get_sync_debug_mode=lambda: 0,
        set_sync_debug_mode=lambda mode: log.append(f"mode {mode}"),
    )
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    return log


def test_captures_share_the_pool_of_their_place(calls):
    device, x = graphs.Cuda(), torch.ones(2)
    for place in ("here", "here", "there"):
        with device.aside(x):
            replay, made = device.capture(place, lambda: [x])
        replay()
        assert made == [x]
    around = ["side waits for main", "captured", "main waits for side", "replay"]
    pools = [entry for entry in calls if entry not in around]
    assert pools[0] == pools[1] == "capture into 0" != pools[2]
    assert [entry for entry in calls if entry in around] == around * 3


def test_a_capture_that_fails_gives_the_stream_back(calls):
    device, x = graphs.Cuda(), torch.ones(2)

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), device.aside(x):
        device.capture("here", fail)
    assert calls[-1] == "main waits for side"


def test_waits_of_the_host_are_noticed(calls):
    device = graphs.Cuda()
    assert not device.waits(lambda: None)
    assert device.waits(lambda: warnings.warn("called a synchronizing CUDA operation", stacklevel=1))
    assert calls == ["mode warn", "mode 0"] * 2


# -- on a device ------------------------------------------------------------------------------------------------------


def on_a_gpu(cuda_graphs, dtype, autocast, **options):
    torch.manual_seed(0)
    config = UniFMoEConfig(64, 256, num_experts=4, num_blocks=4, **options)
    layer = UniFMoELayer(config, cuda_graphs=cuda_graphs).to("cuda", dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    torch.manual_seed(1)
    seen = []
    for step in range(6):
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            x = torch.randn(200 if step % 2 else 300, 64, device="cuda", dtype=dtype, requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                y = layer(x)
            y.float().square().mean().backward()
            seen += [y.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen += [layer.eval()(torch.ones(100, 64, device="cuda", dtype=dtype)) for _ in range(5)]
    return layer, [*seen, *layer.parameters(), layer.usage.totals]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,autocast", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("options", [dict(), dict(hidden_dropout=0.3), dict(gated=True, activation="silu")], ids=str)
def test_graphs_on_a_device(dtype, autocast, options):
    """Real captures: two shapes in training and one in evaluation, with steps of an optimiser between replays."""
    layer, got = on_a_gpu(True, dtype, autocast, **options)
    assert layer.graphs.failure is None and len(layer.graphs._made) == 3
    _, want = on_a_gpu(False, dtype, autocast, **options)
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), number


@pytest.mark.gpu
def test_two_layers_share_no_memory_that_they_need():
    """The temporary memory of all graphs is one pool: what a backward pass reads is not in it."""
    results = []
    for cuda_graphs in (True, False):
        torch.manual_seed(0)
        config = UniFMoEConfig(64, 256, num_experts=4, num_blocks=4)
        model = nn.Sequential(*(UniFMoELayer(config, cuda_graphs=cuda_graphs) for _ in range(3))).cuda()
        for number in range(6):
            torch.manual_seed(number)
            model(torch.randn(300, 64, device="cuda")).square().mean().backward()
        results.append([p.grad for p in model.parameters()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_failed_capture_leaves_the_device_as_it_was():
    layer = UniFMoELayer(UniFMoEConfig(64, 256, num_experts=4, num_blocks=4), cuda_graphs=True).cuda()
    x, stream = torch.randn(50, 64, device="cuda"), torch.cuda.current_stream()
    with use_kernels("grouped"), pytest.warns(UserWarning, match="wait for the device"):
        for _ in range(4):
            layer(x).sum().backward()
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    assert layer.graphs.failure is not None and layer(x).isfinite().all()
