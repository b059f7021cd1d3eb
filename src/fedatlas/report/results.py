"""The scores of a run as the tables of its page hold them."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedatlas.evaluation.statistics import RowDict, select
from fedatlas.report import read, tables
from fedatlas.report.figures import CLASS_COLOURS, model_title
from fedatlas.report.markup import count, letter, slug, spread
from fedatlas.report.read import Run
from fedatlas.report.tables import described

MOST_ROWS = 1500
"""Rows of the table of cases on the page, at most; the run folder's rows.csv holds all."""

FINDING_COLUMNS = {
    "n_positive": ("present", 0),
    "n_negative": ("absent", 0),
    "auroc": ("AUROC", 3),
    "ap": ("AP", 3),
    "sensitivity": ("sensitivity", 3),
    "specificity": ("specificity", 3),
}
"""metric -> the head of its column, and its decimals."""


class Mark(NamedTuple):
    """Why values of a cell are not defined. n: how many; told: the same in words; of: " n of all", "" for a single value."""

    reason: str
    n: int
    told: str
    of: str = ""


class Entry(NamedTuple):
    """A cell of a table of results. value: by which it is sorted, None where it is not defined; spread: its interval or
    range; told: what hovering tells; partly: is the interval of some resamples only? far: its cases that are far off, in
    words."""

    value: float | None
    text: str
    spread: str = ""
    told: str = ""
    partly: bool = False
    marks: tuple[Mark, ...] = ()
    far: str = ""


class Note(NamedTuple):
    """Why values of a table are not defined, how many, and in which rows and models."""

    letter: str
    reason: str
    total: int
    places: list[str]


class MetricTable(NamedTuple):
    """One metric by class, site and model. rows: class, site, what is counted, an entry per model; letters: reason -> mark;
    bars: are values drawn as bars, too?"""

    caption: str
    anchor: str
    head: list[str]
    rows: list[tuple[str, str, list[float | None], list[Entry | None]]]
    letters: dict[str, str]
    notes: list[Note]
    bars: bool


def metric_table(
    run: Run, rows: Sequence[RowDict], metric: str, name: str, known: bool
) -> MetricTable | None:
    """A metric on the cases or images of one split, of classes that their site annotates, or of the others; None where
    there are none. name: the split, as the caption has it."""
    of = _of_images if run.images else _of_cases
    entries, counts = of(rows, metric, known)
    if not entries:
        return None
    names = tables.compared([{"model": model} for _, _, model in entries] if run.images else rows)
    reasons = dict.fromkeys(mark.reason for at in entries.values() for mark in at.marks)
    letters = {reason: letter(index) for index, reason in enumerate(reasons)}
    lines, totals = [], Counter[str]()
    places: dict[str, dict[str, list[str]]] = {reason: {} for reason in reasons}
    for class_, site in ((c, s) for c in run.classes for s in run.sites):
        found = [entries.get((class_, site, model)) for model in names]
        if not any(found):
            continue
        lines.append((class_, site, counts[class_, site], found))
        for model, at in zip(names, found, strict=True):
            for mark in at.marks if at else ():
                totals[mark.reason] += mark.n
                where = places[mark.reason].setdefault(f"{run.title(class_)} at {site}", [])
                where.append(f"{model_title(model)}{mark.of}")
    title = "annotated by the site" if known else "never annotated here: found or not"
    return MetricTable(
        f"{described(metric).title} on {name}, classes {title}",
        slug(f"{name}-{metric}-{'known' if known else 'unknown'}"),
        ["Class", "Site", *(("n+", "n−") if run.images else ("n",)), *map(model_title, names)],
        lines,
        letters,
        [
            Note(
                letters[reason],
                reason,
                totals[reason],
                [f"{at}: {', '.join(of)}" for at, of in found.items()],
            )
            for reason, found in places.items()
        ],
        not known and metric in ("dice", "nsd"),
    )


Entries = tuple[dict[tuple[str, str, str], Entry], dict[tuple[str, str], list[float | None]]]
"""(class, site, model) -> entry, and (class, site) -> what is counted there."""


def _of_cases(rows: Sequence[RowDict], metric: str, known: bool) -> Entries:
    """Means over cases. rows: of one metric."""
    decimals = described(metric).decimals
    far: dict[tuple[str, str, str], list[str]] = {}
    for row in tables.outliers(rows):
        where = (row["class"], row["site"], row["model"])
        far.setdefault(where, []).append(f"{row['case']}: {row['value']:.{decimals}f}")
    names = tables.compared(rows)
    chosen = (row for row in select(rows, known=known) if row["model"] in names)
    entries, counts = {}, {}
    for (class_, site, model), cell in tables.cells(chosen, "class", "site", "model").items():
        counts[class_, site] = [max(cell.scored, *counts.get((class_, site), [0]))]
        marks = tuple(
            Mark(why, n, f"{n} of {cell.scored} not defined: {why}", f" {n} of {cell.scored}")
            for why, n in sorted(cell.undefined.items())
        )
        mean, sd = cell.summary.mean, cell.summary.sd
        if mean is None:
            entries[class_, site, model] = Entry(None, "not defined", marks=marks)
            continue
        off = far.get((class_, site, model))
        entries[class_, site, model] = Entry(
            mean,
            f"{mean:.{decimals}f}",
            spread(tables.spread(cell.values), decimals),
            count(cell.summary.n, "case") + ("" if sd is None else f", SD {sd:.{decimals}f}"),
            marks=marks,
            far=f"far off: {', '.join(off)}" if off else "",
        )
    return entries, counts


