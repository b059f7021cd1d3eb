"""NVIDIA FLARE: provisioned sites, mutual TLS, one client process that lives as long as its job.

Of FLARE we use identity, transport and the launch of a job; the job itself is `fedatlas.transport.nvflare.job`.
The job holds no code, only the paths of its two classes, which are the only ones a kit allows to be loaded; so
every party runs the FedAtlas that it installed. A kit streams no logs, and listens for commands only at the
coordinator's own machine.

    provision                    at the coordinator: the kits of the server and of every site, and the authority
    server_process, site_process FLARE's own processes, in the foreground
    submit                       starts the relay job
    renew, sign, install         a new key and certificate for a party, without its key ever leaving it

The processes find the relay's file by its absolute path in the variable FEDATLAS_RELAY. A process must be reaped
when it has ended: those of its jobs live until then.

What FLARE checks, as tried: both ends' certificates, in TLS; on every connection, that the name a client claims
is the one in its certificate; at registration, that it holds the key; on every message, a token that the server
signed for that client. What it does not: it has no list of revoked certificates, and of two clients with one
key, the later displaces the earlier. A renewed key replaces the old one in the kit, but the certificate of the
old one is accepted until it expires; what shuts out a stolen key at once is a new deployment. So certificates are
best short-lived, and renewed.

What FLARE does when a process dies: the job's at a site, it ends the job; the client's, it notices after
`SILENCE` seconds and a few more, and goes on without the site; a client that is back is taken into no running
job, so such a job is ended here; the server's, the job is gone, and clients come back to the next server.
"""

import base64
import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedatlas.core.errors import FederationError
from fedatlas.transport import pki
from fedatlas.transport.deployment import Job, Launch, Plan

ADMIN = "admin@fedatlas.local"
CLASSES = tuple(f"fedatlas.transport.nvflare.job.{name}" for name in ("RelayController", "RelayExecutor"))
SCHEME = "http"
"""How FLARE's messages travel: over WebSocket in TLS."""
POLL = 0.2
"""Seconds between a site's requests for a task: a call takes at least half of it."""
SILENCE = 30
"""Seconds without a sign of life after which a client counts as gone."""
ROOT_DAYS = 3650
ADMIN_DAYS = 30
"""For how many days the certificate that submits jobs is made anew, when it ends within a day."""
KNOCK = 5.0
"""Seconds that a server just started has to listen."""
JOIN = 15.0
"""Seconds that a job waits for sites that are not yet connected."""
IDLE = 6
"""How often in a row, about once a second, a site must be found idle for its job to be given up."""
SETTLE = 12.0
"""Seconds in which an abort shows in a job's status."""
STOP = 30.0
"""Seconds that an aborted job has to end."""


PROXIED = False


def require() -> None:
    """Raises FederationError where NVIDIA FLARE is not installed."""
    if find_spec("nvflare") is None:
        raise FederationError(
            'engine nvflare needs NVIDIA FLARE, which is not installed; run `pip install "fedatlas[nvflare]"`'
        )


# ------------------------------------------------------------------------------------------------ provisioning


