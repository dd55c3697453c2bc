# Two commands set everything up: `make bench` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install bench test lint gpu-check clean

install: $(STAMP)

bench: $(STAMP)
	$(BIN)/deepinfer-bench compare fork-batch \
	  --release deferred,polled,step,blocking --free-order reverse,forward

test: $(STAMP)
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# On a machine with an NVIDIA GPU; writes results that can be committed.
gpu-check: $(STAMP)
	$(BIN)/python benchmarks/gpu_check.py

clean:
	rm -rf .venv results

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[test,oracle,lint,plots]'
	touch $@
