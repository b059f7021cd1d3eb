"""The chest phantom: its seeds, its statistics, its folders, and that pixel values alone do not tell a finding."""

import csv
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import from_dict
from fedatlas.data.datasets import csv as csv_table
from fedatlas.data.datasets.csv import CsvForm
from fedatlas.data.datasets.shared.findings import federation_problems
from fedatlas.data.datasets.shared.listing import Layout, Splitting
from fedatlas.data.formats.picture import read_picture
from fedatlas.phantoms.xray import (
    FINDINGS,
    READING,
    PhantomXray,
    XrayCase,
    correlation,
    draw_site,
    phantom_xray_sites,
    write_phantom_xray,
)

SMALL: dict[str, Any] = {
    "sites": 2, "cases": 7, "validation_cases": 3, "site_test_cases": 2, "test_cases": 5, "size": 32,
}  # fmt: skip
FORM = from_dict(CsvForm, READING, what="test")


def options(**changes: Any) -> PhantomXray:
    return from_dict(PhantomXray, changes, what="test")


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def truths(cases: Sequence[XrayCase]) -> np.ndarray:
    return np.array([list(case.truth.values()) for case in cases])


# --------------------------------------------------------------------------------------------------- seeds


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(tmp_path: Path) -> None:
    one = digests(write_phantom_xray(tmp_path / "one", **SMALL))
    assert one == digests(write_phantom_xray(tmp_path / "two", options(**SMALL)))
    other = digests(write_phantom_xray(tmp_path / "three", **SMALL, seed=1))
    images = [name for name in one if name.endswith(".png") and name in other]
    assert images and all(one[name] != other[name] for name in images)
    assert len({one[name] for name in one if name.endswith(".png")}) == 2 * 12 + 5


def test_a_case_does_not_depend_on_how_many_sites_or_cases_there_are(tmp_path: Path) -> None:
    small = digests(write_phantom_xray(tmp_path / "small", **SMALL))
    more = SMALL | {"sites": 3, "cases": (20, 9, 1), "validation_cases": 9, "test_cases": 8}
    large = digests(write_phantom_xray(tmp_path / "large", **more))
    images = {name: digest for name, digest in small.items() if name.endswith(".png")}
    assert images and images.items() <= large.items()


def test_a_label_does_not_depend_on_how_the_findings_look() -> None:
    plain = list(draw_site(options(**SMALL), 0))
    hard = list(draw_site(options(**SMALL, difficulty=0.9, domain_shift=0), 0))
    assert (truths(plain) == truths(hard)).all()
    assert all((a.pixels != b.pixels).any() for a, b in zip(plain, hard, strict=True))


# -------------------------------------------------------------------------------------------------- folders


def test_the_folders_are_read_without_a_problem(tmp_path: Path) -> None:
    folder = write_phantom_xray(tmp_path, **SMALL)
    entries = phantom_xray_sites(folder, annotated={"s0": ["Nodule"]})
    assert [entry["name"] for entry in entries] == ["s0", "s1", "test"]
    assert [entry.get("role") for entry in entries] == [None, None, "test"]
    assert [entry["annotated"] for entry in entries] == [["Nodule"], list(FINDINGS), list(FINDINGS)]
    listings = {}
    for entry in entries:
        assert entry["format"] == "csv"
        form = from_dict(CsvForm, entry["reading"], what="test")
        listings[entry["name"]] = csv_table.read(
            Layout(entry["name"], Path(entry["path"]), options=form, splitting=Splitting())
        )
    assert all(listing.problems == () and listing.findings == FINDINGS for listing in listings.values())
    # so few images may lack a class, which is all there is to say of them
    fatal = [p for p in federation_problems(listings) if "training case" not in p.what]
    assert fatal == []
    for name in ("s0", "s1"):
        splits = [case.split for case in listings[name].cases]
        assert [splits.count(split) for split in ("train", "validation", "test")] == [7, 3, 2]
    assert {case.split for case in listings["test"].cases} == {"test"}
    case = listings["s0"].cases[0]
    assert case.present | case.absent == set(FINDINGS)
    assert read_picture(case.images[0], site="s0").pixels.shape == (1, 32, 32)


