"""What is built from a federation file: label space, method, nets, and the data of the sites that lie here."""

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fedatlas import losses, methods, nets
from fedatlas.core.contract import functions_of, sends_of
from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.memory import require_memory
from fedatlas.core.names import may_be_same
from fedatlas.core.options import not_known
from fedatlas.core.seeds import seed_of
from fedatlas.core.tensors import from_tree, n_bytes, shapes_of
from fedatlas.data.datasets.shared.listing import Problem
from fedatlas.data.index import label_space_of, naming_of
from fedatlas.data.site_data import SiteData, pool
from fedatlas.evaluation.evaluate import own_score
from fedatlas.federation import initial as first
from fedatlas.federation.file import (
    Federation,
    hash_of,
    load_federation,
    make_method,
    make_terms,
    resolved,
    selects,
    shareable,
)
from fedatlas.federation.tasks import task_of
from fedatlas.federation.yaml import expanded
from fedatlas.transport.egress import EgressLog
from fedatlas.transport.host import Host
from fedatlas.transport.pipeline import Policy
from fedatlas.transport.protection import privacy, secure
from fedatlas.transport.store import DoneWork

T = TypeVar("T")
R = TypeVar("R")

POOLED = "pooled"
"""The one site that trains where a method merges all sites' data."""


def training_sites(federation: Federation) -> list[str]:
    """The sorted names of the sites that train, as the file says; equal at the server and at every site."""
    return sorted(site.name for site in federation.sites if site.role == "train")


def build_net(
    federation: Federation,
    method: Any,
    name: str,
    *,
    channels: int,
    space: LabelSpace,
    initial: bool = False,
    shapes: bool = False,
) -> nn.Module:
    """The federation's net ("main"), or one that the method declares, for images of so many channels. A net that has
    something for every organ takes the organs of `labels.groups`, unless its own option `groups` names others.

    initial: whether weights that `init_from` or the net's options name are read; only the model with which the federation
    starts needs it, so that no site does. shapes: on the meta device, where tensors have a shape and no values, so that
    a net of any size costs nothing.
    """
    task, classes = task_of(federation), len(space)
    inputs: int = task.net_channels(federation, channels)
    if name == "main":
        kind = federation.net["name"]
        chosen = {key: value for key, value in federation.net.items() if key != "name"}
        if "groups" in {option.name for option in fields(nets.get(kind))} and chosen.get("groups") is None:
            chosen["groups"] = space.groups
    else:
        wanted = method.nets
        if name not in wanted:
            raise not_known(f"method {federation.method['name']}: the net", name, wanted)
        kind, chosen = wanted[name].name, wanted[name].options
        if wanted[name].outputs == "sites":
            classes = len(training_sites(federation))
        if wanted[name].on == "features":
            main = build_net(federation, method, "main", channels=channels, space=space, shapes=True)
            inputs = main.n_features  # type: ignore[assignment]
    with nets.without_values() if shapes else nullcontext():
        net = nets.build(
            kind,
            chosen,
            in_channels=inputs,
            classes=classes,
            spatial_dims=len(task.size(federation)),
            seed=seed_of(federation.seed, "net", name),
            findings=len(federation.labels.findings) if name == "main" else 0,
            initial=initial and not shapes,
        )
    if name == "main" and federation.init_from:
        net.old = first.old_classes(federation.init_from, space)
        if initial and not shapes:
            first.initialise(net, federation.init_from, space, _model_of)
    return net


