"""FedNorm.

Bernecker et al. FedNorm: modality-based normalization in federated learning for multi-modal liver segmentation.
arXiv:2205.11096, 2022.

FedAvg whose normalisation layers are averaged over sites of the same modality only; every other tensor is averaged
over all sites.

Differences from the paper: its layers are of mode normalisation, which replaces batch normalisation; here the layers
that a net has, of batches, instances, groups or channels, go by group with all their parameters and statistics. Groups
are named in the federation file and may be of anything (a phase of contrast, a scanner). A site is in one group:
FedNorm+, which tells the slices of one site apart, is not here.

One group of all sites makes it FedAvg; every site its own group is FedBN with `speaks: site`. A site is evaluated with the
normalisation of its own group for all classes: groups whose sites annotate different classes have layers that never met a
loss of the others' classes. A site that trains nothing is given the mean of the sites that no group names, or over all where
every site is named.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from fedatlas import losses
from fedatlas.core.contract import Clients, Member, Site, State, at_site
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import not_known, option, options
from fedatlas.core.tensors import Tensors, average, tensors_of
from fedatlas.learning.loop import train
from fedatlas.methods.shared.averaging import SENDS, Weighted, answer, mean, site_weights
from fedatlas.methods.shared.kept import chosen, names_in, norm_layers, nothing_kept


@dataclass(frozen=True)
class GroupState(State):
    """model: the mean of everything over all sites. norms: the tensors that go by group. groups: group -> its mean of
    them; empty before the first round."""

    norms: tuple[str, ...] = ()
    groups: dict[str, Tensors] = field(default_factory=dict)


@options
class FedNorm(Weighted):
    """FedAvg in which normalisation is shared within groups of sites, as of one modality (Bernecker 2022)."""

    state: ClassVar[type[State]] = GroupState
    sends: ClassVar[dict[str, str]] = SENDS
    own_tensors: ClassVar[bool] = True

    groups: dict[str, list[str]] = option(
        {}, "Group -> the names of its sites; sites that no group names are a group together."
    )

    def check_groups(self) -> None:
        """Raises FederationError where a site is in two groups, or a group has no name."""
        named = [site for sites in self.groups.values() for site in sites]
        twice = sorted({site for site in named if named.count(site) > 1})
        if twice:
            raise FederationError(
                f"fednorm: groups: site {twice[0]!r} is named twice; a site is in one group"
            )
        if "" in self.groups:
            raise FederationError("fednorm: groups: a group has no name; give it one")

    def group_of(self, site: str) -> str:
        """The name of a site's group; "" for sites that no group names."""
        return next((group for group, sites in self.groups.items() if site in sites), "")

    def check_sites(self, training: Sequence[str]) -> None:
        """Raises FederationError where a group names a site that does not train."""
        for group, sites in self.groups.items():
            for site in sites:
                if site not in training:
                    raise not_known(f"fednorm: groups: {group}: the training site", site, training)

    def start(self, net: nn.Module, clients: Clients) -> GroupState:
        self.check_sites(clients.sites)
        return GroupState(tensors_of(net), norms=names_in(net, norm_layers(net)))

    def round(self, state: GroupState, clients: Clients) -> GroupState:
        each = {site: {"norms": state.groups.get(self.group_of(site), {})} for site in clients.sites}
        replies = clients.call(
            self.local_update, each=each, model=state.model, round=state.round, rounds=state.rounds
        )
        model = mean(replies, state, self.weights)
        counts = dict(zip(replies.sites, site_weights(replies, self.weights), strict=True))
        groups = dict(state.groups)
        for group in sorted({self.group_of(site) for site in replies.sites}):
            members = [site for site in replies.sites if self.group_of(site) == group]
            values = (
                chosen(reply, state.norms)
                for site, reply in zip(replies.sites, replies.each("model"), strict=True)
                if site in members
            )
            groups[group] = average(values, [counts[site] for site in members])
        return dataclasses.replace(state, model=model, groups=groups, round=state.round + 1)

    def eval_members(self, state: GroupState, site: str) -> list[Member]:
        """The mean with the normalisation of the site's group, where there is one."""
        return [Member(state.model | state.groups.get(self.group_of(site), {}))]

    @at_site
    def local_update(
        self, site: Site, model: Tensors, norms: Tensors, round: int, rounds: int
    ) -> dict[str, Any]:
        net = site.network(model | norms)
        loss = losses.supervised(self.loss, site)
        train(site, net, loss, self.local, round=round, rounds=rounds)
        return answer(site, net, per_class=False)

    def check(self, space: LabelSpace) -> None:
        """Raises FederationError where the hyper-parameters do not fit the label space, or a site is in two
        groups."""
        losses.make(self.loss, space)
        self.check_groups()

    def examine(self, net: nn.Module, sites: Sequence[str]) -> list[str]:
        """What `check` should tell of a net and of the training sites. Raises as `check_sites`."""
        self.check_sites(sites)
        told = [] if names_in(net, norm_layers(net)) else [nothing_kept("fednorm", net)]
        return told if self.groups else [*told, "fednorm: groups: names no site, so that it is FedAvg"]
