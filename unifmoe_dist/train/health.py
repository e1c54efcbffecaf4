"""Whether a step may be applied: losses and gradients must be finite on every rank, or no rank applies it.

All ranks agree before the update, through one all-reduce of two integers that also carries a stop signal. It costs that
exchange, one pass over the gradients that this rank holds (under ZeRO 1 to 3, its partition), and one wait of the host
for the device. Only when something is wrong is the step run again, with hooks, to find the place.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import deepspeed
from unifmoe_dist.upcycling import moe_layers


@dataclass(frozen=True)
class Verdict:
    """What all ranks agreed on: whether the step is finite everywhere, and a signal that reached some rank (or 0)."""

    finite: bool
    signal: int


class StepCheck:
    """Collects what one step shows and agrees on it with the other ranks.

    Of `scaled` gradients (fp16) overflow is the loss scaler's business: only losses are checked.
    """

    def __init__(self, engine: Any, ranks: Ranks, scaled: bool) -> None:
        self.engine, self.ranks, self.scaled = engine, ranks, scaled
        self._finite = torch.ones((), dtype=torch.bool, device=ranks.device)

    def note(self, loss: Tensor) -> None:
        """Look at the loss of one micro-batch."""
        self._finite = self._finite & loss.detach().isfinite().all()

    def agree(self, signal: int) -> Verdict:
        """Between the last backward pass and the update; collective."""
        finite = self._finite
        if not self.scaled:
            finite = finite & _gradients_finite(self.engine, self.ranks.device)
        self._finite = torch.ones_like(finite)
        flags = torch.stack([(~finite).long(), torch.full_like(finite, signal, dtype=torch.int64)])
        if self.ranks.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        bad, agreed = flags.tolist()
        return Verdict(not bad, agreed)


def _gradients_finite(engine: Any, device: torch.device) -> Tensor:
    gradients = list(deepspeed.held_gradients(engine))
    if not gradients:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.nn.utils.get_total_norm(gradients).isfinite().to(device)


# -- finding the place ----------------------------------------------------------------------------------------------

_KINDS = ("weights", "inputs", "forward", "loss", "backward", "gradients")


def locate(
    model: nn.Module,
    micro_batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
    ranks: Ranks,
    inputs_of: Callable[[Any], dict[str, Tensor]],
) -> tuple[str, bool]:
    """Run a step again without an update, and say where on which rank it first stops being finite; collective.

    The model is the training algorithm, not the engine: gradients are computed aside and reach no optimiser.

    Returns:
        A phrase such as "rank 1: blocks.3.mlp gave values that are not finite", and whether weights are affected.
    """
    found: list[tuple[str, str]] = [
        ("weights", f"the weight {_shown(name)} is not finite")
        for name, p in model.named_parameters()
        if not _finite(p)
    ]
    trained = {_shown(name): p for name, p in model.named_parameters() if p.requires_grad}
    with unnoticed(model, ranks.device):
        for batch in micro_batches:
            found += [("inputs", f"the input {n} is not finite") for n, t in inputs_of(batch).items() if not _finite(t)]
            with _traced(model) as trace:
                loss = loss_of(batch)
                found += [("forward", f"{trace.forward} gave values that are not finite")] if trace.forward else []
                found += [] if _finite(loss) else [("loss", "the loss is not finite, though the model's output is")]
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            found += [("backward", f"the gradient through {trace.backward} is not finite")] if trace.backward else []
            found += [
                ("gradients", f"the gradient of {name} is not finite")
                for name, gradient in zip(trained, gradients, strict=True)
                if gradient is not None and not _finite(gradient)
            ]
    found.sort(key=lambda entry: _KINDS.index(entry[0]))
    everywhere = ranks.gather(found[0] if found else None)
    kinds = [_KINDS.index(entry[0]) for entry in everywhere if entry is not None]
    if not kinds:
        return "nowhere when the step was repeated, so it may have been the hardware", False
    first = _KINDS[min(kinds)]  # what is found later in the pass on other ranks follows from it
    places = [f"rank {r}: {entry[1]}" for r, entry in enumerate(everywhere) if entry and entry[0] == first]
    return "; ".join(places), first == "weights"


def _shown(name: str) -> str:
    """What the algorithm calls model.x is the model's x."""
    return name.removeprefix("model.")


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.detach().isfinite().all())


@dataclass
class _Trace:
    """Names of the first modules that give a value or a gradient that is not finite."""

    forward: str = ""
    backward: str = ""
    behind: str = ""  # the module whose gradient was computed last


@contextmanager
def _traced(model: nn.Module) -> Iterator[_Trace]:
    trace = _Trace()

    def hook_for(name: str) -> Callable[..., None]:
        def gradient(grad: Tensor) -> None:
            if not trace.backward and not _finite(grad):
                trace.backward = trace.behind or name
            trace.behind = name

        def output(module: nn.Module, args: Any, result: Any) -> None:
            for tensor in _tensors(result):
                if not trace.forward and not _finite(tensor):
                    trace.forward = name
                if tensor.requires_grad and all(tensor is not given for given in args):  # not nn.Identity
                    tensor.register_hook(gradient)

        return output

    wholes = ("", "model")  # a part is to be named
    parts = {_shown(name): module for name, module in model.named_modules() if name not in wholes}
    handles = [module.register_forward_hook(hook_for(name)) for name, module in parts.items()]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _tensors(result: Any) -> list[Tensor]:
    if torch.is_tensor(result):
        return [result]
    values = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else []
    return [tensor for value in values for tensor in _tensors(value)]


@contextmanager
def unnoticed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave generators and usage statistics as they were."""
    usage = {layer: layer.usage.snapshot() for layer in moe_layers(model).values()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for layer, totals in usage.items():
                layer.usage.restore(totals)
