# Everything starts here. The first call makes the environment in .venv; nothing outside this folder is touched.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.dev
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PREFECT_HOME := $(CURDIR)/.prefect
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
export MLFLOW_ALLOW_MODEL_CODE_EXECUTION := false
export PREFECT_SERVER_ANALYTICS_ENABLED := false

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(READY) ## watch a tiny model learn a preference, with the whole stack
	@python -m flows.dpo --recipe demo

run: $(READY) ## the pipeline on params.yaml; RECIPE=name lays a recipe over it, SET="train.beta=0.2" single values; NAME=
	@python -m flows.dpo $(if $(RECIPE),--recipe $(RECIPE)) $(foreach value,$(SET),--set $(value)) $(if $(NAME),--name $(NAME))

plan: $(READY) ## which stages would run, and why, with time and memory as far as known: RECIPE=name SET="train.beta=0.2"
	@python -m flows.plan $(if $(RECIPE),--recipe $(RECIPE)) $(foreach value,$(SET),--set $(value))

follow: $(READY) ## start a run on the worker and show its stages: DEPLOYMENT=dpo/full, RECIPE= SET= NAME= as above; RUN=name shows one
	@python -m flows.follow $(if $(RUN),--run "$(RUN)",$(or $(DEPLOYMENT),dpo/full)) $(if $(RECIPE),--recipe $(RECIPE)) \
	  $(foreach value,$(SET),--set $(value)) $(if $(NAME),--name $(NAME))

runs: $(READY) ## every run: its state, since when, what ran, its page in MLflow
	@python -m flows.runs

resume: $(READY) ## go on with a run that failed, was stopped or crashed: RUN=name
	@python -m flows.dpo --resume "$(RUN)"

open: $(READY) ## a run's files back, in a worktree of its commit: RUN=name TO=folder
	@python -m flows.open "$(RUN)" "$(TO)"

gc: $(READY) ## what old runs hold and nobody needs: KEEP=10 newest stay; YES=1 deletes what is shown
	@python -m flows.gc --keep $(or $(KEEP),10) $(if $(YES),--yes)

check-cache: $(READY) ## is every object of DVC's cache what its name says? FIX=1 removes damaged ones
	@python -m flows.cache $(if $(FIX),--fix)

retrain: $(READY) ## what dpo/nightly does: nothing where nothing is new; RECIPE= and SET= as above
	@python -m flows.dpo --only-if-new $(if $(RECIPE),--recipe $(RECIPE)) $(foreach value,$(SET),--set $(value))

sweep: $(READY) ## many runs over one reference: SPACE="train.beta=0.05,0.1 train.seed=0,1" ARGS="--metric ... --random 8"
	@python -m flows.sweep $(foreach value,$(SPACE),--space $(value)) $(ARGS)

promote: $(READY) ## after `dvc repro` by hand: register the export, and make it champion where the gate lets it
	@python -m tasks.promote

approve: $(READY) ## a person's word for a version that waits: VERSION=3 BY=name
	@python -m tasks.release.approve "$(VERSION)" "$(BY)"

rollback: $(READY) ## back to the champion before, and say what was done
	@python -m tasks.release.rollback

compare: $(READY) ## this workspace's policy against RUN=champion, base, a version or a named run
	@python -m tasks.evaluation.compare $(or $(RUN),champion)

verify: $(READY) ## is data/model, to the last byte, what was exported?
	@python -m tasks.release.verify

sign: $(READY) ## sign with your key what was made without it: WHAT=data/model, a checkpoint's folder or a version's number
	@python -m tasks.release.sign $(if $(WHAT),"$(WHAT)")

push: $(READY) ## copy data/model to an fsspec address: TO=s3://bucket/models
	@python -m tasks.release.push "$(TO)"

reproduce: $(READY) ## repeat a run from its commit and compare hashes and metrics: RUN=name
	@python -m flows.reproduce "$(RUN)"

report: $(READY) ## the page of the last run: .scratch/report.html
	@python -m tasks.reports.page

test: $(DEV) ## all tests, in two processes, fast ones first
	@OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-fast: $(DEV) ## tests without servers, clusters and several processes
	@python -m pytest -m "not slow"

test-stack: $(DEV) ## infra/compose.yaml on a real container engine (about half an hour): see CONTRIBUTING.md
	@python -m pytest tests/test_stack_containers.py -m stack -s -x

test-faults: $(DEV) ## a fault at every durable operation of every command (hours): ONLY="source gc" ARGS="--minutes 40"
	@nice -n 10 python -m tests.faults.sweep $(ONLY) $(ARGS)

