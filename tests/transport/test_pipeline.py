"""pipeline.py and stages.py: compression, privacy and secure aggregation on the way of a model, with a toy method."""

import json
import math
import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import last_state
from test_local import Source, Tampered
from torch import nn

from fedatlas.core.contract import Method, State, at_site, sends_of
from fedatlas.core.errors import FederationError, RunFolderError, SiteLost
from fedatlas.core.tensors import average, tensors_of
from fedatlas.federation.session import _keep_released, _released
from fedatlas.methods.fednorm import FedNorm
from fedatlas.transport import wire
from fedatlas.transport.clients import Call, Faults, Released, SiteClients
from fedatlas.transport.egress import Declaration, EgressLog, NetForms, read_log
from fedatlas.transport.host import Host
from fedatlas.transport.local import InProcess
from fedatlas.transport.pipeline import Policy, ServerPipeline, Terms, terms_of
from fedatlas.transport.protection.compression import Comm
from fedatlas.transport.protection.privacy import Privacy, epsilon
from fedatlas.transport.protection.secure import Secure
from fedatlas.transport.rounds import RunFolder, run
from fedatlas.transport.stages import HeldByAll, HeldHere, NotHeld, Releases, compressed

SITES = "abcd"


@dataclass(frozen=True)
class Drift(Method):
    """Every site moves the model a little in a direction of its own; the server averages."""

    summed = "cases"

    def start(self, net, clients) -> State:
        return State(tensors_of(net))

    def round(self, state: State, clients) -> State:
        replies = clients.call(self.step, model=state.model)
        model = average(replies.each("model"), replies.plain("n"))
        return replace(state, model=model, round=state.round + 1)

    @at_site
    def step(self, site, model) -> dict:
        draw = lambda tensor: torch.randn(tensor.shape, generator=site.rng)  # noqa: E731
        moved = {n: v + 0.1 * draw(v) if v.is_floating_point() else v + 1 for n, v in model.items()}
        site.log(loss=0.5)
        return {"model": moved, "n": site.n_train}


@dataclass(frozen=True)
class Even(Drift):
    summed = "equal"

    def round(self, state: State, clients) -> State:
        replies = clients.call(self.step, model=state.model)
        model = average(replies.each("model"), [1] * len(replies.sites))
        return replace(state, model=model, round=state.round + 1)


def net() -> nn.Module:
    made = nn.Linear(40, 30)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-1, 1, 1200).reshape(30, 40))
        made.bias.zero_()
    made.register_buffer("count", torch.tensor(3))
    return made


def federation(
    folder: Path, *, method: Any = None, faults: Faults | None = None, instance: str = "", **terms: Any
) -> SiteClients:
    method = method or Drift()
    agreed = Terms(sites=4, weights=method.summed, model_functions=frozenset({"step"}), **terms)
    hosts = {
        name: Host(
            name,
            Source(ord(name) - 90),
            method.functions(),
            lambda _: net(),
            folder / name,
            Policy(sends_of(method), log=EgressLog(folder / name / "egress.jsonl"), terms=agreed),
            seed=5,
            instance=instance,
        )
        for name in SITES
    }
    transport = InProcess(lambda question: hosts[question.site].answer(question))
    pipeline = ServerPipeline(agreed, Declaration(sends_of(method), 2, NetForms(lambda _: net())))
    return SiteClients(list(SITES), transport, folder / "scratch", faults or Faults(), pipeline=pipeline)


def go(folder: Path, rounds: int = 3, **options: Any) -> tuple[State, SiteClients]:
    clients = federation(folder, **options)
    return run(options.get("method") or Drift(), net(), clients, rounds), clients


def distance(one: State, other: State) -> float:
    return max(float((one.model[n].double() - v.double()).abs().max()) for n, v in other.model.items())


def traffic(clients: SiteClients) -> tuple[float, float]:
    cost = clients.calls[-1].cost["a"]
    return cost["bytes_down"], cost["bytes_up"]


# ------------------------------------------------------------------------------------------------------ compression


@pytest.mark.parametrize(
    ("kind", "within", "share"), [("bf16", 2e-3, 0.75), ("int8", 5e-3, 0.6), ("topk", 1.0, 0.5)]
)
def test_compressed_both_ways_stays_near(tmp_path, kind: str, within: float, share: float) -> None:
    """On this small model the manifest of a message weighs; the shares of a real one are in test_compression."""
    plain, exact = go(tmp_path / "plain")
    comm = Comm(up=kind, down="int8" if kind == "topk" else kind, fraction=0.1)  # type: ignore[arg-type]
    near, packed = go(tmp_path / kind, comm=comm)
    assert 0 < distance(plain, near) < within
    down, up = traffic(packed)
    assert down < share * traffic(exact)[0] and up < share * traffic(exact)[1]
    assert near.model["count"] == plain.model["count"], "counters travel exactly"


def test_topk_of_everything_is_exact(tmp_path) -> None:
    plain, _ = go(tmp_path / "plain")
    near, _ = go(tmp_path / "all", comm=Comm(up="topk", fraction=1.0))
    # received + (trained - received) is rounded once more than trained
    assert distance(plain, near) < 1e-6


