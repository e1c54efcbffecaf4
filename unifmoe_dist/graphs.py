"""CUDA graphs of a layer: its many short launches, recorded once for a shape, are repeated by one call of the host.

A shape that comes a third time is captured, forward and backward; its first two passes compile, tune and prove the
kernels. Tokens are copied into a graph, its output and its gradients out of it, so nobody holds memory that the next
repetition writes. A graph reads weights where they are: steps of an optimiser need no new one, weights elsewhere drop
all. The two graphs of a shape have a pool of memory of their own: layers may run in any order.

What a graph cannot repeat runs eagerly, beside it: a second pass before the backward pass of the first, activation
checkpointing, hooks inside the layer, tracers. Experts on other ranks, whose exchange waits for the device, and
replicas of nn.DataParallel never are captured.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as torch_module

from unifmoe_dist.captures import Cuda
from unifmoe_dist.eager import in_transform
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels import chosen_kernels
from unifmoe_dist.kernels.scratch import Scratch, lending
from unifmoe_dist.lending import bare
from unifmoe_dist.usage import Usage, recomputing

MOST = 4
"""Graphs that a layer keeps, such as those of training and evaluation, whole and last batches."""

_EAGER_PASSES = 2  # of a shape, before it is captured
_SHAPES_COUNTED = 256

Pass = Callable[[Tensor, Tensor | None], Tensor]
"""Of (N, D) tokens and a mask, or none."""

device: Any = Cuda()

_one_capture = threading.Lock()  # threads whose layers are on one device would capture on one stream


class _Buffers(dict[str, Tensor]):
    """What all graphs of a place are lent, by name."""


_buffers: WeakValueDictionary[Hashable, _Buffers] = WeakValueDictionary()  # of places that have graphs


class LayerGraphs:
    """The graphs of one layer. They neither are copied nor saved with it: a copy captures its own."""

    def __init__(self) -> None:
        self.drop()
        self.failure: str | None = None
        self._one_at_a_time = threading.RLock()  # threads that evaluate one layer write into the same graph

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGraphs:
        return LayerGraphs()

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerGraphs, ()

    def drop(self) -> None:
        """Forget what was captured, and its memory."""
        self._made: dict[Hashable, _Captured] = {}
        self._seen: Counter[Hashable] = Counter()
        self._weights: Hashable = None

    def run(self, layer: Any, function: Pass, x: Tensor, mask: Tensor | None) -> Tensor:
        """`function(x, mask)`, which is a pass of the layer, by a graph where there is one for it."""
        if not device.takes(x):
            return function(x, mask)
        parts = list(layer.modules())
        if not x.shape[0] or _watched(parts) or (layer.training and not torch.is_grad_enabled()):
            return function(x, mask)
        parameters = [*{id(p): p for part in parts for p in part._parameters.values() if p is not None}.values()]
        if reason := self.failure or _obstacle(layer, parameters):
            _say_once(f"cuda_graphs changes nothing in a layer of width {x.shape[1]}: {reason}.")
            return function(x, mask)
        with self._one_at_a_time:
            repeated = self._repeat(layer, function, x, mask, parts, parameters)
        return function(x, mask) if repeated is None else repeated

    def _repeat(
        self,
        layer: Any,
        function: Pass,
        x: Tensor,
        mask: Tensor | None,
        parts: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
    ) -> Tensor | None:
        """The pass by a graph; None where there is none for it."""
        with_gradients = torch.is_grad_enabled()
        self._check_weights([*parameters, *(b for part in parts for b in part._buffers.values() if b is not None)])
        trained = [p for p in parameters if p.requires_grad] if with_gradients else []
        differentiated = with_gradients and (x.requires_grad or bool(trained))
        key = _key(layer, x, mask, differentiated)
        made = self._made.get(key)
        if made is not None and made.totals is not layer.usage.totals:
            self.drop()  # it would count into what is no longer looked at
            made = None
        if made is None:
            whole = _Whole(layer, function)
            made = self._capture(key, layer.usage, whole, x, mask, trained if differentiated else None)
        if made is None or made.awaited():
            return None
        return made(x, mask, trained)

    def _check_weights(self, tensors: Iterable[Tensor]) -> None:
        """Drop graphs that read weights where they are no longer, or leave out gradients."""
        weights = tuple((t.data_ptr(), t.dtype, t.requires_grad) for t in tensors)
        if weights != self._weights:
            self.drop()
            self._weights = weights

    def _capture(
        self,
        key: Hashable,
        usage: Usage,
        whole: _Whole,
        x: Tensor,
        mask: Tensor | None,
        trained: Sequence[Tensor] | None,
    ) -> _Captured | None:
        """Graphs of a pass that has come often enough, if there is room for one more."""
        if len(self._seen) > _SHAPES_COUNTED:
            self._seen.clear()
        self._seen[key] += 1
        if self._seen[key] <= _EAGER_PASSES:
            return None
        if len(self._made) >= MOST:
            _say_once(
                f"a layer of width {x.shape[1]} has CUDA graphs of {MOST} kinds of input, and others run eagerly; pad "
                "inputs to few sizes."
            )
            return None
        counted, place = usage.snapshot(), device.place(x)
        try:
            with _one_capture, device.aside(x), torch.inference_mode(False), _no_cached_casts(x):
                self._made[key] = _Captured(place, whole, x, mask, trained)
        except Exception as error:
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of a capture adds an error of its own
                cause = cause.__context__
            self._made.pop(key, None)
            self.failure = str(cause).strip().splitlines()[0].rstrip(".")
            _say_once(f"cuda_graphs changes nothing in a layer of width {x.shape[1]}: {self.failure}.")
        usage.restore(counted)
        made = self._made.get(key)
        if made is not None:
            made.totals = usage.totals
        return made


class _Whole(nn.Module):
    """A layer's pass as the forward of a module, whose weights can be stood for."""

    def __init__(self, layer: nn.Module, function: Pass) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.function(x, mask)


