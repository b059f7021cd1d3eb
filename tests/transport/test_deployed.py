"""Faults in a federation whose parties are real processes on both engines; every party is started as a user does.

What the rules say goes on must end in the same bits: as the undisturbed run, or as a run in which the lost site was
absent for that round.
"""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deployments import Deployment
from test_local import Tampered

from fedatlas.cli import main
from fedatlas.core.errors import FederationError, RunFolderError, SiteLost
from fedatlas.federation.audit import logs_of
from fedatlas.federation.deploy import ENGINES, News, ahead_of, gather_trial, init
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import Parties, gather_local, run_federation
from fedatlas.transport.egress import EgressLog
from fedatlas.transport.relay import skewed
from fedatlas.transport.rounds import RunFolder, read_json

ROUNDS = 2


@pytest.fixture(scope="module", params=sorted(ENGINES))
def started(request, tmp_path_factory) -> Iterator[Callable[[dict[str, Any]], Deployment]]:
    pytest.importorskip({"nvflare": "nvflare", "flower": "flwr"}[request.param])
    made: list[Deployment] = []

    def give(small: dict[str, Any]) -> Deployment:
        if not made:
            made.append(
                Deployment(request.param, small, tmp_path_factory.mktemp(request.param), pooled=False)
            )
        made[0].accept(small)
        return made[0]

    yield give
    for deployment in made:
        deployment.close()


def mainly_on(*engines: str) -> pytest.MarkDecorator:
    """Tests on these engines by default, and on the others in the slow suite: every party is a process that takes
    seconds to start, and what is tested is the same code of ours on all of them."""
    chosen = [pytest.param(e, marks=[] if e in engines else pytest.mark.slow) for e in sorted(ENGINES)]
    return pytest.mark.parametrize("started", chosen, indirect=True)


@pytest.fixture
def busy(small) -> dict[str, Any]:
    """A federation whose rounds last long enough to be disturbed in the middle."""
    small |= {"rounds": ROUNDS}
    small["local"]["steps"] = 120  # some seconds
    small["evaluation"] |= {"models": ["last"], "every": 10}
    return small


LOCAL: dict[str, bytes] = {}


def local(small: dict[str, Any], path: Path, absent: tuple[str, int] | None = None) -> bytes:
    """The last state of a run in this process; absent: a site that does not answer in one round. What several tests
    compare with is run once: without an absent site, no rule for lost ones has a part in it."""
    told = small if absent else {key: value for key, value in small.items() if key != "faults"}
    key = json.dumps([told, absent], sort_keys=True)
    if key not in LOCAL:
        LOCAL[key] = run_here(told, path, absent)
    return LOCAL[key]


def run_here(small: dict[str, Any], path: Path, absent: tuple[str, int] | None) -> bytes:

    def gather(federation: Any, folder: RunFolder, tell: Any) -> Parties:
        parties = gather_local(federation, folder, tell)
        lose = lambda q: "absent" if (q.site, q.round) == absent else None  # noqa: E731
        return Parties(
            parties.design,
            parties.summaries,
            parties.training,
            Tampered(parties.transport, lose),
            parties.about,
        )  # type: ignore[arg-type]

    federation = parse_federation(copy.deepcopy(small), base=Path())
    run_federation(federation, path, tell=lambda text: None, gather=gather)
    return (path / "models" / "last.fa").read_bytes()


def in_the_middle(path: Path, round: int, do: Callable[[], None], after: float = 0.5) -> threading.Thread:
    """Does something while the sites train in a round: `after` seconds after they were asked."""

    def wait() -> None:
        asked = path / "scratch" / "train" / f"{round:06d}-000" / "local_update" / "to-all.fa"
        end = time.monotonic() + 120
        while not asked.exists() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(after)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@mainly_on("flower")
def test_a_training_process_that_is_killed_costs_nothing(started, busy, tmp_path) -> None:
    """As the system does for memory: the engine's job lives on, and the call is done again."""
    deployment = started(busy)
    killed: list[int] = []

    def kill() -> None:
        pid = deployment.worker("s1")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    path = tmp_path / "run"
    thread = in_the_middle(path, 2, kill)
    assert deployment.run(parse_federation(busy, base=Path()), path) == local(busy, tmp_path / "local")
    thread.join()
    assert killed
    log = read_json(path / "rounds" / "0002" / "log.json")
    assert log["lost"] == {}


@mainly_on("nvflare")
def test_a_hospital_that_loses_power_comes_back(started, busy, tmp_path) -> None:
    busy["faults"] = {"on_lost": "wait", "deadline": 100}
    deployment = started(busy)
    killed: list[str] = []

    def crash() -> None:
        deployment.kill("s2")
        killed.append("s2")
        time.sleep(1)
        deployment.start("s2")

    path = tmp_path / "run"
    thread = in_the_middle(path, 2, crash)
    assert deployment.run(parse_federation(busy, base=Path()), path) == local(busy, tmp_path / "local")
    thread.join()
    assert killed


