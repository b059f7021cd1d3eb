"""What a site holds, before any voxel is read: its files, its label names, its patients.

Shapes: C classes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedatlas.data import datasets
from fedatlas.data.datasets.listing import (
    Case,
    Layout,
    Problem,
    Split,
    annotated_in,
    parse_table,
    read_json,
)
from fedatlas.errors import DataError, FederationError
from fedatlas.labels import BACKGROUND, LabelSpace, resolve_names
from fedatlas.options import option, options
from fedatlas.seeds import seed_of


@options
class Reference:
    """A fuller truth than a site trains on. It is used to score and for nothing else."""

    table: str = option("all_labels.json", "Its label table, in the site's folder.")
    labels: str = option("labelsTr_all", "Folder of its label files for training and validation cases.")
    test_labels: str = option("labelsTs_all", "Folder of its label files for test cases.")


VOLUME_FORMATS = ("auto", "nnunet", "msd", "monai")
IMAGE_FORMATS = ("csv", "chestxray14", "tbx", "covid")
"""Layouts of scans with label maps, and of images with findings."""


@options
class SiteConfig:
    """One hospital of the federation."""

    name: str = option(
        ..., "Names the site everywhere.", min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
    )
    path: str | None = option(
        None,
        "Its folder; relative to the federation file. Left out where the site takes part from elsewhere.",
        min_length=1,
    )
    format: Literal["auto", "nnunet", "msd", "monai", "csv", "chestxray14", "tbx", "covid"] = option(
        "auto",
        "The layout of the folder; auto: one of those with label maps. For findings of whole images: csv, "
        "chestxray14, tbx (Tuberculosis Chest X-ray), covid (COVID-19 Radiography).",
    )
    reading: dict[str, Any] = option({}, "The options of a layout for whole images, as the columns of a csv.")
    role: Literal["train", "test"] = option(
        "train", "test: the site trains nothing, and all of its cases are test cases (whole images)."
    )
    cases: int | None = option(
        None,
        "Training images to use, drawn by patient; fewer are among more. Null: all (whole images).",
        ge=1,
    )
    balanced: int | None = option(
        None,
        "Test images per class in which it is present, and as many in which it is absent, each class drawn on its "
        "own; null: all test images (whole images).",
        ge=1,
    )
    score_all: bool = option(
        False, "Whether classes of its table that `annotated` leaves out are scored, too (whole images)."
    )
    annotated: tuple[str, ...] | None = option(
        None, "Which labels of its table count as annotated; null: all. Its own names, or ours."
    )
    aliases: dict[str, str] = option({}, "Its label names -> names of the label space.")
    table: str = option("dataset.json", "The file with its label table.")
    labels: str = option("labelsTr", "Folder of the label files of training cases (nnU-Net raw).")
    test_labels: str = option("labelsTs", "Folder of the label files of test cases (nnU-Net raw).")
    reference: Reference | None = option(None, "A fuller truth, for scoring only.")
    patient: str | None = option(
        None, "Regular expression with one group that finds the patient in a case's name; null: a case each."
    )

    def __post_init__(self) -> None:
        if self.patient is not None:
            try:
                groups = re.compile(self.patient).groups
            except re.error as error:
                raise FederationError(
                    f"site {self.name}: patient: {self.patient!r} is not a regular expression ({error})"
                ) from None
            if groups != 1:
                raise FederationError(
                    f"site {self.name}: patient: {self.patient!r} has {groups} groups; it needs exactly one"
                )


@dataclass(frozen=True)
class SiteIndex:
    """The layout of a site. table, reference_table: its label names, background included, to integers."""

    name: str
    root: Path
    table: dict[str, int]
    cases: tuple[Case, ...]
    channels: int
    aliases: dict[str, str]
    annotated: tuple[str, ...] | None
    reference_table: dict[str, int] | None
    problems: tuple[Problem, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The label names of its table, in the file's order, background included."""
        return tuple(self.table)

    @property
    def used(self) -> tuple[str, ...]:
        """The label names that count as annotated: those of the table, or what `annotated` leaves of them."""
        own = [name for name in self.table if name != BACKGROUND]
        if self.annotated is None:
            return tuple(own)
        return tuple(n for n in own if n in self.annotated or self.aliases.get(n, n) in self.annotated)

    @property
    def brings(self) -> tuple[str, ...]:
        """What it annotates, by the names of the label space."""
        return tuple(dict.fromkeys(self.aliases.get(name, name) for name in self.used))

    def file(self, path: Path) -> str:
        """A path as it is shown: relative to the site's folder where it lies inside."""
        return str(path.relative_to(self.root)) if self.root in path.parents else str(path)


