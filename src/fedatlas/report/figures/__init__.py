"""Figures as inline SVG: `chart` is what all charts are made with, `theme` their colours, `slices` pictures of images."""

from fedatlas.report.figures.runs import (
    Box,
    Panel,
    box_plots,
    class_curves,
    cost_figure,
    distributions,
    dot_plots,
    epsilon_curves,
    loss_curves,
    presence_figure,
    reliability_plots,
    roc_curves,
    site_boxes,
    site_curves,
    traffic_figure,
)
from fedatlas.report.figures.slices import example, heated, labelled, plane
from fedatlas.report.figures.theme import (
    CLASS_COLOURS,
    class_variable,
    heat_stylesheet,
    model_title,
    stylesheet,
)

__all__ = [
    "CLASS_COLOURS",
    "Box",
    "Panel",
    "box_plots",
    "class_curves",
    "class_variable",
    "cost_figure",
    "distributions",
    "dot_plots",
    "epsilon_curves",
    "example",
    "heat_stylesheet",
    "heated",
    "labelled",
    "loss_curves",
    "model_title",
    "plane",
    "presence_figure",
    "reliability_plots",
    "roc_curves",
    "site_boxes",
    "site_curves",
    "stylesheet",
    "traffic_figure",
]
