"""Predicting files with a trained model: label maps of scans and pictures, findings of whole images."""

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.formats import dicom, drawings, flat
from fedatlas.data.formats.picture import PictureError
from fedatlas.data.images import prepared
from fedatlas.data.inputs import Look, judge
from fedatlas.data.transforms import (
    FileError,
    Scan,
    doubts_about,
    load_scan,
    read_channels,
    saved,
    skew_told,
    write_label_map,
)
from fedatlas.federation.pacs import Pacs
from fedatlas.federation.trained import Seen, Trained, unseen
from fedatlas.federation.usable import Warn, require_files, require_new, silent
from fedatlas.learning.inference import Prediction
from fedatlas.transport.rounds import to_json
from fedatlas.transport.store import write_atomic

FORMS = ("nifti", "seg", "rtstruct")
"""What labels of a DICOM series are written as."""
CLASSES = "classes.json"
"""Integer of a label map -> class."""
TABLE = "predictions.csv"
"""Of the classes of pictures, and of findings."""


@dataclass(frozen=True)
class Given:
    """One scan or picture that is to be predicted. files: of NIfTI one per channel, or a picture; series: in place of them a
    series in DICOM. shown: what messages and results call it."""

    files: tuple[Path, ...]
    shown: str
    series: dicom.Series | None = None

    @property
    def name(self) -> str:
        return self.series.name if self.series else self.files[0].name

    @property
    def is_picture(self) -> bool:
        return self.series is None and flat.is_picture(self.files[0])

    def targets(self, out: Path, form: str, space: LabelSpace) -> list[Path]:
        """The files that are written of it; the first tells it from others."""
        table = [out / TABLE] if self.is_picture or space.findings else []
        if self.series is not None:
            ending = "labels.nii.gz" if form == "nifti" else f"{form}.dcm"
            return [out / f"{self.name}_{ending}", *table]
        if self.is_picture:
            labels = flat.label_paths(out, self.files[0].stem, space).values()
            return [*dict.fromkeys(labels), *table]
        return [out / f"{self.name.removesuffix('.gz').removesuffix('.nii')}_labels.nii.gz", *table]


