"""Comparisons: what an arm is, what is run, what stands in the tables."""

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from findings import findings_federation, write_findings
from scipy import stats

from fedatlas import compare
from fedatlas.cli import main
from fedatlas.compare import Predictor, collect, load_comparison, rows_of, run_comparison, state_of
from fedatlas.errors import FederationError
from fedatlas.evaluation.classification import Predictions, score
from fedatlas.evaluation.statistics import differences, mean_ranks
from fedatlas.report.comparison import html, markdown

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
    plain = compare.run_federation

    def stops(federation: Any, path: Path, **options: Any) -> None:
        began.append(path.name)
        after = options["after_round"]

        def after_round(record: Any, best: Any) -> None:
            after(record, best)
            if path.name == "prox-s0" and record.number == 1:
                raise KeyboardInterrupt

        plain(federation, path, **options | {"after_round": after_round})

    monkeypatch.setattr(compare, "run_federation", stops)
    assert call(file, "--data", data, "--runs", tmp_path / "runs") == 130
    assert began == ["fedavg-s0", "prox-s0"]
    monkeypatch.setattr(compare, "run_federation", plain)
    capsys.readouterr()
    assert call(file, "--data", data, "--runs", tmp_path / "runs", "--only-table") == 0
    out = capsys.readouterr().out
    assert "| prox | 0 of 2 | not run | not run | not run | not run |" in out
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
    plain = compare.run_federation

    def breaks(federation: Any, path: Path, **options: Any) -> None:
        if path.name == "fedavg-s0":
            raise FloatingPointError("the loss is not finite")
        plain(federation, path, **options)

    monkeypatch.setattr(compare, "run_federation", breaks)
    runs = tmp_path / "runs"
    assert call(file, "--data", findings, "--runs", runs, profile="smoke") == 1
    captured = capsys.readouterr()
    assert "fedavg-s0: failed: FloatingPointError: the loss is not finite" in captured.out
    assert "failed: fedavg-s0" in captured.err
    assert "Traceback" in (runs / "tiny-smoke" / "fedavg-s0" / "error.txt").read_text()
    assert "| fedavg | 0 of 1 | not run" in captured.out and "| prox | 1 |" in captured.out
    monkeypatch.setattr(compare, "run_federation", plain)
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
    assert "| prox | 0 of 2 | not run" in out and "| fedavg | 2 |" in out
    assert (runs / "tiny-full" / "prox-s0" / "rows.csv").read_bytes() == before


def test_a_finished_run_outlives_a_new_option(done, tmp_path) -> None:
    file, data, runs = done
    path = tmp_path / "tiny-full" / "fedavg-s0"
    shutil.copytree(runs / "tiny-full" / "fedavg-s0", path)
    written = yaml.safe_load((path / "federation.yaml").read_text())
    assert written["local"].pop("clip") is None
    (path / "federation.yaml").write_text(yaml.safe_dump(written))
    info = json.loads((path / "run.json").read_text())
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
        "lr": {"local": {"lr": 0.5}, "sites.s1.annotated": ["ring"]},
        "oracle": {"sites": {"*": {"annotated": None}}, "net.name": "densenet121"},
    }
    profiles = {"full": {"local.batch": 2, "arms": {"mu": {"rounds": 9}}}, "smoke": {"rounds": 1}}
    found = loaded(tmp_path, small_images, arms=arms, profiles=profiles)
    assert found["same"].method == {"name": "fedprox", "mu": 0.5}
    assert found["other"].method == {"name": "fedavg"}
    assert found["mu"].method == {"name": "fedprox", "mu": 0.25} and found["mu"].rounds == 9
    assert found["lr"].local.lr == 0.5 and found["lr"].local.optimizer == "adam"
    assert [site.annotated for site in found["lr"].sites] == [("blob", "bar"), ("ring",), ("ring",)]
    assert [site.annotated for site in found["oracle"].sites] == [None] * 3
    assert found["oracle"].net == {"name": "densenet121"}
    assert {f.local.batch for f in found.values()} == {2}
    assert found["mu"].name == "tiny-full-mu-s0"
    assert loaded(tmp_path, small_images, "smoke", arms=arms, profiles=profiles)["mu"].rounds == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"arm": {}}, "did you mean 'arms'"),
        ({"arms": {"a": {"metod": {"name": "fedavg"}}}}, "arm a: the key 'metod' does not exist; did you mean 'method'"),
        ({"arms": {"a": {"sites.s9.role": "test"}}}, "'s9' does not exist"),
        ({"arms": {"a": {"rounds.more": 1}}}, "rounds is 2 and has no keys"),
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
        ({"base": "nowhere.yaml"}, "no such federation file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_before_anything_is_trained(small_images, tmp_path, changes, told) -> None:
    with pytest.raises(FederationError) as error:
        loaded(tmp_path, small_images, **changes)
    assert told in str(error.value)


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


def test_the_page_changes_between_the_marks_only(done, tmp_path, capsys) -> None:
    file, data, runs = done
    arguments = ("--data", data, "--runs", runs, "--only-table", "--table")
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text("# Mine\n\n<!-- tiny -->earlier<!-- /tiny -->\n\nbelow\n")
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
    assert "holds only what the profile full finished, and this is smoke" in capsys.readouterr().err
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
        "classes": ["a"],
        "budget": {arm: {"rounds": 2, "steps": 3, "epochs": None} for arm in arms},
        "arms": {
            arm: {
                "seeds": list(range(len(values))), "per_class": {"a": values}, "mean": values, "hours": 0.5,
                "commits": ["0123456789abcdef+"], "problems": [], "undefined": 0,
            }
            for arm, values in arms.items()
        },
        "differences": {}, "bootstrap": {}, "printed": {"one": {"a": 0.7}},
        "ranks": asdict(mean_ranks({})), "tables": [],
    }  # fmt: skip


