package databases_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// Contenders stall beyond their TTL, with fenced transactions that are open all the while,
// and that delay no renewal.
func TestNoFencedWriteOfATermFollowsTheNextTermUnderStress(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes 20 seconds")
	}
	const contenders, ttl = 4, 150 * time.Millisecond
	url := testkit.PostgresURL(t)
	testkit.Migrate(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	pool := testkit.PostgresPool(t, url+"&pool_max_conns=8")
	testkit.ExecPostgres(t, pool, `CREATE TABLE ledger (token bigint)`)
	var stores []*tenure.PostgresStore
	for range contenders {
		stores = append(stores, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	}

	var mu sync.Mutex // guards what follows
	seen := map[int64]int{}
	var terms, commits, refused, overtaken int
	var latencies []time.Duration
	count := func(n *int) {
		mu.Lock()
		defer mu.Unlock()
		*n++
	}

	work := func(ctx context.Context, store *tenure.PostgresStore, lease *tenure.Lease, ttl time.Duration) {
		for ctx.Err() == nil {
			term, err := lease.AcquireOrSteal(ctx)
			if err != nil {
				testkit.Sleep(ctx, 5*time.Millisecond)
				continue
			}
			// What earlier terms have written, now that they are over: this never changes.
			earlier := countBelow(t, pool, term.Token())
			mu.Lock()
			terms++
			seen[term.Token()] = earlier
			mu.Unlock()

			var renewals atomic.Int32 // of this term, that were answered
			var writes sync.WaitGroup
			for range 2 {
				writes.Go(func() {
					for ctx.Err() == nil {
						err := store.Fenced(context.Background(), term, func(tx pgx.Tx) error {
							if _, err := tx.Exec(context.Background(), `INSERT INTO ledger VALUES ($1)`, term.Token()); err != nil {
								return err
							}
							before := renewals.Load()
							time.Sleep(rand.N(8 * ttl / 3))
							if renewals.Load() >= before+2 { // so the second was sent meanwhile, too
								count(&overtaken)
							}
							return nil
						})
						if err != nil {
							count(&refused)
							return
						}
						count(&commits)
					}
				})
			}
			for ctx.Err() == nil {
				stall := 10 * time.Millisecond
				if rand.N(60) == 0 {
					stall = 2 * ttl
				}
				testkit.Sleep(ctx, stall)
				sent := time.Now()
				if err := lease.Renew(ctx, term); err != nil {
					break
				}
				renewals.Add(1)
				mu.Lock()
				latencies = append(latencies, time.Since(sent))
				mu.Unlock()
			}
			writes.Wait()
			if rand.N(2) == 0 {
				_ = lease.Release(context.Background(), term)
			}
		}
	}
	testkit.UntilEnough(t, 20*time.Second, func(ctx context.Context, slower time.Duration) {
		var all sync.WaitGroup
		for i, store := range stores {
			lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: fmt.Sprint("r", i), TTL: slower * ttl})
			all.Go(func() { work(ctx, store, lease, slower*ttl) })
		}
		all.Wait()
	}, func() bool { return terms >= 10 && commits >= 50 && refused >= 5 && overtaken >= 10 })
	for token, before := range seen {
		require.Equal(t, before, countBelow(t, pool, token), "rows of terms before %d, when it began and now", token)
	}
	t.Logf("%d terms, %d fenced commits, %d refused, %d overtaken by renewals", terms, commits, refused, overtaken)
	if len(latencies) > 0 {
		t.Logf("%d renewals: p50 %v, p99 %v", len(latencies), testkit.Percentile(latencies, 50), testkit.Percentile(latencies, 99))
	}
}

func countBelow(t *testing.T, db *pgxpool.Pool, token int64) (n int) {
	err := db.QueryRow(context.Background(), `SELECT count(*) FROM ledger WHERE token < $1`, token).Scan(&n)
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	return n
}
