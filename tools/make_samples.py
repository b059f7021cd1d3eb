"""Copies the bundled part of the OpenKBP head and neck CT: the first cases of each site, by name, as they are.

python tools/make_samples.py FOLDER        (with site-a … site-d, as docs/results.md describes)
"""

import json
import shutil
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "src" / "fedatlas" / "data" / "samples"
CASES = {"site-a": 8, "site-b": 5, "site-c": 8, "site-d": 4}
"""So many that the whole stays under 6 MB; files of sites b and d are larger."""


def main(source: Path) -> None:
    for site, count in CASES.items():
        target = TARGET / site
        shutil.rmtree(target, ignore_errors=True)
        labels = sorted((source / site / "labelsTr").glob("*.nii.gz"))[:count]
        names = [path.name.removesuffix(".nii.gz") for path in labels]
        for name in names:
            for file in (
                f"imagesTr/{name}_0000.nii.gz",
                f"labelsTr/{name}.nii.gz",
                f"labelsTr_all/{name}.nii.gz",
            ):
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / site / file, target / file)
        table = json.loads((source / site / "dataset.json").read_text()) | {"numTraining": count}
        (target / "dataset.json").write_text(json.dumps(table, indent=1) + "\n")
        truth = json.loads((source / site / "all_labels.json").read_text())
        truth["annotated"] = {name: truth["annotated"][name] for name in names}
        (target / "all_labels.json").write_text(json.dumps(truth, indent=1) + "\n")
    size = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{size / 2**20:.2f} MiB in {TARGET}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
