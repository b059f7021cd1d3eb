"""Draws a DICOM SEG over its CT.

    python tools/make_dicom_picture.py CT SEG OUT.png

CT is the folder of the series. Both are read by readers that are none of ours: the CT by SimpleITK, the SEG by highdicom. Where a
voxel of the SEG lies is asked of its frames, in mm. docs/pictures/hospital-seg.png is the SEG of docs/how-to/hospital.md as the PACS gave
it back; dicom.png that of the bundled scan site-a/hn_022, written by `fedatlas.data.exports.write_series`.
"""

import sys

import highdicom as hd
import matplotlib.pyplot as plt
import numpy as np
import SimpleITK as sitk
from PIL import Image

SHOWN = (0.2, 0.4, 0.6, 0.8)
"""Which slices are shown: so much of what is labelled lies below."""


def draw(folder: str, file: str, out: str) -> None:
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(folder))
    scan = reader.Execute()
    seg = hd.seg.segread(file)
    labels = np.zeros(sitk.GetArrayFromImage(scan).shape, np.uint8)
    for frame, plane in zip(seg.PerFrameFunctionalGroupsSequence, seg.pixel_array, strict=True):
        place = [float(mm) for mm in frame.PlanePositionSequence[0].ImagePositionPatient]
        z = scan.TransformPhysicalPointToIndex(place)[2]
        labels[z][plane > 0] = frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber
    places = np.quantile(np.nonzero(labels)[0], SHOWN).astype(int).tolist()
    figure, axes = plt.subplots(1, len(places), figsize=(11, 3.1), layout="constrained")
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for place, axis in zip(places, axes, strict=True):
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
    figure.savefig(out, dpi=90)
    Image.open(out).convert("RGB").quantize(256).save(out, optimize=True)


if __name__ == "__main__":
    draw(*sys.argv[1:])
