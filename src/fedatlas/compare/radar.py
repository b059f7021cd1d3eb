"""Arms side by side over sites and over classes, as Figures 5 and 6 of UFPS show them."""

from collections.abc import Mapping
from typing import Any

from fedatlas.evaluation.statistics import mean_of_defined
from fedatlas.report import markup
from fedatlas.report.comparison import LOWER, heading
from fedatlas.report.figures import Radar, radar_plots
from fedatlas.report.tables import METRICS, Metric

LEAST_AXES = 3


def radars(found: Mapping[str, Any]) -> str:
    """Two plots for every table whose layout asks for them, as HTML: an axis per site, the mean over its classes, and an
    axis per class, the mean over sites; all of them means over the finished seeds. "" where none asks.

    found: as `results.collect` gives it.
    """
    parts = []
    for number, table in enumerate([found, *found["tables"]]):
        kind = table["layout"]["radar"]
        if kind is None:
            continue
        sides = {"sites": _by_site(table), "classes": _by_class(table)}
        drawn = {name: of for name, of in sides.items() if len(_axes(of)) >= LEAST_AXES}
        few = [f"{len(_axes(of))} {name}" for name, of in sides.items() if name not in drawn]
        described = METRICS.get(table["metric"], Metric(table["metric"], "", 3, True))
        unit = "%" if table["layout"]["percent"] else described.unit
        decimals = 1 if table["layout"]["percent"] else described.decimals
        if drawn:
            panels = [
                Radar(
                    f"over {name}",
                    _axes(of),
                    {arm: [at.get(axis) for axis in _axes(of)] for arm, at in of.items()},
                )
                for name, of in drawn.items()
            ]
            svg = radar_plots(
                panels,
                described.title + (f", {unit}" if unit else ""),
                decimals,
                lower=table["metric"] in LOWER,
                normalised=kind == "normalised",
                name=f"radar-{number}",
            )
            told = [f"{heading(table)}. Outside is better."]
            if kind == "normalised":
                told.append(
                    "Every axis runs from its worst arm, on the inner ring, to its best, with both values at its end."
                )
            parts.append(markup.figure(svg, markup.text(" ".join(told))))
        if few:
            missing = (
                f"“{heading(table)}”: a radar plot has three axes or more, and there are {' and '.join(few)}."
            )
            parts.append(markup.note(markup.text(missing)))
    return f"<h2>Over sites and classes</h2>{''.join(parts)}" if parts else ""


Values = dict[str, dict[str, float]]
"""Arm -> axis -> value."""


def _axes(values: Values) -> list[str]:
    return list(dict.fromkeys(axis for of_arm in values.values() for axis in of_arm))


def _by_class(table: Mapping[str, Any]) -> Values:
    order = {name: place for place, name in enumerate(table["classes"])}
    found = {}
    for arm, of_arm in table["arms"].items():
        means = {name: mean_of_defined(values) for name, values in of_arm["per_class"].items()}
        found[arm] = _scaled(table, dict(sorted(means.items(), key=lambda item: order[item[0]])))
    return _some(found)


def _by_site(table: Mapping[str, Any]) -> Values:
    found = {}
    for arm, of_arm in table["arms"].items():
        of_site: dict[str, list[float | None]] = {}
        for cell, values in of_arm["per_cell"].items():
            # names of classes may hold a slash, those of sites do not
            of_site.setdefault(cell.partition("/")[0], []).append(mean_of_defined(values))
        found[arm] = _scaled(table, {site: mean_of_defined(values) for site, values in of_site.items()})
    return _some(found)


def _scaled(table: Mapping[str, Any], means: Mapping[str, float | None]) -> dict[str, float]:
    scale = 100.0 if table["layout"]["percent"] else 1.0
    return {axis: scale * value for axis, value in means.items() if value is not None}


def _some(values: Values) -> Values:
    return {arm: of_arm for arm, of_arm in values.items() if of_arm}
