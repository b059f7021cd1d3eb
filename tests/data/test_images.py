"""The image-level data sets on generated folders in their published layouts, the generic CSV, splits and leaks."""

import csv
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import from_dict
from fedatlas.data.datasets import chestxray14, covid, tbx
from fedatlas.data.datasets import csv as csv_table
from fedatlas.data.datasets.chestxray14 import BATCHES, CLASSES, ChestXray14, batch_of
from fedatlas.data.datasets.covid import Covid
from fedatlas.data.datasets.csv import CsvForm
from fedatlas.data.datasets.shared.findings import (
    balanced,
    contents,
    federation_problems,
    find_images,
    split_patients,
)
from fedatlas.data.datasets.shared.listing import (
    LISTED,
    Case,
    Layout,
    Listing,
    Problem,
    Split,
    Splitting,
    image_case,
)
from fedatlas.data.formats.picture import read_picture
from fedatlas.data.images import ImageData, Images
from fedatlas.data.index import SiteConfig, read_image_site
from fedatlas.data.reading import gathered
from fedatlas.federation.trained import notes_on_images

NONE = Splitting(test=0, validation=0)


def picture(path: Path) -> Path:
    """A small image whose pixels depend on its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = int.from_bytes(path.as_posix().encode()[-16:], "big")
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    return path


def table(path: Path, rows: Iterable[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def texts(problems: Iterable[Problem], *, fatal: bool | None = None) -> str:
    return "\n".join(str(problem) for problem in problems if fatal is None or problem.fatal == fatal)


def listed(module: Any, site: str, root: Path, form: Any, splitting: Splitting) -> Listing:
    """What the reader of a data set's module finds."""
    return module.read(Layout(site, root, options=form, splitting=splitting))


def listing_of(findings: Sequence[str], cases: Iterable[Case], source: str) -> Listing:
    return Listing({}, tuple(cases), None, (), tuple(findings), source)


def by_name(listing: Listing) -> dict[str, Case]:
    return {case.name: case for case in listing.cases}


def patients(listing: Listing) -> dict[Split, set[str]]:
    found: dict[Split, set[str]] = {"train": set(), "validation": set(), "test": set()}
    for case in listing.cases:
        found[case.split].add(case.patient)
    return found


# ------------------------------------------------------------------------------------------- generic CSV


@pytest.fixture
def site(tmp_path: Path) -> Path:
    rows = [
        ("file", "patient", "age", "Effusion", "Nodule"),
        ("a/0.png", "p0", 40, 1, 0),
        ("a/1.png", "p0", 40, "", -1),
        ("a/2.png", "p1", "", "0.0", "1.0"),
        ("b.jpg", "p2", 9, "-1.0", ""),
    ]
    table(tmp_path / "labels.csv", rows)
    for row in rows[1:]:
        picture(tmp_path / str(row[0]))
    return tmp_path


FORM = CsvForm(patient="patient", ignored=("age",))


def test_csv_has_three_states_per_class(site: Path) -> None:
    listing = listed(csv_table, "north", site, FORM, NONE)
    assert listing.findings == ("Effusion", "Nodule")
    [note] = listing.problems
    assert not note.fatal and "2 cells hold -1" in note.what
    cases = by_name(listing)
    assert list(cases) == ["a/0", "a/1", "a/2", "b"]
    assert (cases["a/0"].present, cases["a/0"].absent) == ({"Effusion"}, {"Nodule"})
    assert (cases["a/1"].present, cases["a/1"].absent) == (frozenset(), frozenset())
    assert (cases["a/2"].present, cases["a/2"].absent) == ({"Nodule"}, {"Effusion"})
    assert cases["a/1"].patient == "p0" and cases["b"].images[0] == site / "b.jpg"
    assert listing.counts() == {"Effusion": (1, 1), "Nodule": (1, 1)}
    for case in listing.cases:
        assert read_picture(case.images[0], site="north").pixels.shape == (1, 8, 8)


@pytest.mark.parametrize(("policy", "counts"), [("ignore", (1, 1)), ("ones", (2, 1)), ("zeros", (1, 2))])
def test_csv_uncertain_by_policy(site: Path, policy: str, counts: tuple[int, int]) -> None:
    form = from_dict(CsvForm, {"patient": "patient", "ignored": ["age"], "uncertain": policy}, what="test")
    assert listed(csv_table, "north", site, form, NONE).counts() == {"Effusion": counts, "Nodule": counts}


