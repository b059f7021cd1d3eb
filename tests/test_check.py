"""`fedatlas check`: what it finds in a federation as a whole, and what it says a run will cost."""

import json
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml

from fedatlas.core.errors import DataError, FederationError
from fedatlas.federation.check import check_federation_file, text_of
from fedatlas.federation.design import Experiment
from fedatlas.federation.file import parse_federation
from fedatlas.federation.forecast import masked_bytes
from fedatlas.transport import wire
from fedatlas.transport.protection import compression, secure
from fedatlas.transport.protection.secure import Secure


def checked(values: dict[str, Any], folder: Path, *overrides: str) -> dict[str, Any]:
    file = folder / "federation.yaml"
    file.write_text(yaml.safe_dump(values))
    return check_federation_file(file, overrides, folder / "runs")


def texts(result: dict[str, Any], *, fatal: bool) -> list[str]:
    return [problem["text"] for problem in result["problems"] if problem["fatal"] is fatal]


def copied(small: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The federation with data of its own, to be changed."""
    for number, site in enumerate(small["sites"]):
        shutil.copytree(site["path"], folder / f"site-{number}")
        site["path"] = str(folder / f"site-{number}")
    small["engine"]["cache"] = str(folder / "cache")
    return small


def test_sites_that_cannot_be_read_are_told_together(small, tmp_path) -> None:
    for number, name in ((0, "here"), (2, "there")):
        small["sites"][number]["path"] = str(tmp_path / name)
    with pytest.raises(DataError) as told:
        checked(small, tmp_path)
    first, second = str(told.value).splitlines()
    assert first.startswith("site s0: ") and "here: no such folder" in first
    assert second.startswith("site s2: ") and "there: no such folder" in second


def test_sites_with_unknown_classes_are_told_together(small, tmp_path) -> None:
    with pytest.raises(FederationError) as told:
        checked(small | {"labels": {"names": ["background", "pancreas"]}}, tmp_path)
    assert [line[:8] for line in str(told.value).splitlines()] == ["site s0:", "site s1:", "site s2:"]


def test_a_split_does_not_hide_the_files_that_are_wrong(small, tmp_path) -> None:
    """Images without a channel number leave no case to divide, and the next site is told of, too."""
    small = copied(small, tmp_path)
    for image in (Path(small["sites"][0]["path"]) / "imagesTr").iterdir():
        image.rename(image.with_name(image.name.replace("_0000", "")))
    small["sites"][0] |= {"split": {"validation": 1}, "reference": None}
    small["sites"][1]["path"] = str(tmp_path / "nowhere")
    with pytest.raises(DataError) as told:
        checked(small, tmp_path)
    first, *_, split, other = str(told.value).splitlines()
    assert first.startswith("site s0: imagesTr/") and "an image without a channel number; rename it" in first
    assert "split: there is nothing to divide: of the 1 cases that its layout lists none" in split
    assert other.startswith("site s1: ") and "no such folder" in other


def test_two_spellings_of_a_class_are_told(small, tmp_path) -> None:
    """Unless the file says what the classes are, or a site has both and so tells them apart."""
    small = copied(small, tmp_path)
    tables = [Path(site["path"]) / "dataset.json" for site in small["sites"]]
    labels = [set(json.loads(table.read_text())["labels"]) - {"background"} for table in tables]
    table, own = tables[1], labels[1]
    name = min(own & (labels[0] | labels[2]))
    table.write_text(table.read_text().replace(f'"{name}"', f'"{name[:-1]}"'))
    (said,) = [text for text in texts(checked(small, tmp_path), fatal=False) if "are they the same?" in text]
    assert f"'{name}'" in said and f"'{name[:-1]}'" in said and "aliases" in said and "labels.names" in said
    small["labels"] = {"names": ["background", *sorted({name[:-1]}.union(*labels))]}
    assert not [text for text in texts(checked(small, tmp_path), fatal=False) if "are they the same?" in text]


def test_a_class_that_cases_for_validation_alone_annotate_is_told(small, tmp_path) -> None:
    small = copied(small, tmp_path)
    sources = Experiment(parse_federation(small, base=Path()), tmp_path / "cache").sources
    spaces = {name: source.labels for name, source in sources.items()}
    site, c = next(
        (name, c)
        for name, own in spaces.items()
        for c in own.annotated
        if sum(c in of.annotated for of in spaces.values()) == 1
    )
    root = Path(next(one["path"] for one in small["sites"] if one["name"] == site))
    held = {item.case.name for item in sources[site].items["validation"]}  # type: ignore[attr-defined]
    class_name = spaces[site].space.names[c]
    table = json.loads((root / "dataset.json").read_text())
    names = [name for name in table["labels"] if name != "background"]
    cases = [item.case.name for items in sources[site].items.values() for item in items]  # type: ignore[attr-defined]
    table["annotated"] = {case: [n for n in names if case in held or n != class_name] for case in cases}
    (root / "dataset.json").write_text(json.dumps(table))
    found = checked(small, tmp_path)
    assert [
        text for text in texts(found, fatal=False) if f"no training case annotates '{class_name}'" in text
    ]
    assert not texts(found, fatal=True)


def give_scan(scan: Path, target: Path) -> None:
    """A scan in the place of another, whose labels become empty ones of its geometry."""
    shutil.copy(scan, target)
    image: Any = nib.load(scan)  # type: ignore[attr-defined]
    empty = nib.Nifti1Image(np.zeros(image.shape, np.uint8), image.affine)  # type: ignore[attr-defined]
    for file in target.parents[1].glob(f"labels*/{target.name.replace('_0000', '')}"):
        nib.save(empty, file)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("kind", ["bf16", "int8", "topk"])
@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.9])
def test_bytes_are_those_of_what_is_sent(kind: str, fraction: float) -> None:
    generator = torch.Generator().manual_seed(1)
    model = {
        "conv": torch.randn(40, 30, 3, 3, generator=generator),
        "bias": torch.randn(40, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "norm.running_mean": torch.randn(40, generator=generator),
        "seen": torch.tensor(7),
    }
    told = compression.sent_bytes(model, kind, fraction)
    tree: dict[str, Any] = compression.compress(model, kind, fraction=fraction)
    packed = [value for value in tree.values() if isinstance(value, torch.Tensor)]
    packed += tree["exact"].values()
    assert told == sum(tensor.numel() * tensor.element_size() for tensor in packed)
    assert told <= len(wire.encode(tree)) <= told + 1500


def test_bytes_of_a_model_as_it_is_and_masked() -> None:
    model = {"w": torch.ones(10, 5), "half": torch.ones(3, dtype=torch.float16), "seen": torch.tensor(7)}
    assert compression.sent_bytes(model, "none", 0.01) == 4 * 50 + 2 * 3 + 8
    vector = secure.pack(model, 2, Secure(), sites=3)  # type: ignore[call-arg]
    assert masked_bytes(model) == vector.numel() * vector.element_size()


def test_cost_follows_the_federation(small, tmp_path) -> None:
    plain = checked(small, tmp_path)
    model = plain["cost"]["model_bytes"]
    assert (
        plain["cost"]["bytes_per_round"] == 2 * 3 * model and plain["cost"]["evaluation_bytes"] == 3 * model
    )
    assert "an evaluated round" in text_of(plain)

    packed = checked(small, tmp_path, "comm.up=int8", "comm.down=bf16")
    assert model / 4 < packed["cost"]["bytes_up"] < model / 3
    assert packed["cost"]["bytes_down"] == model / 2 and packed["cost"]["evaluation_bytes"] == 0
    assert packed["cost"]["bytes_per_round"] == 3 * (
        packed["cost"]["bytes_up"] + packed["cost"]["bytes_down"]
    )
    assert "(bf16) and sends" in text_of(packed) and "named and not sent again" in text_of(packed)

    masked = checked(small, tmp_path, "secure={}")
    assert masked["cost"]["bytes_up"] == 2 * model + 8 and "(masked)" in text_of(masked)


def test_a_site_without_validation_cases_is_sent_nothing_to_evaluate(small, tmp_path) -> None:
    small = copied(small, tmp_path)
    small["sites"][2] |= {"role": "test"}
    found = checked(small, tmp_path)
    assert not found["sites"][small["sites"][2]["name"]]["cases"]["validation"]
    assert found["cost"]["evaluation_bytes"] == 2 * found["cost"]["model_bytes"]


# ----------------------------------------------------------------------------------------------------- between sites


def test_a_test_scan_that_another_site_trains_on_stops_the_run(small, tmp_path) -> None:
    values = copied(small, tmp_path)
    assert not texts(checked(values, tmp_path), fatal=True)
    one, two = (Path(site["path"]) for site in values["sites"][:2])
    trained, test = next((one / "imagesTr").iterdir()), next((two / "imagesTs").iterdir())
    give_scan(trained, test)
    result = checked(values, tmp_path)
    (problem,) = [text for text in texts(result, fatal=True) if "value by value" in text]
    assert problem.startswith(
        f"site {values['sites'][1]['name']}: imagesTs/{test.name}: the image of test case"
    )
    assert f"of site {values['sites'][0]['name']}" in problem
    assert result["cost"] is None and "1 error: this federation cannot run" in text_of(result)


def test_one_training_scan_at_two_sites_is_a_note(small, tmp_path) -> None:
    values = copied(small, tmp_path)
    one, two = (Path(site["path"]) for site in values["sites"][:2])
    for number in (0, 1):
        give_scan(*(sorted((site / "imagesTr").iterdir())[number] for site in (one, two)))
    found = [text for text in texts(checked(values, tmp_path), fatal=False) if "value by value" in text]
    assert len(found) == 1 and "(2 such scans)" in found[0] and "train case" in found[0]


# ------------------------------------------------------------------------------------------------------------- notes


def test_notes_stop_nothing(small, tmp_path) -> None:
    assert checked(small, tmp_path, "faults.min_sites=3")["problems"] == []
    result = checked(small, tmp_path, "faults.min_sites=5", "method.name=centralized")
    least, pooled = texts(result, fatal=False)
    assert "faults.min_sites is 5, and the federation has 3 sites" in least
    assert "method centralized" in pooled and "not across sites" in pooled
    assert result["cost"]["bytes_per_round"] == 2 * result["cost"]["model_bytes"]
    assert "nothing stands in the way" in text_of(result)


def test_what_is_asked_for_in_vain_is_told(small, tmp_path) -> None:
    """More processes than sites, and scores of cases that nobody has."""
    (workers,) = texts(checked(small, tmp_path, "engine.workers=50"), fatal=False)
    assert "engine.workers is 50, and the federation has 3 sites; one process for each is started" in workers
    small = copied(small, tmp_path)
    for site in small["sites"]:
        for folder in ("imagesTs", "labelsTs"):
            shutil.rmtree(Path(site["path"]) / folder)
    (tests,) = texts(checked(small, tmp_path), fatal=False)
    assert "no site has a test case" in tests and "`split: {test: 0.2}`" in tests


def test_test_cases_that_are_not_scored_are_named(small, tmp_path) -> None:
    """A misspelt folder of their labels, or of their reference, costs the table of the test cases."""
    name, reference = small["sites"][0]["name"], small["sites"][0].pop("reference")
    count = checked(small, tmp_path)["sites"][name]["cases"]["test"]
    (said,) = texts(checked(small, tmp_path, f"sites.{name}.test_labels=nope"), fatal=False)
    assert said.startswith(f"site {name}: {count} of its {count} test cases (") and "are not scored" in said
    assert "`test_labels`" in said
    small["sites"][0]["reference"] = {**reference, "test_labels": "nope"}
    (said,) = texts(checked(small, tmp_path), fatal=False)
    assert "have no label file in the reference" in said and "`reference.test_labels`" in said
    small["sites"][0]["reference"] = {**reference, "labels": "nope"}
    (said,) = texts(checked(small, tmp_path), fatal=False)
    assert said.startswith(f"site {name}: nope: no such folder; ") and "`reference.labels`" in said
    assert "are scored by what is annotated alone" in said


def test_a_tested_site_is_scored_by_its_reference_alone(small, tmp_path) -> None:
    site = small["sites"][1]
    site["role"], site["reference"] = "test", site["reference"] | {"test_labels": "nope"}
    (said,) = texts(checked(small, tmp_path), fatal=False)
    assert "have no label file in the reference and are not scored: with `role: test`" in said
    site["reference"] |= {"labels": "nope", "test_labels": "labelsTs_all"}
    folder, cases = texts(checked(small, tmp_path), fatal=False)
    assert "nope: no such folder; training and validation cases are not scored" in folder
    assert "are not scored: with `role: test`" in cases


@pytest.mark.parametrize("kind", ["small", "small_images"])
def test_annotated_of_a_tested_site_is_told_to_count_for_nothing(kind, tmp_path, request) -> None:
    federation = request.getfixturevalue(kind)
    site = federation["sites"][1]
    for key in ("reference", "score_all"):
        site.pop(key, None)
    kept, left = ("spleen", "kidney") if kind == "small" else ("blob", "bar, ring")
    site |= {"role": "test", "annotated": [kept]}

    def told() -> list[str]:
        return [text for text in texts(checked(federation, tmp_path), fatal=False) if "leaves out" in text]

    (text,) = told()
    assert f"site s1: `annotated` leaves out {left}, and with `role: test` all of a site's labels are" in text
    site["aliases"] = dict.fromkeys(left.split(", "), "background")
    assert told() == []


def test_a_site_without_validation_cases_is_named(small, tmp_path) -> None:
    (note,) = texts(checked(small, tmp_path, "evaluation.validation=0"), fatal=False)
    assert "no site has a validation case" in note and "last model" in note
    values = copied(small, tmp_path)
    second = Path(values["sites"][1]["path"])
    for image in sorted((second / "imagesTr").iterdir())[1:]:
        (second / "labelsTr" / image.name.replace("_0000", "")).unlink()
        image.unlink()
    found = texts(checked(values, tmp_path), fatal=False)
    name = values["sites"][1]["name"]
    assert [text for text in found if "validation" in text and text.startswith(f"site {name}: no validation")]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.device=gpu", "engine.device: got 'gpu'"),
        ("local.precision=fp16", "fp16 needs a GPU"),
        ("preprocessing.patch=[18, 18]", "patch"),
    ],
)
def test_what_cannot_run_is_a_problem_beside_the_others(override, said, small, tmp_path) -> None:
    values = copied(small, tmp_path)
    image = next((Path(values["sites"][0]["path"]) / "imagesTr").iterdir())
    image.write_bytes(b"no image")
    result = checked(values, tmp_path, override)
    fatal = texts(result, fatal=True)
    assert len(fatal) == 2 and said in fatal[0] and image.name in fatal[1]
    assert text_of(result).endswith("2 errors: this federation cannot run")


# ------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    ("capabilities", "told"),
    [({"avx512_bf16": False, "amx_bf16": False}, 1), ({"avx512_bf16": True}, 0), ({}, 0)],
)
def test_bf16_without_instructions_for_it_is_told(
    small: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capabilities: dict[str, bool],
    told: int,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    result = checked(small, tmp_path, "local.precision=bf16")
    assert sum("avx512_bf16" in text for text in texts(result, fatal=False)) == told
