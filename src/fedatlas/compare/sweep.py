"""How often to exchange: arms that differ in the number of rounds only, as Figure 5 of Fed-MENU shows them."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedatlas.compare.plan import Comparison
from fedatlas.experiment import Federation, make_method, resolved, shareable
from fedatlas.method import declared
from fedatlas.report import markup
from fedatlas.report.comparison import INCLUDE, MEAN, heading, of_column
from fedatlas.report.figures import Average, Sweep, exchange_curves
from fedatlas.report.tables import METRICS, Metric


class Kinds(NamedTuple):
    """swept: the name of a line -> its arms, by rounds; every one has two numbers of rounds or more. pooled: further
    arms that train on the union of all sites."""

    swept: dict[str, list[str]]
    pooled: list[str]


def kinds(comparison: Comparison) -> Kinds:
    """Groups arms that are equal but for rounds, steps or epochs of a round, and evaluation.

    A line is called by what its arms' names have in common, else by its method and net; where two would be called the
    same, by all of its arms.
    """
    firsts = {arm: next(iter(of_arm.values())) for arm, of_arm in comparison.federations.items()}
    groups: dict[str, list[str]] = {}
    for arm, federation in firsts.items():
        groups.setdefault(_kind(federation), []).append(arm)
    found = [
        sorted(arms, key=lambda arm: firsts[arm].rounds)
        for arms in groups.values()
        if len({firsts[arm].rounds for arm in arms}) > 1
    ]
    swept = {arm for arms in found for arm in arms}
    pooled = [
        arm
        for arm, federation in firsts.items()
        if arm not in swept and declared(make_method(federation), "pooled")
    ]
    names = [_common(arms) or _method_and_net(firsts[arms[0]]) for arms in found]
    count = Counter([*names, *pooled])
    return Kinds(
        {
            name if count[name] == 1 else ", ".join(arms): arms
            for name, arms in zip(names, found, strict=True)
        },
        pooled,
    )


def _kind(federation: Federation) -> str:
    """All that the arms of a line share, as text."""
    plain = shareable(resolved(federation))
    kept = {key: value for key, value in plain.items() if key not in ("name", "seed", "rounds", "evaluation")}
    kept["local"] = {key: value for key, value in plain["local"].items() if key not in ("steps", "epochs")}
    return json.dumps(kept, sort_keys=True)


def _method_and_net(federation: Federation) -> str:
    return f"{federation.method['name']}, {federation.net['name']}"


def _common(arms: Sequence[str]) -> str:
    """The words with which all names begin and end: unet of unet-40 and unet-80."""
    words = [re.split("[-._]", arm) for arm in arms]
    begin = _alike(words)
    end = _alike([of[len(begin) :][::-1] for of in words])
    return "-".join(filter(None, [*begin, *reversed(end)]))


def _alike(words: Sequence[Sequence[str]]) -> list[str]:
    """The words with which all begin."""
    first, *others = words
    same = [all(len(of) > i and of[i] == word for of in others) for i, word in enumerate(first)]
    return list(first[: same.index(False) if False in same else len(first)])


def exchanges(comparison: Comparison, found: Mapping[str, Any]) -> str:
    """The average of every table over the number of rounds, as HTML: a line per kind of arm, levels for arms that train
    on the union of all sites, published averages beside them. "" where no kind has two numbers of rounds, and where
    there is no average yet.

    found: as `results.collect` gives it.
    """
    swept, pooled = kinds(comparison)
    if not swept:
        return ""
    arms, budget = [arm for of in swept.values() for arm in of], found["budget"]
    tables = [found, *found["tables"]]

    def point(table: Mapping[str, Any], arm: str) -> Average:
        return _average(table, arm, budget[arm]["rounds"])

    panels = [
        Sweep(
            heading(table),
            _unit(table),
            {name: [point(table, arm) for arm in of] for name, of in swept.items()},
            {arm: point(table, arm) for arm in pooled},
        )
        for table in tables
    ]
    drawn = [at for panel in panels for of in panel.lines.values() for at in of]
    if all(at.mean is None and at.published is None for at in drawn):
        return ""
    units = {"steps" if budget[arm]["steps"] is not None else "epochs" for arm in arms}
    ticks: dict[int, dict[str, None]] = {}
    for arm in arms:
        ticks.setdefault(budget[arm]["rounds"], {})[_each(budget[arm], named=len(units) > 1)] = None
    svg = exchange_curves(
        panels,
        {rounds: f"{rounds} × {' or '.join(each)}" for rounds, each in sorted(ticks.items())},
        "rounds × " + " or ".join(sorted(units, reverse=True)),
    )
    told = [
        "The average of every table above by the number of rounds, on a logarithmic axis, and the steps or epochs of a "
        "round: mean ± SD over the finished seeds."
    ]
    if any(column["starred"] for table in tables for column in table["columns"]):
        told.append("Where a table has two averages it is include*.")
    if pooled:
        told.append(f"Dashed: trained on the union of all sites ({', '.join(pooled)}).")
    levels = [panel.levels[arm] for panel in panels for arm in pooled]
    if any(at.published is not None for at in (*drawn, *levels)):
        told.append("Hollow: published; what belongs to a dashed line stands at the right edge.")
    uneven = [name for name, of in swept.items() if not _even(budget[arm] for arm in of)]
    if uneven:
        told.append(f"Not as many steps or epochs in all at every number of rounds: {'; '.join(uneven)}.")
    return (
        "<h2>How often to exchange</h2>"
        + markup.figure(svg, markup.text(" ".join(told)))
        + "".join(markup.note(markup.text(note)) for note in _missing(tables, [*arms, *pooled]))
    )


def _average(table: Mapping[str, Any], arm: str, rounds: int) -> Average:
    """Of a table's last column, as it is printed there."""
    scale = 100.0 if table["layout"]["percent"] else 1.0
    values = [scale * value for value in of_column(table["arms"][arm], MEAN)]
    printed = table["printed"].get(arm, {})
    return Average(
        rounds,
        float(np.mean(values)) if values else None,
        float(np.std(values, ddof=1)) if len(values) > 1 else None,
        printed.get(MEAN, printed.get(INCLUDE)),
    )


