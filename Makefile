# Harena. `make demo` and `make test` install what is missing; see README.md.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
TOOLS := $(shell scripts/tools-dir)
# Real S3 servers that tests start: a small one always, SeaweedFS (16 minutes of a processor to build) for make soak.
VERSITYGW := $(shell scripts/tools-dir versitygw)
SEAWEEDFS := $(shell scripts/tools-dir seaweedfs)
export PATH := $(TOOLS):$(VERSITYGW):$(SEAWEEDFS):$(PATH)
# Tests and benchmarks start nodes of their own, whatever node the shell is set to.
unexport HARENA_URL HARENA_TOKEN HARENA_PROJECT
LDFLAGS := -s -w -X main.version=$(VERSION)
ZYGOTE := internal/supervisor/zygote/zygote.bin

.PHONY: build demo test soak lint bench generate check-generated setup tools unit scenario vm fuzz clean

build: bin/harena bin/harena-guest

.PHONY: bin/harena bin/harena-guest
bin/harena: $(ZYGOTE)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./cmd/harena
bin/harena-guest: $(ZYGOTE)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $@ ./cmd/harena-guest

# The program that enters sandboxes; embedded in harena-guest.
$(ZYGOTE): $(wildcard internal/supervisor/zygote/src/*.[ch]) internal/supervisor/zygote/build.sh
	internal/supervisor/zygote/build.sh

setup:
	scripts/setup

tools: $(TOOLS)/.complete
$(TOOLS)/.complete: tools/go.mod tools/go.sum
	scripts/tools-build $(TOOLS)
$(VERSITYGW)/.complete: tools/versitygw/go.mod tools/versitygw/go.sum
	scripts/tools-build $(VERSITYGW) versitygw
$(SEAWEEDFS)/.complete: tools/seaweedfs/go.mod tools/seaweedfs/go.sum
	scripts/tools-build $(SEAWEEDFS) seaweedfs

generate: tools
	cd api && buf lint && buf generate

# Generated code is checked in; CI regenerates it and fails on a difference.
# The baseline is the API that clients in the field were built against.
check-generated: generate
	git diff --exit-code -- api ':!api/baseline.binpb' || { echo 'generated code differs: run make generate and commit'; exit 1; }
	cd api && buf breaking --against baseline.binpb

lint: tools $(ZYGOTE)
	golangci-lint run ./...
	scripts/check-size

demo: setup build
	scripts/demo

unit: $(ZYGOTE) $(VERSITYGW)/.complete
	$(GO) test -race -timeout 15m ./internal/... ./sdk/... ./cmd/... | { grep --line-buffered -v '\[no test files\]' || true; }

scenario: build
	$(GO) test -count=1 -timeout 20m ./test/scenario

# A few of the same on a second kernel, in a virtual machine: see test/vm/vm_test.go. All of them: HARENA_VM_FORM=long.
vm: build
	$(GO) test -count=1 -timeout 90m ./test/vm

fuzz: $(ZYGOTE)
	scripts/fuzz

# What CI runs; says how long each part took.
test:
	@begin=$$SECONDS; for part in setup check-generated lint unit scenario vm fuzz; do \
		start=$$SECONDS; echo "== $$part"; \
		$(MAKE) --no-print-directory $$part || { echo "== $$part failed after $$((SECONDS - start)) s"; exit 1; }; \
		echo "== $$part passed in $$((SECONDS - start)) s"; \
	done; echo "== all passed in $$((SECONDS - begin)) s"

# The same scenarios, fuzz targets and benchmarks at full counts; writes docs/reports/soak.md.
soak: setup build $(VERSITYGW)/.complete $(SEAWEEDFS)/.complete
	scripts/soak

# Every measure of harena bench, on a node of its own.
bench: setup build $(VERSITYGW)/.complete
	scripts/bench

clean:
	rm -rf bin $(ZYGOTE)
