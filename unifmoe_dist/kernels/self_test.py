"""The Triton kernels prove themselves on a device before layers rely on them there.

Compilers and devices differ, and a wrong sum is worse than a slow one. At the first use of a shape a small case runs
forward and backward in both Triton and plain torch, in the tiles that the shape takes; if they disagree, or Triton
fails, plain torch is used, with a warning. Where a case cannot be tried, for lack of memory or while a CUDA graph is
captured or another thread tries one, plain torch is used until it can.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.eager import not_compiled
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels import tile_sizes
from unifmoe_dist.kernels.dropout import HiddenDropout
from unifmoe_dist.kernels.exchange import TorchPacking
from unifmoe_dist.kernels.exchange_trial import Rank, journey
from unifmoe_dist.kernels.grouped import grouped_block_ffn
from unifmoe_dist.routing import Routing, route

TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # of the largest value
_TOKENS = 96


@dataclass(frozen=True)
class _FFN:
    """What of a call decides how kernels are compiled and which tiles run."""

    device: torch.device
    dtype: torch.dtype
    dim: int
    width: int
    activation: str
    bias: bool
    gated: bool
    dropout: bool
    shared: bool
    tile_rows: int
    overflows: bool

    def __str__(self) -> str:
        kind = f"{'gated ' if self.gated else ''}block-sparse experts"
        more = f"{' with dropout' if self.dropout else ''}{' beside a shared one' if self.shared else ''}"
        rows = f"{self.tile_rows} rows a tile{', more than a workspace' if self.overflows else ''}"
        return f"{kind} of width {self.dim} and blocks of {self.width} in {self.dtype}{more}, {rows}"


@dataclass(frozen=True)
class _Routing:
    device: torch.device
    dtype: torch.dtype
    dim: int
    columns: int
    num_blocks: int

    def __str__(self) -> str:
        return f"routing of width {self.dim} to {self.columns - 1} experts in {self.dtype}"


@dataclass(frozen=True)
class _Exchange:
    device: torch.device
    dtype: torch.dtype
    dim: int
    experts: int
    num_blocks: int
    ranks: int

    def __str__(self) -> str:
        return f"the exchange of {self.dtype} tokens of width {self.dim} between {self.ranks} ranks"


Case = _FFN | _Routing | _Exchange
_verdicts: dict[Case, bool] = {}
_reasons: dict[Case, str] = {}  # of those that failed
_said = True
_one_at_a_time = threading.RLock()  # threads that evaluate or train layers would meet in torch's default type


def ffn_works(x: Tensor, weights: ExpertWeights, dropout: bool = False, shared: bool = False) -> bool:
    """Whether `triton_block_ffn` agrees with plain torch on x's device: for the widths and types of `weights`, in the
    tiles that (N, D) tokens x take, with dropout of hidden channels or without, beside a shared expert or without, and
    where they may need more tiles than the workspace holds, with the launch that computes those.
    """
    from unifmoe_dist.kernels.triton.workspace import part_channels, tile_rows

    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    experts, hidden, dim = weights.keys.shape
    bias, gated = weights.key_bias is not None, weights.gate_keys is not None
    rows = tile_rows(x.device, dtype, x.shape[0], experts + shared)
    width = hidden // weights.num_blocks
    sizes = x.shape[0], dim, width, weights.num_blocks, experts + shared, rows, dtype.itemsize
    overflows = tile_sizes.overflows(*sizes, shared, gated, part_channels(x.device, gated))
    case = _FFN(x.device, dtype, dim, width, weights.activation, bias, gated, dropout, shared, rows, overflows)
    return _proven(case, TOLERANCE[dtype], _compare_ffn)


def routing_works(x: Tensor, columns: int, num_blocks: int) -> bool:
    """Whether `triton_route` agrees with plain torch on x's device, for (N, D) tokens and (columns, D) weights."""
    # A token whose decision is within rounding may fall either way: one in a hundred may.
    return _proven(_Routing(x.device, x.dtype, x.shape[1], columns, num_blocks), 2e-2, _compare_routing)


def exchange_works(x: Tensor, experts: int, num_blocks: int, ranks: int) -> bool:
    """Whether `TritonPacking` agrees with plain torch on x's device, for `experts` on each of so many ranks.

    The trial has 16 ranks at most: more would differ in sizes alone.
    """
    case = _Exchange(x.device, x.dtype, x.shape[1], experts, num_blocks, min(ranks, 16))
    return _proven(case, 1e-2, _compare_exchange)  # of sums, which are rounded once


