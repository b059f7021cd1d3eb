"""What a site says of its data before there is a federation: names of labels, counts, spacings, shapes and percentiles.

No image, no name of a case, patient or file other than a table's, and no path is in it. It is a JSON file that a person reads
before it leaves the hospital, and that is checked before it is used at the coordinator's.

Axes are in the order left-right, back-front, foot-head; spacings in mm, shapes in voxels.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedatlas import __version__
from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import BACKGROUND, LabelSpace
from fedatlas.core.options import NAME
from fedatlas.data.datasets.shared.listing import Case, Problem
from fedatlas.data.formats.picture import PictureError, read_picture
from fedatlas.data.index import SiteConfig, SiteIndex, naming_of
from fedatlas.data.reading import Label, Raw, read_case, read_unlabelled
from fedatlas.data.transforms import Preprocessing, geometry_of
from fedatlas.federation.facts import Count, Text, names_of_channels

ABOUT = (
    "What FedAtlas found in the data of one site, to plan a federation with. This file holds the names of labels, numbers of "
    "cases, voxel sizes in mm, image sizes, and percentiles of intensities over all cases. It holds no image, no label map, no name "
    "of a case or patient, and no path. Axes are left-right, back-front, foot-head. Read it before you send it."
)
SPREAD = (0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 100.0)
"""Percentiles over the cases of a site."""
VALUES = (0.5, 5.0, 25.0, 50.0, 75.0, 95.0, 99.5)
"""Percentiles over voxels."""
SAMPLE = 20_000
"""About so many voxels of a case count, evenly spread."""
MOST_BYTES = 1 << 20
"""The largest description that is read."""
LONGEST = 100_000
"""Voxels or millimetres of the largest axis that is read."""


Percentiles = dict[str, list[float]]
"""Percentile -> a number for each axis."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Named(_Part):
    """A label of a site in its training cases. annotated: cases in which it was looked for; present: in which it is; voxels:
    the median of those that have it, None for findings of the whole image."""

    annotated: Count
    present: Count
    voxels: Count | None = None


class Values(_Part):
    """Intensities of a channel. foreground: of labelled voxels alone, with their mean and standard deviation."""

    percentiles: dict[str, float]
    foreground: dict[str, float] | None = None


class Description(_Part):
    """A site. format, reading, reference: as the keys of a site; kind: as of a data set; channels: what each holds, "" where
    nobody says it; overlap: share of labelled pixels with two labels or more; parts_alike: do all cases of a mask set
    have several masks; spacing_mm, shape: None where files do not say it."""

    about: str
    description: Literal[1] = 1
    fedatlas: Text
    site: Annotated[str, Field(pattern=NAME, max_length=100)]
    task: Literal["segmentation", "classification"]
    kind: Literal["volumes", "masks", "findings"]
    format: Text
    reading: dict[str, Any] = {}
    reference: bool = False
    channels: Annotated[list[Text], Field(min_length=1, max_length=64)]
    colour: bool = False
    cases: dict[Literal["train", "validation", "test"], Count]
    patients: Count
    labels: dict[Text, Named]
    findings: dict[Text, Named] = {}
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.0
    spacing_mm: Percentiles | None = None
    shape: Percentiles
    intensities: list[Values]

    @property
    def is_ct(self) -> bool:
        """Are its intensities Hounsfield units: it says so, or says nothing and holds air as CT does."""
        named = [name.lower() for name in self.channels if name]
        if named:
            return all(name in ("ct", "cbct") for name in named)
        return self.kind == "volumes" and all(v.percentiles["5"] <= -500 for v in self.intensities)


def require_sendable(config: SiteConfig, index: SiteIndex) -> None:
    """Raises DataError where a site's `reading` names a case, a patient or a path of this machine, which a description that leaves
    it does not hold."""
    names = {case.name for case in index.cases} | {case.patient for case in index.cases}
    for text in _texts(config.reading):
        if Path(text).is_absolute():
            raise DataError(
                f"site {index.name}: reading: {text!r} is a path of this machine, which a description does not hold; give it "
                "relative to the folder"
            )
        if text in names:
            raise DataError(
                f"site {index.name}: reading: {text!r} is a case or patient, and a description names none; put the cases that "
                "are listed into a folder of their own"
            )


