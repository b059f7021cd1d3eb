"""Images with findings: what every such data set is read into, and the generic CSV. No pixels are read here.

An image-level annotation has three states per class: present, absent, not annotated. A reader turns a folder
and its tables into an `ImageListing`; whatever is wrong with single rows or files is kept in `problems`.

Splits are by patient. Where a data set names no patients, every image counts as its own, and its reader says so.
"""

import csv
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import option, options
from fedatlas.core.seeds import seed_of
from fedatlas.data.datasets.listing import Problem, Split

SUFFIXES = (".png", ".jpg", ".jpeg", ".dcm", ".dicom")
LISTED = 20  # problems of one kind that are listed one by one


@dataclass(frozen=True)
class ImageCase:
    """One image. present, absent: the classes that were verified to be there, or not; any other class is not
    annotated. Raises DataError for a class in both."""

    name: str
    image: Path
    patient: str
    split: Split
    present: frozenset[str]
    absent: frozenset[str]

    def __post_init__(self) -> None:
        both = sorted(self.present & self.absent)
        if both:
            raise DataError(
                f"case {self.name!r}: {both[0]!r} is present and absent at once; give it one value"
            )


@dataclass(frozen=True)
class ImageListing:
    """A site as its tables describe it.

    classes: all names that `present` and `absent` may hold. source: whose patient names these are; patients are
    compared between sites of one source only, since patient 17 of one hospital is not patient 17 of another.
    """

    classes: tuple[str, ...]
    cases: tuple[ImageCase, ...]
    source: str
    problems: tuple[Problem, ...] = ()

    def counts(self, *splits: Split) -> dict[str, tuple[int, int]]:
        """class -> (images where it is present, images where it is absent), in these splits; none given: in all."""
        chosen = [case for case in self.cases if not splits or case.split in splits]
        present = Counter(name for case in chosen for name in case.present)
        absent = Counter(name for case in chosen for name in case.absent)
        return {name: (present[name], absent[name]) for name in self.classes}


@options
class Splitting:
    """How patients are shared out where a data set does not say it."""

    seed: int = option(0, "Decides which patients are taken.")
    test: float = option(
        0.2, "Share of the patients that is tested on, where no test cases are given.", ge=0, lt=1
    )
    validation: float = option(
        0.1, "Share of the remaining patients that is validated on, where none are given.", ge=0, lt=1
    )


@options
class CsvForm:
    """A table with one row per image and one column per class: 1 present, 0 absent, empty not annotated."""

    table: str = option("labels.csv", "The table, in the site's folder.")
    images: str = option(".", "The folder that the column of files is relative to.")
    delimiter: str = option(",", "What separates the columns.", min_length=1, max_length=1)
    file: str = option("file", "Column with the image file.")
    classes: tuple[str, ...] | None = option(
        None, "Columns that are classes; null: all but those of file, patient, split and `ignored`."
    )
    ignored: tuple[str, ...] = option((), "Columns that are no classes, as age or view.")
    patient: str | None = option(None, "Column with the patient; null: an image each, or by `patient_in`.")
    patient_in: str | None = option(
        None, "Regular expression with one group that finds the patient in the column of files."
    )
    split: str | None = option(None, "Column with train, validation or test; null: by seed.")
    no_finding: str | None = option(
        None, "Column whose 1 says that every class left empty in the row is absent; null: none."
    )
    uncertain: Literal["ignore", "ones", "zeros"] = option(
        "ignore",
        "What -1 is read as: not annotated, present, or absent (CheXpert's U-Ignore, U-Ones, U-Zeros).",
    )
    source: str | None = option(
        None, "Whose patient names these are; sites that share them give the same text. Null: the site's own."
    )

    def __post_init__(self) -> None:
        if self.patient is not None and self.patient_in is not None:
            raise FederationError("csv: `patient` and `patient_in` are both given; one is allowed")
        if self.patient_in is not None:
            try:
                groups = re.compile(self.patient_in).groups
            except re.error as error:
                raise FederationError(
                    f"csv: patient_in: {self.patient_in!r} is not a regular expression ({error})"
                ) from None
            if groups != 1:
                raise FederationError(
                    f"csv: patient_in: {self.patient_in!r} has {groups} groups; it needs exactly one"
                )


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


def some(problems: Sequence[Problem], of: str) -> list[Problem]:
    """The first problems of a kind, and one that counts the rest. of: what they have in common, in a few words."""
    if len(problems) <= LISTED:
        return list(problems)
    more = replace(
        problems[LISTED], file="", what=f"{of}: {len(problems) - LISTED} more like the {LISTED} before"
    )
    return [*problems[:LISTED], more]


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


def shown(path: Path, root: Path) -> str:
    """A path as it is shown: relative to the site's folder where it lies inside."""
    return path.relative_to(root).as_posix() if root in path.parents else str(path)


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
    cases: Sequence[ImageCase], site: str, splitting: Splitting, *, stratified: bool = False
) -> tuple[ImageCase, ...]:
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
    cases: Sequence[ImageCase], classes: Sequence[str], *, positives: int, negatives: int, seed: int
) -> tuple[ImageCase, ...]:
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
        replace(
            case, split="test", present=frozenset(drawn[case.name][0]), absent=frozenset(drawn[case.name][1])
        )
        for case in cases
        if case.name in drawn
    )


