"""The index of a site: files, label names and patients, and how these meet the label space. No voxel is read.

Shapes: C classes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema

from fedatlas.core.errors import DataError, FederationError, first_of
from fedatlas.core.labels import BACKGROUND, LabelSpace, resolve_names
from fedatlas.core.options import NAME, option, options
from fedatlas.core.seeds import seed_of
from fedatlas.data import datasets
from fedatlas.data.datasets.shared.auto import detect
from fedatlas.data.datasets.shared.findings import balanced
from fedatlas.data.datasets.shared.listing import (
    LISTED,
    Case,
    Layout,
    Problem,
    Split,
    Splitting,
    annotated_in,
    parse_table,
    patient_of,
    read_json,
    shown,
)


@options
class Reference:
    """A fuller truth than a site trains on. It is used to score and for nothing else."""

    table: str = option("all_labels.json", "Its label table, in the site's folder.")
    labels: str = option("labelsTr_all", "Folder of its label files for training and validation cases.")
    test_labels: str = option("labelsTs_all", "Folder of its label files for test cases.")


@options
class Portions:
    """How many of a site's labelled cases are kept from training: whole numbers are cases, numbers below 1 shares of
    its patients. Whole patients are taken, so that a few cases more may come along."""

    validation: int | float = option(0, "Cases, or share of the patients, for validation.", ge=0)
    test: int | float = option(0, "Cases, or share of the patients, for the test.", ge=0)
    folds: int | None = option(
        None,
        "In place of `test`: into how many parts the patients are divided, equal but for one patient (cross-validation).",
        ge=2,
    )
    fold: int | None = option(None, "Which of the `folds` parts is tested on, from 1.", ge=1)

    def __post_init__(self) -> None:
        if (self.folds is None) != (self.fold is None):
            raise FederationError("split: folds and fold go together; give both, or neither")
        if self.folds and self.test:
            raise FederationError(
                f"split: test: got {self.test} beside folds, which say who is tested; leave one out"
            )
        if self.folds and self.fold and self.fold > self.folds:
            raise FederationError(
                f"split: fold: got {self.fold} of {self.folds} folds; allowed: 1 to {self.folds}"
            )
        for name, value in (("validation", self.validation), ("test", self.test)):
            if isinstance(value, float) and value >= 1:
                raise FederationError(
                    f"split: {name}: got {value}; a whole number counts cases, a share is below 1"
                )


AUTO = "auto"


def _format(name: str) -> str:
    """Raises ValueError, naming the nearest, for a `format` that is neither auto nor a data set."""
    try:
        datasets.require(name, "the data set", also=(AUTO,))
    except FederationError as error:
        raise ValueError(str(error)) from None
    return name


FORMATS = {"type": "string", "enum": [AUTO, *datasets.registry()]}
"""What editors offer as `format`."""


@options
class SiteConfig:
    """One hospital of the federation."""

    name: str = option(
        ...,
        "Names the site everywhere.",
        min_length=1,
        max_length=100,
        pattern=NAME,
    )
    path: str | None = option(
        None,
        "Its folder; relative to the federation file. Left out where the site takes part from elsewhere.",
        min_length=1,
    )
    format: Annotated[str, AfterValidator(_format), WithJsonSchema(FORMATS)] = option(
        AUTO,
        "The layout of the folder; auto: nnunet, msd or monai, whichever it is. "
        f"Scans: {', '.join(datasets.names('volumes'))}. Pictures with masks: {', '.join(datasets.names('masks'))}. "
        f"For findings of whole images: {', '.join(datasets.names('findings'))}.",
    )
    reading: dict[str, Any] = option(
        {}, "The options of the layout, as the columns of a csv; of each under `reading: …`."
    )
    role: Literal["train", "test"] = option(
        "train", "test: the site trains nothing, and all of its labelled cases are test cases."
    )
    split: Portions | None = option(
        None,
        "How many of its labelled cases validate and test, drawn by patient; fewer are among more. Labelled cases "
        "that its layout lists for validation or test stay what they are, and no others are drawn for that split. "
        "Null: the lists alone, and `evaluation.validation` where they hold no validation cases.",
    )
    cases: int | None = option(
        None,
        "Training cases to use, drawn by patient; fewer are among more. Null: all.",
        ge=1,
    )
    balanced: int | None = option(
        None,
        "Test images per annotated class in which it is present, and as many in which it is absent, each class drawn on its "
        "own, and scored for no other; null: all test images (whole images).",
        ge=1,
    )
    score_all: bool = option(
        False,
        "Whether labels of its table that `annotated` leaves out are scored in test cases, too; training never sees "
        "them.",
    )
    whole: bool = option(
        False,
        "Whether its labels hold organs with their lesions: a prediction's lesion classes then count as their organ, "
        "the first class of the group, and only organs are scored (role test).",
    )
    annotated: tuple[str, ...] | None = option(
        None,
        "Which labels of its table count as annotated; null: all. Its own names, or ours. It says what training may see: "
        "with `role: test` all are scored.",
    )
    aliases: dict[str, str] = option(
        {},
        "Its label names -> names of the label space, several to one where they are one class, or -> background.",
    )
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
        if self.whole and self.role != "test":
            raise FederationError(
                f"site {self.name}: whole: its labels hold organs with their lesions, which training would take for "
                "organs alone; it goes with `role: test`"
            )


def chosen_names(own: Iterable[str], annotated: Iterable[str], aliases: Mapping[str, str]) -> tuple[str, ...]:
    """Those of a site's own names that `annotated` lists, by themselves or by ours. A name of ours that is the site's own
    name of another class, as where left and right are exchanged, is taken for its own."""
    chosen, found = set(annotated), []
    for name in own:
        ours = aliases.get(name, name)
        if name in chosen or (ours in chosen and aliases.get(ours, ours) == ours):
            found.append(name)
    return tuple(found)


@dataclass(frozen=True)
class SiteIndex:
    """The layout of a site. table, reference_table: its label names, background included, to integers.

    level: what its classes are of, as in `LabelSpace`: voxels, or the whole image, and then its label names are those of
    its findings. trains: False for a site that is tested on and trains nothing. whole: see `SiteConfig.whole`. divided: do
    its cases have their splits for good, see `SiteConfig.split`; most, seed: at most so many training cases, in the order
    that follows from the seed. findings: its own names of findings of the whole image; scores_all: see
    `SiteConfig.score_all`. source: whose patient names these are, titles,
    channel_names: see `Listing`.
    """

    name: str
    root: Path
    table: dict[str, int]
    cases: tuple[Case, ...]
    channels: int
    aliases: dict[str, str]
    annotated: tuple[str, ...] | None
    reference_table: dict[str, int] | None
    problems: tuple[Problem, ...]
    trains: bool = True
    whole: bool = False
    divided: bool = False
    most: int | None = None
    seed: int = 0
    findings: tuple[str, ...] = ()
    scores_all: bool = False
    level: Literal["voxel", "image"] = "voxel"
    source: str = ""
    titles: Mapping[Path, str] = field(default_factory=dict)
    channel_names: tuple[str, ...] = ()

    @property
    def named_channels(self) -> tuple[str, ...]:
        """The names of all its channels, in their order; () where its table does not name all of them."""
        return self.channel_names if len(self.channel_names) == self.channels else ()

    @property
    def names(self) -> tuple[str, ...]:
        """The label names of its classes, in the file's order; of a table of voxels with the background."""
        return tuple(self.table) if self.level == "voxel" else self.findings

    @property
    def used(self) -> tuple[str, ...]:
        """Label names that count as annotated: all of `names`, or those listed in `annotated`."""
        own = [name for name in self.names if name != BACKGROUND]
        if self.annotated is None:
            return tuple(own)
        return chosen_names(own, self.annotated, self.aliases)

    @property
    def used_findings(self) -> tuple[str, ...]:
        """Findings listed in `annotated`; all findings of the site if none is listed."""
        return chosen_names(self.findings, self.annotated or (), self.aliases) or self.findings

    @property
    def brings(self) -> tuple[str, ...]:
        """What it annotates for training, by the names of the label space."""
        if not self.trains:
            return ()
        ours = dict.fromkeys(self.aliases.get(name, name) for name in self.used)
        return tuple(name for name in ours if name != BACKGROUND)

    def file(self, path: Path) -> str:
        """A path as it is shown: by its title, or relative to the site's folder where it lies inside."""
        return self.titles.get(path) or shown(path, self.root)


