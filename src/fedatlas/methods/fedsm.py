"""FedSM.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu. Closing the generalization gap of cross-silo federated medical
image segmentation. CVPR 2022.

Three kinds of model are learnt together: the global one, as in FedAvg; a personalised one for each site, pulled a
little towards those of the others; and a selector, which tells from an image which site it is from. An image is given
to the personalised model of the site that the selector is certain of, and to the global model where it is certain of
none: so an image of a hospital that trained nothing goes to a model of a hospital like it, or to the one of all.

    w_g   <- sum_k n_k/n w_g,k                                        the mean of the sites' copies of the global model
    w_p,k <- lam w_p,k + (1 - lam) / (K - 1) sum_{j != k} w_p,j       SoftPull; w_p,k is trained from here
    w_s   <- sum_k n_k/n w_s,k                                        the selector, whose label at site k is k
    predict with w_p,argmax s(x) if max s(x) > gamma, else w_g        s: the softmax of the selector

A personalised model speaks for all classes, as in the paper, whose sites all annotate the same: of what a site does not annotate
it knows what SoftPull brings it.

lam = 1 trains every personalised model alone; lam = 1/K gives the mean to everyone.

The global copy, the personalised one and the selector are trained one after the other, on batches of their own: two
passes over a site's cases give different batches, and so the two models of a site do not see the same patches in a
round. Their optimizers have memory of their own (`local.opt_state`); the selector's has none at the site. Its step has
the gradient of a whole pass over the training cases; Adam's moments are averaged with the selector and go on from the
mean, and since all sites take equally many steps, so does its count of them. A site has images of one label only: many
steps in a round move its selector towards "always k", and one, as published, needs a hundred rounds and more to learn.

Differences from the paper, and what it leaves open
    A selector is given a window of a volume, or a slice with its neighbours, as the net is: in training as
    augmentation leaves it, at inference by the mean of its softmax over the windows of a case, because a case is of one
    site. The paper has 2D images, each of which it chooses for.
    A site that gives no answer in a round keeps its personalised model as it is, and that pulls no other: lam's
    complement is divided among those that did answer. A site that trains nothing has no model and no output of the
    selector; it is given the same set of models, as are all sites: also a site that trained is routed by the selector,
    and not by its name.
    Everybody is evaluated with K + 2 models, which all travel to each site that is, and are in its memory there: the
    price of an evaluated round grows with the number of sites (`evaluation.every`). Every site's personalised model is
    thereby sent to all others.
    What a run keeps as a site's local model is its copy of the global one.

Differences from the official code (NVFlare's fed-sm)
    The gradient of the selector's step is the mean over images and not the sum over batches of their means; Adam
    hardly feels the difference. Its selector is VGG-11 for slices (`selector.net: vgg11`, whose linear layers begin here
    as torch has them; in 3D they would have 700 million weights); the default is small, for CPUs. That code weighs
    sites by local steps, this one by cases (`weights`).

Shapes: B batch, K sites that train, in the order of their names.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Member, NetSpec, Replies, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import Natural, option, options
from fedatlas.core.tensors import Tensors, average, from_tree, tensors_of, to_tree
from fedatlas.learning.loop import Local, optimizer_tree, restore_optimizer, train
from fedatlas.methods.shared.averaging import SENDS, Weighted, Weighting, answer, site_weights

SELECTOR = "selector"
"""The selector's name among the nets of a method."""

PERSON = "fedsm.person"
"""The key of a site's memory with the optimizer of its personalised model."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of every parameter beside its count of steps."""

VGG11: dict[str, Any] = {
    "filters": [64, 128, 256, 512, 512],
    "convolutions": [1, 1, 2, 2, 2],
    "norm": "none",
    "halve_last": True,
    "cells": 7,
    "hidden": [4096, 4096],
}
"""As options of the net `cnn`."""


