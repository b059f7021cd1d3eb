"""The tables of a comparison, as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MEAN = "mean"
LOWER = frozenset({"hd95", "hd", "asd", "ece", "ece_mass", "brier"})
"""Metrics of which the lower value is the better one."""
MILLIMETRES = frozenset({"hd95", "hd", "asd"})
NOT_RUN, NOT_DEFINED = "not run", "–"


def markdown(found: Mapping[str, Any]) -> str:
    """All tables of what `compare.collect` found, and what they rest on."""
    parts = [_title(found), _values(found), *_printed(found), _footer(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def _values(found: Mapping[str, Any]) -> str:
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
    return table(["arm", "seeds", *columns], lines)


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


def _printed(found: Mapping[str, Any]) -> list[str]:
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
    return ["Printed numbers, ours in brackets:", table(["arm", *columns], lines)]


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
        lines += [f"{arm}: not counted: {problem.splitlines()[0]}" for problem in of_arm["problems"]]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
