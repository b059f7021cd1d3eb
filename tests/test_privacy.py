"""privacy.py: the clip holds, the noise is what is promised, ε is what two independent derivations give."""

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from scipy import integrate, optimize, stats
from torch import Tensor

from fedatlas.core.errors import FederationError, NameMismatch
from fedatlas.core.options import from_dict
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.transport.protection.privacy import (
    Privacy,
    SecretNormal,
    check,
    epsilon,
    noise_left,
    privatise,
    protect,
)
from fedatlas.transport.protection.secure import Secure, pack, ring_sum, unpack

pytest.importorskip("cryptography")


def update(scale: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(30, 20, generator=rng) * scale,
        "d": torch.randn(11, generator=rng).double() * scale,
        "h": (torch.randn(5, generator=rng) * scale).bfloat16(),
        "s": torch.tensor(0.5) * scale,
    }


def l2(change: dict[str, Tensor]) -> float:
    return float(np.linalg.norm(np.concatenate([t.double().flatten().numpy() for t in change.values()])))


# ------------------------------------------------------------------------------------------------- the clip


@pytest.mark.parametrize("length", [0.021, 1.0, 1e6])  # the shortest is barely longer than the clip
def test_a_long_update_is_scaled_to_the_clip_over_all_tensors_together(length: float) -> None:
    change = update(length)
    before = {name: tensor.clone() for name, tensor in change.items()}
    private, norm = privatise(change, Privacy(clip=0.5, noise=0), sites=3)
    assert norm == pytest.approx(l2(before), rel=1e-12) and norm > 0.5
    assert l2(private) == pytest.approx(0.5, rel=1e-4)  # bfloat16 rounds
    for name, tensor in before.items():
        assert torch.equal(change[name], tensor)
        assert private[name].dtype == tensor.dtype and private[name].shape == tensor.shape
        torch.testing.assert_close(private[name], tensor * (0.5 / norm))


def test_a_short_update_is_left_as_it_is() -> None:
    for change in (update(1e-3), {"w": torch.zeros(4)}):
        private, _ = privatise(change, Privacy(clip=1.0, noise=0), sites=3)
        assert all(torch.equal(private[name], tensor) for name, tensor in change.items())


def test_the_norm_of_many_small_entries_beside_a_large_one_is_exact() -> None:
    change = {"a": torch.full((300_000,), 1e-4), "b": torch.tensor([1e4])}
    _, norm = privatise(change, Privacy(clip=1, noise=0), sites=1)
    small = float(torch.tensor(1e-4)) ** 2 * 300_000
    assert norm == pytest.approx(math.sqrt(1e8 + small), rel=1e-15)


# ------------------------------------------------------------------------------------------------ the noise


def test_the_noise_is_normal_of_the_stated_size_and_independent() -> None:
    count = 400_001  # several pieces, and an odd number
    change = {"w": torch.zeros(count, dtype=torch.float64), "v": torch.zeros(3, 1001)}
    private, _ = privatise(change, Privacy(clip=3.0, noise=0.7), sites=5)
    noise = private["w"].numpy() / (3.0 * 0.7)
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    assert noise.std() == pytest.approx(1, abs=6 / math.sqrt(2 * count))
    assert stats.kstest(private["v"].numpy().ravel() / 2.1, "norm").pvalue > 1e-6
    assert len(np.unique(noise)) == count
    for lag in (1, 2, 65_536, 131_072):
        for f in (lambda x: x, np.square, np.abs):
            r = np.corrcoef(f(noise[:-lag]), f(noise[lag:]))[0, 1]
            assert abs(r) < 6 / math.sqrt(count)
    # both tails beyond four standard deviations: 25 numbers are expected
    assert 3 < (np.abs(noise) > 4).sum() < 70


def test_noise_is_added_to_the_clipped_update() -> None:
    change = {"w": torch.full((100_000,), 5.0)}
    private, norm = privatise(change, Privacy(clip=10.0, noise=0.001), sites=2)
    mean = 5.0 * 10.0 / norm
    assert float(private["w"].mean()) == pytest.approx(mean, abs=6 * 0.01 / math.sqrt(100_000))
    assert float(private["w"].std()) == pytest.approx(0.01, rel=0.03)


