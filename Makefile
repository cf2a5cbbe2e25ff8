# `make` lists the targets. PYTHON (3.11 or newer) and VENV may be overridden.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.smoe-stamp
DEMO_CKPT := checkpoints/demo
DEMO_VAULT := vault/demo.smoe
DEMO_QUESTION := What is the capital of Italy?
SOURCES := CMakeLists.txt $(shell find engine tests/engine scripts -name '*.cpp' -o -name '*.h')

.PHONY: help setup build demo test check check-full bench bench-kernels format clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Editable, without CMake: the engine is compiled in place by `build`, so that one build serves the package and the C++ tests.
INSTALL = $(BIN)/python -m pip install -q --config-settings=wheel.cmake=false -e

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[build,demo]'
	touch $@

$(STAMP)-test: $(STAMP)
	$(INSTALL) '.[build,demo,test]'
	touch $@

setup: $(STAMP)  ## make .venv, install what is needed, compile the engine
	@$(MAKE) --no-print-directory build

build:  ## compile the engine and the Python module into smoe_cli/
	@test -f build/build.ninja || $(BIN)/cmake -S . -B build -G Ninja -DSMOE_TESTS=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja >/dev/null
	@$(BIN)/cmake --build build
	@$(BIN)/cmake --install build --prefix . --component python >/dev/null

$(DEMO_VAULT): | setup
	$(BIN)/python scripts/make_demo_moe.py $(DEMO_CKPT)
	$(BIN)/smoe convert $(DEMO_CKPT) --name demo --quant q8

demo: setup $(DEMO_VAULT)  ## set up everything, convert the demo model, show its plan, talk to it
	$(BIN)/smoe plan demo
	@if [ -t 0 ] && [ -t 1 ]; then $(BIN)/smoe chat demo; else \
	  echo "> $(DEMO_QUESTION)"; $(BIN)/smoe chat demo -p "$(DEMO_QUESTION)" --temperature 0 --rep-penalty 1; fi

test: setup $(STAMP)-test  ## run the tests
	build/smoe-tests
	$(BIN)/python -m pytest -m "not slow and not arm"

check: setup $(STAMP)-test  ## types, style, formatting
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cpp' '*.h')

check-full: check  ## everything: slow tests, sanitizers, fuzzers, the Arm build (an hour and more)
	$(INSTALL) '.[build,demo,test,full]'
	$(BIN)/python -m pytest -m "not arm"
	VENV=$(VENV) scripts/sanitize.sh
	VENV=$(VENV) scripts/check_arm.sh

# The peer of the speed measurement, built from source for this CPU. Where it stands may be overridden.
PEER_VENV ?= .venv-peer
IK_VENV ?= .venv-ik
BENCH_OUT ?= checkpoints/bench-results

$(PEER_VENV)/bin/python:
	$(PYTHON) -m venv $(PEER_VENV)
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PEER_VENV)/bin/pip install -q --no-binary llama-cpp-python llama-cpp-python==0.3.36

vault/bench.smoe: | setup
	test -d checkpoints/bench || $(BIN)/python scripts/make_bench_model.py checkpoints/bench
	$(BIN)/smoe convert checkpoints/bench --name bench --quant q4_0 --role head=q6_k

checkpoints/bench.gguf: | vault/bench.smoe
	$(BIN)/python scripts/bench_model_to_gguf.py vault/bench.smoe $@

$(IK_VENV)/bin/python:
	scripts/build_ik_llama.sh $(IK_VENV)

bench: checkpoints/bench.gguf $(PEER_VENV)/bin/python $(IK_VENV)/bin/python  ## measure against llama.cpp and ik_llama.cpp (18 GB of disk, half an hour)
	$(BIN)/python scripts/bench_vs_llama.py --vault vault/bench.smoe --gguf checkpoints/bench.gguf \
	  --peer-python $(PEER_VENV)/bin/python --ik-python $(IK_VENV)/bin/python --out $(BENCH_OUT)

bench-kernels: setup  ## GB/s and GOP/s of the matrix kernels, one thread
	build/bench_kernels

format:  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h')

clean:  ## remove what was built (not the models)
	rm -rf build build-* smoe_cli/_core*.so smoe_cli/smoe-engine
