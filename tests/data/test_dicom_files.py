"""Files of a DICOM export that are none, or none any more; objects that are there twice; and folders behind links."""

import errno
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pydicom
import pytest
from dicom_series import NAME, NUMBER, write_series
from pydicom.uid import ImplicitVRLittleEndian, RLELossless

from fedatlas.core.errors import DataError
from fedatlas.data import exports
from fedatlas.data.datasets.dicom import Dicom, read
from fedatlas.data.datasets.shared.listing import Layout
from fedatlas.data.formats import dicom

VOXELS = np.random.default_rng(0).integers(-1000, 1500, (12, 10, 5))
AFFINE = np.diag([-2.0, -2.0, 3.0, 1.0])


def damaged(folder: Path) -> list[tuple[str, str]]:
    """Name and reason of the files that are damaged; a series of five slices is there all the same."""
    found = dicom.find([folder])
    assert [len(series.parts) for series in found.series] == [5]
    return [(path.name, told) for path, told in found.damaged]


BROKEN = {
    "empty": (b"", "it is empty"),
    "zeros": (bytes(5000), "it holds zeros alone"),
    "cut": (bytes(90) + b"II*" + bytes(7), "it ends after 100 bytes"),
}


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("suffix", [".dcm", "", ".img"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_among_objects_that_holds_none_is_damaged(kind, suffix, archive, tmp_path) -> None:
    """It is called as they are."""
    content, told = BROKEN[kind]
    files = write_series(tmp_path / "s", VOXELS, AFFINE, suffix=suffix)
    broken = tmp_path / "s" / files[-1].name.replace("004", "017")
    broken.write_bytes(content)
    if archive:
        shutil.make_archive(str(tmp_path / "s"), "zip", tmp_path / "s")
        shutil.rmtree(tmp_path / "s")
    assert damaged(tmp_path) == [("s.zip" if archive else broken.name, told)]


@pytest.mark.parametrize("name", ["series.dcm", "A.DICOM", "1.2.DCM"])
def test_a_file_called_dicom_that_is_a_page_is_damaged(name, tmp_path) -> None:
    write_series(tmp_path, VOXELS, AFFINE, suffix="")
    (tmp_path / name).write_text("<html>Your session has expired." + " " * 200)
    assert damaged(tmp_path) == [(name, "it lacks the mark of DICOM at its beginning")]


def test_files_named_by_uids_and_hashes_are_told_from_others(tmp_path) -> None:
    files = write_series(tmp_path, VOXELS, AFFINE)
    for number, file in enumerate(files[:3]):
        file.rename(tmp_path / f"1.2.840.{number}.77")
    for number, file in enumerate(files[3:]):
        file.rename(tmp_path / f"00ab{number}f0c9e-41d2")
    for name in ("1.2.840.9", "77ab0f0c9e-0000"):
        (tmp_path / name).touch()
    assert damaged(tmp_path) == [("1.2.840.9", "it is empty"), ("77ab0f0c9e-0000", "it is empty")]


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "archive"])
def test_files_of_other_kinds_are_passed_over(archive, tmp_path) -> None:
    folder = tmp_path / "s"
    write_series(folder, VOXELS, AFFINE, suffix="")
    for name in ("README", "DONE", "LOCKFILE", "_SUCCESS", ".DS_Store", "._Plantedname_scan_004", "._a.dcm"):
        (folder / name).touch()
    for name in ("README.txt", "Thumbs.db", "DICOMDIR", "VERSION", "report_1.pdf", "scan_004.json"):
        (folder / name).write_bytes(b"short")
    (folder / "Plantedname_scan_900").write_text("notes on the scan, of more letters than a file's head" * 5)
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "._Plantedname_scan_001.dcm").write_bytes(b"\0\5\x16\7")
    if archive:
        shutil.make_archive(str(folder), "zip", folder)
        shutil.rmtree(folder)
    assert damaged(tmp_path) == []


