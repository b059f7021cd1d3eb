"""Whose model says a class, where sites keep models or parts of one for themselves and annotate different classes.

A model that was trained on the kidney alone says nothing of the liver. So a class is asked of its owners, the sites that
annotate it: Jiang, Ma, Zeng, Ying. UFPS, Patterns 2024, Figure 2 and Table 2, where every class has one owner (its
supplement, S6.4 to S6.6). It is the rule for FedBN, DOD* and FedCRLD, and for `standalone` and `local_parts`, of which every site asks all owners alike.

Reconstruction: the paper takes the foreground logit of a class from the model of its owner, and the mean of the models'
background logits. The rule here (`core.contract.Member`) is of probabilities, and any number of sites may own a class. What a
model gives to a class that it may not speak for is background, or, where its loss left those channels alone, left out
(`Inference.others`). Then, at a voxel where some model says a class, the most certain of these models decides; at any other
the mean of all does, so that it is background. They differ where a model is for a class of its own and others are surer of
the background. Of a class with several owners the mean can decide in place of the most certain (`Inference.merge`).

A finding of the whole image, beside segmentation, has owners as a class has: the sites that annotate it in a training case. No
other site's head was ever moved for it. One without an owner among the members is not told.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from fedatlas.core.contract import Member, Site
from fedatlas.core.tensors import Tensors
from fedatlas.methods.shared import averaging

Speaks = Literal["owners", "site"]

WHO_SPEAKS = (
    "Whose model says a class when a site is evaluated. owners: of a class that the site annotates its own model, of any "
    "other the models of the sites that annotate it (UFPS); site: the site's own model says every class, as where all "
    "sites annotate all."
)
"""What the option `speaks` means."""

SENDS = averaging.SENDS | {"classes": "classes"}
"""What a site answers that owns classes: its model, its number of training cases, and the classes that it annotates."""

SENDS_FINDINGS = SENDS | {"findings": "findings"}
"""And where nets may have a head for findings of the whole image: those that it annotates."""


def owned(site: Site) -> dict[str, list[int]]:
    """What a site answers of what it owns, as `SENDS_FINDINGS` declares it."""
    return {"classes": sorted(site.labels.annotated), "findings": sorted(site.labels.findings)}


def by_owner(
    mean: Tensors,
    models: Mapping[str, Tensors],
    classes: Mapping[str, Sequence[int]],
    site: str | None = None,
    findings: Mapping[str, Sequence[int]] | None = None,
) -> list[Member]:
    """Every site's model for the classes that it annotates. mean: of all sites; models: site -> the tensors that take the
    place of the mean's; classes: site -> what it annotates. site: the one that is evaluated, whose own model is the only
    one that may speak for the classes that it annotates; None: all are alike. findings: site -> those that it owns, of which the same
    holds; where no site owns any, or nothing is known of a site: as `Member` has it. The mean alone where there is no model."""
    met = findings if findings and any(findings.values()) else {}
    own, own_findings = (
        set(of.get(site, ())) if site is not None and site in models else set() for of in (classes, met)
    )
    members = []
    for name in sorted(models):
        told = [c for c in classes[name] if name == site or c not in own]
        says = [f for f in met.get(name, ()) if name == site or f not in own_findings]
        if told or says or site is None:
            of = tuple(says) if name in met else None
            members.append(
                Member(mean | models[name], tuple(told), trained=tuple(classes[name]), findings=of)
            )
    return members or [Member(mean)]


def speakers(
    mean: Tensors,
    models: Mapping[str, Tensors],
    classes: Mapping[str, Sequence[int]],
    site: str,
    speaks: Speaks,
    findings: Mapping[str, Sequence[int]] | None = None,
) -> list[Member]:
    """The models that are evaluated at a site, which may be one that trains nothing. The arguments are those of
    `by_owner`. With `speaks: site`, and where a state of an earlier version tells no classes, it is the site's own model,
    and the mean where it has none."""
    if speaks == "site" or not classes:
        return [Member(mean | models.get(site, {}))]
    return by_owner(mean, models, classes, site, findings)
