"""What an adapter of a model family provides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from unifmoe_dist.upcycling.activations import activation_name


@dataclass(frozen=True)
class DenseFFN:
    """A dense FFN found in a model: up (d -> H), activation by name, down (H -> d)."""

    up: nn.Linear
    down: nn.Linear
    activation: str

    def shape(self) -> dict[str, Any]:
        """Its part of an `ExpertLayerConfig`."""
        return {
            "model_dim": self.up.in_features,
            "hidden_dim": self.up.out_features,
            "activation": self.activation,
            "bias": self.up.bias is not None or self.down.bias is not None,
        }

    @classmethod
    def of(cls, up: Any, activation: nn.Module | Callable[[Tensor], Tensor], down: Any) -> DenseFFN:
        """The parts of an FFN; whether its projections can be copied is checked by `upcycle`, for every adapter.

        Raises:
            UserError: The activation is unknown.
        """
        return cls(up, down, activation_name(activation))


class Adapter(Protocol):
    """Knows one model family.

    Attributes:
        name: The family, as shown to people.
    """

    name: str

    def matches(self, model: Any) -> bool:
        """Whether this adapter can handle the model."""
        ...

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """The transformer layers, in order."""
        ...

    def read(self, block: Any) -> DenseFFN:
        """The dense FFN of one transformer layer. Raises UserError where it is of an unsupported kind."""
        ...

    def install(self, block: Any, layer: nn.Module) -> None:
        """Put a UniF-MoE layer in place of the FFN, keeping what surrounds it (dropout, norms, residual)."""
        ...
