"""What a site says of itself before a run, as the server takes it: everything else is refused.

A site that is not what it should be may answer anything; so nothing of it is used before it is known to be of the
form that `site.SiteDesk` gives it.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedatlas.core.errors import FedAtlasError
from fedatlas.core.labels import LabelSpace
from fedatlas.data.index import SiteIndex
from fedatlas.federation.usable import DECIDING
from fedatlas.transport.egress import problem_of_text

DEEPEST = 20
"""How deep lists and dicts of facts lie in each other."""


def _one_line(text: str) -> str:
    if problem := problem_of_text(text):
        raise ValueError(problem)
    return text


Text = Annotated[str, AfterValidator(_one_line)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
CaseCount = Annotated[int, Field(ge=0, le=10**6)]
"""So many cases may a site have; what its answers may hold grows with them."""
Counts = dict[Text, Count]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Installed(_Facts):
    """What `SiteDesk.hello` of every version tells: the versions of its packages, and the hash of its federation file."""

    versions: dict[Text, Text]
    hash: Text


class Hello(Installed):
    """What `SiteDesk.hello` tells. federation: as JSON; clock: seconds since 1970 at the site."""

    federation: Annotated[str, Field(max_length=1 << 20)]
    clock: Annotated[float, Field(ge=0, le=1e11)]


def names_of_channels(index: SiteIndex) -> list[str]:
    """What a site calls the channels of its images, as others may be told: all of them, or [] where one has no name, or none that
    is one short line."""
    names = list(index.named_channels)
    return [] if any(map(problem_of_text, names)) else names


class Layout(_Facts):
    """What `SiteDesk.layout` tells. brings: site -> names of its labels; channel_names: see `names_of_channels`."""

    brings: Annotated[dict[Text, list[Text]], Field(min_length=1)]
    channels: Annotated[int, Field(ge=1, le=1024)]
    channel_names: Annotated[list[Text], Field(max_length=1024)]


class Cases(_Facts):
    train: CaseCount
    validation: CaseCount
    test: CaseCount


class Finding(_Facts):
    labelled: Count
    present: Count


class Inputs(_Facts):
    """`data.inputs.Ranges`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kinds: Annotated[list[Literal["scan", "picture"]], Field(min_length=1)]
    axes: Annotated[list[int], Field(min_length=1)]
    spacing: Annotated[list[Pair], Field(min_length=3, max_length=3)] | None
    percentiles: Annotated[list[list[Pair]], Field(min_length=1)]
    values: Annotated[int, Field(ge=0)]
    modalities: list[Text]
    colour: bool


class Summary(_Facts):
    """What every summary of a site has, and what those of some kinds of labels have: `data.site_data.SiteData.summary`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    annotated: list[Text]
    role: Literal["train", "test"]
    cases: Cases
    labelled: Counts
    voxels: Counts | None = None
    positives: Counts | None = None
    negatives: Counts | None = None
    findings: dict[Text, Finding] | None = None
    inputs: Inputs | None = None
    leaks: Count | None = None
    orientation: list[Text] | None = None
    patients: Cases | None = None
    shape: list[list[Count]] | None = None
    size: list[list[Count]] | None = None
    spacing: list[list[float]] | None = None


class Joined(_Facts):
    """What `SiteDesk.join` tells. classes: its own names of labels -> classes; memory: versions of its memory; changed:
    whether its data are not those with which the run began."""

    summary: Summary
    classes: dict[Text, Text]
    memory: list[Text]
    changed: bool


Kind = TypeVar("Kind", bound=_Facts)


def _read(kind: type[Kind], facts: Mapping[str, Any]) -> Kind:
    """Raises ValueError for facts of another form."""
    _plain({key: item for key, item in facts.items() if key != "federation"})
    try:
        return kind.model_validate(dict(facts))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}") from None


def _plain(tree: Any, depth: int = 0, *, texts: bool = True) -> None:
    """Raises ValueError for what no table takes: numbers that are not finite, deep nesting and, unless not `texts`,
    texts that are not one short line."""
    if depth > DEEPEST:
        raise ValueError(f"lists and dicts more than {DEEPEST} deep")
    if isinstance(tree, dict):
        for key, item in tree.items():
            _plain(key, depth + 1, texts=texts)
            _plain(item, depth + 1, texts=texts)
    elif isinstance(tree, list):
        for item in tree:
            _plain(item, depth + 1, texts=texts)
    elif isinstance(tree, str) and texts:
        _one_line(tree)
    elif isinstance(tree, int | float) and not (abs(tree) < 1 << 63 and math.isfinite(tree)):
        raise ValueError("a number that is not finite, or beyond 2^63")


def _problem(read: Callable[[], None]) -> str | None:
    try:
        read()
    except (ValueError, RecursionError, FedAtlasError) as error:
        return f"says {str(error)[:300] or type(error).__name__}"
    return None


def other_versions(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """The packages that decide numbers and are not of the server's version at a site, a text each; builds for CPU or GPU
    aside."""
    pairs = [(name, there.get(name, "none"), here.get(name, "none")) for name in DECIDING]
    return [
        f"{name} {theirs} is installed, {ours} at the server"
        for name, theirs, ours in pairs
        if theirs.partition("+")[0] != ours.partition("+")[0]
    ]


def problem_of_hello(facts: Mapping[str, Any], *, versions: Mapping[str, str] | None = None) -> str | None:
    """What is wrong with the facts of a hello; None if nothing is. versions: the server's; of a site with others, whose
    hello may have another form, `Installed` alone is looked at."""

    def read() -> None:
        installed = _read(Installed, facts)
        if versions is not None and other_versions(versions, installed.versions):
            return
        hello = _read(Hello, facts)
        _plain(json.loads(hello.federation), texts=False)
        if not isinstance(json.loads(hello.federation), dict):
            raise ValueError("a federation file that is no mapping")

    return _problem(read)


def problem_of_layout(site: str, facts: Mapping[str, Any], *, several: bool = False) -> str | None:
    """What is wrong with the facts of a site's data; None if nothing is. several: whether the site speaks for others, as
    that of pooled data does."""

    def read() -> None:
        layout = _read(Layout, facts)
        if not several and set(layout.brings) != {site}:
            raise ValueError(f"what {', '.join(sorted(layout.brings))[:80]} brings; it may speak for {site}")

    return _problem(read)


def problem_of_join(space: LabelSpace, facts: Mapping[str, Any]) -> str | None:
    """What is wrong with the facts of a join; None if nothing is."""

    def read() -> None:
        joined = _read(Joined, facts)
        summary = joined.summary
        named = {*summary.annotated, *summary.labelled, *joined.classes.values()}
        for counts in (summary.voxels, summary.positives, summary.negatives):
            named |= set(counts or ())
        if unknown := sorted(named - set(space.names)):
            raise ValueError(f"{unknown[0]!r}, which is no class of the federation")
        if unknown := sorted(set(summary.findings or ()) - set(space.findings)):
            raise ValueError(f"{unknown[0]!r}, which is no finding of the federation")

    return _problem(read)