def predict_scans(
    path: Path,
    scans: Sequence[Sequence[Path]],
    out: Path | None,
    *,
    form: str = "nifti",
    series: Sequence[str] = (),
    pacs: Pacs | None = None,
    store: bool = False,
    model: str = "best",
    device: str | None = None,
    post: bool = False,
    overwrite: bool = False,
    anyway: bool = False,
    warn: Warn = silent,
    seen: Seen = unseen,
) -> dict[str, Any]:
    """Writes a label map per scan, in the scan's own geometry, and classes.json beside them; where the model tells findings,
    predictions.csv with the probability of each.

    scans: the files of each: NIfTI, one per channel; a picture, of which PNG files are written, see `flat.write_labels`,
    and in predictions.csv the pixels of every class, too; or a folder, an archive or files with series in DICOM. form:
    what is written of a series, see `FORMS`. series: which ones, by UID or pseudonym, where there are several. pacs: whence these are fetched in place of `scans`; store: send the results
    there, when all are made; `out` may then be None, and nothing is written.
    post: write labels after post-processing, see `Trained.postprocess`. overwrite: replace files that are there.
    anyway: go on with images of another kind than the model was trained on. warn: is told where they differ from those, and
    how many results are there where it breaks off; classes.json and the rows of these are then in the folder, too.
    seen: is told of every scan before it is read.
    Returns what was written, the volume, or the pixels, found per class, the probability per finding, and where a selector
    chooses among models the site whose model it took (`Trained.choice`).
    """
    require_files([file for files in scans for file in files if not file.is_dir()])
    trained = Trained(path, model, device, warn)
    if pacs is not None:
        found = dicom.received(pacs.fetch(series), pacs.url)
        (chosen,) = _chosen([(pacs.url, found)], series)
        given = [Given((), one.name, one) for one in chosen]
    else:
        given = _given(scans, series, trained)
    if form != "nifti" and (files := next((g for g in given if g.series is None), None)):
        raise FederationError(
            f"--as {form}: is for series in DICOM, to which it refers, and {files.shown} is none; leave it out"
        )
    codes = {} if form == "nifti" else _codes(trained, warn)
    classes = {str(index): name for index, name in enumerate(trained.space.names)}
    if out is not None:
        _require_room(out, given, form, trained.space, classes, overwrite)
    written, made = [], []
    table: list[dict[str, Any]] = []

    def begin() -> None:
        """Before the first result, so that what broke off can be told from results of another model, too."""
        if out is not None and not written:
            write_atomic(out / CLASSES, to_json(classes))
            if any(out / TABLE in one.targets(out, form, trained.space) for one in given):
                (out / TABLE).unlink(missing_ok=True)  # of what is replaced

    try:
        for number, one in enumerate(given):
            seen(number, len(given), one.name)
            if one.is_picture:
                assert out is not None
                entry, rows = _predict_picture(trained, list(one.files), out, post, anyway, warn, begin)
                written.append(entry)
                table += rows
                continue
            labelled = _label_volume(trained, one, post, anyway, warn)
            begin()
            target = one.targets(out, form, trained.space)[0] if out is not None else None
            if labelled.volume is not None and form != "nifti":
                write = drawings.WRITERS[form]
                made.append(
                    write(target, labelled.labels, labelled.volume, trained.space, codes, path.resolve().name)
                )
            elif target is not None:
                write_label_map(target, labelled.labels, labelled.affine if one.series else one.files[0])
            files = [one.shown] if one.series else [str(file) for file in one.files]
            told = {"scan": files, "labels": str(target or one.name), "findings": labelled.findings}
            written.append(told | {"millilitres": labelled.millilitres(trained.space)} | labelled.choice)
            table += _finding_rows(one.shown, labelled.findings)
    except BaseException:
        if out is not None and written:
            warn(
                f"{out}: has the results of the first {len(written)} of {len(given)} inputs, as it broke off; predict all "
                "of them again with --overwrite, or the others into another folder"
            )
        raise
    finally:
        if out is not None and table:
            _write_table(out / TABLE, [list(table[0]), *(row.values() for row in table)])
    if store:
        assert pacs is not None
        pacs.store(made)
    return {"scans": written, "classes": classes, "model": model, "stored": len(made) if store else 0}


def _given(scans: Sequence[Sequence[Path]], series: Sequence[str], trained: Trained) -> list[Given]:
    """What was given, series in DICOM told apart. Files of one frame are slices to a model of scans, else pictures."""
    of_scans = (trained.inputs or {}).get("kinds") == ["scan"]
    for files in scans:
        for file in files if len(files) > 1 else ():
            if dicom.is_series(file) or (of_scans and _is_slice(file)):
                raise DataError(
                    f"{file}: is joined by a comma, as the channels of a scan in NIfTI are, and is none; give folders, archives "
                    "and DICOM one by one"
                )
    # each once, and all of them in the place of the first
    slices = dict.fromkeys(
        files[0] for files in scans if of_scans and not dicom.is_series(files[0]) and _is_slice(files[0])
    )
    first = next((number for number, files in enumerate(scans) if files[0] in slices), None)
    found: dict[int, tuple[str, dicom.Found]] = {}
    for number, files in enumerate(scans):
        if number == first:
            found[number] = (_count(len(slices), "file"), dicom.find(slices, keep=True))
        elif files[0] not in slices and dicom.is_series(files[0]):
            found[number] = (str(files[0]), dicom.find(files, keep=True))
    chosen = dict(zip(found, _chosen(list(found.values()), series), strict=True))
    given = []
    for number, files in enumerate(scans):
        if number in chosen:
            where = str(files[0]) if len(chosen[number]) == 1 and files[0] not in slices else ""
            given += [Given((), f"{where} {one.name}".strip(), one) for one in chosen[number]]
        elif files[0] not in slices:
            given.append(Given(tuple(files), str(files[0])))
    return given


