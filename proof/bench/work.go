package main

import (
	"cmp"
	"context"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5"
)

// work makes small writes, as a service does while it holds a lease. Between two handovers
// this keeps the disk and the CPUs of an otherwise idle machine from going to sleep, for
// all peers alike.
type work struct {
	write func(ctx context.Context) error
	close func()
}

func startWork(ctx context.Context, p peer, url string) (*work, error) {
	switch p.on {
	case onEtcd:
		client, err := etcdClient(url)
		if err != nil {
			return nil, err
		}
		return &work{
			write: func(ctx context.Context) error { _, err := client.Put(ctx, "bench-work", "x"); return err },
			close: func() { client.Close() },
		}, nil
	case onSQLite, onNATS, onMySQL: // where writes of one program delay those of others, or share their syncs
		file, err := os.CreateTemp("", "tenure-bench-work-")
		if err != nil {
			return nil, err
		}
		return &work{
			write: func(context.Context) error { _, err := file.WriteAt([]byte("x"), 0); return cmp.Or(err, file.Sync()) },
			close: func() { file.Close(); os.Remove(file.Name()) },
		}, nil
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	table := fmt.Sprintf("bench_work_%d", conn.PgConn().PID()) // a separate one for each, because several may start at the same time
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
