"""Few tokens on the CPU, without gradients: the path of decoding, one compiled call for each half of the layer.

One token is bound by reading the weights of its C_B blocks; in plain torch, the calls to plan and to start some hundred
small products take ten times as long. Of more than `MOST_TOKENS` the grouped kernel's products are worth their calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unifmoe_dist.eager import in_transform
from unifmoe_dist.experts import BlockExperts, ExpertWeights
from unifmoe_dist.kernels.activations import FUNCTIONS
from unifmoe_dist.kernels.cpu.library import library
from unifmoe_dist.routing import ByProducts, Router, Routing

MOST_TOKENS = 64 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
"""Measured on CPUs with AVX-512 and with AVX2 alone, whose compiled products are slower than the library's."""


def takes(x_ND: Tensor, training: bool, *weights: Tensor | None) -> bool:
    """Whether the compiled functions compute something of x and weights: a few float32 tokens on the CPU, for which no
    gradient is asked.

    In training a pass without gradients may be repeated with them (activation checkpointing), and must decide alike.
    """
    if training or not 0 < x_ND.shape[0] <= MOST_TOKENS or type(x_ND) is not Tensor:
        return False
    with_gradient = torch.is_grad_enabled()
    for tensor in (x_ND, *weights):
        if tensor is None:
            continue
        if tensor.dtype is not torch.float32 or not tensor.is_cpu or (with_gradient and tensor.requires_grad):
            return False
        if tensor is not x_ND and not tensor.is_contiguous():
            return False
    return not (
        torch._C._len_torch_dispatch_stack()  # what counts operations sees none here
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or in_transform()
        or library() is None
    )


def takes_banks(x_ND: Tensor, *banks: ExpertWeights) -> bool:
    """Whether they compute these experts: see `takes`."""
    weights = [t for w in banks for t in (w.keys, w.values, w.key_bias, w.value_bias, w.gate_keys, w.gate_key_bias)]
    return takes(x_ND, any(w.training for w in banks), *weights)


def route_few(x_ND: Tensor, router: Router, shared: BlockExperts) -> Routing:
    """As `routing.route` with the method's own policies, and the statistics on the way."""
    x_ND = x_ND.contiguous()
    prototypes_BD = shared.kept_prototypes()[0]
    (n, dim), (columns, _), blocks = x_ND.shape, router.weight.shape, shared.num_blocks
    coefficients, affinity = x_ND.new_empty(n, columns), x_ND.new_empty(n, columns - 1)
    chosen = x_ND.new_empty(n, blocks, dtype=torch.bool)  # on the CPU, whatever torch's default device is
    block_count, expert_count = x_ND.new_empty(2, n, dtype=torch.int64)
    statistics = x_ND.new_empty(5 + columns + blocks, dtype=torch.float64)
    made = (affinity, coefficients, chosen, block_count, expert_count, statistics)
    addresses = (t.data_ptr() for t in made)
    functions = library()
    assert functions is not None
    given = (x_ND.data_ptr(), router.weight.data_ptr(), prototypes_BD.data_ptr())
    functions.route(*given, n, dim, columns - 1, blocks, *addresses)
    routing = Routing(coefficients[:, 0], chosen, affinity, coefficients[:, 1:], block_count, expert_count)
    return routing.with_by_products(ByProducts(coefficients, statistics, None))


def few_rows_ffn(
    x_ND: Tensor, gates_NE: Tensor, blocks_NB: Tensor, weights: ExpertWeights, shared: ExpertWeights | None = None
) -> Tensor:
    """As `reference_block_ffn`; `shared`, if given, has the first column of gates, and the others the other blocks."""
    x_ND, gates_NE, blocks_NB = x_ND.contiguous(), gates_NE.float().contiguous(), blocks_NB.contiguous()
    (n, dim), experts, blocks = x_ND.shape, gates_NE.shape[1], blocks_NB.shape[1]
    width, threads = weights.keys.shape[1] // blocks, torch.get_num_threads()
    functions = library()
    assert functions is not None
    tokens, ends = (x_ND.new_empty(size, dtype=torch.int32) for size in (n * experts * blocks, experts * blocks))
    rows_at = (tokens.data_ptr(), ends.data_ptr())
    gates_at, shared_first = gates_NE.data_ptr(), shared is not None
    rows = functions.plan(gates_at, blocks_NB.data_ptr(), n, experts, blocks, shared_first, *rows_at)

    def bank(*names: str) -> list[int | None]:
        """Addresses of both banks' tensors by name, the shared one's first."""
        found = [None if w is None else getattr(w, name) for name in names for w in (shared, weights)]
        return [None if t is None else t.data_ptr() for t in found]

    def read(keys: str, bias: str) -> Tensor:
        pre_RM = x_ND.new_empty(rows, width)
        sizes = (dim, experts, blocks, width)
        functions.up(x_ND.data_ptr(), *rows_at, *sizes, *bank(keys, bias), pre_RM.data_ptr(), threads)
        return pre_RM

    activation = FUNCTIONS[weights.activation]
    if weights.gate_keys is None:
        hidden_RM = activation(read("keys", "key_bias"))
    else:
        hidden_RM = activation(read("gate_keys", "gate_key_bias")).mul_(read("keys", "key_bias"))
    y_ND = torch.empty_like(x_ND)
    given, sizes = (hidden_RM.data_ptr(), gates_at, *rows_at), (n, dim, experts, blocks, width)
    functions.down(*given, *sizes, *bank("values", "value_bias"), y_ND.data_ptr(), threads)
    return y_ND
