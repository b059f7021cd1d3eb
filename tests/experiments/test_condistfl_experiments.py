"""The files of experiments/condistfl on fake folders in the exact layouts of the nine data sets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sets import write_jsrt, write_montgomery, write_shenzhen, write_siim
from fake_volumes import MSD_TASKS, write_amos22, write_kits19, write_msd

from fedatlas import nets
from fedatlas.compare import Comparison, collect, load_comparison, run_comparison
from fedatlas.compare.costs import formula_gigabytes
from fedatlas.core.tensors import n_bytes, tensors_of
from fedatlas.evaluation.statistics import read_rows, select
from fedatlas.federation.check import check_federation_file
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import Federation, hash_of, load_federation, make_method
from fedatlas.federation.yaml import read_yaml
from fedatlas.report.comparison import markdown

FOLDER = Path(__file__).parents[2] / "experiments" / "condistfl"
CT, XRAY = FOLDER / "ct-federation.yaml", FOLDER / "xray-federation.yaml"
FEDERATIONS = sorted(FOLDER.glob("*federation.yaml"))
COMPARISONS = sorted({*FOLDER.glob("*.yaml")} - {*FEDERATIONS})
ARMS = [(file, arm) for file in COMPARISONS for arm in read_yaml(file)["arms"]]

LUNGS = {"left lung", "right lung"}
ORGANS = {"kidney", "liver", "pancreas", "spleen"}
# Tables 2 and 3: site -> (what it annotates for training, its training, validation and test cases)
TABLE_2 = {
    "kits19": ({"kidney", "kidney tumour"}, (126, 42, 42)),
    "liver": ({"liver", "liver tumour"}, (79, 26, 26)),
    "pancreas": ({"pancreas", "pancreas tumour"}, (169, 56, 56)),
    "spleen": ({"spleen"}, (25, 8, 8)),
    "amos22": (set[str](), (0, 0, 300)),
}
TABLE_3 = {
    "montgomery": ({"left lung"}, (82, 27, 29)),
    "shenzhen": ({"right lung"}, (232, 77, 79)),
    "jsrt": ({"heart"}, (147, 49, 50)),
    "siim": ({"pneumothorax"}, (7226, 2410, 2411)),
}
# The stars of Table 5
STARRED = {"montgomery": {"right lung"}, "shenzhen": {"left lung"}, "jsrt": LUNGS, "siim": set[str]()}
STARS = {f"{site}/{name}" for site, names in STARRED.items() for name in names}
# Labelled cases of a data set, as published or, of Shenzhen, as the paper counts them
SIZES = {"kits19": 210, "liver": 131, "pancreas": 281, "spleen": 41}
SIZES |= {"montgomery": 138, "shenzhen": 388, "jsrt": 247, "siim": 12047}
MEGABYTE = 2**20
SIDE = 32
"""Rows and columns of the radiographs of JSRT and SIIM-ACR, here."""


# ------------------------------------------------------------------------------------------------- fake folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets under the names that the federation files give them: of each two cases to train on."""
    root = tmp_path_factory.mktemp("condistfl")
    write_kits19(root / "kits19", cases=4)
    for task in MSD_TASKS:
        write_msd(root, task, cases=4)
    write_amos22(root / "amos22", train=(1, 1), validation=(1, 0))
    write_montgomery(root / "montgomery", cases=4)
    write_shenzhen(root / "shenzhen", cases=5)
    write_jsrt(root / "jsrt", cases=4, side=SIDE)
    write_siim(root / "siim", cases=16, side=SIDE)
    return root


def small(federation: Federation, cache: Path, **evaluation: Any) -> Federation:
    """The federation on coarse grids and one small step a round, in float32; net, losses, methods and phases are
    its own."""
    sites = []
    for site in federation.sites:
        if site.name in ("jsrt", "siim"):
            site = replace(site, reading={"side": SIDE})
        if site.split:
            few = 3 if site.name == "siim" else 1  # so that some have a pneumothorax
            site = replace(site, split=replace(site.split, validation=few, test=few))
        sites.append(site)
    preprocessing = federation.preprocessing
    assert preprocessing is not None
    if preprocessing.size is None:
        # the least that leaves the lowest level of each net two voxels
        patch = (64, 32, 16) if federation.net["name"] == "unet" else (32, 16, 16)
        preprocessing = replace(preprocessing, spacing=(7.0, 7.0, 7.0), patch=patch)
    else:
        preprocessing = replace(preprocessing, size=(64, 64), patch=(64, 64))
    scored: dict[str, Any] = {"metrics": ("dice",), "overlays": False} | evaluation
    return replace(
        federation,
        sites=tuple(sites),
        preprocessing=preprocessing,
        local=replace(federation.local, batch=2, steps=1, epochs=None, precision="float32"),
        evaluation=replace(federation.evaluation, **scored),
        engine=replace(federation.engine, cache=str(cache)),
    )


