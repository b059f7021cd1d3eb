"""Teachers: a model of every site, trained on its own labels before the first round, handed to all sites once, and the
pseudo labels that a site makes with them.

Jiang, Ma, Zeng, Ying. UFPS, Patterns 2024, Algorithms 1 and 3: the part that is common to UFPS and all methods that its
paper puts on pseudo labels (`pseudo_labels`).

The server keeps the teachers until every site has them; a site keeps them in its memory, and its own from the beginning.
What travels, once: a model from every site, and the models of all others to it.

A teacher is the model of that round of its training in which it was best on the site's own validation cases: the paper
takes the models of SOLO, training alone, as they were chosen (S6.6). `choose: last` takes the last one. How often it is
validated is not in the paper; here every 5 rounds, as the federation of `experiments/ufps`.

Shapes: B batch, C classes with the background, *S spatial.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Replies, Site, State
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels, known_row
from fedatlas.core.options import from_dict, option, options
from fedatlas.core.outputs import Others, voxel_logits
from fedatlas.core.tensors import Tensors, Tree, load, n_bytes, shapes_of, tensors_of, to_tree
from fedatlas.learning.loop import Local, autocast, count_steps, forget_optimizer
from fedatlas.losses import LossChoice
from fedatlas.losses.heads import full_precision
from fedatlas.losses.onehot import DiceBCE
from fedatlas.methods.shared import dp_sgd
from fedatlas.methods.shared.dp_sgd import DPSGD
from fedatlas.methods.shared.pseudo import Merge, Merged, completed, completed_overlapping

MEMORY = "teachers"
"""The key in a site's memory of all teachers, its own included."""

LATER = ("local", "exclusive", "resident")
"""Fields of `Teaching` that decide no teacher, once `Teaching.training` has told what `local` is."""

SENDS = {"teacher": "model:main", "classes": "classes"}
"""What a site answers to the training of its teacher."""


@options
class Teaching:
    """How teachers are trained and asked."""

    rounds: int | None = option(
        None,
        "How long a site's teacher is trained before the first round, in rounds of `local`, within one call "
        "(faults.deadline); null: as long as the federation has rounds.",
        ge=1,
    )
    choose: Literal["best", "last"] = option(
        "best",
        "Which round of its training a teacher is of: the one in which it was best on the site's own validation cases, or the "
        "last, as where a site has none.",
    )
    every: int = option(
        5, "Rounds of its training between validations of a teacher; the last is always validated.", ge=1
    )
    local: dict[str, Any] = option(
        {}, "What is other than in the rounds while teachers are trained, by the keys of `local`."
    )
    loss: LossChoice | None = option(None, "The loss of the teachers; null: that of the rounds.")
    dp_sgd: DPSGD | None = option(
        None,
        "DP-SGD for the teachers, which all sites get; null: without. What is trained and sent after them is not covered, nor "
        "are the validation cases by which `choose` decides.",
    )
    exclusive: bool = option(
        True,
        "Whether a voxel has one pseudo label: its own ground truth, else the first class of which a teacher says so, "
        "else background; false: labels may overlap or leave a voxel empty, as in the published code (loss dice_bce).",
    )
    resident: Literal["one", "all"] = option(
        "one",
        "Whether a site holds one net, into which each teacher's values are loaded when it is asked, or a net for "
        "each.",
    )

    def training(self, local: Local) -> Local:
        """Settings of the teachers' training: `local` of the rounds, with the overrides of this block. Raises
        FederationError for an unknown key or a value that is not allowed."""
        length = {"steps": None, "epochs": None} if {"steps", "epochs"} & set(self.local) else {}
        given = {field.name: getattr(local, field.name) for field in dataclasses.fields(local)}
        return from_dict(Local, {**given, **length, **self.local}, what="teachers.local")

    def check(self, space: LabelSpace, loss: LossChoice, local: Local) -> None:
        """Raises FederationError where teachers, and rounds with this loss, do not fit the label space, or what is other in
        their training does not fit `local` of the rounds."""
        self.training(local)
        for where, chosen in (("loss", loss), ("teachers.loss", self.loss or loss)):
            try:
                made = losses.make(chosen, space)
            except FederationError as error:
                raise FederationError(f"{where}: {error}") from None
            if getattr(made, "channels", None) == "foreground":
                raise FederationError(
                    f"{where}: channels is foreground, so that nothing trains the background, which pseudo labels need; "
                    "take known"
                )
            if not self.exclusive and not isinstance(made, DiceBCE):
                raise FederationError(
                    f"{where}: {chosen.name} takes one class per voxel, and teachers.exclusive is false; take dice_bce, or "
                    "set teachers.exclusive to true"
                )

    def steps(self, local: Local, rounds: int, sites: int, cases: int | None) -> int | None:
        """`Method.steps_before` of a method with these teachers."""
        return 0 if sites < 2 else steps_of(self.training(local), self.rounds or rounds, cases)

    def notes(self, sites: int, net: nn.Module, local: Local) -> list[str]:
        """What `check` should tell of teachers at so many sites. Raises FederationError where they cannot be trained so."""
        if sites < 2:
            return ["one site trains, so that nobody has a teacher for it: labels are its own"]
        size = n_bytes(shapes_of(net)) / 2**20
        long = "as many rounds as the federation has"
        if self.rounds is not None:
            long = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return [
            f"before the first round every site trains a teacher for {long}, within one call; once, it sends that model "
            f"({size:.1f} MiB) and gets {sites - 1} ({size * (sites - 1):.1f} MiB)",
            *dp_sgd.examine(self.dp_sgd, net, self.training(local)),
        ]


