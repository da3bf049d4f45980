# Every way to set Weft up, run it and check it. `make` alone lists them.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS := gateway,cache,worker,compress,telemetry,dev

# Passed to `weft serve`; if empty, its default applies.
MODEL     ?=
REDIS_URL ?=
WORKERS   ?= 1
# The interpreter that has a CUDA build of torch.
GPU_PYTHON ?= $(PYTHON)
# A folder of text for `make train-demo`.
CORPUS    ?=
# The number of processes that run the tests.
TEST_PROCESSES ?= auto
# The folder that `make demo-family` writes to.
FAMILY    ?= .weft/family

PACKAGES := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
PROTOS   := $(wildcard protos/*.proto)
PIP      := $(BIN)/python -m pip install -qq

# A stamp is touched when its step is done, so that a step runs again only when what it depends on has changed.
MADE     := $(VENV)/.made
TORCHED  := $(VENV)/.$(subst ==,-,$(TORCH))
SET_UP   := $(VENV)/.set-up
STUBS    := $(VENV)/.stubs

say = @printf '\033[1m%s\033[0m\n' '$(1)'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help set-up stubs demo serve test test-kernels test-gpu bench-kernels bench-engine bench-gpu bench-start bench-determinism lint format types check-images bench-cpu bench-links bench-tracing train-demo demo-family clean

help: ## List what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

set-up: $(STUBS) ## Create the virtual environment, install everything, generate the stubs.

stubs: $(STUBS) ## Generate the gRPC stubs beside the protos.

demo: set-up ## Start the mesh with the demo model, stream one answer, print its receipt, stop.
	@$(BIN)/weft demo

serve: set-up ## Keep the mesh up: MODEL=path-or-hub-id REDIS_URL=redis://... WORKERS=1.
	@$(BIN)/weft serve --workers $(WORKERS) $(if $(MODEL),--model '$(MODEL)') $(if $(REDIS_URL),--redis-url '$(REDIS_URL)')

test: set-up ## Lint, types and all tests.
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory lint types && $(BIN)/python -m pytest --quiet --durations=10 -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder; \
	status=$$?; echo "make test: $$(( $$(date +%s) - start )) s"; exit $$status

test-kernels: ## Every kernel on this machine's GPU against its reference: GPU_PYTHON=python with a CUDA build of torch.
	@$(GPU_PYTHON) -m pytest -c /dev/null --rootdir . -q -p no:cacheprovider tests/gpu/test_kernels.py tests/gpu/test_linear.py

bench-kernels: ## Time every kernel on this machine's GPU into bench/results: GPU_PYTHON=python FRESH=1.
	@$(GPU_PYTHON) -m bench.kernels.measure $(if $(FRESH),--fresh)

test-gpu: ## The GPU engine on this machine's GPU against the CPU's: GPU_PYTHON=python.
	@OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -c /dev/null --rootdir . -q -p no:cacheprovider tests/gpu/test_engine.py tests/gpu/test_formats.py tests/gpu/test_verify.py tests/gpu/test_compress.py tests/gpu/test_warm.py

bench-engine: ## The bare engine loop on this machine's GPU, 8B and 1B shapes: GPU_PYTHON=python FRESH=1.
	@$(GPU_PYTHON) -m bench.engine.measure $(if $(FRESH),--fresh)

bench-gpu: ## The whole mesh on this machine's GPU, over gRPC: GPU_PYTHON=python FRESH=1 FORMATS="bf16 fp8 int4" MODELS="8b 1b".
	@$(GPU_PYTHON) -m bench.mesh.gpu $(if $(FRESH),--fresh) $(if $(FORMATS),--formats $(FORMATS)) $(if $(MODELS),--models $(MODELS))

bench-start: ## Seconds that a worker's start takes on this machine's GPU with an empty and a filled kernel cache: GPU_PYTHON=python FORMATS="bf16 fp8".
	@$(GPU_PYTHON) -m bench.engine.start $(if $(FORMATS),--formats $(FORMATS))

bench-determinism: ## What the deterministic mode keeps and costs on this machine's GPU, 8B shape: GPU_PYTHON=python.
	@$(GPU_PYTHON) -m bench.engine.determinism

lint: set-up ## Style and formatting, changing nothing.
	$(call say,ruff)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: set-up ## Strict types over every package and the tests.
	$(call say,mypy --strict)
	@$(BIN)/mypy --strict $(PACKAGES)

format: set-up ## Format the code and fix what can be fixed.
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

check-images: set-up ## Carry out the build of the small image without an engine, and start its services (slow).
	@$(BIN)/python -m tests.deploy.replay mesh --python '$(PYTHON)'

bench-cpu: set-up ## The demo model through the door, beside transformers on the same processor.
	@$(BIN)/python -m bench.mesh.cpu

bench-links: set-up ## Links, gateway, admission and planning, measured without a model, each beside its goal.
	@$(BIN)/python -m bench.mesh.links

bench-tracing: set-up ## What tracing costs: none, 1%, 100%, and a collector that does not answer.
	@$(BIN)/python -m bench.mesh.tracing

train-demo: set-up ## Train the demo models on a folder of text: CORPUS=folder.
	@test -n '$(CORPUS)' || { echo 'make train-demo needs CORPUS=folder'; exit 2; }
	@$(PIP) -e '.[train]'
	@$(BIN)/python -m models.train --corpus '$(CORPUS)' --out models

demo-family: set-up ## The demo model quantized, pruned, distilled, and proved, in one table: FAMILY=folder CORPUS=folder.
	@$(BIN)/python -m models.family --out '$(FAMILY)' $(if $(CORPUS),--text '$(CORPUS)')

clean: ## Remove what was generated; keep .weft, where the data of the embedded Redis lives.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py protos/*_pb2_grpc.pyi

$(MADE):
	$(call say,virtual environment in $(VENV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Weft needs Python 3.11 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Torch is installed first, so that pip takes the build from the index that this machine is configured for.
$(TORCHED): $(MADE)
	$(call say,$(TORCH) (the largest download))
	@$(PIP) '$(TORCH)'
	@touch $@

$(SET_UP): $(TORCHED) pyproject.toml
	$(call say,Weft and its dependencies)
	@$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

$(STUBS): $(SET_UP) $(PROTOS)
	$(call say,stubs of $(PROTOS))
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. \
		--python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=. $(PROTOS) > $(VENV)/protoc.log 2>&1 \
		|| { cat $(VENV)/protoc.log; exit 1; }
	@touch $@
