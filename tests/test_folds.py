"""Cross-validation: every case of the training sites is scored by the model that never saw it."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import turns
import yaml
from runs import phantom_federation
from turns import ARMS, average

from fedatlas.cli import main
from fedatlas.compare import Comparison, collect, load_comparison, rows_of, run_comparison, write_page
from fedatlas.compare.running import all_rows
from fedatlas.core.errors import FederationError
from fedatlas.report.comparison import markdown


def written(folder: Path, federation: dict[str, Any], **changes: Any) -> Path:
    return turns.written(folder, federation, **({"folds": 2} | changes))


@pytest.fixture(scope="module")
def untested(phantom: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The phantom without its sites' own test cases."""
    folder = tmp_path_factory.mktemp("untested") / "phantom"
    shutil.copytree(phantom, folder)
    for kept in [*folder.glob("site-*/imagesTs"), *folder.glob("site-*/labelsTs*")]:
        shutil.rmtree(kept)
    return folder


@pytest.fixture(scope="module")
def done(untested: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two arms of two folds, trained; the last site is one that only tests. Read only."""
    folder = tmp_path_factory.mktemp("crossed")
    federation = phantom_federation(untested, phantom_cache) | {"rounds": 1}
    federation["sites"][-1]["role"] = "test"
    comparison = load_comparison([written(folder, federation)], runs=folder / "runs")
    assert run_comparison(comparison, tell=lambda text: None) == {}
    return comparison


def test_every_arm_is_trained_once_per_fold(done) -> None:
    assert list(done.federations) == [f"{arm}-fold-{fold}" for arm in ARMS for fold in (1, 2)]
    for name, of_seed in done.federations.items():
        *training, tested = of_seed[0].sites
        assert tested.split is None
        for site in training:
            assert (site.split.fold, site.split.folds, site.split.validation) == (int(name[-1]), 2, 0.25)


def test_every_case_is_scored_once_by_the_model_that_never_saw_it(done) -> None:
    """Against the literal way: the test rows of both folds at the training sites, put together, and averaged."""
    found = collect(done)
    assert list(found["arms"]) == ["fedavg", "prox"]
    for arm in ARMS:
        rows = [
            row
            for fold in (1, 2)
            for row in all_rows(done, f"{arm}-fold-{fold}", 0)
            if (row["metric"], row["split"], row["model"]) == ("dice", "test", "best") and row["site"] != "s2"
        ]
        kept = [row for fold in (1, 2) for row in rows_of(done, f"{arm}-fold-{fold}", 0)]
        assert kept == rows
        times = Counter((row["site"], row["case"], row["class"]) for row in rows)
        assert set(times.values()) == {1}
        assert {(site, case) for site, case, _ in times} == {
            (f"s{site}", f"p{site}0{case}") for site in (0, 1) for case in range(4)
        }
        expected = average(rows)
        assert found["arms"][arm]["mean"] == [pytest.approx(expected)]
    assert found["differences"]["prox"]["n"] == 8


def test_the_tables_and_the_page(done) -> None:
    found = collect(done)
    text = markdown(found)
    assert "model best, each case by models trained without it (2 folds)**" in text and "-fold-" not in text
    assert "the mean over seeds and folds" in text
    page = write_page(done, found).read_text()
    assert page.count('class="overlay"') == 8, "of both sites: image, truth and two arms, of the first fold"
    kept = {path.relative_to(done.folder).parts[0] for path in done.folder.glob("*/sites/*/compared-*.npz")}
    assert kept == {f"{arm}-fold-1-s0" for arm in ARMS}
    assert ", s0 *</" in page, "what a site does not annotate has its star"


def test_classes_that_a_site_annotates_may_be_shown_alone(done, tmp_path) -> None:
    file = written(
        tmp_path,
        yaml.safe_load((done.folder.parent.parent / "base.yaml").read_text()),
        measure={"known": False, "sites": ["s1"]},
    )
    alone = load_comparison([file], runs=done.folder.parent)
    rows = [row for fold in (1, 2) for row in rows_of(alone, f"prox-fold-{fold}", 0)]
    assert {row["site"] for row in rows} == {"s1"}
    expected = average(row for row in rows if not row["known"])
    assert collect(alone)["arms"]["prox"]["mean"] == [pytest.approx(expected)]


def test_one_fold_is_trained_by_its_name(untested, phantom_cache, tmp_path, capsys) -> None:
    file = written(tmp_path, phantom_federation(untested, phantom_cache) | {"rounds": 1})
    assert main(["compare", str(file), "--runs", str(tmp_path / "runs"), "--arms", "prox-fold-2"]) == 0
    assert collect(load_comparison([file], runs=tmp_path / "runs"))["arms"]["prox"]["seeds"] == []
    capsys.readouterr()


def test_the_split_of_a_site_keeps_its_validation_cases(untested, phantom_cache, tmp_path) -> None:
    federation = phantom_federation(untested, phantom_cache)
    federation["sites"][0]["split"] = {"validation": 1, "test": 0.5}
    turn = load_comparison([written(tmp_path, federation)]).federations["fedavg-fold-2"][0]
    split = turn.sites[0].split
    assert (split.validation, split.test, split.folds, split.fold) == (1, 0, 2, 2)


def test_a_site_with_test_cases_of_its_own_is_told(small, tmp_path, capsys) -> None:
    assert main(["compare", str(written(tmp_path, small)), "--runs", str(tmp_path / "runs")]) == 1
    assert "every labelled case is to be tested on once, and its layout lists 1 labelled test cases" in str(
        capsys.readouterr()
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"folds": 1}, "folds"),
        ({"leave_out": ["s0"]}, "folds and leave_out: a comparison leaves out one of the two"),
        ({"tables": [{"split": "validation"}]}, "take folds away, or measure: split: validation"),
        ({"measure": {"sites": "test"}}, "take folds away, or measure: sites: test"),
        ({"measure": {"local": ["prox"]}}, "take folds away, or measure: local"),
        ({"analyses": {"cka": ["prox"]}}, "take folds away, or analyses"),
        ({"arms": {"x": {}, "x-fold-1": {}}}, "folds: x-fold-1 is what two arms are called"),
    ],
)
def test_what_folds_do_not_go_with_is_told(small, tmp_path, changes, told) -> None:
    with pytest.raises(FederationError) as error:
        load_comparison([written(tmp_path, small, **changes)])
    assert told in str(error.value)


def test_findings_have_no_folds(small, tmp_path) -> None:
    """Their scores are of all images of a site together."""
    small["labels"] = {"findings": {"ill": None}}
    for changes in ({"measure": {"metric": "auroc"}}, {"tables": [{"metric": "auroc"}]}):
        with pytest.raises(
            FederationError, match="metric is auroc, which is of all images .* ask for a metric of voxels"
        ):
            load_comparison([written(tmp_path, small, **changes)])


def test_whole_images_have_no_folds(small_images, tmp_path) -> None:
    with pytest.raises(FederationError, match="arm fedavg: folds: are for segmentation"):
        load_comparison([written(tmp_path, small_images)])
