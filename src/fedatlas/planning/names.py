"""The names of labels of all sites, brought together: what is one class, what is doubtful, and what a person chose.

Names that differ in capitals, blanks, hyphens and underscores alone are one class. Whatever else looks like one is a question
with a proposal, as is a label that nobody drew and an organ that one site draws whole and another by sides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from fedatlas.core.errors import FederationError
from fedatlas.core.names import LESIONS, key, may_be_same, plain
from fedatlas.planning.description import Description, Named


@dataclass
class Merged:
    """What the sites' labels become. classes: (site, own name) -> class, None for a label that does not count; groups: an organ
    and its lesions; notes: what was decided without a question, a sentence each."""

    classes: dict[tuple[str, str], str | None]
    groups: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Every class once, in the order of the sites."""
        return list(dict.fromkeys(name for name in self.classes.values() if name is not None))

    def at(self, name: str) -> list[str]:
        """The sites that have a class."""
        return list(dict.fromkeys(site for (site, _), ours in self.classes.items() if ours == name))

    def rename(self, old: str, new: str) -> None:
        self.classes = {place: new if ours == old else ours for place, ours in self.classes.items()}


@dataclass(frozen=True)
class Question:
    """A doubt. choices: what may be answered, the first is proposed; each changes a `Merged`."""

    text: str
    choices: tuple[tuple[str, Callable[[Merged], None]], ...]


Ask = Callable[[Question], int]
"""Answers a question by the number of a choice."""


def merged(sites: Sequence[Description], ask: Ask, *, findings: bool = False) -> Merged:
    """The labels of all sites as classes, after every question was answered. findings: those of the whole image beside
    segmentation, in place of the labels."""
    found = _alike(sites, findings)
    labels = {(s.site, n): of for s in sites for n, of in (s.findings if findings else s.labels).items()}
    of_images = findings or sites[0].task == "classification"
    if of_images:
        _leave_out_absent(found, labels)
    for finder in (_same,) if of_images else (_undrawn, _same, _generic, _sides, _lesions):
        for question in finder(found, labels):
            question.choices[ask(question)][1](found)
    return found


def _alike(sites: Sequence[Description], findings: bool) -> Merged:
    """Names that differ in capitals and separators alone are one class, by the name that most sites use."""
    spelled: dict[str, list[tuple[str, str]]] = {}
    for site in sites:
        own = site.findings if findings else site.labels
        for name in own:
            spelled.setdefault(plain(name), []).append((site.site, name))
        twice = [a for a, b in combinations(own, 2) if plain(a) == plain(b)]
        if twice:
            raise FederationError(
                f"site {site.site}: two of its labels differ in capitals or separators alone, as {twice[0]!r}; rename one"
            )
    found = Merged({})
    for places in spelled.values():
        names = [name for _, name in places]
        best = max(dict.fromkeys(names), key=names.count)
        found.classes |= dict.fromkeys(places, best)
        if len(set(names)) > 1:
            found.notes.append(
                f"{', '.join(dict.fromkeys(names))} are one class, {best}: they differ in spelling alone"
            )
    order = [(site.site, name) for site in sites for name in (site.findings if findings else site.labels)]
    found.classes = {place: found.classes[place] for place in order}
    return found


Drawn = Mapping[tuple[str, str], Named]


def _leave_out_absent(found: Merged, drawn: Drawn) -> None:
    """A finding that no image of any site has cannot be learnt; one that is absent at some sites is verified absent there."""
    for name in found.names:
        if not any(drawn[place].present for place, ours in found.classes.items() if ours == name):
            found.classes = {place: None if ours == name else ours for place, ours in found.classes.items()}
            found.notes.append(f"{name} is left out: no training image of any site has it")


