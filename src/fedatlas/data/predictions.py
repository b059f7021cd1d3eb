"""What models say of training cases, kept in files of a site and cut with its patches.

Shapes: B batch, C classes, I input channels, *S the federation's grid, *P the patch.
"""

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedatlas.core.errors import DiskFull, FederationError, unwritable
from fedatlas.core.labels import LabelSpace
from fedatlas.data.cache import Stored
from fedatlas.data.sampling import cut_case
from fedatlas.data.transforms import Preprocessing
from fedatlas.learning.inference import Inference, probabilities


class CaseMaps:
    """Probabilities of training cases, each by its number, in files that are read a patch at a time.

    A probability p is kept in bfloat16 as p or, above 1/2, as -(1 - p): so the 8 bits count from the nearer end.
    keep: the largest probabilities of a voxel that are kept; of an exclusive space, what they leave is shared evenly by
    the other classes. windows: how many the net was given.
    """

    def __init__(self, folder: Path, space: LabelSpace, keep: int | None) -> None:
        self.folder, self.space, self.windows = folder, space, 0
        self.keep = keep if keep is not None and keep < len(space) else None
        self.number = np.dtype(np.uint8 if len(space) <= 256 else np.int16)
        self.bytes_per_voxel = 2 * len(space) if self.keep is None else (2 + self.number.itemsize) * self.keep
        self._files: dict[int, list[Stored]] = {}

    def put(self, number: int, p: Tensor) -> None:
        """Keeps p [C, *S] float32. Raises OSError where it cannot be written."""
        arrays = {}
        if self.keep is not None:
            p, which = p.topk(self.keep, 0)
            arrays["classes"] = which.numpy().astype(self.number)
        folded = torch.where(p > 0.5, -(1 - p), p).to(torch.bfloat16)
        arrays["values"] = folded.view(torch.int16).numpy()
        self._files[number] = []
        for name in sorted(arrays, reverse=True):
            path, array = self.folder / f"{number}-{name}", np.asfortranarray(arrays[name])
            array.T.tofile(path)
            form = str(path), array.dtype.str, array.shape, "F", 0
            self._files[number].append(Stored(*form))

    def empty(self, patch: Sequence[int]) -> list[np.ndarray]:
        """What `cut` fills: values, and with `keep` their classes, each [C or keep, *P]."""
        if self.keep is None:
            return [np.zeros((len(self.space), *patch), np.int16)]
        return [np.zeros((self.keep, *patch), dtype) for dtype in (np.int16, self.number)]

    def cut(
        self,
        number: int,
        target: np.ndarray,
        patch: Sequence[int],
        centre: np.ndarray | None,
        rng: np.random.Generator,
        out: list[np.ndarray],
    ) -> None:
        """The patch that `cut_case` cuts from the case with an equal `rng`, which is not moved. Nothing for a case
        that was not predicted."""
        stored_of_case = self._files.get(number)
        for stored, place in zip(stored_of_case, out, strict=True) if stored_of_case else ():
            nowhere = np.empty((*target.shape[: target.ndim - len(stored.shape) + 1], *patch), target.dtype)
            cut_case(stored.open(), target, patch, 0, centre, copy.deepcopy(rng), place, nowhere)

    def open(self, cut: Sequence[Sequence[np.ndarray]], device: torch.device) -> Tensor:
        """Probabilities [B, C, *P] float32 of B patches as they were cut; beyond a case's end they are 0."""
        parts = [torch.from_numpy(np.stack(part)).to(device) for part in zip(*cut, strict=True)]
        folded = parts[0].view(torch.bfloat16).float()
        p = folded + folded.signbit()
        if self.keep is None:
            return p
        rest = torch.zeros_like(p[:, :1])
        if self.space.exclusive:
            kept = p.sum(1, keepdim=True)
            rest = torch.where(kept > 0, 1 - kept, 0).clamp(min=0) / (len(self.space) - self.keep)
        return rest.expand(-1, len(self.space), *p.shape[2:]).scatter(1, parts[1].long(), p)

    def settled(self, p: Tensor) -> Tensor:
        """Probabilities [B, C, *P] after they were moved: of an exclusive space their sum is 1 again, and where there
        is nothing, beyond a case's end, they are those of background."""
        if not self.space.exclusive:
            return p
        total = p.sum(1, keepdim=True)
        p = p / total.clamp(min=1e-30)
        p[:, :1] += total == 0
        return p


def predict_cases(
    net: nn.Module,
    images: Mapping[int, Stored],
    space: LabelSpace,
    preprocessing: Preprocessing,
    folder: Path,
    *,
    site: str,
    overlap: float,
    windows: int,
    keep: int | None,
    gigabytes: float,
) -> CaseMaps:
    """What a net says of training cases, unvaried, in files in `folder`.

    images: number of a case -> its image as it is kept on disk. site: for messages; the others as of
    `core.contract.Site.with_predictions`.
    """
    maps = CaseMaps(folder, space, keep)
    size = sum(int(np.prod(image.shape[1:])) for image in images.values()) * maps.bytes_per_voxel
    what = f"site {site}: predictions of {len(images)} training cases take {size / 1e9:.1f} GB"
    if size > gigabytes * 1e9:
        raise FederationError(
            f"{what}, {gigabytes:g} are allowed; allow more, keep fewer classes per voxel, or predict each patch"
        )
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DiskFull(
            f"{what}, {folder.parent} has {free / 1e9:.1f} left; free space, keep fewer classes per voxel, or predict "
            "each patch"
        )
    how = Inference(overlap=overlap, batch=windows)  # type: ignore[call-arg]
    patch, context = preprocessing.patch, preprocessing.context

    def count(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        maps.windows += len(given[0])

    counting = net.register_forward_pre_hook(count)
    try:
        for n, image in images.items():
            voxels = torch.from_numpy(np.ascontiguousarray(image.open(), dtype=np.float32))
            maps.put(n, probabilities(net, voxels, patch, context, how, exclusive=space.exclusive))
    except OSError as error:
        raise unwritable(error)(
            f"site {site}: predictions cannot be written to {folder.parent} ({error.strerror or error})"
        ) from None
    finally:
        counting.remove()
    return maps
