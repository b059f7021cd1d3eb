"""The guide of a hospital, docs/how-to/hospital.md: its commands do what it says, and no description names a patient."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
import yaml

from fedatlas.cli import main
from fedatlas.core.errors import DataError
from fedatlas.data import exports, samples
from fedatlas.data.formats import dicom
from fedatlas.planning.description import describe, read_description
from fedatlas.planning.recognise import recognised

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "hospital.md"


def commands(verb: str) -> list[list[str]]:
    """The commands of the page that begin with `fedatlas verb`, without the name of the program."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    blocks = "\n".join(text for kind, text in fenced if not kind).replace("\\\n", " ")
    lines = [line.partition("  #")[0] for line in blocks.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"fedatlas {verb} ")]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder in which the page was followed as far as the federation file of folders."""
    folder = tmp_path_factory.mktemp("hospital")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for verb in ("demo", "describe", "init"):
            for command in commands(verb):
                assert main(command) == 0, command
    return folder


def test_a_description_of_dicom_says_what_plans_need_and_no_patient(here) -> None:
    north, south = (read_description(here / f"{name}.json") for name in ("north", "south"))
    assert (north.kind, north.format, north.channels, north.is_ct) == ("volumes", "dicom", ["CT"], True)
    assert north.cases["train"] == 8 and north.spacing_mm and north.spacing_mm["50"] == [3.906, 3.906, 2.5]
    assert set(north.labels) == {"Brainstem", "SpinalCord"} and set(south.labels) == {
        "Parotid_L",
        "Parotid_R",
    }
    text = (here / "north.json").read_text() + (here / "south.json").read_text()
    assert not re.search(r"EXAMPLE|case-|patient-|\.dcm|hospitals|1\.2\.826", text)


def test_descriptions_and_folders_give_one_file(here) -> None:
    across, local = (yaml.safe_load((here / f"{n}.yaml").read_text()) for n in ("across", "federation"))
    assert [site.pop("path") for site in local["sites"]] == ["hospitals/north", "hospitals/south"]
    assert across | {"name": "hospitals"} == local
    assert local["labels"]["exclusive"] and len(local["labels"]["names"]) == 5


def test_what_the_hospitals_drew_is_what_was_bundled(here) -> None:
    """SEG and RTSTRUCT have the median volumes of the label maps; the new patient has none and cannot be described."""
    config, index = recognised(here / "hospitals" / "south", "south")
    site = samples.path() / "site-c"
    right = json.loads((site / "dataset.json").read_text())["labels"]["right_parotid"]
    maps: list[Any] = [nib.load(file) for file in site.glob("labelsT[rs]/*.nii.gz")]  # type: ignore[attr-defined]
    counts = [int((np.asarray(of.dataobj) == right).sum()) for of in maps]
    assert len(maps) == 8 and describe(config, index).labels["Parotid_R"].voxels == int(np.median(counts))
    with pytest.raises(DataError, match="read as dicom, no labelled .* 1 series have no segmentation"):
        recognised(here / "hospitals" / "new-patient", "n")
    with pytest.raises(DataError, match="exists already; give another folder with --out"):
        exports.write_hospitals(here / "hospitals")


def test_the_page_names_the_series_of_the_new_patient(here) -> None:
    (series,) = dicom.find([here / "hospitals" / "new-patient"]).series
    assert series.uid in PAGE.read_text() and not series.drawings


@pytest.mark.slow
def test_the_page_is_followed_from_check_to_export(here, monkeypatch, capsys) -> None:
    """A round of a step in the place of the page's run; the PACS is that of test_pacs."""
    monkeypatch.chdir(here)
    (plan,), (check,), (run,) = commands("plan"), commands("check"), commands("run")
    assert main([*plan, "--no-trial"]) == 0 and main(check) == 0
    assert main([*run, "-o", "rounds=1", "-o", "local.steps=1", "-o", "engine.workers=0"]) == 0
    (folder,) = (path.parent for path in (here / "runs").glob("*/run.json"))
    whole: list[list[Any]] = [
        [folder if part.startswith("runs/") else part for part in command]
        for verb in ("predict", "export", "report")
        for command in commands(verb)
        if "--dicomweb" not in command
    ]
    for command in whole:
        assert main(list(map(str, command))) == 0, command
    (seg,) = (here / "out").glob("*_seg.dcm")
    (series,) = dicom.find([here / "hospitals" / "new-patient", seg]).series
    assert [drawing.kind for drawing in series.drawings] == ["SEG"]
    made = pydicom.dcmread(seg)
    assert [str(s.SegmentLabel) for s in made.SegmentSequence] == [
        "Brainstem",
        "SpinalCord",
        "Parotid_L",
        "Parotid_R",
    ]
    assert json.loads((folder / "run.json").read_text())["finished"]
