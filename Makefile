# Two commands on a fresh machine: `make demo` and `make test`. Both set up `.venv` first, once.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar on
FUZZ_SECONDS ?= 600
COVERAGE ?=
WORKERS ?= 2

# nothing is written outside the checkout, and nothing looks for models on the network
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
export TRITON_CACHE_DIR ?= $(CURDIR)/.cache/triton
export HF_HOME ?= $(CURDIR)/.cache/huggingface
export MPLCONFIGDIR ?= $(CURDIR)/.cache/matplotlib
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test lint bench fuzz clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "setup: Python 3.11 or newer is needed, none was found on PATH. Install one, or name it: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: Python 3.11 or newer is needed; $(PYTHON) is older, or does not run"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "setup: $(PYTHON) lacks the venv module (Debian and Ubuntu: apt-get install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "setup: Python's C headers are needed, Inductor compiles against them (Debian and Ubuntu: apt-get install python3-dev)"; exit 1; }
	@for c in $${CXX:-g++ clang++}; do command -v $$c >/dev/null && exit 0; done; echo "setup: a C++ compiler is needed, Inductor compiles C++ on the CPU: install g++, or name one: CXX=..."; exit 1
	@test -x $(BIN)/python || { echo "setup 1/4: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup 2/4: installing torch (one large download)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@# a CUDA build of torch brings the triton that it was made for; the pin is for CPU builds, which bring none
	@if $(BIN)/python -c 'import triton' 2>/dev/null; then grep -v '^triton' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	@echo "setup 3/4: installing what the tests, the demo and the benchmarks use"
	@$(PIP) -c $(VENV)/constraints.txt $$(grep -o '^[a-z-]*' constraints.txt) setuptools
	@echo "setup 4/4: installing dualkv_compile, editable"
	@$(PIP) --no-deps --no-build-isolation --quiet -e .
	@touch $@

demo: setup
	$(BIN)/python -m dualkv_compile demo

# the interpreter of triton is chosen when it is imported, so its tests run in a process of their own; COVERAGE=--cov prints the coverage
test: setup
	$(BIN)/python -m pytest tests --ignore=tests/interpreter -n $(WORKERS) -q $(COVERAGE)
	@test ! -d tests/interpreter || { set -x; TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter -n $(WORKERS) -q; }

lint: setup
	$(BIN)/ruff check .

bench: setup
	$(BIN)/python -m dualkv_compile bench

# random programs and batches, other ones each round, until the time is over or one fails
fuzz: setup
	@test -d tests/fuzz || { echo "fuzz: there is no tests/fuzz"; exit 1; }
	@end=$$(( $$(date +%s) + $(FUZZ_SECONDS) )); while [ $$(date +%s) -lt $$end ]; do HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest tests/fuzz -n $(WORKERS) -q -x || exit 1; done

clean:
	rm -rf .cache build out *.egg-info
