"""Nets: shapes, names, seeds, parts, published sizes, and the errors of a net that does not fit."""

import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.networks.blocks.mednext_block import MedNeXtBlock, MedNeXtDownBlock, MedNeXtUpBlock
from monai.networks.nets.dynunet import DynUNet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.tensors import load, parts, tensors_of
from fedatlas.federation.design import Design, space_of, step_memory
from fedatlas.federation.file import parse_federation
from fedatlas.losses.heads import head_weights
from fedatlas.nets.convnext import GRN
from fedatlas.nets.kim_unet import KimUNet
from fedatlas.nets.mednext import MedNeXt, MedNeXtModule, mednext
from fedatlas.nets.unet import UNet

VECTORS = Path(__file__).parents[1] / "vectors"
SMALL = {"filters": [4, 8, 16]}
CASES = [
    ("unet", SMALL, 2),
    ("unet", SMALL, 3),
    ("unet", {**SMALL, "deep_supervision": True, "res_block": True, "norm": "batch"}, 2),
    ("unet", {"filters": [8, 16, 32], "norm": "group", "dropout": 0.1}, 2),
    (
        "unet",
        {**SMALL, "strides": [[1, 1, 1], [2, 2, 1], [2, 2, 2]], "kernels": [[3, 3, 1], [3, 3, 1], 3]},
        3,
    ),
    ("unet", {**SMALL, "strides": [1, [2, 2, 1], 2], "kernels": [3, [3, 3, 1], 3]}, 3),
    ("unet", {"filters": [4, 8, 8, 8, 8], "deep_supervision": True, "supervised": 2}, 2),
    ("mednext", {"size": "S", "deep_supervision": True}, 2),
    ("kim_unet", {"filters": [8, 16, 16]}, 2),
    ("kim_unet", {"filters": [8, 16]}, 3),
    ("ufps_unet", {"width": 4, "levels": 3, "deep_supervision": False}, 2),
]
WORKSHOP = {
    "filters": [32, 64, 128, 256, 320, 320],
    "kernels": [[3, 3, 1], [3, 3, 3], [3, 3, 3], [3, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [2, 2, 1], [2, 2, 2], [2, 2, 2], [2, 2, 2], [2, 2, 2]],
    "deep_supervision": True,
    "supervised": 3,
}
"""The DynUNet of ConDistFL's workshop system (NVFlare, research/condist-fl), with MONAI's own channels."""


def build(name: str, options: dict[str, Any], dims: int, seed: int = 1, classes: int = 4) -> nets.Net:
    return nets.build(name, options, in_channels=2, classes=classes, spatial_dims=dims, seed=seed)


@pytest.mark.parametrize(("name", "options", "dims"), CASES)
def test_forward_names_and_parts(name: str, options: dict[str, Any], dims: int) -> None:
    net = build(name, options, dims)
    nets.check_output(net, 4)
    size = [2 * by for by in net.divisor]
    x = torch.randn(2, 2, *size, generator=torch.Generator().manual_seed(0))
    assert net.training
    outputs = net(x)
    if options.get("deep_supervision"):
        assert isinstance(outputs, list)
        assert len(outputs) == 1 + options.get("supervised", len(outputs) - 1)
        for level, head in enumerate(outputs):
            assert head.shape == (2, 4, *(s // 2**level for s in size))
    with torch.no_grad():
        assert net.eval()(x).shape == (2, 4, *size)

    values = tensors_of(net)
    assert list(values) == list(net.state_dict()), "a tensor has two names"
    named = parts(net)
    assert "rest" not in named
    assert set(named) == {"encoder", "decoder", "head"} | (
        {"deep_supervision"} if options.get("deep_supervision") else set()
    )
    assert sorted(n for names in named.values() for n in names) == sorted(values)

    other = build(name, options, dims, seed=2)
    load(other, values)
    with torch.no_grad():
        assert torch.equal(other.eval()(x), net.eval()(x))


@pytest.mark.parametrize(("name", "options", "dims"), CASES[:3])
def test_weights_depend_on_the_seed_alone(name: str, options: dict[str, Any], dims: int) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = tensors_of(build(name, options, dims))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    second, third = tensors_of(build(name, options, dims)), tensors_of(build(name, options, dims, seed=2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert any(not torch.equal(first[n], third[n]) for n in first)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("res_block", [True, False])
def test_unet_computes_what_dynunet_does(dims: int, res_block: bool) -> None:
    net = UNet(filters=[4, 6, 8, 10], res_block=res_block, deep_supervision=True).build(
        in_channels=2, classes=3, spatial_dims=dims
    )
    monai = DynUNet(
        dims, 2, 3, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=[4, 6, 8, 10], res_block=res_block,
        norm_name=("instance", {"affine": True}), deep_supervision=True, deep_supr_num=2,
    )  # fmt: skip
    for ours, theirs in [
        (net.downs, nn.ModuleList([monai.input_block, *monai.downsamples, monai.bottleneck])),
        (net.ups, monai.upsamples),
        (net.head, monai.output_block),
        (net.heads, monai.deep_supervision_heads),
    ]:
        theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 2, *[16] * dims, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(net.eval()(x), monai.eval()(x))
        stacked, heads = monai.train()(x), net.train()(x)
    for level, head in enumerate(heads):
        full = nn.functional.interpolate(head, x.shape[2:])
        torch.testing.assert_close(full, stacked[:, level])


def test_the_workshop_systems_dynunet() -> None:
    strides = WORKSHOP["strides"]
    with torch.device("meta"):
        net = UNet(**WORKSHOP).build(in_channels=1, classes=8, spatial_dims=3)
        monai = DynUNet(
            3, 1, 8, WORKSHOP["kernels"], strides, strides[1:], deep_supervision=True, deep_supr_num=3
        )
    count = sum(p.numel() for p in net.parameters())
    assert count == sum(p.numel() for p in monai.parameters()) == 31_166_016
    assert sorted(p.shape for p in net.parameters()) == sorted(p.shape for p in monai.parameters())
    nets.check_patch(net, [224, 224, 64])
    nets.check_output(net, 8, patch=[224, 224, 64])
    with torch.no_grad():
        heads = net(torch.empty(1, 1, 224, 224, 64, device="meta"))
    sizes = [[224, 224, 64], [112, 112, 64], [56, 56, 32], [28, 28, 16]]
    assert [list(head.shape) for head in heads] == [[1, 8, *size] for size in sizes]
    assert head_weights(4) == pytest.approx([0.5333, 0.2667, 0.1333, 0.0667], abs=1e-4)


@pytest.mark.parametrize(("rows", "size"), [(7, 15_986_887), (8, 15_986_920)])
def test_kims_unet_is_about_of_the_printed_size(rows: int, size: int) -> None:
    with torch.device("meta"):
        net = KimUNet().build(in_channels=1, classes=rows, spatial_dims=3)
    nets.check_patch(net, [64, 128, 128])
    count = sum(p.numel() for p in net.parameters())
    assert count == size
    f = (32, 64, 128, 256, 256)
    levels = sum(27 * w * w * 2 + 4 * w for w in f)  # residual blocks with their norms
    down = sum(27 * a * b + 2 * b for a, b in zip((1, *f[:-1]), f, strict=True))
    up = sum(a * b + 2 * b + 27 * b * b * 2 + 4 * b for a, b in zip(f[:0:-1], f[-2::-1], strict=True))
    assert count == levels + down + up + rows * 33
    assert count * 4 / 2**20 == pytest.approx(60.4, rel=0.01)  # ConDistFL, Table 6


def test_kims_unet_is_its_description_written_out() -> None:
    net = build("kim_unet", {"filters": [8, 16]}, 2)
    v = {key: value.double() for key, value in tensors_of(net).items()}

    def layer(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = v[f"{name}.0.weight"]
        x = nn.functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        return nn.functional.group_norm(x, 8, v[f"{name}.1.weight"], v[f"{name}.1.bias"])

    def block(x: Tensor, name: str) -> Tensor:
        return (x + layer(layer(x, f"{name}.first").relu(), f"{name}.second")).relu()

    x = torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    top = block(layer(x, "downs.0.0").relu(), "downs.0.1")
    low = block(layer(top, "downs.1.0", 2).relu(), "downs.1.1")
    up = nn.functional.interpolate(layer(low, "ups.0.narrow").relu(), scale_factor=2, mode="bilinear")
    z = nn.functional.conv2d(block(top + up, "ups.0.refine"), v["head.weight"], v["head.bias"])
    with torch.no_grad():
        torch.testing.assert_close(net.double()(x), z)


@pytest.mark.parametrize("supervision", [0, 1])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("size", ["S", "B", "M", "L"])
def test_mednext_sizes_are_the_published_ones(size: Any, kernel: Any, supervision: int) -> None:
    counts = json.loads((VECTORS / "mednext_blocks.json").read_text())["param_counts"]
    with torch.device("meta"):
        net = MedNeXt(size=size, kernel=kernel, deep_supervision=bool(supervision)).build(
            in_channels=1, classes=8, spatial_dims=3
        )
    count = sum(p.numel() for p in net.parameters())
    # the official net holds one parameter more, a dummy for checkpointing
    assert count + 1 == counts[f"{size}_k{kernel}_classes8_ds{supervision}"]["params"]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("block", MedNeXtBlock(4, 4, 2, 3, True)),
        ("down", MedNeXtDownBlock(4, 8, 2, 3, True)),
        ("up", MedNeXtUpBlock(4, 2, 2, 3, True)),
        ("block_grn", MedNeXtBlock(4, 4, 3, 5, True, global_resp_norm=True)),
    ],
)
def test_mednext_blocks_compute_what_the_official_ones_do(name: str, block: nn.Module) -> None:
    with np.load(VECTORS / "mednext_blocks.npz") as file:
        v: dict[str, Tensor] = {key: torch.from_numpy(file[key]) for key in file.files}
    prefix = f"{name}/sd/"
    values = {key.removeprefix(prefix): x for key, x in v.items() if key.startswith(prefix)}
    block.load_state_dict({key.replace("grn_", "global_resp_"): x for key, x in values.items()})
    with torch.no_grad():
        torch.testing.assert_close(block(v["x"]), v[f"{name}/out"], atol=1e-5, rtol=0)


def test_global_response_normalisation_is_the_official_one() -> None:
    """Of ConvNeXt V2, whose layer MedNeXt's block has in three dimensions: the block, with our layer in 2D in its place."""
    with np.load(VECTORS / "mednext_blocks.npz") as file:
        v: dict[str, Tensor] = {key: torch.from_numpy(file[key]) for key in file.files}
    p = {key.removeprefix("block_grn/sd/"): x for key, x in v.items() if key.startswith("block_grn/sd/")}
    width = len(p["conv2.bias"])
    layer = GRN(width)
    layer.load_state_dict({"gamma": p["grn_gamma"].reshape(width), "beta": p["grn_beta"].reshape(width)})
    x = torch.nn.functional.conv3d(v["x"], p["conv1.weight"], p["conv1.bias"], padding=2, groups=4)
    x = torch.nn.functional.group_norm(x, 4, p["norm.weight"], p["norm.bias"])
    x = torch.nn.functional.gelu(torch.nn.functional.conv3d(x, p["conv2.weight"], p["conv2.bias"]))
    with torch.no_grad():  # as an image of 36 × 6 pixels: the layer's norms are over all of them
        x = layer(x.flatten(2, 3).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).reshape(x.shape)
    x = v["x"] + torch.nn.functional.conv3d(x, p["conv3.weight"], p["conv3.bias"])
    torch.testing.assert_close(x, v["block_grn/out"], atol=1e-5, rtol=0)


def test_mednext_computes_what_the_official_net_does() -> None:
    with np.load(VECTORS / "mednext_blocks.npz") as file:
        v: dict[str, Tensor] = {key: torch.from_numpy(file[key]) for key in file.files}
    net = mednext(
        [2] * 9, [1] * 9, 2, kernel=3, in_channels=1, classes=3, spatial_dims=3, deep_supervision=True
    )
    official = {"stem": "stem", "bottleneck": "bottleneck", "out_0": "out_0"}
    for i in range(4):
        official |= {f"enc_block_{i}": f"enc_stages.{i}", f"down_{i}": f"down_blocks.{i}"}
        official |= {f"dec_block_{i}": f"dec_stages.{3 - i}", f"up_{i}": f"up_blocks.{3 - i}"}
        official |= {f"out_{i + 1}": f"out_blocks.{3 - i}"}
    values = {}
    for key, value in v.items():
        head, _, rest = key.removeprefix("net/sd/").partition(".")
        if key.startswith("net/sd/") and head != "dummy_tensor":
            values[f"{official[head]}.{rest}"] = value
    net.load_state_dict(values)
    with torch.no_grad():
        outputs = MedNeXtModule(net, 1, 3, [16] * 3)(v["net/x"])
    for level, output in enumerate(outputs):
        torch.testing.assert_close(output, v[f"net/out{level}"], atol=1e-5, rtol=0)


def test_mednext_is_of_size_b_and_kernel_3_unless_it_is_told() -> None:
    assert MedNeXt() == MedNeXt(size="B", kernel=3, deep_supervision=False)


@pytest.mark.parametrize("supervision", [False, True])
def test_the_parts_of_mednext_are_what_they_are_called(supervision: bool) -> None:
    """The bottom is of the encoder; what leads up to a level is of the decoder. Sides are halved four times."""
    with torch.device("meta"):
        net = MedNeXt(size="S", deep_supervision=supervision).build(in_channels=1, classes=3, spatial_dims=2)
    named = {"stem": "encoder", "enc_stages": "encoder", "down_blocks": "encoder", "bottleneck": "encoder",
             "up_blocks": "decoder", "dec_stages": "decoder", "out_0": "head", "out_blocks": "deep_supervision"}  # fmt: skip
    for part, names in parts(net).items():
        assert {named[name.split(".")[1]] for name in names} == {part}
    assert net.divisor == (16, 16)


def test_the_bottom_of_a_mednext_has_the_blocks_and_the_expansion_of_the_middle() -> None:
    """Of the published sizes its neighbours have the same."""
    net: Any = mednext(
        [2, 3, 4], [1, 3, 2], 4, kernel=3, in_channels=1, classes=2, spatial_dims=2, deep_supervision=False
    )
    stages = [net.enc_stages[0], net.bottleneck, net.dec_stages[0]]
    assert [len(stage) for stage in stages] == [1, 3, 2]
    assert [stage[0].conv2.out_channels // stage[0].conv2.in_channels for stage in stages] == [2, 3, 4]


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ((64,), "has 1 axes, the net has 2"),
        ((30, 32), r"stride \[4, 4\].*nearest is \[32, 32\]"),
        ((4, 4), "one voxel at the bottom"),
    ],
)
def test_patches_that_do_not_fit(patch: tuple[int, ...], said: str) -> None:
    net = build("unet", SMALL, 2)
    with pytest.raises(FederationError, match=said):
        nets.check_patch(net, patch)


def test_patches_that_fit_do() -> None:
    net = build("unet", SMALL, 2)
    for patch in [(4, 8), (64, 32)]:
        nets.check_patch(net, patch)
        assert net(torch.zeros(1, 2, *patch)).shape[2:] == patch


def test_a_net_that_does_not_fit_the_label_space() -> None:
    with pytest.raises(FederationError, match=r"\(2, 4, 8, 8\).*label space of 5 classes"):
        nets.check_output(build("unet", SMALL, 2), 5)
    net = build("unet", {**SMALL, "deep_supervision": True}, 2)
    net.heads = nn.ModuleList([nn.Conv2d(8, 3, 1)])
    with pytest.raises(FederationError, match="does not fit"):
        nets.check_output(net, 4)
    assert net.training
    with pytest.raises(FederationError, match=r"fails|does not fit"):
        nets.check_output(nn.Conv2d(3, 4, 3), 4, in_channels=2, patch=(8, 8))


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [("cnn", {"norm": "batch", "filters": [8, 8, 8, 8]}, 8), ("densenet121", {}, 32)],
)
def test_one_sample_that_cannot_be_normalised_is_told(name: str, options: dict[str, Any], size: int) -> None:
    net = build(name, options, 2)
    nets.check_output(net, 4, in_channels=2, patch=(size, size))
    for batch, by in ((2, 1), (1, 2)):
        nets.check_batch(net, batch, (2, by * size, by * size))
    with pytest.raises(FederationError, match="local.batch is 1: .*set local.batch to 2 or more"):
        nets.check_batch(net.eval(), 1, (2, size, size))
    assert not net.training


def test_a_federation_with_batches_of_one_is_checked_with_one(small_images: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"net": {"name": "densenet121"}, "images": {"size": [32, 32]}}
    changes["local"] = small_images["local"] | {"batch": 1}
    federation = parse_federation(small_images | changes, base=Path())
    with pytest.raises(FederationError, match="local.batch is 1: the net Classifier"):
        Design(federation, space_of(federation, {}), 1).check_net()


class _Held(TorchDispatchMode):
    """Counts the bytes of all tensors that there are, and the most that there were."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[Any]] = {}
        self.now = self.most = 0
        for tensor in tensors:
            self._count(tensor)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self.seen:

            def gone(_: Any) -> None:
                del self.seen[key]
                self.now -= size

            self.seen[key] = weakref.ref(storage, gone)
            self.now += size
            self.most = max(self.most, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return made


@pytest.mark.parametrize(
    ("name", "options", "dims", "optimizer"),
    [
        ("unet", {"filters": [8, 16, 32]}, 2, "sgd"),
        ("unet", {"filters": [8, 16, 32]}, 3, "adamw"),
        ("unet", {"filters": [64, 128, 256]}, 2, "adamw"),  # the model is most of it
        ("mednext", {"size": "S"}, 3, "sgd"),
        ("crld_unet", {"width": 8, "levels": 3}, 2, "sgd"),
        ("deeplabv3plus", {}, 2, "sgd"),
        ("densenet121", {}, 2, "adamw"),
        ("dodnet", {"filters": [8, 16, 32]}, 3, "sgd"),
        ("menunet", {"width": 4, "levels": 3}, 3, "sgd"),
        ("cond_unet", {"width": 8, "levels": 3}, 2, "adamw"),
        ("kim_unet", {"filters": [8, 16]}, 3, "sgd"),
        ("ufps_unet", {"width": 8, "levels": 3}, 2, "sgd"),
        ("organ_heads", {}, 2, "sgd"),
        ("cnn", {}, 2, "sgd"),
    ],
)
def test_the_memory_of_a_step_is_what_its_tensors_take(
    name: str, options: dict[str, Any], dims: int, optimizer: str
) -> None:
    net, size, batch = build(name, options, dims), [32] * dims, 4 if dims == 2 else 2
    told = step_memory(net, (batch, net.in_channels, *size), optimizer)
    rule = (
        torch.optim.SGD(net.parameters(), momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(net.parameters())
    )
    images = torch.rand(batch, net.in_channels, *size)
    with _Held([*net.parameters(), *net.buffers(), images]) as held:
        for _ in range(2):  # the moments are there from the second step on
            outputs = net(images)
            heads = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            torch.stack([head.softmax(1)[:, 0].mean() for head in heads]).sum().backward()
            rule.step()
            rule.zero_grad()
    assert told.least <= held.most <= 1.05 * told.likely
    assert told.likely <= 1.25 * held.most


def test_held_for_gradients_tells_what_a_net_cannot_take() -> None:
    net = build("cnn", {"norm": "instance", "filters": [8, 8, 8, 8]}, 2)
    with pytest.raises(FederationError, match="fails for an input of shape"):
        nets.held_for_gradients(net, (2, 8, 8))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("unett", {}, "did you mean 'unet'"),
        ("unet", {"filter": [4, 8, 16]}, "did you mean 'filters'"),
        ("unet", {"filters": [4, 8]}, "filters: has 2 "),
        ("unet", {"filters": [4, 8, 16], "norm": "group"}, "multiples of 8"),
        ("unet", {**SMALL, "strides": [1, 2]}, "allowed: 3 entries"),
        ("unet", {**SMALL, "strides": [2, 2, 2]}, "1 into the first level"),
        ("unet", {**SMALL, "strides": [1, 4, 2]}, "exceed"),
        ("unet", {**SMALL, "kernels": [2, 3, 3]}, "odd numbers"),
        ("unet", {**SMALL, "supervised": 1}, "supervised is 1, deep_supervision False; allowed: 1 to 1"),
        ("unet", {**SMALL, "deep_supervision": True, "supervised": 2}, "allowed: 1 to 1 for 3 levels"),
        ("kim_unet", {"filters": [8, 12]}, r"filters are \[8, 12\]; allowed: multiples of 8"),
        ("kim_unet", {"filters": [8]}, "filters: has 1 "),
        ("mednext", {"size": "XL"}, "size: got 'XL'"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        build(name, options, 2)


@pytest.mark.parametrize("name", nets.REGISTRY)
def test_every_net_and_option_has_its_sentence(name: str) -> None:
    cls = nets.get(name)
    assert cls.__doc__
    assert all(field.description for field in cls.__pydantic_fields__.values())


def test_the_head_of_kims_unet_begins_as_pytorch_has_it() -> None:
    """All other convolutions by He's rule, whose numbers are larger than any of PyTorch's own may be."""
    net: Any = nets.build("kim_unet", {"filters": [8, 16]}, in_channels=1, classes=9, spatial_dims=2, seed=1)
    assert float(net.head.weight.detach().abs().max()) <= 8**-0.5
    narrow = next(m for m in net.ups.modules() if isinstance(m, torch.nn.Conv2d))
    assert float(narrow.weight.detach().abs().max()) > 16**-0.5
