"""The head for findings of the whole image beside segmentation, and who reads a file of first weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_deeplab import SMALL as TINY
from test_deeplab import as_timm, filled
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.outputs import Mixed, voxel_logits
from fedatlas.core.tensors import parts, tensors_of
from fedatlas.federation.design import Design, Experiment, build_net
from fedatlas.federation.file import make_method, parse_federation
from fedatlas.nets.convnext import ConvNeXtV2

UNET = {"filters": [8, 16, 24], "res_block": True}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("unet", UNET, 2),
    ("unet", UNET | {"filters": [4, 8, 8, 6], "deep_supervision": True}, 3),
    ("deeplabv3plus", dict(TINY), 2),
    ("deeplabv3plus", TINY | {"output_stride": 32, "norm": "group"}, 2),
]


def build(name: str, options: dict[str, Any], dims: int, findings: int = 2, **more: Any) -> Any:
    return nets.build(
        name, options, in_channels=1, classes=3, spatial_dims=dims, seed=5, findings=findings, **more
    )


def image(net: nets.Net, seed: int = 0, batch: int = 2) -> Tensor:
    size = [4 * by for by in net.divisor]
    return torch.randn(batch, 1, *size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "options", "dims"), CASES)
def test_it_stands_beside_the_logits_and_changes_nothing_of_them(name, options, dims) -> None:
    net, plain = build(name, options, dims), build(name, options, dims, findings=0)
    nets.check_output(net, 3)
    nets.check_output(net, 3, findings=2)
    nets.check_output(plain, 3)
    own, others = tensors_of(net), tensors_of(plain)
    head = {"image_head.weight", "image_head.bias"}
    assert own.keys() - others.keys() == head and not others.keys() - own.keys()
    assert all(torch.equal(own[key], value) for key, value in others.items())
    assert own["image_head.weight"].shape == (2, net.n_features)
    named = parts(net)
    assert set(named["image_head"]) == head and "rest" not in named and "image_head" not in parts(plain)

    x = image(net)
    for training in (True, False):
        mixed, logits = net.train(training)(x), plain.train(training)(x)
        assert isinstance(mixed, Mixed) and mixed.findings.shape == (2, 2)
        assert (
            isinstance(mixed.voxels, list)
            == isinstance(logits, list)
            == (training and "deep" in str(options))
        )
        torch.testing.assert_close(voxel_logits(mixed), voxel_logits(logits), atol=0, rtol=0)


@pytest.mark.parametrize(("name", "options", "dims"), CASES)
def test_it_is_linear_in_the_mean_of_the_deepest_maps(name, options, dims) -> None:
    net = build(name, options, dims).eval()
    seen: list[Tensor] = []
    deepest: nn.Module = net.downs[-1] if name == "unet" else net.encoder.stages[3]  # type: ignore[index]
    deepest.register_forward_hook(lambda module, given, out: seen.append(out))
    with torch.no_grad():
        found = net(image(net)).findings
    (maps,) = seen
    assert maps.shape[1] == net.n_features
    expected = maps.flatten(2).mean(2) @ net.image_head.weight.T + net.image_head.bias
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("name", "options", "dims"), CASES)
def test_its_gradient_reaches_the_encoder_and_not_the_decoder(name, options, dims) -> None:
    net = build(name, options, dims)
    net(image(net)).findings.square().sum().backward()
    named, values = parts(net), dict(net.named_parameters())
    moved = {key for key, value in values.items() if value.grad is not None and bool(value.grad.any())}
    assert {"image_head.weight", "image_head.bias"} <= moved
    assert moved & set(named["encoder"]) and not moved & {*named["decoder"], *named["head"]}


@pytest.mark.parametrize(("name", "options", "dims"), CASES)
def test_under_bf16_it_is_close_to_float32(name, options, dims) -> None:
    net = build(name, options, dims)
    x = image(net)
    with torch.no_grad():
        full = net(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = net(x)
    assert voxel_logits(half).dtype == half.findings.dtype == torch.bfloat16
    for a, b in [(voxel_logits(half), voxel_logits(full)), (half.findings, full.findings)]:
        assert float((a.float() - b).norm() / b.norm()) < 0.05


@pytest.mark.parametrize(("name", "options", "dims"), [CASES[0], CASES[2]])
def test_channels_last_gives_the_same_numbers(name, options, dims) -> None:
    net = build(name, options, dims)
    x = image(net)
    plain = net(x)
    (voxel_logits(plain).square().mean() + plain.findings.square().mean()).backward()
    gradients = {key: value.grad for key, value in net.named_parameters()}
    last = build(name, options, dims).to(memory_format=torch.channels_last)
    found = last(x.contiguous(memory_format=torch.channels_last))
    (voxel_logits(found).square().mean() + found.findings.square().mean()).backward()
    torch.testing.assert_close(voxel_logits(found), voxel_logits(plain), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.findings, plain.findings, atol=1e-4, rtol=1e-4)
    for key, value in last.named_parameters():
        torch.testing.assert_close(value.grad, gradients[key], atol=1e-3, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", sorted(set(nets.REGISTRY) - {"unet", "deeplabv3plus"}))
def test_other_nets_refuse_findings_and_name_those_that_can(name: str) -> None:
    with pytest.raises(
        FederationError, match=f"net {name}: has no head.*names 2; allowed: deeplabv3plus, unet;"
    ):
        build(name, {}, 2)


def test_outputs_that_do_not_fit_the_findings() -> None:
    with pytest.raises(FederationError, match="gives no findings.* 2 findings"):
        nets.check_output(build("unet", UNET, 2, findings=0), 3, findings=2)
    net = build("unet", UNET, 2)
    with pytest.raises(FederationError, match=r"gives findings \(2, 2\).* 0 findings.*expected none"):
        nets.check_output(net, 3, findings=0)
    net.image_head = nn.Linear(24, 5)
    with pytest.raises(FederationError, match=r"gives findings \(2, 5\)"):
        nets.check_output(net, 3)
    with pytest.raises(FederationError, match="label space of 4"):
        nets.check_output(build("unet", UNET, 2), 4)


# A file of first weights


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file, and what the encoder holds with it."""
    source = filled(ConvNeXtV2(TINY["depths"], TINY["dims"], 3))  # type: ignore[arg-type]
    save_file(as_timm(source), tmp_path / "first.safetensors")
    return tmp_path / "first.safetensors", tensors_of(source)


