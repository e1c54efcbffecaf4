"""Empirical risk minimisation: the cross-entropy of all environments' items together (Vapnik, 1998)."""

from torch import Tensor

from unifmoe_dist.algorithms.algorithm import Algorithm
from unifmoe_dist.data.task import logits_of
from unifmoe_dist.data.token_loss import cross_entropy


class ERM(Algorithm):
    """L = CE(f(x), y). Needs no environments."""

    needs_environments = False

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        logits = logits_of(self.model(**inputs))
        return cross_entropy(logits, labels), logits
