"""The files of experiments/fedmenu on fake folders in the exact layouts of the six data sets."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_volumes import write_amos22, write_btcv, write_kits19, write_lits, write_msd

from fedatlas import nets
from fedatlas.compare import Comparison, collect, load_comparison, run_comparison
from fedatlas.data.datasets.shared.listing import Case
from fedatlas.data.index import _divided
from fedatlas.evaluation.statistics import read_rows, select, site_index
from fedatlas.federation.check import check_federation_file
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import Federation, hash_of, load_federation, make_method
from fedatlas.federation.yaml import read_yaml
from fedatlas.report.comparison import markdown

FOLDER = Path(__file__).parents[2] / "experiments" / "fedmenu"
FILE = FOLDER / "federation.yaml"
COMPARISONS = sorted(
    {*FOLDER.glob("*.yaml")} - {FILE},
    key=lambda file: (not file.stem.startswith("table"), file.stem),
)
ARMS = [(file, arm) for file in COMPARISONS for arm in read_yaml(file)["arms"]]

ORGANS = {"liver", "kidney", "pancreas", "spleen", "gallbladder"}
# Table I: site -> (what it annotates, its training, validation and test cases)
TABLE_1 = {
    "lits": ({"liver"}, (79, 13, 39)),
    "kits19": ({"kidney"}, (126, 21, 63)),
    "pancreas": ({"pancreas"}, (169, 28, 84)),
    "spleen": ({"spleen"}, (24, 5, 12)),
    "amos": (ORGANS, (120, 20, 60)),
    "btcv": (set[str](), (0, 0, 30)),
}
FREQUENCIES = {(25, 16), (50, 8), (100, 4), (200, 2), (400, 1)}
SINGLE = dict[str, dict[str, float]]


# ------------------------------------------------------------------------------------------------- fake folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets under the names that the federation file gives them: of each two cases to train on."""
    root = tmp_path_factory.mktemp("fedmenu")
    write_lits(root / "lits", cases=4)
    write_kits19(root / "kits19", cases=4)
    write_msd(root, "Task07_Pancreas", cases=4)
    write_msd(root, "Task09_Spleen", cases=4)
    write_amos22(root / "amos22", train=(4, 1), validation=(1, 0))
    write_btcv(root / "btcv", cases=2)
    return root


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A folder of runs, of gigabytes, that is removed after the test."""
    yield tmp_path / "runs"
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)


def small(federation: Federation, cache: Path) -> Federation:
    """The federation on coarse grids and with small patches; net, losses, methods and phases are its own."""
    sites = []
    for site in federation.sites:
        if site.split:
            site = replace(site, split=replace(site.split, validation=1, test=1))
        sites.append(site)
    preprocessing = federation.preprocessing
    assert preprocessing is not None
    return replace(
        federation,
        sites=tuple(sites),
        # of the lowest level of MENU-Net 2 × 2 × 1 voxels are left
        preprocessing=replace(preprocessing, spacing=(5.0, 5.0, 7.5), patch=(32, 32, 16)),
        local=replace(federation.local, batch=1),
        evaluation=replace(federation.evaluation, overlays=False, every=2),
        engine=replace(federation.engine, cache=str(cache)),
    )


def paths(folders: Path) -> list[str]:
    sites = load_federation(FILE).sites
    return [f"sites.{site.name}.path={folders / Path(site.path or '').name}" for site in sites]


# -------------------------------------------------------------------------------------------------- Table I


def test_the_paths_are_those_of_the_page() -> None:
    places = {site.name: Path(site.path or "") for site in load_federation(FILE).sites}
    assert {path.parent for path in places.values()} == {FOLDER}
    names = {"pancreas": "Task07_Pancreas", "spleen": "Task09_Spleen", "amos": "amos22"}
    assert all(path.name == names.get(name, name) for name, path in places.items())


def test_the_numbers_of_cases_are_those_of_table_1() -> None:
    """The splits of the file, of as many cases as the paper counts."""
    for site in load_federation(FILE).sites:
        expected = TABLE_1[site.name][1]
        if site.role == "test":
            assert site.name == "btcv" and site.split is None
            continue
        assert site.split is not None
        names = [f"case_{n}" for n in range(sum(expected))]
        cases = [Case(name, (), Path(name), "train", name, ("x",)) for name in names]
        found = [case.split for case in _divided(cases, site.split, site.name, 0)]
        assert tuple(found.count(split) for split in ("train", "validation", "test")) == expected


def test_the_label_matrix_is_that_of_table_1(folders: Path, tmp_path: Path) -> None:
    federation = small(load_federation(FILE, paths(folders)), tmp_path)
    experiment = Experiment(federation, tmp_path)
    assert not [problem for problem in experiment.check() if problem.fatal]
    names = experiment.space.names
    assert set(experiment.training) == TABLE_1.keys() - {"btcv"}
    for site, (classes, _) in TABLE_1.items():
        counts = {split: len(items) for split, items in experiment.sources[site].items.items()}
        trained = {"train": 2, "validation": 1, "test": 1}
        assert counts == (trained if classes else {"train": 0, "validation": 0, "test": 2})
        for item in (item for items in experiment.sources[site].items.values() for item in items):
            assert {names[c] for c in item.known} == classes
            assert {names[c] for c in item.scored} == (classes or ORGANS)
        for batch in experiment.training[site].batches((0,), batch=2, steps=2) if classes else ():
            annotated = torch.tensor([name in classes for name in names[1:]])
            assert batch.known[:, 1:].equal(annotated.expand(2, -1))
            assert {names[int(c)] for c in batch.target.unique()} <= classes | {"background"}
            assert batch.image.min() >= 0 and batch.image.shape[2:] == (32, 32, 16)


def test_check_reads_the_folders_as_a_user_has_them(folders: Path, tmp_path: Path) -> None:
    changes = [*paths(folders), "preprocessing.spacing=[5.0, 5.0, 7.5]", "preprocessing.patch=[32, 32, 16]"]
    changes += [f"sites.{site}.split={{validation: 1, test: 1}}" for site in TABLE_1 if site != "btcv"]
    changes += ["net.width=2"]
    found = check_federation_file(FILE, changes, tmp_path)
    assert not [problem for problem in found["problems"] if problem["fatal"]]
    told = {site: set(about["annotated"]) for site, about in found["sites"].items()}
    assert told == {site: classes for site, (classes, _) in TABLE_1.items()}
    notes = " ".join(str(problem) for problem in found["problems"])
    for counted in ("LiTS has 131", "KiTS19 has 210", "AMOS22 has 200", "BTCV has 30"):
        assert counted in notes


def test_the_settings_are_the_papers() -> None:
    federation = load_federation(FILE)
    local, grid, scored = federation.local, federation.preprocessing, federation.evaluation
    assert (federation.rounds, local.epochs, local.steps, local.batch) == (400, 1, None, 4)
    chosen = (local.optimizer, local.lr, local.momentum, local.nesterov, local.weight_decay, local.schedule)
    assert chosen == ("sgd", 0.01, 0.99, True, 3e-5, "poly") and local.opt_state == "persist"
    assert grid is not None and grid.orientation == "RAS"
    assert (grid.spacing, grid.window, grid.patch) == ((1.0, 1.0, 1.5), (-200, 400), (256, 256, 32))
    assert scored.metrics == ("dice", "asd") and scored.select_weights == "sites" and scored.empty == "nan"
    assert federation.augmentation.translation * 256 == pytest.approx(20, abs=0.05)
    assert torch.deg2rad(torch.tensor(federation.augmentation.rotation)).item() == pytest.approx(
        0.1, abs=1e-4
    )


# ---------------------------------------------------------------------------------------------- comparisons


def full(name: str, runs: Path, profile: str = "full") -> Comparison:
    return load_comparison([FOLDER / f"{name}.yaml"], profile=profile, runs=runs)


@pytest.mark.parametrize("file", COMPARISONS, ids=lambda file: file.stem)
def test_every_comparison_has_both_profiles(file: Path, tmp_path: Path) -> None:
    whole, smoke = full(file.stem, tmp_path), full(file.stem, tmp_path, "smoke")
    assert whole.name == f"fedmenu-{file.stem}" and whole.shared == smoke.shared == "fedmenu"
    assert whole.seeds == [0, 1, 2] and smoke.seeds == [0] and whole.arms == smoke.arms
    for arm in whole.arms:
        of_full, of_smoke = whole.federations[arm][0], smoke.federations[arm][0]
        assert of_full.local.epochs and of_full.rounds * of_full.local.epochs == 400
        assert of_smoke.rounds == 2 and of_smoke.local.steps in (1, 2, 5)
        loss = getattr(make_method(of_full), "loss", None)
        named = "marginal_dice_ce" if arm == "localized" else "marginal_dice_ce_exclusion"
        assert arm == "dodnet" or (loss is not None and loss.name == named)


def test_tables_of_the_same_runs_share_them(tmp_path: Path) -> None:
    """An arm is the same run in all tables: one folder, and one hash, in both profiles."""
    for profile in ("full", "smoke"):
        seen: dict[str, tuple[Path, str]] = {}
        for file in COMPARISONS:
            comparison = full(file.stem, tmp_path, profile)
            for arm, of_arm in comparison.federations.items():
                here = (comparison.path(arm, 0), hash_of(of_arm[0]))
                assert seen.setdefault(arm, here) == here, (file.stem, arm)
        hashes = [of for _, of in seen.values()]
        if profile == "full":
            assert len(set(hashes)) == len(hashes)


def test_the_ablation_adds_one_thing_at_a_time(tmp_path: Path) -> None:
    found = {arm: of[0] for arm, of in full("table-4", tmp_path).federations.items()}
    methods: dict[str, Any] = {arm: make_method(of) for arm, of in found.items()}
    agd = {arm: getattr(method, "agd", None) for arm, method in methods.items()}
    assert agd == {"unet": None, "menunet": "none", "ald": "local", "fedmenu": "shared"}
    assert found["unet"].method["name"] == "fedavg" and not found["menunet"].net["agd"]
    assert all(found[arm].net["width"] == 20 for arm in ("menunet", "ald", "fedmenu"))


@pytest.mark.parametrize("name", ["table-5", "figure-5"])
def test_the_grid_of_frequencies(name: str, tmp_path: Path) -> None:
    found: dict[str, set[tuple[int, float | None]]] = {}
    for of_arm in full(name, tmp_path).federations.values():
        kind = of_arm[0].method["name"]
        found.setdefault(kind, set()).add((of_arm[0].rounds, of_arm[0].local.epochs))
    expected = {"fedmenu": FREQUENCIES}
    if name == "figure-5":
        expected |= {"fedavg": FREQUENCIES, "centralized": {(400, 1)}}
    assert found == expected


def test_the_strategies_are_those_of_table_6(tmp_path: Path) -> None:
    found = {arm: of[0] for arm, of in full("table-6", tmp_path).federations.items()}
    methods: dict[str, Any] = {arm: make_method(of) for arm, of in found.items()}
    names = {arm: method.strategy.name for arm, method in methods.items() if arm != "dodnet"}
    assert names == {"fedmenu": "fedavg"} | {
        name: name for name in ("fedavgm", "fedprox", "feddyn", "fedsm", "fednorm")
    }
    assert found["dodnet"].method["name"] == "fed_dodnet"
    assert [arm for arm, of in found.items() if of.net.get("affine")] == ["fednorm"]


@pytest.mark.parametrize(
    ("arm", "parameters"), [("fedmenu", 77_594_534), ("unet", 96_603_462), ("localized", 96_603_462)]
)
def test_model_sizes(arm: str, parameters: int, tmp_path: Path) -> None:
    """Table II: 78 and 97 million. The official counts have 9,024 and 8,664 more, of heads that are never trained."""
    options = dict(full("benchmarks", tmp_path).federations[arm][0].net)
    with torch.device("meta"):
        chosen = nets.get(options.pop("name"))(**options)
        net = chosen.build(in_channels=1, classes=6, spatial_dims=3)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters


# ------------------------------------------------------------------------------------------ published numbers


def printed(name: str) -> list[tuple[str, SINGLE]]:
    """metric, arm or row -> column -> value, of the tables of a file."""
    raw = read_yaml(FOLDER / f"{name}.yaml")
    return [("dice", raw["printed"]), *((table["metric"], table["printed"]) for table in raw["tables"])]


def index_of(values: dict[str, float]) -> float | None:
    cells = {
        (site, organ): value
        for key, value in values.items()
        for site, slash, organ in [key.partition("/")]
        if slash
    }
    return site_index(dict(cells))


def test_printed_global_indices_are_those_of_the_cells() -> None:
    """Tables II and III: over clients, of the mean over a client's organs."""
    for name in ("table-2", "table-3"):
        for metric, rows in printed(name):
            own: dict[str, float] = {}
            for row, values in rows.items():
                arm, _, site = row.partition("/")
                own |= values if arm == "localized" and site else {}
                index = index_of(values)
                if "mean" in values and index is not None:
                    # every cell is rounded to two digits
                    assert index == pytest.approx(values["mean"], abs=0.0101), (name, metric, row)
            if name == "table-2":
                assert index_of(own) == pytest.approx(rows["localized"]["mean"], abs=0.0101), metric
    rows = dict(printed("table-2"))["dice"]
    assert index_of(rows["fedmenu"]) == pytest.approx(91.142, abs=1e-3)


