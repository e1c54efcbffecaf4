"""A configuration that cannot be is one sentence."""

from __future__ import annotations

import pytest

from unifmoe_dist import UniFMoEConfig
from unifmoe_dist.errors import UserError


@pytest.mark.parametrize(
    "kwargs,words",
    [
        (dict(hidden_dim=30, num_blocks=4), ["30", "4"]),
        (dict(num_blocks=1), ["1", "num_blocks"]),
        (dict(num_experts=0), ["num_experts"]),
        (dict(activation="swish9"), ["swish9", "gelu"]),
        (dict(num_experts=16), ["16", "15"]),
        (dict(hidden_dim=2.5), ["hidden_dim", "2.5"]),
        (dict(shared_demand=0), ["shared_demand", "0"]),
        (dict(shared_demand=1.0), ["shared_demand", "1.0"]),
        (dict(shared_demand=float("nan")), ["shared_demand"]),
        (dict(shared_demand=True), ["shared_demand", "True"]),
        (dict(fixed_experts=0), ["fixed_experts", "0"]),
        (dict(fixed_experts=4), ["fixed_experts", "4", "3"]),
        (dict(fixed_experts=2.0), ["fixed_experts"]),
        (dict(block_choice="random"), ["block_choice", "random"]),
    ],
)
def test_config_errors(kwargs, words):
    with pytest.raises(UserError) as error:
        UniFMoEConfig(**{**dict(model_dim=16, hidden_dim=24, num_experts=3, num_blocks=4), **kwargs})
    assert all(word in str(error.value) for word in words)
