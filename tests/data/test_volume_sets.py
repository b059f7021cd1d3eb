"""KiTS19, LiTS, AMOS22, BTCV, WORD, AbdomenCT-1K and three tasks of the Decathlon, in folders of their exact layouts."""

import json
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from fake_volumes import (
    ABDOMENCT1K_NAMES,
    BTCV_NAMES,
    MSD_TASKS,
    WORD_NAMES,
    write_abdomenct1k,
    write_amos22,
    write_btcv,
    write_kits19,
    write_lits,
    write_msd,
    write_word,
)

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.checks import check_federation, check_site
from fedatlas.data.index import SiteConfig, SiteIndex, read_site
from fedatlas.data.transforms import Preprocessing
from fedatlas.data.voxels import VoxelData

SPACE = LabelSpace(
    (
        "background",
        "liver",
        "liver tumour",
        "spleen",
        "pancreas",
        "pancreas tumour",
        "kidney",
        "kidney tumour",
    ),
    ((1, 2), (4, 5), (6, 7)),
)
SOLID = Preprocessing(spacing=(6, 6, 6), window=(-54, 258), patch=(8, 8, 8))
BOTH_KIDNEYS = {"right kidney": "kidney", "left kidney": "kidney"}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    write_kits19(root / "kits19")
    write_lits(root / "lits")
    write_amos22(root / "amos22")
    write_btcv(root / "btcv")
    write_word(root / "word")
    write_abdomenct1k(root / "abdomenct1k")
    for task in MSD_TASKS:
        write_msd(root, task)
    return root


def index_of(path: Path, **config: Any) -> SiteIndex:
    return read_site(SiteConfig(**({"name": "x", "path": str(path)} | config)), path)


def told(path: Path, **config: Any) -> str:
    with pytest.raises((DataError, FederationError)) as error:
        index_of(path, **config)
    assert "site x" in str(error.value)
    return str(error.value)


def raw_label(path: Path) -> np.ndarray:
    image: Any = nib.load(path)  # type: ignore[attr-defined]
    return np.asarray(image.dataobj)


def fatal(index: SiteIndex) -> list[str]:
    return [str(problem) for problem in index.problems if problem.fatal]


def test_kits19(sets: Path) -> None:
    index = index_of(sets / "kits19", format="kits19", split={"validation": 1, "test": 2})
    assert index.table == {"background": 0, "kidney": 1, "kidney tumour": 2} and not fatal(index)
    assert "6 labelled cases; KiTS19 has 210" in str(index.problems[0])
    splits = [case.split for case in index.cases]
    assert len(splits) == 6 and splits.count("test") == 2 and splits.count("validation") == 1
    plain = index_of(sets / "kits19", format="kits19")
    assert [case.name for case in plain.cases if case.split == "test"] == ["case_00210"]
    inner = index_of(sets / "kits19" / "data", format="kits19")
    assert [case.name for case in inner.cases] == [case.name for case in plain.cases]
    assert not [problem for problem in check_site(index, SPACE) if problem.fatal]


def test_kits19_that_is_not_whole_or_of_another_year(sets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets / "kits19", tmp_path / "clone"))
    for scan in root.glob("data/*/imaging.nii.gz"):
        scan.unlink()
    (text,) = fatal(index_of(root, format="kits19"))
    assert "7 of 7 case folders have no imaging.nii.gz; a clone holds the labels alone" in text
    root = Path(shutil.copytree(sets / "kits19", tmp_path / "half"))
    (root / "data/case_00002/segmentation.nii.gz").unlink()
    (text,) = fatal(index_of(root, format="kits19"))
    assert "data/case_00002/segmentation.nii.gz: missing" in text
    (root / "data/case_00001/instances").mkdir()
    assert "data/case_00001/instances is of KiTS23" in told(root, format="kits19")
    (tmp_path / "later" / "dataset" / "case_00000").mkdir(parents=True)
    text = told(tmp_path / "later", format="kits19")
    assert "found none (dataset/ is there: that is KiTS23)" in text
    assert "reading: the layout kits19 has no options" in told(
        sets / "kits19", format="kits19", reading={"a": 1}
    )


