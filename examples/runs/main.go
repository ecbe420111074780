// Command runs drives durable runs: programs of several steps that survive the death, at any moment, of the
// process that drives them. A run is a row of a table. A driver that claims it reads its journal of what has
// happened so far, and continues from there. The journal is extended only under the claim: a driver that was
// paused, and has lost the run, adds nothing.
//
// The runs of this example are orders, which another system, the provider, charges and then ships. Calls are
// made as from an outbox: the journal first records that a call is about to be made, and after the call its
// outcome. A driver that finds a call without an outcome asks the provider what has become of it.
//
// The database is Postgres or a SQLite file; the URL decides.
//
//	export DATABASE_URL=postgres://… # or runs.db?shared=true
//	go run ./examples/runs -migrate
//	psql $DATABASE_URL -c "INSERT INTO runs (id) VALUES ('order 1'), ('order 2')"
//	go run ./examples/runs # in several terminals
//	psql $DATABASE_URL -c 'SELECT * FROM events'
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

const ttl = 5 * time.Second // short, to see a failover soon; the default is 30 s

var runs = claims.QueueConfig{
	Table: "runs", Attempts: "attempts", NotBefore: "not_before", Requested: "requested",
	Ready: "status = 'running'", Done: "status = 'done'",
}

func main() {
	url := flag.String("store", os.Getenv("DATABASE_URL"), "postgres:// `URL` or the path of a SQLite file; default: $DATABASE_URL")
	dir := flag.String("provider", os.TempDir(), "`directory` of the provider")
	atOnce := flag.Int("at-once", 8, "how many runs to drive at the same time")
	attach := flag.String("attach", "", "only drive the run with this `ID`, and take it from the process that drives it")
	creates := flag.Bool("migrate", false, "only create the tables")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	store, err := tenure.Open(ctx, *url)
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	if *creates {
		err = migrate(ctx, store)
	} else {
		err = drive(ctx, store, provider{*dir}, *atOnce, *attach)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// drive drives runs until ctx is done, or only the one to attach to. Any number of processes may do so at the same time.
func drive(ctx context.Context, store tenure.Database, provider provider, atOnce int, attach string) error {
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: ttl})
	if err != nil {
		return err
	}
	queue, err := claims.NewQueue(store, runs)
	if err != nil {
		return err
	}
	worker, err := claims.NewWorker(session, queue)
	if err != nil {
		return err
	}
	if err := queue.Check(ctx); err != nil { // the error says what migrate has not made
		return err
	}
	var errs [2]error
	var running sync.WaitGroup
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	running.Go(func() { errs[0] = session.Run(ctx) })
	work := func(ctx context.Context, c claims.Claim) error {
		return order(ctx, &journal{store: store, provider: provider, claim: c, events: make(map[string]string)})
	}
	running.Go(func() {
		if attach == "" {
			errs[1] = worker.Serve(ctx, atOnce, work)
			return
		}
		defer stop()
		c, err := worker.Attach(ctx, attach)
		if err == nil {
			err = worker.Do(ctx, c, func(ctx context.Context) error {
				if err := work(ctx, c); err != nil {
					return err
				}
				return queue.Finish(ctx, c)
			})
		}
		errs[1] = err
	})
	running.Wait()
	return errors.Join(errs[:]...)
}

// migrate creates the tables, once. A real program leaves this to its migration tool.
func migrate(ctx context.Context, store tenure.Database) error {
	columns, err := runs.PostgresDDL()
	if _, ok := store.(*tenure.SQLiteStore); ok {
		columns, err = runs.SQLiteDDL()
	}
	if err != nil {
		return err
	}
	if err := errors.Join(store.Migrate(ctx), claims.Migrate(ctx, store)); err != nil {
		return err
	}
	_, err = store.DB().ExecContext(ctx, `
		CREATE TABLE runs (id text PRIMARY KEY, status text NOT NULL DEFAULT 'running');
		CREATE TABLE events (
			run  text NOT NULL REFERENCES runs,
			name text NOT NULL,
			data text NOT NULL);
		`+columns)
	return err
}
