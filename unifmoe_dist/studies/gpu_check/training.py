"""Training on one rank in every number format: the loss falls, and a run that was stopped goes on with the same losses.

Through the project's trainer, on DeepSpeed, where all of its libraries can be imported; else in a plain loop. Without a
card DeiT-S goes through the loop anyway, so that both ways run. The model is a ViT in plain torch, which needs no other
library.
"""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist import upcycle
from unifmoe_dist.studies.gpu_check import device
from unifmoe_dist.studies.gpu_check.record import NOTE, LeftOut, Record, one_line

RESUMED_WITHIN = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Of a loss: attention's backward pass may add up in another order each time."""
LOOP = "a plain loop"


@dataclass(frozen=True)
class Job:
    """What is trained: images (N, C, S, S), labels (N,), a ViT, and for how long; without a card, also how."""

    images: Tensor
    labels: Tensor
    build: Callable[[], nn.Module]
    layers: tuple[int, ...]
    experts: int
    blocks: int
    steps: int
    batch: int
    lr: float
    interpreted: tuple[str, ...] = ()  # number formats without a card, where the interpreter is slow
    looped: bool = False  # without a card in a plain loop, so that both ways run there

    @property
    def stop(self) -> int:
        return self.steps // 2

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(number * self.batch, (number + 1) * self.batch) % len(self.labels)
        return self.images[rows], self.labels[rows]


def check(record: Record, name: str) -> None:
    job = JOBS[name](record)
    train, how = _trainer(record) if record.on_card or not job.looped else (by_loop, LOOP)
    for precision in RESUMED_WITHIN if record.on_card else job.interpreted:
        with record.attempt(f"{name}, {precision}"), device.quiet_tiles(), _all_triton():
            if precision == "fp16" and not record.on_card:
                raise LeftOut("fp16 needs a card")
            _judge(record, name, precision, how, job, *train(job, precision))


def _all_triton() -> Any:
    """Without a card Triton has to be asked for."""
    return nullcontext() if torch.cuda.is_available() else device.kernels()


def _trainer(record: Record) -> tuple[Callable[[Job, str], tuple[list[float], list[float]]], str]:
    try:
        for needed in ("deepspeed", "unifmoe_dist.train.trainer"):
            importlib.import_module(needed)
        return by_trainer, "DeepSpeed"
    except Exception as error:  # whatever a library raises that does not fit this machine
        record.find("DeepSpeed", NOTE, f"{LOOP} takes its place: {one_line(error)}")
        return by_loop, LOOP


