"""A made-up federation of frontal chest radiographs with six findings, drawn from seeds: no download, no licence.

A finding is known by its form and its place in the anatomy, not by its brightness: an image without it mostly
holds a decoy that attenuates as much in the same region.

================ ===================================================== =============================================
finding          where it is present                                   its decoy
================ ===================================================== =============================================
Effusion         fluid with a concave meniscus hides dome and angle    a soft-tissue shadow, dome and angle visible
Nodule           a round opacity                                       a bent vessel of the same area and opacity
Pneumothorax     a pleural line without lung markings lateral to it    a skin fold: markings on both sides
Consolidation    a soft patch with a coarse grain                      a smooth patch
Fibrosis         a net of fine lines in the lower lungs                a plain grain of the same variance
Atelectasis      a plate across the lung                               a vessel as long and dense, that runs upwards
================ ===================================================== =============================================

The parameters were chosen by two measurements only, at the defaults, and by no federated method:

* No threshold on a pixel or a statistic of the pixels, and no ridge regression on 32 x 32 of them, reaches an AUROC
  of 0.7 for any finding (tests). With 4000 training images the regression reaches 0.65 for Effusion and at most 0.54
  for the others.
* Five convolutions of 16 to 96 channels, trained on all labels of 4000 images for 16 epochs, reach 0.99, 0.99, 0.99,
  0.98, 0.92 and 0.92 at the test site, in the order of the table.

The sites' images are drawn by site, split, patient and image number. The test site's patients come from a hospital
each, drawn as the sites are, so that no training site is nearer to it than another.

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

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import from_dict, not_known, option, options
from fedatlas.core.seeds import seed_of

FINDINGS = ("Effusion", "Nodule", "Pneumothorax", "Consolidation", "Fibrosis", "Atelectasis")
READING = {"patient": "patient", "split": "split"}
_TABLE = "labels.csv"
_COLUMNS = ("file", "patient", "split")
_PREVALENCE = 0.3
_DIFFICULTY = 0.5
_DECOYS = 0.9  # share of the images without a finding that hold its decoy
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
        entry = {
            "name": name,
            "path": str(root),
            "format": "csv",
            "annotated": known,
            "reading": dict(READING),
        }
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


def _draw_split(
    how: PhantomXray, site: int | Literal["test"], split: Split, images: int
) -> Iterator[XrayCase]:
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


# -------------------------------------------------------------------------------------------- site and patient


@dataclass(frozen=True)
class _Device:
    """A site's machine and patients, as factors; at shift 0 all sites are alike."""

    gamma: float
    blur: float
    noise: float
    zoom: float
    width: float
    border: np.ndarray  # [4] left, right, top, bottom, dark by collimation

    @staticmethod
    def draw(rng: np.random.Generator, shift: float) -> "_Device":
        z = np.clip(rng.standard_normal(5), -2, 2) * shift
        border = np.maximum(rng.uniform(-0.15, 0.15, 4), 0) * shift
        return _Device(
            gamma=float(np.exp(0.4 * z[0])),
            blur=0.012 * float(np.exp(0.5 * z[1])),
            noise=0.012 * float(np.exp(0.5 * z[2])),
            zoom=float(np.exp(0.06 * z[3])),
            width=float(np.exp(0.06 * z[4])),
            border=border,
        )


@dataclass(frozen=True)
class _Person:
    """What a patient's images have in common."""

    age: float  # 0 young, 1 old
    width: float  # of the thorax, half
    apex: float
    dome: np.ndarray  # [2] height of the domes: the image's left, right
    heart: float  # 0 narrow, 1 wide
    tilt: float
    mediastinum: float
    rib_gap: float
    rib_slope: float
    rib_start: float
    rib_contrast: float
    clavicle: float
    fat: float  # soft tissue outside the ribs
    markings: float

    @staticmethod
    def draw(rng: np.random.Generator) -> "_Person":
        age = rng.uniform()
        return _Person(
            age=age,
            width=0.72 + 0.05 * rng.standard_normal(),
            apex=-0.74 + 0.04 * rng.standard_normal(),
            dome=np.array([0.50, 0.56]) + 0.06 * rng.standard_normal(2),
            heart=0.3 * age + 0.7 * rng.uniform(),
            tilt=0.35 + 0.1 * rng.standard_normal(),
            mediastinum=0.13 + 0.02 * rng.standard_normal(),
            rib_gap=0.17 + 0.015 * rng.standard_normal(),
            rib_slope=0.35 + 0.08 * rng.standard_normal(),
            rib_start=rng.uniform(),
            rib_contrast=0.12 + 0.015 * rng.standard_normal() - 0.02 * age,
            clavicle=-0.66 + 0.04 * rng.standard_normal(),
            fat=0.12 + 0.03 * rng.standard_normal(),
            markings=0.048 + 0.006 * rng.standard_normal(),
        )


