"""Kim: the local objective written out in numpy, who is taught by whom, what is sent and when, limiting cases."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import Replies, Server, same
from torch import Tensor, nn
from voxel_sites import SPACE, Pointwise, VoxelSite, draw

from fedatlas import losses, nets
from fedatlas.core import seeds
from fedatlas.core.batch import Batch
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.organs import read_heads
from fedatlas.core.outputs import Mixed
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, average, forms_of, from_tree, load, tensors_of, to_tree
from fedatlas.learning.loop import Local, train
from fedatlas.losses import LossChoice
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.kim import L_KD, TEACHERS, Kim, KimState, Teacher
from fedatlas.methods.shared.heads import head_known, head_space, head_target, heads, with_groups_of
from fedatlas.transport import egress, wire

OVERLAP = LabelSpace(("lung", "heart", "pleura"), exclusive=False)
LOCAL = Local(optimizer="sgd", batch=2, steps=2, lr=0.1)
KIM = Kim(local=LOCAL, pretrain_rounds=1)
ANNOTATED = {"a": {1, 2}, "b": {3}, "c": {4, 5}}


class Listener(Server):
    """Notes every call: (function, round, site -> sorted names of the teachers it was given)."""

    def __init__(self, *sites: Any, silent: str = "") -> None:
        super().__init__(*sites, silent=silent)
        self.heard: list[tuple[str, int, dict[str, list[str]]]] = []

    def call(self, function: Any, *, each: Any = None, **payload: Any) -> Replies:
        given = {site: sorted(own["teachers"]) for site, own in (each or {}).items() if "teachers" in own}
        if function.__name__ == "pretrain_update":
            for site in self.members.values():
                site.round = 0
            replies = Replies(
                {name: function(self.members[name], **payload) for name in self.sites if name != self.silent}
            )
        else:
            replies = super().call(function, each=each, **payload)
        self.heard.append((function.__name__, payload.get("round", 0), given))
        for site, reply in replies:
            site_labels = self.members[site].labels
            egress.check(
                reply,
                sends_of(function.__self__)[function.__name__],
                what=site,
                classes=len(site_labels.space),
                forms=lambda net: forms_of(self.members[self.sites[0]].network()),
            )
        return replies


def federation(method: Any, rounds: int = 2, annotated: Any = ANNOTATED, space: LabelSpace = SPACE) -> Any:
    """(the state after some rounds, the server)"""
    server = Listener(*(VoxelSite(name, own, space) for name, own in annotated.items()))
    state = dataclasses.replace(method.start(Pointwise(len(space)), cast(Any, server)), rounds=max(rounds, 2))
    for _ in range(rounds):
        state = method.round(state, server)
    return state, server


# ---------------------------------------------------------------------------------------------- the local objective


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def bce(z: np.ndarray, p: np.ndarray) -> float:
    return float(np.mean(-p * np.log(sigmoid(z)) - (1 - p) * np.log(1 - sigmoid(z))))


def test_distillation_in_numpy() -> None:
    z, t = draw(2, 3, 4, 5), draw(2, 3, 4, 5, seed=1)
    taught = torch.tensor([[True, False, True], [False, False, True]])
    pairs = [(0, 0), (0, 2), (1, 2)]
    for T in (1.0, 2.0):
        expected = np.mean([bce(z[i].numpy() / T, sigmoid(t[i].numpy() / T)) for i in pairs])
        assert float(L_KD(z, t, taught, T)) == pytest.approx(expected)


def test_nothing_taught_is_zero_with_a_gradient_of_zero() -> None:
    z = draw(1, 2, 3).requires_grad_()
    value = L_KD(z, draw(1, 2, 3, seed=1), torch.zeros(1, 2, dtype=torch.bool))
    value.backward()
    assert value == 0 and z.grad is not None and not z.grad.any()


def test_an_organ_is_drawn_with_its_annotated_lesions() -> None:
    target = torch.tensor([[0, 1, 2, 3, 4, 5]] * 2)
    known = torch.tensor([[True] * 6, [True, True, False, True, True, False]])
    found = head_target(target, known, SPACE)
    assert found.int().tolist() == [
        [
            [0, 1, 1, 0, 0, 0],  # liver
            [0, 0, 1, 0, 0, 0],
            [0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 1, 1],  # kidney
        ],
        [
            [0, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
            [0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 1, 0],
        ],
    ]
    assert head_known(known, SPACE)[1].tolist() == [True, False, True, True, False]
    masks = draw(2, 3, 4)
    assert head_target(masks, torch.ones(2, 3, dtype=torch.bool), OVERLAP) is masks


def test_heads_of_an_exclusive_space_in_numbers() -> None:
    z = torch.tensor([0.5, 2.0, 3.0, -1.0, 4.0, 1.0]).reshape(1, 6, 1)
    assert heads(z, SPACE).flatten().tolist() == [2.5, 1.0, -1.5, 3.0, 3.5]
    assert heads(z.half(), SPACE).dtype == torch.float32
    assert heads(z, OVERLAP) is z
    assert head_space(SPACE) == LabelSpace(SPACE.names[1:], groups=((0, 1), (4, 3)), exclusive=False)


def problem() -> tuple[Batch, nn.Module, nn.Module, list[Teacher]]:
    """Two samples with other label sets; student, global model, and local models of three sites."""
    image, target = draw(2, 1, 4, 4), torch.randint(0, 6, (2, 4, 4), generator=generator("target"))
    known = torch.tensor([[True, True, True, False, False, False], [True, False, False, True, False, False]])
    nets = []
    for seed in range(5):
        net = Pointwise(6).double()
        load(net, {name: draw(*v.shape, seed=9 + seed) for name, v in tensors_of(net).items()})
        nets.append(net)
    speaks = [[c in own for c in SPACE.foreground] for own in ({3}, {4, 5}, {1, 2})]
    F_local = [Teacher(net, torch.tensor(row)) for net, row in zip(nets[2:], speaks, strict=True)]
    return Batch(image, target, known, ["0", "1"]), nets[0], nets[1], F_local


@pytest.mark.parametrize("sampled_only", [False, True])
def test_the_local_objective_in_numpy(sampled_only) -> None:
    batch, net, F_global, F_local = problem()
    method = dataclasses.replace(
        KIM,
        lambda_gt=0.5,
        lambda_global=2.0,
        lambda_local=3.0,
        local_teachers=None,
        sampled_only=sampled_only,
    )
    found = cast(dict[str, Tensor], method.L(F_global, F_local[:2], SPACE, generator("draw"))(net, batch))

    def h(of: nn.Module) -> np.ndarray:
        return heads(of(batch.image), SPACE).detach().numpy()

    z, own, y = h(net), [(0, 0), (0, 1), (1, 2)], batch.target.numpy()
    masks = {(0, 0): np.isin(y[0], (1, 2)), (0, 1): y[0] == 2, (1, 2): y[1] == 3}
    dice = [
        1 - 2 * (sigmoid(z[i]) * masks[i]).sum() / (sigmoid(z[i]).sum() + masks[i].sum() + 1) for i in own
    ]
    cross = [bce(z[i], masks[i].astype(float)) for i in own]
    assert found["supervised"].item() == pytest.approx(0.5 * (np.mean(dice) + np.mean(cross)))
    every = [(s, c) for s in range(2) for c in range(5)]
    taught = [i for i in every if i not in own]
    if sampled_only:  # local teachers speak for channels 2, 3 and 4
        taught = [i for i in every if i[1] in (0, 1)]
    expected = np.mean([bce(z[i], sigmoid(h(F_global)[i])) for i in taught])
    assert found["global"].item() == pytest.approx(2 * expected)
    b, c = h(F_local[0].net), h(F_local[1].net)
    told = [(b, (0, 2)), (c, (0, 3)), (c, (0, 4)), (c, (1, 3)), (c, (1, 4))]
    assert found["local"].item() == pytest.approx(3 * np.mean([bce(z[i], sigmoid(t[i])) for t, i in told]))


def test_a_student_that_is_its_teacher_has_no_gradient_of_distillation() -> None:
    batch, net, _, F_local = problem()
    twin = [dataclasses.replace(one, net=net) for one in F_local[:2]]
    method = dataclasses.replace(KIM, lambda_gt=0.0, local_teachers=None)
    terms = cast(dict[str, Tensor], method.L(net, twin, SPACE, generator("draw"))(net, batch))
    sum(terms.values(), torch.zeros(())).backward()
    for parameter in net.parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) < 1e-12


def test_labels_that_are_not_annotated_change_nothing() -> None:
    batch, net, F_global, F_local = problem()
    # other labels in place of the classes that sample 0 does not annotate
    hidden = torch.isin(batch.target[0], torch.tensor([0, 3, 4, 5]))
    other = batch.target.clone()
    other[0][hidden] = torch.tensor([3, 4, 5, 0]).repeat(4).reshape(4, 4)[hidden]
    assert not torch.equal(other, batch.target)
    found = [
        cast(dict[str, Tensor], KIM.L(F_global, F_local, SPACE, generator("draw"))(net, each))
        for each in (batch, dataclasses.replace(batch, target=other))
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_local_teachers_are_drawn_among_those_that_can_teach() -> None:
    batch, _, _, F_local = problem()
    known = head_known(batch.known, SPACE)
    only_liver = known[:1]
    rng = generator("draw")
    seen = {tuple(F_local.index(one) for one in KIM.draw(F_local, only_liver, rng)) for _ in range(40)}
    assert seen == {(0,), (1,)}  # the third speaks for the liver alone
    two = dataclasses.replace(KIM, local_teachers=2)
    assert two.draw(F_local, only_liver, rng) == F_local[:2]
    seen = {tuple(F_local.index(one) for one in two.draw(F_local, known, rng)) for _ in range(60)}
    assert seen == {(0, 1), (0, 2), (1, 2)}
    assert dataclasses.replace(KIM, local_teachers=None).draw(F_local, known, rng) == F_local
    assert KIM.draw(F_local, torch.ones_like(known), rng) == []


# ---------------------------------------------------------------------------------------------------- the federation


def test_local_models_go_to_the_other_sites_once() -> None:
    state, server = federation(KIM, rounds=3)
    others = {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}
    assert server.heard == [
        ("pretrain_update", 0, {}),
        ("local_update", 0, others),
        ("local_update", 1, {}),
        ("local_update", 2, {}),
    ]
    assert state.teachers == state.classes == {} and state.served == ["a", "b", "c"]
    for name, site in server.members.items():
        kept = site.memory[TEACHERS]
        assert {other: one["classes"] for other, one in kept.items()} == {
            other: sorted(ANNOTATED[other]) for other in others[name]
        }


@pytest.mark.parametrize("lambda_gt", [1.0, 0.1])
def test_a_local_model_is_the_site_trained_alone(lambda_gt: float) -> None:
    """The weight of the supervised loss is one beside the teachers' terms, of which there are none yet."""
    _, server = federation(dataclasses.replace(KIM, pretrain_rounds=2, lambda_gt=lambda_gt), rounds=1)
    site = VoxelSite("b", ANNOTATED["b"])
    net = site.network()
    loss = KIM.L(None, [], SPACE, site.rng)
    for number in range(2):
        train(cast(Any, site), net, loss, LOCAL, round=number, rounds=2)
    assert same(tensors_of(net), server.members["a"].memory[TEACHERS]["b"]["model"])
    assert "teacher optimizer" not in server.members["b"].memory


