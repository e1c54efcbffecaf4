"""Share first, then route what remains: the routing decision of one UniF-MoE layer.

Shapes carry suffixes: N tokens, D model width, K residual experts, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import Lender, Result, is_dtensor
from unifmoe_dist.routing_policies import RouterPolicies, descending


@dataclass(frozen=True)
class ByProducts:
    """What fused kernels make on their way to a decision, over E = K + 1 experts, the shared one first.

    Args:
        coefficients: (N, E) float32, alpha and the gates side by side; carries gradient.
        statistics: (6 + K + B,) float64, the sums that `Usage` keeps.
        group_offsets: Where the rows of every (expert, block) group start in every span of tokens, on the GPU path.
    """

    coefficients: Tensor
    statistics: Tensor
    group_offsets: Any


@dataclass(frozen=True)
class Routing:
    """Which blocks and experts each of N tokens uses, and with what weight.

    Args:
        shared_demand: (N,) float32, alpha: weight of the shared expert; carries gradient.
        shared_blocks: (N, B) bool, blocks that the shared expert computes; the residual experts compute the others.
        affinity: (N, K) float32, softmax over residual experts.
        gates: (N, K) float32, p_i where the expert is active, else 0; carries gradient.
        shared_block_count: (N,) int64, b.
        expert_count: (N,) int64, k.
        dropped: (N,) int64, assignments that a capacity limit took away, not counted in k; None without a limit.

    Attributes:
        by_products: What later steps would otherwise compute from the above, where a kernel made it on the way. A
            changed copy (`dataclasses.replace`) has none.
    """

    shared_demand: Tensor
    shared_blocks: Tensor
    affinity: Tensor
    gates: Tensor
    shared_block_count: Tensor
    expert_count: Tensor
    dropped: Tensor | None = None
    by_products: ByProducts | None = field(default=None, init=False)

    def coefficients(self) -> Tensor:
        """(N, K + 1) float32, alpha and the gates side by side."""
        if self.by_products is not None:
            return self.by_products.coefficients
        return torch.cat([self.shared_demand[:, None], self.gates], dim=1)

    def carriers(self) -> tuple[Tensor, ...]:
        """The tensors that carry gradient."""
        made = () if self.by_products is None else (self.by_products.coefficients,)
        return (self.shared_demand, self.affinity, self.gates, *made)

    def with_carriers(self, carriers: tuple[Tensor, ...]) -> Routing:
        """The same decision, carried by equal tensors that someone has hooked into the backward pass."""
        demand, affinity, gates, *made = carriers
        routing = replace(self, shared_demand=demand, affinity=affinity, gates=gates)
        return (
            routing
            if self.by_products is None
            else routing.with_by_products(replace(self.by_products, coefficients=made[0]))
        )

    def with_by_products(self, made: ByProducts) -> Routing:
        """This decision, and what a kernel made on the way to it."""
        routing = replace(self)
        object.__setattr__(routing, "by_products", made)  # no argument of __init__, so that `replace` drops it
        return routing

    def masked(self, token_mask_N: Tensor) -> Routing:
        """This decision, in which tokens that are false in the mask use nothing."""
        real_N1 = token_mask_N[:, None]
        return replace(
            self,
            shared_demand=torch.where(token_mask_N, self.shared_demand, 0),
            shared_blocks=self.shared_blocks & real_N1,
            affinity=torch.where(real_N1, self.affinity, 0),
            gates=torch.where(real_N1, self.gates, 0),
            shared_block_count=self.shared_block_count * token_mask_N,
            expert_count=self.expert_count * token_mask_N,
        )

    @property
    def block_compute(self) -> Tensor:
        """(N,) int64, C_B = b + k (B - b): blocks executed per token."""
        num_blocks = self.shared_blocks.shape[-1]
        return self.shared_block_count + self.expert_count * (num_blocks - self.shared_block_count)


class Router(Lender):
    """The augmented router W* = [W_shr, W_g], stored with one row per column of the paper's matrix.

    Called as a module it lends itself, so that hooks on it run: `router(x, use=lambda router, x: ...)`.

    Args:
        model_dim: Token width D.
        num_experts: Number K of residual experts.
        policies: How alpha, the order of blocks and k are decided; None takes the method's own.

    Attributes:
        weight: (K + 1, D); row 0 is the shared column. Rows start orthonormal.
    """

    main = ("weight", 2)

    def __init__(self, model_dim: int, num_experts: int, policies: RouterPolicies | None = None) -> None:
        super().__init__()
        self.policies = policies or RouterPolicies()
        self.weight = nn.Parameter(torch.empty(num_experts + 1, model_dim))
        self._kept: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.orthogonal_(self.weight)

    def forward(self, *tensors: Tensor | None, use: Callable[..., Result]) -> Result:
        """`use(self, *tensors)`, see `Lender`."""
        if getattr(self, "_is_fsdp_managed_module", False) and not isinstance(self.weight, nn.Parameter):
            # FSDP 1 has the weight ready in forward passes alone: what the Gram loss needs of it is taken along.
            if self.absence() is None:
                self._kept = _KeptGram.apply(self.weight)
        return super().forward(*tensors, use=use)

    def decide(self, x_ND: Tensor, prototypes_BD: Tensor) -> Routing:
        """Route (N, D) tokens against (B, D) block prototypes. Always in float32, autocast or not."""
        with torch.autocast(x_ND.device.type, enabled=False):
            return route(x_ND.float(), self.weight.float(), prototypes_BD.float(), self.policies)

    def gram_loss(self) -> Tensor:
        """|| W*^T W* - I ||_F, a float32 scalar; its gradient at exact orthonormality is 0.

        Where the weight is here in forward passes alone (FSDP 1), that of the last forward pass.

        Raises:
            UserError: the weight is not here, or the last forward pass kept nothing for a gradient.
        """
        weight = self.weight.full_tensor() if is_dtensor(self.weight) else self.weight
        if is_dtensor(self.weight) or self.absence() is None:
            with torch.autocast(weight.device.type, enabled=False):
                return torch.linalg.vector_norm(_gram_error(weight.float()))
        if self._kept is None:
            self.require_weights("The Gram loss")
            raise AssertionError("unreachable")
        if torch.is_grad_enabled() and self.weight.requires_grad and not self._kept.requires_grad:
            raise UserError(
                "The last forward pass ran without gradients, so under FSDP the Gram loss has none; call it after a "
                "training forward pass, and checkpoint activations with use_reentrant=False."
            )
        return self._kept

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # part of a graph, which cannot be copied


def _gram_error(weight_KD: Tensor) -> Tensor:
    gram_KK = weight_KD @ weight_KD.T
    return gram_KK - torch.eye(gram_KK.shape[0], device=gram_KK.device)


class _KeptGram(torch.autograd.Function):
    """The Gram loss of a weight that is gone when the backward pass comes: its gradient is computed beforehand.

    For the error E = W W^T - I, symmetric, the gradient of ||E|| is 2 E W / ||E||, and 0 where E is 0.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            wide = weight.float()
            error = _gram_error(wide)
            norm = torch.linalg.vector_norm(error)
            ctx.save_for_backward(torch.where(norm > 0, 2 * error @ wide / norm.clamp(min=1e-30), 0).to(weight.dtype))
        return norm

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        return grad.to(gradient.dtype) * gradient


