# Each target creates the virtual environment and installs the package if that has not been done yet.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUTPUT ?= outputs/quickstart
# Two processes: tests on several ranks leave a half of two cores idle.
PYTEST_ARGS ?= -n 2
CHECKED := $(wildcard accelerate_lshdp recipes tests benchmarks docs conftest.py)

.PHONY: quickstart test test-slow test-versions package site quality style clean benchmark-planning benchmark-cluster

quickstart: $(VENV)/.installed
	$(BIN)/accelerate-lshdp quickstart --output-dir $(OUTPUT)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# Other versions of transformers and accelerate, each in an environment of its own.
test-versions:
	$(PYTHON) tests/versions.py $(VERSIONS_ARGS)

# The source archive and the wheel, and the wheel in an environment of its own.
package: $(VENV)/.installed
	$(BIN)/python tests/package.py

# The pages as a site in `site/`; a broken link ends it.
site: $(VENV)/.installed
	$(BIN)/mkdocs build --strict --quiet

quality: $(VENV)/.installed
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

style: $(VENV)/.installed
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

benchmark-planning: $(VENV)/.installed
	$(BIN)/python benchmarks/planning.py $(BENCHMARK_ARGS)

benchmark-cluster: $(VENV)/.installed
	$(BIN)/accelerate-lshdp bench benchmarks/cluster_automatic.yaml $(BENCHMARK_ARGS)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-versions site outputs/quickstart