def test_a_site_that_was_silent_gets_the_local_models_later() -> None:
    sites = [VoxelSite(name, own) for name, own in ANNOTATED.items()]
    server = Listener(*sites)
    state = dataclasses.replace(KIM.start(Pointwise(6), cast(Any, server)), rounds=3)
    ask = server.call

    def call(function: Any, **payload: Any) -> Replies:
        server.silent = "b" if (function.__name__, payload.get("round")) == ("local_update", 0) else ""
        return ask(function, **payload)

    server.call = call  # type: ignore[method-assign]
    state = KIM.round(state, cast(Any, server))
    assert state.served == ["a", "c"] and sorted(state.teachers) == ["a", "b", "c"]
    again = from_tree(KimState, wire.decode(wire.encode(to_tree(state))))
    assert wire.encode(to_tree(again)) == wire.encode(to_tree(state))
    state = KIM.round(again, cast(Any, server))
    assert server.heard[-1] == ("local_update", 1, {"b": ["a", "c"]}) and state.teachers == {}


def test_without_local_distillation_nothing_is_pre_trained() -> None:
    method = dataclasses.replace(KIM, lambda_local=0.0)
    state, server = federation(method)
    assert [name for name, _, _ in server.heard] == ["local_update", "local_update"]
    assert all(TEACHERS not in site.memory for site in server.members.values())
    assert state.served == [] and method.summed == "equal" and KIM.summed is None
    plain = {"model": "model", "n": "cases"}
    assert sends_of(cast(Any, method)) == {"local_update": plain, "pretrain_update": plain}


