"""Sums up in numbers what was read of a run folder."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedatlas.core.errors import RunFolderError, WireError
from fedatlas.evaluation.classification import Histogram
from fedatlas.evaluation.statistics import (
    LEAST_PAIRS,
    POST,
    RowDict,
    Summary,
    bootstrap_interval,
    client_wise_index,
    grouped,
    mean_of_defined,
    select,
    summarise,
    table,
)
from fedatlas.report.read import Round, Run, models, number

BOOKKEEPING = frozenset(
    {
        "steps",
        "step_seconds",
        "overflows",
        "seconds",
        "cases",
        "releases",
        "teacher_seconds",
        "teacher_round",
        "teacher_score",
        "predicted_windows",
        "predicting_seconds",
        "saved_seconds",
        *(f"{of}{kind}" for of in ("", "teacher_") for kind in ("epsilon", "epsilon_poisson")),
    }
)
"""Numbers that a site logs beside its loss terms."""
TRAFFIC = {
    "bytes_down": "training, down",
    "bytes_up": "training, up",
    "evaluate_bytes_down": "evaluation, down",
    "evaluate_bytes_up": "evaluation, up",
}
"""The four kinds of bytes in a site's cost of a round; down is from the server to the site."""


class Metric(NamedTuple):
    """How to print a metric: title, unit, decimals, and the better direction."""

    title: str
    unit: str
    decimals: int
    higher_is_better: bool

    @property
    def label(self) -> str:
        """Title and unit."""
        return self.title + (f", {self.unit}" if self.unit else "")


METRICS = {
    "dice": Metric("Dice", "", 3, True),
    "hd95": Metric("HD95", "mm", 2, False),
    "hd": Metric("HD", "mm", 2, False),
    "asd": Metric("ASD", "mm", 2, False),
    "nsd": Metric("NSD", "", 3, True),
    "jaccard": Metric("Jaccard", "", 3, True),
    "rve": Metric("Relative volume error", "", 3, False),
    "auroc": Metric("AUROC", "", 3, True),
    "ap": Metric("Average precision", "", 3, True),
    "f1": Metric("F1", "", 3, True),
    "sensitivity": Metric("Sensitivity", "", 3, True),
    "specificity": Metric("Specificity", "", 3, True),
    "balanced_accuracy": Metric("Balanced accuracy", "", 3, True),
    "ece": Metric("ECE", "", 3, False),
    "ece_mass": Metric("ECE, equal mass", "", 3, False),
    "brier": Metric("Brier score", "", 3, False),
    "dice_slicewise": Metric("Dice, mean over slices", "", 3, True),
    "jaccard_slicewise": Metric("Jaccard, mean over slices", "", 3, True),
    "sensitivity_slicewise": Metric("Sensitivity, mean over slices", "", 3, True),
    "specificity_slicewise": Metric("Specificity, mean over slices", "", 3, True),
    "hd_rows": Metric("HD of rows", "", 3, False),
}


def described(metric: str, run: Run | None = None, *, pixels: bool = False) -> Metric:
    """How to print a metric; one that is not in METRICS has its own name. run: where its lengths are those of pixels, so are
    those of the metric. pixels: the same, where that is known otherwise."""
    found = METRICS.get(metric, Metric(metric, "", 3, True))
    pixels = pixels or bool(run and run.in_pixels)
    return found._replace(unit="px") if pixels and found.unit == "mm" else found


# ---------------------------------------------------------------------------------------------- numbers


class Cell(NamedTuple):
    """The values of one cell of a table: their summary, how often which reason left one undefined, and the defined
    values."""

    summary: Summary
    undefined: Counter[str]
    values: tuple[float, ...] = ()

    @property
    def scored(self) -> int:
        """All values, defined or not."""
        return self.summary.n + self.summary.n_undefined


def cells(rows: Iterable[RowDict], *columns: str) -> dict[tuple[Any, ...], Cell]:
    """A cell per combination of columns, as ("class", "site", "model")."""
    return {
        key: Cell(
            summarise(members),
            Counter(row["reason"] for row in members if row["value"] is None),
            tuple(row["value"] for row in members if row["value"] is not None),
        )
        for key, members in grouped(rows, *columns).items()
    }


