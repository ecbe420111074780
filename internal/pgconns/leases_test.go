package pgconns

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// PostgresURL is the kit's. TestMain sets it, because the kit imports this package.
var PostgresURL func(t testing.TB) string

// The server may have no slot for a new connection, so a call that is about to take a connection
// from a set must find one there, even while the set is being replaced.
func TestACallThatHasBegunFindsItsConnectionThoughTheyAreReplaced(t *testing.T) {
	config, err := pgxpool.ParseConfig(PostgresURL(t))
	require.NoError(t, err)
	pool := newLeases(config, leaseConns)
	defer pool.close()
	ctx := t.Context()
	old, _, err := pool.get(ctx)
	require.NoError(t, err)
	put := sync.OnceFunc(func() { pool.put(old) })
	defer put()
	pool.replace(ctx, old.Pool, time.Now())
	require.Eventually(t, func() bool { return !pool.is(old.Pool) && isRetired(pool, old) }, time.Minute, time.Millisecond)

	require.Never(t, func() bool { return old.Stat().TotalConns() == 0 }, 100*time.Millisecond, time.Millisecond)
	before := old.Stat().NewConnsCount()
	require.NoError(t, old.Ping(ctx))
	require.Equal(t, before, old.Stat().NewConnsCount(), "it had to connect")

	put()
	require.Eventually(t, func() bool { return old.Stat().TotalConns() == 0 }, time.Minute, time.Millisecond)
	require.ErrorContains(t, old.Ping(context.WithoutCancel(ctx)), "closed")
}

func TestEachSessionOfLeasesHasTheSettingsThatTheyNeed(t *testing.T) {
	config, err := pgxpool.ParseConfig(PostgresURL(t))
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pool := newLeases(config, leaseConns)
	defer pool.close()
	ctx := t.Context()
	for range 3 { // sets of connections
		set, _, err := pool.get(ctx)
		require.NoError(t, err)
		for range 2 {
			conn, err := set.Acquire(ctx)
			require.NoError(t, err)
			defer conn.Release()
			var commit string
			require.NoError(t, conn.QueryRow(ctx, `SHOW synchronous_commit`).Scan(&commit))
			require.Equal(t, "on", commit)
		}
		pool.mu.Lock()
		pool.replaced = time.Time{}
		require.True(t, pool.replaceLocked(ctx))
		pool.mu.Unlock()
		require.Eventually(t, func() bool { return !pool.is(set.Pool) }, time.Minute, time.Millisecond)
		pool.put(set)
	}
}

func TestACallFindsTheIdleConnectionAtAnyTime(t *testing.T) {
	config, err := pgxpool.ParseConfig(PostgresURL(t))
	require.NoError(t, err)
	config.HealthCheckPeriod, config.MaxConnIdleTime = time.Nanosecond, time.Nanosecond
	pool := newLeases(config, leaseConns)
	defer pool.close()
	set, _, err := pool.get(t.Context())
	require.NoError(t, err)
	defer pool.put(set)
	for range 1000 {
		require.NoError(t, set.Ping(t.Context()))
	}
	require.EqualValues(t, 1, set.Stat().NewConnsCount())
	require.Equal(t, leastIdle, set.Config().MaxConnIdleTime, "at the next health check it is not closed either")
	require.Equal(t, leastIdle, set.Config().HealthCheckPeriod, "a health check takes an idle connection away for a moment")
}

func isRetired(p *leases, conns *leaseSet) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return conns.retired
}

// is reports whether a pool is the current one.
func (l *leases) is(pool *pgxpool.Pool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.current != nil && l.current.Pool == pool
}
