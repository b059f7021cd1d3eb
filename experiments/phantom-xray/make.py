"""Writes the phantom chest X-ray federation that these experiments use.

    python experiments/phantom-xray/make.py DIR

Every site gets 1000 training images; the experiments say with `cases` how many of them are used. The generator's
parameters are its defaults; nothing here was changed after two methods were compared.
"""

import sys
from pathlib import Path

from fedatlas.data.phantom_xray import write_phantom_xray

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(write_phantom_xray(Path(sys.argv[1]), sites=4, cases=1000))
