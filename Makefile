# You need Python 3.11 or newer and make; no compiler and no GPU. `make` alone lists the targets.
PYTHON ?= python3
PIP_ARGS ?=
DEMO_ARGS ?=
LAB_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)
DECLARED := settings.ini setup.py pyproject.toml

.PHONY: help install demo lab test test-full clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12
	@echo 'PYTHON=python3.12 chooses the interpreter, PIP_ARGS="..." is passed on to pip.'

install: .venv/.dev ## make .venv with everything that developing needs (once)

demo: .venv/.notebook ## train a ViT on one process and in four layouts, and compare
	$(BIN)/python experiments/demo.py $(DEMO_ARGS)

lab: .venv/.notebook ## open JupyterLab on localhost; the address with its token is printed
	$(BIN)/jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

test: .venv/.dev ## run all that CI runs
	$(BIN)/python scripts/check.py

test-full: .venv/.dev ## add the long matrices; the report goes to reports/test-full.json
	$(BIN)/python scripts/check.py --full

clean: ## remove build products and caches (.venv and outputs stay)
	rm -rf build dist *.egg-info _docs _proc .pytest_cache
	find nbs experiments libai_wb tests scripts -name __pycache__ -prune -exec rm -rf {} +
	find nbs experiments -name .ipynb_checkpoints -prune -exec rm -rf {} +

# The stamps: an installation is repeated only when what it was made from has changed.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"libai_wb needs Python 3.11 or newer and $(PYTHON) is {v[0]}.{v[1]}: run make again with PYTHON=python3.11 or newer.")'
	$(PYTHON) -m venv .venv

.venv/.dev: $(DECLARED) | .venv/bin/pip
	$(PIP) -e '.[dev,notebook]'
	@touch .venv/.notebook .venv/.dev

.venv/.notebook: $(DECLARED) | .venv/bin/pip
	$(PIP) -e '.[notebook]'
	@touch .venv/.notebook
