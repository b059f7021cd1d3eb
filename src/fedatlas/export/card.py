"""The model card: what a stranger must know of a model before it is used, from the run's own record."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedatlas import __version__
from fedatlas.core.errors import require_object
from fedatlas.core.seeds import seed_of
from fedatlas.evaluation.statistics import bootstrap_interval, select
from fedatlas.export.subject import Subject
from fedatlas.report import read, tables

FILES = {
    "bundle": "A MONAI bundle. `scripts/` holds the functions of FedAtlas that it needs, so that MONAI alone runs it.",
    "onnx": "`model.onnx` gives logits, and `labels.json` says of which classes; its inputs are images on the net's grid.",
    "safetensors": "`model.safetensors` holds the weights; its header says of which net and classes they are.",
}


def card(subject: Subject, form: str, found: Mapping[str, Any], out: Path) -> str:
    """The text, Markdown. found: what writing the form came to, see `forms`."""
    run = read.read(subject.trained.folder.path)
    counted = {"rounds": int, "seed": int, "n_parameters": int}
    require_object(run.folder / "run.json", run.info, id=str, method=str, net=str, **counted)
    federation = subject.trained.federation
    blocks = [
        f"# {federation.name}",
        _first(subject, run),
        "## Data, and who annotated what",
        *_data(subject, run),
        "## Results",
        *_results(subject, run),
        "## Limits",
        "\n".join(f"* {text}" for text in _limits(subject, run)),
        "## Licence",
        "The weights are a product of the sites' data: whoever passes them on agrees with the sites, and writes the licence "
        "here. FedAtlas and the files in `scripts/` are Apache-2.0.",
        "## How to use it",
        f"{FILES[form]}",
        _commands(subject, form, found, out),
        "## How it was made",
        _made(subject, run),
    ]
    return "\n\n".join(blocks) + "\n"


EXPORTED = "Exported by FedAtlas"
"""Words of every card, by which a folder is known to be an export."""


def _trained_at(subject: Subject, run: read.Run) -> dict[str, read.SiteInfo]:
    """The sites whose cases moved the model: of a site's own model, where sites train alone, that site."""
    model, alone = subject.trained.model, subject.trained.method.alone
    own = model.removeprefix("local/") if alone and model.startswith("local/") else None
    sites = {name: site for name, site in run.sites.items() if site.role != "test"}
    return sites if own is None or own not in sites else {own: sites[own]}


def _first(subject: Subject, run: read.Run) -> str:
    speaks = (
        run.titles
        if subject.classes is None
        else [run.title(subject.trained.space.names[c]) for c in subject.classes]
    )
    what = "Finds in images" if subject.whole else "Outlines in images"
    method, net, sites = run.info["method"], run.info["net"], list(_trained_at(subject, run))
    how = f"(method `{method}`, net `{net}`, {run.info['n_parameters']:,} parameters)"
    trained = (
        f"Trained at site {sites[0]} alone {how}"
        if len(sites) == 1
        else f"Trained by federated learning {how} across {len(sites)} sites, each of which annotated some of the classes"
    )
    return (
        f"{what}: {', '.join(speaks)}. {trained}. "
        f"This is the model `{subject.trained.model}` of the run `{run.info['id']}`, after round {subject.trained.round} of "
        f"{run.info['rounds']}."
    )


def _data(subject: Subject, run: read.Run) -> Iterator[str]:
    unit, trained = f"{run.unit}s", _trained_at(subject, run)
    rows = []
    for name, site in run.sites.items():
        counts = [str(site.cases.get(split, 0)) for split in ("train", "validation", "test")]
        annotated = ", ".join(run.title(c) for c in site.annotated) or "nothing"
        note = "" if name in trained else " (tested only)" if site.role == "test" else " (not of this model)"
        rows.append([name + note, annotated, *counts])
    yield table(["Site", "Annotated", f"Training {unit}", "Validation", "Test"], rows)
    known = [run.info["sites"].get(name, {}).get("inputs") for name in trained]
    ranges = [one for one in known if one]
    if ranges:
        spacing = [one["spacing"] for one in ranges if one.get("spacing")]
        if spacing:
            low = [min(s[axis][0] for s in spacing) for axis in range(len(spacing[0]))]
            high = [max(s[axis][1] for s in spacing) for axis in range(len(spacing[0]))]
            ends = [f"{a:.3g}" if a == b else f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True)]
            yield f"Voxels of the training images: {' × '.join(ends)} mm."
        values = [
            p for one in ranges for channel in one["percentiles"] for p in (channel[0][0], channel[-1][1])
        ]
        yield f"Their values, 1st to 99th percentile: {min(values):g} to {max(values):g}."