def test_amos22_is_tested_on_in_full(sets: Path, tmp_path: Path) -> None:
    config = {"format": "amos22", "role": "test", "whole": True, "aliases": BOTH_KIDNEYS}
    index = index_of(sets / "amos22", **config)
    assert [case.name for case in index.cases] == [f"amos_{n:04d}" for n in range(1, 6)]
    assert {case.split for case in index.cases} == {"test"} and index.brings == ()
    counts = {
        modality: len(index_of(sets / "amos22", **config, reading={"modality": modality}).cases)
        for modality in ("ct", "mr", "both")
    }
    assert counts == {"ct": 5, "mr": 2, "both": 7}
    assert not [problem for problem in check_site(index, SPACE) if problem.fatal]
    data = VoxelData(index, SPACE, SOLID, cache=tmp_path)
    assert data.n_train == 0 and not data.n_labelled.any() and not data.labels.annotated
    assert data.summary()["role"] == "test" and data.summary()["cases"]["test"] == 5
    for volume in data.volumes("test"):
        scored = [SPACE.names[c] for c in SPACE.foreground if volume.scored[c]]
        assert scored == ["liver", "spleen", "pancreas", "kidney"]
        assert not volume.known[1:].any() and volume.whole
        raw: Any = nib.load(sets / "amos22" / "labelsTr" / "amos_0001.nii.gz")  # type: ignore[attr-defined]
        if volume.case == "amos_0001":
            own = np.asarray(raw.dataobj)
            assert np.array_equal(volume.truth("original") == 6, np.isin(own, (2, 3)))
            assert np.array_equal(volume.truth("original") == 1, own == 6)


def test_amos22_of_the_wrong_release(sets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets / "amos22", tmp_path / "amos"))
    table = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps(table | {"validation": []}))
    assert 'the list "validation" is missing' in told(root, format="amos22")
    assert "modality" in told(sets / "amos22", format="amos22", reading={"modality": "pet"})
    text = told(sets / "Task09_Spleen", format="amos22")
    assert "AMOS22 is expected, with 15 organs" in text and "found 1: spleen" in text
    (root / "dataset.json").write_text(json.dumps(table))
    shutil.rmtree(root / "imagesVa")
    (text,) = fatal(index_of(root, format="amos22"))
    assert "imagesVa/amos_0004.nii.gz: missing" in text and "2 more of its 3 entries" in text
    with pytest.raises(FederationError, match="none of its labels"):
        VoxelData(
            index_of(sets / "amos22", format="amos22", role="test"),
            LabelSpace(("background", "heart")),
            SOLID,
            cache=tmp_path,
        )


@pytest.mark.parametrize("task", MSD_TASKS)
def test_decathlon(sets: Path, task: str) -> None:
    index = index_of(sets / task, split={"validation": 1, "test": 2})
    assert len(index.cases) == 6 and not index.problems
    assert all(case.label is not None for case in index.cases)
    assert list(index.table)[1:] == list(MSD_TASKS[task][1].values())[1:] and index.channels == 1
    assert sum(case.split == "test" for case in index_of(sets / task).cases) == 1, "the unlabelled one"


def test_decathlon_half_unpacked(sets: Path, tmp_path: Path) -> None:
    assert f"and {next(iter(MSD_TASKS))} in it does" in told(sets)
    root = Path(shutil.copytree(sets / "Task03_Liver", tmp_path / "liver"))
    shutil.rmtree(root / "imagesTs")
    index = index_of(root)
    assert not fatal(index) and "imagesTs/liver_7.nii.gz: missing" in str(index.problems[0])
    for number in (1, 2):
        (root / f"labelsTr/liver_{number}.nii.gz").unlink()
    (text,) = fatal(index_of(root))
    assert "labelsTr/liver_1.nii.gz: missing" in text and "1 more of its 6 entries" in text
    table = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps(table | {"numTraining": 131}))
    assert "numTraining is 131" in str(index_of(root).problems)


def test_two_cancers_are_two_classes(sets: Path) -> None:
    split = {"validation": 1, "test": 2}
    liver = index_of(sets / "Task03_Liver", name="liver", split=split, aliases={"cancer": "liver tumour"})
    pancreas = index_of(
        sets / "Task07_Pancreas", name="pancreas", split=split, aliases={"cancer": "pancreas tumour"}
    )
    spleen = index_of(sets / "Task09_Spleen", name="spleen", split=split)
    kidney = index_of(sets / "kits19", name="kidney", format="kits19", split=split)
    found = check_federation([liver, pancreas, spleen, kidney], SPACE)
    assert not [problem for problem in found if problem.fatal]
    plain = LabelSpace(("background", "liver", "cancer", "pancreas", "pancreas tumour"))
    other = index_of(sets / "Task03_Liver", name="liver", split=split)
    assert any("'cancer' means" in str(problem) for problem in check_federation([pancreas, other], plain))


