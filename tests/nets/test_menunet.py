"""MENU-Net: the official net's numbers and sizes, parts, one grouped computation, and what it refuses."""

from typing import Any, cast

import pytest
import torch
from menunet_vectors import under, vectors
from torch import Tensor, nn
from torch.nn import functional as F

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import load, parts, tensors_of
from fedatlas.nets.menunet import MENUNet, MENUNetModule

CASES: list[tuple[dict[str, Any], int]] = [
    ({"width": 2, "levels": 2}, 2),
    ({"width": 1, "levels": 2, "agd": False}, 3),
    ({"width": 2, "levels": 3, "deep_supervision": True, "affine": True, "groups": [[3, 1]]}, 2),
    ({"width": 1, "levels": 2, "strides": [[2, 2, 1], 2]}, 3),
]


def build(options: dict[str, Any], dims: int, classes: int = 4, seed: int = 1) -> MENUNetModule:
    options = {"width": 2, "levels": 2} | options
    net = nets.build("menunet", options, in_channels=2, classes=classes, spatial_dims=dims, seed=seed)
    return cast(MENUNetModule, net)


def images(net: MENUNetModule) -> Tensor:
    return torch.randn(2, 2, *(2 * by for by in net.divisor), generator=generator("images"))


def size_of(**options: Any) -> int:
    with torch.device("meta"):
        net = MENUNet(**options).build(in_channels=1, classes=6, spatial_dims=3)
    return sum(p.numel() for p in net.parameters())


def test_the_published_sizes() -> None:
    assert size_of(deep_supervision=True) == 77_603_558
    assert size_of() == 77_603_558 - 6 * (800 + 400 + 200 + 100) - 4 * 6
    one = ((1, 2, 3, 4, 5),)
    assert size_of(width=96, groups=one, agd=False, deep_supervision=True) == 96_612_126


def test_one_organ_has_the_features_of_a_unet() -> None:
    """E22: with one sub-encoder the decoder is that of a U-Net of the same width, and so is that of M of them."""
    one = build({"width": 6, "groups": [[1, 2, 3]], "agd": False}, 2)
    three = build({"width": 2}, 2)
    assert [e.shape for e in one.decoder.parameters()] == [e.shape for e in three.decoder.parameters()]
    assert set(parts(one)) == {"encoder:0", "decoder", "head"}
    widths: list[int] = []
    for module in one.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.register_forward_hook(lambda module, args, out: widths.append(out.shape[1]))
    one(images(one))
    assert widths == [6, 6, 12, 12, 12, 12, 12, 6, 6, 6, 6, 6, 4]