@dataclass(frozen=True)
class Naming:
    """How the integers and names of one table meet the label space.

    integers: integer -> class name, or background for what does not count, {} for labels of whole images; classes: own
    name -> class.
    """

    integers: dict[int, str]
    classes: dict[str, int]

    def known(self, annotated: Iterable[str]) -> frozenset[int]:
        """The classes annotated in a case, from its own names. Of several names that are one class, all must
        be annotated."""
        given = set(annotated)
        missing = {index for name, index in self.classes.items() if name not in given}
        return frozenset(index for index in self.classes.values() if index not in missing)

    def findings(self, case: Case) -> tuple[frozenset[int], frozenset[int]]:
        """The classes that are present in an image, and those that are absent, where labels are of whole images. Of
        several names that are one class, one that is present makes it present, and all must be absent to make it
        absent."""
        present = frozenset(c for name, c in self.classes.items() if name in case.present)
        absent = frozenset(c for name, c in self.classes.items() if name in case.absent)
        not_all = frozenset(c for name, c in self.classes.items() if name not in case.absent)
        return present, absent - not_all


def read_site(config: SiteConfig, base: Path, *, seed: int = 0) -> SiteIndex:
    """The layout of a folder with labels of voxels; none is read. A relative path is taken from `base`.

    seed: of `split` and `cases`. What is wrong with single files is kept in `problems`. Raises DataError where the
    site cannot be understood at all: no folder, no table, regions instead of integers, a name that does not exist,
    more cases asked for than there are; FederationError for options that do not go together.
    """
    root = _folder(config, base)
    _refuse_combinations(config)
    chosen = None if config.format == AUTO else datasets.find(config.format)
    if (chosen is None or chosen.has_table) and not (root / config.table).exists():
        inner = next(iter(sorted(root.glob(f"*/{config.table}"))), None)
        if inner:
            raise DataError(
                f"site {config.name}: {root}: holds no {config.table}, and {inner.parent.name} in it does; give that "
                "folder as `path`"
            )
    layout = Layout(config.name, root, config.table, config.labels, config.test_labels)
    index = _read(config, chosen or datasets.get(detect(layout)), layout, seed, "voxel")
    index = _with_patients(config, index)
    if config.reference:
        index = _with_reference(config.reference, index)
    if config.split is not None:
        try:
            index = replace(index, cases=_divided(index.cases, config.split, config.name, seed))
        except DataError as error:
            raise _after_problems(index, error) from None
        index = replace(index, problems=(*index.problems, *_empty_shares(index, config.split)))
    if config.role == "test":
        tests = (replace(c, split="test") for c in index.cases if c.labelled or c.fuller)
        index = replace(index, cases=tuple(tests))
    if not config.reference and (config.role == "test" or config.score_all):
        index = replace(index, cases=tuple(map(_scored_in_full, index.cases)), reference_table=index.table)
    return index


