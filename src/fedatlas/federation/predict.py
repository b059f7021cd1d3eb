"""Predicting files with a trained model: label maps of scans and pictures, findings of whole images."""

import csv
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.formats import flat
from fedatlas.data.formats.picture import PictureError
from fedatlas.data.images import prepared
from fedatlas.data.inputs import Look, judge
from fedatlas.data.transforms import SKEW, FileError, load_scan, saved, skew_of, write_label_map
from fedatlas.federation.trained import Seen, Trained, unseen
from fedatlas.federation.usable import Warn, require_files, require_new, silent
from fedatlas.transport.rounds import to_json
from fedatlas.transport.store import write_atomic


def predict_scans(
    path: Path,
    scans: Sequence[Sequence[Path]],
    out: Path,
    *,
    model: str = "best",
    device: str | None = None,
    post: bool = False,
    overwrite: bool = False,
    anyway: bool = False,
    warn: Warn = silent,
    seen: Seen = unseen,
) -> dict[str, Any]:
    """Writes a label map per scan, in the scan's own geometry, and classes.json beside them.

    scans: the NIfTI files of each, one per channel, or a picture each; of pictures PNG files are written, see
    `flat.write_labels`, and predictions.csv with the pixels of every class and the probability of every finding.
    post: write labels after post-processing, see `Trained.postprocess`. overwrite: replace files that are there.
    anyway: go on with images of another kind than the model was trained on. warn: is told where they differ from those.
    seen: is told of every scan before it is read.
    Returns what was written and the volume, or the pixels, found per class, and where a selector chooses among models
    the site whose model it took (`Trained.choice`).
    """
    require_files([file for files in scans for file in files])
    trained = Trained(path, model, device, warn)
    names = trained.space.names
    targets = [_target(out, files[0]) for files in scans]
    for number, target in enumerate(targets):
        if target in targets[:number]:
            first, second = scans[targets.index(target)][0], scans[number][0]
            raise FederationError(
                f"{first} and {second} would both be written to {target}; predict them into two folders"
            )
    results = [file for files in scans for file in _results(out, files[0], trained.space)]
    classes = {str(index): name for index, name in enumerate(names)}
    table_of = out / "classes.json"
    if table_of.exists() and table_of.read_bytes() != to_json(classes):  # of label maps of another model
        results.append(table_of)
    require_new(out, [file for files in scans for file in files], results, overwrite)
    written = []
    table: list[dict[str, Any]] = []
    for number, (files, target) in enumerate(zip(scans, targets, strict=True)):
        seen(number, len(scans), files[0].name)
        if flat.is_picture(files[0]):
            entry, rows = _predict_picture(trained, list(files), out, post, anyway, warn)
            written.append(entry)
            table += rows
            continue
        judged = partial(_judge, trained, str(files[0]), anyway, warn)
        volume = load_scan(list(files), trained.preprocessing, trained.space, require=judged)
        if volume.image.shape[0] != trained.channels:
            raise DataError(
                f"{files[0]}: has {volume.image.shape[0]} channels; the model was trained on {trained.channels}"
            )
        skew = skew_of(volume.geometry.affine)
        if skew > SKEW:
            warn(
                f"{files[0]}: its axes are {skew:.1f}° off a right angle, and are taken as if they met at one"
            )
        found = trained.predict(volume.image)
        labels = volume.restore(found.voxels)
        labels = trained.clean(labels) if post else labels
        write_label_map(target, labels, files[0])
        millilitres = abs(float(np.linalg.det(volume.geometry.affine[:3, :3]))) / 1000
        masks = {c: labels == c if trained.space.exclusive else labels[c] for c in trained.space.foreground}
        sizes = {names[c]: round(int(mask.sum()) * millilitres, 3) for c, mask in masks.items() if mask.any()}
        told = {"scan": [str(file) for file in files], "labels": str(target), "millilitres": sizes}
        written.append(told | trained.choice(found))
    write_atomic(table_of, to_json(classes))
    if table:
        _write_table(out / "predictions.csv", [list(table[0]), *(row.values() for row in table)])
    return {"scans": written, "classes": classes, "model": model}


