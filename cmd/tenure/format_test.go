//go:build unix

package main

import (
	"fmt"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit/golden"
)

func TestWhatTheCommandsPrintAsJSONStaysAsItIs(t *testing.T) {
	const term, session = "0b9c2f6e-7c39-4f3e-9d4e-2f1f4a5b6c7d", "5e1d0c4b-3a29-4817-8605-f4e3d2c1b0a9"
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	holding := tenure.Holding{
		Key: tenure.Key{Type: "lease", ID: "nightly"}, Holder: "replica-a", Term: term, Version: 1767323045678012,
		TTL: 30 * time.Second, AcquiredAt: at, RenewedAt: at.Add(time.Minute), Age: 2500 * time.Millisecond, Labels: map[string]string{"address": "10.0.0.1:8080"},
	}
	held := newLeaseView(holding, false)
	record := held
	record.Key = sessionKey(session).String()
	expired := held
	expired.State, expired.Clock, expired.AgeMS = stateExpired, clockOfHolder, 45000
	offered := holding
	offered.Holder, offered.OfferedTo, offered.Labels = "", "replica-b", nil
	free := leaseView{Key: "lease/nightly", State: stateFree}
	busy := holding
	busy.RunningSince = at.Add(time.Second)

	var got strings.Builder
	line := func(command string, v view) {
		fmt.Fprintf(&got, "%s\n", command)
		if err := (&options{json: true}).show(&output{stdout: &got}, v); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&got)
	}
	line("status --json", held)
	line("status --json", expired)
	line("status --json", newLeaseView(offered, false))
	line("status --json", free)
	line("status --json", newLeaseView(busy, false))
	line("status --json", leaseView{Key: "lease/nightly", State: stateExclusive, Exclusive: &soleProcess{PID: 4711, Program: "sweeper"}})
	line("list --json", leaseList{held})
	line("watch --json", change{at.Add(time.Hour), free})
	line("resign --json", requested{Key: "lease/nightly", Holder: "replica-a"})
	line("handover --json", requested{Key: "lease/nightly", Holder: "replica-a", To: "replica-b"})
	line("owner --json", ownerView{Key: "tenant/acme", State: stateHeld, Session: session, Token: 1767323045678000, leaseView: record})
	line("owner --json", ownerView{Key: "tenant/acme", State: stateUnused})
	line("list --sessions --json", sessionList{
		{Session: session, State: stateHeld, leaseView: record, Claims: []kindView{{Kind: "jobs", Claims: 3}, {Kind: "tenant", Claims: countClaimsTo, More: true}}},
		{Session: term, State: stateGone, leaseView: leaseView{Key: sessionKey(term).String()}, Claims: []kindView{{Kind: "jobs", Claims: 1}}},
	})
	line("doctor --json", &diagnosis{Server: "PostgreSQL 16.4, through a pooler in transaction mode", Fit: true, Renewals: 1890, RenewalP50: 1.25, RenewalP99: 3.5, WakeUp: 0.75,
		Clock: &clockReport{OffsetMS: -12, RatePercent: 0.002, UncertainPercent: 0.04}, TTL: 30,
		Findings: []finding{{levelNote, "pooler", "the pooler is in transaction mode, in which nobody can listen", "set PostgresConfig.ListenURL to the server itself, to have standbys woken"}}})
	line("migrate --json", migrated{Store: "jobs.db"})
	line("version --json", newVersionView(&debug.BuildInfo{GoVersion: "go1.26.0", Main: debug.Module{Version: "v1.0.0"}, Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "4f3e9d4e"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"},
	}}))
	golden.Compare(t, "json", got.String())
}
