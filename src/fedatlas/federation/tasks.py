"""What differs between segmentation and classification around the same round loop: how a site's folder is read and
checked, what a net is given, what is measured. Everything else, methods included, knows only `LabelSpace.level`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from fedatlas.core.labels import LabelSpace
from fedatlas.data import image_data, image_index, site_data
from fedatlas.data.checks import Scan, shared_scans
from fedatlas.data.datasets.shared.listing import Problem, Splitting
from fedatlas.data.index import SiteConfig
from fedatlas.evaluation.classification import Histogram, Threshold, fit_thresholds
from fedatlas.evaluation.evaluate import Evaluator
from fedatlas.evaluation.image_evaluation import ImageEvaluator
from fedatlas.federation.file import Federation, inference_of
from fedatlas.transport.host import SiteSource


class Index(Protocol):
    """The layout of a site. brings: what it annotates for training, by the names of the label space."""

    @property
    def name(self) -> str: ...
    @property
    def channels(self) -> int: ...
    @property
    def brings(self) -> tuple[str, ...]: ...


class Source(SiteSource, Protocol):
    """The data of a site, as a run needs them beyond what its host does."""

    name: str

    @property
    def channels(self) -> int: ...
    def prepare(self, progress: Callable[[str], None] | None = None) -> None: ...
    def scans(self) -> list[Scan]: ...
    def summary(self) -> dict[str, Any]: ...
    def keep_leaks(self, folder: Path) -> None: ...
    def fingerprint(self) -> dict[str, str]: ...
    def looks(self) -> dict[str, dict[str, Any]]: ...


class Task(Protocol):
    """One task. level: as in `LabelSpace`; sends: what its evaluation answers, see `transport.egress.check`."""

    level: Literal["voxel", "image"]
    sends: Mapping[str, Mapping[str, str]]

    def read(self, federation: Federation, site: SiteConfig, path: Path) -> Any:
        """The layout of a site."""
        ...

    def source(self, federation: Federation, index: Any, space: LabelSpace, cache: Path) -> Any:
        """The data of a site. Raises FederationError if its names do not fit the space."""
        ...

    def pool(self, sources: Sequence[Any], name: str) -> Any:
        """The union of the sites that train."""
        ...

    def trains(self, index: Any) -> bool:
        """Does the site take part in training?"""
        ...

    def names(self, index: Any, space: LabelSpace) -> dict[str, str]:
        """A site's own names -> the classes that they mean."""
        ...

    def quick(self, indexes: Sequence[Any], space: LabelSpace) -> list[Problem]:
        """The problems that show without decoding an image."""
        ...

    def thorough(self, federation: Federation, indexes: Sequence[Any], space: LabelSpace) -> list[Problem]:
        """All problems of all sites; reads everything."""
        ...

    def evaluator(self, federation: Federation, space: LabelSpace) -> Any:
        """What scores a model at a site."""
        ...

    def fit(self, histograms: Sequence[Mapping[str, Any]], federation: Federation, space: LabelSpace) -> Any:
        """What is decided for a model on the validation cases of all sites, as plain values; None: nothing."""
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

    def read(self, federation: Federation, site: SiteConfig, path: Path) -> site_data.SiteIndex:
        return site_data.read_site(site, path, seed=federation.evaluation.split_seed)

    def source(
        self, federation: Federation, index: site_data.SiteIndex, space: LabelSpace, cache: Path
    ) -> site_data.SiteData:
        assert federation.preprocessing is not None
        return site_data.SiteData(
            index,
            space,
            federation.preprocessing,
            federation.sampling,
            federation.augmentation,
            seed=federation.seed,
            validation=federation.evaluation.validation,
            cache=cache,
        )

    def pool(self, sources: Sequence[site_data.SiteData], name: str) -> site_data.SiteData:
        return site_data.pool(sources, name)

    def trains(self, index: site_data.SiteIndex) -> bool:
        return index.trains

    def names(self, index: site_data.SiteIndex, space: LabelSpace) -> dict[str, str]:
        strict, _ = site_data.naming_of(index, space)
        return {own: space.names[c] for own, c in strict.classes.items()}

    def quick(self, indexes: Sequence[site_data.SiteIndex], space: LabelSpace) -> list[Problem]:
        return site_data.check_federation(indexes, space)

    def thorough(
        self, federation: Federation, indexes: Sequence[site_data.SiteIndex], space: LabelSpace
    ) -> list[Problem]:
        problems, scans = list(self.quick(indexes, space)), []
        for index in indexes:
            problems += site_data.check_site(index, space, scans=scans)
        return problems + shared_scans(scans)

    def evaluator(self, federation: Federation, space: LabelSpace) -> Evaluator:
        assert federation.preprocessing is not None
        preprocessing = federation.preprocessing
        evaluation = replace(federation.evaluation, inference=inference_of(federation))
        patch, context = tuple(preprocessing.patch), preprocessing.context
        return Evaluator(evaluation, patch, context, space, preprocessing.orientation)

    def fit(self, histograms: Sequence[Mapping[str, Any]], federation: Federation, space: LabelSpace) -> None:
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

    def read(self, federation: Federation, site: SiteConfig, path: Path) -> image_index.ImageIndex:
        evaluation = federation.evaluation
        splitting = Splitting(
            seed=evaluation.split_seed, test=evaluation.test, validation=evaluation.validation
        )
        return image_index.read_image_site(
            site, path, channels=federation.images.channels, splitting=splitting
        )

    def source(
        self, federation: Federation, index: image_index.ImageIndex, space: LabelSpace, cache: Path
    ) -> image_data.ImageData:
        return image_data.ImageData(index, space, federation.images, federation.augmentation, cache=cache)

    def pool(self, sources: Sequence[image_data.ImageData], name: str) -> image_data.ImageData:
        return image_data.pool_images(sources, name)

    def trains(self, index: image_index.ImageIndex) -> bool:
        return index.trains

    def names(self, index: image_index.ImageIndex, space: LabelSpace) -> dict[str, str]:
        known, _ = index.classes(space)
        return {own: space.names[c] for own, c in known.items()}

    def quick(self, indexes: Sequence[image_index.ImageIndex], space: LabelSpace) -> list[Problem]:
        return image_index.image_problems(indexes, space)

    def thorough(
        self, federation: Federation, indexes: Sequence[image_index.ImageIndex], space: LabelSpace
    ) -> list[Problem]:
        problems, decoded, scans = list(self.quick(indexes, space)), [], []
        for index in indexes:
            decoded += image_data.check_images(index, federation.images, scans)
        decoded += shared_scans(scans)
        # files that are equal byte by byte are known already
        known = {(problem.site, problem.file) for problem in problems if "byte by byte" in problem.what}
        roots = {index.name: index.root for index in indexes}
        return problems + [p for p in decoded if (p.site, str(roots[p.site] / p.file)) not in known]

    def evaluator(self, federation: Federation, space: LabelSpace) -> ImageEvaluator:
        return ImageEvaluator(federation.evaluation, space)

    def fit(
        self, histograms: Sequence[Mapping[str, Any]], federation: Federation, space: LabelSpace
    ) -> dict[str, Any]:
        """class -> its threshold, fitted on the sum of the sites' histograms: no site needs all labels for it."""
        sums: dict[str, Histogram] = {}
        for entry in histograms:
            one = Histogram.from_dict(entry["histogram"])
            sums[entry["class"]] = sums[entry["class"]] + one if entry["class"] in sums else one
        names = [name for name in space.names if name in sums]
        fitted = fit_thresholds([sums[name] for name in names], federation.evaluation.threshold)
        thresholds = {name: asdict(threshold) for name, threshold in zip(names, fitted, strict=True)}
        none = asdict(Threshold(None, None, "no validation image of any site is annotated for it"))
        return {name: thresholds.get(name, none) for name in space.names}

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
