"""A site's cases as training and evaluation see them: checked, prepared once and kept on disk.

What depends on what the labels are of stands in `data.voxels` and `data.images`, in a class each.

Shapes: B batch, C classes.
"""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedatlas.core.batch import Batch
from fedatlas.core.errors import DataError
from fedatlas.core.labels import LabelSpace, SiteLabels, known_row
from fedatlas.core.seeds import seed_of
from fedatlas.data import cache as store
from fedatlas.data.checks import Scan, twin_problems
from fedatlas.data.datasets.shared.listing import Case, Problem, Split
from fedatlas.data.index import Naming, SiteIndex, naming_of
from fedatlas.data.inputs import Look, ranges_of
from fedatlas.data.reading import refuse
from fedatlas.learning.augment import Augmentation
from fedatlas.learning.loop import count_steps

Prepared = tuple[Mapping[str, np.ndarray], Mapping[str, Any]]
"""A case as it is kept on disk: arrays by name, and plain values about it."""
Key = tuple[str, Mapping[str, Any], Sequence[Path]]
"""How the name of a prepared case's folder begins; the plain values and the files that decide what is in it."""


@dataclass(frozen=True)
class Item:
    """One case of one site, in one split. known: the classes that training may see; scored: those that have a truth."""

    title: str
    case: Case
    index: SiteIndex
    naming: tuple[Naming, Naming]
    split: Split
    folder: Path
    known: frozenset[int]
    scored: frozenset[int]

    @property
    def file(self) -> str:
        """Its first file as it is shown."""
        return self.index.file(self.case.images[0])


