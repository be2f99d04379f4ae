# A bare `make` prints the manual; its lines are the comments behind the targets.
# PYTHON=python3.12 make setup     chooses the interpreter
# make setup TORCH_ARGS='--index-url https://download.pytorch.org/whl/cu130'   takes torch from elsewhere

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
KERNELS := $(wildcard CMakeLists.txt kernels/*.* kernels/*/*.*)
SOURCES := pyproject.toml constraints.txt .ci/setup .ci/torch_index.py $(KERNELS)
# Where kernels and matrix products use every core, two test processes would fight for them.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Tests start hundreds of processes: where no bytecode is kept, each would compile every module again.
SUITE_ENV := $(TEST_ENV) PYTHONDONTWRITEBYTECODE=
# Tests wait for servers of their own: one process more than most small machines have cores. Each takes the next tests
# of its half of the list, so that a module's servers start once, and at the end some of another's half.
PARALLEL := -n 3 --dist worksteal
# The tests of the gateway's process.
COMPILED := tests/compiled tests/gateway tests/http tests/observe tests/remote tests/router
TIERS ?= everyday
SELECTED := $(if $(filter all,$(TIERS)),-m 'not soak')
# What `make test-compiled` runs as well is left to it: make test TIERS=all COMPILED_TESTS=apart
COMPILED_TESTS ?= too
APART := $(if $(filter apart,$(COMPILED_TESTS)),$(addprefix --compiled-apart=,$(COMPILED)))
ARGS ?=

export PYTHON TORCH_ARGS TORCH_CPU_INDEX

.PHONY: help
help: ## Print this manual
	@echo "inferd: one inference server for every model"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "ARGS='...' adds arguments: make demo ARGS='--port 9000', make test ARGS='-k scheduler'"

.PHONY: setup
setup: $(VENV)/.dev ## Create .venv with everything for development (again when pyproject or kernels change)

.PHONY: demo
demo: $(VENV)/.llm ## Set up what the server needs and serve the bundled models: chat, digits, intents
	@$(BIN)/inferd serve demo $(ARGS)

.PHONY: test
test: $(VENV)/.dev ## Run the everyday tests; those marked thorough as well: make test TIERS=all
	@$(SUITE_ENV) $(BIN)/python -m pytest $(PARALLEL) $(SELECTED) $(APART) $(ARGS)

.PHONY: check
check: $(VENV)/.dev ## Format, lint, types, the import contract, generated pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/docs.py --check

.PHONY: format
format: $(VENV)/.dev ## Rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: docs
docs: $(VENV)/.dev ## Write the generated pages again
	@$(BIN)/python .ci/docs.py

.PHONY: docs-site
docs-site: $(VENV)/.dev ## Build the searchable pages into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: vendor
vendor: ## Fetch the console's libraries from npm again, and check their hashes
	@python3 .ci/vendor.py

.PHONY: bench
bench: $(VENV)/.dev ## Measure the server as a wheel installs it, and write a table (bench/README.md)
	@.ci/compiled
	@build/compiled/env/bin/python -m bench $(ARGS)

.PHONY: test-compiled
test-compiled: $(VENV)/.dev ## The tests of the gateway's process against its compiled modules
	@.ci/compiled
	@$(SUITE_ENV) build/compiled/env/bin/python -m pytest -p no:cacheprovider $(PARALLEL) $(SELECTED) $(COMPILED) $(ARGS)

.PHONY: test-clients
test-clients: $(VENV)/.dev ## Published clients and agents against the server, installed under build/clients (ARGS: names)
	@$(TEST_ENV) .ci/clients $(ARGS)

.PHONY: gpu-check
gpu-check: $(VENV)/.dev ## On a machine with a CUDA device: its tests, then everything that only it can show (docs/gpu.md)
	@TRITON_INTERPRET=0 $(BIN)/python -m pytest -p no:cacheprovider -m gpu tests/engine/cuda
	@TRITON_INTERPRET=0 $(BIN)/python -m bench.gpu $(ARGS)

.PHONY: soak
soak: $(VENV)/.dev ## Every fault and attack with its control, then a long run under load and faults
	@$(SUITE_ENV) $(BIN)/python -m pytest -n 2 -m "soak or not soak" tests/experiments
	@$(SUITE_ENV) $(BIN)/python -m pytest -m soak --ignore=tests/experiments tests
	@$(BIN)/python -m bench.soak $(ARGS)
	@$(BIN)/python -m bench.availability --out build/availability

.PHONY: sanitize
sanitize: $(VENV)/.dev ## The kernels' tests with kernels in which every bad access ends the process (GCC)
	@.ci/sanitize $(ARGS)

.PHONY: mutants
mutants: $(VENV)/.dev ## Small wrong changes, each against the tests that run it: what none notices is a gap (20 minutes)
	@$(TEST_ENV) $(BIN)/python -m tests.mutants $(ARGS)

.PHONY: clean
clean: ## Remove .venv, builds and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.dev: $(SOURCES)
	@.ci/setup dev

# What development needs contains what the server needs.
$(VENV)/.llm: $(SOURCES)
	@.ci/setup llm
