"""local.py and run.py with a toy method: no data, no nets of ours."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from deployments import until
from runs import last_state
from torch import nn

from fedatlas.core.contract import Method, State, at_site, sends_of
from fedatlas.core.errors import DiskFull, FedAtlasError, RunFolderError, SiteLost
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.tensors import average, tensors_of
from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.best import Best, BestLocals
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import Hosts, run_federation
from fedatlas.transport import wire
from fedatlas.transport.clients import Call, Faults, SiteClients
from fedatlas.transport.egress import Declaration, NetForms
from fedatlas.transport.frames import Question, write_frame
from fedatlas.transport.host import Host, HostedSite
from fedatlas.transport.local import InProcess, Workers, keeping_workers
from fedatlas.transport.pipeline import Policy, ServerPipeline
from fedatlas.transport.rounds import Round, RunFolder, _log, read_json, run
from fedatlas.transport.store import MemoryStore, waiting_for_room

SPACE = LabelSpace(("background", "a"))


@dataclass
class Source:
    """A site's data, as little as a host needs."""

    n_train: int
    labels: SiteLabels = field(default_factory=lambda: SiteLabels(SPACE, frozenset({1})))
    n_labelled: torch.Tensor = field(default_factory=lambda: torch.tensor([0, 3]))

    def batches(self, *_, **__):
        raise AssertionError("not asked for here")

    volumes = batches


@dataclass(frozen=True)
class Walk(Method):
    """Moves the model by a site's own momentum and randomness; keeps both in the state it hands back."""

    fail: str = ""

    def start(self, net, clients) -> State:
        return State(tensors_of(net))

    def round(self, state: State, clients) -> State:
        replies = clients.call(
            self.step, each={s: {"scale": i + 1.0} for i, s in enumerate(clients.sites)}, model=state.model
        )
        model = average(replies.each("model"), replies.plain("n"))
        return replace(state, model=model, round=state.round + 1)

    @at_site
    def step(self, site, model, scale) -> dict:
        if self.fail == f"error {site.name}":
            raise ValueError("no such thing")
        momentum = site.memory.get("momentum", torch.zeros(2))
        momentum = 0.5 * momentum + torch.randn(2, generator=site.rng) + torch.randn(2) + scale
        site.memory["momentum"] = momentum
        moved = {name: value + momentum.sum() for name, value in model.items()}
        if self.fail == f"nan {site.name}":
            moved = {name: value / 0 for name, value in moved.items()}
        if self.fail == f"names {site.name}":
            moved = {"other": torch.zeros(1)}
        site.log(loss=1.0)
        return {"model": moved, "n": site.n_train}

    def not_allowed(self, site) -> dict:
        return {}


def net() -> nn.Module:
    made = nn.Linear(2, 1)
    nn.init.ones_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def clients(folder: Path, method: Walk, *, faults: Faults | None = None, order: str = "cab") -> SiteClients:
    hosts = {
        name: Host(
            name,
            Source(ord(name) - 90),
            method.functions(),
            lambda _: net(),
            folder / name,
            Policy(sends_of(method)),
            seed=5,
        )
        for name in order
    }
    transport = InProcess(lambda question: hosts[question.site].answer(question))
    declaration = Declaration(sends_of(method), len(SPACE), NetForms(lambda _: net()))
    pipeline = ServerPipeline(declaration=declaration)
    return SiteClients(list(order), transport, folder / "scratch", faults or Faults(), pipeline=pipeline)


def equal(one: State, other: State) -> bool:
    return wire.encode(one.model) == wire.encode(other.model) and one.round == other.round


def go(folder: Path, rounds: int = 4, method: Walk | None = None, **options) -> State:
    method = method or Walk()
    return run(method, net(), clients(folder, method, **options), rounds)


def test_the_order_of_sites_and_the_number_at_once_change_nothing(tmp_path) -> None:
    one = go(tmp_path / "1")
    assert equal(one, go(tmp_path / "2", order="bca"))
    torch.randn(7)
    assert equal(one, go(tmp_path / "3"))


