"""Runs as plain models that need no job: one safetensors file, or a folder that Transformers or timm reads.

    consolidate(run, "model.safetensors")      load_consolidated("model.safetensors")
    export(run, "folder")                      load_exported("folder")

Both hold float32 weights under the names of a one-process model's `state_dict()`, with all experts stacked. A dense
twin's folder is an ordinary Transformers or timm folder.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from unifmoe_dist.algorithms import ALGORITHMS
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.vision_backbone import build_backbone
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import appearing, save_tensors
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.train import build, checkpoint
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.own_model import own_config, own_model
from unifmoe_dist.upcycling import enable_from_pretrained, upcycle
from unifmoe_dist.upcycling.convert import saved_arguments

FORMAT = "unifmoe-model-1"
WEIGHTS = "model.safetensors"


def consolidate(run: Path, output: Path, name: str = "best") -> Path:
    """Write a run's checkpoint, from any number of ranks, as one file; returns its path.

    The metadata of the file's header hold "format", "step", "config" (the run's options) and "model" (its shape).

    Args:
        run: The run's folder.
        output: The file to write; it appears once it is whole.
        name: "best", "latest" or "step-N".

    Raises:
        UserError: there is no such checkpoint, it is damaged, or the file exists.
    """
    config, model, step = _load_run(run, name)
    metadata = {
        "format": FORMAT,
        "step": str(step),
        "config": json.dumps(asdict(config)),
        "model": json.dumps(_describe(config, model)),
    }

    def write(temporary: Path) -> None:
        save_tensors(_own_memory(model), temporary, metadata)

    return _appear(output, write)


def load_consolidated(path: str | Path) -> nn.Module:
    """The model in a file written by `consolidate`, on the CPU, in evaluation mode.

    Raises:
        UserError: the file is missing, damaged, or not such a file.
    """
    try:
        with safe_open(path, "pt") as handle:
            metadata = handle.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise UserError(f"{path} was not written by launch/consolidate.py; give a file that was.")
        model = _skeleton(json.loads(metadata["model"]))
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is not a readable model file ({error}); consolidate the run again.") from error
    return model.eval()


def export(run: Path, output: Path, name: str = "best") -> Path:
    """Write a run's checkpoint as a folder in the layout of the model's own library; returns its path.

    Transformers: `save_pretrained`, with the tokenizer; `from_pretrained` reads it, UniF-MoE included, after
    `unifmoe_dist.enable_from_pretrained()`. timm: model.safetensors and config.json;
    `timm.create_model("local-dir:FOLDER", pretrained=True)` reads a dense twin, `load_exported` either.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or the folder exists.
    """
    config, model, _ = _load_run(run, name)
    shape = _describe(config, model)

    def write(temporary: Path) -> None:
        if shape["library"] == "transformers":
            model.save_pretrained(temporary)  # type: ignore[operator]
            find_task(config.data.task).tokenizer(own_config(run, config)).save_pretrained(str(temporary))
            return
        temporary.mkdir()
        save_tensors(_own_memory(model), temporary / WEIGHTS)
        (temporary / "config.json").write_text(json.dumps(_timm_config(shape), indent=2))

    return _appear(output, write)


def load_exported(folder: str | Path) -> nn.Module:
    """The model in a folder written by `export`, on the CPU, in evaluation mode.

    Raises:
        UserError: the folder holds no such model.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds no readable config.json ({error}); give a folder that launch/export.py wrote."
        ) from error
    if "architecture" in config:
        model = _skeleton({**config, "library": "timm", "moe": config.get("unif_moe")})
        model.load_state_dict(load_file(Path(folder) / WEIGHTS))
    else:
        enable_from_pretrained()
        model = _transformers_class(config).from_pretrained(folder, trust_remote_code=False)
    return model.eval()


# -- parts --------------------------------------------------------------------------------------------------------


def _load_run(run: Path, name: str) -> tuple[TrainConfig, nn.Module, int]:
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not a run; give the folder that a training run wrote.")
    config = load_train_config(str(run / "config.yaml"))
    folder = checkpoint.latest(run, name)
    config.parallel.gradient_checkpointing = False
    with torch.random.fork_rng(devices=[]):
        model = own_model(run, config)
    checkpoint.load_weights(folder, model)
    return config, model, int(checkpoint.load_progress(folder)["step"])


def _describe(config: TrainConfig, model: Any) -> dict[str, Any]:
    """What `_skeleton` needs to build the model without its data."""
    if hasattr(getattr(model, "config", None), "to_json_string"):
        values = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        return {"library": "transformers", "config": values}
    from unifmoe_dist.data.timm_models import DIGITS_CFG

    made = getattr(model, "pretrained_cfg", None) or DIGITS_CFG
    return {
        "library": "timm",
        "architecture": made["architecture"],
        "num_classes": model.num_classes,
        "pretrained_cfg": {k: v for k, v in made.items() if v is not None and k != "architecture"},
        "model_args": find_task(config.data.task).timm_arguments(config),
        "moe": _describe_layers(config),
        **ALGORITHMS[config.algorithm.name].deployed(config.algorithm),
    }


def _describe_layers(config: TrainConfig) -> dict[str, Any] | None:
    """Arguments of `upcycle`; None for a dense model."""
    method = method_of(config.model.moe)
    if not method.layer:
        return None
    own = build.layer_options(config)
    return {"layers": config.model.layers, "method": method.name, **own}


def _skeleton(shape: dict[str, Any]) -> nn.Module:
    """The model with whatever weights it starts from; leaves torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        if shape["library"] == "transformers":
            from transformers import AutoConfig

            enable_from_pretrained()
            values = dict(shape["config"])
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            return _transformers_class(shape["config"])(config)  # its layers come back as it is made
        import timm

        import unifmoe_dist.data.timm_models  # noqa: F401  registers digits_vit

        if not timm.is_model(shape["architecture"]):  # timm takes other names for places to fetch a model from
            raise UserError(f"the architecture {shape['architecture']!r} is not in timm's registry.")
        if options := shape.get("model_args"):
            size, dropout = options["img_size"], options["proj_drop_rate"]
            model = build_backbone(shape["architecture"], shape["num_classes"], size, "none", dropout=dropout)
        else:
            model = timm.create_model(shape["architecture"], num_classes=shape["num_classes"])
        if moe := shape["moe"]:
            former = moe.get("options", {})  # of earlier versions, for methods other than UniF-MoE
            model = upcycle(model, moe["layers"], **saved_arguments({**moe, **former}))
        for algorithm in ALGORITHMS.values():
            model = algorithm.adapt(model, shape)
        return model


def _transformers_class(config: dict[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, (config.get("architectures") or [""])[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UserError(f"config.json names the architectures {config.get('architectures')}, none of Transformers'.")
    return kind


def _timm_config(shape: dict[str, Any]) -> dict[str, Any]:
    """timm's config.json; what timm does not know stands beside it."""
    names = {"moe": "unif_moe"}
    return {names.get(key, key): value for key, value in shape.items() if value and key != "library"}


def _own_memory(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state, every tensor with memory of its own: safetensors takes no tied ones."""
    return {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}


def _appear(output: Path, write: Callable[[Path], None]) -> Path:
    if output.exists():
        raise UserError(f"{output} exists; remove it or give another --output.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with appearing(output) as temporary:
            write(temporary)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{output} could not be written ({error}); free space or give another --output.") from error
    return output
