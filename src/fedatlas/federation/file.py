"""The federation file: YAML to typed values and back, its hash, its JSON schema.

YAML -> `Federation`: checked once, here; an unknown key is an error that names the nearest known one. What is
built from it stands in `session`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from fedatlas import methods, nets
from fedatlas.core.contract import Method
from fedatlas.core.errors import FederationError
from fedatlas.core.extensions import Extensions
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import NAME, blamed, explain, from_dict, not_known, option, options, own_first
from fedatlas.data.images import Images
from fedatlas.data.index import SiteConfig
from fedatlas.data.transforms import Preprocessing, Sampling
from fedatlas.evaluation.classification import METRICS as IMAGE_METRICS
from fedatlas.evaluation.evaluate import Evaluation
from fedatlas.evaluation.metrics import METRICS as VOXEL_METRICS
from fedatlas.federation.initial import InitFrom, settled
from fedatlas.federation.log import Log
from fedatlas.federation.yaml import keys_of, load_raw, with_paths, with_weights
from fedatlas.learning.augment import Augmentation
from fedatlas.learning.inference import Inference
from fedatlas.learning.loop import Local
from fedatlas.losses import OTHERS as OTHER_LOSSES
from fedatlas.losses import LossChoice, others_of
from fedatlas.transport.clients import Faults
from fedatlas.transport.frames import shown
from fedatlas.transport.pipeline import Terms, terms_of
from fedatlas.transport.protection.compression import Comm
from fedatlas.transport.protection.privacy import Privacy
from fedatlas.transport.protection.secure import Secure

MOST_ROUNDS = 999_998
"""What the names of a run's files can count, with one more for the final evaluation."""


@options
class Labels:
    """The label space that the model will know."""

    names: tuple[str, ...] | None = option(
        None, "Every class by name, background first if exclusive; null: the union of what the sites bring."
    )
    groups: tuple[tuple[str, ...], ...] = option(
        (), "Classes that belong together, as an organ and its lesion."
    )
    exclusive: bool | None = option(
        None,
        "true: one class per voxel (softmax); false: every class on its own (sigmoid). Null: true for segmentation, "
        "false for classification.",
    )
    findings: dict[str, str | None] = option(
        {},
        "Segmentation: findings of the whole image beside it, each with the class of voxels that it is about, or null.",
    )
    display: dict[str, str] = option(
        {},
        "What the report calls a class; one that is not named here: its own name, with spaces for underscores.",
    )

    codes: dict[str, tuple[str, str, str]] = option(
        {},
        "What a class is in DICOM, for results as SEG and RTSTRUCT: [value, scheme, meaning], as "
        '["10200004", SCT, Liver]. Of a class that is not named here: what SNOMED CT calls so.',
    )

    def __post_init__(self) -> None:
        """Raises FederationError where `display` or `codes` names a class that the space does not hold, or a code does not
        fit into DICOM."""
        known = [] if self.names is None else [*self.names, *self.findings]
        for key, named in (("display", self.display), ("codes", self.codes)):
            for name in named if known else ():
                if name not in known:
                    raise not_known(f"labels: {key}: the class", name, known)
        for name, code in self.codes.items():
            for what, text, most in zip(("value", "scheme", "meaning"), code, (16, 16, 64), strict=True):
                if not 0 < len(text.strip()) <= most:
                    raise FederationError(
                        f"labels: codes: {name}: the {what} is {text!r}; it has 1 to {most} letters"
                    )


@options
class Engine:
    """How the federation runs on this machine. Nothing here changes a bit of the result."""

    workers: int = option(
        0, "Worker processes, at most one for each site; 0 runs the sites in turn in this process.", ge=0
    )
    device: str = option("cpu", "Where sites train: cpu, cuda, cuda:0, …")
    cache: str | None = option(
        None,
        "Folder of preprocessed cases, and of teachers that sites trained; null: .cache beside the runs.",
    )


