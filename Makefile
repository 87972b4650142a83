# Drillyard's commands. `make help` lists them. Set-up and build are prerequisites, never manual steps, and done once.

PIPELINE ?= pipelines/quickstart.toml
# What `make` is asked to override in the pipeline, as SET="train.lr=1e-4 tasks.train=100".
SET ?=
N ?= 3
SEEDS ?= 7 8 9
CARGO ?= cargo
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
DRILLYARD := $(TARGET_DIR)/debug/drillyard
HELPERS := $(TARGET_DIR)/helpers

# A libtorch of your own (CPU or CUDA, version 2.13.0) is used when LIBTORCH names it.
ifeq ($(origin LIBTORCH),undefined)
export LIBTORCH := $(CURDIR)/.libtorch
OWN_LIBTORCH :=
else
OWN_LIBTORCH := yes
endif

RUN = $(DRILLYARD) --pipeline $(PIPELINE) $(foreach s,$(SET),--set $(s))
ifdef IMPORT
RUN += --set import.path=$(IMPORT)
endif

.DEFAULT_GOAL := help
.PHONY: help setup helpers build front rollout import qa credit train eval report nights seeds control base test vm-test lint lint-cold notebooks bench bench-sandbox clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## bring libtorch (once; nothing is installed system-wide)
	@command -v python3 >/dev/null || { echo "error: python3 was not found; setup needs it" >&2; exit 30; }
	@command -v $(CARGO) >/dev/null || { echo "error: cargo was not found; install a Rust toolchain, 1.95 or newer" >&2; exit 30; }
	@$(if $(OWN_LIBTORCH),echo "using your libtorch in $(LIBTORCH)" >&2,python3 crates/model/setup_libtorch.py $(LIBTORCH))

helpers: ## build the static programs that run inside sandboxes
	@RUSTFLAGS="-C target-feature=+crt-static" $(CARGO) build --quiet -p drillyard-sandbox-init -p drillyard-sql-tool \
	  --target $(HOST) --target-dir $(TARGET_DIR)/helpers-build
	@mkdir -p $(HELPERS)
	@for p in drillyard-sandbox-init drillyard-sql-tool; do \
	  cmp -s $(TARGET_DIR)/helpers-build/$(HOST)/debug/$$p $(HELPERS)/$$p || install -m 755 $(TARGET_DIR)/helpers-build/$(HOST)/debug/$$p $(HELPERS)/$$p; done

build: setup helpers ## build everything `make` runs
	@$(CARGO) build --workspace --bins

front: helpers ## build the front door alone, without libtorch: import, qa, sql, rollout against an endpoint
	@$(CARGO) build -p drillyard-cli

rollout: build ## run episodes in sandboxes; they land in the lake
	@$(RUN) rollout

import: build ## read recorded trajectories into the lake (IMPORT=path)
	@$(RUN) import

qa: build ## judge episodes with the rules under sql/
	@$(RUN) qa

credit: build ## rewards, returns, advantages, weights, pairs
	@$(RUN) credit

train: build ## credit, train, evaluate on held-out tasks, report card
	@$(RUN) train

eval: build ## evaluate base and candidate on held-out tasks
	@$(RUN) eval

report: build ## print the last report card
	@$(RUN) report

nights: build ## N nights in a row, each from the champion (N=3)
	@$(RUN) nights $(N)

seeds: build ## the loop with three seeds, and what each gained (SEEDS="7 8 9")
	@for seed in $(SEEDS); do \
	  for verb in rollout qa train; do $(RUN) --set seed=$$seed $$verb || exit $$?; done; done
	@$(RUN) sql -f sql/metrics/gains.sql

control: build ## the negative control: the same training on permuted outcomes
	@$(RUN) control

base: build ## make the embedded base model again (a quarter of an hour)
	@$(DRILLYARD) --pipeline pipelines/base.toml base

test: setup helpers ## every test
	@$(CARGO) test --workspace --no-fail-fast

vm-test: helpers ## sandboxes on pure control groups v2, in an emulated machine
	@command -v qemu-system-x86_64 >/dev/null && command -v busybox >/dev/null && command -v apt-get >/dev/null || \
	  { echo "error: this needs a Debian with qemu-system-x86 and busybox-static: apt-get install them" >&2; exit 30; }
	@$(CARGO) test --quiet -p drillyard-sandbox --test pure_v2 -- --nocapture

lint: setup ## format check and clippy, warnings denied
	@$(CARGO) fmt --all --check
	@$(CARGO) clippy --workspace --all-targets -- -D warnings

lint-cold: setup ## the same where nothing is compiled yet: dependencies are compiled once for it and the tests
	@$(CARGO) fmt --all --check
	@RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/.ci/clippy $(CARGO) build --quiet --workspace --all-targets

notebooks: setup helpers ## run the notebooks over a small lake of their own
	@test -x $(DRILLYARD) && test -x $(DRILLYARD)-torch || $(MAKE) build
	@test -x .venv/bin/python || python3 -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r notebooks/requirements.txt
	@for verb in rollout qa train; do \
	  $(DRILLYARD) --set yard=$(TARGET_DIR)/notebook-yard --set tasks.train=28 --set tasks.samples=4 --set train.epochs=1 \
	    --set eval.tasks=14 --set eval.unseen_tasks=1 $$verb || exit $$?; done
	@DRILLYARD_YARD=$(abspath $(TARGET_DIR))/notebook-yard .venv/bin/python notebooks/run.py

bench: build ## figures as JSON lines, each beside its baseline
	@$(DRILLYARD) bench

bench-sandbox: helpers ## what sandboxes cost, beside fork+exec, bubblewrap, nsjail and Docker
	@$(CARGO) run --quiet -p drillyard-sandbox --example bench

clean: ## remove what runs and builds left (not libtorch)
	rm -rf yard $(TARGET_DIR)
