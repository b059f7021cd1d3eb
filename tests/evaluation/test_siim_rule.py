"""Empty masks by the rule of the SIIM-ACR challenge, for the classes that are scored by it; lesions as their organ."""

import numpy as np
import pytest

from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import from_dict
from fedatlas.evaluation.evaluate import Evaluation
from fedatlas.evaluation.metrics import METRICS, score, score_pair, whole_organs
from fedatlas.evaluation.voxels import VoxelEvaluator

SOME, NONE = np.ones((3, 3), bool), np.zeros((3, 3), bool)
HALF = SOME & (np.arange(3) < 1)


def test_overlap_of_an_empty_truth() -> None:
    right, wrong = (score_pair(p, NONE, (1, 1), METRICS, empty="siim") for p in (NONE, HALF))
    assert right["dice"] == right["nsd"] == (1.0, "truth empty")
    assert wrong["dice"] == wrong["nsd"] == (0.0, "truth empty")
    assert right["hd95"] == wrong["asd"] == (None, "truth empty")


def test_where_there_is_a_truth_the_rule_changes_nothing() -> None:
    for prediction in (NONE, HALF, SOME):
        ruled = score_pair(prediction, HALF, (1, 1), METRICS, empty="siim")
        assert ruled == score_pair(prediction, HALF, (1, 1), METRICS)
        assert not ruled["dice"][1], "rows of cases with a truth are those without a reason"


def test_a_rule_per_class() -> None:
    space = LabelSpace(("lung", "pneumothorax", "heart"), exclusive=False)
    truth, prediction = np.stack([NONE] * 3), np.stack([NONE, NONE, HALF])
    args = (prediction, truth, space, [True] * 3, (1, 1), ["dice"])
    found = {s.class_index: s.value for s in score(*args, empty={"pneumothorax": "siim"})}
    assert found == {0: None, 1: 1.0, 2: None}
    found = {s.class_index: s.value for s in score(*args, empty={"lung": "nan", "default": "siim"})}
    assert found == {0: None, 1: 1.0, 2: 0.0}


def test_a_rule_of_no_class_is_refused() -> None:
    space = LabelSpace(("lung", "pneumothorax"), exclusive=False)
    given = from_dict(Evaluation, {"empty": {"pneumothorx": "siim"}}, what="evaluation")
    with pytest.raises(FederationError, match="did you mean 'pneumothorax'"):
        VoxelEvaluator(given, space, (8, 8), 0)
    with pytest.raises(FederationError, match="empty"):
        from_dict(Evaluation, {"empty": {"lung": "none"}}, what="evaluation")
    with pytest.raises(FederationError, match="empty"):
        from_dict(Evaluation, {"empty": "siimm"}, what="evaluation")


def test_lesions_count_as_their_organ() -> None:
    names = ("background", "liver", "tumour", "kidney", "cyst", "stone", "spleen")
    space = LabelSpace(names, ((1, 2), (3, 5, 4)))
    labels = np.arange(7, dtype=np.uint8).reshape(1, 7)
    assert whole_organs(labels, space).tolist() == [[0, 1, 1, 3, 3, 3, 6]] and labels[0, 2] == 2
    overlapping = LabelSpace(("liver", "tumour", "spleen"), ((0, 1),), exclusive=False)
    masks = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 1]], np.uint8)
    assert whole_organs(masks, overlapping).tolist() == [[1, 1, 0], [0, 1, 0], [0, 1, 1]]