def test_feedback_is_kept_at_the_site(tmp_path) -> None:
    with_it, _ = go(tmp_path / "with", rounds=1, comm=Comm(up="topk", fraction=0.1))
    memory = sorted((tmp_path / "with" / "a" / "memory").glob("*.fa"))
    assert list(wire.decode(memory[-1].read_bytes())) == ["exchange.residual.step"]
    without, _ = go(tmp_path / "without", rounds=1, comm=Comm(up="topk", fraction=0.1, feedback=False))
    assert not list((tmp_path / "without" / "a").glob("memory/*.fa"))
    assert distance(with_it, without) == 0, "in the first round there is nothing to feed back"


def test_what_is_left_out_of_one_function_is_not_fed_back_into_another(tmp_path) -> None:
    model = tensors_of(net())
    memory: dict[str, Any] = {}
    far, near = ({n: v + d if v.is_floating_point() else v for n, v in model.items()} for d in (9.0, 0.1))
    comm = Comm(up="int8")
    compressed("teach", far, model, comm, memory)
    alone = compressed("step", near, model, comm, {})
    assert wire.encode(compressed("step", near, model, comm, memory)) == wire.encode(alone)
    assert sorted(memory) == ["exchange.residual.step", "exchange.residual.teach"]


def test_a_model_that_is_held_is_not_sent_again(tmp_path) -> None:
    clients = federation(tmp_path, comm=Comm(down="int8"))
    model = tensors_of(net())
    first = clients.call(Drift().step, model=model)
    whole = traffic(clients)[0]
    again = clients.call(Drift().step, model=model)
    assert traffic(clients)[0] < 0.2 * whole and first.sites == again.sites == list(SITES)


def test_a_site_that_lost_what_it_held_gets_it_whole(tmp_path) -> None:
    plain, _ = go(tmp_path / "plain", comm=Comm(down="int8"))
    clients = federation(tmp_path / "lossy", comm=Comm(down="int8"))
    state = run(Drift(), net(), clients, 2)
    for file in (tmp_path / "lossy" / "b" / "exchange" / "held").glob("*.fa"):
        file.unlink()
    state = run(Drift(), net(), clients, 3, state=replace(state, rounds=3))
    assert distance(plain, state) == 0 and clients.lost == {}
    assert clients.calls[-1].cost["b"]["bytes_down"] > 2 * clients.calls[-1].cost["a"]["bytes_down"]


@pytest.mark.parametrize("name", ["../memory", "0" * 64 + "\n", 7, None])
def test_a_server_reads_no_other_file_by_the_name_of_a_held_model(tmp_path, name: Any) -> None:
    held = HeldHere("a", tmp_path / "held")
    held.folder.mkdir()
    (held.folder / f"{name}.fa").write_bytes(wire.encode({"secret": torch.ones(2)}))
    with pytest.raises(NotHeld, match="a model's name is the SHA-256"):
        held.receive({"held": name})


@pytest.mark.parametrize(
    ("method", "down"), [("fedavg", "bf16"), ("fedavg", "int8"), ("centralized", "int8"), ("fedsm", "int8")]
)
def test_a_resumed_run_sends_on_from_the_model_that_sites_hold(small, tmp_path, method, down) -> None:
    chosen = small | {"method": {"name": method}, "comm": {"down": down}}
    once = last_state(chosen, tmp_path / "run")
    assert last_state(chosen, tmp_path / "run") == once, "goes on after round 1"
    (tmp_path / "run" / "rounds" / "0001" / "held.fa").unlink()
    last_state(chosen, tmp_path / "run")  # of an older version


def test_an_answer_is_checked_in_the_form_in_which_it_leaves(tmp_path, monkeypatch) -> None:
    """What a stage has made of an answer is held against what the server expects, too."""
    monkeypatch.setattr("fedatlas.transport.stages.compressed", lambda model, *_: model)
    with pytest.raises(SiteLost, match="not a compressed difference; it was not sent"):
        go(tmp_path, comm=Comm(up="int8"))
    lines = read_log(tmp_path / "a" / "egress.jsonl")
    assert [line["contents"]["error/code"] for line in lines] == ["EgressError"]


# ---------------------------------------------------------------------------------------------------------- privacy


def test_a_wide_clip_without_noise_changes_nothing(tmp_path) -> None:
    plain, _ = go(tmp_path / "plain")
    private, clients = go(tmp_path / "private", privacy=Privacy(clip=1e6, noise=0.0))
    for name in ("weight", "bias"):
        assert (plain.model[name] - private.model[name]).abs().max() < 1e-6
    assert private.model["count"] == 3, "a count of batches is not protected, and not sent"
    assert clients.calls[-1].epsilon == float("inf")


def test_noise_is_not_the_seeds(tmp_path) -> None:
    one, clients = go(tmp_path / "1", privacy=Privacy(clip=0.1, noise=1.0))
    two, _ = go(tmp_path / "2", privacy=Privacy(clip=0.1, noise=1.0))
    assert distance(one, two) > 1e-3
    epsilons = clients.calls[-1].epsilon
    assert epsilons is not None and 0 < epsilons < 100
    assert set(clients.calls[-1].logs["a"]) == {"releases"}, "the loss is of the data, and stays"
    assert clients.calls[-1].logs["a"]["releases"] == 3


def test_a_question_asked_again_gets_the_same_noise(tmp_path) -> None:
    clients = federation(tmp_path, privacy=Privacy(clip=0.1, noise=1.0))
    ask = lambda: {s: r["model"]["weight"] for s, r in clients.call(Drift().step, model=tensors_of(net()))}  # noqa: E731
    clients.begin(1)
    first = ask()
    clients.begin(1)
    second = ask()
    assert all(torch.equal(first[site], second[site]) for site in SITES)
    assert clients.calls[-1].logs["a"]["releases"] == 1
    clients.begin(2)
    third = ask()
    assert not torch.equal(first["a"], third["a"]) and clients.calls[-1].logs["a"]["releases"] == 2


