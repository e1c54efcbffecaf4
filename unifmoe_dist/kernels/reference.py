"""The definition of block-sparse experts, written like the equations and differentiated by autograd.

It computes every expert in full and masks: right by reading, and for tests only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels.activations import FUNCTIONS
from unifmoe_dist.kernels.dropout import HiddenDropout


def reference_block_ffn(
    x_ND: Tensor, gates_NE: Tensor, blocks_NB: Tensor, weights: ExpertWeights, dropout: HiddenDropout | None = None
) -> Tensor:
    """y = sum_e gates[:, e] * (sum over blocks of E_e^(b)(x) + value_bias_e).

    Args:
        x_ND: (N, D) tokens.
        gates_NE: (N, E) coefficients; an expert with coefficient 0 contributes nothing.
        blocks_NB: (N, B) bool, blocks that every active expert of the token computes.
        weights: The E experts.
        dropout: Which activated channels become 0 before the second projection, the others being scaled up; None drops
            none.

    Returns:
        (N, D) in the dtype of x.
    """
    block_dim = weights.keys.shape[1] // weights.num_blocks
    channels_NH = blocks_NB.repeat_interleave(block_dim, dim=1)
    activation = FUNCTIONS[weights.activation]
    total = x_ND.new_zeros(x_ND.shape)
    for expert in range(weights.keys.shape[0]):
        up_NH = x_ND @ weights.keys[expert].T
        if weights.key_bias is not None:
            up_NH = up_NH + weights.key_bias[expert]
        if weights.gate_keys is None:
            hidden_NH = activation(up_NH) * channels_NH
        else:
            gate_NH = x_ND @ weights.gate_keys[expert].T
            if weights.gate_key_bias is not None:
                gate_NH = gate_NH + weights.gate_key_bias[expert]
            hidden_NH = activation(gate_NH) * up_NH * channels_NH
        if dropout is not None:
            token_N = torch.arange(len(x_ND), device=x_ND.device)
            zero_N = torch.zeros_like(token_N)
            kept_NH = dropout.kept(token_N, zero_N + expert, zero_N, hidden_NH.shape[1], hidden_NH.dtype)
            hidden_NH = hidden_NH * kept_NH * dropout.scale
        output_ND = hidden_NH @ weights.values[expert]
        if weights.value_bias is not None:
            output_ND = output_ND + weights.value_bias[expert]
        gate_N1 = gates_NE[:, expert, None].to(output_ND.dtype)
        total = total + (gate_N1 * output_ND).masked_fill(gate_N1 == 0, 0)
    return total
