"""postprocess.py: UFPS's official code as a switch, ours exclusive and idempotent; where evaluation uses it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.ndimage import binary_fill_holes
from torch import nn

from fedatlas.core.contract import functions_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import from_dict
from fedatlas.evaluation.evaluate import Evaluation
from fedatlas.evaluation.postprocess import Postprocess, clean, filled, postprocess
from fedatlas.evaluation.statistics import select
from fedatlas.evaluation.voxels import VoxelEvaluator

DEFAULT = Postprocess()
SPACE = LabelSpace(("background", "liver", "spleen"))


@pytest.fixture(scope="module")
def kept() -> dict[str, np.ndarray]:
    return dict(np.load(Path(__file__).parents[1] / "vectors" / "ufps_postprocess.npz"))


def test_every_channel_alone_is_the_official_code(kept) -> None:
    """Which fills the background, too, so that it swallows the classes that it surrounds."""
    masks, wanted = kept["vol_in"] > 0, kept["vol_out"] > 0
    for c in (1, 2):
        assert np.array_equal(clean(masks[c], DEFAULT), wanted[c])
    assert np.array_equal(clean(masks[0], replace(DEFAULT, share=0.0)), wanted[0])
    overlapping = LabelSpace(("liver", "spleen"), exclusive=False)
    assert np.array_equal(postprocess(kept["vol_in"][1:], overlapping, DEFAULT), kept["vol_out"][1:])
    assert (wanted[0] & (masks[1] | masks[2])).any() and not (masks[0] & (masks[1] | masks[2])).any()


def test_by_hand() -> None:
    labels = np.zeros((9, 9), np.uint8)
    labels[0:5, 0:5] = 1
    labels[2, 2] = 0  # a hole
    labels[1, 3] = 2  # a speck in the liver: too small for a spleen, and then a hole
    labels[2:4, 1] = 2  # 2 of 10, which is 20 %: stays where it is
    labels[6:8, 4:9] = 2
    labels[5, 5] = 1  # joined at a corner
    labels[8, 0] = 1  # a satellite
    found = postprocess(labels, SPACE, DEFAULT)
    wanted = labels.copy()
    wanted[2, 2] = wanted[1, 3] = 1
    wanted[8, 0] = 0
    assert np.array_equal(found, wanted)
    assert postprocess(labels, SPACE, replace(DEFAULT, connectivity="faces"))[5, 5] == 0
    assert np.array_equal(postprocess(labels, SPACE, replace(DEFAULT, holes=False, share=0.0)), labels)
    only = postprocess(labels, SPACE, replace(DEFAULT, classes=("spleen",)))
    assert only[1, 3] == only[2, 2] == 0 and only[8, 0] == 1


@pytest.mark.parametrize("shape", [(14, 12, 11), (40, 36), (30, 30, 1)])
def test_a_second_time_changes_nothing(shape) -> None:
    space = LabelSpace(("background", "a", "b", "c"))
    gone = gained = moved = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        labels = rng.choice(4, shape, p=[0.12, 0.8, 0.04, 0.04])
        labels[: shape[0] // 3][rng.random((shape[0] // 3, *shape[1:])) < 0.6] = 2
        once = postprocess(labels, space, DEFAULT)
        assert np.array_equal(postprocess(once, space, DEFAULT), once)
        gone += ((once == 0) & (labels > 0)).sum()
        gained += ((once > 0) & (labels == 0)).sum()
        moved += ((once != labels) & (once > 0) & (labels > 0)).sum()
    assert gone and gained and moved, "or nothing was put to the test"


def test_holes_are_those_of_scipy_and_pictures_have_some() -> None:
    for seed, shape in enumerate([(9, 8, 7), (12, 11)]):
        mask = np.random.default_rng(seed).random(shape) < 0.7
        assert np.array_equal(filled(mask), binary_fill_holes(mask))
    ring = np.ones((5, 5, 1), bool)
    ring[2, 2] = False
    assert clean(ring, DEFAULT).all()
    # one slice of many: the hole is open above and below
    assert not clean(np.pad(ring, ((0, 0), (0, 0), (1, 1))), DEFAULT)[2, 2].any()
    assert not clean(np.zeros((3, 3), bool), DEFAULT).any() and clean(np.ones((1, 1), bool), DEFAULT).all()


def test_classes_that_overlap_are_processed_alone() -> None:
    space = LabelSpace(("lung", "heart"), exclusive=False)
    masks = np.zeros((2, 7, 7), np.uint8)
    masks[0, 1:6, 1:6], masks[0, 3, 3], masks[1, 3, 3] = 1, 0, 1
    found = postprocess(masks, space, DEFAULT)
    assert found[:, 3, 3].tolist() == [1, 1] and found.dtype == masks.dtype and masks[0, 3, 3] == 0


def test_options_are_checked() -> None:
    given = from_dict(Evaluation, {"postprocess": {"classes": ["livr"]}}, what="evaluation")
    with pytest.raises(FederationError, match="did you mean 'liver'"):
        VoxelEvaluator(given, SPACE, (4, 4), 0)
    for wrong in ({"share": 1.5}, {"connectivity": 26}, {"hole": True}):
        with pytest.raises(FederationError, match="postprocess"):
            from_dict(Evaluation, {"postprocess": wrong}, what="evaluation")
    assert from_dict(Evaluation, {"postprocess": {}}, what="evaluation").postprocess == DEFAULT


class Tells(nn.Module):
    """Logits by the class index that its input holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -20 * torch.cat([(x - c).abs() for c in range(3)], dim=1)


