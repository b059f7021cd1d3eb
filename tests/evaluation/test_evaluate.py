"""evaluate.py: what a site answers, and what it keeps for itself, on volumes of a few voxels."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedatlas.core.contract import Member, functions_of
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.options import from_dict
from fedatlas.evaluation.evaluate import Candidate, Evaluation, candidates_of, question
from fedatlas.evaluation.pictures import planes
from fedatlas.evaluation.postprocess import Postprocess
from fedatlas.evaluation.statistics import COLUMNS, POST
from fedatlas.evaluation.voxels import VoxelEvaluator, decide
from fedatlas.federation.session import Finished, in_groups
from fedatlas.transport import wire

SPACE = LabelSpace(("background", "liver", "a/b"))


class Paints(nn.Module):
    """Class 1 where the image is about 1, class 2 where it is about 2; `sure` scales the logits."""

    def __init__(self, sure: float = 10.0, moved: float = 0.0) -> None:
        super().__init__()
        self.sure, self.moved = nn.Parameter(torch.tensor(sure)), nn.Parameter(torch.tensor(moved))

    def forward(self, x: Tensor) -> Tensor:
        value = (x[:, :1] - self.moved).clamp(min=0)
        return -self.sure * torch.cat([(value - c).abs() for c in range(3)], dim=1)


@dataclass
class FakeVolume:
    """Its raw grid is the federation's with every voxel doubled along the last axis."""

    case: str
    labels: np.ndarray
    shown: np.ndarray
    known: Tensor
    scored: Tensor
    spacing: tuple[float, ...] = (1.0, 2.0, 4.0)
    raw_spacing: tuple[float, ...] = (1.0, 2.0, 2.0)
    whole: bool = False
    read: list[str] = field(default_factory=list)

    @property
    def image(self) -> Tensor:
        return torch.from_numpy(self.shown).float()[None]

    def truth(self, grid: str) -> np.ndarray:
        self.read.append(grid)
        return self.labels if grid == "federation" else self.labels.repeat(2, axis=-1)

    def restore(self, probabilities: Tensor) -> np.ndarray:
        return probabilities.argmax(0).numpy().repeat(2, axis=-1)


@dataclass
class FakeSite:
    name: str
    folder: Path
    cases: list[FakeVolume]

    def network(self, model: dict[str, Tensor] | None = None, name: str = "main") -> nn.Module:
        net = Paints()
        assert model is not None
        net.load_state_dict(model)
        return net

    def volumes(self, split: str) -> Iterator[FakeVolume]:
        return iter(self.cases if split == "test" else [])


def volume(case: str, *, shift: int = 0, known: tuple[int, ...] = (0, 1), scored=(0, 1, 2)) -> FakeVolume:
    """Two bars, 4 long, along the first axis; what the net sees is moved by `shift` along it."""
    labels = np.zeros((8, 6, 3), np.uint8)
    labels[1:5, 1, 1], labels[1:5, 4, 2] = 1, 2
    shown = np.roll(labels, shift, axis=0)
    flags = [torch.tensor([c in held for c in range(3)]) for held in (known, scored)]
    return FakeVolume(case, labels, shown, *flags)


def member(classes: list[int] | None = None, **values: float) -> dict[str, Any]:
    net = Paints(**values)
    return {"model": {k: v.detach().clone() for k, v in net.state_dict().items()}, "classes": classes}


