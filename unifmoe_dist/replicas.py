"""Experts that are spread over ranks are no replicas: what wraps a model leaves them alone, or is refused.

DDP and FSDP 2 hear of it before they start, engines of DeepSpeed too (`engines`). FSDP 1, and DDP around a module that
was not marked, would give every rank the first rank's experts, average gradients over ranks that hold others, or clip
by another norm on each.
"""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unifmoe_dist.eager import called_by, not_compiled
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_gradients import DataParallel
from unifmoe_dist.lending import is_dtensor


class _Ignored:
    """Names of parameters and buffers that DDP leaves alone in a module, as they are when it asks.

    They change after `upcycle`: wrappers of activation checkpointing and adapters put themselves into names.
    """

    def __init__(self, module: nn.Module, names: Callable[[nn.Module], Iterable[str]], others: Iterable[str]) -> None:
        self.module, self.names, self.others = module, names, others

    def __iter__(self) -> Iterator[str]:
        names = [*self.others, *self.names(self.module)]
        return iter([*names, *(f"_orig_mod.{name}" for name in names)])  # where torch.compile stands between


def leave_alone(module: nn.Module, names: Callable[[nn.Module], Iterable[str]]) -> None:
    """Have DDP leave the parameters that `names(module)` names alone, beside those that it leaves alone already."""
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    others = before.others if isinstance(before, _Ignored) else tuple(before)
    module._ddp_params_and_buffers_to_ignore = _Ignored(module, names, others)  # type: ignore[assignment]
    told = set(names(module))
    for name, parameter in module.named_parameters():
        if name in told:
            parameter._ddp_ignored = True  # type: ignore[attr-defined]  # by DDP's mixed precision


def leave_bank_alone(bank: nn.Module) -> None:
    """Have FSDP 2 leave a bank of experts alone, as it does modules that DDP's composable form manages."""
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    setattr(bank, REGISTRY_KEY, OrderedDict(replicate=RegistryItem()))


@not_compiled
def data_parallel(layer: nn.Module, bank: nn.Module, dtype: torch.dtype) -> DataParallel | None:
    """What averages the gradients around a layer whose bank of experts this rank alone holds; None where nothing does.

    Args:
        layer: The layer.
        bank: Its bank of experts, or what adapts that.
        dtype: Of the tokens that come in.

    Raises:
        UserError: it takes ranks' experts for copies of each other.
    """
    own = list(bank.parameters())
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None:
        if any(p is q for p in own for q in ddp._module_parameters):
            raise _refusal(
                "DistributedDataParallel",
                "call unifmoe_dist.leave_experts_alone on the module that DistributedDataParallel gets",
            )
        if ddp._join_config.enable:
            raise UserError(
                "Experts are spread over ranks by expert_group, so no rank may stop before others, as it may in "
                "DistributedDataParallel.join; give all ranks the same number of batches, empty ones where need be."
            )
        return DataParallel(own, lambda: [ddp.process_group], ddp.require_backward_grad_sync)
    older = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if older is not None and called_by(lambda code: code.co_filename == older.__file__):
        raise _refusal("FullyShardedDataParallel", "use FSDP 2, torch.distributed.fsdp.fully_shard")
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in bank.modules()):
        raise _refusal("fully_shard", "use a release of PyTorch that this package was tested with")
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in layer.modules()):
        cast = None if torch.is_autocast_enabled(own[0].device.type) else dtype  # its mixed precision casts the rest
        return DataParallel(own, functools.partial(_fsdp_groups, layer), dtype=cast)
    return None


def _fsdp_groups(layer: nn.Module) -> list[dist.ProcessGroup]:
    """The dimensions of the mesh over which FSDP 2 shards a layer."""
    for parameter in layer.parameters():
        if is_dtensor(parameter):
            return [parameter.device_mesh.get_group(dim) for dim in range(parameter.device_mesh.ndim)]
    assert dist.group.WORLD is not None
    return [dist.group.WORLD]  # kept whole between passes: the default of fully_shard


def _refusal(who: str, instead: str) -> UserError:
    return UserError(
        f"The experts are spread over ranks by expert_group, but {who} treats them as copies of each other and trains "
        f"the wrong ones; {instead}, or give upcycle no expert_group."
    )
