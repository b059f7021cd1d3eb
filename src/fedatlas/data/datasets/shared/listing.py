"""What every data set layout is read into: cases, their files and a label table. No voxels are read here."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedatlas.core.errors import DataError
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.options import option, options

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a site's data.

    `remedy`: what mends it. `fatal`: training refuses to begin. `offer`: a setting with which training takes the
    data as they are, empty for none; an evaluation does not name it, since nothing can be scored by it.
    """

    site: str
    file: str
    what: str
    remedy: str
    fatal: bool = True
    offer: str = ""

    def __str__(self) -> str:
        where = f"site {self.site}: {self.file}" if self.file else f"site {self.site}"
        offer = f", or set {self.offer}" if self.offer else ""
        return f"{where}: {self.what}; {self.remedy}{offer}"


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


@dataclass(frozen=True)
class Layout:
    """The folder of a site, and what its keys say of it.

    table, labels, test_labels: names in `root`, for layouts with a label table. options: the site's key `reading`, an
    object of the data set's class of options. splitting: for findings without official lists.
    """

    site: str
    root: Path
    table: str = "dataset.json"
    labels: str = "labelsTr"
    test_labels: str = "labelsTs"
    options: Any = None
    splitting: Splitting = field(default_factory=Splitting)


@dataclass(frozen=True)
class Runs:
    """A mask as run lengths, see `data.formats.rle`. text: one or more, their union is the mask; shape: rows and columns
    of the picture they were drawn on; source: the table and line they stand in, for messages."""

    text: tuple[str, ...]
    shape: tuple[int, int]
    source: str


@dataclass(frozen=True)
class Side:
    """One of two organs that are drawn in one mask, as the lungs: the connected parts that lie on the patient's left
    or right, which is the right or left of a frontal picture."""

    path: Path
    side: Literal["left", "right"]


@dataclass(frozen=True)
class Drawn:
    """A segment of a DICOM SEG, or an ROI of an RTSTRUCT, by its number. path: the file, or the archive that holds it as
    `member`."""

    path: Path
    member: str
    number: int


PictureMask = Path | Runs | Side
Mask = PictureMask | Drawn

EMPTY = "-1"
"""The run lengths of a mask without a pixel."""


@dataclass(frozen=True)
class Case:
    """One scan or picture: files and annotated labels, by the site's own names. One with labels of the whole image alone
    has nothing but `findings`; see `image_case`.

    masks: own class name -> its mask, for sites with a mask per class in place of a label map; a name given twice
    means the union, and a name of `annotated` without a mask is annotated and absent. reference_annotated: what
    the file `reference` annotates, or, where that is None, which of `masks` may be scored beside `annotated`.
    findings: own name of a finding of the whole image -> is it present; one that is missing is not annotated.
    pixel: millimetres between rows and between columns of a picture whose file does not say it. raw: rows and
    columns of a picture without a header, see `data.reading`. series: the UID of the DICOM series that `images`, its
    files or the archive that holds them, are of.
    """

    name: str
    images: tuple[Path, ...]
    label: Path | None
    split: Split
    patient: str
    annotated: tuple[str, ...]
    reference: Path | None = None
    reference_annotated: tuple[str, ...] = ()
    masks: tuple[tuple[str, Mask], ...] = ()
    findings: tuple[tuple[str, bool], ...] = ()
    pixel: tuple[float, float] | None = None
    raw: int | None = None
    series: str = ""

    @cached_property
    def present(self) -> frozenset[str]:
        """The findings that were verified to be there."""
        return frozenset(name for name, there in self.findings if there)

    @cached_property
    def absent(self) -> frozenset[str]:
        """The findings that were verified not to be there."""
        return frozenset(name for name, there in self.findings if not there)

    @property
    def labelled(self) -> bool:
        """Is there a truth to train on: a label map, masks of annotated classes, or findings."""
        return self.label is not None or bool(self.annotated) or bool(self.findings)

    @property
    def fuller(self) -> bool:
        """Is there a truth for scoring only."""
        return self.reference is not None or bool(self.reference_annotated)

    @property
    def label_files(self) -> tuple[Path, ...]:
        """The files of its label: the label map, or those of the masks."""
        files = [mask.path if isinstance(mask, Side | Drawn) else mask for _, mask in self.masks]
        masks = dict.fromkeys(file for file in files if isinstance(file, Path))
        return (*((self.label,) if self.label else ()), *masks)

    @property
    def content(self) -> dict[str, Any]:
        """What decides its voxels beside the content of its files, as plain values."""
        masks = [[name, _plain(mask)] for name, mask in self.masks]
        given = {"masks": masks, "pixel": self.pixel, "raw": self.raw, "series": self.series}
        return {name: value for name, value in given.items() if value not in (None, [], "")}


