"""Pictures of what every arm makes of the same cases; they need the sites' data on this machine.

Shapes: C classes, H rows and W columns of a slice.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas.build import Experiment, cache_folder
from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import Tell, kept_model, rows_of
from fedatlas.engine.run import read_json
from fedatlas.engine.store import write_atomic
from fedatlas.errors import DataError, FedAtlasError
from fedatlas.evaluation.metrics import whole_organs
from fedatlas.experiment import Federation
from fedatlas.labels import LabelSpace
from fedatlas.method import eval_members
from fedatlas.report.tables import has_truth
from fedatlas.trained import Trained


@dataclass(frozen=True, eq=False)
class Shown:
    """One slice of a case as viewers show it. image [H, W] in 0..1; spacing [2] in mm; truth, prediction: class ->
    mask [H, W]; the truth of those that have one."""

    case: str
    image: np.ndarray
    spacing: tuple[float, float]
    truth: Mapping[str, np.ndarray]
    prediction: Mapping[str, np.ndarray]


def median_cases(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """site -> its case with the median metric, the mean over classes and over the first finished seed of every arm."""
    values: dict[tuple[str, str], list[float]] = {}
    for arm in comparison.arms:
        for seed in seeds[arm][:1]:
            for row in rows_of(comparison, arm, seed):
                if row["case"] and row["value"] is not None and has_truth(row):
                    values.setdefault((row["site"], row["case"]), []).append(row["value"])
    listed = [site.name for site in comparison.first.sites]
    found = {}
    for site in (name for name in listed if any(name == at for at, _ in values)):
        ranked = sorted((float(np.mean(of)), case) for (at, case), of in values.items() if at == site)
        found[site] = ranked[(len(ranked) - 1) // 2][1]
    return found


def overlays(
    comparison: Comparison, seeds: Mapping[str, Sequence[int]], tell: Tell = lambda text: None
) -> tuple[dict[str, dict[str, Shown]], dict[str, list[str]]]:
    """site -> arm -> what the first finished seed's model makes of the site's median case; and why there is no picture ->
    of what.

    Each is predicted once, and kept in the site's folder of the run.
    """
    if comparison.first.task != "segmentation":
        return {}, {}
    found: dict[str, dict[str, Shown]] = {}
    problems: dict[str, list[str]] = {}
    experiments: dict[str, Experiment] = {}
    for site, case in median_cases(comparison, seeds).items():
        for arm in comparison.arms:
            for seed in seeds[arm][:1]:
                try:
                    shown = _of_run(comparison, arm, seed, site, case, experiments, tell)
                except FedAtlasError as error:
                    problems.setdefault(str(error).splitlines()[0], []).append(f"{arm} at {site}")
                else:
                    found.setdefault(site, {})[arm] = shown
    return found, problems


def _of_run(
    comparison: Comparison,
    arm: str,
    seed: int,
    site: str,
    case: str,
    experiments: dict[str, Experiment],
    tell: Tell,
) -> Shown:
    path, measure = comparison.path(arm, seed), comparison.measure
    model = kept_model(path, measure.model)
    finished = read_json(path / "run.json")["finished"]
    file = path / "sites" / site / f"compared-{measure.split}-{model.replace('/', '_')}.npz"
    if file.exists():
        with np.load(file, allow_pickle=False) as kept:
            if (str(kept["finished"]), str(kept["case"])) == (finished, case):
                return _from_arrays(kept)
    federation = comparison.federations[arm][seed]
    experiment = _experiment(federation, comparison.folder, experiments)
    tell(f"{arm}: picture of {case} at {site}")
    trained = Trained(path, model)
    if not model.startswith("local/"):
        state = trained.folder.state(path / "models" / f"{model}.fa", trained.method)
        trained.members = eval_members(trained.method, state, site)
    volume = next((v for v in experiment.sources[site].volumes(measure.split) if v.case == case), None)
    if volume is None:
        raise DataError(
            f"{case} is not a {measure.split} case of {site} here; its data are of another time or place"
        )
    shown = _slice(volume, trained, experiment.space)
    arrays: dict[str, Any] = {"finished": np.array(finished), "case": np.array(case)}
    arrays |= {"image": shown.image, "spacing": np.array(shown.spacing)}
    arrays |= {f"truth:{name}": mask for name, mask in shown.truth.items()}
    arrays |= {f"prediction:{name}": mask for name, mask in shown.prediction.items()}
    made = io.BytesIO()
    np.savez_compressed(made, **arrays)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, made.getvalue())
    return shown


def _experiment(federation: Federation, folder: Path, experiments: dict[str, Experiment]) -> Experiment:
    """Arms with one preprocessing share their cases."""
    key = repr((federation.preprocessing, federation.labels))
    if key not in experiments:
        experiments[key] = Experiment(federation, cache_folder(federation, folder))
    return experiments[key]


def _from_arrays(kept: Any) -> Shown:
    masks: dict[str, dict[str, np.ndarray]] = {"truth": {}, "prediction": {}}
    for key in kept.files:
        of, colon, name = key.partition(":")
        if colon:
            masks[of][name] = kept[key]
    spacing = tuple(float(v) for v in kept["spacing"])
    return Shown(str(kept["case"]), kept["image"], (spacing[0], spacing[1]), **masks)


def _slice(volume: Any, trained: Trained, space: LabelSpace) -> Shown:
    """The axial slice that shows most of the truth: with the largest sum over classes of the area, each over the largest
    of the class."""
    truth, found = volume.truth("federation"), trained.probabilities(volume.image)
    decided = (found.argmax(0) if trained.space.exclusive else (found > 0.5)).numpy().astype(np.uint8)
    if volume.whole:
        truth, decided = whole_organs(truth, space), whole_organs(decided, trained.space)
    scored = [c for c in space.foreground if volume.scored[c]]
    of_truth = {space.names[c]: truth == c if space.exclusive else truth[c] > 0 for c in scored}
    of_model = {
        trained.space.names[c]: decided == c if trained.space.exclusive else decided[c] > 0
        for c in trained.space.foreground
    }
    image = volume.image[0].float().numpy()
    if image.ndim == 3:
        areas = np.array([mask.sum((0, 1)) for mask in of_truth.values()], dtype=float)
        z = int((areas / np.maximum(areas.max(1, keepdims=True), 1)).sum(0).argmax())
        image = image[..., z]
        of_truth, of_model = (
            {name: mask[..., z] for name, mask in of.items()} for of in (of_truth, of_model)
        )
    low, high = np.percentile(image, [0.5, 99.5])
    shown = np.clip((image - low) / max(high - low, 1e-6), 0, 1).astype(np.float32)

    def turned(plane: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(plane.T[::-1, ::-1])

    first, second = volume.spacing[:2]
    return Shown(
        volume.case,
        turned(shown),
        (float(second), float(first)),
        {name: turned(mask) for name, mask in of_truth.items()},
        {name: turned(mask) for name, mask in of_model.items()},
    )
