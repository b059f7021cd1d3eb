"""The sections of a report about analyses: what `fedatlas analyse` left in a run folder, drawn."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from contourpy import contour_generator
from jinja2 import UndefinedError
from markupsafe import Markup

from fedatlas.core.errors import RunFolderError
from fedatlas.report import markup
from fedatlas.report.figures import CLASS_COLOURS, model_title
from fedatlas.report.tables import Run, number

WIDTH = 792
"""Units of a figure's width; text of 8.5 is as large as in the other figures."""

Found = Mapping[str, Any]

TITLES = {
    "landscape": "Loss landscape",
    "hessian": "Hessian",
    "cka": "Similarity of models (CKA)",
    "membership": "Membership inference",
}
"""kind -> its heading; the template of this name draws it."""
_MERGED = {
    "landscape": ("surfaces", "model"),
    "hessian": ("spectra", "model"),
    "membership": ("attacks", "target"),
}
"""Analyses whose entries of several runs stand in one table and one figure: where they are, and what names the model."""


def there(run: Run) -> list[str]:
    """The analyses that a run folder holds."""
    return [kind for kind in TITLES if _kept(run.folder, kind).is_file()]


def drawn(run: Run) -> list[tuple[str, Found, Markup]]:
    """Every analysis of a run: its kind, what it found, and its part of the page. Raises RunFolderError for a damaged file."""
    parts = []
    for kind in there(run):
        file = _kept(run.folder, kind)
        found = _read(file)
        parts.append((kind, found, _drawn(kind, [file], found)))
    return parts


def together(kind: str, folders: Mapping[str, Path]) -> tuple[Markup, list[str]]:
    """An analysis of several runs under one heading, "" where none has it; and the arms that lack it. folders: arm
    -> run folder. Raises RunFolderError for a damaged file."""
    files = {arm: file for arm, folder in folders.items() if (file := _kept(folder, kind)).is_file()}
    of_arms = {arm: _read(file) for arm, file in files.items()}
    missing = [arm for arm in folders if arm not in of_arms]
    if kind not in _MERGED:
        parts = (
            Markup("<h3>{}</h3>{}").format(arm, _drawn(kind, [files[arm]], found))
            for arm, found in of_arms.items()
        )
        return Markup("").join(parts), missing
    key, name = _MERGED[kind]
    entries = []
    for arm, found in of_arms.items():
        with _whole(kind, [files[arm]]):
            entries += [{**one, name: f"{arm}, {model_title(str(one[name]))}"} for one in found[key]]
    if not entries:
        return Markup(""), missing
    return _drawn(kind, list(files.values()), {**next(iter(of_arms.values())), key: entries}), missing


def settings(found: Found) -> dict[str, str]:
    """With what an analysis was made, and what it cost, as JSON."""
    told = dict(found.get("settings") or {}) | {f"cost: {k}": v for k, v in (found.get("cost") or {}).items()}
    if found.get("loss"):
        told["loss"] = found["loss"]["name"]
    return {key: json.dumps(value) for key, value in told.items()}


def _drawn(kind: str, files: Sequence[Path], found: Found) -> Markup:
    with _whole(kind, files):
        return markup.render(f"analysis/{kind}.html", found=found, draw=draw)


@contextmanager
def _whole(kind: str, files: Sequence[Path]) -> Iterator[None]:
    """Whatever is wrong with what the files hold becomes a RunFolderError that names them."""
    try:
        yield
    except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError, UndefinedError) as error:
        raise RunFolderError(
            f"{', '.join(map(str, files))}: damaged ({type(error).__name__}: {error}); run `fedatlas analyse {kind}` again"
        ) from None


def _kept(folder: Path, kind: str) -> Path:
    return folder / "analysis" / f"{kind}.json"


def _read(path: Path) -> Found:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error}); run the analysis again") from None
    if not isinstance(found, dict):
        raise RunFolderError(f"{path}: holds no mapping; run the analysis again")
    return found


