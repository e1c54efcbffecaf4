"""One point of a scaling study: real training steps of an upcycled ViT at one layout, measured on every rank."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unifmoe_dist.algorithms import ALGORITHMS
from unifmoe_dist.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, UniFMoEConfig
from unifmoe_dist.data.digits import NUM_CLASSES, build_digits_vit, digits_task
from unifmoe_dist.dispatch import Arrivals, Dispatcher, Exchange
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import Ranks, running_ranks, seed_everything
from unifmoe_dist.studies import timing
from unifmoe_dist.studies.meters import process_peak
from unifmoe_dist.studies.scaling.step_split import PARTS, split_step
from unifmoe_dist.studies.scaling.volume import Traffic, Volume, counting_bytes, minimum_volume, tutel_volume
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


@dataclass(frozen=True)
class Study:
    """What all points of a study have in common.

    Raises:
        UserError: a number that no study can have.
    """

    width: int = 128  # model width D; experts are 4 D wide
    depth: int = 4  # transformer layers; every second one, from the second on, is upcycled
    blocks: int = 8  # blocks B per expert
    precision: str = "fp32"  # or bf16
    warmup: int = 3  # steps before timing
    steps: int = 9  # timed steps
    threads: int = 1  # CPU threads per rank

    def __post_init__(self) -> None:
        for name, least in (("depth", 2), ("warmup", 0), ("steps", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if self.width < 4 or self.width % 4:
            raise UserError(f"width {self.width} must be a multiple of 4, the number of attention heads.")

    @property
    def layers(self) -> list[int]:
        return list(range(1, self.depth, 2))

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
    contention: float  # CPU threads of all ranks per core, at least 1: how much slower shared cores make a rank
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


def train_config(layout: Layout, study: Study) -> TrainConfig:
    """The training configuration of a point, validated.

    Raises:
        UserError: the layout cannot work, for example K is not divisible by the expert-parallel size.
    """
    config = TrainConfig(
        steps=10_000,
        baseline=False,
        progress=False,
        model=ModelConfig(
            layers=study.layers,
            num_experts=layout.experts,
            num_blocks=study.blocks,
            dispatcher=layout.dispatcher,  # type: ignore[arg-type]
        ),
        data=DataConfig(batch_size=layout.batch * layout.ranks),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, schedule="constant"),
        parallel=ParallelConfig(
            expert_parallel_size=layout.expert_parallel,
            zero_stage=layout.zero,  # type: ignore[arg-type]
            precision=study.precision,  # type: ignore[arg-type]
        ),
    )
    config.validate(layout.ranks)
    UniFMoEConfig(study.width, 4 * study.width, layout.experts, study.blocks)  # checks the layer's shape
    return config


def measure(layout: Layout, study: Study) -> dict[str, Any]:
    """Measure one point; runs on every rank of its job and returns the fields of `Measurement`."""
    config = train_config(layout, study)
    with running_ranks(layout.expert_parallel) as ranks:
        return asdict(_Point(config, study, ranks).measure())


class _Point:
    def __init__(self, config: TrainConfig, study: Study, ranks: Ranks) -> None:
        self.config, self.study, self.ranks = config, study, ranks
        seed_everything(0)
        self.inputs, self.labels = _digits(config.data.batch_size // ranks.world_size, ranks)
        deepspeed.load_all()  # or it would count as memory of training
        self.memory_before = process_peak(ranks.device)
        model = build.install_layers(config, _backbone(study), ranks)
        self.model, self.layers = model, moe_layers(model)
        self.parameters = _count_parameters(model)
        algorithm = ALGORITHMS[config.algorithm.name](model, 1, NUM_CLASSES, config.algorithm, lambda: model)
        self._one_step, self._steps = TrainingStep(config, algorithm, ranks), 0

    def step(self) -> Tensor:
        """One optimiser step, as the trainer makes it; the task's loss."""
        result = self._one_step([({"x": self.inputs}, self.labels)], self._steps)
        self._steps += 1
        return result.sums["task_loss"]

    def measure(self) -> Measurement:
        for _ in range(self.study.warmup):
            self.step()
        collect_usage(self.model, self.ranks)  # forgets the warm-up
        step, spread, loss = self._time_steps()
        memory = process_peak(self.ranks.device) - self.memory_before
        usage = list(collect_usage(self.model, self.ranks).values())
        parts = split_step(self.step, step, _PROFILED_STEPS, self.ranks.device)
        results: dict[str, Any] = self._count_exchange()
        results.update(zip(PARTS, self._mean_over_ranks([parts[name] for name in PARTS]), strict=True))
        tokens = TOKENS_PER_IMAGE * len(self.labels) * self.ranks.world_size
        cuda = self.ranks.device.type == "cuda"
        return Measurement(
            device=torch.cuda.get_device_name() if cuda else "cpu",
            contention=1.0 if cuda else max(1.0, self.ranks.world_size * self.study.threads / available_cores()),
            tokens=tokens,
            tokens_per_second=tokens / step,
            step=step,
            step_spread=spread,
            memory=self._over_ranks([memory], dist.ReduceOp.MAX)[0],
            load_imbalance=fmean([max(u.expert_load) * len(u.expert_load) / sum(u.expert_load) for u in usage]),
            blocks_per_token=fmean([u.block_compute for u in usage]),
            experts_per_token=fmean([u.expert_count for u in usage]),
            shared_per_token=fmean([u.shared_block_count for u in usage]),
            dense_parameters=self.parameters[0],
            expert_parameters=self.parameters[1],
            loss=self._mean_over_ranks([float(loss)])[0],
            **results,
        )

    def _time_steps(self) -> tuple[float, float, Tensor]:
        self.ranks.barrier()
        loss = torch.zeros(())

        def step() -> None:
            nonlocal loss
            loss = self.step()

        seconds = [timing.seconds(step, self.ranks.device) for _ in range(self.study.steps)]
        slowest = torch.tensor(self._over_ranks(seconds, dist.ReduceOp.MAX), dtype=torch.float64)
        low, median, high = torch.quantile(slowest, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        return median, (high - low) / 2, loss

    def _count_exchange(self) -> dict[str, Any]:
        """Take one more step with every dispatcher tapped and every all-to-all counted."""
        taps = {}
        for name, layer in self.layers.items():
            taps[name] = layer.dispatcher = _Tap(layer.dispatcher)
        with counting_bytes() as count:
            self.step()
        size = self.config.expert_parallel_size(self.ranks.world_size)
        minimum, tutel, rank_blocks, chosen, received = Volume(), Volume(), 0.0, 0, 0
        for layer, tap in zip(self.layers.values(), taps.values(), strict=True):
            layer.dispatcher = tap.dispatcher
            traffic = Traffic.of(tap.gates, self.study.blocks, tap.row_bytes, size, self.ranks.expert_rank)
            capacity = torch.tensor(traffic.largest_load, device=self.ranks.device)
            if self.ranks.expert_group is not None:
                dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=self.ranks.expert_group)
            minimum += minimum_volume(traffic)
            tutel += tutel_volume(traffic, int(capacity))
            rank_blocks += tap.shared_blocks + tap.residual_blocks
            chosen, received = chosen + tap.chosen, received + tap.received
        sums = self.ranks.all_sum(torch.tensor([count.bytes, minimum.total, tutel.total, chosen - received]))
        per_token = TOKENS_PER_IMAGE * len(self.labels) * self.ranks.world_size * len(self.layers)
        sent, busiest = self._over_ranks([float(count.bytes), rank_blocks], dist.ReduceOp.MAX)
        return {
            "sent_bytes": float(sums[0]) / per_token,
            "minimum_bytes": float(sums[1]) / per_token,
            "tutel_bytes": float(sums[2]) / per_token,
            "dropped": int(sums[3]),
            "exchange_bytes": sent,
            "exchange_messages": float(count.messages),
            "rank_blocks": busiest,
        }

    def _over_ranks(self, values: list[float], op: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.ranks.device)
        if self.ranks.world_size > 1:
            dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def _mean_over_ranks(self, values: list[float]) -> list[float]:
        return [v / self.ranks.world_size for v in self._over_ranks(values, dist.ReduceOp.SUM)]


