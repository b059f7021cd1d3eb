"""Intervals by patient of the differences between arms, where labels are of whole images."""

import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedatlas.compare.plan import Comparison
from fedatlas.compare.running import Cells, Tell, kept_model, rows_of
from fedatlas.core.errors import DataError, FedAtlasError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import seed_of
from fedatlas.evaluation.classification import Predictions, Threshold, bootstrap_difference
from fedatlas.federation.design import Experiment, cache_folder
from fedatlas.federation.trained import Trained, fitted_thresholds
from fedatlas.transport.rounds import read_run
from fedatlas.transport.store import write_atomic

DRAWS = 1000
"""Resamples of patients where the federation file has none of its own."""

LEAST_PATIENTS = 5
"""With fewer patients on either side a class is left out of intervals: many resamples would have no value."""


@dataclass(frozen=True, eq=False)
class Predicted:
    """What a run's model says of a site's images. scores, truth [N, C]; known [N, C]: is there a truth.

    images: a digest of their names, which are equal where two runs predicted the same. patients [N]: SITE/NUMBER, in the order of their
    names.
    """

    images: str
    patients: list[str]
    scores: np.ndarray
    truth: np.ndarray
    known: np.ndarray


class Predictor:
    """Predictions of an arm's runs on the images of its sites, which are on this machine."""

    def __init__(self, comparison: Comparison, arm: str) -> None:
        self.comparison, self.arm = comparison, arm
        self._experiment: Experiment | None = None

    def _sources(self) -> Mapping[str, Any]:
        if self._experiment is None:
            federation = next(iter(self.comparison.federations[self.arm].values()))
            self._experiment = Experiment(federation, cache_folder(federation, self.comparison.folder))
            self._experiment.prepare()
        return self._experiment.sources

    def of(self, seed: int, site: str) -> Predicted:
        """Of a finished run; kept in the site's folder of the run. Raises DataError or FederationError where the
        images are not here."""
        path, measure = self.comparison.path(self.arm, seed), self.comparison.measure
        model = kept_model(path, measure.model)
        finished = read_run(path)["finished"]
        file = path / "sites" / site / f"predictions-{measure.split}-{model.replace('/', '_')}.npz"
        found = _kept(file, finished)
        if found is None:
            found = _predict(Trained(path, model), self._sources()[site], site, measure.split)
            _keep(file, finished, found)
        return found


def predict(comparison: Comparison, arm: str, seed: int) -> None:
    """Makes the predictions of a finished run that its intervals need; nothing where `bootstrap` has none.

    Raises DataError or FederationError where the images or the run's models are not here.
    """
    if has_intervals(comparison):
        predictor = Predictor(comparison, arm)
        for site in dict.fromkeys(row["site"] for row in rows_of(comparison, arm, seed)):
            predictor.of(seed, site)


