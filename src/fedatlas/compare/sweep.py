"""The averages of tables over a number in which arms differ: rounds, as Figure 5 of Fed-MENU shows them, or any other."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from fedatlas.compare.plan import EXCHANGE, Comparison, Sweep
from fedatlas.federation.file import Federation, make_method, resolved, shareable
from fedatlas.report import markup
from fedatlas.report.comparison import INCLUDE, MEAN, heading, of_column, of_table
from fedatlas.report.figures.arms import Average, Swept, sweep_curves


class Kinds(NamedTuple):
    """swept: the name of a line -> its arms, by their numbers; every one has two numbers or more. pooled: further arms
    that train on the union of all sites. numbers: arm -> its number, of every arm that has one."""

    swept: dict[str, list[str]]
    pooled: list[str]
    numbers: dict[str, float]


def kinds(comparison: Comparison, sweep: Sweep = EXCHANGE) -> Kinds:
    """Groups the arms that are equal but for the number of a sweep, and what may differ beside it.

    A line is called by what its arms' names have in common, else by its method and net; where two would be called the
    same, by all of its arms.
    """
    firsts = {arm: comparison.federation(arm) for arm in comparison.arms}
    numbers: dict[str, float] = {}
    groups: dict[str, list[str]] = {}
    for arm, federation in firsts.items():
        plain = shareable(resolved(federation))
        number = number_of(plain, sweep)
        if number is not None:
            numbers[arm] = number
            groups.setdefault(_kind(plain, sweep), []).append(arm)
    found = [
        sorted(arms, key=numbers.__getitem__)
        for arms in groups.values()
        if len({numbers[arm] for arm in arms}) > 1
    ]
    swept = {arm for arms in found for arm in arms}
    pooled = [
        arm for arm, federation in firsts.items() if arm not in swept and make_method(federation).pooled
    ]
    names = [_common(arms) or _method_and_net(firsts[arms[0]]) for arms in found]
    count = Counter([*names, *pooled])
    return Kinds(
        {
            name if count[name] == 1 else ", ".join(arms): arms
            for name, arms in zip(names, found, strict=True)
        },
        pooled,
        numbers,
    )


def number_of(plain: Mapping[str, Any], sweep: Sweep) -> float | None:
    """The number that a federation, as plain values, has at the keys of a sweep; None where one of them has none, or
    another one."""
    found: list[Any] = []
    for over in sweep.over:
        found += [place.get(key) for place, key in _places(plain, over.split("."))] or [None]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in found):
        return None
    return found[0] if len(set(found)) == 1 else None


def _places(plain: Any, path: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The mappings that hold the last part of a path, and that part; none where it leads nowhere."""
    first, *rest = path
    if isinstance(plain, list):
        for entry in plain:
            if (
                rest
                and isinstance(entry, dict)
                and (first == entry["name"] or (first == "*" and entry["role"] == "train"))
            ):
                yield from _places(entry, rest)
    elif isinstance(plain, dict) and not rest:
        yield plain, first
    elif isinstance(plain, dict):
        yield from _places(plain.get(first), rest)


def _kind(plain: Mapping[str, Any], sweep: Sweep) -> str:
    """All that the arms of a line share, as text."""
    kept = json.loads(json.dumps(plain))
    for path in ("name", "seed", *sweep.over, *sweep.beside):
        for place, key in list(_places(kept, path.split("."))):
            place.pop(key, None)
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


def lacks_sweeps(comparison: Comparison) -> str:
    """Why the page has no averages over a number; "" where it has them."""
    if any(kinds(comparison, sweep).swept for sweep in comparison.sweeps):
        return ""
    over = "; ".join(", ".join(sweep.over) for sweep in comparison.sweeps) or "nothing"
    return f"sweeps is over {over}, in which alone no two arms differ"


def sweeps(comparison: Comparison, found: Mapping[str, Any]) -> str:
    """The average of every table over the number of each sweep, as HTML: a line per kind of arm, levels for arms that
    train on the union of all sites, published averages beside them. "" where no kind has two numbers, and where there is
    no average yet.

    found: as `results.collect` gives it.
    """
    return Markup("").join(
        _drawn(comparison, found, sweep, place) for place, sweep in enumerate(comparison.sweeps)
    )


def _drawn(comparison: Comparison, found: Mapping[str, Any], sweep: Sweep, place: int) -> str:
    swept, pooled, numbers = kinds(comparison, sweep)
    if not swept:
        return ""
    arms, budget = [arm for of in swept.values() for arm in of], found["budget"]
    tables = [found, *found["tables"]]

    def point(table: Mapping[str, Any], arm: str) -> Average:
        return _average(table, arm, numbers.get(arm, 0.0))

    panels = [
        Swept(
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
    of_rounds = sweep.over == EXCHANGE.over
    ticks, label, words = _axis(sweep, {arm: numbers[arm] for arm in arms}, budget)
    svg = sweep_curves(panels, ticks, label, f"sweep-{place}")
    told = [f"The average of every table above by {words}: mean ± SD over the finished seeds."]
    if any(column["starred"] for table in tables for column in table["columns"]):
        told.append("Where a table has two averages it is include*.")
    if pooled:
        told.append(f"Dashed: trained on the union of all sites ({', '.join(pooled)}).")
    levels = [panel.levels[arm] for panel in panels for arm in pooled]
    if any(at.published is not None for at in (*drawn, *levels)):
        told.append("Hollow: published; what belongs to a dashed line stands at the right edge.")
    uneven = [name for name, of in swept.items() if not _even(budget[arm] for arm in of)]
    if of_rounds and uneven:
        told.append(f"Not as many steps or epochs in all at every number of rounds: {'; '.join(uneven)}.")
    title = "How often to exchange" if of_rounds else f"Averages by {label}"
    parts = [Markup("<h3>{}</h3>").format(title), markup.figure(svg, " ".join(told))]
    return Markup("").join([*parts, *map(markup.note, _missing(tables, [*arms, *pooled]))])


def _axis(
    sweep: Sweep, numbers: Mapping[str, float], budget: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[float, str], str, str]:
    """The ticks at the arms' numbers, the label of the axis, and the number in words."""
    ordered = sorted(set(numbers.values()))
    if sweep.over != EXCHANGE.over:
        label = sweep.title or sweep.over[0]
        return {number: f"{number:g}" for number in ordered}, label, label
    units = {"steps" if budget[arm]["steps"] is not None else "epochs" for arm in numbers}
    each: dict[float, dict[str, None]] = {number: {} for number in ordered}
    for arm, number in numbers.items():
        each[number][_each(budget[arm], named=len(units) > 1)] = None
    ticks = {number: f"{number:g} × {' or '.join(of)}" for number, of in each.items()}
    words = "the number of rounds and the steps or epochs of a round"
    return ticks, "rounds × " + " or ".join(sorted(units, reverse=True)), words


def _average(table: Mapping[str, Any], arm: str, number: float) -> Average:
    """Of a table's last column, as it is printed there."""
    scale = 100.0 if table["layout"]["percent"] else 1.0
    values = [scale * value for value in of_column(table["arms"][arm], MEAN)]
    printed = table["printed"].get(arm, {})
    return Average(
        number,
        float(np.mean(values)) if values else None,
        float(np.std(values, ddof=1)) if len(values) > 1 else None,
        printed.get(MEAN, printed.get(INCLUDE)),
    )


def _unit(table: Mapping[str, Any]) -> str:
    return of_table(table).label


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
