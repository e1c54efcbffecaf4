"""Tasks: where the data comes from and how it is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unifmoe_dist.lazy import names_of

if TYPE_CHECKING:
    from unifmoe_dist.data.acceptability import acceptability_task
    from unifmoe_dist.data.digits import digits_task, linear_baseline
    from unifmoe_dist.data.task import TaskData

__all__ = ["TaskData", "acceptability_task", "digits_task", "linear_baseline"]
__getattr__ = names_of(
    __name__,
    {"TaskData": "task", "acceptability_task": "acceptability", "digits_task": "digits", "linear_baseline": "digits"},
)
