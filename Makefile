# Every task of the repository as one command, each in .venv, which is built from constraints.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRAS ?= torch,tensorflow,keras,jax,test,lint,bench,demo

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
INSTALL := $(BIN)/python -m pip install -qq --constraint constraints.txt
TOY_PLUGIN := $(wildcard tests/toy_plugin/pyproject.toml)

export TF_CPP_MIN_LOG_LEVEL := 3
export MPLBACKEND := Agg

.DEFAULT_GOAL := help
.PHONY: help install test lint demo bench docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

install: $(STAMP) ## make .venv with polybridge (editable) and its frameworks

test: $(STAMP) ## run the tests; PYTEST_ARGS="-k relay" passes arguments on
	$(BIN)/python -m pytest -n 2 --dist loadfile --timeout=300 --timeout-method=thread $(PYTEST_ARGS)

lint: $(STAMP) ## check style, types and layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_layers.py

demo: $(STAMP) ## run the examples into out/: digits, then the pendulum; DEMO_ARGS=--quick for a short run
	$(BIN)/python -m examples.digits $(DEMO_ARGS)
	$(BIN)/python -m examples.pendulum $(DEMO_ARGS)

bench: $(STAMP) ## measure what a crossing costs; BENCH_ARGS=--help for the choices
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: $(STAMP) ## build the documentation into site/
	$(INSTALL) mkdocs
	$(BIN)/mkdocs build

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) out site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt $(TOY_PLUGIN)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[$(EXTRAS)]' $(TOY_PLUGIN:%/pyproject.toml=--editable %)
	touch $@
