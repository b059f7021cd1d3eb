"""The way of one call: from a method's arguments at the server to a function at a site, and its answer back.

                the server                                     a site

    arguments   clients.call(function, model=…)                function(site, model=…)
                  │                                              ▲
    compress      │ ServerPipeline.pack                          │ SitePipeline.receive
    encode        │ ServerPipeline.write                         │   the same two, undone
                  ▼                                              │
                file ─────────────── engine ──────────────────► file

    answer      the method's replies                           the function's answer
                  ▲                                              │ SitePipeline.protect
                  │ ServerPipeline.read                          │   check: as the method declares it
                  │   restore what was compressed                │   privacy: clip, add noise
                  │   (masked answers: secure_sum)               │   mask for a secure sum, or compress
                  │   check, by names, kinds and shapes          │   check: as it is sent
                  │   before a tensor is decoded                 │ Answer.encoded: encode
                  │                                              ▼ SitePipeline.leave: log
                file ◄────────────── engine ─────────────────── file

An engine sees opaque bytes, a method plain tensors; neither knows of the stages between. A stage that a federation file
does not ask for is passed by, and with all of them off a model travels as it is. Checks and log are always there: nothing
leaves a site that was not checked in the form in which it leaves, and the server, which does not know what runs at a
site, checks the same again before it decodes a tensor.

What the stages do is in `stages`, the form of a reply in `reply`, what is checked and logged in `egress`, bytes in
`wire`.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedatlas.core.contract import Method, Replies, sends_of
from fedatlas.core.errors import FedAtlasError, FederationError
from fedatlas.core.tensors import Tensors, Tree
from fedatlas.transport import egress, reply, stages, wire
from fedatlas.transport.egress import Asked, Declaration, EgressLog, Scores
from fedatlas.transport.frames import Question, shown
from fedatlas.transport.protection import privacy, secure
from fedatlas.transport.protection.compression import Comm
from fedatlas.transport.protection.privacy import Privacy
from fedatlas.transport.protection.secure import Secure
from fedatlas.transport.reply import CallId, Refused
from fedatlas.transport.stages import FOR_STAGES, STEPS, HeldByAll, HeldHere, Payload, Releases, SumMember
from fedatlas.transport.store import read_whole, write_atomic
from fedatlas.transport.wire import Data, Message

# ------------------------------------------------------------------------------------------------------- what is agreed

PLAIN_ANSWER = {"model": "model", "n": "cases"}
"""The only answer that privacy and secure sums can protect."""


@dataclass(frozen=True)
class Terms:
    """What a federation file says about what travels; both ends go by it.

    Terms are what both ends agree on; a `Policy` is what a site lets out; a `Declaration` is what an answer is checked
    against, at both ends.

    sites: how many take part. weights: "cases" or "equal", by which models are summed; None: the method needs each by
    itself. model_functions: the functions that answer with a model, whose answers pass through the stages.
    """

    comm: Comm = field(default_factory=lambda: Comm())  # type: ignore[call-arg]
    privacy: Privacy | None = None
    secure: Secure | None = None
    sites: int = 1
    weights: str | None = None
    model_functions: frozenset[str] = frozenset()

    def sums(self, function: str) -> bool:
        """Are the answers to this function summed under masks?"""
        return self.secure is not None and function in self.model_functions

    def private(self, function: str) -> bool:
        """Do clipping and noise protect the answer to this function?"""
        return self.privacy is not None and function in self.model_functions

    def compresses(self, function: str, arguments: Mapping[str, Any]) -> bool:
        """Does the model that answers this function travel as a compressed change of the one in its arguments?"""
        return (
            self.comm.up != "none"
            and function in self.model_functions
            and isinstance(arguments.get("model"), dict)
        )

    def kinds(
        self, function: str, declared: Mapping[str, str], arguments: Mapping[str, Any]
    ) -> dict[str, str]:
        """Key -> kind of what really travels when a function declares `declared`; see `egress.problem_of`."""
        if self.secure and function in STEPS:
            return {"answer": STEPS[function]}
        if self.sums(function):
            return {"masked": "masked"}
        return {**declared, "model": "compressed"} if self.compresses(function, arguments) else dict(declared)


def terms_of(
    method: Method, name: str, comm: Comm, private: Privacy | None, secure_sum: Secure | None, sites: int
) -> Terms:
    """Raises FederationError where the method, or the rest of the file, does not go with what is asked."""
    weights: str | None = method.summed
    sends = sends_of(method)
    model_functions = frozenset(function for function, keys in sends.items() if "model" in keys.values())
    if private or secure_sum:
        asked = "privacy" if private else "secure aggregation"
        if method.pooled:
            raise FederationError(
                f"method {name} trains on the union of all data; {asked} has no site to protect"
            )
        for function in sorted(sends):
            if sends[function] != PLAIN_ANSWER:
                other = ", ".join(key for key in sends[function] if key not in PLAIN_ANSWER)
                raise FederationError(
                    f"{asked}: method {name} answers {function} with {other or 'several models'} beside one model "
                    "and the number of cases, and that would not be protected; choose a method that averages models"
                )
    trains_own = "trains from tensors that are a site's own, or its group's, so that what it answers is no change of the model it is sent"
    if private and method.own_tensors:
        raise FederationError(
            f"privacy: method {name} {trains_own}; clipping would take it back to that model; choose a method that averages models"
        )
    if comm.up != "none" and not model_functions:
        raise FederationError(
            f"comm.up is {comm.up}: method {name} answers with changes in a form of its own, which is not compressed "
            "again; use none"
        )
    if comm.up == "topk" and (method.own_tensors or len(model_functions) > 1):
        why = (
            trains_own
            if method.own_tensors
            else f"answers models by {', '.join(sorted(model_functions))}, one of which is not asked in every round"
        )
        raise FederationError(
            f"comm.up is topk: method {name} {why}; what topk leaves out would then be lost, or counted twice; use int8, bf16 or none"
        )
    if secure_sum:
        if weights is None:
            raise FederationError(
                f"secure aggregation: method {name} needs the model of every site by itself, and secure aggregation "
                "shows the server their weighted sum only; choose a method that averages models"
            )
        if comm.up != "none":
            raise FederationError(
                f"comm.up is {comm.up}: what is masked for secure aggregation cannot be compressed; use none"
            )
        secure.threshold_of(secure_sum, sites)
    if private:
        bits = secure_sum.bits if secure_sum else None
        privacy.check(private, bits=bits, sites=sites, equal_weights=weights == "equal")
    return Terms(comm, private, secure_sum, sites, weights, model_functions)


@dataclass(frozen=True)
class Policy:
    """What may leave a site, and in which form.

    sends: name of a function -> what it answers, key -> kind; anything else is refused before it leaves.
    scores: name -> what the rows of an evaluation by that function may hold, given the site and the payload.
    log: where every message that leaves is written down first; None only where nothing leaves (a test).
    texts: False keeps the text of every exception at the site; the server gets a code.
    case_name: how the site calls a case in the rows of an evaluation; None: by its own name.
    terms: compression, privacy and secure sums.
    """

    sends: Mapping[str, Mapping[str, str]]
    scores: Mapping[str, Callable[..., Scores]] = field(default_factory=dict)
    log: EgressLog | None = None
    texts: bool = True
    case_name: Callable[[str], str] | None = None
    terms: Terms = field(default_factory=Terms)


def _model_in(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model that goes to all sites: the argument "model", or, for an evaluation of one model on the federation's grid,
    that model. Ensembles, and what is scored on the files' own grid, travel exactly."""
    if isinstance(arguments.get("model"), dict):
        return arguments["model"]
    members = arguments.get("members")
    if isinstance(members, list) and len(members) == 1 and arguments.get("grid") == "federation":
        return members[0]["model"]
    return None