@pytest.mark.parametrize("annotated", [{"a": {0}, "b": {1}, "c": {1, 2}}])
def test_e24_with_the_weights_1_0_0_it_is_fedavg(annotated) -> None:
    method = dataclasses.replace(KIM, lambda_global=0.0, lambda_local=0.0)
    kim, _ = federation(method, annotated=annotated, space=OVERLAP)
    fedavg = FedAvg(weights="equal", loss=method.loss, local=LOCAL)
    plain, _ = federation(fedavg, annotated=annotated, space=OVERLAP)
    assert same(kim.model, plain.model)
    taught, _ = federation(KIM, annotated=annotated, space=OVERLAP)
    assert not same(kim.model, taught.model)


def test_e24_channels_that_a_site_does_not_annotate_stay_without_distillation() -> None:
    method = dataclasses.replace(KIM, lambda_global=0.0, lambda_local=0.0)
    local = dataclasses.replace(LOCAL, weight_decay=0.0)
    state, _ = federation(dataclasses.replace(method, local=local), rounds=1, annotated={"b": {3}})
    before = tensors_of(Pointwise(6))["conv.weight"]
    moved = (state.model["conv.weight"] != before).flatten().tolist()
    assert moved == [True, False, False, True, False, False]  # the background's channel is shared


def test_e23_one_site_with_all_labels_is_ordinary_training_of_the_heads() -> None:
    method = dataclasses.replace(KIM, sampled_only=False)
    state, server = federation(method, rounds=1, annotated={"one": {1, 2, 3, 4, 5}})
    assert [name for name, _, _ in server.heard] == ["local_update"]
    site = VoxelSite("one", {1, 2, 3, 4, 5})
    net, L_sup = site.network(), losses.make(method.loss, head_space(SPACE))

    def L(net: nn.Module, batch: Batch) -> Tensor:
        target = head_target(batch.target, batch.known, SPACE)
        return L_sup(heads(net(batch.image), SPACE), target, batch.known[:, 1:])

    train(cast(Any, site), net, L, LOCAL, round=0, rounds=2)
    assert same(state.model, tensors_of(net))


