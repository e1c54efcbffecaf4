"""All experts on this rank: nothing travels."""

from torch import Tensor

from unifmoe_dist.dispatch.protocol import Arrivals, SinglePart


class _LocalExchange(SinglePart):
    def __init__(self, arrived: Arrivals) -> None:
        self.arrived = arrived

    def arrivals(self) -> Arrivals:
        return self.arrived

    def send_home(self, rows: Tensor) -> None:
        self.rows = rows

    def total(self) -> Tensor:
        return self.rows


class LocalDispatcher:
    """Hands every token to the experts beside it."""

    local = True

    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> _LocalExchange:
        return _LocalExchange(Arrivals(x, gates, blocks))
