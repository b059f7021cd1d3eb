"""Images with findings: what every such data set is read into, and the generic CSV. No pixels are read here.

An image-level annotation has three states per class: present, absent, not annotated. A reader turns a folder
and its tables into a `Listing` of `image_case`s; whatever is wrong with single rows or files is kept in `problems`.

Splits are by patient. Where a data set names no patients, every image counts as its own, and its reader says so.
"""

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedatlas.core.errors import DataError
from fedatlas.core.seeds import seed_of
from fedatlas.data.datasets.shared.listing import (
    Case,
    Layout,
    Listing,
    Problem,
    Split,
    Splitting,
    image_case,
    shown,
    some,
)

SUFFIXES = (".png", ".jpg", ".jpeg", ".dcm", ".dicom")


# --------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Row:
    """A row of a table: the line of the file where it begins, and column -> text, without surrounding blanks."""

    line: int
    values: dict[str, str]


def read_table(
    site: str, path: Path, needed: Sequence[str], *, delimiter: str = ","
) -> tuple[tuple[str, ...], list[Row], list[Problem]]:
    """The columns of a table, its rows, and a problem for every row of another length.

    A column without a name is left out when it ends the header. Raises DataError if the file is missing, is not UTF-8
    text, has no header, names a column twice, or lacks a needed one.
    """
    where = f"site {site}: {path}"
    rows: list[Row] = []
    problems: list[Problem] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(reader, [])]
            while header and not header[-1]:
                header.pop()
            _require_header(where, header, needed, delimiter)
            line = reader.line_num + 1
            for fields in reader:
                start, line = line, reader.line_num + 1
                if not any(field.strip() for field in fields):
                    continue
                while len(fields) > len(header) and not fields[-1].strip():
                    fields.pop()
                if len(fields) == len(header):
                    rows.append(Row(start, dict(zip(header, (f.strip() for f in fields), strict=True))))
                else:
                    what = f"line {start}: {len(fields)} columns, where the header has {len(header)}"
                    problems.append(Problem(site, str(path), what, "complete the row, or take it out"))
    except FileNotFoundError:
        raise DataError(f"{where}: no such file; it holds the labels, name it with `table`") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text (byte {error.start}); save it again as UTF-8") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{where}: not readable as a table ({error}); mend the file") from None
    return tuple(header), rows, problems


def _require_header(where: str, header: list[str], needed: Sequence[str], delimiter: str) -> None:
    if not header:
        raise DataError(f"{where}: empty; its first line must name the columns {', '.join(needed)}")
    twice = [name for name, n in Counter(header).items() if n > 1]
    if twice:
        raise DataError(f"{where}: line 1: column {twice[0]!r} is there twice; rename one")
    missing = [name for name in needed if name not in header]
    if missing:
        other = ";" if delimiter != ";" else ","
        hint = f"; is it separated by {other!r}?" if len(header) == 1 and other in header[0] else ""
        raise DataError(
            f"{where}: line 1: no column {missing[0]!r}; it has: {', '.join(header)}{hint}. "
            "Correct the header, or name the column"
        )


def empty(text: str) -> bool:
    """Is a cell left open? "nan", as statistics programs write it, counts as empty."""
    return text == "" or text.lower() == "nan"


_MARKS: Mapping[str, int] = {"true": 1, "false": 0}


def mark(text: str) -> int | None:
    """What a cell of a column of findings says: 1 present, 0 absent, -1 uncertain, None where it is left open. 1.0 and True, as
    statistics programs write them, are 1. Raises ValueError for anything else."""
    if empty(text):
        return None
    number = _MARKS.get(text.lower())
    number = float(text) if number is None else number
    if number not in (0, 1, -1):
        raise ValueError(f"{text!r} is no mark")
    return int(number)


