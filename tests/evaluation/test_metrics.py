"""metrics.py against MONAI, published vectors, and cases worked out by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from monai.metrics.hausdorff_distance import compute_hausdorff_distance
from monai.metrics.surface_dice import compute_surface_dice
from monai.metrics.surface_distance import compute_average_surface_distance
from scipy.ndimage import binary_erosion, gaussian_filter

from fedatlas.core.labels import LabelSpace
from fedatlas.evaluation.metrics import METRICS, OF_PLANES, class_boxes, score, score_pair

ALL = tuple(METRICS)
SURFACE = ("hd", "hd95", "asd", "nsd")


def blob(shape: tuple[int, ...], seed: int, level: float) -> np.ndarray:
    field = gaussian_filter(np.random.default_rng(seed).standard_normal(shape), 2)
    return field / field.std() > level


def noise(shape: tuple[int, ...], seed: int, share: float) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < share


PAIRS = [
    ("blobs", blob((20, 24, 16), 0, 1.0), blob((20, 24, 16), 1, 1.0), (1.0, 1.5, 3.0)),
    ("dense noise", noise((9, 8, 7), 2, 0.4), noise((9, 8, 7), 3, 0.5), (1.0, 1.0, 1.0)),
    ("sparse noise", noise((20, 20, 20), 4, 0.002), noise((20, 20, 20), 5, 0.003), (2.0, 0.7, 1.3)),
    ("at the border", np.ones((6, 5, 4), bool), blob((6, 5, 4), 6, 0.0), (1.0, 2.0, 1.0)),
    ("2D", blob((30, 26), 7, 0.8), blob((30, 26), 8, 0.9), (0.8, 1.2)),
]


@pytest.mark.parametrize(("name", "p", "g", "spacing"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_values_are_monais(name, p, g, spacing) -> None:
    ours = {metric: value for metric, (value, _) in score_pair(p, g, spacing, ALL, tolerance=2.0).items()}
    hot = [torch.from_numpy(np.stack([~m, m]))[None] for m in (p, g)]
    kept = {"include_background": False, "spacing": spacing}
    theirs = {
        "hd": compute_hausdorff_distance(*hot, **kept),
        "hd95": compute_hausdorff_distance(*hot, percentile=95, **kept),
        "asd": compute_average_surface_distance(*hot, symmetric=True, **kept),
        "nsd": compute_surface_dice(*hot, [2.0], **kept),
    }
    for metric, value in theirs.items():
        # MONAI computes in float32
        assert ours[metric] == pytest.approx(float(value), rel=1e-5), metric


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_surfaces_of_a_case_of_one_slice_are_those_of_a_plane(axis: int) -> None:
    """MONAI, too, sees a plane as a plane only without the third axis; a thin mask in a volume stays one of a volume."""
    p, g, spacing = blob((30, 26), 7, 0.8), blob((30, 26), 8, 0.9), (0.8, 1.2)
    thick = [np.expand_dims(m, axis) for m in (p, g)]
    three = tuple(np.insert(spacing, axis, 5.0))
    assert score_pair(*thick, three, SURFACE) == score_pair(p, g, spacing, SURFACE)
    labels, space = [m.astype(np.uint8) for m in thick], LabelSpace(("background", "organ"))
    of_case = score(*labels, space, [True, True], three, SURFACE)  # of a box around both
    assert {one.metric: (one.value, one.reason) for one in of_case} == score_pair(p, g, spacing, SURFACE)
    in_volume = [np.concatenate([m, np.zeros_like(m)], axis) for m in thick]
    of_volume = score_pair(*in_volume, three, SURFACE)
    assert of_volume["asd"][0] < score_pair(p, g, spacing, SURFACE)["asd"][0]  # all its voxels are surface
    labels = [m.astype(np.uint8) for m in in_volume]
    of_case = score(*labels, space, [True, True], three, SURFACE)
    assert {one.metric: (one.value, one.reason) for one in of_case} == of_volume
    one = np.ones((1, 1, 1), dtype=bool)
    assert score_pair(one, one, (1, 1, 1), SURFACE)["hd95"] == (0.0, "")


def test_both_ways_of_measuring_distances_agree() -> None:
    from fedatlas.evaluation import metrics

    p, g, spacing = blob((20, 24, 16), 0, 1.0), blob((20, 24, 16), 1, 1.0), (1.0, 1.5, 3.0)
    by_tree = metrics.surface_distances(p, g, spacing)
    edges = [metrics._surface(m) for m in (p, g)]
    by_map = metrics.distance_transform_edt(~edges[1], sampling=spacing)[edges[0]]
    assert np.allclose(by_tree[0], by_map, atol=1e-12)


def test_by_hand() -> None:
    p, g = np.zeros((3, 12), bool), np.zeros((3, 12), bool)
    p[1, 2:6], g[1, 4:8] = True, True
    values = score_pair(p, g, (1.0, 0.5), ALL, tolerance=0.5)
    assert values["dice"] == (0.5, "")
    # a line of one voxel is all surface: distances in voxels are 2,1,0,0 and 0,0,1,2
    assert values["asd"][0] == pytest.approx(6 * 0.5 / 8)
    assert values["hd"][0] == 1.0
    assert values["nsd"][0] == pytest.approx(6 / 8)


def test_identical_symmetric_and_scaled() -> None:
    p, g = blob((16, 16, 16), 0, 0.8), blob((16, 16, 16), 1, 0.8)
    same = score_pair(p, p, (1, 1, 1), ALL)
    assert (same["dice"][0], same["nsd"][0], same["hd95"][0], same["asd"][0]) == (1, 1, 0, 0)
    both_ways = ("dice", "hd95", "hd", "asd", "nsd", "jaccard")
    one, other = score_pair(p, g, (1, 1, 1), both_ways), score_pair(g, p, (1, 1, 1), both_ways)
    assert one == other
    twice = score_pair(p, g, (2, 2, 2), ALL, tolerance=4.0)
    assert twice["hd95"][0] == pytest.approx(2 * one["hd95"][0]) and twice["nsd"] == one["nsd"]
    moved = score_pair(np.pad(p, 3), np.pad(g, 3), (1, 1, 1), ("dice",))
    assert moved["dice"] == one["dice"]


def test_empty_masks() -> None:
    some, none = np.ones((3, 3), bool), np.zeros((3, 3), bool)
    assert set(score_pair(none, none, (1, 1), ALL).values()) == {(None, "truth empty")}
    assert set(score_pair(some, none, (1, 1), ALL).values()) == {(None, "truth empty")}
    missed = score_pair(none, some, (1, 1), ALL)
    assert missed["dice"] == missed["nsd"] == (0.0, "")
    assert missed["hd95"] == missed["asd"] == (None, "prediction empty")
    zero = score_pair(none, some, (1, 1), ALL, empty="zero")
    assert zero["asd"] == (0.0, "") and zero["dice"] == (0.0, "")
    assert score_pair(none, none, (1, 1), ALL, empty="zero")["dice"] == (1.0, "truth empty")
    assert score_pair(some, none, (1, 1), ALL, empty="zero")["asd"] == (0.0, "truth empty")


def test_only_scored_classes_are_scored() -> None:
    space = LabelSpace(("background", "a", "b"))
    labels = np.array([[0, 1, 2]])
    assert [s.class_index for s in score(labels, labels, space, [True, False, True], (1, 1), ["dice"])] == [2]
    masks = np.array([[[1, 0]], [[1, 1]]])
    overlapping = LabelSpace(("a", "b"), exclusive=False)
    assert [s.value for s in score(masks, masks, overlapping, [True, True], (1, 1), ["dice"])] == [1, 1]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="must be equal"):
        score_pair(np.ones((2, 2), bool), np.ones((2, 3), bool), (1, 1), ["dice"])
    with pytest.raises(ValueError, match="known: dice"):
        score_pair(np.ones((2, 2), bool), np.ones((2, 2), bool), (1, 1), ["dsc"])
    for spacing in ((1,), (1, 0), (1, 1, 1)):
        with pytest.raises(ValueError, match="expected 2 positive lengths in mm"):
            score_pair(np.ones((2, 2), bool), np.ones((2, 2), bool), spacing, ["asd"])


def test_against_the_public_fedmenu_code(monkeypatch) -> None:
    """Overlap and Hausdorff distance agree, in mm. Its ASD counts as surface what touches the outside with an
    edge or a corner too: with such surfaces ours is the same number, with face-connected ones it is larger."""
    from fedatlas.evaluation import metrics

    kept = np.load(Path(__file__).parents[1] / "vectors" / "fedmenu_metrics.npz")
    p, g, spacing = kept["pred"] > 0, kept["gt"] > 0, kept["spacing_xyz"][::-1]
    values = score_pair(p, g, spacing, ALL)
    both, sizes = 2 * np.count_nonzero(p & g), np.count_nonzero(p) + np.count_nonzero(g)
    assert values["dice"][0] == both / sizes
    assert float(kept["dsc"]) == pytest.approx((both + 1) / (sizes + 1), abs=1e-6)
    assert values["hd"][0] == pytest.approx(float(kept["hd"]), abs=1e-6)
    # of an empty mask its Dice is that with 1 added above and below, its distances are 0; `zero` adds nothing, so that an
    # organ that is missed altogether counts 0. `gauss_weight`, of its windows along the depth, has no counterpart: our
    # windows lie along all axes, and MONAI's weights are those of all
    none = np.zeros_like(g)
    assert float(kept["dsc_empty_empty"]) == 1 and float(kept["dsc_empty_pred"]) == pytest.approx(
        1 / (np.count_nonzero(g) + 1)
    )
    for prediction, truth, dice in ((none, none, 1.0), (none, g, 0.0)):
        of_empty = score_pair(prediction, truth, spacing, ("dice", "asd", "hd"), empty="zero")
        assert [value for value, _ in of_empty.values()] == [dice, 0.0, 0.0]
    monkeypatch.setattr(metrics, "_surface", lambda m: m & ~binary_erosion(m, np.ones((3, 3, 3))))
    thick = score_pair(p, g, spacing, ALL)
    assert thick["asd"][0] == pytest.approx(float(kept["asd"]), abs=1e-6) and values["asd"] > thick["asd"]


@pytest.mark.parametrize("shape", [(7,), (1, 5), (6, 7), (1, 1, 1), (5, 4, 6)])
def test_the_surface_is_what_an_erosion_removes(shape) -> None:
    from fedatlas.evaluation import metrics

    for seed, share in enumerate((0.0, 0.3, 0.8, 0.95, 1.0)):
        mask = noise(shape, seed, share)
        assert np.array_equal(metrics._surface(mask), mask & ~binary_erosion(mask))


@pytest.mark.parametrize("shape", [(12, 9, 7), (14, 11), (5, 1, 6)])
def test_a_case_scores_as_its_classes_one_by_one(shape) -> None:
    """Whole masks, without boxes; classes that are in one map only, or in neither, among them."""
    rng = np.random.default_rng(len(shape))
    space = LabelSpace(("background", *"abcde"))
    spacing = (1.0, 2.0, 0.5)[: len(shape)]
    plain = [metric for metric in ALL if metric not in OF_PLANES]
    for kind in (np.uint8, np.int16, np.int64):
        maps = [rng.choice(6, shape, p=[0.8, 0.1, 0.05, 0.03, 0.02, 0]).astype(kind) for _ in range(2)]
        maps[0][maps[0] == 3], maps[1][maps[1] == 4] = 0, 0
        for metrics in (plain, ALL):
            found = score(*maps, space, [True, True, True, True, True, True], spacing, metrics)
            expected = []
            for c in range(1, 6):
                values = score_pair(maps[0] == c, maps[1] == c, spacing, metrics)
                expected += [(c, metric, *values[metric]) for metric in metrics]
            assert [(s.class_index, s.metric, s.value, s.reason) for s in found] == expected
    box = class_boxes(*maps, 6)
    assert sorted(box) == [1, 2, 3, 4, 5] and maps[0][box[5]].size == 0
    with pytest.raises(ValueError, match="must be equal"):
        score(maps[0], maps[1][1:], space, [True] * 6, spacing, ["dice"])
