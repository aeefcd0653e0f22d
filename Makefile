# Everything a newcomer types. `make serve` installs the server, the other targets what development needs besides; nothing
# else has to be installed first.
PYTHON   ?= python3
# For every pip install: an index, or --find-links with a folder.
PIP_ARGS ?=
# Where torch comes from: cpu (PyTorch's CPU wheels), pypi (for Linux with CUDA), or auto: cpu on Linux without an NVIDIA
# driver, unless pip's settings or PIP_ARGS say where to look.
TORCH    ?= auto
VENV     := .venv
BIN      := $(VENV)/bin
CORE     := $(VENV)/.core
ALL      := $(VENV)/.installed
INSTALL   = $(PYTHON) scripts/install.py --venv $(VENV) --torch $(TORCH)

# What Python compiles is kept: torch and transformers take seven seconds to compile, and the tests start many processes.
# Many containers set a variable that forbids it.
unexport PYTHONDONTWRITEBYTECODE

RIGHT_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "longreach needs Python 3.11 or later; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help install serve test quick dearest test-gpu test-training families faults clients loadtest soak check format lock docs docker-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(ALL) ## make the virtual environment .venv from the lock file, with what development needs

$(CORE): pyproject.toml requirements.lock
	$(RIGHT_PYTHON)
	@$(INSTALL) server -- $(PIP_ARGS)
	@touch $@

# All at once: pip sees to it that everything fits together a single time.
$(ALL): pyproject.toml requirements.lock
	$(RIGHT_PYTHON)
	@$(INSTALL) development -- $(PIP_ARGS)
	@touch $(CORE) $@

serve: $(CORE) ## start the server on 127.0.0.1:8000 with the embedded model
	$(BIN)/longreach serve

# Side by side a worker has one thread: with more they wait for each other. JUnit files, with the processor seconds of each
# test, and processor seconds by file are kept in $(RESULTS).
WORKERS     ?= 2
GPU_WORKERS ?= 8
RESULTS     := build/test-results
PYTEST      := $(BIN)/python -m pytest --durations 50 --durations-min 1
BESIDE      := -n $(WORKERS)

test: quick ## run all tests that need no GPU: the unit tests, then those of kernels beside the others, of which some run alone
	@$(MAKE) --no-print-directory test-more

# Engines and servers often wait, and the tests that run alone leave a core idle. The tests of kernels only compute, and
# fill that time: being nicer, they take a tenth of a core that another test wants. Their output is shown at their end.
.PHONY: test-more test-kernels test-system
test-more: install
	@$(MAKE) --no-print-directory --jobs 2 test-system test-kernels

test-system: install
	OMP_NUM_THREADS=1 $(PYTEST) -m "system and not serial and not gpu" $(BESIDE) --junitxml $(RESULTS)/side-by-side.xml
	$(PYTEST) -m "serial and not gpu" --junitxml $(RESULTS)/serial.xml

test-kernels: install
	@mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 nice -n 10 $(PYTEST) -m "kernel and not serial and not gpu" $(BESIDE) \
	  --junitxml $(RESULTS)/kernel.xml >$(RESULTS)/kernel.log 2>&1; status=$$?; cat $(RESULTS)/kernel.log; exit $$status

quick: install ## run the unit tests, which take a minute
	OMP_NUM_THREADS=1 $(PYTEST) -m unit $(BESIDE) --junitxml $(RESULTS)/unit.xml

