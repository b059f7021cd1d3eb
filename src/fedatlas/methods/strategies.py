"""Federated strategies on top of Fed-MENU: each is what its own method does, with the expert rule for sub-encoders.

The paper names its strategies (Table VI) and says no more. Here the rule of every part of the net comes first
(`fedmenu`), and the strategy works on what it gives:

    fedprox            mu (w - w^t) is added to the gradients of S1 and of S2
    fedavgm, feddyn    the server steps along the mean of that rule, every part with its own weights
    scaffold           the same; control variates see the gradients of both steps
    fedbn              a site keeps the normalisation of what it trains, and takes that of other sub-encoders as it comes;
                       an organ is asked of the models of its experts, or of the site's own (`speaks`)
    fednorm            the mean of that rule within a group; of a sub-encoder without an expert in the group, over all
    fedsm              the global model by that rule; a site trains its personalised model in the same two steps, and all
                       parts of it are pulled alike

What is in no optimizer of a site (the sub-encoders of other organs) is corrected by none of them. The parameters of a
strategy are the options of its method, which has the citation and the equations.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from fedatlas.core.contract import Clients, Member, NetSpec, Replies, Site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import from_dict, not_known, option, options
from fedatlas.core.tensors import Tensors, average, from_tree, load, tensors_of, to_tree
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedavgm import FedAvgM
from fedatlas.methods.fedbn import MEMORY as OWN_MEMORY
from fedatlas.methods.fedbn import FedBN
from fedatlas.methods.feddyn import MEMORY as DYNAMIC_MEMORY
from fedatlas.methods.feddyn import Dynamic, FedDyn, server_rule
from fedatlas.methods.fednorm import FedNorm
from fedatlas.methods.fedprox import FedProx
from fedatlas.methods.fedsm import (
    PERSON,
    FedSM,
    SelectorState,
    routed,
    selector_mean,
    selector_of,
    soft_pull,
    train_selector,
)
from fedatlas.methods.scaffold import MEMORY as CONTROL_MEMORY
from fedatlas.methods.scaffold import Control, Scaffold, moved, renewed
from fedatlas.methods.shared.kept import chosen, names_in, norm_layers
from fedatlas.methods.shared.owners import speakers
from fedatlas.methods.shared.server_step import Rule, StepState, started, stepped

Name = Literal["fedavg", "fedprox", "fedavgm", "feddyn", "scaffold", "fedbn", "fednorm", "fedsm"]

Correct = Callable[[Tensors, float], Tensors]
"""Gradients by the names of parameters and the learning rate -> the gradients of the step."""


@options
class StrategyChoice:
    """A strategy by the name of its method."""

    name: Name = option(
        "fedavg",
        "fedavg, fedprox, fedavgm, feddyn, scaffold, fedbn, fednorm or fedsm; fedavg takes the mean as it is.",
    )
    options: dict[str, Any] = option(
        {}, "The parameters of that method; its loss, local training and weights are those of fedmenu."
    )


class Fit(Protocol):
    """Trains a net in place for one round, as the method that has the strategy does. correct: is given the gradients of
    every step. memory, prefix: where a site trains several nets, what begins the keys of its memory that hold the
    optimizers, and the names of the losses in its log."""

    def __call__(
        self, net: nn.Module, *, correct: Correct | None = None, memory: str = "", prefix: str = ""
    ) -> None: ...


@dataclass(frozen=True)
class Place:
    """A site in one round, as a strategy sees it.

    net: holds the global model, and what the site keeps for itself. told: by the strategy's `told` and `told_to`.
    trained: the names of the tensors that the site trains. private: those that never leave it, which no strategy touches.
    batch: samples at a time.
    """

    site: Site
    net: nn.Module
    told: Mapping[str, Any]
    trained: Collection[str]
    private: Collection[str]
    batch: int
    fit: Fit


@dataclass(frozen=True)
class Averaging:
    """The mean of models of sites, each part of the net with weights of its own.

    sites: sorted. common: [K] weights. experts: part -> [K] whether the site trains it; parts that are not in it are
    trained by all. other: the weight of a site in a part that it does not train; None: as in all other parts.
    names: part -> its tensors.
    """

    sites: Sequence[str]
    common: Sequence[float]
    experts: Mapping[str, Sequence[bool]]
    other: float | None
    names: Mapping[str, Sequence[str]]

    def __call__(
        self,
        models: Iterable[Tensors],
        *,
        members: Collection[str] | None = None,
        names: Collection[str] | None = None,
    ) -> Tensors:
        """models: of every site, in the order of `sites`. Only those of `members` count, and of them only `names`."""
        places = [k for k, site in enumerate(self.sites) if members is None or site in members]
        each: dict[str, list[float]] = {}
        if self.other is not None:
            for part, owns in self.experts.items():
                weights = expert_weights([owns[k] for k in places], self.other)
                each |= {name: weights for name in self.names[part] if names is None or name in names}
        counted = (model for k, model in enumerate(models) if k in places)
        if names is not None:
            counted = (chosen(model, names) for model in counted)
        return average(counted, [self.common[k] for k in places], each=each)

    def trained(self, members: Collection[str]) -> set[str]:
        """The names of what at least one of these sites trains."""
        places = [k for k, site in enumerate(self.sites) if site in members]
        idle = {part for part, owns in self.experts.items() if not any(owns[k] for k in places)}
        return {name for part, names in self.names.items() if part not in idle for name in names}


def expert_weights(owns: Sequence[bool], other: float) -> list[float]:
    """[K] the weights of the sites for the sub-encoder of one organ: 1 for its experts and `other` for the rest; 1 for
    all where none of them is an expert, as then all return it unchanged."""
    return [1.0 if own or not any(owns) else other for own in owns]


class Strategy:
    """FedAvg, and the places in which the others differ. kept: what the server keeps of it from round to round."""

    sends: ClassVar[dict[str, str]] = {"model": "model"}
    """What `update` answers, as `Method.sends`."""
    nets: ClassVar[Mapping[str, NetSpec]] = {}
    personal: ClassVar[bool] = False
    """Whether whole models of single sites are sent."""
    own_tensors: ClassVar[bool] = False
    """As `Method.own_tensors`."""

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell of a net and of the training sites. Raises FederationError where they do not fit."""
        return []

    def start(self, net: nn.Module, clients: Clients) -> dict[str, Any]:
        """`kept` before the first round. Raises as `examine`."""
        return {}

    def told(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """What all sites are told beside the global model."""
        return {}

    def told_to(self, site: str, kept: Mapping[str, Any]) -> dict[str, Any]:
        """What one site is told beside that."""
        return {}

    def update(self, at: Place) -> dict[str, Any]:
        """Trains at a site; the reply."""
        at.fit(at.net)
        return {"model": tensors_of(at.net)}

    def after(
        self, kept: Mapping[str, Any], model: Tensors, replies: Replies, mean: Averaging, clients: Clients
    ) -> tuple[Tensors, dict[str, Any]]:
        """The next global model, and the next `kept`."""
        return mean(replies.each("model")), dict(kept)

    def members(self, kept: Mapping[str, Any], model: Tensors, site: str) -> list[Member]:
        """What is evaluated at a site."""
        return [Member(model)]


class Proximal(Strategy):
    """FedProx: the gradient of mu/2 ||w - w^t||^2."""

    def __init__(self, method: FedProx) -> None:
        self.mu = method.mu

    def update(self, at: Place) -> dict[str, Any]:
        w = {name: p for name, p in at.net.named_parameters() if name not in at.private}
        w_t = {name: p.detach().clone() for name, p in w.items()}

        @torch.no_grad()
        def pulled(gradients: Tensors, rate: float) -> Tensors:
            return {n: g + self.mu * (w[n] - w_t[n]) if n in w else g for n, g in gradients.items()}

        at.fit(at.net, correct=pulled)
        return {"model": tensors_of(at.net)}


class Stepped(Strategy):
    """A server that walks along the mean, with one moment."""

    def start(self, net: nn.Module, clients: Clients) -> dict[str, Any]:
        return {"moment": started(net, initial=(0.0,), per_class=False).moments[0]}

    def walked(
        self, moment: Tensors, model: Tensors, mean: Tensors, rule: Rule
    ) -> tuple[Tensors, dict[str, Any]]:
        """`server_step.stepped` by a rule."""
        state = stepped(StepState(model, moments=(moment,)), mean, rule)
        return state.model, {"moment": state.moments[0]}


class ServerMomentum(Stepped):
    """FedAvgM."""

    def __init__(self, method: FedAvgM) -> None:
        self.rule = method.rule()

    def after(
        self, kept: Mapping[str, Any], model: Tensors, replies: Replies, mean: Averaging, clients: Clients
    ) -> tuple[Tensors, dict[str, Any]]:
        return self.walked(kept["moment"], model, mean(replies.each("model")), self.rule)


class DynamicRegularisation(Stepped):
    """FedDyn."""

    def __init__(self, method: FedDyn) -> None:
        self.alpha = method.alpha

    def update(self, at: Place) -> dict[str, Any]:
        net = at.net
        kept: Any = at.site.memory.get(DYNAMIC_MEMORY, {})
        dynamic = Dynamic(net, kept, self.alpha, without=at.private)
        at.fit(net, correct=lambda gradients, rate: dynamic.corrected(gradients))
        at.site.memory[DYNAMIC_MEMORY] = dict(dynamic.g_after())
        return {"model": tensors_of(net)}

    def after(
        self, kept: Mapping[str, Any], model: Tensors, replies: Replies, mean: Averaging, clients: Clients
    ) -> tuple[Tensors, dict[str, Any]]:
        rule = server_rule(self.alpha, 1 - len(clients.lost) / len(clients.sites))
        return self.walked(kept["moment"], model, mean(replies.each("model")), rule)


class ControlVariates(Stepped):
    """SCAFFOLD; a control is the mean gradient of all steps of a round."""

    sends: ClassVar[dict[str, str]] = {"model": "model", "control": "some"}

    def __init__(self, method: Scaffold) -> None:
        if method.control != "steps":
            raise FederationError(
                f"method fedmenu: strategy scaffold: control is {method.control!r}; allowed: steps, as every batch is "
                "learnt from in two steps"
            )
        self.eta_g = method.eta_g

    def told(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        return {"c": kept["moment"]}

    def update(self, at: Place) -> dict[str, Any]:
        net = at.net
        kept: Any = at.site.memory.get(CONTROL_MEMORY, {})
        control = Control(net, at.told["c"], kept, without=at.private)

        def corrected(gradients: Tensors, rate: float) -> Tensors:
            control.see(gradients, rate)
            return control.corrected(gradients)

        at.fit(net, correct=corrected)
        return {"model": tensors_of(net), "control": renewed(at.site, control.mean_gradient())}

    def after(
        self, kept: Mapping[str, Any], model: Tensors, replies: Replies, mean: Averaging, clients: Clients
    ) -> tuple[Tensors, dict[str, Any]]:
        changes = zip(replies.sites, replies.each("control"), strict=True)
        c, untrained = moved(kept["moment"], changes, kept.get("untrained", {}), len(clients.sites))
        walked, after = self.walked(
            c, model, mean(replies.each("model")), lambda Delta, c: (self.eta_g * Delta, c)
        )
        return walked, {**after, "untrained": untrained}


class OwnNormalisation(Strategy):
    """FedBN, of the layers that a site trains."""

    own_tensors = True

    def __init__(self, method: FedBN) -> None:
        self.method = method

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        return self.method.examine(net, sites)

    def start(self, net: nn.Module, clients: Clients) -> dict[str, Any]:
        return {"names": list(self.method.kept(net)), "own": {}, "classes": {}}

    def told(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        return {"names": kept["names"]}

    def update(self, at: Place) -> dict[str, Any]:
        own: Any = at.site.memory.get(OWN_MEMORY, {})
        load(at.net, tensors_of(at.net) | own)
        at.fit(at.net)
        values = tensors_of(at.net)
        names = [name for name in at.told["names"] if name in at.trained and name not in at.private]
        at.site.memory[OWN_MEMORY] = dict(chosen(values, names))
        return {"model": values}

    def after(
        self, kept: Mapping[str, Any], model: Tensors, replies: Replies, mean: Averaging, clients: Clients
    ) -> tuple[Tensors, dict[str, Any]]:
        own = dict(kept["own"])
        if kept["names"]:
            for site, values in zip(replies.sites, replies.each("model"), strict=True):
                trained = mean.trained([site])
                own[site] = chosen(values, [name for name in kept["names"] if name in trained])
        classes = kept.get("classes", {}) | dict(zip(replies.sites, replies.plain("annotated"), strict=True))
        return mean(replies.each("model")), {**kept, "own": own, "classes": classes}

    def members(self, kept: Mapping[str, Any], model: Tensors, site: str) -> list[Member]:
        return speakers(model, kept["own"], kept.get("classes", {}), site, self.method.speaks)


class GroupNormalisation(Strategy):
    """FedNorm, of the layers that a group trains."""

    own_tensors = True

    def __init__(self, method: FedNorm) -> None:
        self.method = method
        method.check_groups()

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        return self.method.examine(net, sites)

    def start(self, net: nn.Module, clients: Clients) -> dict[str, Any]:
        self.method.check_sites(clients.sites)
        return {"names": list(names_in(net, norm_layers(net))), "groups": {}}

    def told_to(self, site: str, kept: Mapping[str, Any]) -> dict[str, Any]:
        return {"norms": kept["groups"].get(self.method.group_of(site), {})}

    def update(self, at: Place) -> dict[str, Any]:
        norms = {name: value for name, value in at.told["norms"].items() if name not in at.private}
        load(at.net, tensors_of(at.net) | norms)
        at.fit(at.net)
        return {"model": tensors_of(at.net)}

    def after(
        self, kept: Mapping[str, Any], model: Tensors, replies: Replies, mean: Averaging, clients: Clients
    ) -> tuple[Tensors, dict[str, Any]]:
        groups = dict(kept["groups"])
        for group in sorted({self.method.group_of(site) for site in replies.sites}):
            members = [site for site in replies.sites if self.method.group_of(site) == group]
            trained = mean.trained(members)
            names = [name for name in kept["names"] if name in trained]
            layers = mean(replies.each("model"), members=members, names=names) if names else {}
            groups[group] = groups.get(group, {}) | layers
        return mean(replies.each("model")), {**kept, "groups": groups}

    def members(self, kept: Mapping[str, Any], model: Tensors, site: str) -> list[Member]:
        return [Member(model | kept["groups"].get(self.method.group_of(site), {}))]


class Personalised(Strategy):
    """FedSM."""

    personal = True

    def __init__(self, method: FedSM) -> None:
        self.lam, self.threshold, self.selector = method.lam, method.threshold, method.selector
        self.sends = {"model": "model", "person": "model:main"} | self.selector.sends  # type: ignore[misc]
        self.nets = method.nets  # type: ignore[misc]

    def start(self, net: nn.Module, clients: Clients) -> dict[str, Any]:
        model = tensors_of(net)
        return {
            "persons": {site: model for site in clients.sites},
            "selector": to_tree(selector_of(clients)),
        }

    def told(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        return {"selector": kept["selector"]}

    def told_to(self, site: str, kept: Mapping[str, Any]) -> dict[str, Any]:
        return {"person": kept["persons"][site], "label": sorted(kept["persons"]).index(site)}

    def update(self, at: Place) -> dict[str, Any]:
        at.fit(at.net)
        person = at.site.network(at.told["person"])
        at.fit(person, memory=f"{PERSON} ", prefix="person_")
        state = from_tree(SelectorState, at.told["selector"])
        batch = self.selector.batch or at.batch
        told = train_selector(at.site, state, at.told["label"], self.selector, batch)
        return {"model": tensors_of(at.net), "person": tensors_of(person)} | told

    def after(
        self, kept: Mapping[str, Any], model: Tensors, replies: Replies, mean: Averaging, clients: Clients
    ) -> tuple[Tensors, dict[str, Any]]:
        pulled = soft_pull(dict(zip(replies.sites, replies.each("person"), strict=True)), self.lam)
        state = from_tree(SelectorState, kept["selector"])
        selector = selector_mean(replies, state, self.selector, mean.common)
        after = {"persons": kept["persons"] | pulled, "selector": to_tree(selector)}
        return mean(replies.each("model")), after

    def members(self, kept: Mapping[str, Any], model: Tensors, site: str) -> list[Member]:
        return routed(model, kept["persons"], kept["selector"]["model"], self.threshold)


STRATEGIES: dict[str, tuple[type[Any], Callable[[Any], Strategy]]] = {
    "fedavg": (FedAvg, lambda method: Strategy()),
    "fedprox": (FedProx, Proximal),
    "fedavgm": (FedAvgM, ServerMomentum),
    "feddyn": (FedDyn, DynamicRegularisation),
    "scaffold": (Scaffold, ControlVariates),
    "fedbn": (FedBN, OwnNormalisation),
    "fednorm": (FedNorm, GroupNormalisation),
    "fedsm": (FedSM, Personalised),
}
"""Name -> the method, and the strategy that is made of it."""

OF_FEDMENU = ("loss", "local", "weights", "aggregate_unlabelled_rows", "swa_start")
"""What a method has that a strategy has not."""


def make_strategy(choice: StrategyChoice) -> Strategy:
    """The chosen strategy. Raises FederationError for an option that it does not have, or a wrong value of one."""
    cls, make = STRATEGIES[choice.name]
    what = f"method fedmenu: strategy {choice.name}"
    known = [f.name for f in dataclasses.fields(cls) if f.name not in OF_FEDMENU]
    for name in choice.options:
        if name not in known:
            raise not_known(f"{what}: the option", name, known)
    return make(from_dict(cls, choice.options, what=what))
