"""A run across machines: the way of `fedatlas run` to the sites, the hello before the first round, and a trial of it here.

gather        the parties of a deployment, whose kits `fedatlas deploy` made
gather_trial  an engine's real processes, all on this machine
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.checks import check_channels
from fedatlas.federation.deploy import Tell, adapter, init, read_kit
from fedatlas.federation.design import POOLED, Design, cache_folder, data_path, space_of, versions
from fedatlas.federation.facts import other_versions, problem_of_hello, problem_of_join, problem_of_layout
from fedatlas.federation.file import Federation, flat_difference, hash_of, make_method, resolved, shareable
from fedatlas.federation.session import Gather, Parties
from fedatlas.federation.site import Agreement, SiteDesk
from fedatlas.transport.clients import SiteClients
from fedatlas.transport.deployment import Job
from fedatlas.transport.egress import Asked, Declaration
from fedatlas.transport.frames import Question
from fedatlas.transport.locks import lock
from fedatlas.transport.pipeline import ServerPipeline
from fedatlas.transport.relay import ServerRelay, skewed
from fedatlas.transport.rounds import RunFolder, read_run


class Deployed:
    """`transport.clients.Transport` over a distributed engine: keeps a relay job running on it while it is open.

    A job that ends, for whatever reason, is submitted again; the questions that were open are put to the next. While the server
    takes no job, it is asked on, as long as this is open.

    run: its name, for whoever wants to use the deployment meanwhile, which serves one run at a time. Raises FederationError
    where another run uses it.
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

    def __init__(self, engine: str, deploy: Path, sites: Sequence[str], tell: Tell, run: str = "") -> None:
        self.engine, self.deploy, self.sites = adapter(engine), deploy.resolve(), sorted(sites)
        self.tell = tell
        self.kit = self.deploy / "server"
        self.lock = _held(self.kit, run, tell)
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
        try:
            self.over.set()
            self.relay.close()
            self.keeper.join(timeout=120)
            if self.job is not None and self.job.ended() is None:
                self.job.stop()
        finally:
            self.lock.close()


def _held(kit: Path, run: str, tell: Tell) -> BinaryIO:
    """The lock of a deployment's server, see `lock`, held by this run until it is closed. tell: called where the file
    system has no locks. Raises FederationError, naming the run, where another one holds it."""
    file = (kit / "run.lock").open("a+b", buffering=0)
    try:
        lock(file, kit, tell, otherwise="see that no other run uses this deployment")
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode(errors="replace").strip() or "another run"
        file.close()
        raise FederationError(
            f"{kit.parent}: {holder} uses this deployment, which serves one run at a time; wait until it has ended, or "
            "make another deployment"
        ) from None
    with contextlib.suppress(OSError):  # the disk may be full; it locks all the same
        file.truncate(0)
        file.write(f"run {run} (process {os.getpid()} on {socket.gethostname()})".encode())
    return file


def gather(engine: str, deploy: Path, *, data_changed: bool = False) -> Gather:
    """How `run_federation` finds the parties of a deployment. data_changed: see `join`."""

    def gather(federation: Federation, folder: RunFolder, tell: Tell) -> Parties:
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
        transport = Deployed(engine, deploy, _with_pool(federation, deploy), tell, folder.path.name)
        return join(federation, folder, tell, transport, data_changed=data_changed)

    return gather


def _parties(deploy: Path) -> list[str]:
    """The sites that a deployment was made for, as its server's kit remembers them."""
    return list(read_kit(deploy / "server").get("sites", []))


def _with_pool(federation: Federation, deploy: Path) -> list[str]:
    """The sites that are to train, and the party that has the data of all where a method asks for it."""
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
"""Seconds that a run waits for its sites to say hello."""


def join(
    federation: Federation, folder: RunFolder, tell: Tell, transport: Deployed, *, data_changed: bool = False
) -> Parties:
    """Says hello to every site, asks what labels they bring, agrees on classes, and lets all prepare their data.

    A site must say hello within `COMING`; it may then take `faults.deadline` to list its data, and again to prepare them.
    data_changed: let sites go on whose data are not those with which the run began.

    Raises FederationError where versions or federation files differ, with the difference; SiteLost where a site
    does not come. A run that is resumed goes on without a site, whether it is away or hangs, if its rule for lost sites is
    to drop them.
    """
    try:
        before = read_run(folder.path) if (folder.path / "run.json").exists() else None
        clients = _desks(federation, folder, tell, transport, began=before is not None)
        tell(f"waits for {', '.join(transport.sites)}, at most {clients.faults.patience:g} s")
        clocks = _greeted(clients, federation, tell)
        # data are listed now, and then read and preprocessed; these are the longest calls of all
        dropping = federation.faults.on_lost == "drop" and not before
        clients.faults = replace(federation.faults, on_lost="stop") if dropping else federation.faults
        layouts = _listed(clients, clocks, federation, tell)
        space, agreement = _agreed(federation, folder, layouts, before, tell)
        clients.about = agreement
        begins = not folder.complete()
        own = {site: {"ahead": clocks[site]} if clocks[site] else {} for site in layouts}
        replies = clients.call(
            SiteDesk.join, each=own, agreement=agreement, begins=begins, data_changed=data_changed
        )
        joined = {site: reply["facts"] for site, reply in replies}
        tell(f"joined: {', '.join(joined)}")
        _tell_lost(clients, tell)
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