def test_sites_that_take_longest_are_asked_first(tmp_path) -> None:
    method = Walk()
    there = clients(tmp_path, method)
    ask, order = there.transport.ask, []

    def listen(questions: Any, deadline: float) -> Any:
        order.append("".join(question.site for question in questions))
        return ask(questions, deadline)

    there.transport.ask = listen  # type: ignore[method-assign]
    state = method.start(net(), there)
    method.round(state, there)
    assert set(there.seconds) == set("abc") and all(spent["step"] > 0 for spent in there.seconds.values())
    for spent in ({"a": 1.0, "b": 3.0, "c": 2.0}, {"a": 2.0, "b": 1.0, "c": 3.0}):
        there.seconds = {site: {"step": seconds, "": 9.0} for site, seconds in spent.items()}
        method.round(state, there)
    there.seconds = {"a": {"evaluate": 5.0, "": 1.0}, "b": {"": 4.0}, "c": {"step": 2.0}}
    method.round(state, there)
    assert order == ["abc", "bca", "cab", "bca"]


def test_resuming_at_any_round_gives_the_same_bits(tmp_path) -> None:
    whole = go(tmp_path / "whole")
    for stop in range(4):
        folder = RunFolder(tmp_path / str(stop))
        method = Walk()

        def keep(record: Round, folder=folder, stop=stop) -> None:
            if record.number == stop + 1:  # the sites have moved on, the server has not written the round
                raise KeyboardInterrupt
            folder.save(record)

        with pytest.raises(KeyboardInterrupt):
            run(method, net(), clients(folder.path, method), 4, after_round=keep)
        state = folder.latest(method)
        assert state is not None and state.round == stop
        assert equal(
            whole, run(method, net(), clients(folder.path, method), 4, state=state, after_round=folder.save)
        )


@dataclass
class Tampered:
    """A transport under which something happens to every answer."""

    inner: InProcess
    change: Callable[[Question], str | None]

    def ask(self, questions, deadline):
        for site, lost in self.inner.ask(questions, deadline):
            question = next(q for q in questions if q.site == site)
            yield site, lost or self.change(question)

    def close(self) -> None: ...


def tamper(asked: SiteClients, site: str, change: Callable[[dict], object]) -> SiteClients:
    """Rewrites the replies of one site, as a faulty installation there would."""

    def rewrite(question: Question) -> None:
        if question.site == site:
            tree = wire.decode(question.reply.read_bytes())
            change(tree)
            question.reply.write_bytes(wire.encode(tree))

    asked.transport = Tampered(asked.transport, rewrite)
    return asked


def silent(asked: SiteClients, site: str, when: Callable[[Question], bool] = lambda q: True) -> SiteClients:
    """A federation in which a site does not answer."""
    asked.transport = Tampered(
        asked.transport, lambda q: "did not answer" if q.site == site and when(q) else None
    )
    return asked


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        ("error b", "ValueError: no such thing"),
        ("nan b", "not finite, in 'model'"),
        ("names b", "EgressError: .*holds the tensor 'other', which the net does not have; it was not sent"),
    ],
)
def test_a_refused_answer_stops_or_drops(tmp_path, fail: str, text: str) -> None:
    with pytest.raises(SiteLost, match=f"b: .*{text}"):
        go(tmp_path / "stop", method=Walk(fail))
    method = Walk(fail)
    asked = clients(tmp_path / "drop", method, faults=Faults(on_lost="drop"))
    state = run(method, net(), asked, 2)
    assert re.search(text, asked.lost["b"])
    # the same bits as a federation in which the site is silent
    other = silent(clients(tmp_path / "without", Walk(), faults=Faults(on_lost="drop")), "b")
    assert equal(state, run(Walk(), net(), other, 2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: t["value"].update(model={"other": torch.zeros(1)}),
            "holds the tensor 'other', which the net does not have",
        ),
        (
            lambda t: t["value"]["model"].update(weight=torch.zeros(3)),
            r"'weight' is float32\[3\], in the net it is float32\[1, 2\]",
        ),
        (
            lambda t: t["value"]["model"].update(weight=torch.full((1, 2), torch.nan)),
            "not finite, in 'model'",
        ),
        (lambda t: t["to"].update(round=7), "another question .*round 7.*asked was .*round 1"),
        (lambda t: t["to"].update(site="a"), "another question .*site a"),
        (lambda t: t.pop("to"), "not the reply of a site"),
        (lambda t: t.update(value=[1]), "answered a list"),
    ],
)
def test_what_a_faulty_site_sends_is_refused(tmp_path, change, text: str) -> None:
    asked = tamper(clients(tmp_path, Walk()), "b", change)
    with pytest.raises(SiteLost, match=f"b: .*{text}"):
        run(Walk(), net(), asked, 1)