def test_a_run_that_is_begun_anew_keeps_its_replies(tmp_path) -> None:
    """Its rounds count from 1 again, below those of the run before, whose replies lie in the same folder."""
    private, sent = Privacy(clip=0.1, noise=1.0), tmp_path / "a" / "exchange" / "sent"
    go(tmp_path, rounds=6, privacy=private)
    assert [path.name for path in sorted(sent.iterdir())] == [f"{round:06d}-000.fa" for round in (3, 4, 5, 6)]
    clients = federation(tmp_path, privacy=private)
    ask = lambda: {s: r["model"]["weight"] for s, r in clients.call(Drift().step, model=tensors_of(net()))}  # noqa: E731
    clients.begin(1)
    first = ask()
    clients.begin(1)
    assert torch.equal(first["a"], ask()["a"]) and clients.calls[-1].logs["a"]["releases"] == 7
    assert [path.name for path in sorted(sent.iterdir())] == [f"{round:06d}-000.fa" for round in (1, 4, 5, 6)]


def test_an_answer_that_leaves_again_finds_the_memory_that_it_names(tmp_path) -> None:
    """Its answer of round 2 was late and did not count; the next call forgot what it had left in the memory. Then the run was
    killed, and round 2 is done again."""
    clients = federation(tmp_path, privacy=Privacy(clip=0.1, noise=1.0), comm=Comm(up="int8"))
    ask = lambda: {s: r["model"]["weight"] for s, r in clients.call(Drift().step, model=tensors_of(net()))}  # noqa: E731
    file = tmp_path / "a" / "memory" / "000002-000.fa"
    clients.begin(1)
    ask()
    counted = dict(clients.remembered)
    clients.begin(2)
    first, memory = ask(), file.read_bytes()
    clients.remembered = dict(counted)
    ask()
    assert not file.exists()
    clients.begin(2)
    clients.remembered = dict(counted)
    again = ask()
    assert (
        all(torch.equal(first[site], again[site]) for site in SITES) and clients.remembered["a"] == file.stem
    )
    assert file.read_bytes() == memory
    clients.begin(3)
    assert list(ask()) == list(SITES)


def test_a_run_that_is_begun_anew_finds_the_memory_of_its_replies(tmp_path) -> None:
    """The run before it stopped in round 4: by then the memory of round 1 is forgotten, and the reply is kept."""
    protected: Any = {"privacy": Privacy(clip=0.1, noise=1.0), "comm": Comm(up="int8")}
    go(tmp_path, rounds=4, **protected)
    assert not (tmp_path / "a" / "memory" / "000001-000.fa").exists()
    _, clients = go(tmp_path, rounds=1, **protected)
    assert clients.remembered["a"] == "000001-000", "of the answer that was sent again"
    assert clients.call(Drift().step, model=tensors_of(net())).sites == list(SITES)
    assert clients.remembered["a"] == "000001-001"


def test_the_reply_that_was_kept_first_goes_first(tmp_path) -> None:
    kept = Releases(Privacy(clip=0.1, noise=1.0), 4, tmp_path)
    names = lambda: [path.name[5] for path in sorted((tmp_path / "sent").iterdir())]  # noqa: E731
    for round, written in ((9, 10), (8, 30), (7, 20), (6, 20)):
        kept.keep(round, 0, "ab" * 32, b"reply", b"")
        path = tmp_path / "sent" / f"{round:06d}-000.fa"
        os.utime(path, ns=(written, written))
    kept.keep(1, 0, "ab" * 32, b"reply", b"")
    assert names() == ["1", "6", "7", "8"], "9 was the oldest, whatever its number"
    kept.keep(2, 0, "ab" * 32, b"reply", b"")
    assert names() == ["1", "2", "7", "8"], "of equal age the first by name"
    assert kept.sent_before(2, 0, "ab" * 32) == (b"reply", b"") and kept.sent_before(2, 0, "cd" * 32) is None


def raising(error: type[Exception]) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_a_site_that_was_lost_in_training_was_not_lost_in_evaluation_alone(tmp_path) -> None:
    """Of a site that was lost twice in a round, the first reason is kept."""
    clients, records = federation(tmp_path, faults=Faults(on_lost="drop")), list[Any]()
    ask = clients.transport.ask

    def without(questions, deadline):
        yield "b", "gone"
        yield from ask([question for question in questions if question.site != "b"], deadline)

    def evaluate(_: State) -> list[Any]:
        clients.calls.append(Call("evaluate", {}, {}, {"a": "too late", "b": "too late"}))
        return []

    clients.transport.ask = without  # type: ignore[method-assign]
    run(Drift(), net(), clients, 1, evaluate=evaluate, after_round=records.append)
    assert records[-1].log["lost"] == {"a": "evaluate: too late", "b": "step: gone"}


