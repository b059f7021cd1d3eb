"""classification.py against slow literal versions, numbers worked by hand, and what must not change them."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.integrate import trapezoid

from fedatlas.core.errors import WireError
from fedatlas.evaluation import classification
from fedatlas.evaluation.classification import (
    ALL_ALIKE,
    METRICS,
    NO_CUT,
    THRESHOLDED,
    Histogram,
    Predictions,
    Threshold,
    bootstrap,
    bootstrap_difference,
    cells,
    equal_edges,
    fit_thresholds,
    histograms,
    reliability,
    roc,
    score,
    score_edges,
)
from fedatlas.evaluation.evaluate import Row
from fedatlas.evaluation.statistics import read_rows, rows_text, summarise
from fedatlas.transport.store import write_atomic

HALF = Threshold(0.5)


def one_class(scores, truth, patients=None) -> Predictions:
    """Every sample known, each of its own patient unless given."""
    scores = np.asarray(scores, dtype=float)[:, None]
    patients = patients or [f"p{i}" for i in range(len(scores))]
    return Predictions(scores, np.asarray(truth)[:, None], np.ones(scores.shape, dtype=bool), patients)


def value(metric: str, scores, truth, threshold: float = 0.5, bins: int = 10) -> float:
    (found,) = score(one_class(scores, truth), [metric], [Threshold(threshold)], bins=bins)
    assert found.value is not None, found.reason
    return found.value


def cases(loops: int = 60, seed: int = 0):
    """Scores with and without ties, at least one positive and one negative."""
    rng = np.random.default_rng(seed)
    for i in range(loops):
        n = int(rng.integers(2, 60))
        scores = rng.random(n) if i % 3 else rng.integers(0, 5, n) / 4
        if i % 5 == 0:
            scores = scores**6
        truth = (rng.random(n) < rng.uniform(0.1, 0.9)).astype(int)
        truth[:2] = 0, 1
        yield scores, truth, rng


# slow versions, written as the definitions read


def slow_auroc(scores, truth) -> float:
    total, pairs = Fraction(0), 0
    for s, y in zip(scores, truth, strict=True):
        for r, z in zip(scores, truth, strict=True):
            if y == 1 and z == 0:
                pairs += 1
                total += 1 if s > r else Fraction(1, 2) if s == r else 0
    return float(total / pairs)


def slow_ap(scores, truth) -> float:
    total, recall_before = 0.0, 0.0
    for t in sorted(set(scores), reverse=True):
        called = [y for s, y in zip(scores, truth, strict=True) if s >= t]
        recall = sum(called) / sum(truth)
        total += (recall - recall_before) * sum(called) / len(called)
        recall_before = recall
    return total


def slow_decided(metric: str, scores, truth, threshold: float) -> float:
    tp = fp = tn = fn = 0
    for s, y in zip(scores, truth, strict=True):
        if s >= threshold:
            tp, fp = tp + (y == 1), fp + (y == 0)
        else:
            tn, fn = tn + (y == 0), fn + (y == 1)
    sensitivity, specificity = tp / (tp + fn), tn / (tn + fp)
    return {
        "f1": 2 * tp / (2 * tp + fp + fn),
        "sensitivity": sensitivity,
        "specificity": specificity,
        "balanced_accuracy": (sensitivity + specificity) / 2,
    }[metric]


def slow_ece(scores, truth, bins: int, mass: bool) -> float:
    members: dict[int, list[tuple[float, int]]] = {}
    for s, y in zip(scores, truth, strict=True):
        if mass:
            rank = Fraction(sum(r < s for r in scores)) + Fraction(sum(r == s for r in scores), 2)
            b = int(bins * rank / len(scores))
        else:
            b = max(k for k in range(bins) if k / bins <= s)
        members.setdefault(b, []).append((s, y))
    return sum(
        len(m) / len(scores) * abs(np.mean([s for s, _ in m]) - np.mean([y for _, y in m]))
        for m in members.values()
    )


def test_every_metric_equals_its_slow_version() -> None:
    for scores, truth, rng in cases():
        threshold, bins = float(rng.choice(scores)), int(rng.integers(1, 12))
        slow = {
            "auroc": slow_auroc(scores, truth),
            "ap": slow_ap(scores, truth),
            "brier": float(np.mean((scores - truth) ** 2)),
            "ece": slow_ece(scores, truth, bins, mass=False),
            "ece_mass": slow_ece(scores, truth, bins, mass=True),
            **{m: slow_decided(m, scores, truth, threshold) for m in THRESHOLDED},
        }
        assert set(slow) == set(METRICS)
        for metric, expected in slow.items():
            assert value(metric, scores, truth, threshold, bins) == pytest.approx(expected, abs=1e-12), metric


def test_numbers_worked_by_hand() -> None:
    scores, truth = [0.9, 0.8, 0.7, 0.6, 0.3], [1, 0, 1, 0, 0]
    # pairs: .9 beats 3, .7 beats 2 of 3
    assert value("auroc", scores, truth) == pytest.approx(5 / 6)
    # recall 1/2 at precision 1, the other half at 2/3
    assert value("ap", scores, truth) == pytest.approx(1 / 2 + 1 / 3)
    # at .65: two found, one false
    assert value("f1", scores, truth, 0.65) == pytest.approx(4 / 5)
    assert value("sensitivity", scores, truth, 0.65) == 1
    assert value("specificity", scores, truth, 0.65) == pytest.approx(2 / 3)
    assert value("balanced_accuracy", scores, truth, 0.65) == pytest.approx(5 / 6)
    assert value("brier", scores, truth) == pytest.approx((0.01 + 0.64 + 0.09 + 0.36 + 0.09) / 5)
    # two bins: {.3} gap .3; the others mean .75 against 1/2
    assert value("ece", scores, truth, bins=2) == pytest.approx((0.3 + 4 * 0.25) / 5)
    # mid-ranks .5 to 4.5 of 5: {.3, .6} gap .45, {.7, .8, .9} mean .8 against 2/3
    assert value("ece_mass", scores, truth, bins=2) == pytest.approx((2 * 0.45 + 3 * (0.8 - 2 / 3)) / 5)


def test_ties_count_half_and_are_one_threshold() -> None:
    assert value("auroc", [0.5] * 6, [1, 0, 0, 1, 0, 0]) == 0.5
    assert value("ap", [0.5] * 6, [1, 0, 0, 1, 0, 0]) == pytest.approx(1 / 3)
    assert value("auroc", [0.7, 0.7, 0.2], [1, 0, 0]) == 0.75
    assert value("sensitivity", [0.5, 0.2], [1, 0], 0.5) == 1
    assert value("ece", [1.0, 0.9, 0.0], [1, 0, 0], bins=10) == pytest.approx(0.3)


def test_what_must_not_change_the_values() -> None:
    for scores, truth, rng in cases(seed=1):
        auroc = value("auroc", scores, truth)
        assert value("auroc", scores**3 / 2, truth) == auroc
        assert value("auroc", scores, 1 - truth) == pytest.approx(1 - auroc, abs=1e-15)
        assert value("auroc", 1 - scores, truth) == pytest.approx(1 - auroc, abs=1e-15)
        assert value("ap", scores**3 / 2, truth) == value("ap", scores, truth)
        order = rng.permutation(len(scores))
        for metric in METRICS:
            same = value(metric, scores, truth, 0.4)
            assert value(metric, scores[order], truth[order], 0.4) == pytest.approx(same, abs=1e-14)
            twice = value(metric, np.tile(scores, 2), np.tile(truth, 2), 0.4)
            assert twice == pytest.approx(same, abs=1e-14), metric


def test_only_known_samples_count() -> None:
    rng = np.random.default_rng(3)
    scores, truth, known = (
        rng.random((40, 3)),
        rng.integers(0, 2, (40, 3)).astype(float),
        rng.random((40, 3)) < 0.6,
    )
    patients = [f"p{i}" for i in range(40)]
    limits = [HALF] * 3
    before = score(Predictions(scores, truth, known, patients), list(METRICS), limits)
    scores[~known], truth[~known] = np.nan, -1
    assert score(Predictions(scores, truth, known, patients), list(METRICS), limits) == before
    assert len(before) == 3 * len(METRICS)
    for s in before:
        rows = known[:, s.class_index]
        alone = value(s.metric, scores[rows, s.class_index], truth[rows, s.class_index])
        assert s.value == alone
        assert (s.n_positive, s.n_positive + s.n_negative) == (truth[rows, s.class_index].sum(), rows.sum())


def test_no_value_has_a_reason_and_never_an_exception() -> None:
    scores = np.array([[0.2, 0.3, 0.4, np.nan, 0.1], [0.8, 0.1, 0.6, 0.5, 0.9]])
    truth = np.array([[0, 1, 0, 0, 0], [0, 1, 0, 1, 1]])
    known = np.array([[True, True, False, True, True], [True, True, False, True, True]])
    predictions = Predictions(scores, truth, known, ["a", "b"])
    found = score(predictions, list(METRICS), [HALF] * 5)
    reasons = {s.class_index: s.reason for s in found if s.value is None}
    assert reasons == {
        0: "one label value: 2 negative, no positive",
        1: "one label value: 2 positive, no negative",
        2: "no known sample",
        3: "1 of 2 scores are not finite",
    }
    assert all((s.value is None) == bool(s.reason) for s in found)
    assert [s.value is None for s in found] == [True] * 4 * len(METRICS) + [False] * len(METRICS)
    assert [t.reason for t in fit_thresholds(predictions, "f1")] == [*reasons.values(), ""]
    assert [h.reason for h in histograms(predictions, equal_edges(4))] == [*reasons.values(), ""]
    for c, reason in reasons.items():
        interval = bootstrap(predictions, "auroc", np.random.default_rng(0), class_index=c, draws=5)
        assert (interval.value, interval.low, interval.reason) == (None, None, reason)
        (histogram,) = histograms(predictions, equal_edges(4))[c : c + 1]
        assert histogram.auroc().reason == histogram.ece(2).reason == reason
        assert histogram.roc() is None and roc(*predictions.of_class(c)) is None
    broken = Histogram.of(np.array([np.nan]), np.array([1]), equal_edges(4))
    fine = Histogram.of(np.array([0.1, 0.9]), np.array([0, 1]), equal_edges(4))
    assert (broken + fine).reason == (fine + broken).reason == "1 of 3 scores are not finite"
    empty = Predictions(np.zeros((0, 1)), np.zeros((0, 1)), np.zeros((0, 1), dtype=bool), [])
    assert {s.reason for s in score(empty, list(METRICS))} == {"no known sample"}


def test_without_a_threshold_only_what_needs_one_is_undefined() -> None:
    predictions = one_class([0.1, 0.9], [0, 1])
    for limits, reason in (
        (None, "no threshold (none was given)"),
        ([Threshold(None, None, "no known sample")], "no threshold (no known sample)"),
    ):
        for s in score(predictions, list(METRICS), limits):
            assert (s.value is None) == (s.metric in THRESHOLDED)
            assert s.reason == (reason if s.metric in THRESHOLDED else "")


@pytest.mark.parametrize("criterion", ["f1", "youden"])
def test_no_cut_beats_the_fitted_threshold(criterion) -> None:
    for scores, truth, _ in cases(seed=4):
        (fitted,) = fit_thresholds(one_class(scores, truth), criterion)

        def reached(t: float, scores=scores, truth=truth) -> float:
            if criterion == "f1":
                return slow_decided("f1", scores, truth, t)
            return 2 * slow_decided("balanced_accuracy", scores, truth, t) - 1

        best = max(reached(t) for t in [*scores, 0.0])
        if fitted.value is None:  # nothing is better than to call everything positive
            assert "separate nothing" in fitted.reason
            assert all(reached(t) < best or criterion == "youden" for t in scores if t > min(scores))
            assert reached(0.0) == pytest.approx(best) == pytest.approx(fitted.reached)
            continue
        assert any(score < fitted.value for score in scores)
        assert reached(fitted.value) == pytest.approx(best) == pytest.approx(fitted.reached)


def test_a_threshold_lies_in_the_gap_and_the_highest_of_equals_is_taken() -> None:
    assert fit_thresholds(one_class([0.9, 0.5, 0.1], [1, 1, 0]), "f1")[0] == Threshold(
        pytest.approx(0.3), 1.0
    )
    # Youden is 1/2 after the first and after the third score
    assert fit_thresholds(one_class([0.8, 0.6, 0.4, 0.2], [1, 0, 1, 0]), "youden")[0].value == pytest.approx(
        0.7
    )
    assert fit_thresholds(one_class([0.2, 0.9], [1, 0]), "f1")[0] == Threshold(
        None, pytest.approx(2 / 3), NO_CUT
    )
    assert fit_thresholds(one_class([0.5, 0.5], [1, 0]), "f1")[0].reason == ALL_ALIKE
    assert fit_thresholds(one_class([0.2, 0.9], [1, 0]), "youden")[0] == Threshold(None, 0.0, NO_CUT)
    close = np.nextafter(0.5, 1)
    assert fit_thresholds(one_class([close, 0.5], [1, 0]), "f1")[0].value == close
    histogram = Histogram.of(np.array([0.95, 0.05]), np.array([1, 0]), equal_edges(10))
    assert fit_thresholds([histogram], "f1")[0] == Threshold(0.5, 1.0)
    for scores, edge in (([0.55, 0.45], 0.5), ([0.25, 0.05], 0.1), ([0.35, 0.05], 0.2)):
        histogram = Histogram.of(np.array(scores), np.array([1, 0]), equal_edges(10))
        assert fit_thresholds([histogram], "f1")[0].value == edge
    all_positive = Histogram.of(np.array([0.9, 0.5]), np.array([0, 1]), equal_edges(10))
    assert fit_thresholds([all_positive], "f1")[0] == Threshold(None, pytest.approx(2 / 3), NO_CUT)
    one_bin = Histogram.of(np.array([0.475, 0.478, 0.471]), np.array([0, 1, 0]), equal_edges(100))
    assert fit_thresholds([one_bin], "f1")[0].value is None
    assert one_bin.auroc().value is None and "from 0.47 to 0.48" in one_bin.auroc().reason
    with pytest.raises(ValueError, match="known: f1, youden"):
        fit_thresholds([histogram], "accuracy")  # type: ignore[arg-type]


def test_the_sum_of_histograms_is_that_of_the_union() -> None:
    edges = equal_edges(20)
    for scores, truth, rng in cases(30, seed=5):
        site = rng.integers(0, 3, len(scores))
        parts = [Histogram.of(scores[site == k], truth[site == k], edges) for k in range(3)]
        together = parts[0] + parts[1] + parts[2]
        assert together == Histogram.of(scores, truth, edges) == parts[2] + (parts[0] + parts[1])
        assert sum(together.positives) == truth.sum()
        assert Histogram.from_dict(together.to_dict()) == together


@pytest.mark.parametrize("edges", [equal_edges(10), equal_edges(200), (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)])
def test_a_histograms_auroc_is_within_its_error(edges) -> None:
    for scores, truth, _ in cases(seed=6):
        histogram = Histogram.of(scores, truth, edges)
        found = histogram.auroc()
        if sum(map(bool, np.add(histogram.positives, histogram.negatives))) == 1:
            assert found.value is None and "in one bin" in found.reason
            continue
        assert found.value is not None and found.error is not None
        assert abs(found.value - slow_auroc(scores, truth)) <= found.error + 1e-15


def test_the_error_of_auroc_is_reached_and_vanishes() -> None:
    edges = equal_edges(2)
    for scores in ([0.1, 0.2, 0.9], [0.2, 0.1, 0.9]):
        found = Histogram.of(np.array(scores), np.array([1, 0, 0]), edges).auroc()
        assert (found.value, found.error) == (0.25, 0.25)
        assert abs(slow_auroc(scores, [1, 0, 0]) - 0.25) == 0.25
    for scores, truth, _ in cases(seed=7):
        middles = (np.floor(scores * 8).clip(0, 7) + 0.5) / 8
        exact = Histogram.of(middles, truth, equal_edges(8)).auroc().value
        assert (
            exact is None
            if len(set(middles)) == 1
            else exact == pytest.approx(slow_auroc(middles, truth), abs=1e-15)
        )
    apart = Histogram.of(np.array([0.9, 0.1]), np.array([1, 0]), edges).auroc()
    assert (apart.value, apart.error) == (1, 0)


@pytest.mark.parametrize(
    "edges", [equal_edges(10), equal_edges(200), (*equal_edges(10)[:1], 0.01, *equal_edges(10)[1:])]
)
def test_a_histograms_ece_is_within_its_error(edges) -> None:
    for scores, truth, _ in cases(seed=8):
        for bins in (1, 2, 5, 10):
            found = Histogram.of(scores, truth, edges).ece(bins)
            assert found.value is not None and found.error is not None and found.error <= 0.05 + 1e-15
            assert abs(found.value - slow_ece(scores, truth, bins, mass=False)) <= found.error + 1e-12
    histogram = Histogram.of(np.array([0.1, 0.9]), np.array([0, 1]), equal_edges(10))
    assert histogram.ece(3).value is None and "3 bins of equal width" in histogram.ece(3).reason
    # a score at the end of its bin, every score on one side: the error is reached
    low = Histogram.of(np.array([0.0, 0.0, 0.0, 0.5]), np.array([0, 0, 0, 1]), equal_edges(2)).ece(2)
    assert (low.value, low.error) == (0.25, 0.25)
    assert slow_ece([0.0, 0.0, 0.0, 0.5], [0, 0, 0, 1], 2, mass=False) == 0.125


@pytest.mark.parametrize("criterion", ["f1", "youden"])
def test_a_threshold_from_histograms_reaches_what_it_says(criterion) -> None:
    edges = equal_edges(16)
    metric = "f1" if criterion == "f1" else "balanced_accuracy"
    for scores, truth, _ in cases(seed=9):
        (fitted,) = fit_thresholds([Histogram.of(scores, truth, edges)], criterion)
        assert fitted.reached is not None
        if fitted.value is None:
            assert "separate nothing" in fitted.reason
            continue
        assert fitted.value in edges[1:]
        reached = [slow_decided(metric, scores, truth, edge) for edge in edges]
        told = fitted.reached if criterion == "f1" else (fitted.reached + 1) / 2
        assert slow_decided(metric, scores, truth, fitted.value) == pytest.approx(told)
        assert max(reached) == pytest.approx(told)


def test_bins_are_finer_where_scores_of_rare_findings_crowd() -> None:
    edges = score_edges(100)
    assert set(equal_edges(100)) < set(edges) and edges == tuple(sorted(edges))
    assert [round(1 - edge, 12) for edge in reversed(edges)] == pytest.approx(edges)
    assert edges[1] == 2.0**-20 and edges[2] == 2.0**-19
    rng = np.random.default_rng(0)
    truth = np.arange(400) % 8 == 0
    scores = 1 / (1 + np.exp(-rng.normal(np.where(truth, -8.0, -9.5), 0.7)))
    exact = score(one_class(scores, truth), ["auroc"])[0].value
    even, finer = (Histogram.of(scores, truth, e).auroc() for e in (equal_edges(100), edges))
    assert even.value is None and finer.value == pytest.approx(exact, abs=finer.error)
    assert finer.error < 0.1
    for bins in (1, 3, 1000):
        assert set(equal_edges(bins)) <= set(score_edges(bins)) and len(score_edges(bins)) <= bins + 41
    assert all(score_edges(bins) == equal_edges(bins) for bins in (1, 2, 10, 99)), "few bins tell little"
    with pytest.raises(ValueError, match="at least 1"):
        score_edges(0)


def test_thresholds_where_no_site_can_fit_one() -> None:
    """One site has only positives of a class, one only negatives, and none has both classes."""
    yes = Predictions(
        np.array([[0.8, 0.5], [0.7, 0.5]]), np.ones((2, 2)), np.array([[True, False]] * 2), ["a", "b"]
    )
    no = Predictions(
        np.array([[0.3, 0.2], [0.1, 0.6]]),
        np.array([[0, 0], [0, 1]]),
        np.array([[True, True]] * 2),
        ["c", "d"],
    )
    edges = equal_edges(10)
    assert [t.value for t in fit_thresholds(yes, "youden")] == [None, None]
    together = [a + b for a, b in zip(histograms(yes, edges), histograms(no, edges), strict=True)]
    fitted = fit_thresholds(together, "youden")
    assert [t.reached for t in fitted] == [1, 1]
    assert 0.3 < fitted[0].value <= 0.7 and 0.2 < fitted[1].value <= 0.6
    assert all(together[c].auroc().value == 1 for c in (0, 1))


def test_roc_is_a_curve_with_the_area_of_auroc() -> None:
    for scores, truth, _ in cases(30, seed=10):
        found = roc(scores, truth)
        assert found is not None and (found.false_positive_rate[0], found.true_positive_rate[-1]) == (0, 1)
        area = trapezoid(found.true_positive_rate, found.false_positive_rate)
        assert area == pytest.approx(slow_auroc(scores, truth))
        histogram = Histogram.of(scores, truth, equal_edges(7))
        coarse = histogram.roc()
        assert coarse is not None
        for curve in (found, coarse):
            for t, fpr, tpr in zip(
                curve.threshold, curve.false_positive_rate, curve.true_positive_rate, strict=True
            ):
                assert tpr == pytest.approx(slow_decided("sensitivity", scores, truth, t))
                assert fpr == pytest.approx(1 - slow_decided("specificity", scores, truth, t))
        area = trapezoid(coarse.true_positive_rate, coarse.false_positive_rate)
        # where all scores lie in one bin AUROC is not defined, and the curve is the diagonal
        defined = histogram.auroc().value
        assert area == pytest.approx(0.5 if defined is None else defined)


def test_reliability_is_what_ece_sums() -> None:
    for scores, truth, _ in cases(30, seed=11):
        for bins, tolerance in (
            (reliability(scores, truth, 5), 0),
            (Histogram.of(scores, truth, equal_edges(20)).reliability(5), 0.026),
        ):
            assert sum(b.n for b in bins) == len(scores)
            ece = sum(b.n * abs(b.mean_score - b.positive_share) for b in bins if b.n) / len(scores)
            assert ece == pytest.approx(value("ece", scores, truth, bins=5), abs=tolerance + 1e-12)
            assert all((b.mean_score is None) == (b.n == 0) for b in bins)
            assert all(b.lower <= b.mean_score <= b.upper for b in bins if b.n)


def slow_bootstrap(
    predictions: Predictions, metric: str, limits, rng, draws: int, classes: list[int]
) -> list[float | None]:
    """Literal: the samples of the drawn patients, one after the other, scored anew; the mean over the
    classes."""
    of: dict[str, list[int]] = {}
    for row in range(len(predictions.patients)):
        if predictions.known[row, classes].any():
            of.setdefault(predictions.patients[row], []).append(row)
    names, found = sorted(of), []
    for _ in range(draws):
        take = [row for i in rng.integers(0, len(names), len(names)) for row in of[names[i]]]
        again = Predictions(
            predictions.scores[take],
            predictions.truth[take],
            predictions.known[take],
            [predictions.patients[row] for row in take],
        )
        scored = score(again, [metric], limits)
        values = [scored[c].value for c in classes]
        found.append(None if None in values else float(np.mean([v for v in values if v is not None])))
    return found


def thin(seed: int = 12) -> Predictions:
    rng = np.random.default_rng(seed)
    truth = (rng.random((30, 2)) < [0.4, 0.1]).astype(int)
    truth[:2, 1] = 1
    scores = (0.5 * rng.random((30, 2)) + 0.3 * truth).round(2)
    patients = rng.integers(0, 12, 30)
    known = rng.random((30, 2)) < 0.8
    known[patients == 3, 0] = known[patients == 4, 1] = known[patients == 5] = False
    return Predictions(scores, truth, known, [f"p{i}" for i in patients])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("classes", [[0], [1], [0, 1]])
def test_an_interval_equals_its_literal_version(metric: str, classes: list[int], monkeypatch) -> None:
    limits, predictions = [Threshold(0.4), Threshold(0.35)], thin()
    drawn = slow_bootstrap(predictions, metric, limits, np.random.default_rng(5), 80, classes)
    defined = [v for v in drawn if v is not None]
    scored = score(predictions, [metric], limits)
    for piece in (1 << 20, 50):
        monkeypatch.setattr(classification, "_CHUNK", piece)
        found = bootstrap(
            predictions,
            metric,
            np.random.default_rng(5),
            class_index=classes[0] if len(classes) == 1 else None,
            thresholds=limits,
            draws=80,
        )
        assert (found.draws, found.undefined, found.classes) == (80, 80 - len(defined), tuple(classes))
        expected = np.quantile(defined, [0.025, 0.975]).tolist()
        assert [found.low, found.high] == pytest.approx(expected, abs=1e-12)
        assert found.value == pytest.approx(np.mean([scored[c].value for c in classes]))
        assert (found.undefined > 0) == (1 in classes)


def test_patients_are_drawn_whole() -> None:
    """Copies of a patient's samples carry no information: the interval stays, and it is wider than by
    samples."""
    rng = np.random.default_rng(13)
    truth = np.tile([0, 1], 20)
    scores = np.clip(rng.normal(0.4 + 0.1 * truth, 0.15), 0, 1)
    names = [f"p{i}" for i in range(40)]
    single = bootstrap(one_class(scores, truth, names), "auroc", np.random.default_rng(1), class_index=0)
    copied = one_class(np.tile(scores, 5), np.tile(truth, 5), names * 5)
    whole = bootstrap(copied, "auroc", np.random.default_rng(1), class_index=0)
    assert (whole.low, whole.high, whole.patients) == pytest.approx((single.low, single.high, 40))
    alone = one_class(np.tile(scores, 5), np.tile(truth, 5))
    by_sample = bootstrap(alone, "auroc", np.random.default_rng(1), class_index=0)
    assert by_sample.high - by_sample.low < 0.6 * (whole.high - whole.low)


def test_the_mean_over_classes_is_drawn_jointly() -> None:
    predictions = thin()
    found = bootstrap(predictions, "auroc", np.random.default_rng(2), draws=300)
    values = [s.value for s in score(predictions, ["auroc"])]
    assert found.value == pytest.approx(np.mean(values)) and found.classes == (0, 1)
    assert 0 < found.undefined < 300 and found.low < found.value < found.high
    # a class without a value is left out, and said so
    truth = predictions.truth.copy()
    truth[:, 1] = 0
    rest = Predictions(predictions.scores, truth, predictions.known, predictions.patients)
    found = bootstrap(rest, "auroc", np.random.default_rng(2), draws=300)
    assert found.classes == (0,)
    assert found == bootstrap(rest, "auroc", np.random.default_rng(2), class_index=0, draws=300)
    truth[:] = 0
    none = Predictions(predictions.scores, truth, predictions.known, predictions.patients)
    assert bootstrap(none, "auroc", np.random.default_rng(2)).reason == "no class has a value"


def test_the_interval_covers_the_true_auroc() -> None:
    """Scores from two uniform laws, positive in (.3, 1), negative in (0, .7): AUROC = 1 - (4/7)^2 / 2."""
    true, covered = 1 - (4 / 7) ** 2 / 2, 0
    rng = np.random.default_rng(14)
    for _ in range(200):
        truth = np.repeat([0, 1], 60)
        scores = rng.uniform(0, 0.7, 120) + 0.3 * truth
        found = bootstrap(one_class(scores, truth), "auroc", rng, class_index=0, draws=300)
        covered += found.low <= true <= found.high
    assert 178 <= covered <= 198


def test_a_paired_difference() -> None:
    rng = np.random.default_rng(15)
    one = thin()
    other = Predictions(rng.random(one.scores.shape), one.truth, one.known, one.patients)
    equal = bootstrap_difference(one, one, "auroc", np.random.default_rng(3), draws=50)
    assert (equal.value, equal.low, equal.high) == (0, 0, 0)
    found = bootstrap_difference(one, other, "ap", np.random.default_rng(3), class_index=0, draws=200)
    back = bootstrap_difference(other, one, "ap", np.random.default_rng(3), class_index=0, draws=200)
    assert (found.low, found.high) == pytest.approx((-back.high, -back.low))
    first, second = (slow_bootstrap(p, "ap", None, np.random.default_rng(3), 200, [0]) for p in (one, other))
    pairs = [a - b for a, b in zip(first, second, strict=True)]
    assert [found.low, found.high] == pytest.approx(np.quantile(pairs, [0.025, 0.975]).tolist())
    limits = [Threshold(0.4)] * 2
    shifted = bootstrap_difference(
        one, one, "sensitivity", np.random.default_rng(3), class_index=0, thresholds=limits,
        other_thresholds=[Threshold(0.0)] * 2, draws=50,
    )  # fmt: skip
    assert shifted.value == pytest.approx(score(one, ["sensitivity"], limits)[0].value - 1)
    truth = 1 - one.truth
    with pytest.raises(ValueError, match="must be equal for both"):
        bootstrap_difference(one, Predictions(one.scores, truth, one.known, one.patients), "ap", rng)
    # where one of the two has no value there is no difference
    broken = Predictions(np.full(one.scores.shape, np.nan), one.truth, one.known, one.patients)
    assert "not finite" in bootstrap_difference(one, broken, "ap", rng, class_index=0).reason


def test_too_little_to_resample_is_said() -> None:
    one_patient = one_class([0.1, 0.9], [0, 1], ["a", "a"])
    found = bootstrap(one_patient, "auroc", np.random.default_rng(0), class_index=0)
    assert (found.value, found.low, found.patients) == (1, None, 1) and "one patient" in found.reason
    # of two patients one is drawn twice in every second resample
    seed = next(s for s in range(9) if np.ptp(np.random.default_rng(s).integers(0, 2, 2)) == 0)
    never = bootstrap(one_class([0.1, 0.9], [0, 1]), "auroc", np.random.default_rng(seed), draws=1)
    assert (never.low, never.undefined) == (None, 1) and "all of 1 resamples" in never.reason
    assert never.cells("auroc", "x")[0] == {
        "class_": "x", "metric": "auroc_low", "value": None, "reason": never.reason,
    }  # fmt: skip
    assert [c["value"] for c in never.cells("auroc", "x")] == [None, None, 1.0]


def test_rows_carry_values_reasons_and_counts(tmp_path) -> None:
    predictions = thin()
    truth = predictions.truth.copy()
    truth[:, 1] = 0
    predictions = Predictions(predictions.scores, truth, predictions.known, predictions.patients)
    interval = bootstrap(predictions, "auroc", np.random.default_rng(0), class_index=0, draws=20)
    found = cells(score(predictions, ["auroc", "f1"]), ["mass", "nodule"]) + interval.cells("auroc", "mass")
    rows = [
        Row(split="test", grid="", model="best", round=1, site="a", case="", known=True, **cell).to_dict()
        for cell in found
    ]
    write_atomic(tmp_path / "rows.csv", rows_text(rows).encode())
    assert read_rows(tmp_path / "rows.csv") == rows
    by_key = {(row["class"], row["metric"]): row for row in rows}
    assert len(by_key) == 2 * 4 + 3
    assert by_key["nodule", "n_positive"]["value"] == 0
    assert by_key["nodule", "n_negative"]["value"] == predictions.known[:, 1].sum()
    assert by_key["nodule", "auroc"]["value"] is None and "no positive" in by_key["nodule", "auroc"]["reason"]
    assert by_key["mass", "auroc"]["value"] == interval.value
    assert summarise([by_key["mass", "auroc"], by_key["nodule", "auroc"]]).n_undefined == 1


def test_bad_input_is_named() -> None:
    scores, truth, known = np.full((2, 1), 0.5), np.array([[0], [1]]), np.ones((2, 1), dtype=bool)
    for arguments, message in (
        ((scores, truth, known, ["a"]), "1 patients"),
        ((scores[:, 0], truth, known, ["a", "b"]), "shapes"),
        ((scores, truth, known.astype(int), ["a", "b"]), "must be bool"),
        ((scores, truth * 2, known, ["a", "b"]), "truth holds 2"),
        ((scores * 3, truth, known, ["a", "b"]), "scores hold 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            Predictions(*arguments)
    predictions = Predictions(scores, truth, known, ["a", "b"])
    with pytest.raises(ValueError, match="'dice' is not known"):
        score(predictions, ["dice"])
    with pytest.raises(ValueError, match="2 thresholds"):
        score(predictions, ["f1"], [HALF, HALF])
    with pytest.raises(ValueError, match="must be finite"):
        score(predictions, ["f1"], [Threshold(float("nan"))])
    with pytest.raises(ValueError, match="0 bins"):
        score(predictions, ["ece"], bins=0)
    with pytest.raises(ValueError, match="class 1 is not known"):
        bootstrap(predictions, "ap", np.random.default_rng(0), class_index=1)
    with pytest.raises(ValueError, match="level 1"):
        bootstrap(predictions, "ap", np.random.default_rng(0), level=1)
    with pytest.raises(ValueError, match="scores hold -1"):
        Histogram.of(np.array([-1.0]), np.array([1]), equal_edges(2))


def test_a_damaged_histogram_is_refused() -> None:
    good = Histogram((0.0, 0.5, 1.0), (1, 2), (3, 4)).to_dict()
    for change in (
        {"edges": [0, 1]},
        {"edges": [0, 0.7, 0.6]},
        {"edges": [0, float("nan"), 1]},
        {"edges": None},
        {"positives": [1, -1]},
        {"positives": [1, 0.5]},
        {"positives": [True, 2]},
        {"negatives": [1 << 31, 0]},
        {"negatives": "ab"},
        {"not_finite": None},
    ):
        with pytest.raises(WireError, match="histogram"):
            Histogram.from_dict({**good, **change})
    with pytest.raises(WireError, match="histogram"):
        Histogram.from_dict({})
    with pytest.raises(WireError, match="same edges"):
        _ = Histogram((0.0, 1.0), (1,), (1,)) + Histogram.from_dict(good)


def test_a_cut_no_better_than_chance_is_no_threshold() -> None:
    found = fit_thresholds(one_class([0.9, 0.9, 0.1, 0.1], [1, 0, 1, 0]), "youden")[0]
    assert found == Threshold(None, 0.0, NO_CUT)


def test_the_error_of_ece_counts_each_bins_width_by_its_samples() -> None:
    edges = (0.0, 0.5, 0.75, 1.0)
    scores, truth = np.array([0.0] * 9 + [0.5]), np.array([0] * 9 + [1])
    found = Histogram.of(scores, truth, edges).ece(2)
    assert found.error == pytest.approx((9 * 0.5 + 0.25) / 20)
    assert found.value is not None and abs(found.value - 0.05) <= found.error
    assert abs(found.value - 0.05) > np.diff(edges).mean() / 2, "most samples lie in the wide bin"
