"""The files of experiments/fedpsl on fake folders in the exact layouts of the three data sets."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedatlas.compare import Comparison, collect, load_comparison, run_comparison
from fedatlas.data.datasets.chestxray14 import BATCHES, LISTS
from fedatlas.data.datasets.shared.listing import Listing
from fedatlas.evaluation.statistics import read_rows, select
from fedatlas.federation.check import check_federation_file
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import Federation, load_federation
from fedatlas.federation.yaml import read_yaml
from fedatlas.report.comparison import markdown

FOLDER = Path(__file__).parents[2] / "experiments" / "fedpsl"
FEDERATIONS = sorted(FOLDER.glob("setup-*.yaml"))
COMPARISONS = sorted({*FOLDER.glob("*.yaml")} - {*FEDERATIONS})
ARMS = [(file, arm) for file in COMPARISONS for arm in read_yaml(file)["arms"]]
FINDINGS = ("Infiltration", "Effusion", "Atelectasis", "Nodule", "Consolidation", "Pneumothorax")

# Where Tables I and III have a number of positives, and not 0.
TABLE_1 = {
    "client-1": {"Infiltration", "Effusion", "Atelectasis"},
    "client-2": {"Effusion", "Atelectasis", "Nodule"},
    "client-3": {"Atelectasis", "Nodule", "Consolidation"},
    "client-4": {"Nodule", "Consolidation", "Pneumothorax"},
}
BATCH_OF = {f"client-{k}": f"images_00{k + 1}/images/*.png" for k in (1, 2, 3, 4)}
TABLE_3 = TABLE_1 | {"client-5": {"Tuberculosis"}, "client-6": {"COVID-19"}}

# Means that the paper prints although its classes have another.
OTHER_MEANS = {
    ("table-2", "fedpsl-tadl"): 0.7605,
    ("table-4", "fedpsl-tdma"): 0.77725,
    ("table-4", "fedpsl-tadl"): 0.795875,
}


# ------------------------------------------------------------------------------------------------- fake folders


def texture(path: Path, size: int, rng: np.random.Generator) -> None:
    """An 8-bit grey PNG of random texture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (size, size), dtype=np.uint8)).save(path)