def test_what_was_spent_is_not_forgotten_where_the_busiest_sites_are_lost(tmp_path, monkeypatch) -> None:
    """Three rounds without b, then one of b alone: ε stays that of the others, also after a resume."""
    drop = Faults(on_lost="drop", min_sites=1)
    clients = federation(tmp_path, privacy=Privacy(clip=0.1, noise=5.0), faults=drop)
    ask, folder = clients.transport.ask, RunFolder(tmp_path / "run")

    def without(questions, deadline):
        gone = {"b"} if questions[0].round < 4 else {"a", "c", "d"}
        yield from ((question.site, "gone") for question in questions if question.site in gone)
        yield from ask([question for question in questions if question.site not in gone], deadline)

    clients.transport.ask = without  # type: ignore[method-assign]
    run(Drift(), net(), clients, 4, after_round=folder.save)
    spent = [log["epsilon"] for log, _ in folder.records()[1:]]
    assert spent[0] < spent[1] < spent[2] == spent[3]
    told = [log["released"] for log, _ in folder.records()[3:]]
    assert [(of["most"], of["fewest"]) for of in told] == [(3, 3), (3, 1)]
    assert _released(folder) == clients.released == Released(most=3, fewest=1)
    # a round that was summed and then broke off, or whose state was damaged, has released all the same
    clients.keep_released = partial(_keep_released, folder)
    clients.begin(5)
    nine = Call("f", {"a": {"releases": 9}}, {}, {})
    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(ServerPipeline, "epsilon", raising(MemoryError))
        clients._accounted(nine)
    assert _released(folder) == clients.released == Released(most=9, fewest=1), "kept, though ε is not known"
    assert _released(folder).epsilon is None
    assert clients._accounted(nine).released == Released(9, 1)
    assert _released(folder) == Released(most=9, fewest=1)
    assert _released(folder).epsilon == clients.pipeline.epsilon(9, 1) > spent[-1], "as the report shows it"


def test_a_site_that_counts_anew_is_added_up(tmp_path) -> None:
    """The sites come back with empty folders, as with another --state: what they had sent before is no less known."""
    folder = RunFolder(tmp_path / "run")
    private = Privacy(clip=0.1, noise=5.0)
    first = federation(tmp_path, privacy=private)
    first.keep_released = partial(_keep_released, folder)
    state = run(Drift(), net(), first, 3, after_round=folder.save)
    for site in SITES:
        shutil.rmtree(tmp_path / site)
    then = federation(tmp_path, privacy=private)
    then.released = _released(folder)
    assert then.released.most == 3
    run(Drift(), net(), then, 6, state=replace(state, rounds=6), after_round=folder.save)
    assert (tmp_path / "a" / "exchange" / "releases.txt").read_text().split()[0] == "3"
    assert then.released.most == 6 and then.released.sites["a"][:2] == (3, 3)
    assert then.calls[-1].epsilon == then.pipeline.epsilon(6, len(SITES))


def test_a_site_that_is_restored_to_an_older_copy_has_sent_more(tmp_path) -> None:
    """The copy is of before its last answer, which it gives anew with other noise where the call is done again."""
    clients = federation(tmp_path, privacy=Privacy(clip=0.1, noise=5.0))
    ask = lambda: {s: r["model"]["weight"] for s, r in clients.call(Drift().step, model=tensors_of(net()))}  # noqa: E731
    for number in (1, 2, 3):
        if number == 3:
            shutil.copytree(tmp_path / "a", tmp_path / "copy")
        clients.begin(number)
        first = ask()
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "copy").rename(tmp_path / "a")
    clients.begin(3)
    again = ask()
    assert torch.equal(first["b"], again["b"]) and not torch.equal(first["a"], again["a"])
    assert clients.released.sites["b"][:2] == (0, 3), "the very answer of then"
    assert clients.released.sites["a"][:2] == (3, 3) and clients.released.most == 6
    assert set(clients.calls[-1].logs["a"]) == {"releases"}


def test_an_answer_that_an_older_version_kept_is_taken(tmp_path) -> None:
    """It has no number that was drawn for it, and the memory that it names is not kept with it."""
    clients = federation(tmp_path, privacy=Privacy(clip=0.1, noise=5.0))
    ask = lambda: {s: r["model"]["weight"] for s, r in clients.call(Drift().step, model=tensors_of(net()))}  # noqa: E731
    clients.begin(1)
    first = ask()
    for file in tmp_path.glob("?/exchange/sent/*.fa"):
        mark, kept = file.read_bytes()[:32], wire.decode(file.read_bytes()[40:])
        del kept["log"]["drawn"]
        file.write_bytes(mark + wire.encode(kept))
    clients.released = replace(clients.released, heard={"1/0": dict.fromkeys(SITES, 1)})
    clients.begin(1)
    again = ask()
    assert all(torch.equal(first[site], again[site]) for site in SITES)
    assert clients.released.most == 1 and clients.drawn == {}


def test_the_very_answer_of_then_is_not_counted_twice() -> None:
    """A run whose last rounds are damaged asks them again, and the sites send what they keep, with the counts of then."""
    released, of = Released(), {"a": 5, "b": 6}
    answer = lambda n: {"releases": {"a": n, "b": n}, "drawn": {"a": 10 * n, "b": 20 * n}, "call": f"{n}/0"}  # noqa: E731
    for number in (1, 2, 3):
        released = released.after(**answer(number), series=of)
    again = released.after(**answer(2), series=of).after(**answer(3), series=of)
    assert again.most == 3 and again.sites == {"a": (0, 3, 5), "b": (0, 3, 6)}


