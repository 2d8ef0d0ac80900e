# Every target does its own set-up in .venv; nothing else needs to be installed than Python 3.11+ with venv, git and make.
PYTHON ?= python3
BIN := .venv/bin
# A plain path entry: the default editable install loses to a folder named foremoe, which is what a clone is, in the folder above it.
EDITABLE := --config-settings editable_mode=compat
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

# Where a shell forbids byte code, every process that tests start would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types unit test-heavy test-oldest test-triton test-transformers dist audit test-megatron test-megatron-newest test-verl smoke-verl resolve fuzz engine-answers nightly results bench docs pictures clean

demo: .venv/.test
	$(BIN)/python -m examples.grpo --ranks 2 --pages build/demo

# Types and tests at once: mypy takes one core, and tests leave cores idle where ranks wait for each other.
test: lint
	@$(MAKE) --no-print-directory -j 2 types unit

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python -m tests.prose

types: .venv/.test
	$(BIN)/mypy

# Files side by side, one on every core up to four, in the order of tests/conftest.py; skips are named at the end (-rs).
# `pytest` alone runs one after the other, and the heavy stages too if they can.
TIMED = CPU_TIMES=$${CPU_TIMES:-1} HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci}
SIDE_BY_SIDE = $(TIMED) $(BIN)/python -m pytest -rs -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
	--ignore tests/megatron --ignore tests/verl
# Ranks wait for each other, so that two files at once keep two cores busy.
TWO_FILES = -rs -n 2 --dist loadfile --no-loadscope-reorder

# Compiled first, or each process would compile the same.
unit: .venv/.test
	@$(BIN)/python -m foremoe warm-up
	$(SIDE_BY_SIDE) -m "not heavy"

# Heavy stage: core tests that take over 10 CPU seconds each.
test-heavy: .venv/.test
	@$(BIN)/python -m foremoe warm-up
	$(SIDE_BY_SIDE) -m heavy

# Core tests on the lowest versions that pyproject.toml allows, without torch, in an environment of their own.
test-oldest:
	@$(PYTHON) tests/packages/oldest.py

# sdist and wheel in dist/; the wheel has planned, checked and reported in a fresh environment.
dist:
	@$(PYTHON) tests/packages/wheels.py

# Known vulnerabilities of what .venv holds. One line says so where the service that knows them cannot be reached.
audit: .venv/.test
	@$(BIN)/python tests/packages/audit.py

# Triton's kernels by its interpreter and its compiler, without a GPU; faults planted in them, too. A gigabyte, in a folder that no
# other stage sees.
test-triton: .venv/.triton
	@if [ -e .venv/.triton ]; then PYTHONPATH=.venv/triton $(BIN)/python -m pytest -rs tests/runtime/test_fused.py \
		tests/runtime/test_activation.py tests/transfer/test_planted_faults.py::test_every_fault_in_a_kernel_is_caught; fi

# Models that transformers builds, and parquet files: their sizes, their routing, and what is read. Seconds, once it is installed.
test-transformers: .venv-transformers/.done
	@if [ -e .venv-transformers/.done ]; then HF_HUB_OFFLINE=1 $(TIMED) .venv-transformers/bin/python -m pytest -rs \
		tests/integrations/test_transformers.py tests/machine/test_hf_config.py tests/workload/test_recordings.py; fi

# Heavy stage: the real package, on CPU. One line says so where it cannot be installed.
test-megatron: .venv/.megatron
	@if [ -e .venv/.megatron ]; then $(BIN)/python -m foremoe warm-up && RAN_BY="make $@" $(TIMED) $(BIN)/python -m pytest $(TWO_FILES) tests/megatron; fi

# The same on the newest Megatron-Core, which needs triton: an environment of its own, a minute to install. Not in CI, for its time;
# every night. `RAN=FILE` writes what ran to a file, here as above.
test-megatron-newest: .venv-megatron-newest/.done
	@if [ -e .venv-megatron-newest/.done ]; then .venv-megatron-newest/bin/python -m foremoe warm-up \
		&& RAN_BY="make $@" $(TIMED) .venv-megatron-newest/bin/python -m pytest $(TWO_FILES) tests/megatron; fi

# veRL pins many packages of its own, so it gets an environment of its own; kept from one run to the next.
test-verl: .venv-verl/.verl
	@if [ -e .venv-verl/.verl ]; then .venv-verl/bin/python -m foremoe warm-up && $(TIMED) .venv-verl/bin/python -m pytest $(TWO_FILES) tests/verl; fi

# veRL's own engine on two CPU ranks, with foremoe and without; prints a table.
smoke-verl: .venv-verl/.verl
	@if [ -e .venv-verl/.verl ]; then .venv-verl/bin/python -W ignore examples/verl_cpu_smoke.py; fi