def _with_model(arguments: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The arguments with another form of their `_model_in`."""
    if isinstance(arguments.get("model"), dict):
        return {**arguments, "model": model}
    return {**arguments, "members": [arguments["members"][0] | {"model": model}]}


# ----------------------------------------------------------------------------------------------------------- the server


@dataclass
class ServerPipeline:
    """The server's end. declaration: what sites may answer; every other answer is refused."""

    terms: Terms = field(default_factory=Terms)
    declaration: Declaration = field(default_factory=Declaration)

    def __post_init__(self) -> None:
        self.held = HeldByAll(self.terms.comm)

    def pack(self, arguments: dict[str, Any], own: Mapping[str, dict[str, Any]]) -> Payload:
        """What travels for a call with these arguments. own: site -> further ones, which travel as they are."""
        model = _model_in(arguments)
        if model is None or self.terms.comm.down == "none":
            return Payload(arguments, arguments, own)
        sent = _with_model(arguments, self.held.send(model))
        # `evaluate` names its model inside `members`
        as_held = {"model": self.held.model} if isinstance(arguments.get("model"), dict) else {}
        return Payload(sent, arguments | as_held, own)

    def whole(self, payload: Payload) -> dict[str, Any] | None:
        """All arguments of a call with the model whole, for a site that does not hold what the others do; None where
        nothing was sent as held."""
        if self.terms.comm.down == "none" or self.held.model is None or _model_in(payload.held) is None:
            return None
        return _with_model(payload.held, self.held.whole())

    @staticmethod
    def write(path: Path, tree: Tree) -> int:
        """Encodes arguments into the file that the engine carries; returns its bytes."""
        data = wire.encode(tree)
        write_atomic(path, data, durable=False)
        return len(data)

    def limits(self, question: Question, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """Upper bounds in bytes of an answer to a question: of its names and plain values, and of its tensors.

        arguments: those of the function at that site."""
        kinds, asked = self._expected(question, arguments)
        return egress.largest(kinds, self.declaration, asked)

    def read(
        self, question: Question, arguments: Mapping[str, Any], instance: str | None
    ) -> tuple[dict[str, Any], int]:
        """The reply to a question, see `reply.opened`, and the bytes in which it came; a compressed model in it is
        restored, and the file rewritten with it. Nothing is read that is larger than what is declared, and no tensor before names, kinds and shapes
        were seen to be right.

        instance: the installation that may answer; None: any. Raises Refused, WireError, NameMismatch or
        FloatingPointError for a reply that cannot be used, OSError where it cannot be read.
        """
        path, function = question.reply, question.function
        kinds, asked = self._expected(question, arguments)
        names, tensors = egress.largest(kinds, self.declaration, asked)
        size, most = path.stat().st_size, names + tensors
        if size > most:
            raise Refused(
                f"its answer has {size:,} bytes; one that holds what is declared has at most {most:,}"
            )
        message = Message.of(read_whole(path), most=names)
        forms = reply.opened(message.forms(), question, instance)
        problem = (
            egress.problem_of(forms["value"], kinds, self.declaration, asked)
            or egress.problem_of_log(forms["log"])
            or self._problem_of_releases(question, forms["log"])
        )
        # tensors are decoded only where names, kinds and shapes are right
        tree: Any = message.tree(copy=False) if problem is None else {"value": {}}
        problem = problem or egress.problem_of(tree["value"], kinds, self.declaration, asked)
        if problem:
            raise Refused(f"its answer is not as declared: {problem}")
        sent: Any = arguments.get("model")
        if self.terms.compresses(function, arguments):
            tree["value"]["model"] = stages.expanded(tree["value"]["model"], sent, self.terms.comm)
            self.write(path, tree)
        reply.check_numbers(tree["value"], sent)
        return tree, size

    def _expected(self, question: Question, arguments: Mapping[str, Any]) -> tuple[dict[str, str], Asked]:
        """Kinds of values in the answer to a question, and what they are checked against."""
        function = question.function
        kinds = self.terms.kinds(function, self.declaration.sends.get(function, {}), arguments)
        return kinds, self.declaration.asked(question.site, function, arguments)

    def _problem_of_releases(self, question: Question, log: Mapping[str, Any]) -> str | None:
        if self.terms.private(question.function):
            return stages.problem_of_releases(log, question.round, question.call)
        return "it counts releases, which are of privacy" if "releases" in log else None

    def secure_sum(
        self,
        ask: Callable[[str, Sequence[str], Payload], Replies],
        function: str,
        sites: Sequence[str],
        payload: Payload,
        attempt: str,
    ) -> dict[str, Any]:
        """The one reply, which belongs to no site, to a call whose answers are summed under masks: the weighted mean of the
        models, and the sum of the weights. ask, payload: as in `stages.secure_sum`; attempt: names the call in its run."""
        assert self.terms.secure is not None
        context = f"{attempt}/{secrets.token_hex(8)}"
        model, weight = stages.secure_sum(
            ask, function, sites, payload, self.terms.secure, of=self.terms.sites, context=context
        )
        return {"model": model, "n": weight}

    def epsilon(self, releases: int, answered: int) -> float | None:
        """ε of a site that sent so many noised models; None without privacy. answered: the fewest sites whose models went
        into one sum."""
        private, sites = self.terms.privacy, self.terms.sites
        if private is None:
            return None
        noise = privacy.noise_left(private, sites=sites, left=min(answered, sites))
        return privacy.epsilon(noise, releases, private.delta)


# --------------------------------------------------------------------------------------------------------------- a site


@dataclass
class Received:
    """A question as it came out of the pipeline. arguments: of the function, with the model as tensors; for_stages: what
    came for a stage and not for the function."""

    call: CallId
    arguments: dict[str, Any]
    for_stages: Any = None

    @property
    def model(self) -> Tensors | None:
        model = self.arguments.get("model")
        return model if isinstance(model, dict) else None


class SitePipeline:
    """A site's end. folder: the site's private one, in which all that stages remember outlives a restart.

    classes: how many the label space has; forms: as in `egress.Declaration`.
    """

    def __init__(
        self, site: str, folder: Path, policy: Policy, classes: int, forms: Callable[[str], egress.Forms]
    ) -> None:
        self.site, self.policy, self.terms = site, policy, policy.terms
        self.declaration = Declaration(policy.sends, classes, forms)
        folder, terms = folder / "exchange", policy.terms
        self.held = HeldHere(site, folder / "held")
        self.releases = Releases(terms.privacy, terms.sites, folder) if terms.privacy else None
        self.member = (
            SumMember(site, terms.secure, terms.weights == "cases", terms.sites, folder)
            if terms.secure
            else None
        )

    @property
    def secure_calls(self) -> Iterable[str]:
        """Functions that are of a stage, and not of the method: `answer_secure` answers them."""
        return STEPS if self.member else ()

    def mark(self, call: CallId, shared: Data, own: Data | None) -> str:
        """A digest of a question, by which `sent_before` knows it again; "" where it need not."""
        if not self.terms.private(call.function):
            return ""
        digest = hashlib.sha256(shared)
        digest.update(own or b"")
        return digest.hexdigest()

    def sent_before(
        self, call: CallId, mark: str, instance: str, put_back: Callable[[str, Data], None]
    ) -> Data | None:
        """The very reply that was sent to this question before, which leaves again, because a second noisy copy would tell more
        than the first; None if a new one is to be made. instance: the installation that sends it now. put_back: takes the
        version of the site's memory that the reply names, and its bytes, before it leaves."""
        if self.releases is None or not mark:
            return None
        before = self.releases.sent_before(call.round, call.call, mark)
        if before is None:
            return None
        sent, memory = before
        again, version = reply.sent_again(sent, instance)
        if memory:
            put_back(version, memory)
        self.record(call, {"": "the very answer that was sent before"}, again)
        return again

    def receive(self, call: CallId, shared: Data, own: Data | None) -> Received:
        """Decodes a question, and expands the model in it. shared, own: used by nobody else from now on.

        Raises NotHeld where the site lacks the model of which it was sent a change, and WireError for damaged bytes.
        """
        arguments: Any = wire.decode(shared, copy=False)
        further: Any = wire.decode(own, copy=False) if own is not None else {}
        if not isinstance(arguments, dict) or not isinstance(further, dict):
            raise FedAtlasError(
                f"site {self.site}: the payload of {call.function!r} is not a dict of arguments"
            )
        arguments |= further
        for_stages = arguments.pop(FOR_STAGES, None)
        model = _model_in(arguments)
        if model is not None and self.terms.comm.down != "none":
            arguments = _with_model(arguments, self.held.receive(model))
        return Received(call, arguments, for_stages)

    def answer_secure(self, received: Received) -> reply.Answer:
        """The answer to one of `secure_calls`."""
        assert self.member is not None
        value = self.member.step(received.call.function, received.arguments)
        self._check(value, self.terms.kinds(received.call.function, {}, received.arguments), received)
        return reply.Answer(value, {})

    def protect(
        self, received: Received, value: Any, log: dict[str, float], memory: dict[str, Tree]
    ) -> reply.Answer:
        """What is sent in the place of what the method's function returned and logged.

        memory: the site's, which keeps what compression leaves out. Raises EgressError for a value that is not as the
        method declares it, or that would not leave in the form that the server expects.
        """
        call, declared = received.call, self.policy.sends.get(received.call.function, {})
        if self.policy.case_name and isinstance(value, dict) and isinstance(value.get("rows"), list):
            for row in value["rows"]:
                row["case"] = row["case"] and self.policy.case_name(row["case"])
        self._check(value, declared, received)
        egress.check_log(log, what=self._what(call))
        if call.function not in self.terms.model_functions:
            return reply.Answer(value, log)
        value = self._staged(received, value, memory)
        self._check(value, self.terms.kinds(call.function, declared, received.arguments), received)
        if self.releases:  # what training logs is of the data, and not protected
            log = self.releases.count()
        return reply.Answer(value, log)

    def _staged(self, received: Received, value: dict[str, Any], memory: dict[str, Tree]) -> dict[str, Any]:
        function, sent = received.call.function, received.model
        if sent is None:
            if self.releases or self.member:
                raise FederationError(
                    f"privacy and secure aggregation protect a change of a model; {function} was sent none to change"
                )
            return value
        if self.releases:
            value = value | {"model": self.releases.protect(function, value["model"], sent)}
        if self.member:
            return self.member.masked(value["model"], value["n"], received.for_stages)
        if self.terms.compresses(function, received.arguments):
            packed = stages.compressed(function, value["model"], sent, self.terms.comm, memory)
            value = value | {"model": packed}
        return value

    def _check(self, value: Any, kinds: Mapping[str, str], received: Received) -> None:
        scores = self.policy.scores.get(received.call.function)
        asked = Asked(
            received.arguments, scores=scores(self.site, None, **received.arguments) if scores else None
        )
        declaration = self.declaration
        egress.check(
            value,
            kinds,
            what=self._what(received.call),
            classes=declaration.classes,
            forms=declaration.forms,
            asked=asked,
        )

    def _what(self, call: CallId) -> str:
        return f"site {self.site}: the answer to {call.function}"

    def leave(self, call: CallId, mark: str, contents: dict[str, str], data: Data, memory: Data) -> Data:
        """The last thing before a reply leaves: it is kept where it may be asked for again, with the memory that the call
        left (its bytes), and logged. Returns it."""
        if self.releases and mark:
            self.releases.keep(call.round, call.call, mark, data, memory)
        self.record(call, contents, data)
        return data

    def record(self, call: CallId, contents: dict[str, str], data: Data) -> None:
        """Writes into the egress log what is about to leave. contents: see `egress.contents`."""
        if self.policy.log:
            place = {"function": shown(call.function), "round": call.round, "call": call.call}
            what = {**place, "contents": contents}
            self.policy.log.record(what, data)
