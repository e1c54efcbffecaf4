"""A layer's tokens in chunks, so that one travels while another is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.dispatch.protocol import Arrivals, Dispatcher, Exchange, Experts


class ChunkedDispatcher:
    """Splits every rank's tokens into chunks, which `dispatcher` sends one after the other.

    Args:
        dispatcher: What exchanges a chunk.
        chunks: Their number, the same on all ranks; those of a rank with few tokens may be empty.
    """

    local = False

    def __init__(self, dispatcher: Dispatcher, chunks: int) -> None:
        self.dispatcher, self.chunks = dispatcher, chunks
        self.group: Any = getattr(dispatcher, "group", None)

    @property
    def packings(self) -> list[tuple[int, int]]:
        """As `AllToAllDispatcher.packings`."""
        return getattr(self.dispatcher, "packings", [])

    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> _ChunkedExchange:
        parts = zip(*(t.tensor_split(self.chunks) for t in (x, gates, blocks)), strict=True)
        return _ChunkedExchange([self.dispatcher.dispatch(a, b, c, trained) for a, b, c in parts])


class _ChunkedExchange:
    def __init__(self, exchanges: list[Exchange]) -> None:
        self.exchanges = exchanges

    def compute(self, experts: Experts) -> None:
        for number, exchange in enumerate(self.exchanges):

            def numbered(arrived: Arrivals, number: int = number) -> Tensor:
                return experts(replace(arrived, part=arrived.part * len(self.exchanges) + number))

            exchange.compute(numbered)

    def total(self) -> Tensor:
        return torch.cat([exchange.total() for exchange in self.exchanges])