def read_image_site(config: SiteConfig, base: Path, *, channels: int, splitting: Splitting) -> SiteIndex:
    """The layout of a folder with labels of whole images; no pixel is read. A relative path is taken from `base`.

    channels: of every image as it is prepared. splitting: where the data set does not say who is tested; its seed is that
    of `cases` and `balanced`, too. Raises DataError or FederationError where the site cannot be understood at all: no
    folder, no table, a format of the other task, a name that does not exist.
    """
    data = datasets.find(config.format)
    if config.balanced is not None and config.score_all:
        raise FederationError(
            f"site {config.name}: score_all and balanced: test images are drawn by the annotated classes, and the others would be "
            "scored in next to none; leave one of the two out"
        )
    if data is None or data.kind != "findings":
        raise FederationError(
            f"site {config.name}: format is {config.format!r}; labels of whole images are read from: "
            f"{', '.join(datasets.known('findings'))}; set `format`"
        )
    root = _folder(config, base)
    for key, default in FOR_LABEL_MAPS.items():
        if getattr(config, key) != default:
            instead = f"for format {config.format} it is an option of `reading`, as far as there is one"
            if key == "patient":
                instead = "give `reading` the column, `patient`, or the expression, `patient_in` (format csv)"
            raise FederationError(
                f"site {config.name}: {key}: is for layouts with label maps; leave it out. {instead[0].upper()}{instead[1:]}"
            )
    index = _read(config, data, Layout(config.name, root, splitting=splitting), splitting.seed, "image")
    cases = index.cases
    if config.role == "test":
        cases = tuple(replace(case, split="test") for case in cases)
    train = [case for case in cases if case.split == "train"]
    kept = {case.name for case in _first(train, config.cases, config.name, splitting.seed)}
    cases = tuple(case for case in cases if case.split != "train" or case.name in kept)
    if config.balanced is not None:
        tests, n = [case for case in cases if case.split == "test"], config.balanced
        try:
            chosen = balanced(tests, index.used, positives=n, negatives=n, seed=splitting.seed)
        except DataError as error:
            raise _after_problems(index, DataError(f"site {config.name}: {error}")) from None
        cases = tuple(case for case in cases if case.split != "test") + chosen
    return replace(index, cases=cases, channels=channels, divided=True, most=None)


