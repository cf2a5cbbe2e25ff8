# `make` lists the targets. PYTHON and VENV may be overridden.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: help build
build:  ## compile the engine and the Python module into smoe_cli/ (needs VENV)
	$(BIN)/cmake -S . -B build -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DSMOE_TESTS=ON
	$(BIN)/cmake --build build
	$(BIN)/cmake --install build --prefix . --component python