def _of_images(rows: Sequence[RowDict], metric: str, known: bool) -> Entries:
    """Values of all images of a site, with intervals."""
    decimals = described(metric).decimals
    entries, counts = {}, {}
    for (class_, site, model), at in tables.class_values(rows, metric).items():
        if at.known is not known:
            continue
        counts.setdefault((class_, site), [at.n_positive, at.n_negative])
        if at.value is None:
            mark = Mark(plainly(at.reason), 1, at.reason)
            entries[class_, site, model] = Entry(None, "not defined", told=at.reason, marks=(mark,))
            continue
        interval, told = "", ""
        if at.low is not None and at.high is not None:
            interval = f"[{at.low:.{decimals}f}, {at.high:.{decimals}f}]"
            told = f"{100 * at.undefined:.1f} % of the resamples have no value" if at.undefined else ""
        elif at.no_interval:
            interval, told = "[–]", f"no interval: {at.no_interval}"
        partly = bool(at.undefined) and at.low is not None
        entries[class_, site, model] = Entry(at.value, f"{at.value:.{decimals}f}", interval, told, partly)
    return entries, counts


def plainly(reason: str) -> str:
    """Without the counts, which stand in the row already."""
    return re.sub(r"\d+ (?:positive|negative), ", "", reason)


def glance_caption(run: Run, model: str, split: str) -> str:
    """Of the matrix of the global model's scores by class and site."""
    if run.images:
        return f"AUROC of {model_title(model)}, in colour from 0.5 to 1; outlined: annotated at the site"
    return (
        f"Mean Dice of {model_title(model)} on {split} cases. Outlined: annotated at the site. Not outlined: never "
        "annotated there"
    )


def shown_metrics(rows: Iterable[RowDict]) -> list[str]:
    """The metrics of whole images that have a table of their own."""
    ends = ("_low", "_high", "_undefined")
    return [m for m in tables.metrics(rows) if not m.startswith("n_") and not m.endswith(ends)]


def about(metric: str, run: Run) -> str:
    """What a metric of whole images says, as a sentence; "" where its name says it."""
    calibration = f"Expected calibration error over {run.bins} bins. "
    return {
        "auroc": "Share of pairs of a positive and a negative in which the positive scores higher; ties count half. ",
        "ece": calibration,
        "ece_mass": calibration,
        "ap": "Without interpolation; a model that knows nothing reaches the share of positives. ",
    }.get(metric, "")


def far_off(rows: Sequence[RowDict]) -> list[tuple[RowDict, float]]:
    """The rows whose value is far off, with the median of their class."""
    found = []
    for row in tables.outliers(rows):
        same = select(rows, class_=row["class"], metric=row["metric"])
        found.append((row, float(np.median([at["value"] for at in same if at["value"] is not None]))))
    return found


def case_rows(run: Run, rows: Sequence[RowDict]) -> list[tuple[str, str, str, dict[str, RowDict]]]:
    """(site, case, class, metric -> row) of every case and class."""
    order = {name: place for place, name in enumerate(run.classes)}
    found: dict[tuple[str, str, str], dict[str, RowDict]] = {}
    for row in rows:
        found.setdefault((row["site"], row["case"], row["class"]), {})[row["metric"]] = row
    return [(*key, found[key]) for key in sorted(found, key=lambda at: (*at[:2], order.get(at[2], 0)))]


def finding_rows(run: Run, split: str) -> list[tuple[str, str, str, bool, dict[str, float | None]]]:
    """(finding, site, model, known, metric -> value) on a split."""
    values: dict[tuple[str, str, str, bool], dict[str, float | None]] = {}
    for row in select(run.finding_rows, split=split):
        place = (row["class"], row["site"], row["model"], row["known"])
        values.setdefault(place, {})[row["metric"]] = row["value"]
    return [(*place, values[place]) for place in sorted(values, key=lambda place: place[:2])]


def plain_rows(histograms: Iterable[read.Counted]) -> list[dict[str, Any]]:
    """Split and model of histograms, as rows have them."""
    return [{"split": one.split, "model": one.model} for one in histograms]


def overlay_colours(run: Run, stored: Sequence[read.Overlay]) -> tuple[dict[str, str], dict[str, str]]:
    """class -> colour on black, and class -> what a reader calls it, of the classes of the run and of all that the pictures
    hold."""
    more = sorted({name for one in stored for name in one.dice} - set(run.classes))
    names = [*run.classes, *more]
    colours = {name: CLASS_COLOURS[place % len(CLASS_COLOURS)][1] for place, name in enumerate(names)}
    return colours, {name: run.title(name) for name in names}
