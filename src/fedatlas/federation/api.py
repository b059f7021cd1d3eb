"""FedAtlas from Python, as in a notebook: `import fedatlas` gives these names, and imports nothing heavy before one is used.

Shapes: C classes, I input channels, X, Y, Z the axes of a scan, H, W rows and columns of an image.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedatlas.core.errors import DataError, FederationError, require_run
from fedatlas.data.formats import flat
from fedatlas.data.formats.picture import PictureError
from fedatlas.data.images import on_grid, prepared
from fedatlas.data.inputs import Look, judge
from fedatlas.data.transforms import Scan, load_scan, read_channels
from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.best import Best
from fedatlas.federation.file import Federation, load_federation, parse_federation, resolved
from fedatlas.federation.predict import load_picture
from fedatlas.federation.session import run_federation, run_path, summary
from fedatlas.federation.trained import Trained
from fedatlas.federation.yaml import merged
from fedatlas.transport.rounds import Round, RunFolder

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Seen:
    """A round that is done, as a callback is told. number: from 1, out of `of`; 0 is the start. losses: site -> its losses, by
    name. score: of the validation, None where the round was not validated; best_round, best_score: so far."""

    number: int
    of: int
    losses: Mapping[str, Mapping[str, float]]
    score: float | None
    best_round: int
    best_score: float | None


def load(path: str | Path | Mapping[str, Any], **changes: Any) -> Federation:
    """A federation file, or a mapping of its keys, with keys changed as by `change`; paths in a mapping are taken from the
    working folder. Raises FederationError."""
    if isinstance(path, Mapping):
        federation = parse_federation(path, base=Path(), source="load")
    else:
        federation = load_federation(Path(path))
    return change(federation, **changes) if changes else federation


def change(federation: Federation, **changes: Any) -> Federation:
    """A federation with other values of some keys, as `change(f, rounds=2, local={"steps": 3})`: a mapping changes the keys
    that it names, as a file with `extends` does; another `name` of a method or a net begins the block anew. Paths are taken
    from the working folder. Raises FederationError."""
    return parse_federation(merged(resolved(federation), changes), base=Path(), source="change")


def run(
    federation: Federation | str | Path | Mapping[str, Any],
    runs: str | Path = "runs",
    *,
    id: str | None = None,
    resume: bool = True,
    on_round: Callable[[Seen], None] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> "Run":
    """Trains and evaluates a federation on this machine, as `fedatlas run` does, to the same bits; returns its run.

    runs: the folder of all runs; id: the run's name in it, None as the command line. resume: go on from the last complete
    round; a run that is finished is returned as it is. on_round: is told of every round, and stops the run where it
    raises, so that it can be resumed. tell: is given sentences for a person. Raises FederationError, DataError and
    RunFolderError as `fedatlas run`.
    """
    if not isinstance(federation, Federation):
        federation = load(federation)
    path = run_path(federation, Path(runs), id)

    def after_round(record: Round, best: Best) -> None:
        if on_round is None:
            return
        on_round(
            Seen(
                record.number,
                federation.rounds,
                record.log["sites"],
                best.last_score if record.rows else None,
                best.round,
                best.score if best.round else None,
            )
        )

    run_federation(federation, path, resume=resume, tell=tell, after_round=after_round)
    return Run(path)


class Run:
    """A run folder. Raises FederationError or RunFolderError where it is none."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        require_run(self.path, "federation.yaml")
        self.federation = load_federation(self.path / "federation.yaml")

    def __repr__(self) -> str:
        return f"fedatlas.Run({str(self.path)!r})"

    def results(self) -> "pandas.DataFrame":
        """The scores of the final evaluation, a row each: split, model, site, case, class, metric, value, known (does the site
        annotate the class?) and the reason where a value is not defined."""
        return _pandas().DataFrame(read_rows(self.path / "rows.csv"))

    def rounds(self) -> "pandas.DataFrame":
        """What every site told of every round, a row per round and site: its losses, and what the round cost it."""
        rows: list[dict[str, Any]] = []
        for log, _ in RunFolder(self.path).records():
            for site, numbers in sorted(log["sites"].items()):
                rows.append({"round": log["round"], "site": site} | numbers | log["cost"].get(site, {}))
        return _pandas().DataFrame(rows)

    def validation(self) -> "pandas.DataFrame":
        """The validation scores of every round, rows as of `results`."""
        return _pandas().DataFrame([dict(row) for _, rows in RunFolder(self.path).records() for row in rows])

    def summary(self) -> dict[str, Any]:
        """Best round, and the mean Dice of outlines and AUROC of findings of each split, model, site and class."""
        return summary(self.path)

    def model(self, model: str = "best", device: str | None = None) -> "Model":
        """A model of the run: best, last or local/<site>."""
        return Model(self.path, model, device)


