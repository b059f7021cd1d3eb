"""Runs a federation: reaches the sites through an engine, trains, evaluates, and keeps the run folder."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import nn

from fedatlas import losses, methods
from fedatlas.core.contract import Member, Method, State
from fedatlas.core.errors import FederationError, RunFolderError, SiteLost
from fedatlas.core.tensors import Tensors, n_bytes, tensors_of, to_tree
from fedatlas.data.checks import check_federation, shared_scans
from fedatlas.data.reading import refuse
from fedatlas.evaluation.evaluate import AFTER_TRAINING, Candidate, place_of, question, selection_score
from fedatlas.evaluation.statistics import POST, read_rows, rows_text
from fedatlas.federation.design import Design, Experiment, arithmetic, cache_folder, egress_log, versions
from fedatlas.federation.file import (
    Federation,
    differences,
    flat_difference,
    hash_of,
    load_federation,
    local_models,
    make_method,
    make_terms,
    resolved,
    selects,
)
from fedatlas.federation.initial import sentence
from fedatlas.federation.log import writers
from fedatlas.federation.usable import differing_versions
from fedatlas.federation.yaml import read_yaml
from fedatlas.learning.loop import make_optimizer
from fedatlas.transport import wire
from fedatlas.transport.allocator import return_freed_blocks
from fedatlas.transport.clients import Released, SiteClients, Transport
from fedatlas.transport.egress import Asked, Declaration, NetForms
from fedatlas.transport.frames import Question
from fedatlas.transport.host import Host
from fedatlas.transport.local import InProcess, Workers
from fedatlas.transport.pipeline import ServerPipeline
from fedatlas.transport.rounds import Round, RunFolder, read_json, read_run, run, sealed, to_json
from fedatlas.transport.stages import HeldByAll
from fedatlas.transport.store import DATA, MemoryStore, guard_data, read_whole, waiting_for_room, write_atomic

Watch = Callable[[str, str, dict[str, float], dict[str, float]], None]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Parties:
    """Who takes part in a run, and how they are reached.

    summaries: site -> what it has, in numbers (`SiteData.summary`); training: the names that are asked to train,
    which is "pooled" alone for a method that merges the data. about: goes with every question. instances: site ->
    the installation that joined; another one that answers under its name is refused. memories: site -> the versions
    of its private memory of this run. changed: sites whose data are not those with which the run began.
    """

    design: Design
    summaries: Mapping[str, Mapping[str, Any]]
    training: Sequence[str]
    transport: Transport
    about: Mapping[str, Any] = field(default_factory=dict)
    instances: Mapping[str, str] = field(default_factory=dict)
    memories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    changed: Sequence[str] = ()


Gather = Callable[[Federation, RunFolder, Tell], Parties]
"""Finds the parties of a federation through one engine, and checks that they can run it."""


def gather_local(
    federation: Federation, folder: RunFolder, tell: Tell, *, data_changed: bool = False
) -> Parties:
    """Every site on this machine, in this process or in worker processes. Raises FederationError or DataError.

    data_changed: go on with a run though a site's data are not those with which it began."""
    cache = cache_folder(federation, folder.path.parent)
    experiment = Experiment(federation, cache)
    problems = [p for p in check_federation(experiment.indexes, experiment.space) if p.fatal]
    if problems:
        raise FederationError("\n".join(str(problem) for problem in problems))
    transport: Transport
    if federation.engine.workers:
        _require_elsewhere(federation)
        arguments = {"run": str(folder.path), "cache": str(cache)}
        log = folder.path / "sites" / "workers.log"
        transport = Workers(
            "fedatlas.federation.session:open_hosts", arguments, federation.engine.workers, log
        )
        transport.start()
    else:
        transport = InProcess(Hosts(experiment, folder).answer)
    try:
        return _local_parties(experiment, folder, transport, tell, data_changed)
    except BaseException:
        transport.close()
        raise


def _require_elsewhere(federation: Federation) -> None:
    """Raises FederationError for a method or a loss that other processes do not know."""
    where = f"engine.workers is {federation.engine.workers}"
    methods.OTHERS.require_elsewhere(str(federation.method["name"]), where)
    loss = getattr(make_method(federation), "loss", None)
    if isinstance(loss, losses.LossChoice):
        losses.OTHERS.require_elsewhere(loss.name, where)


def _local_parties(
    experiment: Experiment, folder: RunFolder, transport: Transport, tell: Tell, data_changed: bool
) -> Parties:
    """Checks the net and the data, and brings these onto the grid."""
    federation = experiment.federation
    begins = not folder.complete()
    experiment.check_net(initial=begins)
    experiment.prepare(tell)
    refuse(shared_scans([scan for source in experiment.sources.values() for scan in source.scans()]))
    changed = [
        name
        for name, source in experiment.sources.items()
        if guard_data(
            folder.site(name) / DATA, source.fingerprint(), name, begins=begins, accept=data_changed
        )
    ]
    summaries = {name: source.summary() for name, source in experiment.sources.items()}
    for name, source in experiment.sources.items():
        if federation.evaluation.overlays and summaries[name].get("leaks"):
            source.keep_leaks(folder.site(name))
    names = {**experiment.sources, **experiment.training}
    memories = {name: MemoryStore(folder.site(name) / "memory").versions() for name in names}
    training = list(experiment.training)
    return Parties(experiment, summaries, training, transport, memories=memories, changed=changed)


