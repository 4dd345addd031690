# The two commands of the README do everything: `make demo` and `make test`.
# They make .venv with the pinned versions of constraints.txt; nothing is installed outside of it.

PYTHON ?= python3
VENV ?= .venv
# On Linux, PyPI's torch brings CUDA (gigabytes). For a CPU-only one:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
DEMO ?=
PYTEST ?=
CHAOS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: help demo test test-fast chaos lint clean

help:
	@echo "make demo    run the main job: 8 devices train over MQTT on this machine, with a report"
	@echo "make test    run all tests, one file a core at a time   (PYTEST='-k wire' for some)"
	@echo "make test-fast   the tests without those marked slow, two and a half minutes on two cores"
	@echo "make chaos   200 seeds of kills, power cuts, full disks and liars against a fleet   (CHAOS='--resume')"
	@echo "make lint    check the style"
	@echo "make clean   remove .venv and the caches"

demo: $(STAMP)
	$(BIN)/hushfleet demo $(DEMO)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST)

test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "not slow" $(PYTEST)

chaos: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m chaos tasks/digits-chaos.toml --seeds 200 --out runs/chaos $(CHAOS)

lint: $(STAMP)
	$(BIN)/ruff check .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