def test_who_is_waited_for_is_asked_again_to_the_same_bits(tmp_path) -> None:
    asked: list[Question] = []

    def first_time(question: Question) -> bool:
        asked.append(question)
        return question.round == 2 and sum(q.round == 2 and q.site == "b" for q in asked) == 1

    whole = go(tmp_path / "whole")
    late = silent(clients(tmp_path / "late", Walk(), faults=Faults(on_lost="wait")), "b", first_time)
    assert equal(whole, run(Walk(), net(), late, 4))
    assert late.calls[-1].lost == {}
    patience = Faults(on_lost="wait", patience=0.5)
    with pytest.raises(SiteLost, match="b: did not answer"):
        run(Walk(), net(), silent(clients(tmp_path / "never", Walk(), faults=patience), "b"), 4)


def test_too_few_sites_stop_the_run(tmp_path) -> None:
    with pytest.raises(SiteLost, match="2 sites answered, faults.min_sites is 3"):
        go(tmp_path, method=Walk("nan b"), faults=Faults(on_lost="drop", min_sites=3))


def test_only_marked_functions_are_called(tmp_path) -> None:
    method = Walk()
    asked = clients(tmp_path, method)
    with pytest.raises(FedAtlasError, match="not marked @at_site"):
        asked.call(method.not_allowed)
    host = Host("a", Source(1), method.functions(), lambda _: net(), tmp_path, Policy({}), seed=1)
    reply = wire.decode(host.handle("not_allowed", 1, 0, wire.encode({})))
    assert "asked to run 'not_allowed'; allowed: step" in reply["error"]["text"]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[: len(data) // 2], "truncated or damaged"),
        (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "digest differs"),
        (lambda data: b"", "0 bytes that do not begin as one of ours"),
    ],
)
def test_damaged_replies_are_refused(tmp_path, damage, text: str) -> None:
    asked = clients(tmp_path, Walk())

    def change(question: Question) -> None:
        question.reply.write_bytes(damage(question.reply.read_bytes()))

    asked.transport = Tampered(asked.transport, change)
    with pytest.raises(SiteLost, match=text):
        run(Walk(), net(), asked, 1)


def test_a_damaged_payload_is_refused_at_the_site(tmp_path) -> None:
    host = Host("a", Source(1), Walk().functions(), lambda _: net(), tmp_path, Policy({}), seed=1)
    data = wire.encode({"model": tensors_of(net()), "scale": 1.0})
    data[-1] ^= 1
    reply = wire.decode(host.handle("step", 1, 0, data))
    assert reply["error"]["code"] == "WireError"


def test_what_lasts_at_a_site_outlives_a_round_that_is_done_again(tmp_path) -> None:
    counts = []

    def count(site, **_: object) -> dict[str, object]:
        for book in (site.memory, site.lasting):
            book["calls"] = book.get("calls", 0) + 1
        counts.append((site.memory["calls"], site.lasting["calls"]))
        return {}

    host = Host("a", Source(1), {"count": count}, lambda _: net(), tmp_path, Policy({"count": {}}), seed=1)
    for round, x in ((1, 0), (2, 0), (2, 1)):
        assert "error" not in wire.decode(host.handle("count", round, 0, wire.encode({"x": x})))
    assert counts == [(1, 1), (2, 2), (2, 3)]


def test_a_method_that_does_not_count_is_told(tmp_path) -> None:
    class Stuck(Walk):
        def round(self, state, clients):
            return state

    with pytest.raises(FedAtlasError, match=r"round=state.round \+ 1"):
        go(tmp_path, method=Stuck())


def test_replies_are_read_again_and_again(tmp_path) -> None:
    method = Walk()
    asked = clients(tmp_path, method)
    replies = asked.call(method.step, model=tensors_of(net()), scale=1.0)
    assert [s for s, _ in replies] == [s for s, _ in replies] == ["a", "b", "c"]
    assert replies.plain("n") == [7, 8, 9]


