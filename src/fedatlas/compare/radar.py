"""Arms side by side over sites or over classes: as radar plots, after Figures 5 and 6 of UFPS, or as dots with ± SD."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
from markupsafe import Markup

from fedatlas.compare.plan import Comparison
from fedatlas.evaluation.statistics import mean_of_defined
from fedatlas.report import markup
from fedatlas.report.comparison import LOWER, MEAN, heading, of_column, of_table
from fedatlas.report.figures.arms import Dots, Radar, dot_panels, radar_plots

LEAST_AXES = 3
Side = Literal["sites", "classes"]
Values = dict[str, dict[str, list[float]]]
"""Arm -> axis -> a value per finished seed."""


def lacks_radar(comparison: Comparison, side: Side) -> str:
    """Why the page has no radar plot over a side; "" where it has one."""
    asked = [table for table in (comparison, *map(comparison.table, comparison.tables)) if table.layout.radar]
    if not asked:
        return "no table has layout.radar"
    most = max(_most_axes(table, side) for table in asked)
    return "" if most >= LEAST_AXES else f"a radar plot has three axes or more, and there are {most} {side}"


def lacks_dots(comparison: Comparison, side: Side) -> str:
    """Why the page has no dots over a side; "" where it has them."""
    layouts = [comparison.layout, *(table.layout for table in comparison.tables)]
    return "" if any(layout.dots for layout in layouts) else "no table has layout.dots"


def _most_axes(comparison: Comparison, side: Side) -> int:
    """How many axes there are at most; of classes that only the sites tell, enough."""
    federation = comparison.first
    if side == "sites":
        return len(comparison.measure.sites or comparison.left_out or federation.sites)
    names = federation.labels.names
    return LEAST_AXES if names is None else len(names) - (federation.task == "segmentation")


def radars(found: Mapping[str, Any], side: Side) -> str:
    """A figure with a plot of every table whose layout asks for it, as HTML: an axis per site, the mean over its classes,
    or an axis per class, the mean over sites; means over the finished seeds. "" where none asks.

    found: as `results.collect` gives it.
    """
    panels, notes, normalised = [], [], False
    for table in (found, *found["tables"]):
        kind = table["layout"]["radar"]
        if kind is None:
            continue
        if not (values := _values(table, side)):
            continue
        axes = _axes(values)
        if len(axes) < LEAST_AXES:
            notes.append(
                f"“{heading(table)}”: a radar plot has three axes or more, and there are {len(axes)} {side}."
            )
            continue
        normalised |= kind == "normalised"
        lines = {
            arm: [float(np.mean(of[axis])) if axis in of else None for axis in axes]
            for arm, of in values.items()
        }
        label, decimals = _label(table)
        panels.append(
            Radar(f"{label}: {heading(table)}", axes, lines, decimals, table["metric"] in LOWER, kind == "normalised")
        )  # fmt: skip
    if not panels and not notes:
        return ""
    told = f"Over {side}. Outside is better."
    if normalised:
        told += " Every axis runs from its worst arm, on the inner ring, to its best, with both values at its end."
    drawn = [markup.figure(radar_plots(panels, f"radar-{side}"), told)] if panels else []
    return Markup("").join([*drawn, *map(markup.note, notes)])


def dots(found: Mapping[str, Any], side: Side) -> str:
    """A figure with a panel of every table whose layout asks for it, as HTML: every arm's mean ± SD over seeds at every
    site or class, and the table's average. "" where none asks, and where no run is finished."""
    panels = []
    for table in (found, *found["tables"]):
        if not table["layout"]["dots"]:
            continue
        values = _values(table, side)
        scale = _scale(table)
        means = {arm: [scale * v for v in of_column(of, MEAN)] for arm, of in table["arms"].items()}
        axes = [*_axes(values), MEAN]
        lines = {
            arm: [_spread(mean if axis == MEAN else values.get(arm, {}).get(axis, [])) for axis in axes]
            for arm, mean in means.items()
            if mean or arm in values
        }
        if lines:
            panels.append(Dots(heading(table), _label(table)[0], axes, lines))
    if not panels:
        return ""
    told = f"Over {side}, and the average of the table: mean ± SD over the finished seeds."
    return markup.figure(dot_panels(panels, f"dots-{side}"), told)


def _spread(values: list[float]) -> tuple[float, float | None] | None:
    if not values:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def _axes(values: Values) -> list[str]:
    return list(dict.fromkeys(axis for of_arm in values.values() for axis in of_arm))


def _label(table: Mapping[str, Any]) -> tuple[str, int]:
    """The metric with its unit, and decimals for its values."""
    of = of_table(table)
    return of.label, of.decimals


def _scale(table: Mapping[str, Any]) -> float:
    return 100.0 if table["layout"]["percent"] else 1.0


def _values(table: Mapping[str, Any], side: Side) -> Values:
    order = {name: place for place, name in enumerate(table["classes"])}
    found: Values = {}
    for arm, of_arm in table["arms"].items():
        if side == "classes":
            of_axis = _over(of_arm["per_class"], lambda name: name)
            of_axis = dict(sorted(of_axis.items(), key=lambda item: order[item[0]]))
        else:
            # names of classes may hold a slash, those of sites do not
            of_axis = _over(of_arm["per_cell"], lambda cell: cell.partition("/")[0])
        scaled = {axis: [_scale(table) * value for value in values] for axis, values in of_axis.items()}
        if some := {axis: values for axis, values in scaled.items() if values}:
            found[arm] = some
    return found


def _over(cells: Mapping[str, Iterable[float | None]], axis: Callable[[str], str]) -> dict[str, list[float]]:
    """Axis -> the mean over its cells, per seed; seeds without a value are left out. cells: name -> a value per seed."""
    groups: dict[str, list[Iterable[float | None]]] = {}
    for name, values in cells.items():
        groups.setdefault(axis(name), []).append(values)
    means = {
        name: [mean_of_defined(of_seed) for of_seed in zip(*of, strict=True)] for name, of in groups.items()
    }
    return {name: [value for value in of if value is not None] for name, of in means.items()}
