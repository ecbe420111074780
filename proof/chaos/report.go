package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// writeReport writes a table of the faults and findings, with a column per phase.
func writeReport(w io.Writer, results []*result) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name string, cell func(*result) any) {
		cells := []string{name}
		for _, r := range results {
			cells = append(cells, fmt.Sprint(cell(r)))
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	row("", func(r *result) any { return r.phase })
	kinds := map[string]bool{}
	for _, r := range results {
		for kind := range r.faults {
			kinds[kind] = true
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		row("fault: "+kind, func(r *result) any { return r.faults[kind] })
	}
	row("terms", func(r *result) any { return r.terms })
	row("handover, ms", func(r *result) any { return spread(r.handovers) })
	row("failover after kill -9, ms", func(r *result) any { return spread(r.failovers) })
	row("of these by a witness, ms", func(r *result) any { return spread(r.releases) })
	row("no holder after a fault's end, ms", func(r *result) any { return spread(r.recoveries) })
	row("jobs that went on over a failover", func(r *result) any { return r.wentOn })
	row("fenced writes", func(r *result) any { return r.writes })
	row("late unfenced writes", func(r *result) any { return r.late })
	row("events allowed by the rules of leases", func(r *result) any { return r.allowed })
	row("renewals", func(r *result) any { return r.renewals })
	row("terms of other leases", func(r *result) any { return r.crowd })
	row("begun or released together", func(r *result) any { return r.together })
	row("claims of keys with a func", func(r *result) any { return r.claims })
	row("their funcs", func(r *result) any { return r.funcs })
	row("rows taken", func(r *result) any { return r.takes })
	row("rows finished", func(r *result) any { return r.effects })
	for _, outcome := range []string{answered, refused, unknown} {
		row("requests "+outcome, func(r *result) any { return r.requests[outcome] })
	}
	row("their answers, ms", func(r *result) any { return spread(r.waits) })
	row("tenants seen to move", func(r *result) any { return r.moved })
	row("operations on registers", func(r *result) any { return r.operations })
	row("operations with unknown outcome", func(r *result) any { return r.doubtful })
	row("register histories checked", func(r *result) any { return r.registers })
	row("not decided in time", func(r *result) any { return r.undecided })
	for _, why := range []string{excusePause, excuseClock, excuseRemoved, excuseStall} {
		row("overlaps: "+why, func(r *result) any {
			if r.overlaps[why] == 0 {
				return 0
			}
			return fmt.Sprintf("%d, to %v", r.overlaps[why], r.longest[why].Round(time.Millisecond))
		})
	}
	row("violations", func(r *result) any { return len(r.violations) })
	return table.Flush()
}

// spread formats the 50th, 90th and 99th percentiles, the maximum and the number of values.
func spread(times []time.Duration) string {
	if len(times) == 0 {
		return "-"
	}
	slices.Sort(times)
	at := func(percent int) int64 { return times[(len(times)*percent+99)/100-1].Milliseconds() }
	return fmt.Sprintf("p50 %d p90 %d p99 %d max %d (%d)", at(50), at(90), at(99), at(100), len(times))
}