def provision(plan: Plan, out: Path) -> None:
    """Writes the kits `out/server/engine` and `out/<site>/engine`, and `out/authority`, which stays with the
    coordinator: the key of the certificate authority, and the kit with which jobs are submitted.

    Nothing is fetched. Private keys are RSA 2048, readable by their owner alone. Certificates of parties are
    valid for `plan.days`, that of the authority for ten years at least, so that they can be renewed.
    Raises FederationError for names that FLARE does not take, and without NVIDIA FLARE.
    """
    require()
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Project
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    if taken := {"server", "authority"} & set(plan.sites):
        raise FederationError(f"engine nvflare: no site can be called {min(taken)!r}; rename it")
    with tempfile.TemporaryDirectory(prefix="fedatlas-") as scratch:
        try:
            project = Project(
                plan.name, "", props={"connection_security": "mtls", "allow_log_streaming": False}
            )
            server = {"fed_learn_port": plan.port, "admin_port": plan.admin_port, "default_host": plan.host}
            project.set_server("server", "fedatlas", server | {"host_names": ["localhost", "127.0.0.1"]})
            for site in plan.sites:
                project.add_client(site, "fedatlas", {})
            project.add_admin(ADMIN, "fedatlas", {"role": "project_admin"})
        except ValueError as error:
            raise FederationError(f"engine nvflare: {error}") from None
        builders = [
            WorkspaceBuilder(),
            StaticFileBuilder(config_folder="config", scheme=SCHEME),
            CertBuilder(root_valid_days=max(ROOT_DAYS, plan.days)),
        ]
        with contextlib.redirect_stdout(sys.stderr):
            made = Provisioner(scratch, builders).provision(project, logger=_Quiet())
        if made.get(CtxKey.BUILD_ERROR):
            raise FederationError(f"engine nvflare could not provision: {'; '.join(made[CtxKey.ERRORS])}")
        kits = Path(made[CtxKey.CURRENT_PROD_DIR])
        state = json.loads((Path(scratch) / plan.name / "state" / "cert.json").read_text(encoding="utf-8"))
        authority = out / "authority"
        authority.mkdir(parents=True, mode=0o700)
        authority.chmod(0o700)
        (authority / "rootCA.pem").write_text(state["root_cert"], encoding="utf-8")
        pki.write(authority / "rootCA.key", state["root_pri_key"].encode(), secret=True)
        (authority / "rootCA.pem").write_bytes(_earlier(authority))
        for party, kit in [("server", out / "server" / "engine"), (ADMIN, authority / "admin")] + [
            (site, out / site / "engine") for site in plan.sites
        ]:
            kit.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(kits / party, kit)
            _dress(kit, plan)
            shutil.copy(authority / "rootCA.pem", kit / "startup" / "rootCA.pem")
            _recertify(kit, authority, plan.days)


class _Quiet:
    """FLARE's provisioner prints unless it is given somewhere to write."""

    def debug(self, message: str) -> None: ...
    def info(self, message: str) -> None: ...
    def warning(self, message: str) -> None: ...
    def error(self, message: str) -> None: ...


def _dress(kit: Path, plan: Plan) -> None:
    """Makes a kit of FLARE's ours: strict, quiet, without scripts of its own."""
    startup, local = kit / "startup", kit / "local"
    for pattern in ("*.sh", "*.txt", "*.ipynb"):
        for path in [*startup.glob(pattern), *kit.glob(pattern)]:
            path.unlink()
    (local / "privacy.json.sample").unlink(missing_ok=True)
    if (startup / "fed_admin.json").exists():
        with _edited(startup / "fed_admin.json") as config:
            config["admin"]["host"] = "localhost"
        return
    (local / "resources.json.default").unlink()
    resources: dict[str, Any] = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": list(CLASSES),
    }
    if (startup / "fed_server.json").exists():
        with _edited(startup / "fed_server.json") as config:
            config["servers"][0]["service"]["target"] = f"{plan.host}:{plan.port}"
            if plan.admin_port != plan.port:
                config["servers"][0]["admin_host"] = "localhost"
        resources["servers"] = [
            {"admin_storage": "transfer", "heart_beat_timeout": SILENCE, "admin_timeout": 10.0}
        ]
        once = {"max_jobs": 1, "min_schedule_interval": 1.0}
        stored = {"uri_root": "/", "job_store_id": "job_store"}
        resources["components"] = [
            _component("job_scheduler", "app_common.job_schedulers.job_scheduler.DefaultJobScheduler", once),
            _component("job_manager", "apis.impl.job_def_manager.SimpleJobDefManager", stored),
            _component("job_store", "app_common.storages.filesystem_storage.FilesystemStorage"),
            _component("process_launcher", f"{_LAUNCHER}.server_process_launcher.ServerProcessJobLauncher"),
        ]
    else:
        resources |= {"allow_log_streaming": False, "client": {"retry_timeout": 30}}
        no_gpu = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0}
        manager = "app_common.resource_managers.gpu_resource_manager.GPUResourceManager"
        consumer = "app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
        resources["components"] = [
            _component("resource_manager", manager, no_gpu),
            _component("resource_consumer", consumer),
            _component("process_launcher", f"{_LAUNCHER}.client_process_launcher.ClientProcessJobLauncher"),
        ]
    _write_json(local / "resources.json", resources)


