"""Flower carries bytes between a federation and its sites, for the sites whose keys it was given and no others.

The servers and nodes here are real processes on this machine; a site's own process is played by the test.
"""

import contextlib
import datetime
import json
import os
import queue
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deployments import until

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedatlas.core.errors import FederationError
from fedatlas.federation.across import free_ports
from fedatlas.transport import pki
from fedatlas.transport.deployment import RELAY, Launch, Plan
from fedatlas.transport.flower import engine as flower
from fedatlas.transport.flower import job
from fedatlas.transport.flower import node as site_node
from fedatlas.transport.flower.compat import ObjectPullError, fetched, packed, sent
from fedatlas.transport.flower.node import FAILED
from fedatlas.transport.flower.server import Kept
from fedatlas.transport.frames import Question, TooLarge
from fedatlas.transport.relay import Ask, ServerRelay, SiteRelay, not_stored

SITES = ("site-a", "site-b")
NO_PROXY_THERE = "http://127.0.0.1:9"
"""A proxy as hospitals name one; connections within this machine must not look for it."""


def new_plan(sites: Sequence[str] = SITES) -> Plan:
    port, admin = free_ports(2)
    return Plan("test", "127.0.0.1", port, admin, tuple(sites))


class Process:
    """A process of the engine, with its log."""

    def __init__(self, launch: Launch, log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                launch.command,
                env=os.environ | dict(launch.env) | dict(env),
                cwd=launch.folder,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, wanted: str, seconds: float = 40.0) -> None:
        until(lambda: wanted in self.text(), seconds, lambda: f"no {wanted!r} in:\n{self.text()[-3000:]}")

    def end(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Deployment:
    """A server, nodes, and the job. serve: what the own process of every site does with a question."""

    def __init__(self, root: Path, serve: Callable[[Question], str | None]) -> None:
        self.root, self.plan = root, new_plan()
        flower.provision(self.plan, root)
        self.processes: dict[str, Process] = {}
        self.sites = {site: SiteRelay(root / site / "relay", serve) for site in SITES}
        self.relay = ServerRelay(root / "relay")
        self.job: Any = None
        self.asked = 0

    def start(self, name: str, **other: str) -> Process:
        """`server`, a site, or another kit under the root. other: what else is in its environment."""
        kit = self.root / name
        launch = flower.server_process(kit) if name == "server" else flower.site_process(kit)
        env = {RELAY: str(kit / "relay"), "HTTPS_PROXY": NO_PROXY_THERE} | other
        self.processes[name] = Process(launch, self.root / f"{name}.log", env)
        return self.processes[name]

    def submit(self) -> None:
        kit, authority = self.root / "server", self.root / "authority"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HTTPS_PROXY", NO_PROXY_THERE)
            self.job = flower.submit(kit, authority, self.root / "relay", self.plan.sites)
            assert "no_proxy" not in os.environ

    def ask(
        self,
        shared: bytes,
        own: Mapping[str, bytes] | None = None,
        function: str = "echo",
        deadline: float = 60.0,
    ) -> dict[str, Any]:
        """What each site answered: its bytes, or why there are none as a text."""
        self.asked += 1
        folder = self.root / f"ask-{self.asked}"
        folder.mkdir()
        (folder / "shared").write_bytes(shared)
        questions = []
        for site in SITES:
            extra = folder / f"own-{site}" if own and site in own else None
            if extra is not None:
                extra.write_bytes((own or {})[site])
            reply = folder / f"reply-{site}"
            questions.append(
                Question(site, function, 1, self.asked, folder / "shared", extra, reply, {"a": 1})
            )
        found: dict[str, Any] = dict(self.relay.ask(questions, deadline))
        for question in questions:
            if found[question.site] is None:
                found[question.site] = question.reply.read_bytes()
        return found

    def close(self) -> None:
        self.relay.close()
        for process in reversed(self.processes.values()):
            process.end()
        for site in self.sites.values():
            site.close()


# ------------------------------------------------------------------------------------------- a deployment that runs

HELD = threading.Event()
RELEASED = threading.Event()
ASKED_AGAIN = threading.Event()
SEEN: list[tuple[str, int, str]] = []


def serve(question: Question, late: threading.Event) -> str | None:
    SEEN.append((question.function, question.call, question.site))
    if question.function == "lost":
        return "refused by the site's rules"
    if question.function == "nothing":
        return None
    if question.function == "hang":
        late.wait(60.0)
    if question.function == "slow":
        ASKED_AGAIN.wait(20.0)
    if question.function == "hold" and question.site == "site-a" and not HELD.is_set():
        HELD.set()
        RELEASED.wait(60.0)
    assert question.about == {"a": 1} and question.round == 1
    parts = [question.shared.read_bytes(), question.own.read_bytes() if question.own else b""]
    question.reply.write_bytes(question.site.encode() + b"|" + b"|".join(parts))
    return None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("flower"), serve)
    try:
        for name in ("server", *SITES):
            made.start(name)
        made.submit()
        until(
            lambda: made.relay.present == sorted(SITES),
            60.0,
            lambda: "".join(process.text()[-2000:] for process in made.processes.values()),
        )
        yield made
    finally:
        made.close()


