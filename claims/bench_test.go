package claims_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// BenchmarkKeys claims new keys, releases them, claims them again while they are free, and then,
// in another session, when the first is gone. It reports the memory of a claim, without the key.
func BenchmarkKeys(b *testing.B) {
	const n = 100_000
	url := testkit.PostgresURL(b)
	store := testkit.OpenPostgres(b, url, tenure.PostgresConfig{})
	testkit.MigrateClaims(b, store)
	begin := func() (*claims.Keys, func()) {
		session, err := claims.NewSession(store, claims.SessionConfig{Logger: testkit.Quiet})
		require.NoError(b, err)
		keys, err := claims.NewKeys(session, "tenant")
		require.NoError(b, err)
		ctx, cancel := context.WithCancel(context.Background())
		returned := make(chan struct{})
		go func() { defer close(returned); _ = session.Run(ctx) }()
		return keys, func() { cancel(); <-returned }
	}
	for round := range b.N {
		ids := make([]string, n)
		for i := range ids {
			ids[i] = fmt.Sprintf("%d-%07d", round, i)
		}
		keys, stop := begin()
		rate := func(what string, do func()) {
			began := time.Now()
			do()
			b.ReportMetric(n/time.Since(began).Seconds(), what+"/s")
		}
		var got []claims.Claim
		claim := func() {
			var err error
			got, err = keys.TryClaim(b.Context(), ids...)
			require.NoError(b, err)
			require.Len(b, got, n)
		}
		heap := func() uint64 {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		before := heap()
		rate("new", claim)
		got = nil
		b.ReportMetric(float64(heap()-before)/n, "B/claim+key")
		stop()
		keys, stop = begin()
		rate("free", claim)
		rate("release", func() { require.NoError(b, keys.Release(b.Context(), got...)) })
		claim()
		rate("close", stop)
	}
}

// BenchmarkLook compares a million claims with their rows. It pauses for as long as each statement takes.
func BenchmarkLook(b *testing.B) {
	const n = 1_000_000
	store := testkit.OpenPostgres(b, testkit.PostgresURL(b), tenure.PostgresConfig{})
	testkit.MigrateClaims(b, store)
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: 10 * time.Minute, Logger: testkit.Quiet})
	require.NoError(b, err)
	keys, err := claims.NewKeys(session, "tenant")
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(context.Background())
	returned := make(chan struct{})
	go func() { defer close(returned); _ = session.Run(ctx) }()
	defer func() { cancel(); <-returned }()
	got, err := keys.TryClaim(b.Context(), names(n)...)
	require.NoError(b, err)
	require.Len(b, got, n)
	for b.Loop() {
		require.NoError(b, keys.LookAtAll())
	}
	require.Equal(b, n, keys.Len())
}

// BenchmarkFailover does what a session does once a failover has lost one in a hundred of its claims. It must be done in half
// of the time until the RenewDeadline: in 4.5 s at the default TTL, if a renewal was just due.
func BenchmarkFailover(b *testing.B) {
	for _, n := range []int{100_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			url := testkit.PostgresURL(b)
			store, admin := testkit.OpenPostgres(b, url, tenure.PostgresConfig{}), testkit.PostgresPool(b, url)
			testkit.MigrateClaims(b, store)
			session := testkit.Must(claims.NewSession(store, claims.SessionConfig{TTL: 10 * time.Minute, Logger: testkit.Quiet}))
			keys := testkit.Must(claims.NewKeys(session, "tenant"))
			ctx, cancel := context.WithCancel(context.Background())
			returned := make(chan struct{})
			go func() { defer close(returned); _ = session.Run(ctx) }()
			defer func() { <-returned }()
			defer cancel()
			got, err := keys.TryClaim(b.Context(), names(n)...)
			require.NoError(b, err)
			require.Len(b, got, n)
			testkit.ExecPostgres(b, admin, `VACUUM ANALYZE objects_claims`)
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				testkit.ExecPostgres(b, admin, `DELETE FROM objects_claims WHERE abs(hashtext(id)) % 100 = $1`, i%100)
				b.StartTimer()
				require.NoError(b, keys.Compare())
			}
			var rows int
			require.NoError(b, admin.QueryRow(b.Context(), `SELECT count(*) FROM objects_claims WHERE session = $1`, session.ID()).Scan(&rows))
			require.Equal(b, rows, keys.Len())
			require.Less(b, rows, n)
		})
	}
}