def _model_of(file: Path, tree: Any) -> Any:
    """The tensors that a file of a run folder holds as the model of all: where the run evaluated one, that one, as the mean of late
    rounds; of a method whose sites keep parts or models of their own what they share. Raises FederationError where sites trained alone."""
    run = file.parents[1]
    if file.parent.name != "models" or not (run / "federation.yaml").exists():
        return tree["model"]
    method = make_method(load_federation(run / "federation.yaml"))
    if method.alone:
        raise FederationError(
            f"init_from: {run}: its sites trained alone, so it has no model of all; train one, or give the file of a site's own model, "
            f"as {run / 'models' / 'local'}/SITE.fa, and `classes`"
        )
    members = method.eval_members(from_tree(method.state, tree), "")
    one = len(members) == 1 and members[0].net == "main" and members[0].classes is None
    return members[0].model if one else tree["model"]


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the tensors that a training step of one net holds, without the libraries and their workspace. least: the weights, both
    moments of Adam, and what is kept for the gradients; likely: also the gradients, the momentum of SGD, and two of the largest
    tensors."""

    least: int
    likely: int


def step_memory(
    net: nn.Module, shape: Sequence[int], optimizer: str, precision: str = "float32"
) -> StepMemory:
    """The estimate for batches of shape (B, I, *S). Two bytes count for a number where the precision is lower than float32.
    Nothing is computed. A method's further nets are not counted."""
    model = n_bytes(list(net.state_dict().values()))
    kept, largest = (
        shape[0] * size // (1 if precision == "float32" else 2)
        for size in nets.held_for_gradients(net, shape[1:])
    )
    least = kept + model * (1 if optimizer == "sgd" else 3)
    gradients = model * (2 if optimizer == "sgd" else 1)  # and the momentum of SGD, which may be 0
    return StepMemory(least, least + gradients + 2 * largest)


def device_of(name: str, key: str) -> torch.device:
    """A device by its name, as cpu or cuda:0. key: names it in a message. Raises FederationError if it is none, or not here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        reason = str(error).splitlines()[0].partition(". ")[0]
        reason = "it is no device" if reason.startswith("Expected one of") else reason
        raise FederationError(
            f"{key}: got {name!r}, which cannot be used here ({reason}); here are: {', '.join(there)}"
        ) from None
    if device.type == "meta":
        raise FederationError(f"{key}: meta computes nothing; use cpu or cuda")
    return device


def device_for(asked: str | None, kept: str) -> torch.device:
    """The device asked for, else that on which a run trained, where it is here, else the CPU. Raises as `device_of`."""
    if asked:
        return device_of(asked, "device")
    try:
        return device_of(kept, "engine.device")
    except FederationError:
        return torch.device("cpu")


def usable_device(federation: Federation) -> torch.device:
    """The device on which sites train. FederationError as `device_of`, and if it cannot compute in the federation's
    precision."""
    device = device_of(federation.engine.device, "engine.device")
    if federation.local.precision == "fp16" and device.type != "cuda":
        raise FederationError(
            f"local.precision: fp16 needs a GPU, engine.device is {federation.engine.device}; use float32 or bf16"
        )
    return device


class Design:
    """A federation with its label space, method and nets, without any site's data: what the server knows.

    channels: images per case, the same at every site.
    """

    def __init__(self, federation: Federation, space: LabelSpace, channels: int) -> None:
        self.federation, self.space, self.channels = federation, space, channels
        self.method, self.task = make_method(federation), task_of(federation)
        self._shapes: dict[str, nn.Module] = {}

    @property
    def pooled(self) -> bool:
        """Does the method train on the union of all sites' data?"""
        return self.method.pooled

    @property
    def evaluator(self) -> Any:
        """What scores a model at a site."""
        return self.task.evaluator(self.federation, self.space)

    @property
    def sends(self) -> dict[str, Mapping[str, str]]:
        """What sites answer: function -> key -> kind, see `transport.egress.problem_of`."""
        return {**sends_of(self.method), **self.task.sends}

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """(I, *S): one input of the net."""
        inputs = self.task.net_channels(self.federation, self.channels)
        return (inputs, *self.task.size(self.federation))

    def make_net(self, name: str = "main", *, initial: bool = True) -> nn.Module:
        """A net of the federation, with the values that follow from the seed; initial: as in `build_net`."""
        return build_net(
            self.federation, self.method, name, channels=self.channels, space=self.space, initial=initial
        )

    def shapes(self, name: str = "main") -> nn.Module:
        """A net of the federation without values, see `build_net`."""
        if name not in self._shapes:
            self._shapes[name] = build_net(
                self.federation, self.method, name, channels=self.channels, space=self.space, shapes=True
            )
        return self._shapes[name]

    def step_memory(self) -> StepMemory:
        """Of a site's training, see `step_memory`."""
        local = self.federation.local
        return step_memory(self.shapes(), (local.batch, *self.sample_shape), local.optimizer, local.precision)

    def require_memory(self) -> None:
        """Raises FederationError where the server cannot hold the state, an answer, and their sum in float64."""
        net = self.shapes()
        n = sum(parameter.numel() for parameter in net.parameters())
        what = f"averaging models of {n:,} parameters"
        remedy = "choose a smaller net, as by fewer `filters`"
        require_memory(4 * n_bytes(list(net.state_dict().values())), what, remedy, FederationError)

    def check_net(self, *, initial: bool = True) -> nn.Module:
        """The net, after one patch went through it. FederationError if it fits the patch or the labels not, or needs
        more memory than there is; initial: or its file of weights cannot be used."""
        net = self.shapes()
        inputs, *size = self.sample_shape
        nets.check_level(self.federation.net["name"], net, self.space.level)
        nets.check_classes(self.federation.net["name"], net, self.space.exclusive)
        nets.check_patch(net, size)
        nets.check_output(net, len(self.space), in_channels=inputs, patch=size)
        nets.check_batch(net, self.federation.local.batch, (inputs, *size))
        self.require_memory()
        terms = make_terms(self.federation)
        if terms.secure is not None:
            secure.require_libraries()
        if terms.privacy is not None:
            privacy.require_libraries()
            noisy = {name: shape for name, shape in shapes_of(net).items() if shape.is_floating_point()}
            privacy.require_noisy(terms.privacy, noisy)  # a site would refuse it after its first round
        net = self.make_net(initial=initial)
        for name, spec in self.method.nets.items():
            if spec.on == "images":
                try:
                    nets.check_patch(self.shapes(name), size)
                except FederationError as error:
                    which = f"method {self.federation.method['name']}: its net {name!r}"
                    raise FederationError(f"{which}: {error}") from None
        _ = self.evaluator  # refuses options that do not fit the classes
        self.method.check(self.space)
        self.examine(net)
        return net

    def examine(self, net: nn.Module) -> list[str]:
        """What the method tells of the net, the training sites and the number of rounds. Raises FederationError where they do not fit."""
        notes = self.method.examine(net, training_sites(self.federation))
        return [*notes, *self.method.plan(self.federation.rounds)]