def test_a_lesion_without_its_organ_is_noted(sets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets / "Task03_Liver", tmp_path / "liver"))
    config = {"aliases": {"cancer": "liver tumour"}}
    assert not [p for p in check_site(index_of(root, **config), SPACE) if "touch no" in p.what]
    file = root / "labelsTr" / "liver_3.nii.gz"
    image: Any = nib.load(file)  # type: ignore[attr-defined]
    voxels = np.asarray(image.dataobj).copy()
    voxels[24:26, 2:4, 1] = 2
    nib.save(nib.Nifti1Image(voxels, image.affine), file)  # type: ignore[attr-defined]
    (problem,) = [p for p in check_site(index_of(root, **config), SPACE) if "touch no" in p.what]
    assert not problem.fatal and problem.file == "labelsTr/liver_3.nii.gz"
    assert "case 'liver_3': 'liver tumour' in 1 of 2 pieces (4 voxels, 320 mm³)" in problem.what
    assert "touch no 'liver'; the largest at voxel [24, 2, 1]" in problem.what
    ungrouped = LabelSpace(SPACE.names)
    assert not [p for p in check_site(index_of(root, **config), ungrouped) if "touch no" in p.what]


def test_orientation_of_kits19_is_undone(sets: Path, tmp_path: Path) -> None:
    """Slices come first in these files; on the federation's grid both kidneys lie low and behind."""
    split = {"validation": 1, "test": 2}
    data = VoxelData(index_of(sets / "kits19", format="kits19", split=split), SPACE, SOLID, cache=tmp_path)
    for volume in data.volumes("test"):
        places = np.argwhere(volume.truth("federation") >= 6) / np.array(volume.image.shape[1:])
        assert places.mean(0)[1] < 0.45 and places.mean(0)[2] < 0.4
        assert torch.isfinite(volume.image).all()


# ------------------------------------------------------------------------------------------------- LiTS and BTCV


def test_lits_in_batches_and_in_one_folder(sets: Path, tmp_path: Path) -> None:
    index = index_of(sets / "lits", format="lits", split={"validation": 0.1, "test": 0.3})
    assert index.table == {"background": 0, "liver": 1, "liver tumour": 2} and not fatal(index)
    assert "6 labelled cases; LiTS has 131, 0 to 130" in str(index.problems[0])
    assert sorted(case.name for case in index.cases) == [f"volume-{n}" for n in range(6)]
    assert [case.split for case in index.cases].count("test") == 2
    assert not [problem for problem in check_site(index, SPACE) if problem.fatal]
    plain = index_of(sets / "lits", format="lits")
    assert [case.name for case in plain.cases if case.split == "test"] == ["test-volume-0"]
    assert all(
        case.label and f"n-{case.name[7:]}." in case.label.name for case in plain.cases if case.labelled
    )
    flat = tmp_path / "flat"
    flat.mkdir()
    for file in (sets / "lits").glob("*/*.nii"):
        shutil.copy(file, flat)
    assert [c.name for c in index_of(flat, format="lits").cases] == [c.name for c in plain.cases]
    packed = index_of(write_lits(tmp_path / "packed", ending=".nii.gz"), format="lits")
    assert [c.name for c in packed.cases] == [c.name for c in plain.cases]


def test_lits_that_is_not_whole(sets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets / "lits", tmp_path / "lits"))
    first, second = root / "Training Batch 1", root / "Training Batch 2"
    (first / "segmentation-1.nii").unlink()
    (second / "volume-3.nii").unlink()
    shutil.copy(second / "volume-4.nii", second / "volume-131.nii")
    shutil.copy(second / "segmentation-4.nii", second / "segmentation-131.nii")
    scans, labels, foreign = fatal(index_of(root, format="lits"))
    assert "Training Batch 1/volume-1.nii: missing: 1 of 6 scans have no label map" in scans
    assert "Training Batch 2/segmentation-3.nii: missing: 1 of 6 label maps have no scan" in labels
    assert "volume-131.nii: not of LiTS, whose labelled scans are 0 to 130" in foreign
    shutil.copy(second / "volume-4.nii", first)
    text = told(root, format="lits")
    assert "Training Batch 1/volume-4.nii and Training Batch 2/volume-4.nii are the same scan twice" in text
    text = told(sets / "Task03_Liver", format="lits")
    assert "LiTS is expected, with volume-0.nii" in text and "found none" in text
    assert "the layout lits has no options" in told(sets / "lits", format="lits", reading={"a": 1})