def at(file: Path, folders: Path) -> Federation:
    """A federation file, beside which the data sets lie."""
    return load_federation(file, paths(file, folders))


def paths(file: Path, folders: Path) -> list[str]:
    sites = load_federation(file).sites
    return [f"sites.{site.name}.path={folders / Path(site.path or '').name}" for site in sites]


# --------------------------------------------------------------------------------------------------- federations


@pytest.mark.parametrize("file", FEDERATIONS, ids=lambda file: file.stem)
def test_the_paths_are_those_of_the_page(file: Path) -> None:
    places = {site.name: Path(site.path or "") for site in load_federation(file).sites}
    assert {path.parent for path in places.values()} == {FOLDER}
    tasks = {"liver": "Task03_Liver", "pancreas": "Task07_Pancreas", "spleen": "Task09_Spleen"}
    assert all(path.name == tasks.get(name, name) for name, path in places.items())


@pytest.mark.parametrize(("file", "table"), [(CT, TABLE_2), (XRAY, TABLE_3)], ids=["ct", "xray"])
def test_the_label_matrix_is_the_papers(
    file: Path, table: dict[str, tuple[set[str], tuple[int, int, int]]], folders: Path, tmp_path: Path
) -> None:
    experiment = Experiment(small(at(file, folders), tmp_path), tmp_path)
    assert not [problem for problem in experiment.check() if problem.fatal]
    assert {index.name: set(index.brings) for index in experiment.indexes} == {
        site: classes for site, (classes, _) in table.items()
    }
    assert set(experiment.training) == {site for site, (classes, _) in table.items() if classes}
    names = experiment.space.names
    for site, (classes, _) in table.items():
        starred = STARRED.get(site, ORGANS if site == "amos22" else set())
        for item in (item for items in experiment.sources[site].items.values() for item in items):
            assert {names[c] for c in item.known} == classes
            truth = classes | starred if item.split == "test" else classes
            assert {names[c] for c in item.scored} == truth, (site, item.split)
        for batch in experiment.training[site].batches((0,), batch=2, steps=2) if classes else ():
            annotated = torch.tensor([name in classes for name in names[1:]])
            assert batch.known[:, 1:].equal(annotated.expand(2, -1))
            seen = {names[int(c)] for c in batch.target.unique()} - {"background"}
            assert seen <= classes
            if site == "siim":
                assert batch.finding is not None and batch.finding_known is not None
                assert batch.finding_known.all()
            else:
                assert batch.finding_known is None or not batch.finding_known.any()


@pytest.mark.parametrize(("file", "table"), [(CT, TABLE_2), (XRAY, TABLE_3)], ids=["ct", "xray"])
def test_the_numbers_of_cases_are_the_papers(
    file: Path, table: dict[str, tuple[set[str], tuple[int, int, int]]]
) -> None:
    """Of the labelled cases of every data set. The paper counts an image less of JSRT; AMOS22 has no split."""
    for site in load_federation(file).sites:
        train, *rest = table[site.name][1]
        if site.name == "amos22":
            assert site.role == "test" and site.whole and site.split is None
            continue
        assert site.split is not None
        asked = [site.split.validation, site.split.test]
        assert asked == rest
        assert SIZES[site.name] - sum(rest) - train == (1 if site.name == "jsrt" else 0)


def test_check_reads_the_folders_as_a_user_has_them(folders: Path, tmp_path: Path) -> None:
    changes = [*paths(XRAY, folders), "sites.jsrt.reading.side=32", "sites.siim.reading.side=32"]
    changes += [
        f"sites.{site}.split.{part}={3 if site == 'siim' else 1}"
        for site in STARRED
        for part in ("validation", "test")
    ]
    changes += ["preprocessing.size=[64, 64]", "preprocessing.patch=[64, 64]"]
    found = check_federation_file(XRAY, changes, tmp_path)
    assert not [problem for problem in found["problems"] if problem["fatal"]]
    assert {site: set(about["annotated"]) for site, about in found["sites"].items()} == {
        site: classes for site, (classes, _) in TABLE_3.items()
    }
    told = found["sites"]["siim"]["findings"]["has pneumothorax"]
    assert told["labelled"] == 10 and told["present"] in (2, 3)  # 4 of 16 have one: 2.5 of 10, up or down


