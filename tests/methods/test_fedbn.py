"""FedBN and FedNorm: what stays, what is shared with whom, and the limits between FedAvg and training alone."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from fakes import Server, same
from image_sites import SETUP_1, SPACE, ImageSite, cnn
from torch import nn

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import Tensors, average, from_tree, parts, tensors_of, to_tree
from fedatlas.learning.loop import Local
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedbn import MEMORY, FedBN, OwnState
from fedatlas.methods.fednorm import FedNorm
from fedatlas.methods.shared.kept import BATCH, names_in, names_of_parts, norm_layers
from fedatlas.methods.standalone import Standalone

LOCAL = Local(optimizer="adamw", batch=4, steps=2, lr=1e-2)
SITES = list(SETUP_1)


class Plain(nn.Module):
    """A net without normalisation, with parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, len(SPACE))
        self.other = nn.Parameter(torch.ones(4))

    def parts(self) -> dict[str, Any]:
        return {"encoder": self.body, "head": self.head}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu().mean((2, 3)) * self.other)


class Wrapped(nn.Module):
    """As DataParallel and compile do: every name has a prefix."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def batch_norm() -> nn.Module:
    return cnn(norm="batch")


def server(make: Any = batch_norm, silent: str = "") -> Any:
    found = [ImageSite(name, own, 4 + index, make) for index, (name, own) in enumerate(SETUP_1.items())]
    return Server(*found, silent=silent)


def play(method: Any, clients: Any, make: Any = batch_norm, rounds: int = 2) -> Any:
    state = dataclasses.replace(method.start(make(), clients), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, clients)
    return state


def offered(method: Any, state: Any, site: str) -> Tensors:
    """The site's own model."""
    if isinstance(method, FedBN):
        method = dataclasses.replace(method, speaks="site")
    [member] = method.eval_members(state, site)
    return member.model


def test_without_normalisation_it_is_fedavg() -> None:
    """E8, bit for bit."""
    expected = play(FedAvg(local=LOCAL), server(Plain), Plain).model
    state = play(FedBN(local=LOCAL), server(Plain), Plain)
    assert state.kept == () and same(state.model, expected)
    assert all(same(offered(FedBN(), state, site), expected) for site in SITES)
    assert same(play(FedNorm(local=LOCAL), server(Plain), Plain).model, expected)


@pytest.mark.parametrize("make", [batch_norm, Plain])
def test_with_all_parts_kept_it_is_training_alone(make: Any) -> None:
    """E8, bit for bit, optimizer and all."""
    method = FedBN(keep=list(parts(make())), local=LOCAL)
    state, alone = play(method, server(make), make), play(Standalone(local=LOCAL), server(make), make)
    for site in SITES:
        assert same(offered(method, state, site), alone.models[site])
    assert state.kept == tuple(tensors_of(make()))


def test_a_site_keeps_its_normalisation_and_shares_the_rest() -> None:
    clients, method = server(), FedBN(local=LOCAL)
    state: OwnState = play(method, clients)
    kinds = {name.rpartition(".")[2] for name in state.kept}
    assert {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"} <= kinds
    models = {site: offered(method, state, site) for site in SITES}
    for name in state.model:
        equal = all(torch.equal(models[SITES[0]][name], models[site][name]) for site in SITES[1:])
        assert equal == (name not in state.kept or name.endswith("num_batches_tracked"))
    for site in SITES:
        assert all(torch.equal(clients.members[site].memory[MEMORY][n], models[site][n]) for n in state.kept)
    assert same(offered(method, state, "elsewhere"), state.model)
    assert same(models[SITES[0]] | {}, offered(method, from_tree(OwnState, to_tree(state)), SITES[0]))


def test_training_begins_from_what_the_site_keeps() -> None:
    """The second round of a site, done by hand."""
    clients, method = server(), FedBN(local=LOCAL)
    first = dataclasses.replace(play(method, clients, rounds=1), rounds=2)
    site = clients.members["2"]
    by_hand = ImageSite("2", SETUP_1["2"], 5, batch_norm)
    by_hand.round, by_hand.memory = 1, {"optimizer": site.memory["optimizer"]}
    start = first.model | site.memory[MEMORY]
    assert not same(start, first.model)
    expected = FedAvg(local=LOCAL).local_update(cast(Any, by_hand), start, 1, 2)["model"]
    second = method.round(first, clients)
    assert all(torch.equal(second.own["2"][name], expected[name]) for name in second.kept)


def test_a_silent_site_keeps_what_it_had() -> None:
    clients, method = server(), FedBN(local=LOCAL)
    first = play(method, clients, rounds=1)
    clients.silent = "3"
    second = method.round(first, clients)
    assert same(second.own["3"], first.own["3"]) and not same(second.own["1"], first.own["1"])


def test_batch_normalisation_only() -> None:
    group = Server(ImageSite("1", {0, 1}, 4, cnn))
    assert FedBN(norms="batch").start(cnn(norm="group"), cast(Any, group)).kept == ()
    assert FedBN().start(cnn(norm="group"), cast(Any, group)).kept != ()
    both = FedBN(norms="batch").start(batch_norm(), cast(Any, group)).kept
    assert both == FedBN().start(batch_norm(), cast(Any, group)).kept


@pytest.mark.parametrize(
    ("name", "options"),
    [("unet", {"filters": [8, 8, 8], "norm": norm}) for norm in ("instance", "batch", "group")],
)
def test_layers_are_found_by_what_they_are(name: str, options: dict[str, Any]) -> None:
    """Every tensor of the net that is not of a convolution or a linear layer is of a normalisation layer."""
    net = nets.build(name, options, in_channels=1, classes=3, spatial_dims=2, seed=0)
    found = set(names_in(net, norm_layers(net)))
    kinds = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    others = names_in(net, [m for m in net.modules() if isinstance(m, kinds)])
    assert found and found.isdisjoint(others) and found | set(others) == set(tensors_of(net))
    assert (set(names_in(net, norm_layers(net, BATCH))) == found) == (options["norm"] == "batch")


def test_wrapping_a_net_changes_nothing() -> None:
    net = batch_norm()
    wrapped = Wrapped(net)
    plain = names_in(net, norm_layers(net))
    assert tuple(f"module.{name}" for name in plain) == names_in(wrapped, norm_layers(wrapped))
    with pytest.raises(FederationError, match="does not hold"):
        names_in(net, norm_layers(batch_norm()))


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.BatchNorm2d(2), True),
        (nn.BatchNorm3d(2), True),
        (nn.SyncBatchNorm(2), True),
        (nn.InstanceNorm3d(2, affine=True), False),
        (nn.GroupNorm(1, 2), False),
        (nn.LayerNorm(2), False),
        (nn.RMSNorm(2), False),
    ],
    ids=lambda of: type(of).__name__ if isinstance(of, nn.Module) else str(of),
)
def test_every_kind_of_normalisation_is_found(layer: nn.Module, batch: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2), layer)
    assert norm_layers(net) == [layer] and norm_layers(net, BATCH) == [layer] * batch


