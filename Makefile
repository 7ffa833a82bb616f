# Each target is enough on a fresh machine with make and Python >= 3.10: it creates .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo demo-dense test test-slow test-gpu openvino onnxruntime sanitize wheel versions lint format clean

demo: $(VENV)/.installed  ## Train Vittt-nano on handwritten digits; everything lands in runs/demo
	$(BIN)/vision-ttt demo

demo-dense: $(VENV)/.installed-dense  ## Detection and segmentation on rendered scenes; in runs/demo-dense
	$(BIN)/vision-ttt demo-dense

# Two processes of one thread each: most tests are too small for more. Then the tests of interpreted
# Triton kernels, for which Triton's interpreter must be on from the start. Last the tests of the CPU
# kernels with a lesser instruction set: a test that holds on its author's processor only fails here.
LESSER := $(if $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null),avx2,baseline)
test: $(VENV)/.installed-dev  ## The default test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/ops
	OMP_NUM_THREADS=1 VISION_TTT_CPU_ISA=$(LESSER) $(BIN)/python -m pytest -n 2 \
		-m 'kernels and not slow and not gpu' tests/ops tests/acceleration

test-slow: $(VENV)/.installed-dev  ## The tests that take over a minute
	$(BIN)/python -m pytest -m slow
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m slow tests/ops

test-gpu: $(VENV)/.installed-dev  ## The tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

openvino: $(VENV)/.installed-dev  ## OpenVINO's extension, and its tests
	$(BIN)/python -m pip install --quiet openvino
	$(MAKE) -C csrc/runtimes openvino PYTHON="$(abspath $(BIN))/python"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not gpu' tests/export/test_openvino_model.py

HEADERS ?= /usr/include/onnxruntime
onnxruntime: $(VENV)/.installed-dev  ## The library of operators for ONNX Runtime, and its tests
	$(MAKE) -C csrc/runtimes onnxruntime PYTHON="$(abspath $(BIN))/python" HEADERS="$(abspath $(HEADERS))"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not gpu' tests/export/test_onnxruntime_kernels.py

sanitize: $(VENV)/.installed-dev  ## The C++ kernels under sanitizers and valgrind, and hostile calls
	$(MAKE) -C csrc
	$(MAKE) -C csrc hostile PYTHON="$(abspath $(BIN))/python"

wheel: $(BIN)/python  ## A wheel in dist/, checked in fresh environments (see docs/packaging.md)
	$(BIN)/python packaging/check_wheel.py $(or $(PYTHONS),$(PYTHON))

versions: $(BIN)/python  ## The default test suite on the oldest and newest PyTorch (see docs/packaging.md)
	$(BIN)/python packaging/check_versions.py --python $(PYTHON) --torch $(or $(TORCH),2.11.0 2.14.1 2.15.0)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache src/vision_ttt/_kernels.* src/vision_ttt/_openvino.so src/vision_ttt/_onnxruntime.so

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "vision-ttt needs Python >= 3.10, but $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps make a second call a no-op; changed metadata or kernels install anew.
SOURCES := pyproject.toml setup.py $(shell find csrc -name '*.h' -o -name '*.cpp')

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[train]'
	touch $@

$(VENV)/.installed-dense: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dense]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-dense
