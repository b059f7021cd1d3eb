"""Metrics of image-level classes under missing labels: exact, from summable histograms, with patient
bootstrap.

Each class is a yes or no of its own and is judged over its known samples only. One rule holds for every
metric: a class without a known sample, with one label value, or with a score that is not finite has no value,
only the reason. A sample is called positive where its score is at least the threshold.

auroc               share of (positive, negative) pairs in which the positive scores higher; ties count half.
ap                  average precision, sum over falling distinct scores of (recall gained) x precision, with
                    no interpolation; tied scores are one threshold.
f1, sensitivity, specificity, balanced_accuracy (mean of the two before)   at the class's threshold.
ece                 expected calibration error of the positive class, sum over bins of
                    (samples in bin / samples) x |mean score - share of positives|. Equal-width bins [b/K,
                    (b+1)/K), the last one closed.
ece_mass            the same over K bins of equal mass: a sample whose mid-rank, counted from the lowest
                    score, is r of n (0 < r < n) is in bin floor(K r / n); so tied scores share a bin.
brier               mean of (score - truth) squared.

All of them depend only on how many positives and negatives there are at each distinct score. So a resample is
a row of weights over samples that are sorted once, and a histogram is a set of scores that are tied per bin.

Shapes: N samples, n known samples of one class, C classes, G distinct scores, D resamples, K bins.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from fedatlas.core.errors import WireError

METRICS = {
    "auroc": "Area under the ROC curve, 0 to 1; ties count half.",
    "ap": "Average precision without interpolation, 0 to 1; tied scores are one threshold.",
    "f1": "F1 at the class's threshold, 0 to 1.",
    "sensitivity": "Share of positives at or above the threshold.",
    "specificity": "Share of negatives below the threshold.",
    "balanced_accuracy": "Mean of sensitivity and specificity.",
    "ece": "Expected calibration error over bins of equal width, 0 to 1.",
    "ece_mass": "Expected calibration error over bins of equal mass, 0 to 1.",
    "brier": "Mean squared difference of score and truth, 0 to 1.",
}
"""name -> what it is."""

THRESHOLDED = frozenset({"f1", "sensitivity", "specificity", "balanced_accuracy"})
"""The metrics that need a threshold."""

Criterion = Literal["f1", "youden"]

ALL_ALIKE = "all scores are alike, or lie in one bin: a threshold would separate nothing"
NO_CUT = "no cut is better than to call everything present: a threshold would separate nothing"
"""The reasons of a threshold that is refused."""

_CHUNK = 1 << 20
"""Weights held at once by a bootstrap."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What one model says of N samples.

    scores [N, C] in 0..1; truth [N, C] in {0, 1}; known [N, C] bool. Where known is False, scores and truth
    may hold anything. patients: N names; a name is one patient.

    Raises ValueError for shapes that do not fit, a known truth besides 0 and 1, or a finite known score
    outside of 0..1.
    """

    scores: np.ndarray
    truth: np.ndarray
    known: np.ndarray
    patients: Sequence[str]

    def __post_init__(self) -> None:
        shapes = [np.shape(array) for array in (self.scores, self.truth, self.known)]
        if len(shapes[0]) != 2 or len(set(shapes)) != 1 or len(self.patients) != shapes[0][0]:
            raise ValueError(
                f"scores, truth and known have the shapes {', '.join(map(str, shapes))} with "
                f"{len(self.patients)} patients; expected [N, C] three times and N patients"
            )
        if self.known.dtype != np.bool_:
            raise ValueError(f"known is {self.known.dtype}; it must be bool")
        truth, scores = self.truth[self.known], self.scores[self.known]
        wrong = truth[(truth != 0) & (truth != 1)]
        if len(wrong):
            raise ValueError(f"truth holds {wrong[0]} where it is known; allowed: 0 and 1")
        _check_scores(scores[np.isfinite(scores)])

    @property
    def classes(self) -> int:
        """C."""
        return self.scores.shape[1]

    def of_class(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores [n] float64 and truth [n] bool of a class's known samples."""
        rows = self.known[:, index]
        return self.scores[rows, index].astype(np.float64), self.truth[rows, index] == 1


