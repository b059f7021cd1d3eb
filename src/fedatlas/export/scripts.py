"""What a MONAI bundle does before and behind its net.

Of this module and all that it uses `source.extracted` makes the bundle's `scripts`, which need MONAI and no FedAtlas; so a
bundle reads, cuts and puts together as `fedatlas predict` does, by the same lines.

Shapes: C classes, I input channels, X, Y, Z the axes of a scan, *S those of the grid on which the net works.
"""

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core.errors import DataError
from fedatlas.core.outputs import evaluating
from fedatlas.data.images import prepared
from fedatlas.data.inputs import judge, look_of
from fedatlas.data.transforms import (
    doubts_of,
    geometry_of,
    image_for_prediction,
    in_mm,
    require_grid,
    restore,
    saved,
    skew_told,
    write_label_map,
)
from fedatlas.learning.inference import predict, restrict

Data = dict[str, Any]
"""What is known of one case, as MONAI's dictionary transforms have it."""


class ToGrid:
    """From a scan as LoadImaged and EnsureChannelFirstd give it, image [I, X, Y, Z], to the grid of the net, [I, *S].

    preprocessing: as of the federation file. channels: I; classes: C. inputs: what the net was trained on; an image of another
    kind is an error, unless `anyway`. Raises DataError, as `load_scan`.
    """

    def __init__(
        self,
        preprocessing: Mapping[str, Any],
        channels: int,
        classes: int,
        inputs: Any = None,
        anyway: bool = False,
    ) -> None:
        self.preprocessing: Any = SimpleNamespace(**preprocessing)
        self.channels, self.classes, self.inputs, self.anyway = channels, classes, inputs, anyway

    def __call__(self, data: Data) -> Data:
        loaded = data["image"]
        file = str(loaded.meta["filename_or_obj"])
        image = loaded.numpy()
        if image.ndim != 4 or image.shape[0] != self.channels:
            raise DataError(
                f"{file}: of shape {list(image.shape)}; expected are {self.channels} channels of three axes"
            )
        if not np.isfinite(image).all():
            raise DataError(
                f"{file}: holds voxels that are NaN or infinite; replace them, as by the value of air"
            )
        affine = in_mm(np.asarray(loaded.affine), loaded.meta.get("xyzt_units", 0))
        geometry = geometry_of(image.shape[1:], affine, self.preprocessing)
        _tell(self.inputs, look_of(image, spacing=geometry.turned_spacing), file, self.anyway)
        require_grid(file, geometry, self.preprocessing, len(image) + self.classes)
        on_grid = image_for_prediction(file, image, geometry, self.preprocessing)
        for what, remedy in doubts_of(loaded.meta):
            print(f"note: {file}: {what}; {remedy}")
        skew = skew_told(affine)
        if skew:
            print(f"note: {file}: {skew}")
        return {
            "image": torch.from_numpy(on_grid),
            "geometry": geometry,
            "file": file,
            "meta": {"filename_or_obj": file},
        }


class Windows:
    """An inferer: the probabilities [B, C, *S] of a net for images [B, I, *S] on its grid, by blended windows.

    patch, context: as of the federation file's preprocessing; options: as its evaluation.inference. divisor: by what the
    net's inputs divide. classes: the classes for which the net may speak, None for all.
    """

    def __init__(
        self,
        patch: Sequence[int],
        context: int,
        options: Mapping[str, Any],
        exclusive: bool,
        divisor: Sequence[int],
        classes: Sequence[int] | None = None,
    ) -> None:
        self.patch, self.context, self.options = patch, context, SimpleNamespace(**options)
        self.exclusive, self.divisor, self.classes = exclusive, tuple(divisor), classes

    def __call__(self, inputs: Tensor, network: Any) -> Tensor:
        options: Any = self.options
        network.divisor = self.divisor
        found = []
        for image in inputs:
            how: dict[str, Any] = {"exclusive": self.exclusive, "classes": self.classes}
            voxels = predict(network, image, self.patch, self.context, options, **how).voxels
            found.append(voxels if self.classes is None else restrict(voxels, self.classes, self.exclusive))
        return torch.stack(found)


