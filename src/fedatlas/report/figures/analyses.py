"""The charts of analyses, from what `fedatlas analyse` wrote."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from fedatlas.report.figures.chart import arm_keys, arm_style, chart, line_key, patch_key, short, tip
from fedatlas.report.figures.theme import BAD, INK, SHADES, class_colour, model_title
from fedatlas.report.read import number

Found = Mapping[str, Any]


def _map(axis: Axes, x: Any, y: Any, values: np.ndarray, shades: Sequence[str], bad: str) -> Any:
    """Values in 0..1 as cells in colour; `bad` where there is none."""
    colours = ListedColormap(list(shades)).with_extremes(bad=bad)
    axis.grid(visible=False)
    return axis.pcolormesh(
        x, y, np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=1, shading="nearest", antialiased=False
    )


def _scale(figure: Figure, axes: Sequence[Axes], cells: Any, ticks: Mapping[float, str], told: str) -> None:
    """A bar with the colours of a map, below the panels. ticks: place in 0..1 -> text."""
    bar = figure.colorbar(cells, ax=list(axes), location="bottom", aspect=60, fraction=0.06, shrink=0.5)
    assert bar.solids is not None
    bar.solids.set_rasterized(False)  # else its colours would be those of the light theme
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.set_label(told)
    bar.outline.set_visible(False)  # type: ignore[operator]


def landscapes(surfaces: Sequence[Found]) -> Markup:
    """A map of every surface: deep for a low loss, pale for a high one, by the square root of its place between the lowest
    and the highest of all."""
    grids = [
        np.array([[math.nan if v is None else v for v in row] for row in s["losses"]], float)
        for s in surfaces
    ]
    every = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    span = high - low or 1.0
    cells: list[Any] = []

    def panel(axis: Axes, place: int) -> None:
        of, grid = surfaces[place], grids[place]
        height = np.sqrt(
            np.clip((grid.T - low) / span, 0, 1)
        )  # the first direction goes to the right, the second up
        cells.append(_map(axis, of["steps"], of["steps"], height, SHADES[::-1], BAD))
        lines = np.arange(1, 8) / 8
        drawn = height[np.isfinite(height)]
        if len(of["steps"]) > 1 and ((lines > drawn.min()) & (lines < drawn.max())).any():
            axis.contour(
                of["steps"],
                of["steps"],
                np.ma.masked_invalid(height),
                lines,
                colors=INK,
                linewidths=0.5,
                alpha=0.55,
            )
        axis.plot(0, 0, "x", color=BAD, markersize=7, markeredgewidth=1.6)
        axis.set_aspect("equal")
        axis.set_title(f"{of['site']}, {model_title(of['model'])}")

    def finish(figure: Figure, axes: list[Axes]) -> None:
        ticks = {math.sqrt(k): f"{low + span * k:.3g}" for k in (0, 0.25, 1)}
        _scale(figure, axes, cells[0], ticks, "loss; lines at equal steps of this scale")

    sites = ", ".join(dict.fromkeys(str(s["site"]) for s in surfaces))
    columns = min(4, max(2, len(surfaces)))
    told = f"Loss landscapes at {sites}"
    places = range(len(surfaces))
    return chart("landscape", told, places, panel, columns=columns, height=0.35, square=True, finish=finish)


def densities(spectra: Sequence[Found]) -> Markup:
    """Curves of all spectra over one axis, the density on a logarithmic one."""
    peak = max(v for s in spectra for v in s["density"]["value"])
    least = peak * 1e-6
    names = [f"{s['site']}, {model_title(s['model'])}" for s in spectra]

    def panel(axis: Axes, _: None) -> None:
        for name, s in zip(names, spectra, strict=True):
            values = [max(v, least) for v in s["density"]["value"]]
            axis.semilogy(s["density"]["at"], values, linewidth=1.5, **arm_style(names, name, marker=""))
        axis.set_ylim(least, 1.6 * peak)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        axis.minorticks_off()
        axis.set_xlabel("eigenvalue")

    told, keys = "Density of the eigenvalues of the Hessian by site", arm_keys(names, marker="")
    return chart("hessian", told, [None], panel, columns=1, height=2.6, keys=keys)


def by_layer(pairs: Sequence[Found], what: str, title: str, name: str) -> Markup:
    """Every pair with the first model, layer by layer, as lines. pairs: which hold `what`, layer -> value; name: of the figure,
    for its identifiers."""
    layers = list(pairs[0][what])
    found = {
        model_title(str(pair["second"])): [number(pair[what].get(layer)) for layer in layers]
        for pair in pairs
    }
    least = min((v for values in found.values() for v in values if v is not None), default=0.0)

    def panel(axis: Axes, _: None) -> None:
        for index, (name, values) in enumerate(found.items()):
            points = [math.nan if v is None else v for v in values]
            axis.plot(points, color=class_colour(index), marker="o", markersize=3, linewidth=1.4)
            for place, (layer, value) in enumerate(zip(layers, points, strict=True)):
                tip(axis, place, value, f"{name}, {layer}: {value:.3f}")
        axis.set_ylim(0.0 if least < 0.7 else 1 - 1.2 * max(1 - least, 1e-3), 1.005)
        axis.set_xticks([])
        axis.set_xlabel("layers, from the first to the last")

    keys = [line_key(name, color=class_colour(index)) for index, name in enumerate(found)]
    return chart(name, f"{title} by layer", [None], panel, columns=1, height=2.2, keys=keys)


def layer_matrix(names: Sequence[str], values: Sequence[Sequence[Any]], name: str) -> Markup:
    """CKA between the layers of one model, as a map. name: of the figure, for its identifiers."""
    found = np.array([[math.nan if (v := number(value)) is None else v for value in row] for row in values])
    every = max(1, math.ceil(len(names) / 40))
    cells: list[Any] = []

    def panel(axis: Axes, _: None) -> None:
        at = range(len(names))
        cells.append(_map(axis, at, at, np.clip(found, 0, 1), SHADES, INK))
        for i, row in enumerate(found):
            for j, value in enumerate(row):
                tip(axis, j, i, f"{names[i]}, {names[j]}: {'–' if math.isnan(value) else f'{value:.2f}'}")
        shown = [name if len(name) <= 40 else "…" + name[-39:] for name in names]
        size = min(8.0, 190 / len(names) * every)
        axis.set_yticks(list(at)[::every], shown[::every], fontsize=size)
        axis.set_xticks([])
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_aspect("equal")

    def finish(figure: Figure, axes: list[Axes]) -> None:
        _scale(figure, axes, cells[0], {0: "0", 0.5: "0.5", 1: "1"}, "CKA")

    told = "CKA between the layers of a model"
    return chart(name, told, [None], panel, columns=1, height=4.6, finish=finish)


BINS = 20
_SIDES = {"members": class_colour(1), "others": class_colour(0)}


def uncertainties(attacks: Sequence[Found]) -> Markup:
    """The target's uncertainty of members and of others, a panel per target: shares of the cases by uncertainty."""
    every = [v for a in attacks for side in _SIDES for v in a["uncertainty"][side]]
    edges = np.linspace(0, max(every) or 1.0, BINS + 1)

    def panel(axis: Axes, a: Found) -> None:
        for side, colour in _SIDES.items():
            values = a["uncertainty"][side]
            shares = np.histogram(values, edges)[0] / max(len(values), 1)
            axis.bar(edges[:-1], shares, width=0.94 * np.diff(edges), align="edge", color=colour, alpha=0.42)
            for (low, high), share in zip(pairwise(edges), shares, strict=True):
                if share:
                    tip(axis, (low + high) / 2, share, f"{side}: {share:.0%} from {low:.3g} to {high:.3g}")
        axis.set_title(short(model_title(str(a["target"])), 36))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    keys = [patch_key(side, facecolor=colour, alpha=0.42) for side, colour in _SIDES.items()]
    told, columns = f"Uncertainty of members and others: {len(attacks)} targets", min(3, len(attacks))
    return chart("uncertainty", told, attacks, panel, columns=columns, height=1.7, keys=keys, x="uncertainty")