@dataclass(frozen=True)
class ClassScore:
    """One metric of one class: a value, or None and the reason. n_positive, n_negative: of its known
    samples."""

    class_index: int
    metric: str
    value: float | None
    n_positive: int
    n_negative: int
    reason: str = ""


@dataclass(frozen=True)
class Threshold:
    """Where a class begins to be positive, or None and the reason. reached: the criterion's value there on
    the samples that it was fitted on, if it was fitted."""

    value: float | None
    reached: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Estimate:
    """A value whose distance to the exact one is at most `error`, or None and the reason."""

    value: float | None
    error: float | None
    reason: str = ""


@dataclass(frozen=True)
class Roc:
    """Points of a ROC curve from (0, 0) to (1, 1). Point i calls scores >= threshold[i] positive; the first
    is infinite."""

    threshold: list[float]
    false_positive_rate: list[float]
    true_positive_rate: list[float]


@dataclass(frozen=True)
class ReliabilityBin:
    """Samples with lower <= score < upper (upper included in the last bin); None where n is 0."""

    lower: float
    upper: float
    n: int
    mean_score: float | None
    positive_share: float | None


@dataclass(frozen=True)
class Interval:
    """A value and its percentile interval; what is None is so for the reason.

    draws: resamples drawn; undefined: those in which the metric had no value, which are not in the interval.
    patients: resampled. classes: averaged over.
    """

    value: float | None
    low: float | None
    high: float | None
    draws: int
    undefined: int
    patients: int
    classes: tuple[int, ...]
    reason: str = ""

    def cells(self, metric: str, name: str) -> list[dict[str, Any]]:
        """As the function `cells`, for class `name`: <metric>_low, <metric>_high and <metric>_undefined, the
        share of draws without a value."""
        share = self.undefined / self.draws if self.draws else None
        values = {"low": self.low, "high": self.high, "undefined": share}
        return [
            _cell(name, f"{metric}_{end}", value, "" if value is not None else self.reason)
            for end, value in values.items()
        ]


def score(
    predictions: Predictions,
    metrics: Sequence[str],
    thresholds: Sequence[Threshold] | None = None,
    *,
    bins: int = 10,
) -> list[ClassScore]:
    """Every metric of every class, in the order of the classes.

    thresholds: one per class; without them the metrics in THRESHOLDED have no value. bins: of ece and
    ece_mass.

    Raises ValueError for an unknown metric, fewer than one bin, or thresholds that are not C finite numbers.
    """
    limits = _checked(predictions, metrics, thresholds, bins)
    found = []
    for c in range(predictions.classes):
        scores, truth = predictions.of_class(c)
        n_positive = int(truth.sum())
        why = _why_not(scores, truth)
        counts = None if why else _Ranking(scores, truth).counts()
        for metric in metrics:
            value, reason = None, why or _why_no_threshold(metric, limits[c])
            if counts and not reason:
                value = float(_values(metric, counts, limits[c].value, bins)[0])
            found.append(ClassScore(c, metric, value, n_positive, len(truth) - n_positive, reason))
    return found


def cells(scores: Iterable[ClassScore], names: Sequence[str]) -> list[dict[str, Any]]:
    """The columns class_, metric, value and reason of an `evaluate.Row`; the caller adds the others.

    Each class begins with the rows n_positive and n_negative. names: of the classes, by index.
    """
    found, seen = [], set()
    for s in scores:
        name = names[s.class_index]
        if s.class_index not in seen:
            seen.add(s.class_index)
            found.append(_cell(name, "n_positive", float(s.n_positive)))
            found.append(_cell(name, "n_negative", float(s.n_negative)))
        found.append(_cell(name, s.metric, s.value, s.reason))
    return found


