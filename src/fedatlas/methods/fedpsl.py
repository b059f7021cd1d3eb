"""Federated partially supervised learning with limited decentralized medical images (FedPSL).

Dong, Kampffmeyer, Voiculescu, Xing. IEEE Transactions on Medical Imaging 42(7), 2023.

The net is an extractor f_theta and a predictor g_phi with one row phi^c per class. Task-dependent model aggregation
(TDMA): the server takes the mean of theta weighted by a site's cases, and that of row phi^c weighted by the cases
that the site annotates for class c, so that a site has no say in a predictor which it cannot train. Task-agnostic
decoupling learning (TADL): theta and phi learn from different halves of every batch; phi from one, and theta from
the loss on the other half after a step of its own on the first.

    TDMA (server)  theta_0 = sum_k n_k / n theta_k,   phi_0^c = sum_k n_k^c / sum_k n_k^c phi_k^c          Eq. (9)
    TADL (site)    theta' = theta - alpha grad_theta L_train(phi, theta)                                   line 6
                   phi   <- phi   - alpha grad_phi   L_train(phi, theta)                                   line 7
                   theta <- theta - beta  grad_theta L_val(phi, theta'),   through theta'                  line 9

Differences from the paper, and what it leaves open
    The text trains with Adam, Algorithm 1 with plain steps. Here theta' is a plain step; the steps that stay, those
    of lines 7 and 9, go through the federation's optimizer, which is given the gradients above (`outer: plain` is
    Algorithm 1 as printed). The loss of line 9 sees phi after a plain step in either case. The phi of line 9 is a
    constant there; Eq. (10) may be read otherwise (`phi_in_outer`). The schedule of the learning rate scales alpha
    as it scales beta. Whether Adam's moments outlive a round is not stated; `local.opt_state` decides.
    A class that no site annotates keeps its row, also where the sites that do are lost.
    Batch norm: the running statistics are those of the first half at theta; the second half, at theta', is
    normalised by its own and leaves none.
    The first half has the odd sample, and a batch of one sample is both halves.
    Positive weights are those of a site's own cases. The batch size and the augmentation are not given.
    The paper classifies images. Any net with a head of one row per class will do; theta is all the rest, so heads
    of deep supervision are of theta. With the softmax losses of segmentation, row 0 is annotated in every case, and
    rows of classes that a site does not annotate do move there, as parts of the background.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, head_of
from fedatlas.learning.loop import Loop, train
from fedatlas.losses import LossChoice
from fedatlas.methods.shared.averaging import (
    SENDS,
    SENDS_PER_CLASS,
    RowState,
    Supervised,
    Weighting,
    answer,
    mean,
    started,
)

PhiInOuter = Literal["updated", "old", "joint"]


@options
class FedPSL(Supervised):
    """Heads averaged by annotated cases, and extractors learnt apart from heads (Dong 2023)."""

    tdma: bool = option(
        True, "Whether row c of the head is averaged by n_k^c (Eq. 9); false is FedAvg's mean."
    )
    tadl: bool = option(True, "Whether theta and phi learn from different halves of a batch; false: jointly.")
    alpha: float = option(1e-3, "alpha: length of the plain step to theta' (line 6).", ge=0)
    phi_in_outer: PhiInOuter = option(
        "updated",
        "The phi of line 9: that of line 7 as a constant, the one before it, or jointly, as a function of theta "
        "(Eq. 10).",
    )
    order: Literal[1, 2] = option(
        2, "2: line 9 differentiates through the step of line 6; 1: it stops at theta'."
    )
    outer: Literal["local", "plain"] = option(
        "local",
        "Lines 7 and 9 by the optimizer of `local`, or as printed: plain steps of alpha and of beta, which is "
        "local.lr; local's optimizer, momentum and weight_decay then have no part.",
    )
    loss: LossChoice = option(LossChoice(), "L, the supervised loss.")

    def start(self, net: nn.Module, clients: Clients) -> State:
        if self.tadl:
            head_of(net)
        return started(net, per_class=self.tdma)

    def round(self, state: State, clients: Clients) -> State:
        replies = clients.call(
            self.local_update, model=state.model, round=state.round, rounds=state.rounds
        )  # Alg. 2, lines 2 to 5
        model = mean(replies, state, "cases")  # line 6, Eq. (9)
        return dataclasses.replace(state, model=model, round=state.round + 1)

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)  # Alg. 2, line 3
        if self.tadl:
            self.client_update(site, net, round, rounds)
        else:
            train(site, net, losses.supervised(self.loss, site), self.local, round=round, rounds=rounds)
        return answer(site, net, per_class=self.tdma)

    def client_update(self, site: Site, net: nn.Module, round: int, rounds: int) -> None:
        """Alg. 1: one round of local training. "loss", in the log, is the mean of the losses of both halves."""
        L_site, head = losses.supervised(self.loss, site), head_of(net)
        optimizer = self.plain_steps(net, head) if self.outer == "plain" else None
        loop = Loop(site, net, self.local, round=round, rounds=rounds, optimizer=optimizer)
        theta: Tensors = {name: p for name, p in loop.named.items() if name not in head}
        phi: Tensors = {name: p for name, p in loop.named.items() if name in head}

        def L_train(batch: Batch, theta: Tensors, phi: Tensors, buffers: Tensors | None = None) -> Tensor:
            def outputs(image: Tensor) -> Any:
                return functional_call(net, theta | phi | (buffers or {}), (image,))

            with loop.autocast():
                return L_site(outputs, batch)  # type: ignore[arg-type]

        def L_val(batch: Batch, theta: Tensors, phi: Tensors) -> Tensor:
            return L_train(batch, theta, phi, {name: b.clone() for name, b in net.named_buffers()})

        for batch in loop:  # lines 2, 3
            B_train, B_val = halves(batch)  # line 4
            made = tadl(
                partial(L_train, B_train),
                partial(L_val, B_val),
                theta,
                phi,
                self.alpha * loop.factor,
                phi_in_outer=self.phi_in_outer,
                order=self.order,
            )  # lines 6 to 9
            loop.move(made.theta | made.phi)
            loop.note((made.train + made.validation) / 2, train=made.train, validation=made.validation)

    def plain_steps(self, net: nn.Module, head: Mapping[str, int]) -> torch.optim.Optimizer:
        """phi by steps of alpha, theta by steps of beta."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                groups[name in head].append(parameter)
        lengths = {True: self.alpha, False: self.local.lr}
        return torch.optim.SGD(
            [
                {"params": values, "lr": lengths[key], "initial_lr": lengths[key]}
                for key, values in groups.items()
            ]
        )

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space or each other."""
        losses.make(self.loss, space)
        if self.tadl and self.local.batch < 2:
            raise FederationError(
                f"method fedpsl: local.batch is {self.local.batch}; TADL learns from the two halves of a batch, so at "
                "least 2 are needed. Set tadl to false to do without"
            )
        if self.tadl and self.local.precision == "fp16":
            raise FederationError(
                "method fedpsl: local.precision is fp16, whose scaled loss would scale the step to theta' too; use "
                "float32 or bf16, or set tadl to false"
            )

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """Raises FederationError for a net whose head has no rows of classes, which TDMA and TADL need."""
        if self.tdma or self.tadl:
            head_of(net)
        return super().examine(net, sites)

    @property
    def state(self) -> type[State]:
        return RowState if self.tdma else State

    @property
    def sends(self) -> dict[str, str]:
        return SENDS_PER_CLASS if self.tdma else SENDS

    @property
    def summed(self) -> Weighting | None:
        return None if self.tdma else "cases"


class Decoupled(NamedTuple):
    """theta: the gradient of line 9. phi: that of line 7. phi_new: phi after line 7. train, validation: the losses.
    A gradient is None where the loss does not depend on the parameter."""

    theta: dict[str, Tensor | None]
    phi: dict[str, Tensor | None]
    phi_new: Tensors
    train: Tensor
    validation: Tensor


Objective = Callable[[Tensors, Tensors], Tensor]
"""A loss on a half batch as a function of theta and phi."""


def tadl(
    L_train: Objective,
    L_val: Objective,
    theta: Tensors,
    phi: Tensors,
    alpha: float,
    *,
    phi_in_outer: PhiInOuter = "updated",
    order: Literal[1, 2] = 2,
) -> Decoupled:
    """The gradients of one pass through Algorithm 1, lines 6 to 9; nothing is changed.

    theta, phi: leaves that require a gradient. With g' = grad_theta' L_val and H the Hessian of L_train in theta, the
    gradient of theta is (I - alpha H) g'; less alpha (d2 L_train / dphi dtheta)^T grad_phi L_val if `joint`; or g'
    alone where `order` is 1.
    """
    l_train = L_train(theta, phi)
    g_theta, g_phi = _gradients(l_train, theta, phi, create_graph=order == 2)
    theta_prime = _moved(theta, g_theta, alpha)  # line 6
    phi_new = _moved(phi, g_phi, alpha)  # line 7
    if order == 1:
        theta_prime = {name: value.detach().requires_grad_() for name, value in theta_prime.items()}
    constant = {name: value.detach() for name, value in phi_new.items()}
    joint = phi_new if order == 2 else constant
    seen = {"updated": constant, "old": {name: value.detach() for name, value in phi.items()}, "joint": joint}
    l_val = L_val(theta_prime, seen[phi_in_outer])
    [outer] = _gradients(l_val, theta if order == 2 else theta_prime)  # line 9
    return Decoupled(
        outer,
        {name: None if g is None else g.detach() for name, g in g_phi.items()},
        constant,
        l_train.detach(),
        l_val.detach(),
    )


def _gradients(value: Tensor, *groups: Tensors, create_graph: bool = False) -> list[dict[str, Tensor | None]]:
    """The gradient of a scalar in each group of tensors."""
    flat = [tensor for group in groups for tensor in group.values()]
    found = iter(torch.autograd.grad(value, flat, create_graph=create_graph, allow_unused=True))
    return [{name: next(found) for name in group} for group in groups]


def _moved(values: Tensors, gradients: Mapping[str, Tensor | None], alpha: float) -> Tensors:
    """A plain step of length alpha; None is no gradient."""
    steps = ((name, value, gradients[name]) for name, value in values.items())
    return {name: value if g is None else value - alpha * g for name, value, g in steps}


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """B_train and B_val: the first half of a batch, with the odd sample, and the rest. One sample is both."""
    size = len(batch.image)
    middle = (size + 1) // 2
    parts = (slice(0, middle), slice(middle if size > 1 else 0, size))
    first, second = (batch.part(part) for part in parts)
    return first, second
