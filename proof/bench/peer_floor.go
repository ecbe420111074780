package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// floorPeer is the minimum that any peer on Postgres must do: insert, update and delete
// one row, each with one statement, and notify. It renews, expires and checks nothing.
var (
	floorPeer = peer{
		name:    "floor",
		about:   "bare statements on one row, and NOTIFY",
		prepare: prepareFloor,
		open: func(ctx context.Context, o options) (*replica, error) {
			return openFloor(ctx, o, false)
		},
	}
	floorAsyncPeer = peer{
		name:    "floor-async",
		about:   "the same, with a DELETE that does not wait for the disk",
		prepare: prepareFloor,
		open: func(ctx context.Context, o options) (*replica, error) {
			return openFloor(ctx, o, true)
		},
	}
)

func prepareFloor(ctx context.Context, url string) error {
	return execute(ctx, url, `
			CREATE TABLE IF NOT EXISTS floor (
				object_type      text   NOT NULL,
				id               text   NOT NULL,
				name             text,
				labels           jsonb,
				payload          bytea  NOT NULL,
				resource_version bigint NOT NULL,
				created_at_ms    bigint NOT NULL,
				updated_at_ms    bigint NOT NULL,
				PRIMARY KEY (object_type, id)
			) WITH (fillfactor = 50)`)
}

func openFloor(ctx context.Context, o options, async bool) (*replica, error) {
	pool, err := openPool(ctx, o)
	if err != nil {
		return nil, err
	}
	r := floorReplica{
		pool:   pool,
		remove: `DELETE FROM floor WHERE object_type = 'bench' AND id = $1`,
		removeAndNotify: `
			WITH gone AS (DELETE FROM floor WHERE object_type = 'bench' AND id = $1 RETURNING 1)
			SELECT pg_notify($1, '') FROM gone`,
	}
	if async {
		const quick = `WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))`
		r.remove = quick + `
			DELETE FROM floor USING quick WHERE object_type = 'bench' AND id = $1`
		r.removeAndNotify = quick + `,
			gone AS (DELETE FROM floor USING quick WHERE object_type = 'bench' AND id = $1 RETURNING 1)
			SELECT pg_notify($1, '') FROM gone`
	}
	return poolReplica(pool, func(lease string) (contender, error) { return &floorContender{floorReplica: r, name: lease}, nil }), nil
}

type floorReplica struct {
	pool                    *pgxpool.Pool
	remove, removeAndNotify string
}

type floorContender struct {
	floorReplica
	name string
	job  running

	resigned bool
	over     chan struct{} // closed when the row is gone
}

// floorPayload is as long as the record of a lease.
const floorPayload = `{"holder":"replica-0-12345678","acquired_at_ms":1700000000000,"term":"00000000-0000-4000-8000-000000000000","ttl_ms":30000}`

var errFloorHeld = errors.New("floor: the row is there")

func (c *floorContender) acquire(ctx context.Context) error { return c.insert(ctx, c.pool) }

func (c *floorContender) insert(ctx context.Context, db interface {
	QueryRow(context.Context, string, ...any) pgx.Row
}) error {
	var version int64
	err := db.QueryRow(ctx, `
		INSERT INTO floor (object_type, id, name, labels, payload, resource_version, created_at_ms, updated_at_ms)
		VALUES ('bench', $1, $1, '{}', $2, 1, 0, 0) ON CONFLICT DO NOTHING RETURNING resource_version`,
		c.name, []byte(floorPayload)).Scan(&version)
	if errors.Is(err, pgx.ErrNoRows) {
		return errFloorHeld
	}
	return err
}

func (c *floorContender) read(ctx context.Context) error {
	var version int64
	return c.pool.QueryRow(ctx, `SELECT resource_version FROM floor WHERE object_type = 'bench' AND id = $1`, c.name).Scan(&version)
}

func (c *floorContender) renew(ctx context.Context) error {
	var version int64
	return c.pool.QueryRow(ctx, `
		UPDATE floor SET resource_version = resource_version + 1, payload = $2
		WHERE object_type = 'bench' AND id = $1 RETURNING resource_version`,
		c.name, []byte(floorPayload)).Scan(&version)
}

func (c *floorContender) release(ctx context.Context) error {
	_, err := c.pool.Exec(ctx, c.remove, c.name)
	return err
}

// campaign inserts the row as soon as a notification says that it is gone.
func (c *floorContender) campaign(ctx context.Context, job func(context.Context)) error {
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	c.resigned = false
	if _, err := conn.Exec(ctx, `LISTEN `+pgx.Identifier{c.name}.Sanitize()); err != nil {
		return err
	}
	for {
		err := c.insert(ctx, conn)
		if err == nil {
			break
		}
		if !errors.Is(err, errFloorHeld) {
			return err
		}
		if _, err := conn.Conn().WaitForNotification(ctx); err != nil {
			return err
		}
	}
	c.over = make(chan struct{})
	defer close(c.over)
	c.job.run(ctx, job)
	if !c.resigned {
		return nil
	}
	// On the open connection, because nothing else should be measured here.
	_, err = conn.Exec(ctx, c.removeAndNotify, c.name)
	return err
}

func (c *floorContender) resign(context.Context) error {
	c.resigned = true
	c.job.stop()
	<-c.over
	return nil
}
