"""local.py and run.py with a toy method: no data, no nets of ours."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedatlas.engine import wire
from fedatlas.engine.host import Host
from fedatlas.engine.local import Faults, LocalClients, in_process
from fedatlas.engine.run import Round, RunFolder, run
from fedatlas.errors import FedAtlasError, RunFolderError, SiteLost
from fedatlas.labels import LabelSpace, SiteLabels
from fedatlas.method import State, at_site, functions_of
from fedatlas.tensors import average, tensors_of

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
class Walk:
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


def clients(
    folder: Path, method: Walk, *, faults: Faults | None = None, order: str = "cab", at_once: int = 1
) -> LocalClients:
    hosts = {
        name: Host(name, Source(ord(name) - 90), functions_of(method), lambda _: net(), folder / name, seed=5)
        for name in order
    }
    return LocalClients(list(order), in_process(hosts), folder / "scratch", faults or Faults(), at_once)


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


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        ("error b", "ValueError: no such thing"),
        ("nan b", "not finite, in 'model'"),
        ("names b", "missing: weight, bias; not known: other"),
    ],
)
def test_a_refused_answer_stops_or_drops(tmp_path, fail: str, text: str) -> None:
    with pytest.raises(SiteLost, match=f"b: .*{text}"):
        go(tmp_path / "stop", method=Walk(fail))
    method = Walk(fail)
    asked = clients(tmp_path / "drop", method, faults=Faults(on_lost="drop"))
    state = run(method, net(), asked, 2)
    assert text in asked.lost["b"]
    # the same bits as a federation that never had the site, at equal payloads
    plain = Walk()

    def without(site, *rest):
        return (
            asked_plain_serve(site, *rest)
            if site != "b"
            else wire.encode({"error": {"code": "X", "text": ""}})
        )

    other = clients(tmp_path / "without", plain, faults=Faults(on_lost="drop"))
    asked_plain_serve = other.serve
    other.serve = without
    assert equal(state, run(plain, net(), other, 2))


def test_too_few_sites_stop_the_run(tmp_path) -> None:
    with pytest.raises(SiteLost, match="2 sites answered, faults.min_sites is 3"):
        go(tmp_path, method=Walk("nan b"), faults=Faults(on_lost="drop", min_sites=3))


def test_only_marked_functions_are_called(tmp_path) -> None:
    method = Walk()
    asked = clients(tmp_path, method)
    with pytest.raises(FedAtlasError, match="not marked @at_site"):
        asked.call(method.not_allowed)
    reply = wire.decode(asked.serve("a", "not_allowed", 1, 0, wire.encode({}), None))
    assert "asked to run 'not_allowed'; allowed: step" in reply["error"]["text"]


def test_damaged_replies_are_refused(tmp_path) -> None:
    method = Walk()
    asked = clients(tmp_path, method)
    good = asked.serve

    def damaged(*call):
        answer = bytearray(good(*call))
        answer[len(answer) // 2] ^= 1
        return answer

    asked.serve = damaged
    with pytest.raises(SiteLost, match="digest differs"):
        run(method, net(), asked, 1)


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

    monkeypatch.setattr("fedatlas.engine.store.os.fsync", full)
    with pytest.raises(RunFolderError, match="round 2 could not be written"):
        folder.save(Round(2, replace(state, round=2), {}, []))
    monkeypatch.undo()
    latest = folder.latest(method)
    assert latest is not None and latest.round == 1 and os.listdir(folder.rounds) == ["0001"]


def test_a_damaged_newest_round_falls_back_to_the_one_before(tmp_path) -> None:
    folder, method = RunFolder(tmp_path), Walk()
    state = State(tensors_of(net()))
    for number in (1, 2, 3):
        folder.save(Round(number, replace(state, round=number), {}, []))
    (folder.rounds / "0003" / "state.fa").write_bytes(b"half")
    latest = folder.latest(method)
    assert latest is not None and latest.round == 2 and folder.complete() == [1, 2]


def test_a_worker_that_is_killed_is_replaced_and_asked_again(small, tmp_path) -> None:
    """As the system does for memory: the call is done again by a new process, to the same bits."""
    from pathlib import Path as Folder

    from fedatlas.experiment import parse_federation
    from fedatlas.session import run_federation

    killed: list[int] = []

    def last(path: Folder, workers: int) -> bytes:
        small["engine"]["workers"] = workers
        federation = parse_federation(small, base=Folder())
        run_federation(federation, path, tell=lambda text: None, after_round=murder if workers else None)
        return (path / "models" / "last.fa").read_bytes()

    def murder(record, best) -> None:
        for pid in children():
            os.kill(pid, 9)
            killed.append(pid)

    whole = last(tmp_path / "whole", 0)
    assert last(tmp_path / "killed", 2) == whole and killed


def children() -> list[int]:
    """The worker processes of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (OSError, IndexError, ValueError):
            continue
        if parent == os.getpid() and b"fedatlas.engine.worker" in command:
            found.append(int(entry.name))
    return found