def test_another_answer_with_the_same_count_is_counted() -> None:
    """A site that was restored to before its answer has none to send again: it adds other noise, and counts as far as then."""
    released = Released()
    for number in (1, 2, 3):
        released = released.after({"a": number}, series={"a": 5}, drawn={"a": number}, call=f"{number}/0")
    restored = released.after({"a": 3}, series={"a": 5}, drawn={"a": 9}, call="3/0")
    assert restored.most == 6 and restored.sites["a"] == (3, 3, 5), "no less than the 4 that were sent"
    assert restored.after({"a": 3}, series={"a": 5}, drawn={"a": 9}, call="3/0").most == 6


@pytest.mark.parametrize(
    ("told", "series", "sites", "most"),
    [
        (4, 5, (0, 4, 5), 4),
        (1, 7, (3, 1, 7), 4),  # the folder was lost
        (3, 7, (3, 3, 7), 6),  # so, and the site sent in vain since
        (9, 7, (3, 9, 7), 12),
        (3, 5, (3, 3, 5), 6),  # an older copy of the folder counts on from where it was
        (2, 5, (3, 2, 5), 5),
    ],
)
def test_a_folder_that_was_lost_is_told_by_its_series(told: int, series: int, sites: Any, most: int) -> None:
    released = Released()
    for number in (1, 2, 3):
        released = released.after({"a": number}, series={"a": 5}, call=f"{number}/0")
    found = released.after({"a": told}, series={"a": series}, call="4/0")
    assert (found.sites["a"], found.most) == (sites, most)
    in_that_call = released.after({"a": 3}, series={"a": 7}, call="3/0")
    assert in_that_call.sites["a"] == (3, 3, 7), "the same count of another folder is another answer"


def test_what_was_counted_before_there_were_series_goes_on() -> None:
    """released.json of an older version has pairs."""
    old = Released(most=3, fewest=2, sites={"a": [0, 3]}, heard={"3/0": {"a": 3}})
    assert old.after({"a": 4}, series={"a": 5}, call="4/0").sites["a"] == (0, 4, 5)
    assert old.after({"a": 3}, series={"a": 5}, call="3/0").sites["a"] == [0, 3], "the very answer of then"
    new = old.after({"a": 3}, series={"a": 5}, drawn={"a": 7}, call="3/0")
    assert new.sites["a"] == (3, 3, 5), "which had no number drawn for it"
    assert old.after({"a": 1}, series={"a": 5}, call="4/0").sites["a"] == (3, 1, 5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plain: [], "holds a list; an object is expected"),
        (lambda plain: plain | {"most": "x"}, 'most is "x"; a whole number is expected'),
        (lambda plain: plain | {"most": 1}, "was changed after the run wrote it"),
        (lambda plain: plain | {"sites": {"a": "b"}}, "was changed after the run wrote it"),
    ],
)
def test_a_damaged_count_of_releases_is_named(tmp_path, change, text) -> None:
    folder = RunFolder(tmp_path)
    _keep_released(folder, Released(3, 2, {"a": (0, 3, 5)}, {"3/0": {"a": 3}}, 1.5))
    assert _released(folder).sites == {"a": [0, 3, 5]} and _released(folder).epsilon == 1.5
    file = tmp_path / "released.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(RunFolderError, match=rf"released\.json: {text}"):
        _released(folder)


