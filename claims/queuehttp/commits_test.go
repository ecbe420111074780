package queuehttp_test

import (
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
	w := onPostgres(t, testkit.PostgresURL(t))
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
	commits := func() (n int) {
		pool := w.store.(*tenure.PostgresStore).Pool()
		time.Sleep(1500 * time.Millisecond) // the server's processes report once a second
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()`).Scan(&n))
		return n
	}
	beat() // the first one of a session takes two round trips
	before := commits()
	for range rounds {
		beat()
	}
	used := commits() - before
	t.Logf("%d heartbeats of %d workers took %d commits", workers*rounds, workers, used)
	require.Less(t, used, workers*rounds*4/5) // a fifth of it on a machine that has nothing else to do
}
