# Everything here needs a Python of 3.11 or later with venv, and make. Each target brings its own virtual
# environment under .venv/; a stamp keeps it until pyproject.toml changes.
#
#   make demo                           land a lunar lander by forking the live simulator
#   make test                           all tests but the slow ones
#   make test PYTEST_ARGS="-k layers"   some of them
#   make test PY=3.12                   on another Python
#   make test-all                       all tests on 3.11, 3.12 and 3.13, and with the oldest dependencies

SHELL := /bin/sh
.DELETE_ON_ERROR:
.SUFFIXES:
.PRECIOUS: .venv/dev-%/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

VERSIONS := 3.11 3.12 3.13
PYTEST_ARGS ?=

# The first interpreter of version $(1) that can make virtual environments: on PATH, or kept by pyenv.
find_python = $(shell for python in python$(1) python3 python "$$(pyenv root 2>/dev/null)"/versions/$(1).*/bin/python; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' 2>/dev/null \
		&& { echo "$$python"; break; }; done)

# The version to work with: the oldest of them that is here.
ifndef PY
PY := $(firstword $(foreach version,$(VERSIONS),$(if $(call find_python,$(version)),$(version))) $(VERSIONS))
endif

# $(call make_venv,3.11) makes the environment $(@D) anew, with a pip that knows dependency groups.
define make_venv
@[ -n "$(call find_python,$(1))" ] || { \
	echo "Python $(1) with venv was not found: neither on PATH nor under pyenv" >&2; exit 1; }
@echo "installing into $(@D)"
@"$(call find_python,$(1))" -m venv --clear --upgrade-deps "$(@D)"
endef

.PHONY: help
help:
	@sed -n 's/^#   //p' Makefile

# -- demo: the package as a user would install it --------------------------------------------------------

SOURCES := $(shell find src -name '*.py')

.venv/demo/.base: pyproject.toml
	$(call make_venv,$(PY))
	@touch $@

.venv/demo/.installed: .venv/demo/.base README.md $(SOURCES)
	@.venv/demo/bin/python -m pip install -qq '.[demo]'
	@touch $@

.PHONY: demo
demo: .venv/demo/.installed
	@.venv/demo/bin/ramet demo

# -- tests -----------------------------------------------------------------------------------------------

.venv/dev-%/.installed: pyproject.toml
	$(call make_venv,$*)
	@$(@D)/bin/python -m pip install -qq --editable . --group dev
	@touch $@

.venv/lowest/.installed: pyproject.toml tests/lowest.txt
	$(call make_venv,3.11)
	@$(@D)/bin/python -m pip install -qq --editable . --group test --constraint tests/lowest.txt
	@touch $@

.PHONY: test
test: .venv/dev-$(PY)/.installed
	@$(<D)/bin/python -m pytest -m "not slow" $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(VERSIONS:%=test-all-%) test-lowest

test-all-%: .venv/dev-%/.installed
	$(<D)/bin/python -m pytest $(PYTEST_ARGS)

.PHONY: test-lowest
test-lowest: .venv/lowest/.installed
	$(<D)/bin/python -m pytest -m "not slow" $(PYTEST_ARGS)

# -- the rest --------------------------------------------------------------------------------------------

.PHONY: lint
lint: .venv/dev-$(PY)/.installed
	@status=0; \
	for tool in "ruff check --quiet ." "ruff format --check --quiet ." "mypy --no-error-summary"; do \
		$(<D)/bin/$$tool || { echo "$$tool: failed" >&2; status=1; }; \
	done; exit $$status

.PHONY: format
format: .venv/dev-$(PY)/.installed
	$(<D)/bin/ruff check --fix .
	$(<D)/bin/ruff format .

.venv/docs/.installed: pyproject.toml
	$(call make_venv,$(PY))
	@$(@D)/bin/python -m pip install -qq --group docs
	@touch $@

.PHONY: docs
docs: .venv/docs/.installed
	@NO_MKDOCS_2_WARNING=1 $(<D)/bin/mkdocs build --strict --quiet

.PHONY: bench
bench: .venv/dev-$(PY)/.installed
	@set -e; for script in bench/bench_*.py; do $(<D)/bin/python $$script; done

.PHONY: clean
clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