@options
class Federation:
    """A federation file."""

    name: str = option(..., "Names the run's folder.", min_length=1, max_length=100, pattern=NAME)
    task: Literal["segmentation", "classification"] = option(
        "segmentation", "segmentation: labels of voxels; classification: findings of whole images."
    )
    labels: Labels = option(Labels(), "The label space.")  # type: ignore[call-arg]
    sites: tuple[SiteConfig, ...] = option(..., "The hospitals.", min_length=1)
    preprocessing: Preprocessing | None = option(
        None, "Segmentation, where it is needed: from a site's files to the federation's grid."
    )
    images: Images = option(Images(), "Classification: from an image file to the input of the net.")  # type: ignore[call-arg]
    sampling: Sampling = option(Sampling(), "How training patches are chosen.")  # type: ignore[call-arg]
    augmentation: Augmentation = option(Augmentation(), "How training patches are varied.")  # type: ignore[call-arg]
    net: dict[str, Any] = option(
        {"name": "unet"}, "A registered net by name, with its options; for classification the default is cnn."
    )
    init_from: InitFrom | None = option(
        None,
        "First weights of the net, from a model with the same classes or others: its path, or a block; null: drawn from the "
        "seed.",
    )
    method: dict[str, Any] = option(
        {"name": "fedavg"}, "A registered method by name, with its hyper-parameters."
    )
    local: Local = option(Local(), "Training at a site between two exchanges.")  # type: ignore[call-arg]
    rounds: int = option(100, "Exchanges between sites and server.", gt=0, le=MOST_ROUNDS)
    seed: int = option(0, "Everything random follows from it.", ge=0)
    threads_per_site: int = option(1, "Processor threads that a site computes with; bits depend on it.", ge=1)
    evaluation: Evaluation = option(Evaluation(), "What is measured, when, and how the best model is chosen.")  # type: ignore[call-arg]
    faults: Faults = option(Faults(), "What happens when a site is lost.")  # type: ignore[call-arg]
    comm: Comm = option(Comm(), "Compression of the models that are sent.")  # type: ignore[call-arg]
    privacy: Privacy | None = option(None, "Differential privacy of what every site sends; null: none.")
    secure: Secure | None = option(None, "Secure aggregation of the sites' models; null: none.")
    log: Log = option(
        Log(), "Where its numbers are written beside the run folder; not part of the file's hash."
    )  # type: ignore[call-arg]
    engine: Engine = option(Engine(), "How it runs on this machine; not part of the file's hash.")  # type: ignore[call-arg]


def load_federation(path: Path, overrides: Sequence[str] = ()) -> Federation:
    """Reads a federation file, with `extends` resolved and `key.path=value` overrides applied.

    Site paths become absolute; they are relative to the file, or "bundled:…" for data of the package.
    Raises FederationError naming the file, the key, what was got and what is allowed.
    """
    raw, kept = load_raw(path, overrides), (path.parent / "run.json").exists()
    return parse_federation(raw, base=path.parent, source=str(path), given=keys_of(overrides), kept=kept)


def parse_federation(
    raw: Mapping[str, Any],
    *,
    base: Path,
    source: str = "federation",
    given: Mapping[str, str] | None = None,
    kept: bool = False,
) -> Federation:
    """A federation from plain values, as `load_federation`. given: keys -> who gave them, where not the source did. kept: of a
    run folder, whose file may have values that its task does not use, as they were ignored once."""
    given = given or {}
    values = with_paths(raw, base)
    if values.get("task") == "classification":
        values.setdefault("net", {"name": "cnn"})
    try:
        federation = TypeAdapter(Federation).validate_python(values)
    except ValidationError as error:
        raise FederationError("\n".join(explain(error, Federation, source, given))) from None
    except FederationError as error:
        raise _with_source(error, source, given) from None
    try:
        if federation.init_from:
            federation = replace(federation, init_from=settled(federation.init_from))
        federation = _of_task(federation)
        if not kept:
            _all_used(federation)
    except FederationError as error:
        raise _with_source(error, source, given) from None
    _check_names(federation, source, given)
    names = [site.name for site in federation.sites]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FederationError(
            f"{source}: two sites are called {twice[0]!r}; every site needs a name of its own"
        )
    alike: dict[str, str] = {}
    for name in names:
        other = alike.setdefault(name.lower(), name)
        if other != name:
            raise FederationError(
                f"{source}: the sites {other!r} and {name!r} differ in capitals alone, which names of folders on some "
                "machines do not; rename one"
            )
    make_method(federation, source, given)
    net_options(federation, source, given)
    try:
        make_terms(federation)
    except FederationError as error:
        raise _with_source(error, source, given) from None
    return federation


METRICS_OF: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...], str]] = {
    "segmentation": (VOXEL_METRICS, ("dice", "hd95", "asd", "nsd"), "dice"),
    "classification": (
        IMAGE_METRICS,
        ("auroc", "ap", "f1", "sensitivity", "specificity", "ece"),
        "auroc",
    ),
}
"""task -> its metrics, those of the final evaluation by default, and the one that selects the best round."""

