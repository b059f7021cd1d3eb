"""Pictures with a mask per class: images/<case>.png and masks/<class>/<case>.png.

A mask holds 0 outside and another value inside. A class folder without a file for an image: the class is not annotated
there, which is not the same as absent. A finding of the table is what the table says, whatever a mask shows. Files are PNG, JPEG, TIFF, BMP or GIF; images may be DICOM, too.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.options import option, options
from fedatlas.data.datasets import DataSet
from fedatlas.data.datasets.shared.findings import empty, is_mark, mark, read_table
from fedatlas.data.datasets.shared.listing import Layout, Listing, Problem, Split, shown, some
from fedatlas.data.datasets.shared.pictures import files_in, picture_case, table_of

RASTER = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif")
PICTURES = (*RASTER, ".dcm", ".dicom")


@options
class Masks:
    """Where pictures and their masks lie, in the site's folder."""

    images: str = option("images", "Folder of the pictures.", min_length=1)
    masks: str = option("masks", "Folder that holds a folder of masks per class.", min_length=1)
    classes: dict[str, str] = option(
        {}, "Class -> its folder of masks, in `masks`; empty: every folder there, by its name."
    )
    image_suffix: str = option("", "What follows the case in the names of pictures, before the ending.")
    mask_suffix: str = option("", "What follows the case in the names of masks, before the ending, as _mask.")
    absent: bool = option(
        False,
        "Whether a class whose folder has no mask for a picture is absent there; else it is not annotated.",
    )
    test: str | tuple[str, ...] = option(
        (), "The test cases: a folder of pictures of their own, or a list of names among the others."
    )
    findings: str | None = option(
        None,
        "Table with the column `case` and a column per finding of the whole picture: 1 present, 0 absent, empty not "
        "annotated. Null: none.",
        min_length=1,
    )
    channels: Literal[1, 3] = option(1, "1: pictures are read as grey; 3: as red, green, blue.")
    pixel: tuple[float, float] | None = option(
        None, "Millimetres between rows and between columns, where files do not say it; null: 1."
    )

    def __post_init__(self) -> None:
        if self.pixel is not None and not min(self.pixel) > 0:
            raise FederationError(f"reading: pixel is {list(self.pixel)}; millimetres are above 0")


def read(layout: Layout) -> Listing:
    """A case for each picture, with the masks of its name."""
    form: Masks = layout.options
    problems: list[Problem] = []
    pictures = files_in(layout, form.images, PICTURES, form.image_suffix, problems)
    splits: dict[str, Split] = dict.fromkeys(pictures, "train")
    if isinstance(form.test, str):
        more = files_in(layout, form.test, PICTURES, form.image_suffix, problems)
        twice = sorted(set(more) & set(pictures))
        if twice:
            raise DataError(
                f"site {layout.site}: {shown(more[twice[0]], layout.root)}: the case is in {form.images}, too; keep every "
                "case in one of the two folders"
            )
        pictures |= more
        splits |= dict.fromkeys(more, "test")
    else:
        for name in form.test:
            if name not in pictures:
                raise DataError(
                    f"site {layout.site}: reading.test names the case {name!r}, which has no picture in {form.images}; "
                    "correct the list"
                )
            splits[name] = "test"
    drawn = _drawn(layout, form, problems)
    told, findings = _findings(layout, form, pictures, problems)
    without = [
        Problem(
            layout.site,
            shown(file, layout.root),
            "a mask without a picture",
            f"add it to {form.images}, or take the mask out",
        )
        for masks in drawn.values()
        for case, file in masks.items()
        if case not in pictures
    ]
    problems += some(without, "masks without a picture")
    cases, bare = [], []
    for name, file in sorted(pictures.items()):
        masks = tuple((label, files[name]) for label, files in drawn.items() if name in files)
        annotated = tuple(drawn) if form.absent else tuple(label for label, _ in masks)
        if not annotated and not told.get(name):
            what = "a picture with neither mask nor finding: nothing is known of it"
            remedy = "add a mask, set `reading.absent`, or take it out"
            bare.append(Problem(layout.site, shown(file, layout.root), what, remedy, False))
        cases.append(picture_case(name, file, splits[name], masks, annotated, told.get(name, ()), form.pixel))
    problems += some(bare, "pictures without a label")
    return Listing(table_of(drawn), tuple(cases), form.channels, tuple(problems), findings)


def _drawn(layout: Layout, form: Masks, problems: list[Problem]) -> dict[str, dict[str, Path]]:
    """Class -> case -> its mask."""
    base = layout.root / form.masks
    folders = dict(form.classes)
    if not folders and base.is_dir():
        folders = {f.name: f.name for f in sorted(base.iterdir()) if f.is_dir() and f.name[0] not in "._"}
    if not folders and form.findings is None:
        raise DataError(
            f"site {layout.site}: {base}: no folder of masks is there; expected {form.masks}/<class>/<case>.png, or set "
            "`reading.masks`, or `reading.findings` for a site with findings alone"
        )
    if BACKGROUND in folders:
        raise DataError(
            f"site {layout.site}: {base / folders[BACKGROUND]}: {BACKGROUND!r} is no class with a mask of its own; "
            "rename or remove the folder"
        )
    return {
        name: files_in(layout, f"{form.masks}/{folder}", RASTER, form.mask_suffix, problems)
        for name, folder in folders.items()
    }


def _findings(
    layout: Layout, form: Masks, pictures: Iterable[str], problems: list[Problem]
) -> tuple[dict[str, tuple[tuple[str, bool], ...]], tuple[str, ...]]:
    """Case -> its findings, and the names of all findings."""
    if form.findings is None:
        return {}, ()
    path = layout.root / form.findings
    if not path.is_file():
        raise DataError(
            f"site {layout.site}: {path}: no such file; it holds the findings, name it with `reading.findings`"
        )
    header, rows, wrong = read_table(layout.site, path, ["case"])
    names = tuple(name for name in header if name and name != "case")
    told: dict[str, tuple[tuple[str, bool], ...]] = {}
    known = set(pictures)
    for row in rows:
        case, values = row.values["case"], {name: row.values[name] for name in names}
        odd = next((n for n, v in values.items() if not is_mark(v) or mark(v) == -1), None)
        what = ""
        if odd is not None:
            what = f"column {odd!r} holds {values[odd]!r}; allowed: 1 (or True) present, 0 (or False) absent, empty not annotated"
        elif case not in known:
            what = f"names the case {case!r}, which has no picture in {form.images}"
        elif case in told:
            what = f"names the case {case!r} a second time"
        if what:
            where = f"{form.findings}, line {row.line}"
            wrong.append(Problem(layout.site, where, what, "correct the row, or take it out"))
            continue
        told[case] = tuple((n, mark(v) == 1) for n, v in values.items() if not empty(v))
    problems += some(wrong, f"rows of {form.findings}")
    return told, names


DATASET = DataSet(
    name="masks",
    kind="masks",
    title="Pictures with a mask per class: images/<case>.png, masks/<class>/<case>.png.",
    read=read,
    pixels="grey or colour",
    options=Masks,
)
