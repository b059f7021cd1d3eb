"""May a run folder be used: is it as its run left it, does its model fit it, does it fit in memory. And may an output
folder be written."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedatlas import nets
from fedatlas.core.contract import Member
from fedatlas.core.errors import DataError, FederationError, NameMismatch, RunFolderError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.memory import require_memory
from fedatlas.core.tensors import is_finite, n_bytes, require_same, shapes_of
from fedatlas.federation.design import versions
from fedatlas.federation.file import hash_of, load_federation
from fedatlas.transport.rounds import read_run

DECIDING = ("fedatlas", "torch", "monai", "numpy", "scipy", "nibabel")
"""The packages whose versions decide numbers, builds for CPU or GPU aside."""

Warn = Callable[[str], None]
"""Is given what a person should know, a sentence without its end each."""


def silent(text: str) -> None:
    """A `Warn` that tells nobody."""


def differing_versions(info: Mapping[str, Any]) -> str:
    """The packages of which a run had other versions than are installed here; "" if none."""
    kept, here = info.get("versions"), versions()
    kept = kept if isinstance(kept, Mapping) else {}
    differences = [
        f"{name} {kept[name]} then, {here[name]} now"
        for name in DECIDING
        if name in kept and str(kept[name]).partition("+")[0] != here[name].partition("+")[0]
    ]
    return ", ".join(differences)


def record_of(path: Path, warn: Warn = silent) -> tuple[dict[str, Any], LabelSpace, int]:
    """A run's record, its label space, its images per case.

    Raises RunFolderError where run.json, or federation.yaml beside it, is damaged or not as the run left it.
    """
    info = read_run(path)
    file = path / "run.json"
    try:
        space, channels = LabelSpace.from_plain(info["labels"]), info["channels"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{file}: its labels cannot be read ({type(error).__name__})") from None
    if not isinstance(channels, int) or isinstance(channels, bool) or channels < 1:
        raise RunFolderError(f"{file}: channels is {channels!r}; a whole number from 1 on is expected")
    written = path / "federation.yaml"
    mark = info.get("federation")
    changed = mark is not None and mark != hashlib.sha256(written.read_bytes()).hexdigest()
    if changed and not _decides_the_same(written, info):
        raise RunFolderError(f"{written}: was changed after the run wrote it; restore the file")
    differences = differing_versions(info)
    if differences:
        warn(f"{path}: was made by other versions ({differences}); numbers may differ")
    return info, space, channels


def _decides_the_same(written: Path, info: Mapping[str, Any]) -> bool:
    """Does a federation file differ from what a run wrote in nothing that decides a result, but in codes of classes, say?"""
    try:
        return hash_of(load_federation(written)) == info.get("hash")
    except FederationError:
        return False


def require_members(
    members: Sequence[Member],
    shapes: Callable[[str], nn.Module],
    sample: Sequence[int],
    device: str,
    source: str,
) -> None:
    """Raises RunFolderError where a model is not one of the federation's nets or holds numbers that are not finite, and
    FederationError where the device cannot hold the net with one sample [I, *S]. No net is made before.

    shapes: a net by its name, on the meta device. source: names the models in messages.
    """
    forms: dict[str, Mapping[str, Tensor]] = {}
    for member in members:
        if member.net not in forms:
            net = shapes(member.net)
            forms[member.net] = shapes_of(net)
            largest = nets.held_for_gradients(net, sample)[1] if member.net == "main" else 0
            n = sum(parameter.numel() for parameter in net.parameters())
            what = f"{source}: a net of {n:,} parameters on a sample of {'×'.join(map(str, sample))}"
            remedy = "it is not the federation that this model was trained with, or this machine is too small"
            require_memory(n_bytes(forms[member.net]) + largest, what, remedy, FederationError, device)
        held = member.model.values() if isinstance(member.model, Mapping) else [None]
        if not all(isinstance(value, Tensor) for value in held):
            raise RunFolderError(f"{source}: holds something else than tensors in the place of a model")
        try:
            require_same(forms[member.net], member.model, asked=source)
        except NameMismatch as error:
            raise RunFolderError(
                f"{error}. It is of another net than federation.yaml says; restore both"
            ) from None
        if not is_finite(dict(member.model)):
            raise RunFolderError(
                f"{source}: holds numbers that are not finite; such a model says nothing. Take another with --model"
            )


def require_new(out: Path, inputs: Sequence[Path], written: Sequence[Path], overwrite: bool) -> None:
    """Before the work: raises FederationError where results would lie among the files that they are of, would replace others
    that are there, or cannot be written. Leaves nothing behind. written: what will be made."""
    for file in inputs:
        if file.parent.resolve() == out.resolve():
            raise FederationError(
                f"-o {out}: is the folder of {file.name}; results among the inputs would be taken for inputs, give a "
                "folder of their own"
            )
    there = [path for path in dict.fromkeys(written) if path.exists()]
    if there and not overwrite:
        more = f" and {len(there) - 1} more of these files" if len(there) > 1 else ""
        raise FederationError(
            f"{there[0]}{more}: exists already; give another folder with -o, or replace it with --overwrite"
        )
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        for folder in missing:
            folder.rmdir()
    except OSError as error:
        raise FederationError(
            f"-o {out}: cannot be written ({error.strerror or error}); give another folder"
        ) from None


def require_files(files: Sequence[Path]) -> None:
    """Raises DataError for what is no file."""
    for file in files:
        try:
            file.stat()
        except FileNotFoundError:
            raise DataError(f"{file}: no such file; correct the path") from None
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror or error})") from None
        if file.is_dir():
            raise DataError(f"{file}: a folder; give its files, as {file}/*")
