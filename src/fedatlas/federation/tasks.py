"""What differs between segmentation and classification around the same round loop: how a site's folder is read and
checked, what a net is given, what is measured. Everything else, methods included, knows only `LabelSpace.level`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from fedatlas.core.labels import LabelSpace
from fedatlas.data.checks import Scan, check_federation, check_site, shared_scans
from fedatlas.data.datasets.shared.listing import Problem, Splitting
from fedatlas.data.images import ImageData, check_images
from fedatlas.data.index import SiteConfig, SiteIndex, read_image_site, read_site
from fedatlas.data.site_data import SiteData
from fedatlas.data.voxels import VoxelData
from fedatlas.evaluation.classification import Histogram, Threshold, fit_thresholds
from fedatlas.evaluation.evaluate import Evaluator
from fedatlas.evaluation.images import SILENT, ImageEvaluator
from fedatlas.evaluation.voxels import VoxelEvaluator
from fedatlas.federation.file import Federation, inference_of

Rows = Sequence[Mapping[str, Any]]


class Task(Protocol):
    """One task. level: as in `LabelSpace`; sends: what its evaluation answers, see `transport.egress.check`."""

    level: Literal["voxel", "image"]
    sends: Mapping[str, Mapping[str, str]]

    def read(self, federation: Federation, site: SiteConfig, path: Path) -> SiteIndex:
        """The layout of a site."""
        ...

    def source(self, federation: Federation, index: SiteIndex, space: LabelSpace, cache: Path) -> SiteData:
        """The data of a site. Raises FederationError if its names do not fit the space."""
        ...

    def check(self, federation: Federation, indexes: Sequence[SiteIndex], space: LabelSpace) -> list[Problem]:
        """All problems of all sites; reads everything."""
        ...

    def evaluator(self, federation: Federation, space: LabelSpace) -> Evaluator:
        """What scores a model at a site."""
        ...

    def fit(self, histograms: Rows, rows: Rows, federation: Federation, space: LabelSpace) -> Any:
        """What is decided for a model on the validation cases of all sites, as plain values; None: nothing. histograms, rows: what
        the sites answered about it."""
        ...

    def extra(self, fitted: Any) -> dict[str, Any]:
        """Further arguments of the evaluator, from what `fit` decided."""
        ...

    def size(self, federation: Federation) -> tuple[int, ...]:
        """*S of what the net is given."""
        ...

    def net_channels(self, federation: Federation, channels: int) -> int:
        """Input channels of the net, for images of so many."""
        ...


class Segmentation:
    """Labels of voxels."""

    level: Literal["voxel", "image"] = "voxel"
    sends: Mapping[str, Mapping[str, str]] = {
        "evaluate": {"rows": "rows"},
        "evaluate_several": {"rows": "rows"},
    }

    def read(self, federation: Federation, site: SiteConfig, path: Path) -> SiteIndex:
        return read_site(site, path, seed=federation.evaluation.split_seed)

    def source(self, federation: Federation, index: SiteIndex, space: LabelSpace, cache: Path) -> VoxelData:
        assert federation.preprocessing is not None
        return VoxelData(
            index,
            space,
            federation.preprocessing,
            federation.sampling,
            federation.augmentation,
            seed=federation.seed,
            validation=federation.evaluation.validation,
            cache=cache,
        )

    def check(self, federation: Federation, indexes: Sequence[SiteIndex], space: LabelSpace) -> list[Problem]:
        problems, scans = check_federation(indexes, space), list[Scan]()
        for index in indexes:
            problems += check_site(index, space, scans=scans)
        return problems + shared_scans(scans)

    def evaluator(self, federation: Federation, space: LabelSpace) -> VoxelEvaluator:
        assert federation.preprocessing is not None
        preprocessing = federation.preprocessing
        evaluation = replace(federation.evaluation, inference=inference_of(federation))
        patch, context = tuple(preprocessing.patch), preprocessing.context
        return VoxelEvaluator(evaluation, space, patch, context, preprocessing.orientation)

    def fit(self, histograms: Rows, rows: Rows, federation: Federation, space: LabelSpace) -> None:
        return None

    def extra(self, fitted: None) -> dict[str, Any]:
        return {}

    def size(self, federation: Federation) -> tuple[int, ...]:
        assert federation.preprocessing is not None
        return tuple(federation.preprocessing.patch)

    def net_channels(self, federation: Federation, channels: int) -> int:
        """Those of the images, times the neighbouring slices where patches are slices."""
        assert federation.preprocessing is not None
        patch, context = federation.preprocessing.patch, federation.preprocessing.context
        return channels * (2 * context + 1) if len(patch) == 2 else channels


class Classification:
    """Labels of whole images, each class a yes or no of its own."""

    level: Literal["voxel", "image"] = "image"
    sends: Mapping[str, Mapping[str, str]] = {"evaluate": {"rows": "rows", "histograms": "histograms"}}

    def read(self, federation: Federation, site: SiteConfig, path: Path) -> SiteIndex:
        evaluation = federation.evaluation
        splitting = Splitting(
            seed=evaluation.split_seed, test=evaluation.test, validation=evaluation.validation
        )
        return read_image_site(site, path, channels=federation.images.channels, splitting=splitting)

    def source(self, federation: Federation, index: SiteIndex, space: LabelSpace, cache: Path) -> ImageData:
        return ImageData(index, space, federation.images, federation.augmentation, cache=cache)

    def check(self, federation: Federation, indexes: Sequence[SiteIndex], space: LabelSpace) -> list[Problem]:
        problems, decoded, scans = check_federation(indexes, space), list[Problem](), list[Scan]()
        for index in indexes:
            decoded += check_images(index, federation.images, scans)
        decoded += shared_scans(scans)
        # files that are equal byte by byte are known already
        known = {(problem.site, problem.file) for problem in problems if "byte by byte" in problem.what}
        roots = {index.name: index.root for index in indexes}
        return problems + [p for p in decoded if (p.site, str(roots[p.site] / p.file)) not in known]

    def evaluator(self, federation: Federation, space: LabelSpace) -> ImageEvaluator:
        return ImageEvaluator(federation.evaluation, space)

    def fit(self, histograms: Rows, rows: Rows, federation: Federation, space: LabelSpace) -> dict[str, Any]:
        """class -> its threshold, fitted on the sum of the sites' histograms: no site needs all labels for it."""
        sums: dict[str, Histogram] = {}
        for entry in histograms:
            one = Histogram.from_dict(entry["histogram"])
            sums[entry["class"]] = sums[entry["class"]] + one if entry["class"] in sums else one
        names = [name for name in space.names if name in sums]
        fitted = fit_thresholds([sums[name] for name in names], federation.evaluation.threshold)
        thresholds = {name: asdict(threshold) for name, threshold in zip(names, fitted, strict=True)}
        silent = {row["class"] for row in rows if row["reason"] == SILENT}
        for name in space.names:
            why = SILENT if name in silent else "no validation image of any site is annotated for it"
            thresholds.setdefault(name, asdict(Threshold(None, None, why)))
        return {name: thresholds[name] for name in space.names}

    def extra(self, fitted: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"thresholds": [entry["value"] for entry in fitted.values()]} if fitted else {}

    def size(self, federation: Federation) -> tuple[int, ...]:
        return federation.images.size

    def net_channels(self, federation: Federation, channels: int) -> int:
        return channels


TASKS: Mapping[str, Task] = {"segmentation": Segmentation(), "classification": Classification()}


def task_of(federation: Federation) -> Task:
    """The task of a federation."""
    return TASKS[federation.task]
