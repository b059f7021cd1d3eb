"""What a hospital's own process serves, and what it refuses, whatever a server asks."""

import hashlib
import hmac
import json
import os
import shutil
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import phantom_federation

from fedatlas.core.errors import FederationError
from fedatlas.core.tensors import tensors_of
from fedatlas.federation.across import _agreed
from fedatlas.federation.deploy import News, write_shared
from fedatlas.federation.design import Experiment, versions
from fedatlas.federation.facts import names_of_channels, problem_of_join
from fedatlas.federation.file import Federation, hash_of, parse_federation, resolved, shareable
from fedatlas.federation.site import Agreement, Pseudonyms, SiteDesk
from fedatlas.phantoms.organs import write_phantom
from fedatlas.transport import wire
from fedatlas.transport.egress import Asked, Declaration, largest
from fedatlas.transport.frames import Question, question_of
from fedatlas.transport.rounds import RunFolder
from fedatlas.transport.store import guard_data

NAMES = ["background", "liver", "spleen", "kidney", "tumour"]


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk") / "phantom"
    write_phantom(folder, sites=3, cases=4, test_cases=1, seed=1)
    return folder


def federation_of(phantom: Path, **more: Any) -> Federation:
    return parse_federation(phantom_federation(phantom, phantom / "cache") | more, base=phantom)


class Desk:
    """The desk of site s0 of a federation, in a folder of its own."""

    def __init__(self, phantom: Path, folder: Path, data: Path | None = None, **more: Any) -> None:
        self.folder, self.federation = folder, federation_of(phantom, **more)
        write_shared(self.federation, folder / "federation.yaml")
        path = str(data or phantom / "site-0")
        self.desk = SiteDesk(
            "s0", folder / "federation.yaml", {"s0": path}, folder / "state", folder / "cache"
        )
        self.hash = hash_of(self.desk.federation)

    def ask(self, function: str, payload: Any, about: Mapping[str, Any], round: int = 0) -> dict[str, Any]:
        shared, reply = self.folder / "shared.fa", self.folder / "reply.fa"
        shared.write_bytes(wire.encode(payload))
        reply.unlink(missing_ok=True)
        self.desk.answer(Question("s0", function, round, 0, shared, None, reply, about))
        found: Any = wire.decode(reply.read_bytes())
        return found

    def hello(self) -> dict[str, Any]:
        text = json.dumps(shareable(resolved(self.desk.federation)), sort_keys=True)
        return self.ask("hello", {"versions": {}, "hash": self.hash, "federation": text}, {"run": "r1"})

    def layout(self) -> dict[str, Any]:
        return self.ask("layout", {"hash": self.hash}, {"run": "r1"})

    def agreement(self, names: list[str], channels: Any = 1) -> dict[str, Any]:
        labels = {
            "names": names,
            "groups": [],
            "exclusive": True,
            "level": "voxel",
            "findings": [],
            "finding_of": [],
        }
        return Agreement("r1", self.hash, labels, channels).to_plain()


def test_a_label_that_the_file_does_not_name_never_leaves(phantom, tmp_path) -> None:
    """A name of a contour can hold anything. With the classes in the file the site tells its own people, and a code leaves."""
    data = tmp_path / "data"
    shutil.copytree(phantom / "site-0", data)
    table = json.loads((data / "dataset.json").read_text())
    table["labels"]["GTV Miller 1961"] = 9
    (data / "dataset.json").write_text(json.dumps(table))
    own = Desk(phantom, tmp_path, data, labels={"names": NAMES})
    assert own.layout()["error"] == {"code": "FederationError"}
    assert "Miller" in (tmp_path / "state" / "errors.log").read_text()
    assert "Miller" not in (tmp_path / "state" / "egress.jsonl").read_text()
    clean = Desk(phantom, tmp_path / "clean", labels={"names": NAMES})
    assert set(clean.layout()["value"]["facts"]["brings"]["s0"]) <= set(NAMES)


