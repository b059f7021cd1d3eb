"""TADL: the published step, closed forms, finite differences, limiting cases, and what local training may move."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fakes import Server, same
from image_sites import SPACE, ImageSite, cnn
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice
from fedatlas.losses.masked import masked_bce
from fedatlas.methods import fedpsl
from fedatlas.methods.fedavg import FedAvg
from fedatlas.methods.fedpsl import FedPSL, halves, tadl
from fedatlas.transport import wire

VECTORS = Path(__file__).parents[1] / "vectors"
LOCAL = Local(optimizer="adam", weight_decay=0.0, batch=4, steps=3, lr=1e-2, schedule="constant")
VARIANTS: list[tuple[str, Any, Any]] = [
    ("phi_updated_second", "updated", 2),
    ("phi_updated_first", "updated", 1),
    ("phi_old_second", "old", 2),
    ("phi_old_first", "old", 1),
    ("joint_second", "joint", 2),
]


def vector() -> dict[str, Tensor]:
    with np.load(VECTORS / "fedpsl_tadl_step.npz") as file:
        return {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}


class Published(nn.Module):
    """The net of the vector: a linear layer with tanh, and a linear predictor."""

    classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def parts(self) -> dict[str, Any]:
        return {"encoder": self.body, "head": self.head}


def published_model(v: dict[str, Tensor]) -> Tensors:
    return {
        "body.0.weight": v["theta0/0.weight"],
        "body.0.bias": v["theta0/0.bias"],
        "head.weight": v["phi0/weight"],
        "head.bias": v["phi0/bias"],
    }


@pytest.mark.parametrize(("key", "phi_in_outer", "order"), VARIANTS)
def test_the_published_step(key: str, phi_in_outer: Any, order: Any) -> None:
    v = vector()
    known = v["label_mask"].bool().expand(8, 3)

    def loss(x: Tensor, y: Tensor) -> Any:
        def L(theta: Tensors, phi: Tensors) -> Tensor:
            f = (x @ theta["0.weight"].T + theta["0.bias"]).tanh()
            z = f @ phi["weight"].T + phi["bias"]
            return masked_bce(z, y, known, pos_weight=v["pos_weight"])

        return L

    theta = {name: v[f"theta0/{name}"].clone().requires_grad_() for name in ("0.weight", "0.bias")}
    phi = {name: v[f"phi0/{name}"].clone().requires_grad_() for name in ("weight", "bias")}
    L_train, L_val = loss(v["x_train"], v["y_train"]), loss(v["x_val"], v["y_val"])
    made = tadl(L_train, L_val, theta, phi, float(v["alpha"]), phi_in_outer=phi_in_outer, order=order)
    for name in theta:
        torch.testing.assert_close(made.theta[name], v[f"{key}/meta_grad/{name}"], atol=1e-6, rtol=0)
    for name, value in made.phi_new.items():
        torch.testing.assert_close(value, v[f"phi_new/{name}"], atol=1e-6, rtol=0)
    assert float(made.validation) == pytest.approx(float(v[f"{key}/loss_val"]), abs=1e-6)
    if f"{key}/theta_prime/0.weight" in v:  # at which the outer loss is taken, with the phi of the variant
        inner = {name: v[f"{key}/theta_prime/{name}"] for name in theta}
        outer = {name: v[f"phi_new/{name}"] if phi_in_outer == "updated" else phi[name] for name in phi}
        assert L_val(inner, outer).item() == pytest.approx(float(made.validation), abs=1e-6)
    if f"{key}/loss_train" in v:
        assert float(made.train) == pytest.approx(float(v[f"{key}/loss_train"]), abs=1e-6)


class PublishedSite(ImageSite):
    """One batch: the vector's two halves, one after the other."""

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> list[Batch]:
        v = vector()
        x, y = torch.cat([v["x_train"], v["x_val"]]), torch.cat([v["y_train"], v["y_val"]])
        return [Batch(x, y, v["label_mask"].bool().expand(16, 3), ["case"] * 16)]


