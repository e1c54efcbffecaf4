"""Layers whose experts come and go in training.

An optimiser cannot grow, so all slots exist from the start, a mask says which are in use, and an expert that is added
takes a free slot. Mask and statistics are buffers, so a checkpoint resumes them at any number of ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from pydantic import model_validator
from torch import Tensor

from unifmoe_dist.config import ExpertLayerConfig, checked
from unifmoe_dist.engines import refuse_zero_3
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.gated import GatedExpertLayer


@checked(frozen=True)
class DynamicConfig(ExpertLayerConfig):
    """Shape of a layer whose number of experts changes; num_experts is the most there can be.

    Args:
        initial_experts: Experts to start with, from 1 to num_experts.
    """

    initial_experts: int = 6

    @model_validator(mode="after")
    def _starts_within(self) -> Self:
        if not 1 <= self.initial_experts <= self.num_experts:
            raise UserError(
                f"{self.initial_experts} experts to start with must be a whole number from 1 to the most there can be, "
                f"{self.num_experts}."
            )
        return self

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Among the options num_experts is where it starts and max_experts, two more unless given, how far it goes."""
        start = options.get("num_experts", cls.initial_experts)
        most = options.get("max_experts")
        slots = {"num_experts": start + 2 if most is None else most, "initial_experts": start}
        return cls(**{**{name: value for name, value in options.items() if name != "max_experts"}, **slots})


Dynamic = TypeVar("Dynamic", bound=DynamicConfig)


class DynamicExpertLayer(GatedExpertLayer[Dynamic]):
    """Complete experts in slots, some of which are free.

    Attributes:
        active: (K,) bool buffer, slots in use.
    """

    active: Tensor

    def build(self) -> None:
        self._statistics: list[str] = []
        self.register_buffer("active", torch.arange(self.config.num_experts) < self.config.initial_experts)

    def set_deepspeed_parallelism(self, *arguments: Any, **options: Any) -> None:
        """Also refuses ZeRO 3, under which no weight is whole between steps."""
        refuse_zero_3(type(self).__name__)
        super().set_deepspeed_parallelism(*arguments, **options)

    def _register_statistic(self, name: str, value: Tensor) -> None:
        """A float32 buffer that stays float32 when the model is converted: sums do not fit into 16 bits."""
        self.register_buffer(name, value)
        self._statistics.append(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for name in self._statistics:
            self._buffers[name] = getattr(self, name).float()
        return self

    def _free_slot(self) -> int | None:
        free = (~self.active).nonzero().flatten().tolist()
        return free[0] if free else None

    def _held_here(self, slot: int) -> int | None:
        """Index of a slot among this rank's experts."""
        return self.held.index(slot) if slot in self.held else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, active={int(self.active.sum())}"
