//go:build unix

package main

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

// Each gateway in turn hands over to the next and is replaced by a new process, as in the
// README. The request for the next is sent to the third.
func TestARollingRestartByHandoverDoesNotWaitAndEndsOnTheNamedReplica(t *testing.T) {
	t.Parallel()
	// The intervals are so long that no replica renews or tries to acquire during the test
	// unless it is woken.
	f := startFleet(t, newBackend(t, "-store", pgtest.URL(t)), "-v", "-ttl", "6h")
	all := slices.Clone(f.gateways) // including those that have ended
	first := slices.Index(f.gateways, f.holder(t))
	at := func(i int) *gateway { return f.gateways[(first+i)%len(f.gateways)] }
	want := []string{at(0).name}
	for i := range f.gateways {
		for _, g := range f.gateways {
			// A replica that has just started and can't be woken yet would notice later.
			eventually(t, soon, g.name+" can be woken", func() bool { return strings.Contains(g.log(), `msg="standbys are woken`) })
		}
		old, next, third := at(i), at(i+1), at(i+2)
		if got := third.do("POST", "/handover", fmt.Sprintf(`{"to":%q}`, next.name), nil); got != http.StatusAccepted {
			t.Fatalf("%s: POST /handover answered %d, want %d", third.name, got, http.StatusAccepted)
		}
		eventually(t, soon, next.name+" works", func() bool { return next.health(t).IsHolder })
		old.signal(t, syscall.SIGTERM)
		old.awaitEnd(t)
		f.restart(t, old)
		all = append(all, at(i))
		want = append(want, next.name)
	}
	// Log lines arrive with a delay.
	eventually(t, soon, "the ledger is complete", func() bool { return len(ledger(t, all...)) >= len(want) })
	held := settledLedger(t, all...)
	var got []string
	for _, h := range held {
		got = append(got, h.replica)
	}
	if !slices.Equal(got, want) {
		t.Fatalf("the lease was held by %v, want %v", got, want)
	}
	if last := at(0).health(t); !last.IsHolder || !held[len(held)-1].stopped.IsZero() {
		t.Errorf("at the end %s answers %+v", at(0).name, last)
	}
	steps := gaps(t, held)
	var sum time.Duration
	for _, step := range steps {
		sum += step
	}
	t.Logf("without a holder: %v, in total %v", steps, sum)
}