def test_a_full_disk_keeps_the_last_complete_round(tmp_path, monkeypatch) -> None:
    folder, method = RunFolder(tmp_path), Walk()
    state = State(tensors_of(net()))
    folder.save(Round(1, replace(state, round=1), {}, []))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedatlas.transport.store.os.fsync", full)
    with pytest.raises(RunFolderError, match="round 2 could not be written"):
        folder.save(Round(2, replace(state, round=2), {}, []))
    monkeypatch.undo()
    latest = folder.latest(method)
    assert latest is not None and latest.round == 1 and os.listdir(folder.rounds) == ["0001"]


@pytest.fixture
def full(monkeypatch) -> list[int]:
    """A disk that is full for as many durable writes as the list's number says."""
    left, sync = [0], os.fsync

    def fsync(file: int) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr("fedatlas.transport.store.os.fsync", fsync)
    monkeypatch.setattr("fedatlas.transport.store.PAUSE", 0.01)
    return left


def test_a_coordinator_waits_for_room_and_says_so(tmp_path, full) -> None:
    folder, method, told = RunFolder(tmp_path / "run"), Walk(), []
    whole = go(tmp_path / "whole")
    with waiting_for_room(told.append, patience=60):

        def keep(record: Round) -> None:
            full[0] = 3 if record.number == 2 else 0
            folder.save(record)

        state = run(method, net(), clients(folder.path, method), 4, after_round=keep)
    assert equal(whole, state) and folder.complete() == [0, 1, 2, 3, 4]
    assert len(told) == 2 and "No space left on device; waits for room, at most 60 s" in told[0], told
    assert told[1] == "there is room again; the run goes on"
    full[0] = 1000
    with (
        waiting_for_room(told.append, patience=0.05),
        pytest.raises(RunFolderError, match="could not be written"),
    ):
        folder.save(Round(5, replace(state, round=5), {}, []))
    assert folder.complete()[-1] == 4


def test_answers_for_which_there_is_no_room_are_not_asked_for_yet(tmp_path, monkeypatch) -> None:
    free = iter([10, 10, 10**12])
    usage = lambda path: type("usage", (), {"free": next(free, 10**12)})()  # noqa: E731
    monkeypatch.setattr("fedatlas.transport.store.shutil.disk_usage", usage)
    monkeypatch.setattr("fedatlas.transport.store.PAUSE", 0.01)
    told: list[str] = []
    with waiting_for_room(told.append, patience=60):
        go(tmp_path, 1)
    assert len(told) == 2 and "0.0 MB are free; what is to come may take 0.0 MB" in told[0]


def test_a_site_whose_disk_is_full_is_waited_for_to_the_same_bits(tmp_path, monkeypatch) -> None:
    """It cannot keep what it remembers; with wait it is asked again, and the coordinator says so."""
    told: list[str] = []
    whole = go(tmp_path / "whole")
    late = clients(tmp_path / "late", Walk(), faults=Faults(on_lost="wait"))  # type: ignore[call-arg]
    late.tell = told.append
    fails = {"b": 2}
    save = MemoryStore.save

    def full(self: MemoryStore, *rest: object) -> None:
        if self.folder.parent.name == "b" and fails["b"]:
            fails["b"] -= 1
            raise OSError(28, "No space left on device") if fails["b"] else DiskFull("cache: full")
        save(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryStore, "save", full)
    assert equal(whole, run(Walk(), net(), late, 4))
    assert [text[:28] for text in told] == ["waits for b (OSError: [Errno", "waits for b (DiskFull: cache"]
    stops = clients(tmp_path / "stops", Walk())
    fails["b"] = 1
    with pytest.raises(SiteLost, match="b: DiskFull: cache: full"):
        run(Walk(), net(), stops, 1)


