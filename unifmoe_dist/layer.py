"""The UniF-MoE layer: route, dispatch, share while tokens travel, compute what remains, combine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unifmoe_dist.config import UniFMoEConfig
from unifmoe_dist.dispatch import Arrivals, limit_load
from unifmoe_dist.eager import called_by, not_compiled
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.expert_share import ExpertGroup
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.graphs import LayerGraphs
from unifmoe_dist.kernels import HiddenDropout, block_ffn, masks_in_place, route_tokens, shared_and_residual_ffn
from unifmoe_dist.lending import bare
from unifmoe_dist.profiling import profile_range
from unifmoe_dist.routing import Router, Routing
from unifmoe_dist.routing_policies import RouterPolicies
from unifmoe_dist.usage import recomputing


class UniFMoELayer(ExpertLayer[UniFMoEConfig]):
    """One shared and K residual experts in the place of a transformer's FFN.

        y = alpha(x) E_shr^S(x) + sum_{i<=k(x)} p_i(x) E_{q_i}^R(x)

    Args:
        config: Shape of the layer.
        expert_group: Ranks over which the residual experts are sharded, contiguously in rank order; None keeps all
            here.
        dispatcher: "auto" (local on one rank, two_level between nodes with several ranks each, else alltoall), "local",
            "alltoall", "two_level" or "tutel" (needs the tutel extra).
        cuda_graphs: Whether passes over shapes that come again are captured as CUDA graphs.
        ranks_per_node: Ranks of expert_group on each node; None finds out from the names of hosts.
        dispatch_chunks: Parts in which a rank's tokens travel, so that one travels while another is computed.

    Attributes:
        router: The augmented router; `router.weight` is (K + 1, model_dim), row 0 the shared column.
        shared: The shared expert, replicated on every rank.
        experts: The residual experts that this rank holds.
        usage: Running routing statistics.
        auxiliary_weight: lambda_div, the weight of the Gram loss.

    Raises:
        UserError: num_experts is not divisible by the size of expert_group, or this rank is not in it.
    """

    config_type = UniFMoEConfig
    replicated = ("shared",)
    reentrant_under_ddp = False
    graphs: LayerGraphs | None = None
    """CUDA graphs of this layer; None captures none."""

    def __init__(
        self,
        config: UniFMoEConfig,
        expert_group: ExpertGroup = None,
        dispatcher: str = "auto",
        cuda_graphs: bool = False,
        ranks_per_node: int | None = None,
        dispatch_chunks: int = 1,
    ) -> None:
        super().__init__(config, expert_group, dispatcher, ranks_per_node, dispatch_chunks)
        self.router = Router(config.model_dim, config.num_experts, RouterPolicies.of(config))
        self.shared: BlockExperts = self._make_experts(1)
        self.auxiliary_weight = 0.01
        self.cuda_graphs = cuda_graphs
        self.reset_parameters()

    @property
    def cuda_graphs(self) -> bool:
        """Whether passes over shapes that come again are captured as CUDA graphs; may be set at any time."""
        return self.graphs is not None

    @cuda_graphs.setter
    def cuda_graphs(self, wanted: bool) -> None:
        self.graphs = LayerGraphs() if wanted else None

    def _apply(self, fn: Any, recurse: bool = True) -> UniFMoELayer:
        if self.graphs is not None:
            self.graphs.drop()  # weights go elsewhere
        return super()._apply(fn, recurse)

    def reset_parameters(self) -> None:
        """Orthonormal router; all experts start as copies of one dense FFN."""
        self.router.reset_parameters()
        super().reset_parameters()

    def _apply_to_tokens(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        if self.graphs is not None and not torch.compiler.is_compiling():
            return self.graphs.run(self, self._compute, x, token_mask)
        return self._compute(x, token_mask)

    def _compute(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        return self.shared(x, use=lambda shared, x: self._share_first(x, token_mask, shared))

    def _share_first(self, x: Tensor, token_mask: Tensor | None, shared: BlockExperts) -> Tensor:
        with profile_range("route"):
            limit = self.config.capacity_factor if self.training else None  # a token alone decides in evaluation
            routing = limit_load(self._route(x, token_mask, shared), limit)
            self.usage.update(routing)
            if not torch.compiler.is_compiling():
                _note_first_pass(self)
        dropout = self._draw_dropout(x)
        if self.dispatcher.local:
            return self.experts(
                x, use=lambda own, x: shared_and_residual_ffn(x, routing, shared.weights(), own.weights(), dropout)
            )
        with profile_range("dispatch"):
            exchange = self._dispatch(x, routing.gates, ~routing.shared_blocks)
        with profile_range("shared_experts"):  # needs no exchange: it is computed while tokens travel
            alpha_N1 = routing.shared_demand[:, None]
            output = block_ffn(x, alpha_N1, routing.shared_blocks, shared.weights(), dropout)
        exchange.compute(lambda arrived: self._residual(arrived, dropout))
        with profile_range("combine"):
            return output + exchange.total()

    def _residual(self, arrived: Arrivals, dropout: HiddenDropout | None) -> Tensor:
        """Outputs of this rank's experts for (R, D) rows that arrived."""
        rest = None if dropout is None else dropout.of_experts(1 + arrived.part * self.config.num_experts)
        with profile_range("residual_experts"):
            return self.experts(
                arrived.x, use=lambda own, x: block_ffn(x, arrived.gates, arrived.blocks, own.weights(), rest)
            )

    def route(self, x: Tensor) -> Routing:
        """Routing of x (..., model_dim), over tokens flattened to N, before any capacity limit."""
        self._check_shapes(x, None)
        tokens = x.reshape(-1, x.shape[-1])
        made: list[Routing] = []

        def use(shared: BlockExperts, x: Tensor) -> tuple[Tensor, ...]:
            made.append(self._route(x, None, shared))
            return made[0].carriers()

        return _carried(made, self.shared(tokens, use=use))

    def _route(self, x: Tensor, token_mask: Tensor | None, shared: BlockExperts) -> Routing:
        """Routing of (N, D) tokens, with the shared expert as it lends itself."""
        made: list[Routing] = []

        def use(router: Router, x: Tensor) -> tuple[Tensor, ...]:
            made.append(route_tokens(x, router, shared, token_mask))
            return made[0].carriers()

        return _carried(made, self.router(x, use=use))

    def _masks_in_place(self, tokens: Tensor) -> bool:
        return masks_in_place(tokens, bare(self.router), self.config.num_blocks)

    def diversity_loss(self) -> Tensor:
        """Gram loss of this layer's router, a float32 scalar; under FSDP 1 that of the last forward pass."""
        _refuse_second_gradient(self, bare(self.router).weight)
        return self.router(None, use=lambda router, _: router.gram_loss())

    def auxiliary_loss(self) -> Tensor:
        """The Gram loss."""
        return self.diversity_loss()


