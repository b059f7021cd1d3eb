"""Runs a federation: reaches the sites through an engine, trains, evaluates, and keeps the run folder."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.core.contract import Member, Method, State
from fedatlas.core.errors import FederationError, RunFolderError, SiteLost, require_object
from fedatlas.core.tensors import Tensors, n_bytes
from fedatlas.data.checks import check_federation, shared_scans
from fedatlas.data.reading import refuse
from fedatlas.evaluation.evaluate import Candidate, place_of, question, selection_score
from fedatlas.evaluation.statistics import POST, read_rows, rows_text
from fedatlas.federation.best import LACKING, Best, BestLocals, BestOfSites
from fedatlas.federation.design import Design, Experiment, cache_folder, egress_log, slow_precision
from fedatlas.federation.file import (
    Federation,
    extensible,
    hash_of,
    load_federation,
    local_models,
    make_terms,
    selects,
)
from fedatlas.federation.initial import sentence
from fedatlas.federation.log import writers
from fedatlas.federation.record import (
    claim,
    describe,
    is_finished,
    note_change,
    note_code,
    note_processor,
    now,
)
from fedatlas.federation.usable import differing_versions
from fedatlas.learning.loop import make_optimizer
from fedatlas.transport import wire
from fedatlas.transport.allocator import return_freed_blocks
from fedatlas.transport.clients import Released, SiteClients, Transport
from fedatlas.transport.egress import Asked, Declaration, NetForms
from fedatlas.transport.frames import Question
from fedatlas.transport.host import Host
from fedatlas.transport.local import InProcess, Workers
from fedatlas.transport.pipeline import ServerPipeline
from fedatlas.transport.rounds import (
    Round,
    RunFolder,
    read_json,
    read_run,
    require_seal,
    run,
    sealed,
    to_json,
)
from fedatlas.transport.stages import HeldByAll
from fedatlas.transport.store import DATA, MemoryStore, guard_data, read_whole, waiting_for_room, write_atomic

Watch = Callable[[str, str, dict[str, float], dict[str, float]], None]
Tell = Callable[[str], None]
RELEASED = "released.json"
"""In the folder of a run with differential privacy: what ε rests on (`clients.Released`)."""
TOGETHER = 1 << 28
"""Bytes of models that are sent in one question for several; one that is larger is sent alone."""


@dataclass(frozen=True)
class Parties:
    """Who takes part in a run, and how they are reached.

    summaries: site -> what it has, in numbers (`SiteData.summary`); training: the names that are asked to train,
    which is "pooled" alone for a method that merges the data. about: goes with every question. instances: site ->
    the installation that joined, or, of a site that was away then, that answers first; another one that answers under its
    name is refused. memories: site -> the versions
    of its private memory of this run. changed: sites whose data are not those with which the run began.
    """

    design: Design
    summaries: Mapping[str, Mapping[str, Any]]
    training: Sequence[str]
    transport: Transport
    about: Mapping[str, Any] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
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
    for note in slow_precision(federation):
        tell(f"note: {note}")
    transport: Transport
    if federation.engine.workers:
        _require_elsewhere(federation)
        arguments = {"run": str(folder.path), "cache": str(cache)}
        log = folder.path / "sites" / "workers.log"
        n = min(federation.engine.workers, len(federation.sites))  # each site answers one question at a time
        transport = Workers("fedatlas.federation.session:open_hosts", arguments, n, log)
        transport.start()
    else:
        transport = InProcess(Hosts(experiment, folder).answer)
    try:
        return _local_parties(experiment, folder, transport, tell, data_changed)
    except BaseException:
        transport.close()
        raise


def _require_elsewhere(federation: Federation) -> None:
    """Raises FederationError for a method, a net or a loss that other processes do not know."""
    for others, name in extensible(federation):
        others.require_elsewhere(name, f"engine.workers is {federation.engine.workers}")


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
            each[site] = {"members": _payload([Member.of_site(reply)]), "model": f"local/{site}"}
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
        members = [Member.of_site(kept)]
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
    claim(folder, federation, resume, tell)
    if resume and is_finished(folder, federation):
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
        for note in design.examine(net) if begins else ():
            tell(f"note: {note}")
        describe(folder, design, parties.summaries, net)
        if parties.changed:
            note_change(folder, parties.changed)
            tell(f"goes on with data that changed since the run began, at {', '.join(parties.changed)}")
        chosen, own, scores = local_models(federation), BestLocals(folder), dict[str, float]()
        lacking = list[str]()
        first = design.method.best_from(federation.rounds)
        best = Best(folder, evaluation.select_weights, selects(federation), first)
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
                note_processor(folder, federation.engine.device, tell)
                note_code(folder, federation, tell)

        def validate(state: State) -> list[dict[str, Any]]:
            if state.round % evaluation.every and state.round != federation.rounds:
                return []
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
            evaluators=running.evaluators,
            after_round=keep,
        )
        folder.keep_model("last", state.round)
        _finish(running, federation, tell)


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
                fitted[model.name] = running.design.task.fit(
                    got.histograms, got.rows, federation, running.design.space
                )
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
    write_atomic(folder.path / "run.json", to_json({**info, "rows": len(evaluated.rows), "finished": now()}))


def _released(folder: RunFolder) -> Released:
    """What ε rests on: all that was ever accounted, in rounds that were lost or broke off, too. A folder of an older version
    keeps no such file: then what its complete rounds say, or what their sites logged. Raises RunFolderError for a file that is damaged or
    was changed."""
    file = folder.path / RELEASED
    if file.exists():
        told = require_object(
            file, read_json(file), most=int, fewest=int, sites=dict | None, heard=dict | None
        )
        require_seal(file, told)
        return Released(
            **{of.name: told[of.name] for of in fields(Released) if told.get(of.name) is not None}
        )
    released = Released()
    for log, _ in folder.records():
        counts = {
            site: int(numbers["releases"]) for site, numbers in log["sites"].items() if "releases" in numbers
        }
        if log.get("released"):
            released = Released(**log["released"])
        elif counts:
            released = released.after(counts)
    return released


def _keep_released(folder: RunFolder, released: Released) -> None:
    write_atomic(folder.path / RELEASED, to_json(sealed(asdict(released))))


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


def summary(path: Path) -> dict[str, Any]:
    """What a run came to, as plain values: best round, and per model, site and class the mean Dice of outlines, the AUROC of
    findings; of a run that has both, both."""
    rows = read_rows(path / "rows.csv")
    best = read_json(path / "best.json") if (path / "best.json").exists() else None
    there = {row["metric"] for row in rows}
    means: dict[str, Any] = {metric: {} for metric in ("dice", "auroc") if metric in there} or {"dice": {}}
    for row in rows:
        if row["metric"] in means and row["value"] is not None:
            place = means[row["metric"]]
            for column in ("split", "model", "site"):
                place = place.setdefault(row[column], {})
            place.setdefault(row["class"], []).append(row["value"])
    mean = lambda v: float(np.mean(v)) if isinstance(v, list) else {k: mean(item) for k, item in v.items()}  # noqa: E731
    return {"run": str(path), "best": best, **{metric: mean(found) for metric, found in means.items()}}
