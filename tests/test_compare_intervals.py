"""Intervals by patient: what is paired, and what cannot be."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedatlas.compare import intervals
from fedatlas.compare.intervals import Predicted
from fedatlas.core.errors import DataError
from fedatlas.evaluation.classification import Threshold

CASES = 24


class Predictions:
    """Predictions of an arm on the images of a site in two seeds; changed: seed -> what is other there."""

    def __init__(self, arm: str, **changed: dict[str, Any]) -> None:
        self.arm, self.changed = arm, changed

    def of(self, seed: int, site: str) -> Predicted:
        rng = np.random.default_rng([seed, len(self.arm)])
        truth = (np.arange(CASES) % 2)[:, None].astype(float)
        found = {
            "images": "these",
            "patients": [f"{site}/{number}" for number in range(CASES)],
            "scores": np.clip(truth + rng.normal(0, 0.7, truth.shape), 0, 1),
            "truth": truth,
            "known": np.ones(truth.shape, bool),
        }
        return Predicted(**{**found, **self.changed.get(f"seed_{seed}", {})})


def interval(
    monkeypatch: pytest.MonkeyPatch,
    one: Predictions,
    other: Predictions,
    *,
    metric: str = "auroc",
    limits: Mapping[str, float] | None = None,
    sites: str = "a",
    seeds: Sequence[int] = (0, 1),
) -> dict[str, Any]:
    """Of one class. limits: arm -> its threshold."""
    monkeypatch.setattr(
        intervals, "_thresholds", lambda _, arm, seed: {"nodule": Threshold((limits or {}).get(arm))}
    )
    comparison: Any = SimpleNamespace(
        metric=metric, name="c", first=SimpleNamespace(evaluation=SimpleNamespace(bins=10, draws=50))
    )
    cells = {
        arm.arm: {seed: {(site, "nodule"): 0.5 for site in sites} for seed in seeds} for arm in (one, other)
    }
    return intervals._interval(comparison, one, other, seeds, cells)  # type: ignore[arg-type]


def test_an_interval_is_around_the_mean_difference(monkeypatch) -> None:
    found = interval(monkeypatch, Predictions("one"), Predictions("other"))
    assert found["low"] <= found["value"] <= found["high"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"images": "others"}, "the seeds of other have other images at site a"),
        (
            {"patients": [f"a/{number // 2}" for number in range(CASES)]},
            "the seeds of other have other images",
        ),
    ],
)
def test_seeds_on_other_images_are_refused(monkeypatch, changed, text) -> None:
    """As where a folder got images between the runs of two seeds."""
    with pytest.raises(DataError, match=text):
        interval(monkeypatch, Predictions("one", seed_1=changed), Predictions("other", seed_1=changed))


def test_arms_on_other_labels_are_refused(monkeypatch) -> None:
    turned = (1 - np.arange(CASES) % 2)[:, None].astype(float)
    with pytest.raises(DataError, match="other and one have other labels at site a"):
        interval(monkeypatch, Predictions("one", seed_1={"truth": turned}), Predictions("other"))


def test_a_class_counts_patients_and_not_images(monkeypatch) -> None:
    few = {
        "patients": [f"a/{number // 6}" for number in range(CASES)]
    }  # 4 patients, with 12 images of either kind
    one, other = (Predictions(arm, seed_0=few, seed_1=few) for arm in ("one", "other"))
    found = interval(monkeypatch, one, other)
    assert found == {"value": None, "reason": "no class has 5 patients with it and 5 without it"}


def test_every_arm_is_cut_at_its_own_threshold(monkeypatch) -> None:
    limits, share = {"one": 0.3, "other": 0.9}, {}
    one, other = (Predictions(arm) for arm in limits)
    found = interval(monkeypatch, one, other, metric="sensitivity", limits=limits, seeds=[0])
    for arm in (one, other):
        of = arm.of(0, "a")
        share[arm.arm] = float((of.scores[of.truth == 1] >= limits[arm.arm]).mean())
    assert found["value"] == pytest.approx(share["other"] - share["one"]) and share["one"] != share["other"]


def test_sites_with_few_patients_each_count_together(monkeypatch) -> None:
    few = {"known": (np.arange(CASES) < 8)[:, None]}  # 4 patients with it and 4 without it at each site
    one, other = (Predictions(arm, seed_0=few) for arm in ("one", "other"))
    found = interval(monkeypatch, one, other, sites="ab", seeds=[0])
    assert (
        found["unit"] == "together"
        and found["columns"] == 1
        and found["low"] <= found["value"] <= found["high"]
    )
    assert interval(monkeypatch, one, other, seeds=[0])["value"] is None
