"""Weights of block-partitioned experts.

An expert is kept as keys (H, D) and values (H, D): channel h reads the token through keys[h] and writes values[h],
so block b is the contiguous slice b*M .. (b+1)*M of both, and a grouped product needs no copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import Lender
from unifmoe_dist.replicas import unmarked

BIASES = ("key_bias", "value_bias")
"""Parameters of `BlockExperts` in one dimension: (E * H,) and (E * D,)."""


def bias_like(saved: Tensor, own: Tensor) -> Tensor:
    """A saved bias in the shape in which it is held; older files have (E, H) or (E, D)."""
    return saved.reshape(own.shape) if saved.ndim <= 2 and saved.numel() == own.numel() else saved


@dataclass(frozen=True)
class ExpertWeights:
    """Tensors of E experts: keys and values (E, H, D), key_bias (E, H) or None, value_bias (E, D) or None."""

    keys: Tensor
    values: Tensor
    key_bias: Tensor | None
    value_bias: Tensor | None
    num_blocks: int
    activation: str


class BlockExperts(Lender):
    """E experts of hidden width H, each divided into B aligned blocks of M = H / B channels.

    Called as a module it lends itself, so that hooks on it run: `experts(x, use=lambda experts, x: ...)`.

    Args:
        num_experts: Experts E held here.
        model_dim: Token width D.
        hidden_dim: Hidden width H.
        num_blocks: Blocks B.
        activation: Name of the activation.
        bias: Whether channels and outputs have biases.
    """

    main = ("keys", 3)

    def __init__(
        self, num_experts: int, model_dim: int, hidden_dim: int, num_blocks: int, activation: str, bias: bool
    ) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.activation = activation
        self.keys = nn.Parameter(torch.empty(num_experts, hidden_dim, model_dim))
        self.values = nn.Parameter(torch.empty(num_experts, hidden_dim, model_dim))
        # One expert after another in one dimension, by which optimisers tell biases from matrices.
        self.key_bias = nn.Parameter(torch.empty(num_experts * hidden_dim)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(num_experts * model_dim)) if bias else None

    def initialise(self, weights: tuple[Tensor, Tensor | None, Tensor, Tensor | None]) -> None:
        """Copy one dense FFN into every expert."""
        for index in range(self.keys.shape[0]):
            self.load(index, *weights)

    def weights(self) -> ExpertWeights:
        key_bias, value_bias = self.by_expert(self.key_bias), self.by_expert(self.value_bias)
        return ExpertWeights(self.keys, self.values, key_bias, value_bias, self.num_blocks, self.activation)

    def by_expert(self, bias: Tensor | None) -> Tensor | None:
        """(E, H) or (E, D) view of a bias, or of its gradient."""
        return None if bias is None else bias.view(self.keys.shape[0], -1)

    def rows(self, parameter: nn.Parameter, index: int) -> list[int]:
        """Rows, along its first dimension, of a parameter that belong to expert `index` of those held here."""
        share = parameter.shape[0] // self.keys.shape[0]
        return list(range(index * share, (index + 1) * share))

    def stack_biases(self) -> None:
        """Hold biases as (E, H) and (E, D), as older versions did, where a file with such shapes is to be read."""
        for name in BIASES:
            bias = getattr(self, name)
            if bias is not None:
                setattr(self, name, nn.Parameter(bias.detach().view(self.keys.shape[0], -1), bias.requires_grad))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Biases of either shape are taken, and the marks of spread experts are taken off (assign=True keeps them)."""
        for name in self._parameters:
            if prefix + name in state_dict:
                state_dict[prefix + name] = unmarked(state_dict[prefix + name])
        for name in BIASES:
            if getattr(self, name) is not None and prefix + name in state_dict:
                state_dict[prefix + name] = bias_like(state_dict[prefix + name], getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *more)

    @torch.no_grad()
    def load(self, index: int, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> None:
        """Copy nn.Linear weights (H, D), (H,), (D, H), (D,) into expert `index` of those held here."""
        if not (self.keys.is_meta and up.is_meta):  # a model without any weights is upcycled to one without
            self.require_weights("load_ffn")
        hidden, dim = self.keys.shape[1:]
        expected = {"up_weight": (hidden, dim), "up_bias": (hidden,), "down_weight": (dim, hidden), "down_bias": (dim,)}
        given = dict(zip(expected, (up, up_bias, down, down_bias), strict=True))
        for name, tensor in given.items():
            if tensor is None and "bias" in name:
                continue
            shape = None if tensor is None else tuple(tensor.shape)
            if shape != expected[name]:
                raise UserError(f"{name} has shape {shape}, but this layer needs {expected[name]}.")
        for own, bias, name in ((self.key_bias, up_bias, "up_bias"), (self.value_bias, down_bias, "down_bias")):
            if own is None and bias is not None:
                raise UserError(f"{name} was given, but this layer was made with bias=False.")
        self.keys[index].copy_(up)
        self.values[index].copy_(down.T)
        for rows, bias in ((self.by_expert(self.key_bias), up_bias), (self.by_expert(self.value_bias), down_bias)):
            if rows is not None:
                rows[index].copy_(bias) if bias is not None else rows[index].zero_()

    def read(self, index: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Expert `index` in nn.Linear layouts: (H, D), (H,), (D, H), (D,). Copies, detached."""
        self.require_weights("ffn_weights")
        biases = (self.by_expert(self.key_bias), self.by_expert(self.value_bias))
        key_bias, value_bias = (None if bias is None else bias[index].detach().clone() for bias in biases)
        return self.keys[index].detach().clone(), key_bias, self.values[index].detach().T.contiguous(), value_bias

    def prototypes(self) -> Tensor:
        """(E, B, D) float32: mean up-projection key of every block, without bias, detached."""
        experts, hidden, dim = self.keys.shape
        blocks = self.keys.detach().view(experts, self.num_blocks, hidden // self.num_blocks, dim)
        return blocks.mean(dim=2, dtype=torch.float32)
