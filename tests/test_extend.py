"""A run goes on with other classes: first weights by class, agreed on by their digest, and the verb that writes the file."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fakes import same
from runs import last_state, phantom_federation
from safetensors.torch import save_file

from fedatlas import nets
from fedatlas.cli import main
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.seeds import generator
from fedatlas.core.tensors import head_of, tensors_of
from fedatlas.federation.design import Experiment
from fedatlas.federation.extend import extend
from fedatlas.federation.file import (
    Federation,
    hash_of,
    load_federation,
    parse_federation,
    resolved,
    shareable,
)
from fedatlas.federation.initial import InitFrom, initialise, sentence, settled
from fedatlas.federation.session import run_federation
from fedatlas.methods.fedatlas import NO_CLASS_LOST
from fedatlas.phantoms.organs import write_phantom
from fedatlas.transport import wire

OLD = LabelSpace(("background", "a", "b"))
NEW = LabelSpace(("background", "b", "new", "a"))


def unet(classes: int, seed: int = 0, **options: Any) -> Any:
    chosen = {"filters": [4, 6, 8, 8], "deep_supervision": True, **options}
    return nets.build("unet", chosen, in_channels=1, classes=classes, spatial_dims=2, seed=seed)


def stored(folder: Path, space: LabelSpace = OLD, **metadata: str) -> Path:
    """A file of weights with its classes."""
    about = {"classes": json.dumps(space.names)} | metadata
    save_file(tensors_of(unet(len(space), seed=7)), folder / "w.safetensors", about)
    return folder / "w.safetensors"


def test_rows_are_matched_by_name_and_all_else_is_taken(tmp_path) -> None:
    net, old = unet(4), tensors_of(unet(3, seed=7))
    before = tensors_of(net)
    initialise(net, settled(InitFrom(path=str(stored(tmp_path)))), NEW)  # type: ignore[call-arg]
    got, axes = tensors_of(net), head_of(net) | head_of(net, "deep_supervision")
    assert len(axes) == 6, "the head and two lower ones, kernel and bias each"
    for name in got:
        if name not in axes:
            assert torch.equal(got[name], old[name]), name
            continue
        for here, row in ((0, 0), (1, 2), (3, 1)):
            assert torch.equal(got[name][here], old[name][row]), name
        assert torch.equal(got[name][2], before[name][2]), "a new class has the net's first weights"


def test_what_it_says_of_old_classes_is_what_the_old_model_said(tmp_path) -> None:
    net, old = unet(4).eval(), unet(3, seed=7).eval()
    initialise(net, settled(InitFrom(path=str(stored(tmp_path)))), NEW)  # type: ignore[call-arg]
    image = torch.randn(1, 1, 16, 16, generator=generator("image"))
    with torch.no_grad():
        assert torch.allclose(net(image)[:, [0, 3, 1]], old(image), atol=1e-6)  # of other kernels' sums


def test_a_bundle_with_weights_of_monais_net(tmp_path) -> None:
    """Names of DynUNet's tensors, classes of the bundle's metadata."""
    from monai.networks.nets.dynunet import DynUNet

    (tmp_path / "configs").mkdir()
    (tmp_path / "models").mkdir()
    outputs = {"pred": {"channel_def": {str(c): name for c, name in enumerate(OLD.names)}}}
    about = {"network_data_format": {"outputs": outputs}}
    (tmp_path / "configs" / "metadata.json").write_text(json.dumps(about))
    three = [[3, 3]] * 4
    strides = [[1, 1], [2, 2], [2, 2], [2, 2]]
    whole = DynUNet(
        2, 1, 3, three, strides, strides[1:], [4, 6, 8, 8], norm_name=("instance", {"affine": True})
    )
    torch.save(whole.state_dict(), tmp_path / "models" / "model.pt")
    net = unet(4, deep_supervision=False).eval()
    initialise(net, settled(InitFrom(path=str(tmp_path))), NEW)  # type: ignore[call-arg]
    image = torch.randn(1, 1, 16, 16, generator=generator("image"))
    with torch.no_grad():
        assert torch.allclose(net(image)[:, [0, 3, 1]], whole.eval()(image), atol=1e-6)


def damaged(folder: Path) -> Path:
    file = stored(folder)
    file.write_bytes(file.read_bytes()[:200])
    return file


def untold(folder: Path) -> Path:
    save_file(tensors_of(unet(3)), folder / "w.safetensors")
    return folder / "w.safetensors"


def folder_of_nothing(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def bundle_without_weights(folder: Path) -> Path:
    (folder / "configs").mkdir()
    (folder / "configs" / "metadata.json").write_text("{}")
    return folder


def text(folder: Path) -> Path:
    (folder / "w.txt").write_text("no weights")
    return folder / "w.txt"


@pytest.mark.parametrize(
    ("make", "more", "said"),
    [
        (lambda folder: folder / "nothing", {}, "there is no such file or folder"),
        (folder_of_nothing, {}, "neither run.json .* nor configs/metadata.json"),
        (bundle_without_weights, {}, "so without weights"),
        (untold, {}, r"does not say which classes its head knows; list them in `init_from.classes`"),
        (damaged, {}, "cannot be read"),
        (damaged, {"classes": OLD.names}, "cannot be read"),
        (text, {"classes": OLD.names}, r"is a \.txt; allowed: \.safetensors, \.pth"),
        (stored, {"classes": ("background", "a")}, r"is \[3, 4, 1, 1\], expected \[2, 4, 1, 1\]: one row for each of background, a"),
        (stored, {"classes": ("a", "b", "new")}, r"overlap \(sigmoid\), those of the federation exclude each other"),
        (stored, {"findings": ("tumour",)}, r"tells the findings \['tumour'\]"),
        (stored, {"sha256": "0" * 64}, "is not the file agreed on"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_used(make: Any, more: dict[str, Any], said: str, tmp_path) -> None:
    net = unet(4)
    before = tensors_of(net)
    with pytest.raises(FederationError, match=said):
        initialise(net, settled(InitFrom(path=str(make(tmp_path)), **more)), NEW)
    assert same(tensors_of(net), before)


def test_weights_of_another_net(tmp_path) -> None:
    other = nets.build("unet", {"filters": [4, 6, 8]}, in_channels=1, classes=4, spatial_dims=2, seed=0)
    with pytest.raises(FederationError, match="not of this federation's net"):
        initialise(other, settled(InitFrom(path=str(stored(tmp_path)))), NEW)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["organ_heads", "menunet"])
def test_a_net_with_parts_for_single_organs_takes_them_in_the_same_order_alone(name: str, tmp_path) -> None:
    made = nets.build(name, {"groups": ((1,), (2,))}, in_channels=1, classes=3, spatial_dims=2, seed=0)
    with pytest.raises(FederationError, match="parts for single organs, so they have to be the same"):
        initialise(made, settled(InitFrom(path=str(stored(tmp_path)))), LabelSpace(("background", "b", "a")))  # type: ignore[call-arg]


def test_without_a_path_digest_and_classes_are_needed() -> None:
    with pytest.raises(FederationError, match="sha256: missing"):
        settled(InitFrom())
    with pytest.raises(FederationError, match="classes: missing"):
        settled(InitFrom(sha256="0" * 64))  # type: ignore[call-arg]
    given = InitFrom(sha256="0" * 64, classes=OLD.names)  # type: ignore[call-arg]
    with pytest.raises(FederationError, match="the server of a run reads the weights"):
        initialise(unet(4), settled(given), NEW)


def test_what_is_taken_is_said() -> None:
    given = InitFrom(path="w.safetensors", classes=("background", "a", "gone"), sha256="0" * 64)  # type: ignore[call-arg]
    told = sentence(given, NEW)
    assert told.endswith("rows of the head taken for a; new b, new; not taken gone")


def of_run(small: dict[str, Any], run: Path, **changes: Any) -> Federation:
    return parse_federation(small | {"init_from": str(run)} | changes, base=Path())


@pytest.fixture(scope="module")
def finished(phantom: Path, phantom_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds."""
    path = tmp_path_factory.mktemp("runs") / "old"
    run_federation(
        parse_federation(phantom_federation(phantom, phantom_cache), base=Path()),
        path,
        tell=lambda text: None,
    )
    return path


