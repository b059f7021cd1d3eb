"""Federations whose parties are real processes on both engines, on loopback; every party is started as a user does.

Every registered method gives the bits of the local engine; a line in the registry is enough to be tested here. Four
methods run by default, all of them with `-m slow`. What the rules for faults say goes on must end in the same bits, too:
as the undisturbed run, or as a run in which the lost site was absent for that round.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from deployments import Deployment, computed
from method_cases import PAIRS, with_method
from runs import last_state, phantom_federation
from test_local import Tampered

from fedatlas.cli import main
from fedatlas.core.errors import FederationError, RunFolderError, SiteLost
from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.across import ahead_of, gather_trial
from fedatlas.federation.audit import logs_of
from fedatlas.federation.deploy import News, adapter, init, start
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import Parties, gather_local, run_federation
from fedatlas.transport import wire
from fedatlas.transport.deployment import ENGINES, Launch
from fedatlas.transport.egress import EgressLog
from fedatlas.transport.relay import skewed
from fedatlas.transport.rounds import RunFolder, read_json


@pytest.fixture(scope="module", params=sorted(ENGINES))
def deployed(
    request: pytest.FixtureRequest,
    phantom: Path,
    findings: Path,
    phantom_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    """A real server of every engine, with sites that hold the phantom's scans and images with findings: one deployment
    takes the federations of all tests, which accept theirs."""
    pytest.importorskip({"nvflare": "nvflare", "flower": "flwr"}[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    both = shutil.copytree(phantom, folder / "data")
    for root in findings.glob("site-*"):
        shutil.copytree(root, both / root.name, dirs_exist_ok=True)
    deployment = Deployment(request.param, phantom_federation(both, phantom_cache), folder)
    yield deployment
    deployment.close()


# --------------------------------------------------------------------------------------------- every method

BY_DEFAULT = (
    ("condistfl", "segmentation"),
    ("fedavg", "segmentation"),
    ("fedpsl", "classification"),
    ("standalone", "segmentation"),
)
CASES = [pair if pair in BY_DEFAULT else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]


@pytest.fixture
def federation(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A small federation of the test's method and task, with two rounds."""
    name, task = request.node.callspec.params["name"], request.node.callspec.params["task"]
    chosen = request.getfixturevalue("small" if task == "segmentation" else "small_images")
    return with_method(chosen, name)


@pytest.mark.parametrize(("name", "task"), CASES)
def test_equal_bits_on_every_engine(
    name: str, task: str, deployed: Deployment, federation: dict[str, Any], tmp_path: Path
) -> None:
    federation["evaluation"]["models"] = ["best", "last"]
    parsed = parse_federation(federation, base=Path())
    run_federation(parsed, tmp_path / "local", tell=lambda text: None)
    first = tmp_path / f"{name}-{task}-{deployed.engine}"
    deployed.accept(federation)
    deployed.run(parsed, first)
    for file in ("last.fa", "best.fa"):
        assert (first / "models" / file).read_bytes() == (tmp_path / "local" / "models" / file).read_bytes()
    values = [
        sorted(
            (r["site"], r["class"], r["split"], r["model"], r["metric"], str(r["value"]))
            for r in read_rows(path / "rows.csv")
        )
        for path in (first, tmp_path / "local")
    ]
    assert values[0] == values[1] and values[0]
    for site in deployed.sites:
        lines = logs_of(deployed.out / site)[site]
        mine = [line for line in lines if line["run"].startswith(first.name)]
        assert not any(line["broken"] for line in lines)
        assert {"hello", "layout", "join", "evaluate"} <= {line["function"] for line in mine}
        assert mine[-1]["method"] == name


def mainly_on(*engines: str) -> pytest.MarkDecorator:
    """Tests on these engines by default, and on the others in the slow suite: every party is a process that takes
    seconds to start, and what is tested is the same code of ours on all of them."""
    chosen = [pytest.param(e, marks=[] if e in engines else pytest.mark.slow) for e in sorted(ENGINES)]
    return pytest.mark.parametrize("deployed", chosen, indirect=True)


@mainly_on("nvflare")
def test_a_run_goes_on_from_another_with_a_new_class(deployed: Deployment, small, tmp_path) -> None:
    """The weights of `init_from` are where the run is started, and at no other party; the bits are those of the local engine."""
    *known, _ = small["sites"]
    old = parse_federation(small | {"sites": known}, base=Path())
    run_federation(old, tmp_path / "old", tell=lambda text: None)
    goes_on = small | {"init_from": str(tmp_path / "old"), "method": {"name": "mib", "lambda_kd": 2.0}}
    parsed = parse_federation(goes_on, base=Path())
    run_federation(parsed, tmp_path / "local", tell=lambda text: None)
    deployed.accept(goes_on)
    last = deployed.run(parsed, tmp_path / f"goes-on-{deployed.engine}")
    assert last == (tmp_path / "local" / "models" / "last.fa").read_bytes()
    state: Any = wire.decode(last)
    assert 0 < len(state["old"]) < len(read_json(tmp_path / "local" / "run.json")["labels"]["names"]) - 1
    assert str(tmp_path) not in (deployed.out / "s1" / "federation.yaml").read_text()


