"""`evaluation.local: best`: every site's local model of the round that was best on its own validation cases."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedatlas.core.tensors import tensors_of
from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.best import BestLocals
from fedatlas.federation.file import Federation, parse_federation
from fedatlas.federation.session import gather_local, run_federation
from fedatlas.federation.trained import Trained
from fedatlas.report.page import write
from fedatlas.transport import wire
from fedatlas.transport.rounds import RunFolder, to_json


class Stop(Exception):
    """Ends a run between two rounds."""


def logs(folder: Path) -> dict[int, dict[str, float]]:
    files = sorted((folder / "rounds").glob("*/log.json"))
    return {int(file.parent.name): json.loads(file.read_text())["local"] for file in files}


def federation(small: dict[str, Any], tmp_path: Path, **evaluation: Any) -> Federation:
    small["rounds"] = 4
    small["local"] |= {"lr": 0.05}
    small["evaluation"] |= {"local": "best", "models": ["local"]} | evaluation
    return parse_federation(small, base=tmp_path)


def test_the_best_round_of_each_site_is_evaluated_whatever_was_interrupted(
    small: dict[str, Any], tmp_path: Path
) -> None:
    asked = federation(small, tmp_path)
    run_federation(asked, tmp_path / "whole", tell=lambda text: None)
    scores = logs(tmp_path / "whole")
    assert scores[0] == {} and all(
        set(scores[n]) == {site.name for site in asked.sites} for n in (1, 2, 3, 4)
    )
    chosen = json.loads((tmp_path / "whole" / "models" / "local.json").read_text())
    for site in asked.sites:
        own = {n: scores[n][site.name] for n in (1, 2, 3, 4)}
        best = max(own, key=lambda n: (own[n], -n))
        assert chosen[site.name] == {"round": best, "score": own[best]}
    assert any(kept["round"] != 4 for kept in chosen.values()), "else this test says nothing"
    rows = read_rows(tmp_path / "whole" / "rows.csv")
    for site in asked.sites:
        mine = [row for row in rows if row["model"] == f"local/{site.name}"]
        assert {row["round"] for row in mine} == {chosen[site.name]["round"]}

    def stop(record: Any, best: Any) -> None:
        if record.number == 3:
            raise Stop

    with pytest.raises(Stop):
        run_federation(asked, tmp_path / "halves", tell=lambda text: None, after_round=stop)
    # as if it had been lost between the round and the copies of its models
    file = tmp_path / "halves" / "models" / "local.json"
    before = {site: kept for site, kept in json.loads(file.read_text()).items() if kept["round"] < 3}
    file.write_text(json.dumps(before))
    for site in chosen.keys() - before.keys():
        (tmp_path / "halves" / "models" / "local" / f"{site}.fa").unlink()
    run_federation(asked, tmp_path / "halves", resume=True, tell=lambda text: None)
    for name in ("rows.csv", "models/local.json", *(f"models/local/{site.name}.fa" for site in asked.sites)):
        assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def models_of(path: Path) -> tuple[int, dict[str, Any]]:
    """The round and the models of a kept state of `standalone`, as bytes."""
    tree: Any = wire.decode(path.read_bytes())
    return tree["round"], {site: wire.encode(model) for site, model in tree["models"].items()}


def test_the_best_of_standalone_is_every_sites_own_best_round(small: dict[str, Any], tmp_path: Path) -> None:
    small |= {"method": {"name": "standalone"}}
    asked = federation(small, tmp_path, local="last", models=["best", "last", "local"])
    run_federation(asked, tmp_path / "whole", tell=lambda text: None)
    scores, sites = logs(tmp_path / "whole"), [site.name for site in asked.sites]
    rounds = {site: max(range(1, 5), key=lambda n: (scores[n][site], -n)) for site in sites}
    assert len(set(rounds.values())) > 1, "else this test says nothing"
    told = json.loads((tmp_path / "whole" / "best.json").read_text())
    assert {site: kept["round"] for site, kept in told["sites"].items()} == rounds
    assert told["round"] == max(rounds.values())
    assert told["score"] == pytest.approx(sum(scores[n][site] for site, n in rounds.items()) / len(sites))
    at, found = models_of(tmp_path / "whole" / "models" / "best.fa")
    assert at == told["round"]
    for site in sites:
        kept: Any = wire.decode((tmp_path / "whole" / "models" / "local" / f"{site}.fa").read_bytes())
        assert found[site] == wire.encode(kept["model"])
        chosen = Trained(tmp_path / "whole", f"local/{site}").members[0]
        assert wire.encode(chosen.model) == found[site]
    _, last = models_of(tmp_path / "whole" / "models" / "last.fa")
    assert {site for site in sites if found[site] == last[site]} == {s for s in sites if rounds[s] == 4}
    members = Trained(tmp_path / "whole").members
    assert [wire.encode(member.model) for member in members] == [found[site] for site in sorted(sites)]
    rows = read_rows(tmp_path / "whole" / "rows.csv")
    assert {row["model"] for row in rows} == {"best", "last", *(f"local/{site}" for site in sites)}
    for site in sites:
        assert {row["round"] for row in rows if row["model"] == f"local/{site}"} == {rounds[site]}
    assert all(f"{site} {n}" in page(tmp_path / "whole") for site, n in rounds.items())

    def stop(record: Any, best: Any) -> None:
        if record.number == 3:
            raise Stop

    with pytest.raises(Stop):
        run_federation(asked, tmp_path / "halves", tell=lambda text: None, after_round=stop)
    # as if it had been killed between the round and what is made of it
    (tmp_path / "halves" / "models" / "best.fa").unlink()
    run_federation(asked, tmp_path / "halves", resume=True, tell=lambda text: None)
    for name in ("rows.csv", "best.json", "models/best.fa", "models/local.json"):
        assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def page(path: Path) -> str:
    """The report of a run."""
    return write(path).read_text(encoding="utf-8")


def test_one_round_for_all_is_a_switch(small: dict[str, Any], tmp_path: Path) -> None:
    small |= {"method": {"name": "standalone", "choose": "common"}, "sites": small["sites"][:2]}
    asked = federation(small, tmp_path, local="last", models=["best"], every=2)
    run_federation(asked, tmp_path / "run", tell=lambda text: None)
    told = json.loads((tmp_path / "run" / "best.json").read_text())
    assert set(told) == {"round", "score"} and not (tmp_path / "run" / "models" / "local.json").exists()
    at, found = models_of(tmp_path / "run" / "models" / "best.fa")
    state = tmp_path / "run" / "rounds" / f"{told['round']:04d}" / "state.fa"
    assert at == told["round"] and (not state.exists() or models_of(state)[1] == found)


def test_a_teacher_is_of_the_round_that_its_site_chooses(small: dict[str, Any], tmp_path: Path) -> None:
    """UFPS, S6.6: the teachers are the models that training alone ends with, as they are chosen."""
    small["local"] |= {"lr": 0.05}
    small["sites"] = small["sites"][:2]

    def teachers(name: str, **options: Any) -> dict[str, tuple[Any, dict[str, float]]]:
        told = {"rounds": 4, **options}
        asked = parse_federation(small | {"method": {"name": "ms_kd", "teachers": told}}, base=tmp_path)
        folder = RunFolder(tmp_path / name)
        experiment, found = gather_local(asked, folder, lambda text: None).design, {}
        model = tensors_of(experiment.make_net())
        for site in asked.sites:
            host = experiment.host(site.name, folder.site(site.name))  # type: ignore[attr-defined]
            question = wire.encode({"model": model, "rounds": 9})
            reply: Any = wire.decode(host.handle("teacher_update", 1, 0, question))
            assert set(reply["value"]) == {"teacher", "classes"}, "what travels is the same"
            found[site.name] = wire.encode(reply["value"]["teacher"]), reply["log"]
        return found

    # a schedule that does not fall, so that training for fewer rounds is the beginning of training for more
    small["local"] |= {"schedule": "constant"}
    chosen, last = teachers("best", every=1), teachers("last", choose="last")
    for site, (model, log) in chosen.items():
        n = int(log["teacher_round"])
        assert model == teachers(f"{n}", choose="last", rounds=n)[site][0] and log["teacher_score"] >= 0
        assert "teacher_round" not in last[site][1] and (model == last[site][0]) == (n == 4)
    assert {int(log["teacher_round"]) for _, log in chosen.values()} != {4}, "else this test says nothing"
    assert any(log["teacher_score"] > 0 for _, log in chosen.values())
    assert {site: model for site, (model, _) in teachers("rare", every=4).items()} == {
        site: model for site, (model, _) in last.items()
    }


def test_sites_without_validation_cases_keep_the_last(small: dict[str, Any], tmp_path: Path) -> None:
    asked = federation(small, tmp_path, validation=0)
    run_federation(asked, tmp_path / "run", tell=lambda text: None)
    assert not (tmp_path / "run" / "models" / "local.json").exists()
    rows = read_rows(tmp_path / "run" / "rows.csv")
    assert rows and {row["round"] for row in rows} == {4}


def test_of_equal_rounds_the_local_model_that_is_kept_stays(tmp_path) -> None:
    """Its round was lost, and done again lower; a later one only scored as high."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "local.json").write_bytes(to_json({"a": {"round": 3, "score": 0.6}}))
    logs = [({"round": number, "local": {"a": score}}, []) for number, score in ((3, 0.4), (4, 0.6))]
    taken: list[Any] = []
    folder: Any = SimpleNamespace(
        path=tmp_path, records=lambda: logs, keep_local=lambda *of: taken.append(of)
    )
    own = BestLocals(folder)
    own.recover()
    assert own.best == {"a": {"round": 3, "score": 0.6}} and not taken


def test_the_best_is_the_last_only_where_it_is_at_every_site(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    for first, same in ((1, False), (2, True)):
        sites = {"a": {"round": first, "score": 0.5}, "b": {"round": 2, "score": 0.5}}
        (tmp_path / "best.json").write_bytes(to_json({"round": 2, "score": 0.5, "sites": sites}))
        assert folder.best_is_last(2) is same