def test_hash_and_shared_file_have_the_digest_and_no_path(small, finished, tmp_path) -> None:
    plain, federation = parse_federation(small, base=Path()), of_run(small, finished)
    assert "init_from" not in shareable(resolved(plain)), "hashes of files without it are what they were"
    moved = shutil.copytree(finished, tmp_path / "moved")
    assert hash_of(federation) == hash_of(of_run(small, moved)) != hash_of(plain)
    shutil.copy(moved / "rounds" / "0001" / "state.fa", moved / "models" / "best.fa")
    assert hash_of(of_run(small, moved)) != hash_of(federation), "other weights"
    kept = shareable(resolved(federation))
    assert kept["init_from"].keys() == {"classes", "findings", "sha256"}
    at_site = tmp_path / "federation.yaml"
    at_site.write_text(yaml.safe_dump(kept | {"sites": small["sites"]}))
    assert hash_of(load_federation(at_site)) == hash_of(federation)
    Experiment(load_federation(at_site), tmp_path / "cache").check_net(initial=False)


def test_a_path_is_relative_to_the_file_that_gives_it(small, finished, tmp_path) -> None:
    moved = shutil.copytree(finished, tmp_path / "runs" / "old")
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(small | {"init_from": "runs/old"}))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.yaml").write_text("extends: ../a.yaml\n")
    init = load_federation(tmp_path / "deep" / "b.yaml").init_from
    assert init and init.path == str(moved) and init.classes


