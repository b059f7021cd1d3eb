"""From a net and a volume to class probabilities: windows in 3D, slices with their neighbours in 2.5D.

Shapes: C classes, F findings, I input channels, *S spatial, K models to choose among.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import option, options
from fedatlas.core.outputs import Mixed, Others, evaluating, voxel_logits
from fedatlas.core.tensors import Tensors, load


@options
class Inference:
    """How a volume is predicted."""

    windows: Literal["patch", "whole"] = option(
        "patch",
        "What the net is given of a slice. patch: windows of the size of a training patch, whose probabilities are blended; "
        "whole: the slice at once, padded with 0 to a size that the net can take, and to a patch at least; for patches of "
        "two numbers.",
    )
    overlap: float = option(0.5, "Share of a window that the next one covers again.", ge=0, lt=1)
    blend: Literal["gaussian", "constant"] = option(
        "gaussian", "Weight of a window's voxels where windows overlap."
    )
    batch: int = option(8, "Windows, or slices, at a time.", gt=0)
    precision: Literal["float32", "bf16"] | None = option(
        None,
        "Segmentation: arithmetic of the nets; probabilities are float32 in any case. null: bf16 where `local.precision` is, "
        "else float32.",
    )
    background: Literal["channel", "zero"] = option(
        "channel",
        "Logit of the background of exclusive classes: the net's, or zero, for nets whose loss trains foreground "
        "channels alone: a voxel is foreground where the sigmoid of a class exceeds 1/2.",
    )
    others: Others | None = option(
        None,
        "What a net says, of exclusive classes, in the channels of those that it may not speak for, as of classes that its site does "
        "not annotate. background: that they are background, as a marginal loss trains it; ignored: nothing, and the softmax "
        "leaves them out, as where nothing trained them. null: as the loss of the method trains them.",
    )
    merge: Literal["surest", "mean"] = option(
        "surest",
        "What several models say that may speak for one class, as where two sites of `standalone` annotate it. surest: the most "
        "certain of those that see foreground decides, of overlapping classes the largest probability; mean: the mean of their "
        "probabilities, the better one of overlapping classes where it was tried. For classes with one such model each both give the "
        "same labels.",
    )
    gate: float | None = option(
        0.5,
        "A class of voxels that a finding is about is emptied where the finding is less probable than this; null: never.",
        ge=0,
        le=1,
    )


@dataclass(frozen=True)
class Prediction:
    """Probabilities of a case, float32 on the CPU: voxels [C, *S]; findings [F], None where the net tells none.
    chosen: the output of a selector, from 0, whose model said it; None where none was chosen."""

    voxels: Tensor
    findings: Tensor | None = None
    chosen: int | None = None


class Speaker(Protocol):
    """What is asked of a `core.contract.Member` here."""

    @property
    def classes(self) -> Sequence[int] | None: ...
    @property
    def taught(self) -> Sequence[int] | None: ...
    @property
    def findings(self) -> Sequence[int] | None: ...
    @property
    def chooses(self) -> float | None: ...


def neighbours(image: Tensor, index: Tensor, context: int) -> Tensor:
    """Slices [N, I * (2 * context + 1), X, Y] of a volume [I, X, Y, Z], each with its neighbours along the last
    axis, as training sees them: channel by channel from the lowest neighbour to the highest; at the ends the
    last slice is repeated."""
    offsets = torch.arange(-context, context + 1)
    near = (index[:, None] + offsets[None, :]).clamp(0, image.shape[-1] - 1)
    stack = image[..., near]  # [I, X, Y, N, 2 * context + 1]
    return stack.permute(3, 0, 4, 1, 2).flatten(1, 2)


def probabilities(
    net: nn.Module, image: Tensor, patch: Sequence[int], context: int, options: Inference, *, exclusive: bool
) -> Tensor:
    """[C, *S] the voxels of `predict`."""
    return predict(net, image, patch, context, options, exclusive=exclusive).voxels


@torch.inference_mode()
def predict(
    net: nn.Module,
    image: Tensor,
    patch: Sequence[int],
    context: int,
    options: Inference,
    *,
    exclusive: bool,
    classes: Sequence[int] | None = None,
) -> Prediction:
    """What a net says of an image [I, *S].

    patch: three numbers for windows in 3D, two for slices along the last axis with `context` neighbours on
    either side. Softmax if exclusive, else sigmoid, in float32; probabilities are blended, not logits. A finding of a
    volume is as probable as in the window, or slice, that says most. classes: the foreground classes that the net was
    trained for, None for all; of exclusive ones it says no other (`Inference.others`). A volume smaller than a patch is padded with 0 on
    both sides. The mode of the net and of each of its modules is put back.

    Raises FederationError for `windows: whole` where patches are not slices, or the net does not say by what its inputs
    divide.
    """
    told: list[Tensor] = []
    device = _device(net, image)
    sizes = window_size(net, image.shape[1:], patch, options)
    taken = heard(classes, options, exclusive)

    def of_windows(windows: Tensor) -> Tensor:
        with _arithmetic(options, device):
            outputs = net(windows)
        if isinstance(outputs, Mixed):
            told.append(outputs.findings.float().sigmoid().amax(0).cpu())
        logits = voxel_logits(outputs).float()
        if exclusive and options.background == "zero":
            logits = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, 1:]], 1)
        if taken is not None:
            others = [c for c in range(1, logits.shape[1]) if c not in taken]
            logits = logits.index_fill(
                1, torch.tensor(others, dtype=torch.int64, device=logits.device), -torch.inf
            )
        return logits.softmax(1) if exclusive else logits.sigmoid()

    with evaluating(net):
        voxels = over_windows(of_windows, image, sizes, context, options, device=device)
    return Prediction(voxels, torch.stack(told).amax(0) if told else None)


def heard(classes: Sequence[int] | None, options: Inference, exclusive: bool) -> tuple[int, ...] | None:
    """The foreground classes that the softmax of a net takes that was trained for `classes`; None: all that it has."""
    ignored = exclusive and classes is not None and options.others == "ignored"
    return tuple(sorted(classes)) if classes is not None and ignored else None


def window_size(
    net: nn.Module, shape: Sequence[int], patch: Sequence[int], options: Inference
) -> tuple[int, ...]:
    """The size of what a net is given of an image [I, *shape] at a time: a patch; or with `windows: whole` the smallest
    size that holds a slice and a patch and that the net can take. Raises FederationError as `predict`."""
    if options.windows == "patch":
        return tuple(patch)
    check_windows(patch, options)
    divisor = getattr(net, "divisor", None)
    if divisor is None:
        raise FederationError(
            f"inference.windows: whole needs a net that says by what its inputs divide, which {type(net).__name__} does not; "
            "use patch"
        )
    least = [max(pair) for pair in zip(shape[: len(patch)], patch, strict=True)]
    return tuple(-(-size // by) * by for size, by in zip(least, divisor, strict=True))


def check_windows(patch: Sequence[int], options: Inference) -> None:
    """Raises FederationError for `windows: whole` where patches are not slices."""
    if options.windows == "whole" and len(patch) != 2:
        raise FederationError(
            f"inference.windows: whole is for slices, and preprocessing.patch is {list(patch)}; give a patch of two "
            "numbers, or use windows: patch"
        )


def _arithmetic(options: Inference, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if options.precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def over_windows(
    of_windows: Callable[[Tensor], Tensor],
    image: Tensor,
    size: Sequence[int],
    context: int,
    options: Inference,
    *,
    device: torch.device,
) -> Tensor:
    """What a function gives for the windows of an image [I, *S], blended: [C, *S], on the CPU. It is given windows
    [N, I, *size], or slices with their neighbours, on the device, and gives [N, C, *size], memory of its own: MONAI
    blends in place, and windows may be views of the image."""

    def slide(inputs: Tensor) -> Tensor:
        missing = [of - there for of, there in zip(size, inputs.shape[2:], strict=True)]
        if min(missing) < 0:
            from monai.inferers.utils import sliding_window_inference  # MONAI takes seconds to import

            found = sliding_window_inference(
                inputs, tuple(size), options.batch, of_windows, overlap=options.overlap, mode=options.blend
            )
            assert isinstance(found, Tensor)
            return found
        if not any(missing):
            return of_windows(inputs)
        # one window holds all: padded on both sides, as MONAI pads, and nothing to blend
        sides = [(lack // 2, lack - lack // 2) for lack in missing]
        found = of_windows(F.pad(inputs, [n for side in reversed(sides) for n in side]))
        inner = [slice(low, low + n) for (low, _), n in zip(sides, inputs.shape[2:], strict=True)]
        return found[(slice(None), slice(None), *inner)]

    image = image.float()
    if len(size) == 3:
        return slide(image[None].to(device))[0].cpu()
    voxels = torch.empty(0)
    for index in torch.arange(image.shape[-1]).split(options.batch):
        found = slide(neighbours(image, index, context).to(device))
        if not len(voxels):
            voxels = torch.empty(found.shape[1], *image.shape[1:])
        voxels[..., index[0] : index[-1] + 1] = found.permute(1, 2, 3, 0)
    return voxels


def _device(net: nn.Module, image: Tensor) -> torch.device:
    return next((tensor.device for tensor in net.parameters()), image.device)


@torch.inference_mode()
def selected(
    selector: nn.Module, image: Tensor, patch: Sequence[int], context: int, options: Inference
) -> Tensor:
    """[K] float64 on the CPU: the softmax of a selector in float32, the mean over the windows of an image of the size of
    a patch, on which it was trained: a case is of one site."""
    told: list[Tensor] = []

    def of_windows(windows: Tensor) -> Tensor:
        told.append(selector(windows).double().softmax(1).cpu())
        return windows.new_zeros(len(windows), 1, *windows.shape[2:])  # blended, and not used

    with evaluating(selector):
        over_windows(of_windows, image, patch, context, options, device=_device(selector, image))
    return torch.cat(told).mean(0)


def chooser(members: Sequence[Speaker]) -> int | None:
    """The place of the selector among the members of an evaluation; None without one.

    Raises FederationError where there are two, where it has no member before it to fall back on, and where it or one
    of those that it chooses among names classes."""
    places = [place for place, member in enumerate(members) if member.chooses is not None]
    if not places:
        return None
    if len(places) > 1 or places[0] == 0:
        raise FederationError(
            f"members: the selectors are at the places {places} of {len(members)}; allowed is one, after the models that "
            "speak where it is not certain and before those that it chooses among"
        )
    if any(member.classes is not None for member in members[places[0] :]):
        raise FederationError(
            "members: a selector, or a model that it chooses among, may speak for some classes only; allowed is None"
        )
    return places[0]


def chosen_by(told: Tensor, members: Sequence[Speaker]) -> int | None:
    """Which of its K models a selector chooses, from 0, by its softmax [K]: the most probable one, if that is more
    probable than `chooses`; else None. Raises FederationError where it does not have one output for each."""
    at = chooser(members)
    assert at is not None
    limit = members[at].chooses
    assert limit is not None
    if len(told) != len(members) - at - 1:
        raise FederationError(
            f"members: a selector with {len(told)} outputs chooses among {len(members) - at - 1} models; give it one "
            "output for each"
        )
    best = int(told.argmax())
    return best if float(told[best]) > limit else None


def speakers(members: Sequence[Speaker], chosen: int | None) -> range:
    """The places of the members that speak: the chosen one alone; without a choice those before the selector, or all
    where there is none."""
    at = chooser(members)
    if at is None:
        return range(len(members))
    return range(at) if chosen is None else range(at + 1 + chosen, at + 2 + chosen)


class Nets:
    """Nets for models, one for each name of a net, which holds the values of the model that was asked for last.

    make: gives a net with the values of a model, by its name, as `core.contract.Site.network`."""

    def __init__(self, make: Callable[[Tensors, str], nn.Module]) -> None:
        self.make = make
        self.held: dict[str, tuple[Tensors, nn.Module]] = {}

    def __call__(self, model: Tensors, name: str) -> nn.Module:
        if name not in self.held:
            self.held[name] = model, self.make(model, name)
        last, net = self.held[name]
        if last is not model:
            load(net, model)
            self.held[name] = model, net
        return net


class Model(Speaker, Protocol):
    """A `core.contract.Member`, with its values."""

    @property
    def model(self) -> Tensors: ...
    @property
    def net(self) -> str: ...


def predict_each(
    groups: Sequence[Sequence[Model]],
    nets: Nets,
    image: Tensor,
    patch: Sequence[int],
    context: int,
    options: Inference,
    space: LabelSpace,
) -> Iterator[Prediction]:
    """What each group of members says of an image together (`predict_together`), group by group.

    A net is asked once for a model that several members hold, which is the very same dict of tensors, as long as its softmax
    takes the same classes. What it said is kept until the last group that needs it: of the maps, at most those that later
    groups need are held."""

    def key(member: Model) -> Any:
        return id(member.model), member.net, heard(member.taught, options, space.exclusive)

    told: dict[Any, Tensor] = {}
    chosen: list[int | None] = []
    for members in groups:
        at = chooser(members)
        if at is None:
            chosen.append(None)
            continue
        one = members[at]
        if key(one) not in told:
            told[key(one)] = selected(nets(one.model, one.net), image, patch, context, options)
        chosen.append(chosen_by(told[key(one)], members))
    speaking = [[members[i] for i in speakers(members, c)] for members, c in zip(groups, chosen, strict=True)]
    needed = Counter(key(member) for members in speaking for member in members)
    kept: dict[Any, Prediction] = {}

    def say(member: Model) -> Prediction:
        found = kept.pop(key(member), None)
        if found is None:
            net = nets(member.model, member.net)
            how: dict[str, Any] = {"exclusive": space.exclusive, "classes": member.taught}
            found = predict(net, image, patch, context, options, **how)
        needed[key(member)] -= 1
        if needed[key(member)]:
            kept[key(member)] = found
        return found

    for members, choice in zip(speaking, chosen, strict=True):
        found = together(((say(member), member) for member in members), space, options)
        yield replace(found, chosen=choice)


def predict_together(
    members: Sequence[Speaker],
    net_of: Callable[[int], nn.Module],
    image: Tensor,
    patch: Sequence[int],
    context: int,
    options: Inference,
    space: LabelSpace,
) -> Prediction:
    """What the members of an evaluation say of an image together: of those that speak (`speakers`), what `together`
    makes of their predictions. net_of: the net of a member, by its place; asked for those alone that are needed."""
    at, chosen = chooser(members), None
    if at is not None:
        chosen = chosen_by(selected(net_of(at), image, patch, context, options), members)
    how: dict[str, Any] = {"exclusive": space.exclusive}
    found = (
        (predict(net_of(i), image, patch, context, options, classes=members[i].taught, **how), members[i])
        for i in speakers(members, chosen)
    )
    return replace(together(found, space, options), chosen=chosen)


def together(
    members: Iterable[tuple[Prediction, Speaker]], space: LabelSpace, options: Inference
) -> Prediction:
    """The predictions of several members as one, each with the member that made it. They are taken one at a time.

    Voxels: `restrict`, then `surest` or `mean_of_owners`, as `options.merge` says. A finding is the mean over the members that may
    speak for it (`speaks_for`), NaN where none may. Then the classes whose finding is below `options.gate` are emptied.
    """
    told: list[tuple[Tensor, Speaker]] = []

    def voxels() -> Iterator[tuple[Tensor, Sequence[int]]]:
        for found, member in members:
            if found.findings is not None:
                told.append((found.findings, member))
            if member.classes is None:
                yield found.voxels, space.foreground
            else:
                yield restrict(found.voxels, member.classes, space.exclusive), member.classes

    merge = mean_of_owners if options.merge == "mean" else surest
    merged = Prediction(merge(voxels(), space.exclusive))
    if not told:
        return merged
    findings = []
    for f, about in enumerate(space.finding_of):
        speak = [p[f] for p, member in told if speaks_for(member, f, about)]
        findings.append(torch.stack(speak).mean() if speak else torch.tensor(float("nan")))
    merged = replace(merged, findings=torch.stack(findings))
    return merged if options.gate is None else gated(merged, space, options.gate)


def speaks_for(member: Speaker, finding: int, about: int | None) -> bool:
    """Whether a member may speak for a finding, which is about a class of voxels or about none."""
    if member.findings is not None:
        return finding in member.findings
    return member.classes is None or about is None or about in member.classes


def gated(found: Prediction, space: LabelSpace, gate: float) -> Prediction:
    """A prediction in which every class that a finding is about is empty where that finding is below `gate`. What it
    had goes to the background if classes are exclusive. A finding that is NaN (nobody speaks for it) empties nothing."""
    assert found.findings is not None
    about = zip(space.finding_of, found.findings.tolist(), strict=True)
    empty = {c for c, p in about if c is not None and p < gate}
    if not empty:
        return found
    kept = [c for c in space.foreground if c not in empty]
    return replace(found, voxels=restrict(found.voxels, kept, space.exclusive))


def restrict(probabilities: Tensor, classes: Sequence[int], exclusive: bool) -> Tensor:
    """Probabilities [C, *S] of a model that may speak for `classes` alone: what it gives to other foreground
    classes goes to the background if exclusive, and becomes 0 otherwise."""
    kept = torch.zeros_like(probabilities)
    for c in sorted(classes):
        kept[c] = probabilities[c]
    if exclusive:
        others = [c for c in range(1, len(probabilities)) if c not in classes]
        kept[0] = probabilities[[0, *others]].sum(0)
    return kept


def surest(members: Iterable[tuple[Tensor, Sequence[int]]], exclusive: bool) -> Tensor:
    """Probabilities [C, *S] of several models as one; they are taken one at a time, each with the classes that it speaks for,
    beside which it says nothing (`restrict`).

    Exclusive: at a voxel where a member's largest probability is of the foreground, the member with the
    largest such probability decides; where there is none, the mean of all. Otherwise the largest per class.
    """
    each = (voxels for voxels, _ in members)
    first = next(each)
    second = next(each, None)
    if second is None:
        return first
    if not exclusive:
        merged = torch.maximum(first, second)
        for member in each:
            torch.maximum(merged, member, out=merged)
        return merged
    total, n = torch.zeros_like(first), 0
    most, highest = torch.zeros_like(first), torch.zeros_like(first[0])
    for member in chain((first, second), each):
        total += member
        n += 1
        value, best = member.max(0)
        wins = (best > 0) & (value > highest)
        torch.where(wins, member, most, out=most)
        torch.where(wins, value, highest, out=highest)
    return torch.where(highest > 0, most, total.div_(n))


def mean_of_owners(members: Iterable[tuple[Tensor, Sequence[int]]], exclusive: bool) -> Tensor:
    """As `surest`, but of every class the mean over the members that speak for it, its owners; 0 for a class without one.

    Exclusive: a class stands at a voxel where its mean is above that of its owners' background, and the largest such mean
    decides; where no class stands, the mean of all members, which is background. The result is divided by its sum.
    With one owner for every class the labels are those of `surest`.
    """
    members = iter(members)
    first = next(members)
    second = next(members, None)
    if second is None:
        return first[0]
    said, against, total = (torch.zeros_like(first[0]) for _ in range(3))
    owners, n = [0] * len(said), 0
    for member, classes in chain((first, second), members):
        for c in classes:
            said[c] += member[c]
            against[c] += member[0]
            owners[c] += 1
        total += member
        n += 1
    for c, count in enumerate(owners):
        said[c] /= max(count, 1)
        against[c] /= max(count, 1)
    if not exclusive:
        return said
    said[said <= against] = 0
    said[0] = 0
    highest, best = said.max(0)
    said[0] = against.gather(0, best[None])[0]
    return torch.where(highest > 0, said / said.sum(0), total.div_(n))
