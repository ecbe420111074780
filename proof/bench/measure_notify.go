package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/tenurelib/tenure"
)

var notifyMeasure = measure{
	name:  "notify",
	about: "commits of an application beside 1000 releases per second, with and without notifications; only if it is named",
	named: true,
	run:   measureNotify,
}

// measureNotify lets an application commit 1000 small transactions per second, alone, beside as many releases of
// leases that notify, and beside as many that don't. Postgres lets only one transaction that notifies commit at a time.
func measureNotify(ctx context.Context, b *bench) error {
	const measure, rate = "notify", 1000
	length := choose(b, 30*time.Second, 2*time.Second)
	before := load()
	for _, beside := range []struct {
		name         string
		leases, poll bool
	}{{"alone", false, false}, {"hints", true, false}, {"PollOnly", true, true}} {
		url, err := b.postgres.database(ctx)
		if err != nil {
			return err
		}
		commits, pairs, err := beside1000(ctx, url, rate, length, beside.leases, beside.poll)
		if err != nil {
			return fmt.Errorf("%s: %w", beside.name, err)
		}
		b.report.add(measure, beside.name, "commits", float64(len(commits))/length.Seconds(), "1/s", len(commits))
		b.report.addQuantiles(measure, beside.name, "commit", commits)
		if beside.leases {
			b.report.add(measure, beside.name, "acquires and releases", float64(len(pairs))/length.Seconds(), "1/s", len(pairs))
			b.report.addQuantiles(measure, beside.name, "acquire and release", pairs)
		}
		b.say("%s: %d commits, p50 %.2f ms, p99 %.2f ms; %d releases", beside.name, len(commits),
			milliseconds(percentile(commits, 50)), milliseconds(percentile(commits, 99)), len(pairs))
	}
	b.report.note(measure, "machine", "load average "+before+" before, "+load()+" after")
	return ctx.Err()
}

// beside1000 returns how long commits of the application took, and how long it took to acquire and release leases.
func beside1000(ctx context.Context, url string, rate int, length time.Duration, leases, poll bool) (commits, pairs []time.Duration, err error) {
	const workers = 20
	pool, err := pgxpool.New(ctx, url+"&pool_max_conns=20&pool_min_conns=20")
	if err != nil {
		return nil, nil, err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `CREATE TABLE accounts (id int PRIMARY KEY, n bigint NOT NULL); INSERT INTO accounts SELECT i, 0 FROM generate_series(1, 20) i`); err != nil {
		return nil, nil, err
	}
	store, err := tenure.OpenPostgres(ctx, url+"&pool_max_conns=20", tenure.PostgresConfig{PollOnly: poll})
	if err != nil {
		return nil, nil, err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return nil, nil, err
	}
	watch := store.Watch(tenure.Key{Type: "lease", ID: "1"}) // so that a connection listens, as in each process with a standby
	defer watch.Stop()
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	// repeat calls do at the rate, in turns of the workers. A call that takes longer than its turn makes up for it.
	repeat := func(into *[]time.Duration, do func(worker int) error) {
		every := time.Duration(workers) * time.Second / time.Duration(rate)
		for w := range workers {
			group.Go(func() error {
				var took []time.Duration
				began := time.Now().Add(every * time.Duration(w) / workers)
				for i := 0; time.Since(began) < length && ctx.Err() == nil; i++ {
					if wait := time.Until(began.Add(time.Duration(i) * every)); wait > 0 {
						time.Sleep(wait)
					}
					sent := time.Now()
					if err := do(w); err != nil {
						return err
					}
					took = append(took, time.Since(sent))
				}
				mu.Lock()
				defer mu.Unlock()
				*into = append(*into, took...)
				return nil
			})
		}
	}
	repeat(&commits, func(w int) error {
		_, err := pool.Exec(ctx, `UPDATE accounts SET n = n + 1 WHERE id = $1`, w+1)
		return err
	})
	if leases {
		var all [workers]*tenure.Lease
		for w := range workers {
			if all[w], err = tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(w)}}); err != nil {
				return nil, nil, err
			}
		}
		repeat(&pairs, func(w int) error {
			term, err := all[w].AcquireOrSteal(ctx)
			if err == nil {
				err = all[w].Release(ctx, term)
			}
			return err
		})
	}
	err = group.Wait()
	return commits, pairs, err
}
