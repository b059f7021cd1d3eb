"""data/site_data.py and data/voxels.py: batches, volumes, pooling; what must not influence them does not."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from fedatlas.core.batch import Batch
from fedatlas.core.errors import DataError
from fedatlas.core.labels import LabelSpace, known_row
from fedatlas.data import voxels
from fedatlas.data.cache import Stored
from fedatlas.data.checks import check_federation, check_site
from fedatlas.data.index import SiteConfig, label_space_of, read_site, split_validation
from fedatlas.data.samples import path as samples
from fedatlas.data.sampling import PER_SLICE, ClassVoxels, class_voxels, patch_start
from fedatlas.data.site_data import pool, prefetch
from fedatlas.data.transforms import Preprocessing, Sampling
from fedatlas.data.voxels import VoxelData
from fedatlas.learning.augment import OFF, Augmentation
from fedatlas.phantoms.organs import phantom_sites, write_phantom

NAMES = ("background", "liver", "spleen", "kidney", "tumour")
SPACE = LabelSpace(NAMES, ((3, 4),))
FLAT = Preprocessing(spacing=(4, 4, 4), window=(-100, 200), patch=(16, 16), context=1)
SOLID = Preprocessing(spacing=(4, 4, 4), window=(-100, 200), patch=(12, 10, 8))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_phantom(tmp_path_factory.mktemp("world"), sites=3, cases=4, test_cases=2, seed=2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def site(
    root: Path, cache: Path, preprocessing: Preprocessing = FLAT, space: LabelSpace = SPACE, **more: Any
) -> VoxelData:
    config = {"name": "s", "path": str(root), **more.pop("config", {})}
    more = {"augmentation": OFF, "validation": 0.25} | more
    return VoxelData(read_site(SiteConfig(**config), root), space, preprocessing, cache=cache, **more)


def mark(batches: Any) -> str:
    total = hashlib.sha256()
    for batch in batches:
        for tensor in (batch.image, batch.target, batch.known):
            total.update(tensor.contiguous().numpy().tobytes())
        total.update(json.dumps(batch.case).encode())
    return total.hexdigest()


@pytest.mark.parametrize("preprocessing", [FLAT, SOLID], ids=["2.5D", "3D"])
@pytest.mark.parametrize("exclusive", [True, False])
def test_batches_have_the_promised_form(world, cache, preprocessing, exclusive) -> None:
    space = SPACE if exclusive else LabelSpace(NAMES[1:], exclusive=False)
    data = site(world / "site-0", cache, preprocessing, space)
    batches = data.batches(("x", 1), batch=3, steps=4)
    found = list(batches)
    assert len(batches) == len(found) == 4
    for batch in found:
        channels = 3 if len(preprocessing.patch) == 2 else 1
        assert batch.image.shape == (3, channels, *preprocessing.patch) and batch.image.dtype == torch.float32
        if exclusive:
            assert batch.target.shape == (3, *preprocessing.patch) and batch.target.dtype == torch.int64
            assert set(batch.target.unique().tolist()) <= {0, 1, 2}
        else:
            assert batch.target.shape == (3, 4, *preprocessing.patch) and not batch.target[:, 2:].any()
        known = known_row(space, {space.index("liver"), space.index("spleen")})
        assert batch.known.tolist() == [list(known)] * 3
        assert all(title in {"p000", "p001", "p002", "p003"} for title in batch.case)


def test_counts(world, cache) -> None:
    data = site(world / "site-0", cache)
    assert data.n_train == 3 and data.n_labelled.tolist() == [3, 3, 3, 0, 0]
    assert data.n_labelled.dtype == torch.int64 and data.labels.annotated == {1, 2} and data.channels == 1
    lengths = [len(data.batches((0,), batch=2, epochs=e)) for e in (0.1, 1, 2, 2.1)]
    assert lengths == [1, 2, 3, 4]
    for wrong in ({}, {"steps": 1, "epochs": 1}):
        with pytest.raises(ValueError, match="exactly one"):
            data.batches((0,), batch=2, **wrong)


def test_the_parts_decide_and_nothing_else(world, cache, tmp_path) -> None:
    data = site(world / "site-0", cache, augmentation=None)
    batches = data.batches(("a", 1), batch=4, steps=3)
    first = mark(batches)
    assert mark(batches) == first, "read twice"
    assert (
        mark(site(world / "site-0", tmp_path, augmentation=None).batches(("a", 1), batch=4, steps=3)) == first
    )
    assert mark(data.batches(("a", 2), batch=4, steps=3)) != first
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    assert mark(data.batches(("a", 1), batch=4, steps=3)) == first
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator is left alone"


def test_another_process_sees_the_same_batches(world, cache) -> None:
    code = f"""
