"""The tables of a comparison, as Markdown and as a page."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from fedatlas.report.figures.arms import rank_diagram
from fedatlas.report.markup import render
from fedatlas.report.tables import Metric, described

MEAN, EXCLUDE, INCLUDE = "mean", "exclude*", "include*"
BY_CASE = ("case", "patient")
"""What is paired and resampled where cases are scored; else cells are paired."""
LOWER = frozenset({"hd95", "hd", "asd", "rve", "hd_rows", "ece", "ece_mass", "brier"})
"""Metrics of which the lower value is the better one."""
MILLIMETRES = frozenset({"hd95", "hd", "asd"})
NOT_RUN, NOT_DEFINED = "not run", "–"


class Table(NamedTuple):
    """Head and rows, as Markdown. groups: what several neighbouring columns share, "" for nothing. sites: is that a
    site, which is named even where it is called as its column is?"""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    groups: Sequence[str] = ()
    sites: bool = False


def markdown(found: Mapping[str, Any], *, folded: bool = False) -> str:
    """All tables of what `compare.collect` found, and what they rest on. folded: as a page shows them, where a click opens what stands
    below the first table and its differences."""
    parts = {
        name: [part if isinstance(part, str) else _table(part) for part in of]
        for name, of in _parts(found).items()
    }
    below = {name: parts.pop(name) for name in _BELOW if name in parts} if folded else {}
    shown = [part for of in parts.values() for part in of]
    if below:
        titles = (
            [other["title"] or heading(other) for other in found["tables"]]
            if "further-means" in below
            else []
        )
        titles += [title for name, title in _BELOW.items() if title and name in below]
        told = str(escape("; ".join(titles))).replace("&#39;", "'")
        opener = f'<details markdown="1">\n<summary>Further tables: {told}</summary>'
        shown += [opener, *(part for of in below.values() for part in of), "</details>"]
    return "\n\n".join(shown) + "\n"


_BELOW = {
    "further-means": "",
    "forgetting": "forgetting",
    "swings": "validation over the rounds",
    "flatness": "flatness",
    "costs": "costs",
}
"""Parts that are folded -> what they are called; further means have their own titles."""


class Section(NamedTuple):
    """A part of a comparison's page. claim: what it repeats of a paper, plain text; content: HTML."""

    name: str
    title: str
    claim: str
    content: str


class Claims(NamedTuple):
    """What a page repeats of a paper. there: name of a table or figure -> section -> its title; without: name -> why the page
    does not have it."""

    paper: str
    there: Mapping[str, Mapping[str, str]]
    without: Mapping[str, str]


def html(
    found: Mapping[str, Any],
    *,
    verdict: Sequence[str] = (),
    claims: Claims | None = None,
    captions: Mapping[str, str] | None = None,
    sections: Sequence[Section] = (),
) -> str:
    """The same as a page of its own, with critical-difference diagrams; it needs no network. captions: means, forgetting,
    costs, flatness -> what these tables repeat of a paper, plain text; sections: what stands below the tables."""
    return render(
        "comparison.html",
        name=found["name"] + (f", {found['profile']}" if found["profile"] else ""),
        verdict=verdict,
        claims=claims,
        parts=_parts(found),
        captions=captions or {},
        inline=_inline,
        groupby=groupby,
        ranks=[rank_diagram(family, f"ranks-{place}") for place, family in enumerate(found["ranks"])],
        sections=sections,
    )


def _parts(found: Mapping[str, Any]) -> dict[str, list[str | Table]]:
    """The tables by the part of the page that they are, in order."""
    parts: dict[str, list[str | Table]] = {
        "means": _means(found),
        "differences": [*_differences(found), *map(_ranks, found["ranks"])],
        "forgetting": _forgetting(found),
        "further-means": [part for other in found["tables"] for part in _means(other)],
        "swings": _curves(found),
        "flatness": _flatness(found),
        "costs": _costs(found),
        "made": [_footer(found)],
    }
    named: set[str] = set()
    return {
        name: kept
        for name, of in parts.items()
        if (kept := [short for part in of if part for short in _without_not_run(part, named)])
    }


def _without_not_run(part: str | Table, named: set[str]) -> list[str | Table]:
    """A table without rows in which nothing was run, and a line that names these, unless all of them are in `named`, to which they are
    added; all other parts as they are."""
    if isinstance(part, str):
        return [part]
    empty = [row[0] for row in part.rows if _is_not_run(row)]
    line = f"Not run ({len(empty)} of {len(part.rows)} arms): {', '.join(empty)}."
    if empty and len(empty) == len(part.rows):
        return [line]
    shown = part._replace(rows=[row for row in part.rows if not _is_not_run(row)])
    new = not named.issuperset(empty)
    named.update(empty)
    return [shown, line] if new else [shown]


