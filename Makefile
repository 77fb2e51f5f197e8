# gyre: `make demo` sets everything up and trains; `make test` sets everything up and tests.
#
#   PYTHON=python3.12      interpreter of the virtual environment (3.11 or newer)
#   TORCH_INDEX=URL        index to take torch from, for example one with CPU builds
#   UNSAFE=1               go on without bubblewrap: executions are then not contained
#   GYRE_REQUIRE=bwrap,pi  fail, and do not skip, what needs bubblewrap, a harness of that name, or a package index (index)
#   JOBS=2                 test files that run at the same time
#   SEED=0  RUN=runs/demo  seed and run directory of the demo; HOSTS=FILE  RULE=NAME  STEPS=N  its cells, their rule, a shorter one

SHELL := /bin/sh
BIN := .venv/bin
JOBS := 2
export UNSAFE TORCH_INDEX PYTHON

.PHONY: help setup harnesses demo test check bench docs clean

help:
	@sed -n '1,10s/^# \{0,1\}//p' Makefile
	@echo "targets: setup harnesses demo test check bench docs clean"

setup:
	@sh .ci/setup

harnesses: setup
	$(BIN)/gyre-harness install mini pi codex

demo: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/quickstart/demo.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

bench: setup
	$(BIN)/python tests/bench/run.py

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