def test_a_call_that_breaks_off_counts_for_who_answered(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    clients = federation(tmp_path, privacy=Privacy(clip=0.1, noise=5.0))
    clients.keep_released = partial(_keep_released, folder)
    clients.transport = Tampered(
        clients.transport, lambda q: "gone" if q.site == "d" and q.round == 3 else None
    )
    with pytest.raises(SiteLost, match="round 3"):
        run(Drift(), net(), clients, 5, after_round=folder.save)
    assert (tmp_path / "a" / "exchange" / "releases.txt").read_text().split()[0] == "3"
    assert _released(folder) == clients.released == Released(most=3, fewest=3)
    assert len(clients.calls) == 0, "it is no call of a complete round"


@pytest.mark.parametrize(
    ("step", "most", "fewest"),
    [("secure_share", 2, 4), ("step", 3, 4), ("secure_reveal", 3, 4)],
)
def test_a_sum_that_breaks_off_counts_as_far_as_it_can_be_seen(tmp_path, step, most, fewest) -> None:
    """Masked answers are counted by their sites, but a sum that was not opened is of no fewer sites than the others."""
    central = Privacy(clip=0.1, noise=5.0, mode="central")
    clients = federation(tmp_path, method=Even(), secure=Secure(), privacy=central)
    lose = lambda q: "gone" if q.site == "d" and q.round == 3 and q.function == step else None  # noqa: E731
    clients.transport = Tampered(clients.transport, lose)
    with pytest.raises(SiteLost, match="round 3"):
        run(Even(), net(), clients, 5)
    assert clients.released == Released(most, fewest)


def test_a_sum_that_could_be_opened_counts_with_its_sites(tmp_path) -> None:
    """Two sites are lost, one before its masked answer, one when the masks are to be lifted: the server has three answers, and
    too few secrets by its own rule, but a sum of three might be opened."""
    central = Privacy(clip=0.1, noise=5.0, mode="central")
    clients = federation(
        tmp_path, method=Even(), faults=Faults(on_lost="drop", min_sites=3), secure=Secure(), privacy=central
    )
    gone = {"step": "d", "secure_reveal": "c"}
    clients.transport = Tampered(
        clients.transport, lambda q: "gone" if q.site == gone.get(q.function) else None
    )
    with pytest.raises(SiteLost, match="secure_reveal"):
        run(Even(), net(), clients, 1)
    assert clients.released == Released(most=1, fewest=3)


# ---------------------------------------------------------------------------------------------- secure aggregation


@pytest.mark.parametrize("method", [Drift(), Even()])
def test_the_secure_sum_is_the_mean_within_its_quantum(tmp_path, method) -> None:
    plain, _ = go(tmp_path / "plain", rounds=1, method=method)
    summed, clients = go(tmp_path / "summed", rounds=1, method=method, secure=Secure(bits=24))
    weights = sum(ord(name) - 90 for name in SITES) if method.summed == "cases" else 4
    quantum = 4 * 2**-25 / weights
    for name in ("weight", "bias"):
        # beside the quantum: the plain mean and the sum are each rounded to float32 once
        assert (plain.model[name] - summed.model[name]).abs().max() <= quantum + 2.0**-23 * 2
    assert clients.models is None, "no local model is known to the server"


def test_what_leaves_a_site_is_masked(tmp_path) -> None:
    clients = federation(tmp_path, secure=Secure())
    seen: dict[str, Any] = {}

    def look(question) -> None:
        if question.function == "step":
            seen[question.site] = wire.decode(question.reply.read_bytes())["value"]

    clients.transport = Tampered(clients.transport, look)
    clients.begin(1)
    clients.call(Drift().step, model=tensors_of(net()))
    assert {tuple(value) for value in seen.values()} == {("masked",)}
    # of the 64 bits of a fixed-point number below 8 the upper 30 say nothing; under the mask they are random
    high = seen["a"]["masked"].abs() >> 40
    assert (high > 0).float().mean() > 0.9
    lines = read_log(tmp_path / "a" / "egress.jsonl")
    assert [line["function"] for line in lines] == [
        "secure_advertise",
        "secure_share",
        "step",
        "secure_reveal",
    ]
    assert "value/n" not in lines[2]["contents"]


@pytest.mark.parametrize("stage", ["secure_advertise", "secure_share", "step", "secure_reveal"])
def test_a_site_may_be_lost_at_any_step(tmp_path, stage: str) -> None:
    def without(folder: Path, when: str, **terms) -> State:
        clients = federation(folder, faults=Faults(on_lost="drop"), **terms)
        lose = lambda q: "gone" if q.site == "b" and q.function == when else None  # noqa: E731
        clients.transport = Tampered(clients.transport, lose)
        state = run(Drift(), net(), clients, 1)
        assert set(clients.calls[-1].lost) == {"b"}
        assert set(clients.lost) == (set() if when == "secure_reveal" else {"b"}), "whose models are missing"
        return state

    summed = without(tmp_path / "summed", stage, secure=Secure())
    if stage == "secure_reveal":  # its masked model was there already, and is in the sum
        plain, _ = go(tmp_path / "plain", rounds=1)
    else:
        plain = without(tmp_path / "plain", "step")
    for name in ("weight", "bias"):
        assert (plain.model[name] - summed.model[name]).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("secure_advertise", "2 sites advertised their keys"),
        ("step", "2 sites are left"),
        ("secure_reveal", "2 sites revealed their shares"),
    ],
)
def test_too_few_for_a_secure_sum_is_told(tmp_path, step: str, told: str) -> None:
    clients = federation(tmp_path, faults=Faults(on_lost="drop"), secure=Secure())
    clients.transport = Tampered(
        clients.transport, lambda q: "gone" if q.site in "bc" and q.function == step else None
    )
    with pytest.raises(SiteLost) as error:
        run(Drift(), net(), clients, 1)
    assert f"{told}, 3 are needed" in str(error.value)


def test_a_site_does_not_send_its_model_in_the_open(tmp_path) -> None:
    """A server that leaves the steps out gets nothing."""
    clients = federation(tmp_path, secure=Secure())
    clients.pipeline.terms = Terms()
    with pytest.raises(SiteLost, match="sent masked only"):
        run(Drift(), net(), clients, 1)


@dataclass(frozen=True)
class Counting(Even):
    """Every site tells how often it has trained, by its own memory."""

    @at_site
    def step(self, site, model) -> dict:
        times = site.memory["times"] = site.memory.get("times", 0) + 1
        site.log(times=float(times))
        return {"model": dict(model), "n": site.n_train}


def times_of(clients: SiteClients, round: int) -> dict[str, float | None]:
    clients.begin(round)
    Counting().round(State(tensors_of(net()), round=round - 1), clients)
    return {site: log.get("times") for site, log in clients.calls[-1].logs.items()}


@pytest.mark.parametrize("terms", [{}, {"secure": Secure()}])
def test_a_round_that_is_done_again_begins_with_the_memory_of_then(tmp_path, terms) -> None:
    clients = federation(tmp_path, method=Counting(), **terms)
    assert times_of(clients, 1) == dict.fromkeys(SITES, 1.0)
    remembered = dict(clients.remembered)
    assert times_of(clients, 2) == dict.fromkeys(SITES, 2.0)
    resumed = federation(tmp_path, method=Counting(), **terms)
    resumed.remembered = remembered  # as a run does that goes on after round 1
    assert times_of(resumed, 2) == dict.fromkeys(SITES, 2.0)