def test_payloads_come_back_as_they_were(running: Deployment) -> None:
    assert running.ask(b"model", {"site-b": b"mask"}) == {
        "site-a": b"site-a|model|",
        "site-b": b"site-b|model|mask",
    }
    assert running.job.ended() is None


def test_empty_and_large_payloads(running: Deployment) -> None:
    assert running.ask(b"", {"site-a": b""}) == {"site-a": b"site-a||", "site-b": b"site-b||"}
    large, zeros = os.urandom(5 * 2**20 + 17), bytes(11 * 2**20)  # over one chunk; equal chunks
    found = running.ask(zeros, {"site-b": large})
    assert found["site-a"] == b"site-a|" + zeros + b"|"
    assert found["site-b"] == b"site-b|" + zeros + b"|" + large


def test_nothing_is_left_at_a_site(running: Deployment) -> None:
    running.ask(b"x")
    for site in SITES:
        assert not list((running.root / site / "engine" / "tmp").iterdir())


def test_a_site_that_has_no_answer_says_why(running: Deployment) -> None:
    assert running.ask(b"x", function="lost") == dict.fromkeys(SITES, "refused by the site's rules")


def test_a_deadline_ends_an_ask_and_the_late_answer_is_dropped(running: Deployment) -> None:
    start = time.monotonic()
    found = running.ask(b"late", function="slow", deadline=1.0)
    assert time.monotonic() - start < 2.4
    assert all("no answer within 1 s" in text for text in found.values())
    threading.Timer(0.2, ASKED_AGAIN.set).start()
    assert running.ask(b"next") == {site: f"{site}|next|".encode() for site in SITES}


def test_a_site_that_hangs_gets_the_next_question(running: Deployment) -> None:
    """With which its stale work is ended."""
    found = running.ask(b"late", function="hang", deadline=1.0)
    assert all("no answer within 1 s" in text for text in found.values())
    assert running.ask(b"next", deadline=15.0) == {site: f"{site}|next|".encode() for site in SITES}


def test_an_exception_at_a_site_sends_no_text(running: Deployment) -> None:
    found = running.ask(b"x", function="nothing")
    assert found == dict.fromkeys(SITES, FAILED)
    assert "FileNotFoundError" in running.processes["site-a"].text()
    assert "FileNotFoundError" not in running.processes["server"].text()


def test_a_site_that_cannot_store_a_question_says_so(running: Deployment) -> None:
    folder = running.root / "site-a" / "engine" / "tmp"
    shutil.rmtree(folder)
    folder.write_text("in place of a full disk")
    try:
        assert running.ask(b"x") == {"site-a": FAILED, "site-b": b"site-b|x|"}
    finally:
        folder.unlink()
        folder.mkdir(mode=0o700)
    assert running.ask(b"x")["site-a"] == b"site-a|x|"


def test_a_node_started_again_in_the_middle_is_asked_again(running: Deployment) -> None:
    found: dict[str, Any] = {}
    thread = threading.Thread(
        target=lambda: found.update(running.ask(b"again", function="hold", deadline=60))
    )
    thread.start()
    try:
        assert HELD.wait(20.0)
        assert running.processes["site-a"].end() == 0
        running.start("site-a")
        until(lambda: running.processes["site-a"].text().count("attends the server") == 2)
    finally:
        RELEASED.set()
        thread.join(60.0)
    assert found == {site: f"{site}|again|".encode() for site in SITES}
    assert sum(function == "hold" and site == "site-a" for function, _, site in SEEN) == 2


def test_a_key_that_is_not_registered_is_refused(running: Deployment) -> None:
    shutil.copytree(running.root / "site-a", running.root / "stranger")
    (running.root / "stranger" / "engine" / "site.key").write_bytes(pki.private_pem(pki.ec_key(), "OpenSSH"))
    stranger = running.start("stranger")
    stranger.until("refuses the key of site site-a (HTTP 412)")
    assert running.relay.present == sorted(SITES)
    running.processes["server"].until("refused (HTTP 412) 127.0.0.1: POST '/v1/fleet/activate-node'")
    stranger.end()


def test_a_second_process_with_a_site_s_key_is_refused(running: Deployment) -> None:
    shutil.copytree(running.root / "site-b", running.root / "twin")
    twin = running.start("twin")
    twin.until("refuses the key of site site-b (HTTP 412)")
    twin.end()
    assert running.ask(b"x")["site-b"] == b"site-b|x|"


