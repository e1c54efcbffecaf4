"""The small ViTs in timm's registry: after importing this module, `timm.create_model("digits_vit")` knows them."""

from typing import Any

from timm.models import register_model
from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs
from torch import nn

from unifmoe_dist.data.digits import IMAGE_SIZE, MEAN, NUM_CLASSES, STD, build_digits_vit
from unifmoe_dist.data.emoji import VIT_CFG, build_emoji_vit

DIGITS_CFG = {
    "architecture": "digits_vit",
    "num_classes": NUM_CLASSES,
    "input_size": (1, IMAGE_SIZE, IMAGE_SIZE),
    "fixed_input_size": True,
    "interpolation": "bilinear",
    "mean": (MEAN,),
    "std": (STD,),
    "first_conv": "patch_embed.backbone.0",
    "classifier": "head",
}

default_cfgs = generate_default_cfgs({"digits_vit.untrained": DIGITS_CFG, "emoji_vit.untrained": VIT_CFG})


@register_model
def digits_vit(pretrained: bool = False, **options: Any) -> nn.Module:
    """`build_digits_vit` with its defaults; weights come from `pretrained_cfg_overlay=dict(file=...)`."""
    # timm passes the numbers of DIGITS_CFG; the model has that one shape
    return build_model_with_cfg(lambda **shape: build_digits_vit(), "digits_vit", pretrained, **options)


@register_model
def emoji_vit(pretrained: bool = False, **options: Any) -> nn.Module:
    """`build_emoji_vit`, in the same way."""
    return build_model_with_cfg(lambda **shape: build_emoji_vit(), "emoji_vit", pretrained, **options)
