"""The tables of docs/results.md of which the records are kept: made again from these, they are what the page holds."""

from pathlib import Path

import pytest

from fedatlas.compare import collect, load_comparison, markdown, restore_runs
from fedatlas.federation.yaml import read_yaml

ROOT = Path(__file__).parents[2]
RECORDED = sorted(path for path in ROOT.glob("experiments/*/records/*") if path.is_dir())


def test_there_are_records() -> None:
    assert RECORDED


@pytest.mark.parametrize("records", RECORDED, ids=lambda path: path.name)
def test_a_table_is_what_its_records_say(records: Path, tmp_path: Path) -> None:
    name, _, profile = records.name.rpartition("-")
    files = [file for file in records.parents[1].glob("*.yaml") if read_yaml(file).get("name") == name]
    comparison = load_comparison(
        [file for file in files if "arms" in read_yaml(file)],
        profile=profile,
        data=tmp_path / "no data are needed",
        runs=tmp_path,
    )
    restored = restore_runs(comparison, records.parent)
    assert len(restored) == len(list(records.iterdir())), "a record that belongs to no run of the comparison"
    # the command names the file as it was given
    made = markdown(collect(comparison)).replace(f"{ROOT}/", "")
    page = (ROOT / "docs" / "results.md").read_text()
    assert f"<!-- {name} -->\n\n{made}\n<!-- /{name} -->" in page
