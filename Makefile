# make demo    text in, text out: a whole deployment, for as long as it takes to answer some prompts
# make test    all tests, those in C too
# make docs    the code on the pages, their links, their tables
# make lint    formatters, linters, types, layers, the repository's own rules
# make bench   the benchmarks, a short form: two minutes; the peers of the package index that install
# make clean   everything back to the checkout; downloads in .cache/ stay
#
# Needs Linux, Python 3.10 or newer with its headers (PYTHON=python3.12 chooses one), a C compiler and
# make. Everything else goes into .venv. Arguments: PYTEST_ARGS="tests/unit -k ring", DEMO_NAME=other.
#
# The package is installed editable. `python -m manager` in this folder imports this folder's files
# whatever else is installed, and they are of no use without their compiled modules beside them;
# editable, the tree and the installed package are one. That a wheel holds everything and runs on its
# own is checked by tests/packaging and by .ci/run, which installs it elsewhere.

PYTHON ?= python3
VENV ?= .venv
DEMO_NAME ?= demo
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VERSION),)
$(error this Python does not run: PYTHON=$(PYTHON))
endif
NATIVE := $(wildcard native/*.h native/*.py native/include/shmring/*.h native/src/*.[ch] native/python/*.[ch])
PACKAGE := pyproject.toml setup.py $(NATIVE)

.PHONY: demo test native-test docs lint bench clean
.NOTPARALLEL:

# One stamp for each set of dependencies; a newer C source or another Python makes it stale.
$(VENV)/.made-$(VERSION):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -c 'import os, sys, sysconfig; h = os.path.join(sysconfig.get_path("include"), "Python.h"); \
	  sys.exit(not os.path.exists(h) and f"Python headers are missing (Debian: python3-dev): {h}")'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

# What more installs covers less. All stamps go first: an install that is interrupted leaves none.
$(VENV)/.plain-$(VERSION): EXTRA :=
$(VENV)/.test-$(VERSION): EXTRA := [test]
$(VENV)/.test-$(VERSION): COVERED = $(VENV)/.plain-$(VERSION)
$(VENV)/.lint-$(VERSION): EXTRA := [lint,test]
$(VENV)/.lint-$(VERSION): COVERED = $(VENV)/.plain-$(VERSION) $(VENV)/.test-$(VERSION)
$(VENV)/.bench-$(VERSION): EXTRA := [bench]
$(VENV)/.bench-$(VERSION): COVERED = $(VENV)/.plain-$(VERSION)
$(VENV)/.plain-$(VERSION) $(VENV)/.test-$(VERSION) $(VENV)/.lint-$(VERSION) $(VENV)/.bench-$(VERSION): $(VENV)/.made-$(VERSION) $(PACKAGE)
	rm -rf build shmring/*.so manager/*.so $(VENV)/.plain-* $(VENV)/.test-* $(VENV)/.lint-* $(VENV)/.bench-*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(EXTRA)'
	touch $(COVERED) $@

demo: $(VENV)/.plain-$(VERSION)
	@echo "--- an n-gram model goes on where the prompts end; two workers detokenize"
	$(BIN)/python -m manager generate --name $(DEMO_NAME) --workers 2 --max-new-tokens 40 --seed 1 \
	  "The school stood on a hill" "When I came to the inn" "My old servant Kiyo"
	@echo "--- an echo: every character comes back whole, in whatever pieces its bytes travel"
	$(BIN)/python -m manager generate --name $(DEMO_NAME) --workers 2 --max-new-tokens 200 --engine echo \
	  "Grüße, 世界! 안녕하세요 🌶️ 👩‍💻 — ça va? Привет, שלום, नमस्ते"

# The tests in C run with all others, not with some: PYTEST_ARGS chooses some.
test: $(VENV)/.test-$(VERSION) $(if $(PYTEST_ARGS),,native-test)
	@$(BIN)/python scripts/fetch_tokenizers.py \
	  || echo "!!! some real tokenizers are missing: the tests that need them are skipped"
	$(BIN)/pytest $(PYTEST_ARGS)

native-test:
	@if [ -x native/tests/run.sh ]; then native/tests/run.sh; \
	elif [ -f native/tests/Makefile ]; then $(MAKE) -C native/tests test; fi

docs: $(VENV)/.test-$(VERSION)
	$(BIN)/pytest -q tests/docs

lint: $(VENV)/.lint-$(VERSION)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(shell find native -name '*.[ch]' ! -name cdefs.h)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q -p no:randomly tests/tidy tests/typing

bench: $(VENV)/.bench-$(VERSION)
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info shmring/*.so manager/*.so shmring/_native.c manager/_detok.c
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
