"""What can be wrong with a site, and with several together. Nothing is trained, nothing is changed."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.names import channels_apart
from fedatlas.data.datasets.shared.findings import federation_problems
from fedatlas.data.datasets.shared.listing import Case, Listing, Problem, image_case
from fedatlas.data.formats.flat import Note
from fedatlas.data.index import Naming, SiteIndex, naming_of
from fedatlas.data.leaks import Leak, leak_of
from fedatlas.data.reading import Raw, digest, gathered, read_case
from fedatlas.data.transforms import doubts_about, skew_told


class Scan(NamedTuple):
    """A scan that was read. file: as it is shown; digest: of its voxels, see `reading.digest`."""

    site: str
    case: str
    split: str
    file: str
    digest: str


def layout_problems(index: SiteIndex) -> list[Problem]:
    """What the layout alone shows: missing files, duplicated cases, a patient in two splits."""
    found = list(index.problems)
    seen: dict[str, str] = {}
    files: dict[tuple[str, str], str] = {}
    splits: dict[str, tuple[str, str]] = {}
    for case in index.cases:
        where = index.file(case.images[0])
        if case.name in seen and seen[case.name] == case.split:
            what = f"case {case.name!r} is in the {case.split} cases twice"
            found.append(Problem(index.name, where, what, "take one out, or rename it"))
        elif (content := (os.path.realpath(case.images[0]), case.series)) in files:
            other = files[content]
            what = f"the same file is case {other!r} and case {case.name!r}"
            found.append(Problem(index.name, where, what, "take one out"))
        elif case.patient in splits and splits[case.patient][0] != case.split:
            split, other = splits[case.patient]
            what = f"patient {case.patient!r} is in the {split} cases ({other}) and in the {case.split} cases"
            found.append(Problem(index.name, where, what, "keep every patient in one split"))
        seen.setdefault(case.name, case.split)
        files.setdefault((os.path.realpath(case.images[0]), case.series), case.name)
        splits.setdefault(case.patient, (case.split, case.name))
    return found


def empty_site(index: SiteIndex) -> list[Problem]:
    """A site that has nothing to train on, or nothing to test on if that is its role."""
    if any(case.split == ("train" if index.trains else "test") for case in index.cases):
        return []
    kind = "training case that can be used" if index.trains else "labelled case, and its role is test"
    what = f"empty: {index.root} holds no {kind}"
    return [
        Problem(index.name, "", what, "correct `path`, `format`, `table` or `labels`, or take the site out")
    ]


def untaught_site(index: SiteIndex, space: LabelSpace, naming: Naming) -> list[Problem]:
    """A site that trains and has training cases, none of which has an annotated class or a finding of the space.

    naming: of its table, the first of `naming_of`.
    """
    train = [case for case in index.cases if case.split == "train"]
    if not index.trains or not train or any(told_findings(index, case, space) for case in train):
        return []
    if any(naming.known(case.annotated) for case in train):
        return []
    what = f"none of its {len(train)} training cases has an annotated class or a finding: "
    if index.names[1:] and not index.used:
        what += f"`annotated` leaves out all of its labels ({', '.join(index.names[1:])})"
        remedy = "name in `annotated` what is drawn, or take the site out"
    elif index.used:
        what += f"no label file or mask is known to hold its labels ({', '.join(index.used)})"
        remedy = "see that labels are where the layout has them, and what its table lists per case"
    elif index.findings:
        ours = ", ".join(space.findings) or "nothing"
        what += f"it tells {', '.join(index.findings)}, and `labels.findings` names {ours}"
        remedy = "give `aliases` to its findings, or name them in `labels.findings`"
    else:
        what += "its label table is empty"
        remedy = "correct `format` or `table`, or take the site out"
    return [Problem(index.name, "", what, remedy)]


def untaught_classes(index: SiteIndex, space: LabelSpace, naming: Naming) -> list[Problem]:
    """A note for every class of a site that trains which is known in none of its training cases, though its table holds it;
    where none is known at all, see `untaught_site`, for those alone of which the labels are several.

    naming: of its table, the first of `naming_of`.
    """
    train = [case for case in index.cases if case.split == "train"]
    if not index.trains or not train:
        return []
    known = frozenset[int]().union(*(naming.known(case.annotated) for case in train))
    drawn, series = all(case.label is None for case in train), any(case.series for case in train)
    found = []
    for c in sorted(set(naming.classes.values()) - known):
        labels = [name for name, target in naming.classes.items() if target == c]
        what = f"{space.names[c]!r} is annotated in none of its {len(train)} training cases"
        if len(labels) > 1:
            what += f": it is made of {', '.join(map(repr, labels))}, and known only where all of them are annotated"
            if series:
                remedy = "if they are spellings of one structure, make them one name with `reading.names`; if they are its parts, draw them all"
            elif drawn:
                remedy = "if they are one structure, keep its masks in one folder; if they are its parts, give a mask of each"
            else:
                remedy = 'list them all in "annotated" of the cases in which they are complete'
        elif known:
            remedy = "draw it" if drawn else 'list it in "annotated" of the cases in which it is complete'
        else:
            continue
        found.append(Problem(index.name, "", what, f"{remedy}, or leave it out with `annotated`", False))
    return found


def unscored_cases(index: SiteIndex) -> list[Problem]:
    """Test cases without a label, or without one in the reference of a site that has one. They are not scored."""
    tests = [case for case in index.cases if case.split == "test"]
    silent = [case for case in tests if not case.labelled and not case.fuller]
    found = []
    if silent:
        what = f"{_some(silent, tests)} have no label and are not scored"
        remedy = "see that `test_labels` is the folder of their label files, or take them out"
        found.append(Problem(index.name, "", what, remedy, False))
    partly = [case for case in tests if case.labelled and not case.fuller]
    in_full = index.reference_table is index.table  # their own labels are the reference
    if index.reference_table is not None and partly and not in_full:
        what = f"{_some(partly, tests)} have no label file in the reference and are "
        what += (
            "scored by what is annotated alone"
            if index.trains
            else "not scored: with `role: test` a site is scored by its reference alone"
        )
        remedy = "see that `reference.test_labels` is the folder of these files"
        found.append(Problem(index.name, "", what, remedy, False))
    return found


def _some(cases: Sequence[Case], of: Sequence[Case]) -> str:
    names = ", ".join(case.name for case in cases[:3]) + (", …" if len(cases) > 3 else "")
    return f"{len(cases)} of its {len(of)} test cases ({names})"


def told_findings(index: SiteIndex, case: Case, space: LabelSpace) -> set[str]:
    """The findings of the space that the data set tells of a case, present or absent."""
    ours = {index.aliases.get(name, name) for name, _ in case.findings if name in index.used_findings}
    return ours & set(space.findings)


def twin_problems(site: str, digests: Sequence[tuple[str, str, str, str]]) -> list[Problem]:
    """Equal scans under two names. digests: (case, split, file, digest of the voxels). Fatal between the test
    cases and the others."""
    found, first = [], {}
    for case, split, file, mark in digests:
        if mark in first:
            other, other_split = first[mark]
            fatal = (split == "test") != (other_split == "test")
            what = (
                f"the image of {split} case {case!r} is, value by value, that of {other_split} case {other!r}"
            )
            found.append(Problem(site, file, what, "take one out", fatal))
        first.setdefault(mark, (case, split))
    return found


def shared_scans(scans: Sequence[Scan]) -> list[Problem]:
    """Equal scans at two sites; of one site alone see `twin_problems`.

    Fatal where a test case of one is a training or validation case of the other: such a test tells nothing. Others
    are one note per pair of sites and splits.
    """
    found: list[Problem] = []
    by_digest: dict[str, list[Scan]] = {}
    for scan in scans:
        by_digest.setdefault(scan.digest, []).append(scan)
    pairs: dict[tuple[str, str, str, str], list[tuple[Scan, Scan]]] = {}
    for equal in by_digest.values():
        for place, scan in enumerate(equal):
            for other in equal[:place]:
                if other.site == scan.site:
                    continue
                if (scan.split == "test") != (other.split == "test"):
                    test, seen = (scan, other) if scan.split == "test" else (other, scan)
                    what = (
                        f"the image of test case {test.case!r} is, value by value, that of {seen.split} case"
                    )
                    what += f" {seen.case!r} of site {seen.site}"
                    found.append(Problem(test.site, test.file, what, "take one out"))
                else:
                    pairs.setdefault((scan.site, other.site, scan.split, other.split), []).append(
                        (scan, other)
                    )
    for equals in pairs.values():
        scan, other = equals[0]
        what = f"the image of {scan.split} case {scan.case!r} is, value by value, that of {other.split} case"
        what += f" {other.case!r} of site {other.site}"
        what += f" ({len(equals)} such scans)" if len(equals) > 1 else ""
        found.append(Problem(scan.site, scan.file, what, "if that is not meant, keep it at one site", False))
    return sorted(found, key=lambda problem: not problem.fatal)


def check_site(
    index: SiteIndex,
    space: LabelSpace,
    *,
    progress: Callable[[str], None] | None = None,
    scans: list[Scan] | None = None,
) -> list[Problem]:
    """Reads every file of a site. The problems found, those that stop training first; one per file at most.

    scans: every scan that could be read is added to it, for `shared_scans`.

    Training raises DataError for the same fatal ones: both go through `read_case` and `layout_problems`.
    """
    found = [*layout_problems(index), *empty_site(index)]
    try:
        naming = naming_of(index, space)
    except FederationError as error:
        return [_misnamed(index, error), *found]
    found += [*untaught_site(index, space, naming[0]), *untaught_classes(index, space, naming[0])]
    found += unscored_cases(index)
    drawn: dict[int, int] = {}
    annotated: dict[int, int] = {}
    digests = []
    notes: list[Note] = []
    leaks: dict[str, Leak] = {}
    for number, case in enumerate(index.cases, start=1):
        if progress:
            progress(f"case {case.name} ({number} of {len(index.cases)})")
        raw = read_case(index, case, space, naming, reference=True)
        found += raw.problems
        notes += notes_of(case, raw)
        file = index.file(case.images[0])
        if raw.image is not None:
            mark = digest(raw.image)
            digests.append((case.name, case.split, file, mark))
            if scans is not None:
                scans.append(Scan(index.name, case.name, case.split, file, mark))
        leak = leak_in(raw, space)
        if leak is not None and leak.told:
            leaks[case.name] = leak
        if raw.label is None:
            continue
        found += _outside(index, case, raw, space)
        if raw.label.strayed:
            what = f"holds {', '.join(raw.label.strayed)}, which does not count as annotated in this case"
            wanted = index.annotated is None
            if wanted:
                remedy = "its voxels count as not annotated; "
                remedy += (
                    'list it in "annotated" if it is complete'
                    if case.label
                    else "a class of several labels is known only where all of them are drawn"
                )
                found.append(Problem(index.name, _label_file(index, case), what, remedy, False))
        if case.split != "test":
            for c, n in raw.label.counts.items():
                drawn[c] = drawn.get(c, 0) + n
                annotated[c] = annotated.get(c, 0) + 1
    for c in sorted(annotated):
        if drawn[c] == 0:
            what = f"{space.names[c]!r} counts as annotated in {annotated[c]} cases and has no voxel in any"
            remedy = (
                "if it was not drawn, leave it out with `annotated`; if it is verified absent, all is well"
            )
            found.append(Problem(index.name, index.root.name, what, remedy, False))
    found += twin_problems(index.name, digests)
    found += leak_problems(index.name, leaks, len(index.cases))
    found += gathered(index, notes)
    return sorted(found, key=lambda problem: not problem.fatal)


def notes_of(case: Case, raw: Raw) -> list[Note]:
    """What is to be said of the files of a case that was read, and is no reason to stop: what was assumed or changed, and
    what is in doubt of where the scan lies."""
    if raw.image is None:
        return list(raw.notes)
    doubts = [] if case.series else doubts_about(case.images[0])
    skew = skew_told(raw.affine)
    if skew:
        doubts.append((f"{skew}: distances are off", "resample it on axes at right angles, with its label"))
    return [*raw.notes, *(Note(case.images[0], what, remedy) for what, remedy in doubts)]


def drawn_in(raw: Raw, space: LabelSpace) -> np.ndarray | None:
    """Where anything is drawn in the label or the reference of a case, bool [X, Y, Z]; None where it has neither."""
    drawn: np.ndarray | None = None
    for label in (raw.label, raw.reference):
        if label is not None:
            union = label.voxels > 0 if space.exclusive else np.asarray(label.voxels.any(0))
            drawn = union if drawn is None else drawn | union
    return drawn


def leak_in(raw: Raw, space: LabelSpace) -> Leak | None:
    """How far the image of a case gives away its label and reference; None where it has neither."""
    drawn = drawn_in(raw, space)
    return None if raw.image is None or drawn is None else leak_of(raw.image, drawn, raw.affine)


SHOWN = 12
"""Cases that a note names, at most."""


def leak_problems(site: str, leaks: Mapping[str, Leak], cases: int) -> list[Problem]:
    """A note of the cases whose images give labels away, the worst first. leaks: case -> what was found; cases: how
    many the site has."""
    if not leaks:
        return []
    ranked = sorted(leaks.items(), key=lambda of: (-of[1].worst, of[0]))
    told = "; ".join(f"{name}: {leak}" for name, leak in ranked[:SHOWN])
    told += f"; and {len(ranked) - SHOWN} more" if len(ranked) > SHOWN else ""
    name, worst = ranked[0]
    what = f"images give labels away in {len(leaks)} of {cases} cases. {told}"
    remedy = (
        f"look at slice {worst.place} of {name}: if values were kept there because it was drawn, cut the scans to where they "
        "are whole; scores on such cases do not count"
    )
    return [Problem(site, "", what, remedy, False)]


def _label_file(index: SiteIndex, case: Case) -> str:
    return index.file(next(iter((*case.label_files, *case.images))))


def _outside(index: SiteIndex, case: Case, raw: Raw, space: LabelSpace) -> list[Problem]:
    """A note for every group of which a lesion's piece touches none of the organ, by corner at the least."""
    label = raw.reference or raw.label
    found: list[Problem] = []
    for organ, *lesions in space.groups:
        if label is None or index.whole or not {organ, *lesions} <= label.known:
            continue
        of, *parts = (
            label.voxels == c if space.exclusive else label.voxels[c] > 0 for c in (organ, *lesions)
        )
        lesion = np.logical_or.reduce(parts)
        found_in = ndimage.find_objects(lesion.astype(np.uint8), 1)[0] if lesion.any() else None
        if found_in is None:
            continue
        box = tuple(slice(max(s.start - 1, 0), s.stop + 1) for s in found_in)
        corners = np.ones((3,) * lesion.ndim)
        pieced: Any = ndimage.label(lesion[box], corners)
        pieces, n = pieced
        touching = np.unique(pieces[ndimage.binary_dilation(of[box], corners)])
        apart = np.setdiff1d(np.arange(1, n + 1), touching)
        if not len(apart):
            continue
        sizes = np.bincount(pieces.ravel(), minlength=n + 1)
        largest = int(apart[sizes[apart].argmax()])
        place = [int(p[0] + s.start) for p, s in zip(np.nonzero(pieces == largest), box, strict=True)]
        millimetres = abs(np.linalg.det(raw.affine[:3, :3])) * int(sizes[apart].sum())
        names = " or ".join(repr(space.names[c]) for c in lesions)
        what = (
            f"case {case.name!r}: {names} in {len(apart)} of {n} pieces ({int(sizes[apart].sum())} voxels, "
            f"{millimetres:.0f} mm³) that touch no {space.names[organ]!r}; the largest at voxel {place}"
        )
        remedy = "look at it; if it is meant, all is well"
        found.append(Problem(index.name, _label_file(index, case), what, remedy, False))
    return found