@dataclass(frozen=True)
class Naming:
    """How the integers and names of one table meet the label space.

    integers: integer -> class name, or background for what does not count; classes: own name -> class.
    """

    integers: dict[int, str]
    classes: dict[str, int]

    def known(self, annotated: Iterable[str]) -> frozenset[int]:
        """The classes annotated in a case, from its own names. Of several names that are one class, all must
        be annotated."""
        given = set(annotated)
        missing = {index for name, index in self.classes.items() if name not in given}
        return frozenset(index for index in self.classes.values() if index not in missing)


def read_site(config: SiteConfig, base: Path) -> SiteIndex:
    """The layout of a site's folder; no voxel is read. A relative path is taken from `base`.

    What is wrong with single files is kept in `problems`. Raises DataError where the site cannot be
    understood at all: no folder, no table, regions instead of integers, a name that does not exist.
    """
    root = (base / Path(config.path or "").expanduser()).resolve()
    if not root.is_dir():
        raise DataError(f"site {config.name}: {root}: no such folder; correct the site's `path`")
    if config.format not in VOLUME_FORMATS:
        raise FederationError(
            f"site {config.name}: format is {config.format!r}, which has no label maps; for it set "
            f"`task: classification`, or choose from: {', '.join(VOLUME_FORMATS)}"
        )
    of_images = {"role": "train", "cases": None, "balanced": None, "score_all": False, "reading": {}}
    for key, default in of_images.items():
        if getattr(config, key) != default:
            raise FederationError(
                f"site {config.name}: {key}: is for labels of whole images (`task: classification`); leave it out"
            )
    layout = Layout(config.name, root, config.table, config.labels, config.test_labels)
    form = datasets.detect(layout) if config.format == "auto" else config.format
    listing = datasets.REGISTRY[form](layout)
    known = [*listing.table, *(config.aliases.get(name, name) for name in listing.table)]
    for name in config.annotated or ():
        if name not in known:
            raise DataError(
                f"site {config.name}: `annotated` names {name!r}, which is not in {root / config.table}; "
                f"known: {', '.join(dict.fromkeys(known))}"
            )
    channels = listing.channels or max((len(case.images) for case in listing.cases), default=1)
    cases = _with_patients(config, listing.cases, root)
    index = SiteIndex(
        config.name,
        root,
        listing.table,
        cases,
        channels,
        dict(config.aliases),
        config.annotated,
        None,
        listing.problems,
    )
    return _with_reference(config.reference, index) if config.reference else index


def _with_patients(config: SiteConfig, cases: Sequence[Case], root: Path) -> tuple[Case, ...]:
    listed = read_json(root / config.table, config.name).get("patients") or {}
    if not isinstance(listed, dict):
        raise DataError(f'site {config.name}: {root / config.table}: "patients" must be {{case: patient}}')
    found = []
    for case in cases:
        patient = case.patient
        if case.name in listed:
            patient = str(listed[case.name])
        elif config.patient is not None:
            match = re.search(config.patient, case.name)
            if match is None or match[1] is None:
                raise DataError(
                    f"site {config.name}: case {case.name!r}: `patient`, {config.patient!r}, finds nothing in it; "
                    "correct the expression"
                )
            patient = match[1]
        found.append(replace(case, patient=patient))
    return tuple(found)