def write_chestxray14(root: Path, *, per_batch: int = 16, size: int = 40) -> Path:
    """Data_Entry_2017_v2020.csv, the official lists, and images_001/images to images_012/images.

    A batch that begins in the middle of a patient does so here, with one image; the patient's first image ends the
    batch before it. All other patients have two images. Every class is present in half of the patients.
    """
    rng = np.random.default_rng(14)
    rows: list[list[object]] = []
    lists: dict[str, list[str]] = {file: [] for file in LISTS}
    ends: dict[int, str] = {}
    for batch, first in enumerate(BATCHES, 1):
        names = []
        patient, follow_up = int(first[:8]), int(first[9:12])
        if follow_up:
            names.append(first)
            ends[batch - 1] = f"{patient:08d}_000.png"
        for number in range(per_batch):
            names.append(f"{patient + 1 + number // 2:08d}_{number % 2:03d}.png")
        for name in names:
            rows.append([name, batch])
    rows += [[name, batch] for batch, name in ends.items()]
    entries = []
    for name, batch in sorted(rows):
        texture(root / f"images_{batch:03d}" / "images" / str(name), size, rng)
        patient = int(str(name)[:8])
        present = [f for place, f in enumerate(FINDINGS) if (patient >> (place % 3)) % 2 == place // 3]
        present += ["Cardiomegaly"] if patient % 5 == 0 else []
        found = "|".join(sorted(present)) or "No Finding"
        entries.append([name, found, int(str(name)[9:12]), patient, 57, "M", "PA", size, size, 0.143, 0.143])
        lists["test_list.txt" if patient % 4 == 0 else "train_val_list.txt"].append(str(name))
    header = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position"
    header += ",OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]"
    with (root / "Data_Entry_2017_v2020.csv").open("w", newline="") as file:
        file.write(header + "\n")
        csv.writer(file).writerows(entries)
    for list_, names in lists.items():
        (root / list_).write_text("\n".join(names) + "\n")
    return root


def write_folders(
    root: Path, classes: Sequence[tuple[str, str, int]], *, size: int, inner: str | None = None
) -> Path:
    """A folder per class, with images `stem-1.png` … and a metadata table beside it. classes: (folder, stem, images);
    inner: the folder inside that holds the images, beside `masks`."""
    rng = np.random.default_rng(len(classes))
    for folder, stem, count in classes:
        for number in range(1, count + 1):
            texture(root / folder / (inner or ".") / f"{stem}-{number}.png", size, rng)
            if inner:
                texture(root / folder / "masks" / f"{stem}-{number}.png", size, rng)
        (root / f"{folder}.metadata.xlsx").write_bytes(b"PK")
    return root


def write_tuberculosis(root: Path) -> Path:
    """TB_Chest_Radiography_Database/Tuberculosis and Normal."""
    classes = [("Tuberculosis", "Tuberculosis", 16), ("Normal", "Normal", 24)]
    write_folders(root / "TB_Chest_Radiography_Database", classes, size=40)
    return root


def write_covid(root: Path) -> Path:
    """COVID-19_Radiography_Dataset/COVID/images and masks, and so on."""
    classes = [
        ("COVID", "COVID", 16),
        ("Normal", "Normal", 24),
        ("Lung_Opacity", "Lung_Opacity", 3),
        ("Viral Pneumonia", "Viral Pneumonia", 3),
    ]
    write_folders(root / "COVID-19_Radiography_Dataset", classes, size=40, inner="images")
    return root


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three data sets under the names that the federation files give them."""
    root = tmp_path_factory.mktemp("fedpsl")
    write_chestxray14(root / "chestxray14")
    write_tuberculosis(root / "tuberculosis")
    write_covid(root / "covid")
    return root


# --------------------------------------------------------------------------------------------------- federations


def small(federation: Federation, cache: Path, **changes: Any) -> Federation:
    """The federation with few and small images and one step a round; net, losses, method and phases are its own."""
    sites = []
    for site in federation.sites:
        first = site.reading.get("first")
        reading = site.reading if first is None else {**site.reading, "first": 16}
        cases = None if site.cases is None else 8
        sites.append(replace(site, reading=reading, cases=cases, balanced=site.balanced and 4))
    method, evaluation = dict(federation.method), federation.evaluation
    if "pretrain" in method:
        method["pretrain"] = {"epochs": None, "steps": 1, "batch": 4}
    return replace(
        federation,
        sites=tuple(sites),
        images=replace(federation.images, size=(32, 32)),
        method=method,
        local=replace(federation.local, batch=4, steps=1, epochs=None),
        evaluation=replace(evaluation, validation=0.4, metrics=("auroc",), draws=0, overlays=False),
        engine=replace(federation.engine, cache=str(cache)),
        **changes,
    )


def at(file: Path, folders: Path) -> Federation:
    """A federation file, beside which the data sets lie."""
    names = [site.name for site in load_federation(file).sites]
    places = {"client-5": "tuberculosis", "client-6": "covid"}
    return load_federation(
        file, [f"sites.{name}.path={folders / places.get(name, 'chestxray14')}" for name in names]
    )


@pytest.mark.parametrize("file", FEDERATIONS, ids=lambda file: file.stem)
def test_the_paths_are_those_of_the_page(file: Path) -> None:
    places = {site.name: Path(site.path or "") for site in load_federation(file).sites}
    assert {path.parent for path in places.values()} == {FOLDER}
    others = {"client-5": "tuberculosis", "client-6": "covid"}
    assert all(path.name == others.get(name, "chestxray14") for name, path in places.items())


@pytest.mark.parametrize(
    ("name", "table"), [("setup-1", TABLE_1), ("setup-2", TABLE_3)], ids=["setup-1", "setup-2"]
)
def test_the_label_matrix_is_the_papers_and_no_patient_is_shared(
    name: str, table: dict[str, set[str]], folders: Path, tmp_path: Path
) -> None:
    federation = at(FOLDER / f"{name}.yaml", folders)
    assert federation.labels.names == tuple(
        dict.fromkeys([*FINDINGS, *(c for s in table.values() for c in s)])
    )
    assert all(site.reading.get("first") == 1000 for site in federation.sites[:4])
    experiment = Experiment(small(federation, tmp_path), tmp_path)
    assert not [problem for problem in experiment.check() if problem.fatal]
    indexes = {index.name: index for index in experiment.indexes}
    assert {site: set(index.brings) for site, index in indexes.items() if index.brings} == table
    patients: dict[tuple[str, str], str] = {}
    for site, index in indexes.items():
        splits = [case.split for case in index.cases]
        counts = [splits.count(split) for split in ("train", "validation", "test")]
        if site == "test":
            assert counts[:2] == [0, 0]
        elif site in TABLE_1:
            # the first 16 of the batch, of which 0.4 of the patients validate
            assert counts[2] == 0 and sum(counts) == 16 and 5 <= counts[1] <= 8
            names = sorted(path.stem for path in (folders / "chestxray14").glob(BATCH_OF[site]))
            assert sorted(case.name for case in index.cases) == names[:16]
        else:
            assert counts[0] == counts[2] == 8 and counts[1] > 0
        for case in index.cases:
            assert patients.setdefault((index.source, case.patient), site) == site
    # the patient that begins in batch 5 and goes on in batch 6 is tested nowhere
    assert "11558" not in {case.patient for case in indexes["test"].cases}
    tests = Listing({}, indexes["test"].cases, None, findings=indexes["test"].findings).counts("test")
    assert {finding: tests[finding] for finding in FINDINGS} == dict.fromkeys(FINDINGS, (4, 4))


@pytest.mark.parametrize("file", FEDERATIONS, ids=lambda file: file.stem)
def test_check_shows_the_positives_of_every_client(file: Path, folders: Path, tmp_path: Path) -> None:
    """As the page says: with `evaluation.validation=0`, the numbers of Tables I and III."""
    federation = at(file, folders)
    changes = [f"sites.{site.name}.path={site.path}" for site in federation.sites]
    changes += [f"sites.{site.name}.reading.first=16" for site in federation.sites[:4]]
    changes += [f"sites.{site.name}.balanced=4" for site in federation.sites if site.balanced]
    changes += [f"sites.{site.name}.cases=8" for site in federation.sites if site.cases]
    changes += ["images.size=[64, 64]", "evaluation.validation=0"]
    found = check_federation_file(file, changes, tmp_path)
    assert not [problem for problem in found["problems"] if problem["fatal"]]
    assert {site: about["cases"]["train"] for site, about in found["sites"].items() if site in TABLE_1} == {
        site: 16 for site in TABLE_1
    }


# --------------------------------------------------------------------------------------------------- comparisons


@pytest.mark.parametrize("file", COMPARISONS, ids=lambda file: file.stem)
def test_every_comparison_has_both_profiles(file: Path, tmp_path: Path) -> None:
    full, smoke = (load_comparison([file], profile=name, runs=tmp_path) for name in ("full", "smoke"))
    assert full.name == f"fedpsl-{file.stem}" and full.seeds == [0, 1, 2] and smoke.seeds == [0]
    assert full.arms == smoke.arms
    for arm in full.arms:
        of_full, of_smoke = full.federations[arm][0], smoke.federations[arm][0]
        phases = 2 if "pretrain" in of_full.method else 1
        assert of_full.local.epochs and of_full.rounds * of_full.local.epochs == 100 * phases
        assert of_smoke.rounds == 2 and of_smoke.local.epochs is None
        assert of_full.method.get("pretrain", {"epochs": 10})["epochs"] == 10
        persists = of_full.method["name"] in ("centralized", "fixmatch", "mixup_pme")
        assert of_full.local.opt_state == ("persist" if persists else "reset")
        annotated = [set(site.annotated or ()) for site in of_full.sites[:4]]
        assert annotated == ([{*FINDINGS}] * 4 if arm == "oracle" else list(TABLE_1.values()))


@pytest.mark.parametrize(
    ("file", "first", "last"),
    [("figure-3", [250] * 4, [4000] * 4), ("figure-4", [1000, 100, 100, 1000], [1000, 8000, 8000, 1000])],
)
def test_the_figures_change_the_size_of_clients(
    file: str, first: list[int], last: list[int], tmp_path: Path
) -> None:
    comparison = load_comparison([FOLDER / f"{file}.yaml"], profile="full", runs=tmp_path)
    sizes = {
        arm: [site.reading["first"] for site in of_arm[0].sites[:4]]
        for arm, of_arm in comparison.federations.items()
    }
    for method in ("fedavg", "fedpsl"):
        of_method = [size for arm, size in sizes.items() if arm.startswith(method)]
        assert of_method == sorted(of_method, key=lambda size: size[1])
        assert of_method[0] == first and of_method[-1] == last and [1000] * 4 in of_method


def test_printed_means_are_those_of_the_classes() -> None:
    seen = set()
    for file in COMPARISONS:
        for arm, values in read_yaml(file).get("printed", {}).items():
            classes = {name: value for name, value in values.items() if name != "mean"}
            if not classes:
                continue
            seen.add(file.stem)
            assert set(classes) == {*FINDINGS} | (
                {"Tuberculosis", "COVID-19"} if file.stem == "table-4" else set()
            )
            mean = sum(classes.values()) / len(classes)
            if (file.stem, arm) in OTHER_MEANS:
                assert mean == pytest.approx(OTHER_MEANS[file.stem, arm], abs=1e-9)
                assert abs(mean - values["mean"]) > 1e-3
            else:
                # both the classes and the mean are rounded to three digits
                assert mean == pytest.approx(values["mean"], abs=1e-3), (file.stem, arm)
    assert seen == {"table-2", "table-4"}


def test_table_5_repeats_table_2() -> None:
    printed = {number: read_yaml(FOLDER / f"table-{number}.yaml")["printed"] for number in (2, 5)}
    for arm in ("fedavg", "fedpsl"):
        assert printed[5][f"{arm}-e10"]["mean"] == printed[2][arm]["mean"]
    assert printed[5]["oracle"]["mean"] == printed[2]["oracle"]["mean"]


def run_arm(file: Path, arm: str, folders: Path, runs: Path, **changes: Any) -> None:
    """Trains one arm of a comparison, scaled down, and checks what comes out of the comparison."""
    whole = load_comparison([file], profile="smoke", data=folders, runs=runs)
    federations = {
        name: {0: small(of_arm[0], runs / ".cache", **changes)} for name, of_arm in whole.federations.items()
    }
    comparison: Comparison = replace(whole, federations=federations)
    failed = run_comparison(comparison, arms=[arm], tell=lambda text: None)
    assert failed == {}
    found = collect(comparison)
    names = comparison.first.labels.names or ()
    assert found["classes"] == list(names) and set(found["arms"][arm]["per_class"]) == {*names}
    for (value,) in found["arms"][arm]["per_class"].values():
        assert value is not None and 0 <= value <= 1
    assert found["arms"][arm]["seeds"] == [0]
    assert arm in markdown(found)
    rows = select(read_rows(comparison.path(arm, 0) / "rows.csv"), split="test", metric="auroc", model="best")
    places = [(row["site"], row["class"]) for row in rows]
    expected = [("test", finding) for finding in FINDINGS]
    expected += [(s, c) for s, c in (("client-5", "Tuberculosis"), ("client-6", "COVID-19")) if c in names]
    assert sorted(set(places)) == sorted(expected)


@pytest.mark.parametrize("table", ["table-2", "table-4"])
def test_fedpsl_runs_on_both_setups(table: str, folders: Path, tmp_path: Path) -> None:
    """With a small net; the slow tests have the real one."""
    run_arm(FOLDER / f"{table}.yaml", "fedpsl", folders, tmp_path, net={"name": "cnn", "filters": [8, 8]})


def _slow(file: Path, arm: str) -> bool:
    """All arms of Tables II and IV; of the others, whose arms differ in numbers that `small` overrides, two each."""
    arms = [name for other, name in ARMS if other == file]
    return file.stem in ("table-2", "table-4") or arm in (arms[0], arms[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "arm"),
    [pytest.param(file, arm, id=f"{file.stem}-{arm}") for file, arm in ARMS if _slow(file, arm)],
)
def test_every_arm_runs_for_two_rounds(file: Path, arm: str, folders: Path, tmp_path: Path) -> None:
    run_arm(file, arm, folders, tmp_path)
