# Two commands: `make demo` and `make test`. Both make .venv first, from Python 3.11.
PYTHON ?= python3.11
BIN := .venv/bin
SMOLLM2 := .cache/smollm2

.PHONY: demo test lint acceptance bench published zoo clean

.venv: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet -e ".[gguf,dev]"
	touch $@

$(SMOLLM2)/model.safetensors: .venv/installed
	$(BIN)/python -m autopar.models.smollm2 $(SMOLLM2)

demo: .venv $(SMOLLM2)/model.safetensors
	bash bench/demo.sh $(BIN) $(SMOLLM2)

# Two workers on two cores: a second thread in each would only get in the way.
test: .venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Real weights and real text, minutes long: what `make demo` shows, as checks.
acceptance: .venv $(SMOLLM2)/model.safetensors
	$(BIN)/python -m pytest -m slow --timeout=1800 tests

# Every figure of the README.
bench: .venv
	$(BIN)/python bench/planning.py
	$(BIN)/python bench/memory.py

# How far predictions are from published runs, and plans beside those of their authors: make published ROWS=training.csv
published: .venv
	$(BIN)/python bench/published.py --rows $(ROWS)
	$(BIN)/python bench/plans.py --rows $(ROWS) --check

# Every architecture through capture, planning and sharded runs; writes docs/zoo.md, which says how long it takes.
zoo: .venv
	$(BIN)/python bench/zoo.py --jobs 2

clean:
	rm -rf .venv .cache build *.egg-info
