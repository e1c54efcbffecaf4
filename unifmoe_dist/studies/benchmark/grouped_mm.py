"""The same block-sparse experts through torch's own grouped product, as one would write them without kernels.

`torch.nn.functional.grouped_mm` takes all (expert, block) groups in one call; gather, activation, gate and sum are
separate, and autograd keeps what they make.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist import UniFMoELayer
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels.activations import FUNCTIONS


def grouped_mm_block_ffn(x_ND: Tensor, gates_NE: Tensor, blocks_NB: Tensor, weights: ExpertWeights) -> Tensor:
    """Same meaning and shapes as `reference_block_ffn`. AttributeError where torch is too old to have the product."""
    experts, hidden, dim = weights.keys.shape
    groups = experts * weights.num_blocks
    selected_EBN = (gates_NE != 0).T[:, None, :] & blocks_NB.T[None, :, :]
    expert_R, block_R, row_R = selected_EBN.nonzero(as_tuple=True)
    ends_G = selected_EBN.sum(-1).flatten().cumsum(0).to(torch.int32)
    keys_GMD = weights.keys.view(groups, hidden // weights.num_blocks, dim)
    values_GMD = weights.values.view_as(keys_GMD)
    pre_RM = F.grouped_mm(x_ND.index_select(0, row_R), keys_GMD.transpose(1, 2), offs=ends_G)
    if weights.key_bias is not None:
        bias_GM = weights.key_bias.view(groups, -1)
        pre_RM = pre_RM + bias_GM.index_select(0, expert_R * weights.num_blocks + block_R)
    gate_R1 = gates_NE[row_R, expert_R, None].to(x_ND.dtype)
    out_RD = F.grouped_mm(FUNCTIONS[weights.activation](pre_RM) * gate_R1, values_GMD, offs=ends_G)
    y_ND = torch.zeros_like(x_ND, dtype=torch.float32).index_add(0, row_R, out_RD.float())
    if weights.value_bias is not None:
        y_ND = y_ND + gates_NE.float() @ weights.value_bias.float()
    return y_ND.to(x_ND.dtype)


class GroupedMM(nn.Module):
    """A UniF-MoE layer, its experts computed by `grouped_mm_block_ffn`."""

    def __init__(self, layer: UniFMoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        routing = self.layer.route(x)
        shared, residual = self.layer.shared.weights(), self.layer.experts.weights()
        alpha_N1 = routing.shared_demand[:, None]
        return grouped_mm_block_ffn(x, alpha_N1, routing.shared_blocks, shared) + grouped_mm_block_ffn(
            x, routing.gates, ~routing.shared_blocks, residual
        )
