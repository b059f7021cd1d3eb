"""store.py: atomic files, and memory that starts a round from where the round began."""

import pytest
import torch

from fedatlas.core.errors import RunFolderError
from fedatlas.transport.store import MemoryStore, write_atomic


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x"
    write_atomic(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedatlas.transport.store.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_call_done_again_starts_from_the_same_memory(tmp_path) -> None:
    store = MemoryStore(tmp_path)
    assert store.before(1, 0) == {}
    store.save(1, 0, {"n": 1})
    store.save(1, 1, {"n": 2})
    store.save(2, 0, {"n": 3})
    assert store.before(2, 0) == {"n": 2}
    assert store.before(1, 1) == {"n": 1}
    assert store.before(3, 0) == {"n": 3}
    store.save(2, 0, {"n": 30})
    assert store.before(3, 0) == {"n": 30}


def test_saving_an_earlier_call_forgets_the_later_ones(tmp_path) -> None:
    store = MemoryStore(tmp_path)
    store.save(1, 0, {"n": 1})
    store.save(2, 0, {"n": 2})
    store.save(3, 0, {"n": 3})
    store.save(2, 0, {"n": 2})
    assert store.before(9, 0) == {"n": 2}


def test_memory_that_did_not_change_is_not_written(tmp_path) -> None:
    store = MemoryStore(tmp_path)
    store.save(1, 0, {"m": torch.ones(2)})
    store.save(1, 1, {"m": torch.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["000001-000.fa"]


def test_what_no_resume_needs_is_forgotten(tmp_path) -> None:
    store = MemoryStore(tmp_path)
    for number in range(1, 8):
        store.save(number, 0, {"n": number})
    assert sorted(path.name[:6] for path in tmp_path.iterdir()) == ["000005", "000006", "000007"]


def test_damage_is_named(tmp_path) -> None:
    store = MemoryStore(tmp_path)
    store.save(1, 0, {"n": 1})
    (tmp_path / "000001-000.fa").write_bytes(b"?")
    with pytest.raises(RunFolderError, match=r"000001-000\.fa.*cannot be read"):
        store.before(2, 0)


def test_what_came_of_a_call_that_did_not_count_is_forgotten(tmp_path) -> None:
    store = MemoryStore(tmp_path)
    store.save(1, 0, {"moment": 1})
    store.save(1, 1, {"moment": 2})  # its answer did not count: the next call starts from the one before
    store.save(1, 2, store.before(1, 2, "000001-000"), "000001-000")
    assert store.after(1, 2) == "000001-000" and store.versions() == ["000001-000"]
    store.save(1, 3, {"moment": 3}, "000001-000")
    assert store.versions() == ["000001-000", "000001-003"] and store.before(2, 0) == {"moment": 3}


def test_a_version_that_was_forgotten_is_put_back_as_it_was(tmp_path) -> None:
    store = MemoryStore(tmp_path)
    store.save(1, 0, {"n": 1})
    name = store.after(1, 0)
    data = store.kept(name)
    store.save(1, 0, {})
    assert store.versions() == [] and store.kept("") == b""
    store.put_back(name, data)
    assert store.before(1, 1, name) == {"n": 1} and store.versions() == [name]


def test_what_lasts_is_not_taken_back(tmp_path) -> None:
    store = MemoryStore(tmp_path)
    store.save_lasting({})
    assert store.lasting() == {} and list(tmp_path.iterdir()) == [], "nothing is written for nothing"
    store.save_lasting({"spent": 3})
    store.save(2, 0, {"n": 2})
    store.save(1, 0, {"n": 1})
    assert store.lasting() == {"spent": 3} and store.versions() == ["000001-000"]
    (tmp_path / "lasting.fa").write_bytes(b"?")
    with pytest.raises(RunFolderError, match=r"lasting\.fa.*cannot be read"):
        store.lasting()
