"""What readers of pictures with masks share: files of a folder, the case, the table, what a release should hold."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedatlas.core.errors import DataError
from fedatlas.core.labels import BACKGROUND
from fedatlas.data.datasets.shared.listing import Case, Layout, Mask, Problem, Split, shown, some

RASTER = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif")
PICTURES = (*RASTER, ".dcm", ".dicom")


def picture_case(
    name: str,
    file: Path,
    split: Split,
    masks: Sequence[tuple[str, Mask]],
    annotated: Sequence[str],
    findings: Sequence[tuple[str, bool]] = (),
    pixel: tuple[float, float] | None = None,
    raw: int | None = None,
) -> Case:
    """A picture as a case; its patient is its name."""
    return Case(
        name,
        (file,),
        None,
        split,
        name,
        tuple(annotated),
        masks=tuple(masks),
        findings=tuple(findings),
        pixel=pixel,
        raw=raw,
    )


def table_of(names: Iterable[str]) -> dict[str, int]:
    """A label table for classes that are masks: background, then they in order."""
    return {BACKGROUND: 0} | {name: number for number, name in enumerate(names, start=1)}


def files_in(
    layout: Layout, folder: str, endings: Sequence[str], suffix: str, problems: list[Problem]
) -> dict[str, Path]:
    """Case -> its file in a folder of the site. A file of another ending or without `suffix`, and a case with two
    files, are problems. Raises DataError for a folder that is not there."""
    base = layout.root / folder
    if not base.is_dir():
        raise DataError(f"site {layout.site}: {base}: no such folder; {there(layout.root)}")
    found: dict[str, Path] = {}
    strange: list[Problem] = []
    for file in sorted(base.iterdir()):
        if file.name.startswith(".") or file.is_dir():
            continue
        case = file.stem.removesuffix(suffix)
        if file.suffix.lower() not in endings or not file.stem.endswith(suffix) or not case:
            what = f"not named <case>{suffix}.png, or with {', '.join(endings[1:-1])} or {endings[-1]}"
            strange.append(
                Problem(layout.site, shown(file, layout.root), what, "rename it, or take it out", False)
            )
        elif case in found:
            what = f"case {case!r} also has the file {found[case].name}"
            problems.append(Problem(layout.site, shown(file, layout.root), what, "take one out"))
        else:
            found[case] = file
    problems += some(strange, "files of other names")
    return found


def without_picture(
    layout: Layout, masks: Mapping[str, Mapping[str, Path]], pictures: Iterable[str]
) -> list[Problem]:
    """A note on masks that have no picture. masks: class -> case -> its mask."""
    known = set(pictures)
    lone = [file for files in masks.values() for case, file in sorted(files.items()) if case not in known]
    if not lone:
        return []
    what = f"a mask without a picture; {len(lone)} such files"
    remedy = "unpack the pictures again, or take the mask out"
    return [Problem(layout.site, shown(lone[0], layout.root), what, remedy, False)]


def there(root: Path) -> str:
    """The folders of a folder, for a message."""
    names = sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))
    return (
        f"{root.name} holds the folders: {', '.join(names[:12]) or 'none'}{', …' if len(names) > 12 else ''}"
    )


def expected(layout: Layout, release: str, folders: Sequence[str]) -> Path:
    """The folder with all of `folders` in it: the site's own, or one in it. Raises DataError, which says what the
    release holds, where there is none."""
    for base in (layout.root, *sorted(f for f in layout.root.iterdir() if f.is_dir())):
        if all((base / folder).is_dir() for folder in folders):
            return base
    missing = next(folder for folder in folders if not (layout.root / folder).is_dir())
    raise DataError(
        f"site {layout.site}: {layout.root}: not the release of {release} that is read: no folder {missing}/. Expected: "
        f"{', '.join(f'{folder}/' for folder in folders)}; {there(layout.root)}"
    )


def count_note(layout: Layout, place: str, found: int, whole: int, release: str, of: str) -> list[Problem]:
    """A note where a release is not there in full."""
    if found == whole:
        return []
    what = f"{found:,} {of}; {release} has {whole:,}"
    return [Problem(layout.site, place, what, "see that all of it was unpacked", False)]


def sides(swap: bool) -> tuple[str, str]:
    """Class names for what a release calls left, and right."""
    return ("right lung", "left lung") if swap else ("left lung", "right lung")
