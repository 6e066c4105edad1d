# make demo    train a Lightning script on one process and on two, and compare: a minute, once torch is there
# make parts   the tests that start no process: a minute
# make test    formatting, lint, types, and the tests that prove the promises on this machine: 5 minutes on two cores
# make check   also real interpreters, hosts, MPI and pages: 15 minutes; SETUP_HOSTS=1 installs what hosts need
#              (Debian, root)
# make night   also what repeats these many times: random cuts, many generated examples (SEED=1 takes others, the date
#              by default), applications from PyPI, and the oldest and newest versions; hours
# make check-cuda  the tests for a GPU, on a machine that has one: 10 minutes; with CUDA_PYTHON=python3, by a Python
#              that has everything, without setting up .venv
# make check-apps  five applications from PyPI that train through a Trainer, unchanged, on two processes as on one;
#              takes 3 GB on disk
# make lint    formatting, lint and types only
# make promises  write the list of promises in tests/README.md again
# make docs    this documentation as a site, in docs/_build/html
# make versions  the tests of make test with the oldest and the newest supported torch, Lightning and Python;
#                downloads several gigabytes. One of the two: make versions-oldest, make versions-newest
# make clean   remove what make has made
#
# make check-engines  the library inside Ray Train, Dask, Submitit, Hydra and notebooks; takes 2 GB on disk
#
# Each sets up what it needs in .venv (demo a part of it), versions in .venv-oldest and .venv-newest, check-apps in
# .venv-apps, check-engines in .venv-engines. With another Python:
# make PYTHON=python3.12 test, make OLDEST_PYTHON=... NEWEST_PYTHON=... versions

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/installed
DEMO = $(VENV)/demo
PIP = PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-input

OURS = ddp_callbacks tests examples docs packaging
PYTEST = $(BIN)/python -m pytest -n 3 --dist loadgroup

# The ends of the ranges in pyproject.toml.
OLDEST_PYTHON ?= python3.11
OLDEST = torch==2.8.0 lightning==2.6.0 pytorch-lightning==2.6.0
NEWEST_PYTHON ?= python3.13
NEWEST = torch==2.14.1 lightning==2.6.6 pytorch-lightning==2.6.6

# Applications of others, which train through a Trainer; each is a row of tests/apps.
APPS = chemprop==2.3.1 darts==0.48.1 neuralforecast==3.3.0 pytorch-forecasting==1.8.0 scvi-tools==1.4.2 wandb==0.31.0 \
	mlflow-skinny==3.17.2

# The Python that runs the tests for a GPU. One of its own needs no network.
CUDA_PYTHON ?= $(BIN)/python

# Programs that start processes themselves; each is a row of tests/engines.
ENGINES = "ray[train]==2.60.0" "dask[distributed]==2026.8.0" submitit==1.5.4 hydra-core==1.3.8 nbclient==0.11.0 ipykernel \
	kubernetes-validate==1.37.0

.PHONY: demo parts test check night check-cuda check-apps check-engines lint promises docs hosts clean \
	versions versions-oldest versions-newest
.DELETE_ON_ERROR:

demo: $(DEMO)
	@OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

parts: $(INSTALLED)
	$(PYTEST) --tier parts

test: lint
	$(PYTEST) --tier test

check: lint $(if $(SETUP_HOSTS)$(CI),hosts)
	$(PYTEST) --tier check

night: lint $(if $(SETUP_HOSTS)$(CI),hosts)
	SEED=$${SEED:-$$(date +%Y%m%d)} $(PYTEST) --tier night
	$(MAKE) check-apps check-engines versions

# PYTHONPATH: the package need not be installed there.
check-cuda: $(if $(filter $(BIN)/python,$(CUDA_PYTHON)),$(INSTALLED))
	@$(CUDA_PYTHON) -c 'import torch; print("torch", torch.__version__, "sees", torch.cuda.device_count(), "GPUs")'
	@echo "Skipped by name: all tests without a CUDA GPU; NCCL's, if NCCL refuses two ranks on one GPU; Torchbearer's without it"
	PYTHONPATH=$(CURDIR):$$PYTHONPATH PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(CUDA_PYTHON) -m pytest -p xdist.plugin -p pytest_timeout \
		-n 4 --dist loadfile $(CUDA_OPTIONS) tests/cuda

