"""What every distributed engine offers, as plain values: a plan of who takes part, processes to start, a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

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
    """A relay job on a running engine."""

    def ended(self) -> str | None:
        """None while it is starting or running; else how it ended, for a person."""
        ...

    def stop(self) -> None:
        """Ends it, and waits until the engine can take another."""
        ...
