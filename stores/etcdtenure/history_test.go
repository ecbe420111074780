//go:build unix

package etcdtenure_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

var model = (&porcupine.NondeterministicModel{Init: testkit.HistoryInit, Step: testkit.HistoryStep}).ToModel()

func judge(operations []testkit.Operation) porcupine.CheckResult {
	var history []porcupine.Operation
	for _, op := range operations {
		history = append(history, porcupine.Operation{ClientId: op.Caller, Call: int64(op.Sent), Output: op.Call, Return: int64(op.Answered)})
	}
	return porcupine.CheckOperationsTimeout(model, history, 20*time.Second)
}

// judgeAll fails the test unless all histories are linearizable.
func judgeAll(t *testing.T, log *testkit.History) {
	t.Helper()
	log.Tell(t)
	for _, history := range log.Histories() {
		require.Equal(t, porcupine.Ok, judge(history))
	}
}

// TestHistoriesUnderFaultsAreLinearizable judges calls through each server, on some leases and the
// objects that they guard, while servers are killed, paused and cut off.
func TestHistoriesUnderFaultsAreLinearizable(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	const stores, callers, enough = 3, 3, 200 // callers of each store, so that they share requests
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log := testkit.NewHistory()
	var all sync.WaitGroup
	for n := range stores {
		urls := c.urls()
		if n > 0 { // it has one server, so that it stays with one that is cut off
			urls = urls[n : n+1]
		}
		store := open(t, urls...)
		for i := range callers {
			all.Go(func() { log.Use(ctx, n*callers+i, store) })
		}
	}
	for round := 0; round < 6 || log.Changes() < enough; round++ {
		n := c.leader(t)
		switch round % 3 {
		case 0:
			c.servers[n].kill()
			time.Sleep(300 * time.Millisecond)
			c.servers[n].begin(t)
		case 1:
			c.servers[n].pause(t)
			time.Sleep(time.Second)
			c.servers[n].resume(t)
		case 2:
			c.isolate(n)
			time.Sleep(time.Second)
			c.heal()
		}
		time.Sleep(500 * time.Millisecond)
	}
	cancel()
	all.Wait()
	judgeAll(t, log)
}

func TestAHistoryThatIsNotLinearizableIsNoticed(t *testing.T) {
	for what, example := range testkit.HistoryExamples() {
		require.Equal(t, example.Linearizable, judge(example.History()) == porcupine.Ok, what)
	}
}
