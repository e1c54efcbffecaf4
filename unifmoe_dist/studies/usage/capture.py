"""What MoE layers see and decide over a data set, token by token, taken by forward hooks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.errors import UserError


@dataclass(frozen=True)
class Capture:
    """The N tokens of one layer over a data set, in its order; padding is left out."""

    routing: Any  # the decision for all of them: the dataclass that the layer's `route` returns, on the CPU
    item: Tensor  # (N,) int64, the item (image, sentence) that each token belongs to, counted from 0
    position: Tensor  # (N,) int64, its position in that item's sequence; a class token is position 0
    tokens: Tensor | None  # (N, d) the layer's inputs, in the layer's dtype, or None if they were not kept


def expert_scores(routing: Any) -> Tensor:
    """(N, K), how well every expert fits the token, chosen or not: UniF-MoE's affinity, another layer's scores."""
    return routing.affinity if hasattr(routing, "affinity") else routing.scores


@torch.no_grad()
def capture(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Mapping[str, Any]], keep_tokens: bool = False
) -> dict[str, Capture]:
    """Run the model in evaluation mode and collect the routing of some of its layers, by name.

    Args:
        model: Called as `model(**batch)`; its training mode is restored.
        layers: Each is called once per batch, on (items, length, d). Its `route` takes (N, d) tokens and returns a
            dataclass with `gates` (N, K), and with `affinity` or `scores` (N, K).
        batches: Model inputs.
        keep_tokens: Keep the layers' inputs too (N d numbers per layer).

    Raises:
        UserError: No batch was given.
    """
    recorders = {name: _Recorder(keep_tokens) for name in layers}
    # A pre-hook of the layer's own (which hands a padding mask over) has run before: this one is last.
    hooks = [layer.register_forward_pre_hook(recorders[name], with_kwargs=True) for name, layer in layers.items()]
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return {name: recorder.captured() for name, recorder in recorders.items()}


class _Recorder:
    """Forward pre-hook that routes the layer's input once more and notes the decision."""

    def __init__(self, keep_tokens: bool) -> None:
        self.keep_tokens, self.items = keep_tokens, 0
        self.routing: Any = None  # the last decision
        self.batches: list[dict[str, Tensor]] = []

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["x"]
        mask = args[1] if len(args) > 1 else kwargs.get("token_mask")
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.cpu().bool()
        item, position = real.nonzero(as_tuple=True)
        tokens = x[real.to(x.device)]
        self.routing = layer.route(tokens)
        columns = {name: value for name, value in vars(self.routing).items() if torch.is_tensor(value)}
        rows = {name: value.cpu() for name, value in columns.items() if value.shape[:1] == (len(tokens),)}
        kept = {"tokens": tokens.cpu()} if self.keep_tokens else {}
        self.batches.append(rows | {"item": item + self.items, "position": position} | kept)
        self.items += len(x)

    def captured(self) -> Capture:
        """All batches as one; of the decision only what every batch has a row per token of."""
        if not self.batches:
            raise UserError("No tokens reached the layers; give at least one batch of inputs.")
        names = set.intersection(*(set(batch) for batch in self.batches))
        whole = {name: torch.cat([batch[name] for batch in self.batches]) for name in names}
        own = {name: whole.pop(name, None) for name in ("item", "position", "tokens")}
        routing = replace(self.routing, **{f.name: whole.get(f.name) for f in fields(self.routing) if f.init})
        return Capture(routing, **own)  # type: ignore[arg-type]
