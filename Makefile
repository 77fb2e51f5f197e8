# gyre: `make demo` sets everything up and trains; `make test` sets everything up and tests.
#
#   PYTHON=python3.12      interpreter of the virtual environment (3.11 or newer)
#   TORCH_INDEX=URL        index to take torch from, for example one with CPU builds
#   UNSAFE=1               go on without bubblewrap: executions are then not contained
#   GYRE_REQUIRE=bwrap     fail, and do not skip, what needs bubblewrap
#   SEED=0                 seed of the demo

SHELL := /bin/sh
RUN := .venv/bin
export UNSAFE TORCH_INDEX PYTHON

.PHONY: help setup demo test check bench docs clean

help:
	@sed -n '1,9s/^# \{0,1\}//p' Makefile
	@echo "targets: setup demo test check bench docs clean"

setup:
	@sh .ci/setup

demo: setup
	@PATH="$(CURDIR)/$(RUN):$$PATH" sh examples/quickstart/demo.sh

check: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/python docs/generate.py --check

test: check
	$(RUN)/python -m pytest

bench: setup
	$(RUN)/python tests/bench/run.py

docs: setup
	$(RUN)/python docs/generate.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
