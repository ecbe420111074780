package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// handQueueing is the loop that services write by hand. It refuses late results, as not all do.
var handQueueing = queueing{name: "hand-written", open: openHandQueue}

const handSchema = `
	CREATE TABLE hand_tasks (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text NOT NULL DEFAULT 'queued', payload text NOT NULL DEFAULT 'the work to do',
		locked_by text, locked_until timestamptz, attempts integer NOT NULL DEFAULT 0);
	CREATE INDEX ON hand_tasks (id) WHERE status = 'queued'`

const handTake = `
	UPDATE hand_tasks SET locked_by = $1, locked_until = clock_timestamp() + interval '30 s', attempts = attempts + 1
	WHERE id = ANY(ARRAY(
		SELECT id FROM hand_tasks WHERE status = 'queued' AND (locked_until IS NULL OR locked_until < clock_timestamp())
		ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED))
	RETURNING id, attempts`

const handFinish = `
	UPDATE hand_tasks SET status = 'done', locked_by = NULL, locked_until = NULL
	WHERE id = ANY($1) AND locked_by = $2 AND locked_until > clock_timestamp()`

type handQueue struct{ pool *pgxpool.Pool }

func openHandQueue(ctx context.Context, url string) (queue, error) {
	pool, err := queuePool(ctx, url)
	if err != nil {
		return nil, err
	}
	if _, err := pool.Exec(ctx, effectsSchema+";"+handSchema); err != nil {
		pool.Close()
		return nil, err
	}
	return &handQueue{pool}, nil
}

func (q *handQueue) fill(ctx context.Context, n int) error {
	_, err := q.pool.Exec(ctx, `INSERT INTO hand_tasks (status) SELECT 'queued' FROM generate_series(1, $1)`, n)
	return err
}

func (q *handQueue) work(ctx context.Context, n int, how manner) (time.Duration, error) {
	const worker = "hand-written"
	return workAll(ctx, n, func(taking context.Context) (int, error) {
		rows, err := q.pool.Query(ctx, handTake, worker, how.size())
		if err != nil {
			return 0, err
		}
		ids, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (id int64, err error) {
			return id, row.Scan(&id, new(int))
		})
		if err != nil {
			return 0, err
		}
		if len(ids) == 0 {
			return 0, pause(taking, 5*time.Millisecond)
		}
		if how == singly {
			tag, err := q.pool.Exec(ctx, handFinish, ids, worker)
			return len(ids), errors.Join(err, handLost(ids, tag.RowsAffected()))
		}
		return len(ids), pgx.BeginFunc(ctx, q.pool, func(tx pgx.Tx) error {
			tag, err := tx.Exec(ctx, handFinish, ids, worker)
			if err == nil {
				err = handLost(ids, tag.RowsAffected())
			}
			if err == nil && how == singlyTx {
				_, err = tx.Exec(ctx, insertEffect, ids[0], worker)
			}
			return err
		})
	})
}

func handLost(ids []int64, finished int64) error {
	if int(finished) != len(ids) {
		return errors.New("a row was lost")
	}
	return nil
}

func (q *handQueue) close() { q.pool.Close() }