def test_the_settings_are_the_papers() -> None:
    ct, xray = load_federation(CT), load_federation(XRAY)
    assert (ct.rounds, ct.local.steps, ct.rounds * (ct.local.steps or 0)) == (120, 1000, 120_000)
    assert (xray.rounds, xray.local.steps, xray.rounds * (xray.local.steps or 0)) == (30, 500, 15_000)
    for federation, lr in ((ct, 1e-3), (xray, 1e-4)):
        local = federation.local
        assert (local.optimizer, local.lr, local.schedule, local.opt_state) == (
            "adamw",
            lr,
            "cosine",
            "persist",
        )
    grid = ct.preprocessing
    assert grid is not None and (grid.spacing, grid.window, grid.mean, grid.std, grid.patch) == (
        (1.5, 1.5, 1.5),
        (-54, 258),
        100,
        50,
        (128, 128, 128),
    )
    assert xray.preprocessing is not None and xray.preprocessing.size == (512, 512)


# --------------------------------------------------------------------------------------------------- comparisons


@pytest.mark.parametrize("file", COMPARISONS, ids=lambda file: file.stem)
def test_every_comparison_has_both_profiles(file: Path, tmp_path: Path) -> None:
    full, smoke = (load_comparison([file], profile=name, runs=tmp_path) for name in ("full", "smoke"))
    assert full.name == f"condistfl-{'ct' if file.stem == 'ct-arms' else file.stem}"
    assert full.seeds == [0, 1, 2] and smoke.seeds == [0] and full.arms == smoke.arms
    for arm in full.arms:
        of_full, of_smoke = full.federations[arm][0], smoke.federations[arm][0]
        steps = {"kim": 80_000}.get(arm, 15_000 if file.stem == "table-5" else 120_000)
        assert of_full.local.steps and of_full.rounds * of_full.local.steps == steps
        assert of_smoke.rounds == 2 and of_smoke.local.steps in (1, 2)
        method = make_method(of_full)
        if hasattr(method, "weights"):
            assert method.weights == "equal"


def test_tables_of_the_same_runs_share_them(tmp_path: Path) -> None:
    """Tables 4, 8 and 9 train ConDistFL once: one folder, and one hash."""
    found = {
        name: load_comparison([FOLDER / f"{name}.yaml"], profile="full", runs=tmp_path)
        for name in ("ct-arms", "table-4", "table-8", "table-9")
    }
    assert {one.path("condistfl", 0) for one in found.values()} == {
        tmp_path / "condistfl-ct-full" / "condistfl-s0"
    }
    assert len({hash_of(one.federations["condistfl"][0]) for one in found.values()}) == 1
    for name in ("table-4", "table-8"):
        assert {arm: hash_of(of[1]) for arm, of in found[name].federations.items()} == {
            arm: hash_of(of[1]) for arm, of in found["ct-arms"].federations.items()
        }


def test_table_9_switches_one_thing_at_a_time(tmp_path: Path) -> None:
    comparison = load_comparison([FOLDER / "table-9.yaml"], profile="full", runs=tmp_path)
    methods: dict[str, Any] = {arm: make_method(of[0]) for arm, of in comparison.federations.items()}
    switches = {arm: (method.group, method.filter is not False) for arm, method in methods.items()}
    assert switches == {
        "condistfl": (True, True),
        "neither": (False, False),
        "group": (True, False),
        "filter": (False, True),
    }
    assert all((m.tau, m.lambda_start, m.lambda_end) == (0.5, 0.01, 1.0) for m in methods.values())


def test_the_workshops_arms_add_up(tmp_path: Path) -> None:
    comparison = load_comparison([FOLDER / "workshop.yaml"], profile="full", runs=tmp_path)
    methods: dict[str, Any] = {arm: make_method(of[0]) for arm, of in comparison.federations.items()}

    def switches(arm: str) -> dict[str, Any]:
        method = methods[arm]
        ce = method.loss.options.get("ce_on_probs", False)
        return {"tau": method.tau, "cond": method.cond, "empty": method.empty_group, "ce": ce}

    paper, workshop = switches("paper"), switches("workshop")
    assert paper == {"tau": 0.5, "cond": "exact", "empty": "skip", "ce": False}
    assert workshop == {"tau": 2.0, "cond": "eps", "empty": "one", "ce": True}
    alone = [switches(arm) for arm in methods if arm not in ("paper", "workshop")]
    assert sorted(alone, key=str) == sorted(({**paper, key: workshop[key]} for key in paper), key=str)


