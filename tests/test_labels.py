"""labels.py: the label space, names, integers."""

import numpy as np
import pytest

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels, known_row, map_labels, resolve_names

SPACE = LabelSpace(("background", "liver", "tumour", "spleen"), groups=((1, 2),))


def test_groups_cover_all_foreground_in_order() -> None:
    assert SPACE.organs == ((1, 2), (3,))
    assert LabelSpace(("a", "b"), exclusive=False).organs == ((0,), (1,))


@pytest.mark.parametrize(
    ("names", "groups", "text"),
    [
        (("background", "liver", "liver"), (), "liver is given twice"),
        (("liver", "spleen"), (), "begin with 'background'"),
        (("background",), (), "no class besides"),
        (("background", "a"), ((0, 1),), "a group holds 'background'; allowed: a$"),
        (("background", "a", "b"), ((1,), (1, 2)), "'a' is in two groups"),
    ],
)
def test_bad_spaces_say_why(names, groups, text: str) -> None:
    with pytest.raises(FederationError, match=text):
        LabelSpace(names, groups)


def test_known_rows() -> None:
    assert known_row(SPACE, {2}) == (True, False, True, False)
    assert known_row(LabelSpace(("a", "b"), exclusive=False), {1}) == (False, True)
    assert SiteLabels(SPACE, frozenset({3})).known == (True, False, False, True)
    with pytest.raises(FederationError, match="not foreground"):
        SiteLabels(SPACE, frozenset({0}))


def test_integers_are_mapped_by_name() -> None:
    raw = np.array([[0, 7], [3, 7]])
    table = {0: "background", 7: "spleen", 3: "liver"}
    assert map_labels(raw, table, SPACE).tolist() == [[0, 3], [1, 3]]
    assert map_labels(raw, table, SPACE, annotated={1}).tolist() == [[0, 0], [1, 0]]


def test_overlapping_classes_become_masks() -> None:
    space = LabelSpace(("left", "right"), exclusive=False)
    masks = map_labels(np.array([0, 1, 2]), {0: "background", 1: "right", 2: "left"}, space)
    assert masks.tolist() == [[0, 0, 1], [0, 1, 0]]


def test_unknown_integers_and_fractions_name_the_file() -> None:
    with pytest.raises(DataError, match="case.nii.gz: holds the label integer 9"):
        map_labels(np.array([9]), {0: "background"}, SPACE, source="case.nii.gz")
    with pytest.raises(DataError, match=r"holds 0\.5"):
        map_labels(np.array([0.5]), {0: "background"}, SPACE)


def test_names_through_aliases() -> None:
    assert resolve_names(["background", "hepar"], {"hepar": "liver"}, SPACE, site="a")["hepar"] == "liver"
    with pytest.raises(FederationError, match="alias 'x' matches none"):
        resolve_names(["liver"], {"x": "liver"}, SPACE, site="a")
    with pytest.raises(FederationError, match="points to 'lung'"):
        resolve_names(["liver"], {"liver": "lung"}, SPACE, site="a")
    with pytest.raises(FederationError, match="label 'lung' is not in the label space"):
        resolve_names(["lung"], {}, SPACE, site="a")
    with pytest.raises(FederationError, match=r"label 'LIVER' is not in .*; did you mean 'liver'\? add it"):
        resolve_names(["LIVER"], {}, SPACE, site="a")
    letters = LabelSpace(("E", "N"), exclusive=False, level="image")
    with pytest.raises(
        FederationError, match=r"label 'e' is not in the label space \(E, N\); did you mean 'E'"
    ):
        resolve_names(["e"], {}, letters, site="a")
