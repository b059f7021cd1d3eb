"""The files of experiments/ufps on fake folders in the exact layouts of the four data sets."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_volumes import write_abdomenct1k, write_amos22, write_btcv, write_word

from fedatlas import nets
from fedatlas.compare import Comparison, collect, load_comparison, run_comparison
from fedatlas.data.datasets.shared.listing import Case
from fedatlas.data.index import _divided
from fedatlas.evaluation.statistics import read_rows, select, site_index
from fedatlas.federation.check import check_federation_file
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import Federation, hash_of, load_federation, make_method
from fedatlas.federation.yaml import read_yaml
from fedatlas.learning.loop import in_steps, lr_factor
from fedatlas.report.comparison import markdown

FOLDER = Path(__file__).parents[2] / "experiments" / "ufps"
FILES = {
    n: FOLDER / name
    for n, name in enumerate(("federation.yaml", "setting-2-federation.yaml", "setting-3-federation.yaml"), 1)
}
COMPARISONS = sorted({*FOLDER.glob("*.yaml")} - {*FILES.values()}, key=lambda file: file.stem)
SHARED = ("common", "arms", "modules")

ORGANS = {"kidney", "liver", "spleen", "pancreas"}
# Table 1: site -> its training, validation and test cases
TABLE_1 = {"word": (84, 12, 24), "abdomenct1k": (186, 27, 53), "amos": (140, 20, 40)}
# Tables 1, S10, S11: setting -> site -> what it annotates
SETTINGS: dict[int, dict[str, set[str]]] = {
    1: {"word": {"kidney"}, "abdomenct1k": {"spleen", "pancreas"}, "amos": {"liver"}},
    2: {"word": {"spleen"}, "abdomenct1k": {"liver"}, "amos": {"kidney", "pancreas"}},
    3: {"word": {"liver", "pancreas"}, "abdomenct1k": {"kidney"}, "amos": {"spleen"}},
}
MODULES = ("rce", "ws", "ua", "gmt", "sam")


# ------------------------------------------------------------------------------------------------- fake folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets under the names that the federation file gives them: of each two cases to train on."""
    root = tmp_path_factory.mktemp("ufps")
    write_word(root / "word", cases=(3, 1, 1))
    write_abdomenct1k(root / "abdomenct1k", cases=4)
    write_amos22(root / "amos22", train=(4, 1), validation=(1, 0))
    write_btcv(root / "btcv", cases=1)
    return root


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A folder of runs, of gigabytes, that is removed after the test."""
    yield tmp_path / "runs"
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)


def small(federation: Federation, cache: Path, patch: tuple[int, int, int] = (32, 32, 32)) -> Federation:
    """The federation with small patches, two rounds and phases that all begin in these; net, losses and methods are
    its own. patch: by default so large that of the lowest level of the U-Net 1 × 1 × 2 voxels are left, of which a batch
    norm can do with one patch."""
    sites = tuple(
        replace(site, split=replace(site.split, validation=1, test=1)) if site.split else site
        for site in federation.sites
    )
    preprocessing = federation.preprocessing
    assert preprocessing is not None
    method = dict(federation.method)
    if method["name"] == "ufps" and method.get("ws") != {} and "ws" not in off(method):
        method["ws"] = {**(method.get("ws") or {}), "start": 1, "end": 3}
    return replace(
        federation,
        method=method,
        sites=sites,
        rounds=2,
        preprocessing=replace(preprocessing, patch=patch),
        local=replace(federation.local, batch=1, steps=1, epochs=None, precision="float32"),
        evaluation=replace(federation.evaluation, overlays=False, every=2),
        engine=replace(federation.engine, cache=str(cache)),
    )


def off(method: Mapping[str, Any]) -> set[str]:
    """The modules of UFPS that an arm switches off."""
    return {module for module in MODULES if module in method and method[module] is None}


def paths(folders: Path, file: Path = FILES[1]) -> list[str]:
    sites = load_federation(file).sites
    return [f"sites.{site.name}.path={folders / Path(site.path or '').name}" for site in sites]


# --------------------------------------------------------------------------------------------------- federations


@pytest.mark.parametrize("setting", SETTINGS)
def test_splits_and_labels_are_those_of_the_paper(setting: int) -> None:
    federation = load_federation(FILES[setting])
    assert {site.name for site in federation.sites} == {*TABLE_1, "btcv"}
    for site in federation.sites:
        assert Path(site.path or "").parent == FOLDER
        if site.name == "btcv":
            assert site.role == "test" and site.split is None
            continue
        assert site.split is not None and site.score_all
        assert set(site.annotated or ()) == SETTINGS[setting][site.name]
        expected = TABLE_1[site.name]
        names = [f"case_{n}" for n in range(sum(expected))]
        cases = [Case(name, (), Path(name), "train", name, ("x",)) for name in names]
        found = [case.split for case in _divided(cases, site.split, site.name, 0)]
        assert tuple(found.count(split) for split in ("train", "validation", "test")) == expected
    first = load_federation(FILES[1])
    assert replace(federation, sites=first.sites, name=first.name) == first


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_label_matrix(setting: int, folders: Path, tmp_path: Path) -> None:
    federation = small(load_federation(FILES[setting], paths(folders, FILES[setting])), tmp_path)
    experiment = Experiment(federation, tmp_path)
    assert not [problem for problem in experiment.check() if problem.fatal]
    names = experiment.space.names
    for site, classes in (*SETTINGS[setting].items(), ("btcv", set[str]())):
        items = experiment.sources[site].items
        counts = {split: len(found) for split, found in items.items()}
        assert counts == {"train": 2, "validation": 1, "test": 1} if classes else counts["test"] == 1
        for item in (item for found in items.values() for item in found):
            assert {names[c] for c in item.known} == classes
        assert {names[c] for item in items["test"] for c in item.scored} == ORGANS
        for batch in experiment.training[site].batches((0,), batch=2, steps=1) if classes else ():
            annotated = torch.tensor([name in classes for name in names[1:]])
            assert batch.known[:, 1:].equal(annotated.expand(2, -1))
            assert {names[int(c)] for c in batch.target.unique()} <= classes | {"background"}
            assert batch.image.abs().max() <= 1.3 and batch.image.shape[2:] == (32, 32, 32)


def test_check_reads_the_folders_as_a_user_has_them(folders: Path, tmp_path: Path) -> None:
    changes = [*paths(folders), "preprocessing.patch=[32, 32, 32]", "net.width=2"]
    changes += [f"sites.{site}.split={{validation: 1, test: 1}}" for site in TABLE_1]
    found = check_federation_file(FILES[1], changes, tmp_path)
    assert not [problem for problem in found["problems"] if problem["fatal"]]
    told = {site: set(about["annotated"]) for site, about in found["sites"].items()}
    assert told == {**SETTINGS[1], "btcv": set()}
    notes = " ".join(str(problem) for problem in found["problems"])
    for counted in ("WORD has 100", "AbdomenCT-1K has 1000", "AMOS22 has 200", "BTCV has 30"):
        assert counted in notes


def test_the_settings_are_the_papers() -> None:
    federation = load_federation(FILES[1])
    local, grid, scored = federation.local, federation.preprocessing, federation.evaluation
    assert (federation.rounds, local.epochs, local.steps, local.batch) == (500, 1, None, 2)
    assert (local.optimizer, local.lr, local.weight_decay, local.eps, local.clip) == (
        "adamw",
        1e-4,
        1e-6,
        1e-5,
        12,
    )
    steps = in_steps(local, 42)
    rates = [local.lr * lr_factor(steps, round_ * 42, 500 * 42) for round_ in (0, 10, 13, 16)]
    assert rates == pytest.approx([1e-6, 1e-4, 1e-4, 1e-4])
    assert local.lr * lr_factor(steps, 13 * 42 - 1, 500 * 42) == pytest.approx(1e-6, rel=0.02)
    assert grid is not None and grid.spacing == (None, None, None) and grid.patch == (192, 192, 80)
    assert (grid.window, grid.normalise, grid.mean, grid.std) == ((-500, 500), "meanstd", 0, 500)
    assert scored.inference.overlap == 0.5 and scored.inference.blend == "constant"
    assert federation.augmentation.turns == "slice" and federation.augmentation.offset > 0
    assert scored.every == 5
    assert scored.postprocess is not None and scored.postprocess.share == 0.2
    method: Any = make_method(federation)
    starts = {module: getattr(method, module).start * 500 for module in MODULES}
    assert starts == pytest.approx({"rce": 200, "ws": 10, "ua": 300, "gmt": 300, "sam": 300})
    assert method.ws.end * 500 == pytest.approx(200) and method.teachers.rounds is None
    assert (method.teachers.choose, method.teachers.every) == ("best", scored.every)
    assert (method.ua.parts, method.ua.tau_mean, method.ua.tau_variance) == (["decoder", "head"], 0.05, 0.001)
    assert (method.gmt.v, method.rce.coefficient, method.sam.every) == (0.8, 0.01, 5)
    sharp, sparse = method.sam.sharpness, method.sam.sparsity
    assert (sharp.rho, sharp.eta, sparse.top, sparse.extra, sparse.alpha) == (0.7, 1e-3, 0.4, 0.1, 0.9)


# ---------------------------------------------------------------------------------------------- comparisons


def full(name: str, runs: Path, profile: str = "full") -> Comparison:
    return load_comparison([FOLDER / f"{name}.yaml"], profile=profile, runs=runs)


@pytest.mark.parametrize("file", COMPARISONS, ids=lambda file: file.stem)
def test_every_comparison_has_both_profiles(file: Path, tmp_path: Path) -> None:
    whole, smoke = full(file.stem, tmp_path), full(file.stem, tmp_path, "smoke")
    assert whole.name == f"ufps-{file.stem}" and whole.arms[0] == "ufps"
    assert whole.shared == smoke.shared and (whole.shared or "").startswith("ufps")
    assert whole.seeds == [0, 1, 2] and smoke.seeds == [0] and whole.arms == smoke.arms
    for arm in whole.arms:
        of_full, of_smoke = whole.federations[arm][0], smoke.federations[arm][0]
        assert (of_full.rounds, of_full.local.epochs) == (500, 1)
        assert of_smoke.rounds == 6 and of_smoke.local.steps in (1, 3)
        loss = getattr(make_method(of_full), "loss", None)
        assert arm in ("dod", "menunet") or (loss is not None and loss.name == "dice_bce"), arm


def test_tables_of_the_same_runs_share_them(tmp_path: Path) -> None:
    """An arm is the same run in all tables: one folder, and one hash, in both profiles; no two arms are alike."""
    for profile in ("full", "smoke"):
        seen: dict[Path, str] = {}
        for file in COMPARISONS:
            comparison = full(file.stem, tmp_path, profile)
            for arm, of_arm in comparison.federations.items():
                place, found = comparison.path(arm, 0), hash_of(of_arm[0])
                assert seen.setdefault(place, found) == found, (file.stem, arm)
        assert len(set(seen.values())) == len(seen)


def test_the_modules_are_those_of_table_3(tmp_path: Path) -> None:
    found = full("table-3", tmp_path).federations
    on = {
        arm: set(MODULES) - off(of[0].method) for arm, of in found.items() if of[0].method["name"] == "ufps"
    }
    called = {"arce": "rce", "susam": "sam"}
    assert on.pop("ufps") == set(MODULES)
    for arm, modules in on.items():
        assert modules == {called.get(part, part) for part in arm.split("-")}, arm
    assert len(on) == 8


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("table-s4", "rce"),
        ("table-s5", "ws"),
        ("table-s6", "ua"),
        ("table-s7", "gmt"),
        ("table-s8", "sam"),
        ("table-s9", "sam"),
    ],
)
def test_ablations_are_of_one_module_alone(name: str, module: str, tmp_path: Path) -> None:
    found = full(name, tmp_path).federations
    kinds = {arm: of[0].method for arm, of in found.items() if arm not in ("ufps", "fedavg-star")}
    assert len(kinds) >= 3
    for arm, method in kinds.items():
        assert set(MODULES) - off(method) == {module}, arm


def test_the_nine_strategies(tmp_path: Path) -> None:
    found = full("table-s8", tmp_path).federations
    sams = {arm: make_method(of[0]).sam for arm, of in found.items() if arm != "ufps"}  # type: ignore[attr-defined]
    told = {arm: (s.ascent, s.descent, s.masks, s.start) for arm, s in sams.items()}
    assert told == {
        "cmidg-0": ("none", "cmidg", "sparse", 0),
        "cmidg-300": ("none", "cmidg", "sparse", 0.6),
        "asam": ("original", "original", "none", 0.6),
        "random": ("original", "original", "none", 0.6),
        "usam": ("cmidg", "original", "none", 0.6),
        "usam-mixed": ("cmidg", "original", "none", 0.6),
        "cmidg-both": ("cmidg", "cmidg", "none", 0.6),
        "usam-local": ("cmidg", "original", "local", 0.6),
        "susam": ("cmidg", "original", "sparse", 0.6),
    }
    assert [arm for arm, s in sams.items() if s.sharpness.direction == "random"] == ["random"]
    # Note S8: 0.8 of the gradient at the weights and 0.2 of the perturbed one, of which `share` is the part
    assert {arm: s.sharpness.share for arm, s in sams.items() if s.sharpness.share != 1} == {
        "usam-mixed": 0.2
    }
    assert sams["usam-local"].sparsity.top == 0.5


def test_an_organ_is_asked_of_the_site_that_annotates_it(tmp_path: Path) -> None:
    """Figure 2C and Table 2; Figure 2B and C take the nets' own background."""
    arms = full("arms", tmp_path).federations | full("figure-2", tmp_path).federations
    for arm in ("dod", "fedcrld", "fedbn"):
        assert make_method(arms[arm][0]).speaks == "owners", arm  # type: ignore[attr-defined]
    assert make_method(arms["solo"][0]).chosen_by_site  # type: ignore[attr-defined]
    zero = {arm for arm, of in arms.items() if of[0].evaluation.inference.background == "zero"}
    assert zero == {"opt2", "fedasam"}