# --------------------------------------------------------------------------------------------- published numbers


def printed_means() -> list[tuple[str, str, str, dict[str, float], float]]:
    """table, arm, column, the values behind it, the mean that is printed of them."""
    found = []
    for file in COMPARISONS:
        for arm, values in read_yaml(file).get("printed", {}).items():
            classes = {k: v for k, v in values.items() if k not in ("mean", "exclude*", "include*")}
            for column in values.keys() - classes.keys():
                behind = {k: v for k, v in classes.items() if column != "exclude*" or k not in STARS}
                found.append((file.stem, arm, column, behind, values[column]))
    return found


def test_printed_means_are_those_of_the_classes() -> None:
    found = printed_means()
    assert {table for table, *_ in found} == {"table-4", "table-5", "table-8", "table-9"}
    assert len(found) == 6 + 2 * 5 + 6 + 4
    for table, arm, column, behind, mean in found:
        columns = {"table-4": 7, "table-5": 4 if column == "exclude*" else 8}.get(table, 4)
        assert len(behind) == columns
        ours = sum(behind.values()) / len(behind)
        if (table, arm) == ("table-4", "standalone"):
            assert mean == 0.8167 and ours == pytest.approx(0.8152, abs=5e-5)
        else:
            # every number is rounded to four digits
            assert ours == pytest.approx(mean, abs=1.01e-4), (table, arm, column)


def test_tables_repeat_each_other() -> None:
    four, eight, nine = (read_yaml(FOLDER / f"table-{number}.yaml") for number in (4, 8, 9))
    assert nine["printed"]["condistfl"] == eight["printed"]["condistfl"]
    assert nine["tables"][0]["printed"]["condistfl"]["mean"] == four["printed"]["condistfl"]["mean"]


@pytest.mark.parametrize(
    ("rounds", "megabytes", "printed"),
    [(120, 40.6, 38.0), (1000, 60.4, 471.6), (30, 336.3, 78.8)],
    ids=["table-6", "table-6-kim", "table-7"],
)
def test_traffic_of_tables_6_and_7(rounds: int, megabytes: float, printed: float) -> None:
    """Up to the rounding of both numbers; Table 6 prints 38.0 for 38.06."""
    rounding = 2 * rounds * 4 * 0.05 / 1024 + 0.1
    assert formula_gigabytes(rounds, 4, megabytes) == pytest.approx(printed, abs=rounding)


@pytest.mark.parametrize(
    ("table", "arm", "parameters", "printed"),
    [
        ("table-4", "condistfl", 10_526_504, 40.6),
        ("table-4", "kim", 15_986_887, 60.4),
        ("table-5", "condistfl", 29_352_598, None),
    ],
)
def test_model_sizes(table: str, arm: str, parameters: int, printed: float | None, tmp_path: Path) -> None:
    """Tables 6 and 7 print 40.6, 60.4 and 336.3 MB; the last is not the size of the net that the text names."""
    comparison = load_comparison([FOLDER / f"{table}.yaml"], profile="full", runs=tmp_path)
    federation = comparison.federations[arm][0]
    names, options = federation.labels.names or (), dict(federation.net)
    assert federation.preprocessing is not None
    net = nets.build(
        options.pop("name"),
        options,
        in_channels=1,
        classes=len(names),
        spatial_dims=len(federation.preprocessing.patch),
        findings=len(federation.labels.findings),
        seed=0,
        initial=False,
    )
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    megabytes = n_bytes(tensors_of(net)) / MEGABYTE
    if printed is None:
        assert megabytes == pytest.approx(112.0, abs=0.05)
    else:
        assert megabytes == pytest.approx(printed, rel=0.015)


# ----------------------------------------------------------------------------------------------------- two rounds


def run_arm(
    file: Path, arm: str, folders: Path, runs: Path, net: dict[str, Any] | None = None, **evaluation: Any
) -> Comparison:
    """Trains one arm of a comparison, scaled down, and checks what comes out of it. net: options of the net that are
    others."""
    whole = load_comparison([file], profile="smoke", data=folders, runs=runs)

    def changed(federation: Federation) -> Federation:
        federation = small(federation, runs / ".cache", **evaluation)
        return replace(federation, net={**federation.net, **(net or {})})

    federations = {name: {0: changed(of_arm[0])} for name, of_arm in whole.federations.items()}
    comparison = replace(whole, federations=federations)
    assert run_comparison(comparison, arms=[arm], tell=lambda text: None) == {}
    check_tables(comparison, arm)
    return comparison


