"""data/index.py and data/datasets: three layouts, names, patients, splits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.datasets.shared.listing import Splitting, image_case, parse_table
from fedatlas.data.index import (
    Naming,
    Reference,
    SiteConfig,
    SiteIndex,
    label_space_of,
    naming_of,
    read_image_site,
    read_site,
    split_validation,
)


def nnunet(root: Path, train: list[str], test: list[str] = [], channels: int = 1, **table: Any) -> Path:  # noqa: B006
    """A folder of empty files in the layout of nnU-Net raw."""
    for names, split in ((train, "Tr"), (test, "Ts")):
        for name in names:
            for channel in range(channels):
                touch(root / f"images{split}" / f"{name}_{channel:04d}.nii.gz")
            touch(root / f"labels{split}" / f"{name}.nii.gz")
    content = {"labels": {"background": 0, "liver": 1, "spleen": 2}, "channel_names": {"0": "CT"}} | table
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def index_of(root: Path, **config: Any) -> SiteIndex:
    return read_site(SiteConfig(name="x", path=str(root), **config), root.parent)


def told(root: Path, **config: Any) -> str:
    with pytest.raises((DataError, FederationError)) as error:
        index_of(root, **config)
    assert "site x" in str(error.value)
    return str(error.value)


def test_nnunet_raw(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", ["b", "a_1"], ["c"], 2, channel_names={"0": "T1", "1": "T2"})
    touch(root / "imagesTr" / "._junk_0000.nii.gz")
    index = index_of(root)
    assert [(c.name, c.split) for c in index.cases] == [("a_1", "train"), ("b", "train"), ("c", "test")]
    assert [f.name for f in index.cases[0].images] == ["a_1_0000.nii.gz", "a_1_0001.nii.gz"]
    assert index.table == {"background": 0, "liver": 1, "spleen": 2} and index.channels == 2
    assert index.cases[0].annotated == ("liver", "spleen") and not index.problems
    assert read_site(SiteConfig(name="x", path="s"), tmp_path).root == root.resolve()


def test_channels_have_their_names_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", ["a"], [], 2, channel_names={"1": "T2", "0": "T1"})
    assert index_of(root).channel_names == ("T1", "T2")
    entry = {"image": ["imagesTr/a_0000.nii.gz", "imagesTr/a_0001.nii.gz"], "label": "labelsTr/a.nii.gz"}
    for named, found in (
        ({"modality": {"0": "T1", "1": "T2"}}, ("T1", "T2")),
        ({"channel_names": ["T2", "T1"]}, ("T2", "T1")),
        ({}, ()),
    ):
        for table in ("dataset.json", "list.json"):
            (root / table).write_text(json.dumps({"labels": {"liver": 1}, "training": [entry]} | named))
            index = index_of(root, table=table, format="msd" if table == "dataset.json" else "monai")
            assert index.channel_names == found


def test_what_is_annotated_may_differ_per_case(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", ["a", "b"], annotated={"a": ["spleen"], "b": []})
    assert [c.annotated for c in index_of(root).cases] == [("spleen",), ()]
    nnunet(root, ["a", "b"], annotated={"a": ["spleen"]})
    assert "'b' has a label file but is not in" in told(root)
    nnunet(root, ["a", "b"], annotated={"a": ["kidney"], "b": []})
    assert "'kidney', which is not in the table" in told(root)


def test_annotated_that_is_no_table_is_refused(tmp_path: Path) -> None:
    """Also where the first training case has no label file."""
    root = nnunet(tmp_path / "s", ["a", "b"], annotated=[["liver"]])
    (root / "labelsTr" / "a.nii.gz").unlink()
    assert 'the key "annotated" must be a table of cases, {case: [label names]}, got list' in told(root)
    nnunet(root, ["a"], annotated=[])
    assert "got list" in told(root)
    nnunet(root, ["a"], annotated=None)
    assert index_of(root).cases[0].annotated == ("liver", "spleen")


def test_files_of_another_ending_are_noted(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", ["a", "b"], ["t"], numTraining=3)
    for name in ("imagesTr/c_0000.nii", "labelsTr/c.nii", "imagesTs/u_0000.NII.GZ", "labelsTs/u.Nii"):
        touch(root / name)
    for name in ("imagesTr/.hidden_0000.nii", "labelsTr/notes.txt", "labelsTr/folder.nii/inside.txt"):
        touch(root / name)
    index = index_of(root)
    assert [case.name for case in index.cases] == ["a", "b", "t"]
    numbers, *notes = index.problems
    assert not any(note.fatal for note in index.problems) and "numTraining is 3" in numbers.what
    assert [note.file for note in notes] == [
        "imagesTr/c_0000.nii",
        "labelsTr/c.nii",
        "imagesTs/u_0000.NII.GZ",
        "labelsTs/u.Nii",
    ]
    assert "does not end in .nii.gz, the file_ending of dataset.json" in str(notes[0])
    root = tmp_path / "t"
    for name in ("imagesTr/a_0000.nii", "labelsTr/a.nii", *(f"imagesTr/b{n}_0000.nii.gz" for n in range(30))):
        touch(root / name)
    (root / "dataset.json").write_text(json.dumps({"labels": {"liver": 1}, "file_ending": ".nii"}))
    notes = index_of(root).problems
    assert len(notes) == 21 and notes[0].file == "imagesTr/b0_0000.nii.gz" and "10 more" in notes[20].what


def test_missing_files_are_kept_as_problems(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", ["a", "b", "c"], [], 2, channel_names={"0": "T1", "1": "T2"})
    (root / "labelsTr" / "a.nii.gz").unlink()
    (root / "imagesTr" / "b_0001.nii.gz").unlink()
    touch(root / "imagesTr" / "nonumber.nii.gz")
    index = index_of(root)
    assert [case.name for case in index.cases] == ["c"]
    text = "\n".join(map(str, index.problems))
    for part in (
        "site x: labelsTr/a.nii.gz: missing",
        "imagesTr/b_0001.nii.gz: missing",
        "without a channel number",
    ):
        assert part in text
    root = nnunet(tmp_path / "t", ["a"], numTraining=3)
    assert [(p.fatal, "numTraining is 3" in p.what) for p in index_of(root).problems] == [(False, True)]


def test_msd(tmp_path: Path) -> None:
    root = tmp_path / "Task09"
    for name in ("imagesTr/a.nii.gz", "labelsTr/a.nii.gz", "imagesTs/b.nii.gz"):
        touch(root / name)
    content = {
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "spleen"},
        "training": [
            {"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"},
            {"image": "./imagesTr/gone.nii.gz", "label": "./labelsTr/gone.nii.gz"},
        ],
        "test": ["./imagesTs/b.nii.gz"],
    }
    (root / "dataset.json").write_text(json.dumps(content))
    index = index_of(root)
    assert [(c.name, c.split, c.annotated) for c in index.cases] == [
        ("a", "train", ("spleen",)),
        ("b", "test", ()),
    ]
    assert index.cases[1].label is None and index.channels == 1 and index.table["spleen"] == 1
    assert "imagesTr/gone.nii.gz: missing" in str(index.problems[0])


def test_monai_datalist(tmp_path: Path) -> None:
    root = tmp_path / "s"
    for name in ("t1.nii.gz", "t2.nii.gz", "l.nii.gz", "v.nii.gz", "vl.nii.gz"):
        touch(root / name)
    entry = {
        "image": ["t1.nii.gz", "t2.nii.gz"],
        "label": "l.nii.gz",
        "annotated": ["liver"],
        "patient": "P7",
        "fold": 0,
    }
    content = {
        "labels": {"liver": 1, "spleen": 2},
        "training": [entry],
        "validation": [{"image": "v.nii.gz", "label": "vl.nii.gz"}],
    }
    (root / "list.json").write_text(json.dumps(content))
    index = index_of(root, table="list.json")
    assert [len(case.images) for case in index.cases] == [2, 1] and index.cases[0].patient == "P7"
    assert [case.annotated for case in index.cases] == [("liver",), ("liver", "spleen")]
    splits = split_validation(index, seed=0, fraction=0.5)
    assert [case.name for case in splits["validation"]] == ["v"], "validation cases that are listed are kept"
    content["training"] = [{"image": "t1.nii.gz"}]
    (root / "list.json").write_text(json.dumps(content))
    assert "has no label" in str(index_of(root, table="list.json").problems[0])
    content["training"] = [{"label": "l.nii.gz"}]
    (root / "list.json").write_text(json.dumps(content))
    assert '"training"[0]' in told(root, table="list.json")


@pytest.mark.parametrize(
    ("labels", "part"),
    [
        ({"background": 0, "organ": [1, 2], "lesion": 2}, "'organ' is a region"),
        ({"background": 0, "liver": 1, "spleen": 1}, "share the integer 1"),
        ({"background": 0, "liver": 1, "ignore": 2}, "'ignore' is not read"),
        ({"liver": 0}, "the integer 0 must be 'background'"),
        ({"background": 1}, "must be 'background'"),
        ({"background": 0, "liver": 1.5}, "not a whole number"),
        ({"background": 0, "liver": "one"}, "not a whole number"),
        ({}, "must be a table"),
        (["liver"], "must be a table"),
    ],
)
def test_tables_that_are_not_read(tmp_path: Path, labels: Any, part: str) -> None:
    root = nnunet(tmp_path / "s", ["a"], labels=labels)
    text = told(root)
    assert part in text and "dataset.json" in text


def test_both_forms_of_a_table() -> None:
    assert parse_table({"0": "Background", "1": "liver"}, "") == {"background": 0, "liver": 1}
    assert parse_table({"liver": "3"}, "") == {"background": 0, "liver": 3}


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert "no such folder" in told(tmp_path / "none")
    root = tmp_path / "s"
    root.mkdir()
    assert "no such file" in told(root)
    (root / "dataset.json").write_text("{")
    assert "not readable as JSON" in told(root)
    (root / "dataset.json").write_text("[]")
    assert "a JSON object is expected" in told(root)
    nnunet(root, ["a"], file_ending=".png")
    assert "file_ending is '.png'" in told(root)


def test_names_aliases_and_restriction(tmp_path: Path) -> None:
    labels = {"background": 0, "Leber": 4, "Milz": 2, "Rest": 7}
    root = nnunet(tmp_path / "s", ["a"], labels=labels)
    index = index_of(root, aliases={"Leber": "liver", "Milz": "spleen"}, annotated=("Leber", "spleen"))
    assert index.used == ("Leber", "Milz")
    space = label_space_of([index.brings], [["spleen", "liver"]])
    assert space.names == ("background", "liver", "spleen") and space.groups == ((2, 1),)
    strict, _ = naming_of(index, space)
    assert strict.integers == {0: "background", 4: "liver", 2: "spleen", 7: "background"}
    assert strict.classes == {"Leber": 1, "Milz": 2}
    with pytest.raises(FederationError, match="site x: label 'Rest' is not in the label space"):
        naming_of(index_of(root, aliases=index.aliases), space)
    with pytest.raises(FederationError, match="alias 'Lunge' matches none"):
        naming_of(index_of(root, aliases={"Lunge": "liver"}, annotated=("Milz",)), space)
    with pytest.raises(FederationError, match="points to 'lung'"):
        naming_of(index_of(root, aliases={"Milz": "lung"}, annotated=("Milz",)), space)
    assert "`annotated` names 'Niere'" in told(root, annotated=("Niere",))


def test_several_labels_that_become_one_class_must_all_be_annotated(tmp_path: Path) -> None:
    labels = {"background": 0, "liver": 1, "tumour": 2}
    root = nnunet(
        tmp_path / "s",
        ["a", "b"],
        labels=labels,
        annotated={"a": ["liver"], "b": ["liver", "tumour"]},
    )
    index = index_of(root, aliases={"tumour": "liver"})
    strict, _ = naming_of(index, LabelSpace(("background", "liver")))
    assert [strict.known(case.annotated) for case in index.cases] == [frozenset(), frozenset({1})]


def test_a_class_of_which_annotated_leaves_out_a_label_is_refused(tmp_path: Path) -> None:
    """Drawn right kidneys would be taken for verified background."""
    root = nnunet(tmp_path / "s", ["a"], labels={"background": 0, "left kidney": 1, "right kidney": 2})
    space = LabelSpace(("background", "kidney"))
    aliases = {"left kidney": "kidney", "right kidney": "kidney"}
    text = "site x: `annotated` names 'left kidney' and leaves out 'right kidney', and both are 'kidney'"
    with pytest.raises(FederationError, match=text):
        naming_of(index_of(root, aliases=aliases, annotated=("left kidney",)), space)
    for annotated in (("left kidney", "right kidney"), ("kidney",), None):
        strict, _ = naming_of(index_of(root, aliases=aliases, annotated=annotated), space)
        assert strict.classes == {"left kidney": 1, "right kidney": 1}
    apart = {"left kidney": "kidney", "right kidney": "background"}
    strict, _ = naming_of(index_of(root, aliases=apart, annotated=("left kidney",)), space)
    assert strict.classes == {"left kidney": 1}
    naming_of(index_of(root, aliases=aliases, annotated=("left kidney",), role="test"), space)


def test_a_listed_name_is_the_sites_own_where_names_are_exchanged(tmp_path: Path) -> None:
    """Both sides were taken, as the other side's alias is the listed name."""
    root = nnunet(tmp_path / "s", ["a"], labels={"background": 0, "left kidney": 1, "right kidney": 2})
    aliases = {"left kidney": "right kidney", "right kidney": "left kidney"}
    index = index_of(root, aliases=aliases, annotated=("left kidney",))
    assert index.used == ("left kidney",) and index.brings == ("right kidney",)
    index = replace(index, findings=("left kidney", "right kidney"))
    assert index.used_findings == ("left kidney",)


