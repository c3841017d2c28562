# Two commands on a machine with Python 3.11+, make and a network: `make demo` and `make test`.
# Everything is installed into .venv, exactly as constraints.txt says; a stamp in it remembers each stage.

PYTHON ?= python3
VENV := .venv
# make ... PY=python3: that one, with what it has; nothing is installed then
PY := $(VENV)/bin/python
ready = $(if $(filter file,$(origin PY)),$(VENV)/.$(1))
# the build backend is installed, pinned, like everything else: no isolated build that would fetch another
INSTALL := $(PY) -m pip install --disable-pip-version-check --quiet --no-build-isolation --constraint constraints.txt
PYTEST := $(PY) -m pytest
# the bridge's tests need it; `make test-newest TORCH=torch` takes the newest
TORCH ?= torch==2.13.0
NEWEST := build/newest
comma := ,
# tests of each Config on tensor cores: what it compiles to, and what it computes
EACH_CONFIG := attention_*.py matmul_sm*.py retention_*.py
COMPILED := $(wildcard $(addprefix tests/cuda/compile/test_,$(EACH_CONFIG)))
SIMULATED := $(wildcard $(addprefix tests/cuda/simulator/test_,$(EACH_CONFIG)))
# every case on every rung: a quarter of what is simulated
CASES := tests/cuda/simulator/test_cases.py

# kernels can be compiled where NVIDIA's wheels exist; elsewhere (macOS) they run in the simulator alone
COMPILER := $(if $(filter Linux,$(shell uname -s)),cu13)
# a driver for CUDA 13 is there: the demo then runs on the GPU
GPU := $(shell nvidia-smi 2>/dev/null | grep --extended-regexp --only-matching 'CUDA[A-Z a-z]* Version: 1[3-9]' | head -n 1)

.PHONY: help install demo test test-newest test-cpu test-torch test-simulator test-cases test-compile test-gpu test-gpu-cold sanitize mutants \
    kernels check check-builds check-compile check-simulator wheel docs lint format clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       the operators on the GPU if there is one, else in the simulator'
	@echo 'make test       CPU tests, simulator tests, offline compile checks; no GPU needed'
	@echo 'make test-newest   the bridge and the CPU tests with the newest packages that pip finds; TORCH=torch for its newest too'
	@echo 'make install    whatever they need but a GPU; each of them does so itself'
	@echo 'make test-gpu   what needs a GPU: all operators and the torch bridge, kernels compiled on all cores first'
	@echo 'make sanitize   the four tools of compute-sanitizer over the EDGE cases; ARGS="softmax --tools racecheck"'
	@echo 'make mutants    every kernel that waits with one step of its protocol wrong; the simulator must reject them all'
	@echo 'make check      every kernel compiled for sm_90a; each Config on tensor cores compiled, and simulated'
	@echo 'make wheel      wheel and sdist in dist; the wheel installed in an empty environment, its demo run in the simulator'
	@echo 'make kernels ARCH=sm_90a   a wheel of compiled kernels in dist: with it, no call waits for a compiler'
	@echo 'make docs       the site in build/site, without a network once its packages are installed'
	@echo 'make lint       ruff and pyright'
	@echo 'make format     let ruff mend what it can'
	@echo 'make clean      remove $(VENV) and caches'
	@echo 'Any of them with PY=python3 uses that Python as it is, and installs nothing.'

# whatever any of them needs
install: $(foreach stage,package docs lint test,$(call ready,$(stage)))

demo: $(call ready,base) $(if $(GPU),$(call ready,gpu))
	$(PY) -m dualops demo

# processes side by side on two cores; what each says comes when it is done. With a thread each: NumPy's and torch's own
# would wait for one another
side_by_side := OMP_NUM_THREADS=1 $(MAKE) --jobs=2 --output-sync=target
# in this order neither core is left alone at the end: they take 180, 160, 115, 210 and 80 s of a fast core, up to twice as
# much of another
test: $(call ready,test)
	$(side_by_side) test-simulator test-compile test-torch test-cpu test-cases

# in an environment of its own, made anew, without constraints
test-newest:
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet \
	    --editable '.[$(if $(COMPILER),$(COMPILER)$(comma))bench,test]' '$(TORCH)'
	$(NEWEST)/bin/python -m pip list
	$(side_by_side) PY=$(NEWEST)/bin/python test-torch test-cpu

test-cpu: $(call ready,test)
	$(PYTEST) tests --ignore=tests/torch_bridge $(addprefix --ignore=tests/cuda/,simulator compile gpu)

test-torch: $(call ready,test)
	$(PYTEST) tests/torch_bridge

# processes of their own: Numba reads the switch when it is first imported
test-simulator: $(call ready,test)
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) tests/cuda/simulator $(addprefix --ignore=,$(SIMULATED) $(CASES))

test-cases: $(call ready,test)
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) $(CASES)

# ARGS: --share 6
check: $(call ready,test)
	$(side_by_side) check-builds check-compile check-simulator

check-simulator: $(call ready,test)
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) $(SIMULATED) $(ARGS)

ifdef COMPILER
# builds a part of what `make check` builds, and looks closer
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

# SINCE=REV: the tests of kernels that changed since, and a sample. ARGS: --minutes 9, --only softmax, --all
test-gpu: $(call ready,test)
	$(PY) -m tests.cuda.gpu $(if $(SINCE),--since $(SINCE)) $(ARGS)

# the bridge's tests again and again, each time with no kernel on the disk
test-gpu-cold: $(call ready,test)
	$(PY) -m tests.cuda.gpu.cold $(ARGS)

sanitize: $(call ready,test)
	$(PY) -m tests.cuda.gpu.sanitize $(ARGS)

# ARCH=sm_90a; needs no GPU. ARGS: --jobs 4
kernels: $(call ready,package) $(call ready,test)
	$(PY) -m release.kernels --arch $(ARCH) --out dist $(ARGS)

wheel: $(call ready,package)
	rm -rf dist
	$(PY) -m build --quiet --no-isolation .
	$(PY) -m tests.wheel dist

# asv writes its own pages, which the front page links to; read, they fetch their scripts from the network
docs: $(call ready,docs)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@if git rev-parse --quiet --verify HEAD~1 >/dev/null; then $(PY) -m asv publish --html-dir build/site/history; \
	    else echo 'no commits are here to draw the history of the benchmarks by: the site is without it'; fi

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
