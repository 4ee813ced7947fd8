# make run: set everything up, then the main job. make real: the same set-up, then a real model learns. make test: the
# same set-up, then the tests in TEST_PROCESSES processes at a time. make test-slow: the tests that it leaves out because
# they are long; with PART=2/4 the second quarter of them.
# PIP_ARGS adds options to every pip install (a CPU build of torch, say).

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
TEST_PROCESSES ?= 3
PART ?= 1/1
export OMP_NUM_THREADS ?= 1

.PHONY: run real test test-slow lint format setup clean

run: setup
	$(BIN)/python scripts/main_job.py

real: setup
	$(BIN)/python scripts/real_job.py

test: setup
	$(BIN)/python -m pytest -n $(TEST_PROCESSES)

test-slow: setup
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m slow --part $(PART)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_words.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: .venv/.stamp

.venv/.stamp: pyproject.toml setup.py constraints.txt $(wildcard csrc/*/*.cpp csrc/*/*.h)
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
