"""What a task is scored by: what is kept of each item, and a function of what was kept of all items at once.

Matthews correlation and F1 are no means over items, so they must see the whole data set; perplexity is a mean over
tokens. Either way a batch's logits stay where they were computed: ranks exchange a few numbers per item.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unifmoe_dist.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def classes(logits: Tensor, labels: Tensor) -> Tensor:
    """Predicted classes over labels, (2, N) int64, of logits (N, C) and labels (N,)."""
    import torch

    return torch.stack([logits.argmax(-1), labels])


def _accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float((predictions == labels).mean())


@dataclass(frozen=True)
class Metric:
    """A score of predictions on a data set.

    Attributes:
        name: What it is called in logs, plots and summary.json.
        compute: From the rows of `observe` for all items of a data set, each an array (N,), N at least 1, in any order.
        observe: `observe(logits, labels) -> (rows, N)`: what is kept of each item of a batch; by default the predicted
            class and the label.
        accuracy: The fraction that is right, from the same rows as `compute`.
        lower_is_better: Whether less is better.
        pooled: Whether several data sets are scored as one, rather than by the mean of their scores.
        scale, unit, decimals: How readers see it.
    """

    name: str
    compute: Callable[..., float]
    observe: Callable[[Tensor, Tensor], Tensor] = classes
    accuracy: Callable[..., float] = _accuracy
    lower_is_better: bool = False
    pooled: bool = False
    scale: float = 100.0
    unit: str = "%"
    decimals: int = 1

    @property
    def title(self) -> str:
        """Name for readers."""
        return self.name.replace("_", " ")

    def better(self, score: float, than: float) -> bool:
        return score < than if self.lower_is_better else score > than

    @property
    def axis(self) -> str:
        """What an axis of scores is called."""
        return f"score ({self.unit})" if self.unit else self.title

    @property
    def form(self) -> str:
        """How Python formats a score for readers."""
        return f".{self.decimals}{self.unit or 'f'}"

    def number(self, score: float) -> str:
        """A score without its unit."""
        return f"{self.scale * score:.{self.decimals}f}"

    def shown(self, score: float) -> str:
        """A score as the tables of the documentation have it, with its unit."""
        return f"{self.number(score)} {self.unit}".rstrip()

    def each(self, rows: Sequence[np.ndarray]) -> list[float]:
        """The score on each of several data sets, of each of which there are the rows of `observe`; 0 without any."""
        return [self.compute(*data) if data.size else 0.0 for data in rows]

    def overall(self, rows: Sequence[np.ndarray], each: Sequence[float] | None = None) -> float:
        """The score on several data sets together; `each` is what `each` gave of them, where it is known."""
        if self.pooled:
            return self.compute(*np.concatenate(rows, axis=1))
        scores = self.each(rows) if each is None else each
        return sum(scores) / len(scores)


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


def _token_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Of every row its summed -log p, its tokens and those predicted right, (3, N) float64; logits (N, T, V)."""
    import torch

    from unifmoe_dist.data.token_loss import token_losses

    losses = token_losses(logits, labels).double().sum(-1)
    right = (logits.argmax(-1) == labels).sum(-1)
    return torch.stack([losses, torch.full_like(losses, labels.shape[-1]), right.double()])


def _perplexity(losses: np.ndarray, tokens: np.ndarray, right: np.ndarray) -> float:
    mean = math.fsum(losses) / math.fsum(tokens)  # exact sums: the same in any order, on any number of ranks
    return math.exp(mean) if mean < 700 else math.inf


def _right_tokens(losses: np.ndarray, tokens: np.ndarray, right: np.ndarray) -> float:
    return float(right.sum() / tokens.sum())


PERPLEXITY = Metric(
    "perplexity",
    _perplexity,
    observe=_token_sums,
    accuracy=_right_tokens,
    lower_is_better=True,
    pooled=True,
    scale=1.0,
    unit="",
    decimals=2,
)
"""exp of the mean of -log p(next token) over all tokens, from 1 to infinity; natural logarithms."""

METRICS = {metric.name: metric for metric in (ACCURACY, MATTHEWS, ACCURACY_AND_F1, PERPLEXITY)}


def metric_named(name: str) -> Metric:
    """A metric as its readers need it; one that a task brings itself is taken for a fraction, more being better."""
    return METRICS.get(name) or Metric(name, _unknown)


def _unknown(*rows: np.ndarray) -> float:
    raise UserError("a metric that is known by its name only cannot be computed; take the task's own.")
