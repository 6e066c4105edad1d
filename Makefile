# make demo    train on two processes, on this machine
# make test    formatting, lint, types, and the tests that prove the promises on this machine: 5 minutes on two cores
# make check   the same with all tests; with SETUP_HOSTS=1, also those between real hosts (Debian, root)
# make lint    formatting, lint and types only
# make docs    this documentation as a site, in docs/_build/html
# make clean   remove what make has made
#
# Each sets up what it needs in .venv. With another Python: make PYTHON=python3.12 test

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/installed
TORCHVISION = $(VENV)/torchvision
PIP = PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-input

# What make test leaves out, by what a test does: pyproject.toml says what these words mean.
QUICK = smoke or not (cold or hosts or mpi or pages or wide)
PYTEST = TORCHVISION_PATH=$(abspath $(TORCHVISION)) $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: demo test check lint docs hosts clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/ddprun --nproc-per-node 2 examples/digits/train.py

test: lint
	$(PYTEST) -m '$(QUICK)'

check: lint $(TORCHVISION)/installed $(if $(SETUP_HOSTS)$(CI),hosts)
	$(PYTEST)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -b html -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# torch first and by its exact version: without it pip would take the newest.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "Setting up $(VENV) (torch is large: the first time can take minutes) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) torch==2.13.0
	@$(PIP) --editable '.[dev]'
	@touch $@

# Apart from the rest: beside a CPU build of torch, an installed torchvision breaks other packages.
$(TORCHVISION)/installed: $(INSTALLED)
	@mkdir -p $(TORCHVISION)
	@$(PIP) --no-deps --upgrade --target $(TORCHVISION) 'torchvision==0.28.*' 2> $(VENV)/torchvision.log \
		|| echo "torchvision could not be had, its test will be skipped; the reason is in $(VENV)/torchvision.log"
	@touch $@

# What the tests between real hosts need. Without it they are skipped, and say what is missing.
hosts:
	@timeout 600 apt-get install -qq -y --no-install-recommends openssh-server iproute2 nftables openmpi-bin slurm-wlm > /dev/null \
		|| echo "the programs for the tests between real hosts could not be installed"

clean:
	rm -rf ddprun-logs docs/_build $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
