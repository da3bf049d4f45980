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
# The number of processes that run the tests. Many tests wait for other processes most of the time; threads of torch that
# wait for one another would take the time of all.
TEST_PROCESSES ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$(( cores < 3 ? 3 : cores )))
# The clients that `make test-clients` runs; if empty, all.
CLIENTS   ?=
# The program smg for `make bench-smg`; if empty, it is installed.
SMG       ?=
# The folder that `make demo-family` writes to.
FAMILY    ?= .weft/family
# The folder that `make certs` writes to.
CERTS     ?= .weft/certs

KERNEL_TESTS := $(patsubst %,tests/gpu/test_%.py,kernels linear adapters)
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
PROTOS   := $(wildcard protos/*.proto)
PIP      := $(BIN)/python -m pip install -qq --no-compile
# Compiles the modules in a folder to bytecode. By pip, on one core, it takes half of the time of an installation.
# Packages contain templates with the names of modules, which do not compile.
COMPILE  := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m compileall -qq
SITE     := $(VENV)/lib/python*/site-packages

# A stamp is touched when its step is done, so that a step runs again only when what it depends on has changed.
MADE     := $(VENV)/.made
TORCHED  := $(VENV)/.$(subst ==,-,$(TORCH))
SET_UP   := $(VENV)/.set-up
STUBS    := $(VENV)/.stubs

say = @printf '\033[1m%s\033[0m\n' '$(1)'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help chaos simulate soak set-up stubs demo serve test tests test-clients test-kernels test-gpu bench-kernels bench-engine bench-gpu bench-start bench-determinism bench-speculation bench-speculation-cpu bench-speculation-equality lint format types check-images bench-cpu bench-links bench-smg bench-open bench-overload bench-turns bench-tracing train-demo demo-family fuzz certs clean

help: ## List what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-28s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

set-up: $(STUBS) ## Create the virtual environment, install everything, generate the stubs.

stubs: $(STUBS) ## Generate the gRPC stubs beside the protos.

demo: set-up ## Start the mesh with the demo model, stream one answer, print its receipt, stop.
	@$(BIN)/weft demo

serve: set-up ## Keep the mesh up: MODEL=path-or-hub-id REDIS_URL=redis://... WORKERS=1.
	@$(BIN)/weft serve --workers $(WORKERS) $(if $(MODEL),--model '$(MODEL)') $(if $(REDIS_URL),--redis-url '$(REDIS_URL)')

test: set-up ## Lint, types and all tests.
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory lint && $(MAKE) --no-print-directory --jobs=2 types tests; \
	status=$$?; echo "make test: $$(( $$(date +%s) - start )) s"; exit $$status

tests: set-up ## All tests, without lint and types: TEST_PROCESSES=8.
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --durations=10 -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder --reruns 1

test-clients: set-up ## Unmodified clients (OpenAI's, LangChain, ...) against a running mesh: CLIENTS="openai_python langchain".
	@$(BIN)/python -m tests.clients.run $(CLIENTS)

test-kernels: ## Every kernel on this machine's GPU against its reference: GPU_PYTHON=python with a CUDA build of torch.
	@$(GPU_PYTHON) -m pytest -c /dev/null --rootdir . -q -p no:cacheprovider $(KERNEL_TESTS)

.PHONY: record-kernels
record-kernels: set-up ## Compile every kernel for every capability, run all in Triton's interpreter, and record what passed for the tests.
	@for kind in "90 bfloat16" "90 float32" "89 float16" "80 bfloat16"; do $(BIN)/python -m tests.kernels.compile_ahead $$kind --fresh > /dev/null || exit 1; done
	@$(BIN)/python -m tests.kernels.interpret --fresh

bench-kernels: ## Time every kernel on this machine's GPU into bench/results: GPU_PYTHON=python FRESH=1.
	@$(GPU_PYTHON) -m bench.kernels.measure $(if $(FRESH),--fresh)

test-gpu: ## The GPU engine on this machine's GPU against the CPU's: GPU_PYTHON=python.
	@OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -c /dev/null --rootdir . -q -p no:cacheprovider $(filter-out $(KERNEL_TESTS),$(wildcard tests/gpu/test_*.py))

bench-engine: ## The bare engine loop on this machine's GPU, 8B and 1B shapes: GPU_PYTHON=python FRESH=1.
	@$(GPU_PYTHON) -m bench.engine.measure $(if $(FRESH),--fresh)

bench-gpu: ## The whole mesh on this machine's GPU, over gRPC: GPU_PYTHON=python FRESH=1 FORMATS="bf16 fp8 int4" MODELS="8b 1b".
	@$(GPU_PYTHON) -m bench.mesh.gpu $(if $(FRESH),--fresh) $(if $(FORMATS),--formats $(FORMATS)) $(if $(MODELS),--models $(MODELS))

.PHONY: bench-grids bench-rank-account bench-peer-sums
bench-grids: ## One model on grids of this machine's GPUs, the bare engine: GPU_PYTHON=python ARGS="--grids 1x1 2x1 --model 8b" or "--grids 2x1 2x1e --model 30b-a3b".
	@$(GPU_PYTHON) -m bench.engine.grids $(ARGS)

bench-rank-account: ## What each kernel adds to a step on two tensor ranks: GPU_PYTHON=python ARGS="--steps 1 32 1950".
	@$(GPU_PYTHON) -m bench.engine.rank_account $(ARGS)

bench-peer-sums: ## Sums over the ranks of two GPUs, beside NCCL: GPU_PYTHON=python.
	@$(GPU_PYTHON) -m bench.kernels.peer_sums

.PHONY: bench-disaggregated
bench-disaggregated: ## Workers for prompts and for answers beside replicas on two GPUs of this machine, and copies of KV blocks between them: GPU_PYTHON=python ARGS="--shares 0.5 0.7".
	@$(GPU_PYTHON) -m bench.engine.pool_copies
	@$(GPU_PYTHON) -m bench.mesh.disaggregated $(ARGS)

bench-start: ## Seconds that a worker's start takes on this machine's GPU with an empty and a filled kernel cache: GPU_PYTHON=python FORMATS="bf16 fp8".
	@$(GPU_PYTHON) -m bench.engine.start $(if $(FORMATS),--formats $(FORMATS))

bench-determinism: ## What the deterministic mode keeps and costs on this machine's GPU, 8B shape: GPU_PYTHON=python.
	@$(GPU_PYTHON) -m bench.engine.determinism

bench-speculation: ## Speculation on this machine's GPU, 8B shape with a 1B draft, and copying answers: GPU_PYTHON=python ARGUMENTS="--draft-quantize int4".
	@$(GPU_PYTHON) -m bench.speculation.gpu $(ARGUMENTS)

.PHONY: bench-speculation-mesh
bench-speculation-mesh: ## Times between tokens as a mesh's clients receive them, with guesses and without, on this machine's GPU: GPU_PYTHON=python ARGUMENTS="--draft-quantize int4".
	@$(GPU_PYTHON) -m bench.speculation.mesh $(ARGUMENTS)

.PHONY: bench-speculation-simulated
bench-speculation-simulated: set-up ## The choice of depths and the pace of tokens on a counted clock, no GPU: ARGUMENTS="--acceptance 0.5 --rows 16".
	@$(BIN)/python -m bench.speculation.simulated $(ARGUMENTS)

bench-speculation-cpu: set-up ## Speculation of the demo model on this machine's CPU: ARGUMENTS="--heads out/heads".
	@$(BIN)/python -m bench.speculation.demo $(ARGUMENTS)

bench-speculation-equality: $(if $(GPU),,set-up) ## Whether speculation changes a token, on the CPU: REQUESTS=1000 SPECULATE=ngram. With GPU=1 the 8B shape: GPU_PYTHON=python.
	@$(if $(GPU),$(GPU_PYTHON),OMP_NUM_THREADS=1 $(BIN)/python) -m bench.speculation.equality $(if $(GPU),--engine gpu --model random:llama-3.1-8b) --requests $(or $(REQUESTS),$(if $(GPU),200,1000)) $(if $(SPECULATE),--speculate $(SPECULATE),$(if $(GPU),--speculate ngram suffix draft))

.PHONY: bench-lora
bench-lora: ## Decode with 32 adapters of rank 16 mixed in a batch of 64: the demo model on the CPU, with GPU=1 the 8B shape: ARGS="--rounds 3" GPU_PYTHON=python.
	@$(if $(GPU),$(GPU_PYTHON),OMP_NUM_THREADS=1 $(BIN)/python) -m bench.engine.adapters $(ARGS)

.PHONY: bench-engines
bench-engines: set-up ## All engines beside each other on this machine's CPU, demo model, batch 1 and 16: ENGINES="torch onnxruntime".
	@$(BIN)/python -m bench.engine.engines $(if $(ENGINES),--engines $(ENGINES))

.PHONY: bench-grammar
bench-grammar: ## Random JSON schemas obeyed by the demo model; with GPU=1 what constrained rows cost in an 8B step, or GUESSES=1 what guesses gain: SCHEMAS=1000 GPU_PYTHON=python.
	@$(if $(GPU),$(GPU_PYTHON),$(BIN)/python) -m bench.engine.structured $(if $(GPU),$(if $(GUESSES),--guesses,--gpu),$(if $(SCHEMAS),--schemas $(SCHEMAS)))

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

chaos: set-up ## Break links and processes under streams, a row for each promise: SEEDS=3 (0: all) ROWS="worker SIGKILL" FIRST=1 LANES=1 RESUME=1.
	@$(BIN)/python -m tests.faults.chaos $(if $(RESUME),--resume) $(if $(LANES),--lanes $(LANES)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(FIRST),--first-seed $(FIRST)) $(if $(ROWS),--rows '$(ROWS)')

.PHONY: rolling
rolling: set-up ## Restart the scheduler, gateways and workers one after the other under streams: RESTARTS=100 KINDS="gateways workers".
	@$(BIN)/python -m tests.faults.rolling $(if $(RESTARTS),--restarts $(RESTARTS)) $(if $(KINDS),--kinds $(KINDS))

simulate: set-up ## The gateway's recovery in simulated histories, each replayable by its number: SEEDS=10000 FIRST=0.
	@$(BIN)/python -m tests.faults.simulation $(if $(SEEDS),--seeds $(SEEDS)) $(if $(FIRST),--first $(FIRST))

.PHONY: seeded-bugs
seeded-bugs: set-up ## Bugs that tests must catch, one after the other: BUGS="poison joins".
	@$(BIN)/python -m tests.faults.seeded_bugs $(if $(BUGS),--bugs $(BUGS))

soak: set-up ## A mesh under load with a fault every 30 s, every answer checked: SECONDS=1800 EVERY=30.
	@$(BIN)/python -m tests.faults.soak $(if $(SECONDS),--seconds $(SECONDS)) $(if $(EVERY),--every $(EVERY))

.PHONY: check-parallel
check-parallel: set-up ## Grids of ranks on the CPU against one process: families, formats, whole experts, lost ranks: ARGS="formats --only int4".
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.parallel.check $(ARGS)

bench-cpu: set-up ## The demo model through the door, beside transformers on the same processor.
	@$(BIN)/python -m bench.mesh.cpu

.PHONY: bench-embed
bench-embed: set-up ## Embeddings of MiniLM's shape through the door, beside ONNX Runtime; GPU=1: encoders beside the GPU's matrix rate.
	@$(if $(GPU),$(GPU_PYTHON) -m bench.engine.encoders $(ARGS),$(BIN)/python -m bench.mesh.embed)

bench-links: set-up ## Links, gateway, admission and planning, measured without a model, each beside its goal.
	@$(BIN)/python -m bench.links.measure

bench-open: set-up ## Constant rates and overload of short requests, and 5,000 streams, through the one public port: ARGS="--rows grpc@1000 grpc@x4 --cores 16".
	@$(BIN)/python -m bench.mesh.open_loop $(ARGS)

bench-overload: set-up ## Ten times the load for 60 s: goodput, refusals and recovery, paced and demo model: ARGS="--out overload.html".
	@$(BIN)/python -m bench.mesh.overload $(ARGS)

bench-turns: $(if $(GPU),,set-up) ## This checkout and another one in turns, each with a mesh of its own: BEFORE=folder ARGS="--rows 128/128@16x64" GPU_PYTHON=python with GPU=1.
	@test -n '$(BEFORE)' || { echo 'make bench-turns needs BEFORE=folder of another checkout'; exit 2; }
	@$(if $(GPU),$(GPU_PYTHON),$(BIN)/python) -m bench.mesh.turns '$(BEFORE)' $(ARGS)

bench-smg: set-up ## Server-sent events beside those of the gateway smg, before the same paced worker: SMG=program.
	@test -n '$(SMG)' || { $(PYTHON) -m venv .clients/bench-smg && .clients/bench-smg/bin/pip install -qq smg==1.13.0; }
	@$(BIN)/python -m bench.links.beside_smg --smg '$(or $(SMG),.clients/bench-smg/bin/smg)'

bench-tracing: set-up ## What tracing costs: none, 1%, 100%, and a collector that does not answer.
	@$(BIN)/python -m bench.mesh.tracing

train-demo: set-up ## Train the demo models on a folder of text: CORPUS=folder.
	@test -n '$(CORPUS)' || { echo 'make train-demo needs CORPUS=folder'; exit 2; }
	@$(PIP) -e '.[train]'
	@$(BIN)/python -m models.train --corpus '$(CORPUS)' --out models

demo-family: set-up ## The demo model quantized, pruned, distilled, and proved, in one table: FAMILY=folder CORPUS=folder.
	@$(BIN)/python -m models.family --out '$(FAMILY)' $(if $(CORPUS),--text '$(CORPUS)')

fuzz: set-up ## Every RPC and HTTP route of a mesh with random and damaged messages: CASES=100000 SEED=1.
	@$(BIN)/python -m tests.fuzz $(if $(CASES),--cases $(CASES)) $(if $(SEED),--seed $(SEED))
	@$(BIN)/python -c 'import atheris' 2>/dev/null && $(BIN)/python -m tests.fuzz.decoders -runs=$(or $(CASES),100000) || echo 'atheris is not installed: decoders were fuzzed without coverage'

certs: set-up ## Certificates and a mesh secret for development: CERTS=folder PUBLIC="names of the gateway".
	@$(BIN)/python -m services.security.certificates --out '$(CERTS)' $(if $(PUBLIC),--public $(PUBLIC))

clean: ## Remove what was generated; keep .weft, where the data of the embedded Redis lives.
	rm -rf $(VENV) .clients build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py protos/*_pb2_grpc.pyi

$(MADE):
	$(call say,virtual environment in $(VENV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Weft needs Python 3.11 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip  # That of Python 3.11 takes twice as long to choose versions.
	@touch $@

# Torch is installed first, so that pip takes the build from the index that this machine is configured for.
$(TORCHED): $(MADE)
	$(call say,$(TORCH) (the largest download))
	@$(PIP) '$(TORCH)'
	@touch $@

$(SET_UP): $(TORCHED) pyproject.toml
	$(call say,Weft and its dependencies)
	@$(COMPILE) $(SITE)/torch & $(PIP) -e '.[$(EXTRAS)]' && wait
	@$(COMPILE) -j 0 $(SITE) || true
	@touch $@

$(STUBS): $(SET_UP) $(PROTOS)
	$(call say,stubs of $(PROTOS))
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. \
		--python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=. $(PROTOS) > $(VENV)/protoc.log 2>&1 \
		|| { cat $(VENV)/protoc.log; exit 1; }
	@touch $@
