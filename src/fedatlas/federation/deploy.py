"""A federation across machines: a folder (kit) per party, its processes, and the way of `fedatlas run` to the sites.

    deploy/federation.yaml   what all agreed to; no path of anybody's data in it
    deploy/authority/        what signs certificates; stays with the coordinator
    deploy/server/           the coordinator's kit
    deploy/<site>/           a hospital's kit: kit.yaml, federation.yaml, start.sh, engine/ (keys, certificates), and,
                             once started, logs/, egress.jsonl, runs/<id>/ (memory, errors, overlays), cache/

A kit is started by its `start.sh` and runs in the foreground: the engine's own process, and at a hospital the
process that holds the data. Either is started again when it ends.
"""

import contextlib
import fcntl
import importlib
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from fedatlas import __version__
from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.transport.deployment import ENGINES, RELAY, Engine, Job, Launch, Plan, bound, listens_at
from fedatlas.transport.frames import Question, shown
from fedatlas.transport.local import Workers
from fedatlas.transport.relay import ServerRelay, SiteRelay, skewed

RESERVED = ("server", "authority")
Tell = Callable[[str], None]


def adapter(engine: str) -> Engine:
    """The module of an engine. Raises FederationError for an unknown name."""
    if engine not in ENGINES:
        raise FederationError(f"engine {engine!r} does not exist; known: local, {', '.join(ENGINES)}")
    return cast(Engine, importlib.import_module(ENGINES[engine]))


# ---------------------------------------------------------------------------------------------------- making kits


def init(
    federation: Any,
    out: Path,
    *,
    engine: str = "nvflare",
    host: str = "localhost",
    port: int = 8002,
    admin_port: int = 8003,
    days: int = 365,
    extra_sites: Sequence[str] = (),
) -> list[Path]:
    """Makes the folder of a deployment, with keys and certificates; returns the kits, the server's first.

    host: the name or address under which hospitals reach the server. Raises FederationError if `out` holds
    anything, or a site's name cannot name a folder here.
    """
    if out.exists() and any(out.iterdir()):
        raise FederationError(
            f"{out}: exists and is not empty; keys are never overwritten. Give another folder with -o"
        )
    sites = (*sorted(site.name for site in federation.sites), *extra_sites)
    for site in sites:
        if site.lower() in RESERVED:
            raise FederationError(
                f"site {site!r}: {', '.join(RESERVED)} are folders of a deployment; rename it"
            )
    _require_reachable(engine, host, port, admin_port, days)
    out.mkdir(parents=True, exist_ok=True)
    made = adapter(engine)
    try:
        made.provision(Plan(federation.name, host, port, admin_port, sites, days), out)
        write_shared(federation, out / "federation.yaml")
        for party in ("server", *sites):
            kit = out / party
            about: dict[str, Any] = {
                "party": party,
                "engine": engine,
                "host": host,
                "port": port,
                "version": __version__,
            }
            if party == "server":
                about |= {"admin_port": admin_port, "sites": list(sites)}
            (kit / "kit.yaml").write_text(yaml.safe_dump(about, sort_keys=False), encoding="utf-8")
            shutil.copy(out / "federation.yaml", kit / "federation.yaml")
            (kit / "start.sh").write_text(_START, encoding="utf-8")
            (kit / "start.sh").chmod(0o755)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return [out / party for party in ("server", *sites)]


_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?![0-9]+$){_LABEL}")
"""The name of a machine; its last part is no number, as that of an IPv4 address is."""


def _require_reachable(engine: str, host: str, port: int, admin_port: int, days: int) -> None:
    """Raises FederationError for a place or a time in which no hospital could reach the server."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        version = None
    if version is None and not _NAME.fullmatch(host):
        raise FederationError(f"--host {host!r}: the server's name or IP address is expected")
    if version == 6 and engine == "nvflare":
        raise FederationError(
            f"--host {host!r}: NVIDIA FLARE puts a port behind it with a colon, so it takes a name or an IPv4 address"
        )
    for flag, number in (("--port", port), ("--admin-port", admin_port)):
        if not 1 <= number <= 65535:
            raise FederationError(f"{flag} {number}: allowed are 1 to 65535")
    if port == admin_port:
        raise FederationError(f"--port and --admin-port are both {port}; they must differ")
    if not 1 <= days <= MOST_DAYS:
        raise FederationError(f"--days {days}: certificates can be valid for 1 to {MOST_DAYS} days")


MOST_DAYS = 36_500
"""For how long a certificate may be valid."""

_START = """#!/bin/sh
# Starts this party and stays in the foreground; Ctrl-C, or the end of the terminal, ends it.
FEDATLAS="${FEDATLAS:-fedatlas}"
if ! command -v "$FEDATLAS" >/dev/null; then
  echo "error: $FEDATLAS is not found; activate the environment it is installed in, or set FEDATLAS to its path" >&2
  exit 1