@pytest.mark.parametrize("value", ["inf", "-inf", "Infinity", "1e999", "-nan", "0.5", "yes"])
def test_csv_values_that_are_none_are_told_by_line(tmp_path: Path, value: str) -> None:
    table(tmp_path / "labels.csv", [("file", "Nodule"), ("a.png", "1"), ("b.png", value)])
    for name in ("a.png", "b.png"):
        picture(tmp_path / name)
    listing = listed(csv_table, "north", tmp_path, CsvForm(patient="file", classes=("Nodule",)), NONE)
    [problem] = listing.problems
    assert list(by_name(listing)) == ["a"] and problem.fatal and problem.file == "labels.csv, line 3"
    assert f"column 'Nodule' holds {value!r}; allowed: 1 (or True) present" in problem.what


def test_csv_marks_may_be_written_as_statistics_programs_do(tmp_path: Path) -> None:
    spelled = {"1": 1, "1.0": 1, "True": 1, "TRUE": 1, "0": 0, "0.00": 0, "false": 0, "": None, "NaN": None}
    rows = [(f"{number}.png", text) for number, text in enumerate(spelled)]
    table(tmp_path / "labels.csv", [("file", "Nodule"), *rows])
    for name, _ in rows:
        picture(tmp_path / name)
    listing = listed(csv_table, "north", tmp_path, CsvForm(patient="file"), NONE)
    assert not texts(listing.problems, fatal=True)
    read = [1 if case.present else 0 if case.absent else None for case in listing.cases]
    assert read == list(spelled.values())


def test_csv_classes_by_name_and_no_finding(tmp_path: Path) -> None:
    """CheXpert's columns: No Finding makes what is left empty absent, and overrules nothing that is said, nor what is uncertain."""
    rows = [
        ("Path", "Sex", "No Finding", "Edema", "Fracture", "Support Devices"),
        ("train/patient00001/study1/view1_frontal.jpg", "Male", "1.0", "", "-1.0", "1.0"),
        ("train/patient00002/study1/view1_frontal.jpg", "Female", "", "-1.0", "", ""),
        ("train/patient00002/study2/view1_frontal.jpg", "Female", "", "1.0", "", "0.0"),
    ]
    table(tmp_path / "train.csv", rows)
    for row in rows[1:]:
        picture(tmp_path / row[0])
    form = CsvForm(
        table="train.csv",
        file="Path",
        classes=("Edema", "Fracture", "Support Devices"),
        no_finding="No Finding",
        patient_in=r"(patient\d+)/",
    )
    first, second, third = listed(csv_table, "north", tmp_path, form, NONE).cases
    assert (first.present, first.absent) == ({"Support Devices"}, {"Edema"})
    assert (second.present, second.absent) == (frozenset(), frozenset())
    assert (third.present, third.absent) == ({"Edema"}, {"Support Devices"})
    assert [case.patient for case in (first, second, third)] == [
        "patient00001",
        "patient00002",
        "patient00002",
    ]


def test_csv_errors_name_file_line_column_value_and_what_is_allowed(site: Path) -> None:
    with (site / "labels.csv").open("a") as file:
        file.write(
            'a/3.png,p3,1,yes,0\na/4.png,,1,1,0\n,p5,1,1,0\na/6.png,p6,1,2,0\na/7.png,p7\n\n"a\n8.png",p,1,x,0\n'
        )
    listing = listed(csv_table, "north", site, FORM, NONE)
    assert len(listing.cases) == 4
    found = texts(listing.problems, fatal=True).splitlines()
    assert found[0].startswith("site north: labels.csv: line 10: 2 columns, where the header has 5")
    allowed = "1 (or True) present, 0 (or False) absent, -1 uncertain, empty not annotated"
    assert f"labels.csv, line 6: column 'Effusion' holds 'yes'; allowed: {allowed}" in found[1]
    assert "line 7: column 'patient' holds ''; allowed: a name or number" in found[2]
    assert "line 8: column 'file' holds ''; allowed: the path of an image" in found[3]
    assert "line 9: column 'Effusion' holds '2'" in found[4]
    assert "line 12: column 'Effusion' holds 'x'" in found[5]
    assert len(found) == 6


def test_csv_without_ignored_says_which_column_is_no_class(site: Path) -> None:
    listing = listed(csv_table, "north", site, CsvForm(patient="patient"), NONE)
    assert "line 2: column 'age' holds '40'" in texts(listing.problems)
    assert "`ignored`" in texts(listing.problems)


@pytest.mark.parametrize("name", [".", "..", "a", "x" * 5000, "a\tb"])
def test_csv_odd_file_names_are_missing_files(site: Path, name: str) -> None:
    table(site / "labels.csv", [("file", "x"), (name, 1), ("b.jpg", 0)])
    listing = listed(csv_table, "north", site, CsvForm(), NONE)
    assert [case.name for case in listing.cases] == ["b"]
    assert "missing: listed in labels.csv, line 2" in texts(listing.problems, fatal=True)