@mainly_on("flower")
def test_a_server_that_is_killed_is_started_again_and_asked_again(started, busy, tmp_path) -> None:
    deployment = started(busy)
    told: list[str] = []

    def crash() -> None:
        deployment.kill("server")
        deployment.start("server")

    path = tmp_path / "run"
    thread = in_the_middle(path, 2, crash)
    bits = deployment.run(parse_federation(busy, base=Path()), path, tell=told.append)
    thread.join()
    assert bits == local(busy, tmp_path / "local")
    assert any("a new one is started, nothing is lost" in text for text in told), told


@mainly_on()
def test_a_slow_site_is_dropped_for_the_round(started, busy, tmp_path) -> None:
    """It stops in the middle of round 2 and is continued after the deadline: it is in round 3 again."""
    busy |= {"rounds": 3, "faults": {"on_lost": "drop", "min_sites": 2, "deadline": 20}}
    deployment = started(busy)

    def stall() -> None:
        pid = deployment.worker("s0")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + 120
        while not (path / "rounds" / "0002").exists() and time.monotonic() < end:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):  # the next question has ended it already
            os.kill(pid, signal.SIGCONT)

    path = tmp_path / "run"
    thread = in_the_middle(path, 2, stall)
    bits = deployment.run(parse_federation(busy, base=Path()), path)
    thread.join()
    lost = [read_json(path / "rounds" / f"000{n}" / "log.json")["lost"] for n in (1, 2, 3)]
    assert lost[0] == lost[2] == {} and list(lost[1]) == ["s0"] and "deadline" in lost[1]["s0"]
    assert bits == local(busy, tmp_path / "local", absent=("s0", 2))


def stop_after(round: int) -> Callable[[Any, Any], None]:
    """The coordinator's process goes away after a round."""

    def stop(record: Any, best: Any) -> None:
        if record.number == round:
            raise KeyboardInterrupt

    return stop


@mainly_on("flower")
def test_a_run_does_not_go_on_without_what_a_site_remembers(started, busy, tmp_path) -> None:
    """The moments of a site's optimizer are in its kit; the local engine does not have them, and says so."""
    deployment = started(busy)
    federation = parse_federation(busy, base=Path())
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        deployment.run(federation, path, after_round=stop_after(1))
    with pytest.raises(RunFolderError, match="site s0: does not hold the private memory with which round 1"):
        run_federation(federation, path, tell=lambda text: None, resume=True)
    assert deployment.run(federation, path, resume=True) == local(busy, tmp_path / "local")


def test_another_federation_file_is_refused_with_its_difference(started, busy, tmp_path) -> None:
    deployment = started(busy)
    busy["local"]["lr"] = 0.5
    with pytest.raises(FederationError) as caught:
        deployment.run(parse_federation(busy, base=Path()), tmp_path / "run")
    text = str(caught.value)
    assert "site s0: has agreed to another federation file" in text
    assert "local.lr: 0.01 at the site, 0.5 at the server" in text and "fedatlas deploy accept" in text
    assert "local.lr: 0.01 here, 0.5 at the server" in (deployment.out / "s0" / "errors.log").read_text()


def test_a_second_party_of_one_name_is_refused(started, busy, tmp_path) -> None:
    """The same kit twice on one machine: the second does not start. A copy of it elsewhere: the run is not disturbed."""
    deployment = started(busy)
    start = [sys.executable, "-m", "fedatlas.cli", "deploy", "start"]
    data = f"--data={deployment.data['s0']}"
    done = subprocess.run([*start, str(deployment.out / "s0"), data], capture_output=True, text=True)
    assert done.returncode == 1 and "is running already" in done.stderr


def test_a_site_that_is_not_there_is_told(started, busy, tmp_path) -> None:
    busy["faults"] = {"deadline": 20}
    deployment = started(busy)
    deployment.kill("s1")
    try:
        with pytest.raises(SiteLost, match="hello: no usable answer from\n  s1: "):
            deployment.run(parse_federation(busy, base=Path()), tmp_path / "run")
    finally:
        deployment.start("s1")