class Experiment(Design):
    """A design with the data of sites that lie on this machine.

    cache: folder of preprocessed cases, and of work that sites have done. sites: which of the federation's (None: all); space: where not all are
    here, the label space cannot follow from them. Reads the layout of every site, no voxels.
    """

    def __init__(
        self,
        federation: Federation,
        cache: Path,
        *,
        sites: Sequence[str] | None = None,
        space: LabelSpace | None = None,
    ) -> None:
        # by name: classes are numbered as the sites bring them, and the order of the file decides nothing
        chosen = sorted(
            (s for s in federation.sites if sites is None or s.name in sites), key=lambda site: site.name
        )
        task = task_of(federation)
        self.indexes = _of_each(lambda site: task.read(federation, site, Path(data_path(site))), chosen)
        space = space or space_of(federation, {index.name: index.brings for index in self.indexes})
        super().__init__(federation, space, self.indexes[0].channels)
        self.cache = cache
        made = _of_each(lambda index: task.source(federation, index, self.space, cache), self.indexes)
        self.sources: dict[str, SiteData] = {
            index.name: source for index, source in zip(self.indexes, made, strict=True)
        }
        self.training = {i.name: self.sources[i.name] for i in self.indexes if i.trains}
        if self.pooled:
            self.training = {POOLED: pool(list(self.training.values()), POOLED)}

    def check(self) -> list[Problem]:
        """Reads every image of every site; the problems found, worst first."""
        problems = self.task.check(self.federation, self.indexes, self.space)
        problems += [*self._two_spellings(), *self._seen_in_validation_alone()]
        return sorted(problems, key=lambda problem: not problem.fatal)

    def _two_spellings(self) -> Iterator[Problem]:
        """Classes that may be one, where the file leaves it to the sites what the classes are."""
        if self.federation.labels.names is not None:
            return
        at = {
            name: {index.name for index in self.indexes if name in index.brings} for name in self.space.names
        }
        for one, other in combinations([self.space.names[c] for c in self.space.foreground], 2):
            if may_be_same(one, other) and not at[one] & at[other]:  # a site that has both tells them apart
                where = [f"{name!r} (site {', '.join(sorted(at[name]))})" for name in (one, other)]
                remedy = "if they are, give `aliases` to the sites of one of them; if not, list both in `labels.names`"
                yield Problem(
                    "(all)", "", f"{' and '.join(where)} are two classes; are they the same?", remedy, False
                )

    def _seen_in_validation_alone(self) -> Iterator[Problem]:
        """Classes of scans of which every annotated case became one for validation."""
        if self.space.level == "image":
            return
        taught = set[int]().union(*(source.labels.annotated for source in self.training.values()))
        annotated = set[int]()
        for index in self.indexes:
            known = naming_of(index, self.space)[0].known
            annotated |= {
                c
                for case in index.cases
                if index.trains and case.split != "test"
                for c in known(case.annotated)
            }
        for c in sorted(annotated - taught):
            what = f"no training case annotates {self.space.names[c]!r}, cases for validation do"
            remedy = "name the cases for validation by `split`, or annotate it in further cases"
            yield Problem("(all)", "", what, remedy, False)

    def prepare(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """Fills the cache of every site."""
        for name, source in self.sources.items():
            source.prepare(progress=lambda text, name=name: tell(f"{name}: {text}"))

    def fingerprint(self) -> dict[str, str]:
        """case -> a digest of all that is read of it, see `SiteData.fingerprint`; of several sites "site/case"."""
        digests = {name: source.fingerprint() for name, source in self.sources.items()}
        if len(digests) == 1:
            return next(iter(digests.values()))
        return {f"{name}/{case}": digest for name, own in digests.items() for case, digest in own.items()}

    def check_net(self, *, initial: bool = True) -> nn.Module:
        usable_device(self.federation)
        return super().check_net(initial=initial)

    @property
    def at_once(self) -> int:
        """How many sites train here at the same time."""
        return max(1, min(self.federation.engine.workers, len(self.training)))

    def require_memory(self) -> None:
        """Raises FederationError where the server, or the sites that train here at the same time, need more than there
        is."""
        super().require_memory()
        federation, at_once = self.federation, self.at_once
        of = f"{at_once} sites at a time" if at_once > 1 else "a site"
        size = "×".join(map(str, self.sample_shape))
        what = f"training {of} on batches of {federation.local.batch} samples of {size}"
        remedy = "lower `local.batch`, the size of a sample, or the size of the net"
        remedy += ", or `engine.workers`" if at_once > 1 else ""
        least = self.step_memory().least * at_once
        require_memory(least, what, remedy, FederationError, federation.engine.device)

    def host(
        self,
        site: str,
        folder: Path,
        log: EgressLog | None = None,
        *,
        texts: bool = True,
        case_name: Callable[[str], str] | None = None,
        **options: Any,
    ) -> Host:
        """The end of the wire of a site that is served here. folder: its private one; log, texts, case_name: as `Policy`;
        options: as `Host`."""
        policy = Policy(
            self.sends,
            scores={name: self.evaluator.scores for name in self.task.sends},
            log=log,
            texts=texts,
            case_name=case_name,
            terms=make_terms(self.federation),
        )
        source = self.training.get(site) or self.sources[site]
        return Host(
            site,
            source,
            self.method.functions() | functions_of(self.evaluator),
            partial(self.make_net, initial=False),
            folder,
            policy,
            seed=self.federation.seed,
            threads=self.federation.threads_per_site,
            device=self.federation.engine.device,
            own_score=own_score(self.evaluator, selects(self.federation)),
            done_work=self._done_work(site, source),
            **options,
        )

    def _done_work(self, site: str, source: SiteData) -> DoneWork | None:
        """Where a site keeps what it has done, with all that decides it. None where others brought methods, nets or losses: of their
        code it is not known what it hangs on."""
        if any(others.names() for others in (methods.OTHERS, nets.OTHERS, losses.OTHERS)):
            return None

        def world() -> dict[str, Any]:
            federation = self.federation
            keys = shareable(resolved(federation)).items()
            return {
                "federation": {key: value for key, value in keys if key not in ("name", "method", "rounds")},
                "labels": self.space.to_plain(),
                "annotated": sorted(source.labels.annotated),
                "data": source.fingerprint(),
                "code": code(),
                "versions": versions(),
                "arithmetic": arithmetic(federation.engine.device),
                "threads": federation.threads_per_site,
            }

        return DoneWork(self.cache / site / ".done", world)


def _of_each(make: Callable[[T], R], sites: Sequence[T]) -> list[R]:
    """What is made of every site. Raises one error with what is wrong of all sites, a line each."""
    made, wrong = list[R](), list[FederationError | DataError]()
    for site in sites:
        try:
            made.append(make(site))
        except (FederationError, DataError) as error:
            wrong.append(error)
    if wrong:
        raise wrong[0] if len(wrong) == 1 else type(wrong[0])("\n".join(map(str, wrong)))
    return made


def data_path(site: Any) -> str:
    """The folder of a site's data. FederationError where the file does not give it."""
    if site.path is None:
        raise FederationError(
            f"site {site.name}: path: missing; an engine of this machine reads every site's data itself. Give it, "
            "or let the site take part from where its data are (`fedatlas deploy init`)"
        )
    return site.path


def space_of(federation: Federation, brings: Mapping[str, Sequence[str]]) -> LabelSpace:
    """The label space of a federation: as its file gives it, else the union of what the sites bring.

    brings: site -> its label names after aliases, background left out, in its own order.
    """
    given, level = federation.labels, task_of(federation).level
    exclusive = bool(given.exclusive)
    names = given.names
    if names is None:
        names = label_space_of([brings[site] for site in sorted(brings)], (), exclusive).names
    return LabelSpace.of_names(names, given.groups, exclusive=exclusive, level=level, findings=given.findings)


def cache_folder(federation: Federation, runs: Path) -> Path:
    """Where preprocessed cases are kept."""
    return expanded(federation.engine.cache) if federation.engine.cache else runs / ".cache"


def egress_log(federation: Federation, path: Path, run: str) -> EgressLog:
    """The log of what leaves a site in a run."""
    return EgressLog(path, run=f"{run} {hash_of(federation)[:8]}", method=federation.method["name"])


def arithmetic(device: str = "cpu") -> str:
    """What decides how torch rounds on a device: of a processor its vector instructions, and those for bf16 where torch tells them,
    and bits repeat where this is the same; of a GPU its name, and nothing is promised. A device that is not on this machine, as where
    the sites train and the server does not, has its kind's name."""
    kind = torch.device(device).type
    if kind != "cpu":
        there = kind == "cuda" and torch.cuda.is_available()
        return torch.cuda.get_device_name(device) if there else kind
    has = getattr(torch.cpu, "get_capabilities", dict)()
    level = torch.backends.cpu.get_cpu_capability()
    return ", ".join([level, *(name for name in ("avx512_bf16", "amx_bf16") if has.get(name))])


def slow_precision(federation: Federation) -> list[str]:
    """A sentence where `local.precision` is bf16 and this processor has no instructions for it, so that it is right but much slower than
    float32; none where sites train on a GPU, and where torch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    named = [there for name, there in capabilities.items() if "bf16" in name]
    on_cpu = federation.engine.device.partition(":")[0] == "cpu"
    if federation.local.precision != "bf16" or not on_cpu or not named or any(named):
        return []
    return [
        "local.precision is bf16, for which this processor has no instructions (avx512_bf16, amx_bf16): sites on it train many times slower "
        "than in float32, and to other bits than sites that have them; float32 is faster here"
    ]


@lru_cache(1)
def code() -> str:
    """The SHA-256, in hex, of the source files of this package."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """The versions of what decides the numbers."""
    packages = ("fedatlas", "torch", "monai", "numpy", "scipy", "nibabel", "pydantic")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
