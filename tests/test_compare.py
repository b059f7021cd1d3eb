"""Comparisons: what an arm is, what is run, what stands in the tables."""

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from findings import findings_federation, write_findings
from scipy import stats

from fedatlas import compare
from fedatlas.cli import main
from fedatlas.compare import (
    Comparison,
    Predictor,
    collect,
    load_comparison,
    rows_of,
    run_comparison,
    running,
    state_of,
    write_page,
)
from fedatlas.compare.overlays import Cases, overlays, subjects
from fedatlas.compare.plan import MOST_LETTERS
from fedatlas.compare.results import _ranks as ranks_of
from fedatlas.compare.running import kept_model
from fedatlas.core.errors import DataError, FederationError
from fedatlas.evaluation.classification import Predictions, score
from fedatlas.evaluation.statistics import differences, mean_ranks, rows_text
from fedatlas.federation.file import hash_of, resolved
from fedatlas.federation.trained import Trained
from fedatlas.report.comparison import LOWER, MILLIMETRES, html, markdown, of_table
from fedatlas.report.tables import METRICS
from fedatlas.transport.store import write_atomic

PLAIN: Mapping[str, Any] = {
    "name": "tiny",
    "base": "common.yaml",
    "arms": {"fedavg": {"method": {"name": "fedavg"}}, "prox": {"method": {"name": "fedprox", "mu": 0.1}}},
    "seeds": [0, 1],
    "profiles": {
        "smoke": {"seeds": 1, "rounds": 1, "steps": 1},
        "full": {"rounds": 2, "steps": 2, "evaluation.models": ["best"]},
    },
}


def write(folder: Path, federation: dict[str, Any], **changes: Any) -> Path:
    """comparison.yaml and common.yaml in a folder; the sites' paths in it are relative."""
    base = copy.deepcopy(federation)
    for site in base["sites"]:
        site["path"] = Path(site["path"]).name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "common.yaml").write_text(yaml.safe_dump(base))
    file = folder / "comparison.yaml"
    file.write_text(yaml.safe_dump({**PLAIN, **changes}, sort_keys=False))
    return file


@pytest.fixture
def file(small_images: dict[str, Any], tmp_path: Path) -> Path:
    return write(tmp_path / "files", small_images)


