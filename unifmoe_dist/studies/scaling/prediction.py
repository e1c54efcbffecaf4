"""Steps on clusters of many sizes, for recorded and drawn routing, as a table; and where the two exchanges cross."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.records import markdown
from unifmoe_dist.studies.scaling.cards import CARDS, card_model
from unifmoe_dist.studies.scaling.recorded_routing import RecordedLayer, read_routing, synthetic_layer
from unifmoe_dist.studies.scaling.simulator import PARTS, Job, Links, Step, expert_size, simulate

GIB = 2**30
SPEEDS = (10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3600.0)
"""Gbit/s between nodes over which the exchanges are compared."""


@dataclass(frozen=True)
class Model:
    """The model that a prediction is for: every second of its layers is upcycled, and routes as recorded ones do."""

    width: int
    depth: int
    gated: bool
    tokens: int  # per rank and step

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("depth", 2), ("tokens", 1)):
            if getattr(self, name) < least:
                raise UserError(f"the model's {name} must be at least {least}, not {getattr(self, name)}.")

    def job(self, layers: Sequence[RecordedLayer]) -> Job:
        """In half precision, with FFNs 4 times as wide as the model; attention's four matrices, and no embeddings."""
        sized = [replace(x, model_dim=self.width, hidden_dim=4 * self.width, gated=self.gated) for x in layers]
        dense = self.depth * (4 * self.width**2 + expert_size(sized[0]))
        # Korthikanti et al. 2022: 34 bytes per token, channel and layer in half precision, attention recomputed
        kept = 34 * self.width * self.depth
        return Job(sized, self.tokens, dense, repeats=self.depth / 2 / len(layers), activations=kept)


def routing_of(places: Sequence[Path], drawn: Sequence[int]) -> dict[str, list[RecordedLayer]]:
    """Layers by name: of runs' files, and drawn at so many experts, which are loaded equally."""
    found = {}
    for place in places:
        task, layers = read_routing(place)
        found[f"{task}, K = {layers[0].num_experts}"] = layers
    return found | {f"drawn, K = {k}": [synthetic_layer(k)] for k in drawn}


def predict(
    routing: dict[str, list[RecordedLayer]], model: Model, card: str, links: Links, ranks: Sequence[int]
) -> dict[str, list[Step]]:
    """Steps of both exchanges for every routing and number of ranks."""
    found = {}
    for name, layers in routing.items():
        job = model.job(layers)
        costs = card_model(CARDS[card], job)
        found[name] = [step for n in ranks for step in simulate(job, n, costs, links)]
    return found


def table(found: dict[str, list[Step]]) -> str:
    """Markdown table of predicted steps; milliseconds, and megabytes per step of the rank with most."""
    return markdown(
        [
            {
                "": name,
                "ranks": x.ranks,
                "experts over": x.expert_parallel,
                "exchange": x.exchange,
                "step (ms)": f"{1e3 * x.total:.1f}",
                **{title: f"{1e3 * x.seconds[part]:.2f}" for part, title in PARTS.items()},
                "MB inside nodes": f"{x.near_bytes / 1e6:,.1f}",
                "MB between nodes": f"{x.far_bytes / 1e6:,.1f}",
                "GiB per rank": f"{x.memory / GIB:.1f}",
                "tokens/s": f"{x.tokens_per_second:,.0f}",
            }
            for name, steps in found.items()
            for x in steps
        ],
        left=("", "exchange"),
    )


def describe(model: Model, card: str, links: Links) -> str:
    """What is predicted, in a line, and what that rests on."""
    kind = "gated" if model.gated else "plain"
    return (
        f"d = {model.width}, {model.depth} layers, every second upcycled, {kind} FFNs, {model.tokens} tokens per rank, "
        f"{card}, {links.ranks_per_node} ranks per node, {links.node_gbps:g} / {links.link_gbps:g} Gbit/s in / between "
        f"nodes\n\n{CARDS[card].sources} Links: speeds and latencies as given. Gradients are summed after the backward "
        "pass, in rings; nothing of that is hidden. Experts lie in the order of their numbers. Memory: weights, "
        "gradients, states, rows kept and in flight, and what the rest of the model keeps; buffers of DeepSpeed and of "
        "the allocator come on top."
    )
