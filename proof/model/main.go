// Command model explores a model of claims over a failover of the database that loses commits: in each state
// that can follow from its steps, no two processes own the key, and no token is repeated or goes back. From each,
// somebody owns it in the end if no further fault occurs. Each rule of the protocol is also left out, and the
// exploration must then find what breaks; it prints that as a story.
//
//	go run ./proof/model
//	go run ./proof/model -states 5000000 -walk 5m safe/
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"
)

// scenario is a model, and what must come of its exploration.
type scenario struct {
	name  string // begins with safe/, drop/ (one rule is left out) or hole/ (a condition does not hold)
	rules claimRules
}

// some is what most scenarios have.
func some(change func(*claimRules)) claimRules {
	r := claimRules{servers: 2, promotions: 1, begins: 3, reassert: true, reassertSession: true}
	change(&r)
	return r
}

var scenarios = []scenario{
	{"safe/statements are answered at once", some(func(*claimRules) {})},
	{"safe/one statement is slow", some(func(r *claimRules) { r.slow = 1 })},
	{"safe/one statement is given up", some(func(r *claimRules) { r.slow, r.strays = 1, 1 })},
	{"safe/a process crashes", some(func(r *claimRules) { r.crashes = 1 })},
	{"safe/a server restarts", some(func(r *claimRules) { r.restarts = 1 })},
	{"safe/the new primary's clock is behind", some(func(r *claimRules) { r.behind = 2 })},
	{"safe/two promotions of three servers", some(func(r *claimRules) { r.servers, r.promotions = 3, 2 })},
	{"safe/nothing is written again", some(func(r *claimRules) { r.reassert, r.reassertSession = false, false })},
	{"safe/only claims are written again", some(func(r *claimRules) { r.reassertSession = false })},

	{"drop/nothing is claimed before the failover has settled", some(func(r *claimRules) { r.without.wait = true })},
	{"drop/a statement that claims names the server", some(func(r *claimRules) { r.without.takeNamesServer = true })},
	{"drop/a renewal counts when the claim was compared", some(func(r *claimRules) { r.without.compare = true })},
	{"drop/the comparison waits for statements that claim", some(func(r *claimRules) {
		r.without.turn, r.slow, r.onlySlow, r.begins = true, 1, take, 2
	})},
	{"drop/a claim is written again over lesser tokens only", some(func(r *claimRules) {
		r.without.greater, r.slow, r.onlySlow, r.begins = true, 1, reassert, 2
	})},

	{"hole/the old primary goes on", some(func(r *claimRules) { r.oldGoesOn = true })},
	{"hole/the new primary's clock is behind by more than a TTL", some(func(r *claimRules) { r.behind = 4 })},
}

// everything has all faults at once, for random walks.
var everything = claimRules{
	servers: 3, promotions: 2, slow: 4, strays: 2, crashes: 1, restarts: 1, begins: 4, reassert: true, reassertSession: true,
}

// explore searches a scenario, and reports what it has found and whether that is what must come of it.
func (sc scenario) explore(states int) (f found, ok bool) {
	m := sc.rules.model()
	safe := strings.HasPrefix(sc.name, "safe/")
	if !safe { // what breaks first is that two own the key
		m.recovers = func(claimState) bool { return true }
	}
	f = m.search(states)
	return f, safe == (f.bad == "")
}

func main() {
	states := flag.Int("states", 2_000_000, "states of a scenario that are looked at")
	long := flag.Duration("walk", 30*time.Second, "how long random walks over all faults take")
	flag.Parse()
	failed := false
	report := func(name string, f found, ok bool, took time.Duration) {
		verdict := "holds as far as it was explored"
		if f.complete {
			verdict = "holds"
		}
		if f.bad != "" {
			verdict = "broken: " + f.bad
		}
		failed = failed || !ok
		fmt.Printf("%-6s%s: %d states, %d steps, %v: %s\n", map[bool]string{true: "ok", false: "WRONG"}[ok], name, f.states, f.depth, took.Round(time.Millisecond), verdict)
		for _, line := range f.story {
			fmt.Println("         ", line)
		}
	}
	for _, sc := range scenarios {
		if strings.HasPrefix(sc.name, flag.Arg(0)) {
			began := time.Now()
			f, ok := sc.explore(*states)
			report(sc.name, f, ok, time.Since(began))
		}
	}
	if flag.Arg(0) == "" && *long > 0 {
		f := everything.model().walk(*long)
		report("everything", f, f.bad == "", *long)
	}
	if failed {
		os.Exit(1)
	}
}
