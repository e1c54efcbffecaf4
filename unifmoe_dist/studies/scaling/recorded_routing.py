"""Recorded routing: which experts and blocks every token of a real run used, in a small file.

RUN/routing.npz holds for every UniF-MoE layer `LAYER/active`, (T, ceil(K / 8)) uint8, and `LAYER/shared`,
(T, ceil(B / 8)) uint8: bits as `numpy.packbits` lays them, the first expert or block the highest; and `facts`, JSON
with the layers' sizes. Tokens are in the order of the data, whose items were drawn at random from those that validate:
the domains of the training, unseen in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unifmoe_dist.errors import UserError
from unifmoe_dist.files import appearing
from unifmoe_dist.routing import Router
from unifmoe_dist.studies.scaling.volume import synthetic_tokens

FILE = "routing.npz"


@dataclass(frozen=True)
class RecordedLayer:
    """One layer's decisions about T tokens."""

    active: np.ndarray  # (T, K) bool, residual experts with a gate
    shared: np.ndarray  # (T, B) bool, blocks of the shared expert; each active expert computes the others
    model_dim: int
    hidden_dim: int
    gated: bool  # whether experts have a gate projection

    @property
    def num_experts(self) -> int:
        return self.active.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.shared.shape[1]

    def __len__(self) -> int:
        return len(self.active)

    def taken(self, tokens: slice | np.ndarray) -> RecordedLayer:
        return replace(self, active=self.active[tokens], shared=self.shared[tokens])

    def ordered(self, experts: np.ndarray) -> RecordedLayer:
        """With experts laid out in another order, so that contiguous spans of it are ranks."""
        return replace(self, active=self.active[:, experts])

    def dealt(self, ranks: int, each: int) -> Iterator[np.ndarray]:
        """Indices of each rank's tokens: those recorded, in their order, and where they are too few, drawn again."""
        random = np.random.default_rng(0)
        for start in range(0, ranks * each, each):
            more = random.integers(0, len(self), each)
            own = np.arange(start, start + each)
            yield np.where(own < len(self), own, more)


def write_routing(path: Path, layers: dict[str, RecordedLayer], task: str) -> None:
    """Write recorded layers, by name, as the module describes."""
    sizes = {
        name: {f: getattr(x, f) for f in ("num_experts", "num_blocks", "model_dim", "hidden_dim", "gated")}
        for name, x in layers.items()
    }
    arrays: dict[str, Any] = {
        f"{n}/{kind}": np.packbits(getattr(x, kind), 1) for n, x in layers.items() for kind in _KINDS
    }
    with appearing(path) as unfinished, unfinished.open("wb") as handle:
        np.savez_compressed(handle, facts=np.array(json.dumps({"task": task, "layers": sizes})), **arrays)


_KINDS = ("active", "shared")


def read_routing(place: Path) -> tuple[str, list[RecordedLayer]]:
    """Task and layers of a file, or of the one in a run's folder. Raises UserError where there is none, or another."""
    path = place / FILE if place.is_dir() else place
    if not path.is_file():
        raise UserError(f"{path} does not exist; make it with launch/scale.py --record RUN.")
    try:
        with np.load(path) as arrays:
            facts = json.loads(str(arrays["facts"]))
            layers = []
            for name, x in facts["layers"].items():
                counts = dict(zip(_KINDS, (x.pop("num_experts"), x.pop("num_blocks")), strict=True))
                bits: dict[str, Any] = {
                    k: np.unpackbits(arrays[f"{name}/{k}"], 1, count=n).astype(bool) for k, n in counts.items()
                }
                layers.append(RecordedLayer(**bits, **x))
            return facts["task"], layers
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} holds no recorded routing ({error}); make it with launch/scale.py --record."
        ) from error


def record_run(folder: Path, tokens: int) -> Path:
    """Route at most `tokens` tokens of a run's validation data with its latest weights, on one rank, and write them."""
    from unifmoe_dist.studies.run_report.loaded_run import load_run
    from unifmoe_dist.studies.run_report.sample import draw_sample
    from unifmoe_dist.studies.usage.capture import capture

    run = load_run(folder, "latest")
    run = replace(run, task=replace(run.task, test=run.task.validation))
    captured = capture(run.model, run.layers, draw_sample(run, tokens).batches("recording"))
    layers = {}
    for name, layer in run.layers.items():
        if hasattr(captured[name].routing, "shared_blocks"):
            active, shared = (captured[name].routing.gates != 0), captured[name].routing.shared_blocks
            sizes = layer.config.model_dim, layer.config.hidden_dim, layer.config.gated
            layers[name] = RecordedLayer(active.numpy(), shared.numpy(), *sizes)
    if not layers:
        raise UserError(f"{folder} has no UniF-MoE layer; give the folder of a run with model.moe unif.")
    write_routing(folder / FILE, layers, run.config.data.task)
    return folder / FILE


@torch.no_grad()
def synthetic_layer(experts: int, tokens: int = 4096, blocks: int = 8, skewed: bool = False) -> RecordedLayer:
    """Decisions of a router that was just drawn about normal tokens, `volume.synthetic_tokens`, at any K."""
    torch.manual_seed(0)
    dim = max(384, 2 * experts)
    router, generator = Router(dim, experts), torch.Generator().manual_seed(1)
    x = synthetic_tokens(tokens, router.weight, skewed, generator)
    routing = router.decide(x, torch.randn(blocks, dim, generator=generator))
    return RecordedLayer((routing.gates != 0).numpy(), routing.shared_blocks.numpy(), dim, 4 * dim, False)


def half(layers: Sequence[RecordedLayer], second: bool) -> list[RecordedLayer]:
    """The first or the second half of every layer's tokens."""
    return [x.taken(slice(len(x) // 2, None) if second else slice(len(x) // 2)) for x in layers]
