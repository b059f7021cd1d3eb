"""A trained model taken from a run folder, and how good it is on other folders of data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core.contract import Member
from fedatlas.core.errors import (
    DataError,
    FederationError,
    RunFolderError,
    WireError,
    require_object,
    require_run,
)
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.options import from_dict, not_known
from fedatlas.core.tensors import Tensors, load
from fedatlas.data import datasets
from fedatlas.data.checks import layout_problems, unscored_cases
from fedatlas.data.datasets.shared.listing import Problem, Split, Splitting
from fedatlas.data.formats.flat import Note
from fedatlas.data.images import ImageData
from fedatlas.data.index import AUTO, SiteConfig, SiteIndex, read_image_site, read_site
from fedatlas.data.inputs import judge, trained_on
from fedatlas.data.reading import gathered
from fedatlas.data.site_data import SiteData
from fedatlas.data.transforms import Preprocessing
from fedatlas.data.voxels import VoxelData
from fedatlas.evaluation.classification import NO_CUT, Threshold
from fedatlas.evaluation.evaluate import Candidate
from fedatlas.evaluation.images import Panel
from fedatlas.evaluation.postprocess import Postprocess, postprocess
from fedatlas.evaluation.statistics import POST, rows_text
from fedatlas.federation.design import Design, build_net, cache_folder, device_for, training_sites
from fedatlas.federation.file import inference_of, load_federation, make_method
from fedatlas.federation.tasks import task_of
from fedatlas.federation.usable import Warn, record_of, require_members, silent
from fedatlas.learning import inference
from fedatlas.transport import wire
from fedatlas.transport.rounds import RunFolder, read_json
from fedatlas.transport.store import read_whole, write_atomic

Seen = Callable[[int, int, str], None]
"""Is told how many cases are done, of how many, and the name of the next."""


def unseen(done: int, total: int, name: str) -> None:
    """A `Seen` that tells nobody."""


class Trained:
    """The model of a run folder, ready to predict.

    model: "best", "last" or "local/<site>"; round: the one that it is of. warn: is told what may make its word less reliable. inputs: what it was
    trained on, see `data.inputs`. Raises RunFolderError if the run or that model is not there, or not as it was left.
    """

    round: int

    def __init__(
        self, path: Path, model: str = "best", device: str | None = None, warn: Warn = silent
    ) -> None:
        require_run(path, "federation.yaml")
        self.folder = RunFolder(path)
        self.federation = load_federation(path / "federation.yaml")
        info, self.space, self.channels = record_of(path, warn)
        self.inputs = trained_on(info)
        if self.inputs is None:
            warn(
                f"{path}: does not say what its model was trained on; whether the input is of that kind is not checked"
            )
        self.method = make_method(self.federation)
        self.device = device_for(device, self.federation.engine.device)  # trained on a GPU, used anywhere
        self.model = model
        self.members = self._members(info["finished"] is not None)
        if info["finished"] is None:
            warn(
                f"{path}: is not finished, {self._progress()}; its model {model} is that of round {self.round}, and may be another when it is"
            )
        design = Design(self.federation, self.space, self.channels)
        source = f"{path}: model {model}"
        require_members(self.members, design.shapes, design.sample_shape, self.device.type, source)
        self.nets = inference.Nets(self.network)

    def _progress(self) -> str:
        return f"{max(self.folder.complete(), default=0)} of {self.federation.rounds} rounds are complete"

    def _members(self, finished: bool) -> list[Member]:
        if self.model.startswith("local/"):
            local = self.folder.local_models()
            site = self.model.removeprefix("local/")
            if site not in local:
                raise not_known(f"{self.folder.path}: the local model", site, local)
            file, self.round = local[site]
            try:
                kept: Any = wire.decode(read_whole(file), copy=False)
                return [Member.of_site(kept)]
            except (WireError, KeyError, TypeError, ValueError) as error:
                raise RunFolderError(f"{file}: cannot be read ({error})") from None
        if self.model not in ("best", "last"):
            raise RunFolderError(f"model {self.model!r}: not known; allowed: best, last, local/<site>")
        file = self.folder.path / "models" / f"{self.model}.fa"
        if not file.exists() and not finished:
            raise RunFolderError(
                f"{file}: missing, this run is not finished and has not kept such a model yet: {self._progress()}. Go on with it, by the "
                "command that began it"
            )
        if not file.parent.exists():
            raise RunFolderError(
                f"{file}: missing, this run has no models. One that was taken from a record has its scores alone; train it again, "
                "in another folder of runs and without --records"
            )
        if not file.exists() and (file.parent / "last.fa").exists():
            raise RunFolderError(f"{file}: missing, no round of this run was validated; use --model last")
        state = self.folder.state(file, self.method)
        self.round = state.round
        return self.method.eval_members(state, "")

    @property
    def preprocessing(self) -> Preprocessing:
        """From scans to the federation's grid."""
        assert self.federation.preprocessing is not None
        return self.federation.preprocessing

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        """The federation's net with the given values, on the chosen device."""
        net = build_net(self.federation, self.method, name, channels=self.channels, space=self.space)
        if model is not None:
            load(net, model)
        return net.to(self.device)

    def predict(self, image: Tensor) -> inference.Prediction:
        """Of an image [I, *S] on the federation's grid; several models are merged, or one is chosen, as the method
        says. Nets are made for those models alone that speak."""

        preprocessing, options = self.preprocessing, inference_of(self.federation)
        (found,) = inference.predict_each(
            [self.members], self.nets, image, preprocessing.patch, preprocessing.context, options, self.space
        )
        return found

    def choice(self, found: inference.Prediction) -> dict[str, str | None]:
        """{"chosen": the site whose model a selector took, None where it took none}; {} for models without a selector."""
        if inference.chooser(self.members) is None:
            return {}
        return {"chosen": None if found.chosen is None else training_sites(self.federation)[found.chosen]}

    def probabilities(self, image: Tensor) -> Tensor:
        """[C, *S] the voxels of `predict`."""
        return self.predict(image).voxels

    def findings(self, images: Tensor) -> Tensor:
        """[N, C] float64 for prepared images [N, I, H, W], where labels are of whole images; NaN for a class for which
        none of the models may speak."""
        nets = [self.network(member.model, member.net) for member in self.members]
        return torch.from_numpy(Panel(self.members, nets).predict(images).scores)

    def thresholds(self) -> dict[str, Threshold]:
        """class -> where the model calls a finding present, as fitted on the validation images of the run, or why it does
        not."""
        return fitted_thresholds(self.folder.path, self.model, self.space.names)

    @property
    def postprocess(self) -> Postprocess:
        """That of the run's `evaluation`, or where there is none its defaults."""
        return self.federation.evaluation.postprocess or Postprocess()  # type: ignore[call-arg]

    def clean(self, labels: np.ndarray) -> np.ndarray:
        """Labels on the grid of a file after `postprocess`; exclusive classes stay so."""
        return postprocess(labels, self.space, replace(self.postprocess, channels="exclusive"))


