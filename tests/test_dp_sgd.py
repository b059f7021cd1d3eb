"""DP-SGD: the plain step where it does nothing, the reach of a sample, the noise, what is spent, what is refused."""

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from unet_sites import LOCAL, SPACE, UNetSite, play, resumed, unet
from voxel_sites import Pointwise

from fedatlas import nets
from fedatlas.core.batch import Batch
from fedatlas.core.errors import FederationError
from fedatlas.core.options import from_dict
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import Tensors, tensors_of
from fedatlas.learning.loop import Local, Stepper
from fedatlas.losses import LossChoice, supervised
from fedatlas.losses.onehot import DiceBCE
from fedatlas.methods.pseudo_labels import PseudoLabels
from fedatlas.methods.shared import dp_sgd
from fedatlas.methods.shared.dp_sgd import (
    DPSGD,
    Private,
    Spent,
    accounted,
    epsilon,
    epsilon_poisson,
    examine,
)
from fedatlas.methods.shared.teachers import Teaching, train_teacher
from fedatlas.methods.standalone import Standalone

CPU = torch.device("cpu")
WIDE = 1e9
"""A clip that nothing reaches."""


class LoggingSite(UNetSite):
    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.logged: dict[str, float] = {}

    def log(self, **numbers: float) -> None:
        self.logged |= numbers


def sampled(net: nn.Module, batch: Batch) -> Tensor:
    """A mean over samples."""
    return DiceBCE().per_sample(net(batch.image), batch.target, batch.known).mean()


def stepped(
    net: nn.Module, batch: Batch, loss: Any, how: DPSGD | None, seed: int = 0, **local: Any
) -> Tensors:
    """The net after two steps. how: None: plain ones."""
    by = Stepper(net, Local(**{"optimizer": "sgd", "lr": 0.1, **local}), CPU)
    private = None if how is None else Private(how, dp_sgd._seeded(generator("noise", seed)), Spent())
    for count in range(2):
        by.set_rate(count, of=2)
        if private is None:
            by.step(loss(net, batch))
        else:
            by.move(private.gradients(by, loss, batch))
    return tensors_of(net)


def close(a: Tensors, b: Tensors, tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(a[name], b[name], atol=tolerance, rtol=1e-5) for name in a)


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([value.double().flatten() for value in tensors.values()])


def test_without_noise_and_clip_it_is_the_plain_step() -> None:
    site, how = UNetSite("a", {1}, 4), DPSGD(noise=0, clip=WIDE)
    several, one = site.batch(torch.arange(3)), site.batch(torch.tensor([2]))
    start = tensors_of(unet())
    for local in ({"weight_decay": 0.1}, {"clip": 0.05}):
        plain = stepped(unet(), several, sampled, None, **local)
        assert close(stepped(unet(), several, sampled, how, **local), plain)
        assert not close(plain, start, 1e-4)
    pooled = supervised(LossChoice(), site)
    assert close(stepped(unet(), one, pooled, how), stepped(unet(), one, pooled, None))
    assert not close(
        stepped(unet(), several, sampled, DPSGD(noise=0, clip=0.01)), stepped(unet(), several, sampled, None)
    )


def test_a_parameter_without_a_gradient_stays_unless_there_is_noise() -> None:
    net = Pointwise(len(SPACE))
    net.spare = nn.Parameter(torch.ones(3))  # type: ignore[assignment]
    batch = UNetSite("a", {1}, 2).batch(torch.arange(2))
    still = stepped(net, batch, sampled, DPSGD(noise=0), weight_decay=0.1)["spare"]
    assert torch.equal(still, torch.ones(3))
    assert not torch.equal(stepped(net, batch, sampled, DPSGD(noise=1))["spare"], still)


