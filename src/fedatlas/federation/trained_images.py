"""A trained classifier taken from a run folder: findings of image files, scores of folders."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import not_known
from fedatlas.data import datasets
from fedatlas.data.datasets.shared.listing import Splitting
from fedatlas.data.formats.picture import PictureError
from fedatlas.data.images import ImageData, prepared
from fedatlas.data.index import SiteConfig, read_image_site
from fedatlas.data.inputs import judge
from fedatlas.evaluation.classification import NO_CUT, Threshold
from fedatlas.evaluation.images import Panel
from fedatlas.evaluation.statistics import write_rows
from fedatlas.federation.design import cache_folder
from fedatlas.federation.tasks import task_of
from fedatlas.federation.trained import Seen, Trained, Visitor, macro, require_kind, site_name, unseen
from fedatlas.federation.usable import Warn, require_files, require_new, silent
from fedatlas.transport.rounds import read_json
from fedatlas.transport.store import write_atomic


def thresholds_of(trained: Trained) -> dict[str, Threshold]:
    """class -> where the model calls it present, as fitted on the validation images of the run, or why it does not."""
    file = trained.folder.path / "thresholds.json"
    fitted = read_json(file)["models"].get(trained.model, {}) if file.exists() else {}
    found = {}
    for name in trained.space.names:
        entry = fitted.get(name, {})
        value, reason = entry.get("value"), entry.get("reason") or "none was fitted in the run"
        # earlier versions kept 0, which calls everything present
        found[name] = (
            Threshold(value) if value else Threshold(None, None, reason if value is None else NO_CUT)
        )
    return found


def probabilities(trained: Trained, images: Tensor) -> Tensor:
    """[N, C] float64 for prepared images [N, I, H, W]; NaN for a class for which none of the models may speak."""
    nets = [trained.network(member.model, member.net) for member in trained.members]
    return torch.from_numpy(Panel(trained.members, nets).predict(images).scores)


def predict_images(
    path: Path,
    files: Sequence[Path],
    out: Path,
    *,
    model: str = "best",
    device: str | None = None,
    overwrite: bool = False,
    anyway: bool = False,
    warn: Warn = silent,
    seen: Seen = unseen,
) -> dict[str, Any]:
    """Writes findings.csv: per image and class the probability, and 1 or 0 at the threshold where one was fitted.

    overwrite, anyway, warn: as of `predict_scans`. seen: is told of every image before it is read. Returns the same,
    and why a class has no threshold. Raises DataError for a file that is no image.
    """
    require_files(files)
    require_new(out, files, [out / "findings.csv"], overwrite)
    trained = Trained(path, model, device, warn)
    names, limits = trained.space.names, thresholds_of(trained)
    found = []
    for number, file in enumerate(files):
        seen(number, len(files), file.name)
        try:
            arrays, about = prepared(file, "", trained.federation.images)
        except PictureError as error:
            raise DataError(f"{file}: {error.what}; nothing was written") from None
        for text in judge(trained.inputs, about["look"], str(file), anyway=anyway):
            warn(text)
        row = probabilities(trained, torch.from_numpy(arrays["image"]).float()[None])[0].tolist()
        scores = {name: value if value == value else None for name, value in zip(names, row, strict=True)}
        present = {
            name: int(value >= limit)
            for name, value in scores.items()
            if value is not None and (limit := limits[name].value) is not None
        }
        found.append({"image": str(file), "probability": scores, "present": present})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", *names, *(f"{name} present" for name in names)])
    for entry in found:
        values = ["" if entry["probability"][name] is None else entry["probability"][name] for name in names]
        writer.writerow([entry["image"], *values, *(entry["present"].get(name, "") for name in names)])
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "findings.csv", text.getvalue().encode())
    return {
        "images": found,
        "thresholds": {name: limit.value for name, limit in limits.items()},
        "no_threshold": {name: limit.reason for name, limit in limits.items() if limit.value is None},
        "model": model,
        "table": str(out / "findings.csv"),
    }


def evaluate_images(
    path: Path,
    data: Path,
    *,
    format: str,
    reading: Mapping[str, Any] | None = None,
    model: str = "best",
    aliases: Mapping[str, str] | None = None,
    out: Path | None = None,
    device: str | None = None,
    anyway: bool = False,
    warn: Warn = silent,
    seen: Seen = unseen,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Scores a trained classifier on every annotated image of a folder, at the thresholds of the run.

    format, reading: as of a site of a federation file; anyway, warn: as of `predict_scans`. Returns the rows, and the classes of the folder that the model
    does not know: they are not scored.
    """
    trained = Trained(path, model, device, warn)
    federation, space, aliases = trained.federation, trained.space, dict(aliases or {})
    for theirs, ours in aliases.items():
        if ours not in space.names:
            raise not_known(f"--alias {theirs}={ours}: the class", ours, space.names)
    datasets.require(format, "--format: the layout", "findings")
    config = SiteConfig(  # type: ignore[call-arg]
        name=site_name(data),
        path=str(data.resolve()),
        format=format,  # type: ignore[arg-type]
        reading=dict(reading or {}),
        aliases=aliases,
        role="test",
    )
    nothing = Splitting(test=0, validation=0)  # type: ignore[call-arg]
    index = read_image_site(config, data, channels=federation.images.channels, splitting=nothing)
    ignored = [own for own in index.findings if aliases.get(own, own) not in space.names]
    if len(ignored) == len(index.findings):
        raise FederationError(
            f"{data}: none of its classes ({', '.join(ignored)}) is known to the model ({', '.join(space.names)}); "
            "give aliases, as --alias theirs=ours"
        )
    source = ImageData(index, space, federation.images, cache=cache_folder(federation, path.parent))
    source.prepare()
    require_kind(trained, source, anyway, warn)
    members = [member.to_payload() for member in trained.members]
    evaluator: Any = task_of(federation).evaluator(federation, space)
    reply = evaluator.evaluate(
        Visitor(config.name, source, trained, ("test",), seen),
        members,
        split="test",
        model=model,
        round=trained.round,
        grid="original",
        metrics=list(federation.evaluation.metrics),
        overlays=False,
        thresholds=[limit.value for limit in thresholds_of(trained).values()],
    )
    if out:
        write_rows(out, reply["rows"])
    return reply["rows"], ignored


