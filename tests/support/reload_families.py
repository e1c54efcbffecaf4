"""A process of its own: `python -m tests.support.reload_families FOLDER` loads every model that a test saved in FOLDER.

Prints, as JSON, by family: the number of layers of experts and the largest difference of an output from the saved one,
or what went wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import unifmoe_dist
from tests.support.families import FAMILIES, Family
from unifmoe_dist.upcycling import moe_layers

K, B = 3, 4


def upcycled(family: Family, model: nn.Module) -> nn.Module:
    unifmoe_dist.upcycle(family.part_of(model), range(family.layers), K, B)
    return model


@torch.no_grad()
def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The first of a model's outputs."""
    made = model(**inputs)
    return made if isinstance(made, Tensor) else made[0]


def save(family: Family, model: Any, inputs: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    expected = {"kind": type(model).__name__, "inputs": inputs, "output": output(model, inputs)}
    torch.save(expected, folder / "expected.pt")
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        torch.save(model.state_dict(), folder / "weights.pt")


def load(family: Family, folder: Path, kind: str) -> nn.Module:
    if (folder / "weights.pt").exists():
        model = upcycled(family, family.build())
        model.load_state_dict(torch.load(folder / "weights.pt"))
        return model
    return getattr(transformers, kind).from_pretrained(folder)


def main() -> None:
    torch.set_num_threads(1)
    unifmoe_dist.enable_from_pretrained()
    found: dict[str, Any] = {}
    for family in FAMILIES:
        folder = Path(sys.argv[1]) / family.name
        if folder.exists():
            expected = torch.load(folder / "expected.pt")
            try:
                model = load(family, folder, expected["kind"])
                wrong = (output(model, expected["inputs"]) - expected["output"]).abs().max()
                found[family.name] = [len(moe_layers(model)), float(wrong)]
            except Exception as error:  # the test of that family says what
                found[family.name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
