"""The command line, used as a user would."""

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import time
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import yaml
from headers import without_orientation

from fedatlas.cli import main
from fedatlas.cli.progress import Counter, Progress
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.evaluation.statistics import read_rows, select
from fedatlas.federation import known
from fedatlas.federation.file import load_federation, parse_federation
from fedatlas.federation.predict import _Labelled, predict_scans
from fedatlas.federation.record import claim
from fedatlas.transport.rounds import RunFolder


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the run of `trained` said, a line each."""
    return []


@pytest.fixture(scope="module")
def trained(tmp_path_factory, phantom, phantom_cache, said) -> Path:
    """A run of three rounds on the phantom, with its report."""
    from fedatlas.phantoms.organs import phantom_sites

    folder = tmp_path_factory.mktemp("cli")
    federation = {
        "name": "trial",
        "sites": phantom_sites(phantom),
        "preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [16, 16], "context": 1},
        "net": {"name": "unet", "filters": [8, 16, 16]},
        "method": {"name": "condistfl"},
        "local": {"lr": 0.01, "batch": 8, "steps": 20},
        "rounds": 3,
        "evaluation": {"validation": 0.25, "metrics": ["dice", "hd95"]},
        "engine": {"cache": str(phantom_cache)},
    }
    file = folder / "federation.yaml"
    file.write_text(yaml.safe_dump(federation))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["run", str(file), "--runs", str(folder / "runs"), "--id", "one"]) == 0
    said += out.getvalue().splitlines()
    return folder / "runs" / "one"


def output(capsys, *arguments: Any) -> str:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def test_run_leaves_what_it_promises(trained: Path) -> None:
    for name in (
        "federation.yaml",
        "run.json",
        "rows.csv",
        "best.json",
        "report.html",
        "models/best.fa",
        "models/last.fa",
    ):
        assert (trained / name).exists(), name
    info = json.loads((trained / "run.json").read_text())
    assert info["hash"] and info["versions"]["torch"] and info["finished"]
    assert sorted(path.name for path in (trained / "rounds").iterdir()) == ["0000", "0001", "0002", "0003"]
    assert "<html" in (trained / "report.html").read_text()


def test_run_again_says_what_to_do(trained: Path, capsys) -> None:
    file, runs = trained.parent.parent / "federation.yaml", trained.parent
    assert main(["run", str(file), "--runs", str(runs), "--id", "one"]) == 1
    assert "--resume" in capsys.readouterr().err
    assert main(["run", str(file), "--runs", str(runs), "--id", "one", "--resume", "-o", "local.lr=0.5"]) == 1
    assert "local.lr: 0.01 there, 0.5 now" in capsys.readouterr().err


def test_check(trained: Path, capsys) -> None:
    file = trained.parent.parent / "federation.yaml"
    text = output(capsys, "check", file, "--runs", trained.parent)
    assert "liver" in text and "nothing stands in the way" in text and "MiB" in text
    found = json.loads(output(capsys, "check", file, "--json", "--runs", trained.parent))
    assert found["cost"]["bytes_per_round"] == 2 * 3 * found["cost"]["model_bytes"]
    assert found["sites"]["s0"]["annotated"] == ["liver", "spleen"]


def test_predict_in_the_scans_own_geometry(trained: Path, phantom: Path, tmp_path, capsys) -> None:
    scan = phantom / "site-1" / "imagesTs" / "p104_0000.nii.gz"
    result = json.loads(output(capsys, "predict", trained, scan, "-o", tmp_path / "out", "--json"))
    labels, source = nib.load(result["scans"][0]["labels"]), nib.load(scan)
    assert labels.shape == source.shape and np.allclose(labels.affine, source.affine)
    names = json.loads((tmp_path / "out" / "classes.json").read_text())
    assert set(np.unique(np.asarray(labels.dataobj)).tolist()) <= {int(number) for number in names}
    # the same scan, turned and mirrored in its file: the same organs at the same places of the world
    turned = nib.Nifti1Image(
        np.asarray(source.dataobj).transpose(2, 0, 1)[:, ::-1], source.affine @ turn(source.shape)
    )
    nib.save(turned, tmp_path / "turned.nii.gz")
    again = json.loads(
        output(capsys, "predict", trained, tmp_path / "turned.nii.gz", "-o", tmp_path / "out", "--json")
    )
    there = np.asarray(nib.load(again["scans"][0]["labels"]).dataobj)
    assert np.array_equal(there[:, ::-1].transpose(1, 2, 0), np.asarray(labels.dataobj))


@pytest.mark.parametrize("affine", [np.diag([-2, 3, 5, 1]), np.diag([2, 3, 5, 1])[[2, 0, 1, 3]]])
def test_millilitres_are_of_the_voxels_however_the_axes_lie(affine) -> None:
    space = LabelSpace(("background", "liver", "spleen"))
    labels = np.zeros((4, 4, 4), np.uint8)
    labels[0, 0, :2], labels[1] = 1, 0
    found = _Labelled(labels, affine, None, {}, {}).millilitres(space)
    assert found == {"liver": 0.06}, "two voxels of 30 cubic millimetres, and no spleen"
    labels[0, 0, 2] = 1
    assert _Labelled(labels, affine / [[5], [1], [1], [1]], None, {}, {}).millilitres(space) == {
        "liver": 0.018
    }


def test_results_of_another_model_are_not_mixed_with_these(trained: Path, phantom: Path, tmp_path) -> None:
    """Label maps of one model may lie together; whose classes.json says otherwise are of another."""
    one, two = sorted((phantom / "site-1" / "imagesTr").glob("*.nii.gz"))[:2]
    predict_scans(trained, [[one]], tmp_path)
    predict_scans(trained, [[two]], tmp_path)
    (tmp_path / "classes.json").write_text("{}")
    for file in tmp_path.glob("*_labels.nii.gz"):
        file.unlink()
    with pytest.raises(FederationError, match=r"classes\.json: exists already"):
        predict_scans(trained, [[one]], tmp_path)
    seen: list[tuple[int, int, str]] = []
    told = predict_scans(trained, [[one], [two]], tmp_path / "both", seen=lambda *of: seen.append(of))
    assert seen == [(0, 2, one.name), (1, 2, two.name)]
    assert [entry["scan"] for entry in told["scans"]] == [[str(one)], [str(two)]] and told["stored"] == 0
    with pytest.raises(FederationError, match="_labels.nii.gz and 1 more of these files: exists already"):
        predict_scans(trained, [[one], [two]], tmp_path / "both")


def test_dice_of_the_files_of_predict_is_that_of_evaluate(
    trained: Path, phantom: Path, tmp_path, monkeypatch
) -> None:
    """The scans have noise below half precision, in which preprocessed scans are kept on disk: the net must be given the
    same bits from both."""
    from fedatlas.federation.predict import predict_scans
    from fedatlas.federation.trained import evaluate_folder
    from fedatlas.learning import inference

    site = shutil.copytree(phantom / "site-0", tmp_path / "site")
    scan = next((site / "imagesTr").glob("*.nii.gz"))
    source = nib.load(scan)
    voxels = np.asarray(source.dataobj, dtype=np.float32)
    voxels += np.random.default_rng(0).normal(0, 30, voxels.shape).astype(np.float32)
    nib.save(nib.Nifti1Image(voxels, source.affine), scan)
    images: list[np.ndarray] = []
    whole = inference.predict_each

    def noted(groups, nets, image, *more):
        images.append(image.numpy().copy())
        return whole(groups, nets, image, *more)

    monkeypatch.setattr(inference, "predict_each", noted)
    rows, _ = evaluate_folder(trained, site)
    assert {row["round"] for row in rows} == {json.loads((trained / "best.json").read_text())["round"]}
    (entry,) = predict_scans(trained, [[scan]], tmp_path / "out")["scans"]
    *evaluated, predicted = images
    assert any(np.array_equal(image, predicted) for image in evaluated)
    case = scan.name.removesuffix("_0000.nii.gz")
    found = np.asarray(nib.load(entry["labels"]).dataobj)
    truth = np.asarray(nib.load(site / "labelsTr" / f"{case}.nii.gz").dataobj)
    theirs = json.loads((site / "dataset.json").read_text())["labels"]
    ours = {
        name: int(number)
        for number, name in json.loads((tmp_path / "out" / "classes.json").read_text()).items()
    }
    scored = {r["class"]: r["value"] for r in rows if (r["case"], r["metric"]) == (case, "dice")}
    assert scored
    for name, value in scored.items():
        a, b = found == ours[name], truth == theirs[name]
        assert value == pytest.approx(2 * (a & b).sum() / (a.sum() + b.sum()), abs=1e-12), name


GUESS = "neither qform nor sform is set: left and right are a guess"


def test_predict_tells_of_a_scan_without_orientation(trained: Path, phantom: Path, tmp_path, capsys) -> None:
    scan = phantom / "site-1" / "imagesTs" / "p104_0000.nii.gz"
    plain = without_orientation(scan, tmp_path / "plain.nii.gz")
    for file in (scan, plain):
        assert main(["predict", str(trained), str(file), "-o", str(tmp_path / "out")]) == 0
        assert (f"note: {file}: {GUESS}; convert it again" in capsys.readouterr().err) is (file == plain)


def test_evaluate_tells_what_check_tells_of_the_files(trained: Path, phantom: Path, tmp_path, capsys) -> None:
    site = tmp_path / "site"
    shutil.copytree(phantom / "site-0", site)
    scans = sorted((site / "imagesTr").iterdir())[:2]
    for scan in scans:
        for file in (scan, site / "labelsTr" / scan.name.replace("_0000", "")):
            without_orientation(file, file)
    for _ in range(2):  # the second time scans come from the cache
        assert main(["evaluate", str(trained), "--data", str(site), "--json"]) == 0
        said = capsys.readouterr()
        (note,) = [note for note in json.loads(said.out)["notes"] if GUESS in note]
        assert note.startswith("site site: imagesTr/")
        assert f"{GUESS}; 2 such files" in note and f"note: {note}" in said.err.splitlines()


def turn(shape: tuple[int, ...]) -> np.ndarray:
    """Voxel (k, i', j) of the turned file -> voxel (i, j, k) of the source, with i' counted from the end."""
    return np.array([[0, -1, 0, shape[0] - 1], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])


def test_evaluate_a_folder(trained: Path, phantom: Path, tmp_path, capsys) -> None:
    fuller = ["--table", "all_labels.json", "--labels", "labelsTr_all", "--test-labels", "labelsTs_all"]
    text = output(
        capsys, "evaluate", trained, "--data", phantom / "site-0", *fuller, "-o", tmp_path / "r.csv"
    )
    assert "liver" in text and "tumour" in text and (tmp_path / "r.csv").exists()
    rows = read_rows(tmp_path / "r.csv")
    means = [
        np.mean(
            [
                r["value"]
                for r in rows
                if (r["class"], r["metric"]) == (name, "dice") and r["value"] is not None
            ]
        )
        for name in dict.fromkeys(row["class"] for row in rows)
    ]
    macro = next(line for line in text.splitlines() if line.startswith("macro")).split()
    assert macro[1] == f"{np.mean(means):.3f}" and macro[3:] == ["mean", "over", "classes"]
    found = json.loads(output(capsys, "evaluate", trained, "--data", phantom / "site-2", "--json"))
    assert {row["class"] for row in found["rows"]} == {"kidney", "tumour"}


def test_evaluate_scores_the_cases_that_a_folder_lists_for_validation(
    trained: Path, phantom: Path, tmp_path, capsys
) -> None:
    folder = shutil.copytree(phantom / "site-2", tmp_path / "listed")
    table = json.loads((folder / "dataset.json").read_text())
    scans = sorted((folder / "imagesTr").iterdir())[:3]
    cases = [
        {"image": f"imagesTr/{scan.name}", "label": f"labelsTr/{scan.name.replace('_0000', '')}"}
        for scan in scans
    ]
    lists = {"training": cases[:1], "validation": cases[1:2], "test": cases[2:]}
    (folder / "dataset.json").write_text(json.dumps({"labels": table["labels"], **lists}))
    found = json.loads(output(capsys, "evaluate", trained, "--data", folder, "--format", "monai", "--json"))
    names = [scan.name.removesuffix("_0000.nii.gz") for scan in scans]
    scored = {(row["case"], row["split"]) for row in found["rows"]}
    assert scored == set(zip(names, ("train", "validation", "test"), strict=True))


def test_evaluate_scores_a_folder_without_training_cases(
    trained: Path, phantom: Path, tmp_path, capsys
) -> None:
    """Neither one whose training cases annotate nothing, nor one of test cases alone."""
    folder = shutil.copytree(phantom / "site-2", tmp_path / "external")
    shutil.rmtree(folder / "labelsTr")
    (test,) = (folder / "labelsTs").iterdir()
    case = test.name.removesuffix(".nii.gz")
    table = json.loads((folder / "dataset.json").read_text())
    silent = {scan.name.removesuffix("_0000.nii.gz"): [] for scan in (folder / "imagesTr").iterdir()}
    listed = {"annotated": silent | {case: ["kidney"]}}
    (folder / "dataset.json").write_text(json.dumps(table | listed))
    for _ in range(2):
        found = json.loads(output(capsys, "evaluate", trained, "--data", folder, "--json"))
        assert {(row["case"], row["class"], row["split"]) for row in found["rows"]} == {
            (case, "kidney", "test")
        }
        shutil.rmtree(folder / "imagesTr", ignore_errors=True)
        (folder / "dataset.json").write_text(json.dumps(table | {"annotated": {case: ["kidney"]}}))
    test.unlink()
    (folder / "dataset.json").write_text(json.dumps(table))
    assert main(["evaluate", str(trained), "--data", str(folder)]) == 1
    assert "holds no case with a label or a finding that the model knows" in capsys.readouterr().err


def test_scores_of_the_runs_own_data_are_called_so(trained: Path, phantom: Path, tmp_path, capsys) -> None:
    assert main(["evaluate", str(trained), "--data", str(phantom / "site-2"), "--json"]) == 0
    told = capsys.readouterr().err
    assert f"note: {phantom / 'site-2'}: is the data of the run's own site s2" in told
    assert "cases of its training are among them" in told
    shutil.copytree(phantom / "site-2", tmp_path / "elsewhere")
    assert main(["evaluate", str(trained), "--data", str(tmp_path / "elsewhere"), "--json"]) == 0
    assert "own site" not in capsys.readouterr().err
    there = ["--data", str(tmp_path / "elsewhere"), "--test-labels", "nope"]
    assert main(["evaluate", str(trained), *there]) == 0
    assert "have no label and are not scored; see that `test_labels` is" in capsys.readouterr().err
    assert main(["evaluate", str(trained), "--data", "nope"]) == 1
    assert "error: --data nope: no such folder" in capsys.readouterr().err


@pytest.fixture
def renamed(trained: Path, phantom: Path, tmp_path) -> tuple[Path, Path]:
    """The run, as if its first site had other names for its label table and one of its labels; and that site's folder."""
    folder = shutil.copytree(phantom / "site-0", tmp_path / "site")
    table = (folder / "dataset.json").read_text().replace('"spleen"', '"Milz"')
    (folder / "dataset.json").rename(folder / "tables.json").write_text(table)
    (folder / "labelsTr").rename(folder / "drawn")
    run = shutil.copytree(trained, tmp_path / "run")
    values = yaml.safe_load((run / "federation.yaml").read_text())
    # the second alias is of its reference
    aliases = {"Milz": "spleen", "Niere": "kidney"}
    values["sites"][0] |= {"path": str(folder), "aliases": aliases, "table": "tables.json", "labels": "drawn"}
    (run / "federation.yaml").write_text(yaml.safe_dump(values))
    record = json.loads((run / "run.json").read_text())
    del record["seal"], record["federation"]  # which would tell that the file was changed
    (run / "run.json").write_text(json.dumps(record))
    return run, folder


def test_a_site_of_the_run_is_read_as_its_federation_file_says(trained, phantom, renamed, capsys) -> None:
    run, folder = renamed

    def scored(run: Path, folder: Path, *more: str) -> dict[str, Any]:
        return json.loads(output(capsys, "evaluate", run, "--data", folder, "--json", *more))

    found, plain = scored(run, folder), scored(trained, phantom / "site-0")
    assert found["ignored"] == [] and {row["class"] for row in found["rows"]} == {"liver", "spleen"}
    assert [row["value"] for row in found["rows"]] == [row["value"] for row in plain["rows"]]
    # what is given wins, and the rest stays
    other = scored(run, folder, "--alias", "Milz=kidney")
    assert {row["class"] for row in other["rows"]} == {"liver", "kidney"}
    (folder / "drawn").rename(folder / "again")
    assert len(scored(run, folder, "--labels", "again")["rows"]) == len(plain["rows"])
    # another folder has no site that speaks for it
    apart = shutil.copytree(folder, folder.parent / "apart")
    assert scored(run, apart, "--table", "tables.json", "--labels", "again")["ignored"] == ["Milz"]


def test_what_counts_at_a_site_of_the_run_counts_when_its_folder_is_evaluated(renamed, capsys) -> None:
    run, folder = renamed
    values = yaml.safe_load((run / "federation.yaml").read_text())
    record = json.loads((run / "run.json").read_text())
    first = values["sites"][0]

    def scored(*more: str) -> tuple[set[str], str]:
        (run / "federation.yaml").write_text(yaml.safe_dump(values))
        (run / "run.json").write_text(json.dumps(record))
        found = json.loads(output(capsys, "evaluate", run, "--data", folder, "--json", *more))
        return {row["class"] for row in found["rows"]}, "\n".join(found["notes"])

    first["annotated"] = ["spleen"]
    classes, notes = scored()
    assert classes == {"spleen"} and "`annotated` of the run's site s0 leaves out liver; not scored" in notes
    full = ["--table", "all_labels.json", "--labels", "labelsTr_all", "--test-labels", "labelsTs_all"]
    assert "liver" in scored(*full)[0], "of other label files it says nothing"
    first["score_all"] = True
    assert scored()[0] == {"liver", "spleen"}, "as the run scores its test cases"
    # as if spleens were lesions of livers
    record["labels"]["groups"] = [[record["labels"]["names"].index(name) for name in ("liver", "spleen")]]
    del first["score_all"], first["annotated"], first["reference"]
    first |= {"role": "test", "whole": True, "aliases": {"Milz": "spleen"}}
    assert scored()[0] == {"liver"}
    second = {key: value for key, value in first.items() if key not in ("role", "whole")}
    values["sites"][1] |= second | {"name": "s1", "annotated": ["liver"]}
    classes, notes = scored()
    assert classes == {"liver", "spleen"} and "s0, s1 differ in which of its labels count" in notes


def test_sites_that_read_one_folder_in_two_ways_do_not_speak_for_it(renamed, capsys) -> None:
    run, folder = renamed
    values = yaml.safe_load((run / "federation.yaml").read_text())
    values["sites"][1] |= {"path": str(folder), "table": "tables.json", "labels": "drawn"}
    (run / "federation.yaml").write_text(yaml.safe_dump(values))
    arguments = ["evaluate", str(run), "--data", str(folder), "--table", "tables.json", "--labels", "drawn"]
    found = json.loads(output(capsys, *arguments, "--json"))
    assert found["ignored"] == ["Milz"]
    (note,) = [note for note in found["notes"] if "differ" in note]
    assert "the run's sites s0, s1 differ in its aliases;" in note and "give options" in note


def test_who_needs_the_authority_is_said(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("fedatlas.federation.deploy.init", lambda *args, **more: [tmp_path / "server"])
    file = Path(__file__).parents[1] / "experiments" / "quickstart.yaml"
    assert main(["deploy", "init", str(file), "-o", str(tmp_path / "d")]) == 0
    said = capsys.readouterr().out
    assert "stays with the coordinator; `fedatlas run` needs it" in said and "offline" not in said
    assert "note: no --host: only parties on this machine reach the server" in said
    assert main(["deploy", "init", str(file), "-o", str(tmp_path / "d"), "--host", "example.org"]) == 0
    assert "note:" not in capsys.readouterr().out


def test_why_there_is_nothing_to_audit_is_said(tmp_path, capsys) -> None:
    def told(folder: Path) -> str:
        assert main(["audit", str(folder)]) == 1
        return capsys.readouterr().err

    assert "no such folder" in told(tmp_path / "none")
    assert "it is no hospital's folder and no run" in told(tmp_path)
    (tmp_path / "kit.yaml").write_text("party: a")
    assert "nothing has left from here yet" in told(tmp_path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_of_predict_and_evaluate(trained: Path, phantom: Path, tmp_path, monkeypatch, quiet) -> None:
    scans = sorted((phantom / "site-1" / "imagesTr").glob("*.nii.gz"))[:2]
    shutil.copytree(phantom / "site-1", tmp_path / "other")
    commands: list[list[Any]] = [
        ["predict", trained, *scans, "-o", tmp_path / "out"],
        ["evaluate", trained, "--data", tmp_path / "other"],
    ]
    for command in commands:
        monkeypatch.setattr(sys, "stderr", shown := Terminal())
        assert main([str(part) for part in command] + ["--quiet"] * quiet) == 0
        text = shown.getvalue()
        assert bool(text) is not quiet
        if not quiet:
            total = 2 if command[0] == "predict" else 5
            assert f"1 of {total}" in text and f"2 of {total}, 0:0" in text and "left" in text
            assert scans[1].name.removesuffix("_0000.nii.gz") in text
            assert text.endswith("\x1b[2K"), "the line is cleared"


def test_time_left_is_that_of_the_cases_that_are_done(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with Counter(quiet=False) as counter:
        counter.seen(0, 5, "a")
        counter.seen(2, 5, "c")
    assert "1 of 5  a" in shown.getvalue() and "3 of 5, 0:15 left  c" in shown.getvalue()


def test_the_printed_loss_is_the_supervised_one() -> None:
    """The sum of all terms may rise because the weight of one of them does."""
    logs = {"a": {"loss": 3.0, "supervised": 0.5, "condist": 2.5}, "b": {"loss": 2.0, "supervised": 0.25}}
    record = SimpleNamespace(number=1, rows=[], log={"sites": logs, "lost": {}})
    Progress(2, shown := io.StringIO()).round(record, SimpleNamespace(round=0))
    assert "supervised loss a 0.500  b 0.250" in shown.getvalue() and "3.0" not in shown.getvalue()
    record.log["sites"] = {"a": {"loss": 3.0}}
    Progress(2, shown := io.StringIO()).round(record, SimpleNamespace(round=0))
    assert "  loss a 3.000" in shown.getvalue()


def test_the_first_round_after_a_resume_is_timed_from_its_first_question(monkeypatch) -> None:
    """Not from the start of the command, which prepares data and waits for sites."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    record = SimpleNamespace(number=8, rows=[], log={"sites": {}, "lost": {}})
    progress = Progress(10, shown := io.StringIO())
    now[0] = 703.0  # its sites have come, and one has answered after 3 s
    progress.site("a", "train", {}, {"seconds": 3.0})
    now[0] = 704.5
    progress.round(record, SimpleNamespace(round=0))
    assert shown.getvalue().endswith("  4.5 s, 0:09 left\n")
    now[0], record.number = 710.0, 9
    progress.site("a", "train", {}, {"seconds": 1.0})
    progress.round(record, SimpleNamespace(round=0))
    assert shown.getvalue().endswith("  5.5 s, 0:05 left\n")
    Progress(10, unseen := io.StringIO()).round(record, SimpleNamespace(round=0))
    assert " left" not in unseen.getvalue(), "nothing is known of a round in which no site answered"


def test_a_round_says_after_its_numbers_who_was_lost_and_what_came_from_the_cache(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(3, shown := io.StringIO())
    logs: dict[str, Any] = {
        "b": {"loss": 2.0, "saved_seconds": 70.0},
        "a": {"loss": 1.0, "saved_seconds": 20.0},
    }
    start = SimpleNamespace(number=0, rows=[], log={"sites": {}, "lost": {}})
    progress.round(start, SimpleNamespace(round=0))
    now[0] = 5.0
    log = {"sites": logs | {"c": {"loss": 4.0}}, "lost": {"d": "no answer"}}
    progress.round(SimpleNamespace(number=1, rows=[], log=log), SimpleNamespace(round=0))
    assert shown.getvalue() == (
        "round 1/3  loss a 1.000  b 2.000  c 4.000  5.0 s, 0:10 left\n"
        "  lost d: no answer\n"
        "  from the cache, not trained again: a, b (1:30 of training)\n"
    )


def test_a_run_ends_with_a_verdict(said: list[str], trained: Path) -> None:
    *_, model, baseline, after = said
    rows = read_rows(trained / "rows.csv")

    def macro(model: Any, known: bool) -> str:
        pairs: dict[Any, list[float]] = {}
        for r in select(rows, split="test", metric="dice", known=known):
            if r["value"] is not None and r["model"] == (model or f"local/{r['site']}"):
                pairs.setdefault((r["site"], r["class"]), []).append(r["value"])
        return f"{np.mean([np.mean(values) for values in pairs.values()]):.3f}"

    assert "models/best.fa" in model and "macro Dice, test cases" in model
    best = json.loads((trained / "best.json").read_text())["round"]
    assert f"round {best} of 3" in model
    assert f"{macro('best', True)} on annotated classes" in model
    assert f"{macro('', True)} on annotated classes" in baseline
    assert after.split()[:3] == ["next:", "fedatlas", "predict"]
    evaluated = [line for line in said if line.startswith("final evaluation")]
    assert ["validation" in evaluated[0], "test" in evaluated[-1]] == [True, True]
    assert evaluated[-1].split(": ")[1].split(", ")[0] == "best" and "local/s0" in evaluated[-1]


def test_lists_and_schema(capsys) -> None:
    assert "condistfl" in output(capsys, "list", "methods")
    for what in ("nets", "datasets", "losses", "metrics"):
        entries = json.loads(output(capsys, "list", what, "--json"))
        assert entries and all(entries.values())
    assert json.loads(output(capsys, "schema"))["properties"]["sites"]


def test_lists_and_the_schema_have_what_other_packages_bring(capsys, monkeypatch) -> None:
    from fedatlas import losses, methods

    module = types.ModuleType("their_package")
    module.Loss, module.Method = losses.find("masked_bce"), methods.get("fedprox")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_package", module)
    entries = [
        EntryPoint("theirs", "their_package:Loss", "fedatlas.losses"),
        EntryPoint("their_way", "their_package:Method", "fedatlas.methods"),
    ]
    monkeypatch.setattr(known, "entry_points", lambda group: [e for e in entries if e.group == group])
    monkeypatch.setattr(losses.OTHERS, "installed", {"theirs": entries[0]})
    monkeypatch.setattr(methods.OTHERS, "installed", {"their_way": entries[1]})
    assert "theirs" in json.loads(output(capsys, "list", "losses", "--json"))
    assert "theirs" not in json.loads(output(capsys, "list", "methods", "--json"))
    choices = json.loads(output(capsys, "schema"))["properties"]["method"]["oneOf"]
    (their_way,) = [one for one in choices if one["properties"]["name"]["const"] == "their_way"]
    assert "mu" in their_way["properties"] and "fedavg" in {c["properties"]["name"]["const"] for c in choices}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "nothing.yaml"], "no such file"),
        (["compare", "nothing.yaml"], "error: nothing.yaml: no such file"),
        (["run", "arms.yaml"], "arms.yaml: is a comparison file, as it has arms"),
        (["check", "arms.yaml"], "is trained by: fedatlas compare arms.yaml"),
        (["report", "."], "run folder"),
        (["predict", ".", "x.nii.gz", "-o", "out"], "not a run folder"),
        (["evaluate", ".", "--data", "."], "not a run folder"),
        (
            ["predict", "many", "x.nii.gz", "-o", "out"],
            "it holds runs, give one of them: many/a, many/b, many/c, many/d and 1 more",
        ),
        (["report", "many"], "it holds runs, give one of them: many/a"),
        (["watch", "many"], "it holds runs, give one of them: many/a"),
    ],
)
def test_errors_are_sentences(arguments, text, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("arms.yaml").write_text("name: n\nbase: b.yaml\narms: {a: {}}\n")
    for name in "abcde":
        Path("many", name).mkdir(parents=True)
        Path("many", name, "run.json").write_text("{}")
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and text in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["report", "RUN", "--out", "mine"], "--out mine: exists already, and is no page"),
        (["watch", "RUN", "--out", "mine"], "--out mine: exists already, and is no page"),
        (["report", "RUN", "--out", "."], "--out .: is a folder"),
        (
            ["evaluate", "RUN", "--data", ".", "--out", "mine"],
            "mine: exists already; give another name with --out",
        ),
        (["evaluate", "RUN", "--data", ".", "--out", "."], "--out .: is a folder"),
        (["evaluate", "RUN", "--data", ".", "--out", "mine/x"], "--out mine/x: cannot be written (Not a dir"),
        (["evaluate", "RUN", "--data", ".", "--out", "/dev/null"], "--out /dev/null: is a device or a pipe"),
        (["report", "RUN", "--out", "/dev/null"], "--out /dev/null: is a device or a pipe"),
        (
            ["evaluate", "RUN", "--data", ".", "--alias", "a=liver", "--alias", "a=spleen"],
            "--alias a=spleen: a was given as liver before; leave one out",
        ),
        (["evaluate", "RUN", "--data", ".", "--alias", "=liver"], "--alias =liver: expected THEIRS=OURS"),
        (
            ["deploy", "init", "FILE", "-o", "d", "--days", "0"],
            "--days 0: certificates can be valid for 1 to 36500",
        ),
        (["deploy", "init", "FILE", "-o", "d", "--port", "0"], "--port 0: allowed are 1 to 65535"),
        (
            ["deploy", "init", "FILE", "-o", "d", "--host", "a b"],
            "--host 'a b': the server's name or IP address",
        ),
        (["deploy", "init", "FILE", "-o", "d", "--host", "a..b"], "--host 'a..b': the server's name"),
        (["deploy", "init", "FILE", "-o", "d", "--host", "1.2.3.4.5"], "the server's name or IP address"),
        (["deploy", "init", "FILE", "-o", "d", "--host", ":"], "the server's name or IP address"),
        (
            ["deploy", "init", "FILE", "-o", "d", "--engine", "nvflare", "--host", "fe80::1"],
            "takes a name or an IPv4 address",
        ),
        (
            ["deploy", "init", "FILE", "-o", "d", "-o", "rounds=3"],
            "to override a key of the file use --override",
        ),
        (["run", "FILE", "--data-changed"], "--data-changed: says how a run goes on; give --resume"),
        (
            ["check", "FILE", "-o", "net.filters=[4,-8,8]"],
            "filters.1: got -8; 1 or more is expected",
        ),
        (["check", "FILE", "-o", "local.lr=.inf"], "local.lr: got inf; a finite number is expected"),
        (["init", "data", "./data", "-o", "new.yaml"], "data: was given twice"),
    ],
)
def test_nothing_is_lost_by_a_slip(arguments, text, trained: Path, capsys, monkeypatch, tmp_path) -> None:
    """What is asked for is refused before any work, and a file that is there stays as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("name: mine\n")
    (tmp_path / "data").mkdir()
    places = {"RUN": str(trained), "FILE": str(trained / "federation.yaml")}
    assert main([places.get(argument, argument) for argument in arguments]) == 1
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "mine"]
    assert (tmp_path / "mine").read_text() == "name: mine\n"


def test_a_page_replaces_a_page(trained: Path, tmp_path, capsys) -> None:
    for _ in range(2):
        output(capsys, "report", trained, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html")


def test_predict_names_a_bad_scan(trained: Path, tmp_path, capsys) -> None:
    bad = tmp_path / "scan.nii.gz"
    bad.write_bytes(b"no image")
    assert main(["predict", str(trained), str(bad), "-o", str(tmp_path)]) == 1
    assert "scan.nii.gz" in capsys.readouterr().err
    assert main(["predict", str(trained), str(bad), "-o", str(tmp_path), "--model", "local/nobody"]) == 1
    assert "nobody" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_ctrl_c_is_safe(workers, small, tmp_path) -> None:
    file = tmp_path / "f.yaml"
    small |= {"rounds": 500}
    small["engine"]["workers"] = workers
    file.write_text(yaml.safe_dump(small))
    command = [
        sys.executable,
        "-m",
        "fedatlas",
        "run",
        str(file),
        "--runs",
        str(tmp_path),
        "--id",
        "stopped",
    ]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # under nohup it is ignored
    )
    rounds = tmp_path / "stopped" / "rounds"
    deadline = time.monotonic() + 240
    try:
        while not (rounds / "0002").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        text, _ = child.communicate(timeout=240)
    finally:
        child.kill()
    assert child.returncode == 130 and "--resume" in text and "Traceback" not in text, text
    assert (rounds / "0002" / "log.json").exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["engine.device=gpu"], "engine.device: got 'gpu'"),
        (["local.precision=fp16"], "fp16 needs a GPU"),
        (["preprocessing.patch=[18, 18]"], "patch"),
        (["net.name=organ_heads", "labels.exclusive=false"], "exclusive"),
        (["method.name=condistfl", "method.cond=eps", "labels.exclusive=false"], "exclusive"),
    ],
)
def test_what_cannot_run_is_said_before_anything_runs(changes, text, small, tmp_path, capsys) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(yaml.safe_dump(small))
    overrides = [part for change in changes for part in ("-o", change)]
    assert main(["run", str(file), "--runs", str(tmp_path), "--id", "x", *overrides]) == 1
    err = capsys.readouterr().err
    assert text in err and "Traceback" not in err
    assert not (tmp_path / "x" / "rounds").exists()