def test_names_are_in_the_order_of_the_net_whoever_asks() -> None:
    """As a message has them, not as they are asked for or sorted; of a tensor with two names the one that travels."""
    net: Any = Plain()
    named = ("body.weight", "body.bias", "head.weight", "head.bias")
    assert names_in(net, [net.head, net.body]) == named
    assert names_of_parts(net, ["head", "encoder"], "keep") == named
    net.again = net.body
    assert names_in(net, [net.again]) == ("body.weight", "body.bias")
    with pytest.raises(FederationError, match="net Plain: does not hold 2 tensors"):
        names_in(net, [net.head, nn.Linear(2, 2)])


@pytest.mark.parametrize("agd", [True, False])
def test_a_net_whose_norms_have_nothing_to_keep_is_told(agd: bool) -> None:
    """With what gives them something, where its options can."""
    options = {"agd": agd, "width": 2, "levels": 2}
    menunet = nets.build("menunet", options, in_channels=1, classes=3, spatial_dims=2, seed=0)
    (told,) = FedBN(local=LOCAL).examine(menunet, [])
    assert told.endswith("so that it is FedAvg; set net.affine to true")
    (told,) = FedBN(local=LOCAL).examine(Plain(), [])
    assert told == "fedbn: no such layer of Plain has parameters or statistics, so that it is FedAvg"


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(FederationError, match="did you mean 'head'"):
        FedBN(keep=["heads"]).start(batch_norm(), server())


def test_one_group_is_fedavg_and_a_group_each_is_fedbn() -> None:
    expected = play(FedAvg(local=LOCAL), server()).model
    for groups in ({}, {"ct": SITES}):
        method = FedNorm(groups=groups, local=LOCAL)
        state = play(method, server())
        assert all(same(offered(method, state, site), expected) for site in SITES)
    method, other = FedNorm(groups={f"of {site}": [site] for site in SITES}, local=LOCAL), FedBN(local=LOCAL)
    state, kept = play(method, server()), play(other, server())
    for site in SITES:
        assert same(offered(method, state, site), offered(other, kept, site))


def test_groups_share_their_normalisation() -> None:
    """One round by hand: two named sites, and two that no group names."""
    method = FedNorm(groups={"mr": ["4", "2"]}, local=LOCAL)
    start, clients = tensors_of(batch_norm()), server()
    models = {
        site: method.local_update(clients.members[site], start, {}, 0, 1)["model"] for site in clients.sites
    }
    state = play(method, server(), rounds=1)
    n = {site: clients.members[site].n_train for site in SITES}
    for group in (["2", "4"], ["1", "3"]):
        expected = average([models[site] for site in group], [n[site] for site in group])
        for site in group:
            got = offered(method, state, site)
            assert all(torch.equal(got[name], expected[name]) for name in state.norms)
    everyone = average([models[site] for site in SITES], [n[site] for site in SITES])
    assert same(state.model, everyone)


def test_groups_are_checked() -> None:
    space = LabelSpace(("a", "b"), exclusive=False, level="image")
    with pytest.raises(FederationError, match="'1' is named twice"):
        FedNorm(groups={"ct": ["1"], "mr": ["2", "1"]}).check(space)
    with pytest.raises(FederationError, match="has no name"):
        FedNorm(groups={"": ["1"]}).check(space)
    with pytest.raises(FederationError, match="the training site '9' does not exist"):
        FedNorm(groups={"ct": ["9"]}).start(batch_norm(), server())