def _write_table(path: Path, rows: Sequence[Iterable[Any]]) -> None:
    with saved(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)


def _judge(trained: Trained, what: str, anyway: bool, warn: Warn, look: Look) -> None:
    """Raises DataError for an image of another kind than the model was trained on; tells in what it differs."""
    for text in judge(trained.inputs, look, what, anyway=anyway):
        warn(text)


def _results(out: Path, file: Path, space: LabelSpace) -> list[Path]:
    """The files that are written of a scan or a picture."""
    if not flat.is_picture(file):
        return [_target(out, file)]
    return [*flat.label_paths(out, file.stem, space).values(), out / "predictions.csv"]


def _target(out: Path, file: Path) -> Path:
    """What is written of a scan; of pictures it stands for all of their files."""
    if flat.is_picture(file):
        return out / f"{file.stem}.png"
    return out / f"{file.name.removesuffix('.gz').removesuffix('.nii')}_labels.nii.gz"


def _predict_picture(
    trained: Trained, files: Sequence[Path], out: Path, post: bool, anyway: bool, warn: Warn
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Writes the labels of a picture. What is told of it, and its rows of predictions.csv."""
    space, case = trained.space, files[0].stem
    _refuse_scale(trained, files[0])

    about: dict[str, Any] = {"kind": "picture", "spacing": None}

    def read(paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
        picture = flat.read_flat(paths, channels=trained.channels)
        about.update(modality=picture.modality, colour=picture.colour)
        return picture.image, picture.affine

    def require(look: Look) -> None:
        _judge(trained, str(files[0]), anyway, warn, look | about)

    try:
        scan = load_scan(files, trained.preprocessing, space, read=read, require=require)
    except FileError as error:
        raise DataError(f"{error.file}: {error.what}; {error.remedy}") from None
    told = trained.predict(scan.image)
    labels = scan.restore(told.voxels)
    labels = trained.clean(labels) if post else labels
    paths = flat.write_labels(out, case, labels, space)
    size = labels.shape[-3] * labels.shape[-2]
    pixels = {
        space.names[c]: int((labels == c if space.exclusive else labels[c]).sum()) for c in space.foreground
    }
    where = {"picture": str(files[0])}
    rows: list[dict[str, Any]] = [
        where
        | {"kind": "class", "name": name, "file": str(paths[name].relative_to(out)), "pixels": count}
        | {"share": f"{count / size:.6f}", "probability": ""}
        for name, count in pixels.items()
    ]
    findings = {} if told.findings is None else dict(zip(space.findings, told.findings.tolist(), strict=True))
    rows += [
        where
        | {"kind": "finding", "name": name, "file": "", "pixels": "", "share": ""}
        | {"probability": f"{value:.6f}"}
        for name, value in findings.items()
    ]
    entry = {
        "scan": [str(files[0])],
        "labels": ", ".join(str(path) for path in dict.fromkeys(paths.values())),
        "pixels": {name: count for name, count in pixels.items() if count},
        "findings": findings,
        "millilitres": {},
    }
    return entry | trained.choice(told), rows


def _refuse_scale(trained: Trained, file: Path) -> None:
    """Raises DataError for a picture that does not say its millimetres, where the model was trained on pictures whose
    data set says them and the grid is in millimetres: it would be predicted at another scale."""
    preprocessing = trained.preprocessing
    if preprocessing.size is not None or not any(preprocessing.spacing):
        return
    stated = [
        site.name
        for site in trained.federation.sites
        if site.reading.get("pixel") or site.format in ("montgomery", "jsrt")
    ]
    if stated and file.suffix.lower() not in (".dcm", ".dicom"):
        raise DataError(
            f"{file}: does not say its millimetres per pixel, and the model's grid is in millimetres, which site "
            f"{stated[0]} gave for its pictures; give DICOM, or `fedatlas evaluate` a folder with `--reading pixel=[…]`"
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
