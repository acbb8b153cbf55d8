# Every target sets up .venv by itself: a fresh machine needs python3 (3.11 or newer) and make.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench clean

help:
	@echo "make demo   train a small model with RL against rollout engines   (ARGS='--help' for options)"
	@echo "make test   lint, types and tests                                 (ARGS='-k name' goes to pytest)"
	@echo "make bench  benchmarks that need no GPU"
	@echo "make clean  remove what builds and tools left; .venv stays"

# Installs nothing and takes no time when pyproject.toml has not changed.
setup:
	@$(PYTHON) tools/setup_venv.py

demo: setup
	$(BIN)/python -m examples.rl_smollm2 $(ARGS)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest $(ARGS)

bench: setup
	$(BIN)/python -m benchmarks.cpu $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
