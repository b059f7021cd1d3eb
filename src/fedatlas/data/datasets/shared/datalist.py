"""What MSD and MONAI share: a JSON file with lists of {"image", "label"} entries."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedatlas.core.errors import DataError
from fedatlas.data.datasets.shared.listing import (
    Case,
    Layout,
    Listing,
    Problem,
    Split,
    annotated_in,
    patient_of,
    stem,
)


def listing(layout: Layout, found: Mapping[str, Any], table: dict[str, int], channels: int | None) -> Listing:
    """The cases of the lists "training", "validation" and "test"; paths are relative to the site's folder.

    A file that is listed but not there is a problem, and several of one list are one; unlabelled test cases are no
    loss to training, and theirs is a note. An entry of another form raises DataError.
    """
    where = f"site {layout.site}: {layout.root / layout.table}"
    cases: list[Case] = []
    problems: list[Problem] = []
    splits: tuple[tuple[str, Split], ...] = (
        ("training", "train"),
        ("validation", "validation"),
        ("test", "test"),
    )
    for key, split in splits:
        entries = found.get(key) or []
        if not isinstance(entries, list):
            raise DataError(f'{where}: "{key}" must be a list of entries, got {type(entries).__name__}')
        lost: list[tuple[str, str, bool]] = []
        for number, entry in enumerate(entries):
            case = _case(layout, entry, split, table, found.get("annotated"), f'{where}: "{key}"[{number}]')
            gone = [
                path for path in (*case.images, *([case.label] if case.label else [])) if not path.exists()
            ]
            if gone:
                file = (
                    str(gone[0].relative_to(layout.root)) if layout.root in gone[0].parents else str(gone[0])
                )
                what = f'missing: listed in {layout.table}, "{key}"[{number}]'
                lost.append((file, what, case.label is not None or split != "test"))
                continue
            unlabelled_on_purpose = isinstance(entry, Mapping) and entry.get("annotated") == []
            if case.label is None and split != "test" and not unlabelled_on_purpose:
                what = f'"{key}"[{number}] has no label'
                remedy = 'add "label", move the entry to "test", or give it "annotated": []'
                problems.append(Problem(layout.site, layout.table, what, remedy))
                continue
            cases.append(case)
        if lost:
            file, what, _ = min(lost, key=lambda one: not one[2])
            more = f", and {len(lost) - 1} more of its {len(entries)} entries" if len(lost) > 1 else ""
            remedy = "see that all of it was unpacked, or take the entry out"
            fatal = any(matters for _, _, matters in lost)
            problems.append(Problem(layout.site, file, what + more, remedy, fatal))
    return Listing(table, tuple(cases), channels, tuple(problems))


def _case(layout: Layout, entry: Any, split: Split, table: dict[str, int], listed: Any, where: str) -> Case:
    images = entry if isinstance(entry, str) else entry.get("image") if isinstance(entry, Mapping) else None
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
        raise DataError(f'{where}: an entry is a path or {{"image": path or list of paths, "label": path}}')
    label = entry.get("label") if isinstance(entry, Mapping) else None
    label = label[0] if isinstance(label, list) and len(label) == 1 else label
    if label is not None and not isinstance(label, str):
        raise DataError(f"{where}: the label is one file of integers, got {label!r}")
    files = tuple(layout.root / Path(image) for image in images)
    name = stem(files[0]).removesuffix("_0000") if len(files) == 1 else stem(files[0])
    own = entry.get("annotated") if isinstance(entry, Mapping) else None
    annotated: tuple[str, ...] = ()
    if label is not None:
        annotated = annotated_in(name, {name: own} if own is not None else listed, table, where)
    patient = patient_of(entry.get("patient") if isinstance(entry, Mapping) else None, name)
    return Case(name, files, layout.root / Path(label) if label else None, split, patient, annotated)
