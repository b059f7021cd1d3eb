"""Draws docs/pictures/dicom.png: a SEG that `fedatlas predict` wrote over its CT.

    python tools/make_dicom_picture.py runs/<id>

The bundled CT is written as a series, predicted with `--as seg`, and both are read back by readers that are none of ours: the CT by
SimpleITK, the SEG by highdicom. Where a voxel of the SEG lies is asked of its frames, in mm.
"""

import sys
import tempfile
from pathlib import Path

import highdicom as hd
import matplotlib.pyplot as plt
import numpy as np
import SimpleITK as sitk

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from dicom_series import sample, write_series  # noqa: E402

from fedatlas.cli import main  # noqa: E402

PLACES = (18, 26, 34, 42)


def draw(run: str, folder: Path) -> None:
    voxels, affine, _ = sample()
    write_series(folder / "ct", voxels, affine)
    main(["predict", run, str(folder / "ct"), "-o", str(folder / "out"), "--as", "seg"])
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder / "ct")))
    scan = reader.Execute()
    (file,) = (folder / "out").glob("*_seg.dcm")
    seg = hd.seg.segread(file)
    labels = np.zeros(sitk.GetArrayFromImage(scan).shape, np.uint8)
    for frame, plane in zip(seg.PerFrameFunctionalGroupsSequence, seg.pixel_array, strict=True):
        place = [float(mm) for mm in frame.PlanePositionSequence[0].ImagePositionPatient]
        z = scan.TransformPhysicalPointToIndex(place)[2]
        labels[z][plane > 0] = frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber
    figure, axes = plt.subplots(1, len(PLACES), figsize=(11, 3.1), layout="constrained")
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for place, axis in zip(PLACES, axes, strict=True):
        axis.imshow(
            sitk.GetArrayFromImage(scan)[place], cmap="gray", vmin=-200, vmax=300, interpolation="bilinear"
        )
        for segment in seg.SegmentSequence:
            number = int(segment.SegmentNumber)
            mask = labels[place] == number
            if mask.any():
                axis.contour(mask, [0.5], colors=[colours[number]], linewidths=1.6)
        axis.set_axis_off()
        height = scan.TransformIndexToPhysicalPoint((0, 0, place))[2]
        axis.set_title(f"z = {height:.1f} mm", fontsize=9)
    handles = [
        plt.Line2D(
            [],
            [],
            color=colours[int(s.SegmentNumber)],
            label=f"{s.SegmentLabel}: {s.SegmentedPropertyTypeCodeSequence[0].CodeMeaning}",
        )
        for s in seg.SegmentSequence
        if (labels == int(s.SegmentNumber)).any()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(ROOT / "docs" / "pictures" / "dicom.png", dpi=110)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        draw(sys.argv[1], Path(name))