def test_tables_repeat_each_other() -> None:
    """Tables II and III have what the first columns of the others repeat."""
    two, three = dict(printed("table-2")), dict(printed("table-3"))
    first = [two["dice"], two["asd"], three["dice"], three["asd"]]
    for name in ("table-4", "table-5", "table-6", "table-7"):
        tables = printed(name)
        assert [metric for metric, _ in tables] == ["dice", "asd", "dice", "asd"]
        for (_, rows), known in zip(tables, first, strict=True):
            assert rows.keys() == read_yaml(FOLDER / f"{name}.yaml")["arms"].keys()
            for arm in rows.keys() & {"fedmenu", "unet"}:
                assert rows[arm]["mean"] == known[arm]["mean"], (name, arm)
    figure, table = printed("figure-5"), printed("table-5")
    for (_, rows), (_, of_table) in zip(figure, (table[0], table[2]), strict=True):
        assert {arm: row for arm, row in rows.items() if arm in of_table} == of_table
        assert rows.keys() - of_table.keys() == {"unet", "centralized-unet"}


# ------------------------------------------------------------------------------------------------- two rounds


def run_arm(name: str, arm: str, folders: Path, runs: Path, net: dict[str, Any] | None = None) -> Comparison:
    """Trains one arm of a comparison, scaled down, and checks what comes out of it. net: options of the net that are
    others."""
    whole = load_comparison([FOLDER / f"{name}.yaml"], profile="smoke", data=folders, runs=runs)

    def changed(federation: Federation) -> Federation:
        federation = small(federation, runs / ".cache")
        return replace(federation, net={**federation.net, **(net or {})})

    federations = {name: {0: changed(of_arm[0])} for name, of_arm in whole.federations.items()}
    comparison = replace(whole, federations=federations)
    assert run_comparison(comparison, arms=[arm], tell=lambda text: None) == {}
    check_tables(comparison, arm)
    return comparison