def image_case(
    name: str, image: Path, patient: str, split: Split, present: Iterable[str], absent: Iterable[str]
) -> Case:
    """An image with labels of the whole. present, absent: the findings that were verified to be there, or not; any other
    is not annotated. Raises DataError for one in both."""
    findings = dict.fromkeys(absent, False)
    both = sorted(findings.keys() & set(present))
    if both:
        raise DataError(f"case {name!r}: {both[0]!r} is present and absent at once; give it one value")
    findings |= dict.fromkeys(present, True)
    return Case(name, (image,), None, split, patient, (), findings=tuple(sorted(findings.items())))


def _plain(mask: Mask) -> list[Any]:
    if isinstance(mask, Runs):
        return [list(mask.text), list(mask.shape)]
    if isinstance(mask, Drawn):
        return [mask.path.name, mask.member, mask.number]
    return [mask.path.name, mask.side] if isinstance(mask, Side) else [mask.name]


@dataclass(frozen=True)
class Listing:
    """A site as its layout describes it. table: the site's label names, background included, to integers; {} where
    labels are of whole images. channels: images per case, where the layout says so. findings: own names of findings of
    the whole image. titles: file -> what messages call it, where names of files may be those of patients. channel_names: of its channels in
    their order, where the layout has names for them. source: whose patient names these are, where labels are of whole images: patients are compared
    between sites of one source only, since patient 17 of one hospital is not patient 17 of another."""

    table: dict[str, int]
    cases: tuple[Case, ...]
    channels: int | None
    problems: tuple[Problem, ...] = ()
    findings: tuple[str, ...] = ()
    source: str = ""
    titles: Mapping[Path, str] = field(default_factory=dict)
    channel_names: tuple[str, ...] = ()

    def counts(self, *splits: Split) -> dict[str, tuple[int, int]]:
        """finding -> (cases where it is present, cases where it is absent), in these splits; none given: in all."""
        chosen = [case for case in self.cases if not splits or case.split in splits]
        present = Counter(name for case in chosen for name in case.present)
        absent = Counter(name for case in chosen for name in case.absent)
        return {name: (present[name], absent[name]) for name in self.findings}