def is_mark(text: str) -> bool:
    """May a column of findings hold this?"""
    try:
        mark(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------- files


def find_images(folder: Path, *, deep: bool = True) -> tuple[list[Path], list[Path]]:
    """The image files of a folder by their suffix, and its other files; both sorted. deep: folders inside, too.

    Hidden files and folders, and those that macOS puts into archives, are passed over.
    """
    images: list[str] = []
    others: list[str] = []
    for base, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__MACOSX") if deep else []
        for name in files:
            if not name.startswith("."):
                known = os.path.splitext(name)[1].lower() in SUFFIXES
                (images if known else others).append(os.path.join(base, name))
    return [Path(file) for file in sorted(images)], [Path(file) for file in sorted(others)]


def contents(files: Iterable[Path]) -> Iterator[list[Path]]:
    """The groups of files, two or more each, that are equal byte by byte. Unreadable files are passed over."""
    groups: list[list[Path]] = [list(files)]
    for key in (_size, _beginning, _whole):
        finer: list[list[Path]] = []
        for group in groups:
            found: dict[object, list[Path]] = {}
            for file in group:
                try:
                    found.setdefault(key(file), []).append(file)
                except OSError:
                    continue
            finer.extend(equal for equal in found.values() if len(equal) > 1)
        groups = finer
    yield from groups


def _size(file: Path) -> int:
    return file.stat().st_size


def _beginning(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(4096)


def _whole(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


# --------------------------------------------------------------------------------------------------- splits


def split_patients(
    cases: Sequence[Case], site: str, splitting: Splitting, *, stratified: bool = False
) -> tuple[Case, ...]:
    """Takes test and validation cases out of the training cases, whole patients at a time.

    A split that is there already stays as it is, and nothing is added to it. Patients are ranked by a hash of (seed,
    site, patient): the choice depends neither on the order of files nor on other sites, and a larger share holds a
    smaller one. stratified: the shares hold within the patients of equal findings.
    """
    given = {case.split for case in cases}
    findings: dict[str, set[str]] = {}
    for case in cases:
        if case.split == "train":
            findings.setdefault(case.patient, set()).update(case.present)
    strata: dict[tuple[str, ...], list[str]] = {}
    for patient, names in findings.items():
        strata.setdefault(tuple(sorted(names)) if stratified else (), []).append(patient)
    moved: dict[str, Split] = {}
    wanted: tuple[tuple[Split, float], ...] = (
        ("test", splitting.test),
        ("validation", splitting.validation),
    )
    for patients in strata.values():
        left = sorted(patients, key=lambda p: (seed_of(splitting.seed, "split", site, p), p))
        for split, share in wanted:
            if share > 0 and split not in given and len(left) > 1:
                count = min(max(round(share * len(left)), 1), len(left) - 1)
                moved.update(dict.fromkeys(left[:count], split))
                left = left[count:]
    return tuple(
        replace(case, split=moved.get(case.patient, "train")) if case.split == "train" else case
        for case in cases
    )


def balanced(
    cases: Sequence[Case], classes: Sequence[str], *, positives: int, negatives: int, seed: int
) -> tuple[Case, ...]:
    """A test set with so many images per class where it is present, and so many where it is absent.

    Each class is drawn on its own, by a hash of (seed, class, name). An image is annotated, in what is returned, for
    the classes that it was drawn for and for no other, so that a score of a class counts its own draw. Raises DataError
    if a class has too few.
    """
    drawn: dict[str, tuple[set[str], set[str]]] = {}
    for name in classes:
        for side, wanted in ((0, positives), (1, negatives)):
            pool = [case.name for case in cases if name in (case.absent if side else case.present)]
            if len(pool) < wanted:
                what = "absent" if side else "present"
                raise DataError(
                    f"balanced test set: {wanted} images with {name!r} {what} are asked for, {len(pool)} are there; "
                    "ask for fewer, or give more cases"
                )
            pool.sort(key=lambda case: (seed_of(seed, "balanced", name, case), case))
            for case in pool[:wanted]:
                drawn.setdefault(case, (set(), set()))[side].add(name)
    return tuple(
        image_case(case.name, case.images[0], case.patient, "test", *drawn[case.name])
        for case in cases
        if case.name in drawn
    )


# ------------------------------------------------------------------------------------------------- problems


def listing(
    site: str,
    root: Path,
    classes: Sequence[str],
    cases: Sequence[Case],
    source: str,
    problems: Sequence[Problem],
) -> Listing:
    """A listing, with the problems that its cases show among themselves: a name twice, a file twice, a patient in
    two splits. Cases that repeat a name or a file are left out."""
    kept: dict[str, Case] = {}
    files: dict[str, str] = {}
    twice: list[Problem] = []
    for case in cases:
        file = os.path.normpath(case.images[0])
        if file in files:
            what = f"listed twice, as case {files[file]!r} and as case {case.name!r}"
            if files[file] == case.name:
                what = f"listed twice, as case {case.name!r}"
            twice.append(Problem(site, shown(case.images[0], root), what, "take one row out"))
        elif case.name in kept:
            what = f"case {case.name!r} is also {shown(kept[case.name].images[0], root)}"
            twice.append(Problem(site, shown(case.images[0], root), what, "rename one, or take it out"))
        else:
            kept[case.name], files[file] = case, case.name
    leaks: list[Problem] = []
    splits: dict[str, Case] = {}
    told: set[str] = set()
    for case in kept.values():
        first = splits.setdefault(case.patient, case)
        if first.split != case.split and case.patient not in told:
            told.add(case.patient)
            what = (
                f"patient {case.patient!r} is in the {first.split} cases ({first.name}) and in the {case.split} "
                f"cases ({case.name})"
            )
            leaks.append(Problem(site, shown(case.images[0], root), what, "keep every patient in one split"))
    found = [*problems, *some(twice, "listed twice"), *some(leaks, "a patient in two splits")]
    return Listing({}, tuple(kept.values()), None, tuple(found), tuple(classes), source)


def federation_problems(listings: Mapping[str, Listing]) -> list[Problem]:
    """What sites show together, and in the bytes of their files: a patient at two sites of one source, equal files
    under two names, a class without a positive or without a negative anywhere. listings: by the sites' names.

    Equal files are fatal between test cases and others. Images that were scaled or encoded anew differ in their bytes
    and are not found here.
    """
    found: list[Problem] = []
    homes: dict[tuple[str, str], tuple[str, Case]] = {}
    shared: list[Problem] = []
    told: set[tuple[str, str]] = set()
    for site, entry in listings.items():
        for case in entry.cases:
            key = entry.source, case.patient
            other, first = homes.setdefault(key, (site, case))
            if other != site and key not in told:
                told.add(key)
                what = f"patient {case.patient!r} of {entry.source} is also at site {other} (case {first.name!r})"
                shared.append(Problem(site, str(case.images[0]), what, "give every patient to one site"))
    found += some(shared, "a patient at two sites")
    owners: dict[Path, tuple[str, Case]] = {}
    twins: list[Problem] = []
    for site, entry in listings.items():
        for case in entry.cases:
            other, first = owners.setdefault(case.images[0], (site, case))
            if other != site:
                what = f"case {case.name!r} is the same file as case {first.name!r} at site {other}"
                twins.append(Problem(site, str(case.images[0]), what, "give every file to one site"))
    for group in contents(owners):
        site, first = owners[group[0]]
        for file in group[1:]:
            other, case = owners[file]
            what = (
                f"the file of {case.split} case {case.name!r} is, byte by byte, that of {first.split} case "
                f"{first.name!r} at site {site}"
            )
            fatal = (first.split == "test") != (case.split == "test")
            twins.append(Problem(other, str(file), what, "take one out", fatal))
    for fatal in (True, False):
        found += some([twin for twin in twins if twin.fatal == fatal], "equal files")
    for name in dict.fromkeys(name for entry in listings.values() for name in entry.findings):
        sums = [entry.counts("train").get(name, (0, 0)) for entry in listings.values()]
        present, absent = (sum(counts) for counts in zip(*sums, strict=True))
        holders = ", ".join(site for site, entry in listings.items() if name in entry.findings)
        for count, word in ((present, "present"), (absent, "absent")):
            if count == 0:
                what = f"class {name!r} is {word} in no training case of any site; it cannot be learnt"
                remedy = "add such cases, or take the class out"
                found.append(Problem(holders, "", what, remedy, word == "present"))
    return found


# -------------------------------------------------------------------------------------- a folder per class


def read_folders(
    layout: Layout,
    root: Path,
    folders: Mapping[str, tuple[Iterable[str], Iterable[str]]],
    *,
    classes: Sequence[str],
    source: str,
) -> Listing:
    """A folder per class: folders maps a folder of `root` to the classes (present, absent) in its images.

    Images lie in the folder, or in its folder `images` where it has one; nothing else below is read. No patients are
    known: every image is its own. The shares of the splits hold within each folder of equal findings. Raises DataError
    for a folder that is missing.
    """
    site, cases = layout.site, list[Case]()
    problems: list[Problem] = []
    for name, (present, absent) in folders.items():
        folder = root / name
        if not folder.is_dir():
            there = sorted(f.name for f in root.iterdir() if f.is_dir()) if root.is_dir() else []
            raise DataError(
                f"site {site}: {folder}: no such folder; there are: {', '.join(there) or 'none'}. Correct the "
                "site's `path`, or restore the folder"
            )
        folder = folder / "images" if (folder / "images").is_dir() else folder
        images, others = find_images(folder, deep=False)
        if not images:
            what = "empty: no image in this folder"
            problems.append(Problem(site, shown(folder, root), what, "unpack the data set again"))
        strange = [
            Problem(site, shown(file, root), "no image by its suffix", "take it out", False)
            for file in others
        ]
        problems += some(strange, "files that are no images")
        for file in images:
            case = f"{name}/{file.stem}"
            cases.append(image_case(case, file, case, "train", present, absent))
    return listing(
        site, root, classes, split_patients(cases, site, layout.splitting, stratified=True), source, problems
    )
