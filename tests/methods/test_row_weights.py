"""Heads averaged row by row: Eq. 9 of FedPSL, its limiting cases, and the same switch of FedAvg and FedProx."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Replies, Server, same
from image_sites import FINDINGS, SETUP_1, SPACE, ImageSite, cnn
from torch import Tensor, nn

from fedatlas import losses, nets
from fedatlas.core.contract import State, sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import Tensors, average, forms_of, from_tree, head_of, parts, tensors_of, to_tree
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedopt import FedOpt
from fedatlas.methods.fedprox import FedProx
from fedatlas.methods.fedpsl import FedPSL
from fedatlas.methods.shared.averaging import RowState, average_rows, mean
from fedatlas.transport import egress

VECTORS = Path(__file__).parents[1] / "vectors"
LOCAL = Local(optimizer="adam", weight_decay=0.0, batch=4, steps=2, lr=1e-2)
HEAD = ("head.weight", "head.bias")
PER_ROW = [
    FedPSL(tadl=False, local=LOCAL),
    FedAvg(aggregate_unlabelled_rows=False, local=LOCAL),
    FedProx(mu=0.0, aggregate_unlabelled_rows=False, local=LOCAL),
]


def setup_1(n: int = 8, silent: str = "", **options: Any) -> Server:
    return Server(*(ImageSite(name, chosen, n, **options) for name, chosen in SETUP_1.items()), silent=silent)


def play(method: Any, server: Server, rounds: int = 2, net: nn.Module | None = None) -> Any:
    state = dataclasses.replace(method.start(net or cnn(), server), rounds=rounds)
    for _ in range(rounds):
        state = method.round(state, server)
    return state


def random_models(count: int, seed: int = 0) -> list[Tensors]:
    rng = torch.Generator().manual_seed(seed)
    like = tensors_of(cnn())
    return [
        {name: torch.randn(value.shape, generator=rng) for name, value in like.items()} for _ in range(count)
    ]


def test_eq_9_on_the_vector() -> None:
    with np.load(VECTORS / "fedpsl_tdma.npz") as file:
        v = {key: torch.from_numpy(file[key]) for key in file.files}
    assert torch.equal(v["n_c_k"] > 0, v["label_matrix"] > 0)
    models = [{"theta": v["theta"][k], "phi": v["phi"][k]} for k in range(4)]
    old = {"theta": torch.zeros(7).double(), "phi": torch.zeros(6, 3).double()}
    got = average_rows(models, v["n"].tolist(), v["n_c_k"].tolist(), head={"phi": 0}, old=old)
    torch.testing.assert_close(got["theta"], v["theta0"], atol=1e-12, rtol=0)
    torch.testing.assert_close(got["phi"], v["phi0"], atol=1e-12, rtol=0)
    assert (got["phi"] - v["phi0_fedavg"]).abs().max() > 1e-2


def test_with_all_classes_annotated_everywhere_it_is_fedavg() -> None:
    """E1, bit for bit, of models and of whole runs."""
    models, n = random_models(3), [3, 17, 1000]
    old = tensors_of(cnn())
    rows = [[k] * len(SPACE) for k in n]
    assert same(average_rows(models, n, rows, head=head_of(cnn()), old=old), average(models, n))

    def full() -> Server:
        return Server(*(ImageSite(name, range(len(SPACE)), size) for name, size in (("x", 5), ("y", 12))))

    expected = play(FedAvg(local=LOCAL), full()).model
    for method in PER_ROW:
        assert same(play(method, full()).model, expected)


def test_the_rows_of_setup_1() -> None:
    """With equal n: a class of one client has that client's row, one of two the mean of both."""
    models = dict(zip(SETUP_1, random_models(4), strict=True))
    replies = Replies(
        {
            name: {"model": models[name], "n": 9, "labelled": [9 * (c in chosen) for c in range(6)]}
            for name, chosen in SETUP_1.items()
        }
    )
    start = tensors_of(cnn())
    got = mean(replies, RowState(start, head=head_of(cnn())), "cases")
    for name in HEAD:
        row = {finding: got[name][c] for c, finding in enumerate(FINDINGS)}
        assert torch.equal(row["Infiltration"], models["1"][name][0])
        assert torch.equal(row["Pneumothorax"], models["4"][name][5])
        torch.testing.assert_close(row["Nodule"], sum(models[k][name][3] for k in "234") / 3)
        torch.testing.assert_close(row["Effusion"], (models["1"][name][1] + models["2"][name][1]) / 2)
    plain = average(models.values(), [9] * 4)
    assert all(torch.equal(got[name], plain[name]) for name in got if name not in HEAD)
    assert not torch.equal(got["head.weight"], plain["head.weight"])


