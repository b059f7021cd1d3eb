"""What a site may not answer: it is lost for the call, by name and with the reason, and the federation goes on by its
rule. Every hostile answer here comes from a site that is otherwise as the others are."""

import json
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deployments import until
from test_local import SPACE, Tampered, Walk, clients, equal, net, silent, tamper
from test_pipeline import Drift
from test_pipeline import federation as protected
from test_pipeline import net as linear

from fedatlas.core.errors import FederationError, SiteLost
from fedatlas.core.labels import LabelSpace
from fedatlas.evaluation.classification import Histogram, score_edges
from fedatlas.evaluation.evaluate import Evaluation
from fedatlas.evaluation.images import ImageEvaluator
from fedatlas.evaluation.voxels import VoxelEvaluator
from fedatlas.federation.across import _compare
from fedatlas.federation.design import Experiment
from fedatlas.federation.facts import problem_of_hello, problem_of_join, problem_of_layout
from fedatlas.federation.file import parse_federation
from fedatlas.transport import reply, wire
from fedatlas.transport.clients import Faults, SiteClients
from fedatlas.transport.egress import Asked, Declaration
from fedatlas.transport.frames import Question
from fedatlas.transport.pipeline import ServerPipeline
from fedatlas.transport.protection.compression import Comm
from fedatlas.transport.protection.privacy import Privacy
from fedatlas.transport.protection.secure import Secure
from fedatlas.transport.relay import JobEnd, ServerRelay, SiteRelay, forward
from fedatlas.transport.rounds import run

DROP = Faults(on_lost="drop")  # type: ignore[call-arg]
Change = Callable[[dict[str, Any]], object]


def value(**changes: Any) -> Change:
    return lambda tree: tree["value"].update(changes)


def weight(tensor: Any) -> Change:
    return lambda tree: tree["value"]["model"].update(weight=tensor)


HOSTILE: list[tuple[Change, str]] = [
    (lambda t: t["value"].pop("model"), "missing: model"),
    (value(model=[1, 2]), "'model' is declared as 'model', but is a list of 2"),
    (value(model="a model"), "but is a str"),
    (value(model={}), "lacks the tensors weight, bias"),
    (lambda t: t["value"]["model"].pop("bias"), "lacks the tensors bias"),
    (value(secret=torch.zeros(5)), "not declared: secret"),
    (value(**{f"k{i}": 0 for i in range(1000)}), r"not declared: k0, k1, .* and 994 more"),
    (value(**{f"k{i}": 0 for i in range(100_000)}), "bytes; one that holds what is declared has at most"),
    (value(**{"a" * 500_000: 1}), r"not declared: a{80}…$"),
    (weight([1.0]), "holds 'weight', a list of 1"),
    (weight(torch.zeros(2, 1)), r"'weight' is float32\[2, 1\], in the net it is float32\[1, 2\]"),
    (weight(torch.zeros(1, 2).double()), r"'weight' is float64"),
    (weight(torch.tensor([[0.0, np.inf]])), "a number that is not finite, in 'model'"),
    (value(n=1e308), r"'n' is declared as 'cases', but is 1e\+308, not a number of cases"),
    (value(n=10**400), "but is a whole number beyond 2\\^64"),
    (value(n=True), "but is a bool"),
    (value(n=float("nan")), "but is nan"),
    (value(n=-3), "but is -3"),
    (value(n=0), "but is 0"),
    (value(n=2.0), "but is 2"),
    (value(n="8"), "but is a str"),
    (value(n=[8]), "but is a list of 1"),
    (lambda t: t.update(value=None), "answered a NoneType; functions at a site return a dict"),
    (lambda t: t.update(value="x"), "answered a str"),
    (lambda t: t.update(more=1), "or holds more than an answer does"),
    (lambda t: t.pop("log"), "lacks its log"),
    (lambda t: t.update(log=[1]), "its log is a list"),
    (lambda t: t["log"].update(loss="=1+1"), "logs 'loss', which is a str"),
    (lambda t: t["log"].update(loss=10**400), "logs 'loss', which is a whole number"),
    (lambda t: t["log"].update(loss=True), "logs 'loss', which is a bool"),
    (lambda t: t["log"].update({"=cmd": 1.0}), "logs '=cmd'"),
    (lambda t: t["log"].update({"a" * n: 1.0 for n in range(1, 40)}), "logs 40 numbers"),
    (lambda t: t["log"].update(releases=1.0), "counts releases"),
    (lambda t: t["cost"].update(seconds=-1.0), "its cost is not seconds and peak_mb"),
    (lambda t: t["cost"].update(seconds=float("inf")), "its cost is not"),
    (lambda t: t["cost"].update(peak_mb="much"), "its cost is not"),
    (lambda t: t.update(cost={}), "its cost is not"),
    (lambda t: t.update(memory=7), "does not name the version of its memory"),
    (lambda t: t.update(memory="../../x"), "does not name the version"),
    (lambda t: t.update({"from": 3}), "which installation it is from"),
    (lambda t: t.update({"from": "\x1b[2J"}), "which installation it is from"),
    (lambda t: t.update(error="boom"), "an error that says nothing"),
    (lambda t: t.update(error={"code": "=cmd|x"}), "an error that says nothing"),
    (lambda t: t.update(error={"code": "ValueError", "text": "\x1b[2Jgone"}), r"^ValueError: \?\[2Jgone$"),
    (lambda t: t.update(error={"code": "ValueError", "text": "x" * 10**5}), r"^ValueError: x+…$"),
    (lambda t: t.update(error={"code": "NotHeld", "text": "again"}), "NotHeld: again"),
    (lambda t: t["to"].update(site="a" * 10**5), "another question"),
    (lambda t: t["to"].update(round=torch.tensor(1)), "not the reply of a site"),
    (lambda t: t["to"].update(call=torch.zeros(5)), "not the reply of a site"),
    (lambda t: t["to"].update(call=False), "not the reply of a site"),
]


