"""A site's cases as training and evaluation see them: checked, preprocessed once, read as patches.

Shapes: B batch, C classes, I input channels, X, Y, Z the axes of a scan's file, *S the federation's grid.
"""

import copy
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch, Volume
from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace, SiteLabels, known_row
from fedatlas.core.seeds import generator, seed_of
from fedatlas.data import cache as store
from fedatlas.data.checks import (
    Scan,
    check_federation,
    check_site,
    drawn_in,
    empty_site,
    layout_problems,
    leak_in,
    twin_problems,
    untaught_site,
)
from fedatlas.data.datasets.shared.listing import Case, Problem, Split
from fedatlas.data.index import (
    Naming,
    Reference,
    SiteConfig,
    SiteIndex,
    label_space_of,
    naming_of,
    read_site,
    split_validation,
)
from fedatlas.data.inputs import Look, look_of, ranges_of
from fedatlas.data.leaks import LEAKS, Leak, slice_of
from fedatlas.data.prefetch import prefetch
from fedatlas.data.reading import Label, digest, read_case, refuse
from fedatlas.data.sampling import ClassVoxels, class_voxels, count_steps, cut_case
from fedatlas.data.transforms import (
    Geometry,
    Preprocessing,
    Sampling,
    as_stored,
    geometry_of,
    image_to_grid,
    labels_to_grid,
    require_grid,
    require_picture,
    restore,
)
from fedatlas.learning.augment import Augmentation, augment, augment_along
from fedatlas.learning.inference import Inference, probabilities

__all__ = [
    "Case",
    "CaseVolume",
    "Problem",
    "Reference",
    "SiteConfig",
    "SiteData",
    "SiteIndex",
    "check_federation",
    "check_site",
    "label_space_of",
    "pool",
    "read_site",
    "split_validation",
]

NOT_IN_KEY = ("patch", "context")
"""Options of Preprocessing that do not change what is kept on disk."""


@dataclass(frozen=True)
class Item:
    """One case of one site, in one split."""

    title: str
    case: Case
    index: SiteIndex
    naming: tuple[Naming, Naming]
    split: Split
    folder: Path

    @property
    def known(self) -> frozenset[int]:
        """The classes annotated in the case."""
        return self.naming[0].known(self.case.annotated)

    @property
    def scored(self) -> frozenset[int]:
        """The classes for which there is a truth."""
        return self.known | self.naming[1].known(self.case.reference_annotated)


