"""Settings in which estimates are held against measured peaks: what a CPU can run, one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.train.cli import parse_train_config

_DIGITS = "--data.task digits --data.batch_size 16"
_VISION = "--data.task pacs --model.pretrained none --model.layers [8,10] --model.dropout 0.1 --model.drop_path 0.1"
_LANGUAGE = "--data.task rte --model.pretrained none --model.layers [2,4] --model.dropout 0.1 --model.num_blocks 16"
_BERT: dict[str, Any] = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1024)


@dataclass(frozen=True)
class Case:
    """One training setting.

    Args:
        name: What it is, for people.
        words: Options of launch/train.py.
        ranks: World size.
    """

    name: str
    words: str
    ranks: int = 1

    def config(self) -> TrainConfig:
        return parse_train_config(self.words.split())


def cases(folder: Path) -> Iterator[Case]:
    """All settings; a BERT of medium size is described in `folder`, which must exist."""
    from transformers import BertConfig

    BertConfig(**_BERT).save_pretrained(folder)
    bert = f"{_LANGUAGE} --model.backbone {folder} --data.batch_size 32"
    yield from (
        Case("digits ViT, ZeRO 1", _DIGITS),
        Case("digits ViT, ZeRO 0", f"{_DIGITS} --parallel.zero_stage 0"),
        Case(
            "digits ViT, ZeRO 2, accumulation 2",
            f"{_DIGITS} --parallel.zero_stage 2 --parallel.gradient_accumulation 2",
        ),
        Case("digits ViT, ZeRO 1, offloaded", f"{_DIGITS} --parallel.offload_optimizer true"),
        Case("digits ViT, SGD with momentum", f"{_DIGITS} --optim.name sgd --optim.momentum 0.9"),
    )
    for ranks in (1, 2):
        for stage in (0, 1, 2):
            words = f"{_VISION} --data.batch_size {4 // ranks} --parallel.zero_stage {stage}"
            yield Case(f"DeiT-S, {12 // ranks} images, ZeRO {stage}", words, ranks)
    vision = f"{_VISION} --data.batch_size 4"
    yield from (
        Case("DeiT-S, 24 images, ZeRO 1", f"{_VISION} --data.batch_size 8"),
        Case(
            "DeiT-S, 48 images, ZeRO 1, checkpointing",
            f"{_VISION} --data.batch_size 16 --parallel.gradient_checkpointing true",
        ),
        Case("DeiT-S, 12 images, ZeRO 2, bf16", f"{vision} --parallel.zero_stage 2 --parallel.precision bf16"),
        Case("DeiT-S, 12 images, dense", f"{vision} --model.moe none"),
        Case("DeiT-S, 12 images, top-2", f"{vision} --model.moe topk"),
        Case("DeiT-S, 12 images, LFME, dense", f"{vision} --model.moe none --algorithm.name lfme"),
        Case("DeiT-S, 6 images, experts over 2 ranks", f"{vision} --parallel.expert_parallel_size 2", 2),
    )
    for stage in (1, 2):
        yield Case(f"BERT, 6 layers, 32 sentences, ZeRO {stage}", f"{bert} --parallel.zero_stage {stage}")
    yield from (
        Case(
            "BERT, 6 layers, 32 sentences, bf16, offloaded",
            f"{bert} --parallel.precision bf16 --parallel.offload_optimizer true",
        ),
        Case(
            "BERT, 6 layers, 16 sentences, 16 experts over 2 ranks",
            f"{bert} --model.num_experts 16 --parallel.expert_parallel_size 2",
            2,
        ),
        Case("BERT, 6 layers, 32 sentences, checkpointing", f"{bert} --parallel.gradient_checkpointing true"),
    )
