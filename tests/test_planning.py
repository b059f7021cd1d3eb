"""From folders, or descriptions of folders, to a federation file: names, rules, predictions, the file."""

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fake_sets import anatomy, picture
from set_cases import scan as write_scan

from fedatlas.cli import main
from fedatlas.core.errors import DataError, FedAtlasError, FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.names import key
from fedatlas.data.checks import check_federation, shared_scans
from fedatlas.data.index import split_validation
from fedatlas.data.transforms import geometry_of
from fedatlas.federation.design import Design, Experiment
from fedatlas.federation.file import load_federation, parse_federation
from fedatlas.federation.forecast import (
    FEW,
    MORE,
    Forecast,
    Measured,
    Size,
    added_up,
    forecast,
    made_up,
    makespan,
)
from fedatlas.federation.tasks import task_of
from fedatlas.planning.description import (
    SPREAD,
    VALUES,
    Description,
    _sample,
    describe,
    read_description,
    written,
)
from fedatlas.planning.names import Merged, Question, merged
from fedatlas.planning.plan import brought, descriptions, only_tested, sizes
from fedatlas.planning.recognise import recognised, site_name
from fedatlas.planning.rules import (
    Machine,
    Proposal,
    fitted,
    intensities,
    pooled,
    proposals,
    target_spacing,
    topology,
)

CPU, GPU = Machine("cpu", 1 << 30, 2), Machine("cuda", 8 << 30)


def values_of(found: Sequence[Proposal]) -> dict[str, Any]:
    """The proposals as plain values of a federation file."""
    plain: dict[str, Any] = {}
    for proposal in found:
        block, _, key = proposal.key.partition(".")
        if key:
            plain.setdefault(block, {})[key] = proposal.value
        else:
            plain[block] = proposal.value
    return plain


def told(
    site: str,
    labels: dict[str, tuple[int, int]],
    *,
    train: int = 10,
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0),
    shape: tuple[float, ...] = (128.0, 128.0, 128.0),
    **more: Any,
) -> Description:
    """A description of CT. labels: name -> cases in which it is annotated, and present."""
    foreground = {f"{q:g}": q for q in VALUES} | {"mean": 50.0, "std": 10.0}
    plain: dict[str, Any] = {
        "about": "",
        "fedatlas": "0",
        "site": site,
        "task": "segmentation",
        "kind": "volumes",
        "format": "auto",
        "channels": ["CT"],
        "cases": {"train": train, "validation": 0, "test": 0},
        "patients": train,
        "labels": {name: {"annotated": n, "present": m, "voxels": 100} for name, (n, m) in labels.items()},
        "spacing_mm": {f"{q:g}": list(spacing) for q in SPREAD},
        "shape": {f"{q:g}": list(shape) for q in SPREAD},
        "intensities": [{"percentiles": {f"{q:g}": 0.0 for q in VALUES}, "foreground": foreground}],
    }
    return Description.model_validate(plain | more)


class Answers:
    """Answers questions with one choice, and keeps them."""

    def __init__(self, choice: int = 0) -> None:
        self.choice, self.asked = choice, list[str]()

    def __call__(self, question: Question) -> int:
        self.asked.append(question.text)
        return self.choice


def classes(found: Merged) -> dict[str, str | None]:
    return {f"{site}/{name}": ours for (site, name), ours in found.classes.items()}


# ---------------------------------------------------------------------------------------------------- names


def test_a_folder_names_its_site() -> None:
    names = ["Klinik Süd", "Hôpital Nº 2", "Großstadt", "病院", "_a b_"]
    assert [site_name(Path("/data") / name) for name in names] == [
        "Klinik-Sud",
        "Hopital-No-2",
        "Grossstadt",
        "site",
        "a-b",
    ]


def test_names_that_differ_in_spelling_alone_are_one_class_without_a_question() -> None:
    ask = Answers()
    sites = [
        told("a", {"Spinal_Cord": (3, 3)}),
        told("b", {"spinal cord": (3, 3)}),
        told("c", {"spinal cord": (3, 3)}),
    ]
    found = merged(sites, ask)
    assert found.names == ["spinal cord"] and not ask.asked and "Spinal_Cord" in found.notes[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [("oesophagus", "esophagus"), ("kidney_l", "Left Kidney"), ("lungs", "lung"), ("mandibel", "mandible"), ("liver tumour", "liver tumor"),
     ("vertebrae_L1", "vertebra L1"), ("left ribs", "rib_left"), ("eye ball", "eyeball"), ("gall bladder", "Gallbladder"), ("head of femur", "head_femur"),
     ("segment IV a", "segment IVa"), ("ParotisL", "Parotis l"), ("non-enhancing tumor", "nonenhancing tumor"), ("Pneumothorax", "Pneumotorax"),
     ("haemorrhage", "hemorrhage"), ("Enlarged Cardiomediastinum", "Enlarged Cardiomediastinums")],
)  # fmt: skip
def test_names_that_may_be_one_are_asked_about(one: str, other: str) -> None:
    sites = [told("a", {one: (3, 3)}), told("b", {other: (3, 3)})]
    ask, apart = Answers(0), Answers(1)
    assert merged(sites, ask).names == [one] and "are they the same" in ask.asked[0]
    assert len(merged(sites, apart).names) == 2


@pytest.mark.parametrize(
    ("one", "other"), [("left kidney", "right kidney"), ("liver", "spleen"), ("vertebra 1", "vertebra 2"), ("Pneumonia", "Pneumothorax"),
     ("left superior pulmonary vein", "left inferior pulmonary vein"), ("lung lobe upper right", "lung lobe lower right"),
     ("gluteus_minimus", "gluteus_maximus"), ("hypodense area", "hyperdense area"),
     ("vertebrae_L1", "vertebrae_T1"), ("lymph node 4R", "lymph node 4L"), ("station_2R", "station_2L"), ("neck level II", "neck level III"),
     ("liver segment IVa", "liver segment IVb"), ("liver segment VIIa", "liver segment VIIIa"), ("grade II glioma", "grade III glioma"),
     ("enhancing tumor", "non-enhancing tumor"), ("enhancing tumor", "nonenhancing tumor"), ("calcified plaque", "non-calcified plaque"),
     ("displaced fracture", "non-displaced fracture"), ("Typical Appearance", "Atypical Appearance"), ("complete occlusion", "incomplete occlusion"),
     ("OpticNrvL", "OpticNrvR"), ("ParotidL", "ParotidR"), ("ParotidL", "Parotid"), ("OPTICNERVEL", "OPTICNERVER"), ("lungD", "lungG"),
     ("poumon_G", "poumon_D"), ("prostate_PZ", "prostate_TZ"), ("CTV high", "PTV high")]
)  # fmt: skip
def test_names_that_are_not_one_are_not_asked_about(one: str, other: str) -> None:
    ask = Answers()
    assert (
        len(merged([told("a", {one: (3, 3)}), told("b", {other: (3, 3)})], ask).names) == 2 and not ask.asked
    )


