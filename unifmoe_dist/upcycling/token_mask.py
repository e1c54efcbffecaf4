"""Carrying a model's attention mask to its UniF-MoE layers.

In every supported block self-attention runs right before the FFN and receives the mask, so one hook on
attention notes it and one hook on the layer hands it over. Both run inside the block's forward, hence also
when gradient checkpointing runs that forward again, and then they see the mask of that very call.
"""

from __future__ import annotations

import threading
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MASKS = ("attention_mask", "mask", "attn_mask")
_MASKED = -1000.0
"""What an additive mask adds to a score that must not count: the least of its dtype, but also -1e9, or BERT's -10000.
Softmax makes 0 of it in every dtype, and biases of attention stay far above."""


def token_mask_from_attention(mask: Tensor | BlockMask | None, batch: int, length: int) -> Tensor | None:
    """Which tokens of B = batch sequences of T = length are real: those that some query attends to.

    `mask` is (B, S) of 1 and 0; (B, T, S) or (B, 1 or heads, T, S), bool or additive; or a flex BlockMask. S > T where
    there are keys from a cache, or places for keys to come. Returns (B, T) bool, or None
    where nothing is known to be padding: no mask, or one token, which nothing pads.
    """
    if mask is not None and not isinstance(mask, Tensor):
        from torch.nn.attention.flex_attention import create_mask  # a second of imports that few models need

        rows, heads, queries, keys = mask.shape
        mask = create_mask(mask.mask_mod, rows, heads, queries, keys, device=mask.kv_num_blocks.device)
    if mask is None or not 2 <= mask.dim() <= 4 or mask.shape[0] not in (1, batch):
        return None
    keys = mask.shape[-1]
    if keys < length or (keys > length and (length == 1 or (mask.dim() > 2 and mask.shape[-2] != length))):
        return None
    if mask.dim() == 2:
        real = (mask != 0)[:, keys - length :]
    else:
        attended = mask > _MASKED if mask.is_floating_point() else mask != 0
        real = attended.flatten(1, -2).any(dim=1)
        if keys > length:
            real = _at_own_keys(real, attended.any(dim=1) if mask.dim() == 4 else attended)
    return real.expand(batch, length)


def _at_own_keys(real: Tensor, attended: Tensor) -> Tensor:
    """Of keys (B, S), those of the T queries of a mask (B, T, S), which follow each other somewhere among the keys.

    A real token attends to itself, so the first query is at most where the reach of some query ends, less its number;
    nothing lies behind the last query, so it is at least where the last reach of all ends, less T - 1. Where the two
    differ (parts that see each other, such as those of an image), all tokens are taken for real.
    """
    queries, keys = attended.shape[1:]
    place = torch.arange(keys, device=attended.device)
    query = torch.arange(queries, device=attended.device)
    reach = torch.where(attended, place, -keys).amax(dim=-1)
    first, least = (reach - query).amax(), reach.amax() - queries + 1
    own = (first.clamp(0, keys - queries) + query).expand(len(real), queries)
    return real.gather(1, own) | (first != least)


class TokenMaskBridge:
    """Takes the mask that attention receives to the UniF-MoE layer of the same block.

    Shared by two forward pre-hooks. Masks are kept per thread (models serve several, replicas of `nn.DataParallel`
    run in one each) and only between the two hooks, which one thread runs one after the other. So copies share it:
    an adapter that copies the layer alone (PEFT's `modules_to_save`) still gets the mask.
    """

    def __init__(self) -> None:
        self.pending = threading.local()
        self.hidden, self.mask, self.place = "hidden_states", "attention_mask", 1

    def __getstate__(self) -> dict[str, Any]:
        return {"hidden": self.hidden, "mask": self.mask, "place": self.place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenMaskBridge:
        return self

    def attach(self, attention: nn.Module, layer: nn.Module) -> None:
        """Connect the self-attention and the UniF-MoE layer of one block."""
        names = list(signature(attention.forward).parameters)
        self.hidden, self.mask = names[0], next((name for name in names if name in _MASKS), "attention_mask")
        self.place = names.index(self.mask) if self.mask in names else len(names)
        attention.register_forward_pre_hook(self.note, with_kwargs=True)
        layer.register_forward_pre_hook(self.hand_over, with_kwargs=True)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook on `attention(hidden_states (B, T, d), attention_mask, ...)`, which may have other names and order."""
        hidden = args[0] if args else kwargs[self.hidden]
        mask = args[self.place] if len(args) > self.place else kwargs.get(self.mask)
        self.pending.mask = token_mask_from_attention(mask, *hidden.shape[:2]) if hidden.dim() == 3 else None

    def hand_over(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook on `layer(x (B, T, d), token_mask=None)`; a mask given by the caller wins."""
        hidden = args[0] if args else kwargs["x"]
        mask, self.pending.mask = getattr(self.pending, "mask", None), None
        if mask is None or len(args) > 1 or kwargs.get("token_mask") is not None:
            return None
        if hidden.dim() == 2 and mask.numel() == hidden.shape[0]:  # OPT's FFN gets (B * T, d)
            mask = mask.flatten()
        if mask.shape != hidden.shape[:-1]:  # left over from a call that failed half-way
            return None
        return args, {**kwargs, "token_mask": mask}
