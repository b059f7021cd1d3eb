"""FedMatch: federated semi-supervised learning with inter-client consistency and disjoint learning.

Jeong, Yoon, Yang, Hwang. ICLR 2021, its scenario labels-at-client. For partial labels as in FedPSL (Dong, Kampffmeyer,
Voiculescu, Xing. IEEE Trans. Med. Imaging 2023, Section VII-B), with FedMatch+, whose extractor is pre-trained.

The weights are a sum, theta = sigma + psi. A labelled batch moves sigma and leaves psi; an unlabelled one moves psi
and leaves sigma. The unlabelled loss holds a site's output near that of its helpers, the H sites whose models answer
one fixed noise image most like its own, and teaches a strongly varied view the label for which the site and its
helpers vote. Only weights that changed by more than delta_thres are exchanged.

    sigma:  lambda_s CE(y, p(x))
    psi:    lambda_ICC 1/H sum_j KL(p_j(x) || p(x)) + lambda_a CE(vote, p(strong(x)))
            + lambda_L1 ||psi||_1 + lambda_L2 ||sigma - psi||^2

Reconstruction: FedPSL does not say how it made FedMatch multi-label. Here everything is per sample and class: p and p_j
are those of a yes or no, a batch is labelled for the classes that its samples annotate and unlabelled for the others,
KL is that between Bernoulli distributions, and the means are over the unlabelled pairs with max(p, 1 - p) >= the
confidence. A vote that is tied is decided by the site itself.

Differences from the official code: psi steps on the batch on which sigma has stepped, there are no others. Helpers are
kept until new ones come; the code uses them in the one round in which they are sent. Their weights are sigma as the
round begins plus their psi. Weights are exchanged with respect to the last global ones, which all sites hold alike, so
one payload serves all; the code compares with each site's own last. Every parameter is a sum; the code's net has
neither biases nor norms. lambda_ICC and lambda_a are factors, as in the code; the paper has none. What is evaluated is
sigma + psi as the sites hold it.

The exchange has no local models: what a site trained is sent as changes only. With sgd a step of lambda_L2 multiplies
sigma - psi by 1 - 2 lr lambda_L2: the learning rate is to be well below 1 / lambda_L2.

Shapes: B batch, C classes, I input channels, *S spatial, H helpers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import logsigmoid

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, NetSpec, Replies, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.options import option, options
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, average, dense, load, sparse, tensors_of
from fedatlas.learning import augment
from fedatlas.learning.augment import Augmentation
from fedatlas.learning.loop import Local, Loop, Loss
from fedatlas.losses.consistency import is_confident, mean_over, pseudo_bce
from fedatlas.losses.heads import full_precision
from fedatlas.methods.shared import simsiam
from fedatlas.methods.shared.averaging import Supervised
from fedatlas.methods.shared.simsiam import HEADS, PreTraining

Changes = dict[str, Tensors]
"""Some entries of named tensors, as `core.tensors.sparse` takes them."""


@dataclass(frozen=True)
class MatchState(State):
    """model: sigma + psi, and the buffers. change: from the sigma and psi of the round before to these, by name;
    holders: the sites that hold those of the round before."""

    sigma: Tensors = field(default_factory=dict)
    psi: Tensors = field(default_factory=dict)
    change: dict[str, Changes] = field(default_factory=dict)
    holders: tuple[str, ...] = ()


@dataclass(frozen=True)
class MatchPlusState(MatchState):
    """heads: SimSiam's projector and predictor; empty once they are dropped."""

    heads: Tensors = field(default_factory=dict)