class Site:
    name = "s"

    def __init__(self, folder: Path, truth: np.ndarray, shown: np.ndarray) -> None:
        self.folder, flags = folder, torch.ones(3, dtype=torch.bool)
        self.volume = SimpleNamespace(
            case="p", image=torch.from_numpy(shown).float()[None], spacing=(1.0, 1.0, 1.0), raw_spacing=(1.0, 1.0, 1.0),
            known=flags, scored=flags, whole=False, truth=lambda grid: truth, restore=lambda p: p.argmax(0).numpy(),
        )  # fmt: skip

    def network(self, model: object = None, name: str = "main") -> nn.Module:
        return Tells()

    def volumes(self, split: str) -> Iterator[SimpleNamespace]:
        yield self.volume


def test_the_final_evaluation_scores_twice(tmp_path) -> None:
    truth = np.zeros((8, 8, 3), np.int64)
    truth[1:6, 1:6] = 1
    shown = truth.copy()
    shown[7, 7, 0] = 1
    what = {"split": "test", "model": "best", "round": 3, "metrics": ["dice", "hd"], "overlays": False}

    def rows(grid: str, given: Postprocess | None) -> list[dict]:
        evaluator = VoxelEvaluator(Evaluation(overlays=False, postprocess=given), SPACE, (8, 8), 0)
        site = Site(tmp_path, truth, shown)
        return functions_of(evaluator)["evaluate"](site, [{"model": {}, "classes": None}], grid=grid, **what)[
            "rows"
        ]  # type: ignore[arg-type]

    both = rows("original", DEFAULT)
    plain = rows("original", None)
    assert select(both, model="best") == plain
    after = {(r["class"], r["metric"]): r["value"] for r in both if r["model"] == "post/best"}
    assert after["liver", "dice"] == 1 and after["liver", "hd"] == 0 and len(both) == 2 * len(plain)
    assert select(plain, metric="hd", class_="liver")[0]["value"] > 2
    assert {r["model"] for r in rows("federation", DEFAULT)} == {"best"}, "rounds are chosen without it"
    shown[7, 7, 0], shown[3, 3, 1] = 0, 2
    alone = rows("original", replace(DEFAULT, channels="independent"))
    dice = {(r["model"], r["class"]): r["value"] for r in select(alone, metric="dice")}
    assert dice["best", "liver"] < 1 and dice["post/best", "liver"] == 1


def test_a_component_of_exactly_the_share_stays_however_the_product_is_rounded() -> None:
    mask = np.zeros(33, bool)
    mask[:25] = mask[26:] = True  # 25, and 7 of them, which is 28 %
    assert 0.28 * 25 > 7, "by rounding alone"
    assert clean(mask, replace(DEFAULT, holes=False, share=0.28)).sum() == 32
    assert clean(mask, replace(DEFAULT, holes=False, share=0.29)).sum() == 25


def test_of_two_classes_that_claim_a_hole_the_first_has_it() -> None:
    space = LabelSpace(("background", "liver", "spleen"))
    for inner, outer in ((1, 2), (2, 1)):
        labels = np.full((5, 5), outer, np.uint8)
        labels[1:4, 1:4], labels[2, 2] = inner, 0
        assert postprocess(labels, space, DEFAULT)[2, 2] == 1


def test_edges_join_voxels_in_space_and_corners_alone_do_not() -> None:
    hows = ("faces", "edges", "corners")
    for place, left in (((10, 1, 1), [10, 10, 11]), ((10, 1, 0), [10, 11, 11])):  # at a corner, at an edge
        mask = np.zeros((12, 3, 3), bool)
        mask[:10, 0, 0] = mask[place] = True
        assert [int(clean(mask, replace(DEFAULT, connectivity=how)).sum()) for how in hows] == left
