package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

// history is a phase in the making: what the ledger of the lease's record has, and what the replicas told. Times are in milliseconds.
type history struct {
	ledger  []entry
	events  []event
	faults  []*fault
	copied  []int64
	since   time.Duration
	expiry  tenure.ExpiryPolicy
	until   time.Duration
	version int64
}

// write adds a write of a record, in place of the last one; none deletes it.
func (h *history) write(at int, by, term, holder string, more string) {
	w := recordWrite{By: by, At: (h.since + time.Duration(at)*time.Millisecond).Microseconds(), Over: h.version, Stamp: 1_000_000 + int64(at)}
	h.version = 1000 + int64(at)
	e := entry{kind: ledgerVersion, lease: "singleton", term: term, token: h.version}
	if holder != "" {
		w.Payload = fmt.Sprintf(`{"holder":%q,"term":%q,"ttl_ms":1500%s}`, strings.TrimPrefix(holder, "to "), term, more)
	} else {
		e.token, h.version = w.Over, 0
	}
	h.ledger = append(h.ledger, e.of(w))
}

func (e entry) of(w recordWrite) entry {
	note, _ := json.Marshal(w)
	e.note = string(note)
	return e
}

func (h *history) tell(at int, replica, kind, term string, token int64, until int) {
	h.events = append(h.events, event{At: time.Duration(at) * time.Millisecond, Replica: replica, Kind: kind, Term: term, Token: token,
		Until: time.Duration(until) * time.Millisecond, Note: "singleton"})
}

// newHistory has a term of replica-a, which hands over to replica-b, which is killed, and replica-c, which steals.
func newHistory() *history {
	h := &history{since: time.Duration(time.Now().UnixNano()) - monotonic()}
	h.write(1000, "replica-a", "A", "replica-a", "")
	h.tell(1020, "replica-a", jobStarted, "A", 2000, 2440)
	h.write(1500, "replica-a", "A", "replica-a", "")
	h.tell(1520, "replica-a", renewed, "A", 0, 2940)
	h.ledger = append(h.ledger, entry{kind: ledgerFenced, term: "A", token: 2000})
	h.tell(1600, "replica-a", jobStopped, "A", 2000, 0)
	h.write(1620, "replica-a", "oa", "to replica-b", `,"offered":true`)
	h.write(1640, "replica-b", "B", "replica-b", "")
	h.tell(1660, "replica-b", jobStarted, "B", 2640, 3080)
	h.write(2100, "replica-b", "B", "replica-b", "")
	h.tell(2120, "replica-b", renewed, "B", 0, 3540)
	h.tell(2200, "replica-b", killed, "", 0, 0)
	h.write(3605, "replica-c", "C", "replica-c", "")
	h.tell(3620, "replica-c", jobStarted, "C", 4605, 5040)
	h.tell(3700, "replica-c", jobStopped, "C", 4605, 0)
	h.write(3720, "replica-c", "C", "", "")
	h.write(3740, "replica-a", "D", "replica-a", "")
	h.tell(3760, "replica-a", jobStarted, "D", 4740, 5180)
	return h
}

// judge returns what the rules refuse.
func (h *history) judge(task task) []string {
	r := &result{}
	p := &phase{ttl: ttl, expiry: h.expiry, task: task, record: &record{events: h.events, faults: h.faults, copied: h.copied}}
	r.checkBehaviour(p, &audit{ledger: h.ledger, versions: true, until: int64(h.until)})
	return r.violations
}

