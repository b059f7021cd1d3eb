"""A site's end of the wire: it runs what it is asked to run, if that is allowed, and answers in bytes.

Nothing of one call is left for the next but the site's memory, so any process may serve any call.
"""

import contextlib
import itertools
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedatlas.core.contract import Batches
from fedatlas.core.errors import FedAtlasError
from fedatlas.core.labels import SiteLabels
from fedatlas.core.seeds import generator, isolated
from fedatlas.core.tensors import Tensors, Tree, load, to_tree
from fedatlas.transport import wire
from fedatlas.transport.allocator import keeping_freed_blocks
from fedatlas.transport.egress import NetForms
from fedatlas.transport.frames import Question, printable, shown
from fedatlas.transport.pipeline import Policy, Received, SitePipeline
from fedatlas.transport.reply import Answer, CallId
from fedatlas.transport.store import DoneWork, MemoryStore, errors_log, read_whole, write_atomic
from fedatlas.transport.wire import Data


class SiteSource(Protocol):
    """The data of a site, as a host needs them."""

    labels: SiteLabels
    n_train: int
    n_labelled: Tensor

    @property
    def n_positive(self) -> Tensor: ...
    def batches(
        self,
        rng_parts: tuple[str | int, ...],
        *,
        batch: int,
        steps: int | None,
        epochs: float | None,
        device: torch.device,
    ) -> Batches: ...
    def volumes(self, split: str) -> Any: ...


NetMaker = Callable[[str], nn.Module]
"""Makes a net of the federation: "main", or a name that the method declares."""