def has_truth(row: RowDict) -> bool:
    """Is the class there in the case? A rule for empty masks may score a case in which it is not."""
    return row["reason"] != "truth empty"


def compared(rows: Iterable[RowDict]) -> tuple[str, ...]:
    """The models that stand side by side: the global one ("best", or "last" where there is no best), which
    comes first, and every local one."""
    every = models(rows)
    return every[:1] + tuple(model for model in every[1:] if model.startswith("local/"))


def splits(rows: Iterable[RowDict]) -> tuple[str, ...]:
    """The splits of some rows, the test cases first."""
    return tuple(sorted({row["split"] for row in rows}, key=lambda s: (s != "test", s != "validation", s)))


def metrics(rows: Iterable[RowDict]) -> tuple[str, ...]:
    """The metrics of some rows in the order of METRICS, unknown ones last."""
    order = list(METRICS)
    return tuple(
        sorted(
            {row["metric"] for row in rows}, key=lambda m: (order.index(m) if m in order else len(order), m)
        )
    )


def scored(run: Run) -> tuple[list[RowDict], bool]:
    """The rows of the final evaluation on the original grid, before post-processing, or else those of the last evaluated
    round, and whether it is these."""
    if run.rows:
        rows = [row for row in run.rows if not row["model"].startswith(POST)]
        return select(rows, grid="original") or rows, False
    latest = next((entry.rows for entry in reversed(run.rounds) if entry.rows), ())
    return list(latest), True


def processed(run: Run) -> list[RowDict]:
    """The rows of the final evaluation after post-processing, under the names of the models; none without it."""
    after = (row for row in run.rows or () if row["model"].startswith(POST))
    return [{**row, "model": row["model"].removeprefix(POST)} for row in after]


class Verdict(NamedTuple):
    """One metric of one model on one split, in three numbers; None where nothing was scored.

    clientwise: the mean over sites of the mean over the classes that the site annotates of
        the mean over its cases (the "global index" of Fed-MENU).
    known: mean over all pairs (site, class) that are annotated.
    unknown: mean over all pairs (site, class) with ground truth that the site's training never saw.
    """

    clientwise: float | None
    known: float | None
    unknown: float | None
    n_sites: int
    n_known: int
    n_unknown: int


def verdict(rows: Iterable[RowDict], metric: str = "dice") -> Verdict:
    """The verdict of the rows of one model on one split; rows of other metrics are left out."""
    dice = select(rows, metric=metric)
    pairs = {
        key: mean
        for key, summary in table(dice, "known", "site", "class").items()
        if (mean := summary.mean) is not None
    }
    return Verdict(
        clientwise=client_wise_index(dice),
        known=mean_of_defined(mean for (known, *_), mean in pairs.items() if known),
        unknown=mean_of_defined(mean for (known, *_), mean in pairs.items() if not known),
        n_sites=len({site for known, site, _ in pairs if known}),
        n_known=sum(bool(known) for known, *_ in pairs),
        n_unknown=sum(not known for known, *_ in pairs),
    )


class Spread(NamedTuple):
    """How the values of a cell lie: a 95 % interval of their mean, or, of fewer than FEW values, the lowest and the
    highest."""

    low: float
    high: float
    interval: bool


FEW = LEAST_PAIRS
"""Fewer values get no interval: resamples of so few say little of others."""


def spread(values: Sequence[float]) -> Spread | None:
    """None for fewer than two values. The interval is that of `statistics.bootstrap_interval`, equal for equal values."""
    if len(values) < 2:
        return None
    if len(values) < FEW:
        return Spread(min(values), max(values), False)
    low, high = bootstrap_interval(values, np.random.default_rng(len(values)), draws=1000)
    return Spread(low, high, True)


def outliers(rows: Iterable[RowDict]) -> list[RowDict]:
    """The rows whose value is far on the bad side of the others of their class, metric, model and split: beyond the
    quartile by more than three times the range between the quartiles, and by at least 0.1, or 5 mm. Of fewer than FEW
    values none is."""
    found = []
    for (_, metric, _, _), group in grouped(rows, "class", "metric", "model", "split").items():
        described = METRICS.get(metric)
        values = [row["value"] for row in group if row["value"] is not None]
        if described is None or len(values) < FEW:
            continue
        low, high = np.percentile(values, [25, 75])
        apart = max(3 * (high - low), 5.0 if described.unit == "mm" else 0.1)
        for row in group:
            value = row["value"]
            if value is not None and (
                (value < low - apart) if described.higher_is_better else (value > high + apart)
            ):
                found.append(row)
    return found


