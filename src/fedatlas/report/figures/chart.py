"""What every chart is made with: a grid of panels, their lines, boxes and legend, and the SVG of the whole.

Charts are inline SVG: text stays text, colours are CSS variables, so that one figure serves light and dark. After the figure stands
what a narrow screen shows in its place.
"""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from fedatlas.report.figures.theme import (
    BAD,
    CLASS_COLOURS,
    GRID,
    INK,
    MARKERS,
    MUTED,
    class_colour,
    in_variables,
)

WIDTH = 11.0
"""Inches; the page shows a figure at its full width."""
MOST_TIPS = 1500
"""Points of a figure that tell their values, at most."""
DOTTED = (0, (1, 1.5))
DASHED = (0, (3, 1.6))
RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedatlas",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": INK,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
"""The look of all charts."""

T = TypeVar("T")
Point = tuple[float, float | None]


class Key(NamedTuple):
    """An entry of a legend: a line, or a patch, in the style that matplotlib names so."""

    label: str
    style: Mapping[str, Any]
    patch: bool = False


def line_key(label: str, **style: Any) -> Key:
    """A line or marker in a legend."""
    return Key(label, style)


def patch_key(label: str, **style: Any) -> Key:
    """A patch in a legend."""
    return Key(label, style, True)


def chart(
    name: str,
    told: str,
    items: Iterable[T],
    panel: Callable[[Any, T], None],
    *,
    columns: int,
    height: float,
    keys: Sequence[Key] = (),
    x: str = "",
    y: str = "",
    share: bool = False,
    square: bool = False,
    polar: bool = False,
    finish: Callable[[Figure, list[Axes]], None] | None = None,
) -> Markup:
    """A chart with a panel per item.

    name: of the figure, for its identifiers. told: what it shows, in words. panel: draws an item on axes. height: inches of a
    row; square: as much more as a panel is wide. keys: the legend. x, y: labels of the axes, at the lowest and at the leftmost
    panels. share: one pair of axes for all. finish: draws what belongs to all panels.
    """
    items = list(items)

    def draw() -> Figure:
        figure, axes = _panels(len(items), columns, height, share, square, polar)
        for index, (axis, item) in enumerate(zip(axes, items, strict=True)):
            panel(axis, item)
            if x and index + columns >= len(axes):
                axis.set_xlabel(x)
            if y and index % columns == 0:
                axis.set_ylabel(wrapped(y, max(22, round(12 * height))))
        if finish:
            finish(figure, axes)
        _legend(figure, keys)
        return figure

    return _svg(draw, name, told)


def _panels(
    count: int, columns: int, height: float, share: bool, square: bool, polar: bool
) -> tuple[Figure, list[Axes]]:
    rows = math.ceil(count / columns)
    height += WIDTH / columns if square else 0
    figure = Figure(figsize=(WIDTH, rows * height + 0.75))
    FigureCanvasSVG(figure)
    kind = {"projection": "polar"} if polar else None
    made = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False, subplot_kw=kind)
    grid = made.ravel().tolist()
    for index, axis in enumerate(grid[count:], start=count):
        if share and index >= columns:
            grid[index - columns].tick_params(labelbottom=True)
        axis.remove()
    return figure, grid[:count]


def _legend(figure: Figure, keys: Sequence[Key]) -> None:
    if keys:
        longest = max(len(key.label) for key in keys)
        columns = max(1, min(len(keys), int(150 / (longest + 8))))
        handles = [
            Patch(label=key.label, **key.style) if key.patch else Line2D([], [], label=key.label, **key.style)
            for key in keys
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=columns)


def columns_of(count: int, least: int, most: int) -> int:
    """The number of columns that leaves the fewest places of a grid empty; of equals, the larger."""
    return max(range(least, most + 1), key=lambda columns: (-(-count % columns), columns))


# ---------------------------------------------------------------------------------------------- what stands in a panel


