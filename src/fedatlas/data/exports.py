"""CT in DICOM as a scanner writes it; and the bundled CT as two hospitals export theirs, to follow docs/how-to/hospital.md with.

Shapes: X columns, Y rows and Z slices of a scan, as in `data.formats.dicom`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from fedatlas.core.errors import DataError
from fedatlas.core.labels import LabelSpace
from fedatlas.data import samples
from fedatlas.data.datasets.shared.listing import read_json
from fedatlas.data.formats.dicom import LPS, find, load, pydicom
from fedatlas.data.formats.drawings import WRITERS, meanings

CLASSES = {"CT": "1.2.840.10008.5.1.4.1.1.2", "MR": "1.2.840.10008.5.1.4.1.1.4"}
"""Modality -> SOP class of one slice."""
EXPORTS = {
    "north": ("site-a", "seg", {"brainstem": "Brainstem", "spinal_cord": "SpinalCord"}),
    "south": ("site-c", "rtstruct", {"right_parotid": "Parotid_R", "left_parotid": "Parotid_L"}),
}
"""Hospital -> the bundled site whose CT it has, the form of its drawings, and its own names of what the site annotated."""
NEW = ("new-patient", "site-b", "hn_119")
"""A folder with the CT of one patient of neither hospital, on whom nothing is drawn."""


def uid(*parts: Any) -> str:
    """A UID that follows from these parts."""
    return str(pydicom().uid.generate_uid(entropy_srcs=["fedatlas example", *map(str, parts)]))


def header(key: str, modality: str, sop_class: str, number: int, patient: Mapping[str, str]) -> Any:
    """A pydicom Dataset with what every object of a series has. key: equal for all objects of a series, and the same before a "/" for
    all of a study; number: of the object; patient: the attributes that are one person's, PatientID among them."""
    made, meta = pydicom().Dataset(), pydicom().dataset.FileMetaDataset()
    study = key.partition("/")[0]
    attributes = {
        "SpecificCharacterSet": "ISO_IR 192",
        "SOPClassUID": sop_class,
        "SOPInstanceUID": uid(key, number),
        "SeriesInstanceUID": uid(key),
        "StudyInstanceUID": uid(study, "study"),
        "FrameOfReferenceUID": uid(study, "frame"),
        "PositionReferenceIndicator": "",
        "Modality": modality,
        "BodyPartExamined": "HEADNECK",
        "PatientName": "",
        "PatientBirthDate": "",
        "PatientSex": "",
        "StudyDate": "20200102",
        "StudyTime": "101112",
        "StudyID": "S1",
        "AccessionNumber": "",
        "ReferringPhysicianName": "",
        "SeriesNumber": 3,
        "InstanceNumber": number,
        "Manufacturer": "FedAtlas example",
        **patient,
    }
    for name, value in attributes.items():
        setattr(made, name, value)
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = sop_class, made.SOPInstanceUID
    meta.TransferSyntaxUID = pydicom().uid.ExplicitVRLittleEndian
    made.file_meta = meta
    return made


def pixels_of(made: Any, values: np.ndarray) -> None:
    """Gives an object the pixels [rows, columns] or [frames, rows, columns] of HU, as 16-bit numbers from -1024 on."""
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.Rows, made.Columns = values.shape[-2:]
    made.BitsAllocated, made.BitsStored, made.HighBit, made.PixelRepresentation = 16, 16, 15, 1
    made.PixelData = (np.rint(values) + 1024).astype("<i2").tobytes()


def texts(values: Any) -> list[str]:
    """Numbers in the 16 letters that a decimal string may have."""
    return [f"{value:.9f}"[:16] for value in values]


