# Each target makes its own .venv and installs what it needs: on a fresh machine with Python 3.11+
# and make, `make demo` and `make test` are all there is to type.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NEWEST := .venv-newest
DOCS := .venv-docs
MODELS := .venv-models

.PHONY: test browser test-newest demo lint pyright docs package verify redistribute programs models bench bench-newest clean

test: lint browser
	$(BIN)/python -m pytest -m ''
	$(BIN)/python -m pytest -m '' tests/process

# Chromium opens the page of a report. It is installed where there is none and this can: as root,
# with apt-get. Elsewhere the tests that need it are skipped.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] \
	  && command -v apt-get >/dev/null && apt-get update -qq >/dev/null \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	  || echo "there is no Chromium, and it cannot be installed here: its tests are skipped"

# The quick tier with the newest PyTorch, in a venv of its own: several GB, so not part of `test`.
test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
	$(NEWEST)/bin/python -m pytest
	$(NEWEST)/bin/python -m pytest tests/process/test_compile_process.py

demo: $(READY)
	$(BIN)/python examples/train_gpt.py --picture build/loss.png --report build/report.html

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	mkdir -p build && sed -n '/^```python/,/^```/{/^```/!p}' README.md > build/readme.py
	$(BIN)/mypy build/readme.py

# The types of the README and the examples as pyright sees them. It brings its own node.
pyright: lint
	$(BIN)/python -m pip install --quiet 'pyright[nodejs]'
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site, in build/site. A warning is an error.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# Wheel and sdist, installed and tried in fresh venvs of each Python.
package: $(READY)
	rm -rf dist
	$(BIN)/python -m build --quiet
	for version in 3.11 3.12 3.13; do bash .ci/try-package python$$version || exit 1; done

verify: $(READY)
	$(BIN)/python -m verification --page docs/operators.md
	$(BIN)/python -m verification --inference --out verification/inference.jsonl

redistribute: $(READY)
	$(BIN)/python -m pytest -m '' tests/core/test_redistribute_random.py --hypothesis-profile=thorough -o faulthandler_timeout=3600

programs: $(READY)
	$(BIN)/python benchmarks/programs.py

# Whole models of transformers, timm and diffusers, in a venv of its own. A stopped run goes on; after
# a change of the library, `make clean` or delete verification/models.jsonl.
models: $(MODELS)/.ready
	$(MODELS)/bin/python -m verification.models --page docs/models.md --examples examples/*_hf.py

# Times beside PyTorch's DTensor; make bench ARGS=--quick, or ARGS='--only step list'.
bench: $(READY)
	$(BIN)/python -m benchmarks.bench $(ARGS)

bench-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m benchmarks.bench --page benchmarks/results-newest.md $(ARGS)

clean:
	rm -rf $(VENV) $(NEWEST) $(DOCS) $(MODELS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(NEWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade -e '.[dev]'
	touch $@

$(DOCS)/.ready: docs/site/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r $<
	touch $@

$(MODELS)/.ready: constraints.txt verification/models/requirements.txt
	$(PYTHON) -m venv $(MODELS)
	$(MODELS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(MODELS)/bin/python -m pip install --quiet -c constraints.txt -r verification/models/requirements.txt -e .
	touch $@

# torch first and alone: under the constraint the resolver then has nothing left to choose.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