@pytest.mark.parametrize(("change", "reason"), HOSTILE)
def test_a_hostile_answer_costs_the_site_its_place_and_nobody_else(tmp_path, change, reason: str) -> None:
    asked = tamper(clients(tmp_path / "hostile", Walk(), faults=DROP), "b", change)
    state = run(Walk(), net(), asked, 1)
    assert list(asked.lost) == ["b"] and re.search(reason, asked.lost["b"]), asked.lost
    assert len(asked.lost["b"]) < 5000
    assert equal(state, alone(tmp_path))


def test_what_nobody_thought_of_costs_the_site_its_place(tmp_path, monkeypatch) -> None:
    opened = reply.opened

    def fails(tree: Any, question: Question, *more: Any) -> Any:
        if question.site == "b":
            raise RuntimeError("no such case")
        return opened(tree, question, *more)

    monkeypatch.setattr(reply, "opened", fails)
    asked = clients(tmp_path, Walk(), faults=DROP)
    run(Walk(), net(), asked, 1)
    assert asked.lost == {"b": "its answer cannot be used (RuntimeError: no such case)"}


ALONE: list[Any] = []


def alone(folder: Path) -> Any:
    """The state that the other sites make without b."""
    if not ALONE:
        ALONE.append(run(Walk(), net(), silent(clients(folder / "alone", Walk(), faults=DROP), "b"), 1))
    return ALONE[0]


def raw(question: Question, inner: str, tensors: bytes = b"", **entries: Any) -> bytearray:
    """A message whose value is this JSON, with a digest that is right."""
    head = {name: getattr(question, name) for name in ("site", "function", "round", "call")}
    tree = (
        f'["d",{{"to":["d",{json.dumps(head)}],"from":"","memory":"","log":["d",{{}}],'
        f'"cost":["d",{{"seconds":1,"peak_mb":1}}],"value":{inner}}}]'
    )
    text = json.dumps({"__metadata__": {"tree": tree}} | entries).encode()
    body = len(text).to_bytes(8, "little") + text + tensors
    import hashlib

    return bytearray(wire.MAGIC + hashlib.sha256(body).digest() + body)


