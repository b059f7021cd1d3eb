"""Every comparison file of the repository can be read, in each of its profiles."""

from pathlib import Path

import pytest

from fedatlas.compare.plan import load_comparison
from fedatlas.federation.design import space_of
from fedatlas.federation.file import make_method
from fedatlas.federation.yaml import read_yaml
from fedatlas.methods.fedatlas import NO_CLASS_LOST, FedAtlas

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
READ = {path: read_yaml(path) for path in sorted(EXPERIMENTS.rglob("*.yaml"))}
PROFILES = [
    (path, profile)
    for path, raw in READ.items()
    if "arms" in raw
    for profile in raw.get("profiles", {None: {}})
]


@pytest.mark.parametrize(
    ("path", "profile"),
    PROFILES,
    ids=[f"{path.relative_to(EXPERIMENTS)}-{profile}" for path, profile in PROFILES],
)
def test_a_comparison_can_be_read(path: Path, profile: str | None, tmp_path: Path) -> None:
    comparison = load_comparison([path], profile=profile, data=tmp_path, runs=tmp_path)
    assert comparison.arms
    assert comparison.seeds
    for runs in comparison.federations.values():
        federation = next(iter(runs.values()))
        if federation.labels.names:  # else they follow from the sites' data
            # such as a loss that is for other classes than those of the method
            make_method(federation).check(space_of(federation, {}))


@pytest.mark.parametrize("name", ["compare", "few", "annotators"])
def test_matched_arms_have_loss_and_server_step_of_fedatlas(name: str, tmp_path: Path) -> None:
    comparison = load_comparison(
        [EXPERIMENTS / "head-neck" / f"{name}.yaml"], profile="full", data=tmp_path, runs=tmp_path
    )
    matched = {
        arm: next(iter(runs.values())).method
        for arm, runs in comparison.federations.items()
        if "matched" in arm
    }
    assert matched
    for arm, method in matched.items():
        assert method["loss"] == {"name": "marginal_dice_ce_exclusion", "options": NO_CLASS_LOST}, arm
        if method["name"] not in ("standalone", "centralized"):  # they have no server's step
            assert method["server_momentum"] == FedAtlas().server_momentum, arm
