"""What a comparison says, in a few sentences: which arm is best, by how much, and how sure that is."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedatlas.report.comparison import LOWER, heading, unit


def verdict(found: Mapping[str, Any]) -> list[str]:
    """Sentences, plain text, from what `compare.collect` found; none where fewer than two arms have a value.

    The arms in order of the table's mean, the best first; the differences to their references with their intervals by case;
    the means of every further table; and what a single seed leaves open.
    """
    ranked = _ranked(found)
    if len(ranked) < 2:
        return []
    best = " and ".join(arm for arm, value in ranked if value == ranked[0][1])
    close = _not_told_apart(found, ranked[0][0])
    best += f", not told apart from {' and '.join(close)}" if close else ""
    told = [f"Best: {best}. {_means(found, ranked)}"]
    if apart := _apart(found):
        told.append(apart)
    told += [_means(table, of) for table in found["tables"] if (of := _ranked(table))]
    seeds = min(len(found["arms"][arm]["seeds"]) for arm, _ in ranked)
    if seeds == 1:
        told.append("One seed: how much another seed would change is not known.")
    return told


def _ranked(found: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Arm and mean over its seeds as it is printed, the best first; arms without a value are left out."""
    scale, digits = unit(found)
    values = {
        arm: [value for value in of_arm["mean"] if value is not None] for arm, of_arm in found["arms"].items()
    }
    means = [(arm, round(scale * float(np.mean(of)), digits)) for arm, of in values.items() if of]
    return sorted(means, key=lambda of: of[1] if found["metric"] in LOWER else -of[1])


def _means(found: Mapping[str, Any], ranked: list[tuple[str, float]]) -> str:
    digits = unit(found)[1]
    head = found["title"] or f"Mean over the columns of {heading(found)}"
    return f"{head}: {', '.join(f'{arm} {value:.{digits}f}' for arm, value in ranked)}."


def _not_told_apart(found: Mapping[str, Any], best: str) -> list[str]:
    """The arms of which the interval of the difference to the best holds 0. Intervals are of differences to an arm's
    reference, so that nothing is said of two others."""
    if found.get("pairs") != "case":
        return []
    compared = found["compared"]
    within = [
        arm
        for arm, of in found["bootstrap"].items()
        if of["low"] is not None and of["low"] <= 0 <= of["high"] and of["value"]
    ]
    return [compared[best]] if best in within else [arm for arm in within if compared[arm] == best]


def _apart(found: Mapping[str, Any]) -> str:
    """The differences to the arms' references that have an interval by case."""
    if found.get("pairs") != "case":
        return ""
    (scale, digits), parts = unit(found), []
    for arm in found["differences"]:
        interval = found["bootstrap"].get(arm)
        if interval and interval["low"] is not None:
            value, low, high = (f"{scale * interval[key]:+.{digits}f}" for key in ("value", "low", "high"))
            parts.append((found["compared"][arm], f"{arm} {value} ({low} to {high})"))
    told = [
        f"Difference to {reference}, 95 % interval by case: {', '.join(text for of, text in parts if of == reference)}."
        for reference in dict.fromkeys(of for of, _ in parts)
    ]
    return " ".join(told)
