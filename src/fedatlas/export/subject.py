"""The one net of a run that is exported, and how it is run."""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.tensors import Tensors
from fedatlas.federation.file import inference_of, net_options, resolved
from fedatlas.federation.tasks import task_of
from fedatlas.federation.trained import Trained
from fedatlas.federation.usable import Warn, silent
from fedatlas.nets.module import Net


@dataclass(frozen=True)
class Subject:
    """A trained model that is one net.

    net: in evaluation mode, on the CPU. tensors: its weights, by FedAtlas's names. classes: those for which it may speak,
    None for all. plain: its federation file, with all defaults.
    """

    trained: Trained
    net: Net
    tensors: Tensors
    classes: tuple[int, ...] | None
    plain: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        """Are its labels of whole images?"""
        return self.trained.space.level == "image"

    @property
    def size(self) -> tuple[int, ...]:
        """*S of what it was trained on."""
        return task_of(self.trained.federation).size(self.trained.federation)

    @property
    def options(self) -> dict[str, Any]:
        """How it predicts: `evaluation.inference`, with a precision in any case."""
        return asdict(inference_of(self.trained.federation))

    def example(self, n: int = 2, size: Sequence[int] | None = None) -> Tensor:
        """Inputs [n, I, *S] of random numbers, always the same."""
        shape = (n, self.net.in_channels, *(size or self.size))
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def facts(self) -> dict[str, str]:
        """What a file of weights must say of itself: plain texts, JSON where there is more than a word in them."""
        trained, keys = self.trained, ("task", "net", "preprocessing", "images")
        name, chosen = net_options(trained.federation)
        about = {key: self.plain[key] for key in keys if self.plain.get(key) is not None} | {
            "net": {"name": name} | {key: self.plain["net"][key] for key in asdict(chosen)}
        }
        about.pop("preprocessing" if self.whole else "images", None)
        rest = {
            "labels": trained.space.to_plain(),
            "classes": list(trained.space.names),
            "speaks_for": None if self.classes is None else [trained.space.names[c] for c in self.classes],
            "in_channels": self.net.in_channels,
            "channels": trained.channels,
            "inference": self.options,
        }
        texts = {"format": "fedatlas", "model": trained.model, "round": str(trained.round)}
        return texts | {key: json.dumps(value) for key, value in (about | rest).items()}

    def save(self, file: Path) -> None:
        """Writes the weights as safetensors, by FedAtlas's names, with `facts` in the header."""
        from safetensors.torch import save_file

        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()}, file, metadata=self.facts()
        )


def subject(path: Path, model: str = "best", warn: Warn = silent) -> Subject:
    """The model of a run folder.

    Raises RunFolderError as `Trained`, and FederationError for a model that is several nets, or tells findings beside
    its classes of voxels."""
    trained = Trained(path, model, "cpu", warn)
    method = trained.federation.method["name"]
    if len(trained.members) > 1:
        local = [f"local/{site}" for site in trained.folder.local_models()]
        other = (
            f"export one of them with --model, as {', '.join(local)}"
            if local
            else (
                "run it again with evaluation.models: [best, local] and export a site's model, or train with a method whose "
                "model is one net"
            )
        )
        raise FederationError(
            f"{path}: model {model} of the method {method} is {len(trained.members)} nets that speak together, and an export "
            f"holds one; {other}. `fedatlas predict` runs them all"
        )
    (member,) = trained.members
    net = trained.network(member.model, member.net).eval()
    assert isinstance(net, Net)
    if net.findings:
        raise FederationError(
            f"{path}: model {model} tells findings of the whole image beside its classes, and an export holds a net with one "
            "output; `fedatlas predict` gives both"
        )
    return Subject(trained, net, dict(member.model), member.classes, resolved(trained.federation))


def program(subject: Subject, patch_only: bool = False) -> tuple[torch.export.ExportedProgram, bool]:
    """The net as a program of torch.export, for any number of inputs, and of any size that the net takes where it can be.

    Returns it, and whether sizes are free. patch_only: do not try that. Raises FederationError for a net that cannot be
    exported.
    """
    net, image = subject.net, subject.example()
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    reason = ""
    for free in ([] if patch_only else [True]) + [False]:
        axes: dict[int, Any] = {0: batch}
        if free:
            axes |= {
                axis + 2: by * torch.export.Dim(f"s{axis}", min=2, max=1 << 16)
                if by > 1
                else torch.export.Dim(f"s{axis}", min=8)
                for axis, by in enumerate(net.divisor)
            }
        try:
            with torch.no_grad(), _quiet():
                made = torch.export.export(net, (image,), dynamic_shapes=(axes,))
                if _same(net, made.module(), subject, free):
                    return made, free
                reason = "its program says other than the net"
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
    raise FederationError(
        f"net {subject.trained.federation.net['name']}: torch.export cannot follow it ({reason}); export safetensors, which "
        "`fedatlas` reads"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from printing what it makes of a net; an error says what went wrong."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _same(net: nn.Module, made: nn.Module, subject: Subject, free: bool) -> bool:
    """Does a program say what the net says, for another number of inputs, and for another size where these are free?"""
    sizes = [subject.size, larger(subject)] if free else [subject.size]
    return all(torch.equal(net(x), made(x)) for x in (subject.example(3, size) for size in sizes))


def larger(subject: Subject) -> tuple[int, ...]:
    """Another size that the net takes."""
    return tuple(n + by for n, by in zip(subject.size, subject.net.divisor, strict=True))