class ClassValue(NamedTuple):
    """One metric of one class at one site: its value, its interval, and what it is of. What is None is so for the
    reasons. undefined: share of the resamples without a value; known: does the site annotate the class."""

    value: float | None
    reason: str
    low: float | None
    high: float | None
    undefined: float | None
    no_interval: str
    n_positive: int | None
    n_negative: int | None
    known: bool


def class_values(rows: Iterable[RowDict], metric: str) -> dict[tuple[str, str, str], ClassValue]:
    """(class, site, model) -> its value, from rows of one split of labels of whole images."""
    parts: dict[tuple[str, str, str], dict[str, RowDict]] = {}
    for row in rows:
        parts.setdefault((row["class"], row["site"], row["model"]), {})[row["metric"]] = row

    def of(found: Mapping[str, RowDict], name: str) -> Any:
        return found[name]["value"] if name in found else None

    def counted(found: Mapping[str, RowDict], name: str) -> int | None:
        value = of(found, name)
        return None if value is None else int(value)

    return {
        key: ClassValue(
            value=of(found, metric),
            reason=found[metric]["reason"],
            low=of(found, f"{metric}_low"),
            high=of(found, f"{metric}_high"),
            undefined=of(found, f"{metric}_undefined"),
            no_interval=found[f"{metric}_low"]["reason"] if f"{metric}_low" in found else "",
            n_positive=counted(found, "n_positive"),
            n_negative=counted(found, "n_negative"),
            known=bool(found[metric]["known"]),
        )
        for key, found in parts.items()
        if metric in found
    }


def pooled(run: Run, split: str, model: str) -> dict[str, Histogram]:
    """class -> the histogram of all sites' images of a split together. Raises RunFolderError where the sites' edges
    differ."""
    found: dict[str, Histogram] = {}
    for entry in run.histograms:
        if (entry.split, entry.model) == (split, model):
            try:
                before = found.get(entry.class_)
                found[entry.class_] = entry.histogram if before is None else before + entry.histogram
            except WireError as error:
                raise RunFolderError(f"{run.folder / 'histograms.json'}: {error}") from error
    return found


class Macro(NamedTuple):
    """The mean over n classes of a value, which is within `error` of the exact one; None, with a reason, where n is 0."""

    value: float | None
    error: float | None
    n: int
    reason: str


def pooled_macro(run: Run, split: str, model: str) -> Macro:
    """The mean over classes of AUROC over all sites' images of a split together."""
    every = [h.auroc() for h in pooled(run, split, model).values()]
    found = [e for e in every if e.value is not None]
    value, error = (
        mean_of_defined(values) for values in ((e.value for e in found), (e.error for e in found))
    )
    reasons = [e.reason for e in every] or ["needs the histograms of the final evaluation"]
    return Macro(value, error, len(found), "" if found else reasons[0])


class Confusion(NamedTuple):
    """Images by truth and by whether their score reaches the threshold."""

    true_positive: int
    false_negative: int
    false_positive: int
    true_negative: int

    def shares(self) -> list[float | None]:
        """Sensitivity, specificity, precision and F1; None where nothing is divided by."""
        tp, fn, fp, tn = self
        parts = ((tp, tp + fn), (tn, tn + fp), (tp, tp + fp), (2 * tp, 2 * tp + fp + fn))
        return [part / whole if whole else None for part, whole in parts]


def confusion(histogram: Histogram, threshold: float) -> Confusion | None:
    """The counts at a threshold that is an edge of the histogram, where they are exact; None at any other."""
    at = [place for place, edge in enumerate(histogram.edges) if math.isclose(edge, threshold, abs_tol=1e-12)]
    if not at or histogram.not_finite:
        return None
    (cut,) = at[:1]
    p, n = histogram.positives, histogram.negatives
    return Confusion(sum(p[cut:]), sum(p[:cut]), sum(n[cut:]), sum(n[:cut]))