def read_json(path: Path, site: str) -> dict[str, Any]:
    """A JSON object. Raises DataError if the file is missing, unreadable or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"site {site}: {path}: no such file; it holds the label table, name it with `table`"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"site {site}: {path}: not readable as JSON ({error}); mend the file") from None
    if not isinstance(found, dict):
        raise DataError(f"site {site}: {path}: a JSON object is expected, got {type(found).__name__}")
    return found


def parse_table(labels: Any, where: str) -> dict[str, int]:
    """A label table, {"liver": 1} or {"1": "liver"}, as name -> integer, in the file's order.

    Whatever stands for 0 is the background. Raises DataError, beginning with `where`, for anything else:
    regions (lists of integers), an ignore label, an integer or a name given twice.
    """
    if not isinstance(labels, Mapping) or not labels:
        raise DataError(
            f'{where}: the key "labels" must be a table like {{"background": 0, "liver": 1}}, got {labels!r}'
        )
    table: dict[str, int] = {}
    for key, value in labels.items():
        name, number = (value, key) if isinstance(value, str) and key.lstrip("-").isdigit() else (key, value)
        if isinstance(number, list | tuple):
            raise DataError(
                f"{where}: label {name!r} is a region, {list(number)}; regions are not read: give every class "
                "one integer, and put organ and lesion into one of the label space's `groups`"
            )
        try:
            number = int(number) if not isinstance(number, bool | float) else None
        except (TypeError, ValueError):
            number = None
        if number is None or number < 0:
            raise DataError(f"{where}: label {key!r}: {value!r} is not a whole number from 0 on")
        if name.lower() == "ignore":
            raise DataError(
                f"{where}: the label 'ignore' is not read; give its voxels to the background, or list per case "
                'in "annotated" which classes are complete'
            )
        name = BACKGROUND if name.lower() == BACKGROUND else name
        if name in table:
            raise DataError(f"{where}: label {name!r} is in the table twice")
        if number in table.values():
            other = next(known for known, integer in table.items() if integer == number)
            raise DataError(f"{where}: labels {other!r} and {name!r} share the integer {number}")
        table[name] = number
    zero = next((name for name, number in table.items() if number == 0), None)
    if zero not in (None, BACKGROUND) or table.get(BACKGROUND, 0) != 0:
        raise DataError(f'{where}: the integer 0 must be {BACKGROUND!r}, got "labels": {dict(labels)!r}')
    return {BACKGROUND: 0} | table if zero is None else table


def names_of_channels(named: Any) -> tuple[str, ...]:
    """What a table file says of channels, {"0": "T1", "1": "T2"} or a list, in their order; () for anything else."""
    if isinstance(named, Mapping):
        numbered = all(key.isdecimal() for key in named)
        named = [named[key] for key in (sorted(named, key=int) if numbered else named)]
    return tuple(named) if isinstance(named, list) and all(isinstance(name, str) for name in named) else ()


def require_annotated(listed: Any, where: str) -> Mapping[str, Any]:
    """The table file's key "annotated", {} if it has none. Raises DataError for what is no table of cases."""
    if listed is None:
        return {}
    if not isinstance(listed, Mapping):
        raise DataError(
            f'{where}: the key "annotated" must be a table of cases, {{case: [label names]}}, got '
            f"{type(listed).__name__}"
        )
    return listed


def annotated_in(case: str, listed: Any, names: Iterable[str], where: str) -> tuple[str, ...]:
    """The label names that a case annotates. listed: the table file's key "annotated", None if it has none.

    Raises DataError for a case that is not listed, and for a name that is not in the table.
    """
    known = [name for name in names if name != BACKGROUND]
    if listed is None:
        return tuple(known)
    if case not in require_annotated(listed, where):
        raise DataError(
            f'{where}: case {case!r} has a label file but is not in "annotated"; list the labels that were '
            "drawn in it, [] for none"
        )
    given = listed[case]
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise DataError(f'{where}: "annotated" of case {case!r} must be a list of label names, got {given!r}')
    wrong = [name for name in given if name not in known]
    if wrong:
        raise DataError(
            f'{where}: "annotated" of case {case!r} names {wrong[0]!r}, which is not in the table; '
            f"known: {', '.join(known)}"
        )
    return tuple(name for name in known if name in given)


def patient_of(given: Any, otherwise: str) -> str:
    """The patient that a JSON file names for a case, or `otherwise` where it leaves that open, as exports of tables do:
    null, NaN, or an empty text."""
    text = "" if given is None else str(given)
    return otherwise if text.strip().lower() in ("", "nan") else text


def stem(path: Path) -> str:
    """The name of a NIfTI file without .nii or .nii.gz."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def shown(path: Path, root: Path) -> str:
    """A path as it is shown: relative to the site's folder where it lies inside."""
    return path.relative_to(root).as_posix() if root in path.parents else str(path)


LISTED = 20
"""How many problems of one kind are listed one by one."""


def some(problems: Sequence[Problem], of: str) -> list[Problem]:
    """The first problems of a kind, and one that counts the rest. of: what they have in common, in a few words."""
    if len(problems) <= LISTED:
        return list(problems)
    more = replace(
        problems[LISTED], file="", what=f"{of}: {len(problems) - LISTED} more like the {LISTED} before"
    )
    return [*problems[:LISTED], more]
