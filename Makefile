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
.PHONY: help setup serve test lint check bench bench-peers bench-load bench-batches bench-memory gpu-check train-heads lock clean

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

bench: setup bench-peers ## the whole comparison: this engine, generate and vLLM (half an hour)
	$(BIN)/python -m bench.generation $(ARGS)
	$(BIN)/python -m bench.suite $(ARGS)

bench-batches: setup ## speculation on against off at every load (two hours; ARGS narrows it)
	$(BIN)/python -m bench.batches $(ARGS)

bench-load: setup bench-peers ## the server under Poisson load, and vLLM's beside it
	$(BIN)/python -m bench.load $(ARGS)

bench-memory: setup ## resident memory over 2,000 requests
	$(BIN)/python -m bench.memory $(ARGS)

gpu-check: setup ## exactness and step times on this accelerator, with weights made from a config
	$(BIN)/python -m bench.gpu_check $(ARGS)

bench-peers: .venv-vllm/.installed .venv-guidellm/.installed ## vLLM and guidellm, each in its own environment

.venv-%/.installed: bench/peers/%.txt
	@echo "installing $*: some minutes, once"
	$(PYTHON) -m venv --without-pip .venv-$*
	$(PYTHON) -m pip --python .venv-$*/bin/python install --quiet --no-deps -r $<
	touch $@

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