# ------------------------------------------------------------------------------------------------ faults

ROUNDS = 2


@pytest.fixture
def busy(small) -> dict[str, Any]:
    """A federation whose rounds last long enough to be disturbed in the middle."""
    small |= {"rounds": ROUNDS}
    small["local"]["steps"] = 40  # four times what `in_the_middle` waits for, or more
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
        return replace(parties, transport=Tampered(parties.transport, lose))  # type: ignore[arg-type]

    return last_state(small, path, gather=gather)


def in_the_middle(
    deployed: Deployment, site: str, path: Path, round: int, do: Callable[[], None]
) -> threading.Thread:
    """Does something while a site trains in a round: when its process has computed for a tenth of a second."""

    def wait() -> None:
        asked = path / "scratch" / "train" / f"{round:06d}-000" / "local_update" / "to-all.fa"
        end = time.monotonic() + 120
        while not asked.exists() and time.monotonic() < end:
            time.sleep(0.01)
        before = computed(worker := deployed.worker(site))
        while computed(worker) < before + 0.1 and time.monotonic() < end:
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@mainly_on("flower")
def test_a_training_process_that_is_killed_costs_nothing(deployed: Deployment, busy, tmp_path) -> None:
    """As the system does for memory: the engine's job lives on, and the call is done again."""
    deployed.accept(busy)
    killed: list[int] = []

    def kill() -> None:
        pid = deployed.worker("s1")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    path = tmp_path / "run"
    thread = in_the_middle(deployed, "s1", path, 2, kill)
    assert deployed.run(parse_federation(busy, base=Path()), path) == local(busy, tmp_path / "local")
    thread.join()
    assert killed
    log = read_json(path / "rounds" / "0002" / "log.json")
    assert log["lost"] == {}


@mainly_on("nvflare")
def test_a_hospital_that_loses_power_comes_back(deployed: Deployment, busy, tmp_path) -> None:
    busy["faults"] = {"on_lost": "wait", "deadline": 100}
    deployed.accept(busy)
    killed: list[str] = []

    def crash() -> None:
        deployed.kill("s2")
        killed.append("s2")
        time.sleep(1)
        deployed.start("s2")

    path = tmp_path / "run"
    thread = in_the_middle(deployed, "s2", path, 2, crash)
    assert deployed.run(parse_federation(busy, base=Path()), path) == local(busy, tmp_path / "local")
    thread.join()
    assert killed


@mainly_on("flower")
def test_a_server_that_is_killed_is_started_again_and_asked_again(
    deployed: Deployment, busy, tmp_path
) -> None:
    deployed.accept(busy)
    told: list[str] = []

    def crash() -> None:
        deployed.kill("server")
        deployed.start("server")

    path = tmp_path / "run"
    thread = in_the_middle(deployed, "s0", path, 2, crash)
    bits = deployed.run(parse_federation(busy, base=Path()), path, tell=told.append)
    thread.join()
    assert bits == local(busy, tmp_path / "local")
    assert any("a new one is started, nothing is lost" in text for text in told), told


@mainly_on()
def test_a_slow_site_is_dropped_for_the_round(deployed: Deployment, busy, tmp_path) -> None:
    """It stops in the middle of round 2 and is continued after the deadline: it is in round 3 again."""
    busy |= {"rounds": 3, "faults": {"on_lost": "drop", "min_sites": 2, "deadline": 20}}
    deployed.accept(busy)

    def stall() -> None:
        pid = deployed.worker("s0")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + 120
        while not (path / "rounds" / "0002").exists() and time.monotonic() < end:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):  # the next question has ended it already
            os.kill(pid, signal.SIGCONT)

    path = tmp_path / "run"
    thread = in_the_middle(deployed, "s0", path, 2, stall)
    bits = deployed.run(parse_federation(busy, base=Path()), path)
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
def test_a_run_does_not_go_on_without_what_a_site_remembers(deployed: Deployment, small, tmp_path) -> None:
    """The moments of a site's optimizer are in its kit; the local engine does not have them, and says so."""
    deployed.accept(small)
    federation = parse_federation(small, base=Path())
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        deployed.run(federation, path, after_round=stop_after(1))
    with pytest.raises(RunFolderError, match="site s0: does not hold the private memory with which round 1"):
        run_federation(federation, path, tell=lambda text: None, resume=True)
    assert deployed.run(federation, path, resume=True) == local(small, tmp_path / "local")


