"""What is made of weights, kept for as long as they stay as they are: their copies in half precision, block prototypes.

A weight has changed with its place in memory or its version, which every write in place raises except one through
`.data`. Some optimisers write so, and engines that copy an optimiser's result into the weights: therefore a step of any
optimiser of torch drops everything, before it (its peak of memory is not the time to hold copies) and after it.

On the CPU a sample of the weights is compared too, one of every row; those of small matrices all. On a GPU that would
wait for the device, so there things are kept in training alone, in passes with gradients, of weights that an optimiser
of torch has stepped and that still is there: who changes others is unknown, averages of weights say, or in evaluation.
And nothing serves a second pass, but a recomputation, unless the weights have gradients: a loop that steps by hand, or
perturbs weights for a pass, takes those away.

Nothing is kept where weights come and go (FSDP, ZeRO 3), of what is no plain parameter, for a tracer or a transform,
nor in the capture of a CUDA graph, whose replays must make it of the weights as they are then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unifmoe_dist.eager import in_transform

Made = TypeVar("Made")

_ALL_OF = 1 << 15  # so many weights are compared wholly, to tell whether any were changed behind autograd's back
_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


class _Everything:
    """All that is kept, by the first of the modules whose the weights are, with which it goes, and by name."""

    by_holder: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()  # a weight may be swapped for another
    optimisers: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()
    """Which has stepped a weight on a GPU, by the weight's id; it holds its weights, so ids stay theirs."""


def kept(name: str, weights: Sequence[Any], make: Callable[[], Made], *holders: nn.Module) -> Made | None:
    """`make()`, which is made anew only where one of `weights` has changed; None where it must not be kept.

    Args:
        name: What is made, of those weights.
        weights: Parameters.
        make: Called without gradients, in no mode of inference.
        holders: Modules whose they are, one at least.
    """
    if torch.compiler.is_compiling():
        return None
    _listen()
    training = all(holder.training for holder in holders)
    if any(map(_comes_and_goes, holders)) or not all(_can_tell(weight, training) for weight in weights):
        return None
    if _traced() or _captured(weights[0]):
        return None
    of_holder = _Everything.by_holder.setdefault(holders[0], {})
    seen, made = of_holder.get(name, ((), None))
    if len(seen) != len(weights) or not all(s.holds(w) for s, w in zip(seen, weights, strict=True)):
        of_holder.pop(name, None)  # its memory serves what takes its place
        made = None  # here too
        with torch.inference_mode(False), torch.no_grad():
            seen = [_Seen.of(weight) for weight in weights]
            made = make()
        of_holder[name] = seen, made
    return made


def forget(holder: nn.Module) -> None:
    """Keep nothing that is made of a module's weights."""
    _Everything.by_holder.pop(holder, None)


def _comes_and_goes(holder: nn.Module) -> bool:
    """Whether FSDP shards the module's weights between passes, or Accelerate offloads them."""
    return getattr(holder, "_is_fsdp_managed_module", False) or hasattr(holder, "_hf_hook")


def _can_tell(weight: Any, training: bool) -> bool:
    """Whether a change of the weight would be noticed."""
    if type(weight) is not nn.Parameter or hasattr(weight, "ds_status"):
        return False
    if _kind(weight) == "cuda":
        trained = training and torch.is_grad_enabled() and not weight.is_inference()
        return trained and id(weight) in _Everything.optimisers
    return _kind(weight) == "cpu" and weight.is_contiguous()


def _kind(weight: Tensor) -> str:
    return weight.device.type


def _traced() -> bool:
    """Whether tensors now are not what they seem, and must not outlive whoever looks on."""
    if torch.jit.is_tracing() or in_transform():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(k) for k in _TRACERS)


def _captured(weight: Tensor) -> bool:
    """Whether work on the weight is recorded for a CUDA graph."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class _Seen:
    """How a weight was when something was made of it."""

    storage: StorageWeakRef  # its address is given to no other storage while this is held
    place: tuple[int, ...]
    sample: Tensor | None

    @classmethod
    def of(cls, weight: Tensor) -> _Seen:
        sample = _sample(weight)
        kept_sample = None if sample is None else sample.clone()
        return cls(StorageWeakRef(weight.untyped_storage()), _place(weight), kept_sample)

    def holds(self, weight: Tensor) -> bool:
        if self.storage.cdata != weight.untyped_storage()._cdata or self.place != _place(weight):
            return False
        if _kind(weight) == "cuda" and weight.grad is None and torch._C._current_graph_task_id() == -1:
            return False  # between steps that an optimiser takes, only the first pass is one without
        sample = _sample(weight)
        return sample is None or self.sample is not None and torch.equal(self.sample, sample)


def _place(weight: Tensor) -> tuple[int, ...]:
    """Which and where a weight is, its version, and on a GPU the stream that may read what is made of it."""
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
    return id(weight), weight.data_ptr(), 0 if weight.is_inference() else weight._version, stream


def _sample(weight: Tensor) -> Tensor | None:
    """Some of the weights, of every row and column; None where a look at them would wait for a device."""
    if _kind(weight) != "cpu":
        return None
    # One less than a row: no row falls between two of them, and the column is another one in each.
    apart = max(weight.shape[-1] - 1, 1) if weight.ndim > 1 and weight.numel() > _ALL_OF else 1
    return weight.detach().view(-1)[::apart]


@functools.cache
def _listen() -> None:
    register_optimizer_step_pre_hook(_before_a_step)
    register_optimizer_step_post_hook(_after_a_step)


def _before_a_step(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled step raises the versions of what it writes
        _Everything.by_holder.clear()


def _after_a_step(optimiser: Optimizer, *_: Any) -> None:
    _before_a_step()
    if not torch.compiler.is_compiling():
        for group in optimiser.param_groups:
            for weight in group["params"]:
                if _kind(weight) == "cuda" and _Everything.optimisers.get(id(weight)) is not optimiser:
                    _Everything.optimisers[id(weight)] = optimiser


class AsCopies(torch.autograd.Function):
    """Kept copies in the place of tensors, to which the copies' gradients go, in their own type."""

    @staticmethod
    def forward(ctx: Any, copies: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        made = [copy.detach() for copy in copies]  # each pass has its own: autograd writes on them what they come of
        ctx.mark_non_differentiable(*(t for t, want in zip(made, ctx.needs_input_grad[1:], strict=True) if not want))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True))