# ------------------------------------------------------------------------------------------------- problems


def listing(
    site: str,
    root: Path,
    classes: Sequence[str],
    cases: Sequence[ImageCase],
    source: str,
    problems: Sequence[Problem],
) -> ImageListing:
    """A listing, with the problems that its cases show among themselves: a name twice, a file twice, a patient in
    two splits. Cases that repeat a name or a file are left out."""
    kept: dict[str, ImageCase] = {}
    files: dict[str, str] = {}
    twice: list[Problem] = []
    for case in cases:
        file = os.path.normpath(case.image)
        if file in files:
            what = f"listed twice, as case {files[file]!r} and as case {case.name!r}"
            twice.append(Problem(site, shown(case.image, root), what, "take one row out"))
        elif case.name in kept:
            what = f"case {case.name!r} is also {shown(kept[case.name].image, root)}"
            twice.append(Problem(site, shown(case.image, root), what, "rename one, or take it out"))
        else:
            kept[case.name], files[file] = case, case.name
    leaks: list[Problem] = []
    splits: dict[str, ImageCase] = {}
    told: set[str] = set()
    for case in kept.values():
        first = splits.setdefault(case.patient, case)
        if first.split != case.split and case.patient not in told:
            told.add(case.patient)
            what = (
                f"patient {case.patient!r} is in the {first.split} cases ({first.name}) and in the {case.split} "
                f"cases ({case.name})"
            )
            leaks.append(Problem(site, shown(case.image, root), what, "keep every patient in one split"))
    found = [*problems, *some(twice, "listed twice"), *some(leaks, "a patient in two splits")]
    return ImageListing(tuple(classes), tuple(kept.values()), source, tuple(found))


def federation_problems(listings: Mapping[str, ImageListing]) -> list[Problem]:
    """What sites show together, and in the bytes of their files: a patient at two sites of one source, equal files
    under two names, a class without a positive or without a negative anywhere. listings: by the sites' names.

    Equal files are fatal between test cases and others. Images that were scaled or encoded anew differ in their bytes
    and are not found here.
    """
    found: list[Problem] = []
    homes: dict[tuple[str, str], tuple[str, ImageCase]] = {}
    shared: list[Problem] = []
    told: set[tuple[str, str]] = set()
    for site, entry in listings.items():
        for case in entry.cases:
            key = entry.source, case.patient
            other, first = homes.setdefault(key, (site, case))
            if other != site and key not in told:
                told.add(key)
                what = f"patient {case.patient!r} of {entry.source} is also at site {other} (case {first.name!r})"
                shared.append(Problem(site, str(case.image), what, "give every patient to one site"))
    found += some(shared, "a patient at two sites")
    owners: dict[Path, tuple[str, ImageCase]] = {}
    twins: list[Problem] = []
    for site, entry in listings.items():
        for case in entry.cases:
            other, first = owners.setdefault(case.image, (site, case))
            if other != site:
                what = f"case {case.name!r} is the same file as case {first.name!r} at site {other}"
                twins.append(Problem(site, str(case.image), what, "give every file to one site"))
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
    for name in dict.fromkeys(name for entry in listings.values() for name in entry.classes):
        sums = [entry.counts("train").get(name, (0, 0)) for entry in listings.values()]
        present, absent = (sum(counts) for counts in zip(*sums, strict=True))
        holders = ", ".join(site for site, entry in listings.items() if name in entry.classes)
        for count, word in ((present, "present"), (absent, "absent")):
            if count == 0:
                what = f"class {name!r} is {word} in no training case of any site; it cannot be learnt"
                remedy = "add such cases, or take the class out"
                found.append(Problem(holders, "", what, remedy, word == "present"))
    return found


# ---------------------------------------------------------------------------------------------- generic CSV

_SPLITS: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}