def test_no_patient_is_in_two_splits_or_at_two_sites(tmp_path: Path) -> None:
    how = SMALL | {"cases": 40, "validation_cases": 20, "site_test_cases": 20, "test_cases": 40}
    folder = write_phantom_xray(tmp_path, **how)
    homes: dict[str, set[tuple[str, str]]] = {}
    images: dict[str, int] = {}
    for table in folder.glob("*/labels.csv"):
        with table.open(newline="") as file:
            for row in csv.DictReader(file):
                homes.setdefault(row["patient"], set()).add((table.parent.name, row["split"]))
                images[row["patient"]] = images.get(row["patient"], 0) + 1
    assert len(homes) > 80 and all(len(home) == 1 for home in homes.values())
    assert set(images.values()) == {1, 2, 3}


def test_sites_and_findings_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no site-0"):
        phantom_xray_sites(tmp_path)
    folder = write_phantom_xray(tmp_path, **SMALL, findings=["Nodule", "Effusion"])
    assert phantom_xray_sites(folder)[0]["annotated"] == ["Nodule", "Effusion"]
    with pytest.raises(FederationError, match="'Nodul'.*did you mean 'Nodule'"):
        phantom_xray_sites(folder, annotated={"s1": ["Nodul"]})
    with pytest.raises(FederationError, match="'s2'.*known: s0, s1"):
        phantom_xray_sites(folder, annotated={"s2": ["Nodule"]})
    with pytest.raises(DataError, match="there already"):
        write_phantom_xray(folder, **SMALL)
    (folder / "site-test" / "labels.csv").unlink()
    with pytest.raises(DataError, match=r"labels\.csv: missing"):
        phantom_xray_sites(folder)


# ----------------------------------------------------------------------------------------------- statistics


def test_prevalence_and_co_occurrence_are_as_asked() -> None:
    """The share of pairs is compared with what the Gaussian copula gives, by sampling it."""
    names = ["Effusion", "Nodule", "Atelectasis"]
    how = options(
        cases=1500, validation_cases=0, site_test_cases=0, size=32, findings=names,
        prevalence={"Effusion": 0.5, "Nodule": 0.1, "Atelectasis": 0.4},
        co_occurrence=0.0, pairs=[("Effusion", "Atelectasis", 0.7)],
    )  # fmt: skip
    truth = truths(list(draw_site(how, 0)))
    assert np.abs(truth.mean(0) - [0.5, 0.1, 0.4]).max() < 0.04
    latent = np.random.default_rng(0).multivariate_normal(np.zeros(3), correlation(how), 200_000)
    wanted = latent > np.quantile(latent, [0.5, 0.9, 0.6], axis=0).diagonal()
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert abs((truth[:, i] & truth[:, j]).mean() - (wanted[:, i] & wanted[:, j]).mean()) < 0.03
    assert (truth[:, 0] & truth[:, 2]).mean() > 0.5 * 0.4 + 0.08


def site_values(shift: float, site: int) -> np.ndarray:
    """[images] mean grey value."""
    how = options(cases=150, validation_cases=0, site_test_cases=0, size=32, domain_shift=shift)
    return np.array([case.pixels.mean() for case in draw_site(how, site)])