class SiteData(ABC):
    """The data of a site, or of several sites together (`pool`).

    cache: folder of prepared cases, shared by all sites and experiments. Raises FederationError if the site's label
    names do not fit the space.
    """

    word: ClassVar[str] = "case"
    """What a case is called."""
    progress_every: ClassVar[int] = 1
    """Progress is told of every so many cases."""
    leave_out: ClassVar[str] = "take the case out"
    """How a person leaves out a case whose file is gone."""

    def __init__(
        self,
        index: SiteIndex,
        space: LabelSpace,
        splits: Mapping[Split, Sequence[Case]],
        augmentation: Augmentation | None,
        cache: Path,
    ) -> None:
        self.space = space
        self.augmentation = augmentation or Augmentation()  # type: ignore[call-arg]
        naming, folder = naming_of(index, space), Path(cache) / index.name
        items = [
            Item(case.name, case, index, naming, split, folder, *self._classes(case, naming))
            for split, cases in splits.items()
            for case in cases
        ]
        self._fill(index.name, [index], items)

    def _fill(self, name: str, indexes: Sequence[SiteIndex], items: Sequence[Item]) -> None:
        self.name, self.indexes = name, list(indexes)
        self.items: dict[Split, list[Item]] = {
            split: [item for item in items if item.split == split]
            for split in ("train", "validation", "test")
        }
        train = self.items["train"]
        # a class that validation cases alone annotate is not taught here: nobody may take this site's word for it
        annotated = frozenset(c for item in train for c in item.known)
        findings = frozenset(f for item in train for f, here in enumerate(self._known_findings(item)) if here)
        self.labels = SiteLabels(self.space, annotated, findings)
        self.n_train = len(train)
        self.n_labelled = self._counts(known_row(self.space, item.known) for item in train)
        self._entries: dict[tuple[str, str], store.Entry] = {}
        self._positive: Tensor | None = None
        self._ready = False

    def _counts(self, rows: Iterable[Sequence[bool]]) -> Tensor:
        return torch.tensor(list(rows), dtype=torch.int64).reshape(-1, len(self.space)).sum(0)

    @property
    def n_positive(self) -> Tensor:
        """[C] int64: training cases in which class c is annotated and there. Prepares if need be."""
        if self._positive is None:
            there = (item.known & self._present(item) for item in self.items["train"])
            self._positive = self._counts([c in classes for c in range(len(self.space))] for classes in there)
        return self._positive

    @property
    def channels(self) -> int:
        """Images per case, before slices get their neighbours."""
        return self.indexes[0].channels

    @property
    def everything(self) -> list[Item]:
        """All cases."""
        return [item for items in self.items.values() for item in items]

    # ----------------------------------------------------------------------- what the labels' kind decides

    @abstractmethod
    def _classes(self, case: Case, naming: tuple[Naming, Naming]) -> tuple[frozenset[int], frozenset[int]]:
        """`Item.known` and `Item.scored` of a case."""

    def _known_findings(self, item: Item) -> list[bool]:
        """[F] the findings of the whole image, beside segmentation, that training may see in a case."""
        return []

    @abstractmethod
    def _present(self, item: Item) -> frozenset[int]:
        """The classes that are there, of those for which there is a truth."""

    @abstractmethod
    def _layout_problems(self, index: SiteIndex) -> list[Problem]:
        """What shows before any case is read."""

    @abstractmethod
    def _key(self, item: Item) -> Key:
        """What the folder of the prepared case is called."""

    @abstractmethod
    def _prepare(self, item: Item) -> Prepared:
        """Reads a case. Of the plain values every kind has "digest" and "look". Raises DataError for a case that cannot
        be used."""

    @abstractmethod
    def _marks(self, item: Item) -> tuple[Any, ...]:
        """Plain values that change with whatever training and evaluation read of a case."""

    @abstractmethod
    def _numbers(self) -> dict[str, Any]:
        """What `summary` tells of this kind alone."""

    @abstractmethod
    def _batches(self, *given: Any, **how: Any) -> "SiteBatches":
        """What `batches` gives; given: as `SiteBatches` takes them."""

    @abstractmethod
    def _volume(self, item: Item) -> Any:
        """A case as evaluation sees it; None where there is no truth."""

    # ---------------------------------------------------------------------------------------- cache

    def prepare(self, progress: Callable[[str], None] | None = None) -> None:
        """Reads and checks every case and fills the cache, of what is not there yet.

        progress: is told of the cases that are read. Raises DataError, naming site, file and remedy, for everything that
        `fedatlas check` finds fatal.
        """
        self._require_layout()
        for folder in dict.fromkeys(item.folder for item in self.everything):
            store.sweep(folder)
        count = len(self.everything)
        for number, item in enumerate(self.everything, start=1):
            tell = progress if (number - 1) % self.progress_every == 0 or number == count else None
            text = f"{self.word} {item.case.name} ({number} of {count})"
            self._entry(item, partial(tell, text) if tell else None)
        self._finish()
        scans = self._scans()
        for index in self.indexes:
            refuse(twin_problems(index.name, [scan[1:] for scan in scans if scan.site == index.name]))
        self._ready = True

    def _finish(self) -> None:  # noqa: B027 (most kinds have nothing to add)
        """What is prepared and checked when every case was read."""

    def _require_layout(self) -> None:
        for index in self.indexes:
            refuse(self._layout_problems(index))

    def require(self) -> None:
        """Prepares if need be."""
        if not self._ready:
            self.prepare()

    def scans(self) -> list[Scan]:
        """Every case with the digest of its image as the file holds it, for `shared_scans`. Prepares if need be."""
        self.require()
        return self._scans()

    def _scans(self) -> list[Scan]:
        return [
            Scan(i.index.name, i.case.name, i.split, i.file, self._entry(i).meta["digest"])
            for i in self.everything
        ]

    def _entry(self, item: Item, progress: Callable[[], None] | None = None) -> store.Entry:
        """The prepared case."""

        def make() -> Prepared:
            if progress:
                progress()
            return self._prepare(item)

        return self._kept(item, "", self._key, make)

    def _kept(
        self, item: Item, part: str, key: Callable[[Item], Key], make: Callable[[], Prepared]
    ) -> store.Entry:
        """The case, or a part of it, as it is kept on disk."""
        place = (item.index.name, f"{item.case.name}/{item.split}{part}")
        if place not in self._entries:
            prefix, content, files = key(item)
            try:
                folder = item.folder / (prefix + store.key_of(content, files))
            except OSError as error:
                file = item.index.file(Path(error.filename)) if error.filename else item.case.name
                raise DataError(
                    f"site {item.index.name}: {file}: cannot be read ({error.strerror}); add it, or {self.leave_out}"
                ) from None
            self._entries[place] = store.fetch(folder, make)
        return self._entries[place]

    # --------------------------------------------------------------------------- training and evaluation

    def batches(
        self,
        rng_parts: tuple[str | int, ...],
        *,
        batch: int,
        steps: int | None = None,
        epochs: float | None = None,
        device: torch.device | str = "cpu",
        **how: Any,
    ) -> "SiteBatches":
        """Augmented training samples, prefetched by one thread; everything random follows from `rng_parts`. An epoch is as
        many samples as there are training cases. how: what a kind of labels takes beside these. Prepares if need be."""
        steps = count_steps(steps, epochs, self.n_train, batch)
        self.require()
        return self._batches(self, rng_parts, batch, steps, torch.device(device), **how)

    def volumes(self, split: str) -> Iterator[Any]:
        """The cases of a split for which there is a truth, one at a time, in order of name."""
        if split not in self.items:
            raise ValueError(f"split {split!r}; allowed: {', '.join(self.items)}")
        if not self._ready:
            self._require_layout()
        for item in self.items[split]:
            volume = self._volume(item)
            if volume is not None:
                yield volume

    # ---------------------------------------------------------------------------------------- account

    def fingerprint(self) -> dict[str, str]:
        """ "split/case" -> a digest of all that training and evaluation read of it: image, labels, and what is annotated.
        Prepares if need be."""
        self.require()
        return {
            f"{item.split}/{item.title}": hashlib.sha256(repr(self._marks(item)).encode()).hexdigest()
            for item in self.everything
        }

    def looks(self) -> dict[str, Look]:
        """The first file of every case as it is shown -> its look. Prepares if need be."""
        self.require()
        return {item.file: self._entry(item).meta["look"] for item in self.everything}

    def keep_leaks(self, folder: Path) -> None:  # noqa: B027 (without outlines there is nothing to give away)
        """Writes the cases whose images give labels away into a folder, for the report; see `VoxelData`."""

    def summary(self) -> dict[str, Any]:
        """Plain values for the run's record: annotated classes, cases per split, training cases per annotated class, the
        ranges of what training and validation cases look like, and `_numbers`. Prepares if need be."""
        self.require()
        seen = [*self.items["train"], *self.items["validation"]]
        return {
            "annotated": [self.space.names[c] for c in sorted(self.labels.annotated)],
            "role": "train" if any(index.trains for index in self.indexes) else "test",
            "cases": {split: len(items) for split, items in self.items.items()},
            "labelled": {self.space.names[c]: int(self.n_labelled[c]) for c in self.space.foreground},
            "inputs": ranges_of(self._entry(item).meta["look"] for item in seen),
            **self._numbers(),
        }


