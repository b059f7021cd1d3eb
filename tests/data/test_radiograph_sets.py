"""The chest X-ray sets of ConDistFL on fake folders in their exact layouts: Montgomery, Shenzhen, JSRT, SIIM-ACR."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sets import (
    anatomy,
    picture,
    write_dicom,
    write_jsrt,
    write_montgomery,
    write_rle,
    write_shenzhen,
    write_siim,
)

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.checks import check_site
from fedatlas.data.formats import rle
from fedatlas.data.formats.flat import lying
from fedatlas.data.index import SiteConfig, SiteIndex, naming_of, read_site
from fedatlas.data.reading import Raw, read_case

SPACE = LabelSpace(("left lung", "right lung", "heart", "pneumothorax"), exclusive=False)


def index_of(root: Path, form: str, **config: Any) -> SiteIndex:
    return read_site(SiteConfig(name="s", path=str(root), format=form, **config), root)  # type: ignore[arg-type]


def raw_of(index: SiteIndex, place: int, space: LabelSpace = SPACE) -> Raw:
    raw = read_case(index, index.cases[place], space, naming_of(index, space))
    assert not [p for p in raw.problems if p.fatal], raw.problems
    return raw


def fatal(index: SiteIndex, space: LabelSpace = SPACE) -> list[str]:
    return [str(p) for p in check_site(index, space) if p.fatal]


def notes(index: SiteIndex, space: LabelSpace = SPACE) -> str:
    return "\n".join(str(p) for p in check_site(index, space) if not p.fatal)


def drawn(raw: Raw, name: str, space: LabelSpace = SPACE) -> np.ndarray:
    assert raw.label is not None
    return lying(raw.label.voxels[space.index(name)]) > 0


# --------------------------------------------------------------------------------------- the four layouts


def test_montgomery(tmp_path: Path) -> None:
    index = index_of(write_montgomery(tmp_path, 4), "montgomery")
    assert index.names == ("background", "left lung", "right lung") and index.findings == ("tuberculosis",)
    assert [case.name for case in index.cases][:2] == ["MCUCXR_0001_0", "MCUCXR_0002_1"]
    assert [dict(case.findings)["tuberculosis"] for case in index.cases] == [False, True, False, True]
    raw = raw_of(index, 0)
    image, masks = anatomy(0, (32, 40))
    assert raw.image is not None and raw.image.shape == (1, 40, 32, 1)
    assert np.allclose(lying(raw.image)[0], image / 255, atol=1e-6)
    assert np.allclose(np.diag(raw.affine), [0.0875, 0.0875, 1, 1])
    for name in ("left lung", "right lung"):
        assert np.array_equal(drawn(raw, name), masks[name])
    assert raw.label is not None and raw.label.known == {0, 1} and not raw.label.voxels[2:].any()
    assert fatal(index) == [] and "4 pictures; the Montgomery County set has 138" in notes(index)


@pytest.mark.parametrize("both", [False, True])
def test_shenzhen(tmp_path: Path, both: bool) -> None:
    """Masks in two folders, and both lungs in one file, mean the same."""
    index = index_of(write_shenzhen(tmp_path, 5, both=both), "shenzhen")
    assert len(index.cases) == 4 and fatal(index) == []
    assert [dict(case.findings)["tuberculosis"] for case in index.cases] == [False, True, False, True]
    masks = anatomy(51, (36, 32))[1]
    raw = raw_of(index, 1)
    for name in ("left lung", "right lung"):
        assert np.array_equal(drawn(raw, name), masks[name])
    if both:
        with pytest.raises(FederationError, match="site s: reading: swap is true, and mask/ has both lungs"):
            index_of(tmp_path, "shenzhen", reading={"swap": True})
    else:
        raw = raw_of(index_of(tmp_path, "shenzhen", reading={"swap": True}), 1)
        assert np.array_equal(drawn(raw, "left lung"), masks["right lung"])
    kept = index_of(tmp_path, "shenzhen", reading={"unmasked": True})
    assert len(kept.cases) == 5 and kept.cases[4].annotated == () and kept.cases[4].findings


def test_jsrt(tmp_path: Path) -> None:
    """Raw files are inverted; masks of half the resolution are doubled."""
    index = index_of(write_jsrt(tmp_path, 4), "jsrt", reading={"side": 32})
    assert [case.name for case in index.cases] == ["JPCLN001", "JPCLN002", "JPCNN001", "JPCNN002"]
    assert [dict(case.findings)["lung nodule"] for case in index.cases] == [True, True, False, False]
    assert index.names == ("background", "left lung", "right lung", "heart") and fatal(index) == []
    image, masks = anatomy(102, (32, 32))
    raw = raw_of(index, 1)
    assert raw.image is not None and np.allclose(lying(raw.image)[0], image / 256, atol=2e-3)
    assert raw.affine[0, 0] == pytest.approx(0.175 * 64)
    for name in ("left lung", "right lung", "heart"):
        assert np.array_equal(drawn(raw, name), np.kron(masks[name][::2, ::2], np.ones((2, 2))) > 0)


def test_siim(tmp_path: Path) -> None:
    """-1 is a picture in which pneumothorax is annotated and absent; several rows are one mask."""
    index = index_of(write_siim(tmp_path), "siim", reading={"side": 32})
    assert len(index.cases) == 8 and fatal(index) == []
    assert [dict(c.findings)["has pneumothorax"] for c in index.cases] == [True, *[False] * 3] * 2
    assert all(case.annotated == ("pneumothorax",) for case in index.cases)
    assert len(index.cases[0].masks) == 2 and index.cases[1].masks == ()
    for place in (0, 1, 4):
        raw, mask = raw_of(index, place), anatomy(200 + place)[1]["pneumothorax"]
        assert np.array_equal(drawn(raw, "pneumothorax"), mask if place % 4 == 0 else 0 * mask)
        assert raw.label is not None and raw.label.known == {3} and raw.affine[0, 0] == pytest.approx(0.143)


def test_siim_keeps_the_ratio_of_both_kinds(tmp_path: Path) -> None:
    index = index_of(
        write_siim(tmp_path, 40, dicom=False),
        "siim",
        reading={"side": 32},
        split={"validation": 0.2, "test": 0.2},
    )
    kinds = [(case.split, case.findings[0][1]) for case in index.cases]
    assert [kinds.count((split, True)) for split in ("train", "validation", "test")] == [6, 2, 2]
    assert [kinds.count((split, False)) for split in ("train", "validation", "test")] == [18, 6, 6]


def test_runs_are_turned_with_their_dicom_picture(tmp_path: Path) -> None:
    """Run lengths count the file's own pixels; a picture that is stored mirrored is read upright, and so is its mask."""
    write_siim(tmp_path, 1)
    file = next(tmp_path.rglob("*.dcm"))
    image, masks = anatomy(200)
    write_dicom(file, np.ascontiguousarray(image[:, ::-1]), PatientOrientation=["R", "F"])
    write_rle(tmp_path / "stage_2_train.csv", [(file.stem, rle.encode(masks["pneumothorax"][:, ::-1]))])
    raw = raw_of(index_of(tmp_path, "siim", reading={"side": 32}), 0)
    assert raw.image is not None and np.allclose(lying(raw.image)[0], image / 255, atol=1e-6)
    assert np.array_equal(drawn(raw, "pneumothorax"), masks["pneumothorax"])


