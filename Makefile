# Two commands matter: `make train` and `make test`. Each sets up what it needs in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
IN_VENV := PATH="$(abspath $(BIN)):$$PATH"
BYTECODE := $(VENV)/.bytecode
# What pip would do on one core before it goes on, but for what few import. Some files are not for this Python, which is no failure.
COMPILE = $(BIN)/python -m compileall -qq -j $(1) -x '/site-packages/(.+/)?(tests?|transformers/models)/' $(VENV)/lib > /dev/null || true
# Where the environment forbids it to Python, each of hundreds of processes would compile the project's files anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup train test test-all compiled lint gpu docs docker docker-test clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 21

setup: $(BYTECODE) ## make .venv and install the project into it (PYTHON=..., VENV=...)

# The stamp is written last, so an interrupted install is taken up again by the next call.
$(STAMP): setup.py constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found; set PYTHON=/path/to/python3.11 or newer." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit("error: Python 3.11 or newer is needed, but $(PYTHON) is %d.%d; set PYTHON=/path/to/python3.11 or newer." % v[:2] if v < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@# torch and torchvision in one command: their builds must match
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch torchvision
	@$(call COMPILE,1) &
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test,text]'
	@touch $@

$(BYTECODE): $(STAMP)
	@$(call COMPILE,0)
	@touch $@

train: $(BYTECODE) ## the main job and its dense twin on all GPUs or 2 CPU ranks, with a table (ARGS="--option value")
	$(IN_VENV) python launch/main_job.py $(ARGS)

lint: $(STAMP) ## style (ruff), types (mypy) and Dockerfiles (hadolint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu

# Three processes on two cores: a quarter of the time tests wait, for ranks that start or for each other.
PYTEST := OMP_NUM_THREADS=1 UNIFMOE_TESTS_COMPILED=1 python -m pytest -q -n 3 --dist loadgroup --durations=20

test: lint compiled ## style, types and tests but the slow ones (PYTEST_ARGS="-k name")
	$(IN_VENV) $(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: lint compiled ## the slow ones too
	$(IN_VENV) $(PYTEST) $(PYTEST_ARGS)

# mypy uses one core: what the tests need compiled is made beside it.
MAKEFLAGS += --jobs=2

compiled: $(BYTECODE)
	@$(IN_VENV) python -m tests.support.compiled > /dev/null

gpu: ## check a GPU in 8 minutes: all runs, is right, and how fast (needs no setup; ARGS="--minutes 15"; docs/gpu.md)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) launch/gpu_check.py $(ARGS)

docs: $(BYTECODE) ## the documentation as a site in build/site (open build/site/index.html)
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --quiet
	@echo "open $(CURDIR)/build/site/index.html"

docker: ## build the CUDA image unifmoe:cuda and the CPU image unifmoe:cpu
	docker build -f docker/Dockerfile.cpu -t unifmoe:cpu .
	docker build -f docker/Dockerfile -t unifmoe:cuda .

docker-test: ## build the CPU image and run its doctor and its tests
	docker build -f docker/Dockerfile.cpu -t unifmoe:cpu .
	docker run --rm unifmoe:cpu doctor
	docker run --rm unifmoe:cpu test

clean: ## remove .venv, build output and caches; runs are kept
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
