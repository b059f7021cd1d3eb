"""Seconds per scan of `fedatlas predict`, against the bare net on the same windows.

    OMP_NUM_THREADS=1 python -m benchmarks predict [--run runs/<id>] [--filters 16 32 64 128] [--scans 3]

The scan is a bundled CT, and the same at four times its resolution in plane, 256 × 256. Ours is the whole path: reading (NIfTI, or a
series in DICOM), resampling, windows, merging, resampling back, and writing (NIfTI, SEG or RTSTRUCT). The bare net is given arrays
of the shapes that it is given there, and nothing else is done. It is the net of most of our experiments (`--filters` makes another),
after one step: what it draws is noise, of which a SEG has more frames and an RTSTRUCT more contours than of organs, which a
trained model draws (`--run`). Seconds are processor time of one process, what several scans take beyond one: starting Python and
reading the model are told apart, as seconds of a process.
"""

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from scipy import ndimage
from torch import nn

ROOT = Path(__file__).parents[1]


def a_run(folder: Path, filters: list[int]) -> Path:
    """A run of the demo's federation, with a U-Net of so many filters, that trained one step."""
    from fedatlas.federation.file import load_federation
    from fedatlas.federation.session import run_federation

    changes = [
        f"net.filters={filters}",
        "rounds=1",
        "local.steps=1",
        "engine.workers=0",
        "evaluation.models=[best]",
        "evaluation.overlays=false",
    ]
    changes += [f"engine.cache={folder / 'cache'}"]
    federation = load_federation(ROOT / "experiments" / "quickstart.yaml", changes)
    run_federation(federation, folder / "run", tell=lambda text: None)
    return folder / "run"


def write_scans(folder: Path, count: int) -> dict[str, dict[str, list[Path]]]:
    """Size -> form -> as many scans, each in a file or a folder of its own."""
    sys.path.insert(0, str(ROOT / "tests"))
    from dicom_series import sample, write_series

    voxels, affine, _ = sample()
    large = np.rint(ndimage.zoom(voxels, (4, 4, 1), order=1, grid_mode=True, mode="nearest")).astype(np.int16)
    finer = affine @ np.diag([0.25, 0.25, 1, 1])
    found: dict[str, dict[str, list[Path]]] = {}
    for size, image, place in (("64x64", voxels.astype(np.int16), affine), ("256x256", large, finer)):
        forms: dict[str, list[Path]] = {"nifti": [], "dicom": []}
        for number in range(count):
            forms["nifti"].append(folder / size / f"scan{number}.nii.gz")
            forms["nifti"][-1].parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(image, place), forms["nifti"][-1])  # type: ignore[attr-defined]
            forms["dicom"].append(folder / size / f"series{number}")
            write_series(forms["dicom"][-1], image, place, f"{size}/{number}")
        found[size] = forms
    return found


def bare(run: Path, scan: Path, out: Path) -> float:
    """Processor seconds of the net on the windows of a scan, in the precision in which it is run there; median of three."""
    from fedatlas.federation import predict
    from fedatlas.federation.trained import Trained

    shapes: list[tuple[int, ...]] = []
    nets: list[nn.Module] = []
    precise: list[bool] = []

    def noted(net: nn.Module, given: Any) -> None:
        shapes.append(tuple(given[0].shape))
        nets.append(net)
        precise.append(not torch.is_autocast_enabled("cpu"))

    network = Trained.network

    def watched(self: Trained, *given: Any) -> nn.Module:
        net = network(self, *given)
        net.register_forward_pre_hook(noted)
        return net

    Trained.network = watched  # type: ignore[method-assign]
    try:
        predict.predict_scans(run, [[scan]], out)
    finally:
        Trained.network = network  # type: ignore[method-assign]
    made = nets[0].eval()
    made._forward_pre_hooks.clear()
    inputs = [torch.zeros(shape) for shape in shapes]
    seconds: list[float] = []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=not precise[0]):
        made(inputs[0])
        for _ in range(3):
            began = time.process_time()
            for given in inputs:
                made(given)
            seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def ours(run: Path, scans: list[Path], out: Path, form: str) -> float:
    """Processor seconds per scan, of all but the first: what all take beyond what one does."""
    from fedatlas.federation.predict import predict_scans

    def seconds(some: list[Path], name: str) -> float:
        began = time.process_time()
        predict_scans(run, [[scan] for scan in some], out / name, form=form)
        return time.process_time() - began

    seconds(scans[:1], "first")  # imports what this form needs
    one = seconds(scans[:1], "one")
    return (seconds(scans, "all") - one) / (len(scans) - 1)


def process(run: Path, scan: Path, out: Path) -> float:
    """Processor seconds of `fedatlas predict` of one scan, Python's start included."""
    code = (
        "import sys, time\nfrom fedatlas.cli import main\n"
        f"main(['predict', {str(run)!r}, {str(scan)!r}, '-o', {str(out)!r}, '--quiet'])\n"
        "print(time.process_time(), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return float(done.stderr.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, help="a run folder (default: one is made)")
    parser.add_argument(
        "--filters", type=int, nargs="+", default=[16, 32, 64, 128], help="of the net that is made"
    )
    parser.add_argument("--scans", type=int, default=3, help="scans, two or more")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = chosen.run or a_run(folder, chosen.filters)
        print("seconds of processor per scan: the bare net, ours, ours over bare")
        for size, forms in write_scans(folder, chosen.scans).items():
            net = bare(run, forms["nifti"][0], folder / "out" / size / "bare")
            for given, form in (
                ("nifti", "nifti"),
                ("dicom", "nifti"),
                ("dicom", "seg"),
                ("dicom", "rtstruct"),
            ):
                with contextlib.redirect_stderr(io.StringIO()):
                    seconds = ours(run, forms[given], folder / "out" / size / f"{given} {form}", form)
                print(f"{size}, {given} to {form}: {net:.3f}, {seconds:.3f}, {seconds / net:.2f}", flush=True)
            start = process(run, forms["nifti"][0], folder / "out" / size / "process")
            print(f"{size}, the process of one scan in NIfTI: {start:.2f} s")


if __name__ == "__main__":
    main()
