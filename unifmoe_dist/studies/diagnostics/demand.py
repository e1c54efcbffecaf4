"""Functional demand: how many ordered residual experts recover a token's output (eqs. diagnostic-projection to
functional-demand of the paper)."""

from __future__ import annotations

import torch
from torch import Tensor

from unifmoe_dist.studies.diagnostics.reconstruction import Reconstruction

RIDGE = 1e-6
ETA = 1e-12


def prefix_errors(problem: Reconstruction, order: Tensor) -> Tensor:
    """e_m(x) for every prefix m = 1..K of an expert order.

    Each prefix is one batched solve of `(R_m R_m^T + gamma_m I) a = R_m r` with
    `gamma_m = 1e-6 tr(R_m R_m^T) / m`. Where all m residual outputs are 0, a = 0.

    Args:
        problem: N reconstruction problems.
        order: (N, K) int64, q_1(x)..q_K(x).

    Returns:
        (N, K) float64, relative errors.
    """
    num_tokens, num_experts = order.shape
    rows = torch.arange(num_tokens, device=order.device)[:, None, None]
    gram = problem.gram[rows, order[:, :, None], order[:, None, :]]
    products = problem.products.gather(1, order)
    scale = problem.output_square.sqrt().clamp(min=ETA)
    errors = []
    for m in range(1, num_experts + 1):
        leading, right = gram[:, :m, :m], products[:, :m]
        trace = leading.diagonal(dim1=1, dim2=2).sum(1)
        ridge = torch.where(trace > 0, RIDGE * trace / m, 1.0)
        eye = torch.eye(m, dtype=gram.dtype, device=gram.device)
        a = torch.linalg.solve(leading + ridge[:, None, None] * eye, right[:, :, None]).squeeze(2)
        quadratic = torch.einsum("nk,nkl,nl->n", a, leading, a)
        square = quadratic - 2 * (a * right).sum(1) + problem.target_square
        errors.append(square.clamp(min=0).sqrt() / scale)
    return torch.stack(errors, dim=1)


def functional_demand(errors: Tensor, epsilon: float) -> Tensor:
    """k_eps (N,) int64: the first prefix whose error (N, K) is at most epsilon, or K + 1 where none is."""
    attained = errors <= epsilon
    first = attained.long().argmax(1) + 1
    return torch.where(attained.any(1), first, errors.shape[1] + 1)