fi
exec "$FEDATLAS" deploy start "$(dirname "$0")" "$@"
"""


def write_shared(federation: Any, path: Path) -> None:
    """A federation file for all parties: every key with its value, no path, nothing of one machine."""
    from fedatlas.federation.file import resolved, shareable
    from fedatlas.transport.store import write_atomic

    plain = shareable(resolved(federation))
    write_atomic(path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode())


def read_kit(kit: Path) -> dict[str, Any]:
    """Who a kit is for. Raises FederationError if the folder is not one."""
    try:
        about = yaml.safe_load((kit / "kit.yaml").read_text(encoding="utf-8"))
        if not isinstance(about, dict) or not {"party", "engine"} <= set(about):
            raise ValueError
    except (OSError, ValueError, yaml.YAMLError):
        raise FederationError(
            f"{kit}: is not a party's folder, it has no usable kit.yaml; `fedatlas deploy init` makes them"
        ) from None
    return about


def accept(kit: Path, file: Path, tell: Tell) -> None:
    """Puts another federation file into a kit: what this party agrees to run from now on. Tells the difference."""
    from fedatlas.federation.file import flat_difference, load_federation, resolved
    from fedatlas.federation.yaml import read_yaml

    about, federation = read_kit(kit), load_federation(file)
    names = [site.name for site in federation.sites]
    if about["party"] != "server" and about["party"] not in names:
        raise FederationError(f"{file}: does not name {about['party']}; its sites are {', '.join(names)}")
    tell(flat_difference(read_yaml(kit / "federation.yaml"), resolved(federation), "before", "now"))
    write_shared(federation, kit / "federation.yaml")


# ------------------------------------------------------------------------------------------------- a party's processes


def start(
    kit: Path,
    data: Mapping[str, str] | None,
    tell: Tell = print,
    *,
    state: Path | None = None,
    one_run: bool = False,
    cache: Path | None = None,
    case_names: bool = False,
    texts: bool = False,
    device: str | None = None,
    parent: int | None = None,
) -> None:
    """Runs a party until it is told to end (SIGINT, SIGTERM). See `SiteDesk` for what leaves a site.

    data: at a hospital, where its data are. state: its private folder, which outlives the kit; None: the kit itself.
    one_run: that folder is the one of a single run. parent: the process with which the party ends, too. Raises FederationError before anything is started if something is missing.
    """
    kit = kit.resolve()
    about = read_kit(kit)
    party, engine = about["party"], adapter(about["engine"])
    site = party != "server"
    if site and not data:
        raise FederationError(
            f"{kit}: says nothing about where the data are; give --data /path/at/the/hospital"
        )
    for name, path in (data or {}).items():
        if not Path(path).is_dir():
            raise FederationError(f"--data {path}: no such folder (the data of {name})")
    _require_writable(kit, f"{kit}")
    _require_writable(state or kit, f"--state {state}")
    _require_writable(cache or kit, f"--cache {cache}")
    launch: Launch = (engine.site_process if site else engine.server_process)(kit)
    relay, logs, pid_file = kit / "relay", kit / "logs", kit / "engine.pid"
    logs.mkdir(exist_ok=True)
    with _alone(kit):
        _end_stale(pid_file, relay)
        workers = None
        if site:
            arguments = {
                "name": party,
                "federation": str(kit / "federation.yaml"),
                "data": {name: str(Path(path).resolve()) for name, path in (data or {}).items()},
                "state": str((state or kit).resolve()),
                "cache": str((cache or kit / "cache").resolve()),
                "one_run": one_run,
                "case_names": case_names,
                "texts": texts,
                "device": device,
            }
            if not one_run:  # else the run that starts this site has just written its kit
                _require_usable(arguments)
            workers = Workers("fedatlas.federation.site:open_site", arguments, 1, logs / "site.log")
        else:
            _require_ports(about)
        with _told_to_end() as over:
            site_relay = SiteRelay(relay, workers.serve, workers.end) if workers else None
            process = Keeper(launch, relay, logs / "engine.log", pid_file, tell, party)
            try:
                tell(f"{party}: started, engine {about['engine']}; logs in {logs}; Ctrl-C ends it")
                news = News(state or kit, party, tell, logs / "site.log") if site else None
                if site:
                    _tell_when_reached(about, engine, over, tell)
                while not over.wait(0.5) and parent in (None, os.getppid()):
                    process.look()
                    if news:
                        news.look()
            finally:
                over.set()
                tell(f"{party}: ending")
                process.close()
                if site_relay:
                    site_relay.close()
                if workers:
                    workers.close()


def _require_writable(folder: Path, asked: str) -> None:
    """Raises FederationError where no file can be made in a folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FederationError(
            f"{asked}: cannot be written ({error.strerror or error}); a party needs a folder in which this user may write"
        ) from None


