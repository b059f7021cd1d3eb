"""What a deployment does where something is not there: a server, a port, a package, a kit's file. The engine is a stub
whose jobs are threads of this process."""

import errno
import fcntl
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from deployments import until

from fedatlas.cli import main, parser
from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.federation import across, deploy
from fedatlas.federation.across import Deployed, free_ports, gather, gather_trial, join
from fedatlas.federation.deploy import Keeper, News, adapter, start, write_shared
from fedatlas.federation.design import versions
from fedatlas.federation.facts import problem_of_hello
from fedatlas.federation.file import hash_of, load_federation, parse_federation
from fedatlas.federation.site import SiteDesk, require_usable
from fedatlas.transport import wire
from fedatlas.transport.deployment import ENGINES, RELAY, Launch, bound, listens_at
from fedatlas.transport.frames import Question
from fedatlas.transport.relay import JobEnd, ServerRelay
from fedatlas.transport.rounds import RunFolder

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

# ------------------------------------------------------------------------------------------------ the way to the sites


class Job:
    """A job that holds its questions for some seconds and then ends, or answers them first."""

    def __init__(self, relay: Path, lives: float, answers: bool, takes_in: bool) -> None:
        self.relay, self.lives, self.answers, self.takes_in = relay, lives, answers, takes_in
        self.how: str | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        end = JobEnd(self.relay)
        for ask in end.asks():
            if self.answers:
                for question in ask.questions:
                    end.answered(ask, question.site)
                continue
            break
        time.sleep(self.lives)
        end.close()
        self.how = "a machine went down"

    def ended(self) -> str | None:
        return self.how

    def stop(self) -> None: ...


class Engine:
    """Takes jobs while `up` is set. jobs: what the first ones are like, (seconds, takes_in); all others answer."""

    PROXIED = False

    def __init__(self, jobs: Sequence[tuple[float, bool]] = ()) -> None:
        self.up = threading.Event()
        self.jobs, self.submitted, self.asked = list(jobs), 0, 0

    def require(self) -> None: ...

    def submit(self, kit: Path, authority: Path, relay: Path, sites: Sequence[str]) -> Job:
        self.asked += 1
        if not self.up.is_set():
            raise FederationError("the server did not take the job; is it running?")
        self.submitted += 1
        lives, takes_in = self.jobs.pop(0) if self.jobs else (0.0, False)
        return Job(relay, lives, self.submitted > self.bad, takes_in)

    bad = 0


@pytest.fixture
def way(tmp_path, monkeypatch) -> Iterator[Callable[[Engine], Deployed]]:
    """Opens the way to site a over an engine, with times that suit a test."""
    for name, value in {"PATIENCE": 0.3, "PAUSE": 0.02, "LOOK": 0.02, "GONE": 5.0, "STARTING": 0.2}.items():
        monkeypatch.setattr(Deployed, name, value)
    opened: list[Deployed] = []
    (tmp_path / "server").mkdir()

    def open_(engine: Engine) -> Deployed:
        monkeypatch.setattr(across, "adapter", lambda name: engine)
        opened.append(Deployed("stub", tmp_path, ["a"], told.append, "first"))
        return opened[-1]

    told: list[str] = []
    yield open_
    for one in opened:
        one.close()


def questions(folder: Path) -> list[Question]:
    return [Question("a", "f", 1, 0, folder / "shared", None, folder / "reply")]


def test_a_server_that_comes_late_is_found(way, tmp_path) -> None:
    """The sites are lost once the patience is over, for who does not wait; and the server is asked on."""
    engine = Engine()
    opened = way(engine)
    assert dict(opened.ask(questions(tmp_path), 30)) == {
        "a": "the server did not take the job; is it running?"
    }
    assert "is it running" in str(dict(opened.ask(questions(tmp_path), 30))["a"]), "at once"
    asked = engine.asked
    until(lambda: engine.asked > asked + 3, 10, "the server is asked on")
    engine.up.set()
    until(lambda: opened.relay.failed is None and opened.relay.connected, 10, "the job is there")
    assert dict(opened.ask(questions(tmp_path), 30)) == {"a": None}