def test_weights_of_every_row_sum_to_one_and_the_order_of_sites_is_nothing() -> None:
    ones = [{name: torch.ones_like(value) for name, value in model.items()} for model in random_models(3)]
    n, rows = [3, 10, 7], [[3, 1, 0, 0, 2, 3], [0, 9, 10, 0, 1, 5], [7, 0, 7, 0, 0, 7]]
    head, old = head_of(cnn()), {name: torch.ones_like(value) for name, value in tensors_of(cnn()).items()}
    for value in average_rows(ones, n, rows, head=head, old=old).values():
        torch.testing.assert_close(value, torch.ones_like(value))
    models = random_models(3)
    turned = [average_rows([models[k] for k in order], [n[k] for k in order], [rows[k] for k in order],
                           head=head, old=old) for order in ((0, 1, 2), (2, 0, 1))]  # fmt: skip
    for name in turned[0]:
        torch.testing.assert_close(turned[0][name], turned[1][name])


@pytest.mark.parametrize("method", PER_ROW)
def test_a_row_that_nobody_annotates_stays(method: Any) -> None:
    start = tensors_of(cnn())
    state = play(method, Server(ImageSite("x", {0, 1}, 6), ImageSite("y", {1, 2}, 6)))
    for name in HEAD:
        assert torch.equal(state.model[name][3:], start[name][3:])
        assert all(not torch.equal(state.model[name][c], start[name][c]) for c in range(3))


def test_a_row_stays_where_the_only_site_that_annotates_it_is_lost() -> None:
    first = play(PER_ROW[0], setup_1(), rounds=1)
    after = PER_ROW[0].round(dataclasses.replace(first, rounds=2), setup_1(silent="4"))
    for name in HEAD:
        assert torch.equal(after.model[name][5], first.model[name][5])
        assert not torch.equal(after.model[name][4], first.model[name][4])


def test_the_switch_of_fedavg_and_fedprox_is_tdma() -> None:
    partly = {"label_rate": 0.6}  # n_k^c differs from n_k and from 0
    runs = [play(method, setup_1(**partly)).model for method in PER_ROW]
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])
    whole = play(FedAvg(local=LOCAL), setup_1(**partly)).model
    assert not torch.equal(runs[0]["head.weight"], whole["head.weight"])
    assert same(play(FedPSL(tdma=False, tadl=False, local=LOCAL), setup_1(**partly)).model, whole)


def test_equal_weights_count_every_site_that_annotates_a_class_once() -> None:
    method = FedAvg(weights="equal", aggregate_unlabelled_rows=False, local=LOCAL)

    def sites() -> list[ImageSite]:
        return [ImageSite("x", {0, 1}, 4), ImageSite("y", {1}, 40)]

    start = method.start(cnn(), Server())
    each = [
        method.local_update(site, model=start.model, round=0, rounds=1)["model"]["head.bias"]
        for site in sites()
    ]
    got = method.round(start, Server(*sites())).model["head.bias"]
    assert torch.equal(got[0], each[0][0])
    torch.testing.assert_close(got[1], (each[0][1] + each[1][1]) / 2)


@pytest.mark.parametrize("method", PER_ROW)
def test_what_is_declared(method: Any) -> None:
    """A site answers what it declares; the sum of models is not enough for rows with weights of their own."""
    start = method.start(cnn(), Server())
    assert type(start) is method.state is RowState
    assert dict(start.head) == {"head.weight": 0, "head.bias": 0}
    assert to_tree(from_tree(RowState, to_tree(start))).keys() == to_tree(start).keys()
    assert method.summed is None
    reply = method.local_update(ImageSite("1", {0, 4}, 7), model=start.model, round=0, rounds=1)
    assert reply["n"] == 7 and reply["labelled"] == [7, 0, 0, 0, 7, 0]
    sends = sends_of(method)["local_update"]
    egress.check(reply, sends, what="reply", classes=6, forms=lambda net: forms_of(cnn()))