def steps_of(local: Local, rounds: int, cases: int | None) -> int | None:
    """Optimizer steps of so many rounds on so many cases; None where `local` is in epochs and the cases are not told."""
    if local.steps is not None:
        return local.steps * rounds
    return None if cases is None else count_steps(None, local.epochs, cases, local.batch) * rounds


def require_exclusive(name: str, space: LabelSpace) -> None:
    """Raises FederationError where classes overlap: a teacher's background would mean nothing."""
    if not space.exclusive:
        raise FederationError(
            f"method {name}: pseudo labels need exclusive classes, and labels.exclusive is false; set it to true, or "
            "take another method"
        )


@dataclass(frozen=True)
class TaughtState(State):
    """teachers: site -> its teacher, kept until all sites have received all teachers.
    classes: site -> annotated classes. served: sites that have received them."""

    teachers: dict[str, Tensors] = field(default_factory=dict)
    classes: dict[str, list[int]] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------ at the server


class WithTeachers:
    """Clients whose first call to a site carries the other sites' teachers, as the argument `teachers`.

    served: the sites that have them, and by and by all that answered.
    """

    def __init__(
        self,
        clients: Clients,
        teachers: Mapping[str, Tensors],
        classes: Mapping[str, Sequence[int]],
        served: Iterable[str],
    ) -> None:
        self._clients, self.served = clients, set(served)
        self._told = {
            name: {"model": teachers[name], "classes": list(classes[name])}
            for name in sorted(teachers)
            if classes[name]  # nothing trained the others for voxels
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def call(
        self, function: Any, *, each: Mapping[str, dict[str, Any]] | None = None, **payload: Any
    ) -> Replies:
        sites = sorted(self._clients.sites if each is None else each)
        new = [site for site in sites if self._told and site not in self.served]
        if new:
            given: dict[str, dict[str, Any]] = {site: dict((each or {}).get(site, {})) for site in sites}
            for site in new:
                given[site]["teachers"] = {name: one for name, one in self._told.items() if name != site}
            each = given
        replies = self._clients.call(function, each=each, **payload)
        self.served |= set(replies.sites)
        return replies

    def left(self) -> dict[str, Any]:
        """What a state keeps of the teachers: nothing once every site has them."""
        served = sorted(self.served)
        if self.served >= set(self._clients.sites):
            return {"teachers": {}, "classes": {}, "served": served}
        teachers = {name: one["model"] for name, one in self._told.items()}
        return {
            "teachers": teachers,
            "classes": {name: list(one["classes"]) for name, one in self._told.items()},
            "served": served,
        }


def with_teachers(clients: Clients, state: TaughtState, teacher_update: Callable[..., Any]) -> WithTeachers:
    """The clients of a round, who get the teachers that they lack; before the first round the teachers are trained, by the
    method's function `teacher_update(site, model, rounds)`. One site alone has none."""
    teachers, classes = dict(state.teachers), dict(state.classes)
    if state.round == 0 and len(clients.sites) > 1:
        for site, reply in clients.call(teacher_update, model=state.model, rounds=state.rounds):
            teachers[site], classes[site] = reply["teacher"], reply["classes"]
    return WithTeachers(clients, teachers, classes, state.served)


# -------------------------------------------------------------------------------------------------------- at the site


@dataclass
class Chosen:
    """The model of the round with the highest score so far; of equal scores the first."""

    model: Tensors | None = None
    round: int = 0
    score: float = -1.0

    def see(self, net: nn.Module, round: int, score: float | None) -> None:
        """score: of the net after a round; None where it has none."""
        if score is not None and score > self.score:
            self.model, self.round, self.score = tensors_of(net), round, score


def train_teacher(
    site: Site, model: Tensors, rounds: int, how: Teaching, *, local: Local, loss: LossChoice
) -> dict[str, Any]:
    """Trains a site's teacher from the common start, keeps it, and returns what is sent. One that was trained to the same bits
    before, in another run or before this one was killed, is taken from the site's cache (`Site.once`), but for DP-SGD.
    rounds: of the federation; local, loss: of its rounds, where `how` names no others. A site that annotates findings of
    whole images alone has none: it answers the start, of no class, which nobody is taught by."""
    if not site.labels.annotated:
        return {"teacher": model, "classes": []}
    how = dataclasses.replace(how, rounds=how.rounds or rounds, loss=how.loss or loss)
    own_local = how.training(local)
    if how.dp_sgd is not None:  # every training is a release, which is counted
        teacher = _trained(site, model, how, own_local)
    else:
        decides = {f.name: getattr(how, f.name) for f in dataclasses.fields(how) if f.name not in LATER}
        of = cast(dict[str, Tree], to_tree({"start": model, "local": own_local, **decides}))
        teacher = cast(Tensors, site.once("teacher", of, lambda: dict(_trained(site, model, how, own_local))))
    classes = sorted(site.labels.annotated)
    site.memory[MEMORY] = cast(Tree, {site.name: {"model": dict(teacher), "classes": classes}})
    return {"teacher": teacher, "classes": list(classes)}


def _trained(site: Site, model: Tensors, how: Teaching, local: Local) -> Tensors:
    """A site's teacher from the common start, by settings that are all given."""
    assert how.rounds is not None and how.loss is not None
    net, memory, best = site.network(model), "teacher optimizer", Chosen()
    supervised, length = losses.supervised(how.loss, site), how.rounds
    spent = {"memory": "teacher dp_sgd", "prefix": "teacher_"}
    with dp_sgd.accounted(how.dp_sgd, site, net, local, **spent) as private:
        for round in range(length):  # Alg. 1, line 2
            place: dict[str, Any] = {"round": round, "rounds": length, "memory": memory, "prefix": "teacher_"}
            dp_sgd.train(private, site, net, supervised, local, **place)  # line 3
            last = round + 1 == length
            # one alone is the best, whatever its score
            if how.choose == "best" and length > how.every and (last or (round + 1) % how.every == 0):
                best.see(net, round + 1, site.score(net))
    forget_optimizer(site, memory)
    if best.model is not None:
        site.log(teacher_round=best.round, teacher_score=best.score)
    return best.model or tensors_of(net)


def remember(site: Site, teachers: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Keeps the other sites' teachers, {"model", "classes"} by site, as they come once; None: they came before."""
    if teachers is not None:
        all_of = {**cast(dict[str, Any], site.memory.get(MEMORY, {})), **teachers}
        site.memory[MEMORY] = cast(Tree, {name: dict(all_of[name]) for name in sorted(all_of)})


class Maker:
    """Makes pseudo labels at a site with the teachers in its memory, which are asked in evaluation mode and in the order of
    their sites' names. Without any teacher it changes nothing."""

    def __init__(self, site: Site, how: Teaching, local: Local, loss: LossChoice) -> None:
        """loss: of the rounds, with which teachers are trained where `how` names no other."""
        self.site, self.how, self.local = site, how, local
        self.others: Others = losses.others_of(how.loss or loss)
        kept = cast(dict[str, Any], site.memory.get(MEMORY, {}))
        space = site.labels.space
        self.models: dict[str, Tensors] = {name: kept[name]["model"] for name in sorted(kept)}
        self.speaks = {
            name: torch.tensor(known_row(space, kept[name]["classes"]), device=site.device)
            for name in self.models
        }
        self.taught = torch.zeros(len(space), dtype=torch.bool, device=site.device)
        for speaks in self.speaks.values():
            self.taught = self.taught | speaks
        self.nets: dict[str, nn.Module] = {}
        self.seconds = 0.0

    @property
    def labels(self) -> SiteLabels:
        """What is annotated at the site or known to a teacher."""
        own = self.site.labels
        taught = {c for c in own.space.foreground if self.taught[c]}
        return dataclasses.replace(own, annotated=own.annotated | taught)

    def net(self, name: str) -> nn.Module:
        """A teacher, until the next one is asked for where only one is held."""
        if name not in self.nets and (self.how.resident == "all" or not self.nets):
            self.nets[name] = self.site.network(self.models[name]).eval().requires_grad_(False)
        elif name not in self.nets:
            _, net = self.nets.popitem()
            load(net, self.models[name])
            self.nets[name] = net
        return self.nets[name]

    def within(self) -> torch.autocast:
        """The arithmetic in which teachers compute."""
        return autocast(self.local, self.site.device)

    @torch.no_grad()
    def merged(self, image: Tensor, names: Iterable[str] | None = None) -> Merged:
        """What the teachers, all by default, say of images [B, I, *S]. Raises FederationError where there is none."""
        began = time.perf_counter()
        merge = Merge(self.others)
        for name in self.models if names is None else names:
            with self.within():
                logits = voxel_logits(self.net(name)(image))
            merge.add(full_precision(logits), self.speaks[name])
        self.seconds += time.perf_counter() - began
        return merge.result()

    def complete(self, batch: Batch, masks: Tensor) -> Batch:
        """A batch in which everything that a teacher knows is labelled: by the sample's own ground truth where it is
        annotated, else by masks [B, C, *S] bool."""
        make = completed if self.how.exclusive else completed_overlapping
        target, known = make(batch.target, batch.known, masks, self.taught)
        return dataclasses.replace(batch, target=target, known=known)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with pseudo labels; only the teachers are asked that know what some sample lacks."""
        names = list(self.models)
        if self.how.exclusive:
            lacking = (~batch.known).any(0)
            names = [name for name in names if bool((self.speaks[name] & lacking).any())]
        if not names:
            return batch
        return self.complete(batch, self.merged(batch.image, names).masks)

    def log(self) -> None:
        """Tells how long the teachers were asked."""
        if self.models:
            self.site.log(teacher_seconds=self.seconds)
