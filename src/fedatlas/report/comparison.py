"""The tables of a comparison, as Markdown and as a page."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

MEAN = "mean"
LOWER = frozenset({"hd95", "hd", "asd", "ece", "ece_mass", "brier"})
"""Metrics of which the lower value is the better one."""
MILLIMETRES = frozenset({"hd95", "hd", "asd"})
NOT_RUN, NOT_DEFINED = "not run", "–"


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows, as Markdown."""


def markdown(found: Mapping[str, Any]) -> str:
    """All tables of what `compare.collect` found, and what they rest on."""
    parts = [part if isinstance(part, str) else _table(*part) for part in _parts(found)]
    return "\n\n".join(parts) + "\n"


def html(found: Mapping[str, Any]) -> str:
    """The same as a page of its own, with the critical-difference diagram; it needs no network."""
    parts = [_html(part) if isinstance(part, str) else _html_table(*part) for part in _parts(found)]
    name = escape(found["name"] + (f", {found['profile']}" if found["profile"] else ""))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
        f"<main><h1>{name}</h1>\n{chr(10).join(parts)}\n{critical_difference(found['ranks'])}</main></html>\n"
    )


def _parts(found: Mapping[str, Any]) -> list[str | Table]:
    parts: list[str | Table] = [_title(found), _values(found), *_printed(found), *_differences(found)]
    parts += _ranks(found)
    for other in found["tables"]:
        parts += [_title(other), _values(other)]
    return [part for part in [*parts, _footer(found)] if part]


def _title(found: Mapping[str, Any]) -> str:
    which = {
        None: "",
        True: ", classes that the case's own site annotates",
        False: ", classes that it does not",
    }
    sites = f", sites {', '.join(found['sites'])}" if found["sites"] else ""
    return (
        f"**{found['metric']}, {found['split']} cases, model {found['model']}{which[found['known']]}{sites}**"
    )


def _values(found: Mapping[str, Any]) -> Table:
    """Rows: arms; columns: classes and their mean."""
    columns = [*found["classes"], MEAN]
    rows = {arm: {name: of_column(of_arm, name) for name in columns} for arm, of_arm in found["arms"].items()}
    best = {name: _best(found, {arm: row[name] for arm, row in rows.items()}) for name in columns}
    lines = []
    for arm, row in rows.items():
        done, wanted = len(found["arms"][arm]["seeds"]), len(found["seeds"])
        cells = []
        for name in columns:
            text = _spread(row[name], found["metric"]) if done else NOT_RUN
            cells.append(f"**{text}**" if text in best[name] and done == wanted else text)
        lines.append([arm, str(done) if done == wanted else f"{done} of {wanted}", *cells])
    return ["arm", "seeds", *columns], lines


def of_column(arm: Mapping[str, Any], name: str) -> list[float]:
    """The defined values of a class, or of the mean, one per finished seed."""
    values = arm["mean"] if name == MEAN else arm["per_class"].get(name, [])
    return [value for value in values if value is not None]


def _best(found: Mapping[str, Any], column: Mapping[str, list[float]]) -> set[str]:
    """The best text of a column among arms of which every seed is finished; several where they read alike."""
    whole = {
        arm: values
        for arm, values in column.items()
        if values and len(found["arms"][arm]["seeds"]) == len(found["seeds"])
    }
    if len(whole) < 2:
        return set()
    means = {arm: round(float(np.mean(values)), _digits(found["metric"])) for arm, values in whole.items()}
    top = (min if found["metric"] in LOWER else max)(means.values())
    return {_spread(whole[arm], found["metric"]) for arm, mean in means.items() if mean == top}


def _digits(metric: str) -> int:
    return 1 if metric in MILLIMETRES else 3


def _spread(values: Sequence[float], metric: str) -> str:
    """Mean ± SD (n-1)."""
    if not values:
        return NOT_DEFINED
    digits = _digits(metric)
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def _printed(found: Mapping[str, Any]) -> list[str | Table]:
    """Published numbers, ours in brackets."""
    if not found["printed"]:
        return []
    listed = dict.fromkeys(name for values in found["printed"].values() for name in values)
    columns = [name for name in [*found["classes"], MEAN] if name in listed]
    columns += [name for name in listed if name not in columns]
    digits, lines = _digits(found["metric"]), []
    for arm in found["arms"]:
        cells = []
        for name in columns:
            value = found["printed"].get(arm, {}).get(name)
            ours = of_column(found["arms"][arm], name)
            mine = f"{np.mean(ours):.{digits}f}" if ours else NOT_RUN
            cells.append(NOT_DEFINED if value is None else f"{value:.{digits}f} ({mine})")
        if arm in found["printed"]:
            lines.append([arm, *cells])
    return ["Printed numbers, ours in brackets:", (["arm", *columns], lines)]


