package main

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
)

// riverQueueing is River. It takes as many jobs at once as it has idle workers. It finishes jobs in
// batches after they have returned, or in a transaction of the job.
var riverQueueing = queueing{
	name: "river",
	open: func(ctx context.Context, url string) (queue, error) {
		q, err := openRiverQueue(ctx, url)
		return q, err
	},
}

type riverArgs struct{}

func (riverArgs) Kind() string { return "bench" }

type riverQueue struct {
	pool   *pgxpool.Pool
	driver *riverpgxv5.Driver
	adding *river.Client[pgx.Tx]
}

func openRiverQueue(ctx context.Context, url string) (*riverQueue, error) {
	pool, err := queuePool(ctx, url)
	if err != nil {
		return nil, err
	}
	q := &riverQueue{pool: pool, driver: riverpgxv5.New(pool)}
	migrator, err := rivermigrate.New(q.driver, &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
	if err == nil {
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	}
	if err == nil {
		_, err = pool.Exec(ctx, effectsSchema)
	}
	if err == nil {
		q.adding, err = river.NewClient(q.driver, &river.Config{Logger: slog.New(slog.DiscardHandler)})
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return q, nil
}

func (q *riverQueue) fill(ctx context.Context, n int) error {
	const most = 10_000 // at once
	for ; n > 0; n -= most {
		params := make([]river.InsertManyParams, min(n, most))
		for i := range params {
			params[i].Args = riverArgs{}
		}
		if _, err := q.adding.InsertManyFast(ctx, params); err != nil {
			return err
		}
	}
	return nil
}

// client returns a client that fetches as fast as River's own benchmark lets it.
func (q *riverQueue) client(workers int, work func(context.Context, *river.Job[riverArgs]) error, change func(*river.Config)) (*river.Client[pgx.Tx], error) {
	known := river.NewWorkers()
	river.AddWorker(known, river.WorkFunc(work))
	cfg := &river.Config{
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}},
		Workers:           known,
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Logger:            slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(cfg)
	}
	return river.NewClient(q.driver, cfg)
}

// work counts the time from the first job's beginning until the database says that all are completed.
func (q *riverQueue) work(ctx context.Context, n int, how manner) (took time.Duration, err error) {
	var began atomic.Pointer[time.Time]
	var worked atomic.Int64
	done := make(chan struct{})
	client, err := q.client(queueWorkers*how.size(), func(ctx context.Context, job *river.Job[riverArgs]) error {
		if began.Load() == nil {
			now := time.Now()
			began.CompareAndSwap(nil, &now)
		}
		var err error
		if how == singlyTx {
			err = pgx.BeginFunc(ctx, q.pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, insertEffect, job.ID, "river"); err != nil {
					return err
				}
				_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
				return err
			})
		}
		if worked.Add(1) == int64(n) {
			close(done)
		}
		return err
	}, nil)
	if err != nil {
		return 0, err
	}
	if err := client.Start(ctx); err != nil {
		return 0, err
	}
	defer func() {
		if stopErr := client.Stop(context.WithoutCancel(ctx)); err == nil {
			err = stopErr
		}
	}()
	if err := await(ctx, done); err != nil {
		return 0, err
	}
	for left := true; left; {
		err := q.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM river_job WHERE state = ANY('{available,running,retryable}'))`).Scan(&left)
		if err != nil {
			return 0, err
		}
		if left {
			if err := pause(ctx, 2*time.Millisecond); err != nil {
				return 0, err
			}
		}
	}
	return time.Since(*began.Load()), nil
}

func (q *riverQueue) close() { q.pool.Close() }

// riverAtOnce retries a rescued job at once, for the shortest time without a worker.
type riverAtOnce struct{}

func (riverAtOnce) NextRetry(*rivertype.JobRow) time.Time { return time.Now() }