class SiteData:
    """The data of a site.

    cache: folder of preprocessed cases, shared by all sites and experiments.
    validation: part of the training patients that is kept for validation.

    Raises FederationError if the site's label names do not fit the space.
    """

    def __init__(
        self,
        index: SiteIndex,
        space: LabelSpace,
        preprocessing: Preprocessing,
        sampling: Sampling | None = None,
        augmentation: Augmentation | None = None,
        *,
        seed: int = 0,
        validation: float = 0.2,
        cache: Path,
    ) -> None:
        naming = naming_of(index, space)
        splits = split_validation(index, seed=seed, fraction=validation)
        folder = Path(cache) / index.name
        items = [
            Item(case.name, case, index, naming, split, folder)
            for split, cases in splits.items()
            for case in cases
        ]
        self._fill(index.name, [index], items, space, preprocessing, sampling, augmentation)

    def _fill(
        self,
        name: str,
        indexes: Sequence[SiteIndex],
        items: Sequence[Item],
        space: LabelSpace,
        preprocessing: Preprocessing,
        sampling: Sampling | None,
        augmentation: Augmentation | None,
    ) -> None:
        self.name, self.indexes, self.space, self.preprocessing = name, list(indexes), space, preprocessing
        self.sampling = sampling or Sampling()  # type: ignore[call-arg]
        self.augmentation = augmentation or Augmentation()  # type: ignore[call-arg]
        self.items: dict[Split, list[Item]] = {
            split: [item for item in items if item.split == split]
            for split in ("train", "validation", "test")
        }
        annotated = frozenset(
            c for split in ("train", "validation") for i in self.items[split] for c in i.known
        )
        self.labels = SiteLabels(space, annotated)
        train = self.items["train"]
        self.n_train = len(train)
        rows = [known_row(space, item.known) for item in train]
        self.n_labelled = torch.tensor(rows, dtype=torch.int64).reshape(-1, len(space)).sum(0)
        self._entries: dict[tuple[str, str], store.Entry] = {}
        self._ready = False

    @property
    def n_positive(self) -> Tensor:
        """[C] int64: training cases in which class c is annotated and drawn. Prepares if need be."""
        counts = torch.zeros(len(self.space), dtype=torch.int64)
        for item in self.items["train"]:
            for c, n in self._entry(item).meta["voxels"].items():
                counts[int(c)] += n > 0
        return counts

    @property
    def channels(self) -> int:
        """Images per case, before slices get their neighbours."""
        return self.indexes[0].channels

    # ---------------------------------------------------------------------------------------- cache

    def prepare(self, progress: Callable[[str], None] | None = None) -> None:
        """Reads and checks every case and fills the cache, of what is not there yet.

        progress: is told of every case that is read. Raises DataError, naming site, file and remedy, for
        everything that `check_site` finds fatal.
        """
        for index in self.indexes:
            naming = naming_of(index, self.space)[0]
            refuse([*layout_problems(index), *empty_site(index), *untaught_site(index, self.space, naming)])
        everything = [item for items in self.items.values() for item in items]
        for folder in dict.fromkeys(item.folder for item in everything):
            store.sweep(folder)
        for number, item in enumerate(everything, start=1):
            text = f"case {item.case.name} ({number} of {len(everything)})"
            self._entry(item, (lambda text=text: progress(text)) if progress else None)
            if item.split != "train" and item.case.fuller:
                self._reference(item)
        self._require_neighbours(everything)
        scans = self._scans()
        for index in self.indexes:
            refuse(twin_problems(index.name, [scan[1:] for scan in scans if scan.site == index.name]))
        self._ready = True

    def _require_neighbours(self, items: Sequence[Item]) -> None:
        """Raises DataError where a patch takes more neighbouring slices than any scan has."""
        context = self.preprocessing.context
        most = max((self._entry(item).arrays["image"].shape[-1] for item in items), default=0)
        if len(self.preprocessing.patch) == 2 and items and context > most:
            raise DataError(
                f"site {self.name}: `preprocessing.context` gives {context} slices on each side of a slice, and its "
                f"longest scan has {most} in all on the federation's grid; lower it"
            )

    def scans(self) -> list[Scan]:
        """Every scan with the digest of its voxels, for `shared_scans`. Prepares if need be."""
        if not self._ready:
            self.prepare()
        return self._scans()

    def _scans(self) -> list[Scan]:
        return [
            Scan(
                i.index.name,
                i.case.name,
                i.split,
                i.index.file(i.case.images[0]),
                self._entry(i).meta["digest"],
            )
            for items in self.items.values()
            for i in items
        ]

    def _entry(self, item: Item, progress: Callable[[], None] | None = None) -> store.Entry:
        """The cached image and target of a case."""
        place = (item.index.name, item.case.name + "/" + item.split)
        if place not in self._entries:
            files = [*item.case.images, *item.case.label_files]
            key = self._key(item, files, self._content(item) | {"annotated": sorted(item.known)})

            def make() -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
                if progress:
                    progress()
                return self._preprocess(item)

            self._entries[place] = store.fetch(item.folder / f"{_safe(item.case.name)}-{key}", make)
        return self._entries[place]

    def _content(self, item: Item) -> dict[str, Any]:
        plain = {f.name: getattr(self.preprocessing, f.name) for f in fields(self.preprocessing)}  # type: ignore[arg-type]
        return {
            "preprocessing": {name: value for name, value in plain.items() if name not in NOT_IN_KEY},
            "integers": sorted(item.naming[0].integers.items()),
            "names": self.space.names,
            "exclusive": self.space.exclusive,
            "channels": item.index.channels,
        } | item.case.content

    def _key(self, item: Item, files: Sequence[Path], content: Mapping[str, Any]) -> str:
        try:
            return store.key_of(content, files)
        except OSError as error:
            file = item.index.file(Path(error.filename)) if error.filename else item.case.name
            raise DataError(
                f"site {item.index.name}: {file}: cannot be read ({error.strerror}); add it, or take the case out"
            ) from None

    def _preprocess(self, item: Item) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        raw = read_case(item.index, item.case, self.space, item.naming)
        refuse(raw.problems)
        assert raw.image is not None
        require_picture(item.case.images[0], self.preprocessing, f"site {item.index.name}: ")
        geometry = geometry_of(raw.image.shape[1:], raw.affine, self.preprocessing)
        where = f"site {item.index.name}: {item.index.file(item.case.images[0])}"
        require_grid(where, geometry, self.preprocessing, len(raw.image) + 1)
        image = image_to_grid(raw.image, geometry, self.preprocessing)
        if not np.isfinite(image).all():
            raise DataError(f"{where}: its intensities overflow; give a window")
        if image.size > len(image) and not np.ptp(image, axis=(1, 2, 3)).any():
            window = self.preprocessing.window
            clipped = f" after clipping to the window {list(window)}" if window else ""
            raise DataError(
                f"{where}: constant on the federation's grid{clipped}: its values are {raw.image.min():g} to "
                f"{raw.image.max():g}; correct `preprocessing`, or take the case out"
            )
        label = raw.label or _nothing(geometry, self.space)
        target = labels_to_grid(label.voxels, geometry, self.space)
        rows, spans = class_voxels(target, sorted(label.known), self.space.exclusive)
        arrays = {
            "image": np.asfortranarray(as_stored(image)),
            "target": np.asfortranarray(target),
            "voxels": rows,
        }
        return arrays, {
            "digest": digest(raw.image),
            "leak": leak_in(raw, self.space),
            "label": _label_digest(label.voxels),
            "look": look_of(raw.image, spacing=None if raw.about else geometry.turned_spacing, **raw.about),
            "affine": raw.affine.tolist(),
            "shape": list(geometry.shape),
            "spacing": list(geometry.spacing),
            "grid_spacing": list(geometry.grid_spacing),
            "axes": geometry.axes,
            "voxels": {str(c): n for c, n in label.counts.items()},
            "spans": {str(c): span for c, span in spans.items()},
        }

    def _reference(self, item: Item) -> store.Entry:
        """The cached truth on the federation's grid, where a reference says more than the label."""
        place = (item.index.name, item.case.name + "/" + item.split + "/reference")
        if place not in self._entries:
            reference = item.case.reference
            files = [item.case.images[0], *([reference] if reference else []), *item.case.label_files]
            content = self._content(item) | {
                "annotated": sorted(item.known),
                "reference": sorted(item.naming[1].integers.items()),
                "scored": sorted(item.naming[1].known(item.case.reference_annotated)),
            }

            def make() -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
                truth, geometry = self._raw_truth(item)
                target = np.asfortranarray(labels_to_grid(truth, geometry, self.space))
                return {"target": target}, {"label": _label_digest(truth)}

            key = self._key(item, files, content)
            self._entries[place] = store.fetch(item.folder / f"{_safe(item.case.name)}-{key}", make)
        return self._entries[place]

    def _raw_truth(self, item: Item) -> tuple[np.ndarray, Geometry]:
        """The truth on the scan's grid: the reference, and from the label what the reference does not hold."""
        raw = read_case(item.index, item.case, self.space, item.naming, reference=True)
        refuse(raw.problems)
        assert raw.image is not None
        geometry = geometry_of(raw.image.shape[1:], raw.affine, self.preprocessing)
        if raw.reference is None:
            return (raw.label or _nothing(geometry, self.space)).voxels, geometry
        truth = raw.reference.voxels.copy()
        for c in sorted((raw.label.known if raw.label else frozenset()) - raw.reference.known):
            assert raw.label is not None
            if self.space.exclusive:
                truth[raw.label.voxels == c] = c
            else:
                truth[c] = raw.label.voxels[c]
        return truth, geometry

    def leaks(self) -> dict[str, Leak]:
        """Case -> how far its image gives labels away, where it is enough for a warning, the worst first. By its
        label alone; `check_site` looks at the reference, too. Prepares if need be."""
        if not self._ready:
            self.prepare()
        found = {}
        for item in (item for items in self.items.values() for item in items):
            meta = self._entry(item).meta
            leak = meta["leak"] and Leak(*meta["leak"])
            if leak and leak.told:
                found[item.title] = leak
        return dict(sorted(found.items(), key=lambda of: (-of[1].worst, of[0])))

    def keep_leaks(self, folder: Path) -> None:
        """Writes the cases whose images give labels away into the file leaks.npz of a folder, for the report: cases [n]
        and texts [n], the worst first, and of the first the slice that gives most away, see `slice_of`. There must be one."""
        leaks = self.leaks()
        worst = next(iter(leaks))
        item = next(i for items in self.items.values() for i in items if i.title == worst)
        raw = read_case(item.index, item.case, self.space, item.naming)
        drawn = drawn_in(raw, self.space)
        assert raw.image is not None and drawn is not None
        shown: dict[str, Any] = slice_of(raw.image[0], drawn, raw.affine, leaks[worst])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LEAKS).open("wb") as file:
            np.savez_compressed(
                file, cases=list(leaks), texts=[str(leak) for leak in leaks.values()], **shown
            )

    # --------------------------------------------------------------------------------------- training

    def batches(
        self,
        rng_parts: tuple[str | int, ...],
        *,
        batch: int,
        steps: int | None = None,
        epochs: float | None = None,
        device: torch.device | str = "cpu",
        along: "CaseMaps | None" = None,
    ) -> "PatchBatches":
        """Augmented training patches, prefetched by one thread; everything random follows from `rng_parts`.

        An epoch is as many patches as there are training cases. Patches that are not class-balanced visit every
        case once before any comes again.

        along: what `predict_cases` kept, to be given beside the patches; it changes nothing else of them.
        """
        steps = count_steps(steps, epochs, self.n_train, batch)
        if not self._ready:
            self.prepare()
        return PatchBatches(self, rng_parts, batch, steps, torch.device(device), along)

    def predict_cases(
        self,
        net: nn.Module,
        folder: Path,
        *,
        overlap: float,
        windows: int,
        keep: int | None,
        partly: bool,
        gigabytes: float,
    ) -> "CaseMaps":
        """What a net says of every training case, unvaried, in files in `folder`: see `core.contract.Site.with_predictions`."""
        if not self._ready:
            self.prepare()
        train = self.items["train"]
        needed = [
            n
            for n, item in enumerate(train)
            if not (partly and len(item.known) == len(self.space.foreground))
        ]
        images = {n: self._entry(train[n]).arrays["image"] for n in needed}
        maps = CaseMaps(folder, self.space, keep)
        size = sum(int(np.prod(image.shape[1:])) for image in images.values()) * maps.bytes_per_voxel
        if size > gigabytes * 1e9:
            raise FederationError(
                f"site {self.name}: predictions of {len(needed)} training cases take {size / 1e9:.1f} GB, "
                f"{gigabytes:g} are allowed; allow more, keep fewer classes per voxel, or predict each patch"
            )
        free = shutil.disk_usage(folder).free
        if size > free:
            raise DataError(
                f"site {self.name}: predictions of {len(needed)} training cases take {size / 1e9:.1f} GB, "
                f"{folder.parent} has {free / 1e9:.1f} left; free space, keep fewer classes per voxel, or predict "
                "each patch"
            )
        how = Inference(overlap=overlap, batch=windows)  # type: ignore[call-arg]
        patch, context = self.preprocessing.patch, self.preprocessing.context

        def count(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            maps.windows += len(given[0])

        counting = net.register_forward_pre_hook(count)
        try:
            for n, image in images.items():
                voxels = torch.from_numpy(np.ascontiguousarray(image.open(), dtype=np.float32))
                maps.put(n, probabilities(net, voxels, patch, context, how, exclusive=self.space.exclusive))
        except OSError as error:
            raise DataError(
                f"site {self.name}: predictions cannot be written to {folder.parent} ({error.strerror or error})"
            ) from None
        finally:
            counting.remove()
        return maps

    # ------------------------------------------------------------------------------------- evaluation

    def volumes(self, split: str) -> Iterator[Volume]:
        """The cases of a split for which there is a label or a reference, one at a time, in order of name."""
        if split not in self.items:
            raise ValueError(f"split {split!r}; allowed: {', '.join(self.items)}")
        for index in self.indexes:
            refuse(layout_problems(index))
        for item in self.items[split]:
            if item.scored or any(self._scored_findings(item)):
                yield self._volume(item)

    def _told(self, item: Item, scoring: bool = False) -> dict[int, bool]:
        """The findings that the data set itself tells of a case, and whether each is present. scoring: of a test case
        of a site with `score_all`, also those that `annotated` leaves out."""
        index, found = item.index, {}
        names = index.used_findings
        if scoring and index.scores_all and item.split == "test":
            names = (*(name for name in index.findings if name not in names), *names)
        told = dict(item.case.findings)
        for name in names:
            ours = index.aliases.get(name, name)
            if ours in self.space.findings and name in told:
                found[self.space.findings.index(ours)] = told[name]
        return found

    def _findings(self, item: Item) -> tuple[list[bool], list[bool]]:
        """[F] the findings of a case, and [F] which of them training may see: those that the data set tells, and those
        about an annotated class, which are present where a voxel of it is. Where the data set tells one that its mask
        contradicts, the data set's word counts; `check` notes it."""
        told, about = self._told(item), self.space.finding_of
        voxels = self._entry(item).meta["voxels"] if about else {}
        present = [told[f] if f in told else voxels.get(str(c), 0) > 0 for f, c in enumerate(about)]
        known = [(f in told and item.index.trains) or c in item.known for f, c in enumerate(about)]
        return present, known

    def _scored_findings(self, item: Item) -> list[bool]:
        """[F] the findings for which there is a truth."""
        told = self._told(item, scoring=True)
        return [f in told or c in item.scored for f, c in enumerate(self.space.finding_of)]

    def _volume(self, item: Item) -> "CaseVolume":
        entry = self._entry(item)
        lesions = frozenset(self.space.organ_of) if item.index.whole else frozenset()
        (present, known), scored = self._findings(item), self._scored_findings(item)
        told = self._told(item, scoring=True)
        present = [told[f] if f in told and not known[f] else here for f, here in enumerate(present)]
        unread = [f for f, here in enumerate(scored) if here and f not in told and not known[f]]
        truth = self._raw_truth(item)[0] if unread else None
        for f in unread:
            c = self.space.finding_of[f]
            assert truth is not None and c is not None
            present[f] = bool((truth == c if self.space.exclusive else truth[c]).any())
        image = torch.from_numpy(np.ascontiguousarray(entry.arrays["image"].open(), dtype=np.float32))
        geometry = geometry_of(entry.meta["shape"], np.asarray(entry.meta["affine"]), self.preprocessing)
        return CaseVolume(
            case=item.title,
            image=image,
            spacing=geometry.grid_spacing,
            raw_spacing=geometry.spacing,
            known=torch.tensor(known_row(self.space, item.known)),
            scored=torch.tensor(known_row(self.space, item.scored - lesions)),
            whole=item.index.whole,
            finding=torch.tensor(present, dtype=torch.float32),
            finding_known=torch.tensor(known, dtype=torch.bool),
            finding_scored=torch.tensor(scored, dtype=torch.bool),
            geometry=geometry,
            source=self,
            item=item,
        )

    # ---------------------------------------------------------------------------------------- account

    def fingerprint(self) -> dict[str, str]:
        """ "split/case" -> a digest of all that training and evaluation read of it: voxels of image and labels, and what
        is annotated. Prepares if need be."""
        if not self._ready:
            self.prepare()
        found = {}
        for split, items in self.items.items():
            for item in items:
                meta = self._entry(item).meta
                truth = self._reference(item).meta["label"] if split != "train" and item.case.fuller else ""
                told = sorted(item.known), sorted(item.scored), sorted(item.case.findings)
                parts = (meta["digest"], meta["label"], meta["affine"], truth, told)
                found[f"{split}/{item.title}"] = hashlib.sha256(repr(parts).encode()).hexdigest()
        return found

    def looks(self) -> dict[str, Look]:
        """The first file of every case as it is shown -> its look. Prepares if need be."""
        if not self._ready:
            self.prepare()
        everything = [item for items in self.items.values() for item in items]
        return {item.index.file(item.case.images[0]): self._entry(item).meta["look"] for item in everything}

    def summary(self) -> dict[str, Any]:
        """Plain values for the run's record: annotated classes, cases per split, training cases and voxels per
        annotated class, the spacings (mm), orientations and shapes of the files, how many images give labels away, and
        the ranges of what training and validation cases look like. Prepares if need be."""
        if not self._ready:
            self.prepare()
        voxels = {self.space.names[c]: 0 for c in sorted(self.labels.annotated)}
        for item in self.items["train"]:
            for c, n in self._entry(item).meta["voxels"].items():
                voxels[self.space.names[int(c)]] += n
        metas = [self._entry(item).meta for items in self.items.values() for item in items]
        return {
            "annotated": list(voxels),
            "role": "train" if any(index.trains for index in self.indexes) else "test",
            "cases": {split: len(items) for split, items in self.items.items()},
            "labelled": {self.space.names[c]: int(self.n_labelled[c]) for c in self.space.foreground},
            "findings": self._finding_counts(),
            "voxels": voxels,
            "spacing": _unique([round(mm, 3) for mm in meta["spacing"]] for meta in metas),
            "orientation": _unique(meta["axes"] for meta in metas),
            "shape": _unique(meta["shape"] for meta in metas),
            "leaks": len(self.leaks()),
            "inputs": ranges_of(
                self._entry(item).meta["look"]
                for split in ("train", "validation")
                for item in self.items[split]
            ),
        }

    def _finding_counts(self) -> dict[str, dict[str, int]]:
        """Finding -> in how many training cases it is annotated, and present."""
        rows = [self._findings(item) for item in self.items["train"]]
        return {
            name: {
                "labelled": sum(known[f] for _, known in rows),
                "present": sum(known[f] and present[f] for present, known in rows),
            }
            for f, name in enumerate(self.space.findings)
        }


def _unique(values: Any) -> list[Any]:
    found = list(values)
    return sorted(value for number, value in enumerate(found) if value not in found[:number])


def _label_digest(voxels: np.ndarray) -> str:
    """A hash of labels, class index [X, Y, Z] or masks [C, X, Y, Z]."""
    return digest(voxels[None] if voxels.ndim == 3 else voxels)


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:80]