_LAUNCHER = "app_common.job_launcher"


def _component(name: str, path: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"id": name, "path": f"nvflare.{path}", "args": arguments or {}}


@contextlib.contextmanager
def _edited(path: Path) -> Any:
    config = json.loads(path.read_text(encoding="utf-8"))
    yield config
    _write_json(path, config)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------- certificates


def _pair(engine: Path) -> tuple[Path, Path]:
    """The certificate and the key of a kit."""
    for kind in ("server", "client"):
        if (engine / "startup" / f"{kind}.crt").exists():
            return engine / "startup" / f"{kind}.crt", engine / "startup" / f"{kind}.key"
    raise FederationError(f"{engine}: no certificate in its folder startup; this is no kit of engine nvflare")


def _name(engine: Path) -> str:
    return pki.name_of(pki.certificate_of(_pair(engine)[0]).subject)


def _recertify(kit: Path, authority: Path, days: int) -> None:
    """Gives a kit's key a certificate that is valid for `days`, whatever FLARE's provisioner chose, and keeps a
    copy of it: the key that is to sign the party's next request."""
    path, _ = _pair(kit)
    old = pki.certificate_of(path)
    pki.write(path, _issue(old, old.public_key(), authority, days))
    issued = authority / "issued"
    issued.mkdir(exist_ok=True)
    shutil.copy(path, issued / f"{pki.name_of(old.subject)}.crt")


def _earlier(authority: Path) -> bytes:
    """The certificate of the authority, valid `pki.EARLIER` than FLARE has made it."""
    root, key = pki.certificate_of(authority / "rootCA.pem"), pki.key_of(authority / "rootCA.key")
    extensions = [(extension.value, extension.critical) for extension in root.extensions]
    begin, end = root.not_valid_before_utc, root.not_valid_after_utc
    return pki.pem(
        pki.issue(
            root.subject,
            root.public_key(),
            root.issuer,
            key,
            end,
            extensions,
            "SHA256",
            begin=begin,
            number=root.serial_number,
        )
    )


def _issue(like: Any, public: Any, authority: Path, days: int) -> bytes:
    """A certificate for a public key with the subject and the host names of the certificate `like`."""
    from cryptography.x509 import SubjectAlternativeName

    root, signer = pki.certificate_of(authority / "rootCA.pem"), pki.key_of(authority / "rootCA.key")
    names = like.extensions.get_extension_for_class(SubjectAlternativeName).value
    extensions = [*pki.identifies(public, signer), (names, False)]
    end = min(pki.in_days(days), root.not_valid_after_utc)
    return pki.pem(pki.issue(like.subject, public, root.subject, signer, end, extensions, "SHA256"))


def renew(kit: Path) -> Path:
    """Makes a new private key in `kit`, and returns the file to send to the coordinator; it holds no secret.

    It is a request for a certificate, signed with the present key too. Nothing changes until `install`.
    Raises FederationError where `kit` is no kit of this engine.
    """
    require()
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    engine = kit / "engine"
    certificate, key = _pair(engine)
    new, subject = pki.rsa_key(), pki.certificate_of(certificate).subject
    pem = pki.request(subject, new, "SHA256")
    proof = pki.key_of(key).sign(_claim(pem), padding.PKCS1v15(), hashes.SHA256())
    pki.write(key.with_name("next.key"), pki.private_pem(new, "TraditionalOpenSSL"), secret=True)
    path = engine / f"{pki.name_of(subject)}.request"
    _write_json(path, {"request": pem.decode(), "proof": base64.b64encode(proof).decode()})
    return path


def _claim(request: bytes) -> bytes:
    return b"fedatlas: my next key is that of " + request


