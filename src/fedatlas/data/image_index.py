"""The index of a site with findings: images, findings and patients. No pixel is read.

Shapes: C classes, I input channels, H, W rows and columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import LabelSpace, resolve_names
from fedatlas.core.options import option, options
from fedatlas.core.seeds import seed_of
from fedatlas.data import datasets
from fedatlas.data.datasets.shared.findings import balanced, federation_problems
from fedatlas.data.datasets.shared.listing import ImageCase, ImageListing, Layout, Problem, Splitting, shown
from fedatlas.data.index import SiteConfig


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


FOR_LABEL_MAPS: Mapping[str, Any] = {
    "patient": None,
    "reference": None,
    "table": "dataset.json",
    "labels": "labelsTr",
    "test_labels": "labelsTs",
    "split": None,
    "whole": False,
}
"""Keys of a site that say nothing here, with their defaults."""


@dataclass(frozen=True)
class ImageIndex:
    """The layout of a site. listing: its own names; used: those that count as annotated; trains: False for a site
    that is tested on and trains nothing; scores_all: are classes that it does not annotate scored, too?"""

    name: str
    root: Path
    listing: ImageListing
    channels: int
    aliases: dict[str, str]
    used: tuple[str, ...]
    trains: bool
    scores_all: bool

    @property
    def brings(self) -> tuple[str, ...]:
        """What it annotates for training, by the names of the label space."""
        names = (self.aliases.get(name, name) for name in self.used)
        return tuple(dict.fromkeys(names)) if self.trains else ()

    def file(self, path: Path) -> str:
        """A path as it is shown: relative to the site's folder where it lies inside."""
        return shown(path, self.root)

    def classes(self, space: LabelSpace) -> tuple[dict[str, int], dict[str, int]]:
        """Maps the site's label names to classes, once for training and once for scoring.

        Raises FederationError for an annotated name that is neither in the space nor an alias of one, and for an
        alias that matches nothing.
        """
        for alias in self.aliases:
            if alias not in self.listing.classes:
                raise FederationError(
                    f"site {self.name}: alias {alias!r} matches none of the site's classes; it has: "
                    f"{', '.join(self.listing.classes)}"
                )
        if self.trains:
            own = {alias: name for alias, name in self.aliases.items() if alias in self.used}
            try:
                resolved = resolve_names(self.used, own, space, site=self.name)
            except FederationError as error:
                raise FederationError(
                    f"{error}. A column of a csv that is no class goes into `reading`: the patient as `patient`, "
                    "the split as `split`, others into `ignored`"
                ) from None
            known = {name: space.index(target) for name, target in resolved.items()}
        else:
            known = {}
        fuller = self.listing.classes if self.scores_all or not self.trains else self.used
        names = {name: self.aliases.get(name, name) for name in fuller}
        return known, {name: space.index(target) for name, target in names.items() if target in space.names}


def read_image_site(config: SiteConfig, base: Path, *, channels: int, splitting: Splitting) -> ImageIndex:
    """The layout of a site's folder; no pixel is read. A relative path is taken from `base`.

    Raises DataError or FederationError where the site cannot be understood at all: no folder, no table, a format of
    the other task, a name that does not exist.
    """
    root = (base / Path(config.path or "").expanduser()).resolve()
    data = datasets.find(config.format)
    if data is None or data.kind != "findings":
        raise FederationError(
            f"site {config.name}: format is {config.format!r}; labels of whole images are read from: "
            f"{', '.join(datasets.known('findings'))}; set `format`"
        )
    if not root.is_dir():
        raise DataError(f"site {config.name}: {root}: no such folder; correct the site's `path`")
    for key, default in FOR_LABEL_MAPS.items():
        if getattr(config, key) != default:
            instead = f"for format {config.format} it is an option of `reading`, as far as there is one"
            if key == "patient":
                instead = "give `reading` the column, `patient`, or the expression, `patient_in` (format csv)"
            raise FederationError(
                f"site {config.name}: {key}: is for layouts with label maps; leave it out. {instead[0].upper()}{instead[1:]}"
            )
    layout = Layout(config.name, root, splitting=splitting)
    listing = datasets.read(data, layout, config.reading, ImageListing)
    known = [*listing.classes, *(config.aliases.get(name, name) for name in listing.classes)]
    for name in config.annotated or ():
        if name not in known:
            raise DataError(
                f"site {config.name}: `annotated` names {name!r}, which its table does not hold; known: "
                f"{', '.join(dict.fromkeys(known))}"
            )
    used = tuple(
        name
        for name in listing.classes
        if config.annotated is None
        or name in config.annotated
        or config.aliases.get(name, name) in config.annotated
    )
    cases = listing.cases
    if config.role == "test":
        cases = tuple(replace(case, split="test") for case in cases)
    if config.cases is not None:
        cases = _drawn(cases, config.cases, config.name, splitting.seed)
    if config.balanced is not None:
        tests = [case for case in cases if case.split == "test"]
        try:
            chosen = balanced(
                tests, used, positives=config.balanced, negatives=config.balanced, seed=splitting.seed
            )
        except DataError as error:
            raise DataError(f"site {config.name}: {error}") from None
        cases = tuple(case for case in cases if case.split != "test") + chosen
    return ImageIndex(
        config.name,
        root,
        replace(listing, cases=cases),
        channels,
        dict(config.aliases),
        used,
        config.role == "train",
        config.score_all,
    )