# Options of trainers' recipes once more, from the checkouts that FOREMOE_VERL, FOREMOE_SLIME, FOREMOE_NEMO_RL and FOREMOE_SKYRL name;
# fails where they are not those of tests/megatron/recipes.json. Needs hydra, which veRL brings.
resolve: .venv-verl/.verl
	@if [ -e .venv-verl/.verl ]; then .venv-verl/bin/python tests/megatron/resolve.py $(RESOLVE); fi

# Some minutes on all cores; not in CI, which tries a few of both.
fuzz: .venv/.test
	$(BIN)/python -m tests.fuzz --inputs $${INPUTS:-1000000} --jobs $$(nproc)
	PYTHONPATH=.:tests:tests/transfer $(BIN)/python -m mutated_runs --cases $${CASES:-2000}

# Answers that the protocol classes of vLLM and SGLang write, from wheels of 400 MB, read by foremoe.
engine-answers: .venv-transformers/.done
	@if [ -e .venv-transformers/.done ]; then PYTHONPATH=. .venv-transformers/bin/python tests/routing/engine_answers.py; fi

# Every night: 40 times the examples of `make test` for all property tests and all layouts for all laws, hours on few cores.
nightly: fuzz engine-answers
	HYPOTHESIS_PROFILE=nightly $(MAKE) --no-print-directory unit test-heavy test-megatron
	$(MAKE) --no-print-directory test-megatron-newest

# Tables in bench/results/ that are older than the code they measure; goes on where it was interrupted. `--list` shows which.
results: .venv/.test
	$(BIN)/python -m bench.results

# The table of strategies alone.
bench: .venv/.test
	$(BIN)/python -m bench.results strategies

# The site, at docs/_build/index.html; a warning is an error, and every page is read anew, as a cached one gives no warnings. It reads docstrings, so it needs what the library needs, torch too.
docs: .venv/.docs
	@if [ -e .venv/.docs ]; then echo "docs: building" && $(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet \
		--fresh-env --jobs auto docs docs/_build && echo "docs: see docs/_build/index.html"; fi

# Pictures of the README and the site, kept in git: from the committed result tables. docs/_static/report.png shows the report of the
# command in docs/index.md: chromium --headless --hide-scrollbars --window-size=1200,1272 --screenshot=report.png report.html
pictures: .venv/.docs
	@if [ -e .venv/.docs ]; then $(BIN)/python -m bench.pictures; fi

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.test: pyproject.toml | .venv/bin/python
	@echo "setting up .venv with torch for CPUs (a minute or more)"
	@$(PIP) $(EDITABLE) -e '.[test]'
	@touch $@

.venv/.megatron: pyproject.toml | .venv/bin/python
	@rm -f $@
	@if $(PIP) $(EDITABLE) -e '.[test-megatron]'; then touch $@ .venv/.test; \
		else echo "test-megatron: skipped, megatron-core cannot be installed here"; fi

.venv/.triton: Makefile | .venv/.test
	@rm -f $@
	@if $(PIP) --no-deps --no-compile --upgrade --target .venv/triton triton==3.9.0; then touch $@; \
		else echo "test-triton: skipped, triton cannot be installed here"; fi

# An environment that also sees what .venv has, so that torch is not installed twice.
.venv-transformers/.done: Makefile | .venv/.test
	@test -e .venv-transformers/bin/python || $(PYTHON) -m venv .venv-transformers
	@rm -f $@
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$(.venv-transformers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/also.pth
	@if .venv-transformers/bin/python -m pip install --disable-pip-version-check --quiet transformers==5.24.0 pyarrow==26.0.1; then touch $@; \
		else echo "test-transformers: skipped, transformers cannot be installed here"; fi

.venv/.docs: pyproject.toml | .venv/bin/python
	@echo "docs: installing what the site is built with"
	@rm -f $@
	@if $(PIP) $(EDITABLE) -e '.[docs]'; then touch $@ .venv/.test; else echo "docs: skipped, Sphinx cannot be installed here"; fi

# Its wheels for Python 3.11 say that they need 3.12, and work.
.venv-megatron-newest/.done: pyproject.toml
	@test -e .venv-megatron-newest/bin/python || $(PYTHON) -m venv .venv-megatron-newest
	@rm -f $@
	@if .venv-megatron-newest/bin/python -m pip install --disable-pip-version-check --quiet --ignore-requires-python --prefer-binary \
		$(EDITABLE) -e '.[test-megatron-newest]'; then touch $@; \
		else echo "test-megatron-newest: skipped, this megatron-core cannot be installed here"; fi

.venv-verl/.verl: pyproject.toml
	@test -e .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	@rm -f $@
	@if .venv-verl/bin/python -m pip install --disable-pip-version-check --quiet $(EDITABLE) -e '.[test-verl]'; then touch $@; \
		else echo "test-verl: skipped, verl cannot be installed here"; fi

clean:
	rm -rf .venv .venv-verl .venv-megatron-newest .venv-transformers .venv-oldest .venv-dist .venv-audit dist docs/_build docs/_reference