def test_a_site_that_has_both_tells_them_apart() -> None:
    ask = Answers()
    merged([told("a", {"lung": (3, 3), "lungs": (3, 3)}), told("b", {"lung": (3, 3)})], ask)
    assert not ask.asked


def test_an_organ_drawn_whole_and_by_sides_becomes_one_class() -> None:
    sites = [told("a", {"kidney": (3, 3)}), told("b", {"left kidney": (3, 3), "right kidney": (3, 3)})]
    ask = Answers()
    assert merged(sites, ask).names == ["kidney"] and "cannot be both" in ask.asked[0]
    assert merged(sites, Answers(1)).names == ["kidney", "left kidney", "right kidney"]


@pytest.mark.parametrize("right", [{}, {"right kidney": (3, 0)}], ids=["not in the table", "nobody drew it"])
def test_a_side_alone_is_not_annotated_where_another_site_draws_the_whole(
    right: dict[str, tuple[int, int]],
) -> None:
    sites = [
        told("north", {"kidney": (3, 3)}),
        told("south", {"left kidney": (3, 3), "spleen": (3, 3)} | right),
        told("west", {"left kidney": (3, 3), "right kidney": (3, 3)}),
    ]
    for given in (sites, sites[:2]):
        ask = Answers()
        found = classes(merged(given, ask))
        assert found["south/left kidney"] is None, "else every right kidney counted as no kidney"
        assert found.get("south/right kidney") is None and found["south/spleen"] == "spleen"
        assert found["north/kidney"] == "kidney"
        assert "One side alone is drawn as 'left kidney' at site south" in ask.asked[-1]
        assert found.get("west/left kidney", "kidney") == found.get("west/right kidney", "kidney") == "kidney"


def test_a_side_that_was_looked_for_and_is_absent_makes_the_organ_whole() -> None:
    sites = [told("a", {"kidney": (3, 3)}), told("b", {"left kidney": (3, 3), "right kidney": (3, 0)})]

    def ask(question: Question) -> int:
        return 1 if "Was it looked for" in question.text else 0

    assert set(classes(merged(sites, ask)).values()) == {"kidney"}


def test_a_site_without_a_label_that_counts_is_told() -> None:
    found = merged([told("a", {"kidney": (3, 3)}), told("b", {"left kidney": (3, 3)})], Answers())
    assert found.names == ["kidney"] and any("site b: none of its labels" in note for note in found.notes)


def test_a_label_that_nobody_drew_is_not_annotated() -> None:
    sites = [told("a", {"liver": (3, 3), "spleen": (3, 0)}), told("b", {"spleen": (3, 2)})]
    assert classes(merged(sites, Answers())) == {"a/liver": "liver", "a/spleen": None, "b/spleen": "spleen"}
    assert classes(merged(sites, Answers(1)))["a/spleen"] == "spleen"


def test_a_lesion_and_its_organ_are_a_group() -> None:
    sites = [told("a", {"liver": (3, 3), "liver tumor": (3, 2)}), told("b", {"liver": (3, 3)})]
    assert merged(sites, Answers()).groups == [("liver", "liver tumor")]
    assert merged(sites, Answers(1)).groups == []


def test_a_lesion_without_its_organ_is_of_the_organ_beside_it() -> None:
    sites = [
        told("a", {"liver": (3, 3), "cancer": (3, 2)}),
        told("b", {"pancreas": (3, 3), "cancer": (3, 3)}),
    ]
    found = merged(sites, Answers())
    assert classes(found)["a/cancer"] == "liver cancer" and classes(found)["b/cancer"] == "pancreas cancer"
    assert sorted(found.groups) == [("liver", "liver cancer"), ("pancreas", "pancreas cancer")]


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        (["liver spleen cancer", "pancreas cancer"], ["cancer as at a", "pancreas cancer"]),
        (["liver spleen cancer", "spleen liver cancer", "pancreas kidney cancer"], ["cancer as at a", "cancer as at a", "cancer as at c"]),
        (["liver cancer", "cancer", "liver cancer"], ["liver cancer", "cancer as at b", "liver cancer"]),
        (["liver Liver_Cancer cancer", "pancreas cancer"], ["cancer as at a", "pancreas cancer"]),
        (["liver cancer", "pancreas cancer", "liver Liver_Cancer"], ["Liver_Cancer", "pancreas cancer"]),
        (["liver cyst cancer", "pancreas cancer"], ["liver cancer", "pancreas cancer"]),
        (["liver spleen cancer", "liver spleen cancer"], ["cancer", "cancer"]),
        (["kidney cancer", "left_kidney right_kidney cancer"], ["cancer", "cancer"]),
    ],
)  # fmt: skip
def test_a_lesion_without_its_organ_is_one_class_only_where_the_organs_are_the_same(
    sites: list[str], expected: list[str]
) -> None:
    given = [told(site, dict.fromkeys(own.split(), (3, 3))) for site, own in zip("abc", sites, strict=False)]
    ask = Answers()
    found = classes(merged(given, ask))
    assert [ours for place, ours in found.items() if place.endswith("/cancer")] == expected
    assert any("is it the same class" in text for text in ask.asked) == (expected[0] != "cancer")
    once = merged(given, Answers(1)).classes
    assert {ours for (_, own), ours in once.items() if own == "cancer"} == {"cancer"}


def test_a_finding_that_no_site_has_is_left_out_and_told() -> None:
    of_images: dict[str, Any] = {"task": "classification", "kind": "findings", "spacing_mm": None}
    sites = [
        told("a", {"Hernia": (9, 0), "Mass": (9, 0)}, **of_images),
        told("b", {"Hernia": (9, 0), "Mass": (9, 4)}, **of_images),
    ]
    ask = Answers()
    found = merged(sites, ask)
    assert found.names == ["Mass"] and not ask.asked and "Hernia is left out" in found.notes[0]
    assert classes(found)["a/Mass"] == "Mass", "absent at a site, and verified so"


def test_keys_of_names() -> None:
    assert key("Left_Kidney") == key("kidney_l") == key("kidneys-left") == "left kidney"
    assert key("pelvis") == "pelvis" and key("glass") == "glass"


