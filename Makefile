# Everything that a user or CI runs. Each target works on a fresh clone: it sets up .venv first.
# ARGS are passed on:   make bench ARGS="--prompts 8"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(shell sed -n 's/.*"\(pip==[0-9.]*\)".*/\1/p' pyproject.toml)
ARGS ?=
CONFIG ?= serve_config.yaml
PROMPTS ?= ../shared/data/train_prompts.jsonl.gz
OUT ?= build/heads

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint check bench train-heads lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## install everything into .venv, once

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): a few minutes, once"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[serve,dev]"
	touch $@

# --without-pip: Debian's python may lack ensurepip; the pip outside installs the one inside.
$(BIN)/python:
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $@ install --quiet "$(PIP)"

serve: setup ## serve CONFIG (serve_config.yaml: the default model on 127.0.0.1:8000)
	$(BIN)/python -m deployments $(CONFIG)

lint: setup ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## lint and the fast tests: what to run before a commit
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test: lint ## lint and all tests: what CI runs
	$(BIN)/python -m pytest $(ARGS)

bench: setup ## speed and exactness on the benchmark prompts
	$(BIN)/python -m bench.generation $(ARGS)

train-heads: setup ## train draft heads for the default model on PROMPTS, into OUT
	$(BIN)/specdec train-heads --prompts $(PROMPTS) --out $(OUT) $(ARGS)

lock: | $(BIN)/python ## install what pyproject.toml asks for now, and write constraints.txt from it
	$(BIN)/python -m pip install --quiet -e ".[serve,dev]"
	(sed '/^[^#]/,$$d' constraints.txt; \
	 $(BIN)/python -m pip freeze --exclude-editable | \
	 sed -E '/^(nvidia-|triton|specdec)/d; s/\+[a-z0-9.]+$$//') > constraints.new
	mv constraints.new constraints.txt

clean: ## remove .venv and caches; fetched models stay in ~/.cache/specdec
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
