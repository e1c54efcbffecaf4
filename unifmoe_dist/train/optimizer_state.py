"""Optimiser state of a DeepSpeed engine by parameter, whole and in float32, whatever the ZeRO stage and world size.

A state is `{"fp32": master weight, "exp_avg": ..., ...}` per parameter and the optimiser's scalars (such as Adam's
step) apart. Collecting a parameter's state is collective over the ranks that hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.expert_layer import ChangedRows


def is_partitioned(engine: Any) -> bool:
    """Whether ZeRO holds the optimiser state in flat partitions."""
    return hasattr(engine.optimizer, "single_partition_of_fp32_groups")


def collect(engine: Any, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Whole float32 state of every trained parameter by name, on the CPU."""
    keys = _link(engine.optimizer) if is_partitioned(engine) else []
    return {name: _collect_one(engine, p, keys) for name, p in model.named_parameters() if p.requires_grad}


def _collect_one(engine: Any, parameter: Any, keys: list[str]) -> dict[str, Tensor]:
    if not is_partitioned(engine):
        state = engine.optimizer.state.get(parameter, {})
        tensors = {k: v for k, v in state.items() if torch.is_tensor(v) and v.shape == parameter.shape}
        return {"fp32": parameter.detach().float().cpu(), **{k: v.detach().float().cpu() for k, v in tensors.items()}}
    state = {"fp32": parameter.get_full_hp_param()}
    state.update({key: parameter.get_full_hp_param(key) for key in keys})
    return {key: value.detach().cpu() for key, value in state.items()}


def collect_scalars(engine: Any) -> dict[str, float]:
    """The optimiser's own counters; the same for every parameter."""
    base = engine.optimizer.optimizer if is_partitioned(engine) else engine.optimizer
    for state in base.state.values():
        return {k: float(v) for k, v in state.items() if not torch.is_tensor(v) or v.ndim == 0}
    return {}


def restore(engine: Any, states: dict[Any, dict[str, Tensor]], scalars: dict[str, float]) -> None:
    """Put whole states (from any world size and ZeRO stage) into a freshly made engine."""
    keys = sorted({key for state in states.values() for key in state} - {"fp32"})
    if not is_partitioned(engine):
        for parameter, state in states.items():
            with torch.no_grad():
                parameter.copy_(state["fp32"])
            if keys:
                engine.optimizer.state[parameter] = {
                    **{key: state[key].to(parameter.device, parameter.dtype) for key in keys},
                    **{key: torch.tensor(value) for key, value in scalars.items()},
                }
        return
    zero = engine.optimizer
    if keys:
        for flat in zero.single_partition_of_fp32_groups:
            zero.optimizer.state[flat] = {
                **{key: torch.zeros_like(flat) for key in keys},
                **{key: torch.tensor(value) for key, value in scalars.items()},
            }
        _link(zero)
    for parameter, state in states.items():
        parameter.set_full_hp_param(state["fp32"])
        for key in keys:
            parameter.set_full_hp_param(state[key], key)
        with torch.no_grad():
            parameter.copy_(state["fp32"])


@torch.no_grad()
def take_over(engine: Any, changes: list[ChangedRows]) -> None:
    """Give rows that were rewritten in place to the optimiser; collective over the ranks that hold the parameter.

    Without it ZeRO would overwrite them at the next step from its own master weights.
    """
    keys = _link(engine.optimizer) if changes and is_partitioned(engine) else []
    for change in changes:
        parameter: Any = change.parameter
        if not is_partitioned(engine):
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
