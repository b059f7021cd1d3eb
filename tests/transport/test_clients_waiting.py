"""clients.py: which answers are asked for again, which are refused for good, and how long a site may take."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_local import Tampered, Walk, clients, equal, go, net

from fedatlas.core.errors import SiteLost, WireError
from fedatlas.transport import wire
from fedatlas.transport.clients import Faults, SiteClients
from fedatlas.transport.frames import Question
from fedatlas.transport.local import Workers
from fedatlas.transport.pipeline import SitePipeline
from fedatlas.transport.relay import not_stored
from fedatlas.transport.rounds import run
from fedatlas.transport.store import waiting_for_room

WAIT = Faults(on_lost="wait", patience=60)  # type: ignore[call-arg]


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """The seconds of each pause before a site is asked again; time goes by in them only, and at once."""
    made: list[float] = []
    clock = SimpleNamespace(sleep=made.append, monotonic=lambda: sum(made))
    monkeypatch.setattr("fedatlas.transport.clients.time", clock)
    return made


def spoilt(asked: SiteClients, spoil: Callable[[Path], object], times: int = 1) -> list[Question]:
    """Spoils the first answers of site b in round 2; returns the questions that it is put in that round, as they come."""
    put: list[Question] = []

    def change(question: Question) -> None:
        if question.site == "b" and question.round == 2:
            put.append(question)
            if len(put) <= times:
                spoil(question.reply)

    asked.transport = Tampered(asked.transport, change)  # type: ignore[arg-type, assignment]
    return put


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes an answer as its sender could, with a digest that fits."""

    def write(file: Path) -> None:
        tree: Any = wire.decode(file.read_bytes())
        change(tree)
        file.write_bytes(wire.encode(tree))

    return write


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def fail(code: str) -> Callable[[Path], object]:
    def error(tree: dict[str, Any]) -> None:
        for key in ("memory", "value", "log", "cost"):
            del tree[key]
        tree["error"] = {"code": code}

    return rewritten(error)


PASSING: list[tuple[Callable[[Path], object], str]] = [
    (flip, "digest differs; it is truncated or damaged"),
    (lambda file: file.write_bytes(file.read_bytes()[:50]), "digest differs; it is truncated"),
    (lambda file: file.write_bytes(b""), "0 bytes that do not begin as one of ours"),
    (lambda file: file.unlink(), r"its answer cannot be read \(No such file"),
    (rewritten(lambda tree: tree["to"].update(call=7)), "it answered another question"),
    (rewritten(lambda tree: tree.update({"from": "f00d"})), "another installation answered under its name"),
    (fail("WireError"), "WireError: what it received was damaged"),
]


@pytest.mark.parametrize(("spoil", "reason"), PASSING)
def test_with_wait_an_answer_that_did_not_arrive_is_asked_for_again(
    tmp_path, pauses, spoil: Callable[[Path], object], reason: str
) -> None:
    whole = go(tmp_path / "whole", 3)
    asked, told = clients(tmp_path / "spoilt", Walk(), faults=WAIT), list[str]()
    asked.tell, asked.instances = told.append, dict.fromkeys("abc", "")
    put = spoilt(asked, spoil)
    assert equal(whole, run(Walk(), net(), asked, 3))
    assert len(put) == 2 and asked.calls[-1].lost == {} and pauses == [1.0]
    (line,) = told
    assert re.fullmatch(f"waits for b \\(.*{reason}.*\\), which is asked again", line)


def test_an_answer_that_never_arrives_ends_with_the_patience(tmp_path, pauses) -> None:
    """With a pause before each time that it is asked again, and one line for one reason."""
    faults = Faults(on_lost="wait", patience=3)  # type: ignore[call-arg]
    asked, told = clients(tmp_path, Walk(), faults=faults), list[str]()
    asked.tell = told.append
    put = spoilt(asked, flip, times=100)
    with pytest.raises(
        SiteLost, match=r"b: .*digest differs[^.]*\n.*faults.on_lost is wait; the 3 s of waiting are over"
    ):
        run(Walk(), net(), asked, 3)
    assert pauses == [1.0, 1.0, 1.0] and len(put) == 4 and len(told) == 1


def badly_made(*_: Any) -> Any:
    raise WireError("restoring a difference: the message is not a compressed difference")


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (rewritten(lambda tree: tree["value"].update(n=float("nan"))), "'n' is declared as 'cases', but is nan"),
    (rewritten(lambda tree: tree["value"].pop("model")), "missing: model"),
    (rewritten(lambda tree: tree["value"]["model"]["bias"].fill_(float("inf"))), "not finite, in 'model'"),
    (fail("ValueError"), "ValueError: an error"),
]


@pytest.mark.parametrize(("spoil", "reason"), REFUSED)
def test_with_wait_an_answer_that_waiting_cannot_mend_is_refused(
    tmp_path, spoil: Callable[[Path], object], reason: str
) -> None:
    asked, told = clients(tmp_path, Walk(), faults=WAIT), list[str]()
    asked.tell = told.append
    put = spoilt(asked, spoil)
    with pytest.raises(SiteLost) as caught:
        run(Walk(), net(), asked, 3)
    assert re.search(reason, str(caught.value)) and len(put) == 1 and not told
    assert str(caught.value).endswith("(the answer of b was refused, which waiting cannot mend)")
    assert "on_lost" not in str(caught.value)


def test_what_arrived_whole_and_is_of_no_form_of_ours_is_refused(tmp_path, monkeypatch) -> None:
    asked = clients(tmp_path, Walk(), faults=WAIT)
    monkeypatch.setattr("fedatlas.transport.reply.check_numbers", badly_made)
    with pytest.raises(SiteLost, match="not a compressed difference[^$]*the answer of a, b, c was refused"):
        run(Walk(), net(), asked, 1)


