"""The UniF-MoE layer: route, dispatch, share while tokens travel, compute what remains, combine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unifmoe_dist.config import UniFMoEConfig
from unifmoe_dist.dispatch import LocalDispatcher, limit_load, make_dispatcher
from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels import block_ffn, masks_in_place, route_tokens, shared_and_residual_ffn
from unifmoe_dist.phases import phase
from unifmoe_dist.routing import Router, Routing
from unifmoe_dist.routing_policies import RouterPolicies
from unifmoe_dist.usage import Usage


class UniFMoELayer(nn.Module):
    """One shared and K residual experts in the place of a transformer's FFN.

        y = alpha(x) E_shr^S(x) + sum_{i<=k(x)} p_i(x) E_{q_i}^R(x)

    Args:
        config: Shape of the layer.
        expert_group: Ranks over which the residual experts are sharded, contiguously in rank order; None keeps all
            here.
        dispatcher: "auto" (local on one rank, else alltoall), "local", "alltoall" or "tutel" (needs the tutel extra).

    Attributes:
        router: The augmented router; `router.weight` is (K + 1, model_dim), row 0 the shared column.
        shared: The shared expert, replicated on every rank.
        experts: The residual experts that this rank holds.
        usage: Running routing statistics.

    Raises:
        UserError: num_experts is not divisible by the size of expert_group, or this rank is not in it.
    """

    def __init__(
        self, config: UniFMoEConfig, expert_group: dist.ProcessGroup | None = None, dispatcher: str = "auto"
    ) -> None:
        super().__init__()
        self.config = config
        group_size = 1 if expert_group is None else dist.get_world_size(expert_group)
        if group_size < 1:
            raise UserError("this rank does not belong to expert_group; give every rank the group that it is in.")
        if config.num_experts % group_size:
            raise UserError(
                f"num_experts {config.num_experts} is not divisible by the expert-parallel size {group_size}; "
                "change one of them."
            )
        local = config.num_experts // group_size
        self.first_expert = local * (0 if expert_group is None else dist.get_rank(expert_group))
        self.router = Router(config.model_dim, config.num_experts, RouterPolicies.of(config))
        shape = (config.model_dim, config.hidden_dim, config.num_blocks, config.activation, config.bias)
        self.shared = BlockExperts(1, *shape)
        self.experts = BlockExperts(local, *shape)
        self.dispatcher = make_dispatcher(dispatcher, expert_group)
        self.usage = Usage()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Orthonormal router; all experts start as copies of one dense FFN."""
        self.router.reset_parameters()
        config = self.config
        up = nn.Linear(config.model_dim, config.hidden_dim, config.bias)
        down = nn.Linear(config.hidden_dim, config.model_dim, config.bias)
        for bank in (self.shared, self.experts):
            bank.initialise((up.weight, up.bias, down.weight, down.bias))

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Apply the layer to tokens.

        Args:
            x: (..., model_dim) tokens; any leading shape, empty included.
            token_mask: Bool or 0/1, shape x.shape[:-1]; false positions cost nothing, come back as zeros and count in
                no statistic.

        Returns:
            Shape and dtype of x.
        """
        self._check_shapes(x, token_mask)
        tokens = x.reshape(-1, x.shape[-1])
        if token_mask is not None:
            token_mask = token_mask.reshape(-1).to(device=x.device, dtype=torch.bool)
        if token_mask is None or masks_in_place(tokens, self.router, self.config.num_blocks):
            return self._apply_to_tokens(tokens, token_mask).view(x.shape)
        kept = token_mask.nonzero().squeeze(1)
        output = self._apply_to_tokens(tokens.index_select(0, kept))
        return torch.zeros_like(tokens).index_copy(0, kept, output).view(x.shape)

    def _apply_to_tokens(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        with phase("route"):
            routing = limit_load(self._route(x, token_mask), self.config.capacity_factor)
            self.usage.update(routing)
        if isinstance(self.dispatcher, LocalDispatcher):
            return shared_and_residual_ffn(x, routing, self.shared.weights(), self.experts.weights())
        with phase("dispatch"):
            trained = any(p.requires_grad for p in self.experts.parameters())
            exchange = self.dispatcher.dispatch(x, routing.gates, ~routing.shared_blocks, trained)
        with phase("shared_experts"):  # needs no exchange: it is computed while tokens travel
            shared = block_ffn(x, routing.shared_demand[:, None], routing.shared_blocks, self.shared.weights())
        with phase("dispatch"):
            arrived = exchange.arrivals()
        with phase("residual_experts"):
            residual = block_ffn(arrived.x, arrived.gates, arrived.blocks, self.experts.weights())
        with phase("combine"):
            return shared + exchange.combine(residual)

    def route(self, x: Tensor) -> Routing:
        """Routing of x (..., model_dim), over tokens flattened to N, before any capacity limit."""
        self._check_shapes(x, None)
        return self._route(x.reshape(-1, x.shape[-1]))

    def _route(self, x: Tensor, token_mask: Tensor | None = None) -> Routing:
        return route_tokens(x, self.router, self.shared, token_mask)

    def diversity_loss(self) -> Tensor:
        """Gram loss of this layer's router, a float32 scalar."""
        return self.router.diversity_loss()

    def load_ffn(
        self, expert: str | int, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor,
        down_bias: Tensor | None,
    ) -> None:  # fmt: skip
        """Copy a dense FFN, in nn.Linear layouts (H, d), (H,), (d, H), (d,), into one expert.

        Args:
            expert: "shared" or a global index 0..K-1; an expert that another rank holds is skipped here.
        """
        bank, index = self._locate(expert)
        if 0 <= index < bank.keys.shape[0]:
            bank.load(index, up_weight, up_bias, down_weight, down_bias)

    def ffn_weights(self, expert: str | int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """One expert in nn.Linear layouts, the inverse of `load_ffn`: copies, detached.

        Under expert parallelism any rank gets any residual expert; every rank of the group must call, and each may
        ask for another expert.
        """
        bank, index = self._locate(expert)
        group = getattr(self.dispatcher, "group", None)
        if expert == "shared" or group is None or dist.get_world_size(group) == 1:
            return bank.read(index)
        return self._collect(int(expert), group)

    def _collect(self, expert: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        asked = torch.tensor([expert], device=self.experts.keys.device)
        gathered = [torch.empty_like(asked) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, asked, group=group)
        local = self.experts.keys.shape[0]
        answer: list[Tensor | None] = []
        for wanted in sorted({int(t) for t in gathered}):
            source = dist.get_global_rank(group, wanted // local)
            index = wanted - self.first_expert
            tensors = self.experts.read(index if 0 <= index < local else 0)
            for tensor in tensors:
                if tensor is not None:
                    dist.broadcast(tensor, source, group=group)
            if wanted == expert:
                answer = list(tensors)
        return answer[0], answer[1], answer[2], answer[3]  # type: ignore[return-value]

    def _locate(self, expert: str | int) -> tuple[BlockExperts, int]:
        if expert == "shared":
            return self.shared, 0
        last = self.config.num_experts - 1
        if not isinstance(expert, int) or not 0 <= expert <= last:
            raise UserError(f"expert {expert!r} does not exist; use 'shared' or a whole number from 0 to {last}.")
        return self.experts, expert - self.first_expert

    def _check_shapes(self, x: Tensor, token_mask: Tensor | None) -> None:
        if x.ndim == 0 or x.shape[-1] != self.config.model_dim:
            raise UserError(
                f"input has shape {tuple(x.shape)}, but its last size must be model_dim {self.config.model_dim}."
            )
        if token_mask is not None and token_mask.shape != x.shape[:-1]:
            raise UserError(
                f"token_mask has shape {tuple(token_mask.shape)}, but tokens have shape {tuple(x.shape[:-1])}."
            )

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"d={config.model_dim}, H={config.hidden_dim}, K={config.num_experts}, B={config.num_blocks}, "
            f"activation={config.activation}"
        )
