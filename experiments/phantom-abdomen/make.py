"""Writes the phantom abdomen federation that these experiments use.

    python experiments/phantom-abdomen/make.py DIR [--cases 24] [--test-cases 8] [--unseen-cases 12] [--seed 0]

Four sites of made-up CT, each in a contrast phase of its own with a label set of its own, and one without contrast
agent that is only tested. The generator's other parameters are its defaults; `src/fedatlas/phantoms/abdomen.py`
tells how they were chosen.
"""

import argparse
import sys
from pathlib import Path

from fedatlas.core.errors import FedAtlasError
from fedatlas.phantoms.abdomen import SITES, write_abdomen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--cases", type=int, default=24, help="training cases of every site")
    parser.add_argument("--test-cases", type=int, default=8, help="test cases of every training site")
    parser.add_argument("--unseen-cases", type=int, default=12, help="cases of the unseen site")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    test = {site.name: given.unseen_cases if site.test_only else given.test_cases for site in SITES}
    try:
        print(write_abdomen(given.folder, cases=given.cases, test_cases=test, seed=given.seed))
    except FedAtlasError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