def sign(request: Path, authority: Path, out: Path, days: int) -> Path:
    """At the coordinator: answers a request of `renew` with a certificate, valid for `days`, and returns the file
    to send back. out: the deployment; nothing in it changes.

    The request must be signed with the key that was certified last for that party. Where that is lost, compare
    the fingerprint of the new key with the party by another way, rename `<party>.crt` in the authority's folder
    `issued` to `<party>.lost`, and sign again.
    Raises FederationError for a request that is damaged, of an unknown party, or without that proof.
    """
    require()
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    try:
        plain = json.loads(request.read_bytes())
        pem, proof = str(plain["request"]).encode(), base64.b64decode(plain["proof"], validate=True)
        asked = x509.load_pem_x509_csr(pem)
        name, whole = pki.name_of(asked.subject), asked.is_signature_valid
    except OSError as error:
        raise FederationError(f"{request} cannot be read ({type(error).__name__})") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FederationError(f"{request} is no request of `renew` ({type(error).__name__})") from None
    if not whole:
        raise FederationError(f"{request} is damaged: its signature does not fit; make it again with `renew`")
    issued = authority / "issued"
    known = {path.stem: path for path in [*issued.glob("*.lost"), *issued.glob("*.crt")]}
    if name not in known:
        raise FederationError(f"{request} is of {name!r}; this deployment has: {', '.join(sorted(known))}")
    last = pki.certificate_of(known[name])
    if known[name].suffix == ".crt":
        try:
            last.public_key().verify(proof, _claim(pem), padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            raise FederationError(
                f"{request} is not signed with the key that was certified last for {name}. If {name} has lost that "
                f"key, compare the new one by another way, rename {known[name]} to {name}.lost, and sign again"
            ) from None
    answer = issued / f"{name}.crt"
    answer.write_bytes(_issue(last, asked.public_key(), authority, days))
    (issued / f"{name}.lost").unlink(missing_ok=True)
    return answer


def install(kit: Path, answer: Path) -> None:
    """Takes the certificate that `sign` made into use, with the key that `renew` made; the party's process uses
    them from its next start. Raises FederationError where the two do not belong together.
    """
    require()
    engine = kit / "engine"
    certificate, key = _pair(engine)
    following = key.with_name("next.key")
    if not following.exists():
        raise FederationError(
            f"{kit} waits for no answer: `renew` was not called there, or was installed already"
        )
    new, root = pki.certificate_of(answer), pki.certificate_of(engine / "startup" / "rootCA.pem")
    try:
        new.verify_directly_issued_by(root)
        fits = (
            new.public_key() == pki.key_of(following).public_key()
            and new.subject == pki.certificate_of(certificate).subject
        )
    except Exception:
        fits = False
    if not fits:
        raise FederationError(
            f"{answer} does not belong to the key that `renew` made in {kit}: call `renew` and `sign` again"
        )
    data = answer.read_bytes()
    part = certificate.with_name(f".{certificate.name}")
    part.write_bytes(data)
    os.replace(following, key)
    os.replace(part, certificate)
    (engine / f"{pki.name_of(new.subject)}.request").unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------- processes


def server_process(kit: Path) -> Launch:
    """FLARE's server. It keeps its jobs in the kit, whatever folder that now is."""
    require()
    engine = (kit / "engine").resolve()
    with _edited(engine / "local" / "resources.json") as resources:
        for component in resources["components"]:
            if component["id"] == "job_store":
                component["args"] = {"root_dir": str(engine / "jobs"), "uri_root": "/"}
        resources["snapshot_persistor"] = {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {
                "uri_root": "/",
                "storage": {
                    "path": "nvflare.app_common.storages.filesystem_storage.FilesystemStorage",
                    "args": {"root_dir": str(engine / "snapshots"), "uri_root": "/"},
                },
            },
        }
    return _launch(engine, "server", [])


def site_process(kit: Path) -> Launch:
    """FLARE's client at a site. It tries for ever to reach the server, and comes back to it by itself."""
    require()
    engine = (kit / "engine").resolve()
    return _launch(engine, "client", [f"uid={_name(engine)}", f"heart_beat_interval={SILENCE / 6}"])


def _launch(engine: Path, kind: str, settings: list[str]) -> Launch:
    """Raises FederationError where FLARE could start no job: it writes the command of one as a text, and splits that."""
    for what, path in (("the kit is", engine.parent), ("Python is", Path(sys.executable))):
        try:
            whole = shlex.split(str(path), True) == [str(path)]
        except ValueError:
            whole = False
        if not whole:
            raise FederationError(
                f"engine nvflare: {what} at {path}; the path may hold no space, quote, backslash or #, at which FLARE "
                "splits the command of a job. Take a folder without them"
            )
    module = f"nvflare.private.fed.app.{kind}.{kind}_train"
    command = (sys.executable, "-u", "-m", module, "-m", str(engine), "-s", f"fed_{kind}.json")
    settings = ["secure_train=true", "org=fedatlas", "config_folder=config", *settings]
    env = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "4",
        "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "10",
        "NVFLARE_STREAMING_RETRY_TIMEOUT": "20",  # FLARE holds a thread as long for every message received
    }
    return Launch((*command, "--set", *settings), env, engine)