@options
class Match(Supervised):
    """The hyper-parameters of FedMatch and FedMatch+."""

    lambda_s: float = option(10.0, "lambda_s: weight of the supervised loss.", ge=0)
    lambda_icc: float = option(1e-2, "lambda_ICC: weight of the agreement with the helpers' outputs.", ge=0)
    lambda_a: float = option(1e-2, "lambda_a: weight of the labels for which site and helpers vote.", ge=0)
    lambda_l1: float = option(1e-4, "lambda_L1: weight of the absolute sum of psi.", ge=0)
    lambda_l2: float = option(10.0, "lambda_L2: weight of the squared distance of sigma and psi.", ge=0)
    confidence: float = option(
        0.75, "tau: least confidence of a pair that is learnt from; above 1 there are none.", ge=0.5
    )
    helpers: int = option(2, "H: helpers of a site.", ge=0)
    h_interval: int = option(10, "Rounds between new helpers; the first come for round h_interval.", ge=1)
    psi_factor: float = option(0.2, "psi begins as so many times sigma.", ge=0)
    l1_thres: float = option(5e-6, "Entries of psi up to this size are sent as 0.", ge=0)
    delta_thres: float = option(5e-5, "Entries that changed by no more than this are not sent.", ge=0)
    strong: Augmentation = option(
        augment.STRONG, "The strong view; keys left out have the values of this default."
    )
    local: Local = option(Local(), "Training at a site between two exchanges; both sigma and psi go by it.")