class _Captured:
    """Forward and, where it is differentiated, backward pass over one shape, captured.

    In place of trained weights stand tensors with their memory: what accumulates a weight's own gradient may belong to
    another stream, and its hooks are for the gradient that arrives there.
    """

    def __init__(
        self, place: Hashable, whole: _Whole, x: Tensor, mask: Tensor | None, trained: Sequence[Tensor] | None
    ) -> None:
        self.x = x.detach().clone(memory_format=torch.contiguous_format)
        self.x.requires_grad_(trained is not None and x.requires_grad)
        self.mask = None if mask is None else mask.clone()
        self.totals: Tensor | None = None  # the statistics into which it counts
        self.differentiated = trained is not None
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        weights = {names[id(p)]: p.detach().requires_grad_() for p in trained or ()}
        self._last: Callable[[], _Once | None] = lambda: None
        graph: list[Tensor] = []  # the output that autograd knows, and with it all that the backward pass reads

        def forward() -> list[Tensor]:
            with torch.set_grad_enabled(self.differentiated):
                graph[:] = [torch.func.functional_call(whole, weights, (self.x, self.mask))]
            return [graph[0].detach()]

        wanted = [*([self.x] if self.x.requires_grad else []), *weights.values()]

        def backward() -> Sequence[Tensor | None]:
            return torch.autograd.grad(graph, wanted, [self.grad_y], retain_graph=True, allow_unused=True)

        def both() -> None:
            (y,) = forward()
            self.grad_y = torch.zeros_like(y)
            if self.differentiated:
                backward()

        self.scratch = scratch = Scratch(_buffers.setdefault(place, _Buffers()))
        pool = device.pool()
        with lending(scratch):
            if device.waits(both):  # on this stream for the first time, too, where libraries may make something
                raise RuntimeError("its kernels here, such as those of plain PyTorch, wait for the device")
            graph.clear()
            scratch.hold(x.device)
            self._forward, (self.y,) = device.capture(pool, forward)
            if self.differentiated:
                self._backward, self.grads = device.capture(pool, backward)
        self.graph = graph

    def awaited(self) -> bool:
        """Whether a backward pass has still to read what the last forward pass has left."""
        last = self._last()
        return last is not None and not last.done

    def __call__(self, x: Tensor, mask: Tensor | None, trained: Iterable[Tensor]) -> Tensor:
        if not self.differentiated:
            return self.replay(x, mask)
        return _Repeated.apply(self, x, mask, *trained)

    @torch.no_grad()
    def replay(self, x: Tensor, mask: Tensor | None) -> Tensor:
        self.x.detach().copy_(x)
        if self.mask is not None and mask is not None:
            self.mask.copy_(mask)
        self._forward()
        return self.y.clone()

    def begin(self) -> _Once:
        once = _Once()
        self._last = weakref.ref(once)
        return once

    def replay_backward(self, once: _Once, grad_y: Tensor) -> list[Tensor | None]:
        """Copies of the gradients of x and the weights: a hook or `torch.autograd.grad` may keep what it is given."""
        if self._last() is not once:
            raise UserError(
                "a second backward pass through a layer with cuda_graphs came after another forward pass, which has "
                "overwritten what it needs; do both backward passes first, or set the layer's cuda_graphs to False."
            )
        self.grad_y.copy_(grad_y)
        self._backward()
        copies = [None if grad is None else grad.clone() for grad in self.grads]
        once.done = True  # from here on a pass of another thread may overwrite them
        return copies if self.x.requires_grad else [None, *copies]