def describe(
    config: SiteConfig, index: SiteIndex, tell: Callable[[str], None] = lambda text: None
) -> Description:
    """Reads every training case of a site. tell: is told of the cases that are read. Raises DataError with all that is wrong."""
    problems = [problem for problem in index.problems if problem.fatal]
    cases = [case for case in index.cases if case.split == "train" and case.labelled]
    seen = _OfImages(index) if index.level == "image" else _OfVoxels(index)
    for number, case in enumerate(cases, start=1):
        tell(f"{index.name}: case {case.name} ({number} of {len(cases)})")
        problems += seen.add(case)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise DataError(f"site {index.name}: cannot be described before this is mended:\n{listed}{more}")
    if not cases:
        trained = sum(case.split == "train" for case in index.cases)
        raise DataError(
            f"site {index.name}: {index.root}: none of its {trained} training cases has a label, and a description is of those "
            "that have one; add labels, or leave the site out"
        )
    if not (index.used or index.findings):
        raise DataError(
            f"site {index.name}: {index.root}: annotates no class besides the background, and no finding; correct its table of labels, or "
            "leave the site out"
        )
    splits = [case.split for case in index.cases if case.labelled]
    try:
        return _described(config, index, cases, seen, splits)
    except ValidationError as error:
        raise DataError(
            f"site {index.name}: cannot be described: {_first_of(error)}; rename it, a description is sent as a table is"
        ) from None


def _described(
    config: SiteConfig,
    index: SiteIndex,
    cases: Sequence[Case],
    seen: "_OfImages | _OfVoxels",
    splits: Sequence[str],
) -> Description:
    return Description(
        about=ABOUT,
        fedatlas=__version__,
        site=index.name,
        task="classification" if index.level == "image" else "segmentation",
        kind=_kind(config, index),
        format=config.format,
        reading=config.reading,
        reference=config.reference is not None,
        channels=seen.channels() or names_of_channels(index) or [""] * index.channels,
        cases={split: splits.count(split) for split in ("train", "validation", "test")},
        patients=len({case.patient for case in index.cases}),
        labels=seen.labels(cases),
        findings=_findings(index, cases) if index.level == "voxel" else {},
        **seen.numbers(),
    )


def _texts(value: Any) -> Iterator[str]:
    """Every text among the values of lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _first_of(error: ValidationError) -> str:
    """The first thing that is wrong, with its place, and not what was found there."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part)[:80] for part in first['loc'])}: {first['msg']}"


def _kind(config: SiteConfig, index: SiteIndex) -> Literal["volumes", "masks", "findings"]:
    if index.level == "image":
        return "findings"
    pictures = config.format == "masks" or any(case.masks and not case.series for case in index.cases)
    return "masks" if pictures else "volumes"


def _findings(index: SiteIndex, cases: Sequence[Case]) -> dict[str, Named]:
    """Own name -> in how many of the cases it is annotated, and present."""
    return {
        name: Named(
            annotated=sum(name in case.present or name in case.absent for case in cases),
            present=sum(name in case.present for case in cases),
        )
        for name in index.findings
    }


class _OfImages:
    """What images with findings come to."""

    def __init__(self, index: SiteIndex) -> None:
        self.index = index
        self.shapes: list[tuple[int, ...]] = []
        self.values: list[np.ndarray] = []
        self.colour = False

    def add(self, case: Case) -> list[Problem]:
        """Reads a case; what is wrong with it."""
        try:
            picture = read_picture(case.images[0], site=self.index.name, channels=1)
        except PictureError as error:
            return [Problem(self.index.name, self.index.file(case.images[0]), error.what, error.remedy)]
        self.colour |= picture.colour
        self.shapes.append(picture.pixels.shape[1:])
        self.values.append(_sample(picture.pixels.ravel()))
        return []

    def channels(self) -> list[str]:
        return []

    def labels(self, cases: Sequence[Case]) -> dict[str, Named]:
        return _findings(self.index, cases)

    def numbers(self) -> dict[str, Any]:
        return {
            "colour": self.colour,
            "shape": _spread(self.shapes),
            "intensities": [Values(percentiles=_percentiles(np.concatenate(self.values)))],
        }


