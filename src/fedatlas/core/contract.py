"""The whole contract between a method, the server and the sites.

A method derives from `Method`: two server functions, `start` and `round`, over a `State`. It reaches the hospitals only through
`clients.call(self.local_update, …)`; the function that runs there belongs to the same class and is marked
`@at_site`. A method is a frozen dataclass of its hyper-parameters: nothing on it changes while it runs.

Shapes: C classes.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_origin

import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.tensors import Tensors, Tree

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class State:
    """What the server knows after `round` complete rounds out of `rounds`. A method may subclass it with
    fields of its own; they are tensors and plain values, so that a state can always be kept and resumed.

    late: name -> the mean over late rounds of a model, before the last one, where a method takes it (`methods.shared.swa`)."""

    model: Tensors
    round: int = 0
    rounds: int = 1
    late: dict[str, Tensors] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class NetSpec:
    """A net by its registered name, with its options. on: what it is given, the federation's images, or the features
    [B, d] that the federation's net ("main", a classifier) makes of them. outputs: one for each class of the label
    space, or for each site that trains, in the order of their names."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    on: Literal["images", "features"] = "images"
    outputs: Literal["classes", "sites"] = "classes"


@dataclass(frozen=True)
class Member:
    """One model offered for evaluation. `classes`: the foreground classes it may speak for (None: all);
    the probability of any other is given to the background. Several members are merged (A8): per voxel the
    foreground class of highest probability among the members that predict foreground there, or of every class the mean
    over the members that speak for it (`Inference.merge`). `trained`: the foreground classes that its loss taught it, where
    these are more than it is asked for (None: `classes`). `findings`: the findings of the whole image, beside segmentation, that it
    may speak for (None: those about a class that it may speak for, and those about none).

    net: the one whose values `model` holds, "main" or one that the method declares. chooses: makes the member a
    selector, which says nothing itself: its outputs stand for the members after it, one for each. In a case (where
    labels are of whole images: an image) to which it gives a softmax above `chooses`, the most probable of these speaks
    alone; in any other those before the selector do, merged. None of them but those before it may name classes."""

    model: Tensors
    classes: tuple[int, ...] | None = None
    net: str = "main"
    chooses: float | None = None
    trained: tuple[int, ...] | None = None
    findings: tuple[int, ...] | None = None

    @property
    def taught(self) -> tuple[int, ...] | None:
        """The foreground classes that its loss taught it; None: all."""
        return self.classes if self.trained is None else self.trained

    def to_payload(self) -> dict[str, Any]:
        """As it travels to a site."""
        classes, trained = (None if of is None else list(of) for of in (self.classes, self.trained))
        return {
            "model": self.model,
            "classes": classes,
            "net": self.net,
            "chooses": self.chooses,
            "trained": trained,
        } | ({} if self.findings is None else {"findings": list(self.findings)})

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> "Member":
        """What `to_payload` gave; all but "model" and "classes" may be left out."""
        given = dict(payload)
        classes, trained, findings = (
            None if of is None else tuple(of)
            for of in (given.pop("classes"), given.pop("trained", None), given.pop("findings", None))
        )
        return cls(classes=classes, trained=trained, findings=findings, **given)

    @classmethod
    def of_site(cls, kept: Mapping[str, Any]) -> "Member":
        """A site's own model, of what the site answered, or of a file that kept it: "model", and what it says of "classes" and
        "findings"."""
        said = {key: kept.get(key) for key in ("classes", "findings")}
        return cls.from_payload({"model": dict(kept["model"]), **said})