def _nothing(geometry: Geometry, space: LabelSpace) -> Label:
    shape = geometry.shape if space.exclusive else (len(space), *geometry.shape)
    return Label(np.zeros(shape, dtype=np.uint8), frozenset(), {}, ())


@dataclass
class CaseVolume:
    """One case for evaluation, as `core.batch.Volume`."""

    case: str
    image: Tensor
    spacing: tuple[float, ...]
    raw_spacing: tuple[float, ...]
    known: Tensor
    scored: Tensor
    whole: bool
    finding: Tensor
    finding_known: Tensor
    finding_scored: Tensor
    geometry: Geometry
    source: SiteData
    item: Item

    def truth(self, grid: str) -> np.ndarray:
        """See `Volume`. On the federation's grid it is what the label files become there."""
        if grid == "original":
            return self.source._raw_truth(self.item)[0]
        if grid != "federation":
            raise ValueError(f"grid {grid!r}; allowed: federation, original")
        fuller = self.item.case.fuller
        entry = self.source._reference(self.item) if fuller else self.source._entry(self.item)
        return np.ascontiguousarray(entry.arrays["target"].open())

    def restore(self, probabilities: Tensor) -> np.ndarray:
        """See `transforms.restore`."""
        return restore(probabilities, self.geometry, self.source.space.exclusive)


