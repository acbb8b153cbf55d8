# Every target sets up .venv by itself: a fresh machine needs python3 (3.11 or newer) and make.
PYTHON ?= python3
BIN := .venv/bin
PIPELINE ?= examples/pipelines/rl_smollm2.yaml
# Processes that share the tests, file by file. Each has a Ray of its own; some hold 6 GB. Bounds of waits are real seconds, so a
# test that fails while others take its cores has to pass alone.
WORKERS ?= 2
# One GPU for the trainer and both engines of the demo, where there is one.
ON_GPU := $(if $(shell nvidia-smi -L 2>/dev/null),trainer.resources.num_gpus=0.3 engines.resources.num_gpus=0.35 \
	$(if $(shell grep "kind: vllm" $(PIPELINE)),engines.arguments.gpu_memory_utilization=0.25))

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench docs clean

help:
	@echo "make demo   train a small model with RL against rollout engines   (ARGS='run.steps=3' and so on)"
	@echo "make test   lint, types and tests                                 (ARGS='-k name' goes to pytest)"
	@echo "make bench  benchmarks that need no GPU"
	@echo "make docs   the site of the docs, with the reference, in build/site"
	@echo "make clean  remove what builds and tools left; .venv stays"

# Installs nothing and takes no time when pyproject.toml has not changed.
setup:
	@$(PYTHON) tools/setup_venv.py

demo: setup
	$(BIN)/python -m weightsync run $(PIPELINE) $(ON_GPU) $(ARGS)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) || \
		{ echo "make test: what failed beside other tests is run once more, by itself"; \
		  $(BIN)/pytest --last-failed --last-failed-no-failures none; }

bench: setup
	$(BIN)/python -m benchmarks.cpu $(ARGS)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
