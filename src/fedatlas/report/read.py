"""Reads a run folder into memory. Its layout is that of `docs/explanation/reading-a-report.md`."""

import json
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

import numpy as np
import yaml

from fedatlas.core.errors import RunFolderError, WireError, parse_json, require_object, require_run
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.pictures import in_pixels, lengths_in_pixels, of_pictures
from fedatlas.evaluation.classification import Histogram, Threshold
from fedatlas.evaluation.statistics import (
    COLUMNS,
    RowDict,
    read_rows,
    require_rows,
)

GLOBAL = "best"
RANKS = ("worst", "median", "best")


@dataclass(frozen=True)
class SiteInfo:
    """What run.json says of a site; counts are by class name, cases and patients by split.

    role: "train", or "test" where a site is only tested on. positives, negatives: of labels of whole images.
    """

    annotated: tuple[str, ...] = ()
    role: str = "train"
    cases: Mapping[str, int] = field(default_factory=dict)
    patients: Mapping[str, int] = field(default_factory=dict)
    labelled: Mapping[str, int] = field(default_factory=dict)
    positives: Mapping[str, int] = field(default_factory=dict)
    negatives: Mapping[str, int] = field(default_factory=dict)
    voxels: Mapping[str, int] = field(default_factory=dict)
    spacing: tuple[tuple[float, ...], ...] = ()
    orientation: tuple[str, ...] = ()

    @property
    def spacings(self) -> list[str]:
        """In words."""
        return [" × ".join(f"{step:.3g}" for step in steps) for steps in self.spacing]


@dataclass(frozen=True)
class Round:
    """One completed round: its log.json, and the rows of its evaluation (empty: not evaluated)."""

    number: int
    sites: Mapping[str, Mapping[str, float]]
    cost: Mapping[str, Mapping[str, float]]
    phases: Mapping[str, float]
    lost: Mapping[str, str]
    server_peak_mb: float | None
    rows: tuple[RowDict, ...]
    epsilon: float | None = None
    releases: float | None = None
    """The private updates that had left the site with most of them."""


@dataclass(frozen=True)
class Exchange:
    """What the federation file says of models on their way.

    up, down: the kind of compression, "none" where there is none. privacy, secure: their keys; None where off.
    """

    up: str = "none"
    down: str = "none"
    fraction: float | None = None
    feedback: bool = True
    privacy: Mapping[str, Any] | None = None
    secure: Mapping[str, Any] | None = None

    @property
    def compressed(self) -> bool:
        """Is anything sent compressed?"""
        return (self.up, self.down) != ("none", "none")


@dataclass(frozen=True)
class Plane:
    """A whole slice. image [H, W] in 0..1; spacing [2] in mm; truth, prediction: class -> mask [H, W], the truth of the
    classes that have one."""

    name: str
    image: np.ndarray
    spacing: tuple[float, float]
    truth: Mapping[str, np.ndarray]
    prediction: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Overlay:
    """A stored picture of a case. value: the mean of its dice, or that of class_, for which it was chosen; dice: class ->
    value, of the classes that were scored. class_ is "" where the case was chosen for all classes."""

    path: Path
    site: str
    case: str
    value: float
    rank: str
    class_: str
    dice: Mapping[str, float]

    def planes(self) -> list[Plane]:
        """The slices of the case. Raises RunFolderError where their parts do not fit together."""
        found = []
        with opened(self.path) as stored:
            if "image" in stored:  # of earlier versions: one slice, one class
                names, scored = [self.class_], [True]
                parts = {"axial": [stored[key] for key in ("image", "truth", "prediction", "spacing")]}
                parts["axial"][1:3] = [mask[None] for mask in parts["axial"][1:3]]
            else:
                names, scored = [str(name) for name in stored["names"]], stored["scored"].tolist()
                there = [key.removesuffix("-image") for key in stored.files if key.endswith("-image")]
                parts = {
                    plane: [stored[f"{plane}-{what}"] for what in ("image", "truth", "prediction", "spacing")]
                    for plane in there
                }
            for plane, (image, truth, prediction, spacing) in parts.items():
                found.append(self._plane(plane, image, truth, prediction, spacing, names, scored))
        return found

    def _plane(
        self,
        name: str,
        image: np.ndarray,
        truth: np.ndarray,
        prediction: np.ndarray,
        spacing: np.ndarray,
        names: Sequence[str],
        scored: Sequence[bool],
    ) -> Plane:
        wanted = (len(names), *image.shape)
        if image.ndim != 2 or truth.shape != wanted or prediction.shape != wanted:
            raise RunFolderError(
                f"{self.path}: image {image.shape}, truth {truth.shape} and prediction {prediction.shape} of {len(names)} "
                "classes; planes of one shape are needed. Delete the file to leave it out"
            )
        mm = tuple(float(value) for value in np.asarray(spacing).ravel())
        if len(mm) != 2 or not all(value > 0 for value in mm):
            raise RunFolderError(f"{self.path}: spacing {mm}; two positive lengths in mm are needed")
        of_truth = {c: mask > 0 for c, mask, told in zip(names, truth, scored, strict=True) if told}
        of_model = {c: mask > 0 for c, mask in zip(names, prediction, strict=True)}
        clean = np.nan_to_num(np.asarray(image, dtype=np.float32))
        return Plane(name, clean, (mm[0], mm[1]), of_truth, of_model)


