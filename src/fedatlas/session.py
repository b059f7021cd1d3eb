"""A federation, built and run: sites, net, method and engine from a federation file, and the run folder."""

import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from fedatlas import inference, nets
from fedatlas.data.site_data import (
    Problem,
    SiteConfig,
    SiteData,
    SiteIndex,
    check_federation,
    check_site,
    label_space_of,
    pool,
    read_site,
)
from fedatlas.data.transforms import load_scan, write_label_map
from fedatlas.engine import wire
from fedatlas.engine.host import Host
from fedatlas.engine.local import LocalClients, Workers, in_process
from fedatlas.engine.run import Round, RunFolder, read_json, run, to_json
from fedatlas.engine.store import read_whole, write_atomic
from fedatlas.errors import DataError, FederationError, RunFolderError
from fedatlas.evaluation.evaluate import Evaluator, selection_score
from fedatlas.evaluation.statistics import read_rows, write_rows
from fedatlas.experiment import (
    Federation,
    hash_of,
    load_federation,
    make_method,
    read_yaml,
    resolved,
)
from fedatlas.labels import BACKGROUND, LabelSpace
from fedatlas.method import Member, Method, State, declared, eval_members, functions_of
from fedatlas.options import not_known
from fedatlas.seeds import seed_of
from fedatlas.tensors import Tensors, load, n_bytes, tensors_of

POOLED = "pooled"

Watch = Callable[[str, str, dict[str, float], dict[str, float]], None]


def net_channels(federation: Federation, channels: int) -> int:
    """Input channels of the net: those of the images, times the neighbouring slices where patches are slices."""
    preprocessing = federation.preprocessing
    return channels * (2 * preprocessing.context + 1) if len(preprocessing.patch) == 2 else channels


def build_net(federation: Federation, method: Method, name: str, *, channels: int, classes: int) -> nn.Module:
    """The federation's net ("main"), or one that the method declares, for images of so many channels."""
    if name == "main":
        kind = federation.net["name"]
        chosen = {key: value for key, value in federation.net.items() if key != "name"}
    else:
        wanted = declared(method, "nets")
        if name not in wanted:
            raise not_known(f"method {federation.method['name']}: the net", name, wanted)
        kind, chosen = wanted[name].name, wanted[name].options
    return nets.build(
        kind,
        chosen,
        in_channels=net_channels(federation, channels),
        classes=classes,
        spatial_dims=len(federation.preprocessing.patch),
        seed=seed_of(federation.seed, "net", name),
    )


def make_evaluator(federation: Federation, space: LabelSpace) -> Evaluator:
    """What scores a model at a site."""
    preprocessing = federation.preprocessing
    return Evaluator(federation.evaluation, tuple(preprocessing.patch), preprocessing.context, space)


def usable_device(federation: Federation) -> torch.device:
    """The device on which sites train. FederationError if it is not one, is not there, or cannot compute in the
    federation's precision."""
    name = federation.engine.device
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        reason = str(error).splitlines()[0]
        raise FederationError(
            f"engine.device: got {name!r}, which cannot be used here ({reason}); here are: {', '.join(there)}"
        ) from None
    if device.type == "meta" or (federation.local.precision == "fp16" and device.type != "cuda"):
        raise FederationError(
            f"local.precision: fp16 needs a GPU, engine.device is {name}; use float32 or bf16"
            if device.type != "meta"
            else "engine.device: meta computes nothing; use cpu or cuda"
        )
    return device


