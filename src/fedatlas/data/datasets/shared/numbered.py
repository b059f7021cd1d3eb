"""What LiTS and BTCV share: a scan and its label map have the same number in their names."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from fedatlas.core.errors import DataError
from fedatlas.core.labels import BACKGROUND
from fedatlas.data.datasets.shared.listing import Case, Layout, Listing, Problem, shown, stem


def by_number(layout: Layout, folders: Iterable[Path], pattern: str) -> dict[int, Path]:
    """number -> the file in one of the folders whose whole name the pattern matches, with the number as its group.

    Raises DataError where two files have the same number.
    """
    found: dict[int, Path] = {}
    for folder in folders:
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = re.fullmatch(pattern, file.name)
            if match is None:
                continue
            other = found.setdefault(int(match[1]), file)
            if other != file:
                raise DataError(
                    f"site {layout.site}: {shown(other, layout.root)} and {shown(file, layout.root)} are the same scan twice; "
                    "keep one of them"
                )
    return dict(sorted(found.items()))


def listing(
    layout: Layout,
    scans: Mapping[int, Path],
    labels: Mapping[int, Path],
    tests: Mapping[int, Path],
    *,
    table: Mapping[str, int],
    numbers: Collection[int],
    release: str,
) -> Listing:
    """Labelled training cases and unlabelled test cases. numbers: of the labelled scans that the release has.

    Fatal problems: a scan without label map, a label map without scan, a number that the release does not have. That
    cases are missing altogether is a note.
    """
    names = tuple(name for name in table if name != BACKGROUND)
    pairs = [number for number in scans if number in labels]
    cases = [Case(stem(scans[n]), (scans[n],), labels[n], "train", stem(scans[n]), names) for n in pairs]
    cases += [Case(stem(file), (file,), None, "test", stem(file), ()) for file in tests.values()]
    lone_scans = [file for number, file in scans.items() if number not in labels]
    lone_labels = [file for number, file in labels.items() if number not in scans]
    foreign = [scans[number] for number in pairs if number not in numbers]
    wrong = (
        (
            lone_scans,
            f"missing: {len(lone_scans)} of {len(scans)} scans have no label map",
            "unpack it again",
        ),
        (
            lone_labels,
            f"missing: {len(lone_labels)} of {len(labels)} label maps have no scan",
            "unpack it again",
        ),
        (
            foreign,
            f"not of {release}, whose labelled scans are {spans(numbers)}",
            "take it out of the folder",
        ),
    )
    problems = [
        Problem(layout.site, shown(files[0], layout.root), what, remedy)
        for files, what, remedy in wrong
        if files
    ]
    if len(pairs) != len(numbers) and not problems:
        what = f"{len(pairs)} labelled cases; {release} has {len(numbers)}, {spans(numbers)}"
        problems.append(Problem(layout.site, "", what, "see that all of it was unpacked", False))
    return Listing(dict(table), tuple(cases), 1, tuple(problems))


def spans(numbers: Collection[int]) -> str:
    """Numbers in words, as "1 to 10, 21 to 40"."""
    ordered = sorted(numbers)
    starts = [n for n in ordered if n - 1 not in numbers]
    ends = [n for n in ordered if n + 1 not in numbers]
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in zip(starts, ends, strict=True))
