"""The residual reconstruction problem of every token, reduced to what any expert order and any router need.

With R(x) (K, d) the residual outputs of all experts and r(x) the target (eqs. diagnostic-original to
diagnostic-residual-basis), the error of coefficients a is

    ||a^T R - r||^2 = a^T G a - 2 a^T c + ||r||^2,     G = R R^T,  c = R r,

so K (K + 1) + 2 numbers per token replace its K d outputs. Everything is float64: errors below about 1e-7 of the
target drown in rounding, tolerances of interest are 1e-2 and above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from unifmoe_dist.studies.diagnostics.alignment import SharedSets
from unifmoe_dist.studies.diagnostics.channels import FrozenExperts
from unifmoe_dist.studies.diagnostics.pairs import expert_pairs

Averaging = Literal["gates", "uniform"]
"""How the two shared responses are merged: by the original gates (eq. diagnostic-shared), or by one half each."""


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
class Problems:
    """What a layer's tokens ask for, under the three readings that the study compares.

    Args:
        residual: Residual target and residual outputs, shared responses merged by the gates.
        uniform: The same, merged by one half each.
        complete: Nothing extracted: the original output from complete experts, for the control.
    """

    residual: Reconstruction
    uniform: Reconstruction
    complete: Reconstruction


@dataclass(frozen=True)
class Responses:
    """Outputs of n tokens, split at the shared set of each token's original pair; dtype of the experts.

    Args:
        gates: (n, K), s~: the pair's original gates, renormalised; 0 elsewhere.
        shared: (n, K, d), shared part of every expert's output.
        residual: (n, K, d), the rest of it.
    """

    gates: Tensor
    shared: Tensor
    residual: Tensor

    @property
    def original(self) -> Tensor:
        """(n, d), y_orig of eq. diagnostic-original."""
        return torch.einsum("nk,nkd->nd", self.gates, self.shared + self.residual)

    def merged(self, averaging: Averaging) -> Tensor:
        """(n, d), the shared responses of the pair, merged once."""
        weights = self.gates if averaging == "gates" else (self.gates > 0).to(self.gates) / 2
        return torch.einsum("nk,nkd->nd", weights, self.shared)


def responses(experts: FrozenExperts, shared: Tensor, pair: Tensor, scores: Tensor, x: Tensor) -> Responses:
    """Compute all experts on n tokens.

    Args:
        experts: The experts.
        shared: (P, C) bool, shared channels of every pair.
        pair: (n,) original top-2 pair of each token.
        scores: (n, K) original scores s(x).
        x: (n, d) tokens.
    """
    hidden = experts.activations(x)
    members = expert_pairs(experts.num_experts).to(x.device)[pair]
    chosen = scores.to(hidden.dtype).gather(1, members)
    gates = chosen.new_zeros(len(x), experts.num_experts).scatter(1, members, chosen / chosen.sum(1, keepdim=True))
    common = shared[pair].to(hidden.dtype)
    return Responses(
        gates,
        torch.bmm(hidden * common, experts.values).transpose(0, 1),
        torch.bmm(hidden * (1 - common), experts.values).transpose(0, 1),
    )


def reconstruction_problems(
    experts: FrozenExperts, sets: SharedSets, pair: Tensor, scores: Tensor, x: Tensor, chunk: int = 1024
) -> Problems:
    """The problems of N tokens, `chunk` of them at a time: memory holds some chunk (C + d) K numbers, whatever N is.

    Arguments are those of `responses`, over N tokens.
    """
    parts = []
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        part = responses(experts, sets.shared, pair[rows], scores[rows], x[rows])
        y = part.original
        parts.append(
            (
                _problem(part.residual, y - part.merged("gates"), y),
                _problem(part.residual, y - part.merged("uniform"), y),
                _problem(part.residual + part.shared, y, y),
            )
        )
    return Problems(*(_join(column) for column in zip(*parts, strict=True)))


def _problem(outputs: Tensor, target: Tensor, original: Tensor) -> Reconstruction:
    return Reconstruction(
        outputs @ outputs.mT,
        (outputs @ target[:, :, None]).squeeze(2),
        target.square().sum(1),
        original.square().sum(1),
    )


def _join(parts: Sequence[Reconstruction]) -> Reconstruction:
    names = [field.name for field in fields(Reconstruction)]
    return Reconstruction(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
