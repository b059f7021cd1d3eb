"""ConvNeXt V2 and DeepLabV3+: the papers' equations, the published sizes, ImageNet weights from a file."""

import importlib.util
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.errors import FederationError
from fedatlas.core.tensors import parts, tensors_of
from fedatlas.nets.convnext import GRN, SIZES, Block, ChannelNorm, ConvNeXtV2, Down, load_timm, timm_names
from fedatlas.nets.deeplab import DeepLabV3PlusModule

DEPTHS, DIMS = (1, 1, 2, 1), (4, 6, 8, 10)
SMALL = {"depths": DEPTHS, "dims": DIMS, "width": 16}


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(
    options: dict[str, Any], in_channels: int = 1, classes: int = 3, dims: int = 2
) -> DeepLabV3PlusModule:
    net = nets.build(
        "deeplabv3plus", options, in_channels=in_channels, classes=classes, spatial_dims=dims, seed=1
    )
    assert isinstance(net, DeepLabV3PlusModule)
    return net


def filled(net: nn.Module, seed: int = 3) -> Any:
    """The net with every parameter drawn anew, so that nothing is zero or one by chance."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=gen(seed)))
            seed += 1
    return net.eval()


def as_timm(encoder: ConvNeXtV2, *, head: bool = True) -> dict[str, Tensor]:
    """The encoder's tensors in timm's names, written out a second time."""
    own = dict(encoder.named_parameters())
    values: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        values[f"stem.0.{kind}"], values[f"stem.1.{kind}"] = own[f"stem.0.{kind}"], own[f"stem.1.{kind}"]
        for s, depth in enumerate(encoder.depths):
            if s:
                values[f"stages.{s}.downsample.0.{kind}"] = own[f"downs.{s - 1}.norm.{kind}"]
                values[f"stages.{s}.downsample.1.{kind}"] = own[f"downs.{s - 1}.conv.{kind}"]
            for b in range(depth):
                here, there = f"stages.{s}.{b}", f"stages.{s}.blocks.{b}"
                values[f"{there}.conv_dw.{kind}"] = own[f"{here}.depthwise.{kind}"]
                values[f"{there}.norm.{kind}"] = own[f"{here}.norm.{kind}"]
                values[f"{there}.mlp.fc1.{kind}"] = own[f"{here}.expand.{kind}"]
                values[f"{there}.mlp.fc2.{kind}"] = own[f"{here}.project.{kind}"]
                values[f"{there}.mlp.grn.{kind}"] = own[
                    f"{here}.grn.{'gamma' if kind == 'weight' else 'beta'}"
                ]
    if head:
        d = encoder.dims[-1]
        values |= {"head.norm.weight": torch.ones(d), "head.norm.bias": torch.zeros(d)}
        values |= {"head.fc.weight": torch.zeros(5, d), "head.fc.bias": torch.zeros(5)}
    return {name: value.detach().clone() for name, value in values.items()}


# ConvNeXt V2


def test_grn_is_the_papers_formula() -> None:
    grn = filled(GRN(3)).double()
    x = torch.randn(2, 4, 5, 3, generator=gen(), dtype=torch.float64)
    got = grn(x)
    for b in range(2):
        norms = [
            math.sqrt(sum(float(x[b, i, j, c]) ** 2 for i in range(4) for j in range(5))) for c in range(3)
        ]
        for c in range(3):
            n = norms[c] / (sum(norms) / 3 + 1e-6)
            expected = grn.gamma[c] * x[b, :, :, c] * n + grn.beta[c] + x[b, :, :, c]
            torch.testing.assert_close(got[b, :, :, c], expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(GRN(3)(x.float()), x.float()), "it starts as the identity"


def test_grn_in_half_precision_does_not_overflow_and_a_dead_channel_has_a_gradient() -> None:
    grn = filled(GRN(3))
    x = torch.full((1, 64, 64, 3), 300.0, dtype=torch.float16)
    assert torch.isfinite(grn(x)).all()
    dead = torch.zeros(1, 4, 4, 3, requires_grad=True)
    grn(dead).sum().backward()
    assert dead.grad is not None
    assert torch.isfinite(dead.grad).all()


@pytest.mark.parametrize("dilation", [1, 2])
def test_a_block_is_its_equations_written_with_loops(dilation: int) -> None:
    d, h, w = 2, 5, 4
    block = filled(Block(d, dilation=dilation)).double()
    x = torch.randn(1, d, h, w, generator=gen(), dtype=torch.float64)
    y = torch.zeros(h, w, d, dtype=torch.float64)
    for i in range(h):
        for j in range(w):
            for c in range(d):
                total = block.depthwise.bias[c].clone()
                for u in range(7):
                    for v in range(7):
                        p, q = i + dilation * (u - 3), j + dilation * (v - 3)
                        if 0 <= p < h and 0 <= q < w:
                            total += block.depthwise.weight[c, 0, u, v] * x[0, c, p, q]
                y[i, j, c] = total
    mean = y.mean(-1, keepdim=True)
    variance = ((y - mean) ** 2).mean(-1, keepdim=True)
    y = (y - mean) / torch.sqrt(variance + 1e-6) * block.norm.weight + block.norm.bias
    y = torch.einsum("ijc,kc->ijk", y, block.expand.weight) + block.expand.bias
    assert y.shape[-1] == 4 * d
    y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
    norms = torch.einsum("ijk,ijk->k", y, y).sqrt()
    y = block.grn.gamma * y * (norms / (norms.mean() + 1e-6)) + block.grn.beta + y
    y = torch.einsum("ijk,ck->ijc", y, block.project.weight) + block.project.bias
    torch.testing.assert_close(block(x)[0], x[0] + y.permute(2, 0, 1), atol=1e-6, rtol=1e-6)


def test_the_norm_is_over_the_channels_of_each_pixel() -> None:
    x = torch.randn(2, 6, 3, 5, generator=gen())
    got = ChannelNorm(6)(x)
    assert got.shape == x.shape
    torch.testing.assert_close(got.mean(1), torch.zeros(2, 3, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(got.var(1, unbiased=False), torch.ones(2, 3, 5), atol=1e-3, rtol=0)


def test_drop_path_skips_whole_branches_of_images_and_keeps_their_mean() -> None:
    block = filled(Block(2, drop_path=0.5))
    x = torch.randn(1, 2, 4, 4, generator=gen()).expand(64, -1, -1, -1)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        branch = block(x[:1]) - x[:1]
        varied = block.train()(x) - x
    skipped = varied.flatten(1).abs().amax(1) == 0
    assert 0 < int(skipped.sum()) < 64
    torch.testing.assert_close(varied[~skipped], (2 * branch).expand_as(varied)[~skipped])
    encoder = ConvNeXtV2(DEPTHS, DIMS, 1, drop_path=0.4)
    rates = [module.drop_path for module in encoder.modules() if isinstance(module, Block)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("size", "exact", "millions"),
    [
        ("atto", None, 3.7), ("femto", None, 5.2), ("pico", None, 9.1), ("nano", None, 15.6),
        ("tiny", 28_635_496, 28.6), ("base", 88_717_800, 88.7), ("large", None, 198), ("huge", None, 660),
    ],
)  # fmt: skip
def test_sizes_are_the_published_ones(size: str, exact: int | None, millions: float) -> None:
    depths, d = SIZES[size]
    # stem, downs (layer norm and 2 x 2), blocks (depthwise, norm, expand, GRN, project)
    formula = (4 * 4 * 3 * d[0] + d[0] + 2 * d[0]) + sum(
        2 * d[i - 1] + 4 * d[i - 1] * d[i] + d[i] for i in (1, 2, 3)
    )
    formula += sum(
        n * ((49 * w + w) + 2 * w + (4 * w * w + 4 * w) + 2 * 4 * w + (4 * w * w + w))
        for n, w in zip(depths, d, strict=True)
    )
    head = 2 * d[3] + 1000 * d[3] + 1000
    with torch.device("meta"):
        encoder = ConvNeXtV2(depths, d, 3)
    count = sum(p.numel() for p in encoder.parameters())
    assert count == formula
    assert exact in (None, formula + head)
    digits = 1 if isinstance(millions, float) else 0
    assert round((count + head) / 1e6, digits) == millions


def test_maps_of_the_stages() -> None:
    x = torch.randn(1, 2, 64, 32, generator=gen())
    with torch.no_grad():
        maps = filled(ConvNeXtV2(DEPTHS, DIMS, 2))(x)
    assert [tuple(m.shape) for m in maps] == [
        (1, d, 64 // s, 32 // s) for d, s in zip(DIMS, (4, 8, 16, 32), strict=True)
    ]


def test_output_stride_16_holds_the_maps_of_stride_32() -> None:
    """The dilated stage, seen at every second pixel, is the strided one; GRN sees all pixels and is off."""
    native = filled(ConvNeXtV2((1, 1, 1, 2), DIMS, 1))
    dense = ConvNeXtV2((1, 1, 1, 2), DIMS, 1, output_stride=16).eval()
    with torch.no_grad():
        for block in native.stages[3]:
            block.grn.gamma.zero_()
        dense.load_state_dict(native.state_dict())
        x = torch.randn(1, 1, 128, 96, generator=gen())
        strided, dilated = native(x), dense(x)
    assert dilated[3].shape == (1, DIMS[3], 8, 6)
    torch.testing.assert_close(dilated[3][:, :, ::2, ::2], strided[3], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(dilated[3][:, :, 1::2, 1::2], strided[3], atol=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(dilated[:3], strided[:3], strict=True))
    assert Down(2, 3, stride=1)(torch.zeros(1, 2, 5, 7)).shape == (1, 3, 5, 7)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the package transformers is not installed"
)
def test_it_computes_what_transformers_does() -> None:
    from transformers import ConvNextV2Config, ConvNextV2Model  # type: ignore[import-not-found]

    theirs = ConvNextV2Model(
        ConvNextV2Config(num_channels=2, hidden_sizes=list(DIMS), depths=list(DEPTHS), image_size=64)
    )
    theirs = filled(theirs)
    values = {}
    for name, value in theirs.state_dict().items():
        name = name.replace("embeddings.patch_embeddings", "stem.0").replace("embeddings.layernorm", "stem.1")
        name = name.removeprefix("encoder.").replace("downsampling_layer", "downsample")
        name = name.replace(".layers.", ".blocks.").replace("dwconv", "conv_dw").replace("layernorm", "norm")
        name = name.replace("pwconv1", "mlp.fc1").replace("pwconv2", "mlp.fc2").replace("grn", "mlp.grn")
        if not name.startswith("norm."):
            values[name] = value.flatten() if "grn" in name else value
    ours = ConvNeXtV2(DEPTHS, DIMS, 2)
    ours.load_state_dict({here: values.pop(there) for here, there in timm_names(DEPTHS).items()})
    assert not values
    x = torch.randn(2, 2, 64, 64, generator=gen())
    with torch.no_grad():
        expected = theirs(x).last_hidden_state
        torch.testing.assert_close(ours.eval()(x)[-1], expected, atol=1e-4, rtol=1e-4)


# Weights from a file


@pytest.mark.parametrize("kind", ["safetensors", "pth", "state_dict", "model"])
def test_weights_in_timms_names_come_back(kind: str, tmp_path: Path) -> None:
    source = filled(ConvNeXtV2(DEPTHS, DIMS, 3))
    values = as_timm(source)
    assert set(timm_names(DEPTHS).values()) == {name for name in values if not name.startswith("head.")}
    assert set(timm_names(DEPTHS)) == set(tensors_of(source))
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth")
    if kind == "safetensors":
        save_file(values, path)
    else:
        torch.save(values if kind == "pth" else {kind: values, "epoch": 3}, path)
    net = build({**SMALL, "weights": str(path)}, in_channels=3)
    got = tensors_of(net.encoder)
    assert all(torch.equal(got[name], value) for name, value in tensors_of(source).items())
    other = tensors_of(build(SMALL, in_channels=3))
    ours = tensors_of(net)
    assert all(torch.equal(ours[n], other[n]) for n in ours if not n.startswith("encoder.")), (
        "only the encoder's"
    )


def test_layers_as_convolutions_and_half_precision_are_taken(tmp_path: Path) -> None:
    source = filled(ConvNeXtV2(DEPTHS, DIMS, 1)).half().float()
    values = {
        name: (value[:, :, None, None] if "mlp.fc" in name and value.ndim == 2 else value).half()
        for name, value in as_timm(source, head=False).items()
    }
    save_file(values, tmp_path / "w.safetensors")
    net = ConvNeXtV2(DEPTHS, DIMS, 1)
    load_timm(net, tmp_path / "w.safetensors")
    for name, value in tensors_of(source).items():
        assert torch.equal(dict(net.named_parameters())[name], value)
        assert dict(net.named_parameters())[name].dtype == torch.float32


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_a_grey_image_gives_the_maps_of_its_rgb_copy(channels: int, tmp_path: Path) -> None:
    source = filled(ConvNeXtV2(DEPTHS, DIMS, 3))
    save_file(as_timm(source), tmp_path / "w.safetensors")
    net = ConvNeXtV2(DEPTHS, DIMS, channels).eval()
    load_timm(net, tmp_path / "w.safetensors")
    if channels == 1:
        stem = dict(source.named_parameters())["stem.0.weight"]
        torch.testing.assert_close(dict(net.named_parameters())["stem.0.weight"][:, 0], stem.sum(1))
    grey = torch.randn(1, 1, 32, 32, generator=gen())
    with torch.no_grad():
        for a, b in zip(
            net(grey.expand(-1, channels, -1, -1)), source(grey.expand(-1, 3, -1, -1)), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    net, marker = ConvNeXtV2(DEPTHS, DIMS, 3), tmp_path / "ran"
    for name, dump in [
        ("zip.pth", lambda path: torch.save({"stem.0.weight": Touch(marker)}, path)),
        ("bare.pth", lambda path: path.write_bytes(pickle.dumps(Touch(marker), protocol=2))),
    ]:
        dump(tmp_path / name)
        with pytest.raises(FederationError, match=f"{name}.*refused"):
            load_timm(net, tmp_path / name)
    assert not marker.exists()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    net = ConvNeXtV2(DEPTHS, DIMS, 3)
    torch.save(as_timm(net), tmp_path / "cut.pth")
    save_file(as_timm(net), tmp_path / "cut.safetensors")
    torch.save({"a": 1}, tmp_path / "number.pth")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    (tmp_path / "empty.pth").touch()
    (tmp_path / "w.bin").touch()
    for name in ("cut.pth", "cut.safetensors"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    for name, said in [
        ("none.pth", "no such file"), ("w.bin", r"is a \.bin; allowed"), ("cut.pth", "cannot be read"),
        ("cut.safetensors", "cannot be read"), ("empty.pth", "cannot be read|damaged"),
        ("number.pth", "tensors by name"), ("list.pth", "tensors by name"),
    ]:  # fmt: skip
        with pytest.raises(FederationError, match=said):
            load_timm(net, tmp_path / name)


def test_weights_of_another_net_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    net = filled(ConvNeXtV2(DEPTHS, DIMS, 3))
    before = tensors_of(net)
    values = as_timm(ConvNeXtV2(DEPTHS, DIMS, 3))
    values["stages.2.blocks.9.gamma"] = torch.zeros(4)
    del values["stages.1.downsample.1.bias"]
    values["stages.0.blocks.0.mlp.grn.weight"] = torch.zeros(7)
    values["stem.1.bias"] = torch.zeros(DIMS[0], dtype=torch.int64)
    save_file(values, tmp_path / "w.safetensors")
    with pytest.raises(FederationError) as caught:
        load_timm(net, tmp_path / "w.safetensors")
    said = str(caught.value)
    assert "missing: stages.1.downsample.1.bias;" in said
    assert "unexpected: stages.2.blocks.9.gamma;" in said
    assert "stages.0.blocks.0.mlp.grn.weight is float32[7], expected float32[16]" in said
    assert "stem.1.bias is int64[4], expected float32[4]" in said
    assert "head." not in said
    assert all(torch.equal(before[name], value) for name, value in tensors_of(net).items())
    with pytest.raises(FederationError, match=r"missing: stem\.0\.weight, .* and \d+ more$"):
        save_file({"head.fc.weight": torch.zeros(1)}, tmp_path / "w.safetensors")
        load_timm(net, tmp_path / "w.safetensors")


# DeepLabV3+


@pytest.mark.parametrize(
    ("options", "channels"),
    [
        ({}, 1), ({"output_stride": 32, "norm": "group"}, 3), ({"separable": False, "rates": [2]}, 2),
        ({"drop_path": 0.2, "dropout": 0.1}, 1),
    ],
)  # fmt: skip
def test_shapes_parts_and_gradients(options: dict[str, Any], channels: int) -> None:
    net = build({**SMALL, **options}, in_channels=channels)
    nets.check_output(net, 3)
    stride = options.get("output_stride", 16)
    assert net.divisor == (stride, stride)
    x = torch.randn(2, channels, 64, 96, generator=gen())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        logits = net(x)
    assert logits.shape == (2, 3, 64, 96)
    logits.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    named = parts(net)
    assert set(named) == {"encoder", "decoder", "head"}
    assert sorted(n for names in named.values() for n in names) == sorted(tensors_of(net))
    assert set(named["head"]) == {"head.weight", "head.bias"}
    assert all(n.startswith("encoder.") for n in named["encoder"])

    low, high = net.eval().encode(x)
    assert low.shape == (2, DIMS[0], 16, 24)
    assert high.shape == (2, DIMS[3], 64 // stride, 96 // stride)
    assert net.features(x).shape == (2, net.n_features) == (2, DIMS[3])
    torch.testing.assert_close(net.features(x), high.flatten(2).mean(2))
    torch.testing.assert_close(net.decode(low, high), net(x))
    assert net(x[:1]).shape == (1, 3, 64, 96)


def test_the_decoder_is_the_papers() -> None:
    net = build({"depths": DEPTHS, "dims": DIMS, "separable": False})
    shapes = {name: tuple(value.shape) for name, value in net.named_parameters() if value.ndim == 4}
    assert shapes["low_level.0.weight"] == (48, DIMS[0], 1, 1)
    assert shapes["fuse.0.0.weight"] == (256, 256 + 48, 3, 3)
    assert shapes["fuse.1.0.weight"] == (256, 256, 3, 3)
    assert shapes["pyramid.merge.0.weight"] == (256, 5 * 256, 1, 1)
    assert shapes["head.weight"] == (3, 256, 1, 1)
    dilations = [branch[0].dilation[0] for branch in net.pyramid.atrous]  # type: ignore[index]
    assert dilations == [6, 12, 18]
    wide = build({"depths": DEPTHS, "dims": DIMS, "output_stride": 32})
    assert [branch[0].dilation[0] for branch in wide.pyramid.atrous] == [3, 6, 9]  # type: ignore[index]
    depthwise, pointwise = wide.fuse[0][0], wide.fuse[0][1]  # type: ignore[index]
    assert depthwise.weight.shape == (304, 1, 3, 3)
    assert pointwise.weight.shape == (256, 304, 1, 1)


def test_the_pyramid_sees_the_whole_image_and_the_decoder_the_low_level() -> None:
    net = build(SMALL).eval()
    with torch.no_grad():
        low, high = net.encode(torch.randn(1, 1, 64, 64, generator=gen()))
        moved = high.clone()
        moved[0, :, 0, 0] += 5
        # in a 4 x 4 map every dilated tap but the centre lies outside, so only the pooled branch is left
        far = (net.pyramid(moved) - net.pyramid(high))[0, :, 3, 2]
        assert far.abs().max() > 1e-3
        net.pyramid.image[0].weight.zero_()  # type: ignore[union-attr, operator]
        assert torch.equal(net.pyramid(moved)[0, :, 3, 2], net.pyramid(high)[0, :, 3, 2])
        assert not torch.allclose(net.decode(low + 1 + low.square(), high), net.decode(low, high))


def test_seeds_alone_decide_the_weights() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a = tensors_of(build(SMALL))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    b = tensors_of(build(SMALL))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("options", "dims", "said"),
    [
        ({}, 3, "takes images of 2 axes, got 3"),
        ({"encoder": "small"}, 2, "encoder: got 'small'"),
        ({"depths": [1, 1, 1]}, 2, "allowed: four numbers each"),
        ({"dims": [0, 8, 8, 8]}, 2, r"dims\.0: got 0; .*1 or more"),
        ({"output_stride": 8}, 2, "output_stride: got 8"),
        ({"rates": [0, 2]}, 2, r"rates\.0: got 0; .*1 or more"),
        ({"norm": "group", "width": 12}, 2, "multiples of 8 from 16"),
        ({"weights": "nowhere.pth"}, 2, "nowhere.pth: there is no such file"),
    ],
)
def test_wrong_options(options: dict[str, Any], dims: int, said: str) -> None:
    with pytest.raises(FederationError, match=said):
        build({**SMALL, **options}, dims=dims)


def test_images_that_do_not_fit() -> None:
    net = build(SMALL)
    with pytest.raises(FederationError, match="do not divide by the output stride 16"):
        net(torch.zeros(2, 1, 64, 60))
    with pytest.raises(FederationError, match=r"local.batch to 2 or more"):
        net(torch.zeros(1, 1, 32, 32))
    assert build({**SMALL, "norm": "group"})(torch.zeros(1, 1, 32, 32)).shape == (1, 3, 32, 32)
    with pytest.raises(FederationError, match=r"stride \[16, 16\]"):
        nets.check_patch(net, (64, 60))


def test_a_backbone_with_a_head_per_organ_begins_with_the_weights_of_the_file(tmp_path: Path) -> None:
    source, path = filled(ConvNeXtV2(DEPTHS, DIMS, 3)), tmp_path / "w.safetensors"
    save_file(as_timm(source), path)
    backbone = {"name": "deeplabv3plus", **SMALL, "weights": str(path)}
    net = nets.build("organ_heads", {"backbone": backbone}, in_channels=3, classes=4, spatial_dims=2, seed=1)
    got = tensors_of(net.backbone.encoder)  # type: ignore[union-attr,arg-type]
    assert all(torch.equal(got[name], value) for name, value in tensors_of(source).items())
