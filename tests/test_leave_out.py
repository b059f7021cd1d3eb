"""Sites that a comparison leaves out of training in turn."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import turns
from runs import phantom_federation
from turns import ARMS, average

from fedatlas.cli import main
from fedatlas.compare import Comparison, Table, collect, load_comparison, rows_of, run_comparison, write_page
from fedatlas.compare.results import finished, means
from fedatlas.compare.running import _some_cases, all_rows
from fedatlas.core.errors import DataError, FederationError
from fedatlas.report.comparison import heading, markdown


def written(folder: Path, federation: dict[str, Any], **changes: Any) -> Path:
    return turns.written(folder, federation, **({"leave_out": ["s0", "s2"]} | changes))


@pytest.fixture(scope="module")
def done(phantom: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two arms, each without s0 and without s2, trained; read only."""
    folder = tmp_path_factory.mktemp("turns")
    file = written(folder, phantom_federation(phantom, phantom_cache) | {"rounds": 1})
    comparison = load_comparison([file], runs=folder / "runs")
    assert run_comparison(comparison, tell=lambda text: None) == {}
    return comparison


def test_every_arm_is_trained_without_each_site_in_turn(done) -> None:
    assert list(done.federations) == [f"{arm}-without-{site}" for arm in ARMS for site in ("s0", "s2")]
    for name, of_seed in done.federations.items():
        tested = [site.name for site in of_seed[0].sites if site.role == "test"]
        assert tested == [name.rpartition("-")[2]]
        assert of_seed[0].method["name"] == ("fedprox" if name.startswith("prox") else "fedavg")
        assert done.path(name, 0).name == f"{name}-s0"


def test_a_site_is_scored_by_the_model_that_never_saw_it(done) -> None:
    """Against the literal way: the rows of each run at its own left-out site, put together, and averaged."""
    found = collect(done)
    assert list(found["arms"]) == ["fedavg", "prox"] and found["compared"] == {"prox": "fedavg"}
    for arm in ARMS:
        rows = [
            row
            for site in ("s0", "s2")
            for row in all_rows(done, f"{arm}-without-{site}", 0)
            if (row["site"], row["metric"], row["split"], row["model"]) == (site, "dice", "test", "best")
        ]
        kept = [row for site in ("s0", "s2") for row in rows_of(done, f"{arm}-without-{site}", 0)]
        assert kept == rows and {row["site"] for row in rows} == {"s0", "s2"}
        expected = average(rows)
        assert found["arms"][arm]["mean"] == [pytest.approx(expected)]
    assert found["arms"]["prox"]["mean"] != found["arms"]["fedavg"]["mean"]
    every = {row["case"] for row in rows_of(done, "fedavg-without-s0", 0)}
    assert len(every) == 5, (
        "all cases of a site that is left out are tested on, those with a training role, too"
    )
    cases = {
        (row["site"], row["case"]) for s in ("s0", "s2") for row in rows_of(done, f"fedavg-without-{s}", 0)
    }
    assert found["differences"]["prox"]["n"] == len(cases)
    assert found["bootstrap"]["prox"]["value"] == pytest.approx(
        found["arms"]["prox"]["mean"][0] - found["arms"]["fedavg"]["mean"][0]
    )
    assert found["costs"]["fedavg"]["sites"] == len(done.first.sites) - 1


def test_the_tables_and_the_page_have_a_row_per_arm(done) -> None:
    found = collect(done)
    text = markdown(found)
    assert "model best, each site by models trained without it**" in text and "-without-" not in text
    assert "the mean over seeds and left-out sites" in text
    page = write_page(done, found).read_text()
    assert page.count('class="overlay"') == 8, "of both sites: image, truth and two arms"
    kept = [path.relative_to(done.folder) for path in done.folder.glob("*/sites/*/compared-*.npz")]
    assert {(path.parts[0], path.parts[2]) for path in kept} == {
        (f"{arm}-without-{site}-s0", site) for arm in ARMS for site in ("s0", "s2")
    }
    assert ", s0</" in page and ", s2</" in page and " *</" not in page, "box plots star nothing"


def test_a_further_table_shows_a_left_out_site_alone(done) -> None:
    alone = done.table(Table(sites=("s2",), title="s2"))
    found = means(alone, finished(alone))[0]
    expected = average(rows_of(done, "prox-without-s2", 0))
    assert found["arms"]["prox"]["mean"] == [pytest.approx(expected)]
    assert "sites s2, each site by models trained without it" in heading(found)


def test_a_left_out_site_needs_no_test_cases_of_its_own(small, tmp_path) -> None:
    """Also where the first run of all trains at it, and scores no site that counts."""
    folder = shutil.copytree(small["sites"][2]["path"], tmp_path / "s2")
    for kind in ("imagesTs", "labelsTs"):
        shutil.rmtree(folder / kind)
    small["sites"][2]["path"] = str(folder)
    file = written(tmp_path, small, measure={"sites": ["s2"]})
    comparison = load_comparison([file], runs=tmp_path / "runs")
    todo = [(name, 0) for name in comparison.federations]
    assert todo[0] == ("fedavg-without-s0", 0)
    _some_cases(comparison, todo)
    with pytest.raises(DataError, match="asks for test cases, and there are none at s2"):
        _some_cases(replace(comparison, turns={}), todo)