@pytest.mark.parametrize("meta", [False, True], ids=["bare", "meta"])
@pytest.mark.parametrize("implicit", [False, True])
def test_an_object_without_its_mark_is_damaged(implicit, meta, tmp_path) -> None:
    """Whatever it is called; the series lacks a slice at its end, which nothing else would tell."""
    files = write_series(tmp_path, VOXELS, AFFINE, suffix="")
    write_series(tmp_path, VOXELS, AFFINE, "more", suffix="")
    data = pydicom.dcmread(tmp_path / "Plantedname_more_004")
    files.append(tmp_path / "other")
    if implicit:
        data.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    data.save_as(files[-1], implicit_vr=implicit, enforce_file_format=True)
    for file in tmp_path.glob("*more*"):
        file.unlink()
    whole = files[-1].read_bytes()
    length = 144 + int.from_bytes(whole[140:144], "little")
    files[-1].write_bytes(whole[132 if meta else length :])
    assert damaged(tmp_path) == [("other", "it lacks the mark of DICOM at its beginning")]


@pytest.mark.parametrize(
    ("kind", "modality"),
    [("1.2.840.10008.5.1.4.1.1.66", "MR"), ("1.3.12.2.1107.5.9.1", "CT"), ("1.2.840.10008.5.1.4.38.1", "")],
    ids=["raw data", "private", "hanging protocol"],
)
def test_an_object_that_is_no_image_is_passed_over(kind, modality, tmp_path) -> None:
    """Scanners give raw data the modality of their images. An image without rows is damaged."""
    write_series(tmp_path, VOXELS, AFFINE)
    for name, of in (("raw", kind), ("cut", exports.CLASSES["MR"])):
        made = exports.header(f"p/{name}", modality, of, 1, {})
        if not modality:
            del made.Modality
        made.save_as(tmp_path / f"{name}.dcm", enforce_file_format=True)
    found = dicom.find([tmp_path])
    assert (len(found.series), found.others) == (1, 1)
    assert [(file.name, told) for file, told in found.damaged] == [("cut.dcm", "its header is cut off")]


def test_a_folder_that_cannot_be_read_is_damaged(tmp_path, monkeypatch) -> None:
    """A series within it would be missed."""
    write_series(tmp_path / "a", VOXELS, AFFINE)
    (tmp_path / "b").mkdir()
    scandir = os.scandir

    def refused(path):
        if Path(path).name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert damaged(tmp_path) == [("b", "its folder cannot be read: Permission denied")]


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [(6, b"\x63\0", "zip file version 9.9"), (46, b"\xe9\xe9", "UnicodeDecodeError")],
    ids=["version", "name"],
)
def test_an_archive_whose_list_is_damaged(place, value, told, tmp_path) -> None:
    (file, *_) = write_series(tmp_path / "s", VOXELS, AFFINE)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(file, "é.dcm")
    packed = bytearray((tmp_path / "a.zip").read_bytes())
    start = packed.index(b"PK\1\2") + place
    packed[start : start + 2] = value
    (tmp_path / "a.zip").write_bytes(packed)
    assert damaged(tmp_path) == [("a.zip", f"no archive that can be read ({told})")]


def test_a_site_with_a_damaged_file_says_so_and_names_no_patient(tmp_path) -> None:
    files = write_series(tmp_path / NAME, VOXELS, AFFINE)
    files[-1].write_bytes(b"")
    (problem,) = (problem for problem in read(Layout("s", tmp_path, options=Dicom(unlabelled=True))).problems)
    assert problem.fatal and problem.what == "not readable as DICOM (it is empty)"
    assert NAME not in str(problem) and str(problem).startswith("site s: damaged file 1 of 1: ")


def test_a_site_of_damaged_files_counts_them(tmp_path) -> None:
    for file in write_series(tmp_path, VOXELS, AFFINE):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="files that are damaged: 5"):
        read(Layout("s", tmp_path, options=Dicom()))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("syntax", [None, ImplicitVRLittleEndian, RLELossless])