def test_a_runs_folder_that_is_a_file(small, tmp_path, capsys) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(yaml.safe_dump(small))
    assert main(["run", str(file), "--runs", str(file)]) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_scans_that_would_overwrite_each_other(trained: Path, phantom: Path, tmp_path, capsys) -> None:
    scan = phantom / "site-1" / "imagesTs" / "p104_0000.nii.gz"
    assert main(["predict", str(trained), str(scan), str(scan), "-o", str(tmp_path)]) == 1
    assert "would both be written" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_options_may_stand_before_and_between_what_a_verb_is_given(
    trained: Path, phantom: Path, tmp_path, capsys
) -> None:
    scan = phantom / "site-1" / "imagesTs" / "p104_0000.nii.gz"
    given = [["-o", "OUT", trained, scan], [trained, "-o", "OUT", scan], [trained, scan, "-o", "OUT"]]
    made = []
    for number, parts in enumerate(given):
        out = tmp_path / str(number)
        output(capsys, "predict", *(out if part == "OUT" else part for part in parts))
        made.append((out / "p104_0000_labels.nii.gz").read_bytes())
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["predict", "run", "scan", "--overwite"], "--overwite: not known; did you mean --overwrite?"),
        (["check", "f.yaml", "more"], "fedatlas check: error: more: not known"),
        (["check", "f.yaml", "rounds=3"], "a key of the file is overridden by -o rounds=3"),
        (
            ["check", "f.yaml", "-o", "sites={a:", "1}"],
            "1}: not known; quote a value that has spaces, as -o 'sites={a: …'",
        ),
        (["check", "-o", "sites=[a,", "b]", "f.yaml"], "quote a value that has spaces, as -o 'sites=[a, …'"),
        (["check", "-o", "sites=[a]", "f.yaml", "b"], "error: b: not known (the usage"),
        (["deploy", "init", "f.yaml", "-o", "d", "rounds=3"], "is overridden by --override rounds=3"),
        (["list", "methods", "more"], "fedatlas list: error: more: not known"),
        (["deploy", "init", "f.yaml", "-o", "d", "--hots", "x"], "did you mean --host?"),
        (["analyse", "hessian", "run", "--bogus"], "fedatlas analyse hessian: error: --bogus: not known"),
    ],
)
def test_what_a_verb_does_not_take_is_told_with_what_it_takes(arguments, text, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and text in told and f"usage: fedatlas {arguments[0]}" in told


def test_a_folder_that_cannot_be_written_is_told_before_the_work(
    trained: Path, phantom: Path, tmp_path, capsys
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "below"
    scan = phantom / "site-1" / "imagesTs" / "p104_0000.nii.gz"
    assert main(["predict", str(trained), str(scan), "-o", str(out)]) == 1
    told = capsys.readouterr().err
    assert f"-o {out}: cannot be written" in told and "p104" not in told, "no scan was counted yet"


def test_scans_of_other_channels(trained: Path, phantom: Path, tmp_path, capsys) -> None:
    scan = phantom / "site-1" / "imagesTs" / "p104_0000.nii.gz"
    assert main(["predict", str(trained), f"{scan},{scan}", "-o", str(tmp_path)]) == 1
    assert "has 2 channels; the model was trained on 1" in capsys.readouterr().err


def test_a_federation_file_that_no_run_wrote_is_left_alone(small, tmp_path, capsys) -> None:
    file = tmp_path / "a" / "federation.yaml"
    file.parent.mkdir()
    file.write_text("# mine\n" + yaml.safe_dump(small))
    assert main(["run", str(file), "--runs", str(tmp_path), "--id", "a"]) == 1
    assert f"{file}: was not written by a run" in capsys.readouterr().err
    assert file.read_text().startswith("# mine")
    # what a run left that was killed, or refused, before it wrote run.json
    for seed in (1, 1, 2):
        claim(RunFolder(tmp_path / "b"), parse_federation(small | {"seed": seed}, base=Path()), True, print)
        assert load_federation(tmp_path / "b" / "federation.yaml").seed == seed


def test_run_names_are_no_paths(small, tmp_path, capsys) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(yaml.safe_dump(small))
    assert main(["run", str(file), "--runs", str(tmp_path), "--id", "../up"]) == 1
    assert "no path" in capsys.readouterr().err
