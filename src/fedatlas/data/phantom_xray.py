"""A made-up federation of frontal chest radiographs with six findings, drawn from seeds: no download, no licence.

A finding is known by its form and its place in the anatomy, not by its brightness: an image without it mostly
holds a decoy that attenuates as much in the same region.

================ ===================================================== =============================================
finding          where it is present                                   its decoy
================ ===================================================== =============================================
Effusion         fluid with a concave meniscus hides dome and angle    a soft-tissue shadow, dome and angle visible
Nodule           a round opacity                                       a bent vessel of the same area and opacity
Cardiomegaly     a heart wider than half of the thorax                 a smaller heart with faint fat beside it
Pneumothorax     a pleural line without lung markings lateral to it    a skin fold: markings on both sides
Consolidation    a soft patch with a coarse grain                      a smooth patch
Atelectasis      a plate across the lung                               a vessel as long and dense, that runs upwards
================ ===================================================== =============================================

The parameters were chosen by two measurements only, at the defaults: no threshold on a statistic of the pixels and
no linear probe on them reaches an AUROC of 0.7 for any finding (a test), and a small convolutional network trained
on all labels of 4000 images exceeds 0.85 on most. No federated method was run for it.

Lengths are parts of half the image's width; x points to the image's right, y downwards, both from its centre.
Shapes: N = size, an image [N, N].
"""

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from PIL import Image
from scipy import ndimage

from fedatlas.errors import DataError, FederationError
from fedatlas.options import from_dict, not_known, option, options
from fedatlas.seeds import seed_of

FINDINGS = ("Effusion", "Nodule", "Cardiomegaly", "Pneumothorax", "Consolidation", "Atelectasis")
READING = {"patient": "patient", "split": "split"}
_TABLE = "labels.csv"
_COLUMNS = ("file", "patient", "split")
_PREVALENCE = 0.3
_DIFFICULTY = 0.5
_DECOYS = 0.85  # share of the images without a finding that hold its decoy
_PERSISTENCE = 0.6  # correlation of a finding between two images of a patient, before the threshold

Split = Literal["train", "validation", "test"]