class Experiment:
    """A federation with its label space, sites, net and method.

    cache: folder of preprocessed cases. Reads the layout of every site, no voxels.
    """

    def __init__(self, federation: Federation, cache: Path) -> None:
        self.federation = federation
        # by name: classes are numbered as the sites bring them, and the order of the file decides nothing
        sites = sorted(federation.sites, key=lambda site: site.name)
        self.indexes: list[SiteIndex] = [read_site(site, Path(site.path)) for site in sites]
        self.space = self._space()
        self.method = make_method(federation)
        self.sources: dict[str, SiteData] = {
            index.name: SiteData(
                index,
                self.space,
                federation.preprocessing,
                federation.sampling,
                federation.augmentation,
                seed=federation.seed,
                validation=federation.evaluation.validation,
                cache=cache,
            )
            for index in self.indexes
        }
        self.pooled: bool = declared(self.method, "pooled")
        self.training: dict[str, Any] = dict(self.sources)
        if self.pooled:
            self.training = {POOLED: pool(list(self.sources.values()), POOLED)}

    def _space(self) -> LabelSpace:
        given = self.federation.labels
        if given.names is None:
            return label_space_of(self.indexes, given.groups, given.exclusive)
        plain = LabelSpace(given.names, exclusive=given.exclusive)
        groups = tuple(tuple(plain.index(name) for name in group) for group in given.groups)
        return LabelSpace(given.names, groups, given.exclusive)

    def check(self) -> list[Problem]:
        """Reads every voxel of every site; the problems found, worst first."""
        found = list(check_federation(self.indexes, self.space))
        for index in self.indexes:
            found += check_site(index, self.space)
        return found

    def prepare(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """Fills the cache of every site."""
        for name, source in self.sources.items():
            source.prepare(progress=lambda text, name=name: tell(f"{name}: {text}"))

    @property
    def in_channels(self) -> int:
        channels = next(iter(self.sources.values())).channels
        return net_channels(self.federation, channels)

    def make_net(self, name: str = "main") -> nn.Module:
        """A net of the federation, with the values that follow from the seed."""
        channels = next(iter(self.sources.values())).channels
        return build_net(self.federation, self.method, name, channels=channels, classes=len(self.space))

    def check_net(self) -> nn.Module:
        """The net, after one patch went through it. FederationError if it fits the patch or the labels not."""
        usable_device(self.federation)
        net = self.make_net()
        patch = self.federation.preprocessing.patch
        nets.check_patch(net, patch)
        nets.check_output(net, len(self.space), in_channels=self.in_channels, patch=patch)
        check = getattr(self.method, "check", None)
        if check:
            check(self.space)
        return net

    def host(self, site: str, folder: RunFolder) -> Host:
        """The end of the wire of a site that is served on this machine."""
        source = self.training.get(site) or self.sources[site]
        evaluator = make_evaluator(self.federation, self.space)
        return Host(
            site,
            source,
            functions_of(self.method) | {"evaluate": evaluator.evaluate},
            self.make_net,
            folder.site(site),
            seed=self.federation.seed,
            threads=self.federation.threads_per_site,
            device=self.federation.engine.device,
        )


def cache_folder(federation: Federation, runs: Path) -> Path:
    """Where preprocessed cases are kept."""
    return Path(federation.engine.cache).expanduser() if federation.engine.cache else runs / ".cache"


def open_hosts(run: str, cache: str) -> Callable[[str], Host]:
    """site -> its host, for a worker process; each is made once."""
    folder = RunFolder(Path(run))
    experiment = Experiment(load_federation(folder.path / "federation.yaml"), Path(cache))
    hosts: dict[str, Host] = {}

    def host(site: str) -> Host:
        if site not in hosts:
            hosts[site] = experiment.host(site, folder)
        return hosts[site]

    return host


class Running:
    """An experiment with its run folder and its clients; a context that ends worker processes on leaving.

    With a pooled method the sites keep their own hosts for evaluation.
    """

    def __init__(
        self, experiment: Experiment, folder: RunFolder, cache: Path, watch: Watch | None = None
    ) -> None:
        federation = experiment.federation
        self.experiment, self.folder = experiment, folder
        self.workers: Workers | None = None
        everyone = {**experiment.sources, **experiment.training}
        if federation.engine.workers:
            arguments = {"run": str(folder.path), "cache": str(cache)}
            log = folder.path / "sites" / "workers.log"
            self.workers = Workers("fedatlas.session:open_hosts", arguments, federation.engine.workers, log)
            serve = self.workers
        else:
            serve = in_process({site: experiment.host(site, folder) for site in everyone})
        at_once = max(federation.engine.workers, 1)
        scratch = folder.path / "scratch"
        self.clients = LocalClients(
            list(experiment.training), serve, scratch / "train", federation.faults, at_once, watch
        )
        self.evaluators = self.clients
        if experiment.pooled:
            self.evaluators = LocalClients(
                list(experiment.sources), serve, scratch / "evaluate", federation.faults, at_once, watch
            )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.workers:
            self.workers.close()

    def evaluate(
        self,
        state: State,
        *,
        split: str,
        model: str,
        grid: str,
        metrics: Sequence[str],
        overlays: bool = False,
    ) -> list[dict[str, Any]]:
        """Rows of the federation's model at every site."""
        method = self.experiment.method
        members = {site: _members(eval_members(method, state, site)) for site in self.evaluators.sites}
        first = next(iter(members.values()))
        # one payload for all where every site gets the very same models
        common = all(_same_members(first, other) for other in members.values())
        return self._ask(
            None if common else {site: {"members": value} for site, value in members.items()},
            {"members": first} if common else {},
            split=split,
            model=model,
            round=state.round,
            grid=grid,
            metrics=list(metrics),
            overlays=overlays,
        )

    def evaluate_local(
        self, site: str, file: Path, *, round: int, split: str, metrics: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Rows of one site's local model at every site."""
        kept: Any = wire.decode(read_whole(file), copy=False)
        shared = {"members": [{"model": kept["model"], "classes": kept["classes"]}]}
        what = {"split": split, "model": f"local/{site}", "round": round, "grid": "original"}
        return self._ask(None, shared, **what, metrics=list(metrics), overlays=False)

    def _ask(self, each: Any, shared: dict[str, Any], **what: Any) -> list[dict[str, Any]]:
        evaluator = make_evaluator(self.experiment.federation, self.experiment.space)
        replies = self.evaluators.call(evaluator.evaluate, each=each, **shared, **what)
        return [row for _, reply in replies for row in reply["rows"]]


def _members(members: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"model": m.model, "classes": None if m.classes is None else list(m.classes)} for m in members]


def _same_members(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return len(one) == len(other) and all(
        a["model"] is b["model"] and a["classes"] == b["classes"] for a, b in zip(one, other, strict=True)
    )


def run_path(federation: Federation, runs: Path, run_id: str | None = None) -> Path:
    """The folder of a federation's run: its name and the first digits of its hash, or the name given."""
    if run_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        raise FederationError(
            f"--id {run_id!r}: a name of letters, digits, '.', '_' and '-' is expected, no path"
        )
    return runs / (run_id or f"{federation.name}-{hash_of(federation)[:8]}")


def run_federation(
    federation: Federation,
    path: Path,
    *,
    resume: bool = False,
    tell: Callable[[str], None] = print,
    watch: Watch | None = None,
    after_round: "Callable[[Round, Best], None] | None" = None,
) -> None:
    """Checks, trains and evaluates a federation in the run folder `path`.

    resume: go on from the folder's last complete round.
    tell: is given sentences for a person; watch: every answer of a site, see `LocalClients`.

    Raises FederationError or DataError before anything is trained if something is wrong, RunFolderError if
    the folder belongs to another configuration, SiteLost as the federation's rule says.
    """
    folder = RunFolder(path)
    _claim(folder, federation, resume)
    cache = cache_folder(federation, path.parent)
    experiment = Experiment(federation, cache)
    problems = [
        problem for problem in check_federation(experiment.indexes, experiment.space) if problem.fatal
    ]
    if problems:
        raise FederationError("\n".join(str(problem) for problem in problems))
    net = experiment.check_net()
    experiment.prepare(tell)
    _describe(folder, experiment, net)
    evaluation = federation.evaluation
    best = Best(folder, experiment.space, evaluation.select_weights)
    with Running(experiment, folder, cache, watch) as running:
        state = folder.latest(experiment.method)
        if state is not None:
            best.recover(state.round)
            tell(f"goes on after round {state.round} of {federation.rounds}")

        def validate(state: State) -> list[dict[str, Any]]:
            if state.round % evaluation.every and state.round != federation.rounds:
                return []
            if running.evaluators is not running.clients:
                running.evaluators.begin(state.round)
            return running.evaluate(
                state, split="validation", model="global", grid="federation", metrics=evaluation.round_metrics
            )

        def keep(record: Round) -> None:
            last = record.number == federation.rounds
            folder.save(record, running.clients.models if last else None)
            best.see(record.number, record.rows)
            if after_round:
                after_round(record, best)

        state = run(
            experiment.method,
            net,
            running.clients,
            federation.rounds,
            state=state,
            evaluate=validate,
            after_round=keep,
        )
        folder.keep_model("last", state.round)
        tell("final evaluation on the original grids")
        _finish(running, federation)


class Best:
    """The best complete round by the validation score, kept as models/best.fa with best.json beside it."""

    def __init__(self, folder: RunFolder, space: LabelSpace, weights: str) -> None:
        self.folder, self.space, self.weights = folder, space, weights
        self.round, self.score = 0, -1.0
        self.last_score: float | None = None
        """The score of the round seen last; None if none of its values was defined."""

    def see(self, number: int, rows: list[dict[str, Any]]) -> None:
        """Keeps the round if its score is the highest so far; of equal scores the first."""
        score = self.last_score = selection_score(rows, self.weights) if rows else None
        if score is not None and score > self.score:
            self.round, self.score = number, score
            self.folder.keep_model("best", number)
            write_atomic(self.folder.path / "best.json", to_json({"round": number, "score": score}))

    def recover(self, latest: int) -> None:
        """After a resume: what was seen so far, from the rounds on disk."""
        for log, rows in self.folder.records():
            score = selection_score(rows, self.weights) if rows else None
            if score is not None and score > self.score:
                self.round, self.score = log["round"], score
        path = self.folder.path / "best.json"
        kept = read_json(path)["round"] if path.exists() else 0
        if kept != self.round and self.round:
            if self.round != latest:
                raise RunFolderError(
                    f"{path}: names round {kept}, the rounds say {self.round}; the folder was changed by hand"
                )
            self.folder.keep_model("best", self.round)
            write_atomic(path, to_json({"round": self.round, "score": self.score}))


def _finish(running: Running, federation: Federation) -> None:
    """Evaluates best, last and local models on the original grids, into rows.csv."""
    folder, method = running.folder, running.experiment.method
    running.evaluators.begin(federation.rounds + 1)
    metrics = federation.evaluation.metrics
    wanted = federation.evaluation.models
    paths = {name: folder.path / "models" / f"{name}.fa" for name in ("best", "last") if name in wanted}
    loaded = {name: folder.state(path, method) for name, path in paths.items() if path.exists()}
    if len(loaded) == 2 and loaded["best"].round == loaded["last"].round:
        loaded.pop("last")
    rows = []
    for split in ("validation", "test"):
        if not any(source.items[split] for source in running.experiment.sources.values()):
            continue
        for name, state in loaded.items():
            overlays = federation.evaluation.overlays and name == next(iter(loaded))
            rows += running.evaluate(
                state, split=split, model=name, grid="original", metrics=metrics, overlays=overlays
            )
        local = folder.local_models() if "local" in wanted else {}
        for site, file in local.items():
            rows += running.evaluate_local(site, file, round=federation.rounds, split=split, metrics=metrics)
    write_rows(folder.path / "rows.csv", rows)
    info = read_json(folder.path / "run.json")
    write_atomic(folder.path / "run.json", to_json({**info, "finished": _now()}))


def _claim(folder: RunFolder, federation: Federation, resume: bool) -> None:
    """Makes the run folder, or checks that it belongs to this very configuration."""
    path = folder.path / "run.json"
    if path.exists():
        if read_json(path)["hash"] != hash_of(federation):
            raise RunFolderError(
                f"{folder.path}: belongs to another configuration:\n{_difference(folder.path, federation)}"
            )
        if not resume:
            raise RunFolderError(
                f"{folder.path}: exists already; go on with --resume, or give the new run a name with --id"
            )
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(resolved(federation), sort_keys=False, allow_unicode=True)
    write_atomic(folder.path / "federation.yaml", text.encode())


def _difference(path: Path, federation: Federation) -> str:
    was = _flat(read_yaml(path / "federation.yaml"))
    now = _flat(resolved(federation))
    keys = [
        key
        for key in dict.fromkeys([*was, *now])
        if was.get(key) != now.get(key) and not key.startswith("engine")
    ]
    lines = [f"  {key}: {was.get(key, '(none)')} there, {now.get(key, '(none)')} now" for key in keys]
    return "\n".join(lines[:20]) or "  (written by another version of fedatlas)"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}.").items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{prefix}{i}.").items()}
    return {prefix[:-1]: list(value) if isinstance(value, tuple) else value}