check-apps: .venv-apps/installed
	.venv-apps/bin/python -m pytest -n 0 tests/apps
	.venv-apps/bin/python -m pytest -n 0 tests/trainer/test_lightning_equivalence.py -m 'not wide' -k 'rich or device_stats'  # rich and psutil are there

check-engines: .venv-engines/installed
	.venv-engines/bin/python -m pytest -n 0 tests/engines

versions: versions-oldest versions-newest

versions-oldest versions-newest: versions-%: .venv-%/installed
	@.venv-$*/bin/python -c 'import lightning, platform, torch; print("the $* supported versions: Python", \
		platform.python_version(), "torch", torch.__version__, "Lightning", lightning.__version__)'
	.venv-$*/bin/python -m pytest -n 2 --dist loadgroup --tier test tests  # named: the budget is that of another torch

lint: $(INSTALLED)
	$(BIN)/ruff check $(OURS)
	$(BIN)/ruff format --check $(OURS)
	$(BIN)/mypy

promises: $(INSTALLED)
	cd tests && $(abspath $(BIN))/python -m kit.promises

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -b html -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# torch first and by its exact version: without it pip would take the newest.
$(DEMO): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	@test ! -e $(VENV) || test -e $(VENV)/made || test -e $(DEMO) || { \
		echo "$(VENV) is an environment of your own: make would clear it. Type: make VENV=.venv-make $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (torch is large: the first time can take minutes) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $(VENV)/made
	@$(PIP) torch==2.13.0
	@$(PIP) --no-compile --editable '.[demo]'  # most of it is never imported
	@touch $@

$(INSTALLED): $(DEMO)
	@echo "Setting up the rest, for developers ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

.venv-oldest/installed: WANTED = $(OLDEST)
.venv-oldest/installed: WITH = $(OLDEST_PYTHON)
.venv-newest/installed: WANTED = $(NEWEST)
.venv-newest/installed: WITH = $(NEWEST_PYTHON)
.venv-oldest/installed .venv-newest/installed: pyproject.toml
	@$(WITH) -c '' || { echo "$(WITH) is not here: name another by OLDEST_PYTHON=... or NEWEST_PYTHON=..."; exit 1; }
	@echo "Installing $(WANTED) for $(WITH) in $(@D); with CUDA, which PyPI's torch brings, about 6 GB on disk ..."
	@$(WITH) -m venv --clear $(@D)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install -qq --no-input $(WANTED) --editable '.[dev]'
	@touch $@

# torch first, and once more by its exact version beside the applications: they keep the build that is there.
.venv-apps/installed: pyproject.toml
	@echo "Installing $(APPS) in $(@D) ..."
	@$(PYTHON) -m venv --clear $(@D)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install -qq --no-input torch==2.13.0
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install -qq --no-input torch==2.13.0 \
		lightning==2.6.6 pytorch-lightning==2.6.6 $(APPS) pytest pytest-timeout pytest-xdist --editable '.[torchbearer,examples]'
	@touch $@

.venv-engines/installed: pyproject.toml
	@echo "Installing $(ENGINES) in $(@D) ..."
	@$(PYTHON) -m venv --clear $(@D)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install -qq --no-input torch==2.13.0
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install -qq --no-input torch==2.13.0 lightning==2.6.6 \
		$(ENGINES) pytest pytest-timeout pytest-xdist --editable '.[torchbearer,demo]'
	@touch $@

# What the tests between real hosts need. Without it they are skipped, and say what is missing.
hosts:
	@timeout 600 apt-get install -qq -y --no-install-recommends openssh-server iproute2 nftables openmpi-bin slurm-wlm > /dev/null \
		|| echo "the programs for the tests between real hosts could not be installed"

clean:
	rm -rf ddprun-logs examples/*/ddprun-logs tests/scenarios/failing-programs docs/_build docs/_files build *.egg-info \
		$(VENV) .venv-oldest .venv-newest .venv-apps .venv-engines .pytest_cache .mypy_cache .ruff_cache .hypothesis