FOREIGN: Mapping[str, Mapping[str, Any]] = {
    "segmentation": {"images": Images()},  # type: ignore[call-arg]
    "classification": {"preprocessing": None, "sampling": Sampling()},  # type: ignore[call-arg]
}
"""task -> the keys that are for the other one, with their defaults."""

FOREIGN_EVALUATION: Mapping[str, tuple[str, ...]] = {
    "segmentation": ("test", "threshold", "bins", "draws", "histogram", "batch"),
    "classification": ("tolerance", "empty", "inference"),
}
"""task -> the keys of `evaluation` that are for the other one."""


def selects(federation: Federation) -> str:
    """The metric that chooses the best round."""
    return METRICS_OF[federation.task][2]


def local_models(federation: Federation) -> Literal["last", "best"]:
    """Which local models of sites are kept and evaluated, as `evaluation.local`; "best" where the method's sites choose their
    rounds themselves."""
    by_site = make_method(federation).chosen_by_site
    return "best" if by_site else federation.evaluation.local


def _of_task(federation: Federation) -> Federation:
    """The federation with what follows from its task. Raises FederationError for keys of the other task."""
    task = federation.task
    for key, default in FOREIGN[task].items():
        if getattr(federation, key) != default:
            other = next(name for name in FOREIGN if name != task)
            raise FederationError(
                f"{key}: is for {other}, and the task is {task}; leave it out, or set `task`"
            )
    if task == "segmentation" and federation.preprocessing is None:
        raise FederationError(
            "preprocessing: missing; it says how a site's files come to the federation's grid (for findings of "
            "whole images, set `task: classification`)"
        )
    exclusive = federation.labels.exclusive
    if federation.labels.groups and task == "classification":
        raise FederationError(
            "labels: groups are organs with their lesions; findings of images have none, leave them out"
        )
    if federation.labels.findings and task == "classification":
        raise FederationError(
            "labels: findings stand beside segmentation; with `task: classification` they are the classes, give them "
            "in labels.names"
        )
    if exclusive and task == "classification":
        raise FederationError(
            "labels: exclusive is true; findings of whole images are a yes or no each, leave it out"
        )
    if exclusive is None:
        federation = replace(federation, labels=replace(federation.labels, exclusive=task == "segmentation"))
    known, final, selecting = METRICS_OF[task]
    chosen = federation.evaluation
    if chosen.postprocess is not None and task == "classification":
        raise FederationError(
            "evaluation: postprocess: processes outlines, and findings of whole images have none; leave it out"
        )
    for key, names in (("metrics", chosen.metrics), ("round_metrics", chosen.round_metrics)):
        for name in names:
            if name not in known:
                raise not_known(f"evaluation: {key}: for {task} the metric", name, known)
    if chosen.round_metrics and selecting not in chosen.round_metrics:
        raise FederationError(
            f"evaluation: round_metrics are {list(chosen.round_metrics)}; {selecting}, which selects, must be in"
        )
    chosen = replace(
        chosen, metrics=chosen.metrics or final, round_metrics=chosen.round_metrics or (selecting,)
    )
    return replace(federation, evaluation=chosen)


def _with_source(error: FederationError, source: str, given: Mapping[str, str]) -> FederationError:
    """An error of a federation with who gave the key with which it begins, or else its source."""
    key = re.match(r"[a-z_]+(\.[a-z_]+)*", str(error))
    return FederationError(f"{blamed(key[0].split('.') if key else (), source, given)}: {error}")


def _check_names(federation: Federation, source: str, given: Mapping[str, str]) -> None:
    """Raises FederationError for `labels` that make no label space, where they give its names."""
    labels, level = federation.labels, "voxel" if federation.task == "segmentation" else "image"
    if labels.names is None:
        return
    parts_of: dict[str, dict[str, Any]] = {
        "names": {},
        "groups": {"groups": labels.groups},
        "findings": {"findings": labels.findings},
    }
    for key, parts in parts_of.items():
        try:
            LabelSpace.of_names(labels.names, exclusive=bool(labels.exclusive), level=level, **parts)
        except FederationError as error:
            what = f"{blamed(('labels', key), source, given)}: labels.{key}"
            raise FederationError(f"{what}: {str(error).removeprefix('label space: ')}") from None


