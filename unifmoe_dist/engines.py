"""Experts that are spread over ranks inside an engine of DeepSpeed, whoever has made it.

While an engine is made, it calls `set_deepspeed_parallelism` of every module that has such a method, before it looks at
parameters. There it hears which of them are no copies of each other, and what of its own takes them for copies is
replaced or refused. So `deepspeed.initialize`, and what calls it, need no more than the upcycled model.
"""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_gradients import clip_by_norm_over_ranks, expert_teams

_PRECISIONS = ("_configure_fp16_optimizer", "_configure_bf16_optimizer")
_FILES = ("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model")


def is_spread(parameter: Tensor) -> bool:
    """Whether an engine was told that the ranks' values of a parameter are no copies of each other."""
    return not getattr(parameter, "allreduce", True)


def mark(parameters: Iterable[nn.Parameter], group_name: str | None = None) -> None:
    """Mark parameters as DeepSpeed knows those of experts on other ranks."""
    for parameter in parameters:
        parameter.allreduce, parameter.group_name = False, group_name  # type: ignore[attr-defined]


def introduce(experts: nn.Module, group: dist.ProcessGroup, num_experts: int) -> None:
    """Tell the engine that is being made about a bank of experts; collective over all ranks.

    Args:
        experts: This rank's part.
        group: The ranks that together hold `num_experts`.

    Raises:
        UserError: the engine cannot train them, or the job's ranks do not fall into such groups.
    """
    engine = _being_made()
    size = dist.get_world_size(group)
    name = f"ep_size_{size}"
    known: dict[str, dist.ProcessGroup] = engine.__dict__.setdefault("expert_groups", {})
    if name not in known:
        _check(engine, size)
        _enter(name, group)
        known[name] = group
        _take_over(engine)
    elif dist.get_process_group_ranks(known[name]) != dist.get_process_group_ranks(group):
        raise UserError(f"Two layers have different expert_groups of {size} ranks; give all layers the same.")
    engine.has_moe_layers = True
    engine.num_experts.append(num_experts)
    mark(experts.parameters(), name)


def refuse_zero_3(who: str) -> None:
    """Refuse an engine, that is being made, of ZeRO 3 around `who` reads and rewrites weights between its steps.

    Raises:
        UserError: it is one.
    """
    if _being_made().zero_optimization_partition_weights():
        raise UserError(f"{who} reads and rewrites whole weights between steps; use ZeRO 1 or 2 instead of 3.")


def refuse_parts() -> None:
    """Refuse an engine of ZeRO, that is being made, with an optimiser of parts of parameters.

    Raises:
        UserError: it is one.
    """
    engine = _being_made()
    groups = getattr(engine.client_optimizer, "param_groups", ())
    if engine.zero_optimization() and any(hasattr(part, "bank") for group in groups for part in group["params"]):
        raise UserError(
            "The optimiser has every expert's matrix by itself, and DeepSpeed's ZeRO knows whole parameters alone; use "
            "zero_optimization.stage 0, or param_groups without muon=True."
        )


def _being_made() -> Any:
    """The engine that has called us; it passes nothing of itself."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    frame = sys._getframe(1)
    while not isinstance(frame.f_locals.get("self"), DeepSpeedEngine):
        assert frame.f_back is not None, "not called by an engine of DeepSpeed"
        frame = frame.f_back
    return frame.f_locals["self"]


def _check(engine: Any, size: int) -> None:
    from deepspeed.utils import groups

    spread = f"The experts are spread over {size} ranks by expert_group, but DeepSpeed"
    if engine.zero_optimization_partition_weights():
        raise UserError(
            f"{spread}'s ZeRO 3 spreads every weight over all ranks; use ZeRO 1 or 2, or give upcycle no expert_group."
        )
    others, world = groups._get_data_parallel_world_size(), dist.get_world_size()
    if others != world:
        raise UserError(
            f"{spread} is to average over {others} of {world} ranks (tensor, pipeline or sequence parallelism); use "
            "data parallelism alone beside them."
        )


def _enter(name: str, group: dist.ProcessGroup) -> None:
    """Have DeepSpeed take a division of all ranks into groups of experts for its own."""
    from deepspeed.utils import groups

    for purpose, own in (("PARALLEL", group), ("DATA_PARALLEL", _replicas(group))):
        getattr(groups, f"_EXPERT_{purpose}_GROUP")[name] = own
        members = getattr(groups, f"_EXPERT_{purpose}_GROUP_RANKS", {})  # since 0.18
        members[name] = dist.get_process_group_ranks(own)


def _replicas(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks that hold the same experts as this one."""
    assert dist.group.WORLD is not None
    teams = expert_teams(group, [dist.group.WORLD])
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    timeout = group._get_backend(device).options._timeout
    made: list[Any] = [
        dist.new_group(list(ranks), timeout=timeout) for ranks in zip(*teams, strict=True)
    ]  # every rank makes all
    return made[dist.get_process_group_ranks(group).index(dist.get_rank())]


def _take_over(engine: Any) -> None:
    """Replace what an engine does wrong with spread experts."""

    def configure_optimizer(optimizer: Any, parameters: list[Any]) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            divide_groups(optimizer.param_groups, engine.client_lr_scheduler)
        if parameters and not isinstance(parameters[0], dict):
            parameters = [{"params": parameters}]
        divide_groups(parameters)
        type(engine)._configure_optimizer(engine, optimizer, parameters)

    engine._configure_optimizer = configure_optimizer
    clip_by_true_norm(engine)
    half = "fp16 and bf16 are not right for them without ZeRO, or where ZeRO 1 accumulates in float32; use ZeRO 2"
    for name in _PRECISIONS:
        setattr(engine, name, partial(_refuse, half))
    for name in _FILES:
        what = f"{name} knows one rank's alone; use unifmoe_dist.full_state_dict and load_full_state_dict"
        setattr(engine, name, partial(_refuse, what))


def clip_by_true_norm(engine: Any) -> None:
    """Have an engine without ZeRO clip by the norm of all ranks' gradients, and remember it.

    DeepSpeed's own averages the ranks' norms, and each rank sees only its own experts. With ZeRO 1 and 2 its norm sums
    the squares of all partitions over all ranks, which counts every expert once.
    """

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = clip_by_norm_over_ranks(engine.module.parameters(), engine.gradient_clipping())

    engine.clip_fp32_gradients = clip_fp32_gradients


def _refuse(why: str, *_: Any, **__: Any) -> NoReturn:
    raise UserError(f"The experts are spread over ranks by expert_group, and DeepSpeed's {why}.")


def divide_groups(groups: list[dict[str, Any]], schedule: Any = None) -> None:
    """Give marked parameters groups of their own, behind all others, in an optimiser's groups; in place.

    A schedule of learning rates that was made before keeps lists of one entry for each group; they grow alike.
    """
    sources = []
    for number, group in enumerate([*groups]):
        spread = [p for p in group["params"] if is_spread(p)]
        if spread:
            own = {**group, "params": spread, "moe": True, "name": getattr(spread[0], "group_name", None)}
            rest = [p for p in group["params"] if not is_spread(p)]
            if rest:
                group["params"] = rest
                group.pop("param_names", None)
                own.pop("param_names", None)
                groups.append(own)
                sources.append(number)
            else:
                group.update(own)
    for values in vars(schedule).values() if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) else ():
        if isinstance(values, list) and len(values) == len(groups) - len(sources):
            values.extend([values[number] for number in sources])
