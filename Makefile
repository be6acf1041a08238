# Two commands on a fresh machine: `make demo` and `make test`. Both set up `.venv` first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || command -v clang++ >/dev/null || { echo "A C++ compiler is needed (Inductor compiles C++ on the CPU): install g++ or set CXX=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch (one large download)"
	$(BIN)/pip install --progress-bar on -c constraints.txt torch==2.13.0
	@echo "installing the tools of the tests and the demo"
	$(BIN)/pip install --progress-bar on -c constraints.txt numpy triton transformers reasoning-gym pytest pytest-xdist pytest-cov hypothesis ruff matplotlib setuptools
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	@touch $@

test: setup
	$(BIN)/python -m pytest tests --ignore=tests/interpreter -n 2 -q
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter -n 2 -q

lint: setup
	$(BIN)/ruff check .