def test_in_central_mode_the_sum_of_all_sites_has_the_noise() -> None:
    choice = Privacy(clip=2.0, noise=1.5, mode="central")
    each = [privatise({"w": torch.zeros(100_000)}, choice, sites=4)[0]["w"] for _ in range(4)]
    assert float(each[0].std()) == pytest.approx(1.5, rel=0.02)
    assert float(sum(each).std()) == pytest.approx(3.0, rel=0.02)  # type: ignore[union-attr]
    local = privatise({"w": torch.zeros(100_000)}, Privacy(clip=2.0, noise=1.5), sites=4)[0]["w"]
    assert float(local.std()) == pytest.approx(3.0, rel=0.02)


def test_central_noise_goes_through_a_secure_sum() -> None:
    choice, ring = Privacy(clip=1.0, noise=1.0, mode="central"), Secure()
    change = [{"w": torch.full((50_000,), float(i))} for i in range(3)]
    private = [privatise(one, choice, sites=3)[0] for one in change]
    mean, _ = unpack(ring_sum(pack(one, 1, ring, sites=3) for one in private), change[0], ring, sites=3)
    exact = torch.stack([one["w"].double() for one in private]).mean(0)
    assert float((mean["w"] - exact).abs().max()) < 1e-6
    assert float(mean["w"].std()) == pytest.approx(1 / 3, rel=0.03)


def test_two_sources_never_repeat_and_ignore_the_global_seed() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = SecretNormal().draw(8)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(0)
    second = SecretNormal()
    draws = [second.draw(8), second.draw(8)]
    assert not torch.equal(first, draws[0]) and not torch.equal(draws[0], draws[1])
    assert [len(second.draw(n)) for n in (0, 1, 2, 5)] == [0, 1, 2, 5]


# --------------------------------------------------------------------------------------------- what is sent


def test_the_model_sent_is_the_received_one_and_the_change() -> None:
    received = {"w": update()["w"], "h": update()["h"], "n": torch.tensor(3)}
    trained = {"w": received["w"] + 0.25, "h": received["h"] * 2, "n": torch.tensor(90)}
    choice = Privacy(clip=1e6, noise=0)
    model, norm = protect(dict(reversed(trained.items())), received, choice, sites=2)
    assert list(model) == ["w", "h", "n"] and model["h"].dtype == torch.bfloat16
    assert torch.allclose(model["w"], trained["w"]) and torch.equal(model["h"], trained["h"])
    assert model["n"].item() == 3 and model["n"] is not received["n"]
    change = [(trained[name].double() - received[name].double()).flatten() for name in ("w", "h")]
    assert norm == pytest.approx(float(torch.cat(change).norm()))
    with pytest.raises(NameMismatch, match="missing: h"):
        protect({"w": trained["w"], "n": trained["n"]}, received, choice, sites=2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n": torch.tensor([3])}, "n is torch.int64"),
        ({"norm.running_var": torch.ones(3)}, "norm.running_var is a variance.*instance normalisation$"),
        ({"w": torch.tensor([1.0, float("nan")])}, "not finite"),
        ({"w": torch.tensor([1.0, float("inf")])}, "not finite"),
    ],
)
def test_what_cannot_be_made_private_is_refused(change: dict[str, Tensor], text: str) -> None:
    with pytest.raises(FederationError, match=text):
        privatise(change, Privacy(clip=1, noise=1), sites=2)


def test_clipping_alone_leaves_batch_normalisation_usable() -> None:
    change = {"norm.running_var": torch.tensor([3.0, 4.0])}
    private, norm = privatise(change, Privacy(clip=1, noise=0), sites=2)
    assert norm == 5 and torch.allclose(private["norm.running_var"], torch.tensor([0.6, 0.8]))


# ------------------------------------------------------------------------------------------------- options


def test_central_mode_needs_a_secure_sum_with_equal_weights() -> None:
    central = Privacy(clip=1, noise=1, mode="central")
    with pytest.raises(FederationError, match="without secure aggregation"):
        check(central, bits=None, sites=4, equal_weights=True)
    with pytest.raises(FederationError, match="needs equal weights"):
        check(central, bits=24, sites=4, equal_weights=False)
    check(central, bits=24, sites=4, equal_weights=True)
    check(Privacy(clip=1, noise=1), bits=None, sites=4, equal_weights=False)