class CaseMaps:
    """Probabilities of training cases, each by its number, in files that are read a patch at a time.

    A probability p is kept in bfloat16 as p or, above 1/2, as -(1 - p): so the 8 bits count from the nearer end.
    keep: the largest probabilities of a voxel that are kept; of an exclusive space, what they leave is shared evenly by
    the other classes. windows: how many the net was given.
    """

    def __init__(self, folder: Path, space: LabelSpace, keep: int | None) -> None:
        self.folder, self.space, self.windows = folder, space, 0
        self.keep = keep if keep is not None and keep < len(space) else None
        self.number = np.dtype(np.uint8 if len(space) <= 256 else np.int16)
        self.bytes_per_voxel = 2 * len(space) if self.keep is None else (2 + self.number.itemsize) * self.keep
        self._files: dict[int, list[store.Stored]] = {}

    def put(self, number: int, p: Tensor) -> None:
        """Keeps p [C, *S] float32. Raises OSError where it cannot be written."""
        arrays = {}
        if self.keep is not None:
            p, which = p.topk(self.keep, 0)
            arrays["classes"] = which.numpy().astype(self.number)
        folded = torch.where(p > 0.5, -(1 - p), p).to(torch.bfloat16)
        arrays["values"] = folded.view(torch.int16).numpy()
        self._files[number] = []
        for name in sorted(arrays, reverse=True):
            path, array = self.folder / f"{number}-{name}", np.asfortranarray(arrays[name])
            array.T.tofile(path)
            form = str(path), array.dtype.str, array.shape, "F", 0
            self._files[number].append(store.Stored(*form))

    def empty(self, patch: Sequence[int]) -> list[np.ndarray]:
        """What `cut` fills: values, and with `keep` their classes, each [C or keep, *P]."""
        if self.keep is None:
            return [np.zeros((len(self.space), *patch), np.int16)]
        return [np.zeros((self.keep, *patch), dtype) for dtype in (np.int16, self.number)]

    def cut(
        self,
        number: int,
        target: np.ndarray,
        patch: Sequence[int],
        centre: np.ndarray | None,
        rng: np.random.Generator,
        out: list[np.ndarray],
    ) -> None:
        """The patch that `cut_case` cuts from the case with an equal `rng`, which is not moved. Nothing for a case
        that was not predicted."""
        stored_of_case = self._files.get(number)
        for stored, place in zip(stored_of_case, out, strict=True) if stored_of_case else ():
            nowhere = np.empty((*target.shape[: target.ndim - len(stored.shape) + 1], *patch), target.dtype)
            cut_case(stored.open(), target, patch, 0, centre, copy.deepcopy(rng), place, nowhere)

    def open(self, cut: Sequence[Sequence[np.ndarray]], device: torch.device) -> Tensor:
        """Probabilities [B, C, *P] float32 of B patches as they were cut; beyond a case's end they are 0."""
        parts = [torch.from_numpy(np.stack(part)).to(device) for part in zip(*cut, strict=True)]
        folded = parts[0].view(torch.bfloat16).float()
        p = folded + folded.signbit()
        if self.keep is None:
            return p
        rest = torch.zeros_like(p[:, :1])
        if self.space.exclusive:
            kept = p.sum(1, keepdim=True)
            rest = torch.where(kept > 0, 1 - kept, 0).clamp(min=0) / (len(self.space) - self.keep)
        return rest.expand(-1, len(self.space), *p.shape[2:]).scatter(1, parts[1].long(), p)

    def settled(self, p: Tensor) -> Tensor:
        """Probabilities [B, C, *P] after they were moved: of an exclusive space their sum is 1 again, and where there
        is nothing, beyond a case's end, they are those of background."""
        if not self.space.exclusive:
            return p
        total = p.sum(1, keepdim=True)
        p = p / total.clamp(min=1e-30)
        p[:, :1] += total == 0
        return p