def test_with_no_new_class_a_run_goes_on(small, finished, tmp_path) -> None:
    """Its first model is the last of the other run, and mib without distillation is fedavg, bit for bit."""
    first: Any = {"path": str(finished), "model": "last"}
    tree: Any = wire.decode((finished / "models" / "last.fa").read_bytes())
    begun = Experiment(of_run(small, finished, init_from=first), tmp_path / "cache").make_net()
    assert same(tensors_of(begun), tree["model"])
    plain: Any = wire.decode(last_state(of_run(small, finished, init_from=first), tmp_path / "plain"))
    method = {"name": "mib", "lambda_kd": 0.0, "server_momentum": 0.0}
    other: Any = wire.decode(
        last_state(of_run(small, finished, init_from=first, method=method), tmp_path / "mib")
    )
    assert same(plain["model"], other["model"])
    assert not same(plain["model"], tree["model"])


def test_the_model_that_a_run_evaluated_is_gone_on_with(small, tmp_path) -> None:
    """Of FedASAM the mean of late rounds; of sites that trained alone there is none but their own."""
    small |= {"rounds": 4}
    asam = {"name": "fedasam", "asam_start": 1, "swa": {"start": 0.0, "cycle": 1}}
    run_federation(parse_federation(small | {"method": asam}, base=tmp_path), tmp_path / "asam")
    tree: Any = wire.decode((tmp_path / "asam" / "models" / "last.fa").read_bytes())
    assert tree["swa"] and not same(tree["swa"], tree["model"])
    first: Any = {"path": str(tmp_path / "asam"), "model": "last"}
    begun = Experiment(of_run(small, tmp_path, init_from=first), tmp_path / "cache").make_net()
    assert same(tensors_of(begun), tree["swa"])

    small["evaluation"] |= {"models": ["last", "local"]}
    run = tmp_path / "alone"
    alone = {"name": "standalone", "choose": "common"}
    run_federation(parse_federation(small | {"method": alone}, base=tmp_path), run)
    given = of_run(small, run, init_from={"path": str(run), "model": "last"})
    with pytest.raises(FederationError, match="trained alone, so it has no model of all; train one, or give"):
        Experiment(given, tmp_path / "cache").make_net()
    with pytest.raises(FederationError, match="trained alone, so it has no model of all to go on from"):
        extend(run, asked(tmp_path, {"rounds": 3}), tmp_path / "out.yaml")
    own = max(run.glob("**/local/*.fa"))
    classes = json.loads((run / "run.json").read_text())["labels"]["names"]
    given = of_run(small, run, init_from={"path": str(own), "classes": classes})
    kept: Any = wire.decode(own.read_bytes())
    assert same(tensors_of(Experiment(given, tmp_path / "cache").make_net()), kept["model"])


