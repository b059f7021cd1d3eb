"""UFPS: its equations against published vectors and literal versions, its phases, limiting cases (E14 to E16), and resume
in each phase."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes import Replies, Server, same
from torch import Tensor, nn
from voxel_sites import VoxelSite

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import sends_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import from_dict
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import average, forms_of, from_tree, load, n_bytes, tensors_of, to_tree
from fedatlas.learning.loop import Local
from fedatlas.losses import LossChoice
from fedatlas.losses.onehot import DiceBCE, rce
from fedatlas.methods import ufps
from fedatlas.methods.pseudo_labels import MethodChoice, PseudoLabels
from fedatlas.methods.shared.phases import begins
from fedatlas.methods.shared.pseudo import Merged
from fedatlas.methods.shared.sharpness import RATIOS, Sharpness, Sparsity, unpack_bits
from fedatlas.methods.shared.teachers import MEMORY, Maker, Teaching
from fedatlas.methods.ufps import (
    BANK,
    MASKS,
    UFPS,
    A_hat,
    AdaptiveRCE,
    GlobalMainTeacher,
    Uncertainty,
    UncertaintyAggregation,
    UnifiedSharpness,
    WeightScheduler,
    agreement,
    moments,
    own_parameters,
    part_names,
    refined,
    uncertainty,
    weigher,
)
from fedatlas.transport import egress, wire

VECTORS = Path(__file__).parents[1] / "vectors"
SPACE = LabelSpace(("background", "kidney", "liver", "spleen", "pancreas"))
LOCAL = Local(optimizer="adamw", batch=2, steps=2, lr=0.05, schedule="constant")
OWNS = {"a": {1}, "b": {3, 4}, "c": {2}}
OFF: dict[str, Any] = {"ws": None, "rce": None, "gmt": None, "ua": None, "sam": None}
TEACH = Teaching(rounds=2)
SAM = UnifiedSharpness(
    start=2, every=2, sharpness=Sharpness(rho=0.5), cmidg={"kernels": (1, 3), "grid": (2,)}
)  # type: ignore[arg-type]
FULL = UFPS(
    local=LOCAL,
    teachers=TEACH,
    ws=WeightScheduler(start=2, end=4),
    rce=AdaptiveRCE(start=3),
    gmt=GlobalMainTeacher(start=3),
    ua=UncertaintyAggregation(start=3),
    sam=SAM,
)


class Net(nn.Module):
    """An encoder, a decoder and a head of 1 x 1 convolutions."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(1, 3, 1), nn.Conv2d(3, 3, 1)
        self.head = nn.Conv2d(3, classes, 1)
        drawn = {n: torch.randn(p.shape, generator=generator("net", n)) for n, p in self.named_parameters()}
        for part in ("encoder", "decoder", "head"):  # so that several classes are somewhere
            drawn[f"{part}.weight"] *= 2
            drawn[f"{part}.bias"] *= 0.2
        load(self, drawn)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(x).tanh()).tanh())

    def parts(self) -> dict[str, nn.Module]:
        return {"encoder": self.encoder, "decoder": self.decoder, "head": self.head}


class Site(VoxelSite):
    """A site with an annotated share of the classes, whose numbers can be read."""

    def __init__(self, name: str, annotated: set[int]) -> None:
        super().__init__(name, annotated, SPACE)
        known = torch.tensor(self.labels.known)
        self.target = torch.where(known[self.target], self.target, 0)
        self.n_train, self.logged = 3 + len(annotated), {}

    def network(self, model: Any = None, name: str = "main") -> nn.Module:
        net = Net(len(SPACE))
        if model is not None:
            load(net, model)
        return net.train()

    def log(self, **numbers: float) -> None:
        self.logged |= numbers


class Clients(Server):
    """What a reply holds is checked; every call begins with a generator of its own, as at a real site."""

    def __init__(self, *sites: Site) -> None:
        super().__init__(*sites)
        self.bytes: list[tuple[str, int, int]] = []
        self.at, self.method = 0, cast(Any, None)

    @property
    def rng(self) -> torch.Generator:
        return generator("server", self.at)

    def network(self, model: Any = None, name: str = "main") -> nn.Module:
        return Net(len(SPACE)).eval()

    def call(self, function: Any, *, each: Any = None, **payload: Any) -> Replies:
        self.at, replies = payload.get("round", -1), {}
        for name in sorted(self.sites if each is None else each):
            site = self.members[name]
            site.round = self.at
            site.rng = generator(name, self.at)
            given = {**payload, **(each or {}).get(name, {})}
            replies[name] = self.method.functions()[function.__name__](site, **given)
            egress.check(
                replies[name],
                sends_of(self.method)[function.__name__],
                what=name,
                classes=len(SPACE),
                forms=lambda net: forms_of(Net(len(SPACE))),
            )
            extra = {k: v for k, v in replies[name].items() if k not in ("model", "n", "teacher", "classes")}
            self.bytes.append((function.__name__, self.at, size(extra)))
        return Replies(replies)