class Hosts:
    """The hosts of sites whose data are here, each made once."""

    def __init__(self, experiment: Experiment, folder: RunFolder) -> None:
        self.experiment, self.folder = experiment, folder
        self.hosts: dict[str, Host] = {}

    def answer(self, question: Question) -> None:
        name = question.site
        if name not in self.hosts:
            place = self.folder.site(name)
            log = egress_log(self.experiment.federation, place / "egress.jsonl", self.folder.path.name)
            self.hosts[name] = self.experiment.host(name, place, log)
        self.hosts[name].answer(question)


def open_hosts(run: str, cache: str) -> Callable[[Question], None]:
    """`answer(question)` for a worker process that can serve any site of a run on this machine."""
    folder = RunFolder(Path(run))
    experiment = Experiment(load_federation(folder.path / "federation.yaml"), Path(cache))
    make_optimizer(
        experiment.make_net(initial=False), experiment.federation.local
    )  # imports what the first call needs
    return Hosts(experiment, folder).answer


class Running:
    """The parties of a run and its folder; a context that closes the transport when it is left.

    With a pooled method the sites keep their own clients for evaluation.
    """

    def __init__(
        self, parties: Parties, folder: RunFolder, watch: Watch | None = None, tell: Tell = lambda text: None
    ) -> None:
        self.parties, self.folder, self.design = parties, folder, parties.design
        faults, scratch = parties.design.federation.faults, folder.path / "scratch"

        def reach(sites: Sequence[str], place: str, others: Sequence[str] = ()) -> SiteClients:
            make_net = partial(self.design.make_net, initial=False)
            declaration = Declaration(
                self.design.sends, len(self.design.space), NetForms(make_net), self._asked
            )
            return SiteClients(
                list(sites),
                parties.transport,
                scratch / place,
                faults,
                dict(parties.about),
                parties.instances,
                watch,
                ServerPipeline(make_terms(parties.design.federation), declaration),
                others=list(others),
                make_net=self.design.make_net,
                sample_shape=self.design.sample_shape,
                threads=parties.design.federation.threads_per_site,
                seed=parties.design.federation.seed,
                tell=tell,
            )

        tested = [] if self.design.pooled else sorted(set(parties.summaries) - set(parties.training))
        self.clients = reach(parties.training, "train", tested)
        self.evaluators = self.clients
        if self.design.pooled:
            self.evaluators = reach(list(parties.summaries), "evaluate")

    @property
    def _held(self) -> dict[str, HeldByAll]:
        """What sites hold of the models that were sent to train, and to evaluate where that is asked apart."""
        apart = {} if self.evaluators is self.clients else {"evaluate": self.evaluators.pipeline.held}
        return {"train": self.clients.pipeline.held, **apart}

    def held(self) -> dict[str, Any]:
        """What `go_on` takes up, to be kept with a round."""
        return {name: kept for name, held in self._held.items() if (kept := held.kept())}

    def go_on(self, held: Mapping[str, Any]) -> None:
        """After a resume: sends what an uninterrupted run would send."""
        for name, kept in held.items():
            self._held[name].resume(kept)

    def _asked(self, site: str, function: str, payload: Mapping[str, Any]) -> Asked:
        """What a site's answer must agree with: the question, and what the site said when it joined."""
        summary = self.parties.summaries.get(site)
        if function not in self.design.task.sends:
            return Asked(payload, summary["cases"]["train"] if summary else None)
        cases = summary["cases"][payload["split"]] if summary else None
        return Asked(payload, scores=self.design.evaluator.scores(site, cases, **payload))

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *exception: object) -> None:
        self.parties.transport.close()

    def evaluate(
        self, model: "Finished", *, split: str, grid: str, metrics: Sequence[str], **more: Any
    ) -> "Evaluated":
        """Evaluates a model at every site that has cases of the split. more: further arguments of the task's evaluator."""
        members_at = model.open()
        members = {site: members_at(site) for site in self.evaluators.everyone}
        first = next(iter(members.values()))
        # one payload for all where every site gets the very same models
        common = all(_same_members(first, other) for other in members.values())
        return self._ask(
            self.design.evaluator.evaluate,
            None if common else {site: {"members": _payload(value)} for site, value in members.items()},
            {"members": _payload(first)} if common else {},
            split=split,
            model=model.name,
            round=model.round,
            grid=grid,
            metrics=list(metrics),
            overlays=model.overlays,
            **more,
        )

    def evaluate_several(
        self, models: Sequence["Finished"], *, split: str, grid: str, metrics: Sequence[str]
    ) -> "Evaluated":
        """Evaluates several models at every site that has cases of the split, in one question: a site reads each case
        once, and asks a net that several models share once. Rows are in the order of the models, of each by site."""
        opened = [model.open() for model in models]
        each = {
            site: [
                Candidate(model.name, model.round, members(site), model.overlays)
                for model, members in zip(models, opened, strict=True)
            ]
            for site in self.evaluators.everyone
        }
        first = next(iter(each.values()))
        common = all(map(_same_candidates, repeat(first), each.values()))
        evaluated = self._ask(
            self.design.evaluator.evaluate_several,
            None if common else {site: question(candidates) for site, candidates in each.items()},
            question(first) if common else {},
            split=split,
            grid=grid,
            metrics=list(metrics),
        )
        rank = {model.name: place for place, model in enumerate(models)}
        evaluated.rows.sort(key=lambda row: rank[row["model"].removeprefix(POST)])
        return evaluated

    def own_scores(self, round: int, metrics: Sequence[str], selecting: str) -> dict[str, float]:
        """Scores every site's local model of this round on the site's own validation cases.

        Returns site -> the mean of the metric `selecting` over its classes. Sites without validation cases, and those
        whose local model is not known here, are left out."""
        scores: dict[str, float] = {}
        what = {"split": "validation", "round": round, "grid": "federation", "metrics": list(metrics)}

        def ask(each: dict[str, dict[str, Any]]) -> None:
            replies = self.evaluators.call(self.design.evaluator.evaluate, each=each, **what, overlays=False)
            for site, answer in replies:
                score = selection_score(answer["rows"], "classes", selecting)
                if score is not None:
                    scores[site] = score

        each: dict[str, dict[str, Any]] = {}
        size = 0
        for site, reply in self.clients.models or ():
            if not self.parties.summaries.get(site, {"cases": {"validation": 0}})["cases"]["validation"]:
                continue
            own = n_bytes(reply["model"])
            if each and size + own > TOGETHER:
                ask(each)
                each, size = {}, 0
            each[site] = {"members": _payload([_local(reply)]), "model": f"local/{site}"}
            size += own
        if each:
            ask(each)
        return scores

    def _ask(
        self, function: Callable[..., Any], each: Any, shared: dict[str, Any], **what: Any
    ) -> "Evaluated":
        summaries = self.parties.summaries
        chosen = [site for site in self.evaluators.everyone if summaries[site]["cases"][what["split"]]]
        if chosen != self.evaluators.sites:
            each = {site: (each or {}).get(site, {}) for site in chosen}
        evaluated = Evaluated([], [])
        for site, reply in self.evaluators.call(function, each=each, **shared, **what):
            evaluated.rows.extend(reply["rows"])
            for name, histogram in reply.get("histograms", {}).items():
                place = {"split": what["split"], "model": what["model"], "site": site}
                evaluated.histograms.append({**place, "class": name, "histogram": histogram})
        evaluated.lost.update(self.evaluators.lost)
        return evaluated


