"""A hospital's own process: it agrees with the server on what is run, and then serves the run's calls.

It is started by the hospital, with a path that never leaves it, and is reached through the engine's client only.
It says hello (versions, the federation file it was given), lists its data (names of its labels), joins (the label
space; what it has, in numbers), and after that answers what `transport.host` allows. Every answer is checked, written
into the egress log, then sent.
"""

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedatlas.core.contract import at_site
from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.data.index import naming_of
from fedatlas.federation import design as build
from fedatlas.federation.design import POOLED, Experiment, egress_log
from fedatlas.federation.facts import names_of_channels, other_versions
from fedatlas.federation.file import (
    Federation,
    flat_difference,
    hash_of,
    load_federation,
    resolved,
    shareable,
)
from fedatlas.federation.tasks import task_of
from fedatlas.transport.frames import Question, shown
from fedatlas.transport.host import Host
from fedatlas.transport.pipeline import Policy
from fedatlas.transport.relay import skewed
from fedatlas.transport.store import DATA, errors_log, guard_data, write_atomic

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class FederationMismatch(FederationError):
    """Server and site do not run the same federation; nothing is served."""


@dataclass(frozen=True)
class Agreement:
    """What server and site agreed on, as it goes with every question. labels: names, groups, exclusive. versions: the
    server's, for a site that was away when the others said hello; empty from a server of before."""

    run: str
    hash: str
    labels: Mapping[str, Any]
    channels: int
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def space(self) -> LabelSpace:
        return LabelSpace.from_plain(self.labels)

    def to_plain(self) -> dict[str, Any]:
        return {**vars(self), "labels": dict(self.labels), "versions": dict(self.versions)}


def agreement_of(about: Mapping[str, Any]) -> Agreement:
    """Raises FederationMismatch for a question that comes without one."""
    try:
        versions = {str(name): str(version) for name, version in dict(about.get("versions", {})).items()}
        labels, channels = dict(about["labels"]), int(about["channels"])
        made = Agreement(str(about["run"]), str(about["hash"]), labels, channels, versions)
        if not _RUN.fullmatch(made.run):
            raise ValueError(made.run)
        _ = made.space
    except (KeyError, TypeError, ValueError, OverflowError, FedAtlasError):
        raise FederationMismatch(
            "a question without run, hash and labels: this site was not joined"
        ) from None
    return made


@dataclass
class _Nothing:
    """Stands for the data of a site that has not joined yet."""

    labels: SiteLabels = field(
        default_factory=lambda: SiteLabels(LabelSpace(("background", "anything")), frozenset())
    )
    n_train: int = 0
    n_labelled: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    n_positive: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))

    def batches(self, *_: Any, **__: Any) -> Any:
        raise FederationMismatch("this site was not joined")

    volumes = batches


def _load(file: Path, data: Mapping[str, str], device: str | None) -> Federation:
    """A federation file, with what a site adds to it: where its data are, and where it trains."""
    federation = load_federation(file)
    if device:
        federation = replace(federation, engine=replace(federation.engine, device=device))
    sites = tuple(
        replace(site, path=data[site.name]) if site.name in data else site for site in federation.sites
    )
    return replace(federation, sites=sites)