def size(tree: Any) -> int:
    """The bytes of all numbers of a tree, a plain one counting 8."""
    if isinstance(tree, dict):
        return sum(size(item) for item in tree.values())
    return n_bytes([tree]) if isinstance(tree, Tensor) else 8


def begin(method: Any) -> tuple[Any, Clients]:
    clients = Clients(*(Site(name, owns) for name, owns in OWNS.items()))
    clients.method = method
    return dataclasses.replace(method.start(Net(len(SPACE)), clients), rounds=5), clients


def federation(method: Any, rounds: int = 2) -> tuple[Any, Clients]:
    """(the state after some rounds of five, the sites)"""
    state, clients = begin(method)
    for _ in range(rounds):
        state = method.round(state, clients)
    return state, clients


def bits(state: Any) -> bytes:
    return bytes(wire.encode(to_tree(state)))


def vector(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(VECTORS / f"{name}.npz"))


# ---------------------------------------------------------------------------------------------- uncertainty, Eq. (6)


def test_uncertainty_of_the_published_code() -> None:
    v = vector("ufps_uncertainty")
    logits, onehot = torch.from_numpy(v["logits"]), torch.from_numpy(v["onehot"]).bool()
    merged = Merged(logits, onehot, torch.ones(5, dtype=torch.bool))
    assert uncertainty(merged, Uncertainty()).numpy() == pytest.approx(v["U_paper"], abs=1e-6)
    present = uncertainty(merged, Uncertainty(average="present"))
    assert present.numpy() == pytest.approx(v["U_official_classsoftmax"], abs=1e-6)
    # the code's volumes have their depth first, ours last
    turned = Merged(logits.movedim(2, -1), onehot.movedim(2, -1), merged.taught)
    official = uncertainty(turned, Uncertainty(softmax="depth", average="present"))
    assert official.numpy() == pytest.approx(v["U_official"], abs=1e-6)
    # `get_classwise_confidence`, which no equation of the paper uses, is of a class's own part of the entropy alone: as if
    # the teachers knew no other
    for c in range(5):
        one = Merged(turned.logits, turned.masks, torch.arange(5) == c)
        found = uncertainty(one, Uncertainty(softmax="depth"))
        assert found.numpy() == pytest.approx(v["U_classwise_official"][:, c], abs=1e-6)


def test_uncertainty_of_uniform_and_of_confident_teachers() -> None:
    taught = torch.ones(5, dtype=torch.bool)
    masks = torch.zeros(1, 5, 2000, 1, dtype=torch.bool)
    masks[:, 0] = True
    even = uncertainty(Merged(torch.zeros(1, 5, 2000, 1), masks, taught), Uncertainty(average="present"))
    assert float(even) == pytest.approx(math.log(5) / 5, rel=1e-3)  # the +1 in the divisor
    sure = uncertainty(Merged(100.0 * masks, masks, taught), Uncertainty())
    assert 0 <= float(sure) < 1e-6
    absent = uncertainty(Merged(torch.zeros(1, 5, 2000, 1), masks & False, taught), Uncertainty())
    assert float(absent) == 0


# -------------------------------------------------------------------------------------------------- weights, Eq. (8)

BANK_VALUES = torch.rand(50, generator=generator("bank"))


def literal_weight(U: float, ws: WeightScheduler, r: int, R: int) -> float:
    """Eq. (8), number by number."""
    bank = BANK_VALUES.double().numpy()
    mean, low, high = bank.mean(), bank.min(), bank.max()
    U_T = np.quantile(bank, ws.threshold)
    n, n_T, n_low = ((x - mean) / (high - low) for x in (U, U_T, low))
    if ws.schedule == "tail_shift":
        return 2 - math.exp(n - r / R) if n > n_T else 2 - math.exp(n)
    if ws.schedule == "base_decrement":
        return 2 - ((ws.alpha - math.e) * r / R + math.e) ** n
    half = R // 2
    reach = (n_T - n_low) * (r / half if r <= half else 1 - (r - half) / half)
    centre = (n_low if ws.centre == "least" else 0) + reach
    G = math.exp(-((n - centre) ** 2) / (2 * ws.width**2)) / (math.sqrt(2 * math.pi) * ws.width)
    return (1 - ws.beta) * G + ws.beta * (2 - math.exp(n))


@pytest.mark.parametrize("schedule", ["tail_shift", "base_decrement", "round_trip"])
@pytest.mark.parametrize("r", [0, 3, 5, 8, 10])
def test_weights_of_samples_number_by_number(schedule: Any, r: int) -> None:
    U = torch.linspace(float(BANK_VALUES.min()), float(BANK_VALUES.max()), 9)
    for centre in ("least", "mean"):
        ws = WeightScheduler(schedule=schedule, centre=centre)  # type: ignore[arg-type]
        found = weigher(BANK_VALUES, ws, r, 10)(U)
        assert found.tolist() == pytest.approx([literal_weight(float(u), ws, r, 10) for u in U], abs=1e-5)


