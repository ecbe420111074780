package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

var attachMeasure = measure{
	name:  "attach",
	about: "how long a session takes to take a row from one of 1, 3 or 10 drivers that compete for it, three times a second, on Postgres and a SQLite file",
	run:   measureAttach,
}

var drivenRows = func() claims.QueueConfig {
	cfg := claimedRows
	cfg.Requested = "requested"
	return cfg
}()

func measureAttach(ctx context.Context, b *bench) error {
	for _, drivers := range []int{1, 3, 10} {
		url, err := b.postgres.database(ctx)
		if err != nil {
			return err
		}
		for _, on := range []struct{ name, url string }{{"Postgres", url}, {"SQLite", filepath.Join(b.files, b.name()+".db?shared=true")}} {
			if err := attachTo(ctx, b, fmt.Sprintf("%s, %d drivers", on.name, drivers), on.url, drivers); err != nil {
				return fmt.Errorf("%s, %d drivers: %w", on.name, drivers, err)
			}
		}
	}
	return nil
}

// driven is a table of rows that drivers compete for.
type driven struct {
	url   string
	begun [drivenCount + 1]atomic.Int64 // funcs, by the row
	told  atomic.Int64                  // funcs that were told to return
	work  errgroup.Group
	close []func()
}

const drivenCount = 20

// attachTo attaches to one row after another, and then lets the drivers have it again.
func attachTo(ctx context.Context, b *bench, name, url string, drivers int) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	d := &driven{url: url}
	defer func() {
		cancel()
		for _, end := range d.close { // the sessions first, which tells the funcs to return
			end()
		}
		_ = d.work.Wait()
	}()
	worker, err := d.open(ctx, true)
	if err != nil {
		return err
	}
	for range drivers {
		driver, err := d.open(ctx, false)
		if err != nil {
			return err
		}
		d.work.Go(func() error {
			return driver.Serve(ctx, drivenCount, func(ctx context.Context, c claims.Claim) error {
				id := 0
				_, _ = fmt.Sscan(c.Key.ID, &id)
				d.begun[id].Add(1)
				<-ctx.Done()
				d.told.Add(1)
				return context.Cause(ctx)
			})
		})
	}
	var took []time.Duration
	interrupted := int64(0)
	for n := range b.samples(200) {
		id := 1 + n%drivenCount
		for d.begun[id].Load() < int64(1+n/drivenCount) {
			if err := pause(ctx, time.Millisecond); err != nil {
				return err
			}
		}
		// The hints of a SQLite file are limited to 20 a second, beyond the first few.
		if err := pause(ctx, 300*time.Millisecond); err != nil {
			return err
		}
		before, began := d.told.Load(), time.Now()
		c, err := worker.Attach(ctx, fmt.Sprint(id))
		if err != nil {
			return err
		}
		took = append(took, time.Since(began))
		interrupted = max(interrupted, d.told.Load()-before)
		if err := worker.Release(ctx, c); err != nil {
			return err
		}
	}
	b.report.addQuantiles("attach", name, "attach", took)
	b.report.add("attach", name, "interruptions of a row, at most", float64(interrupted), "", len(took))
	return nil
}

// open returns a worker of a session of its own, which has begun. The first one makes the tables.
func (d *driven) open(ctx context.Context, first bool) (*claims.Worker, error) {
	store, err := tenure.Open(ctx, d.url)
	if err != nil {
		return nil, err
	}
	d.close = append(d.close, func() { store.Close() })
	if first {
		ddl, err := drivenRows.PostgresDDL()
		table := tasksSchema
		if _, ok := store.(*tenure.SQLiteStore); ok {
			ddl, err = drivenRows.SQLiteDDL()
			table = `CREATE TABLE tasks (id INTEGER PRIMARY KEY, status text NOT NULL DEFAULT 'queued', payload text);`
		}
		if err := errors.Join(err, store.Migrate(ctx), claims.Migrate(ctx, store)); err != nil {
			return nil, err
		}
		if _, err := store.DB().ExecContext(ctx, table+ddl); err != nil {
			return nil, err
		}
		for range drivenCount {
			if _, err := store.DB().ExecContext(ctx, `INSERT INTO tasks (status) VALUES ('queued')`); err != nil {
				return nil, err
			}
		}
	}
	session, err := claims.NewSession(store, claims.SessionConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	over := make(chan error, 1)
	go func() { over <- session.Run(running) }()
	d.close = append([]func(){func() { stop(); <-over }}, d.close...)
	queue, err := claims.NewQueue(store, drivenRows)
	if err != nil {
		return nil, err
	}
	return claims.NewWorker(session, queue)
}