def test_channels_in_another_order_at_another_hospital_are_refused(phantom, tmp_path) -> None:
    own = Desk(phantom, tmp_path, labels={"names": NAMES})
    here = own.layout()["value"]["facts"]
    assert here["channel_names"] == ["CT"]
    named = SimpleNamespace(named_channels=("T1", "=T2"))
    assert names_of_channels(named) == []  # type: ignore[arg-type]  # a server would refuse the whole answer
    two = here | {"channels": 2, "channel_names": ["T1", "T2"]}
    told: list[str] = []

    def agreed(**other: Any) -> None:
        layouts = {"s0": two, "s1": two | {"brings": {"s1": []}} | other}
        _agreed(own.desk.federation, RunFolder(tmp_path / "run"), layouts, None, told.append)

    with pytest.raises(
        FederationError, match="site s1: its channels are t2, T1, and those of site s0 are T1, T2"
    ):
        agreed(channel_names=["t2", "T1"])
    agreed()
    agreed(channel_names=[])
    assert not told
    agreed(channel_names=["T1", "FLAIR"])
    assert "site s1: its channels are T1, FLAIR" in told[0]


def test_a_hello_does_not_wait_for_the_data(phantom, tmp_path) -> None:
    """To list them may take hours; a site with another federation file lists nothing."""
    own = Desk(phantom, tmp_path, data=tmp_path / "not mounted yet")
    assert set(own.hello()["value"]["facts"]) == {"versions", "hash", "clock", "federation"}
    assert "error" in own.layout()
    own.hash = "another"
    assert "error" not in own.hello() and own.layout()["error"] == {"code": "FederationMismatch"}


def test_classes_that_the_file_does_not_have_are_refused(phantom, tmp_path) -> None:
    own = Desk(phantom, tmp_path, labels={"names": NAMES})
    other = own.agreement(["background", "spleen", "liver", "another", "tumour"])
    assert own.ask("join", {"agreement": other, "begins": True}, other)["error"] == {
        "code": "FederationMismatch"
    }
    assert "server's classes are not those" in (tmp_path / "state" / "errors.log").read_text()
    mine = own.agreement(NAMES)
    assert "value" in own.ask("join", {"agreement": mine, "begins": True}, mine)


def test_a_site_that_was_away_at_the_hello_compares_versions_itself(phantom, tmp_path) -> None:
    own = Desk(phantom, tmp_path, labels={"names": NAMES})
    agreed = own.agreement(NAMES) | {"versions": versions() | {"fedatlas": "0.0.1"}}
    assert own.ask("local_update", {}, agreed, round=3)["error"] == {"code": "FederationMismatch"}
    told = (tmp_path / "state" / "errors.log").read_text()
    assert f"site s0: fedatlas {versions()['fedatlas']} is installed, 0.0.1 at the server" in told
    agreed = own.agreement(NAMES) | {"versions": versions()}
    assert own.ask("other", {}, agreed, round=3)["error"] == {"code": "FedAtlasError"}, (
        "joined, and no function"
    )


def test_whatever_stands_in_an_agreement_has_an_answer(phantom, tmp_path) -> None:
    own = Desk(phantom, tmp_path)
    for about in (
        own.agreement(NAMES, float("inf")),
        own.agreement([["x"]]),
        {},
        own.agreement(NAMES) | {"versions": 1},
    ):  # type: ignore[list-item]
        assert own.ask("local_update", {}, about)["error"] == {"code": "FederationMismatch"}


def test_a_case_whose_name_is_no_text_has_a_pseudonym(tmp_path) -> None:
    """A file's name in Latin-1 has one, and those of other names stay."""
    (tmp_path / "case-key").write_bytes(bytes(32))
    names = Pseudonyms(tmp_path)
    assert (
        names("Müller") == "case-" + hmac.new(bytes(32), "Müller".encode(), hashlib.sha256).hexdigest()[:12]
    )
    escaped = os.fsdecode("Müller".encode("latin-1"))
    pseudonym = names(escaped)
    assert Pseudonyms(tmp_path).table[pseudonym] == escaped


def test_what_names_cases_is_for_the_site_s_user_alone(phantom, tmp_path) -> None:
    own = Desk(phantom, tmp_path)
    agreed = own.agreement(NAMES)
    assert "value" in own.ask("join", {"agreement": agreed, "begins": True, "ahead": 600.0}, agreed)
    state = tmp_path / "state"
    Pseudonyms(state)("case of Miller")
    files = [
        state / "case-key",
        state / "cases.json",
        state / "errors.log",
        state / "runs" / "r1" / "data.json",
    ]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 4
    accepted = guard_data(files[-1], {"other": "1"}, "s0", accept=True)
    assert accepted and stat.S_IMODE(files[-1].stat().st_mode) == 0o600