def test_the_centralized_arm_has_all_labels(tmp_path: Path) -> None:
    found = full("arms", tmp_path).federations
    for arm, of in found.items():
        given = {site.name: set(site.annotated or ()) for site in of[0].sites if site.role == "train"}
        assert given == ({site: ORGANS for site in TABLE_1} if arm == "centralized" else SETTINGS[1])


def test_model_size(tmp_path: Path) -> None:
    options = dict(full("common", tmp_path).federations["ufps"][0].net)
    with torch.device("meta"):
        net = nets.get(options.pop("name"))(**options).build(in_channels=1, classes=5, spatial_dims=3)
    assert sum(parameter.numel() for parameter in net.parameters()) == 30_787_584


# ------------------------------------------------------------------------------------------ published numbers


def printed(name: str) -> list[tuple[str, Mapping[str, Mapping[str, float]]]]:
    """metric, arm -> column -> value, of the tables of a file that have published numbers."""
    raw = read_yaml(FOLDER / f"{name}.yaml")
    return [(table["metric"], table["printed"]) for table in raw.get("tables", ()) if table.get("printed")]


@pytest.mark.parametrize("file", COMPARISONS, ids=lambda file: file.stem)
def test_printed_means_are_those_of_the_cells(file: Path) -> None:
    """Over clients, of the mean over organs; the paper's own mean of DOD* is another."""
    for metric, rows in printed(file.stem):
        for arm, values in rows.items():
            cells = {tuple(key.split("/")): value for key, value in values.items() if "/" in key}
            assert len(cells) in (0, 16) and "mean" in values
            if cells and arm != "dod":
                assert site_index(cells) == pytest.approx(values["mean"], abs=0.0151), (metric, arm)  # type: ignore[arg-type]


