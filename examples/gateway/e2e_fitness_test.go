//go:build unix

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

func TestAFailingCheckMovesTheJobToAReplicaThatPasses(t *testing.T) {
	t.Parallel()
	const ttl = 18 * time.Second // so that a check has three seconds
	b := newBackend(t, "-store", pgtest.URL(t))
	fit := func(name string) string { return filepath.Join(b.state, "fit-"+name) }
	run := func(name string) *gateway {
		return start(t, b, name, "-ttl", ttl.String(), "-check", "test -e "+fit(name))
	}
	if err := os.MkdirAll(b.state, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "c"} {
		if err := os.WriteFile(fit(name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a := run("a")
	eventually(t, soon, "a holds the lease", func() bool { return a.health(t).IsHolder })
	unfit, c := run("b"), run("c")
	eventually(t, soon, "c knows the holder", func() bool { return c.health(t).Holder == "a" })
	eventually(t, soon, "the check of b fails", func() bool { return strings.Contains(unfit.health(t).LastError, "exit status 1") })

	began := time.Now()
	if err := os.Remove(fit("a")); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "c holds the lease", func() bool { return c.health(t).IsHolder })
	eventually(t, soon, "its log says so", func() bool { return len(ledger(t, c)) == 1 })
	took := ledger(t, c)[0].started.Sub(began)
	moved := gaps(t, settledLedger(t, a, unfit, c))
	t.Logf("c works %v after the check began to fail, and %v after a stopped", took, moved)
	if len(moved) != 1 {
		t.Errorf("the ledger has %+v, want one term of a and one of c", ledger(t, a, unfit, c))
	}
	// The reason must be the check, and not that the lease was no longer renewed.
	if log := a.log(); !strings.Contains(log, `cause="replica is unhealthy: test -e `) {
		t.Error("the log of a does not say why its job stopped")
	}
	eventually(t, soon, "a logs that it has released the lease", func() bool {
		return strings.Contains(a.log(), `msg="lease released"`)
	})
}

// Two replicas run for a minute of real time, each on its own lease: one alone, and one
// with a healthy competitor that is asked to hand over, to anybody, every 3 s. Both pass
// their check as standbys and fail it as holders.
func TestAFlappingReplicaDoesNotWinAgainAtOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes a minute")
	}
	t.Parallel()
	const (
		ttl   = 2 * time.Second
		flaps = `test "$ROLE" = standby`
		most  = 4 * ttl // how long it stays away, according to the README
	)
	b := newBackend(t, "-store", pgtest.URL(t))
	healthy := start(t, b, "healthy", "-ttl", ttl.String())
	eventually(t, soon, "the healthy replica holds the lease", func() bool { return healthy.health(t).IsHolder })
	flapping := start(t, b, "flapping", "-ttl", ttl.String(), "-check", flaps)
	alone := start(t, newBackend(t, "-store", pgtest.URL(t)), "alone", "-ttl", ttl.String(), "-check", flaps)

	// On a slow machine some terms take longer, because the check does.
	const least, longest = time.Minute, 5 * time.Minute
	began, asked := time.Now(), 0
	tick := time.NewTicker(3 * time.Second)
	defer tick.Stop()
	for time.Since(began) < least ||
		time.Since(began) < longest && (len(ledger(t, alone)) < 5 || len(ledger(t, flapping)) == 0) {
		<-tick.C
		asked++
		// Nobody holds the lease for a moment after the previous handover.
		if got := healthy.do("POST", "/handover", "", nil); got != http.StatusAccepted && got != http.StatusNotFound {
			t.Errorf("POST /handover answered %d", got)
		}
	}

	took := time.Since(began)
	held := settledLedger(t, alone)
	aways := gaps(t, held)
	t.Logf("alone it had %d terms in %v, and stayed away for %v", len(held), took, aways)
	// It stays away for 1, 2, 4, and from then on 8 s, minus up to a quarter. A term takes
	// 2/3 s. That makes 9 to 12 terms in a minute; if it always stayed away only as long as
	// the first time, there would be more than 40.
	mostTerms := int(12 * took / least)
	if len(held) < 5 || len(held) > mostTerms {
		t.Errorf("alone it had %d terms, want some, and at most %d", len(held), mostTerms)
	}
	for i, away := range aways {
		if least := min(ttl/2<<min(i, 3), most) * 3 / 4; away < least {
			t.Errorf("alone it stayed away for %v after %d terms, want at least %v", away, i+1, least)
		}
	}

	terms, again := 0, 0
	held = settledLedger(t, flapping, healthy)
	gaps(t, held)
	for i, h := range held {
		if h.replica == "flapping" {
			terms++
			if i > 0 && held[i-1].replica == "flapping" {
				again++
			}
		}
	}
	t.Logf("of %d terms, with %d handovers to anybody, the flapping replica had %d, %d of them after one of its own",
		len(held), asked, terms, again)
	if terms == 0 || terms > mostTerms || again > 0 {
		t.Errorf("want some for the flapping replica, at most %d, and none after one of its own", mostTerms)
	}
}

