package main

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"cirello.io/pglock"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
)

var (
	pglockPeer    = pglockOver("pglock", "cirello.io/pglock over lib/pq", "postgres")
	pglockPgxPeer = pglockOver("pglock-pgx", "cirello.io/pglock over pgx", "pgx")
)

func pglockOver(name, about, driver string) peer {
	return peer{
		name:       name,
		about:      about,
		polls:      fastTTL,
		expires:    true,
		renews:     time.Second / 2,
		versionSQL: `SELECT record_version_number FROM locks WHERE name = $1`,
		prepare:    preparePglock,
		open:       func(ctx context.Context, o options) (*replica, error) { return openPglock(ctx, driver, o) },
	}
}

func preparePglock(_ context.Context, url string) error {
	db, err := sql.Open("postgres", url)
	if err != nil {
		return err
	}
	defer db.Close()
	client, err := pglock.New(db)
	if err != nil {
		return err
	}
	return client.TryCreateTable()
}

func openPglock(ctx context.Context, driver string, o options) (*replica, error) {
	db, err := sql.Open(driver, o.url)
	if err != nil {
		return nil, err
	}
	if o.conns > 0 {
		db.SetMaxOpenConns(o.conns)
		db.SetMaxIdleConns(o.conns)
	}
	if err := db.PingContext(ctx); err != nil {
		db.Close()
		return nil, err
	}
	client, err := pglock.UnsafeNew(db, pglockOptions(o)...)
	if err != nil {
		db.Close()
		return nil, err
	}
	return &replica{
		contender: func(lease string) (contender, error) { return &pglockContender{client: client, name: lease}, nil },
		close:     func() { db.Close() },
		exec:      func(ctx context.Context, sql string) error { _, err := db.ExecContext(ctx, sql); return err },
	}, nil
}

func pglockOptions(o options) []pglock.ClientOption {
	opts := []pglock.ClientOption{pglock.WithOwner(o.name)}
	switch o.timing {
	case fast:
		opts = append(opts, pglock.WithLeaseDuration(fastTTL), pglock.WithHeartbeatFrequency(time.Second/2))
	case brief:
		opts = append(opts, pglock.WithLeaseDuration(briefTTL), pglock.WithHeartbeatFrequency(0))
	case endless:
		opts = append(opts, pglock.WithLeaseDuration(time.Hour), pglock.WithHeartbeatFrequency(0))
	}
	return opts
}

type pglockContender struct {
	client *pglock.Client
	name   string
	lock   *pglock.Lock
	job    running
	over   chan struct{} // closed when Do has returned
}

func (c *pglockContender) campaign(ctx context.Context, job func(context.Context)) error {
	over := make(chan struct{})
	defer close(over)
	return c.client.Do(ctx, c.name, func(ctx context.Context, _ *pglock.Lock) error {
		c.over = over
		c.job.run(ctx, job)
		return nil
	})
}

// resign ends the job: Do releases the lock when its func returns.
func (c *pglockContender) resign(ctx context.Context) error {
	c.job.stop()
	return await(ctx, c.over)
}

func (c *pglockContender) acquire(ctx context.Context) (err error) {
	c.lock, err = c.client.AcquireContext(ctx, c.name, pglock.FailIfLocked())
	if err != nil {
		return fmt.Errorf("pglock: acquire %s: %w", c.name, err)
	}
	return nil
}

func (c *pglockContender) renew(ctx context.Context) error {
	return c.client.SendHeartbeat(ctx, c.lock)
}

func (c *pglockContender) release(ctx context.Context) error {
	return c.client.ReleaseContext(ctx, c.lock)
}
