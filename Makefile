# gyre: `make demo` sets everything up and trains; `make test` sets everything up and tests.
#
#   PYTHON=python3.12      interpreter of the virtual environment (3.11 or newer)
#   TORCH_INDEX=URL        index to take torch from, for example one with CPU builds
#   UNSAFE=1               go on without bubblewrap: executions are then not contained
#   GYRE_REQUIRE=bwrap,pi  fail, and do not skip, what needs bubblewrap, a harness of that name, docker, podman, vllm, a package index (index)
#   JOBS=2                 test files that run at the same time
#   SEED=0  RUN=runs/demo  seed and run directory of the demo; HOSTS=FILE  RULE=NAME  STEPS=N  its cells, their rule, a shorter one
#   ENGINE=vllm            the demo's inference engine: torch, or vllm in a second environment (.venv-vllm)

SHELL := /bin/sh
BIN := .venv/bin
JOBS := 2
export UNSAFE TORCH_INDEX PYTHON ENGINE

.PHONY: help setup setup-vllm harnesses demo test test-docker test-vllm test-all check bench docs clean

help:
	@sed -n '1,11s/^# \{0,1\}//p' Makefile
	@echo "targets: setup setup-vllm harnesses demo test test-docker test-vllm test-all check bench docs clean"

setup:
	@sh .ci/setup

setup-vllm: setup
	@sh .ci/setup-vllm

harnesses: setup
	$(BIN)/gyre-harness install mini pi codex

demo: $(if $(filter vllm,$(ENGINE)),setup-vllm,setup)
	@PATH="$(CURDIR)/$(if $(filter vllm,$(ENGINE)),.venv-vllm/bin,$(BIN)):$$PATH" sh examples/quickstart/demo.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=10

test-docker: setup
	sh .ci/docker
	GYRE_CONTAINMENT=$${GYRE_CONTAINMENT:-check} $(BIN)/python tests/sandbox/engines.py $(BIN)/python -m pytest -p no:xdist \
	    tests/sandbox tests/e2e/test_docker.py

test-vllm: setup-vllm
	.venv-vllm/bin/python -m pytest -W ignore -k vllm tests/rollout tests/e2e/test_vllm.py  # importing vLLM warns of its own affairs

test-all: test test-docker test-vllm

bench: setup
	$(BIN)/python tests/bench/run.py

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