def _after_problems(index: SiteIndex, error: DataError) -> DataError:
    """An error about how many cases there are, below what was found in the files, which may be why: a line each, what is
    wrong before what is a note."""
    found = sorted(index.problems, key=lambda problem: not problem.fatal)
    lines = [str(problem) for problem in found[:LISTED]]
    if len(found) > LISTED:
        lines.append(f"site {index.name}: and {len(found) - LISTED} more findings in its files")
    return DataError("\n".join([*lines, str(error)]))


def _folder(config: SiteConfig, base: Path) -> Path:
    root = (base / Path(config.path or "").expanduser()).resolve()
    if not root.is_dir():
        raise DataError(f"site {config.name}: {root}: no such folder; correct the site's `path`")
    return root


def _read(
    config: SiteConfig, data: datasets.DataSet, layout: Layout, seed: int, level: Literal["voxel", "image"]
) -> SiteIndex:
    """What the data set's reader finds in the folder, with what the site's keys say of it. Raises DataError where
    `annotated` names what is not there."""
    listing = datasets.read(data, layout, config.reading)
    own = (*listing.table, *listing.findings)
    known = [*own, *(config.aliases.get(name, name) for name in own)]
    for name in config.annotated or ():
        if name not in known:
            raise DataError(
                f"site {config.name}: `annotated` names {name!r}, which its label table does not hold; known: "
                f"{', '.join(dict.fromkeys(known))}"
            )
    return SiteIndex(
        config.name,
        layout.root,
        listing.table,
        listing.cases,
        listing.channels or max((len(case.images) for case in listing.cases), default=1),
        dict(config.aliases),
        config.annotated,
        None,
        listing.problems,
        trains=config.role == "train",
        whole=config.whole,
        divided=config.split is not None or config.role == "test",
        most=config.cases,
        seed=seed,
        findings=listing.findings,
        scores_all=config.score_all,
        level=level,
        source=listing.source or f"site {config.name}",
        titles=listing.titles,
        channel_names=listing.channel_names,
    )


FOR_LABEL_MAPS: Mapping[str, Any] = {
    "patient": None,
    "reference": None,
    "table": "dataset.json",
    "labels": "labelsTr",
    "test_labels": "labelsTs",
    "split": None,
    "whole": False,
}
"""Keys of a site that say nothing where labels are of whole images, with their defaults."""