def route(x_ND: Tensor, weight_KD: Tensor, prototypes_BD: Tensor, policies: RouterPolicies | None = None) -> Routing:
    """The routing equations, in the dtype of the inputs (the layer always passes float32).

    Gradient reaches the shared row through alpha and the other rows through the gates. Block choice, b, k and the
    cumulative threshold carry none.
    """
    policies = policies or RouterPolicies()
    num_blocks, num_experts = prototypes_BD.shape[0], weight_KD.shape[0] - 1
    logits_NK = x_ND @ weight_KD.T

    # How much to share: alpha, and b = round(B alpha) in 1 .. B-1.
    alpha_N = policies.demand(logits_NK[:, 0], num_blocks)
    count_N = (num_blocks * alpha_N.detach()).nan_to_num(1.0).round().long().clamp(1, num_blocks - 1)

    # What to share: the b blocks that come first.
    with torch.no_grad():
        shared_NB = policies.order(x_ND.detach(), prototypes_BD.detach()) < count_N[:, None]

    # How many experts the remainder needs: the k of largest affinity, ties to the lower index.
    affinity_NK = torch.softmax(logits_NK[:, 1:], dim=-1)
    with torch.no_grad():
        sorted_NK, order_NK = descending(affinity_NK.detach())
        expert_count_N = policies.count(sorted_NK, alpha_N.detach())
        first_NK = torch.arange(num_experts, device=x_ND.device) < expert_count_N[:, None]
        active_NK = torch.zeros_like(first_NK).scatter_(1, order_NK, first_NK)
    gates_NK = torch.where(active_NK, affinity_NK, torch.zeros_like(affinity_NK))
    return Routing(alpha_N, shared_NB, affinity_NK, gates_NK, count_N, expert_count_N)