# ------------------------------------------------------------------------------------- left, and right


@pytest.mark.parametrize(
    ("form", "write"), [("montgomery", write_montgomery), ("shenzhen", write_shenzhen), ("jsrt", write_jsrt)]
)
def test_sides_the_wrong_way_round_are_told_and_exchanged(
    tmp_path: Path, form: str, write: Callable[[Path, int], Path]
) -> None:
    write(tmp_path, 3)
    options = {"side": 32} if form == "jsrt" else {}
    assert "lies left of" not in notes(index_of(tmp_path, form, reading=options))
    swapped = index_of(tmp_path, form, reading={**options, "swap": True})
    assert "'left lung' lies left of 'right lung'" in notes(swapped)
    plain, turned = raw_of(index_of(tmp_path, form, reading=options), 0), raw_of(swapped, 0)
    assert np.array_equal(drawn(plain, "left lung"), drawn(turned, "right lung"))
    assert drawn(plain, "left lung").any()


# ----------------------------------------------------------------------------------------- wrong releases


@pytest.mark.parametrize("form", ["montgomery", "shenzhen", "jsrt", "siim"])
def test_another_folder_is_named_with_what_was_expected(tmp_path: Path, form: str) -> None:
    (tmp_path / "something").mkdir()
    wanted = {
        "montgomery": "no folder CXR_png/.*Expected: CXR_png/, ManualMask/leftMask/.*holds the folders: something",
        "shenzhen": "no folder CXR_png/",
        "jsrt": "no masks of SCR; expected scratch/fold1/masks/heart/JPCLN001.gif",
        "siim": "no table of run lengths; expected stage_2_train.csv or train-rle.csv",
    }
    with pytest.raises(DataError, match=f"site s: .*{wanted[form]}"):
        index_of(tmp_path, form)