def _require_ports(about: Mapping[str, Any]) -> None:
    """Raises FederationError where a port of the server cannot be had. about: its kit.yaml; one of an older version names
    no admin port."""
    wanted = {"port": listens_at(str(about.get("host", ""))), "admin_port": "127.0.0.1"}
    for name, address in wanted.items():
        if name in about:
            bound(address, int(about[name])).close()


def _require_usable(arguments: Mapping[str, Any]) -> None:
    """Raises FederationError where a site could not serve a run, see `site.require_usable`. It is found out by a process of
    its own, so that this one, which lives on, holds neither torch nor a GPU."""
    named = {key: arguments[key] for key in ("name", "federation", "data", "device")}
    done = subprocess.run(
        [sys.executable, "-m", "fedatlas.federation.site", json.dumps(named)],
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise FederationError(
            done.stdout.strip() or f"site {named['name']}: its own process cannot start ({last})"
        )


KNOCK = 5.0
"""Seconds between a site's attempts to reach the server, until the first that succeeds."""


def _tell_when_reached(about: Mapping[str, Any], engine: Engine, over: threading.Event, tell: Tell) -> None:
    """Tells at a site, once, that the server's port cannot be reached, and when it can. A server that only a proxy reaches is not
    tried. about: the site's kit.yaml; over: ends the attempts."""
    host, port = str(about.get("host", "")), int(about.get("port", 0))
    behind = "https" in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    if not host or not port or (engine.PROXIED and behind):
        return
    place = f"{about['party']}: the server's port, {host}:{port},"

    def knock() -> None:
        told = False
        while not over.is_set():
            try:
                socket.create_connection((host, port), timeout=2 * KNOCK).close()
            except OSError as error:
                if not told:
                    tell(f"{place} cannot be reached ({error.strerror or error}); it is tried on")
                told = True
            else:
                tell(f"{place} is reached")
                return
            over.wait(KNOCK)

    threading.Thread(target=knock, daemon=True).start()


class News:
    """Tells the people at a hospital what leaves it and what goes wrong, as the site's own process writes it down.

    log: what that process prints, of which the end of every traceback is told.
    """

    def __init__(self, state: Path, party: str, tell: Tell, log: Path | None = None) -> None:
        self.state, self.party, self.tell, self.log = state, party, tell, log
        self.read = {path: path.stat().st_size for path in self._files()}
        self.traced = False
        """Whether the log is within a traceback."""

    def _files(self) -> list[Path]:
        places = [self.state, *sorted(self.state.glob("runs/*"))]
        files = [self.state / "egress.jsonl", *(place / "errors.log" for place in places)]
        return [path for path in [*files, *filter(None, [self.log])] if path.exists()]

    def look(self) -> None:
        for path in self._files():
            with path.open("rb") as file:
                file.seek(self.read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self.read[path] = self.read.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if news := self._news(line, path):
                    self.tell(f"{self.party}: {news}")

    def _news(self, line: str, path: Path) -> str:
        """What a line of a file says to people; "" for nothing."""
        if path.suffix == ".jsonl":
            return self._sent(line)
        if path != self.log:
            return self._error(line, path)
        if line.startswith("Traceback "):
            self.traced = True
        error = self._error(line, path) if self.traced else ""
        self.traced = self.traced and not error
        return error

    @staticmethod
    def _sent(line: str) -> str:
        try:
            plain = json.loads(line.partition(" ")[2])
            what = f"round {plain['round']} {shown(plain['function'])}"
            return f"sent {plain['bytes']:,} bytes, {what} of {shown(plain['run'])}"
        except (ValueError, KeyError):
            return ""

    @staticmethod
    def _error(line: str, path: Path) -> str:
        """The last line of a traceback: neither indented nor a heading."""
        name, colon, _ = line.partition(": ")
        is_error = colon and name.replace(".", "").replace("_", "").isalnum()
        return f"error: {shown(line)} ({path})" if is_error else ""


class Keeper:
    """Keeps an engine's process running: starts it again after a pause when it ends by itself."""

    def __init__(
        self, launch: Launch, relay: Path, log: Path, pid_file: Path, tell: Tell, party: str
    ) -> None:
        self.launch, self.relay, self.log, self.pid_file = launch, relay, log, pid_file
        self.tell, self.party = tell, party
        self.process: subprocess.Popen[bytes] | None = None
        self.next, self.began = 0.0, 0
        self.look()

    def look(self) -> None:
        """Starts the process if it does not run and its pause is over."""
        if self.process is not None and self.process.poll() is not None:
            code = self.process.returncode
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            words = _last_words(self.log, self.began)
            self.tell(
                f"{self.party}: the engine's process ended {how}{words and f' ({words})'}; it is started again in "
                f"{self.launch.pause:g} s. See {self.log}"
            )
            _end_group(self.process.pid)  # what it may have left behind
            self.process, self.next = None, time.monotonic() + self.launch.pause
        if self.process is None and time.monotonic() >= self.next:
            with self.log.open("ab") as log:
                self.began = log.tell()
                self.process = subprocess.Popen(
                    self.launch.command,
                    env=os.environ | dict(self.launch.env) | {RELAY: str(self.relay)},
                    cwd=self.launch.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            with contextlib.suppress(OSError):  # a full disk ends no party
                self.pid_file.write_text(str(self.process.pid), encoding="utf-8")

    def close(self) -> None:
        if self.process is not None:
            _end_group(self.process.pid, self.process)
        self.pid_file.unlink(missing_ok=True)


def _end_stale(pid_file: Path, relay: Path) -> None:
    """Ends the engine's process that a supervisor left behind when it was killed."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text(encoding="utf-8"))
        mark = f"{RELAY}={relay}".encode()
        if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            _end_group(pid)


def _last_words(log: Path, start: int) -> str:
    """The last line from this byte on that speaks of an error, or else the last line; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - 50_000))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)]
    return shown((telling or lines or [""])[-1], 300)