doctor: $(READY) ## is this machine ready, and does the run fit it? RECIPE=name; FIX=1 clears stale locks
	@python -m tasks.doctor.examine $(RECIPE) $(if $(FIX),--fix)

gpu-check: $(READY) ## all stages on this machine's GPUs, a worker killed in training, and a table: ARGS="--shape 1.5b --full"
	@python -m tests.gpu_check $(ARGS)

sync: $(READY) ## send to MLflow what earlier runs could not
	@python -m tasks.tracking.forward

lint: $(DEV) ## ruff and mypy, as pre-commit and CI run them
	@ruff check .
	@ruff format --check .
	@mypy

bench: $(READY) ## our training beside TRL's: BENCH=cpu (as it comes), gpu or convergence, with ARGS="..."
	@python -m tests.benchmarks.$(or $(BENCH),cpu) $(ARGS)

up: $(READY) ## Prefect, MLflow and a worker in the background, with pages, deployments, automations (docs/operations.md)
	@python -m flows.up

down: $(READY) ## end what `make up` started, and no more
	@python -m flows.down

status: $(READY) ## what runs, since when, where; schedules; the last runs
	@python -m flows.status

logs: ## what the services of `make up` said last; SERVICE=worker one of them, FOLLOW=1 as it comes
	@ls .services/$(or $(SERVICE),*).log >/dev/null 2>&1 || { echo "error: there is no such log; \`make up\` starts one"; exit 1; }
	@tail -n 40 $(if $(FOLLOW),-F) .services/$(or $(SERVICE),*).log

backup: ## databases, object store and run commits of the running compose stack, into a new folder: TO=folder
	@infra/backup.sh backup "$(TO)"

restore: ## replace the compose stack's databases by those of a backup, and add its objects and commits: FROM=folder
	@infra/backup.sh restore "$(FROM)"

lock: $(DEV) ## resolve pyproject.toml anew and pin what came out, with hashes; ARGS="--index URL --wheels FOLDER"
	@python -m pip install --quiet --upgrade --upgrade-strategy eager --group dev --group infra '.[production]'
	@python infra/lock.py lock $(ARGS)

sbom: $(READY) ## the locked packages as a CycloneDX bill of materials: sbom.cdx.json
	@python infra/lock.py sbom > sbom.cdx.json

$(READY): requirements.lock infra/cuda.lock
	@command -v git >/dev/null || { echo "error: git is not installed; the pipeline versions its runs with it"; exit 1; }
	@for python in $${PYTHON:-python3} python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    found=$$python; break; fi; done; \
	if [ -z "$${found:-}" ]; then \
	  echo "error: no Python 3.11 or newer with venv was found; install one, or name it: make PYTHON=/path/to/python"; \
	  exit 1; fi; \
	echo "Making the environment in .venv with $$("$$found" --version) (a few minutes, once)"; \
	"$$found" -m venv .venv
	@install="python -m pip install --disable-pip-version-check --no-input --no-deps --require-hashes"; \
	awk '/^torch==/ { on = 1 } on { print } on && !/\\$$/ { exit }' requirements.lock > .venv/torch.lock; \
	$$install --quiet --no-index -r .venv/torch.lock 2>/dev/null || true; : a CPU build in a folder of wheels, where there is one; \
	{ $$install -r requirements.lock && \
	  if python infra/needs_cuda.py; then $$install -r infra/cuda.lock; fi && python -m pip check; } 2>&1 | tee .venv/install.log | \
	  awk -v total=$$(grep -c == requirements.lock) '/^(Collecting|Processing|Requirement already)/ { n++; \
	  if (n % 20 == 0 && n < total) { printf "  %d of about %d packages\n", n, total; fflush() } } \
	  /^Installing/ { print "  installing" ; fflush() } /^ERROR/ { print }' || { \
	  echo "error: the packages could not be installed; see .venv/install.log"; exit 1; }
	@touch $(READY)

$(DEV): $(READY) requirements-dev.lock
	@echo "Installing the packages that tests and linters need"
	@python -m pip install --disable-pip-version-check --no-input --no-deps --require-hashes -r requirements-dev.lock > .venv/install-dev.log 2>&1 && \
	  python -m pip check >> .venv/install-dev.log 2>&1 || { \
	  echo "error: the packages could not be installed; see .venv/install-dev.log"; exit 1; }
	@touch $(DEV)

.PHONY: help demo run follow retrain sweep promote approve rollback compare verify sign push reproduce report test test-fast test-stack test-faults doctor gpu-check sync lint bench up down \
  status logs backup restore lock sbom plan runs resume open gc check-cache