@options
class FedMatch(Match):
    """Weights in two parts, for labels and for pseudo labels that like-minded sites agree on (Jeong 2021)."""

    state: ClassVar[type[State]] = MatchState
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    sends: ClassVar[dict[str, dict[str, str]]] = {
        "local_update": {
            "sigma": "sparse:main.parameters",
            "psi": "sparse:main.parameters",
            "buffers": "model:main.buffers",
        },
        "keep_helpers": {},
    }

    def start(self, net: nn.Module, clients: Clients) -> MatchState:
        values = tensors_of(net)
        sigma = {name: values[name] for name, _ in net.named_parameters()}
        psi = {name: self.psi_factor * value for name, value in sigma.items()}
        return MatchState(model=theta(values, sigma, psi), sigma=sigma, psi=psi)

    def round(self, state: MatchState, clients: Clients) -> MatchState:
        replies = self.ask(state, clients)
        equal = [1] * len(replies.sites)
        buffers = average(replies.each("buffers"), equal)
        sigma = average((dense(changes, state.sigma) for changes in replies.each("sigma")), equal)
        psi = average((dense(changes, state.psi) for changes in replies.each("psi")), equal)
        change = self.changes(sigma, psi, state.sigma, state.psi)
        sigma, psi = dense(change["sigma"], state.sigma), dense(change["psi"], state.psi)
        holders = tuple(replies.sites)
        if (state.round + 2) % self.h_interval == 0 and state.round + 1 < state.rounds:
            self.send_helpers(state, replies, clients)
        return dataclasses.replace(
            state,
            model=theta(state.model | buffers, sigma, psi),
            sigma=sigma,
            psi=psi,
            change=change,
            holders=holders,
            round=state.round + 1,
        )

    def ask(self, state: MatchState, clients: Clients) -> Replies:
        """Local training everywhere, from the change to what a site holds, or from all of it where it holds none."""
        whole = {"sigma": state.sigma, "psi": state.psi}
        common: dict[str, Any] = {
            "buffers": {name: value for name, value in state.model.items() if name not in state.sigma},
            "round": state.round,
            "rounds": state.rounds,
        }
        if not state.holders:
            return clients.call(self.local_update, whole=whole, **common)
        each = {site: {} if site in state.holders else {"whole": whole} for site in clients.sites}
        return clients.call(self.local_update, each=each, change=state.change, **common)

    def changes(
        self, sigma: Tensors, psi: Tensors, old_sigma: Tensors, old_psi: Tensors
    ) -> dict[str, Changes]:
        """What is sent of new sigma and psi to who holds the old ones."""
        psi = {name: torch.where(value.abs() > self.l1_thres, value, 0) for name, value in psi.items()}
        return {
            "sigma": sparse(sigma, old_sigma, self.delta_thres),
            "psi": sparse(psi, old_psi, self.delta_thres),
        }

    def send_helpers(self, state: MatchState, replies: Replies, clients: Clients) -> None:
        """Sends every site the psi of the H sites nearest to it, as changes of the psi that all of them hold."""
        x = torch.randn(1, *clients.sample_shape, generator=generator("fedmatch", "noise"))
        net = clients.network(state.model)
        outputs: dict[str, Tensor] = {}
        psi_of: dict[str, Changes] = {}
        for site, reply in replies:
            sigma, psi = dense(reply["sigma"], state.sigma), dense(reply["psi"], state.psi)
            load(net, theta(state.model | reply["buffers"], sigma, psi))
            with torch.no_grad():
                outputs[site] = net(x)[0].double().sigmoid()
            psi_of[site] = reply["psi"]
        near = nearest(outputs, self.helpers)
        each = {site: {"helpers": [psi_of[name] for name in names]} for site, names in near.items() if names}
        if each:
            clients.call(self.keep_helpers, each=each)

    @at_site
    def keep_helpers(self, site: Site, helpers: list[Changes]) -> dict[str, Any]:
        held: Any = site.memory["held"]
        kept: Any = [dense(changes, held["psi"]) for changes in helpers]
        site.memory["helpers"] = kept
        return {}

    @at_site
    def local_update(
        self,
        site: Site,
        buffers: Tensors,
        round: int,
        rounds: int,
        whole: dict[str, Tensors] | None = None,
        change: dict[str, Changes] | None = None,
    ) -> dict[str, Any]:
        held = received(site, whole, change)
        site.memory["held"] = held  # type: ignore[assignment]
        sigma, psi = site.network(buffers | held["sigma"]), site.network(buffers | held["psi"])
        kept: Any = site.memory.get("helpers", [])
        helpers = [site.network(theta(buffers, held["sigma"], psi_j)) for psi_j in kept]
        pairs = torch.zeros(2, dtype=torch.float64)
        L_s, L_u = self.L_s(psi, site), self.L_u(sigma, [h.eval() for h in helpers], site.rng, pairs)
        loop = Loop(site, sigma, self.local, round=round, rounds=rounds, memory="optimizer.sigma")
        second = loop.also(psi, memory="optimizer.psi")
        for batch in loop:
            with loop.autocast():
                labelled = L_s(sigma, batch)  # Eq. (5)
            loop.step(labelled)  # sigma, where psi is as it was
            if self.learns_psi:
                with loop.autocast():
                    unlabelled = L_u(psi, batch)  # Eq. (6)
                second.step(unlabelled)  # psi, where sigma has moved
                loop.note(unlabelled)
        values = tensors_of(sigma)
        new_sigma, new_psi = parameters(values, held["sigma"]), parameters(tensors_of(psi), held["psi"])
        sent = self.changes(new_sigma, new_psi, held["sigma"], held["psi"])
        site.log(confident=float(pairs[0] / pairs[1].clamp(min=1)), sent=share(sent, held))
        return {**sent, "buffers": {name: values[name] for name in buffers}}

    def updates_per_step(self) -> int:
        """sigma and psi."""
        return 2 if self.learns_psi else 1

    @property
    def learns_psi(self) -> bool:
        """Is there any loss of psi?"""
        return bool(self.lambda_icc or self.lambda_a or self.lambda_l1 or self.lambda_l2)

    def L_s(self, psi: nn.Module, site: Site) -> Loss:
        """The supervised loss, as a function of sigma."""
        supervised = losses.for_site(self.loss, site)

        def L(sigma: nn.Module, batch: Batch) -> dict[str, Tensor]:
            z = output(batch.image, sigma, psi, learn="sigma")
            return {"supervised": self.lambda_s * supervised(z, batch.target, batch.known)}  # Eq. (5)

        return L

    def L_u(
        self, sigma: nn.Module, helpers: Sequence[nn.Module], rng: torch.Generator, pairs: Tensor
    ) -> Loss:
        """The unlabelled loss, as a function of psi. pairs [2]: counts confident pairs, and all unlabelled ones."""

        def L(psi: nn.Module, batch: Batch) -> dict[str, Tensor]:
            terms: dict[str, Tensor] = {}
            if self.lambda_icc or self.lambda_a:
                z = full_precision(output(batch.image, sigma, psi, learn="psi"))
                sure = is_confident(z.detach().sigmoid(), batch.known, self.confidence)
                count = sure.sum()
                pairs.add_(torch.stack([count, (~batch.known).sum()]).cpu())
                terms["consistency"] = 0 * z.sum()  # a gradient of 0 where no pair is confident
                if bool(count > 0):
                    with torch.no_grad():
                        z_h = [full_precision(helper(batch.image)) for helper in helpers]
                    for z_j in z_h:
                        kl = mean_over(bernoulli_kl(z_j, z), sure, count) / len(z_h)
                        terms["consistency"] = terms["consistency"] + self.lambda_icc * kl  # Eq. (3)
                    if self.lambda_a:
                        x, _ = augment.augment(batch.image, batch.target, self.strong, rng)
                        hard = full_precision(output(x, sigma, psi, learn="psi"))
                        agreed = mean_over(pseudo_bce(hard, vote(z, z_h)), sure, count)
                        terms["agreement"] = self.lambda_a * agreed
            s, p = list(sigma.parameters()), list(psi.parameters())
            if self.lambda_l1:
                terms["sparsity"] = self.lambda_l1 * torch.stack([b.abs().sum() for b in p]).sum()
            if self.lambda_l2:
                squares = [(a.detach() - b).square().sum() for a, b in zip(s, p, strict=True)]
                terms["distance"] = self.lambda_l2 * torch.stack(squares).sum()
            return terms  # Eq. (6)

        return L