def _differences(found: Mapping[str, Any]) -> list[str | Table]:
    """Each arm against the first."""
    if not found["differences"]:
        return []
    of_images, digits = bool(found["bootstrap"]), _digits(found["metric"])
    first = next(iter(found["arms"]))
    lines = []
    for arm, apart in found["differences"].items():
        if not apart["n"]:
            lines.append([arm, "0", *[NOT_RUN] * (5 if of_images else 3)])
            continue
        tests = [_p(apart[test]) for test in ("wilcoxon", "t")]
        line = [arm, str(apart["n"]), f"{apart['mean']:+.{digits}f}", *tests]
        lines.append(line + (_interval_cells(found["bootstrap"].get(arm)) if of_images else []))
    head = ["arm", "cells", f"difference to {first}", "p Wilcoxon", "p t"]
    head += ["difference, 95 % interval by patient", "over"] if of_images else []
    told = [
        f"Differences to {first}, paired by site, class and seed (a cell). p values are Holm-adjusted over the arms; fewer "
        "than 6 cells have none. Cells of one site share its test cases over classes and seeds, which these tests take for "
        "independent: their p values are too small."
    ]
    if of_images:
        told.append(
            "The interval resamples patients, the same ones in all cells, with the trained models held fixed. It is of the "
            "mean over cells where each has at least 5 patients with and 5 without the class; else of the mean over "
            "classes and seeds, with the images of all sites put together, over the classes that then have as many."
        )
    reasons = [
        f"{arm}: no interval: {interval['reason']}"
        for arm, interval in found["bootstrap"].items()
        if interval["reason"]
    ]
    return [" ".join(told), (head, lines), "\n".join(reasons)]


def _ranks(found: Mapping[str, Any]) -> list[str | Table]:
    """Mean ranks and the critical difference, as a sentence."""
    ranks = found["ranks"]
    if len(ranks["mean"]) < 2:
        return []
    told = ", ".join(f"{arm} {rank:.2f}" for arm, rank in ranks["mean"].items())
    text = (
        f"Mean rank of the arms of which every seed is finished, over {ranks['n']} cells of site and class, each the "
        f"mean over seeds (1 is best): {told}."
    )
    if ranks["friedman"] is not None:
        text += f" Friedman p {_p(ranks['friedman'])}."
    if ranks["critical"] is not None:
        text += f" Critical difference (Nemenyi, 0.05): {ranks['critical']:.2f}."
    return [text]


def _p(value: float | None) -> str:
    if value is None:
        return NOT_DEFINED
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _interval_cells(interval: Mapping[str, Any] | None) -> list[str]:
    if interval is None or interval.get("low") is None:
        return [NOT_DEFINED, NOT_DEFINED]
    share = interval["undefined"] / interval["draws"]
    lost = f"; {share:.0%} of resamples without a value" if share >= 0.005 else ""
    value = f"{interval['value']:+.3f} ({interval['low']:+.3f} to {interval['high']:+.3f}{lost})"
    over = f"{interval['columns']} cells"
    if interval["unit"] == "together":
        over = f"sites together: {', '.join(interval['over'])}"
    return [value, over]


