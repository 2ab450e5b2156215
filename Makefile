# make demo | test | test-gpu | test-litellm | fuzz | mutants | cover | check | tables | docs | release-check | bench | clean
# Everything runs in .venv, made on first use. PYTHON chooses the interpreter that makes it.

PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Waiting OpenMP threads that spin starve the working ones when cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE
# The same for BLAS, whose threads wake up for every small product.
export OPENBLAS_NUM_THREADS ?= 1
# The processes that tests start would compile all modules each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-1 test-2 test-gpu test-litellm fuzz mutants cover check lint types tables docs release-check bench clean
.DELETE_ON_ERROR:

demo: .venv/.installed
	$(BIN)/calibrant demo

# Each of two processes has half of the files: with a scheduler between them, both would read all.
# They share the cores, so each has one thread; tests of threads set how many they need.
test: check .venv/.installed-browser
	@$(MAKE) --no-print-directory -j 2 test-1 test-2

test-1 test-2: test-%: .venv/.installed-browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --part $*

# What runs on pretended devices elsewhere, on a CUDA device; of the set-up, it needs pytest alone.
test-gpu: .venv/.installed-dev
	$(BIN)/python -m pytest --confcutdir tests/devices -m gpu tests/devices

# The gate in a real proxy of LiteLLM, which has a folder of its own for the versions that it pins.
LITELLM ?= build/litellm
test-litellm: .venv/.installed-dev | $(LITELLM)/litellm
	PYTHONPATH=$(abspath $(LITELLM)):$(CURDIR)/src $(BIN)/python -m pytest -q -s \
		tests/llm/gate/test_litellm_callback.py

$(LITELLM)/litellm:
	$(BIN)/python -m pip install -q --target $(LITELLM) 'litellm[proxy]==1.106.2'

# Random and hostile inputs in all processes: make fuzz MINUTES=60
MINUTES ?= 60
fuzz: .venv/.installed-dev
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# Faults that are planted at random, and should be caught: make mutants COUNT=300
COUNT ?= 300
mutants: .venv/.installed-dev
	$(PIP_INSTALL) -q 'mutmut>=3.8'
	$(BIN)/python benchmarks/support/mutants.py $(COUNT)

# Branch coverage, at a quarter more time.
cover: .venv/.installed-dev
	$(BIN)/python -m pytest --cov -n 2 --dist loadfile

check: lint types

lint: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

types: .venv/.installed-dev
	$(BIN)/mypy

# Tables and figures of the pages of results, from the rows of the studies in docs/data. Studies
# whose rows are their tables write these themselves: gate.py -o docs/data, option_bias.py table.
tables: .venv/.installed-dev
	$(BIN)/python benchmarks/studies/tables.py docs/data
	$(BIN)/python benchmarks/studies/language_models.py tables docs/data
	$(BIN)/python benchmarks/studies/cluster_cost.py docs/data
	$(BIN)/python benchmarks/studies/estimate.py tables docs/data
	$(BIN)/python benchmarks/studies/slices.py tables docs/data
	$(BIN)/python benchmarks/studies/default_head.py -o docs/data
	@set -e; for study in answers arena auto_constants ensemble features fields maccal monitor multicalibration multilabel online signals zeros; do \
		$(BIN)/python benchmarks/studies/$$study.py --tables docs/data; \
	done

# From scratch, since a page that Sphinx takes from its cache keeps its warnings to itself.
docs: .venv/.installed-dev
	rm -rf docs/_build docs/_generated docs/api docs/api.md
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# Builds what is committed, and uses it where no source tree is on the path.
release-check: .venv/.installed-dev
	$(BIN)/python tests/release/check.py

bench: .venv/.installed-dev
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do \
		echo "== $$script"; $(BIN)/python $$script; \
	done

# The development install holds the plain one, so it marks both as done.
.venv/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ .venv/.installed

# Accessibility checks for tests of pages, which are skipped where there is no npm or no browser.
.venv/.installed-browser: | $(BIN)/python
	@mkdir -p .venv/browser
	@if command -v npm >/dev/null; then \
		npm install --silent --no-audit --no-fund --prefix .venv/browser axe-core@4.14.0; \
	else echo "no npm: tests of pages are skipped"; fi
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

# Keeps .venv; remove that folder by hand to start anew.
clean:
	rm -rf build dist mutants docs/_build docs/_generated docs/api docs/api.md htmlcov .coverage .coverage.* \
		.mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +
