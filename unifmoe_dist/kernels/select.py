"""Which kernels run: Triton on CUDA devices from Ampere on, for shapes it takes and has proven; plain torch elsewhere,
but for a few tokens on the CPU, which a compiled function takes.

The layer calls these functions only. `use_kernels` overrides the choice, for tests and measurements.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.eager import exporting_to_onnx, in_transform
from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts, ExpertWeights
from unifmoe_dist.kept import kept
from unifmoe_dist.kernels import self_test
from unifmoe_dist.kernels.cpu import few_rows
from unifmoe_dist.kernels.dropout import HiddenDropout
from unifmoe_dist.kernels.exchange import Packing, TorchPacking
from unifmoe_dist.kernels.grouped import grouped_block_ffn, grouped_gradients
from unifmoe_dist.kernels.reference import reference_block_ffn
from unifmoe_dist.lending import as_numbers
from unifmoe_dist.profiling import profile_range
from unifmoe_dist.routing import Router, Routing
from unifmoe_dist.routing_policies import RouterPolicies

KERNELS = ("auto", "triton", "grouped", "reference")
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_choice = "auto"
_options: dict[str, Any] = {}


@contextlib.contextmanager
def use_kernels(name: str, **options: Any) -> Iterator[None]:
    """Use the kernels called `name` for forward passes inside the context, and the backward passes of those.

    Args:
        name: "auto"; "triton" (a clear error where it cannot run; on the CPU it needs `TRITON_INTERPRET=1`);
            "grouped", plain torch; or "reference", the definition, which computes and masks everything.
        options: Fields of `triton.ffn.TritonOptions`, where Triton runs.

    Raises:
        UserError: the name is unknown, or Triton is asked for and not installed.
    """
    global _choice, _options
    if name not in KERNELS:
        raise UserError(f"kernels {name!r} are not known; choose one of {', '.join(KERNELS)}.")
    if name == "triton" and not _TRITON_INSTALLED:
        raise UserError("kernels 'triton' need the triton package, which is not installed; use 'grouped'.")
    before = _choice, _options
    _choice, _options = name, options
    try:
        yield
    finally:
        _choice, _options = before


def chosen_kernels() -> tuple[Any, ...]:
    """What `use_kernels` asks for now, as one value to compare."""
    return _choice, *sorted(_options.items())


def block_ffn(
    x_ND: Tensor, gates_NE: Tensor, blocks_NB: Tensor, weights: ExpertWeights, dropout: HiddenDropout | None = None
) -> Tensor:
    """Block-sparse experts as `reference_block_ffn` defines them; same shapes, meaning and gradients.

    Transforms of torch.func take the definition itself.
    """
    if _in_graph():
        from unifmoe_dist.kernels import operators

        return operators.block_ffn(x_ND, gates_NE, blocks_NB, weights, dropout=dropout)
    if _triton_for(x_ND, weights, dropout):
        from unifmoe_dist.kernels.triton.ffn import TritonOptions, triton_block_ffn

        return triton_block_ffn(x_ND, gates_NE, blocks_NB, weights, options=TritonOptions(**_options), dropout=dropout)
    if _few_rows(x_ND, dropout, weights):
        return few_rows.few_rows_ffn(x_ND, gates_NE, blocks_NB, weights)
    kernel = reference_block_ffn if _definition() or in_transform() else grouped_block_ffn
    return kernel(x_ND, gates_NE, blocks_NB, weights, dropout)


def block_ffn_gradients(
    grad_ND: Tensor,
    x_ND: Tensor,
    gates_NE: Tensor,
    blocks_NB: Tensor,
    weights: ExpertWeights,
    dropout: HiddenDropout | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What a gradient of `block_ffn`'s output is for x, the gates and the weights by name, without its forward pass.

    Only the grouped kernel does without; the others go forward once more.
    """
    if not (_definition() or _triton_for(x_ND, weights, dropout)):
        return grouped_gradients(grad_ND, x_ND, gates_NE, blocks_NB, weights, dropout)
    present = {field.name: getattr(weights, field.name) for field in fields(weights)}
    leaves: dict[str, Any] = {name: t.detach().requires_grad_() for name, t in present.items() if isinstance(t, Tensor)}
    x, gates = (tensor.detach().requires_grad_() for tensor in (x_ND, gates_NE))
    with torch.enable_grad():
        y = block_ffn(x, gates, blocks_NB, replace(weights, **leaves), dropout)
    of_x, of_gates, *of_weights = torch.autograd.grad(y, [x, gates, *leaves.values()], grad_ND.to(y.dtype))
    return of_x, of_gates, dict(zip(leaves, of_weights, strict=True))