def _describe(folder: RunFolder, experiment: Experiment, net: nn.Module) -> None:
    """Writes run.json: what runs, on what, with which versions."""
    path = folder.path / "run.json"
    if path.exists():
        return
    federation, space = experiment.federation, experiment.space
    info = {
        "id": folder.path.name,
        "name": federation.name,
        "hash": hash_of(federation),
        "versions": versions(),
        "git": git_revision(),
        "started": _now(),
        "finished": None,
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": federation.threads_per_site,
        },
        "method": federation.method["name"],
        "net": federation.net["name"],
        "n_parameters": sum(parameter.numel() for parameter in net.parameters()),
        "model_bytes": n_bytes(tensors_of(net)),
        "channels": next(iter(experiment.sources.values())).channels,
        "rounds": federation.rounds,
        "seed": federation.seed,
        "labels": {
            "names": list(space.names),
            "groups": [list(g) for g in space.groups],
            "exclusive": space.exclusive,
        },
        "sites": {name: source.summary() for name, source in experiment.sources.items()},
    }
    write_atomic(path, to_json(info))


def versions() -> dict[str, str]:
    """The versions of what decides the numbers."""
    packages = ("fedatlas", "torch", "monai", "numpy", "scipy", "nibabel", "pydantic")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}


def git_revision() -> str | None:
    """The revision of the source tree this package runs from, "+" if changed; None if it is not one."""
    where = Path(__file__).parent
    try:
        ask = ["git", "-C", str(where), "rev-parse", "HEAD"]
        revision = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
        ask = ["git", "-C", str(where), "status", "--porcelain", "--", "."]
        changed = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed else "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --------------------------------------------------------------------------------- what is done with a finished run


