"""How flat the loss is around the models of a comparison, from what `fedatlas analyse hessian` left in its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedatlas.compare.plan import Comparison
from fedatlas.core.errors import RunFolderError
from fedatlas.report.analysis import kept
from fedatlas.transport.rounds import read_json

MEASURES = ("largest", "ratio", "trace")
"""The magnitude of the eigenvalue that is largest in magnitude; over that of the last of those that were asked for; the sum of all."""
_ALIKE = ("labels", "batches", "batch", "seed", "top", "loss")
"""Settings without which two analyses cannot be compared."""


def flatness(comparison: Comparison, seeds: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The Hessians of the arms that `analyses.hessian` names; {} where it names none, or none of their runs was analysed.

    seeds: arm -> those of which the run is finished. settings: of the first run that was analysed, with `loss`, its name and options. sites: of the spectra,
    in order. rows: arm, or "arm, MODEL" for another model than the best -> arm, model, and of each of MEASURES site -> seed ->
    a value, None where it is not defined. lacking: arm -> seeds that were not analysed; unlike: runs that were, with other settings than the first, which do not count;
    earlier: those analysed before the run went on, whose models have changed since, which do not count either; inexact: runs of which an eigenvalue is not
    within the tolerance.

    Raises RunFolderError for a damaged file.
    """
    found: dict[str, Any] = {
        "settings": {},
        "sites": [],
        "rows": {},
        "lacking": {},
        "unlike": [],
        "earlier": [],
        "inexact": [],
    }
    for arm in comparison.analyses.get("hessian", ()):
        for seed in seeds[arm]:
            path = comparison.path(arm, seed)
            told = kept(path, "hessian")
            if told is None:
                found["lacking"].setdefault(arm, []).append(seed)
                continue
            try:
                settings = {**told["settings"], "loss": told["loss"]}
                settings = {key: settings[key] for key in _ALIKE}
                if settings != (found["settings"] or settings):
                    found["unlike"].append(path.name)
                    continue
                if _earlier(path, told["spectra"], comparison.federation(arm).rounds):
                    found["earlier"].append(path.name)
                    continue
                found["settings"] = settings
                if not all(spectrum["converged"] for spectrum in told["spectra"]):
                    found["inexact"].append(path.name)
                for spectrum in told["spectra"]:
                    _add(found, arm, seed, spectrum)
            except (KeyError, TypeError, IndexError) as error:
                raise RunFolderError(
                    f"{path}: its analysis is damaged ({type(error).__name__}: {error}); run `fedatlas analyse hessian {path}` again"
                ) from None
    return found if found["rows"] or found["earlier"] else {}


def _earlier(path: Path, spectra: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Is one of the models that were analysed no longer the run's best or last? rounds: so many the finished run has."""
    now, best = {"last": rounds}, path / "best.json"
    if best.is_file():
        now["best"] = read_json(best)["round"]
    return any(one["round"] != now.get(one["model"].partition("/")[0], one["round"]) for one in spectra)


def _add(found: dict[str, Any], arm: str, seed: int, spectrum: Mapping[str, Any]) -> None:
    model, site = spectrum["model"], spectrum["site"]
    if site not in found["sites"]:
        found["sites"].append(site)
    row = found["rows"].setdefault(
        arm if model == "best" else f"{arm}, {model}",
        {"arm": arm, "model": model, **{measure: {} for measure in MEASURES}},
    )
    ratio = spectrum["ratio"]
    values = (abs(spectrum["eigenvalues"][0]), None if ratio is None else abs(ratio), spectrum["trace"])
    for measure, value in zip(MEASURES, values, strict=True):
        row[measure].setdefault(site, {})[seed] = value