def check_tables(comparison: Comparison, arm: str) -> None:
    found = collect(comparison)
    assert found["arms"][arm]["seeds"] == [0] and arm in markdown(found)
    (mean,) = found["arms"][arm]["mean"]
    assert 0 <= mean <= 1
    cells = {key: value for key, (value,) in found["arms"][arm]["per_cell"].items()}
    sites = comparison.measure.sites
    if comparison.first.labels.findings:
        own = {f"{site}/{name}" for site, (classes, _) in TABLE_3.items() for name in classes}
        assert set(cells) == own | STARS
        assert {c["key"] for c in found["columns"] if c["starred"]} == STARS
    elif sites == ("amos22",):
        assert set(cells) == {f"amos22/{organ}" for organ in ORGANS}
    else:
        assert set(cells) >= {f"{s}/{name}" for s, (classes, _) in TABLE_2.items() for name in classes}
        assert sites is None or all(key.partition("/")[0] in sites for key in cells)
    assert all(value is not None and 0 <= value <= 1 for value in cells.values())


QUICK = {"models": ("best",), "every": 2, "local": "last"}
"""One validation and one final model, so that most of the time is training."""


def test_condistfl_runs_on_ct_and_table_8_takes_its_run(folders: Path, tmp_path: Path) -> None:
    """With the smallest MedNeXt; the slow tests have the real one."""
    file = FOLDER / "table-4.yaml"
    comparison = run_arm(file, "condistfl", folders, tmp_path, net={"size": "S"}, **QUICK)
    rows = select(read_rows(comparison.path("condistfl", 0) / "rows.csv"), split="test", metric="dice")
    amos = [row for row in rows if row["site"] == "amos22"]
    assert {row["class"] for row in amos} == ORGANS and not any(row["known"] for row in amos)
    assert len({row["case"] for row in amos}) == 2
    assert all(row["known"] for row in rows if row["site"] != "amos22")
    logs = [
        json.loads((comparison.path("condistfl", 0) / f"rounds/{r:04d}/log.json").read_text()) for r in (1, 2)
    ]
    assert all(set(log["sites"]) == TABLE_2.keys() - {"amos22"} for log in logs)
    other = load_comparison([FOLDER / "table-8.yaml"], profile="smoke", data=folders, runs=tmp_path)
    federations = {arm: {0: comparison.federations[arm][0]} for arm in other.arms}
    check_tables(replace(other, federations=federations), "condistfl")


def test_condistfl_runs_on_radiographs(folders: Path, tmp_path: Path) -> None:
    """With a narrow encoder; the slow tests have the real one, of 29 million weights."""
    narrow = {"depths": [1, 1, 1, 1], "dims": [16, 32, 64, 128], "width": 32}
    comparison = run_arm(FOLDER / "table-5.yaml", "condistfl", folders, tmp_path, net=narrow, **QUICK)
    rows = select(read_rows(comparison.path("condistfl", 0) / "rows.csv"), split="test")
    dice = select(rows, metric="dice")
    starred = {f"{row['site']}/{row['class']}" for row in dice if not row["known"]}
    assert starred == STARS
    # the rule of SIIM-ACR: a picture without a pneumothorax has a score, too, 1 or 0
    siim = [row for row in dice if row["site"] == "siim"]
    assert {row["class"] for row in siim} == {"pneumothorax"} and len(siim) == 3
    assert all(row["value"] is not None for row in siim)
    assert len({row["case"] for row in dice if row["site"] == "siim"}) == 3
    found = [row for row in rows if row["class"] == "has pneumothorax"]
    assert {row["site"] for row in found} == {"siim"}
    assert {row["metric"] for row in found} >= {"auroc"}


def _slow(file: Path, arm: str) -> bool:
    """All arms of Tables 4 and 5, and of the others those that they do not hold; of the workshop's system the two
    whose switches are all on or all off."""
    of_file = {
        "table-4": None,
        "table-5": None,
        "table-9": ("neither", "group", "filter"),
        "workshop": ("paper", "workshop"),
    }
    return file.stem in of_file and (of_file[file.stem] is None or arm in (of_file[file.stem] or ()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "arm"),
    [pytest.param(file, arm, id=f"{file.stem}-{arm}") for file, arm in ARMS if _slow(file, arm)],
)
def test_every_arm_runs_for_two_rounds(file: Path, arm: str, folders: Path, tmp_path: Path) -> None:
    """With all models that the file scores: the best, the last and every local one."""
    run_arm(file, arm, folders, tmp_path)
