//go:build unix

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/pgtest"
)

func TestAFailingCheckMovesTheJobWithinARenewIntervalToAReplicaThatPasses(t *testing.T) {
	t.Parallel()
	const ttl = 6 * time.Second // so a check has a second
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
	eventually(t, 5*time.Second, "a holds the lease", func() bool { return a.health(t).IsHolder })
	unfit, c := run("b"), run("c")
	eventually(t, 5*time.Second, "c knows the holder", func() bool { return c.health(t).Holder == "a" })
	eventually(t, 5*time.Second, "b is not fit", func() bool { return strings.Contains(unfit.health(t).LastError, "exit status 1") })

	began := time.Now()
	if err := os.Remove(fit("a")); err != nil {
		t.Fatal(err)
	}
	eventually(t, 2*ttl, "c holds the lease", func() bool { return c.health(t).IsHolder })
	eventually(t, time.Second, "its log says so", func() bool { return len(ledger(t, c)) == 1 })
	took := ledger(t, c)[0].started.Sub(began)
	moved := gaps(t, ledger(t, a, unfit, c))
	t.Logf("c works %v after the check has begun to fail, and %v after a has stopped", took, moved)
	if most := ttl/3 + time.Second; took > most { // a wake-up takes some ms; the rest is for a busy machine
		t.Errorf("c works %v after the check has begun to fail, want at most %v", took, most)
	}
	if len(moved) != 1 {
		t.Errorf("the ledger has %+v, want one term of a and one of c", ledger(t, a, unfit, c))
	}
	if log := a.log(); !strings.Contains(log, `cause="replica is unhealthy: test -e `) {
		t.Error("the log of a does not say why its job stopped")
	}
}

// What is counted is 60 s of real time, for two replicas at once: one alone, and
// one whose competitor is fit but is asked to hand over, to anybody, every 3 s. Both
// pass their check as standbys and fail it as holders.
func TestAFlappingReplicaDoesNotWinAgainAtOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("it counts for a minute")
	}
	t.Parallel()
	const (
		ttl   = 2 * time.Second
		flaps = `test "$ROLE" = standby`
		most  = 4 * ttl // that it stays away, says the README
	)
	b := newBackend(t, "-store", pgtest.URL(t))
	healthy := start(t, b, "healthy", "-ttl", ttl.String())
	eventually(t, 5*time.Second, "the healthy one holds the lease", func() bool { return healthy.health(t).IsHolder })
	flapping := start(t, b, "flapping", "-ttl", ttl.String(), "-check", flaps)
	alone := start(t, newBackend(t, "-store", pgtest.URL(t)), "alone", "-ttl", ttl.String(), "-check", flaps)

	const asked = 20
	tick := time.NewTicker(3 * time.Second)
	defer tick.Stop()
	for range asked {
		<-tick.C
		// It is held by nobody for a moment after the one before.
		if got := healthy.do("POST", "/handover", "", nil); got != http.StatusAccepted && got != http.StatusNotFound {
			t.Errorf("POST /handover answered %d", got)
		}
	}

	held := ledger(t, alone)
	aways := gaps(t, held)
	t.Logf("alone it had %d terms in 60s, and stayed away for %v", len(held), aways)
	// It stays away for 1, 2, 4, and from then on 8 s, less up to a quarter.
	// A term takes 2/3 s: that makes 9 to 12 terms, and if it stayed away no longer
	// than at first, more than 40.
	if len(held) < 5 || len(held) > 12 {
		t.Errorf("alone it had %d terms, want some, and at most 12", len(held))
	}
	for i, away := range aways {
		if least := min(ttl/2<<min(i, 3), most) * 3 / 4; away < least {
			t.Errorf("alone it stayed away for %v after %d terms, want at least %v", away, i+1, least)
		}
	}

	terms, again := 0, 0
	held = ledger(t, flapping, healthy)
	gaps(t, held)
	for i, h := range held {
		if h.replica == "flapping" {
			terms++
			if i > 0 && held[i-1].replica == "flapping" {
				again++
			}
		}
	}
	t.Logf("of %d terms that began in 60s, with %d handovers to anybody, the flapping replica had %d, %d of them after one of its own",
		len(held), asked, terms, again)
	if terms == 0 || terms > 12 || again > 0 {
		t.Error("want some for the flapping replica, at most 12, and none after one of its own")
	}
}

func TestAfterATakeoverTheJobBeginsOnceItIsConfirmedAndThePredecessorFenced(t *testing.T) {
	t.Parallel()
	b := newBackend(t, "-store", pgtest.URL(t))
	fenced := filepath.Join(t.TempDir(), "fenced")
	fence := fmt.Sprintf(`echo "$PREDECESSOR" >>'%s'; test "$(wc -l <'%[1]s')" -ge 2`, fenced) // fails at first
	run := func(name string) *gateway {
		return start(t, b, name, "-ttl", replicaTTL.String(), "-v", "-confirm", "2", "-fence", fence)
	}
	a := run("a")
	eventually(t, 5*time.Second, "a holds the lease", func() bool { return a.health(t).IsHolder })
	next := run("b")
	eventually(t, 5*time.Second, "b knows the holder", func() bool { return next.health(t).Holder == "a" })
	a.signal(t, syscall.SIGKILL)
	<-a.exited
	eventually(t, replicaTTL+5*time.Second, "b confirms", func() bool { return next.health(t).Role == "confirming" })
	eventually(t, replicaTTL+5*time.Second, "b works", func() bool { return strings.Contains(next.log(), `msg="job started"`) })

	if log := a.log(); strings.Contains(log, "fencing") || !strings.Contains(log, `msg="job started"`) {
		t.Error("a, whose term was the first, did not begin its job without further ado")
	}
	var steps []string
	for _, line := range strings.Split(next.log(), "\n") {
		for _, step := range []string{"lease acquired", "lease renewed", "fencing the predecessor", "predecessor not fenced", "takeover confirmed", "job started"} {
			if strings.Contains(line, `msg="`+step) && !(step == "lease renewed" && len(steps) > 2) { // it goes on
				steps = append(steps, step)
			}
		}
		if strings.Contains(line, `msg="job started"`) {
			break
		}
	}
	got := strings.Join(steps, ", ")
	want := "lease acquired, lease renewed, lease renewed, fencing the predecessor, predecessor not fenced, fencing the predecessor, takeover confirmed, job started"
	if got != want {
		t.Errorf("the log of b has\n%s\nwant\n%s", got, want)
	}
	if got, err := os.ReadFile(fenced); err != nil || string(got) != "a\na\n" {
		t.Errorf("the command was told of the predecessors %q, %v, want a, twice", got, err)
	}
}
