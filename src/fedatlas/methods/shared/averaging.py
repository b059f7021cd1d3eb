"""Base classes of methods that average models. A method derives from one and adds its own part.

    Supervised        trains with a supervised loss: the options `loss` and `local`
    Weighted          and weighs sites: `weights`
    MeanOfModels      and takes the mean of their models in every round
    Averaging         and can take the rows of the head by themselves: `aggregate_unlabelled_rows`
    Pooled            Supervised at one site that holds the cases of all

Below them is how much a site counts in the mean: of the whole model, or of each class's row of its head.

Shapes: K sites, C classes.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Method, Replies, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, average, head_of, tensors_of
from fedatlas.learning.loop import Local, train
from fedatlas.losses import LossChoice

Weighting = Literal["cases", "equal"]

SENDS = {"model": "model", "n": "cases"}
SENDS_PER_CLASS = SENDS | {"labelled": "per class"}
"""What a site answers where every row of the head has weights of its own."""


@dataclass(frozen=True)
class RowState(State):
    """A state whose head is averaged row by row. head: tensor of the head -> its axis of classes."""

    head: dict[str, int] = field(default_factory=dict)


@options
class Supervised(Method):
    """A method whose sites train with a supervised loss."""

    loss: LossChoice = option(LossChoice(), "The supervised loss.")
    local: Local = option(Local(), "Training at a site between two exchanges.")

    def supervised(self, space: LabelSpace) -> LossChoice:
        """The supervised loss; a method may have its own where `loss` leaves it open."""
        return self.loss

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the options do not fit the label space or each other."""
        losses.make(self.supervised(space), space)

    def start(self, net: nn.Module, clients: Clients) -> State:
        return State(tensors_of(net))


@options
class Weighted(Supervised):
    """A method in which every site has a weight."""

    weights: Weighting = option("cases", "n_k/n: a site counts by its training cases, or all count equally.")


@options
class MeanOfModels(Weighted):
    """The server takes the weighted mean of the sites' models. A method whose `round` needs each model by itself is a
    `Weighted`, or says `summed = None`: secure aggregation gives it nothing but the mean."""

    sends: ClassVar[dict[str, str]] = SENDS
    local_update: ClassVar[Any]
    """Trains the model of the round at a site; a method defines it."""

    @property
    def summed(self) -> Weighting | None:
        return self.weights

    def round(self, state: Any, clients: Clients) -> State:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        model = mean(replies, state, self.weights)  # McMahan 2017, Alg. 1, w_{t+1}
        return dataclasses.replace(state, model=model, round=state.round + 1)


@options
class Averaging(MeanOfModels):
    """FedAvg, whose mean may weigh every row of the head by the cases annotated for its class."""

    aggregate_unlabelled_rows: bool = option(
        True,
        "Whether row c of the head counts for sites that do not annotate class c; false weighs it by the cases "
        "annotated for c, as FedPSL does.",
    )

    @property
    def per_class(self) -> bool:
        """Whether the rows of the head have weights of their own."""
        return not self.aggregate_unlabelled_rows

    @property
    def state(self) -> type[State]:
        return RowState if self.per_class else State

    @property
    def sends(self) -> dict[str, str]:
        return SENDS_PER_CLASS if self.per_class else SENDS

    @property
    def summed(self) -> Weighting | None:
        return None if self.per_class else self.weights

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """Raises FederationError for a net whose head has no rows of classes, where these have weights of their own."""
        if self.per_class:
            head_of(net)
        return super().examine(net, sites)

    def start(self, net: nn.Module, clients: Clients) -> State:
        return started(net, per_class=self.per_class)

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        loss = losses.supervised(self.loss, site)
        train(site, net, loss, self.local, round=round, rounds=rounds)  # McMahan 2017, Alg. 1, ClientUpdate
        return answer(site, net, per_class=self.per_class)


@options
class Pooled(Supervised):
    """Training at one site that holds all cases. The server takes its model unchanged."""

    pooled: ClassVar[bool] = True
    local_update: ClassVar[Any]
    """Trains the model at the site; a method defines it."""

    local: Local = option(Local(), "Training between two evaluations.")

    def round(self, state: State, clients: Clients) -> State:
        replies = clients.call(self.local_update, model=state.model, round=state.round, rounds=state.rounds)
        [(_, reply)] = replies
        return dataclasses.replace(state, model=reply["model"], round=state.round + 1)


def started(net: nn.Module, *, per_class: bool) -> State:
    """The state before the first round; with `per_class` the head will be averaged row by row. Raises as `head_of`."""
    return RowState(tensors_of(net), head=head_of(net)) if per_class else State(tensors_of(net))


def mean(replies: Replies, state: State, rule: Weighting) -> Tensors:
    """The next global model: the weighted mean of the replies, its head row by row for a `RowState`."""
    models, weights = replies.each("model"), site_weights(replies, rule)
    if not isinstance(state, RowState):
        return average(models, weights)
    return average_rows(models, weights, row_weights(replies, rule), head=state.head, old=state.model)


def site_weights(replies: Replies, rule: Weighting) -> list[float]:
    """[K] the training cases "n" of every reply, or 1 for each."""
    return replies.plain("n") if rule == "cases" else [1] * len(replies.sites)


def row_weights(replies: Replies, rule: Weighting) -> list[list[float]]:
    """[K, C] the training cases "labelled" in which class c is annotated, or 1 where there is any."""
    labelled = replies.plain("labelled")
    return labelled if rule == "cases" else [[int(n > 0) for n in row] for row in labelled]


def answer(site: Site, net: nn.Module, *, per_class: bool) -> dict[str, Any]:
    """The reply of a trained site: its model and n_k, and with `per_class` n_k^c for each class c."""
    own = {"model": tensors_of(net), "n": site.n_train}
    return own | ({"labelled": site.n_labelled.tolist()} if per_class else {})


def average_rows(
    models: Iterable[Mapping[str, Tensor]],
    weights: Sequence[float],
    rows: Sequence[Sequence[float]],
    *,
    head: Mapping[str, int],
    old: Tensors,
) -> Tensors:
    """The weighted mean of K models (`core.tensors.average`) in which row c of the head has weights of its own.

    weights: [K], of everything but the head. rows: [K, C], of the head, as `head_of` gives it. A row whose weights
    are all 0 stays as it is in `old`.

    Source: FedPSL (`methods.fedpsl`), Eq. (9). Raises FederationError unless there is one weight per row.
    """
    phi = torch.as_tensor(rows, dtype=torch.float64)
    for name, axis in head.items():
        if phi.dim() != 2 or phi.shape[1] != old[name].shape[axis]:
            raise FederationError(
                f"the sites count annotated cases for {[len(row) for row in rows]} classes; {name} has "
                f"{old[name].shape[axis]}"
            )
    nobody = phi.sum(0) == 0
    phi[:, nobody] = 1  # any weights that can be divided by: these rows are not used
    moved = ({name: _turned(tensor, head.get(name, 0)) for name, tensor in model.items()} for model in models)
    mean = average(moved, weights, each=dict.fromkeys(head, phi))
    for name, axis in head.items():
        mean[name][nobody] = _turned(old[name], axis)[nobody]
        mean[name] = _turned(mean[name], axis).contiguous()
    return mean


def _turned(tensor: Tensor, axis: int) -> Tensor:
    """With the given axis and the first exchanged."""
    return tensor.transpose(0, axis) if axis else tensor