@pytest.mark.parametrize(("key", "phi_in_outer", "order"), VARIANTS)
def test_the_published_step_through_local_training(key: str, phi_in_outer: Any, order: Any) -> None:
    """Algorithm 1 as printed: plain steps of alpha and beta, whatever optimizer `local` names."""
    v = vector()
    space = LabelSpace(("a", "b", "c"), exclusive=False, level="image")
    site = PublishedSite("x", {0}, 4, Published, space=space)
    method = FedPSL(
        alpha=float(v["alpha"]),
        phi_in_outer=phi_in_outer,
        order=order,
        outer="plain",
        loss=LossChoice(options={"pos_weight": v["pos_weight"].tolist()}),
        local=Local(lr=float(v["beta"]), batch=16, steps=1, schedule="constant", weight_decay=0.1),
    )
    end = method.local_update(site, model=published_model(v), round=0, rounds=1)["model"]
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(end[f"body.{name}"], v[f"{key}/theta_new/{name}"], atol=1e-6, rtol=0)
    for name in ("weight", "bias"):
        torch.testing.assert_close(end[f"head.{name}"], v[f"phi_new/{name}"], atol=1e-6, rtol=0)
    logged = (site.logged["train"], site.logged["validation"])
    assert logged[1] == pytest.approx(float(v[f"{key}/loss_val"]), abs=1e-6)
    assert site.logged["loss"] == pytest.approx(sum(logged) / 2, abs=1e-6)


def scalar(value: float) -> Tensors:
    return {"": torch.tensor(value, dtype=torch.float64, requires_grad=True)}


def test_the_meta_gradient_of_a_quadratic() -> None:
    """L_train = a/2 theta^2, L_val = b/2 theta^2: b (1 - alpha a)^2 theta, and b (1 - alpha a) theta at first order."""
    a, b, alpha, theta = 3.0, 0.7, 0.2, 1.9

    def quadratic(factor: float) -> Any:
        return lambda theta, phi: factor / 2 * theta[""] ** 2

    orders: tuple[Literal[1, 2], ...] = (2, 1)
    for order, power in zip(orders, (2, 1), strict=True):
        made = tadl(quadratic(a), quadratic(b), scalar(theta), scalar(1.0), alpha, order=order)
        assert float(made.theta[""]) == pytest.approx(b * (1 - alpha * a) ** power * theta, rel=1e-12)
        assert made.phi[""] is None, "neither loss depends on phi"


def test_the_three_readings_of_phi_in_closed_form() -> None:
    """A linear net of one weight each, z = phi theta x, and the loss (z - y)^2 / 2."""
    theta, phi, alpha = 0.8, -1.3, 0.15
    (x, y), (u, w) = (1.7, 0.4), (-0.6, 1.1)

    def L(x: float, y: float) -> Any:
        return lambda theta, phi: (phi[""] * theta[""] * x - y) ** 2 / 2

    r = phi * theta * x - y
    theta_prime, updated = theta - alpha * r * phi * x, phi - alpha * r * theta * x
    H = (phi * x) ** 2  # d2 L_train / dtheta2
    M = r * x + phi * theta * x * x  # d2 L_train / dphi dtheta

    def expected(seen: float, joint: float = 0.0, curvature: float = 1.0) -> float:
        e = seen * theta_prime * u - w
        return (1 - curvature * alpha * H) * e * seen * u - joint * alpha * M * e * theta_prime * u

    cases: dict[tuple[Any, Any], float] = {
        ("updated", 2): expected(updated),
        ("old", 2): expected(phi),
        ("joint", 2): expected(updated, joint=1.0),
        ("updated", 1): expected(updated, curvature=0.0),
        ("joint", 1): expected(updated, curvature=0.0),
    }
    for (phi_in_outer, order), value in cases.items():
        made = tadl(
            L(x, y), L(u, w), scalar(theta), scalar(phi), alpha, phi_in_outer=phi_in_outer, order=order
        )
        assert float(made.theta[""]) == pytest.approx(value, rel=1e-12), (phi_in_outer, order)
        assert float(made.phi_new[""]) == pytest.approx(updated, rel=1e-12)
    assert len({round(value, 6) for value in cases.values()}) == 4