def test_tables_repeat_each_other() -> None:
    """What an arm has in one table it has in the others, up to rounding."""
    seen: dict[tuple[str, str], float] = {}
    for file in COMPARISONS:
        if file.stem in ("table-s3", "table-s10", "table-s11"):
            continue
        tables = printed(file.stem)
        for metric, rows in tables[:2] if file.stem == "table-2" else tables:
            for arm, values in rows.items():
                if arm != "dod":
                    assert seen.setdefault((metric, arm), values["mean"]) == pytest.approx(
                        values["mean"], abs=0.1
                    )
    assert len(seen) > 60


# ------------------------------------------------------------------------------------------------- two rounds


def run_arm(
    name: str, arm: str, folders: Path, runs: Path, net: dict[str, Any] | None = None, **scale: Any
) -> Comparison:
    """Trains one arm of a comparison, scaled down, and checks what comes out of it. net: options of the net that are
    others; scale: see `small`."""
    whole = load_comparison([FOLDER / f"{name}.yaml"], profile="smoke", data=folders, runs=runs)

    def changed(federation: Federation) -> Federation:
        federation = small(federation, runs / ".cache", **scale)
        return replace(federation, net={**federation.net, **(net or {})})

    federations = {name: {0: changed(of_arm[0])} for name, of_arm in whole.federations.items()}
    comparison = replace(whole, federations=federations)
    assert run_comparison(comparison, arms=[arm], tell=lambda text: None) == {}
    check_tables(comparison, arm)
    return comparison


