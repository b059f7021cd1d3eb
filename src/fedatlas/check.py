"""`fedatlas check`: what a federation is made of, what is wrong with it, and what it will cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedatlas.build import Experiment, cache_folder
from fedatlas.experiment import load_federation
from fedatlas.tensors import n_bytes, tensors_of


def check_federation_file(path: Path, overrides: Sequence[str], runs: Path) -> dict[str, Any]:
    """Reads the file and every voxel behind it. Returns plain values: sites, classes, matrix, problems, cost.

    Raises FederationError if the file itself cannot be understood.
    """
    federation = load_federation(path, overrides)
    experiment = Experiment(federation, cache_folder(federation, runs))
    problems = experiment.check()
    result: dict[str, Any] = {
        "federation": federation.name,
        "classes": list(experiment.space.names),
        "problems": [{"fatal": p.fatal, "text": str(p)} for p in problems],
        "sites": {},
        "cost": None,
    }
    if any(problem.fatal for problem in problems):
        return result
    net = experiment.check_net()
    experiment.prepare()
    result["sites"] = {name: source.summary() for name, source in experiment.sources.items()}
    model = n_bytes(tensors_of(net))
    trainers = len(experiment.training)
    shape = (federation.local.batch, experiment.in_channels, *federation.preprocessing.patch)
    result["cost"] = {
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "model_bytes": model,
        "bytes_per_round": 2 * model * trainers,
        "site_memory_bytes": site_memory(net, shape, federation.local.optimizer),
        "server_memory_bytes": 5 * model,
    }
    return result


def site_memory(net: nn.Module, shape: Sequence[int], optimizer: str) -> int:
    """An estimate, in bytes, of what a training step holds beside the libraries: values, gradients, the
    optimizer's moments, and every module's output for a batch of this shape twice (forward and gradient)."""
    outputs = 0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal outputs
        if isinstance(output, Tensor):
            outputs += output.numel() * output.element_size()

    hooks = [m.register_forward_hook(count) for m in net.modules() if not any(True for _ in m.children())]
    try:
        with torch.no_grad():
            net.train()(torch.zeros(1, *shape[1:]))
    finally:
        for hook in hooks:
            hook.remove()
    moments = 1 if optimizer == "sgd" else 2
    return n_bytes(tensors_of(net)) * (2 + moments) + 2 * outputs * shape[0]


def text_of(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [f"federation {result['federation']}"]
    sites = result["sites"]
    if sites:
        classes = result["classes"]
        width = max(len(name) for name in classes)
        column = max(18, *(len(site) + 2 for site in sites))
        lines += ["", "cases and voxels annotated for training (- not annotated)"]
        lines.append(" " * width + "".join(f"{site:>{column}}" for site in sites))
        for name in classes:
            cells = []
            for info in sites.values():
                voxels = info["voxels"].get(name, 0)
                annotated = name in info["annotated"]
                cells.append(f"{info['labelled'][name]} ({voxels:,})" if annotated else "-")
            if any(cell != "-" for cell in cells):
                lines.append(f"{name:{width}}" + "".join(f"{cell:>{column}}" for cell in cells))
        lines.append("")
        for site, info in sites.items():
            cases = ", ".join(f"{n} {split}" for split, n in info["cases"].items())
            spacings = "; ".join("×".join(f"{mm:g}" for mm in spacing) for spacing in info["spacing"][:3])
            more = f" and {len(info['spacing']) - 3} more" if len(info["spacing"]) > 3 else ""
            lines.append(f"site {site}: {cases} cases; {', '.join(info['orientation'])}; {spacings}{more} mm")
    if result["cost"]:
        cost = result["cost"]
        lines += [
            "",
            f"model: {cost['parameters']:,} parameters, {megabytes(cost['model_bytes'])}",
            f"per round: {megabytes(cost['bytes_per_round'])} between server and sites, both ways",
            f"memory, estimated: {megabytes(cost['site_memory_bytes'])} at a site beside the libraries, "
            f"{megabytes(cost['server_memory_bytes'])} at the server",
        ]
    lines.append("")
    for problem in result["problems"]:
        lines.append(("error: " if problem["fatal"] else "note: ") + problem["text"])
    fatal = sum(problem["fatal"] for problem in result["problems"])
    lines.append(
        "nothing stands in the way of a run" if not fatal else f"{fatal} errors: this federation cannot run"
    )
    return "\n".join(lines)


def megabytes(count: float) -> str:
    """Bytes in units of 2^20."""
    return f"{count / 2**20:,.1f} MiB"
