"""Weights of block-partitioned experts.

An expert is kept as keys (H, D) and values (H, D): channel h reads the token through keys[h] and writes values[h],
so block b is the contiguous slice b*M .. (b+1)*M of both, and a grouped product needs no copy. A gated expert has gate
keys (H, D) too, under the activation, whose value is multiplied with what the keys read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_gradients import DataParallel, averaged
from unifmoe_dist.expert_share import ExpertShare, note_parameters, part_of
from unifmoe_dist.kept import AsCopies, forget, kept
from unifmoe_dist.lending import Lender, as_numbers, is_dtensor, is_quantised

WEIGHTS = ("keys", "values", "key_bias", "value_bias", "gate_keys", "gate_key_bias")
"""Parameters of `BlockExperts`, and the tensors of `ExpertWeights`."""

BIASES = ("key_bias", "value_bias", "gate_key_bias")
"""Parameters of `BlockExperts` in one dimension: (E * H,), (E * D,) and (E * H,)."""

FFN: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor | None, *tuple[Tensor | None, ...]]
"""nn.Linear's weights of an FFN: up (H, D), (H,), down (D, H), (D,), and where it is gated the gate's (H, D), (H,)."""


def bias_like(saved: Tensor, own: Tensor) -> Tensor:
    """A saved bias in the shape in which it is held; older files have (E, H) or (E, D)."""
    return saved.reshape(own.shape) if saved.ndim <= 2 and saved.numel() == own.numel() else saved


@dataclass(frozen=True)
class ExpertWeights:
    """Tensors of E experts: keys and values (E, H, D), key_bias (E, H) or None, value_bias (E, D) or None.

    Gated ones have gate_keys (E, H, D) and gate_key_bias, like key_bias; None where they are not gated. `training` is
    the mode of the module whose they are.

    Attributes:
        copies: Gives the bank's copies of all its weights in another type, where it keeps some.
    """

    keys: Tensor
    values: Tensor
    key_bias: Tensor | None
    value_bias: Tensor | None
    num_blocks: int
    activation: str
    gate_keys: Tensor | None = None
    gate_key_bias: Tensor | None = None
    training: bool = False
    copies: Callable[[ExpertWeights, torch.dtype], list[Tensor] | None] | None = field(default=None, init=False)

    def tensors(self) -> dict[str, Tensor | None]:
        """By their names in `WEIGHTS`."""
        return {name: getattr(self, name) for name in WEIGHTS}

    def in_type(self, dtype: torch.dtype) -> dict[str, Tensor | None]:
        """The tensors of all `WEIGHTS` in a type: cast, or taken from what the bank keeps."""
        given = self.tensors()
        if self.copies is not None and dtype != self.keys.dtype:
            copies = self.copies(self, dtype)
            if copies is not None:
                return given | dict(zip([n for n, t in given.items() if t is not None], copies, strict=True))
        return {name: None if tensor is None else tensor.to(dtype) for name, tensor in given.items()}


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
        gated: Whether the activation is that of a gate (SwiGLU, GeGLU and the like).
    """

    main = ("keys", 3)
    share: ExpertShare | None = None
    """Which of the layer's experts these are, where others are on other ranks."""
    around: DataParallel | None = None
    """What averages gradients around a forward pass of such a share."""

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        hidden_dim: int,
        num_blocks: int,
        activation: str,
        bias: bool,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.activation = activation
        self.keys = nn.Parameter(torch.empty(num_experts, hidden_dim, model_dim))
        self.values = nn.Parameter(torch.empty(num_experts, hidden_dim, model_dim))
        # One expert after another in one dimension, by which optimisers tell biases from matrices.
        self.key_bias = nn.Parameter(torch.empty(num_experts * hidden_dim)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(num_experts * model_dim)) if bias else None
        self.gate_keys = nn.Parameter(torch.empty_like(self.keys)) if gated else None
        self.gate_key_bias = nn.Parameter(torch.empty(num_experts * hidden_dim)) if gated and bias else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Modules that were pickled whole before experts could be gated are not."""
        super().__setstate__(state)
        for name in ("gate_keys", "gate_key_bias"):
            if not hasattr(self, name):
                setattr(self, name, None)

    def initialise(self, weights: FFN) -> None:
        """Copy one dense FFN into every expert."""
        for index in range(self.keys.shape[0]):
            self.load(index, *weights)

    def weights(self) -> ExpertWeights:
        tensors = [as_numbers(getattr(self, name)) for name in WEIGHTS]
        if self.share is not None and self.around is not None:
            tensors = averaged(tensors, self.share, self.around)
        keys, values, key_bias, value_bias, gate_keys, gate_key_bias = tensors
        weights = ExpertWeights(
            keys,
            values,
            self.by_expert(key_bias),
            self.by_expert(value_bias),
            self.num_blocks,
            self.activation,
            gate_keys,
            self.by_expert(gate_key_bias),
            self.training,
        )
        if not torch.compiler.is_compiling():
            object.__setattr__(weights, "copies", self._copies)  # no argument, so that `replace` drops it
        return weights

    def _copies(self, weights: ExpertWeights, dtype: torch.dtype) -> list[Tensor] | None:
        """Copies of weights that `weights()` gave, in a type, made once for as long as the parameters do not change."""
        given = {name: tensor for name, tensor in weights.tensors().items() if tensor is not None}
        own = [getattr(self, name) for name in given]

        def make() -> list[Tensor]:
            experts = self.keys.shape[0]
            wide = [p.view(experts, -1) if n in BIASES else p for n, p in zip(given, own, strict=True)]
            return [tensor.detach().to(dtype).contiguous() for tensor in wide]

        copies = kept(f"copies in {dtype}", own, make, self)
        if copies is None or not (torch.is_grad_enabled() and any(t.requires_grad for t in given.values())):
            return copies
        return list(AsCopies.apply(copies, *given.values()))

    def _apply(self, fn: Any, recurse: bool = True) -> BlockExperts:
        forget(self)  # where the weights go to, they may not have to be kept
        return super()._apply(fn, recurse)

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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Spread experts stand there as DTensors; with `keep_vars` parameters are what they are."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.share is None or keep_vars:
            return
        for name in self._parameters:
            if prefix + name in destination:
                destination[prefix + name] = self.share.spread(destination[prefix + name])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Biases of either shape are taken, and of all experts those that are held here."""
        for name, own in self._parameters.items():
            key = prefix + name
            if own is None or key not in state_dict or is_dtensor(own):  # FSDP 2 takes what it has saved
                continue
            saved = state_dict[key]
            if name in BIASES and own.ndim < saved.ndim:
                saved = saved.reshape(-1)
            state_dict[key] = bias_like(part_of(saved, own.shape[0], self.share), own)
        super()._load_from_state_dict(state_dict, prefix, *more)
        if self.share is not None:
            note_parameters(self._parameters.values(), self.share)  # other ones, where they were assigned

    @torch.no_grad()
    def load(
        self,
        index: int,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        gate: Tensor | None = None,
        gate_bias: Tensor | None = None,
    ) -> None:
        """Copy nn.Linear weights (H, D), (H,), (D, H), (D,) and a gate's (H, D), (H,) into expert `index` of these."""
        if not (self.keys.is_meta and up.is_meta):  # a model without any weights is upcycled to one without
            self.require_weights("load_ffn")
        if is_quantised(self.keys):
            raise UserError("load_ffn cannot write into experts that are quantised; load weights before quantize_.")
        own = self._linear(index)
        given = dict(zip(own, (up, up_bias, down, down_bias, gate, gate_bias), strict=True))
        for name, tensor in given.items():
            needed, shape = own[name], None if tensor is None else tuple(tensor.shape)
            if needed is None and tensor is not None:
                lacking = "gated" if "gate" in name and self.gate_keys is None else "bias"
                raise UserError(f"{name} was given, but this layer was made with {lacking}=False.")
            if needed is not None and shape != needed.shape and not (tensor is None and "bias" in name):
                raise UserError(f"{name} has shape {shape}, but this layer needs {tuple(needed.shape)}.")
        for name, needed in own.items():
            tensor = given[name]
            if needed is not None:
                needed.copy_(tensor) if tensor is not None else needed.zero_()

    def read(self, index: int) -> FFN:
        """Expert `index` in nn.Linear layouts: (H, D), (H,), (D, H), (D,), if gated (H, D), (H,). Copies, detached."""
        self.require_weights("ffn_weights")
        copies = [
            None if own is None else own.detach().clone(memory_format=torch.contiguous_format)
            for own in self._linear(index).values()
        ]
        return tuple(copies if self.gate_keys is not None else copies[:4])  # type: ignore[return-value]

    def _linear(self, index: int) -> dict[str, Tensor | None]:
        """Views of expert `index` in nn.Linear layouts, by the names by which `load_ffn` takes them."""
        rows = (self.by_expert(getattr(self, name)) for name in BIASES)
        up_bias, down_bias, gate_bias = (None if bias is None else bias[index] for bias in rows)
        return {
            "up_weight": as_numbers(self.keys)[index],
            "up_bias": up_bias,
            "down_weight": as_numbers(self.values)[index].T,
            "down_bias": down_bias,
            "gate_weight": None if self.gate_keys is None else as_numbers(self.gate_keys)[index],
            "gate_bias": gate_bias,
        }

    @property
    def activated_keys(self) -> nn.Parameter:
        """(E, H, D) keys under the activation, which decide whether a channel fires: the gate's, if there is one."""
        return self.keys if self.gate_keys is None else self.gate_keys

    def prototypes(self) -> Tensor:
        """(E, B, D) float32: mean over every block's keys under the activation, without bias, detached."""
        experts, hidden, dim = self.keys.shape
        keys = as_numbers(self.activated_keys).detach().float()
        return keys.view(experts, self.num_blocks, hidden // self.num_blocks, dim).mean(dim=2)

    def kept_prototypes(self) -> Tensor:
        """As `prototypes`, averaged anew only where the keys have changed."""
        found = kept("prototypes", [self.activated_keys], self.prototypes, self)
        return self.prototypes() if found is None else found
