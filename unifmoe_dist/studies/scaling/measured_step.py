"""One point of a scaling study: real training steps of an upcycled ViT at one layout, measured on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from unifmoe_dist.algorithms import ALGORITHMS
from unifmoe_dist.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, UniFMoEConfig
from unifmoe_dist.data.digits import NUM_CLASSES, build_digits_vit, digits_task
from unifmoe_dist.dispatch import Arrivals, Dispatcher, Experts
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.runtime.ranks import Ranks, running_ranks, seed_everything
from unifmoe_dist.studies.meters import process_peak, seconds
from unifmoe_dist.studies.rehearsal.hosts import become_rank
from unifmoe_dist.studies.scaling.recorded_routing import RecordedLayer
from unifmoe_dist.studies.scaling.step_split import PARTS, split_step
from unifmoe_dist.studies.scaling.volume import Traffic, counting_bytes, minimum_volume, padded_volume
from unifmoe_dist.train import build, deepspeed
from unifmoe_dist.train.evaluate import collect_usage
from unifmoe_dist.train.step import TrainingStep
from unifmoe_dist.upcycling import moe_layers


@dataclass(frozen=True)
class Layout:
    """What a point varies."""

    experts: int  # residual experts K per layer
    ranks: int  # world size
    expert_parallel: int  # ranks that share one set of experts
    batch: int  # images per rank and step, five tokens each
    dispatcher: str  # how tokens reach experts on other ranks
    zero: int  # ZeRO stage
    megabits: int = 0  # Mbit/s between two hosts, made of namespaces, with half of the ranks each; 0: one host

    def __str__(self) -> str:
        return (
            f"K={self.experts} ranks={self.ranks} ep={self.expert_parallel} batch={self.batch} "
            f"{self.dispatcher} zero={self.zero}{f' megabits={self.megabits}' * (self.megabits > 0)}"
        )


@dataclass(frozen=True)
class Study:
    """What all points of a study have in common. Raises UserError for numbers that no study can have."""

    width: int = 128  # model width D; experts are 4 D wide
    depth: int = 4  # transformer layers; every second one, from the second on, is upcycled
    blocks: int = 8  # blocks B per expert
    precision: str = "fp32"  # or bf16
    warmup: int = 3  # steps before timing
    steps: int = 9  # timed steps
    threads: int = 1  # CPU threads per rank
    ranks_per_node: int = 0  # of the two_level dispatcher; 0: those of the hosts

    def __post_init__(self) -> None:
        for name, least in (("depth", 2), ("warmup", 0), ("steps", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if self.width < 4 or self.width % 4:
            raise UserError(f"width {self.width} must be a multiple of 4, the number of attention heads.")

    @property
    def layers(self) -> list[int]:
        return list(range(1, self.depth, 2))

    def ranks_of_node(self, layout: Layout) -> int:
        """What a node is to the dispatcher of a layout."""
        given = self.ranks_per_node if layout.dispatcher == "two_level" else 0
        return layout.ranks // 2 if layout.megabits else given or layout.ranks

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.precision == "fp32" else 2


TOKENS_PER_IMAGE = 5
_PROFILED_STEPS = 2


@dataclass(frozen=True)
class Measurement:
    """Results of one point. Times are seconds; bytes are per token and UniF-MoE layer, forward and backward.

    The parts of the step, `route` to `other`, add up to it on the CPU.
    """

    device: str  # "cpu" or the GPU's name
    contention: float  # how much slower cores make a rank that it shares with others, ranks or not; measured
    tokens: int  # per step over all ranks
    tokens_per_second: float  # of all ranks together
    step: float  # median over steps of the slowest rank's step
    step_spread: float  # half the interquartile range of those steps
    route: float  # prototypes, decision and statistics
    dispatch: float  # packing, and waiting for the rows that did not come while the shared expert was computed
    shared_experts: float
    residual_experts: float
    combine: float  # sending rows back and summing them
    all_reduce: float  # collectives of the engine, waits for the slowest rank included
    optimizer: float  # unscaling, clipping and stepping
    other: float  # the rest of the model and of the step
    sent_bytes: float  # that the dispatcher sent to other ranks, counted at the collective
    minimum_bytes: float  # the least possible for the same routing
    tutel_bytes: float  # Tutel's padded exchange for the same routing
    exchange_bytes: float  # per step of the rank that sends most, over all layers
    exchange_collectives: float  # that a rank takes part in per step
    exchange_messages: float  # to peers per rank and step
    memory: float  # highest over ranks of the bytes that training takes, from weights to buffers (`process_peak`)
    load_imbalance: float  # load of the busiest expert over the mean, averaged over layers
    blocks_per_token: float  # mean C_B
    experts_per_token: float  # mean k
    shared_per_token: float  # mean b
    rank_blocks: float  # blocks computed per step by the busiest rank, over all layers, forward
    dropped: int  # (token, expert) pairs that routing chose and no expert received
    dense_parameters: int  # that every rank holds
    expert_parameters: int  # of residual experts that one rank holds
    loss: float  # of the task after the last timed step, as evidence of real training


@dataclass(frozen=True)
class Point:
    """A layout and what was measured there."""

    layout: Layout
    result: Measurement


def train_config(layout: Layout, study: Study) -> TrainConfig:
    """The training configuration of a point. Raises UserError where that cannot work."""
    chosen: dict[str, Any] = dict(num_experts=layout.experts, num_blocks=study.blocks, dispatcher=layout.dispatcher)
    parallel: dict[str, Any] = dict(zero_stage=layout.zero, precision=study.precision)
    if study.ranks_per_node and layout.dispatcher == "two_level":
        parallel["ranks_per_node"] = study.ranks_per_node
    config = TrainConfig(
        steps=10_000,
        baseline=False,
        progress=False,
        model=ModelConfig(layers=study.layers, **chosen),
        data=DataConfig(batch_size=layout.batch * layout.ranks),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, schedule="constant"),
        parallel=ParallelConfig(expert_parallel_size=layout.expert_parallel, **parallel),
    )
    config.validate(layout.ranks)
    UniFMoEConfig(study.width, 4 * study.width, layout.experts, study.blocks)  # checks the layer's shape
    return config


def measure(
    layout: Layout, study: Study, first_processes: Sequence[int] = ()
) -> tuple[Measurement, list[RecordedLayer]]:
    """Measure one point; runs on every rank of its job. With it, what all ranks' tokens decided in one of the steps.

    Hosts, if there are several, are given by their first processes.
    """
    config = train_config(layout, study)
    if first_processes:
        become_rank(first_processes)
    with running_ranks(layout.expert_parallel) as ranks:
        seed_everything(0)
        batch = digits_batch(layout.batch, ranks.rank)
        deepspeed.load_all()  # or it would count as memory of training
        memory_before = process_peak(ranks.device)
        model = build.install_layers(config, build_digits_vit(embed_dim=study.width, depth=study.depth), ranks)
        algorithm = ALGORITHMS[config.algorithm.name](model, 1, NUM_CLASSES, config.algorithm, lambda: model)
        training, number = TrainingStep(config, algorithm, ranks), itertools.count()
        losses: list[Tensor] = []

        def step() -> None:
            """One optimiser step, as the trainer makes it."""
            losses.append(training([batch], next(number)).sums["task_loss"])

        for _ in range(study.warmup):
            step()
        collect_usage(model, ranks)  # forgets the warm-up
        ranks.barrier()
        before = _scheduled()
        slowest = np.max(ranks.gather([seconds(step, ranks.device) for _ in range(study.steps)]), axis=0)
        computed, waited = (now - then for now, then in zip(_scheduled(), before, strict=True))
        low, median, high = np.quantile(slowest, (0.25, 0.5, 0.75)).tolist()
        slowed = fmean(ranks.gather(1 + waited / max(computed, 1)))
        own = {"loss": float(losses[-1]), "memory": process_peak(ranks.device) - memory_before}
        usage = list(collect_usage(model, ranks).values())
        own |= split_step(step, median, _PROFILED_STEPS, ranks.device)
        layers = list(moe_layers(model).values())
        counted, routing = _count_exchange(step, layers, study, ranks)
        of_ranks = pd.DataFrame(ranks.gather(own | counted), dtype=float)
    total, mean, most = of_ranks.sum(), of_ranks.mean(), of_ranks.max()
    cuda, tokens = ranks.device.type == "cuda", TOKENS_PER_IMAGE * layout.batch * layout.ranks
    held = sum(p.numel() for layer in layers for p in layer.experts.parameters())
    measured = Measurement(
        device=torch.cuda.get_device_name() if cuda else "cpu",
        contention=1.0 if cuda else slowed,
        tokens=tokens,
        tokens_per_second=tokens / median,
        step=median,
        step_spread=(high - low) / 2,
        **{name: float(mean[name]) for name in (*PARTS, "loss")},
        **{f"{name}_bytes": float(total[name]) / (tokens * len(layers)) for name in ("sent", "minimum", "tutel")},
        exchange_bytes=float(most["sent"]),
        exchange_collectives=float(counted["collectives"]),
        exchange_messages=float(counted["messages"]),
        memory=float(most["memory"]),
        load_imbalance=fmean(max(u.expert_load) * len(u.expert_load) / sum(u.expert_load) for u in usage),
        blocks_per_token=fmean(u.block_compute for u in usage),
        experts_per_token=fmean(u.expert_count for u in usage),
        shared_per_token=fmean(u.shared_block_count for u in usage),
        rank_blocks=float(most["blocks"]),
        dropped=int(total["chosen"] - total["received"]),
        dense_parameters=sum(p.numel() for p in model.parameters()) - held,
        expert_parameters=held,
    )
    return measured, routing


def _scheduled() -> tuple[int, int]:
    """Nanoseconds that this thread computed, and that it waited for a core; Linux alone tells."""
    path = Path("/proc/thread-self/schedstat")
    computed, waited, _ = map(int, path.read_text().split()) if path.exists() else (1, 0, 0)
    return computed, waited


def _count_exchange(
    step: Callable[[], None], layers: Sequence[ExpertLayer], study: Study, ranks: Ranks
) -> tuple[dict[str, float], list[RecordedLayer]]:
    """Take one more step with every dispatcher tapped and every all-to-all counted.

    Returns:
        This rank's sums over layers, and all ranks' routing, in their order.
    """
    taps = [_Tap(layer, study, ranks) for layer in layers]
    with counting_bytes() as count:
        step()
    sums = pd.DataFrame([tap.counts() for tap in taps]).sum().to_dict()
    routing = []
    for of_ranks in zip(*ranks.gather([(tap.gates != 0, ~tap.residual_blocks) for tap in taps]), strict=True):
        active, shared = (torch.cat(part).cpu().numpy() for part in zip(*of_ranks, strict=True))
        routing.append(RecordedLayer(active, shared, study.width, 4 * study.width, gated=False))
    return {"sent": count.bytes, "collectives": count.collectives, "messages": count.messages, **sums}, routing


class _Tap:
    """Takes the place of a layer's dispatcher, and of its exchange, and notes what goes in and what arrives."""

    local = False  # so that tokens pass through it on one rank too

    def __init__(self, layer: Any, study: Study, ranks: Ranks) -> None:
        self.layer, self.study, self.ranks = layer, study, ranks
        self.dispatcher: Dispatcher = layer.dispatcher
        layer.dispatcher = self

    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> _Tap:
        self.gates, self.row_bytes = gates.detach(), x.shape[1] * x.element_size()
        self.residual_blocks = blocks
        self.chosen, self.blocks = int((self.gates != 0).sum()), int((~blocks).sum())
        self.exchange = self.dispatcher.dispatch(x, gates, blocks, trained)
        return self

    def compute(self, experts: Experts) -> None:
        def noted(arrived: Arrivals) -> Tensor:
            active = arrived.gates.detach() != 0
            self.received += int(active.sum())
            self.blocks += int((active.sum(1) * arrived.blocks.sum(1)).sum())
            return experts(arrived)

        self.received = 0
        self.exchange.compute(noted)

    def total(self) -> Tensor:
        return self.exchange.total()

    def counts(self) -> dict[str, float]:
        """What the step asked of this rank's exchange; collective."""
        size = self.layer.config.num_experts // self.layer.num_local_experts
        traffic = Traffic.of(self.gates, self.study.blocks, self.row_bytes, size, self.ranks.expert_rank)
        least, tutel = minimum_volume(traffic).total, padded_volume(traffic, self.ranks).total
        found = {"minimum": least, "tutel": tutel, "blocks": self.blocks}
        return {**found, "chosen": self.chosen, "received": self.received}


def digits_batch(count: int, rank: int) -> tuple[dict[str, Tensor], Tensor]:
    """A rank's batch of the digits task: (count, 1, 16, 16) images and (count,) labels."""
    task = digits_task()
    items = [item for dataset in task.train for item in dataset]  # type: ignore[attr-defined]
    chosen = torch.randint(len(items), (count,), generator=torch.Generator().manual_seed(rank)).tolist()
    inputs, labels = task.collate([items[i] for i in chosen])
    return {"x": inputs["x"]}, labels