class FromGrid:
    """From probabilities on the net's grid to labels on the scan's own, in mm: pred [1, X, Y, Z], or masks [C, X, Y, Z] where
    classes overlap, for `SaveLabels`."""

    def __init__(self, exclusive: bool) -> None:
        self.exclusive = exclusive

    def __call__(self, data: Data) -> Data:
        from monai.data.meta_tensor import MetaTensor

        labels = restore(data["pred"], data["geometry"], self.exclusive)
        labels = labels[None] if self.exclusive else labels
        affine = torch.from_numpy(data["geometry"].affine)
        return data | {"pred": MetaTensor(torch.from_numpy(labels), affine=affine, meta=data["meta"])}


class SaveLabels:
    """Writes what `FromGrid` gives as NIfTI into a folder, in mm, also of a scan of one slice. exclusive: as of it."""

    def __init__(self, folder: str, exclusive: bool) -> None:
        self.folder, self.exclusive = folder, exclusive

    def __call__(self, data: Data) -> Data:
        labels = data["pred"].numpy()
        labels = labels[0] if self.exclusive else labels
        write_label_map(label_file(data["file"], self.folder), labels, data["geometry"].affine)
        return data


class ReadImage:
    """From an image file, PNG, JPEG or DICOM, to the input of a net for findings of whole images [I, H, W].

    images: as of the federation file; inputs, anyway: as of `ToGrid`. Raises DataError."""

    def __init__(self, images: Mapping[str, Any], inputs: Any = None, anyway: bool = False) -> None:
        self.images: Any = SimpleNamespace(**images)
        self.inputs, self.anyway = inputs, anyway

    def __call__(self, data: Data) -> Data:
        file = Path(data["image"])
        arrays, about = prepared(file, "", self.images)
        _tell(self.inputs, about["look"], str(file), self.anyway)
        return {"image": torch.from_numpy(arrays["image"]).float(), "file": str(file)}


class Findings:
    """An inferer: the probabilities [B, C] of a net for images [B, I, H, W]; NaN for a class for which it may not speak."""

    def __init__(self, classes: Sequence[int] | None = None) -> None:
        self.classes = classes

    @torch.inference_mode()
    def __call__(self, inputs: Tensor, network: nn.Module) -> Tensor:
        device = next((p.device for p in network.parameters()), inputs.device)
        with evaluating(network):
            found = network(inputs.to(device)).double().cpu().sigmoid()
        silent = [] if self.classes is None else [c for c in range(found.shape[1]) if c not in self.classes]
        found[:, silent] = float("nan")
        return found


class FindingsTable:
    """Writes findings.csv into a folder, a line per image: the probability of every class, and 1 or 0 at its threshold where
    it has one. thresholds: one per class, or None."""

    def __init__(self, folder: str, names: Sequence[str], thresholds: Sequence[float | None]) -> None:
        self.file, self.names, self.thresholds = findings_file(folder), names, thresholds
        self.rows: list[list[Any]] = [["image", *names, *(f"{name} present" for name in names)]]

    def __call__(self, data: Data) -> Data:
        values = [float(value) for value in data["pred"]]
        pairs = list(zip(values, self.thresholds, strict=True))
        marks = ["" if limit is None or p != p else int(p >= limit) for p, limit in pairs]
        self.rows.append([data["file"], *("" if p != p else p for p in values), *marks])
        with saved(self.file) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows(self.rows)
        return data


class Program(nn.Module):
    """The net of a file of torch.export, with which no class of the net is needed; in evaluation mode, always."""

    def __init__(self, path: str, device: Any = "cpu") -> None:
        super().__init__()
        program = torch.export.load(path)
        if torch.device(device).type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, str(device))
        self.program = program.module()

    def forward(self, x: Tensor) -> Tensor:
        return self.program(x)

    def train(self, mode: bool = True) -> "Program":
        """Nothing: the mode is a part of the file."""
        return self


def with_weights(network: nn.Module, path: str) -> nn.Module:
    """A net with the weights of a file of torch."""
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval()