def has(net: Any, values: dict[str, Tensor]) -> bool:
    own = tensors_of(net.encoder)
    return all(torch.equal(own[name], value) for name, value in values.items() if name != "stem.0.weight")


def test_only_the_first_model_is_read_from_the_file(small, weights, tmp_path) -> None:
    path, values = weights
    net = {"name": "deeplabv3plus", **TINY, "weights": str(path)}
    change = {"net": net, "labels": {"findings": {"any": None}}}
    change["preprocessing"] = small["preprocessing"] | {"patch": [32, 32]}
    federation = parse_federation(small | change, base=Path())
    experiment = Experiment(federation, tmp_path)
    first = experiment.make_net()
    assert has(first, values) and first.findings == 1
    for model in (experiment.check_net(), Design(federation, experiment.space, 1).make_net()):
        assert has(model, values)

    path.unlink()
    host = experiment.host(experiment.indexes[0].name, tmp_path / "host")
    for model in (host.make_net("main"), experiment.check_net(initial=False)):
        assert not has(model, values)
        assert list(tensors_of(model)) == list(tensors_of(first))
        assert torch.equal(model.image_head.weight, first.image_head.weight)  # type: ignore[union-attr, arg-type]
    method = make_method(federation)
    build_net(federation, method, "main", channels=1, space=experiment.space)
    for ask in (experiment.make_net, experiment.check_net):
        with pytest.raises(FederationError, match=r"first\.safetensors: there is no such file"):
            ask()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_file_that_is_damaged_or_of_another_size(weights, wrapped: bool) -> None:
    path, values = weights
    name, options = "deeplabv3plus", TINY | {"weights": str(path)}
    if wrapped:
        name, options = "organ_heads", {"backbone": {"name": name, **options}}
    net = build(name, options, 2, findings=0)
    assert has(net.backbone if wrapped else net, values)
    options = dict(options)
    (options["backbone"] if wrapped else options)["dims"] = (4, 6, 8, 12)
    with pytest.raises(FederationError, match=r"dims \[4, 6, 8, 12\].*expected float32\[12\]"):
        build(name, options, 2, findings=0)
    build(name, options, 2, findings=0, initial=False)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FederationError, match=r"first\.safetensors: cannot be read"):
        build(name, options, 2, findings=0)
    path.unlink()
    path.mkdir()
    with pytest.raises(FederationError, match=r"first\.safetensors: there is no such file"):
        build(name, options, 2, findings=0)
    shutil.rmtree(path)


def test_a_federation_names_its_findings_to_the_main_net_only(small) -> None:
    small["labels"] = {"findings": {"any": None, "none": None}}
    federation = parse_federation(small, base=Path())
    space = LabelSpace(("background", "a"), findings=("any", "none"), finding_of=(None, None))
    assert Design(federation, space, 1).make_net().findings == 2  # type: ignore[union-attr]
    small["net"] = {"name": "mednext", "size": "S"}
    with pytest.raises(FederationError, match=r"net mednext: has no head.*labels\.findings"):
        Design(parse_federation(small, base=Path()), space, 1).make_net()