def gradient(batch: Batch, how: DPSGD) -> Tensor:
    """What one step moved the net by: the gradient, at a rate of 1."""
    net, local = unet(), Local(optimizer="sgd", lr=1, momentum=0, weight_decay=0)
    before = flat(tensors_of(net))
    by, private = Stepper(net, local, CPU), Private(how, dp_sgd._seeded(generator("noise")), Spent())
    by.move(private.gradients(by, sampled, batch))
    return before - flat(tensors_of(net))


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_sample_moves_a_step_by_the_clip_over_the_batch_at_most(noise: float) -> None:
    site, clip = UNetSite("a", {1}, 4), 0.02
    batch = site.batch(torch.arange(4))
    other = dataclasses.replace(batch, image=batch.image.clone())
    other.image[1] *= -50
    how = DPSGD(noise=noise, clip=clip)
    moved = (gradient(batch, how) - gradient(other, how)).norm()
    assert 0 < moved <= 2 * clip / 4 * 1.001
    wide = DPSGD(noise=noise, clip=WIDE) if noise == 0 else DPSGD(noise=noise / WIDE, clip=WIDE)
    assert (gradient(batch, wide) - gradient(other, wide)).norm() > 3 * clip / 4
    alone = gradient(batch.part(slice(0, 1)), DPSGD(noise=0, clip=clip))
    assert float(alone.norm()) == pytest.approx(clip, rel=1e-4)


def test_the_noise_has_the_stated_deviation_and_mean() -> None:
    how, batch = DPSGD(noise=3.0, clip=2.0), UNetSite("a", {1}, 4).batch(torch.arange(4))
    noise = gradient(batch, how) - gradient(batch, DPSGD(noise=0, clip=2.0))
    error = 1.5 / math.sqrt(noise.numel())
    assert float(noise.std()) == pytest.approx(1.5, abs=4 * error) and abs(float(noise.mean())) < 4 * error


def test_equal_seeds_give_equal_bits_and_the_global_generator_is_not_asked() -> None:
    batch, how = UNetSite("a", {1}, 4).batch(torch.arange(2)), DPSGD(noise=1)
    net, before = unet(), torch.random.get_rng_state()
    first = stepped(net, batch, sampled, how)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(flat(first), flat(stepped(unet(), batch, sampled, how)))
    assert not torch.equal(flat(first), flat(stepped(unet(), batch, sampled, how, seed=1)))


def test_noise_of_the_operating_system_does_not_repeat() -> None:
    pytest.importorskip("cryptography")
    shape = torch.Size([200, 100])
    one, two = (dp_sgd._system()(shape) for _ in range(2))
    assert one.shape == shape and not torch.equal(one, two)
    assert float(one.std()) == pytest.approx(1, abs=0.03)


# ---------------------------------------------------------------------------------------------------- what is spent


def test_spent_counts_every_case() -> None:
    spent = Spent()
    for cases in (["a", "b"], ["c", "c"], ["c", "a"]):
        spent.add(cases)
    again = Spent(spent.tree())
    assert again.steps == 3 and dict(again.squares) == {"a": 2, "b": 1, "c": 5} and again.most == 5
    assert Spent().most == 0


def test_epsilon_of_a_case_is_that_of_one_gaussian() -> None:
    pytest.importorskip("opacus")
    how = DPSGD(noise=4.0)
    assert epsilon(how, 0) == 0 and epsilon(DPSGD(noise=0), 3) == math.inf
    assert epsilon(how, 16) == pytest.approx(epsilon(DPSGD(noise=1.0), 1), rel=1e-6)
    # mu = 1: the exact epsilon at 1e-5 is 4.3774 (Balle, Wang 2018); Rényi's is above it
    assert 4.377 < epsilon(how, 16) < 1.15 * 4.377


def test_epsilon_of_poisson_sampling_is_that_of_the_published_bound() -> None:
    """Mironov, Talwar, Zhang 2019, at whole orders, and the conversion of Balle et al. 2020."""
    pytest.importorskip("opacus")
    how, q, steps = DPSGD(noise=1.2), 0.05, 300

    def at(order: int) -> float:
        terms = [
            math.comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp((k * k - k) / (2 * how.noise**2))
            for k in range(order + 1)
        ]
        renyi = steps * math.log(math.fsum(terms)) / (order - 1)
        tail = (math.log(how.delta) + math.log(order)) / (order - 1)
        return renyi - tail + math.log((order - 1) / order)

    best = min(at(order) for order in range(2, 30))
    found = epsilon_poisson(how, steps, q)
    assert 0.97 * best < found <= best * (1 + 1e-9)
    assert epsilon_poisson(how, 0, q) == 0 and epsilon_poisson(DPSGD(noise=0), 3, q) == math.inf
    assert epsilon_poisson(how, steps, 1.0) == epsilon(how, steps) > found
    assert math.isfinite(epsilon_poisson(DPSGD(noise=0.01), 3, q))


