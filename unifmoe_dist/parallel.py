"""For training loops of one's own whose experts are spread over ranks, on DDP, FSDP 2 or neither: files and clipping.

Distributed checkpoints need nothing of it: `model.state_dict()` and an optimiser's tell them which experts are whose.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_gradients import clip_by_norm_over_ranks
from unifmoe_dist.lending import is_dtensor


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` by the norm of all ranks' gradients, every expert's once; collective.

    Args:
        model: With plain parameters, or sharded by FSDP 2; experts may be spread over ranks.
        max_norm: The largest norm that the gradients may have.
        norm_type: p of the p-norm; may be `inf`.
        error_if_nonfinite: Whether a norm that is no finite number raises.

    Returns:
        The norm before, a scalar, the same on all ranks.
    """
    return clip_by_norm_over_ranks(model.parameters(), max_norm, norm_type, error_if_nonfinite)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole model's `state_dict` on the CPU, as if on one rank: for `torch.save`, or safetensors; collective.

    Names are those of the bare model, below DistributedDataParallel, FSDP 2, an engine of DeepSpeed and torch.compile.

    Returns:
        On rank 0 the state, on other ranks nothing.

    Raises:
        UserError: ZeRO 3 has spread the weights; or adapters stand on experts that are spread over ranks.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(_whole_here(model), options=StateDictOptions(full_state_dict=True, cpu_offload=True))


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Any] | None) -> None:
    """Load what `full_state_dict` gave, or the state of a model on one rank, whatever the ranks here; collective.

    Args:
        model: As `full_state_dict` takes it.
        state: The state on rank 0; what other ranks give is not read.

    Raises:
        UserError: names or shapes are not those of the model.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.tensor import distribute_tensor

    own: dict[str, Any] = get_model_state_dict(_whole_here(model))
    _compare({name: tuple(value.shape) for name, value in own.items() if isinstance(value, Tensor)}, state)
    for name, value in own.items():
        if not isinstance(value, Tensor):
            continue
        whole = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if state is not None and _rank() == 0:
            whole.copy_(state[name])
        if dist.is_initialized():
            dist.broadcast(whole, 0)
        if is_dtensor(value):
            whole = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)
        value.copy_(whole)
    if any(getattr(module, "columns", None) is not None for module in model.modules()):
        set_model_state_dict(_whole_here(model), own)  # experts that were moved stand in a state as copies


def _whole_here(model: nn.Module) -> nn.Module:
    """The model inside an engine of DeepSpeed, if it is one; ZeRO 3's parts are refused."""
    if any(getattr(p, "ds_numel", p.numel()) != p.numel() for p in model.parameters()):
        raise UserError(
            "ZeRO 3 has spread the model's weights; call this inside deepspeed.zero.GatheredParameters("
            "list(model.parameters()), modifier_rank=0), or use engine.save_16bit_model."
        )
    engine: Any = sys.modules.get("deepspeed.runtime.engine")
    return model.module if engine is not None and isinstance(model, engine.DeepSpeedEngine) else model


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _compare(own: dict[str, tuple[int, ...]], state: Mapping[str, Any] | None) -> None:
    """Raise UserError on all ranks where rank 0's state is not that of such a model."""
    message: list[str | None] = [None]
    if _rank() == 0:
        given = {name: tuple(value.shape) for name, value in (state or {}).items() if isinstance(value, Tensor)}
        for name in [*own, *given]:
            if own.get(name) != given.get(name):
                message = [f"{name} has shape {given.get(name)} in the state, but {own.get(name)} in the model"]
                break
    if dist.is_initialized():
        dist.broadcast_object_list(message, 0)
    if message[0] is not None:
        raise UserError(f"{message[0]}; load a state of the same model, upcycled in the same way.")
