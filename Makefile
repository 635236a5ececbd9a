# Everything here needs Python 3.11 or newer and make; the rest is installed into .venv.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
WORKDIR ?= runs/gpt_baseline
CONFIG ?= configs/gpt_baseline.py

.PHONY: help train test lint verify clean

help:
	@echo "make train   train a small GPT on real text and compare it with n-gram models"
	@echo "make test    run the test suite"
	@echo "make lint    ruff and pyrefly"
	@echo "make verify  the long repeats: kills, device counts (results in docs/results)"
	@echo "make clean   remove the environment, caches and runs"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The stamps: what is installed is installed again only when the requirements change.
$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.base

train: $(VENV)/.base
	$(PY) -m experiments.train_lm --config=$(CONFIG) --workdir="$(WORKDIR)"

test: $(VENV)/.dev
	$(PY) -m pytest

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyrefly check

clean:
	rm -rf $(VENV) .cache runs