@dataclass(frozen=True)
class Evaluated:
    """What sites answered about a model. rows: see `evaluate.Row`; histograms: where labels are of whole images, of
    every site and class, see `classification.Histogram`; lost: site -> why it did not answer."""

    rows: list[dict[str, Any]]
    histograms: list[dict[str, Any]]
    lost: dict[str, str] = field(default_factory=dict)

    def add(self, other: "Evaluated") -> None:
        self.rows.extend(other.rows)
        self.histograms.extend(other.histograms)
        self.lost.update(other.lost)


def _local(kept: Mapping[str, Any]) -> Member:
    """A site's local model, as it answered or was kept."""
    return Member.from_payload({"model": kept["model"], "classes": kept.get("classes")})


def _payload(members: Iterable[Member]) -> list[dict[str, Any]]:
    return [member.to_payload() for member in members]


def _same_members(one: Sequence[Member], other: Sequence[Member]) -> bool:
    return len(one) == len(other) and all(
        _same_tensors(a.model, b.model) and replace(a, model={}) == replace(b, model={})
        for a, b in zip(one, other, strict=True)
    )


def _same_tensors(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(one[name] is other[name] for name in one)


def _same_candidates(one: Sequence[Candidate], other: Sequence[Candidate]) -> bool:
    return all(_same_members(a.members, b.members) for a, b in zip(one, other, strict=True))


LACKING = "lacking"
"""In the log of a round: the sites that were lost in its validation."""
RELEASED = "released.json"
"""In the folder of a run with differential privacy: what ε rests on (`clients.Released`)."""
TOGETHER = 1 << 28
"""Bytes of models that are sent in one question for several; one that is larger is sent alone."""


@dataclass(frozen=True)
class Finished:
    """A model to evaluate. open: reads it, and returns a function from a site's name to the members of which the model
    consists there. overlays: whether sites keep pictures of their cases."""

    name: str
    round: int
    open: Callable[[], Callable[[str], list[Member]]]
    overlays: bool = False


def _state_model(name: str, state: State, method: Method, *, overlays: bool = False) -> Finished:
    """The federation's model."""
    return Finished(name, state.round, lambda: lambda site: method.eval_members(state, site), overlays)


def _local_model(site: str, file: Path, round: int) -> Finished:
    """A site's local model."""

    def opened() -> Callable[[str], list[Member]]:
        kept: Any = wire.decode(read_whole(file), copy=False)
        members = [_local(kept)]
        return lambda site: members

    return Finished(f"local/{site}", round, opened)


def _size(models: Iterable[Tensors]) -> int:
    distinct: list[Tensors] = []
    for tensors in models:
        place_of(tensors, distinct)
    return sum(map(n_bytes, distinct))


def in_groups(models: Sequence[Finished], sites: Sequence[str], most: int) -> Iterator[list[Finished]]:
    """Yields the models, in their order, in groups whose tensors take at most `most` bytes; equal tensors count once, and a
    group holds at least one model."""
    group: list[Finished] = []
    held: list[Tensors] = []
    for model in models:
        members_at = model.open()
        opened = replace(model, open=lambda members_at=members_at: members_at)
        of_model = [member.model for site in sites for member in members_at(site)]
        if group and _size([*held, *of_model]) > most:
            yield group
            group, held = [], []
        for tensors in of_model:
            place_of(tensors, held)
        group.append(opened)
    if group:
        yield group


def run_path(federation: Federation, runs: Path, run_id: str | None = None) -> Path:
    """The folder of a federation's run: its name and the first digits of its hash, or the name given."""
    if run_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run_id):
        raise FederationError(
            f"--id {run_id!r}: a name of at most 100 letters, digits, '.', '_' and '-' is expected, no path"
        )
    return runs / (run_id or f"{federation.name}-{hash_of(federation)[:8]}")