@pytest.mark.parametrize("phi_in_outer", ["updated", "old", "joint"])
def test_the_second_order_gradient_against_finite_differences(phi_in_outer: Any) -> None:
    torch_rng = torch.Generator().manual_seed(2)
    x = torch.randn(2, 6, 4, generator=torch_rng, dtype=torch.float64)
    y = (torch.rand(2, 6, 3, generator=torch_rng) < 0.5).double()
    known = torch.rand(2, 6, 3, generator=torch_rng) < 0.7
    values = [torch.randn(size, generator=torch_rng, dtype=torch.float64) for size in ((5, 4), (3, 5))]
    alpha, h = 0.3, 1e-6

    def L(half: int) -> Any:
        return lambda theta, phi: masked_bce(
            (x[half] @ theta["w"].T).tanh() @ phi["w"].T, y[half], known[half]
        )

    def groups(moved: Tensor) -> tuple[Tensors, Tensors]:
        return {"w": moved.clone().requires_grad_()}, {"w": values[1].clone().requires_grad_()}

    fixed = tadl(L(0), L(1), *groups(values[0]), alpha).phi_new

    def outer(moved: Tensor) -> float:
        """L_val at theta' as a function of theta; phi as line 9 sees it."""
        theta, phi = groups(moved)
        g_theta, g_phi = torch.autograd.grad(L(0)(theta, phi), [theta["w"], phi["w"]])
        seen = {"updated": fixed["w"], "old": phi["w"], "joint": phi["w"] - alpha * g_phi}[phi_in_outer]
        return L(1)({"w": theta["w"] - alpha * g_theta}, {"w": seen}).item()

    gradient = tadl(L(0), L(1), *groups(values[0]), alpha, phi_in_outer=phi_in_outer).theta["w"]
    assert gradient is not None
    for index in np.ndindex(5, 4):
        step = torch.zeros(5, 4, dtype=torch.float64)
        step[index] = h
        slope = (outer(values[0] + step) - outer(values[0] - step)) / (2 * h)
        assert float(gradient[index]) == pytest.approx(slope, abs=1e-8)


def update(method: Any, site: ImageSite, **rounds: int) -> Tensors:
    place = {"round": 0, "rounds": 1} | rounds
    site.round = place["round"]
    return method.local_update(site, model=tensors_of(site.make()), **place)["model"]


def test_alpha_0_is_sgd_on_the_second_half_with_a_frozen_head() -> None:
    """E21."""

    class SecondHalves(ImageSite):
        def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
            net = super().network(model, name)
            net.head.requires_grad_(False)  # type: ignore[union-attr]
            return net

        def batches(self, **asked: Any) -> list[Batch]:  # type: ignore[override]
            return [halves(batch)[1] for batch in super().batches(**asked)]

    local = Local(
        optimizer="sgd", momentum=0.0, weight_decay=0.0, batch=6, steps=4, lr=0.3, schedule="cosine"
    )
    expected = update(FedAvg(local=local), SecondHalves("x", {0, 2}, 9))
    got = update(FedPSL(alpha=0.0, outer="plain", local=local), ImageSite("x", {0, 2}, 9))
    start = tensors_of(cnn())
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)
        assert torch.equal(value, start[name]) == name.startswith("head")


@pytest.mark.parametrize("tdma", [True, False])
def test_without_tadl_local_training_is_that_of_fedavg(tdma: bool) -> None:
    expected = update(FedAvg(local=LOCAL), ImageSite("x", {0, 2}, 9))
    assert same(update(FedPSL(tadl=False, tdma=tdma, local=LOCAL), ImageSite("x", {0, 2}, 9)), expected)
    assert not same(update(FedPSL(tdma=tdma, local=LOCAL), ImageSite("x", {0, 2}, 9)), expected)


def test_the_switches_change_the_step() -> None:
    made = [
        update(FedPSL(alpha=0.2, local=LOCAL, **options), ImageSite("x", {0, 2}, 9))
        for options in (
            {},
            {"order": 1},
            {"phi_in_outer": "old"},
            {"phi_in_outer": "joint"},
            {"outer": "plain"},
        )
    ]
    for i, a in enumerate(made):
        assert all(torch.isfinite(value).all() for value in a.values())
        assert not any(same(a, b) for b in made[:i])


@pytest.mark.parametrize("tadl_on", [True, False])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_rows_of_other_classes_are_left_bit_identical(optimizer: Any, tadl_on: bool) -> None:
    """I2, over two rounds, the optimizer's moments kept."""
    local = dataclasses.replace(LOCAL, optimizer=optimizer, clip=1.0)
    site, method = ImageSite("x", {1, 4}, 9), FedPSL(tadl=tadl_on, alpha=0.1, local=local)
    start = model = tensors_of(cnn())
    for number in range(2):
        site.round = number
        model = method.local_update(site, model=model, round=number, rounds=2)["model"]
    for name in ("head.weight", "head.bias"):
        for c in range(len(SPACE)):
            assert torch.equal(model[name][c], start[name][c]) == (c not in (1, 4))
    assert not torch.equal(model["extractor.0.first.weight"], start["extractor.0.first.weight"])