_TELLING = re.compile("error|cannot|could not|refuse|fail|exception", re.IGNORECASE)


def _end_group(pid: int, process: "subprocess.Popen[bytes] | None" = None, patience: float = 10.0) -> None:
    """Ends a process and all that it started in its group: asked first, then made to."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
    end = time.monotonic() + patience
    while time.monotonic() < end and _group_lives(pid, process):
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if process is not None:
        process.wait()


def _group_lives(pid: int, process: "subprocess.Popen[bytes] | None") -> bool:
    if process is not None:
        process.poll()
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def _alone(kit: Path) -> Iterator[None]:
    """Holds a kit for one supervisor."""
    with (kit / "lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FederationError(f"{kit}: is running already; one party runs once") from None
        yield


@contextlib.contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM or SIGHUP sets."""
    over = threading.Event()
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, lambda *_: over.set()) for kind in kinds}
    try:
        yield over
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


# ----------------------------------------------------------------------------------------- the way of a run to the sites


class Deployed:
    """`transport.clients.Transport` over a distributed engine: keeps a relay job running on it while it is open.

    A job that ends, for whatever reason, is submitted again; the questions that were open are put to the next. While the server
    takes no job, it is asked on, as long as this is open.
    """

    PATIENCE = 90.0
    """Seconds without a job, after which sites are lost until the server takes one."""
    STARTING = 180.0
    """Seconds in which a job that was accepted must have begun; one that lived longer did not fail at its start."""
    GONE = 3.0
    """Seconds after which a job that was connected and is not any more counts as ended, whatever the engine says."""
    LOOK = 0.5
    """Seconds between two looks at a job."""
    PAUSE = 2.0
    """Seconds after which a server that took no job is asked again."""
    MOST = 5
    """Jobs in a row that failed at their start, after which the engine counts as broken."""

    def __init__(self, engine: str, deploy: Path, sites: Sequence[str], tell: Tell) -> None:
        self.engine, self.deploy, self.sites = adapter(engine), deploy.resolve(), sorted(sites)
        self.tell = tell
        self.kit = self.deploy / "server"
        self.relay = ServerRelay(self.kit / "relay")
        self.over = threading.Event()
        self.job: Job | None = None
        self.answers = 0
        self.broken: str | None = None
        """Why there will be no job any more."""
        self.keeper = threading.Thread(target=self._keep, daemon=True)
        self.keeper.start()

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        """As `Transport.ask`. Raises FedAtlasError where the engine is broken: then nobody need wait for a site."""
        for site, lost in self.relay.ask(questions, deadline):
            if self.broken is not None:
                raise FedAtlasError(f"{self.broken}. Complete rounds are kept; go on with --resume")
            if lost is None:
                self.answers += 1
            yield site, lost

    def _keep(self) -> None:
        try:
            self._keep_on()
        except (
            Exception
        ) as error:  # an engine's own error: nobody is left waiting for a thread that has ended
            self._give_up(f"the engine's job could not be looked after ({type(error).__name__}: {error})")

    def _keep_on(self) -> None:
        in_vain = 0
        while True:
            jobs, answers = self.relay.jobs, self.answers
            job = self.job = self._submitted()
            accepted = time.monotonic()
            how = self._ended(job, jobs) if job else None
            if job is None or how is None or self.over.is_set():
                return
            self.job = None
            lasted = self.relay.jobs > jobs and time.monotonic() - accepted > self.STARTING
            in_vain = 0 if lasted or self.answers > answers or job.takes_in else in_vain + 1
            if in_vain >= self.MOST:
                self._give_up(
                    f"the engine's job ended {in_vain} times in a row within {self.STARTING:g} s or did not begin, each "
                    f"time without an answer ({how}); see {self.kit / 'logs' / 'engine.log'}"
                )
                return
            self.tell(f"the engine's job ended ({how}); a new one is started, nothing is lost")

    def _submitted(self) -> Job | None:
        """A job that the server took; None if this is closed before. Sites are lost from `PATIENCE` on until then."""
        began = time.monotonic()
        while not self.over.wait(self.LOOK):
            try:
                job = self.engine.submit(self.kit, self.deploy / "authority", self.kit / "relay", self.sites)
            except (FedAtlasError, OSError) as error:
                if time.monotonic() - began > self.PATIENCE:
                    self.relay.fail(f"{error}")
                self.over.wait(self.PAUSE)
            else:
                self.relay.mend()
                return job
        return None

    def _ended(self, job: Job, jobs: int) -> str | None:
        """Waits for the end of a job, and tells how it ended; None if this is closed before. jobs: so many had connected
        when it was submitted."""
        accepted = seen = time.monotonic()
        while not self.over.wait(self.LOOK):
            now, begun = time.monotonic(), self.relay.jobs > jobs
            if self.relay.connected or not begun:
                seen = now
            how = job.ended()
            if how is None and now - seen > self.GONE:
                how = "its process has gone"
                job.stop()
            if how is None and not begun and now - accepted > self.STARTING:
                how = f"it was accepted and did not begin within {self.STARTING:g} s"
                job.stop()
            if how is not None:
                return how
        return None

    def _give_up(self, reason: str) -> None:
        self.broken = reason
        self.relay.fail(reason)

    def close(self) -> None:
        self.over.set()
        self.relay.close()
        self.keeper.join(timeout=120)
        if self.job is not None and self.job.ended() is None:
            self.job.stop()