def test_the_best_of_the_finished_is_bold() -> None:
    text = markdown(results(one=[0.5, 0.5], two=[0.6, 0.6], three=[0.9]))
    assert "| two | 2 | **0.600 ± 0.000** | **0.600 ± 0.000** |" in text
    assert "| one | 2 | 0.500 ± 0.000 |" in text and "| three | 1 of 2 | 0.900 | 0.900 |" in text
    text = markdown(results("hd95", one=[5.0, 5.0], two=[6.0, 6.0], three=[5.01, 5.01]))
    assert "**5.0 ± 0.0**" in text and "**6.0" not in text and text.count("**5.0 ± 0.0**") == 4
    assert "**" not in markdown(results(one=[0.5, 0.5], two=[0.6])).partition("\n\n")[2]


def test_printed_numbers_stand_beside_ours() -> None:
    text = markdown(results(one=[0.5, 0.6], two=[]))
    assert "| one | 0.700 (0.550) |" in text
    assert "| two | 0 of 2 | not run | not run |" in text
    assert "`fedatlas compare made.yaml`" in text and "1.00 hours" in text and "`012345678+`" in text
    assert "Seeds 0, 1; 2 rounds of 3 steps; profile full" in text


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
    page = html(found | {"ranks": asdict(mean_ranks(values))})
    assert page.count("<svg") == 1 and "&lt;two&gt; 1.00" in page and "<two>" not in page
    assert "<b>0.600 ± 0.000</b>" in page and "<code>fedatlas compare made.yaml</code>" in page
    assert "http" not in page and "**" not in page


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
    assert found["metric"] == "dice" and found["bootstrap"] == {} and "background" not in found["classes"]
    assert "classes that it does not, sites s0" in markdown(found)
    known, validation = found["tables"]
    assert set(known["arms"]["pooled"]["per_class"]) > {row["class"] for row in rows if row["known"]}, (
        "all sites"
    )
    text = markdown(found)
    assert text.count("| pooled | 1 |") == 3 and "**dice, validation cases, model best**" in text
    values = validation["arms"]["pooled"]["mean"]
    assert values != known["arms"]["pooled"]["mean"] and f"{values[0]:.3f}" in text


def test_the_how_to_shows_a_comparison_that_loads(small_images, tmp_path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "compare.md").read_text()
    shown = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    found = loaded(tmp_path, small_images, **shown)
    assert list(found) == ["fedavg", "fedprox", "iml", "oracle"]
    assert found["fedavg"].local.steps == 10 and found["oracle"].local.steps == 30
    for options in (compare.ComparisonFile, compare.Measure):
        for key in options.__pydantic_fields__:  # type: ignore[attr-defined]
            assert f"`{key}`" in page or f"measure.{key}" in page or key == "measure", key