def test_a_deployment_serves_one_run_at_a_time(way, tmp_path) -> None:
    """A second run would take its socket and its sites; it is told who has them."""
    engine = Engine()
    engine.up.set()
    first = way(engine)
    with pytest.raises(FederationError, match=rf"run first \(process {os.getpid()} on .*one run at a time"):
        Deployed("stub", tmp_path, ["a"], print, "second")
    assert dict(first.ask(questions(tmp_path), 30)) == {"a": None}
    first.close()
    assert dict(way(engine).ask(questions(tmp_path), 30)) == {"a": None}


def test_a_server_that_was_away_loses_no_later_question(tmp_path) -> None:
    relay = ServerRelay(tmp_path / "relay")
    try:
        relay.fail("away")
        relay.fail("still away")
        assert dict(relay.ask(questions(tmp_path), 30)) == {"a": "still away"}
        relay.mend()
        Job(tmp_path / "relay", 0, True, False)
        assert dict(relay.ask(questions(tmp_path), 30)) == {"a": None}
    finally:
        relay.close()


@pytest.mark.parametrize("job", [(0.5, False), (0.0, True)], ids=["long", "for a site"])
def test_jobs_that_end_in_a_long_call_end_no_run(job: tuple[float, bool], way, tmp_path) -> None:
    """However many: each was there for longer than it takes to start one, or made way for a site that came back."""
    engine = Engine([job] * (Deployed.MOST + 2))
    engine.bad = len(engine.jobs)
    engine.up.set()
    assert dict(way(engine).ask(questions(tmp_path), 60)) == {"a": None}
    assert engine.submitted == Deployed.MOST + 3


def test_an_engine_whose_jobs_fail_at_once_ends_the_run(way, tmp_path) -> None:
    """By an error that no rule for lost sites waits for."""
    engine = Engine([(0.0, False)] * 50)
    engine.bad = 50
    engine.up.set()
    opened = way(engine)
    for _ in range(2):
        with pytest.raises(
            FedAtlasError, match=r"ended 5 times in a row .* \(a machine went down\).*--resume"
        ):
            dict(opened.ask(questions(tmp_path), 30))
    assert engine.submitted == Deployed.MOST


def test_an_engine_that_breaks_ends_the_run(way, tmp_path) -> None:
    engine = Engine()
    engine.submit = lambda *more: {}["nothing"]  # type: ignore[method-assign]
    with pytest.raises(FedAtlasError, match="could not be looked after .KeyError"):
        dict(way(engine).ask(questions(tmp_path), 30))


@pytest.mark.parametrize("made", [lambda name: gather(name, Path("nowhere")), gather_trial])
@pytest.mark.parametrize("name", sorted(ENGINES))
def test_a_missing_package_is_told_before_anything_is_asked(name: str, made, monkeypatch) -> None:
    where = {
        "nvflare": "fedatlas.transport.nvflare.engine.find_spec",
        "flower": "fedatlas.transport.flower.engine.importlib.util.find_spec",
    }
    adapter(name)  # is imported with what is there
    monkeypatch.setattr(where[name], lambda package: None)
    with pytest.raises(FederationError, match=rf'not installed.*pip install "fedatlas\[{name}\]"'):
        made(name)(None, None, print)


# -------------------------------------------------------------------------------------------------- starting a party