def test_csv_rows_without_files_and_files_without_rows(site: Path) -> None:
    (site / "a/1.png").rename(site / "a/9.png")
    (site / "notes.txt").write_text("not an image")
    listing = listed(csv_table, "north", site, FORM, NONE)
    assert len(listing.cases) == 3
    _, missing, unused = listing.problems  # the first is of cells with -1
    assert missing.fatal and str(missing).startswith(
        "site north: a/1.png: missing: listed in labels.csv, line 3, column 'file'"
    )
    assert not unused.fatal and str(unused).startswith(
        "site north: a/9.png: an image without a row in labels.csv"
    )


def test_many_problems_of_a_kind_are_counted(tmp_path: Path) -> None:
    table(tmp_path / "labels.csv", [("file", "x"), *((f"{n}.png", 1) for n in range(70))])
    listing = listed(csv_table, "north", tmp_path, CsvForm(), NONE)
    assert len(listing.problems) == LISTED + 1
    assert "missing files: 50 more" in str(listing.problems[-1]) and listing.problems[-1].fatal


def test_csv_listed_twice(site: Path) -> None:
    with (site / "labels.csv").open("a") as file:
        file.write("a/../a/0.png,p0,1,0,0\n")
    listing = listed(csv_table, "north", site, FORM, NONE)
    assert len(listing.cases) == 4
    assert "labels.csv, line 6: 'a/../a/0.png' is listed in line 2, too" in texts(
        listing.problems, fatal=True
    )


def test_csv_same_name_with_two_suffixes(site: Path) -> None:
    shutil.copy(site / "b.jpg", site / "b.png")
    with (site / "labels.csv").open("a") as file:
        file.write("b.png,p2,1,0,0\n")
    assert "case 'b' is also b.jpg" in texts(
        listed(csv_table, "north", site, FORM, NONE).problems, fatal=True
    )


def test_csv_split_column_and_a_leak(site: Path) -> None:
    rows = list(csv.reader((site / "labels.csv").open()))
    splits = ["split", "train", "Valid", "val", "test"]
    table(site / "labels.csv", [[*row, split] for row, split in zip(rows, splits, strict=True)])
    form = CsvForm(patient="patient", ignored=("age",), split="split")
    listing = listed(csv_table, "north", site, form, Splitting(test=0.5, validation=0.5))
    assert [case.split for case in listing.cases] == ["train", "validation", "validation", "test"]
    _, leak = listing.problems
    assert leak.fatal and "patient 'p0' is in the train cases (a/0) and in the validation cases (a/1)" in str(
        leak
    )
    table(
        site / "labels.csv",
        [[*row, "all" if n == 1 else s] for n, (row, s) in enumerate(zip(rows, splits, strict=True))],
    )
    found = texts(listed(csv_table, "north", site, form, NONE).problems)
    assert "line 2: column 'split' holds 'all'; allowed: train, validation, test" in found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_text(""), "empty; its first line must name the columns file, patient"),
        (
            lambda path: path.write_text("file;patient;age;x\n"),
            "no column 'file'; it has: file;patient.*separated by ';'",
        ),
        (lambda path: path.write_text("file,patient,age,x,x\n"), "column 'x' is there twice"),
        (lambda path: path.write_text("file,patient,age\n"), "no column is left to be a class"),
        (lambda path: path.write_bytes(b"file,patient,age,\xff\n"), "not UTF-8 text"),
        (lambda path: path.write_text('file,patient,age,x\n"a.png,p,1,1\n'), "not readable as a table"),
        (lambda path: (path.unlink(), path.mkdir()), "not readable as a table"),
    ],
)
def test_tables_that_cannot_be_understood(site: Path, change: Callable[[Path], object], what: str) -> None:
    change(site / "labels.csv")
    with pytest.raises(DataError, match=rf"site north: .*labels\.csv: .*{what}"):
        listed(csv_table, "north", site, FORM, NONE)


