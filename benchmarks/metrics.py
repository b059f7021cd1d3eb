"""Our surface metrics against MONAI's, on 128³ with several classes: seconds, ratio, largest difference."""

import time

import numpy as np
import torch
from monai.metrics.hausdorff_distance import compute_hausdorff_distance
from monai.metrics.meandice import compute_dice
from monai.metrics.surface_dice import compute_surface_dice
from monai.metrics.surface_distance import compute_average_surface_distance
from scipy.ndimage import gaussian_filter

from fedatlas.core.labels import LabelSpace
from fedatlas.evaluation.metrics import score

SPACING = (1.5, 1.0, 2.0)
METRICS = ("dice", "hd95", "asd", "nsd")


def blobs(size: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two label maps [size³] of smooth blobs, the second a disturbed copy of the first."""
    rng = np.random.default_rng(seed)
    fields = np.stack([gaussian_filter(rng.standard_normal((size,) * 3), size / 16) for _ in range(classes)])
    noise = np.stack([gaussian_filter(rng.standard_normal((size,) * 3), size / 32) for _ in range(classes)])
    fields, noise = fields / fields.std(), noise / noise.std()

    def labels(values: np.ndarray) -> np.ndarray:
        return np.where(values.max(0) > 1.5, values.argmax(0) + 1, 0)

    return labels(fields), labels(fields + 0.15 * noise)


def main(size: int = 128, classes: int = 4) -> dict[str, float]:
    truth, prediction = blobs(size, classes, seed=0)
    space = LabelSpace(("background", *(f"organ {i}" for i in range(classes))))
    began = time.perf_counter()
    ours = score(prediction, truth, space, [True] * (classes + 1), SPACING, METRICS, tolerance=2.0)
    our_seconds = time.perf_counter() - began
    began = time.perf_counter()
    hot = [
        torch.from_numpy(np.stack([m == c for c in range(classes + 1)]))[None] for m in (prediction, truth)
    ]
    theirs = {
        "dice": compute_dice(*hot, include_background=False),
        "hd95": compute_hausdorff_distance(*hot, percentile=95, spacing=SPACING),
        "asd": compute_average_surface_distance(*hot, symmetric=True, spacing=SPACING),
        "nsd": compute_surface_dice(*hot, [2.0] * classes, spacing=SPACING),
    }
    monai_seconds = time.perf_counter() - began
    differences = [
        abs(s.value - float(theirs[s.metric][0, s.class_index - 1])) for s in ours if s.value is not None
    ]
    return {
        "monai_seconds": monai_seconds,
        "our_seconds": our_seconds,
        "times_faster": monai_seconds / our_seconds,
        "largest_difference": max(differences),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value:.4g}")
