"""DeepSpeed's engine as training uses it. No other file knows names of DeepSpeed that its documentation lacks.

    start         an engine around a training algorithm
    skip_update   gradients as the optimiser will use them, an update that is dropped
    collect       optimiser state by parameter, whole and in float32, whatever the ZeRO stage and world size

A parameter's state is `{"fp32": master weight, "exp_avg": ..., ...}`; the optimiser's scalars, such as Adam's step,
stand apart. Collecting, restoring and taking over are collective over the ranks that hold the parameter.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.config import OptimConfig, TrainConfig
from unifmoe_dist.engines import clip_by_true_norm
from unifmoe_dist.expert_layer import ChangedRows
from unifmoe_dist.runtime import compiling
from unifmoe_dist.runtime.ranks import Ranks

REDUCE_BUCKET = 500_000_000
"""DeepSpeed's own `reduce_bucket_size`, in elements."""


def reduce_bucket(model: nn.Module) -> int:
    """Elements of ZeRO's gradient bucket: no more than there are gradients.

    It is allocated whole in every backward pass, and DeepSpeed's default takes 2 GB in float32 for a model of any size.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return max(1, min(REDUCE_BUCKET, trained))


# -- start ----------------------------------------------------------------------------------------------------------


def start(
    config: TrainConfig,
    model: nn.Module,
    ranks: Ranks,
    optimizer: torch.optim.Optimizer,
    schedule: Callable[[torch.optim.Optimizer], Any],
    environments: int,
    folder: Path | None,
) -> Any:
    """DeepSpeed's engine around a training algorithm; collective.

    `schedule` makes the learning-rate schedule of an optimiser, `environments` multiplies the batch, which is given per
    environment, and `folder` gets TensorBoard's events; None writes none.
    """
    library = _library()
    with _without_inference_sums(), redirect_stdout(sys.stderr):  # a command's output is its own
        library.init_distributed(auto_mpi_discovery=False, verbose=False)
    groups: Any = import_module("deepspeed.utils.groups")
    groups._WORLD_GROUP = None  # of another job of this process, perhaps
    engine, *_ = library.initialize(
        # Else it takes the device of LOCAL_RANK, which is not there where a launcher shows each rank its own GPU alone.
        args=SimpleNamespace(device_rank=ranks.device.index) if ranks.device.type == "cuda" else None,
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=_settings(config, ranks.world_size, environments, reduce_bucket(model), folder),
    )
    if not engine.zero_optimization():
        clip_by_true_norm(engine)
    return engine


@contextmanager
def _without_inference_sums() -> Iterator[None]:
    """No extension for sums over CPU ranks: only tensor-parallel inference takes it, and it compiles for a minute."""
    backend: Any = import_module("deepspeed.comm.torch")
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        yield
    finally:
        backend.build_shm_op = build


def load_all() -> None:
    """Import what an engine would at its start or its first step, so that a meter can tell it from training."""
    _library()
    for name in ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.muon.muon_optimizer"):
        with suppress(ImportError):
            import_module(name)


def cpu_adam(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """Adam for offloaded state: compiled at first use, and several times as fast on a CPU as torch's."""
    _library()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    with compiling.announced(compiling.CPU_ADAM):
        return DeepSpeedCPUAdam(groups, lr=optim.lr, betas=optim.betas, adamw_mode=optim.name == "adamw")


def _library() -> Any:
    if not torch.accelerator.is_available():
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it misses CUDA where there is none
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no other
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    return deepspeed


def _settings(
    config: TrainConfig, world_size: int, environments: int, bucket: int, folder: Path | None
) -> dict[str, Any]:
    parallel, batch = config.parallel, config.data.batch_size * environments
    events = {"enabled": folder is not None, "output_path": f"{folder}/tensorboard", "job_name": "train"}
    result: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // world_size // parallel.gradient_accumulation,
        "gradient_accumulation_steps": parallel.gradient_accumulation,
        "gradient_clipping": config.optim.grad_clip,
        "zero_optimization": {
            "stage": parallel.zero_stage,
            "reduce_bucket_size": bucket,
            "offload_optimizer": {"device": "cpu" if parallel.offload_optimizer else "none"},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "tensorboard": events,
    }
    if parallel.precision == "bf16":
        result["bf16"] = {"enabled": True}
    elif parallel.precision == "fp16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 12}
    return result


# -- gradients ------------------------------------------------------------------------------------------------------


def held_gradients(engine: Any) -> Iterator[Tensor]:
    """Gradients as the optimiser will use them, as far as this rank holds them."""
    if not _is_partitioned(engine):
        yield from (p.grad for p in engine.module.parameters() if p.grad is not None)
        return
    zero = engine.optimizer
    for part in getattr(zero, "averaged_gradients", {}).values():
        yield from (g for g in part or () if g is not None)
    for flat in zero.single_partition_of_fp32_groups:  # where offloaded gradients are
        if flat.grad is not None:
            yield flat.grad


