"""Two hosts of two ranks each on a slow link: the flat exchange, and the one that knows nodes, side by side.

Trained is a small ViT on digits, the same run with each; timed are the exchange alone and one layer, in turns, on the
two hosts and on one of them. Bytes are those that the hosts' interfaces count, whatever sent them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unifmoe_dist.algorithms import ALGORITHMS
from unifmoe_dist.config import UniFMoEConfig
from unifmoe_dist.data.digits import NUM_CLASSES, build_digits_vit
from unifmoe_dist.dispatch import Dispatcher, make_dispatcher
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.routing import Router
from unifmoe_dist.runtime.ranks import Ranks, running_ranks, seed_everything
from unifmoe_dist.studies.meters import seconds
from unifmoe_dist.studies.rehearsal.hosts import become_rank, sent_bytes
from unifmoe_dist.studies.scaling.measured_step import Layout, Study, digits_batch, train_config
from unifmoe_dist.studies.scaling.step_split import split_step
from unifmoe_dist.studies.scaling.volume import synthetic_tokens
from unifmoe_dist.train import build
from unifmoe_dist.train.step import TrainingStep

RANKS_PER_HOST = 2
RANKS = 2 * RANKS_PER_HOST
EXPERTS, BLOCKS = 64, 8


@dataclass(frozen=True)
class Timing:
    """Calls of one contender.

    Args:
        seconds: Of the slowest rank, call by call.
        link_bytes: That both hosts sent per call.
    """

    seconds: list[float]
    link_bytes: float

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.quantile(self.seconds, (0.25, 0.75)).tolist()
        return low, high


@dataclass(frozen=True)
class Trained:
    """A run: losses by step, its steps, and seconds of a step that the exchange takes, as profiled."""

    losses: list[float]
    step: Timing
    exchange: float


@dataclass(frozen=True)
class Sizes:
    """What is timed; tokens are per rank."""

    tokens: int = 512
    dim: int = 384
    experts_per_token: tuple[int, ...] = (4, 8, 0)  # 0: as a router chooses
    chunks: tuple[int, ...] = (1, 2, 4)
    repeats: int = 9
    batch: int = 256  # images of five tokens
    steps: int = 10


# -- one run with each ---------------------------------------------------------------------------------------------


def train(first_processes: Sequence[int], dispatcher: str, sizes: Sizes) -> Trained:
    """Run on every rank of a job: a short run over two hosts, whose names tell `two_level` the nodes."""
    become_rank(first_processes)
    study = Study(width=72, blocks=BLOCKS)  # narrow, so that gradients of the dense part are a small share of bytes
    config = train_config(Layout(EXPERTS, RANKS, RANKS, sizes.batch, dispatcher, 1), study)
    with running_ranks(RANKS) as ranks:
        seed_everything(0)
        batch = digits_batch(sizes.batch, ranks.rank)
        model = build.install_layers(config, build_digits_vit(embed_dim=study.width, depth=study.depth), ranks)
        algorithm = ALGORITHMS[config.algorithm.name](model, 1, NUM_CLASSES, config.algorithm, lambda: model)
        training, number = TrainingStep(config, algorithm, ranks), itertools.count()
        losses: list[float] = []

        def step() -> None:
            losses.append(float(ranks.all_sum(training([batch], next(number)).sums["task_loss"])) / RANKS)

        timing = in_turns({dispatcher: step}, sizes.steps, ranks)[dispatcher]
        parts = split_step(step, timing.median, 2, ranks.device)
        exchange = np.mean(ranks.gather(parts["dispatch"] + parts["combine"]))
        return Trained(losses[: sizes.steps], timing, float(exchange))


# -- the exchange, and a layer -------------------------------------------------------------------------------------


def time_exchanges(first_processes: Sequence[int], hosts: int, sizes: Sizes) -> dict[str, dict[str, Timing]]:
    """Run on every rank of a job: timings by what is timed and by contender, forward and backward.

    "exchange, k": one layer's exchange alone, of tokens with `k` experts each, or as many as a router chooses. "layer":
    all of a layer with narrow experts, in chunks. Contenders are flat and two_level, on one host also what auto takes.
    """
    become_rank(first_processes[:hosts])
    with running_ranks(RANKS) as ranks:
        result: dict[str, dict[str, Timing]] = {}
        names = {"flat": ("alltoall", None), "two_level": ("two_level", RANKS_PER_HOST)}
        if hosts == 1:
            names["auto"] = ("auto", None)
        dispatchers = {name: make_dispatcher(d, ranks.expert_group, width) for name, (d, width) in names.items()}
        for k in sizes.experts_per_token:
            x, gates, blocks = uniform_tokens(k, sizes, ranks.rank)
            calls = {name: _exchange(dispatcher, x, gates, blocks) for name, dispatcher in dispatchers.items()}
            _same_sums(calls)
            mean = float(ranks.all_sum((gates != 0).sum())) / (RANKS * sizes.tokens)
            result[f"exchange, k = {mean:.3g}"] = in_turns(calls, sizes.repeats, ranks)
        config = UniFMoEConfig(sizes.dim, sizes.dim, EXPERTS, BLOCKS)
        layers: dict[str, Callable[[], Any]] = {}
        x = torch.randn(sizes.tokens, sizes.dim, generator=torch.Generator().manual_seed(ranks.rank))
        for (name, (dispatcher, width)), chunks in itertools.product(list(names.items())[:2], sizes.chunks):
            seed_everything(0)
            layer = UniFMoELayer(config, ranks.expert_group, dispatcher, ranks_per_node=width, dispatch_chunks=chunks)
            layers[f"{name}, {chunks}"] = _layer_step(layer, x)
        _same_sums(layers)
        result["layer"] = in_turns(layers, sizes.repeats, ranks)
        return result


def uniform_tokens(k: int, sizes: Sizes, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, D) tokens, their (N, K) gates, of k experts that lie anywhere with equal chance, and (N, B) blocks."""
    torch.manual_seed(0)
    router, prototypes = Router(sizes.dim, EXPERTS), torch.randn(BLOCKS, sizes.dim)
    generator = torch.Generator().manual_seed(1 + rank)
    x = synthetic_tokens(sizes.tokens, router.weight, False, generator).requires_grad_()
    routing = router.decide(x, prototypes)
    gates = routing.gates.detach()
    if k:
        chosen = torch.rand(gates.shape, generator=generator).argsort(1)[:, :k]
        gates = torch.zeros_like(gates).scatter_(1, chosen, 1 / k)
    return x, gates.requires_grad_(), ~routing.shared_blocks