def test_a_site_tells_what_all_its_calls_spent_and_no_loss() -> None:
    pytest.importorskip("opacus")
    method, site = Standalone(local=LOCAL, dp_sgd=DPSGD(noise=1)), LoggingSite("a", {1}, 3)
    told = []
    for round in range(2):
        site.round = round
        method.local_update(site, tensors_of(unet()), round=round, rounds=2)  # type: ignore[arg-type]
        told.append(dict(site.logged))
    assert set(told[0]) == {"steps", "step_seconds", "epsilon", "epsilon_poisson"}
    kept: Any = site.memory[dp_sgd.MEMORY]
    assert kept["steps"] == 2 * 2 and set(kept["squares"]) <= {"0", "1", "2"}
    assert told[1]["epsilon"] == epsilon(DPSGD(noise=1), max(kept["squares"].values())) > told[0]["epsilon"]
    assert told[1]["epsilon_poisson"] == epsilon_poisson(DPSGD(noise=1), 4, 2 / 3)


# ---------------------------------------------------------------------------------------------------------- methods


def test_standalone_repeats_and_resumes() -> None:
    pytest.importorskip("opacus")
    method = Standalone(local=LOCAL, dp_sgd=DPSGD(noise=0.5))
    state, again, plain = play(method), resumed(method, 2), play(Standalone(local=LOCAL))
    for site, model in state.models.items():
        assert torch.equal(flat(model), flat(again.models[site]))
        assert not torch.equal(flat(model), flat(plain.models[site]))


def test_a_teacher_is_trained_with_fresh_noise_in_every_round() -> None:
    pytest.importorskip("opacus")
    site, how = LoggingSite("a", {1}, 3), Teaching(rounds=3, dp_sgd=DPSGD(noise=1))
    local = dataclasses.replace(
        LOCAL, optimizer="sgd", lr=1.0, schedule="constant", momentum=0, weight_decay=0
    )
    start = tensors_of(unet())
    teacher = train_teacher(site, start, 9, how, local=local, loss=LossChoice())["teacher"]  # type: ignore[arg-type]
    assert set(site.logged) == {"steps", "step_seconds", "teacher_epsilon", "teacher_epsilon_poisson"}
    assert site.memory["teacher dp_sgd"]["steps"] == 6
    # six steps of deviation 1/2, each its own: repeated noise would add up to sqrt(3) of it
    moved = flat(teacher) - flat(start)
    assert float(moved.std()) == pytest.approx(0.5 * math.sqrt(6), rel=0.1)


def test_teachers_of_pseudo_labels_take_it_from_a_federation_file() -> None:
    method = from_dict(PseudoLabels, {"teachers": {"dp_sgd": {"noise": 2}}}, what="method")
    assert method.teachers.dp_sgd == DPSGD(noise=2, clip=1.0, delta=1e-5)
    with pytest.raises(FederationError, match=r"dp_sgd\.noise: missing"):
        from_dict(Standalone, {"dp_sgd": {"clip": 2}}, what="method")


# --------------------------------------------------------------------------------------------------- what is refused


class Counting(Pointwise):
    """A net with a statistic of its own."""

    def __init__(self) -> None:
        super().__init__(len(SPACE))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean()
        return super().forward(x)


def test_nets_whose_statistics_no_noise_covers_are_refused() -> None:
    how = DPSGD(noise=0)
    for net in (unet(norm="batch"), ufps("batch")):
        with pytest.raises(FederationError, match="dp_sgd: .* BatchNorm2d.*group or instance"):
            examine(how, net, LOCAL)
    with pytest.raises(FederationError, match="running statistics"):
        examine(how, nn.InstanceNorm2d(3, track_running_stats=True), LOCAL)
    with pytest.raises(FederationError, match="moves seen"):
        stepped(Counting(), UNetSite("a", {1}, 2).batch(torch.arange(2)), sampled, how)
    assert examine(None, unet(norm="batch"), LOCAL) == []


def ufps(norm: str) -> nn.Module:
    options = {"width": 4, "levels": 3, "norm": norm}
    return nets.build("ufps_unet", options, in_channels=1, classes=len(SPACE), spatial_dims=2, seed=1)


