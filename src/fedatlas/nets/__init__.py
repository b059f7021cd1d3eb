"""Nets by name, their options, and the checks that a net fits a federation."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fedatlas.core import seeds
from fedatlas.core.errors import FederationError
from fedatlas.core.extensions import Extensions
from fedatlas.core.options import from_dict, not_known
from fedatlas.core.outputs import Mixed
from fedatlas.nets.classifier import CNN, Classifier, DenseNet121
from fedatlas.nets.cond_unet import CondUNet
from fedatlas.nets.crld_unet import CRLDUNet
from fedatlas.nets.deeplab import DeepLabV3Plus
from fedatlas.nets.dodnet import DoDNet
from fedatlas.nets.heads import SimSiamHeads
from fedatlas.nets.kim_unet import KimUNet
from fedatlas.nets.mednext import MedNeXt
from fedatlas.nets.menunet import MENUNet
from fedatlas.nets.module import PAGE, Net
from fedatlas.nets.organ_heads import OrganHeads
from fedatlas.nets.ufps_unet import UFPSUNet
from fedatlas.nets.unet import UNet


class NetOptions(Protocol):
    """An `@options` class that can make its net. Where `build` takes `findings: int` too, the net can have a head for
    so many findings of the whole image; with a method `initialise(net)`, its first weights come from a file."""

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> Net: ...


REGISTRY: dict[str, type] = {
    "unet": UNet,
    "mednext": MedNeXt,
    "deeplabv3plus": DeepLabV3Plus,
    "kim_unet": KimUNet,
    "organ_heads": OrganHeads,
    "menunet": MENUNet,
    "dodnet": DoDNet,
    "cond_unet": CondUNet,
    "crld_unet": CRLDUNet,
    "ufps_unet": UFPSUNet,
    "cnn": CNN,
    "densenet121": DenseNet121,
    "simsiam_heads": SimSiamHeads,
}

FOR_LEVEL: dict[str, tuple[str, ...]] = {
    "voxel": (
        "unet",
        "mednext",
        "deeplabv3plus",
        "kim_unet",
        "organ_heads",
        "menunet",
        "dodnet",
        "ufps_unet",
        "cond_unet",
        "crld_unet",
    ),
    "image": ("cnn", "densenet121"),
}
"""Which nets of this package fit labels of voxels, and of whole images."""

OTHERS = Extensions("net", "fedatlas.nets")
"""Nets of other packages, and of this process."""

N = TypeVar("N", bound=type)


def register(name: str) -> Callable[[N], N]:
    """A decorator: registers a net in this process, see `Extensions.register`. The class is one of `options`, with
    `build` as of `NetOptions`."""
    return OTHERS.register(name, lambda: REGISTRY)


def names() -> list[str]:
    """All nets: of this package, then of others."""
    return [*REGISTRY, *OTHERS.names()]


def get(name: str) -> type[Any]:
    """The options class of a net. Raises FederationError, naming the nearest net, for an unknown name, and for a class that
    cannot make a net."""
    found = REGISTRY.get(name) or OTHERS.find(name)
    if found is None:
        raise not_known("the net", name, names())
    if not (isinstance(found, type) and callable(getattr(found, "build", None)) and is_dataclass(found)):
        raise FederationError(
            f"net {name}: {getattr(found, '__name__', found)} is no class of options that makes a net; write @options above it and "
            f"in it build(self, *, in_channels, classes, spatial_dims), {PAGE}"
        )
    return found


def net_of(name: str) -> type[Net]:
    """The class of the nets that a name stands for, as the `build` of its options declares it. Raises as `get`."""
    return get_type_hints(get(name).build)["return"]


class _NoValues(TorchFunctionMode):
    """Leaves tensors on the meta device as they are where a net would fill them: there is nothing to fill, and torch takes
    ten times as long over it as over making the net."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            getattr(func, "__name__", "") in _FILLS
            and args
            and isinstance(args[0], torch.Tensor)
            and args[0].is_meta
        ):
            return args[0]
        return func(*args, **(kwargs or {}))


