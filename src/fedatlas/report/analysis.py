"""The sections of a report about analyses: what `fedatlas analyse` left in a run folder, drawn."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from contourpy import contour_generator

from fedatlas.core.errors import RunFolderError
from fedatlas.report import markup
from fedatlas.report.figures import CLASS_COLOURS, model_title
from fedatlas.report.tables import Run, number

WIDTH = 792
"""Units of a figure's width; text of 8.5 is as large as in the other figures."""

Found = Mapping[str, Any]


def there(run: Run) -> list[str]:
    """The analyses that a run folder holds."""
    return [kind for kind in SECTIONS if _file(run, kind).is_file()]


def sections(run: Run) -> str:
    """Every analysis of a run, under a heading each. Raises RunFolderError for a damaged file."""
    parts = []
    for kind in there(run):
        title, draw = SECTIONS[kind]
        found = _read(_file(run, kind))
        try:
            parts.append(f'<h3 id="analysis-{kind}">{title}</h3>{draw(found)}{_settings(found)}')
        except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError) as error:
            raise RunFolderError(
                f"{_file(run, kind)}: damaged ({type(error).__name__}: {error}); run `fedatlas analyse {kind}` again"
            ) from None
    return "".join(parts)


def together(kind: str, folders: Mapping[str, Path]) -> tuple[str, list[str]]:
    """An analysis of several runs under one heading, as HTML, "" where none has it; and the arms that lack it. folders: arm
    -> run folder. Raises RunFolderError for a damaged file."""
    of_arms = {arm: _read(file) for arm, folder in folders.items() if (file := _kept(folder, kind)).is_file()}
    missing = [arm for arm in folders if arm not in of_arms]
    draw = SECTIONS[kind][1]
    try:
        if kind in _MERGED:
            key, name = _MERGED[kind]
            entries = [
                {**entry, name: f"{arm}, {model_title(str(entry[name]))}"}
                for arm, found in of_arms.items()
                for entry in found[key]
            ]
            first = next(iter(of_arms.values()), {})
            return draw({**first, key: entries}) if entries else "", missing
        parts = [f"<h3>{markup.text(arm)}</h3>{draw(found)}" for arm, found in of_arms.items()]
    except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError) as error:
        raise RunFolderError(
            f"{', '.join(str(_kept(folders[arm], kind)) for arm in of_arms)}: damaged ({type(error).__name__}: {error}); run "
            f"`fedatlas analyse {kind}` again"
        ) from None
    return "".join(parts), missing


_MERGED = {
    "landscape": ("surfaces", "model"),
    "hessian": ("spectra", "model"),
    "membership": ("attacks", "target"),
}
"""Analyses whose entries of several runs stand in one table and one figure: where they are, and what names the model."""


def _file(run: Run, kind: str) -> Path:
    return _kept(run.folder, kind)


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


def _settings(found: Found) -> str:
    told = dict(found.get("settings") or {}) | {f"cost: {k}": v for k, v in (found.get("cost") or {}).items()}
    loss = found.get("loss")
    if loss:
        told["loss"] = loss["name"]
    body = [
        f'<th scope="row">{markup.text(key)}</th><td><code>{markup.text(json.dumps(value))}</code></td>'
        for key, value in told.items()
    ]
    return markup.details("Settings", markup.table("Settings of this analysis", ["What", "Value"], body))


def _number(value: Any, digits: int = 3) -> str:
    got = number(value)
    return '<td class="num">–</td>' if got is None else f'<td class="num">{got:.{digits}g}</td>'


def _head(*cells: Any) -> str:
    """The first cells of a row, which name it."""
    first, *more = cells
    return f'<th scope="row">{markup.text(first)}</th>' + "".join(f"<td>{markup.text(c)}</td>" for c in more)


# ---------------------------------------------------------------------------------------------- landscape