def fitted_thresholds(run: Path, model: str, names: Sequence[str]) -> dict[str, Threshold]:
    """class -> where a model of a run folder calls a finding present, or why it does not, of every class of `names`. Raises
    RunFolderError where thresholds.json is damaged."""
    file = run / "thresholds.json"
    models = require_object(file, read_json(file), models=dict)["models"] if file.exists() else {}
    other = {"best": "last", "last": "best"}.get(model, "")
    if model not in models and other in models:
        # where both are one and the same, thresholds are kept of one of them
        rounds = load_federation(run / "federation.yaml").rounds
        model = other if (run / "best.json").exists() and RunFolder(run).best_is_last(rounds) else model
    fitted = require_object(f"{file}, {model}", models.get(model, {}))
    found = {}
    for name in names:
        what = f"{file}, {model}, {name}"
        entry = require_object(what, fitted.get(name, {}), value=int | float | None, reason=str | None)
        value, reason = entry.get("value"), entry.get("reason") or "none was fitted in the run"
        # earlier versions kept 0, which calls everything present
        found[name] = (
            Threshold(value) if value else Threshold(None, None, reason if value is None else NO_CUT)
        )
    return found


def task_name(path: Path) -> str:
    """The task of a run. Raises RunFolderError if it is not a run folder."""
    require_run(path, "federation.yaml")
    return load_federation(path / "federation.yaml").task


