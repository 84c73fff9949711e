# Two commands: `make demo` builds the demo pair and answers with it; `make test` runs every check.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-matrix pretend-gpu field mutants bench floors setup clean

demo: setup
	@$(BIN)/python examples/demo.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/mypy --strict runtime/yggrt
	$(BIN)/mypy yggc
	$(BIN)/pytest -n 2 --dist loadfile

# Every kind of fault that users of such systems have met, and the tests that stand against it.
field: setup
	@PYTHONPATH=. $(BIN)/python tests/field.py

# Seeded faults, one by one in a copy of the sources: each must fail a fast test.
mutants: setup
	@PYTHONPATH=. $(BIN)/python tests/mutants.py

# The tests with the oldest and the newest supported torch and transformers, each in an environment of its own.
test-matrix: setup
	@PYTHONPATH=. $(BIN)/python tests/matrix.py

# What is made for a GPU, without one: compiled for an H200, loaded, captured and launched, by torch's own CUDA build over a
# runtime whose kernels do nothing. Ten minutes on two cores.
pretend-gpu: setup
	@cuda=$$($(BIN)/python -c 'import torch; print(torch.version.cuda)') && $(BIN)/python -m pip install -q --no-deps \
		"nvidia-cuda-crt==$$cuda.*" "nvidia-cuda-cccl==$$cuda.*"
	@mkdir -p gpu-check && PYTHONPATH=.:runtime $(BIN)/python tests/gpu/pretend/run.py \
		$(BIN)/python tests/gpu/measure.py --small --json gpu-check/figures.json --plans gpu-check/plans

# Plain against speculative on 60 bench prompts, 10 of each Spec-Bench group; PROMPTS names the file. Fails when the
# median speed-up is below the floor.
PROMPTS ?= ../shared/bench/spec_bench.jsonl
bench: setup
	@test -f demo.bundle/bundle.ygg || $(BIN)/python examples/demo.py
	$(BIN)/yggrt bench demo.bundle --prompts $(PROMPTS) --limit 60 --turns 3 --max-new-tokens 128 --floor 0.95 --json bench.json

# The demo pair's steps in bfloat16 against transformers' own, and the floors they are held to.
floors: setup
	$(BIN)/python examples/floors.py

setup: .venv/installed

.venv/installed: pyproject.toml runtime/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up .venv: torch and the rest are about 6 GB, this takes a few minutes the first time."
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest build *.egg-info runtime/*.egg-info .pytest_cache .mypy_cache .ruff_cache demo.bundle floors.bundle
