"""Figures of analyses. Each function returns a matplotlib `Figure`; `save` writes it as PNG, PDF or SVG."""

from unifmoe_dist.studies.figures.diagnostics import coactivation_figure, demand_figure, transition_figure
from unifmoe_dist.studies.figures.maps import element_figure, patch_figure
from unifmoe_dist.studies.figures.style import save
from unifmoe_dist.studies.figures.text import text_figure
from unifmoe_dist.studies.figures.usage import coactivation_graph, distribution_figure, gram_figure, load_figure

__all__ = [
    "coactivation_figure",
    "coactivation_graph",
    "demand_figure",
    "distribution_figure",
    "element_figure",
    "gram_figure",
    "load_figure",
    "patch_figure",
    "save",
    "text_figure",
    "transition_figure",
]