def test_weights_in_the_limits() -> None:
    mean = BANK_VALUES.mean()[None]
    assert float(weigher(BANK_VALUES, WeightScheduler(), 4, 10)(mean)) == pytest.approx(1)
    U = torch.linspace(0, 1, 9)
    start = weigher(BANK_VALUES, WeightScheduler(), 0, 10)(U)
    everywhere = weigher(BANK_VALUES, WeightScheduler(threshold=1.0), 7, 10)(U[BANK_VALUES.max() >= U])
    assert torch.equal(start[BANK_VALUES.max() >= U], everywhere)  # no shift: in round 0, or of no sample
    flat = weigher(BANK_VALUES, WeightScheduler(schedule="base_decrement"), 10, 10)(U)
    assert torch.allclose(flat, torch.ones(9))
    assert torch.equal(weigher(torch.ones(3), WeightScheduler(), 1, 2)(U), torch.ones(9))
    few = torch.tensor([0.4, 0.41])  # uncertainties far beyond the few so far have no weight beyond theirs
    for schedule in ("tail_shift", "base_decrement", "round_trip"):
        w = weigher(few, WeightScheduler(schedule=schedule), 3, 9)  # type: ignore[arg-type]
        assert torch.equal(w(torch.tensor([0.1, 9.0])), w(few)) and (w(few) >= 2 - math.e).all()
        # the published code goes on beyond them
        official = WeightScheduler(schedule=schedule, beyond="extrapolate")  # type: ignore[arg-type]
        far = float(BANK_VALUES.max()) + 1
        found = weigher(BANK_VALUES, official, 3, 10)(torch.tensor([far, 0.5]))
        assert found.tolist() == pytest.approx(
            [literal_weight(u, official, 3, 10) for u in (far, 0.5)], abs=1e-5
        )
        assert found[0] < weigher(BANK_VALUES, WeightScheduler(schedule=schedule), 3, 10)(torch.tensor([far]))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ the teacher, Eq. (5)


def test_the_global_teacher_is_made_fine_sample_by_sample() -> None:
    rng = generator("masks")
    g, t = (torch.randint(0, 2, (4, 3, 5, 5), generator=rng).bool() for _ in range(2))
    t[0] = g[0]
    t[1] = ~g[1]
    for v in (0.0, 0.4, 0.8, 1.01):
        found, taken = refined(g, t, GlobalMainTeacher(v=v))
        for b in range(4):
            agreed, alone = int((g[b, 1:] & t[b, 1:]).sum()), int(g[b, 1:].sum())
            expected = g[b] if agreed < v * alone else g[b] & t[b]
            assert torch.equal(found[b], expected) and bool(taken[b]) == (agreed >= v * alone)
    assert torch.equal(refined(g, t, GlobalMainTeacher())[0][0], g[0])  # identical
    assert torch.equal(refined(g, t, GlobalMainTeacher())[0][1], g[1])  # disjoint
    assert torch.equal(refined(g, t, GlobalMainTeacher(v=0))[0], g & t)
    for rule, expected in (("global", g), ("teachers", t), ("intersection", g & t)):
        assert torch.equal(refined(g, t, GlobalMainTeacher(rule=rule))[0], expected)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ aggregation, Eq. (7)


def test_agreement_is_a_share_of_the_global_foreground() -> None:
    by_global = torch.tensor([[[0, 0, 0, 1, 1]], [[1, 1, 1, 1, 1]]]).bool().reshape(2, 1, 5)
    masks = torch.stack([torch.cat([by_global, ~by_global], 1)[0], torch.cat([by_global, ~by_global], 1)[1]])
    teachers = masks.clone()
    teachers[0, 1, 0] = False
    assert agreement(masks, teachers).tolist() == [pytest.approx(2 / 3), math.inf], (
        "the background counts nothing"
    )


def test_weights_of_sites_number_by_number_and_in_the_limits() -> None:
    mu, sigma, n = [0.21, 0.2, 0.25], [4e-4, 2e-4, 9e-4], [84, 186, 140]
    how = UncertaintyAggregation()

    def soft(x: list[float]) -> list[float]:
        return [math.exp(a) / sum(map(math.exp, x)) for a in x]

    parts = zip(soft([-m / 0.05 for m in mu]), soft([-s / 0.001 for s in sigma]), n, strict=True)
    literal = [(a + b + c / sum(n)) / 3 for a, b, c in parts]
    assert A_hat(mu, sigma, n, how) == pytest.approx(literal) and sum(literal) == pytest.approx(1)
    even = [(2 / 3 + c / sum(n)) / 3 for c in n]
    assert A_hat([0.2] * 3, [1e-3] * 3, n, how) == pytest.approx(even)  # E16
    flat = UncertaintyAggregation(tau_mean=1e12, tau_variance=1e12)
    assert A_hat(mu, sigma, n, flat) == pytest.approx(even)
    rewarding = A_hat(mu, sigma, n, UncertaintyAggregation(variance_sign=1))
    assert rewarding[2] > A_hat(mu, sigma, n, how)[2]