def _undrawn(found: Merged, drawn: Drawn) -> Iterator[Question]:
    """Labels of a site's table that no case of it holds."""
    for (site, name), label in drawn.items():
        if label.present:
            continue

        def drop(merged: Merged, place: tuple[str, str] = (site, name)) -> None:
            merged.classes[place] = None

        yield Question(
            f"site {site}: its label {name!r} is in none of its {label.annotated} training cases. Was it looked for?",
            (("no: it is not annotated there", drop), ("yes: it was looked for and is absent", _nothing)),
        )


def _same(found: Merged, drawn: Drawn) -> Iterator[Question]:
    """Names that most likely mean the same."""
    for one, other in combinations(found.names, 2):
        if one not in found.names or other not in found.names or set(found.at(one)) & set(found.at(other)):
            continue  # a site that has both tells them apart
        if not may_be_same(one, other):
            continue

        def join(merged: Merged, one: str = one, other: str = other) -> None:
            merged.rename(other, one)

        yield Question(
            f"{one!r} (site {', '.join(found.at(one))}) and {other!r} (site {', '.join(found.at(other))}): are they the same?",
            ((f"yes: one class, {one}", join), ("no: two classes", _nothing)),
        )


def _generic(found: Merged, drawn: Drawn) -> Iterator[Question]:
    """A lesion without its organ, at sites that draw different organs."""
    for name in [n for n in found.names if key(n) in LESIONS]:
        organs = {
            site: [o for (s, _), o in found.classes.items() if s == site and o and o != name]
            for site in found.at(name)
        }
        if (
            len(organs) < 2
            or not all(len(own) == 1 for own in organs.values())
            or len({o[0] for o in organs.values()}) < 2
        ):
            continue

        def by_organ(merged: Merged, name: str = name, organs: dict[str, list[str]] = organs) -> None:
            for place, ours in merged.classes.items():
                if ours == name:
                    merged.classes[place] = f"{organs[place[0]][0]} {plain(name)}"

        where = ", ".join(f"beside {own[0]} at site {site}" for site, own in organs.items())
        yield Question(
            f"{name!r} stands {where}: is it the same class?",
            (("no: each is of its organ, " + ", ".join(f"{o[0]} {plain(name)}" for o in organs.values()), by_organ),
             ("yes: one class", _nothing)),
        )  # fmt: skip


def _sides(found: Merged, drawn: Drawn) -> Iterator[Question]:
    """An organ that one site draws whole, and another left and right."""
    for name in found.names:
        halves = [n for n in found.names if key(n) in (f"left {key(name)}", f"right {key(name)}")]
        if not halves:
            continue

        def join(merged: Merged, name: str = name, halves: list[str] = halves) -> None:
            for half in halves:
                merged.rename(half, name)

        sites = sorted({site for half in halves for site in found.at(half)})
        yield Question(
            f"{name!r} (site {', '.join(found.at(name))}) holds what is {' and '.join(map(repr, halves))} at site "
            f"{', '.join(sites)}: a voxel cannot be both",
            (
                (f"one class, {name}: what was drawn whole cannot be divided", join),
                ("several classes all the same", _nothing),
            ),
        )


def _lesions(found: Merged, drawn: Drawn) -> Iterator[Question]:
    """A lesion and the organ in which it lies."""
    for name in found.names:
        words = key(name).split()
        if not set(words) & set(LESIONS):
            continue
        organ = next(
            (
                n
                for n in found.names
                if n != name and key(n) == " ".join(w for w in words if w not in LESIONS)
            ),
            None,
        )
        if organ is None:
            continue

        def group(merged: Merged, name: str = name, organ: str = organ) -> None:
            old = next((g for g in merged.groups if g[0] == organ), (organ,))
            merged.groups = [g for g in merged.groups if g[0] != organ] + [(*old, name)]

        yield Question(
            f"{name!r} lies in {organ!r}: are they an organ and its lesion, so that a site that draws {organ} alone has the lesion "
            "inside it?",
            (("yes: a group", group), ("no", _nothing)),
        )


def _nothing(found: Merged) -> None:
    """Leaves things as they are."""
