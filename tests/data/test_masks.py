"""Pictures with a mask per class: the layout, mask files, the grid of a given size, patches, overlays, predictions."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fake_sets import anatomy, picture, write_dicom, write_masks
from PIL import Image

from fedatlas.cli import main
from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.checks import check_site
from fedatlas.data.formats.flat import join, lying, one_side, read_flat, read_mask, standing, write_labels
from fedatlas.data.index import SiteConfig, SiteIndex, naming_of, read_site
from fedatlas.data.reading import Raw, read_case
from fedatlas.data.transforms import (
    FileError,
    Preprocessing,
    geometry_of,
    image_to_grid,
    labels_to_grid,
    restore,
)
from fedatlas.data.voxels import VoxelData
from fedatlas.evaluation.pictures import planes
from fedatlas.federation.predict import load_picture, predict_scans
from fedatlas.federation.tasks import task_of
from fedatlas.federation.trained import Trained, evaluate_folder
from fedatlas.learning.augment import OFF
from fedatlas.learning.inference import Nets, predict_each

SPACE = LabelSpace(("left_lung", "right_lung", "heart"), exclusive=False)
SOFT = LabelSpace(("background", "left_lung", "right_lung", "heart"))


def index_of(root: Path, **config: Any) -> SiteIndex:
    return read_site(SiteConfig(name="s", path=str(root), format="masks", **config), root)


def raw_of(index: SiteIndex, place: int = 0, space: LabelSpace = SPACE, **more: Any) -> Raw:
    return read_case(index, index.cases[place], space, naming_of(index, space), **more)


def fatal(index: SiteIndex, space: LabelSpace = SPACE) -> list[str]:
    return [str(p) for p in check_site(index, space) if p.fatal]


def notes(index: SiteIndex, space: LabelSpace = SPACE) -> str:
    return "\n".join(str(p) for p in check_site(index, space) if not p.fatal)


# ----------------------------------------------------------------------------------------------- the layout


def test_the_layout_and_its_masks(tmp_path: Path) -> None:
    """A class without a file for a picture is not annotated there; with `absent` it is absent."""
    write_masks(tmp_path, 3, shape=(24, 32))
    (tmp_path / "masks" / "left_lung" / "cxr_001.png").unlink()
    index = index_of(tmp_path)
    assert index.names == ("background", "left_lung", "right_lung") and index.channels == 1
    assert [case.annotated for case in index.cases][:2] == [("left_lung", "right_lung"), ("right_lung",)]
    raw = raw_of(index)
    image, masks = anatomy(0, (24, 32))
    assert raw.image is not None and raw.label is not None and raw.problems == []
    assert np.allclose(lying(raw.image)[0], image / 255, atol=1e-6)
    assert raw.label.voxels.shape == (3, 32, 24, 1) and raw.label.known == {0, 1}
    assert np.array_equal(lying(raw.label.voxels)[0] > 0, masks["left lung"])
    assert raw.label.counts == {0: masks["left lung"].sum(), 1: masks["right lung"].sum()}
    assert raw_of(index, 1).label.known == {1}  # type: ignore[union-attr]
    assert notes(index_of(tmp_path, role="test")) == ""
    label = raw_of(index_of(tmp_path, reading={"absent": True}), 1).label
    assert label is not None and label.known == {0, 1} and label.counts[0] == 0
    assert fatal(index) == [] and notes(index) == ""


def test_options_name_folders_suffixes_and_test_cases(tmp_path: Path) -> None:
    for number in range(3):
        image, masks = anatomy(number)
        picture(tmp_path / ("pics", "pics", "hidden")[number] / f"p{number}_img.png", image)
        picture(tmp_path / "truth" / "LL" / f"p{number}_mask.bmp", masks["left lung"])
    reading = {
        "images": "pics",
        "masks": "truth",
        "classes": {"left_lung": "LL"},
        "image_suffix": "_img",
        "mask_suffix": "_mask",
        "test": "hidden",
        "pixel": [0.5, 0.25],
    }
    index = index_of(tmp_path, reading=reading)
    assert [(case.name, case.split) for case in index.cases] == [
        ("p0", "train"),
        ("p1", "train"),
        ("p2", "test"),
    ]
    raw = raw_of(index)
    assert np.array_equal(lying(raw.label.voxels)[0] > 0, anatomy(0)[1]["left lung"])  # type: ignore[union-attr]
    assert np.allclose(np.diag(raw.affine), [0.25, 0.5, 1, 1])
    index = index_of(tmp_path, reading=reading | {"test": ["p1"]})
    assert [case.split for case in index.cases] == ["train", "test"]
    for wrong, text in (
        ({"test": ["p9"]}, "test names the case 'p9', which has no picture in pics"),
        ({"images": "gone"}, r"no such folder; .* holds the folders: hidden, pics, truth"),
        ({"masks": "gone", "classes": {}}, r"expected gone/<class>/<case>\.png"),
        ({"classes": {"background": "LL"}}, "'background' is no class with a mask"),
        ({"test": "pics"}, "the case is in pics, too"),
    ):
        with pytest.raises(DataError, match=text):
            index_of(tmp_path, reading=reading | wrong)
    with pytest.raises(FederationError, match="did you mean 'image_suffix'"):
        index_of(tmp_path, reading={"imagesuffix": ""})


def test_findings_of_a_table(tmp_path: Path) -> None:
    """A site may have findings alone; an empty cell is not annotated."""
    for number in range(3):
        picture(tmp_path / "images" / f"p{number}.png", anatomy(number)[0])
    table = tmp_path / "findings.csv"
    table.write_text("case,effusion,nodule\np0,1.0,False\np1,,true\n")
    index = index_of(tmp_path, reading={"findings": "findings.csv"})
    assert index.findings == ("effusion", "nodule") and index.names == ("background",)
    assert [case.findings for case in index.cases] == [
        (("effusion", True), ("nodule", False)),
        (("nodule", True),),
        (),
    ]
    assert "p2.png: a picture with neither mask nor finding" in "\n".join(map(str, index.problems))
    table.write_text("case,effusion\np0,2\np9,1\np1,0\np1,1\n")
    told = [str(p) for p in index_of(tmp_path, reading={"findings": "findings.csv"}).problems if p.fatal]
    assert [line.split("; ")[0] for line in told] == [
        "site s: findings.csv, line 2: column 'effusion' holds '2'",
        "site s: findings.csv, line 3: names the case 'p9', which has no picture in images",
        "site s: findings.csv, line 5: names the case 'p1' a second time",
    ]


def test_findings_alone_can_be_split_and_tested(tmp_path: Path) -> None:
    for number in range(10):
        picture(tmp_path / "images" / f"p{number}.png", anatomy(number)[0])
    reading = {"findings": "findings.csv"}
    with pytest.raises(
        DataError, match="no such file; it holds the findings, name it with `reading.findings`"
    ):
        index_of(tmp_path, reading=reading)
    (tmp_path / "findings.csv").write_text("case,ill\n" + "".join(f"p{n},{n % 2}\n" for n in range(9)))
    index = index_of(tmp_path, reading=reading, split={"test": 2, "validation": 0.3}, cases=3)
    splits = [case.split for case in index.cases if case.findings]
    assert (splits.count("test"), splits.count("validation"), splits.count("train")) == (2, 3, 4)
    tested = index_of(tmp_path, reading=reading, role="test")
    assert len(tested.cases) == 9 and {case.split for case in tested.cases} == {"test"}
    space = LabelSpace(SPACE.names, exclusive=False, findings=("sick",), finding_of=(None,))
    with pytest.raises(
        FederationError, match=r"none of its labels \(background, ill\) is in the label space"
    ):
        naming_of(tested, space)
    (line,) = fatal(index_of(tmp_path, reading=reading), space)
    assert "none of its 10 training cases has an annotated class or a finding: it tells ill, and" in line
    with pytest.raises(DataError, match="`labels.findings` names sick; give `aliases`"):
        VoxelData(index_of(tmp_path, reading=reading), space, Preprocessing(), cache=tmp_path / "c").prepare()
    assert fatal(index_of(tmp_path, reading=reading, aliases={"ill": "sick"}), space) == []


def test_annotated_restricts_findings_where_it_names_one(tmp_path: Path) -> None:
    """`score_all` scores those that it leaves out in test cases; training and validation never see them."""
    root = write_masks(tmp_path / "s", 6)
    (root / "findings.csv").write_text(
        "case,ill,old\n" + "".join(f"cxr_{n:03d},{n % 2},1\n" for n in range(6))
    )
    space = LabelSpace(SPACE.names, exclusive=False, findings=("sick", "old"), finding_of=(None, None))
    form = Preprocessing(size=(16, 16), patch=(16, 16), context=0)

    def known(*annotated: str, **more: Any) -> dict[str, list[list[bool]]]:
        index = index_of(
            root,
            annotated=annotated,
            reading={"findings": "findings.csv"},
            aliases={"ill": "sick"},
            split={"test": 1, "validation": 1},
            **more,
        )
        data = VoxelData(index, space, form, augmentation=OFF, cache=tmp_path / "cache")
        (test,), (validation,) = data.volumes("test"), data.volumes("validation")
        assert not test.finding_scored[1] or test.finding[1] == 1
        rows = [test.finding_known, test.finding_scored, validation.finding_scored]
        return [row.tolist() for row in rows]  # type: ignore[return-value]

    assert known("left_lung") == [[True, True]] * 3
    assert known("left_lung", "ill") == known("left_lung", "sick") == [[True, False]] * 3
    assert known("left_lung", "ill", score_all=True) == [[True, False], [True, True], [True, False]]


def test_pictures_in_a_folder_without_a_table_are_named(tmp_path: Path) -> None:
    write_masks(tmp_path, 2)
    with pytest.raises(DataError, match=r"no dataset.json.*as images/cxr_000\.png; set `format: masks`"):
        read_site(SiteConfig(name="s", path=str(tmp_path)), tmp_path)


def test_files_that_do_not_belong(tmp_path: Path) -> None:
    write_masks(tmp_path, 2)
    picture(tmp_path / "masks" / "left_lung" / "other.png", np.zeros((4, 4), bool))
    picture(tmp_path / "images" / "cxr_000.bmp", anatomy(0)[0])
    (tmp_path / "images" / "notes.txt").write_text("x")
    told = "\n".join(map(str, index_of(tmp_path).problems))
    assert "masks/left_lung/other.png: a mask without a picture" in told
    assert "cxr_000.png: case 'cxr_000' also has the file cxr_000.bmp" in told
    assert "notes.txt: not named <case>.png" in told


# ------------------------------------------------------------------------------------------------ mask files


def test_what_is_inside_a_mask(tmp_path: Path) -> None:
    """Any value beside 0; of several values, those above half of what the bits can hold."""
    edge = np.array([[0, 0, 200, 255], [0, 90, 130, 255]], np.uint8)
    mask, told = read_mask(picture(tmp_path / "a.png", edge))
    assert mask.tolist() == [[False, False, True, True], [False, False, True, True]]
    assert "more than two values" in told[0].what and told[0].share == pytest.approx(3 / 8)
    for values in (np.array([[0, 1]], np.uint8), np.array([[0, 255]], np.uint8), np.array([[False, True]])):
        mask, told = read_mask(picture(tmp_path / "b.png", values))
        assert mask.tolist() == [[False, True]] and told == []
    Image.fromarray(np.array([[0, 40000]], np.uint16)).save(tmp_path / "c.png")
    assert read_mask(tmp_path / "c.png")[0].tolist() == [[False, True]]
    paletted = Image.fromarray(np.array([[0, 1]], np.uint8), mode="P")
    paletted.putpalette([0, 0, 0, 255, 0, 0])
    paletted.save(tmp_path / "d.png")
    assert read_mask(tmp_path / "d.png")[0].tolist() == [[False, True]]
    assert "an empty mask" in read_mask(picture(tmp_path / "e.png", np.zeros((2, 2), bool)))[1][0].what
    assert "covers the whole" in read_mask(picture(tmp_path / "f.png", np.ones((2, 2), bool)))[1][0].what


@pytest.mark.parametrize("ending", ["png", "jpg", "tif"])
def test_a_mask_is_turned_as_its_picture_is(tmp_path: Path, ending: str) -> None:
    corner = np.zeros((16, 16), np.uint8)
    corner[:8, :8] = 255
    exif = Image.Exif()
    exif[0x0112] = 3
    file = tmp_path / f"a.{ending}"
    Image.fromarray(corner).save(file, exif=exif)
    seen = lying(read_flat([file]).image)[0] > 0.5
    assert seen[8:, 8:].all() and not seen[:8].any()
    assert np.array_equal(read_mask(file)[0], seen)


def test_a_mask_file_of_a_picture_that_is_turned_upright_is_a_note(tmp_path: Path) -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    corner = np.zeros((8, 8), bool)
    corner[:2, :2] = True
    picture(tmp_path / "masks" / "heart" / "a.png", corner)
    for towards, said in ((["R", "F"], True), (["L", "F"], False)):
        write_dicom(tmp_path / "images" / "a.dcm", grey, PatientOrientation=towards)
        told = "turns upright (R\\F); the mask is taken as upright already"
        assert (told in notes(index_of(tmp_path))) is said


def test_two_folders_of_one_class_that_is_known_nowhere_are_told(tmp_path: Path) -> None:
    for name, folder in (("a", "heart"), ("b", "Herz")):
        picture(tmp_path / f"images/{name}.png", anatomy(0)[0])
        picture(tmp_path / f"masks/{folder}/{name}.png", anatomy(0)[1]["heart"])
        picture(tmp_path / f"masks/left_lung/{name}.png", anatomy(0)[1]["left lung"])
    index = index_of(tmp_path, aliases={"Herz": "heart"})
    told = notes(index)
    assert "'heart' is annotated in none of its 2 training cases: it is made of 'Herz', 'heart'" in told
    assert "if they are one structure, keep its masks in one folder" in told and '"annotated"' not in told
    assert "annotated in none" not in notes(
        index_of(tmp_path, reading={"absent": True}, aliases={"Herz": "heart"})
    )


def test_masks_that_cannot_be_meant(tmp_path: Path) -> None:
    for values, text in (
        ([[0, 1, 2]], "the values 0, 1, 2, none above half of 255: it looks like a label map"),
        ([[7, 255]], "the values 7 and 255, without 0"),
    ):
        with pytest.raises(FileError, match=text):
            read_mask(picture(tmp_path / "a.png", np.array(values, np.uint8)))
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(FileError, match="no mask: neither PNG, JPEG, TIFF, BMP nor GIF"):
        read_mask(tmp_path / "b.png")
    whole = picture(tmp_path / "c.png", anatomy(0)[0]).read_bytes()
    (tmp_path / "d.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"d\.png: truncated or damaged"):
        read_mask(tmp_path / "d.png")
    with pytest.raises(FileError, match="no such mask"):
        read_mask(tmp_path / "e.png")
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "f.tif")
    with pytest.raises(FileError, match="colour mode F"):
        read_mask(tmp_path / "f.tif")
    frames = [Image.fromarray(np.full((2, 2), v, np.uint8)) for v in (0, 255)]
    frames[0].save(tmp_path / "g.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(FileError, match="a mask of 2 frames"):
        read_mask(tmp_path / "g.gif")


def test_a_mask_of_another_resolution(tmp_path: Path) -> None:
    """Of the same aspect it is taken by nearest neighbour; of another it is refused, and every bad file is listed."""
    write_masks(tmp_path, 2, shape=(24, 32))
    mask = anatomy(0, (24, 32))[1]["left lung"]
    picture(tmp_path / "masks" / "left_lung" / "cxr_000.png", mask[::2, ::2])
    assert "a mask of another size than its picture, and of the same aspect: resized" in notes(
        index_of(tmp_path)
    )
    label = raw_of(index_of(tmp_path)).label
    assert label is not None
    assert np.array_equal(lying(label.voxels)[0], np.kron(mask[::2, ::2], np.ones((2, 2))))
    picture(tmp_path / "masks" / "left_lung" / "cxr_000.png", mask[:, :24])
    (tmp_path / "images" / "cxr_001.png").write_bytes(b"x")
    told = fatal(index_of(tmp_path))
    assert any("a mask of 24×24 pixels for a picture of 24×32" in line for line in told)
    assert any("images/cxr_001.png: neither PNG, JPEG, TIFF, BMP, GIF nor DICOM" in line for line in told)
    assert len(told) == 2


def test_smoothed_and_empty_masks_are_one_note_each(tmp_path: Path) -> None:
    write_masks(tmp_path, 3)
    for number in range(3):
        picture(tmp_path / "masks" / "left_lung" / f"cxr_{number:03d}.png", np.zeros((32, 32), bool))
    smooth = anatomy(0)[1]["right lung"].astype(np.uint8) * 255
    smooth[16, :2] = 60
    picture(tmp_path / "masks" / "right_lung" / "cxr_000.png", smooth)
    told = notes(index_of(tmp_path))
    assert "masks/left_lung/cxr_000.png: an empty mask: the class counts" in told and "3 such files" in told
    assert "masks/right_lung/cxr_000.png: a mask of more than two values" in told and "(up to 0.2 %)" in told
    assert told.count("an empty mask") == 1


def test_areas_of_several_greys_are_named(tmp_path: Path) -> None:
    """0, 100 and 200 may be three classes; the few values between 0 and 255 of a smoothed edge are none."""
    values = np.zeros((20, 20), np.uint8)
    values[:6], values[10:16] = 100, 200
    mask, (note,) = read_mask(picture(tmp_path / "a.png", values))
    assert mask.sum() == 120 and "200 counts as inside, 100 as outside" in note.what
    values[values > 0] = 255
    values[6, :4] = 90
    (note,) = read_mask(picture(tmp_path / "b.png", values))[1]
    assert "as smoothed edges or JPEG make them" in note.what


def test_a_table_that_contradicts_a_mask_is_a_note_and_wins(tmp_path: Path) -> None:
    root = write_masks(tmp_path / "s", 4)
    picture(root / "masks" / "left_lung" / "cxr_003.png", np.zeros((32, 32), bool))
    told = "\n".join(f"cxr_{n:03d},{int(n != 1)}" for n in range(4))
    (root / "findings.csv").write_text(f"case,has lung\n{told}\n")
    space = LabelSpace(SPACE.names, exclusive=False, findings=("has lung",), finding_of=(0,))
    index = index_of(root, reading={"findings": "findings.csv"}, role="test")
    text = notes(index, space)
    assert "cxr_001.png: the finding 'has lung' is absent, and 'left_lung' has voxels there" in text
    assert "cxr_003.png: the finding 'has lung' is present, and 'left_lung' has no voxel there" in text
    assert text.count("the finding 'has") == 2
    form = Preprocessing(size=(16, 16), patch=(16, 16), context=0)
    data = VoxelData(index, space, form, augmentation=OFF, cache=tmp_path / "cache")
    assert [v.finding.tolist() for v in data.volumes("test")] == [[1], [0], [1], [1]]


def test_constant_pictures_are_refused(tmp_path: Path) -> None:
    root = write_masks(tmp_path / "s", 3)
    with pytest.raises(
        DataError, match=r"images/cxr_000\.png: constant on .* after clipping to the window \[2\.0, 3\.0\]"
    ):
        site(root, tmp_path / "cache", window=(2, 3)).prepare()
    picture(root / "images" / "cxr_001.png", np.full((32, 32), 51, np.uint8))
    assert [
        line for line in fatal(index_of(root)) if "images/cxr_001.png: constant: every value is 0.2" in line
    ]
    with pytest.raises(DataError, match=r"cxr_001\.png: constant"):
        site(root, tmp_path / "cache").prepare()


def test_both_lungs_in_one_mask() -> None:
    mask = np.zeros((20, 30), dtype=bool)
    mask[4:16, 2:10] = mask[2:18, 18:28] = mask[18, 12] = True
    left, right = (one_side(mask, side, Path("m.png")) for side in ("left", "right"))
    assert np.array_equal(left | right, mask) and not (left & right).any()
    assert left[:, 18:].any() and not left[:, :18].any() and right[18, 12]
    assert not one_side(0 * mask, "left", Path("m.png")).any()


# ------------------------------------------------------------------------------------------- exclusive classes


def test_a_cached_case_is_refused_as_one_that_is_read(tmp_path: Path) -> None:
    root = write_masks(tmp_path / "s", 2)
    shutil.copytree(root / "masks" / "left_lung", root / "masks" / "heart")
    how = Preprocessing(size=(32, 32), patch=(16, 16), context=0)
    names = ("background", "left_lung", "right_lung", "heart")

    def prepared(*groups: tuple[int, ...]) -> set[str]:
        data = VoxelData(index_of(root), LabelSpace(names, groups), how, validation=0, cache=tmp_path / "c")
        data.prepare()
        return {folder.name for folder in (tmp_path / "c" / "s").iterdir()}

    assert prepared((1, 3)) == prepared((3, 1))
    with pytest.raises(DataError, match="lies in the other, though classes are exclusive"):
        prepared()


def test_overlap_where_classes_are_exclusive() -> None:
    """A lesion, else the later class, takes common pixels; within a group that is no news, beyond it up to 5 % of the smaller."""
    whole = np.zeros((20, 20), dtype=bool)
    organ, lesion, other = whole.copy(), whole.copy(), whole.copy()
    organ[:10], lesion[2:5, 2:5], other[10:] = True, True, True
    space = LabelSpace(("background", "organ", "lesion", "other"), ((1, 2),))
    voxels, counts, told = join({1: organ, 2: lesion, 3: other}, space, (20, 20), Path("x.png"))
    assert told == [] and counts == {1: 191, 2: 9, 3: 200} and voxels[3, 3] == 2
    first = LabelSpace(("background", "lesion", "organ", "other"), ((2, 1),))
    voxels, counts, told = join({1: lesion, 2: organ, 3: other}, first, (20, 20), Path("x.png"))
    assert told == [] and counts == {1: 9, 2: 191, 3: 200} and voxels[3, 3] == 1, (
        "names may stand in any order"
    )
    other[9, :5] = True
    voxels, _, told = join({1: organ, 3: other}, space, (20, 20), Path("x.png"))
    assert voxels[9, 0] == 3 and told[0].share == pytest.approx(5 / 200) and "overlap" in told[0].what
    other[9] = True
    with pytest.raises(FileError, match="10 % of the smaller of 'organ' and 'other' lies in the other"):
        join({1: organ, 3: other}, space, (20, 20), Path("x.png"))
    loose = LabelSpace(("organ", "other"), exclusive=False)
    assert join({0: organ, 1: other}, loose, (20, 20), Path("x.png"))[1] == {0: 200, 1: 220}


# ------------------------------------------------------------------------------------ the federation's grid


def test_size_resizes_pictures_of_every_shape() -> None:
    form = Preprocessing(size=(16, 12), patch=(12, 16), context=0)
    for shape in ((32, 32), (40, 24), (10, 10)):
        affine = np.diag([0.5, 0.5, 1, 1])
        geometry = geometry_of((shape[1], shape[0], 1), affine, form)
        assert geometry.grid_shape == (12, 16, 1)
        assert geometry.grid_spacing == pytest.approx((shape[1] * 0.5 / 12, shape[0] * 0.5 / 16, 1))
        image, masks = anatomy(3, shape)
        grid = image_to_grid(standing(image[None] / 255.0), geometry, form)
        assert grid.shape == (1, 12, 16, 1)
        labels = labels_to_grid(
            standing(np.stack([masks["left lung"]] * 3).astype(np.uint8)), geometry, SPACE
        )
        back = restore(torch.from_numpy(labels.astype(np.float32)), geometry, False)
        assert back.shape == (3, shape[1], shape[0], 1)
        found, truth = lying(back)[0] > 0, masks["left lung"]
        assert 2 * (found & truth).sum() / (found.sum() + truth.sum()) > 0.8
    turned = geometry_of((24, 40, 1), np.eye(4), Preprocessing(size=(16, 12), orientation="ALS", context=0))
    assert turned.grid_shape == (16, 12, 1)
    with pytest.raises(FederationError, match="size is .* and spacing .*; give one of them"):
        Preprocessing(size=(16, 16), spacing=(1, 1, None))
    with pytest.raises(FederationError, match="rows and columns are 1 or more"):
        Preprocessing(size=(0, 16))
    with pytest.raises(FederationError, match="have no neighbouring slices; set context: 0"):
        Preprocessing(size=(16, 16))


def site(root: Path, cache: Path, space: LabelSpace = SPACE, **form: Any) -> VoxelData:
    chosen = {"size": (32, 32), "patch": (32, 32), "context": 0} | form
    return VoxelData(
        index_of(root), space, Preprocessing(**chosen), augmentation=OFF, validation=0.25, cache=cache
    )


def test_patches_are_whole_pictures_and_the_cache_knows_its_masks(tmp_path: Path) -> None:
    root = write_masks(tmp_path / "s", 4, shape=(48, 40))
    data = site(root, tmp_path / "cache")
    batch = next(iter(data.batches(("a", 0), batch=2, steps=1)))
    assert batch.image.shape == (2, 1, 32, 32) and batch.target.shape == (2, 3, 32, 32)
    assert batch.known.tolist() == [[True, True, False]] * 2
    entries = {item.title: data._entry(item) for item in data.items["train"]}
    for place, case in enumerate(batch.case):
        grid = entries[case].arrays["image"].open()[..., 0]
        assert np.array_equal(batch.image[place].numpy(), grid.astype(np.float32))
    before = data.summary()["voxels"]
    mask = np.zeros((48, 40), dtype=bool)
    mask[3:9, 3:9] = True
    for file in (root / "masks" / "left_lung").iterdir():
        picture(file, mask)
    after = site(root, tmp_path / "cache").summary()["voxels"]
    assert after["left_lung"] == 3 * 36 and after["right_lung"] == before["right_lung"]


def test_overlays_show_a_picture_as_it_is_seen(tmp_path: Path) -> None:
    """A mark at the upper left of the file is at the upper left of the overlay."""
    image = np.full((20, 30), 30, np.uint8)
    image[1:4, 2:6] = 250
    mask = np.zeros((20, 30), dtype=bool)
    mask[1:4, 2:6] = True
    picture(tmp_path / "images" / "a.png", image)
    picture(tmp_path / "masks" / "heart" / "a.png", mask)
    for space, size in ((SPACE, None), (SPACE, (10, 15)), (SOFT, None)):
        data = site(tmp_path, tmp_path / "cache", space, size=size)
        (volume,) = data.volumes("train")
        truth = volume.truth("federation")
        truth = (truth == 3 if space.exclusive else truth[2] > 0)[None]
        found = planes(volume.image[0].numpy(), truth, truth, volume.spacing, "RAS")
        shown = {what: found[f"axial-{what}"] for what in ("image", "truth")}
        assert not any(key.startswith(("coronal", "sagittal")) for key in found)
        shown["truth"] = shown["truth"][0]
        assert shown["image"].shape == (size or (20, 30)) == shown["truth"].shape
        bright = shown["image"] > 0.8
        assert bright[: len(bright) // 4 + 1, : bright.shape[1] // 4].any()
        assert not bright[len(bright) // 2 :].any() and not bright[:, bright.shape[1] // 2 :].any()
        assert shown["truth"][bright].all()


def test_spacing_of_dicom_counts(tmp_path: Path) -> None:
    image = anatomy(0, (24, 32))[0]
    found = read_flat([write_dicom(tmp_path / "a.dcm", image, PixelSpacing=[0.2, 0.3])])
    assert np.allclose(np.diag(found.affine), [0.3, 0.2, 1, 1]) and np.allclose(
        lying(found.image)[0], image / 255, atol=1e-6
    )
    with pytest.raises(FileError, match="one of 2 pictures of one case"):
        read_flat([tmp_path / "a.dcm", tmp_path / "b.dcm"])


def test_scored_beside_what_is_annotated(tmp_path: Path) -> None:
    """`score_all`: masks that training never sees are the truth of test cases."""
    write_masks(tmp_path, 4)
    index = index_of(tmp_path, annotated=("left_lung",), score_all=True, split={"test": 2}, reading={})
    place = next(n for n, case in enumerate(index.cases) if case.split == "test")
    raw = raw_of(index, place, reference=True)
    assert raw.label is not None and raw.label.known == {0} and not raw.label.voxels[1].any()
    assert raw.reference is not None and raw.reference.known == {0, 1} and raw.reference.voxels[1].any()
    form = Preprocessing(size=(16, 16), patch=(16, 16), context=0)
    data = VoxelData(index, SPACE, form, augmentation=OFF, cache=tmp_path / "cache")
    volume = next(iter(data.volumes("test")))
    assert volume.known.tolist() == [True, False, False] and volume.scored.tolist() == [True, True, False]
    assert volume.truth("federation")[1].any() and volume.truth("original")[1].any()


# ----------------------------------------------------------------------------------------------- predictions


def test_written_labels_are_read_back(tmp_path: Path) -> None:
    """Masks become a folder of the layout `masks`; exclusive labels one PNG; both of the picture's own size."""
    shape = (24, 36)
    masks = np.stack([anatomy(5, shape)[1][name.replace("_", " ")] for name in SPACE.names]).astype(np.uint8)
    files = write_labels(tmp_path, "p", standing(masks), SPACE)
    for c, name in enumerate(SPACE.names):
        assert files[name] == tmp_path / "masks" / name / "p.png"
        assert np.array_equal(read_mask(files[name])[0], masks[c] > 0)
    picture(tmp_path / "images" / "p.png", anatomy(5, shape)[0])
    label = raw_of(index_of(tmp_path)).label
    assert label is not None and np.array_equal(lying(label.voxels), masks)
    index = standing(join({c + 1: mask > 0 for c, mask in enumerate(masks)}, SOFT, shape, Path("p"))[0])
    files = write_labels(tmp_path, "p", index, SOFT)
    assert np.array_equal(np.asarray(Image.open(files["heart"])), lying(index))
    odd = LabelSpace(("a/b",), exclusive=False)
    assert write_labels(tmp_path, "q", standing(masks[:1]), odd)["a/b"].parent.name == "a%2Fb"
    with pytest.raises(DataError):
        write_labels(tmp_path / "images" / "p.png", "q", standing(masks[:1]), odd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a federation of pictures, after a few steps."""
    base = tmp_path_factory.mktemp("run")
    write_masks(base / "a", 4, ("left_lung",), (24, 36))
    write_masks(base / "b", 4, ("right_lung",), (40, 32), first=10)
    federation = {
        "name": "pictures",
        "labels": {"exclusive": False},
        "sites": [{"name": name, "path": name, "format": "masks"} for name in "ab"],
        "preprocessing": {"size": [16, 16], "patch": [16, 16], "context": 0},
        "net": {"name": "unet", "filters": [4, 8, 8], "strides": [1, 2, 2], "kernels": [3, 3, 3]},
        "method": {"name": "fedavg"},
        "rounds": 1,
        "local": {"steps": 4, "batch": 2},
    }
    (base / "f.yaml").write_text(yaml.safe_dump(federation))
    assert main(["run", str(base / "f.yaml"), "--runs", str(base / "runs")]) == 0
    return next((base / "runs").glob("pictures-*"))


def unseal(run: Path) -> None:
    """Takes out what would tell that federation.yaml was changed."""
    record = json.loads((run / "run.json").read_text())
    del record["seal"], record["federation"]
    (run / "run.json").write_text(json.dumps(record))


def test_a_run_folder_predicts_in_the_precision_of_its_run(trained: Path, tmp_path: Path) -> None:
    image = torch.rand(1, 16, 16, 1, generator=torch.Generator().manual_seed(1))
    found = {}
    for precision in ("float32", "bf16"):
        shutil.copytree(trained, folder := tmp_path / precision)
        federation = yaml.safe_load((folder / "federation.yaml").read_text())
        federation["local"]["precision"] = precision
        (folder / "federation.yaml").write_text(yaml.safe_dump(federation))
        unseal(folder)
        model = Trained(folder)
        found[precision] = model.probabilities(image)
        evaluator = task_of(model.federation).evaluator(model.federation, model.space)
        (told,) = predict_each(
            [model.members],
            Nets(model.network),
            image,
            evaluator.patch,
            evaluator.context,
            evaluator.options.inference,
            model.space,
        )
        assert torch.equal(found[precision], told.voxels)
    assert 0 < float((found["float32"] - found["bf16"]).abs().max()) < 0.05


def test_predictions_have_the_size_of_the_picture(trained: Path, tmp_path: Path) -> None:
    """And are what the model says of it, at its own place: mirrored pictures do not give the same mask."""
    files = [
        picture(tmp_path / f"p{n}.png", anatomy(n, shape)[0]) for n, shape in ((1, (24, 36)), (2, (50, 20)))
    ]
    told = predict_scans(trained, [[file] for file in files], tmp_path / "out")
    model = Trained(trained)
    with (tmp_path / "out" / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(Path(row["picture"]).name, row["name"]) for row in rows] == [
        (f"p{n}.png", name) for n in (1, 2) for name in ("left_lung", "right_lung")
    ]
    for file, entry in zip(files, told["scans"], strict=True):
        found = read_flat([file])
        geometry = geometry_of(found.image.shape[1:], found.affine, model.preprocessing)
        grid = image_to_grid(found.image, geometry, model.preprocessing)
        expected = lying(restore(model.probabilities(torch.from_numpy(grid)), geometry, False))
        for c, name in enumerate(model.space.names):
            written = np.asarray(Image.open(tmp_path / "out" / "masks" / name / file.name))
            assert written.shape == np.asarray(Image.open(file)).shape
            assert np.array_equal(written, expected[c] * 255)
            assert entry["pixels"].get(name, 0) == expected[c].sum()
            row = next(r for r in rows if r["picture"] == str(file) and r["name"] == name)
            assert int(row["pixels"]) == expected[c].sum()
            assert float(row["share"]) == pytest.approx(expected[c].mean(), abs=1e-6)
    with pytest.raises(FederationError, match="would both be written"):
        predict_scans(trained, [[files[0]], [picture(tmp_path / "x" / "p1.png", anatomy(1)[0])]], tmp_path)
    with pytest.raises(DataError, match=r"gone\.png: no such file"):
        predict_scans(trained, [[tmp_path / "gone.png"]], tmp_path / "out")


def test_a_folder_of_pictures_is_scored(trained: Path, tmp_path: Path) -> None:
    write_masks(tmp_path / "new", 3, ("left_lung", "heart"), (30, 30))
    mask = tmp_path / "new" / "masks" / "heart" / "cxr_001.png"
    Image.open(mask).resize((15, 15), Image.Resampling.NEAREST).save(mask)
    mask = tmp_path / "new" / "masks" / "left_lung" / "cxr_001.png"
    Image.open(mask).resize((15, 15), Image.Resampling.NEAREST).save(mask)
    said: list[str] = []
    rows, ignored = evaluate_folder(trained, tmp_path / "new", format="masks", warn=said.append)
    (note,) = [text for text in said if "a mask of another size than its picture" in text]
    assert note.startswith("site new: masks/left_lung/cxr_001.png: ") and "such files" not in note
    dice = [row for row in rows if row["metric"] == "dice"]
    assert len(dice) == 3 and {row["class"] for row in dice} == {"left_lung"} and ignored == ["heart"]


def test_a_picture_of_unknown_scale_is_not_predicted_on_a_grid_in_millimetres(
    trained: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    plain = yaml.safe_load((copy / "federation.yaml").read_text())
    plain["preprocessing"] |= {"size": None, "spacing": [2, 2, None]}
    (copy / "federation.yaml").write_text(yaml.safe_dump(plain))
    unseal(copy)
    file = picture(tmp_path / "p.png", anatomy(1)[0])
    predict_scans(copy, [[file]], tmp_path / "out")
    plain["sites"][0]["reading"] = {"pixel": [0.5, 0.5]}
    (copy / "federation.yaml").write_text(yaml.safe_dump(plain))
    with pytest.raises(DataError, match="does not say its millimetres per pixel"):
        predict_scans(copy, [[file]], tmp_path / "again")
    for name in ("p.dcm", "P.DICOM"):  # which says them
        (tmp_path / name).write_bytes(b"none")
        with pytest.raises(DataError) as error:
            load_picture(Trained(copy), [tmp_path / name], lambda look: None)
        assert "millimetres" not in str(error.value)
    grey = np.arange(900, dtype=np.uint8).reshape(30, 30)
    load_picture(Trained(copy), [write_dicom(tmp_path / "said.dcm", grey)], lambda look: None)
    silent = write_dicom(tmp_path / "silent.dcm", grey, PixelSpacing=None)
    with pytest.raises(DataError, match=r"silent\.dcm: does not say its millimetres per pixel"):
        load_picture(Trained(copy), [silent], lambda look: None)
