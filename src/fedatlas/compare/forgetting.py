"""What local models forget of the classes that their sites do not annotate."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedatlas.compare.cells import UnitOf, unit_of
from fedatlas.compare.plan import Comparison
from fedatlas.compare.resampling import Cell, interval_of
from fedatlas.compare.running import all_rows, kept_model
from fedatlas.core.contract import sends_of
from fedatlas.core.seeds import seed_of
from fedatlas.evaluation.statistics import mean_of_defined, select
from fedatlas.federation.file import local_models, make_method
from fedatlas.report.tables import has_truth
from fedatlas.transport.rounds import read_run


def forgetting(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """arm -> how its local models do on what they never saw; {} where no finished run scored local models by case, or sites are
    left out in turn. An arm whose local models may not speak for other classes (standalone) has nothing to forget and is left out.

    seeds: arm -> those of which the run is finished. models: which local ones, as `evaluation.local`. global, local: the mean of the metric of the model of `measure`,
    and of the local ones, over cells of seed, local model, site and class, each the mean over the site's cases where
    the class is there; the classes of a local model are those that its site does not annotate for the first finished
    arm. value, low, high, n, reason: of local - global, see `interval_of`. sites: site of the local model ->
    its own mean of local - global.
    """
    measure, found = comparison.measure, {}
    if comparison.turns:
        return found
    model = "best" if measure.model.startswith("local/") else measure.model
    annotated: dict[str, set[str]] = {}
    for arm in comparison.arms:
        if not annotated and seeds[arm]:
            sites = read_run(comparison.path(arm, seeds[arm][0]))["sites"]
            annotated = {name: set(site["annotated"]) for name, site in sites.items()}
        method = make_method(comparison.federation(arm))
        if any({"model", "classes"} <= set(kinds) for kinds in sends_of(method).values()):
            continue
        both: list[tuple[str, _Both]] = []
        for seed in seeds[arm]:
            path = comparison.path(arm, seed)
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
                        of_case = {case: (values[case], reference[case]) for case in shared}
                        both.append((owner, _Both(site, of_case)))
        if both:
            found[arm] = _of_arm(comparison, arm, both)
    return found


class _Both(NamedTuple):
    """A cell of a site's cases. values: case -> the local model's, and the global one's."""

    site: str
    values: Mapping[str, tuple[float, float]]

    def apart(self, unit: UnitOf) -> Cell:
        """local - global."""
        found: dict[str, list[float]] = {}
        for case, (local, whole) in self.values.items():
            found.setdefault(unit(self.site, case), []).append(local - whole)
        return Cell(self.site, 1.0, found)


def _of_arm(comparison: Comparison, arm: str, both: Sequence[tuple[str, _Both]]) -> dict[str, Any]:
    rng = np.random.default_rng(seed_of("forgetting", comparison.name, arm))
    unit = unit_of(comparison)

    def mean(what: Callable[[tuple[float, float]], float], owner: str | None = None) -> float | None:
        return mean_of_defined(
            float(np.mean([what(of) for of in cell.values.values()]))
            for name, cell in both
            if owner in (None, name)
        )

    return {
        "models": local_models(comparison.federation(arm)),
        "global": mean(lambda of: of[1]),
        "local": mean(lambda of: of[0]),
        "sites": {
            owner: mean(lambda of: of[0] - of[1], owner) for owner in dict.fromkeys(name for name, _ in both)
        },
        **interval_of([cell.apart(unit) for _, cell in both], rng, unit=unit.name),
    }