def test_csv_reads_a_byte_order_mark_and_another_delimiter(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("\ufefffile;x;;\r\na.png; 1 ;;\r\n", encoding="utf-8")
    picture(tmp_path / "a.png")
    listing = listed(csv_table, "north", tmp_path, CsvForm(delimiter=";"), NONE)
    assert listing.counts() == {"x": (1, 0)} and listing.problems == ()


def test_csv_patient_expression(site: Path) -> None:
    for wrong, what in (("(", "not a regular"), ("a", "0 groups"), ("(a)(b)", "2 groups")):
        with pytest.raises(FederationError, match=what):
            CsvForm(patient_in=wrong)
    with pytest.raises(FederationError, match="both given"):
        CsvForm(patient="p", patient_in="(a)")
    form = CsvForm(classes=("Nodule",), patient_in=r"^(a)/")
    found = texts(listed(csv_table, "north", site, form, NONE).problems)
    assert "line 5: column 'file' holds 'b.jpg'; allowed: a path in which `patient_in`" in found


def test_csv_without_patients_is_told_so(site: Path) -> None:
    said = "no column names the patient"
    form = CsvForm(ignored=("age", "patient"))
    [note] = [p for p in listed(csv_table, "north", site, form, NONE).problems if said in p.what]
    assert not note.fatal and "patient: file" in note.remedy
    for given in ({"patient": "file"}, {"patient_in": r"(\w)\."}):
        listing = listed(csv_table, "north", site, replace(form, **given), NONE)
        assert said not in texts(listing.problems) and len({case.patient for case in listing.cases}) == 4


def test_present_and_absent_at_once_is_refused() -> None:
    with pytest.raises(DataError, match="'x' is present and absent"):
        image_case("a", Path("a"), "p", "train", frozenset("x"), frozenset("x"))


# ------------------------------------------------------------------------------------------------ splits


def cases(count: int, *, per_patient: int = 3, positives: int = 0) -> tuple[Case, ...]:
    return tuple(
        image_case(
            f"i{n}",
            Path(f"{n}.png"),
            f"p{n // per_patient}",
            "train",
            frozenset("x") if n < positives else frozenset(),
            frozenset() if n < positives else frozenset("x"),
        )
        for n in range(count)
    )


def splits(found: Iterable[Case]) -> dict[str, Split]:
    return {case.name: case.split for case in found}


def test_splits_keep_patients_whole_and_hold_their_shares() -> None:
    found = split_patients(cases(300), "north", Splitting(test=0.2, validation=0.25))
    whole: dict[str, set[str]] = {}
    for case in found:
        whole.setdefault(case.patient, set()).add(case.split)
    assert all(len(value) == 1 for value in whole.values())
    count = [sum(value == {split} for value in whole.values()) for split in ("train", "validation", "test")]
    assert count == [60, 20, 20]


def test_splits_depend_on_seed_and_site_not_on_order() -> None:
    given = cases(90)
    first = splits(split_patients(given, "north", Splitting(seed=1)))
    assert first == splits(split_patients(given[::-1], "north", Splitting(seed=1)))
    assert first != splits(split_patients(given, "north", Splitting(seed=2)))
    assert first != splits(split_patients(given, "south", Splitting(seed=1)))
    small, large = (
        {n for n, s in splits(split_patients(given, "north", Splitting(test=share))).items() if s == "test"}
        for share in (0.2, 0.4)
    )
    assert small < large


def test_a_given_split_stays() -> None:
    given = [image_case(f"t{n}", Path(f"t{n}"), f"t{n}", "test", frozenset(), frozenset()) for n in range(3)]
    found = split_patients([*cases(30), *given], "north", Splitting(test=0.5, validation=0.2))
    assert [case.name for case in found if case.split == "test"] == ["t0", "t1", "t2"]
    assert len({case.patient for case in found if case.split == "validation"}) == 2


def test_small_sites_keep_a_training_patient() -> None:
    assert set(splits(split_patients(cases(3), "north", Splitting(test=0.9))).values()) == {"train"}
    found = split_patients(cases(6), "north", Splitting(test=0.9, validation=0.9))
    assert sorted({case.split for case in found}) == ["test", "train"]


def test_stratified_splits_hold_the_share_in_each_stratum() -> None:
    found = split_patients(
        cases(100, per_patient=1, positives=20),
        "north",
        Splitting(test=0.2, validation=0.25),
        stratified=True,
    )
    counts = listing_of(("x",), found, "s").counts
    assert (counts("train")["x"], counts("validation")["x"], counts("test")["x"]) == (
        (12, 48),
        (4, 16),
        (4, 16),
    )


def test_balanced_counts_each_class_on_its_own() -> None:
    pool = tuple(
        image_case(
            f"i{n}",
            Path(f"{n}"),
            f"{n}",
            "train",
            frozenset(c for c in "xy" if n % (2 + (c == "y")) == 0),
            frozenset(c for c in "xy" if n % (2 + (c == "y"))),
        )
        for n in range(60)
    )
    found = balanced(pool, ("x", "y"), positives=5, negatives=7, seed=0)
    assert listing_of(("x", "y"), found, "s").counts("test") == {"x": (5, 7), "y": (5, 7)}
    truth = {case.name: case for case in pool}
    assert all(c.present <= truth[c.name].present and c.absent <= truth[c.name].absent for c in found)
    assert found == balanced(pool, ("x", "y"), positives=5, negatives=7, seed=0)
    assert found != balanced(pool, ("x", "y"), positives=5, negatives=7, seed=1)
    with pytest.raises(DataError, match="21 images with 'y' present are asked for, 20 are there"):
        balanced(pool, ("x", "y"), positives=21, negatives=7, seed=0)


# ------------------------------------------------------------------------------------------ between sites


def test_leaks_between_sites(tmp_path: Path) -> None:
    def at(site: str, name: str, patient: str, split: Split, present: str = "x", absent: str = "") -> Case:
        return image_case(
            name, picture(tmp_path / site / name), patient, split, frozenset(present), frozenset(absent)
        )

    north = [at("north", "a.png", "1", "train"), at("north", "b.png", "2", "test", "", "x")]
    south = [
        at("south", "c.png", "1", "train", "", "x"),
        at("south", "d.png", "9", "train"),
        at("south", "e.png", "8", "train"),
    ]
    shutil.copy(tmp_path / "north/b.png", tmp_path / "south/d.png")
    shutil.copy(tmp_path / "north/a.png", tmp_path / "south/e.png")

    def problems(first: str, second: str) -> list[Problem]:
        return federation_problems(
            {
                "north": listing_of(("x",), tuple(north), first),
                "south": listing_of(("x",), tuple(south), second),
            }
        )

    found = problems("NIH", "NIH")
    assert len(found) == 3
    assert found[0].fatal and "patient '1' of NIH is also at site north (case 'a.png')" in str(found[0])
    assert found[
        1
    ].fatal and "train case 'd.png' is, byte by byte, that of test case 'b.png' at site north" in str(
        found[1]
    )
    assert not found[2].fatal and "train case 'e.png'" in str(found[2])
    assert "patient" not in texts(problems("NIH", "CheXpert"))
    shared = {
        "north": listing_of(("x",), tuple(north), "a"),
        "south": listing_of(("x",), (north[0],), "b"),
    }
    assert "case 'a.png' is the same file as case 'a.png' at site north" in texts(federation_problems(shared))


def test_a_class_without_a_positive_anywhere() -> None:
    given = tuple(
        image_case(f"{n}", Path(f"{n}"), f"{n}", "train", frozenset("y"), frozenset("x")) for n in range(2)
    )
    found = federation_problems(
        {"north": listing_of(("x", "y"), given, "s"), "south": listing_of(("x",), (), "t")}
    )
    assert [problem.fatal for problem in found] == [True, False]
    assert "site north, south: class 'x' is present in no training case of any site" in str(found[0])
    assert "class 'y' is absent in no training case" in str(found[1])


def test_contents_compares_whole_files(tmp_path: Path) -> None:
    names = {"a": b"x" * 9000, "b": b"x" * 9000, "c": b"x" * 8999 + b"y", "d": b"x", "e": b"x"}
    for name, content in names.items():
        (tmp_path / name).write_bytes(content)
    found = [[f.name for f in group] for group in contents([*sorted(tmp_path.iterdir()), tmp_path / "gone"])]
    assert found == [["a", "b"], ["d", "e"]]


def test_find_images_passes_over_hidden_files(tmp_path: Path) -> None:
    for name in ("b.PNG", "a/c.jpeg", ".hidden.png", "__MACOSX/._b.png", ".git/x.png"):
        picture(tmp_path / name)
    (tmp_path / "a/readme.txt").write_text("x")
    found, others = find_images(tmp_path)
    assert [f.relative_to(tmp_path).as_posix() for f in found] == ["a/c.jpeg", "b.PNG"]
    assert [f.name for f in others] == ["readme.txt"]
    assert [f.name for f in find_images(tmp_path, deep=False)[0]] == ["b.PNG"]


# ------------------------------------------------------------------------------------------ ChestX-ray14

# The header of the published table; the last column has no name.
HEADER = (
    "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
    "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y],"
)
FINDINGS = {
    "00000001_000.png": "Cardiomegaly",
    "00000001_001.png": "Cardiomegaly|Emphysema",
    "00000002_000.png": "No Finding",
    "00001336_000.png": "Infiltration|Effusion",
    "00003923_000.png": "Effusion",
    "00003923_013.png": "Pleural_Thickening",
    "00003923_014.png": "No Finding",
    "00004000_000.png": "Nodule|Mass|Hernia",
    "00006585_006.png": "Pneumothorax",
    "00006585_007.png": "Pneumothorax",
    "00030805_000.png": "No Finding",
}
TESTED = ("00000002_000.png", "00004000_000.png")


def chest(root: Path, findings: Mapping[str, str] = FINDINGS, *, folders: bool = True) -> Path:
    lines = [HEADER]
    for name, text in findings.items():
        lines.append(f"{name},{text},{int(name[9:12])},{int(name[:8])},058,M,PA,2682,2749,0.143,0.143,")
        picture(root / (f"images_{batch_of(name):03d}/images" if folders else "images") / name)
    (root / "Data_Entry_2017.csv").write_text("\n".join(lines) + "\n")
    (root / "train_val_list.txt").write_text("\n".join(name for name in findings if name not in TESTED))
    (root / "test_list.txt").write_text("\n".join(TESTED) + "\n")
    return root


ALL = ChestXray14(splits="train")


def test_batches_by_name() -> None:
    assert [batch_of(name) for name in BATCHES] == list(range(1, 13))
    assert [batch_of(n) for n in ("00001335_006.png", "00003923_013.png", "00030805_000.png")] == [1, 2, 12]
    assert batch_of("cov_000.png") is None and batch_of("00000000_000.png") is None
    assert list(BATCHES) == sorted(BATCHES)


@pytest.mark.parametrize("folders", [True, False])
def test_chestxray14_labels_and_official_splits(tmp_path: Path, folders: bool) -> None:
    listing = listed(
        chestxray14, "north", chest(tmp_path, folders=folders), ChestXray14(), Splitting(validation=0)
    )
    assert listing.findings == CLASSES and len(CLASSES) == 14 and listing.problems == ()
    found = by_name(listing)
    assert len(found) == len(FINDINGS)
    both = found["00000001_001"]
    assert both.present == {"Cardiomegaly", "Emphysema"} and both.absent == set(CLASSES) - both.present
    assert found["00000002_000"].present == frozenset() and found["00000002_000"].absent == set(CLASSES)
    assert {case.name + ".png" for case in listing.cases if case.split == "test"} == set(TESTED)
    assert found["00003923_013"].patient == found["00003923_014"].patient == "3923"
    assert read_picture(both.images[0], site="north").pixels.shape == (1, 8, 8)


def test_chestxray14_validation_leaves_the_official_test_alone(tmp_path: Path) -> None:
    listing = listed(chestxray14, "north", chest(tmp_path), ChestXray14(), Splitting(validation=0.4))
    assert {case.name + ".png" for case in listing.cases if case.split == "test"} == set(TESTED)
    found = patients(listing)
    assert len(found["validation"]) == 2 and not found["validation"] & (found["train"] | found["test"])


def test_chestxray14_batches_leave_out_patients_of_another_batch(tmp_path: Path) -> None:
    root = chest(tmp_path)

    def names(**form: object) -> list[str]:
        return [
            c.name
            for c in listed(
                chestxray14, "n", root, from_dict(ChestXray14, {"splits": "train", **form}, what="t"), NONE
            ).cases
        ]

    assert names(batches=[2]) == ["00001336_000", "00003923_000", "00003923_013"]
    assert names(batches=[3]) == ["00004000_000", "00006585_006"]
    assert names(batches=[3], straddling="keep") == ["00003923_014", "00004000_000", "00006585_006"]
    assert names(batches=[2, 3])[:4] == ["00001336_000", "00003923_000", "00003923_013", "00003923_014"]
    assert names(batches=[2, 3], first=1) == ["00001336_000", "00003923_014"]
    assert names(batches=[3], first=1) == ["00004000_000"]
    listing = listed(chestxray14, "n", root, ChestXray14(splits="train", batches=(3,)), NONE)
    (note,) = listing.problems
    assert (
        not note.fatal
        and "batch 3: 1 images left out, whose patient (3923) begins in another batch" in str(note)
    )


def test_chestxray14_sites_of_batches_share_no_patient(tmp_path: Path) -> None:
    root = chest(tmp_path)
    read = {
        kind: {
            f"s{b}": listed(
                chestxray14,
                f"s{b}",
                root,
                from_dict(ChestXray14, {"splits": "train", "batches": [b], "straddling": kind}, what="t"),
                NONE,
            )
            for b in (2, 3, 4)
        }
        for kind in ("drop", "keep")
    }
    assert "is also at site" not in texts(federation_problems(read["drop"]))
    found = texts(federation_problems(read["keep"]))
    assert "patient '3923' of ChestX-ray14 is also at site s2" in found
    assert "patient '6585' of ChestX-ray14 is also at site s3" in found


def test_chestxray14_folders_overrule_names(tmp_path: Path) -> None:
    root = chest(tmp_path)
    (root / "images_07/images").mkdir(parents=True)
    (root / "images_001/images/00000002_000.png").rename(root / "images_07/images/00000002_000.png")
    listing = listed(chestxray14, "n", root, ChestXray14(splits="train", batches=(7,)), NONE)
    assert [case.name for case in listing.cases] == ["00000002_000"]


def test_chestxray14_needs_only_the_archives_it_reads(tmp_path: Path) -> None:
    root = chest(tmp_path)
    shutil.rmtree(root / "images_001")
    assert listed(chestxray14, "n", root, ChestXray14(splits="train", batches=(2,)), NONE).problems == ()
    found = texts(listed(chestxray14, "n", root, ALL, NONE).problems, fatal=True)
    assert (
        "site n: 00000001_000.png: missing: listed in Data_Entry_2017.csv, line 2; add the file, or name"
        in found
    )


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        (
            "00000005_000.png",
            "Effusion|Infiltrate",
            "'Finding Labels' holds 'Infiltrate'; allowed, joined by |: Atelectasis",
        ),
        ("00000005_000.png", "No Finding|Effusion", "No Finding stands alone"),
        ("00000005_000.png", "Effusion||Mass", "holds ''"),
    ],
)
def test_chestxray14_rows_that_cannot_be_read(tmp_path: Path, name: str, text: str, what: str) -> None:
    listing = listed(chestxray14, "n", chest(tmp_path, {**FINDINGS, name: text}), ALL, NONE)
    (problem,) = listing.problems
    assert problem.fatal and f"Data_Entry_2017.csv, line {len(FINDINGS) + 2}: column " in str(problem)
    assert what in str(problem) and len(listing.cases) == len(FINDINGS)