@pytest.mark.parametrize("inside", [".", "RawData", "RawData/Training"])
def test_btcv_is_tested_on(sets: Path, tmp_path: Path, inside: str) -> None:
    space = LabelSpace(("background", "liver", "kidney", "pancreas", "spleen", "gallbladder"))
    index = index_of(sets / "btcv" / inside, format="btcv", role="test", aliases=BOTH_KIDNEYS)
    assert tuple(index.table) == ("background", *BTCV_NAMES) and list(index.table.values()) == [*range(14)]
    assert [case.name for case in index.cases] == ["img0001", "img0002", "img0003"]
    assert {case.split for case in index.cases} == {"test"} and index.brings == () and not fatal(index)
    assert "3 labelled cases; BTCV has 30, 1 to 10, 21 to 40" in str(index.problems[0])
    if inside != ".":
        return
    assert not [problem for problem in check_site(index, space) if problem.fatal]
    data = VoxelData(index, space, SOLID, cache=tmp_path)
    assert data.n_train == 0 and not data.labels.annotated
    for volume in data.volumes("test"):
        assert volume.scored[1:].all() and not volume.known[1:].any()
        own = raw_label(sets / f"btcv/RawData/Training/label/label{volume.case[3:]}.nii.gz")
        for c, integers in {1: [6], 2: [2, 3], 3: [11], 4: [1], 5: [4]}.items():
            assert np.array_equal(
                volume.truth("original") == c, np.isin(own, integers)
            ) and c in volume.truth("original")


def test_btcv_that_is_not_whole(sets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets / "btcv", tmp_path / "btcv"))
    training = root / "RawData" / "Training"
    (training / "label" / "label0002.nii.gz").unlink()
    (text,) = fatal(index_of(root, format="btcv"))
    assert "RawData/Training/img/img0002.nii.gz: missing: 1 of 3 scans have no label map" in text
    for folder, name in (("img", "img"), ("label", "label")):
        shutil.copy(training / folder / f"{name}0001.nii.gz", training / folder / f"{name}0015.nii.gz")
    assert "img0015.nii.gz: not of BTCV" in fatal(index_of(root, format="btcv"))[1]
    shutil.copy(training / "img/img0001.nii.gz", tmp_path / "img0001.nii.gz")
    assert "found no folder img" in told(sets / "kits19", format="btcv")
    shutil.rmtree(training / "img")
    (training / "img").mkdir()
    assert "with img0001.nii.gz …; found none" in told(root, format="btcv")


def test_amos22_by_list(sets: Path) -> None:
    """Fed-MENU's site of AMOS: the training list alone, which `split` may divide."""
    config = {"format": "amos22", "split": {"validation": 1, "test": 1}}
    index = index_of(sets / "amos22", **config, reading={"lists": "training"})
    assert [case.name for case in index.cases] == ["amos_0001", "amos_0002", "amos_0003"]
    assert "3 labelled scans (ct, list training); AMOS22 has 200" in str(index.problems[0])
    assert "its layout lists 2 labelled validation cases" in told(sets / "amos22", **config)
    other = index_of(sets / "amos22", format="amos22", reading={"lists": "validation"})
    assert [case.name for case in other.cases if case.labelled] == ["amos_0004", "amos_0005"]


# ------------------------------------------------------------------------------------------ WORD and AbdomenCT-1K

FOUR = LabelSpace(("background", "kidney", "liver", "spleen", "pancreas"))


