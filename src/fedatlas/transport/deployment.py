"""Distributed engines: which there are, and what the module of each offers (`Engine`).

A new one is a folder of `fedatlas.transport` with a module `engine`, and a line in ENGINES."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedatlas.core.errors import FederationError

ENGINES = {"nvflare": "fedatlas.transport.nvflare.engine", "flower": "fedatlas.transport.flower.engine"}
"""Name of an engine -> the module that is its `Engine`."""
RELAY = "FEDATLAS_RELAY"
"""The environment variable in which an engine's process finds the file that names our socket."""


@dataclass(frozen=True)
class Plan:
    """Who takes part in a deployment. host: the name or address under which the sites reach the server, and for
    which its certificate is made; days: how long certificates are valid."""

    name: str
    host: str
    port: int
    admin_port: int
    sites: tuple[str, ...]
    days: int = 365


@dataclass(frozen=True)
class Launch:
    """A process to start: its command, what is added to the environment, and where it is to run."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    pause: float = 2.0
    """Seconds before it is started again after it ended by itself."""


class Job(Protocol):
    """A relay job on a running engine.

    takes_in: set when it was ended on purpose, because a site came back that only a new job can take in.
    """

    takes_in: bool

    def ended(self) -> str | None:
        """None while it is starting or running; else how it ended, for a person."""
        ...

    def stop(self) -> None:
        """Ends it, and waits until the engine can take another."""
        ...


class Engine(Protocol):
    """What the module of an engine offers. A kit is the folder of a party: the server or a site.

    PROXIED: whether a site's process reaches the server through the proxy that its environment names.
    """

    PROXIED: bool

    def require(self) -> None:
        """Raises FederationError where a package that the engine needs is not installed."""
        ...

    def provision(self, plan: Plan, out: Path) -> None:
        """Makes a kit for every party in `out`, with its keys, and the authority that signs certificates."""
        ...

    def server_process(self, kit: Path) -> Launch:
        """The engine's process at the coordinator."""
        ...

    def site_process(self, kit: Path) -> Launch:
        """The engine's process at a hospital. It finds our socket by the variable RELAY of its environment."""
        ...

    def submit(self, kit: Path, authority: Path, relay: Path, sites: Sequence[str]) -> Job:
        """Starts the job that carries questions to these sites, and answers back, over the socket that `relay` names."""
        ...

    def renew(self, kit: Path) -> Path:
        """Makes a new private key in a kit; returns the file to be signed, which holds no secret."""
        ...

    def sign(self, request: Path, authority: Path, out: Path, days: int) -> Path:
        """Answers what `renew` made; returns the file for the party."""
        ...

    def install(self, kit: Path, answer: Path) -> None:
        """Takes what `sign` made into use."""
        ...


def listens_at(host: str) -> str:
    """The address of this machine at which a server listens that the sites reach as `host`: the loopback address where
    that is one, else every address."""
    if host.rstrip(".").lower() == "localhost":
        return "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    return host if loopback else "::" if ":" in host else "0.0.0.0"


def bound(address: str, port: int) -> socket.socket:
    """A socket at this port of this machine. Raises FederationError where the port cannot be had."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((address, port))
    except OSError as error:
        made.close()
        raise FederationError(
            f"port {port} of this machine cannot be had ({error.strerror}): end what listens there, or make kits with "
            "another port (`fedatlas deploy init` with --port and --admin-port)"
        ) from None
    made.set_inheritable(False)
    return made