@pytest.mark.parametrize("grouped", [False, True])
def test_the_official_forward(grouped: bool) -> None:
    v = vectors("fedmenu_menunet_forward")
    net = MENUNet(width=2, deep_supervision=True, grouped=grouped).build(
        in_channels=1, classes=3, spatial_dims=3
    )
    load(net, under(v, "sd/"))
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(v["x"]).softmax(1), v["eval_out"], atol=1e-5, rtol=0)
        for place, head in enumerate(net.train()(v["x"])):
            full = F.interpolate(head, v["x"].shape[2:], mode="trilinear").softmax(1)
            torch.testing.assert_close(full, v[f"train_out{place}"], atol=1e-5, rtol=0)
        (levels,) = net(v["x"], experts=[1])
    for level, told in enumerate(levels, 1):
        torch.testing.assert_close(told.softmax(1), v[f"aux_enc1_out{level}"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("options", "dims"), CASES)
def test_forward_names_and_parts(options: dict[str, Any], dims: int) -> None:
    net = build(options, dims)
    nets.check_output(net, 4)
    x = images(net)
    with torch.no_grad():
        outputs, logits = net(x), net.eval()(x)
    assert logits.shape == (2, 4, *x.shape[2:])
    if options.get("deep_supervision"):
        assert [h.shape[2:] for h in outputs] == [(16, 16), (8, 8), (4, 4), (2, 2)]
        assert torch.equal(outputs[0], logits)
    values, named = tensors_of(net), parts(net)
    organs = 2 if "groups" in options else 3
    assert len(net.organs) == organs and set(net.organs[0]) == ({1, 3} if organs == 2 else {1})
    expected = {f"encoder:{m}" for m in range(organs)} | {"decoder", "head"}
    expected |= {"agd"} if options.get("agd", True) else set()
    expected |= {"deep_supervision"} if options.get("deep_supervision") else set()
    assert set(named) == expected
    assert sorted(name for names in named.values() for name in names) == sorted(values)
    assert all(values[name].shape[0] == 4 for name in named["head"])
    for name, value in values.items():
        assert bool((value == 0).all()) == (name.endswith("bias") and "ups" not in name)


@pytest.mark.parametrize(("options", "dims"), CASES)
@pytest.mark.parametrize("frozen", [(), (0,), (0, 1, 2)])
def test_grouped_computes_the_same(options: dict[str, Any], dims: int, frozen: tuple[int, ...]) -> None:
    net = build(options | {"affine": True}, dims)
    x = images(net)
    order = [1, 0]
    for m, encoder in enumerate(net.encoders):
        encoder.requires_grad_(m not in frozen)
        for name, value in encoder.named_parameters():
            if "norms" in name:
                nn.init.uniform_(value, 0.5, 1.5, generator=generator(name, m))
    found = []
    for grouped in (False, True):
        net.grouped = grouped
        net.zero_grad()
        outputs = net(x)
        told = net(x, experts=order) if len(net.agd) else []
        flat = [*(outputs if isinstance(outputs, list) else [outputs]), *(z for one in told for z in one)]
        weighted = [(z * torch.randn(z.shape, generator=generator("weights"))).sum() for z in flat]
        torch.stack(weighted).sum().backward()
        gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        found.append((flat, gradients))
    one = found[0][1]
    assert one.keys() == found[1][1].keys()
    assert any(name.startswith("encoders") for name in one) == (len(frozen) < 3)
    for a, b in zip(*(flat for flat, _ in found), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    scale = max(float(g.abs().max()) for g in one.values())
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, found[1][1][name], atol=1e-5 * scale, rtol=1e-3)
    assert not torch.equal(found[0][0][0], torch.zeros_like(found[0][0][0]))


def test_an_expert_sees_its_own_sub_encoder_alone() -> None:
    net = build({}, 2)
    x = images(net)
    net(x, experts=[2, 0])[0][0].sum().backward()
    touched = {n for n, p in net.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert {name.split(".")[1] for name in touched if "encoders" in name} == {"2"}
    with torch.no_grad():
        both, alone = net(x, experts=[2, 0]), net(x, experts=[0])
    assert all(torch.equal(a, b) for a, b in zip(both[1], alone[0], strict=True))


def test_the_decoder_does_not_read_the_agd() -> None:
    net = build({}, 2).eval()
    x = images(net)
    with torch.no_grad():
        before = net(x)
        for p in net.agd.parameters():
            p.fill_(float("nan"))
        assert torch.equal(net(x), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strides": [2]}, "2 entries"),
        ({"strides": [2, 0]}, "1 or more"),
        ({"strides": [[2, 2, 2], 2]}, "or 2 of them"),
        ({"groups": [[1], [1, 2]]}, "no class is in two"),
        ({"groups": [[4]]}, "1 to 3"),
        ({"groups": [[]]}, "one class or more"),
        ({"wide": 3}, "did you mean 'width'"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        build(options, 2)


def test_no_agd_and_classes_that_overlap() -> None:
    net = build({"agd": False}, 2)
    with pytest.raises(FederationError, match="agd"):
        net(images(net), experts=[0])
    with pytest.raises(FederationError, match="for exclusive classes"):
        nets.check_classes("menunet", net, exclusive=False)


@pytest.mark.parametrize(("name", "options"), [("menunet", {"width": 1}), ("dodnet", {"filters": [8, 8]})])
def test_organs_are_in_the_order_of_their_first_class(name: str, options: dict[str, Any]) -> None:
    """So that an organ keeps its place where a group of new classes joins."""
    for groups, classes, organs in (
        ([[1, 2]], 4, ((1, 2), (3,))),
        ([[1, 2], [5, 4]], 6, ((1, 2), (3,), (5, 4))),
    ):
        chosen = options | {"groups": groups}
        net = nets.build(name, chosen, in_channels=1, classes=classes, spatial_dims=2, seed=1)
        assert cast(Any, net).organs == organs
