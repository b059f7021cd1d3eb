"""Series in DICOM for tests: made from voxels, as a scanner writes them, with a patient whom nothing may name."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

SAMPLES = Path(__file__).parents[1] / "src" / "fedatlas" / "data" / "samples"
NAME, NUMBER = "Plantedname^Wilhelmina", "PLANTED-4711-MRN"
"""Of the patient in every header."""
CLASSES = {"CT": "1.2.840.10008.5.1.4.1.1.2", "MR": "1.2.840.10008.5.1.4.1.1.4"}
ENHANCED_CT = "1.2.840.10008.5.1.4.1.1.2.1"


def uid(*parts: Any) -> str:
    return pydicom.uid.generate_uid(entropy_srcs=["fedatlas tests", *map(str, parts)])


def item(**values: Any) -> Dataset:
    found = Dataset()
    for name, value in values.items():
        setattr(found, name, value)
    return found


def header(key: str, modality: str, sop_class: str, number: int, patient: str = NUMBER) -> Dataset:
    """What every object of a series has. key: equal for all objects of a series; patient: for those of one person."""
    data = item(
        SpecificCharacterSet="ISO_IR 192",
        SOPClassUID=sop_class,
        SOPInstanceUID=uid(key, number),
        SeriesInstanceUID=uid(key),
        StudyInstanceUID=uid(key.partition("/")[0], "study"),
        FrameOfReferenceUID=uid(key.partition("/")[0], "frame"),
        PositionReferenceIndicator="",
        Modality=modality,
        PatientName=NAME,
        PatientID=patient,
        PatientBirthDate="19470301",
        PatientSex="F",
        StudyDate="20200102",
        StudyTime="101112",
        StudyID="S1",
        AccessionNumber="A-77",
        ReferringPhysicianName="",
        SeriesNumber=3,
        InstanceNumber=number,
        Manufacturer="Tests",
    )
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = sop_class, data.SOPInstanceUID
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.file_meta = meta
    return data


def pixels_of(data: Dataset, values: np.ndarray, intercept: int) -> None:
    """Stored values [rows, columns] or [frames, rows, columns] of HU, in 16 bit."""
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.Rows, data.Columns = values.shape[-2:]
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 1
    data.PixelData = (np.rint(values) - intercept).astype("<i2").tobytes()


def texts(values: Any) -> list[str]:
    """Numbers in the 16 letters that a decimal string may have."""
    return [f"{value:.9f}"[:16] for value in values]


def geometry(
    shape: tuple[int, ...], affine: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions of the slices [Z, 3], directions [2, 3], spacing [3] (columns, rows, slices) in LPS."""
    lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    spacing = np.sqrt((lps[:3, :3] ** 2).sum(0))
    places = lps[:3, 3] + np.arange(shape[2])[:, None] * lps[:3, 2]
    return places, (lps[:3, :2] / spacing[:2]).T, spacing, lps


def write_series(
    folder: Path,
    voxels: np.ndarray,
    affine: np.ndarray,
    key: str = "scan",
    *,
    modality: str = "CT",
    patient: str = NUMBER,
    suffix: str = ".dcm",
    places: np.ndarray | None = None,
) -> list[Path]:
    """An object per slice of voxels [X, Y, Z] in HU; file names hold the patient, as exports do. places: other positions
    of the slices than the affine's. Returns the files in the order of the slices."""
    folder.mkdir(parents=True, exist_ok=True)
    own, along, spacing, _ = geometry(voxels.shape, affine)
    files = []
    for z, place in enumerate(own if places is None else places):
        data = header(key, modality, CLASSES[modality], z + 1, patient)
        data.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
        data.ImagePositionPatient = texts(place)
        data.ImageOrientationPatient = texts(along.ravel())
        data.PixelSpacing = texts(spacing[1::-1])
        data.SliceThickness = f"{spacing[2]:.6f}"
        data.RescaleSlope, data.RescaleIntercept = 1, -1024
        if modality == "CT":
            data.RescaleType, data.KVP, data.AcquisitionNumber = "HU", "120", 1
        data.PatientPosition = "HFS"
        pixels_of(data, voxels[..., z].T, -1024)
        files.append(folder / f"{NAME.partition('^')[0]}_{key.replace('/', '_')}_{z:03d}{suffix}")
        data.save_as(files[-1], enforce_file_format=True)
    return files


def write_enhanced(path: Path, voxels: np.ndarray, affine: np.ndarray, key: str = "enhanced") -> Path:
    """One object with a frame per slice, those in the reverse order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    places, along, spacing, _ = geometry(voxels.shape, affine)
    data = header(key, "CT", ENHANCED_CT, 1)
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
    pixels_of(data, np.stack([voxels[..., z].T for z in order]), -1024)
    data.save_as(path, enforce_file_format=True)
    return path


def sample(
    site: str = "site-a", case: str = "hn_022", split: str = "Ts"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A bundled CT: voxels [X, Y, Z] in HU, its affine, and all that was drawn in it."""
    image: Any = nib.load(SAMPLES / site / f"images{split}" / f"{case}_0000.nii.gz")
    label: Any = nib.load(SAMPLES / site / f"labels{split}_all" / f"{case}.nii.gz")
    return np.rint(np.asarray(image.dataobj)), image.affine, np.asarray(label.dataobj).astype(np.uint8)