def _landscape(found: Found) -> str:
    surfaces = found["surfaces"]
    level = found["settings"]["level"]
    aid = markup.aid(
        "The loss on training data of a site, over two random directions in the space of the weights, each scaled filter "
        "by filter to the weights' norm. The cross is the model. The directions have the same random numbers in every "
        "panel, and all panels share one scale of colours, which is a square root."
    )
    body = [
        _head(s["site"], model_title(s["model"]))
        + "".join(_number(s[key], 4) for key in ("centre", "lowest", "near", "rise", "highest"))
        + markup.cell(None if s["flat"] is None else 100 * s["flat"], 0, " %")
        for s in surfaces
    ]
    head = [
        "Site",
        "model",
        "loss",
        "lowest",
        "rise near",
        "mean rise",
        "largest rise",
        f"flat (≤ +{level:g})",
    ]
    table = markup.table("Loss around the model", head, body, kind="wide")
    return aid + markup.figure(_heat_maps(surfaces), "Loss landscape by site") + table


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


# ---------------------------------------------------------------------------------------------- Hessian


def _hessian(found: Found) -> str:
    spectra, settings = found["spectra"], found["settings"]
    aid = markup.aid(
        "The curvature of the loss on training data of a site: the largest eigenvalues of its Hessian, their sum, and how "
        "many there are of which size. Smaller is flatter. ± is the standard error of a trace that random vectors estimate."
    )
    top = max(len(s["eigenvalues"]) for s in spectra)
    body = []
    for s in spectra:
        values = s["eigenvalues"]
        cells = _head(s["site"], model_title(s["model"]))
        cells += _number(values[0], 4) + _number(values[-1], 4) + _number(s["ratio"])
        error = number(s["trace_error"])
        cells += (
            f'<td class="num">{s["trace"]:.4g} ± {error:.2g}</td>'
            if error is not None
            else _number(s["trace"])
        )
        cells += _number(s["lowest"], 4)
        cells += f"<td>{'yes' if s['converged'] else 'no, after ' + str(s['steps']) + ' products'}</td>"
        body.append(cells)
    head = ["Site", "model", "λ1", f"λ{top}", f"λ1 / λ{top}", "trace", "lowest", "exact enough"]
    table = markup.table("Hessian by site", head, body, kind="wide")
    note = ""
    if not all(s["converged"] for s in spectra):
        note = markup.note(
            f"Eigenvalues marked so are not within {settings['tolerance']:g} of the largest; more products (--steps) help."
        )
    return aid + markup.figure(_densities(spectra), "Density of the Hessian's eigenvalues") + table + note


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


# ---------------------------------------------------------------------------------------------- CKA


def _cka(found: Found) -> str:
    parts = [
        markup.aid(
            "Linear centred kernel alignment: 1 for layers that are equal up to a rotation, a scale and a shift of their "
            "channels, 0 for unrelated ones. Between models the mean over layers; a row's models are those of the columns."
        )
    ]
    titles = {"parameters": "CKA of parameters (rows: output filters)", "activations": "CKA of activations"}
    names = [model_title(str(name)) for name in found["models"]]
    if len(names) > 1:
        for what, matrix in (found.get("means") or {}).items():
            parts.append(
                markup.table(
                    f"{titles[what]}, mean over layers",
                    ["Model", *names],
                    _heat(names, matrix),
                    kind="matrix heat",
                )
            )
    for what in found.get("means") or {}:
        parts.append(_by_layer(found, what, titles[what]))
    layers = found.get("layers")
    if layers:
        parts.append(
            markup.figure(
                _layer_matrix(layers["names"], layers["values"]),
                f"CKA of activations between the layers of {markup.text(model_title(layers['model']))}",
            )
        )
    return "".join(parts)


def _heat(names: Sequence[str], matrix: Sequence[Sequence[Any]]) -> list[str]:
    body = []
    for name, row in zip(names, matrix, strict=True):
        cells = [f'<th scope="row">{markup.text(name)}</th>']
        for value in map(number, row):
            cells.append(
                '<td class="blank">–</td>'
                if value is None
                else f'<td class="h{round(20 * min(max(value, 0), 1))}">{value:.3f}</td>'
            )
        body.append("".join(cells))
    return body