def ask(site: FakeSite, *members: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    evaluator = VoxelEvaluator(Evaluation(overlays=True), SPACE, (4, 4), 0)
    what: dict[str, Any] = {"split": "test", "model": "best", "round": 7, "grid": "original"}
    what |= {"metrics": ["dice"], "overlays": False} | changes
    reply = functions_of(evaluator)["evaluate"](site, list(members or [member()]), **what)  # type: ignore[arg-type]
    assert sorted(reply) == ["rows"]
    return reply["rows"]


@pytest.mark.parametrize(
    "change", [{"split": "../victim"}, {"split": "/victim"}, {"model": ".."}, {"model": "local/../x"}]
)
def test_pictures_lie_in_the_sites_folder_alone(change, tmp_path) -> None:
    """Split and model are named by the server."""
    (tmp_path / ".data.part").mkdir()
    with pytest.raises((ValueError, FederationError), match="the split"):
        ask(FakeSite("s", tmp_path / "site", [volume("p1")]), overlays=True, **{"model": "data"} | change)
    assert [path.name for path in tmp_path.rglob("*")] == [".data.part"]


def test_a_row_for_every_case_scored_class_and_metric(tmp_path) -> None:
    cases = [volume("p1"), volume("p2", shift=1, scored=(0, 1))]
    rows = ask(FakeSite("s", tmp_path, cases), metrics=["dice", "hd95"])
    assert [(r["case"], r["class"], r["metric"]) for r in rows] == [
        ("p1", "liver", "dice"),
        ("p1", "liver", "hd95"),
        ("p1", "a/b", "dice"),
        ("p1", "a/b", "hd95"),
        ("p2", "liver", "dice"),
        ("p2", "liver", "hd95"),
    ]
    assert tuple(rows[0]) == COLUMNS
    assert [r["value"] for r in rows[:4]] == [1, 0, 1, 0]
    # moved by one of four voxels of 1 mm: of eight surface voxels two are 1 mm away, more than 5 %
    assert rows[4]["value"] == 0.75 and rows[5]["value"] == 1.0
    assert [r["known"] for r in rows] == [True, True, False, False, True, True]
    assert {(r["site"], r["round"], r["split"]) for r in rows} == {("s", 7, "test")}
    assert not list(tmp_path.iterdir())


def test_both_grids_are_scored_in_millimetres(tmp_path) -> None:
    """A bar seen one slice too high: 4 mm on the federation's grid; on the raw grid two slices of 2 mm, of which
    the nearer one is 2 mm away."""
    case = volume("p")
    case.shown = np.roll(case.labels, -1, axis=2)
    site = FakeSite("s", tmp_path, [case])
    (liver, _) = ask(site, grid="federation", metrics=["hd"])
    assert liver["value"] == 4.0 and case.read == ["federation"]
    (liver, _) = ask(site, grid="original", metrics=["hd"])
    assert liver["value"] == 4.0 and case.read == ["federation", "original"]
    (liver, _) = ask(site, grid="original", metrics=["asd"])
    assert liver["value"] == 3.0


def test_a_member_speaks_for_its_classes_alone(tmp_path) -> None:
    site = FakeSite("s", tmp_path, [volume("p")])
    rows = ask(site, member([1]))
    assert [(r["class"], r["value"]) for r in rows] == [("liver", 1.0), ("a/b", 0.0)]
    rows = ask(site, member([1]), member([2]))
    assert [r["value"] for r in rows] == [1.0, 1.0]


def test_the_surer_member_wins(tmp_path) -> None:
    site = FakeSite("s", tmp_path, [volume("p")])
    # the second sees every value lower by 1: class 2 as class 1
    right, wrong = member(sure=10.0), member(sure=5.0, moved=1.0)
    assert [r["value"] for r in ask(site, right, wrong)] == [1.0, 1.0]
    assert ask(site, member(sure=5.0), member(sure=10.0, moved=1.0))[1]["value"] == 0.0


def test_what_is_missed_is_told(tmp_path) -> None:
    blind = volume("p")
    blind.shown = np.zeros_like(blind.labels)
    nothing = volume("q")
    nothing.labels = np.zeros_like(nothing.labels)
    rows = ask(FakeSite("s", tmp_path, [blind, nothing]), metrics=["dice", "asd"])
    told = {(r["case"], r["metric"]): (r["value"], r["reason"]) for r in rows}
    assert told == {
        ("p", "dice"): (0.0, ""),
        ("p", "asd"): (None, "prediction empty"),
        ("q", "dice"): (None, "truth empty"),
        ("q", "asd"): (None, "truth empty"),
    }


@pytest.fixture
def pictured(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    cases = [volume(f"p{shift}", shift=shift) for shift in (1, 0, 3, 2)]
    rows = ask(FakeSite("s", tmp_path, cases), overlays=True, model="local/x")
    return tmp_path / "overlays" / "test" / "local_x", rows


def test_overlays_are_the_worst_median_and_best_and_every_classs_worst(pictured) -> None:
    folder, _ = pictured
    names = [f"case--{rank}.npz" for rank in ("best", "median", "worst")]
    names += [f"class-{c}--worst.npz" for c in ("a%2Fb", "liver")]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in folder.parent.iterdir()] == ["local_x"], "scratch files are left"
    for name, case, dice, about in (
        ("case--worst", "p3", 0.25, ""),
        ("case--median", "p2", 0.5, ""),
        ("case--best", "p0", 1.0, ""),
        ("class-liver--worst", "p3", 0.25, "liver"),
    ):
        with np.load(folder / f"{name}.npz", allow_pickle=False) as kept:
            assert (str(kept["case"]), float(kept["value"]), str(kept["class"])) == (case, dice, about)
            assert kept["names"].tolist() == ["liver", "a/b"] and kept["dice"].tolist() == [dice, dice]


def test_an_overlay_shows_three_whole_slices_as_viewers_do(pictured) -> None:
    """The axes point to the right, the front and up; the slices are those with the largest areas of the class."""
    folder, _ = pictured
    with np.load(folder / "class-a%2Fb--worst.npz", allow_pickle=False) as kept:
        stored = dict(kept)
    truth = np.zeros((8, 6, 3), bool)
    truth[1:5, 4, 2] = True
    moved = np.roll(truth, 3, axis=0)
    for plane, (axis, at), spacing in (
        ("axial", (2, 2), [2.0, 1.0]),
        ("coronal", (1, 4), [4.0, 1.0]),
        ("sagittal", (0, 1), [4.0, 2.0]),
    ):
        assert np.array_equal(stored[f"{plane}-truth"][1], truth.take(at, axis).T[::-1, ::-1]), plane
        assert np.array_equal(stored[f"{plane}-prediction"][1], moved.take(at, axis).T[::-1, ::-1]), plane
        assert stored[f"{plane}-spacing"].tolist() == spacing
        image = stored[f"{plane}-image"]
        assert image.dtype == np.float32 and 0 <= image.min() <= image.max() <= 1
    assert stored["axial-image"].max() == 1


def test_axes_of_the_grid_may_point_anywhere() -> None:
    """A mark at the patient's right, front and top is at the upper left of the axial and the coronal slice."""
    voxels = np.zeros((4, 5, 6), np.float32)
    voxels[3, 4, 5] = 1
    for letters, array in (("RAS", voxels), ("LPS", voxels[::-1, ::-1]), ("ASR", voxels.transpose(1, 2, 0))):
        mask = (array > 0)[None]
        steps = {"RAS": (1, 2, 3), "LPS": (1, 2, 3), "ASR": (2, 3, 1)}[letters]
        found = planes(array, mask, mask, steps, letters)
        for plane, shape, spacing in (
            ("axial", (5, 4), [2, 1]),
            ("coronal", (6, 4), [3, 1]),
            ("sagittal", (6, 5), [3, 2]),
        ):
            shown = found[f"{plane}-truth"][0]
            assert shown.shape == shape and np.argwhere(shown).tolist() == [[0, 0]]
            assert found[f"{plane}-spacing"].tolist() == spacing


def test_the_slice_is_chosen_by_the_truth(tmp_path) -> None:
    case = volume("p", scored=(0, 1))
    case.shown = case.labels.copy()
    case.shown[:, :, 2] = 1
    ask(FakeSite("s", tmp_path, [case]), overlays=True)
    with np.load(tmp_path / "overlays" / "test" / "best" / "class-liver--worst.npz") as kept:
        assert kept["axial-truth"][0].sum() == kept["axial-prediction"][0].sum() == 4
        assert kept["scored"].tolist() == [True, False] and not kept["axial-truth"][1].any()


def test_overlays_are_read_by_the_report(pictured) -> None:
    from fedatlas.report.read import Overlay

    folder, _ = pictured
    found = Overlay(folder / "case--best.npz", "s", "p0", 1.0, "best", "", {}).planes()
    assert [plane.name for plane in found] == ["axial", "coronal", "sagittal"]
    assert found[0].image.shape == found[0].truth["liver"].shape == (6, 8) and found[0].spacing == (2.0, 1.0)


def test_a_second_evaluation_replaces_the_overlays(pictured, tmp_path) -> None:
    folder, _ = pictured
    ask(FakeSite("s", tmp_path, [volume("new", scored=(0, 1))]), overlays=True, model="local/x")
    assert sorted(p.name for p in folder.iterdir()) == ["case--best.npz", "class-liver--worst.npz"]


def test_no_voxel_is_sent(pictured) -> None:
    _, rows = pictured
    tree = wire.decode(wire.encode({"rows": rows}))
    assert tree == {"rows": rows}
    assert all(
        value is None or isinstance(value, bool | int | float | str) for r in rows for value in r.values()
    )
    assert len(rows) == 4 * 2


def models(*members: dict[str, Any]) -> list[Member]:
    return [Member.from_payload(one) for one in members]


def test_what_several_models_share_travels_once() -> None:
    right, wrong, again = member([1]), member([2], moved=1.0), member([2], moved=1.0)
    given = [
        Candidate("best", 3, models(right, wrong), overlays=True),
        Candidate("last", 4, models(again, member())),
        Candidate("local/a", 4, models(right)),
    ]
    sent = wire.decode(wire.encode(question(given)))
    assert isinstance(sent, dict) and len(sent["models"]) == 2
    assert [[m["model"] for m in one["members"]] for one in sent["asked"]] == [[0, 1], [1, 0], [0]]
    back = candidates_of(**sent)
    assert [(c.name, c.round, c.overlays) for c in back] == [(c.name, c.round, c.overlays) for c in given]
    for one, other in zip(back, given, strict=True):
        assert [m.classes for m in one.members] == [m.classes for m in other.members]
        assert [m.model for m in one.members] == [m.model for m in other.members]
    assert back[0].members[1].model is back[1].members[0].model


def test_several_models_are_scored_as_one_by_one(tmp_path) -> None:
    """And every case is read once, and every net asked once per case."""
    asked = []

    class Site(FakeSite):
        def network(self, model: Any = None, name: str = "main") -> nn.Module:
            net = super().network(model, name)
            net.register_forward_pre_hook(lambda module, inputs: asked.append(len(inputs[0])))
            return net

    right, wrong = member([1]), member([2], moved=1.0)
    given = {"best": [right, wrong], "last": [member(sure=3.0)], "local/a": [right], "local/b": [wrong]}
    cases = [volume("p1"), volume("p2", shift=1)]
    site, what = Site("s", tmp_path, cases), {"split": "test", "grid": "original", "metrics": ["dice", "asd"]}
    alone = [
        ask(site, *members, model=name, overlays=name == "best", **what) for name, members in given.items()
    ]
    pictures = {p.name: p.read_bytes() for p in (tmp_path / "overlays" / "test" / "best").iterdir()}
    asked.clear()
    for case in cases:
        case.read.clear()
    sent = question([Candidate(n, 7, models(*members), n == "best") for n, members in given.items()])
    evaluator = VoxelEvaluator(Evaluation(overlays=True), SPACE, (4, 4), 0)
    rows = functions_of(evaluator)["evaluate_several"](site, **sent, **what)["rows"]  # type: ignore[arg-type]
    assert rows == [row for one in alone for row in one]
    assert asked == 2 * 3 * [8, 8, 2], "windows of two cases, and of three different nets"
    assert [case.read.count("original") for case in cases] == [1, 1]
    assert {p.name: p.read_bytes() for p in (tmp_path / "overlays" / "test" / "best").iterdir()} == pictures


def test_models_are_asked_in_groups_of_limited_size() -> None:
    one = member()["model"]
    size = sum(tensor.nbytes for tensor in one.values())
    values = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0, "e": 3.0}

    def finished(name: str) -> Finished:
        return Finished(name, 1, lambda: lambda site: models(member(sure=values[name])))

    wanted = [finished(name) for name in values]
    for most, expected in (
        (0, "a|b|c|d|e"),
        (size, "a b|c|d e"),
        (2 * size, "a b c|d e"),
        (9 * size, "a b c d e"),
    ):
        groups = list(in_groups(wanted, ["s", "t"], most))
        assert "|".join(" ".join(model.name for model in group) for group in groups) == expected
        assert all(
            model.open()("s")[0].model["sure"] == values[model.name] for group in groups for model in group
        )


