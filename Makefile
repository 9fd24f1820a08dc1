# Two commands do all the set-up: `make demo` and `make test`. Everything lands in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# What the native parts are built from; a change rebuilds them.
NATIVE := $(shell find native CMakeLists.txt pyproject.toml -type f 2>/dev/null)

# For training; TORCH=torch takes the newest. This one exists as a build for the CPU alone where an index has such builds.
TORCH  ?= torch==2.13.0
# Test processes: files of tests are shared out among them.
JOBS   ?= 2
PROMPT ?= Write a Python function that checks whether a string is a palindrome, then write the same function again with type hints.
N      ?= 200
# For demo-draft: more prompts (JSONL), where data and checkpoints stay between runs, how many tokens of answers to prompts and in
# all, how many prompts of the model's own, and how often to go over them.
PROMPTS ?= $(wildcard ../shared/prompts/train.jsonl)
WORK    ?= $(HOME)/.cache/localspec/demo-draft
TOKENS  ?= 759000
ALL     ?= 1096000
SELF    ?= 800
EPOCHS  ?= 5
IN     ?=
CKPT   ?=
OUT    ?=
QUANT  ?=
ARGS   ?=

.PHONY: help setup demo demo-draft test lint bench convert clean
.DEFAULT_GOAL := help

help: ## this list
	@echo "localspec: speculative decoding for GGUF models on your own machine"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || grep '##' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "localspec needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(NATIVE)
	@echo "installing into $(VENV); the first time llama.cpp is compiled, which takes some minutes"
	$(PIP) install -q -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -q -e '.[test]'
	$(PIP) install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(PIP) install -q -e '.[lint,serve]' "$(TORCH)"
	@touch $@

setup: $(VENV)/.installed ## install localspec into .venv

$(VENV)/.installed-train: $(VENV)/.installed
	$(PIP) install -q -e '.[train]' "$(TORCH)"
	@touch $@

demo: setup ## write a text with the default pair, then measure it against plain decoding
	$(BIN)/localspec run --temp 0 -n $(N) -p "$(PROMPT)" $(ARGS)
	$(BIN)/localspec bench --limit 3 -n 128 $(ARGS)

demo-draft: $(VENV)/.installed-train ## make the default model's draft again: hours; a stopped run goes on, one that is done with more EPOCHS, TOKENS, ALL
	$(if $(PROMPTS),$(BIN)/localspec data -o "$(WORK)/data" -f "$(PROMPTS)" --answers 3 --tokens $(TOKENS) -s 1)
	$(BIN)/localspec data -o "$(WORK)/data" --self $(SELF) -s 1
	$(BIN)/localspec data -o "$(WORK)/data" -f python: --tokens $(ALL) -s 1
	$(BIN)/localspec train eagle3 --data "$(WORK)/data" -o "$(WORK)/run" --epochs $(EPOCHS)
	$(BIN)/localspec convert "$(WORK)/run/best" -o "$(WORK)/smollm2-135m-instruct-eagle3.gguf" --quant q4_0 --force

test: $(VENV)/.installed-test ## install what the tests need and run them all
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/.installed-lint ## ruff and mypy (which reads the types of torch and Starlette)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup ## plain against speculative decoding, default model (ARGS="--target T --draft D")
	$(BIN)/localspec bench $(ARGS)

convert: setup ## export to GGUF: make convert CKPT=checkpoint OUT=draft.gguf QUANT=q4_0, or IN=model.gguf OUT=small.gguf
	@test -n "$(IN)$(CKPT)" -a -n "$(OUT)" || { echo "usage: make convert CKPT=checkpoint OUT=draft.gguf QUANT=q4_0 (or IN=model.gguf OUT=small.gguf QUANT=Q4_0)" >&2; exit 2; }
	@test -z "$(CKPT)" || $(MAKE) --no-print-directory $(VENV)/.installed-train
	$(BIN)/localspec convert "$(or $(CKPT),$(IN))" -o "$(OUT)" $(if $(QUANT),--quant $(QUANT)) $(ARGS)

clean: ## remove what was built here (caches of models stay)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
