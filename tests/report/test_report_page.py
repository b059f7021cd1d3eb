import csv
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from synthetic_run import write_run

from fedatlas.cli import main
from fedatlas.core.errors import RunFolderError
from fedatlas.evaluation.statistics import POST, read_rows, rows_text
from fedatlas.report import figures, markup, page, read, results, tables
from fedatlas.report.conclusion import conclude, lines, sentences
from fedatlas.report.figures import analyses, chart, slices
from fedatlas.report.figures import theme as palette
from fedatlas.transport.rounds import sealed, to_json
from fedatlas.transport.store import write_atomic

SMALL = {"classes": ("liver", "spleen", "left kidney"), "sites": ("alpha", "beta"), "rounds": 3, "cases": 3}
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """Checks that tags nest, and collects ids, links, text and tag names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "xlink:href"):
                self.targets.append(value)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(re.sub(r"\s+", " ", data))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "abc123", **SMALL)
    page.write(folder)
    return folder


def test_one_page_without_network_and_with_every_section(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    outline = Outline(text)
    assert len(outline.ids) == len(set(outline.ids))
    assert "https:" not in text
    assert "http:" not in text
    for target in outline.targets:
        assert target.startswith(("#", "data:image/png;base64,")), target
        assert not target.startswith("#") or target[1:] in outline.ids, target
    headings = {"labels", "curves", "boxes", "results", "overlays", "forgetting", "cost", "configuration"}
    assert headings <= set(outline.ids)
    assert text.count('class="aid"') >= len(headings)
    assert outline.tags.count("table") == outline.tags.count("caption") > 8
    seen = re.sub(r'<div class="slim" aria-hidden="true">.*?</figure>', "", text, flags=re.S)
    assert "slim" in text and seen.count("<svg") == seen.count('role="img" aria-label=')
    words = " ".join(outline.text)
    for expected in (
        "condistfl",
        "1,234,567",
        "labels: <all>",
        "4,938,268 B",
        "4.94 MB",
        "update not finite",
    ):
        assert expected in words


def test_the_same_folder_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    again = page.write(finished, tmp_path / "deep" / "other.html")
    assert again == tmp_path / "deep" / "other.html"
    assert again.read_bytes() == (finished / "report.html").read_bytes()
    assert [path.name for path in again.parent.iterdir()] == ["other.html"]


def test_bytes_are_exact_and_count_start_and_evaluation(finished: Path) -> None:
    words = " ".join(Outline((finished / "report.html").read_text(encoding="utf-8")).text)
    down = 64 + 3 * (4_938_268 + 4_938_268)
    assert f"{down:,} B" in words
    assert "4,938,268 + 4,938,268 / 4,938,908 + 2,048" in words
    assert "64 / 128" in words
    assert "over 3 rounds" in words


def sections(text: str) -> dict[str, str]:
    """The words of every section, by its anchor."""
    parts = re.findall(r'<section id="(\w+)".*?</section>', text, flags=re.S)
    bodies = re.findall(r"<section .*?</section>", text, flags=re.S)
    return {name: " ".join(Outline(body).text) for name, body in zip(parts, bodies, strict=True)}


def test_what_was_not_used_is_not_on_the_page(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    assert "privacy" not in sections(text) and "traffic" in sections(text)
    words = " ".join(Outline(text).text)
    assert not re.search(r"ε|[Ss]ecure|[Cc]ompression|Error feedback|differential", words)


def test_compression_and_bytes_by_kind(tmp_path: Path, undrawn: None) -> None:
    comm = "comm: {up: topk, down: bf16, fraction: 0.05, feedback: false}\n"
    run = write_run(tmp_path / "run", **SMALL, exchange=comm)
    traffic = sections(page.write(run).read_text(encoding="utf-8"))["traffic"]
    for said in ("topk, the largest 5 %", "bf16", "off", "4.94 MB", "named and not sent again"):
        assert said in traffic, said
    for key, total in (
        ("bytes_down", 2 * 3 * 4_938_268 - 4_938_268),
        ("evaluate_bytes_up", 5 * 2_048),
    ):
        assert tables.traffic(read.read(run).rounds, key) == total, "beta was lost in round 3"
    up = write_run(tmp_path / "up", **SMALL, exchange="comm: {up: int8, down: none, fraction: 0.01}\n")
    text = page.write(up).read_text(encoding="utf-8")
    assert "named and not sent again" not in text and "the largest" not in text
    assert "<dd>int8 up</dd>" in text


def test_differential_privacy_says_what_it_covers_and_what_not(tmp_path: Path, undrawn: None) -> None:
    private = "privacy: {clip: 0.7, noise: 1.3, delta: 1.0e-05, mode: local}\n"
    run = write_run(tmp_path / "run", **SMALL, exchange=private)
    text = page.write(run).read_text(encoding="utf-8")
    found = sections(text)["privacy"]
    for said in (
        "4.5",
        "1e-05",
        "local",
        "0.7",
        "1.3",
        "one site with any other data",
        "what each site sends",
    ):
        assert said in found, said
    assert re.search("Not covered.* validation and test scores", found)
    assert "Secure" not in found
    assert text.count('aria-label="Privacy spent') == 1
    assert [entry.epsilon for entry in read.read(run).rounds] == [1.5, 3.0, 4.5]
    assert read.read(run).releases == 3
    training = sections(text)["curves"]
    assert "sites keep their losses" in training and "releases" not in training
    assert "with noise" in sections(text)["boxes"], "what a local model is"


def test_a_round_that_broke_off_has_spent_privacy_too(tmp_path: Path, undrawn: None) -> None:
    private = "privacy: {clip: 0.7, noise: 1.3, delta: 1.0e-05, mode: local}\n"
    run = write_run(tmp_path / "run", **SMALL, exchange=private)
    released = {"most": 4, "fewest": 2, "sites": {}, "heard": {}, "epsilon": 6.25}
    (run / "released.json").write_text(json.dumps(released))
    found = sections(page.write(run).read_text(encoding="utf-8"))["privacy"]
    assert "6.25" in found and "A round that broke off had sent its updates, too" in found
    assert (read.read(run).epsilon, read.read(run).releases) == (6.25, 4)
    (run / "released.json").write_text(json.dumps(released | {"most": 3, "epsilon": 4.5}))
    assert "broke off" not in sections(page.write(run).read_text(encoding="utf-8"))["privacy"]


def test_without_noise_no_epsilon_is_promised(tmp_path: Path, undrawn: None) -> None:
    run = write_run(tmp_path / "run", **SMALL, exchange="privacy: {clip: 1.0, noise: 0.0, delta: 1.0e-05}\n")
    for log in run.glob("rounds/000?/log.json"):
        log.write_text(json.dumps(json.loads(log.read_text()) | {"epsilon": None}))
    text = page.write(run).read_text(encoding="utf-8")
    assert "ε ∞" in text and "nothing is promised" in text and 'aria-label="Privacy spent' not in text


def test_secure_aggregation_leaves_out_what_needs_local_models(tmp_path: Path, undrawn: None) -> None:
    run = write_run(tmp_path / "run", **SMALL, exchange="secure: {bits: 20, threshold: null}\n")
    found = sections(page.write(run).read_text(encoding="utf-8"))
    assert "boxes" not in found and "forgetting" not in found
    assert "20" in found["privacy"] and "9.5e-07" in found["privacy"] and "2 of 2" in found["privacy"]
    assert "No site's own model is known" in found["privacy"] and "ε" not in found["privacy"]


def test_secure_aggregation_counts_the_sites_that_train(tmp_path: Path, undrawn: None) -> None:
    run = write_run(
        tmp_path / "run", **{**SMALL, "sites": ("alpha", "beta", "gamma")}, exchange="secure: {bits: 20}\n"
    )
    assert "2 of 3" in sections(page.write(run).read_text(encoding="utf-8"))["privacy"]
    info = json.loads((run / "run.json").read_text())
    info["sites"]["beta"]["role"] = "test"
    (run / "run.json").write_text(json.dumps(info))
    assert "2 of 2" in sections(page.write(run).read_text(encoding="utf-8"))["privacy"]


def test_the_central_mode_is_told_apart(tmp_path: Path, undrawn: None) -> None:
    both = "privacy: {clip: 1.0, noise: 2.0, delta: 1.0e-05, mode: central}\nsecure: {bits: 24}\n"
    run = write_run(tmp_path / "run", **SMALL, exchange=both)
    found = sections(page.write(run).read_text(encoding="utf-8"))["privacy"]
    assert "the sum of the sites' updates" in found and "Differential privacy" in found
    assert "Secure aggregation" in found and "what each site sends" not in found


def test_who_answered_and_who_was_lost(tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    log = run / "rounds" / "0002" / "log.json"
    found = json.loads(log.read_text())
    found["lost"] = {"alpha": "evaluate: no answer within 60 s"}
    log.write_text(json.dumps(found))
    start = run / "rounds" / "0000" / "log.json"
    start.write_text(json.dumps(json.loads(start.read_text()) | {"lost": {"beta": "begin: too late"}}))
    there = tables.presence(read.read(run))
    assert there["alpha"] == {1: "answered", 2: "lost in evaluation", 3: "answered"}
    assert there["beta"] == {1: "answered", 2: "answered", 3: "lost"}
    text = page.write(run).read_text(encoding="utf-8")
    assert text.count('aria-label="Which sites answered') == 1 and "lost in the evaluation" in text
    assert "Lost sites (3)" in text and '<td class="num">start</td><td>beta</td>' in text
    for log in run.glob("rounds/000?/log.json"):
        found = json.loads(log.read_text()) | {"lost": {}}
        found["cost"].setdefault("beta", {"seconds": 1.0})
        log.write_text(json.dumps(found))
    text = page.write(run).read_text(encoding="utf-8")
    assert "answered, in every round" in text and 'aria-label="Which sites answered' not in text
    assert "red cross" not in text


@pytest.mark.parametrize(("in_", "said"), [("local_update", True), ("evaluate", False)])
def test_a_site_trained_in_no_round_if_it_was_lost_before(
    tmp_path: Path, finished: Path, undrawn: None, in_: str, said: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for log in run.glob("rounds/000[1-9]/log.json"):
        found = json.loads(log.read_text())
        found["cost"].setdefault("beta", {"seconds": 1.0})
        log.write_text(json.dumps(found | {"lost": {"beta": f"{in_}: no answer within 60 s"}}))
    text = page.write(run).read_text(encoding="utf-8")
    assert ("beta trained in no round" in text) == said


def test_a_merged_site_is_no_site_that_never_trained(tmp_path: Path, finished: Path, undrawn: None) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for log in run.glob("rounds/000?/log.json"):
        cost = {"pooled": {"seconds": 3.0, "bytes_down": 5, "bytes_up": 6}}
        log.write_text(json.dumps(json.loads(log.read_text()) | {"cost": cost, "lost": {}}))
    text = page.write(run).read_text(encoding="utf-8")
    assert "trained in no round" not in text and "pooled" in sections(text)["traffic"]


def test_the_report_needs_no_torch() -> None:
    code = "import sys, fedatlas.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_headline_numbers_are_those_of_the_rows(finished: Path) -> None:
    """A literal version of the three averages, straight from the file."""
    with (finished / "rows.csv").open(encoding="utf-8") as file:
        rows = [
            r
            for r in csv.DictReader(file)
            if (r["split"], r["model"], r["metric"]) == ("test", "best", "dice")
        ]
    sites = sorted({r["site"] for r in rows})
    classes = sorted({r["class"] for r in rows})

    def pair(site: str, name: str, known: str) -> float | None:
        values = [
            float(r["value"])
            for r in rows
            if (r["site"], r["class"], r["known"]) == (site, name, known) and r["value"]
        ]
        return sum(values) / len(values) if values else None

    def mean(values: list) -> float:
        values = [v for v in values if v is not None]
        return sum(values) / len(values)

    clientwise = mean([mean([pair(s, c, "1") for c in classes]) for s in sites])
    known = mean([pair(s, c, "1") for s in sites for c in classes])
    unknown = mean([pair(s, c, "0") for s in sites for c in classes])
    assert abs(clientwise - known) > 1e-3
    text = (finished / "report.html").read_text(encoding="utf-8")
    shown = re.findall(r'<p class="big">([^<]*)</p>', text)
    assert shown == [f"{clientwise:.3f}", f"{known:.3f}", f"{unknown:.3f}"]


def _row(value: float | None, **other: object) -> dict:
    row = {"site": "a", "class": "x", "metric": "dice", "value": value, "known": True}
    return {**row, "reason": "" if value is not None else "truth empty", **other}


def test_a_cell_counts_what_is_not_defined_and_why() -> None:
    rows = [_row(v) for v in (0.2, 0.4, None, 0.9)] + [_row(None, reason="prediction empty")]
    (cell,) = tables.cells(rows, "site", "class").values()
    assert (cell.summary.n, cell.scored) == (3, 5)
    assert cell.undefined == {"truth empty": 1, "prediction empty": 1}


def test_a_value_that_is_not_finite_is_not_defined(tmp_path: Path, finished: Path, undrawn: None) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    lines = (run / "rows.csv").read_text().splitlines()
    for number, value in ((1, "nan"), (2, "inf")):
        cells = lines[number].split(",")
        cells[8] = value
        lines[number] = ",".join(cells)
    (run / "rows.csv").write_text("\n".join(lines) + "\n")
    rows = read.read(run).rows
    assert rows is not None
    assert [(row["value"], row["reason"]) for row in rows[:2]] == [(None, "not finite")] * 2
    assert "not finite" in page.write(run).read_text(encoding="utf-8")


def test_clientwise_is_the_published_global_index() -> None:
    """Fed-MENU's table: clients 94.07, 95.94, 80.05, 94.65 and one of five organs give 91.14."""
    clients = [[94.07], [95.94], [80.05], [94.65], [96.70, 93.74, 82.14, 96.34, 86.08]]
    rows = [
        _row(v, site=str(k), **{"class": f"organ {c}"})
        for k, values in enumerate(clients)
        for c, v in enumerate(values)
    ]
    found = tables.verdict([*rows, _row(1.0, metric="hd95"), _row(40.0, known=False)])
    assert found.clientwise == pytest.approx(91.142)
    assert found.unknown == 40.0
    assert (found.n_sites, found.n_known, found.n_unknown) == (5, 9, 1)


