# `make demo` and `make test` need nothing but Python and make: they set themselves up in .venv.
PYTHON ?= python3
BIN := .venv/bin
# Two OpenMP threads beside another busy process can be ten times slower than one.
export OMP_NUM_THREADS ?= 1
# Nothing that is in the caller's environment may stand in for what is installed here.
unexport PYTHONPATH

.PHONY: demo test test-all lint bench mutants coverage setup clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/.ready

demo: setup
	OMP_NUM_THREADS=2 $(BIN)/efcil demo

# A file's tests stay in one process: they share what its fixtures learned.
test: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

test-all: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow --timeout 1200

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/import_direction.py

bench: setup
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/core.py --check
	$(BIN)/python benchmarks/augment.py --check

mutants: setup
	$(BIN)/python tools/mutants.py --check

coverage: setup
	$(BIN)/python -m pytest -q --cov=efcil.linalg --cov=efcil.stats --cov=efcil.metrics --cov=efcil.data --cov=efcil.tasks \
		--cov-report=term-missing --cov-fail-under=90

clean:
	rm -rf .venv demo runs build dist
