"""SCAFFOLD.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: stochastic controlled averaging for federated learning.
ICML 2020.

Sites whose data differ pull the model apart. Every site keeps a control variate c_i, its own usual gradient, the
server their mean c; c - c_i is added to each local gradient, so that all sites walk in the direction of all.

    site i:   y <- y - eta_l (g_i(y) + c - c_i)                    Eq. (3)
              c_i+ <- g_i(x), or c_i - c + (x - y) / (K eta_l)     Eq. (4), options I and II
    server:   x <- x + eta_g mean(y_i - x);  c <- c + |S|/N mean(c_i+ - c_i)    Eq. (5)

Differences from the paper: all sites take part in every round; S are those that answered. Local training is any
optimizer with any schedule: c - c_i is added to the gradient before it is clipped and before the optimizer sees it.
Option II is then no gradient any more; the default `control: steps` is the mean of g_i over the local steps, which is
option II exactly for plain SGD with a constant rate, no weight decay and no clipping. A parameter that gets no gradient from a batch is not moved by
that batch, and one that a site never trains is not part of its answer: c is the mean over the other sites, of which one that has
never answered counts with a c_i of 0, as in Eq. (5). Buffers have no control; they are averaged plainly.

The mean counts every site alike, as in the paper. In the first round all c are 0: with eta_g = 1 it is FedAvg with
equal weights.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, average, tensors_of
from fedatlas.learning.loop import Local, Loop, Loss, autocast, total
from fedatlas.methods.shared.averaging import Supervised
from fedatlas.methods.shared.server_step import StepState, started, stepped

MEMORY = "scaffold.control"
"""The key of a site's memory with c_i, by the names of the parameters that it has trained."""


@dataclass(frozen=True)
class ScaffoldState(StepState):
    """Its only moment is c. untrained: site that has answered -> the parameters that it has never trained."""

    untrained: dict[str, list[str]] = field(default_factory=dict)