# ---------------------------------------------------------------------------------------------------- rules


def test_the_spacing_is_the_median_of_all_cases_whoever_has_them() -> None:
    sites = [told("a", {"x": (1, 1)}, train=30), told("b", {"x": (1, 1)}, train=10, spacing=(2, 2, 2))]
    assert target_spacing(sites)[0] == [1, 1, 1]
    sites[1] = told("b", {"x": (1, 1)}, train=31, spacing=(2, 2, 2))
    assert target_spacing(sites)[0] == [2, 2, 2]


def test_of_a_coarse_axis_the_10th_percentile_counts() -> None:
    rows = {f"{q:g}": [1.0, 1.0, 5.0] for q in SPREAD} | {"0": [1.0, 1.0, 2.5], "10": [1.0, 1.0, 3.0]}
    site = told("a", {"x": (1, 1)}, shape=(256, 256, 30), spacing_mm=rows)
    spacing, (rule, _) = target_spacing([site])
    assert spacing == [1, 1, 3] and "10th" in rule
    many = told("a", {"x": (1, 1)}, shape=(256, 256, 200), spacing_mm=rows)
    assert target_spacing([many])[0] == [1, 1, 5], "it is not coarse in number"
    finer = rows | {"10": [1.0, 1.0, 0.5], "0": [1.0, 1.0, 0.4]}
    site = told("a", {"x": (1, 1)}, shape=(256, 256, 30), spacing_mm=finer)
    assert target_spacing([site])[0] == [1, 1, 1], "never finer than the others"


def test_a_percentile_over_sites_is_that_of_the_cases_put_together() -> None:
    rng = np.random.default_rng(0)
    cases = {"a": rng.normal(3, 1, 4000), "b": rng.normal(8, 2, 1000)}
    sites = [
        told(
            n,
            {"x": (1, 1)},
            train=len(v),
            spacing_mm={f"{q:g}": [float(np.percentile(v, q))] * 3 for q in SPREAD},
        )
        for n, v in cases.items()
    ]
    for q in (10, 50, 90):
        exact = float(np.percentile(np.concatenate(list(cases.values())), q))
        # between two of a site's percentiles its cases are taken to be evenly spread
        assert pooled(sites, lambda site: site.spacing_mm, q)[0] == pytest.approx(exact, abs=0.25)


def test_ct_is_clipped_to_what_any_site_labelled_and_scaled_by_each_site_once() -> None:
    def site(name: str, low: float, high: float, mean: float, std: float, train: int) -> Description:
        values = dict.fromkeys([f"{q:g}" for q in VALUES], 0.0)
        foreground = values | {"0.5": low, "99.5": high, "mean": mean, "std": std}
        return told(
            name, {"x": (1, 1)}, train=train, intensities=[{"percentiles": values, "foreground": foreground}]
        )

    sites = [site("a", -100, 200, 0, 30, 90), site("b", -50, 1500, 400, 40, 10)]
    values = values_of(intensities(sites))["preprocessing"]
    assert values["window"] == [-100, 1500] and values["normalise"] == "meanstd"
    both = np.concatenate([[-30, 30] * 50, [360, 440] * 50])
    assert values["mean"] == pytest.approx(both.mean()) and values["std"] == pytest.approx(
        both.std(), abs=0.05
    )
    mr = told("c", {"x": (1, 1)}, channels=["T2"])
    flat = site("d", 7, 7, 7, 0, 3)
    for others in ([*sites, mr], [flat]):
        assert values_of(intensities(others))["preprocessing"] == {"normalise": "zscore"}


def test_levels_end_at_four_voxels_and_a_long_axis_waits() -> None:
    strides, kernels = topology([64, 64], [1, 1], 10)
    assert strides == [[1, 1]] + [[2, 2]] * 4 and all(k == [3, 3] for k in kernels), "64 / 2^4 = 4"
    strides, kernels = topology([128, 128, 16], [1, 1, 4], 10)
    assert strides[1:3] == [[2, 2, 1], [2, 2, 1]] and strides[3] == [2, 2, 2]
    assert kernels[0] == [3, 3, 1] and kernels[-1] == [3, 3, 3]
    assert np.prod([s[2] for s in strides]) <= 4 and np.prod([s[0] for s in strides]) == 32