@pytest.mark.parametrize("terms", [{}, {"secure": Secure()}])
def test_a_lost_site_begins_with_the_memory_of_its_last_answer_that_counted(tmp_path, terms) -> None:
    clients = federation(tmp_path, method=Counting(), faults=Faults(on_lost="drop"), **terms)

    def late(question) -> None:
        if (question.site, question.round, question.function) == ("d", 2, "step"):
            question.reply.unlink()

    clients.transport = Tampered(clients.transport, late)
    for round, expected in ((1, 1.0), (2, None), (3, 2.0)):
        assert times_of(clients, round).get("d") == expected, round


@dataclass(frozen=True)
class Odd(Drift):
    @at_site
    def step(self, site, model) -> dict:
        site.log(series=math.nan)
        return {"model": dict(model), "n": site.n_train}


def test_a_number_that_is_called_as_the_series_of_releases_is_a_number(tmp_path) -> None:
    _, clients = go(tmp_path, rounds=1, method=Odd())
    assert math.isnan(clients.calls[-1].logs["a"]["series"])


def test_all_together(tmp_path) -> None:
    private = Privacy(clip=1e6, noise=0.0, mode="central")
    plain, _ = go(tmp_path / "plain", method=Even())
    both, clients = go(
        tmp_path / "both", method=Even(), secure=Secure(), privacy=private, comm=Comm(down="bf16")
    )
    assert (plain.model["weight"] - both.model["weight"]).abs().max() < 5e-3
    assert clients.calls[-1].logs["a"]["releases"] == 3


# ------------------------------------------------------------------------------------------------- what is refused


class Richer(Drift):
    summed = None


class Classes(Drift):
    sends = {"model": "model", "n": "cases", "classes": "classes"}  # noqa: RUF012


class Pooled(Drift):
    pooled = True


class Own(Drift):
    own_tensors = True


class Twice(Drift):
    sends = {"step": Drift.sends, "teach": {"model": "model"}}  # noqa: RUF012

    @at_site
    def teach(self, site, model) -> dict:
        return {"model": model}


@pytest.mark.parametrize(
    ("method", "given", "text"),
    [
        (Richer(), {"secure_sum": Secure()}, "needs the model of every site by itself"),
        (Classes(), {"secure_sum": Secure()}, "answers step with classes beside one model"),
        (Classes(), {"private": Privacy(clip=1, noise=1)}, "answers step with classes"),
        (Pooled(), {"private": Privacy(clip=1, noise=1)}, "has no site to protect"),
        (Drift(), {"secure_sum": Secure(), "comm": Comm(up="int8")}, "cannot be compressed"),
        (Drift(), {"private": Privacy(clip=1, noise=1, mode="central")}, "without secure aggregation"),
        (
            Drift(),
            {"private": Privacy(clip=1, noise=1, mode="central"), "secure_sum": Secure()},
            "needs equal weights",
        ),
        (Drift(), {"secure_sum": Secure(threshold=2)}, "2"),
        (
            Own(),
            {"comm": Comm(up="topk")},
            "tensors that are a site's own.*counted twice; use int8, bf16 or none",
        ),
        (
            Own(),
            {"private": Privacy(clip=1, noise=0)},
            "privacy: method drift trains from tensors that are a site's own.*choose a method that averages models",
        ),
        (
            FedNorm(),
            {"private": Privacy(clip=1, noise=1)},
            "privacy: method drift trains from tensors that are a site's own",
        ),
        (Twice(), {"comm": Comm(up="topk")}, "answers models by step, teach, one of which is not asked"),
    ],
)
def test_what_does_not_go_together_is_told(method, given: dict, text: str) -> None:
    given = {"comm": Comm(), "private": None, "secure_sum": None} | given
    with pytest.raises(FederationError, match=text):
        terms_of(method, "drift", **given, sites=4)


def test_an_answer_that_leaves_again_is_logged_again(tmp_path) -> None:
    clients = federation(tmp_path, privacy=Privacy(clip=0.1, noise=5.0))
    for _ in range(2):
        clients.begin(1)
        clients.call(Drift().step, model=tensors_of(net()))
    first, second = read_log(tmp_path / "a" / "egress.jsonl")
    assert first["sha256"] == second["sha256"] and first["bytes"] == second["bytes"]
    assert list(second["contents"].values()) == ["the very answer that was sent before"]


def test_an_answer_that_leaves_again_is_of_the_installation_that_the_site_is_now(tmp_path) -> None:
    """A kit that was moved before an interrupted round is done again has another name, and the same noise."""
    ask = lambda c: c.call(Drift().step, model=tensors_of(net()))  # noqa: E731
    private, answers = Privacy(clip=0.1, noise=1.0), []
    for place in ("old", "new"):
        clients = federation(tmp_path, instance=place, privacy=private)
        clients.instances = dict.fromkeys(SITES, place)  # as they joined
        clients.begin(1)
        answers.append({site: reply["model"]["weight"] for site, reply in ask(clients)})
        assert clients.answering == clients.instances and clients.calls[-1].logs["a"]["releases"] == 1
    first, again = answers
    assert all(torch.equal(first[site], again[site]) for site in SITES)


def test_the_secret_of_a_sum_is_for_its_user_alone_and_goes_with_the_next_sum(tmp_path) -> None:
    clients, modes = federation(tmp_path, secure=Secure()), set()

    def look(question) -> None:
        (file,) = (tmp_path / question.site / "exchange").glob("secret-*.fa")
        modes.add((question.function, file.stat().st_mode & 0o777))

    clients.transport = Tampered(clients.transport, look)
    run(Drift(), net(), clients, 2)
    steps = ("secure_advertise", "secure_share", "step", "secure_reveal")
    assert modes == {(step, 0o600) for step in steps}