def _all_used(federation: Federation) -> None:
    """Raises FederationError for values that the federation's task does not use, or uses twice."""
    for key in ("metrics", "round_metrics"):
        asked = getattr(federation.evaluation, key)
        if twice := [name for name in dict.fromkeys(asked) if asked.count(name) > 1]:
            raise FederationError(
                f"evaluation: {key}: are {list(asked)}, {', '.join(twice)} more than once, and each case would count as often; each "
                "name is allowed once"
            )
    task, default = federation.task, Evaluation()  # type: ignore[call-arg]
    for key in FOREIGN_EVALUATION[task]:
        if getattr(federation.evaluation, key) != getattr(default, key):
            other = next(name for name in FOREIGN_EVALUATION if name != task)
            instead = (
                "for a share of test cases set `split: {test: …}` of the sites (sites[].split.test)"
                if key == "test"
                else "leave it out"
            )
            raise FederationError(f"evaluation: {key}: is for {other}, and the task is {task}; {instead}")
    axes, whole = 2, "images"
    if federation.preprocessing is not None:
        axes, whole = len(federation.preprocessing.patch), "patches (preprocessing.patch)"
    beyond = [axis for axis in federation.augmentation.mirror if axis >= axes]
    if beyond:
        known = ", ".join(map(str, range(axes)))
        raise FederationError(
            f"augmentation: mirror: got the axis {beyond[0]}, and {whole} have {axes} axes; allowed: {known}"
        )


def _choice(
    block: dict[str, Any],
    what: str,
    get: Callable[[str], type[Any]],
    source: str,
    given: Mapping[str, str] | None,
) -> tuple[str, type[Any], dict[str, Any]]:
    """The name of a method or net, its class, and what is chosen of its options. FederationError for an unknown name."""
    if not isinstance(block.get("name"), str):
        raise FederationError(
            f"{blamed((what,), source, given)}: {what}.name: missing; it names a registered {what}"
        )
    try:
        cls = get(block["name"])
    except FederationError as error:
        raise FederationError(f"{blamed((what, 'name'), source, given)}: {error}") from None
    return block["name"], cls, {key: value for key, value in block.items() if key != "name"}


def make_method(
    federation: Federation, source: str = "federation", given: Mapping[str, str] | None = None
) -> Method:
    """The method with its hyper-parameters; FederationError for an unknown name, key or value."""
    name, cls, chosen = _choice(federation.method, "method", methods.get, source, given)
    if "local" in chosen:
        raise FederationError(
            f"{source}: method.local: unknown key; local training is the file's own key `local`"
        )
    chosen = cls.upgraded(chosen)
    values = {**chosen, "local": federation.local}
    method = from_dict(cls, values, what=source, given=given, inside=f"method {name}")
    if federation.task not in method.tasks:
        raise FederationError(
            f"{source}: method {name} is for {' and '.join(method.tasks)}, and the task is "
            f"{federation.task}; choose another method"
        )
    return method


def extensible(federation: Federation) -> list[tuple[Extensions, str]]:
    """What of a federation another package, or this process, may have registered: the registry's additions, and the name that the
    federation asks for; of its method and the one within, its nets, and its loss."""
    method, net = make_method(federation), net_options(federation)[1]
    inner, loss = getattr(method, "inner", None), getattr(method, "loss", None)
    asked = [
        (methods.OTHERS, federation.method["name"]),
        (methods.OTHERS, getattr(inner, "name", None)),
        (nets.OTHERS, federation.net["name"]),
        (nets.OTHERS, (getattr(net, "backbone", None) or {}).get("name")),
        *((nets.OTHERS, spec.name) for _, spec in sorted(method.nets.items())),
        (OTHER_LOSSES, loss.name if isinstance(loss, LossChoice) else None),
    ]
    return list(dict.fromkeys((others, str(name)) for others, name in asked if name))


def make_terms(federation: Federation) -> Terms:
    """What happens to models on their way; FederationError where the method does not go with it."""
    method, name = make_method(federation), str(federation.method["name"])
    sites = sum(site.role == "train" for site in federation.sites)
    return terms_of(method, name, federation.comm, federation.privacy, federation.secure, sites)