def check_tables(comparison: Comparison, arm: str) -> None:
    """Of every table: the cells of its sites."""
    for table in (comparison, *map(comparison.table, comparison.tables)):
        found = collect(table)
        assert arm in markdown(found)
        cells = {key: value for key, (value,) in found["arms"][arm]["per_cell"].items()}
        sites = table.measure.sites or (*TABLE_1, "btcv")
        own = {f"{site}/{organ}" for site in sites for organ in SETTINGS[1].get(site, ())}
        every = {f"{site}/{organ}" for site in sites for organ in ORGANS}
        known = table.measure.known
        assert set(cells) == (every if known is None else own if known else every - own)
        if table.metric == "dice":
            assert all(value is not None and 0 <= value <= 1 for value in cells.values())


def test_ufps_runs(folders: Path, runs: Path) -> None:
    """With a narrow net; the slow tests have the real one, of 31 million weights."""
    narrow = {"width": 2, "levels": 4}
    comparison = run_arm("table-3", "ufps", folders, runs, net=narrow, patch=(32, 32, 24))
    rows = select(
        read_rows(comparison.path("ufps", 0) / "rows.csv"), split="test", metric="rve", model="best"
    )
    assert {row["class"] for row in rows if row["site"] == "btcv"} == ORGANS
    assert {row["known"] for row in rows if row["site"] == "btcv"} == {False}
    rounds = comparison.path("ufps", 0) / "rounds"
    logs = [json.loads((rounds / f"{n:04d}" / "log.json").read_text()) for n in (1, 2)]
    for site in TABLE_1:
        first, second = (log["sites"][site] for log in logs)
        assert "reverse" in first and "reverse" in second
        assert "ascent" not in first and "ascent" in second


