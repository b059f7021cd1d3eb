"""What images look like, in a few numbers: so that another kind of input is told from the one a model was trained on.

A look is of one image, ranges are of the images of a site or of several sites. Both are plain values. Ranges name no
case; a site sends them when it joins a run.

Shapes: I channels, *S voxels or pixels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedatlas.core.errors import DataError

SAMPLE = 200_000
"""About so many voxels of an image are looked at."""
PERCENTILES = (1, 50, 99)
FAT = -50.0
"""Below this, fat and air in Hounsfield units; hardly anything else is stored with such values."""
FEW, MANY = 64, 128
"""Images of at most FEW values, all whole numbers, are label maps to a model whose images all had MANY or more."""
PROJECTION = ("CR", "DX", "RG", "XR", "RF")
"""DICOM modalities that are radiographs alike."""

Look = dict[str, Any]
Ranges = dict[str, Any]


def look_of(
    image: np.ndarray,
    *,
    spacing: Sequence[float] | None = None,
    picture: bool = False,
    modality: str = "",
    colour: bool = False,
) -> Look:
    """The look of an image [I, *S] as its file holds it, before any preprocessing.

    spacing: millimetres along the axes of the federation's orientation, None where nobody says them. picture: is it a
    PNG, a JPEG, DICOM or the like. modality: as DICOM names it. colour: has the file channels of colour that differ.
    """
    axes = [n for n in image.shape[1:] if n > 1]
    step = math.ceil((math.prod(axes) / SAMPLE) ** (1 / max(1, len(axes))))
    sample = image[(slice(None), *(slice(None, None, max(1, step)) for _ in image.shape[1:]))]
    values = np.unique(sample)
    percentiles = [np.percentile(channel, PERCENTILES) for channel in sample]
    return {
        "kind": "picture" if picture else "scan",
        "axes": len(axes),
        "spacing": None if spacing is None else [float(mm) for mm in spacing],
        "percentiles": [[float(f"{value:.3g}") for value in found] for found in percentiles],
        "values": len(values),
        "whole": bool((values == np.rint(values)).all()),
        "modality": modality,
        "colour": colour,
    }


def ranges_of(looks: Iterable[Mapping[str, Any]]) -> Ranges | None:
    """The ranges of several looks; None where there are none. Every number is the least or the largest of all."""
    looks = list(looks)
    spacings = [look["spacing"] for look in looks if look["spacing"] is not None]
    return _ranges(
        [
            {
                "kinds": [look["kind"]],
                "axes": [look["axes"]],
                "percentiles": [[[value, value] for value in channel] for channel in look["percentiles"]],
                "values": look["values"],
                "modalities": [look["modality"]],
                "colour": look["colour"],
            }
            for look in looks
        ],
        [[round(min(mm), 3), round(max(mm), 3)] for mm in zip(*spacings, strict=True)] or None,
    )


def joined(ranges: Iterable[Mapping[str, Any] | None]) -> Ranges | None:
    """The ranges of several sites together; None where a site has none, as from an older version."""
    found = list(ranges)
    if not found or any(one is None for one in found):
        return None
    spacings = [one["spacing"] for one in found if one and one["spacing"]]
    widest = [[min(s[0] for s in mm), max(s[1] for s in mm)] for mm in zip(*spacings, strict=True)]
    return _ranges([one for one in found if one], widest or None)


def _ranges(found: Sequence[Mapping[str, Any]], spacing: list[list[float]] | None) -> Ranges | None:
    if not found:
        return None
    return {
        "kinds": sorted({kind for one in found for kind in one["kinds"]}),
        "axes": sorted({n for one in found for n in one["axes"]}),
        "spacing": spacing,
        "percentiles": [
            [[min(p[0] for p in at), max(p[1] for p in at)] for at in zip(*channels, strict=True)]
            for channels in zip(*(one["percentiles"] for one in found), strict=True)
        ],
        "values": min(one["values"] for one in found),
        "modalities": sorted({name for one in found for name in one["modalities"]}),
        "colour": any(one["colour"] for one in found),
    }


def trained_on(info: Mapping[str, Any]) -> Ranges | None:
    """What a model was trained on, from the run's record; None where that does not say it, as of an older version."""
    sites = info.get("sites") or {}
    return joined(site.get("inputs") for site in sites.values() if site.get("role") != "test")