def _organs_alone(index: SiteIndex, known: Collection[int], space: LabelSpace) -> list[Problem]:
    """A note for every organ on which a site trains, and not on a lesion of it, which its outlines may hold."""
    found = []
    for organ, *lesions in space.groups:
        lacking = [space.names[c] for c in lesions if c not in known]
        if organ in known and lacking:
            name = space.names[organ]
            what = (
                f"annotates {name!r} and not {' or '.join(map(repr, lacking))}: all that it outlines is taken for {name!r} without "
                "a lesion"
            )
            remedy = "if its outlines hold lesions, leave such cases out, or let it only test, with `role: test` and `whole: true`"
            found.append(Problem(index.name, "", what, remedy, False))
    return found


def check_federation(indexes: Sequence[SiteIndex], space: LabelSpace) -> list[Problem]:
    """What is wrong between sites; no voxels are read. Fatal ones first. Where labels are of whole images also what the
    layouts alone show, and files that are equal byte by byte."""
    found = _between_images(indexes, space) if space.level == "image" else _between_scans(indexes, space)
    return sorted(found, key=lambda problem: not problem.fatal)


def _untrained(indexes: Sequence[SiteIndex]) -> list[Problem]:
    if any(index.trains for index in indexes):
        return []
    return [Problem("(all)", "", "no site trains: every role is test", "give one the role train")]


