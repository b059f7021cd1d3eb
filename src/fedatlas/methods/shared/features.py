"""The maps that the encoder of a net makes, seen while the net computes.

Any registered net will do: its part "encoder" (`core.tensors.parts`), or its parts "encoder:0", "encoder:1", … where it has
several, whose maps are then put beside one another.

Shapes: B batch, d channels, *s spatial.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedatlas.core.errors import FederationError


@dataclass(frozen=True)
class Call:
    """One call of a module: its first input, and the feature maps it returned."""

    module: nn.Module
    given: Tensor
    maps: list[Tensor]


@dataclass
class EncoderMaps:
    """Feature maps of a net's encoders, collected during the watched forward passes. Read them after a pass.

    net: its name, for errors. calls: for each encoder those of its modules, in the order in which they were made.
    """

    net: str
    calls: list[list[Call]] = field(default_factory=list)

    @property
    def levels(self) -> list[Tensor]:
        """[B, d, *s] the last maps of every resolution, the finest first. Raises as `blocks`."""
        self.blocks  # noqa: B018  (raises)
        found = [{tuple(m.shape[2:]): m for call in calls for m in call.maps} for calls in self.calls]
        sizes = sorted(found[0], key=lambda size: torch.Size(size).numel(), reverse=True)
        return [_beside([maps[size] for maps in found]) for size in sizes]

    @property
    def bottleneck(self) -> Tensor:
        """[B, d, *s] the maps that the encoders end with. Raises as `blocks`."""
        return _beside([block.maps[-1] for block in self.blocks])

    @property
    def blocks(self) -> list[Call]:
        """Of every encoder the call of the module that it ends with. Raises FederationError where an encoder was not
        called, or gave no maps."""
        for calls in self.calls:
            if not any(call.maps for call in calls):
                raise FederationError(
                    f"net {self.net}: does not call the modules of its encoder one by one, so that their maps cannot be "
                    "had; take another net, as unet"
                )
        return [[call for call in calls if call.maps][-1] for calls in self.calls]


@contextmanager
def watched(net: nn.Module, *, encoder_only: bool = False) -> Iterator[EncoderMaps]:
    """Notes what the encoders of `net` make until the context ends; a net that can run its encoders as one grouped
    computation (`grouped`) runs each by itself there. encoder_only: ends the context, and the forward pass that runs, as
    soon as every module of the encoders was called.

    Raises FederationError for a net that names no encoder.
    """
    encoders = _encoders(net)
    seen = EncoderMaps(type(net).__name__, [[] for _ in encoders])
    left = {id(module) for modules in encoders for module in modules}
    hooks = []
    grouped = [(module, module.grouped) for module in net.modules() if getattr(module, "grouped", False)]

    def note(calls: list[Call], module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        maps = [made] if isinstance(made, Tensor) else list(made) if isinstance(made, Sequence) else []
        calls.append(Call(module, given[0], [m for m in maps if isinstance(m, Tensor) and m.dim() > 2]))
        left.discard(id(module))
        if encoder_only and not left:
            raise _Enough

    for calls, modules in zip(seen.calls, encoders, strict=True):
        for module in modules:
            hooks.append(
                module.register_forward_hook(lambda m, given, made, calls=calls: note(calls, m, given, made))
            )
    for module, _ in grouped:
        module.grouped = False  # type: ignore[assignment]
    try:
        yield seen
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
        for module, before in grouped:
            module.grouped = before


def pooled(maps: Tensor) -> Tensor:
    """[B, d] the mean of each of the maps [B, d, *s], in full precision."""
    return maps.to(torch.promote_types(maps.dtype, torch.float32)).flatten(2).mean(2)


def is_one_module(net: nn.Module) -> bool:
    """Whether an encoder of the net is one module, so that the module it ends with is the whole of it. Raises as `watched`."""
    return any(len(modules) == 1 for modules in _encoders(net))


class _Enough(Exception):
    """The encoder is through."""


def _encoders(net: nn.Module) -> list[list[nn.Module]]:
    """The modules of each encoder; a ModuleList, which is never called itself, stands for what it holds."""
    inner = next((module for module in net.modules() if callable(getattr(module, "parts", None))), None)
    parts: dict[str, Any] = {} if inner is None else inner.parts()  # type: ignore[operator]
    chosen = [modules for part, modules in parts.items() if part.split(":")[0] == "encoder"]
    if not chosen:
        raise FederationError(
            f'net {type(net).__name__}: names no part "encoder", whose maps are needed; take a registered net, as unet'
        )
    return [_opened(modules) for modules in chosen]


def _opened(modules: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        return [modules]
    return [each for module in modules for each in _opened(module)]  # type: ignore[union-attr]


def _beside(maps: Sequence[Tensor]) -> Tensor:
    return maps[0] if len(maps) == 1 else torch.cat(list(maps), 1)
