"""transport/nvflare: real servers and clients of NVIDIA FLARE on loopback, mutual TLS; a site's own process is
played by a relay in this one, so that no net is needed."""

import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from deployments import until

from fedatlas.core.errors import FederationError
from fedatlas.federation import across
from fedatlas.federation.across import free_ports
from fedatlas.federation.file import parse_federation
from fedatlas.transport import pki
from fedatlas.transport.deployment import RELAY, Job, Launch, Plan
from fedatlas.transport.frames import Question
from fedatlas.transport.nvflare import engine as nvflare
from fedatlas.transport.relay import Ask, ServerRelay, SiteRelay
from fedatlas.transport.rounds import RunFolder

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed")
psutil = pytest.importorskip("psutil")

SITES = ("site-1", "site-2", "site-3")
RUNNING = SITES[:2]


def echo(question: Question) -> str | None:
    """Answers with what came: its head, the shared payload and the own one."""
    with question.reply.open("wb") as reply:
        reply.write(question.head())
        for path in (question.shared, question.own):
            if path is not None:
                reply.write(path.read_bytes())
    return None


@dataclass
class Deployment:
    """A server and two of its three sites."""

    root: Path
    plan: Plan
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    relays: list[SiteRelay] = field(default_factory=list)
    serve: Callable[[Question], str | None] = echo
    calls: int = 0
    job: Job | None = None

    @property
    def out(self) -> Path:
        return self.root / "deploy"

    def start(self, name: str, launch: Launch) -> None:
        env = os.environ | dict(launch.env) | {RELAY: str(self.root / f"{name}.relay")}
        with (self.root / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                launch.command, cwd=launch.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """With every process that it started."""
        process = self.processes.pop(name)
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        for member in family:
            if member.is_running():
                member.kill()
        process.wait()

    def submit(self) -> Job:
        return nvflare.submit(
            self.out / "server", self.out / "authority", self.root / "server.relay", RUNNING
        )

    def questions(
        self, shared: bytes, own: dict[str, bytes], sites: tuple[str, ...] = RUNNING
    ) -> list[Question]:
        self.calls += 1
        folder = self.root / "payloads" / str(self.calls)
        folder.mkdir(parents=True)
        (folder / "shared").write_bytes(shared)
        for site, data in own.items():
            (folder / site).write_bytes(data)
        return [
            Question(
                site=site,
                function="fit",
                round=1,
                call=self.calls,
                shared=folder / "shared",
                own=folder / site if site in own else None,
                reply=folder / f"{site}.reply",
                about={"hash": "ab"},
            )
            for site in sites
        ]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    root = tmp_path_factory.mktemp("nvflare")
    made = Deployment(root, Plan("federation", "127.0.0.1", *free_ports(2), SITES, days=30))
    nvflare.provision(made.plan, made.out)
    try:
        made.start("server", nvflare.server_process(made.out / "server"))
        for site in RUNNING:
            made.relays.append(SiteRelay(root / f"{site}.relay", lambda question, late: made.serve(question)))
            made.start(site, nvflare.site_process(made.out / site))
        yield made
    finally:
        for name in list(made.processes):
            made.kill(name)
        for relay in made.relays:
            relay.close()


@pytest.fixture(scope="module")
def server(deployment: Deployment) -> Iterator[ServerRelay]:
    """The federation's end, with a job on it that both sites have joined."""
    relay = ServerRelay(deployment.root / "server.relay")
    until(lambda: open_port(deployment.plan.admin_port), 30, "the server listens")
    deployment.job = job = deployment.submit()
    try:
        until(lambda: relay.present == list(RUNNING) or job.ended(), 40, "the sites join")
        assert job.ended() is None
        yield relay
    finally:
        relay.close()
        deployment.job.stop()


def open_port(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ask(server: ServerRelay, questions: list[Question], deadline: float = 30) -> dict[str, str | None]:
    return dict(server.ask(questions, deadline))


# ----------------------------------------------------------------------------------------------------- the road


def test_payloads_of_any_size_come_back_equal(deployment: Deployment, server: ServerRelay) -> None:
    large = os.urandom(5_000_000) + bytes(4_000_000)
    for shared, own in [
        (b"one", {}),
        (b"", {"site-1": b""}),
        (large, {"site-2": b"for two only"}),
        (b"three", {"site-1": large, "site-2": b"2"}),
    ]:
        questions = deployment.questions(shared, own)
        assert ask(server, questions) == {"site-1": None, "site-2": None}
        for question in questions:
            assert question.reply.read_bytes() == question.head() + shared + own.get(question.site, b"")
    for site in RUNNING:
        until(
            lambda s=site: left_over(deployment, s) == [], 5, "payloads and answers are deleted at the site"
        )


def left_over(deployment: Deployment, site: str) -> list[Path]:
    return [path for path in (deployment.out / site / "engine" / "relay").rglob("*") if path.is_file()]


def test_an_answer_that_is_too_large_is_not_taken(deployment: Deployment, server: ServerRelay) -> None:
    """Of a site that sends more than it can have to say no more is written than that, and the others are served."""
    questions = deployment.questions(b"x" * 20_000_000, {})
    questions[0] = replace(questions[0], most=9_000_000)
    lost = ask(server, questions)
    assert lost[RUNNING[0]] == (
        "its answer has more than the 9,000,000 bytes that one with what is declared may have"
    )
    assert lost[RUNNING[1]] is None and questions[1].reply.exists() and not questions[0].reply.exists()


def test_one_ask_goes_to_all_sites_at_once(deployment: Deployment, server: ServerRelay) -> None:
    both = threading.Barrier(2, timeout=10)
    deployment.serve = lambda question: (both.wait(), echo(question))[1]
    assert ask(server, deployment.questions(b"x", {})) == {"site-1": None, "site-2": None}
    deployment.serve = echo


def test_a_deadline_passes_and_the_late_answer_is_dropped(
    deployment: Deployment, server: ServerRelay
) -> None:
    hold = threading.Event()
    deployment.serve = lambda question: (question.site == "site-2" and hold.wait(20), echo(question))[1]
    questions = deployment.questions(b"x", {})
    began = time.monotonic()
    answers = ask(server, questions, deadline=2)
    assert 1.9 < time.monotonic() - began < 3.5
    assert answers["site-1"] is None and answers["site-2"]
    hold.set()
    deployment.serve = echo
    again = deployment.questions(b"y", {})
    assert ask(server, again) == {"site-1": None, "site-2": None}
    assert again[1].reply.read_bytes() == again[1].head() + b"y"
    assert not questions[1].reply.exists()


def test_a_lost_site_is_named_with_its_reason(deployment: Deployment, server: ServerRelay) -> None:
    def serve(question: Question) -> str | None:
        if question.site == "site-1":
            return "refused by the site"
        raise RuntimeError("patient 4711")

    deployment.serve = serve
    threading.excepthook, old = lambda _: None, threading.excepthook
    try:
        answers = ask(server, deployment.questions(b"x", {}))
    finally:
        threading.excepthook, deployment.serve = old, echo
    assert answers["site-1"] == "refused by the site"
    assert answers["site-2"] and "4711" not in answers["site-2"]


def test_a_site_that_never_joined_is_lost_at_once(deployment: Deployment, server: ServerRelay) -> None:
    began = time.monotonic()
    answers = ask(server, deployment.questions(b"x", {}, SITES))
    assert answers["site-1"] is None and answers["site-2"] is None and answers["site-3"]
    assert time.monotonic() - began < 10


# ------------------------------------------------------------------------------------------------------ security


def knock(deployment: Deployment, kit: Path | None, port: int | None = None) -> bytes:
    """What the server says to a party with that kit's certificate (None: with none) after the TLS handshake."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kit is not None:
        startup = kit / "engine" / "startup"
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
    with (
        socket.create_connection(("127.0.0.1", port or deployment.plan.port), timeout=5) as plain,
        context.wrap_socket(plain) as secure,
    ):
        secure.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return secure.recv(100)


def test_only_certificates_of_this_deployment_are_let_in(
    deployment: Deployment, server: ServerRelay, tmp_path: Path
) -> None:
    other = Plan("federation", "127.0.0.1", deployment.plan.port, deployment.plan.admin_port, SITES)
    nvflare.provision(other, tmp_path / "other")
    expired = tmp_path / "expired"
    shutil.copytree(deployment.out / "site-1" / "engine" / "startup", expired / "engine" / "startup")
    certificate = expired / "engine" / "startup" / "client.crt"
    old = pki.certificate_of(certificate)
    certificate.write_bytes(nvflare._issue(old, old.public_key(), deployment.out / "authority", -1))

    assert knock(deployment, deployment.out / "site-1").startswith(b"HTTP/1.1")
    for port in (deployment.plan.port, deployment.plan.admin_port):
        for kit in (tmp_path / "other" / "site-1", expired, None):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                assert not knock(deployment, kit, port)
                raise ConnectionError("closed without a word")


def test_plain_text_is_refused_and_a_silent_caller_stops_nobody(
    deployment: Deployment, server: ServerRelay
) -> None:
    with (
        socket.create_connection(("127.0.0.1", deployment.plan.port), timeout=5) as silent,
        socket.create_connection(("127.0.0.1", deployment.plan.port), timeout=5) as plain,
    ):
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            said = plain.recv(100)
        except ConnectionError:
            said = b""
        assert b"HTTP" not in said
        assert knock(deployment, deployment.out / "site-1").startswith(b"HTTP/1.1")
        assert ask(server, deployment.questions(b"x", {})) == {"site-1": None, "site-2": None}
        silent.close()


def test_a_site_cannot_take_the_name_of_another(deployment: Deployment, server: ServerRelay) -> None:
    false = deployment.root / "false"
    shutil.copytree(deployment.out / "site-2" / "engine" / "startup", false / "engine" / "startup")
    shutil.copytree(deployment.out / "site-2" / "engine" / "local", false / "engine" / "local")
    launch = nvflare.site_process(false)
    command = tuple("uid=site-3" if word == "uid=site-2" else word for word in launch.command)
    assert "uid=site-3" in command
    deployment.start("false", Launch(command, launch.env, launch.folder))
    log = deployment.root / "server.log"
    until(
        lambda: "authenticated as 'site-2' but claimed" in log.read_text(), 20, "the server refuses the name"
    )
    deployment.kill("false")
    assert "site-3 with token" not in log.read_text().lower() and not server.present.count("site-3")


def test_a_kit_is_private_and_quiet(deployment: Deployment) -> None:
    keys = [path for path in deployment.out.rglob("*.key")]
    assert len(keys) == 6
    for path in [*keys, *deployment.out.rglob("*.json")]:
        if path.suffix == ".key" or "PRIVATE" in path.read_text():
            assert path.stat().st_mode & 0o077 == 0, path
    assert (deployment.out / "authority").stat().st_mode & 0o077 == 0
    site = (deployment.out / "site-1" / "engine" / "local" / "resources.json").read_text()
    assert '"allow_log_streaming": false' in site and "streamer" not in site
    for kit in ("server", "site-1"):
        text = (deployment.out / kit / "engine" / "local" / "resources.json").read_text()
        assert "nvflare.job.RelayController" in text and '"enforce"' in text
    certificate = pki.certificate_of(deployment.out / "site-1" / "engine" / "startup" / "client.crt")
    # a day before it is made, for clocks that are behind, and 30 after
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 31


# -------------------------------------------------------------------------------------------------------- keys


def test_a_request_needs_the_present_key_and_a_certificate_its_own(tmp_path: Path) -> None:
    nvflare.provision(Plan("federation", "example.org", 9001, 9002, ("a", "b"), days=5), tmp_path)
    authority = tmp_path / "authority"
    with pytest.raises(FederationError, match="waits for no answer"):
        nvflare.install(tmp_path / "a", authority / "issued" / "a.crt")
    before = (tmp_path / "a" / "engine" / "startup" / "client.key").read_bytes()
    request = nvflare.renew(tmp_path / "a")
    assert "PRIVATE" not in request.read_text()
    with pytest.raises(FederationError, match="does not belong"):
        nvflare.install(tmp_path / "a", authority / "issued" / "b.crt")
    answer = nvflare.sign(request, authority, tmp_path, days=7)
    nvflare.install(tmp_path / "a", answer)
    assert (tmp_path / "a" / "engine" / "startup" / "client.key").read_bytes() != before
    assert nvflare._name(tmp_path / "a" / "engine") == "a"

    # whoever still has the key before cannot ask for the next one
    (tmp_path / "a" / "engine" / "startup" / "client.key").write_bytes(before)
    stale = nvflare.renew(tmp_path / "a")
    with pytest.raises(FederationError, match="not signed with the key"):
        nvflare.sign(stale, authority, tmp_path, days=7)
    (authority / "issued" / "a.crt").rename(authority / "issued" / "a.lost")
    nvflare.install(tmp_path / "a", nvflare.sign(stale, authority, tmp_path, days=7))

    renewed = nvflare.sign(nvflare.renew(tmp_path / "server"), authority, tmp_path, days=7)
    nvflare.install(tmp_path / "server", renewed)
    assert "example.org" in str(pki.certificate_of(renewed).extensions)
    damaged = tmp_path / "damaged"
    damaged.write_text(stale.read_text()[:200] if stale.exists() else "{}")
    with pytest.raises(FederationError, match="no request"):
        nvflare.sign(damaged, authority, tmp_path, days=7)
    elsewhere = tmp_path / "elsewhere"
    nvflare.provision(Plan("federation", "example.org", 9001, 9002, ("c",)), elsewhere)
    with pytest.raises(FederationError, match="'c'"):
        nvflare.sign(nvflare.renew(elsewhere / "c"), authority, tmp_path, days=7)


def test_the_certificate_that_submits_jobs_is_made_anew_near_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment takes jobs as long as its parties' certificates are renewed."""
    nvflare.provision(Plan("federation", "localhost", 9001, 9002, ("a",), days=5), tmp_path)
    authority = tmp_path / "authority"
    monkeypatch.setattr(nvflare, "_FlareJob", lambda *_: None)
    path, key = nvflare._pair(authority / "admin")
    before = path.read_bytes()

    def submitted() -> bytes:
        nvflare.submit(tmp_path / "server", authority, tmp_path / "relay", ["a"])
        return path.read_bytes()

    assert submitted() == before, "it has days left"
    for days in (0, -1):
        nvflare._recertify(authority / "admin", authority, days)
        old = pki.certificate_of(path)
        submitted()
        new = pki.certificate_of(path)
        assert new.not_valid_after_utc > pki.in_days(7)
        assert new.subject == old.subject and new.public_key() == pki.key_of(key).public_key()
        new.verify_directly_issued_by(pki.certificate_of(authority / "rootCA.pem"))


@pytest.mark.parametrize("sites", [("server",), ("authority",), ("a b",), ("a", "a")])
def test_names_that_the_engine_does_not_take(tmp_path: Path, sites: tuple[str, ...]) -> None:
    with pytest.raises(FederationError, match="engine nvflare"):
        nvflare.provision(Plan("federation", "localhost", 9001, 9002, sites), tmp_path)


@pytest.mark.parametrize("name", ["Anna Maier", "a#1", "Anna's", 'a"b', "a\\b"])
def test_no_party_starts_where_flare_could_start_no_job(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE splits the command of a job at what stands in these paths."""
    place = Path("/home") / name
    said = re.escape(f" at {place}; the path may hold no space, quote, backslash or #")
    with pytest.raises(FederationError, match="the kit is" + said):
        nvflare._launch(place / "engine", "client", [])
    monkeypatch.setattr(sys, "executable", str(place))
    with pytest.raises(FederationError, match="Python is" + said):
        nvflare._launch(Path("/home/müller,é(1)/engine"), "client", [])


def test_a_trial_says_before_it_starts_that_flare_runs_no_job_in_its_folder(
    small: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(across.Trial, "_start", lambda *_: pytest.fail("a party was started"))
    with pytest.raises(FederationError, match=r"a run/deploy-nvflare/server; the path may hold no space"):
        across.gather_trial("nvflare")(
            parse_federation(small, base=Path()), RunFolder(tmp_path / "a run"), print
        )


def test_no_server_no_job(tmp_path: Path) -> None:
    nvflare.provision(Plan("federation", "localhost", *free_ports(2), ("a",)), tmp_path)
    with pytest.raises(FederationError, match="is it running"):
        nvflare.submit(tmp_path / "server", tmp_path / "authority", tmp_path / "relay", ["a"])


def test_a_job_does_not_outlive_who_submitted_it(deployment: Deployment, server: ServerRelay) -> None:
    code = (
        "import sys; from pathlib import Path; from fedatlas.transport.nvflare import engine as nvflare; "
        "print(nvflare.submit(*map(Path, sys.argv[1:4]), ['site-1']).attendant.pid)"
    )
    paths = [deployment.out / "server", deployment.out / "authority", deployment.root / "none.relay"]
    made = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True
    )
    until(lambda: not psutil.pid_exists(int(made.stdout)), 30, "the process that attends to the job ends")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale in which a pipe of text takes ASCII alone."""


def in_ascii(code: str) -> str:
    code = f"from pathlib import Path\nfrom fedatlas.transport.nvflare import engine\n{code}"
    env = os.environ | ASCII
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, check=False
    ).stdout.decode()


def test_what_attends_to_a_job_speaks_utf_8_in_any_locale() -> None:
    code = "def fails(admin): raise OSError('Ger\\xe4t \\udcc3\\udca4')\n"
    code += "engine._knock = fails\nengine._attend(Path(), Path(), [])"
    assert in_ascii(code) == "OSError: Ger\xe4t \xe4\n"


def test_what_is_said_of_a_job_is_read_in_any_locale(tmp_path: Path) -> None:
    says = tmp_path / "says"
    says.write_text("#!/bin/sh\nprintf 'Ger\\303\\244t \\377\\n'\n")
    says.chmod(0o755)
    code = f"engine.sys.executable = {str(says)!r}\n"
    code += "try: engine._FlareJob(Path(), Path(), [])\nexcept Exception as error: print(ascii(error))"
    assert "did not take the job (Ger\\xe4t \\ufffd)" in in_ascii(code)


def test_a_job_is_given_up_for_a_site_that_is_there_without_it() -> None:
    """Only if the site was in it before, or away, has it come back: a site that never takes a job ends the run some time."""
    busy, idle, away = (
        {"client_name": "a", "status": "running"},
        {"client_name": "a", "status": "no_jobs"},
        {},
    )
    for first, back in [(busy, True), (away, True), (idle, False)]:
        seen = nvflare.Idle(["a", "b"])
        seen.count([first])
        for _ in range(nvflare.IDLE - (first is idle)):
            assert seen.why() == ""
            seen.count([idle])
        text = "a is there, but not in the job; a new job takes it in"
        assert seen.why() == (nvflare.TAKES_IN if back else "") + text


def test_a_job_says_whether_it_ended_for_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for takes_in in (True, False):
        says = tmp_path / "says"
        says.write_text(f"#!/bin/sh\necho accepted\necho '{nvflare.TAKES_IN if takes_in else ''}its end'\n")
        says.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(says))
        job = nvflare._FlareJob(tmp_path, tmp_path, [])
        until(job.ended, 10)
        assert (job.ended(), job.takes_in) == ("its end", takes_in)


class Told:
    """The engine's end of the relay: what the federation hears of sites."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def lost(self, ask: Ask, site: str, reason: str) -> None:
        self.told.append((site, reason))


def test_a_site_gives_no_reason_of_the_server_s() -> None:
    """For room in the run folder the run waits, whatever its rule for lost sites."""
    from fedatlas.transport.relay import NOT_AN_ANSWER, not_stored, said_by_site

    assert said_by_site(not_stored(OSError(28, "No space left on device"))) == NOT_AN_ANSWER
    assert said_by_site("\n" + not_stored(OSError(28, "No space left on device"))) == NOT_AN_ANSWER
    assert said_by_site("the site's own\x1b process has gone") == "the site's own process has gone"


def test_an_answer_that_the_server_cannot_store_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file cannot be made, or the disk becomes full while it comes."""
    from fedatlas.transport.nvflare import job

    def download(
        source: str, reference: str, patience: float, cell: object, sink: job._Sink, **_: object
    ) -> None:
        sink.consume(reference, {"at": 1 << 20}, bytes(1 << 20))

    monkeypatch.setattr(job, "download_object", download)
    (tmp_path / ".full.part").symlink_to("/dev/full")
    for reply, why in (("none/reply", "No such file or directory"), ("full", "No space left on device")):
        asked = Question("a", "train", 1, 0, tmp_path / "shared", None, tmp_path / reply)
        controller, told = job.RelayController(), Told()
        controller.end = told  # type: ignore[assignment]
        controller.open = now = job._Open(Ask(1, (asked,), 60.0), 0.0, None, waiting={"a": asked})  # type: ignore[arg-type]
        controller._take(now, asked, None, "a", "reference")
        assert told.told == [("a", f"the server could not store its answer ({why})")] and not now.waiting


def test_an_answer_is_on_offer_for_as_long_as_its_question_has_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fetches a few answers at once; a later one waits for its turn, which may take long."""
    from nvflare.apis.shareable import Shareable
    from nvflare.apis.signal import Signal

    from fedatlas.transport.nvflare import job

    def fetch(cell: object, source: str, reference: str, to: Path, stop: object) -> None:
        to.write_bytes(b"asked")

    def forward(relay: Path, question: Question, seconds: float) -> None:
        question.reply.write_bytes(b"answered")

    offered: list[float] = []

    class Offers:
        def __init__(self, cell: object, timeout: float, **_: object) -> None:
            offered.append(timeout)

        def add_object(self, offer: object) -> str:
            return "reference"

    monkeypatch.setenv(RELAY, str(tmp_path / "relay"))
    for name, stub in (("_fetch", fetch), ("forward", forward), ("ObjectDownloader", Offers)):
        monkeypatch.setattr(job, name, stub)
    head = Question("a", "train", 1, 0, tmp_path, None, tmp_path).head()
    data = Shareable({"head": head, "source": "x", "shared": "s", "own": None, "seconds": 5000.0})
    cell = type("Cell", (), {"get_fqcn": lambda self: "x"})()
    job.RelayExecutor()._answer(tmp_path, data, cell, Signal())
    assert len(offered) == 1 and 5000 < offered[0] <= 5000 + job.GRACE + job.PATIENCE


def test_the_core_needs_no_flare() -> None:
    code = "import fedatlas.transport.nvflare.engine, sys; sys.exit('torch' in sys.modules or 'nvflare' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------- faults


def test_a_job_process_is_killed_and_the_next_job_answers(
    deployment: Deployment, server: ServerRelay
) -> None:
    """Also: by then the site has a new key, and joins with it."""
    begun, go = threading.Event(), threading.Event()

    def serve(question: Question) -> str | None:
        if question.site == "site-2":
            begun.set()
            go.wait(60)
        return echo(question)

    deployment.serve = serve
    questions, answers = deployment.questions(b"x", {}), {}
    asking = threading.Thread(target=lambda: answers.update(ask(server, questions, deadline=60)))
    asking.start()
    assert begun.wait(10)
    job, site = deployment.job, psutil.Process(deployment.processes["site-2"].pid)
    assert job is not None and job.ended() is None
    for child in site.children(recursive=True):
        child.kill()
    until(job.ended, 30, "the end of the job is noticed")
    job.stop()

    deployment.kill("site-2")
    kit, authority = deployment.out / "site-2", deployment.out / "authority"
    nvflare.install(kit, nvflare.sign(nvflare.renew(kit), authority, deployment.out, days=2))
    log = deployment.root / "site-2.log"
    before = log.stat().st_size
    deployment.start("site-2", nvflare.site_process(kit))
    # until then the server knows the killed one as connected, and would give the job to it
    until(lambda: b"Successfully registered" in log.read_bytes()[before:], 40, "the site is back")
    deployment.job = deployment.submit()
    go.set()
    asking.join(60)
    assert answers == {"site-1": None, "site-2": None}
    assert questions[1].reply.read_bytes() == questions[1].head() + b"x"
    assert server.jobs == 2