@options
class PhantomXray:
    """How the federation is made. A value per finding may be left out; then it is the default."""

    sites: int = option(4, "Sites that train.", ge=1)
    cases: int | tuple[int, ...] = option(1000, "Training images of every site, or a number for each site.")
    validation_cases: int = option(100, "Validation images of every site.", ge=0)
    site_test_cases: int = option(
        50, "Test images of every site; at 0 the reader takes some out of training.", ge=0
    )
    test_cases: int = option(600, "Images of the test site.", ge=1)
    size: int = option(64, "Rows and columns of an image, pixels.", ge=32, le=1024)
    findings: tuple[str, ...] = option(FINDINGS, "The findings that occur.", min_length=1)
    prevalence: float | dict[str, float] = option(
        _PREVALENCE, "Share of images with a finding; one for all, or by finding."
    )
    difficulty: float | dict[str, float] = option(
        _DIFFICULTY, "From 0, large and dense, to 1, small and faint; one for all, or by finding."
    )
    co_occurrence: float = option(
        0.2, "Correlation of two findings' Gaussian variables, before the threshold.", gt=-1, lt=1
    )
    pairs: tuple[tuple[str, str, float], ...] = option(
        (), "Pairs of findings with a correlation of their own, as [Effusion, Atelectasis, 0.5]."
    )
    domain_shift: float = option(
        0.5,
        "Deviation of the sites' exposure, sharpness, noise, scale, patients' width and collimation; 0: none.",
        ge=0,
        le=2,
    )
    max_images: int = option(3, "A patient has one to so many images, all in one split.", ge=1, le=9)
    seed: int = option(0, "Decides everything that is drawn.")

    def __post_init__(self) -> None:
        for name in self.findings:
            if name not in FINDINGS:
                raise not_known("phantom x-ray: the finding", name, FINDINGS)
        if len(set(self.findings)) < len(self.findings):
            raise FederationError(f"phantom x-ray: findings are {list(self.findings)}; name each once")
        for key, low, high in (("prevalence", 0.0, 1.0), ("difficulty", 0.0, 1.0)):
            given = getattr(self, key)
            for name, value in given.items() if isinstance(given, dict) else [("", given)]:
                if name and name not in self.findings:
                    raise not_known(f"phantom x-ray: {key}: the finding", name, self.findings)
                if not low <= value <= high or (key == "prevalence" and value in (0, 1)):
                    what = "above 0 and below 1" if key == "prevalence" else "from 0 to 1"
                    raise FederationError(
                        f"phantom x-ray: {key}{name and ' of '}{name} is {value}; allowed: a number {what}"
                    )
        counts = (self.cases,) if isinstance(self.cases, int) else self.cases
        if any(n < 1 for n in counts) or (not isinstance(self.cases, int) and len(counts) != self.sites):
            raise FederationError(
                f"phantom x-ray: cases is {self.cases}; allowed: a number from 1, or one for each of "
                f"{self.sites} sites"
            )
        for one, other, value in self.pairs:
            for name in (one, other):
                if name not in self.findings:
                    raise not_known("phantom x-ray: pairs: the finding", name, self.findings)
            if one == other or not -1 < value < 1:
                raise FederationError(
                    f"phantom x-ray: pairs: got {[one, other, value]}; allowed: two different findings and a "
                    "number between -1 and 1"
                )
        smallest = float(np.linalg.eigvalsh(correlation(self))[0])
        if smallest < -1e-9:
            raise FederationError(
                f"phantom x-ray: co_occurrence {self.co_occurrence} and pairs {list(self.pairs)} cannot hold "
                f"together for {len(self.findings)} findings (smallest eigenvalue {smallest:.3f}); use weaker "
                "correlations"
            )

    def cases_at(self, site: int) -> int:
        """Training images of a site."""
        return self.cases if isinstance(self.cases, int) else self.cases[site]

    def of(self, key: Literal["prevalence", "difficulty"], finding: str) -> float:
        """Prevalence or difficulty of a finding."""
        given = getattr(self, key)
        if isinstance(given, dict):
            return given.get(finding, _PREVALENCE if key == "prevalence" else _DIFFICULTY)
        return given


@dataclass(frozen=True)
class XrayCase:
    """An image in memory: pixels [N, N] uint8, and which findings are there."""

    name: str
    patient: str
    split: Split
    pixels: np.ndarray
    truth: dict[str, bool]


def correlation(how: PhantomXray) -> np.ndarray:
    """[F, F] of the findings' Gaussian variables."""
    matrix = np.full((len(how.findings),) * 2, how.co_occurrence)
    np.fill_diagonal(matrix, 1)
    for one, other, value in how.pairs:
        i, j = how.findings.index(one), how.findings.index(other)
        matrix[i, j] = matrix[j, i] = value
    return matrix


def write_phantom_xray(folder: Path, how: PhantomXray | None = None, **changes: Any) -> Path:
    """Writes site-0, site-1, … and site-test into `folder` and returns it.

    A site's folder holds images/*.png, 8-bit greyscale, and labels.csv: file, patient, split, and 1 or 0 for every
    finding. The table is the full truth; what a site annotates is said in the federation file. changes: options
    of `PhantomXray`, in place of `how`. An image depends on the seed, its site and its patient only, never on how
    many others are made. Raises FederationError for a bad option, DataError for a folder that has such sites.
    """
    if changes:
        if how is not None:
            raise FederationError("phantom x-ray: options are given twice, as one value and by name; use one")
        how = from_dict(PhantomXray, changes, what="phantom x-ray")
    how = how or PhantomXray()
    there = sorted(folder.glob("site-*"))
    if there:
        raise DataError(f"phantom x-ray: {there[0]} is there already; choose an empty folder")
    for site in [*range(how.sites), "test"]:
        root = folder / f"site-{site}"
        (root / "images").mkdir(parents=True)
        with (root / _TABLE).open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow([*_COLUMNS, *how.findings])
            for case in draw_site(how, site):
                path = f"images/{case.name}.png"
                Image.fromarray(case.pixels).save(root / path, compress_level=1)
                table.writerow([path, case.patient, case.split, *map(int, case.truth.values())])
    return folder