D = TypeVar("D", bound=SiteData)


def pool(sites: Sequence[D], name: str = "pooled") -> D:
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
    pooled = copy.copy(first)
    indexes = [index for site in sites for index in site.indexes]
    items = [replace(item, title=f"{site.name}/{item.title}") for site in sites for item in site.everything]
    pooled._fill(name, indexes, items)
    return pooled


class SiteBatches(ABC):
    """Training batches, to be read in order; every reading gives the same ones. Everything random follows from `parts`."""

    def __init__(
        self, data: SiteData, parts: tuple[str | int, ...], batch: int, steps: int, device: torch.device
    ) -> None:
        self.parts, self.batch, self.steps, self.device = parts, batch, steps, device
        self.train = data.items["train"]
        self.known = torch.tensor([known_row(data.space, item.known) for item in self.train])
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return prefetch(self._make, self.steps)

    @abstractmethod
    def _make(self, step: int) -> Batch:
        """The batch of a step."""

    def _in_turn(self, count: int) -> int:
        """The training case of the sample that has `count` before it: over the counts one after another, every case comes once
        before any comes again."""
        passes, place = divmod(count, len(self.train))
        if passes not in self._orders:
            order = np.random.default_rng(seed_of(*self.parts, "order", passes)).permutation(len(self.train))
            self._orders = {passes: order}
        return int(self._orders[passes][place])


T = TypeVar("T")


def prefetch(make: Callable[[int], T], count: int, *, ahead: int = 2) -> Iterator[T]:
    """make(0), make(1), … make(count - 1), in order, made in one thread at most `ahead` before they are read.

    What `make` raises is raised here, in its place. The thread has ended when the iteration has, whether it was finished,
    failed or was given up. Whenever Ctrl-C comes, the interpreter waits for it: a thread that it ends within torch would abort it.
    """
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        waiting = deque(pool.submit(make, number) for number in range(min(ahead, count)))
        for number in range(count):
            made = waiting.popleft().result()
            if number + ahead < count:
                waiting.append(pool.submit(make, number + ahead))
            yield made
    finally:
        pool.shutdown(cancel_futures=True)
