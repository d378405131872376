# Everything runs in .venv, made on first use. Needs python3.11, make and git.
PYTHON ?= python3.11
VENV   ?= .venv
PY     := $(VENV)/bin/python
CONF   ?= quickstart
ARGS   ?=
DRY    ?=
TORCH  ?=
RUN    ?=
EVERY  ?= 1
export HDF5_USE_FILE_LOCKING ?= FALSE

BENCHES = bench-engine bench-peers bench-transports bench-split bench-schedules bench-capped bench-strips bench-streaming bench-emulated bench-profile bench-memory \
          bench-host-overhead bench-outside bench-fidelity bench-planner bench-slide

.PHONY: help setup run submit plan study status logs cancel diagnose resubmit report test test-device test-gloo test-slurm test-wheel coverage docs docs-test lint \
        format bench $(BENCHES) bench-memory-gpu calibrate clean
help:
	@echo "make run [CONF=quickstart] [ARGS='key=value ...']   train on this machine"
	@echo "make submit CONF=x [ARGS=...] [DRY=1]               send to SLURM by the preset of this machine, or show it"
	@echo "make plan CONF=x ARGS='parallel.gpus=64 machine=...'   find the fastest configuration that fits; make submit CONF=x_planned sends it"
	@echo "make study CONF=emulated_scaling [ARGS=...] [DRY=1] run the missing points of a study, and draw it"
	@echo "make status [RUN='a b'] [ARGS=-v] | logs RUN=a [ARGS=-f] | cancel RUN='a b' [ARGS=--yes]   look at runs and studies, end them"
	@echo "make diagnose RUN=a | resubmit RUN='a b' [ARGS='cluster.minutes=90 --yes']   say why runs ended, and send them again"
	@echo "make calibrate ARGS='--out DIR/machine/NAME.yaml'   time this machine's links, for --config-dir DIR machine=NAME"
	@echo "make report CONF=study | RUN='a b' [ARGS='--out x.html']  one HTML page about runs, which needs no network"
	@echo "make report CONF=study ARGS=--proposal              the same with a section for a compute-time proposal, and its CSV"
	@echo "make test | test-device | test-gloo | test-slurm | test-wheel | coverage | lint | bench    check"
	@echo "make docs | docs-test                               build the site from docs/, run every command in it"

setup: $(VENV)/.ready
$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpich,dev,docs]'
	@touch $@

run: setup $(if $(filter finetune,$(CONF)),runs/pretrained.safetensors)
	@$(PY) -m jobs submit experiment=$(CONF) cluster=local $(ARGS)

runs/pretrained.safetensors: | setup
	@$(PY) -m examples.finetune $@

submit: setup
	@$(PY) -m jobs submit --auto-cluster experiment=$(CONF) $(ARGS) $(if $(DRY),--dry-run)

plan: setup
	@$(PY) -m gems plan experiment=$(CONF) --write conf/experiment/$(CONF)_planned.yaml $(ARGS)

study: setup
	@$(PY) -m jobs study study=$(CONF) $(ARGS) $(if $(DRY),--dry-run)

# RUN names runs and studies; empty: all below runs/.
status: setup
	@$(PY) -m jobs status $(RUN) $(ARGS)

logs: setup
	@$(PY) -m jobs logs $(RUN) $(ARGS)

cancel: setup
	@$(PY) -m jobs cancel $(RUN) $(ARGS)

diagnose: setup
	@$(PY) -m jobs diagnose $(RUN) $(ARGS)

resubmit: setup
	@$(PY) -m jobs resubmit $(RUN) $(ARGS)

# CONF names a study or a run below runs/, RUN one or several of these, or paths.
report: setup
	@$(PY) -m analysis report $(if $(RUN),$(RUN),$(CONF)) $(ARGS)

test: setup
	$(PY) -m pytest -m "not slurm and not docs" -n 3 --dist loadfile --no-loadscope-reorder

# The engine on a CUDA device made of host memory: needs g++, and no GPU.
test-device: setup
	$(PY) -m tests.fake_cuda.suite $(ARGS)

# Exactness with messages over torch's process groups, which match them by order, in place of MPI.
test-gloo: setup
	GEMS_TEST_TRANSPORT=gloo $(PY) -m pytest -q tests/mpi/test_exactness.py

# The wheel in an environment of its own, from an empty folder. TORCH names versions; empty: the pinned one.
test-wheel:
	PYTHON=$(PYTHON) scripts/wheel_matrix.sh $(TORCH)

test-slurm: setup
	GEMS_REQUIRE_SLURM=1 $(PY) -m pytest -m slurm tests/slurm -n 3 --dist worksteal

# EVERY=5 runs every fifth test, which gives a lower bound in a fifth of the time.
coverage: setup
	$(PY) -m pytest -m "not slurm and not docs" -n 2 --every $(EVERY) --cov --cov-report= --no-cov-on-fail -q
	$(PY) -m coverage report --skip-covered --format=total | xargs printf 'coverage of every test in $(EVERY): %s %%\n'

docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

docs-test: setup
	$(PY) -m pytest -m docs -n 2 --dist load -q tests/docs

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(BENCHES)
$(BENCHES) bench-memory-gpu: setup
	$(PY) -m scripts.bench.$(subst -,_,$(@:bench-%=%)) $(ARGS)

bench-peers bench-streaming: $(VENV)/.peers
$(VENV)/.peers: Makefile | setup
	$(VENV)/bin/pip install --quiet --no-deps torchgpipe==0.0.7 lightstream==1.0.7
	@touch $@

calibrate: setup
	$(PY) -m scripts.calibrate $(ARGS)

clean:
	rm -rf $(VENV) runs site .coverage* .pytest_cache .mypy_cache .ruff_cache
