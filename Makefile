# Two commands for a newcomer: `make up` and `make test`. Everything lives in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# An environment that was copied along with its checkout names the other one in its scripts, and would run its code.
MOVED := $(if $(wildcard $(STAMP)),$(filter-out $(CURDIR),$(shell cat $(STAMP))))
ARGS ?=
# Tests wait part of the time, for processes or servers: three workers keep two cores busy.
WORKERS ?= 3

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup up quick test durations long test-all check format proto nano clean moved

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/native/*.cpp kernels/native/*.h) $(if $(MOVED),moved)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"afserve needs Python 3.11 to 3.13, {sys.executable} is {v[0]}.{v[1]}; set PYTHON=python3.11")'
	@echo "making $(VENV) (a few minutes the first time: torch is large)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q torch
	@$(BIN)/python -m pip install -q -e '.[test]'
	@echo '$(CURDIR)' > $@

moved:
	@echo "$(VENV) was made for $(MOVED): it is made anew"
	@rm -rf $(VENV)

up: setup
	@$(BIN)/python -m afserve up $(ARGS)

# Tests that stop, race or time processes need the cores for themselves; the others share them between workers.
test: setup
ifeq ($(ARGS),)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not long and not alone" --workers $(WORKERS)
	$(BIN)/python -m pytest --alone
else
	$(BIN)/python -m pytest -m "not long" $(ARGS)
endif

# Seconds of a core by file and by test, of those that `make test` runs beside each other.
durations: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.spent -m "not long and not alone" --workers $(WORKERS) $(ARGS)

# A sample of all rooms: one case of each test that starts no process and takes less than a tenth of a second, five drawn examples.
quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick --workers $(WORKERS) $(ARGS)

# What `make test` leaves out for its time, and every example that tests draw; .github/workflows/nightly.yml runs it every night.
long: setup
	$(BIN)/python -m pytest --whole -m "long or hypothesis" $(ARGS)

test-all: setup
	$(BIN)/python -m pytest --whole $(ARGS)

check: setup
	$(BIN)/python -m ruff format --check -q .
	$(BIN)/python -m ruff check -q .
	$(BIN)/python -m mypy -n 2

format: setup
	$(BIN)/python -m ruff format -q .
	$(BIN)/python -m ruff check --fix -q .

proto: setup
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. afserve/control/wire/control.proto

nano: setup
	@mkdir -p .cache
	$(BIN)/python -m bench.nano.train --state .cache/nano.safetensors $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '*.so' -path './kernels/*' -delete