# ---------------------------------------------------------------------------------------------------- the job


def submit(kit: Path, authority: Path, relay: Path, sites: Sequence[str]) -> Job:
    """Starts the relay job for these sites on the running server, and returns when the server took it.

    Waits a little for all of them to be connected; then the job starts with those that are, and needs one. kit: the server's; relay: the file that names the
    federation's socket, as FLARE's server finds it in its environment. The certificate that submits jobs is made anew
    where it is near its end: the key that signs it lies beside it.
    Raises FederationError when the server cannot be reached, or does not take the job.
    """
    require()
    admin = authority / "admin"
    if pki.certificate_of(_pair(admin)[0]).not_valid_after_utc < pki.in_days(1):
        _recertify(admin, authority, ADMIN_DAYS)
    with tempfile.TemporaryDirectory(prefix="fedatlas-") as scratch:
        folder = _job_folder(Path(scratch) / "fedatlas", sites)
        return _FlareJob(admin, folder, sites)


def _job_folder(folder: Path, sites: Sequence[str]) -> Path:
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    meta = {
        "name": "fedatlas",
        "min_clients": 1,
        "resource_spec": {},
        "deploy_map": {"app": ["server", *sites]},
    }
    _write_json(folder / "meta.json", meta)
    common = {"format_version": 2, "components": [], "task_data_filters": [], "task_result_filters": []}
    server = common | {
        "server": {"heart_beat_timeout": SILENCE, "task_request_interval": POLL},
        "workflows": [{"id": "relay", "path": CLASSES[0], "args": {}}],
        "dead_client_grace_period": SILENCE / 3,
        "dead_client_check_lead_time": 1.0,
    }
    client = common | {
        "executors": [{"tasks": ["ask"], "executor": {"path": CLASSES[1], "args": {}}}],
        "default_task_fetch_interval": POLL,
        "task_check_interval": 1.0,
        "job_heartbeat_interval": SILENCE / 6,
        "get_task_timeout": SILENCE,
        "submit_task_result_timeout": SILENCE,
    }
    _write_json(config / "config_fed_server.json", server)
    _write_json(config / "config_fed_client.json", client)
    return folder