def _heat_maps(surfaces: Sequence[Found]) -> str:
    grids = [
        np.array([[math.nan if v is None else v for v in row] for row in s["losses"]], float)
        for s in surfaces
    ]
    every = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    span = high - low or 1.0
    levels = [low + span * (k / 8) ** 2 for k in range(1, 8)]
    columns = min(4, max(2, len(surfaces)))
    side, gap = (WIDTH - 40) / columns - 34, 34
    rows = math.ceil(len(surfaces) / columns)
    drawn = []
    for place, (of, grid) in enumerate(zip(surfaces, grids, strict=True)):
        x, y = 34 + (place % columns) * (side + gap), 26 + (place // columns) * (side + 52)
        drawn.append(_text(x, y - 7, f"{of['site']}, {model_title(of['model'])}", weight=True))
        n = len(grid)
        cell = side / n
        for i in range(n):
            for j in range(n):
                value = grid[i, j]
                shade = f"fill:{_shade((value - low) / span)}" if math.isfinite(value) else "fill:var(--bad)"
                # the first direction goes to the right, the second up
                drawn.append(_rect(x + i * cell, y + (n - 1 - j) * cell, cell + 0.3, cell + 0.3, shade))
        at = [(x + (i + 0.5) * cell) for i in range(n)], [(y + (n - 0.5 - j) * cell) for j in range(n)]
        lines = contour_generator(*at, np.ma.masked_invalid(grid.T))
        for value in levels:
            for line in lines.lines(value):
                drawn.append(
                    _path([tuple(point) for point in np.asarray(line)], "var(--ink)", 0.5, opacity=0.55)
                )
        steps = of["steps"]
        for k, anchor in ((0, "start"), (n // 2, "middle"), (n - 1, "end")):
            drawn.append(_text(at[0][k], y + side + 11, f"{steps[k]:.2g}", anchor=anchor, muted=True))
            drawn.append(_text(x - 4, at[1][k] + 3, f"{steps[k]:.2g}", anchor="end", muted=True))
        middle = [np.interp(0, steps, axis) for axis in at]
        for turn in (1, -1):
            drawn.append(
                _path(
                    [(middle[0] - 4, middle[1] - 4 * turn), (middle[0] + 4, middle[1] + 4 * turn)],
                    "var(--bad)",
                    1.6,
                )
            )
    height = 26 + rows * (side + 52)
    for k in range(60):
        drawn.append(_rect(34 + 4 * k, height - 8, 4.2, 8, f"fill:{_shade((k / 59) ** 2)}"))
    for k in (0, 0.5, 1):
        drawn.append(
            _text(34 + 240 * k, height + 12, f"{low + span * k * k:.3g}", anchor="middle", muted=True)
        )
    drawn.append(_text(290, height, "loss; lines at equal steps of this scale", muted=True))
    sites = ", ".join(dict.fromkeys(str(s["site"]) for s in surfaces))
    return _svg(drawn, height + 20, f"Loss landscapes at {sites}")


def _shade(share: float) -> str:
    """Deep for a low loss, pale for a high one, by the square root of its place between them."""
    part = round(100 * (1 - math.sqrt(min(max(share, 0.0), 1.0))))
    return f"color-mix(in srgb,var(--accent) {part}%,var(--paper))"


def _densities(spectra: Sequence[Found]) -> str:
    """Curves of all spectra over one axis, the density on a logarithmic one."""
    left, right, top, bottom = 52.0, WIDTH - 12.0, 34.0, 214.0
    xs = [v for s in spectra for v in s["density"]["at"]]
    peak = max(v for s in spectra for v in s["density"]["value"])
    low, high = min(xs), max(xs)
    floor = math.log10(peak) - 6
    ceiling = math.log10(peak) + 0.2

    def x_of(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    def y_of(value: float) -> float:
        place = max(math.log10(value) if value > 0 else floor, floor)
        return bottom - (place - floor) / (ceiling - floor) * (bottom - top)

    drawn = []
    for power in range(math.ceil(floor), math.floor(ceiling) + 1):
        y = y_of(10.0**power)
        drawn.append(_path([(left, y), (right, y)], "var(--grid)", 0.7))
        drawn.append(_text(left - 5, y + 3, f"1e{power}", anchor="end", muted=True))
    for tick in _ticks(low, high):
        drawn.append(_path([(x_of(tick), bottom), (x_of(tick), bottom + 4)], "var(--muted)", 0.8))
        drawn.append(_text(x_of(tick), bottom + 15, f"{tick:g}", anchor="middle", muted=True))
    drawn.append(_text((left + right) / 2, bottom + 29, "eigenvalue", anchor="middle", muted=True))
    drawn.append(_path([(left, top), (left, bottom), (right, bottom)], "var(--muted)", 0.8))
    place = left
    for index, s in enumerate(spectra):
        colour = f"var(--c{index % len(CLASS_COLOURS)})"
        dash = "" if index < len(CLASS_COLOURS) else "4 2"
        points = [(x_of(a), y_of(v)) for a, v in zip(s["density"]["at"], s["density"]["value"], strict=True)]
        drawn.append(_path(points, colour, 1.5, dash=dash))
        name = f"{s['site']}, {model_title(s['model'])}"
        wide = 26 + 5 * len(name)
        if place + wide > right:
            place = left
        drawn.append(_path([(place, 12), (place + 16, 12)], colour, 2, dash=dash))
        drawn.append(_text(place + 20, 15, name))
        place += wide
    return _svg(drawn, bottom + 36, "Density of the eigenvalues of the Hessian by site")


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within an interval, four to eight of them."""
    raw = (high - low) / 6
    unit = 10 ** math.floor(math.log10(raw))
    step = unit * min((1, 2, 5, 10), key=lambda m: abs(m * unit - raw))
    first = math.ceil(low / step)
    return [round(step * k, 10) for k in range(first, math.floor(high / step) + 1)]


def _by_layer(pairs: Sequence[Found], what: str, title: str) -> Markup:
    """Every pair with the first model, layer by layer, as lines."""
    layers = list(pairs[0][what])
    defined = [v for p in pairs for v in map(number, p[what].values()) if v is not None]
    least = min(defined, default=0.0)
    low = 0.0 if least < 0.7 else 1 - 1.2 * max(1 - least, 1e-3)
    left, right, top, bottom = 52.0, WIDTH - 12.0, 34.0, 190.0

    def x_of(place: int) -> float:
        return left + (place + 0.5) / len(layers) * (right - left)

    def y_of(value: float) -> float:
        return bottom - (value - low) / (1 - low) * (bottom - top)

    drawn = []
    for tick in _ticks(low, 1.0):
        drawn.append(_path([(left, y_of(tick)), (right, y_of(tick))], "var(--grid)", 0.7))
        drawn.append(_text(left - 5, y_of(tick) + 3, f"{tick:g}", anchor="end", muted=True))
    place = left
    for index, pair in enumerate(pairs):
        colour = f"var(--c{index % len(CLASS_COLOURS)})"
        values = [number(pair[what].get(layer)) for layer in layers]
        points = [None if v is None else (x_of(i), y_of(v)) for i, v in enumerate(values)]
        for a, b in pairwise(points):
            if a and b:
                drawn.append(_path([a, b], colour, 1.4))
        for point in filter(None, points):
            drawn.append(f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="1.8" style="fill:{colour}"/>')
        name = model_title(str(pair["second"]))
        wide = 26 + 5 * len(name)
        if place + wide > right:
            place = left
        drawn.append(_path([(place, 12), (place + 16, 12)], colour, 2))
        drawn.append(_text(place + 20, 15, name))
        place += wide
    drawn.append(
        _text(
            (left + right) / 2, bottom + 15, "layers, from the first to the last", anchor="middle", muted=True
        )
    )
    return _svg(drawn, bottom + 22, f"{title} by layer")


def _layer_matrix(names: Sequence[str], values: Sequence[Sequence[Any]]) -> str:
    side, x, y = 330.0, 210.0, 10.0
    cell = side / len(names)
    drawn = []
    for i, row in enumerate(values):
        for j, value in enumerate(map(number, row)):
            shade = "fill:var(--grid)"
            if value is not None:
                part = round(100 * min(max(value, 0), 1))
                shade = f"fill:color-mix(in srgb,var(--accent) {part}%,var(--paper))"
            told = f"{names[i]}, {names[j]}: {'–' if value is None else f'{value:.2f}'}"
            drawn.append(_rect(x + j * cell, y + i * cell, cell + 0.2, cell + 0.2, shade, told))
    every = max(1, math.ceil(len(names) / 40))
    for i in range(0, len(names), every):
        name = names[i] if len(names[i]) <= 40 else "…" + names[i][-39:]
        drawn.append(
            _text(
                x - 5,
                y + (i + 0.5) * cell + 2.5,
                name,
                anchor="end",
                muted=True,
                size=min(8.5, 0.9 * cell * every),
            )
        )
    for k in range(40):
        drawn.append(
            _rect(
                x + side + 30,
                y + side - 4 * (k + 1),
                10,
                4.2,
                f"fill:color-mix(in srgb,var(--accent) {2.5 * (k + 0.5):.1f}%,var(--paper))",
            )
        )
    for value in (0, 0.5, 1):
        drawn.append(_text(x + side + 44, y + side - 160 * value + 3, f"{value:g}", muted=True))
    return _svg(drawn, y + side + 10, "CKA between the layers of a model")


BINS = 20


def _uncertainties(known: Sequence[Found]) -> Markup:
    """The target's uncertainty of members and of others, a panel per target."""
    every = [v for a in known for side in ("members", "others") for v in a["uncertainty"][side]]
    high = max(every) or 1.0
    columns = min(3, len(known))
    side, top, tall = (WIDTH - 20) / columns - 46, 24.0, 92.0
    drawn = []
    for place, a in enumerate(known):
        x, y = 40 + (place % columns) * (side + 46), top + (place // columns) * (tall + 52)
        drawn.append(_text(x, y - 7, model_title(str(a["target"])), weight=True))
        shares = {}
        for name in ("members", "others"):
            values = a["uncertainty"][name]
            counts = [0] * BINS
            for v in values:
                counts[min(int(BINS * v / high), BINS - 1)] += 1
            shares[name] = [count / len(values) for count in counts] if values else []
        most = max((share for of in shares.values() for share in of), default=1.0)
        wide = side / BINS
        for name, colour in _SIDES.items():
            for n, share in enumerate(shares[name]):
                height = tall * share / most
                told = f"{name}: {share:.0%} from {n * high / BINS:.3g} to {(n + 1) * high / BINS:.3g}"
                style = f"fill:{colour};fill-opacity:.42"
                drawn.append(_rect(x + n * wide, y + tall - height, wide * 0.94, height, style, told))
        drawn.append(_path([(x, y), (x, y + tall), (x + side, y + tall)], "var(--muted)", 0.8))
        drawn.append(_text(x - 4, y + 5, f"{most:.0%}", anchor="end", muted=True))
        for part in (0, 0.5, 1):
            at = x + part * side
            drawn.append(_text(at, y + tall + 12, f"{part * high:.3g}", anchor="middle", muted=True))
    bottom = top + math.ceil(len(known) / columns) * (tall + 52) - 18
    for n, (name, colour) in enumerate(_SIDES.items()):
        drawn.append(_rect(40 + 110 * n, bottom - 8, 10, 10, f"fill:{colour};fill-opacity:.42"))
        drawn.append(_text(55 + 110 * n, bottom, name))
    return _svg(drawn, bottom + 8, f"Uncertainty of members and others: {len(known)} targets")


_SIDES = {"members": "var(--c1)", "others": "var(--c0)"}


def _svg(drawn: Sequence[str], height: float, told: str) -> Markup:
    return Markup(
        f'<svg class="plot" role="img" aria-label="{escape(told)}" viewBox="0 0 {WIDTH} {height:.0f}">{"".join(drawn)}</svg>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    muted: bool = False,
    weight: bool = False,
    size: float = 8.5,
) -> str:
    bold = ";font-weight:650" if weight else ""
    colour = "muted" if muted else "ink"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'style="font-size:{size:.3g}px;fill:var(--{colour}){bold}">{escape(text)}</text>'
    )


def _rect(x: float, y: float, width: float, height: float, style: str, told: str = "") -> str:
    inner = f"><title>{escape(told)}</title></rect>" if told else "/>"
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.2f}" style="{style}"{inner}'


def _path(points: Sequence[Any], colour: str, width: float, *, dash: str = "", opacity: float = 1.0) -> str:
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    more = f";stroke-dasharray:{dash}" if dash else ""
    more += f";opacity:{opacity:g}" if opacity < 1 else ""
    return f'<path d="{line}" style="fill:none;stroke:{colour};stroke-width:{width:g}{more}"/>'


draw = SimpleNamespace(
    landscapes=_heat_maps,
    densities=_densities,
    by_layer=_by_layer,
    layer_matrix=_layer_matrix,
    uncertainties=_uncertainties,
)