@pytest.mark.parametrize(
    ("machine", "shape"), [(CPU, (40.0, 40.0, 9.0)), (CPU, (512.0, 512.0)), (GPU, (160.0, 160.0, 96.0))]
)
def test_what_is_proposed_fits_net_and_memory(machine: Machine, shape: tuple[float, ...]) -> None:
    from fedatlas.planning.rules import _bytes

    patch, net, batch = fitted(shape, [1.0] * len(shape), 1, 5, 1e12, machine)
    assert batch >= 2 and _bytes(net, patch, 1, 5, batch) <= machine.budget  # it runs the net on shapes
    assert all(p <= max(16, n) + 32 for p, n in zip(patch, shape, strict=True))
    tight = fitted(shape, [1.0] * len(shape), 1, 5, 1e12, Machine(machine.device, machine.budget // 8))[0]
    assert np.prod(tight) <= np.prod(patch)


def test_a_batch_is_small_for_the_smallest_site() -> None:
    many = fitted((64.0, 64.0), (1, 1), 1, 3, 1e9, CPU)[2]
    few = fitted((64.0, 64.0), (1, 1), 1, 3, 64 * 64 * 100, CPU)[2]
    assert (few, many) == (4, 16), "5 of 100 slices, in powers of 2"


def test_memory_that_is_too_small_is_told() -> None:
    site = told("a", {"x": (1, 1)})
    reasons = [
        next(p.reason for p in proposals([site], 3, machine) if p.key == "local.batch")
        for machine in (CPU, replace(CPU, budget=1000))
    ]
    assert "give it more memory" not in reasons[0] and "nothing smaller is proposed" in reasons[1]


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_proposals_are_a_federation_file(machine: Machine) -> None:
    sites = [told("a", {"x": (1, 1)}, spacing=(1, 1, 6), shape=(200, 180, 40)), told("b", {"y": (1, 1)})]
    found = proposals(sites, 3, machine)
    assert all(p.rule and p.reason for p in found)
    values = values_of(found) | {"name": "n", "sites": [{"name": "a"}, {"name": "b"}]}
    federation = parse_federation(values, base=Path())
    assert len(federation.preprocessing.patch) == (3 if machine.gpu else 2)  # type: ignore[union-attr]
    assert len(proposals_patch(sites, machine, 2)) == 2 and len(proposals_patch(sites, machine, 3)) == 3


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("coarse", "letters"), [(0, "ASR"), (1, "RSA"), (2, None)])
def test_slices_lie_across_the_coarse_axis(coarse: int, letters: str | None, machine: Machine) -> None:
    spacing, shape = [0.8, 0.8], [96.0, 160.0]
    spacing.insert(coarse, 4.4)
    shape.insert(coarse, 12.0)
    found = proposals([told("a", {"x": (1, 1)}, spacing=tuple(spacing), shape=tuple(shape))], 2, machine)
    values = values_of(found)["preprocessing"]
    assert values.get("orientation") == letters
    assert values["spacing"] == [0.8, 0.8, 4.4] and values["context"] == 1 and values["patch"] == [96, 160]
    reason = next(p.reason for p in found if p.key == "preprocessing.patch")
    assert "0.8 × 0.8 × 4.4 mm" in reason and "96 × 160 × 12 voxels" in reason
    federation = parse_federation(values_of(found) | {"name": "n", "sites": [{"name": "a"}]}, base=Path())
    assert federation.preprocessing is not None
    whole = tuple(int(n) for n in shape)
    geometry = geometry_of(whole, np.diag([*spacing, 1.0]), federation.preprocessing)
    assert geometry.grid_shape == (96, 160, 12), "the run's grid is the one that was planned for"


def test_two_coarse_axes_are_no_reason_for_slices() -> None:
    site = told("a", {"x": (1, 1)}, spacing=(5.0, 5.0, 1.0), shape=(64.0, 64.0, 200.0))
    found = proposals([site], 2, GPU)
    values = values_of(found)["preprocessing"]
    assert len(values["patch"]) == 3 and "orientation" not in values
    assert "blocks: a GPU trains blocks" in next(p.reason for p in found if p.key == "preprocessing.patch")


def proposals_patch(sites: list[Description], machine: Machine, dimensions: int) -> list[int]:
    return values_of(proposals(sites, 3, machine, dimensions))["preprocessing"]["patch"]


# ---------------------------------------------------------------------------------------------------- descriptions


def test_a_description_holds_numbers_and_neither_names_of_cases_nor_paths(phantom: Path) -> None:
    folder = phantom / "site-0"
    text = written(describe(*recognised(folder, "north")))
    cases = [file.name.split(".")[0].removesuffix("_0000") for file in (folder / "imagesTr").iterdir()]
    assert cases and not any(case in text for case in cases)
    assert str(phantom) not in text and "/" not in text.replace(json.loads(text)["about"], "")
    assert json.loads(text)["about"].startswith("What FedAtlas found in the data of one site")


def test_a_description_is_read_as_it_was_written(phantom: Path, tmp_path: Path) -> None:
    made = describe(*recognised(phantom / "site-0", "north"))
    file = tmp_path / "north.json"
    file.write_text(written(made))
    assert read_description(file) == made
    assert made.cases["train"] == 4 and all(label.present for label in made.labels.values())


@pytest.mark.parametrize(
    "shape", [(200, 200, 40), (400, 400, 109), (512, 512, 9), (500, 400, 100), (30, 200, 300), (256, 256, 1)]
)
def test_every_slice_of_a_case_counts(shape: tuple[int, int, int]) -> None:
    for axis, n in enumerate(shape):
        along = [1, 1, 1]
        along[axis] = n
        slices = np.broadcast_to(np.arange(n, dtype=np.float32).reshape(along), shape)
        seen = _sample(slices.ravel())
        assert len(np.unique(seen)) == n and 5_000 <= len(seen) <= 40_000
        assert seen.mean() == pytest.approx((n - 1) / 2, rel=0.02)


def test_ct_with_a_padded_slice_is_taken_for_ct(tmp_path: Path) -> None:
    import nibabel as nib

    voxels = np.full((200, 200, 40), -1000, np.int16)
    voxels[60:140, 60:140] = 40
    voxels[..., 0] = 0
    drawn = np.zeros(voxels.shape, np.uint8)
    drawn[80:100, 80:100, 10:20] = 1
    for name, values in (("imagesTr/a_0000", voxels), ("labelsTr/a", drawn)):
        (tmp_path / name).parent.mkdir()
        nib.save(nib.Nifti1Image(values, np.diag([2.0, 2.0, 5.0, 1.0])), tmp_path / f"{name}.nii.gz")  # type: ignore[attr-defined]
    (tmp_path / "dataset.json").write_text(
        json.dumps({"labels": {"background": 0, "liver": 1}, "file_ending": ".nii.gz"})
    )
    assert describe(*recognised(tmp_path, "a")).is_ct


def test_a_site_of_a_file_is_described_by_its_own_names_whatever_its_aliases(
    phantom: Path, small, tmp_path: Path, capsys
) -> None:
    folder = phantom / "site-0"
    plain = describe(*recognised(folder, "a"))
    first, *others = plain.labels
    keys: dict[str, Any] = {"name": "a", "path": str(folder), "aliases": {first: "ours", others[0]: "theirs"}}
    names = ["background", "ours", "theirs", *others[1:]]
    for annotated, own in ((None, [*plain.labels]), (["ours"], [first]), ([others[0]], [others[0]])):
        values = small | {"labels": {"names": names}, "sites": [keys | {"annotated": annotated}]}
        federation = parse_federation(values, base=tmp_path)
        found = descriptions(federation, [], lambda text: None)["a"]
        assert found.labels == {name: plain.labels[name] for name in own}, "as the hospital describes itself"
        assert brought(federation, found) == brought(federation, plain)
        assert brought(federation, found) == [keys["aliases"].get(name, name) for name in own]
        if annotated is None:
            assert found.intensities == plain.intensities
        file = tmp_path / "federation.yaml"
        file.write_text(yaml.safe_dump(values))
        assert main(["plan", str(file), "--no-trial", "--quiet"]) == 0 and not capsys.readouterr().err


@pytest.mark.parametrize(("letters", "said"), [("RAS", False), ("LPS", False), ("SPR", True), ("ASR", True)])
def test_plan_says_the_order_of_its_axes_where_the_file_has_another(
    letters: str, said: bool, phantom: Path, small, tmp_path: Path, capsys
) -> None:
    site = {"name": "a", "path": str(phantom / "site-0")}
    preprocessing = small["preprocessing"] | {"orientation": letters}
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump(small | {"preprocessing": preprocessing, "sites": [site]}))
    assert main(["plan", str(file), "--no-trial", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert (f"preprocessing.orientation: RAS   (the file has {letters})" in text) == said
    assert ("orientation" in text) == said


def changed(**keys: Any) -> str:
    return json.dumps(told("a", {"x": (1, 1)}).model_dump() | keys)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not readable as JSON"),
        ("[]", "no description"),
        ('{"name": 1}', "no description"),
        (changed(secret=1), "secret"),
        (changed(site="../a"), "site"),
        (changed(description=2), "description"),
        (changed(labels={}), "neither a label nor a finding"),
        (changed(cases={"train": 0}), "no training case"),
        (changed(cases={"train": -1}), "cases"),
        (changed(shape={"50": [1.0, 1.0, 1.0]}), "shape"),
        (changed(spacing_mm={f"{q:g}": [1.0, 0.0, 1.0] for q in SPREAD}), "spacing_mm"),
        (changed(intensities=[]), "intensities of 0 channels"),
        (changed(labels={"a\nb": {"annotated": 1, "present": 1}}), "labels"),
        (changed(overlap=float("nan")), "overlap"),
        (changed(shape={f"{q:g}": [1e18, 1.0, 1.0] for q in SPREAD}), "shape"),
        (
            changed(
                intensities=[
                    {"percentiles": dict.fromkeys([f"{q:g}" for q in VALUES], 0.0), "foreground": {"50": 1.0}}
                ]
            ),
            "mean and std",
        ),
        (" " * (1 << 20) + "{}", "bytes are no description"),
    ],
)
def test_what_is_no_description_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "site.json"
    file.write_text(text)
    with pytest.raises(FederationError, match=says):
        read_description(file)