def _kept(file: Path, finished: str) -> Predicted | None:
    """Predictions of the run that finished then; None where they are not there, of another run, or damaged."""
    try:
        with np.load(file, allow_pickle=False) as kept:
            if str(kept["finished"]) != finished:
                return None
            patients = [str(name) for name in kept["patients"]]
            return Predicted(
                str(kept["images"]),
                patients,
                kept["scores"].astype(float),
                kept["truth"].astype(float),
                kept["known"],
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _keep(file: Path, finished: str, found: Predicted) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    made = io.BytesIO()
    np.savez(
        made,
        finished=np.array(finished),
        images=np.array(found.images),
        patients=np.array(found.patients, dtype=np.str_),
        scores=found.scores,  # in full: close to 1 float32 would make ties of them
        truth=found.truth.astype(np.float32),
        known=found.known,
    )
    write_atomic(file, made.getvalue())


def _predict(trained: Trained, source: Any, site: str, split: str) -> Predicted:
    """The model that the site is given as that of the federation, on all images of a split; full batches, as in the
    final evaluation."""
    if not trained.model.startswith("local/"):
        file = trained.folder.path / "models" / f"{trained.model}.fa"
        trained.members = trained.method.eval_members(trained.folder.state(file, trained.method), site)
    size, samples = trained.federation.evaluation.batch, list(source.volumes(split))
    scores = np.zeros((len(samples), len(trained.space)))
    for start in range(0, len(samples), size):
        images = torch.stack([sample.image for sample in samples[start : start + size]])
        count = len(images)
        full = torch.cat([images, images[:1].expand(size - count, -1, -1, -1)])
        scores[start : start + count] = trained.findings(full)[:count].numpy()
    stacked = {
        key: np.stack([getattr(sample, key).numpy() for sample in samples])
        if samples
        else np.zeros((0, len(trained.space)))
        for key in ("truth", "scored")
    }
    names = "\n".join(sample.case for sample in samples)
    number = {name: i for i, name in enumerate(sorted({str(sample.patient) for sample in samples}))}
    return Predicted(
        hashlib.sha256(names.encode()).hexdigest(),
        [f"{site}/{number[str(sample.patient)]:06}" for sample in samples],
        scores,
        stacked["truth"],
        stacked["scored"].astype(bool),
    )


def has_intervals(comparison: Comparison) -> bool:
    return comparison.first.task == "classification" and not comparison.turns


def bootstrap(
    comparison: Comparison, cells: Mapping[str, Mapping[int, Cells]], tell: Tell
) -> dict[str, dict[str, Any]]:
    """arm -> interval by patient of its difference to its reference; {} where labels are not of whole images, or sites are left
    out in turn, each with thresholds of its own.

    A resample takes the same patients in all cells. The difference is the mean over all cells of site, class and seed that have
    a value, where each has LEAST_PATIENTS with and without the class; else, over classes and seeds, of the images of these
    cells put together, of the classes that then have as many. Of a class that all images of a site have, or all lack, the site has no value.
    """
    if not has_intervals(comparison):
        return {}
    predictors, found = {arm: Predictor(comparison, arm) for arm in comparison.arms}, {}
    for arm, reference in comparison.compared.items():
        seeds = [seed for seed in cells[reference] if seed in cells[arm]]
        if not seeds:
            continue
        tell(f"{arm}: interval by patient")
        try:
            found[arm] = _interval(comparison, predictors[reference], predictors[arm], seeds, cells)
        except FedAtlasError as error:
            found[arm] = {"value": None, "reason": str(error).splitlines()[0]}
    return found


def _interval(
    comparison: Comparison,
    reference: Predictor,
    other: Predictor,
    seeds: Sequence[int],
    cells: Mapping[str, Mapping[int, Cells]],
) -> dict[str, Any]:
    parts: list[_Part] = []
    patients: dict[str, list[str]] = {}
    kept: dict[str, tuple[Any, list[str]]] = {}
    limits: dict[tuple[int, str], tuple[Threshold, Threshold]] = {}
    for seed in seeds:
        ours, theirs = (_thresholds(comparison, arm, seed) for arm in (other.arm, reference.arm))
        theirs_too = {site for site, _ in cells[other.arm][seed]}
        for site in dict.fromkeys(site for site, _ in cells[reference.arm][seed] if site in theirs_too):
            a, b = other.of(seed, site), reference.of(seed, site)
            if a.images != b.images or list(ours) != list(theirs):
                raise DataError(
                    f"{other.arm} and {reference.arm} have other images or classes at site {site}"
                )
            both = a.known & b.known
            if (a.truth != b.truth)[both].any():
                raise DataError(f"{other.arm} and {reference.arm} have other labels at site {site}")
            if kept.setdefault(site, (a.images, list(a.patients))) != (a.images, list(a.patients)):
                raise DataError(f"the seeds of {other.arm} have other images at site {site}")
            patients[site] = a.patients
            for c, name in enumerate(ours):
                if all(cells[p.arm][seed].get((site, name)) is not None for p in (other, reference)):
                    known = a.known[:, c] & b.known[:, c]
                    truth = a.truth[:, c]
                    parts.append(_Part((seed, name), site, a.scores[:, c], b.scores[:, c], truth, known))
                    limits[seed, name] = (ours[name], theirs[name])
    apart = all(_fewest([part], patients) >= LEAST_PATIENTS for part in parts)
    columns = [[part] for part in parts]
    if not apart:
        together = dict.fromkeys(part.of for part in parts)
        columns = [[part for part in parts if part.of == of] for of in together]
        columns = [column for column in columns if _fewest(column, patients) >= LEAST_PATIENTS]
    if not columns:
        return {
            "value": None,
            "reason": f"no class has {LEAST_PATIENTS} patients with it and {LEAST_PATIENTS} without it",
        }
    starts, count = {}, 0
    for site, names in patients.items():
        starts[site], count = count, count + len(names)
    who = [name for names in patients.values() for name in names]

    def spread(key: str, empty: Any) -> np.ndarray:
        """[N of all sites, columns]"""
        made = np.full((len(who), len(columns)), empty)
        for index, column in enumerate(columns):
            for part in column:
                values = getattr(part, key)
                made[starts[part.site] : starts[part.site] + len(values), index] = values
        return made

    truth, known = spread("truth", 0.0), spread("known", False)
    found = bootstrap_difference(
        Predictions(spread("one", 0.0), truth, known, who),
        Predictions(spread("other", 0.0), truth, known, who),
        comparison.metric,
        np.random.default_rng(seed_of("comparison", comparison.name, other.arm)),
        thresholds=[limits[column[0].of][0] for column in columns],
        other_thresholds=[limits[column[0].of][1] for column in columns],
        bins=comparison.first.evaluation.bins,
        draws=comparison.first.evaluation.draws or DRAWS,
    )
    made = asdict(found)
    made.pop("classes")
    over = dict.fromkeys(column[0].of[1] for column in columns)
    return made | {"unit": "site" if apart else "together", "columns": len(columns), "over": list(over)}


@dataclass(frozen=True, eq=False)
class _Part:
    """Of one class and seed (`of`), the images [N] of a site: the scores of both arms, truth, and where it is known."""

    of: tuple[int, str]
    site: str
    one: np.ndarray
    other: np.ndarray
    truth: np.ndarray
    known: np.ndarray


def _fewest(column: Sequence[_Part], patients: Mapping[str, Sequence[str]]) -> int:
    """The smaller one of the numbers of patients with a positive image and with a negative one."""
    counts = [0, 0]
    for part in column:
        names = np.array(patients[part.site])
        for value in (0, 1):
            counts[value] += len(set(names[part.known & (part.truth == value)].tolist()))
    return min(counts)


def _thresholds(comparison: Comparison, arm: str, seed: int) -> dict[str, Threshold]:
    """class -> threshold, of every class in the order of the label space."""
    path = comparison.path(arm, seed)
    names = LabelSpace.from_plain(read_run(path)["labels"]).names
    return fitted_thresholds(path, kept_model(path, comparison.measure.model), names)
