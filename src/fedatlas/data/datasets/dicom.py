"""Series in DICOM (CT, MR, PET) with their segmentations (SEG) or structure sets (RTSTRUCT), as a PACS exports them.

A case is a series with what is drawn on it, wherever in the folder the two lie: a SEG or RTSTRUCT names its series by UID.
Folders and archives (zip) are read with all that lies below them. A class is the name of a segment or an ROI, or what `names` makes of it. It is
annotated in the cases that draw it; a segment without a voxel says that the class was looked for and is not there, and an ROI
without a closed contour says nothing, since planning systems make empty ones from templates, and so does one that lies wholly
beyond the series or in another frame of reference.

Names of cases and patients are hashes of UIDs, and messages name no file: paths of exports hold names of patients.
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError, did_you_mean, first_of
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.listing import Case, Layout, Listing, Problem, shown, some
from fedatlas.data.datasets.shared.pictures import table_of


@options
class Dicom:
    """The options of DICOM series."""

    modality: Literal["CT", "MR", "PT"] | None = option(None, "Series of this modality alone; null: of all.")
    drawings: Literal["both", "seg", "rtstruct"] = option("both", "Which segmentations count.")
    unlabelled: bool = option(
        False,
        "Whether series without a segmentation are cases, too, without labels; else a note counts them.",
    )
    names: dict[str, str] = option(
        {},
        "Names of segments or ROIs -> the names under which they are read, several to one where they are spellings of one structure, "
        "or its pieces, which are united.",
    )
    paths: bool = option(
        False,
        "Whether messages name the folder of a case beside its pseudonym. It may hold the name of a patient.",
    )


def read(layout: Layout) -> Listing:
    """A case for each series, and the drawings that name it."""
    from fedatlas.data.formats import dicom

    form: Dicom = layout.options
    found = dicom.find([layout.root])
    chosen = [series for series in found.series if form.modality in (None, series.modality)]
    if not chosen:
        what = "no series of CT, MR or PET" if form.modality is None else f"no series of {form.modality}"
        seen = Counter(series.modality for series in found.series)
        there = ", ".join(f"{count} of {name}" for name, count in sorted(seen.items())) or "none at all"
        raise DataError(
            f"site {layout.site}: {layout.root}: holds {what} (series: {there}; other DICOM objects: {found.others}; "
            f"files that are damaged: {len(found.damaged)}); correct `path`, or `reading.modality`"
        )
    studies: dict[str, str] = {}
    for series in chosen:
        studies[series.person] = min(series.study, studies.get(series.person, series.study))
    cases, problems, titles = list[Case](), list[Problem](), dict[Path, str]()
    empty = missing = beyond = elsewhere = joined = 0
    written = {item.name for series in chosen for drawing in series.drawings for item in drawing.items}
    strange = [name for name in form.names if name not in written]
    if strange:
        there = first_of(map(repr, sorted(written))) or "there is none"
        raise DataError(
            f"site {layout.site}: reading.names: no segment or ROI is called {strange[0]!r};"
            f"{did_you_mean(strange[0], written)} it has: {there}"
        )
    for series in chosen:
        folder = f" ({shown(series.files[0].parent, layout.root)})" if form.paths else ""
        title = f"{series.name}{folder}"
        titles[Path(series.name)] = title
        for file in series.files:
            titles[file] = f"{titles[file]}, {title}" if file in titles else title
        masks, drawn_by = [], defaultdict[str, set[str]](set)
        spellings = defaultdict[str, set[str]](set)
        annotated: set[str] = set()
        for drawing in series.drawings:
            titles[Path(series.name, drawing.name)] = f"{title}/{drawing.name}"
            if form.drawings not in ("both", drawing.kind.lower()):
                continue
            beyond += drawing.beyond
            elsewhere += drawing.elsewhere
            for (spelling, mask), item in zip(drawing.masks(), drawing.items, strict=True):
                name = form.names.get(spelling, spelling)
                if not item.drawn and drawing.kind == "RTSTRUCT":
                    empty += 1
                    continue
                if name.lower() == BACKGROUND:
                    continue
                drawn_by[name].add(drawing.name)
                spellings[name].add(spelling)
                annotated.add(name)
                masks += [(name, mask)] if item.drawn else []
        twice = sorted(name for name, by in drawn_by.items() if len(by) > 1)
        if twice:
            by = " and ".join(sorted(drawn_by[twice[0]])[:2])
            remedy = "take out the one that does not count, or choose a kind with `reading.drawings`"
            problems.append(Problem(layout.site, title, f"{twice[0]!r} is drawn by {by}", remedy))
        joined += any(len(several) > 1 for several in spellings.values())
        if not annotated and not form.unlabelled:
            missing += 1
            continue
        person = studies[series.person] if series.person else series.study
        cases.append(
            Case(
                series.name,
                series.files,
                None,
                "train",
                dicom.pseudonym(person, "patient"),
                tuple(sorted(annotated)),
                masks=tuple(masks),
                series=series.uid,
            )
        )

    def note(count: int, what: str, remedy: str, offer: str = "") -> None:
        if count:
            problems.append(Problem(layout.site, "", f"{count} {what}", remedy, False, offer))

    for number, (file, reason) in enumerate(found.damaged, start=1):
        title = shown(file, layout.root) if form.paths else f"damaged file {number} of {len(found.damaged)}"
        remedy = "export it again, or take it out; `reading.paths` names it"
        problems.append(Problem(layout.site, title, f"not readable as DICOM ({reason})", remedy))
    problems = some(problems, "cases and files")
    note(
        missing,
        "series have no segmentation and were left out",
        "export their SEG or RTSTRUCT, too",
        "`reading.unlabelled: true`",
    )
    note(len(found.stray), "segmentations are of no series that is here", "export their series, too")
    unsaid = "they count as not annotated"
    note(empty - beyond, f"ROIs have no closed contour; {unsaid}", "draw them, or take them out")
    note(beyond, f"ROIs lie wholly beyond their series; {unsaid} there", "see that the series are whole")
    note(
        elsewhere,
        f"ROIs are drawn in another frame of reference than a series that their RTSTRUCT names; {unsaid} there",
        "draw them on the series itself, if they are meant for it",
    )
    note(
        joined,
        "series have several structures that `reading.names` makes one; they were united",
        "if one is a copy of another, take it out",
    )
    names = sorted({name for case in cases for name in case.annotated})
    return Listing(table_of(names), tuple(cases), 1, tuple(problems), titles=titles)


DATASET = DataSet(
    name="dicom",
    kind="volumes",
    title="DICOM series (CT, MR, PET) in folders or zip, with SEG or RTSTRUCT that name their series.",
    read=read,
    pixels="any",
    options=Dicom,
)
