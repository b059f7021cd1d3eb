"""Cases with labels of voxels, and findings beside them: preprocessed once, read as patches.

Shapes: B batch, C classes, F findings, I input channels, X, Y, Z the axes of a scan's file, *S the federation's grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core.batch import Batch, Volume
from fedatlas.core.errors import DataError
from fedatlas.core.labels import LabelSpace, known_row
from fedatlas.core.seeds import generator, seed_of
from fedatlas.data import cache as store
from fedatlas.data.checks import drawn_in, empty_site, layout_problems, leak_in, notes_of, untaught_site
from fedatlas.data.datasets.shared.listing import Case, Problem
from fedatlas.data.formats.flat import Note
from fedatlas.data.index import Naming, SiteIndex, naming_of, split_validation
from fedatlas.data.inputs import look_of
from fedatlas.data.leaks import LEAKS, Leak, slice_of
from fedatlas.data.predictions import CaseMaps, predict_cases
from fedatlas.data.reading import Label, digest, read_case, refuse
from fedatlas.data.sampling import ClassVoxels, class_voxels, cut_case
from fedatlas.data.site_data import Item, Key, Prepared, SiteBatches, SiteData
from fedatlas.data.transforms import (
    Geometry,
    Preprocessing,
    Sampling,
    as_stored,
    geometry_of,
    image_to_grid,
    labels_to_grid,
    require_grid,
    require_intensities,
    require_picture,
    restore,
)
from fedatlas.learning.augment import Augmentation, augment, augment_along

NOT_IN_KEY = ("patch", "context")
"""Options of Preprocessing that do not change what is kept on disk."""
MAPPED = 128
"""Arrays of training cases that batches keep mapped; each holds a file open, of which a process may have few."""


class VoxelData(SiteData):
    """The data of a site whose labels are of voxels.

    validation: part of the training patients that is kept for validation, chosen by `seed`; the others as of `SiteData`.
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
        self.preprocessing = preprocessing
        self.sampling = sampling or Sampling()  # type: ignore[call-arg]
        splits = split_validation(index, seed=seed, fraction=validation)
        super().__init__(index, space, splits, augmentation, cache)

    def _classes(self, case: Case, naming: tuple[Naming, Naming]) -> tuple[frozenset[int], frozenset[int]]:
        known = naming[0].known(case.annotated)
        return known, known | naming[1].known(case.reference_annotated)

    def _present(self, item: Item) -> frozenset[int]:
        return frozenset(int(c) for c, n in self._entry(item).meta["voxels"].items() if n > 0)

    def _layout_problems(self, index: SiteIndex) -> list[Problem]:
        naming = naming_of(index, self.space)[0]
        return [*layout_problems(index), *empty_site(index), *untaught_site(index, self.space, naming)]

    # ---------------------------------------------------------------------------------------- cache

    def _finish(self) -> None:
        for item in self.everything:
            if item.split != "train" and item.case.fuller:
                self._reference(item)
        context, items = self.preprocessing.context, self.everything
        most = max((self._entry(item).arrays["image"].shape[-1] for item in items), default=0)
        if len(self.preprocessing.patch) == 2 and items and context > most:
            raise DataError(
                f"site {self.name}: `preprocessing.context` gives {context} slices on each side of a slice, and its "
                f"longest scan has {most} in all on the federation's grid; lower it"
            )

    def _key(self, item: Item) -> Key:
        return self._key_of(item, item.case.images, {"annotated": sorted(item.known)})

    def _key_of(self, item: Item, images: Sequence[Path], more: Mapping[str, Any]) -> Key:
        plain = {f.name: getattr(self.preprocessing, f.name) for f in fields(self.preprocessing)}  # type: ignore[arg-type]
        content = {
            "preprocessing": {name: value for name, value in plain.items() if name not in NOT_IN_KEY},
            "integers": sorted(item.naming[0].integers.items()),
            "names": self.space.names,
            "exclusive": self.space.exclusive,
            "channels": item.index.channels,
        } | item.case.content
        if item.case.masks and self.space.exclusive:
            content["groups"] = self.space.organs  # which masks may overlap, see `flat.join`
        return f"{_safe(item.case.name)}-", {**content, **more}, [*images, *item.case.label_files]

    def _prepare(self, item: Item) -> Prepared:
        raw = read_case(item.index, item.case, self.space, item.naming)
        refuse(raw.problems)
        assert raw.image is not None
        require_picture(item.case.images[0], self.preprocessing, f"site {item.index.name}: ")
        geometry = geometry_of(raw.image.shape[1:], raw.affine, self.preprocessing)
        where = f"site {item.index.name}: {item.file}"
        require_grid(where, geometry, self.preprocessing, len(raw.image) + 1)
        image = image_to_grid(raw.image, geometry, self.preprocessing)
        require_intensities(where, raw.image, image, self.preprocessing)
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
            "look": look_of(
                raw.image, spacing=None if raw.about.get("picture") else geometry.turned_spacing, **raw.about
            ),
            "affine": raw.affine.tolist(),
            "shape": list(geometry.shape),
            "spacing": list(geometry.spacing),
            "grid_spacing": list(geometry.grid_spacing),
            "axes": geometry.axes,
            "voxels": {str(c): n for c, n in label.counts.items()},
            "spans": {str(c): span for c, span in spans.items()},
        }

    def _reference(self, item: Item) -> store.Entry:
        """The prepared truth, where a reference says more than the label."""

        def key(item: Item) -> Key:
            reference = item.case.reference
            more = {
                "annotated": sorted(item.known),
                "reference": sorted(item.naming[1].integers.items()),
                "scored": sorted(item.naming[1].known(item.case.reference_annotated)),
            }
            return self._key_of(item, [item.case.images[0], *([reference] if reference else [])], more)

        def make() -> Prepared:
            truth, geometry, _ = self._raw_truth(item)
            target = np.asfortranarray(labels_to_grid(truth, geometry, self.space))
            return {"target": target}, {"label": _label_digest(truth)}

        return self._kept(item, "/reference", key, make)

    def _raw_truth(self, item: Item) -> tuple[np.ndarray, Geometry, list[Note]]:
        """The truth on the scan's grid: the reference, and from the label what the reference does not hold. And what is to be
        said of the files, see `checks.notes_of`."""
        raw = read_case(item.index, item.case, self.space, item.naming, reference=True)
        refuse(raw.problems)
        assert raw.image is not None
        geometry = geometry_of(raw.image.shape[1:], raw.affine, self.preprocessing)
        notes = notes_of(item.case, raw)
        if raw.reference is None:
            return (raw.label or _nothing(geometry, self.space)).voxels, geometry, notes
        truth = raw.reference.voxels.copy()
        for c in sorted((raw.label.known if raw.label else frozenset()) - raw.reference.known):
            assert raw.label is not None
            if self.space.exclusive:
                truth[raw.label.voxels == c] = c
            else:
                truth[c] = raw.label.voxels[c]
        return truth, geometry, notes

    def leaks(self) -> dict[str, Leak]:
        """Case -> how far its image gives labels away, where it is enough for a warning, the worst first. By its
        label alone; `check_site` looks at the reference, too. Prepares if need be."""
        self.require()
        found = {}
        for item in self.everything:
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
        item = next(item for item in self.everything if item.title == worst)
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

    def _batches(self, *given: Any, **how: Any) -> "PatchBatches":
        return PatchBatches(*given, **how)

    def predict_cases(self, net: nn.Module, folder: Path, *, partly: bool, **how: Any) -> CaseMaps:
        """What a net says of every training case, see `core.contract.Site.with_predictions`."""
        self.require()
        images = {
            n: self._entry(item).arrays["image"]
            for n, item in enumerate(self.items["train"])
            if not (partly and len(item.known) == len(self.space.foreground))
        }
        return predict_cases(net, images, self.space, self.preprocessing, folder, site=self.name, **how)

    # ------------------------------------------------------------------------------------- evaluation

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

    def _known_findings(self, item: Item) -> list[bool]:
        told = self._told(item)
        return [
            (f in told and item.index.trains) or c in item.known for f, c in enumerate(self.space.finding_of)
        ]

    def _findings(self, item: Item) -> tuple[list[bool], list[bool]]:
        """[F] the findings of a case, and [F] which of them training may see: those that the data set tells, and those
        about an annotated class, which are present where a voxel of it is. Where the data set tells one that its mask
        contradicts, the data set's word counts; `check` notes it."""
        told, about = self._told(item), self.space.finding_of
        voxels = self._entry(item).meta["voxels"] if about else {}
        present = [told[f] if f in told else voxels.get(str(c), 0) > 0 for f, c in enumerate(about)]
        return present, self._known_findings(item)

    def _scored_findings(self, item: Item) -> list[bool]:
        """[F] the findings for which there is a truth."""
        told = self._told(item, scoring=True)
        return [f in told or c in item.scored for f, c in enumerate(self.space.finding_of)]

    def _volume(self, item: Item) -> Volume | None:
        scored = self._scored_findings(item)
        if not item.scored and not any(scored):
            return None
        entry, (present, known) = self._entry(item), self._findings(item)
        lesions = frozenset(self.space.organ_of) if item.index.whole else frozenset()
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

    def _marks(self, item: Item) -> tuple[Any, ...]:
        meta = self._entry(item).meta
        truth = self._reference(item).meta["label"] if item.split != "train" and item.case.fuller else ""
        told = sorted(item.known), sorted(item.scored), sorted(item.case.findings)
        return meta["digest"], meta["label"], meta["affine"], truth, told

    def _numbers(self) -> dict[str, Any]:
        """Training cases in which a finding is annotated, and present; training voxels per annotated class; the spacings
        (mm), orientations and shapes of the files; how many images give labels away."""
        voxels = {self.space.names[c]: 0 for c in sorted(self.labels.annotated)}
        for item in self.items["train"]:
            for c, n in self._entry(item).meta["voxels"].items():
                voxels[self.space.names[int(c)]] += n
        metas = [self._entry(item).meta for item in self.everything]
        rows = [self._findings(item) for item in self.items["train"]]
        return {
            "findings": {
                name: {
                    "labelled": sum(known[f] for _, known in rows),
                    "present": sum(known[f] and present[f] for present, known in rows),
                }
                for f, name in enumerate(self.space.findings)
            },
            "voxels": voxels,
            "spacing": _unique([round(mm, 3) for mm in meta["spacing"]] for meta in metas),
            "orientation": _unique(meta["axes"] for meta in metas),
            "shape": _unique(meta["shape"] for meta in metas),
            "leaks": len(self.leaks()),
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
class CaseVolume(Volume):
    """One case for evaluation; its truth is read when it is asked for. notes: what is to be said of its files, from when the
    truth on their own grid was read."""

    geometry: Geometry
    source: VoxelData
    item: Item
    notes: list[Note] = field(default_factory=list)

    def truth(self, grid: str) -> np.ndarray:
        """See `Volume`. On the federation's grid it is what the label files become there."""
        if grid == "original":
            truth, _, self.notes = self.source._raw_truth(self.item)
            return truth
        if grid != "federation":
            raise ValueError(f"grid {grid!r}; allowed: federation, original")
        fuller = self.item.case.fuller
        entry = self.source._reference(self.item) if fuller else self.source._entry(self.item)
        return np.ascontiguousarray(entry.arrays["target"].open())

    def restore(self, probabilities: Tensor) -> np.ndarray:
        """See `transforms.restore`."""
        return restore(probabilities, self.geometry, self.source.space.exclusive)


class PatchBatches(SiteBatches):
    """Batches of training patches. Where none is class-balanced, every case comes once before any comes again. along:
    what `VoxelData.predict_cases` kept, to be given beside the patches; it changes nothing else of them."""

    def __init__(
        self,
        data: VoxelData,
        rng_parts: tuple[str | int, ...],
        batch: int,
        steps: int,
        device: torch.device,
        along: CaseMaps | None = None,
    ) -> None:
        super().__init__(data, rng_parts, batch, steps, device)
        self.data, self.along = data, along
        self.entries = [data._entry(item) for item in self.train]
        self.spacing = torch.tensor([entry.meta["grid_spacing"] for entry in self.entries])
        self.holders: dict[int, list[int]] = {
            c: [n for n, entry in enumerate(self.entries) if str(c) in entry.meta["spans"]]
            for c in sorted(data.labels.annotated)
        }
        self.holders = {c: cases for c, cases in self.holders.items() if cases}
        self._opened: dict[tuple[int, str], np.ndarray] = {}
        self._voxels: dict[tuple[int, int], ClassVoxels] = {}
        self.finding: Tensor | None = None
        self.finding_known: Tensor | None = None
        if data.space.findings:
            rows = [data._findings(item) for item in self.train]
            self.finding = torch.tensor([present for present, _ in rows], dtype=torch.float32)
            self.finding_known = torch.tensor([known for _, known in rows])

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
        """An array of a training case; the MAPPED that were asked for last stay mapped."""
        array = self._opened.pop((number, name), None)
        if array is None:
            array = self.entries[number].arrays[name].open()
        self._opened[number, name] = array
        if len(self._opened) > MAPPED:
            del self._opened[next(iter(self._opened))]
        return array

    def _choose(self, count: int, rng: np.random.Generator) -> tuple[int, np.ndarray | None]:
        """The case of patch `count`, and the voxel on which it is centred (None: anywhere)."""
        if self.holders and rng.random() < self.data.sampling.balanced:
            classes = list(self.holders)
            c = classes[int(rng.integers(len(classes)))]
            number = self.holders[c][int(rng.integers(len(self.holders[c])))]
            first, stop = self.entries[number].meta["spans"][str(c)]
            rows = self._array(number, "voxels")[first:stop]
            if (number, c) not in self._voxels:
                self._voxels[number, c] = ClassVoxels(rows, slices=len(self.data.preprocessing.patch) == 2)
            return number, self._voxels[number, c].pick(rows, rng)
        return self._in_turn(count), None
