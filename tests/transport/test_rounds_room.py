"""rounds.py: a run folder on a disk that is full when a run begins, and when it is ended by hand."""

import errno
import io
import json
from pathlib import Path

import pytest

from fedatlas.cli import main
from fedatlas.core.errors import RunFolderError
from fedatlas.transport import rounds, store
from fedatlas.transport.rounds import RunFolder
from fedatlas.transport.store import waiting_for_room, write_atomic


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_ctrl_c_ends_a_run_that_waits_for_room(tmp_path, monkeypatch) -> None:
    told: list[str] = []

    def pause(seconds: float) -> None:
        assert len(told) == 1, "it waits once more, to write why it stopped"
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_write", no_room)
    monkeypatch.setattr(store.time, "sleep", pause)
    folder = RunFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt), waiting_for_room(told.append, 60), folder.explained():
        write_atomic(tmp_path / "x", b"")
    assert len(told) == 1 and "Ctrl-C ends the run" in told[0]
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), waiting_for_room(told.append, 60), folder.explained():
        raise KeyboardInterrupt
    assert json.loads((tmp_path / "stopped.json").read_text())["why"] == "by hand (Ctrl-C)"


@pytest.fixture
def full(monkeypatch) -> list[int]:
    """A disk that is full for as many writes of a lock as the list's number says."""
    left, opened = [0], Path.open

    class Lock(io.FileIO):
        def write(self, data) -> int:
            if left[0]:
                left[0] -= 1
                no_room()
            return super().write(data)

    def open_(self: Path, mode: str = "r", *more, **how):
        return (
            Lock(self, "a+") if self.name == "lock" and mode[0] == "a" else opened(self, mode, *more, **how)
        )

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(store, "PAUSE", 0.001)
    return left


def test_a_run_that_begins_on_a_full_disk_waits_for_room(tmp_path, full) -> None:
    full[0], told = 3, list[str]()
    folder = RunFolder(tmp_path / "run")
    with waiting_for_room(told.append, 60), folder.held(print):
        assert (folder.path / "lock").read_text().startswith("process ")
    assert len(told) == 2 and told[0].startswith(
        f"{folder.path / 'lock'}: No space left on device; waits for room, at most 60 s"
    )


def test_a_run_that_cannot_begin_on_a_full_disk_names_the_place(tmp_path, full) -> None:
    full[0] = 10**6
    path = tmp_path / "run"
    named = (
        f"^{path}: cannot be made or written \\(No space left on device\\); choose another place with --runs"
    )
    with (
        pytest.raises(RunFolderError, match=named),
        waiting_for_room(print, 0.01),
        RunFolder(path).held(print),
    ):
        pass
    with pytest.raises(RunFolderError, match=named), RunFolder(path).held(print):
        pass


def test_a_folder_that_no_room_is_left_to_make_is_waited_for(tmp_path, monkeypatch) -> None:
    left, mkdir, told = [2], Path.mkdir, list[str]()

    def make(self: Path, *more, **how) -> None:
        if self.name in ("run", "rounds") and left[0]:
            left[0] -= 1
            no_room()
        mkdir(self, *more, **how)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(store, "PAUSE", 0.001)
    folder = RunFolder(tmp_path / "run")
    with waiting_for_room(told.append, 60), folder.held(print):
        left[0] = 1
        folder.save(rounds.Round(0, rounds.State({}), {}, []))
    assert folder.complete() == [0] and len(told) == 4


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys) -> None:
    """With the file, also where the file system tells the error only."""
    file = tmp_path / "a" / "x"
    monkeypatch.setattr(store.os, "fsync", no_room)
    with pytest.raises(OSError) as caught:
        write_atomic(file, b"x")
    assert caught.value.filename == str(file)

    def call(arguments) -> int:
        raise caught.value

    monkeypatch.setattr("fedatlas.cli.schema.call", call)
    assert main(["schema"]) == 1
    assert capsys.readouterr().err == f"error: {file}: No space left on device\n"