@dataclass
class HostedSite:
    """The `core.contract.Site` of one call, and what evaluation needs beyond it."""

    name: str
    source: SiteSource
    make_net: NetMaker
    memory: dict[str, Tree]
    rng: torch.Generator
    device: torch.device
    folder: Path
    seed_parts: tuple[str | int, ...]
    lasting: dict[str, Tree] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    along: Any = None
    own_score: Callable[["HostedSite", nn.Module], float | None] | None = None
    done_work: DoneWork | None = None
    _calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def labels(self) -> SiteLabels:
        return self.source.labels

    @property
    def n_train(self) -> int:
        return self.source.n_train

    @property
    def n_labelled(self) -> Tensor:
        return self.source.n_labelled

    @property
    def n_positive(self) -> Tensor:
        return self.source.n_positive

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        net = self.make_net(name)
        if model is not None:
            load(net, model)
        return net.to(self.device).train()

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> Batches:
        parts = (*self.seed_parts, "batches", next(self._calls))
        given: dict[str, Any] = {} if self.along is None else {"along": self.along}
        return self.source.batches(
            parts, batch=batch, steps=steps, epochs=epochs, device=self.device, **given
        )

    @contextlib.contextmanager
    def with_predictions(
        self, net: nn.Module, *, within: contextlib.AbstractContextManager[Any], **how: Any
    ) -> Iterator["HostedSite"]:
        predict = getattr(self.source, "predict_cases", None)
        if predict is None:
            raise FedAtlasError(
                f"site {self.name}: only cases whose voxels are labelled can be predicted ahead"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        # a site serves one call at a time: what is there was left by a process that was killed
        for left in self.folder.glob(".predictions-*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=".predictions-", dir=self.folder))
        try:
            began = time.perf_counter()
            with within:
                along = predict(net, folder, **how)
            del net  # its memory is free for training, if the caller lets it go too
            self.log(predicted_windows=along.windows, predicting_seconds=time.perf_counter() - began)
            yield replace(self, along=along)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def volumes(self, split: str) -> "Any":
        return self.source.volumes(split)

    def score(self, net: nn.Module) -> float | None:
        return None if self.own_score is None else self.own_score(self, net)

    def once(self, what: str, of: Mapping[str, Tree], make: Callable[[], dict[str, Tree]]) -> dict[str, Tree]:
        if self.done_work is None or self.along is not None:
            return make()
        file = self.done_work.file(what, {**of, "place": list(self.seed_parts)})
        done = self.done_work.find(file)
        if done is None:
            logged, self.logged, began = self.logged, {}, time.perf_counter()
            try:
                made = to_tree(make())
                done = {"made": made, "logged": dict(self.logged), "seconds": time.perf_counter() - began}
            finally:
                self.logged = logged
            self.done_work.keep(file, done)
        else:
            self.log(saved_seconds=done["seconds"])
        self.log(**done["logged"])
        return done["made"]

    def log(self, **numbers: float) -> None:
        for name, value in numbers.items():  # several trainings of one call add up
            self.logged[name] = float(value) + (self.logged.get(name, 0.0) if name in ADDED else 0.0)


ADDED = ("steps", "step_seconds", "overflows", "saved_seconds")
"""Numbers of several trainings that add up. saved_seconds: what `HostedSite.once` did not spend again."""


class Host:
    """Serves the calls of one site.

    functions: name -> function(site, **payload); the only ones that are ever run.
    folder: the site's private one.
    policy: what may leave.
    seed: the federation's; with site, round and call it decides everything random.
    instance: tells this installation of the site from any other that uses its name; part of every reply.
    remembers: False where calls are no part of a run, and must leave its memory alone.
    own_score: what `core.contract.Site.score` gives, of the site and a net; None: no net has a score.
    done_work: where `core.contract.Site.once` keeps what was made; None: nowhere, it is made at each call.
    """

    def __init__(
        self,
        name: str,
        source: SiteSource,
        functions: Mapping[str, Callable[..., Any]],
        make_net: NetMaker,
        folder: Path,
        policy: Policy,
        *,
        seed: int,
        threads: int = 1,
        device: str = "cpu",
        instance: str = "",
        remembers: bool = True,
        own_score: Callable[[HostedSite, nn.Module], float | None] | None = None,
        done_work: DoneWork | None = None,
    ) -> None:
        self.name, self.source, self.functions, self.make_net = name, source, dict(functions), make_net
        self.folder, self.seed, self.threads, self.device = folder, seed, threads, torch.device(device)
        self.texts, self.instance, self.own_score = policy.texts, instance, own_score
        self.done_work = done_work
        self.memory, self.remembers = MemoryStore(folder / "memory"), remembers
        self.pipeline = SitePipeline(name, folder, policy, len(source.labels.space), NetForms(make_net))

    def answer(self, question: Question) -> None:
        """Answers a question whose payloads are files, in a file. Raises OSError where not even an error reply
        can be written."""
        shared = read_whole(question.shared)
        own = read_whole(question.own) if question.own else None
        place = (question.function, question.round, question.call)
        reply = self.handle(*place, shared, own, question.memory)
        del shared, own
        try:
            write_atomic(question.reply, reply, durable=False)
        except OSError as error:
            write_atomic(question.reply, self._error(CallId(self.name, *place), error), durable=False)

    def handle(
        self,
        function: str,
        round: int,
        call: int,
        shared: Data,
        own: Data | None = None,
        version: str | None = None,
    ) -> Data:
        """The bytes of the reply to one call, see `reply`.

        shared, own: the payload as `wire` bytes, used by nobody else from now on. version: of the site's memory, see
        `Question`. Whatever goes wrong in the function, the answer is an error reply: its code, its text where texts may
        leave, and the traceback stays in `errors.log` of the site's folder.
        """
        reset_peak()
        began = time.perf_counter()
        to, pipeline = CallId(self.name, function, round, call), self.pipeline
        try:
            mark = pipeline.mark(to, shared, own)
            before = pipeline.sent_before(to, mark, self.instance, self.memory.put_back)
            if before is not None:
                return before
            self._require_known(function)
            torch.set_num_threads(self.threads)
            answer = self._answer(pipeline.receive(to, shared, own), version)
            del shared, own
            answer.cost = {"seconds": time.perf_counter() - began, "peak_mb": peak_mb()}
            contents = answer.contents()
            after = self.memory.after(round, call)
            reply = answer.encoded(to, self.instance, after)
            del answer
            kept = self.memory.kept(after) if mark and self.remembers else b""
            return pipeline.leave(to, mark, contents, reply, kept)
        except Exception as error:
            return self._error(to, error)

    def _require_known(self, function: str) -> None:
        known = (*self.functions, *self.pipeline.secure_calls)
        if function not in known:
            raise FedAtlasError(
                f"site {self.name}: asked to run {function!r}; allowed: {', '.join(sorted(known))}"
            )

    def _answer(self, received: Received, version: str | None) -> Answer:
        """Runs what is asked for, with the site's memory, and keeps what it leaves there."""
        to = received.call
        if to.function in self.pipeline.secure_calls:
            return self.pipeline.answer_secure(received)
        parts = (self.seed, self.name, to.round, to.call)
        site = HostedSite(
            name=self.name,
            source=self.source,
            make_net=self.make_net,
            memory=self.memory.before(to.round, to.call, version) if self.remembers else {},
            rng=generator(*parts),
            device=self.device,
            folder=self.folder,
            seed_parts=parts,
            lasting=self.memory.lasting() if self.remembers else {},
            own_score=self.own_score,
            done_work=self.done_work,
        )
        with keeping_freed_blocks(), isolated(*parts, "libraries"):
            value = to_tree(self.functions[to.function](site, **received.arguments))
        if self.remembers:  # before anything leaves
            self.memory.save_lasting(site.lasting)
        answer = self.pipeline.protect(received, value, site.logged, site.memory)
        if self.remembers:
            self.memory.save(to.round, to.call, site.memory, version)
        return answer

    def _error(self, to: CallId, error: Exception) -> Data:
        """The error reply, with everything about the error in the site's own errors.log."""
        file = self.folder / "errors.log"
        # the disk may be what is wrong
        with contextlib.suppress(OSError), errors_log(self.folder) as log:
            log.write(f"round {to.round}, call {to.call}, {shown(to.function)}\n")
            log.write("".join(traceback.format_exception(error)) + "\n")
        code = type(error).__name__
        content: dict[str, Tree] = {"code": code}
        if self.texts:
            known = isinstance(error, FedAtlasError | FloatingPointError | OSError | MemoryError)
            content["text"] = str(error) if known else f"{error} (see {file})"
        head: dict[str, Tree] = {"to": to.to_plain(), "from": self.instance}
        reply = wire.encode({**head, "error": content})
        leaves = {f"error/{key}": printable(str(said), 4000) for key, said in content.items()}
        try:
            self.pipeline.record(to, leaves, reply)
        except OSError:  # where the log cannot be written, a code alone may leave
            return wire.encode({**head, "error": {"code": code}})
        return reply


def reset_peak() -> None:
    """Starts a new measurement of peak memory, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return


def peak_mb() -> float:
    """The process's largest resident memory since `reset_peak` (elsewhere: since it began), in MiB."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
