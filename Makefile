# Everything lives in .venv; `make demo` and `make test` work from a bare clone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo demo-xray test test-slow lint types check bench docs clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/fedatlas compare experiments/demo.yaml

demo-xray: .venv/installed
	$(BIN)/fedatlas run experiments/quickstart-xray.yaml --resume

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/pyright

check: lint types test

bench: .venv/installed
	$(BIN)/python -m benchmarks

docs: .venv/installed
	$(BIN)/python tools/make_reference.py

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache
