"""Makes the bundled head and neck scans from the folder head-neck-ct.

python tools/make_samples.py SOURCE [--target FOLDER]

SOURCE holds site-a to site-d, each nnU-Net raw with labelsTr_all, labelsTs_all and all_labels.json. CASES are taken: scans
that hold all organs of their site, small files first. What is in the image and label files stays byte for byte; they are
compressed again, the best way zlib knows. Of the tables only numTraining and the list of cases change.
"""

import argparse
import gzip
import json
import shutil
import zlib
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "src" / "fedatlas" / "data" / "samples"

# site: cases for training and validation, and for the test, which are test cases of the source, too
CASES = {
    "site-a": (
        ("hn_018", "hn_033", "hn_048", "hn_103", "hn_169", "hn_195"),
        ("hn_022", "hn_036"),
    ),
    "site-b": (
        ("hn_020", "hn_021", "hn_114", "hn_124", "hn_299", "hn_309"),
        ("hn_031", "hn_119"),
    ),
    "site-c": (
        ("hn_016", "hn_052", "hn_070", "hn_090", "hn_093", "hn_213"),
        ("hn_104", "hn_120"),
    ),
    "site-d": (
        ("hn_055", "hn_078", "hn_182", "hn_229", "hn_288", "hn_327"),
        ("hn_095", "hn_112"),
    ),
}


def compress(content: bytes) -> bytes:
    """The content as gzip without name and time: equal content gives equal bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31, 9, zlib.Z_FILTERED)
    return packer.compress(content) + packer.flush()


def make_site(source: Path, target: Path, training: tuple[str, ...], test: tuple[str, ...]) -> int:
    """Writes one site and returns its bytes. ValueError if a case lacks an organ of the site."""
    table = json.loads((source / "dataset.json").read_text())
    full = json.loads((source / "all_labels.json").read_text())
    own = set(table["labels"]) - {"background"}
    missing = [name for name in (*training, *test) if not own <= set(full["annotated"][name])]
    if missing:
        raise ValueError(f"{source}: not all of {sorted(own)} is annotated in {', '.join(missing)}")
    if target.exists():
        shutil.rmtree(target)
    for names, split in ((training, "Tr"), (test, "Ts")):
        for folder, ending in (
            (f"images{split}", "_0000.nii.gz"),
            (f"labels{split}", ".nii.gz"),
            (f"labels{split}_all", ".nii.gz"),
        ):
            (target / folder).mkdir(parents=True)
            for name in names:
                content = gzip.decompress((source / folder / f"{name}{ending}").read_bytes())
                (target / folder / f"{name}{ending}").write_bytes(compress(content))
    table["numTraining"] = len(training)
    full["annotated"] = {name: full["annotated"][name] for name in sorted((*training, *test))}
    for name, content in (("dataset.json", table), ("all_labels.json", full)):
        (target / name).write_text(json.dumps(content, indent=1) + "\n")
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--target", type=Path, default=TARGET, help="where the sites are written")
    arguments = parser.parse_args()
    total = 0
    for site, (training, test) in CASES.items():
        size = make_site(arguments.source / site, arguments.target / site, training, test)
        print(f"{site}: {size / 1e6:.2f} MB")
        total += size
    print(f"total: {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
