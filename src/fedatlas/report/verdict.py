"""What a comparison says, in a few sentences: which arm is best, by how much, and how sure that is."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedatlas.report.comparison import BY_CASE, LOWER, MEAN, heading, is_whole, unit


def verdict(found: Mapping[str, Any]) -> list[str]:
    """Sentences, plain text, from what `compare.collect` found; none where fewer than two arms have a value.

    The best arm, of every family of arms that are compared with one another, among those that can be; the means, each family in order,
    the best first; the differences to their references with their intervals by case or patient; the means of every further table, and which
    of them are of less than others there alone; and what a single seed leaves open.
    """
    families = _ranked(found)
    if not any(len(family) > 1 for family in families):
        return []
    whole = _whole(found, families)
    best = [_best(found, family, named=len(families) > 1) for family in whole if len(family) > 1]
    told = [" ".join([*best, _means(found, families)])]
    if left := _not_whole(found, families):
        told.append(left)
    if apart := _apart(found):
        told.append(apart)
    for table in found["tables"]:
        if of := _ranked(table):
            less = _not_whole(table, _whole(found, of))
            told.append(" ".join(filter(None, (_means(table, of), less))))
    seeds = {len(found["arms"][arm]["seeds"]) for family in whole for arm, _ in family}
    if min(seeds or {len(found["arms"][arm]["seeds"]) for family in families for arm, _ in family}) == 1:
        told.append("One seed: how much another seed would change is not known.")
    return told


Family = list[tuple[str, float]]
"""Arms that are compared with one another and their means over seeds as they are printed, the best first."""


def _ranked(found: Mapping[str, Any]) -> list[Family]:
    """Arms without a value are left out."""
    scale, digits = unit(found)
    values = {
        arm: [value for value in of_arm["mean"] if value is not None] for arm, of_arm in found["arms"].items()
    }
    means = {arm: round(scale * float(np.mean(of)), digits) for arm, of in values.items() if of}
    sign = 1 if found["metric"] in LOWER else -1
    families = ([(arm, means[arm]) for arm in family if arm in means] for family in found["families"])
    return [sorted(family, key=lambda of: sign * of[1]) for family in families if family]


def _best(found: Mapping[str, Any], family: Family, *, named: bool) -> str:
    """named: with the arms that it is the best of."""
    first = [arm for arm, value in family if value == family[0][1]]
    best = " and ".join(first)
    close = [arm for arm in _not_told_apart(found, first[0]) if arm not in first]
    best += f", not told apart from {' and '.join(close)}" if close else ""
    return f"Best of {', '.join(arm for arm, _ in family)}: {best}." if named else f"Best: {best}."


def _whole(found: Mapping[str, Any], families: Sequence[Family]) -> list[Family]:
    """The families without the arms whose mean is of less than others' in this table."""
    return [[of for of in family if is_whole(found, of[0], MEAN)] for family in families]


def _not_whole(found: Mapping[str, Any], families: Sequence[Family]) -> str:
    """Arms with a mean that cannot be the best."""
    wanted, parts = len(found["seeds"]), []
    for arm in (arm for family in families for arm, _ in family if not is_whole(found, arm, MEAN)):
        of = found["arms"][arm]
        done = f"{len(of['seeds'])} of {wanted} seeds are finished" if len(of["seeds"]) < wanted else ""
        lacks = f"{of['lacking']} of its {of['values']} values are lacking" if of["lacking"] else ""
        parts.append(f"{arm} ({', '.join(filter(None, (done, lacks)))})")
    return f"Not ranked, as their means are of less than the others': {'; '.join(parts)}." if parts else ""


def _means(found: Mapping[str, Any], families: list[Family]) -> str:
    digits = unit(found)[1]
    head = found["title"] or f"Mean over the columns of {heading(found)}"
    means = "; ".join(", ".join(f"{arm} {value:.{digits}f}" for arm, value in family) for family in families)
    return f"{head}: {means}."


def _not_told_apart(found: Mapping[str, Any], best: str) -> list[str]:
    """The reference of the best arm, and the arms of which it is the reference, where the interval of the difference holds 0.
    Intervals are of differences to an arm's reference, so that nothing is said of two others."""
    if found.get("pairs") not in BY_CASE:
        return []
    compared = found["compared"]
    within = [
        arm
        for arm, of in found["bootstrap"].items()
        if of["low"] is not None and of["low"] <= 0 <= of["high"] and of["value"]
    ]
    own = [compared[best]] if best in within else []
    return own + [arm for arm in within if compared[arm] == best]


def _apart(found: Mapping[str, Any]) -> str:
    """The differences to the arms' references that have an interval by case or patient."""
    if found.get("pairs") not in BY_CASE:
        return ""
    (scale, digits), parts = unit(found), []
    for arm in found["differences"]:
        interval = found["bootstrap"].get(arm)
        if interval and interval["low"] is not None:
            value, low, high = (f"{scale * interval[key]:+.{digits}f}" for key in ("value", "low", "high"))
            parts.append((found["compared"][arm], f"{arm} {value} ({low} to {high})"))
    told = [
        f"Difference to {reference}, 95 % interval by {found['pairs']}: {', '.join(text for of, text in parts if of == reference)}."
        for reference in dict.fromkeys(of for of, _ in parts)
    ]
    return " ".join(told)
