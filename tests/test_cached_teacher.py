"""ConDistFL's cached teacher: the same patches, what is kept of a prediction, and how far it is from the online teacher."""

import contextlib
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import last_state
from torch import Tensor, nn

from fedatlas import losses
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Site
from fedatlas.core.errors import DiskFull, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import tensors_of
from fedatlas.data.predictions import CaseMaps
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import parse_federation
from fedatlas.learning.augment import OFF, STRONG, Augmentation, augment, augment_along
from fedatlas.learning.loop import Local, train
from fedatlas.losses import LossChoice
from fedatlas.methods.condistfl import ConDistFL, logits_of
from fedatlas.transport.host import HostedSite

HOW: dict[str, Any] = {"overlap": 0.0, "windows": 2, "keep": None, "partly": True, "gigabytes": 1.0}
EXCLUSIVE = LabelSpace(("background", "a", "b", "c"))
OVERLAPPING = LabelSpace(("a", "b", "c", "d"), exclusive=False)


def experiment_of(small: dict[str, Any], **changes: Any) -> Experiment:
    made = Experiment(parse_federation(small | changes, base=Path()), Path(small["engine"]["cache"]))
    made.prepare()
    return made


def hosted(experiment: Experiment, folder: Path, name: str | None = None) -> HostedSite:
    name = name or min(experiment.training)
    parts = (experiment.federation.seed, name, 1, 0)
    return HostedSite(
        name, experiment.training[name], experiment.make_net, {}, generator(*parts), torch.device("cpu"), folder, parts
    )  # fmt: skip


def predicted(site: HostedSite, net: nn.Module, **how: Any) -> contextlib.AbstractContextManager[Site]:
    return site.with_predictions(net, within=contextlib.nullcontext(), **(HOW | how))


def volumes_3d(small: dict[str, Any], patch: list[int], **changes: Any) -> dict[str, Any]:
    return small | {"preprocessing": {"spacing": [8, 8, 8], "window": [-100, 200], "patch": patch}} | changes


@pytest.mark.parametrize("dims", [2, 3])
def test_maps_move_with_the_image_and_change_nothing_of_it(dims: int) -> None:
    size = (12, 14, 10)[:dims]
    rng = generator("maps")
    image, target = torch.rand(6, 2, *size, generator=rng), torch.randint(0, 4, (6, *size), generator=rng)
    how = Augmentation(elastic=1.0, p_elastic=0.5, mirror=(0,), p_rotation=0.7)  # type: ignore[call-arg]
    plain = augment(image, target, how, generator("a"))
    onehot = torch.nn.functional.one_hot(target, 4).movedim(-1, 1).float()
    moved, labels, along = augment_along(image, target, onehot, how, generator("a"))
    assert torch.equal(moved, plain[0]) and torch.equal(labels, plain[1]) and not torch.equal(labels, target)
    torch.testing.assert_close(along.sum(1), torch.ones(6, *size))
    assert (along.argmax(1) == labels).float().mean() > 0.8  # labels without any order
    # the image itself as a map: it moves alike, and its intensities stay
    still = Augmentation(p_noise=0, p_blur=0, p_brightness=0, p_contrast=0, p_gamma=0)  # type: ignore[call-arg]
    varied, _, same = augment_along(image, target, image, still, generator("b"))
    assert torch.equal(varied, same)


@pytest.mark.parametrize("dims", [2, 3])
def test_batches_are_those_without_predictions(dims: int, small, tmp_path) -> None:
    experiment = experiment_of(small if dims == 2 else volumes_3d(small, [16, 16, 16]))
    net = experiment.make_net()
    plain_site, site = hosted(experiment, tmp_path / "a"), hosted(experiment, tmp_path / "b")
    plain = [list(plain_site.batches(batch=3, steps=3)) for _ in range(2)]
    with predicted(site, net, partly=False) as told:
        along = list(told.batches(batch=3, steps=3))
    after = list(site.batches(batch=3, steps=3))  # the second call, as without predictions
    for a, b in zip(plain[0] + plain[1], along + after, strict=True):
        assert torch.equal(a.image, b.image) and torch.equal(a.target, b.target) and a.case == b.case
        assert a.along is None
    for batch in along:
        assert batch.along is not None and batch.along.dtype == torch.float32
        assert batch.along.shape == (3, len(experiment.space), *batch.image.shape[2:])
        torch.testing.assert_close(batch.along.sum(1), torch.ones_like(batch.along[:, 0]))
    assert after[0].along is None and net.training
    assert not list(tmp_path.rglob(".predictions-*"))


