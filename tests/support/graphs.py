"""Layers whose CUDA graphs a stand-in keeps: it runs on "capture" and runs again on "replay", into the same tensors."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from unifmoe_dist import UniFMoEConfig, UniFMoELayer, graphs


class Again:
    """Graphs on the CPU: what was captured runs again, into the tensors that the capture gave."""

    def __init__(self):
        self.captured = self.replayed = 0
        self.fails = self.waiting = False
        self.pools = []  # that captures went into

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

    def pool(self):
        return object()

    def capture(self, pool, run):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing.\nmore")
        self.captured += 1
        self.pools.append(pool)
        kept = [None if made is None else torch.full_like(made, float("nan")) for made in run()]

        def replay():
            self.replayed += 1
            for into, made in zip(kept, run(), strict=True):
                if into is not None:
                    into.copy_(made)

        return replay, kept


@pytest.fixture(name="again")
def in_place_of_a_device(monkeypatch):
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


def warmed(again, layer):
    for number in range(4):
        layer(tokens(seed=number)).sum().backward()
    layer.zero_grad()
    assert again.captured and layer.graphs._made
    return layer