def test_the_best_model_of_a_round_that_is_done_again_is_left_alone(tmp_path) -> None:
    """Round 3 was the best; its state is lost, its models are not. The run goes on after round 2 and comes to the same."""
    folder, method, state = RunFolder(tmp_path), Walk(), State(tensors_of(net()))
    best, own = Best(folder, "classes", "dice"), BestLocals(folder)

    def keep(number: int, score: float) -> None:
        model = {"w": torch.full((2,), float(number))}
        row = {"split": "validation", "grid": "federation", "metric": "dice", "value": score, "known": True}
        row |= {"model": "global", "round": number, "site": "a", "case": "p", "class": "x", "reason": ""}
        spool: Any = [("a", {"model": model, "classes": None})]
        folder.save(
            Round(number, replace(state, round=number), {"round": number, "local": {"a": score}}, [row]),
            spool,
        )
        own.see(number, {"a": score})
        best.see(number, [row])

    for number, score in ((1, 0.5), (2, 0.4), (3, 0.6)):
        keep(number, score)
    kept = {path: path.read_bytes() for path in sorted((tmp_path / "models").rglob("*.*"))}
    (folder.rounds / "0003" / "state.fa").write_bytes(b"half")
    best, own = Best(folder, "classes", "dice"), BestLocals(folder)
    latest = folder.latest(method)
    assert latest is not None and latest.round == 2
    own.recover()
    best.recover(2)
    assert (best.round, best.score) == (3, 0.6)
    keep(3, 0.6)
    assert {path: path.read_bytes() for path in sorted((tmp_path / "models").rglob("*.*"))} == kept
    assert folder.choices["a"]["round"] == read_json(tmp_path / "best.json")["round"] == 3
    # done again with other data, or without a site, it may score lower: the model that scored higher is kept, and the run goes on
    (folder.rounds / "0003" / "state.fa").write_bytes(b"half")
    latest = folder.latest(method)
    assert latest is not None and latest.round == 2
    for number, score in ((3, 0.45), (4, 0.2)):
        best, own = Best(folder, "classes", "dice"), BestLocals(folder)
        own.recover()
        best.recover(number - 1)
        keep(number, score)
    assert {path: path.read_bytes() for path in sorted((tmp_path / "models").rglob("*.*"))} == kept
    best.recover(4)
    own.recover()
    assert (best.round, best.score, own.best["a"]["score"]) == (3, 0.6, 0.6)


def test_a_round_without_validation_after_the_best_one_changes_nothing(tmp_path) -> None:
    folder, state = RunFolder(tmp_path), State(tensors_of(net()))
    best = Best(folder, "classes", "dice")
    row = {"split": "validation", "grid": "federation", "metric": "dice", "value": 0.5, "known": True}
    row |= {"model": "global", "round": 1, "site": "a", "case": "p", "class": "x", "reason": ""}
    for number, rows in ((1, [row]), (2, [])):
        folder.save(Round(number, replace(state, round=number), {"round": number}, rows))
        best.see(number, rows)
    assert (best.round, best.score, best.last_score) == (1, 0.5, None)
    resumed = Best(folder, "classes", "dice")
    resumed.recover(2)
    assert (resumed.round, resumed.score) == (1, 0.5)


def test_a_round_whose_validation_lacks_a_site_is_not_the_best(tmp_path) -> None:
    folder, state = RunFolder(tmp_path), State(tensors_of(net()))
    best = Best(folder, "classes", "dice")
    row = {"split": "validation", "grid": "federation", "metric": "dice", "known": True, "model": "global"}
    row |= {"case": "p", "class": "x", "reason": ""}

    def keep(number: int, scores: dict[str, float]) -> None:
        rows = [row | {"round": number, "site": site, "value": value} for site, value in scores.items()]
        lacking = [site for site in "ab" if site not in scores]
        log = {"round": number, "lacking": lacking}
        folder.save(Round(number, replace(state, round=number), log, rows))
        best.see(number, rows, lacking)
        resumed = Best(folder, "classes", "dice")
        resumed.recover(number)
        assert (resumed.round, resumed.score) == (best.round, best.score)

    for number, scores, expected in (
        (1, {"b": 0.9}, 1),
        (2, {"a": 0.9, "b": 0.5}, 2),
        (3, {"a": 0.85}, 2),
        (4, {"a": 0.9, "b": 0.6}, 4),
    ):
        keep(number, scores)
        assert best.round == read_json(tmp_path / "best.json")["round"] == expected


