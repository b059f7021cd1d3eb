"""A federation across machines: a folder (kit) per party, and its processes; `across` is the way of `fedatlas run` to them.

    deploy/federation.yaml   what all agreed to; no path of anybody's data in it
    deploy/authority/        what signs certificates; stays with the coordinator
    deploy/server/           the coordinator's kit
    deploy/<site>/           a hospital's kit: kit.yaml, federation.yaml, start.sh, engine/ (keys, certificates), and,
                             once started, logs/, egress.jsonl, runs/<id>/ (memory, errors, overlays), cache/

A kit is started by its `start.sh` and runs in the foreground: the engine's own process, and at a hospital the
process that holds the data. Either is started again when it ends.
"""

import contextlib
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
from pathlib import Path
from typing import Any, cast

import yaml

from fedatlas import __version__
from fedatlas.core.errors import FederationError
from fedatlas.transport.deployment import ENGINES, RELAY, Engine, Launch, Plan, bound, listens_at
from fedatlas.transport.frames import shown
from fedatlas.transport.local import Workers
from fedatlas.transport.locks import lock
from fedatlas.transport.relay import SiteRelay

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
    require_days(days)


MOST_DAYS = 36_500
"""For how long a certificate may be valid."""


def require_days(days: int) -> None:
    """Raises FederationError where no certificate can be valid for so many days."""
    if not 1 <= days <= MOST_DAYS:
        raise FederationError(f"--days {days}: certificates can be valid for 1 to {MOST_DAYS} days")


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
    from fedatlas.federation.file import differences, flat_difference, load_federation, resolved
    from fedatlas.federation.yaml import read_yaml

    about, federation = read_kit(kit), load_federation(file)
    names = [site.name for site in federation.sites]
    if about["party"] != "server" and about["party"] not in names:
        raise FederationError(f"{file}: does not name {about['party']}; its sites are {', '.join(names)}")
    before, now = read_yaml(kit / "federation.yaml"), resolved(federation)
    same = not differences(before, now)
    tell("nothing differs" if same else flat_difference(before, now, "before", "now"))
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
        if not site:
            raise FederationError(
                f"--data {path}: {kit} is the server's folder, which has no data; leave it out"
            )
        if name != party and party != "pooled":
            raise FederationError(f"--data {name}={path}: {kit} is the folder of {party}; give --data {path}")
        if not Path(path).is_dir():
            raise FederationError(f"--data {path}: no such folder (the data of {name})")
    _require_writable(kit, f"{kit}")
    _require_writable(state or kit, f"--state {state}")
    _require_writable(cache or kit, f"--cache {cache}")
    launch: Launch = (engine.site_process if site else engine.server_process)(kit)
    relay, logs, pid_file = kit / "relay", kit / "logs", kit / "engine.pid"
    logs.mkdir(exist_ok=True)
    with _alone(kit, tell):
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
def _alone(kit: Path, tell: Tell) -> Iterator[None]:
    """Holds a kit for one supervisor. tell: called where the file system has no locks."""
    with (kit / "lock").open("w", encoding="utf-8") as file:
        try:
            lock(file, kit, tell, otherwise="see that this party is started once")
        except BlockingIOError:
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
