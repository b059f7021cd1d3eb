"""`fedatlas analyse membership`: can somebody with half of a model's training cases tell the other half from the rest?

Jiang et al., UFPS, Patterns 2024, Supplementary Note 10. The cases of the target's training are halved. Of all other cases
("the rest") a quarter is set aside. A shadow model is trained on one half and on the 60 % of the other three quarters of
which the target is most certain, with the target's own predictions as labels. An attack model learns to tell the cases of
this training from the 40 % of which the target is least certain, from the shadow's prediction and the ground truth. It is
tested on the other half of the target's cases (members) and the quarter set aside.

Reconstruction, where the note is silent or cannot be meant:

* Unit: cases. The accuracies that it prints are whole numbers of 41, 47 and 73, so "class-wise accuracy" is the share of
  each class that is told right.
* Test: the note lists "predictions from the shadow model" for the test too. A shadow never saw the hidden half, so nothing
  but the target's pseudo labels would tell of it. Here the target is asked (Shokri et al.); `predictions: shadow` is what
  is printed.
* Target: the note attacks teachers. Here each site's local model (members: its training cases), or with `model` the
  global one (members: all sites' training cases).
* Rest: validation and test cases of the target's site, and all cases of the other sites, so that an attack may
  tell sites rather than members. `pool: own` leaves the other sites out.
* Shadow: the federation's net with another initialisation, its local training (optimizer, learning rate, augmentation) for
  `steps` steps, and the run's own supervised loss, where the note has Dice and BCE.
* Attack net: two convolutions over the case, on probability, truth and their distance for every class with a truth in all
  cases; the image by option. The note says only that the loss is cross-entropy; here members and others weigh the same in
  it, and neither net nor maps are augmented.
* Uncertainty: Eq. 6 of the paper; of classes that overlap the mean entropy.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.learning import inference
from fedatlas import losses
from fedatlas.analysis.runs.cases import Case, CaseBatches, cases_of
from fedatlas.analysis.runs.subject import Subject, clock, timed
from fedatlas.analysis.membership import deal, evidence, train_attack, uncertainty, verdict
from fedatlas.federation.design import build_net
from fedatlas.core.errors import FederationError
from fedatlas.evaluation.images import Panel
from fedatlas.federation.file import inference_of
from fedatlas.core.labels import SiteLabels
from fedatlas.core.contract import Member, Site
from fedatlas.core.options import option, options
from fedatlas.core.seeds import generator, seed_of
from fedatlas.core.tensors import tensors_of
from fedatlas.learning.loop import train


@options
class Membership:
    """Can an attacker tell a model's training cases from others?"""

    model: Literal["best", "last", "local"] | None = option(
        None, "The target: local (each site's own), best, last; null: local ones if there are, else the best."
    )
    sites: tuple[str, ...] | None = option(
        None, "Sites whose local models are attacked; null: all that train.", min_length=1
    )
    pool: Literal["all", "own"] = option(
        "all", "Cases that were no members: all, or those of the target's site alone."
    )
    labels: Literal["annotated", "reference"] = option(
        "reference", "Ground truth: reference, all that a site has; annotated, what training saw."
    )
    predictions: Literal["target", "shadow"] = option(
        "target", "Whose predictions the attack is tested on; shadow is what the note prints."
    )
    image: bool = option(False, "Whether the attack sees the image, too.")
    cells: int = option(12, "Cells along every axis to which the attack's maps are averaged.", ge=1)
    steps: int = option(200, "Training steps of the shadow.", ge=1)
    attack: int = option(300, "Training steps of the attack.", ge=1)
    cases: int | None = option(None, "The most cases of a site and split; null: all.", ge=2)
    seed: int = option(0, "The deal, the shadow and the attack follow from it.", ge=0)


@dataclass
class ShadowSite:
    """Who trains the shadow: as much of a site as local training needs."""

    labels: SiteLabels
    cases: list[Case]
    make: Callable[..., CaseBatches]
    device: torch.device
    memory: dict[str, Any] = field(default_factory=dict)
    name: str = "shadow"

    def batches(self, *, batch: int, steps: int | None = None, epochs: float | None = None) -> CaseBatches:
        return self.make(batch=batch, steps=steps)

    def log(self, **numbers: float) -> None:
        """Goes nowhere."""

    @property
    def n_labelled(self) -> Tensor:
        return torch.stack([case.known for case in self.cases]).sum(0)

    @property
    def n_positive(self) -> Tensor:
        classes = range(len(self.labels.space))
        return torch.tensor([sum(bool(case.mask(c).any()) for case in self.cases) for c in classes])


