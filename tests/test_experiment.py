"""experiment.py: the federation file is read strictly, and says what is wrong in its own words."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedatlas.compare import load_comparison
from fedatlas.core.errors import FederationError
from fedatlas.federation.file import hash_of, json_schema, load_federation, parse_federation, resolved
from fedatlas.federation.session import run_federation
from fedatlas.federation.yaml import read_yaml


def parse(small: dict[str, Any], **changes: Any):
    return parse_federation(small | changes, base=Path(), source="f.yaml")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("roundz", 3, r"'roundz' does not exist; did you mean 'rounds'\?"),
        ("local", {"lrr": 1}, r"'local.lrr' does not exist; did you mean 'lr'\?"),
        ("local", {"lr": -1}, r"local\.lr: got -1; a number above 0 is expected"),
        ("name", "Klinik Süd", r"name: got 'Klinik Süd'; letters A to Z, digits and \. _ - are allowed"),
        ("rounds", "3 rounds", r"rounds: got '3 rounds'; a whole number is expected"),
        ("local", {"precision": "fp8"}, r"local\.precision: got 'fp8'; allowed: 'float32', 'bf16' or 'fp16'"),
        ("local", {"steps": None}, "steps is None and epochs is None"),
        ("local", 3, "local: got 3; expected a mapping with the keys optimizer"),
        ("method", {"name": "fedavgg"}, r"^f\.yaml: the method 'fedavgg' does not exist; did you mean 'fedavg'\?"),
        ("method", {"name": "fedprox", "muu": 1}, r"'muu' does not exist; did you mean 'mu'\? of method fedprox, known: mu,"),
        ("method", {"name": "fedavg", "local": {}}, "the file's own key `local`"),
        ("method", {"mu": 1}, "method.name: missing"),
        ("net", {"name": "unett"}, r"^f\.yaml: the net 'unett' does not exist; did you mean 'unet'\?"),
        ("net", {"name": "unet", "filter": [1]}, r"'filter' does not exist; did you mean 'filters'\? of net unet, known: "),
        ("labels", {"names": ["liver"]}, r"^f\.yaml: labels\.names: exclusive classes begin with 'background', got \['liver'\]"),
        ("rounds", 0, "rounds: got 0"),
        ("name", "a/b", "name: got 'a/b'"),
        ("sites", [], "sites: has 0 entries"),
        ("evaluation", {"metrics": ["dise"]}, r"metrics: for segmentation the metric 'dise' does not exist; did you mean 'dice'\? known: [^;]*hd_rows$"),
        ("evaluation", {"metrics": ["dice", "nsd", "dice"]}, r"^f\.yaml: evaluation: metrics: are \['dice', 'nsd', 'dice'\], dice more than once, .*; each name is allowed once$"),
        ("evaluation", {"round_metrics": ["dice", "dice"]}, r"evaluation: round_metrics: are \['dice', 'dice'\], dice more than once"),
        ("preprocessing", {"orientation": "RAX"}, "orientation is 'RAX'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(small, key: str, value: Any, text: str) -> None:
    with pytest.raises(FederationError, match=text):
        parse(small, **{key: value})


def test_a_run_folder_of_before_may_name_a_metric_twice(small) -> None:
    twice = small | {"evaluation": {"metrics": ["dice", "dice"]}}
    assert parse_federation(twice, base=Path(), kept=True).evaluation.metrics == ("dice", "dice")


def test_two_sites_of_one_name(small) -> None:
    small["sites"][1]["name"] = small["sites"][0]["name"]
    with pytest.raises(FederationError, match="two sites are called"):
        parse(small)


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_files_that_are_none(tmp_path) -> None:
    with pytest.raises(FederationError, match="no such file"):
        load_federation(tmp_path / "x.yaml")
    with pytest.raises(FederationError, match="the key 'a' is given twice"):
        load_federation(write(tmp_path / "x.yaml", "a: 1\na: 2\n"))
    expected = "; expected a federation file, which begins as `name: trial`"
    for content, text in (("", "is empty"), ("[1]", "holds a list"), ("hello", "holds 'hello'")):
        with pytest.raises(FederationError, match=f"x.yaml: {text}{expected}"):
            load_federation(write(tmp_path / "x.yaml", content))
    (tmp_path / "x.yaml").write_bytes(b"name: \xff")
    with pytest.raises(FederationError, match=f"is no text, its byte 6 is not UTF-8{expected}"):
        load_federation(tmp_path / "x.yaml")
    with pytest.raises(FederationError, match=f": is a folder{expected}"):
        load_federation(tmp_path)
    with pytest.raises(
        FederationError, match="not valid YAML: '2020-13-45' is no timestamp that can be used"
    ):
        load_federation(write(tmp_path / "x.yaml", "name: 2020-13-45"))
    with pytest.raises(FederationError, match="not valid YAML"):
        load_federation(write(tmp_path / "x.yaml", "a: [1"))
    with pytest.raises(FederationError, match="extends itself"):
        load_federation(write(tmp_path / "x.yaml", "extends: x.yaml"))


def test_extends_and_overrides(small, tmp_path) -> None:
    write(tmp_path / "base.yaml", small)
    file = write(
        tmp_path / "f.yaml",
        {"extends": "base.yaml", "local": {"lr": 0.5}, "method": {"name": "fedprox", "mu": 0.1}},
    )
    federation = load_federation(file)
    assert federation.local.lr == 0.5 and federation.local.batch == small["local"]["batch"]
    assert federation.method == {"name": "fedprox", "mu": 0.1}
    site = small["sites"][1]["name"]
    changes = [
        "local.lr=2e-3",
        "method.tau=2",  # of the method that is named, before or after it
        "method.name=condistfl",
        f"sites.{site}.annotated=null",
        "evaluation.every=7",
    ]
    changed = load_federation(file, changes)
    assert (
        changed.local.lr == 0.002
        and changed.method == {"name": "condistfl", "tau": 2}
        and changed.evaluation.every == 7
    )
    for bad in ("local.lr", "sites.nobody.path=x", "rounds.x=1"):
        with pytest.raises(FederationError, match=f"-o {bad}"):
            load_federation(file, [bad])


LOSS = "marginal_dice_ce_exclusion"


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"name": "standalone"}, "method.loss.name": LOSS, "method.loss.options.exclusion_ce": 0.5},
        {"method.loss.name": LOSS, "method.name": "standalone", "method.loss.options.exclusion_ce": 0.5},
        {"method.loss.options.exclusion_ce": 0.5, "method.loss": {"name": LOSS}, "method.name": "standalone"},
        {"method.loss": {"name": LOSS, "options": {"exclusion_ce": 0.5}}, "method": {"name": "standalone"}},
        {
            "method.loss.options": {"exclusion_ce": 0.5},
            "method.loss.name": LOSS,
            "method": {"name": "standalone"},
        },
    ],
)
def test_a_choice_within_a_choice_may_be_given_before_it_or_after_it(small, tmp_path, changes) -> None:
    """By -o, and in an arm of a comparison."""
    expected = {"name": "standalone", "loss": {"name": LOSS, "options": {"exclusion_ce": 0.5}}}
    file = write(tmp_path / "f.yaml", small | {"method": {"name": "fedprox", "mu": 0.1}})
    given = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    assert load_federation(file, given).method == expected
    arms = write(tmp_path / "arms.yaml", {"name": "arms", "base": "f.yaml", "arms": {"one": changes}})
    assert load_comparison([arms]).federations["one"][0].method == expected


def test_paths_are_relative_to_the_file_that_gives_them(small, tmp_path) -> None:
    (tmp_path / "deep").mkdir()
    small["sites"][0]["path"] = "here"
    write(tmp_path / "base.yaml", small | {"log": {"tensorboard": "curves"}})
    file = write(tmp_path / "deep" / "f.yaml", {"extends": "../base.yaml"})
    federation = load_federation(file)
    assert federation.sites[0].path == str((tmp_path / "here").resolve())
    assert federation.log.tensorboard == str((tmp_path / "curves").resolve())


def test_the_hash_is_of_what_decides_the_result(small) -> None:
    plain = parse(small)
    assert hash_of(plain) == hash_of(parse(small, engine={"workers": 5}))
    elsewhere = [{**site, "path": "/elsewhere"} for site in small["sites"]]
    assert hash_of(plain) == hash_of(parse(small, sites=elsewhere))
    for key, value in (
        ("seed", 9),
        ("threads_per_site", 2),
        ("method", {"name": "fedprox"}),
        ("net", {"name": "unet"}),
    ):
        assert hash_of(plain) != hash_of(parse(small, **{key: value})), key
    # a default that is written out is still the default
    assert hash_of(plain) == hash_of(parse(small, method={"name": "fedavg", "weights": "cases"}))


def test_the_resolved_file_is_a_federation_file(small, tmp_path) -> None:
    plain = parse(small)
    again = load_federation(write(tmp_path / "f.yaml", resolved(plain)))
    assert hash_of(again) == hash_of(plain)
    assert json.dumps(resolved(plain))


def test_the_schema_knows_every_method_and_net() -> None:
    from fedatlas import methods, nets

    schema = json_schema()
    for what, registry in (("method", methods.REGISTRY), ("net", nets.REGISTRY)):
        names = [choice["properties"]["name"]["const"] for choice in schema["properties"][what]["oneOf"]]
        assert names == list(registry)
    text = json.dumps(schema)
    for reference in {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}:
        assert reference in schema["$defs"], reference
    assert schema["properties"]["rounds"]["description"]


def test_shipped_federation_files_are_read() -> None:
    root = Path(__file__).parents[1] / "experiments"
    files = [path for path in sorted(root.rglob("*.yaml"))]
    assert files
    others = [path for path in files if not {"name", "arms", "extends"} & set(read_yaml(path))]
    # with which `fedatlas extend` goes on from a run; what `run_queue.py` trains (its own test reads it)
    assert [path.name for path in others] == ["larynx.yaml", "queue.yaml"]
    for path in sorted({*files} - {*others}):
        if "arms" in (plain := read_yaml(path)):
            comparison = load_comparison([path], profile="smoke" if "profiles" in plain else None)
            assert all(comparison.federations.values())
        else:
            load_federation(path)


def test_a_key_that_is_no_word_is_told(tmp_path) -> None:
    with pytest.raises(FederationError, match="a key is a word, not a list"):
        load_federation(write(tmp_path / "x.yaml", "? [a, b]\n: 1"))


def test_a_name_in_the_place_of_a_block_is_told_how(small, tmp_path) -> None:
    file = write(tmp_path / "f.yaml", small)
    with pytest.raises(
        FederationError, match=r"mapping of keys, as method: \{name: fedavg\}\..*-o method.name=fedavg"
    ):
        load_federation(file, ["method=fedavg"])
    for key, text in (
        ("sites=", "sites: is empty; expected a list, whose entries begin with a dash"),
        ("method=", "method: is empty; expected a mapping of keys$"),
        ("preprocessing.spacing=4", r"spacing: got 4; expected a list, as \[4, 4, 4\]"),
        ("preprocessing.patch=64", r"patch: got 64; expected a list, as \[64, 64\]"),
        ("augmentation.mirror=0", r"mirror: got 0; expected a list, as \[0\]"),
        ("net.filters=4,8,16", r"filters: got '4,8,16'; expected a list, as \[4, 8, 16\]"),
        ("preprocessing.spacing=[6, 6]", r"spacing: got \[6, 6\], which has 2 of 3 entries; give them all"),
        ("method.name=fedpox", "^-o method.name=fedpox: the method 'fedpox' does not exist; did you mean 'fedprox'"),
        ("net.name=unett", "^-o net.name=unett: the net 'unett' does not exist; did you mean 'unet'"),
        ("method.mu=1", "^-o method.mu=1: the key 'mu' does not exist; of method fedavg, known: swa_start,"),
        ("labels.names=[a]", r"^-o labels.names=\[a\]: labels.names: exclusive classes begin with 'background'"),
        ("labels={names: [background, a], groups: [[a, b]]}", r"labels.groups: no class 'b'; known: background, a$"),
        ("labels={names: [background, a], findings: {a: null}}", r"labels.findings: the finding 'a' has the name of"),
        ("rounds=2020-13-45", "^-o rounds=2020-13-45: rounds: got '2020-13-45'"),
    ):  # fmt: skip
        with pytest.raises(FederationError, match=text):
            load_federation(file, [key])
    del small["method"]
    with pytest.raises(FederationError, match="^-o method.mu=1: method.name: missing"):
        load_federation(write(tmp_path / "f.yaml", small), ["method.mu=1"])


def test_display_names_decide_nothing_and_name_known_classes() -> None:
    from fedatlas.core.options import from_dict
    from fedatlas.federation.file import Labels, shareable

    names = ["background", "liver_left"]
    shown = from_dict(Labels, {"names": names, "display": {"liver_left": "Left liver"}}, what="labels")
    assert shown.display == {"liver_left": "Left liver"}
    with pytest.raises(FederationError, match="display: the class 'liver_lft'"):
        from_dict(Labels, {"names": names, "display": {"liver_lft": "Left liver"}}, what="labels")
    plain = {"labels": {"names": names}, "net": {"name": "unet"}, "sites": []}
    assert shareable({**plain, "labels": {"names": names, "display": {"liver_left": "x"}}}) == shareable(
        plain
    )


def test_no_more_workers_are_started_than_there_are_sites(small, tmp_path, monkeypatch) -> None:
    asked: list[int] = []

    def workers(target: str, arguments: Any, n: int, log: Path) -> None:
        asked.append(n)
        raise RuntimeError("enough")

    monkeypatch.setattr("fedatlas.federation.session.Workers", workers)
    for number in (2, 1000):
        small["engine"] |= {"workers": number}
        with pytest.raises(RuntimeError, match="enough"):
            run_federation(parse_federation(small, base=tmp_path), tmp_path / str(number))
    assert asked == [2, len(small["sites"])]
