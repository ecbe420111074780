package databases_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// BenchmarkNewConnections measures what new connections of leases cost: the first acquire of a process, the first ones of
// twelve leases of a process at once, and how many renewals twelve leases do in a second while their connections are ended
// all the time.
func BenchmarkNewConnections(b *testing.B) {
	url := testkit.StartPostgres(b).URL()
	testkit.Migrate(b, testkit.OpenPostgres(b, url, tenure.PostgresConfig{}))
	admin := testkit.PostgresPool(b, url)
	const leases = 12
	terms := func(store tenure.Store, n int) (all []*tenure.Lease, held []*tenure.Term) {
		held = make([]*tenure.Term, n)
		var acquiring sync.WaitGroup
		for i := range n {
			all = append(all, testkit.NewLease(b, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}, TTL: time.Hour}))
			acquiring.Go(func() { held[i] = testkit.MustAcquire(b, all[i]) })
		}
		acquiring.Wait()
		return all, held
	}
	first := func(b *testing.B, n int) {
		var took []time.Duration
		for b.Loop() {
			testkit.ExecPostgres(b, admin, `DELETE FROM objects WHERE object_type = 'lease'`)
			store := testkit.OpenPostgres(b, url, tenure.PostgresConfig{})
			began := time.Now()
			terms(store, n)
			took = append(took, time.Since(began))
			require.NoError(b, store.Close())
		}
		b.ReportMetric(float64(testkit.Percentile(took, 50).Microseconds())/1000, "ms")
	}
	b.Run("first acquire", func(b *testing.B) { first(b, 1) })
	b.Run("twelve at once", func(b *testing.B) { first(b, leases) })
	b.Run("renewals while connections end", func(b *testing.B) {
		testkit.ExecPostgres(b, admin, `DELETE FROM objects WHERE object_type = 'lease'`)
		store := testkit.OpenPostgres(b, url, tenure.PostgresConfig{})
		all, held := terms(store, leases)
		var renewed atomic.Int64
		var took time.Duration
		for b.Loop() {
			ctx, cancel := context.WithTimeout(b.Context(), 3*time.Second)
			began := time.Now()
			var working sync.WaitGroup
			for i := range leases {
				working.Go(func() {
					for ctx.Err() == nil {
						if all[i].Renew(ctx, held[i]) == nil {
							renewed.Add(1)
						}
					}
				})
			}
			working.Go(func() {
				for ctx.Err() == nil {
					testkit.ExecPostgres(b, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tenure'`)
					testkit.Sleep(ctx, 200*time.Millisecond)
				}
			})
			working.Wait()
			cancel()
			took += time.Since(began)
		}
		b.ReportMetric(float64(renewed.Load())/took.Seconds(), "renewals/s")
	})
}
