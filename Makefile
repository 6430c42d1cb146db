# Targets for people; the work is in images/, patches/, qualify/ and tests/. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# One cache for wheels, base and test tools, in the home of whoever calls: sudo does not move it.
HORIZON_CACHE ?= $(shell getent passwd "$${SUDO_USER:-$$(id -un)}" | cut -d: -f6)/.cache/horizon-images
export HORIZON_CACHE
export STRICT BASE_IMAGE DOCKER
export PYTHONDONTWRITEBYTECODE := 1

TOOLS = $$(tests/tools.sh "$(HORIZON_CACHE)")
# Where an artifact is optional, all of them.
ARTIFACTS = $(or $(ARTIFACT),$(basename $(notdir $(wildcard recipes/*.toml))))

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-28s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARTIFACT=$$(ls recipes/*.toml | xargs -n1 basename -s .toml | paste -sd '|')"
	@echo "  HORIZON_CACHE=$(HORIZON_CACHE)   wheels, base and test tools"
	@echo "  STRICT=1   refuse a Debian base that differs from images/base.lock"
	@echo "  BASE_IMAGE=name@sha256:...   another base image in its place"

.PHONY: image
image: ## build, check in the container and tag :candidate (ARTIFACT=...)
	@[ -n "$(ARTIFACT)" ] || { echo "rejected: say which image, for example make image ARTIFACT=mova-fp8" >&2; exit 1; }
	@images/host.sh >/dev/null
	@python3 images/build.py "$(ARTIFACT)" --cache "$(HORIZON_CACHE)"

.PHONY: test
test: host lint unit series ## every test: lint, host, patch series, then build all images and test inside them
	@for artifact in $(ARTIFACTS); do python3 images/build.py $$artifact --cache "$(HORIZON_CACHE)"; done
	@for artifact in $(ARTIFACTS); do tests/in_container.sh $$artifact; done
	@tools=$(TOOLS); $$tools/bin/pytest -q tests/image

.PHONY: host
host: ## install what is missing here and start the container engine (root on Debian or Ubuntu)
	@images/host.sh >/dev/null

.PHONY: lint
lint: ## shellcheck, hadolint, ruff
	@tools=$(TOOLS); \
	$$tools/bin/shellcheck .ci/run $$(find images patches qualify recipes tests -name '*.sh'); \
	$$tools/bin/hadolint images/Dockerfile; \
	$$tools/bin/ruff check --quiet .; \
	$$tools/bin/ruff format --check --quiet .; \
	echo "lint: clean"

.PHONY: format
format: ## let ruff sort imports and lay out the Python files
	@tools=$(TOOLS); $$tools/bin/ruff check --quiet --select I --fix .; $$tools/bin/ruff format --quiet .

.PHONY: unit
unit: ## the tests that need neither container nor torch
	@tools=$(TOOLS); $$tools/bin/pytest -q tests/unit

.PHONY: series
series: ## the patch series against the locked engine wheel
	@python3 images/wheels.py fetch --cache "$(HORIZON_CACHE)" --only sglang
	@python3 -B patches/series.py check --wheel "$(HORIZON_CACHE)"/wheels/sglang-*.whl

.PHONY: reproduce
reproduce: host ## build twice without cache and compare layer digests (ARTIFACT=...)
	@python3 images/reproduce.py "$(or $(ARTIFACT),mova-fp8)" --cache "$(HORIZON_CACHE)"

.PHONY: lock
lock: ## resolve images/engine.in, the Debian base and the test tools again
	@tools=$(TOOLS); PATH="$$tools/bin:$$PATH" $$tools/bin/python images/wheels.py lock
	@python3 images/base.py lock --cache "$(HORIZON_CACHE)"
	@tests/lock.sh $(TOOLS)