def test_a_set_with_missing_or_foreign_files(tmp_path: Path) -> None:
    base = write_montgomery(tmp_path / "m", 3) / "MontgomerySet"
    (base / "ManualMask" / "leftMask" / "MCUCXR_0002_1.png").unlink()
    picture(base / "CXR_png" / "CHNCXR_0009_1.png", anatomy(0)[0])
    told = fatal(index_of(tmp_path / "m", "montgomery"))
    assert any("MCUCXR_0002_1.png: missing: the mask of the left lung" in line for line in told)
    assert any(
        "CHNCXR_0009_1.png: a picture of another set: names are MCUCXR_0001_0" in line for line in told
    )

    shutil.rmtree(write_shenzhen(tmp_path / "s", 3) / "leftMask")
    with pytest.raises(DataError, match=r"no masks of the lungs.*leftMask/ and rightMask/, or mask/"):
        index_of(tmp_path / "s", "shenzhen")
    with pytest.raises(FederationError, match="`left` and `right` together"):
        index_of(tmp_path / "s", "shenzhen", reading={"left": "leftMask"})

    write_jsrt(tmp_path / "j", 3)
    (tmp_path / "j" / "scratch" / "fold1" / "masks" / "heart" / "JPCLN001.gif").unlink()
    told = fatal(index_of(tmp_path / "j", "jsrt", reading={"side": 32}))
    assert any("JPCLN001.IMG: missing: the mask of 'heart'" in line for line in told)
    with pytest.raises(DataError, match="got 'aorta'; SCR draws: left lung"):
        index_of(tmp_path / "j", "jsrt", reading={"structures": ["aorta"]})


