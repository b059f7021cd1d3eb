"""The server's end of the wire: one call to many sites, its answers checked and kept on disk, its losses judged.

The same for every engine. What differs between engines is a `Transport`, which gets questions to sites and files
with answers back.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from fedatlas.core.errors import FedAtlasError, NameMismatch, SiteLost, WireError
from fedatlas.core.options import option, options
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, Tree, is_finite, load, require_same, to_tree
from fedatlas.transport import egress, wire
from fedatlas.transport.egress import Declaration, printable
from fedatlas.transport.exchange import EXTRA, NotHeld, ServerExchange, new_context
from fedatlas.transport.frames import Question
from fedatlas.transport.protection import secure
from fedatlas.transport.store import make_room, read_whole, write_atomic
from fedatlas.transport.wire import Message


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
    """Gets questions to sites and answers back."""

    def ask(self, questions: Sequence[Question], deadline: float) -> Iterator[tuple[str, str | None]]:
        """Puts all questions at once. Yields (site, None) when an answer lies in the question's file, and
        (site, reason) when none will come; every site once, in any order, within `deadline` seconds and a little."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Call:
    """One call for the log: sites that answered with their cost, lost sites with the reason."""

    function: str
    logs: dict[str, dict[str, float]]
    cost: dict[str, dict[str, float]]
    lost: dict[str, str]
    epsilon: float | None = None
    """With differential privacy: ε of all that left the site with most releases so far."""

    def in_order(self) -> "Call":
        """The same with sites sorted: nothing may tell who was first."""
        return Call(
            self.function,
            dict(sorted(self.logs.items())),
            dict(sorted(self.cost.items())),
            dict(sorted(self.lost.items())),
        )


