"""A trained model taken from a run folder: predicting scans, scoring folders."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core.contract import Member
from fedatlas.core.errors import DataError, FederationError, RunFolderError, WireError
from fedatlas.core.labels import BACKGROUND, LabelSpace
from fedatlas.core.options import from_dict, not_known
from fedatlas.core.tensors import Tensors, load
from fedatlas.data import datasets
from fedatlas.data.formats import flat
from fedatlas.data.index import AUTO, SiteConfig, read_site
from fedatlas.data.inputs import Look, judge, trained_on
from fedatlas.data.transforms import (
    SKEW,
    FileError,
    Preprocessing,
    load_scan,
    saved,
    skew_of,
    write_label_map,
)
from fedatlas.data.voxels import VoxelData
from fedatlas.evaluation.postprocess import Postprocess, postprocess
from fedatlas.evaluation.statistics import POST, write_rows
from fedatlas.federation.design import Design, build_net, cache_folder, training_sites
from fedatlas.federation.file import inference_of, load_federation, make_method
from fedatlas.federation.tasks import task_of
from fedatlas.federation.usable import Warn, record_of, require_files, require_members, require_new, silent
from fedatlas.learning import inference
from fedatlas.transport import wire
from fedatlas.transport.rounds import RunFolder, to_json
from fedatlas.transport.store import read_whole, write_atomic

Seen = Callable[[int, int, str], None]
"""Is told how many cases are done, of how many, and the name of the next."""


def unseen(done: int, total: int, name: str) -> None:
    """A `Seen` that tells nobody."""


def _device(name: str) -> torch.device:
    """A device by its name. Raises FederationError if it is none, or not here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FederationError(f"--device {name}: cannot be used here ({reason}); use cpu") from None
    return device


class Trained:
    """The model of a run folder, ready to predict.

    model: "best", "last" or "local/<site>"; round: the one that it is of. warn: is told what may make its word less reliable. inputs: what it was
    trained on, see `data.inputs`. Raises RunFolderError if the run or that model is not there, or not as it was left.
    """

    round: int

    def __init__(
        self, path: Path, model: str = "best", device: str | None = None, warn: Warn = silent
    ) -> None:
        if not (path / "federation.yaml").exists():
            raise RunFolderError(
                f"{path}: not a run folder, it holds no federation.yaml; `fedatlas run` makes one"
            )
        self.folder = RunFolder(path)
        self.federation = load_federation(path / "federation.yaml")
        info, self.space, self.channels = record_of(path, warn)
        self.inputs = trained_on(info)
        if self.inputs is None:
            warn(
                f"{path}: does not say what its model was trained on; whether the input is of that kind is not checked"
            )
        self.method = make_method(self.federation)
        kept = self.federation.engine.device
        try:  # a model that was trained on a GPU is used wherever it is taken
            torch.zeros(1, device=kept)
        except (RuntimeError, AssertionError):
            kept = "cpu"
        self.device = _device(device) if device else torch.device(kept)
        self.model = model
        self.members = self._members()
        design = Design(self.federation, self.space, self.channels)
        source = f"{path}: model {model}"
        require_members(self.members, design.shapes, design.sample_shape, self.device.type, source)
        self.nets = inference.Nets(self.network)

    def _members(self) -> list[Member]:
        if self.model.startswith("local/"):
            local = self.folder.local_models()
            site = self.model.removeprefix("local/")
            if site not in local:
                raise not_known(f"{self.folder.path}: the local model", site, local)
            file, self.round = local[site]
            try:
                kept: Any = wire.decode(read_whole(file), copy=False)
                return [Member.from_payload({"model": dict(kept["model"]), "classes": kept["classes"]})]
            except (WireError, KeyError, TypeError, ValueError) as error:
                raise RunFolderError(f"{file}: cannot be read ({error})") from None
        if self.model not in ("best", "last"):
            raise RunFolderError(f"model {self.model!r}: not known; allowed: best, last, local/<site>")
        file = self.folder.path / "models" / f"{self.model}.fa"
        if not file.exists() and (file.parent / "last.fa").exists():
            raise RunFolderError(f"{file}: missing, no round of this run was validated; use --model last")
        state = self.folder.state(file, self.method)
        self.round = state.round
        return self.method.eval_members(state, "")

    @property
    def preprocessing(self) -> Preprocessing:
        """From scans to the federation's grid."""
        assert self.federation.preprocessing is not None
        return self.federation.preprocessing

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        """The federation's net with the given values, on the chosen device."""
        net = build_net(self.federation, self.method, name, channels=self.channels, space=self.space)
        if model is not None:
            load(net, model)
        return net.to(self.device)

    def predict(self, image: Tensor) -> inference.Prediction:
        """Of an image [I, *S] on the federation's grid; several models are merged, or one is chosen, as the method
        says. Nets are made for those models alone that speak."""

        preprocessing, options = self.preprocessing, inference_of(self.federation)
        (found,) = inference.predict_each(
            [self.members], self.nets, image, preprocessing.patch, preprocessing.context, options, self.space
        )
        return found

    def choice(self, found: inference.Prediction) -> dict[str, str | None]:
        """{"chosen": the site whose model a selector took, None where it took none}; {} for models without a selector."""
        if inference.chooser(self.members) is None:
            return {}
        return {"chosen": None if found.chosen is None else training_sites(self.federation)[found.chosen]}

    def probabilities(self, image: Tensor) -> Tensor:
        """[C, *S] the voxels of `predict`."""
        return self.predict(image).voxels

    @property
    def postprocess(self) -> Postprocess:
        """That of the run's `evaluation`, or where there is none its defaults."""
        return self.federation.evaluation.postprocess or Postprocess()  # type: ignore[call-arg]

    def clean(self, labels: np.ndarray) -> np.ndarray:
        """Labels on the grid of a file after `postprocess`; exclusive classes stay so."""
        return postprocess(labels, self.space, replace(self.postprocess, channels="exclusive"))