def test_a_raw_file_of_another_size_or_byte_order(tmp_path: Path) -> None:
    index = index_of(write_jsrt(tmp_path, 2), "jsrt")
    assert any("2,048 bytes; 2048×2048 pixels of 16 bit are 8,388,608" in line for line in fatal(index))
    file = tmp_path / "All247images" / "JPCLN001.IMG"
    file.write_bytes(np.frombuffer(file.read_bytes(), ">u2").astype("<u2").tobytes())
    told = fatal(index_of(tmp_path, "jsrt", reading={"side": 32}))
    assert any("JPCLN001.IMG: holds" in line and "bytes were swapped" in line for line in told)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("5 3 2", "3 numbers; run lengths come in pairs"),
        ("1000 30", "run 1 of 1 ends at pixel 1,030, beyond the 1,024 pixels of a picture of 32×32"),
        ("5 3 -2 4", "run 2 has the offset -2: it would overlap the run before"),
        ("5 0", "run 1 has the length 0"),
        ("5 x", "run lengths hold 'x', which is no whole number"),
        ("", "empty run lengths"),
    ],
)
def test_run_lengths_that_do_not_fit(tmp_path: Path, text: str, wanted: str) -> None:
    """Named with table, line and remedy, and no library's traceback."""
    write_siim(tmp_path, 2, dicom=False)
    names = sorted(file.stem for file in tmp_path.rglob("*.png"))
    write_rle(tmp_path / "stage_2_train.csv", [(names[0], "-1"), (names[1], text)])
    told = fatal(index_of(tmp_path, "siim", reading={"side": 32}))
    assert len(told) == 1 and told[0].startswith("site s: stage_2_train.csv, line 3: ") and wanted in told[0]


def test_a_table_of_another_release(tmp_path: Path) -> None:
    write_siim(tmp_path, 2, dicom=False)
    table = tmp_path / "stage_2_train.csv"
    names = sorted(file.stem for file in tmp_path.rglob("*.png"))
    table.write_text(f"ImageId,EncodedPixels,Fold\n{names[0]},-1,3\n")
    with pytest.raises(
        DataError, match="3 columns, ImageId, EncodedPixels, Fold; .* has ImageId and EncodedPixels"
    ):
        index_of(tmp_path, "siim")
    table.write_text(f"filename,EncodedPixels\n{names[0]},-1\n")
    with pytest.raises(DataError, match="line 1: no column 'ImageId'"):
        index_of(tmp_path, "siim")
    write_rle(table, [(names[0], "-1"), (names[0], "1 2"), ("gone", "-1")])
    told = "\n".join(fatal(index_of(tmp_path, "siim")))
    assert (
        "has run lengths, and -1 for none in another row" in told and "gone.dcm: missing: the picture" in told
    )


def test_run_lengths_of_pictures_that_were_scaled(tmp_path: Path) -> None:
    """A picture of the same aspect takes the mask by nearest neighbour; another aspect is refused."""
    write_siim(tmp_path, 1, dicom=False)
    file = next(tmp_path.rglob("*.png"))
    mask = anatomy(200)[1]["pneumothorax"]
    picture(file, anatomy(200)[0][::2, ::2])
    raw = raw_of(index_of(tmp_path, "siim", reading={"side": 32}), 0)
    assert np.array_equal(drawn(raw, "pneumothorax"), mask[1::2, 1::2])
    picture(file, anatomy(200)[0][:20])
    told = fatal(index_of(tmp_path, "siim", reading={"side": 32}))
    assert any("a mask of 32×32 pixels for a picture of 20×32" in line for line in told)


def test_run_lengths_go_down_the_columns() -> None:
    mask = np.zeros((4, 3), dtype=bool)
    mask[1:3, 0] = mask[0, 2] = True
    assert rle.encode(mask) == "1 2 5 1" and np.array_equal(rle.decode("1 2 5 1", (4, 3), "t"), mask)
    assert rle.encode(0 * mask) == "-1" and not rle.decode(" -1 ", (4, 3), "t").any()
    rng = np.random.default_rng(0)
    for _ in range(20):
        mask = rng.random((7, 5)) < rng.random()
        assert np.array_equal(rle.decode(rle.encode(mask), (7, 5), "t"), mask)


def test_a_mask_of_both_lungs_that_touch(tmp_path: Path) -> None:
    write_shenzhen(tmp_path, 2, both=True)
    touching = np.zeros((36, 32), dtype=bool)
    touching[10:20, 4:28] = True
    picture(tmp_path / "mask" / "CHNCXR_0001_0_mask.png", touching)
    told = fatal(index_of(tmp_path, "shenzhen"))
    assert any("CHNCXR_0001_0_mask.png: a mask of both sides that does not fall into two" in s for s in told)
