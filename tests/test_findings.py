"""Findings of the whole image beside segmentation: label space, loss, inference, scores."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedatlas import losses, nets
from fedatlas.core.batch import Batch
from fedatlas.core.contract import Member
from fedatlas.core.errors import FederationError
from fedatlas.core.labels import LabelSpace
from fedatlas.core.outputs import Mixed, voxel_logits
from fedatlas.evaluation.statistics import rows_text
from fedatlas.evaluation.voxels import Findings
from fedatlas.federation.session import summary
from fedatlas.learning import inference
from fedatlas.learning.inference import Inference, Prediction, gated, together
from fedatlas.losses.masked import masked_bce

ALL = Member({})
SPACE = LabelSpace(("lung", "air"), (), False, "voxel", ("has air", "tuberculosis"), (1, None))


def batch(finding_known: torch.Tensor) -> Batch:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 1, 8, 8, generator=generator)
    target = (torch.rand(2, 2, 8, 8, generator=generator) > 0.5).float()
    known = torch.tensor([[True, False], [True, True]])
    return Batch(image, target, known, ["a", "b"], torch.tensor([[1.0, 0.0], [0.0, 1.0]]), finding_known)


def test_a_space_keeps_its_findings_and_refuses_those_that_do_not_fit() -> None:
    assert LabelSpace.from_plain(SPACE.to_plain()) == SPACE
    assert len(SPACE) == 2
    plain = {"names": ["lung"], "groups": [], "exclusive": False}
    assert LabelSpace.from_plain(plain).findings == ()
    with pytest.raises(FederationError, match="name of another finding or of a class"):
        LabelSpace(("lung",), (), False, "voxel", ("lung",), (0,))
    with pytest.raises(FederationError, match="is about class 0, which is not in the foreground"):
        LabelSpace(("background", "lung"), (), True, "voxel", ("ill",), (0,))
    with pytest.raises(FederationError, match="stand beside classes of voxels"):
        LabelSpace(("ill",), (), False, "image", ("worse",), (None,))


def test_the_loss_is_that_of_the_voxels_and_the_masked_one_of_the_findings() -> None:
    known = torch.tensor([[True, False], [True, True]])
    given = batch(known)
    loss = losses.make(losses.LossChoice(), SPACE)  # type: ignore[call-arg]
    z, f = torch.randn(2, 2, 8, 8), torch.randn(2, 2, requires_grad=True)
    voxels = loss(z, given.target, given.known)
    both = losses.on_batch(loss, Mixed(z, f), given, 0.5)
    assert given.finding is not None
    torch.testing.assert_close(both, voxels + 0.5 * masked_bce(f, given.finding, known))
    both.backward()
    assert f.grad is not None
    assert f.grad[0, 1] == 0  # not annotated
    assert (f.grad[known] != 0).all()


def test_without_an_annotated_finding_no_optimizer_moves_their_head() -> None:
    net = nets.build(
        "unet", {"filters": [8, 8, 8]}, in_channels=1, classes=2, spatial_dims=2, seed=0, findings=2
    )
    before = {name: value.clone() for name, value in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    site = SimpleNamespace(labels=SimpleNamespace(space=SPACE))
    loss = losses.supervised(losses.LossChoice(), site)  # type: ignore[arg-type,call-arg]
    for known in (torch.zeros(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool)):
        optimizer.zero_grad(set_to_none=True)
        loss(net, batch(known)).backward()
        optimizer.step()
        moved = {name for name, value in net.named_parameters() if not torch.equal(value, before[name])}
        head = {name for name in before if name.startswith("image_head")}
        assert head
        assert (moved & head == head) if known.any() else not moved & head
        assert moved - head


class Says(nn.Module):
    """A net whose voxels are sure of every class, and whose findings are as given, by the mean of the image."""

    def __init__(self, findings: list[float]) -> None:
        super().__init__()
        self.findings = nn.Parameter(torch.tensor(findings))

    def forward(self, x: torch.Tensor) -> Mixed:
        voxels = torch.full((len(x), 2, *x.shape[2:]), 4.0)
        return Mixed(voxels, self.findings + x.mean((1, 2, 3))[:, None])


def predict(findings: list[float], image: torch.Tensor) -> Prediction:
    return inference.predict(Says(findings), image, (8, 8), 0, Inference(), exclusive=False)  # type: ignore[call-arg]


def test_a_finding_of_a_volume_is_that_of_the_slice_that_says_most() -> None:
    image = torch.zeros(1, 8, 8, 3)
    image[..., 1] = 2.0
    found = predict([0.0, -1.0], image).findings
    torch.testing.assert_close(found, torch.tensor([2.0, 1.0]).sigmoid())


def test_a_class_is_emptied_where_its_finding_is_improbable() -> None:
    image = torch.zeros(1, 8, 8, 1)
    no, yes = predict([-1.0, -1.0], image), predict([1.0, -1.0], image)
    empty = inference.together([(no, ALL)], SPACE, Inference()).voxels
    assert (empty[1] == 0).all() and (empty[0] > 0.9).all()
    assert (inference.together([(yes, ALL)], SPACE, Inference()).voxels[1] > 0.9).all()
    assert (inference.together([(no, ALL)], SPACE, Inference(gate=None)).voxels[1] > 0.9).all()
    exclusive = LabelSpace(("background", "air"), (), True, "voxel", ("has air",), (1,))
    found = Prediction(torch.tensor([[0.2], [0.8]]), torch.tensor([0.1]))
    emptied = inference.together([(found, ALL)], exclusive, Inference()).voxels
    torch.testing.assert_close(emptied, torch.tensor([[1.0], [0.0]]))


def test_a_finding_is_told_by_the_models_that_may_speak_for_its_class() -> None:
    image = torch.zeros(1, 8, 8, 1)
    a, b = predict([-3.0, 0.0], image), predict([3.0, 2.0], image)
    merged = inference.together([(a, Member({}, (0,))), (b, Member({}, (0, 1)))], SPACE, Inference())
    assert merged.findings is not None
    mean = (torch.tensor(0.0).sigmoid() + torch.tensor(2.0).sigmoid()) / 2
    torch.testing.assert_close(merged.findings, torch.stack([torch.tensor(3.0).sigmoid(), mean]))
    nobody = inference.together([(a, Member({}, (0,))), (b, Member({}, (0,)))], SPACE, Inference())
    assert nobody.findings is not None and nobody.findings[0].isnan()


def test_a_finding_is_told_by_the_models_that_met_it() -> None:
    """Whatever classes they speak for: no other head was ever trained for it."""
    image = torch.zeros(1, 8, 8, 1)
    a, b = predict([-3.0, 0.0], image), predict([3.0, 2.0], image)
    trained, untrained = Member({}, (), findings=(1,)), Member({}, (0, 1), findings=())
    merged = inference.together([(a, trained), (b, untrained)], SPACE, Inference())
    assert merged.findings is not None and merged.findings[1] == torch.tensor(0.0).sigmoid()
    assert merged.findings[0].isnan()  # as of a class that nobody speaks for
    assert torch.equal(merged.voxels, b.voxels)
    assert Member.from_payload(trained.to_payload()) == trained and "findings" not in ALL.to_payload()


def test_findings_are_scored_over_the_cases_that_have_a_truth() -> None:
    findings = Findings(SPACE)
    for n, (score, truth) in enumerate([(0.9, 1.0), (0.2, 0.0), (0.8, 0.0), (0.6, 1.0)]):
        volume = SimpleNamespace(
            case=str(n),
            finding=torch.tensor([truth, 0.0]),
            finding_known=torch.tensor([n == 0, False]),
            finding_scored=torch.tensor([True, False]),
        )
        findings.see(volume, torch.tensor([score, 0.5]))  # type: ignore[arg-type]
    rows = {cell["metric"]: (cell["value"], known) for cell, known in findings.cells(0.5)}
    assert rows["n_positive"] == (2.0, True) and rows["n_negative"] == (2.0, True)
    assert rows["auroc"] == (0.75, True)  # (.9, .6) against (.2, .8): three of four pairs in order
    assert rows["sensitivity"] == (1.0, True) and rows["specificity"] == (0.5, True)
    assert {cell["class_"] for cell, _ in findings.cells(None)} == {"has air"}
    nothing = Findings(SPACE)
    nothing.see(volume, None)  # type: ignore[arg-type]
    assert list(nothing.cells(0.5)) == []


def test_the_logits_of_any_output() -> None:
    z = torch.zeros(1, 2, 4, 4)
    for outputs in (z, [z, z[..., ::2]], Mixed(z, torch.zeros(1, 1)), Mixed([z], torch.zeros(1, 1))):
        assert voxel_logits(outputs) is z


def test_a_run_with_outlines_and_findings_is_summed_up_by_both(tmp_path) -> None:
    place = {"split": "test", "grid": "original", "model": "best", "round": 3, "site": "a"}
    place |= {"known": True, "reason": ""}
    dice = [
        {**place, "case": case, "class": "lung", "metric": "dice", "value": value}
        for case, value in (("c1", 0.5), ("c2", 1.0), ("c3", None))
    ]
    auroc = {**place, "case": "", "class": "has air", "metric": "auroc", "value": 0.7}
    expected = {
        "dice": {"test": {"best": {"a": {"lung": 0.75}}}},
        "auroc": {"test": {"best": {"a": {"has air": 0.7}}}},
    }
    for rows, metrics in (([*dice, auroc], ["dice", "auroc"]), (dice, ["dice"]), ([auroc], ["auroc"])):
        (tmp_path / "rows.csv").write_text(rows_text(rows))
        said = summary(tmp_path)
        assert list(said) == ["run", "best", *metrics]
        assert all(said[metric] == expected[metric] for metric in metrics)
    for rows, empty in (([], "dice"), ([{**auroc, "value": None}], "auroc")):
        (tmp_path / "rows.csv").write_text(rows_text(rows))
        assert summary(tmp_path) == {"run": str(tmp_path), "best": None, empty: {}}


def test_a_finding_as_probable_as_the_gate_empties_nothing() -> None:
    space = LabelSpace(("lung", "air"), (), False, "voxel", ("has air", "tuberculosis"), (1, None))
    told = Prediction(torch.full((2, 1), 0.9), torch.tensor([0.5, 0.0]))
    assert gated(told, space, 0.5).voxels[1].item() == pytest.approx(0.9)
    assert gated(told, space, 0.51).voxels[1].item() == 0


def test_the_gate_is_that_of_the_options() -> None:
    image = torch.zeros(1, 8, 8, 1)
    told = predict([0.5, -1.0], image)  # a probability of .62
    for gate, kept in ((0.5, True), (0.6, True), (0.65, False)):
        voxels = together([(told, ALL)], SPACE, Inference(gate=gate)).voxels
        assert bool((voxels[1] > 0.9).all()) == kept == bool(voxels[1].any()), gate