class SiteDesk:
    """Answers the questions to one site.

    federation: the file that this site agreed to; it is read again at every hello.
    data: the folder of its data, by name; the site "pooled" of a trial on one machine has several.
    state: its private folder (memory, egress log, errors, overlays); runs get a folder each in it, unless
    `one_run` says that the folder is that of the only run.
    texts, case_names: do texts of errors, and names of cases, leave the site?
    """

    sends: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "hello": {"facts": "facts"},
        "layout": {"facts": "facts"},
        "join": {"facts": "facts"},
    }

    def __init__(
        self,
        name: str,
        federation: Path,
        data: Mapping[str, str],
        state: Path,
        cache: Path,
        *,
        one_run: bool = False,
        texts: bool = False,
        case_names: bool = False,
        device: str | None = None,
    ) -> None:
        self.name, self.file, self.data, self.state, self.cache = name, federation, dict(data), state, cache
        self.one_run, self.texts, self.case_names, self.device = one_run, texts, case_names, device
        self.federation = self._load()
        self.hosts: dict[str, Host] = {}
        self.changed = False
        self.instance = self._instance()

    def _instance(self) -> str:
        """A name for this installation: it outlives a restart, of its container, too, which gets another network address then; and a copy
        of the folder, on another machine (by /etc/machine-id) or in another place, has another."""
        kept = self.state / "instance"
        if not kept.exists():
            write_atomic(kept, secrets.token_hex(16).encode())
        machine = (
            Path("/etc/machine-id").read_text(encoding="utf-8") if Path("/etc/machine-id").exists() else ""
        )
        where = f"{machine} {self.state.resolve()} {kept.read_text(encoding='utf-8')}"
        return hashlib.sha256(where.encode()).hexdigest()[:16]

    def _load(self) -> Federation:
        return _load(self.file, self.data, self.device)

    def answer(self, question: Question) -> None:
        """Writes the answer into the question's file; an error reply if it is refused."""
        try:
            host = self._host(question)
        except Exception as error:  # whatever a server sends, it gets an answer
            refused = error

            @at_site
            def refuse(site: Any, **payload: Any) -> dict[str, Any]:
                raise refused

            host = self._front(question, {question.function: refuse})
        host.answer(question)

    def _host(self, question: Question) -> Host:
        if question.site != self.name:
            raise FederationMismatch(f"site {self.name}: the question is for {question.site!r}")
        front = {"hello": self.hello, "layout": self.layout, "join": self.join}
        if question.function in front:
            return self._front(question, front)
        return self._joined(agreement_of(question.about))

    def _front(self, question: Question, functions: Mapping[str, Callable[..., Any]]) -> Host:
        run = shown(question.about.get("run", ""))
        return Host(
            self.name,
            _Nothing(),
            functions,
            lambda name: torch.nn.Identity(),
            self.state,
            Policy(
                self.sends,
                log=egress_log(self.federation, self.state / "egress.jsonl", run),
                texts=self.texts,
            ),
            seed=0,
            instance=self.instance,
            remembers=False,
        )

    def _folder(self, run: str) -> Path:
        return self.state if self.one_run else self.state / "runs" / run

    @at_site
    def hello(self, site: Any, versions: dict[str, str], hash: str, federation: str) -> dict[str, Any]:
        """What this site has installed and what it agreed to run. The server compares; the site, too, serves no run
        with another hash, and tells its people the difference."""
        self.federation = self._load()
        self.hosts.clear()
        own = hash_of(self.federation)
        facts: dict[str, Any] = {"versions": build.versions(), "hash": own, "clock": time.time()}
        facts["federation"] = json.dumps(shareable(resolved(self.federation)), sort_keys=True)
        if own != hash:
            mine, theirs = json.loads(facts["federation"]), json.loads(federation)
            with errors_log(self.state) as log:
                log.write(
                    "FederationMismatch: the server runs another federation file than this site agreed to\n"
                )
                log.write(flat_difference(mine, theirs, "here", "at the server") + "\n")
        return {"facts": facts}

    @at_site
    def layout(self, site: Any, hash: str) -> dict[str, Any]:
        """Names of the labels that this site brings, and of the channels of its images, with their number. That its data are
        listed may take long, as where every slice is a file. hash: of the federation file that the server runs."""
        self._require_agreed(hash)
        indexes = self._own_layout()
        brings = {index.name: self._brought(index) for index in indexes}
        first = indexes[0]
        channels = {"channels": first.channels, "channel_names": names_of_channels(first)}
        return {"facts": {"brings": brings, **channels}}

    def _brought(self, index: Any) -> list[str]:
        """Names of labels that a site brings: where the file names the classes, those alone, whatever else its tables hold. Raises
        FederationError, here and before anything is sent, for a label that the file does not know."""
        if self.federation.labels.names is None:
            return list(index.brings)
        space = build.space_of(self.federation, {})
        naming_of(index, space)
        return [name for name in index.brings if name in (*space.names, *space.findings)]

    def _own_layout(self) -> Any:
        mine = [site for site in self.federation.sites if site.name in self.data]
        if not mine:
            raise FederationMismatch(f"site {self.name}: the federation file does not name it")
        return [task_of(self.federation).read(self.federation, site, Path(site.path or "")) for site in mine]

    @at_site
    def join(
        self,
        site: Any,
        agreement: dict[str, Any],
        begins: bool = True,
        data_changed: bool = False,
        ahead: float = 0.0,
    ) -> dict[str, Any]:
        """Prepares the data, and answers with what the report shows of a site: counts, spacings, orientations, ranges.

        begins: the run has no complete round yet. data_changed: the coordinator lets it go on with data that are not
        those with which it began; the answer says whether they are, and not in what they differ. ahead: seconds by which
        the clock of this site is ahead of the server's. Raises DataChanged where the data changed and may not have."""
        if ahead:
            with contextlib.suppress(OSError), errors_log(self.state) as log:
                log.write(f"ClockSkew: {skewed('the clock of this site', ahead)}\n")
        agreed = agreement_of(agreement)
        host = self._joined(agreed, begins, data_changed)
        source: Any = host.source
        summary = source.summary()
        classes = {}
        for index in source.indexes:
            known = naming_of(index, agreed.space)[0].classes
            classes |= {own: agreed.space.names[c] for own, c in known.items()}
        facts = {"summary": summary, "classes": classes, "memory": host.memory.versions()}
        return {"facts": {**facts, "changed": self.changed}}

    def _joined(self, agreed: Agreement, begins: bool = False, data_changed: bool = False) -> Host:
        self._require_agreed(agreed.hash)
        key = json.dumps(agreed.to_plain(), sort_keys=True)
        if key not in self.hosts:
            self.hosts[key] = self._open(agreed, begins, data_changed)
        return self.hosts[key]

    def _require_agreed(self, hash: str) -> None:
        if hash != hash_of(self.federation):
            raise FederationMismatch(
                f"site {self.name}: the server runs the federation {shown(hash, 8)}, this site agreed to "
                f"{hash_of(self.federation)[:8]}; both need the same federation file"
            )

    def _open(self, agreed: Agreement, begins: bool, data_changed: bool) -> Host:
        if agreed.versions and (others := other_versions(agreed.versions, build.versions())):
            raise FederationMismatch(f"site {self.name}: {shown('; '.join(others), 1000)}")
        if self.federation.labels.names and agreed.space != build.space_of(self.federation, {}):
            raise FederationMismatch(
                f"site {self.name}: the server's classes are not those of the federation file that this site agreed to"
            )
        experiment = Experiment(self.federation, self.cache, sites=list(self.data), space=agreed.space)
        if experiment.channels != agreed.channels:
            raise FederationMismatch(
                f"site {self.name}: its images have {experiment.channels} channels, those of the federation "
                f"{agreed.channels}"
            )
        experiment.check_net(initial=False)
        experiment.prepare()
        data = experiment.fingerprint()
        file = self._folder(agreed.run) / DATA
        self.changed = guard_data(file, data, self.name, begins=begins, accept=data_changed)
        return experiment.host(
            self.name,
            self._folder(agreed.run),
            egress_log(self.federation, self.state / "egress.jsonl", agreed.run),
            texts=self.texts,
            instance=self.instance,
            case_name=None if self.case_names or self.name == POOLED else Pseudonyms(self.state),
        )