def test_a_label_that_no_table_takes_is_an_error_that_names_its_place(phantom: Path, tmp_path: Path) -> None:
    shutil.copytree(phantom / "site-0", tmp_path / "site")
    table = tmp_path / "site" / "dataset.json"
    told = json.loads(table.read_text())
    told["labels"] = {"=liver" if value == 1 else name: value for name, value in told["labels"].items()}
    table.write_text(json.dumps(told))
    with pytest.raises(DataError, match="site a: cannot be described: labels(.|\n)*formula"):
        describe(*recognised(tmp_path / "site", "a"))


def test_reading_that_names_cases_or_paths_is_described_here_and_not_sent(
    tmp_path: Path, small, capsys
) -> None:
    folder, out = tmp_path / "site", tmp_path / "a.json"
    for case in ("one", "two"):
        picture(folder / "images" / f"{case}.png", anatomy(1)[0])
        picture(folder / "masks" / "lung" / f"{case}.png", anatomy(1)[1]["left lung"])
    (tmp_path / "told.csv").write_text("case,ill\none,1\ntwo,0\n")
    given = {"test": ["two"]}, "is a case or patient"
    absolute = {"findings": str(tmp_path / "told.csv")}, "is a path of this machine"
    for reading, says in (given, absolute):
        options = [
            f"--reading={key}={yaml.safe_dump(value, default_flow_style=True).strip()}"
            for key, value in reading.items()
        ]
        assert main(["describe", str(folder), "--format", "masks", *options, "-o", str(out)]) == 1
        assert says in capsys.readouterr().err and not out.exists()
        site = {"name": "a", "path": str(folder), "format": "masks", "reading": reading}
        federation = parse_federation(small | {"sites": [site], "labels": {}}, base=tmp_path)
        assert descriptions(federation, [], lambda text: None)["a"].reading == reading


def test_a_description_is_written_whole_or_not_at_all(phantom: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "north.json"
    file.write_text("older")
    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr("fedatlas.transport.store._waits", lambda *given: iter(()))
    assert main(["describe", str(phantom / "site-0"), "-o", str(file), "--overwrite"]) == 1
    assert file.read_text() == "older" and list(tmp_path.iterdir()) == [file]


def test_a_damaged_file_is_named_with_all_others(phantom: Path, tmp_path: Path) -> None:
    shutil.copytree(phantom / "site-0", tmp_path / "site")
    for file in sorted((tmp_path / "site" / "imagesTr").iterdir())[:2]:
        file.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"cannot be described(.|\n)*damaged(.|\n)*damaged"):
        describe(*recognised(tmp_path / "site", "a"))


def test_a_site_without_a_class_and_a_finding_is_not_described(phantom: Path, tmp_path: Path) -> None:
    shutil.copytree(phantom / "site-0", tmp_path / "site")
    (tmp_path / "site" / "dataset.json").write_text('{"labels": {"background": 0}}')
    config, index = recognised(tmp_path / "site", "a")
    index = replace(index, cases=index.cases[:1])
    with pytest.raises(DataError, match="site a: .* no class besides the background, and no finding"):
        describe(config, index)


def test_a_site_without_a_labelled_training_case_is_not_described(phantom: Path) -> None:
    config, index = recognised(phantom / "site-0", "a")
    silent = replace(index, cases=tuple(replace(c, label=None, annotated=()) for c in index.cases))
    trained = sum(case.split == "train" for case in index.cases)
    with pytest.raises(DataError, match=f"none of its {trained} training cases has a label"):
        describe(config, silent)


# ---------------------------------------------------------------------------------------------------- layouts


def table_of(folder: Path, header: list[str], *rows: list[Any], delimiter: str = ",") -> None:
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])


def test_columns_of_a_table_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"")
    header = ["subject", "path", "age", "fold", "Effusion", "Nodule", "No Finding"]
    rows = [
        [f"p{n}", f"{n}.png", 50 + n, s, e, "", 0]
        for n, s, e in ((0, "train", 1), (1, "val", 0), (2, "test", 1))
    ]
    table_of(tmp_path, header, *rows, delimiter=";")
    config, index = recognised(tmp_path, "a")
    assert config.format == "csv" and config.reading == {
        "file": "path",
        "delimiter": ";",
        "patient": "subject",
        "split": "fold",
        "no_finding": "No Finding",
        "ignored": ["age"],
    }
    assert index.findings == ("Effusion", "Nodule")