def test_chestxray14_a_patient_that_does_not_fit_the_name(tmp_path: Path) -> None:
    path = chest(tmp_path) / "Data_Entry_2017.csv"
    path.write_text(path.read_text().replace("No Finding,0,2,", "No Finding,0,3,"))
    found = texts(listed(chestxray14, "n", tmp_path, ALL, NONE).problems, fatal=True)
    assert "column 'Patient ID' holds '3', but the image 00000002_000.png is of patient 2" in found


def test_chestxray14_leaks_are_errors(tmp_path: Path) -> None:
    root = chest(tmp_path)
    (root / "test_list.txt").write_text("\n".join([*TESTED, "00000001_000.png"]))
    with pytest.raises(DataError, match=r"test_list\.txt: 00000001_000\.png is in both lists"):
        listed(chestxray14, "n", root, ChestXray14(), NONE)
    (root / "train_val_list.txt").write_text("\n".join(set(FINDINGS) - {*TESTED, "00000001_000.png"}))
    found = texts(listed(chestxray14, "n", root, ChestXray14(), NONE).problems, fatal=True)
    assert "patient '1' is in the test cases (00000001_000) and in the train cases (00000001_001)" in found


def test_chestxray14_lists_and_tables_that_are_missing(tmp_path: Path) -> None:
    root = chest(tmp_path)
    (root / "train_val_list.txt").write_text("\n".join(set(FINDINGS) - {*TESTED, "00001336_000.png"}))
    found = texts(listed(chestxray14, "n", root, ChestXray14(), NONE).problems, fatal=True)
    assert "00001336_000.png: in neither of train_val_list.txt, test_list.txt; add it" in found
    (root / "test_list.txt").unlink()
    with pytest.raises(DataError, match=r"site n: .*test_list\.txt: no such file.*`splits` to seed"):
        listed(chestxray14, "n", root, ChestXray14(), NONE)
    shutil.copy(root / "Data_Entry_2017.csv", root / "Data_Entry_2017_v2020.csv")
    with pytest.raises(DataError, match="got Data_Entry_2017.csv, Data_Entry_2017_v2020.csv; name the table"):
        listed(chestxray14, "n", root, ALL, NONE)
    assert listed(
        chestxray14, "n", root, ChestXray14(splits="train", table="Data_Entry_2017.csv"), NONE
    ).cases
    with pytest.raises(DataError, match="`batches` names 13; there are 1 to 12"):
        listed(
            chestxray14,
            "n",
            root,
            ChestXray14(splits="train", batches=(13,), table="Data_Entry_2017.csv"),
            NONE,
        )