func TestAHistoryThatIsNoBehaviourOfTheRulesIsRefused(t *testing.T) {
	if got := newHistory().judge(useObjects); got != nil {
		t.Fatalf("a history that the rules allow is refused: %q", got)
	}
	// These are in the order of newHistory.
	const beginA, renewA, fencedA, offer, beginB, renewB, stealC, releaseC, beginD = 0, 1, 2, 3, 4, 5, 6, 7, 8
	const startA, renewedA, stopA, startB, renewedB, killB, startC, stopC, startD = 0, 1, 2, 3, 4, 5, 6, 7, 8
	rewrite := func(i int, change func(*entry, *recordWrite)) func(*history) {
		return func(h *history) {
			var w recordWrite
			_ = json.Unmarshal([]byte(h.ledger[i].note), &w)
			change(&h.ledger[i], &w)
			h.ledger[i] = h.ledger[i].of(w)
		}
	}
	earlier := func(i int, by time.Duration) func(*history) {
		return rewrite(i, func(_ *entry, w *recordWrite) { w.At -= by.Microseconds(); w.Stamp -= by.Milliseconds() })
	}
	const ms = time.Millisecond
	all := func(changes ...func(*history)) func(*history) {
		return func(h *history) {
			for _, change := range changes {
				change(h)
			}
		}
	}
	later := func(i int, by time.Duration) func(*history) { return func(h *history) { h.events[i].At += by } }
	copied := func(i int) func(*history) { return func(h *history) { h.copied = []int64{h.ledger[i].token} } }
	only := func(writes ...int) func(*history) {
		return func(h *history) {
			*h = history{since: h.since}
			for _, at := range writes {
				h.write(at, "replica-a", "A", "replica-a", "")
			}
		}
	}
	sooner := all(earlier(stealC, 500*ms), func(h *history) { h.events[startC].Until -= 500 * ms })
	moved := func(h *history) {
		h.faults = []*fault{{kind: clockMoved, from: 2300 * ms, begun: 2400 * ms, ending: 9000 * ms, to: 9000 * ms}}
	}
	aged := rewrite(stealC, func(_ *entry, w *recordWrite) { w.Stamp += 5000 })
	for name, test := range map[string]struct {
		change func(*history)
		rule   string // that refuses it; empty: none does
	}{
		"a steal 100 ms too early":                 {earlier(stealC, 100*ms), "L2"},
		"a steal at once":                          {earlier(stealC, 1300*ms), "L2"},
		"a steal that the database's clock allows": {all(sooner, aged), ""},
		"... but not where that does not count":    {all(sooner, aged, func(h *history) { h.expiry = tenure.ExpiryObserved }), "L2"},
		"a steal after the clock was moved":        {all(sooner, moved), ""},
		"a steal after the file was removed":       {all(sooner, func(h *history) { h.until = 3000 * ms }), ""},
		"an offer that another replica takes":      {rewrite(offer, func(_ *entry, w *recordWrite) { w.Payload = strings.Replace(w.Payload, "-b", "-c", 1) }), "L2"},
		"an offer to anyone":                       {rewrite(offer, func(_ *entry, w *recordWrite) { w.Payload = strings.Replace(w.Payload, "replica-b", "", 1) }), ""},
		"a begin over a version that never was":    {rewrite(stealC, func(_ *entry, w *recordWrite) { w.Over-- }), "compare-and-swap"},
		"a renewal over a version that is gone":    {rewrite(renewB, func(_ *entry, w *recordWrite) { w.Over -= 20 }), "compare-and-swap"},
		"a renewal by another replica":             {rewrite(renewA, func(_ *entry, w *recordWrite) { w.By = "replica-b" }), "L4"},
		"a release by another replica":             {rewrite(releaseC, func(_ *entry, w *recordWrite) { w.By = "replica-b" }), "L4"},
		"a release after a copy's renewal":         {all(copied(renewA), func(h *history) { h.events[renewedA].Until = 0 }), "L4"},
		"... if an answer was lost": {all(copied(renewA), func(h *history) {
			h.events[renewedA].Until = 0
			h.tell(1510, "replica-a", notRenewed, "A", 0, 0)
		}), ""},
		"a renewal after a copy's":               {all(only(1000, 1500, 2000), copied(1)), "L4"},
		"a renewal after one that came too late": {only(1000, 2470, 2600), "L1"},
		"... and one in time":                    {only(1000, 2430, 2600), ""},
		"a token that is used again":             {rewrite(beginD, func(e *entry, _ *recordWrite) { e.token = 4605 }), "I4"},
		"a token that was never issued":          {func(h *history) { h.events[startC].Token-- }, "I4"},
		"a payload that changes within a term":   {rewrite(renewA, func(_ *entry, w *recordWrite) { w.Payload += " " }), "no two terms"},
		"a term that begins twice":               {rewrite(beginD, func(_ *entry, w *recordWrite) { w.Payload = strings.Replace(w.Payload, "D", "A", 1) }), "no two terms"},
		"a release while the job runs":           {later(stopC, 100*ms), "L3"},
		"an offer while the job runs":            {later(stopA, 35*ms), "L3"},
		"a begin while the job runs": {all(rewrite(stealC, func(_ *entry, w *recordWrite) {
			w.By, w.Payload = "replica-b", strings.Replace(w.Payload, "replica-c", "replica-b", 1)
		}), func(h *history) { h.events[killB].Replica = "replica-c" }), "L3"},
		"a term that began before": {rewrite(renewB, func(_ *entry, w *recordWrite) {
			w.By, w.Payload = "replica-a", strings.NewReplacer("replica-b", "replica-a", `"B"`, `"A"`).Replace(w.Payload)
		}), "no two terms"},
		"a job that begins twice":                    {func(h *history) { h.events[renewedB] = h.events[startB]; h.events[renewedB].At += 300 * ms }, "L3"},
		"a job of a term that was released":          {later(startA, 700*ms), "L3"},
		"trust for the whole TTL":                    {func(h *history) { h.events[startB].Until = 3130 * ms }, "L1"},
		"trust from the answer":                      {func(h *history) { h.events[renewedA].Until = 2970 * ms }, "L1"},
		"a job that begins when the trust has ended": {func(h *history) { h.events[startD].At, h.events[startD].Until = 5300*ms, 5301*ms }, "L1"},
		"a fenced write after the release":           {func(h *history) { h.ledger[fencedA], h.ledger[offer] = h.ledger[offer], h.ledger[fencedA] }, "I3"},
	} {
		h := newHistory()
		test.change(h)
		got := h.judge(useObjects)
		if (test.rule == "") != (got == nil) || got != nil && !strings.Contains(got[0], test.rule) {
			t.Errorf("%s: got %q, want a refusal by %q", name, got, test.rule)
		}
	}
	h := newHistory()
	earlier(stealC, 500*ms)(h)
	if got := h.judge(useWitness); got != nil {
		t.Errorf("the rules have no witness, and refuse %q", got)
	}
}