def roc(scores: np.ndarray, truth: np.ndarray) -> Roc | None:
    """Every point of the ROC curve of one class, scores [n] and truth [n]; None where AUROC is not
    defined."""
    scores, truth = np.asarray(scores, dtype=np.float64), np.equal(truth, 1)
    if _why_not(scores, truth):
        return None
    counts = _Ranking(scores, truth).counts()
    return _roc(counts, counts.scores)


def reliability(scores: np.ndarray, truth: np.ndarray, bins: int = 10) -> list[ReliabilityBin]:
    """What `ece` sums, of one class, scores [n] and truth [n]; scores that are not finite are left out."""
    scores, truth = np.asarray(scores, dtype=np.float64), np.equal(truth, 1)
    finite = np.isfinite(scores)
    ranking = _Ranking(scores[finite], truth[finite])
    return _reliability(ranking.counts(), bins)


def equal_edges(bins: int) -> tuple[float, ...]:
    """The bounds 0, 1/bins, ..., 1. Raises ValueError for fewer than one bin."""
    if bins < 1:
        raise ValueError(f"{bins} bins; at least 1 is needed")
    return tuple((np.arange(bins + 1) / bins).tolist())


FINE = 100
"""Bins from which on histograms have further ones near 0 and 1. Whoever asks for fewer wants scores to be told less closely."""


def score_edges(bins: int) -> tuple[float, ...]:
    """The bounds of the histograms that sites send: 0, 1/bins, ..., 1, and from `FINE` bins on, within the first and the last of these,
    further ones, each at half the distance of the one before to 0, or to 1, down to 2^-20.

    So the bins near 0 and 1 are even in the logit, as the scores of a rare finding need it. The bounds follow from
    `bins` alone, so that the sites agree on them without looking at data. Raises ValueError for fewer than one bin.
    """
    ends = [2.0**-k for k in range(1, 21) if 2.0**-k < 1 / bins] if bins >= FINE else []
    return tuple(sorted({*equal_edges(bins), *ends, *(1 - end for end in ends)}))


