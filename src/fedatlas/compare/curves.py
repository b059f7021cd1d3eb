"""Validation of all arms over the rounds, of every class too, and how much it swings."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.compare.cells import Counted
from fedatlas.compare.plan import Comparison, of_cases
from fedatlas.compare.running import average
from fedatlas.evaluation.statistics import cell_means, class_means, select
from fedatlas.federation.best import LACKING
from fedatlas.federation.file import selects
from fedatlas.report import markup
from fedatlas.report.comparison import LOWER
from fedatlas.report.figures.arms import Curve, arm_curves, class_panels
from fedatlas.report.tables import described
from fedatlas.transport.rounds import RunFolder, read_json


def curves(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """arm -> its validation over the rounds; without arms that were validated in fewer than two, and {} where sites are left out
    in turn.

    metric: that of the tables, if every arm validates it, else the one that selects the best round. seeds: those that
    are finished; rounds, values: per seed the rounds with a value in whose validation no site was lost, and it: of the global model on the training grid, averaged
    as the table is, over all sites and the values of site, case and class that the first arm with such rounds has, of `measure.known`
    (see `Counted`). change:
    per seed the mean absolute difference between neighbouring values; fall: the same of steps for the worse alone, all others being 0. A
    steady gain has a change, and no fall. classes: class -> per seed (round, the mean over sites).
    """
    if comparison.turns:
        return {}
    evaluated = [next(iter(of.values())).evaluation for of in comparison.federations.values()]
    metric = comparison.metric
    if not all(metric in evaluation.round_metrics for evaluation in evaluated):
        metric = selects(comparison.first)
    found: dict[str, dict[str, Any]] = {}
    counted = Counted({}, None)
    for arm in comparison.arms:
        of_seeds: dict[int, list[tuple[int, float]]] = {}
        of_classes: dict[str, dict[int, list[list[float]]]] = {}
        validated = {
            seed: _rows(comparison.path(arm, seed), metric, of_cases(comparison)) for seed in seeds[arm]
        }
        if not counted.seeds:
            of_all = {
                seed: chain.from_iterable(of_rounds.values())
                for seed, of_rounds in validated.items()
                if of_rounds
            }
            counted = Counted(of_all, comparison.measure.known)
        for seed, of_rounds in validated.items():
            kept = {
                number: cell_means(row for row in rows if counted(seed, row))
                for number, rows in of_rounds.items()
            }
            means = {number: average(comparison, cells) for number, cells in kept.items()}
            points = [(number, value) for number, value in means.items() if value is not None]
            if len(points) < 2:
                continue
            of_seeds[seed] = points
            for number, cells in kept.items():
                for name, value in class_means(cells).items():
                    if value is not None:
                        of_classes.setdefault(name, {}).setdefault(seed, []).append([number, value])
        if of_seeds:
            steps = [np.diff([value for _, value in points]) for points in of_seeds.values()]
            worse = 1 if metric in LOWER else -1
            found[arm] = {
                "metric": metric,
                "seeds": list(of_seeds),
                "rounds": [[number for number, _ in points] for points in of_seeds.values()],
                "values": [[value for _, value in points] for points in of_seeds.values()],
                "change": [float(np.abs(step).mean()) for step in steps],
                "fall": [float(np.maximum(worse * step, 0).mean()) for step in steps],
                "classes": {name: list(of.values()) for name, of in of_classes.items()},
            }
    return found


def _rows(path: Path, metric: str, by_case: bool) -> dict[int, list[Mapping[str, Any]]]:
    """Round -> its rows, of every round that was validated at all sites: a mean over others is another number. by_case: those of
    cases alone, without what findings are scored by."""
    found = {}
    for file in RunFolder(path).files("rows.json"):
        rows = [row for row in select(read_json(file), metric=metric) if row["case"] or not by_case]
        if rows and not read_json(file.with_name("log.json")).get(LACKING):
            found[int(file.parent.name)] = rows
    return found


def lacks_curves(comparison: Comparison) -> str:
    """Why the page has no validation over the rounds; "" where it has one."""
    if comparison.turns:
        return "with leave_out and with folds every arm is several runs, each validated on other cases"
    for of_arm in comparison.federations.values():
        federation = next(iter(of_arm.values()))
        if federation.rounds > federation.evaluation.every:  # the last round is validated, too
            return ""
    return "no arm is validated in two rounds; set evaluation.every to fewer than its rounds"


def curve_figure(found: Mapping[str, Any]) -> str:
    """The curves of `results.collect`, as HTML; "" without any."""
    of_arms = found["curves"]
    if not of_arms:
        return ""
    metric, label = _metric(found)
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
    caption = (
        f"{metric} of the global model on the validation cases of all sites: thin, a seed; thick, the mean over seeds; grey, "
        "the means of the other arms. Above every panel the mean absolute change between neighbouring evaluated rounds."
    )
    return markup.figure(arm_curves(lines, label), caption)


def class_figure(found: Mapping[str, Any]) -> str:
    """The curves of every class, as HTML; "" without any."""
    of_arms = found["curves"]
    if not of_arms:
        return ""
    metric, label = _metric(found)
    names = dict.fromkeys(name for told in of_arms.values() for name in told["classes"])
    order = {name: place for place, name in enumerate(found["classes"])}
    panels = {
        name: {
            arm: Curve(told["classes"][name], 0.0).mean()
            for arm, told in of_arms.items()
            if name in told["classes"]
        }
        for name in sorted(names, key=lambda name: order.get(name, len(order)))
    }
    caption = (
        f"{metric} of the global model on the validation cases in which the class is scored, the mean over sites and over "
        "the finished seeds."
    )
    return markup.figure(class_panels(panels, label), caption)


def _metric(found: Mapping[str, Any]) -> tuple[str, str]:
    """The title of the curves' metric, without and with its unit."""
    metric = described(next(iter(found["curves"].values()))["metric"], pixels=found["pixels"])
    return metric.title, metric.label