@pytest.fixture
def kit(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Makes a kit of a party; its engine's process sleeps, and leaves a file where it began."""
    code = "import pathlib, time; pathlib.Path('began').touch(); time.sleep(60)"

    def launch(kit: Path) -> Launch:
        return Launch((sys.executable, "-c", code), folder=kit)

    engine = SimpleNamespace(server_process=launch, site_process=launch, PROXIED=False)
    monkeypatch.setattr(deploy, "adapter", lambda name: engine)

    def make(party: str, **about: Any) -> Path:
        folder = tmp_path / party
        folder.mkdir()
        plain = {"party": party, "engine": "stub", "host": "localhost"} | about
        (folder / "kit.yaml").write_text(yaml.safe_dump(plain))
        return folder

    return make


def nobody() -> int:
    """A parent that is not there: a party ends as soon as it has begun."""
    return os.getppid() + 1


@pytest.mark.parametrize("taken", ["port", "admin_port"])
def test_a_server_whose_port_is_taken_does_not_start(taken: str, kit) -> None:
    ports: dict[str, int] = dict(zip(("port", "admin_port"), free_ports(2), strict=True))
    folder = kit("server", **ports)
    with socket.create_server(("127.0.0.1", ports[taken])):
        with pytest.raises(FederationError, match=rf"port {ports[taken]} .*Address already in use.*--port"):
            start(folder, None, print, parent=nobody())
        assert not (folder / "began").exists()
    told: list[str] = []
    start(folder, None, told.append, parent=nobody())
    assert told[-1] == "server: ending"


def test_a_port_is_looked_at_when_what_a_killed_server_left_is_gone(kit) -> None:
    (port,) = free_ports(1)
    folder = kit("server", port=port)
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(1, flush=True); time.sleep(60)"
    left = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {RELAY: str(folder / "relay")},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert left.stdout is not None and left.stdout.read(1)
    threading.Thread(target=left.wait, daemon=True).start()
    (folder / "engine.pid").write_text(str(left.pid))
    start(folder, None, lambda text: None, parent=nobody())
    assert left.wait(10) < 0


def test_a_file_system_without_locks_stops_nobody(kit, tmp_path, monkeypatch) -> None:
    """A run, a deployment's server and a party say what nobody makes sure of then, and go on."""

    def flock(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    folder, told = kit("server"), list[str]()
    with RunFolder(tmp_path / "run").held(told.append):
        across._held(folder, "first", told.append).close()
        start(folder, None, told.append, parent=nobody())
    asked = (
        (tmp_path / "run", "no other process works on this run"),
        (folder, "no other run uses this deployment"),
        (folder, "this party is started once"),
    )
    said = [f"{place}: cannot be locked (Function not implemented); see that {what}" for place, what in asked]
    assert [text for text in told if "lock" in text] == said and told[-1] == "server: ending"


def test_where_a_server_listens() -> None:
    assert [listens_at(host) for host in ("localhost", "127.0.0.2", "::1")] == [
        "127.0.0.1",
        "127.0.0.2",
        "::1",
    ]
    assert [listens_at(host) for host in ("fl.example.org", "10.0.0.4", "2001:db8::1")] == [
        "0.0.0.0",
        "0.0.0.0",
        "::",
    ]
    with bound("0.0.0.0", 0) as one:
        assert one.getsockname()[1] and not one.get_inheritable()


def test_a_site_is_told_that_the_server_is_not_reached_and_when_it_is(monkeypatch) -> None:
    monkeypatch.setattr(deploy, "KNOCK", 0.02)
    (port,) = free_ports(1)
    told, over = list[str](), threading.Event()
    about = {"party": "a", "host": "localhost", "port": port}
    tell = lambda engine: deploy._tell_when_reached(about, engine, over, told.append)  # noqa: E731
    tell(Engine())
    until(lambda: told, 10)
    time.sleep(0.2)
    assert told == [
        f"a: the server's port, localhost:{port}, cannot be reached (Connection refused); it is tried on"
    ]
    with socket.create_server(("127.0.0.1", port)):
        until(lambda: len(told) == 2, 10)
        assert told[1] == f"a: the server's port, localhost:{port}, is reached"
        about["host"] = "fl.example.org"
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        tell(SimpleNamespace(PROXIED=True))
    over.set()
    assert len(told) == 2, "behind a proxy nothing is known"


@pytest.mark.parametrize(
    ("prints", "quoted"),
    [
        (
            "'one', 'port 8002 of this machine cannot be had', 'two'",
            "(port 8002 of this machine cannot be had)",
        ),
        ("'one', 'two'", "(two)"),
        ("''", "exit code 3;"),
    ],
)
def test_the_end_of_an_engines_process_is_told_with_what_it_said(prints: str, quoted: str, tmp_path) -> None:
    log, told = tmp_path / "engine.log", list[str]()
    log.write_text("an error of long ago\n")
    code = f"print({prints}, sep='\\n'); raise SystemExit(3)"
    launch = Launch((sys.executable, "-c", code), pause=60.0)
    keeper = Keeper(launch, tmp_path / "relay", log, tmp_path / "pid", told.append, "server")
    try:
        until(lambda: (keeper.look(), told)[1], 10)
    finally:
        keeper.close()
    assert len(told) == 1 and quoted in told[0] and "long ago" not in told[0] and str(log) in told[0]


def test_a_site_without_its_federation_file_does_not_start(kit, tmp_path) -> None:
    folder, data = kit("s0"), {"s0": str(tmp_path)}
    with pytest.raises(FederationError, match=r"s0/federation\.yaml: no such file"):
        start(folder, data, print, parent=nobody())
    assert not (folder / "began").exists() and not (folder / "logs" / "site.log").exists()


@pytest.mark.parametrize(
    ("party", "data", "said"),
    [
        ("s0", ["s1=DATA"], "s0 is the folder of s0; give --data DATA"),
        ("server", ["DATA"], "server is the server's folder, which has no data; leave it out"),
        (
            "s0",
            ["DATA", "s0=other"],
            "--data s0=other: DATA was given before; one folder holds the data of s0",
        ),
    ],
)
def test_data_of_another_party(party, data, said, kit, tmp_path, capsys) -> None:
    """A site that serves the data of another one, or of two folders the second alone, is not what was meant."""
    given = [f"--data={text.replace('DATA', str(tmp_path))}" for text in data]
    assert main(["deploy", "start", str(kit(party)), *given]) == 1
    assert said.replace("DATA", str(tmp_path)) in capsys.readouterr().err


def test_a_file_that_says_what_was_agreed_to_differs_in_nothing(small, tmp_path, capsys) -> None:
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(small))
    (tmp_path / "kit.yaml").write_text("party: s0\nengine: flower\n")
    deploy.write_shared(load_federation(file), file)
    assert main(["deploy", "accept", str(tmp_path), str(file)]) == 0
    assert capsys.readouterr().out == "nothing differs\n"


def test_a_site_whose_folder_cannot_be_written_does_not_start(kit, tmp_path) -> None:
    folder, data = kit("s0"), {"s0": str(tmp_path)}
    (tmp_path / "file").write_text("")
    for option in ("state", "cache"):
        with pytest.raises(
            FederationError, match=rf"--{option} .*/file/x: cannot be written \(Not a directory\)"
        ):
            start(folder, data, print, parent=nobody(), **{option: tmp_path / "file" / "x"})
    assert not (folder / "began").exists()


@pytest.mark.parametrize(
    ("text", "device", "reason"),
    [
        ("name: [", None, "not valid YAML"),
        ("", None, "is empty"),
        (
            None,
            "cuda:77",
            "site s0: engine.device: got 'cuda:77', which cannot be used here .*chosen with --device",
        ),
        (None, "gpu", "site s0: engine.device: got 'gpu'"),
        (None, "cpu", None),
    ],
)
def test_what_a_site_agreed_to_must_be_usable(text, device, reason, small, tmp_path) -> None:
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(small) if text is None else text)
    if reason is None:
        require_usable("s0", str(file), {"s0": str(tmp_path)}, device)
        with pytest.raises(FederationError, match=r"does not name x; its sites are s0, s1"):
            require_usable("x", str(file), {"x": str(tmp_path)}, device)
        return
    with pytest.raises(FederationError, match=reason):
        require_usable("s0", str(file), {"s0": str(tmp_path)}, device)


