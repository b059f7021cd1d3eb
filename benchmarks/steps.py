"""A ConDistFL step over a FedAvg step, and over the floor: FedAvg's step plus one forward pass of the teacher.

The paper measured 1.10 to 1.14 on a GPU, where the forward pass of the teacher is a smaller share of a step.
"""

from types import SimpleNamespace

import torch

from benchmarks.timing import alternate, show
from fedatlas import losses, methods, nets
from fedatlas.data.batch import Batch
from fedatlas.labels import LabelSpace, SiteLabels
from fedatlas.seeds import generator
from fedatlas.tensors import load, tensors_of
from fedatlas.training import Local, Step, make_optimizer

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
CASES = {
    "2.5D, 16 slices of 64x64, U-Net 16-128": (16, 3, (64, 64), [16, 32, 64, 128]),
    "3D, 2 patches of 48x48x48, U-Net 16-64": (2, 1, (48, 48, 48), [16, 32, 64]),
}


def measure(
    batch: int, channels: int, patch: tuple[int, ...], filters: list[int], repeats: int = 15
) -> dict[str, float]:
    torch.set_num_threads(1)
    rng = generator("benchmark")
    space = LabelSpace(NAMES)
    known = torch.tensor([[c in (0, 1, 2) for c in range(len(space))]]).repeat(batch, 1)
    data = Batch(
        torch.rand(batch, channels, *patch, generator=rng),
        torch.randint(0, 3, (batch, *patch), generator=rng),
        known,
        [""] * batch,
    )

    def net() -> torch.nn.Module:
        return nets.build(
            "unet",
            {"filters": filters},
            in_channels=channels,
            classes=len(space),
            spatial_dims=len(patch),
            seed=0,
        )

    local = Local(optimizer="sgd", lr=1e-4)  # type: ignore[call-arg]
    here = SimpleNamespace(labels=SiteLabels(space, frozenset(space.foreground)))
    supervised = losses.supervised(losses.LossChoice(), here)  # type: ignore[call-arg,arg-type]
    condist = methods.get("condistfl")()
    student, other, teacher = net(), net(), net()
    load(teacher, tensors_of(student))
    objective = condist.L_total(teacher, 1.0, space)
    plain_step = Step(make_optimizer(student, local), local, torch.device("cpu"))
    condist_step = Step(make_optimizer(other, local), local, torch.device("cpu"))
    teacher.eval()

    def forward() -> None:
        with torch.no_grad():
            teacher(data.image)

    found = alternate(
        {
            "fedavg": lambda: plain_step(student, supervised, data),
            "teacher": forward,
            "condistfl": lambda: condist_step(other, objective, data),
        },
        repeats,
    )
    return {
        "fedavg step, seconds": found["fedavg"],
        "condistfl over fedavg": found["condistfl"] / found["fedavg"],
        "floor over fedavg": (found["fedavg"] + found["teacher"]) / found["fedavg"],
        "condistfl over floor": found["condistfl"] / (found["fedavg"] + found["teacher"]),
    }


def main() -> dict[str, float]:
    return {
        f"{case}: {name}": value for case, shape in CASES.items() for name, value in measure(*shape).items()
    }


if __name__ == "__main__":
    show(main())