def _results(subject: Subject, run: read.Run) -> Iterator[str]:
    """A table per split of what the run scored of this model; test first."""
    model = subject.trained.model
    rows = select(run.rows or (), model=model)
    if not rows and model == "last":  # where the last round is the best, it was scored once
        rows = select(run.rows or (), model="best", round=subject.trained.round)
    splits = [split for split in ("test", "validation") if select(rows, split=split)]
    if not splits:
        yield "The run holds no scores of this model."
    for split in splits:
        chosen = select(rows, split=split)
        note = "" if split == "test" else ", which also chose the round: these numbers are optimistic"
        yield f"On {split} {run.unit}s of the sites{note}."
        yield from _of_images(run, chosen) if run.images else _of_cases(run, chosen)
        if "test" in splits:
            return


def _of_cases(run: read.Run, rows: Sequence[tables.RowDict]) -> Iterator[str]:
    """Mean and 95 % interval over patients per class; of classes that the case's site annotates, and of the others."""
    metrics = tables.metrics(rows)
    rng = np.random.default_rng(seed_of(0, "model card"))
    for known, words in (
        (True, "Classes that the site annotated"),
        (False, "Classes that it never annotated"),
    ):
        lines = []
        for name in run.classes:
            cells, n = [], 0
            for metric in metrics:
                values = [
                    row["value"]
                    for row in select(rows, class_=name, metric=metric, known=known)
                    if row["value"] is not None
                ]
                n = max(n, len(values))
                decimals = tables.described(metric).decimals
                cells.append(_interval(values, rng, decimals))
            if n:
                lines.append([run.title(name), str(n), *cells])
        if lines:
            yield table([words, "n", *(tables.described(m).title for m in metrics)], lines)
    yield "Mean over cases, with its 95 % interval (bootstrap over cases, 2,000 draws, as wide for few cases as Student's t asks); n: cases with a value."


def _interval(values: Sequence[float], rng: np.random.Generator, decimals: int) -> str:
    if not values:
        return "not defined"
    mean = f"{np.mean(values):.{decimals}f}"
    if len(values) < 2:
        return f"{mean} (one case)"
    low, high = bootstrap_interval(values, rng)
    return f"{mean} ({low:.{decimals}f} to {high:.{decimals}f})"


def _of_images(run: read.Run, rows: Sequence[tables.RowDict]) -> Iterator[str]:
    shown = ("auroc", "ap", "sensitivity", "specificity")
    metrics = [metric for metric in shown if select(rows, metric=metric)]
    values = {metric: tables.class_values(rows, metric) for metric in metrics}
    lines = []
    for (name, site, model), at in values[metrics[0]].items() if metrics else ():
        cells = []
        for metric in metrics:
            one = values[metric].get((name, site, model))
            text = "not defined" if one is None or one.value is None else f"{one.value:.3f}"
            if one is not None and one.low is not None and one.high is not None:
                text += f" ({one.low:.3f} to {one.high:.3f})"
            cells.append(text)
        counts = [str(at.n_positive), str(at.n_negative)]
        lines.append([run.title(name), site, "yes" if at.known else "no", *counts, *cells])
    titles = [tables.described(metric).title for metric in metrics]
    yield table(["Finding", "Site", "Annotated there", "Present", "Absent", *titles], lines)
    yield "Values over the images of a site, with 95 % intervals by patient where there are enough."


def _limits(subject: Subject, run: read.Run) -> Iterator[str]:
    yield "FedAtlas is research software and not a medical device; this model is not for decisions about patients."
    yield "It knows the kind of images above, from these sites. On others its word was not tested."
    sites = _trained_at(subject, run)
    counts = {
        name: sum(site.labelled.get(name, 0) for site in sites.values())
        for name in run.classes
        if any(name in site.annotated for site in sites.values())
    }
    few = [f"{run.title(name)} ({n})" for name, n in counts.items() if n < 20]
    if few:
        yield f"Few annotated training {run.unit}s: {', '.join(few)}."
    unseen = [run.title(name) for name in run.classes if name not in counts]
    if unseen:
        whose = (
            f"Site {next(iter(sites))} did not annotate" if len(sites) == 1 else "No training site annotated"
        )
        yield f"{whose}: {', '.join(unseen)}. The model does not know them."
    if not any(site.cases.get("test") for site in run.sites.values()):
        yield f"There are no test {run.unit}s."
    told = "; ".join(_privacy(subject, run)) or "training was not differentially private"
    yield f"Weights can tell something of the images that they were trained on; {told}."


