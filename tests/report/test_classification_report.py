"""The report of labels of whole images: its numbers against the folder, and what it says is missing."""

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_classification import write_run
from test_report_page import Outline, sections

from fedatlas.core.errors import RunFolderError
from fedatlas.evaluation.classification import Histogram
from fedatlas.report import figures, page, read, results, tables

SMALL = {
    "classes": ("effusion", "mass", "nodule"),
    "sites": ("alpha", "beta"),
    "rounds": 3,
    "images": 60,
    "draws": 20,
    "one_value": [("beta", "mass")],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "abc123", **SMALL)  # type: ignore[arg-type]
    page.write(folder)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def text_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_one_page_without_network_and_with_every_section(finished: Path) -> None:
    text = text_of(finished)
    outline = Outline(text)
    assert len(outline.ids) == len(set(outline.ids))
    assert "https:" not in text and "http:" not in text
    for target in outline.targets:
        assert target.startswith(("#", "data:image/png;base64,")), target
        assert not target.startswith("#") or target[1:] in outline.ids, target
    wanted = {
        "labels",
        "curves",
        "boxes",
        "results",
        "pooled",
        "overlays",
        "forgetting",
        "cost",
        "configuration",
    }
    assert wanted <= set(outline.ids)
    assert outline.tags.count("table") == outline.tags.count("caption") > 20
    seen = re.sub(r'<div class="slim" aria-hidden="true">.*?</figure>', "", text, flags=re.S)
    assert seen.count("<svg") == seen.count('role="img" aria-label=') > 4
    words = " ".join(outline.text)
    assert "Dice" not in words and "voxel" not in words and "HD95" not in words


def test_the_same_folder_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    assert (
        page.write(finished, tmp_path / "other.html").read_bytes() == (finished / "report.html").read_bytes()
    )


