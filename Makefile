# Set-up, demo, tests and benchmarks. The first call creates the environment in .venv; everything else is `dpo`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.dev
PYTEST := OMP_NUM_THREADS=1 python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
unexport PYTHONDONTWRITEBYTECODE # each process would compile our modules again, and pytest rewrite all asserts
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PREFECT_HOME := $(CURDIR)/.prefect
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
export MLFLOW_ALLOW_MODEL_CODE_EXECUTION := false
export PREFECT_SERVER_ANALYTICS_ENABLED := false

INSTALL := PYTHONUNBUFFERED=1 python -m pip install --disable-pip-version-check --no-input --no-compile --no-deps --require-hashes
# pip would compile module by module, which takes half of its time; this uses all cores. Files for other Pythons fail.
COMPILE := python -m compileall -qq -j 0 .venv/lib > /dev/null 2>&1 || true

help: ## list these targets; `dpo --help` lists the commands of the pipeline
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(READY) ## create the environment in .venv, or update it after a change of the lock

demo: $(READY) ## train a tiny model on a preference with the whole stack (3 minutes)
	@dpo run --recipe demo

flywheel: $(READY) ## let programmed users vote, and train on their votes for three nights (10 minutes)
	@dpo flywheel

test: $(DEV) ## run the tests as CI does (up to 20 minutes on two idle cores)
	@$(PYTEST)

test-all: $(DEV) ## the same as `test` with the exhaustive tests, before a release
	@$(PYTEST) -m "not stack"

test-fast: $(DEV) ## run the tests that start no servers, clusters or extra processes
	@python -m pytest -m "not slow"

test-stack: $(DEV) ## test infra/compose.yaml on a container engine (half an hour; CONTRIBUTING.md)
	@python -m pytest tests/services/test_stack_containers.py -m stack -s -x

test-faults: $(DEV) ## inject a fault at every durable operation (hours): ONLY="source gc" ARGS="--minutes 40"
	@nice -n 10 python -m tests.faults.sweep $(ONLY) $(ARGS)

gpu-check: $(READY) ## run all stages on this machine's GPUs, and kill a worker in between: ARGS="--shape 1.5b --full"
	@python -m tests.gpu_check $(ARGS)

lint: $(DEV) ## run ruff, codespell and mypy
	@ruff check .
	@ruff format --check .
	@codespell
	@mypy

bench: $(READY) ## benchmark: BENCH=cpu (default), gpu or convergence beside TRL, hybrid, loading or growth, with ARGS="..."
	@python -m tests.benchmarks.$(or $(BENCH),cpu) $(ARGS)

backup: ## back up databases, object store and run commits of the compose stack: TO=folder
	@infra/backup.sh backup "$(TO)"

restore: ## restore a backup into the compose stack: FROM=folder
	@infra/backup.sh restore "$(FROM)"

lock: $(DEV) ## pin what pyproject.toml needs, with hashes; newest versions: ARGS="--upgrade --wheels FOLDER"
	@python infra/lock.py lock $(ARGS)

sbom: $(READY) ## write the locked packages to sbom.cdx.json (CycloneDX)
	@python infra/lock.py sbom > sbom.cdx.json

$(READY): requirements.lock infra/cuda.lock pyproject.toml
	@command -v git >/dev/null || { echo "error: git is not installed; the pipeline versions its runs with git"; exit 1; }
	@for python in $${PYTHON:-python3} python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    found=$$python; break; fi; done; \
	if [ -z "$${found:-}" ]; then \
	  echo "error: found no Python 3.11 or newer with venv; install one, or set PYTHON=/path/to/python"; \
	  exit 1; fi; \
	echo "Creating the environment in .venv with $$("$$found" --version) (a few minutes, once)"; \
	"$$found" -m venv .venv
	@awk '/^torch==/ { on = 1 } on { print } on && !/\\$$/ { exit }' requirements.lock > .venv/torch.lock; \
	$(INSTALL) --quiet --no-index -r .venv/torch.lock 2>/dev/null || true; : prefer a CPU build from a local folder of wheels; \
	{ $(INSTALL) -r requirements.lock && \
	  if python infra/needs_cuda.py; then $(INSTALL) -r infra/cuda.lock; fi && python -m pip check; } 2>&1 | tee .venv/install.log | \
	  awk -v total=$$(grep -c == requirements.lock) '/^(Collecting|Processing|Requirement already)/ { n++; \
	  if (n % 20 == 0 && n < total) { printf "  %d of about %d packages\n", n, total; fflush() } } \
	  /^Installing/ { print "  installing" ; fflush() } /^ERROR/ { print }' || { \
	  echo "error: the packages could not be installed; see .venv/install.log"; exit 1; }
	@python -m pip install --disable-pip-version-check --no-input --no-deps --no-build-isolation --quiet --editable . || { \
	  echo "error: the command dpo could not be installed"; exit 1; }
	@echo "  compiling"; $(COMPILE)
	@touch $(READY)

$(DEV): $(READY) requirements-dev.lock
	@echo "Installing the packages that tests and linters need"
	@$(INSTALL) -r requirements-dev.lock > .venv/install-dev.log 2>&1 && \
	  python -m pip check >> .venv/install-dev.log 2>&1 || { \
	  echo "error: the packages could not be installed; see .venv/install-dev.log"; exit 1; }
	@$(COMPILE)
	@touch $(DEV)

.PHONY: help setup demo test test-all test-fast test-stack test-faults gpu-check lint bench backup restore lock sbom