def https(deployment: Deployment, port: int, path: str, headers: Mapping[str, str] | None = None) -> int:
    """The HTTP status of an empty request."""
    import http.client

    context = ssl.create_default_context(cafile=deployment.root / "authority" / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    try:
        connection.request("POST", path, b"", {"content-type": "application/protobuf", **(headers or {})})
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_sites_port_serves_nothing_but_the_fleet(running: Deployment) -> None:
    secret = (running.root / "server" / "engine" / "admin.secret").read_text()
    for path in ("/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/"):
        assert https(running, running.plan.port, path, {flower.SECRET_HEADER: secret}) == 403
    running.processes["server"].until("refused (HTTP 403) 127.0.0.1: POST '/v1/control/start-run'")
    assert https(running, running.plan.port, "/v1/fleet/pull-messages") == 401


def test_the_admin_port_asks_for_its_secret(running: Deployment) -> None:
    path, secret = "/v1/control/list-runs", (running.root / "server" / "engine" / "admin.secret").read_text()
    assert https(running, running.plan.admin_port, path) == 403
    assert https(running, running.plan.admin_port, path, {flower.SECRET_HEADER: "x" * len(secret)}) == 403
    assert https(running, running.plan.admin_port, path, {flower.SECRET_HEADER: secret}) not in (401, 403)
    assert https(running, running.plan.admin_port, "/v1/runtime/acquire-task") == 401
    assert https(running, running.plan.admin_port, "/docs") == 403


def test_plain_text_to_the_tls_port_is_refused(running: Deployment) -> None:
    with socket.create_connection(("127.0.0.1", running.plan.port), timeout=10) as plain:
        plain.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        try:
            answer = plain.recv(1000)
        except ConnectionError:
            answer = b""
    assert b"HTTP" not in answer
    running.processes["server"].until("refused a connection: no TLS")


def test_nothing_is_written_outside_the_kit(running: Deployment) -> None:
    home = running.root / "server" / "engine" / "home"
    assert home.is_dir()
    for process in running.processes.values():
        assert "telemetry" not in process.text().lower()
    assert not [path for path in (running.root / "server" / "engine").rglob("*.db*")]


def test_a_key_taken_out_shuts_its_site_out_and_a_renewed_one_lets_it_in(running: Deployment) -> None:
    """The last test of the running deployment: rotates the key of site-b while everything runs."""
    kit, authority = running.root / "site-b", running.root / "authority"
    request = flower.renew(kit)
    answer = flower.sign(request, authority, running.root, 30)
    running.processes["site-b"].until("the server no longer knows this node")
    until(lambda: running.relay.present == ["site-a"])
    running.processes["site-b"].end()
    flower.install(kit, answer)
    running.start("site-b")
    until(lambda: running.relay.present == sorted(SITES))
    assert running.ask(b"x") == {site: f"{site}|x|".encode() for site in SITES}


def test_a_job_that_was_stopped_has_ended(running: Deployment) -> None:
    jobs = running.relay.jobs
    running.job.stop()
    assert "stopped" in running.job.ended()
    running.submit()
    until(lambda: running.relay.jobs > jobs and running.relay.connected)
    assert running.ask(b"x") == {site: f"{site}|x|".encode() for site in SITES}


# ------------------------------------------------------------------------------------------------ faults that take time


@pytest.mark.slow
def test_a_server_killed_and_started_again_is_found_by_its_nodes(tmp_path: Path) -> None:
    made = Deployment(tmp_path, serve)
    try:
        for name in ("server", *SITES):
            made.start(name)
        made.submit()
        until(lambda: made.relay.present == sorted(SITES), 60.0)
        made.processes["server"].process.kill()
        made.processes["server"].process.wait()
        until(lambda: made.job.ended() is not None, 60.0)
        made.start("server")
        made.submit()
        jobs = made.relay.jobs
        assert made.ask(b"x", deadline=60.0) == {site: f"{site}|x|".encode() for site in SITES}
        assert made.relay.jobs >= jobs
    finally:
        made.close()


@pytest.mark.slow
def test_a_node_killed_in_the_middle_is_asked_again(tmp_path: Path) -> None:
    began, go = threading.Event(), threading.Event()

    def held(question: Question, late: threading.Event) -> str | None:
        if question.site == "site-a" and not began.is_set():
            began.set()
            go.wait(120.0)
        question.reply.write_bytes(question.shared.read_bytes())
        return None

    made = Deployment(tmp_path, held)
    try:
        for name in ("server", *SITES):
            made.start(name)
        made.submit()
        found: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: found.update(made.ask(b"x", deadline=120.0)))
        thread.start()
        assert began.wait(60.0)
        made.processes["site-a"].process.kill()
        go.set()
        made.start("site-a")
        thread.join(130.0)
        assert found == dict.fromkeys(SITES, b"x")
    finally:
        go.set()
        made.close()


@contextlib.contextmanager
def tls_end(engine: Path, host: str, port: int) -> Iterator[list[bytes]]:
    """A server with the certificate of a kit, in place of Flower's; what is said to it by who takes the certificate."""
    context, heard = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[bytes]()
    context.load_cert_chain(engine / "server.crt", engine / "server.key")
    plain = socket.create_server((host, port))

    def serve() -> None:
        while True:
            try:
                connection, _ = plain.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                heard.append(context.wrap_socket(connection, server_side=True).recv(100))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        plain.shutdown(socket.SHUT_RDWR)
        plain.close()
        thread.join(10)


@pytest.mark.parametrize("fault", ["expired", "another authority", "another host", None])
def test_a_server_whose_certificate_is_not_good_is_refused(tmp_path: Path, fault: str | None) -> None:
    """And one whose certificate is good is not."""
    made = Deployment(tmp_path / "one", serve)
    engine = made.root / "server" / "engine"
    try:
        folder = made.root / "authority"
        if fault == "another authority":
            flower.provision(new_plan(), tmp_path / "two")
            folder = tmp_path / "two" / "authority"
        key = pki.key_of(engine / "server.key")
        days = -1 if fault == "expired" else 1
        certificate = flower.certificate_for(key, "localhost", folder, days)
        (engine / "server.crt").write_bytes(pki.pem(certificate))
        host = "127.0.0.2" if fault == "another host" else "127.0.0.1"
        about = made.root / "site-a" / "engine" / "site.json"
        about.write_text(json.dumps({"site": "site-a", "server": f"{host}:{made.plan.port}"}))
        with tls_end(engine, host, made.plan.port) as heard:
            node = made.start("site-a", no_proxy="127.0.0.2,127.0.0.1")
            if fault is None:
                until(lambda: heard, what=node.text)
                assert heard[0].startswith(b"POST /v1/fleet/")
                return
            node.until("CERTIFICATE_VERIFY_FAILED")
            assert node.process.wait(20) == 1
        assert heard == []
    finally:
        made.close()


