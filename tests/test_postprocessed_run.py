"""A run that scores before and after post-processing, and what is made with its model."""

import json

import nibabel
import numpy as np
import pytest
import yaml

from fedatlas.cli import main
from fedatlas.core.labels import LabelSpace
from fedatlas.evaluation.postprocess import Postprocess, postprocess
from fedatlas.evaluation.statistics import POST, read_rows
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.federation.trained import evaluation_table


def test_a_single_case_has_no_spread() -> None:
    of = {"split": "test", "model": "best", "site": "a", "class": "liver", "metric": "dice"}
    values = [{**of, "case": case, "value": value} for case, value in (("c1", 0.9), ("c2", 0.7))]
    one, two = (evaluation_table(some).splitlines() for some in (values[:1], values))
    assert one[1] == "liver     0.900 (    –)    1" and two[1] == "liver     0.800 (0.141)    2"
    assert len(one[1]) == len(one[0]) == len(two[1])


def test_a_run_and_a_prediction(small, phantom, tmp_path) -> None:
    small |= {"rounds": 1, "local": {"optimizer": "adamw", "lr": 0.01, "batch": 8, "steps": 6}}
    small["sites"] = small["sites"][:1]
    small["evaluation"] |= {"postprocess": {"share": 0.9}, "models": ["last"]}
    run_federation(parse_federation(small, base=tmp_path), tmp_path / "one")
    rows = read_rows(tmp_path / "one" / "rows.csv")
    values = {(r["split"], r["case"], r["class"], r["model"]): r["value"] for r in rows}
    last = {key[:3]: value for key, value in values.items() if key[3] == "last"}
    after = {key[:3]: value for key, value in values.items() if key[3] == f"{POST}last"}
    assert last.keys() == after.keys() and last != after
    first, _, second = evaluation_table(rows).partition("\n\nafter post-processing:\n")
    assert first.splitlines()[0] == second.splitlines()[0] and first != second

    scan = next((phantom / "site-0").rglob("imagesTr/*.nii.gz"))
    labels = {}
    for name, more in (("raw", []), ("clean", ["--postprocess"])):
        ask = [
            "predict",
            str(tmp_path / "one"),
            str(scan),
            "-o",
            str(tmp_path / name),
            "--model",
            "last",
            *more,
        ]
        assert main(ask) == 0
        (file,) = (tmp_path / name).glob("*_labels.nii.gz")
        labels[name] = np.asarray(nibabel.load(file).dataobj)  # type: ignore[attr-defined]
    told = json.loads((tmp_path / "one" / "run.json").read_text())["labels"]
    wanted = postprocess(labels["raw"], LabelSpace.from_plain(told), Postprocess(share=0.9))
    assert np.array_equal(labels["clean"], wanted) and not np.array_equal(labels["raw"], wanted)


@pytest.mark.parametrize("verb", [["evaluate", "--data", "."], ["predict", "a.png", "-o", "out"]])
def test_findings_of_whole_images_have_no_outline(small_images, tmp_path, capsys, verb) -> None:
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(small_images))
    name, *more = verb
    assert main([name, str(tmp_path), *more, "--postprocess"]) == 1
    assert "processes outlines" in capsys.readouterr().err
    if name == "evaluate":
        assert main([name, str(tmp_path), *more, "--test-labels", "lab"]) == 1
        said = capsys.readouterr().err
        assert "--test-labels lab: is of folders of scans" in said and "--reading table=labels.csv" in said
    small_images["evaluation"] = {"postprocess": {}}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(small_images))
    assert main(["check", str(tmp_path / "federation.yaml")]) == 1
    assert "evaluation: postprocess: processes outlines" in capsys.readouterr().err
