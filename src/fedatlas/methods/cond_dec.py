"""Conditional decoder: the decoder is told for which site it segments.

Dmitriev, Kaufman. Learning multi-class segmentations from single-class datasets. CVPR 2019, where the condition is the
class. In a federation: Cond-dec of the empirical study of UFPS, Jiang, Ma, Zeng, Ying. UFPS: a unified framework for
partially annotated federated segmentation in heterogeneous data distribution. Patterns, 2024, Figure 2: the condition is
the site.

FedAvg of a net (`nets.cond_unet`) whose decoder reads a number h(k) beside its maps. A site trains with its own number.
Inference takes the logits of a class from the run of the decoder with the number of the site that annotates the class,
and the mean of the runs' logits for the background; the runs share one pass of the encoder. The study trains the
annotated foreground alone (the loss `dice_bce` with `channels: foreground`).

Reconstruction: h is multiplicative hashing of the site's place k = 1, 2, … among the sorted names, spread over
[-scale, scale]: neighbouring places have distant numbers, and none occurs twice. Of several sites that annotate a class,
it is asked of the one with the most annotated cases, of equal ones the first.

Shapes: C classes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, parts, tensors_of
from fedatlas.learning.loop import train
from fedatlas.methods.shared.averaging import SENDS_PER_CLASS, Weighted, answer, mean

CONDITION = "condition"
"""The part of a net that holds, for each class, the number that the decoder reads."""

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class CondState(State):
    """model: the mean, with the conditions that inference takes. condition: the tensor that holds them. values: site ->
    h(k). labelled: site -> [C] its training cases in which class c is annotated."""

    condition: str = ""
    values: dict[str, float] = field(default_factory=dict)
    labelled: dict[str, list[int]] = field(default_factory=dict)


@options
class CondDec(Weighted):
    """FedAvg of a net whose decoder is told for which site it segments (Dmitriev 2019, UFPS)."""

    state: ClassVar[type[State]] = CondState
    tasks: ClassVar[tuple[str, ...]] = ("segmentation",)
    sends: ClassVar[dict[str, str]] = SENDS_PER_CLASS

    scale: float = option(2.0, "Conditions lie between -scale and scale, as normalised maps do.", ge=0)

    def start(self, net: nn.Module, clients: Clients) -> CondState:
        values = {site: self.h(k) for k, site in enumerate(clients.sites, 1)}
        return CondState(tensors_of(net), condition=condition_of(net), values=values)

    def h(self, k: int) -> float:
        """The condition of the site at place k, counted from 1."""
        return self.scale * (2 * (k * GOLDEN % 1) - 1)

    def round(self, state: CondState, clients: Clients) -> CondState:
        values = dict(state.values)
        for site in clients.sites:  # a site that came later
            values.setdefault(site, self.h(len(values) + 1))
        replies = clients.call(
            self.local_update,
            each={site: {"h": values[site]} for site in clients.sites},
            condition=state.condition,
            model=state.model,
            round=state.round,
            rounds=state.rounds,
        )
        labelled = state.labelled | dict(zip(replies.sites, replies.plain("labelled"), strict=True))
        model = mean(replies, state, self.weights)
        model[state.condition] = asked(labelled, values).to(model[state.condition])
        return dataclasses.replace(
            state, model=model, values=values, labelled=labelled, round=state.round + 1
        )

    @at_site
    def local_update(
        self, site: Site, model: Tensors, condition: str, h: float, round: int, rounds: int
    ) -> dict[str, Any]:
        net = site.network(model | {condition: torch.full_like(model[condition], h)})
        loss = losses.supervised(self.loss, site)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return answer(site, net, per_class=True)

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space."""
        losses.make(self.loss, space)
        if not space.exclusive:
            raise FederationError(
                "method cond_dec: is for exclusive classes, and labels.exclusive is false; it merges the backgrounds that "
                "are told for several sites"
            )

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """Raises FederationError for a net without a condition."""
        condition_of(net)
        return []


def asked(labelled: Mapping[str, Sequence[int]], values: Mapping[str, float]) -> Tensor:
    """[C] the condition of the site of which each class is asked. labelled: site -> [C] its annotated cases, of one site
    at least; values: site -> its condition. A class that nobody annotates, and the background, are asked of the site of
    the first class that someone does."""
    sites = sorted(labelled)
    most = [max(sites, key=lambda site: labelled[site][c]) for c in range(len(labelled[sites[0]]))]
    some = [c > 0 and labelled[site][c] > 0 for c, site in enumerate(most)]
    other = most[some.index(True)] if any(some) else sites[0]
    return torch.tensor([values[site if own else other] for site, own in zip(most, some, strict=True)])


def condition_of(net: nn.Module) -> str:
    """The name of the tensor with the conditions. Raises FederationError for a net that has none."""
    names = parts(net).get(CONDITION, ())
    if len(names) != 1:
        raise FederationError(
            f"method cond_dec: the net {type(net).__name__} reads no condition; set net.name to cond_unet"
        )
    return names[0]
