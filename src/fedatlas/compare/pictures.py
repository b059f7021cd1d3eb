"""The figures of a comparison's page."""

from collections.abc import Mapping, Sequence

from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import all_rows, kept_model
from fedatlas.evaluation.statistics import select
from fedatlas.report.figures import Box, Panel, distributions
from fedatlas.report.tables import Metric, has_truth
from fedatlas.transport.rounds import read_run


def box_plots(comparison: Comparison, seeds: Mapping[str, Sequence[int]], metric: Metric) -> str:
    """The metric over the cases of `measure` per class and site, for the model of `measure` and every local one, all arms beside
    each other; as SVG, or "" where nothing is scored by case.

    seeds: arm -> those of which the run is finished; their cases stand in one box. A case in which the class is not
    there is left out. metric: how it is printed.
    """
    values: dict[tuple[str, str], dict[tuple[str, str, str], list[float]]] = {}
    trained: dict[tuple[str, str], set[str]] = {}
    sites: dict[str, list[str]] = {}
    measure = comparison.measure
    for arm in comparison.arms:
        for one, seed in ((one, seed) for seed in seeds[arm] for one in comparison.trained(arm)):
            path = comparison.path(one, seed)
            about = read_run(path)["sites"]
            training = [site for site, told in about.items() if told.get("role", "train") == "train"]
            sites.update({site: list(about[site]["annotated"]) for site in about if site not in sites})
            chosen = kept_model(path, measure.model)
            trained[one, ""] = {name for site in training for name in about[site]["annotated"]}
            trained |= {(one, f"local/{site}"): set(about[site]["annotated"]) for site in training}
            for row in select(all_rows(comparison, one, seed), metric=comparison.metric, split=measure.split):
                value, model = row["value"], "" if row["model"] == chosen else row["model"]
                counts = row["case"] and has_truth(row) and comparison.counts(one, row["site"])
                if value is not None and counts and (one, model) in trained:
                    of_cell = values.setdefault((row["class"], row["site"]), {})
                    run = comparison.trained(arm)[0] if comparison.folds else one  # of folds one box
                    of_cell.setdefault((arm, model, run), []).append(value)
    panels = []
    for name, site in sorted(values, key=lambda cell: _place(comparison, sites, *cell)):
        if measure.known not in (None, name in sites[site]):
            continue
        boxes = [
            Box(arm, model or "global", found, name in trained[one, model])
            for (arm, model, one), found in values[name, site].items()
        ]
        # a site that is left out annotates nothing in that run
        mark = "" if comparison.left_out or name in sites[site] else " *"
        panels.append(Panel(f"{name}, {site}{mark}", boxes))
    return distributions(panels, list(sites), metric, "boxes") if panels else ""


def _place(
    comparison: Comparison, sites: Mapping[str, Sequence[str]], name: str, site: str
) -> tuple[int, str, int]:
    """Classes in the order of the label space, then sites."""
    listed = list(comparison.first.labels.names or ())
    return (listed.index(name) if name in listed else len(listed), name, list(sites).index(site))