@pytest.mark.parametrize(("classes", "kind"), [(255, np.uint8), (300, np.int16)])
def test_the_class_of_a_voxel_has_room_for_all_classes(classes: int, kind: Any) -> None:
    probabilities = torch.zeros(classes, 2, 2)
    probabilities[classes - 1, 0] = 1
    found = decide(probabilities, True)
    assert found.dtype == kind and found.tolist() == [[classes - 1] * 2, [0, 0]]


def test_overlapping_classes(tmp_path) -> None:
    """Without exclusive classes a voxel may be of both: sigmoid, masks, no background."""

    class Masks(FakeVolume):
        def truth(self, grid: str) -> np.ndarray:
            return np.stack([self.labels > 0, self.labels > 1]).astype(np.uint8)

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:, :1] - 0.5, x[:, :1] - 1.5], dim=1)

    class Site(FakeSite):
        def network(self, model: Any = None, name: str = "main") -> nn.Module:
            return Both()

    one = volume("p")
    case = Masks(one.case, one.labels, one.shown, torch.tensor([True, True]), torch.tensor([True, True]))
    evaluator = VoxelEvaluator(Evaluation(), LabelSpace(("organ", "lesion"), exclusive=False), (4, 4), 0)
    found = evaluator.evaluate(
        Site("s", tmp_path, [case]), [member()], "test", "best", 1, "federation", ["dice"], True
    )
    assert [(r["class"], r["value"]) for r in found["rows"]] == [("organ", 1.0), ("lesion", 1.0)]
    with np.load(tmp_path / "overlays" / "test" / "best" / "case--best.npz") as kept:
        assert (
            np.array_equal(kept["axial-truth"], kept["axial-prediction"])
            and kept["axial-truth"].any((1, 2)).all()
        )


