"""Headers of NIfTI files as tests need them."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np


def without_orientation(source: Path, path: Path) -> Path:
    """A copy of a file whose header does not say where its axes point."""
    image: Any = nib.load(source)  # type: ignore[attr-defined]
    plain = nib.Nifti1Image(np.asanyarray(image.dataobj), None)  # type: ignore[attr-defined]
    plain.header.set_zooms(image.header.get_zooms())
    plain.set_sform(None, 0)
    plain.set_qform(None, 0)
    nib.save(plain, path)  # type: ignore[attr-defined]
    return path
