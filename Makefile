# All targets use the environment .venv, and create it first if necessary. PYTHON creates it. Targets for a GPU use GPU_PYTHON as it is.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
CONSTRAINTS := constraints.txt

.PHONY: install bench quick test test-all test-newest test-oldest newest report faults conformance conformance-device layouts random-programs python-state number-programs object-turns explore generate device-models stress \
	engines lower-everywhere interop explain-pages gpu-programs tpu-programs gpu gpu-table docs docs-test wheel lint format

install: $(INSTALLED)

# torch is installed first and alone: pip then takes the build that its index offers for this machine, and nothing later replaces it.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c $(CONSTRAINTS) torch
	$(VENV)/bin/python -m pip install -c $(CONSTRAINTS) -e '.[bench,dev]'
	touch $@

bench: install
	$(VENV)/bin/dynaxla bench --quick

# A test of each lowering, contract, step and error: some minutes on two cores. Starts no process besides pytest's own.
QUICK = $(shell grep -rlE --include='test_*.py' 'pytest\.mark\.quick' tests)
quick: install
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --quick $(QUICK)

test: install
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m 'not slow and not gpu'

# All tests with all parameters, including slow ones: some hours on two cores. A later call continues with the part that failed or was
# stopped, provided the commit is the same.
ALL := .test-all/$(shell git rev-parse --short HEAD)
PARTS := $(patsubst tests/%/,%,$(sort $(dir $(wildcard tests/*/test_*.py tests/*/*/test_*.py))))
test-all: $(PARTS:%=$(ALL)/%) $(ALL)/files
$(ALL)/%: | install
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --everything -m 'not gpu' $(if $(filter files,$*),tests/test_*.py,tests/$*/test_*.py)
	mkdir -p $@

# Plants 60 faults, one at a time, and reports which suite finds each: an hour or two on two cores. Faults that make quick misses are tried
# with make test. An interrupted run continues. Other faults by name: make faults ARGS="--suites quick usual everything -- NAME"
faults: install
	PYTHONPATH=tests $(VENV)/bin/python -m commands.planted_faults $(ARGS)

# Compares PyTorch's databases of operators and modules with eager mode, e.g. make conformance ARGS="--dtype float32 --match '^linalg'
# --shards 2". Only the inputs that eager mode refuses: ARGS="--kind error_inputs,changed_numbers"
conformance: install
	PYTHONPATH=tests $(VENV)/bin/python -m cases.conformance $(ARGS)

# The same on the device "jax" in eager mode; in lazy mode with ARGS=--device=lazy. An interrupted run continues.
conformance-device: install
	PYTHONPATH=tests $(VENV)/bin/python -m cases.conformance --device $(ARGS)

# Compares every op of the tests' table with eager mode, forward and gradients, with operands in seven layouts. An interrupted run continues.
# ARGS="--strides" compiles nothing and takes half an hour on a core.
layouts: install
	PYTHONPATH=tests $(VENV)/bin/python -m cases.layout_sweep $(ARGS)

# Compares random programs with eager mode, e.g. make random-programs ARGS="--count 10000 --seed 0 --shards 2". ARGS=--faults plants faults.
random-programs: install
	PYTHONPATH=tests $(VENV)/bin/python -m cases.random_programs $(ARGS)

# Changes one part of random Python state that a step can read, e.g. make python-state ARGS="--count 20000 --seed 3", or ARGS=--faults
python-state: install
	PYTHONPATH=tests $(VENV)/bin/python -m cases.python_state $(ARGS)

# Random training steps: with numbers that change between calls, and called with several models and optimizers in turn. E.g. make
# object-turns ARGS="--count 500 --seed 7", or ARGS=--faults
number-programs: install
	PYTHONPATH=tests $(VENV)/bin/python -m cases.number_programs $(ARGS)

object-turns: install
	PYTHONPATH=tests $(VENV)/bin/python -m cases.object_turns $(ARGS)

# All of these and hypothesis's tests in turn, with other cases in each run, e.g. make explore ARGS="--minutes 60 --seed 3"
explore: install
	PYTHONPATH=tests $(VENV)/bin/python -m commands.explore $(ARGS)

