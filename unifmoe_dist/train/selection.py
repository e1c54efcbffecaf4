"""Which evaluation was best so far, and whether to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Selection:
    """The best validation score and the evaluations since; the earliest of equal scores wins.

    Ranks that are given the same scores decide alike, so nothing needs to be exchanged.

    Attributes:
        step: Step of the best evaluation; 0 before the first.
        score: Its score, by the task's metric; None before the first.
        accuracy: Its accuracy, whatever the metric.
        waited: Evaluations in a row since then that were no better.
    """

    step: int = 0
    score: float | None = None
    accuracy: float | None = None
    waited: int = 0

    def offer(self, step: int, score: float, accuracy: float) -> bool:
        """Take note of an evaluation; whether it is the best so far."""
        better = self.score is None or score > self.score
        if better:
            self.step, self.score, self.accuracy, self.waited = step, score, accuracy, 0
        else:
            self.waited += 1
        return better

    def exhausted(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row were no better than the best; never, for None."""
        return patience is not None and self.waited >= patience

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "best": self.score,
            "best_step": self.step,
            "best_accuracy": self.accuracy,
            "evaluations_without_improvement": self.waited,
        }

    @classmethod
    def from_progress(cls, saved: dict[str, Any]) -> Selection:
        """The inverse of `progress`. Checkpoints older than these fields were selected by accuracy."""
        if not saved["best_step"]:
            return cls()
        best, waited = saved["best"], saved.get("evaluations_without_improvement", 0)
        return cls(saved["best_step"], best, saved.get("best_accuracy", best), waited)
