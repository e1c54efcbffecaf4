"""Tiny models of every family, and batches for them."""

from __future__ import annotations

import timm
import torch
import transformers
from torch import Tensor, nn

K, B, WIDTH, HIDDEN, DEPTH = 3, 4, 32, 64, 3
TEXT = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "electra": "Electra",
    "distilbert": "DistilBert",
}
VISION = {"vit": "ViT", "deit": "DeiT"}
FAMILIES = ["timm", "timm-distilled", *TEXT, *VISION]


def build(family: str, **options) -> nn.Module:
    """A tiny model with a classification head, random weights, no dropout unless asked for."""
    if family.startswith("timm"):
        name = "deit_tiny_distilled_patch16_224" if family == "timm-distilled" else "vit_tiny_patch16_224"
        sizes = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": 2, "mlp_ratio": HIDDEN / WIDTH}
        return timm.create_model(name, img_size=32, num_classes=5, **sizes, **options).eval()
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 2,
        "num_labels": 5,
        "intermediate_size": HIDDEN,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if family == "distilbert":
        sizes = {
            "dim": WIDTH,
            "n_layers": DEPTH,
            "n_heads": 2,
            "hidden_dim": HIDDEN,
            "num_labels": 5,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
        }
    if family in TEXT:
        sizes |= {"vocab_size": 50, "max_position_embeddings": 40, "initializer_range": 0.3}
        name = TEXT[family]
        head = "ForSequenceClassification"
    else:
        sizes |= {"image_size": 32, "patch_size": 16, "initializer_range": 0.3}
        name = VISION[family]
        head = "ForImageClassification"
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    return getattr(transformers, f"{name}{head}")(config).eval()


def inputs(family: str, padded: bool = True) -> dict[str, Tensor]:
    """A batch; for language, the second sentence has 4 of 9 tokens."""
    if family in TEXT:
        mask = torch.ones(3, 9, dtype=torch.long)
        if padded:
            mask[1, 4:] = 0
        return {"input_ids": torch.randint(3, 50, (3, 9)), "attention_mask": mask}
    return {"x" if family.startswith("timm") else "pixel_values": torch.randn(3, 3, 32, 32)}


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output if isinstance(output, Tensor) else output.logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def moved(model: nn.Module) -> nn.Module:
    """The model, its experts no longer equal."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model