def _is_slice(file: Path) -> bool:
    """Is a file an object in DICOM, or was it, by its name, so that a series lacks it."""
    return file.suffix.lower() in flat.DICOM or dicom.is_dicom(file)


def _chosen(places: Sequence[tuple[str, dicom.Found]], wanted: Sequence[str]) -> list[list[dicom.Series]]:
    """The series of each place that are asked for, by UID or pseudonym; the only one where nothing is. places: how messages call
    each, and what it holds. Raises DataError where there is none, or several to choose from, or a file that is damaged;
    FederationError where there is nothing to choose from."""
    for where, found in places:
        if found.damaged:
            raise DataError(
                f"{where}: {_count(len(found.damaged), 'file')} not readable as DICOM ({found.damaged[0][1]}); export the "
                "series again, as a whole"
            )
        if not found.series:
            what = "a folder" if Path(where).is_dir() else "DICOM"
            others = _count(found.others + len(found.stray), "other DICOM object")
            raise DataError(
                f"{where}: {what} without a series of CT, MR or PET ({others}); of scans in other formats give the files "
                "themselves, of a DICOMDIR its folder"
            )
        if not wanted and len(found.series) > 1:
            raise DataError(
                f"{where}: holds {len(found.series)} series; choose with --series, once for each. There are: "
                f"{'; '.join(map(str, found.series))}"
            )
    if wanted and not places:
        raise FederationError("--series: chooses among series in DICOM, and none was given; leave it out")
    there = [one for _, found in places for one in found.series]
    for name in wanted:
        if not any(name in (one.uid, one.name) for one in there):
            raise DataError(
                f"{', '.join(where for where, _ in places)}: --series {dicom.shown_uid(name)}: not there. There are: "
                f"{'; '.join(map(str, there))}"
            )
    return [
        [one for one in found.series if not wanted or one.uid in wanted or one.name in wanted]
        for _, found in places
    ]


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def _codes(trained: Trained, warn: Warn) -> dict[str, drawings.Meaning]:
    codes, taken = drawings.meanings(trained.space, trained.federation.labels.codes)
    if taken:
        told = "; ".join(f"{name}: {code}" for name, code in taken.items())
        warn(f"`labels.codes` names no code of these classes, and by their names were taken {told}")
    return codes


class _Labelled(NamedTuple):
    """A scan's labels in its own geometry, class index [X, Y, Z] or masks [C, X, Y, Z], and its affine. volume: of a series in
    DICOM; findings: as `_findings`; choice: as `Trained.choice`."""

    labels: np.ndarray
    affine: np.ndarray
    volume: dicom.Volume | None
    findings: dict[str, float | None]
    choice: dict[str, Any]

    def millilitres(self, space: LabelSpace) -> dict[str, float]:
        """Class name -> its volume, of the classes that were found."""
        voxel = abs(float(np.linalg.det(self.affine[:3, :3]))) / 1000
        masks = {c: self.labels == c if space.exclusive else self.labels[c] for c in space.foreground}
        return {space.names[c]: round(int(mask.sum()) * voxel, 3) for c, mask in masks.items() if mask.any()}