def shared_and_residual_ffn(
    x_ND: Tensor, routing: Routing, shared: ExpertWeights, residual: ExpertWeights, dropout: HiddenDropout | None = None
) -> Tensor:
    """alpha(x) E_shr^S(x) + sum of p_i(x) E_i^R(x) where all experts are here; in fused kernels, together.

    To `dropout` the shared expert is number 0, and the residual ones follow.
    """
    coefficients_NE, blocks_NB = routing.coefficients(), routing.shared_blocks
    if _in_graph():
        from unifmoe_dist.kernels import operators

        return operators.block_ffn(x_ND, coefficients_NE, blocks_NB, residual, shared, dropout)
    offsets = None if routing.by_products is None else routing.by_products.group_offsets
    return both_ffns(x_ND, coefficients_NE, blocks_NB, shared, residual, dropout, offsets)


def both_ffns(
    x_ND: Tensor,
    coefficients_NE: Tensor,
    blocks_NB: Tensor,
    shared: ExpertWeights,
    residual: ExpertWeights,
    dropout: HiddenDropout | None = None,
    offsets: Any = None,
) -> Tensor:
    """As `shared_and_residual_ffn`; coefficients (N, K + 1) are alpha and the gates, `offsets` is Triton's own."""
    if _triton_for(x_ND, residual, dropout, shared=True):
        from unifmoe_dist.kernels.triton.ffn import TritonOptions, triton_block_ffn

        options = TritonOptions(**_options)
        with profile_range("residual_experts"):  # and the shared one
            return triton_block_ffn(x_ND, coefficients_NE, blocks_NB, residual, shared, options, offsets, dropout)
    if _few_rows(x_ND, dropout, shared, residual):
        with profile_range("residual_experts"):  # and the shared one
            return few_rows.few_rows_ffn(x_ND, coefficients_NE, blocks_NB, residual, shared)
    with profile_range("shared_experts"):
        shared_output = block_ffn(x_ND, coefficients_NE[:, :1], blocks_NB, shared, dropout)
    with profile_range("residual_experts"):
        rest = None if dropout is None else dropout.of_experts(1)
        residual_output = block_ffn(x_ND, coefficients_NE[:, 1:], ~blocks_NB, residual, rest)
    with profile_range("combine"):
        return shared_output + residual_output


def route_tokens(x_ND: Tensor, router: Router, shared: BlockExperts, token_mask_N: Tensor | None = None) -> Routing:
    """The router's decision for (N, D) tokens, against the prototypes of the shared expert.

    `token_mask_N` (N,) bool, only where `masks_in_place` holds: a false token uses nothing and its row is all zeros.
    """
    if not torch.compiler.is_compiling():  # who compiles fuses the definition by itself
        if _triton_routes(x_ND, router, shared.num_blocks):
            from unifmoe_dist.kernels.triton.routing import packed_columns, triton_route

            keys, blocks = shared.activated_keys, shared.num_blocks
            with torch.autocast(x_ND.device.type, enabled=False):
                columns = kept(
                    "columns",
                    [keys, router.weight],
                    lambda: packed_columns(router.weight, keys[0], blocks),
                    shared,
                    router,
                )
                return triton_route(x_ND, router.weight, as_numbers(keys)[0], blocks, token_mask_N, columns)
        usual = _choice == "auto" and router.policies == RouterPolicies()
        if usual and few_rows.takes(x_ND, shared.training, router.weight, shared.activated_keys):
            return few_rows.route_few(x_ND, router, shared)
    routing = router.decide(x_ND, shared.kept_prototypes()[0])
    return routing if token_mask_N is None else routing.masked(token_mask_N)


