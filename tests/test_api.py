"""FedAtlas from Python: as the command line, to the same bits; and methods, losses and nets of others."""

import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import nibabel as nib
import numpy as np
import pytest
import torch
from findings import findings_federation
from PIL import Image
from runs import phantom_federation

import fedatlas
from fedatlas import losses, methods, nets
from fedatlas.core.options import option, options
from fedatlas.federation.catalogue import catalogue
from fedatlas.federation.file import parse_federation
from fedatlas.federation.predict import predict_scans
from fedatlas.losses.marginal import MarginalDiceCE
from fedatlas.nets import Net


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, fedatlas\nassert set(fedatlas.__all__) <= set(dir(fedatlas))\n"
        "assert not {'torch', 'monai', 'numpy', 'pandas', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there_and_no_other() -> None:
    assert all(getattr(fedatlas, name) is not None for name in fedatlas.__all__)
    with pytest.raises(AttributeError, match="it has FedAtlasError, Model"):
        _ = fedatlas.models


@pytest.fixture(scope="module")
def federation(phantom: Path, phantom_cache: Path) -> Any:
    return parse_federation(phantom_federation(phantom, phantom_cache), base=Path())


@pytest.fixture(scope="module")
def run(
    federation: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[fedatlas.Run, list[fedatlas.Seen]]:
    seen: list[fedatlas.Seen] = []
    return fedatlas.run(federation, tmp_path_factory.mktemp("runs"), on_round=seen.append), seen


def test_a_run_tells_its_rounds_and_gives_data_frames(run: tuple[fedatlas.Run, list[fedatlas.Seen]]) -> None:
    made, seen = run
    assert [(one.number, one.of) for one in seen] == [(0, 2), (1, 2), (2, 2)]
    assert set(seen[1].losses) == {"site-a", "site-b", "site-c"} or len(seen[1].losses) == 3
    assert seen[-1].best_score is not None and seen[-1].best_round in (1, 2)
    rows = made.results()
    assert {"site", "class", "metric", "value", "known"} <= set(rows.columns) and len(rows)
    trained = made.rounds()
    assert len(trained) == 2 * 3 and trained["loss"].notna().all()
    assert set(made.validation()["split"]) == {"validation"}
    again = fedatlas.run(made.federation, made.path.parent)
    assert again.path == made.path and again.summary() == made.summary()


def test_a_run_that_is_not_finished_says_how_far_it_is(federation: Any, tmp_path: Path) -> None:
    def stop(after: int) -> Any:
        def seen(one: fedatlas.Seen) -> None:
            if one.number == after:
                raise KeyboardInterrupt

        return seen

    with pytest.raises(KeyboardInterrupt):
        fedatlas.run(federation, tmp_path, id="one", on_round=stop(0))
    one = fedatlas.Run(tmp_path / "one")
    with pytest.raises(
        fedatlas.FedAtlasError, match=r"not finished.* 0 of 2 rounds are complete\. Go on with it"
    ):
        one.model()
    with pytest.raises(
        fedatlas.FedAtlasError, match=r"rows\.csv: missing; a run writes it when it is finished"
    ):
        one.results()
    with pytest.raises(KeyboardInterrupt):
        fedatlas.run(federation, tmp_path, id="one", on_round=stop(1))
    with pytest.warns(UserWarning, match=r"not finished, 1 of 2 rounds .* its model best is that of round 1"):
        assert one.model().net
    with pytest.raises(fedatlas.FedAtlasError, match="no such folder; a run folder is what"):
        fedatlas.Run(tmp_path / "none")


def test_a_federation_is_loaded_from_a_mapping(phantom: Path, phantom_cache: Path, federation: Any) -> None:
    plain = phantom_federation(phantom, phantom_cache)
    assert fedatlas.load(plain) == federation and fedatlas.load(plain, rounds=3).rounds == 3
    with pytest.raises(fedatlas.FedAtlasError, match=r"load: the key 'round' .*did you mean 'rounds'"):
        fedatlas.load({**plain, "round": 3})


def test_a_change_is_that_of_a_file_that_extends(federation: Any) -> None:
    changed = fedatlas.change(federation, rounds=5, local={"steps": 1}, method={"name": "fedprox"})
    assert (changed.rounds, changed.local.steps, changed.local.lr) == (5, 1, federation.local.lr)
    assert changed.method == {"name": "fedprox"} and federation.rounds == 2
    with pytest.raises(fedatlas.FedAtlasError, match="did you mean 'rounds'"):
        fedatlas.change(federation, round=5)


def test_a_model_says_of_an_array_what_it_says_of_the_file(
    run: tuple[fedatlas.Run, list[fedatlas.Seen]], phantom: Path, tmp_path: Path
) -> None:
    model = run[0].model()
    file = sorted(phantom.rglob("imagesTs/*.nii.gz"))[0]
    predict_scans(run[0].path, [[file]], tmp_path)
    (written,) = tmp_path.glob("*.nii.gz")
    labels = np.asanyarray(nib.load(written).dataobj)  # type: ignore[attr-defined]
    image: Any = nib.load(file)
    voxels, steps = np.asanyarray(image.dataobj), image.header.get_zooms()[:3]
    assert np.array_equal(model.predict(file), labels)
    assert np.array_equal(model(voxels, affine=image.affine), labels)
    assert np.array_equal(model(voxels, steps, axes="".join(nib.aff2axcodes(image.affine))), labels)  # type: ignore[attr-defined]
    assert model.net(torch.zeros(1, 3, 16, 16)).shape == (1, len(model.classes), 16, 16)


def test_a_model_of_findings_takes_an_array(findings: Path, phantom_cache: Path, tmp_path: Path) -> None:
    chosen = findings_federation(findings, phantom_cache / "findings") | {"rounds": 1}
    model = fedatlas.run(parse_federation(chosen, base=Path()), tmp_path).model("last")
    file = sorted(findings.rglob("*.png"))[0]
    said = model.predict(file)
    assert list(said) == list(model.classes) and model(np.asarray(Image.open(file).convert("L"))) == said
    with pytest.raises(fedatlas.FedAtlasError, match="from 0"):
        model(np.full((20, 20), 7.0))


@pytest.mark.parametrize(
    ("image", "given", "message"),
    [
        (np.zeros((4, 4)), {"spacing": (1, 1, 1)}, "of shape"),
        (np.zeros((4, 4, 4)), {}, "spacing: missing"),
        (np.zeros((4, 4, 4)), {"spacing": (1, 1)}, "three numbers"),
        (np.zeros((4, 4, 4)), {"spacing": (1, 1, 0)}, "above 0"),
        (np.zeros((4, 4, 4)), {"spacing": (1, 1, 1), "axes": "RLS"}, "one of L/R"),
        (np.full((4, 4, 4), np.nan), {"spacing": (1, 1, 1)}, "NaN"),
        (np.zeros((4, 4, 4)), {"affine": np.zeros((4, 4))}, "invertible"),
        (np.array([[["a"]]]), {"spacing": (1, 1, 1)}, "expected are numbers"),
    ],
)
def test_a_bad_array_is_refused(
    image: np.ndarray, given: dict[str, Any], message: str, run: tuple[fedatlas.Run, list[fedatlas.Seen]]
) -> None:
    with pytest.raises(fedatlas.FedAtlasError, match=message):
        run[0].model()(image, **given)


@pytest.fixture
def registered() -> Iterator[None]:
    """What a notebook does: FedAvg and its loss under names of their own, the loss with a factor."""

    @options
    class Scaled(MarginalDiceCE):
        """The default loss, times a factor."""

        exclusive: ClassVar[bool] = True
        factor: float = option(1.0, "The factor.")

        def __call__(self, outputs: Any, target: Any, known: Any) -> Any:
            return self.factor * super().__call__(outputs, target, known)

    fedatlas.register_loss("scaled")(Scaled)
    fedatlas.register_method("mine")(methods.get("fedavg"))
    yield
    methods.OTHERS.here.clear()
    losses.OTHERS.here.clear()


@pytest.mark.usefixtures("registered")
def test_a_registered_method_and_loss_give_the_bits_of_those_they_repeat(
    run: tuple[fedatlas.Run, list[fedatlas.Seen]], tmp_path: Path
) -> None:
    ours = {"name": "mine", "loss": {"name": "scaled", "options": {"factor": 1.0}}}
    changed = fedatlas.change(run[0].federation, method=ours)
    again = fedatlas.run(changed, tmp_path)
    net, theirs = again.model("last").net.state_dict(), run[0].model("last").net.state_dict()
    assert all(torch.equal(net[name], theirs[name]) for name in theirs)
    other = fedatlas.change(changed, method={"loss": {"options": {"factor": 0.5}}})
    assert other.method["name"] == "mine"
    with pytest.raises(fedatlas.FedAtlasError, match=r"entry point of the group fedatlas\.methods"):
        fedatlas.run(fedatlas.change(changed, engine={"workers": 1}), tmp_path, id="workers")


def test_a_net_of_ones_own(run: tuple[fedatlas.Run, list[fedatlas.Seen]], tmp_path: Path) -> None:
    class Plain(Net):
        def __init__(self, in_channels: int, classes: int) -> None:
            super().__init__(in_channels, classes, (1, 1))
            self.conv = torch.nn.Conv2d(in_channels, classes, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

    @options
    class Plainly:
        """One convolution."""

        bare: bool = option(False, "Give a module that is no Net.")

        def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> Any:
            return torch.nn.Conv2d(1, classes, 1) if self.bare else Plain(in_channels, classes)

    try:
        fedatlas.register_net("plainly")(Plainly)
        theirs = fedatlas.change(run[0].federation, net={"name": "plainly"}, rounds=1)
        assert isinstance(fedatlas.run(theirs, tmp_path).model("last").net, Plain)
        assert "plainly" in catalogue("nets")
        with pytest.raises(
            fedatlas.FedAtlasError, match=r"Plain: does not name its parts.*parts\(self\).*add-a-net"
        ):
            fedatlas.run(fedatlas.change(theirs, method={"name": "fedbn", "keep": ["decoder"]}), tmp_path)
        with pytest.raises(
            fedatlas.FedAtlasError, match=r"build gave a Conv2d; expected .* fedatlas\.nets\.Net"
        ):
            fedatlas.run(fedatlas.change(theirs, net={"bare": True}), tmp_path)
        with pytest.raises(fedatlas.FedAtlasError, match=r"entry point of the group fedatlas\.nets"):
            fedatlas.run(fedatlas.change(theirs, engine={"workers": 1}), tmp_path, id="workers")
        with pytest.raises(fedatlas.FedAtlasError, match="is there already"):
            fedatlas.register_net("unet")
        fedatlas.register_net("no_net")(Plain)
        with pytest.raises(fedatlas.FedAtlasError, match=r"net no_net: Plain is no class of options"):
            fedatlas.change(theirs, net={"name": "no_net"})
    finally:
        nets.OTHERS.here.clear()


@pytest.mark.usefixtures("registered")
def test_names_of_the_package_are_not_taken_and_a_cell_may_run_twice() -> None:
    with pytest.raises(fedatlas.FedAtlasError, match="is there already"):
        fedatlas.register_method("fedavg")
    with pytest.raises(fedatlas.FedAtlasError, match="is there already"):
        fedatlas.register_loss("auto")
    second = methods.get("fedprox")
    fedatlas.register_method("mine")(second)
    assert methods.get("mine") is second and "mine" in methods.names()


def test_a_method_of_an_entry_point_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_package")
    module.Theirs = methods.get("fedavg")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_package", module)
    entries = {
        "theirs": EntryPoint("theirs", "their_package:Theirs", "fedatlas.methods"),
        "broken": EntryPoint("broken", "no_such_package:X", "fedatlas.methods"),
    }
    monkeypatch.setattr(methods.OTHERS, "installed", entries)
    assert methods.get("theirs") is methods.get("fedavg")
    methods.OTHERS.require_elsewhere("theirs", "there are workers")
    with pytest.raises(fedatlas.FedAtlasError, match="does not load"):
        methods.get("broken")
    with pytest.raises(fedatlas.FedAtlasError, match="did you mean 'theirs'"):
        methods.get("their")


def test_pandas_is_asked_for_by_name(
    run: tuple[fedatlas.Run, list[fedatlas.Seen]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fedatlas.FedAtlasError, match=r"pip install 'fedatlas\[notebook\]'"):
        run[0].results()
