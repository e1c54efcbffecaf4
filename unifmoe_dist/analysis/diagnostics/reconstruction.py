"""The residual reconstruction problem of every token, reduced to what any expert order and any router need.

With R(x) (K, d) the residual outputs of all experts and r(x) the target (eqs. diagnostic-original to
diagnostic-residual-basis), the error of coefficients a is

    ||a^T R - r||^2 = a^T G a - 2 a^T c + ||r||^2,     G = R R^T,  c = R r,

so K (K + 1) + 2 numbers per token replace its K d outputs. Everything is float64: errors below about 1e-7 of the
target drown in rounding, tolerances of interest are 1e-2 and above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unifmoe_dist.analysis.diagnostics.alignment import SharedSets
from unifmoe_dist.analysis.diagnostics.experts import FrozenExperts
from unifmoe_dist.analysis.diagnostics.pairs import expert_pairs

Averaging = Literal["gates", "uniform"]


@dataclass(frozen=True)
class Reconstruction:
    """One problem per token.

    Args:
        gram: (N, K, K), G of the residual outputs, experts in their own order.
        products: (N, K), c: products of the residual outputs with the target.
        target_square: (N,), ||r||^2.
        output_square: (N,), ||y_orig||^2.
    """

    gram: Tensor
    products: Tensor
    target_square: Tensor
    output_square: Tensor

    def squared_error(self, coefficients: Tensor) -> Tensor:
        """(N,) ||a^T R - r||^2 of coefficients (N, K); also that of the whole output, which adds S to both."""
        quadratic = torch.einsum("nk,nkl,nl->n", coefficients, self.gram, coefficients)
        return (quadratic - 2 * (coefficients * self.products).sum(1) + self.target_square).clamp(min=0)


@dataclass(frozen=True)
class Responses:
    """Outputs of n tokens: original (n, d), shared (n, d), residual of every expert (n, K, d); dtype of the experts."""

    original: Tensor
    shared: Tensor
    residual: Tensor


def responses(
    experts: FrozenExperts, shared: Tensor, pair: Tensor, scores: Tensor, x: Tensor, averaging: Averaging
) -> Responses:
    """Split the response of every token's original pair into a shared and a residual part.

    Args:
        experts: The experts.
        shared: (P, C) bool, shared channels of every pair.
        pair: (n,) original top-2 pair of each token.
        scores: (n, K) original gates s(x), of which the two largest are renormalised.
        x: (n, d) tokens.
        averaging: "gates" merges the shared responses by the original gates (eq. diagnostic-shared); "uniform" by one
            half each, the paper's variant. The original output always keeps its gates.
    """
    hidden = experts.activations(x)
    members = expert_pairs(experts.num_experts).to(x.device)[pair]
    chosen = scores.to(hidden.dtype).gather(1, members)
    none = chosen.new_zeros(len(x), experts.num_experts)
    gates = none.scatter(1, members, chosen / chosen.sum(1, keepdim=True))
    merge = none.scatter(1, members, 0.5) if averaging == "uniform" else gates

    common = shared[pair].to(hidden.dtype)
    by_expert = torch.bmm(hidden * common, experts.values).transpose(0, 1)
    residual = torch.bmm(hidden * (1 - common), experts.values).transpose(0, 1)
    merged = torch.einsum("nk,nkd->nd", merge, by_expert)
    original = torch.einsum("nk,nkd->nd", gates, by_expert + residual)
    return Responses(original, merged, residual)


def reconstruction_problems(
    experts: FrozenExperts,
    sets: SharedSets,
    pair: Tensor,
    scores: Tensor,
    x: Tensor,
    averaging: Averaging = "gates",
    chunk: int = 1024,
) -> Reconstruction:
    """The problems of N tokens, `chunk` of them at a time: memory holds chunk (C + 2 d) K numbers, whatever N is.

    Arguments are those of `responses`, over N tokens.
    """
    parts = []
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        part = responses(experts, sets.shared, pair[rows], scores[rows], x[rows], averaging)
        target = part.original - part.shared
        parts.append(
            (
                part.residual @ part.residual.mT,
                (part.residual @ target[:, :, None]).squeeze(2),
                target.square().sum(1),
                part.original.square().sum(1),
            )
        )
    return Reconstruction(*(torch.cat(column) for column in zip(*parts, strict=True)))
