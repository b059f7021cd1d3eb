"""Which cases of a site train, validate and test: `split`, `cases`, `role: test`, `score_all`, `whole`."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from test_site_index import index_of, nnunet, told

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.datasets.shared.listing import Case
from fedatlas.data.index import (
    Portions,
    SiteConfig,
    SiteIndex,
    _divided,
    _first,
    naming_of,
    read_site,
    split_validation,
)
from fedatlas.data.site_data import pool
from fedatlas.data.transforms import Preprocessing
from fedatlas.data.voxels import VoxelData
from fedatlas.learning.augment import OFF
from fedatlas.phantoms.organs import write_phantom

SPACE = LabelSpace(("background", "liver", "spleen", "kidney", "tumour"), ((3, 4),))
FLAT = Preprocessing(spacing=(4, 4, 4), window=(-100, 200), patch=(16, 16))
NAMES = [f"p{n:02d}" for n in range(20)]


def names(index: SiteIndex, split: str) -> set[str]:
    return {case.name for case in index.cases if case.split == split}


def unlabel(root: Path, *cases: str) -> None:
    for case in cases:
        (root / "labelsTs" / f"{case}.nii.gz").unlink()


def test_counts_and_shares_are_nested_and_leave_each_other_alone(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", NAMES)

    def split(validation: float, test: float) -> SiteIndex:
        return index_of(root, split={"validation": validation, "test": test})

    small, large = split(3, 4), split(3, 9)
    assert (len(names(small, "validation")), len(names(small, "test"))) == (3, 4)
    assert names(small, "test") < names(large, "test")
    assert names(small, "validation") == names(large, "validation") < names(split(6, 4), "validation")
    assert names(split(0.15, 0.2), "test") == names(small, "test")
    assert names(split(0.15, 0.2), "validation") == names(small, "validation")
    for fraction, seed in ((0.2, 0), (0.5, 7)):
        found = split_validation(split(0, 4), seed=seed, fraction=fraction)
        assert [len(found[s]) for s in ("train", "validation", "test")] == [16, 0, 4], (
            "split has the last word"
        )


def test_a_split_follows_from_seed_and_site_and_not_from_other_files(tmp_path: Path) -> None:
    config = {"path": str(nnunet(tmp_path / "s", NAMES)), "split": {"test": 5}}
    first = read_site(SiteConfig(name="x", **config), tmp_path)
    assert names(first, "test") != names(read_site(SiteConfig(name="x", **config), tmp_path, seed=1), "test")
    assert names(first, "test") != names(read_site(SiteConfig(name="y", **config), tmp_path), "test")
    ranked = index_of(tmp_path / "s", split={"test": 18}).cases
    gone = next(case.name for case in ranked if case.split == "train")
    (tmp_path / "s" / "imagesTr" / f"{gone}_0000.nii.gz").unlink()
    (tmp_path / "s" / "labelsTr" / f"{gone}.nii.gz").unlink()
    assert names(read_site(SiteConfig(name="x", **config), tmp_path), "test") == names(first, "test")


def test_patients_stay_whole(tmp_path: Path) -> None:
    cases = [f"p{n}_{visit}" for n in range(8) for visit in "ab"]
    index = index_of(nnunet(tmp_path / "s", cases), patient="(p\\d+)_", split={"validation": 3, "test": 0.25})
    patients = [{name[:2] for name in names(index, split)} for split in ("train", "validation", "test")]
    assert [len(found) for found in patients] == [4, 2, 2] and len(set.union(*patients)) == 8
    assert len(names(index, "validation")) == 4, "the patient of the third case comes as a whole"


def test_unlabelled_test_cases_are_left_out_and_labelled_ones_stay(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", NAMES[:6], ["t1", "t2", "t3"])
    unlabel(root, "t2", "t3")
    assert names(index_of(root), "test") == {"t1", "t2", "t3"}
    index = index_of(root, split={"validation": 2})
    assert {case.name for case in index.cases} == {*NAMES[:6], "t1"}
    assert names(index, "test") == {"t1"} and len(names(index, "validation")) == 2
    text = told(root, split={"validation": 1, "test": 2})
    assert "split: test: 2 is asked for, and its layout lists 1 labelled test cases" in text
    unlabel(root, "t1")
    assert len(names(index_of(root, split={"test": 2}), "test")) == 2
    for portion in ({"test": 6}, {"validation": 4, "test": 3}, {"validation": 0.6, "test": 0.5}):
        text = told(root, split=portion)
        assert "leave nothing to train on: the site has 6 labelled cases" in text
    with pytest.raises(Exception, match="a share is below 1"):
        SiteConfig(name="x", path="s", split=Portions(test=1.5))
    with pytest.raises(Exception, match="a number is expected, not true"):
        Portions(test=True)


def test_lists_of_the_layout_win_where_no_split_is_given(tmp_path: Path) -> None:
    root = tmp_path / "s"
    root.mkdir()
    content = {
        "labels": {"background": 0, "liver": 1},
        "training": [{"image": f"i{n}.nii.gz", "label": f"l{n}.nii.gz"} for n in range(5)],
        "validation": [{"image": "v.nii.gz", "label": "vl.nii.gz"}],
    }
    for entry in [*content["training"], *content["validation"]]:
        (root / entry["image"]).touch()
        (root / entry["label"]).touch()
    (root / "dataset.json").write_text(json.dumps(content))
    found = split_validation(index_of(root), seed=0, fraction=0.5)
    assert [case.name for case in found["validation"]] == ["v"] and len(found["train"]) == 5
    divided = index_of(root, split={"test": 2})
    assert len(names(divided, "test")) == 2 and len(names(divided, "train")) == 3
    assert names(divided, "validation") == {"v"}
    assert "split: validation: 0.2 is asked for" in told(root, split={"validation": 0.2})


def test_shares_hold_of_patients_with_equal_findings() -> None:
    def case(number: int) -> Case:
        ill = (("pneumothorax", number % 5 == 0),)
        return Case(
            f"c{number}", (Path(f"c{number}"),), Path("l"), "train", f"c{number}", ("a",), findings=ill
        )

    cases = _divided([case(n) for n in range(100)], Portions(validation=0.2, test=0.2), "x", 0)
    for split in ("validation", "test"):
        ill = [dict(case.findings)["pneumothorax"] for case in cases if case.split == split]
        assert (len(ill), sum(ill)) == (20, 4)


def test_every_patient_is_tested_on_in_one_fold(tmp_path: Path) -> None:
    """Folds are stretches of the order by which shares are drawn; validation comes from the others."""
    five = NAMES[:5]
    root = nnunet(tmp_path / "s", five, [])
    tested = []
    for fold in (1, 2, 3):
        found = index_of(root, split={"folds": 3, "fold": fold, "validation": 1})
        tested.append(names(found, "test"))
        assert len(names(found, "validation")) == 1
        kinds = [names(found, split) for split in ("train", "validation", "test")]
        assert sum(map(len, kinds)) == len(set().union(*kinds)) == 5
    assert set().union(*tested) == set(five) and sorted(map(len, tested)) == [1, 2, 2]
    assert names(index_of(root, split={"folds": 5, "fold": 1, "validation": 2}), "test") == names(
        index_of(root, split={"test": 1, "validation": 2}), "test"
    )
    first = index_of(root, split={"folds": 5, "fold": 1, "validation": 2})
    shares = index_of(root, split={"test": 0.2, "validation": 0.4})
    assert [(case.name, case.split) for case in first.cases] == [(c.name, c.split) for c in shares.cases]


def test_folds_that_cannot_be_are_told(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", NAMES[:5], ["t"])
    assert "lists 1 labelled test cases, which stay test cases" in told(root, split={"folds": 2, "fold": 1})
    alone = nnunet(tmp_path / "alone", NAMES[:5], [])
    assert "folds: 6 of 5 patients with labels" in told(alone, split={"folds": 6, "fold": 1})
    assert "one fold of 2 for the test leave nothing to train on" in told(
        alone, split={"folds": 2, "fold": 1, "validation": 3}
    )
    for portions, message in (
        ({"folds": 3}, "folds and fold go together"),
        ({"fold": 3}, "folds and fold go together"),
        ({"folds": 3, "fold": 4}, "got 4 of 3 folds; allowed: 1 to 3"),
        ({"folds": 3, "fold": 1, "test": 0.2}, "got 0.2 beside folds"),
    ):
        with pytest.raises(Exception, match=message):
            Portions(**portions)


def test_files_that_are_wrong_are_told_before_a_split_that_they_leave_too_few_for(tmp_path: Path) -> None:
    root, split = nnunet(tmp_path / "s", NAMES[:3]), {"validation": 1, "test": 1}
    (root / "labelsTr" / "p01.nii.gz").unlink()
    first, last = told(root, split=split).splitlines()
    assert first.startswith(
        "site x: labelsTr/p01.nii.gz: missing: training case 'p01' has no label file; add it"
    )
    assert last.startswith("site x: split: 1 for validation and 1 for the test leave nothing to train on")
    assert "labelsTr/p01.nii.gz" in told(root, split={"folds": 3, "fold": 1})
    many = nnunet(tmp_path / "many", [f"c{n:02d}" for n in range(25)])
    for image in (many / "imagesTr").iterdir():
        image.rename(image.with_name(image.name.replace("_0000", "")))
    lines = told(many, split=split).splitlines()
    assert "imagesTr/c00.nii.gz: an image without a channel number; rename it to <case>_0000" in lines[0]
    assert len(lines) == 22 and lines[20] == "site x: and 5 more findings in its files"
    assert "split: there is nothing to divide: its layout lists no case; see" in lines[21]
    none = nnunet(tmp_path / "none", ["c0"])
    (none / "labelsTr" / "c0.nii.gz").rename(none / "labelsTr" / "c0.nii.GZ")
    (none / "imagesTr" / "c0_0000.nii.gz").rename(none / "imagesTr" / "c0_0000.nii.GZ")
    note, _, last = told(none, split=split).splitlines()
    assert "not read: it does not end in .nii.gz" in note and "nothing to divide" in last, (
        "a note may be the reason"
    )


def test_shares_are_of_all_patients_however_many_findings_there_are() -> None:
    """Groups of one patient or two do not melt away; choices stay nested, and counts go beside shares."""

    def case(number: int) -> Case:
        bits = tuple((f"f{bit}", bool(number * 37 >> bit & 1)) for bit in range(6))
        return Case(f"c{number}", (Path(f"c{number}"),), None, "train", f"c{number}", (), findings=bits)

    def split(**portions: Any) -> dict[str, set[str]]:
        cases = _divided([case(n) for n in range(90)], Portions(**portions), "x", 0)
        return {s: {c.name for c in cases if c.split == s} for s in ("train", "validation", "test")}

    few, more = split(validation=0.2, test=0.1), split(validation=0.2, test=0.3)
    assert [len(few[s]) for s in ("train", "validation", "test")] == [63, 18, 9]
    assert len(more["test"]) == 27 and few["test"] < more["test"] and few["validation"] == more["validation"]
    mixed = split(validation=18, test=0.3)
    assert mixed == more, "labelled by findings alone, and a count is the share that it makes"


def test_fewer_training_cases_are_among_more(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", NAMES, ["t"])

    def split(most: int | None) -> dict[str, set[str]]:
        found = split_validation(index_of(root, cases=most), seed=3, fraction=0.25)
        return {name: {case.name for case in cases} for name, cases in found.items()}

    everything, four, nine = split(None), split(4), split(9)
    assert len(four["train"]) == 4 and four["train"] < nine["train"] < everything["train"]
    assert four["validation"] == everything["validation"] and four["test"] == everything["test"]
    assert split(99) == everything


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"role": "test", "split": {"test": 1}}, "split: says which cases train"),
        ({"role": "test", "cases": 3}, "cases: says which cases train"),
        ({"score_all": True}, "score_all: without `annotated`"),
        ({"score_all": True, "annotated": ["liver"], "reference": {}}, "score_all and reference"),
        ({"whole": True}, "it goes with `role: test`"),
        ({"balanced": 2}, "balanced: is for labels of whole images"),
        ({"reading": {"a": 1}}, "reading: the layout nnunet has no options"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, config: dict[str, Any], part: str) -> None:
    assert part in told(nnunet(tmp_path / "s", NAMES[:4]), **config)


def test_whole_needs_groups(tmp_path: Path) -> None:
    index = index_of(nnunet(tmp_path / "s", NAMES[:4]), role="test", whole=True)
    with pytest.raises(FederationError, match="the label space has no groups"):
        naming_of(index, LabelSpace(SPACE.names))


# -------------------------------------------------------------------------------------- with voxels


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_phantom(
        tmp_path_factory.mktemp("world"), sites=2, cases=5, test_cases=2, shape=(20, 20, 12), seed=3
    )


def data_of(root: Path, cache: Path, **config: Any) -> VoxelData:
    index = read_site(SiteConfig(name="s", path=str(root), **config), root)
    return VoxelData(index, SPACE, FLAT, augmentation=OFF, validation=0.25, cache=cache)


def rewrite(path: Path, how: Any) -> None:
    image: Any = nib.load(path)  # type: ignore[attr-defined]
    nib.save(nib.Nifti1Image(how(np.asarray(image.dataobj).copy()), image.affine), path)  # type: ignore[attr-defined]


def seen(data: VoxelData) -> str:
    """A mark of all that a method can see of a site."""
    total = hashlib.sha256()
    for batch in data.batches(("x",), batch=2, steps=6):
        for tensor in (batch.image, batch.target, batch.known):
            total.update(tensor.contiguous().numpy().tobytes())
    for volume in data.volumes("validation"):
        total.update(volume.truth("original").tobytes() + volume.scored.numpy().tobytes())
    total.update(json.dumps(data.summary(), sort_keys=True).encode())
    return total.hexdigest() + str(data.n_labelled) + str(data.n_positive) + str(data.labels.known)


def test_what_is_scored_only_is_never_seen(world: Path, tmp_path: Path) -> None:
    """Every voxel of the label that `annotated` leaves out is moved; only the test can tell."""
    root = Path(shutil.copytree(world / "site-0", tmp_path / "site"))
    config = {"annotated": ("liver",), "score_all": True}
    plain = data_of(root, tmp_path / "c1", annotated=("liver",))
    data = data_of(root, tmp_path / "c1", **config)
    first, before = seen(data), [volume.truth("original").copy() for volume in data.volumes("test")]
    assert first == seen(plain)
    rows = [(v.known.tolist(), v.scored.tolist()) for v in data.volumes("test")]
    assert rows == [([True, True, False, False, False], [True, True, True, False, False])] * 2
    assert {tuple(v.scored.tolist()) for v in plain.volumes("test")} == {(True, True, False, False, False)}
    for file in [*root.glob("labelsTr/*"), *root.glob("labelsTs/*")]:
        rewrite(
            file,
            lambda v: np.where(v == 2, 0, np.where((v == 0) & (np.arange(v.shape[2]) < 3), 2, v)).astype(
                v.dtype
            ),
        )
    data = data_of(root, tmp_path / "c1", **config)
    assert seen(data) == first
    after = [volume.truth("original") for volume in data.volumes("test")]
    assert not any(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(np.array_equal(a == 1, b == 1) for a, b in zip(before, after, strict=True))


def test_scans_are_not_resized_as_pictures_and_a_site_needs_something_to_teach(
    world: Path, tmp_path: Path
) -> None:
    index = read_site(SiteConfig(name="s", path=str(world / "site-0")), world)
    form = Preprocessing(size=(16, 16), patch=(16, 16), context=0)
    with pytest.raises(
        DataError, match=r"p000_0000\.nii\.gz: a scan, and `preprocessing.size` is for pictures"
    ):
        VoxelData(index, SPACE, form, cache=tmp_path / "c").prepare()
    with pytest.raises(DataError, match=r"`annotated` leaves out all of its labels \(liver, spleen\)"):
        data_of(world / "site-0", tmp_path / "c", annotated=()).prepare()
    bare = replace(index, cases=tuple(replace(case, annotated=()) for case in index.cases))
    with pytest.raises(DataError, match=r"none of its 5 training cases .* its labels \(liver, spleen\)"):
        VoxelData(bare, SPACE, FLAT, cache=tmp_path / "c").prepare()


def test_a_tested_site_adds_nothing_to_what_is_pooled(world: Path, tmp_path: Path) -> None:
    test_only = data_of(world / "site-1", tmp_path / "c", role="test")
    assert test_only.n_train == 0 and not test_only.items["validation"] and len(test_only.items["test"]) == 7
    assert not test_only.n_labelled.any() and not test_only.n_positive.any()
    train = data_of(world / "site-0", tmp_path / "c")
    both = pool([train, test_only])
    assert both.n_train == train.n_train and both.n_labelled.tolist() == train.n_labelled.tolist()
    with pytest.raises(DataError, match="no labelled case, and its role is test"):
        empty = replace(test_only.indexes[0], cases=())
        VoxelData(empty, SPACE, FLAT, cache=tmp_path / "c").prepare()


def test_an_unlabelled_scan_of_a_patient_who_is_kept_from_training_does_not_train() -> None:
    def case(name: str, patient: str, label: Path | None, names: tuple[str, ...]) -> Case:
        return Case(name, (Path(name),), label, "train", patient, names)

    labelled = [case(f"p{n}-0", f"p{n}", Path("l"), ("liver",)) for n in range(6)]
    cases = [*labelled, *(case(f"p{n}-1", f"p{n}", None, ()) for n in range(6))]
    found = _divided(cases, Portions(validation=2, test=2), "x", 0)
    kept = {c.patient for c in found if c.split != "train"}
    assert len(kept) == 4 and len(found) == 4 + 2 * 2
    assert not kept & {c.patient for c in found if c.split == "train"}


def test_a_share_that_comes_to_no_patient_is_noted(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", NAMES[:4])
    split = {"validation": 0.1, "test": 0.25}
    [problem] = index_of(root, split=split).problems
    assert not problem.fatal and "split: validation: 0.1 of its patients came to none" in str(problem)
    assert not index_of(root, split=split | {"validation": 1}).problems


def test_fewer_cases_are_those_of_fewer_patients() -> None:
    cases = [
        Case(f"p{n}-{k}", (Path("i"),), Path("l"), "train", f"p{n}", ("liver",))
        for n in range(4)
        for k in range(3)
    ]
    for seed in range(5):
        assert len({case.patient for case in _first(cases, 3, "x", seed)}) == 1
        assert len({case.patient for case in _first(cases, 6, "x", seed)}) == 2


def test_at_a_site_with_whole_organs_a_lesion_is_not_scored(world: Path, tmp_path: Path) -> None:
    config = {"role": "test", "aliases": {"liver": "kidney", "spleen": "tumour"}}
    for whole in (True, False):
        data = data_of(world / "site-0", tmp_path / "c", whole=whole, **config)
        scored = {tuple(volume.scored.tolist()) for volume in data.volumes("test")}
        assert scored == {(True, False, False, True, not whole)}