@pytest.mark.parametrize(
    "method", [FedAvg(local=LOCAL), FedProx(local=LOCAL), FedPSL(tdma=False, local=LOCAL)]
)
def test_without_rows_nothing_more_is_sent(method: Any) -> None:
    state = method.start(cnn(), Server())
    assert type(state) is State is method.state
    assert method.summed == "cases"
    reply = method.local_update(ImageSite("1", {0, 4}, 7), model=state.model, round=0, rounds=1)
    assert sorted(reply) == ["model", "n"] == sorted(sends_of(method)["local_update"])


@pytest.mark.parametrize(
    ("name", "options", "axis"),
    [("unet", {"filters": [4, 6, 8]}, 0), ("mednext", {"size": "S"}, 1)],
)
def test_heads_of_segmentation_nets(name: str, options: dict[str, Any], axis: int) -> None:
    """Also where the kernel of a transposed convolution has its classes on the second axis."""
    net = nets.build(name, options, in_channels=1, classes=3, spatial_dims=2, seed=0)
    head = head_of(net)
    assert [head[key] for key in head if key.endswith("weight")] == [axis]
    assert [head[key] for key in head if key.endswith("bias")] == [0]
    old = tensors_of(net)
    a, b = ({key: torch.full_like(value, number) for key, value in old.items()} for number in (1.0, 3.0))
    got = average_rows([a, b], [2, 2], [[2, 2, 0], [2, 0, 0]], head=head, old=old)
    for key, value in got.items():
        assert value.shape == old[key].shape and value.is_contiguous()
        if key in head:
            rows, before = value.transpose(0, head[key]), old[key].transpose(0, head[key])
            assert (rows[0] == 2).all() and (rows[1] == 1).all() and torch.equal(rows[2], before[2])
        elif value.is_floating_point():
            assert (value == 2).all()


def test_the_background_of_exclusive_classes_counts_every_case() -> None:
    space = LabelSpace(("background", "a", "b"))
    site = ImageSite("x", {2}, 5, space=space)
    assert site.n_labelled.tolist() == [5, 0, 5]


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(4, 4), nn.Linear(4, 6)


class TwoLayers(Headless):
    classes = 6

    def parts(self) -> dict[str, Any]:
        return {"head": [self.body, self.last]}


def test_a_net_without_rows_is_refused() -> None:
    with pytest.raises(FederationError, match='Headless: names no part "head"'):
        FedPSL().start(Headless(), Server())
    with pytest.raises(
        FederationError, match=r"body.weight of its head is \[4, 4\], not one row for each of 6"
    ):
        FedAvg(aggregate_unlabelled_rows=False).start(TwoLayers(), Server())
    FedAvg().start(Headless(), Server())
    per_row = {"aggregate_unlabelled_rows": False}
    for method in (FedPSL(tdma=False), FedPSL(tadl=False), FedAvg(**per_row), FedOpt(**per_row)):  # type: ignore[arg-type]
        with pytest.raises(FederationError, match='Headless: names no part "head"'):
            method.examine(Headless(), [])
    assert FedAvg().examine(Headless(), []) == FedPSL(tdma=False, tadl=False).examine(Headless(), []) == []
    with pytest.raises(FederationError, match=r"annotated cases for \[5\] classes; head.weight has 6"):
        average_rows(random_models(1), [1], [[1] * 5], head=head_of(cnn()), old=tensors_of(cnn()))


def test_positive_weights_are_those_of_the_site() -> None:
    """30 with and 70 without give 7/3; 1 where a class has no case with it, or none without, or is unknown."""
    site = ImageSite("x", {0, 1, 2}, 100)
    site.n_labelled = torch.tensor([100, 100, 100, 0, 0, 0])
    site.n_positive = torch.tensor([30, 0, 100, 0, 0, 0])
    loss: Any = losses.for_site(LossChoice(), site)
    assert loss.pos_weight == pytest.approx([7 / 3, 1, 1, 1, 1, 1])
    z = torch.zeros(1, 6)
    known = torch.tensor([[True, False, False, False, False, False]])
    ln2: Tensor = loss(z, torch.ones(1, 6), known)
    assert float(ln2) == pytest.approx(7 / 3 * float(np.log(2)), rel=1e-6)


def test_the_parts_of_a_classifier_are_theta_and_phi() -> None:
    named = parts(cnn())
    assert set(head_of(cnn())) == set(named["head"]) == set(HEAD)
    assert sum(map(len, named.values())) == len(tensors_of(cnn()))