ARMS = [(file, arm) for file in COMPARISONS for arm in read_yaml(file)["arms"] if file.stem not in SHARED]


def _once(file: Path, arm: str) -> bool:
    """The first table that has the arm, of the runs that it shares."""
    runs = read_yaml(file)["runs"]
    return next(f for f, a in ARMS if a == arm and read_yaml(f)["runs"] == runs) == file


def _width(file: Path, arm: str) -> dict[str, Any] | None:
    """A narrow net for variants of what another arm runs with the real one."""
    real = (
        "ufps",
        "fedavg-star",
        "centralized",
        "fedasam-star",
        "cps-star",
        "ms-kd-star",
        "cond-dec",
        "multi-decoder",
    )
    chosen = read_yaml(file)["arms"][arm].get("net", {})
    return None if arm in real or chosen.get("name") == "dodnet" else {"width": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "arm"),
    [pytest.param(file, arm, id=f"{file.stem}-{arm}") for file, arm in ARMS if _once(file, arm)],
)
def test_every_arm_runs_for_two_rounds(file: Path, arm: str, folders: Path, runs: Path) -> None:
    run_arm(file.stem, arm, folders, runs, net=_width(file, arm))


# ------------------------------------------------------------------------------------------------- other federations


@pytest.mark.parametrize(
    ("folder", "budget"), [("phantom-abdomen", (40, 20)), ("abdomen-mr", (40, 20)), ("head-neck", (60, 20))]
)
def test_smaller_federations_have_the_same_arms(folder: str, budget: tuple[int, int], tmp_path: Path) -> None:
    file = FOLDER.parent / folder / "ufps.yaml"
    whole = load_comparison([file], profile="full", runs=tmp_path)
    smoke = load_comparison([file], profile="smoke", runs=tmp_path)
    assert whole.arms == smoke.arms and len(whole.arms) == 20 and whole.seeds == [0, 1, 2]
    assert smoke.seeds == [0]
    for arm, of in whole.federations.items():
        federation = of[0]
        training = sum(site.role == "train" for site in federation.sites)
        steps = budget[1] * (training if arm.startswith("centralized") else 1)
        assert (federation.rounds, federation.local.steps) == (budget[0], steps), arm
        loss = getattr(make_method(federation), "loss", None)
        assert arm == "dod" or (loss is not None and loss.name == "dice_bce"), arm
    on = {arm: set(MODULES) - off(of[0].method) for arm, of in whole.federations.items()}
    names = {"ws": "ws", "arce": "rce", "ua": "ua", "gmt": "gmt", "susam": "sam"}
    assert {arm: on[arm] for arm in names} == {arm: {module} for arm, module in names.items()}
    assert len({hash_of(of[0]) for of in whole.federations.values()}) == 20