@pytest.fixture(scope="module")
def done(findings: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A comparison, its data and its runs, all finished; read only."""
    folder = tmp_path_factory.mktemp("compared")
    file = write(folder, findings_federation(findings, folder / "cache"))
    runs = folder / "runs"
    assert call(file, "--data", findings, "--runs", runs) == 0
    return file, findings, runs


def call(file: Path, *arguments: Any, profile: str = "full") -> int:
    return main(["compare", str(file), "--profile", profile, *map(str, arguments)])


def test_it_trains_once_and_tells_what_is_left(done, capsys) -> None:
    file, data, runs = done
    assert call(file, "--data", data, "--runs", runs) == 0
    out = capsys.readouterr().out
    assert "4 runs, 4 finished, 0 to do" in out and " minutes" not in out
    assert "| fedavg | 2 |" in out and "| prox | 2 |" in out and "not run" not in out
    assert "`fedatlas compare comparison.yaml --profile full --data DIR`" in out.replace(
        f"{file.parent}/", ""
    )
    names = sorted(path.name for path in (runs / "tiny-full").iterdir())
    assert names == ["comparison.html", "fedavg-s0", "fedavg-s1", "prox-s0", "prox-s1"]


def test_another_device_is_the_same_run(done) -> None:
    file, data, runs = done
    here, there = (
        load_comparison([file], profile="full", data=data, runs=runs, device=device)
        for device in (None, "cuda")
    )
    for arm, of_seed in there.federations.items():
        for seed, federation in of_seed.items():
            assert federation.engine.device == "cuda" and here.federations[arm][seed].engine.device == "cpu"
            assert hash_of(federation) == hash_of(here.federations[arm][seed])
    assert call(file, "--data", data, "--runs", runs, "--device", "cuda") == 0, "all are finished"


def test_the_table_holds_the_means_of_the_rows(done) -> None:
    file, data, runs = done
    comparison = load_comparison([file], profile="full", data=data, runs=runs)
    found = collect(comparison)
    expected = []
    for seed in (0, 1):
        cells: dict[str, list[float]] = {}
        for row in rows_of(comparison, "prox", seed):
            if row["value"] is not None:
                cells.setdefault(row["class"], []).append(row["value"])
        expected.append(float(np.mean([np.mean(values) for values in cells.values()])))
    assert found["arms"]["prox"]["mean"] == pytest.approx(expected)
    assert f"{np.mean(expected):.3f} ± {np.std(expected, ddof=1):.3f}" in markdown(found)
    assert found["classes"] == ["blob", "bar", "ring"]
    assert found["differences"]["prox"]["n"] >= 6 and found["differences"]["prox"]["wilcoxon"] is not None
    assert json.loads(json.dumps(found)) == found


def test_seed_by_seed_and_a_stopped_run_goes_on_to_the_same_bits(
    done, small_images, tmp_path, monkeypatch, capsys
) -> None:
    _, data, whole = done
    file = write(tmp_path, small_images)
    began: list[str] = []
    plain = running.run_federation

    def stops(federation: Any, path: Path, **options: Any) -> None:
        began.append(path.name)
        after = options["after_round"]

        def after_round(record: Any, best: Any) -> None:
            after(record, best)
            if path.name == "prox-s0" and record.number == 1:
                raise KeyboardInterrupt

        plain(federation, path, **options | {"after_round": after_round})

    monkeypatch.setattr(running, "run_federation", stops)
    assert call(file, "--data", data, "--runs", tmp_path / "runs") == 130
    assert began == ["fedavg-s0", "prox-s0"]
    monkeypatch.setattr(running, "run_federation", plain)
    capsys.readouterr()
    assert call(file, "--data", data, "--runs", tmp_path / "runs", "--only-table") == 0
    out = capsys.readouterr().out
    assert "Not run (1 of 2 arms): prox." in out and "| prox |" not in out
    assert "| fedavg | 1 of 2 |" in out and "**0" not in out, "an arm with seeds to come is not the best"
    assert call(file, "--data", data, "--runs", tmp_path / "runs", "--arms", "prox") == 0
    assert "1 left, about" in capsys.readouterr().out
    rounds = sorted((tmp_path / "runs" / "tiny-full" / "prox-s0" / "rounds").iterdir())
    assert [path.name for path in rounds] == ["0000", "0001", "0002"]
    for name in ("prox-s0/rows.csv", "prox-s1/rows.csv", "prox-s0/models/last.fa"):
        mine, theirs = (root / "tiny-full" / name for root in (tmp_path / "runs", whole))
        assert mine.read_bytes() == theirs.read_bytes()
    assert not (tmp_path / "runs" / "tiny-full" / "fedavg-s1").exists()


def test_an_arm_that_fails_is_named_and_the_others_go_on(
    file, findings, tmp_path, monkeypatch, capsys
) -> None:
    plain = running.run_federation

    def breaks(federation: Any, path: Path, **options: Any) -> None:
        if path.name == "fedavg-s0":
            raise FloatingPointError("the loss is not finite")
        plain(federation, path, **options)

    monkeypatch.setattr(running, "run_federation", breaks)
    runs = tmp_path / "runs"
    assert call(file, "--data", findings, "--runs", runs, profile="smoke") == 1
    captured = capsys.readouterr()
    assert "fedavg-s0: failed: FloatingPointError: the loss is not finite" in captured.out
    assert "failed: fedavg-s0" in captured.err
    assert "Traceback" in (runs / "tiny-smoke" / "fedavg-s0" / "error.txt").read_text()
    assert "Not run (1 of 2 arms): fedavg." in captured.out and "| prox | 1 |" in captured.out
    monkeypatch.setattr(running, "run_federation", plain)
    assert call(file, "--data", findings, "--runs", runs, profile="smoke") == 0
    assert not (runs / "tiny-smoke" / "fedavg-s0" / "error.txt").exists()


def test_a_run_of_another_configuration_is_no_result(done, small_images, tmp_path, capsys) -> None:
    _, data, runs = done
    arms = {**PLAIN["arms"], "prox": {"method": {"name": "fedprox", "mu": 0.2}}}
    file = write(tmp_path, small_images, arms=arms)
    before = (runs / "tiny-full" / "prox-s0" / "rows.csv").read_bytes()
    assert call(file, "--data", data, "--runs", runs) == 1
    out = capsys.readouterr().out
    assert "method.mu: 0.1 there, 0.2 now" in out and "Put the values back" in out
    assert "Not run (1 of 2 arms): prox." in out and "| fedavg | 2 |" in out
    assert (runs / "tiny-full" / "prox-s0" / "rows.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("[]", "lacks labels, channels, hash, sites, finished"),
        ('{"hash": "", "finished": null}', "lacks labels, channels, sites"),
        ("{", "cannot be read ("),
    ],
)
def test_the_damaged_record_of_a_run_is_named(done, tmp_path, capsys, made, text) -> None:
    file, data, runs = done
    shutil.copytree(runs / "tiny-full", tmp_path / "tiny-full")
    (tmp_path / "tiny-full" / "fedavg-s0" / "run.json").write_text(made)
    asked = ["compare", str(file), "--profile", "full", "--data", str(data), "--runs", str(tmp_path)]
    assert main([*asked, "--only-table"]) == 1
    told = "".join(capsys.readouterr())
    assert f"run.json: {text}" in told and "Traceback" not in told


def test_a_finished_run_outlives_a_new_option(done, tmp_path) -> None:
    file, data, runs = done
    path = tmp_path / "tiny-full" / "fedavg-s0"
    shutil.copytree(runs / "tiny-full" / "fedavg-s0", path)
    written = yaml.safe_load((path / "federation.yaml").read_text())
    assert written["local"].pop("clip") is None
    (path / "federation.yaml").write_text(yaml.safe_dump(written))
    info = json.loads((path / "run.json").read_text())
    del info["seal"]  # as of a version without it
    (path / "run.json").write_text(json.dumps(info | {"hash": "of the older version"}))
    comparison = load_comparison([file], profile="full", data=data, runs=tmp_path)
    assert state_of(comparison, "fedavg", 0) == "finished"


def loaded(folder: Path, federation: dict[str, Any], profile: str = "full", **changes: Any) -> dict[str, Any]:
    """arm -> federation of the first seed."""
    file = write(folder, federation, **changes)
    found = load_comparison([file], profile=profile, data=folder)
    return {arm: next(iter(of_arm.values())) for arm, of_arm in found.federations.items()}


def test_all_arms_take_equally_many_steps(small_images, tmp_path) -> None:
    small_images["sites"][2]["role"] = "test"
    arms = {
        "fedavg": None,
        "pooled": {"method": {"name": "centralized"}},
        "own": {"method": {"name": "centralized"}, "local.steps": 7},
        "epochs": {"local": {"epochs": 2}},
    }
    found = loaded(tmp_path, small_images, arms=arms, profiles={"full": {"rounds": 4, "steps": 5}})
    assert [f.local.steps for f in found.values()] == [5, 10, 7, None], "two of the three sites train"
    budgets = collect(load_comparison([tmp_path / "comparison.yaml"], profile="full", runs=tmp_path))[
        "budget"
    ]
    assert [budget["total"] for budget in budgets.values()] == [40, 40, 28, None]
    two = {"one": None, "two": {"method": {"name": "fedmatch"}}}
    file = write(tmp_path / "two", small_images, arms=two, profiles={"full": {"rounds": 4, "steps": 5}})
    budgets = collect(load_comparison([file], profile="full", runs=tmp_path))["budget"]
    assert [budget["total"] for budget in budgets.values()] == [40, 80], "two optimizers move on each batch"
    assert found["epochs"].local.epochs == 2
    assert {f.rounds for f in found.values()} == {4}
    small_images["local"] |= {"epochs": 3, "steps": None}
    assert loaded(tmp_path, small_images, arms=arms, profiles={"full": {}})["pooled"].local.epochs == 3


def test_an_arm_changes_what_it_names_and_nothing_else(small_images, tmp_path) -> None:
    small_images["method"] = {"name": "fedprox", "mu": 0.5}
    arms = {
        "same": {},
        "other": {"method.name": "fedavg"},
        "mu": {"method": {"mu": 0.25}},
        "order": {"method.server_momentum": 0.5, "method.name": "fedatlas"},
        "lr": {"local": {"lr": 0.5}, "sites.s1.annotated": ["ring"]},
        "oracle": {"sites": {"*": {"annotated": None}}, "net.name": "densenet121"},
    }
    profiles = {"full": {"local.batch": 2, "arms": {"mu": {"rounds": 9}}}, "smoke": {"rounds": 1}}
    found = loaded(tmp_path, small_images, arms=arms, profiles=profiles)
    assert found["same"].method == {"name": "fedprox", "mu": 0.5}
    assert found["other"].method == {"name": "fedavg"}
    assert found["mu"].method == {"name": "fedprox", "mu": 0.25} and found["mu"].rounds == 9
    assert found["order"].method == {"name": "fedatlas", "server_momentum": 0.5}
    assert found["lr"].local.lr == 0.5 and found["lr"].local.optimizer == "adam"
    assert [site.annotated for site in found["lr"].sites] == [("blob", "bar"), ("ring",), ("ring",)]
    assert [site.annotated for site in found["oracle"].sites] == [None] * 3
    assert found["oracle"].net == {"name": "densenet121"}
    assert {f.local.batch for f in found.values()} == {2}
    assert found["mu"].name == "tiny-full-mu-s0"
    assert loaded(tmp_path, small_images, "smoke", arms=arms, profiles=profiles)["mu"].rounds == 1


def test_steps_and_epochs_that_are_named_stand_in_place_of_the_budget(small_images, tmp_path) -> None:
    small_images["local"] |= {"epochs": 3, "steps": None}
    arms = {
        "plain": {},
        "steps": {"local": {"steps": 4, "epochs": None}},
        "epochs": {"local": {"steps": None, "epochs": 4}},
        "smaller": {"local.epochs": 4},
    }
    full = {"steps": 5, "arms": {"smaller": {"local.epochs": 2}}}
    found = loaded(tmp_path, small_images, arms=arms, profiles={"full": full})
    budgets = {arm: (federation.local.steps, federation.local.epochs) for arm, federation in found.items()}
    assert budgets == {"plain": (5, None), "steps": (4, None), "epochs": (None, 4), "smaller": (None, 2)}
    profiles = {"full": {"steps": 5, "arms": {"plain": {"local.epochs": 2}}}}
    plain = loaded(tmp_path, small_images, arms=arms, profiles=profiles)["plain"].local
    assert (plain.steps, plain.epochs) == (None, 2), "named by the profile alone"


def test_what_one_arm_changes_no_other_has(small_images, tmp_path) -> None:
    """Though the profile gives all of them the block, and the base its sites."""
    arms = {
        "first": {"method.mu": 0.5, "sites.s1.name": "east"},
        "same": {"method.name": "fedprox"},
        "other": {},
    }
    full = {"method": {"name": "fedprox", "mu": 0.25}, "arms": {"first": {"method.mu": 0.75}}}
    found = loaded(tmp_path, small_images, arms=arms, profiles={"full": full})
    assert [federation.method["mu"] for federation in found.values()] == [0.75, 0.25, 0.25]
    names = [[site.name for site in federation.sites] for federation in found.values()]
    assert names == [["s0", "east", "s2"], ["s0", "s1", "s2"], ["s0", "s1", "s2"]]
    assert found["first"].sites[1].path == found["other"].sites[1].path, "another name is no other site"


def test_seeds_are_the_first_of_the_file(small_images, tmp_path) -> None:
    file = write(tmp_path, small_images, seeds=[5, 3, 9], profiles={"full": {"seeds": 2}})

    def seeds(asked: int | None) -> list[int]:
        found = load_comparison([file], profile="full", data=tmp_path, seeds=asked)
        assert found.federations["prox"].keys() == set(found.seeds)
        return found.seeds

    assert seeds(None) == [5, 3] and seeds(1) == [5] and seeds(3) == [5, 3, 9]
    with pytest.raises(FederationError, match="4 seeds were asked for"):
        seeds(4)


def test_the_name_of_a_run_may_have_so_many_letters(small_images, tmp_path) -> None:
    longest = "a" * (MOST_LETTERS - len("tiny-full-"))
    assert loaded(tmp_path, small_images, arms={longest: {}})[longest].name == f"tiny-full-{longest}-s0"
    with pytest.raises(FederationError, match=f"{MOST_LETTERS + 1} letters; allowed: {MOST_LETTERS}"):
        loaded(tmp_path, small_images, arms={f"{longest}a": {}})


def test_where_and_how_the_runs_are_made(small_images, tmp_path, monkeypatch) -> None:
    small_images["engine"] = {"workers": 2, "cache": None}
    file = write(tmp_path / "files", small_images, runs="shared")

    def found(**how: Any) -> Comparison:
        return load_comparison([file], profile="full", data=tmp_path, runs=tmp_path / "runs", **how)

    plain, asked = found(), found(workers=0, device="cuda", seeds=1)
    assert plain.name == "tiny" and plain.folder == tmp_path / "runs" / "shared-full"
    assert plain.federations["prox"][1].name == "shared-full-prox-s1"
    assert plain.first.engine.workers == 2 and plain.first.engine.cache == str(tmp_path / "runs" / ".cache")
    assert asked.first.engine.workers == 0 and asked.first.engine.device == "cuda"
    told = "fedatlas compare comparison.yaml --profile full --data DIR"
    assert plain.command == told and asked.command == f"{told} --seeds 1"
    monkeypatch.chdir(tmp_path)
    assert found().command == told.replace("comparison.yaml", "files/comparison.yaml")
    small_images["engine"] = {"cache": "own", "device": "cuda"}
    write(tmp_path / "files", small_images)
    assert Path(found().first.engine.cache or "").name == "own" and found().first.engine.device == "cuda"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"arm": {}}, "did you mean 'arms'"),
        ({"arms": {"a": {"metod": {"name": "fedavg"}}}}, "arm a: the key 'metod' does not exist; did you mean 'method'"),
        ({"arms": {"a": {"sites.s9.role": "test"}}}, "'s9' does not exist"),
        ({"arms": {"a": {"rounds.more": 1}}}, "rounds is 2 and has no keys"),
        ({"arms": {"a": {"seed": 3}}}, "arm a: seed: every run has its own, by `seeds` of the comparison; leave it out"),
        ({"profiles": {"full": {"name": "x"}}}, "name: every run has its own, by the name of the arm; leave it out"),
        ({"measure": {"sites": []}}, "measure: sites: is empty; leave it out for all sites"),
        ({"measure": {"sites": "test"}}, "measure: sites is 'test', and no site has that role; list the sites by name"),
        ({"measure": {"local": ["prox"]}, "profiles": {"full": {}}},
         "measure: local: auroc has no values by case; allowed for dice"),
        ({"layout": {"columns": "site-class", "cells": "cases"}}, "layout: cells: cases: auroc has no values by case"),
        ({"layout": {"columns": "site-class", "against": "prox"}}, "layout: against: auroc has no values by case"),
        ({"arms": {"a": {"sites.s1": 3}}}, "arm a: sites.s1: 3 given for the whole of sites.s1; expected its keys"),
        ({"profiles": {"full": {}, "a/b": {}}}, "the profile 'a/b': a name of letters"),
        ({"arms": {"a": {}, "b": {"evaluation.metrics": ["ap"]}}}, "the arm b evaluates only ap"),
        ({"arms": {"a/b": {}}}, "the arm 'a/b': a name of letters"),
        ({"profiles": {"full": {"stepps": 3}}}, "did you mean 'steps'"),
        ({"profiles": {"full": {"seeds": 3}}}, "3 seeds were asked for, and the file lists [0, 1]"),
        ({"profiles": {"full": {"arms": {"prux": {}}}}}, "did you mean 'prox'"),
        ({"profiles": {"fuller": {}}}, "did you mean 'fuller'"),
        ({"printed": {"prux": {"mean": 0.5}}}, "did you mean 'prox'"),
        ({"measure": {"metric": "aurok"}}, "did you mean 'auroc'"),
        ({"measure": {"metric": "ap"}}, "add it to evaluation.metrics"),
        ({"measure": {"model": "last"}}, "add it to evaluation.models"),
        ({"measure": {"sites": ["s7"]}}, "'s7' does not exist"),
        ({"tables": [{"metric": "ap"}]}, "add it to evaluation.metrics"),
        ({"measure": {"splits": "test"}}, "did you mean 'split'"),
        ({"seeds": [1, 1]}, "holds one twice"),
        ({"base": "nowhere.yaml"}, "no such file"),
        ({"arms": {"a": {"method.name": "fedpox"}}}, "comparison.yaml: arm a: the method 'fedpox' does not exist; did you"),
        ({"arms": {"a": {"net.name": "cmn"}}}, "comparison.yaml: arm a: the net 'cmn' does not exist; did you mean 'cnn'"),
        ({"arms": {"a": {"labels.names": ["x", "x"]}}}, "comparison.yaml: arm a: labels.names: x is given twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_before_anything_is_trained(small_images, tmp_path, changes, told) -> None:
    with pytest.raises(FederationError) as error:
        loaded(tmp_path, small_images, **changes)
    assert told in str(error.value)


def test_files_that_are_no_comparison(tmp_path, capsys) -> None:
    file, other = tmp_path / "x.yaml", tmp_path / "y.yaml"
    expected = "; expected a comparison file, which begins with its `name`, its `base` (a federation file) and its `arms`"
    for content, text in (
        (b"", "is empty"),
        (b"- a", "holds a list"),
        (b"\xff", "is no text, its byte 0 is not UTF-8"),
    ):
        file.write_bytes(content)
        assert main(["compare", str(file)]) == 1
        assert f"error: {file}: {text}{expected}" in capsys.readouterr().err
    file.write_text("{name: x, base: common.yaml}")
    with pytest.raises(FederationError, match=r"x\.yaml: arms: missing; it must be given"):
        load_comparison([file])
    file.write_text("")
    assert main(["compare", str(file), str(other)]) == 1, "several are federation files"
    assert f"error: {file}: is empty; expected a federation file, " in capsys.readouterr().err


def test_a_profile_is_asked_for(file) -> None:
    with pytest.raises(FederationError, match="say which profile, with --profile; there are: smoke, full"):
        load_comparison([file])


def test_data_is_the_folder_of_relative_paths_only(small_images, tmp_path) -> None:
    folder, data = tmp_path / "files", tmp_path / "elsewhere"
    file = write(folder, small_images)
    (folder / "extended.yaml").write_text("{extends: common.yaml, rounds: 5}")
    base = yaml.safe_load((folder / "common.yaml").read_text())
    base["sites"][1]["path"] = "/fixed/site"
    (folder / "common.yaml").write_text(yaml.safe_dump(base))
    for name in ("common.yaml", "extended.yaml"):
        file.write_text(yaml.safe_dump({**PLAIN, "base": name}))
        here = load_comparison([file], profile="full").first
        there = load_comparison([file], profile="full", data=data).first
        assert [s.path for s in here.sites] == [str(folder / "site-0"), "/fixed/site", str(folder / "site-2")]
        assert [s.path for s in there.sites] == [str(data / "site-0"), "/fixed/site", str(data / "site-2")]


def test_data_is_not_of_paths_that_are_elsewhere(small_images, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = write(tmp_path / "files", small_images)
    base = yaml.safe_load((tmp_path / "files" / "common.yaml").read_text())
    for site, path in zip(base["sites"], ("bundled:chest", "~/site", "site-2"), strict=True):
        site["path"] = path
    (tmp_path / "files" / "common.yaml").write_text(yaml.safe_dump(base))
    here, there = (
        [site.path for site in load_comparison([file], profile="full", data=data).first.sites]
        for data in (None, Path("~/files/../data"))
    )
    assert there[:2] == here[:2] and there[2] == str(tmp_path / "home" / "data" / "site-2")


def test_a_wrong_folder_of_data_is_told_once_for_all_runs(small_images, tmp_path) -> None:
    file = write(tmp_path / "files", small_images)
    comparison = load_comparison([file], profile="full", data=tmp_path / "elsewhere", runs=tmp_path / "runs")
    told: list[str] = []
    with pytest.raises(
        DataError, match=r"every run lacks data; no such folder: .*elsewhere/site-0, .*--data"
    ) as error:
        run_comparison(comparison, tell=told.append)
    assert str(error.value).count("site-0") == 1
    assert not told and not list((tmp_path / "runs").glob("*/*"))


@pytest.mark.parametrize("split, key", [("test", "evaluation.test"), ("validation", "evaluation.validation")])
def test_without_a_case_to_measure_nothing_is_trained(small_images, findings, tmp_path, split, key) -> None:
    sites = [site | {"reading": {"patient": "patient"}} for site in small_images["sites"]]
    federation = small_images | {"sites": sites, "evaluation": small_images["evaluation"] | {split: 0}}
    file = write(tmp_path / "files", federation, measure={"metric": "auroc", "split": split})
    comparison = load_comparison([file], profile="full", data=findings, runs=tmp_path / "runs")
    with pytest.raises(DataError, match=f"asks for {split} cases, and there are none at .*Set `{key}`"):
        run_comparison(comparison)
    assert not list((tmp_path / "runs").glob("*/*/run.json"))


def test_without_a_validation_case_no_model_is_the_best(small_images, findings, tmp_path) -> None:
    data = shutil.copytree(findings, tmp_path / "data")
    for table in data.glob("*/labels.csv"):
        table.write_text(table.read_text().replace(",validation,", ",train,"))
    federation = small_images | {"evaluation": small_images["evaluation"] | {"validation": 0}}
    file = write(tmp_path / "files", federation, measure={"metric": "auroc"})
    comparison = load_comparison([file], profile="full", data=data, runs=tmp_path / "runs")
    with pytest.raises(DataError, match="asks for the model of the round that was best .* `model: last`"):
        run_comparison(comparison)
    assert not list((tmp_path / "runs").glob("*/*/run.json"))


def test_federation_files_are_arms(small_images, findings, tmp_path, capsys) -> None:
    files = []
    for name, method in (("one", "fedavg"), ("two", "standalone")):
        federation = small_images | {"name": name, "method": {"name": method}}
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(federation))
    arguments = ["compare", *map(str, files), "--runs", str(tmp_path / "runs")]
    assert main([*arguments, "--seeds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["arms"]) == ["one", "two"] and found["arms"]["two"]["seeds"] == [0, 1]
    assert found["name"] == "one-vs-two" and found["profile"] is None and found["failed"] == {}
    assert (tmp_path / "runs" / "one-vs-two" / "two-s1" / "rows.csv").exists()
    assert main([*arguments, "--profile", "full"]) == 1
    assert main([*arguments[:2], *arguments[1:]]) == 1
    assert main([*arguments, "--only-table", "--seeds", "0"]) == 1
    err = capsys.readouterr().err
    assert "have no profiles" in err and "a name of its own" in err and "--seeds 0: must be at least 1" in err


def test_federation_files_that_do_not_compare_are_told(small, small_images, tmp_path) -> None:
    files = {}
    for name, federation in (
        ("one", small_images | {"seed": 7}),
        ("two", small_images | {"seed": 7}),
        ("three", small_images | {"seed": 7, "sites": [{**small_images["sites"][0], "path": "site-0"}]}),
        ("later", small_images | {"seed": 8}),
        ("voxels", small | {"seed": 7}),
    ):
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump(federation | {"name": name}))
    files["plan"] = write(tmp_path / "plan", small_images)

    def found(*names: str, **how: Any) -> Comparison:
        return load_comparison([files[name] for name in names], **how)

    assert found("one", "two").seeds == [7] and found("one", "two").name == "one-vs-two"
    assert found("one", "later", seeds=2).seeds == [0, 1], "these in place of their own"
    three = found("one", "two", "three", data=tmp_path / "data")
    assert three.name == "one-and-2-others"
    assert three.federation("three").sites[0].path == str(tmp_path / "data" / "site-0")
    for names, told in (
        (("one", "later"), "one has the seed 7, later 8; give --seeds"),
        (("one", "voxels"), "one is for classification, voxels for segmentation; they do not compare"),
        (("one", "plan"), r"plan/comparison\.yaml: is a comparison file; give one alone"),
    ):
        with pytest.raises(FederationError, match=told):
            found(*names)


def test_federation_files_of_segmentation_are_arms(small, tmp_path, capsys) -> None:
    files = []
    for name, method in (("one", "fedavg"), ("two", "fedprox")):
        files.append(tmp_path / f"{name}.yaml")
        federation = small | {"name": name, "method": {"name": method}, "rounds": 1}
        federation["local"] = small["local"] | {"steps": 1 if name == "one" else 2}
        federation["evaluation"] = small["evaluation"] | {"models": ["best", "local"]}
        files[-1].write_text(yaml.safe_dump(federation))
    progress: list[str] = []
    comparison = load_comparison(files, runs=tmp_path / "runs", seeds=1)
    assert run_comparison(comparison, tell=lambda text: None, passing=progress.append) == {}
    assert any(line.startswith("2 of 2, two-s0: round 1 of 1, validation 0.") for line in progress)
    assert main(["compare", *map(str, files), "--runs", str(tmp_path / "runs"), "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 finished, 0 to do" in out and "one 3; two 6." in out and "| two | 3 |" in out
    assert "Forgetting: dice" in out and "2 R K size" in out


def test_bf16_on_a_processor_without_it_is_told_once_for_all_runs_and_by_each(
    small, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": False})
    files = []
    for name, precision in (("one", "float32"), ("two", "bf16"), ("three", "bf16")):
        files.append(tmp_path / f"{name}.yaml")
        local = small["local"] | {"steps": 1, "precision": precision}
        files[-1].write_text(yaml.safe_dump(small | {"name": name, "rounds": 1, "local": local}))
    told: list[str] = []
    passing: list[str] = []
    comparison = load_comparison(files, runs=tmp_path / "runs", seeds=1)
    assert run_comparison(comparison, tell=told.append, passing=passing.append) == {}
    assert sum(line.startswith("note: local.precision is bf16") for line in told) == 1
    slow = [line for line in passing if "note: local.precision is bf16" in line]
    assert [line.partition(": note")[0] for line in slow] == ["2 of 3, two-s0", "3 of 3, three-s0"]


def test_another_reference_and_another_measure_for_once(done, tmp_path, capsys) -> None:
    """The same runs, seen in another way: as a file says that has it so, and nothing is written."""
    file, data, trained = done
    runs = Path(shutil.copytree(trained, tmp_path / "runs"))
    arguments = ("--data", data, "--runs", runs)
    assert call(file, *arguments, "--only-table") == 0
    page = next((runs / "tiny-full").glob("*.html"))
    capsys.readouterr()

    def shown(*looks: str, of: Path = file) -> dict[str, Any]:
        assert call(of, *arguments, "--json", *looks) == 0
        return json.loads(capsys.readouterr().out)

    plain, turned = shown("--only-table"), shown("--against", "prox")
    assert plain["compared"] == {"prox": "fedavg"} and turned["compared"] == {"fedavg": "prox"}
    assert turned["differences"]["fedavg"]["mean"] == pytest.approx(-plain["differences"]["prox"]["mean"])
    assert turned["page"] is None and turned["command"].endswith(" --against prox")
    other = shown("--measure", "split=validation", "--measure", "sites=[s0]")
    raw = yaml.safe_load(file.read_text())
    raw["measure"] = {"split": "validation", "sites": ["s0"]}
    edited = file.with_name("edited.yaml")
    edited.write_text(yaml.safe_dump(raw))
    assert other["arms"] == shown("--only-table", of=edited)["arms"]
    assert other["arms"]["fedavg"]["mean"] != plain["arms"]["fedavg"]["mean"]
    assert other["command"].endswith(" --measure split=validation --measure 'sites=[s0]'")
    before = page.read_bytes()
    assert call(file, *arguments, "--against", "prox") == 0
    assert "difference to prox" in (out := capsys.readouterr().out) and "page: " not in out
    assert page.read_bytes() == before

    for asked, said in (
        (["--against", "proks"], "--against proks: the arm 'proks' does not exist; did you mean 'prox'?"),
        (
            ["--measure", "knwon=true"],
            "--measure knwon: the key 'knwon' does not exist; did you mean 'known'?",
        ),
        (["--measure", "known"], "--measure known: expected KEY=VALUE, as in --measure known=false"),
        (["--measure", "split=[test"], "comparison.yaml: measure.split: got '[test'"),
        (["--against", "prox", "--table", tmp_path / "page.md"], "with --against prox tables are shown"),
        (
            ["--measure", "known=true", "--arms", "prox"],
            "--arms prox: with --measure known=true tables are shown",
        ),
    ):
        assert call(file, *arguments, *asked) == 1
        assert said in capsys.readouterr().err
    assert call(file, "--data", data, "--runs", tmp_path / "none", "--against", "prox") == 1
    assert "--against prox: no arm has a finished run in " in capsys.readouterr().err
    federation = next((runs / "tiny-full").glob("*-s0")) / "federation.yaml"
    for asked, said in (
        (["--against", "prox"], "--against prox: is of a comparison file"),
        (["--measure", "known=true"], "--measure: is of"),
    ):
        assert main(["compare", str(federation), str(federation), *asked]) == 1
        assert said in capsys.readouterr().err


def test_the_page_changes_between_the_marks_only(done, tmp_path, capsys) -> None:
    file, data, runs = done
    arguments = ("--data", data, "--runs", runs, "--only-table", "--table")
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text("# Mine\n\n<!-- tiny -->earlier<!-- /tiny -->\n\nbelow\n")
    elsewhere = ("--data", data, "--runs", tmp_path / "typo", "--only-table", "--table", page)
    assert call(file, *elsewhere) == 1 and "earlier" in page.read_text(), "no run is there: nothing is lost"
    assert (
        "no arm has a finished run in " in (said := capsys.readouterr().err) and "by --runs, or that" in said
    )
    assert call(file, *arguments, page, "--arms", "fedavg") == 1
    assert "--only-table trains nothing" in capsys.readouterr().err
    assert call(file, "--data", data, "--runs", tmp_path / "typo", "--arms", "") == 1
    assert "the arm '' does not exist; known: fedavg, prox" in capsys.readouterr().err
    mixed = Path(shutil.copytree(runs, tmp_path / "mixed"))
    for name in ("run.json", "federation.yaml"):
        shutil.copy(mixed / "tiny-full" / "fedavg-s0" / name, mixed / "tiny-full" / "prox-s0" / name)
    assert call(file, "--data", data, "--runs", mixed, "--only-table") == 0
    out = capsys.readouterr().out
    assert "| fedavg | 2 |" in out and "prox: not counted: " in out, (
        "one run of another configuration is told"
    )
    assert call(file, *arguments, page) == 0
    text = page.read_text()
    assert text.startswith("# Mine\n\n<!-- tiny -->\n\n**auroc") and text.endswith(
        "\n<!-- /tiny -->\n\nbelow\n"
    )
    assert "earlier" not in text
    assert call(file, *arguments, page) == 0
    assert page.read_text() == text
    new = tmp_path / "new" / "page.md"
    assert call(file, *arguments, new) == 0
    assert new.read_text().startswith("<!-- tiny -->\n") and new.read_text().endswith("<!-- /tiny -->\n")
    for broken in ("<!-- tiny -->", "<!-- /tiny --> <!-- tiny -->"):
        page.write_text(broken)
        assert call(file, *arguments, page) == 1
        assert page.read_text() == broken
    assert "expected <!-- tiny --> once" in capsys.readouterr().err


def test_only_the_full_profile_becomes_a_result(file, findings, tmp_path, capsys) -> None:
    page = tmp_path / "docs" / "results.md"
    arguments = ("--data", findings, "--runs", tmp_path / "runs", "--table", page)
    assert call(file, *arguments, profile="smoke") == 1
    assert "holds only what the profiles full and long finished, and this is smoke" in capsys.readouterr().err
    assert not page.exists() and not (tmp_path / "runs").exists(), "refused before it trains"


def test_an_arm_with_more_labels_is_scored_on_what_all_are(findings, tmp_path) -> None:
    base = findings_federation(findings, tmp_path / "cache")
    for site in base["sites"]:
        site["score_all"] = False
    arms = {
        "partial": {"method": {"name": "centralized"}},
        "oracle": {"method": {"name": "centralized"}, "sites.*.annotated": None},
    }
    file = write(tmp_path, base, arms=arms, measure={"known": True})
    comparison = load_comparison([file], profile="full", data=findings, runs=tmp_path / "runs", seeds=1)
    assert run_comparison(comparison, tell=lambda text: None) == {}
    assert len(rows_of(comparison, "oracle", 0)) == 9 and len(rows_of(comparison, "partial", 0)) == 4
    found = collect(comparison)
    cells = {(row["site"], row["class"]): row["value"] for row in rows_of(comparison, "oracle", 0)}
    bar = [cells[site, "bar"] for site in ("s0", "s1") if cells[site, "bar"] is not None]
    assert found["arms"]["oracle"]["per_class"]["bar"] == [pytest.approx(np.mean(bar))]
    assert found["differences"]["oracle"]["n"] <= 4
    assert found["differences"]["oracle"]["wilcoxon"] is None, "fewer than six cells have no p value"


@pytest.mark.parametrize(("cases", "unit"), [(28, "together"), (80, "site")])
def test_the_interval_by_patient(tmp_path, cases: int, unit: str) -> None:
    data = write_findings(tmp_path / "data", cases=cases)
    base = findings_federation(data, tmp_path / "cache")
    for site in base["sites"]:
        site["reading"] = {"patient": "patient", "ignored": ["split"]}
    base["evaluation"] |= {"test": 0.5, "draws": 200}
    file = write(tmp_path, base)
    comparison = load_comparison([file], profile="full", data=data, runs=tmp_path / "runs")
    assert run_comparison(comparison, tell=lambda text: None) == {}
    found = collect(comparison)
    interval = found["bootstrap"]["prox"]
    assert interval["unit"] == unit and interval["low"] <= interval["value"] <= interval["high"]
    assert interval["patients"] == 3 * (cases // 4)
    if unit == "site":  # the very difference of the table
        assert interval["value"] == pytest.approx(found["differences"]["prox"]["mean"])
        assert interval["columns"] == found["differences"]["prox"]["n"] == 18
    else:
        values = []
        for seed in (0, 1):
            pooled = []
            for arm in ("prox", "fedavg"):
                parts = [Predictor(comparison, arm).of(seed, site) for site in ("s0", "s1", "s2")]
                joined = Predictions(
                    *(np.concatenate([getattr(p, k) for p in parts]) for k in ("scores", "truth", "known")),
                    [name for p in parts for name in p.patients],
                )
                pooled.append([s.value for s in score(joined, ["auroc"])])
            values += list(np.subtract(*pooled))
        assert interval["columns"] == 6 and interval["value"] == pytest.approx(np.mean(values))
    for site in ("s0", "s2"):
        predicted = Predictor(comparison, "prox").of(1, site)
        rows = [row for row in rows_of(comparison, "prox", 1) if row["site"] == site]
        said = Predictions(predicted.scores, predicted.truth, predicted.known, predicted.patients)
        assert [s.value for s in score(said, ["auroc"])] == [row["value"] for row in rows]
    assert collect(comparison)["bootstrap"] == found["bootstrap"], "from what was kept"


def test_differences_are_paired_and_adjusted_together() -> None:
    rng = np.random.default_rng(0)
    keys = range(8)
    reference = dict(zip(keys, rng.random(8).tolist(), strict=True))
    others = {
        "near": {key: value + rng.normal(0.01, 0.02) for key, value in reference.items()},
        "far": {key: value + rng.normal(0.3, 0.1) for key, value in reference.items()},
        "few": {key: reference[key] + 0.1 for key in list(keys)[:5]},
        "holes": {key: None for key in keys},
    }
    found = differences(reference, others)
    p = [
        float(stats.wilcoxon([others[n][k] for k in keys], list(reference.values())).pvalue)  # type: ignore[union-attr]
        for n in ("near", "far")
    ]
    expected = sorted(p)[0] * 2, max(sorted(p)[0] * 2, sorted(p)[1])
    assert sorted([found["near"].wilcoxon, found["far"].wilcoxon]) == pytest.approx(sorted(expected))  # type: ignore[type-var]
    assert found["few"].n == 5 and found["few"].mean == pytest.approx(0.1) and found["few"].t is None
    assert found["holes"].n == 0 and found["holes"].mean is None


def results(metric: str = "auroc", **arms: list[float]) -> dict[str, Any]:
    """As `collect` gives it, with one class and two seeds."""
    return {
        "name": "made", "profile": "full", "command": "fedatlas compare made.yaml", "task": "segmentation",
        "seeds": [0, 1], "metric": metric, "split": "test", "model": "best", "sites": None, "known": None,
        "pixels": False, "classes": ["a"], "title": None, "pairs": "cell", "costs": {}, "forgetting": {},
        "columns": [{"key": "a", "title": "a", "group": "", "starred": False}],
        "layout": asdict(compare.Layout()), "own": [], "rows": {}, "families": [list(arms)],
        "budget": {arm: {"rounds": 2, "steps": 3, "epochs": None, "total": 6} for arm in arms},
        "arms": {
            arm: {
                "seeds": list(range(len(values))), "per_class": {"a": values}, "per_cell": {}, "mean": values, "hours": 0.5,
                "commits": ["0123456789abcdef+"], "arithmetic": [None], "problems": [], "undefined": 0, "lacking": 0, "values": 2,
            }
            for arm, values in arms.items()
        },
        "compared": {}, "differences": {}, "bootstrap": {}, "printed": {"one": {"a": 0.7}},
        "ranks": [], "tables": [],
    }  # fmt: skip


def test_the_best_of_the_finished_is_bold() -> None:
    text = markdown(results(one=[0.5, 0.5], two=[0.6, 0.6], three=[0.9]))
    assert "| two | 2 | **0.600 ± 0.000** | **0.600 ± 0.000** |" in text
    assert "| one | 2 | 0.500 ± 0.000 |" in text and "| three | 1 of 2 | 0.900 | 0.900 |" in text
    text = markdown(results("hd95", one=[5.0, 5.0], two=[6.0, 6.0], three=[5.01, 5.01]))
    assert "**5.0 ± 0.0**" in text and "**6.0" not in text and text.count("**5.0 ± 0.0**") == 4
    assert "**" not in markdown(results(one=[0.5, 0.5], two=[0.6])).partition("\n\n")[2]
    # each of those that are compared with one another
    text = markdown(
        results(one=[0.5, 0.5], two=[0.6, 0.6], three=[0.9, 0.9]) | {"families": [["one", "two"], ["three"]]}
    )
    assert (
        "**0.600 ± 0.000**" in text
        and "**0.900" not in text
        and "the best among arms that are compared with one another, of which" in text
    )


def test_an_arm_that_misses_a_hard_class_is_not_the_best_by_it() -> None:
    """Its mean is over what it finds; the paired differences do without what either lacks."""
    found = results("hd95", one=[5.0, 6.0], two=[7.0, 8.0], three=[6.0, 6.5])
    found["arms"]["one"] |= {
        "per_class": {"a": [5.0, None]},
        "undefined": 1,
        "lacking": 3,
        "lacking_in": ["a"],
        "values": 12,
    }
    text = markdown(found)
    assert "| one | 2 | 5.0 | 5.5 ± 0.7 |" in text and "| three | 2 | **6.2 ± 0.4** | **6.2 ± 0.4** |" in text
    told = "Values of site, case and class that an arm lacks and another has (an empty prediction has no distance): one 3 of 12."
    assert told in text and "all values are lacking in a seed: one 1 times." in text
    assert "Means are over the rest, and such a mean is never bold." in text
    assert "an arm lacks" in markdown(results(one=[0.5, 0.5]) | {"tables": [found]})
    assert "an arm lacks" not in markdown(results("hd95", one=[5.0, 6.0], two=[7.0, 8.0]))
    # where no arm has a value nobody lacks one
    found = results(one=[0.5, 0.6], two=[0.7, 0.8])
    for arm, values in (("one", [0.5, None]), ("two", [0.7, None])):
        found["arms"][arm]["per_class"] = {"a": values}
    assert "| two | 2 | **0.700** | **0.750 ± 0.071** |" in markdown(found)


def test_a_difference_without_its_reference_is_told() -> None:
    none = {"n": 0, "mean": None, "wilcoxon": None, "t": None}
    found = results(one=[], two=[0.5, 0.6]) | {"compared": {"two": "one"}, "differences": {"two": none}}
    text = markdown(found)
    assert (
        "two: no difference to one, which was not run." in text and "Not run (1 of 1 arms): two" not in text
    )
    found = results(one=[0.5, 0.6], two=[0.5, 0.6]) | {
        "compared": {"two": "one"},
        "differences": {"two": none},
    }
    assert "| two | 0 | – | – | – |" in markdown(found)


def test_processors_that_round_differently_are_told() -> None:
    found = results(one=[0.5, 0.6], two=[0.5, 0.6], three=[0.5, 0.6])
    assert "rocessor" not in markdown(found)  # none was kept
    for arm in found["arms"].values():
        arm["arithmetic"] = ["NVIDIA H100"]
    assert "Processor of all runs: NVIDIA H100." in markdown(found)
    found["arms"]["three"]["arithmetic"] = [None]
    found["arms"]["one"]["arithmetic"] = ["AVX512, amx_bf16"]
    found["arms"]["two"]["arithmetic"] = ["AVX512, amx_bf16", "AVX2"]
    told = "as another seed would: AVX512, amx_bf16: one, two; AVX2: two; not kept: three."
    assert told in markdown(found)


def test_arms_that_were_not_run_are_named_once() -> None:
    found = results(one=[0.5, 0.6], two=[])
    text = markdown(found | {"tables": [found | {"title": "Again", "tables": []}]})
    assert text.count("| one | 2 | 0.550") == 2 and text.count("Not run (1 of 2 arms): two.") == 1
    first = found | {"arms": {"one": found["arms"]["one"]}}
    text = markdown(first | {"tables": [found | {"title": "With one more", "tables": []}]})
    assert text.count("Not run (1 of 2 arms): two.") == 1


def test_printed_numbers_stand_beside_ours() -> None:
    text = markdown(results(one=[0.5, 0.6], two=[]))
    assert "| one | 0.700 (0.550) |" in text
    assert "Not run (1 of 2 arms): two." in text and "| two |" not in text
    assert "`fedatlas compare made.yaml`" in text and "1.00 hours" in text and "`012345678+`" in text
    assert "Seeds 0, 1; 2 rounds of 3 steps; profile full" in text


def test_budgets_that_differ_are_told() -> None:
    found = results(one=[0.5, 0.6], two=[])
    assert "budgets differ" not in markdown(found)
    found["budget"]["two"]["total"] = 12000
    assert "The budgets differ. Optimizer steps of all sites together: one 6; two 12,000." in markdown(found)


def test_where_no_arm_has_a_value_there_is_no_rank() -> None:
    """As of classes that a site does not annotate, where every site annotates all."""
    comparison: Any = SimpleNamespace(families=[["a", "b"]], seeds=[0], metric="dice")
    case = ("s0", "c0", "liver")
    assert not ranks_of(comparison, {arm: {0: {case: None}} for arm in "ab"})
    assert not ranks_of(comparison, {arm: {0: {}} for arm in "ab"})
    (found,) = ranks_of(comparison, {"a": {0: {case: 0.5}}, "b": {0: {case: 0.4}}})
    assert found["mean"] == {"a": 1.0, "b": 2.0}


def test_ranks_and_the_critical_difference() -> None:
    rng = np.random.default_rng(1)
    values = {
        name: {key: float(rng.normal(mean, 0.1)) for key in range(14)}
        for name, mean in (("low", 0.0), ("high", 1.0), ("higher", 1.05), ("middle", 0.5))
    }
    values["low"][99] = 0.5
    found = mean_ranks(values)
    assert found.n == 14, "a block that one of them lacks is left out"
    assert list(found.mean)[2:] == ["middle", "low"] and found.mean["low"] == 4 and found.mean["middle"] == 3
    # Demšar 2006, table 5: q = 2.569 for four
    assert found.critical == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 14)), rel=1e-3)
    assert found.friedman is not None and found.friedman < 1e-6
    assert [set(group) for group in found.groups] == [{"high", "higher"}, {"middle", "low"}]
    assert next(iter(mean_ranks(values, higher=False).mean)) == "low"
    few = mean_ranks({name: {key: of[key] for key in range(5)} for name, of in values.items()})
    assert few.n == 5 and few.critical is None and few.friedman is None and few.groups == ()
    same = mean_ranks({name: dict.fromkeys(range(6), 0.5) for name in "abc"})
    assert same.friedman == 1.0 and set(same.mean.values()) == {2.0} and len(same.groups) == 1


def test_the_page_holds_tables_and_diagram() -> None:
    found = results(one=[0.5, 0.5], two=[0.6, 0.6])
    assert "<svg" not in html(found)
    values = {"one": dict.fromkeys(range(8), 0.5), "<two>": dict.fromkeys(range(8), 0.6)}
    page = html(found | {"ranks": [asdict(mean_ranks(values))]})
    assert (
        page.count("Critical-difference diagram") == 1 and "&lt;two&gt; 1.00" in page and "<two>" not in page
    )
    assert "<b>0.600 ± 0.000</b>" in page and "<code>fedatlas compare made.yaml</code>" in page
    assert "://" not in page and "**" not in page


def test_what_is_better_and_in_millimetres_is_so_in_every_table() -> None:
    assert {name for name, metric in METRICS.items() if not metric.higher_is_better} == LOWER
    assert {name for name, metric in METRICS.items() if metric.unit == "mm"} == MILLIMETRES


def test_printed_numbers_keep_their_decimals_and_stand_in_the_order_of_ours() -> None:
    found = results(one=[0.5, 0.6], two=[], three=[0.5, 0.5])
    found["printed"] = {
        "three": {"mean": 0.5},
        "two": {"b": 0.5},
        "one": {"b": 0.5, "mean": 0.81234, "a": 0.7},
    }
    text = markdown(found).partition("Printed numbers")[2]
    assert "| arm | a | mean | b |" in text
    assert "| one | 0.700 (0.550) | 0.81234 (0.550) | 0.500 (–) |" in text
    assert "| two | – | – | 0.500 (not run) |\n| three | – | 0.500 (0.500) | – |" in text


def test_an_interval_of_some_resamples_says_which_share_lacks() -> None:
    found = results(one=[0.5, 0.6], two=[0.6, 0.7])
    apart = {"n": 6, "mean": 0.1, "wilcoxon": 0.0004, "t": 0.0126}
    found |= {"compared": {"two": "one"}, "differences": {"two": apart}}
    interval = {"value": 0.1, "low": 0.05, "high": 0.15, "undefined": 25, "draws": 1000, "columns": 4,
                "unit": "site", "over": [], "reason": ""}  # fmt: skip
    line = "| two | 6 | +0.100 | < 0.001 | 0.013 | +0.100 (+0.050 to +0.150{}) | {} |"
    for changes, lost, over in (
        ({}, "; 2% of resamples without a value", "4 cells"),
        ({"undefined": 4}, "", "4 cells"),
        ({"undefined": 0, "unit": "together", "over": ["a", "b"]}, "", "sites together: a, b"),
    ):
        text = markdown(found | {"bootstrap": {"two": interval | changes}})
        assert line.format(lost, over) in text and "no interval" not in text
    none = {"low": None, "reason": "4 patients"}
    text = markdown(found | {"bootstrap": {"two": none}})
    assert "| < 0.001 | 0.013 | – | – |" in text and "two: no interval: 4 patients" in text


def test_the_footer_names_the_arms_of_each_budget_and_what_does_not_count() -> None:
    found = results(one=[0.5, 0.6], two=[0.5, 0.6])
    assert "Seeds 0, 1; 2 rounds of 3 steps; profile full. 1.00 hours" in markdown(found)
    found["budget"]["two"] |= {"rounds": 4, "steps": None, "epochs": 0.5}
    found["arms"]["one"] |= {"commits": ["0123456789abcdef", None], "problems": ["no such file\nat all"]}
    text = markdown(found)
    assert "Seeds 0, 1; one: 2 rounds of 3 steps; two: 4 rounds of 0.5 epochs; profile" in text
    assert "made by `012345678`, `012345678+`." in text
    assert text.endswith("one: not counted: no such file\n")
    assert "\nMean ± SD over seeds" in text
    for changes in ({"cells": "cases"}, {"average": "sites"}):
        other = found | {"layout": found["layout"] | changes, "cases": {}}
        assert "\nWhere a table says nothing else: mean ± SD" in markdown(other)


def test_costs_before_the_first_round_stand_where_there_are_any() -> None:
    found = results(one=[0.5, 0.6], two=[0.5, 0.6]) | {"printed": {}}
    cost = {"rounds": 2.0, "sites": 3.0, "megabytes": 1.5, "formula": None, "wire": 12345.6, "evaluation": 0.0,
            "step_hours": 0.5, "step_relative": None, "site_hours": None, "site_relative": None,
            "start_hours": 0.0, "start": 0.0, "server_seconds": None}  # fmt: skip
    text = markdown(found | {"costs": {"two": cost}})
    assert "| two | 2 | 3 | 1.50 | – | 12346 | 0 | 0.500 | – | – |" in text and "before round 1" not in text
    assert "in brackets" not in text and "Not run (1 of 2 arms): one." in text
    text = markdown(found | {"costs": {"two": cost | {"start": 0.25}}})
    assert (
        "| two | 2 | 3 | 1.50 | – | 12346 | 0 | 0.500 | – | 0 | – |" in text and "before round 1, h" in text
    )
    text = markdown(found | {"costs": {"two": cost | {"start_hours": 0.5, "server_seconds": 0.0}}})
    assert "| 0.500 | – | 0.500 | 0.0 |" in text


def test_a_curve_tells_its_best_its_last_and_how_far_it_swung() -> None:
    found = results(one=[0.5, 0.6], two=[0.5, 0.6], three=[], four=[0.5])
    curve = {
        "metric": "asd",
        "values": [[3.0, 1.0, 2.0], [5.0, 3.0, 3.0]],
        "change": [1.5, 1.0],
        "fall": [0.5, 0.0],
    }
    text = markdown(
        found | {"curves": {"one": curve, "two": curve | {"values": [[3.0, 1.0, 2.0], [4.0, 4.0, 4.0]]}}}
    )
    assert "| one | 3 | 2.0 ± 1.4 | 2.5 ± 0.7 | 1.25 ± 0.35 | 0.25 ± 0.35 |" in text
    assert "| four | – | – | – | – | – |" in text and "Not run (1 of 4 arms): three." in text
    assert "different numbers of rounds" not in text
    text = markdown(
        found | {"curves": {"one": curve, "two": curve | {"values": [[3.0, 1.0], [4.0, 4.0, 4.0]]}}}
    )
    assert "| two | 2 or 3 | 2.5 ± 2.1 |" in text and "evaluated in different numbers of rounds" in text


def test_a_site_that_is_called_as_its_column_is_named_all_the_same() -> None:
    found = results(**{"a|b": [0.5, 0.5]}) | {"printed": {}}
    columns = [{"key": "left/left lung", "title": "left lung", "group": "left", "starred": False}]
    text = markdown(found | {"columns": columns})
    assert "| arm | seeds | left lung | mean |" in text and "| a\\|b | 2 | – | 0.500 ± 0.000 |" in text
    sites = found["layout"] | {"columns": "site-class"}
    assert "| arm | seeds | left: left lung | mean |" in markdown(
        found | {"columns": columns, "layout": sites}
    )


def test_what_is_not_tested_is_told_for_all_cells_or_for_some() -> None:
    found = results(one=[0.5, 0.5], two=[0.6, 0.6])
    found["layout"] |= {"against": "one"}
    tests = {
        "made": 0,
        "unit": "case",
        "few": {"two": {"a": 4}, "three": {"a": 5, "mean": 3}},
        "lost": {},
        "p": {},
    }
    text = markdown(found | {"tests": tests})
    assert "Nothing is tested: no cell has 6 pairs of cases." in text and "Underlined" not in text
    text = markdown(
        found
        | {"tests": tests | {"made": 2, "lost": {"two": {"a": 1}}, "p": {"two": {"a": 0.049, "mean": 0.05}}}}
    )
    assert "Not tested, with fewer than 6 pairs of cases: a 4 or 5, mean 3." in text
    assert "against one; 2 tests, not corrected for their number." in text
    assert "Cases left out of the pairs, as only one of the two models has a value there: two a 1." in text
    assert "| two | 2 | **<ins>0.600 ± 0.000</ins>** | **0.600 ± 0.000** |" in text
    found["layout"] |= {"correction": "holm"}
    assert "2 tests, Holm-adjusted over these tests." in markdown(found | {"tests": tests | {"made": 2}})


def test_segmentation_is_compared_by_cases(small, phantom, tmp_path) -> None:
    arms = {"fedavg": {}, "pooled": {"method.name": "centralized"}}
    profiles = {"full": {"rounds": 1, "steps": 2, "seeds": 1}}
    more = {"tables": [{"known": True}, {"split": "validation"}]}
    file = write(
        tmp_path, small, arms=arms, profiles=profiles, measure={"known": False, "sites": ["s0"]}, **more
    )
    comparison = load_comparison([file], profile="full", data=phantom, runs=tmp_path / "runs")
    assert run_comparison(comparison, tell=lambda text: None) == {}
    rows = rows_of(comparison, "pooled", 0)
    unknown = [row for row in rows if not row["known"]]
    found = collect(comparison)
    assert {row["site"] for row in rows} == {"s0"} and 0 < len(unknown) < len(rows)
    assert set(found["arms"]["pooled"]["per_class"]) == {row["class"] for row in unknown}
    assert found["metric"] == "dice" and "background" not in found["classes"]
    only = found["differences"]["pooled"]
    assert found["pairs"] == "case" and only["n"] == 1 and only["t"] is only["wilcoxon"] is None
    assert found["bootstrap"]["pooled"]["low"] is None and found["ranks"][0]["critical"] is None
    assert "classes that it does not, sites s0" in markdown(found)
    known, validation = found["tables"]
    assert set(known["arms"]["pooled"]["per_class"]) > {row["class"] for row in rows if row["known"]}, (
        "all sites"
    )
    text = markdown(found)
    assert text.count("| pooled | 1 |") == 5, "of means three, of differences, of costs"
    assert "**dice, validation cases, model best**" in text
    values = validation["arms"]["pooled"]["mean"]
    assert values != known["arms"]["pooled"]["mean"] and f"{values[0]:.3f}" in text

    page = write_page(comparison, found).read_text()
    assert page.count('class="overlay"') == 4, "of one site: image, truth and two arms"
    (kept,) = (comparison.path("pooled", 0) / "sites" / "s0").glob("compared-test-*.npz")
    written = kept.stat().st_mtime_ns
    assert write_page(comparison, found).read_text() == page and kept.stat().st_mtime_ns == written
    shown = overlays(comparison, {"fedavg": [0], "pooled": [0]})[0]["s0"]["pooled"]
    assert {row["case"] for row in rows} == {shown.case} and set(shown.truth) == set(shown.prediction)
    assert shown.image.shape == shown.truth["liver"].shape == (24, 24) and shown.truth["liver"].any()
    # cases are shared by arms that read them alike, and by no others
    (one, *_), cases = subjects(comparison, {"fedavg": [0], "pooled": [0]}), Cases()
    trained = Trained(one.path, one.model)
    entry = next(site for site in one.federation.sites if site.name == "s0")
    less = [replace(site, annotated=["liver"]) if site is entry else site for site in one.federation.sites]
    other = replace(one, federation=replace(one.federation, sites=less))
    known = [int(cases(subject, trained, "s0", shown.case).known.sum()) for subject in (one, other, one)]
    assert known[1] < known[0] == known[2]


CHEST = {
    "montgomery": ("left lung",),
    "shenzhen": ("right lung",),
    "jsrt": ("heart",),
    "siim": ("pneumothorax",),
}
"""Site -> what it annotates."""
TABLE_5 = {
    "montgomery/left lung": 0.9803,
    "montgomery/right lung": 0.9674,
    "shenzhen/left lung": 0.9577,
    "shenzhen/right lung": 0.9702,
    "jsrt/left lung": 0.9630,
    "jsrt/right lung": 0.9728,
    "jsrt/heart": 0.9537,
    "siim/pneumothorax": 0.8258,
}
"""ConDistFL's row of the paper's table 5."""


def chest(folder: Path, **changes: Any) -> Comparison:
    """A comparison of overlapping classes at four sites whose data are not here."""
    base = {
        "name": "chest",
        "labels": {"names": ["left lung", "right lung", "heart", "pneumothorax"], "exclusive": False},
        "sites": [{"name": name, "path": name} for name in CHEST],
        "preprocessing": {"spacing": [4, 4, 4], "window": [-100, 200], "patch": [16, 16], "context": 1},
        "net": {"name": "unet"},
        "method": {"name": "fedavg"},
        "rounds": 2,
        "evaluation": {"metrics": ["dice"]},
    }
    arms = {"fedavg": {}, "condistfl": {"method.name": "fedprox"}}
    file = write(
        folder, base, **{"arms": arms, "profiles": {}, "layout": {"columns": "site-class"}, **changes}
    )
    return load_comparison([file], runs=folder / "runs")


def pretend(
    comparison: Comparison, arm: str, seed: int, values: dict[str, Mapping[str, Any]], seconds: float = 1.0
) -> None:
    """A finished run that never ran. values: model -> "site/class" -> value, or the values of its cases, None where the
    truth is empty, a tuple where it is empty and scored nevertheless."""
    path, federation = comparison.path(arm, seed), comparison.federations[arm][seed]
    (path / "rounds" / "0001").mkdir(parents=True)
    (path / "federation.yaml").write_text(yaml.safe_dump(resolved(federation)))
    about = {
        "hash": hash_of(federation), "finished": "then", "git": "0123", "rounds": 1, "model_bytes": 2**20, "channels": 1,
        "labels": {"names": federation.labels.names, "groups": [], "exclusive": False},
        "sites": {site: {"annotated": names} for site, names in CHEST.items()},
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(about))
    log = {
        "round": 1, "phases": {"round": 2 * seconds + 5}, "sites": {s: {"step_seconds": seconds / 4} for s in CHEST},
        "cost": {s: {"bytes_up": 2**20, "bytes_down": 2**20, "seconds": seconds / 2} for s in CHEST},
    }  # fmt: skip
    (path / "rounds" / "0001" / "log.json").write_text(json.dumps(log))
    rows = []
    for model, cells in values.items():
        for cell, found in cells.items():
            site, _, name = cell.partition("/")
            for number, value in enumerate(found if isinstance(found, list) else [found] * 3):
                scored, empty = (value[0], True) if isinstance(value, tuple) else (value, value is None)
                rows.append({
                    "split": "test", "grid": "original", "model": model, "round": 1, "site": site,
                    "case": f"{site}-{number}", "class": name, "metric": "dice", "value": scored,
                    "known": name in CHEST[site], "reason": "truth empty" if empty else "",
                })  # fmt: skip
    write_atomic(path / "rows.csv", rows_text(rows).encode())


def test_a_column_per_site_and_class_with_both_averages(tmp_path) -> None:
    printed = {"condistfl": {**TABLE_5, "exclude*": 0.9325, "include*": 0.9489}}
    by_organ = {
        "layout": {"columns": "site-class", "group": "organ"},
        "title": "Table 5",
        "sites": ["jsrt", "shenzhen"],
    }
    comparison = chest(tmp_path, printed=printed, tables=[by_organ, {"layout": {"group": "organ"}}])
    pretend(comparison, "condistfl", 0, {"best": TABLE_5})
    found = collect(comparison)
    arm = found["arms"]["condistfl"]
    assert round(arm["exclude"][0], 4) == 0.9325 and round(arm["mean"][0], 4) == 0.9489
    assert [c["key"] for c in found["columns"]] == list(TABLE_5), (
        "sites as in the file, classes as in the label space"
    )
    assert [c["key"] for c in found["columns"] if c["starred"]] == [
        key for key in TABLE_5 if key.split("/")[1] not in CHEST[key.split("/")[0]]
    ]
    organs = [c["key"] for c in found["tables"][0]["columns"]]
    assert organs == [
        "shenzhen/left lung",
        "jsrt/left lung",
        "shenzhen/right lung",
        "jsrt/right lung",
        "jsrt/heart",
    ]
    text = markdown(found)
    assert r"| montgomery: left lung | montgomery: right lung\* | shenzhen: left lung\* |" in text
    assert r"siim: pneumothorax | exclude\* | include\* |" in text and "**Table 5: dice, test cases" in text
    assert (
        "| condistfl | 0.9803 (0.980) | 0.9674 (0.967) |" in text
        and "| 0.9325 (0.932) | 0.9489 (0.949) |" in text
    )
    assert "arms): fedavg." in text and "| left lung | right lung | heart | pneumothorax | mean |" in text
    page = html(found)
    assert '<th scope="colgroup" colspan="3">jsrt</th>' in page and "right lung&#42;" in page
    assert "<em>exclude&#42;</em>" in page


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"printed": {"fedavg": {"jrst/heart": 0.9}}}, "the site 'jrst' does not exist; did you mean 'jsrt'"),
        ({"printed": {"fedavg": {"jsrt/hart": 0.9}}}, "did you mean 'heart'"),
        ({"printed": {"fedavg": {"heart": 0.9}}}, "expected site/class, mean, exclude*, include*"),
        ({"layout": {}, "printed": {"fedavg": {"include*": 0.9}}}, "the class 'include*' does not exist"),
        ({"layout": {}, "printed": {"fedavg": {"jsrt/heart": 0.9}}}, "expected a class or mean"),
        ({"layout": {"columns": "class", "group": "site"}}, "set columns to site-class"),
        ({"layout": {"columns": "sites"}}, "layout.columns: got 'sites'"),
        ({"tables": [{"printed": {"fedavgg": {"mean": 0.9}}}]}, "did you mean 'fedavg'"),
    ],
)  # fmt: skip
def test_a_column_that_does_not_exist_is_told(tmp_path, changes, told) -> None:
    with pytest.raises(FederationError) as error:
        chest(tmp_path, **changes)
    assert told in str(error.value)


@pytest.mark.parametrize("cases", [5, 6])
def test_tests_pair_by_case_and_need_six(tmp_path, cases: int) -> None:
    comparison = chest(tmp_path)
    rng = np.random.default_rng(3)
    values = {}
    for arm, better in (("fedavg", 0.0), ("condistfl", 0.2)):
        for seed in (0, 1):
            counts = {"montgomery/left lung": cases - 2, "montgomery/right lung": cases - 2, "jsrt/heart": 2}
            values[arm, seed] = {
                key: (0.5 + better + rng.normal(0, 0.05, n)).tolist() for key, n in counts.items()
            }
            pretend(comparison, arm, seed, {"best": values[arm, seed]})
    found = collect(comparison)
    apart, interval = found["differences"]["condistfl"], found["bootstrap"]["condistfl"]
    assert apart["n"] == interval["n"] == cases, "seeds and classes are no cases"
    means = {arm: np.mean(found["arms"][arm]["mean"]) for arm in found["arms"]}
    assert interval["value"] == pytest.approx(means["condistfl"] - means["fedavg"])
    of_case = []
    for site, names in (("montgomery", ("left lung", "right lung")), ("jsrt", ("heart",))):
        of_arm = [
            np.mean([values[arm, seed][f"{site}/{name}"] for seed in (0, 1) for name in names], axis=0)
            for arm in ("condistfl", "fedavg")
        ]
        of_case += [*np.subtract(*of_arm)]
    assert apart["mean"] == pytest.approx(np.mean(of_case))
    text = markdown(found)
    if cases == 6:
        assert apart["wilcoxon"] == pytest.approx(stats.wilcoxon(of_case).pvalue)  # type: ignore[union-attr]
        assert interval["low"] < interval["value"] < interval["high"]
        assert f"| condistfl | 6 | {interval['value']:+.3f} | {interval['low']:+.3f} to" in text
    else:
        assert apart["wilcoxon"] is apart["t"] is interval["low"] is None
        assert f"| condistfl | 5 | {interval['value']:+.3f} | – | – | – |" in text
        assert found["ranks"][0]["critical"] is None and "Friedman" not in text
    assert json.loads(json.dumps(found)) == found


def test_forgetting_is_local_against_global_where_the_class_is(tmp_path) -> None:
    comparison = chest(tmp_path, seeds=[0])
    globally = {"montgomery/left lung": [0.9] * 6, "siim/pneumothorax": [0.8, 0.6, (1.0,), (1.0,)]}
    local = {"montgomery/left lung": [0.1, 0.2] * 3, "siim/pneumothorax": [0.5, 0.3, (0.0,), (0.0,)]}
    pretend(comparison, "fedavg", 0, {"best": globally, "local/siim": local, "local/montgomery": local})
    pretend(comparison, "condistfl", 0, {"best": globally, "local/siim": globally})
    found = collect(comparison)["forgetting"]
    assert found["fedavg"]["sites"] == pytest.approx({"siim": -0.75, "montgomery": -0.3})
    assert found["fedavg"]["value"] == pytest.approx(-0.525) and found["fedavg"]["n"] == 8
    assert found["fedavg"]["low"] < -0.525 < found["fedavg"]["high"] < 0
    assert found["condistfl"]["value"] == found["condistfl"]["low"] == found["condistfl"]["high"] == 0
    text = markdown(collect(comparison))
    assert "| fedavg | 0.800 | 0.275 | -0.525 | " in text and "| of montgomery | of siim |" in text.replace(
        "| of siim | of montgomery |", "| of montgomery | of siim |"
    )


def test_box_plots_of_global_and_local_models_stand_beside_each_other(tmp_path) -> None:
    comparison = chest(tmp_path, seeds=[0])
    cells = {"jsrt/right lung": [0.9, 0.8], "siim/pneumothorax": [0.5, (1.0,)]}
    pretend(comparison, "fedavg", 0, {"best": cells, "local/siim": cells, "local/jsrt": cells})
    text = write_page(comparison, collect(comparison)).read_text()
    assert (
        "Global and local models" in text and "right lung, jsrt *" in text and "pneumothorax, siim<" in text
    )
    assert "local, siim" in text and "local, montgomery" not in text
    boxes = "Box plots of Dice by class and model: fedavg"
    assert boxes in text and "://" not in text
    assert "No picture of fedavg at jsrt, fedavg at siim: " in text and "no such folder" in text
    pretend(comparison, "condistfl", 0, {"best": {key: 0.5 for key in cells}})
    assert f"{boxes}, condistfl" in write_page(comparison, collect(comparison)).read_text()


def test_costs_stand_beside_those_of_the_first_arm(tmp_path) -> None:
    comparison = chest(tmp_path, seeds=[0])
    values = {"best": {"jsrt/heart": 0.5}}
    pretend(comparison, "fedavg", 0, values, seconds=3600)
    text = markdown(collect(comparison))
    assert "Not run (1 of 2 arms): condistfl." in text
    pretend(comparison, "condistfl", 0, values, seconds=3967)
    found = collect(comparison)["costs"]
    assert found["condistfl"]["step_relative"] == pytest.approx(1.102, abs=1e-3)
    assert found["fedavg"]["server_seconds"] == pytest.approx(5) and found["fedavg"]["sites"] == 4
    assert found["fedavg"]["wire"] == found["fedavg"]["formula"] == 2 * 4 / 1024
    text = markdown(collect(comparison))
    assert "| fedavg | 1 | 4 | 1.00 | 0.00781 | 0.00781 | 0 | 1.00 (× 1.00) | 2.00 (× 1.00) | 5.0 |" in text
    assert (
        "| 1.10 (× 1.10) | 2.20 (× 1.10) |" in text and "in brackets the time over that of fedavg. MB" in text
    )
    shutil.rmtree(comparison.path("fedavg", 0))
    assert "the mean over seeds. MB and GB" in markdown(collect(comparison)), "nothing to be over"


def test_lengths_of_pictures_whose_pixels_nobody_measured_are_pixels(tmp_path) -> None:
    arms = {arm: {"evaluation.metrics": ["dice", "hd95"]} for arm in ("fedavg", "again")}
    comparison = chest(tmp_path, seeds=[0], measure={"metric": "hd95"}, arms=arms)
    for arm in comparison.arms:
        pretend(comparison, arm, 0, {"best": {"jsrt/heart": 0.5}})
        file = comparison.path(arm, 0) / "run.json"
        about = json.loads(file.read_text())
        for site in about["sites"].values():
            site |= {"inputs": {"kinds": ["picture"]}, "spacing": [[1, 1, 1]]}
        file.write_text(json.dumps(about))
    found = collect(comparison)
    assert found["pixels"] and of_table(found).label == "HD95, px"
    assert of_table(found | {"pixels": False}).label == "HD95, mm"


def test_steps_of_teachers_count_in_the_budget_and_in_costs(tmp_path) -> None:
    arms = {"fedavg": {}, "kim": {"method.name": "kim"}, "pooled": {"method.name": "centralized"}}
    comparison = chest(tmp_path, seeds=[0], arms=arms)
    for arm in arms:
        pretend(comparison, arm, 0, {"best": {"jsrt/heart": 0.5}}, seconds=3600)
    found = collect(comparison)
    assert found["budget"]["kim"] == {"rounds": 2, "steps": 100, "epochs": None, "before": 200, "total": 1600}
    text = markdown(found)
    assert "fedavg, pooled: 2 rounds of 100 steps; kim: 2 rounds of 100 steps, after 200 for teachers" in text
    assert "Optimizer steps of all sites together: fedavg 800; kim 1,600; pooled 200." in text
    assert found["costs"]["kim"]["step_hours"] is None, "an earlier log, without the steps of teachers"
    assert (found["costs"]["fedavg"]["evaluation"], found["costs"]["pooled"]["evaluation"]) == (0, None)
    file = comparison.path("kim", 0) / "rounds" / "0001" / "log.json"
    log = json.loads(file.read_text())
    sites = {site: numbers | {"steps": 300.0} for site, numbers in log["sites"].items()}
    file.write_text(json.dumps(log | {"sites": sites}))
    again = collect(comparison)["costs"]["kim"]
    assert again["step_hours"] == found["costs"]["fedavg"]["step_hours"]
    saved = {site: numbers | {"saved_seconds": 1800.0} for site, numbers in sites.items()}
    file.write_text(json.dumps(log | {"sites": saved}))
    costs = collect(comparison)["costs"]["kim"]
    assert costs["site_hours"] == pytest.approx(again["site_hours"] + len(sites) / 2), "as if trained anew"
    assert costs["server_seconds"] == again["server_seconds"]


def test_the_how_to_shows_a_comparison_that_loads(small_images, tmp_path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "compare.md").read_text()
    shown = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    small_images["labels"] = {"names": None}
    found = loaded(tmp_path, small_images, **shown)
    assert list(found) == ["fedavg", "fedprox", "iml", "oracle"]
    assert found["fedavg"].local.steps == 10 and found["oracle"].local.steps == 30
    for options in (compare.ComparisonFile, compare.Measure, compare.Layout, compare.Table):
        for key in options.__pydantic_fields__:  # type: ignore[attr-defined]
            shown_there = (f"`{key}`", f"`measure.{key}", f"`layout.{key}")
            assert any(text in page for text in shown_there) or key in ("measure", "layout"), key
    part = yaml.safe_load(page.rpartition("```yaml\n")[2].partition("```")[0])
    assert chest(tmp_path / "chest", **part).printed["fedavg"]["exclude*"] == 0.9147


@pytest.mark.parametrize(("held", "asked", "found"), [
    (["last"], "last", "last"),  # evaluation.models: [last], though best.json may say that it is also the best
    (["best"], "last", "best"),  # both were asked for and are one
    (["best", "last"], "last", "last"),
    (["best", "last"], "best", "best"),
])  # fmt: skip
def test_the_rows_of_the_last_model_are_found_under_either_name(tmp_path, held, asked, found) -> None:
    empty: dict[str, Any] = dict.fromkeys(("split", "grid", "site", "case", "class", "metric", "reason"), "")
    empty |= {"round": 4, "value": None, "known": True}
    write_atomic(tmp_path / "rows.csv", rows_text([empty | {"model": model} for model in held]).encode())
    (tmp_path / "best.json").write_text('{"round": 4, "score": 0.5}')
    assert kept_model(tmp_path, asked) == found