def inference_of(federation: Federation) -> Inference:
    """How the models of a federation predict, in its runs and from its run folders: `evaluation.inference`, with a
    precision, and with what other channels say, in any case."""
    given, method = federation.evaluation.inference, make_method(federation)
    follows = "bf16" if federation.local.precision == "bf16" else "float32"
    trains = getattr(method, "teachers", None)
    loss = getattr(trains, "loss", None) or getattr(method, "loss", None)
    others = getattr(method, "others", None) or (
        others_of(loss) if isinstance(loss, LossChoice) else "background"
    )
    return replace(given, precision=given.precision or follows, others=given.others or others)


def net_options(
    federation: Federation, source: str = "federation", given: Mapping[str, str] | None = None
) -> tuple[str, Any]:
    """The name of the net and its checked options; FederationError for an unknown name, key or value."""
    name, cls, chosen = _choice(federation.net, "net", nets.get, source, given)
    return name, from_dict(cls, chosen, what=source, given=given, inside=f"net {name}")


def resolved(federation: Federation) -> dict[str, Any]:
    """Every key with its value, defaults included, as plain values."""
    plain = TypeAdapter(Federation).dump_python(federation, mode="json")
    made = make_method(federation)
    values = TypeAdapter(type(made)).dump_python(made, mode="json")
    method = {option: values[option] for option in own_first(type(made)) if option != "local"}
    name, net = net_options(federation)
    return plain | {
        "method": {"name": federation.method["name"]} | method,
        "net": {"name": name} | TypeAdapter(type(net)).dump_python(net, mode="json"),
    }


def shareable(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What `resolved` gives, without what is of one machine: paths (of a file of weights its name stays), `engine` and
    `log`; sites by name; without `labels.display` and `labels.codes`, which decide no
    result; and with `init_from` only where there is one."""
    sites = [{key: value for key, value in site.items() if key != "path"} for site in plain["sites"]]
    kept = {key: value for key, value in plain.items() if key not in ("engine", "log")}
    net = with_weights(kept["net"], lambda path: Path(path).name)
    labels = {key: value for key, value in kept["labels"].items() if key not in ("display", "codes")}
    first = kept.pop("init_from", None)
    if first:
        kept["init_from"] = {key: first[key] for key in ("classes", "findings", "sha256")}
    return kept | {"labels": labels, "net": net, "sites": sorted(sites, key=lambda site: site["name"])}


def hash_of(federation: Federation) -> str:
    """SHA-256 of all that decides the result: not of paths, of the order of sites, or of `engine`."""
    plain = shareable(resolved(federation))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> the values of two resolved federations that differ in it, "(none)" where one has no such key; `engine` and paths
    aside."""
    was, now = _flat(shareable(one)), _flat(shareable(other))
    keys = [key for key in dict.fromkeys([*was, *now]) if was.get(key) != now.get(key)]
    return {key: (was.get(key, "(none)"), now.get(key, "(none)")) for key in keys}


def flat_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], there: str = "there", here: str = "now"
) -> str:
    """The keys in which two resolved federations differ, a line each, for a person; `engine` and paths aside."""
    lines = [
        shown(f"  {key}: {was} {there}, {now} {here}", 2000)
        for key, (was, now) in differences(one, other).items()
    ]
    return "\n".join(lines[:20]) or "  (written by another version of fedatlas)"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}.").items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        named = {str(item["name"]): item for item in value if isinstance(item, Mapping) and "name" in item}
        return _flat(named, prefix) if len(named) == len(value) else {prefix[:-1]: list(value)}
    return {prefix[:-1]: list(value) if isinstance(value, tuple) else value}


def json_schema(*, others: bool = False) -> dict[str, Any]:
    """A JSON schema of the federation file, for editors: keys, defaults, limits and their sentences.

    others: with the methods and nets of other packages; raises FederationError for one that does not load."""
    schema = TypeAdapter(Federation).json_schema()
    for what, registry in (("method", methods), ("net", nets)):
        choices = []
        for name in registry.names() if others else registry.REGISTRY:
            options = TypeAdapter(registry.get(name))
            part = options.json_schema(ref_template=f"#/$defs/{what}-{name}-{{model}}")
            for key, value in part.pop("$defs", {}).items():
                schema["$defs"][f"{what}-{name}-{key}"] = value
            part["properties"] = {"name": {"const": name}} | part.get("properties", {})
            part["properties"].pop("local", None)
            part["required"] = ["name", *part.get("required", [])]
            choices.append(part)
        sentence = schema["properties"][what].get("description", "")
        schema["properties"][what] = {"description": sentence, "oneOf": choices}
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Another federation file; this one's keys win.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