# ---------------------------------------------------------------------------------------------------- the image

_LUNG, _BODY, _HEART = 0.17, 0.56, 0.64
"""What lung, soft tissue and heart show as, between black 0 and white 1."""


def _edge(distance: np.ndarray, width: float) -> np.ndarray:
    """1 inside (distance > 0), 0 outside, linear across `width`."""
    return np.clip(distance / width + 0.5, 0, 1)


def _grain(size: int, fine: float, coarse: float, rng: np.random.Generator) -> np.ndarray:
    """[N, N] noise between two lengths, mean 0, deviation 1."""
    white = rng.standard_normal((size, size))
    band = ndimage.gaussian_filter(white, fine * size / 2) - ndimage.gaussian_filter(white, coarse * size / 2)
    return (band - band.mean()) / band.std()


class _View:
    """Coordinates and anatomy of one image; every field is [N, N]."""

    def __init__(self, size: int, person: _Person, device: _Device, rng: np.random.Generator) -> None:
        line = (np.arange(size) + 0.5) / size * 2 - 1
        turn = 0.035 * rng.standard_normal()
        zoom = device.zoom * np.exp(0.04 * rng.standard_normal())
        right = line[None, :] - 0.05 * rng.standard_normal()
        down = line[:, None] - 0.05 * rng.standard_normal()
        self.x = (np.cos(turn) * right + np.sin(turn) * down) / zoom
        self.y = (np.cos(turn) * down - np.sin(turn) * right) / zoom
        self.size, self.person, self.rng = size, person, rng
        self.soft = 3.0 / size
        self.width = person.width * device.width
        self.breath = 0.04 * rng.standard_normal()
        self.side = np.where(self.x < 0, 0, 1)
        self.away = np.abs(self.x)
        self.wall = self.outer(self.y)
        self.inner = person.mediastinum + 0.05 * np.clip(self.y - 0.2, 0, 1)
        middle = (self.away - 0.5 * self.width) / (0.5 * self.width)
        self.dome = person.dome[self.side] + self.breath + 0.03 + 0.22 * middle**2
        self.depth = self.wall - self.away

    def outer(self, y: Any) -> Any:
        """Distance of the ribs' inner border from the midline."""
        apex, foot = self.person.apex, 1.25
        part = np.clip((y - apex) / (foot - apex), 0, 1)
        return self.width * np.clip(part * (1 - part) * 4, 0, 1) ** 0.38

    def lungs(self) -> np.ndarray:
        cavity = np.minimum(self.depth, self.away - self.inner)
        return _edge(np.minimum(cavity, self.dome - self.y), self.soft)

    def spot(self, *, low: float = 0.12, high: float = 0.88) -> tuple[float, float]:
        """A place in a lung, away from its borders by the parts `low` and `high` of its width and height."""
        person, rng = self.person, self.rng
        s = int(rng.integers(2))
        y = person.apex + 0.14 + rng.uniform(low, high) * (person.dome[s] - person.apex - 0.14)
        inner = 0.22 if s == 0 or y < 0 else 0.34
        x = inner + rng.uniform(low, high) * (float(self.outer(y)) - inner)
        return (x if s else -x), float(y + self.breath)


