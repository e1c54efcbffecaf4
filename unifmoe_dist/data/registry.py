"""The tasks by name. A task is one file that holds a subclass of `Task`, and one line in `TASKS`.

This module imports no task: a command that only prints its help names the tasks without PyTorch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from unifmoe_dist.lazy import load

if TYPE_CHECKING:
    from unifmoe_dist.data.task import Task

TASKS = {
    "digits": "unifmoe_dist.data.digits:Digits",
    "digit-sources": "unifmoe_dist.data.digit_sources:DigitSources",
    "emoji": "unifmoe_dist.data.emoji:Emoji",
    "emoji-seen": "unifmoe_dist.data.emoji:EmojiSeen",
    "acceptability": "unifmoe_dist.data.acceptability:Acceptability",
    "pacs": "unifmoe_dist.data.domainbed:DomainBed",
    "vlcs": "unifmoe_dist.data.domainbed:DomainBed",
    "officehome": "unifmoe_dist.data.domainbed:DomainBed",
    "terraincognita": "unifmoe_dist.data.domainbed:DomainBed",
    "domainnet": "unifmoe_dist.data.domainbed:DomainBed",
    "corpus": "unifmoe_dist.data.corpus:Corpus",
    "genres": "unifmoe_dist.data.corpus:Genres",
    "cola": "unifmoe_dist.data.glue:Glue",
    "mrpc": "unifmoe_dist.data.glue:Glue",
    "qnli": "unifmoe_dist.data.glue:Glue",
    "mnli": "unifmoe_dist.data.glue:Glue",
    "rte": "unifmoe_dist.data.glue:Glue",
}
"""Module and class of every task, by the value of `data.task`; a class may serve several data sets."""

PREPARED = ("digit-sources", "emoji", "pacs", "vlcs", "officehome", "terraincognita", "domainnet")
"""Those that `launch/data.py prepare` takes."""


def register_task(name: str, place: str) -> None:
    """Add a task that lives outside the package, before options are parsed.

    Args:
        name: Value of `data.task`.
        place: "module:class".
    """
    TASKS[name] = place


def find_task(name: str) -> Task:
    """The task of this name, as it is registered now; its module is imported when it is first asked for.

    Raises:
        KeyError: there is none.
    """
    return _make(TASKS[name], name)


@cache
def _make(place: str, name: str) -> Task:
    return load(place)(name)
