# Two commands on a machine with Python 3.11+, make and a network: `make demo` and `make test`.
# Everything is installed into .venv, with the versions of constraints.txt; a stamp file there marks each finished stage.

PYTHON ?= python3
VENV := .venv
# make ... PY=python3 uses that Python with its packages, and installs nothing
PY := $(VENV)/bin/python
ready = $(if $(filter file,$(origin PY)),$(VENV)/.$(1))
# no build isolation: the build backend is pinned and installed like everything else
INSTALL := $(PY) -m pip install --disable-pip-version-check --quiet --no-build-isolation --constraint constraints.txt
PYTEST := $(PY) -m pytest
# the bridge's tests need it; `make test-newest TORCH=torch` takes the newest
TORCH ?= torch==2.13.0
NEWEST := build/newest
comma := ,
# tests of each tensor-core Config: what it compiles to, and what it computes
EACH_CONFIG := attention_*.py matmul_sm*.py retention_*.py
COMPILED := $(wildcard $(addprefix tests/cuda/compile/test_,$(EACH_CONFIG)))
SIMULATED := $(wildcard $(addprefix tests/cuda/simulator/test_,$(EACH_CONFIG)))
# every case and every kernel on every rung: a quarter of the simulator tests
CASES := tests/cuda/simulator/test_cases.py

# kernels can be compiled where NVIDIA publishes wheels; elsewhere (macOS) they only run in the simulator
COMPILER := $(if $(filter Linux,$(shell uname -s)),cu13)
# not empty if a driver for CUDA 13 is installed: the demo then runs on the GPU
GPU := $(shell nvidia-smi 2>/dev/null | grep --extended-regexp --only-matching 'CUDA[A-Z a-z]* Version: 1[3-9]' | head -n 1)

.PHONY: help install demo test numbers test-newest test-cpu test-torch test-simulator test-cases test-compile test-gpu test-gpu-cold sanitize mutants \
    kernels check check-builds check-compile check-simulator wheel docs lint format clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       run the operators on the GPU if there is one, else in the simulator'
	@echo 'make test       run the CPU tests, the simulator tests and the offline compile checks; no GPU needed'
	@echo 'make lint       run ruff and pyright'
	@echo 'make format     let ruff fix what it can'
	@echo 'make check      compile every kernel for sm_90a; compile and simulate each tensor-core Config'
	@echo 'make mutants    break each step of every kernel that waits; the simulator must reject them all'
	@echo 'make test-gpu   run what needs a GPU: operators and torch bridge; compile kernels on all cores first'
	@echo 'make sanitize   run the tools of compute-sanitizer over the EDGE cases; ARGS="softmax --tools racecheck"'
	@echo 'make docs       build the site in build/site'
	@echo 'make wheel      build wheel and sdist in dist; try the wheel in an empty environment'
	@echo 'make kernels ARCH=sm_90a   build a wheel of compiled kernels in dist: with it, no call waits for a compiler'
	@echo 'make clean      remove $(VENV) and caches'
	@echo 'With PY=python3, make uses that Python as it is and installs nothing.'

# all that any target needs, except a GPU
install: $(foreach stage,package docs lint test,$(call ready,$(stage)))

demo: $(call ready,base) $(if $(GPU),$(call ready,gpu))
	$(PY) -m dualops demo

# targets in parallel on two cores; each prints its output at its end. One thread each: the threads of NumPy and torch would
# otherwise wait for one another
in_parallel := OMP_NUM_THREADS=1 $(MAKE) --jobs=2 --output-sync=target
# this order keeps both cores busy to the end: the targets take 180, 160, 115, 210 and 80 s of a fast core, up to twice as
# long on a slow one
test: $(call ready,test)
	$(in_parallel) test-simulator test-compile test-torch test-cpu test-cases