def _exchange(dispatcher: Dispatcher, x: torch.Tensor, gates: torch.Tensor, blocks: torch.Tensor) -> Callable[[], Any]:
    def call() -> torch.Tensor:
        exchange = dispatcher.dispatch(x, gates, blocks)
        exchange.compute(lambda arrived: arrived.x * arrived.gates.sum(1, keepdim=True))
        total = exchange.total()
        torch.autograd.grad(total.sum(), (x, gates))
        return total

    return call


def _layer_step(layer: UniFMoELayer, x: torch.Tensor) -> Callable[[], Any]:
    def call() -> torch.Tensor:
        layer.zero_grad()
        y = layer(x)
        y.square().mean().backward()
        return y

    return call


def _same_sums(calls: Mapping[str, Callable[[], torch.Tensor]]) -> None:
    """Let every contender run once, and see that all give the same."""
    first, *others = [call().detach() for call in calls.values()]
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-4)


def in_turns(calls: Mapping[str, Callable[[], Any]], repeats: int, ranks: Ranks) -> dict[str, Timing]:
    """Timings of calls that take turns, each round in another order; collective."""
    names = list(calls)
    own: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for number in range(repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            ranks.barrier()
            before = sent_bytes()
            taken = seconds(calls[name], ranks.device)
            ranks.barrier()
            own[name].append((taken, sent_bytes() - before))
    of_ranks = ranks.gather(own)
    result = {}
    for name in names:
        values = np.array([told[name] for told in of_ranks])  # (rank, call, 2)
        hosts = values[::RANKS_PER_HOST, :, 1]
        result[name] = Timing(values[:, :, 0].max(0).tolist(), float(hosts.sum(0).mean()))
    return result
