"""FedSSP: SimSiam against the published numbers, the two phases, and what each leaves alone."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import Replies, same
from hosted_images import SITES, Federation, cnn, encoded, run, run_with_a_stop
from torch import Tensor, nn

from fedatlas import methods, nets
from fedatlas.core.errors import FederationError
from fedatlas.core.options import from_dict
from fedatlas.core.tensors import parts, tensors_of
from fedatlas.learning.augment import OFF
from fedatlas.learning.loop import Local
from fedatlas.losses.similarity import negative_cosine
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedmatch import FedMatchPlus
from fedatlas.methods.fedssp import FedSSP
from fedatlas.methods.shared import simsiam
from fedatlas.methods.shared.simsiam import HEADS, PreTraining, Siamese

VECTORS = Path(__file__).parents[1] / "vectors"
PRETRAIN = PreTraining(batch=4, steps=2, dim=8, bottleneck=4)
LOCAL = Local(batch=3, steps=3, optimizer="adam", weight_decay=0.0, lr=1e-2)
SSP = FedSSP(pretrain=PRETRAIN, local=LOCAL)


def vectors(name: str) -> dict[str, Tensor]:
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


class Extractor(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.features = nn.Sequential(linear, nn.ReLU())  # the toy's encoder up to its fc


def test_heads_and_loss_are_simsiams() -> None:
    v = vectors("simsiam")
    heads = nets.build(
        HEADS,
        {"dim": 8, "hidden": 6, "bottleneck": 4},
        in_channels=6,
        classes=0,
        spatial_dims=2,
        seed=0,
    )
    theirs = {key.removeprefix("sd/"): value for key, value in v.items() if key.startswith("sd/")}
    ours = {name.replace("projector", "encoder.fc"): tensor for name, tensor in heads.state_dict().items()}
    # a bias before a norm changes nothing in training: ours has none
    assert set(theirs) - set(ours) == {"encoder.l.weight", "encoder.l.bias", "encoder.fc.6.bias"}
    assert set(ours) <= set(theirs)
    for name, tensor in ours.items():
        tensor.copy_(theirs[name])
    linear = nn.Linear(5, 6)
    linear.load_state_dict({name: theirs[f"encoder.l.{name}"] for name in ("weight", "bias")})
    f = Siamese(Extractor(linear), heads)
    (p_1, z_1), (p_2, z_2) = f(v["v1"]), f(v["v2"])
    for got, name in ((p_1, "p1"), (z_1, "z1"), (p_2, "p2"), (z_2, "z2")):
        torch.testing.assert_close(got, v[name], rtol=1e-5, atol=1e-5)
    loss = negative_cosine(p_1, z_2) / 2 + negative_cosine(p_2, z_1) / 2
    torch.testing.assert_close(loss, v["loss"], rtol=1e-5, atol=1e-5)


def test_no_gradient_through_the_other_view() -> None:
    p, z = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    negative_cosine(p, z).backward()
    assert p.grad is not None and z.grad is None
    assert float(negative_cosine(p.detach(), 3 * p.detach())) == pytest.approx(-1)
    assert float(negative_cosine(torch.zeros(2, 3), torch.ones(2, 3))) == 0


@pytest.mark.parametrize("net", [{}, {"norm": "batch"}])
def test_the_phases(net: dict[str, Any], tmp_path: Path) -> None:
    federation = Federation(SSP, tmp_path, net)
    state = federation.start(4)
    untrained = cnn(**net)
    heads_before = state.heads
    state = federation.play(state, 2)
    assert [q.function for q in federation.asked] == ["pretrain_update"] * 6
    own = parts(untrained)
    initial = tensors_of(untrained)
    for name in own["head"]:  # nobody trains the classifier in the first phase
        assert torch.equal(state.model[name], initial[name])
    assert any(not torch.equal(state.model[name], initial[name]) for name in own["encoder"])
    assert not same(state.heads, heads_before)
    memory: Any = {name: host.memory for name, host in federation.hosts.items()}
    assert all(simsiam.MEMORY in m.before(3, 0, None) for m in memory.values())
    state = federation.play(state, 4)
    assert [q.function for q in federation.asked][6:] == ["local_update"] * 6
    assert state.heads == {}
    assert all(simsiam.MEMORY not in m.before(5, 0, None) for m in memory.values())
    assert any(not torch.equal(state.model[name], initial[name]) for name in own["head"])


def test_without_pre_training_it_is_fedavg(tmp_path: Path) -> None:
    alone = dataclasses.replace(SSP, pretrain_rounds=0)
    assert same(run(alone, tmp_path / "a", 2).model, run(FedAvg(local=LOCAL), tmp_path / "b", 2).model)


def test_fine_tuning_after_pre_training_is_fedavg_from_there(tmp_path: Path) -> None:
    """The schedule of the learning rate counts the rounds that remain, and no moments come over."""
    federation = Federation(SSP, tmp_path / "a")
    state = federation.play(federation.start(2), 1)
    end = federation.play(state, 2)
    plain = Federation(FedAvg(local=dataclasses.replace(LOCAL)), tmp_path / "b")
    begun = dataclasses.replace(plain.start(1), model=state.model)
    plain.clients.begin(2)  # the same seeds as in the second round
    assert same(plain.method.round(begun, plain.clients).model, end.model)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_rows_of_classes_without_labels_stay(optimizer: Any, tmp_path: Path) -> None:
    method = dataclasses.replace(SSP, local=dataclasses.replace(LOCAL, optimizer=optimizer))
    federation = Federation(method, tmp_path)
    state = federation.play(federation.start(2), 1)
    federation.clients.begin(2)
    replies = federation.clients.call(method.local_update, model=state.model, round=0, rounds=1)
    for site, reply in replies:
        for name in parts(cnn())["head"]:
            for c in range(4):
                moved = not torch.equal(reply["model"][name][c], state.model[name][c])
                assert moved == (c in SITES[site]), (site, name, c)


def test_a_frozen_encoder_stays(tmp_path: Path) -> None:
    net = {"norm": "batch"}
    federation = Federation(dataclasses.replace(SSP, freeze_encoder=True), tmp_path, net)
    state = federation.play(federation.start(4), 2)
    end = federation.play(state, 4)
    own = parts(cnn(**net))
    assert all(torch.equal(end.model[name], state.model[name]) for name in own["encoder"])
    assert all(not torch.equal(end.model[name], state.model[name]) for name in own["head"])


@pytest.mark.parametrize("stop", [1, 2])
def test_resumed(stop: int, tmp_path: Path) -> None:
    whole = run(SSP, tmp_path / "whole", 4)
    assert encoded(run_with_a_stop(SSP, tmp_path / "stopped", 4, stop)) == encoded(whole)


def test_wrong_numbers_of_rounds_and_of_images(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="pretrain_rounds is 2, the federation has rounds: 2"):
        run(dataclasses.replace(SSP, pretrain_rounds=2), tmp_path, 2)
    for method in (dataclasses.replace(SSP, pretrain_rounds=None), FedMatchPlus()):
        assert method.plan(2) == []
        with pytest.raises(FederationError, match="the federation has rounds: 1; it needs 2 or more"):
            method.plan(1)
        with pytest.raises(FederationError, match="pretrain_rounds is 10, the federation has rounds: 4"):
            dataclasses.replace(method, pretrain_rounds=10).plan(4)
    for name in ("fedssp", "fedmatch_plus"):
        with pytest.raises(FederationError, match="pretrain.batch: got 1; .*2 or more"):
            from_dict(methods.get(name), {"pretrain": {"batch": 1}}, what="file")


def test_views_are_of_the_site_and_vary(tmp_path: Path) -> None:
    off = dataclasses.replace(SSP, pretrain=dataclasses.replace(PRETRAIN, views=OFF))
    one, other = run(SSP, tmp_path / "a", 2), run(off, tmp_path / "b", 2)
    assert encoded(one) == encoded(run(SSP, tmp_path / "c", 2)) != encoded(other)


@pytest.mark.parametrize(("rule", "expected"), [("cases", 0.75), ("equal", 0.5)])
def test_the_phase_weighs_nets_and_heads_alike(rule: Any, expected: float) -> None:
    replies = {
        site: {"model": {"a": torch.tensor([value])}, "heads": {"b": torch.tensor([value])}, "n": n}
        for site, value, n in (("x", 0.0, 1), ("y", 1.0, 3))
    }
    model, heads = simsiam.averaged(cast(Any, Replies(replies)), rule)
    assert model["a"].item() == heads["b"].item() == expected


@pytest.mark.parametrize("hidden", [None, 6])
def test_the_widths_of_the_heads_are_those_of_the_options(hidden: int | None) -> None:
    spec = PreTraining(dim=8, hidden=hidden, bottleneck=3).nets[HEADS]
    features = cast(Any, cnn()).n_features
    heads = nets.build(spec.name, spec.options, in_channels=features, classes=4, spatial_dims=2, seed=1)
    linear = [m for m in heads.modules() if isinstance(m, torch.nn.Linear)]
    inner = hidden or 8
    widths = [(features, inner), (inner, inner), (inner, 8), (8, 3), (3, 8)]
    assert [(m.in_features, m.out_features) for m in linear] == widths
