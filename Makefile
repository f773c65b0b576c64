# `make help` lists the targets. Everything is installed into $(VENV).

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?=
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore $(BIN)/python -m pip

.DEFAULT_GOAL := help
.PHONY: help test test-slow demo lint types docs notebooks bench guard accuracy clean
.SECONDARY:

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12
	@echo 'variables: PYTHON=$(PYTHON) VENV=$(VENV) CONSTRAINTS=$(CONSTRAINTS) WORKERS=$(WORKERS) PYTEST_ARGS=$(PYTEST_ARGS)'

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: emaopt needs Python 3.11 or newer, but PYTHON=$(PYTHON) is" \
	    "$$($(PYTHON) -V 2>&1 | tail -n 1)." >&2; \
	  echo "Pass another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: PYTHON=$(PYTHON) lacks venv or ensurepip; on Debian and Ubuntu" \
	    "install python3-venv, or pass another PYTHON=." >&2; exit 1; }
	@# An environment that works is used as it is; what is left of one is made anew.
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@touch $@

# One stamp for each extra of pyproject.toml: what is installed is not asked for again.
$(VENV)/.stamp-%: $(VENV)/.stamp-venv pyproject.toml $(CONSTRAINTS)
	$(PIP) install --quiet --editable '.[$*]' $(addprefix --constraint ,$(CONSTRAINTS))
	@touch $@

PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test: $(VENV)/.stamp-test  ## run the tests and doctests, but for the slow ones
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-slow: $(VENV)/.stamp-test  ## run the slow tests: notebooks, millions of steps
	$(PYTEST) -m slow $(PYTEST_ARGS)

demo: $(VENV)/.stamp-examples  ## train a small model with an average of its parameters
	MPLBACKEND=agg $(BIN)/python examples/train_digits.py

lint: $(VENV)/.stamp-dev  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp-dev  ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.stamp-docs  ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -b html docs docs/_build/html

notebooks: $(VENV)/.stamp-test  ## execute the notebooks of examples/
	MPLBACKEND=agg $(BIN)/jupyter-execute --kernel_name=python3 examples/*.ipynb

bench: $(VENV)/.stamp-bench  ## measure speed against other libraries
	$(BIN)/python -m benchmarks

guard: $(VENV)/.stamp-test  ## fail if speed is lost against lax.scan and optax.ema
	$(BIN)/python -m benchmarks.guard

accuracy: $(VENV)/.stamp-test  ## measure rounding errors; the docs plot them
	$(BIN)/python docs/accuracy.py

clean:  ## remove everything that make, the tests and the tools have made
	rm -rf $(VENV) .venv-* docs/_build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