@dataclass(frozen=True)
class Example:
    """One stored image of a class: the model's score and the truth.

    kind: present or absent, by the truth, and high or low, the end of the scores that it stands at.
    """

    path: Path
    site: str
    class_: str
    case: str
    score: float
    threshold: float | None
    kind: str

    @property
    def wrong(self) -> str:
        """How the threshold errs on it; "" where it does not."""
        there = self.kind.startswith("present")
        if self.threshold is None or (self.score >= self.threshold) == there:
            return ""
        return "missed" if there else "false alarm"

    def arrays(self) -> tuple[np.ndarray, np.ndarray | None]:
        """image [H, W] in 0..1, and its Grad-CAM map in 0..1 where there is one. Raises RunFolderError where they
        do not fit together."""
        with opened(self.path) as stored:
            image = np.asarray(stored["image"], dtype=np.float32)
            cam = np.asarray(stored["cam"], dtype=np.float32) if "cam" in stored else None
        if image.ndim != 2 or (cam is not None and cam.shape != image.shape):
            raise RunFolderError(
                f"{self.path}: image {image.shape} and map {None if cam is None else cam.shape}; two planes of one "
                "shape are needed. Delete the file to leave it out"
            )
        return np.nan_to_num(image), None if cam is None else np.nan_to_num(cam)


class Counted(NamedTuple):
    """A histogram of the final evaluation, of one class at one site."""

    split: str
    model: str
    site: str
    class_: str
    histogram: Histogram


class Thresholds(NamedTuple):
    """thresholds.json: where each class begins to be positive, on which split and by which criterion."""

    split: str
    criterion: str
    classes: Mapping[str, Threshold]


