# make demo   a real model answers from a long real text, plain and speculative side by side
# make test   style, types and the tests
# See README.md for more.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.10 python3,$(shell command -v $(name))))
TORCH ?= torch==2.13.0
# Holds a Triton Inference Server for the tests; the server needs none of the packages that the wheel asks for.
TRITON ?= nvidia-pytriton==0.7.0
# URL of a package index that holds PyTorch, e.g. the one of CPU-only wheels (see pytorch.org); empty = pip's own.
TORCH_INDEX ?=
# Test processes. Each computes with its share of the cores; whole files go to one process, which shares what they build
# (tests/conftest.py). Up to 6 GB each.
WORKERS ?= 2
# Passed on to the demo: make demo ARGS="--context 8000 --window 1024"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo install install-test test lint pytest test-slow format trtllm-check gpu-check torch-cuda-check cuda-check clean

help:
	@echo "make demo              download a small model, build a pair, generate from a long text; ARGS=\"--help\" lists options"
	@echo "make test              ruff, mypy, the contract of imports, and the tests (minutes)"
	@echo "make test-slow         the tests that take over a minute each"
	@echo "make coverage          the tests of make test again, and which lines they ran: build/coverage/index.html"
	@echo "make format            let ruff put the code in order"
	@echo "make trtllm-check      on a machine with TensorRT-LLM 1.2.1 and an A100, H100 or H200: build, check, measure; one report"
	@echo "make torch-cuda-check  on a machine with a CUDA card: acceptance kernel and TorchRunner against the CPU; PyTorch suffices"
	@echo "make clean             remove .venv, downloads and built engines"
	@echo "Variables: PYTHON=$(PYTHON)  TORCH=$(TORCH)  TORCH_INDEX=$(TORCH_INDEX)  WORKERS=$(WORKERS)"

demo: install
	@$(BIN)/magicdec demo $(ARGS)

install: $(VENV)/installed
install-test: $(VENV)/installed-test

test: lint pytest

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

pytest: install-test
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS)

test-slow: install-test
	$(BIN)/python -m pytest -m slow -n $(WORKERS)

# Of this process's own lines: what tests start as processes of their own (ranks, servers, commands) does not count.
.PHONY: coverage
coverage: install-test
	$(BIN)/python -m pytest -m "not slow" --cov --cov-report=term --cov-report=html:build/coverage

format: install-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With that machine's own Python, where TensorRT-LLM is installed: a virtual environment would not see it.
trtllm-check:
	@$(PYTHON) -c "import tensorrt_llm" 2>/dev/null || { echo "$(PYTHON) has no TensorRT-LLM. On a machine with an A100, H100 or H200" \
		"install tensorrt-llm==1.2.1 into a Python 3.10 or 3.12, and run: make trtllm-check PYTHON=/path/to/that/python" >&2; exit 1; }
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -e ".[gguf]"
	@$(PYTHON) -m magicdec trtllm-check $(ARGS)

# Nothing is installed: any Python that has PyTorch for CUDA (which brings Triton) will do.
torch-cuda-check:
	@$(PYTHON) -c "import torch" 2>/dev/null || { echo "$(PYTHON) has no PyTorch; run: make torch-cuda-check PYTHON=/path/to/a/python/with/PyTorch" >&2; exit 1; }
	@$(PYTHON) -m benchmarks.cuda_check $(ARGS)

# Their former names.
gpu-check: trtllm-check
cuda-check: torch-cuda-check

clean:
	rm -rf $(VENV) .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage \
		.grimp_cache .import_linter_cache

$(VENV)/torch:
	@test -n "$(PYTHON)" || { echo "No Python found; install Python 3.11 (Debian: apt install python3.11 python3.11-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version); Python 3.10, 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@

# What the installed metadata says: names, versions, dependencies.
PROJECT := pyproject.toml magicdec/__init__.py
# The native library is built by the installation, so it follows its sources.
NATIVE := setup.py $(wildcard plugins/cpu/csrc/*)

$(VENV)/installed: $(VENV)/torch $(PROJECT) $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[demo]"
	@touch $@

$(VENV)/installed-test: $(VENV)/torch $(PROJECT) $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(TRITON)"
	@touch $@ $(VENV)/installed