def test_the_schedule_scales_alpha_with_beta() -> None:
    """The last of many cosine steps has a length of nearly 0 for both."""
    local = Local(lr=0.1, batch=4, steps=1, schedule="cosine")
    method, start = FedPSL(alpha=0.1, outer="plain", local=local), tensors_of(cnn())

    def moved(round: int) -> float:
        end = update(method, ImageSite("x", {1, 4}, 9), round=round, rounds=1000)
        return max(float((end[name] - start[name]).abs().max()) for name in ("head.bias", "head.weight"))

    assert 0 < moved(999) < 1e-4 * moved(0)


def test_clipping_bounds_the_step() -> None:
    """The norm is that of both gradients together, before their lengths."""
    local = Local(lr=1.0, batch=4, steps=1, schedule="constant", clip=1e-3)
    end = update(FedPSL(alpha=1.0, outer="plain", local=local), ImageSite("x", {1, 4}, 9))
    start = tensors_of(cnn())
    norm = torch.stack([(end[name] - start[name]).square().sum() for name in end]).sum().sqrt()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("opt_state", ["persist", "reset"])
def test_the_optimizer_lives_as_local_says(opt_state: Any) -> None:
    site = ImageSite("x", {1, 4}, 9)
    update(FedPSL(local=dataclasses.replace(LOCAL, opt_state=opt_state)), site)
    kept = site.memory.get("optimizer")
    assert (kept is None) == (opt_state == "reset")
    if kept is not None:
        assert set(kept) == {name for name, _ in cnn().named_parameters()}
        assert all(float(entry["step"]) == 3 for entry in kept.values())


def test_running_statistics_are_those_of_the_first_half() -> None:
    """After one step they are what one forward pass of B_train at theta leaves, and batches are counted once."""

    def make() -> nn.Module:
        return cnn(norm="batch")

    site = ImageSite("x", {1, 4}, 9, make)
    local = dataclasses.replace(LOCAL, steps=1, batch=5)
    end = update(FedPSL(local=local, alpha=0.1), site)
    net = make().train()
    net(halves(site.batches(batch=5, steps=1)[0])[0].image)
    expected = dict(net.named_buffers())
    assert len(expected) == 12
    for name, value in expected.items():
        assert torch.equal(end[name], value), name


def test_halves() -> None:
    site = ImageSite("x", {1}, 9)
    for size, sizes in {2: (1, 1), 4: (2, 2), 5: (3, 2)}.items():
        batch = site.batch(torch.arange(size))
        first, second = halves(batch)
        assert (len(first.image), len(second.image)) == sizes
        assert torch.equal(torch.cat([first.target, second.target]), batch.target)
        assert first.case + second.case == batch.case and len(first.known) == sizes[0]
    first, second = halves(site.batch(torch.arange(1)))
    assert torch.equal(first.image, second.image) and len(first.image) == 1


def test_bf16() -> None:
    """The forward passes in half precision, the gradients close to those of single precision."""
    local = Local(
        optimizer="sgd", momentum=0.0, weight_decay=0.0, batch=6, steps=1, lr=1.0, schedule="constant"
    )
    half = dataclasses.replace(local, precision="bf16")
    end, whole = (update(FedPSL(local=each, alpha=0.1), ImageSite("x", {1, 4}, 9)) for each in (half, local))
    start = tensors_of(cnn())
    size, error = (
        torch.stack([(a[name] - whole[name]).square().sum() for name in whole]).sum().sqrt()
        for a in (start, end)
    )
    assert 0 < float(error) < 0.2 * float(size)


def test_what_cannot_be_done_is_refused() -> None:
    FedPSL(local=LOCAL).check(SPACE)
    with pytest.raises(FederationError, match=r"precision is fp16.*use float32 or bf16"):
        FedPSL(local=dataclasses.replace(LOCAL, precision="fp16")).check(SPACE)
    with pytest.raises(FederationError, match=r"local.batch is 1.*at least 2"):
        FedPSL(local=dataclasses.replace(LOCAL, batch=1)).check(SPACE)
    FedPSL(tadl=False, local=dataclasses.replace(LOCAL, batch=1, precision="fp16")).check(SPACE)
    with pytest.raises(FederationError, match='no part "head"'):
        FedPSL(tdma=False).start(nn.Linear(3, 2), Server())


