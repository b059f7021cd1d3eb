"""Cases with labels of whole images: resized once, read whole.

Shapes: B batch, C classes, I input channels, H, W rows and columns.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from fedatlas.core.batch import Batch, ImageSample
from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace, known_row
from fedatlas.core.options import option, options
from fedatlas.core.seeds import generator
from fedatlas.data.checks import Scan, twin_problems
from fedatlas.data.datasets.shared.listing import Case, Problem
from fedatlas.data.formats.picture import PictureError, read_picture
from fedatlas.data.index import Naming, SiteIndex, split_validation
from fedatlas.data.inputs import look_of
from fedatlas.data.reading import digest
from fedatlas.data.site_data import Item, Key, Prepared, SiteBatches, SiteData
from fedatlas.learning.augment import Augmentation, augment


@options
class Images:
    """From an image file to the input of the net, where labels are of whole images."""

    size: tuple[int, int] = option((224, 224), "Rows and columns that every image is resized to.")
    channels: Literal[1, 3] = option(1, "1: grey, colour is turned into its luma; 3: grey is repeated.")
    normalise: Literal["image", "none"] = option(
        "image", "image: every image to mean 0 and deviation 1, (x - mean) / std; none: 0 black to 1 white."
    )

    def __post_init__(self) -> None:
        if min(self.size) < 8:
            raise FederationError(f"images: size is {list(self.size)}; rows and columns are 8 or more")


class ImageData(SiteData):
    """The data of a site whose labels are of whole images; arguments as of `SiteData`."""

    word = "image"
    progress_every = 100
    leave_out = "take its row out"

    def __init__(
        self,
        index: SiteIndex,
        space: LabelSpace,
        images: Images,
        augmentation: Augmentation | None = None,
        *,
        cache: Path,
    ) -> None:
        self.images = images
        by_name = replace(index, cases=tuple(sorted(index.cases, key=lambda case: case.name)))
        super().__init__(index, space, split_validation(by_name, seed=0, fraction=0), augmentation, cache)

    def _classes(self, case: Case, naming: tuple[Naming, Naming]) -> tuple[frozenset[int], frozenset[int]]:
        known, scored = (frozenset.union(*names.findings(case)) for names in naming)
        return known, scored if case.split == "test" else known

    def _present(self, item: Item) -> frozenset[int]:
        return item.naming[1].findings(item.case)[0]

    def _layout_problems(self, index: SiteIndex) -> list[Problem]:
        return list(index.problems)

    def _key(self, item: Item) -> Key:
        return "", {"images": asdict(self.images)}, item.case.images  # type: ignore[call-overload]

    def _prepare(self, item: Item) -> Prepared:
        return prepared(item.case.images[0], item.index.name, self.images)

    def _batches(self, *given: Any, **how: Any) -> "ImageBatches":
        return ImageBatches(*given, **how)

    def _pixels(self, item: Item) -> np.ndarray:
        return self._entry(item).arrays["image"].open()

    def _volume(self, item: Item) -> ImageSample | None:
        if not item.scored:
            return None
        return ImageSample(
            item.title,
            item.case.patient,
            torch.from_numpy(self._pixels(item).astype(np.float32)),
            torch.tensor(known_row(self.space, self._present(item))).float(),
            torch.tensor(known_row(self.space, item.known)),
            torch.tensor(known_row(self.space, item.scored)),
        )

    def _marks(self, item: Item) -> tuple[Any, ...]:
        classes = map(sorted, (item.known, item.scored, self._present(item)))
        return self._entry(item).meta["digest"], *classes

    def _numbers(self) -> dict[str, Any]:
        """Training images in which each class is present, and absent; patients per split; the least and largest size of
        the files."""
        sizes = [self._entry(item).meta["size"] for item in self.everything]
        counts = {"positives": self.n_positive, "negatives": self.n_labelled - self.n_positive}
        return {
            "patients": {
                split: len({(item.index.source, item.case.patient) for item in items})
                for split, items in self.items.items()
            },
            "size": [np.min(sizes, axis=0).tolist(), np.max(sizes, axis=0).tolist()] if sizes else [],
        } | {
            what: {name: int(value) for name, value in zip(self.space.names, values, strict=True)}
            for what, values in counts.items()
        }


def prepared(path: Path, site: str, images: Images) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """An image file as the net takes it, "image" [I, H, W], and about it: digest of its pixels, look, size, notes.

    Resized by the mean of what each new pixel covers (linear weights); half precision where no bit that matters is
    lost. Raises DataError for a file that is no image, and for one whose pixels are all equal.
    """
    picture = read_picture(path, site=site, channels=images.channels)
    pixels = picture.pixels
    try:
        image = on_grid(pixels, images)
    except DataError as error:
        raise PictureError(site, path, str(error), "export the image again, or take its row out") from None
    look = look_of(pixels, picture=True, modality=picture.modality, colour=picture.colour)
    meta = {
        "digest": digest(pixels[..., None]),
        "look": look,
        "size": list(pixels.shape[1:]),
        "notes": list(picture.notes),
    }
    return {"image": image}, meta


def on_grid(pixels: np.ndarray, images: Images) -> np.ndarray:
    """Pixels [I, H, W] float32 from 0 to 1 as the net takes them, float16 of the size and channels of `images`. Raises DataError
    where they are all equal, or of another number of channels."""
    if len(pixels) != images.channels:
        raise DataError(f"of {len(pixels)} channels, {images.channels} are expected")
    rows, columns = images.size
    resized = np.stack(
        [
            np.asarray(Image.fromarray(channel).resize((columns, rows), Image.Resampling.BILINEAR))
            for channel in pixels.astype(np.float32)
        ]
    )
    if images.normalise == "image":
        deviation = float(resized.std(dtype=np.float64))
        if deviation < 1e-6:
            raise DataError("all of its pixels are equal")
        resized = (resized - resized.mean(dtype=np.float64)) / deviation
    return np.ascontiguousarray(resized, dtype=np.float16)


def check_images(
    index: SiteIndex, images: Images, scans: list[Scan], progress: Callable[[str], None] | None = None
) -> list[Problem]:
    """Reads every image of a site. The problems found; those of the layout are not repeated.

    scans: every image that could be read is added to it, for `checks.shared_scans`.
    """
    found: list[Problem] = []
    own: list[tuple[str, str, str, str]] = []
    noted: dict[str, list[str]] = {}
    for number, case in enumerate(index.cases, start=1):
        if progress:
            progress(f"image {case.name} ({number} of {len(index.cases)})")
        try:
            _, meta = prepared(case.images[0], index.name, images)
        except PictureError as error:
            found.append(Problem(index.name, index.file(case.images[0]), error.what, error.remedy))
            continue
        file = index.file(case.images[0])
        own.append((case.name, case.split, file, meta["digest"]))
        scans.append(Scan(index.name, case.name, case.split, file, meta["digest"]))
        for note in meta["notes"]:
            noted.setdefault(note, []).append(file)
    for note, files in noted.items():
        what = f"{note} ({len(files)} images)" if len(files) > 1 else note
        found.append(Problem(index.name, files[0], what, "nothing is to be done if that is right", False))
    return found + twin_problems(index.name, own)


class ImageBatches(SiteBatches):
    """Batches of training images; every image is visited once before any comes again."""

    def __init__(
        self, data: ImageData, rng_parts: tuple[str | int, ...], batch: int, steps: int, device: torch.device
    ) -> None:
        super().__init__(data, rng_parts, batch, steps, device)
        self.data = data
        there = [known_row(data.space, data._present(item) & item.known) for item in self.train]
        self.target = torch.tensor(there).float()

    def _make(self, step: int) -> Batch:
        data, train = self.data, self.train
        chosen = [self._in_turn(step * self.batch + place) for place in range(self.batch)]
        image = torch.from_numpy(np.stack([data._pixels(train[n]) for n in chosen]).astype(np.float32))
        target = self.target[chosen].to(self.device)
        moved, target = augment(
            image.to(self.device), target, data.augmentation, generator(*self.parts, "augment", step)
        )
        return Batch(moved, target, self.known[chosen].to(self.device), [train[n].title for n in chosen])
