"""Writes the phantom chest X-ray federation that these experiments use.

    python experiments/phantom-xray/make.py DIR

Four sites with 1000 training images of 32 x 32 each; the experiments say with `cases` how many of them are used. All
other parameters of the generator are its defaults. The size, the net and the budget were chosen with centralized
training alone, before any two methods were compared.
"""

import sys
from pathlib import Path

from fedatlas.phantoms.xray import write_phantom_xray

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print(write_phantom_xray(Path(sys.argv[1]), sites=4, cases=1000, size=32))
