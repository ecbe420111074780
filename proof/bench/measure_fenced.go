package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
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
	got, err := opened.(*claimsOwner).keys.Claim(ctx, keyNames("fenced", writers)...)
	if err != nil {
		return err
	}

	rounds, slice := choose(b, 10, 2), choose(b, time.Second, 200*time.Millisecond)
	write := func(worker int) func(pgx.Tx) error {
		return func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE balances SET cents = cents + 1 WHERE tenant = $1`, worker)
			return err
		}
	}
	ways := []func(context.Context, int) error{
		func(ctx context.Context, worker int) error { return pgx.BeginFunc(ctx, pool, write(worker)) },
		func(ctx context.Context, worker int) error { return store.Fenced(ctx, got[worker], write(worker)) },
	}
	var done [2]int
	err = inTurns(ctx, rounds, []int{0, 1}, func(_, way int) error {
		n, _, err := repeat(ctx, writers, slice, ways[way])
		done[way] += n
		return err
	})
	if err != nil {
		return err
	}
	bare, fenced := done[0], done[1]
	took := time.Duration(rounds) * slice
	b.report.add("fenced", "claims", "without a fence", float64(bare)/took.Seconds(), "transactions/s", bare)
	b.report.add("fenced", "claims", "with a fence", float64(fenced)/took.Seconds(), "transactions/s", fenced)
	b.report.add("fenced", "claims", "time with ÷ without", float64(bare)/float64(fenced), "", rounds)
	return nil
}