def test_a_finding_of_which_annotated_leaves_out_a_column_is_refused(tmp_path: Path) -> None:
    """An image with the other one would be taken for verified without it."""
    (tmp_path / "a.png").touch()
    (tmp_path / "labels.csv").write_text("file,left,right\na.png,0,1\n")
    aliases = {"left": "effusion", "right": "effusion"}
    space = LabelSpace(("effusion",), (), False, "image")

    def naming(*annotated: str) -> Naming:
        config = SiteConfig(name="x", path=str(tmp_path), format="csv", aliases=aliases, annotated=annotated)
        splitting = Splitting(test=0, validation=0)
        return naming_of(read_image_site(config, tmp_path, channels=1, splitting=splitting), space)[0]

    with pytest.raises(FederationError, match="names 'left' and leaves out 'right', and both are 'effusion'"):
        naming("left")
    assert naming("effusion").classes == {"left": 0, "right": 0}


def test_the_reference_is_read_beside_the_label(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", ["a", "b"])
    touch(root / "labelsTr_all" / "b.nii.gz")
    full = {"labels": {"background": 0, "kidney": 1, "liver": 2}, "annotated": {"b": ["kidney"]}}
    (root / "all_labels.json").write_text(json.dumps(full))
    index = index_of(root, reference=Reference())
    assert [c.reference and c.reference.name for c in index.cases] == [None, "b.nii.gz"]
    strict, scoring = naming_of(index, LabelSpace(("background", "liver", "spleen")))
    assert scoring.known(index.cases[1].reference_annotated) == frozenset(), "not in the space: not scored"
    assert strict.known(index.cases[1].annotated) == frozenset({1, 2})
    assert "hold no label file of any case" in told(root, reference=Reference(labels="elsewhere"))


def test_patients(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "s", ["p1_a", "p1_b", "p2_a", "odd"], patients={"odd": "p2"})
    index = index_of(root, patient=r"^(p\d+)_")
    assert {case.name: case.patient for case in index.cases} == {
        "p1_a": "p1",
        "p1_b": "p1",
        "p2_a": "p2",
        "odd": "p2",
    }
    assert "finds nothing" in told(root, patient=r"^(q\d+)")
    for wrong in ("(", "p1", "(a)(b)"):
        with pytest.raises(FederationError, match="site x: patient"):
            SiteConfig(name="x", path=".", patient=wrong)


def test_keys_of_patients_that_are_no_case(tmp_path: Path) -> None:
    """None is a case: refused. Some are none: an error, or a note where every case has its patient."""
    names = [f"P{patient}_{scan}" for patient in range(1, 4) for scan in "ab"]
    table = {name: name[:2] for name in names}
    root = nnunet(tmp_path / "s", names, patients={f"{name}_0000": name[:2] for name in names})
    text = told(root)
    assert "dataset.json" in text and "'P1_a_0000', 'P1_b_0000', 'P2_a_0000' and 3 more" in text
    assert "the cases are: 'P1_a', 'P1_b', 'P2_a' and 3 more" in text

    nnunet(root, names, patients={("P1_a_0000" if name == "P1_a" else name): name[:2] for name in names})
    [problem] = index_of(root).problems
    assert problem.fatal and problem.file == "dataset.json"
    assert "no case here: 'P1_a_0000', while these cases are not in it: 'P1_a'" in problem.what

    nnunet(root, names, patients=table | {"P4_a": "P4"})
    index = index_of(root)
    [note] = index.problems
    assert not note.fatal and note.what.endswith("no case here: 'P4_a'")
    assert {case.name: case.patient for case in index.cases} == table

    nnunet(root, names, patients={"P1_a": "P1", "P1_b": "P1"})
    assert not index_of(root).problems, "a table may leave cases out"
    for case in names:
        (root / "labelsTr" / f"{case}.nii.gz").unlink()
    assert all("labelsTr" in problem.file for problem in index_of(root).problems), (
        "what is wrong is said first"
    )
    nnunet(root, names, patients=[["P1_a", "P1"]])
    assert "must be {case: patient}, got list" in told(root)


@pytest.mark.parametrize("nothing", [None, float("nan"), "", " "])
def test_a_patient_that_is_left_open_is_missing(tmp_path: Path, nothing: Any) -> None:
    """As exports of tables write it: it is not one patient "None"."""
    names = ["p1_a", "p1_b", "p2_a"]
    root = nnunet(tmp_path / "s", names, patients={"p1_a": nothing, "p1_b": nothing, "p2_a": 7})
    assert [case.patient for case in index_of(root).cases] == ["p1_a", "p1_b", "7"]
    assert [case.patient for case in index_of(root, patient=r"^(p\d+)").cases] == ["p1", "p1", "7"]
    entries = [
        {"image": f"imagesTr/{name}_0000.nii.gz", "label": f"labelsTr/{name}.nii.gz", "patient": nothing}
        for name in names
    ]
    entries[2]["patient"] = 7
    for form in ("monai", "msd"):
        (root / "list.json").write_text(json.dumps({"labels": {"liver": 1}, "training": entries}))
        found = index_of(root, format=form, table="list.json").cases
        assert [case.patient for case in found] == ["p1_a", "p1_b", "7"]


def test_validation_is_split_by_patient_and_by_nothing_else(tmp_path: Path) -> None:
    names = [f"p{n}_{scan}" for n in range(10) for scan in "ab"]
    index = index_of(nnunet(tmp_path / "s", names, ["t"]), patient=r"(p\d+|t)")

    def chosen(index: SiteIndex, seed: int = 0, fraction: float = 0.3) -> list[str]:
        splits = split_validation(index, seed=seed, fraction=fraction)
        patients = [{case.patient for case in splits[split]} for split in ("train", "validation", "test")]
        assert not patients[0] & patients[1] and patients[2] == {"t"}
        assert len(splits["train"]) + len(splits["validation"]) == len(names)
        return [case.name for case in splits["validation"]]

    assert len(chosen(index)) == 6
    shuffled = SiteIndex(**{**index.__dict__, "cases": index.cases[::-1]})
    assert sorted(chosen(shuffled)) == sorted(chosen(index))
    assert set(chosen(index, fraction=0.1)) < set(chosen(index))
    assert chosen(index, seed=1) != chosen(index)
    assert len(chosen(index, fraction=0.001)) == 2 and len(chosen(index, fraction=1.0)) == 18
    assert chosen(index, fraction=0.0) == []
    lone = index_of(nnunet(tmp_path / "lone", ["a"]))
    assert len(split_validation(lone, seed=0, fraction=0.5)["train"]) == 1
    two = index_of(nnunet(tmp_path / "two", ["a", "b"]))
    assert len(split_validation(two, seed=0, fraction=0.9)["train"]) == 1


def test_validation_is_drawn_from_cases_that_can_be_scored(tmp_path: Path) -> None:
    """As many as of the labelled cases alone, and the same ones; what has no label trains."""
    names = [f"l{n}" for n in range(4)] + [f"u{n}" for n in range(16)]
    index = index_of(nnunet(tmp_path / "s", names))
    cases = tuple(
        case if case.name[0] == "l" else replace(case, label=None, annotated=()) for case in index.cases
    )
    part, alone = replace(index, cases=cases), replace(index, cases=cases[:4])
    for seed in range(20):
        for fraction in (0.1, 0.5, 1.0):
            found = split_validation(part, seed=seed, fraction=fraction)
            same = split_validation(alone, seed=seed, fraction=fraction)
            assert found["validation"] == same["validation"] != () and found["train"] == (
                *same["train"],
                *cases[4:],
            )
            assert same["train"]
    scored = replace(index, cases=(cases[0], replace(cases[4], reference=Path("r.nii.gz")), *cases[5:]))
    chosen = {split_validation(scored, seed=seed, fraction=0.1)["validation"][0].name for seed in range(20)}
    assert chosen == {"l0", "u0"}
    # the split of before, of a site that labels all
    whole = split_validation(index, seed=0, fraction=0.25)["validation"]
    assert [case.name for case in whole] == ["l0", "l1", "u11", "u2", "u3"]


def test_one_of_two_names_that_is_absent_does_not_make_the_class_absent() -> None:
    naming = Naming({}, {"nodule": 0, "mass": 0})

    def told(present: list[str], absent: list[str]) -> object:
        return naming.findings(image_case("c", Path("c"), "p", "train", present, absent))

    assert told([], ["nodule"]) == (frozenset(), frozenset()), "of a mass nobody says anything"
    assert told([], ["nodule", "mass"]) == (frozenset(), frozenset({0}))
    assert told(["mass"], ["nodule"]) == (frozenset({0}), frozenset())