@dataclass(frozen=True)
class Histogram:
    """How many positives and negatives of one class score in each bin; sites add theirs up with `+`.

    A site that labels only some classes, or has only positives, adds what it has; single scores do not leave
    it. A bin that holds one sample still tells its score to within the bin, so bins should not outnumber
    samples, or the counts be summed by secure aggregation.

    edges: rising, from 0 to 1; bin b is [edges[b], edges[b + 1]), the last one closed. Where scores crowd
    near 0, as of a rare finding, edges that lie closer there give a smaller error. not_finite: scores in no
    bin; with one of them nothing is defined.

    Raises WireError for edges or counts of another form, and where two of different edges are added.
    """

    edges: tuple[float, ...]
    positives: tuple[int, ...]
    negatives: tuple[int, ...]
    not_finite: int = 0

    def __post_init__(self) -> None:
        _check_edges(self.edges)
        bins = len(self.edges) - 1
        if len(self.positives) != bins or len(self.negatives) != bins:
            raise WireError(
                f"histogram: {len(self.positives)} and {len(self.negatives)} counts; expected {bins} of both"
            )
        counts = (*self.positives, *self.negatives, self.not_finite)
        if not all(type(count) is int and count >= 0 for count in counts) or sum(counts) >= 1 << 31:
            raise WireError("histogram: counts must be whole numbers from 0 on, with a sum below 2^31")

    @classmethod
    def of(cls, scores: np.ndarray, truth: np.ndarray, edges: Sequence[float]) -> "Histogram":
        """Of one class, scores [n] in 0..1 and truth [n]. Raises ValueError for a score outside."""
        _check_edges(edges)
        scores, truth = np.asarray(scores, dtype=np.float64), np.equal(truth, 1)
        finite = np.isfinite(scores)
        _check_scores(scores[finite])
        where, truth = _bin_of(scores[finite], edges), truth[finite]
        bins = len(edges) - 1
        return cls(
            tuple(float(edge) for edge in edges),
            tuple(np.bincount(where[truth], minlength=bins).tolist()),
            tuple(np.bincount(where[~truth], minlength=bins).tolist()),
            int(np.count_nonzero(~finite)),
        )

    def __add__(self, other: "Histogram") -> "Histogram":
        if self.edges != other.edges:
            raise WireError(
                f"histograms of {len(self.edges) - 1} and {len(other.edges) - 1} bins with different edges "
                "cannot be added; all sites must use the same edges"
            )
        return Histogram(
            self.edges,
            tuple(a + b for a, b in zip(self.positives, other.positives, strict=True)),
            tuple(a + b for a, b in zip(self.negatives, other.negatives, strict=True)),
            self.not_finite + other.not_finite,
        )

    def to_dict(self) -> dict[str, Any]:
        """Lists and numbers only."""
        return {
            "edges": list(self.edges),
            "positives": list(self.positives),
            "negatives": list(self.negatives),
            "not_finite": self.not_finite,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Histogram":
        """What `to_dict` gave. Raises WireError if it is not of that form."""
        try:
            edges = tuple(float(edge) for edge in found["edges"])
            return cls(edges, tuple(found["positives"]), tuple(found["negatives"]), found["not_finite"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"histogram: not of the expected form ({type(error).__name__})") from error

    @property
    def reason(self) -> str:
        """Why nothing is defined; empty where all is."""
        return _reason(sum(self.positives), sum(self.negatives), self.not_finite)

    def auroc(self) -> Estimate:
        """Pairs within a bin count half, so the exact value is within sum_b P_b N_b / (2 P N). Not defined where all
        scores lie in one bin."""
        if self.reason:
            return Estimate(None, None, self.reason)
        if len(filled := self._filled()) == 1:
            low, high = self.edges[filled[0]], self.edges[filled[0] + 1]
            return Estimate(None, None, f"all scores lie in one bin, from {low:.3g} to {high:.3g}")
        counts = self._counts()
        shared = int((counts.positives * counts.negatives).sum())
        pairs = sum(self.positives) * sum(self.negatives)
        return Estimate(float(_values("auroc", counts, None, 1)[0]), shared / (2 * pairs))

    def ece(self, bins: int = 10) -> Estimate:
        """Over bins of equal width, with every score taken as the middle of its bin; the exact value is
        within half the mean width of the samples' bins. Needs edges that hold every multiple of 1 / bins."""
        if self.reason:
            return Estimate(None, None, self.reason)
        if not set(equal_edges(bins)) <= set(self.edges):
            return Estimate(None, None, f"the edges do not hold the bounds of {bins} bins of equal width")
        counts = self._counts()
        sizes = np.add(self.positives, self.negatives)
        error = float((sizes * np.diff(self.edges)).sum() / (2 * sizes.sum()))
        return Estimate(float(_values("ece", counts, None, bins)[0]), error)

    def roc(self) -> Roc | None:
        """The points of the exact ROC curve at the edges; None where AUROC is not defined."""
        if self.reason:
            return None
        edges = np.asarray(self.edges)
        return _roc(self._counts(), edges[self._filled()])

    def reliability(self, bins: int = 10) -> list[ReliabilityBin]:
        """As the function `reliability`; mean_score takes every score as the middle of its bin. A bin of the
        histogram that lies in two of the `bins` counts where its middle is."""
        return _reliability(self._counts(), bins)

    def _filled(self) -> np.ndarray:
        """The bins that hold a sample, from the highest scores to the lowest."""
        return np.flatnonzero(np.add(self.positives, self.negatives))[::-1]

    def _counts(self) -> "_Counts":
        filled, edges = self._filled(), np.asarray(self.edges)
        return _Counts(
            (edges[filled] + edges[filled + 1]) / 2,
            np.asarray(self.positives, dtype=np.int64)[None, filled],
            np.asarray(self.negatives, dtype=np.int64)[None, filled],
        )

    def _cutoffs(self) -> np.ndarray:
        """[G] per filled bin an edge that calls it positive and the next lower one not: in the middle of the
        edges between them; 0 for the lowest."""
        filled = self._filled()
        middle = np.append((filled[:-1] + filled[1:] + 1) // 2, 0)
        return np.asarray(self.edges)[middle]


def histograms(predictions: Predictions, edges: Sequence[float]) -> list[Histogram]:
    """One per class, of its known samples."""
    return [Histogram.of(*predictions.of_class(c), edges) for c in range(predictions.classes)]


def fit_thresholds(source: Predictions | Sequence[Histogram], criterion: Criterion) -> list[Threshold]:
    """Per class the threshold with the highest F1, or the highest Youden index (sensitivity + specificity -
    1).

    Every way to cut the distinct scores, or the filled bins, is tried; of equally good ones the highest is
    taken, and the threshold lies in the middle of the gap below the last positive call. With histograms it is an
    edge, and `reached` is exact. Where no cut is better than to call everything positive there is no threshold:
    it would separate nothing.

    Raises ValueError for an unknown criterion.
    """
    if criterion not in ("f1", "youden"):
        raise ValueError(f"criterion {criterion!r} is not known; known: f1, youden")
    found = []
    if isinstance(source, Predictions):
        for c in range(source.classes):
            scores, truth = source.of_class(c)
            reason = _why_not(scores, truth)
            if reason:
                found.append(Threshold(None, None, reason))
            else:
                counts = _Ranking(scores, truth).counts()
                found.append(_best_cut(counts, _between(counts.scores), criterion))
    else:
        for histogram in source:
            if histogram.reason:
                found.append(Threshold(None, None, histogram.reason))
            else:
                found.append(_best_cut(histogram._counts(), histogram._cutoffs(), criterion))
    return found


def bootstrap(
    predictions: Predictions,
    metric: str,
    rng: np.random.Generator,
    *,
    class_index: int | None = None,
    thresholds: Sequence[Threshold] | None = None,
    bins: int = 10,
    level: float = 0.95,
    draws: int = 2000,
) -> Interval:
    """The percentile interval of a metric over patients drawn with replacement, each with all of its samples.

    class_index: one class, and the patients with a known sample of it; None: the mean over the classes that
    have a value, and the patients with a known sample of any of them, and a draw in which one of these
    classes has no value counts as undefined. thresholds are held fixed. Equal generators give equal
    intervals.

    Raises ValueError as `score` does, and for a class, a level or a number of draws that is not possible.
    """
    models = [(predictions, _checked(predictions, [metric], thresholds, bins))]
    return _interval(models, metric, rng, class_index, bins, level, draws)


def bootstrap_difference(
    one: Predictions,
    other: Predictions,
    metric: str,
    rng: np.random.Generator,
    *,
    class_index: int | None = None,
    thresholds: Sequence[Threshold] | None = None,
    other_thresholds: Sequence[Threshold] | None = None,
    bins: int = 10,
    level: float = 0.95,
    draws: int = 2000,
) -> Interval:
    """As `bootstrap`, for one - other on the same samples: every draw scores both models on the same
    patients.

    Raises ValueError also where truth, known or patients of the two are not equal.
    """
    if (
        not np.array_equal(one.known, other.known)
        or not np.array_equal(one.truth[one.known], other.truth[other.known])
        or list(one.patients) != list(other.patients)
    ):
        raise ValueError("paired difference: known, truth and patients must be equal for both models")
    models = [
        (one, _checked(one, [metric], thresholds, bins)),
        (other, _checked(other, [metric], other_thresholds, bins)),
    ]
    return _interval(models, metric, rng, class_index, bins, level, draws)


def _interval(
    models: Sequence[tuple[Predictions, Sequence[Threshold]]],
    metric: str,
    rng: np.random.Generator,
    class_index: int | None,
    bins: int,
    level: float,
    draws: int,
) -> Interval:
    first = models[0][0]
    if class_index is not None and not 0 <= class_index < first.classes:
        raise ValueError(f"class {class_index} is not known; allowed: 0 to {first.classes - 1}")
    if not 0 < level < 1 or draws < 1:
        raise ValueError(f"level {level} with {draws} draws; expected a level between 0 and 1, and a draw")
    asked = range(first.classes) if class_index is None else [class_index]
    reasons = {
        c: next(filter(None, (_why_no_value(p, c, metric, limits[c]) for p, limits in models)), "")
        for c in asked
    }
    classes = tuple(c for c in asked if not reasons[c])
    if not classes:
        reason = "no class has a value" if class_index is None else reasons[class_index]
        return Interval(None, None, None, 0, 0, 0, (), reason)

    known = first.known[:, list(classes)]
    rows = np.flatnonzero(known.any(1))
    names, patient = np.unique(
        np.asarray(first.patients, dtype=object)[rows].astype(str), return_inverse=True
    )
    rankings = [[_Ranking(*p.of_class(c)) for c in classes] for p, _ in models]

    def of_draws(weights: np.ndarray) -> np.ndarray:
        """[D, len(rows)] -> [D], NaN where not defined."""
        means = []
        for ranked, (_, limits) in zip(rankings, models, strict=True):
            values = [
                _values(metric, ranking.counts(weights[:, known[rows, j]]), limits[c].value, bins)
                for j, (c, ranking) in enumerate(zip(classes, ranked, strict=True))
            ]
            means.append(sum(values) / len(classes))
        return means[0] - means[1] if len(means) == 2 else means[0]

    value = float(of_draws(np.ones((1, len(rows)), dtype=np.int64))[0])
    if len(names) < 2:
        reason = "all samples are of one patient; at least 2 are needed"
        return Interval(value, None, None, 0, 0, 1, classes, reason)
    drawn = np.concatenate([of_draws(w) for w in _resamples(rng, patient, len(names), draws)])
    defined = drawn[~np.isnan(drawn)]
    undefined = draws - len(defined)
    if not len(defined):
        reason = f"without a value in all of {draws} resamples"
        return Interval(value, None, None, draws, undefined, len(names), classes, reason)
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Interval(value, low, high, draws, undefined, len(names), classes)


def _resamples(
    rng: np.random.Generator, patient: np.ndarray, patients: int, draws: int
) -> Iterator[np.ndarray]:
    """Weights [D, len(patient)]: how often a sample's patient was drawn; in pieces that fit in memory."""
    piece = max(1, _CHUNK // max(len(patient), 1))
    for start in range(0, draws, piece):
        size = min(piece, draws - start)
        picked = rng.integers(0, patients, (size, patients)) + np.arange(size)[:, None] * patients
        times = np.bincount(picked.ravel(), minlength=size * patients).reshape(size, patients)
        yield times[:, patient]


@dataclass(frozen=True, eq=False)
class _Counts:
    """Positives and negatives [D, G] at each distinct score [G], the highest score first."""

    scores: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray


class _Ranking:
    """The samples of one class, sorted once."""

    def __init__(self, scores: np.ndarray, truth: np.ndarray) -> None:
        self.order = np.argsort(-scores, kind="stable")
        self.truth = truth[self.order]
        falling = scores[self.order]
        self.starts = np.flatnonzero(np.diff(falling, prepend=np.inf))
        self.scores = falling[self.starts]

    def counts(self, weights: np.ndarray | None = None) -> _Counts:
        """weights [D, n]: how often each sample counts; without them each counts once, and D is 1."""
        if weights is None:
            weights = np.ones((1, len(self.order)), dtype=np.int64)
        weights = weights[:, self.order]
        positives = np.where(self.truth, weights, 0)
        if len(self.starts) < len(self.order):
            weights = np.add.reduceat(weights, self.starts, axis=1)
            positives = np.add.reduceat(positives, self.starts, axis=1)
        return _Counts(self.scores, positives, weights - positives)


def _values(metric: str, counts: _Counts, threshold: float | None, bins: int) -> np.ndarray:
    """[D], NaN where a resample has no positive or no negative."""
    both = counts.positives.any(1) & counts.negatives.any(1)
    found = np.full(both.shape, np.nan)
    if np.any(both):
        counts = _Counts(counts.scores, counts.positives[both], counts.negatives[both])
        if metric in THRESHOLDED:
            assert threshold is not None
            found[both] = _DECIDED[metric](*_decisions(counts, threshold))
        elif metric in ("ece", "ece_mass"):
            where = _widths(counts, bins) if metric == "ece" else _masses(counts, bins)
            gap = np.abs(_per_bin(_gaps(counts), where, bins)).sum(1)
            found[both] = gap / (counts.positives + counts.negatives).sum(1)
        else:
            found[both] = _RANKED[metric](counts)
    return found


def _auroc(counts: _Counts) -> np.ndarray:
    p, n = counts.positives, counts.negatives
    total = n.sum(1)
    lower = total[:, None] - n.cumsum(1)
    return (p * (2 * lower + n)).sum(1) / (2 * p.sum(1) * total)


def _average_precision(counts: _Counts) -> np.ndarray:
    found = counts.positives.cumsum(1)
    called = found + counts.negatives.cumsum(1)
    return (counts.positives * (found / np.maximum(called, 1))).sum(1) / found[:, -1]


def _brier(counts: _Counts) -> np.ndarray:
    p, n = counts.positives, counts.negatives
    return (p @ (1 - counts.scores) ** 2 + n @ counts.scores**2) / (p + n).sum(1)


_RANKED: Mapping[str, Callable[[_Counts], np.ndarray]] = {
    "auroc": _auroc,
    "ap": _average_precision,
    "brier": _brier,
}

_DECIDED: Mapping[str, Callable[..., np.ndarray]] = {
    "f1": lambda tp, fp, p, n: 2 * tp / (tp + fp + p),
    "sensitivity": lambda tp, fp, p, n: tp / p,
    "specificity": lambda tp, fp, p, n: (n - fp) / n,
    "balanced_accuracy": lambda tp, fp, p, n: (tp / p + (n - fp) / n) / 2,
}
"""From true and false positives, positives and negatives."""


def _decisions(counts: _Counts, threshold: float) -> tuple[np.ndarray, ...]:
    called = counts.scores >= threshold
    return (
        counts.positives[:, called].sum(1),
        counts.negatives[:, called].sum(1),
        counts.positives.sum(1),
        counts.negatives.sum(1),
    )


def _gaps(counts: _Counts) -> np.ndarray:
    """[D, G] sum of score - truth."""
    return (counts.positives + counts.negatives) * counts.scores - counts.positives


def _check_scores(scores: np.ndarray) -> None:
    outside = scores[(scores < 0) | (scores > 1)]
    if len(outside):
        raise ValueError(f"scores hold {outside[0]}; allowed: probabilities, 0 to 1")


def _check_edges(edges: Sequence[float]) -> None:
    rising = all(a < b for a, b in pairwise(edges))
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != 1 or not rising:
        raise WireError(f"histogram: {len(edges)} edges; expected at least 2 that rise from 0 to 1")


def _bin_of(scores: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    return np.clip(np.searchsorted(np.asarray(edges), scores, side="right") - 1, 0, len(edges) - 2)


def _widths(counts: _Counts, bins: int) -> np.ndarray:
    return np.broadcast_to(_bin_of(counts.scores, equal_edges(bins)), counts.positives.shape)


def _masses(counts: _Counts, bins: int) -> np.ndarray:
    size = counts.positives + counts.negatives
    total = size.sum(1, keepdims=True)
    before = total - size.cumsum(1)
    # a score of weight 0 above all others would fall past the last bin; it adds nothing there
    return np.minimum(bins * (2 * before + size) // (2 * total), bins - 1)


def _per_bin(values: np.ndarray, where: np.ndarray, bins: int) -> np.ndarray:
    """Sums of values [D, G] by their bin [D, G]: [D, bins]."""
    rows = np.arange(len(values))[:, None] * bins
    sums = np.bincount((rows + where).ravel(), values.ravel(), minlength=len(values) * bins)
    return sums.reshape(len(values), bins)


def _roc(counts: _Counts, cutoffs: np.ndarray) -> Roc:
    true, false = counts.positives[0].cumsum(), counts.negatives[0].cumsum()
    return Roc(
        [np.inf, *cutoffs.tolist()],
        [0.0, *(false / false[-1]).tolist()],
        [0.0, *(true / true[-1]).tolist()],
    )


def _reliability(counts: _Counts, bins: int) -> list[ReliabilityBin]:
    edges, where = equal_edges(bins), _widths(counts, bins)
    size = counts.positives + counts.negatives
    n, total, positive = (
        _per_bin(values, where, bins)[0].tolist() for values in (size, size * counts.scores, counts.positives)
    )
    return [
        ReliabilityBin(
            edges[b],
            edges[b + 1],
            int(n[b]),
            total[b] / n[b] if n[b] else None,
            positive[b] / n[b] if n[b] else None,
        )
        for b in range(bins)
    ]


def _between(scores: np.ndarray) -> np.ndarray:
    """[G] cut-offs in the middle below each falling score; 0 below the last, which no threshold is."""
    lower = np.append(scores[1:], 0.0)
    middle = (scores + lower) / 2
    # the middle of two neighbouring floats can round to the lower one
    cutoffs = np.where(middle > lower, middle, scores)
    cutoffs[-1] = 0.0
    return cutoffs


def _best_cut(counts: _Counts, cutoffs: np.ndarray, criterion: Criterion) -> Threshold:
    tp, fp = counts.positives[0].cumsum(), counts.negatives[0].cumsum()
    p, n = tp[-1], fp[-1]
    # one division of whole numbers: equally good cuts are equal floats
    reached = 2 * tp / (tp + fp + p) if criterion == "f1" else (tp * n - fp * p) / (p * n)
    best = int(reached.argmax())
    if (tp[best] == p and fp[best] == n) or (criterion == "youden" and reached[best] <= 0):
        return Threshold(None, float(reached[best]), ALL_ALIKE if len(tp) == 1 else NO_CUT)
    return Threshold(float(cutoffs[best]), float(reached[best]))


def _reason(n_positive: int, n_negative: int, not_finite: int) -> str:
    if not_finite:
        return f"{not_finite} of {n_positive + n_negative + not_finite} scores are not finite"
    if not n_positive and not n_negative:
        return "no known sample"
    if not n_positive:
        return f"one label value: {n_negative} negative, no positive"
    if not n_negative:
        return f"one label value: {n_positive} positive, no negative"
    return ""


def _why_not(scores: np.ndarray, truth: np.ndarray) -> str:
    finite = np.isfinite(scores)
    return _reason(int(truth[finite].sum()), int((~truth[finite]).sum()), int(np.count_nonzero(~finite)))


def _why_no_threshold(metric: str, threshold: Threshold) -> str:
    if metric not in THRESHOLDED or threshold.value is not None:
        return ""
    return f"no threshold ({threshold.reason})" if threshold.reason else "no threshold"


def _why_no_value(predictions: Predictions, index: int, metric: str, threshold: Threshold) -> str:
    return _why_not(*predictions.of_class(index)) or _why_no_threshold(metric, threshold)


def _checked(
    predictions: Predictions,
    metrics: Sequence[str],
    thresholds: Sequence[Threshold] | None,
    bins: int,
) -> Sequence[Threshold]:
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"metric {metric!r} is not known; known: {', '.join(METRICS)}")
    if bins < 1:
        raise ValueError(f"{bins} bins; at least 1 is needed")
    if thresholds is None:
        return [Threshold(None, None, "none was given")] * predictions.classes
    if len(thresholds) != predictions.classes:
        raise ValueError(
            f"{len(thresholds)} thresholds; expected one for each of {predictions.classes} classes"
        )
    for threshold in thresholds:
        if threshold.value is not None and not math.isfinite(threshold.value):
            raise ValueError(f"threshold {threshold.value}; it must be finite, or None with a reason")
    return thresholds


def _cell(name: str, metric: str, value: float | None, reason: str = "") -> dict[str, Any]:
    return {"class_": name, "metric": metric, "value": value, "reason": reason}
