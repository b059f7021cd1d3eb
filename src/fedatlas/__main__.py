"""`python -m fedatlas`."""

import sys

from fedatlas.cli import main

if __name__ == "__main__":
    sys.exit(main())
