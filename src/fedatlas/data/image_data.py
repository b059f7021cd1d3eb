"""A site's images with findings, as training and evaluation see them: checked, prepared once, read whole.

Shapes: B batch, C classes, I input channels, H, W rows and columns.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedatlas.core.batch import Batch, ImageSample
from fedatlas.core.errors import DataError
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.seeds import generator, seed_of
from fedatlas.data import cache as store
from fedatlas.data.checks import Scan, twin_problems
from fedatlas.data.datasets.shared.listing import ImageCase, Problem, Split
from fedatlas.data.formats.picture import PictureError, read_picture
from fedatlas.data.image_index import ImageIndex, Images, findings
from fedatlas.data.inputs import Look, look_of, ranges_of
from fedatlas.data.prefetch import prefetch
from fedatlas.data.reading import digest, refuse
from fedatlas.data.sampling import count_steps
from fedatlas.learning.augment import Augmentation, augment


@dataclass(frozen=True)
class Item:
    """One image of one site. known, scored: classes that training may see, that have a truth; present: those of
    `scored` that are there."""

    title: str
    case: ImageCase
    index: ImageIndex
    known: frozenset[int]
    scored: frozenset[int]
    present: frozenset[int]
    folder: Path


class ImageData:
    """The data of a site whose labels are of whole images. cache: folder of prepared images.

    Raises FederationError if the site's names do not fit the space.
    """

    def __init__(
        self,
        index: ImageIndex,
        space: LabelSpace,
        images: Images,
        augmentation: Augmentation | None = None,
        *,
        cache: Path,
    ) -> None:
        known, scored = index.classes(space)
        items = []
        for case in sorted(index.listing.cases, key=lambda case: case.name):
            of_known, of_scored = findings(case, known), findings(case, scored)
            items.append(
                Item(
                    case.name,
                    case,
                    index,
                    of_known[0] | of_known[1],
                    of_scored[0] | of_scored[1],
                    of_scored[0],
                    Path(cache) / index.name,
                )
            )
        self._fill(index.name, [index], items, space, images, augmentation)

    def _fill(
        self,
        name: str,
        indexes: Sequence[ImageIndex],
        items: Sequence[Item],
        space: LabelSpace,
        images: Images,
        augmentation: Augmentation | None,
    ) -> None:
        self.name, self.indexes, self.space, self.images = name, list(indexes), space, images
        self.augmentation = augmentation or Augmentation()  # type: ignore[call-arg]
        self.items: dict[Split, list[Item]] = {
            split: [item for item in items if item.case.split == split]
            for split in ("train", "validation", "test")
        }
        taught = frozenset(c for split in ("train", "validation") for i in self.items[split] for c in i.known)
        self.labels = SiteLabels(space, taught)
        train = self.items["train"]
        self.n_train = len(train)
        self.n_labelled = _counts([item.known for item in train], space)
        self.n_positive = _counts([item.known & item.present for item in train], space)
        self._entries: dict[tuple[str, str], store.Entry] = {}
        self._ready = False

    @property
    def channels(self) -> int:
        return self.images.channels

    # ------------------------------------------------------------------------------------------ cache

    def prepare(self, progress: Callable[[str], None] | None = None) -> None:
        """Reads and checks every image and fills the cache, of what is not there yet.

        progress: is told of the images as they are read. Raises DataError, naming site, file and remedy.
        """
        for index in self.indexes:
            refuse([problem for problem in index.listing.problems])
        everything = [item for items in self.items.values() for item in items]
        for folder in dict.fromkeys(item.folder for item in everything):
            store.sweep(folder)
        for number, item in enumerate(everything, start=1):
            # one line per hundred: images are small
            tell = progress if progress and (number % 100 == 1 or number == len(everything)) else None
            text = f"image {item.case.name} ({number} of {len(everything)})"
            self._entry(item, (lambda text=text, tell=tell: tell(text)) if tell else None)
        for index in self.indexes:
            own = [scan for scan in self.scans() if scan.site == index.name]
            refuse(twin_problems(index.name, [(s.case, s.split, s.file, s.digest) for s in own]))
        self._ready = True

    def scans(self) -> list[Scan]:
        """Every image with the digest of its pixels, as they are in the file."""
        return [
            Scan(
                item.index.name,
                item.case.name,
                item.case.split,
                item.index.file(item.case.image),
                self._entry(item).meta["digest"],
            )
            for items in self.items.values()
            for item in items
        ]

    def _entry(self, item: Item, progress: Callable[[], None] | None = None) -> store.Entry:
        place = (item.index.name, item.case.name)
        if place not in self._entries:
            try:
                key = store.key_of({"images": asdict(self.images)}, [item.case.image])  # type: ignore[call-overload]
            except OSError as error:
                file = item.index.file(item.case.image)
                raise DataError(
                    f"site {item.index.name}: {file}: cannot be read ({error.strerror}); add it, or take its row out"
                ) from None

            def make() -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
                if progress:
                    progress()
                return prepared(item.case.image, item.index.name, self.images)

            self._entries[place] = store.fetch(item.folder / key, make)
        return self._entries[place]

    def _image(self, item: Item) -> np.ndarray:
        return self._entry(item).arrays["image"].open()

    # --------------------------------------------------------------------------------------- training

    def batches(
        self,
        rng_parts: tuple[str | int, ...],
        *,
        batch: int,
        steps: int | None = None,
        epochs: float | None = None,
        device: torch.device | str = "cpu",
    ) -> "ImageBatches":
        """Augmented training images, prefetched by one thread; everything random follows from `rng_parts`. Every
        image is visited once before any comes again."""
        steps = count_steps(steps, epochs, self.n_train, batch)
        if not self._ready:
            self.prepare()
        return ImageBatches(self, rng_parts, batch, steps, torch.device(device))

    # ------------------------------------------------------------------------------------- evaluation

    def volumes(self, split: str) -> Iterator[ImageSample]:
        """The images of a split for which there is a truth, in order of name."""
        if split not in self.items:
            raise ValueError(f"split {split!r}; allowed: {', '.join(self.items)}")
        for item in self.items[split]:
            if item.scored:
                yield ImageSample(
                    item.title,
                    item.case.patient,
                    torch.from_numpy(self._image(item).astype(np.float32)),
                    _row(item.present, self.space).float(),
                    _row(item.known, self.space),
                    _row(item.scored, self.space),
                )

    # ---------------------------------------------------------------------------------------- account

    def keep_leaks(self, folder: Path) -> None:
        """Nothing: findings have no outline that an image could give away."""

    def fingerprint(self) -> dict[str, str]:
        """ "split/image" -> a digest of all that training and evaluation read of it: pixels, and its findings."""
        if not self._ready:
            self.prepare()
        return {
            f"{split}/{item.title}": hashlib.sha256(
                repr(
                    (self._entry(item).meta["digest"], *map(sorted, (item.known, item.scored, item.present)))
                ).encode()
            ).hexdigest()
            for split, items in self.items.items()
            for item in items
        }

    def looks(self) -> dict[str, Look]:
        """Every file as it is shown -> its look."""
        everything = [item for items in self.items.values() for item in items]
        return {item.index.file(item.case.image): self._entry(item).meta["look"] for item in everything}

    def summary(self) -> dict[str, Any]:
        """Plain values for the run's record: annotated classes; images and patients per split; training images in
        which each class is annotated, present, absent; the least and largest size of the files; the ranges of what
        training and validation images look like."""
        if not self._ready:
            self.prepare()
        names = self.space.names
        counts = {
            "labelled": self.n_labelled,
            "positives": self.n_positive,
            "negatives": self.n_labelled - self.n_positive,
        }
        sizes = [self._entry(item).meta["size"] for items in self.items.values() for item in items]
        return {
            "annotated": [names[c] for c in sorted(self.labels.annotated)],
            "role": "train" if any(index.trains for index in self.indexes) else "test",
            "cases": {split: len(items) for split, items in self.items.items()},
            "patients": {
                split: len({(item.index.listing.source, item.case.patient) for item in items})
                for split, items in self.items.items()
            },
            "size": [np.min(sizes, axis=0).tolist(), np.max(sizes, axis=0).tolist()] if sizes else [],
            "inputs": ranges_of(
                self._entry(item).meta["look"]
                for split in ("train", "validation")
                for item in self.items[split]
            ),
        } | {
            what: {name: int(value) for name, value in zip(names, values, strict=True)}
            for what, values in counts.items()
        }


def prepared(path: Path, site: str, images: Images) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """An image file as the net takes it, "image" [I, H, W], and about it: digest of its pixels, look, size, notes.

    Resized by the mean of what each new pixel covers (linear weights); half precision where no bit that matters is
    lost. Raises DataError for a file that is no image, and for one whose pixels are all equal.
    """
    picture = read_picture(path, site=site, channels=images.channels)
    pixels = picture.pixels
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
            raise PictureError(
                site, path, "all of its pixels are equal", "export the image again, or take its row out"
            )
        resized = (resized - resized.mean(dtype=np.float64)) / deviation
    look = look_of(pixels, picture=True, modality=picture.modality, colour=picture.colour)
    meta = {
        "digest": digest(pixels[..., None]),
        "look": look,
        "size": list(pixels.shape[1:]),
        "notes": list(picture.notes),
    }
    return {"image": np.ascontiguousarray(resized, dtype=np.float16)}, meta


def check_images(
    index: ImageIndex, images: Images, scans: list[Scan], progress: Callable[[str], None] | None = None
) -> list[Problem]:
    """Reads every image of a site. The problems found; those of the layout are not repeated.

    scans: every image that could be read is added to it, for `checks.shared_scans`.
    """
    found: list[Problem] = []
    own: list[tuple[str, str, str, str]] = []
    noted: dict[str, list[str]] = {}
    for number, case in enumerate(index.listing.cases, start=1):
        if progress:
            progress(f"image {case.name} ({number} of {len(index.listing.cases)})")
        try:
            _, meta = prepared(case.image, index.name, images)
        except PictureError as error:
            found.append(Problem(index.name, index.file(case.image), error.what, error.remedy))
            continue
        file = index.file(case.image)
        own.append((case.name, case.split, file, meta["digest"]))
        scans.append(Scan(index.name, case.name, case.split, file, meta["digest"]))
        for note in meta["notes"]:
            noted.setdefault(note, []).append(file)
    for note, files in noted.items():
        what = f"{note} ({len(files)} images)" if len(files) > 1 else note
        found.append(Problem(index.name, files[0], what, "nothing is to be done if that is right", False))
    return found + twin_problems(index.name, own)


def _counts(sets: Sequence[frozenset[int]], space: LabelSpace) -> Tensor:
    return torch.tensor([sum(c in s for s in sets) for c in range(len(space))], dtype=torch.int64)


def _row(classes: frozenset[int], space: LabelSpace) -> Tensor:
    return torch.tensor([c in classes for c in range(len(space))])


class ImageBatches:
    """Batches of training images, to be read in order; every reading gives the same ones."""

    def __init__(
        self, data: ImageData, rng_parts: tuple[str | int, ...], batch: int, steps: int, device: torch.device
    ) -> None:
        self.data, self.parts, self.batch, self.steps, self.device = data, rng_parts, batch, steps, device
        self.train = data.items["train"]
        self.known = torch.stack([_row(item.known, data.space) for item in self.train])
        present = torch.stack([_row(item.present & item.known, data.space) for item in self.train])
        self.target = present.float()
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return prefetch(self._make, self.steps)

    def _make(self, step: int) -> Batch:
        data = self.data
        chosen = [self._choose(step * self.batch + place) for place in range(self.batch)]
        image = torch.from_numpy(np.stack([data._image(self.train[n]) for n in chosen]).astype(np.float32))
        target = self.target[chosen].to(self.device)
        moved, target = augment(
            image.to(self.device), target, data.augmentation, generator(*self.parts, "augment", step)
        )
        titles = [self.train[n].title for n in chosen]
        return Batch(moved, target, self.known[chosen].to(self.device), titles)

    def _choose(self, count: int) -> int:
        passes, place = divmod(count, len(self.train))
        if passes not in self._orders:
            rng = np.random.default_rng(seed_of(*self.parts, "order", passes))
            self._orders = {**dict(list(self._orders.items())[-1:]), passes: rng.permutation(len(self.train))}
        return int(self._orders[passes][place])


def pool_images(sites: Sequence[ImageData], name: str = "pooled") -> ImageData:
    """The union of several sites as one: batches mix all images, each with its own `known`; cases are called
    "site/case" and keep their split. The cache is shared with the sites."""
    first = sites[0]
    items = [
        Item(
            f"{site.name}/{item.title}",
            item.case,
            item.index,
            item.known,
            item.scored,
            item.present,
            item.folder,
        )
        for site in sites
        for cases in site.items.values()
        for item in cases
    ]
    pooled = ImageData.__new__(ImageData)
    indexes = [index for site in sites for index in site.indexes]
    pooled._fill(name, indexes, items, first.space, first.images, first.augmentation)
    return pooled