# Compares transformers' generate with eager mode, for eight small models, in six ways each and with settings of the compiler: half an hour
# on a core
generate: install
	$(VENV)/bin/python -m pytest -m slow tests/end_to_end/test_generate.py $(ARGS)

# Runs models unmodified on the device "jax" and compares them with the CPU: the ten models in inference and training, and others of timm and
# transformers with `generate`. An hour on a core
device-models: install
	$(VENV)/bin/python -m pytest -m slow tests/device/test_models_on_the_device.py $(ARGS)

# Compares dynaxla.to_jax of 30 timm and 20 transformers models with eager mode (values, gradients and batches), and calls exported models
# (resnet18, BERT and GPT-2) in a process without torch. Half an hour on a core
interop: install
	$(VENV)/bin/python -m pytest -m 'slow or not slow' tests/interop/test_architectures.py tests/interop/test_export.py $(ARGS)

# Opens pages of dynaxla.explain (resnet50, a model with graph breaks, a training step) in a browser, without the network. Needs Chromium and
# its driver (apt-get install chromium chromium-driver). Two minutes on a core
explain-pages: install
	$(VENV)/bin/python -m pip install 'selenium>=4.20'
	$(VENV)/bin/python -m pytest -m slow tests/explained/test_in_a_browser.py $(ARGS)

# Compares the chosen engine with each engine alone, for 44 models, and writes docs/benchmarks/engines.md. Takes some hours on a core, and
# continues an earlier run. ARGS=--training for forward and backward passes, or the names of models
engines: install
	PYTHONPATH=tests $(VENV)/bin/python -m commands.best_engine $(ARGS)

# Runs eight threads that compile, train and call at the same time, for ten minutes, e.g. make stress ARGS="--seconds 60 --seed 1"
stress: install
	PYTHONPATH=tests $(VENV)/bin/python -m cases.stress $(ARGS)

# Lowers models and PyTorch's database of operators for GPUs and TPUs on a machine without them, e.g. make lower-everywhere ARGS="--match
# linalg". ARGS=--compile=tpu also compiles them for a TPU, with the libtpu that make tpu-programs installs, or with another: ARGS="--compile
# tpu --libtpu FOLDER", where FOLDER has libtpu/libtpu.so. An interrupted run continues.
lower-everywhere: install
	PYTHONPATH=tests $(VENV)/bin/python -m commands.lower_everywhere $(ARGS)

# Compiles models for an H100 on a machine without one, and writes docs/benchmarks/gpu-programs.md. Needs g++, and half an hour on a core.
# Programs of unchanged sources are not compiled again. ARGS=--check fails if a figure has grown; ARGS=--accept stores the new figures.
GPU_PLUGIN = .gpu-programs/plugin-$(shell $(VENV)/bin/python -c "from importlib.metadata import version; print(version('jaxlib'))")
gpu-programs: install
	test -d $(GPU_PLUGIN) || $(VENV)/bin/python -m pip install --no-deps --target $(GPU_PLUGIN) \
		$(foreach part,pjrt plugin,jax-cuda13-$(part)==$(GPU_PLUGIN:.gpu-programs/plugin-%=%))
	PYTHONPATH=tests $(VENV)/bin/python -m commands.gpu_programs $(ARGS)

# Compiles models for TPUs on a machine without one, and writes docs/benchmarks/tpu-programs.md. Installs libtpu (700 MB on the disk), and
# takes an hour on a core. Programs of unchanged sources are not compiled again. ARGS=--check fails if a figure has grown; ARGS=--accept
# stores the new figures.
LIBTPU = $(shell $(VENV)/bin/python -c "from importlib.metadata import requires; print(next(r.split(';')[0].strip() for r in requires('jax') if r.startswith('libtpu')))")
LIBTPU_FOLDER = .tpu-programs/$(subst .*,,$(subst ==,-,$(LIBTPU)))
tpu-programs: install
	test -d $(LIBTPU_FOLDER) || $(VENV)/bin/python -m pip install --no-deps --target $(LIBTPU_FOLDER) '$(LIBTPU)'
	PYTHONPATH=tests:. $(VENV)/bin/python -m commands.tpu_programs $(ARGS)

