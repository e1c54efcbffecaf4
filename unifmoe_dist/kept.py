"""What is made of weights, kept for as long as they stay as they are: their copies in half precision, block prototypes.

A weight has changed with its place in memory or its version, which every write in place raises except one through
`.data`. Some optimisers write so, and engines that copy an optimiser's result into the weights: therefore a step of any
optimiser of torch drops everything, before it (its peak of memory is not the time to hold copies) and after it. On the
CPU a sample of the weights is compared too. On a GPU that would wait for the device, so there things are kept in
training alone, and once an optimiser of torch has stepped: before, who changes weights is unknown, and in evaluation
they may be exchanged, for their averages say, by whoever asks nobody.

Nothing is kept where weights come and go (FSDP, ZeRO 3), of what is no plain parameter, for a tracer or a transform,
nor in the capture of a CUDA graph, whose replays must make it of the weights as they are then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from unifmoe_dist.eager import in_transform

Made = TypeVar("Made")

_SAMPLES = 512  # so many weights, about, tell whether any were changed behind autograd's back
_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


class _Everything:
    """All that is kept, by the first of the weights that it is made of, with which it goes, and by name."""

    by_weight: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    stepped = False  # whether an optimiser of torch has since something was to be kept


def kept(name: str, weights: Sequence[Any], make: Callable[[], Made], *holders: nn.Module) -> Made | None:
    """`make()`, which is made anew only where one of `weights` has changed; None where it must not be kept.

    Args:
        name: What is made, of those weights.
        weights: Parameters.
        make: Called without gradients, in no mode of inference.
        holders: Modules whose they are.
    """
    if torch.compiler.is_compiling():
        return None
    _listen()
    training = all(holder.training for holder in holders)
    if any(map(_comes_and_goes, holders)) or not all(_can_tell(weight, training) for weight in weights):
        return None
    if _traced() or _captured(weights[0]):
        return None
    of_weight = _Everything.by_weight.setdefault(weights[0], {})
    seen, made = of_weight.get(name, ((), None))
    if len(seen) != len(weights) or not all(s.holds(w) for s, w in zip(seen, weights, strict=True)):
        of_weight.pop(name, None)  # its memory serves what takes its place
        made = None  # here too
        with torch.inference_mode(False), torch.no_grad():
            seen = [_Seen.of(weight) for weight in weights]
            made = make()
        of_weight[name] = seen, made
    return made


def forget(weights: Iterable[Tensor]) -> None:
    """Keep nothing that is made of these weights."""
    for weight in weights:
        _Everything.by_weight.pop(weight, None)


def _comes_and_goes(holder: nn.Module) -> bool:
    """Whether FSDP shards the module's weights between passes, or Accelerate offloads them."""
    return getattr(holder, "_is_fsdp_managed_module", False) or hasattr(holder, "_hf_hook")


def _can_tell(weight: Any, training: bool) -> bool:
    """Whether a change of the weight would be noticed."""
    if type(weight) is not nn.Parameter or hasattr(weight, "ds_status"):
        return False
    if weight.is_cuda:
        return training and _Everything.stepped and not weight.is_inference()
    return weight.is_cpu and weight.is_contiguous()


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
        sample = _sample(weight)
        return sample is None or self.sample is not None and torch.equal(self.sample, sample)


def _place(weight: Tensor) -> tuple[int, ...]:
    """Where a weight is, its version, and on a GPU the stream that may read what is made of it."""
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version, stream


def _sample(weight: Tensor) -> Tensor | None:
    """Some of the weights, spread evenly; None where a look at them would wait for a device."""
    if not weight.is_cpu:
        return None
    return weight.detach().view(-1)[:: weight.numel() // _SAMPLES | 1]  # odd, not to keep to few columns


@functools.cache
def _listen() -> None:
    register_optimizer_step_pre_hook(_optimiser_steps)
    register_optimizer_step_post_hook(_optimiser_steps)


def _optimiser_steps(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled step raises the versions of what it writes
        _Everything.stepped = True
        _Everything.by_weight.clear()


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
