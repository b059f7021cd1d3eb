"""The table of Hessians on a comparison's page: from what `fedatlas analyse hessian` left in every run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_results import ANALYSES, fake_runs
from test_compare_tables import menu

from fedatlas.compare import Comparison, collect, markdown, write_page
from fedatlas.core.errors import RunFolderError

LARGEST = {"unet": [[8.0, 4.0], [2.0, 6.0]], "menu": [[4.0, 1.0], [4.0, 6.0]]}
"""Arm -> seed -> the largest eigenvalue at the sites a and b."""


def analysed(
    comparison: Comparison,
    arm: str,
    seed: int,
    largest: list[float],
    models: tuple[str, ...] = ("best",),
    **more: Any,
) -> None:
    (one,) = ANALYSES["hessian"]["spectra"]
    spectra = [
        {
            **one,
            "site": site,
            "eigenvalues": [value, 1.0],
            "ratio": value / 2,
            "trace": -value,
            "model": model,
        }
        for site, value in zip("ab", largest, strict=True)
        for model in models
    ]
    file = comparison.path(arm, seed) / "analysis" / "hessian.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**ANALYSES["hessian"], **more, "spectra": spectra}))


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    found = menu(tmp_path, seeds=(0, 1), analyses={"hessian": ["unet", "menu"]}, references={"menu": "unet"})
    fake_runs(found)
    for arm, of_seed in LARGEST.items():
        for seed, largest in enumerate(of_seed):
            analysed(found, arm, seed, largest)
    return found


def rows(text: str, title: str) -> dict[str, list[str]]:
    """Arm -> cells of the table below a title."""
    lines = text.partition(f"**{title}**\n\n")[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["arm", "seeds", "a", "b", "mean", "to another arm", "lower in"]
    return {row[0]: row[1:] for row in cells[2:]}


def test_the_table_has_every_seed_and_the_ratio_to_the_reference(comparison: Comparison) -> None:
    found = collect(comparison)
    text = markdown(found)
    largest = rows(text, "λ1, the largest eigenvalue in magnitude")
    assert largest["unet"] == ["2", "5.00 ± 4.24", "5.00 ± 1.41", "5.00 ± 1.41", "–", "–"]
    # sites and seeds: 4/8, 1/4, 4/2, 6/6; of the seeds sqrt(1/8) and sqrt(2)
    every = np.exp(np.mean(np.log([4 / 8, 1 / 4, 4 / 2, 6 / 6])))
    assert largest["menu"] == [
        *["2", "4.00 ± 0.00", "3.50 ± 3.54", "3.75 ± 1.77"],
        f"× {every:.2f} to unet ({np.sqrt(1 / 8):.2f}, {np.sqrt(2):.2f})",
        "2 of 4",
    ]
    assert rows(text, "λ1 / λ5")["menu"][:4] == ["2", "2.00 ± 0.00", "1.75 ± 1.77", "1.88 ± 0.88"]
    trace = rows(text, "trace")["menu"]
    assert trace[1] == "-4.00 ± 0.00" and trace[-2:] == ["–", "1 of 4"], "no ratio of what is below 0"
    assert (
        "Hessian of dice_bce on training data of a site, 2 batches of 8, with the site's own labels" in text
    )
    assert "Not analysed" not in text and "left out" not in text
    folded = markdown(found, folded=True)
    assert "; flatness; costs" in folded.partition("</summary>")[0]
    page = write_page(comparison, found).read_text()
    assert '<section id="flatness">' in page


def test_another_model_has_a_row_of_its_own_beside_that_of_the_same_name(comparison: Comparison) -> None:
    for arm, of_seed in LARGEST.items():
        for seed, largest in enumerate(of_seed):
            analysed(comparison, arm, seed, largest, models=("best", "last"))
    largest = rows(markdown(collect(comparison)), "λ1, the largest eigenvalue in magnitude")
    assert list(largest) == ["unet", "unet, last", "menu", "menu, last"]
    assert largest["menu"] == largest["menu, last"]


def test_the_largest_counts_by_its_magnitude(comparison: Comparison) -> None:
    text = markdown(collect(comparison))
    analysed(comparison, "menu", 1, [-4.0, -6.0])
    again = markdown(collect(comparison))
    for title in ("λ1, the largest eigenvalue in magnitude", "λ1 / λ5"):
        assert rows(again, title) == rows(text, title), title


def test_what_is_not_analysed_or_otherwise_is_named(comparison: Comparison) -> None:
    (comparison.path("unet", 1) / "analysis" / "hessian.json").unlink()
    other = {**ANALYSES["hessian"]["settings"], "labels": "reference"}
    analysed(comparison, "menu", 1, [1.0, 1.0], settings=other)
    text = markdown(collect(comparison))
    assert "Not analysed (`fedatlas analyse hessian RUN`): unet, seeds 1." in text
    assert "Analysed with other settings than the first, and left out: menu-s1." in text
    menu_row = rows(text, "λ1, the largest eigenvalue in magnitude")["menu"]
    to = f"× {np.sqrt(1 / 8):.2f} to unet ({np.sqrt(1 / 8):.2f})"
    assert menu_row == ["1", "4.00", "1.00", "2.50", to, "2 of 2"]


def test_an_eigenvalue_that_is_not_exact_enough_is_told(comparison: Comparison) -> None:
    assert "not exact enough" not in markdown(collect(comparison))
    file = comparison.path("menu", 1) / "analysis" / "hessian.json"
    found = json.loads(file.read_text())
    found["spectra"][1]["converged"] = False
    file.write_text(json.dumps(found))
    assert "Eigenvalues are not exact enough (give more --steps): menu-s1." in markdown(collect(comparison))


@pytest.mark.parametrize(("model", "now"), [("best", {"round": 2}), ("best/2", {"round": 2}), ("last", None)])
def test_an_analysis_of_before_the_run_went_on_does_not_count(
    comparison: Comparison, model: str, now: dict[str, int] | None
) -> None:
    if now:
        (comparison.path("menu", 1) / "best.json").write_text(json.dumps(now))
    analysed(comparison, "menu", 1, [4.0, 6.0], models=("best", model))
    assert "Analysed before" not in markdown(collect(comparison))
    file = comparison.path("menu", 1) / "analysis" / "hessian.json"
    found = json.loads(file.read_text())
    for one in found["spectra"]:
        one["round"] = 1 if one["model"] == model else one["round"]
    file.write_text(json.dumps(found))
    text = markdown(collect(comparison))
    assert (
        "Analysed before the run went on, and left out until `fedatlas analyse hessian RUN` is run again: menu-s1."
        in text
    )
    assert rows(text, "λ1, the largest eigenvalue in magnitude")["menu"][0] == "1"


def test_where_every_analysis_is_of_before_that_is_told_alone(comparison: Comparison) -> None:
    for arm, of_seed in LARGEST.items():
        for seed in range(len(of_seed)):
            (comparison.path(arm, seed) / "best.json").write_text(json.dumps({"round": 1}))
    text = markdown(collect(comparison))
    assert "Analysed before the run went on" in text and "menu-s1." in text
    assert "Smaller is flatter" not in text


def test_a_site_that_a_seed_lacks_is_in_no_mean(comparison: Comparison) -> None:
    file = comparison.path("menu", 1) / "analysis" / "hessian.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, "spectra": found["spectra"][:1]}))
    row = rows(markdown(collect(comparison)), "λ1, the largest eigenvalue in magnitude")["menu"]
    assert (
        row[1:4] == ["4.00 ± 0.00", "1.00", "–"] and row[-2].endswith("(0.35, 2.00)") and row[-1] == "2 of 3"
    )


def test_nothing_is_said_without_an_analysis_and_a_damaged_one_is_named(
    comparison: Comparison, tmp_path: Path
) -> None:
    file = comparison.path("unet", 0) / "analysis" / "hessian.json"
    for damaged in ("[]", '{"settings": {}}', "{"):
        file.write_text(damaged)
        with pytest.raises(RunFolderError, match=r"unet-s0.*run .*analys.* again"):
            collect(comparison)
    none = menu(tmp_path / "none", analyses={"hessian": ["unet"]})
    fake_runs(none)
    for each in none.folder.rglob("hessian.json"):
        each.unlink()
    assert collect(none)["flatness"] == {} and "Flatness" not in markdown(collect(none))