_FILLS = {
    "normal_",
    "uniform_",
    "trunc_normal_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "xavier_uniform_",
    "xavier_normal_",
}


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within the context nets are made on the meta device: their tensors have a shape and no values."""
    with torch.device("meta"), _NoValues():
        yield


def build(
    name: str,
    options: Mapping[str, Any],
    *,
    in_channels: int,
    classes: int,
    spatial_dims: int,
    seed: int,
    findings: int = 0,
    initial: bool = True,
) -> Net:
    """A registered net, in training mode. Its weights depend on its options and the seed only; torch's global
    generator is left as it was.

    findings: of the whole image, beside segmentation; all other weights are those of the net without them. initial:
    whether a file of weights that the options name is read; not needed where values are loaded anyway.

    Raises FederationError for an unknown name or option, for findings where the net has no head for them, and for a
    file of weights that cannot be read or is of another net.
    """
    chosen: Any = from_dict(get(name), options, what=f"net {name}")
    if spatial_dims not in (2, 3):
        raise FederationError(f"net {name}: spatial_dims is {spatial_dims}; allowed: 2, 3")
    if findings and not _takes_findings(chosen):
        able = ", ".join(sorted(other for other in names() if _takes_findings(get(other))))
        raise FederationError(
            f"net {name}: has no head for findings of the whole image, and labels.findings names {findings}; "
            f"allowed: {able}; or leave labels.findings out"
        )
    more = {"findings": findings} if findings else {}
    with seeds.isolated(seed, name):
        net: Net = chosen.build(in_channels=in_channels, classes=classes, spatial_dims=spatial_dims, **more)
    if not isinstance(net, Net):
        raise FederationError(
            f"net {name}: build gave a {type(net).__name__}; expected is a module that derives from fedatlas.nets.Net, {PAGE}"
        )
    if initial and hasattr(chosen, "initialise"):
        chosen.initialise(net)
    return net


def _takes_findings(options: Any) -> bool:
    return "findings" in inspect.signature(options.build).parameters


def check_patch(net: nn.Module, patch: Sequence[int]) -> None:
    """Raises FederationError for a patch that the net cannot take, naming the sizes that it can."""
    if isinstance(net, Net):
        net.check_patch(patch)


def check_level(name: str, net: nn.Module, level: str) -> None:
    """Raises FederationError for a net for voxels where labels are of images, or the other way round."""
    got = net.level if isinstance(net, Net) else "voxel"
    if got != level:
        words = {"voxel": "segmentation", "image": "classification"}
        raise FederationError(
            f"net {name}: is for {words[got]}, the federation's task is {words[level]}; for it there are: "
            f"{', '.join(FOR_LEVEL[level])}"
        )


def check_classes(name: str, net: nn.Module, exclusive: bool) -> None:
    """Raises FederationError for a net that is made for exclusive classes only, where they overlap."""
    if isinstance(net, Net) and net.by_organ and not exclusive:
        raise FederationError(
            f"net {name}: is for exclusive classes, and labels.exclusive is false; take another net, as unet"
        )


def check_output(
    net: nn.Module,
    classes: int,
    *,
    findings: int | None = None,
    in_channels: int | None = None,
    patch: Sequence[int] | None = None,
) -> None:
    """Raises FederationError unless every head of the net gives one channel per class, the first of them at
    the resolution of the input (one number per class where the net is for whole images), and one number per finding
    where there are any. Runs the net on shapes only: nothing is computed.

    findings: None: as many as the net says itself. in_channels, patch: of the input; needed for a net that is not a
    `Net`.
    """
    if findings is None:
        findings = net.findings if isinstance(net, Net) else 0
    if isinstance(net, Net):
        in_channels, patch = in_channels or net.in_channels, patch or [2 * by for by in net.divisor]
    if in_channels is None or patch is None:
        raise ValueError("check_output: in_channels and patch are needed for a net that is not a nets.Net")
    image_level = isinstance(net, Net) and net.level == "image"
    expected = (2, classes) if image_level else (2, classes, *patch)
    what = f"net {type(net).__name__}: for an input of shape {(2, in_channels, *patch)} it"
    mode = net.training
    try:
        for training in (False, True):
            net.train(training)
            try:
                outputs = _on_shapes(net, (2, in_channels, *patch))
            except (RuntimeError, ValueError) as error:
                raise FederationError(f"{what} fails: {error}") from error
            shape = tuple(outputs.findings.shape) if isinstance(outputs, Mixed) else None
            if shape != ((2, findings) if findings else None):
                raise FederationError(
                    f"{what} gives {'no findings' if shape is None else f'findings {shape}'}, which does not fit the "
                    f"label space with {findings} findings of the whole image; expected "
                    f"{(2, findings) if findings else 'none'}"
                )
            outputs = outputs.voxels if isinstance(outputs, Mixed) else outputs
            got = [tuple(h.shape) for h in ([outputs] if isinstance(outputs, Tensor) else outputs)]
            if got[0] != expected or any(shape[1] != classes for shape in got):
                raise FederationError(
                    f"{what} gives {', '.join(map(str, got))}, which does not fit the label space of {classes} "
                    f"classes; expected {expected}"
                )
    finally:
        net.train(mode)


def check_batch(net: nn.Module, batch: int, shape: Sequence[int]) -> None:
    """Raises FederationError for a net that cannot train on batches of so many samples [I, *S], though on two (`check_output`):
    batch norm cannot with one value per channel. Runs the net on shapes only."""
    mode = net.training
    try:
        if batch == 1:
            _on_shapes(net.train(), (1, *shape))
    except (RuntimeError, ValueError):
        raise FederationError(
            f"local.batch is 1: the net {type(net).__name__} normalises over a batch, and of one sample of shape {list(shape)} "
            "it has one value per channel, which cannot be normalised; set local.batch to 2 or more, or take larger samples, "
            "or a net with group norm"
        ) from None
    finally:
        net.train(mode)


def held_for_gradients(net: nn.Module, shape: Sequence[int]) -> tuple[int, int]:
    """Bytes that training in float32 keeps of one sample [I, *S] until its gradients are computed, beside the weights, and
    those of the largest tensor among them. Runs the net on shapes only: nothing is computed. Raises FederationError for a
    sample that the net cannot take, or that no memory holds."""
    weights, held = _shapes_of(net, gradients=True), {}
    own = {id(storage): storage for storage in (value.untyped_storage() for value in weights.values())}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if id(storage) not in own:
            held[id(storage)] = storage
        return value

    mode = net.training
    two = torch.empty(2, *shape, device="meta")  # of one, batch norm may be left with one value each
    try:
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda value: value):
            functional_call(net.train(), weights, (two,))
    except (RuntimeError, ValueError) as error:
        raise FederationError(
            f"net {type(net).__name__}: fails for an input of shape {list(shape)}: {str(error).splitlines()[0]}"
        ) from None
    finally:
        net.train(mode)
    sizes = [storage.nbytes() for storage in held.values()]
    return sum(sizes) // 2, max(sizes, default=0) // 2


def _on_shapes(net: nn.Module, shape: Sequence[int]) -> Any:
    """What a net gives for an input of a shape, without values: nothing is computed."""
    with torch.no_grad():
        return functional_call(net, _shapes_of(net), (torch.empty(*shape, device="meta"),))


def _shapes_of(net: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """The parameters and buffers of a net without values. gradients: do parameters that train have them?"""
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    return {
        name: torch.empty_like(value, device="meta").requires_grad_(gradients and value.requires_grad)
        for name, value in tensors.items()
    }


__all__ = [
    "REGISTRY",
    "Classifier",
    "Net",
    "NetOptions",
    "build",
    "check_batch",
    "check_classes",
    "check_level",
    "check_output",
    "check_patch",
    "get",
    "held_for_gradients",
    "names",
    "net_of",
    "register",
]
