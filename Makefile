# Penstock's commands. Each sets up what it needs first; once that is done it costs nothing.
#
#   make serve [MODEL=<folder or hub id>] [ARGS="--port 8001 ..."]      without MODEL: canary, the small model that comes with it
#   make test  [ARGS="tests/unit -x"]         without the tests marked exhaustive; a process more than cores (ARGS="-n 0": one)
#   make test-all [ARGS=...]                  with them
#   make lint, make mutants, make bench       style and types; do the tests find known faults; the standing measurements
#
# Serving needs the runtime dependencies alone; test, lint and bench take the dev extra as well.

VENV ?= .venv
PYTHON ?=
export TORCH
BIN := $(VENV)/bin
SERVING := $(VENV)/.ready-to-serve
DEVELOPING := $(VENV)/.ready-to-develop
# Files are not divided, because their tests share servers and models (tests/conftest.py).
PARALLEL := -n auto --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup serve hostile test test-all mutants lint bench docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(DEVELOPING)

serve: $(SERVING)
	exec $(BIN)/penstock serve $(if $(MODEL),"$(MODEL)") $(ARGS)

test: $(DEVELOPING)
	$(BIN)/python -m pytest $(PARALLEL) -m "not exhaustive" $(ARGS)

test-all: $(DEVELOPING)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# Ten minutes of hostile clients beside a well-behaved one, then 50 signals under 64 streams; prints what it measured.
hostile: $(DEVELOPING)
	$(BIN)/python -m tests.hostile.full
	$(BIN)/python -m pytest -s -m exhaustive tests/hostile/test_kills.py

# Puts known faults into a copy of the source and runs the tests that must find them (tests/mutants.toml).
mutants: $(DEVELOPING)
	$(BIN)/python tests/mutants.py $(ARGS)

lint: $(DEVELOPING)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEVELOPING)
	$(BIN)/python bench/run.py $(ARGS)

# Makes build/site/index.html and the pages around it from docs/.
docs: $(DEVELOPING)
	$(BIN)/mkdocs build --strict -q -f docs/site/mkdocs.yml

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache .import_linter_cache

$(SERVING): pyproject.toml .ci/setup
	@.ci/setup "$(PYTHON)" "$(VENV)" .
	@touch $@

$(DEVELOPING): $(SERVING)
	@.ci/setup "$(PYTHON)" "$(VENV)" '.[dev]'
	@touch $@