# ------------------------------------------------------------------------------------------- a full run folder

FULL = "no reply could be written (No space left on device)"


def lacking(asked: SiteClients, times: int, *, here: bool = True, why: str = FULL) -> SiteClients:
    """A federation in which the first answers of site b in round 2 cannot be written. here: into the run folder."""
    left = [times]

    def change(question: Question) -> str | None:
        left[0] -= (question.site, question.round) == ("b", 2)
        return why if (question.site, question.round) == ("b", 2) and left[0] >= 0 else None

    asked.transport = Tampered(asked.transport, change)  # type: ignore[arg-type, assignment]
    asked.transport.in_run_folder = here  # type: ignore[attr-defined]
    return asked


@pytest.mark.parametrize("on_lost", ["stop", "drop"])
def test_a_site_that_lacked_room_in_the_run_folder_is_asked_again(tmp_path, pauses, on_lost: Any) -> None:
    """As where a worker process meets the full disk: the run waits for room, by whatever rule sites are lost."""
    asked, told = clients(tmp_path / "full", Walk(), faults=Faults(on_lost=on_lost)), list[str]()  # type: ignore[call-arg]
    lacking(asked, 2).tell = told.append
    with waiting_for_room(print, patience=60):
        assert equal(go(tmp_path / "whole", 3), run(Walk(), net(), asked, 3))
    assert told == [f"waits for b ({FULL}), which is asked again"] and pauses == [1.0, 1.0]


def test_an_answer_that_lacked_room_at_the_server_is_asked_for_again(tmp_path, pauses) -> None:
    """Of a site elsewhere, too: with `drop` the run would go on without it, to other numbers."""
    asked, told = clients(tmp_path / "full", Walk(), faults=Faults(on_lost="drop")), list[str]()  # type: ignore[call-arg]
    why = not_stored(OSError(28, "No space left on device"))
    lacking(asked, 2, here=False, why=why).tell = told.append
    with waiting_for_room(print, patience=60):
        assert equal(go(tmp_path / "whole", 3), run(Walk(), net(), asked, 3))
    assert told == [f"waits for b ({why}), which is asked again"] and pauses == [1.0, 1.0]


def test_no_site_is_left_out_where_the_servers_storage_fails(tmp_path, pauses) -> None:
    """A folder that may not be written, or a disk that stays full: with `drop`, the run would go on without the site."""
    drop = Faults(on_lost="drop", patience=0.5)  # type: ignore[call-arg]
    for name, error in (
        ("away", OSError(13, "Permission denied")),
        ("full", OSError(28, "No space left on device")),
    ):
        asked = lacking(clients(tmp_path / name, Walk(), faults=drop), 99, here=False, why=not_stored(error))
        with (
            waiting_for_room(print, patience=60),
            pytest.raises(SiteLost, match="no site is left out for that"),
        ):
            run(Walk(), net(), asked, 3)
    here = lacking(clients(tmp_path / "here", Walk(), faults=drop), 99)
    with waiting_for_room(print, patience=60), pytest.raises(SiteLost, match="no site is left out for that"):
        run(Walk(), net(), here, 3)


def test_a_site_that_lacks_room_elsewhere_is_lost(tmp_path) -> None:
    with waiting_for_room(print, patience=60), pytest.raises(SiteLost, match="No space left on device"):
        run(Walk(), net(), lacking(clients(tmp_path / "far", Walk()), 2, here=False), 3)
    with pytest.raises(SiteLost, match="No space left on device"):  # nobody waits for room
        run(Walk(), net(), lacking(clients(tmp_path / "here", Walk()), 2), 3)


def test_a_log_of_what_leaves_that_lacks_room_is_waited_for(tmp_path, monkeypatch, pauses) -> None:
    """The code of the error alone says nothing of a disk; that hardly a byte is free does."""
    whole, filled, told = go(tmp_path / "whole", 3), list[bool](), list[str]()

    def record(*_: Any) -> None:
        filled.append(True)
        if len(pauses) < 2:
            raise OSError(28, "No space left on device")

    def usage(path: Path) -> Any:
        return SimpleNamespace(free=0 if filled and len(pauses) < 2 else 10**12)

    asked = clients(tmp_path / "full", Walk())
    asked.tell = told.append
    monkeypatch.setattr(SitePipeline, "record", record)
    monkeypatch.setattr("fedatlas.transport.store.shutil.disk_usage", usage)
    with waiting_for_room(print, patience=60):
        assert equal(whole, run(Walk(), net(), asked, 3))
    assert [line[:50] for line in told] == [
        f"waits for {site} (OSError: its disk or a file failed it"[:50] for site in "abc"
    ]


# ------------------------------------------------------------------------------------------------- the deadline


def test_a_site_that_hangs_costs_no_other_its_turn(tmp_path, monkeypatch) -> None:
    """One worker for three sites: the clock of each begins when the worker takes its question."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    workers = Workers("busy_targets:hanging", {"site": "a"}, 1, tmp_path / "log")
    shared = tmp_path / "shared"
    shared.write_text("")
    questions = [Question(site, "train", 1, 0, shared, None, tmp_path / site) for site in "abc"]
    began = time.monotonic()
    try:
        found = dict(workers.ask(questions, 1.0))
    finally:
        workers.close()
    assert found == {"a": "no answer within 1 s (faults.deadline)", "b": None, "c": None}
    assert [(tmp_path / site).read_text() for site in "bc"] == ["b", "c"] and not (tmp_path / "a").exists()
    assert time.monotonic() - began < 30
