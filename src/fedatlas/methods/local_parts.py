"""Local parts: some parts of the net stay with the site, the rest is averaged.

The part-wise rows of the empirical study of UFPS: Jiang, Ma, Zeng, Ying. UFPS: a unified framework for partially
annotated federated segmentation in heterogeneous data distribution. Patterns, 2024, Figure 2 and its supplement.

    multi-head      keep: [head]             multi-decoder   keep: [decoder, head]
    multi-encoder   keep: [encoder], and deep_supervision where the net has it there (`ufps_unet`)

The study trains with the complete partial labels, the annotated classes and all else as background (the loss
`dice_bce` with `channels: known`), and evaluates before averaging. So a site's model as it was trained is offered for
evaluation, for the classes that the site annotates (`owners`); a voxel is said by the models of all sites together, as for
`standalone`. With nothing kept it is FedAvg, bit for bit, evaluated after averaging; with every part kept it is
`standalone`.

For training a site takes its parts from its own memory. It sends them all the same, with the rest of its model, because
the server asks for evaluations; other sites are given them for evaluation alone.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Member, Site, State, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import train
from fedatlas.methods.shared.averaging import Weighted, answer, mean
from fedatlas.methods.shared.kept import chosen, names_of_parts
from fedatlas.methods.shared.owners import SENDS_FINDINGS, by_owner, owned

MEMORY = "local_parts.own"
"""The key of a site's memory with the tensors that it keeps."""


@dataclass(frozen=True)
class LocalPartsState(State):
    """model: the mean of everything. kept: the tensors that sites keep, by name. models: site -> the tensors that take
    the place of the mean's when it is evaluated. classes: site -> the classes that it annotates. findings: site -> the
    findings of the whole image that it annotates."""

    kept: tuple[str, ...] = ()
    models: dict[str, Tensors] = field(default_factory=dict)
    classes: dict[str, list[int]] = field(default_factory=dict)
    findings: dict[str, list[int]] = field(default_factory=dict)


@options
class LocalParts(Weighted):
    """FedAvg in which named parts of the net stay with the site: multi-head, multi-encoder, multi-decoder (UFPS)."""

    state: ClassVar[type[State]] = LocalPartsState
    sends: ClassVar[dict[str, str]] = SENDS_FINDINGS
    own_tensors: ClassVar[bool] = True

    keep: list[str] = option(
        ["head"], "The parts of the net that a site keeps, by name; the rest of a net is `rest`."
    )
    evaluate: Literal["before", "after"] = option(
        "before",
        "Whether sites' models are evaluated before averaging, as they were trained, or after, with the mean of all "
        "other parts.",
    )

    def kept(self, net: nn.Module) -> tuple[str, ...]:
        """The names of the tensors that a site keeps, in the order of the net. Raises as `examine`."""
        return names_of_parts(net, self.keep, "method local_parts: keep")

    def start(self, net: nn.Module, clients: Clients) -> LocalPartsState:
        return LocalPartsState(tensors_of(net), kept=self.kept(net))

    def round(self, state: LocalPartsState, clients: Clients) -> LocalPartsState:
        replies = clients.call(
            self.local_update,
            model=state.model,
            kept=list(state.kept),
            round=state.round,
            rounds=state.rounds,
        )
        model, models = mean(replies, state, self.weights), dict(state.models)
        if state.kept:
            for site, values in zip(replies.sites, replies.each("model"), strict=True):
                models[site] = values if self.evaluate == "before" else chosen(values, state.kept)
        classes = state.classes | dict(zip(replies.sites, replies.plain("classes"), strict=True))
        findings = state.findings | dict(zip(replies.sites, replies.plain("findings"), strict=True))
        known = {"classes": classes, "findings": findings}
        return dataclasses.replace(state, model=model, models=models, **known, round=state.round + 1)

    def eval_members(self, state: LocalPartsState, site: str) -> list[Member]:
        """All sites' models, each for the classes and findings that its site annotates; the mean where nothing is kept."""
        return by_owner(state.model, state.models, state.classes, findings=state.findings)

    @at_site
    def local_update(
        self, site: Site, model: Tensors, kept: list[str], round: int, rounds: int
    ) -> dict[str, Any]:
        own: Any = site.memory.get(MEMORY, {})
        net = site.network(model | own)
        train(site, net, losses.supervised(self.loss, site), self.local, round=round, rounds=rounds)
        reply = answer(site, net, per_class=False)
        if kept:
            site.memory[MEMORY] = dict(chosen(reply["model"], kept))
        return reply | owned(site)

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell of a net. Raises FederationError where it lacks a part of `keep`."""
        return [] if self.kept(net) else ["method local_parts: keep names no part, so that it is FedAvg"]
