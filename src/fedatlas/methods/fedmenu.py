"""Federated multi-encoding U-Net (Fed-MENU).

Xu, Deng, Gateno, Yan. Federated multi-organ segmentation with inconsistent labels. IEEE Trans. Med. Imaging, 2023.

The net has a sub-encoder g_m for every organ m, a shared decoder f, and an auxiliary generic decoder (AGD) h. A site is
the expert for the organs that it annotates, and trains their sub-encoders only; the others run, and stay bit for bit
as they came. Every batch is learnt from in two steps, each by an optimizer of its own:

    S1   f and the site's own g_m    marginal and exclusion loss of the segmentation         Eq. (3)
    S2   h and the site's own g_m    cross-entropy and Dice of "this organ", by every level  Eq. (5)

The server lets an expert count twice as much as any other site in the mean of a sub-encoder. Inference needs no AGD.
Another federated strategy than FedAvg works on these means (`strategy`).

In its empirical study, UFPS (Jiang et al., Patterns, 2024) has a variant: `agd: none`, `agg: owner_only`, `per_organ: true`.

Differences from the paper, which follow the official code
    Eq. (1) weighs every parameter by the sites' cases; the code gives sub-encoders the weights 1 and 1/2 (`agg`). As
    sites that are no experts return theta_m unchanged, its mean is theta_m + rho_m mean_experts(theta_m,k - theta_m)
    with rho_m = N_experts / (N_experts + N_others / 2). Eq. (6) and (7) are binary and, in part, not bounded; the code
    has the marginal and the exclusion loss of Shi et al. (`losses.marginal`). Eq. (3) and (5) are minimised by two
    optimizers in turn, not as one sum.

Differences from the official code
    The label set is that of a sample, not of a batch. An organ may have several classes, as a lesion; S2 tells those
    that a sample annotates from the rest, and learns nothing of an organ from samples that do not annotate it. A site
    that annotates nothing sends back what it received. The learning rate falls from step to step, not from epoch to
    epoch. Its optimizer is sgd with lr 0.01, momentum 0.99, nesterov, weight_decay 3e-5, schedule poly, batch 4, for
    400 rounds of one epoch.

Shapes: B batch, C classes, M organs, *S spatial.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Clients, Member, NetSpec, Replies, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, Tree, parts, tensors_of
from fedatlas.learning.loop import Local, Loop, Loss, Stepper, Value, make_optimizer, total
from fedatlas.losses import LossChoice
from fedatlas.losses.marginal import MarginalDiceCE
from fedatlas.methods.shared.averaging import Weighted, Weighting, site_weights
from fedatlas.methods.strategies import Averaging, Correct, Place, StrategyChoice, make_strategy

ENCODER, AGD = "encoder:", "agd"
"""The parts of a net: sub-encoder m is "encoder:m"."""

L_AUX = MarginalDiceCE(power=2, smooth_numerator=1.0, smooth_denominator=1.0, clamp=1e-4)
"""L_aux of one level, of two classes that are both known."""

Aggregation = Literal["expert_half", "owner_only", "fedavg"]


@runtime_checkable
class Experts(Protocol):
    """A net with a sub-encoder per organ; `forward(x, experts=...)` gives what the AGD says, see `nets.menunet`."""

    organs: tuple[tuple[int, ...], ...]

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]: ...


@dataclass(frozen=True)
class MENUState(State):
    """organs: the classes of each organ. parts: part of the net -> its tensors. kept: what the strategy keeps."""

    organs: list[list[int]] = field(default_factory=list)
    parts: dict[str, list[str]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


@options
class FedMENU(Weighted):
    """A sub-encoder per organ, trained where the organ is annotated, with a shared auxiliary decoder (Xu 2023)."""

    state: ClassVar[type[State]] = MENUState
    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    agg: Aggregation = option(
        "expert_half",
        "The weights of a sub-encoder: 1 for sites that annotate its organ and `non_expert` for others (official "
        "code), 1 and 0, or those of the decoder (Eq. 1).",
    )
    non_expert: float = option(
        0.5, "Weight of a site that does not annotate the organ, with agg: expert_half.", ge=0, le=1
    )
    agd: Literal["shared", "local", "none"] = option(
        "shared",
        "The auxiliary decoder: averaged (AGD), kept at each site and never sent (ALD), or not used: no S2.",
    )
    per_organ: bool = option(
        False,
        "Whether S1 is a step for each organ that a batch annotates, of its sub-encoder and the decoder, which learn this "
        "organ from all the rest (UFPS).",
    )
    weights: Weighting = option("cases", "Of all other parts: n_k/n, or all sites count equally.")
    strategy: StrategyChoice = option(
        StrategyChoice(), "The federated strategy: fedavg, or another that works on the means of the parts."
    )
    pooled: bool = option(
        False, "Centralized training, no federation: one site that holds the cases of all sites (Table II)."
    )
    loss: LossChoice = option(LossChoice(name="marginal_dice_ce_exclusion"), "The loss of S1.")
    local: Local = option(Local(), "Training at a site between two exchanges; S1 and S2 alike.")

    @property
    def own_tensors(self) -> bool:
        return make_strategy(self.strategy).own_tensors

    @property
    def reads_target(self) -> bool:
        return self.agd != "none"

    def start(self, net: nn.Module, clients: Clients) -> MENUState:
        menu = menu_of(net, agd=self.agd != "none")
        return MENUState(
            tensors_of(net),
            organs=[list(organ) for organ in menu.organs],
            parts={part: list(names) for part, names in parts(net).items()},
            kept=make_strategy(self.strategy).start(net, clients),
        )

    def round(self, state: MENUState, clients: Clients) -> MENUState:
        strategy = make_strategy(self.strategy)
        replies = clients.call(
            self.local_update,
            each={site: {"told_to": strategy.told_to(site, state.kept)} for site in clients.sites},
            told=strategy.told(state.kept),
            model=state.model,
            round=state.round,
            rounds=state.rounds,
        )
        mean = self.averaging(replies, state)  # Eq. (1)
        model, kept = strategy.after(state.kept, state.model, replies, mean, clients)
        return dataclasses.replace(state, model=model, kept=kept, round=state.round + 1)

    def averaging(self, replies: Replies, state: MENUState) -> Averaging:
        """The mean of the replies, each part of the net with its own weights."""
        annotated = [set(classes) for classes in replies.plain("annotated")]
        experts = {
            f"{ENCODER}{m}": [bool(classes & set(organ)) for classes in annotated]
            for m, organ in enumerate(state.organs)
        }
        other = {"expert_half": self.non_expert, "owner_only": 0.0, "fedavg": None}[self.agg]
        common = site_weights(replies, self.weights)
        return Averaging(replies.sites, common, experts, other, state.parts)

    def updates_per_step(self) -> int:
        """S1 and S2."""
        return 1 if self.agd == "none" else 2

    def eval_members(self, state: MENUState, site: str) -> list[Member]:
        """The global model, with what the strategy keeps for the site."""
        return make_strategy(self.strategy).members(state.kept, state.model, site)

    @at_site
    def local_update(
        self,
        site: Site,
        model: Tensors,
        round: int,
        rounds: int,
        told: Mapping[str, Any] | None = None,
        told_to: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Where the AGD is local, the site trains its own, and its reply has that of `model` in its place.

        told, told_to: what the strategy tells all sites, and this one.
        """
        kept = cast(Tensors, site.memory.get(AGD, {})) if self.agd == "local" else {}
        net = site.network(model | kept)
        menu, named = menu_of(net, agd=self.agd != "none"), parts(net)
        own = [m for m, organ in enumerate(menu.organs) if set(organ) & site.labels.annotated]
        idle = {f"{ENCODER}{m}" for m in range(len(menu.organs)) if m not in own}
        private = named[AGD] if self.agd == "local" else ()

        def fit(
            net: nn.Module, *, correct: Correct | None = None, memory: str = "", prefix: str = ""
        ) -> None:
            if own:
                train_experts(
                    site,
                    net,
                    own,
                    losses.supervised(self.loss, site),
                    self.local,
                    auxiliary=self.agd != "none",
                    per_organ=self.per_organ,
                    round=round,
                    rounds=rounds,
                    correct=correct,
                    memory=memory,
                    prefix=prefix,
                )

        trained = {name for part, names in named.items() if own and part not in idle for name in names}
        place = Place(
            site, net, {**(told or {}), **(told_to or {})}, trained, frozenset(private), self.local.batch, fit
        )
        reply = make_strategy(self.strategy).update(place)
        if private:
            site.memory[AGD] = cast(Tree, {name: reply["model"][name] for name in private})
            reply["model"] |= {name: model[name] for name in private}
        return reply | {"n": site.n_train, "annotated": sorted(site.labels.annotated)}

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        if make_strategy(self.strategy).personal and self.agd == "local":
            raise FederationError(
                f"method fedmenu: agd is local and strategy {self.strategy.name}, whose sites send models of their own, "
                "auxiliary decoder and all; set agd to shared or none"
            )
        if self.pooled and (self.strategy.name != "fedavg" or self.agd == "local"):
            got = f"strategy is {self.strategy.name}" if self.agd != "local" else "agd is local"
            raise FederationError(
                f"method fedmenu: pooled is true and {got}; centralized training is one site, with strategy fedavg and agd "
                "shared or none"
            )
        if self.per_organ and self.strategy.name != "fedavg":
            raise FederationError(
                f"method fedmenu: per_organ is true and strategy is {self.strategy.name}, which counts one step for every "
                "batch; set strategy to fedavg or per_organ to false"
            )
        losses.make(self.loss, space)
        if not space.exclusive:
            raise FederationError(
                "method fedmenu: is for exclusive classes, and labels.exclusive is false; its auxiliary decoder tells "
                "one organ from all the rest"
            )

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell of a net and of the training sites. Raises FederationError where they do not fit."""
        menu = menu_of(net, agd=self.agd != "none")
        told = [] if self.pooled else make_strategy(self.strategy).examine(net, sites)
        if self.agd == "none" and AGD in menu.parts():
            told.append(
                "method fedmenu: agd is none, and the net has an auxiliary decoder, which is sent and never trained; set "
                "net.agd to false"
            )
        return told

    @property
    def nets(self) -> Mapping[str, NetSpec]:
        return make_strategy(self.strategy).nets

    @property
    def sends(self) -> dict[str, str]:
        return make_strategy(self.strategy).sends | {"n": "cases", "annotated": "classes"}


def train_experts(
    site: Site,
    net: nn.Module,
    own: Sequence[int],
    L_seg: Loss,
    local: Local,
    *,
    auxiliary: bool,
    per_organ: bool = False,
    round: int,
    rounds: int,
    correct: Correct | None = None,
    memory: str = "",
    prefix: str = "",
) -> None:
    """Trains a MENU-Net in place for one round, its sub-encoders `own` only: in S1 f and g_m, in S2 h and g_m, of the organs m
    that some sample of the batch annotates.

    auxiliary: whether S2 is taken. per_organ: whether S1 is taken for every organ by itself. correct: is given the
    gradients of every step. The moments of both optimizers stay at the site as `local.opt_state` says, under keys that
    begin with `memory`; names of losses in the log begin with `prefix`.
    """
    menu = menu_of(net, agd=auxiliary)
    modules = {name: _listed(value) for name, value in menu.parts().items()}
    g = {m: modules[f"{ENCODER}{m}"] for m in own}
    f = [
        module for name in modules if name != AGD and not name.startswith(ENCODER) for module in modules[name]
    ]
    h = modules[AGD] if auxiliary else []
    own_g = [module for m in own for module in g[m]]
    first, second = _optimizer(net, [*own_g, *f], local), _optimizer(net, [*own_g, *h], local)
    _only(net, [*own_g, *f, *h])
    place: dict[str, Any] = {"round": round, "rounds": rounds, "prefix": prefix}
    S1 = Loop(site, net, local, optimizer=first, memory=f"{memory}optimizer", **place)
    S2 = S1.also(net, optimizer=second, memory=f"{memory}auxiliary optimizer") if auxiliary else None

    def step(by: Stepper, loss: Value) -> Tensor:
        gradients = by.gradients(loss)
        by.move(gradients if correct is None else correct(gradients, by.rate))
        return total(loss).detach()

    for batch in S1:
        organs = [m for m in own if bool(samples_of(batch.known, menu.organs[m]).any())]
        each = [(g[m], alone(batch, menu.organs[m])) for m in organs] if per_organ else []
        values, of_batch = [], [module for m in organs for module in g[m]]
        for encoders, seen in each or [(of_batch, batch)]:
            _only(net, [*encoders, *f, *h])
            with S1.autocast():
                L = L_seg(net, seen)  # Eq. (3)
            values.append(step(S1, L))
        _only(net, [*own_g, *f, *h])
        l_seg = torch.stack(values).mean()
        if S2 is None:
            S1.note(l_seg)
            continue
        l_aux = torch.zeros_like(l_seg)
        if organs:
            with S2.autocast():
                said = net(batch.image, experts=organs)
                L = auxiliary_loss(
                    said, batch.target, batch.known, [menu.organs[m] for m in organs]
                )  # Eq. (5)
            l_aux = step(S2, L)
        S1.note(l_seg + l_aux, segmentation=l_seg, auxiliary=l_aux)


def alone(batch: Batch, organ: Sequence[int]) -> Batch:
    """The batch in which the classes of one organ, and the background, are known at most."""
    known = batch.known.clone()
    known[:, [c for c in range(1, known.shape[1]) if c not in organ]] = False
    return dataclasses.replace(batch, known=known)


def auxiliary_loss(
    told: Sequence[Sequence[Tensor]], target: Tensor, known: Tensor, organs: Sequence[Sequence[int]]
) -> Tensor:
    """The sum over organs and levels of L_aux, over the samples that annotate the organ, a scalar.

    told: for each organ, logits [B, 2, *S] of every level; target [B, *S] class index; known [B, C]; organs: the
    classes of each, of which at least one sample annotates one.
    """
    terms: list[Tensor] = []
    for levels, organ in zip(told, organs, strict=True):
        samples = samples_of(known, organ)
        y = organ_mask(target, known, organ)[samples]
        both = torch.ones(len(y), 2, dtype=torch.bool, device=y.device)
        terms += [L_AUX(z[samples], y, both) for z in levels]
    return torch.stack(terms).sum()


def samples_of(known: Tensor, organ: Sequence[int]) -> Tensor:
    """[B] bool: the sample annotates a class of the organ; known [B, C]."""
    return known[:, list(organ)].any(1)


def organ_mask(target: Tensor, known: Tensor, organ: Sequence[int]) -> Tensor:
    """[B, *S] 0 or 1: the voxel is of a class of the organ that its sample annotates; target [B, *S] class index."""
    mask = torch.zeros_like(target, dtype=torch.bool)
    for c in organ:
        mask = mask | ((target == c) & known[:, c].reshape(-1, *[1] * (target.dim() - 1)))
    return mask.to(torch.uint8)


def menu_of(net: nn.Module, *, agd: bool) -> Experts:
    """The MENU-Net within a net: itself, or what a wrapper of it holds. agd: whether it must have an AGD.

    Raises FederationError where there is none.
    """
    menu = next((module for module in net.modules() if isinstance(module, Experts)), None)
    if menu is None or f"{ENCODER}0" not in menu.parts():
        raise FederationError(
            f"method fedmenu: the net {type(net).__name__} has no sub-encoder per organ; set net.name to menunet"
        )
    if agd and AGD not in menu.parts():
        raise FederationError(
            f"method fedmenu: the net {type(net).__name__} has no auxiliary decoder; set net.agd to true, or the "
            "method's agd to none"
        )
    return menu


def _listed(value: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return [value] if isinstance(value, nn.Module) else value


def _only(net: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Only these modules of a net require gradients."""
    net.requires_grad_(False)
    for module in modules:
        module.requires_grad_(True)


def _optimizer(net: nn.Module, modules: Iterable[nn.Module], local: Local) -> torch.optim.Optimizer:
    """A fresh optimizer over the parameters of some modules of a net."""
    _only(net, modules)
    return make_optimizer(net, local)