def _drawn(cases: Sequence[ImageCase], most: int, site: str, seed: int) -> tuple[ImageCase, ...]:
    """At most so many training images: patients in the order of a hash, so that fewer are always among more."""
    train = [case for case in cases if case.split == "train"]
    train.sort(key=lambda case: (seed_of(seed, "cases", site, case.patient), case.patient, case.name))
    kept = {case.name for case in train[:most]}
    return tuple(case for case in cases if case.split != "train" or case.name in kept)


def mapped(index: ImageIndex, space: LabelSpace) -> ImageListing:
    """The listing by the names of the space, with what training sees of training and validation cases, and what is
    scored of test cases."""
    known, scored = index.classes(space)

    def names(case: ImageCase) -> ImageCase:
        present, absent = findings(case, scored if case.split == "test" else known)
        return replace(
            case,
            present=frozenset(space.names[c] for c in present),
            absent=frozenset(space.names[c] for c in absent),
        )

    classes = tuple(dict.fromkeys(space.names[c] for c in known.values()))
    return replace(index.listing, classes=classes, cases=tuple(names(case) for case in index.listing.cases))


def findings(case: ImageCase, classes: Mapping[str, int]) -> tuple[frozenset[int], frozenset[int]]:
    """The classes that are present, and those that are absent. Of several names that are one class, one that is
    present makes it present, and all must be absent to make it absent."""
    present = frozenset(c for name, c in classes.items() if name in case.present)
    open_ = frozenset(
        c for name, c in classes.items() if name not in case.present and name not in case.absent
    )
    absent = frozenset(c for name, c in classes.items() if name in case.absent)
    return present, absent - present - open_


def image_problems(indexes: Sequence[ImageIndex], space: LabelSpace) -> list[Problem]:
    """What is wrong with the sites and between them; no pixels are decoded, equal files are found by their bytes."""
    found: list[Problem] = []
    listings: dict[str, ImageListing] = {}
    for index in indexes:
        found += index.listing.problems
        try:
            listings[index.name] = mapped(index, space)
        except FederationError as error:
            what = str(error).removeprefix(f"site {index.name}: ")
            found.append(Problem(index.name, "", what, "correct `aliases`, `annotated` or `labels.names`"))
            continue
        split = "train" if index.trains else "test"
        if not any(case.split == split for case in index.listing.cases):
            what = f"empty: {index.root} holds no {'training' if index.trains else 'test'} image that can be used"
            found.append(
                Problem(index.name, "", what, "correct `path`, `format` or `reading`, or take the site out")
            )
    if not any(index.trains for index in indexes):
        found.append(Problem("(all)", "", "no site trains: every role is test", "give one the role train"))
    found += federation_problems(listings)
    taught = {name for listing in listings.values() for name in listing.classes}
    for name in space.names:
        if name not in taught:
            what = f"no site annotates {name!r}"
            remedy = "take it out of `labels.names`, or add a site that annotates it"
            found.append(Problem("(all)", "", what, remedy))
    return sorted(found, key=lambda problem: not problem.fatal)