def test_chestxray14_a_name_in_two_folders(tmp_path: Path) -> None:
    root = chest(tmp_path)
    picture(root / "images_012/images/00000001_000.png")
    found = texts(listed(chestxray14, "n", root, ALL, NONE).problems, fatal=True)
    assert (
        "images_012/images/00000001_000.png: an image of this name is also images_001/images/00000001_000.png"
        in found
    )


def test_chestxray14_columns_with_other_findings(tmp_path: Path) -> None:
    """A table in the same columns: other classes, texts that are none, findings that are not known."""
    rows = [
        ("Image Index", "Finding Labels", "Patient ID"),
        ("cov_0.png", "COVID-19", "17"),
        ("cov_1.png", "Other", "18a"),
        ("cov_2.png", "nan", "19"),
        ("cov_3.png", "", "019"),
    ]
    table(tmp_path / "labels.csv", rows)
    for row in rows[1:]:
        picture(tmp_path / "images" / row[0])
    form = ChestXray14(
        table="labels.csv", classes=("COVID-19",), others=("Other",), splits="seed", source="cov"
    )
    listing = listed(chestxray14, "d", tmp_path, form, NONE)
    assert listing.problems == () and listing.counts() == {"COVID-19": (1, 1)} and listing.source == "cov"
    assert [case.patient for case in listing.cases] == ["17", "18a", "19", "19"]
    found = texts(
        listed(
            chestxray14, "d", tmp_path, ChestXray14(table="labels.csv", splits="seed", batches=(1,)), NONE
        ).problems
    )
    assert "line 2: column 'Image Index' holds 'cov_0.png', which is in no batch" in found