def skip_update(engine: Any) -> None:
    """`engine.step()` that drops the gradients: weights, optimiser state and schedule stay as they are."""
    if _is_partitioned(engine):
        # The way DeepSpeed drops a step itself: the optimiser hears that its gradients overflowed.
        zero, checks = engine.optimizer, engine.optimizer.check_grad_overflow
        zero.check_grad_overflow, zero.has_overflow = True, lambda *_, **__: True
        try:
            engine.step()
        finally:
            zero.check_grad_overflow = checks
            del zero.has_overflow
        return
    engine._take_model_step = lambda _: engine.zero_grad()
    try:
        engine.step()
    finally:
        del engine._take_model_step


# -- optimiser state ------------------------------------------------------------------------------------------------


def _is_partitioned(engine: Any) -> bool:
    """Whether ZeRO holds the optimiser state in flat partitions."""
    return hasattr(engine.optimizer, "single_partition_of_fp32_groups")


def collect(engine: Any, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Whole float32 state of every trained parameter by name, on the CPU."""
    keys = _link(engine.optimizer) if _is_partitioned(engine) else []
    return {name: _collect_one(engine, p, keys) for name, p in model.named_parameters() if p.requires_grad}


def _collect_one(engine: Any, parameter: Any, keys: list[str]) -> dict[str, Tensor]:
    if _is_partitioned(engine):
        state = {"fp32": parameter.get_full_hp_param(), **{key: parameter.get_full_hp_param(key) for key in keys}}
        return {key: value.detach().cpu() for key, value in state.items()}
    tensors = engine.optimizer.state.get(parameter, {})
    state = {k: v for k, v in tensors.items() if torch.is_tensor(v) and v.shape == parameter.shape}
    return {key: value.detach().float().cpu() for key, value in {"fp32": parameter, **state}.items()}


def collect_scalars(engine: Any) -> dict[str, Any]:
    """What is the same for all parameters: the optimiser's own counters, and the state of fp16's loss scaler."""
    base = engine.optimizer.optimizer if _is_partitioned(engine) else engine.optimizer
    state: dict[str, Any] = next(iter(base.state.values()), {})
    scaler = _loss_scaler(engine)
    return {
        "optimizer_scalars": {k: float(v) for k, v in state.items() if not torch.is_tensor(v) or v.ndim == 0},
        "loss_scaler": {k: v for k, v in scaler.items() if isinstance(v, (int, float))},
    }


def restore(engine: Any, states: dict[Any, dict[str, Tensor]], saved: dict[str, Any]) -> None:
    """Put whole states (from any world size and ZeRO stage) and `collect_scalars` into a freshly made engine."""
    scaler = _loss_scaler(engine)
    scaler.update({key: value for key, value in saved["loss_scaler"].items() if key in scaler})

    def scalars() -> dict[str, Tensor]:
        return {key: torch.tensor(value) for key, value in saved["optimizer_scalars"].items()}

    keys = sorted({key for state in states.values() for key in state} - {"fp32"})
    zero = engine.optimizer
    if _is_partitioned(engine) and keys:
        for flat in zero.single_partition_of_fp32_groups:
            zero.optimizer.state[flat] = {**{k: torch.zeros_like(flat) for k in keys}, **scalars()}
        _link(zero)
    for parameter, state in states.items():
        with torch.no_grad():
            parameter.copy_(state["fp32"])
        if _is_partitioned(engine):
            parameter.set_full_hp_param(state["fp32"])
            for key in keys:
                parameter.set_full_hp_param(state[key], key)
        elif keys:
            own = {key: state[key].to(parameter.device, parameter.dtype) for key in keys}
            zero.state[parameter] = {**own, **scalars()}


@torch.no_grad()
def take_over(engine: Any, changes: list[ChangedRows]) -> None:
    """Give rows that were rewritten in place to the optimiser.

    Without it ZeRO would overwrite them at the next step from its own master weights.
    """
    keys = _link(engine.optimizer) if changes and _is_partitioned(engine) else []
    for change in changes:
        parameter: Any = change.parameter
        if not _is_partitioned(engine):
            for state in engine.optimizer.state.get(parameter, {}).values():
                if change.forget and torch.is_tensor(state) and state.shape == parameter.shape:
                    state[change.rows] = 0
            continue
        master = parameter.get_full_hp_param()
        master[change.rows] = parameter[change.rows].to(master)
        parameter.set_full_hp_param(master)
        for key in keys if change.forget else []:
            state = parameter.get_full_hp_param(key)
            state[change.rows] = 0
            parameter.set_full_hp_param(state, key)


def _loss_scaler(engine: Any) -> dict[str, Any]:
    """The attributes of the loss scaler; without ZeRO there is none."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {} if scaler is None else vars(scaler)


def _link(zero: Any) -> list[str]:
    """Connect every parameter to its part of the flat state, and name the state's tensors.

    DeepSpeed does this itself after the first step, but only for the first parameter group.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    keys: list[str] = []
    for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        state = zero.optimizer.state.get(flat, {})
        lazy_init_hp_params_optimizer_state(parameters, flat, {flat: state})
        keys = sorted(k for k, v in state.items() if torch.is_tensor(v) and v.shape == flat.shape)
    return keys
