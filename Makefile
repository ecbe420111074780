# The version of staticcheck is pinned, so that a new check never fails an old commit.
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# Runs go test, and says in the end what was skipped and why. It works in each module that requires this one.
GOTEST := go run github.com/tenurelib/tenure/internal/testkit/gotest

# This target needs Go and make: no C compiler, no server, no network but for modules, and no programs but a shell's.
.PHONY: test
test: format ## gofmt, vet and the quick tests of this module and its proof, on nothing but Go
	go vet ./...
	@$(GOTEST) -short -count=1 -vet=off ./...
	@cd proof && $(GOTEST) -short -count=1 -vet=off ./databases ./docs ./model ./mutants ./sim
	@echo "Not looked for: data races, what staticcheck finds, and other modules (make check); what the documents promise (make docs)."

.PHONY: docs
docs: ## what the documents promise: their words, links, programs and tables
	go -C proof test -count=1 ./docs
	go test -count=1 -run Documents ./examples/failover

# The race detector looks at all of this library and its drivers. SQLite itself, as translated from
# C, runs five times as fast without it. Nothing that uses generic code of other packages may be left
# out: the linker could take its copy of that code, without the detector, for all.
RACE := -race -gcflags=modernc.org/sqlite/lib=-race=false -gcflags=modernc.org/libc/...=-race=false

.PHONY: check
check: needs lint ## all modules, with the race detector, staticcheck and real servers: before a change lands
	@$(MAKE) --no-print-directory check-programs
	@$(MAKE) --no-print-directory -j3 -Otarget check-claims check-modules check-root

.PHONY: container
container: ## the quick tests of some packages as a container runs them
	.ci/container

.PHONY: needs
needs:
	@[ "$$(go env CGO_ENABLED)" = 1 ] && command -v "$$(go env CC | cut -d ' ' -f 1)" >/dev/null || \
		{ echo "make check needs a C compiler, for the race detector: install gcc or clang, and leave CGO_ENABLED unset. make test needs none."; exit 1; }
	@echo "make check takes about half an hour on two cores, and some more with empty caches."
	@PATH="$$PATH:$$(echo "$$TENURE_TEST_POSTGRES" /usr/lib/postgresql/*/bin | tr ' ' :):$$(dirname "$${TENURE_TEST_PGBOUNCER:-/usr/sbin/pgbouncer}")"; \
		for program in postgres pgbouncer mariadbd promtool minisign jq; do \
			command -v $$program >/dev/null || echo "There is no $$program: the tests that need it are skipped."; \
		done
	@test -x "$(KUBE)" || echo "There is no API server of Kubernetes (make kube-apiserver): the tests that need it are skipped."

# These run programs that they build, with and without faults, by the clock: nothing runs beside them. Of mixed fleets
# with client-go there are some dozens of terms; make kube has a thousand.
.PHONY: check-programs
check-programs:
	cd proof && go test -p 1 -timeout 60m ./bench ./chaos/... ./interop

# One package at a time: many start servers and processes. The time is for a machine that has much else to do.
.PHONY: check-root
check-root:
	go test $(RACE) -p 1 -timeout 60m $$(go list ./... | grep -v '/claims$$')
	cd proof && go test $(RACE) -p 1 -timeout 60m ./kills ./sim
	cd proof && go test -p 1 -timeout 60m ./docs ./model ./mutants ./release

# What waits more than it works, beside the others.
.PHONY: check-claims
check-claims:
	go test $(RACE) -timeout 60m ./claims
	cd cmd/tenure && go test $(RACE) -timeout 60m ./...
	cd stores/natstenure && go test $(RACE) -timeout 60m ./...

# The tests of proof/release and examples/integrations build other programs, without the detector. The models have no
# goroutines, and take twenty times as long with it.
.PHONY: check-modules
check-modules:
	cd proof && go test $(RACE) -timeout 60m ./databases
	cd oteltenure && go test $(RACE) -timeout 60m ./...
	cd stores/etcdtenure && go test $(RACE) -timeout 60m ./...
	cd stores/mysqltenure && go test $(RACE) -timeout 60m ./...
	cd stores/kubetenure && go test $(RACE) -timeout 60m ./...
	cd examples/periodic && go test $(RACE) -timeout 60m ./...
	cd examples/integrations && go test -timeout 60m ./...

.PHONY: format
format:
	@unformatted=$$("$$(go env GOROOT)/bin/gofmt" -l .) || exit 1; [ -z "$$unformatted" ] || { echo "gofmt would change: $$unformatted"; exit 1; }

MODULES := . cmd/tenure proof oteltenure stores/natstenure stores/etcdtenure stores/kubetenure stores/mysqltenure examples/periodic examples/integrations

.PHONY: lint
lint: format ## gofmt, vet, staticcheck, and whether each mutant fits the code
	go -C proof run ./mutants -check
	@set -e; for module in $(MODULES); do echo "vet and staticcheck $$module"; (cd $$module && go vet ./... && go run $(STATICCHECK) ./...); done

# All modules but the one that builds a server for tests.
VULNDB := https://vuln.go.dev

