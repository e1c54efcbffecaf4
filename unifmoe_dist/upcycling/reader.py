"""Reading an FFN of any make: which projections it has is seen from their shapes, what it computes from its outputs.

    down(act(up(x)))      down(act(gate(x)) * up(x))      the same with gate and up as the halves of one projection

Every reading of a module that its shapes allow is computed from the weights on a few tokens; the one that gives the
module's own output is right, and where none does, the FFN computes something else and is refused. So the order of
packed halves, a norm or a scale inside cannot be mistaken.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.config.layers import ACTIVATIONS
from unifmoe_dist.errors import UserError, listed
from unifmoe_dist.kernels.activations import FUNCTIONS
from unifmoe_dist.lending import is_dtensor
from unifmoe_dist.upcycling.dense_ffn import CONV1D, DenseFFN, activation_name, kind_of, unfit

WAY_OUT = (
    'name its parts with ffns={"module": ("up", "act", "down")}, or write an adapter and give it to '
    '`unifmoe_dist.register_adapter`: see "Another family" in docs/upcycling.md.'
)


@dataclass(frozen=True)
class Parts:
    """Names of an FFN's parts inside its module: projections that read the token, one that writes it, the activation.

    `inputs` are (up,), one that holds gate and up, or (gate, up), whose order is open where `ordered` is false.
    `activation` is an attribute or a name of `UniFMoEConfig`; None where it is looked for.
    """

    inputs: tuple[str, ...]
    down: str
    activation: str | None = None
    ordered: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        return (*self.inputs, self.down)

    @classmethod
    def named(cls, names: Sequence[str], place: str) -> Parts:
        """(up, act, down) or (gate, act, up, down), as a user writes them. Raises UserError for anything else."""
        several = isinstance(names, (tuple, list)) and len(names) in (3, 4)
        if not several or not all(isinstance(name, str) for name in names):
            raise UserError(
                f'ffns[{place!r}] is {names!r}; give the names of its parts, ("up", "act", "down"), or '
                '("gate", "act", "up", "down") where it is gated.'
            )
        first, activation, *more, down = names
        return cls((first, *more), down, activation, ordered=True)

    @classmethod
    def of(cls, module: nn.Module) -> Parts | None:
        """The parts of a module whose own projections have the shapes of an FFN, at least as wide as the token.

        Of two, the first reads the token; of three, the one whose shape is another's reversed writes it. A module that
        also holds what is neither projection nor norm is more than an FFN.
        """
        sizes = {name: size for name, part in module.named_children() if (size := size_of(part)) is not None}
        others = (part for name, part in module.named_children() if name not in sizes)
        if any(
            "norm" not in type(part).__name__.lower() and next(part.parameters(), None) is not None for part in others
        ):
            return None
        for down, (hidden, dim) in reversed(sizes.items()):
            inputs = tuple(name for name in sizes if name != down)
            separate = len(inputs) in (1, 2) and {sizes[name] for name in inputs} == {(dim, hidden)}
            packed = len(inputs) == 1 and sizes[inputs[0]] == (dim, 2 * hidden)
            first = len(inputs) == 2 or next(iter(sizes)) in inputs
            if hidden >= dim and first and (separate or packed):
                return cls(inputs, down)
        return None


def size_of(part: Any) -> tuple[int, int] | None:
    """Widths that a projection reads and writes; None where it is none."""
    if kind_of(part) == CONV1D:
        return part.weight.shape[0], part.nf
    inside, outside = getattr(part, "in_features", None), getattr(part, "out_features", None)
    return (inside, outside) if isinstance(inside, int) and isinstance(outside, int) else None


def attribute(module: Any, name: str) -> Any:
    """What a name with dots leads to from a module; None where there is nothing."""
    return reduce(lambda part, step: getattr(part, step, None), name.split("."), module)


def read_ffn(module: Any, place: str, parts: Parts, alone: bool = True) -> DenseFFN:
    """The dense FFN that a module holds.

    Args:
        module: The module that has the parts, on its own or inside other modules.
        place: Its name in the model, for messages.
        parts: Their names.
        alone: Whether the module is the FFN and nothing else, so that what was read can be compared with it.

    Raises:
        UserError: a part is missing; the activation is none of a layer's; the FFN computes something else.
    """
    readings = list(_readings(module, place, parts))
    first = readings[0]
    if not alone or any(unfit(part) or not _whole(part) for part in first.sources):
        return first  # what cannot be copied is refused by `upcycle`, which says why
    if first.up.weight.is_meta and len({reading.activation for reading in readings}) == 1:
        return first  # nothing to copy: the order of gate and up does not matter
    twin = _telling(module, first)
    return readings[_nearest(twin, place, parts, readings if twin is module else list(_readings(twin, place, parts)))]


def outputs(module: nn.Module, x: Tensor) -> tuple[Tensor, list[nn.Module]]:
    """What a module gives in evaluation, and the dropouts that its output passes, after its last projection."""
    passed: list[nn.Module] = []

    def note(part: nn.Module, *_: Any) -> None:
        passed.append(part) if isinstance(part, nn.Dropout) else passed.clear()

    noted = [part for part in module.modules() if isinstance(part, nn.Dropout) or size_of(part) is not None]
    hooks = [part.register_forward_hook(note) for part in noted]
    modes = [(part, part.training) for part in module.modules()]
    try:
        with torch.no_grad(), _exact(x):
            return module.eval()(x), passed
    finally:
        for part, mode in modes:
            part.training = mode
        for hook in hooks:
            hook.remove()


def _readings(module: Any, place: str, parts: Parts) -> Iterator[DenseFFN]:
    """What the FFN may be, the likeliest first."""
    *inputs, down = (_part(module, place, name) for name in parts.projections)
    held_by = (*inputs, down)
    _check_widths(place, parts.projections, inputs, down)
    hidden = size_of(down)[0]  # type: ignore[index]
    pairs: list[tuple[Any, Any]]
    if len(inputs) == 2:
        gate, up = (_linear(part) for part in inputs)
        pairs = [(gate, up)] if parts.ordered else [(gate, up), (up, gate)]
    elif size_of(inputs[0])[1] == 2 * hidden:  # type: ignore[index]
        first, second = _linear(inputs[0], slice(0, hidden)), _linear(inputs[0], slice(hidden, None))
        pairs = [(first, second), (second, first)]
    else:
        pairs = [(None, _linear(inputs[0]))]
    try:
        activations = _activations(module, parts.activation)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    for activation in activations:
        for gate, up in pairs:
            yield DenseFFN(up, _linear(down), activation, gate, held_by)


def _part(module: Any, place: str, name: str) -> Any:
    part = attribute(module, name)
    if size_of(part) is None:
        found = ", ".join(name for name, _ in module.named_children()) or "nothing"
        kind = "absent" if part is None else f"a {type(part).__name__}"
        raise UserError(f"{place}.{name} is {kind}, where a linear projection was expected; {place} has {found}.")
    return part


def _check_widths(place: str, names: Sequence[str], inputs: Sequence[Any], down: Any) -> None:
    hidden, dim = size_of(down) or (0, 0)
    sizes = [size_of(part) for part in inputs]
    if any(size != (dim, hidden) for size in sizes) and sizes != [(dim, 2 * hidden)]:
        widths = listed([f"{name} {size_of(part)}" for name, part in zip(names, (*inputs, down), strict=True)], "and")
        raise UserError(
            f"{place} has {widths}, widths read and written, which fit no FFN: what is not the last must read the "
            "width that the last writes, and write the one that it reads (twice that, where gate and up are packed)."
        )


def _activations(module: Any, named: str | None) -> list[str]:
    """Names of the activations that a module may have: its own, or where none is seen, all."""
    if named is not None:
        own = attribute(module, named)
        if own is None and named not in ACTIVATIONS:
            raise UserError(
                f"The FFN's activation {named} is not supported: it is no part of a {type(module).__name__} and not "
                f"one of {', '.join(sorted(ACTIVATIONS))}."
            )
        return [named] if own is None else [activation_name(own)]
    attributes = {**vars(module), **dict(module.named_children())}
    for name, value in attributes.items():
        if "act" in name and callable(value) and not (isinstance(value, nn.Dropout) or size_of(value)):
            return [activation_name(value)]
    seen = [known for value in module.children() if (known := _known(value)) not in (None, "identity")]
    return [str(name) for name in seen] or list(FUNCTIONS)


def _known(activation: Any) -> str | None:
    try:
        return activation_name(activation)
    except UserError:
        return None


def _whole(part: Any) -> bool:
    """Whether a projection's weight is one matrix here."""
    return part.weight.dim() == 2 and not is_dtensor(part.weight)