class Spool:
    """The replies to one call, kept on disk: `core.contract.Replies`."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(sorted(files.items()))
        self.sites = list(self.files)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for site, path in self.files.items():
            tree = wire.decode(read_whole(path), copy=False)
            assert isinstance(tree, dict)
            yield site, tree["value"]  # type: ignore[misc]
            del tree

    def each(self, key: str) -> Iterator[Any]:
        for path in self.files.values():
            tree: Any = wire.decode(read_whole(path), copy=False)
            item = tree["value"][key]
            del tree
            yield item
            del item

    def plain(self, key: str) -> list[Any]:
        return [self._forms(site)[key] for site in self.sites]

    def has(self, key: str) -> bool:
        """Does every reply hold this key?"""
        return bool(self.sites) and all(key in self._forms(site) for site in self.sites)

    def _forms(self, site: str) -> dict[str, Any]:
        with self.files[site].open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            tree = wire.plain(memoryview(data))
        assert isinstance(tree, dict) and isinstance(tree["value"], dict)
        return tree["value"]


@dataclass
class SiteClients:
    """`core.contract.Clients` over a transport.

    scratch: a folder for payloads and replies; only those of the last call, and of the last one that brought
    models, are kept.
    declaration: what sites may answer; every other answer is refused, and its site is lost for the call.
    about: what goes with every question, see `Question`.
    instances: site -> the installation that may answer for it; one that is not named may be any.
    watch: told of every usable answer: (site, function, log, cost). tell: is given sentences for a person.
    """

    sites: list[str]
    transport: Transport
    scratch: Path
    faults: Faults = field(default_factory=lambda: Faults())  # type: ignore[call-arg]
    about: Mapping[str, Any] = field(default_factory=dict)
    instances: Mapping[str, str] = field(default_factory=dict)
    watch: Callable[[str, str, dict[str, float], dict[str, float]], None] | None = None
    exchange: ServerExchange = field(default_factory=ServerExchange)
    declaration: Declaration = field(default_factory=Declaration)
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
    make_net: Callable[[str], nn.Module] | None = None
    """Makes a net of the federation for the server's own use: "main", or a name that the method declares."""
    sample_shape: tuple[int, ...] = ()
    seed: int = 0
    """The federation's."""
    threads: int = 1
    """Processor threads that the server computes with, as many as a site."""
    least: int = NEVER
    """The fewest sites that made a private update in any call so far."""
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
        net = self.make_net(name)
        if model is not None:
            load(net, model)
        return net.eval()

    def call(
        self,
        function: Callable[..., Any],
        *,
        each: Mapping[str, dict[str, Any]] | None = None,
        **payload: Any,
    ) -> Spool:
        if not getattr(function, "at_site", False):
            raise FedAtlasError(
                f"{function.__qualname__} is not marked @at_site; only such functions run at a site"
            )
        chosen = self.sites if each is None else sorted(each)
        unknown = [site for site in chosen if site not in self.everyone]
        if unknown:
            raise FedAtlasError(
                f"call of {function.__name__}: no site {unknown[0]!r}; known: {', '.join(self.everyone)}"
            )
        if function.__name__ not in self.declaration.sends:
            raise FedAtlasError(f"call of {function.__name__}: what it answers is not declared (`sends`)")
        form: dict[str, Any] = to_tree(payload)  # type: ignore[assignment]
        own: dict[str, dict[str, Any]] = {site: to_tree((each or {}).get(site, {})) for site in chosen}  # type: ignore[misc]
        record = Call(function.__name__, {}, {}, {})
        shared, model = self.exchange.pack(form)
        if model is not None and isinstance(form.get("model"), dict):  # an evaluation's is a name
            form = form | {"model": model}  # as the sites hold it
        if self.exchange.masks(function.__name__):
            replies = self._summed(function.__name__, chosen, shared, form, own, record)
        else:
            answered = self._round_trip(function.__name__, chosen, shared, form, own, record)
            replies = Spool(answered)
            if replies.has("model"):
                self.models = replies
        self._call += 1
        self.calls.append(self._accounted(record.in_order()))
        self._forget()
        return replies

    def _round_trip(
        self,
        function: str,
        chosen: Sequence[str],
        shared: Tree,
        form: dict[str, Any],
        own: Mapping[str, dict[str, Any]],
        record: Call,
    ) -> dict[str, Path]:
        """Asks sites for one answer each; the files of those that can be used.

        shared: what goes to all, as it is sent; form: the same as the sites will hold it.
        """
        questions, sizes = self._questions(function, chosen, shared, own)
        forms = {site: form | own.get(site, {}) for site in chosen}
        self._collect(questions, sizes, forms, record)
        behind = sorted(site for site, reason in record.lost.items() if reason.startswith(NotHeld.__name__))
        if behind and self.exchange.holds(form):
            whole = {site: self.exchange.whole(form) | own.get(site, {}) for site in behind}
            questions |= (again := self._questions(function, behind, shared, whole)[0])
            for site in behind:
                del record.lost[site]
                sizes[site] += _size(again[site].own)
            self._collect(again, sizes, forms, record)
        self.lost = dict(sorted(record.lost.items()))
        files = {site: questions[site].reply for site in chosen if site not in record.lost}
        self._judge(function, chosen, len(files))
        return files

    def _summed(
        self,
        function: str,
        chosen: Sequence[str],
        shared: Tree,
        form: dict[str, Any],
        own: Mapping[str, dict[str, Any]],
        record: Call,
    ) -> Spool:
        """The call with its answers summed under masks: one reply, of nobody, with the weighted mean of the models
        and the sum of the weights. See `secure` for the four steps."""
        choice = self.exchange.terms.secure
        assert choice is not None
        context = new_context(str(self.about.get("run", "")), self._round, self._call)

        def step(name: str, sites: Sequence[str], payload: dict[str, Any]) -> dict[str, Any]:
            files = self._round_trip(name, sites, payload, payload, {}, record)
            return {site: value["answer"] for site, value in Spool(files)}

        publics = step("secure_advertise", chosen, {"context": context})
        sealed = step("secure_share", sorted(publics), {"context": context, "publics": publics})
        group = sorted(sealed)
        extra = {
            site: own.get(site, {})
            | {EXTRA: {"context": context, "ciphertexts": {peer: sealed[peer][site] for peer in group}}}
            for site in group
        }
        masked = Spool(self._round_trip(function, group, shared, form, extra, record))
        survivors = masked.sites
        dropped = [site for site in group if site not in survivors]
        told = {"context": context, "survivors": survivors, "dropped": dropped}
        reveals = step("secure_reveal", survivors, told)
        total = secure.unmask(
            secure.ring_sum(masked.each("masked")),
            reveals,
            publics,
            survivors=survivors,
            dropped=dropped,
            threshold=secure.threshold_of(choice, self.exchange.terms.sites),
            context=context,
        )
        model, weight = secure.unpack(total, form["model"], choice, sites=self.exchange.terms.sites)
        path = self._folder() / "sum.fa"
        write_atomic(path, wire.encode({"value": {"model": model, "n": weight}}), durable=False)  # type: ignore[dict-item]
        self.models = None  # nobody but the sites knows theirs
        return Spool({"(sum)": path})

    def _accounted(self, record: Call) -> Call:
        """The record with what privacy was spent so far."""
        releases = [int(log["releases"]) for log in record.logs.values() if "releases" in log]
        if not releases:
            return record
        self.least = min(self.least, len(releases))
        return replace(record, epsilon=self.exchange.epsilon(releases, self.least))

    def _folder(self) -> Path:
        return self.scratch / f"{self._round:06d}-{self._call:03d}"

    def _questions(
        self, function: str, chosen: Sequence[str], form: Tree, own: Mapping[str, dict[str, Any]]
    ) -> tuple[dict[str, Question], dict[str, int]]:
        """A question per site, its payloads written, and how many bytes go to each."""
        folder = self._folder() / function
        shared = folder / "to-all.fa"
        written = _write(shared, form)
        questions, sizes = {}, {}
        for site in chosen:
            path = folder / f"to-{site}.fa" if own.get(site) else None
            sizes[site] = written + (_write(path, own[site]) if path else 0)
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
        forms: Mapping[str, dict[str, Any]],
        record: Call,
    ) -> None:
        """Asks until every site has answered or is lost, as the federation's rule says."""
        began = time.monotonic()
        open_, told = dict(questions), dict[str, str]()
        make_room(self.scratch, sum(self._most(question, forms[site])[1] for site, question in open_.items()))
        while open_:
            silent = {}
            waiting = sorted(open_.values(), key=lambda q: -self._expected(q))
            for site, reason in self.transport.ask(waiting, self.faults.deadline):
                if reason is not None:
                    silent[site] = printable(reason, LONGEST_REASON)
                    continue
                try:
                    self._receive(questions[site], sizes[site], forms[site], record)
                except Passing as error:
                    silent[site] = printable(str(error), LONGEST_REASON)
            record.lost.update(silent)
            over = time.monotonic() - began >= self.faults.patience
            if self.faults.on_lost != "wait" or over:
                return
            for site in sorted(silent):
                if told.get(site) != silent[site]:
                    self.tell(f"waits for {site} ({silent[site]}), which is asked again")
            open_, told = {site: questions[site] for site in sorted(silent)}, silent
            for site in silent:
                del record.lost[site]
            if silent:
                time.sleep(min(1.0, self.faults.patience))

    def _expected(self, question: Question) -> float:
        """The seconds that a site took over its last call of a function, or over its last call at all; sites that take
        longest are asked first, so that no worker is left waiting for one that began last."""
        seconds = self.seconds.get(question.site, {})
        return seconds.get(question.function, seconds.get("", 0.0))

    def _receive(self, question: Question, sent: int, form: dict[str, Any], record: Call) -> None:
        """Checks an answer, and keeps it if it can be used. Raises Passing for an error that may pass by itself."""
        site = question.site
        try:
            tree, size = self._answer(question, form)
        except OSError as error:
            record.lost[site] = f"its answer cannot be read ({error.strerror or error})"
            return
        except Passing:
            question.reply.unlink(missing_ok=True)
            raise
        except (Refused, WireError, NameMismatch, FloatingPointError) as error:
            record.lost[site] = printable(str(error), LONGEST_REASON)
            question.reply.unlink(missing_ok=True)
            return
        self.answering[site] = tree["from"]
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

    def _kinds(self, question: Question, form: dict[str, Any]) -> tuple[dict[str, str], egress.Asked]:
        """Kinds of values in a site's answer, and the declaration to check them against."""
        function = question.function
        asked = self.declaration.asked(question.site, function, form)
        return self.exchange.kinds(function, self.declaration.sends.get(function, {}), form), asked

    def _most(self, question: Question, form: dict[str, Any]) -> tuple[int, int]:
        """The bytes that names and plain values, and that tensors of an answer may have."""
        kinds, asked = self._kinds(question, form)
        return egress.largest(kinds, self.declaration, asked)

    def _answer(self, question: Question, form: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """An answer as a tree with "value", "log", "cost", "from" and "memory", and its bytes; the model in it is
        expanded, in its file too. Nothing is read that is larger than an answer as declared, and no tensor before
        names, kinds and shapes were found to be right.

        form: the question's payload as the site holds it. Raises Refused, WireError or NameMismatch for an answer
        that cannot be used, OSError where it cannot be read.
        """
        function, path, declaration = question.function, question.reply, self.declaration
        kinds, asked = self._kinds(question, form)
        names, tensors = self._most(question, form)
        size, most = path.stat().st_size, names + tensors
        if size > most:
            raise Refused(
                f"its answer has {size:,} bytes; one that holds what is declared has at most {most:,}"
            )
        message = Message.of(read_whole(path), most=names)
        plain = opened(message.forms(), question, self.instances.get(question.site))
        problem = (
            egress.problem_of(plain["value"], kinds, declaration, asked)
            or egress.problem_of_log(plain["log"])
            or self.exchange.problem_of_log(function, plain["log"])
        )
        tree: Any = message.tree(copy=False) if problem is None else {"value": {}}
        problem = problem or egress.problem_of(tree["value"], kinds, declaration, asked)
        if problem:
            raise Refused(f"its answer is not as declared: {problem}")
        if self.exchange.expand(tree["value"], form.get("model")):
            write_atomic(path, wire.encode(tree), durable=False)
        check_answer(tree["value"], form)
        return tree, size

    def _judge(self, function: str, chosen: Sequence[str], answered: int) -> None:
        if not self.lost:
            return
        reasons = "\n".join(f"  {site}: {reason}" for site, reason in self.lost.items())
        where = f"round {self._round}, {function}"
        if self.faults.on_lost != "drop":
            raise SiteLost(
                f"{where}: no usable answer from\n{reasons}\nComplete rounds are kept. (faults.on_lost is "
                f"{self.faults.on_lost})"
            )
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


def _write(path: Path, form: Tree) -> int:
    data = wire.encode(form)
    write_atomic(path, data, durable=False)
    return len(data)


def _size(path: Path | None) -> int:
    return path.stat().st_size if path else 0


class Refused(FedAtlasError):
    """An answer that cannot be used."""


class Passing(Refused):
    """An error reply whose reason may pass by itself, as a full disk at the site: who may wait asks again."""


LONGEST_REASON = 4000
"""Characters of what is told of a site that is lost."""
_COST = ("seconds", "peak_mb")
_CODE, _VERSION, _INSTANCE = (re.compile(form) for form in (r"\w{1,80}", r"[\w:.-]{0,80}", r"[\w-]{0,80}"))


def opened(tree: Any, question: Question, instance: str | None = None) -> dict[str, Any]:
    """An answer with "value", "log", "cost", "from" and "memory", each of its type; what is in "value" is not checked.

    Raises Refused for an error reply, an answer to another question and everything that is no answer of ours.
    """
    if not isinstance(tree, dict) or not isinstance(tree.get("to"), dict):
        raise Refused("its answer is not the reply of a site")
    asked_for = {name: getattr(question, name) for name in ("site", "function", "round", "call")}
    if tree["to"] != asked_for:
        told = ", ".join(f"{name} {printable(str(tree['to'].get(name)), 80)}" for name in asked_for)
        wanted = ", ".join(f"{name} {value}" for name, value in asked_for.items())
        raise Refused(f"it answered another question ({told}); asked was {wanted}")
    if not isinstance(tree.get("from"), str) or not _INSTANCE.fullmatch(tree["from"]):
        raise Refused("its answer does not say which installation it is from")
    if instance is not None and tree["from"] != instance:
        raise Refused(
            "another installation answered under its name than the one that joined this run; its folder was copied "
            "and is used in two places, or was made anew"
        )
    if "error" in tree:
        raise _told(tree["error"])
    if not isinstance(tree.get("value"), dict):
        raise Refused(f"answered a {type(tree.get('value')).__name__}; functions at a site return a dict")
    if set(tree) != {"to", "from", "memory", "value", "log", "cost"}:
        raise Refused("its answer lacks its log or its cost, or holds more than an answer does")
    log, cost, memory = tree["log"], tree["cost"], tree["memory"]
    if not isinstance(log, dict):
        raise Refused(f"its log is a {type(log).__name__}")
    if not isinstance(cost, dict) or set(cost) != set(_COST) or not all(map(_is_cost, cost.values())):
        raise Refused(f"its cost is not {' and '.join(_COST)}, as numbers from 0 on")
    if not isinstance(memory, str) or not _VERSION.fullmatch(memory):
        raise Refused("its answer does not name the version of its memory")
    return tree


def _is_cost(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e9


def _told(error: Any) -> Refused:
    """What an error reply says."""
    code, text = (error.get("code"), error.get("text")) if isinstance(error, dict) else (None, None)
    if not isinstance(code, str) or not _CODE.fullmatch(code) or not isinstance(text, str | None):
        return Refused("it answered with an error that says nothing")
    kind = Passing if code == OSError.__name__ else Refused
    return kind(explained(code) if text is None else f"{code}: {text}")


def check_answer(value: Mapping[str, Any], asked: Any) -> None:
    """Raises Refused for a number that is not finite, NameMismatch for a model that is not like the one sent."""
    for key, item in value.items():
        if not is_finite(item):
            raise Refused(f"its answer holds a number that is not finite, in {key!r}")
    sent, got = asked.get("model"), value.get("model")
    if isinstance(sent, dict) and isinstance(got, dict):
        require_same(sent, got, asked="its model")


_CODES = {
    "EgressError": "its answer held more than the method declares, and was not sent",
    "FloatingPointError": "its training met a number that is not finite",
    "MemoryError": "it ran out of memory",
    "OSError": "its disk or a file failed it (full?)",
    "DataChanged": "its data are not those with which this run began; put them back, or go on with --data-changed",
    "DataError": "a case or label of its data is not usable",
    "RunFolderError": "its kept memory is not usable",
    "WireError": "what it received was damaged",
    "FederationMismatch": "it agreed to another federation file, or was not joined to this run",
}


def explained(code: str) -> str:
    """What the code of an error reply means; the text of the error stays at the site."""
    meaning = _CODES.get(code, "an error")
    return f"{code}: {meaning}; the text is in errors.log at the site"
