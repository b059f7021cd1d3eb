"""Validation of all arms over the rounds, and how much it swings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import Cells, average
from fedatlas.engine.run import read_json
from fedatlas.evaluation.statistics import cell_means, select
from fedatlas.experiment import selects
from fedatlas.report import markup
from fedatlas.report.figures import Curve, arm_curves
from fedatlas.report.tables import METRICS, Metric


def curves(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """arm -> its validation over the rounds; without arms that were validated in fewer than two.

    metric: that of the tables, if every arm validates it, else the one that selects the best round. seeds: those that
    are finished; rounds, values: per seed the rounds with a value, and it: of the global model on the training grid, averaged
    as the table is, over all sites and the cells of site and class that the first arm has, of `measure.known`. change:
    per seed the mean absolute difference between neighbouring values; fall: the same of falls alone, rises being 0. A
    steady rise has a change, and no fall.
    """
    evaluated = [next(iter(of.values())).evaluation for of in comparison.federations.values()]
    metric = comparison.metric
    if not all(metric in evaluation.round_metrics for evaluation in evaluated):
        metric = selects(comparison.first)
    found: dict[str, dict[str, Any]] = {}
    counted: set[tuple[str, str]] = set()
    for arm in comparison.arms:
        of_seeds: dict[int, list[tuple[int, float]]] = {}
        for seed in seeds[arm]:
            of_rounds = _cells(comparison.path(arm, seed), metric, comparison.measure.known)
            counted = counted or {cell for cells in of_rounds.values() for cell in cells}
            means = {
                number: average(comparison, {cell: value for cell, value in cells.items() if cell in counted})
                for number, cells in of_rounds.items()
            }
            points = [(number, value) for number, value in means.items() if value is not None]
            if len(points) > 1:
                of_seeds[seed] = points
        if of_seeds:
            steps = [np.diff([value for _, value in points]) for points in of_seeds.values()]
            found[arm] = {
                "metric": metric,
                "seeds": list(of_seeds),
                "rounds": [[number for number, _ in points] for points in of_seeds.values()],
                "values": [[value for _, value in points] for points in of_seeds.values()],
                "change": [float(np.abs(step).mean()) for step in steps],
                "fall": [float(np.maximum(-step, 0).mean()) for step in steps],
            }
    return found


def _cells(path: Path, metric: str, known: bool | None) -> dict[int, Cells]:
    """Round -> its cells of site and class, of every round that was validated."""
    found = {}
    for file in sorted((path / "rounds").glob("[0-9]*/rows.json")):
        rows = select(read_json(file), metric=metric)
        if rows := [row for row in rows if known in (None, row["known"])]:
            found[int(file.parent.name)] = cell_means(rows)
    return found


def curve_figure(found: Mapping[str, Any]) -> str:
    """The curves of `results.collect`, as HTML; "" without any."""
    of_arms = found["curves"]
    if not of_arms:
        return ""
    metric = next(iter(of_arms.values()))["metric"]
    described = METRICS.get(metric, Metric(metric, "", 3, True))
    lines = {
        arm: Curve(
            [
                list(zip(*of_seed, strict=True))
                for of_seed in zip(told["rounds"], told["values"], strict=True)
            ],
            float(np.mean(told["change"])),
        )
        for arm, told in of_arms.items()
    }
    svg = arm_curves(lines, described.title + (f", {described.unit}" if described.unit else ""))
    caption = (
        f"{described.title} of the global model on the validation cases of all sites: thin, a seed; thick, the mean over seeds; grey, "
        "the means of the other arms. Above every panel the mean absolute change between neighbouring evaluated rounds."
    )
    return f"<h2>Validation over the rounds</h2>{markup.figure(svg, markup.text(caption))}"