def pack_tokens(x_ND: Tensor, gates_NK: Tensor, blocks_NB: Tensor, ranks: int, needs: list[int]) -> Packing:
    """What carries tokens to `ranks` ranks that hold K / ranks experts each; arguments as of `exchange.Packing`.

    The bytes are the same whatever packs them, so ranks may choose differently.
    """
    if _triton_carries(x_ND, gates_NK, blocks_NB, ranks):
        from unifmoe_dist.kernels.triton.exchange import TritonPacking

        return TritonPacking(gates_NK, blocks_NB, ranks, needs)
    return TorchPacking(gates_NK, blocks_NB, ranks, needs)


def _in_graph() -> bool:
    """Whether a tracer should see an operator; the definition it can follow itself."""
    return torch.compiler.is_compiling() and not _definition()


def _definition() -> bool:
    """Whether the definition runs: for whom asks for it, and in other runtimes, which know no operator of ours."""
    return _choice == "reference" or exporting_to_onnx()


def masks_in_place(x_ND: Tensor, router: Router, num_blocks: int) -> bool:
    """Whether routing takes a token mask, so that no row has to move and the host need not know how many there are."""
    return torch.compiler.is_compiling() or _triton_routes(x_ND, router, num_blocks)


def takes_triton(device: torch.device) -> bool:
    """Whether Triton's kernels are to run on a device, for shapes that they take and have proven."""
    return _wants_triton(torch.empty(0, device=device))


def _wants_triton(x: Tensor) -> bool:
    if in_transform():
        return False
    if _choice != "auto":
        return _choice == "triton"
    return x.is_cuda and _TRITON_INSTALLED and torch.cuda.get_device_capability(x.device)[0] >= 8


def _few_rows(x: Tensor, dropout: HiddenDropout | None, *banks: ExpertWeights) -> bool:
    return _choice == "auto" and dropout is None and few_rows.takes_banks(x, *banks)


def _triton_for(x: Tensor, weights: ExpertWeights, dropout: HiddenDropout | None, shared: bool = False) -> bool:
    if not _wants_triton(x):
        return False
    from unifmoe_dist.kernels.triton.ffn import unsupported

    if not _supported(unsupported(x, weights)):
        return False
    return _choice == "triton" or self_test.ffn_works(x, weights, dropout is not None, shared)


def _triton_routes(x: Tensor, router: Router, num_blocks: int) -> bool:
    if not _wants_triton(x) or router.policies != RouterPolicies():  # ablations route in plain torch
        return False
    from unifmoe_dist.kernels.triton.routing import unsupported

    columns = router.weight.shape[0]
    if not _supported(unsupported(x, columns, num_blocks)):
        return False
    return _choice == "triton" or self_test.routing_works(x, columns, num_blocks)


def _triton_carries(x: Tensor, gates: Tensor, blocks: Tensor, ranks: int) -> bool:
    if not _wants_triton(x):
        return False
    from unifmoe_dist.kernels.triton.exchange import unsupported

    if not _supported(unsupported(x, gates, blocks, ranks)):
        return False
    return _choice == "triton" or self_test.exchange_works(x, gates.shape[1] // ranks, blocks.shape[1], ranks)


def _supported(reason: str | None) -> bool:
    if reason and _choice == "triton":
        raise UserError(f"kernels 'triton' cannot run here: {reason}; use 'auto' or 'grouped'.")
    if reason:
        _say_once(reason)
    return reason is None


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(
        f"plain torch, which is several times slower, takes the place of Triton's kernels: {reason}.", stacklevel=2
    )
