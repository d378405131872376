# Everything runs in .venv, made on first use. Needs python3.11, make and git.
PYTHON ?= python3.11
VENV   ?= .venv
PY     := $(VENV)/bin/python
CONF   ?= quickstart
ARGS   ?=
DRY    ?=
export HDF5_USE_FILE_LOCKING ?= FALSE

.PHONY: help setup run submit study test test-slurm lint format bench bench-engine bench-split bench-schedules \
        bench-emulated bench-profile bench-partition bench-cuts clean
help:
	@echo "make run [CONF=quickstart] [ARGS='key=value ...']   train on this machine"
	@echo "make submit CONF=x [ARGS=...] [DRY=1]               send to SLURM, or show what would be sent"
	@echo "make study CONF=emulated_scaling [ARGS=...] [DRY=1] run the missing points of a study, and draw it"
	@echo "make test | test-slurm | lint | bench               check"

setup: $(VENV)/.ready
$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpich,dev]'
	@touch $@

run: setup
	@$(PY) -m jobs submit experiment=$(CONF) cluster=local $(ARGS)

submit: setup
	@$(PY) -m jobs submit experiment=$(CONF) $(ARGS) $(if $(DRY),--dry-run)

study: setup
	@$(PY) -m jobs study study=$(CONF) $(ARGS) $(if $(DRY),--dry-run)

test: setup
	$(PY) -m pytest -m "not slurm"

test-slurm: setup
	GEMS_REQUIRE_SLURM=1 $(PY) -m pytest -m slurm tests/slurm

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: bench-engine bench-split bench-schedules bench-emulated bench-profile bench-partition bench-cuts
bench-engine bench-split bench-schedules bench-emulated bench-profile bench-partition bench-cuts: setup
	$(PY) -m scripts.$(subst -,_,$@) $(ARGS)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