@pytest.mark.parametrize(
    ("name", "config", "annotated"),
    [
        ("word", {"reading": {"splits": "seed"}, "aliases": BOTH_KIDNEYS}, {"kidney"}),
        ("abdomenct1k", {}, {"spleen", "pancreas"}),
    ],
)
def test_a_part_is_annotated_and_all_is_scored(
    name: str, config: dict[str, Any], annotated: set[str], sets: Path, tmp_path: Path
) -> None:
    """As UFPS has them: training sees some of the four organs, the test all of them."""
    integers = {
        "word": {"kidney": [3, 4], "liver": [1], "spleen": [2], "pancreas": [8]},
        "abdomenct1k": {"kidney": [2], "liver": [1], "spleen": [3], "pancreas": [4]},
    }[name]
    split = {"validation": 1, "test": 1}
    given = {"format": name, "split": split, "annotated": sorted(annotated), "score_all": True}
    index = index_of(sets / name, **config, **given)
    assert not fatal(index) and set(index.brings) == annotated
    assert not [problem for problem in check_site(index, FOUR) if problem.fatal]
    data = VoxelData(index, FOUR, SOLID, cache=tmp_path)
    (volume,) = data.volumes("test")
    assert {FOUR.names[c] for c in FOUR.foreground if volume.known[c]} == annotated
    assert volume.scored[1:].all()
    folder, file = ("Mask", volume.case) if name == "abdomenct1k" else ("labels*", volume.case)
    (path,) = (sets / name).glob(f"{folder}/{file}.nii.gz")
    own, truth = raw_label(path), volume.truth("original")
    for organ, numbers in integers.items():
        drawn = truth == FOUR.index(organ)
        assert drawn.any() and np.array_equal(drawn, np.isin(own, numbers))


def test_word_by_its_lists_and_by_seed(sets: Path, tmp_path: Path) -> None:
    index = index_of(sets / "word", format="word")
    assert tuple(index.table) == ("background", *WORD_NAMES) and list(index.table.values()) == [*range(17)]
    assert {case.name: (case.split, case.labelled) for case in index.cases} == {
        "word_0001": ("validation", True),
        **{f"word_000{n}": ("train", True) for n in (2, 3, 4)},
        "word_0005": ("test", False),
    }
    assert not fatal(index) and "imagesTr: 3 scans; WORD has 100 there" in str(index.problems[0])
    split = {"validation": 1, "test": 1}
    one = index_of(sets / "word", format="word", reading={"splits": "seed"}, split=split)
    assert sorted(case.split for case in one.cases) == ["test", "train", "train", "validation"]
    assert "its layout lists 1 labelled validation cases" in told(sets / "word", format="word", split=split)
    released = write_word(tmp_path / "release" / "WORD-V0.1.0", test_labels=True).parent
    assert [c.name for c in index_of(released, format="word").cases if c.labelled and c.split == "test"] == [
        "word_0005"
    ]
    seeded = index_of(released, format="word", reading={"splits": "seed"})
    assert "word_0005" not in {c.name for c in seeded.cases if c.labelled}


def test_word_that_is_not_whole(sets: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets / "word", tmp_path / "word"))
    (root / "labelsTr" / "word_0003.nii.gz").unlink()
    (root / "imagesVal" / "word_0001.nii.gz").unlink()
    lone_scan, lone_label = fatal(index_of(root, format="word"))
    assert "imagesTr/word_0003.nii.gz: missing: 1 of 3 scans in its folder have no label map" in lone_scan
    assert "labelsVal/word_0001.nii.gz: missing: 1 of 1 label maps in its folder have no scan" in lone_label
    shutil.copy(root / "imagesTr/word_0002.nii.gz", root / "imagesTs")
    assert "imagesTr/word_0002.nii.gz and imagesTs/word_0002.nii.gz are the same scan twice" in told(
        root, format="word"
    )
    assert "WORD is expected, with imagesTr/word_0002.nii.gz" in told(sets / "kits19", format="word")
    assert "splits" in told(sets / "word", format="word", reading={"splits": "train"})


