"""A tiny model of every family that can be upcycled.

`python -m tests.support.families` writes the table in README.md and docs/upcycling.md, which is made of this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

WIDTH, HIDDEN, DEPTH, WORDS = 32, 64, 2, 60
_TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_GPT2 = {"n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": DEPTH, "n_head": 4, "vocab_size": WORDS, "n_positions": 64}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_IMAGE = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
    "initializer_range": 0.2,
}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_SEQ2SEQ = {
    "d_model": WIDTH,
    "encoder_layers": DEPTH,
    "decoder_layers": DEPTH,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "vocab_size": WORDS,
    "dropout": 0.0,
    "init_std": 0.2,
}
_T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": HIDDEN,
    "num_layers": DEPTH,
    "num_heads": 4,
    "vocab_size": WORDS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_TOWERS = {
    "text_config": {**_TEXT, "attention_dropout": 0.0, "projection_dim": WIDTH},
    "vision_config": {**_IMAGE, "projection_dim": WIDTH},
    "projection_dim": WIDTH,
}
_SPOKEN = {**_GROUPED, "head_dim": 8, "model_type": "llama"}
_LLAVA = {
    "text_config": _SPOKEN,
    "vision_config": {**_IMAGE, "model_type": "clip_vision_model"},
    "image_token_id": WORDS - 1,
    "vision_feature_layer": -1,
}
_QWEN_VL = {
    "text_config": {**_GROUPED, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    "vision_config": {
        "depth": DEPTH,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_heads": 4,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [1],
    },
}
_SPEECH = {
    **{name: _TEXT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": WORDS,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "feat_proj_dropout": 0.0,
    "attention_dropout": 0.0,
    "final_dropout": 0.0,
}


@dataclass(frozen=True)
class Family:
    """A row: what builds the tiny model, which part is upcycled (the whole where empty), how many layers it has."""

    title: str
    kind: str
    build: Callable[[], nn.Module]
    part: str = ""
    layers: int = DEPTH
    inputs: Callable[[], dict[str, Tensor]] = field(default=lambda: {})

    @property
    def name(self) -> str:
        return "-".join(re.findall(r"\w+", f"{self.kind} {self.title} {self.part}")).lower()

    def part_of(self, model: Any) -> nn.Module:
        return model.get_submodule(self.part)


class Missing(Exception):
    """The installed version lacks the family."""


def _made(name: str, config: str, options: dict[str, Any]) -> nn.Module:
    if not hasattr(transformers, name):
        raise Missing(f"transformers {transformers.__version__} has no {name}")
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).eval()
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None  # random weights would end at random
    return model


def _timm(name: str, **options: Any) -> nn.Module:
    if not timm.is_model(name):
        raise Missing(f"timm {timm.__version__} has no {name}")
    return timm.create_model(name, num_classes=5, **options).eval()


def words() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (3, 9))}


def pixels(size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _both() -> dict[str, Tensor]:
    return {**words(), "decoder_input_ids": torch.randint(3, WORDS, (3, 7))}


def _towers() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (2, 9)), **pixels()}


def _pictured() -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS - 1, (2, 9))
    ids[:, :4] = WORDS - 1  # where the picture's four patches go
    return {"input_ids": ids, **pixels()}


def _decoder(title: str, prefix: str = "", options: dict[str, Any] = _GROUPED, **more: Any) -> Family:
    prefix = prefix or title
    build = partial(_made, f"{prefix}ForCausalLM", f"{more.pop('config', prefix)}Config", {**options, **more})
    return Family(title, "decoders", build, inputs=words)


def _encoder(title: str, prefix: str, **more: Any) -> Family:
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **more}
    build = partial(_made, f"{prefix}ForMaskedLM", f"{prefix}Config", {**_TEXT, **options})
    return Family(title, "encoders", build, inputs=words)


def _vision(title: str, model: str, config: str, layers: int = DEPTH, size: int = 32, **more: Any) -> Family:
    return Family(title, "vision", partial(_made, model, config, {**_IMAGE, **more}), "", layers, partial(pixels, size))


def _parts(title: str, kind: str, build: Callable[[], nn.Module], inputs: Any, *parts: str) -> list[Family]:
    return [Family(title, kind, build, part, inputs=inputs) for part in parts]


def _images(title: str, name: str, layers: int = DEPTH, size: int = 32, **options: Any) -> Family:
    build = partial(_timm, name, img_size=size, **options)
    return Family(title, "timm", build, "", layers, lambda: {"x": torch.randn(2, 3, size, size)})


_SIZES = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": 4}
FAMILIES = [
    *(_decoder(title) for title in ("Llama", "Mistral", "Qwen2", "Phi3")),
    _decoder("Qwen3", head_dim=8),
    _decoder("Gemma 2", "Gemma2", head_dim=8, query_pre_attn_scalar=8),
    _decoder("Gemma 3", "Gemma3", config="Gemma3Text", head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("SmolLM3"),
    Family(
        "GPT-2",
        "decoders",
        partial(_made, "GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_ENDS, "initializer_range": 0.2}),
        inputs=words,
    ),
    _decoder("GPT-NeoX", "GPTNeoX", _TEXT),
    _decoder("OPT", "OPT", {**_TEXT, "ffn_dim": HIDDEN, "word_embed_proj_dim": WIDTH, "init_std": 0.2}),
    _decoder("Falcon", "Falcon", {**_TEXT, "ffn_hidden_size": HIDDEN}),
    _decoder("Starcoder 2", "Starcoder2"),
    _encoder("BERT", "Bert"),
    _encoder("RoBERTa", "Roberta"),
    _encoder("XLM-RoBERTa", "XLMRoberta"),
    _encoder("CamemBERT", "Camembert"),
    _encoder("ELECTRA", "Electra"),
    Family(
        "DistilBERT",
        "encoders",
        partial(
            _made,
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            {"dim": WIDTH, "hidden_dim": HIDDEN, "n_layers": DEPTH, "n_heads": 4, "vocab_size": WORDS, "dropout": 0.0},
        ),
        inputs=words,
    ),
    _encoder("ModernBERT", "ModernBert", reference_compile=False, cls_token_id=1, sep_token_id=2),
    _encoder(
        "DeBERTa v2 and v3", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    _encoder("MPNet", "MPNet"),
    _vision("ViT", "ViTForImageClassification", "ViTConfig"),
    _vision("DeiT", "DeiTForImageClassification", "DeiTConfig"),
    _vision("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2),
    _vision("DINOv2-giant", "Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=3, use_swiglu_ffn=True),
    _vision("DINOv3", "DINOv3ViTModel", "DINOv3ViTConfig"),
    _vision("DINOv3 gated", "DINOv3ViTModel", "DINOv3ViTConfig", use_gated_mlp=True, hidden_act="silu"),
    _vision("BEiT", "BeitForImageClassification", "BeitConfig", use_relative_position_bias=True),
    Family("Swin", "vision", partial(_made, "SwinForImageClassification", "SwinConfig", _SWIN), "", 4, pixels),
    Family(
        "wav2vec2",
        "speech",
        partial(_made, "Wav2Vec2ForCTC", "Wav2Vec2Config", _SPEECH),
        inputs=lambda: {"input_values": torch.randn(2, 400)},
    ),
    *_parts(
        "Whisper",
        "speech",
        partial(
            _made,
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {**_SEQ2SEQ, **_ENDS, "num_mel_bins": 8, "max_source_positions": 10, "decoder_start_token_id": 1},
        ),
        lambda: {"input_features": torch.randn(3, 8, 20), "decoder_input_ids": torch.randint(3, WORDS, (3, 7))},
        "model.encoder",
        "model.decoder",
    ),
    *_parts(
        "T5",
        "encoders with decoders",
        partial(_made, "T5ForConditionalGeneration", "T5Config", _T5),
        _both,
        "encoder",
        "decoder",
    ),
    *_parts(
        "T5 gated",
        "encoders with decoders",
        partial(_made, "T5ForConditionalGeneration", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu"}),
        _both,
        "encoder",
        "decoder",
    ),
    *_parts(
        "BART",
        "encoders with decoders",
        partial(_made, "BartForConditionalGeneration", "BartConfig", {**_SEQ2SEQ, **_ENDS}),
        _both,
        "model.encoder",
        "model.decoder",
    ),
    *_parts("CLIP", "text and vision", partial(_made, "CLIPModel", "CLIPConfig", _TOWERS), _towers, "text_model"),
    *_parts("CLIP", "text and vision", partial(_made, "CLIPModel", "CLIPConfig", _TOWERS), _towers, "vision_model"),
    *_parts("SigLIP", "text and vision", partial(_made, "SiglipModel", "SiglipConfig", _TOWERS), _towers, "text_model"),
    *_parts(
        "SigLIP", "text and vision", partial(_made, "SiglipModel", "SiglipConfig", _TOWERS), _towers, "vision_model"
    ),
    *_parts(
        "LLaVA",
        "text and vision",
        partial(_made, "LlavaForConditionalGeneration", "LlavaConfig", _LLAVA),
        _pictured,
        "model.language_model",
        "model.vision_tower",
    ),
    *_parts(
        "Qwen2.5-VL",
        "text and vision",
        partial(_made, "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", _QWEN_VL),
        words,
        "model.language_model",
    ),
    _images("ViT", "vit_tiny_patch16_224", **_SIZES, mlp_ratio=2),
    _images("DeiT", "deit_tiny_distilled_patch16_224", **_SIZES, mlp_ratio=2),
    _images("DINOv2-giant", "vit_giant_patch14_dinov2", size=28, **_SIZES, mlp_ratio=4),
    _images("EVA", "eva_giant_patch14_224", size=28, **_SIZES, mlp_ratio=2),
    _images("EVA-02", "eva02_tiny_patch14_224", size=28, **_SIZES, mlp_ratio=2),
    _images("BEiT", "beit_base_patch16_224", **_SIZES, mlp_ratio=2),
    _images("Swin", "swin_tiny_patch4_window7_224", 4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4),
    Family(
        "ConvNeXt",
        "timm",
        partial(_timm, "convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
        layers=4,
        inputs=lambda: {"x": torch.randn(2, 3, 64, 64)},
    ),
    _images("CaiT", "cait_xxs24_224", 4, **_SIZES, mlp_ratio=2),
    _images("XCiT", "xcit_nano_12_p16_224", 4, **_SIZES, mlp_ratio=2),
    _images("Hiera", "hiera_tiny_224", 4, size=64, embed_dim=16, num_heads=1, stages=(1, 1, 1, 1)),
    Family(
        "NaFlexViT",
        "timm",
        partial(_timm, "naflexvit_base_patch16_gap", **_SIZES, mlp_ratio=2),
        inputs=lambda: {"x": torch.randn(2, 3, 32, 32)},
    ),
]


# -- the table --------------------------------------------------------------------------------------------------------

PAGES = [Path(__file__).parents[2] / name for name in ("README.md", "docs/upcycling.md")]
_START, _END = "<!-- families, written by tests/support/families.py -->\n", "<!-- end of families -->"


def table() -> str:
    """Kinds of families, and of those that are upcycled by part, the parts."""
    lines = ["| kind | families |", "| --- | --- |"]
    for kind in dict.fromkeys(family.kind for family in FAMILIES):
        parts: dict[str, list[str]] = {}
        for family in FAMILIES:
            if family.kind == kind:
                parts.setdefault(family.title, []).extend([family.part.rpartition(".")[2]] if family.part else [])
        shown = [f"{title} ({', '.join(own)})" if own else title for title, own in parts.items()]
        lines.append(f"| {kind} | {', '.join(shown)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    before, _, rest = page.partition(_START)
    return f"{before}{_START}{table()}{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_table(path.read_text()))