def failures() -> list[tuple[Case, str]]:
    """Every case that has failed, as any rank knows it: on no device in particular; and why."""
    failed = [case for case, passed in _verdicts.items() if not passed]
    return [(replace(case, device=torch.device(case.device.type)), _reasons.get(case, "it failed")) for case in failed]


def refuse(case: Case, reason: str, devices: Iterable[torch.device]) -> None:
    """Take plain torch for a case of `failures`, whatever its trial here has said or would say."""
    with _one_at_a_time:
        for device in devices:
            if device.type == case.device.type:
                here = replace(case, device=device)
                _verdicts[here], _reasons[here] = False, reason


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """Failures inside are for the caller to say."""
    global _said
    before, _said = _said, False
    try:
        yield
    finally:
        _said = before


def _compare_ffn(case: _FFN) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients of Triton and of plain torch, of experts of two blocks, and perhaps a shared one.

    More tokens choose one block than the other, so that some tiles are full and some nearly empty. The channels of the
    first two are kept, so that others are computed again. What overflows passes through the smallest workspace, of
    three tiles; four experts fill it more than twice. Then through one that holds five in the forward pass, all kept,
    and fewer in the backward pass, whose rows are longer.
    """
    from unifmoe_dist.kernels.triton import ffn

    experts, hidden = 4 if case.overflows else 2, 2 * case.width
    cuts, part = tile_sizes.parts(case.width, case.dtype.itemsize, case.gated)
    tile_bytes = cuts * part * (1 + case.gated) * case.tile_rows * case.dtype.itemsize  # of whole blocks
    tokens = max(48, 3 * case.tile_rows // 2)
    draw = _Draw(case.device, case.dtype)
    x, banks = draw(tokens, case.dim), []
    for count in (1, experts) if case.shared else (experts,):
        drawn = [draw(count, hidden, case.dim) for _ in range(3 if case.gated else 2)]
        biases = [draw(count, size) if case.bias else None for size in (hidden, case.dim, hidden)]
        banks.append([*drawn[:2], *biases[:2], *((drawn[2], biases[2]) if case.gated else (None, None))])
    gates = draw(tokens, experts + case.shared).float().abs()
    gates = gates.masked_fill(gates < 0.4, 0.0)
    chosen = draw(tokens, 2).float() > torch.tensor([-1.0, 1.0], device=case.device)
    seed = torch.tensor([1, -1], dtype=torch.int32, device=case.device)
    dropout = HiddenDropout(0.3, seed) if case.dropout else None

    def fused(held: int | None, kept: int, x: Tensor, gates: Tensor, *banks: ExpertWeights) -> Tensor:
        workspace_bytes = None if held is None else held * case.tile_rows * case.dim * case.dtype.itemsize
        options = ffn.TritonOptions(workspace_bytes, case.tile_rows, kept_bytes=kept * tile_bytes)
        shared = banks[0] if case.shared else None
        return ffn.triton_block_ffn(x, gates, chosen, banks[-1], shared, options=options, dropout=dropout)

    def plain(x: Tensor, gates: Tensor, *banks: ExpertWeights) -> Tensor:
        if not case.shared:
            return grouped_block_ffn(x, gates, chosen, banks[0], dropout)
        rest = None if dropout is None else dropout.of_experts(1)
        beside = grouped_block_ffn(x, gates[:, :1], chosen, banks[0], dropout)
        return beside + grouped_block_ffn(x, gates[:, 1:], ~chosen, banks[1], rest)

    results = []
    amounts = ((0, 2), (5, 5)) if case.overflows else ((None, 2),)  # of tiles: in the workspace, kept
    kernels: list[Callable[..., Tensor]] = [partial(fused, *numbers) for numbers in amounts]
    for kernel in (*kernels, plain):
        leaves = [[None if t is None else t.detach().requires_grad_() for t in bank] for bank in banks]
        x_leaf, gate_leaf = x.detach().requires_grad_(), gates.detach().requires_grad_()
        y = kernel(x_leaf, gate_leaf, *(_weights(case, bank) for bank in leaves))
        wanted = [x_leaf, gate_leaf, *(t for bank in leaves for t in bank if t is not None)]
        results.append([y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))])
    return [pair for result in results[:-1] for pair in zip(result, results[-1], strict=True)]


def _weights(case: _FFN, bank: Sequence[Any]) -> ExpertWeights:
    keys, values, key_bias, value_bias, gate_keys, gate_key_bias = bank
    return ExpertWeights(keys, values, key_bias, value_bias, 2, case.activation, gate_keys, gate_key_bias)


def _compare_routing(case: _Routing) -> list[tuple[Tensor, Tensor]]:
    """Decisions and gradients of Triton and of plain torch."""
    from unifmoe_dist.kernels.triton.routing import triton_route

    blocks, draw = case.num_blocks, _Draw(case.device, torch.float32)
    x = draw(_TOKENS, case.dim).to(case.dtype)
    weight = torch.nn.functional.normalize(draw(case.columns, case.dim), dim=1)
    prototypes = draw(blocks, case.dim)
    pairs = []
    for decide in (lambda x, w, p: triton_route(x, w, p, blocks), lambda x, w, p: route(x.float(), w, p)):
        x_leaf, w_leaf = x.detach().requires_grad_(), weight.detach().requires_grad_()
        r: Routing = decide(x_leaf, w_leaf, prototypes)
        grads = torch.autograd.grad(r.shared_demand.square().sum() + r.gates.square().sum(), [x_leaf, w_leaf])
        decisions = [r.shared_blocks.float().mean(0), (r.gates != 0).float().mean(0), _group_sizes(r) / _TOKENS]
        pairs.append([r.shared_demand.detach(), r.affinity.detach(), *decisions, *grads])
    return list(zip(*pairs, strict=True))


def _compare_exchange(case: _Exchange) -> list[tuple[Tensor, Tensor]]:
    """What arrives, the sums at home and the gradients, between ranks that are all on this device."""
    from unifmoe_dist.kernels.triton.exchange import TritonPacking

    draw, wide = _Draw(case.device, case.dtype), _Draw(case.device, torch.float32)
    ranks = []
    for _ in range(case.ranks):
        x, grad, blocks = draw(_TOKENS, case.dim), draw(_TOKENS, case.dim), wide(_TOKENS, case.num_blocks) > 0
        gates = wide(_TOKENS, case.ranks * case.experts)
        ranks.append(Rank(x, gates.masked_fill(gates < 0.8, 0.0), blocks, grad))
    fused, plain = (journey([kind] * case.ranks, ranks) for kind in (TritonPacking, TorchPacking))
    return [pair for made in zip(fused, plain, strict=True) for pair in zip(*made, strict=True)]


def _group_sizes(routing: Routing) -> Tensor:
    """(K + 1, B) rows of every (expert, block) group, as the kernels counted them or from the decision."""
    if routing.by_products is not None:
        return routing.by_products.group_offsets.totals.float()
    shared, active = routing.shared_blocks.float(), (routing.gates != 0).float()
    return torch.cat([shared.sum(0, keepdim=True), active.T @ (1 - shared)])


class _Draw:
    """Normal numbers from a generator of its own, so that a trial changes no one's random numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return (numbers / (shape[-1] ** 0.5 if len(shape) == 3 else 1.0)).to(self.device, self.dtype)