def test_few_values_have_no_interval_and_nothing_is_bold(finished: Path) -> None:
    assert tables.spread([0.5]) is None
    assert tables.spread([0.5, 0.3]) == tables.Spread(0.3, 0.5, False)
    values = [0.1, 0.4, 0.5, 0.5, 0.6, 0.9]
    found = tables.spread(values)
    assert found is not None and found.interval and 0.1 < found.low < np.mean(values) < found.high < 0.9
    assert tables.spread(values) == found
    results = next(b for b in re.findall(r"<section .*?</section>", (finished / "report.html").read_text(encoding="utf-8"), flags=re.S)
                   if 'id="results"' in b)  # fmt: skip
    assert "<b>" not in results and re.search(r"<i>0\.\d{3}–0\.\d{3}</i>", results)


def test_what_is_far_off_is_marked() -> None:
    """One HD95 of 203 mm among values around 10; a low Dice; what is far on the good side is no outlier."""
    plain = {"split": "test", "model": "best"}
    far = [
        _row(v, metric="hd95", case=str(k), **plain) for k, v in enumerate((8.0, 9, 10, 11, 12, 9, 10, 203))
    ]
    assert [row["value"] for row in tables.outliers(far)] == [203]
    dice = [
        _row(v, metric="dice", case=str(k), **plain)
        for k, v in enumerate((0.8, 0.81, 0.79, 0.8, 0.8, 0.1, 0.99))
    ]
    assert [row["value"] for row in tables.outliers(dice)] == [0.1]
    assert tables.outliers(far[-3:]) == []
    close = [_row(v, metric="hd95", case=str(k), **plain) for k, v in enumerate((1.0, 1, 1, 1, 1, 1, 3))]
    assert tables.outliers(close) == [], "two millimetres are not far"


