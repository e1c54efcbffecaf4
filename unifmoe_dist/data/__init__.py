"""Tasks: where the data comes from and how it is cut."""

from unifmoe_dist.data.acceptability import acceptability_task
from unifmoe_dist.data.base import TaskData
from unifmoe_dist.data.digits import digits_task, linear_baseline

__all__ = ["TaskData", "acceptability_task", "digits_task", "linear_baseline"]
