"""The server itself: Flower's SuperLink behind a gate, with the keys of the sites.

Imported by the process of the server alone: it needs the package flwr. Imports no torch.
"""

import logging
import os
import secrets
import ssl
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedatlas.core.errors import FedAtlasError
from fedatlas.transport import pki
from fedatlas.transport.deployment import bound, listens_at
from fedatlas.transport.flower import compat
from fedatlas.transport.flower.engine import KIT, SECRET_HEADER, read_json

log = logging.getLogger("fedatlas")


class Gate:
    """Stands before Flower's web application: the Fleet API alone for everyone, the rest for the admin port.

    admin: the admin port. secret: what a request to the Control API must carry. Requests to Flower's Runtime API
    are authenticated by Flower (a shared secret, then a token for each task).
    """

    def __init__(self, app: Any, admin: int, secret: str) -> None:
        self.app, self.admin, self.secret = app, admin, secret.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # Flower has no web sockets
            return
        who = f"{scope['client'][0] if scope['client'] else '?'}: {scope['method']} {scope['path'][:100]!r}"

        async def tell(event: Any) -> None:
            if event["type"] == "http.response.start" and event["status"] in (401, 403, 404, 412):
                log.warning("refused (HTTP %d) %s", event["status"], who)
            await send(event)

        if self._allows(scope):
            await self.app(scope, receive, tell)
            return
        await tell({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
        await tell({"type": "http.response.body", "body": b""})

    def _allows(self, scope: Mapping[str, Any]) -> bool:
        path = scope["path"]
        if scope["server"][1] != self.admin:
            return path.startswith("/v1/fleet/")
        if path.startswith("/v1/control/"):
            given = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
            return secrets.compare_digest(given, self.secret)
        return path.startswith("/v1/runtime/")


class Register:
    """Keeps the keys that Flower knows equal to the files in a folder of <site>.pub."""

    def __init__(self, state: Any, keys: Path) -> None:
        self.state, self.keys = state, keys
        self.known: dict[str, bytes] = {}
        self.complaints: set[str] = set()

    def follow(self) -> None:
        """Reads the folder once. A damaged file takes its site out, and is logged."""

        registered: dict[str, bytes] = {}
        for path in sorted(self.keys.glob("*.pub")):
            try:
                registered[path.stem] = compat.public_key_to_bytes(pki.public_openssh_of(path))
            except FedAtlasError as error:
                if str(error) not in self.complaints:
                    log.error("%s", error)
                    self.complaints.add(str(error))
        for site in [site for site, key in self.known.items() if registered.get(site) != key]:
            node = self.state.get_node_id_by_public_key(self.known.pop(site))
            if node is not None:
                self.state.delete_node(compat.NOOP_FLWR_AID, node)
            log.info("the key of site %s is no longer registered", site)
        for site, key in registered.items():
            if site not in self.known:
                self.known[site] = key
                try:
                    self.state.create_node(compat.NOOP_FLWR_AID, compat.NOOP_ACCOUNT_NAME, key, 0)
                    log.info("the key of site %s is registered", site)
                except ValueError:
                    log.error(
                        "the key of site %s was taken out before: start the server again, or renew it", site
                    )

    def watch(self) -> None:
        while True:
            time.sleep(2.0)
            try:
                self.follow()
            except OSError as error:
                log.error("the keys of the sites cannot be read: %s", error)


class _ToldTls(ssl.SSLObject):
    """One end of a TLS connection; what is no TLS, or TLS that fails, is logged."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.warning(
                "refused a connection: no TLS, or not with this server's certificate (%s)", error.reason
            )
            raise


class Kept:
    """A process that is started again when it ends by itself: without Flower's executor no job would ever start."""

    PAUSE = 1.0

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.over = threading.Event()
        self.process = subprocess.Popen(self.command)
        self.keeper = threading.Thread(target=self._keep, daemon=True)
        self.keeper.start()

    def _keep(self) -> None:
        while not self.over.wait(self.PAUSE):
            code = self.process.poll()
            if code is not None:
                log.warning("%s ended (%d); it is started again", self.command[0], code)
                self.process = subprocess.Popen(self.command)

    def end(self) -> None:
        self.over.set()
        self.keeper.join()
        self.process.terminate()
        self.process.wait()


def serve(kit: Path) -> int:
    """The server's process. Returns its exit status; raises FedAtlasError where a port is taken."""
    import uvicorn

    engine = kit / "engine"
    about = read_json(engine / "server.json")
    admin = int(about["admin_port"])
    secret = secrets.token_hex(32)
    pki.write(engine / "admin.secret", secret.encode(), secret=True)
    pki.write(engine / "executor.secret", secrets.token_hex(32).encode(), secret=True)
    os.environ[KIT] = str(kit)
    sockets = [bound("127.0.0.1", admin), bound(listens_at(about["host"]), int(about["port"]))]

    def run(app: Any, host: str, port: int, **settings: Any) -> None:
        register = Register(app.state.linkstate_factory.state(), engine / "sites")
        register.follow()
        threading.Thread(target=register.watch, daemon=True).start()
        settings |= {"access_log": False, "timeout_graceful_shutdown": 1}
        settings = {name: value for name, value in settings.items() if name not in ("reload", "workers")}
        command = ["flower-superexec", "--root-certificates", str(engine / "ca.crt")]
        command += ["--runtime-api-address", f"127.0.0.1:{admin}", "--parent-pid", str(os.getpid())]
        command += ["--superexec-auth-secret-file", str(engine / "executor.secret")]
        executor = Kept(command)
        config = uvicorn.Config(Gate(app, admin, secret), **settings)
        config.load()
        assert config.ssl is not None
        config.ssl.sslobject_class = _ToldTls
        try:
            uvicorn.Server(config).run(sockets=sockets)
        finally:
            executor.end()

    arguments = ["--host", "127.0.0.1", "--port", str(admin), "--enable-supernode-auth"]
    arguments += ["--ssl-certfile", str(engine / "server.crt"), "--ssl-keyfile", str(engine / "server.key")]
    arguments += ["--ssl-ca-certfile", str(engine / "ca.crt"), "--disable-runtime-dependency-installation"]
    arguments += ["--isolation", "process", "--superexec-auth-secret-file", str(engine / "executor.secret")]
    compat.superlink(arguments, run)
    return 0