def test_averages_of_the_published_code() -> None:
    v = vector("ufps_aggregation")
    names = [key[3:] for key in v if key.startswith("in/")]
    models = [{name: torch.from_numpy(v[f"in/{name}"][k]).clone() for name in names} for k in range(3)]
    own = [name for name in names if name.startswith("decoder")]
    for case, each in (("dec_301", dict.fromkeys(own, v["ua_weights"].tolist())), ("dec_300", {})):
        found = average(models, v["num_weights"].tolist(), each=each)
        for name in names:
            assert found[name].numpy() == pytest.approx(v[f"{case}/{name}"], abs=1e-6)


def test_moments() -> None:
    values = BANK_VALUES.double()
    assert moments(BANK_VALUES, 0) == pytest.approx((float(values.mean()), float(values.var(correction=0))))
    assert moments(BANK_VALUES, 1)[1] == pytest.approx(float(values.var()))
    assert moments(BANK_VALUES[:1], 1)[1] == 0 and moments(torch.zeros(0), 0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("when", "rounds", "r"),
    [(0.6, 500, 300), (0.02, 500, 10), (0.6, 2, 2), (0, 9, 0), (300, 9, 300), (0.1, 30, 3)],
)
def test_a_share_of_all_rounds(when: float, rounds: int, r: int) -> None:
    assert begins(when, rounds) == r


# ------------------------------------------------------------------------------------------------------ limiting cases


def test_without_modules_it_is_fedavg_on_pseudo_labels_bit_for_bit() -> None:
    """E15, and the other side: any module changes the model."""
    choice = LossChoice(name="dice_bce")
    star = PseudoLabels(
        local=LOCAL, teachers=TEACH, inner=MethodChoice(name="fedavg", options={"loss": {"name": "dice_bce"}})
    )
    plain, _ = federation(star)
    assert same(federation(UFPS(local=LOCAL, teachers=TEACH, loss=choice, **OFF))[0].model, plain.model)
    late = UFPS(
        local=LOCAL,
        teachers=TEACH,
        ws=WeightScheduler(start=3),
        rce=AdaptiveRCE(start=3),
        gmt=GlobalMainTeacher(start=3),
        ua=UncertaintyAggregation(start=3),
        sam=UnifiedSharpness(start=3),
    )
    assert same(federation(late)[0].model, plain.model)
    modules: dict[str, Any] = {
        "ws": WeightScheduler(start=1, end=5),
        "rce": AdaptiveRCE(start=1, growing=False),
        "gmt": GlobalMainTeacher(start=2, rule="global"),
        "ua": UncertaintyAggregation(start=1),
        "sam": SAM,
    }
    for name, module in modules.items():
        changed, _ = federation(UFPS(local=LOCAL, teachers=TEACH, **(OFF | {name: module})))
        assert not same(changed.model, plain.model), name


def test_uncertainty_weighs_the_chosen_parts_alone() -> None:
    """E16: the encoder of the first round is FedAvg's, bit for bit."""
    ua = UncertaintyAggregation(start=1)
    plain, _ = federation(UFPS(local=LOCAL, teachers=TEACH, **OFF), rounds=1)
    found, _ = federation(UFPS(local=LOCAL, teachers=TEACH, **(OFF | {"ua": ua})), rounds=1)
    for name, tensor in found.model.items():
        assert torch.equal(tensor, plain.model[name]) == name.startswith("encoder"), name
    flat = UncertaintyAggregation(start=1, tau_mean=1e12, tau_variance=1e12)
    uniform, _ = federation(
        UFPS(local=LOCAL, teachers=TEACH, weights="equal", **(OFF | {"ua": flat})), rounds=1
    )
    equal, _ = federation(UFPS(local=LOCAL, teachers=TEACH, weights="equal", **OFF), rounds=1)
    for name, tensor in uniform.model.items():
        assert torch.allclose(tensor, equal.model[name], atol=1e-7)


def test_ascents_that_are_the_base_optimizer_or_asam() -> None:
    """E14, through the method: rho 0 is the plain step; masks of everything with the ascent on the batch are ASAM."""

    def run(**sam: Any) -> Any:
        module = UnifiedSharpness(**({"start": 1, "every": 1} | sam))
        return federation(UFPS(local=LOCAL, teachers=TEACH, **(OFF | {"sam": module})))[0].model

    plain = federation(UFPS(local=LOCAL, teachers=TEACH, **OFF))[0].model
    assert same(run(ascent="original", sharpness=Sharpness(rho=0)), plain)
    assert same(run(ascent="original", sparsity=Sparsity(top=0, extra=0)), plain)
    asam = run(ascent="original", masks="none")
    assert same(run(ascent="original", sparsity=Sparsity(top=1)), asam) and not same(asam, plain)
    assert same(run(ascent="original", masks="local", sparsity=Sparsity(top=1)), asam)
    assert same(run(ascent="original", masks="none", sharpness=Sharpness(share=0.0)), plain)
    half = run(ascent="original", masks="none", sharpness=Sharpness(share=0.2))
    assert not same(half, plain) and not same(half, asam)
    strong = {"cmidg": {"kernels": (1,), "grid": (2,)}}
    variants = [
        run(ascent="none", descent="cmidg", **strong),
        run(ascent="cmidg", masks="none", **strong),
        run(ascent="cmidg", descent="cmidg", masks="none", **strong),
        run(ascent="cmidg", masks="local", sparsity=Sparsity(top=0.1), **strong),
        run(ascent="cmidg", masks="sparse", **strong),
        run(ascent="original", masks="none", sharpness=Sharpness(direction="random")),
    ]
    found = [plain, asam, *variants]
    for i, k in itertools.combinations(range(len(found)), 2):
        assert not same(found[i], found[k]), (i, k)


