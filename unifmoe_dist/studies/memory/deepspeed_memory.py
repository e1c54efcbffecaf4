"""What DeepSpeed holds beside the model, read in its sources (0.19: runtime/engine.py, runtime/zero/stage_1_and_2.py).

Numbers of elements stand for tensors; every name of a buffer is DeepSpeed's. Sizes, with P trained parameters, of which
a rank updates P/n (n: ranks among which a parameter is replicated), w bytes a weight, and ZeRO 1 or 2:

    weights                w P       one flat tensor per parameter group
    master weights         4 P/n     `single_partition_of_fp32_groups`, a copy even where the weights are float32
    optimiser states       8 P/n     Adam's two moments (SGD: 4 P/n with momentum, else none)
    gradients              w P       stage 1: whole until the backward pass is over; then, and in stage 2 as soon as a
                                     bucket is reduced, those of this rank's partition (`grads_in_partition`)
    buffers                w bucket  `ipg_buckets`, for the backward pass, and as much again where a bucket holds the
                                     gradients of several ranks; the flat float32 gradient of one group at a time, and
                                     what the optimiser makes on the way

Offloading moves master weights, states and a float32 gradient of the partition to the host. Without ZeRO the torch
optimiser works on the weights: no master weights, all states on every rank, gradients all-reduced through a flat copy.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.studies.meters import Ledger, LiveBytes

ALLREDUCE_ELEMENTS = 500_000_000
"""Elements that are all-reduced together without ZeRO (`MEMORY_OPT_ALLREDUCE_SIZE`)."""


@dataclass(frozen=True)
class Group:
    """A parameter group."""

    parameters: Sequence[nn.Parameter]  # as this rank holds them
    sharded: bool  # whether they belong to experts spread over ranks
    replicas: int  # ranks that hold the same parameters, among which ZeRO divides the update
    decayed: bool  # whether there is weight decay

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)

    @property
    def aligned(self) -> int:
        """Elements of the flat tensor: a multiple of two for every replica."""
        unit = 2 * self.replicas
        return -(-self.size // unit) * unit

    @property
    def partition(self) -> int:
        return self.aligned // self.replicas

    def owners(self) -> list[tuple[nn.Parameter, range, list[int]]]:
        """Every parameter, the replicas whose partitions it touches, and the elements in each."""
        result, start = [], 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            touched = range(start // self.partition, (end - 1) // self.partition + 1)
            parts = [min(end, (r + 1) * self.partition) - max(start, r * self.partition) for r in touched]
            result.append((parameter, touched, parts))
            start = end
        return result


@dataclass
class EngineMemory:
    """One rank's engine, as entries in ledgers."""

    groups: Sequence[Group]  # whose gradients the backward pass makes
    config: TrainConfig  # optimiser, ZeRO stage and micro-batches per step
    live: LiveBytes  # where the model's own tensors are entered
    host: Ledger | None  # where offloaded tensors go; None keeps them on the device
    foreach: bool  # whether torch's optimisers work on lists of tensors, as on a GPU
    bucket_size: int  # `reduce_bucket_size`

    def __post_init__(self) -> None:
        self.device, self.stage = self.live.ledger, self.config.parallel.zero_stage
        self.item = self.groups[0].parameters[0].element_size()
        self._bucket: list[nn.Parameter] = []
        self._open = False  # a bucket exists
        self._partition_bytes = 0  # of grads_in_partition in use
        self._carried = 0  # the same, of the micro-batches before
        self._owners = {p: (g, touched, parts) for g in self.groups for p, touched, parts in g.owners()}
        owned = (
            {p for p, (group, touched, _) in self._owners.items() if rank % group.replicas in touched}
            for rank in range(max(group.replicas for group in self.groups))
        )
        self._own = max(owned, key=lambda parameters: sum(p.numel() for p in parameters))  # of the fullest rank
        self._own_bytes = self.item * sum(p.numel() for p in self._own)
        for parameter in self._owners:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _optimizer(self, group: Group) -> tuple[int, int]:
        """What an optimiser keeps between steps, and makes on the way of one at a time, in numbers per number updated.

        torch's optimisers (`_single_tensor_*` on the CPU, `_multi_tensor_*` on a GPU), or DeepSpeedCPUAdam.
        """
        optim = self.config.optim
        coupled = group.decayed and optim.weight_decay > 0 and optim.name != "adamw"  # a new gradient is made
        if optim.name == "sgd":
            return int(optim.momentum > 0), int(coupled)
        return 2, 0 if self.host is not None else (1 if self.foreach else 2) + int(coupled)

    def hold(self) -> None:
        """Weights, master weights and optimiser states, as they are from the second step on."""
        states = self.device if self.host is None else self.host
        for group in self.groups:
            kept, _ = self._optimizer(group)
            if self.stage == 0:
                self.device.add("weights", self.item * group.size)
                self.device.add("optimiser states", 4 * kept * group.size)
                continue
            self.device.add("weights", self.item * group.aligned)
            states.add("master weights", 4 * group.partition)
            states.add("optimiser states", 4 * kept * group.partition)
            if self.host is not None:
                self.host.add("gradients", 4 * group.partition)
                self.host.add("buffers", self.item * group.partition)  # param_buffer_of_bit16_for_cpu_offload_groups
        if self.host is not None:
            for place in (self.device, self.host):  # temp_grad_buffer_for_{gpu,cpu}_offload
                place.add("buffers", self.item * _largest(self._owners))
            if self.config.parallel.gradient_accumulation > 1:  # accumulated_grads_in_cpu
                self.host.add("gradients", self._own_bytes)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Called when a gradient is ready."""
        assert parameter.grad is not None
        if self.stage and not self._open:  # setup_buckets
            self._open = True
            self.device.add("buffers", self.item * self.bucket_size)
        if self.stage == 2:
            self._into_bucket(parameter)
        else:
            self.live.relabel(parameter.grad, "gradients")

    def reduce(self, boundary: bool) -> None:
        """After a backward pass: what is left is reduced; in stage 1 and without ZeRO only at a step's boundary."""
        if self.stage == 0:
            if boundary:
                self._allreduce()
            return
        if self.stage == 1:
            if not boundary:
                return
            for parameter in self._owners:
                if parameter.grad is not None:
                    self._into_bucket(parameter)
        before = self._partition_bytes
        self._flush()
        if self._open:  # _release_ipg_buffers
            self._open = False
            self.device.add("buffers", -self.item * self.bucket_size)
        if self.stage == 2 and not boundary:
            self._carried, self._partition_bytes = max(before, self._partition_bytes), 0
        elif self.stage == 2:  # the new ones have been added to those carried along
            self.device.add("gradients", -self._carried)
            self._carried = 0

    def _into_bucket(self, parameter: nn.Parameter) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: the gradient moves in, and its own storage goes."""
        if sum(p.numel() for p in self._bucket) + parameter.numel() > self.bucket_size:
            self._flush()
        self._bucket.append(parameter)
        if parameter.numel() <= self.bucket_size:
            parameter.grad = None

    def _flush(self) -> None:
        """reduce_ipg_grads: all-reduce the bucket, then keep what belongs to this rank's partition."""
        if not self._bucket:
            return
        self.device.spike("buffers", self.item * self._copied())
        if self.host is None:
            if not self._partition_bytes and not self._own.isdisjoint(self._bucket):
                self._partition_bytes = self._own_bytes
                self.device.add("gradients", self._partition_bytes)
        elif self.item < 4:  # one parameter at a time on its way to the host
            self.device.spike("buffers", 4 * _largest(self._bucket))
        for parameter in self._bucket:
            parameter.grad = None
        self._bucket = []

    def _copied(self) -> int:
        """Elements that allreduce_bucket copies: where the bucket holds the gradients of several partitions in turn."""
        owned = [
            (group.sharded, replica, part)
            for group, touched, parts in map(self._owners.__getitem__, self._bucket)
            for replica, part in zip(touched, parts, strict=True)
        ]
        slices: dict[bool, list[int]] = defaultdict(list)
        for (sharded, _), run in itertools.groupby(owned, key=lambda slice_: slice_[:2]):
            slices[sharded].append(sum(part for *_, part in run))
        return max(sum(part) if len(part) > 1 else 0 for part in slices.values())

    def _allreduce(self) -> None:
        for sharded in (False, True):
            elements = filled = 0
            for group in self.groups:
                for parameter in group.parameters if group.sharded == sharded else ():
                    filled += parameter.numel()
                    elements = max(elements, filled)
                    filled = 0 if filled > ALLREDUCE_ELEMENTS else filled
            self.device.spike("buffers", self.item * elements)

    def update(self) -> None:
        """The optimiser's step, on the gradients that `reduce` left."""
        for group in self.groups:
            _, made = self._optimizer(group)
            if self.stage == 0:
                at_once = group.size if self.foreach else _largest(group.parameters)
                self.device.spike("buffers", 4 * made * at_once)
                continue
            if self.host is not None:
                self.host.spike("buffers", 4 * made * group.partition)
                continue
            self.device.add("buffers", self.item * group.partition)  # flat_grad_partition
            if self.item < 4:  # and its float32 copy
                self.device.add("buffers", 4 * group.partition)
                self.device.add("buffers", -self.item * group.partition)
            if group is self.groups[-1]:  # all groups' gradients share one storage
                self.device.add("gradients", -self._partition_bytes)
                self._partition_bytes = 0
            self.device.spike("buffers", 4 * made * group.partition)
            self.device.add("buffers", -4 * group.partition)
        for parameter in self._owners:
            parameter.grad = None


def _largest(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of the largest."""
    return max(p.numel() for p in parameters)