def run_federation(
    federation: Federation,
    path: Path,
    *,
    resume: bool = False,
    tell: Tell = print,
    watch: Watch | None = None,
    after_round: "Callable[[Round, Best], None] | None" = None,
    gather: Gather = gather_local,
) -> None:
    """Checks, trains and evaluates a federation in the run folder `path`.

    resume: go on from the folder's last complete round, whatever engine made it.
    gather: finds the sites through an engine.
    tell: is given sentences for a person; watch: every answer of a site, see `SiteClients`.

    Raises FederationError or DataError before anything is trained if something is wrong, RunFolderError if
    the folder belongs to another configuration or another process works on it, SiteLost as the federation's rule
    says.
    """
    return_freed_blocks()
    folder = RunFolder(path)
    with waiting_for_room(tell, federation.faults.patience), folder.held(tell):
        _run(federation, folder, resume, tell, watch, after_round, gather)


def _run(
    federation: Federation,
    folder: RunFolder,
    resume: bool,
    tell: Tell,
    watch: Watch | None,
    after_round: "Callable[[Round, Best], None] | None",
    gather: Gather,
) -> None:
    path = folder.path
    _claim(folder, federation, resume, tell)
    if resume and _is_finished(folder, federation):
        tell(f"{path}: is finished already")
        return
    if resume and (path / "run.json").exists() and (others := differing_versions(read_run(path))):
        tell(f"{path}: was begun with other versions ({others}); numbers may differ from those of one run")
    if resume and not folder.complete():
        if (path / "run.json").exists() and read_run(path)["finished"] is not None:
            raise RunFolderError(
                f"{path}: its run.json says that the run is finished, and {folder.rounds} holds no complete round to go on from; "
                "put the rounds back from a copy, or begin a new run with --id"
            )
        tell(f"{path}: nothing to resume, begins with the first round")
    with folder.explained(), writers(federation.log, federation.name, path, tell) as write:

        def see(record: Round, best: Best) -> None:
            write(record)
            if after_round:
                after_round(record, best)

        _rounds(federation, folder, tell, watch, see, gather(federation, folder, tell))


