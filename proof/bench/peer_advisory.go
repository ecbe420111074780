package main

import (
	"context"
	"hash/fnv"
	"sync"

	"github.com/jackc/pgx/v5"
)

// advisoryPeer waits in the database, and its term ends with the connection. There is no
// TTL and no renewal, and a holder is not notified when its connection is gone.
var advisoryPeer = peer{
	name:  "advisory",
	about: "session advisory lock of Postgres, with a standby that waits for it",
	open: func(_ context.Context, o options) (*replica, error) {
		var conns sync.Map // of type *pgx.Conn: each lease has its own, which a standby keeps busy
		return &replica{
			contender: func(lease string) (contender, error) {
				conn, err := pgx.Connect(context.Background(), o.url)
				if err != nil {
					return nil, err
				}
				conns.Store(conn, true)
				hash := fnv.New64a()
				hash.Write([]byte(lease))
				return &handContender{key: &advisoryKey{conn, int64(hash.Sum64())}}, nil
			},
			close: func() {
				for conn := range conns.Range {
					conn.(*pgx.Conn).Close(context.Background())
				}
			},
		}, nil
	},
}

type advisoryKey struct {
	conn *pgx.Conn
	key  int64
}

// create waits until no other replica has the lock.
func (k *advisoryKey) create(ctx context.Context) (bool, error) {
	_, err := k.conn.Exec(ctx, `SELECT pg_advisory_lock($1)`, k.key)
	return err == nil, err
}

func (k *advisoryKey) awaitDeleted(context.Context) error { return nil }

func (k *advisoryKey) delete(ctx context.Context) error {
	_, err := k.conn.Exec(ctx, `SELECT pg_advisory_unlock($1)`, k.key)
	return err
}