def entry(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


WEIGHT = '["d",{"model":["d",{"weight":["t","0"],"bias":["t","1"]}],"n":1}]'
BIAS = entry("F32", [1], 8, 12)
RAW: list[tuple[Callable[[Question], bytearray], str]] = [
    (lambda q: raw(q, "[" * 5000 + "]" * 5000), "its header cannot be read"),
    (lambda q: raw(q, '["l",[' * 400 + "]]" * 400), "more than 100 deep|cannot be read"),
    (lambda q: raw(q, '["l"]'), "its structure cannot be read"),
    (lambda q: raw(q, '["d",[1]]'), "its structure cannot be read"),
    (lambda q: raw(q, '["t","9"]'), "its structure cannot be read"),
    (lambda q: raw(q, '["t",["0"]]'), "its structure cannot be read"),
    (lambda q: raw(q, '["x",{}]'), "its structure cannot be read"),
    (lambda q: raw(q, '{"n":1}'), "its structure cannot be read"),
    (lambda q: raw(q, "1" * 5000), "its header cannot be read"),
    (lambda q: raw(q, WEIGHT, bytes(12), **{"0": entry("F32", [1, -1], 0, 8), "1": BIAS}), "header cannot"),
    (lambda q: raw(q, WEIGHT, bytes(12), **{"0": entry("F32", [1, 2], -8, 0), "1": BIAS}), "header cannot"),
    (lambda q: raw(q, WEIGHT, bytes(12), **{"0": entry("F32", [1, 2], 8, 16), "1": BIAS}), "header cannot"),
    (lambda q: raw(q, WEIGHT, bytes(12), **{"0": entry("F32", [1, 2], 0, 12), "1": BIAS}), "header cannot"),
    (
        lambda q: raw(q, WEIGHT, bytes(12), **{"0": entry("F32", [0, 2**62, 2**62], 0, 0), "1": BIAS}),
        "header",
    ),
    (lambda q: raw(q, WEIGHT, bytes(12), **{"0": entry("F32", ["1", 2], 0, 8), "1": BIAS}), "header cannot"),
    (lambda q: raw(q, WEIGHT, bytes(12), **{"0": entry("object", [1, 2], 0, 8), "1": BIAS}), "header cannot"),
    (lambda q: raw(q, WEIGHT, bytes(12), **{"0": [], "1": BIAS}), "header cannot"),
    (lambda q: raw(q, WEIGHT, bytes(14), **{"0": entry("F32", [1, 2], 1, 9), "1": BIAS}), "header cannot"),
    (
        lambda q: raw(
            q, WEIGHT, bytes(12), **{"0": entry("F32", [1, 2], 0, 8), "1": entry("F32", [1], 4, 8)}
        ),
        "do not lie end to end in its 12 bytes",
    ),
    (
        lambda q: raw(
            q, WEIGHT, bytes(16), **{"0": entry("F32", [1, 2], 0, 8), "1": entry("F32", [1], 12, 16)}
        ),
        "do not lie end to end",
    ),
    (lambda q: raw(q, WEIGHT, bytes(16), **{"0": entry("F32", [1, 2], 0, 8), "1": BIAS}), "end to end"),
    (
        lambda q: raw(
            q,
            WEIGHT,
            bytes(12),
            **{"0": entry("F32", [1, 2], 0, 8), "1": BIAS, "x": entry("BOOL", [4], 8, 12)},
        ),
        "do not lie end to end",
    ),
    (
        lambda q: raw(
            q,
            WEIGHT,
            bytes(12),
            **{"0": entry("F32", [1, 2], 0, 8), "1": BIAS, "x": entry("BOOL", [0], 12, 12)},
        ),
        "its structure leaves out 1 of its tensors",
    ),
    (
        lambda q: raw(
            q,
            WEIGHT.replace('"1"', '"0"'),
            bytes(12),
            **{"0": entry("F32", [1, 2], 0, 8), "1": BIAS},
        ),
        "its structure cannot be read",
    ),
    (lambda q: bytearray(40), "do not begin as one of ours"),
    (lambda q: raw(q, "1")[:90], "truncated or damaged"),
]


def replaced(asked: SiteClients, site: str, make: Callable[[Question], bytes | bytearray]) -> SiteClients:
    def rewrite(question: Question) -> None:
        if question.site == site:
            question.reply.write_bytes(make(question))

    asked.transport = Tampered(asked.transport, rewrite)  # type: ignore[arg-type]
    return asked


@pytest.mark.parametrize(("make", "reason"), RAW)
def test_bytes_that_no_site_of_ours_makes(tmp_path, make, reason: str) -> None:
    asked = replaced(clients(tmp_path, Walk(), faults=DROP), "b", make)
    run(Walk(), net(), asked, 1)
    assert re.search(reason, asked.lost["b"]), asked.lost


def test_a_file_larger_than_an_answer_is_not_read(tmp_path, monkeypatch) -> None:
    asked = clients(tmp_path, Walk(), faults=DROP)

    def grow(question: Question) -> None:
        if question.site == "b":
            with question.reply.open("r+b") as file:
                file.truncate(400_000_000)

    asked.transport = Tampered(asked.transport, grow)  # type: ignore[arg-type]
    read: list[Path] = []
    whole = __import__("fedatlas.transport.pipeline", fromlist=["read_whole"]).read_whole
    monkeypatch.setattr(
        "fedatlas.transport.pipeline.read_whole", lambda path: read.append(path) or whole(path)
    )
    run(Walk(), net(), asked, 1)
    assert "its answer has 400,000,000 bytes; one that holds what is declared has at most" in asked.lost["b"]
    assert not [path for path in read if path.stem == "b"]


def test_no_tensor_is_read_of_an_answer_that_is_not_as_declared(tmp_path, monkeypatch) -> None:
    asked = tamper(clients(tmp_path, Walk(), faults=DROP), "b", value(secret=torch.zeros(1000)))
    read: list[tuple[str, ...]] = []
    tree = wire.Message.tree

    def listen(self: wire.Message, *, copy: bool = True) -> Any:
        read.append(tuple(str(entry) for entry in self.entries.values()))
        return tree(self, copy=copy)

    monkeypatch.setattr(wire.Message, "tree", listen)
    asked.call(Walk().step, model={k: v for k, v in net().state_dict().items()}, scale=1.0)
    assert "not declared: secret" in asked.lost["b"]
    assert any("(1, 2)" in entry for entries in read for entry in entries)
    assert not any("(1000,)" in entry for entries in read for entry in entries)


# ------------------------------------------------------------------------------------------ as the stages send


COMPRESSED: list[tuple[Change, str]] = [
    (lambda t: t["value"].update(model={"weight": torch.zeros(30, 40)}), "not a compressed difference"),
    (lambda t: t["value"].update(model={"difference": 3}), "is not compressed by int8"),
    (lambda t: t["value"]["model"]["difference"].update(kind="bf16"), "is not compressed by int8"),
    (lambda t: t["value"]["model"]["difference"].update(more=1), "got the keys"),
    (lambda t: t["value"]["model"]["difference"].update(codes=torch.zeros(2)), "codes is"),
    (lambda t: t["value"]["model"]["difference"].update(exact=[]), "its exact tensors are list"),
    (lambda t: t["value"]["model"]["difference"].update(digest="x"), "another|other names"),
]


@pytest.mark.parametrize(("change", "reason"), COMPRESSED)
def test_a_hostile_compressed_answer(tmp_path, change, reason: str) -> None:
    asked = tamper(protected(tmp_path, comm=Comm(up="int8"), faults=DROP), "b", change)  # type: ignore[call-arg]
    run(Drift(), linear(), asked, 1)
    assert list(asked.lost) == ["b"] and re.search(reason, asked.lost["b"]), asked.lost


SECURE: list[tuple[str, Change, str]] = [
    ("secure_advertise", value(answer=3), "'answer' is declared as 'public', but is 3"),
    ("secure_advertise", lambda t: t["value"]["answer"].pop("seal"), "not one of seal, mask, digest"),
    ("secure_advertise", lambda t: t["value"]["answer"].update(seal=torch.zeros(31)), r"not uint8\[32\]"),
    ("secure_share", lambda t: t["value"]["answer"].pop("a"), "not one of a, b, c, d"),
    (
        "secure_share",
        lambda t: t["value"]["answer"].update(a=[1]),
        r"holds for a a list of 1, not uint8\[92\]",
    ),
    ("step", value(masked=torch.zeros(5, dtype=torch.int64)), r"int64\[5\], not int64\[1231\]"),
    ("step", value(masked=torch.zeros(1231)), r"float32\[1231\], not int64"),
    ("step", value(model={}), "not declared: model"),
    ("secure_reveal", value(answer={}), "not seeds and keys"),
    ("secure_reveal", lambda t: t["value"]["answer"].update(keys=[1]), "of its keys is a list of 1"),
    ("secure_reveal", lambda t: t["value"]["answer"]["seeds"].update(a=None), "of its seeds holds for a"),
]


@pytest.mark.parametrize(("step", "change", "reason"), SECURE)
def test_a_hostile_step_of_secure_aggregation(tmp_path, step: str, change: Change, reason: str) -> None:
    asked = protected(tmp_path, secure=Secure(), faults=DROP)  # type: ignore[call-arg]
    asked = tamper(asked, "b", lambda t: change(t) if t["to"]["function"] == step else None)
    run(Drift(), linear(), asked, 1)
    assert re.search(reason, asked.calls[0].lost["b"]), asked.calls[0].lost


@pytest.mark.parametrize(
    "log",
    [
        {},
        {"releases": 1.0},
        {"releases": 1e308, "series": 1.0},
        {"releases": 20001.0, "series": 1.0},
        {"releases": 1.5, "series": 1.0},
        {"releases": 1.0, "series": 0.5},
        {"releases": 1.0, "series": 2.0**53},
        {"releases": 1.0, "series": 1.0, "loss": 2.0},
        {"releases": 1.0, "series": 1.0, "drawn": 0.5},
        {"releases": 1.0, "series": 1.0, "drawn": 2.0**53},
        {"releases": 1.0, "drawn": 1.0},
    ],
)
def test_privacy_without_an_honest_count_of_releases(tmp_path, log: dict[str, float]) -> None:
    private = Privacy(clip=1.0, noise=1.0)  # type: ignore[call-arg]
    asked = tamper(protected(tmp_path, privacy=private, faults=DROP), "b", lambda t: t.update(log=log))
    run(Drift(), linear(), asked, 1)
    assert (
        "under privacy it logs the number of its releases, their series and a number drawn for this one, and "
        "nothing else" in asked.lost["b"]
    )


# ------------------------------------------------------------------------------------------------- evaluation

ROW = {
    "split": "test", "grid": "original", "model": "best", "round": 3, "site": "b", "case": "case-1", "class": "a",
    "metric": "dice", "value": 0.5, "known": True, "reason": "",
}  # fmt: skip
ASKED = {"split": "test", "grid": "original", "model": "best", "round": 3, "metrics": ["dice", "hd95"]}


def evaluated(folder: Path, evaluator: Any, answer: dict[str, Any], kinds: dict[str, str]) -> SiteClients:
    """The call of an evaluation of two cases at site b, which gives this answer."""

    class Fake:
        def ask(self, questions, deadline):
            for q in questions:
                to = {name: getattr(q, name) for name in ("site", "function", "round", "call")}
                tree = {"to": to, "from": "", "memory": "", "value": answer, "log": {}}
                q.reply.write_bytes(wire.encode(tree | {"cost": {"seconds": 1.0, "peak_mb": 1.0}}))
                yield q.site, None

        def close(self) -> None: ...

    declaration = Declaration(
        {"evaluate": kinds},
        len(SPACE),
        asked=lambda site, _, payload: Asked(payload, scores=evaluator.scores(site, 2, **payload)),
    )
    asked = SiteClients(["b"], Fake(), folder, Faults(), pipeline=ServerPipeline(declaration=declaration))
    asked.call(evaluator.evaluate, **ASKED, members=[], overlays=False)
    return asked


def voxels() -> VoxelEvaluator:
    return VoxelEvaluator(Evaluation(), SPACE, (8, 8), 0)


def test_rows_as_asked_for_are_taken(tmp_path) -> None:
    rows = [ROW, ROW | {"metric": "hd95", "value": 203.0}, ROW | {"value": None, "reason": "empty"}]
    assert evaluated(tmp_path, voxels(), {"rows": rows}, {"rows": "rows"}).lost == {}


ROWS: list[tuple[Any, str]] = [
    ("rows", "'rows' is declared as 'rows', but is a str"),
    ({"a": 1}, "is a dict"),
    ([1, 2], "something else than rows"),
    (["dice"], "something else than rows"),
    ([{k: v for k, v in ROW.items() if k != "metric"}], "something else than rows"),
    ([ROW | {"more": 1}], "something else than rows"),
    ([ROW | {"value": "0.5"}], "a row's 'value' is a str"),
    ([ROW | {"value": True}], "a row's 'value' is a bool"),
    ([ROW | {"value": 1e9}], r"a row's dice is 1e\+09; it lies within 0 and 1"),
    ([ROW | {"value": -0.1}], "a row's dice is -0.1"),
    ([ROW | {"value": float("nan")}], "a row's 'value' is nan"),
    ([ROW | {"metric": "hd95", "value": 1e7}], r"a row's hd95 is 1e\+07"),
    ([ROW | {"value": 10**400}], "a row's 'value' is a whole number beyond"),
    ([ROW | {"site": "a"}], "a row's 'site' is 'a'; asked was for 'b'"),
    ([ROW | {"class": "liver"}], "a row's 'class' is 'liver'; asked was for 'a', 'background'"),
    ([ROW | {"metric": "asd"}], "a row's 'metric' is 'asd', which was not asked for"),
    ([ROW | {"model": "last"}], "a row's 'model' is 'last'"),
    ([ROW | {"split": "train"}], "a row's 'split' is 'train'"),
    ([ROW | {"grid": "federation"}], "a row's 'grid' is"),
    ([ROW | {"round": 9}], "a row's 'round' is 9"),
    ([ROW | {"round": True}], "a row's 'round' is a bool"),
    ([ROW | {"known": 1}], "a row's 'known' is 1"),
    ([ROW | {"case": "=cmd|' /C calc'!A0"}], "which a spreadsheet takes for a formula"),
    ([ROW | {"case": " @SUM(1)"}], "which a spreadsheet takes for a formula"),
    ([ROW | {"case": "-2+3+cmd|x"}], "which a spreadsheet takes for a formula"),
    ([ROW | {"case": "＝1+1"}], "which a spreadsheet takes for a formula"),
    ([ROW | {"reason": "a\tb"}], "a text with control characters"),
    ([ROW | {"reason": "x" * 201}], "a row's 'reason' is a str of 201 characters"),
    ([ROW] * 9, "holds 9 rows; 2 cases have at most 8"),
]


@pytest.mark.parametrize(("rows", "reason"), ROWS)
def test_hostile_rows_reach_no_table(tmp_path, rows: Any, reason: str) -> None:
    with pytest.raises(SiteLost) as caught:
        evaluated(tmp_path, voxels(), {"rows": rows}, {"rows": "rows"})
    assert "\n  b: its answer is not as declared: " in str(caught.value)
    assert re.search(reason, str(caught.value)), caught.value


def bins(n: int = 10, positive: int = 1) -> dict[str, Any]:
    scores = np.full(positive + 1, 0.5)
    return Histogram.of(scores, np.arange(positive + 1) > 0, score_edges(n)).to_dict()


@pytest.mark.parametrize(
    ("histograms", "reason"),
    [
        ({"liver": bins()}, "a histogram of 'liver', which is no class"),
        ({"a": bins(5)}, "bins that are not those of 10"),
        ({"a": bins(positive=7)}, "counts 8 of 2 cases"),
        ({"a": bins() | {"positives": [True] * (len(score_edges(10)) - 1)}}, "not whole numbers"),
        ({"a": bins() | {"edges": [0.0, 1e308]}}, "not those of `score_edges`"),
        ([1], "is a list of 1"),
    ],
)
def test_hostile_histograms_reach_no_sum(tmp_path, histograms: Any, reason: str) -> None:
    space = LabelSpace(("a", "b"), exclusive=False, level="image")
    evaluator = ImageEvaluator(Evaluation(histogram=10), space)
    kinds = {"rows": "rows", "histograms": "histograms"}
    fine = {"rows": [ROW | {"case": "", "metric": "n_positive", "value": 1.0}], "histograms": {"a": bins()}}
    assert evaluated(tmp_path / "fine", evaluator, fine, kinds).lost == {}
    with pytest.raises(SiteLost, match=reason):
        evaluated(tmp_path / "hostile", evaluator, fine | {"histograms": histograms}, kinds)


# ------------------------------------------------------------------------------------------------------- facts

HELLO = {"versions": {"torch": "2"}, "hash": "abc", "federation": "{}", "clock": 1e9}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"more": {"spacing": [1.0, 2.0]}}, None),
        ({"federation": "[" * 3000}, "says"),
        ({"federation": "3"}, "no mapping"),
        ({"versions": ["torch"]}, "versions"),
        ({"clock": "noon"}, "clock"),
        ({"more": float("nan")}, "not finite"),
        ({"more": {"=cmd|x": 1}}, "formula"),
    ],
)
def test_what_a_site_says_in_its_hello(change: dict[str, Any], reason: str | None) -> None:
    found = problem_of_hello(HELLO | change)
    assert found is None if reason is None else reason in str(found), found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"more": {"spacing": [1.0, 2.0]}}, None),
        ({"brings": None}, "brings"),
        ({"brings": {}}, "brings"),
        ({"brings": {"a": ["liver"]}}, "it may speak for b"),
        ({"brings": {"b": ["=cmd|x"]}}, "a spreadsheet takes for a formula"),
        ({"brings": {"b": "liver"}}, "brings"),
        ({"channels": None}, "channels"),
        ({"channels": True}, "channels"),
        ({"channels": 10**9}, "channels"),
        ({"channel_names": ["T1"]}, None),
        ({"channel_names": "T1"}, "channel_names"),
        ({"channel_names": ["=cmd|x"]}, "a spreadsheet takes for a formula"),
    ],
)
def test_what_a_site_says_of_its_data(change: dict[str, Any], reason: str | None) -> None:
    found = problem_of_layout("b", {"brings": {"b": ["liver"]}, "channels": 1, "channel_names": []} | change)
    assert found is None if reason is None else reason in str(found), found