def test_the_report_needs_no_torch() -> None:
    code = "import sys, fedatlas.report.results; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def rows_of(folder: Path, **wanted: str) -> list[dict[str, str]]:
    with (folder / "rows.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[k] == v for k, v in wanted.items())]


def summed(folder: Path, split: str, model: str) -> dict[str, Histogram]:
    found: dict[str, Histogram] = {}
    for entry in json.loads((folder / "histograms.json").read_text()):
        if (entry["split"], entry["model"]) == (split, model):
            one = Histogram.from_dict(entry["histogram"])
            found[entry["class"]] = found[entry["class"]] + one if entry["class"] in found else one
    return found


def test_headline_numbers_are_those_of_the_rows_and_of_the_summed_histograms(finished: Path) -> None:
    rows = rows_of(finished, split="test", model="best", metric="auroc")
    means = [
        np.mean([float(r["value"]) for r in rows if r["known"] == known and r["value"]])
        for known in ("1", "0")
    ]
    together = np.mean([h.auroc().value for h in summed(finished, "test", "best").values()])  # type: ignore[misc]
    shown = re.findall(r'<p class="big">([^<]*)</p>', text_of(finished))
    assert shown == [f"{v:.3f}" for v in (together, *means)]
    assert len({*shown}) == 3
    words = " ".join(Outline(text_of(finished)).text)
    assert (
        f"over {sum(r['known'] == '1' and bool(r['value']) for r in rows)} pairs of site and class" in words
    )
    assert re.search(r"macro AUROC over 3 classes, of all sites' images as one set, ± 0\.0\d\d", words)


def test_the_label_matrix_has_positives_and_negatives(finished: Path) -> None:
    found = sections(text_of(finished))["labels"]
    assert re.search(r"31\+ · 269−\s+300 / 300 images", found)
    assert re.search(r"0\+ · 302−.*one value only", found)
    assert "reference (test only)" in found and "tested on" in found
    assert "0 · 0 · 60" in found and "300 · 60 · 60" in found and "150 · 30 · 30" in found


def test_every_value_has_its_interval_and_counts(finished: Path) -> None:
    text = text_of(finished)
    (row,) = rows_of(finished, split="test", model="best", site="alpha", **{"class": "effusion"}, metric="ap")
    ends = [
        float(
            rows_of(finished, split="test", model="best", site="alpha", **{"class": "effusion"}, metric=m)[0][
                "value"
            ]
        )
        for m in ("ap_low", "ap_high")
    ]
    value = f"{float(row['value']):.3f}"
    assert re.search(rf"{value}(</b>)? <i>\[{ends[0]:.3f}, {ends[1]:.3f}\]</i>", text)
    n = [
        rows_of(finished, split="test", site="alpha", **{"class": "effusion"}, metric=m)[0]["value"]
        for m in ("n_positive", "n_negative")
    ]
    line = next(line for line in text.split("<tr>") if value in line and ">alpha<" in line)
    for count in n:
        assert f">{float(count):.0f}</td>" in line


def test_metrics_are_chosen_without_a_script(finished: Path) -> None:
    text = text_of(finished)
    group = re.search(r'<div class="choice".*?</label><div>', text, flags=re.S)
    assert group
    assert re.findall(r"<label for=[^>]*>([^<]*)", group[0]) == [
        "AUROC", "Average precision", "F1", "Sensitivity", "Specificity", "ECE",
    ]  # fmt: skip
    assert group[0].count(" checked") == 1
    assert "n_positive" not in text and "auroc_low" not in text
    assert ".choice>input:nth-of-type(6):checked~div:nth-of-type(6){display:block}" in text


def test_what_is_not_defined_says_why(finished: Path) -> None:
    text = text_of(finished)
    assert re.search(
        r'title="one label value: 60 negative, no positive">not defined<sup><a href="#test-auroc', text
    )
    assert re.search(
        r'<li id="test-auroc-known-a"><sup>a</sup> one label value: no positive: 3 values not', text
    )
    assert "0.500</b>" not in text


def test_all_sites_together_are_the_summed_histograms(finished: Path) -> None:
    text = text_of(finished)
    for model in ("best", "local/alpha", "local/beta"):
        for histogram in summed(finished, "test", model).values():
            found = histogram.auroc()
            assert f"{found.value:.3f} <i>± {found.error:.3f}</i>" in text
    ece = summed(finished, "test", "best")["nodule"].ece(10)
    assert f"{ece.value:.3f} <i>± {ece.error:.3f}</i>" in text
    for name in ("ROC curves on test", "Reliability on test", "ROC curves on validation"):
        assert text.count(f'aria-label="{name}') == 1


def test_counts_at_the_thresholds_are_exact(finished: Path) -> None:
    limits = json.loads((finished / "thresholds.json").read_text())["classes"]
    run = read.read(finished)
    found = sections(text_of(finished))["pooled"]
    for name, histogram in summed(finished, "test", "best").items():
        limit = limits[name]["value"]
        cut = tables.confusion(histogram, limit)
        assert cut is not None
        edges = np.array(histogram.edges[:-1])
        assert cut.true_positive == np.array(histogram.positives)[edges >= limit - 1e-9].sum()
        assert cut.false_positive == np.array(histogram.negatives)[edges >= limit - 1e-9].sum()
        assert cut.true_positive + cut.false_negative == sum(histogram.positives)
        assert cut.false_positive + cut.true_negative == sum(histogram.negatives)
        line = rf"{limit:.3f} {limits[name]['reached']:.3f} " + " ".join(map(str, cut))
        assert line in re.sub(r"\s+", " ", found), name
    assert tables.confusion(histogram, 0.123456) is None, "no edge"
    assert run.thresholds is not None and run.thresholds.criterion == "f1"
    assert "F1, validation" in found


def test_means_over_classes_are_of_those_that_are_defined(finished: Path) -> None:
    run = read.read(finished)
    whole = tables.pooled_macro(run, "test", "best")
    assert (whole.n, whole.reason) == (3, "")
    beta = replace(run, histograms=tuple(one for one in run.histograms if one.site == "beta"))
    less = tables.pooled_macro(beta, "test", "best")
    every = {name: one.auroc().value for name, one in tables.pooled(beta, "test", "best").items()}
    assert every["mass"] is None and less.n == 2
    assert less.value == np.mean([every["effusion"], every["nodule"]]) and less.reason == ""
    mass = replace(beta, histograms=tuple(one for one in beta.histograms if one.class_ == "mass"))
    none = tables.pooled_macro(mass, "test", "best")
    assert (none.value, none.error, none.n) == (None, None, 0) and none.reason.startswith("one label value")
    assert tables.pooled_macro(run, "train", "best").reason == "needs the histograms of the final evaluation"


def test_shares_are_of_what_they_are_called() -> None:
    assert tables.Confusion(8, 2, 4, 12).shares() == [8 / 10, 12 / 16, 8 / 12, 16 / 22]
    assert tables.Confusion(0, 0, 0, 5).shares() == [None, 1.0, None, None]
    histogram = Histogram((0.0, 0.5, 1.0), (1, 2), (3, 4))
    assert tables.confusion(histogram, 0.5) == (2, 1, 4, 3)
    assert tables.confusion(replace(histogram, not_finite=1), 0.5) is None


def test_an_interval_of_some_resamples_says_how_many_lack() -> None:
    row = {"class": "mass", "site": "alpha", "model": "best", "known": True, "reason": ""}
    values = {
        "auroc": 0.8,
        "auroc_low": 0.7,
        "auroc_high": 0.9,
        "auroc_undefined": 0.25,
        "n_positive": 3.0,
        "n_negative": 5.0,
    }
    rows: Any = [row | {"metric": metric, "value": value} for metric, value in values.items()]
    (value,) = tables.class_values(rows, "auroc").values()
    assert value == (0.8, "", 0.7, 0.9, 0.25, "", 3, 5, True)
    entries, counts = results._of_images(rows, "auroc", True)
    assert counts == {("mass", "alpha"): [3, 5]}
    assert entries["mass", "alpha", "best"] == results.Entry(
        0.8, "0.800", "[0.700, 0.900]", "25.0 % of the resamples have no value", True
    )
    without = [
        each | ({"value": None, "reason": "few"} if each["metric"].endswith(("low", "high")) else {})
        for each in rows
    ]
    (entry,) = results._of_images(without, "auroc", True)[0].values()
    assert (entry.spread, entry.told, entry.partly) == ("[–]", "no interval: few", False)
    assert results._of_images(rows, "auroc", False) == ({}, {})
    assert results.plainly("one label value: 3 positive, no negative") == "one label value: no negative"
    assert results.shown_metrics(rows) == ["auroc"]


def test_examples_are_the_extremes_of_all_sites(finished: Path) -> None:
    found = read.examples(read.read(finished), "test", 3)
    every: dict[str, list[tuple[float, str]]] = {}
    for path in finished.glob("sites/*/overlays/test/best/effusion--*.npz"):
        stored = np.load(path)
        kind = path.stem.partition("--")[2].rpartition("-")[0]
        every.setdefault(kind, []).append((float(stored["score"]), str(stored["case"])))
    assert set(found["effusion"]) == set(every) == set(read.KINDS)
    for kind, entries in found["effusion"].items():
        best = sorted(every[kind], reverse=kind.endswith("high"))[:3]
        assert [(e.score, e.case) for e in entries] == best, kind
    words = sections(text_of(finished))["overlays"]
    assert "missed" in words and "false alarm" in words
    assert 'class="cam"' in text_of(finished) and 'id="cam" checked' in text_of(finished)


def test_an_example_without_a_map_and_a_large_one(copy: Path, undrawn: None) -> None:
    path = sorted(copy.glob("sites/alpha/overlays/test/best/effusion--present-high-1.npz"))[0]
    stored = dict(np.load(path))
    del stored["cam"]
    stored["image"] = np.random.default_rng(0).random((500, 449)).astype(np.float32)
    np.savez(path, **stored)
    entry = next(
        e
        for kinds in read.examples(read.read(copy), "test", 8).values()
        for e in kinds.get("present-high", ())
        if e.path == path
    )
    drawn = figures.example(entry)
    assert 'viewBox="0 0 149.00 166.00"' in drawn and "cam" not in drawn
    page.write(copy)


def test_pages_with_many_classes_show_fewer_pictures_each(tmp_path: Path, undrawn: None) -> None:
    classes = tuple(f"finding {n}" for n in range(9))
    run = write_run(tmp_path / "run", **{**SMALL, "classes": classes, "one_value": [], "rounds": 1})  # type: ignore[arg-type]
    text = page.write(run).read_text(encoding="utf-8")
    assert text.count('<svg class="overlay"') == 9 * 4 * 2 and 'class="kinds few"' in text
    assert len(text) < 3_000_000


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    names = ('<b>bold</b> "q" $x_1$ & --', "'); </script><script>alert(1)", "Erguß 肝")
    run = write_run(
        tmp_path / "run",
        **{**SMALL, "classes": names, "sites": ("a&b", "<i>c"), "one_value": [("<i>c", names[1])]},
    )  # type: ignore[arg-type]
    text = page.write(run).read_text(encoding="utf-8")
    outline = Outline(text)
    assert outline.tags.count("script") == 1
    assert "<b>bold" not in text and "<i>c" not in text
    words = " ".join(outline.text)
    assert all(name in words for name in names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rounds": 0, "planned": 3, "final": False},
            ["No round is complete", "No image is scored yet", "--resume"],
        ),
        (
            {"rounds": 2, "planned": 5, "final": False},
            [
                "2 of 5 rounds",
                "no final evaluation yet",
                "needs the histograms",
                "no intervals",
                "No histograms",
            ],
        ),
        ({"histograms": False}, ["No histograms in this folder", "needs the histograms"]),
        ({"thresholds": False}, ["No thresholds in this folder", "no threshold"]),
        ({"overlays": False}, ["No pictures in this folder"]),
        ({"never_scored": ["mass"]}, ["never scored", "No picture: the class was never scored"]),
        ({"local": False}, ["No local model was evaluated"]),
        ({"evaluated": False}, ["No round was evaluated, so there is no validation AUROC"]),
        ({"splits": ["validation"]}, ["Validation images", "No pictures"]),
        ({"draws": 0}, ["Forgetting matrix"]),
        ({"sites": ("only",), "test_only": (), "one_value": []}, ["never annotated"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_is_missing_is_said(tmp_path: Path, undrawn: None, change: dict, said: list[str]) -> None:
    run = write_run(tmp_path / "run", **{**SMALL, "splits": ["test"], **change})
    words = " ".join(Outline(page.write(run).read_text(encoding="utf-8")).text)
    for sentence in said:
        assert sentence in words
    assert "reference trained in no round" not in words


def test_figures_are_drawn_where_much_is_missing(tmp_path: Path) -> None:
    """One of them has the sentence on what is not defined."""
    one = [("alpha", "mass"), ("beta", "mass"), ("reference", "mass")]
    little = {"splits": ["test"], "rounds": 1, "local": False, "one_value": one}
    outline = Outline(
        page.write(write_run(tmp_path / "run", **{**SMALL, **little})).read_text(encoding="utf-8")  # type: ignore[arg-type]
    )
    assert outline.tags.count("svg") > 5 and "not defined at any site" in " ".join(outline.text)


def test_a_run_folder_of_its_run_json_alone_gives_a_page(tmp_path: Path) -> None:
    info = {"labels": {"names": ["mass"], "exclusive": False, "level": "image"}, "sites": {}}
    (tmp_path / "run.json").write_text(json.dumps(info))
    assert "run.json names no site" in page.write(tmp_path).read_text(encoding="utf-8")


def test_the_bins_of_the_calibration_error_are_those_of_the_federation(copy: Path, undrawn: None) -> None:
    (copy / "federation.yaml").write_text("evaluation: {bins: 7}\n")
    assert "the edges do not hold the bounds of 7 bins" in page.write(copy).read_text(encoding="utf-8")


def _histogram(change: Callable[[dict], object]) -> Callable[[Path], str]:
    def spoil(run: Path) -> str:
        found = json.loads((run / "histograms.json").read_text())
        change(found[0])
        (run / "histograms.json").write_text(json.dumps(found))
        return "histograms.json"

    return spoil


def _cut_thresholds(run: Path) -> str:
    (run / "thresholds.json").write_text('{"split": "validation"}')
    return "thresholds.json: not a table of thresholds"


def _cut_picture(run: Path) -> str:
    path = next((run / "sites").rglob("*.npz"))
    path.write_bytes(path.read_bytes()[:200])
    return path.name


def _other_shape(run: Path) -> str:
    path = next((run / "sites").rglob("effusion--present-high-1.npz"))
    np.savez(path, **{**np.load(path), "cam": np.zeros((2, 2)), "score": np.float64(1.0)})
    return "two planes of one shape"


@pytest.mark.parametrize(
    "spoil",
    [
        _histogram(lambda h: h.pop("site")),
        _histogram(lambda h: h["histogram"].pop("edges")),
        _histogram(lambda h: h["histogram"].update(edges=[0.0, 1.0], positives=[1], negatives=[1])),
        _cut_thresholds,
        _cut_picture,
        _other_shape,
    ],
)
def test_a_damaged_file_is_named(copy: Path, undrawn: None, spoil: Callable[[Path], str]) -> None:
    said = spoil(copy)
    with pytest.raises(RunFolderError, match=re.escape(said)):
        page.write(copy)
