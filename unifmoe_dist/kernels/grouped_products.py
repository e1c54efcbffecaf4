"""Matrix products of consecutive groups of rows, each with a matrix of its own.

Shapes carry suffixes: R rows, G groups, I and O input and output widths. On the CPU `torch.nn.functional.grouped_mm`
makes one call of all groups, which matters where they are small; it takes rows of whole 16 bytes only, and on a GPU
one call per group costs no more than the loop that it falls back to outside bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)  # older releases of torch lack it
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_product(x_RI: Tensor, weights_GIO: Tensor, sizes: list[int], ends_G: Tensor) -> Tensor:
    """(R, O): the rows of group g times weights[g]. `sizes` are lengths of groups, `ends_G` (int32, CPU) their ends."""
    if _one_call(x_RI, *weights_GIO.shape[1:]):
        return _grouped_mm(x_RI, weights_GIO, offs=ends_G)  # type: ignore[misc]
    parts = [rows @ weights for rows, weights in zip(x_RI.split(sizes), weights_GIO, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def grouped_outer(a_RI: Tensor, b_RO: Tensor, sizes: list[int], ends_G: Tensor) -> Tensor:
    """(G, I, O): for every group the sum over its rows of a[r]^T b[r], which is the gradient of its weights."""
    if _one_call(a_RI, a_RI.shape[1], b_RO.shape[1]):
        return _grouped_mm(a_RI.T, b_RO, offs=ends_G)  # type: ignore[misc]
    return torch.stack([a.T @ b for a, b in zip(a_RI.split(sizes), b_RO.split(sizes), strict=True)])


def _one_call(x: Tensor, *widths: int) -> bool:
    if _grouped_mm is None or torch._C._len_torch_dispatch_stack():  # what counts operations knows plain products
        return False
    aligned = all(width * x.element_size() % 16 == 0 for width in widths)
    return x.device.type == "cpu" and x.dtype in _DTYPES and aligned
