"""Runs every benchmark, or those that are named, each in a process of its own, and prints what it found.

Options, from the first argument that begins with "-", go to the one that is named. The first that fails ends it, with its exit status.
"""

import subprocess
import sys

MODULES = (
    "demo", "steps", "tadl", "condist", "experts", "modules", "precision", "server_memory", "metrics", "evaluation", "cache", "engines",
    "predict",
)  # fmt: skip

if __name__ == "__main__":
    first = next((i for i, text in enumerate(sys.argv) if i and text.startswith("-")), len(sys.argv))
    names, options = sys.argv[1:first], sys.argv[first:]
    for module in names or MODULES:
        print(f"== {module}", flush=True)
        done = subprocess.run([sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", *options])
        if done.returncode:
            sys.exit(done.returncode)
