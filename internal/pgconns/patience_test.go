package pgconns

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/objects"
)

// openConns opens connections to an empty database, at most that many for leases.
func openConns(t *testing.T, most int32) *Conns {
	config, err := pgxpool.ParseConfig(PostgresURL(t))
	require.NoError(t, err)
	config.MaxConns = most
	conns, err := Open(t.Context(), config)
	require.NoError(t, err)
	return conns
}

// A connection that is closed because its call has ended has to be reopened, which makes a slow server slower.
func TestAConnectionOutlivesACallWhoseAnswerComesLate(t *testing.T) {
	conns := openConns(t, 4)
	defer conns.Close(func() {})
	blocker, err := pgx.ConnectConfig(t.Context(), conns.Pool.Config().ConnConfig)
	require.NoError(t, err)
	defer blocker.Close(context.WithoutCancel(t.Context()))
	_, err = blocker.Exec(t.Context(), `SELECT pg_advisory_lock(1)`)
	require.NoError(t, err)

	ctx := objects.WithLeaseCall(t.Context())
	blocked, cancel := context.WithTimeout(ctx, time.Second/2)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- conns.QueryRow(blocked, `SELECT 1 FROM pg_advisory_lock(1)`, nil, new(int))
	}()
	waiting := func() (n int) {
		require.NoError(t, blocker.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted`).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return waiting() == 1 || blocked.Err() != nil }, time.Minute, time.Millisecond)
	// The server answers another call, so nothing is wrong with it.
	require.NoError(t, conns.QueryRow(ctx, `SELECT 1`, nil, new(int)))
	require.ErrorIs(t, <-ended, context.DeadlineExceeded)
	require.Equal(t, 1, waiting(), "the call has ended before its answer")

	set, _, err := conns.leases.get(ctx)
	require.NoError(t, err)
	defer conns.leases.put(set)
	_, err = blocker.Exec(t.Context(), `SELECT pg_advisory_unlock(1)`)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return set.Stat().IdleConns() == 2 }, 10*time.Second, time.Millisecond, "%d %d %d", set.Stat().IdleConns(), set.Stat().TotalConns(), set.Stat().NewConnsCount())
	require.EqualValues(t, 2, set.Stat().NewConnsCount())
	require.NoError(t, conns.QueryRow(ctx, `SELECT 1`, nil, new(int)))
	require.True(t, conns.leases.is(set.Pool), "the connections are not replaced")
	conns.leases.mu.Lock()
	defer conns.leases.mu.Unlock()
	require.Zero(t, conns.leases.replaced, "no replacement has begun")
}

func TestAConnectionWaitsForNoAnswerWhileItsPoolCloses(t *testing.T) {
	conns := openConns(t, 4)
	ctx := objects.WithLeaseCall(t.Context())
	require.NoError(t, conns.QueryRow(ctx, `SELECT 1`, nil, new(int)))
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- conns.QueryRow(ctx, `SELECT 1 FROM pg_sleep(3600)`, nil, new(int)) }()
	set, _, err := conns.leases.get(ctx)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return set.Stat().AcquiredConns() == 1 }, time.Minute, time.Millisecond)
	conns.leases.put(set)
	require.ErrorIs(t, <-ended, context.DeadlineExceeded)
	began := time.Now()
	conns.Close(func() {})
	require.Less(t, time.Since(began), patience)
}

// Otherwise an acquire that is given up would land, and its record would stand for a TTL.
func TestACancelledCallIsCancelledOnTheServer(t *testing.T) {
	conns := openConns(t, 4)
	defer conns.Close(func() {})
	_, err := conns.Pool.Exec(t.Context(), `CREATE TABLE landed (n int)`)
	require.NoError(t, err)
	lease := objects.WithLeaseCall(t.Context())
	require.NoError(t, conns.QueryRow(lease, `SELECT 1`, nil, new(int)))
	ctx, cancel := context.WithCancel(lease)
	ended := make(chan error, 1)
	go func() {
		ended <- conns.Write(ctx, Statement{SQL: `INSERT INTO landed SELECT 1 FROM pg_sleep(1) RETURNING n`, Dest: []any{new(int)}})
	}()
	sleeps := func() (n int) {
		require.NoError(t, conns.Pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()`).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return sleeps() == 1 }, time.Minute, time.Millisecond)
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Eventually(t, func() bool { return sleeps() == 0 }, time.Minute, time.Millisecond)
	var landed int
	require.NoError(t, conns.Pool.QueryRow(t.Context(), `SELECT count(*) FROM landed`).Scan(&landed))
	require.Zero(t, landed)
}

func TestHalfOfTheConnectionsWaitForNoLateAnswer(t *testing.T) {
	conns := openConns(t, 2)
	defer conns.Close(func() {})
	lease := objects.WithLeaseCall(t.Context())
	require.NoError(t, conns.QueryRow(lease, `SELECT 1`, nil, new(int)))
	set, _, err := conns.leases.get(lease)
	require.NoError(t, err)
	defer conns.leases.put(set)
	ctx, cancel := context.WithTimeout(lease, time.Second)
	defer cancel()
	ended := make(chan error, 2)
	for range 2 {
		go func() { ended <- conns.QueryRow(ctx, `SELECT 1 FROM pg_sleep(3600)`, nil, new(int)) }()
	}
	require.Eventually(t, func() bool { return set.Stat().AcquiredConns() == 2 }, time.Minute, time.Millisecond)
	for range 2 {
		require.ErrorIs(t, <-ended, context.DeadlineExceeded)
	}
	began := time.Now()
	require.NoError(t, set.Ping(lease))
	require.Less(t, time.Since(began), patience-patience/10, "both are waited for")
}

func TestTheConnectionsToASlowServerAreReplacedLessAndLessOften(t *testing.T) {
	config, err := pgxpool.ParseConfig(PostgresURL(t))
	require.NoError(t, err)
	pool := newLeases(config, leaseConns)
	defer pool.close()
	set, _, err := pool.get(t.Context())
	require.NoError(t, err)
	defer pool.put(set)
	unanswered := func(after time.Duration) bool {
		pool.mu.Lock()
		pool.suspected, pool.replaced = time.Now().Add(-after), time.Time{}
		pool.replacing = false
		current := pool.current.Pool
		pool.mu.Unlock()
		began := time.Now()
		pool.replace(t.Context(), current, began)
		pool.mu.Lock()
		defer pool.mu.Unlock()
		return !pool.suspected.Before(began)
	}
	require.True(t, unanswered(time.Hour))
	for pause := replaceAtMost; pause < replaceSlow; pause *= 2 {
		require.False(t, unanswered(pause-100*time.Millisecond))
		require.True(t, unanswered(pause), "%v after the last time", pause)
	}
	require.False(t, unanswered(replaceSlow-100*time.Millisecond))
	require.True(t, unanswered(replaceSlow))
	require.False(t, unanswered(replaceSlow-100*time.Millisecond), "it has doubled no more")
	require.True(t, unanswered(2*replaceSlow))
	require.True(t, unanswered(replaceAtMost), "as at the beginning")
}
