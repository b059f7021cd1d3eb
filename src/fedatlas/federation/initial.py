"""The key `init_from`: first weights from a model that knows other classes, or the same.

The file is settled when it is read: which classes the weights know, and their digest, which are part of the federation's
hash. So all parties agree on the bits with which a run starts, though the server alone reads the weights.

Shapes: C classes of the federation.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from fedatlas.core.errors import FederationError, NameMismatch, RunFolderError, WireError
from fedatlas.core.labels import BACKGROUND, LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.tensors import Tensors, head_of, load, parts, tensors_of
from fedatlas.nets.convnext import read_weights
from fedatlas.nets.module import Net
from fedatlas.transport import wire
from fedatlas.transport.rounds import read_json, read_run
from fedatlas.transport.store import read_whole


@options
class InitFrom:
    """First weights: those of a run, of a file, or of a MONAI bundle."""

    path: str | None = option(
        None,
        "A run folder, a .safetensors or .pth file, or the folder of a MONAI bundle; only the server needs it, and who "
        "has it not gives sha256 and classes.",
    )
    model: Literal["best", "last"] = option("best", "Of a run folder: which model.")
    classes: tuple[str, ...] | None = option(
        None, "The classes of the rows of its head, in their order; null: as the weights say themselves."
    )
    findings: tuple[str, ...] | None = option(
        None, "Likewise, its findings of the whole image, beside segmentation."
    )
    sha256: str | None = option(
        None,
        "The digest of the file of weights; null: that of the file as it is when this is read.",
        pattern="^[0-9a-f]{64}$",
    )


def settled(given: InitFrom) -> InitFrom:
    """With the classes and the digest of the weights. Raises FederationError where they cannot be told."""
    if given.classes is not None and given.sha256 is not None:
        return replace(given, findings=given.findings or ())
    if given.path is None:
        lacks = "classes" if given.sha256 else "sha256"
        raise FederationError(
            f"init_from: {lacks}: missing; without `path`, which names the weights, both `classes` and `sha256` are needed"
        )
    file = weights_file(given)
    about = {} if given.classes is not None else _told(Path(given.path), file)
    classes = given.classes or about.get("classes")
    if not classes:
        raise FederationError(
            f"init_from: {file}: does not say which classes its head knows; list them in `init_from.classes`, in the order "
            f"of its rows (exclusive classes begin with {BACKGROUND})"
        )
    digest = given.sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
    found = given.findings if given.findings is not None else about.get("findings", ())
    return replace(given, classes=tuple(classes), findings=tuple(found), sha256=digest)


def weights_file(given: InitFrom) -> Path:
    """The file with the weights that `path` means. Raises FederationError for a path that means none."""
    path = Path(given.path or "")
    if path.is_file():
        return path
    if not path.is_dir():
        raise FederationError(
            f"init_from: path: {path}: there is no such file or folder; a run folder, a .safetensors or .pth file, or the "
            "folder of a MONAI bundle is expected"
        )
    if (path / "run.json").exists():
        file = path / "models" / f"{given.model}.fa"
        there = sorted(kept.stem for kept in file.parent.glob("*.fa"))
        if not file.exists():
            raise FederationError(
                f"init_from: {path}: the run has no model {given.model!r}; it has: {', '.join(there) or 'none yet'}"
            )
        return file
    if (path / "configs" / "metadata.json").exists():
        for name in ("model.safetensors", "model.pth", "model.pt"):
            if (path / "models" / name).exists():
                return path / "models" / name
        raise FederationError(
            f"init_from: {path}: a MONAI bundle without models/model.safetensors or models/model.pt, so without weights"
        )
    raise FederationError(
        f"init_from: path: {path}: a folder with neither run.json (a run) nor configs/metadata.json (a MONAI bundle)"
    )


def _told(path: Path, file: Path) -> dict[str, Any]:
    """The "classes" and "findings" that a run, a bundle or a file says it knows; what it does not say is left out."""
    if path.is_dir() and (path / "run.json").exists():
        labels = read_run(path)["labels"]
        return {"classes": labels["names"], "findings": labels.get("findings", ())}
    about: dict[str, Any] = {}
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
                metadata = opened.metadata() or {}
            about = {key: json.loads(metadata[key]) for key in ("classes", "findings") if key in metadata}
        except (SafetensorError, OSError, ValueError) as error:
            raise FederationError(f"init_from: {file}: cannot be read ({error})") from None
    if "classes" not in about and path.is_dir():
        outputs = (
            read_json(path / "configs" / "metadata.json").get("network_data_format", {}).get("outputs", {})
        )
        channels = next((o["channel_def"] for o in outputs.values() if o.get("channel_def")), {})
        about["classes"] = [channels[key] for key in sorted(channels, key=int)]
    return about


def old_classes(given: InitFrom, space: LabelSpace) -> tuple[int, ...]:
    """The foreground classes of a space that the weights know already."""
    return tuple(c for c in space.foreground if space.names[c] in (given.classes or ()))


def sentence(given: InitFrom, space: LabelSpace) -> str:
    """What is taken and what not, for a person."""
    classes = [name for name in given.classes or () if name != BACKGROUND]
    own = [space.names[c] for c in space.foreground]
    groups = (
        ("rows of the head taken for", [name for name in own if name in classes]),
        ("new", [name for name in own if name not in classes]),
        ("not taken", [name for name in classes if name not in own]),
    )
    told = "; ".join(f"{what} {', '.join(names)}" for what, names in groups if names)
    which = f" ({given.model})" if given.path and Path(given.path).is_dir() else ""
    return f"first weights from {given.path or 'the server'}{which}, {(given.sha256 or '')[:8]}: {told}"


def initialise(
    net: Net,
    given: InitFrom,
    space: LabelSpace,
    model_of: Callable[[Path, Any], Any] = lambda _, tree: tree["model"],
) -> None:
    """Copies the weights into a net. Rows of classes that both know are matched by name; those of others stay as they
    are. model_of: a file of a run and what it holds -> its model, name -> tensor.

    Raises FederationError, before anything is changed, for weights that are not those agreed on, of another net, of other
    findings, or whose classes exclude each other where those of the space do not, or the other way round.
    """
    classes, findings = given.classes or (), given.findings or ()
    if given.path is None:
        raise FederationError("init_from: path: missing; the server of a run reads the weights")
    if (BACKGROUND in classes) != space.exclusive:
        kinds = {True: "exclude each other (softmax)", False: "overlap (sigmoid)"}
        raise FederationError(
            f"init_from: {given.path}: its classes {kinds[BACKGROUND in classes]}, those of the federation "
            f"{kinds[space.exclusive]}; a head of one kind cannot go on as the other"
        )
    if findings != space.findings:
        raise FederationError(
            f"init_from: {given.path}: tells the findings {list(findings)} of the whole image, the federation "
            f"{list(space.findings)}; they have to be the same"
        )
    file = weights_file(given)
    values = _read(file, given, model_of)
    try:
        if classes != space.names:
            if net.by_organ:
                raise FederationError(
                    f"init_from: {given.path}: its classes are {', '.join(classes)}, those of the federation {', '.join(space.names)}; "
                    f"{type(net).__name__} has parts for single organs, so they have to be the same, in one order"
                )
            values = _by_class(net, values, classes, space)
        load(net, values)
    except NameMismatch as error:
        raise FederationError(
            f"init_from: {file}: the weights are not of this federation's net; set `net` and the inputs as they were. {error}"
        ) from None


def _read(file: Path, given: InitFrom, model_of: Callable[[Path, Any], Any]) -> Tensors:
    """The tensors of a file of weights. Raises FederationError for one that is damaged or not the one agreed on."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != given.sha256:
        raise FederationError(
            f"init_from: {file}: is not the file agreed on: its sha256 is {digest[:16]}…, that of the federation "
            f"{(given.sha256 or '')[:16]}…; put the file back, or leave `sha256` out for a new run"
        )
    if file.suffix != ".fa":
        return _as_here(read_weights(file))
    try:
        return dict(model_of(file, wire.decode(read_whole(file))))
    except (WireError, RunFolderError, KeyError, TypeError, OSError) as error:
        raise FederationError(f"init_from: {file}: cannot be read ({error})") from None