def _unit(table: Mapping[str, Any]) -> str:
    described = METRICS.get(table["metric"], Metric(table["metric"], "", 3, True))
    unit = "%" if table["layout"]["percent"] else described.unit
    return described.title + (f", {unit}" if unit else "")


def _each(budget: Mapping[str, Any], *, named: bool) -> str:
    """Steps or epochs of a round."""
    steps = budget["steps"] is not None
    text = f"{budget['steps'] if steps else budget['epochs']:g}"
    return f"{text} {'steps' if steps else 'epochs'}" if named else text


def _even(budgets: Iterable[Mapping[str, Any]]) -> bool:
    """Whether rounds times steps, or epochs, are the same of all."""
    totals = {
        (True, of["rounds"] * of["steps"])
        if of["steps"] is not None
        else (False, round(of["rounds"] * of["epochs"], 6))
        for of in budgets
    }
    return len(totals) == 1


def _missing(tables: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> list[str]:
    """Arms of which not every seed is finished, and those that have no average in a table."""
    first, notes = tables[0], []
    done = {arm: len(first["arms"][arm]["seeds"]) for arm in arms}
    wanted = len(first["seeds"])
    waiting = [f"{arm} ({count} of {wanted} seeds)" for arm, count in done.items() if count < wanted]
    if waiting:
        notes.append(f"Not finished: {', '.join(waiting)}.")
    for table in tables:
        none = [arm for arm in arms if done[arm] and not of_column(table["arms"][arm], MEAN)]
        if none:
            notes.append(f"Without an average in “{heading(table)}”: {', '.join(none)}.")
    return notes
