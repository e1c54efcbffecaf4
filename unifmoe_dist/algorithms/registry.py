"""The registry of training algorithms: what `algorithm.name` can be, one line each. Imports no PyTorch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmEntry:
    """What `algorithm.name` can be.

    Args:
        name: Value of `algorithm.name`, and its row in tables.
        title: Name for readers.
        place: "module:class" of its `Algorithm`, below unifmoe_dist.
        plain: Whether it is the task loss alone, which is no method of its own.
        networks: Whether it trains one network more for each training environment.
        features: Whether it reads features as timm's models give them, so that a task of texts cannot have it.
    """

    name: str
    title: str
    place: str
    plain: bool = False
    networks: bool = False
    features: bool = False


REGISTRY: dict[str, AlgorithmEntry] = {
    entry.name: entry
    for entry in (
        AlgorithmEntry("erm", "ERM", "algorithms.erm:ERM", plain=True),
        AlgorithmEntry("lfme", "LFME", "algorithms.lfme:LFME", networks=True),
        AlgorithmEntry("dmda", "DMDA", "algorithms.dmda:DMDA", features=True),
        AlgorithmEntry("pcmoe", "PC-MoE", "algorithms.pcmoe:PCMoE", features=True),
    )
}

PLAIN = next(entry for entry in REGISTRY.values() if entry.plain)
"""The task loss alone: what a run minimises that names no algorithm."""