def files_of(folder: str, endings: Sequence[str], channels: int = 1) -> list[Data]:
    """The files of a folder with these endings, sorted; with several channels, those of a case together, whose names end in
    _0000, _0001, … before the ending, as in nnU-Net. Raises DataError where there are none, and of several channels where a
    name has no number, and where a case lacks one, has one more or has one twice."""
    if not Path(folder).is_dir():
        raise DataError(f"{folder}: there is no such folder; give the folder of the images as --dataset_dir")
    names = sorted(p for p in Path(folder).iterdir() if p.name.lower().endswith(tuple(endings)))
    if not names:
        raise DataError(f"{folder}: holds no file that ends in {' or '.join(endings)}; give --dataset_dir")
    if channels == 1:
        return [{"image": str(path)} for path in names]
    cases: dict[str, dict[int, Path]] = {}
    for path in names:
        found = re.fullmatch("(.+)_([0-9]{4})", stem_of(path))
        if found is None:
            raise DataError(
                f"{path}: its name does not end in the number of a channel, _0000 to _{channels - 1:04}; name it so, or "
                "take it out of the folder"
            )
        files = cases.setdefault(found[1], {})
        twin = files.setdefault(int(found[2]), path)
        if twin != path:
            raise DataError(
                f"{twin} and {path.name}: are one channel of one case; take one out of the folder"
            )
    wanted = list(range(channels))
    for case, files in cases.items():
        if sorted(files) != wanted:
            there = ", ".join(f"_{number:04}" for number in sorted(files))
            raise DataError(
                f"{folder}: case {case} has the channels {there}; expected are _0000 to _{channels - 1:04}, each"
            )
    return [{"image": [str(files[number]) for number in wanted]} for files in cases.values()]


def stem_of(file: Path) -> str:
    """The name of a file of NIfTI without its ending; other points are a part of the name."""
    return re.sub(r"\.nii(\.gz)?$", "", file.name, flags=re.IGNORECASE)


def label_file(file: str, folder: str) -> Path:
    """Where the labels of a scan are written; of several channels, of the first."""
    return Path(folder) / f"{stem_of(Path(file))}_labels.nii.gz"


def label_files(datalist: Iterable[Data], folder: str) -> list[Path]:
    """`label_file` of every case of `files_of`."""
    return [label_file(files_in(item)[0], folder) for item in datalist]


def findings_file(folder: str) -> Path:
    """Where findings are written."""
    return Path(folder) / "findings.csv"


def files_in(item: Data) -> list[str]:
    """The files of a case of `files_of`, one per channel."""
    return [item["image"]] if isinstance(item["image"], str) else list(item["image"])


def require_room(datalist: Iterable[Data], results: Sequence[Path], overwrite: bool = False) -> None:
    """Raises DataError where two results would be one file or one would replace an input, and where one is there, unless
    `overwrite`: before anything is predicted."""
    inputs = {Path(file).resolve() for item in datalist for file in files_in(item)}
    seen: set[Path] = set()
    for path in results:
        if path in seen:
            raise DataError(
                f"{path}: would be written of two scans, whose names differ in their endings alone; rename one"
            )
        seen.add(path)
        if path.resolve() in inputs:
            raise DataError(f"{path}: is an input, and would be replaced; give another --output_dir")
        if path.exists() and not overwrite:
            raise DataError(
                f"{path}: exists already; give another --output_dir, or replace it with --overwrite True"
            )


def run(
    datalist: Iterable[Data],
    preprocessing: Callable[[Data], Data],
    inferer: Callable[[Tensor, nn.Module], Tensor],
    network: nn.Module,
    postprocessing: Callable[[Data], Data],
) -> list[str]:
    """Predicts case by case. Returns the files that were read."""
    done = []
    for item in datalist:
        data = preprocessing(item)
        data["pred"] = inferer(data["image"][None], network)[0]
        postprocessing(data)
        done.append(data["file"])
    return done


def _tell(inputs: Any, look: Mapping[str, Any], file: str, anyway: bool) -> None:
    for text in judge(inputs, dict(look), file, anyway=anyway):
        print(f"note: {text}")
