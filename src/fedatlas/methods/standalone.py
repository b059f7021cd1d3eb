"""Standalone training: the lower end of the scale.

Every site trains alone, from the same start, and nothing is averaged. The models are evaluated each by itself,
and together as an ensemble in which a model speaks for the classes that its site annotates (`owners`).

A site's model is that of the round in which it was best on the site's own validation cases, as in ConDistFL (Wang et al.,
Section 4.2), and so is every member of the ensemble. `choose: common` takes one round for all, the best by all sites'
validation cases together, which no site alone could choose.

Reconstruction: the merging rule of the ensemble is not given in the papers that compare with it; `Member` in
`fedatlas.core.contract` states ours.

With `dp_sgd` the sites train by DP-SGD, as teachers do in the privacy study of UFPS (Jiang, Ma, Zeng, Ying, Patterns 2024,
Tables S12 and S13); `fedatlas.methods.shared.dp_sgd` states what that protects.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Member, Site, State, at_site
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Local
from fedatlas.methods.shared import dp_sgd
from fedatlas.methods.shared.dp_sgd import DPSGD
from fedatlas.methods.shared.owners import SENDS_FINDINGS, by_owner, owned
from fedatlas.methods.shared.swa import WithSWA


@dataclass(frozen=True)
class StandaloneState(State):
    """model: where every site started. models: site -> its model. classes: site -> the classes it annotates. findings: site ->
    the findings of the whole image that it annotates."""

    models: dict[str, Tensors] = field(default_factory=dict)
    classes: dict[str, list[int]] = field(default_factory=dict)
    findings: dict[str, list[int]] = field(default_factory=dict)


@options
class Standalone(WithSWA):
    """Each site alone; evaluated alone and as the merged ensemble."""

    state: ClassVar[type[State]] = StandaloneState
    sends: ClassVar[dict[str, str]] = SENDS_FINDINGS
    alone: ClassVar[bool] = True

    choose: Literal["site", "common"] = option(
        "site",
        "Which round counts. site: of every site's model the one in which it was best on the site's own validation cases, for "
        "which each site is sent its model once more in validated rounds; common: one for all, the best over all sites, and always so with "
        "swa_start, whose means are there after the last round alone.",
    )
    dp_sgd: DPSGD | None = option(
        None, "Training with clipped gradients of single samples and noise; null: without."
    )
    local: Local = option(Local(), "Training at a site between two evaluations.")

    @property
    def chosen_by_site(self) -> bool:
        return self.choose == "site" and self.swa_start is None

    def start(self, net: nn.Module, clients: Clients) -> StandaloneState:
        return StandaloneState(model=tensors_of(net))

    def round(self, state: StandaloneState, clients: Clients) -> StandaloneState:
        each = {site: {"model": state.models.get(site, state.model)} for site in clients.sites}
        replies = clients.call(self.local_update, each=each, round=state.round, rounds=state.rounds)
        models, classes, findings = dict(state.models), dict(state.classes), dict(state.findings)
        for site, reply in replies:
            models[site], classes[site], findings[site] = reply["model"], reply["classes"], reply["findings"]
        return self.with_mean(
            dataclasses.replace(
                state, models=models, classes=classes, findings=findings, round=state.round + 1
            )
        )

    def models(self, state: StandaloneState) -> dict[str, Tensors]:
        return state.models

    def replaced(self, state: StandaloneState, models: dict[str, Tensors]) -> StandaloneState:
        return dataclasses.replace(state, models=models)

    def assembled(self, state: StandaloneState, models: Mapping[str, Tensors]) -> StandaloneState:
        """The state with the models that the sites chose, site -> tensors; a site that could not has its last one."""
        return dataclasses.replace(state, models=state.models | dict(models))

    def eval_members(self, state: StandaloneState, site: str) -> list[Member]:
        """All sites' models, each restricted to the classes and findings that its site annotates."""
        return by_owner(state.model, state.models, state.classes, findings=state.findings)

    @at_site
    def local_update(self, site: Site, model: Tensors, round: int, rounds: int) -> dict[str, Any]:
        net, loss = site.network(model), losses.supervised(self.loss, site)
        with dp_sgd.accounted(self.dp_sgd, site, net, self.local) as private:
            dp_sgd.train(private, site, net, loss, self.local, round=round, rounds=rounds)
        return {"model": tensors_of(net), "n": site.n_train, **owned(site)}

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell. Raises FederationError where DP-SGD cannot be: see `dp_sgd.examine`."""
        return dp_sgd.examine(self.dp_sgd, net, self.local)
