"""Carrying a model's attention mask to its UniF-MoE layers.

In every supported block self-attention runs right before the FFN and receives the mask, so one hook on
attention notes it and one hook on the layer hands it over. Both run inside the block's forward, hence also
when gradient checkpointing runs that forward again, and then they see the mask of that very call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MASKED = -1000.0
"""What an additive mask adds to a score that must not count: the least of its dtype, but also -1e9, or BERT's -10000.
Softmax makes 0 of it in every dtype, and biases of attention stay far above."""


def token_mask_from_attention(mask: Tensor | BlockMask | None, batch: int, length: int) -> Tensor | None:
    """Which tokens of B = batch sequences of T = length are real: those that some query attends to.

    `mask` is (B, T) of 1 and 0; (B, T, T) or (B, 1 or heads, T, T), bool or additive; or a flex BlockMask. Returns
    (B, T) bool, or None where nothing is known to be padding: no mask, or keys from a cache too.
    """
    if mask is not None and not isinstance(mask, Tensor):
        from torch.nn.attention.flex_attention import create_mask  # a second of imports that few models need

        rows, heads, queries, keys = mask.shape
        mask = create_mask(mask.mask_mod, rows, heads, queries, keys, device=mask.kv_num_blocks.device)
    if mask is None or not 2 <= mask.dim() <= 4 or mask.shape[-1] != length:
        return None
    if mask.dim() == 2:
        real = mask != 0
    else:
        attended = mask > _MASKED if mask.is_floating_point() else mask != 0
        real = attended.flatten(1, -2).any(dim=1)
    return real.expand(batch, length)


class TokenMaskBridge:
    """Takes the mask that attention receives to the UniF-MoE layer of the same block.

    Shared by two forward pre-hooks. Masks are kept per thread (models serve several, replicas of `nn.DataParallel`
    run in one each) and only between the two hooks, which one thread runs one after the other. So copies share it:
    an adapter that copies the layer alone (PEFT's `modules_to_save`) still gets the mask.
    """

    def __init__(self) -> None:
        self.pending = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pending = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenMaskBridge:
        return self

    def attach(self, attention: nn.Module, layer: nn.Module) -> None:
        """Connect the self-attention and the UniF-MoE layer of one block."""
        attention.register_forward_pre_hook(self.note, with_kwargs=True)
        layer.register_forward_pre_hook(self.hand_over, with_kwargs=True)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook on `attention(hidden_states (B, T, d), attention_mask, ...)`.

        DistilBERT's called them `query` and `mask` before Transformers 5.
        """
        hidden = args[0] if args else kwargs["hidden_states" if "hidden_states" in kwargs else "query"]
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask", kwargs.get("mask"))
        self.pending.mask = token_mask_from_attention(mask, *hidden.shape[:2])

    def hand_over(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook on `layer(x (B, T, d), token_mask=None)`; a mask given by the caller wins."""
        hidden = args[0] if args else kwargs["x"]
        mask, self.pending.mask = getattr(self.pending, "mask", None), None
        if mask is None or len(args) > 1 or kwargs.get("token_mask") is not None:
            return None
        if mask.shape != hidden.shape[:-1]:  # left over from a call that failed half-way
            return None
        return args, {**kwargs, "token_mask": mask}
