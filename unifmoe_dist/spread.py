"""Whether a tensor is spread over ranks, without importing DTensor: who has one has paid for that already."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Any) -> TypeIs[DTensor]:
    """`isinstance(tensor, DTensor)`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