def _as_here(values: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors under the names of our net "unet", where they have those of MONAI's DynUNet; others as they are."""
    if not any(name.startswith("input_block.") for name in values):
        return dict(values)
    downs = 1 + max((int(n.split(".")[1]) for n in values if n.startswith("downsamples.")), default=-1)
    moved: Tensors = {}
    for name, value in values.items():
        block, _, rest = name.partition(".")
        if block == "downsamples":
            number, _, rest = rest.partition(".")
            moved[f"downs.{1 + int(number)}.{rest}"] = value
        elif block != "skip_layers":  # the same blocks again, in the recursion that runs them
            here = {"input_block": "downs.0", "bottleneck": f"downs.{1 + downs}", "upsamples": "ups"}
            here |= {"output_block": "head", "deep_supervision_heads": "heads"}
            moved[f"{here.get(block, block)}.{rest}"] = value
    return moved


def _by_class(net: Net, values: Tensors, classes: Sequence[str], space: LabelSpace) -> Tensors:
    """The weights with the row of every class at its place in the space; rows of new classes are those of the net.

    classes: of the rows of `values`. Raises FederationError where a net has no rows that can be told apart, NameMismatch
    where the tensors of `values` have not one per class."""
    own, moved = tensors_of(net), dict(values)
    axes = head_of(net)
    if "deep_supervision" in parts(net):
        axes |= head_of(net, "deep_supervision")
    pairs = [(here, classes.index(name)) for here, name in enumerate(space.names) if name in classes]
    for name in axes:
        if name not in values:
            continue  # `load` tells it
        rows, other, axis = own[name].clone(), values[name], axes[name]
        expected = [len(classes) if place == axis else size for place, size in enumerate(rows.shape)]
        if list(other.shape) != expected:
            raise NameMismatch(
                f"{name} is {list(other.shape)}, expected {expected}: one row for each of {', '.join(classes)}"
            )
        for here, row in pairs:
            rows.select(axis, here).copy_(other.select(axis, row))
        moved[name] = rows
    return moved