class _Tap:
    """Stands in for a layer's dispatcher during one step and notes what goes in and what arrives."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.received = self.residual_blocks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatcher, name)

    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> Exchange:
        self.gates = gates.detach()
        self.row_bytes = x.shape[1] * x.element_size()
        self.chosen = int((self.gates != 0).sum())
        self.shared_blocks = int((~blocks).sum())
        return _TappedExchange(self, self.dispatcher.dispatch(x, gates, blocks, trained))


class _TappedExchange:
    def __init__(self, tap: _Tap, exchange: Exchange) -> None:
        self.tap, self.exchange = tap, exchange

    def arrivals(self) -> Arrivals:
        rows = self.exchange.arrivals()
        active = rows.gates.detach() != 0
        self.tap.received = int(active.sum())
        self.tap.residual_blocks = int((active.sum(1) * rows.blocks.sum(1)).sum())
        return rows

    def combine(self, rows: Tensor) -> Tensor:
        return self.exchange.combine(rows)


def _backbone(study: Study) -> nn.Module:
    return build_digits_vit(embed_dim=study.width, depth=study.depth)


def _digits(count: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """This rank's batch of the digits task: (count, 1, 16, 16) images and (count,) labels."""
    task = digits_task()
    items = [item for dataset in task.train for item in dataset]  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(ranks.rank)
    chosen = torch.randint(len(items), (count,), generator=generator).tolist()
    inputs, labels = task.collate([items[i] for i in chosen])
    return inputs["x"], labels


def _count_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters outside the residual experts, and in those held here."""
    experts = sum(p.numel() for layer in moe_layers(model).values() for p in layer.experts.parameters())
    return sum(p.numel() for p in model.parameters()) - experts, experts


def available_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