SUMMARY = {
    "annotated": ["a"], "role": "train", "cases": {"train": 3, "validation": 1, "test": 0}, "labelled": {"a": 3},
    "voxels": {"a": 12}, "spacing": [[1.0, 1.0, 3.0]], "orientation": ["RAS"],
}  # fmt: skip
INPUTS = {
    "kinds": ["scan"], "axes": [3], "spacing": [[1.0, 1.0], [1.0, 1.0], [3.0, 3.0]], "percentiles": [[[0.0, 1.0]]],
    "values": 200, "modalities": [""], "colour": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"cases": {"train": 3}}, "cases.validation"),
        ({"cases": {"train": -3, "validation": 1, "test": 0}}, "cases.train"),
        ({"annotated": ["liver"]}, "'liver', which is no class"),
        ({"labelled": {"a": 2.5}}, "labelled"),
        ({"role": "king"}, "role"),
        ({"spacing": [[1.0, float("inf")]]}, "not finite"),
        ({"leaks": "=cmd|x"}, "formula"),
        ({"leaks": "\x1b[2J"}, "control characters"),
        ({"leaks": "many"}, "leaks"),
        ({"spacing": 5}, "spacing"),
        ({"orientation": 7}, "orientation"),
        ({"inputs": "x"}, "inputs"),
        ({"inputs": INPUTS}, None),
        ({"inputs": INPUTS | {"kinds": ["film"]}}, "kinds"),
        ({"inputs": INPUTS | {"axes": []}}, "axes"),
        ({"inputs": INPUTS | {"percentiles": []}}, "percentiles"),
        ({"inputs": INPUTS | {"spacing": [[1.0, 2.0]]}}, "spacing"),
        ({"more": 1}, "more"),
    ],
)
def test_what_a_site_says_when_it_joins(change: dict[str, Any], reason: str | None) -> None:
    facts = {"summary": SUMMARY | change, "classes": {"a": "a"}, "memory": [], "changed": False}
    found = problem_of_join(SPACE, facts)
    assert found is None if reason is None else reason in str(found), found


