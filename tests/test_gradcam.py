"""Grad-CAM against its closed form for a linear head, and what it leaves behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedatlas.analysis.gradcam import gradcam
from fedatlas.errors import FederationError
from fedatlas.nets.classifier import CNN, Classifier, DenseNet121
from fedatlas.seeds import generator, isolated


def small(**options: object) -> Classifier:
    with isolated("net"):
        return CNN(filters=(8, 16), **options).build(in_channels=1, classes=3, spatial_dims=2)  # type: ignore[arg-type]


def image(size: tuple[int, int] = (12, 20)) -> Tensor:
    return torch.randn(1, *size, generator=generator("image"))


def expected(net: Classifier, x: Tensor, c: int) -> Tensor:
    """alpha_k = w_ck / (h w), as a feature is the mean of its map and the head is linear."""
    with torch.no_grad():
        maps = net.eval().maps(x[None])[0]
        alpha = net.head.weight[c] / (maps.shape[1] * maps.shape[2])
        coarse = sum(a * m for a, m in zip(alpha, maps, strict=True)).clamp(min=0)  # type: ignore[union-attr]
        fine = F.interpolate(coarse[None, None], x.shape[1:], mode="bilinear", align_corners=False)[0, 0]
    return fine / fine.max()


@pytest.mark.parametrize("c", [0, 1, 2])
def test_closed_form_of_a_linear_head(c: int) -> None:
    net = small()
    found = gradcam(net, image(), c)
    assert found.shape == (12, 20) and found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(found, expected(net, image(), c), rtol=1e-4, atol=1e-6)
    assert found.max() == 1 and found.min() >= 0


def test_classes_have_different_maps() -> None:
    net = small()
    assert not torch.allclose(gradcam(net, image(), 0), gradcam(net, image(), 1))


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_net_is_as_before(norm: str) -> None:
    net = small(norm=norm).train()
    net.extractor[0].eval()  # type: ignore[index]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    given = torch.ones(3, 16)
    net.head.weight.grad = given
    gradcam(net, image(), 1)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert net.head.weight.grad is given and torch.equal(given, torch.ones(3, 16))
    assert all(p.grad is None for name, p in net.named_parameters() if name != "head.weight")
    assert all(p.requires_grad for p in net.parameters())
    assert not any(m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in net.modules())


def test_it_works_without_gradients_and_under_inference_of_a_caller() -> None:
    net = small()
    with torch.no_grad():
        assert gradcam(net, image(), 0).max() == 1
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    assert gradcam(net, image(), 0).max() == 1


def test_nothing_positive_is_zero_everywhere() -> None:
    net = small()
    with torch.no_grad():
        net.head.weight[2] = -net.head.weight[2].abs()
    found = gradcam(net, image(), 2)
    assert torch.equal(found, torch.zeros(12, 20))


def test_the_bright_corner_is_found() -> None:
    """One map that is the image itself, weighted positively: the map is where the image is bright."""
    net = Classifier(nn.ReLU(), 1, 1, 1, smallest=1)
    with torch.no_grad():
        net.head.weight.fill_(2.0)
    x = torch.zeros(1, 8, 8)
    x[0, 1, 6] = 5.0
    found = gradcam(net, x, 0)
    assert torch.equal(found, x[0] / 5)


def test_densenet() -> None:
    with isolated("densenet"):
        net = DenseNet121().build(in_channels=1, classes=2, spatial_dims=2)
    found = gradcam(net, image((64, 64)), 1)
    assert found.shape == (64, 64)
    assert torch.isfinite(found).all() and (found.max() == 1 or found.max() == 0)


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(FederationError, match="class 3; the net has 0 to 2"):
        gradcam(small(), image(), 3)
    with pytest.raises(FederationError, match=r"shape \[12, 20\]; expected \[1, H, W\]"):
        gradcam(small(), image()[0], 0)
