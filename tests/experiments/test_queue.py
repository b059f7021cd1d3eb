"""The queue of comparisons: it trains what is missing, in the order of seeds, and says how far it is."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

SCRIPT = Path(__file__).parents[2] / "experiments" / "run_queue.py"
QUEUE = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture
def queue(small: dict[str, Any], tmp_path: Path) -> Path:
    """A queue of two comparisons: of one only an arm, of the other one seed of two."""
    small["evaluation"] |= {"models": ["last"], "every": 2}
    small["local"] |= {"steps": 1}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(small))
    for name, arms in (("one", ["fedavg", "fedprox"]), ("two", ["fedavg"])):
        file = {
            "name": name,
            "base": "base.yaml",
            "seeds": [0, 1],
            "measure": {"split": "validation", "model": "last"},
        }
        file["arms"] = {arm: {"method": {"name": arm}} for arm in arms}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(file))
    entries = [{"file": "one.yaml", "arms": ["fedprox"]}, {"file": "two.yaml", "seeds": 1}]
    path = tmp_path / "queue.yaml"
    path.write_text(yaml.safe_dump({"comparisons": entries}))
    return path


def beside(*given: str) -> subprocess.CompletedProcess[str]:
    """Two runs at a time, each in a process of its own."""
    command = [sys.executable, str(SCRIPT), *given, "--at-once", "2", "--workers", "0"]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_is_missing_is_trained_and_told(queue: Path, tmp_path: Path, capsys) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    assert QUEUE.main([str(queue), "--status", *runs]) == 0
    assert "one: 0 of 2 runs, not begun" in capsys.readouterr().out
    assert QUEUE.main([str(queue), *runs]) == 0
    told = capsys.readouterr().out
    seeds = [line.split(" ", 1)[1] for line in told.splitlines() if ", seed" in line]
    assert seeds == ["one, seed 0", "two, seed 0", "one, seed 1"]
    made = sorted(
        path.parent.relative_to(tmp_path / "runs").as_posix() for path in tmp_path.glob("runs/*/*/run.json")
    )
    assert made == ["one/fedprox-s0", "one/fedprox-s1", "two/fedavg-s0"]
    assert QUEUE.main([str(queue), "--status", *runs]) == 0
    told = capsys.readouterr().out
    assert "one: 2 of 2 runs\n" in told and "two: 1 of 1 runs\n0.0 hours left" in told


def test_runs_beside_each_other_are_the_same(queue: Path, tmp_path: Path, capsys) -> None:
    """In processes of their own, begun in the order of the queue; a run that fails is told, the others are trained, and the same command
    trains what is left."""
    assert QUEUE.main([str(queue), "--runs", str(tmp_path / "runs")]) == 0
    capsys.readouterr()
    base = tmp_path / "base.yaml"
    values = yaml.safe_load(base.read_text())
    other = tmp_path / "two.yaml"
    broken = yaml.safe_load(other.read_text())
    broken["arms"]["fedavg"]["sites"] = {values["sites"][0]["name"]: {"path": str(tmp_path / "gone")}}
    text = other.read_text()
    other.write_text(yaml.safe_dump(broken))
    command = [str(queue), "--runs", str(tmp_path / "beside"), "--records", str(tmp_path / "records")]
    done = beside(*command)
    assert done.returncode == 1 and "3 runs to do, 2 at a time" in done.stdout, done.stderr
    assert (
        "two: " in done.stdout and str(tmp_path / "gone") in done.stdout and "one: 2 of 2 runs" in done.stdout
    )
    other.write_text(text)
    done = beside(*command)
    assert done.returncode == 0 and "1 runs to do" in done.stdout and "two: 1 of 1 runs" in done.stdout, (
        done.stderr
    )
    models = [sorted((tmp_path / name).rglob("last.fa")) for name in ("runs", "beside")]
    assert [path.parts[-4:] for path in models[0]] == [path.parts[-4:] for path in models[1]]
    assert len(models[0]) == 3
    assert [path.read_bytes() for path in models[0]] == [path.read_bytes() for path in models[1]]
    assert len(list((tmp_path / "records").rglob("*.tar.xz"))) == 3


def test_comparisons_that_share_runs_train_and_count_them_once(queue: Path, tmp_path: Path, capsys) -> None:
    one = yaml.safe_load((tmp_path / "one.yaml").read_text())
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**one, "name": "two", "runs": "one"}))
    entries = [{"file": name, "arms": ["fedprox"], "seeds": 1} for name in ("one.yaml", "two.yaml")]
    queue.write_text(yaml.safe_dump({"comparisons": entries}))
    command = [str(queue), "--runs", str(tmp_path / "runs")]
    assert QUEUE.main([*command, "--status"]) == 0
    told = capsys.readouterr().out
    assert (
        "one: 0 of 1 runs, not begun\ntwo: 0 of 1 runs, the others are counted above\n0.0 hours left, and 1 "
        in told
    )
    done = beside(*command)
    assert done.returncode == 0, done.stderr
    assert "1 runs to do" in done.stdout and "one: 1 of 1 runs\ntwo: 1 of 1 runs\n" in done.stdout
    queue.write_text(yaml.safe_dump({"comparisons": [entries[0], {"file": "two.yaml", "seeds": 1}]}))
    assert QUEUE.main([*command, "--status"]) == 0
    assert "two: 1 of 2 runs, the others are not begun\n" in capsys.readouterr().out


def test_a_comparison_without_its_data_stops_no_other(queue: Path, tmp_path: Path, capsys) -> None:
    base = yaml.safe_load((tmp_path / "base.yaml").read_text())
    for site in base["sites"]:
        site["path"] = str(tmp_path / "gone")
    (tmp_path / "lost.yaml").write_text(yaml.safe_dump(base))
    one = yaml.safe_load((tmp_path / "one.yaml").read_text())
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({**one, "base": "lost.yaml"}))
    assert QUEUE.main([str(queue), "--runs", str(tmp_path / "runs")]) == 1
    told = capsys.readouterr().out
    assert "failed: nothing was trained, as every run lacks data" in told and "two: 1 of 1 runs" in told


def test_the_reason_of_a_failure_beside_others_is_told(queue: Path, tmp_path: Path) -> None:
    command = [str(queue), "--runs", str(tmp_path / "runs")]
    assert QUEUE.main(command) == 0
    base = yaml.safe_load((tmp_path / "base.yaml").read_text())
    base["local"] |= {"steps": 2}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    done = beside(*command)
    assert done.returncode == 1 and "local.steps: 1 there, 2 now" in done.stdout, done.stdout


def test_what_has_a_record_is_not_trained_again(queue: Path, tmp_path: Path, capsys) -> None:
    records = ["--records", str(tmp_path / "records")]
    assert QUEUE.main([str(queue), "--runs", str(tmp_path / "runs"), *records]) == 0
    made = sorted(path.relative_to(tmp_path / "records").as_posix() for path in tmp_path.glob("records/*/*"))
    assert made == [f"{name}.tar.xz" for name in ("one/fedprox-s0", "one/fedprox-s1", "two/fedavg-s0")]
    capsys.readouterr()
    assert QUEUE.main([str(queue), "--runs", str(tmp_path / "elsewhere"), *records, "--status"]) == 0
    told = capsys.readouterr().out
    assert "one: 2 of 2 runs\n" in told and "two: 1 of 1 runs\n0.0 hours left" in told
    assert not list((tmp_path / "elsewhere").rglob("*.fa"))


@pytest.mark.parametrize(
    "file", sorted(SCRIPT.parent.glob("*/queue.yaml")), ids=lambda file: file.parent.name
)
def test_queues_of_the_project_hold_what_there_is(file: Path, tmp_path: Path, capsys) -> None:
    assert QUEUE.main([str(file), "--runs", str(tmp_path), "--status"]) == 0
    told = capsys.readouterr().out
    assert "full: 0 of" in told and "error" not in told


def test_a_run_that_is_begun_counts_with_its_rounds(queue: Path, tmp_path: Path, capsys) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    assert QUEUE.main([str(queue), *runs]) == 0
    run = tmp_path / "runs" / "one" / "fedprox-s1"
    (run / "rounds" / "0002").rename(tmp_path / "elsewhere")
    (run / "run.json").write_text(
        (run / "run.json").read_text().replace('"finished": "', '"finished": null, "was": "')
    )
    capsys.readouterr()
    assert QUEUE.main([str(queue), "--status", *runs]) == 0
    told = capsys.readouterr().out
    assert "one: 1 of 2 runs, about" in told and "  fedprox-s1, round 1 of 2\n" in told


def test_it_starts_as_its_first_lines_say(queue: Path, tmp_path: Path) -> None:
    """The folder of a script comes first on Python's path: a name as `queue` would hide the standard library's."""
    command = [sys.executable, str(SCRIPT), str(queue), "--status", "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "one: 0 of 2 runs, not begun" in done.stdout, done.stderr


def test_a_misspelt_arm_is_refused_before_anything_is_trained(queue: Path, tmp_path: Path, capsys) -> None:
    entries = [{"file": "two.yaml"}, {"file": "one.yaml", "arms": ["fedpox"]}]
    queue.write_text(yaml.safe_dump({"comparisons": entries}))
    for more in ([], ["--status"], ["--at-once", "2"]):
        assert QUEUE.main([str(queue), "--runs", str(tmp_path / "runs"), *more]) == 1
        assert "one.yaml: the arm 'fedpox' does not exist; did you mean 'fedprox'?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("comparisons: []", "comparisons: has 0 entries; 1 or more are needed"),
        ("comparisons: [{file: gone.yaml}]", "gone.yaml: "),
        ("comparisons: [{fiel: a.yaml}]", "'comparisons.0.fiel' does not exist; did you mean 'file'?"),
    ],
)
def test_what_a_queue_must_not_be(text: str, message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "queue.yaml").write_text(text)
    assert QUEUE.main([str(tmp_path / "queue.yaml")]) == 1
    assert message in capsys.readouterr().err