class Pseudonyms:
    """Names of cases that only the site's own user can read: a keyed digest, and the table of what each stands for.

    folder: holds the key and `cases.json`, the table.
    """

    def __init__(self, folder: Path) -> None:
        self.table_file, key = folder / "cases.json", folder / "case-key"
        if not key.exists():
            write_atomic(key, secrets.token_bytes(32), secret=True)
        self.key = key.read_bytes()
        self.table: dict[str, str] = (
            json.loads(self.table_file.read_text(encoding="utf-8")) if self.table_file.exists() else {}
        )

    def __call__(self, case: str) -> str:
        data = case.encode(errors="surrogatepass")  # a file may be named in another encoding
        name = "case-" + hmac.new(self.key, data, hashlib.sha256).hexdigest()[:12]
        if name not in self.table:
            self.table[name] = case
            table = json.dumps(self.table, indent=1, sort_keys=True).encode()
            write_atomic(self.table_file, table, secret=True)
        return name


def open_site(
    name: str, federation: str, data: dict[str, str], state: str, cache: str, **options: Any
) -> Any:
    """`answer(question)` of a site, for its worker process. See `SiteDesk`."""
    return SiteDesk(name, Path(federation), data, Path(state), Path(cache), **options).answer


def require_usable(name: str, federation: str, data: Mapping[str, str], device: str | None) -> None:
    """Raises FederationError where a site cannot serve what it agreed to: its file cannot be read or does not name it, or
    its device is not there. Arguments as of `SiteDesk`."""
    made = _load(Path(federation), data, device)
    names = [site.name for site in made.sites]
    if not set(names) & set(data):
        raise FederationError(
            f"{federation}: does not name {name}; its sites are {', '.join(names)}. `fedatlas deploy accept` takes "
            "another one"
        )
    try:
        build.usable_device(made)
    except FederationError as error:
        raise FederationError(f"site {name}: {error}. Where a site trains is chosen with --device") from None


def main() -> int:
    """Checks what `require_usable` does, for the party's process; its arguments are given as JSON."""
    try:
        require_usable(**json.loads(sys.argv[1]))
    except FedAtlasError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
