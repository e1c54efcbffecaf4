"""The metrics of GLUE by hand, and over ranks of uneven size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.ranks import run_ranks
from unifmoe_dist.data.metrics import ACCURACY, ACCURACY_AND_F1, MATTHEWS
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train.evaluate import evaluate

# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric,predictions,labels,expected",
    [
        (ACCURACY, [0, 1, 2, 2], [0, 1, 1, 2], 3 / 4),
        # tp 3, tn 1, fp 1, fn 1: (3*1 - 1*1) / sqrt(4*4*2*2)
        (MATTHEWS, [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1], 2 / 8),
        (MATTHEWS, [0, 1, 0], [0, 1, 0], 1.0),
        (MATTHEWS, [1, 0, 1], [0, 1, 0], -1.0),
        (MATTHEWS, [1, 1, 1, 1], [0, 1, 1, 0], 0.0),
        (MATTHEWS, [0, 0, 0], [0, 1, 1], 0.0),
        (MATTHEWS, [0, 1], [1, 1], 0.0),
        (MATTHEWS, [1, 1], [1, 1], 0.0),
        # accuracy 4/6, F1 = 2*3 / (2*3 + 1 + 1)
        (ACCURACY_AND_F1, [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1], (4 / 6 + 6 / 8) / 2),
        (ACCURACY_AND_F1, [0, 0], [0, 0], 1 / 2),
        (ACCURACY_AND_F1, [0, 0], [1, 1], 0.0),
        (ACCURACY_AND_F1, [1, 1, 1, 1], [1, 1, 0, 1], (3 / 4 + 6 / 7) / 2),
    ],
)
@pytest.mark.filterwarnings("error")
def test_metrics_by_hand(metric, predictions, labels, expected):
    assert metric.compute(np.array(predictions), np.array(labels)) == pytest.approx(expected, abs=1e-12)


class Repeat(nn.Module):
    """Predicts the class that its input holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * nn.functional.one_hot(x, 2).float()


def given_predictions() -> TaskData:
    """Data sets of 7, 1 and 5 items: `(prediction, label)` each."""
    parts = [
        [(1, 1), (1, 1), (1, 1), (0, 0), (1, 0), (0, 1), (0, 0)],
        [(1, 1)],
        [(0, 1), (1, 0), (1, 1), (0, 0), (1, 1)],
    ]
    return TaskData(
        name="given",
        num_classes=2,
        train=parts,
        validation=parts,
        test=parts,
        environments=("a", "b", "c"),
        collate=lambda items: ({"x": torch.tensor([p for p, _ in items])}, torch.tensor([y for _, y in items])),
        build_model=Repeat,
        metric=MATTHEWS,
    )  # type: ignore[arg-type]


def scores_of_given(rank, world, batch_size):
    task, ranks = given_predictions(), Ranks(rank, world, torch.device("cpu"))
    return evaluate(Repeat(), task, task.test, batch_size, ranks)


def test_a_metric_is_computed_on_the_whole_data_set():
    # tp 3, tn 2, fp 1, fn 1: (3*2 - 1*1) / sqrt(4*4*3*3); one class only; tp 2, tn 1, fp 1, fn 1: 1 / sqrt(3*3*2*2)
    expected = scores_of_given(0, 1, 64)
    assert expected.metric == "matthews_correlation"
    assert expected.per_dataset == pytest.approx([5 / 12, 0.0, 1 / 6], abs=1e-12)
    assert expected.value == pytest.approx(7 / 36) and expected.accuracy == pytest.approx((5 / 7 + 1 + 3 / 5) / 3)
    for batch_size in (2, 3):
        assert scores_of_given(0, 1, batch_size) == expected


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_uneven_size_score_as_one(world):
    """Ranks that run out of items repeat one with weight 0: that counts nothing, and no item is left out."""
    for score in run_ranks(world, scores_of_given, 1):
        assert score == scores_of_given(0, 1, 64)