def test_a_site_says_whether_its_data_changed() -> None:
    assert "changed" in str(problem_of_join(SPACE, {"summary": SUMMARY, "classes": {"a": "a"}, "memory": []}))


@pytest.mark.parametrize("task", ["small", "small_images"])
def test_what_real_sites_say_when_they_join(task: str, request, tmp_path) -> None:
    parsed = parse_federation(request.getfixturevalue(task), base=Path())
    experiment = Experiment(parsed, tmp_path / "cache")
    for site in experiment.sources.values():
        facts = {"summary": site.summary(), "classes": {}, "memory": [], "changed": False}
        sent = wire.decode(wire.encode({"facts": facts}))
        assert problem_of_join(experiment.space, sent["facts"]) is None  # type: ignore[index,call-overload]


@pytest.mark.parametrize("federation", ["{}", '{"sites": 5}', '{"sites": [1]}', '{"sites": {"a": 1}}'])
def test_a_federation_file_of_another_form_is_a_sentence(federation: str) -> None:
    hello = HELLO | {"hash": "other", "federation": federation}
    assert problem_of_hello(hello) is None
    mine = {"versions": {}, "hash": "abc"}
    with pytest.raises(FederationError, match="site b: has agreed to another federation file"):
        _compare({"name": "x", "sites": [{"name": "b"}]}, mine, {"b": hello | {"versions": {}}})