def test_a_change_that_is_sent_again_finds_the_model_it_is_of(tmp_path) -> None:
    server, here = HeldByAll(Comm(down="bf16")), HeldHere("a", tmp_path)
    model = tensors_of(net())
    sent = [
        server.send({n: v + k if v.is_floating_point() else v for n, v in model.items()}) for k in range(3)
    ]
    *_, third = (here.receive(one) for one in sent)
    again = here.receive(sent[2])
    assert all(torch.equal(again[name], third[name]) for name in model)
    assert len(list(tmp_path.glob("*.fa"))) == 2
    with pytest.raises(NotHeld):
        here.receive(sent[1])


def age(folder: Path, hours: float) -> None:
    """What is there was written by a clock that was so far ahead."""
    for path in folder.glob("*.fa"):
        os.utime(path, ns=(path.stat().st_mtime_ns + int(hours * 3.6e12),) * 2)


def test_a_clock_that_is_set_back_takes_no_model_from_a_site(tmp_path) -> None:
    server, here = HeldByAll(Comm(down="int8")), HeldHere("a", tmp_path)
    model = tensors_of(net())
    for k in range(5):
        moved = {n: v + 0.1 * k if v.is_floating_point() else v for n, v in model.items()}
        sent = server.send(moved)
        for _ in range(2):  # the second time to a round that is done again
            held = here.receive(sent)
            assert server.model is not None
            assert all(torch.equal(held[name], server.model[name]) for name in model)
        if k == 1:
            age(tmp_path, 1.0)
    assert len(list(tmp_path.glob("*.fa"))) == 2


def test_a_model_that_changes_are_of_is_kept_for_the_next(tmp_path) -> None:
    """A server that resumed goes on from the model before the last, and may ask twice."""
    server, here = HeldByAll(Comm(down="bf16")), HeldHere("a", tmp_path)
    moved = lambda k: {n: v + k if v.is_floating_point() else v for n, v in tensors_of(net()).items()}  # noqa: E731
    here.receive(server.send(moved(0)))
    kept = server.kept()
    here.receive(server.send(moved(1)))
    server.resume(kept)
    sent = server.send(moved(2))
    first, again = here.receive(sent), here.receive(sent)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_clock_that_is_set_back_takes_no_reply_from_a_site(tmp_path) -> None:
    kept = Releases(Privacy(clip=0.1, noise=1.0), 4, tmp_path)
    for round in range(1, 10):
        kept.keep(round, 0, "ab" * 32, b"reply", b"")
        if round == 5:
            age(tmp_path / "sent", 1.0)
    assert [path.name[5] for path in sorted((tmp_path / "sent").iterdir())] == ["6", "7", "8", "9"]


def test_a_lost_site_takes_its_noise_out_of_the_epsilon_of_a_sum(tmp_path) -> None:
    private = Privacy(clip=0.1, noise=5.0, mode="central")
    terms = {"method": Even(), "secure": Secure(bits=30), "privacy": private}
    clients = federation(tmp_path, faults=Faults(on_lost="drop"), **terms)
    clients.transport = Tampered(
        clients.transport, lambda q: "gone" if q.site == "b" and q.function == "step" else None
    )
    run(Even(), net(), clients, 1)
    found = clients.calls[-1].epsilon
    assert found == pytest.approx(epsilon(5.0 * math.sqrt(3 / 4), 1, private.delta))
    assert found > epsilon(5.0, 1, private.delta)


def test_what_is_scored_on_the_files_own_grid_travels_exactly() -> None:
    server, model = ServerPipeline(Terms(comm=Comm(down="bf16"))), tensors_of(net())
    for grid, exact in (("original", True), ("federation", False)):
        arguments = {"members": [{"model": model, "classes": None}], "grid": grid}
        sent = server.pack(arguments, {}).sent["members"][0]["model"]
        assert (sent is model) is exact and ("whole" in sent) is not exact


def test_plain_values_may_not_take_the_room_of_tensors(tmp_path) -> None:
    clients = federation(tmp_path, faults=Faults(on_lost="drop"))

    def swell(question) -> None:
        if question.site == "b":
            tree = wire.decode(question.reply.read_bytes())
            tree["value"] = {"model": {}, "n": 8, "more": ""}
            tree["value"]["more"] = "x" * (question.most - len(wire.encode(tree)) - 100)
            question.reply.write_bytes(wire.encode(tree))

    clients.transport = Tampered(clients.transport, swell)
    run(Drift(), net(), clients, 1)
    assert "plain values and names of" in clients.lost["b"], "and they were not parsed"


def test_a_newest_round_without_what_sites_hold_falls_back_to_the_one_before(tmp_path) -> None:
    folder, held = RunFolder(tmp_path / "run"), {"train": {"model": tensors_of(net()), "stands_for": ""}}
    clients = federation(tmp_path)
    run(Drift(), net(), clients, 2, after_round=lambda record: folder.save(record, held=held))
    file = folder.rounds / "0002" / "held.fa"
    file.write_bytes(file.read_bytes()[:-3])
    assert folder.latest(Drift()).round == 1 and folder.complete() == [0, 1]
