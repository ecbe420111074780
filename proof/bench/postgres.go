package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/testkit"
)

// postgres is the server that all peers on Postgres share.
type postgres struct {
	own     *testkit.PostgresServer // nil if the server was there before
	url     string
	version string
	durable bool // fsync is on

	mu   sync.Mutex // guards made
	made []string   // databases
}

// startPostgres starts a separate server that syncs to disk, as a production server does,
// or uses the one at url.
func startPostgres(ctx context.Context, url string) (p *postgres, err error) {
	p = &postgres{url: url}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.url == "" {
		if p.own, err = testkit.NewPostgres(testkit.OnDisk, "max_connections=400"); err != nil {
			return p, err
		}
		p.url = p.own.URL()
	}
	conn, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return p, err
	}
	defer conn.Close(ctx)
	err = conn.QueryRow(ctx, `
		SELECT current_setting('server_version'),
			current_setting('fsync')::bool AND current_setting('full_page_writes')::bool AND current_setting('synchronous_commit') <> 'off'`).
		Scan(&p.version, &p.durable)
	return p, err
}

// database creates an empty database, so that nothing that an earlier measure left behind affects
// this one. The database is dropped at the end.
func (p *postgres) database(ctx context.Context) (string, error) {
	p.mu.Lock() // measures that run at the same time take turns
	defer p.mu.Unlock()
	name := fmt.Sprintf("tenure_bench_%d_%d", os.Getpid(), len(p.made)+1)
	if err := execute(ctx, p.url, "CREATE DATABASE "+name); err != nil {
		return "", err
	}
	p.made = append(p.made, name)
	u, err := url.Parse(p.url)
	if err != nil {
		return "", err
	}
	u.Path = "/" + name
	return u.String(), nil
}

func execute(ctx context.Context, url, sql string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

// close removes the server if it was started here, and otherwise the databases.
func (p *postgres) close() error {
	if p.own != nil {
		return p.own.Close()
	}
	var err error
	for _, name := range p.made {
		err = errors.Join(err, execute(context.Background(), p.url, "DROP DATABASE "+name+" WITH (FORCE)")) // the run's context may have been cancelled
	}
	return err
}
