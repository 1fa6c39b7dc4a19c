# make demo        simulate real robots and print what came out
# make test        all tests (those in tests/gpu are skipped without a GPU)
# make lint        ruff, mypy and the house rules
# make gpu-test    tests/gpu; fails without a GPU. CUDA=12 for a driver older than 580
# make test-lower  the quick tests with the oldest supported versions
# make model-check the dispatcher protocol's interleavings, searched with SPIN (docs/protocol). SIZE=large for more
# make clean       remove caches and build outputs (keeps the virtual environments)
#
# Each creates the virtual environment that it needs on first use. Variables: PYTHON (3.11 to 3.13), TESTS, JOBS,
# SIZE, ARGS.

SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(or $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(SUPPORTED)' 2>/dev/null && echo "$$p" && break; done),python3)
TESTS ?= tests
SIZE ?= small
JOBS ?= 2
CUDA ?= 13
# A file's tests run in one worker, since they share compiled code.
PYTEST_FLAGS = -n $(JOBS) --dist loadfile --durations=10
PIP_FLAGS = --quiet --disable-pip-version-check
GPU_EXTRA = $(shell nvidia-smi -L >/dev/null 2>&1 && echo '[cuda$(CUDA)]')

.PHONY: demo test lint gpu-test test-lower model-check clean

demo: .venv/.installed
	.venv/bin/python examples/demo.py $(ARGS)

test: .venv/.installed-dev
	.venv/bin/python -m pytest $(PYTEST_FLAGS) $(ARGS) $(TESTS)

lint: .venv/.installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python scripts/check_house.py

# One process: the GPU is one, and a context per worker would only take its memory.
gpu-test: .venv/.installed-gpu
	BRAX_CONCURRENT_REQUIRE_GPU=1 .venv/bin/python -m pytest --durations=10 $(ARGS) tests/gpu

test-lower: .venv-lower/.installed
	.venv-lower/bin/python -m pytest $(PYTEST_FLAGS) -m "not slow and not gpu" $(ARGS) $(TESTS)

# Needs spin and gcc, but neither the package nor an environment.
model-check:
	$(PYTHON) scripts/model_check.py --size $(SIZE) $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# pip writes into a new environment or updates an old one; the stamp says for which pyproject.toml it did so.
.venv/bin/python .venv-lower/bin/python:
	@$(PYTHON) -c '$(SUPPORTED)' || { $(PYTHON) --version; echo "needs Python 3.11 to 3.13: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(@D)/..

.venv/.installed: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install $(PIP_FLAGS) -e '.$(GPU_EXTRA)'
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $@

.venv/.installed-gpu: .venv/.installed-dev
	.venv/bin/python -m pip install $(PIP_FLAGS) -e '.[dev,cuda$(CUDA)]'
	@touch $@

.venv-lower/.installed: pyproject.toml tests/constraints-lower.txt | .venv-lower/bin/python
	.venv-lower/bin/python -m pip install $(PIP_FLAGS) -c tests/constraints-lower.txt -e '.[dev]'
	@touch $@
