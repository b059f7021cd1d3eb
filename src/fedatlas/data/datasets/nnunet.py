"""nnU-Net raw: dataset.json, imagesTr/<case>_0000.nii.gz …, labelsTr/<case>.nii.gz, and the same with Ts.

One optional key of ours, which nnU-Net ignores: "annotated", {case: [label names]}, for label sets that differ
per case. A second, "patients", {case: patient}, keeps the cases of a patient in one split.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedatlas.core.errors import DataError
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.listing import (
    Case,
    Layout,
    Listing,
    Problem,
    Split,
    annotated_in,
    names_of_channels,
    parse_table,
    read_json,
    require_annotated,
    some,
)


def read(layout: Layout) -> Listing:
    """The cases of imagesTr and imagesTs, whose label maps have their names."""
    path = layout.root / layout.table
    where = f"site {layout.site}: {path}"
    found = read_json(path, layout.site)
    table = parse_table(found.get("labels"), where)
    ending = found.get("file_ending", ".nii.gz")
    if ending not in (".nii.gz", ".nii"):
        raise DataError(f"{where}: file_ending is {ending!r}; NIfTI is read: .nii.gz or .nii")
    listed = require_annotated(found.get("annotated"), where)
    names = found.get("channel_names", found.get("modality"))
    channels = len(names) if isinstance(names, dict | list) else None
    cases: list[Case] = []
    problems: list[Problem] = []
    splits: tuple[tuple[Split, str, str], ...] = (
        ("train", "imagesTr", layout.labels),
        ("test", "imagesTs", layout.test_labels),
    )
    for split, images, labels in splits:
        scans, broken = _scans(layout, images, ending, channels, problems)
        drawn = {file.name.removesuffix(ending): file for file in _files(layout.root / labels, ending)}
        for case, files in scans.items():
            label = drawn.pop(case, None)
            annotated = annotated_in(case, found.get("annotated"), table, where) if label else ()
            if label is None and split == "train" and listed.get(case) != []:
                problems.append(
                    Problem(
                        layout.site,
                        f"{labels}/{case}{ending}",
                        f"missing: training case {case!r} has no label file",
                        'add it, move the image to imagesTs, or list the case with [] in "annotated"',
                    )
                )
                continue
            cases.append(Case(case, files, label, split, case, annotated))
        for case in sorted(drawn.keys() - broken):
            problems.append(
                Problem(
                    layout.site,
                    f"{labels}/{case}{ending}",
                    f"a label without an image: {images}/{case}_0000{ending} is missing",
                    "add the image, or remove the label",
                )
            )
    if not any((layout.root / images).is_dir() for _, images, _ in splits):
        problems.append(
            Problem(
                layout.site,
                "imagesTr",
                "no such folder, and no imagesTs",
                f"put the images of training cases there, as <case>_0000{ending}, or name another layout by `format`",
                False,
            )
        )
    said, there = found.get("numTraining"), sum(case.split == "train" for case in cases)
    if isinstance(said, int) and said != there and not problems:
        what = f"numTraining is {said}, imagesTr and {layout.labels} hold {there} cases"
        problems.append(
            Problem(
                layout.site, layout.table, what, "see that no case was left behind, and correct it", False
            )
        )
    folders = [folder for _, images, labels in splits for folder in (images, labels)]
    problems += _strange(layout, folders, ending)
    return Listing(table, tuple(cases), channels, tuple(problems), channel_names=names_of_channels(names))


def _strange(layout: Layout, folders: Iterable[str], ending: str) -> list[Problem]:
    """A note on every NIfTI file that is passed over since it has another ending than the data set."""
    found = [
        Problem(
            layout.site,
            f"{folder}/{file.name}",
            f"not read: it does not end in {ending}, the file_ending of {layout.table}",
            f"write it again as {ending}, or take it out",
            False,
        )
        for folder in dict.fromkeys(folders)
        for file in _files(layout.root / folder, "")
        if file.name.lower().endswith((".nii", ".nii.gz"))
        and not file.name.endswith(ending)
        and not file.is_dir()
    ]
    return some(found, f"NIfTI files that do not end in {ending}")


def _files(folder: Path, ending: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.name.endswith(ending) and not f.name.startswith("."))


def _scans(
    layout: Layout, folder: str, ending: str, channels: int | None, problems: list[Problem]
) -> tuple[dict[str, tuple[Path, ...]], set[str]]:
    """case -> its images in the order of their channels; and the names of files whose images are there, but not as they should
    be: a channel too few, too many or not named is a problem."""
    found: dict[str, dict[int, Path]] = {}
    broken: set[str] = set()
    for file in _files(layout.root / folder, ending):
        match = re.fullmatch(r"(.+)_(\d{4})", file.name.removesuffix(ending))
        if not match:
            what = "an image without a channel number"
            remedy = f"rename it to <case>_0000{ending}"
            problems.append(Problem(layout.site, f"{folder}/{file.name}", what, remedy))
            broken.add(file.name.removesuffix(ending))
            continue
        found.setdefault(match[1], {})[int(match[2])] = file
    complete: dict[str, tuple[Path, ...]] = {}
    wanted: Any = channels or max((len(files) for files in found.values()), default=1)
    for case, files in sorted(found.items()):
        missing = [number for number in range(wanted) if number not in files]
        extra = [number for number in files if number >= wanted]
        if missing:
            name = f"{folder}/{case}_{missing[0]:04d}{ending}"
            what = f"missing: the channels of a site are {wanted} for every case"
            problems.append(Problem(layout.site, name, what, "add it, or remove the case"))
        elif extra:
            what = f"channel {extra[0]}, but {layout.table} names {wanted} channels"
            problems.append(
                Problem(
                    layout.site,
                    f"{folder}/{files[extra[0]].name}",
                    what,
                    "correct channel_names or the files",
                )
            )
        else:
            complete[case] = tuple(files[number] for number in range(wanted))
    return complete, broken | (found.keys() - complete.keys())


DATASET = DataSet(
    name="nnunet",
    kind="volumes",
    title="nnU-Net raw: dataset.json with imagesTr, labelsTr and, for test cases, imagesTs, labelsTs.",
    read=read,
    has_table=True,
)
