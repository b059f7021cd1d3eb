"""Grad-CAM of the sub-encoders of arms' models, of one case per organ; it needs the sites' data on this machine.

The map is of one window of the size that the net is trained on, around the organ: around the middle of its largest
slice. A whole volume has no single map, as alpha_k is a mean over what the net sees at once.

Shapes: H rows and W columns of a slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedatlas.compare.overlays import VERSION, Cases, Shown, Subject, keep, there
from fedatlas.compare.running import Tell
from fedatlas.core.errors import DataError, FedAtlasError
from fedatlas.evaluation.pictures import grey, ras_spacing, to_ras, turned
from fedatlas.federation.file import Federation
from fedatlas.federation.trained import Trained
from fedatlas.learning.inference import neighbours
from fedatlas.papers.fedmenu.subencoders import LEVEL, activation, has_subencoders

MAPS = 2
"""Of the files that keep maps, beside the `VERSION` of predictions; one of another is made again."""


@dataclass(frozen=True, eq=False)
class Cam:
    """The map of an organ in one slice. image, cam [H, W] in 0..1, cam over its own largest value in the window (0
    everywhere where nothing is positive); truth [H, W] bool; spacing [2] in mm."""

    site: str
    case: str
    image: np.ndarray
    cam: np.ndarray
    truth: np.ndarray
    spacing: tuple[float, float]


def has_organs(federation: Federation) -> bool:
    """Whether the federation's net has sub-encoders."""
    return federation.net["name"] == "menunet"


def explained(subjects: Sequence[Subject]) -> list[Subject]:
    """Those whose net has sub-encoders."""
    return [subject for subject in subjects if has_organs(subject.federation)]


def cams(
    subjects: Sequence[Subject],
    shown: Mapping[str, Mapping[str, Shown]],
    level: int = LEVEL,
    tell: Tell = lambda text: None,
) -> tuple[dict[str, dict[str, Cam]], dict[str, list[str]]]:
    """organ -> arm -> its map; and why there is no map -> of what.

    shown: site -> arm -> what was predicted of the site's case, as of `overlays.predicted`. An organ is shown in the case of
    the first site that annotates it and in whose case it is, else of the first where its truth is known. Each map is made
    once, and kept in the site's folder of the run.
    """
    found: dict[str, dict[str, Cam]] = {}
    problems: dict[str, list[str]] = {}
    read = Cases()
    for subject in subjects:
        for organ, cam in _of_run(subject, _chosen(shown), level, read, tell, problems).items():
            found.setdefault(organ, {})[subject.arm] = cam
    return found, problems


def _chosen(shown: Mapping[str, Mapping[str, Shown]]) -> dict[str, tuple[str, str]]:
    """class -> (site, case) in which it is shown."""
    places: dict[str, list[tuple[bool, str, str]]] = {}
    for site, of_site in shown.items():
        one = next(iter(of_site.values()))
        for name, mask in (one.solids or one).truth.items():
            if mask.any():
                places.setdefault(name, []).append((name in one.annotated(), site, one.case))
    return {
        name: next(((s, c) for known, s, c in of if known), of[0][1:]) for name, of in sorted(places.items())
    }


def _of_run(
    of_arm: Subject,
    chosen: Mapping[str, tuple[str, str]],
    level: int,
    read: Cases,
    tell: Tell,
    problems: dict[str, list[str]],
) -> dict[str, Cam]:
    models: dict[str, Trained] = {}
    found: dict[str, Cam] = {}
    for name, (site, case) in chosen.items():
        subject = of_arm.at(site)
        about = (str(VERSION), str(MAPS), str(level), subject.finished, case, name)
        file = subject.file(site, f"gradcam-{''.join(c if c.isalnum() else '_' for c in name)}")
        try:
            arrays = _kept(file, about)
            if arrays is None:
                there(subject, site)
                if site not in models:
                    models[site] = subject.trained(site)
                arrays = _arrays(subject, models[site], name, site, case, level, read, tell)
                keep(file, arrays | {"about": np.array(about)})
        except FedAtlasError as error:
            problems.setdefault(str(error).splitlines()[0], []).append(f"{subject.arm}, {name}")
            continue
        if arrays:
            first, second = (float(v) for v in arrays["spacing"])
            image, cam = arrays["image"], arrays["cam"].astype(np.float32)
            found[name] = Cam(site, case, image, cam, arrays["truth"], (first, second))
    return found


def _kept(file: Path, about: tuple[str, ...]) -> dict[str, Any] | None:
    """What a file holds, if it is about this."""
    if not file.exists():
        return None
    with np.load(file, allow_pickle=False) as kept:
        if tuple(str(word) for word in kept["about"]) != about:
            return None
        return {key: kept[key] for key in kept.files if key != "about"}