def image_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Value and interval per class and metric as text, with the numbers of positives and negatives; of several classes
    also the mean of the values."""
    values = {(row["class"], row["metric"]): row for row in rows}
    classes = list(dict.fromkeys(row["class"] for row in rows))
    extra = ("_low", "_high", "_undefined")
    metrics = [m for m in dict.fromkeys(r["metric"] for r in rows) if not m.startswith("n_")]
    metrics = [m for m in metrics if not m.endswith(extra)]
    width = max([len(name) for name in classes] + [5])
    lines = [f"{'class':{width}}  {'n+':>5} {'n-':>5}  " + "  ".join(f"{m:>20}" for m in metrics)]
    for name in classes:
        cells = []
        for metric in metrics:
            row = values[name, metric]
            low, high = (
                values.get((name, f"{metric}_{end}"), {"value": None})["value"] for end in ("low", "high")
            )
            text = "not defined" if row["value"] is None else f"{row['value']:.3f}"
            text += "" if low is None or high is None else f" ({low:.3f}-{high:.3f})"
            cells.append(f"{text:>20}")
        counts = [int(values[name, key]["value"]) for key in ("n_positive", "n_negative")]
        lines.append(f"{name:{width}}  {counts[0]:5d} {counts[1]:5d}  " + "  ".join(cells))
    if len(classes) > 1:
        defined = {m: [v for name in classes if (v := values[name, m]["value"]) is not None] for m in metrics}
        cells = [f"{macro(defined[m]).strip():>20}" for m in metrics]
        lines.append(f"{'macro':{width}}  {'':11}  " + "  ".join(cells) + "  mean over classes")
    reasons = dict.fromkeys(
        f"{r['class']}: {r['reason']}" for r in rows if r["value"] is None and r["metric"] in metrics
    )
    return "\n".join([*lines, *(f"not defined, {reason}" for reason in reasons)])
