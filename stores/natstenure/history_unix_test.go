//go:build unix

package natstenure_test

import (
	"context"
	"flag"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
)

var faultRounds = flag.Int("faults", 1, "how often each fault happens to a cluster whose histories are judged")

var model = (&porcupine.NondeterministicModel{Init: testkit.HistoryInit, Step: testkit.HistoryStep}).ToModel()

func judge(operations []testkit.Operation) porcupine.CheckResult {
	var history []porcupine.Operation
	for _, op := range operations {
		history = append(history, porcupine.Operation{ClientId: op.Caller, Call: int64(op.Sent), Output: op.Call, Return: int64(op.Answered)})
	}
	return porcupine.CheckOperationsTimeout(model, history, 20*time.Second)
}

// judgeAll fails the test unless all histories are linearizable or, if reads may be outdated, their
// writes are.
func judgeAll(t *testing.T, log *testkit.History, mayBeOutdated bool) {
	t.Helper()
	log.Tell(t)
	for _, history := range log.Histories() {
		history = testkit.WithoutUnread(history)
		if mayBeOutdated {
			wrote := make(map[string]bool)
			for _, op := range history {
				wrote[op.Call.Value] = true
			}
			for _, op := range history {
				require.True(t, wrote[string(op.Call.Read.Payload)], "a read of a value that was never written")
			}
			history = testkit.OnlyWrites(history)
		}
		require.Equal(t, porcupine.Ok, judge(history))
	}
}

// faults has what happens to a server, and how it ends.
var faults = map[string]struct {
	mayBeOutdated bool
	cut, heal     func(*testing.T, *cluster, *child)
}{
	"killed": {
		false,
		func(_ *testing.T, _ *cluster, s *child) { s.kill() },
		func(t *testing.T, _ *cluster, s *child) { s.start(t) },
	},
	"paused": {
		true,
		func(t *testing.T, _ *cluster, s *child) { pause(t, s) },
		func(t *testing.T, _ *cluster, s *child) { resume(t, s) },
	},
	"partitioned": {
		true,
		func(_ *testing.T, c *cluster, s *child) { c.isolate(s) },
		func(_ *testing.T, c *cluster, _ *child) { c.heal() },
	},
}

// Callers use some leases, and the objects that these guard, through each server, while the
// stream's leader is killed, paused or cut off from the others. A deposed leader that does not know
// it yet answers reads.
func TestHistoriesUnderFaultsAreLinearizable(t *testing.T) {
	for what := range faults {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			histories(t, startCluster(t), natstenure.Config{Replicas: 3}, what)
		})
		t.Run(what+", in a bucket", func(t *testing.T) {
			t.Parallel()
			histories(t, startCluster(t), natstenure.Config{Bucket: "b", Replicas: 3}, what)
		})
	}
	for _, what := range []string{"killed", "paused"} {
		t.Run(what+", in a bucket on 2.11", func(t *testing.T) {
			t.Parallel()
			histories(t, startClusterOf(t, oldBinary(t, oldest)), natstenure.Config{Bucket: "b", Replicas: 3}, what)
		})
	}
}

func histories(t *testing.T, c *cluster, cfg natstenure.Config, what string) {
	if cfg.Bucket != "" {
		c.stream = "KV_" + cfg.Bucket
	}
	fault := faults[what]
	const callers, enough = 6, 60
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log := testkit.NewHistory()
	var all sync.WaitGroup
	for caller := range callers {
		urls := c.urls()
		if caller%2 == 0 { // the other callers have one server each, so that they stay with a server that is cut off
			urls = c.servers[caller/2].url
		}
		store := openOn(t, connect(t, urls), cfg)
		all.Go(func() { log.Use(ctx, caller, store) })
	}
	more := func() {
		before := log.Changes()
		testkit.Await(t, "writes are done", func() bool { return log.Changes() >= before+enough })
	}
	more()
	for range *faultRounds {
		leads := c.leader(t)
		fault.cut(t, c, leads)
		more()
		fault.heal(t, c, leads)
		more()
	}
	cancel()
	all.Wait()
	judgeAll(t, log, fault.mayBeOutdated)
}

func TestAHistoryThatIsNotLinearizableIsNoticed(t *testing.T) {
	for what, example := range testkit.HistoryExamples() {
		require.Equal(t, example.Linearizable, judge(example.History()) == porcupine.Ok, what)
	}
}
