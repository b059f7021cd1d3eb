"""`evaluation.local: best`: every site's local model of the round that was best on its own validation cases."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedatlas.evaluation.statistics import read_rows
from fedatlas.experiment import Federation, parse_federation
from fedatlas.session import run_federation


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


def test_sites_without_validation_cases_keep_the_last(small: dict[str, Any], tmp_path: Path) -> None:
    asked = federation(small, tmp_path, validation=0)
    run_federation(asked, tmp_path / "run", tell=lambda text: None)
    assert not (tmp_path / "run" / "models" / "local.json").exists()
    rows = read_rows(tmp_path / "run" / "rows.csv")
    assert rows and {row["round"] for row in rows} == {4}