class Site(Protocol):
    """All that a method's code at a hospital may touch."""

    name: str
    labels: SiteLabels
    n_train: int
    """Training cases."""
    n_labelled: Tensor
    """[C] int64: training cases in which class c is annotated."""
    n_positive: Tensor
    """[C] int64: training cases in which class c is annotated and present."""
    memory: dict[str, Tree]
    """Private; kept between calls, never sent. A round that is done again begins with what it had the first time."""
    lasting: dict[str, Tree]
    """As `memory`, but never taken back: a round that is done again finds what the first time left. For counts of what
    was released, not for what training goes on from, whose bits would depend on faults."""
    rng: torch.Generator
    """Seeded from the experiment's seed, the site's name, the round and the number of the call in the round."""
    device: torch.device

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        """A new net of the federation ("main"), or one that the method declares in `nets`, in training mode;
        with the values of `model` if given."""
        ...

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> "Batches":
        """Training batches of `batch` samples, on the site's device; exactly one of steps and epochs is given.
        Two calls within one call of the site give different batches."""
        ...

    def with_predictions(
        self,
        net: nn.Module,
        *,
        overlap: float,
        windows: int,
        keep: int | None,
        partly: bool,
        gigabytes: float,
        within: AbstractContextManager[Any],
    ) -> "AbstractContextManager[Site]":
        """This site, all of whose batches have `Batch.along`: what `net` says of every training case as it is before
        augmentation, predicted once and kept in files of the site until the context ends.

        overlap: of windows, in parts of one. windows: so many at a time. keep: probabilities per voxel, the largest
        ones; None: all. partly: only cases in which some class is not annotated; `along` of others means nothing.
        gigabytes: the most that may be kept. within: entered while `net` computes, as an autocast. Batches are, apart
        from `along`, those that the site gives without. Raises FederationError where the files would be larger,
        DataError where they cannot be written."""
        ...

    def score(self, net: nn.Module) -> float | None:
        """How good a net is on the site's own validation cases, by the metric that chooses rounds (Dice, of whole images
        AUROC): the mean over the classes that the site annotates of the mean over cases. None where it has no such case.
        The net is left as it was, and no random number is drawn."""
        ...

    def once(
        self, what: str, of: Mapping[str, Tree], make: "Callable[[], dict[str, Tree]]"
    ) -> dict[str, Tree]:
        """What `make()` gives and logs, kept in the site's cache and never sent: the same work at the same place of another run, or
        of this one after it was killed, is read there and not done again, to the same bits.

        what: a name for the work. of: all that decides it beside the federation's file without its `method` and `rounds`, the
        site's data, the place of the call in the run and the installation, which are accounted for. The last thing of a call
        that asks for batches or draws random numbers, and it leaves `memory` alone."""
        ...

    def log(self, **numbers: float) -> None:
        """Numbers for people: they appear in the run's log beside the site's name, and steer nothing."""
        ...


class Batches(Protocol):
    """Batches to be read once, in an order and with augmentation that depend on the site's seed alone."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...


class Replies(Protocol):
    """What the sites answered to one call. Can be read again and again; always sorted by site name."""

    sites: list[str]

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(site, reply), decoded one at a time."""
        ...

    def each(self, key: str) -> Iterator[Any]:
        """One value of every reply, in the order of `sites`, as `average` takes them: the rest of a reply is
        never held, and the value itself only by who keeps it."""
        ...

    def plain(self, key: str) -> list[Any]:
        """One plain value of every reply, in the order of `sites`; no tensor is loaded."""
        ...


class Clients(Protocol):
    """The hospitals, as the server's half of a method sees them."""

    sites: list[str]
    """Sorted names of all sites of the federation."""
    lost: dict[str, str]
    """Who did not answer the last call, and why."""
    sample_shape: tuple[int, ...]
    """(I, *S): the shape of one input of the federation's net in training."""

    @property
    def rng(self) -> torch.Generator:
        """A new generator at every use, seeded from the experiment's seed and the round."""
        ...

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        """A net at the server, on the CPU, in evaluation mode; as `Site.network`. It computes with as many threads
        as a site, so that equal models give equal bits."""
        ...

    def call(
        self,
        function: Callable[..., Any],
        *,
        each: Mapping[str, dict[str, Any]] | None = None,
        **payload: Any,
    ) -> Replies:
        """Runs a function marked `@at_site` at every site, with `payload` and what `each` adds for that site.

        With `each`, only the sites named in it are called. Raises SiteLost where the federation's rule for a
        lost site is to stop, or too few are left.
        """
        ...


