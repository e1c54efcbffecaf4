"""The paper's own numbers (paper_numbers.yaml): reports put them beside measurements, estimates rest on them.

A score is `(mean, standard deviation)`; the deviation is None where the paper gives none.
"""

from pathlib import Path

import yaml

Score = tuple[float, float | None]

AVERAGE = "average"
"""Key of a row's mean over data sets."""


def _scores(printed: str) -> dict[str, dict[str, Score]]:
    """Scores by row and column of a table as it is printed, `mean±deviation`."""
    (_, *columns), *rows = (line.split() for line in printed.strip().splitlines())
    return {
        name: {
            column: (float(mean), float(deviation) if deviation else None)
            for column, (mean, _, deviation) in zip(columns, (word.partition("±") for word in words), strict=True)
            if mean != "-"
        }
        for name, *words in rows
    }


def _values(printed: str) -> dict[str, dict[str, float]]:
    """Values by row and column of a table without deviations."""
    return {name: {column: mean for column, (mean, _) in row.items()} for name, row in _scores(printed).items()}


_PRINTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

DOMAINBED = _scores(_PRINTED["domainbed"])
"""By method and data set."""

STANDARD_AVERAGE, STANDARD_BEST = "standard-average", "standard-best"
"""Rows over the fixed top-k methods: mean over k, and the best k of each task."""

GLUE = _scores(_PRINTED["glue"])
"""By method and task."""

GLUE_COSINE = {f"gmoe-{name}": GLUE[name] for name in ("top1", "top2", "top4", "top8")}
"""The rows of GLUE that the layers with a cosine gate are to be compared with."""

ABLATION: dict[str, dict[str, float]] = _PRINTED["ablation"]
"""By method, and benchmark or its C_B."""

COST = _values(_PRINTED["cost"])
"""By statistic and method."""


def published_cost(method: str) -> dict[str, float]:
    """The paper's column of a method, by statistic; empty where its table leaves the method out."""
    return {statistic: row[method] for statistic, row in COST.items() if method in row}
