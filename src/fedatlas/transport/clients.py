"""Whom a call asks, who answered, at what cost, and what happens when a site does not.

The same for every engine. What differs between engines is a `Transport`, which gets questions to sites and files with
answers back. What is in these files, and how it is checked, is the matter of `pipeline`.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from fedatlas.core.errors import FedAtlasError, NameMismatch, SiteLost, WireError
from fedatlas.core.options import option, options
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, Tree, load, to_tree
from fedatlas.transport.frames import Question, printable
from fedatlas.transport.pipeline import ServerPipeline
from fedatlas.transport.relay import NOT_STORED
from fedatlas.transport.reply import Passing, Refused, Spool
from fedatlas.transport.stages import DRAWN, KEPT_REPLIES, LIFTS_MASKS, SERIES, STEPS, NotHeld, Payload
from fedatlas.transport.store import lacked_room, make_room


@options
class Faults:
    """What happens when a site does not answer a call, or its answer is refused."""

    on_lost: Literal["stop", "drop", "wait"] = option(
        "stop",
        "stop: the run ends after the last complete round; drop: the round goes on without the site; wait: "
        "whoever gave no answer is asked again, and the run ends when `patience` is over.",
    )
    min_sites: int = option(1, "With drop: how many sites must answer for a round to count.", ge=1)
    deadline: float = option(
        86400.0,
        "Seconds that a site may take over one call; then it is lost. One that is seen to be gone is lost at once.",
        gt=0,
    )
    patience: float = option(86400.0, "With wait: seconds after which a call is given up.", gt=0)


NEVER = 10**9
"""Stands for the fewest sites where there was no private update yet."""


class Transport(Protocol):
    """Gets questions to sites and answers back. One whose sites keep all in the run folder has `in_run_folder`, true."""

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        """Puts all questions at once. Yields (site, None) when an answer lies in the question's file, and
        (site, reason) when none will come; every site once, in any order, within `deadline` seconds and a little from when
        its question is put, which is later where fewer can be at work at once."""
        ...

    def close(self) -> None: ...


class Count(NamedTuple):
    """How many noised models a site has sent. before: until it last began to count anew; last: what it has said since; series: the
    number that its folder drew when this count began, None where an older version kept none."""

    before: int = 0
    last: int = 0
    series: int | None = None


@dataclass(frozen=True)
class Released:
    """What ε of a run rests on, over all its calls so far. most: noised models that one site has sent; fewest: sites
    that answered such a call with one. In a sum under masks that was never opened they count for `most` alone. sites: site -> its
    `Count`. heard: call -> site -> the number that it drew with its answer, or its count where an older version drew none, of
    the last calls. epsilon: ε of all that, None without noise or where nobody says it."""

    most: int = 0
    fewest: int = NEVER
    sites: Mapping[str, Sequence[Any]] = field(default_factory=dict, compare=False)
    heard: Mapping[str, Mapping[str, int]] = field(default_factory=dict, compare=False)
    epsilon: float | None = field(default=None, compare=False)

    def after(
        self,
        releases: Mapping[str, int],
        *,
        series: Mapping[str, int] = MappingProxyType({}),
        drawn: Mapping[str, int] = MappingProxyType({}),
        call: str = "",
        opened: bool = True,
    ) -> "Released":
        """With a further call. releases: so many has each site sent that answered it, as its own folder counts; series: the number that
        the folder drew when it began to count; drawn: that which it drew with its answer. With another series, or where the
        count does not rise, the folder was lost or is an older copy, and what the site had said is added; but not where it drew
        the same for the same call, which is the very answer of then. opened: what they answered could be seen, alone or in a
        sum."""
        sites, then = dict(self.sites), self.heard.get(call, {})
        now = {site: drawn.get(site, told) for site, told in releases.items()}
        for site, told in releases.items():
            count = Count(*sites.get(site, ()))
            same = count.series in (None, series.get(site))
            if same and now[site] == then.get(site):
                continue
            goes_on = same and told > count.last
            sites[site] = Count(
                count.before if goes_on else count.before + count.last, told, series.get(site)
            )
        most = max(self.most, *(sites[site][0] + sites[site][1] for site in releases))
        others = [(name, of) for name, of in self.heard.items() if name != call]
        heard = dict([*others, (call, now)][-KEPT_REPLIES:])
        return Released(most, min(self.fewest, len(releases)) if opened else self.fewest, sites, heard)


@dataclass(frozen=True)
class Call:
    """A call as the run's log keeps it: numbers and cost of the sites that answered, the reason of each that is lost."""

    function: str
    logs: dict[str, dict[str, float]]
    cost: dict[str, dict[str, float]]
    lost: dict[str, str]
    epsilon: float | None = None
    """With differential privacy: ε of all that left the site with most releases so far."""
    released: Released | None = None
    """What ε rests on; None where nothing private was answered."""

    def in_order(self) -> "Call":
        """This call with its sites sorted: the log does not show who answered first."""
        named = {name: dict(sorted(getattr(self, name).items())) for name in ("logs", "cost", "lost")}
        return replace(self, **named)