def test_the_net_of_ufps_trains_with_instance_normalisation() -> None:
    site, loss = UNetSite("a", {1}, 2), LossChoice(name="dice_bce")
    moved = stepped(ufps("instance"), site.batch(torch.arange(2)), supervised(loss, site), DPSGD(noise=0.1))
    assert bool(torch.isfinite(flat(moved)).all()) and not close(moved, tensors_of(ufps("instance")))


def test_precision_values_and_a_missing_extra_are_refused(monkeypatch) -> None:
    with pytest.raises(FederationError, match="fp16"):
        examine(DPSGD(noise=0), unet(), dataclasses.replace(LOCAL, precision="fp16"))
    for bad in ({"noise": -1}, {"noise": 1, "clip": 0}, {"noise": math.inf}, {"noise": 1, "delta": 1}):
        with pytest.raises(FederationError, match="dp_sgd"):
            from_dict(Standalone, {"dp_sgd": bad}, what="method")
    assert "nothing is protected" in examine(DPSGD(noise=0), unet(), LOCAL)[0]
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(FederationError, match=r"fedatlas\[privacy\].*opacus"):
        examine(DPSGD(noise=1), unet(), LOCAL)
    site = UNetSite("a", {1}, 2)
    with (
        pytest.raises(FederationError, match=r"fedatlas\[privacy\].*opacus"),
        accounted(DPSGD(noise=1), site, unet(), LOCAL),  # type: ignore[arg-type]
    ):
        raise AssertionError("nothing is trained")


def test_check_tells_what_is_spent() -> None:
    pytest.importorskip("opacus")
    (text,) = Standalone(local=LOCAL, dp_sgd=DPSGD(noise=2)).examine(unet(), ["a", "b"])
    assert f"epsilon of {epsilon(DPSGD(noise=2), 1):.3g}, " in text and "seed" in text


def test_a_gradient_that_is_not_finite_stops() -> None:
    batch = UNetSite("a", {1}, 2).batch(torch.arange(2))
    batch.image[1, 0, 0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        stepped(unet(), batch, sampled, DPSGD(noise=1))


def test_samples_are_told_in_the_precision_of_the_steps() -> None:
    kinds: list[torch.dtype] = []

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        z = net(batch.image)
        kinds.append(z.dtype)
        return z.float().mean()

    by = Stepper(unet(), Local(precision="bf16"), CPU)
    private = Private(DPSGD(noise=0), dp_sgd._seeded(generator("noise")), Spent())
    private.gradients(by, loss, UNetSite("a", {1}, 2).batch(torch.arange(2)))
    assert kinds == [torch.bfloat16] * 2


def test_each_training_of_a_site_goes_on_counting_under_its_own_name() -> None:
    """A teacher's, beside that of another method's model."""
    pytest.importorskip("opacus")
    site: Any = LoggingSite("a", {1}, 3)
    for memory, steps in (("teacher", 1), ("other", 5), ("teacher", 2)):
        with accounted(DPSGD(noise=1), site, unet(), LOCAL, memory=memory) as private:
            assert private is not None
            for _ in range(steps):
                private.spent.add(["0", "1"])
    assert {name: kept["steps"] for name, kept in site.memory.items()} == {"teacher": 3, "other": 5}
    assert site.memory["teacher"]["squares"] == {"0": 3, "1": 3}


@pytest.mark.parametrize(("randomness", "steps"), [("seed", 2), ("system", 3)])
def test_a_training_that_is_done_again_counts_again_where_its_noise_is_another(
    randomness: Any, steps: int
) -> None:
    pytest.importorskip("opacus")
    site: Any = LoggingSite("a", {1}, 3)
    how = DPSGD(noise=1, randomness=randomness)
    for _ in ("the first, whose round is done again", "the same round"):
        site.memory = {}
        with accounted(how, site, unet(), LOCAL) as private:
            assert private is not None
            private.spent.add(["0", "1"])
    with accounted(how, site, unet(), LOCAL) as private:
        assert private is not None
        private.spent.add(["0", "2"])
    book = site.memory if randomness == "seed" else site.lasting
    assert book[dp_sgd.MEMORY]["steps"] == steps
    assert site.logged["epsilon"] == epsilon(how, steps)
