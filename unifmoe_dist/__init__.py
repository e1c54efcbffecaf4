"""UniF-MoE: share first, route what remains. Expert-parallel training of token-adaptive mixtures of experts."""

from unifmoe_dist import interrupts  # noqa: F401  first: it acts at once
from unifmoe_dist.config import UniFMoEConfig
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.routing import Routing
from unifmoe_dist.upcycling import diversity_loss, upcycle

__version__ = "0.1.0"
__all__ = ["Routing", "UniFMoEConfig", "UniFMoELayer", "diversity_loss", "upcycle"]