def _linear(part: Any, rows: slice | None = None) -> Any:
    """A projection, or the given ones of its outputs, as an nn.Linear with the same weights."""
    if unfit(part) or not _whole(part) or (isinstance(part, nn.Linear) and rows is None):
        return part
    rows = rows or slice(None)
    weight = (part.weight.detach().T if kind_of(part) == CONV1D else part.weight.detach())[rows]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta").train(part.training)
    own = linear._parameters  # set there, a parameter is left alone by Transformers, which may send new ones to meta
    own["weight"] = nn.Parameter(weight, requires_grad=part.weight.requires_grad)
    if part.bias is not None:
        own["bias"] = nn.Parameter(part.bias.detach()[rows], requires_grad=part.bias.requires_grad)
    return linear


# -- what the module computes -----------------------------------------------------------------------------------------


@torch.no_grad()
def _telling(module: nn.Module, ffn: DenseFFN) -> nn.Module:
    """The module, or a float32 copy of it where its numbers would tell too little of what it computes.

    Half precision hides a small scale or leak in its rounding. Weights of zeros, with which projections may start, hide
    everything, and those on the meta device are none: the copy's are random.
    """
    weights = [part.weight for part in ffn.projections]
    blank = weights[0].is_meta or not all(weight.any() for weight in weights)
    if not blank and all(weight.dtype in (torch.float32, torch.float64) for weight in weights):
        return module
    twin = copy.deepcopy(module)
    twin = twin.to_empty(device="cpu").float() if weights[0].is_meta else twin.float()
    random = torch.Generator().manual_seed(0)
    for tensor in twin.parameters() if blank else ():
        tensor.copy_(torch.randn(tensor.shape, generator=random, device="cpu"))
    return twin


