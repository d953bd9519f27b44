# Two commands matter: `make demo` and `make test`. Each does the set-up it needs, once; `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip --disable-pip-version-check install -qq
READY := $(VENV)/.ready

# The lowest Lightning that pyproject.toml claims, read from there so that the two cannot drift apart.
FLOOR := $(shell sed -n 's/^ *"lightning>=\([0-9.]*\)[,"].*/\1/p' pyproject.toml)
LOWEST := build/lightning-$(FLOOR)
TORCH_FLOOR := $(shell sed -n 's/^ *"torch>=\([0-9.]*\)[,"].*/\1/p' pyproject.toml)
OLDEST_NEEDS := alembic build cmarkgfm dask hypothesis ipykernel 'jsonargparse[signatures]' jsonschema mlflow-skinny nbclient \
  accelerate pytest pytest-timeout pytest-xdist selenium sqlalchemy transformers wandb markdown-it-py

GPU_TESTS = $(shell grep -lE 'mark\.(multi_)?gpu' tests/test_*.py)

# Tests that need a GPU one after the other, for they time; the others on all cores, a file on each, where more threads in
# a process would only get in each other's way. A process that crashes fails the run, with its stacks on standard error and
# a core file where the system writes those. $(1) selects the tests, $(2) is set for them, $(3) are more options.
# Those that compare with the real clock have the cores for themselves, and a second try, shown as R: something else on the
# machine may take its core from one.
pytest = ulimit -c `ulimit -Hc`; $(2) OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not gpu and not multi_gpu and not programs and ($(1))" --numprocesses auto \
	--dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(3)
alone = $(call pytest,real_time and ($(1)),$(2),--numprocesses 0 --reruns 1 $(3))

# `slow` takes many seconds or starts processes, `real_time` needs the machine for itself, `browser` needs Chromium;
# `smoke` is one of each kind.
QUICK := smoke or not (slow or real_time or browser)
# with the lowest Lightning: all but what takes long
LOW := smoke or not (slow or browser)
REST := not smoke and (slow or real_time or browser)

PYTHONS ?= 3.12 3.13
TORCH_FREE_NEEDS := cmarkgfm hypothesis jinja2 jsonschema msgspec numpy pytest pytest-timeout
TORCH_FREE := $(patsubst %,tests/test_%.py,accounting cli collectives combine cut_files flop_rate \
  hostile_traces idle kernel_kinds labels markdown nesting outputs peaks regions_operators savings steps syncs table \
  tensorboard_copy trace_files trace_fuzz trace_reader verdicts worker_processes)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all rest lint types quick gpu programs mutants coverage pythons lowest oldest docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 10

setup: $(READY)  ## make .venv and install everything into it (the other targets do this themselves)

demo: $(READY)  ## a slow loader, the verdict, its fix, and the gain beside the prediction; files in demo_runs/
	@KINETO_LOG_LEVEL=6 $(RUN) examples/demo.py

test: lint types quick  ## what to run before each commit: some five minutes on two cores

test-all: test rest coverage  ## everything

# the tests come last, so that pytest's summary is what the output ends with
rest: docs demo lowest gpu  ## what `make test` leaves out: processes, real time, browser, GPU, lowest Lightning, documentation
	$(MAKE) mutants FILE=lightning_forge_profiling/plain_text.py TESTS="--noconftest tests/test_plain_text.py" COUNT=15 SURVIVORS=0
	$(call pytest,not real_time and ($(REST)))
	$(call alone,$(REST))

lint: $(READY)  ## ruff: rules and formatting
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY)  ## mypy: strict on the package, what has types in the helpers of the tests, what the benchmarks call
	$(RUN) -m mypy

quick: $(READY)  ## the tests of `make test` alone
	$(call pytest,$(QUICK))

gpu: $(READY)  ## the tests that need a GPU; skipped, with the reason, where there is none
	$(RUN) -m pytest -m "gpu or multi_gpu" $(GPU_TESTS)

programs: build/programs/.ready  ## 13 packages with synthetic data under `forge-profiling run`: all is as without (20 minutes)
	OMP_NUM_THREADS=1 build/programs/bin/python -m pytest -m programs tests/programs