def test_a_container_that_is_started_again_is_the_same_installation(phantom, tmp_path, monkeypatch) -> None:
    """Though its network address is another one; a copy of the folder is another installation."""
    monkeypatch.setattr(uuid, "getnode", lambda: 1)
    first = Desk(phantom, tmp_path).desk.instance
    monkeypatch.setattr(uuid, "getnode", lambda: 2)
    assert Desk(phantom, tmp_path).desk.instance == first
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    assert Desk(phantom, tmp_path / "copy").desk.instance != first


def test_an_evaluation_that_the_file_does_not_have_is_refused(phantom, tmp_path) -> None:
    own = Desk(phantom, tmp_path, labels={"names": NAMES})
    agreed = own.agreement(NAMES)
    own.ask("join", {"agreement": agreed, "begins": True}, agreed)
    model = tensors_of(Experiment(own.federation, phantom / "cache").make_net())
    asked = {
        "members": [{"model": model, "classes": None}], "split": "validation", "model": "x", "round": 1,
        "grid": "federation", "metrics": ["dice"], "overlays": True,
    }  # fmt: skip
    assert own.ask("evaluate", asked, agreed, round=1)["value"]["rows"]
    assert not list(tmp_path.rglob("*.npz")), "the file keeps no pictures"
    for other in ({"split": "train"}, {"metrics": ["dice", "hd95"]}):
        assert own.ask("evaluate", asked | other, agreed, round=1)["error"] == {"code": "FederationError"}
    told = "".join(log.read_text() for log in tmp_path.rglob("errors.log"))
    assert "the split 'train'; allowed: validation, test" in told
    assert "asked to evaluate by hd95; the federation file has: dice" in told


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"round": 10**7}, "a question's round is 10000000; a whole number below 1,000,000 is expected"),
        ({"round": -1}, "a question's round is -1"),
        ({"call": 10**6}, "a question's call is 1000000"),
        ({"round": float("inf")}, "a question's round is inf"),
        ({"round": True}, "a question's round is True"),
        ({"function": "f" * 101}, "more than 100 characters"),
        ({"most": float("inf")}, "a question lacks or misuses"),
    ],
)
def test_a_malformed_question_is_refused(tmp_path, changed, text) -> None:
    plain = json.loads(Question("s0", "hello", 0, 0, tmp_path, None, tmp_path).head()) | changed
    with pytest.raises(ValueError, match=text):
        question_of(json.dumps(plain).encode(), shared=tmp_path, own=None, reply=tmp_path)


def test_no_product_is_taken_of_a_shape_of_very_many_axes(monkeypatch) -> None:
    """Of 200,000 numbers it takes seconds."""
    monkeypatch.setattr(wire.math, "prod", lambda *_: pytest.fail("a product was taken"))
    with pytest.raises(ValueError):
        wire._entry({"dtype": "F32", "shape": [999_999_999] * 200_000, "data_offsets": [0, 4]}, 4)


def test_no_claim_of_a_site_lifts_its_own_limits(phantom) -> None:
    experiment = Experiment(federation_of(phantom), phantom / "cache")
    counts = {"train": 2**52, "validation": 1, "test": 0}
    summary = {
        "annotated": ["liver"], "role": "train", "cases": counts, "labelled": {"liver": 1}, "voxels": {"liver": 1},
        "spacing": [[1.0, 1.0, 1.0]], "orientation": ["RAS"],
    }  # fmt: skip
    facts = {"summary": summary, "classes": {}, "memory": [], "changed": False}
    assert "cases.train" in str(problem_of_join(experiment.space, facts))
    question = {
        "split": "validation",
        "grid": "federation",
        "metrics": ["dice"],
        "model": "global",
        "round": 1,
    }
    most = [
        sum(largest({"rows": "rows"}, Declaration({}, 5), Asked(question, scores=experiment.evaluator.scores("s0", n, **question))))
        for n in (50, 10**6, 10**12)
    ]  # fmt: skip
    assert most[0] < most[1] <= most[2] < 1 << 33


def test_what_a_server_sends_is_shown_without_control_characters() -> None:
    line = "FederationMismatch: site s0: the server runs \x1b[2J\x1b[H, this site"
    assert "\x1b" not in News._error(line, Path("errors.log"))