def test_another_federation_file_is_refused_with_its_difference(
    deployed: Deployment, small, tmp_path
) -> None:
    deployed.accept(small)
    small["local"]["lr"] = 0.5
    with pytest.raises(FederationError) as caught:
        deployed.run(parse_federation(small, base=Path()), tmp_path / "run")
    text = str(caught.value)
    assert "site s0: has agreed to another federation file" in text
    assert "local.lr: 0.01 at the site, 0.5 at the server" in text and "fedatlas deploy accept" in text
    assert "local.lr: 0.01 here, 0.5 at the server" in (deployed.out / "s0" / "errors.log").read_text()


def test_a_second_party_of_one_name_is_refused(deployed: Deployment, capsys) -> None:
    """The same kit twice on one machine: the second does not start. A copy of it elsewhere: the run is not disturbed."""
    kit, data = deployed.out / "s0", deployed.data["s0"]
    assert main(["deploy", "start", str(kit), f"--data={data}"]) == 1
    assert "is running already" in capsys.readouterr().err


def test_a_site_that_is_not_there_is_told(deployed: Deployment, small, tmp_path) -> None:
    """The last test of a deployment: until the site is back, the engine's job is without it."""
    small["faults"] = {"deadline": 5}
    deployed.accept(small)
    deployed.kill("s1")
    try:
        with pytest.raises(SiteLost, match="hello: no usable answer from\n  s1: "):
            deployed.run(parse_federation(small, base=Path()), tmp_path / "run")
    finally:
        deployed.start("s1")


@pytest.mark.parametrize(("first", "second"), [("nvflare", "flower")])
def test_a_run_goes_on_with_any_other_engine(first, second, small, tmp_path) -> None:
    """A round here, a round on one engine, a round on the other: the bits of a run that was never stopped. Each brings
    servers and sites of its own, which end with the run."""
    for package in ("nvflare", "flwr"):
        pytest.importorskip(package)
    small |= {"rounds": 3, "sites": small["sites"][:2]}
    small["evaluation"] |= {"models": ["last"], "every": 10}
    federation = parse_federation(small, base=Path())
    path, quiet = tmp_path / "run", {"tell": lambda text: None, "resume": True}
    with pytest.raises(KeyboardInterrupt):
        run_federation(federation, path, after_round=stop_after(1), **quiet)
    with pytest.raises(KeyboardInterrupt):
        run_federation(federation, path, after_round=stop_after(2), gather=gather_trial(first), **quiet)
    run_federation(federation, path, gather=gather_trial(second), **quiet)
    assert (path / "models" / "last.fa").read_bytes() == local(small, tmp_path / "local")
    engines = {line["function"] for line in logs_of(path)["s0"]}
    assert {"hello", "layout", "join", "local_update", "evaluate", "evaluate_several"} == engines


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


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_certificate_is_signed_for_the_days_that_it_can_be_made_for(
    engine, small, tmp_path, capsys
) -> None:
    pytest.importorskip({"nvflare": "nvflare", "flower": "flwr"}[engine])
    init(parse_federation(small, base=Path()), tmp_path / "deploy", engine=engine)
    request = adapter(engine).renew(tmp_path / "deploy" / "server")
    sign = ["deploy", "sign", str(tmp_path / "deploy"), str(request), "-o", str(tmp_path / "answers")]
    for days in ("0", "-1", "100000000"):
        assert main([*sign, "--days", days]) == 1
        assert f"--days {days}: certificates can be valid for 1 to 36500 days" in capsys.readouterr().err
    assert not (tmp_path / "answers").exists()


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


def test_a_party_ends_with_the_process_that_it_was_started_for(tmp_path, monkeypatch) -> None:
    """As where `fedatlas run` is killed: nobody is left to end the parties that it started."""
    launch = Launch((sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr("fedatlas.federation.deploy.read_kit", lambda kit: {"party": "server", "engine": "x"})
    monkeypatch.setattr(
        "fedatlas.federation.deploy.adapter", lambda name: SimpleNamespace(server_process=lambda kit: launch)
    )
    told: list[str] = []
    start(tmp_path, None, told.append, parent=os.getppid() + 1)
    assert told[-1] == "server: ending"
    assert not [child for child in psutil.Process().children() if "time.sleep(60)" in str(child.cmdline())]


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