def _judge(
    record: Record, name: str, precision: str, how: str, job: Job, losses: list[float], resumed: list[float]
) -> None:
    some = max(1, min(5, job.steps // 4))
    first, last = (sum(part) / some for part in (losses[:some], losses[-some:]))
    apart = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(losses[job.stop :], resumed, strict=True))
    cells = {"model": name, "type": precision, "through": how, "steps": job.steps}
    cells |= {"loss, first": f"{first:.3f}", "last": f"{last:.3f}", "resumed: largest difference": f"{apart:.1e}"}
    record.row("training", "Training on one rank, and resuming half-way", cells)
    record.numbers[f"{name}, {precision}"] = {"losses": losses, "resumed": resumed}
    record.judge(f"{name}, {precision}: loss", last < first, f"from {first:.3f} to {last:.3f} in {job.steps} steps")
    again = "the same" if resumed == losses[job.stop :] else f"within {apart:.1e}"
    good = apart <= RESUMED_WITHIN[precision]  # NaN is bad
    record.judge(f"{name}, {precision}: resumed", good, f"losses after step {job.stop} are {again}")


# -- two ways to train ------------------------------------------------------------------------------------------------


def by_trainer(job: Job, precision: str) -> tuple[list[float], list[float]]:
    """Losses of all steps, and those of the second half in a run that was stopped and resumed."""
    from unifmoe_dist.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
    from unifmoe_dist.data.task import TaskData, collate_images
    from unifmoe_dist.runtime.ranks import running_ranks
    from unifmoe_dist.train.trainer import Trainer

    items: Any = list(zip(job.images, job.labels.tolist(), strict=True))
    some: Any = [items[: job.batch]]
    task = TaskData("digits", 10, [items], some, some, ("all",), collate_images, job.build)
    kept: Any = dict(keep_checkpoints=9, baseline=False, progress=False)
    with tempfile.TemporaryDirectory() as folder, running_ranks(1) as ranks:
        run, checkpoints = Path(folder), Path(folder, "checkpoints")
        config = TrainConfig(
            output=folder,
            steps=job.steps,
            eval_every=job.stop,
            log_every=1,
            model=ModelConfig(layers=list(job.layers), num_experts=job.experts, num_blocks=job.blocks),
            data=DataConfig(batch_size=job.batch),
            optim=OptimConfig(lr=job.lr, warmup_steps=0, schedule="constant"),
            parallel=ParallelConfig(precision=precision),  # type: ignore[arg-type]
            **kept,
        )
        Trainer(config, ranks, run, task).fit()
        losses = _losses(run)
        shutil.rmtree(checkpoints / f"step-{job.steps:06d}")  # as if it had been stopped before
        for name in ("latest", "best"):
            (checkpoints / name).write_text(f"step-{job.stop:06d}")
        config.resume = True
        Trainer(config, ranks, run, task).fit()
        return losses, _losses(run)[job.stop :]


def _losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def by_loop(job: Job, precision: str) -> tuple[list[float], list[float]]:
    """As `by_trainer`, with AdamW, autocast and, in fp16, a scaled loss."""
    torch.manual_seed(0)
    losses, saved = _loop(job, precision, 0, None)
    return losses, _loop(job, precision, job.stop, saved)[0]


def _loop(job: Job, precision: str, first: int, state: Any) -> tuple[list[float], Any]:
    where, dtype = device.here(), {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = upcycle(job.build(), job.layers, job.experts, job.blocks).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
    scaler = torch.amp.GradScaler(where.type, enabled=precision == "fp16")
    parts: Any = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if state is not None:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    losses, saved = [], None
    with tempfile.TemporaryDirectory() as folder:
        for step in range(first, job.steps):
            if step == job.stop:
                torch.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}/state")
                saved = torch.load(f"{folder}/state", weights_only=False, map_location=where)
            images, labels = (t.to(where) for t in job.step(step))
            with torch.autocast(where.type, dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(images).float(), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
    return losses, saved


# -- what is trained --------------------------------------------------------------------------------------------------


def _digits(record: Record) -> Job:
    try:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target).long()
    except ImportError:
        record.find("digits", NOTE, "scikit-learn is not installed: ten made-up patterns with noise take their place")
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 10, (1797,), generator=generator)
        patterns = torch.randn(10, 1, 8, 8, generator=generator)
        images = patterns[labels] + torch.randn(len(labels), 1, 8, 8, generator=generator)
    if record.on_card:
        return Job(images, labels, lambda: Vit(8, 1, 2, 64, 6, 4, 10), (3, 5), 6, 8, steps=80, batch=80, lr=1e-3)
    return Job(images[:4], labels[:4], lambda: Vit(8, 1, 4, 16, 2, 2, 10), (1,), 2, 4, 2, 4, 1e-3, ("fp32",))


def _deit(record: Record) -> Job:
    """DeiT-S on images of noise, always the same, which it learns by heart."""
    size, count = (224, 64) if record.on_card else (8, 4)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(count, 3, size, size, generator=generator), torch.arange(count) % 10
    if record.on_card:
        build: Any = lambda: Vit(224, 3, 16, 384, 12, 6, 10)  # noqa: E731
        return Job(images, labels, build, (8, 10), 6, 8, steps=12, batch=64, lr=3e-4)
    tiny = lambda: Vit(8, 3, 4, 16, 2, 2, 10)  # noqa: E731
    return Job(images, labels, tiny, (1,), 2, 4, 2, 4, 1e-3, ("bf16", "fp16"), looped=True)


JOBS = {"digits": _digits, "deit-s": _deit}


class Vit(nn.Module):
    """A vision transformer: images (N, C, S, S) to logits."""

    def __init__(self, size: int, channels: int, patch: int, dim: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Block(nn.Module):
    """Attention and an FFN four times as wide."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))
