"""Benchmarks: each module has `main() -> dict[str, float]`; `python -m benchmarks` runs all and prints ratios."""
