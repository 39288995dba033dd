# make demo | chat | test | sanitize | lint | docs | bench | sweep | studies | soak | clean.
# The first of them sets up $(VENV).
#
#   PYTHON       the Python to make the environment with (3.11 or newer)
#   VENV         where it lies
#   CONSTRAINTS  the constraints files; the first one must pin torch
#   WORKERS      test processes; 0 runs the tests in one process with all threads
#   ARGS         more arguments for pytest, the benchmark or the demo
#   SECONDS_OF_LOAD  on the server, in `make soak`

PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints-dev.txt
WORKERS     ?= 2
ARGS        ?=
SECONDS_OF_LOAD ?= 300

PY    := $(VENV)/bin/python
STAMP := $(VENV)/.hf-cb-ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The stamp holds the folder it was made for. Elsewhere (a copied tree) or with a Python that is gone, it says nothing.
$(shell $(PY) -c '' 2>/dev/null && grep -qxF '$(CURDIR)' $(STAMP) 2>/dev/null || rm -f $(STAMP))

.DEFAULT_GOAL := help
.PHONY: help setup demo chat test sanitize lint docs bench sweep studies soak clean

help:
	@echo "make demo      answer 20 questions at once with a small model, and compare with generate()"
	@echo "make chat      chat with the small model in a browser"
	@echo "make test      run the tests"
	@echo "make sanitize  build the CPU kernels with GCC's address and undefined behaviour sanitizers, and run their tests"
	@echo "make docs      the documentation as a site, in build/site"
	@echo "make lint      ruff and mypy"
	@echo "make bench     measure the speed"
	@echo "make sweep     compare with generate() on every architecture; writes docs/models.md"
	@echo "make studies   policies and prefill chunks under real arrivals; writes docs/studies (12 quiet minutes)"
	@echo "make soak      10,000 requests from threads and event loops, with faults; then five minutes of load on a server"
	@echo "make clean     remove caches and build outputs (the environment stays: rm -r $(VENV))"

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS) $(wildcard kernels/cpu/*.h kernels/cpu/*.cpp kernels/cpu/CMakeLists.txt)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(1)' || { \
	  echo "hf_cb needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`; try: make PYTHON=python3.11" >&2; \
	  exit 1; }
	@if [ -d $(VENV) ] && [ ! -e $(VENV)/pyvenv.cfg ] && [ -n "`ls -A $(VENV)`" ]; then \
	  echo "$(VENV) is there and is no virtual environment; choose another: make VENV=folder" >&2; exit 1; fi
	@# an environment of another place or Python, or without pip, is made anew
	@$(PY) -c 'import sys, pip, pathlib as p; \
	           sys.exit(sys.version_info < (3, 11) or p.Path(sys.prefix) != p.Path("$(VENV)").resolve())' 2>/dev/null || { \
	  echo "setup: making $(VENV) with `$(PYTHON) --version`"; \
	  $(PYTHON) -m venv --clear $(VENV) || { echo "on Debian: apt-get install python3-venv" >&2; exit 1; }; }
	@torch=`grep '^torch==' $(firstword $(CONSTRAINTS))`; echo "setup: installing $$torch"; \
	  $(PY) -m pip install -qq $$torch
	@echo "setup: installing hf-cb and its tools"
	@$(PY) -m pip install -qq $(addprefix -c ,$(CONSTRAINTS)) -e '.[dev,demo,serve,chat,notebook,docs,gpu]'
	@echo '$(CURDIR)' > $@

demo: $(STAMP)
	@$(PY) demos/batch.py $(ARGS)

chat: $(STAMP)
	@$(PY) demos/chat.py $(ARGS)

# Two processes with one thread each: the tests spend their time in Python, on models of a few kilobytes.
test: $(STAMP)
ifeq ($(WORKERS),0)
	@$(PY) -m pytest $(ARGS)
else
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)
endif

# The tests load that library in place of the installed one. One that does not load would only skip them.
CMAKE     := $(or $(shell command -v cmake),$(VENV)/bin/cmake)
SANITIZED := $(CURDIR)/build/sanitize

$(VENV)/bin/cmake: $(STAMP)
	@$(PY) -m pip install -qq cmake

sanitize: export HF_CB_CPU_LIBRARY := $(SANITIZED)/libhf_cb_cpu.so
sanitize: export ASAN_OPTIONS := detect_leaks=0
sanitize: export UBSAN_OPTIONS := print_stacktrace=1
sanitize: $(STAMP) $(CMAKE)
	@echo "sanitize: building $(HF_CB_CPU_LIBRARY) (minutes)"
	@$(CMAKE) -S kernels/cpu -B $(SANITIZED) -DSANITIZE=address,undefined -DCMAKE_CXX_COMPILER=$(CXX) > /dev/null
	@$(CMAKE) --build $(SANITIZED) --parallel > /dev/null
	@export LD_PRELOAD="`$(CXX) -print-file-name=libasan.so` `$(CXX) -print-file-name=libubsan.so`"; \
	  $(PY) -c 'import sys; from hf_cb.kernels.cpu import library as lib; sys.exit(lib.problem())' && \
	  $(PY) -m pytest --capture=no --timeout 600 tests/kernels tests/modules/test_decoders.py $(ARGS)

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# --quiet would keep warnings from being counted, and so from failing it.
docs: $(STAMP)
	@$(PY) -m mkdocs build
	@echo "docs: build/site/index.html"

bench: $(STAMP)
	@$(VENV)/bin/hf-cb bench $(ARGS)

sweep: $(STAMP)
	@OMP_NUM_THREADS=1 $(PY) -m hf_cb.bench.sweep --page docs/models.md $(ARGS)

studies: $(STAMP)
	@$(PY) docs/make_studies.py $(ARGS)

soak: $(STAMP)
	@OMP_NUM_THREADS=1 $(PY) tests/soak.py $(ARGS)
	@$(PY) -m pip install -qq $(addprefix -c ,$(CONSTRAINTS)) locust
	@OMP_NUM_THREADS=1 $(PY) tests/soak_server.py --seconds $(SECONDS_OF_LOAD)

clean:
	@echo "clean: removing caches and build outputs"
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	@find hf_cb kernels tests demos -name __pycache__ -prune -exec rm -rf {} +