class _Once:
    """One forward pass, for as long as autograd remembers it."""

    done = False  # whether its backward pass has been


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, x: Tensor, mask: Tensor | None, *trained: Tensor) -> Tensor:
        ctx.captured, ctx.once = captured, captured.begin()
        return captured.replay(x, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        of_x, *of_weights = ctx.captured.replay_backward(ctx.once, grad_y)
        return None, of_x, None, *of_weights


def _key(layer: nn.Module, x: Tensor, mask: Tensor | None, differentiated: bool) -> Hashable:
    """All that decides what runs, but for values."""
    kind = x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    # Not torch.get_float32_matmul_precision(), which raises where a caller has set this attribute.
    settings = torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled()
    shape = tuple(x.shape), x.dtype, x.requires_grad, mask is None
    return device.place(x), shape, differentiated, layer.training, autocast, chosen_kernels(), settings


def _obstacle(layer: Any, parameters: Iterable[Tensor]) -> str | None:
    """Why no pass of a layer can be captured; None if it may be."""
    if not layer.dispatcher.local:
        return "its experts are spread over ranks, and their exchange waits for the device"
    for part in (layer, layer.router, layer.shared, layer.experts):
        if bare(part) is not part:
            return "it has adapters, which decide in Python what they add; merge them first"
        if getattr(part, "_is_replica", False):
            return "nn.DataParallel gives it other weights in every pass; use DistributedDataParallel"
        if getattr(part, "_is_fsdp_managed_module", False) or hasattr(part, "_hf_hook"):
            return "its weights are sharded or offloaded between passes"
    if any(hasattr(p, "ds_status") for p in parameters):
        return "its weights are sharded between passes"
    return None


def _watched(parts: Sequence[nn.Module]) -> bool:
    """Whether someone looks at or repeats this pass, for whom a graph has no Python to run."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or in_transform()
        or recomputing()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # such as those of checkpointing
        or torch_module._has_any_global_hook()
        or any(map(_has_hooks, parts[1:]))  # those of the layer itself are around this
    )


def _has_hooks(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


@contextlib.contextmanager
def _no_cached_casts(x: Tensor) -> Iterator[None]:
    """The caller's autocast, without its cache: a cast made in a capture is none outside of it, and the reverse."""
    kind = x.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


@functools.cache
def _say_once(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)