def _draw(
    how: PhantomXray, truth: Mapping[str, bool], person: _Person, device: _Device, rng: np.random.Generator
) -> np.ndarray:
    """[N, N] uint8."""
    view = _View(how.size, person, device, rng)
    kinds: dict[str, str] = {}
    for name in FINDINGS:
        decoy = rng.uniform() < _DECOYS
        kinds[name] = "finding" if truth.get(name) else "decoy" if decoy else "none"
    ease = {n: 1.3 - 0.6 * (how.of("difficulty", n) if n in truth else _DIFFICULTY) for n in FINDINGS}

    y, away, soft = view.y, view.away, view.soft
    air = view.lungs()
    heart = _heart(view)
    air = air * (1 - heart)

    shown = np.full((how.size, how.size), _BODY)
    shown += (_LUNG - _BODY) * air + (_HEART - _BODY) * heart * _edge(view.dome - y, soft)
    texture = person.markings * _grain(how.size, 0.02, 0.07, rng) * (1.15 - 0.3 * away / view.width)
    texture += _fibrosis(view, kinds["Fibrosis"], ease["Fibrosis"])
    texture, line = _pneumothorax(view, texture, kinds["Pneumothorax"], ease["Pneumothorax"])
    texture += _consolidation(view, kinds["Consolidation"], ease["Consolidation"])
    texture += _nodule(view, kinds["Nodule"], ease["Nodule"])
    texture += _atelectasis(view, kinds["Atelectasis"], ease["Atelectasis"])
    shown += (texture + line) * air
    shown = _effusion(view, shown, air, kinds["Effusion"], ease["Effusion"])
    shown += _bones(view)

    # the body's outline: neck, shoulders, flanks
    flank = view.width + person.fat
    shoulder = np.clip((y + 0.98) / 0.22, 0, 1)
    half = 0.26 + (flank + 0.10 - 0.26) * shoulder - 0.10 * np.clip((y + 0.5) / 0.5, 0, 1)
    shown *= _edge(half - away, soft) * np.clip(0.8 + (half - away) * 1.2, 0, 1)

    exposure = device.gamma * np.exp(0.12 * rng.standard_normal())
    shown = (0.04 + 0.03 * rng.standard_normal()) + (1 + 0.08 * rng.standard_normal()) * shown
    shown = np.clip(shown, 0, 1) ** exposure
    shown = ndimage.gaussian_filter(shown, device.blur * how.size)
    shown += device.noise * rng.standard_normal(shown.shape)
    left, right, top, bottom = np.rint(device.border * how.size).astype(int)
    frame = np.zeros_like(shown)
    frame[top : how.size - bottom, left : how.size - right] = 1
    return np.rint(np.clip(shown * frame, 0, 1) * 255).astype(np.uint8)


def _bones(view: _View) -> np.ndarray:
    """Ribs, spine, clavicles, windpipe and aortic knob: what they add."""
    x, y, away, person, soft = view.x, view.y, view.away, view.person, view.soft
    phase = (
        y - person.rib_slope * away + 0.45 * (away / view.width) ** 2 * person.rib_slope
    ) / person.rib_gap
    ribs = np.cos(2 * np.pi * (phase + person.rib_start))
    inside = _edge(view.depth + 0.05, soft) * _edge(away - 0.1, 0.1) * _edge(0.75 - y, 0.2)
    bones = person.rib_contrast * np.clip(ribs, 0, 1) * inside
    middle = _edge(0.085 - away, soft)
    bones += middle * (0.08 + 0.025 * np.cos(2 * np.pi * y / 0.13))
    drop = person.clavicle - 0.22 * (away - 0.1) - y
    bones += 0.11 * _edge(0.028 - np.abs(drop), soft) * _edge(away - 0.07, soft) * _edge(0.62 - away, soft)
    bones -= 0.12 * np.exp(-((x / 0.045) ** 2)) * _edge(-0.28 - y, 0.1)
    knob = (x - person.mediastinum - 0.01) ** 2 + (y + 0.36) ** 2
    bones += (0.08 + 0.12 * person.age) * _edge(0.095 - np.sqrt(knob), soft)
    for sign in (-1, 1):
        hilum = ((x - sign * (person.mediastinum + 0.07)) / 0.07) ** 2 + ((y + 0.02) / 0.13) ** 2
        bones += 0.13 * np.exp(-hilum)
    return bones


def _heart(view: _View) -> np.ndarray:
    """The heart, wider in the old."""
    rng, person = view.rng, view.person
    half = view.width * (0.36 + 0.14 * np.clip(person.heart + 0.1 * rng.standard_normal(), 0, 1))
    high = 0.30
    dx, dy = view.x - 0.09 - 0.04 * rng.standard_normal(), view.y - 0.34 - view.breath
    u = (dx * np.cos(person.tilt) + dy * np.sin(person.tilt)) / half
    v = (dy * np.cos(person.tilt) - dx * np.sin(person.tilt)) / high
    return _edge((1 - np.sqrt(u**2 + v**2)) * high, view.soft)


def _fibrosis(view: _View, kind: str, ease: float) -> np.ndarray | float:
    rng = view.rng
    grain = _grain(view.size, 0.035, 0.09, rng)
    top, bright = rng.uniform(-0.25, 0.1), 0.07 * ease
    if kind == "none":
        return 0.0
    form = np.exp(-((grain / 0.4) ** 2)) if kind == "finding" else grain
    form = (form - form.mean()) / form.std()
    return bright * form * _edge(view.y - top, 0.3)


