"""What every arm makes of the same cases, for pictures; it needs the sites' data on this machine.

Shapes: C classes, H rows and W columns of a slice, X, Y, Z cells of a volume.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import Tell, kept_model, rows_of
from fedatlas.core.errors import DataError, FedAtlasError
from fedatlas.data.index import SiteConfig
from fedatlas.evaluation.metrics import whole_organs
from fedatlas.evaluation.pictures import grey, ras_spacing, to_ras, turned
from fedatlas.evaluation.voxels import decide
from fedatlas.federation.design import cache_folder
from fedatlas.federation.file import Federation
from fedatlas.federation.tasks import task_of
from fedatlas.federation.trained import Trained
from fedatlas.report.meshes import coarse, factors
from fedatlas.report.tables import has_truth
from fedatlas.transport.rounds import read_run
from fedatlas.transport.store import write_atomic

VERSION = 4
"""Of the files that keep what was predicted; one of another version is made again."""


@dataclass(frozen=True, eq=False)
class Solids:
    """A case in three dimensions. truth, prediction: class -> the share of every cell [X, Y, Z] that it fills, as of
    `meshes.coarse`; spacing [3]: of a cell in mm. x goes to the patient's right, y to the front, z up."""

    spacing: tuple[float, float, float]
    truth: Mapping[str, np.ndarray]
    prediction: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Shown:
    """One slice of a case as viewers show it. image [H, W] in 0..1; spacing [2] in mm; truth, prediction: class ->
    mask [H, W]; the truth of those that have one. known: the classes that the site annotates in the case. solids: the whole
    case, where it has more than one slice."""

    case: str
    image: np.ndarray
    spacing: tuple[float, float]
    truth: Mapping[str, np.ndarray]
    prediction: Mapping[str, np.ndarray]
    known: tuple[str, ...] = ()
    solids: Solids | None = None

    def annotated(self) -> tuple[str, ...]:
        """The classes that the site annotates in the case; of a case without any, as of a site that is only tested, those
        that are scored."""
        return self.known or tuple(self.truth)


@dataclass(frozen=True)
class Subject:
    """A finished run of which a model is shown, under the name of its arm. model: as the run keeps it, or "local" for
    every site's own local model. runs: the folder in which preprocessed cases are kept, unless the federation names
    another. turns: where sites are left out in turn, site -> the run that is shown there in place of this one."""

    arm: str
    path: Path
    federation: Federation
    model: str
    split: str
    runs: Path
    turns: Mapping[str, "Subject"] = field(default_factory=dict)

    def at(self, site: str) -> "Subject":
        """The run that is shown at a site."""
        return self.turns.get(site, self)

    def file(self, site: str, what: str) -> Path:
        """Where the run that is shown at a site keeps what was predicted of a case of it."""
        if site in self.turns:
            return self.turns[site].file(site, what)
        return self.path / "sites" / site / f"{what}-{self.split}-{self.model_at(site).replace('/', '_')}.npz"

    def model_at(self, site: str) -> str:
        """The model that is shown at a site."""
        return f"local/{site}" if self.model == "local" else self.model

    @property
    def finished(self) -> str:
        """When the run ended."""
        return str(read_run(self.path)["finished"])

    def trained(self, site: str) -> Trained:
        """The model as it is evaluated at a site."""
        model = self.model_at(site)
        trained = Trained(self.path, model)
        if not model.startswith("local/"):
            state = trained.folder.state(self.path / "models" / f"{model}.fa", trained.method)
            trained.members = trained.method.eval_members(state, site)
        return trained


class Cases:
    """The cases of sites, read where their data lie; arms with one preprocessing share them."""

    def __init__(self) -> None:
        self._sources: dict[str, Any] = {}

    def __call__(self, subject: Subject, trained: Trained, site: str, case: str) -> Any:
        """A Volume. DataError, or another FedAtlasError, where it cannot be read here."""
        of_split = self._source(subject, trained, site).volumes(subject.split)
        volume = next((volume for volume in of_split if volume.case == case), None)
        if volume is None:
            raise DataError(
                f"{case} is not a {subject.split} case of {site} here; its data are of another time or place"
            )
        return volume

    def names(self, subject: Subject, trained: Trained, site: str) -> list[str]:
        """The cases of the subject's split that have labels, in order of name."""
        items = self._source(subject, trained, site).items[subject.split]
        return [item.title for item in items if item.scored]

    def _source(self, subject: Subject, trained: Trained, site: str) -> Any:
        federation, entry = subject.federation, there(subject, site)
        divided = (federation.evaluation.split_seed, federation.evaluation.validation)
        key = repr((entry, federation.preprocessing, divided, trained.space, federation.seed))
        if key not in self._sources:
            task = task_of(federation)
            index = task.read(federation, entry, Path(str(entry.path)))
            cache = cache_folder(federation, subject.runs)
            self._sources[key] = task.source(federation, index, trained.space, cache)
        return self._sources[key]


