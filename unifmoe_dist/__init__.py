"""UniF-MoE: share first, route what remains. Expert-parallel training of token-adaptive mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unifmoe_dist.runtime import extras, signals  # noqa: F401  they act at once

if TYPE_CHECKING:
    from unifmoe_dist.config import UniFMoEConfig
    from unifmoe_dist.layer import UniFMoELayer
    from unifmoe_dist.optimizers import param_groups
    from unifmoe_dist.parallel import clip_grad_norm_, full_state_dict, load_full_state_dict
    from unifmoe_dist.routing import Routing
    from unifmoe_dist.upcycling import (
        diversity_loss,
        enable_from_pretrained,
        leave_experts_alone,
        register_adapter,
        upcycle,
    )
    from unifmoe_dist.warming import warm_up

__version__ = "0.1.0"
__all__ = [
    "Routing",
    "UniFMoEConfig",
    "UniFMoELayer",
    "clip_grad_norm_",
    "diversity_loss",
    "enable_from_pretrained",
    "full_state_dict",
    "leave_experts_alone",
    "load_full_state_dict",
    "param_groups",
    "register_adapter",
    "upcycle",
    "warm_up",
]

_HOMES = {
    "Routing": "routing",
    "UniFMoEConfig": "config",
    "UniFMoELayer": "layer",
    "clip_grad_norm_": "parallel",
    "diversity_loss": "upcycling",
    "enable_from_pretrained": "upcycling",
    "full_state_dict": "parallel",
    "leave_experts_alone": "upcycling",
    "load_full_state_dict": "parallel",
    "param_groups": "optimizers",
    "register_adapter": "upcycling",
    "upcycle": "upcycling",
    "warm_up": "warming",
}
_MODULES = (
    "config",
    "dispatch",
    "errors",
    "expert_layer",
    "experts",
    "kernels",
    "layer",
    "optimizers",
    "parallel",
    "routing",
    "upcycling",
    "usage",
)


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch at its first use: names of `__all__`, and modules by `import unifmoe_dist` alone."""
    import importlib

    from unifmoe_dist.lazy import names_of

    if name in _MODULES:
        return importlib.import_module(f"unifmoe_dist.{name}")
    return names_of(__name__, _HOMES)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
