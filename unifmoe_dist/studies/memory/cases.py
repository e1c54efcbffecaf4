"""Settings in which estimates are held against measured peaks: what a CPU can run, one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.train.cli import parse_train_config

_DIGITS = "--data.task digits --data.batch_size 16"
_VISION = "--data.task pacs --model.pretrained none --model.layers [8,10] --model.dropout 0.1 --model.drop_path 0.1"
_LANGUAGE = "--data.task rte --model.pretrained none --model.layers [2,4] --model.dropout 0.1 --model.num_blocks 16"
_BERT: dict[str, Any] = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1024)


def cases(folder: Path) -> Iterator[tuple[str, TrainConfig, int]]:
    """Name, configuration and ranks of all settings; a BERT of medium size is described in the folder given."""
    from transformers import BertConfig

    BertConfig(**_BERT).save_pretrained(folder)
    for name, words, ranks in _words(f"{_LANGUAGE} --model.backbone {folder} --data.batch_size 32"):
        yield name, parse_train_config(words.split()), ranks


def _words(bert: str) -> Iterator[tuple[str, str, int]]:
    two = "--parallel.zero_stage 2"
    yield "digits ViT, ZeRO 1", _DIGITS, 1
    yield "digits ViT, ZeRO 0", f"{_DIGITS} --parallel.zero_stage 0", 1
    yield "digits ViT, ZeRO 2, accumulation 2", f"{_DIGITS} {two} --parallel.gradient_accumulation 2", 1
    yield "digits ViT, ZeRO 1, offloaded", f"{_DIGITS} --parallel.offload_optimizer true", 1
    yield "digits ViT, SGD with momentum", f"{_DIGITS} --optim.name sgd --optim.momentum 0.9", 1
    for ranks in (1, 2):
        for stage in (0, 1, 2):
            words = f"{_VISION} --data.batch_size {4 // ranks} --parallel.zero_stage {stage}"
            yield f"DeiT-S, {12 // ranks} images, ZeRO {stage}", words, ranks
    vision, checkpointing = f"{_VISION} --data.batch_size", "--parallel.gradient_checkpointing true"
    yield "DeiT-S, 24 images, ZeRO 1", f"{vision} 8", 1
    yield "DeiT-S, 48 images, ZeRO 1, checkpointing", f"{vision} 16 {checkpointing}", 1
    yield "DeiT-S, 12 images, ZeRO 2, bf16", f"{vision} 4 {two} --parallel.precision bf16", 1
    yield "DeiT-S, 12 images, dense", f"{vision} 4 --model.moe none", 1
    yield "DeiT-S, 12 images, top-2", f"{vision} 4 --model.moe topk", 1
    yield "DeiT-S, 12 images, LFME, dense", f"{vision} 4 --model.moe none --algorithm.name lfme", 1
    yield "DeiT-S, 6 images, experts over 2 ranks", f"{vision} 4 --parallel.expert_parallel_size 2", 2
    for stage in (1, 2):
        yield f"BERT, 6 layers, 32 sentences, ZeRO {stage}", f"{bert} --parallel.zero_stage {stage}", 1
    half = "--parallel.precision bf16 --parallel.offload_optimizer true"
    yield "BERT, 6 layers, 32 sentences, bf16, offloaded", f"{bert} {half}", 1
    experts = "--model.num_experts 16 --parallel.expert_parallel_size 2"
    yield "BERT, 6 layers, 16 sentences, 16 experts over 2 ranks", f"{bert} {experts}", 2
    yield "BERT, 6 layers, 32 sentences, checkpointing", f"{bert} {checkpointing}", 1
