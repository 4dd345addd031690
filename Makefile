# The two commands of the README do everything: `make demo` and `make test`.
# They make .venv with the pinned versions of constraints.txt. Outside of it `make test` alone installs anything: programs
# that tests run, by apt-get.

PYTHON ?= python3
VENV ?= .venv
# On Linux, PyPI's torch brings CUDA (gigabytes). For a CPU-only one:
#   make demo TORCH="torch==2.13.0 torchvision==0.28.0+cpu --index-url https://download.pytorch.org/whl/cpu"
# torchvision of another index does not load beside it; `+cpu` replaces the one of constraints.txt.
TORCH ?= torch==2.13.0
DEMO ?=
PYTEST ?=
PART ?=
CHAOS ?=
BOARD_TESTS := tests/edge_client/storage tests/hushfleet/wire/format tests/hushfleet/release
BOARD_TEST_TOOLS := hypothesis iniconfig packaging pluggy pygments pytest pytest-timeout pyyaml setuptools sortedcontainers
OTHER_VERSIONS_TESTS := tests/aggregator/report/test_options.py tests/hushfleet/test_schema.py tests/hushfleet/wire/format \
    $(patsubst %,tests/aggregator/commands/test_%.py,help main methods second_opinion) tests/hushfleet/wire/link/test_mqtt.py \
    tests/simulator/engines/fast/test_local_only.py tests/simulator/world/test_device_process.py
FUZZ ?=

# Hundreds of processes are started by the tests: each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo tools test test-slow test-board test-lowest test-peers test-networks test-arm test-card coverage chaos fuzz lint size format types imports links docs hashes changes dist clean

help:
	@echo "make demo    two fleets train over MQTT on this machine, with a report"
	@echo "make test    run the tests, one file a core at a time   (PYTEST='-k wire' for some, PART=core, fleet, studies or native)"
	@echo "make test-slow   the tests marked slow: whole runs, storms, cells of the papers, compiled networks;   make test ALL=1  both"
	@echo "make coverage    make test with coverage measured, into htmlcov/; fails below the floor"
	@echo "make test-board   some of what boards run, on another Python   (PYTHON=python3.13)"
	@echo "make test-lowest  commands, wire and engines with the lowest versions that pyproject.toml allows;   make test-peers  beside Flower"
	@echo "make test-networks  30 public networks of timm, torchvision and transformers: each trains, and its results go into docs/own.md"
	@echo "make chaos   200 seeds of kills, power cuts, full disks and liars against a fleet, 80 fleets from blank boards on, a year of 40 boards, two years of seasons, and 200 storms of stores that are put back   (CHAOS='--resume')"
	@echo "make test-arm   a card's software on aarch64, emulated: enrols, trains, is updated, is locked out"
	@echo "make test-card  a whole card, emulated: first start, rounds, and a power cut in the middle of an update"
	@echo "make fuzz    a million inputs for the decoders, guided by coverage   (FUZZ='--targets message')"
	@echo "make lint    check style, types and who imports whom (ruff, mypy, import-linter);   make format  mend what ruff can mend"
	@echo "make size    lines, words and what a process loads, beside the goals of docs/size.md; fails where one grew"
	@echo "make docs    the documents and the API reference as a site, in site/"
	@echo "make changes  the fragments of changes/ as a version's part of the changelog   (VERSION=0.4.0)"
	@echo "make dist    the wheel, the source distribution and the version's part of the changelog, checked"
	@echo "make clean   remove .venv and the caches"

demo: $(STAMP)
	$(BIN)/hushfleet demo $(DEMO)

# What tests run beside Python: installed where that is allowed, else named.
tools:
	@tests/install_tools.sh

# PART=core, fleet, studies or native: the parts of docs/architecture.md.
TESTS_fleet := tests/aggregator/fleet tests/edge_client/fleet tests/firmware_profiles/cards tests/hushfleet/release tests/chaos
TESTS_studies := tests/simulator/studies tests/aggregator/planning tests/benchmarks
TESTS_native := $(wildcard tests/models/test_native*.py tests/models/native) tests/simulator/forecast tests/simulator/engines/ray
TESTS_core := tests $(TESTS_fleet:%=--ignore=%) $(TESTS_studies:%=--ignore=%) $(TESTS_native:%=--ignore=%)

PYTEST_ALL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# ALL=1: with the slow ones. Each worker collects the tests once, so that one run is shorter than two.
test: $(STAMP) tools
	$(PYTEST_ALL) $(if $(ALL),,-m "not slow") $(TESTS_$(PART)) $(PYTEST)

test-slow: $(STAMP) tools
	$(PYTEST_ALL) -m slow $(TESTS_$(PART)) $(PYTEST)