def evaluate_folder(
    path: Path,
    data: Path,
    *,
    format: str | None = None,
    reading: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    model: str = "best",
    out: Path | None = None,
    device: str | None = None,
    post: bool = False,
    anyway: bool = False,
    warn: Warn = silent,
    seen: Seen = unseen,
    **tables: str,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Scores a trained model on every annotated case of a folder: on the original grids, or where labels are of whole
    images at the thresholds of the run.

    format, reading, tables: the layout of the folder, its options, and `table`, `labels`, `test_labels`, as a site of a
    federation has them; None: auto, or csv of whole images. aliases: its label names -> ours. Where these are not
    given, key by key, the folder of one of the run's sites is read as the federation file says of that site; where its own
    label files are read, its `annotated` and `whole` count, too, as in the run. post: score
    once more after post-processing also where the run's `evaluation` names none, see `Trained.postprocess`. anyway: as of
    `predict.predict_scans`. warn: is told what is odd about the folder and its images, and in the end what was assumed or
    changed when the scored cases were read, as `check` says it. seen: is told of every case before it is predicted. Returns
    the rows, and the labels of the folder that the model does not know: they are not scored.
    """
    trained = Trained(path, model, device, warn)
    federation, space, whole = trained.federation, trained.space, trained.space.level == "image"
    for site in federation.sites:
        if site.role == "train" and site.path and Path(site.path).resolve() == data.resolve():
            warn(
                f"{data}: is the data of the run's own site {site.name}; all of its labelled cases are scored, and "
                "cases of its training are among them"
            )
    own = _own_site(federation.sites, data, warn)
    index, unknown = _read_folder(trained, data, format, reading or {}, aliases or {}, tables, own, warn)
    for problem in (*index.problems, *unscored_cases(index)):
        if not problem.fatal:
            warn(str(replace(problem, offer="")))
    cache = cache_folder(federation, path.parent)
    evaluation, extra = federation.evaluation, dict[str, Any]()
    splits: tuple[Split, ...] = ("test",) if whole else ("train", "validation", "test")
    if whole:
        source: SiteData = ImageData(index, space, federation.images, cache=cache)
        extra["thresholds"] = [limit.value for limit in trained.thresholds().values()]
    else:
        source = Scored(index, space, trained.preprocessing, validation=0.0, cache=cache)
        if post:
            evaluation = replace(evaluation, postprocess=trained.postprocess)
    if source.channels != trained.channels:
        raise DataError(
            f"{data}: its scans have {source.channels} channels; the model was trained on {trained.channels}"
        )
    require_kind(trained, source, anyway, warn)
    evaluator = task_of(federation).evaluator(replace(federation, evaluation=evaluation), space)
    candidate = Candidate(model, trained.round, trained.members)
    site = Visitor(index.name, source, trained, splits, seen)
    rows: list[dict[str, Any]] = []
    for split in splits:
        reply = evaluator.evaluate_here(site, candidate, split, "original", list(evaluation.metrics), **extra)
        rows += reply["rows"]
    notes = notes_on_images(source) if whole else site.notes
    for note in gathered(index, notes):
        warn(str(note))
    if out:
        write_atomic(out, rows_text(rows).encode())
    return rows, unknown


TABLES = ("table", "labels", "test_labels")
"""Keys of a site that name what lies in a folder of scans."""


def _own_site(sites: Sequence[SiteConfig], data: Path, warn: Warn) -> SiteConfig | None:
    """The site of the run whose folder this is; None where there is none, or where several read it in different ways."""
    keys = ("format", "reading", "aliases", *TABLES)
    own = [site for site in sites if site.path and Path(site.path).resolve() == data.resolve()]
    if not own:
        return None
    differing = [key for key in keys if any(getattr(site, key) != getattr(own[0], key) for site in own)]
    if differing:
        warn(
            f"{data}: the run's sites {', '.join(site.name for site in own)} differ in its {', '.join(differing)}; what the "
            "federation file says of them is not used, give options"
        )
        return None
    if any(_counted(site) != _counted(own[0]) for site in own):
        warn(
            f"{data}: the run's sites {', '.join(site.name for site in own)} differ in which of its labels count; all that the "
            "model knows are scored, as they are"
        )
        return replace(own[0], role="test", whole=False)  # of which all is scored
    return own[0]


def _counted(site: SiteConfig) -> tuple[tuple[str, ...] | None, bool]:
    """Which labels of a site's test cases a run scores, None: all; and `SiteConfig.whole`."""
    all_of_them = site.role == "test" or site.score_all
    return None if all_of_them else site.annotated, site.whole


def _read_folder(
    trained: Trained,
    data: Path,
    format: str | None,
    reading: Mapping[str, Any],
    aliases: Mapping[str, str],
    tables: Mapping[str, str],
    own: SiteConfig | None,
    warn: Warn,
) -> tuple[SiteIndex, list[str]]:
    """The index of a folder, and its labels that the model does not know. format, reading, aliases, tables, warn: as of
    `evaluate_folder`; own: the run's site that it is of. Raises FederationError for a layout that is none, an alias of no
    class, and labels none of which is known."""
    space, whole = trained.space, trained.space.level == "image"
    ours = [*space.names, *space.findings]
    annotated, of_organs = None, False
    if own is not None:
        if format in (None, own.format):  # another layout has other options
            format, reading = own.format, {**own.reading, **reading}
        tables = {key: getattr(own, key) for key in TABLES} | dict(tables)
        if format == own.format and all(getattr(own, key) == file for key, file in tables.items()):
            annotated, of_organs = _counted(own)
    format = format or ("csv" if whole else AUTO)
    kinds: tuple[datasets.Kind, ...] = ("findings",) if whole else datasets.VOXELS
    datasets.require(format, "--format: the layout", *kinds, also=() if whole else (AUTO,))
    for theirs, target in aliases.items():
        if target not in ours:
            raise not_known(f"--alias {theirs}={target}: the class", target, ours)
    form = {"name": site_name(data), "path": str(data.resolve()), "format": format, "reading": dict(reading)}

    def index_of(**more: Any) -> SiteIndex:
        config = from_dict(SiteConfig, form | more, what="evaluate")
        if not whole:
            return read_site(config, data)
        nothing = Splitting(test=0, validation=0)  # type: ignore[call-arg]
        channels = trained.federation.images.channels
        return read_image_site(config, data, channels=channels, splitting=nothing)

    form |= {"role": "test"} if whole else tables
    index = index_of()
    labels = [name for name in dict.fromkeys((*index.names, *index.findings)) if name != BACKGROUND]
    if not labels:
        what = "".join(f"; {replace(problem, offer='')}" for problem in index.problems[:1])
        raise FederationError(f"{data}: holds no labels, and scores need them{what}")
    if own is not None:  # its aliases may be of a reference, too, which is not read here
        aliases = {name: own.aliases[name] for name in own.aliases if name in labels} | dict(aliases)
    known = [name for name in labels if aliases.get(name, name) in ours]
    if not known:
        raise FederationError(
            f"{data}: none of its {'classes' if whole else 'labels'} ({', '.join(labels)}) is known to the model "
            f"({', '.join(ours)}); give aliases, as --alias theirs=ours"
        )
    counted = replace(index, annotated=annotated, aliases=dict(aliases))
    scored = [name for name in known if name in (*counted.used, *counted.used_findings)]
    left = [name for name in known if name not in scored]
    if own is not None and left:
        warn(f"{data}: `annotated` of the run's site {own.name} leaves out {', '.join(left)}; not scored")
    aliases = {name: aliases[name] for name in aliases if name not in left}
    if whole:
        index = replace(index, aliases=dict(aliases), findings=tuple(scored))
    else:  # again, without what is not scored
        index = index_of(annotated=tuple(scored), aliases=dict(aliases))
        index = replace(index, whole=of_organs)
    return index, [name for name in labels if name not in known and aliases.get(name) != BACKGROUND]


def notes_on_images(source: SiteData) -> list[Note]:
    """What was assumed when whole images were read."""
    remedy = "nothing is to be done if that is right"
    return [
        Note(item.case.images[0], text, remedy)
        for item in source.everything
        for text in source._entry(item).meta["notes"]
    ]


def site_name(data: Path) -> str:
    """What a folder outside the federation is called: its name, as far as a site may be called so."""
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in data.resolve().name)
    return name.strip("-")[:100] or "folder"


