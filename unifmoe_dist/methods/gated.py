"""A layer of complete experts: every active expert of a token computes all of its channels.

    y = sum over experts of g_e(x) E_e(x)

A method is a gate, which says what g is. Experts, exchange, statistics and checkpoints are those of every layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.dispatch import Arrivals
from unifmoe_dist.expert_layer import Config, ExpertLayer
from unifmoe_dist.expert_share import ExpertGroup
from unifmoe_dist.experts import FFN, BlockExperts, ExpertWeights
from unifmoe_dist.kernels import HiddenDropout, block_ffn
from unifmoe_dist.profiling import profile_range
from unifmoe_dist.routing_policies import descending


@dataclass(frozen=True)
class Gating:
    """A gate's decision for N tokens and K experts.

    Args:
        scores: (N, K) float32, how well the experts fit the token, as the method defines it.
        gates: (N, K) float32, coefficient where the expert is active, else 0; carries gradient.
        auxiliary: What the method minimises besides the task loss over these tokens, unweighted; None in evaluation and
            where the method has nothing of the kind.
    """

    scores: Tensor
    gates: Tensor
    auxiliary: Tensor | None = None

    @property
    def expert_count(self) -> Tensor:
        """(N,) int64, k: active experts per token."""
        return (self.gates != 0).sum(-1)


class GatedExpertLayer(ExpertLayer[Config]):
    """K complete experts behind a gate. A subclass defines `_gate`, and `build` where the gate has parameters.

    Auxiliary losses over tokens, gate noise and the statistics behind decisions are those of a rank's own micro-batch,
    as in the methods' own code: with them, unlike with the outputs, the number of ranks matters a little.
    """

    def __init__(
        self, config: Config, expert_group: ExpertGroup = None, dispatcher: str = "auto", **exchange: Any
    ) -> None:
        super().__init__(config, expert_group, dispatcher, **exchange)
        self._auxiliary: Tensor | None = None
        self.build()
        self.reset_parameters()

    def build(self) -> None:
        """Make the gate, and set `auxiliary_weight` to the method's own."""

    @property
    def expert_dim(self) -> int:
        """Hidden channels of one expert."""
        return self.config.hidden_dim

    def _make_experts(self, count: int) -> BlockExperts:
        c = self.config
        return BlockExperts(count, c.model_dim, self.expert_dim, 1, c.activation, c.bias, c.gated)

    def _load_channels(self, expert: int, dense: FFN, own: Tensor | slice, down_bias: Tensor | None) -> None:
        """Give an expert some channels of a dense FFN, and a down bias."""
        up, up_bias, down, _, *gate = dense
        part_up_bias, *part_gate = [None if tensor is None else tensor[own] for tensor in (up_bias, *gate)]
        self.load_ffn(expert, up[own], part_up_bias, down[:, own], down_bias, *part_gate)

    def _gate(self, x: Tensor) -> Gating:
        """Decide for (N, model_dim) tokens in float32."""
        raise NotImplementedError

    def _weights(self) -> ExpertWeights:
        return self.experts.weights()

    def route(self, x: Tensor) -> Gating:
        """The gate's decision for x (..., model_dim), over tokens flattened to N."""
        self._check_shapes(x, None)
        with torch.autocast(x.device.type, enabled=False):
            return self._gate(x.reshape(-1, x.shape[-1]).float())

    def _apply_to_tokens(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        with profile_range("route"):
            gating = self.route(x)
            self._auxiliary = gating.auxiliary
            cost = self.config.num_blocks * self.expert_dim / self.config.hidden_dim
            self.usage.update_gates(gating.gates, cost, self.config.num_blocks)
        with profile_range("dispatch"):
            complete = torch.ones((x.shape[0], 1), dtype=torch.bool, device=x.device)
            exchange = self._dispatch(x, gating.gates, complete)
        dropout = self._draw_dropout(x)
        exchange.compute(lambda arrived: self._compute(arrived, dropout))
        with profile_range("combine"):
            return exchange.total()

    def _compute(self, arrived: Arrivals, dropout: HiddenDropout | None) -> Tensor:
        rest = None if dropout is None else dropout.of_experts(arrived.part * self.config.num_experts)
        with profile_range("residual_experts"):
            return block_ffn(arrived.x, arrived.gates, arrived.blocks, self._weights(), rest)

    def auxiliary_loss(self) -> Tensor:
        """The auxiliary loss of the last forward pass in training mode, a float32 scalar."""
        return super().auxiliary_loss() if self._auxiliary is None else self._auxiliary

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_auxiliary": None}  # part of a graph, which cannot be copied


def largest(scores: Tensor, count: int) -> Tensor:
    """(N, K) bool, the `count` largest of every row; ties go to the lower index."""
    order = descending(scores.detach())[1][:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