def _arrays(
    subject: Subject,
    trained: Trained,
    name: str,
    site: str,
    case: str,
    level: int,
    read: Cases,
    tell: Tell,
) -> dict[str, Any]:
    """The arrays of a `Cam`; none of a class that is not the first of an organ, or of a net with one encoder for all."""
    if name not in trained.space.names:
        return {}
    c = trained.space.index(name)
    of_class = (
        m for m in trained.members if m.net == "main" and m.chooses is None and c in (m.classes or (c,))
    )
    if (member := next(of_class, None)) is None:
        raise DataError(f"no model of {subject.arm} speaks for {name}")
    net = trained.network(member.model)
    if not has_subencoders(net):
        raise DataError(f"the net of {subject.arm} has no sub-encoders")
    organ = next((m for m, classes in enumerate(net.organs) if classes[0] == c), None)
    if organ is None or len(net.organs) == 1:
        return {}
    tell(f"{subject.arm}: Grad-CAM of {name} in {case} at {site}")
    volume = read(subject, trained, site, case)
    truth = volume.truth("federation")
    of = [k for k in net.organs[organ] if k == c or volume.scored[k]]
    mask = np.isin(truth, of) if trained.space.exclusive else np.any([truth[k] > 0 for k in of], axis=0)
    image, cam, mask, spacing = _window(volume, mask, trained, net, organ, level)
    return {"image": grey(image), "cam": cam.astype(np.float16), "truth": mask, "spacing": np.array(spacing)}


def _window(
    volume: Any, mask: np.ndarray, trained: Trained, net: Any, organ: int, level: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[float, float]]:
    """Image, map, truth and spacing of the slice in which most of the organ is, as viewers show it: in the window of the
    size of a patch around it. Of a net in two dimensions it is the slice that the net saw."""
    preprocessing, exclusive = trained.preprocessing, trained.space.exclusive
    patch, image = tuple(preprocessing.patch), volume.image.float()
    if not mask.any():
        raise DataError(f"{volume.case} holds none of it")
    at = int(mask.sum((0, 1)).argmax())
    centre = [round(float(places.mean())) for places in np.nonzero(mask[..., at])] + [at]
    if len(patch) == 2:
        seen = neighbours(image, torch.tensor([at]), preprocessing.context)[0]
        seen, inside = (
            cut(seen, centre[:2], patch),
            cut(torch.from_numpy(mask[..., at])[None], centre[:2], patch),
        )
        plain = cut(image[:1, ..., at], centre[:2], patch)
        found = activation(net, seen, organ, level=level, exclusive=exclusive)
        blocks = [plain[0].numpy()[..., None], found.numpy()[..., None], inside[0].numpy()[..., None]]
    else:
        seen = cut(image, centre, patch)
        found = activation(net, seen, organ, level=level, exclusive=exclusive)
        inside = cut(torch.from_numpy(mask)[None], centre, patch)[0].numpy()
        blocks = [seen[0].numpy(), found.numpy(), inside]
    blocks = [to_ras(block, preprocessing.orientation) for block in blocks]
    across = blocks[0].shape.index(1) if len(patch) == 2 else 2
    z = int(blocks[2].sum(tuple({0, 1, 2} - {across})).argmax())
    shown, cam, truth = (turned(block.take(z, across)) for block in blocks)
    spacing = np.delete(ras_spacing(volume.spacing, preprocessing.orientation), across)
    return shown, cam / _highest(found), truth, (float(spacing[1]), float(spacing[0]))


def _highest(cam: Tensor) -> float:
    return float(cam.max()) or 1.0


def cut(image: Tensor, centre: Sequence[int], size: Sequence[int]) -> Tensor:
    """The window [I, *size] of an image [I, *S] around a voxel, moved so that it lies inside; what is shorter than the
    window is padded with 0 on both sides, as in prediction."""
    pads: list[int] = []
    for n, wanted in zip(image.shape[:0:-1], tuple(size)[::-1], strict=True):
        short = max(wanted - n, 0)
        pads += [short // 2, short - short // 2]
    before = pads[::2][::-1]
    padded = F.pad(image, pads) if any(pads) else image
    place: list[slice] = [slice(None)]
    for n, middle, wanted, pad in zip(padded.shape[1:], centre, size, before, strict=True):
        first = min(max(middle + pad - wanted // 2, 0), n - wanted)
        place.append(slice(first, first + wanted))
    return padded[tuple(place)]
