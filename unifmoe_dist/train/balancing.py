"""`parallel.expert_placement balanced`: at checkpoints experts move to where ranks have equally much to compute.

A checkpoint holds every expert by its number, weights and optimiser state, and is read at any layout: so to move
experts is to choose an order for them and to read what has just been written. The order stands in the checkpoint's
progress, and a run that goes on with as many ranks in a group takes it up.
"""

from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.placement import best_order, imbalance
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.usage import Usage

GAIN = 0.1
"""Part of the busiest rank's load that a new order must save."""


class Balance:
    """Counts the blocks that experts compute in training, and chooses on which rank each lies.

    Args:
        layers: Layers by name, the same on all ranks; those whose experts all lie here are left alone.
        ranks: This process's place in the job.

    Attributes:
        orders: By layer its experts, in the order in which they are to lie on the ranks of a group.
        moves: What the last choice gains in which layers, in words; empty where nothing is to move.
    """

    def __init__(self, layers: Mapping[str, ExpertLayer], ranks: Ranks) -> None:
        self.layers = {name: layer for name, layer in layers.items() if layer.share is not None}
        self.ranks, self.moves = ranks, ""
        self.orders = {name: list(range(layer.config.num_experts)) for name, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.loads = Usage()

    def choose(self) -> dict[str, float]:
        """Choose orders by what experts computed since the last call; collective.

        Returns:
            The busiest rank's blocks over the mean rank's in each layer, as experts lay.
        """
        measured, parts = {}, []
        for name, layer in self.layers.items():
            size, counted = self._group_size(layer), layer.loads
            assert counted is not None
            totals = torch.zeros(layer.config.num_experts) if counted.totals is None else counted.totals
            load = self.ranks.all_sum(totals.clone()).numpy()  # replicas of a set of experts lie alike
            counted.reset()
            before = measured[name] = imbalance(load, self.orders[name], size)
            better = best_order(load, size).tolist()
            after = imbalance(load, better, size)
            if after <= (1 - GAIN) * before:
                self.orders[name] = better
                parts.append(f"{before:.2f} to {after:.2f} in {name}")
        self.moves = ", ".join(parts)
        return measured

    def lay_out(self, when: str = "") -> None:
        """Have all layers lie in the chosen order, and say so; weights and optimiser states are then to be read."""
        if when and self.ranks.rank == 0:
            tqdm.write(f"{when}: experts move: the busiest rank's blocks over the mean, {self.moves}")
        for name, layer in self.layers.items():
            layer.lay_out(self.orders[name])

    def progress(self) -> dict[str, Any]:
        """What a checkpoint is to hold."""
        orders = [[self._group_size(self.layers[name]), name, order] for name, order in self.orders.items()]
        return {"expert_orders": orders} if orders else {}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Lie as a checkpoint says, where it was chosen for as many ranks as here."""
        for size, name, order in progress.get("expert_orders", []):
            layer = self.layers.get(name)
            if layer is not None and size == self._group_size(layer) and sorted(order) == sorted(self.orders[name]):
                self.orders[name] = order
        self.lay_out()

    @staticmethod
    def _group_size(layer: ExpertLayer) -> int:
        return layer.config.num_experts // layer.num_local_experts
