package main

import (
	"context"
	"hash/fnv"

	"github.com/jackc/pgx/v5"
)

// advisoryPeer waits in the database, and its term ends with the connection. There is no
// TTL and no renewal, and a holder is not notified when its connection is gone.
var advisoryPeer = peer{
	name:  "advisory",
	about: "session advisory lock of Postgres, with a standby that waits for it",
	open: func(_ context.Context, o options) (replica, error) {
		return &advisoryReplica{url: o.url}, nil
	},
}

type advisoryReplica struct {
	url   string
	conns []*pgx.Conn
}

func (r *advisoryReplica) close() {
	for _, conn := range r.conns {
		conn.Close(context.Background())
	}
}

// contender opens a connection, which a standby keeps busy.
func (r *advisoryReplica) contender(name string) (contender, error) {
	conn, err := pgx.Connect(context.Background(), r.url)
	if err != nil {
		return nil, err
	}
	r.conns = append(r.conns, conn)
	hash := fnv.New64a()
	hash.Write([]byte(name))
	return &advisoryContender{conn: conn, key: int64(hash.Sum64())}, nil
}

type advisoryContender struct {
	conn *pgx.Conn
	key  int64
	job  running
}

func (c *advisoryContender) campaign(ctx context.Context, job func(context.Context)) error {
	if err := c.acquire(ctx); err != nil {
		return err
	}
	c.job.run(ctx, job)
	return nil
}

func (c *advisoryContender) resign(ctx context.Context) error {
	c.job.stop()
	return c.release(ctx)
}

func (c *advisoryContender) acquire(ctx context.Context) error {
	_, err := c.conn.Exec(ctx, `SELECT pg_advisory_lock($1)`, c.key)
	return err
}

func (c *advisoryContender) release(ctx context.Context) error {
	_, err := c.conn.Exec(ctx, `SELECT pg_advisory_unlock($1)`, c.key)
	return err
}