def gather(engine: str, deploy: Path, *, data_changed: bool = False) -> Any:
    """How `run_federation` finds the parties of a deployment: `federation.session.Gather`. data_changed: see `join`."""

    def gather(federation: Any, folder: Any, tell: Tell) -> Any:
        adapter(engine).require()
        about = read_kit(deploy / "server")
        if about["engine"] != engine:
            raise FederationError(
                f"{deploy}: was made for the engine {about['engine']}, not {engine}; give --engine "
                f"{about['engine']}, or make another with `fedatlas deploy init --engine {engine}`"
            )
        sites = [site.name for site in federation.sites]
        parties = _parties(deploy)
        missing = [site for site in sites if site not in parties]
        if missing:
            raise FederationError(
                f"{deploy}: has no party {missing[0]!r}; its parties are {', '.join(parties)}"
            )
        transport = Deployed(engine, deploy, _with_pool(federation, deploy), tell)
        return join(federation, folder, tell, transport, data_changed=data_changed)

    return gather


def _parties(deploy: Path) -> list[str]:
    """The sites that a deployment was made for, as its server's kit remembers them."""
    return list(read_kit(deploy / "server").get("sites", []))


def _with_pool(federation: Any, deploy: Path) -> list[str]:
    from fedatlas.federation.design import POOLED
    from fedatlas.federation.file import make_method

    sites = [site.name for site in federation.sites]
    if not make_method(federation).pooled:
        return sites
    if POOLED not in _parties(deploy):
        raise FederationError(
            f"method {federation.method['name']} trains on the union of all sites' data, which sites that share "
            "nothing cannot form; it runs with the local engine, or with nvflare-local and flower-local"
        )
    return [*sites, POOLED]


