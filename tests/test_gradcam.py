"""Grad-CAM against its closed form for a linear head, and what it leaves behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedatlas.analysis.gradcam import gradcam
from fedatlas.core.errors import FederationError
from fedatlas.core.seeds import generator, isolated
from fedatlas.nets.classifier import CNN, Classifier, DenseNet121
from fedatlas.nets.menunet import MENUNet, MENUNetModule
from fedatlas.papers.fedmenu.subencoders import activation, has_subencoders


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


# ---------------------------------------------------------------------------------------------- sub-encoders


def menunet(dims: int = 2, **options: object) -> MENUNetModule:
    with isolated("menunet"):
        chosen = MENUNet(**{"width": 3, "levels": 3, "agd": False} | options)  # type: ignore[arg-type]
        return chosen.build(in_channels=1, classes=4, spatial_dims=dims)


def slowly(net: MENUNetModule, x: Tensor, organ: int, level: int) -> Tensor:
    """The whole net written out from the block on, with the gradient of y by the perturbation of every map's mean: the
    net is run again from the block's output with a little more of each map."""
    net = net.eval().double()
    with torch.no_grad():
        skips = [[*encoder(x[None].double())] for encoder in net.encoders]
        own = skips[organ][level - 1].clone()

        def y(maps: Tensor, found: Tensor | None = None) -> tuple[Tensor, Tensor]:
            mine, deeper = [*skips[organ][: level - 1], maps], maps
            for later in range(level, len(net.strides)):
                deeper = net.encoders[organ].levels[later](F.max_pool2d(deeper, 2))  # type: ignore[index]
                mine.append(deeper)
            each = [mine if m == organ else other for m, other in enumerate(skips)]
            z = net.head(net.decoder([torch.cat(lists, 1) for lists in zip(*each, strict=True)])[0])
            found = z.argmax(1) if found is None else found
            return sum((z[:, c][found == c].sum() for c in net.organs[organ]), torch.zeros(())), found

        _, found = y(own)
        coarse = torch.zeros_like(own[0, 0])
        for k in range(own.shape[1]):
            slope, step = 0.0, 1e-6
            for place in range(own[0, k].numel()):
                more, less = own.clone(), own.clone()
                more[0, k].view(-1)[place] += step
                less[0, k].view(-1)[place] -= step
                slope += float(y(more, found)[0] - y(less, found)[0]) / (2 * step)
            coarse += slope / own[0, k].numel() * own[0, k]
    net.float()
    coarse = coarse.clamp(min=0)[None, None]
    return F.interpolate(coarse, x.shape[1:], mode="bilinear", align_corners=False)[0, 0].float()


@pytest.mark.parametrize(("organ", "level"), [(0, 3), (1, 2), (2, 3)])
def test_a_sub_encoder_against_differences_of_the_net(organ: int, level: int) -> None:
    net = menunet(grouped=True)
    x = torch.randn(1, 16, 16, generator=generator("image", organ))
    found = activation(net, x, organ, level=level)
    assert found.shape == (16, 16) and found.dtype == torch.float32
    assert net.grouped is True and net.training
    torch.testing.assert_close(found, slowly(net, x, organ, level), rtol=1e-3, atol=1e-4)
    assert found.max() > 0


def test_an_organ_counts_all_its_classes_and_not_another() -> None:
    net, x = menunet(groups=((1, 3),)), torch.randn(1, 16, 16, generator=generator("image"))
    assert net.organs == ((1, 3), (2,))
    torch.testing.assert_close(
        activation(net, x, 0), slowly(menunet(groups=((1, 3),)), x, 0, 3), rtol=1e-3, atol=1e-4
    )
    with torch.no_grad():
        net.head.bias[2] = -100.0  # type: ignore[index]
    assert torch.equal(activation(net, x, 1), torch.zeros(16, 16)), "nothing is predicted to be of it"


def test_where_gradients_are_not_positive_there_is_no_heat() -> None:
    """The maps are made positive, and y falls with each of them."""
    net, x = menunet(levels=1), torch.randn(1, 8, 8, generator=generator("image"))

    class Falling(nn.Module):
        def forward(self, skips: list[Tensor]) -> list[Tensor]:
            return [-skips[0].sum(1, keepdim=True)]

    with torch.no_grad():
        net.head = nn.Conv2d(1, 4, 1)
        net.head.weight.zero_()
        net.head.bias.zero_()  # type: ignore[union-attr]
        net.head.weight[1], net.head.bias[1] = 1.0, 1000.0  # type: ignore[index]
    net.decoder = Falling()  # type: ignore[assignment]
    net.encoders[0].levels[0].register_forward_hook(lambda module, given, maps: maps.abs())  # type: ignore[index]
    assert torch.equal(activation(net, x, 0, level=1), torch.zeros(8, 8))
    net.decoder.register_forward_hook(lambda module, given, maps: [-maps[0]])
    assert activation(net, x, 0, level=1).max() > 0


def test_a_volume_and_what_is_left_behind() -> None:
    net = menunet(3, levels=2, width=2).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.randn(1, 8, 8, 4, generator=generator("volume"))
    with torch.no_grad():
        found = activation(net, x, 1)
    assert found.shape == (8, 8, 4) and not found.requires_grad and found.min() >= 0
    assert net.training and net.grouped == "auto"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks for m in net.modules())
    assert has_subencoders(net) and not has_subencoders(small())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"organ": 3}, "organ 3; the net has 0 to 2"),
        ({"organ": 0, "level": 0}, "level 0; allowed: 1 to 3"),
        ({"organ": 0, "image": torch.zeros(2, 8, 8)}, r"shape \[2, 8, 8\]; expected \[1, H, W\]"),
    ],
)
def test_of_a_sub_encoder_what_does_not_fit_is_told(options: dict, told: str) -> None:
    with pytest.raises(FederationError, match=told):
        activation(menunet(), **{"image": torch.zeros(1, 8, 8)} | options)