def _rounds(
    federation: Federation,
    folder: RunFolder,
    tell: Tell,
    watch: Watch | None,
    after_round: "Callable[[Round, Best], None]",
    parties: Parties,
) -> None:
    """Trains, from the first round or the last complete one, and evaluates."""
    evaluation, design = federation.evaluation, parties.design
    for name, about in parties.summaries.items():
        if about.get("leaks"):
            tell(
                f"note: site {name}: images give labels away, in cases: {about['leaks']}. Scores on them do not count; "
                "`fedatlas check` and the report tell which they are"
            )
    with Running(parties, folder, watch, tell) as running:
        begins = not folder.complete()
        net = design.make_net(initial=begins)
        if begins and federation.init_from:
            tell(sentence(federation.init_from, design.space))
        _describe(folder, parties, net)
        if parties.changed:
            _note_change(folder, parties.changed)
            tell(f"goes on with data that changed since the run began, at {', '.join(parties.changed)}")
        chosen, own, scores = local_models(federation), BestLocals(folder), dict[str, float]()
        lacking = list[str]()
        best = Best(folder, evaluation.select_weights, selects(federation))
        if design.method.chosen_by_site:
            best = BestOfSites(folder, selects(federation), design.method, own)
        state = folder.latest(design.method)
        running.clients.released = _released(folder)
        running.clients.keep_released = partial(_keep_released, folder)
        if state is not None:
            running.clients.remembered = _memories(folder, parties, state.round)
            running.go_on(folder.held_after(state.round))
            own.recover()
            best.recover(state.round)
            tell(f"goes on after round {state.round} of {federation.rounds}")
            if state.round < federation.rounds:
                _note_processor(folder, federation.engine.device, tell)

        def validate(state: State) -> list[dict[str, Any]]:
            if state.round % evaluation.every and state.round != federation.rounds:
                return []
            if running.evaluators is not running.clients:
                running.evaluators.begin(state.round)
            if chosen == "best":
                scores.update(running.own_scores(state.round, evaluation.round_metrics, selects(federation)))
            model = _state_model("global", state, design.method)
            what = {"split": "validation", "grid": "federation", "metrics": evaluation.round_metrics}
            evaluated = running.evaluate(model, **what)
            lacking.extend(sorted(evaluated.lost))
            return evaluated.rows

        def keep(record: Round) -> None:
            last = record.number == federation.rounds
            if chosen == "best":
                record.log["local"] = dict(scores)
            if lacking:
                record.log[LACKING] = list(lacking)
            folder.save(record, running.clients.models if last or scores else None, running.held())
            own.see(record.number, scores)
            best.see(record.number, record.rows, lacking)
            scores.clear()
            lacking.clear()
            after_round(record, best)

        state = run(
            design.method,
            net,
            running.clients,
            federation.rounds,
            state=state,
            evaluate=validate,
            after_round=keep,
        )
        folder.keep_model("last", state.round)
        _finish(running, federation, tell)


class Best:
    """The best complete round by the validation score, kept as models/best.fa with best.json beside it. Of two rounds
    whose validation lacks sites, that which lacks fewer is the better: a mean over other sites is another number."""

    def __init__(self, folder: RunFolder, weights: str, metric: str) -> None:
        self.folder, self.weights, self.metric = folder, weights, metric
        self.round, self.score, self.lacking = 0, -1.0, 0
        self.last_score: float | None = None
        """The score of the round seen last; None if none of its values was defined."""

    def see(self, number: int, rows: list[dict[str, Any]], lacking: Sequence[str] = ()) -> None:
        """Keeps the round if its score is the highest so far; of equal scores the first. lacking: the sites that were lost in
        its validation."""
        self.last_score = selection_score(rows, self.weights, self.metric) if rows else None
        if self._take(number, self.last_score, len(lacking)):
            self.folder.keep_model("best", number)
            write_atomic(self.folder.path / "best.json", to_json(self._kept()))

    def _take(self, number: int, score: float | None, lacking: int) -> bool:
        """Is this round better than the best so far? Then it is the best."""
        if score is None or (self.round and (-lacking, score) <= (-self.lacking, self.score)):
            return False
        self.round, self.score, self.lacking = number, score, lacking
        return True

    def _kept(self) -> dict[str, Any]:
        about = {"round": self.round, "score": self.score}
        return about | {LACKING: self.lacking} if self.lacking else about

    def recover(self, latest: int) -> None:
        """After a resume at the end of round `latest`: what was seen so far, from the rounds on disk. A model that scored as high as the
        best of them or higher is kept: it may be of a round whose state was lost, and which is, or was, done again."""
        for log, rows in self.folder.records():
            score = selection_score(rows, self.weights, self.metric) if rows else None
            self._take(log["round"], score, len(log.get(LACKING, ())))
        path = self.folder.path / "best.json"
        kept = {LACKING: 0} | (read_json(path) if path.exists() else {"round": 0, "score": -1.0})
        if kept["round"] and (-kept[LACKING], kept["score"]) >= (-self.lacking, self.score):
            self.round, self.score, self.lacking = kept["round"], kept["score"], kept[LACKING]
        elif self.round:
            if self.round != latest:
                raise RunFolderError(
                    f"{path}: names round {kept['round']}, the rounds say {self.round}; the folder was changed by hand"
                )
            self.folder.keep_model("best", self.round)
            write_atomic(path, to_json(self._kept()))


