# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both build .venv on first use; a stamp in it makes the second run start at once.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
PY     := $(VENV)/bin/python
PINS   := $(VENV)/pins.txt
PIP    := $(PY) -m pip install -qq --disable-pip-version-check --no-compile
# Two workers, one thread each: torch would otherwise start a pool of threads in every worker. Bytecode is kept in $(VENV),
# also where the environment forbids it or packages cannot be written: tests start many interpreters, and each would
# compile all of torch that it imports.
BYTECODE := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(abspath $(VENV))/bytecode
PYTEST := $(BYTECODE) OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal

.PHONY: help demo test pytest lint ruff types format docs coverage-docs bench-ir doctor clean

help:
	@echo 'make demo      train a small GPT for about a minute, eagerly and compiled'
	@echo 'make test      ruff, mypy and every test'
	@echo 'make lint      ruff and mypy alone          make format    let ruff rewrite the files'
	@echo 'make docs      write the generated pages    make doctor    what this machine can do'
	@echo 'make bench-ir  seconds the IR core takes    make clean     remove .venv and caches'
	@echo 'PYTHON=python3.12 picks the interpreter, TORCH=torch==2.11.0 the torch that is installed.'

demo: $(VENV)/.run
	@$(PY) -m wholestep demo

doctor: $(VENV)/.run
	@$(PY) -m wholestep doctor

# What ruff finds is said at once; types are checked while the tests run.
test: ruff
	@$(MAKE) --no-print-directory -j2 types pytest

pytest: $(VENV)/.test
	@$(PYTEST)

lint: ruff types

ruff: $(VENV)/.test
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(VENV)/.test
	@$(PY) -m mypy

format: $(VENV)/.test
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: $(VENV)/.run
	@$(PY) -m wholestep docs

# What PyTorch's op samples come to: a few minutes. The networks' table is read from tests/zoo/results.json.
coverage-docs: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(PY) -m tests.capture.coverage --write

bench-ir: $(VENV)/.test
	@$(PY) bench/ir.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The virtual environment. A torch that $(PYTHON) can already import is used as it is; otherwise $(TORCH) is installed
# before anything else asks for a torch. Either way its exact version is then pinned, so that pip never looks for another.
$(PINS):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "wholestep needs Python 3.11 or newer and '$(PYTHON)' is older or missing; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(PY) && $(PY) -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments (it has no ensurepip)." >&2; \
	    echo "Install the venv package of your system (Debian: apt-get install python3-venv), name another interpreter" >&2; \
	    echo "(make PYTHON=/path/to/python3 ...), or, with torch at hand, run straight from here: python3 -m wholestep demo" >&2; \
	    exit 1; }; \
	  echo "making $(VENV)"; rm -rf $(VENV); \
	  if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	    $(PYTHON) -m venv --system-site-packages $(VENV); \
	    $(PY) -c 'import torch' 2>/dev/null || \
	      $(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
	        > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer-torch.pth"; \
	  else $(PYTHON) -m venv $(VENV); fi; }
	@$(PY) -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) '$(TORCH)'; }
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@.part && mv $@.part $@

$(VENV)/.run: pyproject.toml | $(PINS)
	@echo "installing wholestep (with $$(cat $(PINS)))"
	@$(PIP) -c $(PINS) -e . || { echo "the install failed; python3 -m wholestep still runs from here with torch alone" >&2; exit 1; }
	@touch $@

$(VENV)/.test: pyproject.toml | $(PINS)
	@echo "installing wholestep and its test tools (with $$(cat $(PINS)))"
	@$(PIP) -c $(PINS) -e '.[test]'
	@touch $@ $(VENV)/.run
