# make setup     .venv with the project and all it needs
# make test      lint, types, documentation and tests (what .ci/run calls)
# make test-all  the same with eight times as many drawn examples of every property, all fuzzed command lines and graphs
# make docs      the documentation and the reference of the Python API as a site, in build/site; warnings are errors
# make test-transformers    transformers' own tests of models, on ours (docs/huggingface.md; .ci/run calls it)
# make demo      train a Latte-Macchiato and a Transformer of the same size, compare them, write runs/demo/report.html
# make bench     time ops, layers, models and decoding beside peers (15 minutes), write docs/results/bench
# make mutants   seed bugs one at a time and see the tests catch each
# make fuzz      mutations of command lines and recipes, 5,000 instead of the 1,400 of make test
# make crash     kill training at random moments and damage checkpoints; resumed runs must be bitwise the same
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test test-all lint types pytest fetch-transformers test-transformers docs demo bench mutants fuzz crash clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

# torch comes first and alone: its exact pin picks the build that fits this machine before anything else asks for it.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard latte/ops/native/*.cpp latte/ops/native/*.h)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,docs,all]'
	@touch $@

test: lint types docs pytest

test-all:
	LATTE_EXAMPLES=96 LATTE_FUZZ_CASES=5000 $(MAKE) test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# One process per core: most tests are small and use one thread each.
pytest: $(STAMP)
	$(BIN)/pytest -n auto

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

# The tests of the installed version, from its source distribution; LATTE_TRANSFORMERS_TESTS names another copy.
VERSION = $(shell $(BIN)/python -c 'import importlib.metadata as m; print(m.version("transformers"))')
TRANSFORMERS = .venv/cache/transformers-$(VERSION)
fetch-transformers: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt parameterized
	test -d $(TRANSFORMERS)/tests || { rm -rf .venv/cache && mkdir -p .venv/cache/unpacked && \
	  $(BIN)/pip download --quiet --no-deps --no-binary transformers --dest .venv/cache transformers==$(VERSION) && \
	  tar -xzf $(TRANSFORMERS).tar.gz -C .venv/cache/unpacked && mv .venv/cache/unpacked/* .venv/cache/; }

test-transformers: $(STAMP)
	test -n "$$LATTE_TRANSFORMERS_TESTS" || $(MAKE) fetch-transformers
	LATTE_TRANSFORMERS_TESTS=$${LATTE_TRANSFORMERS_TESTS:-$(TRANSFORMERS)/tests} \
	  $(BIN)/pytest tests/huggingface/test_transformers_suite.py

demo: $(STAMP)
	$(BIN)/latte compare --config demo-compare
	$(BIN)/latte report runs/demo --out runs/demo/report.html

bench: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/latte bench --out docs/results/bench

mutants: $(STAMP)
	$(BIN)/python scripts/mutants.py

crash: $(STAMP)
	$(BIN)/python scripts/crash_test.py

clean:
	rm -rf .venv build dist *.egg-info

fuzz: $(STAMP)
	LATTE_FUZZ_CASES=5000 $(BIN)/pytest tests/cli/test_fuzz.py -n auto
