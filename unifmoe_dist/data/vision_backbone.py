"""ViT backbones from timm, with weights from its hub, from a local file, or none."""

import difflib
from pathlib import Path
from typing import Any

from torch import nn

from unifmoe_dist.errors import UserError

DEFAULT_BACKBONE = "deit_small_patch16_224"
"""DeiT-S/16, pretrained on ImageNet-1k (Touvron et al., ICML 2021): 12 blocks, d = 384, H = 1536."""

_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def build_backbone(
    name: str,
    num_classes: int,
    image_size: int,
    pretrained: str | None,
    *,
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> nn.Module:
    """A timm ViT with a new classifier, drawn from torch's global generator.

    `dropout` acts throughout, as Transformers' `hidden_dropout_prob`: on the embeddings and on the output of every
    attention and FFN, not on the FFN's hidden channels. So dense and upcycled models drop the same.

    Args:
        image_size: Side of the images, in pixels; position embeddings are resized to it.
        pretrained: None takes timm's weights from its hub, "none" random ones; otherwise a file (.safetensors, or .pth
            as DeiT publishes them) or a folder that holds one.
        drop_path: Largest stochastic-depth rate; it rises linearly with depth.

    Raises:
        UserError: timm knows no such ViT; the weights cannot be had or do not fit.
    """
    import timm
    from timm.layers import Mlp
    from timm.models.vision_transformer import VisionTransformer

    _check_model(name, image_size)
    options: dict[str, Any] = {
        "num_classes": num_classes,
        "img_size": image_size,
        "proj_drop_rate": dropout,
        "pos_drop_rate": dropout,
        "drop_path_rate": drop_path,
    }
    if pretrained is None:
        model = _from_hub(name, options)
    else:
        model = timm.create_model(name, pretrained=False, **options)
        if pretrained != "none":
            _load_file(model, _weight_file(Path(pretrained)))
    assert isinstance(model, VisionTransformer)
    for module in model.modules():
        if isinstance(module, Mlp):
            module.drop1.p = 0.0
    return model


def _check_model(name: str, image_size: int) -> None:
    """See that the model is a ViT, and that images can be cut into its patches.

    Raises:
        UserError: it is none; images are smaller than a patch, or no whole number of patches.
    """
    import timm

    from unifmoe_dist.data.skeleton import without_storage

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise UserError(
            f"model.backbone {name!r} is not in timm's registry; "
            + (f"did you mean {' or '.join(near)}?" if near else f"the default is {DEFAULT_BACKBONE}.")
        )
    if not timm.models.is_model_in_modules(name, ["vision_transformer", "deit"]):
        raise UserError(f"model.backbone {name!r} is no ViT; choose one such as {DEFAULT_BACKBONE}.")
    with without_storage():
        skeleton: Any = timm.create_model(name, pretrained=False)
    patch = max(skeleton.patch_embed.patch_size)
    if image_size % patch:
        near = max(1, round(image_size / patch)) * patch
        raise UserError(
            f"data.image_size {image_size} is no multiple of {name}'s patches of {patch} pixels; use "
            f"{near}, for example."
        )


def _from_hub(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, pretrained=True, **options)
    except Exception as error:  # no network, a proxy, an offline switch: every hub client raises its own
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"the weights of {name} cannot be had from timm's hub ({type(error).__name__}: {why}); download them where "
            "there is a network and give --model.pretrained FILE (.safetensors, or .pth as DeiT publishes them), or "
            "--model.pretrained none for random weights."
        ) from error


def _weight_file(path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        named = [path / name for name in _WEIGHT_FILES if (path / name).is_file()]
        found = named[:1] or sorted(file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
        if len(found) == 1:
            return found[0]
        raise UserError(
            f"model.pretrained {path} holds {len(found)} weight files ({', '.join(_WEIGHT_SUFFIXES)}); give the file "
            "itself."
        )
    raise UserError(f"model.pretrained {path} does not exist; give a weight file, a folder with one, or none.")


def _load_file(model: Any, file: Path) -> None:
    """Load all weights but the classifier's, which are taken too where they fit."""
    from timm.models import load_state_dict
    from timm.models.vision_transformer import checkpoint_filter_fn

    named = model.pretrained_cfg.get("classifier") or "head"  # two of a distilled model
    heads = tuple(f"{name}." for name in ([named] if isinstance(named, str) else named))
    try:
        weights = checkpoint_filter_fn(load_state_dict(str(file), use_ema=False, weights_only=True), model)
        own = model.state_dict()
        weights = {
            name: weight
            for name, weight in weights.items()
            if not (name.startswith(heads) and name in own and own[name].shape != weight.shape)
        }
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except Exception as error:  # not a weight file, other shapes: torch, pickle and safetensors each raise their own
        why = " ".join(str(error).split())[:300]
        raise UserError(f"model.pretrained {file} does not fit the backbone ({why}); give its own weights.") from error
    missing = [name for name in missing if not name.startswith(heads)]
    if missing or unexpected:
        raise UserError(
            f"model.pretrained {file} does not fit the backbone: it lacks {len(missing)} weights"
            f"{f', such as {missing[0]}' if missing else ''}, and holds {len(unexpected)} others"
            f"{f', such as {unexpected[0]}' if unexpected else ''}; give the backbone's own weights."
        )
