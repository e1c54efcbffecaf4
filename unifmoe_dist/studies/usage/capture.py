"""What MoE layers see and decide over a data set, token by token, taken by forward hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unifmoe_dist.errors import UserError


class RoutingLayer(Protocol):
    """An MoE layer that tells how it routes: UniF-MoE's and every baseline's."""

    def route(self, x: Tensor) -> Any:
        """Decision for (N, d) tokens: a dataclass with `gates` (N, K), and with `affinity` or `scores` (N, K)."""


@dataclass(frozen=True)
class Capture:
    """The N tokens of one layer over a data set, in its order; padding is left out.

    Args:
        routing: The layer's decision for all of them: the dataclass that its `route` returns, on the CPU.
        item: (N,) int64, the item (image, sentence) that each token belongs to, counted from 0.
        position: (N,) int64, its position in that item's sequence; a class token is position 0.
        tokens: (N, d) the layer's inputs, in the layer's dtype, or None if they were not kept.
    """

    routing: Any
    item: Tensor
    position: Tensor
    tokens: Tensor | None


def expert_scores(routing: Any) -> Tensor:
    """(N, K), how well every expert fits the token, chosen or not: UniF-MoE's affinity, another layer's scores."""
    return routing.affinity if hasattr(routing, "affinity") else routing.scores


@torch.no_grad()
def capture(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Mapping[str, Any]], keep_tokens: bool = False
) -> dict[str, Capture]:
    """Run the model in evaluation mode and collect the routing of some of its layers.

    Args:
        model: Called as `model(**batch)`; its training mode is restored.
        layers: Layers by name; each is called once per batch, on (items, length, d), and has `route`.
        batches: Model inputs.
        keep_tokens: Keep the layers' inputs too (N d numbers per layer).

    Returns:
        A capture for every name.

    Raises:
        UserError: No batch was given.
    """
    parts: dict[str, list[Capture]] = {name: [] for name in layers}
    hooks = [
        # A pre-hook of the layer's own (which hands a padding mask over) has run before: this one is last.
        layer.register_forward_pre_hook(_Recorder(parts[name], keep_tokens), with_kwargs=True)
        for name, layer in layers.items()
    ]
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    if any(not recorded for recorded in parts.values()):
        raise UserError("No tokens reached the layers; give at least one batch of inputs.")
    return {name: _join(recorded) for name, recorded in parts.items()}


class _Recorder:
    """Forward pre-hook that routes the layer's input once more and notes the decision."""

    def __init__(self, parts: list[Capture], keep_tokens: bool) -> None:
        self.parts, self.keep_tokens = parts, keep_tokens
        self.items = 0

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["x"]
        mask = args[1] if len(args) > 1 else kwargs.get("token_mask")
        items, length = x.shape[:2]
        item, position = torch.meshgrid(torch.arange(items), torch.arange(length), indexing="ij")
        real = torch.ones(items, length, dtype=torch.bool) if mask is None else mask.cpu().bool()
        tokens = x[real.to(x.device)]
        kept = tokens.cpu() if self.keep_tokens else None
        self.parts.append(Capture(_concatenate([layer.route(tokens)]), item[real] + self.items, position[real], kept))
        self.items += items


def _concatenate(routings: list[Any]) -> Any:
    """One decision, on the CPU, of several of one dataclass; only tensors with a row per token are kept."""
    columns = {field.name: [getattr(r, field.name) for r in routings] for field in fields(routings[0]) if field.init}
    rows = [len(r.gates) for r in routings]
    joined = {
        name: torch.cat(column).cpu()
        if all(torch.is_tensor(t) and t.shape[:1] == (n,) for t, n in zip(column, rows, strict=True))
        else None
        for name, column in columns.items()
    }
    return replace(routings[0], **joined)


def _join(parts: list[Capture]) -> Capture:
    kept = [part.tokens for part in parts if part.tokens is not None]
    return Capture(
        _concatenate([part.routing for part in parts]),
        torch.cat([part.item for part in parts]),
        torch.cat([part.position for part in parts]),
        torch.cat(kept) if kept else None,
    )
