"""The residual reconstruction problem of every token, and how many ordered residual experts solve it (eqs.
diagnostic-original to functional-demand of the paper).

With R(x) (K, d) the residual outputs of all experts and r(x) the target, the error of coefficients a is

    ||a^T R - r||^2 = a^T G a - 2 a^T c + ||r||^2,     G = R R^T,  c = R r,

so K (K + 1) + 2 numbers per token replace its K d outputs. Everything is float64: errors below about 1e-7 of the
target drown in rounding, tolerances of interest are 1e-2 and above.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unifmoe_dist.studies.diagnostics.rankings import expert_pairs
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts, SharedSets

RIDGE = 1e-6
ETA = 1e-12


class Reconstruction(NamedTuple):
    """One problem per token."""

    gram: Tensor  # (N, K, K), G of the residual outputs, experts in their own order
    products: Tensor  # (N, K), c: products of the residual outputs with the target
    target_square: Tensor  # (N,), ||r||^2
    output_square: Tensor  # (N,), ||y_orig||^2

    @staticmethod
    def of(outputs: Tensor, target: Tensor, original: Tensor) -> Reconstruction:
        """From outputs (N, K, d), targets and original outputs (N, d)."""
        products = (outputs @ target[:, :, None]).squeeze(2)
        return Reconstruction(outputs @ outputs.mT, products, target.square().sum(1), original.square().sum(1))

    def rows(self, chosen: Tensor) -> Reconstruction:
        """The problems of some tokens."""
        return Reconstruction(*(column[chosen] for column in self))

    def squared_error(self, coefficients: Tensor) -> Tensor:
        """(N,) ||a^T R - r||^2 of coefficients (N, K); also that of the whole output, which adds S to both."""
        quadratic = torch.einsum("nk,nkl,nl->n", coefficients, self.gram, coefficients)
        return (quadratic - 2 * (coefficients * self.products).sum(1) + self.target_square).clamp(min=0)


class Problems(NamedTuple):
    """What a layer's tokens ask for, under the three readings that the study compares."""

    residual: Reconstruction  # residual target and residual outputs, shared responses merged by the gates
    uniform: Reconstruction  # the same, merged by one half each
    complete: Reconstruction  # nothing extracted: the original output from complete experts, for the control


class Responses(NamedTuple):
    """Outputs of n tokens, split at the shared set of each token's original pair; dtype of the experts."""

    gates: Tensor  # (n, K), s~: the pair's original gates, renormalised; 0 elsewhere
    shared: Tensor  # (n, K, d), shared part of every expert's output
    residual: Tensor  # (n, K, d), the rest of it

    @property
    def original(self) -> Tensor:
        """(n, d), y_orig of eq. diagnostic-original."""
        return torch.einsum("nk,nkd->nd", self.gates, self.shared + self.residual)

    def merged(self, averaging: Literal["gates", "uniform"]) -> Tensor:
        """(n, d), the pair's shared responses, merged by the original gates (eq. diagnostic-shared) or by one half."""
        weights = self.gates if averaging == "gates" else (self.gates > 0).to(self.gates) / 2
        return torch.einsum("nk,nkd->nd", weights, self.shared)


def responses(experts: FrozenExperts, shared: Tensor, pair: Tensor, scores: Tensor, x: Tensor) -> Responses:
    """All experts on n tokens x (n, d) with original scores s(x) (n, K), whose top-2 is `pair` (n,).

    `shared` (P, C) are the shared channels of every pair.
    """
    hidden = experts.activations(x)
    members = expert_pairs(experts.num_experts).to(x.device)[pair]
    chosen = scores.to(hidden.dtype).gather(1, members)
    gates = chosen.new_zeros(len(x), experts.num_experts).scatter(1, members, chosen / chosen.sum(1, keepdim=True))
    common = shared[pair].to(hidden.dtype)
    parts = (torch.bmm(hidden * channels, experts.values).transpose(0, 1) for channels in (common, 1 - common))
    return Responses(gates, *parts)


def reconstruction_problems(
    experts: FrozenExperts, sets: SharedSets, pair: Tensor, scores: Tensor, x: Tensor, chunk: int = 1024
) -> Problems:
    """The problems of N tokens, `chunk` of them at a time: memory holds some chunk (C + d) K numbers, whatever N is.

    Arguments are those of `responses`, over N tokens.
    """
    chunks = []
    for rows in torch.arange(len(x), device=x.device).split(chunk):
        part = responses(experts, sets.shared, pair[rows], scores[rows], x[rows])
        y = part.original
        chunks.append(
            (
                Reconstruction.of(part.residual, y - part.merged("gates"), y),
                Reconstruction.of(part.residual, y - part.merged("uniform"), y),
                Reconstruction.of(part.residual + part.shared, y, y),
            )
        )
    joined = (Reconstruction(*map(torch.cat, zip(*parts, strict=True))) for parts in zip(*chunks, strict=True))
    return Problems(*joined)


def prefix_errors(problem: Reconstruction, order: Tensor) -> Tensor:
    """e_m(x) (N, K) float64 for every prefix m = 1..K of an expert order (N, K), q_1(x)..q_K(x).

    Each prefix is one batched solve of `(R_m R_m^T + gamma_m I) a = R_m r` with
    `gamma_m = 1e-6 tr(R_m R_m^T) / m`. Where all m residual outputs are 0, a = 0.
    """
    rows = torch.arange(len(order), device=order.device)[:, None, None]
    gram = problem.gram[rows, order[:, :, None], order[:, None, :]]
    products = problem.products.gather(1, order)
    errors = []
    for m in range(1, order.shape[1] + 1):
        leading = problem._replace(gram=gram[:, :m, :m], products=products[:, :m])
        trace = leading.gram.diagonal(dim1=1, dim2=2).sum(1)
        ridge = torch.where(trace > 0, RIDGE * trace / m, 1.0)
        eye = torch.eye(m, dtype=gram.dtype, device=gram.device)
        a = torch.linalg.solve(leading.gram + ridge[:, None, None] * eye, leading.products[:, :, None]).squeeze(2)
        errors.append(leading.squared_error(a).sqrt())
    return torch.stack(errors, dim=1) / problem.output_square.sqrt().clamp(min=ETA)[:, None]


def functional_demand(errors: Tensor, epsilon: float) -> Tensor:
    """k_eps (N,) int64: the first prefix whose error (N, K) is at most epsilon, or K + 1 where none is."""
    attained = errors <= epsilon
    first = attained.long().argmax(1) + 1
    return torch.where(attained.any(1), first, errors.shape[1] + 1)
