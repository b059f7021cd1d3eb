"""A ConDistFL step over a FedAvg step, over the floor (FedAvg's step plus one forward pass of the teacher), and over the
paper's loss written with MONAI's `DiceCELoss` and `MaskedDiceLoss` in float32.

The paper measured 1.10 to 1.14 over FedAvg on a GPU. On a processor the teacher's forward pass is a third of a step in any
arithmetic, so a teacher that is shown every patch costs a third more; one that is shown every case once (`cached`) costs its
loss in a step, and its predictions before the first one (`benchmarks.condist`).

A step of `fedatlas`, which asks its teacher in every second one, over its step without teaching and over FedAvg's.

Seconds are processor time of this process, in turn, so that other work on the machine changes little.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from monai.losses.dice import DiceCELoss, MaskedDiceLoss
from torch import Tensor, nn

from benchmarks.timing import alternate, show
from fedatlas import losses, methods, nets
from fedatlas.core.batch import Batch
from fedatlas.core.labels import LabelSpace, SiteLabels
from fedatlas.core.outputs import voxel_logits
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import load, tensors_of
from fedatlas.learning.loop import Local, Stepper, autocast
from fedatlas.methods.fedatlas import L_taught
from fedatlas.transport.allocator import keeping_freed_blocks

NAMES = (
    "background",
    "brainstem",
    "cord",
    "right parotid",
    "left parotid",
    "oesophagus",
    "larynx",
    "mandible",
)
ANNOTATED = (1, 2)
CASES = {
    "2.5D, 16 slices of 64x64, U-Net 16-128": (16, 3, (64, 64), [16, 32, 64, 128]),
    "3D, 2 patches of 48x48x48, U-Net 16-64": (2, 1, (48, 48, 48), [16, 32, 64]),
}


def literal(teacher: nn.Module, classes: int, tau: float = 0.5) -> Callable[[nn.Module, Batch], Tensor]:
    """The local objective of the paper for classes that stand alone, equation by equation, with MONAI's losses."""
    rest = [c for c in range(classes) if c not in ANNOTATED]
    supervised = DiceCELoss(include_background=True, to_onehot_y=True, softmax=False)
    distilled = MaskedDiceLoss(include_background=True)

    def conditional(logits: Tensor) -> Tensor:
        y = torch.softmax(logits / tau, 1)
        y_F = y[:, list(ANNOTATED)].sum(1, keepdim=True)  # Eq. (2)
        return y[:, rest] / (1 - y_F + 1e-5)  # Eq. (4), (5)

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            z_g = voxel_logits(teacher(batch.image))
        z_k = voxel_logits(net(batch.image))
        q = torch.softmax(z_k, 1)
        merged = torch.cat([q[:, rest].sum(1, keepdim=True), q[:, list(ANNOTATED)]], 1)
        target = batch.target.unsqueeze(1)
        own = torch.tensor(ANNOTATED)
        mask = ~(torch.isin(z_g.argmax(1, keepdim=True), own) | torch.isin(target, own))  # Eq. (6)
        return supervised(merged, target) + distilled(conditional(z_k), conditional(z_g), mask.float())

    return loss


def measure(
    batch: int, channels: int, patch: tuple[int, ...], filters: list[int], precision: str, repeats: int = 9
) -> dict[str, float]:
    torch.set_num_threads(1)
    rng = generator("benchmark")
    space = LabelSpace(NAMES)
    known = torch.tensor([[c in (0, *ANNOTATED) for c in range(len(space))]]).repeat(batch, 1)
    target = torch.randint(0, 1 + len(ANNOTATED), (batch, *patch), generator=rng)
    data = Batch(torch.rand(batch, channels, *patch, generator=rng), target, known, [""] * batch)
    said = torch.rand(batch, len(space), *patch, generator=rng).softmax(1)

    def net() -> nn.Module:
        return nets.build(
            "unet",
            {"filters": filters},
            in_channels=channels,
            classes=len(space),
            spatial_dims=len(patch),
            seed=0,
        )

    cpu = torch.device("cpu")
    local = Local(optimizer="sgd", lr=1e-4, precision=precision)  # type: ignore[call-arg,arg-type]
    plain = Local(optimizer="sgd", lr=1e-4)  # type: ignore[call-arg]
    here = SimpleNamespace(labels=SiteLabels(space, frozenset(ANNOTATED)))
    supervised = losses.supervised(losses.LossChoice(), here)  # type: ignore[call-arg,arg-type]
    condist = methods.get("condistfl")()
    teacher = net().eval().requires_grad_(False)
    online, cached = condist.L_total(teacher, 1.0, space), condist.L_total(None, 1.0, space)
    written = literal(teacher, len(space))
    choice = methods.get("fedatlas")().supervised(space)
    exclusion = losses.for_site(choice, here)  # type: ignore[arg-type]

    def asked(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
        with torch.inference_mode():
            z_t = voxel_logits(teacher(batch.image))
        outputs = net(batch.image)
        supervised = losses.on_batch(exclusion, outputs, batch, choice.findings)
        return {
            "supervised": supervised,
            "taught": L_taught(voxel_logits(outputs), z_t, batch.target, batch.known, space),
        }

    beside = Batch(data.image, data.target, data.known, data.case, along=said)

    def step(how: Local, objective, given: Batch = data) -> Callable[[], object]:  # type: ignore[no-untyped-def]
        student = net()
        load(student, tensors_of(teacher))
        by = Stepper(student, how, cpu)

        def one() -> None:
            with by.autocast():
                value = objective(student, given)
            by.step(value)

        return one

    def forward() -> None:
        with torch.inference_mode(), autocast(local, cpu):
            teacher(data.image)

    with keeping_freed_blocks():
        found = alternate(
            {
                "fedavg": step(local, supervised),
                "teacher": forward,
                "online": step(local, online),
                "cached": step(local, cached, beside),
                "literal": step(plain, written),
                "untaught": step(local, losses.supervised(choice, here)),  # type: ignore[arg-type]
                "taught": step(local, asked),
            },
            repeats,
        )
    floor = found["fedavg"] + found["teacher"]
    ours = (found["untaught"] + found["taught"]) / 2
    return {
        "fedavg step, seconds": found["fedavg"],
        "condistfl over fedavg": found["online"] / found["fedavg"],
        "floor over fedavg": floor / found["fedavg"],
        "condistfl over floor": found["online"] / floor,
        "condistfl, teacher cached, over fedavg": found["cached"] / found["fedavg"],
        "condistfl over MONAI's losses in float32": found["online"] / found["literal"],
        "fedatlas over itself without teaching": ours / found["untaught"],
        "fedatlas over fedavg": ours / found["fedavg"],
    }


def main() -> dict[str, float]:
    return {
        f"{case}, {precision}: {name}": value
        for case, shape in CASES.items()
        for precision in ("float32", "bf16")
        for name, value in measure(*shape, precision).items()
    }


if __name__ == "__main__":
    show(main())