def check_channels(names: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Sites that name their channels otherwise than another: fatal where only their order differs. names: site -> its names,
    as `SiteIndex.named_channels`."""
    for site, other, turned in channels_apart(names.items()):
        own, theirs = (", ".join(names[name]) for name in (site, other))
        what = f"its channels are {own}, and those of site {other} are {theirs}"
        remedy = (
            "every site has its channels in the same order: write the files and the names of one in the other's"
            if turned
            else "if they hold the same, in this order, all is well"
        )
        yield Problem(site, "", what, remedy, turned)


def _untaught(space: LabelSpace, taught: Collection[int]) -> list[Problem]:
    """A problem for every class that no site annotates."""
    remedy = "take it out of `labels.names`, or add a site that annotates it"
    names = [space.names[c] for c in space.foreground if c not in taught]
    return [Problem("(all)", "", f"no site annotates {name!r}", remedy) for name in names]


def _between_images(indexes: Sequence[SiteIndex], space: LabelSpace) -> list[Problem]:
    found: list[Problem] = []
    listings: dict[str, Listing] = {}
    taught: set[int] = set()
    for index in indexes:
        found += index.problems
        try:
            naming = naming_of(index, space)
        except FederationError as error:
            found.append(_misnamed(index, error))
            continue
        listings[index.name] = _by_class(index, naming, space)
        taught.update(naming[0].classes.values())
        split = "train" if index.trains else "test"
        if not any(case.split == split for case in index.cases):
            what = f"empty: {index.root} holds no {'training' if index.trains else 'test'} image that can be used"
            remedy = "correct `path`, `format` or `reading`, or take the site out"
            found.append(Problem(index.name, "", what, remedy))
    return [*found, *_untrained(indexes), *federation_problems(listings), *_untaught(space, taught)]


def _misnamed(index: SiteIndex, error: FederationError) -> Problem:
    what = str(error).removeprefix(f"site {index.name}: ")
    return Problem(index.name, "", what, "correct `aliases`, `annotated` or `labels.names`")


def _by_class(index: SiteIndex, naming: tuple[Naming, Naming], space: LabelSpace) -> Listing:
    """A listing by the names of the space, with what training sees of training and validation images, and what is scored
    of test images."""

    def mapped(case: Case) -> Case:
        present, absent = naming[case.split == "test"].findings(case)
        names = [[space.names[c] for c in found] for found in (present, absent)]
        return image_case(case.name, case.images[0], case.patient, case.split, *names)

    classes = tuple(dict.fromkeys(space.names[c] for c in naming[0].classes.values()))
    return Listing({}, tuple(map(mapped, index.cases)), None, (), classes, index.source)


def _between_scans(indexes: Sequence[SiteIndex], space: LabelSpace) -> list[Problem]:
    found: list[Problem] = []
    by_name: dict[str, SiteIndex] = {}
    meaning: dict[str, tuple[str, str]] = {}
    patients: dict[str, str] = {}
    annotated: set[int] = set()
    told: set[str] = set()
    for index in indexes:
        if index.name in by_name:
            what = f"two sites have this name ({by_name[index.name].root} and {index.root})"
            found.append(Problem(index.name, "", what, "every site needs a name of its own"))
        by_name.setdefault(index.name, index)
        try:
            strict, _ = naming_of(index, space)
        except FederationError as error:
            found.append(_misnamed(index, error))
            continue
        if index.trains and space.exclusive:
            found += _organs_alone(index, set(strict.classes.values()), space)
        for case in index.cases:
            if case.split != "test":
                annotated |= strict.known(case.annotated)
                told |= told_findings(index, case, space) if index.trains else set()
        unused = [n for n in index.used_findings if index.aliases.get(n, n) not in space.findings]
        if unused:
            what = (
                f"its findings {', '.join(map(repr, unused))} are not in `labels.findings` and are left aside"
            )
            remedy = "if they are to be learned, name them there or give `aliases`"
            found.append(Problem(index.name, "", what, remedy, False))
        for name, c in strict.classes.items():
            other = meaning.setdefault(name, (index.name, space.names[c]))
            # where every site that has the name gives it an alias, the meanings were chosen: two cancers
            if other[1] != space.names[c] and name in (other[1], space.names[c]):
                what = f"label {name!r} means {space.names[c]!r} here and {other[1]!r} at site {other[0]}"
                found.append(Problem(index.name, "", what, "one name, one meaning: correct `aliases`"))
        shared = sorted({case.patient for case in index.cases} & set(patients))
        if shared:
            what = f"patient {shared[0]!r} is also at site {patients[shared[0]]}"
            what += f" ({len(shared)} such names)" if len(shared) > 1 else ""
            remedy = "if it is the same person, keep all of it at one site; if only the name is, ignore this"
            found.append(Problem(index.name, "", what, remedy, False))
        patients |= {case.patient: index.name for case in index.cases if case.patient not in patients}
        if index.channels != indexes[0].channels:
            what = f"{index.channels} image channels, but site {indexes[0].name} has {indexes[0].channels}"
            found.append(Problem(index.name, "", what, "all sites of a federation have the same channels"))
    found += [
        *check_channels({index.name: index.named_channels for index in indexes}),
        *_untrained(indexes),
        *_untaught(space, annotated),
    ]
    for name, c in zip(space.findings, space.finding_of, strict=True):
        if name not in told and c not in annotated:
            own = [f"{i.name}: {', '.join(i.used_findings)}" for i in indexes if i.trains and i.used_findings]
            what = f"no site that trains tells the finding {name!r}; they tell: {'; '.join(own) or 'no findings'}"
            remedy = (
                "correct `labels.findings`, give `aliases` to a site's finding, or add a site that tells it"
            )
            found.append(Problem("(all)", "", what, remedy))
    return found