# in a new environment of its own, without constraints. CI runs it weekly
test-newest:
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet \
	    --editable '.[$(if $(COMPILER),$(COMPILER)$(comma))bench,test]' '$(TORCH)'
	$(NEWEST)/bin/python -m pip list
	$(in_parallel) PY=$(NEWEST)/bin/python test-torch test-cpu

test-cpu: $(call ready,test)
	$(PYTEST) tests --ignore=tests/torch_bridge $(addprefix --ignore=tests/cuda/,simulator compile gpu)

test-torch: $(call ready,test)
	$(PYTEST) tests/torch_bridge

# in processes of their own: Numba reads the switch at its first import
test-simulator: $(call ready,test)
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) tests/cuda/simulator $(addprefix --ignore=,$(SIMULATED) $(CASES))

test-cases: $(call ready,test)
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) $(CASES)

# ARGS: --share 6
check: $(call ready,test)
	$(in_parallel) check-builds check-compile check-simulator

check-simulator: $(call ready,test)
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) $(SIMULATED) $(ARGS)

ifdef COMPILER
# builds a part of what `make check` builds, and checks more of it
test-compile: $(call ready,test)
	$(PYTEST) tests/cuda/compile $(addprefix --ignore=,$(COMPILED))

check-compile: $(call ready,test)
	$(PYTEST) $(COMPILED) $(ARGS)

check-builds: $(call ready,test)
	$(PY) -m dualops check --jobs 2
else
test-compile check-compile check-builds:
	@echo 'NVIDIA publishes no compiler for this system: kernels were run in the simulator, not compiled'
endif

# ARGS: --jobs 4, softmax_ring, --share 6
mutants: $(call ready,test)
	$(PY) -m tests.wrong --jobs 2 $(ARGS)

# SINCE=REV: the tests of kernels that changed since REV, and a sample. ARGS: --minutes 9, --only softmax, --all
test-gpu: $(call ready,test)
	$(PY) -m tests.cuda.gpu $(if $(SINCE),--since $(SINCE)) $(ARGS)

# the bridge's tests several times, each time with no kernel on disk
test-gpu-cold: $(call ready,test)
	$(PY) -m tests.cuda.gpu.cold $(ARGS)

sanitize: $(call ready,test)
	$(PY) -m tests.cuda.gpu.sanitize $(ARGS)

# all that README and the pages show, in parts of 9 minutes. ARGS: --minutes 60
numbers: $(call ready,test)
	$(PY) -m benchmarks numbers $(ARGS)

# ARCH=sm_90a; needs no GPU. ARGS: --jobs 4
kernels: $(call ready,package) $(call ready,test)
	$(PY) -m release.kernels --arch $(ARCH) --out dist $(ARGS)

wheel: $(call ready,package)
	rm -rf dist
	$(PY) -m build --quiet --no-isolation .
	$(PY) -m tests.wheel dist

# the front page links to asv's own pages; these fetch their scripts from the network when read
docs: $(call ready,docs)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@if git rev-parse --quiet --verify HEAD~1 >/dev/null; then $(PY) -m asv publish --html-dir build/site/history; \
	    else echo 'there are no commits to draw the history of the benchmarks from: the site has none'; fi

lint: $(call ready,lint)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

format: $(call ready,lint)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist dualops.egg-info

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'dualops needs Python 3.11 or newer: make PYTHON=python3.12 ...'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) setuptools
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.gpu: $(VENV)/.base
	$(INSTALL) --editable '.[cu13]'
	@touch $@

$(VENV)/.package: $(VENV)/.base
	$(INSTALL) --editable '.[package]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(INSTALL) --editable '.[docs,plot]'
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(INSTALL) --editable '.[$(if $(COMPILER),$(COMPILER)$(comma))bench,test]' '$(TORCH)'
	@touch $@

# pyright reads the packages that the sources import, so it needs all of them
$(VENV)/.lint: $(VENV)/.test $(VENV)/.docs
	$(INSTALL) --editable '.[lint]'
	@touch $@