@options
class Scaffold(Supervised):
    """FedAvg with control variates that correct the drift of every site (Karimireddy 2020)."""

    state: ClassVar[type[State]] = ScaffoldState
    sends: ClassVar[dict[str, str]] = {"model": "model", "control": "some", "n": "cases"}

    eta_g: float = option(1.0, "eta_g: step of the server along the mean change; 1 takes the mean.", gt=0)
    control: Literal["steps", "weights", "start"] = option(
        "steps",
        "c_i+: steps, the mean gradient of the local steps; weights, option II as printed, for plain sgd only; "
        "start, option I, the gradient at the global model over as many further batches.",
    )

    def start(self, net: nn.Module, clients: Clients) -> ScaffoldState:
        state = started(net, initial=(0.0,), per_class=False)  # c = 0
        return ScaffoldState(state.model, moments=state.moments)

    def round(self, state: ScaffoldState, clients: Clients) -> ScaffoldState:
        (c,) = state.moments
        replies = clients.call(
            self.local_update, model=state.model, c=c, round=state.round, rounds=state.rounds
        )
        mean = average(replies.each("model"), [1] * len(replies.sites))
        changes = zip(replies.sites, replies.each("control"), strict=True)
        c, untrained = moved(c, changes, state.untrained, len(clients.sites))
        return stepped(
            dataclasses.replace(state, moments=(c,), untrained=untrained),
            mean,
            lambda Delta, c: (self.eta_g * Delta, c),
        )

    @at_site
    def local_update(self, site: Site, model: Tensors, c: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net = site.network(model)
        f_i = losses.supervised(self.loss, site)
        kept: Any = site.memory.get(MEMORY, {})
        control = Control(net, c, kept)
        loop = Loop(site, net, self.local, round=round, rounds=rounds)
        for batch in loop:
            with loop.autocast():
                value = f_i(net, batch)
            loop.note(value)
            g_i = loop.gradients(value)
            control.see(g_i, loop.rate)
            loop.move(control.corrected(g_i))  # Eq. (3)
        if self.control == "steps":
            new = control.mean_gradient()
        elif self.control == "weights":
            new = control.change()  # Eq. (4), option II
        else:
            gradient = gradient_at(site, site.network(model), f_i, self.local)  # Eq. (4), option I
            new = {name: gradient[name] for name in control.trained if name in gradient}
        return {"model": tensors_of(net), "control": renewed(site, new), "n": site.n_train}

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space or each other."""
        losses.make(self.loss, space)
        if self.control == "weights" and (self.local.optimizer != "sgd" or self.local.momentum):
            raise FederationError(
                f"scaffold: control is weights, local.optimizer {self.local.optimizer} with momentum "
                f"{self.local.momentum}; a change of weights is a gradient for sgd with momentum 0 only, use that "
                "or control: steps"
            )


def renewed(site: Site, new: Tensors) -> Tensors:
    """Puts c_i+ in the site's memory; what it sends of it, c_i+ - c_i."""
    kept: Any = site.memory.get(MEMORY, {})
    site.memory[MEMORY] = kept | new
    return {name: value - kept[name] if name in kept else value for name, value in new.items()}


def moved(
    c: Tensors, changes: Iterable[tuple[str, Tensors]], untrained: Mapping[str, Sequence[str]], sites: int
) -> tuple[Tensors, dict[str, list[str]]]:
    """c after a round, Eq. (5), and `untrained`: of each parameter c is the sum of all c_i over the number of sites that are not known to
    leave it alone. Where all train it that is c + |S|/N mean(c_i+ - c_i).

    changes: a site that answered, and c_i+ - c_i of what it has trained. untrained: as before the round; sites: N.
    """
    total: Tensors = {}
    count: Counter[str] = Counter()
    still = {site: list(names) for site, names in untrained.items()}
    for site, change in changes:
        still[site] = [name for name in still.get(site, c) if name not in change]
        count.update(change.keys())
        for name, value in change.items():
            total[name] = total[name] + value.double() if name in total else value.double()
    # parameter -> by how many sites it is left alone, before and after
    idle_before, idle = (
        Counter(name for names in of.values() for name in names) for of in (untrained, still)
    )
    after = {}
    for name, old in c.items():
        before, now = sites - idle_before[name], sites - idle[name]
        value = old.double() * (before / now) if before != now and now else old.double()
        if name in total:
            value = value + (count[name] / now) * total[name] / count[name]  # |S|/N mean(c_i+ - c_i)
        after[name] = value.to(old.dtype)
    return after, still


class Control:
    """A site's half of SCAFFOLD in one round: the correction of every step, and what the steps tell of the gradient.

    net: with x, the global model, in it. c, c_i: by the names of its parameters; c_i without those that the site has
    not trained, for which it is 0. without: names of parameters that have no control. Several optimizers may go by one
    control."""

    def __init__(self, net: nn.Module, c: Tensors, c_i: Tensors, without: Collection[str] = ()) -> None:
        self.y = {name: p for name, p in net.named_parameters() if name not in without}
        self.x = {name: p.detach().clone() for name, p in self.y.items()}
        self.shift = {
            name: (c[name] - c_i[name] if name in c_i else c[name]).to(p) for name, p in self.y.items()
        }
        self.sum: Tensors = {}
        self.steps: dict[str, int] = {}
        self.rates: dict[str, float] = {}

    @property
    def trained(self) -> list[str]:
        """The parameters that had a gradient in at least one step, in the order of the net."""
        return [name for name in self.y if name in self.sum]

    def see(self, g_i: Tensors, rate: float) -> None:
        """Counts the gradients of a step. rate: its learning rate."""
        for name, gradient in g_i.items():
            if name not in self.y:
                continue
            if name in self.sum:
                self.sum[name].add_(gradient)
            else:
                self.sum[name] = gradient.clone()
            self.steps[name] = self.steps.get(name, 0) + 1
            self.rates[name] = self.rates.get(name, 0.0) + rate

    def corrected(self, g_i: Tensors) -> Tensors:
        """g_i(y) + c - c_i; a parameter that has no gradient gets none."""
        return {name: g + self.shift[name] if name in self.shift else g for name, g in g_i.items()}

    def mean_gradient(self) -> Tensors:
        """The mean of g_i(y) over the steps in which a parameter had a gradient, on the CPU."""
        return {name: (self.sum[name] / self.steps[name]).cpu() for name in self.trained}

    def change(self) -> Tensors:
        """c_i - c + (x - y) / (K eta_l), with the sum of the rates for K eta_l, on the CPU."""
        return {
            name: ((self.x[name] - p.detach()) / self.rates[name] - self.shift[name]).cpu()
            for name, p in self.y.items()
            if name in self.sum
        }


def gradient_at(site: Site, net: nn.Module, loss: Loss, local: Local) -> Tensors:
    """g_i(x): the mean gradient of `loss` at the weights of `net` over as many batches as local training has, on the
    CPU, by the names of the parameters that have one."""
    net.zero_grad(set_to_none=True)
    batches = site.batches(batch=local.batch, steps=local.steps, epochs=local.epochs)
    for batch in batches:
        with autocast(local, site.device):
            value = loss(net, batch)
        total(value).backward()
    count = len(batches)
    return {name: (p.grad / count).cpu() for name, p in net.named_parameters() if p.grad is not None}
