package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/verify/pgtest"
)

// postgres is the server that all peers on Postgres share.
type postgres struct {
	url     string
	version string
	durable bool // fsync is on
	cleanup *cleanup

	mu   sync.Mutex // guards made, and cleanup once the server runs
	made int        // databases
}

// startPostgres starts a separate server that syncs to disk, as a production server does,
// or uses the one at url.
func startPostgres(ctx context.Context, url string) (p *postgres, err error) {
	p = &postgres{url: url, cleanup: &cleanup{}}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.url == "" {
		err := p.cleanup.catch(func() {
			p.url = pgtest.Cluster(p.cleanup, "fsync=on", "full_page_writes=on", "max_connections=400").URL()
		})
		if err != nil {
			return p, err
		}
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

// database creates an empty database, so that a measure is not affected by what earlier
// ones left behind. It is dropped at the end.
func (p *postgres) database(ctx context.Context) (string, error) {
	p.mu.Lock() // measures that run at the same time take turns
	defer p.mu.Unlock()
	conn, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	p.made++
	name := fmt.Sprintf("tenure_bench_%d_%d", os.Getpid(), p.made)
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return "", err
	}
	p.cleanup.Cleanup(func() { p.drop(name) })
	u, err := url.Parse(p.url)
	if err != nil {
		return "", err
	}
	u.Path = "/" + name
	return u.String(), nil
}

func (p *postgres) drop(name string) {
	ctx := context.Background() // the run's context may have been cancelled
	conn, err := pgx.Connect(ctx, p.url)
	if err == nil {
		defer conn.Close(ctx)
		_, err = conn.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)")
	}
	if err != nil {
		p.cleanup.Error(err)
	}
}

func (p *postgres) close() error {
	p.cleanup.run()
	return p.cleanup.err
}

// cleanup stands in for a test, because pgtest starts servers only for tests.
type cleanup struct {
	testing.TB // nil, because pgtest uses only the methods below
	funcs      []func()
	err        error
}

var errGivenUp = errors.New("given up")

// catch runs fn until it ends or fails.
func (c *cleanup) catch(fn func()) error {
	defer func() {
		if v := recover(); v != nil && v != errGivenUp {
			panic(v)
		}
	}()
	fn()
	return c.err
}

func (c *cleanup) Helper()           {}
func (c *cleanup) Cleanup(fn func()) { c.funcs = append(c.funcs, fn) }
func (c *cleanup) Error(args ...any) { c.err = errors.Join(c.err, errors.New(fmt.Sprint(args...))) }
func (c *cleanup) Fatal(args ...any) { c.Error(args...); panic(errGivenUp) }
func (c *cleanup) Skip(args ...any)  { c.Fatal(args...) }

// run calls the funcs in reverse order, as a test does.
func (c *cleanup) run() {
	for i := len(c.funcs) - 1; i >= 0; i-- {
		c.funcs[i]()
	}
	c.funcs = nil
}
