# Targets for people; the work is in images/, patches/, qualify/ and tests/. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# One cache for wheels, base and test tools, in the home of whoever calls: sudo does not move it.
ifeq ($(strip $(HORIZON_CACHE)),)
override HORIZON_CACHE := $(shell getent passwd "$${SUDO_USER:-$$(id -un)}" | cut -d: -f6)/.cache/horizon-images
endif
export HORIZON_CACHE
export STRICT BASE_IMAGE DOCKER
export PYTHONDONTWRITEBYTECODE := 1

TOOLS = $$(tests/tools.sh "$(HORIZON_CACHE)")
# The artifacts that have an image; where ARTIFACT is optional, all of them.
IMAGES = $(basename $(notdir $(shell grep -l '^image = true' recipes/*.toml)))
ARTIFACTS = $(or $(ARTIFACT),$(IMAGES))

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-28s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARTIFACT=$(subst $() ,|,$(strip $(IMAGES)))"
	@echo "  HORIZON_CACHE=$(HORIZON_CACHE)   wheels, base and test tools"
	@echo "  STRICT=1   refuse a Debian base that differs from images/base.lock"
	@echo "  BASE_IMAGE=name@sha256:...   another base image in its place"

.PHONY: image
image: ## build, check in the container and tag :candidate (ARTIFACT=...)
	@[ -n "$(ARTIFACT)" ] || { echo "rejected: say which image, for example make image ARTIFACT=mova-fp8" >&2; exit 1; }
	@images/host.sh >/dev/null
	@# What sudo makes in somebody's home belongs to them.
	@for folder in "$(dir $(HORIZON_CACHE))" "$(HORIZON_CACHE)"; do \
		[ -z "$${SUDO_UID:-}" ] || [ -d "$$folder" ] || install -d -o "$$SUDO_UID" -g "$$SUDO_GID" "$$folder"; done
	@python3 images/build.py "$(ARTIFACT)" --cache "$(HORIZON_CACHE)"

.PHONY: test
test: host lint unit browser series ## every test: lint, host, report, patch series, then build all images and test them
	@for artifact in $(ARTIFACTS); do python3 images/build.py $$artifact --cache "$(HORIZON_CACHE)"; done
	@# Once, and not once an image: they share every layer but the last, which holds launcher, recipe and checks
	@# and nothing that the engine loads; tests/image compares the layers of all of them.
	@tests/in_container.sh $(firstword $(ARTIFACTS))
	@tools=$(TOOLS); $$tools/bin/pytest -q tests/image

.PHONY: inspect
inspect: ## what is in a checkpoint: format, scope, defects; seconds, no weights read (MODEL_DIR=...)
	@python3 -m qualify inspect $(if $(MODEL_DIR),"$(MODEL_DIR)") $(if $(JSON),--json)

.PHONY: preflight
preflight: ## can this artifact serve this checkpoint so (ARTIFACT= MODEL_DIR= TP= EP= [ARCH=] [UNCATALOGUED=1])
	@python3 -m qualify preflight --artifact "$(ARTIFACT)" --model-dir "$(MODEL_DIR)" --tp "$(or $(TP),1)" \
		--ep "$(or $(EP),1)" $(if $(ARCH),--arch "$(ARCH)") $(if $(UNCATALOGUED),--uncatalogued) $(if $(JSON),--json)

.PHONY: pin
pin: ## propose a catalogue entry for the files of a checkpoint (MODEL_DIR=...)
	@python3 -m qualify pin $(if $(MODEL_DIR),"$(MODEL_DIR)")

.PHONY: verify-checkpoint
verify-checkpoint: ## full SHA-256 of a checkpoint against the catalogue (MODEL_DIR=...)
	@python3 -m qualify verify-checkpoint $(if $(MODEL_DIR),"$(MODEL_DIR)") $(if $(JSON),--json)

.PHONY: qualify
qualify: ## prove on a GPU host that an image serves a checkpoint (ARTIFACT= MODEL_DIR= TARGET=h200|sm120 [TP= EP= OUT= FULL=1])
	@python3 -m qualify.host --artifact "$(ARTIFACT)" --model-dir "$(MODEL_DIR)" --target "$(TARGET)" \
		--tp "$(or $(TP),1)" --ep "$(or $(EP),1)" $(if $(OUT),--out "$(OUT)") $(if $(FULL),--full)

.PHONY: report
report: ## receipts and benchmark files as one HTML page, and the README's table ([OUT=build/report.html])
	@python3 -m qualify report --out "$(or $(OUT),build/report.html)" --readme

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

.PHONY: browser
browser: ## the report in a headless Chromium, which root on Debian or Ubuntu gets installed; screenshots in build/browser
	@tests/browser.sh >/dev/null
	@tools=$(TOOLS); $$tools/bin/pytest -q tests/browser

.PHONY: series
series: ## the patch series against the locked engine wheel
	@python3 images/wheels.py fetch --cache "$(HORIZON_CACHE)" --only sglang
	@python3 -B patches/series.py check --wheel "$(HORIZON_CACHE)"/wheels/sglang-*.whl

.PHONY: tag
tag: ## give an image its release tag; refused without receipts for exactly this image (ARTIFACT=... [EVIDENCE=DIR])
	@[ -n "$(ARTIFACT)" ] || { echo "rejected: say which image, for example make tag ARTIFACT=mova-fp8" >&2; exit 1; }
	@python3 -m qualify tag "$(ARTIFACT)" $(if $(EVIDENCE),--evidence "$(EVIDENCE)")

.PHONY: reproduce
reproduce: host ## build twice without cache and compare layer digests (ARTIFACT=...)
	@python3 images/reproduce.py "$(or $(ARTIFACT),mova-fp8)" --cache "$(HORIZON_CACHE)"

.PHONY: lock
lock: ## resolve images/engine.in, the Debian base and the test tools again
	@tools=$(TOOLS); PATH="$$tools/bin:$$PATH" $$tools/bin/python images/wheels.py lock
	@python3 images/base.py lock --cache "$(HORIZON_CACHE)"
	@tests/lock.sh $(TOOLS)
