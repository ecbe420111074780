package claims_test

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
	mu     sync.Mutex
	arenas int
	hours  map[time.Duration]float64 // session-hours, by the TTL

	begun, renewed         int // sessions, and their renewals
	taken, freed, runs     int // rows, and funcs
	statements, calmClaims int
	ends                   map[string]int // why funcs were told to return
	fenced                 map[string]int
	faults                 map[string]int
	rows                   map[string]int // of the queue, and its workers
	judged                 map[string]int // checks, by occasion
	excused                map[string]int // overlaps, by excuse
	broken                 map[string]int // violations, by rule
}

func (t *tally) add(o *tally) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.arenas += o.arenas
	for _, n := range []struct{ to, from *int }{
		{&t.begun, &o.begun}, {&t.renewed, &o.renewed}, {&t.taken, &o.taken}, {&t.freed, &o.freed}, {&t.runs, &o.runs},
		{&t.statements, &o.statements}, {&t.calmClaims, &o.calmClaims},
	} {
		*n.to += *n.from
	}
	if t.hours == nil {
		t.hours = make(map[time.Duration]float64)
	}
	for ttl, h := range o.hours {
		t.hours[ttl] += h
	}
	for _, m := range []struct{ to, from *map[string]int }{
		{&t.ends, &o.ends}, {&t.fenced, &o.fenced}, {&t.faults, &o.faults}, {&t.rows, &o.rows}, {&t.judged, &o.judged}, {&t.excused, &o.excused}, {&t.broken, &o.broken},
	} {
		testkit.MergeCounts(m.to, *m.from)
	}
}

func (t *tally) sessionHours() float64 {
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
	sum := 0.0
	for _, h := range t.hours {
		sum += h
	}
	fmt.Fprintf(&b, "%.0f virtual session-hours in %d arenas:", sum, t.arenas)
	for _, ttl := range slices.Sorted(maps.Keys(t.hours)) {
		fmt.Fprintf(&b, " %.0f h at a TTL of %v;", t.hours[ttl], ttl)
	}
	fmt.Fprintf(&b, "\n%d statements: %d sessions began, %d renewals landed, %d keys were claimed and %d freed; %d funcs ran; %d claims were held in the calm at the end\n",
		t.statements, t.begun, t.renewed, t.taken, t.freed, t.runs, t.calmClaims)
	for _, s := range []struct {
		what string
		m    map[string]int
	}{
		{"funcs told to return by", t.ends}, {"fenced writes", t.fenced}, {"faults", t.faults}, {"rows and workers", t.rows},
		{"judged", t.judged}, {"overlaps excused", t.excused}, {"rules broken", t.broken},
	} {
		fmt.Fprintf(&b, "%s: %s\n", s.what, testkit.FormatCounts(s.m))
	}
	return b.String()
}
