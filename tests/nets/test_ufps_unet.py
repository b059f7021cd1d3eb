"""The U-Net of UFPS: the official net's numbers and sizes, its heads and parts, and what it refuses."""

from typing import Any

import pytest
import torch
from menunet_vectors import vectors
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.options import from_dict
from fedatlas.core.seeds import generator, isolated
from fedatlas.core.tensors import load, parts, tensors_of
from fedatlas.nets.ufps_unet import UFPSUNet, UFPSUNetModule

SMALL: dict[str, Any] = {"width": 4, "max_width": 10, "levels": 4}


def build(dims: int, options: dict[str, Any] | None = None, classes: int = 3) -> UFPSUNetModule:
    with isolated("net"):
        chosen = from_dict(UFPSUNet, options or SMALL, what="net ufps_unet")
        return chosen.build(in_channels=2, classes=classes, spatial_dims=dims)


def images(net: UFPSUNetModule) -> Tensor:
    return torch.randn(2, 2, *(2 * by for by in net.divisor), generator=generator("images"))


def ours(name: str) -> str | None:
    """Our name of a tensor of the official net; None for the second name that it gives to a tensor.

    encoder.stages.L.convs.P.conv, .norm -> encoder.L.convs.P, encoder.L.norms.P (the same again as .all.0, .all.2)
    decoder.tus.L                        -> decoder.ups.L, L from the bottom up in both
    decoder.stages.L.convs.P.conv, .norm -> decoder.levels.L.convs.P, decoder.levels.L.norms.P
    decoder.segmentation_output          -> head
    supervision.deep_supervision_outputs.L.0 -> heads.L
    """
    top, *middle, kind = name.split(".")
    if "all" in middle:
        return None
    if top == "supervision":
        return f"heads.{middle[1]}.{kind}"
    if middle == ["segmentation_output"]:
        return f"head.{kind}"
    if middle[0] == "tus":
        return f"decoder.ups.{middle[1]}.{kind}"
    _, level, _, place, layer = middle
    return f"{'encoder' if top == 'encoder' else 'decoder.levels'}.{level}.{layer}s.{place}.{kind}"


def test_the_official_forward() -> None:
    v = vectors("ufps_unet_forward")
    options = UFPSUNet(width=2, max_width=8, strides=[2, 2, 2, 2, [1, 2, 2]])
    net = options.build(in_channels=1, classes=3, spatial_dims=3)
    named = {ours(key.removeprefix("sd/")): value for key, value in v.items() if key.startswith("sd/")}
    load(net, {name: value for name, value in named.items() if name is not None})
    with torch.no_grad():
        decoded, *supervised = net.train()(v["x"])
        outputs = torch.stack([*supervised, decoded], 1)
        logits = net.eval()(v["x"])
    torch.testing.assert_close(outputs[..., ::4, ::4, ::4], v["train_out"], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[..., ::2, ::2, ::2], v["eval_out"], atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs.sum((2, 3, 4, 5)), v["train_sum"], atol=0.5, rtol=1e-4)
    torch.testing.assert_close(outputs.abs().sum(), v["train_abs_sum"], atol=0, rtol=1e-4)


def test_the_published_sizes() -> None:
    for classes, size in ((5, 30_787_584), (3, 30_785_984), (2, 30_785_184)):
        with torch.device("meta"):
            net = UFPSUNet().build(in_channels=1, classes=classes, spatial_dims=3)
        assert sum(p.numel() for p in net.parameters()) == size
        values = dict(net.named_parameters())
        sizes = {part: sum(values[name].numel() for name in names) for part, names in parts(net).items()}
        assert sizes["encoder"] == 14_025_120
        assert sizes["decoder"] == 16_758_464
        assert sizes["head"] == 32 * classes
        assert sizes["deep_supervision"] == 768 * classes
        assert net.divisor == (32, 32, 16)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_heads_in_training_only(dims: int, norm: str) -> None:
    net = build(dims, SMALL | {"norm": norm})
    nets.check_output(net, 3)
    x = images(net)
    with torch.no_grad():
        outputs, logits = net.train()(x), net.eval()(x)
    assert isinstance(logits, Tensor) and isinstance(outputs, list)
    assert [head.shape for head in outputs] == [(2, 3, *x.shape[2:])] * 3
    assert torch.equal(outputs[0], logits)
    alone = build(dims, SMALL | {"norm": norm, "deep_supervision": False})
    assert set(parts(alone)) == {"encoder", "decoder", "head"}
    with torch.no_grad():
        assert torch.equal(alone.train()(x), logits)


def test_a_head_sees_its_level_of_the_encoder() -> None:
    net = build(2)
    net(images(net))[1].square().sum().backward()
    touched = {name for name, p in net.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert {".".join(name.split(".")[:2]) for name in touched} == {"encoder.0", "encoder.1", "heads.0"}


def test_parts_hold_every_tensor_once() -> None:
    net = build(3)
    values, named = tensors_of(net), parts(net)
    assert set(named) == {"encoder", "decoder", "head", "deep_supervision"}
    assert sorted(name for names in named.values() for name in names) == sorted(values)
    assert all(values[name].shape[0] == 3 for name in (*named["head"], *named["deep_supervision"]))
    assert list(net.buffers()) == []


def test_strides_and_widths() -> None:
    net = build(3, SMALL | {"strides": [[1, 2, 3], 1, 2]})
    assert net.divisor == (2, 4, 6)
    assert [level.convs[0].weight.shape[0] for level in net.encoder] == [4, 8, 10, 10]
    x = images(net)
    assert net.eval()(x).shape == (2, 3, 4, 8, 12)
    assert build(2, {"width": 1}).divisor == (32, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strides": [2]}, "3 entries"),
        ({"strides": [2, 2, 0]}, "from 1 to 3"),
        ({"strides": [2, 2, 4]}, "from 1 to 3"),
        ({"strides": [[2, 2, 2], 2, 2]}, "or 2 of them"),
        ({"levels": 1}, "2 or more"),
        ({"norm": "layer"}, "norm"),
        ({"wide": 3}, "did you mean 'width'"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        build(2, SMALL | options)


KINDS = {"batch": nn.modules.batchnorm._BatchNorm, "instance": nn.modules.instancenorm._InstanceNorm}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("norm", sorted(KINDS))
def test_every_norm_is_of_the_kind_that_is_asked_for_and_has_a_scale_and_a_shift(
    dims: int, norm: str
) -> None:
    net = build(dims, SMALL | {"norm": norm})
    found = [m for m in net.modules() if isinstance(m, tuple(KINDS.values()))]
    assert len(found) == 2 * (4 + 3) and all(isinstance(m, KINDS[norm]) for m in found)
    assert all(len(list(m.parameters())) == 2 for m in found)