def _by_layer(found: Found, what: str, title: str) -> str:
    """Every pair with the first model, layer by layer, as lines."""
    first = found["models"][0]
    pairs = [p for p in found["pairs"] if p["first"] == first and p.get(what)]
    if not pairs:
        return ""
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
    caption = f"{title}, by layer: {markup.text(model_title(str(first)))} against each"
    body = [_head(layer) + "".join(_number(pair[what].get(layer)) for pair in pairs) for layer in layers]
    head = ["Layer", *(model_title(str(pair["second"])) for pair in pairs)]
    table = markup.details("Every layer", markup.table(f"{title} by layer", head, body, kind="numbers"))
    return markup.figure(_svg(drawn, bottom + 22, f"{title} by layer"), caption) + table


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


# ---------------------------------------------------------------------------------------------- membership


def _membership(found: Found) -> str:
    attacks, settings = found["attacks"], found["settings"]
    aid = markup.aid(
        "An attacker who has half of a model's training cases, ground truth and other data trains a shadow of the model and "
        "learns from it to tell training cases (members) from others. Accuracy of 0.5 in the mean, or AUROC of 0.5, is "
        "guessing; higher is a leak."
    )
    body = []
    for a in attacks:
        test, scores, cases = a["test"], a["target_scores"], a["cases"]
        cells = _head(model_title(a["target"]), f"{cases['hidden']} / {cases['outside']}")
        for key in ("accuracy_member", "accuracy_other", "accuracy", "f1_member", "f1_other", "f1", "auroc"):
            cells += markup.cell(number(test[key]), 3)
        cells += markup.cell(number(scores["members"]), 3) + markup.cell(number(scores["others"]), 3)
        cells += markup.cell(number(a["shadow"]), 3)
        body.append(cells)
    head = [
        "Target",
        "cases",
        "acc. members",
        "others",
        "mean",
        "F1: members",
        "others",
        "mean",
        "AUROC",
        "gap: members",
        "others",
        "shadow",
    ]
    notes = []
    if any(min(a["cases"]["hidden"], a["cases"]["outside"]) < 6 for a in attacks):
        notes.append("With fewer than 6 cases on a side the numbers say little.")
    if settings.get("pool") == "all" and any(str(a["target"]).startswith("local/") for a in attacks):
        notes.append(
            "The others come from other sites, too: an attack can tell sites instead of members. <code>--pool own</code> "
            "leaves these out."
        )
    classes = ", ".join(dict.fromkeys(c for a in attacks for c in a["classes"]))
    return (
        aid
        + markup.table("Membership attack", head, body, kind="wide")
        + _uncertainties(attacks)
        + "".join(markup.note(note) for note in notes)
        + markup.aid(
            f"Attacked by the classes {markup.text(classes)}. “Cases”: members and others in the test. “Gap”: the target's "
            "agreement with the truth on members and others; the difference is what the attack lives on. “Shadow”: its agreement with the target on cases that it "
            "did not see."
        )
    )


BINS = 20


def _uncertainties(attacks: Sequence[Found]) -> str:
    """The target's uncertainty of members and of others, a panel per target; "" for files of before it was kept."""
    known = [a for a in attacks if (a.get("uncertainty") or {}).get("members")]
    every = [v for a in known for side in ("members", "others") for v in a["uncertainty"][side]]
    if not every:
        return ""
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
    svg = _svg(drawn, bottom + 8, f"Uncertainty of members and others: {len(known)} targets")
    return markup.figure(
        svg,
        "Uncertainty of the target about members, its training cases, and others: the share of cases by uncertainty. Equal "
        "shapes give an attack nothing to go by.",
    )


_SIDES = {"members": "var(--c1)", "others": "var(--c0)"}

SECTIONS: Mapping[str, tuple[str, Callable[[Found], str]]] = {
    "landscape": ("Loss landscape", _landscape),
    "hessian": ("Hessian", _hessian),
    "cka": ("Similarity of models (CKA)", _cka),
    "membership": ("Membership inference", _membership),
}
"""kind -> its heading, and what draws it."""


# ---------------------------------------------------------------------------------------------- SVG


def _svg(drawn: Sequence[str], height: float, told: str) -> str:
    return f'<svg class="plot" role="img" aria-label="{escape(told)}" viewBox="0 0 {WIDTH} {height:.0f}">{"".join(drawn)}</svg>'


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