class Trained:
    """The model of a run folder, ready to predict.

    model: "best", "last" or "local/<site>". Raises RunFolderError if the run or that model is not there.
    """

    def __init__(self, path: Path, model: str = "best", device: str | None = None) -> None:
        if not (path / "federation.yaml").exists():
            raise RunFolderError(
                f"{path}: not a run folder, it holds no federation.yaml; `fedatlas run` makes one"
            )
        self.folder = RunFolder(path)
        self.federation = load_federation(path / "federation.yaml")
        info = read_json(path / "run.json")
        labels = info["labels"]
        groups = tuple(tuple(group) for group in labels["groups"])
        self.space = LabelSpace(tuple(labels["names"]), groups, labels["exclusive"])
        self.channels: int = info["channels"]
        self.method = make_method(self.federation)
        kept = self.federation.engine.device
        try:  # a model that was trained on a GPU is used wherever it is taken
            torch.zeros(1, device=device or kept)
        except (RuntimeError, AssertionError):
            kept = "cpu"
        self.device = torch.device(device or kept)
        self.model = model
        self.members = self._members()

    def _members(self) -> list[Member]:
        if self.model.startswith("local/"):
            local = self.folder.local_models()
            site = self.model.removeprefix("local/")
            if site not in local:
                raise not_known(f"{self.folder.path}: the local model", site, local)
            kept: Any = wire.decode(read_whole(local[site]), copy=False)
            return [Member(kept["model"], None if kept["classes"] is None else tuple(kept["classes"]))]
        if self.model not in ("best", "last"):
            raise RunFolderError(f"model {self.model!r}: not known; allowed: best, last, local/<site>")
        file = self.folder.path / "models" / f"{self.model}.fa"
        if not file.exists() and (file.parent / "last.fa").exists():
            raise RunFolderError(f"{file}: missing, no round of this run was validated; use --model last")
        state = self.folder.state(file, self.method)
        return eval_members(self.method, state, "")

    def network(self, model: Tensors | None = None, name: str = "main") -> nn.Module:
        """The federation's net with the given values, on the chosen device."""
        net = build_net(self.federation, self.method, name, channels=self.channels, classes=len(self.space))
        if model is not None:
            load(net, model)
        return net.to(self.device)

    def probabilities(self, image: Tensor) -> Tensor:
        """[C, *S] for an image [I, *S] on the federation's grid; several models are merged as the method says."""
        preprocessing = self.federation.preprocessing
        maps = []
        for member in self.members:
            found = inference.probabilities(
                self.network(member.model),
                image.to(self.device),
                preprocessing.patch,
                preprocessing.context,
                self.federation.evaluation.inference,
                exclusive=self.space.exclusive,
            ).cpu()
            maps.append(
                found
                if member.classes is None
                else inference.restrict(found, member.classes, self.space.exclusive)
            )
        return inference.merge(maps, self.space.exclusive)


