"""FedBN.

Li, Jiang, Zhang, Kamp, Dou. FedBN: federated learning on non-IID features via local batch normalization. ICLR 2021.

FedAvg in which every site keeps its own normalisation layers, weights and running statistics: scanners and protocols
shift the statistics of features, and a mean of layers that undo different shifts undoes none.

The paper's sites annotate all classes, and a site's own model says all of them: `speaks: site`. Where sites annotate
different classes, a site's layers are fit for its own, and every class is asked of the models of the sites that annotate
it (`owners`), at a site that trains nothing, too: Jiang, Ma, Zeng, Ying. UFPS, Patterns 2024, Figure 2C and its
supplement, S6.4. A site that annotates all classes is asked for them alone, so that both are one where all do.

Differences from the paper: all normalisation layers are kept, not only batch normalisation; `norms: batch` is the
paper's. `keep` adds whole parts of the net. For training a site takes its layers from its own memory. It sends them
all the same, with the rest of its model, because the server asks for evaluations and must have the site's model for
that; other sites are given them for evaluation alone. With `speaks: site`, a site that trains nothing is given their mean,
of which the paper does not speak.

A net without normalisation layers makes it FedAvg; with all parts kept it is training alone.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Member, Site, State, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, forms_of, tensors_of
from fedatlas.learning.loop import train
from fedatlas.methods.shared.averaging import Weighted, answer, mean
from fedatlas.methods.shared.kept import (
    BATCH,
    NORMS,
    chosen,
    names_in,
    names_of_parts,
    norm_layers,
    nothing_kept,
)
from fedatlas.methods.shared.owners import (
    SENDS_FINDINGS,
    WHO_SPEAKS,
    Speaks,
    owned,
    speakers,
)

MEMORY = "fedbn.own"
"""The key of a site's memory with the tensors that it keeps."""


@dataclass(frozen=True)
class OwnState(State):
    """model: the mean of everything. kept: the tensors that sites keep, by name. own: site -> its values of them. classes:
    site -> the classes that it annotates. findings: site -> the findings of the whole image that it annotates."""

    kept: tuple[str, ...] = ()
    own: dict[str, Tensors] = field(default_factory=dict)
    classes: dict[str, list[int]] = field(default_factory=dict)
    findings: dict[str, list[int]] = field(default_factory=dict)


@options
class FedBN(Weighted):
    """FedAvg in which normalisation stays with the site (Li 2021)."""

    state: ClassVar[type[State]] = OwnState
    sends: ClassVar[dict[str, str]] = SENDS_FINDINGS
    own_tensors: ClassVar[bool] = True

    norms: Literal["all", "batch"] = option(
        "all", "Which normalisation layers a site keeps: all, or batch normalisation only, as published."
    )
    keep: list[str] = option(
        [], "Further parts of the net that a site keeps, by name; the rest of a net is `rest`."
    )
    speaks: Speaks = option("owners", WHO_SPEAKS)

    def start(self, net: nn.Module, clients: Clients) -> OwnState:
        return OwnState(tensors_of(net), kept=self.kept(net))

    def kept(self, net: nn.Module) -> tuple[str, ...]:
        """The names of the tensors that a site keeps, in the order of the net. Raises FederationError for a part of
        `keep` that it does not have."""
        layers = norm_layers(net, BATCH if self.norms == "batch" else NORMS)
        named = {*names_in(net, layers), *names_of_parts(net, self.keep, "fedbn: keep")}
        return tuple(name for name in forms_of(net) if name in named)

    def round(self, state: OwnState, clients: Clients) -> OwnState:
        replies = clients.call(
            self.local_update,
            model=state.model,
            kept=list(state.kept),
            round=state.round,
            rounds=state.rounds,
        )
        model, own = mean(replies, state, self.weights), dict(state.own)
        if state.kept:
            for site, values in zip(replies.sites, replies.each("model"), strict=True):
                own[site] = chosen(values, state.kept)
        classes = state.classes | dict(zip(replies.sites, replies.plain("classes"), strict=True))
        findings = state.findings | dict(zip(replies.sites, replies.plain("findings"), strict=True))
        known = {"classes": classes, "findings": findings}
        return dataclasses.replace(state, model=model, own=own, **known, round=state.round + 1)

    def eval_members(self, state: OwnState, site: str) -> list[Member]:
        """The mean with what sites keep, as `speaks` says."""
        return speakers(state.model, state.own, state.classes, site, self.speaks, state.findings)

    @at_site
    def local_update(
        self, site: Site, model: Tensors, kept: list[str], round: int, rounds: int
    ) -> dict[str, Any]:
        own: Any = site.memory.get(MEMORY, {})
        net = site.network(model | own)
        train(site, net, losses.supervised(self.loss, site), self.local, round=round, rounds=rounds)
        reply = answer(site, net, per_class=False)
        site.memory[MEMORY] = dict(chosen(reply["model"], kept))
        return reply | owned(site)

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell of a net. Raises as `kept`."""
        return [] if self.kept(net) else [nothing_kept("fedbn", net)]