@dataclass(frozen=True)
class Target:
    """A model to attack, with its training cases and all others."""

    name: str
    members: list[Member]
    inside: list[Case]
    rest: list[Case]


def run(subject: Subject, chosen: Membership, tell: Callable[[str], None]) -> dict[str, Any]:
    """{"loss", "cost", "attacks": [{"target", "classes", "cases", "shadow", "target_scores", "uncertainty", "test"}]}.

    cases: how many play what (`deal`). shadow: the agreement of its predictions with the target's on the cases of which
    the target is least certain. target_scores: the target's own agreement with the truth, of members and of others: the gap
    that the attack lives on. uncertainty: the target's of its members and of others, a value per case, in order of size.
    test: `verdict`. Agreement: Dice, mean over classes and cases in which either has the class; of
    whole images the share of equal decisions.
    """
    name = chosen.model or ("local" if set(subject.locals) & set(subject.sites) else subject.usual)
    planned = _planned(subject, chosen, name)
    tell(
        f"membership: {len(planned)} targets; {2 * sum(planned):,} predictions of cases at most; of each target "
        f"{chosen.steps} training steps of {subject.federation.local.batch} for the shadow, {chosen.attack} for the attack"
    )
    targets = _targets(subject, chosen, name)
    counts = [len(target.inside) + len(target.rest) for target in targets]
    size = sum(
        {id(c): c.image.nbytes + c.target.nbytes for t in targets for c in (*t.inside, *t.rest)}.values()
    )
    tell(
        f"membership: {size / 2**20:,.0f} MiB of cases held in memory, and as much of labels that the target gives them"
    )
    for target in targets:  # refuses before anything long begins
        _classes(subject, chosen, target)
        deal(len(target.inside), [0.0] * len(target.rest), generator("refused or not"))
    spent = _estimate(subject, chosen, targets)
    tell(f"membership: about {clock(spent)}, of one prediction and a few steps of each training timed")
    attacks = []
    for target in targets:
        attacks.append(_attacked(subject, chosen, target))
        test = attacks[-1]["test"]
        tell(
            f"membership: {target.name}: accuracy {test['accuracy']:.3f} (members {test['accuracy_member']:.3f}, "
            f"others {test['accuracy_other']:.3f}), AUROC {test['auroc']:.3f}"
        )
    cost = {"predictions": 2 * sum(counts), "steps": chosen.steps * len(targets)}
    return {"loss": subject.told_loss(), "cost": cost, "attacks": attacks}


def _planned(subject: Subject, chosen: Membership, name: str) -> list[int]:
    """How many cases each target will be asked about at most, as the run tells it without reading any."""
    counts = {
        site: sum(min(n, chosen.cases or n) for n in about["cases"].values())
        for site, about in subject.info["sites"].items()
        if about.get("role", "train") == "train"
    }
    if name != "local":
        return [sum(counts[site] for site in subject.sites)]
    sites = _attackable(subject, chosen)
    return [counts[site] if chosen.pool == "own" else sum(counts.values()) for site in sites]


def _attackable(subject: Subject, chosen: Membership) -> list[str]:
    """The sites whose local models are attacked: those asked for, or all that there are."""
    return [site for site in subject.sites if chosen.sites or site in subject.locals] or subject.sites


def _estimate(subject: Subject, chosen: Membership, targets: Sequence[Target]) -> float:
    """Seconds that all attacks will take."""
    first = targets[0]
    case = first.inside[0]
    nets = functools.cache(lambda place: subject.network(first.members[place]))
    seen = _ask(subject, chosen, first.members, _classes(subject, chosen, first), case, nets).maps
    prediction = timed(lambda: predict(subject, first.members, case, nets))
    few = min(16, len(first.inside) + len(first.rest))

    def shadow(steps: int) -> float:
        return timed(lambda: _shadow(subject, replace(chosen, steps=steps), first, [case], ("estimate",)))

    def attack(steps: int) -> float:
        return timed(lambda: train_attack([seen], [seen], ("estimate",), steps=steps, batch=2)) * few / 2

    # of several steps less one, as the first of a process is slower than all others
    step = [(-work(1) + work(3)) / 2 for work in (shadow, attack)]
    training = chosen.steps * max(step[0], 0) + chosen.attack * max(step[1], 0)
    cases = sum(len(t.inside) + len(t.rest) for t in targets)
    return 2 * cases * prediction + len(targets) * training


