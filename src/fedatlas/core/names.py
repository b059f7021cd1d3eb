"""Names of classes that most likely mean the same, and names of channels that do not."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence, Set

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
NEGATIONS = ("non", "un", "in", "im", "ir", "dis", "a", "an", "ab")
"""Prefixes that make a word its opposite."""
LINKS = ("of", "the", "and")
"""Words that tell nothing apart."""
ROMAN = re.compile(r"x{0,3}(ix|iv|v?i{0,3})[a-z]?")
"""A Roman numeral, as of segments, levels and grades, and a letter behind it."""
ENDS = ({"L", "R"}, {"D", "G"})
"""Capitals that are sides at the end of a word, as in ParotidL: left and right, droit and gauche."""
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
        words.append(word[:-1] if len(word) > 3 and word.endswith("s") and word[-2] not in "sui" else word)
    return " ".join(sorted(words, key=lambda word: (word not in SIDES, word)))


def may_be_same(one: str, other: str) -> bool:
    """Are two names so alike that they may be one class by two spellings?"""
    a, b = key(one), key(other)
    if a == b or _joined(one) == _joined(other):
        return True
    differ = set(a.split()) ^ set(b.split())
    prefixes = {prefix for word in differ for prefix in ("hypo", "hyper") if word.startswith(prefix)}
    if differ & {*SIDES, *LESIONS, *PLACES} or len(prefixes) > 1 or _numbers(a) != _numbers(b):
        return False
    if _short(differ) or _opposite(differ) or _sided(one, other):
        return False
    return min(len(a), len(b)) > 4 and difflib.SequenceMatcher(None, a, b).ratio() >= NEAR


def _joined(name: str) -> tuple[str, list[str]]:
    """A name without separators, and its numbers, which these keep apart."""
    return plain(name).replace(" ", ""), re.findall(r"\d+", name)


def _numbers(name: str) -> list[str]:
    """The words with a digit, with their letters: L1 is not T1."""
    return [word for word in name.split() if re.search(r"\d", word)]


def _short(differ: Set[str]) -> bool:
    """Is any of these words one of those, of three letters or fewer or Roman numerals, of which every letter counts?"""
    return any(len(word) <= 3 or ROMAN.fullmatch(word) for word in differ - {*LINKS})


def _opposite(differ: Set[str]) -> bool:
    """Is any of these words another with a negating prefix?"""
    return any(prefix + word in differ for word in differ for prefix in NEGATIONS)


def _sided(one: str, other: str) -> bool:
    """Do two names differ in a capital that is a side at the end of a word?"""
    a, b = (set(re.split(r"[_\-./\s]+", name)) for name in (one, other))
    for mine, theirs in ((mine, theirs) for mine in a - b for theirs in b - a):
        if mine[:-1].lower() == theirs[:-1].lower() and {mine[-1:], theirs[-1:]} in ENDS:
            return True
        short, long = sorted((mine, theirs), key=len)
        if re.fullmatch(re.escape(short) + "[LRDG]", long, re.I) and re.search("[a-z][LRDG]$", long):
            return True
    return False


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