def _privacy(subject: Subject, run: read.Run) -> Iterator[str]:
    """What protects the cases, with the ε that the log has; a noise of 0 protects nothing."""
    plain, method = subject.plain, subject.plain["method"]
    if private := plain.get("privacy"):
        spent = [entry.epsilon for entry in run.rounds if entry.epsilon is not None]
        central = "the sum of what sites sent, against the server,"
        what = central if private["mode"] == "central" else "what each site sent"
        yield _promise(f"{what} was made differentially private for a site's data", private, spent)
    for options, key, whose in (
        (method, "epsilon", "sites"),
        (method.get("teachers") or {}, "teacher_epsilon", "its teachers, and not the model itself,"),
    ):
        if private := options.get("dp_sgd"):
            logged = [
                entry.sites[name].get(key)
                for entry in run.rounds
                for name in _trained_at(subject, run)
                if name in entry.sites
            ]
            spent = [epsilon for value in logged if (epsilon := read.number(value)) is not None]
            how = {
                "seed": ", by noise that whoever knows the federation's seed can take off",
                "system": ", trainings that were repeated after a fault or a resume counted each time",
            }[private["randomness"]]
            yield _promise(f"{whose} trained by DP-SGD, for a case{how}", private, spent)


def _promise(what: str, private: Mapping[str, Any], spent: Sequence[float]) -> str:
    """spent: the finite ε of the log, which add up from round to round."""
    if not private["noise"]:
        return f"{what}, but with noise 0, which promises nothing"
    if not spent:
        return f"{what}, but the log has no finite ε, which promises nothing"
    return f"{what}: ε {max(spent):.3g} at δ {private['delta']:g} by the end of the run"


def _commands(subject: Subject, form: str, found: Mapping[str, Any], out: Path) -> str:
    one, name = ("images", "IMAGE.png") if subject.whole else ("scans", "SCAN.nii.gz")
    folder = out.name
    if form == "bundle":
        result = "findings.csv" if subject.whole else "a label map per scan, in its own geometry,"
        return (
            f"```\npip install monai nibabel fire\ncd {folder}\n"
            f"python -m monai.bundle run --config_file configs/inference.json --dataset_dir FOLDER --output_dir OUT\n```\n\n"
            f"FOLDER holds {one}; {result} is written to OUT."
        )
    if form == "onnx":
        free = (
            "any size that divides by " + " × ".join(map(str, subject.net.divisor))
            if found["free_sizes"]
            else "these sizes"
        )
        shape = ", ".join(map(str, (subject.net.in_channels, *subject.size)))
        return (
            '```python\nimport onnxruntime\n\nsession = onnxruntime.InferenceSession("model.onnx")\n'
            f'(logits,) = session.run(None, {{"image": image}})  # float32 [n, {shape}], {free}\n```\n\n'
            f"Of the logits: {_of_logits(subject)}.\n\n"
            f"Outputs differ from those of the net by at most {found['largest_difference']:.2g}. How an image comes to the net's "
            "grid, and labels back from it, is not in the file: its metadata have the settings, and a bundle has the code."
        )
    return (
        "```python\nfrom safetensors import safe_open\n\n"
        'with safe_open("model.safetensors", "pt") as file:\n'
        "    about, weights = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}\n```\n\n"
        f"The run folder predicts with `fedatlas predict runs/{subject.trained.folder.path.name} {name} --model {subject.trained.model} "
        "-o out/`."
    )


def _of_logits(subject: Subject) -> str:
    """What makes of the logits the probabilities of `fedatlas predict`, see `inference.predict` and `inference.restrict`."""
    space, options, classes = subject.trained.space, subject.options, subject.classes
    others = [] if classes is None else [str(c) for c in space.foreground if c not in classes]
    of = f"channel{'s' if len(others) > 1 else ''} {', '.join(others)}"
    if subject.whole or not space.exclusive:
        return f"sigmoid; {of} not to be used" if others else "sigmoid"
    ignored = others and options["others"] == "ignored"
    steps = [
        "set logit 0 to 0" if options["background"] == "zero" else "",
        f"set {of} to -inf" if ignored else "",
        "softmax over axis 1",
        f"add the probability of {of} to channel 0 and set it to 0" if others and not ignored else "",
    ]
    return ", then ".join(step for step in steps if step)


def _made(subject: Subject, run: read.Run) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in sorted(run.info.get("versions", {}).items())
    )
    return (
        f"Run `{run.info['id']}`, seed {run.info['seed']}, hash of the federation `{run.info['hash'][:16]}`, finished "
        f"{run.info.get('finished') or 'not yet'}, with {versions}. {EXPORTED} {__version__}:\n\n"
        f"```\nfedatlas export runs/{subject.trained.folder.path.name} --model {subject.trained.model} --to FORM\n```"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