def predict_scans(
    path: Path, scans: Sequence[Sequence[Path]], out: Path, *, model: str = "best"
) -> dict[str, Any]:
    """Writes a label map per scan, in the scan's own geometry, and classes.json beside them.

    scans: the NIfTI files of each, one per channel. Returns what was written and the volume found per class.
    """
    trained = Trained(path, model)
    names = trained.space.names
    targets = [out / f"{f[0].name.removesuffix('.gz').removesuffix('.nii')}_labels.nii.gz" for f in scans]
    for number, target in enumerate(targets):
        if target in targets[:number]:
            first, second = scans[targets.index(target)][0], scans[number][0]
            raise FederationError(
                f"{first} and {second} would both be written to {target}; predict them into two folders"
            )
    written = []
    for files, target in zip(scans, targets, strict=True):
        volume = load_scan(list(files), trained.federation.preprocessing, trained.space)
        if volume.image.shape[0] != trained.channels:
            raise DataError(
                f"{files[0]}: has {volume.image.shape[0]} channels; the model was trained on {trained.channels}"
            )
        labels = volume.restore(trained.probabilities(volume.image))
        write_label_map(target, labels, files[0])
        millilitres = float(np.prod(volume.raw_spacing)) / 1000
        masks = {c: labels == c if trained.space.exclusive else labels[c] for c in trained.space.foreground}
        sizes = {names[c]: round(int(mask.sum()) * millilitres, 3) for c, mask in masks.items() if mask.any()}
        written.append({"scan": [str(file) for file in files], "labels": str(target), "millilitres": sizes})
    classes = {str(index): name for index, name in enumerate(names)}
    write_atomic(out / "classes.json", to_json(classes))
    return {"scans": written, "classes": classes, "model": model}