# ---------------------------------------------------------------------------------------------- labels in their rounds


def taught_site() -> Site:
    _, clients = federation(FULL, rounds=1)
    return clients.members["b"]


def learnt_from(monkeypatch: pytest.MonkeyPatch, r: int) -> tuple[Batch, list[tuple[Batch, Tensor | None]]]:
    """The first batch of a site's second round, as if it were round r, and from what it learns in all steps of that round:
    batches with labels, and their samples' weights."""
    site, seen, whole = taught_site(), [], UFPS.calculate_loss

    def spied(self: Any, l_seg: Any, w_U: Any, r: int, rounds: int, net: nn.Module, batch: Batch) -> Any:
        seen.append((batch, w_U))
        return whole(self, l_seg, w_U, r, rounds, net, batch)

    monkeypatch.setattr(UFPS, "calculate_loss", spied)
    assert len(site.memory[BANK]) == 4  # two batches of two
    method = dataclasses.replace(FULL, sam=None)
    method.local_update(cast(Any, site), tensors_of(Net(len(SPACE))), {}, round=r - 1, rounds=5)
    assert len(seen) == 2 and len(site.memory[BANK]) == 8
    assert ("refined" in site.logged) == (r >= 3)
    return next(iter(site.batches(batch=2, steps=2))), seen


@pytest.mark.parametrize(("r", "weighed"), [(1, False), (2, True), (3, True), (4, False)])
def test_batches_are_completed_and_weighed_in_their_rounds(monkeypatch, r: int, weighed: bool) -> None:
    batch, ((done, w_U), _) = learnt_from(monkeypatch, r)
    assert torch.equal(done.image, batch.image) and done.known.all()
    assert (w_U is not None) == weighed
    own = torch.isin(batch.target, torch.tensor([3, 4]))
    assert torch.equal(torch.isin(done.target, torch.tensor([3, 4])), own)  # I6
    assert torch.equal(done.target[own], batch.target[own])


def test_what_the_global_model_says_is_not_what_the_teachers_say(monkeypatch) -> None:
    found = [learnt_from(monkeypatch, r)[1][0][0].target for r in (4, 1)]
    assert not torch.equal(*found)


def test_one_net_for_all_teachers_or_one_for_each() -> None:
    site = taught_site()
    assert sorted(site.memory[MEMORY]) == ["a", "b", "c"]
    assert {name: kept["classes"] for name, kept in site.memory[MEMORY].items()} == {
        "a": [1],
        "b": [3, 4],
        "c": [2],
    }
    one, every = (Maker(site, Teaching(resident=kind), LOCAL, LossChoice()) for kind in ("one", "all"))  # type: ignore[arg-type]
    image = site.image
    for _ in range(2):
        a, b = one.merged(image), every.merged(image)
        assert torch.equal(a.logits, b.logits) and torch.equal(a.masks, b.masks)
    assert len(one.nets) == 1 and len(every.nets) == 3


def test_only_teachers_that_are_needed_are_asked() -> None:
    site = taught_site()
    maker = Maker(site, Teaching(), LOCAL, LossChoice())  # type: ignore[arg-type]
    (batch,) = site.batches(batch=2, steps=1)
    asked: list[str] = []
    real = maker.net
    maker.net = lambda name: (asked.append(name), real(name))[1]  # type: ignore[method-assign]
    done = maker(batch)
    assert asked == ["a", "c"] and done.known.all()
    assert torch.equal(done.target, maker.complete(batch, maker.merged(batch.image).masks).target)


# ------------------------------------------------------------------------------------------------- rounds and messages


def test_what_travels_beyond_fedavg() -> None:
    """Two numbers, and one bit per parameter each way, from their rounds on."""
    state, clients = begin(FULL)
    packed = sum(math.ceil(p.numel() / 8) for p in own_parameters(Net(len(SPACE))).values())
    assert state.disagree == {}
    for r in range(1, 6):
        state = FULL.round(state, clients)
        sizes = {b for name, at, b in clients.bytes if name == "local_update" and at == r - 1}
        assert sizes == {16 + (packed if r >= 2 else 0)}
        assert size(state.disagree) == (packed if r >= 2 else 0)
        assert state.teachers == {}
    masks = unpack_bits(state.disagree, own_parameters(Net(len(SPACE))))  # type: ignore[arg-type]
    assert any(mask.any() for mask in masks.values())


