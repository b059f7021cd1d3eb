"""`fedatlas plan`: what the rules propose for a federation file, and what a run of it will take."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedatlas.core.errors import FederationError
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.memory import gibibytes
from fedatlas.data.index import Portions, SiteConfig, chosen_names
from fedatlas.federation.check import megabytes
from fedatlas.federation.design import space_of
from fedatlas.federation.file import Federation, load_federation, resolved
from fedatlas.federation.forecast import Forecast, Size, forecast
from fedatlas.federation.tasks import task_of
from fedatlas.planning.description import Description, describe
from fedatlas.planning.draft import Draft
from fedatlas.planning.rules import AXES, Proposal, proposals, this_machine

Tell = Callable[[str], None]
LEAST_ROUNDS = 10
"""Fewer are not proposed to save time."""


def plan_file(
    path: Path,
    overrides: Sequence[str],
    described: Sequence[Description],
    *,
    memory: float | None,
    dimensions: int | None,
    trial: bool,
    tell: Tell,
) -> dict[str, Any]:
    """Plain values: what stands in the file, what the rules propose, and the forecast of the file as it is. described:
    sites whose data are not here; of the others every training case is read."""
    federation = load_federation(path, overrides)
    sites = descriptions(federation, described, tell)
    brings = _brought(federation, sites)
    space = space_of(federation, brings)
    machine = this_machine(federation.engine.device, federation.engine.workers, memory)
    found = proposals([sites[name] for name in sorted(sites)], len(space), machine, dimensions)
    found = _in_order(found, federation)
    values = resolved(federation)
    result: dict[str, Any] = {
        "federation": federation.name,
        "device": machine.device,
        "proposals": [asdict(proposal) | {"file": _value(values, proposal)} for proposal in found],
        "forecast": None,
    }
    if trial:
        result["forecast"] = told(foreseen(federation, sites, tell, only_tested(federation, described)))
    return result


def _in_order(found: list[Proposal], federation: Federation) -> list[Proposal]:
    """The proposals, and with them the order of axes that their spacing and patch are in, where the file has another."""
    key = "preprocessing.orientation"
    if federation.preprocessing is None or any(proposal.key == key for proposal in found):
        return found
    order = ["LRPAIS".index(letter) // 2 for letter in federation.preprocessing.orientation]
    if order == [0, 1, 2]:
        return found
    why = (
        "the order of axes, which differs from the file's",
        "spacing and patch below are in the order of these letters",
    )
    return [Proposal(key, AXES, *why), *found]


def foreseen(
    federation: Federation, sites: Mapping[str, Description], tell: Tell, tested: Sequence[int] = ()
) -> Forecast:
    """What a run on this machine will take, by a trial. sites: by name, of those that train; tested: see `forecast`."""
    tell("trial: a few rounds on made-up cases of the sites' sizes")
    brings = _brought(federation, sites)
    space = space_of(federation, brings)
    classification = federation.task == "classification"
    channels = federation.images.channels if classification else len(next(iter(sites.values())).channels)
    return forecast(federation, space, channels, sizes(federation, sites, brings), tested)


def descriptions(
    federation: Federation, described: Sequence[Description], tell: Tell
) -> dict[str, Description]:
    """Every site that trains, by name."""
    given: dict[str, Description] = {}
    for one in described:
        if one.site in given:
            raise FederationError(f"two descriptions are of site {one.site!r}; give the newer one")
        if one.task != federation.task:
            raise FederationError(
                f"the description of site {one.site!r} is of a {one.task}, the file is of a {federation.task}; describe the folder "
                "with the labels that the file is about"
            )
        given[one.site] = one
    unknown = sorted(given.keys() - {site.name for site in federation.sites})
    if unknown:
        names = ", ".join(site.name for site in federation.sites)
        raise FederationError(
            f"the description of site {unknown[0]!r} is of no site of the file; it has: {names}"
        )
    found = {}
    for site in federation.sites:
        if site.role != "train":
            continue
        if site.name in given:
            found[site.name] = given[site.name]
        elif site.path is None:
            raise FederationError(
                f"site {site.name}: has no path here, and no description; give what `fedatlas describe` wrote there with --sites"
            )
        else:
            index = task_of(federation).read(federation, site, Path(site.path))
            found[site.name] = describe(site, index, tell)
    if not found:
        raise FederationError("no site of the file trains; nothing is to be planned")
    return found


def only_tested(federation: Federation, described: Sequence[Description]) -> list[int]:
    """The cases of each site that is only tested on, as far as it lies here or is described: all that are labelled."""
    given = {one.site: one for one in described}
    found = []
    for site in federation.sites:
        if site.role == "train":
            continue
        if site.name in given:
            found.append(sum(given[site.name].cases.values()))
        elif site.path is not None:
            index = task_of(federation).read(federation, site, Path(site.path))
            found.append(sum(case.split == "test" for case in index.cases))
    return found


def _brought(federation: Federation, sites: Mapping[str, Description]) -> dict[str, list[str]]:
    return {name: brought(federation, site) for name, site in sites.items()}


def brought(federation: Federation, site: Description) -> list[str]:
    """The classes that a site annotates, by the federation's names."""
    config = next(one for one in federation.sites if one.name == site.site)
    used = (
        site.labels
        if config.annotated is None
        else chosen_names(site.labels, config.annotated, config.aliases)
    )
    counted = [config.aliases.get(name, name) for name in used]
    return [name for name in dict.fromkeys(counted) if name != BACKGROUND]


