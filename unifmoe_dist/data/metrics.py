"""What a task is scored by: a name and a function of all predictions and labels at once.

Matthews correlation and F1 are no means over items, so they must see the whole data set: `engine.evaluate` gathers it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Metric:
    """A score of class predictions; higher is better.

    Attributes:
        name: What it is called in logs, plots and summary.json.
        compute: `compute(predictions, labels) -> float` of two int64 arrays `(N,)`, N at least 1.
    """

    name: str
    compute: Callable[[np.ndarray, np.ndarray], float]


def _accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float((predictions == labels).mean())


def _matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    with warnings.catch_warnings():  # constant predictions of constant labels, of which the value 0 says enough
        warnings.filterwarnings("ignore", "A single label was found")
        return float(matthews_corrcoef(labels, predictions))


def _accuracy_and_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    f1 = float(f1_score(labels, predictions, pos_label=1, average="binary", zero_division=0.0))
    return (_accuracy(predictions, labels) + f1) / 2


ACCURACY = Metric("accuracy", _accuracy)
"""The fraction that is right, from 0 to 1."""

MATTHEWS = Metric("matthews_correlation", _matthews)
"""Matthews correlation of two classes, from -1 to 1; 0 where predictions or labels are all of one class."""

ACCURACY_AND_F1 = Metric("accuracy_and_f1", _accuracy_and_f1)
"""Mean of accuracy and of the F1 of class 1, from 0 to 1; F1 is 0 where nothing is, and nothing is called, class 1."""