def theta(values: Mapping[str, Tensor], sigma: Tensors, psi: Tensors) -> Tensors:
    """sigma + psi, with the other tensors of `values`, in the order of a net's."""
    sums = {name: sigma[name] + psi[name] for name in sigma}
    return {name: sums.get(name, value) for name, value in {**values, **sums}.items()}


def parameters(values: Tensors, like: Tensors) -> Tensors:
    """The tensors that have the names of `like`."""
    return {name: values[name] for name in like}


def output(x: Tensor, sigma: nn.Module, psi: nn.Module, *, learn: Literal["sigma", "psi"]) -> Tensor:
    """Logits [B, C] of sigma + psi for images [B, I, *S]; gradients reach the part that learns, and no other. Buffers
    are those of `sigma`."""
    pairs = zip(sigma.named_parameters(), psi.named_parameters(), strict=True)
    sums = {name: s + p.detach() if learn == "sigma" else s.detach() + p for (name, s), (_, p) in pairs}
    return functional_call(sigma, sums, (x,))


def received(
    site: Site, whole: dict[str, Tensors] | None, change: dict[str, Changes] | None
) -> dict[str, Tensors]:
    """The global sigma and psi: as sent, or what the site holds with the changes that were sent."""
    if whole is not None:
        return whole
    held: Any = site.memory.get("held")
    if held is None or change is None:
        raise FederationError(
            f"site {site.name}: was sent changes of weights that it does not hold; its memory of this run is lost, "
            "begin a new run"
        )
    return {part: dense(change[part], held[part]) for part in ("sigma", "psi")}


def share(sent: Mapping[str, Changes], held: Mapping[str, Tensors]) -> float:
    """The entries of sigma and psi that are sent, of all."""
    entries = sum(len(item["value"]) for changes in sent.values() for item in changes.values())
    return entries / sum(value.numel() for part in sent for value in held[part].values())


def nearest(outputs: Mapping[str, Tensor], count: int) -> dict[str, list[str]]:
    """Every site's `count` nearest others by the Euclidean distance of their outputs [C], the nearest first, of equal
    ones in the order of their names; fewer where there are not so many."""
    return {
        site: sorted(
            (name for name in outputs if name != site),
            key=lambda name: (float((outputs[name] - own).square().sum()), name),
        )[:count]
        for site, own in outputs.items()
    }


