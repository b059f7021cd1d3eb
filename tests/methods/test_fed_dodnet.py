"""Fed-DoDNet: the loss of the heads in numbers, which tasks run, what is shared and what stays, limiting cases."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, cast

import pytest
import torch
from fakes import FakeSite, Server, same
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, average, forms_of, from_tree, parts, tensors_of, to_tree
from fedatlas.learning.loop import Local, make_optimizer
from fedatlas.losses import LossChoice
from fedatlas.methods.fed_dodnet import MEMORY, DoDState, FedDoDNet, tasks_of
from fedatlas.transport import egress, wire

SPACE = LabelSpace(("background", "liver", "tumour", "spleen", "kidney"), groups=((1, 2),))
"""Tasks: 0 liver and tumour, 1 spleen, 2 kidney."""
LOCAL = Local(optimizer="sgd", lr=0.05, momentum=0.9, batch=2, steps=2, schedule="constant")
ANNOTATED: dict[str, set[int]] = {"a": {1, 2}, "b": {3}, "c": {2, 4}}
OWN = FedDoDNet(own=["decoder", "controller"], local=LOCAL)
"""DOD*."""


def dodnet(**options: Any) -> nn.Module:
    chosen = {"filters": [8, 8], "groups": [[1, 2]]} | options
    return nets.build("dodnet", chosen, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=3)


class Site(FakeSite):
    """Images of 8 x 8 that depend on the site's name and the round."""

    def __init__(
        self, name: str, annotated: Collection[int], n: int = 3, make: Callable[[], nn.Module] = dodnet
    ) -> None:
        super().__init__(name, annotated, n, make, space=SPACE)


def drawn(rng: torch.Generator, known: Tensor) -> Batch:
    image = torch.randn(len(known), 1, 8, 8, generator=rng)
    target = torch.randint(0, len(SPACE), (len(known), 8, 8), generator=rng).to(torch.uint8)
    return Batch(image, target, known, ["case"] * len(known))


def federation(annotated: dict[str, set[int]] = ANNOTATED, **more: Any) -> Server:
    return Server(*(Site(name, own, 3 + n) for n, (name, own) in enumerate(annotated.items())), **more)


def play(method: Any, server: Any, rounds: int = 2) -> Any:
    state = dataclasses.replace(method.start(dodnet(), server), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, server)
        again = from_tree(type(state), wire.decode(wire.encode(to_tree(state))))
        assert type(state) is DoDState and wire.encode(to_tree(again)) == wire.encode(to_tree(state))
    return state


def offered(method: Any, state: Any, site: str) -> Tensors:
    """The site's own model."""
    [member] = dataclasses.replace(method, speaks="site").eval_members(state, site)
    return member.model


