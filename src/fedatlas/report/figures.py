"""Figures as inline SVG: text stays text, colours are CSS variables, so that one figure serves light and dark.

Class colours are fixed by the position of the class in the label space, site colours and markers by the
position of the site; both are safe for the common colour-vision deficiencies up to eight entries, and every
panel is also labelled in words. Curves of sites carry markers, curves of classes do not.
"""

import base64
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from contourpy import contour_generator
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from PIL import Image

from fedatlas.evaluation.classification import Histogram
from fedatlas.evaluation.statistics import RowDict, client_wise_index, grouped, mean_of_defined, select, table
from fedatlas.report import tables
from fedatlas.report.tables import Example, Plane, Run

# name of the CSS variable -> (on light, on dark). In a figure the light value stands for the variable.
THEME = {
    "paper": ("#ffffff", "#14181f"),
    "ink": ("#1b2128", "#e8ecf1"),
    "muted": ("#57616c", "#a3aebb"),
    "grid": ("#dfe4ea", "#2d3540"),
    "accent": ("#1f5fae", "#7fb4f5"),
    "bad": ("#b3261e", "#ff8a80"),
}
CLASS_COLOURS = (
    ("#0072b2", "#4fa9e6"),
    ("#d55e00", "#ff8f45"),
    ("#00916a", "#2ed3a3"),
    ("#b8558f", "#e79bc6"),
    ("#b07d00", "#edbd3b"),
    ("#3f9bd6", "#93d4ff"),
    ("#7d1f50", "#e2719f"),
    ("#4a3aa0", "#aca0ff"),
    ("#76761c", "#cbc95c"),
    ("#2b8f8a", "#7fe0d3"),
    ("#8a4a1c", "#d9a27b"),
    ("#5a6978", "#b2bfcc"),
)
SITE_COLOURS = (
    ("#3b6fa6", "#7ba9dc"),
    ("#c8475c", "#f58c98"),
    ("#2a8436", "#62c772"),
    ("#a58400", "#dcb945"),
    ("#2596aa", "#68cdea"),
    ("#a43474", "#da7ab2"),
    ("#6a6a6a", "#bababa"),
    ("#7a593a", "#c6a480"),
)
PHASE_COLOURS = (
    ("#2f6db5", "#6ea8ee"),
    ("#93b8e3", "#34557d"),
    ("#8c97a4", "#7d8996"),
    ("#c5ccd4", "#4b5562"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 11.0  # inches; the page shows a figure at its full width

_VARIABLES = {
    **{light: name for name, (light, _) in THEME.items()},
    **{light: f"c{i}" for i, (light, _) in enumerate(CLASS_COLOURS)},
    **{light: f"s{i}" for i, (light, _) in enumerate(SITE_COLOURS)},
    **{light: f"p{i}" for i, (light, _) in enumerate(PHASE_COLOURS)},
}
_INK, _MUTED, _GRID, _BAD, _PAPER = (THEME[name][0] for name in ("ink", "muted", "grid", "bad", "paper"))
_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedatlas",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": _INK,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "axes.facecolor": "none",
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def stylesheet() -> Markup:
    """The CSS variables of both themes."""

    def block(theme: int) -> str:
        pairs = [(name, colours[theme]) for name, colours in THEME.items()]
        for letter, palette in (("c", CLASS_COLOURS), ("s", SITE_COLOURS), ("p", PHASE_COLOURS)):
            pairs += [(f"{letter}{i}", colours[theme]) for i, colours in enumerate(palette)]
        return "".join(f"--{name}:{value};" for name, value in pairs)

    return Markup(
        f":root{{{block(0)}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{block(1)}}}}}\n"
    )


def class_variable(run: Run, class_: str) -> str:
    """The CSS variable of a class's colour; colours come round again after twelve classes. Of an unknown class the first."""
    if class_ not in run.classes:
        return "c0"
    return f"c{run.classes.index(class_) % len(CLASS_COLOURS)}"


def heat_stylesheet(steps: int = 20) -> Markup:
    """Classes h0 … h20: the cells of heat maps for 0 to 1, with the ink that reads best on each."""
    ends = (((0xF3, 0xF7, 0xFC), (0x0B, 0x4F, 0x9E)), ((0x1B, 0x23, 0x2E), (0x8A, 0xC4, 0xFF)))
    blocks = []
    for low, high in ends:
        rules = []
        for step in range(steps + 1):
            mixed = [round(a + (b - a) * step / steps) for a, b in zip(low, high, strict=True)]
            ink = max(("#000000", "#ffffff"), key=lambda text, on=mixed: contrast(_rgb(text), on))
            rules.append(f".h{step}{{background:#{''.join(f'{v:02x}' for v in mixed)};color:{ink}}}")
        blocks.append("".join(rules))
    return Markup(f"{blocks[0]}\n@media screen and (prefers-color-scheme:dark){{{blocks[1]}}}\n")


def contrast(first: Sequence[float], second: Sequence[float]) -> float:
    """The contrast ratio of two sRGB colours (0 to 255) after WCAG 2."""

    def luminance(colour: Sequence[float]) -> float:
        linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


# ---------------------------------------------------------------------------------------------- curves


def loss_curves(run: Run) -> Markup:
    """The loss and every further term, per site over rounds."""
    terms = tables.loss_terms(run)

    def draw() -> Figure:
        figure, axes = _panels(len(terms), columns=min(3, max(2, len(terms))), height=2.5)
        for axis, term in zip(axes, terms, strict=True):
            for site in run.sites:
                values = [(r.number, tables.number(r.sites.get(site, {}).get(term))) for r in run.rounds]
                _line(axis, values, of=f"{site}, {term}", **_site_style(run, site))
            axis.set_title(_term_title(term, terms))
            _round_axis(axis, run)
        _mark_lost(axes[0], run)
        _legend(figure, _site_handles(run) + _mark_handles(run))
        return figure

    return _svg(draw, "loss", f"Training loss and its terms ({', '.join(terms)}) per site over rounds")


def _term_title(term: str, terms: Sequence[str]) -> str:
    """A term of the loss as a panel calls it."""
    if term == "loss":
        return "training loss" if tables.main_loss(terms) == "loss" else "loss, all terms together"
    return f"training loss: {term}" if term == tables.main_loss(terms) else term


def site_curves(run: Run) -> Markup:
    """Validation scores per site over rounds: classes annotated there, and classes never annotated there."""
    means, title = _round_means(run), tables.METRICS[run.measure].title
    sides = [known for known in (True, False) if any(key[1] is known for key in means)]

    def draw() -> Figure:
        figure, axes = _panels(len(sides), columns=2, height=2.9)
        for axis, known in zip(axes, sides, strict=True):
            for site in run.sites:
                values = [
                    (
                        r.number,
                        mean_of_defined(
                            m for (n, k, at, _), m in means.items() if (n, k, at) == (r.number, known, site)
                        ),
                    )
                    for r in run.rounds
                ]
                there = [v for v in values if v[1] is not None]
                _line(axis, there, of=f"{site}, {title}", **_site_style(run, site))
            axis.set_title(
                "classes annotated at the site" if known else "classes never annotated at the site"
            )
            axis.set_ylim(-0.03, 1.03)
            _round_axis(axis, run)
            _mark_lost(axis, run)
        axes[0].set_ylabel(f"{title}, mean over classes")
        _legend(figure, _site_handles(run) + _mark_handles(run))
        return figure

    return _svg(draw, f"{run.measure}-site", f"Validation {title} of the global model per site over rounds")


def class_curves(run: Run) -> Markup:
    """Validation scores over rounds, one panel per class: at sites that annotate it, and at those that do not."""
    means, title = _round_means(run), tables.METRICS[run.measure].title
    columns = _columns(len(run.classes), 3, 5)

    def draw() -> Figure:
        figure, axes = _panels(len(run.classes), columns=columns, height=1.75, share=True)
        for axis, name in zip(axes, run.classes, strict=True):
            colour = _class_colour(run, name)
            for known, dash in ((True, "-"), (False, (0, (3, 1.6)))):
                for site in run.sites:
                    values = [(r.number, means.get((r.number, known, site, name))) for r in run.rounds]
                    values = [v for v in values if v[1] is not None]
                    _line(axis, values, color=colour, linestyle=dash, linewidth=0.7, alpha=0.45)
                values = [
                    (
                        r.number,
                        mean_of_defined(
                            m for (n, k, _, c), m in means.items() if (n, k, c) == (r.number, known, name)
                        ),
                    )
                    for r in run.rounds
                ]
                values = [v for v in values if v[1] is not None]
                who = "mean over sites that annotate it" if known else "mean over the other sites"
                _line(axis, values, of=who, color=colour, linestyle=dash, linewidth=2)
            if not axis.lines:
                _said(axis, "never scored")
            axis.set_title(_short(run.title(name), 24))
            axis.set_ylim(-0.04, 1.04)
            _round_axis(axis, run, label=False)
        for axis in axes[columns * ((len(axes) - 1) // columns) :]:
            axis.set_xlabel("round")
        handles = [
            Line2D([], [], color=_INK, linewidth=2, label="mean over sites that annotate the class"),
            Line2D(
                [], [], color=_INK, linewidth=2, linestyle=(0, (3, 1.6)), label="mean over sites that do not"
            ),
            Line2D([], [], color=_INK, linewidth=0.7, alpha=0.6, label="one site"),
        ]
        _legend(figure, handles + _mark_handles(run, lost=False))
        return figure

    return _svg(draw, f"{run.measure}-class", f"Validation {title} of the global model per class over rounds")


def _round_means(run: Run) -> dict[tuple[int, bool, str, str], float | None]:
    return {
        (entry.number, *key): mean.mean
        for entry in run.rounds
        for key, mean in table(select(entry.rows, metric=run.measure), "known", "site", "class").items()
    }


# ---------------------------------------------------------------------------------------------- box plots


def box_plots(run: Run, rows: Sequence[RowDict], split: str) -> Markup:
    """Dice per class over all scored cases in which it is there: a box for the global model, one per local model."""
    scored = (r for r in select(rows, metric="dice") if r["value"] is not None and tables.has_truth(r))
    dice = grouped(scored, "class", "model")
    names = tables.compared(rows)
    columns = _columns(len(run.classes), *((2, 3) if len(run.classes) <= 6 else (3, 4)))

    def draw() -> Figure:
        figure, axes = _panels(len(run.classes), columns=columns, height=0.55 + 0.21 * len(names), share=True)
        for axis, class_ in zip(axes, run.classes, strict=True):
            colour = _class_colour(run, class_)
            for place, model in enumerate(names):
                seen = dice.get((class_, model), [])
                if seen:
                    _box(axis, seen, place, colour, filled=run.annotates(model, class_))
            axis.set_yticks(range(len(names)), [_short(model_title(m), 22) for m in names])
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.set_xlim(-0.03, 1.03)
            axis.grid(axis="y", visible=False)
            axis.set_title(_short(run.title(class_), 28))
            if not any((class_, model) in dice for model in names):
                _said(axis, "never scored")
        for axis in axes[columns * ((len(axes) - 1) // columns) :]:
            axis.set_xlabel("Dice")
        handles = [
            Patch(
                facecolor=_MUTED, edgecolor=_MUTED, alpha=0.55, label="trained with annotations of the class"
            ),
            Patch(facecolor="none", edgecolor=_MUTED, label="trained without"),
        ]
        _legend(figure, handles)
        return figure

    return _svg(
        draw, f"boxes-{split}", f"Box plots of Dice on {split}, per class, global model and local models"
    )


def _box(axis: Axes, rows: Sequence[RowDict], place: int, colour: str, *, filled: bool) -> None:
    values = [row["value"] for row in rows]
    axis.boxplot(
        [values],
        positions=[place],
        orientation="horizontal",
        widths=0.62,
        patch_artist=True,
        manage_ticks=False,
        showfliers=len(values) > 30,
        boxprops={"facecolor": to_rgba(colour, 0.4) if filled else "none", "edgecolor": colour},
        medianprops={"color": _INK, "linewidth": 1.6},
        whiskerprops={"color": colour},
        capprops={"color": colour},
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": colour},
    )
    if len(values) <= 30:
        jitter = 0.22 * np.sin(2.4 * np.arange(len(values)))
        axis.plot(values, place + jitter, ".", color=colour, markersize=3, markeredgewidth=0)
        for row, up in zip(rows, jitter, strict=True):
            _tip(axis, row["value"], place + up, f"{row['case']} at {row['site']}: {row['value']:.3f}")
    else:
        told = f"{len(values)} cases, median {np.median(values):.3f}"
        _tip(axis, float(np.median(values)), place, told)


def site_boxes(run: Run, rows: Sequence[RowDict], split: str) -> Markup:
    """As `box_plots`, apart by site; a star where the site does not annotate the class."""
    chosen = (r for r in select(rows, metric="dice") if r["value"] is not None and tables.has_truth(r))
    found = grouped(chosen, "class", "site", "model")
    panels = []
    for class_ in run.classes:
        boxes = [
            Box(
                site if class_ in run.sites[site].annotated else f"{site} *",
                model,
                [row["value"] for row in found[class_, site, model]],
                run.annotates(model, class_),
            )
            for site in run.sites
            for model in tables.compared(rows)
            if (class_, site, model) in found
        ]
        if boxes:
            panels.append(Panel(run.title(class_), boxes))
    return distributions(panels, list(run.sites), "dice", f"site-boxes-{split}")


class Box(NamedTuple):
    """Values of one model in one panel. group: what it stands with, as an arm; trained: did its training see
    annotations of the class?"""

    group: str
    model: str
    values: Sequence[float]
    trained: bool


class Panel(NamedTuple):
    """Boxes of one class."""

    title: str
    boxes: Sequence[Box]


def distributions(panels: Sequence[Panel], sites: Sequence[str], metric: str, name: str) -> Markup:
    """In every panel groups side by side, as arms or sites, each with a box for the global model and one per local model.

    sites: all of the federation, in their order, which gives local models their colours. metric: a key of METRICS.
    """
    order = {f"local/{site}": place for place, site in enumerate(sites)}
    models = sorted({box.model for panel in panels for box in panel.boxes}, key=lambda m: order.get(m, -1))
    most, step = max(len({box.group for box in panel.boxes}) for panel in panels), 0.84 / len(models)
    columns = max(1, min(3, 48 // (most * len(models)), len(panels)))
    pointed = sum(len(box.values) for panel in panels for box in panel.boxes) <= 4000
    described = tables.METRICS.get(metric, tables.Metric(metric, "", 3, True))

    def colour(model: str) -> str:
        return SITE_COLOURS[order[model] % len(SITE_COLOURS)][0] if model in order else _INK

    def panel_of(axis: Axes, panel: Panel) -> None:
        groups = list(dict.fromkeys(box.group for box in panel.boxes))

        def place(box: Box) -> float:
            return groups.index(box.group) + (models.index(box.model) - (len(models) - 1) / 2) * step

        styles: dict[tuple[str, bool], list[Box]] = {}
        for box in panel.boxes:
            styles.setdefault((box.model, box.trained), []).append(box)
        for (model, trained), boxes in styles.items():
            line = {"color": colour(model)}
            axis.boxplot(
                [list(box.values) for box in boxes],
                positions=[place(box) for box in boxes],
                widths=0.8 * step,
                patch_artist=True,
                manage_ticks=False,
                showfliers=not pointed,
                boxprops={
                    "facecolor": to_rgba(colour(model), 0.4) if trained else "none",
                    "edgecolor": colour(model),
                },
                medianprops={"color": colour(model), "linewidth": 1.8},
                whiskerprops=line,
                capprops=line,
                flierprops={"marker": ".", "markersize": 2, "markeredgecolor": colour(model)},
            )
            for box in boxes if pointed else ():
                jitter = 0.22 * step * np.sin(2.4 * np.arange(len(box.values)))
                for value, aside in zip(box.values, jitter, strict=True):
                    told = f"{box.group}, {model_title(model)}: {value:.{described.decimals}f}"
                    _tip(axis, place(box) + aside, value, told)
                axis.plot(
                    place(box) + jitter,
                    box.values,
                    ".",
                    color=colour(model),
                    markersize=2.4,
                    markeredgewidth=0,
                )
        axis.set_title(_short(panel.title, 44))
        axis.set_xlim(-0.55, len(groups) - 0.45)
        axis.grid(axis="x", visible=False)
        for border in range(len(groups) - 1):
            axis.axvline(border + 0.5, color=_GRID, linewidth=0.7)
        if described.higher_is_better:
            axis.set_ylim(-0.03, 1.03)
        axis.set_xticks(range(len(groups)), [_short(group, 16) for group in groups])

    def draw() -> Figure:
        figure, axes = _panels(len(panels), columns=columns, height=1.9)
        for index, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
            panel_of(axis, panel)
            if index % columns == 0:
                axis.set_ylabel(described.title + (f", {described.unit}" if described.unit else ""))
        handles = [
            Patch(
                facecolor=to_rgba(colour(model), 0.4),
                edgecolor=colour(model),
                label=f"local, {_short(model.removeprefix('local/'), 24)}" if model in order else "global",
            )
            for model in models
        ]
        handles.append(Patch(facecolor="none", edgecolor=_MUTED, label="empty: trained without the class"))
        _legend(figure, handles)
        return figure

    groups = dict.fromkeys(box.group for panel in panels for box in panel.boxes)
    return _svg(draw, name, f"Box plots of {described.title} by class and model: {', '.join(groups)}")


def dot_plots(run: Run, rows: Sequence[RowDict], split: str) -> Markup:
    """AUROC per class: a row per model, in it a dot per site, its interval unless there are too many to tell apart,
    and the mean of the sites."""
    found = tables.class_values(rows, run.measure)
    names, sites = tables.compared(rows), list(run.sites)
    title = tables.METRICS[run.measure].title
    columns = _columns(len(run.classes), *((2, 3) if len(run.classes) <= 6 else (3, 4)))
    roomy = dots_have_intervals(run, rows)
    step = min((0.8 if roomy else 0.5) / max(len(sites), 1), 0.25)
    height = 0.65 + len(names) * (max(0.22, 0.085 * len(sites)) if roomy else 0.22)

    def draw() -> Figure:
        figure, axes = _panels(len(run.classes), columns=columns, height=height, share=True)
        for axis, class_ in zip(axes, run.classes, strict=True):
            for place, model in enumerate(names):
                seen = [found.get((class_, site, model)) for site in sites]
                for index, (site, at) in enumerate(zip(sites, seen, strict=True)):
                    if at is None or at.value is None:
                        continue
                    y = place + (index - (len(sites) - 1) / 2) * step
                    style = _site_style(run, site)
                    if roomy and at.low is not None and at.high is not None:
                        axis.plot([at.low, at.high], [y, y], color=str(style["color"]), linewidth=1.1)
                    inside = style["color"] if run.annotates(model, class_) else _PAPER
                    look: Any = {
                        "color": style["color"],
                        "marker": style["marker"],
                        "markerfacecolor": inside,
                    }
                    axis.plot(at.value, y, markersize=4 if roomy else 3, **look)
                    known = at.low is not None and at.high is not None
                    interval = f" [{at.low:.3f}, {at.high:.3f}]" if known else ""
                    _tip(axis, at.value, y, f"{model_title(model)} at {site}: {at.value:.3f}{interval}")
                mean = mean_of_defined(at.value for at in seen if at)
                if mean is not None:
                    axis.plot([mean, mean], [place - 0.42, place + 0.42], color=_INK, linewidth=1.8)
            axis.axvline(0.5, color=_MUTED, linewidth=1, linestyle=(0, (1, 1.5)), zorder=0.5)
            axis.set_yticks(range(len(names)), [_short(model_title(m), 22) for m in names])
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.set_xlim(-0.03, 1.03)
            axis.grid(axis="y", visible=False)
            axis.set_title(_short(run.title(class_), 28))
            if not any((class_, s, m) in found for s in sites for m in names):
                _said(axis, "never scored")
            elif not axis.lines[1:]:
                _said(axis, "not defined at any site")
        for axis in axes[columns * ((len(axes) - 1) // columns) :]:
            axis.set_xlabel(title)
        filled = Line2D(
            [], [], color=_MUTED, marker="o", linestyle="none", label="trained with labels of the class"
        )
        hollow = Line2D([], [], color=_MUTED, marker="o", linestyle="none", markerfacecolor=_PAPER)
        hollow.set_label("trained without")
        mean = Line2D([], [], color=_INK, marker="|", markersize=9, linestyle="none", markeredgewidth=1.8)
        mean.set_label("mean of the sites")
        chance = Line2D([], [], color=_MUTED, linewidth=1, linestyle=(0, (1, 1.5)), label="chance")
        marks = [Line2D([], [], **_marker_only(run, site)) for site in sites]  # type: ignore[arg-type]
        _legend(figure, [*marks, filled, hollow, mean, chance])
        return figure

    return _svg(
        draw,
        f"dots-{split}",
        f"{title} on {split} per class, model and site; global and local models",
    )


def dots_have_intervals(run: Run, rows: Sequence[RowDict]) -> bool:
    """Does `dot_plots` draw the intervals of these rows?"""
    return len(tables.compared(rows)) * len(run.sites) <= 36


def _marker_only(run: Run, site: str) -> dict[str, object]:
    style = _site_style(run, site)
    return {
        "color": style["color"],
        "marker": style["marker"],
        "linestyle": "none",
        "label": _short(site, 30),
    }


def roc_curves(run: Run, split: str, model: str) -> Markup:
    """ROC curves of one model per class: all sites' images together, and every site alone."""
    together = tables.pooled(run, split, model)
    alone = _site_histograms(run, split, model)
    limits = run.thresholds.classes if run.thresholds else {}

    def panel(axis: Axes, class_: str) -> None:
        axis.plot([0, 1], [0, 1], color=_MUTED, linewidth=1, linestyle=(0, (1, 1.5)), zorder=0.5)
        drawn = False
        for site, histogram in alone.get(class_, {}).items():
            if curve := histogram.roc():
                axis.plot(
                    curve.false_positive_rate,
                    curve.true_positive_rate,
                    color=str(_site_style(run, site)["color"]),
                    linewidth=0.9,
                    linestyle=_site_style(run, site)["linestyle"],  # type: ignore[arg-type]
                )
        whole = together.get(class_)
        if whole and (curve := whole.roc()):
            drawn = True
            axis.plot(
                curve.false_positive_rate,
                curve.true_positive_rate,
                color=_class_colour(run, class_),
                linewidth=2.4,
            )
            limit = limits.get(class_)
            cut = None if limit is None or limit.value is None else tables.confusion(whole, limit.value)
            if cut is not None:
                x = cut.false_positive / (cut.false_positive + cut.true_negative)
                y = cut.true_positive / (cut.true_positive + cut.false_negative)
                axis.plot(x, y, "o", color=_INK, markerfacecolor=_PAPER, markersize=6, markeredgewidth=1.6)
        if not drawn:
            _said(axis, "never scored" if whole is None else "not defined")

    handles = [
        Line2D([], [], color=_INK, linewidth=2.4, label="all sites together"),
        *(
            [
                Line2D(
                    [],
                    [],
                    color=_INK,
                    marker="o",
                    markerfacecolor=_PAPER,
                    markersize=6,
                    linestyle="none",
                    label="threshold",
                )
            ]
            if limits
            else []
        ),
        Line2D([], [], color=_MUTED, linewidth=1, linestyle=(0, (1, 1.5)), label="chance"),
        *_plain_handles(run, alone),
    ]
    return _square_panels(
        run,
        panel,
        handles,
        "1 − specificity",
        "sensitivity",
        f"roc-{split}",
        f"ROC curves on {split}, per class",
    )


def reliability_plots(run: Run, split: str, model: str) -> Markup:
    """Mean score against the share of positives per class and bin, with the share of images in each bin."""
    together = tables.pooled(run, split, model)

    def panel(axis: Axes, class_: str) -> None:
        colour, whole = _class_colour(run, class_), together.get(class_)
        axis.plot([0, 1], [0, 1], color=_MUTED, linewidth=1, linestyle=(0, (1, 1.5)), zorder=0.5)
        bins = whole.reliability(run.bins) if whole and not whole.reason else []
        total = sum(b.n for b in bins)
        for b in bins:
            axis.bar(
                (b.lower + b.upper) / 2,
                b.n / total,
                width=0.92 * (b.upper - b.lower),
                color=colour,
                alpha=0.25,
                linewidth=0,
            )
        points = [(b.mean_score, b.positive_share) for b in bins if b.n]
        if points:
            axis.plot(*zip(*points, strict=True), color=colour, marker="o", linewidth=1.8)  # type: ignore[arg-type]
        else:
            _said(axis, "never scored" if whole is None else "not defined")

    handles = [
        Line2D(
            [],
            [],
            color=_INK,
            linewidth=1.8,
            marker="o",
            label="share of positives at the mean score of a bin",
        ),
        Patch(facecolor=_INK, alpha=0.25, label="share of images in the bin"),
        Line2D([], [], color=_MUTED, linewidth=1, linestyle=(0, (1, 1.5)), label="perfect"),
    ]
    return _square_panels(
        run, panel, handles, "score", "share", f"reliability-{split}", f"Reliability on {split}, per class"
    )


def _square_panels(
    run: Run,
    panel: Callable[[Axes, str], None],
    handles: Sequence[Line2D | Patch],
    x: str,
    y: str,
    name: str,
    description: str,
) -> Markup:
    """One panel per class over the unit square."""
    columns = max(3, _columns(len(run.classes), 3, 5))

    def draw() -> Figure:
        figure, axes = _panels(len(run.classes), columns=columns, height=0.3, share=True, square=True)
        for index, (axis, class_) in enumerate(zip(axes, run.classes, strict=True)):
            panel(axis, class_)
            axis.set_aspect("equal")
            axis.set_xlim(-0.02, 1.02)
            axis.set_ylim(-0.02, 1.02)
            axis.set_title(_short(run.title(class_), 28))
            if index % columns == 0:
                axis.set_ylabel(y)
            if index + columns >= len(axes):
                axis.set_xlabel(x)
        _legend(figure, handles)
        return figure

    return _svg(draw, name, description)


def _site_histograms(run: Run, split: str, model: str) -> dict[str, dict[str, Histogram]]:
    """class -> site -> its histogram."""
    found: dict[str, dict[str, Histogram]] = {}
    for entry in run.histograms:
        if (entry.split, entry.model) == (split, model):
            found.setdefault(entry.class_, {})[entry.site] = entry.histogram
    return found


def _plain_handles(run: Run, alone: Mapping[str, Mapping[str, Histogram]]) -> list[Line2D]:
    there = {site for sites in alone.values() for site in sites}
    styles = {
        site: _site_style(run, site) | {"marker": "", "linewidth": 0.9} for site in run.sites if site in there
    }
    return [
        Line2D([], [], label=_short(site, 30), **{**style, "markevery": None})  # type: ignore[arg-type]
        for site, style in styles.items()
    ]


def _class_colour(run: Run, class_: str) -> str:
    return CLASS_COLOURS[run.classes.index(class_) % len(CLASS_COLOURS)][0]


def model_title(model: str) -> str:
    """A model as a reader calls it: "best" is the global model."""
    return {"best": "global (best)", "last": "global (last)"}.get(model, model)


# ---------------------------------------------------------------------------------------------- cost


def cost_figure(run: Run) -> Markup:
    """Seconds of every round by phase, and seconds of every site."""
    phases = list(dict.fromkeys(name for entry in run.rounds for name in entry.phases))
    numbers = [entry.number for entry in run.rounds]

    def draw() -> Figure:
        figure, axes = _panels(2, columns=2, height=2.4)
        below = np.zeros(len(numbers))
        for index, phase in enumerate(phases):
            seconds = np.array([tables.number(entry.phases.get(phase)) or 0.0 for entry in run.rounds])
            colour = PHASE_COLOURS[index % len(PHASE_COLOURS)][0]
            axes[0].bar(numbers, seconds, bottom=below, width=0.85, color=colour, label=phase, linewidth=0)
            for x, top, value in zip(numbers, below, seconds, strict=True):
                _tip(axes[0], x, top + value / 2, f"{phase}, round {x}: {value:.1f} s")
            below = below + seconds
        axes[0].set_title("seconds per round, by phase")
        axes[0].legend(loc="upper right", ncols=2) if phases else None
        axes[0].set_ylim(0, 1.25 * max(below.max(initial=0.0), 1e-9))
        for site in run.sites:
            values = [(r.number, tables.number(r.cost.get(site, {}).get("seconds"))) for r in run.rounds]
            _line(axes[1], values, of=f"{site}, seconds", decimals=1, **_site_style(run, site))
        axes[1].set_title("seconds per round, by site")
        axes[1].set_ylim(0, 1.08 * axes[1].get_ylim()[1])
        for axis in axes:
            _round_axis(axis, run, best=False)
        _legend(figure, _site_handles(run))
        return figure

    return _svg(draw, "cost", "Seconds per round by phase, and seconds per round of every site")


def presence_figure(run: Run) -> Markup:
    """Which sites answered each round: a bar where a site did, a cross where it was lost."""
    found = tables.presence(run)

    def draw() -> Figure:
        figure, (axis,) = _panels(1, columns=1, height=0.45 + 0.24 * len(found))
        crosses, rings = [], []
        for place, (site, rounds) in enumerate(found.items()):
            there = [number for number, what in sorted(rounds.items()) if what != "lost"]
            spans = [(number - 0.42, 0.84) for number in there]
            merged = _joined(spans) if len(run.rounds) > 60 else spans
            style = _site_style(run, site)
            axis.broken_barh(merged, (place - 0.2, 0.4), facecolors=str(style["color"]), linewidth=0)
            crosses += [(number, place) for number, what in rounds.items() if what == "lost"]
            rings += [(number, place) for number, what in rounds.items() if what == "lost in evaluation"]
        _line(axis, crosses, color=_BAD, marker="x", linestyle="none", markeredgewidth=1.8)
        for number, place in rings:
            axis.plot(number, place, "o", color=_PAPER, markeredgecolor=_BAD, markeredgewidth=1.6)
        axis.set_yticks(range(len(found)), [_short(site, 22) for site in found])
        axis.set_ylim(len(found) - 0.4, -0.6)
        axis.grid(visible=False)
        _round_axis(axis, run, best=False)
        handles: list[Line2D | Patch] = [Patch(facecolor=_MUTED, label="answered")]
        if crosses:
            cross = {"color": _BAD, "marker": "x", "linestyle": "none", "markeredgewidth": 1.8}
            handles.append(Line2D([], [], label="lost", **cross))  # type: ignore[arg-type]
        if rings:
            ring = {"marker": "o", "linestyle": "none", "color": _PAPER, "markeredgecolor": _BAD}
            handles.append(Line2D([], [], label="trained, lost in the evaluation", **ring))  # type: ignore[arg-type]
        _legend(figure, handles)
        return figure

    return _svg(draw, "presence", "Which sites answered in each round, and which were lost")


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(begin, length) of spans of neighbouring rounds, made one."""
    joined: list[tuple[float, float]] = []
    for begin, length in spans:
        if joined and begin - sum(joined[-1]) < 0.5:
            joined[-1] = (joined[-1][0], begin + length - joined[-1][0])
        else:
            joined.append((begin, length))
    return joined


def traffic_figure(run: Run) -> Markup:
    """What travelled per round: of all sites by kind, and of every site."""
    numbers = [entry.number for entry in run.rounds]
    kinds = {key: title for key, title in tables.TRAFFIC.items() if tables.traffic(run.rounds, key)}
    of_site = {
        site: [sum(tables.traffic([entry], key, site) for key in kinds) for entry in run.rounds]
        for site in sorted({site for entry in run.rounds for site in entry.cost})
    }
    most = max((sum(values) for values in zip(*of_site.values(), strict=True)), default=0.0)
    unit, scale = next((u, v) for u, v in _UNITS if most < 1000 * v or u == _UNITS[-1][0])

    def draw() -> Figure:
        figure, axes = _panels(2, columns=2, height=2.4)
        below = np.zeros(len(numbers))
        for index, (key, title) in enumerate(kinds.items()):
            values = np.array([tables.traffic([entry], key) / scale for entry in run.rounds])
            colour = PHASE_COLOURS[index % len(PHASE_COLOURS)][0]
            axes[0].bar(numbers, values, bottom=below, width=0.85, color=colour, label=title, linewidth=0)
            below = below + values
        axes[0].set_title(f"{unit} per round, all sites")
        axes[0].set_ylim(0, 1.35 * max(below.max(initial=0.0), 1e-9))
        axes[0].legend(loc="upper right", ncols=2) if kinds else None
        for site, values in of_site.items():
            points = [(n, v / scale if v else None) for n, v in zip(numbers, values, strict=True)]
            _line(axes[1], points, of=f"{site}, {unit}", **_site_style(run, site))
        axes[1].set_title(f"{unit} per round, by site")
        axes[1].set_ylim(0, 1.15 * axes[1].get_ylim()[1])
        for axis in axes:
            _round_axis(axis, run, best=False)
        _legend(figure, _site_handles(run))
        return figure

    return _svg(draw, "traffic", "Bytes per round by kind over all sites, and of every site")


_UNITS = (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))


def epsilon_curves(run: Run) -> Markup:
    """ε so far over rounds, and, where rounds were evaluated, the client-wise validation score against it."""
    spent, title = [(entry.number, entry.epsilon) for entry in run.rounds], tables.METRICS[run.measure].title
    bought = [
        (entry.epsilon, index)
        for entry in run.rounds
        if entry.epsilon is not None
        and (index := client_wise_index(select(entry.rows, metric=run.measure))) is not None
    ]

    def draw() -> Figure:
        figure, axes = _panels(1 + bool(bought), columns=2, height=2.2)
        style = {"color": THEME["accent"][0], "marker": "o", "markevery": max(1, len(spent) // 10)}
        _line(axes[0], spent, of="ε so far", **style)
        axes[0].set_title("ε so far")
        axes[0].set_ylim(0, None)
        _round_axis(axes[0], run)
        if bought:
            axes[1].plot(*zip(*bought, strict=True), **style)
            axes[1].set_title(f"validation {title}, client-wise, against ε")
            axes[1].set_xlabel("ε so far")
            axes[1].set_ylim(-0.03, 1.03)
        _legend(figure, _mark_handles(run, lost=False))
        return figure

    return _svg(draw, "epsilon", f"Privacy spent, ε, over rounds, and validation {title} against it")


# ---------------------------------------------------------------------------------------------- overlays


def plane(shown: Plane, colours: Mapping[str, str], titles: Mapping[str, str], description: str) -> Markup:
    """A whole slice as SVG, in millimetres: the image in gray, every class's prediction filled in its colour, its truth as
    a dashed line in the same colour on black, and a bar for the scale. colours: class -> CSS colour; titles: class -> what a reader calls it, plain text."""
    height, width = (size * step for size, step in zip(shown.image.shape, shown.spacing, strict=True))
    filled = "".join(
        f'<path d="{_contours(mask, shown.spacing)}" fill="{colours[name]}" fill-opacity=".42" fill-rule="evenodd" '
        f'stroke="{colours[name]}" stroke-width="1" vector-effect="non-scaling-stroke" data-tip="{escape(titles[name])}"/>'
        for name, mask in shown.prediction.items()
        if mask.any()
    )
    line = 'fill="none" vector-effect="non-scaling-stroke"'
    dashed = "".join(
        f'<path d="{(outline := _contours(mask, shown.spacing))}" {line} stroke="#000" stroke-opacity=".6" stroke-width="3"/>'
        f'<path class="truth" d="{outline}" {line} stroke="#fff" stroke-width="1.5" stroke-dasharray="4 3"/>'
        for mask in shown.truth.values()
        if mask.any()
    )
    bar = max((b for b in (1, 2, 5, 10, 20, 50, 100, 200) if b <= width / 3), default=width / 3)
    left, base = 0.04 * width, height - 0.04 * width
    scale = (
        f'<path d="M{left:.2f} {base:.2f}h{bar:.2f}" {line} stroke="#fff" stroke-width="3"/>'
        f'<text x="{left:.2f}" y="{base - 0.02 * width:.2f}" font-size="{0.05 * width:.2f}" fill="#fff">{bar:g} mm</text>'
    )
    small, spacing = _smaller_slice(shown.image, shown.spacing)
    return _slice(small, spacing, filled + dashed + scale, description, box=(width, height))


def _smaller_slice(image: np.ndarray, spacing: tuple[float, float]) -> tuple[np.ndarray, tuple[float, float]]:
    """A slice as means of square blocks, so that no side is longer than MOST, and its spacing."""
    by = -(-max(image.shape) // MOST)
    if by == 1 or min(image.shape) < by:
        return image, spacing
    rows, columns = (size // by * by for size in image.shape)
    blocks = image[:rows, :columns].reshape(rows // by, by, columns // by, by)
    return blocks.mean((1, 3)), (spacing[0] * by, spacing[1] * by)


MOST = 320
"""Pixels of the longer side of a whole slice on the page, at most."""


def labelled(
    image: np.ndarray,
    masks: Mapping[str, np.ndarray],
    colours: Mapping[str, str],
    spacing: tuple[float, float],
    around: np.ndarray,
    description: str,
    truth: Mapping[str, np.ndarray] | None = None,
) -> Markup:
    """One slice as SVG, in millimetres: the image in gray, every class filled and outlined in its colour, and the
    contours of the truth over it as dashed yellow lines.

    image [H, W] in 0..1; masks, truth: class -> [H, W]; colours: class -> CSS colour; around [H, W]: what the window is
    cropped to, so that the same window serves several pictures of a slice.
    """
    rows, columns = _window(around, spacing)
    image = image[rows, columns]
    drawn = "".join(
        f'<path d="{_contours(mask[rows, columns], spacing)}" fill="{colours[name]}" fill-opacity=".38" '
        f'fill-rule="evenodd" stroke="{colours[name]}" stroke-width="1.4" vector-effect="non-scaling-stroke"/>'
        for name, mask in masks.items()
        if mask[rows, columns].any()
    )
    drawn += "".join(_dashed(mask[rows, columns], spacing) for mask in (truth or {}).values())
    return _slice(image, spacing, drawn, description)


def heated(
    image: np.ndarray,
    cam: np.ndarray,
    truth: np.ndarray,
    spacing: tuple[float, float],
    description: str,
) -> Markup:
    """One slice as SVG, in millimetres: the image in gray, a map over it as colour, and the contour of the truth as a
    dashed yellow line. image, cam [H, W] in 0..1, truth [H, W] bool."""
    height, width = image.shape[0] * spacing[0], image.shape[1] * spacing[1]
    drawn = ""
    if cam.max() > 0:
        drawn = f'<image width="{width:.2f}" height="{height:.2f}" preserveAspectRatio="none" href="{_glow(cam, 96)}"/>'
    return _slice(image, spacing, drawn + _dashed(truth, spacing), description)


TRUTH = "#ffe14a"
"""The colour of the truth's contour."""


def _dashed(mask: np.ndarray, spacing: tuple[float, float]) -> str:
    """The outline of a mask as a dashed yellow line that shows on any ground; "" for an empty one."""
    if not mask.any():
        return ""
    outline, line = _contours(mask, spacing), 'fill="none" vector-effect="non-scaling-stroke"'
    return (
        f'<path d="{outline}" {line} stroke="#000" stroke-opacity=".5" stroke-width="2.6"/>'
        f'<path class="truth" d="{outline}" {line} stroke="{TRUTH}" stroke-width="1.5" stroke-dasharray="4 3"/>'
    )


def _slice(
    image: np.ndarray,
    spacing: tuple[float, float],
    drawn: str,
    description: str,
    box: tuple[float, float] | None = None,
) -> Markup:
    """A slice in gray, in millimetres, with what is drawn over it. box: width and height, if not those of the image."""
    height, width = image.shape[0] * spacing[0], image.shape[1] * spacing[1]
    wide, high = box or (width, height)
    return Markup(
        f'<svg class="overlay" viewBox="0 0 {wide:.2f} {high:.2f}" role="img" aria-label="{escape(description)}">'
        f'<title>{escape(description)}</title><image width="{width:.2f}" height="{height:.2f}" '
        f'preserveAspectRatio="none" href="{_grey(image)}"/>{drawn}</svg>'
    )


def example(entry: Example) -> Markup:
    """One image as SVG, with its Grad-CAM map in colour over it and the map's half height as a line."""
    image, cam = entry.arrays()
    image, cam = _smaller(image), None if cam is None else _smaller(cam)
    height, width = image.shape
    description = f"{entry.class_}, case {entry.case}, site {entry.site}: score {entry.score:.3f}"
    over = ""
    if cam is not None and cam.max() > 0:
        line = 'fill="none" vector-effect="non-scaling-stroke"'
        outline = _contours(cam >= 0.5, (1.0, 1.0))
        over = (
            f'<g class="cam"><image width="{width}" height="{height}" preserveAspectRatio="none" href="{_glow(cam)}"/>'
            f'<path d="{outline}" {line} stroke="#000" stroke-opacity=".5" stroke-width="2.4"/>'
            f'<path d="{outline}" {line} stroke="#ffd54a" stroke-width="1.1"/></g>'
        )
    return Markup(
        f'<svg class="overlay" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description)}">'
        f'<title>{escape(description)}</title><image width="{width}" height="{height}" '
        f'preserveAspectRatio="none" href="{_grey(image)}"/>{over}</svg>'
    )


SIDE = 224
"""Pixels of the longer side of an example on the page, at most."""


def _smaller(image: np.ndarray) -> np.ndarray:
    """The means of square blocks, so that no side is longer than SIDE."""
    by = -(-max(image.shape) // SIDE)
    rows, columns = (size // by * by for size in image.shape)
    if by == 1 or not rows or not columns:
        return image
    return image[:rows, :columns].reshape(rows // by, by, columns // by, by).mean((1, 3))


def _glow(cam: np.ndarray, most: int = 32) -> str:
    """A map in 0..1 as a picture of at most so many rows and columns, from clear over red to yellow; the browser smooths
    it."""
    rows, columns = (max(1, min(most, size)) for size in cam.shape)
    y = np.linspace(0, cam.shape[0] - 1, rows).round().astype(int)
    x = np.linspace(0, cam.shape[1] - 1, columns).round().astype(int)
    small = np.clip(cam[np.ix_(y, x)], 0, 1)
    pixels = np.empty((rows, columns, 4), np.uint8)
    pixels[..., 0] = 255
    pixels[..., 1] = np.round(220 * small**1.5)
    pixels[..., 2] = 30
    pixels[..., 3] = np.round(150 * small)
    return _encoded(Image.fromarray(pixels, "RGBA"))


def _grey(image: np.ndarray) -> str:
    return _encoded(Image.fromarray(np.round(255 * np.clip(image, 0, 1)).astype(np.uint8), "L"))


def _encoded(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _window(mask: np.ndarray, spacing: tuple[float, float]) -> tuple[slice, slice]:
    """The part of a slice that is shown: a square in mm around the mask, at least 40 % of the shorter side."""
    extent = [size * step for size, step in zip(mask.shape, spacing, strict=True)]
    if not mask.any():
        return slice(None), slice(None)
    ends = [(np.flatnonzero(mask.any(1 - axis))[[0, -1]] + (0, 1)) * spacing[axis] for axis in (0, 1)]
    side = max(2.2 * max(float(end - start) for start, end in ends), 0.4 * min(extent))
    cuts = []
    for axis in (0, 1):
        size = min(side, extent[axis])
        start = min(max(float(ends[axis].mean()) - size / 2, 0.0), extent[axis] - size)
        first = round(start / spacing[axis])
        cuts.append(slice(first, max(first + 1, round((start + size) / spacing[axis]))))
    return cuts[0], cuts[1]


def _contours(mask: np.ndarray, spacing: tuple[float, float]) -> str:
    """The outlines of a mask as the data of an SVG path, in mm; pixel (0, 0) covers the first spacing."""
    padded = np.pad(mask.astype(float), 1)
    lines = contour_generator(
        x=(np.arange(padded.shape[1]) - 0.5) * spacing[1],
        y=(np.arange(padded.shape[0]) - 0.5) * spacing[0],
        z=padded,
    ).lines(0.5)
    return "".join(
        "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in np.asarray(line)[:-1]) + "Z" for line in lines
    )


# ---------------------------------------------------------------------------------------------- shared parts


def _panels(
    count: int, *, columns: int, height: float, share: bool = False, square: bool = False
) -> tuple[Figure, list[Axes]]:
    """A grid of panels; `height` inches each, and if square as much more as they are wide. Returns the figure and as many
    axes as asked for."""
    rows = math.ceil(count / columns)
    height += WIDTH / columns if square else 0
    figure = Figure(figsize=(WIDTH, rows * height + 0.75))
    FigureCanvasSVG(figure)
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False).ravel().tolist()
    for index, axis in enumerate(grid[count:], start=count):
        if share and index >= columns:
            grid[index - columns].tick_params(labelbottom=True)
        axis.remove()
    return figure, grid[:count]


def _columns(count: int, least: int, most: int) -> int:
    """The number of columns that leaves the fewest places of a grid empty; of equals, the larger."""
    return max(range(least, most + 1), key=lambda columns: (-(-count % columns), columns))


def _said(axis: Axes, text: str) -> None:
    """Words in the middle of an empty panel."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color=_MUTED)


def _line(
    axis: Axes,
    values: Iterable[tuple[int, float | None]],
    *,
    of: str = "",
    decimals: int = 3,
    **style: Any,
) -> None:
    """A line over rounds. of: the name that its points show with their values; "": no names."""
    points = [(x, math.nan if y is None else y) for x, y in values]
    if not any(math.isfinite(y) for _, y in points):
        return
    for x, y in points if of else ():
        _tip(axis, x, y, f"{of}, round {x}: {y:.{decimals}f}")
    if len(points) == 1:
        hollow = style.get("linestyle", "-") != "-"
        style = {"marker": "o", "markerfacecolor": "none" if hollow else style["color"], **style}
    axis.plot(*zip(*points, strict=True), **style)  # type: ignore[arg-type]


def _round_axis(axis: Axes, run: Run, *, best: bool = True, label: bool = True) -> None:
    first, last = run.rounds[0].number, run.rounds[-1].number
    margin = max(0.5, 0.02 * (last - first))
    axis.set_xlim(first - margin, last + margin)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    if label:
        axis.set_xlabel("round")
    if best and run.best_round is not None:
        axis.axvline(run.best_round, color=_MUTED, linewidth=1, linestyle=(0, (1, 1.5)), zorder=0.5)


def _site_style(run: Run, site: str) -> dict[str, Any]:
    index = list(run.sites).index(site) if site in run.sites else len(run.sites)
    return {
        "color": SITE_COLOURS[index % len(SITE_COLOURS)][0],
        "marker": MARKERS[index % len(MARKERS)],
        "markevery": max(1, len(run.rounds) // 10),
        "linestyle": "-" if index < len(SITE_COLOURS) else (0, (4, 1.5)),
    }


def _site_handles(run: Run) -> list[Line2D]:
    styles = [{**_site_style(run, site), "markevery": None} for site in run.sites]
    return [
        Line2D([], [], label=_short(site, 30), **style)  # type: ignore[arg-type]
        for site, style in zip(run.sites, styles, strict=True)
    ]


def _mark_handles(run: Run, *, lost: bool = True) -> list[Line2D]:
    handles = []
    if run.best_round is not None:
        dots = (0, (1, 1.5))
        handles.append(
            Line2D([], [], color=_MUTED, linewidth=1, linestyle=dots, label=f"best round ({run.best_round})")
        )
    if lost and tables.lost(run):
        handles.append(
            Line2D(
                [], [], color=_BAD, marker="x", linestyle="none", markeredgewidth=1.8, label="a site was lost"
            )
        )
    return handles


def _mark_lost(axis: Axes, run: Run) -> None:
    rounds = sorted({number for number, _, _ in tables.lost(run) if number})
    if rounds:
        axis.plot(
            rounds,
            [0.03] * len(rounds),
            "x",
            color=_BAD,
            markeredgewidth=1.8,
            transform=axis.get_xaxis_transform(),
            zorder=5,
        )


def _legend(figure: Figure, handles: Sequence[Line2D | Patch]) -> None:
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, min(len(handles), int(150 / (longest + 8))))
        figure.legend(handles=list(handles), loc="outside upper left", ncols=columns)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


_TIPS: ContextVar[list[tuple[Axes, float, float, str]]] = ContextVar("tips")
"""Axes, place in its data, and words of every point of the figure that is being drawn that tells its value."""


def _tip(axis: Axes, x: float, y: float | None, text: str) -> None:
    """What a point tells under the pointer."""
    if y is not None and math.isfinite(y):
        _TIPS.get([]).append((axis, float(x), float(y), text))


def _svg(draw: Callable[[], Figure], name: str, description: str) -> Markup:
    """A figure as an SVG element that stands in an HTML page, the same bytes for the same figure; and after it what a
    narrow screen shows in its place."""
    file = io.StringIO()
    tips: list[tuple[Axes, float, float, str]] = []
    kept = _TIPS.set(tips)
    try:
        with matplotlib.rc_context(_RC), warnings.catch_warnings():  # type: ignore[arg-type]
            warnings.simplefilter(
                "ignore", UserWarning
            )  # glyphs that the measuring font lacks; the page's has them
            figure = draw()
            figure.savefig(file, format="svg", metadata=_NO_METADATA)
            slim = _slim(figure, name, tips)
    finally:
        _TIPS.reset(kept)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>|<metadata.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    text = re.sub(r"(?<=[ ;\"])(fill|stroke): (#[0-9a-f]{6})", _variable, text)
    text = re.sub(r">\s+<", "><", re.sub(r"[ \n]*\n[ \n]*", " ", text)).strip()
    text = text.removesuffix("</svg>") + _points(figure, tips) + "</svg>"
    title = escape(description)
    wide = re.sub(
        r'<svg width="[^"]*" height="[^"]*"',
        lambda _: f'<svg class="plot wide" role="img" aria-label="{title}"',
        text,
        count=1,
    ).strip()
    return Markup(wide + slim)


def _slim(figure: Figure, name: str, tips: Sequence[tuple[Axes, float, float, str]]) -> str:
    """The panels of a figure and the entries of its legend as SVG elements of their own, which show their part of the
    whole figure, below each other."""
    renderer = figure._get_renderer()  # type: ignore[attr-defined]
    scale, high = 72 / figure.dpi, 72 * figure.get_figheight()
    drawn = f'<use href="#{name}-figure_1"/>'

    def seen(box: Any, inside: str, more: str = "") -> str:
        x, y = scale * box.x0, high - scale * box.y1
        width, height = scale * box.width, scale * box.height
        return f'<svg viewBox="{x:.1f} {y:.1f} {width:.1f} {height:.1f}"{more}>{drawn}{inside}</svg>'

    entries = []
    for legend in figure.legends:
        for text in legend.get_texts():
            box = text.get_window_extent(renderer)
            size = float(text.get_fontsize()) * figure.dpi / 72
            before = (legend.handlelength + legend.handletextpad + 0.3) * size
            whole = Bbox.from_extents(
                box.x0 - before, box.y0 - 0.25 * size, box.x1 + 0.6 * size, box.y1 + 0.25 * size
            )
            entries.append(seen(whole, "", f' style="width:{whole.width * 96 / figure.dpi:.0f}px"'))
    panels = []
    boxes = ((axis, axis.get_tightbbox(renderer)) for axis in figure.axes)
    tight = {axis: box for axis, box in boxes if box is not None}
    for axis in tight:
        inside = _points(figure, [tip for tip in tips if tip[0] is axis])
        box, frame = tight[axis].padded(4), axis.get_window_extent(renderer)
        left, below = _labelled_for(axis, figure.axes)
        if left is axis and below is axis:
            broad = box.width / figure.dpi > 0.55 * WIDTH
            panels.append(seen(box, inside, ' style="min-width:620px"' if broad else ""))
            continue
        # the labels of shared axes stand at another panel, and are shown beside this one
        x0 = frame.x0 - 6 if left is not axis else box.x0
        y0 = frame.y0 - 6 if below is not axis else box.y0
        at = Bbox.from_extents(x0, y0, box.x1, box.y1)
        edge, foot = left.get_window_extent(renderer).x0 - 6, below.get_window_extent(renderer).y0 - 6
        beside = Bbox.from_extents(tight[left].x0 - 4, y0, max(edge, tight[left].x0 - 3), box.y1)
        under = Bbox.from_extents(x0, tight[below].y0 - 4, box.x1, max(foot, tight[below].y0 - 3))
        wide, deep = (beside.width if left is not axis else 0.0), (under.height if below is not axis else 0.0)

        def placed(part: Any, x: float, y: float, own: str = "") -> str:
            where = f' x="{scale * x:.1f}" y="{scale * y:.1f}" '
            return seen(
                part, own, f'{where}width="{scale * part.width:.1f}" height="{scale * part.height:.1f}"'
            )

        parts = [placed(at, wide, 0, inside)]
        parts += [placed(beside, 0, 0)] if wide else []
        parts += [placed(under, wide, at.height)] if deep else []
        size = f"{scale * (wide + at.width):.1f} {scale * (at.height + deep):.1f}"
        panels.append(f'<svg viewBox="0 0 {size}">{"".join(parts)}</svg>')
    return f'<div class="slim" aria-hidden="true"><div class="key">{"".join(entries)}</div>{"".join(panels)}</div>'


def _labelled_for(axis: Axes, every: Sequence[Axes]) -> tuple[Axes, Axes]:
    """The panels that carry a panel's axis labels, to its left and below; the panel itself if it has its own."""
    spec = axis.get_subplotspec()
    if spec is None:
        return axis, axis

    def bare(labels: Iterable[Any]) -> bool:
        return not any(label.get_visible() and label.get_text() for label in labels)

    left, below = axis, axis
    specs = [(other, other.get_subplotspec()) for other in every]
    if bare(axis.get_yticklabels()):
        row = [o for o, at in specs if at and at.rowspan.start == spec.rowspan.start]
        left = min(row, key=lambda o: o.get_position().x0)
    if bare(axis.get_xticklabels()):
        column = [o for o, at in specs if at and at.colspan.start == spec.colspan.start]
        below = min(column, key=lambda o: o.get_position().y0)
    return left, below


def _points(figure: Figure, tips: Sequence[tuple[Axes, float, float, str]]) -> str:
    """The points that tell something, as circles without ink; of very many every few."""
    points, high = [], 72 * figure.get_figheight()
    for axis, x, y, text in tips[:: -(-len(tips) // MOST_TIPS) or 1]:
        across, up = 72 / figure.dpi * axis.transData.transform((x, y))
        points.append(f'<circle cx="{across:.1f}" cy="{high - up:.1f}" r="5" data-tip="{escape(text)}"/>')
    return f'<g class="tips">{"".join(points)}</g>' if points else ""


MOST_TIPS = 1500
"""Points of a figure that tell their values, at most."""


def _variable(match: re.Match[str]) -> str:
    name = _VARIABLES.get(match[2])
    return f"{match[1]}: var(--{name})" if name else match[0]


_NO_METADATA: Mapping[str, None] = dict.fromkeys(("Date", "Creator", "Type", "Format"))


# ---------------------------------------------------------------------------------------------- sweeps


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

    def style(index: int) -> dict[str, Any]:
        return {
            "color": CLASS_COLOURS[index % len(CLASS_COLOURS)][0],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5,
        }

    def hollow(
        axis: Axes, x: Sequence[float], y: Sequence[float], look: Mapping[str, Any], **more: Any
    ) -> None:
        axis.plot(x, y, **{**look, "linestyle": "none", "markersize": 7, "markerfacecolor": "none", **more})

    def panel_of(axis: Axes, panel: Swept) -> None:
        for index, (level, dash) in enumerate(zip(panel.levels.values(), dashes, strict=True)):
            if level.mean is not None:
                axis.axhline(level.mean, color=_BAD, linestyle=dash, linewidth=1.4)
                if level.spread is not None:
                    ends = (level.mean - level.spread, level.mean + level.spread)
                    axis.axhspan(*ends, facecolor=to_rgba(_BAD, 0.1), edgecolor="none")
            if level.published is not None:
                look = {"color": _BAD, "marker": MARKERS[index % len(MARKERS)]}
                edge = {"transform": axis.get_yaxis_transform(), "clip_on": False}
                hollow(axis, [1.0], [level.published], look, **edge)
        for index, of in enumerate(panel.lines.values()):
            # beside each other, so that their bars can be told apart
            aside = 0.012 * reach * (index - (len(names) - 1) / 2)
            look = style(index)
            means = [(aside + place(at.at), at.mean, at.spread) for at in of if at.mean is not None]
            # not joined across a number that has no average
            axis.plot(
                [aside + place(at.at) for at in of],
                [math.nan if at.mean is None else at.mean for at in of],
                **look,
            )
            if barred := [(x, y, spread) for x, y, spread in means if spread is not None]:
                x, y, spread = zip(*barred, strict=True)
                axis.errorbar(x, y, spread, color=look["color"], linestyle="none", elinewidth=1.1, capsize=3)
            printed = [(aside + place(at.at), at.published) for at in of if at.published is not None]
            hollow(axis, [x for x, _ in printed], [y for _, y in printed], look)
        if all(at.mean is None for of in panel.lines.values() for at in of):
            _said(axis, "no run is finished")
        axis.set_xlim(low - 0.08 * reach, high + 0.08 * reach)
        axis.set_xticks([place(at) for at in sorted(ticks)], [ticks[at] for at in sorted(ticks)])
        if crowded:
            axis.tick_params(axis="x", labelrotation=40)
        axis.set_xlabel(label)
        axis.set_ylabel(panel.unit)
        axis.set_title("\n".join(textwrap.wrap(panel.title, 66 if len(panels) > 1 else 120)))

    def draw() -> Figure:
        figure, axes = _panels(len(panels), columns=min(2, len(panels)), height=3.1)
        for axis, panel in zip(axes, panels, strict=True):
            panel_of(axis, panel)
        handles = [Line2D([], [], label=_short(name, 60), **style(index)) for index, name in enumerate(names)]
        handles += [
            Line2D([], [], color=_BAD, linestyle=dash, linewidth=1.4, label=_short(name, 60))
            for name, dash in zip(levels, dashes, strict=True)
        ]
        every = [
            at for p in panels for at in (*(at for of in p.lines.values() for at in of), *p.levels.values())
        ]
        if any(at.published is not None for at in every):
            mark = {"marker": "o", "markersize": 7, "markerfacecolor": "none", "linestyle": "none"}
            handles.append(Line2D([], [], color=_MUTED, label="hollow: published", **mark))
        _legend(figure, handles)
        return figure

    units = ", ".join(dict.fromkeys(panel.unit for panel in panels))
    return _svg(draw, name, f"{units} by {label}: {', '.join([*names, *levels])}")


# ---------------------------------------------------------------------------------------------- arms of a comparison


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
    columns = min(3, len(lines))
    numbers = [number for curve in lines.values() for of_seed in curve.seeds for number, _ in of_seed]
    margin = max(0.5, 0.02 * (max(numbers) - min(numbers)))
    several = any(len(curve.seeds) > 1 for curve in lines.values())

    def draw() -> Figure:
        figure, axes = _panels(len(lines), columns=columns, height=1.8, share=True)
        for index, (axis, (arm, curve)) in enumerate(zip(axes, lines.items(), strict=True)):
            colour = CLASS_COLOURS[index % len(CLASS_COLOURS)][0]
            for other, points in means.items():
                if other != arm:
                    _line(axis, points, color=_MUTED, linewidth=0.8, alpha=0.35, zorder=1.5)
            for of_seed in curve.seeds if several else ():
                _line(axis, of_seed, color=colour, linewidth=0.8, alpha=0.6)
            _line(axis, means[arm], color=colour, linewidth=1.9)
            axis.set_title(_short(arm, 28))
            told = {"fontsize": 8, "fontweight": "normal", "color": _MUTED}
            axis.set_title(f"change {curve.change:.4f}", loc="right", **told)
            axis.set_xlim(min(numbers) - margin, max(numbers) + margin)
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            if index % columns == 0:
                axis.set_ylabel("\n".join(textwrap.wrap(label, 22)))
        for axis in axes[columns * ((len(axes) - 1) // columns) :]:
            axis.set_xlabel("round")
        return figure

    return _svg(draw, "arm-curves", f"Validation {label} over rounds: {', '.join(lines)}")


def class_panels(panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], label: str) -> Markup:
    """A panel per class with a line per arm: class -> arm -> (round, value). label: of the values."""
    names = list(dict.fromkeys(arm for lines in panels.values() for arm in lines))
    columns = _columns(len(panels), 2, 3) if len(panels) > 1 else 1

    def draw() -> Figure:
        figure, axes = _panels(len(panels), columns=columns, height=2.3)
        for index, (axis, (name, lines)) in enumerate(zip(axes, panels.items(), strict=True)):
            for arm, points in lines.items():
                look = _arm_style(names, arm)
                _line(axis, points, color=look["color"], linestyle=look["linestyle"], linewidth=1.4)
            axis.set_title(_short(name, 28))
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            if index % columns == 0:
                axis.set_ylabel("\n".join(textwrap.wrap(label, 22)))
            if index >= columns * ((len(axes) - 1) // columns):
                axis.set_xlabel("round")
        _legend(
            figure,
            [Line2D([], [], label=_short(n, 40), **_arm_style(names, n, marker="")) for n in names],
        )
        return figure

    return _svg(
        draw, "class-curves", f"Validation {label} of {', '.join(panels)} over rounds: {', '.join(names)}"
    )


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


def _arm_style(names: Sequence[str], name: str, **more: Any) -> dict[str, Any]:
    """Colour and marker of an arm among all; dashes tell apart those of one colour. more: in place of these."""
    index = names.index(name)
    dashes = ("-", (0, (4, 1.4)), (0, (1.2, 1.2)))
    return {
        "color": CLASS_COLOURS[index % len(CLASS_COLOURS)][0],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": dashes[index // len(CLASS_COLOURS) % len(dashes)],
        **more,
    }


def _names(panels: Sequence[Radar | Dots]) -> list[str]:
    return list(dict.fromkeys(line for panel in panels for line in panel.lines))


def radar_plots(panels: Sequence[Radar], name: str) -> Markup:
    """Closed lines around a centre; outside is better, also where the lower value is. A line is open where it lacks a
    value. name: of the figure, for its identifiers."""
    names = _names(panels)

    def panel_of(axis: Any, panel: Radar) -> None:
        angles = np.linspace(0, 2 * np.pi, len(panel.axes), endpoint=False)
        values = np.array([[math.nan if v is None else v for v in of] for of in panel.lines.values()])
        titles = [_short(text, 18) for text in panel.axes]
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
                text.set_bbox({"facecolor": _PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.8})
                text.set_zorder(5)
        for line, of in zip(panel.lines, radii, strict=True):
            axis.plot([*angles, angles[0]], [*of, of[0]], linewidth=1.4, **_arm_style(names, line))
        axis.set_xticks(angles, titles)
        for angle, text in zip(angles, axis.get_xticklabels(), strict=True):
            side = math.sin(angle)
            text.set_horizontalalignment("center" if abs(side) < 0.1 else "left" if side > 0 else "right")
        axis.spines["polar"].set_color(_GRID)
        axis.spines["polar"].set_visible(True)
        axis.set_title("\n".join(textwrap.wrap(panel.title, 54)), pad=14)

    def draw() -> Figure:
        rows = math.ceil(len(panels) / 2)
        figure = Figure(figsize=(WIDTH, 4.8 * rows + 0.22 * math.ceil(len(names) / 5)))
        FigureCanvasSVG(figure)
        made = figure.subplots(rows, 2, squeeze=False, subplot_kw={"projection": "polar"}).ravel().tolist()
        for axis in made[len(panels) :]:
            axis.remove()
        for axis, panel in zip(made[: len(panels)], panels, strict=True):
            panel_of(axis, panel)
        _legend(figure, [Line2D([], [], label=_short(n, 40), **_arm_style(names, n)) for n in names])
        return figure

    return _svg(
        draw, name, f"Radar plots of {', '.join(panel.title for panel in panels)}: {', '.join(names)}"
    )


def dot_panels(panels: Sequence[Dots], name: str) -> Markup:
    """Means as dots with bars of ± SD, the arms beside each other at every axis. name: of the figure, for its
    identifiers."""
    names = _names(panels)

    def panel_of(axis: Axes, panel: Dots) -> None:
        for index, (line, of) in enumerate(panel.lines.items()):
            aside = 0.7 * ((index + 0.5) / len(panel.lines) - 0.5)
            look = _arm_style(names, line, linestyle="none")
            known = [(place + aside, *found) for place, found in enumerate(of) if found is not None]
            axis.plot([x for x, *_ in known], [mean for _, mean, _ in known], **look)
            if barred := [(x, mean, sd) for x, mean, sd in known if sd is not None]:
                x, mean, sd = zip(*barred, strict=True)
                axis.errorbar(x, mean, sd, color=look["color"], linestyle="none", elinewidth=1.0, capsize=2)
        axis.set_xticks(range(len(panel.axes)), [_short(text, 18) for text in panel.axes])
        axis.set_xlim(-0.6, len(panel.axes) - 0.4)
        axis.grid(visible=False, axis="x")
        for place in range(1, len(panel.axes)):
            last = place == len(panel.axes) - 1
            axis.axvline(place - 0.5, color=_MUTED if last else _GRID, linewidth=1.0 if last else 0.7)
        axis.set_ylabel(panel.unit)
        axis.set_title("\n".join(textwrap.wrap(panel.title, 120)))

    def draw() -> Figure:
        figure, axes = _panels(len(panels), columns=1, height=2.9)
        for axis, panel in zip(axes, panels, strict=True):
            panel_of(axis, panel)
        handles = [
            Line2D([], [], label=_short(n, 40), **_arm_style(names, n, linestyle="none")) for n in names
        ]
        _legend(figure, handles)
        return figure

    told = ", ".join(dict.fromkeys(panel.unit for panel in panels))
    return _svg(draw, name, f"{told} of {', '.join(names)}, side by side")


def weight_panels(panels: Mapping[str, Mapping[str, Sequence[float]]], at: Sequence[float]) -> Markup:
    """Weights of samples over their normalised uncertainty: title -> name of a line -> its values at `at`. All panels have
    the same lines."""
    columns = _columns(len(panels), 2, 3) if len(panels) > 1 else 1

    def draw() -> Figure:
        figure, axes = _panels(len(panels), columns=columns, height=2.6)
        handles = []
        for axis, (title, lines) in zip(axes, panels.items(), strict=True):
            handles = []
            for index, (name, values) in enumerate(lines.items()):
                look: dict[str, Any] = {"color": CLASS_COLOURS[index % len(CLASS_COLOURS)][0]}
                axis.plot(at, values, linewidth=1.5, **look)
                handles.append(Line2D([], [], label=name, **look))
            axis.set_title("\n".join(textwrap.wrap(title, 44)))
            axis.set_xlabel("normalised uncertainty")
            axis.set_ylabel("weight")
        _legend(figure, handles)
        return figure

    return _svg(draw, "weights", f"Weights of samples by their uncertainty: {', '.join(panels)}")


def gradient_panels(
    arms: Mapping[str, Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]], quantiles: Sequence[str]
) -> Markup:
    """Of every arm two panels: the share "steeper" of every site over the rounds, and five quantiles of r: lines for the
    outer ones and the middle one, a band between the others. arms: arm -> site -> name -> (round, value)."""
    sites = list(dict.fromkeys(site for of_arm in arms.values() for site in of_arm))
    look = {site: SITE_COLOURS[index % len(SITE_COLOURS)][0] for index, site in enumerate(sites)}
    low, quarter, half, three_quarters, high = quantiles

    def draw() -> Figure:
        figure, axes = _panels(2 * len(arms), columns=2, height=2.7)
        for (arm, of_arm), share, spread in zip(arms.items(), axes[::2], axes[1::2], strict=True):
            for site, of in of_arm.items():
                colour = look[site]
                mark = MARKERS[sites.index(site) % len(MARKERS)]
                share.plot(*zip(*of["steeper"], strict=True), color=colour, marker=mark)
                rounds = [number for number, _ in of[half]]
                below, above = ([value for _, value in of[name]] for name in (quarter, three_quarters))
                spread.fill_between(rounds, below, above, facecolor=to_rgba(colour, 0.16), edgecolor="none")
                for name in (low, high):
                    _line(spread, of[name], color=colour, linewidth=0.7, linestyle=(0, (3, 2)))
                spread.plot(*zip(*of[half], strict=True), color=colour, marker=mark)
            share.axhline(0.5, color=_MUTED, linewidth=0.8)
            spread.axhline(0.0, color=_MUTED, linewidth=0.8)
            share.set_ylim(0, 1)
            share.set_title(f"{_short(arm, 40)}: share with r > 0")
            spread.set_title(f"{_short(arm, 40)}: r")
            for axis in (share, spread):
                axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
                axis.set_xlabel("round")
        _legend(
            figure,
            [
                Line2D([], [], label=_short(site, 30), color=look[site], marker=MARKERS[n % len(MARKERS)])
                for n, site in enumerate(sites)
            ],
        )
        return figure

    return _svg(draw, "gradients", f"Ratios of gradients over rounds: {', '.join(arms)}")