def test_a_final_evaluation_that_lost_a_site_is_done_again(small, tmp_path, monkeypatch) -> None:
    small |= {"rounds": 1, "faults": {"on_lost": "drop"}}
    small["evaluation"] |= {"models": ["last"]}
    federation, path = parse_federation(small, base=Path()), tmp_path / "run"
    answer, lost = Hosts.answer, small["sites"][0]["name"]

    def gone(self: Hosts, question: Question) -> None:
        if question.site == lost and question.round == 2:
            raise OSError(5, "gone")
        answer(self, question)

    monkeypatch.setattr(Hosts, "answer", gone)
    with pytest.raises(SiteLost, match=f"the final evaluation lacks {lost}; --resume does it again"):
        run_federation(federation, path, tell=lambda text: None)
    assert lost not in {row["site"] for row in read_rows(path / "rows.csv")}
    assert read_json(path / "run.json")["finished"] is None
    assert f"lacks {lost}" in read_json(path / "stopped.json")["why"]
    monkeypatch.setattr(Hosts, "answer", answer)
    run_federation(federation, path, tell=lambda text: None, resume=True)
    assert lost in {row["site"] for row in read_rows(path / "rows.csv")}
    assert read_json(path / "run.json")["finished"] is not None


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(b"half"), Path.unlink])
def test_a_newest_round_without_a_whole_state_falls_back_to_the_one_before(tmp_path, change) -> None:
    folder, method = RunFolder(tmp_path), Walk()
    state = State(tensors_of(net()))
    for number in (1, 2, 3):
        folder.save(Round(number, replace(state, round=number), {}, []))
    change(folder.rounds / "0003" / "state.fa")
    latest = folder.latest(method)
    assert latest is not None and latest.round == 2
    assert sorted(os.listdir(folder.rounds)) == ["0001", "0002"]
    change(folder.rounds / "0002" / "state.fa")
    with pytest.raises(RunFolderError, match=r"no round can be resumed\. .*0002/state\.fa: .*; .*0001/state"):
        folder.latest(method)
    assert folder.complete() == [1, 2], "nothing is removed where no state is found"