def _effusion(view: _View, shown: np.ndarray, air: np.ndarray, kind: str, ease: float) -> np.ndarray:
    rng = view.rng
    which = int(rng.integers(3))
    sides = np.isin(view.side, [0, 1] if which == 2 else [which])
    high = rng.uniform(0.14, 0.34) * ease
    if kind == "none":
        return shown
    part = np.clip((view.away - view.inner) / (view.wall - view.inner + 1e-3), 0, 1)
    angle = view.person.dome[view.side] + view.breath + 0.22
    level = angle - high * (0.2 + 0.8 * part**2)
    full = _BODY - _LUNG
    if kind == "finding":
        fluid = _edge(view.y - level, view.soft) * sides
        return shown + fluid * air * (_BODY - shown)
    shadow = _edge(view.y - level, 0.16) * sides * _edge(view.depth + 0.05, 0.1)
    below = np.clip(1 - (view.y - view.dome) / 0.12, 0, 1) * (view.y > view.dome)
    return shown + shadow * (0.7 * full * air + 0.09 * ease * below * (1 - air))


def _nodule(view: _View, kind: str, ease: float) -> np.ndarray | float:
    rng = view.rng
    cx, cy = view.spot()
    radius, bright = rng.uniform(0.09, 0.12) * ease, rng.uniform(0.30, 0.40) * ease
    turn, bend = rng.uniform(0, np.pi), rng.uniform(-0.25, 0.25)
    if kind == "none":
        return 0.0
    dx, dy = view.x - cx, view.y - cy
    if kind == "finding":
        return bright * _edge(radius - np.sqrt(dx**2 + dy**2), view.soft)
    return bright * _bar(
        dx, dy, turn, half=2.2 * radius, thick=0.35 * radius, bend=bend / radius, soft=view.soft
    )


def _bar(
    dx: np.ndarray, dy: np.ndarray, turn: float, *, half: float, thick: float, bend: float, soft: float
) -> np.ndarray:
    along = dx * np.cos(turn) + dy * np.sin(turn)
    across = dy * np.cos(turn) - dx * np.sin(turn) - bend * along**2
    return _edge(half - np.abs(along), soft) * _edge(thick - np.abs(across), soft)


def _pneumothorax(
    view: _View, texture: np.ndarray, kind: str, ease: float
) -> tuple[np.ndarray, np.ndarray | float]:
    rng = view.rng
    side, gap = int(rng.integers(2)), rng.uniform(0.2, 0.32) * ease
    if kind == "none":
        return texture, 0.0
    here = view.side == side
    gap = gap * (1 + 0.6 * np.clip(-view.y - 0.1, 0, 1)) * np.clip((0.75 - view.y) / 0.5, 0, 1)
    inward = view.depth - gap
    line = 0.15 * ease * here * np.exp(-((inward / (0.6 * view.soft)) ** 2))
    if kind == "finding":
        texture = texture * (1 - here * _edge(-inward, view.soft))
    return texture, line


def _consolidation(view: _View, kind: str, ease: float) -> np.ndarray | float:
    rng = view.rng
    cx, cy = view.spot(low=0.2, high=0.8)
    wide, high = rng.uniform(0.18, 0.28, 2) * ease
    bright = rng.uniform(0.16, 0.24) * ease
    grain = _grain(view.size, 0.025, 0.08, rng)
    if kind == "none":
        return 0.0
    patch = np.exp(-((((view.x - cx) / wide) ** 2 + ((view.y - cy) / high) ** 2) ** 1.5))
    patch = patch * np.where(view.x * cx > 0, 1, 0)
    return patch * (bright + (0.19 * ease * np.tanh(1.5 * grain) if kind == "finding" else 0.0))


def _atelectasis(view: _View, kind: str, ease: float) -> np.ndarray | float:
    rng = view.rng
    cx, cy = view.spot(low=0.3, high=0.8)
    half, thick = rng.uniform(0.17, 0.24) * ease, rng.uniform(0.022, 0.03) * ease
    bright, turn = rng.uniform(0.30, 0.40) * ease, rng.uniform(-0.45, 0.45)
    bend = rng.uniform(-0.5, 0.5)
    if kind == "none":
        return 0.0
    turn += 0 if kind == "finding" else np.pi / 2
    dx, dy = view.x - cx, view.y - cy
    return bright * _bar(dx, dy, turn, half=half, thick=thick, bend=bend, soft=view.soft)
