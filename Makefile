# `make demo` and `make test` need nothing but Python and make: they set themselves up in .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
# Two OpenMP threads beside another busy process can be ten times slower than one.
export OMP_NUM_THREADS ?= 1
# Nothing that is in the caller's environment may stand in for what is installed here.
unexport PYTHONPATH

.PHONY: demo test test-all test-kernels docs notebooks lint bench mutants coverage setup lock audit clean

setup: .venv/.dev-ready

# .run-ready: the package and what it needs itself. .dev-ready: what tests and checks need besides.
# Every file is checked against a hash, and none is built, which would fetch what no hash is known of. Torch is pinned
# by its version alone: its builds differ from machine to machine. HASHES=no is for an index whose files are not
# PyPI's own, or a system for which some must be built.
HASHES ?= yes
LOCKED = $(PIP) --require-hashes --only-binary :all: -r
.venv/.run-ready: pyproject.toml constraints.txt requirements/run.txt
	$(PYTHON) -m venv .venv
ifeq ($(HASHES),yes)
	$(LOCKED) requirements/run.txt
	$(PIP) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e .
endif
	touch $@

.venv/.dev-ready: .venv/.run-ready requirements/dev.txt
ifeq ($(HASHES),yes)
	$(LOCKED) requirements/dev.txt
else
	$(PIP) -c constraints.txt -e '.[dev]'
endif
	touch $@

.venv/.docs-ready: .venv/.run-ready requirements/docs.txt
ifeq ($(HASHES),yes)
	$(LOCKED) requirements/docs.txt
else
	$(PIP) -c constraints.txt -e '.[docs]'
endif
	touch $@

# After a change of the dependencies in pyproject.toml. LOCK=--upgrade, now and then, for newer versions.
lock: .venv/.run-ready
	$(PIP) uv==0.13.7
	$(BIN)/python tools/lock.py $(LOCK)
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command 'make lock' --output-file requirements/triton.txt requirements/triton.in

demo: .venv/.run-ready
	$(BIN)/efcil demo

# A file's tests stay in one process: they share what its fixtures learned. tests/conftest.py orders the files.
SPREAD = -n 2 --dist loadfile --no-loadscope-reorder
test: setup
	$(BIN)/python -m pytest -q $(SPREAD)

test-all: setup docs
	$(BIN)/python -m pytest -q $(SPREAD) -m slow --timeout 1200
	$(BIN)/python -m pytest -q -m alone --timeout 1200

# The Triton kernels, in Triton's interpreter on the CPU, where a skipped test is a failure. Triton (760 MB) and its numpy
# lie in a folder of their own, which is searched before .venv. It exists for Linux only.
ifeq ($(shell uname -s),Linux)
test-all: test-kernels
endif

test-kernels: .triton/.ready
	PYTHONPATH=.triton CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q -p no:cacheprovider -m triton --fail-on-skip tests

.triton/.ready: requirements/triton.txt | setup
	rm -rf .triton
ifeq ($(HASHES),yes)
	$(PIP) --require-hashes --only-binary :all: --no-deps --target .triton -r requirements/triton.txt
else
	$(PIP) --no-deps --target .triton -r requirements/triton.in
endif
	touch .triton/.ready

# The site, into build/docs; without a network once its packages are installed. Every warning is an error.
docs: .venv/.docs-ready
	$(BIN)/python tools/build_docs.py

# The notebooks as .ipynb files, into build/notebooks.
notebooks: setup
	$(BIN)/python tools/notebooks.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_architecture.py
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive src examples

# Known vulnerabilities of what is installed; needs the network. AUDIT=--may-skip goes on without, and says so.
audit: setup
	$(BIN)/python tools/audit.py $(AUDIT)

bench: setup
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/core.py --check
	$(BIN)/python benchmarks/augment.py --check
	$(BIN)/python benchmarks/scale.py --check
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/serve.py --check 0.8

# Mutation testing of the numerical core, which takes hours; MUTANTS='*7' takes every tenth mutant of each function.
mutants: setup
	$(PIP) -c constraints.txt mutmut==3.8.1
	nice -n 19 $(BIN)/mutmut run $(if $(MUTANTS),'$(MUTANTS)')
	$(BIN)/mutmut results

coverage: setup
	$(BIN)/python -m pytest -q --cov=efcil.core.projection --cov=efcil.core.class_stats --cov=efcil.core.metrics --cov=efcil.data --cov=efcil.tasks \
		--cov-report=term-missing --cov-fail-under=90

clean:
	rm -rf .venv .triton demo runs build dist
