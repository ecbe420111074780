package tenure_test

import (
	"context"
	"database/sql"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func BenchmarkIsHolder(b *testing.B) {
	acquired := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	c, err := tenure.NewCoordinator(testkit.NewLease(b, storetest.NewMem(), tenure.LeaseConfig{}), tenure.CoordinatorConfig{
		Reconcile: func(ctx context.Context) error { close(acquired); <-ctx.Done(); return nil },
	})
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx) }()
	<-acquired
	b.ReportAllocs()
	for b.Loop() {
		if !c.IsHolder() {
			b.Fatal("lost")
		}
	}
	cancel()
	<-done
}

// benchStores runs a benchmark on both databases.
func benchStores(b *testing.B, bench func(b *testing.B, store tenure.Store)) {
	b.Run("postgres", func(b *testing.B) {
		store := testkit.OpenPostgres(b, durable(b), tenure.PostgresConfig{})
		testkit.Migrate(b, store)
		bench(b, store)
	})
	b.Run("sqlite", func(b *testing.B) {
		store := testkit.OpenSQLite(b, b.TempDir()+"/bench.db")
		testkit.Migrate(b, store)
		bench(b, store)
	})
}

func BenchmarkRenew(b *testing.B) {
	benchStores(b, func(b *testing.B, store tenure.Store) {
		lease := testkit.NewLease(b, store, tenure.LeaseConfig{TTL: time.Hour})
		term := testkit.MustAcquire(b, lease)
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		b.ReportAllocs()
		for b.Loop() {
			if err := lease.Renew(ctx, term); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkAcquireAndRelease(b *testing.B) {
	benchStores(b, func(b *testing.B, store tenure.Store) {
		lease := testkit.NewLease(b, store, tenure.LeaseConfig{TTL: time.Hour})
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		b.ReportAllocs()
		for b.Loop() {
			term, err := lease.AcquireOrSteal(ctx)
			if err != nil {
				b.Fatal(err)
			}
			if err := lease.Release(ctx, term); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// durable returns a Postgres that writes to disk, as a service's does. Next to one that does
// not, everything else would look expensive.
func durable(b *testing.B) string {
	return testkit.StartPostgres(b, testkit.OnDisk).URL()
}

// BenchmarkTransaction alternates a transaction of one row with the same one fenced, so that
// the machine's moods affect both alike.
func BenchmarkTransaction(b *testing.B) {
	const write = `UPDATE ledger SET n = n + 1`
	ctx := context.Background()
	b.Run("postgres", func(b *testing.B) {
		url := durable(b)
		store := testkit.OpenPostgres(b, url, tenure.PostgresConfig{})
		testkit.Migrate(b, store)
		pool := testkit.PostgresPool(b, url)
		testkit.ExecPostgres(b, pool, `CREATE TABLE ledger (n bigint)`)
		testkit.ExecPostgres(b, pool, `INSERT INTO ledger VALUES (0)`)
		term := testkit.MustAcquire(b, testkit.NewLease(b, store, tenure.LeaseConfig{TTL: time.Hour}))
		fn := func(tx pgx.Tx) error { _, err := tx.Exec(ctx, write); return err }
		benchFenced(b,
			func() error { return pgx.BeginFunc(ctx, pool, fn) },
			func() error { return store.Fenced(ctx, term, fn) })
	})
	b.Run("sqlite", func(b *testing.B) {
		store := testkit.OpenSQLite(b, b.TempDir()+"/bench.db")
		testkit.Migrate(b, store)
		db := store.DB()
		for _, query := range []string{`CREATE TABLE ledger (n INTEGER)`, `INSERT INTO ledger VALUES (0)`} {
			if _, err := db.Exec(query); err != nil {
				b.Fatal(err)
			}
		}
		term := testkit.MustAcquire(b, testkit.NewLease(b, store, tenure.LeaseConfig{TTL: time.Hour}))
		fn := func(tx *sql.Tx) error { _, err := tx.ExecContext(ctx, write); return err }
		benchFenced(b,
			func() error {
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				if err := fn(tx); err != nil {
					return err
				}
				return tx.Commit()
			},
			func() error { return store.Fenced(ctx, term, fn) })
	})
}

func benchFenced(b *testing.B, unfenced, fenced func() error) {
	var took [2][]time.Duration
	for b.Loop() {
		for i, run := range []func() error{unfenced, fenced} {
			began := time.Now()
			if err := run(); err != nil {
				b.Fatal(err)
			}
			took[i] = append(took[i], time.Since(began))
		}
	}
	u, f := testkit.Percentile(took[0], 50), testkit.Percentile(took[1], 50)
	b.ReportMetric(float64(u.Microseconds()), "unfenced-p50-µs")
	b.ReportMetric(float64(f.Microseconds()), "fenced-p50-µs")
	b.ReportMetric(float64(f)/float64(u), "ratio")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkHeldCoordinator measures what a coordinator costs its process while it holds a
// lease: its memory, its goroutines beside the job's, and their stacks.
func BenchmarkHeldCoordinator(b *testing.B) {
	const n = 1000
	for b.Loop() {
		store := storetest.NewMem()
		ctx, cancel := context.WithCancel(context.Background())
		var running, all sync.WaitGroup
		running.Add(n)
		before, goroutines := heap(), runtime.NumGoroutine()
		for i := range n {
			lease := testkit.NewLease(b, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(i)}})
			c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
				Reconcile: func(ctx context.Context) error { running.Done(); <-ctx.Done(); return nil },
			})
			if err != nil {
				b.Fatal(err)
			}
			all.Go(func() { c.Run(ctx) })
		}
		running.Wait()
		after := heap()
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "heap-B")
		b.ReportMetric(float64(after.StackInuse-before.StackInuse)/n, "stack-B")
		b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n-1, "goroutines")
		cancel()
		all.Wait()
	}
	b.ReportMetric(0, "ns/op")
}

func heap() (stats runtime.MemStats) {
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return stats
}