def sizes(
    federation: Federation, sites: Mapping[str, Description], brings: Mapping[str, Sequence[str]]
) -> dict[str, Size]:
    """What a forecast needs of the sites, with the cases of each split as a run takes them."""
    configs = {config.name: config for config in federation.sites}
    found = {}
    for name, site in sites.items():
        cases = _in_a_run(configs[name], site, federation.evaluation.validation)
        shape = tuple(max(1, round(n)) for n in site.shape["50"])
        spacing = tuple(site.spacing_mm["50"]) if site.spacing_mm else (1.0,) * len(shape)
        found[name] = Size(tuple(brings[name]), cases, shape, spacing, site.kind == "masks")
    return found


def _in_a_run(config: SiteConfig, site: Description, share: float) -> dict[str, int]:
    """Split -> cases, as `data.index` takes them from those that are described: by `split`, else validation cases by their share
    where none are listed; then at most `cases` for training. A description names no patient, so all are taken to have equally
    many cases. What `split` was drawn of already, as at a site that lies here, is not drawn again."""
    cases = {split: site.cases.get(split, 0) for split in ("train", "validation", "test")}
    described, patients = cases["train"], max(1, site.patients)
    each = described / patients
    drawn: dict[str, float] = {}
    if config.split is not None:
        drawn = _patients_of(config.split, patients, each)
    elif site.task == "segmentation" and share:
        drawn = {"validation": min(max(round(share * patients), 1), patients - 1)}
    for split, count in drawn.items():
        if not cases[split]:
            cases[split] = round(count * each)
            cases["train"] -= cases[split]
    if cases["train"] < 1 <= described:
        raise FederationError(
            f"site {site.site}: split: {cases['validation']} cases for validation and {cases['test']} for the test leave nothing "
            f"to train on: its description has {described} labelled training cases; ask for fewer"
        )
    cases["train"] = min(cases["train"], config.cases or cases["train"])
    return cases


def _patients_of(portions: Portions, patients: int, each: float) -> dict[str, float]:
    """Split -> patients. each: cases of a patient."""

    def taken(portion: int | float) -> int:
        asked = portion * patients if isinstance(portion, float) else math.ceil(portion / each)
        return min(patients, round(asked))

    test = taken(portions.test)
    if portions.folds is not None and portions.fold is not None:
        start, end = (patients * part // portions.folds for part in (portions.fold - 1, portions.fold))
        test = end - start
    return {"validation": taken(portions.validation), "test": test}


def in_time(draft: Draft, federation: Federation, hours: float, tell: Tell) -> Draft:
    """The draft with no more rounds than so many hours allow on this machine, and LEAST_ROUNDS at least."""
    seen = foreseen(federation, {site.site: site for site in draft.sites}, tell)
    if seen.seconds <= 3600 * hours:
        return draft
    often = seen.validations / seen.rounds
    each = seen.seconds_per_round + often * seen.seconds_per_validation
    left = 3600 * hours - seen.seconds_of_start - seen.seconds_at_end
    rounds = min(federation.rounds, max(LEAST_ROUNDS, int(left / each)))
    total = (rounds * each + seen.seconds_of_start + seen.seconds_at_end) / 3600
    reason = f"{rounds} take {total:.2g} h on this machine, as timed; raise it where there is more time"
    fewer = [
        replace(p, value=rounds, rule=f"as many as {hours:g} h allow, {LEAST_ROUNDS} at least", reason=reason)
        if p.key == "rounds"
        else p
        for p in draft.found
    ]
    return replace(draft, found=fewer)


def _value(values: Mapping[str, Any], proposal: Proposal) -> Any:
    """What the file has at the key; of a net the options that are proposed."""
    value: Any = values
    for part in proposal.key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and isinstance(proposal.value, Mapping):
        return {key: value[key] for key in ("name", "filters", *proposal.value) if key in value}
    return value


def told(seen: Forecast) -> dict[str, Any]:
    """A forecast as plain values, with what follows from it."""
    return asdict(seen) | {"seconds": seen.seconds, "bytes": seen.bytes}


def text_of(result: Mapping[str, Any]) -> str:
    """The result for a person."""
    lines = [f"federation {result['federation']}: what the rules propose for {result['device']}", ""]
    before = ""
    for entry in result["proposals"]:
        same = entry["file"] == entry["value"] or _plain(entry["file"]) == _plain(entry["value"])
        now = "as in the file" if same else f"the file has {_plain(entry['file'])}"
        lines.append(f"{entry['key']}: {_plain(entry['value'])}   ({now})")
        why = f"    {entry['rule']}: {entry['reason']}"
        if why != before:  # several keys of one rule stand below each other
            lines.append(why)
        before = why
    if result["forecast"]:
        lines += [
            "",
            "a run of the file as it is, on this machine, as it is loaded now:",
            *forecast_lines(result["forecast"]),
        ]
    return "\n".join(lines)


def forecast_lines(seen: Mapping[str, Any]) -> list[str]:
    """A forecast for a person."""
    return [
        f"  memory:  {gibibytes(seen['memory'])} for each process of a site, libraries included",
        f"  time:    {seen['seconds_per_step']:.3g} s a step, {_time(seen['seconds_per_round'])} a round, "
        f"{_time(seen['seconds_per_validation'])} a validation; {_time(seen['seconds'])} in all, of which "
        f"{_time(seen['seconds_at_end'])} for the final evaluation",
        f"  network: {megabytes(seen['bytes_per_round'])} a round, {megabytes(seen['bytes'])} in all",
    ]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
