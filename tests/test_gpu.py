"""Training on a GPU: every method with every task that it is for. Skipped where there is no GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import PAIRS, with_method

from fedatlas.evaluation.statistics import read_rows
from fedatlas.federation.design import arithmetic
from fedatlas.federation.file import parse_federation
from fedatlas.federation.session import run_federation
from fedatlas.transport.rounds import RunFolder, read_json

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use is here")


def trained(values: dict[str, Any], path: Path, device: str) -> Path:
    """A finished run on a device."""
    engine = values["engine"] | {"device": device}
    run_federation(parse_federation(values | {"engine": engine}, base=Path()), path, tell=lambda text: None)
    return path


def first_round(path: Path) -> dict[str, dict[str, float]]:
    """What every site logged in the first round of a run."""
    logs = map(read_json, RunFolder(path).files("log.json"))
    return next(log["sites"] for log in logs if log["round"] == 1)


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_every_method_trains_as_on_a_processor(name, task, small, small_images, tmp_path: Path) -> None:
    """The batches are the same, so that the losses of the first round differ by rounding alone (convolutions may be in tf32,
    and two steps have been taken before the third); and the same cases are scored."""
    values = with_method(small if task == "segmentation" else small_images, name)
    here, there = (trained(values, tmp_path / device, device) for device in ("cpu", DEVICE))
    first, other = first_round(here), first_round(there)
    assert first.keys() == other.keys()
    for site, numbers in first.items():
        assert numbers.keys() == other[site].keys()
        for key in numbers:
            if key.endswith("loss"):
                np.testing.assert_allclose(other[site][key], numbers[key], rtol=0.05, atol=0.01, err_msg=key)
    cells = [
        {(row["site"], row["case"], row["class"]) for row in read_rows(path / "rows.csv")}
        for path in (here, there)
    ]
    assert cells[0] == cells[1]
    assert read_json(there / "run.json")["machine"]["arithmetic"] == arithmetic(DEVICE)
    assert arithmetic(DEVICE) == torch.cuda.get_device_name()
