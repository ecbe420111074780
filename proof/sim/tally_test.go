package sim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/testkit"
)

// tally counts what happened.
type tally struct {
	mu      sync.Mutex
	worlds  int
	hours   map[time.Duration]float64 // lease-hours, by the TTL
	terms   int
	ends    map[string]int // ends of terms, by cause
	renewed int
	vacancy time.Duration // without a holder
	moves   int           // on request of a standby that outranks the holder
	moving  time.Duration // the vacancy of moves
	fenced  map[string]int
	faults  map[string]int
	judged  map[string]int // checks of an invariant, by occasion
	excused map[string]int // overlaps, by excuse
	broken  map[string]int // violations, by invariant
}

func (t *tally) add(o *tally) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.worlds += o.worlds
	t.terms += o.terms
	t.renewed += o.renewed
	t.vacancy += o.vacancy
	t.moves += o.moves
	t.moving += o.moving
	if t.hours == nil {
		t.hours = make(map[time.Duration]float64)
	}
	for ttl, h := range o.hours {
		t.hours[ttl] += h
	}
	for _, m := range []struct{ to, from *map[string]int }{
		{&t.ends, &o.ends}, {&t.fenced, &o.fenced}, {&t.faults, &o.faults}, {&t.judged, &o.judged}, {&t.excused, &o.excused}, {&t.broken, &o.broken},
	} {
		testkit.MergeCounts(m.to, *m.from)
	}
}

func (t *tally) leaseHours() float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	sum := 0.0
	for _, h := range t.hours {
		sum += h
	}
	return sum
}

func (t *tally) String() string {
	var b strings.Builder
	sum, ttls := 0.0, 0.0
	for ttl, h := range t.hours {
		sum += h
		ttls += h / ttl.Hours()
	}
	fmt.Fprintf(&b, "%.0f virtual lease-hours in %d worlds, %.0f TTLs long in all:", sum, t.worlds, ttls)
	for _, ttl := range slices.Sorted(maps.Keys(t.hours)) {
		fmt.Fprintf(&b, " %.0f h at a TTL of %v;", t.hours[ttl], ttl)
	}
	fmt.Fprintf(&b, "\n%d terms began, %d renewals landed\n", t.terms, t.renewed)
	for _, s := range []struct {
		what string
		m    map[string]int
	}{
		{"terms ended by", t.ends}, {"fenced writes", t.fenced}, {"faults", t.faults},
		{"judged", t.judged}, {"overlaps excused", t.excused}, {"invariants broken", t.broken},
	} {
		fmt.Fprintf(&b, "%s: %s\n", s.what, testkit.FormatCounts(s.m))
	}
	return b.String()
}
