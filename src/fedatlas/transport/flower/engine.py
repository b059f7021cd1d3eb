"""Flower as the engine: keys and certificates, processes to start, and the relay job.

What Flower does here: TLS to the server, every request of a site signed with its key, and messages of opaque
bytes between the server's job and the sites. This module starts the processes: the `server`, its `job`, and a site's `node`.

Two ports. The sites reach `port`, where nothing but Flower's Fleet API is served. `admin_port` is bound to this
machine's loopback address alone and serves the rest (jobs, and Flower's own processes), to holders of a secret
in the server's kit: Flower by itself offers job submission to everyone who can reach its one port.

    out/server/engine/   server.json ca.crt server.crt server.key sites/<site>.pub; when running: job.log home/ jobs/
    out/<site>/engine/   site.json ca.crt site.key site.pub
    out/authority/       ca.crt ca.key

A site is the holder of the private key whose public half lies in `sites/<site>.pub` of the server's kit, and of
no other: a file put there or removed there is taken into account by the running server within seconds. A file
`sites/<site>.lost` lets `sign` register the next key of a site without a proof by its present one, once; `server.lost`
in the place of `server.crt` does the same for the server. What Flower signs of a request is the time (good for five minutes), so that the rest rests on TLS.
"""

import base64
import contextlib
import importlib.util
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedatlas.core.errors import FederationError
from fedatlas.transport import pki
from fedatlas.transport.deployment import Job, Launch, Plan

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise FederationError(
            f'engine flower needs the package {package}, which is not installed: pip install "fedatlas[flower]"'
        )


PROXIED = True

SKEW = 15.0
"""Seconds that a message outlives its deadline, because clocks differ."""

KIT = "FEDATLAS_KIT"
"""The environment variable in which the server's job finds its kit."""