mutants: $(READY) build/mutants/.ready  ## changes FILE at COUNT places: which changes do the tests not notice?
	$(RUN) tests/mutants.py $(FILE) --tests "$(TESTS)" --count $(or $(COUNT),30) $(SURVIVORS:%=--survivors %) \
	  --cosmic-ray build/mutants/bin/cosmic-ray

# Browser tests run the page's script, not the package. Apart from `unit`,
# because the tracer of Python 3.11 makes tests take 1.4 to 2.2 times the CPU time.
coverage: $(READY)  ## branch coverage of the package by the tests that need no GPU; fails below pyproject.toml's fail_under
	$(RUN) -m coverage erase
	OMP_NUM_THREADS=1 $(RUN) -m coverage run -m pytest -m "not gpu and not multi_gpu and not programs and not browser and not untraced" \
	  --numprocesses auto --dist loadfile --no-loadscope-reorder
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

pythons:  ## byte-compile for the other Pythons on this machine, and run the tests that need no torch with them
	@for version in $(PYTHONS); do \
	  if ! python$$version --version >/dev/null 2>&1; then echo "python$$version is not here"; continue; fi; \
	  env=build/python-$$version; \
	  python$$version -m venv $$env && \
	  $$env/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt $(TORCH_FREE_NEEDS) && \
	  $$env/bin/python -W error -m compileall -q -f lightning_forge_profiling && \
	  $$env/bin/python -m pytest -p no:cacheprovider $(TORCH_FREE) || exit 1; \
	done

lowest: $(READY) $(LOWEST)/.ready  ## quick tests that go through Lightning again, with the lowest that pyproject.toml claims
	@PYTHONPATH=$(LOWEST) $(RUN) -c 'import lightning, pytorch_lightning; \
	  found = lightning.__version__, pytorch_lightning.__version__; print("Lightning", *found); \
	  assert found == ("$(FLOOR)", "$(FLOOR)")'
	$(call pytest,not real_time and ($(LOW)),PYTHONPATH=$(LOWEST),--through-lightning)
	$(call alone,$(LOW),PYTHONPATH=$(LOWEST),--through-lightning)

oldest: build/oldest/.ready  ## quick tests with the lowest torch that pyproject.toml claims (a download of 3 GB, once)
	@build/oldest/bin/python -c 'import torch; print("torch", torch.__version__); \
	  assert torch.__version__.startswith("$(TORCH_FLOOR)")'
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -m "$(QUICK)" --numprocesses auto --dist loadfile --no-loadscope-reorder \
	  --ignore tests/test_benchmarks.py

docs: $(READY)  ## build the documentation into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist site demo_runs forge_trials *.egg-info

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; takes a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@echo "  PyTorch"
	@$(INSTALL) --constraint constraints.txt torch setuptools
	@echo "  this package, Lightning and the tools for development"
	@$(INSTALL) --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# Beside the environment, not in it: --no-deps leaves torch and the rest as they are.
$(LOWEST)/.ready: pyproject.toml
	@echo "Fetching Lightning $(FLOOR)"
	@rm -rf $(LOWEST)
	@$(INSTALL) --no-deps --target $(LOWEST) lightning==$(FLOOR) pytorch-lightning==$(FLOOR)
	@touch $@

# The tools are those of the other environment, but for what needs a newer torch.
build/oldest/.ready: pyproject.toml
	@echo "Fetching torch $(TORCH_FLOOR)"
	@$(PYTHON) -m venv build/oldest
	@build/oldest/bin/python -m pip --disable-pip-version-check install -qq torch==$(TORCH_FLOOR).0 'setuptools>=77' $(OLDEST_NEEDS)
	@build/oldest/bin/python -m pip --disable-pip-version-check install -qq --no-build-isolation --editable '.[tensorboard]'
	@touch $@

# apart from the environment: they bring 170 packages, and a torch that torchvision works with (a download of 3 GB)
build/programs/.ready: pyproject.toml tests/programs/requirements.txt
	@echo "Setting up build/programs (once; takes some minutes)"
	@$(PYTHON) -m venv build/programs
	@build/programs/bin/python -m pip --disable-pip-version-check install -qq -r tests/programs/requirements.txt
	@build/programs/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation --editable .
	@touch $@

# apart from the environment: it brings a web server and a database
build/mutants/.ready:
	@$(PYTHON) -m venv build/mutants
	@build/mutants/bin/python -m pip --disable-pip-version-check install -qq 'cosmic-ray>=8.7,<9'
	@touch $@
