# Everything lives in .venv; `make demo` and `make test` work from a bare clone.
PYTHON ?= python3
BIN := .venv/bin
# a part of the suite: make test TESTS=tests/losses
TESTS ?=

.PHONY: demo demo-xray test test-slow test-lowest test-latest wheel-test coverage lint types check bench reference docs clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/fedatlas demo

demo-xray: .venv/installed
	$(BIN)/fedatlas demo xray

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow $(TESTS)

# What users install: a wheel, in an environment of its own, run from an empty folder; minutes.
wheel-test: .venv/installed
	$(BIN)/python tools/wheel_test.py

coverage: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term --cov-report=html $(TESTS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/pyright

check: lint types test

bench: .venv/installed
	$(BIN)/python -m benchmarks

# The suite with the lowest and with the latest versions that pyproject.toml allows; torch is the one of constraints.txt.
RESOLUTION_lowest := lowest-direct
RESOLUTION_latest := highest

build/%.txt: pyproject.toml constraints.txt | .venv/installed
	mkdir -p build
	grep '^torch==' constraints.txt > build/torch.txt
	$(BIN)/uv pip compile --quiet --extra test --constraint build/torch.txt \
	  --resolution $(RESOLUTION_$*) pyproject.toml --output-file $@

build/%/installed: build/%.txt
	$(PYTHON) -m venv build/$*
	build/$*/bin/python -m pip install --quiet --constraint build/$*.txt --editable '.[test]'
	touch $@

test-lowest test-latest: test-%: build/%/installed
	build/$*/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

# Pages made from the code, and src/fedatlas/known.json; then the site with all pages.
reference: .venv/installed
	$(BIN)/python tools/make_reference.py

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: reference .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache
