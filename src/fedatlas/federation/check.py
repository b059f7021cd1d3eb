"""`fedatlas check`: prints the contents, the problems and the expected cost of a federation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.memory import device_memory, gibibytes
from fedatlas.core.pictures import in_pixels, of_pictures
from fedatlas.federation.design import Experiment, cache_folder, slow_precision
from fedatlas.federation.file import load_federation
from fedatlas.federation.forecast import bytes_per_round
from fedatlas.federation.initial import sentence


def check_federation_file(path: Path, overrides: Sequence[str], runs: Path) -> dict[str, Any]:
    """Reads the file and every voxel behind it. Returns plain values: sites, classes, matrix, problems, cost.

    Raises FederationError if the file itself cannot be understood.
    """
    federation = load_federation(path, overrides)
    experiment = Experiment(federation, cache_folder(federation, runs))
    problems: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "federation": federation.name,
        "classes": list(experiment.space.names),
        "problems": problems,
        "sites": {},
        "cost": None,
    }
    try:
        experiment.check_net()
    except FederationError as error:
        problems.append({"fatal": True, "text": str(error)})
    problems += [{"fatal": p.fatal, "text": str(p)} for p in experiment.check()]
    if not any(problem["fatal"] for problem in problems):
        try:
            experiment.prepare()
        except DataError as error:
            problems.append({"fatal": True, "text": str(error)})
        else:
            result["sites"] = {name: source.summary() for name, source in experiment.sources.items()}
            result["cost"] = cost(experiment)
            problems += [{"fatal": False, "text": text} for text in tight(experiment)]
    problems += [{"fatal": False, "text": text} for text in notes(experiment, result["sites"])]
    problems.sort(key=lambda problem: not problem["fatal"])
    return result


def notes(experiment: Experiment, sites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is worth knowing before a run, and stops none. sites: name -> summary."""
    federation, sentences = experiment.federation, []
    least, count = federation.faults.min_sites, len(federation.sites)
    if least > count:
        sentences.append(
            f"faults.min_sites is {least}, and the federation has {_counted(count, 'site')}; every site must then "
            f"answer, lower it to {count} or less"
        )
    sentences += slow_precision(federation)
    if federation.init_from:
        sentences.append(sentence(federation.init_from, experiment.space))
    sentences += experiment.examine(experiment.shapes())
    loss, how = experiment.method.loss, getattr(federation.evaluation, "inference", None)
    foreground = getattr(loss, "options", {}).get("channels") == "foreground"
    if foreground and getattr(how, "background", None) == "channel":
        sentences.append(
            "the loss trains foreground channels alone, and predictions compare them with the background's, which nothing "
            "trains; set evaluation.inference.background to zero"
        )
    if experiment.pooled:
        sentences.append(
            f"method {federation.method['name']} trains on the union of all sites' data; it runs where all data lie "
            "on one machine, and not across sites"
        )
    sentences += _scored_all_the_same(experiment) if sites else []
    if sites and not any(summary["cases"]["test"] for summary in sites.values()):
        sentences.append(
            "no site has a test case: a run is scored on the validation cases alone, by which its best round is chosen. List test "
            "cases, "
            + (
                "raise `evaluation.test`"
                if experiment.space.level == "image"
                else "give sites `split: {test: 0.2}`"
            )
            + ", or add a site with `role: test`"
        )
    workers, count = federation.engine.workers, len(federation.sites)
    if workers > count:
        sentences.append(
            f"engine.workers is {workers}, and the federation has {_counted(count, 'site')}; one process for each is started"
        )
    training = {name: summary for name, summary in sites.items() if summary.get("role") != "test"}
    without = [name for name, summary in training.items() if not summary["cases"]["validation"]]
    if without and len(without) == len(training):
        sentences.append(
            "no site has a validation case; no best round can be chosen, and the last model is the result. Raise "
            "`evaluation.validation`, or list validation cases"
        )
    else:
        sentences += [
            f"site {name}: no validation case; it has no say in which round is best. Raise `evaluation.validation`, "
            "or list validation cases"
            for name in without
        ]
    return sentences


def _scored_all_the_same(experiment: Experiment) -> list[str]:
    """A note on every tested site whose `annotated` leaves out labels that are scored."""
    known, found = [experiment.space.names[c] for c in experiment.space.foreground], []
    for name, source in experiment.sources.items():
        (index,) = source.indexes
        left = [n for n in index.names if n not in index.used and index.aliases.get(n, n) in known]
        if not index.trains and left:
            found.append(
                f"site {name}: `annotated` leaves out {', '.join(left)}, and with `role: test` all of a site's labels are "
                f"scored; give a label that is not to be scored the alias {BACKGROUND}, and leave `annotated` out"
            )
    return found


def tight(experiment: Experiment) -> list[str]:
    """A note where training may need more memory than there is."""
    there = device_memory(experiment.federation.engine.device)
    likely = experiment.step_memory().likely * experiment.at_once
    if there is None or likely <= 0.8 * there:
        return []
    return [
        f"training is estimated at {gibibytes(likely)} of memory beside the libraries, and there are {gibibytes(there)}; "
        "if it fails, lower `local.batch` or the size of the net"
    ]


