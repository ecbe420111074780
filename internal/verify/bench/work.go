package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// work is what a service does to its store while a lease is held: small writes.
// Between two handovers it keeps the disk and the processors of a machine that
// has nothing else to do from falling asleep, for all peers alike.
type work struct {
	write func(ctx context.Context) error
	close func()
}

func startWork(ctx context.Context, p peer, url string) (*work, error) {
	if p.etcd {
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{url}, Logger: zap.NewNop()})
		if err != nil {
			return nil, err
		}
		return &work{
			write: func(ctx context.Context) error { _, err := client.Put(ctx, "bench-work", "x"); return err },
			close: func() { client.Close() },
		}, nil
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	table := fmt.Sprintf("bench_work_%d", conn.PgConn().PID()) // each its own: some begin at the same time
	_, err = conn.Exec(ctx, fmt.Sprintf(`CREATE TABLE %s (n bigint); INSERT INTO %[1]s VALUES (0)`, table))
	if err != nil {
		conn.Close(ctx)
		return nil, err
	}
	return &work{
		write: func(ctx context.Context) error {
			_, err := conn.Exec(ctx, `UPDATE `+table+` SET n = n + 1`)
			return err
		},
		close: func() { conn.Close(context.WithoutCancel(ctx)) },
	}, nil
}
