"""A dense FFN made wider: what a model of equal computation does without any routing."""

from typing import Any, Self

import torch
from pydantic import model_validator
from torch import Tensor

from unifmoe_dist.config import ExpertLayerConfig, checked
from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import FFN
from unifmoe_dist.methods.gated import GatedExpertLayer, Gating


@checked(frozen=True)
class WideConfig(ExpertLayerConfig):
    """Shape of a wider FFN: num_experts halves of the dense one, at least its own two."""

    @model_validator(mode="after")
    def _holds_the_dense_one(self) -> Self:
        if self.num_experts < 2 or self.hidden_dim % 2:
            raise UserError(
                f"a wider FFN is made of halves: hidden_dim {self.hidden_dim} must be even and num_experts "
                f"{self.num_experts} at least 2."
            )
        return self


class WideLayer(GatedExpertLayer[WideConfig]):
    """An FFN of K H / 2 channels, kept as K experts of H / 2 that every token uses with coefficient 1.

    The first two are the halves of the dense FFN. The channels of the others start as torch starts a linear layer, and
    their down-projection at 0: the layer starts as the dense FFN, and no channel starts as a copy of another, which
    would stay one.
    """

    config_type = WideConfig

    @property
    def expert_dim(self) -> int:
        return self.config.hidden_dim // 2

    @torch.no_grad()
    def _start_from(self, dense: FFN) -> None:
        for expert in range(self.config.num_experts):
            own = slice(self.expert_dim * (expert % 2), self.expert_dim * (expert % 2 + 1))
            given = dense if expert < 2 else self._fresh_like(dense[0])
            bias = given[3] if given[3] is None or expert != 1 else torch.zeros_like(given[3])
            self._load_channels(expert, given, own, bias)

    def _fresh_like(self, weight: Tensor) -> FFN:
        """A random dense FFN whose output is 0, on the device and in the type of `weight`."""
        parts: list[Any] = [None if part is None else part.to(weight) for part in self._random_dense()]
        for part in parts[2:4]:
            if part is not None:
                part.zero_()
        return tuple(parts)

    def _gate(self, x: Tensor) -> Gating:
        gates = torch.ones(len(x), self.config.num_experts, device=x.device)
        return Gating(gates, gates)