def task_name(path: Path) -> str:
    """The task of a run. Raises RunFolderError if it is not a run folder."""
    file = path / "federation.yaml"
    if not file.exists():
        raise RunFolderError(
            f"{path}: not a run folder, it holds no federation.yaml; `fedatlas run` makes one"
        )
    return load_federation(file).task


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
        with saved(out / "predictions.csv") as temporary, temporary.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
    return {"scans": written, "classes": classes, "model": model}


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


def evaluate_folder(
    path: Path,
    data: Path,
    *,
    model: str = "best",
    aliases: Mapping[str, str] | None = None,
    table: str = "dataset.json",
    labels: str = "labelsTr",
    test_labels: str = "labelsTs",
    format: str = "auto",
    reading: Mapping[str, Any] | None = None,
    out: Path | None = None,
    device: str | None = None,
    post: bool = False,
    anyway: bool = False,
    warn: Warn = silent,
    seen: Seen = unseen,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Scores a trained model on every labelled case of a folder, on the original grids.

    anyway, warn: as of `predict_scans`.
    format, reading: the layout of the folder and its options, as a site of a federation has them. post: score once
    more after post-processing also where the run's `evaluation` names none, see `Trained.postprocess`. seen: is told of
    every case before it is predicted. Returns the rows, and the labels of the folder that the model does not know: they are
    not scored.
    """
    datasets.require(format, "--format: the layout", *datasets.VOXELS, also=(AUTO,))
    trained = Trained(path, model, device, warn)
    federation, space = trained.federation, trained.space
    aliases = dict(aliases or {})
    name = site_name(data)
    form = {
        "name": name,
        "path": str(data.resolve()),
        "table": table,
        "labels": labels,
        "test_labels": test_labels,
        "format": format,
        "reading": dict(reading or {}),
    }
    ours = [*space.names, *space.findings]
    for name_of, target in aliases.items():
        if target not in ours:
            raise not_known(f"--alias {name_of}={target}: the class", target, ours)
    index = read_site(from_dict(SiteConfig, form, what="evaluate"), data)
    theirs = [label for label in (*index.names, *index.findings) if label != BACKGROUND]
    known = [label for label in theirs if aliases.get(label, label) in ours]
    ignored = [label for label in theirs if label not in known]
    if not known:
        raise FederationError(
            f"{data}: none of its labels ({', '.join(theirs)}) is known to the model ({', '.join(ours)}); "
            "give aliases, as --alias theirs=ours"
        )
    chosen = {"annotated": tuple(known), "aliases": aliases}
    config = from_dict(SiteConfig, form | chosen, what="evaluate")
    source = VoxelData(
        read_site(config, data),
        space,
        trained.preprocessing,
        federation.sampling,
        federation.augmentation,
        seed=federation.seed,
        validation=0.0,
        cache=cache_folder(federation, path.parent),
    )
    if source.channels != trained.channels:
        raise DataError(
            f"{data}: its scans have {source.channels} channels; the model was trained on {trained.channels}"
        )
    require_kind(trained, source, anyway, warn)
    if post:
        processed = replace(federation.evaluation, postprocess=trained.postprocess)
        federation = replace(federation, evaluation=processed)
    evaluator = task_of(federation).evaluator(federation, space)
    rows: list[dict[str, Any]] = []
    members = [member.to_payload() for member in trained.members]
    site = Visitor(name, source, trained, ("train", "test"), seen)
    for split in ("train", "test"):
        what = {"split": split, "model": model, "round": trained.round, "grid": "original"}
        reply = evaluator.evaluate(
            site, members, **what, metrics=list(federation.evaluation.metrics), overlays=False
        )
        rows += reply["rows"]
    if out:
        write_rows(out, rows)
    return rows, ignored


def site_name(data: Path) -> str:
    """What a folder outside the federation is called: its name, as far as a site may be called so."""
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in data.resolve().name)
    return name.strip("-")[:100] or "folder"


def require_kind(trained: Trained, source: Any, anyway: bool, warn: Warn) -> None:
    """Raises DataError for a folder with an image of another kind than the model was trained on; tells of how many
    images differ in what, with an example."""
    found: dict[str, list[str]] = {}
    for file, look in source.looks().items():
        for text in judge(trained.inputs, look, file, anyway=anyway):
            found.setdefault(text.removeprefix(f"{file}: ").partition(";")[0].split(" of ")[0], []).append(
                text
            )
    for texts in found.values():
        warn(texts[0] + (f" (and {len(texts) - 1} more such images)" if len(texts) > 1 else ""))


class Visitor:
    """A site outside the federation, for evaluation. splits: the splits to evaluate, in order."""

    def __init__(
        self, name: str, source: Any, trained: Trained, splits: Sequence[str], seen: Seen = unseen
    ) -> None:
        self.name, self.source, self.network, self.device = name, source, trained.network, trained.device
        self.folder, self.labels = trained.folder.path / "visitors" / name, source.labels
        self.seen, self.done = seen, 0
        self.total = sum(len(source.items[split]) for split in splits)

    def volumes(self, split: str) -> Iterator[Any]:
        """The cases of a split, one at a time; `seen` is told of each."""
        self.seen(self.done, self.total, "")
        for volume in self.source.volumes(split):
            self.seen(self.done, self.total, volume.case)
            yield volume
            self.done += 1


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean (SD) per class and metric as text, over the cases where it is defined, and of several classes the mean of
    their means; below, the same after post-processing, and findings of the whole image."""
    processed = [row for row in rows if row["model"].startswith(POST)]
    if processed:
        kept = [row for row in rows if not row["model"].startswith(POST)]
        after = [{**row, "model": row["model"].removeprefix(POST)} for row in processed]
        return f"{evaluation_table(kept)}\n\nafter post-processing:\n{evaluation_table(after)}"
    told = [row for row in rows if not row["case"]]
    if told:
        parts = [row for row in rows if row["case"]]
        tables = [evaluation_table(parts)] if parts else []
        return "\n\n".join([*tables, _findings_table(told)])
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    classes = list(dict.fromkeys(row["class"] for row in rows))
    width = max([len(name) for name in classes] + [5])
    lines = [f"{'class':{width}}  " + "  ".join(f"{m:>16}" for m in metrics) + "    n"]
    means: dict[str, list[float]] = {metric: [] for metric in metrics}
    for name in classes:
        cells, n = [], 0
        for metric in metrics:
            values = [
                r["value"]
                for r in rows
                if r["class"] == name and r["metric"] == metric and r["value"] is not None
            ]
            n = max(n, len(values))
            means[metric] += [float(np.mean(values))] if values else []
            cells.append(
                f"{np.mean(values):8.3f} ({np.std(values, ddof=1) if len(values) > 1 else 0:5.3f})"
                if values
                else f"{'not defined':>16}"
            )
        lines.append(f"{name:{width}}  " + "  ".join(cells) + f"  {n:3d}")
    if len(classes) > 1:
        cells = [f"{macro(means[metric]):16}" for metric in metrics]
        lines.append(f"{'macro':{width}}  " + "  ".join(cells) + "  mean over classes")
    return "\n".join(lines)


def macro(values: Sequence[float]) -> str:
    """The mean of the values of several classes as the cell of a table."""
    return f"{np.mean(values):8.3f}" if values else "not defined"


def _findings_table(rows: Sequence[Mapping[str, Any]]) -> str:
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    places = list(dict.fromkeys((row["class"], row["split"]) for row in rows))
    width = max(len("finding"), *(len(name) for name, _ in places))
    lines = [f"{'finding':{width}}  {'cases':5}  " + "  ".join(f"{m:>11}" for m in metrics)]
    for name, split in places:
        of = {row["metric"]: row["value"] for row in rows if (row["class"], row["split"]) == (name, split)}
        cells = [f"{of[m]:11.3f}" if of.get(m) is not None else f"{'not defined':>11}" for m in metrics]
        lines.append(f"{name:{width}}  {split:5}  " + "  ".join(cells))
    return "\n".join(lines)
