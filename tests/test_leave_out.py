"""Sites that a comparison leaves out of training in turn."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from runs import phantom_federation

from fedatlas.cli import main
from fedatlas.compare import Comparison, collect, load_comparison, rows_of, run_comparison, write_page
from fedatlas.compare.running import all_rows
from fedatlas.core.errors import FederationError
from fedatlas.evaluation.statistics import cell_means, class_means, mean_of_defined
from fedatlas.report.comparison import markdown

ARMS = {"fedavg": {}, "prox": {"method.name": "fedprox"}}


def written(folder: Path, federation: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(federation))
    file = {"name": "turns", "base": "base.yaml", "arms": ARMS, "leave_out": ["s0", "s2"]} | changes
    (folder / "turns.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    return folder / "turns.yaml"


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
        expected = mean_of_defined(class_means(cell_means(rows)).values())
        assert found["arms"][arm]["mean"] == [pytest.approx(expected)]
    s0 = [row for row in rows_of(done, "fedavg-without-s0", 0)]
    assert len({row["case"] for row in s0}) > 1, "all cases of a site that is left out are tested on"
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
    assert "model best, each site by models that never saw it**" in text and "without" not in text
    assert "the mean over seeds and left-out sites" in text
    page = write_page(done, found).read_text()
    assert page.count('class="overlay"') == 8, "of both sites: image, truth and two arms"
    kept = [path.relative_to(done.folder) for path in done.folder.glob("*/sites/*/compared-*.npz")]
    assert {(path.parts[0], path.parts[2]) for path in kept} == {
        (f"{arm}-without-{site}-s0", site) for arm in ARMS for site in ("s0", "s2")
    }


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