@pytest.mark.parametrize("sites", [2, 4, 100])
def test_central_noise_fills_the_steps_of_the_sum(sites: int) -> None:
    """The least bits that are allowed leave the noise of the sum what it is said to be; far fewer take it away."""
    choice = Privacy(clip=0.5, noise=2.0, mode="central")
    with pytest.raises(FederationError, match="secure.bits is 0, .*set secure.bits to") as error:
        check(choice, bits=0, sites=sites, equal_weights=True)
    least = int(str(error.value).split("set secure.bits to ")[1].split()[0])
    with pytest.raises(FederationError, match=f"set secure.bits to {least} or more"):
        check(choice, bits=least - 1, sites=sites, equal_weights=True)
    check(choice, bits=least, sites=sites, equal_weights=True)
    check(replace(choice, noise=0.0), bits=0, sites=sites, equal_weights=True)

    def spread(bits: int) -> float:
        drawn = [privatise({"w": torch.zeros(4000)}, choice, sites=sites)[0] for _ in range(sites)]
        total = sum(pack(one, 1, Secure(bits=bits), sites=sites)[1:] for one in drawn)
        return float((total.double() / 2.0**bits).std())

    assert spread(least) == pytest.approx(1.0, rel=0.06)
    if sites == 100:
        assert spread(0) < 0.1


@pytest.mark.parametrize(
    ("block", "package"),
    [
        ("privacy: {clip: 1.0, noise: 1.0}", "opacus"),
        ("privacy: {clip: 1.0, noise: 1.0}", "cryptography"),
        ("secure: {}", "Crypto"),
    ],
)
def test_a_missing_package_is_told_before_anything_is_trained(
    small, tmp_path, monkeypatch, block, package
) -> None:
    plain = small | yaml.safe_load(block)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FederationError, match=r'needs pip install "fedatlas\[(privacy|secure)\]"'):
        run_federation(parse_federation(plain, base=tmp_path), tmp_path / "run")
    assert not list(tmp_path.glob("run/sites/*/exchange/releases.txt"))


@pytest.mark.parametrize(
    "values",
    [
        {"clip": 0, "noise": 1},
        {"clip": 1, "noise": -1},
        {"clip": 1},
        {"noise": 1},
        {"clip": math.inf, "noise": 1},
        {"clip": 1, "noise": math.nan},
        {"clip": 1, "noise": 1, "delta": 0},
        {"clip": 1, "noise": 1, "delta": 1},
        {"clip": 1, "noise": 1, "mode": "both"},
    ],
)
def test_options_that_promise_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Privacy(**values)
    with pytest.raises(FederationError, match="privacy"):
        from_dict(Privacy, values, what="privacy")


# --------------------------------------------------------------------------------------------- the accountant

CASES = [(1.0, 1), (1.0, 100), (5.0, 50), (0.3, 10), (20.0, 10), (2.0, 7)]


def renyi(noise: float, releases: int, delta: float) -> float:
    """Mironov 2017, corollary 3: a Gaussian mechanism is (a, a / (2 noise²)) Rényi private; orders add over
    releases; turned into (ε, δ) by Balle et al. 2020, theorem 21; the best order is found by search."""

    def at(log_order: float) -> float:
        order = 1 + math.exp(log_order)
        return (
            releases * order / (2 * noise**2)
            + math.log((order - 1) / order)
            - (math.log(delta) + math.log(order)) / (order - 1)
        )

    best: Any = optimize.minimize_scalar(at, bounds=(-12, 12), method="bounded", options={"xatol": 1e-9})
    return float(best.fun)


def analytic(noise: float, releases: int, delta: float) -> float:
    """Balle, Wang 2018, theorem 8, exact: releases of one noise are one release of noise / sqrt(releases)."""
    mu = math.sqrt(releases) / noise

    def excess(eps: float) -> float:
        second = math.exp(eps + float(stats.norm.logcdf(-mu / 2 - eps / mu)))
        return float(stats.norm.cdf(mu / 2 - eps / mu)) - second - delta

    return float(optimize.brentq(excess, 0, 600))  # type: ignore[arg-type]


@pytest.mark.parametrize(("noise", "releases"), CASES)
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_epsilon_is_that_of_renyi_and_no_less_than_the_exact_one(noise: float, releases: int, delta) -> None:
    pytest.importorskip("opacus")
    found = epsilon(noise, releases, delta, relation="remove")
    assert found == pytest.approx(renyi(noise, releases, delta), rel=1e-3)
    assert found >= renyi(noise, releases, delta) * (1 - 1e-6)
    exact = analytic(noise, releases, delta)
    assert exact <= found <= 1.3 * exact