# In an environment of its own, with what a board has and pytest.
test-board:
	board=$$(mktemp -d) && $(PYTHON) -m venv $$board && \
	awk '/^[a-z]/ {keep = index(" $(BOARD_TEST_TOOLS) ", " " substr($$1, 1, index($$1, "==") - 1) " ")} keep' constraints.txt > $$board/tools.txt && \
	$$board/bin/python -m pip install --quiet --no-compile --no-deps --require-hashes -r firmware_profiles/cards/wheels.txt -r $$board/tools.txt && \
	$$board/bin/python -m pip install --quiet --no-compile --no-deps --no-build-isolation -e . && \
	OMP_NUM_THREADS=1 $$board/bin/python -m pytest -p no:cacheprovider --hypothesis-profile few -m "not slow" $(BOARD_TESTS) && rm -r $$board

# With other versions of packages, laid over those of .venv in an environment of its own: the lowest that pyproject.toml allows,
# or Flower's. PyTorch is shared. pip names the packages in .venv that would not like it: these tests use none of them but
# amqtt, whose broker does without typer.
test-networks: OTHER_VERSIONS_TESTS := tests/simulator/test_public_networks.py
test-lowest test-peers test-networks: $(STAMP) tools
	over=$$(mktemp -d) && $(BIN)/python -m venv --without-pip $$over && \
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > \
	    $$($$over/bin/python -c "import site; print(site.getsitepackages()[0])")/venv.pth && \
	$(BIN)/python -m pip --python $$over/bin/python install --quiet --disable-pip-version-check --no-compile \
	    $$($(BIN)/python tests/other_versions.py $(@:test-%=%)) && \
	OMP_NUM_THREADS=1 $$over/bin/python -m pytest -p no:cacheprovider --hypothesis-profile few $(if $(findstring networks,$@),,-m "not slow") \
	    $(OTHER_VERSIONS_TESTS) $(PYTEST) && rm -r $$over

coverage: $(STAMP) tools
	$(PYTEST_ALL) -m "not slow" --cov --cov-report=html --cov-report=term $(PYTEST)

chaos: $(STAMP) tools
	PYTHONPATH=tests $(BIN)/python -m chaos tasks/digits-chaos.toml --seeds 200 --out runs/chaos $(CHAOS)
	PYTHONPATH=tests $(BIN)/python -m chaos.lives --seeds 80 --out runs/lives
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos/whole_year.py tests/chaos/many_rollbacks.py

test-arm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s --timeout 14400 tests/arm/on_a_board.py

test-card: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s --timeout 14400 tests/arm/on_a_card.py

fuzz: $(STAMP)
	$(PIP) --no-build-isolation -e '.[fuzz]'
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

lint: types imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: links
	$(BIN)/mypy

# Who imports whom: the contracts of pyproject.toml. Python itself skips the links (setup.py), unless it forgets to.
imports: links
	cd build/links && $(abspath $(BIN))/python -c "import sys; sys.path_importer_cache.clear(); from importlinter import cli; cli.lint_imports_command()" --no-cache --no-logo ../../pyproject.toml

# The folders beside hushfleet/ as the packages below it that they are once installed, for tools that read source text.
# An installation makes them too (setup.py).
links: $(STAMP)
	$(BIN)/python setup.py --quiet links

# How large it is, beside the goals of docs/size.md.
size: links
	@$(BIN)/python tests/size.py

docs: links
	$(BIN)/python docs/settings_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Whatever an index or a mirror sends is refused if it is not the file whose hash constraints.txt has. PyTorch alone is taken
# as it comes: it has other files, and other packages of NVIDIA's, on other indexes (TORCH). It comes after its dependencies,
# so that these are checked, and the build of hushfleet itself takes no setuptools but the one that was checked.
# Of most packages a small part is imported, which Python then compiles by itself.
$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --no-deps --require-hashes -r constraints.txt
	$(PIP) $(TORCH)
	$(PIP) --no-compile --no-deps --no-build-isolation -e .
	touch $@

# For whoever changed a version in constraints.txt: the hashes of all files of each version, for all systems.
hashes: $(STAMP)
	mkdir -p build
	sed -n 's/^\([^# ]*==[^ ]*\).*/\1/p' constraints.txt > build/pins.txt
	$(PIP) uv
	$(BIN)/uv pip compile --quiet --no-deps --universal --python-version 3.12 --generate-hashes --no-annotate \
	    --custom-compile-command "make hashes" build/pins.txt --output-file constraints.txt

# Each change has a file, changes/NAME.removed.md, NAME.changed.md, NAME.added.md or NAME.fixed.md, which goes with its version.
VERSION ?=
changes: $(STAMP)
	$(BIN)/towncrier build --yes --version $(VERSION)

# What a release publishes. Nothing is uploaded here. A change that is not in CHANGELOG.md yet is an error.
dist: $(STAMP)
	test -z "$$(ls changes/*.*.md 2>/dev/null)"
	rm -rf dist build/changes.md
	$(PIP) build twine
	$(BIN)/python -m build --no-isolation .
	$(BIN)/python -m twine check --strict dist/*
	version=$$($(BIN)/python -c 'import hushfleet; print(hushfleet.__version__)') && \
	awk -v version="$$version" '/^## /{wanted = $$2 == version; next} wanted' CHANGELOG.md > build/changes.md
	test -s build/changes.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* htmlcov site build dist *.egg-info
