"""evaluation/images.py: what a site answers about whole images, what it keeps for itself, and what may leave."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedatlas.core.batch import ImageSample
from fedatlas.core.contract import functions_of
from fedatlas.core.errors import DataError, WireError
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import isolated, seed_of
from fedatlas.evaluation.classification import (
    METRICS,
    Histogram,
    Predictions,
    Threshold,
    bootstrap,
    score,
    score_edges,
)
from fedatlas.evaluation.evaluate import Evaluation
from fedatlas.evaluation.images import SHOWN, SILENT, ImageEvaluator
from fedatlas.evaluation.statistics import COLUMNS
from fedatlas.nets.classifier import CNN, Classifier
from fedatlas.transport import egress, wire

SPACE = LabelSpace(("effusion", "mass", "a/b"), exclusive=False, level="image")
OPTIONS = Evaluation(draws=50, histogram=20, batch=4)


class Reads(nn.Module):
    """The logit of class c is the mean of the image plus `moved`, times c + 1; it counts the images it is given."""

    def __init__(self, moved: float = 0.0) -> None:
        super().__init__()
        self.moved = nn.Parameter(torch.tensor(moved))
        self.given: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(len(x))
        value = x.mean((1, 2, 3)) + self.moved
        return value[:, None] * torch.tensor([1.0, 2.0, 3.0])


@dataclass
class FakeSite:
    samples: list[ImageSample]
    folder: Path
    make: Any = Reads
    name: str = "alpha"
    labels: SiteLabels = field(default_factory=lambda: SiteLabels(SPACE, frozenset({0})))
    nets: list[nn.Module] = field(default_factory=list)

    def network(self, model: Any = None, name: str = "main") -> nn.Module:
        net = self.make()
        if model is not None:
            net.load_state_dict(model)
        self.nets.append(net.train())
        return net

    def volumes(self, split: str) -> Iterator[ImageSample]:
        assert split == "test"
        return iter(self.samples)


def samples(
    values: list[float], truth: list[list[int]], scored: list[bool] | None = None
) -> list[ImageSample]:
    """Images of one value each; two images per patient."""
    row = torch.tensor(scored or [True, True, True])
    return [
        ImageSample(
            f"case-{n}", f"patient-{n // 2}", torch.full((1, 2, 3), value), torch.tensor(t).float(), row, row
        )
        for n, (value, t) in enumerate(zip(values, truth, strict=True))
    ]


VALUES = [-2.0, -1.0, -0.5, 0.25, 0.5, 1.0, 1.5]
TRUTH = [[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]


def members(moved: float = 0.0, classes: list[int] | None = None) -> list[dict[str, Any]]:
    return [{"model": Reads(moved).state_dict(), "classes": classes}]


def ask(site: FakeSite, given: list[dict[str, Any]] | None = None, **other: Any) -> dict[str, Any]:
    evaluator = ImageEvaluator(other.pop("options", OPTIONS), SPACE)
    what: dict[str, Any] = {"split": "test", "model": "best", "round": 3, "grid": "original"}
    what |= {"metrics": ["auroc"], "overlays": False} | other
    return evaluator.evaluate(site, given or members(), **what)


def value(rows: list[dict[str, Any]], name: str, metric: str) -> Any:
    (row,) = [row for row in rows if (row["class"], row["metric"]) == (name, metric)]
    return row["value"]


def reason(rows: list[dict[str, Any]], name: str, metric: str) -> str:
    (row,) = [row for row in rows if (row["class"], row["metric"]) == (name, metric)]
    return row["reason"]


def test_rows_are_those_of_the_metrics_module(tmp_path: Path) -> None:
    site = FakeSite(samples(VALUES, TRUTH), tmp_path)
    found = ask(site, metrics=list(METRICS), thresholds=[0.5, None, 0.5])
    rows = found["rows"]
    assert all(tuple(row) == COLUMNS for row in rows)
    assert {(r["split"], r["grid"], r["model"], r["round"], r["site"], r["case"]) for r in rows} == {
        ("test", "original", "best", 3, "alpha", "")
    }
    assert {(r["class"], r["known"]) for r in rows} == {("effusion", True), ("mass", False), ("a/b", False)}
    assert (value(rows, "effusion", "n_positive"), value(rows, "effusion", "n_negative")) == (3, 4)
    scores = np.stack([1 / (1 + np.exp(-np.array(VALUES) * k)) for k in (1, 2, 3)], 1)
    patients = [f"patient-{n // 2}" for n in range(7)]
    whole = Predictions(scores, np.array(TRUTH), np.ones((7, 3), dtype=bool), patients)
    limits = [Threshold(0.5), Threshold(None), Threshold(0.5)]
    for expected in score(whole, list(METRICS), limits):
        name = SPACE.names[expected.class_index]
        got = value(rows, name, expected.metric)
        assert got == (None if expected.value is None else pytest.approx(expected.value)), expected
        assert reason(rows, name, expected.metric) == expected.reason
    assert value(rows, "effusion", "auroc") == pytest.approx(8 / 12)
    assert "no positive" in reason(rows, "a/b", "auroc")
    assert reason(rows, "mass", "f1") == "no threshold"


def test_intervals_are_of_patients_and_of_a_generator_of_their_own(tmp_path: Path) -> None:
    site = FakeSite(samples(VALUES, TRUTH), tmp_path)
    rows = ask(site, metrics=["auroc", "ap"])["rows"]
    scores = 1 / (1 + np.exp(-np.array(VALUES)[:, None].repeat(3, 1) * [1, 2, 3]))
    patients = [f"patient-{n // 2}" for n in range(7)]
    whole = Predictions(scores, np.array(TRUTH), np.ones((7, 3), dtype=bool), patients)
    for c, name in ((0, "effusion"), (1, "mass")):
        rng = np.random.default_rng(seed_of("bootstrap", "alpha", "test", "best", name))
        drawn = bootstrap(whole, "ap", rng, class_index=c, draws=50)
        assert drawn.patients == 4 and drawn.low is not None and drawn.low < drawn.high  # type: ignore[operator]
        assert value(rows, name, "ap_low") == pytest.approx(drawn.low)
        assert value(rows, name, "ap_high") == pytest.approx(drawn.high)
        assert value(rows, name, "ap_undefined") == drawn.undefined / 50
    for end in ("low", "high", "undefined"):
        assert value(rows, "a/b", f"auroc_{end}") is None
        assert "no positive" in reason(rows, "a/b", f"auroc_{end}")
    state = torch.random.get_rng_state()
    again = ask(site, metrics=["auroc", "ap"])["rows"]
    assert again == rows
    assert torch.equal(torch.random.get_rng_state(), state)
    other = FakeSite(samples(VALUES, TRUTH), tmp_path, name="beta")
    different = ask(other, metrics=["auroc", "ap"])["rows"]
    assert [r["value"] for r in different] != [r["value"] for r in rows], "sites draw differently"


def test_between_rounds_there_are_values_only(tmp_path: Path) -> None:
    found = ask(FakeSite(samples(VALUES, TRUTH), tmp_path), grid="federation")
    assert {row["metric"] for row in found["rows"]} == {"n_positive", "n_negative", "auroc"}
    assert found["histograms"] == {}
    none = replace(OPTIONS, draws=0)
    found = ask(FakeSite(samples(VALUES, TRUTH), tmp_path), options=none)
    assert {row["metric"] for row in found["rows"]} == {"n_positive", "n_negative", "auroc"}
    assert set(found["histograms"]) == set(SPACE.names)


def test_a_class_without_a_truth_gives_no_row_and_only_scored_samples_count(tmp_path: Path) -> None:
    some = samples(VALUES, TRUTH, [True, False, True])
    some[5] = replace(some[5], scored=torch.tensor([False, False, True]))
    found = ask(FakeSite(some, tmp_path))
    assert {row["class"] for row in found["rows"]} == {"effusion", "a/b"}
    assert (
        value(found["rows"], "effusion", "n_positive"),
        value(found["rows"], "effusion", "n_negative"),
    ) == (2, 4)
    assert set(found["histograms"]) == {"effusion", "a/b"}


def test_members_are_averaged_over_those_that_may_speak(tmp_path: Path) -> None:
    site = FakeSite(samples(VALUES, TRUTH), tmp_path)
    given = [*members(0.0, [0]), *members(1.0, [0, 1])]
    found = ask(site, given, metrics=["auroc", "brier"])
    rows = found["rows"]
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    values, truth = np.array(VALUES), np.array(TRUTH)
    both = (sigmoid(values) + sigmoid(values + 1)) / 2
    assert value(rows, "effusion", "brier") == pytest.approx(np.mean((both - truth[:, 0]) ** 2))
    one = sigmoid(2 * (values + 1))
    assert value(rows, "mass", "brier") == pytest.approx(np.mean((one - truth[:, 1]) ** 2))
    for metric in ("auroc", "brier", "auroc_low", "auroc_high", "auroc_undefined"):
        assert value(rows, "a/b", metric) is None
        assert reason(rows, "a/b", metric) == SILENT
    assert value(rows, "a/b", "n_negative") == 7
    assert set(found["histograms"]) == {"effusion", "mass"}


def test_histograms_add_up_to_that_of_all_images(tmp_path: Path) -> None:
    every = samples(VALUES, TRUTH)
    whole, left, right = (
        ask(FakeSite(part, tmp_path))["histograms"]["mass"] for part in (every, every[:3], every[3:])
    )
    summed = Histogram.from_dict(left) + Histogram.from_dict(right)
    assert summed == Histogram.from_dict(whole)
    assert summed.edges == score_edges(20) and sum(summed.positives) == 2 and sum(summed.negatives) == 5


def test_what_a_net_says_of_an_image_does_not_depend_on_the_others(tmp_path: Path) -> None:
    site = FakeSite(samples(VALUES, TRUTH), tmp_path)
    ask(site)
    assert site.nets[0].given == [4, 4], "the last batch of three is filled up"
    assert not site.nets[0].training
    site = FakeSite(samples(VALUES, TRUTH), tmp_path)
    ask(site, grid="federation")
    assert site.nets[0].given == [4, 3]

    with isolated("net"):
        model = CNN(filters=(8, 16)).build(in_channels=1, classes=3, spatial_dims=2).state_dict()

    def scores(count: int) -> list[tuple[float, bytes]]:
        site = FakeSite(pictures(count), tmp_path / str(count), make=cnn)
        ask(site, [{"model": model, "classes": None}], overlays=True, options=replace(OPTIONS, batch=8))
        folder = tmp_path / str(count) / "overlays" / "test" / "best"
        return sorted((str(f["case"]), float(f["score"])) for f in map(np.load, folder.glob("*.npz")))

    few, many = dict(scores(3)), dict(scores(11))
    shared = set(few) & set(many)
    assert len(shared) == 3
    assert all(few[case] == many[case] for case in shared), "bits"


def cnn() -> Classifier:
    with isolated("any"):
        return CNN(filters=(8, 16)).build(in_channels=1, classes=3, spatial_dims=2)


def pictures(count: int) -> list[ImageSample]:
    rng = np.random.default_rng(4)
    row = torch.tensor([True, False, False])
    return [
        ImageSample(
            f"case-{n:02d}",
            f"p{n}",
            torch.from_numpy(rng.normal(size=(1, 12, 16)).astype(np.float32)),
            torch.tensor([float(n % 3 == 0), 0.0, 0.0]),
            row,
            row,
        )
        for n in range(count)
    ]


def test_scores_that_are_not_finite_have_a_reason_and_no_picture(tmp_path: Path) -> None:
    site = FakeSite(samples([*VALUES[:-1], float("nan")], TRUTH), tmp_path)
    found = ask(site, overlays=True)
    assert "1 of 7 scores are not finite" in reason(found["rows"], "effusion", "auroc")
    assert found["histograms"]["effusion"]["not_finite"] == 1
    stored = [str(np.load(p)["case"]) for p in (tmp_path / "overlays" / "test" / "best").glob("*.npz")]
    assert stored and "case-6" not in stored


def test_pictures_are_the_extremes_and_replace_those_of_before(tmp_path: Path) -> None:
    scores = np.linspace(-2, 2, 13)
    truth = [[int(n < 10), 0, 0] for n in range(13)]
    site = FakeSite(samples(scores.tolist(), truth), tmp_path)
    folder = tmp_path / "overlays" / "test" / "local_beta"
    folder.mkdir(parents=True)
    (folder / "old.npz").write_bytes(b"old")
    answer = ask(site, model="local/beta", overlays=True, thresholds=[0.4, None, None])
    assert set(answer) == {"rows", "histograms"}
    assert not list(folder.parent.glob(".*")) and not (folder / "old.npz").exists()
    cases: dict[str, list[str]] = {}
    for path in sorted(folder.glob("effusion--*.npz")):
        kind = path.stem.partition("--")[2].rpartition("-")[0]
        cases.setdefault(kind, []).append(str(np.load(path)["case"]))
    assert cases == {
        "present-high": ["case-9", "case-8", "case-7", "case-6"],
        "present-low": ["case-0", "case-1", "case-2", "case-3"],
        "absent-high": ["case-12", "case-11"],
        "absent-low": ["case-10"],
    }
    assert SHOWN == 4
    assert {path.stem.partition("--")[0] for path in folder.glob("*.npz")} == {"effusion", "mass", "a%2Fb"}
    stored = np.load(folder / "effusion--present-high-1.npz")
    assert set(stored) == {"image", "case", "class", "score", "truth", "threshold"}, "the net has no maps"
    assert stored["image"].shape == (2, 3) and stored["image"].dtype == np.float32
    assert (str(stored["class"]), bool(stored["truth"]), float(stored["threshold"])) == (
        "effusion",
        True,
        0.4,
    )
    assert float(stored["score"]) == pytest.approx(1 / (1 + np.exp(-scores[9])))
    assert np.isnan(np.load(folder / "mass--absent-high-1.npz")["threshold"])


def test_pictures_stand_upright_with_a_map(tmp_path: Path) -> None:
    site = FakeSite(pictures(6), tmp_path, make=cnn)
    model = cnn().state_dict()
    ask(site, [{"model": model, "classes": None}, {"model": model, "classes": [1]}], overlays=True)
    folder = tmp_path / "overlays" / "test" / "best"
    stored = np.load(folder / "effusion--absent-high-1.npz")
    case = int(str(stored["case"])[-2:])
    image = pictures(6)[case].image[0].numpy()
    assert stored["image"].shape == stored["cam"].shape == (12, 16)
    assert stored["image"].min() == 0 and stored["image"].max() == 1
    middle = (image > np.quantile(image, 0.01)) & (image < np.quantile(image, 0.99))
    assert np.corrcoef(stored["image"][middle], image[middle])[0, 1] > 0.999, "rows from the top"
    assert stored["cam"].min() >= 0 and stored["cam"].max() in (0, 1)
    assert stored["cam"].dtype == np.float32


def test_no_image_no_row(tmp_path: Path) -> None:
    assert ask(FakeSite([], tmp_path), overlays=True) == {"rows": [], "histograms": {}}
    assert list((tmp_path / "overlays" / "test" / "best").iterdir()) == []


def test_images_of_two_shapes_are_refused(tmp_path: Path) -> None:
    some = samples(VALUES, TRUTH)
    some[2] = replace(some[2], image=torch.zeros(1, 4, 4))
    with pytest.raises(DataError, match=r"site alpha: .*\(1, 2, 3\), \(1, 4, 4\)"):
        ask(FakeSite(some, tmp_path))


def test_thresholds_are_one_per_class(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 thresholds; expected one for each of 3"):
        ask(FakeSite(samples(VALUES, TRUTH), tmp_path), thresholds=[0.5, 0.5])


def test_only_evaluate_may_be_asked_for_and_its_answer_travels(tmp_path: Path) -> None:
    assert list(functions_of(ImageEvaluator(OPTIONS, SPACE))) == ["evaluate"]  # type: ignore[arg-type]
    answer = ask(FakeSite(samples(VALUES, TRUTH), tmp_path), metrics=list(METRICS), overlays=True)
    assert wire.decode(wire.encode(answer)) == answer
    allow(answer)


# ---------------------------------------------------------------------------------------------- what may leave


def allow(answer: dict[str, Any]) -> None:
    kinds = {"rows": "rows", "histograms": "histograms"}
    egress.check(answer, kinds, what="the answer", classes=len(SPACE), forms=lambda net: {})


def histogram(bins: int = 4, **other: Any) -> dict[str, Any]:
    edges = list(score_edges(bins))
    counts = len(edges) - 1
    return {"edges": edges, "positives": [1] * counts, "negatives": [2] * counts, "not_finite": 0} | other


MORE = len(score_edges(4)) - 2
"""Counts of `histogram` but one."""


def test_histograms_of_the_kind_may_leave() -> None:
    for found in ({}, {"mass": histogram()}, {name: histogram(1000) for name in SPACE.names}):
        allow({"rows": [], "histograms": found})
        for one in found.values():
            Histogram.from_dict(one)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "is a list of 0"),
        ({str(n): histogram() for n in range(4)}, "4 histograms for 3 classes"),
        ({"x" * 201: histogram()}, "short text"),
        ({"mass": 3}, "something else than histograms"),
        ({"mass": histogram(case="case-1")}, "something else than histograms"),
        ({"mass": {"edges": [0.0, 1.0]}}, "something else than histograms"),
        ({"mass": histogram(1001)}, "bounds of 1 to 1000 bins"),
        ({"mass": histogram(edges=torch.rand(5))}, "edges are a tensor"),
        ({"mass": histogram(edges=[0.0, 0.31, 0.5, 0.75, 1.0])}, "not those of `score_edges`"),
        ({"mass": histogram(edges=[0.0, 2.0**-20, 0.25, 0.5, 0.75, 1.0])}, "not those of `score_edges`"),
        ({"mass": histogram(edges=["0.0", 0.25, 0.5, 0.75, 1.0])}, "not those of `score_edges`"),
        ({"mass": histogram(edges=[False, 0.25, 0.5, 0.75, True])}, "not those of `score_edges`"),
        ({"mass": histogram(positives=torch.ones(4))}, "counts that are a tensor"),
        ({"mass": histogram(positives=[1] * 5)}, "counts that are a list of 5"),
        ({"mass": histogram(negatives=[0.25] + [1] * MORE)}, "whole numbers"),
        ({"mass": histogram(negatives=[[1]] + [1] * MORE)}, "whole numbers"),
        ({"mass": histogram(negatives=[True] + [1] * MORE)}, "whole numbers"),
        ({"mass": histogram(positives=[-1] + [1] * MORE)}, "whole numbers"),
        ({"mass": histogram(not_finite="secret")}, "whole numbers"),
        ({"mass": histogram(not_finite=1 << 40)}, "whole numbers"),
        ({"mass": histogram(positives=[(1 << 31) - 1] * (MORE + 1))}, "sum beyond"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_nothing_else_leaves_as_a_histogram(found: Any, said: str) -> None:
    with pytest.raises(egress.EgressError, match=said):
        allow({"rows": [], "histograms": found})


def test_what_may_leave_is_what_the_server_can_read() -> None:
    for broken in (
        histogram(positives=[1]),
        histogram(negatives=[-1] * (MORE + 1)),
        histogram(not_finite=1.0),
    ):
        with pytest.raises(WireError):
            Histogram.from_dict(broken)
        with pytest.raises(egress.EgressError):
            allow({"rows": [], "histograms": {"mass": broken}})
