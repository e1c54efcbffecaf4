"""Gradients of spread experts in other people's loops: means over all data-parallel ranks, as those of every parameter.

The exchange of tokens brings an expert the gradients of its group's tokens, as a sum over the group's P ranks. DDP and
FSDP 2 leave these parameters alone. So each backward pass divides by P, and at its end the ranks that hold the same
experts average what they have; of gradients that were averaged before, as in accumulation, the mean is what they are.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad, clip_grads_with_norm_, get_total_norm

from unifmoe_dist.eager import called_by
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_share import ExpertShare
from unifmoe_dist.lending import is_dtensor


@dataclass(frozen=True)
class DataParallel:
    """What averages the rest of the model.

    Args:
        parameters: Those of the bank of experts, and of what adapts it.
        groups: Finds the process groups that together join all data-parallel ranks, one for each dimension of a mesh;
            called after a backward pass.
        averages: Whether this backward pass ends with averaged gradients; false inside DDP's `no_sync`.
        dtype: What the rest of the model computes in, where that is not the parameters' own; else None.
    """

    parameters: Sequence[nn.Parameter]
    groups: Callable[[], Sequence[dist.ProcessGroup]]
    averages: bool = True
    dtype: torch.dtype | None = None


def averaged(weights: Sequence[Tensor | None], share: ExpertShare, around: DataParallel) -> list[Tensor | None]:
    """Weights of spread experts as they compute; their gradients, and those of what they are made of, become means."""
    given = [weight for weight in weights if weight is not None]
    size, then = dist.get_world_size(share.group), functools.partial(_finish, share, around)
    made = iter(_Averaged.apply(size, then, around.dtype, *given))
    return [None if weight is None else next(made) for weight in weights]


class _Averaged(torch.autograd.Function):
    """Weights as they are; backward divides their gradients by `size`, and calls `then` when it ends."""

    @staticmethod
    def forward(
        ctx: Any, size: int, then: Callable[[], None], dtype: torch.dtype | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.size, ctx.then, ctx.dtype = size, then, weights[0].dtype
        return tuple(
            weight.view_as(weight) if dtype in (None, weight.dtype) else weight.to(dtype) for weight in weights
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.then)
        return None, None, None, *(None if grad is None else grad.to(ctx.dtype) / ctx.size for grad in grads)


@torch.no_grad()
def _finish(share: ExpertShare, around: DataParallel) -> None:
    """Average gradients over the ranks that hold the same experts; collective over these."""
    trained = [p for p in around.parameters if p.grad is not None]
    grads: list[Tensor] = [p.grad for p in trained]  # type: ignore[misc]
    replicas = _replicas(share, around.groups()) if around.averages and grads else None
    if replicas is not None:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=replicas)
        flat /= dist.get_world_size(replicas)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
    for parameter, grad in zip(trained, grads, strict=True):
        parameter.grad = grad.as_subclass(ExpertGradient)
        parameter.grad.group = share.group


# Of a group of experts: the ranks with the same experts as this one, by data-parallel ranks.
_replica_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_replica_groups = weakref.WeakKeyDictionary()


def _replicas(share: ExpertShare, groups: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """The ranks that hold the same experts as this one; None where there is no other. Collective at first use.

    Raises:
        UserError: as `expert_teams`.
    """
    places = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    own = dist.get_process_group_ranks(share.group)
    if len(groups) == 1 and places == set(own):
        return None
    known = _replica_groups.setdefault(share.group, {})
    key = tuple(sorted(places))
    if key not in known:
        teams = expert_teams(share.group, groups)
        place = own.index(dist.get_rank())
        members = [team[place] for team in teams]
        known[key] = dist.new_group(members, use_local_synchronization=True)  # type: ignore[assignment]
    return known[key] if dist.get_world_size(known[key]) > 1 else None


def expert_teams(own: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup]) -> list[tuple[int, ...]]:
    """The groups into which data-parallel ranks fall that share experts, `own` among them; collective over `groups`,
    which together join all these ranks.

    Raises:
        UserError: they fall into none.
    """
    held = [dist.get_process_group_ranks(own)]
    ranks = sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)})
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, held, group=group)
        held = [team for part in gathered for team in part]
    teams = sorted({tuple(team) for team in held})
    members = [rank for team in teams for rank in team]
    if len(groups) == 1 and sorted(members) != ranks or len(members) != len(held):
        raise UserError(
            f"{len(held)} ranks hold experts as the expert_groups {teams}; give upcycle disjoint ones, of these ranks "
            "alone."
        )
    if len({len(team) for team in teams}) > 1:
        raise UserError(f"The expert_groups {teams} are of different sizes; give upcycle groups of one size.")
    return teams


# -- what others do with gradients ------------------------------------------------------------------------------------


class ExpertGradient(Tensor):
    """A gradient of spread experts, in `.grad`: a tensor like any other, except that its norm is that of all ranks.

    torch.nn.utils.clip_grad_norm_, and Accelerate, Lightning and Trainer that call it, would give every rank another
    norm, scale the replicated weights' gradients differently, and so train replicas apart. Likewise a GradScaler would
    skip a step on some ranks alone.
    """

    group: dist.ProcessGroup

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func is torch.linalg.vector_norm and called_by(_is_clipping):
                return norm_over_ranks(result, args[1] if len(args) > 1 else 2.0, args[0].group)
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                for group in {g.group for g in args[0] if isinstance(g, ExpertGradient)}:
                    dist.all_reduce(args[1], dist.ReduceOp.MAX, group=group)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _is_clipping(code: CodeType) -> bool:
    return code.co_filename == clip_grad.__file__


def norm_over_ranks(norm: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    """The norm of what all ranks of a group hold, from that of this rank's part; collective."""
    if order == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    total = norm**order
    dist.all_reduce(total, group=group)
    return total ** (1 / order)


@torch.no_grad()
def clip_by_norm_over_ranks(
    parameters: Iterable[nn.Parameter], max_norm: float, order: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; collective. Returns the norm before.

    Every weight counts once, wherever it lives: replicated ones' gradients are the same on every rank, those of spread
    experts are summed over the ranks of their group, those of FSDP 2 over its mesh.
    """
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)  # by group of experts, by FSDP's mesh, and all others
    for parameter in parameters:
        if parameter.grad is not None:
            share: ExpertShare | None = getattr(parameter, "expert_share", None)
            mesh = parameter.device_mesh if is_dtensor(parameter) else None
            kinds[mesh if share is None else share.group].append(parameter)
    norms = [_norm([p.grad for p in of_kind], order, kind) for kind, of_kind in kinds.items()]
    total = get_total_norm(norms, order, error_if_nonfinite)
    for of_kind in kinds.values():
        clip_grads_with_norm_(of_kind, max_norm, total)
    return total


def _norm(grads: list[Any], order: float, kind: Any) -> Tensor:
    if isinstance(kind, dist.ProcessGroup):
        own = get_total_norm([grad.as_subclass(Tensor) for grad in grads], order)
        return norm_over_ranks(own, order, kind)
    norm = get_total_norm(grads, order)
    return norm.full_tensor() if is_dtensor(norm) else norm
