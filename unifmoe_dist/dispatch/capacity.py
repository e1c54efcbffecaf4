"""An optional limit on the load of an expert, for any dispatcher. Without it nothing is ever dropped."""

from dataclasses import replace

import torch

from unifmoe_dist.routing import Routing


def limit_load(routing: Routing, capacity_factor: float | None) -> Routing:
    """Drop the weakest (token, expert) assignments of experts that have too many.

    Of the A = sum of k(x) assignments of the tokens given (those of this rank, masked ones left out), each of the K
    experts keeps at most ceil(capacity_factor * A / K): those with the largest gates, ties to the lower token, NaN
    last. So a factor of 1 allows the mean load, and a factor of K or more drops nothing. A dropped assignment has
    gate 0 and no gradient; the other gates and the shared expert stay as they are. The limit is counted per rank, so
    with it, and only with it, outputs depend on how tokens are spread over ranks. Deterministic, without waiting for
    the device.

    Args:
        routing: The decision for N tokens.
        capacity_factor: Load allowed, as a multiple of the mean; None drops nothing.

    Returns:
        The decision with `gates` and `expert_count` of what is left and `dropped` filled in.
    """
    if capacity_factor is None:
        return routing
    gates = routing.gates.detach()
    num_experts = gates.shape[1]
    places = torch.ceil(capacity_factor * routing.expert_count.sum().double() / num_experts)
    strength = torch.where(gates.isnan(), 0.0, gates).masked_fill(gates == 0, -1.0)
    order = strength.argsort(dim=0, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        0, order, torch.arange(gates.shape[0], device=gates.device)[:, None].expand_as(order)
    )
    dropped = (gates != 0) & (rank >= places)
    count = dropped.sum(-1)
    return replace(
        routing, gates=routing.gates.masked_fill(dropped, 0.0), expert_count=routing.expert_count - count, dropped=count
    )