@pytest.mark.parametrize("space", [EXCLUSIVE, OVERLAPPING], ids=["exclusive", "overlapping"])
def test_what_is_kept_of_a_probability(space: LabelSpace, tmp_path) -> None:
    z = 6 * torch.randn(4, 5, 6, 7, generator=generator("kept"))
    p = z.softmax(0) if space.exclusive else z.sigmoid()
    p[:, 0, 0, 0], p[0, 0, 0, 0] = 0.0, 1.0
    maps = CaseMaps(tmp_path, space, None)
    maps.put(3, p)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) == maps.bytes_per_voxel * 5 * 6 * 7
    back = read(maps, p)
    # 8 bits, counted from 0 or from 1
    assert ((back - p).abs() <= torch.minimum(p, 1 - p) * 2**-8 + 1e-7).all()
    # so that conditional probabilities are near too, at a temperature that spreads them
    method, row = ConDistFL(tau=2.0), [(0,), (2,), (3,)]
    for there in (slice(1, None), slice(None)):
        a, b = (logits_of(q[None, :, there], space.exclusive) for q in (p, back))
        found = [
            method.conditional(v, [0, 2, 3], row) if space.exclusive else method.overlapping(v, row)
            for v in (a, b)
        ]
        assert (found[0] - found[1]).abs().max() < 2e-3


def read(maps: CaseMaps, p: Tensor) -> Tensor:
    out = maps.empty(p.shape[1:])
    maps.cut(3, np.zeros(p.shape[1:], np.uint8), p.shape[1:], None, np.random.default_rng(0), out)
    return maps.open([out], torch.device("cpu"))[0]


def test_only_the_largest_probabilities_are_kept_where_asked(tmp_path) -> None:
    p = (3 * torch.randn(4, 5, 6, 7, generator=generator("kept"))).softmax(0)
    maps = CaseMaps(tmp_path, EXCLUSIVE, 2)
    maps.put(3, p)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) == 6 * 5 * 6 * 7
    back, top = read(maps, p), p.topk(2, 0)
    torch.testing.assert_close(back.gather(0, top.indices), top.values, atol=2e-3, rtol=0)
    torch.testing.assert_close(back.sum(0), torch.ones(5, 6, 7))
    others = torch.ones_like(p, dtype=torch.bool).scatter(0, top.indices, False)
    left = ((1 - top.values.sum(0)) / 2).expand(4, 5, 6, 7)
    torch.testing.assert_close(back[others], left[others], atol=2e-3, rtol=0)
    overlapping = CaseMaps(tmp_path, OVERLAPPING, 2)
    overlapping.put(3, p)
    assert (read(overlapping, p)[others] == 0).all()
    assert CaseMaps(tmp_path, EXCLUSIVE, 4).keep is None


def test_beyond_the_case_there_is_background(small, tmp_path) -> None:
    experiment = experiment_of(volumes_3d(small, [64, 64, 64], augmentation=OFF_PLAIN))
    site = hosted(experiment, tmp_path)
    with predicted(site, experiment.make_net(), partly=False) as told:
        (batch,) = told.batches(batch=1, steps=1)
    assert batch.along is not None
    outside = (batch.along[:, 0] == 1) & (batch.along[:, 1:] == 0).all(1)
    assert 0 < outside.sum() < outside.numel() and (batch.target[outside] == 0).all()
    torch.testing.assert_close(batch.along.sum(1), torch.ones_like(batch.along[:, 0]))


OFF_PLAIN = {name: getattr(OFF, name) for name in OFF.__dataclass_fields__ if name.startswith("p_")}


