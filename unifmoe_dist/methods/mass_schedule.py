"""How long MASS watches gradients, as its authors' scripts for DomainBed and GLUE set it from a run's length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MASSRecipe:
    """What differs between the authors' two scripts.

    Args:
        least_window: Fewest steps of the window.
        least_warmup: Fewest steps of the warm-up.
        untried: Copies that there may be before the last one is tried.
    """

    least_window: int
    least_warmup: int
    untried: int


VISION = MASSRecipe(200, 100, 0)
"""`train_mass.py`."""
LANGUAGE = MASSRecipe(60, 30, 1)
"""`search_glue_no_trainer_mass.py`."""
SHORT = MASSRecipe(2, 0, 0)
"""The rule without its floors, for runs of some hundred steps, in which the floors would end expansion unused."""


def mass_recipe(family: str) -> MASSRecipe:
    """Which script a task follows, by its benchmark; small tasks of their own are too short for either's floors."""
    return {"domainbed": VISION, "glue": LANGUAGE}.get(family, SHORT)


@dataclass(frozen=True)
class MASSSchedule:
    """Steps of expansion, of the window and of the warm-up."""

    expansion_steps: int
    window: int
    warmup: int


def mass_schedule(steps: int, recipe: MASSRecipe) -> MASSSchedule:
    """Expansion in the first tenth; a window of 9 % and a warm-up of 5 % of the steps, or the recipe's fewest."""
    return MASSSchedule(
        int(steps * 0.1), max(recipe.least_window, int(steps * 0.09)), max(recipe.least_warmup, int(steps * 0.05))
    )
