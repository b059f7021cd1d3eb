"""Jaccard, sensitivity, specificity and volume error, and the slice-wise forms of UFPS's official code."""

from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from fedatlas.core.labels import LabelSpace
from fedatlas.evaluation import metrics
from fedatlas.evaluation.metrics import METRICS, row_distances, score, score_pair
from fedatlas.report.comparison import LOWER
from fedatlas.report.tables import METRICS as SHOWN

OVERALL = ("jaccard", "sensitivity", "specificity", "rve")
PRINTED = (
    "dice_slicewise",
    "jaccard_slicewise",
    "sensitivity_slicewise",
    "specificity_slicewise",
    "hd_rows",
)


@pytest.fixture(scope="module")
def kept() -> dict[str, np.ndarray]:
    return dict(np.load(Path(__file__).parents[1] / "vectors" / "ufps_metrics.npz"))


@pytest.fixture(scope="module")
def pair(kept) -> list[np.ndarray]:
    """The vector's (slices, 1, rows, columns) as [columns, rows, slices]."""
    return [(kept[key][:, 0] > 0).transpose(2, 1, 0) for key in ("pred", "gt")]


def test_the_printed_forms_are_those_of_the_official_code(kept, pair) -> None:
    found = {name: value for name, (value, _) in score_pair(*pair, (1, 1, 5), PRINTED).items()}
    names = ("dice", "jc_official", "sen", "spe", "hd_official")
    assert found == {
        ours: pytest.approx(kept[theirs].item(), abs=1e-5)
        for ours, theirs in zip(PRINTED, names, strict=True)
    }
    assert row_distances(*pair) == pytest.approx(kept["hd_per_slice"].ravel(), abs=1e-6)
    each = [
        score_pair(*(mask[:, :, [z]] for mask in pair), (1, 1, 5), ("jaccard",))["jaccard"][0]
        for z in range(6)
    ]
    assert [value or 0.0 for value in each] == pytest.approx(kept["jc_per_slice"].ravel(), abs=1e-6)


def test_of_the_whole_volume(kept, pair) -> None:
    p, g = pair
    found = {name: value for name, (value, _) in score_pair(p, g, (1, 1, 5), ("dice", *OVERALL)).items()}
    assert found["dice"] == pytest.approx(kept["dice_volume"].item(), abs=1e-6)
    assert found["jaccard"] == pytest.approx(kept["jc_volume"].item(), abs=1e-6)
    assert found["rve"] == pytest.approx(kept["rve"].item(), abs=1e-6)
    assert found["sensitivity"] == (p & g).sum() / g.sum()
    assert found["specificity"] == (~p & ~g).sum() / (~g).sum()
    assert found["jaccard"] == pytest.approx(found["dice"] / (2 - found["dice"]))
    assert found["jaccard"] > kept["jc_official"].item(), (
        "the slices without the organ pull the printed one down"
    )


def test_outside_of_the_boxes_only_specificity_and_slices_change(pair) -> None:
    names = ("dice", *OVERALL, "hd_rows")
    wide = [np.pad(mask, ((2, 3), (4, 1), (0, 6))) for mask in pair]
    before, after = (score_pair(*masks, (1, 1, 1), names) for masks in (pair, wide))
    assert {name for name in names if before[name] != after[name]} == {"specificity", "hd_rows"}
    rows = row_distances(*wide)
    slow = []
    for z in range(wide[0].shape[2]):
        apart = cdist(*(mask[:, :, z].T.astype(float) for mask in wide))
        slow.append(max(apart.min(1).max(), apart.min(0).max()))
    assert rows == pytest.approx(slow) and not rows[6:].any()


def test_equal_masks_and_pictures(pair) -> None:
    _, g = pair
    same = score_pair(g, g, (1, 1, 1), tuple(METRICS))
    # two slices are empty, so that the printed Jaccard is not 1 even here
    best = {"jaccard_slicewise": pytest.approx(4 / 6)}
    best |= dict.fromkeys(("hd", "hd95", "asd", "rve", "hd_rows"), 0.0)
    assert {name: value for name, (value, _) in same.items()} == {
        name: best.get(name, 1.0) for name in METRICS
    }
    flat = score_pair(pair[0][..., 0], pair[1][..., 0], (1, 1), tuple(METRICS))
    assert flat == score_pair(pair[0][..., :1], pair[1][..., :1], (1, 1, 1), tuple(METRICS))
    assert flat["dice_slicewise"] == flat["dice"] and flat["sensitivity_slicewise"] == flat["sensitivity"]


def test_empty_masks() -> None:
    some, none = np.zeros((4, 3, 2), bool), np.zeros((4, 3, 2), bool)
    some[1, 1, 0] = True
    args = ((1, 1, 1), (*OVERALL, *PRINTED))
    for rule in ("nan", "zero", "siim"):
        without = score_pair(some, none, *args, empty=rule)
        assert {without[name] for name in (*OVERALL[1:], *PRINTED)} == {(None, "truth empty")}, rule
        missed = score_pair(none, some, *args, empty=rule)
        told = {"specificity", "specificity_slicewise", "rve", "hd_rows"}
        assert missed["specificity"] == missed["specificity_slicewise"] == missed["rve"] == (1.0, "")
        assert missed["hd_rows"] == (0.5, "")
        assert {missed[name] for name in missed if name not in told} == {(0.0, "")}
    assert score_pair(some, none, *args)["jaccard"] == (None, "truth empty")
    assert score_pair(some, none, *args, empty="siim")["jaccard"] == (0.0, "truth empty")
    assert score_pair(none, none, *args, empty="zero")["jaccard"] == (1.0, "truth empty")
    full = score_pair(some, ~none, *args)
    assert full["specificity"] == full["specificity_slicewise"] == (None, "truth fills the case")


def test_masks_of_exclusive_classes_may_overlap() -> None:
    space = LabelSpace(("background", "a", "b"))
    truth = np.array([[0, 1, 2, 2]])
    masks = np.stack([truth == 0, truth >= 1, truth == 2])
    found = score(masks, truth, space, [True] * 3, (1, 1), ["sensitivity", "rve"])
    assert [(s.class_index, s.value) for s in found] == [(1, 1.0), (1, 2.0), (2, 1.0), (2, 0.0)]


def test_every_metric_is_written_with_its_direction() -> None:
    assert set(METRICS) <= set(SHOWN)
    assert {name for name in METRICS if not SHOWN[name].higher_is_better} == LOWER & set(METRICS)
    assert set(metrics.DISTANCES) == {name for name in METRICS if SHOWN[name].unit == "mm"}


def test_no_empty_row_is_added_to_masks_that_fill_every_row() -> None:
    p, g = np.zeros((4, 2), bool), np.zeros((4, 2), bool)
    p[0], g[3] = True, True
    # with an empty row in both, a row would be 1 from it; the rows that are there are the root of 2 apart
    assert row_distances(p, g) == pytest.approx([2**0.5])