def _desks(
    federation: Federation, folder: RunFolder, tell: Tell, transport: Deployed, *, began: bool
) -> SiteClients:
    """Calls to all sites before the first round. began: whether the run has been joined before; then a site that its rule
    for lost sites drops may stay away."""
    coming = min(federation.faults.deadline, COMING)
    faults = replace(federation.faults, deadline=coming, patience=coming)
    if not (began and faults.on_lost == "drop"):  # all of them, and they may still be starting
        faults = replace(faults, on_lost="wait")
    ours = versions()

    def asked(site: str, function: str, payload: Mapping[str, Any]) -> Asked:
        if function == "hello":
            problem_of = partial(problem_of_hello, versions=ours)
        elif function == "layout":
            problem_of = partial(problem_of_layout, site, several=site == POOLED)
        else:
            problem_of = partial(problem_of_join, LabelSpace.from_plain(payload["agreement"]["labels"]))
        return Asked(payload, facts=problem_of)

    pipeline = ServerPipeline(declaration=Declaration(SiteDesk.sends, asked=asked))
    scratch, run = folder.path / "scratch" / "join", {"run": folder.path.name}
    return SiteClients(transport.sites, transport, scratch, faults, run, pipeline=pipeline, tell=tell)


def _tell_lost(clients: SiteClients, tell: Tell) -> None:
    """Tells who did not answer the last call."""
    for site, reason in clients.lost.items():
        tell(f"goes on without {site}: {reason}")


def _greeted(clients: SiteClients, federation: Federation, tell: Tell) -> dict[str, float]:
    """By how many seconds the clock of every site that says hello is ahead. Raises FederationError as `_compare`."""
    text = json.dumps(shareable(resolved(federation)), sort_keys=True)
    mine = {"versions": versions(), "hash": hash_of(federation)}
    asked_at = time.time()
    replies = clients.call(SiteDesk.hello, federation=text, **mine)
    hellos = {site: reply["facts"] for site, reply in replies}
    _compare(json.loads(text), mine, hellos)
    clocks = {site: ahead_of(facts["clock"], asked_at, time.time()) for site, facts in hellos.items()}
    for site, ahead in clocks.items():
        if ahead:
            tell(skewed(f"site {site}: its clock", ahead))
    _tell_lost(clients, tell)
    return clocks


def _listed(
    clients: SiteClients, sites: Iterable[str], federation: Federation, tell: Tell
) -> dict[str, dict[str, Any]]:
    """What these sites say of their data."""
    replies = clients.call(SiteDesk.layout, each={site: {} for site in sites}, hash=hash_of(federation))
    _tell_lost(clients, tell)
    return {site: reply["facts"] for site, reply in replies}


def _agreed(
    federation: Federation,
    folder: RunFolder,
    layouts: Mapping[str, Mapping[str, Any]],
    before: Mapping[str, Any] | None,
    tell: Tell,
) -> tuple[LabelSpace, dict[str, Any]]:
    """The classes of the run, and what all sites are told of it. before: run.json of a run that is resumed. Raises FederationError
    where the channels of two sites differ in number, or by their names in order."""
    channels = {site: facts["channels"] for site, facts in layouts.items()}
    if len(set(channels.values())) > 1:
        counts = ", ".join(f"{site}: {n}" for site, n in sorted(channels.items()))
        raise FederationError(f"the sites' images have different numbers of channels ({counts})")
    for problem in check_channels({site: facts["channel_names"] for site, facts in layouts.items()}):
        if problem.fatal:
            raise FederationError(str(problem))
        tell(str(problem))
    if before:
        space = LabelSpace.from_plain(before["labels"])
    else:
        space = space_of(
            federation, {name: names for facts in layouts.values() for name, names in facts["brings"].items()}
        )
    agreed = next(iter(channels.values()))
    made = Agreement(folder.path.name, hash_of(federation), space.to_plain(), agreed, versions())
    return space, made.to_plain()


APART = 60.0
"""Seconds by which a site's clock may differ without a word."""


def ahead_of(clock: float, asked: float, answered: float) -> float:
    """Seconds by which a clock that was read between two moments is surely ahead of ours (below 0: behind); 0 where
    it is by less than `APART`."""
    ahead = clock - answered if clock > answered else min(clock - asked, 0.0)
    return ahead if abs(ahead) > APART else 0.0


def _compare(plain: Mapping[str, Any], mine: Mapping[str, Any], hellos: Mapping[str, Any]) -> None:
    """Raises FederationError if a site has other versions, or another federation file."""
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


def check_joined(joined: Mapping[str, Any], summaries: Mapping[str, Any], space: LabelSpace) -> None:
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

    def __init__(self, engine: str, federation: Federation, folder: RunFolder, tell: Tell) -> None:
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
            adapter(engine).server_process(kits[0])  # told here where the engine cannot run in this folder
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


def gather_trial(engine: str, *, data_changed: bool = False) -> Gather:
    """How `run_federation` runs on an engine's real processes, all on this machine. data_changed: see `join`."""

    def gather(federation: Federation, folder: RunFolder, tell: Tell) -> Parties:
        adapter(engine).require()
        tell(f"starts {engine}'s server and {len(federation.sites)} sites on this machine")
        trial = Trial(engine, federation, folder, tell)
        try:
            sites = _with_pool(federation, trial.deploy)
            transport = Deployed(engine, trial.deploy, sites, tell, folder.path.name)
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