@dataclass
class SiteClients:
    """`core.contract.Clients` over a transport.

    scratch: a folder for payloads and replies; only those of the last call, and of the last one that brought
    models, are kept.
    about: what goes with every question, see `Question`.
    pipeline: what is done to questions and answers on the way; a site whose answer it refuses is lost for the call.
    instances: site -> the installation that may answer for it; of a site that is not named, the first that does.
    watch: called with every usable answer: (site, function, log, cost). tell: called with sentences for a person.
    """

    sites: list[str]
    transport: Transport
    scratch: Path
    faults: Faults = field(default_factory=lambda: Faults())  # type: ignore[call-arg]
    about: Mapping[str, Any] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    watch: Callable[[str, str, dict[str, float], dict[str, float]], None] | None = None
    pipeline: ServerPipeline = field(default_factory=ServerPipeline)
    lost: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    models: Spool | None = None
    """The last replies that held a model each: the sites' local models."""
    remembered: dict[str, str] = field(default_factory=dict)
    """site -> the version of its private memory after its last usable answer, "" if it keeps none."""
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """site -> function -> the seconds of its last usable answer; "" for the last of any function."""
    answering: dict[str, str] = field(default_factory=dict)
    """site -> the installation that gave its last usable answer."""
    others: list[str] = field(default_factory=list)
    """Sites that are called only where a call names them: they are scored, and train nothing."""
    make_net: Callable[..., nn.Module] | None = None
    """Makes a net of the federation for the server's own use: "main", or a name that the method declares; `initial` says
    whether it needs its first weights."""
    sample_shape: tuple[int, ...] = ()
    seed: int = 0
    """The federation's."""
    threads: int = 1
    """Processor threads that the server computes with, as many as a site."""
    series: dict[str, int] = field(default_factory=dict)
    """site -> the series of its count of releases, with its last usable answer that had one."""
    drawn: dict[str, int] = field(default_factory=dict)
    """site -> the number that it drew with its last usable answer, where that was private and had one."""
    released: Released = field(default_factory=Released)
    keep_released: Callable[[Released], None] = lambda released: None
    """Stores what ε rests on as soon as it is known, since a round that breaks off has released all the same."""
    tell: Callable[[str], None] = lambda text: None
    _round: int = 0
    _call: int = 0

    def __post_init__(self) -> None:
        self.sites, self.others = sorted(self.sites), sorted(self.others)

    @property
    def everyone(self) -> list[str]:
        """Every site that can be called."""
        return sorted([*self.sites, *self.others])

    def begin(self, round: int) -> None:
        """A round begins, counted from 1; 0 is what a method does at its start. Calls are numbered from 0."""
        self._round, self._call = round, 0
        self.calls = []

    @property
    def rng(self) -> torch.Generator:
        return generator(self.seed, "server", self._round)

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        if self.make_net is None:
            raise FedAtlasError(f"a net {name!r} was asked for at the server, which has none here")
        torch.set_num_threads(self.threads)
        net = self.make_net(name, initial=model is None)
        if model is not None:
            load(net, model)
        return net.eval()

    def call(
        self,
        function: Callable[..., Any],
        *,
        each: Mapping[str, dict[str, Any]] | None = None,
        **arguments: Any,
    ) -> Spool:
        name = function.__name__
        if not getattr(function, "at_site", False):
            raise FedAtlasError(
                f"{function.__qualname__} is not marked @at_site; only such functions run at a site"
            )
        chosen = self.sites if each is None else sorted(each)
        unknown = [site for site in chosen if site not in self.everyone]
        if unknown:
            raise FedAtlasError(f"call of {name}: no site {unknown[0]!r}; known: {', '.join(self.everyone)}")
        if name not in self.pipeline.declaration.sends:
            raise FedAtlasError(f"call of {name}: what it answers is not declared (`sends`)")
        own: dict[str, dict[str, Any]] = {site: to_tree((each or {}).get(site, {})) for site in chosen}  # type: ignore[misc]
        payload = self.pipeline.pack(to_tree(arguments), own)  # type: ignore[arg-type]
        record, steps, sums = Call(name, {}, {}, {}), list[str](), self.pipeline.terms.sums(name)
        try:
            if sums:
                replies = self._summed(name, chosen, payload, record, steps)
            else:
                replies = self._ask(name, chosen, payload, record)
        finally:  # in a call that breaks off, who answered has released all the same
            record = self._accounted(record.in_order(), opened=not sums or LIFTS_MASKS in steps)
        if sums:
            self.models = None  # nobody but the sites knows theirs
        elif replies.has("model"):
            self.models = replies
        self._call += 1
        self.calls.append(record)
        self._forget()
        return replies

    def _summed(
        self, function: str, chosen: Sequence[str], payload: Payload, record: Call, steps: list[str]
    ) -> Spool:
        """The call with its answers summed under masks: one reply, of nobody. steps: gets the functions that are asked."""
        without = dict[str, str]()

        def ask(name: str, sites: Sequence[str], payload: Payload) -> Spool:
            steps.append(name)
            replies = self._ask(name, sites, payload, record)
            if name == function:
                without.update(self.lost)
            return replies

        attempt = f"{self.about.get('run', '')}/{self._round}/{self._call}"
        value = self.pipeline.secure_sum(ask, function, chosen, payload, attempt)
        self.lost = without  # what a site sent that was lost later is in the sum
        path = self._folder() / "sum.fa"
        self.pipeline.write(path, {"value": value})
        return Spool({"(sum)": path})

    def _ask(self, function: str, chosen: Sequence[str], payload: Payload, record: Call) -> Spool:
        """Asks sites for one answer each; those that can be used."""
        questions, sizes = self._questions(function, chosen, payload.sent, payload.own)
        with contextlib.suppress(OSError):  # for who watches the run, `report.watch`
            (self._folder() / function / "asked.txt").write_text("\n".join(chosen), encoding="utf-8")
        arguments = {site: payload.at(site) for site in chosen}
        unmended = self._collect(questions, sizes, arguments, record)
        behind = sorted(site for site, reason in record.lost.items() if reason.startswith(NotHeld.__name__))
        whole = self.pipeline.whole(payload) if behind else None
        if whole is not None:
            own = {site: whole | payload.own.get(site, {}) for site in behind}
            again, more = self._questions(function, behind, payload.sent, own)
            questions |= again
            for site in behind:
                del record.lost[site]
                sizes[site] += more[site]
            unmended -= set(behind)
            unmended |= self._collect(again, sizes, arguments, record)
        self.lost = dict(sorted(record.lost.items()))
        files = {site: questions[site].reply for site in chosen if site not in record.lost}
        self._judge(function, chosen, len(files), sorted(unmended))
        return Spool(files)

    def _accounted(self, record: Call, *, opened: bool = True) -> Call:
        """The record with what privacy was spent so far. opened: see `Released.after`."""
        releases = {site: int(log["releases"]) for site, log in record.logs.items() if "releases" in log}
        if not releases:
            return record
        call = f"{self._round}/{self._call}"
        told = {"series": self.series, "drawn": self.drawn}
        self.released = self.released.after(releases, **told, call=call, opened=opened)
        self.keep_released(self.released)  # whatever becomes of ε
        spent = self.pipeline.epsilon(self.released.most, self.released.fewest)
        self.released = replace(self.released, epsilon=spent)
        self.keep_released(self.released)
        return replace(record, epsilon=spent, released=self.released)

    def _folder(self) -> Path:
        return self.scratch / f"{self._round:06d}-{self._call:03d}"

    def _questions(
        self, function: str, chosen: Sequence[str], sent: Tree, own: Mapping[str, dict[str, Any]]
    ) -> tuple[dict[str, Question], dict[str, int]]:
        """A question per site, its payloads written, and how many bytes go to each."""
        folder = self._folder() / function
        shared = folder / "to-all.fa"
        written = self.pipeline.write(shared, sent)
        questions, sizes = {}, {}
        for site in chosen:
            path = folder / f"to-{site}.fa" if own.get(site) else None
            sizes[site] = written + (self.pipeline.write(path, own[site]) if path else 0)
            reply = folder / f"{site}.fa"
            reply.unlink(missing_ok=True)
            questions[site] = Question(
                site,
                function,
                self._round,
                self._call,
                shared,
                path,
                reply,
                self.about,
                self.remembered.get(site),
            )
        return questions, sizes

    def _collect(
        self,
        questions: Mapping[str, Question],
        sizes: Mapping[str, int],
        arguments: Mapping[str, dict[str, Any]],
        record: Call,
    ) -> set[str]:
        """Asks until every site has answered or is lost, as the federation's rule says. arguments: those of the function
        at each site. Returns the sites whose answers were refused for a reason that does not pass by itself."""
        began = time.monotonic()
        limits = {site: self.pipeline.limits(asked, arguments[site]) for site, asked in questions.items()}
        questions = {site: replace(asked, most=sum(limits[site])) for site, asked in questions.items()}
        open_, reasons, refused = dict(questions), dict[str, str](), set[str]()
        make_room(self.scratch, sum(tensors for _, tensors in limits.values()))
        while open_:
            silent = {}
            waiting = sorted(open_.values(), key=lambda q: -self._expected(q))
            for site, reason in self.transport.ask(waiting, self.faults.deadline):
                if reason is not None:
                    silent[site] = printable(reason, LONGEST_REASON)
                    continue
                try:
                    self._receive(questions[site], sizes[site], arguments[site], record)
                except Passing as error:
                    silent[site] = printable(str(error), LONGEST_REASON)
                except Refused as error:
                    record.lost[site] = printable(str(error), LONGEST_REASON)
                    refused.add(site)
            record.lost.update(silent)
            again = sorted(site for site in silent if self._may_wait(silent[site]))
            if not again or time.monotonic() - began >= self.faults.patience:
                break
            for site in again:
                if not _same_but_numbers(reasons.get(site, ""), silent[site]):
                    self.tell(f"waits for {site} ({silent[site]}), which is asked again")
                del record.lost[site]
            open_, reasons = {site: questions[site] for site in again}, silent
            time.sleep(min(1.0, self.faults.patience))
        return refused

    def _may_wait(self, reason: str) -> bool:
        """Is a site that gave no usable answer asked again? By the federation's rule, and always where the run folder lacked
        room, for which the run itself waits."""
        return self.faults.on_lost == "wait" or (
            self._failed_here(reason) and lacked_room(self.scratch, reason)
        )

    def _failed_here(self, reason: str) -> bool:
        """Did the server's own storage fail, and no site? For an answer, or, where sites write into the run folder, because
        that lacked room."""
        if reason.startswith(NOT_STORED):
            return True
        return getattr(self.transport, "in_run_folder", False) and lacked_room(self.scratch, reason)

    def _expected(self, question: Question) -> float:
        """The seconds that a site took over its last call of a function, or over its last call at all; sites that take
        longest are asked first, so that no worker is left waiting for one that began last."""
        seconds = self.seconds.get(question.site, {})
        return seconds.get(question.function, seconds.get("", 0.0))

    def _receive(self, question: Question, sent: int, arguments: dict[str, Any], record: Call) -> None:
        """Takes the reply to a question into the record. sent: bytes that went to the site. Raises Refused for one that
        cannot be used, and of these Passing where another one may be."""
        site = question.site
        try:
            tree, size = self.pipeline.read(question, arguments, self.instances.get(site))
        except Exception as error:  # what a site sends ends no run, whatever it is
            refusal = _refusal(error)
            with contextlib.suppress(OSError):
                question.reply.unlink()
            raise refusal from None
        if self.pipeline.terms.private(question.function):
            self.series[site] = int(tree["log"].pop(SERIES))
            self.drawn.pop(site, None)  # an answer that an older version kept has none
            if DRAWN in tree["log"]:
                self.drawn[site] = int(tree["log"].pop(DRAWN))
        self.answering[site] = tree["from"]
        self.instances.setdefault(site, tree["from"])
        # a step of a sum begins with no memory, and names the newest that is there
        if question.function not in STEPS:
            self.remembered[site] = tree["memory"]
        cost = {**tree["cost"], "bytes_down": sent, "bytes_up": size}
        spent = record.cost.setdefault(site, {})
        for key, value in cost.items():
            spent[key] = max(spent.get(key, 0.0), value) if key == "peak_mb" else spent.get(key, 0) + value
        seconds = float(tree["cost"].get("seconds", 0.0))
        self.seconds.setdefault(site, {}).update({question.function: seconds, "": seconds})
        record.logs[site] = {**record.logs.get(site, {}), **tree["log"]}
        if self.watch:
            self.watch(site, question.function, record.logs[site], cost)

    def _judge(self, function: str, chosen: Sequence[str], answered: int, refused: Sequence[str]) -> None:
        """Raises SiteLost where the federation's rule is to stop, and where the server's own storage failed, for which no rule
        leaves a site out. refused: who is lost for a reason that does not pass."""
        if not self.lost:
            return
        reasons = "\n".join(f"  {site}: {reason}" for site, reason in self.lost.items())
        where = f"round {self._round}, {function}"
        if any(map(self._failed_here, self.lost.values())):
            rule = "the server's own storage failed; no site is left out for that, whatever faults.on_lost is"
            raise SiteLost(f"{where}: no answer from\n{reasons}\nComplete rounds are kept. ({rule})")
        if self.faults.on_lost != "drop":
            rule = f"faults.on_lost is {self.faults.on_lost}"
            if self.faults.on_lost == "wait":
                rule = f"{rule}; the {self.faults.patience:g} s of waiting are over"
                if refused:
                    rule = f"the answer of {', '.join(refused)} was refused, which waiting cannot mend"
            raise SiteLost(f"{where}: no usable answer from\n{reasons}\nComplete rounds are kept. ({rule})")
        if answered < min(self.faults.min_sites, len(chosen)):
            raise SiteLost(
                f"{where}: {answered} sites answered, faults.min_sites is {self.faults.min_sites}; lost:\n{reasons}"
            )

    def _forget(self) -> None:
        """Removes what no later call reads."""
        kept = {self._folder_of(self._call - 1)}
        kept |= {path.parent.parent for path in self.models.files.values()} if self.models else set()
        for folder in sorted(self.scratch.glob("[0-9]*-[0-9]*")):
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_of(self, call: int) -> Path:
        return self.scratch / f"{self._round:06d}-{call:03d}"


def _same_but_numbers(one: str, other: str) -> bool:
    """Are two reasons one, as of two damaged answers that differ in their size?"""
    return re.sub(r"\d+", "", one) == re.sub(r"\d+", "", other)


def _refusal(error: Exception) -> Refused:
    """Why an answer cannot be used, of what was raised when it was read: Passing where it did not arrive as it was sent."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, OSError):
        return Passing(f"its answer cannot be read ({error.strerror or error})")
    if isinstance(error, WireError) and error.damaged:
        return Passing(str(error))
    told = isinstance(error, WireError | NameMismatch | FloatingPointError)
    return Refused(str(error) if told else f"its answer cannot be used ({type(error).__name__}: {error})")


LONGEST_REASON = 4000
"""Characters of the reason why a site is lost."""