def test_people_at_a_hospital_are_told_why_its_own_process_ends(tmp_path) -> None:
    told, log = list[str](), tmp_path / "site.log"
    news = News(tmp_path, "s0", told.append, log)
    log.write_text(
        'Downloading: 100%\nnote: nothing\nTraceback (most recent call last):\n  File "x.py", line 1\n'
    )
    news.look()
    assert told == []
    with log.open("a") as file:
        file.write("    f()\nValueError: no such thing\nnote: after it\n")
    news.look()
    assert told == [f"s0: error: ValueError: no such thing ({log})"]


# ------------------------------------------------------------------------------------------------- versions and files


def test_a_site_of_another_version_is_told_so_whatever_else_its_hello_holds() -> None:
    here = {"fedatlas": "0.2.0", "torch": "2.1+cpu"}
    old = {"versions": {"fedatlas": "0.1.0", "torch": "2.1"}, "hash": "x"}
    assert problem_of_hello(old, versions=here) is None, "their comparison is told"
    assert "federation" in str(problem_of_hello(old | {"versions": here}, versions=here))
    for wrong in ({"versions": {"fedatlas": 1}}, {"hash": None}, {"versions": {"=x": "1"}}):
        assert problem_of_hello(old | wrong, versions=here)


@pytest.mark.parametrize("more", [{}, {"federation": "[" * 3000}, {"clock": "noon", "channels": "many"}])
def test_a_run_with_a_site_of_an_older_version_says_which(more, small, tmp_path) -> None:
    federation = parse_federation(small, base=Path())

    def ask(questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, None]]:
        for one in questions:
            facts = {"versions": versions() | {"fedatlas": "0.0.1"}, "hash": hash_of(federation)} | more
            head = {name: getattr(one, name) for name in ("site", "function", "round", "call")}
            tree = {"to": head, "from": "", "memory": "", "log": {}, "value": {"facts": facts}}
            one.reply.write_bytes(wire.encode(tree | {"cost": {"seconds": 1.0, "peak_mb": 1.0}}))  # type: ignore[arg-type]
            yield one.site, None

    transport = SimpleNamespace(sites=["s0"], ask=ask, close=lambda: None)
    with pytest.raises(FederationError, match=r"^site s0: fedatlas 0\.0\.1 is installed, .* at the server"):
        join(federation, RunFolder(tmp_path / "run"), print, transport)  # type: ignore[arg-type]


