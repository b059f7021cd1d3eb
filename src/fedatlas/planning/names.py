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

    def of(self, site: str) -> list[str]:
        """The classes of a site."""
        return list(dict.fromkeys(n for (s, _), n in self.classes.items() if s == site and n is not None))

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
    for finder in (_same,) if of_images else (_undrawn, _same, _sides, _generic, _lesions):
        for question in finder(found, labels):
            question.choices[ask(question)][1](found)
    if not of_images:
        found.notes += [
            f"site {site.site}: none of its labels counts as annotated, so that it cannot train; take it out of the file"
            for site in sites
            if not found.of(site.site) and not site.findings
        ]
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


def _sides(found: Merged, drawn: Drawn) -> Iterator[Question]:
    """An organ that one site draws whole, and another left and right. A site that draws one side alone cannot say where the whole
    is: the other side would count as none of it."""
    for name in found.names:
        both = {f"left {key(name)}", f"right {key(name)}"}
        halves = {place: ours for place, ours in found.classes.items() if ours and key(ours) in both}
        if not halves:
            continue
        sites = sorted({site for site, _ in halves})
        whole = [
            site
            for site in sites
            if site in found.at(name) or {key(ours) for (s, _), ours in halves.items() if s == site} == both
        ]
        lone = [place for place in halves if place[0] not in whole]

        def join(
            merged: Merged,
            name: str = name,
            halves: Mapping[tuple[str, str], str] = halves,
            lone: Sequence[tuple[str, str]] = lone,
        ) -> None:
            for place in halves:
                merged.classes[place] = None if place in lone else name

        held = " and ".join(map(repr, dict.fromkeys(halves.values())))
        text = f"{name!r} (site {', '.join(found.at(name))}) holds what is {held} at site {', '.join(sites)}: a voxel cannot be both"
        choice = f"one class, {name}: what was drawn whole cannot be divided"
        if lone:
            alone = ", ".join(f"{own!r} at site {site}" for site, own in lone)
            text += f". One side alone is drawn as {alone}: as {name!r}, it would make the other side count as none"
            choice += f"; not annotated: {alone}"
        yield Question(text, ((choice, join), ("several classes all the same", _nothing)))


def _generic(found: Merged, drawn: Drawn) -> Iterator[Question]:
    """A lesion without its organ, at sites that draw different organs."""
    for name in [n for n in found.names if key(n) in LESIONS]:
        organs = {
            site: frozenset(o for o in found.of(site) if not set(key(o).split()) & set(LESIONS))
            for site in found.at(name)
        }
        alike: dict[frozenset[str], list[str]] = {}
        for site, own in organs.items():
            alike.setdefault(own, []).append(site)
        if len(alike) < 2:
            continue
        by_set = {own: _lesion_of(found, name, own, sites) for own, sites in alike.items()}

        def apart(
            merged: Merged,
            name: str = name,
            organs: Mapping[str, frozenset[str]] = organs,
            by_set: Mapping[frozenset[str], str] = by_set,
        ) -> None:
            for place, ours in merged.classes.items():
                if ours == name:
                    merged.classes[place] = by_set[organs[place[0]]]

        where = ", ".join(
            (f"beside {' and '.join(sorted(own))}" if own else "alone") + f" at site {site}"
            for site, own in organs.items()
        )
        certain = all(len(own) == 1 and not new.startswith(_as_at(name, "")) for own, new in by_set.items())
        how = "each is of its organ" if certain else "a class for each set of organs"
        yield Question(
            f"{name!r} stands {where}: is it the same class?",
            ((f"no: {how}, {', '.join(by_set.values())}", apart), ("yes: one class", _nothing)),
        )


def _lesion_of(found: Merged, name: str, organs: frozenset[str], sites: Sequence[str]) -> str:
    """What a lesion without its organ is called at sites that draw these organs: by the organ where it is the only one and no
    lesion of it is drawn there, otherwise by the first of the sites."""
    if len(organs) == 1:
        wanted = f"{next(iter(organs))} {plain(name)}"
        if not any(key(ours) == key(wanted) for site in sites for ours in found.of(site)):
            return next((ours for ours in found.names if key(ours) == key(wanted)), wanted)
    return _as_at(name, sites[0])


def _as_at(name: str, site: str) -> str:
    return f"{plain(name)} as at {site}"


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
            f"{name!r} lies in {organ!r}: are they an organ and its lesion, which methods and tables put together?",
            (("yes: a group", group), ("no", _nothing)),
        )


def _nothing(found: Merged) -> None:
    """Leaves things as they are."""
