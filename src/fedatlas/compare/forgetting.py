"""What local models forget of the classes that their sites do not annotate."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedatlas.compare.plan import Comparison
from fedatlas.compare.resampling import Cell, interval_by_case
from fedatlas.compare.running import all_rows, kept_model
from fedatlas.core.contract import sends_of
from fedatlas.core.seeds import seed_of
from fedatlas.evaluation.statistics import mean_of_defined, select
from fedatlas.federation.file import make_method
from fedatlas.report.tables import has_truth
from fedatlas.transport.rounds import read_json


def forgetting(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """arm -> how its local models do on what they never saw; {} where no finished run scored local models by case, or sites are
    left out in turn. An arm whose local models may not speak for other classes (standalone) has nothing to forget and is left out.

    seeds: arm -> those of which the run is finished. global, local: the mean of the metric of the model of `measure`,
    and of the local ones, over cells of seed, local model, site and class, each the mean over the site's cases where
    the class is there; the classes of a local model are those that its site does not annotate for the first finished
    arm. value, low, high, cases, reason: of local - global, see `interval_by_case`. sites: site of the local model ->
    its own mean of local - global.
    """
    measure, found = comparison.measure, {}
    if comparison.turns:
        return found
    model = "best" if measure.model.startswith("local/") else measure.model
    annotated: dict[str, set[str]] = {}
    for arm in comparison.arms:
        method = make_method(comparison.federation(arm))
        if any({"model", "classes"} <= set(kinds) for kinds in sends_of(method).values()):
            continue
        both: list[tuple[str, Cell, Cell]] = []
        for seed in seeds[arm]:
            path = comparison.path(arm, seed)
            if not annotated:
                sites = read_json(path / "run.json")["sites"]
                annotated = {name: set(site["annotated"]) for name, site in sites.items()}
            rows = select(all_rows(comparison, arm, seed), metric=comparison.metric, split=measure.split)
            rows = [row for row in rows if row["case"] and row["value"] is not None and has_truth(row)]
            rows = [row for row in rows if comparison.counts(arm, row["site"])]
            of_model: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
            for row in rows:
                cell = of_model.setdefault(row["model"], {}).setdefault((row["site"], row["class"]), {})
                cell[row["case"]] = row["value"]
            whole = of_model.get(kept_model(path, model), {})
            for owner, own in annotated.items():
                for (site, name), values in of_model.get(f"local/{owner}", {}).items():
                    reference = whole.get((site, name), {})
                    shared = [case for case in values if case in reference]
                    if name not in own and shared:
                        pair = ({case: of[case] for case in shared} for of in (values, reference))
                        both.append((owner, *(Cell(site, 1.0, of) for of in pair)))  # type: ignore[arg-type]
        if both:
            found[arm] = _of_arm(comparison, arm, both)
    return found


def _of_arm(comparison: Comparison, arm: str, both: Sequence[tuple[str, Cell, Cell]]) -> dict[str, Any]:
    apart = [
        (
            owner,
            Cell(local.site, 1.0, {case: local.values[case] - whole.values[case] for case in local.values}),
        )
        for owner, local, whole in both
    ]
    rng = np.random.default_rng(seed_of("forgetting", comparison.name, arm))

    def mean(cells: Sequence[Cell]) -> float | None:
        return mean_of_defined(float(np.mean(list(cell.values.values()))) for cell in cells)

    owners = dict.fromkeys(owner for owner, _ in apart)
    return {
        "global": mean([whole for _, _, whole in both]),
        "local": mean([local for _, local, _ in both]),
        "sites": {owner: mean([cell for name, cell in apart if name == owner]) for owner in owners},
        **interval_by_case([cell for _, cell in apart], rng),
    }