def _refuse_combinations(config: SiteConfig) -> None:
    """Raises FederationError for keys that say nothing here, or contradict each other."""
    where = f"site {config.name}:"
    data = None if config.format == AUTO else datasets.find(config.format)
    if data is not None and data.kind not in datasets.VOXELS:
        raise FederationError(
            f"{where} format is {config.format!r}, which has no label maps; for it set "
            f"`task: classification`, or choose from: {', '.join((AUTO, *datasets.known(*datasets.VOXELS)))}"
        )
    if config.balanced is not None:
        raise FederationError(
            f"{where} balanced: is for labels of whole images (`task: classification`); leave it out"
        )
    if config.role == "test" and (config.split is not None or config.cases is not None):
        key = "split" if config.split is not None else "cases"
        raise FederationError(
            f"{where} {key}: says which cases train, and with `role: test` none does; leave one of the two out"
        )
    if config.score_all and config.reference is not None:
        raise FederationError(
            f"{where} score_all and reference: both say what is scored beside what is annotated; leave one out"
        )
    if config.score_all and config.annotated is None:
        raise FederationError(
            f"{where} score_all: without `annotated` all of its labels are scored already; name in `annotated` those "
            "that it trains on, or leave score_all out"
        )


def _scored_in_full(case: Case) -> Case:
    """A test case whose own label is the truth, also for names that do not count as annotated."""
    if case.split != "test" or not case.labelled:
        return case
    return replace(case, reference=case.label, reference_annotated=case.annotated)