import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r}); torch.set_num_threads(1)
from pathlib import Path
from test_site_data import mark, site
print(mark(site(Path({str(world / "site-0")!r}), Path({str(cache)!r}), augmentation=None).batches(("p", 3), batch=4, steps=2)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = mark(site(world / "site-0", cache, augmentation=None).batches(("p", 3), batch=4, steps=2))
    assert done.stdout.strip() == here


@pytest.mark.parametrize("preprocessing", [FLAT, SOLID], ids=["2.5D", "3D"])
def test_batches_keep_few_files_open_and_give_the_same(world, cache, preprocessing, monkeypatch) -> None:
    data = site(world / "site-0", cache, preprocessing)
    many = mark(data.batches(("f",), batch=4, steps=6))
    maps: list[Any] = []
    opened = Stored.open

    def open_and_note(stored: Stored) -> np.ndarray:
        array = opened(stored)
        maps.append(weakref.ref(array.base))
        return array

    monkeypatch.setattr(Stored, "open", open_and_note)
    monkeypatch.setattr(voxels, "MAPPED", 2)
    batches = data.batches(("f",), batch=4, steps=6)
    assert mark(batches) == many
    assert len(maps) > 6 and sum(each() is not None for each in maps) == 2


def test_patches_that_are_not_balanced_visit_every_case(world, cache) -> None:
    data = site(world / "site-0", cache, sampling=Sampling(balanced=0))
    titles = [title for batch in data.batches((1,), batch=2, steps=6) for title in batch.case]
    for start in range(0, 12, 3):
        assert len(set(titles[start : start + 3])) == 3


@pytest.mark.parametrize("preprocessing", [FLAT, SOLID], ids=["2.5D", "3D"])
def test_balanced_patches_hold_every_class_alike(world, cache, preprocessing) -> None:
    data = site(world / "site-0", cache, preprocessing, sampling=Sampling(balanced=1))
    batches = data.batches((5,), batch=8, steps=10)
    assert all(target.any() for batch in batches for target in batch.target)
    rng, held = np.random.default_rng(0), {1: 0, 2: 0}
    for count in range(400):
        number, centre = batches._choose(count, rng)
        assert centre is not None
        held[int(batches.entries[number].arrays["target"].open()[tuple(centre)])] += 1
    assert 150 < held[1] < 250, "a small organ as often as a large one"


def rewrite(file: Path, how: Any) -> None:
    image: Any = nib.load(file)  # type: ignore[attr-defined]
    nib.save(nib.Nifti1Image(how(np.asarray(image.dataobj)), image.affine), file)  # type: ignore[attr-defined]


@pytest.mark.parametrize("preprocessing", [FLAT, SOLID], ids=["2.5D", "3D"])
def test_what_is_not_annotated_changes_nothing(world, tmp_path, preprocessing) -> None:
    """The label files hold all four organs, liver alone counts: the batches must not know of the others."""
    config = {"labels": "labelsTr_all", "table": "all_labels.json", "annotated": ("liver",)}
    marks = []
    for number, how in enumerate(
        (lambda v: v, lambda v: np.where(v > 1, 0, v), lambda v: np.where(v == 0, 3, v))
    ):
        root = shutil.copytree(world / "site-0", tmp_path / str(number))
        for file in root.glob("labelsTr_all/*"):
            rewrite(file, how)
        data = site(root, tmp_path / f"cache{number}", preprocessing, augmentation=None, config=config)
        marks.append(mark(data.batches(("b",), batch=6, steps=4)))
    assert len(set(marks)) == 1


def test_the_reference_is_never_trained_on(world, tmp_path) -> None:
    marks, truths = [], []
    for number, how in enumerate((lambda v: v, lambda v: v * 0 + 3)):
        root = shutil.copytree(world / "site-0", tmp_path / str(number))
        for file in root.glob("labelsTr_all/*"):
            rewrite(file, how)
        config = {"reference": {"table": "all_labels.json"}}
        data = site(root, tmp_path / f"cache{number}", config=config)
        marks.append(mark(data.batches(("b",), batch=6, steps=4)))
        truths.append(next(iter(data.volumes("validation"))).truth("federation"))
    assert marks[0] == marks[1] and not np.array_equal(*truths)


def test_what_validation_cases_alone_annotate_is_not_taught(world, tmp_path) -> None:
    """No site is an expert, owner or teacher of a class for which it has no training case."""
    root = shutil.copytree(world / "site-0", tmp_path / "s")
    table = json.loads((root / "all_labels.json").read_text())
    config = {"table": "all_labels.json", "labels": "labelsTr_all", "test_labels": "labelsTs_all"}
    held = [item.case.name for item in site(root, tmp_path / "c", config=config).items["validation"]]
    assert held
    everywhere = {case: ["liver"] for case in ("p000", "p001", "p002", "p003")}
    table["annotated"] |= everywhere | {case: ["liver", "spleen"] for case in held}
    (root / "all_labels.json").write_text(json.dumps(table))
    data = site(root, tmp_path / "cache", config=config)
    assert data.labels.annotated == {SPACE.index("liver")} and data.n_labelled[SPACE.index("spleen")] == 0
    assert all(volume.known[SPACE.index("spleen")] for volume in data.volumes("validation"))


def test_label_sets_may_differ_per_case(world, tmp_path) -> None:
    root = shutil.copytree(world / "site-0", tmp_path / "s")
    table = json.loads((root / "all_labels.json").read_text())
    drawn = {"p000": ["liver"], "p001": ["kidney", "tumour"], "p002": [], "p003": ["spleen"]}
    table["annotated"] |= drawn
    (root / "all_labels.json").write_text(json.dumps(table))
    config = {"table": "all_labels.json", "labels": "labelsTr_all", "test_labels": "labelsTs_all"}
    data = site(root, tmp_path / "cache", config=config, validation=0.0, sampling=Sampling(balanced=0.8))
    assert data.n_labelled.tolist() == [4, 1, 1, 1, 1]
    for batch in data.batches((1,), batch=4, steps=10):
        for target, known, title in zip(batch.target, batch.known, batch.case, strict=True):
            want = known_row(SPACE, [SPACE.index(name) for name in drawn[title]])
            assert known.tolist() == list(want)
            assert known[target.unique()].all(), "a class that is not known is background"


def test_a_verified_absent_class_stays_known(world, tmp_path) -> None:
    root = shutil.copytree(world / "site-0", tmp_path / "s")
    for file in root.glob("labelsTr/*"):
        rewrite(file, lambda v: np.where(v == 2, 0, v))
    data = site(root, tmp_path / "cache", sampling=Sampling(balanced=1))
    assert data.n_labelled.tolist() == [3, 3, 3, 0, 0] and data.summary()["voxels"]["spleen"] == 0
    assert all(batch.known[:, 2].all() for batch in data.batches((1,), batch=2, steps=3))


@pytest.mark.parametrize("patch", [(40, 40), (40, 40, 30)])
def test_volumes_smaller_than_a_patch_are_padded_around(world, cache, patch) -> None:
    data = site(world / "site-0", cache, Preprocessing(spacing=(4, 4, 4), window=(-2000, 0), patch=patch))
    (batch,) = data.batches((1,), batch=2, steps=1)
    inside = batch.image > 0.4  # everything lies in the upper half of this window
    assert inside.any() and not batch.image[~inside].any() and not batch.image[:, :, 0].any()
    assert (batch.target == 0)[~inside[:, batch.image.shape[1] // 2]].all()


def test_volumes_for_evaluation(world, cache) -> None:
    data = site(world / "site-1", cache, config={"reference": {}})
    volumes = list(data.volumes("test"))
    assert [volume.case for volume in volumes] == ["p104", "p105"]
    volume = volumes[0]
    assert volume.image.shape == (1, 24, 24, 20) and volume.spacing == (4, 4, 4)
    assert np.allclose(volume.raw_spacing, (3.5, 3.5, 4))
    assert volume.known.tolist() == [True, False, True, True, False] and volume.scored.all()
    raw = np.asarray(nib.load(world / "site-1" / "labelsTs_all" / "p104.nii.gz").dataobj)  # type: ignore[attr-defined]
    assert np.array_equal(volume.truth("original"), raw), "common integers are the classes here"
    grid = volume.truth("federation")
    assert grid.shape == tuple(volume.image.shape[1:]) and set(np.unique(grid)) == {0, 1, 2, 3, 4}
    onehot = torch.nn.functional.one_hot(torch.from_numpy(grid).long(), 5).movedim(-1, 0).float()
    back = volume.restore(onehot)
    assert 2 * ((back == 1) & (raw == 1)).sum() / ((back == 1).sum() + (raw == 1).sum()) > 0.93
    with pytest.raises(ValueError):
        volume.truth("elsewhere")
    with pytest.raises(ValueError):
        list(data.volumes("tests"))


def test_without_a_reference_only_what_is_known_is_scored(world, cache, tmp_path) -> None:
    root = shutil.copytree(world / "site-0", tmp_path / "s")
    (root / "labelsTs" / "p004.nii.gz").unlink()
    (volume,) = site(root, cache).volumes("test")
    assert volume.case == "p005" and torch.equal(volume.scored, volume.known)
    raw = np.asarray(nib.load(root / "labelsTs" / "p005.nii.gz").dataobj)  # type: ignore[attr-defined]
    assert np.array_equal(volume.truth("original"), raw)


def test_the_label_fills_what_the_reference_leaves_out(world, tmp_path) -> None:
    root = shutil.copytree(world / "site-0", tmp_path / "s")
    table = json.loads((root / "all_labels.json").read_text())
    table["annotated"] = {case: ["kidney"] for case in table["annotated"]}
    (root / "all_labels.json").write_text(json.dumps(table))
    for space in (SPACE, LabelSpace(NAMES[1:], exclusive=False)):
        data = site(root, tmp_path / "cache", space=space, config={"reference": {}})
        for volume in data.volumes("test"):
            at = [space.index(name) for name in ("liver", "spleen", "kidney")]
            assert volume.scored[at].all() and not volume.scored[space.index("tumour")]
            for grid in ("original", "federation"):
                truth = volume.truth(grid)
                found = [bool((truth == c).any() if space.exclusive else truth[c].any()) for c in at]
                assert found == [True, True, True]


def test_the_cache_is_used_and_follows_its_inputs(world, tmp_path) -> None:
    root, cache = shutil.copytree(world / "site-0", tmp_path / "s"), tmp_path / "cache"

    def made(preprocessing: Preprocessing = FLAT) -> int:
        lines: list[str] = []
        site(root, cache, preprocessing).prepare(progress=lines.append)
        return len(lines)

    assert [made(), made()] == [6, 0]
    assert made(Preprocessing(spacing=(4, 4, 4), window=(-100, 200), patch=(8, 8), context=0)) == 0
    assert made(Preprocessing(spacing=(4, 4, 5), window=(-100, 200))) == 6
    time.sleep(0.02)
    rewrite(root / "labelsTr" / "p001.nii.gz", lambda v: v)
    assert made() == 1
    (root / "imagesTr" / "p000_0000.nii.gz").unlink()
    with pytest.raises(DataError, match=r"site s: labelsTr/p000.nii.gz: a label without an image"):
        made()


def test_pooled_is_the_union(world, cache) -> None:
    parts = [site(world / f"site-{n}", cache, config={"name": f"s{n}", "reference": {}}) for n in range(3)]
    pooled = pool(parts)
    assert pooled.name == "pooled" and pooled.n_train == 9
    assert pooled.n_labelled.tolist() == [9, 3, 6, 6, 3] and pooled.labels.annotated == {1, 2, 3, 4}
    seen: set[str] = set()
    for batch in pooled.batches((1,), batch=6, steps=8):
        for known, title in zip(batch.known, batch.case, strict=True):
            number = int(title[1])
            assert title.startswith(f"s{number}/p{number}")
            assert torch.equal(known, torch.tensor(known_row(SPACE, {1 + number, 2 + number})))
            seen.add(title[:2])
    assert seen == {"s0", "s1", "s2"}
    together = [volume.case for volume in pooled.volumes("validation")]
    assert together == [f"{part.name}/{v.case}" for part in parts for v in part.volumes("validation")]
    assert pooled.summary()["cases"] == {"train": 9, "validation": 3, "test": 6}


def test_summary(world, cache) -> None:
    found = site(world / "site-2", cache).summary()
    assert json.loads(json.dumps(found)) == found
    assert found["annotated"] == ["kidney", "tumour"] and found["cases"] == {
        "train": 3,
        "validation": 1,
        "test": 2,
    }
    assert found["labelled"] == {"liver": 0, "spleen": 0, "kidney": 3, "tumour": 3}
    assert found["orientation"] == ["LPI"] and found["spacing"] == [[5.0, 5.0, 4.5]]
    data = site(world / "site-2", cache)
    files = [world / "site-2" / "labelsTr" / f"{item.case.name}.nii.gz" for item in data.items["train"]]
    assert found["voxels"]["kidney"] == sum(int((np.asarray(nib.load(f).dataobj) == 1).sum()) for f in files)  # type: ignore[attr-defined]


def test_centres_cover_a_class_as_its_voxels_lie() -> None:
    target = np.zeros((20, 20, 4), np.uint8)
    target[:, :, 1], target[0, 0, 3] = 2, 2
    rows, spans = class_voxels(target, [1, 2], True)
    assert spans == {2: [0, PER_SLICE + 1]} and (target[tuple(rows[:, :3].T)] == 2).all()
    rng = np.random.default_rng(0)
    by_slice, by_voxel = ClassVoxels(rows, slices=True), ClassVoxels(rows, slices=False)
    slices = [int(by_slice.pick(rows, rng)[2]) for _ in range(400)]
    assert 150 < slices.count(3) < 250, "slices alike"
    voxels = [int(by_voxel.pick(rows, rng)[2]) for _ in range(2000)]
    assert voxels.count(3) < 25, "voxels alike: one in 401"
    assert len({tuple(row[:2]) for row in rows.tolist()}) == PER_SLICE + (
        0 if [0, 0] in rows[:, :2].tolist() else 1
    )


def test_a_patch_stays_inside_and_reaches_every_place() -> None:
    rng = np.random.default_rng(0)
    starts = {patch_start((10,), (4,), None, rng)[0] for _ in range(200)}
    assert starts == set(range(7))
    assert [patch_start((10,), (4,), np.array([c]), rng)[0] for c in (0, 5, 9)] == [0, 3, 6]
    assert patch_start((4,), (9,), None, rng) == [-2] and patch_start((9,), (9,), None, rng) == [0]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_the_thread_works_ahead_ends_and_tells_what_failed() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        if number == 5:
            raise DataError("five")
        return number

    assert list(prefetch(make, 5)) == [0, 1, 2, 3, 4] and not threads()
    reading = prefetch(make, 100)
    assert next(reading) == 0 and threads()
    time.sleep(0.2)
    assert len(made) - 5 <= 4, "not the whole list at once"
    reading.close()  # type: ignore[attr-defined]
    assert not threads()
    reading = prefetch(make, 100)
    with pytest.raises(DataError, match="five"):
        list(reading)
    assert not threads()


def test_reading_batches_may_be_given_up(world, cache) -> None:
    data = site(world / "site-0", cache)
    for batch in data.batches((1,), batch=2, steps=1000):
        assert isinstance(batch, Batch)
        break
    time.sleep(0.1)
    assert not threads()


def test_the_phantom_is_the_same_for_the_same_seed(tmp_path) -> None:
    began = time.perf_counter()
    folders = [write_phantom(tmp_path / str(n), sites=4, cases=2, seed=s) for n, s in enumerate((0, 0, 1))]
    assert time.perf_counter() - began < 5
    images = [np.asarray(nib.load(f / "site-3/imagesTr/p300_0000.nii.gz").dataobj) for f in folders]  # type: ignore[attr-defined]
    assert np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[2])
    indexes = [read_site(SiteConfig(**config), tmp_path) for config in phantom_sites(folders[0])]
    space = label_space_of([index.brings for index in indexes], [["kidney", "tumour"]])
    assert space.names == NAMES and not [problem for index in indexes for problem in check_site(index, space)]
    (lesions,) = check_federation(
        indexes, space
    )  # s1 outlines kidneys alone, of which s2 knows the tumours in them
    assert (
        lesions.site == "s1" and not lesions.fatal and "annotates 'kidney' and not 'tumour'" in lesions.what
    )
    with pytest.raises(ValueError, match="no organ 'heart'"):
        write_phantom(tmp_path / "x", classes=("heart",))


def test_the_bundled_data_are_sound_and_small(cache) -> None:
    files = [file for file in samples().rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) < 8_000_000
    assert {"LICENSE", "ATTRIBUTION.md"} <= {file.name for file in files}
    indexes = [
        read_site(SiteConfig(name=root.name, path=str(root), reference={}), samples())  # type: ignore[arg-type]
        for root in sorted(samples().glob("site-*"))
    ]
    space = label_space_of([index.brings for index in indexes])
    assert len(indexes) == 4 and len(space) == 8 and not check_federation(indexes, space)
    assert not check_site(indexes[0], space)
    assert all(case.reference for index in indexes for case in index.cases)
    for index in indexes:
        assert Counter(case.split for case in index.cases) == {"train": 6, "test": 2}
        assert len({case.patient for case in index.cases}) == 8
    chosen = {
        index.name: [case.name for case in split_validation(index, seed=0, fraction=0.25)["validation"]]
        for index in (replace(index, name=index.name[-1]) for index in indexes)
    }
    assert chosen == {
        "a": ["hn_103", "hn_195"],
        "b": ["hn_021", "hn_114"],
        "c": ["hn_052", "hn_070"],
        "d": ["hn_288", "hn_327"],
    }
    assert [sorted(index.used) for index in indexes] == [
        ["brainstem", "spinal_cord"],
        ["larynx", "mandible"],
        ["left_parotid", "right_parotid"],
        ["esophagus", "spinal_cord"],
    ]
    preprocessing = Preprocessing(spacing=(4, 4, 4), window=(-200, 400), patch=(64, 64))
    data = VoxelData(indexes[2], space, preprocessing, cache=cache)
    right, left = (
        int(
            np.argwhere(next(iter(data.volumes("validation"))).truth("federation") == space.index(name))[
                :, 0
            ].mean()
        )
        for name in ("right_parotid", "left_parotid")
    )
    assert left < right, "the first axis of RAS runs to the right"


def test_a_thread_that_makes_batches_ends_before_the_interpreter() -> None:
    """As after Ctrl-C, where the iteration is held by the frames of the error. What is registered first runs last."""
    program = (
        "import atexit, threading, time\n"
        "atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.startswith('prefetch')]))\n"
        "from fedatlas.data.site_data import prefetch\n"
        "kept = prefetch(lambda number: time.sleep(0.01) or number, 10**6)\n"
        "print(next(kept))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["0", "[]"]), done.stderr


def test_a_thread_that_has_just_begun_at_ctrl_c_ends_before_the_interpreter() -> None:
    """Ctrl-C between the beginning of the thread and its first answer; a thread at work in torch would abort the process."""
    program = (
        "import threading, torch\n"
        "from fedatlas.data.site_data import prefetch\n"
        "began = threading.Thread.start\n"
        "def start(thread):\n"
        "    began(thread)\n"
        "    raise KeyboardInterrupt\n"
        "threading.Thread.start = start\n"
        "try:\n"
        "    next(prefetch(lambda number: torch.ones(300, 300, 300).softmax(0), 10**6))\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_each_sequence_of_a_case_is_varied_by_itself_and_its_slices_alike(
    world: Path, tmp_path: Path
) -> None:
    """Two sequences that are the same: brightness is one factor for the three slices of each."""
    root = shutil.copytree(world / "site-0", tmp_path / "s")
    for file in sorted(root.glob("images*/*_0000.nii.gz")):
        shutil.copy(file, file.with_name(file.name.replace("_0000", "_0001")))
    table = json.loads((root / "dataset.json").read_text())
    table["channel_names"] = {"0": "first", "1": "second"}
    (root / "dataset.json").write_text(json.dumps(table))
    chances = {name: 0.0 for name in vars(OFF) if name.startswith("p_")}
    only = Augmentation(**chances | {"p_brightness": 1.0})
    plain, varied = (site(root, tmp_path / "cache", FLAT, augmentation=how) for how in (OFF, only))
    assert plain.channels == 2
    for a, b in zip(*(data.batches(("x",), batch=2, steps=2) for data in (plain, varied)), strict=True):
        factors = (b.image / a.image).unflatten(1, (2, 3))  # two sequences of three slices
        for sample in factors:
            one, other = (sequence[sequence.isfinite()] for sequence in sample)
            torch.testing.assert_close(one, one[:1].expand_as(one))
            torch.testing.assert_close(other, other[:1].expand_as(other))
            assert abs(float(one[0] - other[0])) > 1e-4