def test_sites_are_alike_without_a_domain_shift_and_differ_with_one() -> None:
    def spread(shift: float) -> float:
        """Variance between the means of sites over what equal sites would show."""
        sites = [site_values(shift, site) for site in range(4)]
        expected = np.mean([values.var() / (len(values) / 2) for values in sites])
        return float(np.var([values.mean() for values in sites], ddof=1) / expected)

    assert spread(0) < 3
    assert spread(0.5) > 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"findings": ["Nodul"]}, "did you mean 'Nodule'"),
        ({"findings": ["Nodule", "Nodule"]}, "name each once"),
        ({"findings": []}, "findings"),
        ({"prevalence": 0}, "prevalence is 0.*above 0 and below 1"),
        ({"prevalence": {"Mass": 0.1}}, "prevalence: the finding 'Mass'"),
        ({"difficulty": {"Nodule": 1.5}}, "difficulty of Nodule is 1.5.*from 0 to 1"),
        ({"pairs": [("Nodule", "Nodule", 0.1)]}, "two different findings"),
        ({"pairs": [("Nodule", "Mass", 0.1)]}, "'Mass' does not exist"),
        ({"co_occurrence": -0.9}, "cannot hold together"),
        ({"cases": (5, 5, 5)}, "one for each of 4 sites"),
        ({"cases": 0}, "cases is 0"),
        ({"size": 8}, "size"),
        ({"sights": 2}, "did you mean 'sites'"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        write_phantom_xray(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_options_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="twice"):
        write_phantom_xray(tmp_path, options(), sites=2)


# --------------------------------------------------------------------------- pixel values do not tell findings


def auroc(truth: np.ndarray, score: np.ndarray) -> float:
    ranks, n = rankdata(score), truth.sum()
    return float((ranks[truth].sum() - n * (n + 1) / 2) / (n * (~truth).sum()))


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """1600 images at the defaults, 1000 of the training sites and 600 of the test site, which shares no patient with
    them: pixels, truth, and of the test site or not."""
    how = options(cases=250, validation_cases=0, site_test_cases=0, test_cases=600)
    train = [case for site in range(4) for case in draw_site(how, site)]
    test = list(draw_site(how, "test"))
    pixels = np.stack([case.pixels for case in train + test]) / 255.0
    return pixels, truths(train + test), np.arange(1600) >= 1000


def statistics(pixels: np.ndarray) -> dict[str, np.ndarray]:
    flat = pixels.reshape(len(pixels), -1)
    mean, deviation = flat.mean(1), flat.std(1)
    z = (flat - mean[:, None]) / deviation[:, None]
    steps = np.abs(np.diff(pixels, axis=1)).mean((1, 2)), np.abs(np.diff(pixels, axis=2)).mean((1, 2))
    shares = [np.histogram(row, 32, (0, 1))[0] / flat.shape[1] for row in flat]
    entropy = [-(p[p > 0] * np.log(p[p > 0])).sum() for p in shares]
    percentiles = {f"percentile {q}": np.percentile(flat, q, axis=1) for q in (1, 10, 25, 50, 75, 90, 99)}
    return percentiles | {
        "mean": mean, "deviation": deviation, "skewness": (z**3).mean(1), "kurtosis": (z**4).mean(1),
        "steps down": steps[0], "steps across": steps[1], "steps": (steps[0] + steps[1]) / deviation,
        "entropy": np.array(entropy),
    }  # fmt: skip


def test_no_threshold_on_a_pixel_or_a_statistic_tells_a_finding(drawn: tuple[np.ndarray, ...]) -> None:
    pixels, truth, held_out = drawn
    for half in (held_out, ~held_out):
        for what, values in statistics(pixels[half]).items():
            for column, name in enumerate(FINDINGS):
                reached = auroc(truth[half][:, column], values)
                assert max(reached, 1 - reached) < 0.7, (name, what)
        each = rankdata(pixels[half, ::2, ::2].reshape(half.sum(), -1), axis=0)
        for column, name in enumerate(FINDINGS):
            there = truth[half][:, column]
            n, absent = there.sum(), (~there).sum()
            reached = (each[there].sum(0) - n * (n + 1) / 2) / (n * absent)
            assert np.maximum(reached, 1 - reached).max() < 0.7, (name, "a pixel")


@pytest.mark.parametrize("standardised", [False, True])
def test_no_linear_probe_tells_a_finding(drawn: tuple[np.ndarray, ...], standardised: bool) -> None:
    """Ridge regression on 32 x 32 pixels, the best of several penalties by the held-out patients themselves: an upper
    bound of what an honest choice reaches."""
    pixels, truth, held_out = drawn
    x = pixels.reshape(len(pixels), 32, 2, 32, 2).mean((2, 4)).reshape(len(pixels), -1)
    if standardised:
        x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    train, test = ~held_out, held_out
    x = (x - x[train].mean(0)) / (x[train].std(0) + 1e-3)
    u, s, vt = np.linalg.svd(x[train], full_matrices=False)
    y = truth[train] - truth[train].mean(0)
    for penalty in 10.0 ** np.arange(1, 6):
        scores = x[test] @ (vt.T @ ((s / (s**2 + penalty))[:, None] * (u.T @ y)))
        for column, name in enumerate(FINDINGS):
            assert auroc(truth[test][:, column], scores[:, column]) < 0.7, (name, penalty)
