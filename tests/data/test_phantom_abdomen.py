"""The phantom abdomen: its seeds, its anatomy, its folders, and that intensities alone do not tell a class."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from scipy import ndimage

from fedatlas.compare import load_comparison
from fedatlas.core.errors import DataError, FederationError
from fedatlas.core.options import from_dict
from fedatlas.data.index import SiteConfig, read_site
from fedatlas.phantoms.abdomen import (
    CLASSES,
    GROUPS,
    SITES,
    TUMOUR_OF,
    AbdomenCase,
    abdomen_sites,
    draw_case,
    write_abdomen,
)

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "phantom-abdomen"
TINY: dict[str, Any] = {"cases": 3, "test_cases": 2, "size": "tiny"}
ORGANS = ("liver", "kidneys", "pancreas", "spleen", "gallbladder")
TRAINED = [site for site in SITES if not site.test_only]
UNSEEN = next(site for site in SITES if site.test_only)


def number(name: str) -> int:
    return CLASSES.index(name) + 1


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def millilitres(case: AbdomenCase, *names: str) -> float:
    voxel = float(np.prod(np.diag(case.affine)[:3])) / 1000
    return float(np.isin(case.truth, [number(name) for name in names]).sum()) * voxel


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_abdomen(tmp_path_factory.mktemp("abdomen"), **TINY)


@pytest.fixture(scope="module")
def patients() -> dict[str, list[AbdomenCase]]:
    """Site -> eight patients; forty in all."""
    return {site.name: [draw_case(site, n) for n in range(8)] for site in SITES}


# --------------------------------------------------------------------------------------------------- seeds


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(tmp_path: Path, written: Path) -> None:
    one = digests(written)
    assert one == digests(write_abdomen(tmp_path / "again", **TINY))
    other = digests(write_abdomen(tmp_path / "other", **TINY, seed=1))
    images = [name for name in one if "/images" in name]
    assert len(images) == len({one[name] for name in images}) == 4 * 5 + 2
    assert all(one[name] != other[name] for name in images)


def test_a_case_does_not_depend_on_how_many_there_are_or_on_other_sites(
    tmp_path: Path, written: Path
) -> None:
    fewer = write_abdomen(
        tmp_path, cases={"spleen": 1, "liver": 2}, test_cases=1, size="tiny", sites=[SITES[3], SITES[0]]
    )
    volumes = {name: digest for name, digest in digests(fewer).items() if name.endswith(".nii.gz")}
    assert len(volumes) == 3 * (2 + 3)
    assert volumes.items() <= digests(written).items()


# ------------------------------------------------------------------------------------------------- folders


def test_the_folders_are_read_without_a_problem(written: Path) -> None:
    entries = abdomen_sites(written)
    assert [entry["name"] for entry in entries] == [site.name for site in SITES]
    assert [entry.get("role") for entry in entries] == [None] * 4 + ["test"]
    for entry, site in zip(entries, SITES, strict=True):
        plain = {key: value for key, value in entry.items() if key != "role"}
        index = read_site(from_dict(SiteConfig, plain, what="test"), written)
        assert index.problems == () and set(index.used) == set(site.labels)
        splits = [case.split for case in index.cases]
        assert (splits.count("train"), splits.count("test")) == ((0, 2) if site.test_only else (3, 2))
        if not site.test_only:
            assert all(
                case.reference and set(case.reference_annotated) == set(CLASSES) for case in index.cases
            )


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_files_hold_the_patient_in_the_sites_axes_and_integers(written: Path, site: Any) -> None:
    end = "Ts" if site.test_only else "Tr"
    case = draw_case(site, 1, split="test" if site.test_only else "train", size="tiny")
    root = written / f"site-{site.name}"
    image: Any = nib.load(root / f"images{end}" / f"{case.name}_0000.nii.gz")  # type: ignore[attr-defined]
    label: Any = nib.load(root / f"labels{end}" / f"{case.name}.nii.gz")  # type: ignore[attr-defined]
    assert "".join(nib.aff2axcodes(image.affine)) == site.axes  # type: ignore[attr-defined]
    upright = nib.as_closest_canonical(image)  # type: ignore[attr-defined]
    assert np.array_equal(np.asarray(upright.dataobj), case.image)
    assert np.allclose(upright.affine, case.affine, atol=1e-4)
    strict = np.asarray(nib.as_closest_canonical(label).dataobj)  # type: ignore[attr-defined]
    table = json.loads((root / "dataset.json").read_text())["labels"]
    assert {name: n for name, n in table.items() if name != "background"} == dict(site.labels)
    for name, own in site.labels.items():
        assert np.array_equal(strict == own, case.truth == number(name))
    others = [number(name) for name in CLASSES if name not in site.labels]
    assert not strict[np.isin(case.truth, [0, *others])].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "tinny"}, "did you mean 'tiny'"),
        ({"cases": -1}, "cases is -1.*0 or more"),
        ({"test_cases": {"lever": 2}}, "test_cases: the site 'lever'.*did you mean 'liver'"),
        ({"cases": {"liver": 2}}, "cases gives no number for the site kidney"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        write_abdomen(tmp_path, **(TINY | changes))
    assert list(tmp_path.iterdir()) == []


def test_folders_that_do_not_fit_are_named(tmp_path: Path, written: Path) -> None:
    with pytest.raises(DataError, match="site-liver is there already"):
        write_abdomen(written, **TINY)
    with pytest.raises(DataError, match="no site-liver"):
        abdomen_sites(tmp_path)


@pytest.mark.parametrize("profile", ["smoke", "full"])
@pytest.mark.parametrize("name", ["main", "ablation", "rounds"])
def test_the_comparisons_name_the_sites_and_classes_of_the_phantom(
    written: Path, name: str, profile: str
) -> None:
    comparison = load_comparison([EXPERIMENTS / f"{name}.yaml"], profile=profile, data=written)
    sites = {entry["name"]: entry for entry in abdomen_sites(written)}
    for of_arm in comparison.federations.values():
        for federation in of_arm.values():
            assert {site.name: site.path for site in federation.sites} == {
                name: str(entry["path"]) for name, entry in sites.items()
            }
            assert [site.role for site in federation.sites] == ["train"] * 4 + ["test"]
            assert federation.labels.names == ("background", *CLASSES)
            assert [list(group) for group in federation.labels.groups] == [list(group) for group in GROUPS]


def test_every_arm_takes_equally_many_steps() -> None:
    """In all: rounds times steps, at four sites or at the pooled one."""
    for name in ("main", "ablation", "rounds"):
        comparison = load_comparison([EXPERIMENTS / f"{name}.yaml"], profile="full")
        totals = set()
        for arm, of_arm in comparison.federations.items():
            federation = next(iter(of_arm.values()))
            assert federation.local.steps is not None
            totals.add(federation.rounds * federation.local.steps * (1 if arm == "centralized" else 4))
        assert len(totals) == 1, name


# ------------------------------------------------------------------------------------------------- anatomy


def test_every_organ_is_whole(patients: dict[str, list[AbdomenCase]]) -> None:
    for cases in patients.values():
        for case in cases:
            for organ in ORGANS:
                names = [organ] + ([TUMOUR_OF[organ]] if organ in TUMOUR_OF else [])
                mask = np.isin(case.truth, [number(name) for name in names])
                assert ndimage.label(mask)[1] == (2 if organ == "kidneys" else 1), (case.name, organ)  # type: ignore[index]


def test_tumours_lie_in_their_organ(patients: dict[str, list[AbdomenCase]]) -> None:
    """A tumour borders on its organ more than on anything else, and its middle is not outside the organ."""
    enclosed: list[float] = []
    for cases in patients.values():
        for case in cases:
            for organ, tumour in TUMOUR_OF.items():
                parts: Any = ndimage.label(case.truth == number(tumour))
                hull = ndimage.binary_closing(
                    np.pad(np.isin(case.truth, [number(organ), number(tumour)]), 2), iterations=2
                )[2:-2, 2:-2, 2:-2]
                for part in range(1, parts[1] + 1):
                    mask = parts[0] == part
                    shell = ndimage.binary_dilation(mask) & ~mask
                    around = np.bincount(case.truth[shell], minlength=len(CLASSES) + 1)
                    if mask.sum() > 3:
                        enclosed.append(around[number(organ)] / around.sum())
                    assert around[number(organ)] > 0, (case.name, tumour)
                    assert hull[mask].all()
    assert len(enclosed) > 40
    assert np.median(enclosed) > 0.6
    assert np.mean(np.array(enclosed) > 0.25) > 0.95
    # some lie deep, some reach the surface
    assert max(enclosed) == 1 and min(enclosed) < 0.7


def test_volumes_are_plausible_and_vary() -> None:
    cases = [draw_case(TRAINED[n % 4], 100 + n) for n in range(30)]
    limits = {
        "liver": (400, 2800), "kidneys": (80, 600), "pancreas": (15, 180), "spleen": (40, 600), "gallbladder": (2, 80),
    }  # fmt: skip
    for organ, (least, most) in limits.items():
        names = [organ] + ([TUMOUR_OF[organ]] if organ in TUMOUR_OF else [])
        found = np.array([millilitres(case, *names) for case in cases])
        assert least < found.min() and found.max() < most, (organ, found)
        assert found.std() / found.mean() > 0.15, organ
    for tumour in TUMOUR_OF.values():
        found = np.array([millilitres(case, tumour) for case in cases])
        assert 0 < np.sum(found == 0) < 30
        assert found.max() < 300 and found[found > 0].min() > 0.5


def test_every_site_has_every_class_and_not_every_patient_a_tumour() -> None:
    for site in SITES:
        there = np.array(
            [
                np.bincount(draw_case(site, n, size="tiny").truth.ravel(), minlength=9)[1:] > 0
                for n in range(20)
            ]
        )
        for column, name in enumerate(CLASSES):
            share = there[:, column].mean()
            if name in TUMOUR_OF.values():
                assert abs(share - site.tumours.get(name, 0.4)) <= 0.1, (site.name, name)
            else:
                assert share == 1, (site.name, name)
        # a few patients are enough for the classes that a site annotates
        own = [CLASSES.index(name) for name in site.labels]
        assert site.test_only or there[:3, own].any(0).all()


def test_organs_touch_other_organs_in_some_patients_only(patients: dict[str, list[AbdomenCase]]) -> None:
    """Half of the pairs of organs touch at all, and at least three of these not in every patient."""

    def touching(case: AbdomenCase) -> set[tuple[str, str]]:
        whole = {
            organ: np.isin(case.truth, [number(n) for n in (organ, TUMOUR_OF.get(organ, organ))])
            for organ in ORGANS
        }
        wide = {organ: ndimage.binary_dilation(mask) for organ, mask in whole.items()}
        return {(a, b) for a in ORGANS for b in ORGANS if a < b and (wide[a] & whole[b]).any()}

    found = [touching(case) for cases in patients.values() for case in cases]
    shares = {pair: np.mean([pair in one for one in found]) for pair in set().union(*found)}
    assert len(shares) >= 5 and sum(0.05 < share < 0.95 for share in shares.values()) >= 3, shares


def test_a_patient_is_the_same_whatever_the_spacing() -> None:
    """The truths of two grids agree where the places of one are looked up in the other."""
    for site in (TRAINED[0], TRAINED[2]):
        case = draw_case(site, 0)
        other = draw_case(replace(site, spacing=(0.8, 1.15, 0.9), axes="SPL", noise=40), 0)
        steps = np.diag(case.affine)[:3] / np.diag(other.affine)[:3]
        # the middles of both scans are the same place
        middle, goal = (np.array(case.truth.shape) - 1) / 2, (np.array(other.truth.shape) - 1) / 2
        places = (np.stack(np.indices(case.truth.shape)) - middle.reshape(3, 1, 1, 1)) * steps.reshape(
            3, 1, 1, 1
        )
        looked_up = ndimage.map_coordinates(
            other.truth, places + goal.reshape(3, 1, 1, 1), order=0, mode="nearest"
        )
        for name in CLASSES:
            a, b = case.truth == number(name), looked_up == number(name)
            assert a.any() == b.any(), name
            if a.any():
                agreed = 2 * (a & b).sum() / (a.sum() + b.sum())
                assert agreed > (0.9 if a.sum() > 1000 else 0.6), (name, agreed)


# --------------------------------------------------------------------------------------------- intensities


def best_intervals(cases: Sequence[AbdomenCase], blur: float) -> dict[str, tuple[float, float]]:
    """class -> mean Dice of the best interval [a, b) of HU common to all cases, and that of the best one per case.

    All intervals with bounds 4 HU apart are tried, the truth says which is best: no threshold, however it is found,
    does better. blur: deviation in voxels of a filter against noise, before.
    """
    edges = np.arange(-200, 401, 4)
    found: dict[str, list[np.ndarray]] = {name: [] for name in CLASSES}
    for case in cases:
        image = ndimage.gaussian_filter(case.image.astype(np.float32), blur) if blur else case.image
        place = np.digitize(image, edges)
        below = np.r_[0, np.bincount(place.ravel(), minlength=len(edges) + 1).cumsum()]
        for name in CLASSES:
            mask = case.truth == number(name)
            if mask.any():
                inside = np.r_[0, np.bincount(place[mask], minlength=len(edges) + 1).cumsum()]
                chosen, hit = below[None] - below[:, None], inside[None] - inside[:, None]
                found[name].append(np.where(chosen >= 0, 2 * hit / (np.maximum(chosen, 0) + mask.sum()), 0))
    return {
        name: (float(np.mean(tables, 0).max()), float(np.mean([table.max() for table in tables])))
        for name, tables in found.items()
        if tables
    }


def test_the_search_for_an_interval_finds_one_where_there_is_one() -> None:
    case = draw_case(TRAINED[0], 0, size="tiny")
    easy = replace(case, image=np.where(case.truth == number("spleen"), 250, case.image - 400))
    assert best_intervals([easy], 0)["spleen"] == (1, 1)


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_no_interval_of_intensities_finds_a_class(site: Any, patients: dict[str, list[AbdomenCase]]) -> None:
    """Not even one that the truth has chosen, for a site or for a single scan, and not after a filter."""
    for blur in (0, 0.8):
        for name, (common, single) in best_intervals(patients[site.name], blur).items():
            assert common < 0.5, (name, blur, common)
            assert blur or single < 0.5, (name, single)


def means(cases: Sequence[AbdomenCase], name: str) -> np.ndarray:
    return np.array([case.image[case.truth == number(name)].mean() for case in cases])


def test_contrasts_overlap_between_organs(patients: dict[str, list[AbdomenCase]]) -> None:
    """Of two solid organs of two patients, neither is always the brighter one."""
    trained = [case for site in TRAINED for case in patients[site.name]]
    organs = ("liver", "kidneys", "pancreas", "spleen")
    for a in organs:
        for b in organs:
            if a < b:
                share = np.mean(means(trained, a)[:, None] > means(trained, b))
                assert 0.02 < share < 0.98, (a, b, share)


def test_sites_differ_and_the_unseen_one_is_without_contrast(patients: dict[str, list[AbdomenCase]]) -> None:
    plain = patients[UNSEEN.name]
    for site in TRAINED:
        higher = {
            name: means(patients[site.name], name).mean() - means(plain, name).mean() for name in ORGANS[:4]
        }
        assert all(value > 3 for value in higher.values()) and max(higher.values()) > 40, (site.name, higher)
    # the gallbladder takes up none
    shifts = [means(patients[site.name], "gallbladder").mean() for site in SITES]
    assert max(shifts) - min(shifts) < 20
    assert len({site.spacing for site in SITES}) == len({site.axes for site in SITES}) == len(SITES)


def test_noise_is_correlated() -> None:
    """What a scan adds to its patient: the same patient twice, with another noise."""
    site = TRAINED[0]
    quiet = draw_case(replace(site, noise=0.0), 0).image.astype(float)
    noise = (draw_case(site, 0).image - quiet)[8:-8, 8:-8, 4:-4]
    assert 0.6 * site.noise < noise.std() < 1.6 * site.noise
    shifted = np.corrcoef(noise[1:].ravel(), noise[:-1].ravel())[0, 1]
    assert 0.05 < shifted < 0.9