def _is_not_run(row: Sequence[str]) -> bool:
    cells = [cell for cell in row[1:] if not cell.startswith("0 of ") and cell != "0"]
    return bool(cells) and set(cells) == {NOT_RUN}


def _means(found: Mapping[str, Any]) -> list[str | Table]:
    parts: list[str | Table] = [f"**{heading(found)}**", _values(found)]
    if any(column["starred"] for column in found["columns"]):
        parts.append(
            "\\*: not annotated at that site, whose cases test it only. *exclude\\**: the mean over the columns without "
            "a star; *include\\**: over all."
        )
    return [*parts, " ".join(_told(found)), _lacking(found), *_printed(found)]


def _lacking(found: Mapping[str, Any]) -> str:
    """Which arms have no value where another has one; "" for none."""
    short = {arm: of_arm for arm, of_arm in found["arms"].items() if of_arm["lacking"]}
    if not short:
        return ""
    why = " (an empty prediction has no distance)" if found["metric"] in MILLIMETRES else ""
    told = ", ".join(f"{arm} {of['lacking']} of {of['values']}" for arm, of in short.items())
    text = f"Values of site, case and class that an arm lacks and another has{why}: {told}. Means are over the rest, and such a mean is never bold."
    if cells := [f"{arm} {of['undefined']}" for arm, of in short.items() if of["undefined"]]:
        text += f" Of a class at a site all values are lacking in a seed: {', '.join(cells)} times."
    return text


def _told(found: Mapping[str, Any]) -> list[str]:
    """What cells and marks of a table mean where its layout is not the default one."""
    layout, told = found["layout"], []
    if layout["cells"] == "cases":
        told.append("Cells: mean (SD) over cases, each the mean over seeds.")
    if layout["average"] == "sites":
        name = ", ".join(f"*{_starred(_average_title(found, key))}*" for key in _averages(found))
        told.append(f"{name}: the mean over sites of the mean over a site's classes.")
    if found["own"]:
        arms = ", ".join(found["own"])
        told.append(
            f"{arms}: every site's own local model, on the classes that the site annotates: on its own cases and on those of "
            "sites that did not train."
        )
    return [*told, *_tests(found)]


def _tests(found: Mapping[str, Any]) -> list[str]:
    """What was tested, what was not, and what was left out."""
    tests, layout = found.get("tests"), found["layout"]
    if tests is None:
        return []
    adjusted = (
        ", Holm-adjusted over these tests"
        if layout["correction"] == "holm"
        else ", not corrected for their number"
    )
    told = []
    if tests["made"]:
        told.append(
            f"Underlined: p < 0.05 in the two-sided paired t test over the {tests['unit']}s of a cell against {layout['against']}; "
            f"{tests['made']} tests{adjusted}."
        )
    few: dict[str, dict[str, None]] = {}
    for of_row in tests["few"].values():
        for key, count in of_row.items():
            few.setdefault(key, {})[str(count)] = None
    if few and not tests["made"]:
        told.append(f"Nothing is tested: no cell has 6 pairs of {tests['unit']}s.")
    elif few:
        cells = ", ".join(f"{key} {' or '.join(counts)}" for key, counts in few.items())
        told.append(f"Not tested, with fewer than 6 pairs of {tests['unit']}s: {cells}.")
    if tests["lost"]:
        rows = "; ".join(
            f"{row} {', '.join(f'{key} {count}' for key, count in of_row.items())}"
            for row, of_row in tests["lost"].items()
        )
        told.append(
            f"{tests['unit'].capitalize()}s left out of the pairs, as only one of the two models has a value there: {rows}."
        )
    return told


def heading(found: Mapping[str, Any]) -> str:
    """What a table of means is of, as plain text."""
    which = {
        None: "",
        True: ", classes that the case's own site annotates",
        False: ", classes that it does not",
    }
    first = next(iter(found["arms"]))
    if found["known"] is not None and found.get("known_of", first) != first:
        which[found["known"]] += f" (as in {found['known_of']}, since {first} is not finished)"
    sites = f", sites {', '.join(found['sites'])}" if found["sites"] else ""
    sites += ", each site by models trained without it" if found.get("left_out") else ""
    if found.get("folds"):
        sites += f", each case by models trained without it ({found['folds']} folds)"
    title = f"{found['title']}: " if found["title"] else ""
    unit = " in %" if found["layout"]["percent"] else ""
    after = ", after post-processing" if found.get("postprocess") else ""
    return (
        f"{title}{found['metric']}{unit}, {found['split']} cases, model {found['model']}{after}{which[found['known']]}"
        f"{sites}"
    )


def _averages(found: Mapping[str, Any]) -> list[str]:
    return [EXCLUDE, INCLUDE] if any(column["starred"] for column in found["columns"]) else [MEAN]