.PHONY: vuln
vuln: ## known vulnerabilities in what each module calls, by the database VULNDB
	@failed=; for module in $$(git ls-files go.mod '*/go.mod' | grep -v '^proof/kubernetes/' | xargs -n 1 dirname); do \
		echo "$$module:"; (cd $$module && go run $(GOVULNCHECK) -db $(VULNDB) ./...) || failed="$$failed $$module"; \
	done; [ -z "$$failed" ] || { echo "vulnerable, or not looked at:$$failed"; exit 1; }

.PHONY: gateway
gateway: ## run the example gateway on a SQLite file
	go run ./examples/gateway

.PHONY: failover
failover: ## watch a lease change hands, for some seconds
	go run ./examples/failover

.PHONY: bench
bench: ## the benchmarks of this module
	go test -run '^$$' -bench . -benchmem .

.PHONY: bench-peers
bench-peers: ## this library beside others, on one machine in one run, for some minutes
	cd proof/bench && go run . -svg bench.svg

# The tests of kubetenure are skipped without this program, whose build takes ten minutes of CPU, and
# 3.4 GB of the build cache.
KUBE = $${XDG_CACHE_HOME:-$$HOME/.cache}/tenure/kube-apiserver-$(shell sed -n 's|.*k8s.io/kubernetes \(v[0-9.]*\).*|\1|p' proof/kubernetes/go.mod)

.PHONY: kube-apiserver
kube-apiserver: ## build the API server of Kubernetes that the tests of kubetenure run, once
	@test -x "$(KUBE)" || (mkdir -p "$$(dirname "$(KUBE)")" && cd proof/kubernetes && go build -trimpath -ldflags '-s -w' -o "$(KUBE)" k8s.io/kubernetes/cmd/kube-apiserver)

.PHONY: kube
kube: kube-apiserver ## all tests that need Kubernetes, with a mixed fleet of 1,000 terms, for some 20 minutes
	cd stores/kubetenure && TENURE_REQUIRE_KUBE=1 go test $(RACE) -timeout 60m ./...
	cd examples/integrations && TENURE_REQUIRE_KUBE=1 go test -run TestAManagerIsAJob -timeout 60m ./...
	cd cmd/tenure && TENURE_REQUIRE_KUBE=1 go test -run Kubernetes -timeout 60m ./...
	cd proof/interop && TENURE_REQUIRE_KUBE=1 go test -v -timeout 60m . -args -terms 1000

.PHONY: test-galera
test-galera: ## leases on a Galera cluster of three nodes, for two minutes
	cd stores/mysqltenure && TENURE_TEST_GALERA=1 go test -run TestOnAClusterOfThreeNodes -v -timeout 30m .

.PHONY: test-mysql
test-mysql: ## leases on a server of your own, DSN='user:password@tcp(host:3306)/scratch', such as one of MySQL
	cd stores/mysqltenure && TENURE_TEST_MYSQL='$(DSN)' go test -run TestOnAServerOfYourOwn -v -timeout 30m .

DURATION := 10m

.PHONY: chaos
chaos: ## faults done to real processes and servers, for DURATION, and what became of the promises
	cd proof/chaos && go run . -duration $(DURATION)

KILLS := 3400

.PHONY: witness
witness: ## ten thousand kills of processes under a witness, on Postgres, SQLite and NATS, for an hour
	cd proof && go test ./kills -v -timeout 6h -kills $(KILLS)

.PHONY: versions
versions: ## the contract, set-up and failovers on each version of Postgres that is installed or in TENURE_TEST_POSTGRES, and beside an older library
	cd proof && go test ./databases -run 'TestEveryVersion|TestAnOlderLibrary' -v -timeout 2h

.PHONY: sim
sim: ## a million virtual lease-hours of replicas under faults, 1e5 session-hours, 1e4 events of shards, and a year of a schedule, for a quarter of an hour
	go test ./schedule -run 'TestEachSlotOfAYear|TestAYearInWhich' -v -timeout 60m -schedule.days 365
	cd proof && GOGC=400 go test ./sim -run TestSimulation -v -timeout 60m -sim.hours 1e6 -sim.first $${SEED:-1}
	cd proof && GOGC=400 go test ./sim -run TestHistoriesThatFailOver -v -timeout 60m -sim.hours 1e4 -sim.first $${SEED:-1}
	GOGC=400 go test ./claims -run TestSimulation -v -timeout 60m -sim.hours 1e5 -sim.first $${SEED:-1}
	GOGC=400 go test ./shards -run 'TestShardsUnderFaults|TestMovesAreTheMinimum|TestAnyChurn|TestARollingRestart' -v -timeout 60m -shards.events 10000 -shards.rule 1000 -shards.seed $${SEED:-1}

.PHONY: model
model: ## explore the models of leases, failovers and claims, and show how each rule that is left out breaks them, for some minutes
	GOGC=400 go -C proof run ./model

.PHONY: mutants
mutants: ## make the library wrong in one place after another; the tests must notice, for some hours
	go -C proof run ./mutants

KEY := $(HOME)/.minisign/minisign.key

.PHONY: release
release: ## commit VERSION on a branch of its own, tag it, and build and sign its binaries in dist; nothing is pushed
	@cd proof/release && go run . "$(VERSION)" "$(abspath $(KEY))"
