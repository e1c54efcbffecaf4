"""A small RTE in GLUE's official layout."""

from __future__ import annotations

from pathlib import Path


def write_rte(folder: Path, train: int = 10, dev: int = 5) -> None:
    """Write train.tsv and dev.tsv; odd rows are entailments, and half a pair of quotes is part of a text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", train), ("dev", dev)):
        labels = ["entailment" if i % 2 else "not_entailment" for i in range(size)]
        rows = [f'{i}\tYes {i}.\tNo "{i}.\t{label}' for i, label in enumerate(labels)]
        (folder / f"{name}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")
