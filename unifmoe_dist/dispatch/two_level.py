"""Expert-parallel exchange between nodes and inside them: a token crosses to a node once.

Between nodes it goes to the rank that has its own rank's place there (the rail), with its blocks and its gates for all
experts of that node; inside the node it goes on to the ranks that hold these experts. Their rows are summed inside the
node, and one row per node goes home. Tokens with experts on their own node go there straight away.

The link between nodes is the slow one. A layer's shared expert is computed while tokens cross it, and residual experts
for the node's own tokens while rows come back; so are their gradients in a backward pass (`dispatch.exchange` says why
the order of what is done here decides it). Sums are in the order of ranks, then of nodes.

How much goes where is known before anything travels: a rank tells its rail what will go on to every rank of their
nodes, in one small exchange, and the rail tells these, in another. The host waits for the device once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unifmoe_dist.dispatch.alltoall import AllToAllExchange, on_host
from unifmoe_dist.dispatch.nodes import Nodes
from unifmoe_dist.dispatch.protocol import Experts, gradient_needs
from unifmoe_dist.eager import not_compiled
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_share import NOT_PICKLABLE
from unifmoe_dist.kernels import pack_tokens
from unifmoe_dist.kernels.exchange import COUNTS
from unifmoe_dist.profiling import profile_range

FAR = 1
"""Part in which rows of other nodes arrive; those of the own node are part 0."""


class TwoLevelDispatcher:
    """Exchanges tokens within a group of several nodes, which hold the residual experts contiguously in rank order.

    Args:
        nodes: The group's nodes.
    """

    local = False

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.group = nodes, nodes.group

    @property
    def packings(self) -> list[tuple[int, int]]:
        """As `AllToAllDispatcher.packings`."""
        number, width = self.nodes.number, self.nodes.width
        return [(1, number * width), (1, number), (number, width)]

    def __deepcopy__(self, memo: dict[int, Any]) -> TwoLevelDispatcher:
        return self  # a process group cannot be copied, and the dispatcher holds nothing else

    def __reduce__(self) -> Any:
        raise UserError(NOT_PICKLABLE)

    @not_compiled
    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> TwoLevelExchange:
        return TwoLevelExchange(self.nodes, x, gates.float(), blocks, gradient_needs(x, gates, trained))


class TwoLevelExchange:
    """One journey.

    Args:
        nodes: The group's nodes.
        x: (N, D) tokens.
        gates: (N, K) float32.
        blocks: (N, B) bool.
        needs: Whether this rank wants gradients at its tokens, and at its experts: 0 or 1.
    """

    def __init__(self, nodes: Nodes, x: Tensor, gates: Tensor, blocks: Tensor, needs: list[int]) -> None:
        self.nodes = nodes
        before, here, after = _by_node(gates, nodes)
        away = torch.cat([before, torch.zeros_like(here), after], dim=1)
        here = here.contiguous()
        near = pack_tokens(x, here, blocks, nodes.width, needs)
        far = pack_tokens(x, away, blocks, nodes.number, needs)
        onward = pack_tokens(x, away, blocks, nodes.number * nodes.width, needs).table[0, :, :2]
        near_table, far_table, self.onward_table = _agree(nodes, near.table[0], far.table[0], onward)
        near.agree(near_table)
        far.agree(far_table)
        self.far = AllToAllExchange(nodes.rail, far, x, away, blocks)
        self.near = AllToAllExchange(nodes.inner, near, x, here, blocks)

    def compute(self, experts: Experts) -> None:
        with profile_range("dispatch"):
            onward = self._onward()
            arrived = onward.arrivals()
        rows = experts(replace(arrived, part=FAR))
        with profile_range("combine"):
            onward.send_home(rows)
            self.far.send_home(onward.total())
        self.near.compute(experts)

    @not_compiled
    def _onward(self) -> AllToAllExchange:
        """What came from other nodes, on its way to the ranks of this one."""
        came = self.far.arrivals()
        packing = pack_tokens(came.x, came.gates, came.blocks, self.nodes.width, [0, 0])
        packing.agree(self.onward_table)
        return AllToAllExchange(self.nodes.inner, packing, came.x, came.gates, came.blocks)

    def total(self) -> Tensor:
        near = self.near.total()
        return near + self.far.total()


def _by_node(gates: Tensor, nodes: Nodes) -> tuple[Tensor, ...]:
    """Gates for experts on the nodes before this rank's, on its own, and on those after it."""
    experts = gates.shape[1] // nodes.number
    return gates.split([nodes.own * experts, experts, (nodes.number - nodes.own - 1) * experts], dim=1)


_Table = list[list[list[int]]]


def _agree(nodes: Nodes, near: Tensor, far: Tensor, onward: Tensor) -> tuple[_Table, _Table, _Table]:
    """Tables for `Packing.agree`: of the own node's tokens, of the rail, and of what goes on from it.

    Args:
        near: (width, COUNTS) int32, what goes to every rank of this node.
        far: (number, COUNTS), what goes to every other node.
        onward: (number * width, 2), rows and gates that it is to send on to every rank.
    """
    number, width = nodes.number, nodes.width
    rail = far.new_empty((2, number, COUNTS + 2 * width))
    torch.cat([far, onward.reshape(number, 2 * width)], dim=1, out=rail[0])
    dist.all_to_all_single(rail[1], rail[0], group=nodes.rail)
    inner = near.new_empty((2, width, COUNTS + 2))
    needs = rail[1, :, 2:COUNTS].amax(0).expand(width, -1)
    sent_on = rail[1, :, COUNTS:].sum(0, dtype=near.dtype).view(width, 2)
    torch.cat([near[:, :2], needs, sent_on], dim=1, out=inner[0])
    dist.all_to_all_single(inner[1], inner[0], group=nodes.inner)
    flat = on_host(torch.cat([rail[:, :, :2].reshape(-1), inner.reshape(-1)]))
    rail_sides = _sides(flat[: 4 * number], number, 2)
    inner_sides = _sides(flat[4 * number :], width, COUNTS + 2)
    # Every rank has now heard, by way of the rails, what any rank of the group wants.
    wants = [max(row[i] for row in inner_sides[1]) for i in range(2, COUNTS)]
    return (
        [[[*row[:2], *wants] for row in side] for side in inner_sides],
        [[[*row, *wants] for row in side] for side in rail_sides],
        [[[*row[COUNTS:], *wants] for row in side] for side in inner_sides],
    )


def _sides(flat: list[int], ranks: int, columns: int) -> _Table:
    """What was told and heard, by rank."""
    rows = [flat[i : i + columns] for i in range(0, len(flat), columns)]
    return [rows[:ranks], rows[ranks:]]