def _with_reference(reference: Reference, index: SiteIndex) -> SiteIndex:
    path = index.root / reference.table
    found = read_json(path, index.name)
    where = f"site {index.name}: {path}"
    table = parse_table(found.get("labels"), where)
    cases = []
    for case in index.cases:
        folder = index.root / (reference.test_labels if case.split == "test" else reference.labels)
        files = [folder / f"{case.name}{ending}" for ending in (".nii.gz", ".nii")]
        file = next((file for file in files if file.exists()), None)
        if file is not None:
            names = annotated_in(case.name, found.get("annotated"), table, where)
            case = replace(case, reference=file, reference_annotated=names)
        cases.append(case)
    if index.cases and not any(case.reference for case in cases):
        raise DataError(
            f"site {index.name}: the reference folders {reference.labels} and {reference.test_labels} hold no "
            f"label file of any case; looked for names like {index.cases[0].name}.nii.gz"
        )
    return replace(index, cases=tuple(cases), reference_table=table)


def naming_of(index: SiteIndex, space: LabelSpace) -> tuple[Naming, Naming]:
    """How a site's table, and that of its reference, meet the label space.

    A name of the reference that the space does not hold is not scored. Raises FederationError for a name of
    the site that is neither in the space nor an alias of one, and for an alias that matches nothing.
    """
    other = index.reference_table or {}
    for alias in index.aliases:
        if alias not in index.table and alias not in other:
            raise FederationError(
                f"site {index.name}: alias {alias!r} matches none of the site's labels; it has: "
                f"{', '.join(index.table)}"
            )
    own = {alias: name for alias, name in index.aliases.items() if alias in index.used}
    resolved = resolve_names(index.used, own, space, site=index.name)
    strict = Naming(
        {number: resolved.get(name, BACKGROUND) for name, number in index.table.items()},
        {name: space.index(target) for name, target in resolved.items() if target != BACKGROUND},
    )
    fuller = {name: index.aliases.get(name, name) for name in other}
    fuller = {name: target if target in space.names else BACKGROUND for name, target in fuller.items()}
    scoring = Naming(
        {number: fuller[name] for name, number in other.items()},
        {name: space.index(target) for name, target in fuller.items() if target != BACKGROUND},
    )
    return strict, scoring


def label_space_of(
    brings: Iterable[Sequence[str]],
    groups: Sequence[Sequence[str]] = (),
    exclusive: bool = True,
) -> LabelSpace:
    """The union of what the sites bring (`SiteIndex.brings` of each), in order of first appearance.

    groups: names of classes that belong together.
    """
    names = dict.fromkeys([BACKGROUND] if exclusive else [])
    for site in brings:
        names.update(dict.fromkeys(site))
    if not exclusive:
        names.pop(BACKGROUND, None)
    plain = LabelSpace(tuple(names), exclusive=exclusive)
    return LabelSpace(
        plain.names, tuple(tuple(plain.index(name) for name in group) for group in groups), exclusive
    )


def split_validation(index: SiteIndex, *, seed: int, fraction: float) -> dict[Split, tuple[Case, ...]]:
    """The cases of each split. Validation cases are taken from the training cases, whole patients at a time.

    Patients are ranked by a hash of (seed, site, patient) and the first ones taken, so that the choice depends
    neither on the order of files nor on other sites, and is nested over fractions. With two patients or more,
    and a fraction above 0, both splits have at least one. A site that lists validation cases itself keeps them.
    """
    train = [case for case in index.cases if case.split == "train"]
    given = [case for case in index.cases if case.split == "validation"]
    test = [case for case in index.cases if case.split == "test"]
    if not given and fraction > 0:
        patients = sorted(
            {case.patient for case in train},
            key=lambda patient: (seed_of(seed, "validation", index.name, patient), patient),
        )
        count = min(max(round(fraction * len(patients)), 1), len(patients) - 1) if patients else 0
        chosen = set(patients[:count])
        given = [case for case in train if case.patient in chosen]
        train = [case for case in train if case.patient not in chosen]
    return {"train": tuple(train), "validation": tuple(given), "test": tuple(test)}