def test_bad_options() -> None:
    with pytest.raises(FederationError, match="which selects, must be in"):
        from_dict(Evaluation, {"round_metrics": ["asd"]}, what="evaluation")
    with pytest.raises(FederationError, match="validation"):
        from_dict(Evaluation, {"validation": 1.0}, what="evaluation")


def test_a_lesion_that_is_predicted_counts_as_its_organ_at_a_site_with_whole_organs(tmp_path) -> None:
    space = LabelSpace(("background", "kidney", "tumour"), groups=((1, 2),))
    case = replace(volume("p", scored=(0, 1)), whole=True)
    evaluator = VoxelEvaluator(Evaluation(), space, (4, 4), 0)
    for grid in ("original", "federation"):
        what = {"split": "test", "model": "best", "round": 1, "metrics": ["dice"], "overlays": False}
        reply = functions_of(evaluator)["evaluate"](
            FakeSite("a", tmp_path, [case]), [member()], grid=grid, **what
        )
        assert [(row["class"], row["value"]) for row in reply["rows"]] == [("kidney", 1.0)]


@pytest.mark.parametrize("channels", ["exclusive", "independent"])
def test_there_classes_are_processed_before_they_are_merged(tmp_path, channels) -> None:
    """As in labels that are written: the tumour, of one component, is not a small one of its organ."""
    space = LabelSpace(("background", "kidney", "tumour"), groups=((1, 2),))
    case = replace(volume("p", scored=(0, 1)), whole=True)
    case.labels[2:, 4, 2] = case.shown[2:, 4, 2] = 0
    options = Evaluation(postprocess=Postprocess(share=0.9, channels=channels))
    reply = functions_of(VoxelEvaluator(options, space, (4, 4), 0))["evaluate"](
        FakeSite("a", tmp_path, [case]),
        [member()],
        split="test",
        model="best",
        round=1,
        metrics=["dice"],
        overlays=False,
        grid="original",
    )
    found = [(row["model"], row["class"], row["value"]) for row in reply["rows"]]
    assert found == [("best", "kidney", 1.0), (f"{POST}best", "kidney", 1.0)]