# ------------------------------------------------------------------------------- through the relays of the engines


def test_a_hostile_answer_through_the_relays(tmp_path) -> None:
    """Both ends of the relay with nothing between them: a site's process that answers what it likes costs its call."""
    asked = clients(tmp_path / "run", Walk(), faults=DROP)
    hosts = asked.transport.answer  # type: ignore[attr-defined]

    def serve(question: Question, late: threading.Event) -> str | None:
        hosts(question)
        if question.site == "b":
            tree: Any = wire.decode(question.reply.read_bytes())
            tree["value"] |= {"n": 1e308, "model": {"weight": "=cmd|x"}}
            question.reply.write_bytes(wire.encode(tree))
        return None

    site = SiteRelay(tmp_path / "site", serve)
    server = ServerRelay(tmp_path / "server")
    job = JobEnd(tmp_path / "server")

    def pass_on() -> None:
        for ask in job.asks():
            for question in ask.questions:
                lost = forward(tmp_path / "site", question)
                if lost is None:
                    job.answered(ask, question.site)
                else:
                    job.lost(ask, question.site, lost)

    threading.Thread(target=pass_on, daemon=True).start()
    asked.transport = server  # type: ignore[assignment]
    try:
        state = run(Walk(), net(), asked, 1)
    finally:
        job.close()
        server.close()
        site.close()
    assert asked.lost == {
        "b": "its answer is not as declared: 'model' is declared as 'model', but holds 'weight', a str"
    }
    assert equal(state, alone(tmp_path))