@pytest.fixture(scope="module")
def joins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A site that annotates a new class alone."""
    folder = tmp_path_factory.mktemp("joins")
    site = next(write_phantom(folder, sites=1, cases=4, test_cases=1, seed=5).iterdir())
    about = json.loads((site / "dataset.json").read_text())
    about["labels"] = {"new class" if label == 1 else name: label for name, label in about["labels"].items()}
    (site / "dataset.json").write_text(json.dumps(about))
    return {"name": "new", "path": str(site), "annotated": ["new class"]}


def asked(folder: Path, content: Any) -> Path:
    file = folder / "new.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def test_the_verb_writes_a_file_that_learns_a_new_class(finished, joins, tmp_path, capsys) -> None:
    """A run of it is resumed to the same bits, though the old run is gone."""
    old = shutil.copytree(finished, tmp_path / "old")
    out, file = tmp_path / "deep" / "out.yaml", asked(tmp_path, {"sites": [joins]})
    assert main(["extend", str(old), str(file), "-o", str(out), "--without", "s1"]) == 0
    said = capsys.readouterr().out
    assert "sites: s0, s2, new; new new; without s1" in said and "; new new class" in said
    federation = load_federation(out)
    classes = json.loads((old / "run.json").read_text())["labels"]["names"]
    assert federation.labels.names == (*classes, "new class") and federation.method["name"] == "mib"
    whole = last_state(federation, tmp_path / "whole")
    shutil.rmtree(old)
    assert last_state(federation, tmp_path / "whole") == whole, "the last round again"
    state: Any = wire.decode(whole)
    assert state["old"] == [classes.index(c) for c in classes[1:]] and state["teacher"]


def test_a_group_may_hold_a_class_that_a_site_brings_and_a_site_that_replaces_one_brings_its_classes(
    finished, joins, tmp_path
) -> None:
    known = json.loads((finished / "run.json").read_text())["labels"]["names"]
    for name in ("new", "s0"):
        out = tmp_path / f"with-{name}.yaml"
        new = {"sites": [joins | {"name": name}], "labels": {"groups": [[known[1], "new class"]]}}
        extend(finished, asked(tmp_path, new), out)
        labels = load_federation(out).labels
        assert labels.names == (*known, "new class") and labels.groups == ((known[1], "new class"),)


def test_a_class_that_nobody_annotates_any_more_is_told(finished, tmp_path) -> None:
    sites = json.loads((finished / "run.json").read_text())["sites"]
    names = {name for site in sites.values() for name in site["annotated"]}
    owners = {name: [site for site, of in sites.items() if name in of["annotated"]] for name in names}
    rare = min(sorted(owners), key=lambda name: len(owners[name]))
    new = asked(tmp_path, {"rounds": 3})
    told = extend(finished, new, tmp_path / "out.yaml", without=owners[rare])
    assert re.search(f"nobody annotates .*{rare}.* any more", told[2])
    assert not any("nobody" in line for line in extend(finished, new, tmp_path / "whole.yaml"))


def test_what_sites_that_join_annotate_is_counted_in_what_nobody_does_any_more(
    finished, joins, tmp_path
) -> None:
    old = yaml.safe_load((finished / "federation.yaml").read_text())["sites"]
    owned = json.loads((finished / "run.json").read_text())["sites"]
    gone = next(site for site in old if owned[site["name"]]["annotated"])
    others = {name for key, of in owned.items() if key != gone["name"] for name in of["annotated"]}
    unique = set(owned[gone["name"]]["annotated"]) - others
    assert unique

    def told(number: int, *sites: dict) -> str:
        new = asked(tmp_path, {"sites": list(sites)})
        return " ".join(extend(finished, new, tmp_path / f"{number}.yaml", without=[gone["name"]]))

    said = told(0, joins | {"name": "new"})
    assert "nobody annotates" in said and all(name in said for name in unique)
    assert "nobody annotates" not in told(1, joins | {"name": "new"}, gone | {"name": "moved"})
    far = {key: value for key, value in joins.items() if key != "path"} | {"name": "far"}
    assert "any more, unless far does;" in told(2, far)


def test_the_loss_that_a_runs_method_took_goes_on(small, joins, tmp_path) -> None:
    """A file that names none has that of its method: marginal, or what fedatlas takes."""
    for method, options in (("fedavg", None), ("fedatlas", NO_CLASS_LOST)):
        folder, out = tmp_path / method, tmp_path / f"{method}.yaml"
        method = {"name": method, "weights": "equal"}
        run_federation(parse_federation(small | {"rounds": 1, "method": method}, base=Path()), folder)
        extend(folder, asked(tmp_path, {"sites": [joins]}), out)
        taken = load_federation(out).method
        assert taken["name"] == "mib" and taken["weights"] == "equal"
        assert taken.get("loss", {}).get("options") == options


def test_paths_of_the_new_file_are_relative_to_it(finished, joins, tmp_path) -> None:
    new = {"sites": [joins | {"path": None}], "labels": {"names": ["p"]}, "log": {"tensorboard": "curves"}}
    (tmp_path / "new").mkdir()
    extend(finished, asked(tmp_path / "new", new), tmp_path / "out.yaml", model="last")
    assert load_federation(tmp_path / "out.yaml").log.tensorboard == str(tmp_path / "new" / "curves")


@pytest.mark.parametrize("method", [{"name": "mib", "lambda_kd": 3.0}, {"name": "condistfl", "tau": 0.5}])
def test_what_the_new_file_says_stands_before_the_run(
    finished, joins, tmp_path, method: dict[str, Any]
) -> None:
    new = {"sites": [joins | {"path": None}], "labels": {"names": ["p", "q"]}, "rounds": 7, "method": method}
    extend(finished, asked(tmp_path, new), tmp_path / "out.yaml", model="last")
    federation = load_federation(tmp_path / "out.yaml")
    assert federation.rounds == 7 and federation.method == method and federation.labels.names
    assert federation.labels.names[-2:] == ("p", "q") and "new class" not in federation.labels.names
    assert federation.init_from and federation.init_from.model == "last"


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ("", (), "is empty; expected a federation file, which begins as `name: trial`"),
        ("- a", (), "holds a list; expected a federation file"),
        ("hello", (), "holds 'hello'; expected a federation file"),
        ("a: 2020-13-45", (), "not valid YAML: '2020-13-45' is no timestamp that can be used"),
        ("{}", (), "says nothing new; give `sites`"),
        ("a: [", (), "not valid YAML"),
        ({"roundz": 3}, (), "'roundz' does not exist; did you mean 'rounds'"),
        ({"sites": {"name": "x"}}, (), "sites: expected a list of mappings, each with a name"),
        ({"sites": [{"path": "x"}]}, (), "sites: expected a list of mappings, each with a name"),
        ({"sites": [{"name": "x", "path": "nowhere"}]}, (), "site x: .*nowhere"),
        (
            {"sites": [{"name": "x", "path": "a"}, {"name": "x", "path": "b"}]},
            (),
            "sites: x is given twice; each name",
        ),
        ({"labels": {"names": "larynx"}}, (), r"labels.names: got 'larynx'; expected a list, as \[larynx\]"),
        ({"labels": 3}, (), "labels: got 3; expected a mapping of keys"),
        ({"rounds": 3}, ("--without", "s9"), "--without: the site 's9' does not exist; .*known: s0, s1, s2"),
        ({"method": {"name": "mibb"}}, (), "'mibb' does not exist; did you mean 'mib'"),
        ({"method": {"name": "mib", "lambda_kd": -1}}, (), "lambda_kd: got -1"),
        ({"rounds": 3}, ("--without", "s0", "--without", "s1", "--without", "s2"), "sites: has 0 entries"),
    ],
)
def test_what_cannot_be_gone_on_with(
    finished, tmp_path, capsys, content: Any, more: tuple[str, ...], said: str
) -> None:
    out = tmp_path / "out.yaml"
    assert main(["extend", str(finished), str(asked(tmp_path, content)), "-o", str(out), *more]) == 1
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert not out.exists()


def test_runs_and_files_that_are_none(finished, tmp_path, capsys) -> None:
    new, out = asked(tmp_path, {"rounds": 3}), tmp_path / "out.yaml"
    out.write_text("mine")
    for run, file, said in (
        (tmp_path, new, "not a run folder, it holds no run.json"),
        (finished, tmp_path / "none.yaml", "no such file"),
        (finished, new, "exists already; name another file with -o"),
    ):
        target = out if file is new and run is finished else tmp_path / "other.yaml"
        assert main(["extend", str(run), str(file), "-o", str(target)]) == 1
        assert said in capsys.readouterr().err
    assert out.read_text() == "mine"