def phantom_xray_sites(
    folder: Path, annotated: Mapping[str, Sequence[str]] | None = None
) -> list[dict[str, Any]]:
    """The list `sites` of a federation file for what `write_phantom_xray` wrote: s0, s1, …, and test.

    annotated: site -> the findings it annotates; a site without an entry annotates all, as the test site does.
    Raises DataError where no such folder is, FederationError for a site or a finding that does not exist.
    """
    numbers = sorted(int(root.name[5:]) for root in folder.glob("site-*") if root.name[5:].isdigit())
    if not numbers:
        raise DataError(f"phantom x-ray: no site-0 in {folder}; write it with write_phantom_xray")
    names = [f"s{n}" for n in numbers]
    for name in annotated or {}:
        if name not in names:
            raise not_known("phantom x-ray: annotated: the site", name, names)
    entries: list[dict[str, Any]] = []
    for title, name in [*zip(numbers, names, strict=True), ("test", "test")]:
        root = folder / f"site-{title}"
        try:
            header = (root / _TABLE).read_text(encoding="utf-8").partition("\n")[0]
        except OSError:
            raise DataError(f"phantom x-ray: {root / _TABLE}: missing; write the phantom again") from None
        findings = header.split(",")[len(_COLUMNS) :]
        known = list((annotated or {}).get(name, findings))
        for finding in known:
            if finding not in findings:
                raise not_known(f"phantom x-ray: annotated: {name}: the finding", finding, findings)
        entry = {"name": name, "path": str(root), "format": "csv", "annotated": known, "reading": dict(READING)}
        entries.append(entry | ({"role": "test"} if name == "test" else {}))
    return entries


def draw_site(how: PhantomXray, site: int | Literal["test"]) -> Iterator[XrayCase]:
    """The images of a site in the order of its table, without writing them."""
    if site == "test":
        yield from _draw_split(how, site, "test", how.test_cases)
    else:
        yield from _draw_split(how, site, "train", how.cases_at(site))
        yield from _draw_split(how, site, "validation", how.validation_cases)
        yield from _draw_split(how, site, "test", how.site_test_cases)


def _draw_split(how: PhantomXray, site: int | Literal["test"], split: Split, images: int) -> Iterator[XrayCase]:
    prefix = "test" if site == "test" else f"s{site}-{split}"
    made = 0
    for number in itertools.count():
        parts = (how.seed, "x-ray", site, split, number)
        body = np.random.default_rng(seed_of(*parts))
        count = int(body.integers(1, how.max_images + 1))
        leaning = body.standard_normal(len(FINDINGS))
        person = _Person.draw(body)
        # patients of the test site come from a hospital each, as the sites do
        where = (*parts, "hospital") if site == "test" else (how.seed, "x-ray", site, "hospital")
        device = _Device.draw(np.random.default_rng(seed_of(*where)), how.domain_shift)
        for image in range(count):
            if made == images:
                return
            made += 1
            rng = np.random.default_rng(seed_of(*parts, image))
            truth = _truth(how, leaning, rng)
            pixels = _draw(how, truth, person, device, rng)
            patient = f"{prefix}-{number:05d}"
            yield XrayCase(f"{patient}-{image}", patient, split, pixels, truth)


def _truth(how: PhantomXray, leaning: np.ndarray, rng: np.random.Generator) -> dict[str, bool]:
    """Gaussian copula: the patient's and the image's variables, correlated across findings, above a threshold."""
    n = len(how.findings)
    mixed = _PERSISTENCE**0.5 * leaning + (1 - _PERSISTENCE) ** 0.5 * rng.standard_normal(len(FINDINGS))
    values, vectors = np.linalg.eigh(correlation(how))
    latent = vectors @ (np.sqrt(np.maximum(values, 0)) * mixed[:n])
    above = [NormalDist().inv_cdf(1 - how.of("prevalence", name)) for name in how.findings]
    return {name: bool(latent[i] > above[i]) for i, name in enumerate(how.findings)}