def _carried(made: list[Routing], carriers: tuple[Tensor, ...]) -> Routing:
    """A decision made inside a module's forward, carried by the tensors that came out of it."""
    same = all(a is b for a, b in zip(made[0].carriers(), carriers, strict=True))
    return made[0] if same else made[0].with_carriers(carriers)


# Reentrant activation checkpointing runs a backward pass of its own for each part, and another follows for what the
# loss takes straight from a parameter. DistributedDataParallel expects each parameter's gradient once; with a static
# graph it takes both, but the first step's gradients came out wrong on two ranks. torch refuses that in its own words.


@not_compiled
def _note_first_pass(layer: UniFMoELayer) -> None:
    """Remember whether this is the first, gradient-free pass of reentrant checkpointing under DDP."""
    if not recomputing():
        under_ddp = DistributedDataParallel._active_ddp_module is not None
        gradient_free = under_ddp and layer.training and not torch.is_grad_enabled()
        # Reentrant checkpointing calls from the forward of a `torch.autograd.Function`.
        layer.reentrant_under_ddp = gradient_free and called_by(
            lambda code: code.co_name == "forward" and code.co_varnames[:1] == ("ctx",)
        )


def _refuse_second_gradient(layer: UniFMoELayer, parameter: Tensor) -> None:
    """Raise UserError where a loss taken from `parameter` itself would give it a second gradient."""
    if layer.reentrant_under_ddp and torch.is_grad_enabled() and parameter.requires_grad:
        raise UserError(
            "the Gram loss cannot be trained under DistributedDataParallel with reentrant activation checkpointing, "
            "which would give the router two gradients; checkpoint with use_reentrant=False "
            '(gradient_checkpointing_kwargs={"use_reentrant": False}).'
        )
