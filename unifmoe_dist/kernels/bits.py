"""Block masks as bits, so that a mask adds B / 8 numbers to a row that travels."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(mask: Tensor) -> Tensor:
    """(N, B) bool -> (N, ceil(B / 8)) uint8, lowest bit first."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 8)).view(mask.shape[0], (mask.shape[1] + 7) // 8, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, num_blocks: int) -> Tensor:
    """(N, ceil(B / 8)) uint8 -> (N, B) bool, the inverse of `pack_bits`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :num_blocks]