def test_abdomenct1k_by_size(sets: Path, tmp_path: Path) -> None:
    index = index_of(sets / "abdomenct1k", format="abdomenct1k")
    assert tuple(index.table) == ("background", *ABDOMENCT1K_NAMES)
    assert [case.name for case in index.cases if case.labelled] == [f"Case_0000{n}" for n in range(1, 7)]
    assert [(case.name, case.split) for case in index.cases if not case.labelled] == [("Case_00007", "test")]
    assert not fatal(index) and "6 labelled scans; AbdomenCT-1K has 1000" in str(index.problems[0])
    for count, expected in ((3, [1, 2, 3]), (266, [1, 2, 3, 4, 5, 6])):
        few = index_of(sets / "abdomenct1k", format="abdomenct1k", reading={"smallest": count})
        assert [case.name for case in few.cases if case.labelled] == [f"Case_0000{n}" for n in expected]
    assert "of which reading.smallest asks for 266" in str(few.problems[0])
    flat = tmp_path / "flat"
    (flat / "imagesTr").mkdir(parents=True)
    shutil.copytree(sets / "abdomenct1k" / "Mask", flat / "labels")
    for file in (sets / "abdomenct1k").glob("AbdomenCT*/*"):
        shutil.copy(file, flat / "imagesTr")
    assert [c.name for c in index_of(flat, format="abdomenct1k").cases] == [c.name for c in index.cases]
    (flat / "imagesTr" / "Case_00002_0000.nii.gz").unlink()
    (text,) = fatal(index_of(flat, format="abdomenct1k"))
    assert "labels/Case_00002.nii.gz: missing: 1 of 6 label maps have no scan" in text
    shutil.rmtree(flat / "labels")
    assert "found no label maps, Case_00001.nii.gz" in told(flat, format="abdomenct1k")
    assert "found no scans" in told(sets / "word", format="abdomenct1k")
    assert "smallest" in told(sets / "abdomenct1k", format="abdomenct1k", reading={"smallest": 0})


# ---------------------------------------------------------------------------- a lesion: of its organ, or of nothing

LESIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "lits": ({"format": "lits"}, "liver tumour", "liver"),
    "kits19": ({"format": "kits19"}, "kidney tumour", "kidney"),
    "Task07_Pancreas": ({"format": "msd"}, "cancer", "pancreas"),
}
"""folder -> its layout, its lesion, the organ of that."""


def raw_labels(root: Path) -> dict[str, np.ndarray]:
    """case -> the integers of its label file, for the folders of `LESIONS`."""
    files = [*root.glob("*/segmentation-*.nii"), *root.glob("data/*/segmentation.nii.gz")]
    files += [file for file in root.glob("labelsTr/*.nii.gz") if not file.name.startswith(".")]
    names = {
        file: file.parent.name
        if file.name == "segmentation.nii.gz"
        else file.name.partition(".")[0].replace("segmentation", "volume")
        for file in files
    }
    return {name: raw_label(file) for file, name in names.items()}


@pytest.mark.parametrize("folder", LESIONS)
@pytest.mark.parametrize("exclusive", [True, False], ids=["softmax", "sigmoid"])
def test_a_lesion_is_part_of_its_organ_or_background(
    folder: str, exclusive: bool, sets: Path, tmp_path: Path
) -> None:
    config, lesion, organ = LESIONS[folder]
    organs = ("liver", "kidney", "pancreas")
    space = LabelSpace((*(("background",) if exclusive else ()), *organs), exclusive=exclusive)
    own = raw_labels(sets / folder)
    assert len(own) == 6 and all((voxels == 2).any() for voxels in own.values())
    for target, integers in ((organ, [1, 2]), ("background", [1])):
        index = index_of(sets / folder, **config, split={"test": 2}, aliases={lesion: target})
        assert index.brings == (organ,)
        assert not [p for p in check_federation([index], space) if p.fatal and p.site == "x"]
        data = VoxelData(index, space, SOLID, cache=tmp_path)
        assert data.labels.annotated == {space.index(organ)}
        volumes = list(data.volumes("test"))
        assert len(volumes) == 2
        for volume in volumes:
            # the organ is annotated and nothing is left out: what is not it is known not to be
            assert [c for c in space.foreground if volume.known[c]] == [space.index(organ)]
            truth = volume.truth("original")
            drawn = truth == space.index(organ) if exclusive else truth[space.index(organ)] > 0
            assert np.array_equal(drawn, np.isin(own[volume.case], integers))
            assert drawn.sum() == ((truth > 0).sum())


def test_a_lesion_that_goes_nowhere_is_told_where_it_may(sets: Path, tmp_path: Path) -> None:
    space = LabelSpace(("background", "liver"))
    with pytest.raises(FederationError, match=r"give it an alias \(of an organ, or background\)"):
        VoxelData(index_of(sets / "lits", format="lits"), space, SOLID, cache=tmp_path)
    with pytest.raises(FederationError, match="alias 'tumour' matches none of the site's labels"):
        index = index_of(sets / "lits", format="lits", aliases={"tumour": "background"})
        VoxelData(index, space, SOLID, cache=tmp_path)