@dataclass(frozen=True)
class Run:
    """A run folder in memory. rows is None where there is no rows.csv yet; overlays are read when drawn.

    start: the record of round 0, in which a method begins and no site trains, where it was kept. Of labels of whole
    images: histograms and thresholds of the final evaluation, and bins of the calibration error. findings: of the whole
    image, beside segmentation; their rows, of the final evaluation, are finding_rows and in none of the others. plain: the
    federation file as plain values. epsilon, releases: as of a round, of all that was ever sent, a round that broke off included.
    A row is of a class that is known where its site annotates the class in any training case.
    """

    folder: Path
    info: Mapping[str, Any]
    classes: tuple[str, ...]
    sites: Mapping[str, SiteInfo]
    start: Round | None
    rounds: tuple[Round, ...]
    best_round: int | None
    """None where no round was chosen, or each site chose its own."""
    best_rounds: Mapping[str, int]
    """site -> the round that it chose for its own model, where each site did."""
    best_score: float | None
    rows: tuple[RowDict, ...] | None
    federation: str | None
    exchange: Exchange = field(default_factory=Exchange)
    histograms: tuple[Counted, ...] = ()
    thresholds: Thresholds | None = None
    bins: int = 10
    findings: tuple[str, ...] = ()
    finding_rows: tuple[RowDict, ...] = ()
    plain: Mapping[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    releases: float | None = None

    @property
    def images(self) -> bool:
        """Are the labels of whole images?"""
        return self.info["labels"].get("level") == "image"

    @property
    def measure(self) -> str:
        """The metric of the large numbers, the curves and the matrices."""
        return "auroc" if self.images else "dice"

    @property
    def pictures(self) -> bool:
        """Are all training images pictures?"""
        return of_pictures(self.info["sites"])

    @property
    def in_pixels(self) -> bool:
        """Are lengths those of pixels, at any site?"""
        return lengths_in_pixels(self.info["sites"])

    def lengthless(self, site: str) -> bool:
        """Are a site's images pictures of which nobody says how wide a pixel is?"""
        return self.pictures and in_pixels(self.sites[site].spacing)

    @property
    def unit(self) -> str:
        """What is scored."""
        return "image" if self.images else "case"

    def title(self, class_: str) -> str:
        """A class as a reader calls it: by `labels.display` of the federation file, or its own name with spaces for
        underscores."""
        labels = self.plain.get("labels")
        shown = labels.get("display") if isinstance(labels, dict) else None
        return str((shown or {}).get(class_) or class_.replace("_", " "))

    @property
    def titles(self) -> list[str]:
        """The classes as a reader calls them."""
        return [self.title(class_) for class_ in self.classes]

    @property
    def parties(self) -> list[str]:
        """Whoever has a cost: the sites, and the one that merges them."""
        return sorted({*self.info["sites"], *(site for entry in self.rounds for site in entry.cost)})

    @property
    def records(self) -> tuple[Round, ...]:
        """The start, where it was kept, and every round."""
        return (*([self.start] if self.start else []), *self.rounds)

    @property
    def locals(self) -> tuple[str, ...]:
        """The local models that were evaluated, in the order of the sites."""
        return tuple(m for m in models(self.rows or ()) if m.startswith("local/"))

    def annotated_at(self, site: str) -> tuple[str, ...]:
        """The classes that a site annotates; none of a site that is not known."""
        return self.sites.get(site, SiteInfo()).annotated

    def annotates(self, model: str, class_: str) -> bool:
        """Did the training data of a model hold annotations of a class: any site's, or its own site's."""
        if model.startswith("local/"):
            return class_ in self.annotated_at(model.removeprefix("local/"))
        return any(class_ in site.annotated for site in self.sites.values() if site.role != "test")


# ---------------------------------------------------------------------------------------------- reading


def read(folder: Path) -> Run:
    """Reads a run folder; what a young or interrupted run does not have yet is left empty.

    Raises RunFolderError for a folder without a readable run.json, and for a damaged file, naming it.
    """
    require_run(folder, "run.json")
    file = folder / "run.json"
    info = require_object(file, _json(file), hash=str | None, machine=dict | None, versions=dict | None)
    labels = info.get("labels")
    missing = [
        key
        for key, found in (
            ("labels.names", isinstance(labels, dict) and isinstance(labels.get("names"), list)),
            ("sites", isinstance(info.get("sites"), dict)),
        )
        if not found
    ]
    if missing:
        raise RunFolderError(f"{file}: {' and '.join(missing)} missing; a run folder's run.json has them")
    labels = require_object(f"{file}, labels", labels, findings=list | None)
    rounds = tuple(_rounds(folder / "rounds"))
    csv = folder / "rows.csv"
    rows = _rows(read_rows(csv), csv) if csv.is_file() else None
    if rows is not None:
        require_rows(csv, info, len(rows))
    findings = tuple(str(name) for name in labels.get("findings") or ())
    of_findings = tuple(row for row in rows or () if row["class"] in findings)
    if findings:
        rows = None if rows is None else tuple(row for row in rows if row["class"] not in findings)
        rounds = tuple(
            replace(entry, rows=tuple(row for row in entry.rows if row["class"] not in findings))
            for entry in rounds
        )
    every = [*(rows or ()), *(row for entry in rounds for row in entry.rows)]

    names = [str(name) for name in labels["names"]]
    if labels.get("exclusive", True) and names[:1] == [BACKGROUND]:
        names = names[1:]
    classes = dict.fromkeys([*names, *sorted({row["class"] for row in every} - set(names))])
    sites = {name: _site(f"{file}, {name}", entry) for name, entry in sorted(info["sites"].items())}
    for name in sorted({row["site"] for row in every} - set(sites)):
        sites[name] = SiteInfo()

    def of_site(of: Sequence[RowDict]) -> tuple[RowDict, ...]:
        return tuple(
            {**row, "known": bool(row["known"]) or row["class"] in sites[row["site"]].annotated} for row in of
        )

    rows = None if rows is None else of_site(rows)
    rounds = tuple(replace(entry, rows=of_site(entry.rows)) for entry in rounds)

    file = folder / "federation.yaml"
    federation = _text(file) if file.is_file() else None
    plain = _plain(federation, file)
    best, best_rounds = _best(folder / "best.json")
    last = max(rounds, key=lambda entry: entry.number, default=None)
    released = folder / "released.json"
    sent = require_object(released, _json(released)) if released.is_file() else {}
    return Run(
        folder=folder,
        info=info,
        classes=tuple(classes),
        sites=sites,
        start=next((entry for entry in rounds if entry.number == 0), None),
        rounds=tuple(entry for entry in rounds if entry.number > 0),
        best_round=best["round"] if best and "sites" not in best else None,
        best_rounds=best_rounds,
        best_score=number(best.get("score")),
        rows=rows,
        federation=federation,
        exchange=_exchange(plain),
        histograms=_histograms(folder / "histograms.json"),
        thresholds=_thresholds(folder / "thresholds.json"),
        bins=_bins(plain),
        findings=findings,
        finding_rows=of_findings,
        plain=plain,
        epsilon=number(sent["epsilon"]) if "epsilon" in sent else last and last.epsilon,
        releases=max(
            (n for n in (number(sent.get("most")), last and last.releases) if n is not None), default=None
        ),
    )


def overlays(run: Run, split: str) -> list[Overlay]:
    """The stored pictures of a split, of the model "best" where it has any, else of the first other."""
    found = []
    for site, path in _pictures(run, split):
        with opened(path) as stored:
            class_, value = str(stored["class"]), float(stored["value"])
            dice = {class_: value}
            if "names" in stored:
                named = zip(stored["names"].tolist(), stored["dice"].tolist(), strict=True)
                dice = {str(name): score for name, score in named if math.isfinite(score)}
            rank = path.stem.rpartition("--")[2]
            found.append(Overlay(path, site, str(stored["case"]), value, rank, class_, dice))
    return found


KINDS = {
    "present-high": "Present, highest scores",
    "present-low": "Present, lowest scores",
    "absent-high": "Absent, highest scores",
    "absent-low": "Absent, lowest scores",
}
"""Of examples: the truth, and the end of the scores -> title."""
PICTURES = 128
"""Examples on a page with which every kind has four; beyond it, two."""


def examples_each(run: Run) -> int:
    """How many examples of a kind the page shows."""
    return 4 if 4 * len(KINDS) * len(run.classes) <= PICTURES else 2


def first_with(run: Run, stored: Callable[..., Any], *more: Any) -> tuple[str, Any]:
    """The split whose pictures the page shows, those of test cases if there are any, and what `stored` reads of it."""
    for split in ("test", "validation"):
        if found := stored(run, split, *more):
            return split, found
    return "", None


def examples(run: Run, split: str, most: int) -> dict[str, dict[str, list[Example]]]:
    """class -> kind -> the `most` extreme images of all sites, the most extreme first; models as `overlays`."""
    found: dict[str, dict[str, list[Example]]] = {}
    for site, path in _pictures(run, split):
        with opened(path) as stored:
            end = path.stem.rpartition("--")[2].split("-")[1:2]
            truth = "present" if bool(stored["truth"]) else "absent"
            entry = Example(
                path=path,
                site=site,
                class_=str(stored["class"]),
                case=str(stored["case"]),
                score=float(stored["score"]),
                threshold=number(float(stored["threshold"])),
                kind=f"{truth}-{'low' if end == ['low'] else 'high'}",
            )
        found.setdefault(entry.class_, {}).setdefault(entry.kind, []).append(entry)
    for kinds in found.values():
        for kind, entries in kinds.items():
            sign = -1 if kind.endswith("high") else 1
            kinds[kind] = sorted(entries, key=lambda e: (sign * e.score, e.site, e.case, e.path.name))[:most]
    return found


def _pictures(run: Run, split: str) -> Iterator[tuple[str, Path]]:
    """(site, file) of the stored pictures of a split, of one model at each site."""
    for site in sorted(path for path in (run.folder / "sites").glob("*") if path.is_dir()):
        folders = sorted(path for path in (site / "overlays" / split).glob("[!.]*") if path.is_dir())
        folders.sort(key=lambda path: (path.name != GLOBAL, path.name != "last", path.name))
        for path in sorted(folders[0].glob("*.npz")) if folders else ():
            yield site.name, path


def pick(stored: Sequence[Overlay]) -> list[tuple[str, Overlay]]:
    """The worst, the median and the best of the pictures of several sites, each case once.

    Worst and best are taken over all; the median is the middle one of the sites' medians.
    """
    scored = sorted((o for o in stored if math.isfinite(o.value)), key=lambda o: (o.value, o.site, o.case))
    if not scored:
        return [("not scored", entry) for entry in stored[:1]]
    medians = [o for o in scored if o.rank == "median"] or scored
    chosen = (("worst", scored[0]), ("best", scored[-1]), ("median", medians[(len(medians) - 1) // 2]))
    once: dict[tuple[str, str], tuple[str, Overlay]] = {}
    for rank, entry in chosen:
        once.setdefault((entry.site, entry.case), (rank, entry))
    if len(once) == 1:
        return [("only", scored[0])]
    return sorted(once.values(), key=lambda item: RANKS.index(item[0]))


def worst(stored: Sequence[Overlay], class_: str) -> Overlay | None:
    """The lowest of the pictures that were chosen for a class; None where there are none."""
    of_class = (entry for entry in stored if entry.class_ == class_)
    return min(of_class, key=lambda entry: (entry.value, entry.site, entry.case), default=None)


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _best(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """best.json, {} where there is none; and site -> its best round, of sites that choose for themselves."""
    if not path.is_file():
        return {}, {}
    best = require_object(path, _json(path), round=int, sites=dict | None)
    sites = sorted((best.get("sites") or {}).items())
    return best, {site: require_object(f"{path}, {site}", kept, round=int)["round"] for site, kept in sites}


def _rounds(folder: Path) -> Iterator[Round]:
    whole = [path for path in folder.glob("*/log.json") if path.parent.name.isdigit()]
    for path in sorted(whole, key=lambda path: int(path.parent.name)):
        log = require_object(path, _json(path), round=int | None)
        of_sites = {
            key: {
                site: _each(f"{path}, {key}, {site}", told, _NUMBER)
                for site, told in _each(f"{path}, {key}", log.get(key), dict).items()
            }
            for key in ("sites", "cost")
        }
        rows = path.with_name("rows.json")
        yield Round(
            number=int(log.get("round") or path.parent.name),
            **of_sites,
            phases=_each(f"{path}, phases", log.get("phases"), _NUMBER),
            lost=_each(f"{path}, lost", log.get("lost"), str),
            server_peak_mb=number(log.get("server_peak_mb")),
            rows=_rows(_json(rows), rows) if rows.is_file() else (),
            epsilon=number(log.get("epsilon")),
            releases=_releases(log),
        )


_NUMBER = int | float | None
"""What JSON has for a number; null where it is not finite."""


def _each(source: str, found: Any, kind: type | UnionType) -> dict[str, Any]:
    """An object, empty where there is none, each of whose values is of one kind. Raises RunFolderError as `require_object`."""
    found = require_object(source, {} if found is None else found)
    return require_object(source, found, **dict.fromkeys(found, kind))


def _releases(log: Mapping[str, Any]) -> float | None:
    """`Round.releases`, of the run's own count where the log has it, else of what the sites logged."""
    released = log.get("released")
    of_sites = [
        number(site.get("releases")) for site in (log.get("sites") or {}).values() if isinstance(site, dict)
    ]
    every = [number(released.get("most")) if isinstance(released, dict) else None, *of_sites]
    return max((count for count in every if count is not None), default=None)


def _rows(found: Any, source: Path) -> tuple[RowDict, ...]:
    """Rows with every column; a value that is not finite is not defined."""
    if not isinstance(found, list):
        raise RunFolderError(f"{source}: a list of rows is expected. Evaluate the run again")
    rows = []
    for place, row in enumerate(found, 1):
        require_object(f"{source}, row {place}", row)
        missing = [column for column in COLUMNS if column not in row]
        if missing:
            raise RunFolderError(
                f"{source}: no {', '.join(map(repr, missing))}; a row has {', '.join(COLUMNS)}. "
                "Evaluate the run again"
            )
        value = number(row["value"])
        reason = row["reason"] or (
            "" if value is not None else "not finite" if row["value"] else "no reason given"
        )
        rows.append({**row, "value": value, "reason": reason})
    return tuple(rows)


def _site(source: str, found: Any) -> SiteInfo:
    lists = dict.fromkeys(("annotated", "spacing", "orientation"), list | None)
    entry = require_object(source, found, role=str | None, leaks=int | None, **lists)
    counts = ("cases", "patients", "labelled", "positives", "negatives", "voxels")
    try:
        spacing = tuple(tuple(float(step) for step in steps) for steps in entry.get("spacing") or ())
    except (TypeError, ValueError):
        raise RunFolderError(
            f"{source}: spacing is {json.dumps(entry['spacing'])[:60]}; a list of steps in mm per grid is expected, "
            "as [[1, 1, 2.5]]. Restore it, or run again"
        ) from None
    return SiteInfo(
        annotated=tuple(str(class_) for class_ in entry.get("annotated") or ()),
        role=entry.get("role") or "train",
        **{key: _each(f"{source}, {key}", entry.get(key), _NUMBER) for key in counts},
        spacing=spacing,
        orientation=tuple(str(code) for code in entry.get("orientation") or ()),
    )


def _plain(federation: str | None, source: Path) -> Mapping[str, Any]:
    """The keys of a resolved federation file; none where there is no file."""
    try:
        found = yaml.safe_load(federation or "")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RunFolderError(
            f"{source}: not valid YAML ({error}); it was cut short or edited. Restore it, or run again"
        ) from None
    return found if isinstance(found, dict) else {}


def _bins(plain: Mapping[str, Any]) -> int:
    """`evaluation.bins` of a federation file."""
    evaluation = plain.get("evaluation")
    bins = evaluation.get("bins") if isinstance(evaluation, dict) else None
    return bins if type(bins) is int and bins >= 1 else 10


def _exchange(plain: Mapping[str, Any]) -> Exchange:
    """The keys `comm`, `privacy` and `secure` of a federation file; all off where there is none."""
    comm, privacy, secure = (
        plain[key] if isinstance(plain.get(key), dict) else None for key in ("comm", "privacy", "secure")
    )
    comm = comm or {}
    return Exchange(
        up=str(comm.get("up", "none")),
        down=str(comm.get("down", "none")),
        fraction=number(comm.get("fraction")),
        feedback=comm.get("feedback") is not False,
        privacy=privacy,
        secure=secure,
    )


def _histograms(path: Path) -> tuple[Counted, ...]:
    if not path.is_file():
        return ()
    try:
        return tuple(
            Counted(
                str(entry["split"]),
                str(entry["model"]),
                str(entry["site"]),
                str(entry["class"]),
                Histogram.from_dict(entry["histogram"]),
            )
            for entry in _json(path)
        )
    except (KeyError, TypeError, WireError) as error:
        raise RunFolderError(
            f"{path}: not a list of histograms ({type(error).__name__}: {error}). Evaluate the run again"
        ) from error


def _thresholds(path: Path) -> Thresholds | None:
    if not path.is_file():
        return None
    try:
        found = _json(path)
        classes = {
            str(name): Threshold(
                number(entry["value"]), number(entry.get("reached")), str(entry.get("reason") or "")
            )
            for name, entry in found["classes"].items()
        }
        return Thresholds(str(found["split"]), str(found["criterion"]), classes)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path}: not a table of thresholds ({type(error).__name__}: {error}). Evaluate the run again"
        ) from error


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _json(path: Path) -> Any:
    try:
        return parse_json(_text(path))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(
            f"{path}: not valid JSON ({error}); it was cut short or edited. Restore it, or run again"
        ) from error


class opened:
    """An overlay file; whatever numpy finds wrong with it becomes a RunFolderError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        try:
            self.stored = np.load(self.path, allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise self._damaged(error) from error
        return self.stored

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.stored.close()
        if isinstance(error, OSError | ValueError | EOFError | KeyError | zipfile.BadZipFile):
            raise self._damaged(error) from error

    def _damaged(self, error: BaseException) -> RunFolderError:
        return RunFolderError(
            f"{self.path}: not a readable overlay ({error}); delete the file to leave it out of the report"
        )


def models(rows: Iterable[RowDict]) -> tuple[str, ...]:
    """The models of some rows: best, last, then the local ones by site."""
    return tuple(sorted({row["model"] for row in rows}, key=lambda m: (m != GLOBAL, m != "last", m)))