SUPERVISED = ("supervised", "segmentation")
"""The names under which methods log the term of the loss that the annotations give."""


def main_loss(terms: Iterable[str]) -> str | None:
    """Which of a site's logged terms says how training goes: the supervised one where the loss has several, because the
    weight of another may change from round to round; else the loss. None where neither is logged."""
    there = set(terms)
    return next((name for name in (*SUPERVISED, "loss") if name in there), None)


def loss_terms(run: Run) -> tuple[str, ...]:
    """The names of the loss and of every further number that sites log, that of `main_loss` first."""
    found = {key for entry in run.rounds for site in entry.sites.values() for key in site} - BOOKKEEPING
    return tuple(sorted(found, key=lambda key: (key != main_loss(found), key != "loss", key)))


def not_finite(run: Run) -> list[tuple[int, str, str]]:
    """(round, site, term) of every logged number that is not finite."""
    return [
        (entry.number, site, term)
        for entry in run.rounds
        for site, terms in sorted(entry.sites.items())
        for term, value in sorted(terms.items())
        if term not in BOOKKEEPING and number(value) is None
    ]


def lost(run: Run) -> list[tuple[int, str, str]]:
    """(round, site, reason) of every site that was lost; round 0 is the start."""
    return [
        (entry.number, site, str(why)) for entry in run.records for site, why in sorted(entry.lost.items())
    ]


Presence = Literal["answered", "lost", "lost in evaluation"]


def presence(run: Run) -> dict[str, dict[int, Presence]]:
    """site -> round -> what became of it, for every site that was asked to train. A round is left out where the
    site was not asked. "lost in evaluation": it trained, and its scores of that round are missing."""
    found: dict[str, dict[int, Presence]] = {}
    for entry in run.rounds:
        for site in sorted({*entry.cost, *entry.lost}):
            why = str(entry.lost.get(site, ""))
            if why and not why.startswith("evaluate:"):
                found.setdefault(site, {})[entry.number] = "lost"
            elif any(not key.startswith("evaluate_") for key in entry.cost.get(site, {})):
                found.setdefault(site, {})[entry.number] = "lost in evaluation" if why else "answered"
    return found


def traffic(entries: Iterable[Round], key: str, site: str | None = None) -> float:
    """Bytes of one kind (a key of TRAFFIC) over some rounds, of one site or of all."""
    return sum(
        number(cost.get(key)) or 0.0
        for entry in entries
        for name, cost in entry.cost.items()
        if site in (None, name)
    )


def all_bytes(entries: Iterable[Round], site: str | None = None) -> float:
    """Bytes of every kind, as `traffic`."""
    entries = list(entries)
    return sum(traffic(entries, key, site) for key in TRAFFIC)


def costs(run: Run, site: str, key: str) -> list[float]:
    """One number of a site's cost, of every round that has it."""
    return [value for e in run.rounds if (value := number(e.cost.get(site, {}).get(key))) is not None]


class SiteCost(NamedTuple):
    """Over all rounds: how many a site trained in, the seconds of it and what share of them was optimizer steps in %,
    the seconds of evaluation, and the peak of its memory in MiB; None where it is not known."""

    rounds: int
    training: float
    in_steps: float | None
    evaluation: float | None
    peak: float | None


def site_cost(run: Run, site: str) -> SiteCost | None:
    """Time and memory of a site; None where it took part in no round."""
    spent, evaluated = costs(run, site, "seconds"), costs(run, site, "evaluate_seconds")
    if not spent and not evaluated:
        return None
    steps, saved = (
        sum(number(e.sites.get(site, {}).get(key)) or 0.0 for e in run.rounds)
        for key in ("step_seconds", "saved_seconds")
    )
    training = sum(spent) + saved
    return SiteCost(
        len(spent),
        training,
        100 * steps / training if training and steps else None,
        sum(evaluated) or None,
        max(costs(run, site, "peak_mb") + costs(run, site, "evaluate_peak_mb"), default=None),
    )


def phase_seconds(run: Run) -> dict[str, list[float]]:
    """phase -> its seconds in every round that has them."""
    phases = dict.fromkeys(name for entry in run.rounds for name in entry.phases)
    return {p: [s for e in run.rounds if (s := number(e.phases.get(p))) is not None] for p in phases}
