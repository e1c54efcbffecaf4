"""A slow float64 UniF-MoE layer, token by token, straight from the paper's equations. Differentiable by autograd.

Deliberately shares no code with the package: it is the yardstick for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def decide(
    x: Tensor,
    router: Tensor,
    keys_shared: Tensor,
    num_blocks: int,
    shared_demand: float | None = None,
    fixed_experts: int | None = None,
    block_choice: str = "prototype",
) -> tuple[Tensor, list[int], list[int], Tensor]:
    """One token's alpha, shared blocks, active experts (best first) and affinities.

    Blocks are ranked by the shared expert's keys (H, d) under the activation. The last three arguments are the paper's
    ablations: alpha fixed, k fixed, and the first b blocks.
    """
    block = keys_shared.shape[0] // num_blocks
    tau = (num_blocks - 1) / num_blocks**2
    alpha = tau + (1 - 2 * tau) / (1 + torch.exp(-(router[0] @ x)))
    if shared_demand is not None:
        alpha = torch.tensor(shared_demand, dtype=x.dtype)
    count = min(max(round(num_blocks * float(alpha.detach())), 1), num_blocks - 1)  # Python rounds half to even
    priority = [float(x.detach() @ keys_shared[b * block : (b + 1) * block].mean(0)) for b in range(num_blocks)]
    shared = sorted(range(num_blocks), key=lambda b: (-priority[b], b))[:count]
    if block_choice == "prefix":
        shared = list(range(count))
    affinity = torch.softmax(router[1:] @ x, 0)
    order = sorted(range(len(affinity)), key=lambda j: (-float(affinity[j].detach()), j))
    mass, active = 0.0, []
    for expert in order:
        active.append(expert)
        mass += float(affinity[expert].detach())
        if mass >= 1 - float(alpha.detach()):
            break
    if fixed_experts is not None:
        active = order[:fixed_experts]
    return alpha, sorted(shared), active, affinity


def layer_output(
    x: Tensor,
    router: Tensor,
    ffns: list[tuple[Tensor | None, ...]],
    num_blocks: int,
    activation=F.gelu,
    dropped: frozenset[tuple[int, int]] = frozenset(),
    **ablations: Any,
) -> Tensor:
    """y for (N, d) tokens; ffns are (up (H,d), up_bias, down (d,H), down_bias), the shared expert first.

    Gated ones go on with gate (H,d), gate_bias: E(x) = down(act(gate x + gate_bias) * (up x + up_bias)) + down_bias.
    `dropped` holds (token, expert) assignments that a capacity limit took away; `ablations` are those of `decide`.
    """
    block = ffns[0][0].shape[0] // num_blocks

    def expert(token: Tensor, ffn, blocks: list[int]) -> Tensor:
        up, up_bias, down, down_bias, *gate = ffn
        total = torch.zeros_like(token)
        for b in blocks:
            channels = slice(b * block, (b + 1) * block)
            pre = up[channels] @ token + (0 if up_bias is None else up_bias[channels])
            if gate:
                under = gate[0][channels] @ token + (0 if gate[1] is None else gate[1][channels])
                total = total + down[:, channels] @ (activation(under) * pre)
            else:
                total = total + down[:, channels] @ activation(pre)
        return total if down_bias is None else total + down_bias

    rows, keys = [], ffns[0][4 if len(ffns[0]) > 4 else 0].detach()
    for number, token in enumerate(x):
        alpha, shared, active, affinity = decide(token, router, keys, num_blocks, **ablations)
        rest = [b for b in range(num_blocks) if b not in shared]
        y = alpha * expert(token, ffns[0], shared)
        for j in (j for j in active if (number, j) not in dropped):
            y = y + affinity[j] * expert(token, ffns[1 + j], rest)
        rows.append(y)
    return torch.stack(rows) if rows else x.sum() * torch.zeros_like(x)