def read_csv(site: str, root: Path, form: CsvForm, splitting: Splitting) -> ImageListing:
    """A table with one column per class: 1 present, 0 absent, empty not annotated, -1 uncertain (CheXpert; read by
    `form.uncertain`). Values may be written 1.0, 0.0, -1.0.

    With neither `patient` nor `patient_in` every image is its own patient. Where the table gives no test or no
    validation cases, `splitting` draws them. A row that cannot be read, or whose file is missing, is a problem; an
    image without a row is a note. Raises DataError for a table that cannot be understood at all.
    """
    path = root / form.table
    special = [name for name in (form.file, form.patient, form.split, form.no_finding) if name is not None]
    header, rows, problems = read_table(
        site, path, [*special, *(form.classes or ()), *form.ignored], delimiter=form.delimiter
    )
    classes = form.classes or tuple(n for n in header if n and n not in (*special, *form.ignored))
    if not classes:
        raise DataError(
            f"site {site}: {path}: line 1: no column is left to be a class; it has: {', '.join(header)}"
        )
    folder = root / form.images
    there, _ = find_images(folder)
    known = {os.path.normpath(file) for file in there}
    listed: dict[str, int] = {}
    cases: list[ImageCase] = []
    bad: list[Problem] = []
    twice: list[Problem] = []
    gone: list[Problem] = []
    open_cells = sum(row.values[name] in ("-1", "-1.0") for row in rows for name in classes)
    if open_cells:
        meaning = {"ignore": "not annotated", "ones": "present", "zeros": "absent"}[form.uncertain]
        what = (
            f"{open_cells} cells hold -1, uncertain, and are read as {meaning} (uncertain: {form.uncertain})"
        )
        problems.append(Problem(site, form.table, what, "change `uncertain` if that is not meant", False))
    for row in rows:
        file = folder / row.values[form.file]
        first = listed.setdefault(os.path.normpath(file), row.line)
        if first != row.line:
            what = f"{row.values[form.file]!r} is listed in line {first}, too"
            twice.append(Problem(site, f"{form.table}, line {row.line}", what, "take one row out"))
            continue
        case, faults = _csv_case(site, form, classes, row, file, header)
        bad += [replace(fault, file=f"{form.table}, line {row.line}") for fault in faults]
        if case is None:
            continue
        if os.path.normpath(file) in known or os.path.isfile(file):
            cases.append(case)
        else:
            what = f"missing: listed in {form.table}, line {row.line}, column {form.file!r}"
            remedy = "add the file, correct `images`, or take the row out"
            gone.append(Problem(site, shown(file, root), what, remedy))
    unused = [
        Problem(
            site, shown(file, root), f"an image without a row in {form.table}", "add a row to use it", False
        )
        for file in there
        if os.path.normpath(file) not in listed
    ]
    problems = some([replace(p, file=form.table) for p in problems], "rows of another length")
    problems += some(bad, "values that cannot be read") + some(gone, "missing files")
    problems += some(twice, "listed twice")
    problems += some(unused, "images without a row")
    return listing(
        site, root, classes, split_patients(cases, site, splitting), form.source or f"site {site}", problems
    )


def _csv_case(
    site: str, form: CsvForm, classes: Sequence[str], row: Row, file: Path, header: Sequence[str]
) -> tuple[ImageCase | None, list[Problem]]:
    faults: list[Problem] = []

    def wrong(column: str, allowed: str) -> None:
        what = f"column {column!r} holds {row.values[column]!r}; allowed: {allowed}"
        faults.append(Problem(site, "", what, "correct the row, or take it out"))

    name = os.path.splitext(row.values[form.file])[0]
    if not name:
        wrong(form.file, "the path of an image")
    patient = row.values[form.patient] if form.patient else name
    if form.patient and empty(patient):
        wrong(form.patient, "a name or number of the patient")
    if form.patient_in:
        match = re.search(form.patient_in, row.values[form.file])
        if match is None or not match[1]:
            wrong(form.file, f"a path in which `patient_in`, {form.patient_in!r}, finds the patient")
        else:
            patient = match[1]
    split: Split | None = "train"
    if form.split:
        split = _SPLITS.get(row.values[form.split].lower())
        if split is None:
            wrong(form.split, "train, validation, test")
    marks = {"ignore": None, "ones": 1, "zeros": 0}
    values: dict[str, int | None] = {}
    for column in [*classes, *([form.no_finding] if form.no_finding else [])]:
        text = row.values[column]
        try:
            number = None if empty(text) else float(text)
        except ValueError:
            number = 2.0
        if number not in (None, 0, 1, -1):
            wrong(
                column,
                "1 present, 0 absent, -1 uncertain, empty not annotated; other columns go into `ignored`",
            )
        values[column] = marks[form.uncertain] if number == -1 else None if number is None else int(number)
    if faults or split is None:
        return None, faults
    if form.no_finding and values[form.no_finding] == 1:
        values = {column: 0 if value is None else value for column, value in values.items()}
    present = frozenset(name for name in classes if values[name] == 1)
    absent = frozenset(name for name in classes if values[name] == 0)
    return ImageCase(name, file, patient, split, present, absent), []


# -------------------------------------------------------------------------------------- a folder per class


def read_folders(
    site: str,
    root: Path,
    folders: Mapping[str, tuple[Iterable[str], Iterable[str]]],
    splitting: Splitting,
    *,
    classes: Sequence[str],
    source: str,
) -> ImageListing:
    """A folder per class: folders maps a folder of `root` to the classes (present, absent) in its images.

    Images lie in the folder, or in its folder `images` where it has one; nothing else below is read. No patients are
    known: every image is its own. The shares of the splits hold within each folder of equal findings. Raises DataError
    for a folder that is missing.
    """
    cases: list[ImageCase] = []
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
            cases.append(ImageCase(case, file, case, "train", frozenset(present), frozenset(absent)))
    return listing(
        site, root, classes, split_patients(cases, site, splitting, stratified=True), source, problems
    )