@options
class Selector:
    """The net that tells sites apart by their images, and how it is trained."""

    net: Literal["cnn", "vgg11"] = option(
        "cnn",
        "cnn: convolutions in blocks that are halved between them; vgg11: that of the paper, 129 million weights in 2D.",
    )
    filters: tuple[Natural, ...] = option((16, 32, 64), "Of cnn: channels of each block.", min_length=1)
    convolutions: tuple[Literal[1, 2], ...] = option((), "Of cnn: convolutions of each block; empty: one.")
    optimizer: Literal["adam", "sgd"] = option(
        "adam", "Adam, whose moments are averaged with the selector, or plain steps."
    )
    lr: float = option(1e-3, "Learning rate.", gt=0)
    steps: int = option(1, "Steps per round, each with the gradient of all images of its batches.", ge=1)
    epochs: float = option(1.0, "Passes over the training cases whose gradient one step has.", gt=0)
    batch: int | None = option(None, "Images at a time; null: as `local`. It decides memory alone.", ge=1)

    def __post_init__(self) -> None:
        if self.net == "vgg11" and (self.filters != (16, 32, 64) or self.convolutions):
            raise FederationError(
                "fedsm: selector: net is vgg11, which has filters and convolutions of its own; leave them out, or set "
                "net to cnn"
            )

    @property
    def spec(self) -> NetSpec:
        """Without normalisation, which would hide the scanner's brightness and contrast."""
        if self.net == "cnn":
            each = list(self.convolutions) or [1] * len(self.filters)
            small = {"filters": list(self.filters), "convolutions": each, "norm": "none"}
            return NetSpec("cnn", small, outputs="sites")
        return NetSpec("cnn", VGG11, outputs="sites")

    @property
    def sends(self) -> dict[str, str]:
        """What `train_selector` answers."""
        kind = f"model:{SELECTOR}"
        moments = dict.fromkeys(MOMENTS, f"{kind}.parameters")
        return {"selector": kind} | (moments if self.optimizer == "adam" else {})


@dataclass(frozen=True)
class SelectorState:
    """model: w_s. exp_avg, exp_avg_sq: Adam's moments, by parameter; empty before the first step and without Adam.
    steps: taken so far."""

    model: Tensors
    exp_avg: Tensors = field(default_factory=dict)
    exp_avg_sq: Tensors = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True)
class FedSMState(State):
    """model: w_g. persons: site -> w_p,k, of all sites that train. selector: w_s with its optimizer."""

    persons: dict[str, Tensors] = field(default_factory=dict)
    selector: SelectorState = field(default_factory=lambda: SelectorState({}))


@options
class FedSM(Weighted):
    """A global model, one for each site, and a selector that chooses among them by the image (Xu 2022)."""

    state: ClassVar[type[State]] = FedSMState
    lam: float = option(
        0.7, "lambda: what a personalised model keeps of itself; the rest comes from the others.", ge=0, le=1
    )
    threshold: float = option(
        0.9,
        "gamma: the selector's probability above which a personalised model is used; else the global one.",
        ge=0,
        le=1,
    )
    selector: Selector = option(Selector(), "The selector.")
    weights: Weighting = option(
        "cases",
        "n_k/n: in the means of the global model and of the selector a site counts by its training cases, or all equally.",
    )
    local: Local = option(Local(), "Training of either model at a site between two exchanges.")

    @property
    def nets(self) -> dict[str, NetSpec]:
        return {SELECTOR: self.selector.spec}

    @property
    def sends(self) -> dict[str, str]:
        return SENDS | {"person": "model:main"} | self.selector.sends

    def start(self, net: nn.Module, clients: Clients) -> FedSMState:
        model = tensors_of(net)
        persons = dict.fromkeys(sorted(clients.sites), model)
        return FedSMState(model, persons=persons, selector=selector_of(clients))

    def round(self, state: FedSMState, clients: Clients) -> FedSMState:
        each = {
            site: {"person": state.persons[site], "label": k} for k, site in enumerate(sorted(clients.sites))
        }
        replies = clients.call(
            self.local_update,
            each=each,
            model=state.model,
            selector=to_tree(state.selector),
            round=state.round,
            rounds=state.rounds,
        )
        pulled = soft_pull(dict(zip(replies.sites, replies.each("person"), strict=True)), self.lam)
        return dataclasses.replace(
            state,
            model=average(replies.each("model"), site_weights(replies, self.weights)),
            persons=state.persons | pulled,
            selector=selector_mean(
                replies, state.selector, self.selector, site_weights(replies, self.weights)
            ),
            round=state.round + 1,
        )

    def updates_per_step(self) -> int:
        """w_g and w_p,k; those of the selector are not counted."""
        return 2

    def eval_members(self, state: FedSMState, site: str) -> list[Member]:
        """w_g, w_s and every w_p,k, at every site alike."""
        return routed(state.model, state.persons, state.selector.model, self.threshold)

    @at_site
    def local_update(
        self,
        site: Site,
        model: Tensors,
        person: Tensors,
        selector: Mapping[str, Any],
        label: int,
        round: int,
        rounds: int,
    ) -> dict[str, Any]:
        loss = losses.supervised(self.loss, site)
        net = site.network(model)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        reply = answer(site, net, per_class=False)
        net = site.network(person)
        train(site, net, loss, self.local, round=round, rounds=rounds, memory=PERSON, prefix="person_")
        reply["person"] = tensors_of(net)
        batch = self.selector.batch or self.local.batch
        return reply | train_selector(
            site, from_tree(SelectorState, dict(selector)), label, self.selector, batch
        )


