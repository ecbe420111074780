package main

import (
	"context"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

var claimsQueueing = queueing{
	name: "claims",
	open: func(ctx context.Context, url string) (queue, error) { return openClaimsQueue(ctx, url, 30*time.Second) },
}

var claimedRows = claims.QueueConfig{Table: "tasks", Attempts: "attempts", NotBefore: "not_before", Ready: "status = 'queued'", Done: "status = 'done'"}

const tasksSchema = `CREATE TABLE IF NOT EXISTS tasks (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text NOT NULL DEFAULT 'queued', payload text NOT NULL DEFAULT 'the work to do');`

// claimsQueue works on rows by package claims.
type claimsQueue struct {
	pool    *pgxpool.Pool
	store   *tenure.PostgresStore
	session *session
	queue   *claims.Queue
	worker  *claims.Worker
}

// openClaimsQueue opens a queue whose session has begun.
func openClaimsQueue(ctx context.Context, url string, ttl time.Duration) (_ *claimsQueue, err error) {
	pool, err := queuePool(ctx, url)
	if err != nil {
		return nil, err
	}
	q := &claimsQueue{pool: pool}
	defer func() {
		if err != nil {
			pool.Close()
		}
	}()
	ddl, err := claimedRows.PostgresDDL()
	if err != nil {
		return nil, err
	}
	if _, err := pool.Exec(ctx, effectsSchema+";"+tasksSchema+ddl); err != nil {
		return nil, err
	}
	if q.store, err = tenure.NewPostgresStore(pool, tenureStore()); err != nil {
		return nil, err
	}
	if err := q.store.Migrate(ctx); err != nil {
		return nil, err
	}
	if err := claims.Migrate(ctx, q.store); err != nil {
		return nil, err
	}
	if q.session, err = newSession(q.store, ttl); err != nil {
		return nil, err
	}
	if q.queue, err = claims.NewQueue(q.store, claimedRows); err != nil {
		return nil, err
	}
	if q.worker, err = claims.NewWorker(q.session.Session, q.queue); err != nil {
		return nil, err
	}
	q.session.start(ctx)
	for !q.session.Valid() {
		if err := pause(ctx, time.Millisecond); err != nil {
			q.close()
			return nil, err
		}
	}
	return q, nil
}

func (q *claimsQueue) fill(ctx context.Context, n int) error {
	_, err := q.pool.Exec(ctx, `INSERT INTO tasks (status) SELECT 'queued' FROM generate_series(1, $1)`, n)
	return err
}

func (q *claimsQueue) work(ctx context.Context, n int, how manner) (time.Duration, error) {
	return workAll(ctx, n, func(taking context.Context) (int, error) {
		got, err := q.worker.Take(taking, how.size())
		if err != nil {
			return 0, err
		}
		if how == singlyTx {
			err = q.finish(ctx, got, "claims")
		} else {
			err = q.queue.Finish(ctx, got...)
		}
		return len(got), err
	})
}

// finish finishes rows and writes their effects.
func (q *claimsQueue) finish(ctx context.Context, got []claims.Claim, worker string) error {
	return q.queue.FinishPostgres(ctx, got, func(tx pgx.Tx) error {
		if len(got) == 1 {
			id, err := strconv.ParseInt(got[0].Key.ID, 10, 64)
			if err == nil {
				_, err = tx.Exec(ctx, insertEffect, id, worker)
			}
			return err
		}
		ids := make([]string, 0, len(got))
		for _, c := range got {
			ids = append(ids, c.Key.ID)
		}
		_, err := tx.Exec(ctx, `INSERT INTO effects SELECT id::bigint, $2 FROM unnest($1::text[]) id`, ids, worker)
		return err
	})
}

func (q *claimsQueue) close() {
	q.session.end()
	q.store.Close()
	q.pool.Close()
}

// held returns how many rows the session holds.
func (q *claimsQueue) held() (n int) {
	for _, k := range q.session.Status().Kinds {
		n += k.Claims
	}
	return n
}
