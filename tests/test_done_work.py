"""Long work of a site that is not done twice: teachers of another run, or of this one before it was killed."""

import json
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from runs import FIND, last_state

from fedatlas import losses
from fedatlas.federation import design
from fedatlas.learning.loop import Loop
from fedatlas.transport import store, wire
from fedatlas.transport.store import DoneWork

STAR: dict[str, Any] = {
    "name": "pseudo_labels",
    "inner": {"name": "fedavg", "options": {"loss": {"name": "dice_bce"}}},
}
UFPS_BARE: dict[str, Any] = {"name": "ufps", **dict.fromkeys(("ws", "rce", "ua", "gmt", "sam"))}
KIM: dict[str, Any] = {"name": "kim", "pretrain_rounds": 1}


@pytest.fixture
def taught(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A federation with teachers and a cache of its own."""
    monkeypatch.setattr(DoneWork, "find", FIND)
    return small | {"method": STAR, "rounds": 2, "engine": {"cache": str(tmp_path / "cache")}}


def of_first_round(path: Path) -> dict[str, dict[str, float]]:
    """site -> the numbers that it logged in the first round."""
    return json.loads((path / "rounds" / "0001" / "log.json").read_text())["sites"]


def taken(path: Path) -> list[str]:
    """The sites that took a teacher from their cache."""
    return [site for site, numbers in of_first_round(path).items() if "saved_seconds" in numbers]


@pytest.mark.parametrize("workers", [0, 2])
def test_arms_with_the_same_teachers_train_them_once_to_the_same_bits(taught, tmp_path, workers) -> None:
    taught["engine"] |= {"workers": workers}
    fresh = last_state(taught, tmp_path / "fresh")
    sites = sorted(of_first_round(tmp_path / "fresh"))
    assert len(sites) > 1 and taken(tmp_path / "fresh") == []

    shutil.rmtree(tmp_path / "cache")
    last_state(taught | {"method": UFPS_BARE, "name": "other"}, tmp_path / "before")
    assert last_state(taught, tmp_path / "after") == fresh
    assert taken(tmp_path / "before") == [] and sorted(taken(tmp_path / "after")) == sites

    def told(path: Path) -> dict[str, dict[str, float]]:
        return {
            site: {key: value for key, value in numbers.items() if not key.endswith("seconds")}
            for site, numbers in of_first_round(path).items()
        }

    assert told(tmp_path / "after") == told(tmp_path / "fresh"), (
        "loss, score, round and steps of the teachers"
    )
    log = of_first_round(tmp_path / "after")
    for site in sites:  # what was spent then counts now
        (file,) = (tmp_path / "cache" / site / ".done").iterdir()
        kept: Any = wire.decode(file.read_bytes())
        assert log[site]["steps"] == 2 * 3 + 3 and kept["logged"]["steps"] == 2 * 3
        assert log[site]["step_seconds"] > kept["logged"]["step_seconds"] > 0
        assert log[site]["saved_seconds"] == kept["seconds"] > kept["logged"]["step_seconds"]


@pytest.mark.parametrize("method", [STAR, KIM], ids=["star", "kim"])
def test_a_run_that_is_killed_in_its_first_round_keeps_its_teachers(
    taught, tmp_path, monkeypatch, method
) -> None:
    taught |= {"method": method}
    if method is KIM:
        taught |= {"labels": {"exclusive": False}}
    whole = last_state(taught, tmp_path / "whole")
    shutil.rmtree(tmp_path / "cache")

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("fedatlas.learning.loop.Loop.__init__", after(3 * (2 if method is STAR else 1), killed))
        last_state(taught, tmp_path / "run")
    assert not (tmp_path / "run" / "rounds" / "0001").exists()
    assert last_state(taught, tmp_path / "run") == whole
    assert sorted(taken(tmp_path / "run")) == sorted(of_first_round(tmp_path / "whole"))


def after(calls: int, then: Any) -> Any:
    """`Loop.__init__`, which does `then` from its call number `calls` on."""
    begin, seen = Loop.__init__, []

    def counted(self: Any, *given: Any, **named: Any) -> None:
        seen.append(None)
        if len(seen) > calls:
            then()
        begin(self, *given, **named)

    return counted


def test_teachers_of_other_settings_data_or_code_are_trained(taught, tmp_path, monkeypatch, phantom) -> None:
    data = tmp_path / "data"
    shutil.copytree(phantom, data)
    for site in taught["sites"]:
        site["path"] = str(data / Path(site["path"]).name)
    last_state(taught, tmp_path / "first")

    def takes(name: str, **changed: Any) -> int:
        last_state(taught | changed, tmp_path / name)
        return len(taken(tmp_path / name))

    everybody = takes("same")
    assert everybody == len(of_first_round(tmp_path / "first")) > 1
    assert takes("seed", seed=4) == 0
    assert takes("rate", local=taught["local"] | {"lr": 0.02}) == 0
    assert takes("longer", method=STAR | {"teachers": {"rounds": 3}}) == 0
    assert (
        takes("as long", method=STAR | {"teachers": {"rounds": 2, "resident": "all"}}, rounds=3) == everybody
    )
    assert takes("loss", method={"name": "ms_kd"}) == 0
    assert takes("own rate", method=STAR | {"teachers": {"local": {"lr": 0.02}}}) == 0
    assert takes("patch", preprocessing=taught["preprocessing"] | {"patch": [8, 16]}) == 0
    private = {"noise": 0.0, "clip": 1.0}
    assert [takes(name, method=STAR | {"teachers": {"dp_sgd": private}}) for name in ("one", "two")] == [0, 0]

    with monkeypatch.context() as patch:
        patch.setattr(design, "code", lambda: "other")
        assert takes("code") == 0
    with monkeypatch.context() as patch:
        patch.setattr(losses.OTHERS, "here", {"mine": object})
        assert takes("others") == 0

    name, folder = next((site["name"], Path(site["path"])) for site in taught["sites"])
    image = sorted(folder.glob("imagesTr/*.nii.gz"))[0]
    loaded = nib.load(image)
    nib.save(nib.Nifti1Image(np.asarray(loaded.dataobj) + 1, loaded.affine), image)  # type: ignore[attr-defined]
    last_state(taught, tmp_path / "data changed")
    assert (
        name not in taken(tmp_path / "data changed")
        and len(taken(tmp_path / "data changed")) == everybody - 1
    )


def test_what_cannot_be_read_or_kept_is_done_again(taught, tmp_path, monkeypatch) -> None:
    fresh = last_state(taught, tmp_path / "fresh")
    kept = sorted((tmp_path / "cache").glob("*/.done/teacher-*.fa"))
    assert len(kept) == len(of_first_round(tmp_path / "fresh"))
    kept[0].write_bytes(kept[0].read_bytes()[:-100])
    assert last_state(taught, tmp_path / "damaged") == fresh
    assert len(taken(tmp_path / "damaged")) == len(kept) - 1
    assert last_state(taught, tmp_path / "mended") == fresh and len(taken(tmp_path / "mended")) == len(kept)

    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    shutil.rmtree(tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(DoneWork, "keep", kept_by(full))
        assert last_state(taught, tmp_path / "full") == fresh
    assert not list((tmp_path / "cache").glob("*/.done/*"))


def kept_by(write: Any) -> Any:
    """`DoneWork.keep`, whose file is written by `write`."""
    keep = DoneWork.keep

    def kept(self: DoneWork, file: Path, done: dict[str, Any]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "write_atomic", write)
            keep(self, file, done)

    return kept