def evaluate_folder(
    path: Path,
    data: Path,
    *,
    model: str = "best",
    aliases: Mapping[str, str] | None = None,
    table: str = "dataset.json",
    labels: str = "labelsTr",
    test_labels: str = "labelsTs",
    out: Path | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Scores a trained model on every labelled case of a folder, on the original grids.

    Returns the rows, and the labels of the folder that the model does not know: they are not scored.
    """
    trained = Trained(path, model)
    federation, space = trained.federation, trained.space
    aliases = dict(aliases or {})
    name = data.resolve().name
    form = {
        "name": name,
        "path": str(data.resolve()),
        "table": table,
        "labels": labels,
        "test_labels": test_labels,
    }
    theirs = read_site(SiteConfig(**form), data).names  # type: ignore[arg-type]
    known = [label for label in theirs if aliases.get(label, label) in space.names and label != BACKGROUND]
    ignored = [label for label in theirs if label not in known and label != BACKGROUND]
    if not known:
        raise FederationError(
            f"{data}: none of its labels ({', '.join(theirs)}) is known to the model ({', '.join(space.names)}); "
            "give aliases, as --alias theirs=ours"
        )
    config = SiteConfig(**form, annotated=tuple(known), aliases=aliases)  # type: ignore[arg-type]
    source = SiteData(
        read_site(config, data),
        space,
        federation.preprocessing,
        federation.sampling,
        federation.augmentation,
        seed=federation.seed,
        validation=0.0,
        cache=cache_folder(federation, path.parent),
    )
    if source.channels != trained.channels:
        raise DataError(
            f"{data}: its scans have {source.channels} channels; the model was trained on {trained.channels}"
        )
    evaluator = make_evaluator(federation, space)
    rows: list[dict[str, Any]] = []
    members = [
        {"model": m.model, "classes": None if m.classes is None else list(m.classes)} for m in trained.members
    ]
    for split in ("train", "test"):
        site = Visitor(name, source, trained)
        what = {"split": split, "model": model, "round": 0, "grid": "original"}
        reply = evaluator.evaluate(
            site, members, **what, metrics=list(federation.evaluation.metrics), overlays=False
        )
        rows += reply["rows"]
    if out:
        write_rows(out, rows)
    return rows, ignored


class Visitor:
    """A site outside the federation, as evaluation sees it."""

    def __init__(self, name: str, source: SiteData, trained: Trained) -> None:
        self.name, self.source, self.network, self.device = name, source, trained.network, trained.device
        self.folder, self.labels = trained.folder.path / "visitors" / name, source.labels

    def volumes(self, split: str) -> Any:
        return self.source.volumes(split)


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean (SD) per class and metric as text, over the cases where it is defined."""
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    classes = list(dict.fromkeys(row["class"] for row in rows))
    width = max([len(name) for name in classes] + [5])
    lines = [f"{'class':{width}}  " + "  ".join(f"{m:>16}" for m in metrics) + "    n"]
    for name in classes:
        cells, n = [], 0
        for metric in metrics:
            values = [
                r["value"]
                for r in rows
                if r["class"] == name and r["metric"] == metric and r["value"] is not None
            ]
            n = max(n, len(values))
            cells.append(
                f"{np.mean(values):8.3f} ({np.std(values, ddof=1) if len(values) > 1 else 0:5.3f})"
                if values
                else f"{'not defined':>16}"
            )
        lines.append(f"{name:{width}}  " + "  ".join(cells) + f"  {n:3d}")
    return "\n".join(lines)


def summary(path: Path) -> dict[str, Any]:
    """What a run came to, as plain values: best round, and mean Dice per model, site and class."""
    rows = read_rows(path / "rows.csv")
    best = read_json(path / "best.json") if (path / "best.json").exists() else None
    means: dict[str, Any] = {}
    for row in rows:
        if row["metric"] == "dice" and row["value"] is not None:
            place = (
                means.setdefault(row["split"], {}).setdefault(row["model"], {}).setdefault(row["site"], {})
            )
            place.setdefault(row["class"], []).append(row["value"])
    mean = lambda v: float(np.mean(v)) if isinstance(v, list) else {k: mean(item) for k, item in v.items()}  # noqa: E731
    return {"run": str(path), "best": best, "dice": mean(means)}