def _divided(cases: Sequence[Case], portions: Portions, site: str, seed: int) -> tuple[Case, ...]:
    """The cases with their splits: whole patients in one order, of which the first are test cases and the last
    validation cases, so that each choice is nested in a larger one and leaves the other alone. See `_ranked`. Of folds,
    stretches of that order, one is tested on, and those who come before it, round about, are validation cases.

    Labelled cases that the layout lists for validation or test stay what they are; DataError where `split` asks for
    more of them. Unlabelled cases train where their layout says so, and are left out where it does not.
    """
    fixed = {
        case for case in cases if case.split != "train" and (case.labelled or case.reference is not None)
    }
    for split, portion in (("validation", portions.validation), ("test", portions.test)):
        listed = sum(case.split == split for case in fixed)
        if portions.folds and listed and split == "test":
            raise DataError(
                f"site {site}: split: folds: every labelled case is to be tested on once, and its layout lists {listed} labelled "
                "test cases, which stay test cases; leave the folds out, or list them for training"
            )
        if portion and listed:
            raise DataError(
                f"site {site}: split: {split}: {portion:g} is asked for, and its layout lists {listed} labelled "
                f"{split} cases, which stay {split} cases; leave `split.{split}` out, or list them for training"
            )
    groups: dict[str, list[Case]] = {}
    for case in cases:
        if case not in fixed and (case.labelled or case.reference is not None):
            groups.setdefault(case.patient, []).append(case)
    if not groups:
        has = (
            f"of the {len(cases)} cases that its layout lists none is a labelled training case"
            if cases
            else "its layout lists no case"
        )
        raise DataError(
            f"site {site}: split: there is nothing to divide: {has}; see that its files are where its format has them"
        )
    order = _ranked(groups, site, seed)
    if portions.folds and portions.fold:
        if portions.folds > len(order):
            raise DataError(
                f"site {site}: split: folds: {portions.folds} of {len(order)} patients with labels; ask for at most as many as "
                "there are"
            )
        start, end = (len(order) * part // portions.folds for part in (portions.fold - 1, portions.fold))
        test, rest = set(order[start:end]), [*order[end:], *order[:start]]
        tested = f"one fold of {portions.folds}"
    else:
        test, rest = _taken(order, groups, portions.test, len(order)), order
        tested = f"{portions.test:g}"
    validation = _taken(rest[::-1], groups, portions.validation, len(order))
    if test & validation or len(test) + len(validation) >= len(order):
        count = sum(map(len, groups.values()))
        raise DataError(
            f"site {site}: split: {portions.validation:g} for validation and {tested} for the test leave "
            f"nothing to train on: the site has {count} labelled cases of {len(order)} patients; ask for fewer"
        )
    found = []
    for case in cases:
        if case in fixed:
            found.append(case)
        elif case.labelled or case.reference is not None:
            place: Split = "test" if case.patient in test else "validation"
            found.append(replace(case, split=place if case.patient in test | validation else "train"))
        elif case.split == "train" and case.patient not in test | validation:
            found.append(case)
    return tuple(found)


def _empty_shares(index: SiteIndex, portions: Portions) -> list[Problem]:
    """Shares above 0 of a site that came to no patient."""
    return [
        Problem(
            index.name,
            "",
            f"split: {split}: {portion:g} of its patients came to none",
            f"ask for cases, as `{split}: 1`, or a larger share, unless that is meant",
            False,
        )
        for split, portion in (("validation", portions.validation), ("test", portions.test))
        if isinstance(portion, float) and portion > 0 and not any(case.split == split for case in index.cases)
    ]


def _ranked(groups: Mapping[str, Sequence[Case]], site: str, seed: int) -> list[str]:
    """The patients in an order that follows from a hash of (seed, site, patient). Patients with the same findings are
    spread evenly over it, from a start by hash, so that every stretch has its part of them, rounded up or down.
    patient -> its cases."""
    ranked = sorted(groups, key=lambda patient: (seed_of(seed, "split", site, patient), patient))
    alike: dict[str, list[str]] = {}
    for patient in ranked:
        findings = sorted({finding for case in groups[patient] for finding in case.findings})
        alike.setdefault(repr(findings), []).append(patient)
    if len(alike) < 2:
        return ranked
    place = {}
    for findings, same in alike.items():
        start = Fraction(seed_of(seed, "split of findings", site, findings), 1 << 63)
        place |= {patient: (number + start) / len(same) for number, patient in enumerate(same)}
    return sorted(ranked, key=lambda patient: place[patient])


def _taken(
    order: Sequence[str], groups: Mapping[str, Sequence[Case]], portion: int | float, patients: int
) -> set[str]:
    """The first of the order: until they have so many cases, or the share of all patients of the site."""
    if isinstance(portion, float):
        return set(order[: round(portion * patients)])
    taken, count = set[str](), 0
    for patient in order:
        if count >= portion:
            break
        taken.add(patient)
        count += len(groups[patient])
    return taken if count >= portion else set(order)


def _with_patients(config: SiteConfig, index: SiteIndex) -> SiteIndex:
    """The cases with their patients: those of the table "patients", then those that the expression finds, then those of
    the layout. Keys of the table that are no case are a problem, see `_unmatched`."""
    table = index.root / config.table
    listed = read_json(table, config.name).get("patients") or {} if table.is_file() else {}
    if not isinstance(listed, dict):
        raise DataError(
            f'site {config.name}: {table}: "patients" must be {{case: patient}}, got {type(listed).__name__}'
        )
    problems = _unmatched(config, table, listed, [case.name for case in index.cases])
    found = []
    for case in index.cases:
        patient = patient_of(listed.get(case.name), "")
        if not patient and config.patient is not None:
            match = re.search(config.patient, case.name)
            if match is None or match[1] is None:
                raise DataError(
                    f"site {config.name}: case {case.name!r}: `patient`, {config.patient!r}, finds nothing in it; "
                    "correct the expression"
                )
            patient = match[1]
        found.append(replace(case, patient=patient or case.patient))
    return replace(index, cases=tuple(found), problems=(*index.problems, *problems))


def _unmatched(
    config: SiteConfig, table: Path, listed: Mapping[str, Any], cases: Sequence[str]
) -> list[Problem]:
    """A problem where keys of the table "patients" are no case. It is a note where the table has every case, since the
    keys are then those of cases that are not here; else a case may be meant whose name is another, and two scans of a
    patient would come into two splits. Raises DataError where no key is a case."""
    known = set(cases)
    strange = [key for key in listed if key not in known]
    if not strange or not cases:
        return []
    if len(strange) == len(listed):
        raise DataError(
            f'site {config.name}: {table}: "patients" must be {{case: patient}}, and none of its keys is a case: '
            f"{first_of(map(repr, strange))}; the cases are: {first_of(map(repr, cases))}"
        )
    what = f'keys of "patients" that are no case here: {first_of(map(repr, strange))}'
    missing = [case for case in cases if case not in listed]
    if not missing:
        remedy = "see that no case was left behind, or take them out"
        return [Problem(config.name, config.table, what, remedy, False)]
    what += f", while these cases are not in it: {first_of(map(repr, missing))}"
    return [Problem(config.name, config.table, what, "write each key as its case is named, or take it out")]


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
    missing = []
    if reference.labels != Reference().labels and not (index.root / reference.labels).is_dir():  # type: ignore[call-arg]
        instead = "scored by what is annotated alone" if index.trains else "not scored"
        what = f"no such folder; training and validation cases are {instead}"
        missing.append(Problem(index.name, reference.labels, what, "correct `reference.labels`", False))
    problems = (*index.problems, *missing)
    return replace(index, cases=tuple(cases), reference_table=table, problems=problems)


def naming_of(index: SiteIndex, space: LabelSpace) -> tuple[Naming, Naming]:
    """How a site's label names meet the label space: those that training sees, and those for which there is a truth
    beside them, as of a reference (of whole images: all for which there is one).

    A name of the reference that the space does not hold is not scored, nor one of a site that trains nothing; such a
    site annotates nothing. Raises FederationError for a name of a site that trains that is neither in the space nor an
    alias of one, for an alias that matches nothing, for a class of which `annotated` leaves out a label, and for a site
    that is tested on with no class of the space.
    """
    if index.level == "image":
        return _naming_of_findings(index, space)
    other = index.reference_table or {}
    for alias in index.aliases:
        if alias not in index.table and alias not in other and alias not in index.findings:
            raise FederationError(
                f"site {index.name}: alias {alias!r} matches none of the site's labels; it has: "
                f"{', '.join((*index.table, *index.findings))}"
            )
    if index.whole and not space.groups:
        raise FederationError(
            f"site {index.name}: whole: the label space has no groups, so that no class is a lesion of an organ; give "
            "`labels.groups`, or leave it out"
        )
    _refuse_findings(index, space)
    used = index.used if index.trains else ()
    own = {alias: name for alias, name in index.aliases.items() if alias in used}
    resolved = resolve_names(used, own, space, site=index.name)
    _refuse_parts(index, used)
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
    if not index.trains:
        _refuse_foreign(index, space, scoring)
    return strict, scoring


def _naming_of_findings(index: SiteIndex, space: LabelSpace) -> tuple[Naming, Naming]:
    """As `naming_of`, of labels of whole images."""
    for alias in index.aliases:
        if alias not in index.findings:
            raise FederationError(
                f"site {index.name}: alias {alias!r} matches none of the site's classes; it has: "
                f"{', '.join(index.findings)}"
            )
    used = index.used if index.trains else ()
    own = {alias: name for alias, name in index.aliases.items() if alias in used}
    try:
        resolved = resolve_names(used, own, space, site=index.name)
    except FederationError as error:
        raise FederationError(
            f"{error}. A column of a csv that is no class goes into `reading`: the patient as `patient`, "
            "the split as `split`, others into `ignored`"
        ) from None
    _refuse_parts(index, used)
    fuller = index.findings if index.scores_all or not index.trains else index.used
    names = {name: index.aliases.get(name, name) for name in fuller}
    return (
        Naming({}, {name: space.index(target) for name, target in resolved.items()}),
        Naming({}, {name: space.index(target) for name, target in names.items() if target in space.names}),
    )


def _refuse_parts(index: SiteIndex, used: Sequence[str]) -> None:
    """Raises FederationError for a class of several labels, some of which `annotated` leaves out: what these hold would be
    taken for verified absent."""
    ours = {name: index.aliases.get(name, name) for name in index.names}
    for name, target in ours.items():
        parts = [part for part in used if ours[part] == target != BACKGROUND]
        if parts and name not in used:
            raise FederationError(
                f"site {index.name}: `annotated` names {parts[0]!r} and leaves out {name!r}, and both are {target!r}, which is "
                "known only where all of its labels are; name both in `annotated`, or give one of them another alias"
            )


def _refuse_findings(index: SiteIndex, space: LabelSpace) -> None:
    """Raises FederationError for an alias of a finding that points to no finding, and for two that become one."""
    known = ", ".join(space.findings) or "none"
    for alias, target in index.aliases.items():
        if alias in index.findings and alias not in index.table and target not in space.findings:
            raise FederationError(
                f"site {index.name}: alias {alias!r} is of a finding and points to {target!r}, which `labels.findings` "
                f"does not name; it names: {known}"
            )
    meaning: dict[str, str] = {}
    for name in index.findings:
        target = index.aliases.get(name, name)
        if target in space.findings and target in meaning:
            raise FederationError(
                f"site {index.name}: its findings {meaning[target]!r} and {name!r} both become {target!r}; correct `aliases`"
            )
        meaning[target] = name


def _refuse_foreign(index: SiteIndex, space: LabelSpace, scoring: Naming) -> None:
    """Raises FederationError for a tested site that has nothing to score, or an alias of a class that is not there."""
    for alias, target in index.aliases.items():
        if target not in (*space.names, *space.findings, BACKGROUND):
            raise FederationError(
                f"site {index.name}: alias {alias!r} points to {target!r}, which is not in the label space; "
                f"known: {', '.join((*space.names, *space.findings))}"
            )
    told = {index.aliases.get(name, name) for name in index.findings}
    if not scoring.classes and not told & set(space.findings):
        own = (*(index.reference_table or index.table), *index.findings)
        raise FederationError(
            f"site {index.name}: none of its labels ({', '.join(own)}) is in the label space "
            f"({', '.join((*space.names, *space.findings))}); give them aliases"
        )


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
    return LabelSpace.of_names(tuple(names), groups, exclusive=exclusive)


def split_validation(index: SiteIndex, *, seed: int, fraction: float) -> dict[Split, tuple[Case, ...]]:
    """The cases of each split. Validation cases are taken from the training cases, whole patients at a time.

    Patients are ranked by a hash of (seed, site, patient) and the first ones taken, so that the choice depends
    neither on the order of files nor on other sites, and is nested over fractions. Those without a label or a fuller
    truth train, and count for nothing here; with two others or more, and a fraction above 0, both splits have one. A site that lists validation cases itself keeps them, and
    one with `split` or `role: test` its splits. Of the training cases that are left, `index.most` are used.
    """
    train = [case for case in index.cases if case.split == "train"]
    given = [case for case in index.cases if case.split == "validation"]
    test = [case for case in index.cases if case.split == "test"]
    if not given and fraction > 0 and not index.divided:
        patients = sorted(
            {case.patient for case in train if case.labelled or case.fuller},
            key=lambda patient: (seed_of(seed, "validation", index.name, patient), patient),
        )
        count = min(max(round(fraction * len(patients)), 1), len(patients) - 1) if patients else 0
        chosen = set(patients[:count])
        given = [case for case in train if case.patient in chosen]
        train = [case for case in train if case.patient not in chosen]
    train = _first(train, index.most, index.name, index.seed)
    return {"train": tuple(train), "validation": tuple(given), "test": tuple(test)}


def _first(train: Sequence[Case], most: int | None, site: str, seed: int) -> Sequence[Case]:
    """At most so many training cases, None: all. Patients are ranked by a hash, so that fewer are always among more."""
    if most is None:
        return train
    ranked = sorted(train, key=lambda c: (seed_of(seed, "cases", site, c.patient), c.patient, c.name))
    kept = {case.name for case in ranked[:most]}
    return [case for case in train if case.name in kept]
