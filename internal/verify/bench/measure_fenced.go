package main

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

var fencedMeasure = measure{
	name:  "fenced",
	about: "transactions of 16 writers of one session, each under its own claim, compared with the same without a fence",
	run:   measureFenced,
}

func measureFenced(ctx context.Context, b *bench) error {
	const writers = 16
	s, err := b.servers(ctx, []peer{tenurePeer})
	if err != nil {
		return err
	}
	url := withParameter(s[onPostgres], "pool_max_conns", "16")
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `CREATE TABLE balances (tenant int PRIMARY KEY, cents bigint NOT NULL)`); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, `INSERT INTO balances SELECT i, 0 FROM generate_series(0, $1) i`, writers); err != nil {
		return err
	}
	store, err := tenure.NewPostgresStore(pool, tenureStore())
	if err != nil {
		return err
	}
	opened, err := claimsOwnership.open(ctx, url, 30*time.Second)
	if err != nil {
		return err
	}
	defer opened.close()
	got, err := opened.(*claimsOwner).keys.Wait(ctx, keyNames("fenced", writers)...)
	if err != nil {
		return err
	}

	// In turns, so that changes of the machine's speed affect both.
	rounds, slice := 10, time.Second
	if b.quick {
		rounds, slice = 2, 200*time.Millisecond
	}
	var bare, fenced int64
	for i := range 2 * rounds {
		var done atomic.Int64
		errs := make([]error, len(got))
		var wg sync.WaitGroup
		began := time.Now()
		for w, claim := range got {
			write := func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `UPDATE balances SET cents = cents + 1 WHERE tenant = $1`, w)
				return err
			}
			wg.Go(func() {
				for errs[w] == nil && time.Since(began) < slice {
					if i%2 == 0 {
						errs[w] = pgx.BeginFunc(ctx, pool, write)
					} else {
						errs[w] = claims.FencedPostgres(ctx, store, claim, write)
					}
					done.Add(1)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
		if i%2 == 0 {
			bare += done.Load()
		} else {
			fenced += done.Load()
		}
	}
	took := time.Duration(rounds) * slice
	b.report.add("fenced", "claims", "without a fence", float64(bare)/took.Seconds(), "transactions/s", int(bare))
	b.report.add("fenced", "claims", "with a fence", float64(fenced)/took.Seconds(), "transactions/s", int(fenced))
	b.report.add("fenced", "claims", "time with ÷ without", float64(bare)/float64(fenced), "", rounds)
	return nil
}