class Method(ABC):
    """What every method derives from: two functions over a state, `start` and `round`, and what it may declare beside
    them, with the defaults. A method that differs says so under the same name: a value as a value or a property, a function
    as a function. A name that is nearly one of these is an error where the class is defined."""

    state: ClassVar[type[State]] = State
    """The class of its states."""
    nets: ClassVar[Mapping[str, NetSpec]] = {}
    """The nets that it has beside the federation's, by the names that `network` is asked for."""
    sends: ClassVar[Mapping[str, Any]] = {"model": "model", "n": "cases"}
    """What a site answers, key -> kind, and nothing else: here its model's tensors and its number of training
    cases. The kinds are those of `transport.egress.check`, which refuses any other answer before it leaves the site.
    A method whose functions answer differently gives {function: {key: kind}}."""
    summed: ClassVar[str | None] = None
    """What the server makes of the sites' models, if that is a weighted mean and nothing else: "cases" (weights
    are the training cases) or "equal". None: it needs each model by itself."""
    tasks: ClassVar[tuple[str, ...]] = ("segmentation", "classification")
    """The tasks of a federation that it is for."""
    chosen_by_site: ClassVar[bool] = False
    """True: every site chooses the round of its own model, by its own validation cases, where otherwise one round is chosen
    for all. `assembled` then puts these models together; it is what `best` names."""
    alone: ClassVar[bool] = False
    """True: sites train alone, and a site's own model has seen no other's cases."""
    pooled: ClassVar[bool] = False
    """True: the federation's sites are merged into one that holds the union of their cases."""
    own_tensors: ClassVar[bool] = False
    """True: beside the model that it is sent, a site trains from tensors of its own, or of its group, which its answer holds, too."""
    reads_target: ClassVar[bool] = False
    """True: beside its loss it reads the target of exclusive classes, one class per voxel."""
    loss: ClassVar[Any] = None
    """The choice of its supervised loss, commonly an option; None: it has none."""

    def check(self, space: LabelSpace) -> None:  # noqa: B027 (by default everything fits)
        """Raises FederationError where the options do not fit the label space or each other."""

    @classmethod
    def upgraded(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options of a file, which an earlier version may have written, as this version has them: without those that are gone.
        Raises FederationError where they asked for something that is gone as well."""
        return given

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """Notes on the net and the training sites, for `fedatlas check`. Raises FederationError where they do not fit."""
        return []

    def plan(self, rounds: int) -> list[str]:
        """Notes on the number of rounds, for `fedatlas check`. Raises FederationError where it does not fit."""
        return []

    def steps_before(self, rounds: int, sites: int, cases: int | None = None) -> int | None:
        """Optimizer steps of a site beyond those of `rounds` rounds, as of teachers that are trained before the first. sites: how
        many train. cases: on which the site trains; None where they are given in epochs and that is not told."""
        return 0

    def updates_per_step(self) -> int:
        """Optimizer steps that a site takes for each of `local.steps` in a round: 2 where two models, or two parts of one, are
        trained in turn."""
        return 1

    def best_from(self, rounds: int) -> int:
        """The first round whose model may be chosen as the best: `rounds` where the result is made after the last."""
        return 1

    @abstractmethod
    def start(self, net: nn.Module, clients: Clients) -> State:
        """The state before the first round. net: the federation's net with its first values."""

    @abstractmethod
    def round(self, state: Any, clients: Clients) -> State:
        """The state after one more round."""

    def eval_members(self, state: Any, site: str) -> list[Member]:
        """The models that are evaluated at a site as "the" model of the federation. site: its name; "" for a site
        outside the federation."""
        return [Member(state.model)]

    def assembled(self, state: Any, models: Mapping[str, Tensors]) -> State:
        """The state with the models that sites chose, site -> tensors, in place of those of the round; a site that chose
        none keeps its own of the state. Asked of methods with `chosen_by_site` alone, each of which has its own."""
        raise TypeError(
            f"class {type(self).__name__}: `chosen_by_site` is true, so `assembled(state, models)` must put the sites' "
            "models together, and the class has none"
        )

    def functions(self) -> dict[str, Callable[..., Any]]:
        """What may be called at a site: name -> bound function. Nothing else is ever run there."""
        return functions_of(self)

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for name, value in vars(cls).items():
            if not name.startswith("_"):
                _check_name(cls, name, value)
        for name, hint in vars(cls).get("__annotations__", {}).items():
            if name not in vars(cls) and _of_class(hint):
                _check_name(cls, name, None)


def _check_name(cls: type[Method], name: str, value: Any) -> None:
    """Raises TypeError for a misspelt declaration, and for a declaration of the wrong kind."""
    base = vars(Method)
    known = [key for key in base if not key.startswith("_")]
    if name in known:
        if isinstance(base[name], FunctionType) != isinstance(value, FunctionType):
            expected = (
                "a function"
                if isinstance(base[name], FunctionType)
                else "a value or a property, not a function"
            )
            raise TypeError(f"class {cls.__name__}: `{name}` must be {expected}")
        return
    hint = vars(cls).get("__annotations__", {}).get(name)
    is_option = hint is not None and not _of_class(hint)
    inherited = any(hasattr(parent, name) for parent in cls.__bases__)
    if is_option or inherited or getattr(value, "at_site", False):
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if near:
        raise TypeError(
            f"class {cls.__name__}: `{name}` is not something that a method declares; did you mean `{near[0]}`?"
        )


def _of_class(hint: Any) -> bool:
    """Whether an annotation is a ClassVar, which makes no option."""
    return hint is ClassVar or get_origin(hint) is ClassVar or (isinstance(hint, str) and "ClassVar" in hint)


def at_site(function: F) -> F:
    """Marks a function that the server may ask a site to run: `function(self, site, **payload) -> dict`."""
    function.at_site = True  # type: ignore[attr-defined]
    return function


def functions_of(thing: Any) -> dict[str, Callable[..., Any]]:
    """The functions of an object that are marked `@at_site`: name -> bound function."""
    names = [name for name in dir(type(thing)) if getattr(getattr(type(thing), name), "at_site", False)]
    return {name: getattr(thing, name) for name in names}


def sends_of(method: Method) -> dict[str, dict[str, str]]:
    """What every function of a method answers: function -> key -> kind."""
    given = method.sends
    by_function = any(isinstance(kind, Mapping) for kind in given.values())
    return {name: dict(given[name] if by_function else given) for name in method.functions()}