def check_tables(comparison: Comparison, arm: str) -> None:
    """Of every table: the cells of its sites, and the global index of them."""
    for table in (comparison, *map(comparison.table, comparison.tables)):
        found = collect(table)
        own = arm in table.measure.local and table.measure.sites == ("btcv",)
        assert arm in markdown(found)
        cells = {key: value for key, (value,) in found["arms"][arm]["per_cell"].items()}
        sites = table.measure.sites or ()
        inside = {f"{s}/{name}" for s, (classes, _) in TABLE_1.items() for name in classes}
        outside = {f"btcv/{organ}" for organ in ORGANS}
        assert set(cells) == (set() if own else outside if sites == ("btcv",) else inside)
        if table.metric == "dice" and not own:
            assert all(value is not None and 0 <= value <= 1 for value in cells.values())
            (mean,) = found["arms"][arm]["mean"]
            split = {tuple(key.split("/")): value for key, value in cells.items()}
            assert mean == pytest.approx(site_index(split))  # type: ignore[arg-type]


def test_fedmenu_runs_and_other_tables_take_its_run(folders: Path, runs: Path) -> None:
    """With a narrow net; the slow tests have the real one, of 78 million weights."""
    comparison = run_arm("table-2", "fedmenu", folders, runs, net={"width": 2})
    rows = select(read_rows(comparison.path("fedmenu", 0) / "rows.csv"), split="test", metric="asd")
    assert {row["class"] for row in rows if row["site"] == "btcv"} == ORGANS
    assert {row["known"] for row in rows if row["site"] == "btcv"} == {False}
    assert all(row["known"] for row in rows if row["site"] != "btcv")
    for name in ("table-3", "table-7"):
        other = load_comparison([FOLDER / f"{name}.yaml"], profile="smoke", data=folders, runs=runs)
        federations = {arm: {0: comparison.federations["fedmenu"][0]} for arm in other.arms}
        check_tables(replace(other, federations=federations), "fedmenu")


def _once(file: Path, arm: str) -> bool:
    """The first table that has the arm."""
    return next(f for f, a in ARMS if a == arm) == file


def _as_another(arm: str) -> bool:
    """Arms with the net and the method of another: they differ in rounds, epochs or aliases."""
    return "x" in arm.rpartition("-")[2] or arm == "lesion-background"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arm"),
    [pytest.param(file.stem, arm, id=f"{file.stem}-{arm}") for file, arm in ARMS if _once(file, arm)],
)
def test_every_arm_runs_for_two_rounds(name: str, arm: str, folders: Path, runs: Path) -> None:
    """With its own net, losses and optimizer, and all models that the file scores; a narrow net where another arm has the
    same."""
    run_arm(name, arm, folders, runs, net={"width": 2} if _as_another(arm) else None)
