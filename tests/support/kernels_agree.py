"""The grouped kernel against the reference, forward and backward."""

from __future__ import annotations

from unittest.mock import patch

import torch

from unifmoe_dist.kernels import grouped, grouped_block_ffn, reference_block_ffn


def assert_kernels_agree(x, gates, blocks, experts, grad, kept_ffns, chunk_rows, dropout=None):
    """Outputs and all gradients are equal; gates that are 0 have a gradient in the reference alone."""
    results = []
    for kernel in (reference_block_ffn, grouped_block_ffn):
        with patch.multiple(grouped, KEPT_FFNS=kept_ffns, CHUNK_ROWS=chunk_rows):
            y = kernel(x, gates, blocks, experts.weights(), dropout)
        results.append((y, torch.autograd.grad(y, [x, gates, *experts.parameters()], grad)))
    torch.testing.assert_close(results[0][0], results[1][0])
    for want, got in zip(results[0][1], results[1][1], strict=True):
        active = slice(None) if want.shape != gates.shape else (gates != 0)
        torch.testing.assert_close(want[active], got[active])
