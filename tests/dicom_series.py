"""Series in DICOM for tests: as a scanner writes them, with a patient whom nothing may name."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from pydicom.dataset import Dataset

from fedatlas.data import exports, samples
from fedatlas.data.exports import texts

NAME, NUMBER = "Plantedname^Wilhelmina", "PLANTED-4711-MRN"
"""Of the patient in every header."""
ENHANCED_CT = "1.2.840.10008.5.1.4.1.1.2.1"


uid = exports.uid


def person(number: str = NUMBER) -> dict[str, str]:
    return {
        "PatientName": NAME,
        "PatientID": number,
        "PatientBirthDate": "19470301",
        "PatientSex": "F",
        "AccessionNumber": "A-77",
    }


def item(**values: Any) -> Dataset:
    found = Dataset()
    for name, value in values.items():
        setattr(found, name, value)
    return found


def write_series(
    folder: Path,
    voxels: np.ndarray,
    affine: np.ndarray,
    key: str = "scan",
    *,
    patient: str = NUMBER,
    **how: Any,
) -> list[Path]:
    """As `exports.write_series`, of the planted patient; file names hold her name, as exports do."""
    stem = f"{NAME.partition('^')[0]}_{key.replace('/', '_')}"
    return exports.write_series(folder, voxels, affine, key, person(patient), stem=stem, **how)


def write_enhanced(path: Path, voxels: np.ndarray, affine: np.ndarray, key: str = "enhanced") -> Path:
    """One object with a frame per slice, those in the reverse order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    places, along, spacing = exports.geometry(voxels.shape[2], affine)
    data = exports.header(key, "CT", ENHANCED_CT, 1, person())
    data.ImageType = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    data.NumberOfFrames = voxels.shape[2]
    shared = item(
        PixelMeasuresSequence=[item(PixelSpacing=texts(spacing[1::-1]), SliceThickness=f"{spacing[2]:.6f}")],
        PlaneOrientationSequence=[item(ImageOrientationPatient=texts(along.ravel()))],
        PixelValueTransformationSequence=[item(RescaleSlope=1, RescaleIntercept=-1024, RescaleType="HU")],
    )
    data.SharedFunctionalGroupsSequence = [shared]
    order = list(range(voxels.shape[2]))[::-1]
    data.PerFrameFunctionalGroupsSequence = [
        item(
            PlanePositionSequence=[item(ImagePositionPatient=texts(places[z]))],
            FrameContentSequence=[item(StackID="1", InStackPositionNumber=z + 1)],
        )
        for z in order
    ]
    exports.pixels_of(data, np.stack([voxels[..., z].T for z in order]))
    data.save_as(path, enforce_file_format=True)
    return path


def sample(
    site: str = "site-a", case: str = "hn_022", split: str = "Ts"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A bundled CT: voxels [X, Y, Z] in HU, its affine, and all that was drawn in it."""
    image: Any = nib.load(samples.path() / site / f"images{split}" / f"{case}_0000.nii.gz")
    label: Any = nib.load(samples.path() / site / f"labels{split}_all" / f"{case}.nii.gz")
    return np.rint(np.asarray(image.dataobj)), image.affine, np.asarray(label.dataobj).astype(np.uint8)