COMING = 600.0
"""Seconds that a run waits for its sites to come."""


def join(federation: Any, folder: Any, tell: Tell, transport: Deployed, *, data_changed: bool = False) -> Any:
    """Says hello to every site, agrees on labels, and lets all prepare their data: `federation.session.Parties`.

    data_changed: let sites go on whose data are not those with which the run began.

    Raises FederationError where versions or federation files differ, with the difference; SiteLost where a site
    does not come. A run that is resumed goes on without a site if its rule for lost sites is to drop them.
    """
    from fedatlas.core.labels import LabelSpace
    from fedatlas.federation.design import POOLED, Design, space_of, versions
    from fedatlas.federation.facts import problem_of_hello, problem_of_join
    from fedatlas.federation.file import hash_of, resolved, shareable
    from fedatlas.federation.session import Parties
    from fedatlas.federation.site import Agreement, SiteDesk
    from fedatlas.transport.clients import SiteClients
    from fedatlas.transport.egress import Asked, Declaration
    from fedatlas.transport.pipeline import ServerPipeline
    from fedatlas.transport.rounds import read_run

    try:
        run = {"run": folder.path.name}
        before = read_run(folder.path) if (folder.path / "run.json").exists() else None
        if before and federation.faults.on_lost == "drop":
            faults = federation.faults
        else:  # all of them, and they may still be starting
            coming = min(federation.faults.deadline, COMING)
            faults = replace(federation.faults, on_lost="wait", deadline=coming, patience=coming)
        text = json.dumps(shareable(resolved(federation)), sort_keys=True)
        mine = {"versions": versions(), "hash": hash_of(federation)}

        def asked(site: str, function: str, payload: Mapping[str, Any]) -> Asked:
            if function == "hello":
                several = site == POOLED
                problem_of = partial(
                    problem_of_hello, site, mine["hash"], versions=mine["versions"], several=several
                )
            else:
                problem_of = partial(problem_of_join, LabelSpace.from_plain(payload["agreement"]["labels"]))
            return Asked(payload, facts=problem_of)

        declaration = Declaration(SiteDesk.sends, asked=asked)
        scratch = folder.path / "scratch" / "join"
        clients = SiteClients(
            transport.sites,
            transport,
            scratch,
            faults,
            run,
            pipeline=ServerPipeline(declaration=declaration),
            tell=tell,
        )
        tell(f"waits for {', '.join(transport.sites)}, at most {faults.patience:g} s")
        asked_at = time.time()
        replies = clients.call(SiteDesk.hello, federation=text, **mine)
        hellos = {site: reply["facts"] for site, reply in replies}
        _compare(json.loads(text), mine, hellos)
        clocks = {site: ahead_of(facts["clock"], asked_at, time.time()) for site, facts in hellos.items()}
        for site, ahead in clocks.items():
            if ahead:
                tell(skewed(f"site {site}: its clock", ahead))
        brings = {name: names for facts in hellos.values() for name, names in facts["brings"].items()}
        channels = {site: facts["channels"] for site, facts in hellos.items()}
        if len(set(channels.values())) > 1:
            counts = ", ".join(f"{site}: {n}" for site, n in sorted(channels.items()))
            raise FederationError(f"the sites' images have different numbers of channels ({counts})")
        if before:
            space = LabelSpace.from_plain(before["labels"])
        else:
            space = space_of(federation, brings)
        agreed = next(iter(channels.values()))
        agreement = Agreement(folder.path.name, mine["hash"], space.to_plain(), agreed).to_plain()
        clients.about = agreement
        # data are read and preprocessed now; that is the longest call of all
        dropping = federation.faults.on_lost == "drop" and not before
        clients.faults = replace(federation.faults, on_lost="stop") if dropping else federation.faults
        begins = not folder.complete()
        own = {site: {"ahead": ahead} if ahead else {} for site, ahead in clocks.items()}
        replies = clients.call(
            SiteDesk.join, each=own, agreement=agreement, begins=begins, data_changed=data_changed
        )
        joined = {site: reply["facts"] for site, reply in replies}
        tell(f"joined: {', '.join(joined)}")
        for site, reason in clients.lost.items():
            tell(f"goes on without {site}: {reason}")
        summaries = {site: facts["summary"] for site, facts in joined.items() if site != POOLED}
        if before:
            summaries = before["sites"] | summaries
        check_joined(joined, summaries, space)
        design = Design(federation, space, agreement["channels"])
        design.check_net(initial=begins)
        training = [POOLED] if design.pooled else sorted(s for s in summaries if trains(summaries[s]))
        memories = {site: facts["memory"] for site, facts in joined.items()}
        summaries = dict(sorted(summaries.items()))
        changed = sorted(site for site, facts in joined.items() if facts["changed"])
        return Parties(
            design, summaries, training, transport, agreement, clients.answering, memories, changed
        )
    except BaseException:
        transport.close()
        raise