def _targets(subject: Subject, chosen: Membership, name: str) -> list[Target]:
    if name != "local" and chosen.pool == "own":
        raise FederationError(
            "analyse membership: the global model was trained at every site, so that pool: own means nothing; take "
            "--pool all, or --model local"
        )
    apart = _with_all_sites(subject) if name == "local" and chosen.pool == "all" else subject
    every = {
        (site, split): cases_of(apart.sources[site], site, split, chosen.labels, chosen.cases)
        for site in apart.sites
        for split in ("train", "validation", "test")
    }

    def of(sites: Sequence[str], *splits: str) -> list[Case]:
        return [
            case
            for (site, split), cases in every.items()
            for case in cases
            if site in sites and split in splits
        ]

    if name != "local":
        inside = of(apart.sites, "train")
        rest = of(apart.sites, "validation", "test")
        return [Target(name, subject.speaking(name), inside, rest)]
    foreign = apart.sites if chosen.pool == "all" else []
    return [
        Target(
            f"local/{site}",
            subject.speaking("local", site),
            of([site], "train"),
            of([site], "validation", "test")
            + of([other for other in foreign if other != site], "train", "validation", "test"),
        )
        for site in _attackable(subject, chosen)
    ]


def _with_all_sites(subject: Subject) -> Subject:
    """The same run with all of its training sites."""
    data = {site.name: site.path for site in subject.federation.sites if site.path is not None}
    return Subject(subject.folder.path, device=str(subject.device), data=data)


class Said(NamedTuple):
    """What is kept of a prediction. labels: the case with the decision as its labels; maps: what the attack sees."""

    uncertainty: float
    labels: Case
    maps: Tensor


def _attacked(subject: Subject, chosen: Membership, target: Target) -> dict[str, Any]:
    """The whole attack on one target."""
    parts = (chosen.seed, "membership", target.name)
    inside, rest = target.inside, target.rest
    classes = _classes(subject, chosen, target)

    def ask(members: Sequence[Member], cases: Sequence[Case]) -> list[Said]:
        nets = functools.cache(lambda place: subject.network(members[place]))
        return [_ask(subject, chosen, members, classes, case, nets) for case in cases]

    of_inside, of_rest = ask(target.members, inside), ask(target.members, rest)
    dealt = deal(len(inside), [said.uncertainty for said in of_rest], generator(*parts, "deal"))
    learnt = [of_inside[n].labels for n in dealt.seen] + [of_rest[n].labels for n in dealt.sure]
    shadow = [_shadow(subject, chosen, target, learnt, parts)]
    echo_in = ask(shadow, [inside[n] for n in dealt.seen] + [rest[n] for n in dealt.sure])
    echo_out = ask(shadow, [rest[n] for n in dealt.unsure])
    attack = train_attack(
        [said.maps for said in echo_in], [said.maps for said in echo_out], parts, steps=chosen.attack
    )
    if chosen.predictions == "target":
        hidden, outside = [of_inside[n] for n in dealt.hidden], [of_rest[n] for n in dealt.outside]
    else:
        hidden = ask(shadow, [inside[n] for n in dealt.hidden])
        outside = ask(shadow, [rest[n] for n in dealt.outside])
    imitated = zip([said.labels for said in echo_out], [of_rest[n].labels for n in dealt.unsure], strict=True)

    def own(said: Sequence[Said], cases: Sequence[Case]) -> float:
        return _agreement(zip([one.labels for one in said], cases, strict=True), classes)

    return {
        "target": target.name,
        "classes": [subject.space.names[c] for c in classes],
        "cases": {key: len(value) for key, value in vars(dealt).items()},
        "shadow": _agreement(imitated, classes),
        "target_scores": {"members": own(of_inside, inside), "others": own(of_rest, rest)},
        "uncertainty": {
            "members": sorted(said.uncertainty for said in of_inside),
            "others": sorted(said.uncertainty for said in of_rest),
        },
        "test": verdict(
            attack.scores([said.maps for said in hidden]), attack.scores([said.maps for said in outside])
        ),
    }