class Spy(nn.Module):
    """A wrapped net that keeps what it was asked and the heads that it gave, with their gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.asked, self.gave = module, [], []

    def forward(self, x: Tensor, tasks: Any) -> list[Tensor]:
        self.asked, self.gave = tasks, self.module(x, tasks=tasks)
        for head in self.gave:
            head.retain_grad()
        return self.gave


def by_hand(heads: list[Tensor], batch: Batch) -> Tensor:
    """Dice and cross-entropy of every annotated (sample, class) pair by itself; heads of all three tasks."""
    dice, bce = [], []
    z = torch.cat(heads, 1)  # of classes 1 to 4
    for n, known in enumerate(batch.known.tolist()):
        for c in (1, 2, 3, 4):
            if not known[c]:
                continue
            mask = batch.target[n] == c
            if c == 1 and known[2]:
                mask = mask | (batch.target[n] == 2)
            y, p = mask.float(), z[n, c - 1].sigmoid()
            dice.append(1 - 2 * (p * y).sum() / (p.sum() + y.sum() + 1))
            bce.append(-(y * p.log() + (1 - y) * (1 - p).log()).mean())
    return torch.stack(dice).mean() + torch.stack(bce).mean()


KNOWN = torch.tensor([[True, True, False, False, False], [True, False, False, False, True]])
"""One sample with the liver but not its tumour, and one with the kidney."""


def test_the_loss_is_of_the_annotated_heads_alone() -> None:
    for rows in (KNOWN, torch.ones_like(KNOWN), ~KNOWN):
        net, batch = dodnet(), drawn(generator("loss"), rows)
        value = FedDoDNet().L(tasks_of(net), SPACE)(net, batch)
        assert isinstance(value, Tensor)
        torch.testing.assert_close(value, by_hand(cast(Any, net)(batch.image, tasks=[0, 1, 2]), batch))


def test_only_tasks_that_are_annotated_run_and_the_rest_of_their_heads_gets_no_gradient() -> None:
    net, batch = Spy(dodnet()), drawn(generator("loss"), KNOWN)
    cast(Tensor, FedDoDNet().L(tasks_of(net), SPACE)(net, batch)).backward()
    assert net.asked == [0, 2]
    liver, kidney = (cast(Tensor, head.grad).abs().sum((2, 3)) for head in net.gave)
    assert liver[0, 0] > 0 and kidney[1, 0] > 0
    assert liver[0, 1] == 0 and not liver[1].any() and kidney[0, 0] == 0


def test_a_lesion_that_is_annotated_without_its_organ_is_trained() -> None:
    known = torch.tensor([[True, False, True, False, True]] * 2)
    net, batch = Spy(dodnet()), drawn(generator("loss"), known)
    cast(Tensor, FedDoDNet().L(tasks_of(net), SPACE)(net, batch)).backward()
    assert net.asked == [0, 2]
    liver, _ = (cast(Tensor, head.grad).abs().sum((0, 2, 3)) for head in net.gave)
    assert liver[0] == 0 and liver[1] > 0


def test_a_batch_without_annotations_moves_nothing() -> None:
    net, batch = dodnet(), drawn(generator("loss"), torch.zeros_like(KNOWN))
    value = cast(Tensor, FedDoDNet().L(tasks_of(net), SPACE)(net, batch))
    value.backward()
    assert value == 0
    assert not any(p.grad is not None and p.grad.any() for p in net.parameters())


def test_the_tasks_are_those_of_the_net() -> None:
    """Where the net knows no groups, the liver is learnt without its tumour."""
    net = dodnet(groups=[])
    batch = drawn(generator("loss"), torch.ones_like(KNOWN))
    value = cast(Tensor, FedDoDNet().L(tasks_of(net), SPACE)(net, batch))
    grouped = dodnet()
    assert tasks_of(net) == ((1,), (2,), (3,), (4,)) and tasks_of(grouped) == ((1, 2), (3,), (4,))
    heads = cast(Any, net)(batch.image, tasks=range(4))
    target = torch.stack([batch.target == c for c in (1, 2, 3, 4)], 1).float()
    bce = nn.functional.binary_cross_entropy_with_logits(torch.cat(heads, 1), target)
    p = torch.cat(heads, 1).sigmoid()
    dice = 1 - 2 * (p * target).sum((2, 3)) / (p.sum((2, 3)) + target.sum((2, 3)) + 1)
    torch.testing.assert_close(value, bce + dice.mean())


def test_one_round_at_one_site_with_all_labels_is_ordinary_training() -> None:
    """E23."""
    state = play(FedDoDNet(local=LOCAL), federation({"a": {1, 2, 3, 4}}), rounds=1)
    net = dodnet()
    optimizer = make_optimizer(net, LOCAL)
    for batch in Site("a", {1, 2, 3, 4}).batches(batch=2, steps=2):
        optimizer.zero_grad()
        by_hand(cast(Any, net)(batch.image, tasks=[0, 1, 2]), batch).backward()
        optimizer.step()
    for name, value in tensors_of(net).items():
        torch.testing.assert_close(state.model[name], value, rtol=1e-4, atol=1e-6)
    assert not same(state.model, tensors_of(dodnet()))


def test_everything_is_averaged_by_cases() -> None:
    method, start = FedDoDNet(local=LOCAL), tensors_of(dodnet())
    replies, forms = [], forms_of(dodnet())
    for n, name in enumerate(ANNOTATED):
        site = cast(Any, Site(name, ANNOTATED[name], 3 + n))
        replies.append(method.local_update(site, start, [], 0, 1))
        egress.check(
            replies[-1], sends_of(method)["local_update"], what=name, classes=5, forms=lambda net: forms
        )
        assert MEMORY not in site.memory
    state = play(method, federation(), rounds=1)
    assert same(state.model, average((reply["model"] for reply in replies), [3, 4, 5]))
    assert state.models == {} and same(offered(method, state, "a"), state.model)
    assert method.summed == "cases" and OWN.summed is None
    assert OWN.own_tensors and not method.own_tensors
    assert same(state.model, play(FedDoDNet(local=LOCAL, evaluate="after"), federation(), rounds=1).model)


def test_the_rate_is_that_of_the_round() -> None:
    method, start = FedDoDNet(local=dataclasses.replace(LOCAL, schedule="poly")), tensors_of(dodnet())
    models = [
        method.local_update(cast(Any, Site("a", {1, 2})), start, [], round, 2)["model"] for round in (0, 0, 1)
    ]
    assert same(models[0], models[1]) and not same(models[0], models[2])


def test_own_parts_stay_and_the_rest_is_shared() -> None:
    server = federation()
    first = play(OWN, server, rounds=1)
    named = parts(dodnet())
    assert set(first.kept) == {*named["decoder"], *named["controller"]}
    kept = {site: server.members[site].memory[MEMORY] for site in ANNOTATED}
    assert all(set(own) == set(first.kept) for own in kept.values())
    # the second round of a site, done by hand
    site = Site("b", {3})
    site.memory, site.round = {"optimizer": server.members["b"].memory["optimizer"]}, 1
    begin = first.model | kept["b"]
    expected = OWN.local_update(cast(Any, site), begin, [], 1, 2)["model"]
    second = OWN.round(dataclasses.replace(first, rounds=2), server)
    assert same(offered(OWN, second, "b"), expected) and not same(begin, first.model)


@pytest.mark.parametrize("evaluate", ["before", "after"])
def test_what_is_evaluated_where_parts_are_kept(evaluate: Any) -> None:
    method, server = dataclasses.replace(OWN, evaluate=evaluate), federation()
    state = play(method, server)
    encoder = parts(dodnet())["encoder"]
    models = {site: offered(method, state, site) for site in ANNOTATED}
    for site, model in models.items():
        assert all(torch.equal(model[n], server.members[site].memory[MEMORY][n]) for n in state.kept)
        assert all(torch.equal(model[n], state.model[n]) for n in encoder) == (evaluate == "after")
    assert not same(models["a"], models["b"])
    assert same(average((models[site] for site in ANNOTATED), [3, 4, 5]), state.model)
    assert same(offered(method, state, "elsewhere"), state.model)


def test_with_all_parts_kept_every_site_is_alone() -> None:
    method = FedDoDNet(own=list(parts(dodnet())), local=LOCAL)
    state = play(method, federation())
    for n, (site, own) in enumerate(ANNOTATED.items()):
        alone = play(FedDoDNet(local=LOCAL), Server(Site(site, own, 3 + n)))
        assert same(offered(method, state, site), alone.model)


def test_a_silent_site_keeps_what_it_had() -> None:
    server = federation()
    first = dataclasses.replace(play(OWN, server, rounds=1), rounds=2)
    server.silent = "c"
    second = OWN.round(first, server)
    assert same(second.models["c"], first.models["c"]) and not same(second.models["a"], first.models["a"])
    assert second.classes == {site: sorted(own) for site, own in ANNOTATED.items()}


def test_what_does_not_fit_is_named() -> None:
    unet = nets.build("unet", {"filters": [4, 8, 8]}, in_channels=1, classes=5, spatial_dims=2, seed=3)
    with pytest.raises(FederationError, match=r"set net\.name to dodnet"):
        FedDoDNet().start(unet, cast(Any, None))
    with pytest.raises(FederationError, match=r"own: the part of DoDNetModule 'decodr'.*'decoder'"):
        FedDoDNet(own=["decodr"]).start(dodnet(), cast(Any, None))
    with pytest.raises(FederationError, match=r"own: the part of DoDNetModule 'decodr'"):
        FedDoDNet(own=["decodr"]).examine(dodnet(), [])
    organs = nets.build(
        "menunet", {"width": 2, "levels": 2}, in_channels=1, classes=5, spatial_dims=2, seed=3
    )
    with pytest.raises(FederationError, match="MENUNetModule has no dynamic head"):
        FedDoDNet().start(organs, cast(Any, None))
    with pytest.raises(FederationError, match="is for exclusive classes"):
        FedDoDNet().check(LabelSpace(("lung", "heart"), exclusive=False))
    with pytest.raises(FederationError, match="not exclusive"):
        FedDoDNet(loss=LossChoice(name="marginal_dice_ce")).check(SPACE)


def test_a_rate_above_that_of_the_papers_is_told() -> None:
    (note,) = FedDoDNet(local=LOCAL).examine(dodnet(), [])
    assert note.startswith("method fed_dodnet: local.lr is 0.05; its papers have 0.01 with sgd")
    for local in (dataclasses.replace(LOCAL, lr=0.01), Local(optimizer="adamw", lr=0.05)):
        assert FedDoDNet(local=local).examine(dodnet(), []) == []