def test_the_exact_epsilon_of_the_helper_is_the_published_definition() -> None:
    """δ as the integral of what one density exceeds e^ε times the other: the definition itself."""
    noise, delta = 1.3, 1e-4
    eps = analytic(noise, 1, delta)
    x = np.linspace(-20, 22, 2_000_001)
    excess = stats.norm.pdf(x, 1, noise) - math.exp(eps) * stats.norm.pdf(x, 0, noise)
    assert integrate.trapezoid(np.maximum(excess, 0), x) == pytest.approx(delta, rel=1e-4)


def test_replacing_a_site_is_twice_the_sensitivity_and_the_default() -> None:
    pytest.importorskip("opacus")
    assert epsilon(2.0, 5, 1e-5) == epsilon(1.0, 5, 1e-5, relation="remove")
    assert epsilon(2.0, 5, 1e-5) > epsilon(2.0, 5, 1e-5, relation="remove")


def test_releases_of_different_noise_add_up() -> None:
    pytest.importorskip("opacus")
    mixed = epsilon([1.0, 3.0, 1.0], 3, 1e-5)
    assert epsilon([1.0] * 2, 2, 1e-5) < mixed < epsilon(1.0, 3, 1e-5)
    # 1/1² + 1/3² + 1/1² is one release of noise sqrt(9 / 19)
    assert mixed == pytest.approx(epsilon(math.sqrt(9 / 19), 1, 1e-5), rel=1e-6)


@pytest.mark.parametrize("releases", [1, 7, 1000])
def test_equal_releases_are_composed_at_once(releases: int) -> None:
    pytest.importorskip("opacus")
    found = epsilon(2.0, releases, 1e-5)
    assert found == pytest.approx(epsilon([2.0] * releases, releases, 1e-5), rel=1e-12)
    assert epsilon(2.0, 1 << 31, 1e-5) > 1e8, "and take no memory"


def test_no_noise_is_no_privacy_and_no_release_costs_nothing() -> None:
    assert epsilon(0.0, 1, 1e-5) == math.inf
    assert epsilon([1.0, 0.0], 2, 1e-5) == math.inf
    assert epsilon(1e-200, 1, 1e-5) == math.inf
    assert epsilon(1.0, 0, 1e-5) == 0
    pytest.importorskip("opacus")
    assert epsilon(1e6, 1, 1e-5) < 1e-3
    assert 1e8 < epsilon(1e-4, 3, 1e-5) < math.inf


@pytest.mark.parametrize(
    ("noise", "releases", "delta"),
    [(1.0, 1, 0.0), (1.0, 1, 1.0), (-1.0, 1, 1e-5), (math.nan, 1, 1e-5), ([1.0], 2, 1e-5), (1.0, -1, 1e-5)],
)
def test_values_that_make_no_sense_are_refused(noise: Any, releases: int, delta: float) -> None:
    with pytest.raises(FederationError, match="privacy: "):
        epsilon(noise, releases, delta)


def test_a_lost_site_and_known_noise_lower_what_is_left_in_central_mode() -> None:
    central, local = Privacy(clip=1, noise=2, mode="central"), Privacy(clip=1, noise=2)
    assert noise_left(central, sites=4, left=4) == 2
    assert noise_left(central, sites=4, left=1) == 1
    assert noise_left(central, sites=9, left=5, known=1) == pytest.approx(2 * 2 / 3)
    assert noise_left(local, sites=4, left=1) == 2
    for wrong in ({"sites": 3, "left": 4}, {"sites": 3, "left": 2, "known": 3}):
        with pytest.raises(ValueError, match="allowed"):
            noise_left(central, **wrong)


def test_without_the_libraries_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(FederationError, match=r"fedatlas\[privacy\].*opacus"):
        epsilon(1.0, 1, 1e-5)
    with pytest.raises(FederationError, match=r"fedatlas\[privacy\].*cryptography"):
        SecretNormal()


@pytest.mark.parametrize(("sites", "least"), [(2, 5), (4, 5), (100, 8)])
def test_the_steps_are_held_against_the_noise_of_one_site(sites: int, least: int) -> None:
    """Sixteen steps in σ = noise · clip / √K."""
    choice = Privacy(clip=0.5, noise=2.0, mode="central")
    check(choice, bits=least, sites=sites, equal_weights=True)
    with pytest.raises(FederationError, match=f"set secure.bits to {least} or more"):
        check(choice, bits=least - 1, sites=sites, equal_weights=True)
