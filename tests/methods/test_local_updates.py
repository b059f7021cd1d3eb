"""Methods on a federation of tensors: limiting cases, published local steps, averaging."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeSite, Server, same
from method_cases import NETS
from torch import Tensor, nn

from fedatlas import methods, nets
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Member, State
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import average, from_tree, tensors_of, to_tree
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice
from fedatlas.methods.centralized import Centralized
from fedatlas.methods.condistfl import ConDistFL
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedprox import FedProx
from fedatlas.methods.standalone import Standalone

VECTORS = Path(__file__).parents[1] / "vectors"
SPACE = LabelSpace(("background", "a", "b", "c"), groups=((2, 3),))
LOCAL = Local(batch=2, steps=3, lr=1e-2)
Maker = Callable[[], nn.Module]


def vectors(name: str) -> dict[str, Tensor]:
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def small_unet(**options: Any) -> nn.Module:
    return nets.build(
        "unet", {"filters": [4, 6, 8], **options}, in_channels=1, classes=4, spatial_dims=2, seed=3
    )


def selector() -> nn.Module:
    """Of fedsm, for two sites."""
    chosen = {"filters": [2], "convolutions": [1], "norm": "none"}
    return nets.build("cnn", chosen, in_channels=1, classes=2, spatial_dims=2, seed=4)


class Drawn(FakeSite):
    """A site with its own classes, whose batches depend on its name and the call; with a selector."""

    def __init__(
        self, name: str, annotated: set[int], n: int, make: Maker, space: LabelSpace = SPACE
    ) -> None:
        super().__init__(name, annotated, n, make, space=space, nets={"selector": selector})


def federation(make: Maker = small_unet, silent: str = "") -> Server:
    sites = [Drawn("x", {1}, 3, make), Drawn("y", {2, 3}, 5, make), Drawn("z", {1, 2}, 2, make)]
    return Server(*sites, silent=silent)


def play(method: Any, clients: Server, rounds: int = 2, net: nn.Module | None = None) -> Any:
    clients.functions = method.functions()
    state = method.start(net or small_unet(), clients)
    state = dataclasses.replace(state, rounds=rounds)
    for number in range(rounds):
        state = method.round(state, clients)
        assert state.round == number + 1
    return state


@pytest.mark.parametrize("local", [LOCAL, Local(batch=2, steps=3, optimizer="sgd", clip=1.0, lr=0.1)])
def test_fedprox_without_pull_is_fedavg(local: Local) -> None:
    """E2, bit for bit."""
    expected = play(FedAvg(local=local), federation()).model
    assert same(play(FedProx(mu=0.0, local=local), federation()).model, expected)
    assert not same(play(FedProx(mu=0.1, local=local), federation()).model, expected)


def test_fedprox_pulls_towards_the_global_model() -> None:
    start = tensors_of(small_unet())

    def moved(mu: float) -> float:
        local = Local(batch=2, steps=5, optimizer="sgd", lr=0.05, momentum=0.0, schedule="constant")
        end = play(FedProx(mu=mu, local=local), federation(), rounds=1).model
        return sum(float((end[name] - start[name]).square().sum()) for name in start)

    assert moved(10.0) < moved(1.0) < moved(0.0)


def test_condistfl_without_distillation_is_fedavg() -> None:
    """E11, bit for bit."""
    expected = play(FedAvg(weights="equal", local=LOCAL), federation()).model
    off = ConDistFL(lambda_start=0.0, lambda_end=0.0, local=LOCAL)
    assert same(play(off, federation()).model, expected)
    assert not same(play(ConDistFL(local=LOCAL), federation()).model, expected)
    assert same(
        play(ConDistFL(local=LOCAL), federation()).model, play(ConDistFL(local=LOCAL), federation()).model
    )


def test_condistfl_where_every_site_knows_everything_is_fedavg() -> None:
    full = [Drawn(name, {1, 2, 3}, 4, small_unet) for name in ("x", "y")]
    expected = play(FedAvg(weights="equal", local=LOCAL), Server(*full)).model
    full = [Drawn(name, {1, 2, 3}, 4, small_unet) for name in ("x", "y")]
    assert same(play(ConDistFL(local=LOCAL), Server(*full)).model, expected)


def test_condistfl_distils_the_first_head_of_a_supervised_net() -> None:
    def make() -> nn.Module:
        return small_unet(deep_supervision=True)

    clients = federation(make)
    play(ConDistFL(local=LOCAL), clients, net=make())
    logged = clients.members["x"].logged
    assert logged["loss"] == pytest.approx(logged["supervised"] + logged["condist"], abs=1e-6)
    assert logged["condist"] > 0


def test_condistfl_survives_bf16() -> None:
    local = Local(batch=2, steps=2, precision="bf16")
    state = play(ConDistFL(local=local), federation())
    assert all(torch.isfinite(value).all() for value in state.model.values())


def test_the_teacher_is_the_model_of_the_round() -> None:
    """With a learning rate of nearly 0 the distillation compares a model with itself."""
    clients = federation()
    method = ConDistFL(lambda_start=1.0, lambda_end=1.0, local=Local(batch=2, steps=1, lr=1e-12))
    play(method, clients, rounds=1)
    site = clients.members["x"]
    batch = site.batches(batch=2, steps=1)[0]
    z = small_unet().eval()(batch.image).detach()
    own = method.L_ConDist(z, z, batch.target, batch.known, SPACE)
    assert site.logged["condist"] == pytest.approx(own.item(), abs=1e-5)


@pytest.mark.parametrize(("rule", "weights"), [("cases", [3, 5, 2]), ("equal", [1, 1, 1])])
def test_the_mean_is_weighted_as_asked(rule: Any, weights: list[int]) -> None:
    method = FedAvg(weights=rule, local=LOCAL)
    clients, start = federation(), tensors_of(small_unet())
    each = [
        method.local_update(clients.members[name], model=start, round=0, rounds=1)["model"]
        for name in clients.sites
    ]
    assert same(play(method, federation(), rounds=1).model, average(each, weights))


def test_standalone_sites_never_meet() -> None:
    clients = federation()
    state = play(Standalone(local=LOCAL), clients)
    for name, annotated in {"x": {1}, "y": {2, 3}, "z": {1, 2}}.items():
        alone = Server(Drawn(name, annotated, 1, small_unet))
        assert same(state.models[name], play(FedAvg(local=LOCAL), alone).model)
        assert state.classes[name] == sorted(annotated)
    assert same(state.model, tensors_of(small_unet()))


def test_standalone_members_speak_for_their_own_classes() -> None:
    method = Standalone(local=LOCAL)
    start = method.start(small_unet(), federation())
    [only] = method.eval_members(start, "x")
    assert only.classes is None
    state = play(method, federation())
    members: list[Member] = method.eval_members(state, "x")
    assert [member.classes for member in members] == [(1,), (2, 3), (1, 2)]
    assert same(members[1].model, state.models["y"])


def test_standalone_keeps_the_model_of_a_silent_site() -> None:
    method, clients = Standalone(local=LOCAL), federation()
    first = play(method, clients, rounds=1)
    clients.silent = "y"
    second = method.round(first, clients)
    assert same(second.models["y"], first.models["y"])
    assert not same(second.models["x"], first.models["x"])


def test_standalone_state_survives_as_a_tree() -> None:
    method = Standalone(local=LOCAL)
    state = play(method, federation(), rounds=1)
    back = from_tree(method.state, to_tree(state))
    assert back.classes == state.classes
    assert all(same(back.models[name], state.models[name]) for name in state.models)


def test_centralized_is_one_site() -> None:
    assert Centralized().pooled and not FedAvg().pooled
    one = Server(Drawn("pooled", {1, 2, 3}, 9, small_unet))
    expected = play(FedAvg(local=LOCAL), Server(Drawn("pooled", {1, 2, 3}, 9, small_unet))).model
    assert same(play(Centralized(local=LOCAL), one).model, expected)


@pytest.mark.parametrize("mu", [0.0, 1e-6, 1e-3, 1e-2])
def test_proximal_term_equals_nvflare(mu: float) -> None:
    v = vectors("nvflare_fedprox_loss")
    names = [key.removeprefix("local/") for key in v if key.startswith("local/")]
    w, w_t = [v[f"local/{name}"] for name in names], [v[f"global/{name}"] for name in names]
    assert float(FedProx(mu=mu).proximal(w, w_t)) == pytest.approx(float(v[f"loss_mu{mu}"]), abs=1e-7)


class PublishedSite(Drawn):
    """The whole data of the published step, as one batch with every class known."""

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        v = vectors("fedprox_scaffold_fedavg_step")
        known = torch.ones(len(v["x"]), 3, dtype=torch.bool)
        return [Batch(v["x"], v["y"].long().flatten(), known, [])] * (steps or 0)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        (FedAvg, {"name": "w_fedavg"}),
        (FedProx, {"name": "w_fedprox_mu005", "mu": 0.05}),
        (FedProx, {"name": "w_fedprox_mu0", "mu": 0.0}),
    ],
)
def test_local_steps_equal_the_published_ones(method: Any, key: dict[str, Any]) -> None:
    v = vectors("fedprox_scaffold_fedavg_step")
    options = {name: value for name, value in key.items() if name != "name"}
    local = Local(
        optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=1e-3, clip=10.0, steps=3, schedule="constant"
    )
    loss = LossChoice(name="marginal_dice_ce", options={"dice": 0.0})
    space = LabelSpace(("background", "a", "b"))
    site = PublishedSite("x", {1, 2}, 6, lambda: nn.Linear(4, 3), space)
    start = {"weight": v["w_global"][:12].reshape(3, 4), "bias": v["w_global"][12:]}
    end = method(**options, loss=loss, local=local).local_update(site, model=start, round=0, rounds=1)[
        "model"
    ]
    got = torch.cat([end["weight"].flatten(), end["bias"]])
    torch.testing.assert_close(got, v[key["name"]], atol=1e-5, rtol=0)
    assert not torch.allclose(got, v["w_global"], atol=1e-3)


@pytest.mark.parametrize("name", methods.REGISTRY)
def test_registered_methods(name: str) -> None:
    cls = methods.get(name)
    method: Any = cls()
    assert callable(method.start) and callable(method.round)
    assert cls.__doc__ and cls.__doc__.splitlines()[0].endswith(".")
    assert all(field.description for field in cls.__pydantic_fields__.values())
    assert "local_update" in method.functions()
    of_images = "segmentation" not in method.tasks
    method.check(LabelSpace(("a", "b"), exclusive=False, level="image") if of_images else SPACE)
    wrong: dict[str, Any] = {"loss": LossChoice(name="marginal_dice")}
    if name == "pseudo_labels":  # its loss is that of the method within
        wrong = {"inner": {"name": "fedavg", "options": {"loss": {"name": "marginal_dice"}}}}
    with pytest.raises(FederationError, match="did you mean 'marginal_dice_ce'"):
        cls(**wrong).check(SPACE)


def test_an_unknown_method_names_the_nearest() -> None:
    with pytest.raises(FederationError, match=r"did you mean 'fedavg'\?.*condistfl"):
        methods.get("fed_avg")


@pytest.mark.parametrize(
    "name", [name for name in methods.REGISTRY if "segmentation" in methods.get(name).tasks]
)
def test_changed_labels_of_other_classes_change_nothing(name: str) -> None:
    class Hidden(Drawn):
        def batches(self, **asked: Any) -> list[Batch]:  # type: ignore[override]
            batches = super().batches(**asked)
            for batch in batches:
                known = torch.tensor(self.labels.known)
                batch.target[~known[batch.target.long()]] = 0
            return batches

    def make() -> nn.Module:
        if name not in NETS:
            return small_unet()
        chosen = dict(NETS[name])
        return nets.build(chosen.pop("name"), chosen, in_channels=1, classes=4, spatial_dims=2, seed=3)

    def run(kind: type[Drawn]) -> State:
        sites = [kind("x", {1}, 3, make)]
        if name != "centralized":
            sites.append(kind("y", {2, 3}, 5, make))
        return play(methods.get(name)(local=LOCAL), Server(*sites), net=make())

    seen, hidden = run(Drawn), run(Hidden)
    assert same(seen.model, hidden.model)
    for site, model in getattr(seen, "models", {}).items():
        assert same(model, hidden.models[site])  # type: ignore[attr-defined]