class BestOfSites(Best):
    """The best models of a method whose sites choose for themselves (`Method.chosen_by_site`). models/best.fa holds the
    state with every site's model of its own best round; best.json lists these rounds, the last of them, and the mean of
    the scores. own: sees a round before this object does."""

    def __init__(self, folder: RunFolder, metric: str, method: Method, own: "BestLocals") -> None:
        super().__init__(folder, "classes", metric)
        self.method, self.own = method, own

    def see(self, number: int, rows: list[dict[str, Any]], lacking: Sequence[str] = ()) -> None:
        """Assembles the sites' best models so far; a site without a score takes part with its model of this round."""
        self.last_score = selection_score(rows, self.weights, self.metric) if rows else None
        if rows:
            self._assemble(number)

    def recover(self, latest: int) -> None:
        """After a resume: what was seen so far, with the state of the last round that was validated."""
        validated = [log["round"] for log, rows in self.folder.records() if rows]
        if validated and validated[-1] == latest:
            self._assemble(latest)
        elif self.own.best:
            self._summarise()

    def _assemble(self, number: int) -> None:
        if not self.own.best:
            return
        self._summarise()
        models = {}
        for site in self.own.best:
            kept: Any = wire.decode(
                read_whole(self.folder.path / "models" / "local" / f"{site}.fa"), copy=False
            )
            models[site] = kept["model"]
        state = self.folder.state(self.folder.rounds / f"{number:04d}" / "state.fa", self.method)
        state = replace(self.method.assembled(state, models), round=self.round)
        write_atomic(self.folder.path / "models" / "best.fa", wire.encode(to_tree(state)))
        chosen = {"round": self.round, "score": self.score, "sites": self.own.best}
        write_atomic(self.folder.path / "best.json", to_json(chosen))

    def _summarise(self) -> None:
        """Sets `round` and `score` from those of the sites."""
        self.round = max(kept["round"] for kept in self.own.best.values())
        self.score = float(np.mean([kept["score"] for kept in self.own.best.values()]))


