# make setup   .venv with the project and all it needs
# make test    lint, types and tests (what .ci/run calls)
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test lint types pytest clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

# torch comes first and alone: its exact pin picks the build that fits this machine before anything else asks for it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

pytest: $(STAMP)
	$(BIN)/pytest

clean:
	rm -rf .venv build dist *.egg-info