# -------------------------------------------------------------------------------------------------- kits and their keys


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    flower.provision(Plan("test", "fl.example.org", 8443, 8444, SITES, days=30), tmp_path)
    return tmp_path


def test_private_keys_are_for_their_owner_alone(kits: Path) -> None:
    secrets = [path for path in kits.rglob("*") if path.suffix == ".key"]
    assert {path.relative_to(kits).as_posix() for path in secrets} == {
        "authority/ca.key",
        "server/engine/server.key",
        "site-a/engine/site.key",
        "site-b/engine/site.key",
    }
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((kits / "authority").stat().st_mode) == 0o700
    private = [line for path in secrets for line in path.read_text().splitlines()[1:-1]]
    others = "".join(path.read_text() for path in kits.rglob("*") if path.is_file() and path not in secrets)
    assert not any(line in others for line in private if len(line) > 20)


def test_the_server_s_certificate_names_its_host(kits: Path) -> None:
    from cryptography import x509

    made = x509.load_pem_x509_certificate((kits / "server" / "engine" / "server.crt").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(found) for found in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    left = made.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=29) < left < datetime.timedelta(days=31)


def test_a_deployment_is_not_overwritten(kits: Path) -> None:
    with pytest.raises(FederationError, match="holds the keys of a deployment already"):
        flower.provision(new_plan(), kits)


def test_a_kit_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"site\.json cannot be read"):
        flower.site_process(tmp_path)