APART = 60.0
"""Seconds by which a site's clock may differ without a word."""


def ahead_of(clock: float, asked: float, answered: float) -> float:
    """Seconds by which a clock that was read between two moments is surely ahead of ours (below 0: behind); 0 where
    it is by less than `APART`."""
    ahead = clock - answered if clock > answered else min(clock - asked, 0.0)
    return ahead if abs(ahead) > APART else 0.0


def _compare(plain: Mapping[str, Any], mine: Mapping[str, Any], hellos: Mapping[str, Any]) -> None:
    """Raises FederationError if a site has other versions, or another federation file."""
    from fedatlas.federation.facts import other_versions
    from fedatlas.federation.file import flat_difference

    problems = []
    for site, facts in sorted(hellos.items()):
        problems += [f"site {site}: {text}" for text in other_versions(mine["versions"], facts["versions"])]
        if facts["hash"] != mine["hash"]:
            try:
                theirs = json.loads(facts["federation"])
                difference = flat_difference(theirs, plain, "at the site", "at the server")
            except (
                AttributeError,
                KeyError,
                RecursionError,
                TypeError,
                ValueError,
            ):  # not one of this version, if it is one at all
                difference = "  (in a form that this version of fedatlas does not write)"
            problems.append(
                f"site {site}: has agreed to another federation file:\n{difference}\n  It takes this one with "
                "`fedatlas deploy accept`, if it agrees"
            )
    if problems:
        raise FederationError("\n".join(problems))


def trains(summary: Mapping[str, Any]) -> bool:
    """Does the site of this summary train, or is it tested on only?"""
    return summary.get("role", "train") == "train"