def _values(found: Mapping[str, Any]) -> Table:
    """Rows: arms, and below an arm of local models each of them; columns: those of the table, and their mean."""
    columns = [*(column["key"] for column in found["columns"]), *_averages(found)]
    rows = _rows(found, columns)
    best = _best(found, columns, rows)
    wanted, lines = len(found["seeds"]), []
    for row, values in rows.items():
        done = _seeds_of(found, row)
        cells = [_cell(found, row, key, values[key], best[row, key]) for key in columns]
        lines.append([row, str(done) if done == wanted else f"{done} of {wanted}", *cells])
    titles, groups = _heads(found, columns)
    return Table(["arm", "seeds", *titles], lines, ["", "", *groups] if any(groups) else (), _of_sites(found))


def _rows(found: Mapping[str, Any], columns: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Row -> column -> values, one per seed. An arm of local models has its averages alone, if any, and a row for each
    model below it, which holds the rest."""
    rows = {}
    for arm, of_arm in found["arms"].items():
        own = {row: of_row for row, of_row in found["rows"].items() if row.partition("/")[0] == arm}
        kept = _averages(found) if own else columns
        values = {key: of_column(of_arm, key) if key in kept else [] for key in columns}
        if not own or any(values.values()):
            rows[arm] = values
        rows |= {row: {key: of_column(of_row, key) for key in columns} for row, of_row in own.items()}
    return rows


def _seeds_of(found: Mapping[str, Any], row: str) -> int:
    """How many seeds of a row are finished."""
    return len(found["arms"][row.partition("/")[0]]["seeds"])


def _cell(found: Mapping[str, Any], row: str, key: str, values: Sequence[float], best: float | None) -> str:
    """Bold: the best; underlined: significant."""
    done, (scale, digits) = _seeds_of(found, row), unit(found)
    if not done:
        return NOT_RUN
    if not values:
        below = any(name.startswith(f"{row}/") for name in found["rows"])
        return "" if below else NOT_DEFINED
    text, after = _spread(values, scale, digits), ""
    cases = _cases(found, row, key)
    if cases is not None:
        text = f"{scale * cases['mean']:.{digits}f}"
        after = "" if cases["sd"] is None else f" ({scale * cases['sd']:.{digits}f})"
    p = found["tests"]["p"].get(row, {}).get(key) if found["layout"]["against"] else None
    if p is not None and p < 0.05:
        text = f"<ins>{text}</ins>"
    bold = is_whole(found, row, key) and best == round(scale * _mean(found, row, key, values), digits)
    return (f"**{text}**" if bold else text) + after


def _cases(found: Mapping[str, Any], row: str, key: str) -> Mapping[str, Any] | None:
    """The cases of a cell, where the layout prints their mean and SD and the cell has a value."""
    cases = found["cases"].get(row, {}).get(key) if found["layout"]["cells"] == "cases" else None
    return None if cases is None or cases["mean"] is None else cases


def _mean(found: Mapping[str, Any], row: str, key: str, values: Sequence[float]) -> float:
    """The mean that a cell prints: over its cases, or of its values, one per seed."""
    cases = _cases(found, row, key)
    return float(np.mean(values)) if cases is None else cases["mean"]


def _heads(found: Mapping[str, Any], keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Titles and groups of columns by their keys; those of published numbers only are their own title."""
    known = {column["key"]: column for column in found["columns"]}
    titles, groups = [], []
    for key in keys:
        title = _average_title(found, key)
        column = known.get(key, {"title": title, "group": "", "starred": False})
        titles.append(_starred(column["title"]) + ("\\*" if column["starred"] else ""))
        groups.append(_starred(column["group"]))
    return titles, groups


def _of_sites(found: Mapping[str, Any]) -> bool:
    """Whether the groups of the columns are sites."""
    return found["layout"]["columns"] == "site-class" and found["layout"]["group"] != "organ"


def _average_title(found: Mapping[str, Any], key: str) -> str:
    return "global" if key == MEAN and found["layout"]["average"] == "sites" else key


def _starred(text: str) -> str:
    """Text in which a star is one."""
    return text.replace("*", "\\*")


def of_column(arm: Mapping[str, Any], key: str) -> list[float]:
    """The defined values of a column or average, one per finished seed."""
    return list(_by_seed(arm, key).values())


def _by_seed(arm: Mapping[str, Any], key: str) -> dict[int, float]:
    """Seed -> the value of a column or average, where it is defined."""
    if key in (MEAN, INCLUDE):
        values = arm["mean"]
    elif key == EXCLUDE:
        values = arm["exclude"]
    else:
        values = arm["per_class"].get(key) or arm["per_cell"].get(key)
    if not values:
        return {}
    return {seed: value for seed, value in zip(arm["seeds"], values, strict=True) if value is not None}


def _best(
    found: Mapping[str, Any], columns: Sequence[str], rows: Mapping[str, Mapping[str, list[float]]]
) -> dict[tuple[str, str], float | None]:
    """Row and column -> the best mean there, as it is printed, among the rows of that family of arms that are whole there; None for
    fewer than two."""
    (scale, digits), of_rows = unit(found), {}
    for family in found["families"]:
        there = [row for row in rows if row.partition("/")[0] in family]
        for key in columns:
            whole = [
                round(scale * _mean(found, row, key, rows[row][key]), digits)
                for row in there
                if rows[row][key] and is_whole(found, row, key)
            ]
            best = (min if found["metric"] in LOWER else max)(whole) if len(whole) > 1 else None
            of_rows |= {(row, key): best for row in there}
    return of_rows


def is_whole(found: Mapping[str, Any], row: str, key: str) -> bool:
    """Whether a row can be the best in a column: every seed is finished, and it has a value wherever another row has one, of every case,
    in the column of a class at every site, in a mean over columns in every cell."""
    if _seeds_of(found, row) < len(found["seeds"]):
        return False
    everyone = found["arms"] | found["rows"]
    at_sites = {cell for of in everyone.values() for cell in of["per_cell"] if cell.partition("/")[2] == key}
    lacking = set(found["arms"].get(row, {}).get("lacking_in", ()))
    if lacking and (key in (MEAN, EXCLUDE, INCLUDE) or lacking & {key, *at_sites}):
        return False
    there = {name: _there(of, [key, *at_sites]) for name, of in everyone.items()}
    return set().union(*there.values()) == there[row] != set()


def _there(arm: Mapping[str, Any], keys: Iterable[str]) -> set[tuple[str, int]]:
    """Column and seed of every value that an arm has."""
    return {(key, seed) for key in keys for seed in _by_seed(arm, key)}


def unit(found: Mapping[str, Any]) -> tuple[float, int]:
    """What values are multiplied by, and how many decimals are printed."""
    layout = found["layout"]
    digits = 2 if layout["percent"] else 1 if found["metric"] in MILLIMETRES else 3
    return 100.0 if layout["percent"] else 1.0, digits if layout["decimals"] is None else layout["decimals"]


def of_table(found: Mapping[str, Any]) -> Metric:
    """How figures print the metric of a table, in the table's unit."""
    metric = described(found["metric"], pixels=found["pixels"])
    return metric._replace(unit="%", decimals=1) if found["layout"]["percent"] else metric


def _spread(values: Sequence[float], scale: float, digits: int) -> str:
    """Mean ± SD (n-1)."""
    spread = f" ± {scale * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * np.mean(values):.{digits}f}{spread}"


def _printed(found: Mapping[str, Any]) -> list[str | Table]:
    """Published numbers, ours in brackets."""
    if not found["printed"]:
        return []
    listed = dict.fromkeys(name for values in found["printed"].values() for name in values)
    columns = [
        name
        for name in [*(column["key"] for column in found["columns"]), *_averages(found)]
        if name in listed
    ]
    columns += [name for name in listed if name not in columns]
    (scale, digits), lines = unit(found), []
    listed_rows = [row for arm in found["arms"] for row in found["printed"] if row.partition("/")[0] == arm]
    for row in listed_rows:
        of_row = found["arms"].get(row) or found["rows"].get(row)
        cells = []
        for name in columns:
            value, ours = found["printed"][row].get(name), of_column(of_row, name) if of_row else []
            mine = NOT_DEFINED if _seeds_of(found, row) else NOT_RUN
            if ours:
                mine = f"{scale * np.mean(ours):.{digits}f}"
            cells.append(NOT_DEFINED if value is None else f"{_as_printed(value, digits)} ({mine})")
        lines.append([row, *cells])
    titles, groups = _heads(found, columns)
    return [
        "Printed numbers, ours in brackets:",
        Table(["arm", *titles], lines, ["", *groups] if any(groups) else (), _of_sites(found)),
    ]


def _as_printed(value: float, digits: int) -> str:
    """With as many decimals as it was given, and no fewer than ours."""
    given = len(repr(value).partition(".")[2])
    return f"{value:.{max(digits, given)}f}"


def _differences(found: Mapping[str, Any]) -> list[str | Table]:
    """Each arm against its reference."""
    if not found["differences"]:
        return []
    references = list(dict.fromkeys(found["compared"].values()))
    by_case = found.get("pairs") in BY_CASE
    told, head, cells_of = (_by_case if by_case else _by_cell)(found, references)
    ran = {arm for arm, of_arm in found["arms"].items() if of_arm["seeds"]}
    lines, alone = [], {}
    for arm, apart in found["differences"].items():
        reference = found["compared"][arm]
        if not apart["n"] and arm in ran and reference not in ran:
            alone.setdefault(reference, []).append(arm)
            continue
        name = arm if len(references) == 1 else f"{arm} - {reference}"
        nothing = [NOT_DEFINED if arm in ran else NOT_RUN] * (len(head) - 2)
        lines.append([name, str(apart["n"]), *(cells_of(arm) if apart["n"] else nothing)])
    if alone and not lines:
        return [_without_reference(alone)]
    reasons = [
        f"{arm}: no interval: {interval['reason']}"
        for arm, interval in found["bootstrap"].items()
        if not by_case and interval["reason"]
    ]
    return [told, Table(head, lines), "\n".join(reasons), _without_reference(alone)]


Differences = tuple[str, list[str], Callable[[str], list[str]]]
"""What the differences are, the heads of their table, and an arm -> the cells of its line behind the first two."""


def _by_case(found: Mapping[str, Any], references: Sequence[str]) -> Differences:
    """Differences whose interval and tests are over cases, or patients."""
    drawn, (scale, digits) = found["pairs"], unit(found)
    of, title = _compared_to(references)
    told = (
        f"Differences to {of}: of the means above over what both arms have, with an interval over resamples of the "
        f"{drawn}s of every site, the trained models held fixed. The tests pair by {drawn}, each the mean of its differences "
        f"over its {'cases, ' if drawn == 'patient' else ''}classes and the seeds; p values are Holm-adjusted over the arms. Fewer than 6 {drawn}s have neither, a single "
        f"{drawn} of a site, or of a column, has no interval."
    )

    def cells(arm: str) -> list[str]:
        interval = found["bootstrap"][arm]
        value = f"{scale * interval['value']:+.{digits}f}"
        return [value, _range(interval, scale, digits), *_p_values(found["differences"][arm])]

    return told, ["arm", f"{drawn}s", title, f"95 % interval by {drawn}", "p Wilcoxon", "p t"], cells


def _by_cell(found: Mapping[str, Any], references: Sequence[str]) -> Differences:
    """Differences whose tests are over cells of site, class and seed; the interval, where images have one, is over patients."""
    of_images, (scale, digits) = bool(found["bootstrap"]), unit(found)
    of, title = _compared_to(references)
    told = (
        f"Differences to {of}, paired by site, class and seed (a cell). p values are Holm-adjusted over the arms; fewer "
        "than 6 cells have none. Cells of one site share its test cases over classes and seeds, which these tests take for "
        "independent: their p values are too small."
    )
    if of_images:
        told += (
            " The interval resamples patients, the same ones in all cells, with the trained models held fixed. It is of the "
            "mean over cells where each that has a value has at least 5 patients with and 5 without the class; else of the mean over "
            "classes and seeds, with the images of the sites that have a value put together, over the classes that then have as many."
        )

    def cells(arm: str) -> list[str]:
        apart = found["differences"][arm]
        interval = _interval_cells(found["bootstrap"].get(arm), scale, digits) if of_images else []
        return [f"{scale * apart['mean']:+.{digits}f}", *_p_values(apart), *interval]

    of_interval = ["difference, 95 % interval by patient", "over"] if of_images else []
    return told, ["arm", "cells", title, "p Wilcoxon", "p t", *of_interval], cells


def _compared_to(references: Sequence[str]) -> tuple[str, str]:
    """The reference of all arms, and the head of the column of differences to it."""
    if len(references) > 1:
        return "the arm that is named", "difference"
    return references[0], f"difference to {references[0]}"


def _p_values(apart: Mapping[str, Any]) -> list[str]:
    return [_p(apart[test]) for test in ("wilcoxon", "t")]


def _without_reference(alone: Mapping[str, Sequence[str]]) -> str:
    """alone: reference that was not run -> the arms that were. "" for none."""
    return "\n".join(
        f"{', '.join(arms)}: no difference to {reference}, which was not run."
        for reference, arms in alone.items()
    )


def _range(interval: Mapping[str, Any], scale: float, digits: int) -> str:
    if interval["low"] is None:
        return NOT_DEFINED
    return f"{scale * interval['low']:+.{digits}f} to {scale * interval['high']:+.{digits}f}"


LOCAL = {"last": "of the last round", "best": "of its best round on its own validation cases"}
"""evaluation.local -> which local models those are."""


def _forgetting(found: Mapping[str, Any]) -> list[str | Table]:
    """Local models on the classes that their sites do not annotate."""
    of_arms, metric = found["forgetting"], found["metric"]
    if not of_arms:
        return []
    drawn = found["pairs"]
    scale, digits = unit(found)
    owners = list(dict.fromkeys(owner for of_arm in of_arms.values() for owner in of_arm["sites"]))

    def signed(value: float | None) -> str:
        return NOT_DEFINED if value is None else f"{scale * value:+.{digits}f}"

    lines = []
    for arm in found["arms"]:
        of_arm = of_arms.get(arm)
        if of_arm is None:
            done = bool(found["arms"][arm]["seeds"])
            lines.append([arm, *[NOT_DEFINED if done else NOT_RUN] * (4 + len(owners))])
            continue
        both = [f"{scale * of_arm[which]:.{digits}f}" for which in ("global", "local")]
        apart = [signed(of_arm["value"]), _range(of_arm, scale, digits)]
        lines.append([arm, *both, *apart, *(signed(of_arm["sites"].get(owner)) for owner in owners)])
    kinds: dict[str, list[str]] = {}
    for arm, of_arm in of_arms.items():
        kinds.setdefault(LOCAL[of_arm["models"]], []).append(arm)
    which = "; ".join(
        kind if len(kinds) == 1 else f"{', '.join(arms)}: {kind}" for kind, arms in kinds.items()
    )
    told = (
        f"Forgetting: {metric} of each site's local model ({which}) on the classes that the site does not "
        "annotate, and of the global model on the same: the mean over seeds, local models, classes and the sites of the "
        f"test cases, where the class is there; the interval resamples {drawn}s. On the right the difference of every local "
        "model alone."
    )
    head = ["arm", "global", "local", "local - global", f"95 % interval by {drawn}"]
    return [told, Table([*head, *(f"of {owner}" for owner in owners)], lines)]


def _curves(found: Mapping[str, Any]) -> list[str | Table]:
    """How far validation came, and how much it swung."""
    of_arms = found.get("curves", {})
    if not of_arms:
        return []
    metric = next(iter(of_arms.values()))["metric"]
    digits = 1 if metric in MILLIMETRES else 3
    best = min if metric in LOWER else max
    lines = []
    for arm in found["arms"]:
        told = of_arms.get(arm)
        if told is None:
            lines.append([arm, *[NOT_DEFINED if found["arms"][arm]["seeds"] else NOT_RUN] * 5])
            continue
        counts = dict.fromkeys(str(len(values)) for values in told["values"])
        ends = [[best(values) for values in told["values"]], [values[-1] for values in told["values"]]]
        swings = [told["change"], told["fall"]]
        lines.append(
            [
                arm,
                " or ".join(counts),
                *(_spread(values, 1.0, digits) for values in ends),
                *(_spread(values, 1.0, digits + 1) for values in swings),
            ]
        )
    text = (
        f"Validation over the rounds: {metric} of the global model on the validation cases of all sites, mean ± SD over seeds. *change*: the mean "
        "absolute change between neighbouring evaluated rounds; *fall*: the same of steps for the worse, so that it is 0 where "
        "every round is better than the last."
    )
    if len({line[1] for line in lines} - {NOT_RUN, NOT_DEFINED}) > 1:
        text += " The arms were evaluated in different numbers of rounds: change and fall do not compare between them."
    return [text, Table(["arm", "evaluated rounds", "best", "last", "change", "fall"], lines)]


_FLATNESS = {"largest": "λ1, the largest eigenvalue in magnitude", "ratio": "λ1 / λ{top}", "trace": "trace"}


def _flatness(found: Mapping[str, Any]) -> list[str | Table]:
    """The Hessians of the loss at the models: a table for each of the measures, and which runs do not count."""
    told = found.get("flatness")
    if not told:
        return []
    parts = _of_measures(told, found["compared"]) if told["rows"] else []
    lacking = "; ".join(
        f"{arm}, seeds {', '.join(map(str, seeds))}" for arm, seeds in told["lacking"].items()
    )
    if lacking:
        parts.append(f"Not analysed (`fedatlas analyse hessian RUN`): {lacking}.")
    if told["earlier"]:
        parts.append(
            f"Analysed before the run went on, and left out until `fedatlas analyse hessian RUN` is run again: {', '.join(told['earlier'])}."
        )
    if told["inexact"]:
        parts.append(f"Eigenvalues are not exact enough (give more --steps): {', '.join(told['inexact'])}.")
    if told["unlike"]:
        parts.append(
            f"Analysed with other settings than the first, and left out: {', '.join(told['unlike'])}."
        )
    return parts


def _of_measures(told: Mapping[str, Any], compared: Mapping[str, str]) -> list[str | Table]:
    """What the tables of Hessians show, and the tables. told: see `fedatlas.compare.flatness`; compared: arm -> its reference."""
    settings, sites = told["settings"], told["sites"]
    labels = (
        "the site's own labels"
        if settings["labels"] == "annotated"
        else "all labels that the site has a truth for"
    )
    parts: list[str | Table] = [
        f"Flatness: the Hessian of {settings['loss']['name']} on training data of a site, {settings['batches']} batches of {settings['batch']}, with "
        f"{labels}, at the best global model, or at the one that is named. Mean ± SD over seeds; *mean*: over sites. *to another arm*: the geometric "
        "mean, over sites and seeds, of a value divided by that of the other arm; in brackets that of each seed; no mean where a value is not above 0. *lower in*: "
        "at how many of these sites and seeds it is below that of the other arm. Smaller is flatter."
    ]
    for measure, title in _FLATNESS.items():
        lines = []
        for row, row_of in told["rows"].items():
            of_sites = [list(row_of[measure].get(site, {}).values()) for site in sites]
            seeds = dict.fromkeys(seed for of in row_of[measure].values() for seed in of)
            means = [_over_sites(row_of[measure], sites, seed) for seed in seeds]
            reference = compared.get(row_of["arm"])
            other = next(
                (
                    of
                    for of in told["rows"].values()
                    if (of["arm"], of["model"]) == (reference, row_of["model"])
                ),
                None,
            )
            to = _to_another(row_of[measure], other[measure] if other else {}, reference)
            lines.append([row, str(len(seeds)), *map(_sized, of_sites), _sized(means), *to])
        parts += [
            f"**{title.format(top=settings['top'])}**",
            Table(["arm", "seeds", *sites, "mean", "to another arm", "lower in"], lines),
        ]
    return parts


def _over_sites(
    values: Mapping[str, Mapping[int, float | None]], sites: Sequence[str], seed: int
) -> float | None:
    """The mean over all sites; None where one has no value."""
    of_seed = [values.get(site, {}).get(seed) for site in sites]
    kept = [value for value in of_seed if value is not None]
    return float(np.mean(kept)) if len(kept) == len(sites) else None


def _sized(values: Sequence[float | None]) -> str:
    """Mean ± SD with three significant digits; a dash where a value is not defined."""
    kept = [value for value in values if value is not None]
    if not kept or len(kept) < len(values):
        return NOT_DEFINED
    size = abs(float(np.mean(kept)))
    return _spread(kept, 1.0, max(0, 2 - int(np.floor(np.log10(size))))) if size else _spread(kept, 1.0, 2)


def _to_another(
    values: Mapping[str, Mapping[int, float | None]],
    others: Mapping[str, Mapping[int, float | None]],
    name: str | None,
) -> list[str]:
    """The ratio to another arm's values, and how often they are lower, over the sites and seeds of both."""
    pairs = [
        (seed, value, other)
        for site, of_seed in values.items()
        for seed, value in of_seed.items()
        if value is not None and (other := others.get(site, {}).get(seed)) is not None
    ]
    if not pairs:
        return [NOT_DEFINED] * 2
    lower = f"{sum(value < other for _, value, other in pairs)} of {len(pairs)}"
    if min(min(value, other) for _, value, other in pairs) <= 0:
        return [NOT_DEFINED, lower]
    logs: dict[int, list[float]] = {}
    for seed, value, other in pairs:
        logs.setdefault(seed, []).append(float(np.log(value / other)))
    of_seeds = ", ".join(f"{np.exp(np.mean(of)):.2f}" for of in logs.values())
    every = np.exp(np.mean([one for of in logs.values() for one in of]))
    return [f"× {every:.2f} to {name} ({of_seeds})", lower]


def _costs(found: Mapping[str, Any]) -> list[str | Table]:
    """Rounds, traffic and time of every arm."""
    of_arms = found["costs"]
    if not of_arms:
        return []
    lines = []
    started = any(cost["start_hours"] * 3600 >= 1 or cost["start"] for cost in of_arms.values())
    for arm in found["arms"]:
        cost = of_arms.get(arm)
        if cost is None:
            lines.append([arm, *[NOT_RUN] * (10 if started else 9)])
            continue
        line = [arm, f"{cost['rounds']:.0f}", f"{cost['sites']:.0f}", f"{cost['megabytes']:.2f}"]
        line += [
            NOT_DEFINED if cost[key] is None else _short(cost[key])
            for key in ("formula", "wire", "evaluation")
        ]
        line += [_hours(cost, "step"), _hours(cost, "site")]
        line += [_short(cost["start_hours"])] if started else []
        server = cost["server_seconds"]
        lines.append([*line, NOT_DEFINED if server is None else f"{server:.1f}"])
    head = ["arm", "rounds", "sites", "model, MB", "2 R K size, GB", "on the wire, GB", "evaluation, GB"]
    head += ["steps, h", "at the sites, h", *(["before round 1, h"] if started else []), "server, s"]
    over = " and left-out sites" if found.get("left_out") else " and folds" if found.get("folds") else ""
    first = next(iter(found["arms"]))
    times = f"; in brackets the time over that of {first}" if first in of_arms else ""
    told = (
        f"Cost of a run, the mean over seeds{over}{times}. MB and GB are "
        "2^20 and 2^30 bytes. *on the wire*: all messages of training as they were sent, those before the first round "
        "among them. *steps*: optimizer steps of all sites; *at the sites*: with loading and all else between two "
        "exchanges; the final evaluation is in none of these."
    )
    return [told, Table(head, lines)]


def _short(value: float) -> str:
    """Three significant digits or more, without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{min(digits, 9)}f}"


def _hours(cost: Mapping[str, Any], what: str) -> str:
    hours, relative = cost[f"{what}_hours"], cost[f"{what}_relative"]
    if hours is None:
        return NOT_DEFINED
    return _short(hours) + ("" if relative is None else f" (× {relative:.2f})")


def _ranks(ranks: Mapping[str, Any]) -> str:
    """Mean ranks and the critical difference of a family of arms, as a sentence."""
    told = ", ".join(f"{arm} {rank:.2f}" for arm, rank in ranks["mean"].items())
    text = (
        f"Mean rank of the arms of which every seed is finished, over {ranks['n']} cells of site and class, each the "
        f"mean over seeds (1 is best): {told}."
    )
    if ranks["friedman"] is not None:
        text += f" Friedman p {_p(ranks['friedman'])}."
    if ranks["critical"] is not None:
        text += f" Critical difference (Nemenyi, 0.05): {ranks['critical']:.2f}."
    return text


def _p(value: float | None) -> str:
    if value is None:
        return NOT_DEFINED
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _interval_cells(interval: Mapping[str, Any] | None, scale: float, digits: int) -> list[str]:
    if interval is None or interval.get("low") is None:
        return [NOT_DEFINED, NOT_DEFINED]
    share = interval["undefined"] / interval["draws"]
    lost = f"; {share:.0%} of resamples without a value" if share >= 0.005 else ""
    value = f"{scale * interval['value']:+.{digits}f} ({_range(interval, scale, digits)}{lost})"
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
        before = f", after {budget['before']} for teachers" if budget.get("before") else ""
        budgets.setdefault(f"{budget['rounds']} rounds of {unit}{before}", []).append(arm)
    told = "; ".join(
        text if len(budgets) == 1 else f"{', '.join(arms)}: {text}" for text, arms in budgets.items()
    )
    layouts = [table["layout"] for table in (found, *found["tables"])]
    plain = all(layout["cells"] == "seeds" and layout["average"] == "columns" for layout in layouts)
    compared = "that are compared with one another, " if len(found["families"]) > 1 else ""
    lines = [
        f"`{found['command']}`",
        "",
        f"{'Mean' if plain else 'Where a table says nothing else: mean'} ± SD over seeds of the mean over cases, and over sites where a column is of several; *mean*: over the "
        f"columns. Bold: the best among arms {compared}of which every seed is finished and has a value.",
        f"Seeds {', '.join(map(str, found['seeds']))}; {told}"
        + (f"; profile {found['profile']}" if found["profile"] else "")
        + f". {hours:.2f} hours of rounds; made by {made or 'no known commit'}.",
    ]
    kinds: dict[str | None, list[str]] = {}
    for arm, of_arm in found["arms"].items():
        for kind in of_arm["arithmetic"]:
            kinds.setdefault(kind, []).append(arm)
    if len(kinds) > 1:
        told = "; ".join(f"{kind or 'not kept'}: {', '.join(arms)}" for kind, arms in kinds.items())
        lines.append(f"Processors of several kinds, which round differently, as another seed would: {told}.")
    elif kind := next(iter(kinds), None):
        lines.append(f"Processor of all runs: {kind}.")
    totals: dict[int, list[str]] = {}
    for arm, budget in found["budget"].items():
        if budget["total"] is not None:
            totals.setdefault(budget["total"], []).append(arm)
    if len(totals) > 1:
        told = "; ".join(f"{', '.join(arms)} {total:,}" for total, arms in totals.items())
        lines.append(f"The budgets differ. Optimizer steps of all sites together: {told}.")
    for arm, of_arm in found["arms"].items():
        lines += [f"{arm}: not counted: {problem.splitlines()[0]}" for problem in of_arm["problems"]]
    return "\n".join(lines)


def _table(table: Table) -> str:
    groups = table.groups or [""] * len(table.head)
    head = [
        f"{group}: {cell}" if group and (table.sites or not cell.startswith(group)) else cell
        for group, cell in zip(groups, table.head, strict=True)
    ]
    lines = [head, ["---"] * len(head), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _inline(text: str) -> Markup:
    """Bold, emphasis, code and line breaks of our own Markdown."""
    text = str(escape(text)).replace("\\*", "&#42;")
    for mark, tag in ((r"\*\*", "b"), (r"\*", "em"), ("`", "code")):
        text = re.sub(f"{mark}(.+?){mark}", rf"<{tag}>\1</{tag}>", text)
    text = re.sub("&lt;ins&gt;(.+?)&lt;/ins&gt;", r"<u>\1</u>", text)
    return Markup(text.replace("\n", "<br>\n"))
