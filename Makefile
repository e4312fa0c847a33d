# Every target makes the virtual environment that it needs, once: a second call goes straight to work.
#
#   make demo    universal sets of real attention keys, and what they catch
#   make test    lint, types, tests and the README's examples
#   make lint    lint and types alone
#   make bench   every benchmark in examples/benchmarks, or those named in BENCHMARKS
#   make clean   remove all that the others made

PYTHON ?= python3

# Tests and benchmarks also run on torch tensors, on the CPU. Where the package index has no CPU build of this
# release, pip falls back on one with several GB of CUDA libraries; torch's own CPU index avoids them:
#   make test TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
# With TORCH= (empty) torch is left out, and what needs it is skipped.
TORCH ?= torch==2.13.0

BENCHMARKS ?= $(filter-out examples/benchmarks/_%, $(sort $(wildcard examples/benchmarks/*.py)))

ENVIRONMENTS := demo lint test bench
extras-demo  := cli
extras-lint  := lint
extras-test  := test
extras-bench := bench
before-test  := $(TORCH)
before-bench := $(TORCH)

PIP_INSTALL = .venv-$*/bin/python -m pip -qq --disable-pip-version-check install

.PHONY: demo test lint bench clean

demo: .venv-demo/.ready
	@.venv-demo/bin/levattn demo --out build/demo

test: .venv-test/.ready
	$(call lint-with,.venv-test/bin)
	.venv-test/bin/python -m pytest

lint: .venv-lint/.ready
	$(call lint-with,.venv-lint/bin)

bench: .venv-bench/.ready
	@set -e; for script in $(BENCHMARKS); do \
	    echo; echo "== $$script"; .venv-bench/bin/python "$$script"; done

clean:
	rm -rf $(ENVIRONMENTS:%=.venv-%) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find levattn tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

define lint-with
	$(1)/ruff check
	$(1)/ruff format --check
	$(1)/mypy
endef

# The stamp comes last: an interrupted installation starts afresh.
$(ENVIRONMENTS:%=.venv-%/.ready): .venv-%/.ready: pyproject.toml
	@echo "Installing into .venv-$* (a minute or two, this once) ..."
	@$(PYTHON) -m venv --clear .venv-$*
	@$(if $(before-$*), $(PIP_INSTALL) $(before-$*))
	@$(PIP_INSTALL) --editable '.[$(extras-$*)]'
	@touch $@