def _footer(found: Mapping[str, Any]) -> str:
    """How the numbers were made."""
    hours = sum(arm["hours"] for arm in found["arms"].values())
    commits = dict.fromkeys(c for arm in found["arms"].values() for c in arm["commits"])
    made = ", ".join(f"`{commit[:9]}{'+' if commit.endswith('+') else ''}`" for commit in commits if commit)
    budgets: dict[str, list[str]] = {}
    for arm, budget in found["budget"].items():
        unit = f"{budget['steps']} steps" if budget["steps"] is not None else f"{budget['epochs']:g} epochs"
        budgets.setdefault(f"{budget['rounds']} rounds of {unit}", []).append(arm)
    told = "; ".join(
        text if len(budgets) == 1 else f"{', '.join(arms)}: {text}" for text, arms in budgets.items()
    )
    lines = [
        f"`{found['command']}`",
        "",
        "Mean ± SD over seeds of the mean over sites; *mean*: over classes. Bold: the best among arms of which "
        "every seed is finished.",
        f"Seeds {', '.join(map(str, found['seeds']))}; {told}"
        + (f"; profile {found['profile']}" if found["profile"] else "")
        + f". {hours:.2f} hours of rounds; made by {made or 'no known commit'}.",
    ]
    for arm, of_arm in found["arms"].items():
        if of_arm["undefined"]:
            lines.append(
                f"{arm}: {of_arm['undefined']} cells have no value where another arm has one; its means are over the rest."
            )
        lines += [f"{arm}: not counted: {problem.splitlines()[0]}" for problem in of_arm["problems"]]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


STYLE = """
:root { color-scheme: light dark; --line: #dfe4ea; --ink: #1b2128; --paper: #ffffff; --accent: #1f5fae }
@media (prefers-color-scheme: dark) { :root { --line: #2d3540; --ink: #e8ecf1; --paper: #14181f; --accent: #7fb4f5 } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem }
main { max-width: 75rem; margin: auto }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif }
svg line { stroke: var(--ink) }
svg .group { stroke: var(--accent); stroke-width: 4 }
"""


def _html(text: str) -> str:
    return f"<p>{_inline(text)}</p>"


def _inline(text: str) -> str:
    """Bold, emphasis, code and line breaks of our own Markdown."""
    text = escape(text, quote=False)
    for mark, tag in ((r"\*\*", "b"), (r"\*", "em"), ("`", "code")):
        text = re.sub(f"{mark}(.+?){mark}", rf"<{tag}>\1</{tag}>", text)
    return text.replace("\n", "<br>\n")


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{_inline(row[0])}</th>{"".join(f"<td>{_inline(c)}</td>" for c in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def critical_difference(ranks: Mapping[str, Any]) -> str:
    """The critical-difference diagram as SVG: arms at their mean ranks, bars join arms that do not differ. "" for
    fewer than two arms."""
    names = list(ranks["mean"])
    if len(names) < 2:
        return ""
    left, width, row = 190, 420, 20
    low, high = 1, len(names)

    def x(rank: float) -> float:
        return left + width * (rank - low) / (high - low)

    groups = ranks["groups"]
    axis, under = 60, 60 + 14 + 9 * len(groups)
    half = (len(names) + 1) // 2
    parts = [_line(x(low), axis, x(high), axis)]
    for tick in range(low, high + 1):
        parts += [_line(x(tick), axis - 6, x(tick), axis), _text(x(tick), axis - 10, str(tick), "middle")]
    if ranks["critical"] is not None:
        end = x(low) + width * ranks["critical"] / (high - low)
        parts += [_line(x(low), 22, end, 22), _line(x(low), 18, x(low), 26), _line(end, 18, end, 26)]
        parts.append(_text(x(low), 12, f"critical difference {ranks['critical']:.2f}", "start"))
    for index, group in enumerate(groups):
        y = axis + 10 + 9 * index
        ends = [x(ranks["mean"][group[end]]) for end in (0, -1)]
        parts.append(_line(ends[0] - 3, y, ends[1] + 3, y, "group"))
    for index, name in enumerate(names):
        here, best = x(ranks["mean"][name]), index < half
        y = under + row * (index if best else len(names) - 1 - index) + row / 2
        to = left - 10 if best else left + width + 10
        parts += [_line(here, axis, here, y), _line(here, y, to, y)]
        label = f"{name} {ranks['mean'][name]:.2f}"
        parts.append(_text(to - 5 if best else to + 5, y + 4, label, "end" if best else "start"))
    wide = max(left + width + 200, left + width * ((ranks["critical"] or 0) / (high - low)) + 20)
    told = "Critical-difference diagram of mean ranks"
    return (
        f'<div class="scroll"><svg role="img" aria-label="{told}" width="{wide:.0f}" height="{under + row * half + 10}">'
        f"<title>{told}</title>{''.join(parts)}</svg></div>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<line{of} x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