@not_compiled
def _proven(case: Any, tolerance: float, compare: Callable[[Any], list[tuple[Tensor, Tensor]]]) -> bool:
    """Whether a case has passed, now or before; one that cannot be tried now has not, and is tried again later."""
    if case in _verdicts:
        return _verdicts[case]
    if case.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # a trial would become part of the graph
    # To wait here, perhaps in a backward pass, for a trial that waits for backward passes, would be for ever.
    if not _one_at_a_time.acquire(blocking=False):
        return False
    try:
        return _verdicts[case] if case in _verdicts else _tried(case, tolerance, compare)
    finally:
        _one_at_a_time.release()


def _tried(case: Any, tolerance: float, compare: Callable[[Any], list[tuple[Tensor, Tensor]]]) -> bool:
    """The verdict of a trial, kept but where memory was short."""
    try:
        with _as_nobody_asked(case.device):
            for got, expected in compare(case):
                largest = expected.float().abs().amax().clamp(min=1e-3)
                error = float((got.float() - expected.float()).abs().amax() / largest)
                if not error <= tolerance:  # NaN as well
                    raise ArithmeticError(f"it differs from plain torch by {error:.2g} of the largest value")
        _verdicts[case] = True
    except torch.OutOfMemoryError:
        return False  # says nothing of the kernels
    except Exception as error:  # whatever a compiler, driver or kernel raises: the answer is not to use it
        _verdicts[case], _reasons[case] = False, f"{type(error).__name__}: {error}"
        if _said:
            warnings.warn(f"Triton is not used for {case}: {_reasons[case]}", stacklevel=2)
    return _verdicts[case]


@contextlib.contextmanager
def _as_nobody_asked(device: torch.device) -> Iterator[None]:
    """Without the caller's autocast, default type, default device and modes, and without timing of tiles."""
    from unifmoe_dist.kernels.triton.tuning import first_tiles  # so small a case says nothing about speed

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.autocast(device.type, enabled=False),
            torch.device(device),
            torch.inference_mode(False),
            torch.enable_grad(),
            first_tiles(),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