def there(subject: Subject, site: str) -> SiteConfig:
    """A site of the subject's federation. DataError where its data are not on this machine."""
    entry = next((entry for entry in subject.federation.sites if entry.name == site), None)
    if entry is None or entry.path is None or not Path(entry.path).exists():
        # without the name, so that a page tells it once for all sites
        given = entry is not None and entry.path is not None
        why = "no such folder" if given else "the federation file gives no path"
        raise DataError(f"the site's data are not on this machine ({why}); make the page where they are")
    return entry


def subjects(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> list[Subject]:
    """The first finished seed of every arm that has one, with the model that is measured."""
    found = []
    measure = comparison.measure

    def subject(arm: str, trained: str, seed: int) -> Subject:
        path = comparison.path(trained, seed)
        model = "local" if arm in measure.local else kept_model(path, measure.model)
        return Subject(
            arm, path, comparison.federations[trained][seed], model, measure.split, comparison.folder
        )

    for arm in comparison.arms:
        for seed in seeds[arm][:1]:
            turns = {site: subject(arm, comparison.turns[arm][site], seed) for site in comparison.left_out}
            found.append(replace(subject(arm, comparison.trained(arm)[0], seed), turns=turns))
    return found


def median_cases(sites: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """site -> its case with the median metric, the mean over the rows of the case: of one metric, one split and one model
    of every arm."""
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["case"] and row["value"] is not None and has_truth(row):
            values.setdefault((row["site"], row["case"]), []).append(row["value"])
    found = {}
    for site in (name for name in sites if any(name == at for at, _ in values)):
        ranked = sorted((float(np.mean(of)), case) for (at, case), of in values.items() if at == site)
        found[site] = ranked[(len(ranked) - 1) // 2][1]
    return found


def cases_of(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The median case of every site, over the first finished seed of every arm."""
    shown = None if comparison.left_out else 1  # of folds the first alone, whose model is shown
    rows = (
        row
        for arm in comparison.arms
        for seed in seeds[arm][:1]
        for trained in comparison.trained(arm)[:shown]
        for row in rows_of(comparison, trained, seed)
    )
    return median_cases([site.name for site in comparison.first.sites], rows)


def overlays(
    comparison: Comparison, seeds: Mapping[str, Sequence[int]], tell: Tell = lambda text: None
) -> tuple[dict[str, dict[str, Shown]], dict[str, list[str]]]:
    """`predicted` of the first finished seed of every arm and the median case of every site; nothing where whole images
    are classified."""
    if comparison.first.task != "segmentation":
        return {}, {}
    return predicted(subjects(comparison, seeds), cases_of(comparison, seeds), tell)


def predicted(
    subjects: Sequence[Subject], cases: Mapping[str, str], tell: Tell = lambda text: None
) -> tuple[dict[str, dict[str, Shown]], dict[str, list[str]]]:
    """site -> arm -> what the arm's model makes of the site's case; and why there is no picture -> of what.

    Each is predicted once, and kept in the site's folder of the run.
    """
    found: dict[str, dict[str, Shown]] = {}
    problems: dict[str, list[str]] = {}
    read = Cases()
    for site, case in cases.items():
        for subject in subjects:
            try:
                shown = _of_run(subject.at(site), site, case, read, tell)
            except FedAtlasError as error:
                problems.setdefault(str(error).splitlines()[0], []).append(f"{subject.arm} at {site}")
            else:
                found.setdefault(site, {})[subject.arm] = shown
    return found, problems


def _of_run(subject: Subject, site: str, case: str, read: Cases, tell: Tell) -> Shown:
    file, finished = subject.file(site, "compared"), subject.finished
    if file.exists():
        with np.load(file, allow_pickle=False) as kept:
            of = tuple(str(kept[key]) for key in ("version", "finished", "case") if key in kept)
            if of == (str(VERSION), finished, case):
                return _from_arrays(kept)
    there(subject, site)
    tell(f"{subject.arm}: picture of {case} at {site}")
    trained = subject.trained(site)
    shown = _shown(read(subject, trained, site, case), trained)
    keep(file, _to_arrays(shown) | {"version": np.array(VERSION), "finished": np.array(finished)})
    return shown


def keep(file: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays into a site's folder of a run."""
    made = io.BytesIO()
    np.savez_compressed(made, **arrays)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, made.getvalue())


def _to_arrays(shown: Shown) -> dict[str, Any]:
    arrays: dict[str, Any] = {"case": np.array(shown.case), "image": shown.image}
    arrays |= {"spacing": np.array(shown.spacing), "known": np.array(shown.known, dtype=str)}
    arrays |= {f"truth:{name}": mask for name, mask in shown.truth.items()}
    arrays |= {f"prediction:{name}": mask for name, mask in shown.prediction.items()}
    if shown.solids is not None:
        arrays["cell"] = np.array(shown.solids.spacing)
        arrays |= {f"solid-truth:{name}": share for name, share in shown.solids.truth.items()}
        arrays |= {f"solid-prediction:{name}": share for name, share in shown.solids.prediction.items()}
    return arrays


def _from_arrays(kept: Any) -> Shown:
    masks: dict[str, dict[str, np.ndarray]] = {}
    for key in kept.files:
        of, colon, name = key.partition(":")
        if colon:
            masks.setdefault(of, {})[name] = kept[key]
    first, second = (float(v) for v in kept["spacing"])
    solids = None
    if "cell" in kept:
        x, y, z = (float(v) for v in kept["cell"])
        solids = Solids((x, y, z), masks.get("solid-truth", {}), masks.get("solid-prediction", {}))
    known = tuple(str(name) for name in kept["known"])
    truth, prediction = masks.get("truth", {}), masks.get("prediction", {})
    return Shown(str(kept["case"]), kept["image"], (first, second), truth, prediction, known, solids)


def _shown(volume: Any, trained: Trained) -> Shown:
    """A case and its prediction, and of both the axial slice that shows most of the truth: with the largest sum over
    classes of the area, each over the largest of the class."""
    space = trained.space
    truth, found = volume.truth("federation"), trained.probabilities(volume.image)
    decided = decide(found, space.exclusive)
    if volume.whole:
        truth, decided = whole_organs(truth, space), whole_organs(decided, space)
    letters, image = trained.preprocessing.orientation, volume.image[0].float().numpy()

    def upright(voxels: np.ndarray) -> np.ndarray:
        return to_ras(voxels, letters) if voxels.ndim == 3 else voxels

    def masks(labels: np.ndarray, classes: Iterable[int]) -> dict[str, np.ndarray]:
        each = ((c, labels == c if space.exclusive else labels[c] > 0) for c in classes)
        return {space.names[c]: upright(mask) for c, mask in each}

    of_truth = masks(truth, [c for c in space.foreground if volume.scored[c]])
    of_model = masks(decided, space.foreground)
    known = tuple(space.names[c] for c in space.foreground if volume.known[c])
    image, spacing, solids = upright(image), tuple(volume.spacing), None
    if image.ndim == 3:
        spacing = ras_spacing(spacing, letters)
        if min(image.shape) > 1:
            by = factors(image.shape, spacing)
            x, y, z = (float(step * n) for step, n in zip(spacing, by, strict=True))
            cells = ({name: coarse(mask, by) for name, mask in of.items()} for of in (of_truth, of_model))
            solids = Solids((x, y, z), *cells)
        areas = np.array([mask.sum((0, 1)) for mask in of_truth.values()], dtype=float)
        at = int((areas / np.maximum(areas.max(1, keepdims=True), 1)).sum(0).argmax())
        image = image[..., at]
        of_truth, of_model = (
            {name: mask[..., at] for name, mask in of.items()} for of in (of_truth, of_model)
        )
    return Shown(
        volume.case,
        turned(grey(image)),
        (float(spacing[1]), float(spacing[0])),
        {name: turned(mask) for name, mask in of_truth.items()},
        {name: turned(mask) for name, mask in of_model.items()},
        known,
        solids,
    )
