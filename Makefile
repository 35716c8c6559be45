# Everything that a user or CI runs. Each target works on a fresh clone: it sets up .venv first.
# ARGS are passed on:   make bench ARGS="--blocks 2" GENERATION_ARGS="--prompts 8"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(shell sed -n 's/.*"\(pip==[0-9.]*\)".*/\1/p' pyproject.toml)
ARGS ?=
# test processes; each keeps to cores of its own
JOBS ?= 2
GENERATION_ARGS ?=
CONFIG ?= serve_config.yaml
PROMPTS ?= ../shared/data/train_prompts.jsonl.gz
OUT ?= build/heads

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint check bench bench-peers bench-load bench-batches bench-prefix bench-tracing bench-memory bench-json equivalence conformance bench-overload bench-disconnects fuzz gpu-check train-heads lock clean bench-autoscale bench-replicas bench-routing multi-node manifests manifests-check capacity image-check docs-check views dashboard bench-failover bench-recovery chaos

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

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
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

# status 5: ARGS leave nothing of this half
test: lint ## lint and all tests: what CI runs
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not served" $(ARGS) || test $$? = 5
	$(BIN)/python -m pytest -m served $(ARGS) || test $$? = 5

bench: setup bench-peers ## the whole comparison: this engine, generate and vLLM (an hour)
	$(BIN)/python -m bench.generation $(GENERATION_ARGS)
	$(BIN)/python -m bench.suite $(ARGS)

bench-batches: setup ## speculation on against off at every load (two hours; ARGS narrows it)
	$(BIN)/python -m bench.batches $(ARGS)

bench-load: setup bench-peers ## the server under Poisson load, and vLLM's beside it
	$(BIN)/python -m bench.load $(ARGS)

bench-prefix: setup ## first token by where a prompt's KV is found, and what the store costs
	$(BIN)/python -m bench.prefix $(ARGS)

equivalence: setup ## 200 random requests of all parameters, speculation on and off, in float32
	$(BIN)/python -m bench.equivalence $(ARGS)

conformance: setup $(if $(SERVER),,.venv-vllm/.installed) ## the clients' tests against vLLM's server, or against SERVER with MODEL
	$(BIN)/python -m bench.conformance $(if $(SERVER),--server $(SERVER)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

bench-json: setup ## 100 JSON schemas: are all outputs valid, and how many tokens per round
	$(BIN)/python -m bench.json_schemas $(ARGS)

bench-tracing: setup ## throughput with traces on, of that with all off
	$(BIN)/python -m bench.tracing $(ARGS)

bench-failover: setup ## 100 kills of workers in the midst of streams: texts and pauses
	$(BIN)/python -m bench.failover $(ARGS)

bench-recovery: setup ## what checkpoints cost, and how soon a long generation goes on elsewhere
	$(BIN)/python -m bench.recovery $(ARGS)

chaos: setup ## ten minutes of kills, pauses and lost stores under load; ARGS="--seconds 60" is shorter
	$(BIN)/python -m bench.chaos $(ARGS)

bench-memory: setup ## resident memory over 2,000 requests
	$(BIN)/python -m bench.memory $(ARGS)

views: setup ## write the dashboard, the alert rules and the docs' table from the table of metrics
	$(BIN)/python -m deployments.metrics.views

dashboard: setup ## try dashboard and alerts with a real Prometheus and induced faults; docs/dashboard.png
	$(BIN)/python -m bench.dashboard $(ARGS)

bench-overload: setup ## ten times more requests than it can answer, for two minutes
	$(BIN)/python -m bench.overload $(ARGS)

bench-disconnects: setup ## 500 clients that leave at random moments
	$(BIN)/python -m bench.disconnects $(ARGS)

fuzz: setup ## 20,000 requests that are nearly right, and schemathesis, against the real server
	$(BIN)/python -m bench.fuzz $(ARGS)

bench-autoscale: setup ## workers follow a ramp of load, on real Ray; and down to none and back
	$(BIN)/python -m bench.autoscale $(ARGS)
	$(BIN)/python -m bench.autoscale --to-zero

bench-replicas: setup ## throughput of two workers against one, with simulated steps
	$(BIN)/python -m bench.replicas $(ARGS)

bench-routing: setup ## what a decision of the router costs among 64 workers
	$(BIN)/python -m bench.routing_cost $(ARGS)

multi-node: setup ## a cluster of three hosts loses a node, its head, and a node that is drained (root)
	$(BIN)/python -m bench.multi_node $(ARGS)

manifests: setup ## write what the manifests take from serve_config.yaml
	$(BIN)/python -m k8s.tools.serve_config

manifests-check: setup ## build every overlay, and check schemas, rules, secrets and images
	$(BIN)/python -m k8s.tools.check

capacity: setup ## compute the tables of docs/capacity.md
	$(BIN)/python -m k8s.tools.capacity

image-check: setup ## the Dockerfile's steps in a clean root, and the server from it (root, debootstrap)
	$(BIN)/python -m k8s.tools.image_check $(ARGS)

docs-check: setup ## run the commands of docs/operations.md that need no cluster
	$(BIN)/python -m k8s.tools.docs_commands $(ARGS)

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
