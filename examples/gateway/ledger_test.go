//go:build unix

package main

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"
)

// holding is one term during which a gateway's job ran, taken from its log. All gateways of
// a test are on one host, so their times can be compared.
type holding struct {
	replica string
	token   int64
	started time.Time
	stopped time.Time // zero if it still runs or was killed
}

var jobLine = regexp.MustCompile(`time=(\S+) .*msg="job (started|stopped)" token=(\d+)`)

// ledger returns the holdings of some gateways, which may have exited, in the order of
// their tokens.
func ledger(t *testing.T, gateways ...*gateway) (list []holding) {
	t.Helper()
	for _, g := range gateways {
		for _, match := range jobLine.FindAllStringSubmatch(g.log(), -1) {
			at, err := time.Parse(time.RFC3339, match[1])
			if err != nil {
				t.Fatal(err)
			}
			token, err := strconv.ParseInt(match[3], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			if match[2] == "started" {
				list = append(list, holding{replica: g.name, token: token, started: at})
			} else {
				list[len(list)-1].stopped = at // the last one is of the same gateway, which runs one job at a time
			}
		}
	}
	slices.SortFunc(list, func(a, b holding) int { return cmp.Compare(a.token, b.token) })
	return list
}

// settledLedger returns the ledger once all holdings but the last have ended. It waits,
// because log lines arrive with a delay.
func settledLedger(t *testing.T, gateways ...*gateway) (list []holding) {
	t.Helper()
	eventually(t, soon, "the logs show the end of every term but the last", func() bool {
		list = ledger(t, gateways...)
		return !slices.ContainsFunc(list[:max(0, len(list)-1)], func(h holding) bool { return h.stopped.IsZero() })
	})
	return list
}

// gaps returns, for each holding but the first, how long no job was running before it.
func gaps(t *testing.T, list []holding) (gaps []time.Duration) {
	t.Helper()
	for i, next := range list[1:] {
		gap := next.started.Sub(list[i].stopped)
		if list[i].stopped.IsZero() || gap < 0 {
			t.Errorf("the job of %+v started before that of %+v had stopped", next, list[i])
		}
		gaps = append(gaps, gap)
	}
	return gaps
}
