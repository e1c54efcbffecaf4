"""Experts that are spread over ranks are no replicas: refusing what would take them for such.

DDP and FSDP give every rank the first rank's experts, or average their gradients over ranks that hold others; a
distributed checkpoint keeps one rank's part under each name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unifmoe_dist.eager import not_compiled
from unifmoe_dist.errors import UserError


@not_compiled
def refuse_replicated(experts: nn.Module) -> None:
    """Refuse a forward pass of a bank of experts, held by this rank alone, inside what keeps ranks' parameters equal.

    Raises:
        UserError: naming it.
    """
    own = list(experts.parameters())
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None and any(p is q for p in own for q in ddp._module_parameters):
        raise _refusal("DistributedDataParallel")
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in experts.modules()):
        raise _refusal("FSDP")


def _refusal(who: str) -> UserError:
    return UserError(
        f"The experts are spread over ranks by expert_group, but {who} treats them as copies of each other and trains "
        "the wrong ones; train with launch/train.py, or give upcycle no expert_group."
    )


# What a tensor's copies are made with; all else gives plain tensors.
_COPIES = {
    Tensor.detach,
    Tensor.clone,
    Tensor.to,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.contiguous,
    Tensor.new_empty,
    torch.empty_like,
    torch.clone,
}


class ExpertPart(Tensor):
    """This rank's part of the experts' weights, in a state_dict.

    It is a tensor like any other, and saved as one, except that a distributed checkpoint does not take it: there every
    rank's part has the same name, and all but one would be dropped.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func in _COPIES and type(result) is Tensor else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __create_write_items__(self, name: str, value: Any) -> Any:
        raise _no_checkpoint(f"save {name} to")

    def __create_chunk_list__(self) -> Any:
        raise _no_checkpoint("load experts from")


def _no_checkpoint(what: str) -> UserError:
    return UserError(
        f"Cannot {what} a distributed checkpoint: the experts are spread over ranks by expert_group, and all but one "
        "rank's would be lost; save a state_dict() on every rank with torch.save, or train with launch/train.py."
    )


def unmarked(tensor: Any) -> Any:
    """What a module may take as its parameter: a part is a plain tensor again, anything else stays as it is."""
    return tensor.as_subclass(Tensor) if type(tensor) is ExpertPart else tensor


def mark_parts(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook of a bank of experts that this rank alone holds."""
    for name, _ in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if type(value) is Tensor:
            state_dict[prefix + name] = value.as_subclass(ExpertPart)