# Runs the test suite with the newest and with the oldest releases, each in an environment of its own.
OTHER_PYTHON ?= python3.12

# PIP_CONSTRAINT: only constraints.txt limits the versions, whatever a machine's own pip.conf says.
test-newest:
	PIP_CONSTRAINT=/dev/null $(MAKE) test VENV=.venv-newest PYTHON=$(OTHER_PYTHON)

test-oldest:
	$(MAKE) test VENV=.venv-oldest PYTHON=$(OTHER_PYTHON) CONSTRAINTS=constraints-oldest.txt

# Creates an environment with the newest torch and JAX of the index, whatever this project or the machine allows, and reports names that are
# gone, functions that do not run, and tests that fail. Ten minutes, after the download
newest:
	$(OTHER_PYTHON) -m venv --clear .venv-today
	PIP_CONSTRAINT=/dev/null .venv-today/bin/python -m pip install --upgrade torch jax
	PIP_CONSTRAINT=/dev/null .venv-today/bin/python -m pip install -e '.[dev]'
	touch .venv-today/.installed
	$(MAKE) report VENV=.venv-today

# The same report for an existing environment, e.g. make report VENV=.venv-newest
report: install
	PYTHONPATH=tests $(VENV)/bin/python -m commands.newest_report

# On a machine with an NVIDIA GPU: reports facts about the environment, and runs the parts of tests/commands/gpu_report and the tests of
# tests/gpu, in ten minutes. Installs nothing, e.g. make gpu GPU_PYTHON=/opt/torch/bin/python ARGS="--output DIR --minutes 6.3"
GPU_PYTHON ?= python3

gpu:
	PYTHONPATH=src:tests $(GPU_PYTHON) -m commands.gpu_report $(ARGS)

# Measures docs/benchmarks/gpu.md, the most important rows first. Each call continues the last one, also on another day, and ends within ten
# minutes, e.g. make gpu-table PART=tf32-batch32, or ARGS="--minutes 4.5"
gpu-table:
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks gpu $(PART) --output docs/benchmarks $(ARGS)

# Builds the documentation site in .site/: open .site/index.html, no server is needed. Any warning (a dead link, a page that mkdocs.yml's nav
# lacks) is an error. Its environment has neither torch nor JAX. With PROJECT_URL, the repository's address, each page links to the repository.
DOCS := .venv-docs
NEEDED_BY_DOCS = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")

$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c '$(NEEDED_BY_DOCS)' > $(DOCS)/needed.txt
	$(DOCS)/bin/python -m pip install -c constraints.txt -r $(DOCS)/needed.txt
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# Runs every code block of every page, including those that make test runs: five minutes on a core
docs-test: install
	$(VENV)/bin/python -m pytest -m 'slow or not slow' tests/docs/test_pages.py tests/docs/test_integrations.py tests/docs/test_site.py $(ARGS)

# Builds and checks the wheel and the sdist in .dist/, installs them in a new environment, and runs README's blocks there. With the download
# of torch and JAX, some minutes on a core. PROJECT_URL, the repository's address, makes README's links absolute (hatch_build.py).
DIST := .dist
wheel:
	$(PYTHON) -m venv --clear .venv-dist
	.venv-dist/bin/python -m pip install build twine
	rm -rf $(DIST)
	.venv-dist/bin/python -m build --outdir $(DIST)
	.venv-dist/bin/python -m twine check --strict $(DIST)/*
	$(PYTHON) -m venv --clear .venv-dist
	.venv-dist/bin/python -m pip install -c constraints.txt torch
	$(PYTHON) tests/commands/page_blocks.py README.md > $(DIST)/readme.py
	set -e; for file in $(DIST)/*.whl $(DIST)/*.tar.gz; do \
		.venv-dist/bin/python -m pip install -c constraints.txt --force-reinstall --no-deps $$file; \
		.venv-dist/bin/python -m pip install -c constraints.txt $$file; \
		.venv-dist/bin/python -m pip check; \
		.venv-dist/bin/dynaxla --version; \
		(cd $(DIST) && ../.venv-dist/bin/python readme.py); \
	done
	rm $(DIST)/readme.py

lint: install
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python tests/commands/prose.py

format: install
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