def test_a_late_answer_is_none_to_the_next_call(tmp_path) -> None:
    """The deadline passes, the answer comes after it, the job dies: the next call, which finds no job, is not answered by it."""
    server = ServerRelay(tmp_path / "server")
    questions = lambda call: [Question("a", "f", 1, call, tmp_path, None, tmp_path / "reply")]  # noqa: E731
    try:
        job = JobEnd(tmp_path / "server")
        asks = job.asks()
        assert "no answer within" in dict(server.ask(questions(0), 0.5))["a"]  # type: ignore[operator]
        job.answered(next(asks), "a")
        job.close()
        while server.connected:
            time.sleep(0.01)
        assert "no answer within" in dict(server.ask(questions(1), 0.2))["a"]  # type: ignore[operator]
    finally:
        server.close()


def put(folder: Path, site: str = "a", call: int = 0) -> Question:
    return Question(site, "f", 1, call, folder, None, folder / f"{site}-reply")


def asking(
    server: ServerRelay, questions: list[Question], deadline: float = 20.0
) -> tuple[threading.Thread, list[Any]]:
    """What is answered to an ask that has begun, as it comes, and the thread that waits for it."""
    found, before = list[Any](), server.number
    thread = threading.Thread(target=lambda: found.extend(server.ask(questions, deadline)), daemon=True)
    thread.start()
    while server.number == before:
        time.sleep(0.01)
    return thread, found


def joined(address: Path) -> JobEnd:
    """A job that does not wait for an ask for ever."""
    job = JobEnd(address, patience=10.0)
    job.socket.settimeout(10.0)
    return job


