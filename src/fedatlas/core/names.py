"""Names of classes that most likely mean the same, and names of channels that do not."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from fedatlas.core.labels import SHORT_SIDES

LESIONS = ("tumor", "lesion", "cancer", "metastasis", "cyst", "nodule", "mass")
SPELLINGS = (("oe", "e"), ("ae", "e"), ("our", "or"), ("tumors", "tumor"))
SIDES = ("left", "right")
PLACES = (
    "superior", "inferior", "sup", "inf", "upper", "lower", "anterior", "posterior", "ant", "post", "ventral", "dorsal",
    "cranial", "caudal", "medial", "lateral", "med", "lat", "internal", "external", "int", "ext", "inner", "outer",
    "proximal", "distal", "prox", "dist", "central", "peripheral", "superficial", "deep", "ascending", "descending",
    "minimus", "medius", "maximus", "minor", "major",
)  # fmt: skip
"""Words that tell apart what is otherwise called the same."""
NEAR = 0.86
"""From this similarity on two names are asked about (difflib's ratio)."""


def plain(name: str) -> str:
    """A name without capitals, hyphens and underscores."""
    return " ".join(re.sub(r"[_\-./\s]+", " ", name).lower().split())


def key(name: str) -> str:
    """What is equal for names that most likely mean the same: sides first, one spelling, singular."""
    words = []
    for word in plain(name).split():
        word = SHORT_SIDES.get(word, word)
        for british, american in SPELLINGS:
            word = word.replace(british, american) if len(word) > 4 else word
        words.append(word[:-1] if len(word) > 4 and word.endswith("s") and word[-2] not in "sui" else word)
    return " ".join(sorted(words, key=lambda word: (word not in SIDES, word)))


def may_be_same(one: str, other: str) -> bool:
    """Are two names so alike that they may be one class by two spellings?"""
    a, b = key(one), key(other)
    if a == b:
        return True
    differ = set(a.split()) ^ set(b.split())
    prefixes = {prefix for word in differ for prefix in ("hypo", "hyper") if word.startswith(prefix)}
    if (
        differ & {*SIDES, *LESIONS, *PLACES}
        or len(prefixes) > 1
        or re.findall(r"\d+", a) != re.findall(r"\d+", b)
    ):
        return False
    return min(len(a), len(b)) > 4 and difflib.SequenceMatcher(None, a, b).ratio() >= NEAR


def channels_apart(sites: Iterable[tuple[str, Sequence[str]]]) -> Iterator[tuple[str, str, bool]]:
    """Sites whose channels have other names than those of a site before them, capitals and separators aside: the site, that
    site, and whether the names are the same in another order. sites: with the names of their channels; one that does not name
    all of them is left out."""
    named: list[tuple[str, list[str]]] = []
    for site, names in sites:
        own = [plain(name).replace(" ", "") for name in names]
        if not own or not all(own):
            continue
        alike = [(other, theirs) for other, theirs in named if len(theirs) == len(own) and theirs != own]
        turned = next((other for other, theirs in alike if sorted(theirs) == sorted(own)), None)
        if turned is not None:
            yield site, turned, True
        elif alike and alike[0] == named[0]:
            yield site, named[0][0], False
        named.append((site, own))
