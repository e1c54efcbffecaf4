"""Which experts of a layer this rank holds, and how they stand in files.

Parameters of spread experts are plain tensors, this rank's part alone. In a state_dict they are DTensors, cut along
their first dimension (experts; in biases experts times width), so distributed checkpoints, which put together what
ranks hold by offsets, save all of them and cut them anew for any number of ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ExpertGroup: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""Ranks that share a layer's experts: a process group, or one dimension of a mesh; None for this rank alone."""
NOT_PICKLABLE = (
    "a model whose experts are spread over ranks cannot be pickled: this rank holds only a part; save a state_dict() "
    "on every rank, or train with launch/train.py and run launch/consolidate.py on the result."
)


def as_group(group: ExpertGroup) -> dist.ProcessGroup | None:
    """The process group of one dimension of a mesh; a group as it is.

    Raises:
        UserError: a mesh of several dimensions.
    """
    if isinstance(group, (str, int)):
        raise UserError(
            f"expert_group is {group!r}, but must be a process group such as torch.distributed.group.WORLD, one "
            "dimension of a DeviceMesh, or None."
        )
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise UserError(
            f"expert_group is a mesh of {group.ndim} dimensions {group.mesh_dim_names}; choose one of them, as in "
            'mesh["expert"].'
        )
    return group.get_group()


@dataclass(frozen=True)
class ExpertShare:
    """The part of a layer's experts that this rank holds: `count` of `total` places from `first` on, among `group`'s.

    `order` names the expert at every place; None: as they are numbered. In files they stand as they are numbered.
    """

    group: dist.ProcessGroup
    first: int
    count: int
    total: int
    order: tuple[int, ...] | None = None
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShare:
        return self  # a process group cannot be copied

    def __reduce__(self) -> Any:
        raise UserError(NOT_PICKLABLE)

    @property
    def held(self) -> Sequence[int]:
        """Numbers of the experts here."""
        places = range(self.first, self.first + self.count)
        return places if self.order is None else self.order[self.first : self.first + self.count]

    def by_number(self, local: Tensor) -> Tensor:
        """All ranks' experts as they are numbered, from each rank's own, stacked; collective."""
        parts = [torch.empty_like(local) for _ in range(self.total // self.count)]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        whole = torch.cat(parts)
        return whole if self.order is None else self.rows(whole, [*map(self.order.index, range(self.total))])

    def rows(self, whole: Tensor, places: Sequence[int]) -> Tensor:
        """Rows at some places, one after the other, of a tensor with those of all along its first dimension."""
        return whole.unflatten(0, (self.total, -1))[list(places)].flatten(0, 1)

    def spread(self, local: Tensor) -> Tensor:
        """All ranks' experts as one DTensor, over this rank's own memory; moved ones as a copy, collectively."""
        from torch.distributed.tensor import DTensor, Shard

        if self.order is not None:
            local = self.rows(self.by_number(local), range(self.first, self.first + self.count))
        kind = local.device.type
        if kind not in self._meshes:
            device = "cpu" if kind == "meta" else kind
            self._meshes[kind] = DeviceMesh.from_group(self.group, device, mesh_dim_names=("expert",))
        return DTensor.from_local(local, self._meshes[kind], [Shard(0)], run_check=False)


def part_of(saved: Any, rows: int, share: ExpertShare | None) -> Any:
    """What this rank takes of a saved tensor: its `rows` of the whole's, along the first dimension; else all of it.

    Raises:
        UserError: the tensor is another rank's part.
    """
    if is_dtensor(saved):
        saved = _own(saved, share)
    if share is not None and isinstance(saved, Tensor) and saved.ndim:
        size = saved.shape[0] // share.total
        if size * share.count == rows and size * share.total == saved.shape[0]:
            if share.order is not None:
                return share.rows(saved, share.held)
            return saved[size * share.first : size * (share.first + share.count)]
    return saved


def _own(saved: DTensor, share: ExpertShare | None) -> Tensor:
    """This rank's part of a tensor over as many ranks as share the experts; the whole of others."""
    mesh = saved.device_mesh
    if mesh.size() == 1:
        return saved.to_local()
    if share is None or share.order is not None or mesh.size() * share.count != share.total:
        return _whole(saved)
    place, own = (mesh.get_coordinate() or [0])[0], share.first // share.count  # a loaded file keeps its writer's
    if place != own:
        raise UserError(
            f"This state was saved by rank {place} of {mesh.size()} that share the experts, but this is rank {own} of "
            "them; load each rank's own, or save with unifmoe_dist.full_state_dict or torch.distributed.checkpoint."
        )
    return saved.to_local()


def _whole(saved: Any) -> Tensor:
    try:
        return saved.full_tensor()
    except RuntimeError as error:  # the ranks that hold the rest are not here
        raise UserError(
            f"This state_dict holds one rank's part of experts that are spread over {saved.device_mesh.size()} ranks; "
            "save it with unifmoe_dist.full_state_dict or torch.distributed.checkpoint."
        ) from error


# -- the optimiser's state --------------------------------------------------------------------------------------------

_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def note_parameters(parameters: Iterable[nn.Parameter | None], share: ExpertShare) -> None:
    """Tell optimisers, at their next step, which parameters are a share: their state stands in files as these do."""
    for parameter in parameters:
        if parameter is not None:
            parameter.expert_share = share  # type: ignore[attr-defined]
    _before_steps()


@functools.cache
def _before_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    if shares := _shares(optimizer):
        optimizer.register_state_dict_post_hook(_spread_state)
        optimizer.register_load_state_dict_pre_hook(_own_state)
        for parameter, share in shares.values():  # what was loaded before this first step
            state = optimizer.state.get(parameter, {})
            state.update(_taken(state, parameter, share))


def _shares(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any] | None = None
) -> dict[Any, tuple[nn.Parameter, ExpertShare]]:
    """Parameters that are shares of experts, by their keys in a state_dict: numbers, or names in one of torch's DCP."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [] if saved is None else saved["param_groups"]
    keys = [key for group in groups for key in group["params"]] or range(len(parameters))
    return {k: (p, p.expert_share) for k, p in zip(keys, parameters, strict=False) if hasattr(p, "expert_share")}


def _spread_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    def spread(value: Any, parameter: nn.Parameter, share: ExpertShare) -> Any:
        by_expert = isinstance(value, Tensor) and value.ndim and value.shape[0] == parameter.shape[0]
        return share.spread(value) if by_expert else value

    state = dict(saved["state"])
    for key, (parameter, share) in _shares(optimizer, saved).items():
        if key in state:
            state[key] = {name: spread(value, parameter, share) for name, value in state[key].items()}
    return {**saved, "state": state}


def _own_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    state = dict(saved["state"])
    for key, (parameter, share) in _shares(optimizer, saved).items():
        if key in state:
            state[key] = _taken(state[key], parameter, share)
    return {**saved, "state": state}


def _taken(state: dict[str, Any], parameter: nn.Parameter, share: ExpertShare) -> dict[str, Any]:
    return {key: part_of(value, parameter.shape[0], share) for key, value in state.items()}