class _FlareJob:
    """A relay job on FLARE: `deployment.Job`. FLARE's own client runs in a process beside ours (`_attend`)."""

    def __init__(self, admin: Path, folder: Path, sites: Sequence[str]) -> None:
        command = (sys.executable, "-m", __name__, str(admin.resolve()), str(folder), *sites)
        self.attendant = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
        self.how: str | None = None
        self.takes_in = False
        first = self._heard()
        if first != "accepted":
            self.attendant.kill()
            self.attendant.wait()
            raise FederationError(
                f"engine nvflare: the server did not take the job ({first}); is it running?"
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _heard(self) -> str:
        assert self.attendant.stdout is not None
        return self.attendant.stdout.readline().strip() or "the process that attends to the job has ended"

    def _listen(self) -> None:
        how = self._heard()
        self.takes_in = how.startswith(TAKES_IN)
        self.how = how.removeprefix(TAKES_IN)
        self.attendant.wait()

    def ended(self) -> str | None:
        return self.how

    def stop(self) -> None:
        assert self.attendant.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.attendant.stdin.close()
        try:
            self.attendant.wait(STOP)
        except subprocess.TimeoutExpired:
            self.attendant.kill()
            self.attendant.wait()


TAKES_IN = "takes in: "
"""Begins what is said of the end of a job that a site, which came back, made necessary."""


def _attend(admin: Path, folder: Path, sites: list[str]) -> None:
    """Submits a job, says "accepted" or why not, waits, says how it ended. When standard input ends, the job is
    aborted if it still runs. What is said is UTF-8, whatever the locale.

    A client that starts again is taken into no running job; so a job whose site is idle is aborted, too.
    """
    from nvflare.fuel.flare_api.api_spec import JobNotFound
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)
    os.chdir(admin)
    try:
        _knock(admin)
        session = new_secure_session(ADMIN, str(admin), timeout=20.0, auto_login_max_tries=3)
        _await(session, sites)
        job = session.submit_job(str(folder))
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=out)
        os._exit(1)
    print("accepted", file=out)
    over = threading.Event()
    threading.Thread(target=_until_closed, args=(over,), daemon=True).start()
    silent, idle, how, aborted, since = 0, Idle(sites), None, "", 0.0
    while how is None:
        if aborted:
            time.sleep(0.5)
        elif over.wait(1.0) or idle.why():
            aborted = idle.why() or "it was stopped"
            since = time.monotonic()
            with contextlib.suppress(Exception):
                session.abort_job(job)
        # a server that was started anew keeps the job it lost as running, and can neither run nor abort it
        if aborted and time.monotonic() - since > SETTLE:
            how = aborted
            break
        try:
            status = str(session.get_job_status(job))
            if status == "RUNNING" and not aborted:
                idle.count(session.get_client_job_status() or [])
        except JobNotFound:
            how = "NVFLARE's server does not know the job; it has been started anew"
        except Exception as error:
            silent += 1
            if silent > SILENCE / 5:
                how = f"NVFLARE's server does not answer ({type(error).__name__})"
        else:
            silent = 0
            if status.startswith("FINISHED"):
                how = aborted or f"NVFLARE: {status}"
    with contextlib.suppress(OSError):  # our parent may have gone
        print(how, file=out)
    os._exit(0)


def _until_closed(over: threading.Event) -> None:
    """Waits for the end of standard input, and sees to it that this process ends soon after."""
    sys.stdin.read()
    over.set()
    time.sleep(STOP)
    os._exit(1)


def _knock(admin: Path) -> None:
    """Waits a little for the server to listen; FLARE's own client takes far longer to find that it does not."""
    config = json.loads((admin / "startup" / "fed_admin.json").read_text(encoding="utf-8"))["admin"]
    end = time.monotonic() + KNOCK
    while True:
        try:
            return socket.create_connection((config["host"], config["port"]), timeout=KNOCK).close()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def _await(session: Any, sites: list[str]) -> None:
    """Gives the sites some time to be connected."""
    end = time.monotonic() + JOIN
    while time.monotonic() < end:
        if set(sites) <= {client.name for client in session.get_connected_client_list()}:
            return
        time.sleep(0.5)


class Idle:
    """How many polls in a row found a site connected and without the job that runs."""

    def __init__(self, sites: Sequence[str]) -> None:
        self.polls = 0
        self.row = dict.fromkeys(sites, 0)

    def count(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes one poll: FLARE's states of the clients' jobs."""
        without = {str(state.get("client_name")): state.get("status") == "no_jobs" for state in states}
        self.polls += 1
        for site in self.row:
            self.row[site] = self.row[site] + 1 if without.get(site) else 0

    def why(self) -> str:
        """Why the job is to be given up; "" if it is not."""
        idle = [site for site, polls in self.row.items() if polls >= IDLE]
        if not idle:
            return ""
        # a site that was away, or in the job, has come back; one that was there all the time did not take the job
        back = any(self.row[site] < self.polls for site in idle)
        return (
            f"{TAKES_IN if back else ''}{', '.join(idle)} is there, but not in the job; a new job takes it in"
        )


if __name__ == "__main__":
    _attend(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