def test_every_case_stands_in_a_table_and_a_far_one_above_it(tmp_path: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    lines = (run / "rows.csv").read_text().splitlines()
    place = next(
        n
        for n, line in enumerate(lines)
        if line.startswith("test,original,best,3,alpha,alpha-001,liver,hd95")
    )
    cells = lines[place].split(",")
    cells[8] = "203.0"
    lines[place] = ",".join(cells)
    (run / "rows.csv").write_text("\n".join(lines) + "\n")
    text = page.write(run).read_text(encoding="utf-8")
    words = sections(text)["cases"]
    assert "liver , case alpha-001 at alpha: HD95 203.00 mm, the median is" in words
    assert words.count("alpha-001") == 3 + 1 + 3, "three classes, the list, and the same of validation"
    assert 'title="far off: alpha-001: 203.00"' in text


def test_classes_have_plain_names(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", classes=("parotid_right", "parotid_left"), sites=("a", "b"), rounds=1, cases=2
    )
    text = page.write(run).read_text(encoding="utf-8")
    found = sections(text)
    for name in ("labels", "curves", "boxes", "results", "cases", "overlays", "forgetting"):
        assert "parotid right" in found[name] and "parotid_right" not in found[name], name
    (run / "federation.yaml").write_text("labels: {display: {parotid_right: Right parotid <gland>}}\n")
    assert "Right parotid <gland>" in sections(page.write(run).read_text(encoding="utf-8"))["results"]


def test_the_page_opens_with_a_verdict_and_a_baseline(finished: Path) -> None:
    run = read.read(finished)
    found = conclude(run)
    assert found is not None and (found.model, found.split) == ("best", "test") and found.baseline is not None
    at_home = [r for r in run.rows or () if r["split"] == "test" and r["model"] == f"local/{r['site']}"]
    assert {r["site"] for r in at_home} == {"alpha", "beta"}
    known = [
        np.mean([r["value"] for r in at_home if (r["site"], r["class"], r["metric"]) == (site, name, "dice") and r["value"] is not None])
        for site in run.sites for name in run.sites[site].annotated
    ]  # fmt: skip
    assert found.baseline.known == pytest.approx(np.mean([v for v in known if v == v]))
    head = (finished / "report.html").read_text(encoding="utf-8").split("<nav")[0]
    words = " ".join(Outline(head[head.index("<header") :] + "").text)
    first, second = sentences(run)
    assert words.index(first) < words.index("Client-wise Dice") and second in words
    assert (
        f"{found.verdict.known:.3f} on classes that the site annotated" in first
        and "6 test cases of 2 sites" in first
    )
    assert f"{found.baseline.known:.3f} and 0.000" in second
    assert "That score chose the round" in words and "0.713" in words


def changed_rows(run: Path, change: Any) -> None:
    """Writes rows.csv again, of what `change` makes of every row."""
    made = [change(row) for row in read_rows(run / "rows.csv")]
    write_atomic(run / "rows.csv", rows_text([row for row in made if row is not None]).encode())


def test_the_baseline_is_compared_at_the_sites_that_have_one(tmp_path: Path, undrawn: None) -> None:
    """Models that are alike at two sites, of which one has no local model, are not told as different."""
    run = write_run(tmp_path / "run", **SMALL, overlays=False)

    def change(row: Any) -> Any:
        if row["model"] == "local/beta":
            return None
        return row | {"value": None if row["value"] is None else 0.9 if row["site"] == "beta" else 0.5}

    changed_rows(run, change)
    found = conclude(read.read(run))
    assert found is not None and found.baseline is not None and found.beside is not None
    assert found.baseline.known == found.beside.known == pytest.approx(0.5) and found.verdict.known > 0.6
    assert any(
        "at these 1 of 2 sites the global model reaches 0.500" in line for line in sentences(read.read(run))
    )
    assert "at 1 site, this one there 0.500" in page.write(run).read_text(encoding="utf-8")
    whole = conclude(read.read(write_run(tmp_path / "whole", **SMALL, overlays=False)))
    assert whole is not None and whole.baseline is not None and whole.beside is None


def test_local_models_alone_are_not_called_global(tmp_path: Path, undrawn: None) -> None:
    run = write_run(tmp_path / "run", **SMALL, models=())
    assert conclude(read.read(run)) is None
    (said,) = sentences(read.read(run))
    assert said.startswith("The global model was not scored")
    text = page.write(run).read_text(encoding="utf-8")
    assert "The global model was not scored" in text and "No case is scored yet" not in text


def test_a_class_that_a_site_annotates_is_never_called_never_annotated(tmp_path: Path) -> None:
    """Where a single test case lacks it, and is scored by a reference."""
    run = write_run(tmp_path / "run", **SMALL, overlays=False)
    annotated = {name: site.annotated for name, site in read.read(run).sites.items()}
    before = conclude(read.read(run))
    changed_rows(run, lambda row: row | {"known": row["known"] and not row["case"].endswith("-001")})
    after = conclude(read.read(run))
    assert before is not None and after is not None and after.verdict == before.verdict
    assert all(row["known"] == (row["class"] in annotated[row["site"]]) for row in read.read(run).rows or ())


def test_a_table_of_cases_that_was_cut_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", **SMALL, overlays=False)
    info = json.loads((run / "run.json").read_text())
    count = len(read_rows(run / "rows.csv"))
    (run / "run.json").write_text(json.dumps(info | {"rows": count}))
    read.read(run)
    kept = (run / "rows.csv").read_text().splitlines(keepends=True)
    (run / "rows.csv").write_text("".join(kept[: count // 2]))
    with pytest.raises(
        RunFolderError, match=rf"rows.csv: holds {count // 2 - 1} rows, and the run wrote {count}"
    ):
        read.read(run)


def test_without_test_cases_the_verdict_says_that_it_is_optimistic(tmp_path: Path) -> None:
    run = read.read(write_run(tmp_path / "run", **SMALL, splits=["validation"], overlays=False))
    assert "optimistic" in sentences(run)[-1]
    young = read.read(write_run(tmp_path / "young", **{**SMALL, "final": False}))
    assert sentences(young)[0].startswith("On 6 validation cases") and "optimistic" not in "".join(
        sentences(young)
    )


def test_the_supervised_loss_stands_first() -> None:
    assert tables.main_loss(["loss", "condist", "supervised"]) == "supervised"
    assert tables.main_loss(["loss", "auxiliary", "segmentation"]) == "segmentation"
    assert tables.main_loss(["loss", "train"]) == "loss" and tables.main_loss(["steps"]) is None


def test_rows_stand_in_the_order_of_splits_and_of_metrics() -> None:
    rows = [
        _row(0.5, split=split, metric=metric)
        for split in ("validation", "train", "test")
        for metric in ("zeta", "hd95", "dice")
    ]
    assert tables.splits(rows) == ("test", "validation", "train")
    assert tables.metrics(rows) == ("dice", "hd95", "zeta")


def test_what_is_scored_is_of_the_original_grid_or_of_the_newest_round(finished: Path) -> None:
    run = read.read(finished)
    rows = [*(run.rows or ())]
    other = [row | {"grid": "federation"} for row in rows]
    after = [row | {"model": f"{POST}{row['model']}"} for row in rows]
    assert tables.scored(replace(run, rows=(*other, *rows, *after))) == (rows, False)
    assert tables.scored(replace(run, rows=tuple(other))) == (other, False)
    *before, last = run.rounds
    assert tables.scored(replace(run, rows=None)) == ([*last.rows], True)
    young = replace(run, rows=None, rounds=(*before, replace(last, rows=())))
    assert tables.scored(young) == ([*before[-1].rows], True)


def test_a_value_is_far_off_among_those_of_its_class_and_split() -> None:
    """By more than three times the range between the quartiles."""

    def of(values: Sequence[float], name: str, split: str) -> list[dict]:
        return [
            _row(v, case=str(k), model="best", split=split, **{"class": name}) for k, v in enumerate(values)
        ]

    here = of([0.9] * 9 + [0.3], "x", "test")
    rows = [*here, *of([0.3] * 10, "y", "test"), *of([0.3] * 10, "x", "validation")]
    assert tables.outliers(rows) == [here[-1]]
    others = of([0.95] * 40, "z", "test")
    assert results.far_off([*rows, *others]) == [(here[-1], np.median([0.9] * 9 + [0.3] * 11))]
    wide = of([*(0.8 + 0.005 * k for k in range(21)), 0.7, 0.5], "x", "test")
    assert [row["value"] for row in tables.outliers(wide)] == [0.5]


def entry(number: int, cost: dict[str, dict[str, float]], **more: Any) -> read.Round:
    about = {"sites": {}, "phases": {}, "lost": {}, "server_peak_mb": None, "rows": ()}
    return read.Round(number, cost=cost, **about | more)


def test_what_a_site_cost_is_over_the_rounds_that_it_took_part_in(finished: Path) -> None:
    whole = {"seconds": 10.0, "peak_mb": 100.0, "evaluate_seconds": 4.0, "evaluate_peak_mb": 300.0}
    rounds = (
        entry(1, {"a": whole, "b": {"evaluate_seconds": 5.0}}, sites={"a": {"step_seconds": 4.0}}, phases={"round": 1.0}),
        entry(2, {"c": {"seconds": 2.0, "peak_mb": 7.0}}, phases={"round": 2.0, "evaluate": 3.0}),
        entry(3, {"a": {"seconds": 30.0}}, sites={"a": {"step_seconds": 6.0}}, phases={"evaluate": float("nan")}),
        entry(4, {"e": {"seconds": 1.0}}, sites={"e": {"step_seconds": 4.0, "saved_seconds": 7.0}}),
    )  # fmt: skip
    run = replace(read.read(finished), rounds=rounds)
    assert tables.site_cost(run, "a") == (2, 40.0, 25.0, 4.0, 300.0)
    assert tables.site_cost(run, "b") == (0, 0.0, None, 5.0, None)
    assert tables.site_cost(run, "c") == (1, 2.0, None, None, 7.0)
    assert tables.site_cost(run, "d") is None
    assert tables.site_cost(run, "e") == (1, 8.0, 50.0, None, None), "work of another run, as if done again"
    assert tables.phase_seconds(run) == {"round": [1.0, 2.0], "evaluate": [3.0]}


def test_the_figures_of_training_show_the_one_that_merges_the_data(finished: Path) -> None:
    """A method that pools the data of all sites logs as one party: its curves and its place in the legends."""
    cost = {"seconds": 9.0, "bytes_down": 2000.0, "bytes_up": 3000.0}
    rounds = tuple(
        entry(n, {"pooled": cost}, sites={"pooled": {"loss": 1.0 / n}}, phases={"round": 9.5}) for n in (1, 2)
    )
    run = replace(read.read(finished), rounds=rounds)
    for made, told in (
        (figures.loss_curves(run), "pooled, loss, round 2: 0.500"),
        (figures.cost_figure(run), "pooled, s, round 2: 9.0"),
        (figures.traffic_figure(run), "pooled, kB, round 2: 5.0"),
    ):
        assert told in made and ">pooled</text>" in made
        assert "alpha" not in made, "no site trained"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (999.4, "999"),
        (999.6, "1k"),
        (999_400, "999k"),
        (999_600, "1M"),
        (999_600_000, "1G"),
        (1_234_567, "1.23M"),
    ],
)
def test_a_count_that_rounds_to_a_thousand_has_the_next_unit(value: float, said: str) -> None:
    assert markup.si(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (999_994, "999.99 kB"),
        (999_996, "1.00 MB"),
        (999_996_000_000, "1.00 TB"),
        (4_938_268, "4.94 MB"),
    ],
)
def test_bytes_that_round_to_a_thousand_have_the_next_unit(value: float, said: str) -> None:
    assert markup.human(value) == said


def test_links_lead_into_folders_whose_names_have_marks_of_an_address(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my #1 50%"
    folder.mkdir()
    (folder / "figure-2.html").write_text("<title>Organs</title>")
    found = page._beside(replace(read.read(finished), folder=folder), tmp_path / "elsewhere")
    assert found == [("Organs", "../my%20%231%2050%25/figure-2.html")]


def test_numbers_beside_the_loss_are_no_terms_of_it(finished: Path) -> None:
    nan, counts = float("nan"), dict.fromkeys(tables.BOOKKEEPING, float("nan"))
    assert {"steps", "overflows", "releases", "teacher_seconds", "teacher_round", "teacher_score"} <= set(
        counts
    )
    rounds = (
        entry(
            1, {}, sites={"b": {"loss": nan}, "a": {"supervised": nan, "loss": 1.0, "alpha": nan, **counts}}
        ),
        entry(2, {}, sites={"a": {"loss": float("inf")}}),
    )
    run = replace(read.read(finished), rounds=rounds)
    assert tables.loss_terms(run) == ("supervised", "loss", "alpha")
    assert tables.not_finite(run) == [
        (1, "a", "alpha"),
        (1, "a", "supervised"),
        (1, "b", "loss"),
        (2, "a", "loss"),
    ]


def test_a_table_counts_what_is_not_defined_by_its_reason(finished: Path) -> None:
    """n is of the model with most cases; the footnotes count every value."""
    run = read.read(finished)
    of = {"site": "alpha", "class": "liver", "split": "test"}
    best = [
        _row(v, case=str(k), model="best", **of)
        for k, v in enumerate((0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.3, 0.2))
    ]
    best += [_row(None, case="9", model="best", **of), _row(None, case="10", model="best", **of)]
    best += [_row(None, case="11", model="best", reason="prediction empty", **of)]
    local = [_row(0.5, case="0", model="local/alpha", **of), _row(None, case="1", model="local/alpha", **of)]
    elsewhere = [_row(0.7, case="0", model="best", **of | {"class": "spleen", "site": "beta"}),
                 _row(0.7, case="0", model="best", **of | {"class": "spleen"})]  # fmt: skip
    found = results.metric_table(run, [*elsewhere, *local, *best], "dice", "test cases", True)
    assert found is not None and not found.bars
    assert [(name, site, n) for name, site, n, _ in found.rows] == [
        ("liver", "alpha", [12]), ("spleen", "alpha", [1]), ("spleen", "beta", [1]),
    ]  # fmt: skip
    first, other = found.rows[0][3]
    assert first is not None and other is not None
    assert first.told.startswith("9 cases, SD ") and first.far == "far off: 7: 0.300, 8: 0.200"
    assert [mark.told for mark in first.marks] == [
        "1 of 12 not defined: prediction empty", "2 of 12 not defined: truth empty",
    ]  # fmt: skip
    assert (other.told, [mark.of for mark in other.marks]) == ("1 case", [" 1 of 2"])
    assert {note.reason: note.total for note in found.notes} == {"prediction empty": 1, "truth empty": 3}
    assert found.rows[1][3] == [found.rows[1][3][0], None]


def test_tables_of_cases_follow_the_classes_of_the_run(tmp_path: Path, finished: Path) -> None:
    run = read.read(finished)
    rows = [
        _row(0.5, site="beta", case="1", **{"class": name}) for name in ("left kidney", "spleen", "liver")
    ]
    rows.append(_row(0.5, site="alpha", case="2", **{"class": "spleen"}))
    assert [key for *key, _ in results.case_rows(run, rows)] == [
        ["alpha", "2", "spleen"], ["beta", "1", "liver"], ["beta", "1", "spleen"], ["beta", "1", "left kidney"],
    ]  # fmt: skip
    stored = [read.Overlay(Path(), "a", "c", 0.5, "best", "", {"zeta": 0.1, "adrenal": 0.1, "liver": 0.1})]
    colours, titles = results.overlay_colours(run, stored)
    assert list(colours) == list(titles) == ["liver", "spleen", "left kidney", "adrenal", "zeta"]
    assert len({*colours.values()}) == 5


def test_lengths_alone_are_in_pixels(tmp_path: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    info = json.loads((run / "run.json").read_text())
    for site in info["sites"].values():
        site["inputs"], site["spacing"] = {"kinds": ["picture"]}, [[1, 1, 1]]
    (run / "run.json").write_text(json.dumps(info))
    units = [tables.described(metric, read.read(run)).unit for metric in ("hd95", "dice", "hd_rows", "other")]
    assert units == ["px", "", "", ""]
    assert tables.described("hd95", read.read(finished)).unit == "mm"


def test_the_conclusion_is_of_test_cases_and_counts_each_sites_cases(tmp_path: Path, finished: Path) -> None:
    """Cases of two sites may bear one name."""
    run = read.read(finished)
    rows = tuple(row | {"case": row["case"].rpartition("-")[2]} for row in run.rows or ())
    told = sentences(replace(run, rows=rows))
    assert told[0].startswith(
        "On 6 test cases of 2 sites, the global model (condistfl, round 3 of 3) reaches"
    )
    assert "(local models before the average)" in told[1]
    one = sentences(replace(run, rows=tuple(row for row in rows if row["site"] == "alpha")))
    assert one[0].startswith("On 3 test cases of 1 site, ")
    unplanned = replace(run, rows=rows, info={k: v for k, v in run.info.items() if k != "rounds"})
    assert "(condistfl, round 3)" in sentences(unplanned)[0]
    never = tuple(row for row in rows if row["known"] or row["model"].startswith("local/"))
    assert " and " not in sentences(replace(run, rows=never))[1].partition("reaches")[2]


def test_validation_cases_are_said_to_choose_the_round_where_one_was_chosen(finished: Path) -> None:
    run = read.read(finished)
    rows = tuple(row | {"split": "validation"} for row in run.rows or () if row["model"] == "best")
    assert sentences(replace(run, rows=rows))[-1].endswith("so the numbers are optimistic.")
    last = tuple(row | {"model": "last"} for row in rows)
    assert sentences(replace(run, rows=last))[-1] == "There are no test cases: these cases are of validation."


def test_charts_tell_their_values_and_fit_a_phone(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    charts = re.findall(r'<svg class="plot wide".*?<div class="slim"(.*?)</figure>', text, flags=re.S)
    assert len(charts) == text.count('class="plot wide"') > 4
    for slim in charts:
        boxes = [float(v) for v in re.findall(r'viewBox="\S+ \S+ ([\d.]+) ', slim)]
        assert boxes and slim.count("<use href=") >= len(boxes) - slim.count('viewBox="0 0 ')
        assert all(width < 0.6 * 72 * chart.WIDTH or "min-width" in slim for width in boxes)
    run = read.read(finished)
    logged = run.rounds[1].sites["alpha"]["marginal"]
    assert text.count(f'data-tip="alpha, marginal, round 2: {logged:.3f}"') == 2
    assert 'data-tip="alpha-001 at alpha: 0.' in text


def test_undefined_values_have_a_footnote_with_their_reason(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    assert re.search(r'<li id="test-hd95-known-a"><sup>a</sup> truth empty: \d+ values? not defined', text)
    assert "prediction empty" in text
    assert '<td class="num" data-v="">not defined<sup>' in text


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    names = ('<b>bold</b> "q" $x_1$ & --', "'); </script><script>alert(1)", "Leber größe 肝")
    run = write_run(tmp_path / "run", classes=names, sites=("a&b", "<i>c"), rounds=2, cases=2)
    text = page.write(run).read_text(encoding="utf-8")
    outline = Outline(text)
    assert outline.tags.count("script") == 1
    assert "<b>bold" not in text
    assert "<i>c" not in text
    words = " ".join(outline.text)
    assert names[0].replace("_", " ") in words
    assert names[1] in words
    assert names[2] in words


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rounds": 0, "planned": 3, "final": False},
            ["No round is complete", "No case is scored yet", "--resume"],
        ),
        ({"rounds": 1}, ["a single point"]),
        (
            {"rounds": 2, "planned": 5, "final": False},
            ["2 of 5 rounds", "no final evaluation yet", "rows.csv"],
        ),
        ({"overlays": False}, ["No overlays in this folder"]),
        ({"lost_always": "beta"}, ["beta trained in no round", "Lost sites (3)", "took part in no round"]),
        ({"never_scored": ["liver"]}, ["never scored", "No overlay: the class was never scored"]),
        ({"never_scored": ["liver", "spleen", "left kidney"]}, ["No case is scored yet"]),
        ({"nan_loss": True}, ["not finite, left out of the curves", "loss at alpha in round 1"]),
        ({"evaluated": False, "final": False}, ["No round was evaluated"]),
        ({"sites": ("only",)}, ["never annotated"]),
        ({"splits": ["validation"]}, ["Validation cases"]),
        ({"models": ["last"], "evaluated": False}, ["Dice of global (last), test cases"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_is_missing_is_said(tmp_path: Path, undrawn: None, change: dict, said: list[str]) -> None:
    run = write_run(tmp_path / "run", **{**SMALL, **change})
    text = page.write(run).read_text(encoding="utf-8")
    words = " ".join(Outline(text).text)
    for sentence in said:
        assert sentence in words


def test_figures_are_drawn_where_much_is_missing(tmp_path: Path) -> None:
    little = {"rounds": 1, "nan_loss": True, "never_scored": ["liver", "spleen"], "lost_always": "beta"}
    run = write_run(tmp_path / "run", **{**SMALL, **little})
    assert Outline(page.write(run).read_text(encoding="utf-8")).tags.count("svg") > 5


def test_a_folder_is_read_in_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", **SMALL | {"sites": ("köln", "zürich")}, overlays=False)
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    write_atomic(run / "run.json", to_json(sealed(info | {"channels": 1})))
    code = (
        "import sys; from pathlib import Path; from fedatlas.report.read import read; "
        "from fedatlas.transport.rounds import read_run; "
        "run = Path(sys.argv[1]); assert read(run).rows and len(read_run(run)['sites']) == 2"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, env=os.environ | plain)


def test_figures_that_a_folder_cannot_keep_leave_the_report(
    tmp_path: Path, finished: Path, undrawn: None, monkeypatch, capsys
) -> None:
    out = tmp_path / "report.html"

    def refused(run: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(run / "figure-2.html"))

    monkeypatch.setattr("fedatlas.papers.fedmenu.pages.run_figures", refused)
    assert main(["report", str(finished), "--out", str(out)]) == 0
    said = f"the run folder cannot keep them: {finished / 'figure-2.html'}: Read-only file system"
    assert said in capsys.readouterr().err and out.exists()


def test_a_run_folder_of_its_run_json_alone_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"labels": {"names": ["background", "liver"]}, "sites": {}}')
    text = page.write(tmp_path).read_text(encoding="utf-8")
    assert "run.json names no site" in text
    assert "federation.yaml is missing" in text


def _no_folder(run: Path) -> str:
    shutil.rmtree(run)
    return "no such folder"


def _no_run_json(run: Path) -> str:
    (run / "run.json").unlink()
    return "it holds no run.json"


def _cut_log(run: Path) -> str:
    (run / "rounds" / "0002" / "log.json").write_text('{"round": 2, "si')
    return "log.json: not valid JSON"


def _no_labels(run: Path) -> str:
    info = json.loads((run / "run.json").read_text())
    del info["labels"], info["sites"]
    (run / "run.json").write_text(json.dumps(info))
    return "labels.names and sites missing"


def _cut_overlay(run: Path) -> str:
    path = next((run / "sites").rglob("*.npz"))
    path.write_bytes(path.read_bytes()[:300])
    return path.name


def _cut_yaml(run: Path) -> str:
    (run / "federation.yaml").write_text("comm: {up: int8,\n")
    return "federation.yaml: not valid YAML"


def _no_column(run: Path) -> str:
    text = (run / "rows.csv").read_text()
    (run / "rows.csv").write_text(text.replace("metric", "measure", 1))
    return "no 'metric'"


def _bad_value(run: Path) -> str:
    with (run / "rows.csv").open("a") as file:
        file.write("test,original,best,3,alpha,x,liver,dice,many,1,\n")
    return "rows.csv: no whole table of results"


def _wrong(file: str, said: str, **values: Any) -> Callable[[Path], str]:
    """Puts values into a log.json, or into what run.json says of a site."""

    def spoil(run: Path) -> str:
        found = json.loads((run / file).read_text())
        (found["sites"]["alpha"] if file == "run.json" else found).update(values)
        (run / file).write_text(json.dumps(found))
        return f"{run / file}, {said}"

    return spoil


LOG = "rounds/0002/log.json"
WRONG = [
    _wrong(LOG, "sites: alpha is null; an object is expected", sites={"alpha": None}),
    _wrong(LOG, "cost: alpha is null; an object is expected", cost={"alpha": None}),
    _wrong(LOG, 'cost, alpha: seconds is "2"; a whole number or a number', cost={"alpha": {"seconds": "2"}}),
    _wrong(LOG, "phases: holds a list; an object is expected", phases=[1]),
    _wrong(LOG, "lost: alpha is null; a text is expected", lost={"alpha": None}),
    _wrong("run.json", "alpha: annotated is 3; a list or null is expected", annotated=3),
    _wrong("run.json", "alpha: spacing is [1, 2]; a list of steps in mm per grid", spacing=[1, 2]),
    _wrong("run.json", 'alpha: leaks is "x"; a whole number or null is expected', leaks="x"),
    _wrong("run.json", "alpha, cases: holds a list; an object is expected", cases=[1]),
]


@pytest.mark.parametrize(
    "spoil",
    [_no_folder, _no_run_json, _cut_log, _no_labels, _cut_overlay, _cut_yaml, _no_column, _bad_value, *WRONG],
)
def test_what_is_damaged_is_named(tmp_path: Path, finished: Path, spoil) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    expected = spoil(run)
    with pytest.raises(RunFolderError, match=re.escape(expected)) as raised:
        page.write(run, tmp_path / "out.html")
    assert str(run) in str(raised.value)
    assert not (tmp_path / "out.html").exists()


def test_an_overlay_is_a_whole_slice_in_millimetres(tmp_path: Path, finished: Path) -> None:
    mask = np.zeros((10, 40), bool)
    mask[2:4, 10:30] = True
    path = slices.contours(mask, (3.0, 0.5))
    points = np.array([[float(v) for v in point.split()] for point in re.split("[ML]", path.strip("Z"))[1:]])
    assert points.min(0) == pytest.approx([10 * 0.5, 2 * 3.0])
    assert points.max(0) == pytest.approx([30 * 0.5, 4 * 3.0])

    run = read.read(finished)
    entry = next(entry for entry in read.overlays(run, "test") if not entry.class_)
    planes = entry.planes()
    assert [shown.name for shown in planes] == ["axial", "coronal", "sagittal"]
    colours = dict.fromkeys(run.classes, "#123456")
    for shown in planes:
        assert set(shown.truth) == set(shown.prediction) == set(run.classes)
        text = figures.plane(shown, colours, dict.fromkeys(run.classes, "c <d>"), "a <b>")
        Outline(text)
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
        assert box is not None
        height, width = (n * mm for n, mm in zip(shown.image.shape, shown.spacing, strict=True))
        assert [float(v) for v in box.groups()] == pytest.approx([width, height])
        assert text.count('class="truth"') == 3 and text.count('fill-opacity=".42"') == 3
    large = read.Plane("axial", np.zeros((1000, 900), np.float32), (0.5, 0.5), {}, {})
    by, small = slices.smaller(large.image, slices.MOST)
    assert max(small.shape) <= slices.MOST and by == 4
    assert 'viewBox="0 0 450.00 500.00"' in figures.plane(large, {}, {}, "large")


def test_overlays_stand_whole_with_every_class(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    words = sections(text)["overlays"]
    for said in (
        "Worst case",
        "Median case",
        "Best case",
        "liver, worst case",
        "left kidney 0.",
        "never annotated at this site",
    ):
        assert said in words, said
    body = next(
        body for body in re.findall(r"<section .*?</section>", text, flags=re.S) if 'id="overlays"' in body
    )
    assert body.count('class="overlay"') == 3 * (3 + 3), (
        "three planes of three cases, and of every class's worst"
    )


def test_an_overlay_of_an_earlier_version_is_shown(tmp_path: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    folder = run / "sites" / "alpha" / "overlays" / "test" / "best"
    shutil.rmtree(run / "sites")
    folder.mkdir(parents=True)
    mask = np.zeros((4, 5), bool)
    mask[1, 1] = True
    kept = {"image": np.zeros((4, 5), np.float32), "truth": mask, "prediction": mask, "spacing": np.ones(2)}
    np.savez(folder / "liver--worst.npz", **kept, case="old", value=0.5, **{"class": "liver"})  # type: ignore[arg-type]
    words = sections(page.write(run).read_text(encoding="utf-8"))["overlays"]
    assert (
        "liver, worst case: old" in words and "axial" in words and "coronal" not in words.split("liver,")[1]
    )


def test_pictures_are_not_reported_as_scans(tmp_path: Path, finished: Path) -> None:
    """No plane of a body, no orientation; millimetres where somebody says how wide a pixel is."""

    def reported(spacing: list[float]) -> tuple[str, str]:
        run = shutil.copytree(finished, tmp_path / f"{spacing[0]}")
        info = json.loads((run / "run.json").read_text())
        for site in info["sites"].values():
            site["inputs"], site["spacing"] = {"kinds": ["picture"]}, [spacing]
        (run / "run.json").write_text(json.dumps(info))
        text = page.write(run).read_text(encoding="utf-8")
        return text, sections(text)["overlays"]

    text, overlays = reported([0.5, 0.5, 1.0])
    assert " mm</text>" in text and "HD95, mm" in text and "0.5 × 0.5 × 1" in text
    for words in (overlays, reported([1.0, 1.0, 1.0])[1]):
        assert "Whole pictures" in words and "three planes" not in words and "axial" not in words
    text, _ = reported([1, 1, 1])
    assert " mm</text>" not in text and "HD95, mm" not in text and "HD95, px" in text
    assert "1 × 1 × 1" not in text and "RAS" not in sections(text)["labels"]


def test_a_verdict_in_a_metric_that_was_not_measured_is_none(tmp_path: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "a run")
    every = read_rows(run / "rows.csv")
    (run / "rows.csv").write_text(rows_text(row for row in every if row["metric"] != "dice"))
    said = "There is no verdict, which is in Dice: `evaluation.metrics` has HD95, ASD, NSD alone."
    found = read.read(run)
    assert sentences(found)[0].endswith(said)
    told = lines(found, Path("report.html"))
    assert told[0].endswith(said) and "'" + str(run) + "'" in told[-1]


def test_worst_median_and_best_are_taken_over_sites() -> None:
    def stored(site: str, rank: str, dice: float) -> read.Overlay:
        return read.Overlay(Path(), site, f"{site}-{rank}", dice, rank, "", {})

    every = [stored("a", "worst", 0.4), stored("a", "median", 0.6), stored("a", "best", 0.9)]
    every += [stored("b", "worst", 0.1), stored("b", "median", 0.5), stored("b", "best", 0.7)]
    every += [stored("c", "worst", 0.2), stored("c", "median", 0.8), stored("c", "best", 0.95)]
    assert [(rank, o.case) for rank, o in read.pick(every)] == [
        ("worst", "b-worst"),
        ("median", "a-median"),
        ("best", "c-best"),
    ]
    assert [rank for rank, _ in read.pick([stored("a", "worst", 0.4)])] == ["only"]
    assert [rank for rank, _ in read.pick([stored("a", "worst", float("nan"))])] == ["not scored"]


def test_colours_are_legible_in_both_themes() -> None:
    for theme in (0, 1):
        paper = palette.rgb(palette.THEME["paper"][theme])
        for name in ("ink", "muted", "accent", "bad"):
            assert palette.contrast(palette.rgb(palette.THEME[name][theme]), paper) >= 4.5, name
        for colours in (*figures.CLASS_COLOURS, *palette.SITE_COLOURS):
            assert palette.contrast(palette.rgb(colours[theme]), paper) >= 3, colours
    rules = re.findall(r"background:(#\w{6});color:(#\w{6})", figures.heat_stylesheet())
    assert len(rules) == 42
    for ground, ink in rules:
        assert palette.contrast(palette.rgb(ground), palette.rgb(ink)) >= 4.5
    lights = [light for palette in (palette.THEME.values(), figures.CLASS_COLOURS, palette.SITE_COLOURS,
                                    palette.PHASE_COLOURS) for light, _ in palette]  # fmt: skip
    assert len(lights) == len(set(lights)), "a light colour stands for one CSS variable"


def test_no_colour_of_a_figure_is_left_fixed(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    plots = "".join(re.findall(r'<svg class="plot wide".*?</svg>', text, flags=re.S))
    assert "var(--c0)" in plots
    assert "var(--s0)" in plots
    assert set(re.findall(r"(?:fill|stroke): #\w+", plots)) == set()


def test_maps_follow_the_theme_and_tell_their_values() -> None:
    text = analyses.layer_matrix(["<a>", "b"], [[1.0, 0.5], [None, 1.0]], "layers")
    Outline(text)
    assert "color-mix(in srgb,var(--accent) 50%,var(--paper))" in text and "<image" not in text
    assert re.findall(r"(?:fill|stroke): #\w+", text) == []
    assert 'data-tip="&lt;a&gt;, b: 0.50"' in text and 'data-tip="b, &lt;a&gt;: –"' in text


# ------------------------------------------------------------------------------------------- in a real browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine; install it with: apt-get install chromium"
)


def _browser(profile: Path, html: Path, *arguments: str) -> str:
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [BROWSER, *flags, *arguments, html.as_uri()], capture_output=True, timeout=50, text=True, check=True
    )
    return done.stdout


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_the_page(finished: Path, tmp_path: Path, theme: str) -> None:
    dark = ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    shot = tmp_path / "shot.png"
    _browser(
        tmp_path / "profile",
        finished / "report.html",
        *dark,
        "--window-size=1300,4000",
        f"--screenshot={shot}",
    )
    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (4000, 1300)
    assert np.allclose(
        pixels[2, 2], np.array(palette.rgb(palette.THEME["paper"][theme == "dark"])) / 255, atol=0.02
    )
    filled = [part.std() > 0.01 for part in np.array_split(pixels, 20)]
    assert sum(filled) >= 18, "most of the page carries content"


@needs_browser
def test_tables_sort_on_a_click(finished: Path, tmp_path: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    click = (
        "<script>const t = [...document.querySelectorAll('table.sort')].find(t => t.caption.textContent"
        ".startsWith('Dice on test, classes annotated'));"
        "t.tHead.rows[0].cells[3].firstChild.click();"
        "document.title = [...t.tBodies[0].rows].map(r => r.cells[3].dataset.v).join(' ')</script></body>"
    )
    changed = tmp_path / "clicked.html"
    changed.write_text(text.replace("</body>", click), encoding="utf-8")
    found = re.search(r"<title>([^<]*)</title>", _browser(tmp_path / "profile", changed, "--dump-dom"))
    assert found is not None
    values = [float(value) for value in found[1].split()]
    assert len(values) == 3
    assert values == sorted(values, reverse=True)


@needs_browser
def test_the_csv_of_a_table_names_the_groups_of_its_columns(finished: Path, tmp_path: Path) -> None:
    table = (
        "<thead><tr><td colspan=2></td><th colspan=2>a, b</th></tr><tr><th>arm</th><th>seeds</th><th>liver</th><th>spleen</th>"
        "</tr></thead><tbody><tr><th>x</th><td>1</td><td data-v=0.5>0.50</td><td>0.4</td></tr></tbody>"
    )
    told = (
        f"<script>const made_ = document.createElement('table'); made_.innerHTML = '{table}';"
        "document.title = csv(made_).replaceAll('\\n', '|')</script></body>"
    )
    changed, text = tmp_path / "table.html", (finished / "report.html").read_text(encoding="utf-8")
    changed.write_text(text.replace("</body>", told), encoding="utf-8")
    found = re.search(r"<title>([^<]*)</title>", _browser(tmp_path / "profile", changed, "--dump-dom"))
    assert found and found[1] == '"arm","seeds","a, b: liver","a, b: spleen"|"x","1","0.5","0.4"|'


def scored(values: dict[tuple[str, str], float], reason: str = "") -> list[dict]:
    """Rows of one class at two sites, of (site, model) -> Dice."""
    plain = {"split": "test", "grid": "original", "round": 3, "case": "a", "class": "liver", "metric": "dice"}
    return [
        {**plain, "site": site, "model": model, "value": value, "known": site == "alpha", "reason": reason}
        for (site, model), value in values.items()
    ]


def test_boxes_stand_apart_by_site(tmp_path: Path) -> None:
    run = read.read(write_run(tmp_path / "run", **SMALL))
    both = {(site, model): 0.5 for site in ("alpha", "beta") for model in ("best", "local/beta")}
    text = figures.site_boxes(run, scored(both), "test")
    assert ">liver<" in text and ">alpha<" in text and ">beta *<" in text and "spleen" not in text
    assert "local, beta" in text and "local, alpha" not in text
    assert "Every class at every site" in sections(page.render(run))["boxes"]


def test_a_case_without_the_class_is_in_no_box(tmp_path: Path) -> None:
    run = read.read(write_run(tmp_path / "run", **SMALL))
    there = scored({("alpha", "best"): 0.4, ("beta", "best"): 0.5})
    absent = scored({("alpha", "best"): 1.0, ("beta", "best"): 1.0}, "truth empty")
    for draw in (figures.site_boxes, figures.box_plots):
        assert draw(run, [*there, *absent], "test") == draw(run, there, "test")
    assert "never scored" in figures.box_plots(run, absent, "test")
    assert figures.site_boxes(run, absent, "test") == ""


def test_a_split_whose_cases_have_no_class_still_gives_a_page(tmp_path: Path, undrawn: None) -> None:
    """By a rule that scores cases without the class (evaluation.empty: siim, zero)."""
    folder = write_run(tmp_path / "run", **SMALL)
    rows = read_rows(folder / "rows.csv")
    for row in rows:
        if row["split"] == "test":
            row |= {"value": 1.0 if row["metric"] == "dice" else None, "reason": "truth empty"}
    (folder / "rows.csv").write_text(rows_text(rows))
    boxes = sections(page.render(read.read(folder)))["boxes"]
    assert "Every class at every site" not in boxes and "Dice on test cases" in boxes


def test_several_arms_are_drawn_beside_each_other() -> None:
    rng = np.random.default_rng(0)
    boxes = [
        figures.Box(arm, model, rng.random(5).tolist(), trained)
        for arm in ("fedavg", "kim <1>")
        for model, trained in (("global", True), ("local/a", False))
    ]
    text = figures.distributions(
        [figures.Panel("liver, a", boxes)], ["a", "b"], tables.described("dice"), "boxes"
    )
    assert "fedavg" in text and "kim &lt;1&gt;" in text and "local, a" in text
    assert text == figures.distributions(
        [figures.Panel("liver, a", boxes)], ["a", "b"], tables.described("dice"), "boxes"
    )
    Outline(text)
    far = figures.distributions(
        [figures.Panel("liver, a", boxes)], ["a", "b"], tables.described("hd95"), "boxes"
    )
    assert "HD95, mm" in far and far != text


def test_a_slice_shows_every_class_in_its_colour() -> None:
    image, masks = np.zeros((20, 30)), {"liver": np.zeros((20, 30), bool), "none": np.zeros((20, 30), bool)}
    masks["liver"][5:9, 5:9] = True
    text = figures.labelled(
        image, masks, {"liver": "var(--c0)", "none": "#fff"}, (2.0, 1.0), masks["liver"], "a <b>"
    )
    Outline(text)
    assert text.count("<path") == 1 and 'fill="var(--c0)"' in text and "a &lt;b&gt;" in text