def _ask(
    subject: Subject,
    chosen: Membership,
    members: Sequence[Member],
    classes: Sequence[int],
    case: Case,
    net_of: Callable[[int], nn.Module],
) -> Said:
    p = predict(subject, members, case, net_of)
    exclusive = subject.space.exclusive
    filled = p.nan_to_num(0.5)
    annotated = ~p.isnan().reshape(len(p), -1).any(1)
    decided = (
        filled.argmax(0).numpy().astype(np.int64) if exclusive else (filled > 0.5).numpy().astype(np.float32)
    )
    image = case.image if chosen.image else None
    truth = torch.stack([torch.from_numpy(mask) for mask in map(case.mask, range(len(p)))])
    return Said(
        uncertainty(filled, exclusive),
        case.taught(decided.astype(case.target.dtype), annotated),
        evidence(filled, truth, classes, cells=chosen.cells, image=image),
    )


def _classes(subject: Subject, chosen: Membership, target: Target) -> list[int]:
    """The classes that the target speaks for and of which every case has a truth."""
    spoken = {
        c
        for member in target.members
        for c in (subject.space.foreground if member.classes is None else member.classes)
    }
    known = (
        torch.stack([case.known for case in (*target.inside, *target.rest)]).all(0) if target.inside else None
    )
    classes = [c for c in subject.space.foreground if c in spoken and known is not None and bool(known[c])]
    if not classes:
        local = target.name.startswith("local/")
        remedies = [
            *(["take --labels reference"] if chosen.labels == "annotated" else []),
            *(["take --pool own"] if local and chosen.pool == "all" else []),
            "give the sites a reference",
            *([] if local else ["attack local models with --model local"]),
        ]
        raise FederationError(
            f"analyse membership: {target.name}: no class that it tells has ground truth in all of "
            f"{len(target.inside)} training cases and {len(target.rest)} others; {', or '.join(remedies)}"
        )
    return classes


def predict(
    subject: Subject, members: Sequence[Member], case: Case, net_of: Callable[[int], nn.Module]
) -> Tensor:
    """What members say of a case together: probabilities [C, *S], or [C] of a whole image; NaN where none speaks.

    net_of: the net of a member, by its place."""
    if subject.space.level == "image":
        prediction = Panel(members, [net_of(place) for place in range(len(members))]).predict(case.image[None])
        return torch.from_numpy(prediction.scores[0]).float()
    federation = subject.federation
    assert federation.preprocessing is not None
    patch, context = federation.preprocessing.patch, federation.preprocessing.context
    return inference.predict_together(
        members,
        net_of,
        case.image,
        patch,
        context,
        inference_of(federation),
        subject.space,
    ).voxels.clone()


def _shadow(
    subject: Subject, chosen: Membership, target: Target, cases: list[Case], parts: tuple[str | int, ...]
) -> Member:
    """A model that was trained on cases whose labels are the target's."""
    federation = replace(subject.federation, seed=seed_of(*parts, "shadow"))
    net = build_net(
        federation, subject.method, "main", channels=subject.info["channels"], space=subject.space
    )
    net = net.to(subject.device)
    classes = None
    if all(member.classes is not None for member in target.members):
        classes = tuple(sorted({c for member in target.members for c in member.classes or ()}))
        annotated = torch.tensor(
            [c in classes or (c == 0 and subject.space.exclusive) for c in range(len(subject.space))]
        )
        cases = [case.taught(case.target, case.known & annotated) for case in cases]
    local = replace(federation.local, steps=chosen.steps, epochs=None, precision="float32", opt_state="reset")

    def make(*, batch: int, steps: int | None) -> CaseBatches:
        return CaseBatches(
            cases,
            (*parts, "shadow"),
            batch,
            steps or chosen.steps,
            subject.device,
            federation,
            subject.space,
            federation.augmentation,
        )

    annotated = frozenset(classes if classes is not None else subject.space.foreground)
    site = ShadowSite(SiteLabels(subject.space, annotated), cases, make, subject.device)
    loss = losses.supervised(subject.loss, cast(Any, site))
    train(cast(Site, site), net, loss, local, round=0, rounds=1)
    return Member(tensors_of(net), classes)


def _agreement(pairs: Iterable[tuple[Case, Case]], classes: Sequence[int]) -> float:
    """Of the labels of the same cases, see `run`; NaN where it is not defined."""
    values = []
    for one, other in pairs:
        for c in classes:
            first, second = one.mask(c), other.mask(c)
            if not first.ndim:
                values.append(float(first == second))
            elif both := int(first.sum()) + int(second.sum()):
                values.append(2 * int((first & second).sum()) / both)
    return sum(values) / len(values) if values else math.nan
