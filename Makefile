# SPDX-License-Identifier: Apache-2.0
# Every target sets itself up: it needs make, bash and python3 with venv, and makes its own environments in .venv-*/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-tritons lint docs bench fuzz crash dist release clean check-python

PYTHON ?= python3
# Besides the release in constraints.txt, the two ends of what we support.
TRITONS ?= 3.6.0 3.9.0
# More arguments for the program behind a target: make test ARGS="-k digest"
ARGS ?=
# How many tests run at a time.
WORKERS ?= 2

# Without byte code on disk every program that a test starts would compile all modules again.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

TORCH_CPU := 2.13.0+cpu
TORCH := 2.13.0
PINS := pyproject.toml constraints.txt
# A file that was removed changes only the list. Directories say nothing: Python puts its byte code there.
LIST_SOURCES := find -L bundler -type f ! -name '*.pyc' ! -name '*.so' | sort
$(shell mkdir -p .build && $(LIST_SOURCES) | cmp -s - .build/sources || $(LIST_SOURCES) >.build/sources)
SOURCES := .build/sources $(shell $(LIST_SOURCES)) $(wildcard README.md LICENSE setup.py)
# Asked of the shell, since make would remember what the folder held before the wheel was built.
WHEEL = $$(ls .build/wheel/*.whl)
# Twice quiet: errors only.
PIP = -m pip --disable-pip-version-check -qq install

help: ## say what the targets do
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

demo: .venv-demo/.ready ## compile real kernels, bundle them, restore them elsewhere, recompile none; then a report to open
	.venv-demo/bin/triton-bundler demo --report .build/demo-report.html $(ARGS)

test: test-quick ## build the wheel, install it in a new environment, test it there

test-tritons: ## what a new release of Triton breaks first, on the oldest and newest
	$(call on-each-triton,release)

test-slow: .venv-test/.ready ## the tests that take long: benchmarks, simulator, crash sample, torch, type checkers, fuzzing
	$(call run-tests,slow,--holding slow)
	$(call on-each-triton,later)

.PHONY: test-quick
test-quick: .venv-test/.ready
	$(call run-tests,not slow)

# -P keeps the checkout off the import path: what is tested is the wheel that was built and installed.
pytest = BUNDLER_TEST_INSTALLED=1 $(1)/bin/python -P -m pytest
# $(call run-tests,MARKS,WHERE): first, side by side, what can bear that; then, one by one, what looks at a clock. Status 5 is "no test
# selected": one of the two parts may well be empty, but not both. Only files that name the mark are imported, where there is one.
define run-tests
@ran=; \
$(call pytest,.venv-test) -m "($(1)) and not serial" $(2) -n $(WORKERS) --dist loadfile $(ARGS) && ran=1 || [[ $$? == 5 ]]; \
$(call pytest,.venv-test) -m "($(1)) and serial" --holding serial $(ARGS) && ran=1 || [[ $$? == 5 ]]; \
[[ -n $$ran ]] || { echo "make: $@ finds no test; is it one of test, or of test-slow?" >&2; exit 1; }
endef

# $(call on-each-triton,PART): one process for each release, side by side. Only ARGS such as -k may leave nothing to run there.
or-none = || [[ $$? == $(if $(ARGS),5,never) ]]
on-each-triton = $(if $(TRITONS),@$(MAKE) --no-print-directory --jobs=$(WORKERS) --output-sync=target $(TRITONS:%=$(1)-triton-%))

.PHONY: $(TRITONS:%=release-triton-%) $(TRITONS:%=later-triton-%)
$(TRITONS:%=release-triton-%): release-triton-%: .venv-triton-%/.ready
	@$(call pytest,.venv-triton-$*) -m "release and not slow" --holding release $(ARGS) $(or-none)
$(TRITONS:%=later-triton-%): later-triton-%: .venv-triton-%/.ready
	@$(call pytest,.venv-triton-$*) -m "toolchain and (slow or not release)" --holding toolchain $(ARGS) $(or-none)

lint: .venv-lint/.ready ## ruff, mypy --strict and the import contracts
	.venv-lint/bin/ruff check
	.venv-lint/bin/ruff format --check
	.venv-lint/bin/mypy
	.venv-lint/bin/mypy bundler/toolchain/recording/stand_in/bundler.py
	.venv-lint/bin/lint-imports

docs: .venv-docs/.ready ## build the documentation as a site, .build/site/index.html, and check its links
	@.venv-docs/bin/python -m tools.docs_site
	@echo "make: the documentation is in .build/site/index.html"

# What is measured and attacked is the wheel with its extensions, as users have it. Only the tools come from the checkout, through a link: the
# package that lies there has no extensions, and would go before the wheel's.
tool = mkdir -p .build/path && ln -sfn ../../tools .build/path/tools && PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/.build/path .venv-test/bin/python -m
# make bench PROGRAM=scale, make fuzz PROGRAM=redis: another program of the same package.
PROGRAM ?=

bench: .venv-test/.ready ## measure; ARGS go to the benchmark
	$(tool) tools.bench $(or $(PROGRAM),bundle) $(ARGS)

fuzz: .venv-test/.ready ## feed damaged bundles to the reader; ARGS go to the fuzzer
	$(tool) tools.fuzz $(or $(PROGRAM),bundle) $(ARGS)

crash: .venv-test/.ready ## stop every operation at every file-system call; needs a C compiler; ARGS go to the tool
	$(tool) tools.crash $(or $(PROGRAM),matrix) $(ARGS)

dist: .venv-dist/.ready ## wheels and source distribution of the commit, built, checked, installed on each Python and used there
	.venv-dist/bin/python -m tools.wheels texts
	.venv-dist/bin/python -m tools.wheels release dist --once $(ARGS)
	.venv-dist/bin/python -m tools.wheels trial dist $(ARGS)

# make release KEY=release.key signs the digests; DRY_RUN=1 only says what the commit, or a text, lacks; GATE= leaves the gate out, when it
# passed for this commit. The first line that fails ends it.
KEY ?=
DRY_RUN ?=
GATE ?= .ci/run
VERSION = $(shell sed -n 's/^VERSION = "\(.*\)"$$/\1/p' bundler/project.py)
asked = $(if $(DRY_RUN),-)
needs-minisign = command -v minisign >/dev/null || { echo "make: KEY needs minisign, which is not installed" >&2; exit 1; }

release: .venv-dist/.ready ## all of a release but the upload, which it names; DRY_RUN=1 goes on without a tag
	$(if $(KEY),@$(needs-minisign))
	$(asked)@git tag --points-at HEAD | grep -qx "v$(VERSION)" || { echo "make: the commit has not the tag v$(VERSION)" >&2; exit 1; }
	$(asked)@test -z "$$(git status --porcelain)" || { \
	  echo "make: there are changes that are not committed, so they would not be in the release" >&2; exit 1; }
	$(asked).venv-dist/bin/python -m tools.wheels texts --tag "v$(VERSION)"
	$(GATE)
	.venv-dist/bin/python -m tools.wheels release dist
	.venv-dist/bin/python -m tools.wheels trial dist
	cd dist && sha256sum --check --quiet SHA256SUMS
	$(if $(KEY),minisign -S -s $(KEY) -m dist/SHA256SUMS,@echo "make: nothing is signed, since no KEY was given")
	@echo "make: the upload of v$(VERSION), not done: python -m twine upload" dist/*.whl dist/*.tar.gz

clean: ## remove everything that make made
	rm -rf .venv-build .venv-demo .venv-dist .venv-docs .venv-test .venv-lint .venv-triton-* .build build dist triton_bundler.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .cache

# -------------------------------------------------------------------------------------------------------- environments

check-python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: $(PYTHON) is missing; install Python 3.11 or newer, e.g. apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $$($(PYTHON) --version) is too old; install Python 3.11 or newer and say which: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments; install its venv module, e.g. apt-get install python3-venv" >&2; exit 1; }

# $(call new-venv,DIRECTORY)
new-venv = rm -rf $(1) && $(PYTHON) -m venv $(1)

.venv-build/.ready: $(PINS) | check-python
	@echo "make: preparing to build the wheel"
	@$(call new-venv,.venv-build)
	@.venv-build/bin/python $(PIP) -c constraints.txt build setuptools
	@touch $@

# setuptools leaves build/ behind, and would put what lies there into the next wheel.
.build/wheel.ready: .venv-build/.ready $(SOURCES)
	@echo "make: building the wheel"
	@rm -rf build .build/wheel && mkdir -p .build
	@.venv-build/bin/python -m build --wheel --no-isolation --outdir .build/wheel . >.build/wheel.log 2>&1 || { cat .build/wheel.log >&2; exit 1; }
	@rm -rf build triton_bundler.egg-info
	@touch $@

# Two stamps an environment: the slow one for its packages, which only the pins renew, the quick one for our wheel.
install-wheel = $(1)/bin/python $(PIP) --force-reinstall --no-deps $(WHEEL)

.venv-demo/.packages: $(PINS) | .build/wheel.ready
	@echo "make: installing triton for the demo"
	@$(call new-venv,.venv-demo)
	@.venv-demo/bin/python $(PIP) -c constraints.txt "$(WHEEL)[triton]"
	@touch $@

.venv-test/.packages: $(PINS) | .build/wheel.ready
	@echo "make: installing what the tests need"
	@$(call new-venv,.venv-test)
	@.venv-test/bin/python $(PIP) -c constraints.txt "$(WHEEL)[triton,cli,redis,test]"
	@.venv-test/bin/python $(PIP) -c constraints.txt torch==$(TORCH_CPU) 2>.build/torch.log || { \
	  echo "make: notice: torch $(TORCH_CPU) is not to be had here, so the large torch $(TORCH) is installed (CONTRIBUTING.md says how to avoid it)"; \
	  .venv-test/bin/python $(PIP) -c constraints.txt torch==$(TORCH); }
	@touch $@

.venv-triton-%/.packages: $(PINS) | .build/wheel.ready
	@echo "make: installing Triton $*"
	@$(call new-venv,.venv-triton-$*)
	@sed 's/^triton==.*/triton==$*/' constraints.txt >.build/constraints-$*.txt
	@.venv-triton-$*/bin/python $(PIP) -c .build/constraints-$*.txt "$(WHEEL)[triton,cli,redis,test]"
	@touch $@

%/.ready: %/.packages .build/wheel.ready
	@$(call install-wheel,$*)
	@touch $@

# Pins of their own, since a program here needs an older jsonschema than the tests do.
.venv-dist/.ready: tools/wheels/requirements.txt | check-python
	@echo "make: installing a compiler for wheels, and what checks them"
	@$(call new-venv,.venv-dist)
	@.venv-dist/bin/python $(PIP) -r tools/wheels/requirements.txt
	@touch $@

# The tools read the checkout itself; an installed copy would only stand in their way.
.venv-lint/.ready: $(PINS) | .build/wheel.ready
	@echo "make: installing ruff, mypy and import-linter"
	@$(call new-venv,.venv-lint)
	@.venv-lint/bin/python $(PIP) -c constraints.txt "$(WHEEL)[dev]"
	@.venv-lint/bin/python -m pip --disable-pip-version-check -qq uninstall --yes triton-bundler
	@touch $@

# The reference is read from the sources, so neither our wheel nor what it needs is installed; ruff wraps the signatures in it.
.venv-docs/.ready: $(PINS) | check-python
	@echo "make: installing zensical"
	@$(call new-venv,.venv-docs)
	@.venv-docs/bin/python $(PIP) -c constraints.txt zensical 'mkdocstrings[python]' ruff
	@touch $@

# make would remove a stamp that only pattern rules mention.
.PRECIOUS: .venv-triton-%/.packages