def cost(experiment: Experiment) -> dict[str, Any]:
    """Expected cost of a run, bytes as `forecast.bytes_per_round` counts them."""
    parameters = sum(parameter.numel() for parameter in experiment.shapes().parameters())
    validating = sum(bool(source.items["validation"]) for source in experiment.sources.values())
    spent = bytes_per_round(experiment, len(experiment.training), validating)
    return {
        "parameters": parameters,
        **spent,
        "site_memory_bytes": experiment.step_memory().likely,
        "server_memory_bytes": 5 * spent["model_bytes"],
    }


def text_of(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [f"federation {result['federation']}"]
    sites = result["sites"]
    if sites:
        classes = result["classes"]
        width = max(len(name) for name in classes)
        column = max(18, *(len(site) + 2 for site in sites))
        of_images = any("positives" in info for info in sites.values())
        what = "training images with and without the finding" if of_images else "cases and voxels"
        lines += ["", f"{what} annotated for training (- not annotated)"]
        lines.append(" " * width + "".join(f"{site:>{column}}" for site in sites))
        for name in classes:
            cells = []
            for info in sites.values():
                if name not in info["annotated"]:
                    text = "-"
                elif of_images:
                    text = f"{info['positives'][name]} + {info['negatives'][name]}"
                else:
                    text = f"{info['labelled'][name]} ({info['voxels'].get(name, 0):,})"
                cells.append(text)
            if any(cell != "-" for cell in cells):
                lines.append(f"{name:{width}}" + "".join(f"{cell:>{column}}" for cell in cells))
        findings = dict.fromkeys(name for info in sites.values() for name in info.get("findings", {}))
        if findings:
            lines += ["", "findings of the whole image: training cases with + without (- not annotated)"]
            wide = max(len(name) for name in findings)
            for name in findings:
                counts = [
                    info.get("findings", {}).get(name, {"labelled": 0, "present": 0})
                    for info in sites.values()
                ]
                texts = [
                    f"{n['present']} + {n['labelled'] - n['present']}" if n["labelled"] else "-"
                    for n in counts
                ]
                lines.append(f"{name:{wide}}" + "".join(f"{text:>{column}}" for text in texts))
        lines.append("")
        lines += [
            f"site {site}: {_of_site(info, pictures=of_pictures(sites))}" for site, info in sites.items()
        ]
    if result["cost"]:
        spent = result["cost"]
        down, up = ("" if spent[way] == "none" else f" ({spent[way]})" for way in ("down", "up"))
        lines += [
            "",
            f"model: {spent['parameters']:,} parameters, {megabytes(spent['model_bytes'])}",
            f"per round: {megabytes(spent['bytes_per_round'])} between server and sites; a site that trains receives "
            f"{megabytes(spent['bytes_down'])}{down} and sends {megabytes(spent['bytes_up'])}{up}",
        ]
        if spent["evaluation_bytes"]:
            lines.append(
                f"an evaluated round: {megabytes(spent['evaluation_bytes'])} more, to all sites with validation cases"
            )
        else:
            lines.append(
                "the first model goes whole; one that a site holds already is named and not sent again"
            )
        lines.append(
            f"memory, estimated: {megabytes(spent['site_memory_bytes'])} at a site beside the libraries, "
            f"{megabytes(spent['server_memory_bytes'])} at the server"
        )
    lines.append("")
    for problem in result["problems"]:
        lines.append(("error: " if problem["fatal"] else "note: ") + problem["text"])
    fatal = sum(problem["fatal"] for problem in result["problems"])
    lines.append(
        f"{_counted(fatal, 'error')}: this federation cannot run"
        if fatal
        else "nothing stands in the way of a run"
    )
    return "\n".join(lines)


def _of_site(info: Mapping[str, Any], *, pictures: bool) -> str:
    cases = ", ".join(f"{n} {split}" for split, n in info["cases"].items())
    if "patients" in info:
        patients = sum(info["patients"].values())
        role = "; tested on only" if info["role"] == "test" else ""
        sizes = sorted({"×".join(map(str, size)) for size in info["size"]})
        return f"{cases} images of {_counted(patients, 'patient')}; {' to '.join(sizes)} pixels{role}"
    spacings = "; ".join("×".join(f"{mm:g}" for mm in spacing) for spacing in info["spacing"][:3])
    more = f" and {len(info['spacing']) - 3} more" if len(info["spacing"]) > 3 else ""
    role = "; tested on only" if info.get("role") == "test" else ""
    if pictures:
        pixels = "" if in_pixels(info["spacing"]) else f"; pixels of {spacings}{more} mm"
        return f"{cases} pictures{pixels}{role}"
    return f"{cases} cases; {', '.join(info['orientation'])}; {spacings}{more} mm{role}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def megabytes(count: float) -> str:
    """Bytes in units of 2^20, of 2^10 where they are few."""
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 / 10 else f"{count / 2**10:,.1f} KiB"
