"""The other methods' layers in float64, token by token from their papers' equations. Differentiable by autograd.

Deliberately shares no code with the package: it is the yardstick for it. `p` holds a layer's parameters by name.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = dict[str, Tensor]


def _best(scores: Tensor, count: int) -> list[int]:
    values = scores.tolist()
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:count]


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a.norm() * b.norm())


def topk(x: Tensor, p: Parameters, top_k: int, **_) -> dict[int, Tensor]:
    scores = torch.softmax(p["router.weight"] @ x, 0)
    return {e: scores[e] for e in _best(scores, top_k)}


def gmoe(x: Tensor, p: Parameters, top_k: int, **_) -> dict[int, Tensor]:
    seen = p["router.projection.weight"] @ x + p["router.projection.bias"]
    factor = torch.exp(p["router.temperature"][0].clamp(max=math.log(100)))
    logits = torch.stack([factor * _cosine(seen, w) for w in p["router.weight"]])
    scores = torch.softmax(logits, 0)
    chosen = _best(scores, top_k)
    total = sum(scores[e] for e in chosen) if top_k > 1 else 1.0
    return {e: scores[e] / total for e in chosen}


def emoe(x: Tensor, p: Parameters, top_k: int, **_) -> dict[int, Tensor]:
    means = p.get("experts.gate_keys", p["experts.keys"]).detach().mean(1)
    return {e: torch.ones((), dtype=x.dtype) for e in _best(means @ x, top_k)}


def emoe_learn(x: Tensor, p: Parameters, top_k: int, **_) -> dict[int, Tensor]:
    scores = torch.softmax(p["router.weight"] @ x, 0)
    chosen = _best(scores, top_k)
    total = sum(scores[e] for e in chosen) if top_k > 1 else 1.0
    return {e: scores[e] / total for e in chosen}


def dynmoe(x: Tensor, p: Parameters, active: list[int], training: bool, **_) -> dict[int, Tensor]:
    temperature = p.get("router.temperature")
    factor = 1.0 if temperature is None else torch.exp(temperature[0].clamp(max=math.log(100)))
    scores = {e: torch.sigmoid(factor * _cosine(x, p["router.weight"][e])) for e in active}
    margins = {e: s - torch.sigmoid(factor * p["router.thresholds"][e]) for e, s in scores.items()}
    # The sign is 1 with the gradient of its argument.
    signs = {e: 1 + margin - margin.detach() for e, margin in margins.items() if margin > 0}
    if not signs and not training:
        best = max(active, key=lambda e: float(scores[e].detach()))
        return {best: torch.ones((), dtype=x.dtype)}
    return {e: sign / sum(signs.values()) for e, sign in signs.items()}


def mass(x: Tensor, p: Parameters, active: list[int], tau: float, **_) -> dict[int, Tensor]:
    scores = torch.softmax(p["router.weight"][active] @ x, 0)
    chosen, reached = [], 0.0
    for place in _best(scores, len(active)):
        chosen.append(place)
        reached += float(scores[place].detach())
        if reached >= tau:
            break
    total = sum(scores[place] for place in chosen)
    return {active[place]: scores[place] / total for place in chosen}


GATES = {"topk": topk, "gmoe": gmoe, "emoe": emoe, "emoe_learn": emoe_learn, "dynmoe": dynmoe, "mass": mass}


def layer_output(method: str, x: Tensor, p: Parameters, **options) -> tuple[Tensor, list[list[int]]]:
    """y (N, d) for tokens (N, d), and the experts of every token."""
    rows, used = [], []
    experts = len(p["experts.keys"])
    key_bias, value_bias, gate_bias = (
        p[f"experts.{name}"].view(experts, -1) if f"experts.{name}" in p else None
        for name in ("key_bias", "value_bias", "gate_key_bias")
    )
    for token in x:
        coefficients = GATES[method](token, p, **options)
        y = torch.zeros_like(token)
        for e, coefficient in coefficients.items():
            hidden = p["experts.keys"][e] @ token + key_bias[e]
            if gate_bias is None:
                hidden = F.gelu(hidden)
            else:
                hidden = F.gelu(p["experts.gate_keys"][e] @ token + gate_bias[e]) * hidden
            y = y + coefficient * (hidden @ p["experts.values"][e] + value_bias[e])
        rows.append(y)
        used.append(sorted(coefficients))
    return torch.stack(rows), used