@torch.no_grad()
def _nearest(module: nn.Module, place: str, parts: Parts, readings: list[DenseFFN]) -> int:
    """Which reading computes what the module does. Raises UserError where none does."""
    x = _tokens(readings[0])
    try:
        wanted = outputs(module, x.clone())[0].float()  # a module may change its input in place
    except Exception as error:  # whatever a module of somebody else's raises
        raise UserError(
            f"{place}, a {type(module).__name__}, cannot be called with tokens alone, as an FFN is ({error}); {WAY_OUT}"
        ) from error
    scale = wanted.abs().max().clamp_min(1e-30)
    wrong = [float((_compute(reading, x) - wanted).abs().max() / scale) for reading in readings]
    best = min(range(len(wrong)), key=lambda index: (math.isnan(wrong[index]), wrong[index]))
    if wrong[best] <= 0.003:
        return best
    own = {name.partition(".")[0] for name in parts.projections}
    more = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_children()
        if name not in own and any(True for _ in part.parameters())
    ]
    why = f"; blocks of hidden channels cannot have its {listed(more, 'and')}" if more else ""
    raise UserError(
        f"{place}, a {type(module).__name__}, computes something else than an FFN of its "
        f"{listed(parts.projections, 'and')}: outputs differ by {wrong[best]:.0%}{why}; if it is one, {WAY_OUT}"
    )


def _exact(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast, which a meta device has not."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _compute(ffn: DenseFFN, x: Tensor) -> Tensor:
    activation: Callable[[Tensor], Tensor] = FUNCTIONS[ffn.activation]
    with _exact(x):
        hidden = activation(ffn.up(x)) if ffn.gate is None else activation(ffn.gate(x)) * ffn.up(x)
        return ffn.down(hidden).float()


def _tokens(ffn: DenseFFN) -> Tensor:
    """(1, 8, D) tokens, always the same, long enough for the activation to be far from linear."""
    weight = ffn.up.weight
    x = torch.randn(1, 8, ffn.up.in_features, generator=torch.Generator().manual_seed(0), device="cpu")
    x = x.to(weight.device, weight.dtype)
    reads = [float(part(x).float().std(dim=1).square().mean()) for part in (ffn.gate, ffn.up) if part is not None]
    return x * 3 / max(reads) ** 0.5 if max(reads) > 0 else x