class _OfVoxels:
    """What scans with label maps, or pictures with masks or findings, come to."""

    def __init__(self, index: SiteIndex) -> None:
        self.index = index
        self.exclusive = not any(case.masks for case in index.cases)
        self.space: LabelSpace | None = None  # a site may have findings of the whole image alone
        if index.used:
            own = ((BACKGROUND,) if self.exclusive else ()) + index.used
            self.space = LabelSpace(own, exclusive=self.exclusive)
            # a description holds the site's own names, which its aliases, where a federation file gives them, do not touch
            self.naming = naming_of(replace(index, aliases={}, annotated=index.used), self.space)
        self.shapes: list[tuple[int, ...]] = []
        self.spacings: list[tuple[float, ...]] = []
        self.values: list[list[np.ndarray]] = [[] for _ in range(index.channels)]
        self.labelled: list[list[np.ndarray]] = [[] for _ in range(index.channels)]
        self.counts: dict[str, list[int]] = {name: [] for name in index.used}
        self.covered = self.doubly = 0
        self.colour, self.measured = False, True
        self.modalities: set[str] = set()

    def add(self, case: Case) -> list[Problem]:
        """Reads a case; what is wrong with it."""
        if self.space is None:
            raw = read_unlabelled(self.index, case)
        else:
            raw = read_case(self.index, case, self.space, self.naming)
        fatal = [problem for problem in raw.problems if problem.fatal]
        if fatal or raw.image is None:
            return fatal
        geometry = geometry_of(raw.image.shape[1:], raw.affine, Preprocessing())  # type: ignore[call-arg]
        self.shapes.append(geometry.turned_shape)
        self.spacings.append(geometry.turned_spacing)
        self.colour |= bool(raw.about.get("colour"))
        self.measured &= not raw.about.get("picture") or case.pixel is not None
        if case.series:
            self.modalities.add(raw.about["modality"])
        for channel, image in enumerate(raw.image):
            self.values[channel].append(_sample(image.ravel()))
        if self.space is not None and raw.label is not None:
            self._add_label(raw, raw.label, self.space)
        return []

    def _add_label(self, raw: Raw, label: Label, space: LabelSpace) -> None:
        assert raw.image is not None
        depth = (label.voxels > 0).sum(0) if label.voxels.ndim == 4 else (label.voxels > 0)
        self.covered += int((depth > 0).sum())
        self.doubly += int((depth > 1).sum())
        for channel, image in enumerate(raw.image):
            self.labelled[channel].append(_sample(image[depth > 0]))
        for c in label.known:
            self.counts[space.names[c]].append(label.counts[c])

    def channels(self) -> list[str]:
        """What series in DICOM say that they are, where all say the same."""
        return sorted(self.modalities) if len(self.modalities) == 1 else []

    def labels(self, cases: Sequence[Case]) -> dict[str, Named]:
        found = {}
        for name, counts in self.counts.items():
            there = [n for n in counts if n]
            middle = int(np.median(there)) if there else 0
            found[name] = Named(annotated=len(counts), present=len(there), voxels=middle)
        return found

    def numbers(self) -> dict[str, Any]:
        return {
            "colour": self.colour,
            "overlap": round(self.doubly / max(1, self.covered), 4),
            "shape": _spread(self.shapes),
            "spacing_mm": _spread(self.spacings) if self.measured else None,
            "intensities": [
                Values(percentiles=_percentiles(np.concatenate(all_)), foreground=_of_foreground(labelled))
                for all_, labelled in zip(self.values, self.labelled, strict=True)
            ],
        }