@pytest.mark.parametrize(("first", "second"), [("nvflare", "flower")])
def test_a_run_goes_on_with_any_other_engine(first, second, small, tmp_path) -> None:
    """A round here, a round on one engine, a round on the other: the bits of a run that was never stopped."""
    for package in ("nvflare", "flwr"):
        pytest.importorskip(package)
    federation = parse_federation(small := small | {"rounds": 3}, base=Path())
    path, quiet = tmp_path / "run", {"tell": lambda text: None, "resume": True}
    with pytest.raises(KeyboardInterrupt):
        run_federation(federation, path, after_round=stop_after(1), **quiet)
    with pytest.raises(KeyboardInterrupt):
        run_federation(federation, path, after_round=stop_after(2), gather=gather_trial(first), **quiet)
    run_federation(federation, path, gather=gather_trial(second), **quiet)
    assert (path / "models" / "last.fa").read_bytes() == local(small, tmp_path / "local")
    engines = {line["function"] for line in logs_of(path)["s0"]}
    assert {"hello", "join", "local_update", "evaluate", "evaluate_several"} == engines


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_key_is_rotated_with_three_commands(engine, small, tmp_path, capsys) -> None:
    """The new key never leaves the site's folder; what a stranger made is refused."""
    pytest.importorskip({"nvflare": "nvflare", "flower": "flwr"}[engine])
    out, file = tmp_path / "deploy", tmp_path / "f.yaml"
    federation = parse_federation(small, base=Path())
    init(federation, out, engine=engine)
    kit = out / "s0"
    private = {path: path.read_bytes() for path in (kit / "engine").rglob("*.key")}
    assert private and all(path.stat().st_mode & 0o077 == 0 for path in private)
    assert main(["deploy", "renew", str(kit)]) == 0
    request = Path(capsys.readouterr().out.partition(":")[0])
    assert b"PRIVATE" not in request.read_bytes() and {p: p.read_bytes() for p in private} == private
    file.write_text("no request")
    assert main(["deploy", "sign", str(out), str(file), "-o", str(tmp_path / "answers")]) == 1
    assert main(["deploy", "sign", str(out), str(request), "-o", str(tmp_path / "answers")]) == 0
    (answer,) = (tmp_path / "answers").iterdir()
    assert main(["deploy", "install", str(out / "s1"), str(answer)]) == 1, "it is not for this site"
    assert main(["deploy", "install", str(kit), str(answer)]) == 0
    assert {p: p.read_bytes() for p in private} != private
    assert main(["deploy", "init", str(file), "-o", str(out)]) == 1
    capsys.readouterr()


def test_kits_are_made_once(small, tmp_path) -> None:
    federation = parse_federation(small, base=Path())
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("x")
    with pytest.raises(FederationError, match="is not empty; keys are never overwritten"):
        init(federation, tmp_path / "here")
    with pytest.raises(FederationError, match="are both 8002; they must differ"):
        init(federation, tmp_path / "there", port=8002, admin_port=8002)
    small["sites"][0]["name"] = "Server"
    with pytest.raises(FederationError, match="site 'Server': server, authority are folders"):
        init(parse_federation(small, base=Path()), tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_people_at_a_hospital_are_told_what_leaves_and_what_fails(tmp_path) -> None:
    told: list[str] = []
    log = EgressLog(tmp_path / "egress.jsonl", "before", "fedavg")
    log.record({"function": "join", "round": 0, "call": 1, "contents": {}}, b"12345")
    news = News(tmp_path, "s0", told.append)
    news.look()
    assert told == [], "what was there before is not news"
    EgressLog(tmp_path / "egress.jsonl", "run", "fedavg").record(
        {"function": "local_update", "round": 3, "call": 0, "contents": {}}, b"x" * 1234
    )
    errors = tmp_path / "runs" / "run" / "errors.log"
    errors.parent.mkdir(parents=True)
    errors.write_text(
        "round 3, call 0, local_update\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n    g()\nfedatlas.core.errors.DataError: site s0: no such file\n\nhalf a li'
    )
    news.look()
    news.look()
    assert told == [
        "s0: sent 1,234 bytes, round 3 local_update of run",
        f"s0: error: fedatlas.core.errors.DataError: site s0: no such file ({errors})",
    ]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_certificates_are_valid_for_a_clock_that_is_behind(engine: str, small, tmp_path) -> None:
    """A site whose clock is hours behind could not connect, and nobody would know why."""
    pytest.importorskip({"nvflare": "nvflare", "flower": "flwr"}[engine])
    from cryptography import x509

    init(parse_federation(small, base=Path()), tmp_path / "deploy", engine=engine)
    before = datetime.now(UTC) - timedelta(hours=23)
    files = [path for path in (tmp_path / "deploy").rglob("*") if path.suffix in (".crt", ".pem")]
    made = {path: x509.load_pem_x509_certificate(path.read_bytes()) for path in files}
    roots = {path: one for path, one in made.items() if one.issuer == one.subject}
    assert len({one.fingerprint(one.signature_hash_algorithm) for one in roots.values()}) == 1 and roots
    assert len(made) > len(roots)
    for path, one in made.items():
        assert one.not_valid_before_utc < before, path
        one.verify_directly_issued_by(next(iter(roots.values())))


def test_a_clock_is_told_by_what_it_surely_differs() -> None:
    """An answer may be long under way: only what lies outside of that time is the clock's."""
    assert ahead_of(1000.0, asked=900.0, answered=1100.0) == 0
    assert ahead_of(1150.0, asked=900.0, answered=1100.0) == 0
    assert ahead_of(1100.0 + 7200, asked=900.0, answered=1100.0) == 7200
    assert ahead_of(900.0 - 7200, asked=900.0, answered=1100.0) == -7200
    assert skewed("site s1: its clock", -7200).startswith(
        "site s1: its clock is 120 minutes behind the server's"
    )
    assert skewed("its clock", 7200).startswith("its clock is 120 minutes ahead of the server's")