# --------------------------------------------------------------------------------- a folder per class


def tuberculosis(root: Path, positives: int = 10, negatives: int = 50) -> Path:
    base = root / tbx.FOLDER
    for name, count in (("Tuberculosis", positives), ("Normal", negatives)):
        for n in range(1, count + 1):
            picture(base / name / f"{name}-{n}.png")
        (base / f"{name}.metadata.xlsx").write_bytes(b"not read")
    (base / "README.md.txt").write_text("not read")
    return root


@pytest.mark.parametrize("inside", [True, False])
def test_tuberculosis_database(tmp_path: Path, inside: bool) -> None:
    root = tuberculosis(tmp_path)
    listing = listed(
        tbx, "e", root / tbx.FOLDER if inside else root, None, Splitting(test=0.2, validation=0.25)
    )
    assert listing.findings == ("Tuberculosis",) and listing.problems == ()
    assert listing.counts("train") == {"Tuberculosis": (6, 30)}
    assert listing.counts("validation") == listing.counts("test") == {"Tuberculosis": (2, 10)}
    assert len({case.patient for case in listing.cases}) == 60
    assert by_name(listing)["Normal/Normal-7"].absent == {"Tuberculosis"}


def radiography(root: Path, *, nested: bool = True) -> Path:
    base = root / "COVID-19_Radiography_Dataset"
    for name, prefix, count in (
        ("COVID", "COVID", 5),
        ("Normal", "Normal", 10),
        ("Lung_Opacity", "Lung_Opacity", 4),
        ("Viral Pneumonia", "Viral Pneumonia", 2),
    ):
        for n in range(1, count + 1):
            picture(base / name / ("images" if nested else "") / f"{prefix}-{n}.png")
            if nested:
                picture(base / name / "masks" / f"{prefix}-{n}.png")
        (base / f"{name}.metadata.xlsx").write_bytes(b"not read")
    return root


