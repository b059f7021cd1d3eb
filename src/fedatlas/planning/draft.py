"""The federation file of some sites, written with what a person should know of every key."""

import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedatlas.core.errors import FederationError
from fedatlas.core.labels import BACKGROUND
from fedatlas.core.names import channels_apart, key
from fedatlas.federation.file import Federation, parse_federation
from fedatlas.planning.description import Description
from fedatlas.planning.names import Ask, Merged, merged
from fedatlas.planning.rules import Machine, Proposal, proposals

WIDTH = 100
OVERLAP = 0.001
"""Share of labelled pixels with two labels from which on classes are not exclusive."""


@dataclass(frozen=True)
class Draft:
    """A federation file in the making. paths: site -> its folder, for sites that lie here; notes: on the sites, a sentence
    each."""

    name: str
    sites: Sequence[Description]
    paths: Mapping[str, Path]
    labels: Merged
    findings: Merged
    exclusive: bool
    machine: Machine
    found: Sequence[Proposal]
    notes: Sequence[str] = ()

    @property
    def task(self) -> str:
        return self.sites[0].task

    @property
    def names(self) -> list[str]:
        """The classes as `labels.names` has them."""
        return ([BACKGROUND] if self.exclusive else []) + self.labels.names


def drafted(
    name: str,
    sites: Sequence[Description],
    paths: Mapping[str, Path],
    ask: Ask,
    machine: Machine,
    dimensions: int | None,
) -> Draft:
    """Brings the sites together. Raises FederationError where they do not go together."""
    _require_alike(sites)
    sites = sorted(sites, key=lambda site: site.site)
    labels = merged(sites, ask)
    if not labels.names:
        raise FederationError("no site annotates a class; nothing can be learnt")
    told = merged(sites, ask, findings=True)
    for finding in told.names:
        if finding in labels.names:  # a finding needs a name of its own
            told.rename(finding, f"has {finding}")
    exclusive = sites[0].task == "segmentation" and _exclusive(sites)
    classes = len(labels.names) + exclusive
    found = proposals(sites, classes, machine, dimensions)
    return Draft(name, sites, paths, labels, told, exclusive, machine, found, tuple(_notes(sites)))


def _require_alike(sites: Sequence[Description]) -> None:
    names = [site.site for site in sites]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise FederationError(
            f"two sites are called {twice!r}; give one another name, with `fedatlas describe --name` or by its folder"
        )
    for what, value in (
        ("the task", lambda site: site.task),
        ("channels per image", lambda site: len(site.channels)),
        ("pictures or scans", lambda site: "scans" if site.kind == "volumes" else "pictures"),
    ):
        first = sites[0]
        other = next((site for site in sites if value(site) != value(first)), None)
        if other is not None:
            raise FederationError(
                f"{what}: {value(first)} at site {first.site}, {value(other)} at site {other.site}; a federation has one: make two "
                "federations"
            )
    for one in sites:
        both = [name for name in one.findings if name in one.labels]
        if both:
            raise FederationError(
                f"site {one.site}: {both[0]!r} is a class of its masks and a finding of the whole image, and `aliases` have one name "
                "for both; rename the column of the finding at that site"
            )
    for site, other, own, theirs, turned in _channels(sites):
        if turned:
            raise FederationError(
                f"order of channels: {theirs} at site {other}, but {own} at site {site}; a federation has one: write the files and the "
                "names of one in the other's order"
            )


def _channels(sites: Sequence[Description]) -> Iterator[tuple[str, str, str, str, bool]]:
    """A site, another that names its channels otherwise, what both call them, and whether only their order differs."""
    names = {site.site: site.channels for site in sites}
    for site, other, turned in channels_apart(names.items()):
        yield site, other, ", ".join(names[site]), ", ".join(names[other]), turned


def _notes(sites: Sequence[Description]) -> Iterator[str]:
    """What is no reason not to bring the sites together, a sentence each."""
    for site, other, own, theirs, _ in _channels(sites):
        yield f"channels are {theirs} at site {other}, but {own} at site {site}; see that they hold the same, in this order"