class PatchBatches:
    """Batches of training patches, to be read in order; every reading gives the same ones."""

    def __init__(
        self,
        data: SiteData,
        rng_parts: tuple[str | int, ...],
        batch: int,
        steps: int,
        device: torch.device,
        along: CaseMaps | None = None,
    ) -> None:
        self.along = along
        self.data, self.parts, self.batch, self.steps, self.device = data, rng_parts, batch, steps, device
        self.train = data.items["train"]
        self.entries = [data._entry(item) for item in self.train]
        self.known = torch.tensor([known_row(data.space, item.known) for item in self.train])
        self.spacing = torch.tensor([entry.meta["grid_spacing"] for entry in self.entries])
        self.holders: dict[int, list[int]] = {
            c: [n for n, entry in enumerate(self.entries) if str(c) in entry.meta["spans"]]
            for c in sorted(data.labels.annotated)
        }
        self.holders = {c: cases for c, cases in self.holders.items() if cases}
        self._orders: dict[int, np.ndarray] = {}
        self._opened: dict[tuple[int, str], np.ndarray] = {}
        self._voxels: dict[tuple[int, int], ClassVoxels] = {}
        self.finding: Tensor | None = None
        self.finding_known: Tensor | None = None
        if data.space.findings:
            rows = [data._findings(item) for item in self.train]
            self.finding = torch.tensor([present for present, _ in rows], dtype=torch.float32)
            self.finding_known = torch.tensor([known for _, known in rows])

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return prefetch(self._make, self.steps)

    def _make(self, step: int) -> Batch:
        data, patch = self.data, self.data.preprocessing.patch
        rng = np.random.default_rng(seed_of(*self.parts, "patches", step))
        channels = data.channels * (2 * data.preprocessing.context + 1 if len(patch) == 2 else 1)
        image = np.empty((self.batch, channels, *patch), dtype=np.float32)
        masks = () if data.space.exclusive else (len(data.space),)
        target = np.empty(
            (self.batch, *masks, *patch), dtype=np.int64 if data.space.exclusive else np.float32
        )
        chosen = []
        maps = [self.along.empty(patch) for _ in range(self.batch)] if self.along else []
        for place in range(self.batch):
            number, centre = self._choose(step * self.batch + place, rng)
            labels_of_case = self._array(number, "target")
            if self.along:
                self.along.cut(number, labels_of_case, patch, centre, rng, maps[place])
            cut_case(
                self._array(number, "image"),
                labels_of_case,
                patch,
                data.preprocessing.context,
                centre,
                rng,
                image[place],
                target[place],
            )
            chosen.append(number)
        given = torch.from_numpy(image).to(self.device), torch.from_numpy(target).to(self.device)
        varied = data.augmentation, generator(*self.parts, "augment", step)
        how: dict[str, Any] = {
            "spacing": self.spacing[chosen][:, : len(patch)],
            "images": data.channels,
        }
        said = None
        if self.along:
            moved, labels, said = augment_along(*given, self.along.open(maps, self.device), *varied, **how)
            said = self.along.settled(said)
        else:
            moved, labels = augment(*given, *varied, **how)
        titles = [self.train[number].title for number in chosen]
        batch = Batch(moved, labels, self.known[chosen].to(self.device), titles, along=said)
        if self.finding is not None and self.finding_known is not None:
            batch.finding = self.finding[chosen].to(self.device)
            batch.finding_known = self.finding_known[chosen].to(self.device)
        return batch

    def _array(self, number: int, name: str) -> np.ndarray:
        """An array of a training case, mapped once."""
        if (number, name) not in self._opened:
            self._opened[number, name] = self.entries[number].arrays[name].open()
        return self._opened[number, name]

    def _choose(self, count: int, rng: np.random.Generator) -> tuple[int, np.ndarray | None]:
        """The case of patch `count`, and the voxel on which it is centred (None: anywhere)."""
        if self.holders and rng.random() < self.data.sampling.balanced:
            classes = list(self.holders)
            c = classes[int(rng.integers(len(classes)))]
            number = self.holders[c][int(rng.integers(len(self.holders[c])))]
            if (number, c) not in self._voxels:
                first, stop = self.entries[number].meta["spans"][str(c)]
                rows = self._array(number, "voxels")[first:stop]
                self._voxels[number, c] = ClassVoxels(rows, slices=len(self.data.preprocessing.patch) == 2)
            return number, self._voxels[number, c].pick(rng)
        passes, place = divmod(count, len(self.train))
        if passes not in self._orders:
            order = np.random.default_rng(seed_of(*self.parts, "order", passes)).permutation(len(self.train))
            self._orders = {passes: order}
        return int(self._orders[passes][place]), None


def pool(sites: Sequence[SiteData], name: str = "pooled") -> SiteData:
    """The union of several sites as one: batches mix all cases, each with its own `known`; cases are called
    "site/case" and keep their split. The cache is shared with the sites.

    Raises DataError if the sites have different numbers of channels.
    """
    first = sites[0]
    for site in sites:
        if site.channels != first.channels:
            raise DataError(
                f"site {site.name}: {site.channels} image channels, but site {first.name} has {first.channels}; "
                "all sites of a federation have the same channels"
            )
    items = [
        Item(f"{site.name}/{item.title}", item.case, item.index, item.naming, item.split, item.folder)
        for site in sites
        for cases in site.items.values()
        for item in cases
    ]
    pooled = SiteData.__new__(SiteData)
    indexes = [index for site in sites for index in site.indexes]
    pooled._fill(name, indexes, items, first.space, first.preprocessing, first.sampling, first.augmentation)
    return pooled