def test_gradients_are_logged_where_asked_and_change_nothing() -> None:
    """In the rounds with an ascent alone, and within what a log may hold."""
    asked = dataclasses.replace(FULL, sam=dataclasses.replace(SAM, gradients=True))
    for rounds in (1, 3):
        (state, clients), (plain, others) = federation(asked, rounds), federation(FULL, rounds)
        assert bits(state) == bits(plain)
        for name, site in clients.members.items():
            assert {"steeper", *RATIOS} <= set(site.logged) if rounds > 1 else "steeper" not in site.logged
            assert "steeper" not in others.members[name].logged
            egress.check_log(site.logged, what=name)
            if rounds > 1:
                assert 0 < site.logged["steeper"] < 1
                assert sorted(RATIOS, key=site.logged.__getitem__) == list(RATIOS)
    with pytest.raises(FederationError, match="gradients is true and ascent is none"):
        UnifiedSharpness(ascent="none", descent="cmidg", gradients=True)
    half = dataclasses.replace(asked, local=dataclasses.replace(LOCAL, precision="fp16"))
    with pytest.raises(FederationError, match="fp16"):
        half.examine(Net(len(SPACE)), list(OWNS))


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_resumed_in_every_phase_ends_in_the_same_bits(at: int) -> None:
    whole, _ = federation(FULL, rounds=5)
    state, clients = federation(FULL, rounds=at)
    kept = wire.encode(to_tree(state))
    memories = {name: wire.encode(site.memory) for name, site in clients.members.items()}
    _, again = begin(FULL)
    for name, site in again.members.items():
        site.memory = wire.decode(memories[name])
    assert set(again.members["a"].memory) >= {MEMORY, BANK} and (MASKS in again.members["a"].memory) == (
        at >= 2
    )
    state = from_tree(type(state), wire.decode(kept))
    for _ in range(at, 5):
        state = FULL.round(state, again)
    assert bits(state) == bits(whole)


def test_some_sites_take_part_in_a_round() -> None:
    method = dataclasses.replace(FULL, participation=2)
    state, clients = begin(method)
    seen = set()
    for r in range(1, 6):
        state = method.round(state, clients)
        took = [name for name, site in clients.members.items() if site.round == r - 1]
        assert len(took) == 2
        seen |= set(took)
        # a site that was not yet called has no teachers of others, and the server keeps them for it
        assert (state.teachers == {}) == (state.served == sorted(OWNS))
    assert seen == set(OWNS)
    again, _ = federation(method, rounds=5)
    assert bits(again) == bits(state)


def test_published_switches_run() -> None:
    """The official code's choices, together."""
    method = dataclasses.replace(
        FULL,
        teachers=Teaching(rounds=1, exclusive=False, resident="all"),
        uncertainty=Uncertainty(softmax="depth", average="present", source="pseudo"),
        ws=WeightScheduler(
            start=2, end=4, schedule="round_trip", centre="mean", period="all", activation="softmax"
        ),
        rce=AdaptiveRCE(start=3, form="official"),
        ua=UncertaintyAggregation(start=3, variance_sign=1, ddof=1),
        sam=dataclasses.replace(SAM, sparsity=Sparsity(score="momentum", draw="tensor", history="momentum")),
    )
    state, _ = federation(method, rounds=5)
    assert all(torch.isfinite(value).all() for value in state.model.values())
    assert not same(state.model, federation(FULL, rounds=5)[0].model)