def test_what_a_site_says_of_its_own_split_does_not_count_once_it_is_left_out(small, tmp_path) -> None:
    small["sites"][0]["name"] = "s.0"
    file = written(tmp_path, small, leave_out=["s.0"], arms={"fedavg": {"sites": {"s.0": {"cases": 2}}}})
    turn = load_comparison([file]).federations["fedavg-without-s.0"][0].sites[0]
    assert (turn.role, turn.cases, turn.split) == ("test", None, None)


def test_one_of_two_sites_that_train_can_be_left_out(small, tmp_path) -> None:
    small["sites"][1]["role"] = "test"
    found = load_comparison([written(tmp_path, small, arms={"fedavg": {}})])
    roles = {arm: [site.role for site in of[0].sites] for arm, of in found.federations.items()}
    assert roles == {
        "fedavg-without-s0": ["test", "test", "train"],
        "fedavg-without-s2": ["train", "test", "test"],
    }


def test_whole_images_are_compared_by_cell(small_images, tmp_path) -> None:
    sites = [site["name"] for site in small_images["sites"]]
    small_images |= {"rounds": 1, "labels": {"names": None}}
    arms = {"fedavg": {}, "slow": {"local.lr": 1e-4}}
    comparison = load_comparison(
        [written(tmp_path, small_images, arms=arms, leave_out=sites[:2])], runs=tmp_path / "runs"
    )
    assert run_comparison(comparison, tell=lambda text: None) == {}
    found = collect(comparison)
    assert found["pairs"] == "cell" and found["bootstrap"] == {} and found["arms"]["slow"]["seeds"] == [0]
    assert {row["site"] for row in rows_of(comparison, f"slow-without-{sites[1]}", 0)} == {sites[1]}
    assert "each site by models trained without it" in markdown(found)
    assert write_page(comparison, found).exists()


def test_a_seed_counts_once_all_its_turns_are_there(done, tmp_path) -> None:
    """And every turn of another configuration is told."""
    shutil.copytree(done.folder, tmp_path / "turns")
    here = replace(done, folder=tmp_path / "turns")
    for arm in ("prox-without-s0", "prox-without-s2"):
        run = here.path(arm, 0) / "run.json"
        about = json.loads(run.read_text())
        del about["seal"]  # else it were a changed file
        run.write_text(json.dumps(about | {"hash": "of another configuration"}))
        file = here.path(arm, 0) / "federation.yaml"
        file.write_text(file.read_text().replace("lr: 0.003", "lr: 0.004"))
    done_now = finished(here)
    assert done_now.seeds == {"fedavg": [0], "prox": []} and len(done_now.problems["prox"]) == 2


def test_an_arm_stands_in_the_tables_once_all_its_turns_are_finished(small, tmp_path, capsys) -> None:
    file, runs = written(tmp_path, small | {"rounds": 1}), tmp_path / "runs"
    assert main(["compare", str(file), "--runs", str(runs), "--arms", "prox-without-s0"]) == 0
    comparison = load_comparison([file], runs=runs)
    assert collect(comparison)["arms"]["prox"]["seeds"] == []
    assert "2 runs" not in capsys.readouterr().out
    assert main(["compare", str(file), "--runs", str(runs), "--arms", "prox"]) == 0
    assert re.search(r"2 runs, 1 finished, 1 to do", capsys.readouterr().out)
    found = collect(comparison)
    assert found["arms"]["prox"]["seeds"] == [0] and np.isfinite(found["arms"]["prox"]["mean"][0])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"leave_out": ["s0", "s0"]}, "leave_out: s0, s0 names a site twice"),
        ({"measure": {"known": False}}, "take leave_out away, or measure: known"),
        ({"measure": {"sites": "test"}}, "take leave_out away, or measure: sites: train or test"),
        ({"tables": [{"sites": ["s1"]}]}, "leave_out: the site of measure: sites 's1' does not exist"),
        ({"arms": {"x": {}, "x-without-s0": {}}}, "leave_out: x-without-s0 is what two arms are called"),
        ({"arms": {"x": {"sites": {"s1": {"role": "test"}, "s2": {"role": "test"}}}}, "leave_out": ["s0"]},
         "s0 is the only site that trains in arm x"),
        ({"arms": {"x" * 90: {}}}, "a shorter name"),
        ({"arms": {"x": {"evaluation.metrics": ["asd"]}}}, "the arm x-without-s0 evaluates only asd"),
        ({"measure": {"model": "local/s1"}}, "take leave_out away, or measure: model"),
        ({"analyses": {"cka": ["prox"]}}, "take leave_out away, or analyses"),
        ({"leave_out": ["s9"]}, "leave_out: the site 's9' does not exist"),
        ({"tables": [{"split": "validation"}]}, "take leave_out away, or measure: split: validation"),
        ({"measure": {"local": ["prox"]}}, "take leave_out away, or measure: local"),
        ({"arms": {"fedavg": {"sites.s0.role": "test"}}}, "the site s0 does not train in arm fedavg"),
        ({"references": {"prox": "fedavg-without-s0"}}, "references: the arm 'fedavg-without-s0' does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_left_out_is_told(small, tmp_path, changes, told) -> None:
    file = written(tmp_path, small, **changes)
    with pytest.raises(FederationError) as error:
        load_comparison([file])
    assert told in str(error.value)
