package queuehttp_test

import (
	"context"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims/queuehttp"
	"github.com/tenurelib/tenure/internal/testkit"
)

// The servers' database would otherwise wait for its disk once per heartbeat.
func TestHeartbeatsThatComeTogetherShareCommits(t *testing.T) {
	testkit.Slow(t)
	const workers, rounds = 200, 5
	w := onPostgres(t, tasks, testkit.PostgresURL(t))
	h := w.handler(queuehttp.Config{TTL: 10 * time.Minute})
	var sessions []in
	for range workers {
		_, out := ask(t, h, "begin", in{"holder": "w"})
		sessions = append(sessions, out.Session)
	}
	beat := func() {
		var all sync.WaitGroup
		for _, s := range sessions {
			all.Go(func() {
				if status, out := ask(t, h, "heartbeat", in{"session": s}); status != http.StatusOK {
					t.Errorf("%d %s", status, out.Error)
				}
			})
		}
		all.Wait()
	}
	beat() // the first one of a session takes two round trips
	before := w.commits()
	for range rounds {
		beat()
	}
	used := w.commits() - before
	t.Logf("%d heartbeats of %d workers took %d commits", workers*rounds, workers, used)
	require.Less(t, used, workers*rounds*4/5) // a fifth of it on a machine that has nothing else to do
}

// commits returns how many transactions the database has committed.
func (w *world) commits() (n int) {
	w.Helper()
	pool := w.store.(*tenure.PostgresStore).Pool()
	time.Sleep(1500 * time.Millisecond) // the server's processes report once a second
	require.NoError(w, pool.QueryRow(w.Context(), `SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()`).Scan(&n))
	return n
}

// However many workers wait, they cost the database one look per PollInterval, and get the rows that are added.
func TestWorkersThatWaitShareTheirLooks(t *testing.T) {
	testkit.Slow(t)
	const workers, tasksAtOnce = 300, 20
	cfg := leased
	cfg.PollInterval = time.Second
	w := onPostgres(t, cfg, testkit.PostgresURL(t))
	h := w.handler(queuehttp.Config{TTL: time.Minute})
	l := &wire{servers: map[string]http.Handler{"server": h}}
	w.Cleanup(l.carries.Wait)
	var done sync.WaitGroup
	for range workers {
		w.serve(l, 1, func(context.Context, queuehttp.Task) (any, error) { done.Done(); return nil, nil })
	}
	time.Sleep(time.Second)
	before, began := w.commits(), time.Now()
	time.Sleep(4 * time.Second)
	used, took := w.commits()-before, time.Since(began)
	t.Logf("%d workers that wait cost %d commits in %v", workers, used, took)
	require.Less(t, used, 40) // about two a second, and those of this test
	done.Add(tasksAtOnce)
	w.add(1, tasksAtOnce)
	done.Wait()
	w.awaitCount(tasksAtOnce, countDone)
}