@pytest.mark.parametrize("nested", [True, False])
def test_covid_database(tmp_path: Path, nested: bool) -> None:
    root = radiography(tmp_path, nested=nested)
    listing = listed(covid, "f", root, Covid(), NONE)
    assert listing.counts() == {"COVID-19": (5, 16)} and listing.problems == ()
    assert not [case for case in listing.cases if "masks" in case.images[0].parts]
    paper = listed(
        covid, "f", root / "COVID-19_Radiography_Dataset", Covid(negatives=("Normal",)), Splitting(test=0.2)
    )
    assert paper.counts() == {"COVID-19": (5, 10)} and paper.counts("test") == {"COVID-19": (1, 2)}


def test_folders_that_are_missing_empty_or_hold_other_files(tmp_path: Path) -> None:
    root = radiography(tmp_path)
    base = root / "COVID-19_Radiography_Dataset"
    (base / "COVID/images/notes.txt").write_text("x")
    shutil.rmtree(base / "Normal/images")
    (base / "Normal/images").mkdir()
    strange, empty = listed(covid, "f", root, Covid(), NONE).problems
    assert not strange.fatal and "COVID/images/notes.txt: no image by its suffix" in str(strange)
    assert empty.fatal and "site f: Normal/images: empty" in str(empty)
    shutil.rmtree(base / "Normal")
    with pytest.raises(
        DataError, match="site f: .*Normal: no such folder; there are: COVID, Lung_Opacity, Viral"
    ):
        listed(covid, "f", root, Covid(), NONE)
    with pytest.raises(DataError, match="no such folder; there are: none"):
        listed(tbx, "e", tmp_path / "nowhere", None, NONE)


def test_an_evaluation_tells_what_was_assumed_of_images(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / f"{number}.png")
        if number:
            image = Image.open(tmp_path / f"{number}.png")
            image.putalpha(100)
            image.save(tmp_path / f"{number}.png")
    table(
        tmp_path / "labels.csv", [["file", "mass"], *([f"{number}.png", number % 2] for number in range(3))]
    )
    config = SiteConfig(name="s", path=str(tmp_path), format="csv", role="test")  # type: ignore[call-arg]
    index = read_image_site(config, tmp_path, channels=1, splitting=NONE)
    space = LabelSpace(("mass",), exclusive=False, level="image")
    source = ImageData(index, space, Images(), cache=tmp_path / "cache")  # type: ignore[call-arg]
    (note,) = gathered(index, notes_on_images(source))
    assert str(note).startswith("site s: 1.png: ") and str(note).count("2 such files") == 1
