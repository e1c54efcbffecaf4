"""Weights that others compute with, read where what wraps a module has them ready.

Sharding (FSDP, ZeRO 3), offloading and adapters prepare a module's weights before its `forward` runs, take them away
after it, and find out from the tensors that come out when to prepare them again for the backward pass. The router and
the banks of experts are such modules, though fused kernels need the weights of several of them at once: so they lend
themselves, inside their own forward, to whoever computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn

from unifmoe_dist.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

Result = TypeVar("Result")


class Lender(nn.Module):
    """A module whose forward lends it to a function."""

    main: ClassVar[tuple[str, int]]
    """Name and number of dimensions of the weight that tells whether all are here."""

    def forward(self, *tensors: Tensor | None, use: Callable[..., Result]) -> Result:
        """`use(self, *tensors)`.

        The tensors are those whose gradients tell a wrapper that it is done with the weights; `use` must take them
        from its arguments, since a wrapper may have moved them, and return tensors or tuples of tensors. The first is
        None where `use` itself looks whether the weights are here.

        Raises:
            UserError: the weights are not here, and the first tensor is.
        """
        weight = getattr(self, self.main[0])
        if tensors and tensors[0] is not None and not (weight.is_meta and tensors[0].is_meta):
            self.require_weights("A forward pass of the layer")
        return use(self, *tensors)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "parametrizations" and type(value) is nn.ModuleDict:
            value = _AnyNames()  # torch cannot parametrise a weight called "keys" or "values": ModuleDict has both
        super().__setattr__(name, value)

    def require_weights(self, wanted: str) -> None:
        """Refuse what cannot be done with weights that are not here.

        Raises:
            UserError: they are sharded, offloaded or on the meta device; the message says that `wanted` needs them.
        """
        if reason := self.absence():
            raise UserError(
                f"{wanted} needs weights that are {reason}; do it before the model is sharded or offloaded, or inside "
                "a context that gathers them."
            )

    def absence(self) -> str | None:
        """Why the weights cannot be read here, as words that follow "its weights are"; None if they can."""
        name, dims = self.main
        weight = getattr(self, name)
        if is_dtensor(weight):
            return "spread over ranks (DTensor)"
        if weight.is_meta:
            return "not in memory (offloaded, or on the meta device)"
        if weight.dim() != dims:
            return f"spread over ranks ({'ZeRO 3' if hasattr(weight, 'ds_status') else 'FSDP'})"
        if getattr(self, "_is_fsdp_managed_module", False) and not _stored(weight):
            return "spread over ranks (FSDP)"
        return None


class _AnyNames(nn.ModuleDict):
    """Modules by names that may be those of the dictionary's own methods; read them by index."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        assert module is not None
        self._modules[name] = module


def bare(module: Any) -> Any:
    """The lender below the adapters of PEFT that may stand in its place."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def is_quantised(tensor: Any) -> bool:
    """Whether torchao holds a weight in few bits, as a tensor of its own kind."""
    module = sys.modules.get("torchao.utils")
    return module is not None and isinstance(tensor, module.TorchAOBaseTensor)


def as_numbers(tensor: Any) -> Any:
    """A weight, or None, as kernels take it: one that is quantised is dequantised, for the time of its use."""
    return tensor.dequantize() if is_quantised(tensor) else tensor


def is_dtensor(tensor: Any) -> TypeIs[DTensor]:
    """`isinstance(tensor, DTensor)`, without importing DTensor: who has one has paid for that already."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def here(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks; else all of it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _stored(weight: Tensor) -> bool:
    """Whether a tensor's memory has not been taken away."""
    if weight.numel() == 0:
        return True
    last = sum((size - 1) * step for size, step in zip(weight.shape, weight.stride(), strict=True))
    return weight.untyped_storage().nbytes() >= (weight.storage_offset() + last + 1) * weight.element_size()