func TestAfterATakeoverTheJobStartsOnceConfirmedAndThePredecessorFenced(t *testing.T) {
	t.Parallel()
	b := newBackend(t, "-store", pgtest.URL(t))
	fenced := filepath.Join(t.TempDir(), "fenced")
	fence := fmt.Sprintf(`echo "$PREDECESSOR" >>'%s'; test "$(wc -l <'%[1]s')" -ge 2`, fenced) // fails at first
	run := func(name string) *gateway {
		return start(t, b, name, "-ttl", replicaTTL.String(), "-v", "-confirm", "2", "-fence", fence)
	}
	a := run("a")
	eventually(t, soon, "a holds the lease", func() bool { return a.health(t).IsHolder })
	next := run("b")
	eventually(t, soon, "b knows the holder", func() bool { return next.health(t).Holder == "a" })
	a.signal(t, syscall.SIGKILL)
	<-a.exited
	eventually(t, soon, "b confirms", func() bool { return next.health(t).Role == "confirming" })
	eventually(t, soon, "b works", func() bool { return strings.Contains(next.log(), `msg="job started"`) })

	if log := a.log(); strings.Contains(log, "fencing") || !strings.Contains(log, `msg="job started"`) {
		t.Error("a, which took over from nobody, did not start its job at once")
	}
	eventually(t, soon, "b's library has told all", func() bool { return strings.Contains(next.log(), `msg="takeover confirmed"`) })
	// The library's lines are written a moment later than what the gateway itself logs, so each
	// has its own order.
	steps := func(names ...string) (steps []string) {
		for _, line := range strings.Split(next.log(), "\n") {
			for _, name := range names {
				if strings.Contains(line, `msg="`+name) {
					steps = append(steps, name)
				}
			}
		}
		return steps
	}
	library := slices.Compact(steps("lease acquired", "lease renewed", "predecessor not fenced", "takeover confirmed"))
	if want := []string{"lease acquired", "lease renewed", "predecessor not fenced"}; !slices.Equal(library[:3], want) {
		t.Errorf("the library logs %q first, want %q", library, want)
	}
	renewals := slices.Index(steps("lease renewed", "predecessor not fenced"), "predecessor not fenced")
	if renewals < 2 {
		t.Errorf("the predecessor was fenced after %d renewals, want 2", renewals)
	}
	if got, want := steps("fencing the predecessor", "job started")[:3], []string{"fencing the predecessor", "fencing the predecessor", "job started"}; !slices.Equal(got, want) {
		t.Errorf("the gateway logs %q, want %q", got, want)
	}
	if got, err := os.ReadFile(fenced); err != nil || string(got) != "a\na\n" {
		t.Errorf("the command got the predecessors %q, %v, want a, twice", got, err)
	}
}