def log_to(handler: logging.Handler) -> None:
    """What a process of Flower says of its own work goes to `handler`, and nowhere else."""
    log = logging.getLogger("fedatlas")
    handler.setFormatter(logging.Formatter("%(asctime)s fedatlas: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def require() -> None:
    """Raises FederationError where Flower is not installed."""
    _needs("flwr")


# ------------------------------------------------------------------------------------------- keys and certificates


def read_json(path: Path) -> dict[str, Any]:
    """Raises FederationError for a file that is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FederationError(
            f"{path} cannot be read ({type(error).__name__}); it is made by `fedatlas deploy init` for engine flower"
        ) from None


def certificate_for(key: Any, host: str, authority: Path, days: float) -> Any:
    """A server's certificate for a key (or for the key of a request), signed by the authority in a folder.

    days: valid from `pki.EARLIER` ago (clocks differ) until that many days from now; negative: already expired.
    """
    ca, ca_key = pki.certificate_of(authority / "ca.crt"), pki.key_of(authority / "ca.key")
    public = key.public_key()
    extensions = [*pki.uses(authority=False), *pki.identifies(public, ca_key)]
    extensions += pki.serves([host, "localhost", "127.0.0.1"])
    end = pki.in_days(days)
    return pki.issue(pki.named(host), public, ca.subject, ca_key, end, extensions, "SHA384")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def provision(plan: Plan, out: Path) -> None:
    """Writes the kits of the server, of every site and of the coordinator (`authority`) under `out`.

    All keys are made here and now; none is sent anywhere. A site that wants a key that the coordinator has never
    seen calls `renew` on its kit. Raises FederationError where `out` already holds a certificate authority, or
    the package `cryptography` is missing.
    """
    _needs("cryptography")
    authority, server = out / "authority", out / "server" / "engine"
    if (authority / "ca.key").exists():
        raise FederationError(f"{authority} holds the keys of a deployment already: choose another folder")
    authority.mkdir(parents=True, exist_ok=True)
    authority.chmod(0o700)
    (server / "sites").mkdir(parents=True, exist_ok=True)

    ca_key, name = pki.ec_key(), pki.named(f"{plan.name} authority")
    public = ca_key.public_key()
    extensions = [*pki.uses(authority=True), *pki.identifies(public, ca_key)]
    end = pki.in_days(max(plan.days, 3650))
    ca = pki.pem(pki.issue(name, public, name, ca_key, end, extensions, "SHA384"))
    pki.write(authority / "ca.key", pki.private_pem(ca_key), secret=True)
    pki.write(authority / "ca.crt", ca)

    key = pki.ec_key()
    pki.write(server / "server.key", pki.private_pem(key), secret=True)
    pki.write(server / "server.crt", pki.pem(certificate_for(key, plan.host, authority, plan.days)))
    pki.write(server / "ca.crt", ca)
    pki.write(
        server / "server.json",
        json.dumps(
            {
                "host": plan.host,
                "port": plan.port,
                "admin_port": plan.admin_port,
                "sites": sorted(plan.sites),
            }
        ).encode(),
    )
    for site in plan.sites:
        folder, key = out / site / "engine", pki.ec_key()
        folder.mkdir(parents=True, exist_ok=True)
        pki.write(folder / "site.key", pki.private_pem(key, "OpenSSH"), secret=True)
        pki.write(folder / "site.pub", pki.public_openssh(key))
        pki.write(folder / "ca.crt", ca)
        pki.write(
            folder / "site.json",
            json.dumps({"site": site, "server": _address(plan.host, plan.port)}).encode(),
        )
        pki.write(server / "sites" / f"{site}.pub", pki.public_openssh(key))


# -------------------------------------------------------------------------------------------------------- processes


def _direct() -> dict[str, str]:
    """What keeps a proxy, where the environment names one, out of connections within this machine."""
    now = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = ",".join(filter(None, [now, "127.0.0.1", "localhost"]))
    return {"no_proxy": value, "NO_PROXY": value}


def _launch(kit: Path, role: str, pause: float) -> Launch:
    require()
    engine = kit.resolve() / "engine"
    tools = str(Path(sys.executable).parent)  # where Flower's own commands are, which it starts by name
    env = (
        _QUIET
        | _direct()
        | {
            "FLWR_HOME": str(engine / "home"),
            "PATH": os.pathsep.join([tools, *filter(None, [os.environ.get("PATH")])]),
        }
    )
    command = (sys.executable, "-m", "fedatlas.transport.flower", role, str(kit.resolve()))
    return Launch(command, env, engine, pause)


def server_process(kit: Path) -> Launch:
    """Flower's SuperLink, in the foreground, for `kit` = out/server."""
    read_json(kit / "engine" / "server.json")
    return _launch(kit, "serve", pause=2.0)


def site_process(kit: Path) -> Launch:
    """A site's node, in the foreground, for `kit` = out/<site>; finds the site's own process by FEDATLAS_RELAY.

    After a crash, the server refuses the site's key for up to half a minute, while it still holds the crashed
    process for alive: the new process keeps asking.
    """
    read_json(kit / "engine" / "site.json")
    return _launch(kit, "attend", pause=5.0)


# -------------------------------------------------------------------------------------------------------------- jobs


class _Control:
    """Flower's Control API on the admin port of this machine's server."""

    def __init__(self, kit: Path) -> None:
        from fedatlas.transport.flower import compat

        engine = kit / "engine"
        kept = dict(os.environ)
        os.environ.update(_direct())  # read when the client is made, and there is no other way to tell it
        try:
            self.client = compat.ControlHttpClient.from_server_address(
                f"127.0.0.1:{read_json(engine / 'server.json')['admin_port']}",
                False,
                (engine / "ca.crt").read_bytes(),
                [compat.RuntimeVersionHttpInterceptor(component_name="fedatlas"), self],
            )
        finally:
            for name in _direct():
                os.environ.pop(name)
                if name in kept:
                    os.environ[name] = kept[name]
        self.secret = engine / "admin.secret"

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        with contextlib.suppress(OSError):  # the server has not written it yet: it will refuse
            context.request.headers[SECRET_HEADER] = self.secret.read_text(encoding="utf-8")
        return call_next(context)


SECRET_HEADER = "fedatlas-admin"
"""The header in which a request to the admin port carries the secret in kit/engine/admin.secret."""


class FlowerJob:
    """A run of the relay's ServerApp on a SuperLink. A site that comes back is taken into it, so it never ends for that."""

    takes_in = False

    def __init__(self, control: _Control, run: int) -> None:
        self.control, self.run = control, run
        self.asked = 0.0
        self.end: str | None = None
        self.silent = 0

    def ended(self) -> str | None:
        """None while it is starting or running; else how it ended. Asks the server at most every 2 s."""
        import httpx

        from fedatlas.transport.flower import compat

        if self.end is None and time.monotonic() - self.asked > 2.0:
            self.asked = time.monotonic()
            try:
                response = self.control.client.ListRuns(compat.control.ListRunsRequest(run_id=self.run))
                status = response.run_dict[self.run].status
                self.silent = 0
                if status.status == "finished":
                    self.end = f"the job is {status.sub_status}" + (
                        f": {status.details}" if status.details else ""
                    )
            except httpx.HTTPStatusError as error:
                self.end = f"the Flower server no longer knows the job (HTTP {error.response.status_code})"
            except httpx.HTTPError as error:
                self.silent += 1
                if self.silent > 3:
                    self.end = f"the Flower server does not answer ({type(error).__name__})"
        return self.end

    def stop(self) -> None:
        """Ends it, and waits until it has ended: at most 30 s."""
        import httpx

        from fedatlas.transport.flower import compat

        with contextlib.suppress(httpx.HTTPError):  # it has ended already, or its server has
            self.control.client.StopRun(compat.control.StopRunRequest(run_id=self.run))
        end = time.monotonic() + 30.0
        while self.ended() is None and time.monotonic() < end:
            time.sleep(0.2)
            self.asked = 0.0  # it ends within a second: nobody waits for the next look


_APP = b"from fedatlas.transport.flower import job\n\nserver = job.server\nclient = job.client\n"
"""The app that Flower starts: it holds names alone, and the installed package the code."""


def submit(kit: Path, authority: Path, relay: Path, sites: Sequence[str]) -> Job:
    """Starts the relay job for `sites` on the server of `kit` = out/server; returns when it was accepted.

    relay: the file that names the federation's socket. Waits up to 60 s for the server to answer. Raises
    FederationError where it does not, or refuses.
    """
    require()
    from fedatlas.transport.flower import compat

    engine = kit / "engine"
    name = secrets.token_hex(8)
    jobs = engine / "jobs"
    jobs.mkdir(exist_ok=True)
    about = jobs / f"{name}.json"
    pki.write(about, json.dumps({"relay": str(relay.resolve()), "sites": list(sites)}).encode())
    try:
        control = _Control(kit)
        request = compat.start_request("fedatlas-relay", "fedatlas", "relay", _APP, {"job": name})
        return FlowerJob(control, _started(control, request, kit))
    except BaseException:
        about.unlink(missing_ok=True)  # no job will read it
        raise


def _started(control: _Control, request: Any, kit: Path) -> int:
    """The number of the job that the server has started; it gets 60 s to answer."""
    import httpx

    end = time.monotonic() + 60.0
    while True:
        try:
            response = control.client.StartRun(request)
            break
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            refused = isinstance(error, httpx.HTTPStatusError)
            if time.monotonic() > end:
                raise FederationError(
                    f"the Flower server of {kit} {'refused the job' if refused else 'does not answer'} for 60 s "
                    f"({error}): start it with start.sh in that folder, and see its log"
                ) from None
        time.sleep(0.5)
    if not response.HasField("run_id"):
        raise FederationError(f"the Flower server of {kit} accepted no job: see its log")
    return response.run_id


# -------------------------------------------------------------------------------------------------- changing the keys


def renew(kit: Path) -> Path:
    """Makes a new private key in `kit` and returns the file to send to the coordinator; it holds no secret.

    For a site, a public key signed with the present key. For the server's kit, a request for a certificate, signed with
    the present key too. Nothing changes until `install`. Raises FederationError where `kit` is neither.
    """
    _needs("cryptography")
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    engine, key = kit / "engine", pki.ec_key()
    if (engine / "server.json").exists():
        name = pki.named(read_json(engine / "server.json")["host"])
        pem = pki.request(name, key, "SHA384")
        proof = pki.key_of(engine / "server.key").sign(_server_claim(pem), ec.ECDSA(hashes.SHA384()))
        pki.write(engine / "next.key", pki.private_pem(key), secret=True)
        plain = {"request": pem.decode(), "proof": base64.b64encode(proof).decode()}
        pki.write(engine / "server.request", json.dumps(plain, indent=1).encode())
        return engine / "server.request"
    site = read_json(engine / "site.json")["site"]
    public = pki.public_openssh(key)
    proof = pki.private_openssh_of(engine / "site.key").sign(_claim(site, public), ec.ECDSA(hashes.SHA384()))
    pki.write(engine / "next.key", pki.private_pem(key, "OpenSSH"), secret=True)
    path = engine / f"{site}.request"
    plain = {"site": site, "public_key": public.decode(), "proof": base64.b64encode(proof).decode()}
    pki.write(path, json.dumps(plain, indent=1).encode())
    return path


def _claim(site: str, public: bytes) -> bytes:
    return b"fedatlas: the next key of site " + site.encode() + b" is " + public


def _server_claim(request: bytes) -> bytes:
    return b"fedatlas: the next key of the server is that of " + request


def sign(request: Path, authority: Path, out: Path, days: int) -> Path:
    """At the coordinator: answers a request of `renew`, and returns the file to send back.

    For a site, its new public key replaces the present one in out/server/engine/sites, where a running server
    finds it; the site is then refused until it has installed the key. The request must be signed with the present
    key. Where that is lost or no longer to be trusted, compare the new key with the site by another way, rename
    `<site>.pub` there to `<site>.lost`, and sign again; for a site whose file was removed, make an empty
    `<site>.lost`. It is gone when the key is signed. For the server, a certificate valid for `days`, under the same
    condition: the present key is that of out/server/engine/server.crt, which may be renamed to `server.lost`.

    Raises FederationError for a request that is damaged, of a site that the deployment does not have or whose key was
    taken out, or not signed with its party's present key.
    """
    _needs("cryptography")
    try:
        data = request.read_bytes()
    except OSError as error:
        raise FederationError(f"{request} cannot be read ({type(error).__name__})") from None
    try:
        plain = json.loads(data)
    except ValueError as error:
        raise FederationError(f"{request} is no request of `renew` ({type(error).__name__})") from None
    if isinstance(plain, dict) and "request" in plain:
        return _sign_server(request, plain, authority, out / "server" / "engine", days)
    return _register(request, plain, out / "server" / "engine")


def _sign_server(request: Path, plain: dict[str, Any], authority: Path, engine: Path, days: int) -> Path:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        pem, proof = str(plain["request"]).encode(), base64.b64decode(plain["proof"], validate=True)
        asked = x509.load_pem_x509_csr(pem)
    except (ValueError, KeyError, TypeError) as error:
        raise FederationError(f"{request} is no request of `renew` ({type(error).__name__})") from None
    if not asked.is_signature_valid:
        raise FederationError(f"{request} is damaged: its signature does not fit; make it again with `renew`")
    present, lost = engine / "server.crt", engine / "server.lost"
    if present.exists() or not lost.exists():
        key = pki.certificate_of(present).public_key()
        try:
            key.verify(proof, _server_claim(pem), ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            raise FederationError(
                f"{request} asks for a certificate of the server, and is not signed with the server's present key "
                f"({present}): nobody else may have one. If the server has lost that key, make sure that it is the "
                f"server that asks, rename {present} to {lost.name}, and sign again"
            ) from None
    answer = engine / "next.crt"
    pki.write(
        answer, pki.pem(certificate_for(asked, read_json(engine / "server.json")["host"], authority, days))
    )
    lost.unlink(missing_ok=True)
    return answer


def _register(request: Path, plain: Any, engine: Path) -> Path:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        site, public = str(plain["site"]), str(plain["public_key"]).encode()
        proof = base64.b64decode(plain["proof"], validate=True)
        key = load_ssh_public_key(public)
    except (ValueError, KeyError, TypeError) as error:
        raise FederationError(f"{request} is no request of `renew` ({type(error).__name__})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FederationError(f"{request}: only ECDSA keys are allowed; make one with `renew`")
    if not site or site.startswith(".") or "/" in site or "\\" in site:
        raise FederationError(f"{request}: {site!r} is no name of a site")
    sites = engine / "sites"
    path, lost = sites / f"{site}.pub", sites / f"{site}.lost"
    # the server's kit of an older version does not list its sites
    known = set(read_json(engine / "server.json").get("sites", []))
    known |= {file.stem for pattern in ("*.pub", "*.lost") for file in sites.glob(pattern)}
    if site not in known:
        raise FederationError(f"{request} is of {site!r}; this deployment has: {', '.join(sorted(known))}")
    if path.exists():
        try:
            pki.public_openssh_of(path).verify(proof, _claim(site, public), ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            raise FederationError(
                f"{request} is not signed with the present key of site {site} ({path}). If the site has lost that "
                f"key, compare its new key with the site by telephone, rename {path} to {lost.name}, and sign again"
            ) from None
    elif not lost.exists():
        raise FederationError(
            f"{request}: the key of site {site} was taken out ({path} is not there), so that nothing shows who asks. "
            f"If the site is to come back, compare its new key with it by telephone, make an empty file {lost}, and "
            "sign again"
        )
    pki.write(path, public)
    lost.unlink(missing_ok=True)
    return path


def install(kit: Path, answer: Path) -> None:
    """Takes the answer of `sign` into use; the process of `kit` uses it from its next start.

    Raises FederationError where the answer does not belong to the key that `renew` made here.
    """
    _needs("cryptography")
    engine = kit / "engine"
    following = engine / "next.key"
    if not following.exists():
        raise FederationError(
            f"{kit} waits for no answer: `renew` was not called there, or was installed already"
        )
    wrong = f"{answer} does not belong to the key that `renew` made in {kit}: call `renew` and `sign` again"
    if (engine / "server.json").exists():
        try:
            certificate, key = pki.certificate_of(answer), pki.key_of(following)
        except FederationError:
            raise FederationError(wrong) from None
        if certificate.public_key() != key.public_key():
            raise FederationError(wrong)
        pki.write(engine / "server.crt", pki.pem(certificate))
        os.replace(following, engine / "server.key")
        (engine / "server.request").unlink(missing_ok=True)
        return
    key = pki.private_openssh_of(following)
    if pki.public_openssh_of(answer) != key.public_key():
        raise FederationError(wrong)
    os.replace(following, engine / "site.key")
    pki.write(engine / "site.pub", pki.public_openssh(key))
    for request in engine.glob("*.request"):
        request.unlink()