def _exclusive(sites: Sequence[Description]) -> bool:
    """May a voxel have one class only? Label maps say so; masks may overlap, and those of several sites nobody compared."""
    return all(site.kind == "volumes" and site.overlap < OVERLAP for site in sites)


# ------------------------------------------------------------------------------------------------------ text


def text_of(draft: Draft, out: Path) -> str:
    """The file as a text. out: where it will lie, for relative paths."""
    lines = [
        *_comment(
            f"A federation of {len(draft.sites)} sites, written by `fedatlas init`. Every key may be changed; what a key does: "
            "docs/how-to/twenty-keys.md."
        ),
        *_comment(f"Look at it with: fedatlas check {out.name}; how long it takes: fedatlas plan {out.name}"),
        "",
        f"name: {_flow(draft.name)}",
    ]
    if draft.task == "classification":
        lines.append("task: classification                   # findings of whole images, a yes or no each")
    lines += ["", "labels:", *_labels(draft), "", "sites:"]
    for note in draft.notes:
        lines += _comment(note, 2)
    for site in draft.sites:
        lines += _site(draft, site, out)
    lines += ["", *_planned(draft), "", *_method(draft), "", *_engine(draft)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _labels(draft: Draft) -> Iterator[str]:
    yield from _comment("What the model will know: every class that any site annotates.", 2)
    for note in [*draft.labels.notes, *draft.findings.notes]:
        yield from _comment(note, 2)
    yield from _entry("names", draft.names, 2)
    if draft.task == "segmentation":
        why = (
            "a voxel has one class"
            if draft.exclusive
            else "masks may overlap: every class is a yes or no of its own"
        )
        yield f"  exclusive: {_flow(draft.exclusive)}                      # {why}"
    if draft.labels.groups:
        yield from _comment(
            "Organs with their lesions. A site that annotates the organ alone should have no lesion in it: training takes all that it "
            "outlines for organ without lesion.",
            2,
        )
        yield from _entry("groups", [list(group) for group in draft.labels.groups], 2)
    if draft.findings.names:
        yield from _comment("Findings of the whole image, each with the class that it is about, or null.", 2)
        yield from _entry("findings", {name: _about(name, draft) for name in draft.findings.names}, 2)


def _about(finding: str, draft: Draft) -> str | None:
    words = key(finding).removeprefix("has ")
    return next((name for name in draft.labels.names if key(name) == words), None)


def _site(draft: Draft, site: Description, out: Path) -> Iterator[str]:
    splits = ", ".join(f"{count} {split}" for split, count in site.cases.items() if count)
    held = [
        f"{name} {label.present}"
        if label.present == label.annotated
        else f"{name} {label.present} of {label.annotated}"
        for name, label in [*site.labels.items(), *site.findings.items()]
    ]
    yield f"  - name: {_flow(site.site)}"
    yield from _comment(f"cases: {splits}. Present in training cases: {', '.join(held)}.", 4)
    path = draft.paths.get(site.site)
    if path is None:
        yield from _comment("no path: the hospital gives it when it starts, and it never leaves it", 4)
    else:
        yield f"    path: {_flow(_relative(path, out))}"
    for name, value in site_keys(draft, site).items():
        if name == "annotated":
            yield from _comment(
                "what counts as annotated; other labels of its table are neither taught nor taken for absent",
                4,
            )
        if name == "reference":
            yield from _comment("a fuller truth lies there: it is used for scores, never for training", 4)
        yield from _entry(name, value, 4)
    if draft.task == "segmentation" and not site.cases.get("test"):
        yield from _comment(
            "No test cases. To take some off, of a fifth of the patients, which training then never sees:", 4
        )
        yield "    # split: {test: 0.2}"


def site_keys(draft: Draft, site: Description) -> dict[str, Any]:
    """The keys of a site beside its name and path, where they are not the default."""
    places = {**draft.labels.classes, **draft.findings.classes}
    own = {name: ours for (where, name), ours in places.items() if where == site.site}
    aliases = {name: ours for name, ours in own.items() if ours not in (None, name)}
    dropped = [name for name, ours in own.items() if ours is None]
    keys: dict[str, Any] = {}
    if site.format != "auto":
        keys["format"] = site.format
    if site.reading:
        keys["reading"] = site.reading
    if aliases:
        keys["aliases"] = aliases
    if dropped:
        keys["annotated"] = [name for name in own if name not in dropped]
    if site.reference:
        keys["reference"] = {}
    return keys


def _planned(draft: Draft) -> Iterator[str]:
    """The proposed keys, block by block, each with its rule and reason."""
    blocks: dict[str, list[Proposal]] = {}
    for proposal in draft.found:
        block, _, inner = proposal.key.partition(".")
        blocks.setdefault(block if inner else "", []).append(proposal)
    for block in sorted(
        (b for b in blocks if b), key=["preprocessing", "images", "local", "evaluation"].index
    ):
        yield f"{block}:"
        yield from _proposed(blocks[block], 2)
        yield ""
    yield from _proposed(blocks.get("", []), 0)


def _proposed(proposals: Sequence[Proposal], indent: int) -> Iterator[str]:
    before = ""
    for proposal in proposals:
        why = f"{proposal.rule}: {proposal.reason}"
        if why != before:  # several keys of one rule stand below it
            yield from _comment(why, indent)
        before = why
        yield from _entry(proposal.key.rpartition(".")[2], proposal.value, indent)


def _method(draft: Draft) -> Iterator[str]:
    if draft.task == "classification":
        yield from _comment(
            "The plainest method, the mean of local models; findings that a site does not annotate are left out of its loss. "
            "Then compare: fedpsl, fedprox, standalone (`fedatlas list methods`)."
        )
        yield "method: {name: fedavg}"
    else:
        yield from _comment(
            "The mean of local models, with momentum; "
            + (
                "a voxel that a site labels as one organ is none of those that the site does not annotate"
                if draft.exclusive
                else "what a site does not annotate is left out of its loss"
            )
            + ". Then compare: fedavg, condistfl, standalone (`fedatlas list methods`)."
        )
        yield "method: {name: fedatlas}"


def _engine(draft: Draft) -> Iterator[str]:
    yield from _comment("How it runs on this machine; no bit of the result depends on workers.")
    yield from _entry("engine", {"device": draft.machine.device, "workers": draft.machine.workers}, 0)


def _comment(text: str, indent: int = 0) -> list[str]:
    lead = " " * indent + "# "
    return [
        f"{lead}{line}"
        for line in textwrap.wrap(" ".join(text.split()), WIDTH - len(lead), break_on_hyphens=False)
    ]


def _entry(name: str, value: Any, indent: int) -> list[str]:
    """A key, on one line where it fits; else a mapping or list takes a line for each of its entries."""
    lead = " " * indent
    line = f"{lead}{name}: {_flow(value)}"
    if len(line) <= WIDTH or not isinstance(value, Mapping | list):
        return [line]
    if isinstance(value, Mapping):
        return [
            f"{lead}{name}:",
            *(part for k, v in value.items() for part in _entry(_flow(k), v, indent + 2)),
        ]
    wrapped = textwrap.wrap(_flow(value), WIDTH - indent - 2, break_on_hyphens=False, break_long_words=False)
    return [f"{lead}{name}:", *(f"{lead}  {part}" for part in wrapped)]


def _flow(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/.][A-Za-z0-9_/.-]*", value):
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]
        return text
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(
        value, default_flow_style=True, width=1_000_000, sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _relative(path: Path, out: Path) -> str:
    """A folder as the file names it: relative to the file where it lies beside or below it."""
    there, base = path.resolve(), out.resolve().parent
    relative = os.path.relpath(there, base)
    return str(there) if relative.startswith(os.path.join("..", "..")) else Path(relative).as_posix()


def parsed(text: str, out: Path) -> Federation:
    """The federation that the text is. Raises FederationError as a file with it would."""
    return parse_federation(yaml.safe_load(text), base=out.parent, source=str(out))