class BestLocals:
    """Every site's local model of its best complete round by its own validation cases, kept as
    models/local/<site>.fa with models/local.json beside them. Of equal rounds the first."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.file = folder, folder.path / "models" / "local.json"
        self.best: dict[str, dict[str, Any]] = {}

    def see(self, number: int, scores: Mapping[str, float]) -> None:
        """scores: site -> that of its local model in this round."""
        better = {s: v for s, v in scores.items() if s not in self.best or v > self.best[s]["score"]}
        for site, score in better.items():
            self.best[site] = {"round": number, "score": score}
            self.folder.keep_local(site, number)
        if better:
            write_atomic(self.file, to_json(self.best))

    def recover(self) -> None:
        """After a resume: what was seen so far, from the rounds on disk. A model that scored as high as the best of them or higher is
        kept, as by `Best.recover`."""
        for log, _ in self.folder.records():
            for site, score in log.get("local", {}).items():
                if site not in self.best or score > self.best[site]["score"]:
                    self.best[site] = {"round": log["round"], "score": score}
        kept = read_json(self.file) if self.file.exists() else {}
        for site, best in kept.items():
            if site not in self.best or best["score"] >= self.best[site]["score"]:
                self.best[site] = best
        if kept == self.best:
            return
        for site, best in self.best.items():
            if kept.get(site) != best:
                try:
                    self.folder.keep_local(site, best["round"])
                except FileNotFoundError:
                    raise RunFolderError(
                        f"{self.file}: the best local model of site {site}, of round {best['round']}, is gone; the "
                        "folder was changed by hand"
                    ) from None
        write_atomic(self.file, to_json(self.best))


def _finish(running: Running, federation: Federation, tell: Tell) -> None:
    """Evaluates best, last and local models on the original grids, into rows.csv; where labels are of whole images,
    also into histograms.json and thresholds.json. Thresholds are fitted on the validation cases of all sites. Raises SiteLost
    where a site was lost on the way; the files then hold what the others answered."""
    folder, method = running.folder, running.design.method
    running.evaluators.begin(federation.rounds + 1)
    metrics = federation.evaluation.metrics
    wanted = federation.evaluation.models
    paths = {name: folder.path / "models" / f"{name}.fa" for name in ("best", "last") if name in wanted}
    loaded = {name: folder.state(path, method) for name, path in paths.items() if path.exists()}
    if len(loaded) == 2 and folder.best_is_last(federation.rounds):
        loaded.pop("last")
    there = [
        split
        for split in ("validation", "test")
        if any(summary["cases"][split] for summary in running.parties.summaries.values())
    ]
    local = folder.local_models() if "local" in wanted else {}
    first = next(iter(loaded), None)
    overlays = federation.evaluation.overlays
    models = [
        _state_model(name, state, method, overlays=overlays and name == first)
        for name, state in loaded.items()
    ]
    models += [_local_model(site, *kept) for site, kept in local.items()]
    evaluated = Evaluated([], [])
    fitted: dict[str, Any] = {}
    for split in there:
        what = {"split": split, "grid": "original", "metrics": metrics}
        if hasattr(running.design.evaluator, "evaluate_several"):
            for group in in_groups(models, running.evaluators.everyone, TOGETHER):
                named = ", ".join(model.name for model in group)
                tell(f"final evaluation on the original grids, {split} cases: {named}")
                evaluated.add(running.evaluate_several(group, **what))
            continue
        for model in models:
            tell(f"final evaluation, {split} images: {model.name}")
            more = running.design.task.extra(fitted.get(model.name))
            got = running.evaluate(model, **what, **more)
            evaluated.add(got)
            if split == "validation":
                fitted[model.name] = running.design.task.fit(got.histograms, federation, running.design.space)
    write_atomic(folder.path / "rows.csv", rows_text(evaluated.rows).encode())
    if evaluated.histograms:
        write_atomic(folder.path / "histograms.json", to_json(evaluated.histograms))
    if any(fitted.values()):
        criterion = federation.evaluation.threshold
        kept = {"split": "validation", "criterion": criterion, "models": fitted}
        write_atomic(
            folder.path / "thresholds.json", to_json(kept | {"classes": next(iter(fitted.values()))})
        )
    if evaluated.lost:
        reasons = "\n".join(f"  {site}: {reason}" for site, reason in sorted(evaluated.lost.items()))
        raise SiteLost(
            f"the final evaluation lacks {', '.join(sorted(evaluated.lost))}; --resume does it again\n{reasons}\n"
            "The models are there, and rows.csv has what the other sites answered"
        )
    info = read_run(folder.path)
    write_atomic(folder.path / "run.json", to_json({**info, "finished": _now()}))


def _released(folder: RunFolder) -> Released:
    """What ε rests on: all that was ever accounted, in rounds that were lost or broke off, too. A folder of an older version
    keeps no such file: then what its complete rounds say, or what their sites logged."""
    file = folder.path / RELEASED
    if file.exists():
        return Released(**read_json(file))
    released = Released()
    for log, _ in folder.records():
        counts = [int(numbers["releases"]) for numbers in log["sites"].values() if "releases" in numbers]
        if log.get("released"):
            released = Released(**log["released"])
        elif counts:
            released = released.after(counts)
    return released


def _keep_released(folder: RunFolder, released: Released) -> None:
    write_atomic(folder.path / RELEASED, to_json(asdict(released)))


def _memories(folder: RunFolder, parties: Parties, round: int) -> dict[str, str]:
    """site -> the version of its private memory with which a round ended.

    Raises RunFolderError where a site lacks the private memory with which a round ended, as its optimizer's
    moments: a run that went on without it would come to another result and not say so."""
    expected = folder.log(round).get("memory", {})
    for site, version in sorted(expected.items()):
        if version and site in parties.memories and version not in parties.memories[site]:
            raise RunFolderError(
                f"site {site}: does not hold the private memory with which round {round} of this run ended. It is in "
                "the folder that the site had then (sites/ of the run, or what its start.sh took with --state); let "
                "it take part from there, or begin a new run with --id"
            )
    return expected


def _is_finished(folder: RunFolder, federation: Federation) -> bool:
    """Was every round done, and the final evaluation written?"""
    done = folder.complete()[-1:] == [federation.rounds] and (folder.path / "rows.csv").exists()
    return done and (folder.path / "run.json").exists() and read_run(folder.path)["finished"] is not None


def changed_evaluation(folder: RunFolder, federation: Federation) -> list[str]:
    """The keys of the final evaluation in which a run folder differs from a federation, if it differs in nothing else and holds
    the state to go on from; else none. Such a run is evaluated again, with the bits of one that had these options from the start."""
    written = folder.path / "federation.yaml"
    was = read_yaml(written)
    if read_run(folder.path)["finished"] is not None:
        was = resolved(load_federation(written))  # an option that did not exist then has its default
    keys = list(differences(was, resolved(federation)))
    taken = tuple(f"evaluation.{name}." for name in AFTER_TRAINING)
    trained = folder.complete()
    there = bool(trained) and (folder.rounds / f"{trained[-1]:04d}" / "state.fa").exists()
    return keys if there and all(f"{key}.".startswith(taken) for key in keys) else []


def _text(plain: Mapping[str, Any]) -> bytes:
    """How a run writes its federation file."""
    return yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True).encode()


def _is_resolved(data: bytes, federation: Federation) -> bool:
    """Is this a file as runs write it, with every key, of this federation or another one?"""
    try:
        plain = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and plain.keys() == resolved(federation).keys() and _text(plain) == data


def _claim(folder: RunFolder, federation: Federation, resume: bool, tell: Tell) -> None:
    """Makes the run folder, or checks that it belongs to this very configuration, or to one of which the final evaluation alone
    differs."""
    path, written = folder.path / "run.json", folder.path / "federation.yaml"
    text = _text(resolved(federation))
    digest = hashlib.sha256(text).hexdigest()
    if not path.exists():
        folder.path.mkdir(parents=True, exist_ok=True)
        if written.exists() and not _is_resolved(written.read_bytes(), federation):
            raise RunFolderError(
                f"{written}: was not written by a run, and one in this folder would replace it; give the run another name "
                "with --id, or another folder with --runs"
            )
        write_atomic(written, text)
        return
    info = read_run(folder.path)
    changed = [] if info["hash"] == hash_of(federation) else changed_evaluation(folder, federation)
    if info["hash"] != hash_of(federation) and not changed:
        raise RunFolderError(
            f"{folder.path}: belongs to another configuration:\n"
            f"{flat_difference(read_yaml(written), resolved(federation))}\n"
            "Give the new run a name of its own with --id, or put the values back"
        )
    if not resume:
        raise RunFolderError(
            f"{folder.path}: exists already; go on with --resume, or give the new run a name with --id"
        )
    if changed:
        again = "is evaluated again, not trained" if info["finished"] else "goes on"
        tell(f"{folder.path}: {again}, as it differs in {', '.join(changed)} alone")
        info |= {"hash": hash_of(federation), "federation": digest, "finished": None}
        write_atomic(path, to_json(sealed(info, SEALED)))
    if info.get("federation") == digest and written.read_bytes() != text:
        write_atomic(written, text)  # of this change, or of one that broke off


SEALED = ("channels", "federation", "hash", "labels", "sites")
"""What the seal of run.json is of."""


def _describe(folder: RunFolder, parties: Parties, net: nn.Module) -> None:
    """Writes run.json: what runs, on what, with which versions."""
    path = folder.path / "run.json"
    if path.exists():
        return
    design = parties.design
    federation, space = design.federation, design.space
    info = {
        "id": folder.path.name,
        "name": federation.name,
        "hash": hash_of(federation),
        "federation": hashlib.sha256((folder.path / "federation.yaml").read_bytes()).hexdigest(),
        "versions": versions(),
        "git": git_revision(),
        "started": _now(),
        "finished": None,
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "arithmetic": arithmetic(federation.engine.device),
            "cores": os.cpu_count(),
            "torch_threads": federation.threads_per_site,
        },
        "method": federation.method["name"],
        "net": federation.net["name"],
        "n_parameters": sum(parameter.numel() for parameter in net.parameters()),
        "model_bytes": n_bytes(tensors_of(net)),
        "channels": design.channels,
        "rounds": federation.rounds,
        "seed": federation.seed,
        "labels": space.to_plain(),
        "sites": dict(parties.summaries),
    }
    write_atomic(path, to_json(sealed(info, SEALED)))


THEN = " and then "
"""Stands between the kinds of processor on which a run was trained one after another."""


def _note_processor(folder: RunFolder, device: str, tell: Tell) -> None:
    """Writes into run.json, and tells, where training goes on on another kind of processor than it was on last."""
    path = folder.path / "run.json"
    info = read_run(folder.path)
    was, now = info["machine"].get("arithmetic"), arithmetic(device)
    if was is None or was.rpartition(THEN)[2] == now:
        return
    info["machine"]["arithmetic"] = f"{was}{THEN}{now}"
    write_atomic(path, to_json(info))
    tell(
        f"continues on another kind of processor ({now}; it was {was}), which rounds differently, as another seed would"
    )


def _note_change(folder: RunFolder, sites: Sequence[str]) -> None:
    """Writes into run.json after which round which sites' data changed."""
    path = folder.path / "run.json"
    info = read_run(folder.path)
    change = {"after_round": folder.complete()[-1], "sites": sorted(sites)}
    write_atomic(path, to_json({**info, "data_changed": [*info.get("data_changed", []), change]}))


def git_revision() -> str | None:
    """The revision of the source tree this package runs from, "+" if changed; None if it is not one."""
    where = Path(__file__).parent
    try:
        ask = ["git", "-C", str(where), "rev-parse", "HEAD"]
        revision = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        ask = ["git", "-C", str(where), "status", "--porcelain", "--", "."]
        changed = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed else "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def summary(path: Path) -> dict[str, Any]:
    """What a run came to, as plain values: best round, and mean Dice (for whole images AUROC) per model, site and
    class."""
    rows = read_rows(path / "rows.csv")
    best = read_json(path / "best.json") if (path / "best.json").exists() else None
    metric = "auroc" if any(row["metric"] == "auroc" for row in rows) else "dice"
    means: dict[str, Any] = {}
    for row in rows:
        if row["metric"] == metric and row["value"] is not None:
            place = (
                means.setdefault(row["split"], {}).setdefault(row["model"], {}).setdefault(row["site"], {})
            )
            place.setdefault(row["class"], []).append(row["value"])
    mean = lambda v: float(np.mean(v)) if isinstance(v, list) else {k: mean(item) for k, item in v.items()}  # noqa: E731
    return {"run": str(path), "best": best, metric: mean(means)}