def soft_pull(models: Mapping[str, Tensors], lam: float) -> dict[str, Tensors]:
    """site -> lam of its own model and (1 - lam) / (K - 1) of each of the others, in the sorted order of sites; the
    model itself where it is the only one.

    Sums as `core.tensors.average` makes them: float64, cast once. Integer tensors become the largest of those that count.
    Raises NameMismatch for models of different form.
    """
    names, pulled = sorted(models), {}
    others = (1 - lam) / (len(names) - 1) if len(names) > 1 else 0.0
    for k in names:
        weights = {j: lam if j == k else others for j in names}
        counted = [j for j in names if weights[j] > 0] or [k]
        pulled[k] = average((models[j] for j in counted), [weights[j] or 1.0 for j in counted])
    return pulled


def routed(
    model: Tensors, persons: Mapping[str, Tensors], selector: Tensors, threshold: float
) -> list[Member]:
    """The global model, the selector, and the personalised models in the order of its outputs."""
    chooses = Member(selector, net=SELECTOR, chooses=threshold)
    return [Member(model), chooses, *(Member(persons[site]) for site in sorted(persons))]


def selector_of(clients: Clients) -> SelectorState:
    """The selector before its first step. Raises FederationError unless it has one output for each site."""
    net = clients.network(name=SELECTOR)
    outputs = getattr(net, "classes", None)
    if outputs != len(clients.sites):
        raise FederationError(
            f"net {SELECTOR}: has {outputs} outputs for {len(clients.sites)} sites that train "
            f"({', '.join(sorted(clients.sites))}); expected one for each"
        )
    return SelectorState(tensors_of(net))


def train_selector(site: Site, state: SelectorState, label: int, how: Selector, batch: int) -> dict[str, Any]:
    """A site's steps of the selector: cross-entropy with the site's own number `label`, the mean over all images of the
    batches of a step, `batch` at a time. Logs "selector_loss". The reply is what `Selector.sends` declares."""
    net = site.network(state.model, SELECTOR)
    kind = torch.optim.Adam if how.optimizer == "adam" else torch.optim.SGD
    optimizer = kind(net.parameters(), lr=how.lr)
    if state.exp_avg:
        count = torch.tensor(float(state.steps))
        restore_optimizer(
            optimizer,
            net,
            {
                name: {"step": count, "exp_avg": first, "exp_avg_sq": state.exp_avg_sq[name]}
                for name, first in state.exp_avg.items()
            },
        )
    mean = 0.0
    for _ in range(how.steps):
        optimizer.zero_grad()
        total, seen = 0.0, 0
        for images in site.batches(batch=batch, epochs=how.epochs):
            target = torch.full((len(images.image),), label, device=images.image.device)
            loss = F.cross_entropy(net(images.image), target, reduction="sum")
            loss.backward()
            total, seen = total + float(loss.detach()), seen + len(target)
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(seen)
        optimizer.step()
        mean = total / seen
    site.log(selector_loss=mean)
    kept: dict[str, Any] = optimizer_tree(optimizer, net)
    moments = {key: {name: of[key] for name, of in kept.items()} for key in MOMENTS if key in how.sends}
    return {"selector": tensors_of(net)} | moments


def selector_mean(
    replies: Replies, state: SelectorState, how: Selector, weights: Sequence[float]
) -> SelectorState:
    """The next selector from what `train_selector` answered: the means of the sites' selectors and of Adam's moments.
    weights: [K] of the sites."""
    moments = {key: average(replies.each(key), weights) for key in MOMENTS if key in how.sends}
    model = average(replies.each("selector"), weights)
    return dataclasses.replace(state, model=model, steps=state.steps + how.steps, **moments)
