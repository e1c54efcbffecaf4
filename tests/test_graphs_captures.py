"""CUDA graphs are captured as torch wants it: what is asked of torch.cuda, and real captures where a device is."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unifmoe_dist import UniFMoEConfig, UniFMoELayer, graphs
from unifmoe_dist.kernels import use_kernels

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


def test_captures_are_aside_and_into_their_pool(calls):
    device, x = graphs.Cuda(), torch.ones(2)
    pools = [device.pool(), device.pool()]
    for pool in pools:
        with device.aside(x):
            replay, made = device.capture(pool, lambda: [x])
        replay()
        assert made == [x]
    around = ["side waits for main", "captured", "main waits for side", "replay"]
    assert [entry for entry in calls if entry not in around] == ["capture into 0", "capture into 1"]
    assert [entry for entry in calls if entry in around] == around * 2


def test_each_place_has_a_stream_aside(calls, monkeypatch):
    made = [Stream(name, calls) for name in ("first", "second")]
    monkeypatch.setattr(torch.cuda, "Stream", iter(made).__next__)
    monkeypatch.setattr(graphs.Cuda, "place", lambda self, x: int(x.sum()))
    device = graphs.Cuda()
    for x in (torch.ones(2), torch.ones(3), torch.ones(2)):
        with device.aside(x):
            pass
    begun = [entry for entry in calls if "waits for main" in entry]
    assert begun == [f"{name} waits for main" for name in ("first", "second", "first")]


@pytest.mark.parametrize("known", [True, False])
def test_a_capture_that_fails_gives_the_stream_back(known, calls, monkeypatch):
    """And the allocator is told of its end, unless torch has done so."""
    device, x, released = graphs.Cuda(), torch.ones(2), []

    def end(number, pool):
        if known:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: released.append(given), raising=False)

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), device.aside(x):
        device.capture(device.pool(), fail)
    assert calls[-1] == "main waits for side" and released == ([] if known else [(3, 0)])


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


def in_order(model, step):
    return model(tokens_of(step)).square().mean()


def unfrozen_late(model, step):
    """The first layer's graphs come after those of the others, and its pass before theirs."""
    if step in (0, 5):
        model[0].requires_grad_(step == 5)
    return model(tokens_of(step).requires_grad_()).square().mean()


def two_lengths(model, step):
    queries = model(tokens_of(step, 120 if step % 2 and step > 4 else 100))
    return (queries.mean() * model(tokens_of(step + 20, 300)).mean()).square()


def left_out(model, step):
    return model[1:](model[0](tokens_of(step)) if step % 2 else tokens_of(step)).square().mean()


def evaluated_meanwhile(model, step):
    y = model(tokens_of(step))
    with torch.no_grad():
        model.eval()(tokens_of(step))
    model.train()
    return y.square().mean()


def tokens_of(seed, count=300):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [in_order, unfrozen_late, two_lengths, left_out, evaluated_meanwhile])
def test_layers_share_no_memory_that_they_need(loss):
    """In whatever order their graphs were captured, and are repeated."""
    results = []
    for cuda_graphs in (True, False):
        torch.manual_seed(0)
        config = UniFMoEConfig(64, 256, num_experts=4, num_blocks=4)
        model = nn.Sequential(*(UniFMoELayer(config, cuda_graphs=cuda_graphs) for _ in range(3))).cuda()
        for step in range(14):
            loss(model, step).backward()
        assert all(layer.graphs._made for layer in model if cuda_graphs)
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


@pytest.mark.gpu
def test_the_allocator_knows_that_a_failed_capture_is_over():
    device, x = graphs.Cuda(), torch.ones(4, device="cuda")

    def waits():
        return [x * float((x + 1).sum())]  # which no graph can repeat

    with pytest.raises(RuntimeError), device.aside(x):
        device.capture(device.pool(), waits)
    torch.cuda.empty_cache()  # before, an internal error of torch
    with device.aside(x):
        replay, (made,) = device.capture(device.pool(), lambda: [x * 2])
    replay()
    assert made.tolist() == [2.0] * 4
