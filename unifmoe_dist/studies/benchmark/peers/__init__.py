"""Mixture-of-experts layers of other libraries, one small adapter each, written against their public interfaces.

An adapter is a function (shape, top_k, device, dtype) -> module from (N, d) tokens to (N, d), with K experts that each
cost a dense FFN, of which every token uses top_k and none is dropped. It imports its library itself and raises
`Unavailable`, or whatever the library raises, where that cannot run.
"""

from unifmoe_dist.studies.benchmark.peers.deepspeed import deepspeed_moe
from unifmoe_dist.studies.benchmark.peers.megablocks import megablocks_dmoe
from unifmoe_dist.studies.benchmark.peers.mixtral import mixtral_block
from unifmoe_dist.studies.benchmark.peers.peer import BuildPeer, Unavailable, reason
from unifmoe_dist.studies.benchmark.peers.scattermoe import scattermoe_mlp
from unifmoe_dist.studies.benchmark.peers.sonicmoe import sonicmoe_moe
from unifmoe_dist.studies.benchmark.peers.tutel import tutel_moe

PEERS: dict[str, BuildPeer] = {
    "Tutel": tutel_moe,
    "Transformers Mixtral": mixtral_block,
    "DeepSpeed MoE": deepspeed_moe,
    "MegaBlocks dMoE": megablocks_dmoe,
    "ScatterMoE": scattermoe_mlp,
    "SonicMoE": sonicmoe_moe,
}

__all__ = ["PEERS", "BuildPeer", "Unavailable", "reason"]