class HeadedSite(VoxelSite):
    """As a `VoxelSite`, with Kim's own U-Net, in 2D and tiny, and a head per organ of `SPACE`."""

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        backbone = {"name": "kim_unet", "filters": [8, 8]}
        chosen = {"backbone": backbone, "groups": [list(group) for group in SPACE.groups]}
        net = nets.build("organ_heads", chosen, in_channels=1, classes=6, spatial_dims=2, seed=4)
        if model is not None:
            load(net, model)
        return net.train()


def test_e24_with_the_weights_1_0_0_it_is_fedavg_of_a_net_with_a_head_per_organ() -> None:
    """Written out: every site trains the heads that it annotates on the shared backbone, and no other head."""
    local = dataclasses.replace(LOCAL, weight_decay=0.0)
    method = dataclasses.replace(KIM, lambda_global=0.0, lambda_local=0.0, local=local)
    sites = [HeadedSite(name, own) for name, own in ANNOTATED.items()]
    server = Listener(*sites)
    state = dataclasses.replace(method.start(sites[0].network(), cast(Any, server)), rounds=2)
    others = [HeadedSite(name, own) for name, own in ANNOTATED.items()]
    L_sup = losses.make(method.loss, head_space(SPACE))

    def L(net: Any, batch: Batch) -> Tensor:
        h = read_heads(net(batch.image), net.groups)
        return L_sup(h, head_target(batch.target, batch.known, SPACE), batch.known[:, 1:])

    model = tensors_of(others[0].network())
    for number in range(2):
        begun, state = state, method.round(state, cast(Any, server))
        models = []
        for site in others:
            site.round = number
            net = site.network(model)
            train(cast(Any, site), net, L, local, round=number, rounds=2)
            models.append(tensors_of(net))
            moved = (models[-1]["backbone.head.weight"] != model["backbone.head.weight"]).flatten(1).any(1)
            assert moved.tolist() == [c in site.labels.annotated for c in SPACE.foreground]
        model = average(models, [1.0] * 3)
        assert not same(begun.model, state.model)
        assert same(state.model, model)