def ended(job: JobEnd) -> bool:
    """Whether the federation has let a job go."""
    thread = threading.Thread(target=lambda: list(job.asks()), daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def test_a_later_job_takes_the_place_of_the_one_before_and_is_asked_what_is_open(tmp_path) -> None:
    """With the time that is left; what it tells of a question that is answered, or was put to the other, is none."""
    server = ServerRelay(tmp_path / "new" / "relay")
    try:
        thread, found = asking(server, [put(tmp_path, "a"), put(tmp_path, "b")])
        first = joined(tmp_path / "new" / "relay")
        ask = next(first.asks())
        assert [question.site for question in ask.questions] == ["a", "b"] and 15 < ask.deadline <= 20
        first.answered(ask, "a")
        until(lambda: found, 5, "the answer arrives")
        second = joined(tmp_path / "new" / "relay")
        again = next(second.asks())
        assert [question.site for question in again.questions] == ["b"] and 10 < again.deadline < ask.deadline
        assert ended(first) and server.jobs == 2
        time.sleep(0.1)  # whoever listened to the first has ended, too
        assert server.connected
        second.answered(ask, "b")
        second.answered(again, "a")
        second.lost(again, "b", "gone")
        thread.join(5)
        assert found == [("a", None), ("b", "gone")]
        second.present(["b", "a"])
        until(lambda: server.present, 5, "the server is told")
        assert server.present == ["a", "b"]
    finally:
        server.close()
    assert ended(second)
    second.lost(again, "b", "too late, which is no error")


def test_while_no_job_can_be_had_what_is_asked_is_lost_at_once(tmp_path) -> None:
    server = ServerRelay(tmp_path / "relay")
    try:
        thread, found = asking(server, [put(tmp_path, "b"), put(tmp_path, "a")])
        job = joined(tmp_path / "relay")
        asks = job.asks()
        assert len(next(asks).questions) == 2
        time.sleep(0.1)  # it waits for an answer
        server.fail("no port is free")
        thread.join(5)
        assert sorted(found) == [("a", "no port is free"), ("b", "no port is free")]
        server.fail("no room")
        thread, found = asking(server, [put(tmp_path)])
        thread.join(5)
        assert found == [("a", "no room")]
        server.mend()
        thread, found = asking(server, [put(tmp_path)])
        job.answered(next(asks), "a")  # of which nobody waits for the answer
        assert not found
        job.answered(next(asks), "a")
        thread.join(5)
        assert found == [("a", None)]
    finally:
        server.close()


def test_a_job_that_was_there_before_an_ask_is_asked_once(tmp_path) -> None:
    server = ServerRelay(tmp_path / "relay")
    try:
        job = joined(tmp_path / "relay")
        until(lambda: server.connected, 5, "the job is there")
        for number in (1, 2):
            thread, found = asking(server, [put(tmp_path)])
            job.answered(next(job.asks()), "a")
            thread.join(5)
            assert found == [("a", None)] and server.number == number
    finally:
        server.close()


def test_whoever_is_woken_sees_that_no_job_can_be_had(tmp_path) -> None:
    """Else it would wait until its deadline."""
    server, seen = ServerRelay(tmp_path / "relay"), []

    class Events(queue.SimpleQueue):
        def put(self, item: Any, *more: Any) -> None:
            seen.append((item, server.failed))
            super().put(item)

    try:
        server.events = Events()
        server.fail("no room")
        server.fail("no port is free")
        assert seen == [({"failed": "no room"}, "no room")] and server.failed == "no port is free"
    finally:
        server.close()


def test_the_deadline_is_of_the_ask_and_not_of_each_event(tmp_path) -> None:
    server = ServerRelay(tmp_path / "relay")
    try:
        thread, found = asking(server, [put(tmp_path)], 1.0)
        job = joined(tmp_path / "relay")
        ask, began = next(job.asks()), time.monotonic()
        while thread.is_alive() and time.monotonic() < began + 5:
            job.answered(ask, "of nobody")
            time.sleep(0.1)
        assert found == [("a", "no answer within 1 s (faults.deadline)")]
        assert time.monotonic() < began + 4
    finally:
        server.close()


def test_a_relay_that_closes_leaves_the_address_of_the_one_that_took_its_place(tmp_path) -> None:
    address = tmp_path / "relay"
    before, after = ServerRelay(address), ServerRelay(address)
    before.close()
    JobEnd(address, patience=1.0).close()
    after.close()
    assert not address.exists()
    assert forward(address, put(tmp_path), patience=0.0) == "the site's own process is not running"


def test_a_question_that_comes_while_another_is_at_work_ends_that_one_and_waits_for_its_turn(
    tmp_path,
) -> None:
    begun, served, stopped = threading.Event(), list[str](), list[str]()

    def serve(question: Question, late: threading.Event) -> str | None:
        if question.site == "a":
            begun.set()
            late.wait(5)
            time.sleep(0.1)
        served.append(question.site)
        return "nobody waited" if late.is_set() else None

    relay = SiteRelay(tmp_path / "relay", serve, stopped.append)
    try:
        found: list[Any] = []
        first = threading.Thread(target=lambda: found.append(forward(tmp_path / "relay", put(tmp_path, "a"))))
        first.start()
        begun.wait(5)
        assert forward(tmp_path / "relay", put(tmp_path, "b")) is None
        first.join(5)
        assert found == ["nobody waited"] and served == ["a", "b"]
        assert forward(tmp_path / "relay", put(tmp_path, "c")) is None
        assert stopped == ["a"], "nothing was at work when c was asked"
        told = forward(tmp_path / "relay", replace(put(tmp_path), round=10**7))
        assert told == "a question that cannot be read" and served == ["a", "b", "c"]
    finally:
        relay.close()


def test_a_question_is_given_up_when_nobody_waits_for_its_answer(tmp_path) -> None:
    relay = SiteRelay(tmp_path / "relay", lambda question, late: "late" if late.wait(30) else None)
    try:
        began = time.monotonic()
        assert forward(tmp_path / "relay", put(tmp_path), seconds=0.2) == "no answer before the deadline"
        assert (
            forward(tmp_path / "none", put(tmp_path), seconds=0.2) == "the site's own process is not running"
        )
        assert time.monotonic() - began < 5
    finally:
        relay.close()


def test_a_site_whose_process_goes_while_it_is_asked_is_lost(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def serve(question: Question, late: threading.Event) -> str | None:
        raise RuntimeError("patient 4711")

    relay = SiteRelay(tmp_path / "relay", serve)
    try:
        assert forward(tmp_path / "relay", put(tmp_path)) == "the site's own process has gone"
    finally:
        relay.close()