def test_a_loss_that_is_not_finite_is_told() -> None:
    site = ImageSite("x", {1, 4}, 9)
    site.image *= float("nan")
    with pytest.raises(FloatingPointError, match="loss, train, validation not finite"):
        update(FedPSL(local=LOCAL), site)


def test_segmentation() -> None:
    """theta is everything but the head, deep supervision included."""
    space = LabelSpace(("background", "a", "b"))

    class Voxels(ImageSite):
        def batch(self, chosen: Tensor) -> Batch:
            made = super().batch(chosen)
            return dataclasses.replace(made, target=(made.image[:, 0] > 0.3).long() * 2)

    def make() -> nn.Module:
        options = {"filters": [4, 6, 8], "deep_supervision": True}
        return nets.build("unet", options, in_channels=1, classes=3, spatial_dims=2, seed=3)

    sites = [Voxels("x", {1, 2}, 6, make, space=space), Voxels("y", {2}, 6, make, space=space)]
    method = FedPSL(local=LOCAL, alpha=0.05)
    start = method.start(make(), Server())
    state = method.round(start, Server(*sites))
    assert sorted(state.model) == sorted(start.model)
    assert not any(torch.equal(state.model[name], start.model[name]) for name, _ in make().named_parameters())


@pytest.mark.parametrize("everywhere", [True, False])
def test_tdma_in_a_whole_federation(everywhere: bool, small: dict[str, Any], tmp_path: Path) -> None:
    """E1 at hosted sites: with every class annotated everywhere the run of FedPSL without TADL is FedAvg's."""
    if everywhere:
        for site in small["sites"]:
            site |= site.pop("reference")
    runs = []
    for number, method in enumerate(({"name": "fedavg"}, {"name": "fedpsl", "tadl": False})):
        federation = parse_federation(small | {"method": method}, base=Path())
        folder = tmp_path / str(number)
        run_federation(federation, folder, tell=lambda text: None)
        tree: Any = wire.decode((folder / "models" / "last.fa").read_bytes())
        runs.append(tree["model"])
    assert same(*runs) == everywhere
    head = [name for name in runs[0] if name.startswith("head.")]
    assert head and any(torch.equal(runs[0][name], runs[1][name]) for name in head) == everywhere


def test_training_lowers_both_losses() -> None:
    site = ImageSite("x", {1, 4}, 8)
    local = dataclasses.replace(LOCAL, batch=8, steps=10, lr=3e-2)
    method, model, seen = FedPSL(local=local, alpha=0.05), tensors_of(cnn()), []
    for number in range(12):
        site.round = number
        model = method.local_update(site, model=model, round=number, rounds=12)["model"]
        seen.append((site.logged["train"], site.logged["validation"]))
    assert all(last < 0.6 * first for first, last in zip(seen[0], seen[-1], strict=True))


def test_the_halves_of_a_batch_keep_findings() -> None:
    batch = Batch(
        torch.zeros(3, 1, 4, 4),
        torch.zeros(3, 2, 4, 4),
        torch.ones(3, 2, dtype=torch.bool),
        ["a", "b", "c"],
        torch.tensor([[0.0], [1.0], [0.0]]),
        torch.tensor([[True], [False], [True]]),
    )
    first, second = halves(batch)
    assert first.finding is not None and second.finding_known is not None
    assert first.finding.tolist() == [[0.0], [1.0]] and second.finding_known.tolist() == [[True]]
    assert second.case == ["c"] and second.along is None


def test_the_schedule_scales_the_step_to_theta_prime(monkeypatch) -> None:
    seen, real = list[float](), fedpsl.tadl
    monkeypatch.setattr(fedpsl, "tadl", lambda *given, **how: seen.append(given[4]) or real(*given, **how))
    method = FedPSL(alpha=0.2, local=Local(lr=0.1, batch=4, steps=1, schedule="cosine"))
    for round in (0, 500):
        update(method, ImageSite("x", {1, 4}, 9), round=round, rounds=1000)
    assert seen == pytest.approx([0.2, 0.1])