def test_a_site_has_ten_minutes_to_say_hello_and_the_deadline_to_list_its_data(
    small, tmp_path, monkeypatch
) -> None:
    """So too where a run is resumed, which goes on without a site that hangs if its rule is to drop it."""
    small |= {"sites": small["sites"][:2], "faults": {"on_lost": "drop", "deadline": 5000}}
    federation, file = parse_federation(small, base=Path()), tmp_path / "federation.yaml"
    write_shared(federation, file)
    cache, paths = Path(small["engine"]["cache"]), {site["name"]: site["path"] for site in small["sites"]}
    desks = {s: SiteDesk(s, file, {s: path}, tmp_path / s, cache) for s, path in paths.items()}
    asked, told, hangs = list[tuple[str, float]](), list[str](), set[str]()

    def ask(questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        asked.append((questions[0].function, deadline))
        for one in questions:
            if one.site not in hangs:
                desks[one.site].answer(one)
            yield one.site, f"no answer within {deadline:g} s" if one.site in hangs else None

    transport = SimpleNamespace(sites=["s0", "s1"], ask=ask, close=lambda: None)
    folder = RunFolder(tmp_path / "run")
    calls = [("hello", across.COMING), ("layout", 5000), ("join", 5000)]
    begun = join(federation, folder, told.append, transport)  # type: ignore[arg-type]
    assert asked == calls and "waits for s0, s1, at most 600 s" in told
    assert sorted(begun.summaries) == ["s0", "s1"] and begun.design.space.names

    (folder.path / "run.json").touch()
    record = {"labels": begun.about["labels"], "sites": dict(begun.summaries)}
    monkeypatch.setattr(across, "read_run", lambda path: record)
    hangs.add("s1")
    asked.clear(), told.clear()
    join(federation, folder, told.append, transport)  # type: ignore[arg-type]
    assert asked == calls and told[0] == "waits for s0, s1, at most 600 s"
    assert told[1:] == ["goes on without s1: no answer within 600 s", "joined: s0"]


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_the_command_that_init_prints_runs_what_the_kits_agreed_to(name: str, tmp_path, capsys) -> None:
    pytest.importorskip({"nvflare": "nvflare", "flower": "flwr"}[name])
    out, file = tmp_path / "a deployment", EXPERIMENTS / "three-hospitals.yaml"
    given = ["--override", "rounds=3", "--override", "labels.names=[background, brainstem, spinal_cord]"]
    assert main(["deploy", "init", str(file), *given, "-o", str(out), "--engine", name]) == 0
    (line,) = re.findall(r"^then: (.*)$", capsys.readouterr().out, re.M)
    program, *command = shlex.split(line)
    arguments = parser(command).parse_args(command)
    assert (program, command[0], arguments.engine, arguments.deploy) == ("fedatlas", "run", name, out)
    run = load_federation(arguments.federation, arguments.override)
    assert run.rounds == 3 and hash_of(run) == hash_of(
        load_federation(out / "hospital-a" / "federation.yaml")
    )