def test_a_copy_of_an_object_is_passed_over(syntax, kept, tmp_path) -> None:
    """Also one that is encoded otherwise."""
    files = write_series(tmp_path / "a", VOXELS, AFFINE)
    (tmp_path / "b").mkdir()
    for file in files:
        data = pydicom.dcmread(file)
        if syntax == RLELossless:
            data.compress(RLELossless, generate_instance_uid=False)
        elif syntax is not None:
            data.file_meta.TransferSyntaxUID = syntax
        data.file_meta.ImplementationVersionName = "OTHER"
        data.save_as(tmp_path / "b" / file.name)
        assert (tmp_path / "b" / file.name).read_bytes() != file.read_bytes()
    found = dicom.find([tmp_path], keep=kept)
    assert found.damaged == () and np.array_equal(dicom.load(found.series[0]).voxels, VOXELS)


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("kept", [False, True])
def test_different_objects_of_one_uid_are_damaged(kept, archive, tmp_path) -> None:
    """Whichever comes first; equal ones are not."""
    files = write_series(tmp_path / "a", VOXELS, AFFINE)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    data = pydicom.dcmread(files[0])
    data.PixelData = bytes(len(data.PixelData))
    data.save_as(tmp_path / "b" / files[0].name)
    data = pydicom.dcmread(files[1])
    data.PatientID = "ANOTHER"
    data.save_as(tmp_path / "b" / files[1].name)
    if archive:
        for name in "ab":
            with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as packed:
                for file in sorted((tmp_path / name).iterdir()):
                    packed.write(file, file.name)
            shutil.rmtree(tmp_path / name)
    found = dicom.find([tmp_path], keep=kept)
    told = ["two different objects of one UID", "two different objects of one UID, of two patients"]
    assert [reason for _, reason in found.damaged] == told
    assert {path.relative_to(tmp_path).parts[0] for path, _ in found.damaged} == {"b.zip" if archive else "b"}
    assert len(found.series) == 1 and NUMBER not in str(found.damaged)


def test_objects_that_were_received_twice_are_compared(tmp_path) -> None:
    files = write_series(tmp_path, VOXELS, AFFINE)
    sent = [pydicom.dcmread(file) for file in (*files, *files[:2])]
    assert dicom.received(sent, "a PACS").damaged == ()
    sent[-1].PatientID = "ANOTHER"
    ((_, told),) = dicom.received(sent, "a PACS").damaged
    assert told.endswith("of two patients")


def test_no_file_is_read_twice_where_no_uid_repeats(tmp_path, monkeypatch) -> None:
    write_series(tmp_path, VOXELS, AFFINE)
    monkeypatch.setattr(dicom.Reader, "bytes_of", None)
    assert dicom.find([tmp_path]).damaged == ()


def test_links_to_folders_are_followed_once(tmp_path) -> None:
    """Also where they lead back, or a folder is there under two names."""
    write_series(tmp_path / "store" / "one", VOXELS, AFFINE, "p1/ct")
    write_series(tmp_path / "store" / "two", VOXELS, AFFINE, "p2/ct")
    site = tmp_path / "site"
    site.mkdir()
    for name, target in (("patient 1", "one"), ("patient 1 again", "one"), ("patient 2", "two")):
        (site / name).symlink_to(tmp_path / "store" / target, target_is_directory=True)
    (tmp_path / "store" / "two" / "up").symlink_to(site, target_is_directory=True)
    (tmp_path / "store" / "two" / "here").symlink_to(tmp_path / "store" / "two", target_is_directory=True)
    found = dicom.find([site])
    assert [len(series.parts) for series in found.series] == [5, 5] and found.damaged == ()
    assert {series.files[0].parent.name for series in found.series} == {"patient 1", "patient 2"}