def bernoulli_kl(z_j: Tensor, z: Tensor) -> Tensor:
    """[B, C] KL(p_j || p) of yes-or-no distributions, from their logits; no gradient reaches z_j."""
    z_j = z_j.detach()
    yes = z_j.sigmoid() * (logsigmoid(z_j) - logsigmoid(z))
    return yes + (-z_j).sigmoid() * (logsigmoid(-z_j) - logsigmoid(-z))


def vote(z: Tensor, z_h: Sequence[Tensor]) -> Tensor:
    """[B, C] bool: what the majority of the site (logits z) and its helpers (logits z_h) says, p > 1/2 or not; the
    site's own where it is tied."""
    own = z > 0
    votes = torch.stack([own, *(z_j > 0 for z_j in z_h)]).sum(0)
    return torch.where(2 * votes == 1 + len(z_h), own, 2 * votes > 1 + len(z_h))


@options
class FedMatchPlus(Match):
    """FedMatch from an extractor that federated SimSiam pre-trained (FedPSL's baseline)."""

    state: ClassVar[type[State]] = MatchPlusState
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    sends: ClassVar[dict[str, dict[str, str]]] = {
        # not "model", which would be evaluated as the site's own at the end of the run
        "pretrain_update": {"net": "model:main", "heads": f"model:{HEADS}", "n": "cases"},
        **FedMatch.sends,
    }

    pretrain_rounds: int | None = option(
        None, "Rounds of pre-training, of the federation's rounds; null: half of them.", ge=0
    )
    pretrain: PreTraining = option(PreTraining(), "SimSiam: its local training, views and heads.")

    @property
    def nets(self) -> dict[str, NetSpec]:
        return self.pretrain.nets

    @property
    def match(self) -> FedMatch:
        """FedMatch with the same hyper-parameters."""
        return FedMatch(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Match)})

    def plan(self, rounds: int) -> list[str]:
        """Raises FederationError where no round is left after the pre-training."""
        simsiam.phase_rounds(self.pretrain_rounds, rounds, method="fedmatch_plus")
        return super().plan(rounds)

    def start(self, net: nn.Module, clients: Clients) -> MatchPlusState:
        return MatchPlusState(model=tensors_of(net), heads=tensors_of(clients.network(name=HEADS)))

    def round(self, state: MatchPlusState, clients: Clients) -> MatchPlusState:
        first = simsiam.phase_rounds(self.pretrain_rounds, state.rounds, method="fedmatch_plus")
        if state.round < first:
            place: dict[str, Any] = {"round": state.round, "rounds": first}
            replies = clients.call(self.pretrain_update, net=state.model, heads=state.heads, **place)
            model, heads = simsiam.averaged(replies, "cases", model="net")
            return dataclasses.replace(state, model=model, heads=heads, round=state.round + 1)
        if state.round == first:  # sigma = W, psi = psi_factor W
            begun = self.match.start(clients.network(state.model), clients)
            state = dataclasses.replace(state, model=begun.model, sigma=begun.sigma, psi=begun.psi, heads={})
        place = {"round": state.round - first, "rounds": state.rounds - first}
        after = self.match.round(dataclasses.replace(state, **place), clients)
        assert isinstance(after, MatchPlusState)
        return dataclasses.replace(after, round=state.round + 1, rounds=state.rounds)

    @at_site
    def pretrain_update(
        self, site: Site, net: Tensors, heads: Tensors, round: int, rounds: int
    ) -> dict[str, Any]:
        reply = simsiam.pretrain(site, net, heads, self.pretrain, round=round, rounds=rounds)
        return {"net": reply["model"], "heads": reply["heads"], "n": reply["n"]}

    @at_site
    def local_update(self, site: Site, **payload: Any) -> dict[str, Any]:
        simsiam.forget(site)
        return self.match.local_update(site, **payload)

    @at_site
    def keep_helpers(self, site: Site, helpers: list[Changes]) -> dict[str, Any]:
        return self.match.keep_helpers(site, helpers)