def check_joined(joined: Mapping[str, Any], summaries: Mapping[str, Any], space: Any) -> None:
    """Raises FederationError for what is wrong between sites: one name with two meanings, a class that nobody
    annotates, a site without training cases."""
    meaning: dict[str, tuple[str, str]] = {}
    problems = []
    for site, facts in sorted(joined.items()):
        for name, target in facts["classes"].items():
            first, other = meaning.setdefault(name, (site, target))
            # where every site that has the name gives it an alias, the meanings were chosen
            if other != target and name in (other, target):
                problems.append(
                    f"site {site}: label {name!r} means {target!r} here and {other!r} at site {first}"
                )
    for site, summary in sorted(summaries.items()):
        if trains(summary) and not summary["cases"]["train"]:
            problems.append(f"site {site}: has no training case")
    for name in space.names:
        present = [
            summary["positives"].get(name, 0) for summary in summaries.values() if "positives" in summary
        ]
        if present and not sum(present):
            problems.append(
                f"class {name!r} is present in no training image of any site; it cannot be learnt"
            )
    annotated = {name for summary in summaries.values() for name in summary["annotated"]}
    problems += [
        f"no site annotates {space.names[c]!r}; take it out of `labels.names`, or add a site that does"
        for c in space.foreground
        if space.names[c] not in annotated
    ]
    if problems:
        raise FederationError("\n".join(problems))


# ------------------------------------------------------------------------------------------------- all on one machine


class Trial:
    """Real server and client processes of an engine on this machine, for one run; a context.

    Its deployment lies in the run's folder, the sites' private folders where the local engine has them: so a run
    may go on with another engine.
    """

    def __init__(self, engine: str, federation: Any, folder: Any, tell: Tell) -> None:
        from fedatlas.federation.design import POOLED, cache_folder, data_path
        from fedatlas.federation.file import make_method

        self.processes: list[subprocess.Popen[bytes]] = []
        self.deploy = folder.path / f"deploy-{engine}"
        paths = {site.name: data_path(site) for site in federation.sites}
        extra = [POOLED] if make_method(federation).pooled else []
        shutil.rmtree(self.deploy, ignore_errors=True)
        port, admin_port = free_ports(2)
        kits = init(
            federation,
            self.deploy,
            engine=engine,
            host="localhost",
            port=port,
            admin_port=admin_port,
            extra_sites=extra,
        )
        try:
            for kit in kits:
                own = paths if kit.name in extra else {k: v for k, v in paths.items() if k == kit.name}
                more = [
                    "--state",
                    str(folder.site(kit.name)),
                    "--cache",
                    str(cache_folder(federation, folder.path.parent)),
                ]
                more += ["--one-run", "--device", federation.engine.device, "--case-names", "--texts"]
                more += [f"--data={name}={path}" for name, path in own.items()]
                self._start(kit, more if kit.name != "server" else [])
        except BaseException:
            self.close()
            raise

    def _start(self, kit: Path, more: Sequence[str]) -> None:
        command = [sys.executable, "-m", "fedatlas", "deploy", "start", str(kit), *more]
        command += ["--parent", str(os.getpid())]
        (kit / "logs").mkdir(exist_ok=True)
        with (kit / "logs" / "party.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            )

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def gather_trial(engine: str, *, data_changed: bool = False) -> Any:
    """How `run_federation` runs on an engine's real processes, all on this machine: `federation.session.Gather`. data_changed: see
    `join`."""

    def gather(federation: Any, folder: Any, tell: Tell) -> Any:
        adapter(engine).require()
        tell(f"starts {engine}'s server and {len(federation.sites)} sites on this machine")
        trial = Trial(engine, federation, folder, tell)
        try:
            transport = Deployed(engine, trial.deploy, _with_pool(federation, trial.deploy), tell)
            ended = transport.close

            def close() -> None:
                try:
                    ended()
                finally:
                    trial.close()

            transport.close = close  # type: ignore[method-assign]
            return join(federation, folder, tell, transport, data_changed=data_changed)
        except BaseException:
            trial.close()
            raise

    return gather


def free_ports(n: int) -> list[int]:
    """Ports of this machine that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
