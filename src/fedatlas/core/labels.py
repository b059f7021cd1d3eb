"""The label space of a federation, and what a site annotates of it.

Shapes: C classes, *S spatial.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedatlas.core.errors import DataError, FederationError, did_you_mean

BACKGROUND = "background"
SHORT_SIDES = {"l": "left", "lt": "left", "r": "right", "rt": "right"}
"""Words of names, as in Kidney_L, that stand for a side."""


@dataclass(frozen=True)
class LabelSpace:
    """Every class of the federation, by name; the index of a name is its class everywhere.

    names: when `exclusive`, names[0] is "background" and a voxel has one class (softmax); otherwise each
        class is a yes or no of its own (sigmoid) and there is no background.
    level: what a label is of: a voxel (segmentation) or a whole image (classification; never exclusive).
    groups: classes that belong together, as an organ and its lesion. A class in no group stands alone.
    findings: beside classes of voxels, findings of the whole image, each a yes or no of its own; finding_of: the
        class of voxels that each is about, or None. They are no classes: `len` does not count them.

    Raises FederationError for a name given twice, a missing background, or a group that holds the
    background, an unknown index or a class of another group; and for findings that do not fit the classes.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    exclusive: bool = True
    level: Literal["voxel", "image"] = "voxel"
    findings: tuple[str, ...] = ()
    finding_of: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        self._check_findings()
        if self.level == "image" and self.exclusive:
            raise FederationError(
                "label space: classes of whole images are exclusive; each is a yes or no of its own, set "
                "labels.exclusive to false or leave it out"
            )
        if len(set(self.names)) != len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise FederationError(
                f"label space: {', '.join(twice)} is given twice; each name is allowed once"
            )
        if self.exclusive and (not self.names or self.names[0] != BACKGROUND):
            raise FederationError(
                f"label space: exclusive classes begin with {BACKGROUND!r}, got {list(self.names[:1])}"
            )
        if not self.exclusive and BACKGROUND in self.names:
            raise FederationError(
                f"label space: {BACKGROUND!r} is no class where classes overlap; leave it out, or set exclusive"
            )
        if not self.foreground:
            raise FederationError("label space: no class besides the background; at least one is needed")
        seen: set[int] = set()
        for group in self.groups:
            for index in group:
                if index not in self.foreground:
                    got = self.names[index] if 0 <= index < len(self.names) else index
                    allowed = ", ".join(self.names[of] for of in self.foreground)
                    raise FederationError(f"label space: a group holds {got!r}; allowed: {allowed}")
                if index in seen:
                    raise FederationError(f"label space: class {self.names[index]!r} is in two groups")
                seen.add(index)

    def _check_findings(self) -> None:
        if self.findings and self.level == "image":
            raise FederationError(
                "label space: findings stand beside classes of voxels; where labels are of whole images, they are "
                "its classes"
            )
        if len(self.findings) != len(self.finding_of):
            raise FederationError(
                f"label space: {len(self.findings)} findings, but {len(self.finding_of)} classes that they are about"
            )
        twice = [name for n, name in enumerate(self.findings) if name in (*self.names, *self.findings[:n])]
        if twice:
            raise FederationError(
                f"label space: the finding {twice[0]!r} has the name of another finding or of a class; give it one of "
                "its own"
            )
        for name, index in zip(self.findings, self.finding_of, strict=True):
            if index is not None and index not in self.foreground:
                raise FederationError(
                    f"label space: the finding {name!r} is about class {index}, which is not in the foreground"
                )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def foreground(self) -> range:
        """The indices of all classes but the background."""
        return range(1 if self.exclusive else 0, len(self.names))

    @property
    def organs(self) -> tuple[tuple[int, ...], ...]:
        """All foreground classes as groups, in the order of their first class; lone classes are groups of one."""
        group_of = {index: tuple(sorted(group)) for group in self.groups for index in group}
        return tuple(dict.fromkeys(group_of.get(index, (index,)) for index in self.foreground))

    @property
    def organ_of(self) -> dict[int, int]:
        """Lesion class -> the class of its organ, which is the first of its group."""
        return {lesion: organ for organ, *lesions in self.groups for lesion in lesions}

    def to_plain(self) -> dict[str, Any]:
        """Plain values; `from_plain` makes the same space of them."""
        return {
            "names": list(self.names),
            "groups": [list(group) for group in self.groups],
            "exclusive": self.exclusive,
            "level": self.level,
            "findings": list(self.findings),
            "finding_of": list(self.finding_of),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "LabelSpace":
        """What `to_plain` gave; what runs of earlier versions lack may be missing."""
        groups = tuple(tuple(group) for group in plain["groups"])
        findings, about = tuple(plain.get("findings", ())), tuple(plain.get("finding_of", ()))
        level = plain.get("level", "voxel")
        return cls(tuple(plain["names"]), groups, plain["exclusive"], level, findings, about)

    @classmethod
    def of_names(
        cls,
        names: Sequence[str],
        groups: Iterable[Sequence[str]] = (),
        *,
        exclusive: bool = True,
        level: Literal["voxel", "image"] = "voxel",
        findings: Mapping[str, str | None] | None = None,
    ) -> "LabelSpace":
        """A space whose groups are of names, and whose findings are name -> the name of the class that it is about, or None."""
        plain = cls(tuple(names), (), exclusive, level)
        about = {name: None if of is None else plain.index(of) for name, of in (findings or {}).items()}
        of_groups = tuple(tuple(plain.index(name) for name in group) for group in groups)
        return cls(plain.names, of_groups, exclusive, level, tuple(about), tuple(about.values()))

    def index(self, name: str) -> int:
        """The class of a name; FederationError if there is none."""
        if name not in self.names:
            raise FederationError(f"label space: no class {name!r}; known: {', '.join(self.names)}")
        return self.names.index(name)


@dataclass(frozen=True)
class SiteLabels:
    """What one site annotates: the union over its training cases, background not counted. findings: those of the whole image, beside
    segmentation.

    Losses and groups look at `Batch.known`, per sample, and never at this union.
    """

    space: LabelSpace
    annotated: frozenset[int]
    findings: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        unknown = self.annotated - set(self.space.foreground)
        if unknown:
            raise FederationError(
                f"site labels: {sorted(unknown)} are not foreground classes of {self.space.names}"
            )

    @property
    def known(self) -> tuple[bool, ...]:
        """[C] is class c annotated. The background of an exclusive space is known where any class is."""
        return known_row(self.space, self.annotated)


def known_row(space: LabelSpace, annotated: Iterable[int]) -> tuple[bool, ...]:
    """[C] which classes are known, given the annotated foreground classes.

    In an exclusive space channel 0 is always True: it stands for "none of the known classes", that is the
    true background together with everything that is not annotated.
    """
    known = set(annotated) | ({0} if space.exclusive else set())
    return tuple(index in known for index in range(len(space)))


def map_labels(
    raw: np.ndarray,
    table: Mapping[int, str],
    space: LabelSpace,
    *,
    annotated: Iterable[int] | None = None,
    source: str = "label map",
) -> np.ndarray:
    """Maps the integers of a site [*S] to classes of the space: the class index [*S] (uint8, int16 from 256
    classes on) when exclusive, else one mask per class [C, *S] (uint8).

    table: integer -> class name of the space, or "background"; only integers in it may occur.
    annotated: classes to keep; a voxel of any other class becomes "none of the known classes".
    source: named in errors, as a file.

    Raises DataError for a value that is not whole, or not in the table.
    """
    values, inverse = np.unique(np.asarray(raw), return_inverse=True)
    whole = np.rint(values.astype(np.float64))
    if not np.all(np.abs(values - whole) < 1e-3):
        raise DataError(
            f"{source}: holds {float(values[values != whole][0])}; label maps hold whole numbers only"
        )
    keep = None if annotated is None else set(annotated)
    classes = np.zeros(len(values), dtype=np.uint8 if len(space) < 256 else np.int16)
    onehot = np.zeros((len(space), len(values)), dtype=np.uint8)
    for position, value in enumerate(whole.astype(np.int64).tolist()):
        if value not in table:
            known = ", ".join(f"{number}={name}" for number, name in sorted(table.items()))
            raise DataError(
                f"{source}: holds the label integer {value}, which is not in the table; known: {known}"
            )
        if table[value] == BACKGROUND:
            continue
        index = space.index(table[value])
        if keep is None or index in keep:
            classes[position] = index
            onehot[index, position] = 1
    if space.exclusive:
        return classes[inverse].reshape(np.shape(raw))
    return onehot[:, inverse.reshape(-1)].reshape(len(space), *np.shape(raw))


def resolve_names(
    names: Sequence[str], aliases: Mapping[str, str], space: LabelSpace, *, site: str
) -> dict[str, str]:
    """A site's label names -> names of the space, through the site's aliases. An alias may point to the background, as
    of a lesion that is to count as no class; of labels of whole images there is none.

    Raises FederationError for a name that is neither in the space nor an alias of one, and for an alias
    that matches none of the site's names or points outside the space.
    """
    allowed = space.names if space.level == "image" else (*space.names, BACKGROUND)
    for alias, target in aliases.items():
        if alias not in names:
            raise FederationError(
                f"site {site}: alias {alias!r} matches none of the site's labels; it has: {', '.join(names)}"
            )
        if target not in allowed:
            raise FederationError(
                f"site {site}: alias {alias!r} points to {target!r}, which is not in the label space; "
                f"known: {', '.join(space.names)}"
            )
    resolved = {name: aliases.get(name, name) for name in names}
    for name, target in resolved.items():
        if target not in space.names and target != BACKGROUND:
            raise FederationError(
                f"site {site}: label {name!r} is not in the label space ({', '.join(space.names)});"
                f"{did_you_mean(name, space.names)} "
                f"add it there, give it an alias (of an organ, or {BACKGROUND}), or leave it out with `annotated`"
            )
    return resolved