def losses_of(
    method: ConDistFL, net: nn.Module, teacher: nn.Module, batch: Batch, space: LabelSpace
) -> list[Tensor]:
    found = []
    for F_g in (teacher, None):
        terms: Any = method.L_total(F_g, 1.0, space)(net, batch)
        found += [terms["condist"], *torch.autograd.grad(terms["condist"], list(net.parameters())[-1:])]
    return found


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_unvaried_whole_images_equal_the_online_teacher(exclusive: bool, tau: float, small, tmp_path) -> None:
    """Up to the rounding of what is kept."""
    probe = experiment_of(volumes_3d(small, [16, 16, 16]))
    name = min(probe.training)
    images = [
        probe.training[name]._entry(item).arrays["image"].shape
        for item in probe.training[name].items["train"]
    ]
    patch = [4 * -(-max(shape[axis] for shape in images) // 4) for axis in (1, 2, 3)]
    changes: dict[str, Any] = {"augmentation": OFF_PLAIN}
    if not exclusive:
        changes["labels"] = {"exclusive": False}
    experiment = experiment_of(volumes_3d(small, patch, **changes))
    site = hosted(experiment, tmp_path, name)
    teacher, student = experiment.make_net(), experiment.make_net()
    with torch.no_grad():
        for number, parameter in enumerate([*teacher.parameters(), *student.parameters()]):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator("net", number))
    teacher.eval()
    inside = torch.zeros(())
    with predicted(site, teacher) as told:
        for batch in told.batches(batch=2, steps=2):
            assert batch.along is not None
            z = teacher(batch.image).detach()
            p = z.softmax(1) if exclusive else z.sigmoid()
            # the padding is part of what the online teacher sees, and no part of the case
            known_voxels = (batch.image != 0).any(1, keepdim=True)
            assert ((p - batch.along).abs() * known_voxels).max() < 3e-3
            inside = inside + known_voxels.float().mean()
            cut = Batch(
                batch.image,
                batch.target,
                batch.known,
                batch.case,
                along=torch.where(known_voxels, batch.along, p),
            )
            method = ConDistFL(tau=tau, filter=False)
            online, g_online, cached, g_cached = losses_of(method, student, teacher, cut, experiment.space)
            assert cached.item() == pytest.approx(online.item(), abs=1e-3) and online.item() > 0.01
            torch.testing.assert_close(g_cached, g_online, atol=2e-2 * float(g_online.abs().max()), rtol=0)
    assert inside > 0
    assert site.logged["predicted_windows"] == site.n_train


def test_cases_without_anything_to_distil_are_left_out(small, tmp_path) -> None:
    experiment = experiment_of(volumes_3d(small, [16, 16, 16]))
    site = hosted(experiment, tmp_path)
    train = site.source.items["train"]  # type: ignore[attr-defined]
    partial = sum(len(item.known) < len(experiment.space.foreground) for item in train)
    with predicted(site, experiment.make_net()) as told:
        assert len(told.along._files) == partial  # type: ignore[attr-defined]
    with predicted(site, experiment.make_net(), partly=False) as told:
        assert len(told.along._files) == len(train)  # type: ignore[attr-defined]


def test_files_are_bounded_and_never_stay(small, tmp_path, monkeypatch) -> None:
    experiment = experiment_of(small)
    site, net = hosted(experiment, tmp_path), experiment.make_net()
    (tmp_path / ".predictions-killed").mkdir()
    (tmp_path / ".predictions-killed" / "0-values").write_bytes(b"left by a process that was killed")
    with (
        pytest.raises(FederationError, match=r"take .* GB, 1e-09 are allowed; .*keep fewer classes"),
        predicted(site, net, gigabytes=1e-9),
    ):
        raise AssertionError
    assert not list(tmp_path.glob(".predictions-*"))
    with pytest.raises(KeyError), predicted(site, net):
        assert len(list(tmp_path.glob(".predictions-*/*"))) > 0
        raise KeyError
    assert not list(tmp_path.glob(".predictions-*"))

    def full(self: CaseMaps, number: int, p: Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CaseMaps, "put", full)
    with pytest.raises(DiskFull, match="No space left"), predicted(site, net):
        raise AssertionError
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(DiskFull, match=r"has 0\.0 left; free space"), predicted(site, net):
        raise AssertionError
    assert not list(tmp_path.glob(".predictions-*")) and not net._forward_pre_hooks


CACHED = {"name": "condistfl", "teacher": "cached"}


@pytest.mark.parametrize("exclusive", [pytest.param(True, marks=pytest.mark.slow), False])
def test_equal_bits_in_process_in_workers_and_resumed(
    exclusive: bool, small, shared_workers, tmp_path
) -> None:
    small["method"] = CACHED | ({} if exclusive else {"cached": {"classes": 2}})
    if not exclusive:
        small["labels"] = {"exclusive": False}

    def run(path: Path) -> bytes:
        found = last_state(small, path)
        assert not list(path.rglob(".predictions-*"))
        return found

    whole = run(tmp_path / "whole")
    small["engine"]["workers"] = 1
    assert run(tmp_path / "workers") == whole
    small["engine"]["workers"] = 0
    assert run(tmp_path / "workers") == whole


def test_without_distillation_the_teacher_makes_no_difference(small, tmp_path) -> None:
    """E11 of the cached teacher, bit for bit."""
    none = CACHED | {"lambda_start": 0, "lambda_end": 0}
    one, other = (
        last_state(small | {"method": method, "rounds": 1}, tmp_path / method["name"])
        for method in (none, {"name": "fedavg", "weights": "equal"})
    )
    assert one == other


def test_a_teacher_that_is_not_known_is_refused(small) -> None:
    small["method"] = CACHED | {"teacher": "chached"}
    with pytest.raises(FederationError, match="teacher.*online.*cached"):
        Experiment(parse_federation(small, base=Path()), Path(small["engine"]["cache"]))


def test_the_teachers_memory_is_let_go(small, tmp_path) -> None:
    """While the student trains, no second net is alive."""
    experiment = experiment_of(small, method=CACHED)
    site = hosted(experiment, tmp_path)
    made: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []
    make = site.make_net

    def watched(name: str) -> nn.Module:
        net = make(name)
        made.append(weakref.ref(net))
        net.register_forward_hook(
            lambda module, *_: (
                alive.append(sum(ref() is not None for ref in made)) if module.training else None
            )
        )
        return net

    site.make_net = watched
    method: Any = experiment.method
    method.local_update(site, model=tensors_of(experiment.make_net()), round=0, rounds=2)
    assert len(made) == 2 and set(alive) == {1}


def test_how_far_it_is_from_the_teacher_that_sees_the_augmented_patch(small, tmp_path) -> None:
    """Near, and further with more augmentation; numbers of a larger net are in docs/explanation/condistfl.md."""
    first = small["sites"][0]["path"]
    small["preprocessing"]["patch"] = [20, 20]
    site = {"name": "full", "path": first, "table": "all_labels.json", "labels": "labelsTr_all"}
    full = experiment_of(small | {"sites": [site]})
    teacher = full.make_net()
    told = hosted(full, tmp_path / "full")
    local = Local(batch=8, steps=60, lr=1e-2)  # type: ignore[call-arg]
    train(told, teacher, losses.supervised(LossChoice(), told), local, round=0, rounds=1)  # type: ignore[call-arg]
    teacher.eval().requires_grad_(False)
    distance, chance = [], []
    strong = {name: getattr(STRONG, name) for name in STRONG.__dataclass_fields__}
    for augmentation in (OFF_PLAIN, {}, strong):
        experiment = experiment_of(small | {"sites": [site]}, augmentation=augmentation)
        with predicted(hosted(experiment, tmp_path), teacher, partly=False, overlap=0.25) as along:
            batches = list(along.batches(batch=8, steps=10))
        found = [(teacher(batch.image).softmax(1), batch.along) for batch in batches]
        distance.append(float(torch.stack([(q - p).abs().mean() for q, p in found]).mean()))
        chance.append(float(torch.stack([(q - p.roll(1, 0)).abs().mean() for q, p in found]).mean()))
    assert distance[0] < distance[1] < distance[2]
    assert distance[1] < 0.5 * chance[1]


@pytest.mark.parametrize("how", [{"spacing": torch.tensor([[1.0, 4.0]] * 4)}, {"images": 2}])
def test_with_maps_images_are_varied_as_without(how: dict[str, Any]) -> None:
    """Voxels that are no cubes, and slices that belong to two images."""
    rng = generator("maps")
    image, target = torch.rand(4, 6, 16, 14, generator=rng), torch.randint(0, 4, (4, 16, 14), generator=rng)
    plain = augment(image, target, STRONG, generator("a"), **how)
    moved, labels, _ = augment_along(image, target, image[:, :1], STRONG, generator("a"), **how)
    assert torch.equal(moved, plain[0]) and torch.equal(labels, plain[1])
    other = augment(image, target, STRONG, generator("a"))
    assert not torch.equal(other[0], plain[0])