@pytest.mark.parametrize(
    ("names", "patient"),
    [
        (["Patient Age", "Patient Gender", "Patient ID"], "Patient ID"),
        (["PatientSex", "SubjectNo"], "SubjectNo"),
        (["Patient_Weight", "patient code"], "patient code"),
        (["Patient Position"], None),
        (["patient_race", "inpatient", "subjective"], None),
    ],
)
def test_the_column_of_the_patient_is_the_one_that_names_it(
    names: list[str], patient: str | None, tmp_path: Path
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(b"")
    rows = [[f"{n}.png", *(f"{c}{n // 2}" for c in range(len(names))), n % 2] for n in range(4)]
    table_of(tmp_path, ["file", *names, "Effusion"], *rows)
    assert recognised(tmp_path, "a")[0].reading.get("patient") == patient


def test_columns_that_describe_a_person_are_no_findings_and_a_note_tells_what_was_taken(
    tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "clinic"
    folder.mkdir()
    for number in range(12):
        picture(folder / f"{number}.png", anatomy(number)[0])
    header = [
        "file",
        "patient_race",
        "sex",
        "PatientIsMale",
        "SMOKER",
        "race_white",
        "Sextant",
        "pneumonia",
        "true_tb",
    ]
    rows = [[f"{n}.png", "AB"[n % 2], *[n // 2 % 2] * 6, n % 2 == 0] for n in range(12)]
    table_of(folder, header, *rows)
    config, index = recognised(folder, "clinic")
    ignored = ["patient_race", "sex", "PatientIsMale", "SMOKER", "race_white"]
    assert config.reading == {"ignored": ignored} and index.findings == ("Sextant", "pneumonia", "true_tb")
    for verb, out in (("init", "f.yaml"), ("describe", "a.json")):
        assert main([verb, str(folder), "-o", str(tmp_path / out)]) == 0
        told = capsys.readouterr().out
        assert (
            "note: site clinic: columns of labels.csv: image: file; patient: in no column; findings: Sextant, pneumonia, true_tb"
            in told
        )
        assert f"; ignored: {', '.join(ignored)};" in told


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("train/patient{:05d}/study1/view{}_frontal.jpg", r"(patient\d+)"),
        ("Subject {}/{}.png", r"([Ss]ubject[ _-]?\d+)"),
        ("scan{}-{}.png", None),
        ("patient1/{}-{}.png", None),
    ],
)
def test_patients_in_paths_come_into_one_split(name: str, expression: str | None, tmp_path: Path) -> None:
    rows = [[name.format(patient, view), patient % 2] for patient in range(12) for view in (1, 2)]
    for path, _ in rows:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    table_of(tmp_path, ["Path", "Effusion"], *rows)
    config, index = recognised(tmp_path, "a")
    assert config.reading.get("patient_in") == expression
    assert any("no column names the patient" in problem.what for problem in index.problems) != bool(
        expression
    )
    splits = {(case.patient, case.split) for case in index.cases}
    assert len(splits) == (12 if expression else 24)


def test_a_cell_that_is_a_long_report_is_no_file(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(b"")
    (tmp_path / "older.csv").mkdir()
    rows = [["no effusion " * 40, f"{n}.png", "train", n] for n in range(2)]
    table_of(tmp_path, ["report", "path", "split", "Effusion"], *rows)
    assert recognised(tmp_path, "a")[0].reading["ignored"] == ["report"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "no layout is recognised"),
        (lambda root: write_scan(root, "scan.nii.gz", None, 0), "no layout is recognised"),
        (lambda root: (root / "dataset.json").write_text("{"), "not readable as JSON"),
        (
            lambda root: (root / "dataset.json").write_text('{"labels": {"a": 1}}'),
            "no labelled training case",
        ),
        (lambda root: (root / "labels.csv").write_text("a,b\n1,2\n"), "no layout is recognised"),
        (lambda root: (root / "north" / "masks").mkdir(parents=True), "holds folders of sites, as north"),
    ],
)
def test_a_folder_that_nobody_understands_is_an_error_that_helps(
    make: Any, says: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(FedAtlasError, match=says):
        recognised(tmp_path, "a")


def test_other_folders_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        recognised(tmp_path / "nowhere", "a")
    with pytest.raises(FederationError, match="did you mean 'masks'"):
        recognised(tmp_path, "a", "mask")
    with pytest.raises(FederationError, match="name it with --format"):
        recognised(tmp_path, "a", None, {"table": "x.csv"})
    with pytest.raises(FederationError, match="name: got 'a/b'"):
        recognised(tmp_path, "a/b")


def test_a_device_that_is_none_writes_no_file(phantom: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "federation.yaml"
    assert main(["init", *sites_of(phantom), "-o", str(out), "--device", "gpu"]) == 1
    assert "--device gpu" in capsys.readouterr().err and not out.exists()


# ---------------------------------------------------------------------------------------------------- the verbs


def sites_of(phantom: Path) -> list[str]:
    return [str(folder) for folder in sorted(phantom.glob("site-*"))]


def test_folders_become_a_file_that_is_a_federation(phantom: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "federation.yaml"
    assert main(["init", *sites_of(phantom), "-o", str(out), "--name", "phantom"]) == 0
    told_text = capsys.readouterr().out
    assert "3 sites" in told_text and f"fedatlas run {out}" in told_text
    federation = load_federation(out)
    assert federation.name == "phantom" and len(federation.sites) == 3 and federation.labels.exclusive
    assert federation.method["name"] == "fedatlas" and federation.local.optimizer == "sgd"
    assert out.read_text().count("Nesterov") == 1, "one reason stands above the keys of one rule"
    keys = [line for line in out.read_text().splitlines() if line and line[0] not in " #"]
    assert keys[0] == "name: phantom" and all("#" in out.read_text().split(k)[0] for k in keys)
    assert main(["init", *sites_of(phantom), "-o", str(out)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_descriptions_become_the_file_of_the_folders_but_for_paths(
    phantom: Path, tmp_path: Path, capsys
) -> None:
    files = []
    for folder in sites_of(phantom):
        files.append(str(tmp_path / f"{Path(folder).name}.json"))
        assert main(["describe", folder, "-o", files[-1]]) == 0
    for name, given in (("far", files), ("near", sites_of(phantom))):
        assert main(["init", *given, "-o", str(tmp_path / f"{name}.yaml"), "--name", "n"]) == 0
    far, near = (yaml.safe_load((tmp_path / f"{name}.yaml").read_text()) for name in ("far", "near"))
    assert all("path" not in site for site in far["sites"]) and "deploy init" in capsys.readouterr().out
    for site in near["sites"]:
        site.pop("path")
    assert far == near


def renamed(phantom: Path, folder: Path) -> list[str]:
    """Two sites, of which the second calls a label of the first by another name."""
    sites = []
    for name in ("site-0", "site-1"):
        shutil.copytree(phantom / name, folder / name)
        sites.append(folder / name)
    first, second = (json.loads((site / "dataset.json").read_text()) for site in sites)
    shared = next(name for name in first["labels"] if name != "background")
    labels = {k: v for k, v in second["labels"].items() if k != shared}
    old = next(name for name in labels if name != "background")
    second["labels"] = {(f"{shared}s" if name == old else name): value for name, value in labels.items()}
    (sites[1] / "dataset.json").write_text(json.dumps(second))
    return [str(site) for site in sites]


def test_doubts_are_listed_without_a_terminal_and_taken_with_yes(
    phantom: Path, tmp_path: Path, capsys
) -> None:
    sites, out = renamed(phantom, tmp_path), tmp_path / "f.yaml"
    assert main(["init", *sites, "-o", str(out)]) == 1
    error = capsys.readouterr().err
    assert "are they the same" in error and "--yes" in error and not out.exists()
    assert main(["init", *sites, "-o", str(out), "--yes"]) == 0
    assert "\n  taken: " in capsys.readouterr().out
    assert any("aliases" in site for site in yaml.safe_load(out.read_text())["sites"])


def test_a_terminal_is_asked_until_it_answers(phantom: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    import sys

    answers = iter(["7", "x", "2"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    out = tmp_path / "f.yaml"
    assert main(["init", *renamed(phantom, tmp_path), "-o", str(out), "--quiet"]) == 0
    assert "'7' is none of 1 to 2" in capsys.readouterr().out and next(answers, None) is None
    assert not any("aliases" in site for site in yaml.safe_load(out.read_text())["sites"])


def test_sites_that_do_not_go_together_are_refused(tmp_path: Path, capsys) -> None:
    base = told("a", {"x": (1, 1)})
    others = {
        "two sites are called 'a'": base,
        "channels per image": told("b", {"x": (1, 1)}, channels=["CT", "PET"], intensities=base.model_dump()["intensities"] * 2),
        "pictures or scans": told("b", {"x": (1, 1)}, kind="masks"),
        "site b: 'x' is a class of its masks and a finding": told("b", {"x": (1, 1)}, findings={"x": {"annotated": 1, "present": 1}}),
    }  # fmt: skip
    (tmp_path / "a.json").write_text(written(base))
    for says, other in others.items():
        (tmp_path / "b.json").write_text(written(other))
        given = [str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-o", str(tmp_path / "f.yaml")]
        assert main(["init", *given]) == 1 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "code", "says"),
    [
        (["T2", "t1"], 1, "order of channels: T1, T2 at site a, but T2, t1 at site b"),
        (["T1", "FLAIR"], 0, "note: channels are T1, T2 at site a, but T1, FLAIR at site b"),
        (["t1", "T2"], 0, None),
        (["T2", ""], 0, None),
    ],
    ids=["another order", "another name", "another spelling", "no name"],
)
def test_channels_in_another_order_are_refused_and_other_names_are_noted(
    theirs: list[str], code: int, says: str | None, tmp_path: Path, capsys
) -> None:
    values = told("a", {"x": (1, 1)}).model_dump()["intensities"] * 2
    for site, channels in (("a", ["T1", "T2"]), ("b", theirs)):
        one = told(site, {"x": (1, 1)}, channels=channels, intensities=values)
        (tmp_path / f"{site}.json").write_text(written(one))
    out = tmp_path / "f.yaml"
    given = [str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-o", str(out)]
    assert main(["init", *given]) == code
    shown = capsys.readouterr()
    assert says in (shown.out if code == 0 else shown.err) if says else "channels are" not in shown.out
    assert code or ("# channels are" in out.read_text()) == bool(says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "two descriptions are of site 's0'"),
        ({"task": "classification", "kind": "findings"}, "is of a classification, the file is of a segmentation"),
        ({"site": "elsewhere"}, "is of no site of the file"),
    ],
)  # fmt: skip
def test_descriptions_that_are_not_of_the_file_are_refused(
    change: dict[str, Any], says: str, small, tmp_path: Path
) -> None:
    federation = parse_federation(small, base=tmp_path)
    one = told(federation.sites[0].name, {"x": (1, 1)})
    with pytest.raises(FederationError, match=says):
        descriptions(
            federation, [*([] if change else [one]), one.model_copy(update=change)], lambda text: None
        )


# ---------------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"cases": 4},
        {"cases": 100},
        {"split": {"validation": 0, "test": 10}},
        {"split": {"validation": 0.25, "test": 0.1}, "cases": 5},
        {"split": {"validation": 3, "folds": 3, "fold": 2}},
        {"patient": r"scan_(\d)"},
        {"patient": r"scan_(\d)", "split": {"validation": 3, "test": 0.5}},
    ],
    ids=str,
)
def test_splits_are_planned_as_a_run_takes_them(keys: dict[str, Any], small, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    for number in range(20):
        write_scan(folder, f"imagesTr/scan_{number % 5}{number // 5}_0000.nii.gz", None, number)
        write_scan(folder, "unused.nii.gz", f"labelsTr/scan_{number % 5}{number // 5}.nii.gz", number)
    (folder / "unused.nii.gz").unlink()
    table = {"labels": {"background": 0, "liver": 1, "spleen": 2}, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps({"channel_names": {"0": "CT"}, **table}))
    site = {"name": "a", "path": str(folder), **keys}
    federation = parse_federation(small | {"sites": [site], "labels": {}}, base=tmp_path)
    index = task_of(federation).read(federation, federation.sites[0], folder)
    taken = split_validation(
        index, seed=federation.evaluation.split_seed, fraction=federation.evaluation.validation
    )
    elsewhere = parse_federation(
        small | {"sites": [{"name": "a", "path": str(folder), "patient": keys.get("patient")}], "labels": {}},
        base=tmp_path,
    )
    described = descriptions(elsewhere, [], lambda text: None)["a"]
    for given in ([], [described]):  # read here, where `split` was drawn, and described before there was one
        sites = descriptions(federation, given, lambda text: None)
        planned = sizes(federation, sites, {"a": ["liver", "spleen"]})["a"].cases
        assert planned == {split: len(cases) for split, cases in taken.items()}


def test_sites_that_are_only_tested_on_count_where_they_lie_here_or_are_described(
    phantom: Path, small, tmp_path: Path
) -> None:
    here = {"name": "here", "path": str(phantom / "site-0"), "role": "test"}
    sites = [*small["sites"], here, *({"name": name, "role": "test"} for name in ("far", "unknown"))]
    federation = parse_federation(small | {"sites": sites}, base=tmp_path)
    far = told("far", {"x": (7, 7)}, cases={"train": 7, "validation": 1, "test": 2})
    index = task_of(federation).read(federation, federation.sites[-3], phantom / "site-0")
    assert only_tested(federation, [far]) == [len(index.cases), 10]


def test_a_split_that_leaves_nothing_to_train_on_is_refused(small, tmp_path: Path) -> None:
    site = {"name": "a", "path": "a", "split": {"validation": 4, "test": 6}}
    federation = parse_federation(small | {"sites": [site], "labels": {}}, base=tmp_path)
    with pytest.raises(FederationError, match="site a: split: 4 cases .* 6 for the test leave nothing"):
        sizes(federation, {"a": told("a", {"x": (10, 10)})}, {"a": ["x"]})


def test_tasks_are_done_in_their_order_by_whoever_is_free() -> None:
    assert makespan([3, 2, 1, 2], 1) == 8 and makespan([3, 2, 1, 2], 2) == 5 and makespan([], 2) == 0


def test_a_run_is_its_rounds_validations_start_and_end() -> None:
    seen = Forecast(0.1, 2.0, 5.0, 1.0, 30.0, rounds=10, validations=2, memory=1, bytes_per_round=7)
    assert seen.seconds == 1 + 10 * 2 + 2 * 5 + 30 and seen.bytes == 70


def test_waiting_for_batches_grows_with_the_steps_and_predicting_with_the_cases(
    small, tmp_path: Path
) -> None:
    federation = parse_federation(small | {"local": {"batch": 4, "steps": 50}}, base=tmp_path)
    sizes = {site.name: Size(("x",), {"train": 7, "validation": 2}) for site in federation.sites}
    # a call takes 2 s, 3 s a case, 1 s a step, and a step waits .5 s for its batch
    measured = Measured(
        steps=[1.0],
        predicting=[3.0],
        beside={n: [2.0 + 0.5 * n] for n in (FEW, MORE)},
        server=[0.25],
        validation=dict.fromkeys(sizes, 4.0),
        final=dict.fromkeys(sizes, 5.0),
    )
    seen = added_up(federation, Design(federation, LabelSpace(("background", "x")), 1), sizes, measured)
    assert seen.seconds_per_step == pytest.approx(1.5)
    assert seen.seconds_per_round == pytest.approx(len(sizes) * (2 + 3 * 7 + 1.5 * 50) + 0.25)
    assert seen.seconds_per_validation == pytest.approx(len(sizes) * 2 * 4.0)
    assert seen.seconds_of_start == 0
    design = Design(federation, LabelSpace(("background", "x")), 1)
    more = added_up(federation, design, sizes, measured, [6, 2])
    count = len({"best", "last"} & set(federation.evaluation.models))
    count += len(sizes) if "local" in federation.evaluation.models else 0
    assert more.seconds_at_end - seen.seconds_at_end == pytest.approx(8 * 5.0 * count), (
        "sites that are only tested on"
    )
    assert more.seconds_per_validation == seen.seconds_per_validation
    taught = replace(federation, method={"name": "kim", "pretrain_rounds": 3})
    seen = added_up(taught, Design(taught, LabelSpace(("background", "x")), 1), sizes, measured)
    assert seen.seconds_of_start == pytest.approx(len(sizes) * 1.5 * 3 * 50), "of the teachers"
    taught = replace(taught, local=replace(taught.local, steps=None, epochs=2.0))
    seen = added_up(taught, Design(taught, LabelSpace(("background", "x")), 1), sizes, measured)
    assert seen.seconds_of_start == pytest.approx(len(sizes) * 1.5 * 3 * 4), "7 cases in batches of 4, twice"


@pytest.mark.parametrize("kind", ["scans", "pictures", "images"])
def test_noise_is_read_as_a_hospitals_files(kind: str, small, small_images, tmp_path: Path) -> None:
    values, names = small_images if kind == "images" else small, ("x", "y", "z")
    if kind == "pictures":
        values = values | {
            "labels": {"exclusive": False, "findings": {"odd": None}},
            "preprocessing": {"size": [24, 32], "patch": [16, 16], "context": 0},
        }
    federation = parse_federation(values, base=tmp_path)
    exclusive = kind == "scans"
    told = tuple(federation.labels.findings)
    space = LabelSpace(
        ("background", *names) if exclusive else names,
        (),
        exclusive,
        "image" if kind == "images" else "voxel",
        told,
        (None,) * len(told),
    )
    shape, spacing = ((20, 30, 1), (1.0, 2.0, 1.0)) if kind == "pictures" else ((24, 20, 16), (2.0, 2.0, 4.0))
    sizes = {
        name: Size(own, {"train": 9, "validation": 3}, shape, spacing, kind == "pictures")
        for name, own in {"a": ("x",), "b": ("x", "y")}.items()
    }
    sites = made_up(federation, space, 1, sizes, tmp_path / "noise")
    labels = replace(federation.labels, names=space.names)
    experiment = Experiment(replace(federation, sites=tuple(sites), labels=labels), tmp_path / "cache")
    assert not any(problem.fatal for problem in check_federation(experiment.indexes, space))
    experiment.prepare()
    annotated = {name: source.summary()["annotated"] for name, source in experiment.sources.items()}
    assert annotated == {"a": ["x", "z"], "b": ["x", "y"]}, "what no site annotates is the first one's"
    assert not shared_scans([scan for source in experiment.sources.values() for scan in source.scans()])
    for source in experiment.sources.values():
        batch = next(iter(source.batches(("test",), batch=2, steps=1)))
        case = next(source.volumes("validation"))
        there = case.truth if kind == "images" else case.truth("original")
        assert batch.image.shape[0] == 2 and there.max() > 0
        if kind != "images":
            assert len(source.items["train"]) == 1 and there.shape[-3:] == shape
            assert tuple(case.raw_spacing) == spacing


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segmentation", "classification"])
def test_a_trial_runs_the_federation_on_made_up_cases(task: str, small, small_images, tmp_path: Path) -> None:
    values = small if task == "segmentation" else small_images
    federation = parse_federation(values, base=tmp_path)
    names = tuple(federation.labels.names or ("background", "a", "b"))
    space = LabelSpace(
        names, (), bool(federation.labels.exclusive), "voxel" if task == "segmentation" else "image"
    )
    taught = tuple(space.names[c] for c in space.foreground)
    cases = {"train": 4, "validation": 2, "test": 2}
    sizes = {site.name: Size(taught, cases, (24, 24, 16), (2.0, 2.0, 2.0)) for site in federation.sites}
    seen = forecast(federation, space, 1, sizes)
    assert 0 < seen.seconds_per_step < seen.seconds_per_round < seen.seconds
    assert seen.memory > 100 << 20 and seen.bytes_per_round > 0