def require_kind(trained: Trained, source: SiteData, anyway: bool, warn: Warn) -> None:
    """Raises DataError for a folder with an image of another kind than the model was trained on; tells of how many
    images differ in what, with an example."""
    found: dict[str, list[str]] = {}
    for file, look in source.looks().items():
        for text in judge(trained.inputs, look, file, anyway=anyway):
            found.setdefault(text.removeprefix(f"{file}: ").partition(";")[0].split(" of ")[0], []).append(
                text
            )
    for texts in found.values():
        warn(texts[0] + (f" (and {len(texts) - 1} more such images)" if len(texts) > 1 else ""))


class Scored(VoxelData):
    """The data of a folder that is scored and trains nothing, whatever its layout lists its cases for."""

    def _layout_problems(self, index: SiteIndex) -> list[Problem]:
        found = layout_problems(index)
        if not any(item.scored or any(self._scored_findings(item)) for item in self.everything):
            what = f"empty: {index.root} holds no case with a label or a finding that the model knows"
            remedy = "see that labels are where the layout has them, and what its table lists per case"
            found.append(Problem(index.name, "", what, remedy))
        return found


class Visitor:
    """A site outside the federation, for evaluation. splits: the splits to evaluate, in order. notes: what is to be said of
    the files of the cases that were scored."""

    def __init__(
        self, name: str, source: SiteData, trained: Trained, splits: Sequence[Split], seen: Seen = unseen
    ) -> None:
        self.name, self.source, self.network, self.device = name, source, trained.network, trained.device
        self.folder, self.labels = trained.folder.path / "visitors" / name, source.labels
        self.seen, self.done = seen, 0
        self.notes: list[Note] = []
        self.total = sum(len(source.items[split]) for split in splits)

    def volumes(self, split: str) -> Iterator[Any]:
        """The cases of a split, one at a time; `seen` is told of each."""
        self.seen(self.done, self.total, "")
        for volume in self.source.volumes(split):
            self.seen(self.done, self.total, volume.case)
            yield volume
            self.notes += getattr(volume, "notes", ())  # of outlines alone
            self.done += 1


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean (SD, of a single case a dash) per class and metric as text, over the cases where it is defined, and of several classes
    the mean of their means; below, the same after post-processing, and findings of the whole image."""
    processed = [row for row in rows if row["model"].startswith(POST)]
    if processed:
        kept = [row for row in rows if not row["model"].startswith(POST)]
        after = [{**row, "model": row["model"].removeprefix(POST)} for row in processed]
        return f"{evaluation_table(kept)}\n\nafter post-processing:\n{evaluation_table(after)}"
    told = [row for row in rows if not row["case"]]
    if told:
        parts = [row for row in rows if row["case"]]
        tables = [evaluation_table(parts)] if parts else []
        return "\n\n".join([*tables, _findings_table(told)])
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    classes = list(dict.fromkeys(row["class"] for row in rows))
    width = max([len(name) for name in classes] + [5])
    lines = [f"{'class':{width}}  " + "  ".join(f"{m:>16}" for m in metrics) + "    n"]
    means: dict[str, list[float]] = {metric: [] for metric in metrics}
    for name in classes:
        cells, n = [], 0
        for metric in metrics:
            values = [
                r["value"]
                for r in rows
                if r["class"] == name and r["metric"] == metric and r["value"] is not None
            ]
            n = max(n, len(values))
            means[metric] += [float(np.mean(values))] if values else []
            spread = f"{np.std(values, ddof=1):5.3f}" if len(values) > 1 else f"{'–':>5}"
            cells.append(f"{np.mean(values):8.3f} ({spread})" if values else f"{'not defined':>16}")
        lines.append(f"{name:{width}}  " + "  ".join(cells) + f"  {n:3d}")
    if len(classes) > 1:
        cells = [f"{macro(means[metric]):16}" for metric in metrics]
        lines.append(f"{'macro':{width}}  " + "  ".join(cells) + "  mean over classes")
    return "\n".join(lines)


def macro(values: Sequence[float]) -> str:
    """The mean of the values of several classes as the cell of a table."""
    return f"{np.mean(values):8.3f}" if values else "not defined"


def _findings_table(rows: Sequence[Mapping[str, Any]]) -> str:
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    places = list(dict.fromkeys((row["class"], row["split"]) for row in rows))
    width = max(len("finding"), *(len(name) for name, _ in places))
    wide = max(len("cases"), *(len(split) for _, split in places))
    lines = [f"{'finding':{width}}  {'cases':{wide}}  " + "  ".join(f"{m:>11}" for m in metrics)]
    for name, split in places:
        of = {row["metric"]: row["value"] for row in rows if (row["class"], row["split"]) == (name, split)}
        cells = [f"{of[m]:11.3f}" if of.get(m) is not None else f"{'not defined':>11}" for m in metrics]
        lines.append(f"{name:{width}}  {split:{wide}}  " + "  ".join(cells))
    return "\n".join(lines)


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