def geometry(slices: int, affine: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of the slices [Z, 3], directions of columns and rows [2, 3], and spacing [3] (columns, rows, slices), in LPS and mm.
    affine: to RAS."""
    lps = LPS @ affine
    spacing = np.sqrt((lps[:3, :3] ** 2).sum(0))
    return lps[:3, 3] + np.arange(slices)[:, None] * lps[:3, 2], (lps[:3, :2] / spacing[:2]).T, spacing


def write_series(
    folder: Path,
    voxels: np.ndarray,
    affine: np.ndarray,
    key: str,
    patient: Mapping[str, str],
    *,
    modality: str = "CT",
    stem: str = "slice",
    suffix: str = ".dcm",
    places: np.ndarray | None = None,
) -> list[Path]:
    """Writes an object per slice of voxels [X, Y, Z] in HU. affine: to RAS; key, patient: as of `header`; stem: how the files' names
    begin; places: positions of the slices [Z, 3] other than those of the affine. Returns the files in the order of the slices."""
    folder.mkdir(parents=True, exist_ok=True)
    own, along, spacing = geometry(voxels.shape[2], affine)
    files = []
    for z, place in enumerate(own if places is None else places):
        made = header(key, modality, CLASSES[modality], z + 1, patient)
        made.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
        made.ImagePositionPatient = texts(place)
        made.ImageOrientationPatient = texts(along.ravel())
        made.PixelSpacing = texts(spacing[1::-1])
        made.SliceThickness = f"{spacing[2]:.6f}"
        made.RescaleSlope, made.RescaleIntercept = 1, -1024
        if modality == "CT":
            made.RescaleType, made.KVP, made.AcquisitionNumber = "HU", "120", 1
        made.PatientPosition = "HFS"
        pixels_of(made, voxels[..., z].T)
        files.append(folder / f"{stem}_{z:03d}{suffix}")
        made.save_as(files[-1], enforce_file_format=True)
    return files


# ------------------------------------------------------------------------------------------------ two hospitals


def write_hospitals(out: Path) -> dict[str, str]:
    """Writes a folder per hospital of `EXPORTS`, with a folder per patient, and that of `NEW`. Returns what each holds, a sentence.

    Raises DataError where `out` holds something already, or a package for DICOM is missing.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: exists already; give another folder with --out")
    told = {}
    for hospital, (site, form, names) in EXPORTS.items():
        scans = sorted((samples.path() / site).glob("imagesT*/*.nii.gz"))
        for number, scan in enumerate(scans, start=1):
            case = scan.name.removesuffix("_0000.nii.gz")
            drawn = scan.parents[1] / scan.parent.name.replace("images", "labels") / f"{case}.nii.gz"
            folder = out / hospital / f"EXAMPLE_{hospital.upper()}_{number}"
            _write_patient(folder, scan, f"{hospital}-{number}")
            _draw(folder, drawn, form, names)
        told[hospital] = f"{len(scans)} patients, CT with {form.upper()}: {', '.join(names.values())}"
    folder, site, case = NEW
    _write_patient(out / folder, samples.path() / site / "imagesTs" / f"{case}_0000.nii.gz", folder)
    told[folder] = f"CT without a drawing, series {uid(f'{folder}/ct')}"
    return told


def _upright(path: Path) -> Any:
    """An image of nibabel as scanners lay CT: columns to the left, rows to the back, slices to the head."""
    image: Any = nib.load(path)  # type: ignore[attr-defined]
    turn = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(image.affine), nib.orientations.axcodes2ornt("LPS")
    )
    return image.as_reoriented(turn)


def _write_patient(folder: Path, scan: Path, number: str) -> None:
    image = _upright(scan)
    patient = {"PatientName": f"Example^{number}", "PatientID": f"EXAMPLE-{number}"}
    write_series(folder / "ct", np.rint(image.dataobj), image.affine, f"{number}/ct", patient)


def _draw(folder: Path, drawn: Path, form: str, names: Mapping[str, str]) -> None:
    """Writes what is drawn on the CT of a folder, in the label map `drawn`, under the hospital's own names."""
    table = read_json(drawn.parents[1] / "dataset.json", drawn.parents[1].name)["labels"]
    labels = np.asarray(_upright(drawn).dataobj).astype(np.uint8)
    space = LabelSpace(("background", *names.values()))
    own = np.zeros_like(labels)
    for number, name in enumerate(names, start=1):
        own[labels == table[name]] = number
    volume = load(find([folder]).series[0])
    made = WRITERS[form](None, own, volume, space, meanings(space, {})[0], "planning system")
    made.SeriesDescription, made.Manufacturer = "Drawn by hand", "FedAtlas example"
    for segment in made.get("SegmentSequence", ()):
        segment.SegmentAlgorithmType = "MANUAL"
        del segment.SegmentAlgorithmName, segment.SegmentationAlgorithmIdentificationSequence
    for roi in made.get("StructureSetROISequence", ()):
        roi.ROIGenerationAlgorithm = "MANUAL"
    made.save_as(folder / f"{form}.dcm", enforce_file_format=True)