def test_a_round_asks_for_no_net_with_its_first_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those may be a file of first weights, which a run needs once."""
    method = dataclasses.replace(FULL, ua=UncertaintyAggregation(start=1))
    state, clients = begin(method)
    made, given = clients.network, list[Any]()
    monkeypatch.setattr(clients, "network", lambda model=None: given.append(model) or made(model))
    method.round(method.round(state, clients), clients)
    assert len(given) == 3 and all(model is not None for model in given)  # for UA twice, for the masks once


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("method", "space", "words"),
    [
        (UFPS(), LabelSpace(("lung", "heart"), exclusive=False), "exclusive"),
        (UFPS(loss=LossChoice(name="marginal_dice_ce")), SPACE, "ws"),
        (
            UFPS(loss=LossChoice(), ws=None, rce=None, teachers=Teaching(exclusive=False)),
            SPACE,
            "overlap|one class",
        ),
    ],
)
def test_what_does_not_fit_is_refused(method: UFPS, space: LabelSpace, words: str) -> None:
    with pytest.raises(FederationError, match=words):
        method.check(space)


def test_a_net_without_the_part_and_too_few_sites() -> None:
    for wanted in (["decodr"], ["decoder", "decodr"]):
        with pytest.raises(FederationError, match="decodr"):
            part_names(Net(5), wanted)
    assert part_names(Net(5), ["deep_supervision", "head"]) == ["head.weight", "head.bias"]
    with pytest.raises(FederationError, match="a whole round"):
        AdaptiveRCE(start=2.5)
    with pytest.raises(FederationError, match="no sample is ever weighed"):
        WeightScheduler(start=5, end=5)
    late = dataclasses.replace(FULL, ua=UncertaintyAggregation(start=6))
    with pytest.raises(FederationError, match=r"ua.start is 6.*5 rounds"):
        late.plan(5)
    assert FULL.plan(5) == [
        "ufps: ws in rounds 2 to 3, rce in rounds 3 to 5, gmt in rounds 3 to 5, ua in rounds 3 to 5, sam in rounds 2 to 5"
    ]
    assert "ws in no round" in UFPS().plan(4)[0]
    with pytest.raises(FederationError, match="foreground"):
        UFPS(loss=LossChoice(name="dice_bce", options={"channels": "foreground"})).check(SPACE)
    with pytest.raises(FederationError, match="teachers.local.*stepps"):
        UFPS(teachers=Teaching(local={"stepps": 1})).check(SPACE)
    assert Teaching(local={"epochs": 1, "lr": 1}).training(LOCAL) == dataclasses.replace(
        LOCAL, steps=None, epochs=1, lr=1
    )
    part = from_dict(UFPS, {"loss": {"options": {"power": 1}}}, what="method")
    assert part.loss == LossChoice(name="dice_bce", options={"power": 1})
    other = from_dict(UFPS, {"loss": {"name": "marginal_dice_ce"}}, what="method")
    assert other.loss == LossChoice(name="marginal_dice_ce")
    with pytest.raises(FederationError, match="participation is 4"):
        UFPS(participation=4).examine(Net(5), ["a", "b"])
    with pytest.raises(FederationError, match="does nothing"):
        UnifiedSharpness(ascent="none")
    assert "teacher" in UFPS().examine(Net(5), ["a", "b"])[0]


@pytest.mark.parametrize("name", ["fedmenu", "condistfl", "fedatlas", "mib"])
def test_labels_that_overlap_are_refused_where_the_method_within_reads_them(name: str) -> None:
    def within(**options: Any) -> PseudoLabels:
        chosen = {"loss": {"name": "dice_bce"}, **options}
        return PseudoLabels(inner=MethodChoice(name, chosen), teachers=Teaching(exclusive=False))

    with pytest.raises(FederationError, match=f"{name} reads one class per voxel"):
        within().check(SPACE)
    within(
        **{
            "fedmenu": {"agd": "none"},
            "condistfl": {"filter": False},
            "fedatlas": {"teach": 0.0},
            "mib": {"lambda_kd": 0.0},
        }[name]
    ).check(SPACE)


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ({"name": "pseudo_labels"}, "is pseudo_labels"),
        ({"name": "centralized"}, "sites train apart"),
        ({"name": "fixmatch"}, "not for segmentation"),
        ({"name": "ms_kd"}, "teachers of its own"),
        ({"name": "ufps"}, "teachers of its own"),
        ({"name": "kim"}, "teachers of its own"),
        ({"name": "condistfl", "options": {"teacher": "cached"}}, "cached"),
        ({"name": "fedavgg"}, "fedavg"),
        ({"name": "fedprox", "options": {"local": {}}}, "key `local`"),
        ({"name": "fedprox", "options": {"muu": 1}}, "mu"),
    ],
)
def test_methods_that_cannot_be_within(inner: dict[str, Any], words: str) -> None:
    with pytest.raises(FederationError, match=words):
        PseudoLabels(inner=MethodChoice(**inner)).check(SPACE)


class TwoHeads(Net):
    """In training it has two heads."""

    def forward(self, x: Tensor) -> Any:
        z = super().forward(x)
        return [z, 0.5 * z.flip(1)] if self.training else z


@pytest.mark.parametrize("activation", [None, "softmax"])
@pytest.mark.parametrize("heads", ["encoder", "halving"])
def test_the_objective_of_a_round_written_out(activation: Any, heads: Any) -> None:
    """Alg. 4, with every option that it reads."""
    options = {"head_weights": heads}
    method = UFPS(
        ws=WeightScheduler(activation=activation),
        rce=AdaptiveRCE(start=1, coefficient=0.3),
        loss=LossChoice(name="dice_bce", options=options),
    )
    site, net, w_U = taught_site(), TwoHeads(len(SPACE)), torch.tensor([0.5, 0.9])
    (batch,) = site.batches(batch=2, steps=1)
    l_seg = cast(DiceBCE, losses.make(method.loss, SPACE))
    terms = method.calculate_loss(l_seg, w_U, 3, 4, net, batch)
    q, kind = net(batch.image), activation or "sigmoid"
    each = [
        DiceBCE(activation=kind, **options)(
            [z[b : b + 1] for z in q], batch.target[b : b + 1], batch.known[b : b + 1]
        )  # type: ignore[arg-type]
        for b in range(2)
    ]
    torch.testing.assert_close(terms["supervised"], (0.5 * each[0] + 0.9 * each[1]) / 2)
    reverse = rce(q, batch.target, batch.known, head_weights=heads)
    torch.testing.assert_close(terms["reverse"], 0.3 * math.exp(-20 * (1 - 3 / 4)) * reverse)
    plain = method.calculate_loss(l_seg, None, 3, 4, net, batch)
    torch.testing.assert_close(plain["supervised"], l_seg(q, batch.target, batch.known))


def test_the_schedule_runs_up_to_its_end_or_over_all_rounds() -> None:
    U = torch.linspace(0, 1, 9)
    for period, R in (("end", 5), ("all", 20)):
        ws = WeightScheduler(start=2, end=0.25, period=period)  # type: ignore[arg-type]
        w = [UFPS(ws=ws).w(BANK_VALUES, r, 20) for r in range(1, 7)]
        assert [one is not None for one in w] == [False, True, True, True, False, False]
        assert torch.equal(cast(Any, w[3])(U), weigher(BANK_VALUES, ws, 4, R)(U))


def test_sites_are_weighed_by_the_uncertainty_of_all_rounds() -> None:
    """Eq. (7): by mean and variance of the whole bank, each with its own temperature."""
    ua = UncertaintyAggregation(start=1)
    method = UFPS(local=LOCAL, teachers=TEACH, **(OFF | {"ua": ua}))
    state, clients = federation(method, rounds=2)
    told, call = list[Any](), clients.call
    clients.call = lambda *a, **k: told.append(call(*a, **k)) or told[-1]  # type: ignore[method-assign]
    after = method.round(state, clients)
    (replies,) = told
    for name, reply in replies:
        bank = clients.members[name].memory[BANK]
        assert len(bank) == 12 and (reply["mean"], reply["variance"]) == moments(bank, 0)
    n = replies.plain("n")
    A = A_hat(replies.plain("mean"), replies.plain("variance"), n, ua)
    own = dict.fromkeys(part_names(Net(len(SPACE)), ua.parts), A)
    assert same(after.model, average(replies.each("model"), n, each=own))


@pytest.mark.parametrize(("every", "rounds"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (3, [1, 4])])
def test_masks_follow_in_every_nth_round_from_the_first(monkeypatch, every: int, rounds: list[int]) -> None:
    seen, whole = list[int](), ufps.SparseMask

    def spied(*given: Any, update: bool, **more: Any) -> Any:
        if update:
            seen.append(r)
        return whole(*given, update=update, **more)

    monkeypatch.setattr(ufps, "SparseMask", spied)
    sam = dataclasses.replace(SAM, start=1, every=every)
    site, method = taught_site(), UFPS(local=LOCAL, teachers=TEACH, **(OFF | {"sam": sam}))
    for r in range(1, 6):
        method.local_update(cast(Any, site), tensors_of(Net(len(SPACE))), {}, round=r - 1, rounds=5)
    assert seen == rounds


@pytest.mark.parametrize("source", ["teachers", "pseudo"])
def test_whose_predictions_are_judged(monkeypatch, source: Any) -> None:
    site: Any = taught_site()
    told, judged, real = list[Any](), list[Any](), (ufps.global_labels, ufps.uncertainty)
    monkeypatch.setattr(ufps, "global_labels", lambda *a: told.append(real[0](*a)) or told[-1])
    monkeypatch.setattr(
        ufps, "uncertainty", lambda merged, how: judged.append(merged) or real[1](merged, how)
    )
    method = dataclasses.replace(FULL, sam=None, uncertainty=Uncertainty(source=source))
    method.local_update(site, tensors_of(Net(len(SPACE))), {}, round=2, rounds=5)
    assert len(told) == len(judged) == 2
    assert all((a is b) == (source == "pseudo") for a, b in zip(told, judged, strict=True))


def test_a_round_in_which_nobody_sends_a_mask_keeps_the_last(monkeypatch) -> None:
    """As where every gradient overflowed in fp16."""
    state, clients = federation(FULL, rounds=2)
    monkeypatch.setattr(ufps.SparseMask, "sent", lambda self: {})
    after = FULL.round(state, clients)
    assert state.disagree and same(after.disagree, state.disagree)


def test_a_class_without_a_teacher_is_not_the_global_teachers(monkeypatch) -> None:
    """Its logit may be the largest: the voxel has the most probable of the classes that are taught."""
    site: Any = taught_site()
    maker, net, taught = Maker(site, TEACH, LOCAL, LossChoice()), Net(len(SPACE)), torch.arange(5) != 2
    with torch.no_grad():
        net.head.bias[2] += 100
    said = ufps.global_labels(net.eval(), site.image, taught, maker)
    z = net(site.image).masked_fill(~taught.reshape(1, -1, 1, 1), -math.inf)
    assert torch.equal(said.masks, z.argmax(1)[:, None] == torch.arange(5).reshape(1, -1, 1, 1))
    assert not said.logits[:, 2].any() and torch.equal(said.logits[:, taught], z[:, taught])


def test_teachers_are_asked_for_what_any_sample_of_a_batch_lacks() -> None:
    site: Any = taught_site()
    (batch,) = site.batches(batch=2, steps=1)
    known = torch.ones_like(batch.known)
    known[0, 1] = known[1, 2] = False
    done = Maker(site, TEACH, LOCAL, LossChoice())(dataclasses.replace(batch, known=known))
    assert done.known.all()
