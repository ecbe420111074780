// Command model explores models of the protocol (docs/protocol.md): of one lease, of a lease over failovers of the
// database that lose commits, and of claims over these. In each state that it sees, no two processes hold the lease
// or own the key, no token is repeated or goes back, and no fenced write is late; and from each, somebody holds in the
// end if no further fault occurs. Each rule of the protocol is also left out, and the exploration must then find what
// breaks; it prints that as a story, and ends with status 1 if it finds nothing.
//
//	go -C proof run ./model
//	go -C proof run ./model -states 10000000 -walk 5m lease/safe/
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// scenario is a model, and what must come of its exploration.
type scenario struct {
	name    string // a model, and then safe/, drop/ (one rule is left out) or hole/ (a condition does not hold)
	explore func(states int) found
}

// of returns the scenario of a model with this name.
func of[S comparable](name string, m *model[S]) scenario {
	if !strings.Contains(name, "/safe/") { // what breaks first is that two hold
		m.recovers = func(S) bool { return true }
	}
	return scenario{name, m.search}
}

// ok reports whether an exploration has found what it must find.
func (sc scenario) ok(f found) bool { return strings.Contains(sc.name, "/safe/") == (f.bad == "") }

func scenarios() []scenario {
	return slices.Concat(leaseScenarios(), failoverScenarios(), claimScenarios())
}

// walks have all faults at once.
var walks = []struct {
	name string
	walk func(time.Duration) found
}{
	{"lease/all faults at once", allLeaseFaults.model().walk},
	{"failover/all faults at once", allFailoverFaults.model().walk},
	{"claims/all faults at once", allClaimFaults.model().walk},
}

func main() {
	states := flag.Int("states", 500_000, "states of a scenario that are looked at")
	long := flag.Duration("walk", 30*time.Second, "how long random walks over all faults take, for each model")
	flag.Parse()
	failed, sum, began := false, 0, time.Now()
	report := func(name string, f found, ok bool, took time.Duration) {
		verdict := "holds as far as it was explored"
		if f.complete {
			verdict = "holds"
		}
		if f.bad != "" {
			verdict = "broken: " + f.bad
		}
		failed, sum = failed || !ok, sum+f.states
		fmt.Printf("%-6s%s: %d states, %d steps, %v: %s\n", map[bool]string{true: "ok", false: "WRONG"}[ok], name, f.states, f.depth, took.Round(time.Millisecond), verdict)
		for _, line := range f.story {
			fmt.Println("         ", line)
		}
	}
	for _, sc := range scenarios() {
		if strings.HasPrefix(sc.name, flag.Arg(0)) {
			began := time.Now()
			f := sc.explore(*states)
			report(sc.name, f, sc.ok(f), time.Since(began))
		}
	}
	for _, w := range walks {
		if strings.HasPrefix(w.name, flag.Arg(0)) && *long > 0 {
			f := w.walk(*long)
			report(w.name, f, f.bad == "", *long)
		}
	}
	fmt.Printf("%d states in %v\n", sum, time.Since(began).Round(time.Second))
	if failed {
		os.Exit(1)
	}
}