def _label_volume(trained: Trained, given: Given, post: bool, anyway: bool, warn: Warn) -> _Labelled:
    volume, more = None, dict[str, Any]()
    if given.series is not None:
        volume = dicom.load(given.series)
        more["modality"] = given.series.modality
        for note in volume.notes:
            warn(f"{given.shown}: {note}")

    def read(paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
        return read_channels(paths) if volume is None else (volume.voxels[None], volume.affine)

    def require(look: Look) -> None:
        _judge(trained, given.shown, anyway, warn, look | more)

    files = list(given.files) or [Path(given.shown)]
    scan = load_scan(files, trained.preprocessing, trained.space, read=read, require=require)
    if scan.image.shape[0] != trained.channels:
        raise DataError(
            f"{given.shown}: has {scan.image.shape[0]} channels; the model was trained on {trained.channels}"
        )
    for what, remedy in doubts_about(files[0]) if volume is None else ():
        warn(f"{given.shown}: {what}; {remedy}")
    skew = skew_told(scan.geometry.affine)
    if skew:
        warn(f"{given.shown}: {skew}")
    found = trained.predict(scan.image)
    labels = scan.restore(found.voxels)
    labels = trained.clean(labels) if post else labels
    findings = _findings(trained.space, found)
    return _Labelled(labels, scan.geometry.affine, volume, findings, trained.choice(found))


def _findings(space: LabelSpace, found: Prediction) -> dict[str, float | None]:
    """Finding -> its probability; None where no model speaks for the class that it is about."""
    if found.findings is None:
        return {}
    told = zip(space.findings, found.findings.tolist(), strict=True)
    return {name: None if math.isnan(p) else p for name, p in told}


def _finding_rows(shown: str, findings: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The rows of predictions.csv of an image's findings."""
    return [
        {"picture": shown, "kind": "finding", "name": name, "file": "", "pixels": "", "share": ""}
        | {"probability": "" if value is None else f"{value:.6f}"}
        for name, value in findings.items()
    ]


def _require_room(
    out: Path, given: Sequence[Given], form: str, space: LabelSpace, classes: dict[str, str], overwrite: bool
) -> None:
    """Raises FederationError where two results would be one file, or would replace others."""
    first: dict[Path, Given] = {}
    results: list[Path] = []
    for one in given:
        targets = one.targets(out, form, space)
        stem = out / f"{one.files[0].stem}.png" if one.is_picture else targets[0]
        if stem in first:
            raise FederationError(
                f"{first[stem].shown} and {one.shown} would both be written to {stem}; predict them into two folders"
            )
        first[stem] = one
        results += targets
    kept = out / CLASSES
    if kept.exists() and kept.read_bytes() != to_json(classes):  # of label maps of another model
        results.append(kept)
    # of a series its folder counts, and names of its files may be those of patients
    inputs = [
        file.with_name(one.name) if one.series else file
        for one in given
        for file in (one.series.files if one.series else one.files)
    ]
    require_new(out, inputs, results, overwrite)


def _write_table(path: Path, rows: Sequence[Iterable[Any]]) -> None:
    with saved(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)


def _judge(trained: Trained, what: str, anyway: bool, warn: Warn, look: Look) -> None:
    """Raises DataError for an image of another kind than the model was trained on; tells in what it differs."""
    for text in judge(trained.inputs, look, what, anyway=anyway):
        warn(text)


def _predict_picture(
    trained: Trained,
    files: Sequence[Path],
    out: Path,
    post: bool,
    anyway: bool,
    warn: Warn,
    begin: Callable[[], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Writes the labels of a picture. What is told of it, and its rows of predictions.csv. begin: called before it writes."""
    space, case = trained.space, files[0].stem
    scan = load_picture(trained, files, lambda look: _judge(trained, str(files[0]), anyway, warn, look))
    told = trained.predict(scan.image)
    labels = scan.restore(told.voxels)
    labels = trained.clean(labels) if post else labels
    begin()
    paths = flat.write_labels(out, case, labels, space)
    size = labels.shape[-3] * labels.shape[-2]
    pixels = {
        space.names[c]: int((labels == c if space.exclusive else labels[c]).sum()) for c in space.foreground
    }
    rows: list[dict[str, Any]] = [
        {
            "picture": str(files[0]),
            "kind": "class",
            "name": name,
            "file": str(paths[name].relative_to(out)),
            "pixels": count,
        }
        | {"share": f"{count / size:.6f}", "probability": ""}
        for name, count in pixels.items()
    ]
    findings = _findings(space, told)
    rows += _finding_rows(str(files[0]), findings)
    entry = {
        "scan": [str(files[0])],
        "labels": ", ".join(str(path) for path in dict.fromkeys(paths.values())),
        "pixels": {name: count for name, count in pixels.items() if count},
        "findings": findings,
        "millilitres": {},
    }
    return entry | trained.choice(told), rows


def load_picture(trained: Trained, files: Sequence[Path], require: Callable[[Look], None]) -> Scan:
    """A picture for a model of pixels, as `data.transforms.load_scan` reads a scan. require: is shown its look, and may raise.
    Raises DataError."""
    about: dict[str, Any] = {"kind": "picture", "spacing": None}

    def read(paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
        picture = flat.read_flat(paths, channels=trained.channels)
        if not picture.measured:
            _refuse_scale(trained, files[0])
        about.update(modality=picture.modality, colour=picture.colour)
        return picture.image, picture.affine

    def judged(look: Look) -> None:
        require(look | about)

    try:
        return load_scan(files, trained.preprocessing, trained.space, read=read, require=judged)
    except FileError as error:
        raise DataError(f"{error.file}: {error.what}; {error.remedy}") from None


def _refuse_scale(trained: Trained, file: Path) -> None:
    """Raises DataError for a picture that does not say its millimetres, as most that are not DICOM, where the model was
    trained on pictures whose data set says them and the grid is in millimetres: it would be predicted at another scale."""
    preprocessing = trained.preprocessing
    if preprocessing.size is not None or not any(preprocessing.spacing):
        return
    stated = [
        site.name
        for site in trained.federation.sites
        if site.reading.get("pixel") or site.format in ("montgomery", "jsrt")
    ]
    if stated:
        raise DataError(
            f"{file}: does not say its millimetres per pixel, and the model's grid is in millimetres, which site "
            f"{stated[0]} gave for its pictures; give DICOM with a pixel spacing, or `fedatlas evaluate` a folder with `--reading pixel=[…]`"
        )


def predict_images(
    path: Path,
    files: Sequence[Path],
    out: Path,
    *,
    model: str = "best",
    device: str | None = None,
    overwrite: bool = False,
    anyway: bool = False,
    warn: Warn = silent,
    seen: Seen = unseen,
) -> dict[str, Any]:
    """Writes findings.csv: per image and class the probability, and 1 or 0 at the threshold where one was fitted.

    overwrite, anyway, warn: as of `predict_scans`. seen: is told of every image before it is read. Returns the same,
    and why a class has no threshold. Raises DataError for a file that is no image.
    """
    require_files(files)
    require_new(out, files, [out / "findings.csv"], overwrite)
    trained = Trained(path, model, device, warn)
    names, limits = trained.space.names, trained.thresholds()
    found = []
    for number, file in enumerate(files):
        seen(number, len(files), file.name)
        try:
            arrays, about = prepared(file, "", trained.federation.images)
        except PictureError as error:
            raise DataError(f"{file}: {error.what}; nothing was written") from None
        _judge(trained, str(file), anyway, warn, about["look"])
        row = trained.findings(torch.from_numpy(arrays["image"]).float()[None])[0].tolist()
        scores = {name: value if value == value else None for name, value in zip(names, row, strict=True)}
        present = {
            name: int(value >= limit)
            for name, value in scores.items()
            if value is not None and (limit := limits[name].value) is not None
        }
        found.append({"image": str(file), "probability": scores, "present": present})
    table: list[Sequence[Any]] = [["image", *names, *(f"{name} present" for name in names)]]
    for entry in found:
        scores = ["" if p is None else p for p in entry["probability"].values()]
        table.append([entry["image"], *scores, *(entry["present"].get(name, "") for name in names)])
    _write_table(out / "findings.csv", table)
    return {
        "images": found,
        "thresholds": {name: limit.value for name, limit in limits.items()},
        "no_threshold": {name: limit.reason for name, limit in limits.items() if limit.value is None},
        "model": model,
        "table": str(out / "findings.csv"),
    }