def said(axis: Axes, text: str) -> None:
    """Words in the middle of an empty panel."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color=MUTED)


def short(text: str, length: int) -> str:
    """A text cut to a length."""
    return text if len(text) <= length else text[: length - 1] + "…"


def wrapped(text: str, length: int) -> str:
    """A text in lines of at most this length."""
    return "\n".join(textwrap.wrap(text, length))


def line(axis: Axes, values: Iterable[Point], *, of: str = "", decimals: int = 3, **style: Any) -> None:
    """A line over rounds. of: the name that its points show with their values; "": no names."""
    points = [(x, math.nan if y is None else y) for x, y in values]
    if not any(math.isfinite(y) for _, y in points):
        return
    for x, y in points if of else ():
        tip(axis, x, y, f"{of}, round {x}: {y:.{decimals}f}")
    if len(points) == 1:
        hollow = style.get("linestyle", "-") != "-"
        style = {"marker": "o", "markerfacecolor": "none" if hollow else style["color"], **style}
    axis.plot(*zip(*points, strict=True), **style)  # type: ignore[arg-type]


def whole_numbers(axis: Axes) -> None:
    """Few ticks, at whole numbers, as rounds are."""
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


def box(
    axis: Axes,
    values: Sequence[float],
    place: float,
    colour: str,
    *,
    filled: bool,
    width: float,
    told: Sequence[str],
    across: bool = False,
) -> None:
    """A box of values at a place: quartiles, median, whiskers to 1.5 quartile ranges. told: what the point of every value
    says; without it there are no points, but of what lies beyond the whiskers. across: does the axis of values run to the
    right?"""
    line = {"color": colour}
    axis.boxplot(
        [values],
        positions=[place],
        orientation="horizontal" if across else "vertical",
        widths=width,
        patch_artist=True,
        manage_ticks=False,
        showfliers=not told,
        boxprops={"facecolor": to_rgba(colour, 0.4) if filled else "none", "edgecolor": colour},
        medianprops={"color": INK, "linewidth": 1.7},
        whiskerprops=line,
        capprops=line,
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": colour},
    )
    if not told:
        middle = float(np.median(values))
        tip(axis, *_turned(middle, place, across), f"{len(values)} values, median {middle:.3f}")
        return
    aside = place + 0.3 * width * np.sin(2.4 * np.arange(len(values)))
    axis.plot(*_turned(values, aside, across), ".", color=colour, markersize=2.7, markeredgewidth=0)
    for value, at, words in zip(values, aside, told, strict=True):
        tip(axis, *_turned(value, at, across), words)


def _turned(value: Any, place: Any, across: bool) -> tuple[Any, Any]:
    return (value, place) if across else (place, value)


def mean_and_spread(
    axis: Axes, points: Sequence[tuple[float, float | None, float | None]], look: Mapping[str, Any]
) -> None:
    """Means at places, None for a gap, with bars of ± SD where there is one."""
    axis.plot([x for x, *_ in points], [math.nan if y is None else y for _, y, _ in points], **look)
    if barred := [(x, y, sd) for x, y, sd in points if y is not None and sd is not None]:
        x, y, sd = zip(*barred, strict=True)
        axis.errorbar(x, y, sd, color=look["color"], linestyle="none", elinewidth=1.1, capsize=2.5)


def arm_style(names: Sequence[str], name: str, **more: Any) -> dict[str, Any]:
    """Colour and marker of an arm among all; dashes tell apart those of one colour. more: in place of these."""
    index = names.index(name)
    dashes = ("-", (0, (4, 1.4)), (0, (1.2, 1.2)))
    return {
        "color": class_colour(index),
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": dashes[index // len(CLASS_COLOURS) % len(dashes)],
        **more,
    }


def arm_keys(names: Sequence[str], **more: Any) -> list[Key]:
    """The legend of arms."""
    return [line_key(short(name, 40), **arm_style(names, name, **more)) for name in names]


LOST: dict[str, Any] = {"color": BAD, "marker": "x", "linestyle": "none", "markeredgewidth": 1.8}
"""The mark of a site that was lost."""

_TIPS: ContextVar[list[tuple[Axes, float, float, str]]] = ContextVar("tips")
"""Axes, place in its data, and words of every point of the figure that is being drawn that tells its value."""


def tip(axis: Axes, x: float, y: float | None, text: str) -> None:
    """What a point tells under the pointer."""
    if y is not None and math.isfinite(y):
        _TIPS.get([]).append((axis, float(x), float(y), text))


# ---------------------------------------------------------------------------------------------- the SVG


def _svg(draw: Callable[[], Figure], name: str, description: str) -> Markup:
    """A figure as an SVG element that stands in an HTML page, the same bytes for the same figure; and after it what a
    narrow screen shows in its place."""
    file = io.StringIO()
    tips: list[tuple[Axes, float, float, str]] = []
    kept = _TIPS.set(tips)
    try:
        with matplotlib.rc_context(RC), warnings.catch_warnings():  # type: ignore[arg-type]
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
    text = in_variables(text)
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


_NO_METADATA: Mapping[str, None] = dict.fromkeys(("Date", "Creator", "Type", "Format"))
