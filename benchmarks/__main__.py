"""Runs every benchmark, each in a process of its own, and prints what it found."""

import subprocess
import sys

MODULES = ("steps", "rounds", "server_memory", "metrics", "cache")

if __name__ == "__main__":
    for module in sys.argv[1:] or MODULES:
        print(f"== {module}", flush=True)
        subprocess.run([sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}"], check=True)