class Model:
    """A trained model. trained: what the command line works with. Raises RunFolderError if it is not there."""

    def __init__(self, path: str | Path, model: str = "best", device: str | None = None) -> None:
        self.trained = Trained(Path(path), model, device, _warn)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; the background first where they exclude each other."""
        return self.trained.space.names

    @cached_property
    def net(self) -> nn.Module:
        """The net with its weights, in evaluation mode, on the model's device: images on the federation's grid
        [B, I, *S] -> logits [B, C, *S], or [B, C] of whole images. Raises FederationError for a model of several nets."""
        members = self.trained.members
        if len(members) > 1:
            raise FederationError(
                f"{self.trained.folder.path}: model {self.trained.model} is {len(members)} nets that speak together; call the "
                "model on an image, or take a site's own, as run.model('local/<site>').net"
            )
        return self.trained.network(members[0].model, members[0].net).eval()

    def __call__(
        self,
        image: np.ndarray,
        spacing: Sequence[float] | None = None,
        *,
        axes: str = "RAS",
        affine: np.ndarray | None = None,
        anyway: bool = False,
    ) -> Any:
        """What the model says of an image.

        Of voxels: image [X, Y, Z], or [I, X, Y, Z], in the units of the training images, as HU; spacing in mm along X, Y and
        Z, and where these axes point, or the affine [4, 4] in mm in the place of both. Returns labels [X, Y, Z], or
        masks [C, X, Y, Z] where classes overlap. Of whole images: image [H, W], or [I, H, W], from 0 black to 1 white, or
        whole numbers of 8 or 16 bits; returns {class: probability}. anyway: take images of another kind than the
        model was trained on. Raises DataError for an image that the model cannot take.
        """
        if self.trained.space.level == "image":
            if spacing is not None or affine is not None:
                raise DataError(
                    "spacing: labels are of whole images, which are resized whatever it is; leave it out"
                )
            return self._findings(on_grid(_grey(image), self.trained.federation.images))
        voxels = np.asarray(image)
        voxels = voxels[None] if voxels.ndim == 3 else voxels
        if voxels.ndim != 4 or 0 in voxels.shape or not np.issubdtype(voxels.dtype, np.number):
            raise DataError(
                f"image: of shape {list(np.shape(image))} and {voxels.dtype}; expected are numbers [X, Y, Z], or [I, X, Y, Z]"
            )
        if not np.isfinite(voxels).all():
            raise DataError(
                "image: holds voxels that are NaN or infinite; replace them, as by the value of air"
            )
        place = _affine(spacing, axes) if affine is None else np.asarray(affine, dtype=np.float64)
        if place.shape != (4, 4) or not np.isfinite(place).all() or abs(np.linalg.det(place[:3, :3])) < 1e-9:
            raise DataError(
                f"affine: of shape {list(place.shape)}; expected is an invertible one of [4, 4], in mm"
            )
        return self._labels([Path("image")], "image", anyway, lambda paths: (voxels, place))

    def predict(self, file: str | Path | Sequence[str | Path], *, anyway: bool = False) -> Any:
        """What the model says of a file, as of an array: a scan in NIfTI, or one for each channel; of whole images a PNG, JPEG
        or DICOM. Of a picture and a model of pixels: labels [H, W], or masks [C, H, W] where classes overlap.
        `fedatlas predict` writes files. Raises DataError."""
        files = [Path(one) for one in ([file] if isinstance(file, str | Path) else file)]
        if self.trained.space.level == "image":
            try:
                arrays, about = prepared(files[0], "", self.trained.federation.images)
            except PictureError as error:
                raise DataError(f"{files[0]}: {error.what}; {error.remedy}") from None
            self._judge(about["look"], str(files[0]), anyway)
            return self._findings(arrays["image"])
        if flat.is_picture(files[0]):
            scan = load_picture(self.trained, files, lambda look: self._judge(look, str(files[0]), anyway))
            return flat.lying(scan.restore(self.trained.predict(scan.image).voxels))
        return self._labels(files, str(files[0]), anyway, read_channels)

    def _labels(
        self,
        files: Sequence[Path],
        what: str,
        anyway: bool,
        read: Callable[[Sequence[Path]], tuple[np.ndarray, np.ndarray]],
    ) -> np.ndarray:
        trained = self.trained
        scan: Scan = load_scan(
            files,
            trained.preprocessing,
            trained.space,
            read=read,
            require=lambda look: self._judge(look, what, anyway),
        )
        if scan.image.shape[0] != trained.channels:
            raise DataError(
                f"{what}: has {scan.image.shape[0]} channels; the model was trained on {trained.channels}"
            )
        return scan.restore(trained.predict(scan.image).voxels)

    def _findings(self, image: np.ndarray) -> dict[str, float]:
        scores = self.trained.findings(torch.from_numpy(image).float()[None])[0].tolist()
        return dict(zip(self.classes, scores, strict=True))

    def _judge(self, look: Look, what: str, anyway: bool) -> None:
        try:
            found = judge(self.trained.inputs, look, what, anyway=anyway)
        except DataError as error:
            raise DataError(str(error).replace("--anyway", "anyway=True")) from None
        for text in found:
            _warn(text)


def _grey(image: np.ndarray) -> np.ndarray:
    """Pixels [I, H, W] float32 from 0 to 1. Raises DataError."""
    pixels = np.asarray(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if pixels.dtype in (np.uint8, np.uint16):
        pixels = pixels / np.float32(np.iinfo(pixels.dtype).max)
    if pixels.ndim != 3 or 0 in pixels.shape or not np.issubdtype(pixels.dtype, np.floating):
        raise DataError(
            f"image: of shape {list(np.shape(image))} and {np.asarray(image).dtype}; expected is [H, W], or [I, H, W], from 0 to 1, "
            "or of uint8 or uint16"
        )
    if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
        raise DataError("image: its values are not from 0 (black) to 1 (white); scale them, as by its bits")
    return pixels.astype(np.float32)


def _affine(spacing: Sequence[float] | None, axes: str) -> np.ndarray:
    """The affine of a scan in its corner. Raises DataError."""
    if spacing is None:
        raise DataError(
            "spacing: missing; give the millimetres along the three axes, or the affine of the file"
        )
    steps = [float(mm) for mm in spacing]
    if len(steps) != 3 or not all(0 < mm < float("inf") for mm in steps):
        raise DataError(f"spacing: {list(spacing)}; expected are three numbers of millimetres, above 0")
    place = np.zeros((4, 4))
    place[3, 3] = 1
    for axis, letter in enumerate(axes):
        pair = next((n for n, pair in enumerate(("LR", "PA", "IS")) if letter in pair), None)
        if pair is None or len(axes) != 3 or place[pair, :3].any():
            raise DataError(f"axes: {axes!r}; expected is one of L/R, one of P/A and one of I/S, as RAS")
        place[pair, axis] = steps[axis] * (1 if letter in "RAS" else -1)
    if len(axes) != 3:
        raise DataError(f"axes: {axes!r}; expected is one of L/R, one of P/A and one of I/S, as RAS")
    return place


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise FederationError("data frames need pandas: pip install 'fedatlas[notebook]'") from None
    return pandas
