"""Makes the bundled sample data: the first training cases, by name, of every site of head-neck-ct.

python tools/make_samples.py SOURCE [--cases N]

SOURCE holds site-a, site-b, …, each nnU-Net raw with labelsTr_all and all_labels.json. Image and label files
are copied as they are, byte for byte; of the tables only numTraining and the list of cases change.
"""

import argparse
import json
import shutil
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "src" / "fedatlas" / "data" / "samples"


def copy_site(source: Path, target: Path, count: int) -> int:
    """Copies the first `count` cases of a site. Returns the bytes written."""
    if target.exists():
        shutil.rmtree(target)
    images = sorted((source / "imagesTr").glob("*_0000.nii.gz"))[:count]
    names = [image.name.removesuffix("_0000.nii.gz") for image in images]
    for folder, ending in (
        ("imagesTr", "_0000.nii.gz"),
        ("labelsTr", ".nii.gz"),
        ("labelsTr_all", ".nii.gz"),
    ):
        (target / folder).mkdir(parents=True)
        for name in names:
            shutil.copyfile(source / folder / f"{name}{ending}", target / folder / f"{name}{ending}")
    table = json.loads((source / "dataset.json").read_text())
    table["numTraining"] = len(names)
    full = json.loads((source / "all_labels.json").read_text())
    full["annotated"] = {name: full["annotated"][name] for name in names}
    for name, content in (("dataset.json", table), ("all_labels.json", full)):
        (target / name).write_text(json.dumps(content, indent=1) + "\n")
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--cases", type=int, default=6, help="cases per site")
    arguments = parser.parse_args()
    total = 0
    for site in sorted(arguments.source.glob("site-*")):
        size = copy_site(site, TARGET / site.name, arguments.cases)
        print(f"{site.name}: {size / 1e6:.2f} MB")
        total += size
    print(f"total: {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
