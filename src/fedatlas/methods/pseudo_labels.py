"""Any method on top of pseudo labels: what the paper of UFPS marks with a star.

Jiang, Ma, Zeng, Ying. UFPS: a unified framework for partially annotated federated segmentation in heterogeneous data
distribution. Patterns 2024.

Before the first round every site trains a teacher on its own labels, and all teachers are handed to all sites, once
(`teachers`). After that the method within trains as it always does, except that every batch it sees is completed: what
a sample does not annotate is labelled by the teachers, its own ground truth stays. So `fedavg*` is

    method: {name: pseudo_labels, inner: {name: fedavg}}

and `fedprox*`, `moon*`, `fedalign*`, `fedasam*` and `cps*` are written the same way; `ms_kd` and `ufps` use the teachers for
more than labels and are methods of their own. DOD* has its star for another reason: it is `fed_dodnet` without pseudo
labels. Where every class is annotated by every site, it is the method within.

Shapes: C classes.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from torch import nn

from fedatlas import losses, methods
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Batches, Clients, Member, Method, NetSpec, Site, State, at_site, sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.options import from_dict, option, options
from fedatlas.core.tensors import Tensors, Tree, from_tree, to_tree
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice
from fedatlas.methods.shared.averaging import Supervised
from fedatlas.methods.shared.teachers import (
    SENDS,
    Maker,
    TaughtState,
    Teaching,
    remember,
    require_exclusive,
    train_teacher,
    with_teachers,
)


class CompletedSite:
    """A site as it looks to a method that is put on top of pseudo labels: every batch is completed, and labels say what is
    annotated then."""

    def __init__(self, site: Site, labels: SiteLabels, complete: Callable[[Batch], Batch]) -> None:
        self._site, self._complete = site, complete
        self.labels = labels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    def batches(self, **how: Any) -> Batches:
        return CompletedBatches(self._site.batches(**how), self._complete)

    def once(self, what: str, of: Mapping[str, Tree], make: Callable[[], dict[str, Tree]]) -> dict[str, Tree]:
        """Made each time: of these labels nothing is kept."""
        return make()

    def with_predictions(self, net: nn.Module, **how: Any) -> Any:
        raise FederationError(
            "pseudo labels: the method within asks for predictions ahead of training, which are of other labels than "
            "those of the teachers; take it alone"
        )


class CompletedBatches:
    """Batches with pseudo labels."""

    def __init__(self, batches: Batches, complete: Callable[[Batch], Batch]) -> None:
        self.batches, self.complete = batches, complete

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.complete, self.batches)


@options
class MethodChoice:
    """A method by its registered name."""

    name: str = option("fedavg", "A registered method for segmentation, other than pseudo_labels itself.")
    options: dict[str, Any] = option(
        {}, "The options of that method; local training is the file's own key `local`."
    )


@dataclass(frozen=True)
class InnerState(TaughtState):
    """inner: the state of the method within, without its model."""

    inner: dict[str, Tree] = field(default_factory=dict)


@options
class PseudoLabels(Method):
    """A method of your choice on labels that teachers of all sites complete (the star of UFPS's comparison)."""

    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    state: ClassVar[type[State]] = InnerState

    inner: MethodChoice = option(MethodChoice(), "The method that trains on the completed labels.")
    teachers: Teaching = option(Teaching(), "How teachers are trained and asked.")
    local: Local = option(Local(), "Training at a site between two exchanges.")

    @functools.cached_property
    def method(self) -> Method:
        """The method within. Raises FederationError for one that cannot be, and for its options."""
        what = "method pseudo_labels: inner"
        cls = methods.get(self.inner.name)
        if "local" in self.inner.options:
            raise FederationError(
                f"{what}.options.local: unknown key; local training is the file's own key `local`"
            )
        if cls is PseudoLabels:
            raise FederationError(f"{what}.name: is pseudo_labels; name the method that is to train")
        chosen = cls.upgraded(self.inner.options)
        made = from_dict(cls, {**chosen, "local": self.local}, what=f"{what}.options")
        if "segmentation" not in made.tasks:
            raise FederationError(f"{what}.name: {self.inner.name} is not for segmentation")
        if any("teachers" in inspect.signature(one).parameters for one in made.functions().values()):
            raise FederationError(
                f"{what}.name: {self.inner.name} has teachers of its own; take it alone, or a method without"
            )
        if getattr(made, "teacher", None) == "cached":
            raise FederationError(
                f"{what}.options.teacher: is cached, which predicts on other labels than those of the teachers; take another"
            )
        if made.pooled:
            raise FederationError(
                f"{what}.name: {self.inner.name} trains at one site that holds all cases; allowed: a method whose "
                "sites train apart"
            )
        return made

    @property
    def loss(self) -> LossChoice:
        """That of the method within, which its teachers have too, unless they have their own; of a method whose loss is of
        heads, the default for exclusive classes."""
        return _exclusive(self.method.loss or LossChoice())

    def teachers_loss(self, space: LabelSpace) -> LossChoice:
        """`loss`, as the method within has it where the file leaves it open."""
        inner = self.method
        return _exclusive(inner.supervised(space)) if isinstance(inner, Supervised) else self.loss

    @property
    def own_tensors(self) -> bool:
        return self.method.own_tensors

    @property
    def nets(self) -> Mapping[str, NetSpec]:
        return self.method.nets

    @property
    def sends(self) -> dict[str, dict[str, str]]:
        return {"teacher_update": SENDS, **sends_of(self.method)}

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Those of the method within, at a site whose batches are completed, and the training of a teacher."""
        inner = {name: self._on_completed(function) for name, function in self.method.functions().items()}
        return {"teacher_update": self.teacher_update, **inner}

    def start(self, net: nn.Module, clients: Clients) -> InnerState:
        return self._outer(self.method.start(net, clients), {})

    def round(self, state: InnerState, clients: Clients) -> InnerState:
        to = with_teachers(clients, state, self.teacher_update)
        inner = self.method.round(self._inner(state), cast(Clients, to))
        return self._outer(inner, to.left())

    def eval_members(self, state: InnerState, site: str) -> list[Member]:
        """Those of the method within."""
        return self.method.eval_members(self._inner(state), site)

    @at_site
    def teacher_update(self, site: Site, model: Tensors, rounds: int) -> dict[str, Any]:
        """A teacher of the site alone, from the common start."""
        return train_teacher(
            site, model, rounds, self.teachers, local=self.local, loss=self.teachers_loss(site.labels.space)
        )

    def _on_completed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def asked(site: Site, teachers: Mapping[str, Mapping[str, Any]] | None = None, **payload: Any) -> Any:
            remember(site, teachers)
            maker = Maker(site, self.teachers, self.local, self.teachers_loss(site.labels.space))
            answer = function(CompletedSite(site, maker.labels, maker), **payload)
            maker.log()
            return answer

        return asked

    def _inner(self, state: InnerState) -> Any:
        own = {"model": state.model, "round": state.round, "rounds": state.rounds}
        return from_tree(self.method.state, {**state.inner, **own})

    def _outer(self, inner: State, kept: Mapping[str, Any]) -> InnerState:
        tree = to_tree(inner)
        assert isinstance(tree, dict)
        rest = {name: value for name, value in tree.items() if name not in ("model", "round", "rounds")}
        return InnerState(inner.model, inner.round, inner.rounds, inner=rest, **kept)

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the method within, or pseudo labels, do not fit the label space."""
        require_exclusive("pseudo_labels", space)
        self.method.check(space)
        self.teachers.check(space, self.teachers_loss(space), self.local)
        if not self.teachers.exclusive and self.method.reads_target:
            raise FederationError(
                f"method pseudo_labels: {self.inner.name} reads one class per voxel, and teachers.exclusive is false, with "
                "which pseudo labels may overlap; take another method, or set teachers.exclusive to true"
            )

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell. Raises as the method within does."""
        notes = self.method.examine(net, sites)
        if self.inner.name == "condistfl":
            notes.append(
                "condistfl distils what is not annotated, and here every class has a label: it is fedavg"
            )
        if self.method.chosen_by_site:
            notes.append(
                f"{self.inner.name} lets each site choose its own round where it is taken alone; within pseudo_labels one round counts for all"
            )
        return [*notes, *self.teachers.notes(len(sites), net, self.local)]

    def steps_before(self, rounds: int, sites: int, cases: int | None = None) -> int | None:
        """Those of the teachers and of the method within."""
        both = (
            self.teachers.steps(self.local, rounds, sites, cases),
            self.method.steps_before(rounds, sites, cases),
        )
        return None if None in both else sum(both)  # type: ignore[arg-type]

    def updates_per_step(self) -> int:
        return self.method.updates_per_step()

    def best_from(self, rounds: int) -> int:
        return self.method.best_from(rounds)

    def plan(self, rounds: int) -> list[str]:
        """What `check` should tell. Raises as the method within does."""
        return self.method.plan(rounds)


def _exclusive(chosen: LossChoice) -> LossChoice:
    """The loss, or the default where it is not for exclusive classes."""
    kind = losses.find(chosen.name)
    return chosen if kind is None or kind.exclusive else LossChoice()