def test_a_job_that_no_server_takes_leaves_nothing_in_the_kit(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is submitted again and again until there is a server."""

    def never(control: Any, request: Any, kit: Path) -> int:
        assert len(list((kits / "server" / "engine" / "jobs").iterdir())) == 1
        raise FederationError("no server")

    monkeypatch.setattr(flower, "_started", never)
    with pytest.raises(FederationError, match="no server"):
        flower.submit(kits / "server", kits / "authority", kits / "relay", SITES)
    assert not list((kits / "server" / "engine" / "jobs").iterdir())


def test_a_request_must_be_signed_with_the_present_key(kits: Path) -> None:
    request = flower.renew(kits / "site-a")
    plain = json.loads(request.read_text())
    assert "PRIVATE" not in request.read_text()
    request.write_text(json.dumps(plain | {"site": "site-b"}))
    with pytest.raises(FederationError, match="not signed with the present key of site site-b"):
        flower.sign(request, kits / "authority", kits, 30)
    other = pki.public_openssh(pki.ec_key()).decode()
    request.write_text(json.dumps(plain | {"public_key": other}))
    with pytest.raises(FederationError, match="not signed with the present key of site site-a"):
        flower.sign(request, kits / "authority", kits, 30)
    request.write_text(json.dumps(plain | {"site": "../site-a"}))
    with pytest.raises(FederationError, match="no name of a site"):
        flower.sign(request, kits / "authority", kits, 30)
    request.write_bytes(b"\xff not JSON")
    with pytest.raises(FederationError, match="no request of `renew`"):
        flower.sign(request, kits / "authority", kits, 30)


def stranger_s(kits: Path, site: str) -> Path:
    """A request in a site's name, by somebody who has none of its keys."""
    public, request = pki.public_openssh(pki.ec_key()).decode(), kits / "stranger.request"
    request.write_text(json.dumps({"site": site, "public_key": public, "proof": "bm9uZQ=="}))
    return request


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("site", ["site-c", "never\x00heard", ""])
def test_a_key_of_no_site_is_not_signed(kits: Path, site: str, older: bool) -> None:
    engine = kits / "server" / "engine"
    if older:  # its kit does not say which sites there are
        about = json.loads((engine / "server.json").read_text())
        (engine / "server.json").write_text(json.dumps({k: v for k, v in about.items() if k != "sites"}))
    before = sorted((engine / "sites").iterdir())
    with pytest.raises(FederationError, match="this deployment has: site-a, site-b|is no name of a site"):
        flower.sign(stranger_s(kits, site), kits / "authority", kits, 30)
    assert sorted((engine / "sites").iterdir()) == before


def test_a_key_that_was_taken_out_comes_back_by_the_coordinator_s_word_alone(kits: Path) -> None:
    sites, authority = kits / "server" / "engine" / "sites", kits / "authority"
    (sites / "site-b.pub").unlink()
    own = flower.renew(kits / "site-b")
    for request in (stranger_s(kits, "site-b"), own):
        with pytest.raises(FederationError, match=r"site-b was taken out .* empty file .*site-b\.lost"):
            flower.sign(request, authority, kits, 30)
    assert [path.name for path in sites.iterdir()] == ["site-a.pub"]
    (sites / "site-b.lost").touch()
    flower.install(kits / "site-b", flower.sign(own, authority, kits, 30))
    assert sorted(path.name for path in sites.iterdir()) == ["site-a.pub", "site-b.pub"], "once"
    with pytest.raises(FederationError, match="not signed with the present key of site site-b"):
        flower.sign(stranger_s(kits, "site-b"), authority, kits, 30)


def test_a_lost_key_is_replaced_when_the_coordinator_says_that_it_is_lost(kits: Path) -> None:
    kit, sites = kits / "site-a", kits / "server" / "engine" / "sites"
    before = (kit / "engine" / "site.key").read_bytes()
    flower.install(kit, flower.sign(flower.renew(kit), kits / "authority", kits, 30))
    (kit / "engine" / "site.key").write_bytes(before)  # of a backup: the present key is lost
    request = flower.renew(kit)
    with pytest.raises(FederationError, match=r"rename .*site-a\.pub to site-a\.lost, and sign again"):
        flower.sign(request, kits / "authority", kits, 30)
    (sites / "site-a.pub").rename(sites / "site-a.lost")
    flower.install(kit, flower.sign(request, kits / "authority", kits, 30))
    assert sorted(path.name for path in sites.iterdir()) == ["site-a.pub", "site-b.pub"]
    assert (kit / "engine" / "site.pub").read_bytes() == (sites / "site-a.pub").read_bytes()


def test_a_renewed_key_is_used_after_its_answer(kits: Path) -> None:
    kit, before = kits / "site-a", (kits / "site-a" / "engine" / "site.key").read_bytes()
    answer = flower.sign(flower.renew(kit), kits / "authority", kits, 30)
    assert (kit / "engine" / "site.key").read_bytes() == before
    with pytest.raises(FederationError, match="does not belong to the key"):
        flower.install(kit, kits / "site-b" / "engine" / "site.pub")
    flower.install(kit, answer)
    key = pki.private_openssh_of(kit / "engine" / "site.key")
    assert stat.S_IMODE((kit / "engine" / "site.key").stat().st_mode) == 0o600
    assert pki.public_openssh(key) == answer.read_bytes() == (kit / "engine" / "site.pub").read_bytes()
    with pytest.raises(FederationError, match="waits for no answer"):
        flower.install(kit, answer)


def test_the_server_s_certificate_can_be_renewed(kits: Path) -> None:
    kit = kits / "server"
    request = flower.renew(kit)
    answer = flower.sign(request, kits / "authority", kits, 7)
    flower.install(kit, answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        kit / "engine" / "server.crt", kit / "engine" / "server.key"
    )  # they belong together
    assert not (kit / "engine" / "next.key").exists()
    request = flower.renew(kit)
    with pytest.raises(FederationError, match="does not belong to the key"):
        flower.install(kit, answer)
    flower.install(kit, flower.sign(request, kits / "authority", kits, 7))


def test_nobody_but_the_server_gets_a_certificate_of_it(kits: Path) -> None:
    """A hospital's request could be one for the server's certificate, and it would pose as the server."""
    engine, request = kits / "server" / "engine", kits / "site-a.request"
    pem = pki.request(pki.named("site-a"), pki.ec_key(), "SHA384")
    request.write_bytes(pem)
    with pytest.raises(FederationError, match="no request of `renew`"):
        flower.sign(request, kits / "authority", kits, 7)
    own = json.loads(flower.renew(kits / "server").read_text())
    request.write_text(json.dumps(own | {"request": pem.decode()}))
    with pytest.raises(FederationError, match="is not signed with the server's present key"):
        flower.sign(request, kits / "authority", kits, 7)
    assert not (engine / "next.crt").exists()


def test_a_lost_key_of_the_server_is_replaced_when_the_coordinator_says_so(kits: Path) -> None:
    kit = kits / "server"
    pki.write(kit / "engine" / "server.key", pki.private_pem(pki.ec_key()), secret=True)
    request = flower.renew(kit)
    with pytest.raises(FederationError, match=r"rename .*server\.crt to server\.lost, and sign again"):
        flower.sign(request, kits / "authority", kits, 7)
    (kit / "engine" / "server.crt").rename(kit / "engine" / "server.lost")
    flower.install(kit, flower.sign(request, kits / "authority", kits, 7))
    assert not (kit / "engine" / "server.lost").exists()
    flower.install(kit, flower.sign(flower.renew(kit), kits / "authority", kits, 7))


# ------------------------------------------------------------------------------------------------- the desk, by itself


def node(key: Any, number: int, activated: str = "1") -> Any:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    public = public_key_to_bytes(key.public_key())
    return SimpleNamespace(node_id=number, public_key=public, last_activated_at=activated, name="site-b")


def site_key(kits: Path, site: str) -> Any:
    return pki.private_openssh_of(kits / site / "engine" / "site.key")


def test_a_node_is_the_site_of_its_key_whatever_it_says(kits: Path) -> None:
    keys = kits / "server" / "engine" / "sites"
    honest, liar = node(site_key(kits, "site-a"), 1), node(pki.ec_key(), 2)
    found, refused = job.sites_of([honest, liar], keys)
    assert found == {"site-a": honest}
    assert refused == ["node 2 with a key that is no site's: refused"]
    found, refused = job.sites_of([honest, node(site_key(kits, "site-a"), 3)], keys)
    assert found == {"site-a": honest} and refused == ["a second node for site site-a: refused"]
    shutil.copy(keys / "site-a.pub", keys / "site-c.pub")
    found, refused = job.sites_of([honest], keys)
    assert not found and refused == ["one key is registered for ['site-a', 'site-c']: refused"]
    (keys / "site-b.pub").write_text("nonsense")
    assert any("no public key" in text for text in job.sites_of([honest], keys)[1])


class FakePost:
    """A post whose nodes answer by a function."""

    def __init__(self, nodes: list[Any], reply: Callable[[Message, int, Path], Any]) -> None:
        self.here, self.reply = nodes, reply
        self.sent: list[Message] = []
        self.delivered: set[str] = set()
        self.forgotten: list[str] = []

    def nodes(self) -> list[Any]:
        return self.here

    def put(self, messages: Sequence[Message]) -> list[str]:
        start = len(self.sent)
        self.sent += messages
        return [str(number) for number in range(start, len(self.sent))]

    def take(
        self, names: Sequence[str], place: Callable[[str], Path], most: Any = None, end: Any = None
    ) -> Iterator[tuple[str, Any]]:
        for name in names:
            if name not in self.delivered:
                reply = self.reply(self.sent[int(name)], int(name), place(name))
                if reply is not SILENCE:
                    self.delivered.add(name)
                    yield name, reply

    def forget(self, name: str) -> None:
        self.forgotten.append(name)


SILENCE = object()


class FakeEnd:
    def __init__(self) -> None:
        self.told: list[tuple[str, str | None]] = []

    def answered(self, ask: Ask, site: str) -> None:
        self.told.append((site, None))

    def lost(self, ask: Ask, site: str, reason: str) -> None:
        self.told.append((site, reason))

    def present(self, sites: Sequence[str]) -> None: ...


def good(message: Message, place: Path) -> Message:
    place.write_bytes(b"answer")
    return Message(RecordDict({"reply": packed(place, "reply")}), reply_to=message)


@pytest.fixture
def desk(kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serves one ask of site-a with a grid that answers by the given function."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    (tmp_path / "shared").write_bytes(b"shared")
    question = Question("site-a", "f", 1, 1, tmp_path / "shared", None, tmp_path / "reply")

    def run(
        reply: Any, nodes: list[Any] | None = None, deadline: float = 5.0
    ) -> tuple[FakeEnd, FakePost, Path]:
        post = FakePost([node(site_key(kits, "site-a"), 1)] if nodes is None else nodes, reply)
        end = FakeEnd()
        made = job.Desk(post, kits / "server" / "engine" / "sites", ["site-a"], end)  # type: ignore[arg-type]
        made._serve(Ask(1, (question,), deadline), queue.SimpleQueue())
        return end, post, question.reply

    return run


def test_an_answer_is_laid_whole(desk: Any) -> None:
    end, _, reply = desk(lambda message, number, place: good(message, place))
    assert end.told == [("site-a", None)] and reply.read_bytes() == b"answer"
    assert not list(reply.parent.glob(".reply*"))


def test_an_answer_to_another_question_is_refused(desk: Any) -> None:
    def other(message: Message, number: int, place: Path) -> Message:
        message.metadata.__dict__["_group_id"] = "guessed"
        return good(message, place)

    end, _, reply = desk(other)
    assert end.told == [("site-a", job.NOT_AN_ANSWER)]
    assert not reply.exists() and not list(reply.parent.glob(".reply*"))


def test_an_answer_without_bytes_is_refused(desk: Any) -> None:
    def bare(message: Message, number: int, place: Path) -> Message:
        made = good(message, place)
        del made.content["reply"]
        return made

    end, _, reply = desk(bare)
    assert end.told == [("site-a", job.NOT_AN_ANSWER)] and not reply.exists()


def test_an_answer_whose_bytes_are_of_another_kind_is_refused(desk: Any) -> None:
    """Of a record without an array nothing is written; such an answer ended the server's job once."""

    def words(message: Message, number: int, place: Path) -> Message:
        return Message(RecordDict({"reply": ConfigRecord({"bytes": "none"})}), reply_to=message)

    end, _, reply = desk(words)
    assert end.told == [("site-a", job.NOT_AN_ANSWER)] and not reply.exists()


def test_a_site_gives_no_reason_of_the_server_s(desk: Any) -> None:
    """For room in the run folder the run waits, whatever its rule for lost sites."""

    def forged(message: Message, number: int, place: Path) -> Message:
        why = not_stored(OSError(28, "No space left on device"))
        return Message(RecordDict({"head": ConfigRecord({"lost": why})}), reply_to=message)

    end, _, _ = desk(forged)
    assert end.told == [("site-a", job.NOT_AN_ANSWER)]


def test_an_answer_that_cannot_be_laid_is_the_servers_fault(desk: Any) -> None:
    def occupied(message: Message, number: int, place: Path) -> Message:
        (place.parent / "reply" / "in the way").mkdir(parents=True)
        return good(message, place)

    end, _, reply = desk(occupied)
    assert end.told == [("site-a", "the server could not store its answer (Is a directory)")]
    assert not list(reply.parent.glob(".reply*"))


@pytest.mark.parametrize("first", [5, None])
def test_a_node_that_vanished_is_asked_again(desk: Any, first: int | None) -> None:
    def gone_first(message: Message, number: int, place: Path) -> Message | None:
        if number > 0:
            return good(message, place)
        return None if first is None else Message(Error(first, "Node Unavailable"), reply_to=message)

    end, post, _ = desk(gone_first)
    assert end.told == [("site-a", None)] and len(post.sent) == 2 and post.forgotten == ["0"]


def test_an_error_of_the_engine_is_told_by_its_code(desk: Any) -> None:
    text = "the text of an exception"
    end, _, _ = desk(lambda message, number, place: Message(Error(8, text), reply_to=message))
    assert end.told == [("site-a", "the site's client failed (Flower's code 8)")]


def test_a_site_that_is_absent_too_long_is_lost(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "ABSENT", 0.3)
    end, post, _ = desk(lambda message, number, place: SILENCE, nodes=[])
    assert end.told == [("site-a", "not connected for 0.3 s")] and not post.sent


def test_no_answer_by_the_deadline(desk: Any) -> None:
    end, post, _ = desk(lambda message, number, place: SILENCE, deadline=0.4)
    assert end.told == [("site-a", "no answer within 0.4 s (faults.deadline)")] and len(post.sent) == 1


# ------------------------------------------------------------------------------------------------- files and messages


class Store:
    """The objects of messages, as a server keeps them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.pushes: list[str] = []
        self.trees: list[Any] = []

    def announce(self, heads: list[Any], trees: list[Any]) -> Any:
        names = {node.object_id for tree in trees for node in iterate_object_tree(tree)}
        self.trees = trees
        return SimpleNamespace(objects_to_push=names - self.objects.keys(), session_id="s")

    def push(self, name: str, content: bytes, session: str) -> bool:
        self.pushes.append(name)
        self.objects[name] = content
        return len(self.pushes) != 2  # the second answer is lost on the way


def message_with(record: ArrayRecord, target: int = 2) -> Message:
    about = Metadata(1, "", 1, target, "", "", 1000.0 + target, 60.0, "query")
    return Message(content=RecordDict({"shared": record}), metadata=about)  # type: ignore[call-overload]


@pytest.mark.parametrize("size", [0, 1, 5 * 2**20, 12 * 2**20 + 5])
def test_a_file_travels_as_objects_of_flower_and_once(tmp_path: Path, size: int) -> None:
    path, store = tmp_path / "data", Store()
    path.write_bytes(os.urandom(size))
    record = packed(path, "shared")
    plain = ArrayRecord({"bytes": Array("uint8", (size,), "fedatlas.shared", path.read_bytes())})
    assert record.object_id == plain.object_id  # as Flower would have made it from memory
    sent([message_with(record, 2), message_with(record, 3)], store.announce, store.push)
    assert len(store.pushes) == len(set(store.pushes)) == len(store.objects)
    found = fetched(store.trees[1], store.objects.__getitem__, {"shared": tmp_path / "copy"})
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert found.metadata.dst_node_id == 3
    inflated = inflate_object_from_contents(store.trees[0].object_id, dict(store.objects))
    assert inflated.content["shared"]["bytes"].data == path.read_bytes()  # type: ignore[attr-defined]


def test_an_answer_that_trickles_holds_up_no_other(tmp_path: Path) -> None:
    trees, contents = dict[str, Any](), dict[str, bytes]()
    for name in ("ok", "slow"):
        store, path = Store(), tmp_path / f"of {name}"
        path.write_bytes(name.encode())
        about = Metadata(1, "", 1, 2, "", "", 1000.0, 60.0, "query")
        records = RecordDict({"reply": packed(path, "reply")})
        message = Message(content=records, metadata=about)  # type: ignore[call-overload]
        sent([message], store.announce, store.push)
        trees[name], contents = store.trees[0], contents | store.objects
    (never,) = (name for name, content in contents.items() if content.endswith(b"\0slow"))
    forgotten: list[str] = []

    def messages(request: Any) -> Any:
        heads = [SimpleNamespace(reply_to_message_id=name, message_id=f"to {name}") for name in trees]
        come = [SimpleNamespace(metadata=head) for head in heads]
        return SimpleNamespace(messages_list=come, message_object_trees=list(trees.values()))

    def an_object(request: Any) -> Any:
        content = contents[request.object_id]
        there = request.object_id != never
        return SimpleNamespace(object_found=True, object_available=there, object_content=content)

    client = SimpleNamespace(
        PullMessages=messages,
        PullObject=an_object,
        ConfirmMessageReceived=lambda request: forgotten.append(request.message_object_id),
    )
    post = job.Post(SimpleNamespace(_runtime_client=client, run=SimpleNamespace(run_id=1), node=None))
    end, found = [time.monotonic() + 60], dict[str, Any]()

    def some() -> bool:
        found.update(post.take(["slow", "ok"], lambda name: tmp_path / name, lambda name: 8, lambda: end[0]))
        return bool(found)

    until(some, 10)
    assert list(found) == ["ok"] and (tmp_path / "ok").read_bytes() == b"ok" and forgotten == ["to ok"]
    end[0] = 0.0  # as when the ask is over
    trees.clear()
    until(lambda: some() and "slow" in found, 10)
    assert found["slow"] is None and not (tmp_path / "slow").exists() and not post.coming


def raising(error: Exception) -> Callable[[str], bytes]:
    def pull(name: str) -> bytes:
        raise error

    return pull


def test_a_message_that_is_not_of_the_protocol_is_refused(tmp_path: Path) -> None:
    store = Store()
    (tmp_path / "data").write_bytes(b"12345678")
    sent([message_with(packed(tmp_path / "data", "shared"))], store.announce, store.push)
    tree, places = store.trees[0], {"shared": tmp_path / "copy"}
    with pytest.raises(ValueError, match="not of this protocol"):
        fetched(tree, store.objects.__getitem__, {"reply": tmp_path / "copy"})
    chunk = next(name for name, content in store.objects.items() if content.startswith(b"ArrayChunk"))
    short = store.objects | {chunk: store.objects[chunk][:-3]}
    with pytest.raises(ValueError, match="5 bytes of 8 have come"):
        fetched(tree, short.__getitem__, places)
    with pytest.raises(TooLarge, match="more than the 7 bytes"):
        fetched(tree, store.objects.__getitem__, places, 7)
    # more than its head says: no more is written than that, whatever is still to come
    long = store.objects | {chunk: store.objects[chunk] + b"9"}
    with pytest.raises(ValueError, match="9 bytes of 8 have come"):
        fetched(tree, long.__getitem__, places, 8)
    assert (tmp_path / "copy").stat().st_size == 0
    fetched(tree, store.objects.__getitem__, places, 8)
    (head,) = (name for name, content in store.objects.items() if b'"shape"' in content)
    for length in (b"[NaN]", b"[-8]", b"[true]", b"[8.0]"):
        odd = store.objects | {head: store.objects[head].replace(b"[8]", length)}
        assert odd != store.objects
        with pytest.raises(ValueError, match="an array without a length"):
            fetched(tree, odd.__getitem__, places, 7)
    with pytest.raises(ValueError):
        fetched(tree, dict.fromkeys(store.objects, b"nonsense").__getitem__, places)
    with pytest.raises(ValueError, match="malformed"):
        fetched(tree, {}.__getitem__, places)
    (about,) = (name for name, content in store.objects.items() if content.startswith(b"Message "))
    no_protobuf = store.objects | {about: store.objects[about].partition(b"\0")[0] + b"\0\xff\xff\xff\xff"}
    with pytest.raises(ValueError, match=r"a malformed message \(DecodeError\)"):
        fetched(tree, no_protobuf.__getitem__, places)
    for error in (ObjectPullError("x", "gone"), OSError("full"), httpx.ConnectError("gone")):
        with pytest.raises(type(error)):
            fetched(tree, raising(error), places)


def test_a_site_answers_nonsense_with_a_code(tmp_path: Path) -> None:
    about = Metadata(1, "id", 1, 2, "", "", time.time(), 60.0, "query")
    content = RecordDict({"text": ConfigRecord({"secret": "patient-4711"})})
    nonsense = Message(content=content, metadata=about)  # type: ignore[call-overload]
    reply = site_node.answer(nonsense, tmp_path, tmp_path / "nobody")
    assert reply.content["head"]["lost"] == FAILED
    assert "patient" not in str(reply.content)


def test_the_servers_executor_is_started_again() -> None:
    """Without it no job starts any more: the run would wait for ever."""
    kept = Kept(["sleep", "60"])
    kept.PAUSE = 0.05  # type: ignore[misc]
    try:
        first = kept.process
        first.kill()
        end = time.monotonic() + 20
        while kept.process is first and time.monotonic() < end:
            time.sleep(0.05)
        assert kept.process is not first and kept.process.poll() is None
    finally:
        kept.end()
    assert kept.process.poll() is not None and not kept.keeper.is_alive()


@pytest.mark.parametrize("hours", [-2, 2, 0])
def test_a_node_signs_with_the_time_of_its_server(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its own clock says: by its second request the server takes it."""
    from flwr.common.constant import TIMESTAMP_HEADER

    there = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
    date = there.strftime("%a, %d %b %Y %H:%M:%S GMT")
    signed = site_node.Signed(pki.ec_key())
    context = SimpleNamespace(request=SimpleNamespace(headers={}))
    texts: list[str] = []
    monkeypatch.setattr(site_node.log, "warning", lambda form, *given: texts.append(form % given))
    for _ in range(2):
        signed.intercept(context, lambda context: SimpleNamespace(headers={"date": date}))
    told = datetime.datetime.fromisoformat(context.request.headers[TIMESTAMP_HEADER])
    assert abs((told - there).total_seconds()) < 60
    how = {-2: "120 minutes ahead of the server's", 2: "120 minutes behind the server's"}
    assert [how[hours] in text for text in texts] == [True] if hours else texts == []
    signed.see("never")
    assert abs(signed.ahead - hours * 3600) < 60


def test_a_reply_lives_as_long_as_its_question() -> None:
    """By the server's clock: a site's own, hours ahead, would have its answers refused as expired."""
    about = Metadata(1, "id", 1, 2, "", "", time.time() - 7200, 45.0, "query")
    question = Message(content=RecordDict(), metadata=about)  # type: ignore[call-overload]
    reply = site_node.refusal(question, "no")
    assert reply.metadata.created_at == question.metadata.created_at and reply.metadata.ttl == 45.0
