"""data/cache.py: whole or not at all, whoever writes at the same time, whatever happens."""

import errno
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from fedatlas.core.errors import DataError, DiskFull
from fedatlas.data import cache


def arrays() -> tuple[dict[str, np.ndarray], dict[str, int]]:
    rng = np.random.default_rng(0)
    return {
        "image": np.asfortranarray(rng.random((2, 5, 6, 7)).astype(np.float16)),
        "rows": rng.integers(0, 9, (4, 3)).astype(np.int32),
        "none": np.zeros((0, 4), np.int32),
    }, {"n": 7}


def test_what_is_kept_is_what_was_given(tmp_path: Path) -> None:
    calls = []

    def make():
        calls.append(1)
        return arrays()

    for _ in range(2):
        entry = cache.fetch(tmp_path / "x", make)
        for name, array in arrays()[0].items():
            found = entry.arrays[name].open()
            assert np.array_equal(found, array) and found.dtype == array.dtype
            assert np.array_equal(found, np.load(tmp_path / "x" / f"{name}.npy"))
        assert entry.arrays["image"].open().flags.f_contiguous and entry.meta == {"n": 7}
        with pytest.raises(ValueError):
            entry.arrays["image"].open()[0, 0, 0, 0] = 1
    assert len(calls) == 1


def test_the_key_follows_content_and_files(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    first = cache.key_of({"b": 1}, [file])
    assert cache.key_of({"b": 1}, [file]) == first
    assert cache.key_of({"b": 2}, [file]) != first
    os.utime(file, ns=(0, 12345))
    assert cache.key_of({"b": 1}, [file]) != first


@pytest.mark.parametrize("damage", ["truncate", "remove", "garble"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "x"
    cache.fetch(folder, arrays)
    if damage == "truncate":
        (folder / "image.npy").write_bytes((folder / "image.npy").read_bytes()[:-10])
    elif damage == "remove":
        (folder / "rows.npy").unlink()
    else:
        (folder / "entry.json").write_text("{")
    assert cache.load(folder) is None
    entry = cache.fetch(folder, arrays)
    assert np.array_equal(entry.arrays["image"].open(), arrays()[0]["image"])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.save

    def full(file, array, **more):
        if array.dtype == np.int32:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, array, **more)

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DiskFull, match="No space left on device") as error:
        cache.fetch(tmp_path / "site" / "x", arrays)
    assert str(tmp_path / "site") in str(error.value) and "engine.cache" in str(error.value)
    assert list((tmp_path / "site").iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        cache.fetch(tmp_path / "file" / "x", arrays)


def test_an_error_while_making_leaves_nothing(tmp_path: Path) -> None:
    def fail():
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        cache.fetch(tmp_path / "x", fail)
    assert not list(tmp_path.iterdir())


def _write_many(folder: str, barrier) -> None:
    barrier.wait()
    for number in range(20):
        entry = cache.fetch(Path(folder) / str(number), arrays)
        assert entry.arrays["image"].open().shape == (2, 5, 6, 7)


def test_several_processes_write_the_same_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    workers = [context.Process(target=_write_many, args=(str(tmp_path), barrier)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(str(n) for n in range(20))


def test_old_leftovers_are_swept_and_fresh_ones_are_not(tmp_path: Path) -> None:
    for name, age in ((".new-old", 30), (".new-fresh", 0), ("entry", 30)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age * 3600,) * 2)
    cache.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new-fresh", "entry"]