def other_kind(known: Ranges, look: Look) -> str:
    """Why an image is of another kind than the training images: a sentence without its end, "" if it is not."""
    if look["kind"] not in known["kinds"]:
        words = {"scan": "a scan (NIfTI)", "picture": "a picture"}
        were = " and ".join({"scan": "scans (NIfTI)", "picture": "pictures"}[kind] for kind in known["kinds"])
        return f"is {words[look['kind']]}, and the model was trained on {were}"
    if look["axes"] < min(known["axes"]):
        return "is a single slice, and the model was trained on volumes"
    modality, modalities = _group(look["modality"]), {_group(name) for name in known["modalities"]} - {""}
    if modality and modalities and modality not in modalities:
        return f"is of the modality {modality}, says its header, and the model was trained on {', '.join(sorted(modalities))}"
    if look["colour"] and not known["colour"]:
        return "is in colour, and the model was trained on grey pictures"
    few = look["values"] <= (FEW if look["whole"] else FEW // 4)
    if few and known["values"] >= MANY and (look["whole"] or look["kind"] == "picture"):
        return f"holds {look['values']} different values: it looks like a label map, and the model was trained on images"
    for of, now in _channels(known, look):
        told = f"holds values of {now[0]:g} to {now[2]:g} (1st to 99th percentile)"
        if of[0][1] <= FAT and now[0] >= 0:
            return (
                f"{told}, none below 0, and every training image held such of {of[0][1]:g} and less, as CT in Hounsfield "
                "units does: it is of another modality, or not in these units"
            )
        if of[0][0] >= 0 and now[0] <= FAT:
            return f"{told}, and no training image held values below 0: it looks like CT, which they were not"
    return ""


def _group(modality: str) -> str:
    return "X-ray" if modality in PROJECTION else modality


def _channels(known: Ranges, look: Look) -> list[tuple[Any, Any]]:
    """Percentiles of the training images and of an image, channel by channel; none where these are not equally many,
    which whoever gives the image to the net refuses."""
    if len(known["percentiles"]) != len(look["percentiles"]):
        return []
    return list(zip(known["percentiles"], look["percentiles"], strict=True))


def outside(known: Ranges, look: Look) -> list[str]:
    """In what an image lies outside of the training images, a sentence without its end each."""
    found = []
    if look["spacing"] is not None and known["spacing"] is not None:
        off = [
            not 0.9 * low <= mm <= 1.1 * high
            for mm, (low, high) in zip(look["spacing"], known["spacing"], strict=True)
        ]
        if any(off):
            ours = "×".join(f"{mm:.3g}" for mm in look["spacing"])
            theirs = " × ".join(
                f"{low:.3g}" if low == high else f"{low:.3g}-{high:.3g}" for low, high in known["spacing"]
            )
            found.append(f"voxels of {ours} mm; the training images had {theirs} mm")
    if look["axes"] > max(known["axes"]):
        found.append("a volume; the training images were single slices")
    if look["modality"] and set(known["modalities"]) == {""} and look["kind"] == "picture":
        found.append(f"of the modality {look['modality']}; that of the training images is not known")
    for of, now in _channels(known, look):
        low, high = of[0][0], of[2][1]
        spare = (high - low) / 4
        if now[0] < low - spare or now[2] > high + spare or not low <= now[1] <= high:
            found.append(
                f"values of {now[0]:g} to {now[2]:g}, half of them below {now[1]:g} (1st, 99th and 50th percentile); "
                f"the training images had {low:g} to {high:g}, the median {of[1][0]:g} to {of[1][1]:g}"
            )
    return found


def judge(known: Ranges | None, look: Look, what: str, *, anyway: bool = False) -> list[str]:
    """What a person should know of an image before the model's word on it counts, a sentence each.

    known: None where the run does not say what it was trained on. what: names the image. anyway: go on with another
    kind of image, and say so. Raises DataError for another kind of image.
    """
    if known is None:
        return []
    why = other_kind(known, look)
    if why and not anyway:
        raise DataError(f"{what}: {why}; if that is meant, go on with --anyway")
    found = [f"{what}: {why}"] if why else []
    return found + [f"{what}: {text}" for text in outside(known, look)]