dearest: ## list the twenty test files that cost most processor seconds in the last runs
	@sort --reverse --numeric-sort $(RESULTS)/*.seconds | head -20

test-gpu: install ## run the tests that need a GPU, on one GPU; kernels compile on all cores
	$(PYTEST) -m gpu -n $(GPU_WORKERS) --junitxml $(RESULTS)/gpu.xml

families: install ## compare every model family with transformers' eager attention
	LONGREACH_TEST_FULL=1 OMP_NUM_THREADS=1 $(PYTEST) $(BESIDE) tests/patches/families

faults: install ## plant faults into copies of the tree, and see that the tests catch each of them
	$(BIN)/python -m tests.planted_faults

# Which of them: make clients CLIENTS="codex claude-code".
CLIENTS ?=

clients: install ## run real clients against the server, in environments of their own (npm, and 7 GB from PyPI and npm); writes docs/clients.md
	$(BIN)/python -m tests.clients $(CLIENTS)

test-training: install ## run the tests of the embedded model's training (minutes; `make test` has a short one)
	$(BIN)/python -m pytest training/tests

# Another server than the embedded model's: make loadtest URL=http://127.0.0.1:8000 (OPENAI_API_KEY is its key).
URL       ?=
OUT       ?= loadtest
LOAD_HERE := --lengths 1k,2k,4k,8k,16k --concurrency 1,2 --repeats 5 --seconds 15 --max-tokens 32 --recall 5 \
             --rates 0.1,0.3 --arrivals 12 --arrival-lengths 1k,2k,4k
LOAD_URL  := --lengths 1k,4k,16k,64k,128k,256k,512k,1M --concurrency 1,4 --rates 0.5,2 --arrival-lengths 1k,4k,16k,64k
LOAD      ?= $(if $(URL),$(LOAD_URL),$(LOAD_HERE))

loadtest: install ## measure latency and goodput by context length; writes loadtest.md, .png and .json
	$(BIN)/longreach bench load $(URL) $(LOAD) --out $(OUT)

soak: install ## load the server for half an hour and three nodes for ten minutes, drive it through 5,000 requests of every kind, and the engine through 2,500 histories
	$(BIN)/python -m tests.server.load.soak --out benchmarks/results/soak/two-cores.json
	$(BIN)/python -m tests.server.load.hosts --out benchmarks/results/soak/three-nodes.json
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --timeout 0 tests/server/engine/test_histories.py
	LONGREACH_SCHEMA_CASES=170 LONGREACH_SCHEMA_RESULT=benchmarks/results/soak/schema.json $(BIN)/python -m pytest -n0 --timeout 0 tests/server/api/test_openapi.py

check: install ## lint, formatting, spelling, file sizes, types, the import layers, and tables against results
	$(MAKE) --no-print-directory --jobs 2 check-types check-rest

.PHONY: check-types check-rest
# What pyright knows of torch and transformers takes 3.3 GB. Near the limit, which Node sets at 2.4, it takes five times as long.
check-types: install
	NODE_OPTIONS=--max-old-space-size=6144 $(BIN)/pyright

check-rest: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/python scripts/large_files.py
	$(BIN)/python scripts/hard_sentences.py
	$(BIN)/lint-imports
	$(BIN)/python docs/api_tables.py --check
	$(BIN)/python docs/policy_tables.py --check
	$(BIN)/python docs/call_tables.py --check
	$(BIN)/python docs/model_tables.py --check
	$(BIN)/python docs/window_tables.py --check
	$(BIN)/python docs/state_tables.py --check
	$(BIN)/python docs/settings_tables.py --check
	$(BIN)/python docs/command_tables.py --check
	$(BIN)/python docs/disk_tables.py --check
	$(BIN)/python docs/metrics_tables.py --check
	$(BIN)/python docs/error_tables.py --check
	$(BIN)/python docs/adr_index.py --check
	$(BIN)/python docs/client_tables.py --check
	$(BIN)/python -m benchmarks.report --check benchmarks/results/*.json

format: install ## put the code into its one format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: ## resolve the dependencies anew (torch and its triton stay as named here) and write requirements.lock
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install --quiet torch==2.13.0 triton==3.7.1 -e '.[dev]'
	{ grep '^#' requirements.lock; .lock-venv/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > .lock-new
	mv .lock-new requirements.lock && rm -rf .lock-venv

docs: install ## build the documentation into site/
	$(BIN)/python docs/site.py site

docker-check: install ## lint and validate what is deployed, build the CPU image with buildah and run it
	docker/check

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
