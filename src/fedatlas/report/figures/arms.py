"""The charts of a comparison: arms beside each other."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.ticker import MaxNLocator

from fedatlas.report.figures.chart import (
    arm_keys,
    arm_style,
    chart,
    columns_of,
    line,
    line_key,
    mean_and_spread,
    said,
    short,
    whole_numbers,
    wrapped,
)
from fedatlas.report.figures.theme import (
    ACCENT,
    BAD,
    GRID,
    INK,
    MARKERS,
    MUTED,
    PAPER,
    class_colour,
)

# ---------------------------------------------------------------------------------------------- over a number


class Average(NamedTuple):
    """The average of an arm in one table, and its SD over seeds; None where there is none. at: the arm's number on the
    axis; published: the average as printed."""

    at: float
    mean: float | None
    spread: float | None = None
    published: float | None = None


class Swept(NamedTuple):
    """A panel. unit: of its values. lines: name -> averages by their numbers; levels: name -> one of no number.
    All panels of a figure have the same names."""

    title: str
    unit: str
    lines: Mapping[str, Sequence[Average]]
    levels: Mapping[str, Average]


def sweep_curves(panels: Sequence[Swept], ticks: Mapping[float, str], label: str, name: str) -> Markup:
    """Averages over a number in which arms differ: lines with ± SD, levels as dashed red lines with a band of ± SD,
    published averages as hollow markers, those of levels at the right edge. The axis is logarithmic where the numbers
    are positive and the largest is at least four times the smallest.

    ticks: the text at every number of `lines`, which are two or more. label: of this axis. name: of the figure, for its
    identifiers.
    """
    names, levels = list(panels[0].lines), list(panels[0].levels)
    logarithmic = min(ticks) > 0 and max(ticks) >= 4 * min(ticks)

    def place(at: float) -> float:
        return math.log(at) if logarithmic else float(at)

    places = sorted(place(at) for at in ticks)
    low, high = places[0], places[-1]
    reach = high - low
    dashes = [(0, (5 - 1.5 * (index % 3), 1.6 + 0.8 * (index % 3))) for index in range(len(levels))]
    crowded = any(b - a < 0.13 * reach for a, b in pairwise(places))
    hollow = {"linestyle": "none", "markersize": 7, "markerfacecolor": "none"}

    def panel_of(axis: Axes, panel: Swept) -> None:
        for index, (level, dash) in enumerate(zip(panel.levels.values(), dashes, strict=True)):
            if level.mean is not None:
                axis.axhline(level.mean, color=BAD, linestyle=dash, linewidth=1.4)
                if level.spread is not None:
                    ends = (level.mean - level.spread, level.mean + level.spread)
                    axis.axhspan(*ends, facecolor=to_rgba(BAD, 0.1), edgecolor="none")
            if level.published is not None:
                look = {"color": BAD, "marker": MARKERS[index % len(MARKERS)], **hollow}
                edge = {"transform": axis.get_yaxis_transform(), "clip_on": False}
                axis.plot([1.0], [level.published], **look, **edge)
        for index, (line_name, of) in enumerate(panel.lines.items()):
            # beside each other, so that their bars can be told apart
            aside = 0.012 * reach * (index - (len(names) - 1) / 2)
            look = arm_style(names, line_name, markersize=5)
            mean_and_spread(axis, [(aside + place(at.at), at.mean, at.spread) for at in of], look)
            printed = [(aside + place(at.at), at.published) for at in of if at.published is not None]
            axis.plot([x for x, _ in printed], [y for _, y in printed], **{**look, **hollow})
        if all(at.mean is None for of in panel.lines.values() for at in of):
            said(axis, "no run is finished")
        axis.set_xlim(low - 0.08 * reach, high + 0.08 * reach)
        axis.set_xticks([place(at) for at in sorted(ticks)], [ticks[at] for at in sorted(ticks)])
        if crowded:
            axis.tick_params(axis="x", labelrotation=40)
        axis.set_xlabel(label)
        axis.set_ylabel(panel.unit)
        axis.set_title(wrapped(panel.title, 66 if len(panels) > 1 else 120))

    keys = [line_key(short(name, 60), **arm_style(names, name, markersize=5)) for name in names]
    keys += [
        line_key(short(name, 60), color=BAD, linestyle=dash, linewidth=1.4)
        for name, dash in zip(levels, dashes, strict=True)
    ]
    every = [at for p in panels for of in (*p.lines.values(), p.levels.values()) for at in of]
    if any(at.published is not None for at in every):
        keys.append(line_key("hollow: published", color=MUTED, marker="o", **hollow))
    units = ", ".join(dict.fromkeys(panel.unit for panel in panels))
    told = f"{units} by {label}: {', '.join([*names, *levels])}"
    return chart(name, told, panels, panel_of, columns=min(2, len(panels)), height=3.1, keys=keys)


# ---------------------------------------------------------------------------------------------- over rounds


class Curve(NamedTuple):
    """A line of an arm. seeds: per seed (round, value); change: the mean absolute one between neighbouring values."""

    seeds: Sequence[Sequence[tuple[int, float]]]
    change: float

    def mean(self) -> list[tuple[int, float]]:
        """Over the seeds, at the rounds that all of them have."""
        found = [dict(of_seed) for of_seed in self.seeds]
        shared = [number for number in found[0] if all(number in of for of in found)]
        return [(number, float(np.mean([of[number] for of in found]))) for number in shared]


def arm_curves(lines: Mapping[str, Curve], label: str) -> Markup:
    """A panel per arm with its seeds and their mean, and the means of the others in grey. label: of the values."""
    means = {arm: curve.mean() for arm, curve in lines.items()}
    numbers = [number for curve in lines.values() for of_seed in curve.seeds for number, _ in of_seed]
    margin = max(0.5, 0.02 * (max(numbers) - min(numbers)))
    several = any(len(curve.seeds) > 1 for curve in lines.values())

    def panel(axis: Axes, arm: str) -> None:
        colour, curve = class_colour(list(lines).index(arm)), lines[arm]
        for other, points in means.items():
            if other != arm:
                line(axis, points, color=MUTED, linewidth=0.8, alpha=0.35, zorder=1.5)
        for of_seed in curve.seeds if several else ():
            line(axis, of_seed, color=colour, linewidth=0.8, alpha=0.6)
        line(axis, means[arm], of=arm, color=colour, linewidth=1.9)
        axis.set_title(short(arm, 28))
        told = {"fontsize": 8, "fontweight": "normal", "color": MUTED}
        axis.set_title(f"change {curve.change:.4f}", loc="right", **told)
        axis.set_xlim(min(numbers) - margin, max(numbers) + margin)
        whole_numbers(axis)

    told = f"Validation {label} over rounds: {', '.join(lines)}"
    columns = min(3, len(lines))
    return chart(
        "arm-curves", told, lines, panel, columns=columns, height=1.8, x="round", y=label, share=True
    )


def class_panels(panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], label: str) -> Markup:
    """A panel per class with a line per arm: class -> arm -> (round, value). label: of the values."""
    names = list(dict.fromkeys(arm for lines in panels.values() for arm in lines))

    def panel(axis: Axes, name: str) -> None:
        for arm, points in panels[name].items():
            look = arm_style(names, arm)
            line(axis, points, of=arm, color=look["color"], linestyle=look["linestyle"], linewidth=1.4)
        axis.set_title(short(name, 28))
        whole_numbers(axis)

    told = f"Validation {label} of {', '.join(panels)} over rounds: {', '.join(names)}"
    columns, keys = _columns(panels), arm_keys(names, marker="")
    return chart(
        "class-curves", told, panels, panel, columns=columns, height=2.3, keys=keys, x="round", y=label
    )


def _columns(panels: Mapping[str, Any]) -> int:
    return columns_of(len(panels), 2, 3) if len(panels) > 1 else 1


# ---------------------------------------------------------------------------------------------- over sites and classes


class Radar(NamedTuple):
    """A plot. title: the metric, its unit and what it is of; axes: in order; lines: name -> a value or None per axis;
    lower: whether the lower value is the better one. normalised: every axis runs from its worst value, at a fifth of the
    radius, to its best; otherwise all have one scale, whose rings are labelled."""

    title: str
    axes: Sequence[str]
    lines: Mapping[str, Sequence[float | None]]
    decimals: int
    lower: bool
    normalised: bool


class Dots(NamedTuple):
    """A panel. unit: of its values; axes: in order, the average last; lines: name -> per axis the mean and SD (None: of one
    value), or None."""

    title: str
    unit: str
    axes: Sequence[str]
    lines: Mapping[str, Sequence[tuple[float, float | None] | None]]


def _names(panels: Sequence[Radar | Dots]) -> list[str]:
    return list(dict.fromkeys(line for panel in panels for line in panel.lines))


def radar_plots(panels: Sequence[Radar], name: str) -> Markup:
    """Closed lines around a centre; outside is better, also where the lower value is. A line is open where it lacks a
    value. name: of the figure, for its identifiers."""
    names = _names(panels)

    def panel_of(axis: Any, panel: Radar) -> None:
        angles = np.linspace(0, 2 * np.pi, len(panel.axes), endpoint=False)
        values = np.array([[math.nan if v is None else v for v in of] for of in panel.lines.values()])
        titles = [short(text, 18) for text in panel.axes]
        axis.set_theta_zero_location("N")
        axis.set_theta_direction(-1)
        if panel.normalised:
            low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
            ends = (high, low) if panel.lower else (low, high)
            apart = np.where(high > low, ends[1] - ends[0], 1.0)
            radii = np.where(high > low, 0.2 + 0.8 * (values - ends[0]) / apart, 1.0)
            radii[np.isnan(values)] = math.nan
            titles = [
                f"{text}\n{worst:.{panel.decimals}f} – {best:.{panel.decimals}f}"
                for text, worst, best in zip(titles, *ends, strict=True)
            ]
            axis.set_yticks([0.2, 0.6, 1.0], ["", "", ""])
            axis.set_ylim(0, 1.08)
        else:
            low, high = float(np.nanmin(values)), float(np.nanmax(values))
            room = 0.0 if high - low > 1e-6 * abs(high) else 0.05 * max(abs(high), 1e-6)
            ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low - room, high + room)
            sign = -1.0 if panel.lower else 1.0
            radii, rings = sign * values, sorted((sign * np.asarray(ticks)).tolist())
            step = rings[1] - rings[0]
            axis.set_ylim(rings[0] - 0.5 * step, rings[-1] + 0.1 * step)
            axis.set_yticks(rings, [f"{sign * ring:g}" for ring in rings], fontsize=7)
            # between two axes, so that the labels stand on no line of an axis
            axis.set_rlabel_position(math.degrees(math.pi / len(panel.axes)))
            for text in axis.get_yticklabels():
                text.set_bbox({"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.8})
                text.set_zorder(5)
        for name, of in zip(panel.lines, radii, strict=True):
            axis.plot([*angles, angles[0]], [*of, of[0]], linewidth=1.4, **arm_style(names, name))
        axis.set_xticks(angles, titles)
        for angle, text in zip(angles, axis.get_xticklabels(), strict=True):
            side = math.sin(angle)
            text.set_horizontalalignment("center" if abs(side) < 0.1 else "left" if side > 0 else "right")
        axis.spines["polar"].set_color(GRID)
        axis.spines["polar"].set_visible(True)
        axis.set_title(wrapped(panel.title, 54), pad=14)

    told = f"Radar plots of {', '.join(panel.title for panel in panels)}: {', '.join(names)}"
    height = 4.6 + 0.1 * math.ceil(len(names) / 5)
    return chart(name, told, panels, panel_of, columns=2, height=height, keys=arm_keys(names), polar=True)


def dot_panels(panels: Sequence[Dots], name: str) -> Markup:
    """Means as dots with bars of ± SD, the arms beside each other at every axis. name: of the figure, for its
    identifiers."""
    names = _names(panels)

    def panel_of(axis: Axes, panel: Dots) -> None:
        for index, (name, of) in enumerate(panel.lines.items()):
            aside = 0.7 * ((index + 0.5) / len(panel.lines) - 0.5)
            known = [(place + aside, *found) for place, found in enumerate(of) if found is not None]
            mean_and_spread(axis, known, arm_style(names, name, linestyle="none"))
        axis.set_xticks(range(len(panel.axes)), [short(text, 18) for text in panel.axes])
        axis.set_xlim(-0.6, len(panel.axes) - 0.4)
        axis.grid(visible=False, axis="x")
        for place in range(1, len(panel.axes)):
            last = place == len(panel.axes) - 1
            axis.axvline(place - 0.5, color=MUTED if last else GRID, linewidth=1.0 if last else 0.7)
        axis.set_ylabel(panel.unit)
        axis.set_title(wrapped(panel.title, 120))

    told = ", ".join(dict.fromkeys(panel.unit for panel in panels))
    told = f"{told} of {', '.join(names)}, side by side"
    return chart(name, told, panels, panel_of, columns=1, height=2.9, keys=arm_keys(names, linestyle="none"))


# ---------------------------------------------------------------------------------------------- ranks


def rank_diagram(ranks: Mapping[str, Any], name: str) -> Markup:
    """The critical-difference diagram: arms at their mean ranks, bars join arms that do not differ. ranks: as
    `statistics.Ranks`, of two arms or more; name: of the figure, for its identifiers."""
    means, critical, groups = ranks["mean"], ranks["critical"], ranks["groups"]
    names, half = list(means), (len(means) + 1) // 2
    low, high = 1, len(names)
    span, top = high - low, 0.9 + 0.45 * len(groups)
    deep = top + half

    def panel(axis: Axes, _: None) -> None:
        thin = {"color": INK, "linewidth": 1.0}
        axis.plot([low, high], [0, 0], **thin)
        for tick in range(low, high + 1):
            axis.plot([tick, tick], [0, 0.25], **thin)
            axis.text(tick, 0.4, str(tick), ha="center", va="bottom")
        if critical is not None:
            ends = [low, low + critical]
            axis.plot(ends, [1.7, 1.7], **thin, marker="|", markersize=7)
            axis.text(low, 2.0, f"critical difference {critical:.2f}", ha="left", va="bottom")
        for index, group in enumerate(groups):
            ends = [means[group[0]] - 0.01 * span, means[group[-1]] + 0.01 * span]
            axis.plot(ends, [-0.5 - 0.45 * index] * 2, color=ACCENT, linewidth=3.4)
        for index, (arm, here) in enumerate(means.items()):
            best = index < half
            y = -top - (index if best else len(names) - 1 - index) - 0.3
            to = low - 0.04 * span if best else high + 0.04 * span
            axis.plot([here, here, to], [0, y, y], **thin)
            at = to - 0.01 * span if best else to + 0.01 * span
            axis.text(at, y, f"{short(arm, 30)} {here:.2f}", ha="right" if best else "left", va="center")
        axis.set_axis_off()
        axis.set_xlim(low - 0.7 * span, max(high + 0.7 * span, low + (critical or 0)))
        axis.set_ylim(-deep, 2.8 if critical is not None else 1.2)

    told = "Critical-difference diagram of mean ranks"
    return chart(name, told, [None], panel, columns=1, height=0.2 * (deep + 2.0))