def test_a_later_round_goes_at_once_or_not_at_all(tmp_path, monkeypatch) -> None:
    """Who is killed while a damaged round is removed leaves none that looks complete and lacks its log."""
    folder, state = RunFolder(tmp_path), State(tensors_of(net()))
    for number in (1, 2):
        folder.save(Round(number, replace(state, round=number), {}, []))
    (folder.rounds / "0002" / "state.fa").unlink()

    def killed(path: Path, ignore_errors: bool = False) -> None:
        (path / "log.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(shutil, "rmtree", killed)
        folder.latest(Walk())
    assert folder.complete() == [1]
    latest = folder.latest(Walk())
    assert latest is not None and latest.round == 1 and os.listdir(folder.rounds) == ["0001"]


def test_a_copy_of_a_round_is_no_round(tmp_path) -> None:
    folder, state = RunFolder(tmp_path), State(tensors_of(net()))
    for number in (1, 2):
        folder.save(Round(number, replace(state, round=number), {"round": number}, []))
    shutil.copytree(folder.rounds / "0002", folder.rounds / "0002-copy")
    latest = folder.latest(Walk())
    assert latest is not None and latest.round == 2 and folder.complete() == [1, 2]
    assert folder.files("log.json") == [folder.rounds / name / "log.json" for name in ("0001", "0002")]


def test_a_run_goes_on_before_a_round_of_which_nothing_can_be_read(small, tmp_path) -> None:
    """As a power cut leaves it: the newest round's state and log are both half."""
    small["rounds"] = 3
    whole = last_state(small, tmp_path / "run")
    newest = tmp_path / "run" / "rounds" / "0002"
    for file in (newest / "state.fa", newest / "log.json", newest / "rows.json"):
        file.write_bytes(file.read_bytes()[:40])
    assert last_state(small, tmp_path / "run") == whole


def test_a_worker_that_is_killed_is_replaced_and_asked_again(small, tmp_path) -> None:
    """As the system does for memory: the call is done again by a new process, to the same bits."""
    killed: list[int] = []
    others = children()

    def murder(record, best) -> None:
        if record.number == 1:
            killed.append(next(pid for pid in children() if pid not in others))
            os.kill(killed[0], 9)

    whole = last_state(small, tmp_path / "whole")
    small["engine"]["workers"] = 2
    assert last_state(small, tmp_path / "killed", after_round=murder) == whole and killed


def children() -> list[int]:
    """The worker processes of this process, those among them that other tests of it keep (`shared_workers`)."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (OSError, IndexError, ValueError):
            continue
        if parent == os.getpid() and b"fedatlas.transport.worker" in command:
            found.append(int(entry.name))
    return found


def test_idle_workers_serve_the_next_run_and_end_with_the_context(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)

    def asked_of(workers: Workers, name: str) -> str:
        question = Question("a", "f", 1, 0, tmp_path / "q", None, tmp_path / f"{name}.txt")
        assert list(workers.ask([question], 60)) == [("a", None)]
        return (tmp_path / f"{name}.txt").read_text()

    def of(name: str) -> Workers:
        return Workers("worker_targets:telling", {"name": name}, 1, tmp_path / f"{name}.log")

    others = children()

    def new() -> list[int]:
        return [pid for pid in children() if pid not in others]

    with keeping_workers():
        first, second = of("first"), of("second")
        first.start()
        assert asked_of(first, "first") == "first"
        pids = new()  # it has answered: before, it may not bear the name of its program yet
        assert len(pids) == 1
        with keeping_workers():  # within another: nothing ends before that does
            first.close()
        second.start()
        assert new() == pids
        assert asked_of(second, "second") == "second"
        second.end("a")  # serves nobody
        second.close()
        assert new() == pids
        os.kill(pids[0], 9)
        third = of("third")
        assert asked_of(third, "third") == "third", "one that ended while nobody used it is replaced"
        third.close()
    assert new() == []
    assert [(tmp_path / f"{name}.log").read_text() for name in ("first", "second", "third")] == [
        f"{name} prints\n" for name in ("first", "second", "third")
    ]
    fourth = of("fourth")
    assert asked_of(fourth, "fourth") == "fourth"
    fourth.close()
    assert new() == []


def test_a_worker_frees_what_it_opened_before_and_prints_into_the_log_of_each_run(
    tmp_path, monkeypatch
) -> None:
    """Of two runs that it serves. What it has not written yet of the first is not of the second."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    logs = {name: tmp_path / f"{name}.log" for name in ("first", "second")}
    with keeping_workers():
        for name, log in logs.items():
            log.write_text("there before\n")
            workers = Workers("worker_targets:alone", {"name": name}, 1, log)
            question = Question("a", "f", 1, 0, tmp_path / "q", None, tmp_path / name)
            assert list(workers.ask([question], 60)) == [("a", None)]
            assert (tmp_path / name).read_text() == "0 others"
            workers.close()
        assert logs["first"].read_text() == "there before\nfirst warns\nfirst prints\n"
        assert logs["second"].read_text() == "there before\nsecond warns\n"


def test_a_worker_whose_answer_could_not_be_written_answers_the_next(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    workers = Workers("worker_targets:lacking", {"site": "a"}, 1, tmp_path / "log")
    asked = [Question(site, "f", 1, 0, tmp_path / "q", None, tmp_path / site) for site in ("a", "none", "c")]
    try:
        found = dict(workers.ask(asked, 60))
    finally:
        workers.close()
    assert found == {
        "a": "no reply could be written (No space left on device)",
        "none": "no reply could be written (OSError)",
        "c": None,
    }
    assert (tmp_path / "c").read_text() == "c"


STARTER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-m", "fedatlas.transport.worker"], stdin=subprocess.PIPE)
worker.stdin.write(sys.stdin.buffer.read())
worker.stdin.flush()
print(worker.pid, flush=True)
time.sleep(60)
"""


def test_a_worker_at_work_ends_with_who_started_it(tmp_path, monkeypatch) -> None:
    """As where a run is killed: nobody is left to end what it was doing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    log, frames = tmp_path / "log", io.BytesIO()
    opened = {"open": "busy_targets:hanging", "arguments": {"site": "a"}, "log": str(log)}
    write_frame(frames, json.dumps(opened).encode())
    write_frame(frames, Question("a", "f", 1, 0, tmp_path, None, tmp_path / "reply").to_json())
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdin and starter.stdout
        starter.stdin.write(frames.getvalue())
        starter.stdin.close()
        worker = psutil.Process(int(starter.stdout.readline()))
        until(log.exists, what="it begins")
        starter.kill()
    try:
        until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, what="it ends")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def test_another_installation_of_a_name_is_refused(tmp_path) -> None:
    """Two parties of one name: the second answers in the place of the one that joined."""
    asked = clients(tmp_path, Walk())
    run(Walk(), net(), asked, 1)
    assert asked.answering == {"a": "", "b": "", "c": ""}
    asked.instances = dict(asked.answering)
    with pytest.raises(SiteLost, match="b: another installation answered under its name"):
        run(Walk(), net(), tamper(asked, "b", lambda tree: tree.update({"from": "f00d"})), 2)


def test_of_a_site_that_comes_later_the_first_installation_is_the_one(tmp_path) -> None:
    """It was away when the others joined a run that goes on without it."""
    asked = clients(tmp_path, Walk())
    asked.instances = {"a": "", "c": ""}
    copy = lambda tree: tree["to"]["round"] == 2 and tree.update({"from": "f00d"})  # noqa: E731
    with pytest.raises(SiteLost, match="b: another installation answered under its name"):
        run(Walk(), net(), tamper(asked, "b", copy), 3)
    assert asked.instances == {"a": "", "b": "", "c": ""}


def test_an_answer_that_did_not_count_leaves_no_trace_at_its_site(tmp_path) -> None:
    """Its reply was lost after it had worked: the next round starts from the memory of the one that counted."""
    once = lambda question: question.round == 2  # noqa: E731
    faults = Faults(on_lost="drop")
    lost = silent(clients(tmp_path / "lost", Walk(), faults=faults), "b", once)
    state = run(Walk(), net(), lost, 4)
    never = clients(tmp_path / "never", Walk(), faults=faults)
    inner = never.transport

    class Absent:
        """Does not even ask."""

        def ask(self, questions, deadline):
            yield from ((q.site, "absent") for q in questions if q.site == "b" and once(q))
            yield from inner.ask([q for q in questions if not (q.site == "b" and once(q))], deadline)

        def close(self) -> None: ...

    never.transport = Absent()
    assert equal(state, run(Walk(), net(), never, 4))
    assert lost.remembered == {site: "000004-000" for site in "abc"}


def test_the_largest_memory_of_a_rounds_calls_is_kept_and_their_seconds_add_up() -> None:
    calls = [Call("step", {}, {"a": {"seconds": 2.0, "peak_mb": mb}}, {}) for mb in (300.0, 500.0, 400.0)]
    assert _log(1, calls, {}, 0.0, {})["cost"] == {"a": {"seconds": 6.0, "peak_mb": 500.0}}


def test_the_steps_of_a_rounds_calls_add_up_and_of_other_numbers_the_last_is_kept() -> None:
    """As where a call trains teachers, and the next one the model."""
    of_site = (
        {"steps": 40.0, "step_seconds": 3.0, "loss": 1.0},
        {"steps": 20.0, "step_seconds": 2.0, "loss": 0.5},
    )
    calls = [Call("step", {"a": numbers}, {}, {}) for numbers in of_site]
    assert _log(1, calls, {}, 0.0, {})["sites"] == {"a": {"steps": 60.0, "step_seconds": 5.0, "loss": 0.5}}


def test_a_site_that_was_lost_in_one_validation_is_not_lost_in_the_next(small, tmp_path, monkeypatch) -> None:
    small |= {"rounds": 2, "faults": {"on_lost": "drop"}}
    small["evaluation"] |= {"models": ["last"]}
    answer, lost = Hosts.answer, small["sites"][0]["name"]

    def gone(self, question) -> None:
        if question.site == lost and (question.round, question.function) == (1, "evaluate"):
            raise OSError(5, "gone")
        answer(self, question)

    monkeypatch.setattr(Hosts, "answer", gone)
    run_federation(parse_federation(small, base=Path()), tmp_path / "run", tell=lambda text: None)
    folder = RunFolder(tmp_path / "run")
    assert [folder.log(number).get("lacking") for number in (1, 2)] == [[lost], None]
    best = read_json(folder.path / "best.json")
    assert best["round"] == 2 and "lacking" not in best


def test_several_trainings_of_one_call_add_up(tmp_path) -> None:
    site = HostedSite("a", None, lambda name: net(), {}, torch.Generator(), torch.device("cpu"), tmp_path, ())  # type: ignore[arg-type]
    site.log(steps=3, step_seconds=1.5, overflows=1, loss=0.5)
    site.log(steps=2, step_seconds=0.5, overflows=2, loss=0.25)
    assert site.logged == {"steps": 5.0, "step_seconds": 2.0, "overflows": 3.0, "loss": 0.25}