def test_local_models_leave_their_site_once_and_nobody_passes_them_on() -> None:
    """What leaves a site is its own local model before the first round, and its model of the round; what a site was
    given of others is in its memory and in no answer, nor in the server's state once all have it."""
    server = Listener(*(VoxelSite(name, own) for name, own in ANNOTATED.items()))
    state = dataclasses.replace(KIM.start(Pointwise(6), cast(Any, server)), rounds=3)
    answers: list[tuple[str, str, dict[str, Any]]] = []
    ask = server.call

    def call(function: Any, **payload: Any) -> Replies:
        replies = ask(function, **payload)
        answers.extend((function.__name__, site, reply) for site, reply in replies)
        return replies

    server.call = call  # type: ignore[method-assign]
    for _ in range(3):
        state = KIM.round(state, cast(Any, server))
    own = {site: reply["teacher"] for name, site, reply in answers if name == "pretrain_update"}
    assert sorted(own) == ["a", "b", "c"]
    for name, site, reply in answers:
        sent = [model for model in reply.values() if isinstance(model, dict)]
        assert len(sent) == 1, "one model in an answer"
        passed = [other for other, model in own.items() if same(model, sent[0])]
        assert passed == ([site] if name == "pretrain_update" else []), (name, site)
    assert set(to_tree(state)) >= {"model", "teachers", "classes"} and state.teachers == state.classes == {}
    for name, site in server.members.items():
        assert set(site.memory[TEACHERS]) == set(own) - {name}

    # an answer that held them is refused at the site's door
    _, _, reply = answers[-1]
    for more in ({"teachers": {"b": own["b"]}}, {"teacher": own["a"]}):
        with pytest.raises(egress.EgressError, match="not declared: teacher"):
            egress.check(
                reply | more,
                sends_of(cast(Any, KIM))["local_update"],
                what="a",
                classes=6,
                forms=lambda net: forms_of(Pointwise(6)),
            )


class WithFindings(Pointwise):
    """And two findings of the whole image."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.image_head = nn.Linear(1, 2).double()
        self.double()

    def forward(self, x: Tensor) -> Any:
        return Mixed(super().forward(x), self.image_head(x.mean((2, 3))))


def test_findings_of_the_whole_image_are_learnt_from_labels_alone() -> None:
    batch, plain, F_global, F_local = problem()
    with seeds.isolated(2):
        net = WithFindings(6)
    load(net, tensors_of(net) | tensors_of(plain))
    batch.finding, batch.finding_known = torch.eye(2).double(), torch.tensor([[True, False], [True, True]])
    method = dataclasses.replace(KIM, lambda_gt=2.0, loss=dataclasses.replace(KIM.loss, findings=3.0))
    found, expected = [
        cast(dict[str, Tensor], method.L(F_global, F_local, SPACE, generator("draw"))(each, batch))
        for each in (net, plain)
    ]
    z = net(batch.image).findings.detach().numpy()
    cross = np.mean([bce(z[i], float(i[0] == i[1])) for i in [(0, 0), (1, 0), (1, 1)]])
    whole, plain_part = found.pop("supervised").item(), expected.pop("supervised").item()
    assert whole == pytest.approx(plain_part + 2 * 3 * cross)
    assert found == expected
    # a teacher's findings teach nothing
    twin = cast(dict[str, Tensor], method.L(plain, [], SPACE, generator("draw"))(net, batch))["global"]
    assert cast(dict[str, Tensor], method.L(net, [], SPACE, generator("draw"))(net, batch))["global"] == twin


@pytest.mark.parametrize("name", ["marginal_dice_ce", "nothing"])
def test_a_loss_that_does_not_fit_the_heads_is_refused(name) -> None:
    with pytest.raises(FederationError, match="masked_dice_bce"):
        dataclasses.replace(KIM, loss=LossChoice(name=name)).check(SPACE)
    KIM.check(SPACE)
    KIM.check(OVERLAP)


def test_heads_are_those_of_the_net_where_it_names_other_organs_than_the_federation() -> None:
    """`labels.groups` may be left empty, and `net.groups` name the organs: what is trained is the same."""
    method = dataclasses.replace(KIM, local_teachers=None)
    plain = dataclasses.replace(SPACE, groups=())
    found = []
    for space in (SPACE, plain):
        server = Listener(*(HeadedSite(name, own, space) for name, own in ANNOTATED.items()))
        state: Any = method.start(server.network(), cast(Any, server))
        found.append(method.round(dataclasses.replace(state, rounds=1), cast(Any, server)).model)
    assert same(*found)
    net = server.network()
    assert (
        with_groups_of(net, plain).groups == cast(Any, net).groups
        and with_groups_of(Pointwise(6), plain) is plain
    )
