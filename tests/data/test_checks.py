"""What `fedatlas check` finds, and that training refuses the same. Every text names site and file."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from headers import without_orientation

from fedatlas.core.errors import DataError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.checks import Scan, check_federation, check_site, shared_scans, twin_problems
from fedatlas.data.datasets.shared.listing import Problem
from fedatlas.data.index import SiteConfig, SiteIndex, label_space_of, read_site
from fedatlas.data.transforms import Preprocessing
from fedatlas.data.voxels import VoxelData
from fedatlas.phantoms.organs import phantom_sites, write_phantom

SPACE = LabelSpace(("background", "liver", "spleen", "kidney", "tumour"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """site-0 annotates liver (1) and spleen (2); cases p000 to p002, test case p003."""
    return write_phantom(
        tmp_path_factory.mktemp("sound"), sites=2, cases=3, test_cases=1, shape=(16, 16, 12), seed=4
    )


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound / "site-0", tmp_path / "site-0"))


def index_of(root: Path, **config: Any) -> SiteIndex:
    return read_site(SiteConfig(name="north", path=str(root), **config), root.parent)


def check(root: Path, space: LabelSpace = SPACE, **config: Any) -> list[Problem]:
    return check_site(index_of(root, **config), space)


def change(path: Path, how: Callable[[np.ndarray], np.ndarray], affine: np.ndarray | None = None) -> None:
    image: Any = nib.load(path)  # type: ignore[attr-defined]
    voxels = how(np.asarray(image.dataobj).copy())
    nib.save(nib.Nifti1Image(voxels, image.affine if affine is None else affine), path)  # type: ignore[attr-defined]


def put(value: Any, kind: Any = None) -> Callable[[np.ndarray], np.ndarray]:
    def how(voxels: np.ndarray) -> np.ndarray:
        voxels = voxels.astype(kind or voxels.dtype)
        voxels[0, 0, 0] = value
        return voxels

    return how


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


IMAGE, LABEL = "imagesTr/p001_0000.nii.gz", "labelsTr/p001.nii.gz"


def truncate(root: Path) -> None:
    (root / IMAGE).write_bytes((root / IMAGE).read_bytes()[:-400])


def shift(root: Path) -> None:
    affine = nib.load(root / LABEL).affine.copy()  # type: ignore[attr-defined]
    affine[0, 3] += 1
    change(root / LABEL, lambda v: v, affine)


def shear(root: Path) -> None:
    affine = nib.load(root / LABEL).affine.copy()  # type: ignore[attr-defined]
    affine[0, 0] *= 1.01
    change(root / LABEL, lambda v: v, affine)


def leak(root: Path) -> None:
    for folder, ending in (("images", "_0000"), ("labels", "")):
        shutil.copy(
            root / f"{folder}Tr" / f"p001{ending}.nii.gz", root / f"{folder}Ts" / f"p001{ending}.nii.gz"
        )
    change(root / "imagesTs" / "p001_0000.nii.gz", lambda v: v + 1)


def twin(root: Path) -> None:
    for folder, ending in (("images", "_0000"), ("labels", "")):
        shutil.copy(
            root / f"{folder}Tr" / f"p001{ending}.nii.gz", root / f"{folder}Ts" / f"zz{ending}.nii.gz"
        )


def empty(root: Path) -> None:
    for file in [*root.glob("imagesTr/*"), *root.glob("labelsTr/*")]:
        file.unlink()


BROKEN: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no label": (lambda r: (r / LABEL).unlink(), LABEL, "missing: training case 'p001' has no label file"),
    "no image": (lambda r: (r / IMAGE).unlink(), LABEL, "a label without an image"),
    "no channel number": (
        lambda r: (r / IMAGE).rename(r / "imagesTr" / "p001.nii.gz"),
        "imagesTr/p001.nii.gz",
        "an image without a channel number",
    ),
    "another channel": (
        lambda r: (r / IMAGE).rename(r / "imagesTr" / "p001_0001.nii.gz"),
        IMAGE,
        "missing: the channels of a site are 1",
    ),
    "truncated": (truncate, IMAGE, "truncated or damaged"),
    "not an image": (lambda r: (r / LABEL).write_text("x"), LABEL, "not a NIfTI file"),
    "flat": (lambda r: change(r / IMAGE, lambda v: v[..., 0]), IMAGE, "not three-dimensional"),
    "other shape": (
        lambda r: change(r / LABEL, lambda v: v[:-1]),
        LABEL,
        "of shape [15, 16, 10], but p001_0000",
    ),
    "shifted": (shift, LABEL, "its affine differs from that of p001_0000.nii.gz"),
    "other spacing": (shear, LABEL, "its affine differs"),
    "channels": (
        lambda r: change(r / IMAGE, lambda v: np.stack([v, v], -1)),
        IMAGE,
        "2 channels, but site north has 1",
    ),
    "nan": (lambda r: change(r / IMAGE, put(np.nan, np.float32)), IMAGE, "1 voxels that are NaN or infinite"),
    "inf": (lambda r: change(r / IMAGE, put(-np.inf, np.float32)), IMAGE, "NaN or infinite"),
    "unknown integer": (
        lambda r: change(r / LABEL, put(9)),
        LABEL,
        "holds the label integer 9, which is not in the table (0=background, 1=liver, 2=spleen)",
    ),
    "negative integer": (lambda r: change(r / LABEL, put(-3, np.int16)), LABEL, "holds the label integer -3"),
    "half a label": (lambda r: change(r / LABEL, put(0.5, np.float32)), LABEL, "holds 0.5 in 1 voxels"),
    "nan label": (lambda r: change(r / LABEL, put(np.nan, np.float32)), LABEL, "holds nan in 1 voxels"),
    "patient in both": (leak, "imagesTs/p001_0000.nii.gz", "patient 'p001' is in the train cases"),
    "scan in both": (twin, "imagesTs/zz_0000.nii.gz", "is, value by value, that of"),
    "empty": (empty, "", "holds no training case"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_named_and_stops_training(what: str, root: Path, tmp_path: Path) -> None:
    assert not [problem for problem in check(root) if problem.fatal], "sound before"
    damage, file, told = BROKEN[what]
    damage(root)
    fatal = [problem for problem in check(root) if problem.fatal]
    text = str(fatal[0])
    assert len(fatal) == 1 and text.startswith("site north") and file in text and told in text
    assert fatal[0].remedy and fatal[0].remedy in text
    data = VoxelData(index_of(root), SPACE, Preprocessing(), cache=tmp_path / "cache")
    with pytest.raises(DataError) as error:
        data.prepare()
    assert str(error.value) == text, "training says what check says"
    with pytest.raises(DataError):
        list(data.batches((0,), batch=1, steps=1))


def test_a_folder_without_folders_of_images_is_told_which_it_lacks(root: Path) -> None:
    for folder in [folder for folder in root.iterdir() if folder.is_dir()]:
        shutil.rmtree(folder)
    note, error = sorted(check(root), key=lambda problem: problem.fatal)
    assert "imagesTr: no such folder, and no imagesTs; put the images of training cases there" in str(note)
    assert error.fatal and "holds no training case" in str(error)


def test_several_problems_are_counted(root: Path, tmp_path: Path) -> None:
    for name in ("p000", "p001"):
        (root / "labelsTr" / f"{name}.nii.gz").unlink()
    with pytest.raises(DataError, match=r"p000.*\(1 more"):
        VoxelData(index_of(root), SPACE, Preprocessing(), cache=tmp_path).prepare()


def test_names_outside_the_space(root: Path) -> None:
    small = LabelSpace(("background", "liver"))
    (problem,) = check(root, small)
    assert problem.fatal and "site north: label 'spleen' is not in the label space" in str(problem)
    assert not check(root, small, annotated=("liver",)), "what does not count need not be known"
    (problem,) = check(root, aliases={"Leber": "liver"})
    assert problem.fatal and "alias 'Leber' matches none" in str(problem)
    (problem,) = check(root, aliases={"liver": "lever"})
    assert problem.fatal and "points to 'lever'" in str(problem)


def test_what_is_odd_but_usable_is_a_note(root: Path) -> None:
    for file in root.glob("labelsTr/*"):
        change(file, lambda v: np.where(v == 2, 0, v))
    (note,) = check(root)
    assert not note.fatal and "'spleen' counts as annotated in 3 cases and has no voxel in any" in str(note)
    edit(root / "dataset.json", annotated={f"p00{n}": ["spleen"] for n in range(4)})
    strayed = [note for note in check(root) if "holds liver" in note.what]
    assert len(strayed) == 4 and not any(note.fatal for note in strayed)


def test_a_class_of_the_table_that_no_training_case_annotates_is_a_note(root: Path) -> None:
    edit(
        root / "dataset.json",
        annotated={"p000": ["spleen"], "p001": ["spleen"], "p002": [], "p003": ["liver"]},
    )
    (note,) = [note for note in check(root) if "training cases" in note.what]
    assert not note.fatal and note.what == "'liver' is annotated in none of its 3 training cases"
    assert note.remedy.startswith(
        'list it in "annotated" of the cases in which it is complete, or leave it out'
    )
    assert not [note for note in check(root, annotated=("spleen",)) if "training cases" in note.what]
    edit(root / "dataset.json", annotated={f"p00{n}": [["liver", "spleen"][n % 2]] for n in range(4)})
    (note,) = [note for note in check(root, aliases={"spleen": "liver"}) if "made of" in note.what]
    assert (
        "'liver' is annotated in none of its 3 training cases: it is made of 'liver', 'spleen'" in note.what
    )
    assert note.remedy.startswith('list them all in "annotated" of the cases in which they are complete')


def test_a_scan_without_orientation_is_a_note(root: Path) -> None:
    for name in (IMAGE, LABEL):
        without_orientation(root / name, root / name)
    (note,) = check(root)
    assert not note.fatal and "neither qform nor sform" in str(note) and IMAGE in str(note)


def test_scans_without_orientation_are_one_note(root: Path) -> None:
    for file in [*root.glob("images*/*"), *root.glob("labels*/*")]:
        without_orientation(file, file)
    (note,) = check(root)
    count = len([*root.glob("images*/*")])
    assert count > 1 and f"left and right are a guess; {count} such files" in str(note)


def test_a_scan_in_metres_is_read_so_and_told(root: Path) -> None:
    """Its label is in mm, and lies on it; without its unit it does not."""
    source: Any = nib.load(root / IMAGE)  # type: ignore[attr-defined]
    image = nib.Nifti1Image(np.asarray(source.dataobj), np.diag([1e-3, 1e-3, 1e-3, 1]) @ source.affine)  # type: ignore[attr-defined]
    image.header.set_xyzt_units("meter")
    nib.save(image, root / IMAGE)  # type: ignore[attr-defined]
    (note,) = check(root)
    assert not note.fatal and "its header says that it is in metres, and so it was read" in str(note)
    image.header.set_xyzt_units("mm")
    nib.save(image, root / IMAGE)  # type: ignore[attr-defined]
    (error,) = check(root)
    assert error.fatal and "its affine differs" in str(error)


def test_two_copies_of_a_scan_in_training_are_a_note(root: Path) -> None:
    for folder, ending in (("imagesTr", "_0000"), ("labelsTr", "")):
        shutil.copy(root / folder / f"p001{ending}.nii.gz", root / folder / f"zz{ending}.nii.gz")
    edit(root / "dataset.json", numTraining=4)
    (note,) = check(root)
    assert not note.fatal and "value by value" in str(note)


def test_progress_is_told(root: Path) -> None:
    lines: list[str] = []
    check_site(index_of(root), SPACE, progress=lines.append)
    assert lines[0] == "case p000 (1 of 4)" and len(lines) == 4


def test_between_sites(sound: Path) -> None:
    def indexes(**second: Any) -> list[SiteIndex]:
        configs = phantom_sites(sound)
        configs[1] |= second
        return [read_site(SiteConfig(**config), sound) for config in configs]

    one, two = indexes()
    space = label_space_of([one.brings, two.brings])
    assert space.names == ("background", "liver", "spleen", "kidney") and not check_federation(
        [one, two], space
    )
    (nobody,) = check_federation([one, two], SPACE)
    assert nobody.fatal and "no site annotates 'tumour'" in str(nobody)
    (same,) = check_federation(indexes(name="s0"), space)
    assert same.fatal and "site s0: two sites have this name" in str(same)
    crossed = indexes(aliases={"spleen": "kidney", "kidney": "spleen"})
    (conflict,) = check_federation(crossed, space)
    assert conflict.fatal and "label 'spleen' means 'kidney' here and 'spleen' at site s0" in str(conflict)
    shared = check_federation(
        indexes(path=str(sound / "site-0")), LabelSpace(("background", "liver", "spleen"))
    )
    assert [p.fatal for p in shared] == [False] and "patient 'p000' is also at site s0 (4 such names)" in str(
        shared[0]
    )
    wider = SiteIndex(**{**two.__dict__, "channels": 2})
    (channels,) = check_federation([one, wider], space)
    assert channels.fatal and "2 image channels, but site s0 has 1" in str(channels)


def test_channels_in_another_order_are_refused_and_other_names_are_a_note(sound: Path) -> None:
    one, two = (read_site(SiteConfig(**config), sound) for config in phantom_sites(sound))
    space = label_space_of([one.brings, two.brings])

    def said(*names: tuple[str, ...]) -> list[Problem]:
        sites = zip((one, two), names, strict=True)
        return check_federation(
            [replace(index, channels=2, channel_names=own) for index, own in sites], space
        )

    (order,) = said(("T1", "T2 w"), ("t2-w", "T1"))
    assert order.fatal and "its channels are t2-w, T1, and those of site s0 are T1, T2 w" in str(order)
    (others,) = said(("T1", "T2"), ("T1", "FLAIR"))
    assert not others.fatal and "T1, FLAIR" in str(others)
    assert (
        not said(("T1", "T2_w"), ("t1", "T2 W"))
        and not said(("T1", "T2"), ())
        and not said(("T1", ""), ("T2", "T1"))
    )


def test_a_site_that_trains_on_an_organ_and_not_on_its_lesion_is_told(sound: Path) -> None:
    """Its outlines may hold lesions, which training takes for organ."""

    def said(exclusive: bool = True, **config: Any) -> list[str]:
        index = read_site(SiteConfig(name="site-0", path=str(sound / "site-0"), **config), sound)
        names = SPACE.names if exclusive else SPACE.names[1:]
        space = LabelSpace(names, ((names.index("liver"), names.index("tumour")),), exclusive=exclusive)
        return [str(found) for found in check_federation([index], space) if "without a lesion" in str(found)]

    [told] = said()
    assert "annotates 'liver' and not 'tumour'" in told and "`whole: true`" in told
    assert not said(role="test") and not said(aliases={"spleen": "tumour"}) and not said(exclusive=False)


def test_scans_shared_by_sites(sound: Path) -> None:
    def scan(site: str, case: str, split: str, mark: str) -> Scan:
        return Scan(site, case, split, f"{split}/{case}", mark)

    for seen in ("train", "validation"):
        for order in (1, -1):
            pair = [scan("a", "x", seen, "1"), scan("b", "y", "test", "1"), scan("a", "z", "test", "2")]
            (problem,) = shared_scans(pair[::order])
            assert problem.fatal and str(problem).startswith("site b: test/y: the image of test case 'y'")
            assert f"that of {seen} case 'x' of site a" in str(problem)
    same_site = [scan("a", "x", "train", "1"), scan("a", "y", "test", "1"), scan("b", "y", "test", "2")]
    assert not shared_scans(same_site), "these are for twin_problems"
    many = [scan(site, f"p{n}", "test", str(n)) for site in "ab" for n in range(4)]
    (note,) = shared_scans(many)
    assert not note.fatal and "of site a (4 such scans)" in str(note)

    read: list[Scan] = []
    index = index_of(sound / "site-0")
    check_site(index, SPACE, scans=read)
    assert [(s.site, s.case, s.split) for s in read] == [("north", c.name, c.split) for c in index.cases]
    assert len({s.digest for s in read}) == len(read) == 4


def test_a_run_refuses_a_test_scan_that_another_site_trains_on(small, tmp_path) -> None:
    from fedatlas.federation.file import parse_federation
    from fedatlas.federation.session import run_federation

    places = []
    for site in small["sites"][:2]:
        copy = tmp_path / site["name"]
        shutil.copytree(site["path"], copy)
        places.append(copy)
    trained = sorted((places[0] / "imagesTr").glob("*.nii.gz"))[0]
    tested = sorted((places[1] / "imagesTs").glob("*.nii.gz"))[0]
    shutil.copy(trained, tested)
    image: Any = nib.load(trained)
    empty = nib.Nifti1Image(np.zeros(image.shape, np.uint8), image.affine)
    for folder in ("labelsTs", "labelsTs_all"):
        nib.save(empty, places[1] / folder / tested.name.replace("_0000", ""))
    small["sites"] = [site | {"path": str(tmp_path / site["name"])} for site in small["sites"][:2]]
    small["labels"] = {}
    with pytest.raises(DataError, match="s1.*test case .* is, value by value, that of .* of site s0"):
        run_federation(parse_federation(small, base=tmp_path), tmp_path / "run", tell=lambda text: None)


def test_a_scan_in_training_and_validation_is_a_note_and_in_the_test_an_error() -> None:
    told = {}
    for split in ("train", "validation", "test"):
        (found,) = twin_problems("s", [("a", "train", "a.nii", "digest"), ("b", split, "b.nii", "digest")])
        told[split] = found.fatal
    assert told == {"train": False, "validation": False, "test": True}