def _sample(values: np.ndarray) -> np.ndarray:
    """Evenly spread values of all slices: a step that has a divisor in common with the number of values, and so perhaps with that of
    slices, would read some slices alone."""
    step = max(1, len(values) // SAMPLE)
    while math.gcd(step, len(values)) > 1 and step < len(values):
        step += 1
    return values[::step].astype(np.float32)


def _percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"{q:g}": _short(v) for q, v in zip(VALUES, np.percentile(values, VALUES), strict=True)}


def _of_foreground(labelled: Sequence[np.ndarray]) -> dict[str, float] | None:
    values = np.concatenate(labelled) if labelled else np.empty(0)
    if not len(values):
        return None
    moments = {"mean": values.mean(dtype=np.float64), "std": values.std(dtype=np.float64)}
    return _percentiles(values) | {name: _short(value) for name, value in moments.items()}


def _spread(rows: Sequence[Sequence[float]]) -> Percentiles:
    """[n, axes] -> percentile -> [axes]."""
    found = np.percentile(np.asarray(rows, dtype=np.float64), SPREAD, axis=0)
    return {f"{q:g}": [_short(value) for value in row] for q, row in zip(SPREAD, found, strict=True)}


def _short(value: Any) -> float:
    return float(f"{float(value):.4g}")


# ---------------------------------------------------------------------------------------------------- files


def written(description: Description) -> str:
    """The description as a JSON text, with a list of numbers on a line."""
    text = json.dumps(description.model_dump(exclude_none=True), indent=1, ensure_ascii=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda list_: re.sub(r"\s*\n\s*", " ", list_[0]), text) + "\n"


def read_description(path: Path) -> Description:
    """Raises FederationError for a file that is missing, too large, or no description."""
    remedy = "give what `fedatlas describe` wrote, as it is"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FederationError(
                f"{path}: {path.stat().st_size:,} bytes are no description of a site; {remedy}"
            )
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FederationError(f"{path}: no such file or folder; correct the path") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FederationError(f"{path}: not readable as JSON ({error}); {remedy}") from None
    if not isinstance(found, Mapping) or "description" not in found:
        raise FederationError(f"{path}: no description of a site; {remedy}")
    try:
        description = Description.model_validate(found)
    except ValidationError as error:
        raise FederationError(f"{path}: {_first_of(error)}; {remedy}") from None
    _require_whole(path, description, remedy)
    return description


def _require_whole(path: Path, description: Description, remedy: str) -> None:
    """Raises FederationError where numbers do not belong together."""
    axes = 2 if description.task == "classification" else 3
    wanted = {f"{q:g}" for q in SPREAD}
    for name, rows in (("shape", description.shape), ("spacing_mm", description.spacing_mm)):
        if rows is not None and (
            set(rows) != wanted
            or any(len(r) != axes or min(r) <= 0 or max(r) > LONGEST for r in rows.values())
        ):
            raise FederationError(
                f"{path}: {name}: {axes} numbers above 0, to {LONGEST:,}, for each of the percentiles {', '.join(sorted(wanted))} are expected; "
                f"{remedy}"
            )
    values = {f"{q:g}" for q in VALUES}
    for channel in description.intensities:
        whole, labelled = set(channel.percentiles) == values, channel.foreground
        if not whole or (labelled is not None and set(labelled) != values | {"mean", "std"}):
            raise FederationError(
                f"{path}: intensities: the percentiles {', '.join(sorted(values))} are expected, and of the foreground mean and "
                f"std, too; {remedy}"
            )
    if not (description.labels or description.findings) or not description.cases.get("train"):
        raise FederationError(f"{path}: names neither a label nor a finding, or no training case; {remedy}")
    if len(description.intensities) != len(description.channels):
        raise FederationError(f"{path}: intensities of {len(description.intensities)} channels; {remedy}")
