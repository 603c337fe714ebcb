# Each target makes its own .venv and installs what it needs: on a fresh machine with Python 3.11+
# and make, `make demo` and `make test` are all there is to type.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test demo lint verify redistribute programs bench clean

test: lint
	$(BIN)/python -m pytest -m ''
	$(BIN)/python -m pytest -m '' tests/process

demo: $(READY)
	$(BIN)/python examples/demo.py
	$(BIN)/python examples/dropout.py

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

verify: $(READY)
	$(BIN)/python -m verification --page docs/operators.md
	$(BIN)/python -m verification --inference --out verification/inference.jsonl

redistribute: $(READY)
	$(BIN)/python -m pytest -m '' tests/test_redistribute_any.py --hypothesis-profile=thorough -o faulthandler_timeout=3600

programs: $(READY)
	$(BIN)/python benchmarks/programs.py

bench: $(READY)
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/random_numbers.py
	$(BIN)/python benchmarks/redistribute.py
	$(BIN)/python benchmarks/redistribute.py --time

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and alone: under the constraint the resolver then has nothing left to choose.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
